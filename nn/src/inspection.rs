//! A model's inside: gradients by parameter name, and hooks on activation points.

use crate::module::activation_point::ActivationPoint;
use crate::module::name::{matches, nearest};
use crate::module::watch::Hook;
use crate::module::{Module, ModuleLeaf, visit_leaves};
use crate::sharded_model::Model;
use shardgrad_autograd::Gradients;
use shardgrad_tensor::{Error, Kind, Result, Tensor};
use std::rc::Rc;

impl<M: Module> Model<M> {
    /// Returns the gradient of the parameter of a dotted name, in the layout of the stored parameter, from the gradients that
    /// [`Tape::gradients`](shardgrad_autograd::Tape::gradients) returned.
    ///
    /// # Errors
    /// `Kind::Config` with the nearest names if there is no such parameter, and for a parameter without a gradient.
    #[doc(alias = "named_parameters")]
    pub fn grad<'a>(&self, gradients: &'a Gradients, name: &str) -> Result<&'a Tensor> {
        let param = self.param(name)?;
        gradients.get(&param.key()).ok_or_else(|| {
            let why = if param.is_frozen() {
                "it is frozen"
            } else {
                "no loss of the backward passes depends on it"
            };
            Error::new(Kind::Config, format!("the parameter `{name}` has no gradient: {why}")).detail(
                "help",
                "call backward() before Tape::gradients(), and use the gradients of the tape of this model",
            )
        })
    }

    /// Returns the names of the activation points whose gathered values the backward pass gathers again rather than keep
    /// ([`Plan::regather`](crate::Plan::regather)).
    #[must_use]
    pub fn regathered_points(&self) -> Vec<Rc<str>> {
        let mut names = Vec::new();
        visit_leaves(&**self, &mut |_, leaf| {
            if let ModuleLeaf::Point(point) = leaf
                && point.is_regathered()
            {
                names.extend(point.name());
            }
        });
        names
    }

    /// Calls `hook` with name and activation whenever an activation passes a point whose name matches the pattern, in the layout that
    /// the plan states. Returns the number of points.
    ///
    /// Every rank watches the same points. The hook runs on every rank that computes the activation, so it may read the value with
    /// collective calls (`to_f64`, `show`); an error of the hook ends the forward pass. Recomputed blocks call it again. A watched point
    /// inside a fused op makes the layer run op by op, which may change the last bits. Points that are not watched cost nothing.
    ///
    /// In a [`Trainer`](crate::Trainer) each microbatch of a step calls the hook. On a pipeline the ranks of the stage that has the point
    /// call it, in the order of the schedule; the model is recorded again after each change of hooks. A step with hooks is not captured
    /// as a CUDA graph, which could not call them.
    ///
    /// # Errors
    /// `Kind::Config` with the nearest names if the pattern matches no point.
    #[doc(alias = "register_forward_hook")]
    pub fn watch_values(
        &self,
        pattern: &str,
        hook: impl Fn(&str, &Tensor) -> Result<()> + 'static,
    ) -> Result<usize> {
        let hook: Hook = Rc::new(hook);
        self.at_points(pattern, |point| point.change_hooks(|hooks| hooks.values.push(hook.clone())))
    }

    /// Calls `hook` with name and gradient whenever the gradient of an activation passes a point whose name matches the pattern, in the
    /// dual of the layout of the activation. Otherwise as [`Model::watch_values`]. The gradient of a microbatch, times the loss scale.
    ///
    /// # Errors
    /// `Kind::Config` with the nearest names if the pattern matches no point.
    #[doc(alias = "register_full_backward_hook")]
    #[doc(alias = "retain_grad")]
    pub fn watch_gradients(
        &self,
        pattern: &str,
        hook: impl Fn(&str, &Tensor) -> Result<()> + 'static,
    ) -> Result<usize> {
        let hook: Hook = Rc::new(hook);
        self.at_points(pattern, |point| point.change_hooks(|hooks| hooks.gradients.push(hook.clone())))
    }

    /// Removes all hooks of the model.
    pub fn unwatch(&self) {
        visit_leaves(&**self, &mut |_, leaf| {
            if let ModuleLeaf::Point(point) = leaf {
                point.change_hooks(|hooks| *hooks = Default::default());
            }
        });
        self.hooks().change(false);
    }

    /// Calls `change` with each point whose name matches a pattern; returns their number.
    fn at_points(&self, pattern: &str, change: impl Fn(&ActivationPoint)) -> Result<usize> {
        let (mut count, mut names) = (0, Vec::new());
        visit_leaves(&**self, &mut |path, leaf| {
            if let ModuleLeaf::Point(point) = leaf {
                names.push(path.to_string());
                if matches(pattern, path) {
                    change(point);
                    count += 1;
                }
            }
        });
        if count > 0 {
            self.hooks().change(true);
            return Ok(count);
        }
        let near = nearest(pattern, names.iter().map(String::as_str)).join(", ");
        Err(Error::new(Kind::Config, format!("the model has no activation point `{pattern}`"))
            .detail("nearest", near))
    }
}
