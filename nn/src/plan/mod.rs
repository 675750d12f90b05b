//! Parallelism plans: which mesh axes shard which parameters and activations, as rules over their names.

mod rule;
mod unmatched;
mod repeated_blocks;
mod axes;
mod parallel;
mod sharded_data;
mod gradient_buckets;
mod experts;
mod sequence;
mod context;
mod pipeline;
mod text;
mod models;

pub use pipeline::{PipelinePlan, PipelineSchedule};
pub(crate) use repeated_blocks::ParamUse;
pub(crate) use rule::RuleTarget;

use crate::module::name::matches;
use rule::{Presence, Rule};
use sequence::RegatheredPoints;
use sharded_data::{ZeroAxis, best_dim};
use shardgrad_autograd::BucketBytes;
use shardgrad_tensor::{Axis, DType, Error, Kind, Layout, Mesh, Placement, Result};

/// A parallelism plan: how mesh axes shard parameters and activations (DP, TP, SP, CP, EP, PP, FSDP).
///
/// A plan is an ordered list of rules; for the same name and axis a later rule overrides an earlier one. A rule is a glob
/// pattern over names (see [`matches()`]) and one word per axis:
///
/// | word | placement on axis `tp` |
/// |---|---|
/// | `tp@1` | dim 1 is sharded |
/// | `tp~` | every rank has a copy, with a gradient of its own (replicate) |
/// | `tp=` | every rank has the same copy and the same gradient (invariant) |
/// | `tp+` | every rank has a partial sum |
/// | `tp@1\|@2` | the first placement that leaves no rank with an empty shard; if none does, the one with the fewest empty shards. Dims that a parameter does not have are passed over: `store("*", "dp@0\|=")` covers scalars too |
/// | `dp@*` | the largest dim that the axis divides and that no other axis shards, or else the least uneven one; scalars are copies |
///
/// Several axes on one dim shard it in the order of their rules, the first axis outermost, and axes with `@*` innermost. Rules of axes that a mesh does not
/// have are ignored, so one plan serves many meshes; an axis of the mesh that no rule uses is an error, since its ranks would do
/// the same work ([`Plan::copies`] states that this is meant). Parameters without a rule are invariant (`=`); activations without
/// a rule keep their layout.
///
/// ```
/// use shardgrad_nn::Plan;
/// let tensor = Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down");
/// let plan = Plan::data_parallel("dp").and(tensor).point("down.out", "tp@0");
/// let text = plan.to_string();
/// assert_eq!(text.parse::<Plan>().unwrap().to_string(), text);
/// ```
///
/// A plan prints as text that [`str::parse`] reads: one item per line, `#` begins a comment.
///
/// | line | item |
/// |---|---|
/// | `store PATTERN WORD..` | [`Plan::store`]; so for `compute` and `point` |
/// | `store PATTERN WORD.. optional` | a rule that may match nothing; where it matches one of the repeated blocks, each block with a parameter of that shape must match a rule |
/// | `store PATTERN WORD.. one-of KIND` | a rule of a kind, of which at least one must match, in every repeated block that has parameters in its place |
/// | `batch AXIS@DIM` | an axis that shards batches: rows are dim 0, tokens dim 1 |
/// | `zero STAGE AXIS` | how long gathered parameters and whole gradients live where rules shard the storage over the axis, as `store * dp@*` does ([`Plan::zero`]) |
/// | `regather PATTERN` | [`Plan::regather`]; with `optional`, for points that a model may lack |
/// | `gather_group PATTERN` | [`Plan::gather_group`] |
/// | `gathered_bytes_max BYTES` | [`Plan::gathered_bytes_max`] |
/// | `gradient_buckets FIRST OTHERS` | [`Plan::gradient_buckets`], in bytes or with a unit, as in `1MiB 25MiB` |
/// | `pipeline AXIS SCHEDULE CUT` | [`Plan::pipeline_parallel`]; a schedule given as action lists prints as its name |
#[doc(alias = "DeviceMesh")]
#[doc(alias = "parallelize_plan")]
#[doc(alias = "sharding rules")]
#[doc(alias = "PartitionSpec")]
#[doc(alias = "3D parallelism")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    rules: Vec<Rule>,
    /// The axes that shard batches, and the dims that they shard: rows are dim 0, tokens dim 1. Outermost first.
    batch: Vec<(String, usize)>,
    /// The axis of `column_parallel` and `row_parallel`.
    tensor_axis: Option<String>,
    /// The axes over which the storage of parameters is sharded, with their stages.
    zero: Vec<ZeroAxis>,
    /// Patterns of modules whose parameters are gathered together in stage 3.
    gather_groups: Vec<String>,
    /// Bytes up to which a pipeline rank keeps gathered parameters for the step in stage 3; `None` for any number.
    pub(crate) gathered_bytes_max: Option<usize>,
    /// The bytes at which buckets of gradients are closed, if stated.
    gradient_buckets: Option<BucketBytes>,
    /// The points whose gathered activations are gathered again in the backward pass.
    regathered_points: Vec<RegatheredPoints>,
    /// The axis of `exchange_experts` and `gather_experts`.
    expert_axis: Option<String>,
    /// The axis of `ring` and `exchange`.
    context_axis: Option<String>,
    /// Pipeline parallelism, if any.
    pipeline: Option<PipelinePlan>,
    /// Errors in the texts of rules, reported when the plan is used.
    errors: Vec<String>,
}

impl Plan {
    /// A plan without rules: every rank holds the whole model and computes the same.
    #[must_use]
    pub fn new() -> Plan {
        Plan::default()
    }

    /// Adds a rule for the stored layout of parameters, and so of their optimizer state: sharded or invariant (`tp@1`, `tp=`).
    #[doc(alias = "FSDP")]
    #[doc(alias = "fully_shard")]
    #[doc(alias = "ZeRO")]
    #[doc(alias = "FullyShardedDataParallel")]
    #[must_use]
    pub fn store(self, pattern: &str, placements: &str) -> Plan {
        self.rule(RuleTarget::Store, pattern, placements, Presence::Required)
    }

    /// Adds a rule for the layout in which layers use parameters, where it differs from the stored one. A parameter moves there once
    /// a step (an all-gather for FSDP), and its gradient moves back (a reduce-scatter).
    #[doc(alias = "FSDP")]
    #[must_use]
    pub fn compute(self, pattern: &str, placements: &str) -> Plan {
        self.rule(RuleTarget::Compute, pattern, placements, Presence::Required)
    }

    /// Adds a rule for the layout of activations at [`ActivationPoint`](crate::ActivationPoint)s, for example sequence parallelism.
    #[doc(alias = "SP")]
    #[doc(alias = "sequence parallel")]
    #[doc(alias = "SequenceParallel")]
    #[doc(alias = "with_sharding_constraint")]
    #[doc(alias = "PrepareModuleInput")]
    #[must_use]
    pub fn point(self, pattern: &str, placements: &str) -> Plan {
        self.rule(RuleTarget::Point, pattern, placements, Presence::Required)
    }

    /// Combines two plans: the rules of this plan, then those of the other.
    #[must_use]
    pub fn and(mut self, other: Plan) -> Plan {
        self.rules.extend(other.rules);
        for (axis, dim) in other.batch {
            match self.batch.iter().find(|(known, _)| *known == axis) {
                Some((_, known)) if *known != dim => {
                    self.errors
                        .push(format!("batch {axis}@{dim}: the axis already shards dim {known} of batches"));
                }
                Some(_) => {}
                None => self.batch.push((axis, dim)),
            }
        }
        for zero in other.zero {
            self.zero.retain(|known| known.axis != zero.axis);
            self.zero.push(zero);
        }
        self.gather_groups.extend(other.gather_groups);
        self.gathered_bytes_max = other.gathered_bytes_max.or(self.gathered_bytes_max);
        self.regathered_points.extend(other.regathered_points);
        self.gradient_buckets = other.gradient_buckets.or(self.gradient_buckets);
        self.tensor_axis = other.tensor_axis.or(self.tensor_axis);
        self.expert_axis = other.expert_axis.or(self.expert_axis);
        self.context_axis = other.context_axis.or(self.context_axis);
        self.pipeline = other.pipeline.or(self.pipeline);
        self.errors.extend(other.errors);
        self
    }

    fn rule(mut self, target: RuleTarget, pattern: &str, placements: &str, presence: Presence) -> Plan {
        if placements.split_whitespace().next().is_none() {
            self.errors.push(format!(
                "{target} {pattern}: the rule has no placement; write axis@dim, axis~, axis= or axis+"
            ));
        }
        for word in placements.split_whitespace() {
            match Rule::read(target, pattern, word, presence.clone()) {
                Ok(rule) => self.rules.push(rule),
                Err(why) => self.errors.push(format!("{target} {pattern} {word}: {why}")),
            }
        }
        self
    }

    /// Returns the layout of a batch of a global shape: dim 0 (rows) and dim 1 (tokens, if there is one) sharded over the batch axes
    /// that the mesh has.
    ///
    /// # Errors
    /// `Kind::Config` for a plan with a rule that cannot be parsed; `Kind::Shape` for a scalar.
    pub fn batch_layout(&self, mesh: &Mesh, dtype: DType, shape: &[usize]) -> Result<Layout> {
        self.check()?;
        if shape.is_empty() {
            return Err(Error::new(
                Kind::Shape,
                "a batch needs at least one dim, its rows, but the shape is []",
            ));
        }
        let axes = self.batch.iter().filter(|(_, dim)| *dim < shape.len());
        let axes = axes.filter_map(|(name, dim)| Some((mesh.axis(name)?, Placement::Shard(*dim))));
        Ok(axes.fold(Layout::invariant(mesh, dtype, shape), |l, (axis, placement)| {
            l.with_placement(axis, placement)
        }))
    }

    /// The axes of several ranks that shard the rows of batches, outermost first.
    pub(crate) fn row_axes<'a>(&'a self, mesh: &'a Mesh) -> impl Iterator<Item = Axis> + 'a {
        self.batch_axes(0, mesh)
    }

    /// The axes of several ranks that shard the tokens of batches, outermost first.
    pub(crate) fn token_axes<'a>(&'a self, mesh: &'a Mesh) -> impl Iterator<Item = Axis> + 'a {
        self.batch_axes(1, mesh)
    }

    fn batch_axes<'a>(&'a self, dim: usize, mesh: &'a Mesh) -> impl Iterator<Item = Axis> + 'a {
        let of_dim = self.batch.iter().filter(move |(_, d)| *d == dim);
        of_dim.filter_map(|(name, _)| mesh.axis(name)).filter(|axis| mesh.size(*axis) > 1)
    }

    /// Whether a rule places activations on an axis.
    pub(crate) fn shards_activations_with(&self, axis: &str) -> bool {
        self.rules.iter().any(|rule| rule.axis == axis && rule.target == RuleTarget::Point)
    }

    /// Whether an axis shards parameters and activations alone: not batches, layers, experts or the storage of parameters.
    pub(crate) fn is_tensor_axis(&self, axis: &str) -> bool {
        let is = |named: &Option<String>| named.as_deref() == Some(axis);
        let is_used = self.rules.iter().any(|rule| rule.axis == axis && rule.target != RuleTarget::Compute);
        let shards_data = self.batch.iter().any(|(name, _)| name == axis)
            || self.zero.iter().any(|zero| zero.axis == axis)
            || self.pipeline.as_ref().is_some_and(|pipeline| pipeline.axis == axis);
        is_used && !shards_data && !is(&self.expert_axis) && !is(&self.context_axis)
    }

    /// Whether an axis shards the tokens of batches.
    pub(crate) fn is_token_axis(&self, axis: &str) -> bool {
        self.batch.iter().any(|(name, dim)| name == axis && *dim == 1)
    }

    /// Rejects a plan with rules that cannot be parsed.
    pub(crate) fn check(&self) -> Result<()> {
        if self.errors.is_empty() {
            return Ok(());
        }
        let error =
            Error::new(Kind::Config, format!("{} rule(s) of the plan cannot be parsed", self.errors.len()));
        Err(self.errors.iter().fold(error, |e, error_text| e.detail("rule", error_text)))
    }

    /// Returns the placements that the rules give to a name, in the order of the winning rules. `shape` is the shape of a parameter,
    /// `None` for an activation. Marks every rule that matches in `used`, whether or not the mesh has its axis.
    pub(crate) fn placements(
        &self,
        target: RuleTarget,
        name: &str,
        shape: Option<&[usize]>,
        mesh: &Mesh,
        used: &mut [bool],
    ) -> Vec<(Axis, Placement)> {
        let mut placements: Vec<(Axis, Placement)> = Vec::new();
        let mut any_dim: Vec<Axis> = Vec::new();
        for (rule, used) in self.rules.iter().zip(used) {
            if rule.target != target || !matches(&rule.pattern, name) {
                continue;
            }
            *used = true;
            if let Some(axis) = mesh.axis(&rule.axis).filter(|a| mesh.size(*a) > 1) {
                placements.retain(|(a, _)| *a != axis);
                any_dim.retain(|a| *a != axis);
                match rule.placement(shape, mesh.size(axis)) {
                    Some(placement) => placements.push((axis, placement)),
                    None => any_dim.push(axis),
                }
            }
        }
        // The choice depends on the dims that other axes shard.
        for axis in any_dim {
            placements.push((axis, best_dim(shape.unwrap_or_default(), axis, &placements, mesh)));
        }
        placements
    }

    /// The number of rules.
    pub(crate) fn num_rules(&self) -> usize {
        self.rules.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(plan: &Plan, mesh: &str, name: &str) -> String {
        let mesh = Mesh::parse(mesh).unwrap();
        let mut used = vec![false; plan.num_rules()];
        let placements = plan.placements(RuleTarget::Store, name, None, &mesh, &mut used);
        placements.iter().map(|(a, s)| format!("{}{s}", mesh.name(*a))).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn later_rules_override_earlier_ones_per_axis() {
        let plan =
            Plan::new().store("*.weight", "tp@1 dp@0").store("b.weight", "tp@0").store("c.weight", "tp=");
        assert_eq!(stored(&plan, "dp=2,tp=2", "a.weight"), "tp@1 dp@0");
        assert_eq!(stored(&plan, "dp=2,tp=2", "b.weight"), "dp@0 tp@0");
        assert_eq!(stored(&plan, "tp=2,dp=2", "c.weight"), "dp@0 tp=");
        assert_eq!(stored(&plan, "dp=2,tp=1", "a.weight"), "dp@0");
        assert_eq!(stored(&plan, "", "a.weight"), "");
        assert_eq!(stored(&plan, "dp=2", "a.bias"), "");
    }

    #[test]
    fn all_unparsable_rules_are_reported_at_once() {
        for good in ["tp@0", "a_1@12", "tp~", "tp=", "tp+", "a~ b@1"] {
            assert!(Plan::new().point("*", good).check().is_ok(), "{good}");
        }
        for bad in ["tp", "@1", "tp@", "tp@x", "~", "t-p@1", "tp@-1", "tp!", "", "tp@1@2", "a~ b"] {
            assert_eq!(Plan::new().point("*", bad).check().unwrap_err().kind(), Kind::Config, "{bad}");
        }
        let error = Plan::new().store("w", "tp~").and(Plan::new().point("p", "tp")).check().unwrap_err();
        assert_eq!(error.details().len(), 2);
        assert!(
            error
                .to_string()
                .contains("store w tp~: stored parameters are sharded (axis@dim) or invariant (axis=)"),
            "{error}"
        );
    }

    #[test]
    fn batch_layout_shards_over_the_batch_axes_of_the_mesh() {
        let plan = Plan::data_parallel("dp").and(Plan::data_parallel("fsdp")).and(Plan::data_parallel("dp"));
        let layout = |mesh| {
            let mesh = Mesh::parse(mesh).unwrap();
            plan.batch_layout(&mesh, DType::I64, &[8, 5]).unwrap().to_string()
        };
        assert_eq!(layout("tp=2"), "i64[8, 5]");
        assert_eq!(layout("tp=2,dp=2"), "i64[8@dp, 5]");
        assert_eq!(layout("fsdp=2,dp=2"), "i64[8@dp@fsdp, 5]");
        assert!(plan.batch_layout(&Mesh::single(), DType::I64, &[]).is_err());
    }
}
