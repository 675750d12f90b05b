//! Activations that a plan gathers for a product, and that the backward pass gathers again rather than keep.
//!
//! The nodes that need such a value save the tensor that it was gathered from. The gather begins ahead of the first of these nodes
//! ([`gathers_ahead`](crate::gathers_ahead)), and the last of them frees the value. Sequence parallelism saves memory by this: the
//! inputs of column-parallel layers stay sharded by tokens. Korthikanti et al., "Reducing Activation Recomputation in Large
//! Transformer Models", arXiv 2205.05198, section 4.2.2.

use shardgrad_dist::Rank;
use shardgrad_tensor::tensor::gather_ahead::{BegunGathers, GatherRequest};
use shardgrad_tensor::{Context, Layout, Tensor, unwind};
use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::rc::Rc;

/// A gathered activation, and how to gather it again.
pub(crate) struct GatheredActivation {
    request: GatherRequest,
    site: &'static Location<'static>,
    progress: RefCell<Progress>,
    /// The nodes that saved the value and did not run backward yet.
    num_users: Cell<usize>,
}

/// How far the backward pass has gathered an activation.
#[derive(Default)]
enum Progress {
    #[default]
    Sharded,
    Begun(BegunGathers),
    Gathered(Tensor),
}

impl GatheredActivation {
    /// An activation that was gathered from a tensor into a layout, at a place in the model, for the caller's line `site`.
    pub(crate) fn new(
        from: &Tensor,
        to: &Layout,
        (path, site): (Rc<str>, &'static Location<'static>),
    ) -> Rc<GatheredActivation> {
        Rc::new(GatheredActivation {
            request: GatherRequest { from: from.clone(), to: to.clone(), path },
            site,
            progress: RefCell::default(),
            num_users: Cell::new(0),
        })
    }

    /// Begins to gather the activation, while the rank goes on if it `may_overlap`.
    fn begin(&self, may_overlap: bool, rank: &Rank, context: &Context) -> BegunGathers {
        let (before, requests) = (context.path(), std::slice::from_ref(&self.request));
        let begun = unwind(BegunGathers::begin(rank, requests, may_overlap, self.site));
        context.set_path(&before);
        begun
    }
}

/// A gathered activation as a node saves it: sharded.
pub(crate) struct SavedUngathered(Rc<GatheredActivation>);

impl SavedUngathered {
    pub(crate) fn new(activation: &Rc<GatheredActivation>) -> SavedUngathered {
        activation.num_users.set(activation.num_users.get() + 1);
        SavedUngathered(activation.clone())
    }

    /// The tensor that the activation was gathered from.
    pub(crate) fn from(&self) -> &Tensor {
        &self.0.request.from
    }

    /// Begins to gather the activation, unless that was done for another node. A collective call: all ranks begin the same gathers in
    /// the same order.
    pub(crate) fn begin(&self, rank: &Rank, context: &Context) {
        let progress = &mut *self.0.progress.borrow_mut();
        if let Progress::Sharded = progress {
            *progress = Progress::Begun(self.0.begin(true, rank, context));
        }
    }

    /// Returns the gathered activation.
    pub(crate) fn gather(self, rank: &Rank, context: &Context) -> Tensor {
        let mut progress = self.0.progress.borrow_mut();
        let begun = match std::mem::take(&mut *progress) {
            Progress::Sharded => self.0.begin(false, rank, context),
            Progress::Begun(begun) => begun,
            Progress::Gathered(tensor) => {
                *progress = Progress::Gathered(tensor.clone());
                return tensor;
            }
        };
        let tensor = unwind(begun.finish()).remove(0);
        *progress = Progress::Gathered(tensor.clone());
        tensor
    }
}

/// The last node frees the value.
impl Drop for SavedUngathered {
    fn drop(&mut self) {
        let left = self.0.num_users.get() - 1;
        self.0.num_users.set(left);
        if left == 0 {
            *self.0.progress.borrow_mut() = Progress::Sharded;
        }
    }
}
