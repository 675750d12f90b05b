//! A named place in a model where a plan may state how the activation lies.

use shardgrad_autograd::Var;
use shardgrad_tensor::{Axis, Context, Error, Kind, Layout, Result, State, Value};
use std::cell::RefCell;
use std::rc::Rc;

/// A place in a model through which an activation passes. Its name is its path in the model; until a model is placed,
/// and where no plan speaks of it, it lets everything pass.
#[derive(Debug, Default)]
pub struct Point {
    placed: RefCell<Option<Placed>>,
}

#[derive(Debug)]
struct Placed {
    name: Rc<str>,
    states: Vec<(Axis, State)>,
}

impl Point {
    /// The activation in the layout that the plan states here, or as it is.
    ///
    /// # Panics
    /// Unwinds with `Kind::Layout` if the plan splits a dim that the activation does not have.
    #[track_caller]
    #[must_use]
    pub fn at(&self, x: &Var) -> Var {
        let placed = self.placed.borrow();
        let Some(placed) = placed.as_ref() else { return x.clone() };
        Context::of(x.rank()).set_path(&placed.name);
        if placed.states.is_empty() {
            return x.clone();
        }
        let site = std::panic::Location::caller();
        let to = with_states(x.layout(), &placed.states)
            .unwrap_or_else(|e| e.detail("point", &*placed.name).at(site).raise());
        x.to_layout(&to)
    }

    /// Whether no plan speaks of it.
    pub(crate) fn is_silent(&self) -> bool {
        self.placed.borrow().as_ref().is_none_or(|placed| placed.states.is_empty())
    }

    /// The dotted name, once a model with this point is placed.
    #[must_use]
    pub fn name(&self) -> Option<Rc<str>> {
        self.placed.borrow().as_ref().map(|p| p.name.clone())
    }

    pub(crate) fn place(&self, name: &str, states: Vec<(Axis, State)>) {
        *self.placed.borrow_mut() = Some(Placed { name: name.into(), states });
    }
}

/// A layout with some axes in other states. An axis that already is in its state keeps its place in its dim; one that
/// joins a dim becomes the innermost there.
///
/// # Errors
/// `Kind::Layout` for a dim that the layout does not have.
pub(crate) fn with_states(layout: &Layout, states: &[(Axis, State)]) -> Result<Layout> {
    let mut to = layout.clone();
    for &(axis, state) in states {
        if let State::Shard(d) = state
            && d >= layout.ndim()
        {
            let name = layout.mesh().name(axis);
            let text = format!("a plan splits dim {d} over {name}, but the tensor is {layout}");
            return Err(Error::new(Kind::Layout, text).detail("help", "dims are counted from 0"));
        }
        if to.state(axis) != state {
            to = to.with_state(axis, state);
        }
    }
    Ok(to)
}
