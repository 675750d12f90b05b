//! Batched matrix products.

mod gpu;

use crate::cpu::Pool;
use crate::cpu::gemm::{
    BatchedMatrixMut, BatchedMatrixRef, Epilogue, batched_gemm, batched_gemm_with_epilogue,
};
use crate::dtype::{Element, Float};
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{operands, write};
use crate::strides::Strides;

/// c_g = a_g b_g for every g.
///
/// - in: a (g, m, k), b (g, k, n), one float dtype, any strides (0 shares one matrix among all g)
/// - out: c (g, m, n), same dtype, any strides without overlap
///
/// The sum over k is formed in the accumulator, in the order that [`crate::cpu::gemm`] states (it depends on k only), and rounded once;
/// k = 0 gives zeros. The error of a sum is half an ulp of the accumulator, at the sum of the magnitudes of its terms,
/// per term of a block and per block: on a CPU (256 + k / 256) / 2 ulps, which long sums of equal terms approach; the bound is that of
/// terms of changing signs. On CPUs with bf16 dot products, and only there, subnormal bf16 count as 0. The same holds for f32 under a
/// [`MatmulPrecision`](crate::MatmulPrecision) that rounds it; the bound is that of the highest. Counted: 2 g m n k.
#[doc(alias = "bmm")]
#[doc(alias = "gemm")]
pub static BATCHED_MATMUL: Kernel = Kernel {
    name: "batched_matmul",
    reference: plain,
    cpu: Some(fast),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::batched_matmul }),
    flops: |launch| 2 * launch.inputs[0].view.numel() as u64 * launch.outputs[0].view.shape[2] as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// [`BATCHED_MATMUL`] in plain arithmetic on GPUs, for products that the library of the device refuses. Sums are accumulated in the order of k.
#[cfg(any(test, feature = "cuda"))]
pub(crate) static TILED_MATMUL: Kernel =
    Kernel { gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::tiled }), ..BATCHED_MATMUL };

fn strides(view: &Strides) -> [usize; 3] {
    view.strides[..].try_into().expect("the contract asks for three dims")
}

fn fast(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b], [c], _) = operands(launch);
    let [g, m, n] = c.view.shape[..] else { unreachable!("the contract asks for three dims") };
    let dims = [g, m, n, a.view.shape[2]];
    debug_assert!(
        a.view.shape[..] == [g, m, dims[3]] && b.view.shape[..] == [g, dims[3], n],
        "extents agree"
    );
    match_float!(a.dtype, T => {
        let memory = c.buffer.as_mut::<T>().expect("an output buffer has one handle");
        let data = if c.view.reach() == 0 { &mut [] } else { &mut memory[c.view.offset..] };
        batched_gemm(pool, dims, stack::<T>(a), stack::<T>(b), BatchedMatrixMut { data, strides: strides(c.view) });
    }, else return Err(KernelError::DType { kernel: BATCHED_MATMUL.name, dtype: a.dtype }));
    Ok(())
}

/// [`BATCHED_MATMUL`] into a contiguous c with an epilogue (see [`batched_gemm_with_epilogue`]).
pub(in crate::op) fn ended<T: Float>(
    pool: &Pool,
    [a, b]: [&Arg<'_>; 2],
    c: &mut ArgMut<'_>,
    other: Option<&mut ArgMut<'_>>,
    ending: &Epilogue<'_, T>,
) {
    let [g, m, n] = c.view.shape[..] else { unreachable!("the contract asks for three dims") };
    let dims = [g, m, n, a.view.shape[2]];
    batched_gemm_with_epilogue(pool, dims, stack(a), stack(b), write(c), other.map(write), ending);
}

fn stack<'a, T: Element>(x: &Arg<'a>) -> BatchedMatrixRef<'a, T> {
    let data = if x.view.reach() == 0 { &[] } else { &x.buffer.as_slice()[x.view.offset..] };
    BatchedMatrixRef { data, strides: strides(x.view) }
}

fn plain(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([a, b], [c], _) = operands(launch);
    let [g, m, n] = c.view.shape[..] else { unreachable!("the contract asks for three dims") };
    let place = |v: &Strides, i: [usize; 3]| v.offset + (0..3).map(|d| i[d] * v.strides[d]).sum::<usize>();
    match_float!(a.dtype, T => {
        let (x, y) = (a.buffer.as_slice::<T>(), b.buffer.as_slice::<T>());
        let to = c.buffer.as_mut::<T>().expect("an output buffer has one handle");
        for (p, i, j) in (0..g * m * n).map(|at| (at / (m * n), at / n % m, at % n)) {
            let term = |l| x[place(a.view, [p, i, l])].to_f64() * y[place(b.view, [p, l, j])].to_f64();
            to[place(c.view, [p, i, j])] = T::from_f64((0..a.view.shape[2]).map(term).sum());
        }
    }, else return Err(KernelError::DType { kernel: BATCHED_MATMUL.name, dtype: a.dtype }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, Kind, unit, values};

    fn case([g, m, n, k]: [usize; 4]) -> Case<'static> {
        let (a, b) = (values(1, g * m * k), values(2, g * k * n));
        Case::new(&BATCHED_MATMUL).input(&[g, m, k], &a).input(&[g, k, n], &b).scale(1.0)
    }

    #[test]
    fn matches_known_values() {
        let a = Value::real(&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
        let b = Value::real(&[2, 2, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, -1.0, 2.0, 0.5]);
        assert_eq!(evaluate(&BATCHED_MATMUL, &[a, b], &[&[2, 1, 2]], &[]).remove(0), [1.0, 2.0, 11.0, -1.0]);
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for [g, m, n, k] in
            [[1, 1, 1, 1], [3, 5, 7, 9], [2, 33, 17, 65], [1, 1, 130, 40], [1, 90, 1, 300], [40, 4, 4, 8]]
        {
            case([g, m, n, k]).output(&[g, m, n]).strided().run();
        }
        // Around the tile sizes of every instruction set and dtype.
        for [g, m, n, k] in [[1, 33, 31, 3], [2, 16, 65, 1], [1, 15, 64, 33], [1, 47, 34, 97]] {
            case([g, m, n, k]).output(&[g, m, n]).strided().run();
        }
        case([1, 150, 140, 70]).output(&[1, 150, 140]).run();
        // Rows of b as close as packed ones.
        case([1, 60, 32, 40]).output(&[1, 60, 32]).run();
        case([1, 60, 29, 300]).output(&[1, 60, 29]).run();
    }

    #[test]
    fn error_of_long_sums_of_equal_terms_is_as_documented() {
        let k = 1 << 20;
        for n in [1, 5, 40] {
            let case = Case::new(&BATCHED_MATMUL).input(&[1, 3, k], &vec![0.7; 3 * k]);
            let case = case.input(&[1, k, n], &vec![0.3; k * n]).output(&[1, 3, n]);
            let exact = k as f64 * f64::from(0.7f32) * f64::from(0.3f32);
            for got in case.fast(DType::F32).remove(0) {
                let off = (got - exact).abs() / unit(DType::F32, exact);
                assert!(off <= (256 + k / 256) as f64 / 2.0, "{off} units");
                assert!(off > BATCHED_MATMUL.bound.ulps, "{off} units are within the bound of shorter sums");
            }
        }
    }

    #[test]
    fn empty_extents() {
        for [g, m, n, k] in [[2, 3, 4, 0], [0, 3, 4, 5], [2, 0, 4, 5], [2, 3, 0, 5]] {
            case([g, m, n, k]).output(&[g, m, n]).run();
        }
    }

    #[test]
    fn outputs_of_any_strides_and_shared_matrices() {
        let into = |view: Strides| case([2, 20, 30, 10]).output_view(Kind::Tested, view, &[77.0; 4000]).run();
        into(Strides::contiguous(&[2, 30, 20]).permute(&[0, 2, 1]));
        into(Strides::contiguous(&[20, 2, 30]).permute(&[1, 0, 2]));
        into(Strides::contiguous(&[2, 20, 60]).narrow(2, 7, 37));
        let shared = Strides::contiguous(&[10, 30]).broadcast(&[4, 10, 30]).unwrap();
        let a = values(3, 4 * 6 * 10);
        let case = Case::new(&BATCHED_MATMUL).input(&[4, 6, 10], &a).input_view(
            Kind::Tested,
            shared,
            &values(4, 300),
        );
        case.output(&[4, 6, 30]).scale(1.0).run();
    }

    #[test]
    fn products_in_plain_arithmetic_match_the_reference() {
        let tiled = |[g, m, n, k]: [usize; 4]| {
            let case = Case::new(&TILED_MATMUL).input(&[g, m, k], &values(3, g * m * k)).scale(1.0);
            case.input(&[g, k, n], &values(4, g * k * n)).strided()
        };
        for [g, m, n, k] in [[1, 1, 1, 1], [2, 70, 5, 33], [3, 4, 66, 17], [1, 64, 128, 16], [2, 3, 4, 0]] {
            tiled([g, m, n, k]).output(&[g, m, n]).run();
        }
        let view = Strides::contiguous(&[2, 30, 20]).permute(&[0, 2, 1]);
        tiled([2, 20, 30, 10]).output_view(Kind::Tested, view, &[77.0; 1200]).run();
    }

    #[test]
    fn unsupported_dtypes_are_errors() {
        let refused = case([1, 2, 2, 2]).output(&[1, 2, 2]).verify(&[DType::I64]);
        assert!(refused.unwrap_err().contains("batched_matmul: no kernel for dtype i64"));
    }
}
