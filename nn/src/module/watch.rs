//! Hooks on activation points: functions that see the values and the gradients that pass through a point.

use shardgrad_autograd::Var;
use shardgrad_tensor::op::DTypes;
use shardgrad_tensor::{
    Cotangents, DType, ForwardContext, LocalTensor, LocalTensors, Op, Result, Tensor, Value, Vjp, unwind,
};
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

/// A function that gets the name of a point and a tensor.
pub(crate) type Hook = Rc<dyn Fn(&str, &Tensor) -> Result<()>>;

/// The hooks of a point.
#[derive(Clone, Default)]
pub(crate) struct Hooks {
    /// Called with the activation in each forward pass.
    pub(crate) values: Vec<Hook>,
    /// Called with the cotangent of the activation in each backward pass.
    pub(crate) gradients: Vec<Hook>,
}

impl Hooks {
    /// Whether there is no hook.
    pub(crate) fn is_empty(&self) -> bool {
        self.values.is_empty() && self.gradients.is_empty()
    }

    /// Returns the activation unchanged, on a path that calls the hooks.
    #[track_caller]
    pub(crate) fn watch(self, name: Rc<str>, x: &Var) -> Var {
        Var::apply_one(Rc::new(Watch { name, hooks: self }), &[x])
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hooks({} of values, {} of gradients)", self.values.len(), self.gradients.len())
    }
}

/// Numbers the changes of a model's hooks, so that a recording of the model is known to call the current ones.
#[derive(Debug, Default)]
pub(crate) struct HooksVersion {
    num_changes: Cell<u64>,
    has_hooks: Cell<bool>,
}

impl HooksVersion {
    /// Counts a change of hooks, after which there are hooks or none.
    pub(crate) fn change(&self, has_hooks: bool) {
        self.num_changes.set(self.num_changes.get() + 1);
        self.has_hooks.set(has_hooks);
    }

    /// The number of the last change; 0 without hooks.
    pub(crate) fn current(&self) -> u64 {
        if self.has_hooks.get() { self.num_changes.get() } else { 0 }
    }
}

/// The identity as an op, which calls hooks: a replayed program (a pipeline stage, a recomputed block) calls them too.
#[derive(Debug)]
struct Watch {
    name: Rc<str>,
    hooks: Hooks,
}

impl Op for Watch {
    fn name(&self) -> &'static str {
        "watch"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs.into())
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        // The null back end has no values.
        if !self.hooks.values.is_empty() && !local.rank.is_dry_run() {
            let value = Tensor::assemble(local.rank, local.inputs[0].clone(), x[0].clone());
            self.hooks.values.iter().try_for_each(|hook| hook(&self.name, &value))?;
        }
        Ok([x[0].clone()].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let gradient = cx.grad(0);
        if !cx.rank.is_dry_run() {
            unwind(self.hooks.gradients.iter().try_for_each(|hook| hook(&self.name, &gradient)));
        }
        cx.cotangents(|_| gradient.clone())
    }
}
