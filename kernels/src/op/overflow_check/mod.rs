//! Whether a step of an optimizer is taken, and by which factor of its gradients: found where the gradients lie, so that launches
//! that depend on it can be given before the host knows.

mod gpu;

use crate::cpu::Pool;
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::op::rows::{operands, read, write};

/// The control word of a step, which ranks add up: the sum of squares of all gradients, the loss, then the caller's numbers.
///
/// - in: sums f64 `(s + l)`, contiguous: s sums of squares, then l parts of the loss; told f64 `(c)`, contiguous: the numbers
/// - out: word f64 `(1 + c)`, or `(2 + c)` with a loss
/// - scalars: Int s, Real n, the count that each part of the loss is divided by, or 0 where there is no loss
///
/// Sums are formed from the first term to the last. Where a device has noted an index that points outside, and has not told the host
/// as yet, the squares are not a number: what was computed since means nothing. Counted: 2 operations a term.
pub static WORD: Kernel = Kernel {
    name: "control_word",
    reference: word,
    cpu: None,
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::word }),
    flops: |launch| 2 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

/// What follows from the control word of all ranks: norm = sqrt(word_0) / scale is that of the gradients, which are too large by the
/// scale; the step is taken if sqrt(word_0) and all other numbers of the word are finite; gradients are to be multiplied by
/// factor = (bound / norm if bound < norm, else 1) / scale.
///
/// - in: word f64 `(w)`, told f64 `(2)`: the bound of the norm (infinite for none), and the scale; contiguous
/// - out: gate f64 `(3 + w)`, contiguous: factor, 1 if the step is taken or else 0, norm, then the word
///
/// Counted: 4 operations.
pub static GATE: Kernel = Kernel {
    name: "gate",
    reference: gate,
    cpu: None,
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::gate }),
    flops: |_| 4,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

fn word(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([sums, told], [word], scalars) = operands(launch);
    let (num_squares, count) = (scalars[0].int() as usize, scalars[1].real());
    let ((squares, parts), told) = (read::<f64>(sums).split_at(num_squares), read::<f64>(told));
    let squares = squares.iter().fold(0.0, |sum, x| sum + x);
    let loss = (count > 0.0).then(|| parts.iter().fold(0.0, |sum, part| sum + part / count));
    let numbers = std::iter::once(squares).chain(loss).chain(told.iter().copied());
    write::<f64>(word).iter_mut().zip(numbers).for_each(|(y, x)| *y = x);
    Ok(())
}

fn gate(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([word, told], [gate], _) = operands(launch);
    let (word, told, gate) = (read::<f64>(word), read::<f64>(told), write::<f64>(gate));
    let ([bound, scale], root) = ([told[0], told[1]], word[0].sqrt());
    let norm = root / scale;
    let is_taken = root.is_finite() && word[1..].iter().all(|x| x.is_finite());
    gate[0] = (if bound < norm { bound / norm } else { 1.0 }) / scale;
    gate[1] = if is_taken { 1.0 } else { 0.0 };
    gate[2] = norm;
    gate[3..].copy_from_slice(word);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::check::{Case, Kind, values};
    use crate::op::differences::{Value, evaluate};

    const F64: Kind = Kind::Fixed(DType::F64);

    fn one(kernel: &Kernel, inputs: [&[f64]; 2], len: usize, scalars: &[Scalar]) -> Vec<f64> {
        let inputs = inputs.map(|data| Value::real(&[data.len()], data));
        evaluate(kernel, &inputs, &[&[len]], scalars).remove(0)
    }

    #[test]
    fn words_by_hand() {
        // Terms that tell orders apart: from the first to the last, 1 is lost in 1e16 each time.
        let terms = [1e16, 1.0, 1.0, 3.0, 6.0];
        let with_loss = [Scalar::Int(3), Scalar::Real(2.0)];
        assert_eq!(one(&WORD, [&terms, &[7.0, -1.0]], 4, &with_loss), [1e16, 4.5, 7.0, -1.0]);
        let without = [Scalar::Int(5), Scalar::Real(0.0)];
        assert_eq!(one(&WORD, [&terms, &[]], 1, &without), [1e16 + 3.0 + 6.0]);
        assert_eq!(one(&WORD, [&[], &[]], 2, &[Scalar::Int(0), Scalar::Real(4.0)]), [0.0, 0.0]);
    }

    #[test]
    fn gates_by_hand() {
        let gate = |word: &[f64], told: [f64; 2]| one(&GATE, [word, &told], 3 + word.len(), &[]);
        assert_eq!(gate(&[64.0, 5.0], [f64::INFINITY, 2.0]), [0.5, 1.0, 4.0, 64.0, 5.0]);
        assert_eq!(gate(&[64.0], [1.0, 2.0]), [0.125, 1.0, 4.0, 64.0]);
        assert_eq!(gate(&[64.0], [4.0, 2.0]), [0.5, 1.0, 4.0, 64.0], "a norm at the bound is not clipped");
        assert_eq!(gate(&[0.0], [1.0, 1.0]), [1.0, 1.0, 0.0, 0.0]);
        for word in [[f64::INFINITY, 1.0], [f64::NAN, 1.0], [1.0, f64::NAN], [1.0, f64::NEG_INFINITY]] {
            assert_eq!(gate(&word, [1.0, 1.0])[1], 0.0, "{word:?}");
        }
    }

    #[test]
    fn devices_give_the_same_bits() {
        for (num_squares, num_parts, num_told) in [(0, 0, 0), (1, 1, 1), (148, 4, 2), (700, 300, 40)] {
            let terms: Vec<f64> = values(1, num_squares + num_parts).iter().map(|x| x * x).collect();
            for count in [0.0, 3.0] {
                let len = 1 + usize::from(count > 0.0) + num_told;
                let case = Case::new(&WORD).input_as(F64, &[terms.len()], &terms);
                let case = case.input_as(F64, &[num_told], &values(2, num_told)).output_as(F64, &[len]);
                case.scalars(&[Scalar::Int(num_squares as i64), Scalar::Real(count)]).run_for(&[DType::F64]);
            }
        }
        for word in [&[2.0][..], &[2.0, 0.3, -7.0], &[f64::INFINITY, 1.0], &[1.0, 2.0, f64::NAN], &[0.0]] {
            for told in [[1.1, 3.0], [0.7, 1.0], [f64::INFINITY, 65_536.0]] {
                let case = Case::new(&GATE).input_as(F64, &[word.len()], word).input_as(F64, &[2], &told);
                case.output_as(F64, &[3 + word.len()]).run_for(&[DType::F64]);
            }
        }
    }
}
