//! A linear layer as a module that takes an adapter.

use super::Linear;
use crate::module::Module;
use crate::module::adapter::{Adaptable, Adapter, AdapterSlot};
use crate::module::param::Param;
use shardgrad_autograd::Var;
use shardgrad_tensor::ops::add::Add;
use shardgrad_tensor::{Error, Point, Value};
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::rc::Rc;

/// The parameters of an adapter come last, beside those of the layer.
impl Module for Linear {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        visit("weight", &self.weight);
        visit("bias", &self.bias);
        visit("input", &self.input);
        visit("out", &self.out);
        self.adapter.children(visit);
    }

    fn adaptable(&self) -> Option<&dyn Adaptable> {
        Some(self)
    }
}

impl Adaptable for Linear {
    fn adapted_weight(&self) -> &Param {
        &self.weight
    }

    fn num_in(&self) -> usize {
        self.num_in
    }

    fn adapter_slot(&self) -> &AdapterSlot {
        &self.adapter
    }
}

impl Linear {
    /// The adapter, if [`Module::adapt`] has installed one.
    #[must_use]
    pub fn adapter(&self) -> Option<&dyn Adapter> {
        self.adapter.get()
    }

    /// The point `out` of the layer for an input, after the point `input`: adds the term of the adapter, if there is one.
    pub(in crate::layer) fn adapted_out<'a>(&'a self, x: &'a Var) -> AdaptedOut<'a> {
        AdaptedOut { layer: self, x }
    }
}

/// The product of a layer on its way to the activation point `out`, where an adapter adds its term: partial sums of both are reduced
/// together.
pub(in crate::layer) struct AdaptedOut<'a> {
    layer: &'a Linear,
    /// The input of the product.
    x: &'a Var,
}

impl Point<Var> for AdaptedOut<'_> {
    fn is_identity(&self, x: &Var) -> bool {
        self.layer.adapter().is_none() && self.layer.out.is_identity(x)
    }

    fn pass(&self, value: &Var, site: &'static Location<'static>) -> Var {
        match self.layer.adapter() {
            Some(adapter) => {
                let term = term(adapter, self.x, site);
                let add = Rc::new(Add::between(&value.shape(), &term.shape()));
                let sum = Var::apply_at(add, &[value, &term], &[], site).swap_remove(0);
                self.layer.out.pass(&sum, site)
            }
            None => self.layer.out.pass(value, site),
        }
    }

    fn enter(&self, x: &Var) {
        self.layer.out.enter(x);
    }
}

/// The term of an adapter. An error names the line that applied the layer, and next to it the line in the adapter's code, if the adapter
/// has not stated the former itself.
fn term(adapter: &dyn Adapter, x: &Var, site: &'static Location<'static>) -> Var {
    catch_unwind(AssertUnwindSafe(|| adapter.forward_at(x, site))).unwrap_or_else(|cause| {
        match cause.downcast::<Error>() {
            Ok(error) => match error.site() {
                Some(own) if own == site => error.raise(),
                Some(own) => error.detail("adapter", own.to_string()).replace_site(site).raise(),
                None => error.at(site).raise(),
            },
            Err(cause) => resume_unwind(cause),
        }
    })
}
