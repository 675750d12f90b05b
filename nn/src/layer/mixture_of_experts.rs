//! Mixture of experts (MoE): many small MLPs, of which a router selects some for each token.

use super::linear::Linear;
use crate::module;
use crate::module::activation_point::ActivationPoint;
use crate::module::param::{Init, Param};
use shardgrad_autograd::Var;
use shardgrad_tensor::{Contraction, Indexing, Point, RowsToExperts, Value};

module! {
    /// Mixture of experts with top-k routing: the sum over the k experts of a token of p_e (silu(x wg_e) * (x wu_e)) wd_e. The router
    /// scores all experts by softmax(x gate) in the accumulator type and selects the k largest scores as p, optionally renormalized
    /// to sum to one. No token is dropped (no capacity limit). Shazeer et al., arXiv 1701.06538; Jiang et al., "Mixtral of Experts",
    /// arXiv 2401.04088.
    #[doc(alias = "MoE")]
    #[doc(alias = "MoELayer")]
    #[doc(alias = "SparseMoeBlock")]
    #[doc(alias = "Experts")]
    #[derive(Debug)]
    pub struct MixtureOfExperts {
        /// The router, `[d]` to `[experts]`.
        pub gate: Linear,
        /// The experts.
        pub experts: GroupedExperts;
        top_k: usize,
        renormalize: bool,
    }
}

module! {
    /// The weights of all experts, stacked into one parameter per matrix.
    ///
    /// Activation points: `rows`, `index` and `shares` (the tokens, the indices of their experts, and the weights of these), before
    /// the experts; and `out`, after them. Sharded experts leave a partial sum at `out`, unless their axes also shard rows. Then
    /// token-expert pairs are exchanged if the plan states the layout of `rows`; if it does not, rows are gathered or pairs exchanged,
    /// whichever moves fewer bytes.
    #[doc(alias = "GroupedMLP")]
    #[doc(alias = "grouped_gemm")]
    #[derive(Debug)]
    pub struct GroupedExperts {
        /// Gate projections, `[experts, d, hidden]`.
        pub gate_proj: Param,
        /// Up projections, `[experts, d, hidden]`.
        pub up_proj: Param,
        /// Down projections, `[experts, hidden, d]`.
        pub down_proj: Param,
        rows: ActivationPoint,
        index: ActivationPoint,
        shares: ActivationPoint,
        out: ActivationPoint,
    }
}

impl MixtureOfExperts {
    /// A mixture of `count` experts of `hidden` units for rows of width `d`, of which each row uses `top_k`; with `renormalize` the
    /// weights of a row sum to one. In files each expert has its own matrices, transposed.
    #[must_use]
    pub fn new(d: usize, hidden: usize, count: usize, top_k: usize, renormalize: bool) -> MixtureOfExperts {
        let stack = |from, to| Param::new(&[count, from, to]).with_file_order(&[0, 2, 1]);
        let experts = GroupedExperts {
            gate_proj: stack(d, hidden),
            up_proj: stack(d, hidden),
            down_proj: stack(hidden, d),
            rows: ActivationPoint::default(),
            index: ActivationPoint::default(),
            shares: ActivationPoint::default(),
            out: ActivationPoint::default(),
        };
        let gate = Linear::new(d, count).with_transposed_file_shape().without_bias();
        let [up, down] = [d, hidden].map(|from| Init::Uniform(1.0 / (from.max(1) as f64).sqrt()));
        MixtureOfExperts { gate, experts: experts.init([up, up, down]), top_k, renormalize }
    }

    /// Returns the same layer with another initializer of the weights.
    #[must_use]
    pub fn init(self, init: Init) -> MixtureOfExperts {
        MixtureOfExperts { gate: self.gate.init(init), experts: self.experts.init([init; 3]), ..self }
    }

    /// Applies the experts: `[.., d]` to `[.., d]`; also returns the routing, with scores in the accumulator type.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d, or if there are fewer than `top_k` experts.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> (Var, Routing) {
        let logits = self.gate.forward(x);
        let scores = logits.cast(x.dtype().accumulator()).softmax();
        let last = scores.shape().len() - 1;
        let (mut shares, index) = scores.top_k(last, self.top_k, true);
        if self.renormalize {
            shares = shares.div(&shares.sum_dims(&[last]).expand(last, self.top_k));
        }
        let y = self.experts.forward(x, &index, &shares.cast(x.dtype()));
        (y, Routing { scores, index })
    }
}

/// The routing of tokens to experts.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The router scores of all experts, which sum to one: `[.., experts]`.
    pub scores: Var,
    /// The selected experts of each token (i64): `[.., k]`.
    pub index: Var,
}

impl Routing {
    /// Returns the number of rows routed to each expert, and the sum of its scores over all rows: `[experts]` both; partial sums
    /// where rows are sharded.
    #[track_caller]
    #[must_use]
    pub fn expert_usage(&self) -> [Var; 2] {
        let shape = self.scores.shape();
        let rows: Vec<usize> = (0..shape.len() - 1).collect();
        let count = shape[rows.len()];
        let selected = self.index.one_hot(count, self.scores.dtype());
        [selected.sum_dims(&[&rows[..], &[rows.len()]].concat()), self.scores.sum_dims(&rows)]
    }
}

impl GroupedExperts {
    fn init(self, [gate, up, down]: [Init; 3]) -> GroupedExperts {
        GroupedExperts {
            gate_proj: self.gate_proj.init(gate),
            up_proj: self.up_proj.init(up),
            down_proj: self.down_proj.init(down),
            ..self
        }
    }

    #[track_caller]
    fn forward(&self, x: &Var, index: &Var, shares: &Var) -> Var {
        let [gate, up, down] = [self.gate_proj.on(x), self.up_proj.on(x), self.down_proj.on(x)];
        let rows = match self.rows.has_rule() {
            true => RowsToExperts::AsStated,
            false => RowsToExperts::Cheapest,
        };
        let points: [&dyn Point<Var>; 4] = [&self.rows, &self.index, &self.shares, &self.out];
        x.experts_general([index, shares], [&gate, &up, &down], rows, points)
    }
}
