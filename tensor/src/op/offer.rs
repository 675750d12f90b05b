//! Sums that are offered to an op: it may take one up and give its result added to it.

use crate::lineage::Lineage;
use crate::piece::{Piece, View};
use crate::tensor::Tensor;
use shardgrad_dist::Rank;
use shardgrad_kernels::{DType, Device};
use std::cell::RefCell;

/// What was added up before for a result, the cotangent of a value that has several uses, say. A kernel that adds to it what it
/// makes, while that is in the cache, saves a pass over both. Whoever takes it up gives the sum in the place of its own result,
/// with the bits of the sum of what was offered and of the result, rounded before. What nobody takes up comes back.
#[derive(Debug, Default)]
pub struct Offer(RefCell<State>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Nothing,
    Here(Tensor),
    /// What the sum came from.
    Taken(Lineage),
}

impl Offer {
    /// Of a sum, if there is one.
    #[must_use]
    pub fn new(sum: Option<Tensor>) -> Offer {
        Offer(RefCell::new(sum.map_or(State::Nothing, State::Here)))
    }

    /// The sum, unless it was taken up. Who offers takes what is left back; a vjp that takes it adds to it by other means.
    #[must_use]
    pub fn take(&self) -> Option<Tensor> {
        match self.0.take() {
            State::Here(sum) => Some(sum),
            state => {
                self.0.replace(state);
                None
            }
        }
    }

    /// Takes the sum up for new memory of a dtype under a view. None that lies otherwise or with gaps, and none on cards: their
    /// libraries round a product and its sum once where others do twice.
    pub(super) fn take_for(&self, rank: &Rank, dtype: DType, view: &View) -> Option<Piece> {
        let mut state = self.0.borrow_mut();
        let State::Here(sum) = &*state else { return None };
        let piece = sum.piece();
        let fits = piece.dtype == dtype && piece.view.is_contiguous() && piece.view.is_shaped_as(view);
        if !fits || matches!(rank.backend().device(), Device::Cuda(_)) {
            return None;
        }
        let piece = piece.clone();
        *state = State::Taken(piece.lineage);
        Some(piece)
    }

    /// What a result comes from that alone would come from `own`.
    pub(super) fn lineage(&self, own: Lineage) -> Lineage {
        match &*self.0.borrow() {
            State::Taken(sum) => sum.plus(own),
            _ => own,
        }
    }
}
