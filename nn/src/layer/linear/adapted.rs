//! A linear layer as a module that takes an adapter.

use super::Linear;
use crate::module::Module;
use crate::module::adapter::{Adaptable, Adapter, AdapterSlot};
use crate::module::param::Param;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

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

    /// Computes the layer with an adapter, whose term is added before the activation point `out`: partial sums of both are reduced
    /// together.
    #[track_caller]
    pub(super) fn project_adapted(
        &self,
        adapter: &dyn Adapter,
        (x, weight): (&Var, &Var),
        bias: Option<&Var>,
        residual: Option<&Var>,
    ) -> Var {
        let product = match &self.signature {
            None => x.matmul(weight),
            Some(signature) => x.einsum(signature, weight),
        };
        let y = self.out.constrain(&product.add(&adapter.forward(x)));
        let y = match bias {
            Some(bias) => y.add(bias),
            None => y,
        };
        match residual {
            Some(residual) => residual.add(&y),
            None => y,
        }
    }
}
