//! Proof, before the first step of a trainer, that its collectives have one issue order over all groups of all ranks.

use super::Trainer;
use super::row_leaves::RowLeaves;
use crate::module::Module;
use crate::module::param::Param;
use shardgrad_tensor::{Record, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};

impl<M: Module> Trainer<'_, M> {
    /// Compares the calls of the forward and backward passes of a step between all ranks
    /// ([`TrainerConfig::proves_issue_order`](super::TrainerConfig::proves_issue_order)), unless that is done: before the first step, and
    /// again when other parameters are frozen. A collective call.
    ///
    /// # Errors
    /// As [`Rank::check_issue_order`](shardgrad_tensor::Rank::check_issue_order).
    pub(super) fn prove_issue_order(&mut self) -> Result<()> {
        if !self.config.proves_issue_order || !self.has_several_groups() {
            return Ok(());
        }
        let frozen: Vec<bool> = self.model.params().iter().map(Param::is_frozen).collect();
        if self.proved_frozen.as_ref() == Some(&frozen) {
            return Ok(());
        }
        let trace = self.dry_trace();
        self.model.rank().check_issue_order(trace.as_deref(), self.site)?;
        self.proved_frozen = Some(frozen);
        Ok(())
    }

    /// Whether calls of this rank may wait for each other across groups: a mesh of several axes, or messages of a pipeline. Ranks that
    /// share one group compare the order of its calls as they make them.
    fn has_several_groups(&self) -> bool {
        let world = self.model.rank().world();
        let mesh = world.mesh();
        let num_axes = mesh.axes().filter(|axis| mesh.size(*axis) > 1).count();
        !world.is_dry_run() && (num_axes > 1 || num_axes == 1 && self.pipelined.is_some())
    }

    /// The calls of this rank in the forward and backward passes of the next step, run on a dry twin of the rank. `None` if they cannot
    /// run there: a loss that reads values, or hooks.
    fn dry_trace(&mut self) -> Option<Vec<Record>> {
        if self.model.hooks().current() != 0 {
            return None;
        }
        let twin = self.model.rank().dry_twin();
        let pass_twin = self.leaves.as_ref().map(|leaves: &RowLeaves| leaves.pass_rank(&twin));
        let real = self.model.enter_dry_twin(twin.clone(), pass_twin);
        let passed = catch_unwind(AssertUnwindSafe(|| self.uncaptured_pass().map(drop)));
        self.model.leave_dry_twin(real);
        self.passes.borrow_mut().clear();
        matches!(passed, Ok(Ok(()))).then(|| twin.trace().take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gpt2Config, LanguageModel, ModelConfig, Plan, Sgd, TrainerConfig};
    use shardgrad_autograd::Var;
    use shardgrad_tensor::{DType, Mesh, Phase, Rank, Tensor, World};
    use std::ops::Range;

    /// The calls of the passes of a step, without their numbers in their groups.
    fn passes(records: Vec<Record>) -> Vec<Record> {
        let of_passes = records.into_iter().filter(|record| record.phase != Phase::Control);
        of_passes.map(|record| Record { seq: 0, ..record }).collect()
    }

    #[test]
    fn the_proved_trace_is_that_of_the_first_step() {
        let config = ModelConfig::from(Gpt2Config::new(11, 8, 12, 3, 2));
        let pipeline = |schedule: &str| Plan::pipeline_parallel("pp").pipeline_schedule(schedule);
        for (mesh, plan) in [
            ("dp=2,tp=2", Plan::sequence_parallel("tp")),
            ("dp=2,tp=2", Plan::zero(2, "dp")),
            ("dp=2,fsdp=2", Plan::new()),
            ("fsdp=2,tp=2", Plan::new()),
            ("dp=2,cp=2", Plan::context_parallel("cp").ring()),
            ("pp=2", pipeline("interleaved")),
            ("pp=2,fsdp=2", pipeline("zb-v").gathered_bytes_max(0)),
            ("pp=2,dp=2", Plan::zero(1, "dp")),
        ] {
            let plan = LanguageModel::plan(&config).and(plan);
            let trained = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let read = |rank: &Rank, _: u64, rows: Range<usize>| {
                    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), 6])?;
                    let ids = Tensor::zeros(rank, &layout)?;
                    Ok(vec![ids.clone(), ids])
                };
                let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
                let settings = TrainerConfig { microbatches: 2, ..TrainerConfig::new(4) };
                let module = LanguageModel::new(&config);
                let mut trainer = Trainer::new(rank, module, &plan, Sgd::new(0.1), settings, read, loss)?;
                let expected = passes(trainer.dry_trace().expect("the passes run on a twin"));
                assert!(expected.len() > 4, "{mesh}: {expected:?}");
                rank.trace().enable();
                rank.trace().take();
                trainer.step()?;
                assert_eq!(passes(rank.trace().take()), expected, "{mesh}");
                Ok(())
            });
            trained.unwrap_or_else(|error| panic!("{mesh}: {error}"));
        }
    }
}
