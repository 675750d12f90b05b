//! Exponential moving averages of parameters (EMA), and their use in place of the parameters.

use super::hyperparameter::{BELOW_ONE, check_setting};
use super::optimizer::{Optimizer, OptimizerState, wrong_num_tensors};
use crate::module::Module;
use crate::module::param::Param;
use crate::sharded_model::Model;
use shardgrad_autograd::Key;
use shardgrad_tensor::{Error, Hyperparameters, Kind, OverflowCheck, Result, Tensor, Value};
use std::collections::{BTreeMap, HashSet};

/// Name of the averages in a checkpoint.
const STATE_NAME: &str = "ema";

/// Exponential moving average of the parameters of a model: average = decay average + (1 - decay) parameter.
///
/// ```
/// use shardgrad_nn::{AdamW, Ema, Linear, Model, Optimizer, Plan};
/// use shardgrad_tensor::{Elementwise, Mesh, Reduction, Tensor, Value, World};
/// # fn main() -> shardgrad_tensor::Result<()> {
/// World::run(Mesh::single(), |rank| {
///     let model = Model::new(rank, Linear::new(2, 1), &Plan::new(), 1)?;
///     let (mut optim, mut ema) = (AdamW::new(0.1), Ema::new(&model, 0.999));
///     let x = Tensor::from_host(rank, &[1, 2], &[1.0f32, 2.0])?;
///     for _ in 0..3 {
///         let tape = model.tape();
///         model.forward(&tape.constant(x.clone())).square().mean().backward()?;
///         optim.update(&model, tape.gradients())?;
///         ema.update(&model)?;
///     }
///     let weights = model.param("weight")?.tensor().to_f64()?;
///     {
///         let _averages = ema.swap_in(&model)?;
///         assert_ne!(model.param("weight")?.tensor().to_f64()?, weights);
///     }
///     assert_eq!(model.param("weight")?.tensor().to_f64()?, weights);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// An average has the layout of its stored parameter and its accumulator dtype (f32 for the 16-bit floats), so averages need as much
/// memory as the parameters and no communication, under any plan. Parameters that are frozen when the average begins have
/// none: they cost nothing. [`Ema::with_optimizer`] saves and loads averages in checkpoints.
#[doc(alias = "ExponentialMovingAverage")]
#[doc(alias = "AveragedModel")]
#[doc(alias = "Polyak averaging")]
#[derive(Debug)]
pub struct Ema {
    decay: f64,
    averages: BTreeMap<Key, (Param, Tensor)>,
}

impl Ema {
    /// Returns averages that begin at the parameters as they are.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the decay is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn new<M: Module>(model: &Model<M>, decay: f64) -> Ema {
        check_setting("the decay of the average", decay, BELOW_ONE);
        let mut ema = Ema { decay, averages: BTreeMap::new() };
        ema.add_missing(model);
        ema
    }

    /// Begins averages of the parameters that have none, unless they are frozen or on another stage of a pipeline.
    fn add_missing<M: Module>(&mut self, model: &Model<M>) {
        for param in model.params().iter().filter(|param| param.is_local() && !param.is_frozen()) {
            self.averages.entry(param.key()).or_insert_with(|| (param.clone(), widened(param)));
        }
    }

    /// Updates the averages by the parameters; call it after each step. A parameter that was frozen before begins with its
    /// value now. Local to each rank.
    ///
    /// # Errors
    /// `Kind::Config` for another model than the averages are of.
    #[doc(alias = "update_parameters")]
    pub fn update<M: Module>(&mut self, model: &Model<M>) -> Result<()> {
        self.check_model(model)?;
        for (param, average) in self.averages.values_mut() {
            let own = widened(param).scale(1.0 - self.decay);
            *average = average.scale(self.decay).add(&own);
        }
        self.add_missing(model);
        Ok(())
    }

    /// Returns the average of a parameter, if it has one.
    #[must_use]
    pub fn average(&self, param: &Param) -> Option<Tensor> {
        Some(self.averages.get(&param.key())?.1.clone())
    }

    /// Puts the averages in place of the parameters, rounded to their dtype, until the result is dropped, also by a panic or an
    /// early return. Evaluate or save the model in between. Optimizer steps and checkpoints are refused until then: an update would be
    /// lost, and a resumed run would train the averages.
    ///
    /// # Errors
    /// As [`Ema::update`].
    #[doc(alias = "apply_shadow")]
    #[doc(alias = "swap_parameters")]
    pub fn swap_in<M: Module>(&self, model: &Model<M>) -> Result<EmaSwap<'_>> {
        self.check_model(model)?;
        let mut swap = EmaSwap { averages: self, parameters: Vec::with_capacity(self.averages.len()) };
        for (param, average) in self.averages.values() {
            let parameter = param.tensor();
            param.set_tensor(average.cast(parameter.dtype()))?;
            param.count_averages_in_place(1);
            swap.parameters.push((param.clone(), parameter));
        }
        Ok(swap)
    }

    /// Returns an optimizer whose state has the averages too, under the name `ema`: pass it to
    /// [`checkpoint::save`](crate::checkpoint::save) and [`checkpoint::load`](crate::checkpoint::load) in place of the optimizer. A
    /// run resumes on any mesh; averages without a saved value begin at the loaded parameters.
    ///
    /// ```no_run
    /// # use shardgrad_nn::{AdamW, Ema, Linear, Model, checkpoint, checkpoint::RunState};
    /// # use std::path::Path;
    /// # fn example(model: &Model<Linear>, mut optim: AdamW, mut ema: Ema) -> shardgrad_tensor::Result<()> {
    /// # let state = RunState::default();
    /// let dir = Path::new("checkpoint-100");
    /// checkpoint::save_weights(dir, model, &ema.with_optimizer(&mut optim), &state)?;
    /// let state = checkpoint::load_weights(dir, model, &mut ema.with_optimizer(&mut optim))?;
    /// # drop(state);
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "state_dict")]
    #[must_use]
    pub fn with_optimizer<'a>(&'a mut self, optim: &'a mut (dyn Optimizer + 'a)) -> EmaWithOptimizer<'a> {
        EmaWithOptimizer { ema: self, optim }
    }

    fn check_model<M: Module>(&self, model: &Model<M>) -> Result<()> {
        let keys: HashSet<Key> = model.params().iter().map(Param::key).collect();
        match self.averages.iter().find(|(key, _)| !keys.contains(key)) {
            None => Ok(()),
            Some((_, (param, _))) => {
                let text = format!("the average of parameter `{}` is of another model", param.name());
                Err(Error::new(Kind::Config, text).detail("help", "make an Ema for each model"))
            }
        }
    }
}

/// Returns a parameter in the dtype of averages.
fn widened(param: &Param) -> Tensor {
    let tensor = param.tensor();
    let dtype = tensor.dtype().accumulator();
    tensor.cast(dtype)
}

/// Averages in place of parameters; puts the parameters back when dropped.
#[must_use = "the parameters are put back when this is dropped"]
#[derive(Debug)]
pub struct EmaSwap<'a> {
    averages: &'a Ema,
    parameters: Vec<(Param, Tensor)>,
}

impl EmaSwap<'_> {
    /// Returns the averages that are in place of the parameters.
    #[must_use]
    pub fn ema(&self) -> &Ema {
        self.averages
    }
}

impl Drop for EmaSwap<'_> {
    fn drop(&mut self) {
        for (param, tensor) in self.parameters.drain(..) {
            param.count_averages_in_place(-1);
            let done = param.set_tensor(tensor);
            // A second panic would end the process.
            let is_fine = done.is_ok() || std::thread::panicking();
            assert!(is_fine, "bug: the layout of a parameter does not change: {done:?}");
        }
    }
}

/// An optimizer together with averages of the parameters, for checkpoints ([`Ema::with_optimizer`]). Steps are those of the
/// optimizer.
#[derive(Debug)]
pub struct EmaWithOptimizer<'a> {
    ema: &'a mut Ema,
    optim: &'a mut (dyn Optimizer + 'a),
}

impl Optimizer for EmaWithOptimizer<'_> {
    fn lr(&self) -> f64 {
        self.optim.lr()
    }

    fn describe(&self) -> String {
        format!("{}; averages of decay {}", self.optim.describe(), self.ema.decay)
    }

    fn num_steps(&self) -> u64 {
        self.optim.num_steps()
    }

    fn hyperparameters(&mut self, params: &[&Param], lr: f64) -> Result<Hyperparameters> {
        self.optim.hyperparameters(params, lr)
    }

    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
        self.optim.apply_update(params, step)
    }

    fn count_step(&mut self, params: &[&Param]) {
        self.optim.count_step(params);
    }

    fn check_params(&self, params: &[Param]) -> Result<()> {
        self.optim.check_params(params)
    }

    fn update_group(&self, param: &Param) -> usize {
        self.optim.update_group(param)
    }

    fn state_names(&self, param: &Param) -> Option<Vec<&'static str>> {
        let mut names = self.optim.state_names(param)?;
        names.push(STATE_NAME);
        Some(names)
    }

    /// The state of the optimizer and the average. A parameter that the optimizer has not updated has neither, unless the
    /// optimizer has no state at all.
    fn param_state(&self, param: &Param) -> Option<OptimizerState> {
        let has_names = self.optim.state_names(param).is_some_and(|names| !names.is_empty());
        let (num_steps, mut tensors) = match self.optim.param_state(param) {
            Some(state) => (state.num_steps, state.tensors),
            None if has_names => return None,
            None => (self.optim.num_steps(), vec![self.ema.average(param)?]),
        };
        if has_names {
            tensors.push(self.ema.average(param).unwrap_or_else(|| widened(param)));
        }
        Some(OptimizerState { num_steps, tensors })
    }

    fn load_state(&mut self, num_steps: u64, states: Vec<(Param, OptimizerState)>) -> Result<()> {
        let mut averages = BTreeMap::new();
        let mut of_optimizer = Vec::with_capacity(states.len());
        for (param, OptimizerState { num_steps, mut tensors }) in states {
            let Some(average) = tensors.pop() else { return Err(wrong_num_tensors(&param, 0, 1)) };
            let layout = param.layout();
            let layout = layout.with_dtype(layout.dtype().accumulator());
            if *average.layout() != layout {
                let text =
                    format!("the average has layout {}, the parameter needs {layout}", average.layout());
                return Err(Error::new(Kind::Layout, text).detail("parameter", param.name()));
            }
            if !tensors.is_empty() {
                of_optimizer.push((param.clone(), OptimizerState { num_steps, tensors }));
            }
            averages.insert(param.key(), (param, average));
        }
        self.optim.load_state(num_steps, of_optimizer)?;
        for (key, (param, average)) in &mut self.ema.averages {
            *average = averages.remove(key).map_or_else(|| widened(param), |(_, average)| average);
        }
        self.ema.averages.extend(averages);
        Ok(())
    }
}
