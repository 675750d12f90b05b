//! The feed-forward half of a block as many small ones, of which each token passes some.

use super::linear::Linear;
use crate::module;
use crate::param::{Init, Param};
use crate::point::Point;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Contraction, Indexing, Value};

module! {
    /// The sum over the k experts of a token of p_e (silu(x wg_e) * (x wu_e)) wd_e. All experts are scored by softmax(x gate) in the
    /// accumulator type; those with the k largest scores are taken, and their scores are p, made to add up to one or not. No token is
    /// dropped. Shazeer et al., arXiv 1701.06538; Jiang et al., "Mixtral of Experts", arXiv 2401.04088.
    #[derive(Debug)]
    pub struct Experts {
        /// `[d]` to `[experts]`: the scores.
        pub gate: Linear,
        /// What the tokens pass.
        pub experts: Stacks;
        per_token: usize,
        normed: bool,
    }
}

module! {
    /// The matrices of all experts, and four points: `rows`, `index` and `shares`, where tokens arrive at the experts, with the numbers
    /// of those that they pass and their weights, and `out`, where what all experts give is added up. Experts that are split leave a
    /// pending sum there.
    #[derive(Debug)]
    pub struct Stacks {
        /// `[experts, d, hidden]`: the gates.
        pub gate_proj: Param,
        /// `[experts, d, hidden]`: what passes them.
        pub up_proj: Param,
        /// `[experts, hidden, d]`.
        pub down_proj: Param,
        rows: Point,
        index: Point,
        shares: Point,
        out: Point,
    }
}

impl Experts {
    /// `count` experts of `hidden` units for rows of width `d`, of which each row passes `per_token`; if `normed`, with weights that add
    /// up to one. Matrices are transposed in files, where each expert has its own.
    #[must_use]
    pub fn new(d: usize, hidden: usize, count: usize, per_token: usize, normed: bool) -> Experts {
        let stack = |from, to| Param::new(&[count, from, to]).file_order(&[0, 2, 1]);
        let experts = Stacks {
            gate_proj: stack(d, hidden),
            up_proj: stack(d, hidden),
            down_proj: stack(hidden, d),
            rows: Point::default(),
            index: Point::default(),
            shares: Point::default(),
            out: Point::default(),
        };
        let gate = Linear::new(d, count).transposed_in_files().without_bias();
        let [up, down] = [d, hidden].map(|from| Init::Uniform(1.0 / (from.max(1) as f64).sqrt()));
        Experts { gate, experts: experts.init([up, up, down]), per_token, normed }
    }

    /// The same layer with other initial weights.
    #[must_use]
    pub fn init(self, init: Init) -> Experts {
        Experts { gate: self.gate.init(init), experts: self.experts.init([init; 3]), ..self }
    }

    /// `[.., d]` to `[.., d]`, and how rows were spread; scores are in the accumulator type.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d, or there are fewer experts than a row passes.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> (Var, Routes) {
        let logits = self.gate.forward(x);
        let scores = logits.cast(x.dtype().accumulator()).softmax();
        let last = scores.layout().ndim() - 1;
        let (mut shares, index) = scores.top_k(last, self.per_token, true);
        if self.normed {
            shares = shares.div(&shares.sum_dims(&[last]).expand(last, self.per_token));
        }
        let y = self.experts.forward(x, &index, &shares.cast(x.dtype()));
        (y, Routes { scores, index })
    }
}

/// How tokens were spread over experts.
#[derive(Clone, Debug)]
pub struct Routes {
    /// The scores of all experts, which add up to one: `[.., experts]`.
    pub scores: Var,
    /// The experts that were taken (i64): `[.., k]`.
    pub index: Var,
}

impl Routes {
    /// How often each expert was taken, and the sum of its scores over all rows: `[experts]` both, pending where rows are split.
    #[track_caller]
    #[must_use]
    pub fn usage(&self) -> [Var; 2] {
        let rows: Vec<usize> = (0..self.scores.layout().ndim() - 1).collect();
        let count = self.scores.layout().extent(rows.len());
        let taken = self.index.one_hot(count, self.scores.dtype());
        [taken.sum_dims(&[&rows[..], &[rows.len()]].concat()), self.scores.sum_dims(&rows)]
    }
}

impl Stacks {
    fn init(self, [gate, up, down]: [Init; 3]) -> Stacks {
        Stacks {
            gate_proj: self.gate_proj.init(gate),
            up_proj: self.up_proj.init(up),
            down_proj: self.down_proj.init(down),
            ..self
        }
    }

    #[track_caller]
    fn forward(&self, x: &Var, index: &Var, shares: &Var) -> Var {
        let (x, index, shares) = (self.rows.at(x), self.index.at(index), self.shares.at(shares));
        let [gate, up, down] = [self.gate_proj.on(&x), self.up_proj.on(&x), self.down_proj.on(&x)];
        self.out.at(&x.experts(&index, &shares, &gate, &up, &down))
    }
}
