//! Comparison of the copies of gradients and parameters in the first update of a model and at intervals.

use crate::module::param::Param;
use shardgrad_autograd::Key;
use shardgrad_tensor::training_step::copies::{UpdatedParam, check_copies};
use shardgrad_tensor::{Rank, Result, Tensor};
use std::cell::RefCell;
use std::collections::HashSet;
use std::panic::Location;

/// The models of a rank whose first update was due for a check, by the key of their first parameter.
#[derive(Default)]
struct CheckedModels(RefCell<HashSet<Key>>);

/// Whether an update compares copies: the first one of a model on this rank (in this process, if the run was resumed), and
/// the one after every `every` applied steps; none for 0.
pub(super) fn is_check_due(rank: &Rank, params: &[Param], num_steps: u64, every: u64) -> bool {
    let Some(first) = params.first().filter(|_| every > 0 && rank.mesh().num_ranks() > 1) else {
        return false;
    };
    rank.extension::<CheckedModels>().0.borrow_mut().insert(first.key()) || num_steps.is_multiple_of(every)
}

/// Compares the copies that an update uses. Every rank of a pipeline stage calls this together.
///
/// # Errors
/// `Kind::Diverged` on every rank, naming parameters and ranks; errors of the collective.
pub(super) fn check_update_copies(
    updates: &[(Param, Tensor)],
    site: &'static Location<'static>,
) -> Result<()> {
    let Some((first, _)) = updates.first() else { return Ok(()) };
    let updated = |(param, gradient): &(Param, Tensor)| UpdatedParam {
        name: param.name(),
        value: param.tensor(),
        gradient: gradient.clone(),
    };
    let params: Vec<UpdatedParam> = updates.iter().map(updated).collect();
    check_copies(first.tensor().rank(), &params, site)
}
