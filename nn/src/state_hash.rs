//! The hash of weights and optimizer state.

use crate::checkpoint::required_state_names;
use crate::module::Module;
use crate::module::param::Param;
use crate::optim::Optimizer;
use crate::sharded_model::Model;
use shardgrad_tensor::{Result, StateHash};
use std::panic::Location;

/// Returns a 128-bit hash of the weights of a model and of its optimizer's state: of (name, global index, bits) of each element,
/// counted once. Equal weights and state have one hash on every mesh, under every plan and on every pipeline, and a change of
/// one bit changes the hash. It reads all weights and state once and costs one all-gather of 16 bytes for each rank. A collective
/// call: every rank calls it together. The hash is not cryptographic; the null back end returns 0.
///
/// ```
/// use shardgrad_nn::{AdamW, Linear, Model, Plan, state_hash};
/// use shardgrad_tensor::{Mesh, World};
/// # fn main() -> shardgrad_tensor::Result<()> {
/// let plan = Plan::new().store("weight", "tp@1").store("bias", "tp@0");
/// let hash = |mesh| {
///     World::run(Mesh::parse(mesh)?, |rank| {
///         let model = Model::new(rank, Linear::new(3, 4), &plan, 1)?;
///         state_hash(&model, &AdamW::new(0.1))
///     })
/// };
/// assert_eq!(hash("tp=1")?[0], hash("tp=4")?[3]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `Kind::Unsupported` for an optimizer without [`Optimizer::state_names`]; `Kind::OutOfMemory`; errors of the device and of the
/// collective.
#[doc(alias = "checksum")]
#[track_caller]
pub fn state_hash<M: Module>(model: &Model<M>, optim: &dyn Optimizer) -> Result<StateHash> {
    let site = Location::caller();
    let state_names = required_state_names(optim, model.params()).map_err(|e| e.at(site))?;
    let rank = model.rank();
    let mut hash = StateHash::default();
    for (param, names) in model.params().iter().zip(state_names).filter(|(p, _)| p.is_primary_owner()) {
        add_param(&mut hash, param, (optim, &names), rank.index() == 0)?;
    }
    hash.sum_over_world(rank, site)
}

/// Adds a parameter and its optimizer state; the rank that counts numbers adds those.
fn add_param(
    hash: &mut StateHash,
    param: &Param,
    (optim, names): (&dyn Optimizer, &[&str]),
    counts_numbers: bool,
) -> Result<()> {
    let name = param.name();
    hash.add_tensor(&name, &param.tensor())?;
    let Some(state) = optim.param_state(param) else { return Ok(()) };
    if counts_numbers {
        hash.add_number(&format!("step:{name}"), state.num_steps);
    }
    let mut tensors = names.iter().zip(&state.tensors);
    tensors.try_for_each(|(kind, tensor)| hash.add_tensor(&format!("{kind}:{name}"), tensor))
}
