//! Gather and scatter-add along a (possibly sharded) dim.

mod cpu;
pub(in crate::op) mod gpu;

use crate::cpu::Pool;
use crate::dtype::{DType, Element};
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, GpuCode, Kernel, Launch};
use crate::op::rows::{check_indices, operands, read, write};
use crate::strides::Strides;
use crate::{match_dtype, match_float};

/// y_(a, n, c) = x_(a, i - v_start, c) with i = index_n or index_(a, n, c); zero if row i is on another rank.
///
/// - in: x `(a, v, c)`, any dtype, contiguous; index `(n)` or `(a, n, c)`, i64, contiguous
/// - out: y `(a, n, c)` like x, contiguous
/// - scalars: Int v_start, the first local index of the dim; Int v_global, the global extent of the dim
///
/// An index outside of `0..v_global` is [`KernelError::Index`]. Exact. Counted: no operations.
#[doc(alias = "index_select")]
#[doc(alias = "take_along_axis")]
pub static GATHER: Kernel = Kernel {
    name: "gather",
    reference: gather,
    cpu: Some(cpu::gather),
    gpu: Some(GpuCode {
        source: gpu::GATHER_SOURCE,
        plan: |launch, plan| {
            let (x, index) = (&launch.inputs[0], &launch.inputs[1]);
            indexed(launch, index, (launch.outputs[0].view, x.view), x.dtype).gather(plan, 0, 1);
            Ok(())
        },
    }),
    flops: |_| 0,
    bytes: Some(|launch| {
        // At most as many elements of x as there are indices.
        let (x, num_picked) = (&launch.inputs[0], launch.outputs[0].view.shape[1]);
        let view = x.view.narrow(1, 0, x.view.shape[1].min(num_picked));
        launch.operand_bytes() - x.bytes() + Arg { view: &view, ..*x }.bytes()
    }),
    bound: Bound { ulps: 0.0 },
};

/// dx_(a, i, c) = the sum of dy_(a, n, c) over all n whose index is v_start + i; zero where there is none.
///
/// - in: index as for [`GATHER`]; dy `(a, n, c)`, any float or i64, contiguous
/// - out: dx `(a, v, c)` like dy, contiguous
/// - scalars: as for [`GATHER`]
///
/// Each sum is formed in the accumulator, in the order of n, and rounded once; on GPUs hierarchically: sums of 32 terms, then sums of
/// 32 such sums, then of 32 of these. On CPUs t terms of one row may be off by t / 2 ulps of the accumulator
/// at the sum of their magnitudes, which is beyond the bound if there are more than 128. An index outside of `0..v_global` is
/// [`KernelError::Index`]. Counted: 1 operation per element of dy.
#[doc(alias = "index_add")]
pub static SCATTER_ADD: Kernel = Kernel {
    name: "scatter_add",
    reference: scatter_add,
    cpu: Some(cpu::scatter_add),
    gpu: Some(GpuCode {
        source: gpu::SCATTER_ADD_SOURCE,
        plan: |launch, plan| {
            let (index, dy, dx) = (&launch.inputs[0], &launch.inputs[1], &launch.outputs[0]);
            if !dy.dtype.is_float() && dy.dtype != DType::I64 {
                return Err(KernelError::DType { kernel: SCATTER_ADD.name, dtype: dy.dtype });
            }
            indexed(launch, index, (dy.view, dx.view), dy.dtype).scatter_add(plan, 0, 1);
            Ok(())
        },
    }),
    flops: |launch| launch.inputs[1].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// Views that the GPU code needs of a launch: of the picked and of the whole operand.
fn indexed(
    launch: &Launch<'_>,
    index: &Arg<'_>,
    (picked, whole): (&Strides, &Strides),
    dtype: DType,
) -> gpu::IndexLaunch {
    let [a, n, c] = picked.shape[..] else { panic!("the contract asks for three dims") };
    gpu::IndexLaunch {
        dtype,
        extents: [a, n, whole.shape[1], c],
        is_shared: index.view.ndim() == 1,
        starts: [launch.scalars[0].int(), launch.scalars[1].int()],
        offsets: [whole.offset, picked.offset],
    }
}

/// The extents and the indices of a launch.
struct LaunchPlan<'a> {
    a: usize,
    n: usize,
    v: usize,
    c: usize,
    index: &'a [i64],
    /// Whether all a and c share one list of indices.
    is_shared: bool,
    v_start: i64,
}

impl<'a> LaunchPlan<'a> {
    /// Derives the extents from the views of the picked `(a, n, c)` and the whole `(a, v, c)` operand.
    fn new(
        kernel: &'static str,
        index: &Arg<'a>,
        [picked, whole]: [&[usize]; 2],
        [v_start, v_global]: [i64; 2],
    ) -> Result<LaunchPlan<'a>, KernelError> {
        let is_shared = index.view.ndim() == 1;
        let index = read::<i64>(index);
        check_indices(kernel, index, v_global)?;
        let [a, n, c] = *picked else { panic!("the contract asks for three dims") };
        Ok(LaunchPlan { a, n, v: whole[1], c, index, is_shared, v_start })
    }

    /// Returns the local row of (a, n, c); `None` if it is on another rank.
    #[inline(always)]
    fn local(&self, row: usize, n: usize, c: usize) -> Option<usize> {
        let index = if self.is_shared { self.index[n] } else { self.index[row * self.c + c] };
        // A negative difference is large as unsigned.
        Some(index.wrapping_sub(self.v_start) as usize).filter(|&at| at < self.v)
    }
}

fn gather(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, index], [y], scalars) = operands(launch);
    let starts = [scalars[0].int(), scalars[1].int()];
    let plan = LaunchPlan::new(GATHER.name, index, [&y.view.shape, &x.view.shape], starts)?;
    match_dtype!(x.dtype, T => {
        let (x, y) = (read::<T>(x), write::<T>(y));
        for row in 0..plan.a * plan.n {
            for c in 0..plan.c {
                let at = plan.local(row, row % plan.n, c);
                y[row * plan.c + c] = at.map_or(T::default(), |v| x[(row / plan.n * plan.v + v) * plan.c + c]);
            }
        }
    });
    Ok(())
}

fn scatter_add(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([index, dy], [dx], scalars) = operands(launch);
    let starts = [scalars[0].int(), scalars[1].int()];
    let plan = LaunchPlan::new(SCATTER_ADD.name, index, [&dy.view.shape, &dx.view.shape], starts)?;
    match dy.dtype {
        DType::I64 => {
            sums(&plan, read::<i64>(dy), write::<i64>(dx), 0, |x| x, |a, b| a.wrapping_add(b), |x| x)
        }
        dtype => match_float!(dtype, T => {
            sums(&plan, read::<T>(dy), write::<T>(dx), 0.0, T::to_f64, |a, b| a + b, T::from_f64);
        }, else return Err(KernelError::DType { kernel: SCATTER_ADD.name, dtype })),
    }
    Ok(())
}

fn sums<T: Element, S: Copy>(
    plan: &LaunchPlan<'_>,
    dy: &[T],
    dx: &mut [T],
    zero: S,
    load: fn(T) -> S,
    add: fn(S, S) -> S,
    store: fn(S) -> T,
) {
    let mut sums = vec![zero; dx.len()];
    for row in 0..plan.a * plan.n {
        for c in 0..plan.c {
            if let Some(v) = plan.local(row, row % plan.n, c) {
                let sum = &mut sums[(row / plan.n * plan.v + v) * plan.c + c];
                *sum = add(*sum, load(dy[row * plan.c + c]));
            }
        }
    }
    dx.iter_mut().zip(sums).for_each(|(dx, sum)| *dx = store(sum));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, check_gradients, dot, evaluate};
    use crate::op::kernel_check::{Case, Kind, unit, values};

    const INDEX: Kind = Kind::Fixed(DType::I64);

    fn shard(v_start: i64, v_global: i64) -> [Scalar; 2] {
        [Scalar::Int(v_start), Scalar::Int(v_global)]
    }

    #[test]
    fn matches_known_values() {
        // Rows 1 and 2 of a dim of 4.
        let x = Value::real(&[2, 2, 1], &[1.0, 2.0, 3.0, 4.0]);
        let shared = Value::index(&[3], &[2.0, 0.0, 1.0]);
        let y = evaluate(&GATHER, &[x.clone(), shared.clone()], &[&[2, 3, 1]], &shard(1, 4)).remove(0);
        assert_eq!(y, [2.0, 0.0, 1.0, 4.0, 0.0, 3.0]);
        let own = Value::index(&[2, 2, 1], &[1.0, 1.0, 3.0, 2.0]);
        let y = evaluate(&GATHER, &[x, own.clone()], &[&[2, 2, 1]], &shard(1, 4)).remove(0);
        assert_eq!(y, [1.0, 1.0, 0.0, 4.0]);
        let dy = Value::real(&[2, 2, 1], &[1.0, 10.0, 100.0, 1000.0]);
        let dx = evaluate(&SCATTER_ADD, &[own, dy], &[&[2, 2, 1]], &shard(1, 4)).remove(0);
        assert_eq!(dx, [11.0, 0.0, 0.0, 1000.0]);
        let dy = Value::real(&[2, 3, 1], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let dx = evaluate(&SCATTER_ADD, &[shared, dy], &[&[2, 2, 1]], &shard(1, 4)).remove(0);
        assert_eq!(dx, [3.0, 1.0, 6.0, 4.0]);
    }

    #[test]
    fn fast_path_matches_the_reference() {
        let shapes = [
            [1, 1, 1, 1],
            [3, 5, 4, 2],
            [2, 40, 300, 1],
            [1, 50, 30, 700],
            [700, 3, 5, 1],
            [1, 5000, 40, 2],
            [3, 70, 9, 5],
            [4, 0, 3, 2],
            [2, 3, 0, 2],
            [0, 2, 2, 2],
            [2, 3, 3, 0],
        ];
        for [a, n, v, c] in shapes {
            for index_shape in [vec![n], vec![a, n, c]] {
                let count: usize = index_shape.iter().product();
                let index: Vec<f64> = (0..count).map(|i| ((i * i + 1) % (v + 9)) as f64).collect();
                let gather = Case::new(&GATHER)
                    .input(&[a, v, c], &values(1, a * v * c))
                    .input_as(INDEX, &index_shape, &index)
                    .output(&[a, n, c])
                    .scalars(&shard(3, 400));
                gather.run_for(&[DType::F64, DType::BF16, DType::I64, DType::Bool]);
                Case::new(&SCATTER_ADD)
                    .input_as(INDEX, &index_shape, &index)
                    .input(&[a, n, c], &values(2, a * n * c))
                    .output(&[a, v, c])
                    .scalars(&shard(3, 400))
                    .run_for(&[DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64]);
            }
        }
    }

    #[test]
    fn error_of_long_sums_of_equal_terms_is_as_documented() {
        const COUNT: usize = 100_000;
        for (shape, dtype) in [(vec![COUNT], DType::F32), (vec![1, COUNT, 2], DType::F32)] {
            let num_indices: usize = shape.iter().product();
            let case = Case::new(&SCATTER_ADD)
                .input_as(INDEX, &shape, &vec![1.0; num_indices])
                .input(&[1, COUNT, 2], &vec![0.1; 2 * COUNT])
                .output(&[1, 3, 2])
                .scalars(&shard(0, 3));
            let (got, exact) = (case.fast(dtype).remove(0), COUNT as f64 * f64::from(0.1f32));
            let off = (got[2] - exact).abs() / unit(dtype, exact);
            assert!(off <= COUNT as f64 / 2.0 && off > SCATTER_ADD.bound.ulps, "{off} units");
            assert_eq!([got[0], got[1], got[3]], [0.0, 0.0, got[2]]);
        }
    }

    #[test]
    fn index_out_of_range_is_an_error() {
        for bad in [-1.0, 10.0] {
            let index = [0.0, bad, 9.0];
            let case = Case::new(&GATHER).input(&[1, 4, 2], &values(1, 8)).input_as(INDEX, &[3], &index);
            let error = case.output(&[1, 3, 2]).scalars(&shard(0, 10)).verify(&[DType::F32]).unwrap_err();
            assert!(error.contains(&format!("index {bad} at position 1 is outside of 0..10")), "{error}");
            let case = Case::new(&SCATTER_ADD).input_as(INDEX, &[3], &index).input(&[1, 3, 2], &values(1, 6));
            case.output(&[1, 4, 2]).scalars(&shard(0, 10)).verify(&[DType::F32]).unwrap_err();
        }
    }

    #[test]
    fn backward_matches_finite_differences() {
        for (shape, index) in
            [(vec![2], vec![4.0, 2.0]), (vec![2, 2, 2], vec![1.0, 2.0, 1.0, 3.0, 0.0, 4.0, 2.0, 2.0])]
        {
            let inputs = [Value::real(&[2, 3, 2], &values(5, 12)), Value::index(&shape, &index)];
            let dy = Value::real(&[2, 2, 2], &values(6, 8));
            let given = [inputs[1].clone(), dy.clone()];
            let dx = evaluate(&SCATTER_ADD, &given, &[&[2, 3, 2]], &shard(1, 5)).remove(0);
            let loss = |x: &[Value]| dot(&evaluate(&GATHER, x, &[&[2, 2, 2]], &shard(1, 5))[0], &dy.data);
            check_gradients(&inputs, &[(0, dx)], loss).unwrap();
        }
    }
}
