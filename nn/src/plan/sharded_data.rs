//! Sharded data parallelism (ZeRO, FSDP): parameters, gradients and optimizer state as shards over axes that shard the batch.
//!
//! Every rank stores a shard of each parameter and of its optimizer state, and computes with the gathered parameter. Stages differ
//! in what a rank holds besides:
//!
//! | stage | gathered parameters | gradients | bytes per parameter on N ranks, bf16 with f32 state |
//! |---|---|---|---|
//! | none | - | whole, all-reduced once per step | 18 |
//! | 1 | for the step | whole, reduce-scattered once per step | 6 + 12 / N |
//! | 2 | for the step | shards, reduce-scattered in each backward pass | 2 + 16 / N |
//! | 3 | one group in use, and the next | shards, reduce-scattered in each backward pass | 16 / N, and two groups of 2 |
//!
//! On a pipeline stage 3 is stage 2 where memory allows, or else gathers by microbatch as above ([`Plan::gathered_bytes_max`]).
//!
//! Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054; Zhao et al.,
//! "PyTorch FSDP", arXiv 2304.11277. Over two axes, of which one holds copies, this is hybrid sharding (HSDP).

use super::rule::Presence;
use super::{Plan, RuleTarget};
use crate::module::name::{matches, nearest};
use shardgrad_autograd::{GatherPolicy, GatheredLifetime};
use shardgrad_tensor::{Axis, Error, Kind, Layout, Mesh, Placement, Result};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt;

/// An axis that shards the storage of parameters, and how long their gathered form is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ZeroAxis {
    pub(super) axis: String,
    /// 1, 2 or 3.
    pub(super) stage: usize,
}

/// The paths of the modules that hold a parameter, from the outermost.
fn modules_of(name: &str) -> impl DoubleEndedIterator<Item = &str> {
    name.match_indices('.').map(|(dot, _)| &name[..dot])
}

impl Plan {
    /// ZeRO stage 1, 2 or 3 over an axis that shards the rows of batches: parameters, gradients and optimizer state are stored as
    /// shards.
    ///
    /// Each parameter is sharded along the largest dim that the axis divides and that no other axis shards, or else along the
    /// least uneven one; scalars are copies. Other axes keep their rules, so the plan combines with tensor, expert, context and
    /// pipeline parallelism: `Plan::gpt2().and(Plan::zero(2, "dp"))`.
    ///
    /// - Stage 1 keeps gathered parameters for the step, sums gradients unsharded and reduce-scatters them once per step.
    /// - Stage 2 reduce-scatters the gradients of each microbatch, so that their sum is sharded too.
    /// - Stage 3 also frees gathered parameters after use, and gathers them again for the backward pass, one group ahead
    ///   ([`Plan::gather_group`]). On a pipeline memory or [`Plan::gathered_bytes_max`] decides whether it does.
    #[doc(alias = "ZeRO")]
    #[doc(alias = "DistributedOptimizer")]
    #[doc(alias = "ZeroRedundancyOptimizer")]
    #[doc(alias = "zero_optimization")]
    #[must_use]
    pub fn zero(stage: usize, axis: &str) -> Plan {
        let mut plan = Plan::data_parallel(axis);
        if !(1..=3).contains(&stage) {
            plan.errors.push(format!("zero {stage} {axis}: the stages of ZeRO are 1, 2 and 3"));
            return plan;
        }
        plan.zero.push(ZeroAxis { axis: axis.to_string(), stage });
        plan.rule(RuleTarget::Store, "*", &format!("{axis}@*"), Presence::Optional)
    }

    /// Fully sharded data parallelism (FSDP) over an axis: stage 3 of [`Plan::zero`]. Together with [`Plan::data_parallel`] over
    /// another axis this is hybrid sharding (HSDP): shards over the one axis, copies over the other; gradients are
    /// reduce-scattered over the one, and their shards all-reduced over the other.
    #[doc(alias = "FSDP")]
    #[doc(alias = "HSDP")]
    #[doc(alias = "fully_shard")]
    #[doc(alias = "FullyShardedDataParallel")]
    #[doc(alias = "HYBRID_SHARD")]
    #[must_use]
    pub fn fsdp(axis: &str) -> Plan {
        Plan::zero(3, axis)
    }

    /// Gathers and frees together, in stage 3, the parameters below each module whose path matches a pattern ([`matches()`]), such
    /// as `h.*.attn`. Of several patterns the last that matches counts. Without one, a group is a repeated block of the model
    /// (`h.0`), or a layer outside of blocks. A model refuses a pattern that matches none of its modules.
    #[doc(alias = "auto_wrap_policy")]
    #[must_use]
    pub fn gather_group(mut self, modules: &str) -> Plan {
        self.gather_groups.push(modules.to_string());
        self
    }

    /// In stage 3 on a pipeline, keeps the gathered parameters of a rank's stages for the step if they take at most this many bytes on
    /// a rank, in the dtype of computation. Otherwise the stages of this rank gather by microbatch: each forward and backward pass
    /// gathers group after group and frees each after its use. With 0 bytes all stages do.
    ///
    /// Without a bound, the stages of a rank gather once per step if the step fits into the memory of the ranks so
    /// ([`Trainer::stage_gatherings`](crate::Trainer::stage_gatherings), [`TrainerConfig::rank_memory_bytes`](crate::TrainerConfig::rank_memory_bytes)). A
    /// step of m microbatches then moves each parameter once and not up to 2 m times, and pipelines need many microbatches; the stages
    /// of a pipeline are small already, 1 / p of the model on p ranks. Inference gathers once per forward pass then.
    ///
    /// ```
    /// use shardgrad_nn::Plan;
    /// let plan = Plan::gpt2().and(Plan::fsdp("fsdp")).gathered_bytes_max(2 << 30);
    /// assert!(plan.to_string().contains("gathered_bytes_max 2147483648\n"));
    /// ```
    #[doc(alias = "reshard_after_forward")]
    #[must_use]
    pub fn gathered_bytes_max(mut self, bytes: usize) -> Plan {
        self.gathered_bytes_max = Some(bytes);
        self
    }

    /// The stages of ZeRO whose axes have several ranks on a mesh.
    fn zero_axes(&self, mesh: &Mesh) -> impl Iterator<Item = &ZeroAxis> {
        self.zero.iter().filter(|zero| mesh.axis(&zero.axis).is_some_and(|axis| mesh.size(axis) > 1))
    }

    /// The stage of ZeRO on a mesh, and its axis; `None` if no axis of several ranks has a stage. A model refuses a mesh on which two
    /// axes have one.
    #[must_use]
    pub fn zero_on(&self, mesh: &Mesh) -> Option<(usize, &str)> {
        self.zero_axes(mesh).next().map(|zero| (zero.stage, zero.axis.as_str()))
    }

    /// Rejects a mesh on which two axes have a stage: over one axis parameters are shards, over others copies.
    pub(crate) fn check_one_zero_axis(&self, mesh: &Mesh) -> Result<()> {
        let mut axes = self.zero_axes(mesh);
        let (Some(first), Some(second)) = (axes.next(), axes.next()) else { return Ok(()) };
        let text = format!("two axes of the mesh have a stage of ZeRO: `{first}` and `{second}`");
        let help = "omit one stage, for shards over one axis and copies over the other (hybrid sharding), or make the two axes one";
        Err(Error::new(Kind::Config, text).detail("help", help))
    }

    /// Rejects a pattern of [`Plan::gather_group`] that matches no module with parameters of these names.
    pub(crate) fn check_gather_groups_matched(&self, params: &[&str]) -> Result<()> {
        let modules: BTreeSet<&str> = params.iter().flat_map(|name| modules_of(name)).collect();
        let is_unmatched = |pattern: &&String| !modules.iter().any(|module| matches(pattern, module));
        let Some(pattern) = self.gather_groups.iter().find(is_unmatched) else { return Ok(()) };
        let text = format!("`gather_group {pattern}` of the plan matches no module of the model");
        let near = nearest(pattern, modules);
        let near = if near.is_empty() { "the model has none".to_string() } else { near.join(", ") };
        let help = "state the path of a module, as in `h.*.attn`, not the name of a parameter";
        Err(Error::new(Kind::Config, text).detail("nearest", near).detail("help", help))
    }

    /// The module with which a parameter is gathered.
    pub(crate) fn gather_group_of<'a>(&self, name: &'a str) -> &'a str {
        let modules = || modules_of(name);
        let stated = self.gather_groups.iter().rev();
        let stated = stated.filter_map(|pattern| modules().find(|path| matches(pattern, path))).next();
        let is_number = |path: &&str| {
            let last = path.rsplit('.').next().unwrap_or_default();
            !last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit())
        };
        stated.or_else(|| modules().find(is_number)).or_else(|| modules().next_back()).unwrap_or(name)
    }

    /// How a tape treats a parameter of these layouts, of the gather group `group`: by the stage of the axis over which it is gathered.
    pub(crate) fn gather_policy(&self, stored: &Layout, computed: &Layout, group: u32) -> GatherPolicy {
        let mesh = stored.mesh();
        let is_gathered = |zero: &&ZeroAxis| {
            let shards = |layout: &Layout, axis| matches!(layout.placement(axis), Placement::Shard(_));
            mesh.axis(&zero.axis).is_some_and(|axis| shards(stored, axis) && !shards(computed, axis))
        };
        match self.zero.iter().find(is_gathered) {
            None => GatherPolicy::default(),
            Some(ZeroAxis { stage, .. }) => GatherPolicy {
                lifetime: if *stage == 3 { GatheredLifetime::Group(group) } else { GatheredLifetime::Step },
                reduces_each_round: *stage >= 2,
            },
        }
    }
}

impl fmt::Display for ZeroAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "zero {} {}", self.stage, self.axis)
    }
}

/// The placement of an axis that may shard any dim of a parameter: the largest dim that the axis divides and that no other axis
/// shards, or else the dim with the least uneven shards; a copy if no dim has more than one entry.
pub(super) fn best_dim(shape: &[usize], axis: Axis, others: &[(Axis, Placement)], mesh: &Mesh) -> Placement {
    let shards_by_others = |d: usize| -> usize {
        let shard_d = others.iter().filter(|(_, placement)| *placement == Placement::Shard(d));
        shard_d.map(|(axis, _)| mesh.size(*axis)).product()
    };
    // The smaller, the better: entries of the largest shards in units of the extent, which is 1 for even shards.
    let rank_dim = |d: &usize| {
        let (extent, by_others) = (shape[*d], shards_by_others(*d));
        let shards = by_others * mesh.size(axis);
        let is_uneven = !extent.is_multiple_of(shards);
        let padded = extent.div_ceil(shards) * shards;
        // The bits of floats that are not negative are ordered as the floats.
        let unevenness = ((padded - extent) as f64 / extent as f64).to_bits();
        (is_uneven || by_others > 1, unevenness, by_others > 1, Reverse(extent), *d)
    };
    let dims = (0..shape.len()).filter(|d| shape[*d] > 1);
    dims.min_by_key(rank_dim).map_or(Placement::Invariant, Placement::Shard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_tensor::DType;

    /// The stored placements of `w` in a shape.
    fn stored(plan: &Plan, mesh: &str, shape: &[usize]) -> String {
        let mesh = Mesh::parse(mesh).unwrap();
        let mut used = vec![false; plan.num_rules()];
        let placements = plan.placements(RuleTarget::Store, "w", Some(shape), &mesh, &mut used);
        placements.iter().map(|(a, s)| format!("{}{s}", mesh.name(*a))).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_largest_dim_that_divides_is_sharded() {
        let plan = Plan::fsdp("fsdp");
        for (shape, expected) in [
            (&[6, 8, 4][..], "fsdp@1"),
            (&[8, 8], "fsdp@0"),
            (&[9, 4], "fsdp@1"),
            (&[9, 7], "fsdp@0"),
            (&[7, 9, 11], "fsdp@2"),
            (&[3], "fsdp@0"),
            (&[1, 5], "fsdp@1"),
            (&[1, 1], "fsdp="),
            (&[], "fsdp="),
            (&[0, 4], "fsdp@1"),
        ] {
            assert_eq!(stored(&plan, "fsdp=2", shape), expected, "{shape:?}");
        }
        // 9 entries over 4 ranks waste a third, 7 a seventh.
        assert_eq!(stored(&plan, "fsdp=4", &[9, 7]), "fsdp@1");
        assert_eq!(stored(&plan, "fsdp=1", &[8]), "");
    }

    #[test]
    fn dims_of_other_axes_are_sharded_last() {
        let plan = Plan::fsdp("fsdp").store("w", "tp@0");
        assert_eq!(stored(&plan, "fsdp=2,tp=2", &[64, 4]), "tp@0 fsdp@1");
        assert_eq!(
            stored(&plan, "fsdp=2,tp=2", &[64]),
            "tp@0 fsdp@0",
            "innermost, whatever the order of the rules"
        );
        assert_eq!(stored(&plan, "fsdp=2,tp=2", &[64, 3]), "tp@0 fsdp@0", "even instead of uneven");
        assert_eq!(stored(&plan, "fsdp=2,tp=3", &[5, 7]), "tp@0 fsdp@1", "less uneven");
        let two = Plan::zero(1, "dp").and(Plan::fsdp("fsdp"));
        assert_eq!(stored(&two, "dp=2,fsdp=2", &[8, 6]), "dp@0 fsdp@1");
    }

    #[test]
    fn blocks_and_layers_are_groups_unless_stated() {
        let of = |plan: &Plan, name: &'static str| plan.gather_group_of(name).to_string();
        let plan = Plan::fsdp("fsdp");
        for (name, group) in [
            ("wte.weight", "wte"),
            ("h.0.ln_1.weight", "h.0"),
            ("h.10.attn.c_attn.weight", "h.10"),
            ("model.layers.3.mlp.experts.gate_proj", "model.layers.3"),
            ("model.norm.weight", "model.norm"),
            ("scale", "scale"),
        ] {
            assert_eq!(of(&plan, name), group);
        }
        let stated = plan.gather_group("h.*").gather_group("h.*.attn");
        assert_eq!(of(&stated, "h.1.attn.c_attn.weight"), "h.1.attn");
        assert_eq!(of(&stated, "h.1.mlp.c_fc.weight"), "h.1");
        assert_eq!(of(&stated, "wte.weight"), "wte");
        assert!(stated.to_string().starts_with("batch fsdp@0\nzero 3 fsdp\ngather_group h.*\n"), "{stated}");
    }

    #[test]
    fn gather_groups_name_modules() {
        let names = ["wte.weight", "h.0.attn.c_attn.weight"];
        let refused = |pattern: &str| {
            let plan = Plan::fsdp("fsdp").gather_group("h.*").gather_group(pattern);
            plan.check_gather_groups_matched(&names).map_err(|error| error.to_string())
        };
        assert!(refused("attn.c_attn").is_ok());
        for (pattern, near) in [("h.*.atn", "h.0.attn"), ("wte.weight", "wte")] {
            let text = refused(pattern).unwrap_err();
            assert!(
                text.contains(&format!("`gather_group {pattern}` of the plan matches no module")),
                "{text}"
            );
            assert!(text.contains(near), "{text}");
        }
    }

    #[test]
    fn the_stage_decides_what_is_kept() {
        let mesh = Mesh::parse("dp=2,fsdp=2,tp=2").unwrap();
        let layout = |axis: &str| {
            let layout = Layout::invariant(&mesh, DType::F32, &[8]);
            mesh.axis(axis).map_or(layout.clone(), |axis| layout.with_placement(axis, Placement::Shard(0)))
        };
        let policy = |plan: Plan, stored| plan.gather_policy(&layout(stored), &layout(""), 5);
        let kept = GatherPolicy { lifetime: GatheredLifetime::Step, reduces_each_round: false };
        let freed = GatherPolicy { lifetime: GatheredLifetime::Group(5), reduces_each_round: true };
        assert_eq!(policy(Plan::zero(1, "dp"), "dp"), kept);
        assert_eq!(policy(Plan::zero(2, "dp"), "dp"), GatherPolicy { reduces_each_round: true, ..kept });
        assert_eq!(policy(Plan::zero(3, "dp"), "dp"), freed);
        assert_eq!(policy(Plan::zero(1, "dp").and(Plan::fsdp("fsdp")), "fsdp"), freed);
        for other in ["tp", "fsdp", ""] {
            assert_eq!(policy(Plan::zero(3, "dp"), other), GatherPolicy::default(), "not gathered over dp");
        }
        let sharded = layout("dp");
        assert_eq!(Plan::zero(3, "dp").gather_policy(&sharded, &sharded, 0), GatherPolicy::default());
        assert_eq!(
            policy(Plan::zero(3, "dp").and(Plan::zero(1, "dp")), "dp"),
            kept,
            "the later stage counts"
        );
        let both = Plan::zero(1, "dp").and(Plan::fsdp("fsdp"));
        let error = both.check_one_zero_axis(&mesh).unwrap_err();
        assert_eq!(
            (error.kind(), error.message()),
            (Kind::Config, "two axes of the mesh have a stage of ZeRO: `zero 1 dp` and `zero 3 fsdp`")
        );
        assert!(both.check_one_zero_axis(&Mesh::parse("dp=2,fsdp=1,tp=2").unwrap()).is_ok());
        assert_eq!(both.zero_on(&Mesh::parse("dp=2,fsdp=1").unwrap()), Some((1, "dp")));
        assert_eq!(both.zero_on(&Mesh::parse("tp=2").unwrap()), None);
        let error = Plan::zero(4, "dp").check().unwrap_err().to_string();
        assert!(error.contains("zero 4 dp: the stages of ZeRO are 1, 2 and 3"), "{error}");
    }
}
