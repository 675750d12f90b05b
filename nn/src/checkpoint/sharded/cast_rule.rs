//! Dtype conversion of weights on loading: which casts are allowed, and which happened.

use shardgrad_tensor::DType;
use std::fmt;

/// Which dtype conversions are allowed when weights are loaded into parameters of another float dtype.
#[doc(alias = "casting")]
#[doc(alias = "torch_dtype")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CastRule {
    /// Only exact casts, to a dtype that contains every number of the file's dtype; others are refused.
    #[default]
    Widen,
    /// Also casts that round to nearest, ties to even; numbers that are too large become infinite.
    Round,
}

/// Dtype conversions of the weights that were loaded. `Display` states them in one line, empty if there were none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CastCounts {
    /// Source dtype, target dtype and number of tensors, in the order of first use.
    counts: Vec<(DType, DType, usize)>,
}

/// Whether every number of one float dtype is a number of another.
#[must_use]
pub(crate) fn is_exact(from: DType, to: DType) -> bool {
    let halves = [DType::F16, DType::BF16];
    from == to
        || match to {
            DType::F64 => from.is_float(),
            DType::F32 => halves.contains(&from),
            _ => false,
        }
}

impl CastCounts {
    /// Counts a tensor.
    pub(crate) fn add(&mut self, from: DType, to: DType) {
        if from == to {
            return;
        }
        match self.counts.iter_mut().find(|(f, t, _)| (*f, *t) == (from, to)) {
            Some((.., count)) => *count += 1,
            None => self.counts.push((from, to, 1)),
        }
    }

    /// Whether every weight had the dtype of its parameter.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Yields source dtype, target dtype and number of tensors.
    pub fn iter(&self) -> impl Iterator<Item = (DType, DType, usize)> {
        self.counts.iter().copied()
    }
}

impl fmt::Display for CastCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (from, to, count)) in self.iter().enumerate() {
            let (tensors, are) = if count == 1 { ("tensor", "is") } else { ("tensors", "are") };
            let what = if is_exact(from, to) { "widened" } else { "rounded" };
            write!(f, "{}{count} {tensors} of {from} {are} {what} to {to}", if i > 0 { "; " } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::{BF16, Bool, F16, F32, F64, I64};

    #[test]
    fn widening_casts_are_exact() {
        for (from, to) in
            [(F32, F32), (F16, F32), (BF16, F32), (F16, F64), (BF16, F64), (F32, F64), (BF16, BF16)]
        {
            assert!(is_exact(from, to), "{from} to {to}");
        }
        for (from, to) in [
            (F64, F32),
            (F32, BF16),
            (F32, F16),
            (F64, F16),
            (F16, BF16),
            (BF16, F16),
            (I64, F64),
            (Bool, F32),
        ] {
            assert!(!is_exact(from, to), "{from} to {to}");
        }
    }

    #[test]
    fn display_states_casts_in_one_line() {
        let mut casts = CastCounts::default();
        casts.add(F32, F32);
        assert!(casts.is_empty() && casts.to_string().is_empty());
        (0..12).for_each(|_| casts.add(BF16, F32));
        assert_eq!(casts.to_string(), "12 tensors of bf16 are widened to f32");
        casts.add(F64, F32);
        assert_eq!(
            casts.to_string(),
            "12 tensors of bf16 are widened to f32; 1 tensor of f64 is rounded to f32"
        );
    }
}
