//! Overflow check and gradient clipping on the device: whether an optimizer step is taken, and by which factor gradients are multiplied.
//! The device computes both, so that the optimizer kernels can be launched before the host knows the result.

mod gpu;

use crate::cpu::Pool;
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::op::rows::{operands, read, write};

/// Packs the control word of a step, which is summed over ranks: the sum of squares of all gradients, the loss, the caller's numbers, then
/// the sums of k groups of terms.
///
/// - in: sums f64 `(s + l + k m)`, contiguous: s sums of squares, l parts of the loss, then k groups of m terms; extras f64 `(c)`,
///   contiguous: the caller's numbers
/// - out: word f64 `(1 + c + k)`, or `(2 + c + k)` with a loss
/// - scalars: Int s, Real n, the count that each part of the loss is divided by, or 0 without a loss; Int k, Int m
///
/// Sums are formed from the first term to the last. If a device has recorded an index out of range that the host does not know yet, the
/// squares are NaN: results since then are meaningless. Counted: 2 operations per term.
pub static CONTROL_WORD: Kernel = Kernel {
    name: "control_word",
    reference: control_word,
    cpu: None,
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::control_word }),
    flops: |launch| 2 * launch.inputs[0].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

/// Checks the summed control word: norm = |sqrt(word_0) / scale| is the norm of the gradients, which are too large by scale, the loss scale
/// times the count that the loss is divided by; the step is taken if sqrt(word_0) and all other checked numbers of the word are finite;
/// gradients are to be multiplied by factor = (bound / norm if bound < norm, else 1) / scale.
///
/// - in: word f64 `(w)`, limits f64 `(2)`: the bound of the norm (infinite for no clipping) and the loss scale; contiguous
/// - out: result f64 `(3 + w)`, contiguous: factor, 1 if the step is taken or else 0, norm, then the word
/// - scalars: Int c, the numbers of the word, from the first on, that are checked; Int d, the position of the count in the word, or 0 for a
///   count of 1
///
/// A count of 0 divides as 1: the gradients of a sum of nothing are 0. Counted: 5 operations.
#[doc(alias = "GradScaler")]
#[doc(alias = "clip_grad_norm_")]
pub static OVERFLOW_CHECK: Kernel = Kernel {
    name: "overflow_check",
    reference: overflow_check,
    cpu: None,
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::overflow_check }),
    flops: |_| 5,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

fn control_word(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([sums, extras], [word], scalars) = operands(launch);
    let (num_squares, count) = (scalars[0].int() as usize, scalars[1].real());
    let [num_groups, group_len] = [2, 3].map(|i| scalars[i].int() as usize);
    let (sums, extras) = (read::<f64>(sums), read::<f64>(extras));
    let (sums, groups) = sums.split_at(sums.len() - num_groups * group_len);
    let (squares, parts) = sums.split_at(num_squares);
    let groups =
        (0..num_groups).map(|i| groups[i * group_len..][..group_len].iter().fold(0.0, |sum, x| sum + x));
    let squares = squares.iter().fold(0.0, |sum, x| sum + x);
    let loss = (count > 0.0).then(|| parts.iter().fold(0.0, |sum, part| sum + part / count));
    let numbers = std::iter::once(squares).chain(loss).chain(extras.iter().copied()).chain(groups);
    write::<f64>(word).iter_mut().zip(numbers).for_each(|(y, x)| *y = x);
    Ok(())
}

fn overflow_check(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([word, limits], [result], scalars) = operands(launch);
    let (word, limits, result) = (read::<f64>(word), read::<f64>(limits), write::<f64>(result));
    let [num_checked, position] = [0, 1].map(|i| scalars[i].int() as usize);
    let count = if position > 0 && word[position] != 0.0 { word[position] } else { 1.0 };
    let ([bound, scale], root) = ([limits[0], limits[1] * count], word[0].sqrt());
    let norm = (root / scale).abs();
    let is_taken = root.is_finite() && word[1..num_checked].iter().all(|x| x.is_finite());
    result[0] = (if bound < norm { bound / norm } else { 1.0 }) / scale;
    result[1] = if is_taken { 1.0 } else { 0.0 };
    result[2] = norm;
    result[3..].copy_from_slice(word);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::finite_difference::{Value, evaluate};
    use crate::op::kernel_check::{Case, Kind, values};

    const F64: Kind = Kind::Fixed(DType::F64);

    fn one(kernel: &Kernel, inputs: [&[f64]; 2], len: usize, scalars: &[Scalar]) -> Vec<f64> {
        let inputs = inputs.map(|data| Value::real(&[data.len()], data));
        evaluate(kernel, &inputs, &[&[len]], scalars).remove(0)
    }

    #[test]
    fn control_word_matches_known_values() {
        // Terms that distinguish orders of summation: from the first to the last, 1 is lost in 1e16 each time.
        let terms = [1e16, 1.0, 1.0, 3.0, 6.0];
        let scalars = |s: i64, n: f64, k: i64, m: i64| {
            [Scalar::Int(s), Scalar::Real(n), Scalar::Int(k), Scalar::Int(m)]
        };
        let with_loss = scalars(3, 2.0, 0, 0);
        assert_eq!(one(&CONTROL_WORD, [&terms, &[7.0, -1.0]], 4, &with_loss), [1e16, 4.5, 7.0, -1.0]);
        let without = scalars(5, 0.0, 0, 7);
        assert_eq!(one(&CONTROL_WORD, [&terms, &[]], 1, &without), [1e16 + 3.0 + 6.0]);
        assert_eq!(one(&CONTROL_WORD, [&[], &[]], 2, &scalars(0, 4.0, 0, 0)), [0.0, 0.0]);
        let terms = [1.0, 2.0, 3.0, 1e16, 1.0, 4.0, 5.0, 0.5, 0.25];
        let word = one(&CONTROL_WORD, [&terms, &[7.0]], 6, &scalars(1, 2.0, 3, 2));
        assert_eq!(word, [1.0, 2.5, 7.0, 1e16, 9.0, 0.75]);
        assert_eq!(one(&CONTROL_WORD, [&[], &[7.0]], 4, &scalars(0, 0.0, 2, 0)), [0.0, 7.0, 0.0, 0.0]);
    }

    #[test]
    fn overflow_check_matches_known_values() {
        let run = |word: &[f64], limits: [f64; 2], [checked, position]: [i64; 2]| {
            let scalars = [Scalar::Int(checked), Scalar::Int(position)];
            one(&OVERFLOW_CHECK, [word, &limits], 3 + word.len(), &scalars)
        };
        let check = |word: &[f64], limits: [f64; 2]| run(word, limits, [word.len() as i64, 0]);
        assert_eq!(check(&[64.0, 5.0], [f64::INFINITY, 2.0]), [0.5, 1.0, 4.0, 64.0, 5.0]);
        assert_eq!(check(&[64.0], [1.0, 2.0]), [0.125, 1.0, 4.0, 64.0]);
        assert_eq!(check(&[64.0], [4.0, 2.0]), [0.5, 1.0, 4.0, 64.0], "a norm at the bound is not clipped");
        assert_eq!(check(&[0.0], [1.0, 1.0]), [1.0, 1.0, 0.0, 0.0]);
        for word in [[f64::INFINITY, 1.0], [f64::NAN, 1.0], [1.0, f64::NAN], [1.0, f64::NEG_INFINITY]] {
            assert_eq!(check(&word, [1.0, 1.0])[1], 0.0, "{word:?}");
        }
        assert_eq!(run(&[64.0, f64::NAN], [1.0, 2.0], [1, 0])[..3], [0.125, 1.0, 4.0], "not checked");
        // The gradients of a sum over 4 elements, times a loss scale of 2: norm 8 / (2 * 4).
        assert_eq!(run(&[64.0, 5.0, 4.0], [f64::INFINITY, 2.0], [3, 2]), [0.125, 1.0, 1.0, 64.0, 5.0, 4.0]);
        assert_eq!(run(&[64.0, 5.0, 4.0], [0.5, 2.0], [3, 2])[..3], [0.0625, 1.0, 1.0]);
        assert_eq!(run(&[64.0, 5.0, -4.0], [0.5, 2.0], [3, 2])[..3], [-0.0625, 1.0, 1.0], "a negative count");
        assert_eq!(run(&[0.0, 0.0, 0.0], [0.5, 2.0], [3, 2])[..3], [0.5, 1.0, 0.0], "a count of 0 is 1");
        assert_eq!(run(&[0.0, 0.0, f64::NAN], [0.5, 2.0], [3, 2])[1], 0.0);
    }

    #[test]
    fn gpu_gives_the_bits_of_the_reference() {
        for (num_squares, num_parts, num_extras) in [(0, 0, 0), (1, 1, 1), (148, 4, 2), (700, 300, 40)] {
            for (count, [k, m]) in
                [(0.0, [0, 0]), (3.0, [0, 4]), (3.0, [1, 700]), (0.0, [5, 3]), (3.0, [300, 1])]
            {
                let num_terms = num_squares + num_parts + k * m;
                let terms: Vec<f64> = values(1, num_terms).iter().map(|x| x * x).collect();
                let len = 1 + usize::from(count > 0.0) + num_extras + k;
                let case = Case::new(&CONTROL_WORD).input_as(F64, &[terms.len()], &terms);
                let case = case.input_as(F64, &[num_extras], &values(2, num_extras)).output_as(F64, &[len]);
                let [s, k, m] = [num_squares, k, m].map(|n| Scalar::Int(n as i64));
                case.scalars(&[s, Scalar::Real(count), k, m]).run_for(&[DType::F64]);
            }
        }
        for word in
            [&[2.0][..], &[2.0, 0.3, -7.0], &[2.0, 0.0], &[f64::INFINITY, 1.0], &[1.0, 2.0, f64::NAN], &[0.0]]
        {
            for limits in [[1.1, 3.0], [0.7, 1.0], [f64::INFINITY, 65_536.0]] {
                let case = Case::new(&OVERFLOW_CHECK).input_as(F64, &[word.len()], word).input_as(
                    F64,
                    &[2],
                    &limits,
                );
                let case = case.output_as(F64, &[3 + word.len()]);
                for [checked, position] in [[word.len(), 0], [word.len(), word.len() - 1], [1, 0]] {
                    let scalars = [Scalar::Int(checked as i64), Scalar::Int(position as i64)];
                    case.clone().scalars(&scalars).run_for(&[DType::F64]);
                }
            }
        }
    }
}
