//! Activations that a plan gathers for a product, and that the backward pass gathers again rather than keep.
//!
//! The nodes that need such a value save where it was gathered from. The first of them to run backward gathers it, and the last
//! frees it. Sequence parallelism saves memory by this: the inputs of column-parallel layers stay sharded by tokens. Korthikanti
//! et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 4.2.2.

use shardgrad_dist::{Rank, Result};
use shardgrad_tensor::{Context, Op, Tensor, op, unwind};
use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::rc::Rc;

/// A tensor moved along a route, on a rank with a context, or as a meta tensor.
///
/// # Errors
/// Errors of the collectives, `Kind::OutOfMemory`.
pub(crate) fn along_route(
    route: &dyn Op,
    from: &Tensor,
    (rank, context, is_meta): (&Rank, &Context, bool),
    site: &'static Location<'static>,
) -> Result<Tensor> {
    let inference = op::plan(route, (rank, context), &[from.layout()], &[], site)?;
    let made = match is_meta {
        true => op::meta(&inference, rank),
        false => op::run(route, &[from.local()], &inference, (rank, context), site)?,
    };
    Ok(made.into_iter().next().expect("redistribute has one output"))
}

/// A gathered activation, and how to gather it again.
pub(crate) struct GatheredActivation {
    from: Tensor,
    route: Rc<dyn Op>,
    path: Rc<str>,
    site: &'static Location<'static>,
    /// The value, while nodes run backward.
    gathered: RefCell<Option<Tensor>>,
    /// The nodes that saved the value and did not run backward yet.
    num_users: Cell<usize>,
}

impl GatheredActivation {
    /// An activation that `route` gathered from `from`, at a place in the model, for the caller's line `site`.
    pub(crate) fn new(
        from: &Tensor,
        route: &Rc<dyn Op>,
        (path, site): (Rc<str>, &'static Location<'static>),
    ) -> Rc<GatheredActivation> {
        Rc::new(GatheredActivation {
            from: from.clone(),
            route: route.clone(),
            path,
            site,
            gathered: RefCell::default(),
            num_users: Cell::new(0),
        })
    }
}

/// What a node saves of a gathered activation.
pub(crate) struct SavedUngathered(Rc<GatheredActivation>);

impl SavedUngathered {
    pub(crate) fn new(activation: &Rc<GatheredActivation>) -> SavedUngathered {
        activation.num_users.set(activation.num_users.get() + 1);
        SavedUngathered(activation.clone())
    }

    /// The tensor that the activation was gathered from.
    pub(crate) fn from(&self) -> &Tensor {
        &self.0.from
    }

    /// Gathers the activation, unless another node has done so.
    pub(crate) fn gather(self, rank: &Rank, context: &Context) -> Tensor {
        let GatheredActivation { from, route, path, site, gathered, .. } = &*self.0;
        let gather = || {
            let before = context.path();
            context.set_path(path);
            let made = unwind(along_route(&**route, from, (rank, context, false), site));
            context.set_path(&before);
            made
        };
        gathered.borrow_mut().get_or_insert_with(gather).clone()
    }
}

/// The last node frees the value.
impl Drop for SavedUngathered {
    fn drop(&mut self) {
        let left = self.0.num_users.get() - 1;
        self.0.num_users.set(left);
        if left == 0 {
            *self.0.gathered.borrow_mut() = None;
        }
    }
}
