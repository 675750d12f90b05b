//! Traversal: how names come from fields.

use crate::param::Param;
use crate::point::Point;

/// What stands at the end of a path.
#[derive(Clone, Copy, Debug)]
pub enum Leaf<'a> {
    /// A parameter.
    Param(&'a Param),
    /// A place that a plan may speak of.
    Point(&'a Point),
}

/// A part of a model. Write one with [`module!`](crate::module!); implement it by hand only where children are not
/// plain fields.
pub trait Module {
    /// Shows each child with its name, in a fixed order.
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module));

    /// The parameter or point that this is, if it is one.
    fn leaf(&self) -> Option<Leaf<'_>> {
        None
    }
}

impl Module for Param {
    fn children(&self, _: &mut dyn FnMut(&str, &dyn Module)) {}

    fn leaf(&self) -> Option<Leaf<'_>> {
        Some(Leaf::Param(self))
    }
}

impl Module for Point {
    fn children(&self, _: &mut dyn FnMut(&str, &dyn Module)) {}

    fn leaf(&self) -> Option<Leaf<'_>> {
        Some(Leaf::Point(self))
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

    fn leaf(&self) -> Option<Leaf<'_>> {
        self.as_ref().and_then(Module::leaf)
    }
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        (**self).children(visit);
    }

    fn leaf(&self) -> Option<Leaf<'_>> {
        (**self).leaf()
    }
}

/// Shows every leaf below a module with its dotted path, depth first in the order of children.
pub fn walk(module: &dyn Module, visit: &mut dyn FnMut(&str, Leaf<'_>)) {
    descend(module, "", visit);
}

fn descend(module: &dyn Module, path: &str, visit: &mut dyn FnMut(&str, Leaf<'_>)) {
    if let Some(leaf) = module.leaf() {
        visit(path, leaf);
    }
    module.children(&mut |name, child| {
        let below = if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
        descend(child, &below, visit);
    });
}

/// Declares a struct whose fields are children, named as they are called; fields after a `;` are plain values.
///
/// ```
/// use shardgrad_nn::{Linear, module};
/// module! {
///     /// Two products with a non-linearity between them.
///     pub struct Net { pub up: Linear, pub down: Vec<Linear>; pub slope: f64 }
/// }
/// let net = Net { up: Linear::new(2, 8), down: vec![Linear::new(8, 1)], slope: 0.1 };
/// let mut names = Vec::new();
/// shardgrad_nn::module::walk(&net, &mut |path, leaf| {
///     if let shardgrad_nn::Leaf::Param(_) = leaf {
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
