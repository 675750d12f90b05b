//! The end of a stage: reduces its gradients to the stored layouts, and sums those of tied parameters over stages.

use super::{Step, missing_value, receive};
use crate::id::{Id, Key};
use shardgrad_dist::{Phase, Result};
use shardgrad_tensor::{Context, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;

impl Step<'_> {
    /// Takes the adjoints of the routes of a stage's parameters, each once. A parameter that another stage of this rank
    /// also reads waits for that stage.
    pub(super) fn reduce(&mut self, stage: usize) -> Result<()> {
        self.reduced.push(stage);
        if self.leaves.is_some() {
            return Ok(());
        }
        let (runner, here) = (self.runner, self.here());
        let later =
            |other: &usize| runner.schedule.stage_ranks[*other] == here && !self.reduced.contains(other);
        let waits: BTreeSet<Key> = (0..runner.stages.stages().len())
            .filter(later)
            .flat_map(|other| runner.stages.keys(other))
            .collect();
        let external_inputs = &runner.stages.program().external_inputs;
        let ready =
            |external: &u32| external_inputs[*external as usize].key.is_some_and(|key| !waits.contains(&key));
        let (ready, left) =
            std::mem::take(&mut self.sums).into_iter().partition(|(external, _)| ready(external));
        self.sums = left;
        let ready: BTreeMap<u32, Tensor> = ready;
        let mut seeds: Vec<(Id, Tensor)> = Vec::new();
        for (external, sum) in ready {
            seeds.extend(self.parameters.remove(&external).and_then(|p| p.summed.id()).map(|id| (id, sum)));
        }
        self.tape.backward_from(seeds);
        self.gradients.extend(self.tape.gradients());
        Ok(())
    }

    /// Sums the gradients of parameters that several pipeline ranks share (tied weights).
    #[doc(alias = "tied embeddings")]
    #[doc(alias = "embedding group")]
    pub(super) fn sum_shared_parameters(&mut self) -> Result<()> {
        if !self.trains {
            return Ok(());
        }
        self.parameters.clear();
        if self.leaves.is_some() {
            return Ok(());
        }
        let (runner, here) = (self.runner, self.here());
        for (key, ranks) in runner.stages.shared_parameters(&runner.schedule.stage_ranks) {
            if !ranks.contains(&here) || !(self.inputs.is_trained)(key) {
                continue;
            }
            let layout = (self.inputs.parameter)(key).layout().clone();
            let own = self.gradients.remove(&key);
            let own = own.map_or_else(|| Tensor::zeros(runner.rank, &layout.dual()), Ok)?;
            let sum = self.sum_over(&ranks, own)?;
            self.gradients.insert(key, sum);
        }
        Ok(())
    }

    /// The pipeline rank of this process.
    fn here(&self) -> usize {
        self.runner.rank.world().coordinate(self.runner.axis)
    }

    /// The sum of a gradient over the pipeline ranks that hold its parameter, in their order, so that all get the same
    /// bits.
    #[track_caller]
    fn sum_over(&self, ranks: &[usize], own: Tensor) -> Result<Tensor> {
        let (runner, site, here) = (self.runner, Location::caller(), self.here());
        let layout = own.layout().clone();
        let path = Context::of(runner.rank).path();
        let call = runner.call(&layout, Phase::Backward, &path, site);
        let piece = own.local().flat(runner.rank)?;
        for &to in ranks.iter().filter(|p| **p != here) {
            runner.send_to(&call, &piece, to)?;
        }
        let mut sum: Option<Tensor> = None;
        for &from in ranks {
            let part = match from == here {
                true => own.clone(),
                false => receive(runner.rank, &call, layout.clone(), from)?,
            };
            sum = Some(match sum {
                None => part,
                Some(sum) => sum.accumulate(&part)?,
            });
        }
        sum.ok_or_else(missing_value)
    }
}
