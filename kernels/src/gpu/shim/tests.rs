//! Tests of the shim: block sums with planted bugs, which the shim must detect.

use super::*;
use crate::dtype::DType;
use crate::kernel::{Bound, GpuCode};
use crate::match_float;
use crate::op::kernel_check::{Case, Kind, values};
use std::io::Write as _;

/// One block sums 200 numbers; the macro `FAULT` plants a bug.
const SOURCE: &str = r#"
extern "C" __global__ void total(const T *x, T *y, int n) {
    __shared__ acc_t<T> parts[256];
    const u32 i = threadIdx.x;
#if FAULT == 5
    if (i >= 32) __syncthreads(); else __syncwarp();
#endif
    acc_t<T> sum = i < n ? widen(x[FAULT == 4 ? i + 1 : i]) : 0;
    parts[i] = sum;
#if FAULT != 1
    __syncthreads();
#endif
    for (u32 half = 128; half > 0; half /= 2) {
        if (i < half) parts[i] += parts[i + half];
#if FAULT != 2
        __syncthreads();
#endif
    }
    sum = block_reduce(sum, Sum(), acc_t<T>(0));
    if (i == 0 && fabs(double(sum - parts[0])) < 1e-3) y[FAULT == 3 ? 1 : 0] = narrow<T>(parts[0]);
    if (FAULT == 6) load<2>(x + 1);
}
"#;

fn kernel<const FAULT: usize>() -> Kernel {
    Kernel {
        name: "total",
        reference: |_, launch| {
            let ([x], [y]) = (launch.inputs, &mut launch.outputs) else { unreachable!() };
            match_float!(x.dtype, T => {
                let sum = x.buffer.as_slice::<T>().iter().map(|x| crate::dtype::Element::to_f64(*x)).sum();
                y.buffer.as_mut::<T>().unwrap()[0] = crate::dtype::Element::from_f64(sum);
                Ok(())
            }, else unreachable!())
        },
        cpu: None,
        gpu: Some(GpuCode {
            source: SOURCE,
            plan: |launch, plan| {
                let args = vec![GridArg::Input(0), GridArg::Output(0), GridArg::I32(200)];
                let args =
                    if FAULT == 7 { vec![args[0].clone(), args[1].clone(), GridArg::I64(200)] } else { args };
                let name = if launch.inputs[0].dtype == DType::F64 { "double" } else { "float" };
                let defines = vec![("T", name.into()), ("FAULT", FAULT.to_string().into())];
                let (blocks, threads) = ([1, 1, 1], 256);
                plan.grid(Grid { entry: "total", defines, blocks, threads, shared_bytes: 0, args });
                Ok(())
            },
        }),
        flops: |_| 0,
        bytes: None,
        bound: Bound { ulps: 64.0 },
    }
}

fn verdict<const FAULT: usize>() -> Result<(), String> {
    let kernel = kernel::<FAULT>();
    let case = Case::new(&kernel).input(&[200], &values(1, 200)).output_as(Kind::Tested, &[1]);
    case.scale(200.0).verify(&[DType::F32])
}

#[test]
fn missing_compilers_are_reported() {
    if !compiler_is_found() {
        writeln!(std::io::stderr(), "skipped: no g++, so no GPU kernel is run on the host").unwrap();
    } else if !occupancy::compiler_is_found() {
        writeln!(std::io::stderr(), "skipped: no NVRTC, so no kernel is compiled for GPUs").unwrap();
    }
}

#[test]
fn correct_kernel_passes_and_planted_bugs_are_found() {
    if !compiler_is_found() {
        return;
    }
    verdict::<0>().unwrap();
    for (what, found) in [
        ("a missing barrier", verdict::<1>()),
        ("a missing barrier in a loop", verdict::<2>()),
        ("a write out of bounds", verdict::<3>()),
        ("a read of the wrong element", verdict::<4>()),
        ("a barrier that some threads miss", verdict::<5>()),
        ("a misaligned vector", verdict::<6>()),
        ("an argument of another type", verdict::<7>()),
    ] {
        let message = found.expect_err(what);
        assert!(message.contains("total f32: GPU"), "{what}: {message}");
    }
    let messages = [verdict::<3>(), verdict::<5>(), verdict::<6>(), verdict::<7>()].map(Result::unwrap_err);
    for (message, part) in
        messages.iter().zip(["outside", "threads", "no multiple of 8", "the plan gives 'l'"])
    {
        assert!(message.contains(part), "{message}");
    }
}

/// The second of two blocks reads what the first writes for a while: whether it sees that depends on which blocks run together.
static SECOND_READS_FIRST: Kernel = Kernel {
    name: "second_reads_first",
    // An output holds 77 before the launch.
    reference: |_, _| Ok(()),
    cpu: None,
    gpu: Some(GpuCode {
        source: "extern \"C\" __global__ void pass(float *y) {\n\
                const bool first = blockIdx.x == 0;\n\
                if (first && threadIdx.x == 0) y[2] = 1.f;\n\
                if (!first && threadIdx.x == 0) y[1] = y[2];\n\
                __syncthreads();\n\
                if (first && threadIdx.x == 0) y[2] = 77.f;\n\
            }\n",
        plan: |_, plan| {
            let (args, defines, blocks) = (vec![GridArg::Output(0)], Vec::new(), [2, 1, 1]);
            plan.grid(Grid { entry: "pass", defines, blocks, threads: 64, shared_bytes: 0, args });
            Ok(())
        },
    }),
    flops: |_| 0,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

#[test]
fn dependence_between_blocks_is_found() {
    if !compiler_is_found() {
        return;
    }
    let case = Case::new(&SECOND_READS_FIRST).input(&[1], &[0.0]).output(&[3]);
    let mut buffer =
        crate::op::kernel_check::store(&crate::buffer::Allocator::default(), DType::F32, &[77.0; 3]);
    let view = crate::strides::Strides::contiguous(&[3]);
    for order in ORDERS {
        let mut outputs = [ArgMut { buffer: &mut buffer, dtype: DType::F32, view: &view }];
        run(&SECOND_READS_FIRST, &mut Launch { inputs: &[], outputs: &mut outputs, scalars: &[] }, order)
            .unwrap();
        let seen = buffer.as_slice::<f32>()[1];
        assert_eq!(seen == 1.0, order == ORDERS[2], "order {order}: {seen}");
    }
    let message = case.verify(&[DType::F32]).unwrap_err();
    assert!(message.contains("second_reads_first f32: GPU source"), "{message}");
}
