//! Attention of every token to all others, in the form of BERT.

use super::dropout::Dropout;
use super::linear::Linear;
use crate::module;
use crate::param::Init;
use crate::point::Point;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Value};

module! {
    /// softmax(q k^T / sqrt(c) + mask) v in every head, between products that make q, k and v and one that joins the heads.
    /// Weights are transposed in files. Devlin et al., arXiv 1810.04805.
    ///
    /// Two points of its own: `keys` and `values`, as they arrive where queries read them.
    #[derive(Debug)]
    pub struct SelfAttention {
        /// `[d]` to `[h, c]`.
        pub query: Linear,
        /// `[d]` to `[h, c]`.
        pub key: Linear,
        /// `[d]` to `[h, c]`.
        pub value: Linear,
        /// `[h, c]` to `[d]`.
        pub dense: Linear,
        keys: Point,
        values: Point,
        drop: Dropout,
    }
}

impl SelfAttention {
    /// `heads` heads for rows of width `d`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the heads do not divide the width.
    #[track_caller]
    #[must_use]
    pub fn new(d: usize, heads: usize) -> SelfAttention {
        if heads == 0 || !d.is_multiple_of(heads) {
            let text = format!("{heads} heads do not divide a width of {d}");
            Error::new(Kind::Config, text).at(std::panic::Location::caller()).raise();
        }
        let (h, c) = (heads, d / heads);
        let part = || Linear::shaped(&[d], &[h, c]).transposed_in_files().never_empty(1, "heads");
        SelfAttention {
            query: part(),
            key: part(),
            value: part(),
            dense: Linear::shaped(&[h, c], &[d]).transposed_in_files().never_empty(0, "heads"),
            keys: Point::default(),
            values: Point::default(),
            drop: Dropout::default(),
        }
    }

    /// The same layer with dropout on its attention weights.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if `p` is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn dropout(self, p: f64) -> SelfAttention {
        SelfAttention { drop: Dropout::new(p), ..self }
    }

    /// The same layer with other initial weights.
    #[must_use]
    pub fn init(self, init: Init) -> SelfAttention {
        SelfAttention {
            query: self.query.init(init),
            key: self.key.init(init),
            value: self.value.init(init),
            dense: self.dense.init(init),
            ..self
        }
    }

    /// `[b, t, d]` to `[b, t, d]`. A mask `[b, t]` is added to the scores of the keys: 0 for those that are seen, a large
    /// negative number for those that are not; where keys are gathered, it is whole. With a mask, or dropout, all weights are
    /// kept, `t` times `t` a head; without, none.
    ///
    /// # Panics
    /// Unwinds with an error if x or the mask has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var, mask: Option<&Var>) -> Var {
        self.dense.forward(&self.mixed(x, mask))
    }

    /// residual + what [`SelfAttention::forward`] yields, in one pass at the end of the last product where nothing happens in between.
    ///
    /// # Panics
    /// As [`SelfAttention::forward`], and if the residual cannot be added to what comes out.
    #[track_caller]
    #[must_use]
    pub fn forward_onto(&self, x: &Var, mask: Option<&Var>, residual: &Var) -> Var {
        self.dense.forward_onto(&self.mixed(x, mask), residual)
    }

    /// What the heads yield, before they are joined.
    #[track_caller]
    fn mixed(&self, x: &Var, mask: Option<&Var>) -> Var {
        let (q, k, v) = (self.query.forward(x), self.key.forward(x), self.value.forward(x));
        let (k, v) = (self.keys.at(&k), self.values.at(&v));
        if mask.is_none() && !self.drop.is_on(x.tape()) {
            q.attention(&k, &v, false)
        } else {
            self.spelled_out(&q, &k, &v, mask)
        }
    }

    #[track_caller]
    fn spelled_out(&self, q: &Var, k: &Var, v: &Var, mask: Option<&Var>) -> Var {
        let c = *q.shape().last().expect("queries have channels");
        // With the dims of the mask last, it is repeated over the others.
        let mut scores = q.einsum("b t h c, b s h c -> h t b s", k).scale(1.0 / (c as f64).sqrt());
        if let Some(mask) = mask {
            scores = scores.add(mask);
        }
        let weights = scores.permute(&[2, 0, 1, 3]).softmax();
        self.drop.forward(&weights).einsum("b h t s, b s h c -> b t h c", v)
    }
}
