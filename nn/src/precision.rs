//! In which floats a model computes, and in which its parameters are stored.

use shardgrad_tensor::{DType, Error, Kind, Result};
use std::fmt;

/// Two float dtypes: activations, products and what moves of a parameter are in the first; what stays between steps, and
/// the gradient that the optimizer gets, are in the second. Where they differ a parameter is rounded once a step, before it moves, and
/// cotangents are added up and reduced over ranks in the wider dtype: updates below the spacing of the narrow numbers are kept.
/// Micikevicius and others, "Mixed Precision Training", arXiv 1710.03740.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// The dtype of computing.
    pub dtype: DType,
    /// The dtype of stored parameters; it holds every number of the other.
    pub param_dtype: DType,
}

impl Precision {
    /// Parameters in the dtype of computing.
    #[must_use]
    pub const fn of(dtype: DType) -> Precision {
        Precision { dtype, param_dtype: dtype }
    }

    /// Parameters in the dtype in which sums are formed: f32 for the 16-bit floats, else that of computing.
    #[must_use]
    pub const fn mixed(dtype: DType) -> Precision {
        Precision { dtype, param_dtype: dtype.accumulator() }
    }

    /// Refuses dtypes that are no floats, and parameters in one that does not hold every number of the dtype of computing.
    ///
    /// # Errors
    /// `Kind::DType`.
    pub fn check(self) -> Result<()> {
        let Precision { dtype, param_dtype } = self;
        check_dtype(dtype)?;
        check_dtype(param_dtype)?;
        if dtype == param_dtype || dtype.size() < param_dtype.size() {
            return Ok(());
        }
        let text = format!(
            "parameters of {param_dtype} for computing in {dtype}, of which they do not hold every number"
        );
        let wide = Precision::mixed(dtype).param_dtype;
        let choices = if wide == dtype { dtype.to_string() } else { format!("{wide} or {dtype}") };
        Err(Error::new(Kind::DType, text).detail("help", format!("store them in {choices}")))
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype == self.param_dtype {
            true => write!(f, "{}", self.dtype),
            false => write!(f, "{} (parameters {})", self.dtype, self.param_dtype),
        }
    }
}

/// Refuses a dtype that no parameter can have.
pub(crate) fn check_dtype(dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(Error::new(Kind::DType, format!("parameters of {dtype}")).detail("help", "use f32, f64, bf16 or f16"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::{BF16, F16, F32, F64, I64};

    #[test]
    fn parameters_hold_every_number_that_is_computed_with() {
        for dtype in [BF16, F16, F32, F64] {
            assert!(Precision::of(dtype).check().is_ok() && Precision::mixed(dtype).check().is_ok());
        }
        assert_eq!(Precision::mixed(F16).param_dtype, F32);
        assert_eq!(Precision::mixed(F64).param_dtype, F64);
        assert!(Precision { dtype: F32, param_dtype: F64 }.check().is_ok());
        for (dtype, param_dtype) in
            [(F32, BF16), (F64, F32), (BF16, F16), (F16, BF16), (BF16, I64), (I64, F64)]
        {
            assert_eq!(Precision { dtype, param_dtype }.check().unwrap_err().kind(), Kind::DType);
        }
        assert_eq!(Precision::mixed(BF16).to_string(), "bf16 (parameters f32)");
        assert_eq!(Precision::of(BF16).to_string(), "bf16");
    }
}
