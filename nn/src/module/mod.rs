//! The `Module` trait: traversal of a model's parameters, whose names come from the fields of its structs.

pub mod name;
pub mod precision;
pub(crate) mod watch;
pub mod activation_point;
pub mod param;
pub mod adapter;

use crate::module::activation_point::ActivationPoint;
use crate::module::adapter::{Adaptable, Adapter};
use crate::module::name::{matches, nearest};
use crate::module::param::Param;
use shardgrad_tensor::{Error, Kind};

/// A leaf of the module tree.
#[derive(Clone, Copy, Debug)]
pub enum ModuleLeaf<'a> {
    /// A parameter.
    Param(&'a Param),
    /// A named activation whose layout a plan can constrain.
    Point(&'a ActivationPoint),
}

/// A layer or model: a tree whose leaves are parameters and activation points. Declare one with [`module!`](crate::module!);
/// implement the trait by hand only where the children are not plain fields.
#[doc(alias = "nn.Module")]
pub trait Module {
    /// Calls `visit` with the name of each child and the child, in a fixed order.
    #[doc(alias = "named_children")]
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module));

    /// This module as a leaf: `Some` for a parameter or an activation point.
    fn leaf(&self) -> Option<ModuleLeaf<'_>> {
        None
    }

    /// This module as a layer that takes an adapter: `Some` for a [`Linear`](crate::Linear).
    fn adaptable(&self) -> Option<&dyn Adaptable> {
        None
    }

    /// Returns the same model with adapters in the layers whose paths match a pattern ([`matches`](name::matches())), before
    /// [`Model::new`](crate::Model::new): `Llama::new(&config).adapt("*.q_proj", |layer| Lora::new(layer, 8))`. All other
    /// parameters stay trainable until [`Model::freeze_all_but`](crate::Model::freeze_all_but).
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if no layer that takes an adapter matches, or if one has an adapter already.
    #[doc(alias = "get_peft_model")]
    #[doc(alias = "target_modules")]
    #[track_caller]
    #[must_use]
    fn adapt<A: Adapter + 'static>(self, pattern: &str, make: impl Fn(&dyn Adaptable) -> A) -> Self
    where
        Self: Sized,
    {
        let site = std::panic::Location::caller();
        let (matching, others): (Vec<String>, Vec<String>) =
            adapter::adaptable_layers(&self).into_iter().partition(|path| matches(pattern, path));
        if matching.is_empty() {
            let text = format!("no layer of the model that takes an adapter matches `{pattern}`");
            let near = nearest(pattern, others.iter().map(String::as_str)).join(", ");
            Error::new(Kind::Config, text).detail("nearest", near).at(site).raise();
        }
        visit_modules(&self, &mut |path, module| {
            let is_matching = matching.iter().any(|matching| matching == path);
            let Some(layer) = module.adaptable().filter(|_| is_matching) else { return };
            if !layer.adapter_slot().set(Box::new(make(layer))) {
                Error::new(Kind::Config, format!("layer `{path}` already has an adapter"))
                    .detail("help", "adapt each layer once: give patterns that do not match the same layers")
                    .at(site)
                    .raise();
            }
        });
        self
    }
}

impl Module for Param {
    fn children(&self, _: &mut dyn FnMut(&str, &dyn Module)) {}

    fn leaf(&self) -> Option<ModuleLeaf<'_>> {
        Some(ModuleLeaf::Param(self))
    }
}

impl Module for ActivationPoint {
    fn children(&self, _: &mut dyn FnMut(&str, &dyn Module)) {}

    fn leaf(&self) -> Option<ModuleLeaf<'_>> {
        Some(ModuleLeaf::Point(self))
    }
}

impl<M: Module> Module for Vec<M> {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        for (i, module) in self.iter().enumerate() {
            visit(&i.to_string(), module);
        }
    }
}

impl<M: Module> Module for Option<M> {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        if let Some(module) = self {
            module.children(visit);
        }
    }

    fn leaf(&self) -> Option<ModuleLeaf<'_>> {
        self.as_ref().and_then(Module::leaf)
    }

    fn adaptable(&self) -> Option<&dyn Adaptable> {
        self.as_ref().and_then(Module::adaptable)
    }
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        (**self).children(visit);
    }

    fn leaf(&self) -> Option<ModuleLeaf<'_>> {
        (**self).leaf()
    }

    fn adaptable(&self) -> Option<&dyn Adaptable> {
        (**self).adaptable()
    }
}

/// Calls `visit` with the dotted path of every leaf of a module and the leaf, depth first in the order of children.
#[doc(alias = "named_parameters")]
#[doc(alias = "state_dict")]
pub fn visit_leaves(module: &dyn Module, visit: &mut dyn FnMut(&str, ModuleLeaf<'_>)) {
    visit_modules(module, &mut |path, module| {
        if let Some(leaf) = module.leaf() {
            visit(path, leaf);
        }
    });
}

/// Calls `visit` with the dotted path of every module of a tree and the module, each before its children; the path of the root is
/// empty.
#[doc(alias = "named_modules")]
pub fn visit_modules(module: &dyn Module, visit: &mut dyn FnMut(&str, &dyn Module)) {
    descend(module, "", visit);
}

fn descend(module: &dyn Module, path: &str, visit: &mut dyn FnMut(&str, &dyn Module)) {
    visit(path, module);
    module.children(&mut |name, child| {
        let below = if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
        descend(child, &below, visit);
    });
}

/// Declares a module: a struct whose fields are its children, named after the fields. Fields after a `;` are plain values.
///
/// ```
/// use shardgrad_nn::{Linear, module};
/// module! {
///     /// Two linear layers with an activation between them.
///     pub struct Net { pub up: Linear, pub down: Vec<Linear>; pub slope: f64 }
/// }
/// let net = Net { up: Linear::new(2, 8), down: vec![Linear::new(8, 1)], slope: 0.1 };
/// let mut names = Vec::new();
/// shardgrad_nn::module::visit_leaves(&net, &mut |path, leaf| {
///     if let shardgrad_nn::ModuleLeaf::Param(_) = leaf {
///         names.push(path.to_string());
///     }
/// });
/// assert_eq!(names, ["up.weight", "up.bias", "down.0.weight", "down.0.bias"]);
/// assert_eq!(net.slope, 0.1);
/// ```
#[macro_export]
macro_rules! module {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $( $(#[$child_meta:meta])* $child_vis:vis $child:ident : $child_type:ty ),* $(,)?
            $( ; $( $(#[$value_meta:meta])* $value_vis:vis $value:ident : $value_type:ty ),* $(,)? )?
        }
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $( $(#[$child_meta])* $child_vis $child: $child_type, )*
            $( $( $(#[$value_meta])* $value_vis $value: $value_type, )* )?
        }

        impl $crate::Module for $name {
            fn children(&self, visit: &mut dyn FnMut(&str, &dyn $crate::Module)) {
                $( visit(stringify!($child), &self.$child); )*
            }
        }
    };
}
