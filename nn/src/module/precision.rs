//! Precision of a model: the compute dtype and the dtype of stored parameters (mixed precision).

use shardgrad_tensor::{DType, Error, Kind, Result};
use std::fmt;

/// Compute dtype and parameter dtype. Activations, products and communicated parameters are in `dtype`; stored
/// parameters, and the gradients that the optimizer reads, are in `param_dtype`. If the two differ, each parameter is
/// rounded once a step before it is communicated, and gradients are accumulated and reduced over ranks in the wider
/// dtype, so that updates below the spacing of the narrow dtype are not lost. Micikevicius et al., "Mixed Precision
/// Training", arXiv 1710.03740.
#[doc(alias = "MixedPrecision")]
#[doc(alias = "master weights")]
#[doc(alias = "amp")]
#[doc(alias = "autocast")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Compute dtype.
    pub dtype: DType,
    /// Dtype of stored parameters; it contains every number of `dtype`.
    pub param_dtype: DType,
}

impl Precision {
    /// Returns a precision with parameters in the compute dtype.
    #[must_use]
    pub const fn of(dtype: DType) -> Precision {
        Precision { dtype, param_dtype: dtype }
    }

    /// Returns mixed precision: parameters in the accumulator dtype, which is f32 for the 16-bit floats and else the
    /// compute dtype.
    #[doc(alias = "mixed_bfloat16")]
    #[must_use]
    pub const fn mixed(dtype: DType) -> Precision {
        Precision { dtype, param_dtype: dtype.accumulator() }
    }

    /// Refuses dtypes that are not floats, and a parameter dtype that does not contain every number of the compute
    /// dtype.
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
        let text =
            format!("parameters in {param_dtype} cannot represent every number of the compute dtype {dtype}");
        let wide = Precision::mixed(dtype).param_dtype;
        let choices = if wide == dtype { dtype.to_string() } else { format!("{wide} or {dtype}") };
        Err(Error::new(Kind::DType, text).detail("help", format!("store parameters in {choices}")))
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

/// Refuses a parameter dtype that is not a float.
pub(crate) fn check_dtype(dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(Error::new(Kind::DType, format!("parameters cannot have dtype {dtype}"))
        .detail("help", "use f32, f64, bf16 or f16"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::{BF16, F16, F32, F64, I64};

    #[test]
    fn parameter_dtype_must_contain_compute_dtype() {
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
