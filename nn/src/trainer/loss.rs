//! What a trainer asks of a loss.

use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Result, Value};

/// Refuses a loss of 16 bits: its mean has three digits, and whether the scaled one is finite depends on how many microbatches it
/// is divided by first, so on the mesh.
pub(super) fn wide(loss: Var) -> Result<Var> {
    let dtype = loss.dtype();
    if dtype == dtype.accumulator() {
        return Ok(loss);
    }
    let sums = dtype.accumulator();
    let text =
        format!("the loss is formed in {dtype}, which has neither digits nor room for a mean and its scale");
    let help = format!("cast before the mean: x.cast(DType::{}).mean()", sums.name().to_uppercase());
    Err(Error::new(Kind::DType, text).detail("help", help))
}
