//! A table of vectors, and its transpose as an output layer.

use crate::module;
use crate::param::{Init, Param};
use crate::point::Point;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;
use std::ops::Range;

module! {
    /// A table `[num, d]`. Split by its rows, a lookup leaves a pending sum at the point `out`.
    #[derive(Debug)]
    pub struct Embedding {
        /// `[num, d]`.
        pub weight: Param,
        out: Point,
    }
}

impl Embedding {
    /// A table of `num` vectors of width `d`, normal with standard deviation 0.02.
    #[must_use]
    pub fn new(num: usize, d: usize) -> Embedding {
        Embedding { weight: Param::new(&[num, d]).init(Init::Normal(0.02)), out: Point::default() }
    }

    /// The same table with other initial values.
    #[must_use]
    pub fn init(self, init: Init) -> Embedding {
        Embedding { weight: self.weight.init(init), ..self }
    }

    /// The vectors of `ids` (i64, any shape): `[..]` to `[.., d]`.
    ///
    /// # Panics
    /// Unwinds with an error if an id is outside of the table.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var) -> Var {
        self.out.at(&self.weight.on(ids).embedding(ids))
    }

    /// The first `n` vectors: `[n, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the table has fewer.
    #[track_caller]
    #[must_use]
    pub fn first(&self, x: &Var, n: usize) -> Var {
        self.rows(x, 0..n)
    }

    /// The vectors of a range of rows, on the tape of x: `[range, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the table has fewer.
    #[track_caller]
    #[must_use]
    pub fn rows(&self, x: &Var, range: Range<usize>) -> Var {
        self.weight.on(x).slice(0, range)
    }

    /// Scores of all vectors, x weight^T: `[.., d]` to `[.., num]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d.
    #[track_caller]
    #[must_use]
    pub fn scores(&self, x: &Var) -> Var {
        x.matmul_nt(&self.weight.on(x))
    }
}
