//! Errors of ops: signature, arguments, place in the model, rank, and suggested repairs.

use super::{DTypes, ForwardContext, Op, differentiable_args};
use crate::execution::context::Context;
use crate::layout::Layout;
use crate::layout::refusal::Refusal;
use crate::layout::repair::{Repair, repairs};
use shardgrad_dist::{Error, Kind, Rank};
use std::panic::Location;
use std::rc::Rc;

/// The error of a forward with the op, its arguments and help.
pub(super) fn forward_error(error: Error, op: &dyn Op, local: &ForwardContext<'_>) -> Error {
    let (rank, site) = (local.rank, local.site);
    let inputs: &[&Layout] = &local.inputs.iter().collect::<Vec<_>>();
    match error.kind() {
        Kind::OutOfMemory => {
            let named = Error::new(Kind::OutOfMemory, format!("{}: {}", op.name(), error.message()));
            describe(named, op, rank, inputs, site).detail(
                "help",
                "shard over more ranks, use more microbatches, checkpoint (recompute) blocks, or raise the memory limit",
            )
        }
        Kind::Data => {
            // Replace the name of the kernel, which serves several ops, by the name of the op.
            let what = error.message().split_once(": ").map_or(error.message(), |(_, what)| what);
            describe(Error::new(Kind::Data, format!("{}: {what}", op.name())), op, rank, inputs, site)
                .detail("help", "check the values of the arguments; indices count from 0")
        }
        _ => error.at(site),
    }
}

/// Adds the details that errors of ops share: signature, arguments, place in the model, rank, line of the caller.
pub(super) fn describe(
    error: Error,
    op: &dyn Op,
    rank: &Rank,
    args: &[&Layout],
    site: &'static Location<'static>,
) -> Error {
    const LABELS: [&str; 8] = ["arg 0", "arg 1", "arg 2", "arg 3", "arg 4", "arg 5", "arg 6", "arg 7"];
    let mut error = error.detail("signature", op.signature());
    for (label, layout) in LABELS.iter().zip(args) {
        let local = layout.local_shape(rank.coordinates());
        error = error.detail(label, format!("{layout}    local {:?}", local.as_slice()));
    }
    let path = Context::of(rank).path();
    if !path.is_empty() {
        error = error.detail("at", path.to_string());
    }
    if rank.world().mesh().num_ranks() > 1 {
        error = error.detail("rank", rank.describe());
    }
    error.at(site)
}

/// The error of a refused op with hint or suggested repairs.
pub(super) fn refusal_error(
    op: &dyn Op,
    rank: &Rank,
    args: &[&Layout],
    refusal: &Refusal,
    site: &'static Location<'static>,
) -> Error {
    let kind = if refusal.code == "shape" { Kind::Shape } else { Kind::Layout };
    let mut error =
        describe(Error::new(kind, format!("{}: {}", op.name(), refusal.message)), op, rank, args, site);
    if let Some(hint) = &refusal.hint {
        error = error.detail("help", hint.as_str());
    } else if kind == Kind::Shape {
        let help = "shapes are global: reshape or transpose an argument; Tensor::from_local makes a tensor from a local shape";
        error = error.detail("help", help);
    }
    for repair in suggested_repairs(op, rank, args, refusal) {
        error = error.detail("help", repair.to_string());
    }
    error
}

/// The redistributions of arguments that make a refused op valid, cheapest first; the error of the refusal lists them.
#[must_use]
pub fn suggested_repairs(op: &dyn Op, rank: &Rank, args: &[&Layout], refusal: &Refusal) -> Vec<Repair> {
    let context = Context::of(rank);
    let signature = context.signature(op.signature());
    let infer = |args: &[&Layout]| {
        let dtypes: DTypes = args.iter().map(|l| l.dtype()).collect();
        let outputs =
            op.dtypes(&dtypes, signature.num_outputs()).expect("a repair changes layouts, not dtypes");
        let mut inference = Rc::unwrap_or_clone(op.infer(context, args, &outputs, &[])?);
        inference.outputs.truncate(inference.outputs.len() - op.num_saved());
        Ok(inference)
    };
    repairs(args, &differentiable_args(op, args), refusal, &context.routes, &infer)
}
