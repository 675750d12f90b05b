//! Tree reduction: one result from the operands of several ranks, combined in a fixed balanced tree over the operand number.

mod gpu;

use crate::cpu::{Pool, vectorized};
use crate::dtype::{DType, Element, Float, Real};
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::pointwise::TASK;
use crate::op::rows::{read, write};

/// Elements combined at a time: the partial results of a branch stay in the L1 cache.
const BLOCK: usize = 512;

/// How two elements are combined; floats are widened before and rounded after the whole tree.
trait Join: Sync {
    fn floats<R: Real>(a: R, b: R) -> R;
    fn integers(a: i64, b: i64) -> i64;
}

macro_rules! joins {
    ($($(#[$doc:meta])* $kernel:ident $join:ident $device_join:literal $name:literal |$a:ident, $b:ident| $float:expr, $integer:expr;)*) => {$(
        struct $join;
        impl Join for $join {
            #[inline(always)]
            fn floats<R: Real>($a: R, $b: R) -> R {
                $float
            }
            #[inline(always)]
            fn integers($a: i64, $b: i64) -> i64 {
                $integer
            }
        }
        $(#[$doc])*
        pub static $kernel: Kernel = Kernel {
            name: $name,
            reference: |_, launch| plain::<$join>($name, launch),
            cpu: Some(|pool, launch| fast::<$join>($name, pool, launch)),
            gpu: Some(GpuCode {
                source: gpu::SOURCE,
                plan: |launch, plan| {
                    gpu::plan(launch, plan, $device_join);
                    Ok(())
                },
            }),
            flops: |launch| launch.inputs.len().saturating_sub(1) as u64 * launch.outputs[0].view.numel() as u64,
            bytes: None,
            bound: Bound { ulps: 64.0 },
        };
    )*};
}

joins! {
    /// y = x_0 + x_1 + ... in a fixed tree: the sum of operands lo..hi is that of lo..mid plus that of mid..hi, where
    /// mid - lo is the largest power of two below hi - lo.
    ///
    /// - in: k operands of one shape and dtype (any float, i64, u8), contiguous, at any offset; k is at least 1
    /// - out: y, same shape and dtype, contiguous, at any offset
    ///
    /// 16-bit floats are combined in f32 and rounded once; integers wrap around.
    SUM Sum "Sum" "tree_sum" |a, b| a + b, a.wrapping_add(b);
    /// y = the largest of x_0, x_1, ...; NaN propagates. Operands as in [`SUM`].
    MAX Max "Larger" "tree_max" |a, b| nan_or(a, b, a > b), a.max(b);
    /// y = the smallest of x_0, x_1, ...; NaN propagates. Operands as in [`SUM`].
    MIN Min "Smaller" "tree_min" |a, b| nan_or(a, b, a < b), a.min(b);
}

/// Returns a if `wins` or a is NaN, else b.
#[inline(always)]
#[expect(clippy::eq_op, reason = "only not-a-number differs from itself")]
fn nan_or<R: Real>(a: R, b: R, wins: bool) -> R {
    if wins || a != a { a } else { b }
}

/// Returns where a run of `count` operands is cut into branches.
fn middle(count: usize) -> usize {
    count.next_power_of_two() / 2
}

fn plain<J: Join>(kernel: &'static str, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    fn tree<V: Copy>(values: &[V], join: fn(V, V) -> V) -> V {
        match values {
            [one] => *one,
            _ => {
                let (low, high) = values.split_at(middle(values.len()));
                join(tree(low, join), tree(high, join))
            }
        }
    }
    fn each<T: Element, V: Copy>(
        launch: &mut Launch<'_>,
        load: fn(T) -> V,
        join: fn(V, V) -> V,
        store: fn(V) -> T,
    ) {
        let operands: Vec<&[T]> = launch.inputs.iter().map(read::<T>).collect();
        for (i, y) in write::<T>(&mut launch.outputs[0]).iter_mut().enumerate() {
            *y = store(tree(&operands.iter().map(|x| load(x[i])).collect::<Vec<V>>(), join));
        }
    }
    match launch.outputs[0].dtype {
        DType::I64 => each::<i64, i64>(launch, |x| x, J::integers, |x| x),
        DType::U8 | DType::Bool => each::<u8, i64>(launch, i64::from, J::integers, |x| x as u8),
        dtype => match_float!(dtype, T => each::<T, f64>(launch, T::to_f64, J::floats, T::from_f64),
            else return Err(KernelError::DType { kernel, dtype })),
    }
    Ok(())
}

fn fast<J: Join>(kernel: &'static str, pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    match launch.outputs[0].dtype {
        DType::I64 => blocks::<i64, i64>(pool, launch, |x| x, J::integers, |x| x),
        DType::U8 | DType::Bool => {
            blocks::<u8, u8>(pool, launch, |x| x, |a, b| J::integers(i64::from(a), i64::from(b)) as u8, |x| x)
        }
        dtype => match_float!(dtype, T => blocks::<T, <T as Float>::Acc>(
            pool,
            launch,
            T::widen,
            J::floats,
            T::narrow,
        ), else return Err(KernelError::DType { kernel, dtype })),
    }
    Ok(())
}

/// Combines block after block, so that every operand is read once and no partial result leaves the cache.
fn blocks<T: Element, V: Element>(
    pool: &Pool,
    launch: &mut Launch<'_>,
    load: impl Fn(T) -> V + Sync + Copy,
    join: impl Fn(V, V) -> V + Sync + Copy,
    store: impl Fn(V) -> T + Sync + Copy,
) {
    let inputs = launch.inputs;
    let tree = Tree { operand: |i: usize| read::<T>(&inputs[i]), load, join };
    pool.chunks(write::<T>(&mut launch.outputs[0]), TASK, |i, y| {
        let mut sums = [V::default(); BLOCK];
        for (block, y) in y.chunks_mut(BLOCK).enumerate() {
            let sums = &mut sums[..y.len()];
            tree.of(0..inputs.len(), i * TASK + block * BLOCK, sums);
            vectorized(
                #[inline(always)]
                || y.iter_mut().zip(sums).for_each(|(y, sum)| *y = store(*sum)),
            );
        }
    });
}

struct Tree<O, L, J> {
    operand: O,
    load: L,
    join: J,
}

impl<O, L, J> Tree<O, L, J> {
    /// Combines the operands of `range` for the elements from `at` on.
    fn of<'a, T: Element, V: Element>(&self, range: std::ops::Range<usize>, at: usize, out: &mut [V])
    where
        O: Fn(usize) -> &'a [T],
        L: Fn(T) -> V,
        J: Fn(V, V) -> V,
    {
        let row = |i: usize| &(self.operand)(i)[at..][..out.len()];
        match range.len() {
            1 => {
                let x = row(range.start);
                vectorized(
                    #[inline(always)]
                    || out.iter_mut().zip(x).for_each(|(out, x)| *out = (self.load)(*x)),
                );
            }
            2 => {
                let pairs = row(range.start).iter().zip(row(range.start + 1));
                vectorized(
                    #[inline(always)]
                    || {
                        out.iter_mut()
                            .zip(pairs)
                            .for_each(|(out, (a, b))| *out = (self.join)((self.load)(*a), (self.load)(*b)))
                    },
                );
            }
            count => {
                let middle = range.start + middle(count);
                let mut right = [V::default(); BLOCK];
                let right = &mut right[..out.len()];
                self.of(range.start..middle, at, out);
                self.of(middle..range.end, at, right);
                vectorized(
                    #[inline(always)]
                    || out.iter_mut().zip(right).for_each(|(out, right)| *out = (self.join)(*out, *right)),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::finite_difference::{Value, evaluate, evaluate_as};
    use crate::op::kernel_check::{Case, Kind, values};
    use crate::strides::Strides;

    fn case(kernel: &Kernel, k: usize, n: usize) -> Case<'_> {
        (0..k).fold(Case::new(kernel), |case, i| {
            let view = Strides::contiguous(&[n]).at(7 * i);
            case.input_view(Kind::Tested, view, &values(i as u64, n + 7 * i + 2))
        })
    }

    #[test]
    fn matches_known_values() {
        let inputs: Vec<Value> =
            [[1.0, 9.0], [5.0, -9.0], [2.0, 0.5]].iter().map(|x| Value::real(&[2], x)).collect();
        let run = |kernel| evaluate(kernel, &inputs, &[&[2]], &[]).remove(0);
        assert_eq!(run(&SUM), [8.0, 0.5]);
        assert_eq!(run(&MAX), [5.0, 9.0]);
        assert_eq!(run(&MIN), [1.0, -9.0]);
        assert_eq!([2, 3, 4, 5, 8, 9].map(middle), [1, 2, 2, 4, 4, 8]);
    }

    #[test]
    fn fast_paths_match_the_reference() {
        let view = Strides::contiguous(&[1300]).at(3);
        for kernel in [&SUM, &MAX, &MIN] {
            for k in [1, 2, 3, 5, 8, 13] {
                let case = case(kernel, k, 1300).output_view(Kind::Tested, view.clone(), &[77.0; 1310]);
                case.run_for(&[DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64]);
            }
            case(kernel, 4, 0).output(&[0]).run();
            case(kernel, 3, 40_000).output(&[40_000]).run();
            let bytes = [200.0, 255.0, 3.0];
            let case = Case::new(kernel).input(&[3], &bytes).input(&[3], &[100.0, 1.0, 4.0]).output(&[3]);
            case.run_for(&[DType::U8]);
        }
    }

    #[test]
    fn tree_order_is_as_documented() {
        let x = [1e8f32, 1.0, -1e8, 1.0, 1.0, 1.0, 1.0];
        let inputs: Vec<Value> =
            x.iter().map(|&x| Value { dtype: DType::F32, ..Value::real(&[1], &[f64::from(x)]) }).collect();
        let got = evaluate_as(SUM.cpu.unwrap(), DType::F32, &inputs, &[&[1]], &[]).remove(0)[0] as f32;
        let tree = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + x[6]);
        assert_eq!(
            [got, x.iter().sum()],
            [tree, 4.0],
            "the numbers distinguish the tree from a sequential sum"
        );
        assert_eq!(tree, 3.0);
    }

    #[test]
    fn nan_propagates() {
        for kernel in [&SUM, &MAX, &MIN] {
            for place in 0..3 {
                let mut operands = [[1.0], [2.0], [3.0]];
                operands[place] = [f64::NAN];
                let case = operands.iter().fold(Case::new(kernel), |case, x| case.input(&[1], x));
                case.output(&[1]).run();
                let inputs = operands.map(|x| Value::real(&[1], &x));
                assert!(evaluate(kernel, &inputs, &[&[1]], &[])[0][0].is_nan(), "{} {place}", kernel.name);
            }
        }
    }
}
