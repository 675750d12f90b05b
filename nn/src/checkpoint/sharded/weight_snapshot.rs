//! Snapshots of the weights that ranks still hold when their world fails, to rebuild the model in another world of
//! the same mesh.

use crate::module::Module;
use crate::module::param::{Param, StageOwners};
use crate::module::precision::Precision;
use crate::pipelined_model;
use crate::plan::Plan;
use crate::sharded_model::Model;
use shardgrad_tensor::{DetachedBytes, Error, Kind, Rank, Result, Tensor};

/// Snapshot of one rank's weights after a step. Its bytes belong to no rank, and so outlive the world of the rank. On
/// the host they share the memory of the parameters, so that a snapshot needs no memory for a copy. See
/// [`Trainer::rescue`](crate::Trainer::rescue).
#[doc(alias = "in-memory checkpoint")]
#[doc(alias = "fault tolerance")]
#[doc(alias = "elastic")]
#[derive(Clone, Debug)]
pub struct WeightSnapshot {
    step: u64,
    precision: Precision,
    params: Vec<ParamSnapshot>,
}

/// Snapshot of one parameter on a rank.
#[derive(Clone, Debug)]
struct ParamSnapshot {
    name: String,
    home: Option<StageOwners>,
    /// The bytes, if the parameter is stored on this rank.
    bytes: Option<DetachedBytes>,
}

impl WeightSnapshot {
    /// Takes a snapshot of a model on this rank. Nothing is communicated and no op runs, because a world that has
    /// failed refuses ops.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn from_model<M: Module>(model: &Model<M>, step: u64) -> Result<WeightSnapshot> {
        let held = |param: &Param| {
            let bytes = param.is_local().then(|| param.tensor().detach_bytes()).transpose()?;
            Ok(ParamSnapshot { name: param.name(), home: param.owners(), bytes })
        };
        let params = model.params().iter().map(held).collect::<Result<_>>()?;
        Ok(WeightSnapshot { step, precision: model.precision(), params })
    }

    /// Returns the number of applied steps.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Rebuilds the model on the same rank of another world, with the same mesh, module, plan and stages. On a
    /// pipeline the layers of the model cannot be called; the model can be saved.
    ///
    /// # Errors
    /// As [`Model::new`]; `Kind::Config` for another model, `Kind::Shape` for another mesh or plan.
    pub fn model<M: Module>(self, rank: &Rank, module: M, plan: &Plan) -> Result<Model<M>> {
        let model = match plan.pipeline_on(rank.mesh()) {
            None => Model::without_values(rank, module, plan, self.precision)?,
            Some((_, axis)) => pipelined_model::stage_model(rank, axis, module, plan, self.precision)?,
        };
        let (here, held) =
            (model.params().iter().map(Param::name), self.params.iter().map(|held| &held.name));
        if !here.eq(held.cloned()) {
            return Err(Error::new(
                Kind::Config,
                "the snapshot is of another model: its parameter names differ",
            ));
        }
        for (param, ParamSnapshot { name, home, bytes }) in model.params().iter().zip(self.params) {
            param.set_owners(home);
            if let Some(bytes) = bytes {
                let layout = param.layout();
                let tensor = Tensor::from_detached_bytes(model.rank(), &layout, &bytes);
                param.set_tensor(tensor.map_err(|e| e.detail("parameter", name))?)?;
            }
        }
        Ok(model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::Linear;
    use crate::optim::{Optimizer, Sgd};
    use crate::trainer::{Trainer, TrainerConfig};
    use shardgrad_autograd::Var;
    use shardgrad_tensor::{DType, Mesh, OverflowCheck, Value, World};
    use std::ops::Range;
    use std::sync::Mutex;

    /// An optimizer whose second update fails on the last rank, after it has begun.
    #[derive(Debug)]
    struct FailsInSecondUpdate(Sgd, bool);

    impl Optimizer for FailsInSecondUpdate {
        fn lr(&self) -> f64 {
            self.0.lr()
        }

        fn describe(&self) -> String {
            self.0.describe()
        }

        fn num_steps(&self) -> u64 {
            self.0.num_steps()
        }

        fn hyperparameters(&mut self, params: &[&Param], lr: f64) -> Result<Vec<Vec<f64>>> {
            self.0.hyperparameters(params, lr)
        }

        fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
            if self.1 && self.num_steps() == 1 {
                return Err(Error::new(Kind::OutOfMemory, "no room for an update"));
            }
            self.0.apply_update(params, step)
        }

        fn count_step(&mut self, params: &[&Param]) {
            self.0.count_step(params);
        }
    }

    /// Returns the snapshots of all ranks after the second step failed on the last rank, in its loss or in its
    /// update.
    fn weights_left_by(in_update: bool) -> Vec<Result<WeightSnapshot>> {
        let left = Mutex::new(vec![None, None]);
        let plan = Plan::data_parallel("dp");
        let result = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let fails = rank.index() == 1;
            let read = |rank: &Rank, step: u64, rows: Range<usize>| {
                if fails && !in_update && step == 1 {
                    return Err(Error::new(Kind::OutOfMemory, "no room for a batch"));
                }
                let layout = plan.batch_layout(rank.mesh(), DType::F32, &[rows.len(), 3])?;
                Ok(vec![Tensor::full(rank, &layout, 1.5)?])
            };
            let loss = |model: &Linear, x: &[Var]| model.forward(&x[0]).square().mean();
            let optim = FailsInSecondUpdate(Sgd::new(0.1), fails && in_update);
            let mut trainer =
                Trainer::new(rank, Linear::new(3, 4), &plan, optim, TrainerConfig::new(4), read, loss)?;
            trainer.step()?;
            let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| trainer.step()));
            left.lock().unwrap()[rank.index()] = Some(trainer.rescue());
            failed.unwrap_or_else(|payload| std::panic::resume_unwind(payload)).map(drop)
        });
        assert_eq!(result.unwrap_err().kind(), Kind::OutOfMemory);
        left.into_inner().unwrap().into_iter().flatten().collect()
    }

    #[test]
    fn snapshot_is_refused_after_update_began() {
        let snapshots: Vec<WeightSnapshot> =
            weights_left_by(false).into_iter().collect::<Result<_>>().unwrap();
        let num_bytes =
            |snapshot: &WeightSnapshot| snapshot.params[0].bytes.as_ref().map(DetachedBytes::num_bytes);
        assert!(
            snapshots.iter().all(|snapshot| snapshot.step() == 1 && num_bytes(snapshot) == Some(4 * 3 * 4))
        );
        let values = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let own = snapshots[rank.index()].clone();
            own.model(rank, Linear::new(3, 4), &Plan::data_parallel("dp"))?.params()[0]
                .tensor()
                .to_local_f64()
        });
        let values = values.unwrap();
        assert_eq!((values[0].len(), &values[0]), (12, &values[1]));
        let snapshots = weights_left_by(true);
        let error = snapshots[1].as_ref().unwrap_err();
        assert!(error.message().contains("the update of step 2 had begun"), "{error}");
    }

    #[test]
    fn snapshot_of_another_model_is_refused() {
        let snapshot = weights_left_by(false).swap_remove(0).unwrap();
        let refused = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let unlike = snapshot
                .clone()
                .model(rank, Linear::new(3, 5), &Plan::data_parallel("dp"))
                .map(drop)
                .unwrap_err();
            assert_eq!(unlike.kind(), Kind::Shape, "{unlike}");
            snapshot
                .clone()
                .model(rank, Linear::new(3, 4), &Plan::data_parallel("dp"))
                .map(|model| model.params().len())
        });
        assert_eq!(refused.unwrap(), [2, 2]);
    }
}
