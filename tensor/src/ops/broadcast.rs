//! What add, sub, mul and div share: an argument with fewer dims is repeated along the leading dims of the other.

use super::sum::Sum;
use crate::op::{Local, Pieces};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::Kernel;

/// Which argument is repeated. The number is how many dims the repeated one has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broadcast {
    /// Neither: the shapes are equal.
    Same,
    /// The second: a bias, a table of positions.
    Second(usize),
    /// The first.
    First(usize),
}

const SECOND: [&str; 6] = [
    "..m,  -> ..m",
    "..m d, d -> ..m d",
    "..m d e, d e -> ..m d e",
    "..m d e f, d e f -> ..m d e f",
    "..m d e f g, d e f g -> ..m d e f g",
    "..m d e f g h, d e f g h -> ..m d e f g h",
];

const FIRST: [&str; 6] = [
    ", ..m -> ..m",
    "d, ..m d -> ..m d",
    "d e, ..m d e -> ..m d e",
    "d e f, ..m d e f -> ..m d e f",
    "d e f g, ..m d e f g -> ..m d e f g",
    "d e f g h, ..m d e f g h -> ..m d e f g h",
];

impl Broadcast {
    /// From the numbers of dims. A repeated argument has at most five.
    pub(super) fn of(first: usize, second: usize) -> Broadcast {
        match first.cmp(&second) {
            std::cmp::Ordering::Equal => Broadcast::Same,
            std::cmp::Ordering::Greater => Broadcast::Second(second),
            std::cmp::Ordering::Less => Broadcast::First(first),
        }
    }

    /// The signature of the op.
    pub(super) fn signature(self) -> &'static str {
        match self {
            Broadcast::Same => "..m, ..m -> ..m",
            Broadcast::Second(n) => SECOND[n.min(5)],
            Broadcast::First(n) => FIRST[n.min(5)],
        }
    }

    /// Runs a kernel of two arguments on both, one of them repeated by its strides.
    pub(super) fn launch(local: &Local<'_>, kernel: &Kernel, x: &[Piece]) -> Result<Pieces> {
        let mut out = local.output(0)?;
        let spread = |p: &Piece| {
            let view = p.view.broadcast(&out.view.shape);
            p.viewed(view.expect("the signature has matched the trailing dims"))
        };
        let (a, b) = (spread(&x[0]), spread(&x[1]));
        launch(local.rank, kernel, &[&a, &b], &mut [&mut out], &[])?;
        Ok([out].into_iter().collect())
    }

    /// The cotangent of argument `i` from what it would be without repetition: summed over the leading dims.
    pub(super) fn reduced(self, cotangent: Tensor, i: usize) -> Tensor {
        let ndim = cotangent.layout().ndim();
        match self {
            Broadcast::Second(n) if i == 1 => Tensor::result(Sum::leading(ndim, ndim - n), &[&cotangent]),
            Broadcast::First(n) if i == 0 => Tensor::result(Sum::leading(ndim, ndim - n), &[&cotangent]),
            _ => cotangent,
        }
    }
}
