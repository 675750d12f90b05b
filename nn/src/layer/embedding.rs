//! Embedding table, and its transpose as an output layer (tied weights).

use crate::module;
use crate::module::activation_point::ActivationPoint;
use crate::module::param::{Init, Param};
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;
use std::ops::Range;

module! {
    /// Embedding table `[num, d]`.
    ///
    /// Activation point: `out`. A lookup in a table sharded by rows (vocab parallel) leaves a partial sum there.
    #[doc(alias = "nn.Embedding")]
    #[doc(alias = "VocabParallelEmbedding")]
    #[derive(Debug)]
    pub struct Embedding {
        /// The table, `[num, d]`.
        pub weight: Param,
        out: ActivationPoint,
    }
}

impl Embedding {
    /// A table of `num` vectors of width `d`, initialized from a normal distribution with standard deviation 0.02.
    #[must_use]
    pub fn new(num: usize, d: usize) -> Embedding {
        Embedding { weight: Param::new(&[num, d]).init(Init::Normal(0.02)), out: ActivationPoint::default() }
    }

    /// Returns the same table with another initializer.
    #[must_use]
    pub fn init(self, init: Init) -> Embedding {
        Embedding { weight: self.weight.init(init), ..self }
    }

    /// Looks up the vectors of `ids` (i64, any shape): `[..]` to `[.., d]`.
    ///
    /// # Panics
    /// Unwinds with an error if an id is outside the table.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var) -> Var {
        self.out.constrain(&self.weight.on(ids).embedding(ids))
    }

    /// Returns the first `n` vectors on the tape of x: `[n, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the table has fewer rows.
    #[track_caller]
    #[must_use]
    pub fn first_rows(&self, x: &Var, n: usize) -> Var {
        self.rows(x, 0..n)
    }

    /// Returns the vectors of a range of rows on the tape of x: `[range, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the table has fewer rows.
    #[track_caller]
    #[must_use]
    pub fn rows(&self, x: &Var, range: Range<usize>) -> Var {
        self.weight.on(x).slice(0, range)
    }

    /// Returns x weight^T, the logits of a tied output layer: `[.., d]` to `[.., num]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d.
    #[doc(alias = "lm_head")]
    #[doc(alias = "as_linear")]
    #[track_caller]
    #[must_use]
    pub fn logits(&self, x: &Var) -> Var {
        x.matmul_nt(&self.weight.on(x))
    }
}
