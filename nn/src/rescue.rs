//! The weights that ranks still hold when their world fails, carried into another world on the same mesh.

use crate::module::Module;
use crate::param::{Home, Param};
use crate::placed::Model;
use crate::plan::Plan;
use crate::precision::Precision;
use crate::staged;
use shardgrad_tensor::{DetachedBytes, Error, Kind, Rank, Result, Tensor};

/// What one rank held of the weights after a step: bytes that belong to no rank, and so outlive its world. On the host they are the
/// memory of the parameters itself, so that they are kept even where there is no memory for a copy. See
/// [`Trainer::rescue`](crate::Trainer::rescue).
#[derive(Clone, Debug)]
pub struct Rescued {
    step: u64,
    precision: Precision,
    params: Vec<Held>,
}

/// A parameter as a rank held it.
#[derive(Clone, Debug)]
struct Held {
    name: String,
    home: Option<Home>,
    /// Where it lives on this rank.
    bytes: Option<DetachedBytes>,
}

impl Rescued {
    /// What this rank holds of a model; nothing is communicated, and no op is applied, which a world that has failed refuses.
    ///
    /// # Errors
    /// What the device reports.
    pub(crate) fn of<M: Module>(model: &Model<M>, step: u64) -> Result<Rescued> {
        let held = |param: &Param| {
            let bytes = param.is_here().then(|| param.tensor().detach_bytes()).transpose()?;
            Ok(Held { name: param.name(), home: param.home(), bytes })
        };
        let params = model.params().iter().map(held).collect::<Result<_>>()?;
        Ok(Rescued { step, precision: model.precision(), params })
    }

    /// How many steps were taken.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The model on the same place of another world: of the same mesh, module text and plan, with stages where they were. Its
    /// layers cannot be called on a pipeline; it can be saved.
    ///
    /// # Errors
    /// As [`Model::new`]; `Kind::Config` for another model, `Kind::Shape` for another mesh or plan.
    pub fn model<M: Module>(self, rank: &Rank, module: M, plan: &Plan) -> Result<Model<M>> {
        let model = match plan.pipeline_on(rank.mesh()) {
            None => Model::outline(rank, module, plan, self.precision)?,
            Some((_, axis)) => staged::outline(rank, axis, module, plan, self.precision)?,
        };
        let (here, held) =
            (model.params().iter().map(Param::name), self.params.iter().map(|held| &held.name));
        if !here.eq(held.cloned()) {
            return Err(Error::new(Kind::Config, "the weights that are left are those of another model"));
        }
        for (param, Held { name, home, bytes }) in model.params().iter().zip(self.params) {
            param.settle(home);
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
    use crate::trainer::{Settings, Trainer};
    use shardgrad_autograd::Var;
    use shardgrad_tensor::{DType, GatedStep, Mesh, Value, World};
    use std::ops::Range;
    use std::sync::Mutex;

    /// A rule whose second update fails on the last rank, when it has begun.
    #[derive(Debug)]
    struct Fails(Sgd, bool);

    impl Optimizer for Fails {
        fn lr(&self) -> f64 {
            self.0.lr()
        }

        fn describe(&self) -> String {
            self.0.describe()
        }

        fn num_steps(&self) -> u64 {
            self.0.num_steps()
        }

        fn rates(&mut self, params: &[&Param], lr: f64) -> Result<Vec<f64>> {
            self.0.rates(params, lr)
        }

        fn change(&mut self, params: &[(&Param, Tensor)], step: &GatedStep) -> Result<()> {
            if self.1 && self.num_steps() == 1 {
                return Err(Error::new(Kind::OutOfMemory, "no room for an update"));
            }
            self.0.change(params, step)
        }

        fn count(&mut self, params: &[&Param]) {
            self.0.count(params);
        }
    }

    /// What is left of each rank when the second step fails on the last one, in its loss or in its update.
    fn left(in_update: bool) -> Vec<Result<Rescued>> {
        let left = Mutex::new(vec![None, None]);
        let plan = Plan::data("dp");
        let ended = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let fails = rank.index() == 1;
            let read = |rank: &Rank, step: u64, rows: Range<usize>| {
                if fails && !in_update && step == 1 {
                    return Err(Error::new(Kind::OutOfMemory, "no room for a batch"));
                }
                let layout = plan.batch_layout(rank.mesh(), DType::F32, &[rows.len(), 3])?;
                Ok(vec![Tensor::full(rank, &layout, 1.5)?])
            };
            let loss = |model: &Linear, x: &[Var]| model.forward(&x[0]).square().mean();
            let optim = Fails(Sgd::new(0.1), fails && in_update);
            let mut trainer =
                Trainer::new(rank, Linear::new(3, 4), &plan, optim, Settings::new(4), read, loss)?;
            trainer.step(&[])?;
            let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| trainer.step(&[])));
            left.lock().unwrap()[rank.index()] = Some(trainer.rescue());
            failed.unwrap_or_else(|payload| std::panic::resume_unwind(payload)).map(drop)
        });
        assert_eq!(ended.unwrap_err().kind(), Kind::OutOfMemory);
        left.into_inner().unwrap().into_iter().flatten().collect()
    }

    #[test]
    fn weights_are_left_unless_their_update_had_begun() {
        let both: Vec<Rescued> = left(false).into_iter().collect::<Result<_>>().unwrap();
        let num_bytes = |one: &Rescued| one.params[0].bytes.as_ref().map(DetachedBytes::num_bytes);
        assert!(both.iter().all(|one| one.step() == 1 && num_bytes(one) == Some(4 * 3 * 4)));
        let values = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let own = both[rank.index()].clone();
            own.model(rank, Linear::new(3, 4), &Plan::data("dp"))?.params()[0].tensor().to_local_f64()
        });
        let values = values.unwrap();
        assert_eq!((values[0].len(), &values[0]), (12, &values[1]));
        let found = left(true);
        let error = found[1].as_ref().unwrap_err();
        assert!(error.message().contains("the update of step 2 had begun"), "{error}");
    }

    #[test]
    fn another_model_is_refused() {
        let one = left(false).swap_remove(0).unwrap();
        let refused = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let unlike = one.clone().model(rank, Linear::new(3, 5), &Plan::data("dp")).map(drop).unwrap_err();
            assert_eq!(unlike.kind(), Kind::Shape, "{unlike}");
            one.clone().model(rank, Linear::new(3, 4), &Plan::data("dp")).map(|model| model.params().len())
        });
        assert_eq!(refused.unwrap(), [2, 2]);
    }
}
