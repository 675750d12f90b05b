//! A named place in a model where a plan can constrain the layout of an activation.

use crate::module::watch::Hooks;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Axis, Context, Error, Kind, Layout, Placement, Point, Result, Value};
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

/// A named place in a model through which an activation passes, and where a plan can constrain its layout
/// ([`Plan::point`](crate::Plan::point)). Its name is its path in the model. Without a rule, and before [`Model::new`](crate::Model::new),
/// activations pass unchanged.
#[doc(alias = "with_sharding_constraint")]
#[doc(alias = "PrepareModuleInput")]
#[doc(alias = "PrepareModuleOutput")]
#[derive(Debug, Default)]
pub struct ActivationPoint {
    binding: RefCell<Option<Binding>>,
}

#[derive(Debug)]
struct Binding {
    name: Rc<str>,
    placements: Vec<(Axis, Placement)>,
    /// Whether a gathered activation is gathered again in the backward pass.
    is_regathered: bool,
    hooks: Hooks,
}

impl ActivationPoint {
    /// Returns the activation in the layout that the plan states for this point, or unchanged without a rule. Calls the hooks of the
    /// point ([`Model::watch_values`](crate::Model::watch_values)).
    ///
    /// # Panics
    /// Unwinds with `Kind::Layout` if the plan shards a dim that the activation does not have.
    #[track_caller]
    #[must_use]
    pub fn constrain(&self, x: &Var) -> Var {
        self.constrain_at(x, Location::caller())
    }

    /// [`ActivationPoint::constrain`] for the caller's line `site`.
    pub(crate) fn constrain_at(&self, x: &Var, site: &'static Location<'static>) -> Var {
        let bound = self.binding.borrow();
        let Some(binding) = bound.as_ref() else { return x.clone() };
        Context::of(x.rank()).set_path(&binding.name);
        let x = if binding.placements.is_empty() {
            x.clone()
        } else {
            let to = with_placements(x.layout(), &binding.placements)
                .unwrap_or_else(|e| e.detail("point", &*binding.name).at(site).raise());
            match binding.is_regathered {
                true => x.to_regathered_layout_at(&to, site),
                false => x.to_layout_at(&to, site),
            }
        };
        if binding.hooks.is_empty() {
            return x;
        }
        let (hooks, name) = (binding.hooks.clone(), binding.name.clone());
        // A hook may change the hooks of its point.
        drop(bound);
        hooks.watch(name, &x)
    }

    /// Whether the plan states a layout for this point, on an axis of several ranks.
    #[must_use]
    pub(crate) fn has_rule(&self) -> bool {
        self.binding.borrow().as_ref().is_some_and(|binding| !binding.placements.is_empty())
    }

    /// Whether the plan gathers activations at this point, and the backward pass gathers them again.
    pub(crate) fn is_regathered(&self) -> bool {
        self.has_rule() && self.binding.borrow().as_ref().is_some_and(|binding| binding.is_regathered)
    }

    /// Whether the point has hooks.
    #[must_use]
    pub(crate) fn is_watched(&self) -> bool {
        self.binding.borrow().as_ref().is_some_and(|binding| !binding.hooks.is_empty())
    }

    /// The dotted name; `None` before [`Model::new`](crate::Model::new) has named the point.
    #[must_use]
    pub fn name(&self) -> Option<Rc<str>> {
        self.binding.borrow().as_ref().map(|p| p.name.clone())
    }

    pub(crate) fn bind(&self, name: &str, placements: Vec<(Axis, Placement)>, is_regathered: bool) {
        let hooks = Hooks::default();
        *self.binding.borrow_mut() = Some(Binding { name: name.into(), placements, is_regathered, hooks });
    }

    /// Changes the hooks of a point that has a name.
    pub(crate) fn change_hooks(&self, change: impl FnOnce(&mut Hooks)) {
        if let Some(binding) = &mut *self.binding.borrow_mut() {
            change(&mut binding.hooks);
        }
    }
}

/// An activation inside of a fused op passes the point unchanged without a rule of the plan and without hooks.
impl Point<Var> for ActivationPoint {
    fn is_identity(&self, _: &Var) -> bool {
        self.binding.borrow().as_ref().is_none_or(|b| b.placements.is_empty() && b.hooks.is_empty())
    }

    fn pass(&self, value: &Var, site: &'static Location<'static>) -> Var {
        self.constrain_at(value, site)
    }

    fn enter(&self, x: &Var) {
        if let Some(binding) = self.binding.borrow().as_ref() {
            Context::of(x.rank()).set_path(&binding.name);
        }
    }
}

/// Makes a path the place in the model of the next ops on a value.
pub(crate) fn set_path(x: &Var, path: &str) {
    Context::of(x.rank()).set_path(&path.into());
}

/// Returns a layout with other placements on some axes. An axis that already has the requested placement keeps its position among the
/// axes of its dim; an axis that newly shards a dim becomes the innermost axis of that dim.
///
/// # Errors
/// `Kind::Layout` for a dim that the layout does not have.
pub(crate) fn with_placements(layout: &Layout, placements: &[(Axis, Placement)]) -> Result<Layout> {
    let mut to = layout.clone();
    for &(axis, placement) in placements {
        if let Placement::Shard(d) = placement
            && d >= layout.ndim()
        {
            let name = layout.mesh().name(axis);
            let text = format!(
                "the plan shards dim {d} over {name}, but the tensor {layout} has {} dims",
                layout.ndim()
            );
            let help = "name an existing dim in the plan's rule; dims are counted from 0";
            return Err(Error::new(Kind::Layout, text).detail("help", help));
        }
        if to.placement(axis) != placement {
            to = to.with_placement(axis, placement);
        }
    }
    Ok(to)
}
