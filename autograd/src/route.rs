//! A tensor moved along the route of a redistribution, outside of the tape.

use shardgrad_dist::{Rank, Result};
use shardgrad_tensor::{Context, Op, Tensor, op};
use std::panic::Location;

/// Moves a tensor along a route, on a rank with a context, or as a meta tensor.
///
/// # Errors
/// Errors of the collectives, `Kind::OutOfMemory`.
pub(crate) fn along_route(
    route: &dyn Op,
    from: &Tensor,
    (rank, context, is_meta): (&Rank, &Context, bool),
    site: &'static Location<'static>,
) -> Result<Tensor> {
    let inference = op::plan(route, (rank, context), &[from.layout()], &[], site)?;
    let made = match is_meta {
        true => op::meta(&inference, rank),
        false => op::run(route, &[from.local()], &inference, (rank, context), site)?,
    };
    Ok(made.into_iter().next().expect("redistribute has one output"))
}
