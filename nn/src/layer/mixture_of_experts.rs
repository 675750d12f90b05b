//! Mixture of experts (MoE): many small MLPs, of which a router selects some for each token.

use super::gated_mlp::GatedMlp;
use super::linear::Linear;
use crate::expert_load::TOKENS_PER_EXPERT;
use crate::loss::{Loss, expert_imbalance};
use crate::module;
use crate::module::activation_point::{ActivationPoint, set_path};
use crate::module::param::{Init, Param};
use shardgrad_autograd::Var;
use shardgrad_tensor::{
    Contraction, Error, Indexing, Kind, Point, Resharding, Result, RowsToExperts, StepReport, Tensor, Value,
};
use std::panic::Location;
use std::rc::Rc;

module! {
    /// Mixture of experts with top-k routing: the sum over the k experts of a token of p_e (silu(x wg_e) * (x wu_e)) wd_e. The router
    /// scores all experts by softmax(x gate) in the accumulator type and selects the k largest scores as p, optionally renormalized
    /// to sum to one. No token is dropped (no capacity limit). Shazeer et al., arXiv 1701.06538; Jiang et al., "Mixtral of Experts",
    /// arXiv 2401.04088.
    ///
    /// Options: experts for all tokens ([`MixtureOfExperts::with_shared_experts`]), and balancing without a loss
    /// ([`MixtureOfExperts::with_bias_balancing`]).
    ///
    /// Activation point: `out`, the sum of routed and shared experts.
    #[doc(alias = "MoE")]
    #[doc(alias = "MoELayer")]
    #[doc(alias = "SparseMoeBlock")]
    #[doc(alias = "Experts")]
    #[derive(Debug)]
    pub struct MixtureOfExperts {
        /// The router, `[d]` to `[experts]`.
        pub gate: Linear,
        /// The experts.
        pub experts: GroupedExperts,
        /// The experts that all tokens use, as one MLP.
        pub shared_experts: Option<GatedMlp>,
        /// A number for each expert that is added to its scores for the selection alone: `[experts]`. Without gradient.
        pub e_score_correction_bias: Option<Param>,
        out: ActivationPoint;
        top_k: usize,
        renormalize: bool,
        bias_step: f64,
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
        MixtureOfExperts {
            gate,
            experts: experts.init([up, up, down]),
            shared_experts: None,
            e_score_correction_bias: None,
            out: ActivationPoint::default(),
            top_k,
            renormalize,
            bias_step: 0.0,
        }
    }

    /// Returns the same layer with shared experts, which all tokens use besides their own: one gated MLP of `hidden` units, the units of
    /// all shared experts together. Dai et al., "DeepSeekMoE", arXiv 2401.06066.
    #[doc(alias = "n_shared_experts")]
    #[must_use]
    pub fn with_shared_experts(self, hidden: usize) -> MixtureOfExperts {
        let d = self.gate.weight.shape()[0];
        MixtureOfExperts { shared_experts: Some(GatedMlp::new(d, hidden, false)), ..self }
    }

    /// Returns the same layer with bias-based load balancing: the experts of a token are those with the largest scores plus bias, and
    /// their weights are the scores without bias. Each training step that is not skipped moves each bias by `step`: a
    /// [`Trainer`](crate::Trainer) does it with the counts that the loss reports ([`Routing::report_in`]), an own loop with
    /// [`MixtureOfExperts::update_bias`]. With a step of 0 the bias stays. DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437,
    /// section 2.1.2 (with a step of 0.001).
    ///
    /// The bias is a frozen parameter, which checkpoints hold, and which every mesh updates to the same bits.
    #[doc(alias = "auxiliary-loss-free")]
    #[doc(alias = "expert_bias")]
    #[doc(alias = "moe_router_enable_expert_bias")]
    #[must_use]
    pub fn with_bias_balancing(self, step: f64) -> MixtureOfExperts {
        let bias = Param::new(&[self.num_experts()]);
        let bias =
            if step == 0.0 { bias } else { bias.after_step(move |bias, report| balance(bias, step, report)) };
        bias.set_frozen(true);
        MixtureOfExperts { e_score_correction_bias: Some(bias), bias_step: step, ..self }
    }

    fn num_experts(&self) -> usize {
        self.gate.weight.shape()[1]
    }

    /// Returns the same layer with another initializer of the weights.
    #[must_use]
    pub fn init(self, init: Init) -> MixtureOfExperts {
        MixtureOfExperts {
            gate: self.gate.init(init),
            experts: self.experts.init([init; 3]),
            shared_experts: self.shared_experts.map(|shared| shared.init(init)),
            ..self
        }
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
        let (mut shares, index) = self.select(&scores);
        if self.renormalize {
            shares = shares.div(&shares.sum_dims(&[last]).expand(last, self.top_k));
        }
        let y = self.experts.forward(x, &index, &shares.cast(x.dtype()));
        let y = match &self.shared_experts {
            Some(shared) => y.add(&shared.forward(x)),
            None => y,
        };
        (self.out.constrain(&y), Routing { scores, index, layer: self.path() })
    }

    /// The name of the tokens per expert in the report of a step.
    pub(crate) fn report_name(&self) -> String {
        format!("{}{TOKENS_PER_EXPERT}", self.path())
    }

    /// The dotted path of this layer and a dot; empty for the root, and before [`Model::new`](crate::Model::new).
    fn path(&self) -> Rc<str> {
        self.out.name().and_then(|out| out.strip_suffix("out").map(Rc::from)).unwrap_or_else(|| Rc::from(""))
    }

    /// The scores of the experts of each row, and their indices.
    #[track_caller]
    fn select(&self, scores: &Var) -> (Var, Var) {
        let last = scores.shape().len() - 1;
        let Some(bias) = &self.e_score_correction_bias else { return scores.top_k(last, self.top_k, true) };
        let bias = bias.on(scores).detach().cast(scores.dtype());
        let (_, index) = scores.detach().add(&bias).top_k(last, self.top_k, true);
        (scores.gather(last, &index), index)
    }

    /// Moves the bias of each expert by the step of [`MixtureOfExperts::with_bias_balancing`]: up if the expert got fewer tokens than
    /// the mean, down if more. `tokens_per_expert` counts the tokens of a whole step ([`Routing::tokens_per_expert`], summed over
    /// microbatches). Call it once per step, on every rank, in a loop without a trainer. Does nothing without a bias, or on a pipeline
    /// stage without this layer.
    ///
    /// # Errors
    /// `Kind::Shape` unless there is one count for each expert; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn update_bias(&self, tokens_per_expert: &Tensor) -> Result<()> {
        let Some(bias) = self.e_score_correction_bias.as_ref().filter(|bias| bias.is_local()) else {
            return Ok(());
        };
        if tokens_per_expert.shape()[..] != [self.num_experts()] {
            let text = format!(
                "the bias of {} experts cannot be updated from token counts of shape {:?}",
                self.num_experts(),
                tokens_per_expert.shape()
            );
            let help = "pass one count for each expert: Routing::tokens_per_expert";
            return Err(Error::new(Kind::Shape, text).detail("help", help).at(Location::caller()));
        }
        move_bias(bias, self.bias_step, &tokens_per_expert.gathered().to_f64()?)
    }
}

/// Moves the biases of a layer by `step` with the tokens per expert that a step reports.
fn balance(bias: &Param, step: f64, report: &StepReport) -> Result<()> {
    let name = bias.name();
    let path = name.strip_suffix("e_score_correction_bias").unwrap_or(&name);
    let wanted = format!("{path}{TOKENS_PER_EXPERT}");
    match report.auxiliary_vectors.iter().find(|(name, _)| *name == wanted) {
        Some((_, tokens)) => move_bias(bias, step, tokens),
        None => {
            let text = format!("`{name}` cannot balance its experts: the loss does not report `{wanted}`");
            let help = "return routing.report_in(loss) from the loss, or use masked_loss or loss_from_batch of the model";
            Err(Error::new(Kind::Config, text).detail("help", help))
        }
    }
}

/// Moves the bias of each expert by a step: up if the expert got fewer tokens than the mean, down if more.
fn move_bias(bias: &Param, step: f64, tokens: &[f64]) -> Result<()> {
    let mean = tokens.iter().sum::<f64>() / tokens.len() as f64;
    let steps: Vec<f64> = tokens.iter().map(|tokens| step * sign_of(mean - tokens)).collect();
    bias.add_values(&steps)
}

/// -1, 0 or 1.
fn sign_of(x: f64) -> f64 {
    if x == 0.0 { 0.0 } else { x.signum() }
}

/// The routing of tokens to experts.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The router scores of all experts, which sum to one: `[.., experts]`.
    pub scores: Var,
    /// The selected experts of each token (i64): `[.., k]`.
    pub index: Var,
    /// The path of the layer with a dot; empty for the root.
    layer: Rc<str>,
}

impl Routing {
    /// Returns the loss with the tokens per expert of this layer as an auxiliary vector: a trainer sums them over ranks and microbatches,
    /// reports them ([`ExpertLoad::of`](crate::ExpertLoad::of)), and updates biases with them.
    #[track_caller]
    #[must_use]
    pub fn report_in(&self, loss: impl Into<Loss>) -> Loss {
        loss.into().also_vector(self.report_name(), self.tokens_per_expert())
    }

    /// The name of the tokens per expert in the report of a step.
    pub(crate) fn report_name(&self) -> String {
        format!("{}{TOKENS_PER_EXPERT}", self.layer)
    }

    /// Returns the number of rows routed to each expert, and the sum of its scores over all rows: `[experts]` both; partial sums
    /// where rows are sharded.
    #[track_caller]
    #[must_use]
    pub fn expert_usage(&self) -> [Var; 2] {
        let rows: Vec<usize> = (0..self.scores.shape().len() - 1).collect();
        [self.tokens_per_expert(), self.scores.sum_dims(&rows)]
    }

    /// Returns the number of rows routed to each expert, `[experts]`, in the dtype of the scores: a partial sum where rows are sharded.
    #[track_caller]
    #[must_use]
    pub fn tokens_per_expert(&self) -> Var {
        let dims: Vec<usize> = (0..self.scores.shape().len()).collect();
        let count = self.scores.shape()[dims.len() - 1];
        // The ops of the count are not those of the activation before.
        set_path(&self.scores, &self.report_name());
        self.index.one_hot(count, self.scores.dtype()).sum_dims(&dims)
    }

    /// Returns the load imbalance of the experts over the whole batch: the rows of the expert with most rows divided by the mean, a
    /// scalar from 1 to the number of experts.
    #[doc(alias = "load balance")]
    #[track_caller]
    #[must_use]
    pub fn imbalance(&self) -> Var {
        expert_imbalance(&self.tokens_per_expert())
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
