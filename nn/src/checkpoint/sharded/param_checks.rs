//! Checks of the parameters on all ranks: non-finite numbers, and copies that differ.

use crate::module::Module;
use crate::module::param::{Param, StageOwners};
use crate::sharded_model::Model;
use shardgrad_tensor::training_step::consistency::{SharedTensor, check_replicas, check_shared_replicas};
use shardgrad_tensor::training_step::control::world_sum;
use shardgrad_tensor::training_step::grad_norm::local_sum_squares;
use shardgrad_tensor::{Result, Tensor};
use std::panic::Location;

impl<M: Module> Model<M> {
    /// Returns the names of the parameters that contain NaN or infinity, equal on every rank. Costs one small
    /// collective; every rank calls this together. Each rank sums the squares of its parameters, and inspects single
    /// parameters only if the sum is not finite.
    ///
    /// # Errors
    /// Errors of the kernels and the collective.
    #[track_caller]
    pub fn non_finite_params(&self) -> Result<Vec<String>> {
        let here: Vec<Tensor> = self.params().iter().filter(|p| p.is_local()).map(Param::tensor).collect();
        let has_non_finite = !local_sum_squares(self.rank(), &here)?.is_finite();
        let is_not_finite = |x: &f64| !x.is_finite();
        let found = |p: &Param| Ok(has_non_finite && p.tensor().to_local_f64()?.iter().any(is_not_finite));
        params_where(self, found, Location::caller())
    }

    /// Returns the names of the parameters that contain NaN, equal on every rank. Every rank calls this together.
    ///
    /// # Errors
    /// Errors of the device and the collective.
    #[track_caller]
    pub(crate) fn nan_params(&self) -> Result<Vec<String>> {
        let found = |p: &Param| Ok(p.tensor().to_local_f64()?.iter().any(|x| x.is_nan()));
        params_where(self, found, Location::caller())
    }
}

/// Returns the names of the parameters for which `found` is true on any rank that stores them; equal on every rank.
pub(super) fn params_where<M: Module>(
    model: &Model<M>,
    found: impl Fn(&Param) -> Result<bool>,
    site: &'static Location<'static>,
) -> Result<Vec<String>> {
    let flags = |p: &Param| Ok(f64::from(u8::from(p.is_local() && found(p)?)));
    let flags: Vec<f64> = model.params().iter().map(flags).collect::<Result<_>>()?;
    let sums = world_sum(model.rank(), &flags, site)?;
    Ok(model.params().iter().zip(sums).filter(|(_, sum)| *sum > 0.0).map(|(p, _)| p.name()).collect())
}

/// Compares the copies of all parameters of this rank's stage, bit for bit, and, between stages, those of parameters
/// that several stages hold. Every rank calls this together.
///
/// # Errors
/// `Kind::Diverged` on every rank, naming parameters and ranks; errors of the collective.
pub(crate) fn check_parameters<M: Module>(model: &Model<M>, site: &'static Location<'static>) -> Result<()> {
    let tensors: Vec<(String, Tensor)> =
        model.params().iter().filter(|p| p.is_local()).map(|p| (p.name(), p.tensor())).collect();
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (&**name, tensor)).collect();
    check_replicas(model.rank(), &tensors, site)?;
    let tied = model.params().iter().filter_map(|p| Some((p, p.owners().filter(|h| h.ranks.len() > 1)?)));
    let tied: Vec<(String, &Param, StageOwners)> = tied.map(|(p, owners)| (p.name(), p, owners)).collect();
    let Some(axis) = tied.first().map(|(.., owners)| owners.axis) else { return Ok(()) };
    let shared = tied.iter().map(|(name, param, owners)| SharedTensor {
        name,
        layout: param.layout(),
        positions: owners.ranks.clone(),
        replica: param.is_local().then(|| param.tensor()),
    });
    check_shared_replicas(model.rank(), axis, &shared.collect::<Vec<_>>(), site)
}
