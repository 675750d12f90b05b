//! The end of a stage: its gradients go to where the parameters are stored.

use super::{Step, missing, receive};
use crate::id::{Id, Key};
use shardgrad_dist::{Phase, Result};
use shardgrad_tensor::{Context, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;

impl Step<'_> {
    /// Takes the routes of a stage's parameters back, each once. One that another stage of this rank reads too waits for it.
    pub(super) fn reduce(&mut self, stage: usize) -> Result<()> {
        self.reduced.push(stage);
        let (runner, here) = (self.runner, self.here());
        let later = |other: &usize| runner.schedule.place[*other] == here && !self.reduced.contains(other);
        let waits: BTreeSet<Key> = (0..runner.stages.stages().len())
            .filter(later)
            .flat_map(|other| runner.stages.keys(other))
            .collect();
        let outers = &runner.stages.program().outers;
        let ready = |outer: &u32| outers[*outer as usize].key.is_some_and(|key| !waits.contains(&key));
        let (ready, left) = std::mem::take(&mut self.sums).into_iter().partition(|(outer, _)| ready(outer));
        self.sums = left;
        let ready: BTreeMap<u32, Tensor> = ready;
        let mut seeds: Vec<(Id, Tensor)> = Vec::new();
        for (outer, sum) in ready {
            seeds.extend(self.computed.remove(&outer).and_then(|(var, _)| var.id()).map(|id| (id, sum)));
        }
        self.tape.backward_from(seeds);
        self.gradients.extend(self.tape.gradients());
        Ok(())
    }

    /// Adds up the gradients of parameters that several places share.
    pub(super) fn sum_shared(&mut self) -> Result<()> {
        if !self.trains {
            return Ok(());
        }
        self.computed.clear();
        let (runner, here) = (self.runner, self.here());
        for (key, places) in runner.stages.shared(&runner.schedule.place) {
            if !places.contains(&here) || !(self.feed.is_trained)(key) {
                continue;
            }
            let layout = (self.feed.parameter)(key).layout().clone();
            let own = self.gradients.remove(&key);
            let own = own.map_or_else(|| Tensor::zeros(runner.rank, &layout.dual()), Ok)?;
            let sum = self.sum_over(&places, own)?;
            self.gradients.insert(key, sum);
        }
        Ok(())
    }

    /// The place of this rank.
    fn here(&self) -> usize {
        self.runner.rank.world().coordinate(self.runner.axis)
    }

    /// The sum of a gradient over the places that hold its parameter, in their order, so the same bits everywhere.
    #[track_caller]
    fn sum_over(&self, places: &[usize], own: Tensor) -> Result<Tensor> {
        let (runner, site, here) = (self.runner, Location::caller(), self.here());
        let layout = own.layout().clone();
        let path = Context::of(runner.rank).path();
        let call = runner.call(&layout, Phase::Backward, &path, site);
        let piece = own.piece().flat(runner.rank)?;
        for &to in places.iter().filter(|p| **p != here) {
            runner.post(&call, &piece, to)?;
        }
        let mut sum: Option<Tensor> = None;
        for &from in places {
            let part = match from == here {
                true => own.clone(),
                false => receive(runner.rank, &call, layout.clone(), from)?,
            };
            sum = Some(match sum {
                None => part,
                Some(sum) => sum.accumulate(&part)?,
            });
        }
        sum.ok_or_else(missing)
    }
}
