//! Adapters: few parameters that change the function of a layer, in a model whose code stays as it is.
//!
//! A layer that can be adapted has an [`AdapterSlot`], which is empty in most models. The slot holds a trait object, so that a
//! model keeps plain fields (`q_proj: Linear`) whatever adapter a user writes: no type parameter of layers, no layer behind a
//! pointer, no second copy of a model's code. An empty slot costs one comparison in a forward pass. Record 28 of the decision
//! records names the alternatives.

use crate::module::param::Param;
use crate::module::{Module, visit_modules};
use shardgrad_autograd::Var;
use std::cell::OnceCell;
use std::fmt;
use std::panic::Location;

/// An adapter: a function with few parameters whose result is added to the product of a layer. Its parameters are children of the
/// layer: `q_proj.lora_A.weight`.
#[doc(alias = "PEFT")]
#[doc(alias = "LoRA")]
pub trait Adapter: Module {
    /// Returns what is added to x w, of the shape of x w. `x` is the layer's input, after its activation point. The result is a
    /// partial sum where x w is one, so that both are reduced together. Its collectives name the lines of this function. An error in it
    /// names the line that applied the layer, and the adapter's own as `adapter`.
    fn forward(&self, x: &Var) -> Var;

    /// [`Adapter::forward`] for the line that applied the layer, which the model calls. [`Lora`](crate::Lora) overrides this method, so
    /// that its collectives and errors name that line; an own adapter can if it applies ops by `Value::apply_at`.
    fn forward_at(&self, x: &Var, _site: &'static Location<'static>) -> Var {
        self.forward(x)
    }

    /// The fields that describe the adapter in `adapter_config.json` of PEFT; `None` if PEFT does not know the adapter, which
    /// cannot be saved in that format then.
    fn peft_config(&self) -> Option<Vec<(&'static str, serde_json::Value)>> {
        None
    }
}

/// A layer with a weight `[in.., out..]` that takes an [`Adapter`].
pub trait Adaptable: Module {
    /// The weight.
    fn adapted_weight(&self) -> &Param;

    /// The number of dims of the weight that the product with x sums over.
    fn num_in(&self) -> usize;

    /// The slot for the adapter.
    fn adapter_slot(&self) -> &AdapterSlot;
}

/// The paths of the layers of a model that take an adapter, without those within adapters.
pub(super) fn adaptable_layers(module: &dyn Module) -> Vec<String> {
    let (mut paths, mut adapted) = (Vec::new(), Vec::<String>::new());
    visit_modules(module, &mut |path, module| {
        let Some(layer) = module.adaptable() else { return };
        if adapted.iter().any(|of_layer| path.starts_with(of_layer)) {
            return;
        }
        if layer.adapter_slot().get().is_some() {
            adapted.push(format!("{path}."));
        }
        paths.push(path.to_string());
    });
    paths
}

/// The place for the adapter of a layer, empty until [`Module::adapt`] fills it.
#[derive(Default)]
pub struct AdapterSlot(OnceCell<Box<dyn Adapter>>);

impl AdapterSlot {
    /// The adapter, if there is one.
    #[must_use]
    pub fn get(&self) -> Option<&dyn Adapter> {
        self.0.get().map(|adapter| &**adapter)
    }

    /// Fills the slot. Returns whether it was empty.
    pub(crate) fn set(&self, adapter: Box<dyn Adapter>) -> bool {
        self.0.set(adapter).is_ok()
    }
}

/// The parameters of the adapter have no name of their own before theirs.
impl Module for AdapterSlot {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        if let Some(adapter) = self.get() {
            adapter.children(visit);
        }
    }
}

impl fmt::Debug for AdapterSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.get().is_some() { "AdapterSlot(adapter)" } else { "AdapterSlot(empty)" })
    }
}
