//! Gated linear recurrences: h_t = a_t h_(t-1) + x_t for many independent lanes.

mod cpu;
mod gpu;

use crate::dtype::{DType, Element};
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{no_float, operands, operands_and_last, read, write};

/// h_t = a_t h_(t-1) + x_t along the middle dim, from h_(-1) = carry; reversed h_t = x_t + a_(t+1) h_(t+1), where the carry is the
/// product a_n h_n after the last step. The state is f64, and each result is rounded once (on
/// CPUs to f32 before it is rounded to 16 bits). Rows of few lanes are cut into chunks of
/// steps, which depend on the shape only.
///
/// - in: a and x (outer, steps, inner), one float dtype, contiguous
/// - in, optional: carry (outer, inner), f64, contiguous; without it, zero
/// - out: h, like a
/// - scalars: \[Int reversed (1 or 0)\]
///
/// Counted: 2 operations for each element.
pub static SCAN: Kernel = Kernel {
    name: "gated_scan",
    reference: |_, launch| {
        let reversed = is_reversed(launch);
        let ([a, x], carry, [h]) = operands_and_last(launch);
        let shape = Shape::of(a);
        match_float!(a.dtype, T => {
            let (a, x, h) = (read::<T>(a), read::<T>(x), write::<T>(h));
            let carry = carry.map(read::<f64>);
            for lane in 0..shape.lanes() {
                let mut state = carry.map_or(0.0, |carry| carry[lane]);
                for t in shape.order(reversed) {
                    let at = shape.at(lane, t);
                    let gate = a[at].to_f64();
                    let value = if reversed { state + x[at].to_f64() } else { gate * state + x[at].to_f64() };
                    state = if reversed { gate * value } else { value };
                    h[at] = T::from_f64(value);
                }
            }
            Ok(())
        }, else no_float(SCAN.name, a.dtype))
    },
    cpu: Some(cpu::scan),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::scan }),
    flops: |launch| 2 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// The map from the carry before a row to the carry after it, which is linear: carry' = p carry + c, with p the product of all a, and c
/// the carry after the row from a carry of zero. An infinite product of finite gates becomes the largest f64: times a carry of zero it
/// is then zero and not NaN.
///
/// - in: a and x (outer, steps, inner), one float dtype, contiguous
/// - out: p and c, stacked (2, outer, inner), f64, contiguous
/// - scalars: \[Int reversed (1 or 0)\], as of [`SCAN`]
///
/// Counted: 3 operations for each element.
pub static SUMMARY: Kernel = Kernel {
    name: "gated_scan_summary",
    reference: |_, launch| {
        let reversed = is_reversed(launch);
        let ([a, x], [out], _) = operands(launch);
        let shape = Shape::of(a);
        match_float!(a.dtype, T => {
            let (a, x) = (read::<T>(a), read::<T>(x));
            let (p, c) = write::<f64>(out).split_at_mut(shape.lanes());
            for lane in 0..shape.lanes() {
                (p[lane], c[lane]) = (1.0, 0.0);
                for t in shape.order(reversed) {
                    let at = shape.at(lane, t);
                    let (gate, value) = (a[at].to_f64(), x[at].to_f64());
                    p[lane] *= gate;
                    c[lane] = if reversed { gate * (c[lane] + value) } else { gate * c[lane] + value };
                }
                p[lane] = finite(p[lane]);
            }
            Ok(())
        }, else no_float(SUMMARY.name, a.dtype))
    },
    cpu: Some(cpu::summary),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::summary }),
    flops: |launch| 3 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// The carry into one shard of the steps, from the summaries of all shards: carry = p carry + c over the shards before it, first shard
/// first; reversed, over the shards after it, last shard first.
///
/// - in: summaries (shards, rows, lanes), rows at least 2, f64, contiguous: row 0 of a shard is p, row 1 is c ([`SUMMARY`])
/// - out: carry (lanes), f64, contiguous
/// - scalars: \[Int own shard, Int reversed (1 or 0)\]
///
/// Counted: 2 operations for each lane and each other shard, of which a shard reads those on one side only.
pub static CARRY: Kernel = Kernel {
    name: "gated_scan_carry",
    reference: |_, launch| {
        let ([summaries], [carry], scalars) = operands(launch);
        let [shards, rows, lanes] = summaries.view.shape[..] else {
            panic!("the contract asks for three dims");
        };
        let (own, reversed) = (scalars[0].int() as usize, scalars[1].int() != 0);
        let (summaries, carry) = (read::<f64>(summaries), write::<f64>(carry));
        carry.fill(0.0);
        let others = if reversed { shards - 1 - own } else { own };
        for i in 0..others {
            let shard = if reversed { shards - 1 - i } else { i };
            let summary = &summaries[shard * rows * lanes..][..2 * lanes];
            for (lane, carry) in carry.iter_mut().enumerate() {
                *carry = summary[lane] * *carry + summary[lanes + lane];
            }
        }
        Ok(())
    },
    cpu: None,
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::carry }),
    flops: |launch| {
        let shape = &launch.inputs[0].view.shape;
        2 * (shape[0].saturating_sub(1) * shape[2]) as u64
    },
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// Backward of [`SCAN`], not reversed, from the cotangent g of h: dx_t = g_t + a_(t+1) dx_(t+1) and da_t = dx_t h_(t-1).
///
/// - in: a, h and g (outer, steps, inner), one float dtype, contiguous
/// - in, optional: a_n dx_n after the last step, and h_(-1) before the first, stacked (2, outer, inner), f64, contiguous; without
///   them, zero
/// - out: da and dx, like a
///
/// Counted: 3 operations for each element.
pub static BACKWARD: Kernel = Kernel {
    name: "gated_scan_backward",
    reference: |_, launch| {
        let ([a, h, g], edges, [da, dx]) = operands_and_last(launch);
        let shape = Shape::of(a);
        match_float!(a.dtype, T => {
            let (a, h, g) = (read::<T>(a), read::<T>(h), read::<T>(g));
            let (da, dx, edges) = (write::<T>(da), write::<T>(dx), edges.map(read::<f64>));
            for lane in 0..shape.lanes() {
                let mut carry = edges.map_or(0.0, |edges| edges[lane]);
                let first = edges.map_or(0.0, |edges| edges[shape.lanes() + lane]);
                for t in shape.order(true) {
                    let at = shape.at(lane, t);
                    let before = if t == 0 { first } else { h[at - shape.inner].to_f64() };
                    let slope = g[at].to_f64() + carry;
                    da[at] = T::from_f64(slope * before);
                    dx[at] = T::from_f64(slope);
                    carry = a[at].to_f64() * slope;
                }
            }
            Ok(())
        }, else no_float(BACKWARD.name, a.dtype))
    },
    cpu: Some(cpu::backward),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::backward }),
    flops: |launch| 3 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// The shape of the operands: lane `o inner + i` has its steps at a distance of `inner` elements.
#[derive(Clone, Copy, Debug)]
struct Shape {
    outer: usize,
    steps: usize,
    inner: usize,
}

impl Shape {
    fn of(a: &Arg<'_>) -> Shape {
        let [outer, steps, inner] = a.view.shape[..] else {
            panic!("the contract asks for three dims");
        };
        Shape { outer, steps, inner }
    }

    fn lanes(self) -> usize {
        self.outer * self.inner
    }

    fn numel(self) -> usize {
        self.lanes() * self.steps
    }

    fn at(self, lane: usize, step: usize) -> usize {
        (lane / self.inner * self.steps + step) * self.inner + lane % self.inner
    }

    /// Returns the steps in the order of the recurrence.
    fn order(self, reversed: bool) -> impl Iterator<Item = usize> {
        (0..self.steps).map(move |t| if reversed { self.steps - 1 - t } else { t })
    }
}

/// Returns the product of gates as part of a summary.
#[inline(always)]
fn finite(p: f64) -> f64 {
    if p.is_infinite() { f64::MAX.copysign(p) } else { p }
}

fn is_reversed(launch: &Launch<'_>) -> bool {
    launch.scalars[0].int() != 0
}

/// Returns the dtype of the operands of a launch.
fn float(kernel: &Kernel, launch: &Launch<'_>) -> Result<DType, KernelError> {
    let dtype = launch.inputs[0].dtype;
    if dtype.is_float() { Ok(dtype) } else { Err(KernelError::DType { kernel: kernel.name, dtype }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, Kind, values};

    const F64: Kind = Kind::Fixed(DType::F64);

    /// Rows of few lanes, packed: of several outer indices, in chunks, of unequal chunks, in several blocks of steps. Rows of many lanes: in
    /// chunks, in several runs of lanes. Empty operands.
    const SHAPES: [[usize; 3]; 19] = [
        [1, 1, 1],
        [2, 7, 3],
        [3, 33, 40],
        [40, 5, 1],
        [300, 9, 1],
        [1, 5000, 1],
        [3, 3001, 2],
        [1, 3000, 40],
        [1, 40, 300],
        [20, 6, 600],
        [2, 5, 2100],
        [0, 3, 2],
        [3, 0, 2],
        [3, 2, 0],
        [17, 70, 16],
        [16, 128, 1],
        [35, 300, 1],
        [5, 130, 5],
        [2, 65, 15],
    ];

    fn gates(count: usize) -> Vec<f64> {
        values(7, count).iter().map(|x| 0.45 * x).collect()
    }

    #[test]
    fn matches_values_computed_by_hand() {
        let (shape, lanes) = ([1, 3, 1], [1, 1]);
        let (a, x) = ([0.5, 2.0, -1.0], [1.0, 2.0, 3.0]);
        let (a, x) = (Value::real(&shape, &a), Value::real(&shape, &x));
        let carry = Value::real(&lanes, &[4.0]);
        let scan = |inputs: &[Value], reversed| {
            evaluate(&SCAN, inputs, &[&shape], &[Scalar::Int(reversed)]).remove(0)
        };
        assert_eq!(scan(&[a.clone(), x.clone()], 0), [1.0, 4.0, -1.0]);
        assert_eq!(scan(&[a.clone(), x.clone(), carry.clone()], 0), [3.0, 8.0, -5.0]);
        // h_2 = 3, h_1 = 2 - 3, h_0 = 1 + 2 h_1.
        assert_eq!(scan(&[a.clone(), x.clone()], 1), [-1.0, -1.0, 3.0]);
        assert_eq!(scan(&[a.clone(), x.clone(), carry], 1), [-9.0, -5.0, 7.0]);
        let summary = |reversed| {
            evaluate(&SUMMARY, &[a.clone(), x.clone()], &[&[2, 1, 1]], &[Scalar::Int(reversed)]).remove(0)
        };
        assert_eq!((summary(0), summary(1)), (vec![-1.0, -1.0], vec![-1.0, -0.5]));
        let h = Value::real(&shape, &[3.0, 8.0, -5.0]);
        let edges = Value::real(&[2, 1, 1], &[4.0, 4.0]);
        let found = evaluate(&BACKWARD, &[a, h, x, edges], &[&shape, &shape], &[]);
        assert_eq!(found, [vec![-36.0, -15.0, 56.0], vec![-9.0, -5.0, 7.0]]);
    }

    #[test]
    fn overflowing_products_do_not_spoil_a_carry_of_zero() {
        let shape = [1, 2, 1];
        let inputs = [Value::real(&shape, &[1e200, -1e200]), Value::real(&shape, &[0.0, 0.0])];
        let found = evaluate(&SUMMARY, &inputs, &[&[2, 1, 1]], &[Scalar::Int(0)]).remove(0);
        assert_eq!(found, [-f64::MAX, 0.0]);
    }

    #[test]
    fn carries_match_values_computed_by_hand() {
        // Three shards of one lane, with a row that no carry reads.
        let summaries = Value::real(&[3, 3, 1], &[9.0, 1.0, 7.0, 2.0, 3.0, 7.0, -4.0, 5.0, 7.0]);
        let carry = |own, reversed| {
            let scalars = [Scalar::Int(own), Scalar::Int(reversed)];
            evaluate(&CARRY, std::slice::from_ref(&summaries), &[&[1]], &scalars).remove(0)[0]
        };
        assert_eq!([0, 1, 2].map(|own| carry(own, 0)), [0.0, 1.0, 5.0]);
        assert_eq!([0, 1, 2].map(|own| carry(own, 1)), [13.0, 5.0, 0.0]);
        for (own, reversed) in [(0, 0), (2, 0), (3, 0), (0, 1), (3, 1)] {
            for lanes in [0, 1, 300] {
                let case = Case::new(&CARRY).input_as(F64, &[4, 2, lanes], &gates(8 * lanes));
                let case = case.output_as(F64, &[lanes]).scalars(&[Scalar::Int(own), Scalar::Int(reversed)]);
                case.scale(1.0).run_for(&[DType::F64]);
            }
        }
    }

    #[test]
    fn fast_paths_match_the_references() {
        for shape in SHAPES {
            let (numel, lanes) = (shape.iter().product(), [shape[0], shape[2]]);
            let (a, x, g) = (gates(numel), values(1, numel), values(2, numel));
            let carry = values(3, lanes[0] * lanes[1]);
            for reversed in [0, 1] {
                let scalars = [Scalar::Int(reversed)];
                let operands =
                    |kernel| Case::new(kernel).input(&shape, &a).input(&shape, &x).scalars(&scalars);
                operands(&SCAN).output(&shape).scale(1.0).run();
                operands(&SCAN).input_as(F64, &lanes, &carry).output(&shape).scale(1.0).run();
                operands(&SUMMARY).output_as(F64, &[2, shape[0], shape[2]]).scale(1.0).run();
            }
            let edges = [&carry[..], &carry[..]].concat();
            let operands = || Case::new(&BACKWARD).input(&shape, &a).input(&shape, &x).input(&shape, &g);
            operands().output(&shape).output(&shape).scale(1.0).run();
            let operands = operands().input_as(F64, &[2, shape[0], shape[2]], &edges);
            operands.output(&shape).output(&shape).scale(1.0).run();
        }
    }

    #[test]
    fn long_sums_are_exact() {
        // Gates of 1 and terms of 24 bits, so that sums in f64 are exact in any order.
        let shape = [1, 100_000, 1];
        let (a, x) = (vec![1.0; 100_000], vec![f64::from(0.1f32); 100_000]);
        for reversed in [0, 1] {
            let case = Case::new(&SCAN).input(&shape, &a).input(&shape, &x).output(&shape).scale(1.0);
            case.scalars(&[Scalar::Int(reversed)]).run_for(&[DType::F32]);
        }
    }
}
