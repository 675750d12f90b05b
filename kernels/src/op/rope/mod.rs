//! Rotary position embedding (RoPE): channels i and i + c/2 of a row are rotated by an angle that depends on position and pair.

mod cpu;
mod gpu;

use crate::cpu::Pool;
use crate::dtype::Element;
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, GpuCode, Kernel, Launch, Scalar};
use crate::match_float;
use crate::op::rows::{operands_and_last, read, width, write};

/// Rotation of pairs of channels: with a = p f_i and position p = first + the index along dim 1,
/// y_i = x_i cos a - x_(i+h) sin a, y_(i+h) = x_(i+h) cos a + x_i sin a, for i below h = c / 2.
///
/// - in: x `(b, t, heads.., c)`, any float, contiguous, c even; optionally positions `(b, t)`, i64, contiguous, in place of p
/// - out: y like x
/// - scalars: Int first (the position of the first row of dim 1), then h times Real f_i
///
/// Negated f_i invert the rotation. Cosine and sine of an angle are combined in f64 from those of 64 (p div 64) f_i and (p mod 64) f_i, so
/// they depend on p and f_i only. Counted: 3 operations per element.
#[doc(alias = "rotary_embedding")]
pub static ROPE: Kernel = Kernel {
    name: "rope",
    reference,
    cpu: Some(cpu::rotate),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::rotate }),
    flops: |launch| 3 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 4.0 },
};

/// The parameters of a launch.
#[derive(Clone, Copy, Debug)]
struct Problem<'a> {
    /// Positions of one batch element, elements of one position, channels.
    t: usize,
    per_position: usize,
    c: usize,
    first: i64,
    /// The positions of all batch elements, if they are given.
    positions: Option<&'a [i64]>,
    frequencies: &'a [Scalar],
}

impl<'a> Problem<'a> {
    fn new(x: &Arg<'_>, positions: Option<&Arg<'a>>, scalars: &'a [Scalar]) -> Problem<'a> {
        let (shape, c) = (&x.view.shape, width(x));
        debug_assert!(shape.len() >= 3 && c % 2 == 0, "the contract asks for (b, t, heads.., c), c even");
        debug_assert_eq!(scalars.len(), 1 + c / 2, "a launch has one frequency a pair");
        Problem {
            t: shape[1],
            per_position: shape[2..].iter().product(),
            c,
            first: scalars[0].int(),
            positions: positions.map(read),
            frequencies: &scalars[1..],
        }
    }

    /// The position of row n of a table of angles: one row per index along dim 1, or per token if positions are given.
    fn position(&self, n: usize) -> i64 {
        self.positions.map_or_else(|| self.first + n as i64, |positions| positions[n])
    }

    /// The number of rows of a table of angles.
    fn num_positions(&self) -> usize {
        self.positions.map_or(self.t, <[i64]>::len)
    }
}

/// Angles are combined from those of a multiple of this and of the remainder.
const BLOCK: i64 = 64;

/// Returns cosine and sine of a sum of two angles from those of the summands.
#[inline]
fn joined((sin_a, cos_a): (f64, f64), (sin_b, cos_b): (f64, f64)) -> (f64, f64) {
    (cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b)
}

fn reference(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let scalars = launch.scalars;
    let ([x], positions, [y]) = operands_and_last(launch);
    let p = Problem::new(x, positions, scalars);
    let half = p.c / 2;
    match_float!(x.dtype, T => {
        let (x, y) = (read::<T>(x), write::<T>(y));
        for at in (0..x.len()).filter(|at| at % p.c < half) {
            let position = p.position(at / p.per_position % p.num_positions());
            let part = |n: i64| (n as f64 * p.frequencies[at % p.c].real()).sin_cos();
            let rest = position.rem_euclid(BLOCK);
            let (cos, sin) = joined(part(position - rest), part(rest));
            let (low, high) = (x[at].to_f64(), x[at + half].to_f64());
            y[at] = T::from_f64(low * cos - high * sin);
            y[at + half] = T::from_f64(high * cos + low * sin);
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: ROPE.name, dtype: x.dtype }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, Kind, values};
    use approx::{abs_diff_eq, assert_abs_diff_eq};

    fn scalars(first: i64, frequencies: &[f64]) -> Vec<Scalar> {
        let rest = frequencies.iter().map(|f| Scalar::Real(*f));
        std::iter::once(Scalar::Int(first)).chain(rest).collect()
    }

    #[test]
    fn matches_known_values() {
        // Quarter rotations for the first pair (channels 0 and 2), half rotations for the second.
        let quarter = std::f64::consts::FRAC_PI_2;
        let x = Value::real(&[1, 3, 1, 4], &[1.0, 2.0, 3.0, 4.0].repeat(3));
        let y = evaluate(&ROPE, &[x], &[&[1, 3, 1, 4]], &scalars(0, &[quarter, 2.0 * quarter])).remove(0);
        let exact = [1.0, 2.0, 3.0, 4.0, -3.0, -2.0, 1.0, -4.0, -1.0, 2.0, -3.0, 4.0];
        assert_abs_diff_eq!(y[..], exact[..], epsilon = 1e-14);
    }

    #[test]
    fn positions_count_on_from_the_first() {
        let (x, f) = (values(1, 40), scalars(0, &[1.0, 0.1]));
        let whole = evaluate(&ROPE, &[Value::real(&[1, 10, 1, 4], &x)], &[&[1, 10, 1, 4]], &f).remove(0);
        let part = [Value::real(&[1, 4, 1, 4], &x[24..])];
        let part = evaluate(&ROPE, &part, &[&[1, 4, 1, 4]], &scalars(6, &[1.0, 0.1])).remove(0);
        assert_eq!(part, whole[24..]);
    }

    #[test]
    fn given_positions_match_the_reference() {
        let scalars = scalars(7, &[1.0, 0.3]);
        let near: Vec<f64> = (0..10).map(f64::from).collect();
        let anew = [0.0, 1.0, 2.0, 0.0, 1.0, 0.0, 64.0, 63.0, 2.0, 3.0];
        let far = [1e15, -5.0, 3.0, 0.0, 1e6, 7.0, 8.0, 1.0, -1e12, 0.0];
        for positions in [&near[..], &anew, &far] {
            Case::new(&ROPE)
                .input(&[2, 5, 3, 4], &values(1, 120))
                .input_as(Kind::Fixed(DType::I64), &[2, 5], positions)
                .output(&[2, 5, 3, 4])
                .scalars(&scalars)
                .run();
        }
        let x = Value::real(&[1, 10, 1, 4], &values(2, 40));
        let run = |inputs: &[Value], first| {
            let scalars = [&[Scalar::Int(first)], &scalars[1..]].concat();
            evaluate(&ROPE, inputs, &[&[1, 10, 1, 4]], &scalars).remove(0)
        };
        let given = Value::index(&[1, 10], &near.iter().map(|p| p + 3.0).collect::<Vec<_>>());
        assert_eq!(run(&[x.clone(), given], 0), run(&[x], 3));
    }

    #[test]
    fn split_angles_equal_the_angles() {
        for (first, f) in [(63, 0.9), (64, 0.01), (12_345, 1.0), (131_071, 1e-4)] {
            let x = Value::real(&[1, 2, 1, 2], &[1.0, 0.0, 1.0, 0.0]);
            let y = evaluate(&ROPE, &[x], &[&[1, 2, 1, 2]], &scalars(first, &[f])).remove(0);
            for (n, y) in y.chunks(2).enumerate() {
                let (sin, cos) = ((first + n as i64) as f64 * f).sin_cos();
                assert!(abs_diff_eq!(*y, [cos, sin][..], epsilon = 1e-10), "{first} {f}: {y:?}");
            }
        }
    }

    #[test]
    fn negated_frequencies_invert_the_rotation() {
        let (shape, x) = ([2, 3, 2, 6], values(3, 72));
        let rotate = |x: &[f64], sign: f64| {
            let f = [1.0, 0.3, 0.01].map(|f| sign * f);
            evaluate(&ROPE, &[Value::real(&shape, x)], &[&shape], &scalars(100, &f)).remove(0)
        };
        let back = rotate(&rotate(&x, 1.0), -1.0);
        assert_abs_diff_eq!(back[..], x[..], epsilon = 1e-14);
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for (shape, first) in [
            ([1, 1, 1, 2], 0),
            ([2, 5, 3, 4], 7),
            ([1, 200, 2, 8], 0),
            ([1, 70, 1, 34], 61),
            ([3, 1, 4, 16], 1_000_003),
            ([2, 0, 3, 4], 0),
            ([2, 3, 3, 0], 0),
            ([20, 130, 4, 32], 5),
        ] {
            let numel = shape.iter().product();
            let frequencies: Vec<f64> = (0..shape[3] / 2).map(|i| 10f64.powf(-(i as f64) / 3.0)).collect();
            for sign in [1.0, -1.0] {
                let f: Vec<f64> = frequencies.iter().map(|f| sign * f).collect();
                let case = Case::new(&ROPE).input(&shape, &values(2, numel)).output(&shape);
                case.scalars(&scalars(first, &f)).run();
            }
        }
    }
}
