//! Several optimizers for one model, by patterns on parameter names.

use super::hyperparameter::{NOT_NEGATIVE, check_range};
use super::lr_scheduler::LrScheduler;
use super::optimizer::{Optimizer, OptimizerState};
use crate::module::name::{matches, nearest};
use crate::module::param::Param;
use shardgrad_tensor::{Error, Hyperparameters, Kind, OverflowCheck, Result, Tensor};

/// Several optimizers for one model: each updates the parameters whose names match its pattern. A step has one gradient norm, one
/// clip and one overflow check over all of them. Later patterns take precedence.
///
/// ```
/// use shardgrad_nn::optim::Optimizers;
/// use shardgrad_nn::{AdamW, Linear, LrScheduler, Model, Muon, Optimizer, Plan};
/// use shardgrad_tensor::{Elementwise, Mesh, Reduction, Tensor, Value, World};
/// # fn main() -> shardgrad_tensor::Result<()> {
/// World::run(Mesh::single(), |rank| {
///     let model = Model::new(rank, Linear::new(2, 3), &Plan::new(), 1)?;
///     let mut optim = Optimizers::new()
///         .on("*weight", Muon::new(0.02))
///         .schedule(LrScheduler::constant(0.02).warmup(10))
///         .otherwise(AdamW::new(3e-4));
///     let tape = model.tape();
///     let x = tape.constant(Tensor::from_host(rank, &[1, 2], &[1.0f32, 2.0])?);
///     model.forward(&x).square().mean().backward()?;
///     optim.update(&model, tape.gradients())?;
///     assert_eq!(optim.lrs(), [0.004, 3e-4], "of the next step");
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// Each optimizer has its own learning rate, constant or by a schedule ([`Optimizers::schedule`]). The common learning rate of a
/// step ([`StepArgs::lr`](shardgrad_tensor::StepArgs::lr)) must therefore be that of [`Optimizer::lr`], which is 1; a schedule of
/// the trainer is refused. A checkpoint contains the state of each parameter under the names of its optimizer.
#[doc(alias = "param_groups")]
#[doc(alias = "optax.multi_transform")]
#[doc(alias = "MultiOptimizer")]
#[derive(Debug, Default)]
pub struct Optimizers {
    members: Vec<Member>,
    num_steps: u64,
}

/// One of several optimizers.
#[derive(Debug)]
struct Member {
    /// `None` for the optimizer of parameters that no pattern matches.
    pattern: Option<String>,
    optimizer: Box<dyn Optimizer>,
    schedule: Option<LrScheduler>,
}

impl Member {
    fn lr(&self, num_steps: u64) -> f64 {
        let scheduled = self.schedule.as_ref().map(|schedule| schedule.lr(num_steps as usize));
        scheduled.unwrap_or_else(|| self.optimizer.lr())
    }

    /// The pattern, for errors and descriptions.
    fn label(&self) -> &str {
        self.pattern.as_deref().unwrap_or("otherwise")
    }
}

impl Optimizers {
    /// Returns a list without optimizers.
    #[must_use]
    pub fn new() -> Optimizers {
        Optimizers::default()
    }

    /// Adds an optimizer for the parameters whose names match a pattern ([`matches()`]) and that no later pattern matches.
    /// [`Optimizer::check_params`] refuses a pattern that selects no parameter.
    #[must_use]
    pub fn on(self, pattern: &str, optimizer: impl Optimizer + 'static) -> Optimizers {
        self.with(Some(pattern.to_string()), optimizer)
    }

    /// Adds the optimizer of the parameters that no pattern matches. Without one, such a parameter is an error unless it is
    /// frozen.
    #[must_use]
    pub fn otherwise(self, optimizer: impl Optimizer + 'static) -> Optimizers {
        self.with(None, optimizer)
    }

    fn with(mut self, pattern: Option<String>, optimizer: impl Optimizer + 'static) -> Optimizers {
        self.members.push(Member { pattern, optimizer: Box::new(optimizer), schedule: None });
        self
    }

    /// Sets the learning-rate schedule of the optimizer that was added last, by the number of applied steps. Without one, the
    /// optimizer has its constant rate.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` before any optimizer was added.
    #[doc(alias = "lr_scheduler")]
    #[track_caller]
    #[must_use]
    pub fn schedule(mut self, schedule: LrScheduler) -> Optimizers {
        match self.members.last_mut() {
            Some(member) => member.schedule = Some(schedule),
            None => Error::new(Kind::Config, "a schedule is set before any optimizer was added")
                .detail("help", "call `schedule` after `on` or `otherwise`")
                .at(std::panic::Location::caller())
                .raise(),
        }
        self
    }

    /// Returns the learning rate of each optimizer in the next step, in the order in which they were added.
    #[doc(alias = "get_last_lr")]
    #[must_use]
    pub fn lrs(&self) -> Vec<f64> {
        self.members.iter().map(|member| member.lr(self.num_steps)).collect()
    }

    /// Returns the number of the optimizer of a parameter.
    fn index_of(&self, name: &str) -> Option<usize> {
        let is_match = |member: &Member| member.pattern.as_ref().is_some_and(|p| matches(p, name));
        let by_pattern = self.members.iter().rposition(is_match);
        by_pattern.or_else(|| self.members.iter().rposition(|member| member.pattern.is_none()))
    }

    fn member_of(&self, param: &Param) -> Option<&Member> {
        Some(&self.members[self.index_of(&param.name())?])
    }

    /// Refuses patterns that select no parameter, and parameters without an optimizer.
    fn check_patterns(&self, params: &[Param], of: &[Option<usize>]) -> Result<()> {
        let names: Vec<String> = params.iter().map(Param::name).collect();
        for (i, member) in self.members.iter().enumerate() {
            let Some(pattern) = member.pattern.as_ref().filter(|_| !of.contains(&Some(i))) else { continue };
            let num_matched = names.iter().filter(|name| matches(pattern, name)).count();
            if num_matched > 0 {
                let text = format!(
                    "the optimizer on `{pattern}` has no parameter: later patterns take all {num_matched} that match"
                );
                return Err(Error::new(Kind::Config, text)
                    .detail("help", "add the optimizer of the more general pattern first"));
            }
            let text = format!("the optimizer on `{pattern}` has no parameter: no name matches");
            let near = nearest(pattern, names.iter().map(String::as_str)).join(", ");
            return Err(Error::new(Kind::Config, text).detail("nearest", near));
        }
        let mut left = params.iter().zip(of).filter(|(param, of)| of.is_none() && !param.is_frozen());
        let Some((first, _)) = left.next() else { return Ok(()) };
        let text = format!(
            "no optimizer updates parameter `{}`, nor {} others: no pattern matches",
            first.name(),
            left.count()
        );
        let help = "add `.otherwise(AdamW::new(3e-4))`, a pattern that matches, or freeze the parameters (Model::freeze)";
        Err(Error::new(Kind::Config, text).detail("help", help))
    }
}

impl Optimizer for Optimizers {
    fn lr(&self) -> f64 {
        1.0
    }

    fn describe(&self) -> String {
        let member = |member: &Member| {
            let schedule = member.schedule.as_ref().map_or(String::new(), |s| format!(", {s:?}"));
            format!("{}: {}{schedule}", member.label(), member.optimizer.describe())
        };
        let members: Vec<String> = self.members.iter().map(member).collect();
        format!("optimizers by name [{}], after {} steps", members.join("; "), self.num_steps)
    }

    fn num_steps(&self) -> u64 {
        self.num_steps
    }

    fn check_params(&self, params: &[Param]) -> Result<()> {
        let of: Vec<Option<usize>> = params.iter().map(|param| self.index_of(&param.name())).collect();
        self.check_patterns(params, &of)?;
        for (i, member) in self.members.iter().enumerate() {
            let own = params.iter().zip(&of).filter(|(_, of)| **of == Some(i));
            let own: Vec<Param> = own.map(|(param, _)| param.clone()).collect();
            member.optimizer.check_params(&own).map_err(|e| e.detail("optimizer", member.label()))?;
        }
        Ok(())
    }

    fn param_state(&self, param: &Param) -> Option<OptimizerState> {
        self.member_of(param)?.optimizer.param_state(param)
    }

    fn state_names(&self, param: &Param) -> Option<Vec<&'static str>> {
        match self.member_of(param) {
            Some(member) => member.optimizer.state_names(param),
            None => Some(Vec::new()),
        }
    }

    fn load_state(&mut self, num_steps: u64, states: Vec<(Param, OptimizerState)>) -> Result<()> {
        let mut own: Vec<Vec<(Param, OptimizerState)>> = self.members.iter().map(|_| Vec::new()).collect();
        for (param, state) in states {
            match self.index_of(&param.name()) {
                Some(i) => own[i].push((param, state)),
                None => {
                    let text = format!("no optimizer has the state of parameter `{}`", param.name());
                    return Err(Error::new(Kind::Config, text)
                        .detail("help", "load the state into the optimizers that saved it"));
                }
            }
        }
        for (member, states) in self.members.iter_mut().zip(own) {
            member.optimizer.load_state(num_steps, states)?;
        }
        self.num_steps = num_steps;
        Ok(())
    }

    fn update_group(&self, param: &Param) -> usize {
        self.index_of(&param.name()).unwrap_or(self.members.len())
    }

    fn hyperparameters(&mut self, params: &[&Param], lr: f64) -> Result<Hyperparameters> {
        if lr != 1.0 {
            let text = format!(
                "the common learning rate of several optimizers is {lr}, but each has its own rate and schedule"
            );
            let help = "pass StepArgs::new(optim.lr()), no lr_scheduler to the trainer, and schedules by Optimizers::schedule";
            return Err(Error::new(Kind::Config, text).detail("help", help));
        }
        let mut rows = vec![Vec::new(); params.len()];
        let of: Vec<usize> = params.iter().map(|param| self.update_group(param)).collect();
        let num_steps = self.num_steps;
        for (i, member) in self.members.iter_mut().enumerate() {
            let places: Vec<usize> = (0..params.len()).filter(|place| of[*place] == i).collect();
            let own: Vec<&Param> = places.iter().map(|place| params[*place]).collect();
            let lr = member.lr(num_steps);
            let what = format!("the learning rate of step {} on `{}`", num_steps + 1, member.label());
            check_range(what, lr, NOT_NEGATIVE)?;
            for (place, row) in places.into_iter().zip(member.optimizer.hyperparameters(&own, lr)?) {
                rows[place] = row;
            }
        }
        Ok(rows)
    }

    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
        let of: Vec<usize> = params.iter().map(|(param, _)| self.update_group(param)).collect();
        let mut start = 0;
        for run in of.chunk_by(|a, b| a == b) {
            let range = start..start + run.len();
            start = range.end;
            if let Some(member) = self.members.get_mut(run[0]) {
                member.optimizer.apply_update(&params[range.clone()], &step.for_params(range))?;
            }
        }
        Ok(())
    }

    fn count_step(&mut self, params: &[&Param]) {
        self.num_steps += 1;
        let of: Vec<usize> = params.iter().map(|param| self.update_group(param)).collect();
        for (i, member) in self.members.iter_mut().enumerate() {
            let own = params.iter().zip(&of).filter(|(_, of)| **of == i);
            member.optimizer.count_step(&own.map(|(param, _)| *param).collect::<Vec<_>>());
        }
    }
}
