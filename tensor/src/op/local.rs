//! What the forward of an op has at hand on one rank.

use super::{Offer, Pieces};
use crate::infer::Inference;
use crate::layout::Layout;
use crate::lineage::Lineage;
use crate::piece::{Piece, launch};
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::{Kernel, Scalar};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// What the forward of an op is told about this rank: ranges of labels, layouts of outputs, memory.
#[derive(Debug)]
pub struct Local<'a> {
    /// The rank that runs it.
    pub rank: &'a Rank,
    /// Layouts of the arguments, after the implied steps.
    pub inputs: &'a [Layout],
    /// What was inferred.
    pub inference: &'a Inference,
    /// The user's line.
    pub site: &'static Location<'static>,
    /// Per output, what it may be added to; none behind the end.
    pub(super) sums: &'a [Option<&'a Offer>],
}

impl Local<'_> {
    /// The global extent of a label and this rank's range of it.
    #[must_use]
    pub fn label(&self, name: &str) -> (usize, Range<usize>) {
        self.inference.label(name, self.rank.mesh(), self.rank.coordinates())
    }

    /// New memory for output `i`, row-major, contents arbitrary.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn output(&self, i: usize) -> Result<Piece> {
        let view = self.inference.view(i, self.rank.coordinates());
        Piece::under(self.rank, self.inference.outputs[i].dtype(), view.clone())
    }

    /// Takes up what output `i` may be added to, without gaps and in its shape and dtype: then the op makes the sum of that and of
    /// the output, rounded before. What nobody takes up is added by who has offered it.
    pub(crate) fn take_sum(&self, i: usize) -> Option<Piece> {
        let view = self.inference.view(i, self.rank.coordinates());
        self.sums.get(i).copied().flatten()?.take_for(self.rank, self.inference.outputs[i].dtype(), view)
    }

    /// A piece on its way to other ranks, in the middle of the op, with what it comes from: these arguments.
    pub(crate) fn made_of(&self, x: &[&Piece], piece: Piece) -> Piece {
        Piece { lineage: self.lineage(x), ..piece }
    }

    /// What outputs come from that are made of these arguments.
    #[inline]
    pub(super) fn lineage(&self, x: &[&Piece]) -> Lineage {
        x.iter().fold(self.inference.lineage(), |all, piece| all.join(piece.lineage))
    }

    /// What `make` works out of the inference and of how some pieces lie; remembered for as long as they lie so. `T` belongs
    /// to one op, and tells what its signature, and nothing else of the op, decides.
    pub(crate) fn noted<T: 'static>(&self, x: &[&Piece], make: impl FnOnce() -> T) -> Rc<T> {
        self.inference.noted(x.iter().map(|p| &p.view), make)
    }

    /// Runs a kernel that writes new memory for every output of the op.
    ///
    /// # Errors
    /// What the kernel reports.
    pub fn launch(&self, kernel: &Kernel, inputs: &[&Piece], scalars: &[Scalar]) -> Result<Pieces> {
        if let [_] = self.inference.outputs[..] {
            let mut output = self.output(0)?;
            launch(self.rank, kernel, inputs, &mut [&mut output], scalars)?;
            return Ok(smallvec![output]);
        }
        let mut outputs: Pieces =
            (0..self.inference.outputs.len()).map(|i| self.output(i)).collect::<Result<_>>()?;
        launch(self.rank, kernel, inputs, &mut outputs.iter_mut().collect::<Vec<_>>(), scalars)?;
        Ok(outputs)
    }

    /// The pieces row-major without gaps, copied where they are not.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn contiguous(&self, pieces: &[&Piece]) -> Result<SmallVec<[Piece; 6]>> {
        pieces.iter().map(|p| p.contiguous(self.rank)).collect()
    }
}
