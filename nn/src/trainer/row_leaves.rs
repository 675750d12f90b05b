//! Row leaves: the parts of a batch whose sums have one order on every mesh and for every number of microbatches.
//!
//! The rows of the global batch are cut into R leaves, and each leaf is a pass of its own, forward and backward, on a mesh without
//! the axis that shards rows: its program and its shapes know neither the number of ranks nor that of microbatches. Losses, counts
//! and gradients of the leaves are joined in one tree over the leaf index ([record 30](../../../docs/adr/0030-canonical-sums.md)): first
//! those of this rank, as they come, then those of all ranks.

use crate::checkpoint::CanonicalSums;
use crate::loss::StepLosses;
use crate::module::Module;
use crate::module::param::{Param, key_of_param};
use crate::pipelined_model::param_of;
use crate::plan::Plan;
use crate::sharded_model::Model;
use shardgrad_autograd::{Gradients, Key};
use shardgrad_tensor::execution::flag_guard::FlagGuard;
use shardgrad_tensor::training_step::canonical_sum::{
    SumTree, TreeSums, check_device, complete_partial_sums, sum_root_numbers, sum_roots,
};
use shardgrad_tensor::training_step::grad_norm::check_norm_leaves;
use shardgrad_tensor::{Axis, AxisSet, Context, Error, Kind, Mesh, Phase, Rank, Result, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::Location;

/// Which changes of a run leave its bits as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Deterministic {
    /// A repetition or a resumption on the same mesh with the same number of microbatches, any number of threads, any transport of the
    /// CPU.
    #[default]
    Run,
    /// Also another number of data-parallel, tensor-parallel and context-parallel ranks and of microbatches, pipelines of any schedule,
    /// sequence parallelism, and sharded storage (ZeRO, FSDP): losses, gradient norms and weights have the same bits.
    ///
    /// The rows of the batch are cut into leaves, equally many for each rank, and each leaf is a pass of its own, a microbatch on a
    /// pipeline. Sums over rows are joined in a tree over the leaves, and so are the sums over leaves of every other label that a mesh
    /// may shard. Supported on the CPU for axes that shard rows, pipelines, tensor parallelism and context parallelism without a ring;
    /// other meshes and plans are refused ([`Deterministic::row_ranges`]). A loss must not depend on rows of other leaves: it sees one leaf at a time, as it sees
    /// one microbatch otherwise.
    Mesh {
        /// The number of leaves: it divides the rows of the batch, and the ranks times the microbatches divide it. Not a function of
        /// the mesh; another number gives other bits.
        batch_leaves: usize,
        /// The number of leaves of every other summed label (tokens, width, heads, hidden units, vocabulary): a multiple of the ranks
        /// of an axis that shards them; a power of two for each rank costs the fewest bytes. Another number gives other bits.
        sum_leaves: usize,
    },
}

impl Deterministic {
    /// A usual number of leaves of summed labels: for 1, 2, 4 and 8 ranks.
    pub const SUM_LEAVES: usize = 8;

    /// Returns the rows of the global batch that each pass of this rank takes: those of each microbatch, which the ranks share as the
    /// plan states, or those of each leaf of this rank.
    ///
    /// # Errors
    /// For [`Deterministic::Mesh`] `Kind::Unsupported` for a mesh or a plan that sums over other axes than those of the rows, of a
    /// pipeline, of tensor parallelism and of tokens, for a ring, and for devices other than the CPU; `Kind::Config`, with a number that would do, if the number of leaves does not
    /// divide the rows, or is no multiple of ranks times microbatches.
    pub fn row_ranges(
        self,
        rank: &Rank,
        plan: &Plan,
        rows: usize,
        microbatches: usize,
    ) -> Result<Vec<Range<usize>>> {
        let each = rows / microbatches;
        let Deterministic::Mesh { batch_leaves, sum_leaves } = self else {
            return Ok((0..microbatches).map(|i| i * each..(i + 1) * each).collect());
        };
        let leaves = RowLeaves::of(rank, plan, [batch_leaves, sum_leaves], [rows, microbatches])?;
        Ok((0..leaves.num_passes()).map(|pass| leaves.rows(pass)).collect())
    }
}

/// The leaves of a rank.
#[derive(Clone, Debug)]
pub(super) struct RowLeaves {
    tree: SumTree,
    /// The tree of all other sums.
    sum_tree: SumTree,
    /// The axes of the world of several ranks that shard rows.
    axes: AxisSet,
    /// This rank's number among the ranks of those axes.
    own: usize,
    run: Range<usize>,
    rows: usize,
}

/// The sums of gradients, by use of a parameter.
pub(super) type GradientSums = BTreeMap<Key, TreeSums<Tensor>>;

impl RowLeaves {
    /// Returns the leaves of a rank of the world; `None` unless sums must not depend on the mesh.
    ///
    /// # Errors
    /// As [`Deterministic::row_ranges`].
    pub(super) fn new(
        deterministic: Deterministic,
        rank: &Rank,
        plan: &Plan,
        [rows, microbatches]: [usize; 2],
    ) -> Result<Option<RowLeaves>> {
        let Deterministic::Mesh { batch_leaves, sum_leaves } = deterministic else { return Ok(None) };
        RowLeaves::of(rank, plan, [batch_leaves, sum_leaves], [rows, microbatches]).map(Some)
    }

    fn of(
        rank: &Rank,
        plan: &Plan,
        [num_leaves, sum_leaves]: [usize; 2],
        [rows, microbatches]: [usize; 2],
    ) -> Result<RowLeaves> {
        let rank = rank.world();
        check_device(rank).map_err(with_help)?;
        let mesh = rank.mesh();
        let axes: AxisSet = plan.row_axes(mesh).collect();
        let pipeline = plan.pipeline_on(mesh).map(|(_, axis)| axis);
        if sum_leaves == 0 {
            return Err(Error::new(Kind::Config, "sums have 0 leaves").detail("help", "use 8 leaves"));
        }
        let is_other = |axis: &Axis| mesh.size(*axis) > 1 && !axes.contains(*axis) && Some(*axis) != pipeline;
        let others: Vec<Axis> = mesh.axes().filter(is_other).collect();
        if let Some(why) = others.iter().find_map(|other| no_canonical_form(plan, mesh, *other)) {
            return Err(with_help(Error::new(Kind::Unsupported, why)));
        }
        let others: Vec<_> = others.into_iter().map(|axis| (mesh.name(axis), mesh.size(axis))).collect();
        check_sum_leaves(SumTree::new(sum_leaves), &others)?;
        let is_sharding = |axis: &Axis| {
            let is_sliced_off = axes.contains(*axis) || Some(*axis) == pipeline;
            is_sliced_off && mesh.size(*axis) > 1 && plan.shards_activations_with(mesh.name(*axis))
        };
        if let Some(axis) = mesh.axes().find(is_sharding) {
            let name = mesh.name(axis);
            let why = format!("the plan shards activations over `{name}`, where sums have no canonical form");
            return Err(with_help(Error::new(Kind::Unsupported, why)));
        }
        let num_ranks = mesh.group_size(axes);
        check_num_leaves(num_leaves, rows, num_ranks * microbatches)?;
        let tree = SumTree::new(num_leaves);
        let own = axes.iter().fold(0, |own, axis| own * mesh.size(axis) + rank.coordinate(axis));
        let run = tree.run(own, num_ranks).expect("the ranks divide the leaves");
        let sum_tree = SumTree::new(sum_leaves);
        Ok(RowLeaves { tree, sum_tree, axes, own, run, rows })
    }

    /// The rank on the mesh of passes: a stage's mesh without the axes of rows.
    pub(super) fn pass_rank(&self, stage: &Rank) -> Rank {
        let world = stage.world().mesh();
        self.axes.iter().fold(stage.clone(), |rank, axis| {
            let axis = rank.mesh().axis(world.name(axis)).expect("a stage has the axes of rows");
            rank.slice(axis)
        })
    }

    /// The tree, and the first leaf of this rank.
    pub(super) fn tree(&self) -> (SumTree, usize) {
        (self.tree, self.run.start)
    }

    /// Refuses parameters whose shards cut the leaves of the gradient norm.
    pub(super) fn check_params(&self, params: &[Param]) -> Result<()> {
        params.iter().try_for_each(|param| {
            check_norm_leaves(&param.layout(), self.norm_leaves())
                .map_err(|e| e.detail("parameter", param.name()))
        })
    }

    /// What a checkpoint records.
    pub(super) fn canonical_sums(&self) -> CanonicalSums {
        let (batch_leaves, sum_leaves) = (self.num_leaves(), self.sum_tree.num_leaves());
        CanonicalSums { version: SumTree::VERSION, batch_leaves, sum_leaves }
    }

    /// Makes the sums of all ops of a rank canonical until the guard is dropped.
    pub(super) fn set_sum_tree<'a>(&self, rank: &'a Rank) -> FlagGuard<'a, Option<SumTree>> {
        Context::of(rank).set_sum_tree(Some(self.sum_tree))
    }

    /// The leaves of the step.
    pub(super) fn num_leaves(&self) -> usize {
        self.tree.num_leaves()
    }

    /// The leaves of each dim of a gradient in the gradient norm.
    pub(super) fn norm_leaves(&self) -> usize {
        self.sum_tree.num_leaves()
    }

    /// The leaves of this rank, one pass for each.
    pub(super) fn num_passes(&self) -> usize {
        self.run.len()
    }

    /// The rows of a pass of this rank.
    pub(super) fn rows(&self, pass: usize) -> Range<usize> {
        self.tree.leaf_range(self.rows, self.run.start + pass)
    }

    /// Whether this rank counts what all ranks of the axes have in common.
    pub(super) fn is_first_rank(&self) -> bool {
        self.own == 0
    }

    /// Adds the gradients of a pass to the sums.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub(super) fn add_gradients(
        &self,
        sums: &mut GradientSums,
        pass: usize,
        gradients: Gradients,
    ) -> Result<()> {
        let leaf = SumTree::leaf(self.run.start + pass);
        gradients.into_iter().try_for_each(|(key, gradient)| {
            let sums = sums.entry(key).or_insert_with(|| TreeSums::new(self.tree));
            sums.add(leaf, Some(gradient), |left, right| left.accumulate(&right))
        })
    }

    /// Returns the gradients of all leaves by use, in the stored layouts of the parameters. Every rank calls this together.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`; errors of the collective.
    pub(super) fn sum_gradients<M: Module>(
        &self,
        model: &Model<M>,
        sums: GradientSums,
        site: &'static Location<'static>,
    ) -> Result<Gradients> {
        let sum = |(key, sums): (Key, TreeSums<Tensor>)| {
            let mut roots: Vec<Tensor> = sums.into_roots().filter_map(|(_, sum)| sum).collect();
            let param = param_of(model, key);
            Context::of(model.rank()).set_path(&param.shared_name());
            let sum = match self.axes.is_empty() {
                true => roots.remove(0),
                false => sum_roots(self.axes, self.tree, &roots, Phase::Backward, site)?,
            };
            Ok((key, model.stored_gradient(param, &sum)))
        };
        sums.into_iter().map(sum).collect()
    }

    /// Returns the losses of a step with the sums over all leaves in place of the outputs of each pass. One rank of the axes has
    /// them, so that a sum over the world counts them once. Every rank calls this together.
    ///
    /// # Errors
    /// Errors of the device and of the collective.
    pub(super) fn sum_losses(
        &self,
        rank: &Rank,
        losses: StepLosses,
        site: &'static Location<'static>,
    ) -> Result<StepLosses> {
        let outputs = complete_outputs(&losses.outputs, site)?;
        let mut sums = TreeSums::new(self.tree);
        for (leaf, outputs) in self.run.clone().zip(&outputs) {
            // The null back end has no numbers.
            let numbers = |output: &Tensor| {
                let mut numbers = output.to_local_f64()?;
                numbers.resize(output.layout().numel(), 0.0);
                Ok(numbers)
            };
            let numbers = outputs.iter().flatten().map(numbers).collect::<Result<Vec<_>>>()?.concat();
            let join = |left: Vec<f64>, right: Vec<f64>| {
                Ok::<_, Error>(left.iter().zip(&right).map(|(left, right)| left + right).collect())
            };
            sums.add(SumTree::leaf(leaf), Some(numbers), join)?;
        }
        // The ranks of a pipeline stage have the same outputs of each pass; another stage may have others, or none.
        let of_leaf = outputs.first().map_or(&[][..], Vec::as_slice);
        let len: usize = of_leaf.iter().flatten().map(|output| output.layout().numel()).sum();
        let mut roots: Vec<Vec<f64>> = sums.into_roots().filter_map(|(_, sum)| sum).collect();
        let mut totals = match self.axes.is_empty() || len == 0 {
            true => roots.remove(0),
            false => sum_root_numbers(rank, self.axes, self.tree, &roots, site)?,
        };
        // A dry run has no numbers.
        totals.resize(len, 0.0);
        let mut rest = totals.as_slice();
        let sum = |output: &Option<Tensor>| {
            let Some(output) = output else { return Ok(None) };
            let shape = output.layout().shape();
            let (own, after) = rest.split_at(shape.iter().product());
            rest = after;
            self.is_first_rank().then(|| Tensor::from_host(rank, &shape, own)).transpose()
        };
        let totals = vec![of_leaf.iter().map(sum).collect::<Result<_>>()?];
        Ok(StepLosses { outputs: totals, ..losses })
    }
}

/// Returns why sums over an axis that shards neither rows nor stages have no canonical form, if they have none.
fn no_canonical_form(plan: &Plan, mesh: &Mesh, axis: Axis) -> Option<String> {
    let (name, size) = (mesh.name(axis), mesh.size(axis));
    if !plan.is_token_axis(name) {
        let is_canonical = plan.is_tensor_axis(name);
        return (!is_canonical)
            .then(|| format!("sums over the mesh axis {name}={size} have no canonical form"));
    }
    plan.has_ring(name).then(|| {
        format!(
            "ring attention over the mesh axis {name}={size} adds terms in an order that follows the ranks"
        )
    })
}

/// Refuses a number of leaves of sums that the ranks of one of the axes do not divide.
fn check_sum_leaves(tree: SumTree, axes: &[(&str, usize)]) -> Result<()> {
    let num_leaves = tree.num_leaves();
    let Some((name, num_ranks)) = axes.iter().find(|(_, size)| !num_leaves.is_multiple_of(*size)) else {
        return Ok(());
    };
    let text = format!(
        "the ranks of the mesh axis {name}={num_ranks} cannot share {num_leaves} leaves of sums equally"
    );
    let fits = |leaves: &usize| axes.iter().all(|(_, size)| leaves.is_multiple_of(*size));
    let cheap = axes.iter().map(|(_, size)| tree.num_leaves_for(*size)).filter(fits).min();
    let fitting = cheap.or_else(|| (num_leaves..).find(fits)).unwrap_or(num_leaves);
    let help = format!(
        "use {fitting} leaves (--sum-leaves); a run on other meshes has the same bits only with the same number"
    );
    Err(Error::new(Kind::Config, text).detail("help", help))
}

/// Returns the outputs of passes with partial sums completed: sums over tokens or other dims that ranks of a pass share.
///
/// # Errors
/// Errors of the collective.
pub(super) fn complete_outputs(
    outputs: &[Vec<Option<Tensor>>],
    site: &'static Location<'static>,
) -> Result<Vec<Vec<Option<Tensor>>>> {
    let present: Vec<&Tensor> = outputs.iter().flatten().flatten().collect();
    let mut completed = complete_partial_sums(&present, site)?.into_iter();
    let mut next = |output: &Option<Tensor>| output.as_ref().and_then(|_| completed.next());
    Ok(outputs.iter().map(|of_pass| of_pass.iter().map(&mut next).collect()).collect())
}

/// Returns the sum of the gradients of the uses of each parameter, in the order of the uses.
///
/// # Errors
/// `Kind::OutOfMemory`.
pub(super) fn sum_uses(uses: Gradients) -> Result<Gradients> {
    let mut sums = Gradients::new();
    for (key, gradient) in uses {
        let param = key_of_param(key);
        let sum = match sums.remove(&param) {
            Some(sum) => Tensor::accumulate(sum, &gradient)?,
            None => gradient,
        };
        sums.insert(param, sum);
    }
    Ok(sums)
}

/// Refuses a number of leaves that does not divide the rows, or that passes do not divide.
fn check_num_leaves(num_leaves: usize, rows: usize, shares: usize) -> Result<()> {
    let fits = |leaves: usize| leaves > 0 && rows.is_multiple_of(leaves) && leaves.is_multiple_of(shares);
    if fits(num_leaves) {
        return Ok(());
    }
    let text = format!(
        "a batch of {rows} rows cannot be cut into {num_leaves} leaves, the same number for each of {shares} shares (ranks times microbatches)"
    );
    let divisors = (1..=rows.isqrt()).filter(|d| rows.is_multiple_of(*d)).flat_map(|d| [d, rows / d]);
    let nearest = divisors.filter(|d| fits(*d)).min_by_key(|d| (d.abs_diff(num_leaves), *d));
    let help = match nearest {
        Some(leaves) => {
            format!("use {leaves} leaves; a run on other meshes has the same bits only with the same number")
        }
        None => format!("use a batch whose rows are a multiple of {shares}"),
    };
    Err(Error::new(Kind::Config, text).detail("help", help))
}

fn with_help(error: Error) -> Error {
    error.detail(
        "help",
        "bits that do not depend on the mesh are supported for axes that shard rows (dp, fsdp, ep), for pp, tp, cp without a ring and \
         microbatches, on the CPU: use such a mesh, or give up the promise (Deterministic::Run, --deterministic run)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_tensor::World;

    fn ranges(
        mesh: &str,
        plan: &Plan,
        leaves: usize,
        rows: usize,
        microbatches: usize,
    ) -> Result<Vec<Vec<Range<usize>>>> {
        World::run(Mesh::parse(mesh).unwrap(), |rank| {
            Deterministic::Mesh { batch_leaves: leaves, sum_leaves: 8 }.row_ranges(
                rank,
                plan,
                rows,
                microbatches,
            )
        })
    }

    #[test]
    fn ranks_take_consecutive_leaves() {
        let plan = Plan::data_parallel("dp");
        assert_eq!(ranges("", &plan, 4, 8, 2).unwrap(), [[0..2, 2..4, 4..6, 6..8]]);
        assert_eq!(ranges("dp=2", &plan, 4, 8, 1).unwrap(), [[0..2, 2..4], [4..6, 6..8]]);
        assert_eq!(ranges("dp=3", &plan, 6, 6, 1).unwrap(), [[0..1, 1..2], [2..3, 3..4], [4..5, 5..6]]);
        let hybrid = plan.clone().and(Plan::fsdp("fsdp")).and(Plan::pipeline_parallel("pp"));
        let of_rank = ranges("dp=2,pp=2,fsdp=2", &hybrid, 4, 4, 1).unwrap();
        assert_eq!(of_rank.concat(), [0..1, 1..2, 0..1, 1..2, 2..3, 3..4, 2..3, 3..4]);
        let run = World::run(Mesh::single(), |rank| Deterministic::Run.row_ranges(rank, &plan, 6, 3));
        assert_eq!(run.unwrap(), [[0..2, 2..4, 4..6]]);
    }

    #[test]
    fn refusals_name_what_has_no_canonical_form_and_a_number_that_would_do() {
        let refused = |mesh: &str, plan: Plan, leaves, rows, microbatches| {
            let error =
                ranges(mesh, &Plan::data_parallel("dp").and(plan), leaves, rows, microbatches).unwrap_err();
            (error.kind(), error.to_string())
        };
        for (mesh, plan, why) in [
            ("other=2", Plan::copies("copies"), "sums over the mesh axis other=2 have no canonical form"),
            (
                "dp=2,cp=2",
                Plan::context_parallel("cp").ring(),
                "ring attention over the mesh axis cp=2 adds terms in an order that follows the ranks",
            ),
            ("dp=2", Plan::new().point("out", "dp@1"), "shards activations over `dp`"),
            (
                "dp=2,ep=2",
                Plan::expert_parallel("ep").exchange_experts(),
                "shards activations over `ep`, where sums have no canonical form",
            ),
        ] {
            let (kind, text) = refused(mesh, plan, 4, 8, 1);
            assert!(
                kind == Kind::Unsupported && text.contains(why) && text.contains("--deterministic run"),
                "{text}"
            );
        }
        let tensor = || Plan::tensor_parallel("tp").column_parallel("up");
        let (kind, text) = refused("tp=3", tensor(), 1, 8, 1);
        assert!(
            kind == Kind::Config
                && text.contains("tp=3 cannot share 8 leaves")
                && text.contains("use 12 leaves"),
            "{text}"
        );
        let both = tensor().and(Plan::context_parallel("cp"));
        for (mesh, help) in [("tp=3,cp=4", "use 12 leaves"), ("tp=3,cp=8", "use 24 leaves")] {
            let text = refused(mesh, both.clone(), 1, 8, 1).1;
            assert!(text.contains("tp=3 cannot share 8 leaves") && text.contains(help), "{text}");
        }
        assert!(ranges("dp=2,tp=4", &Plan::data_parallel("dp").and(tensor()), 4, 8, 1).is_ok());
        let context = || Plan::data_parallel("dp").and(Plan::context_parallel("cp"));
        for plan in [context(), context().exchange()] {
            assert!(ranges("dp=2,cp=4", &plan, 4, 8, 1).is_ok());
        }
        assert!(refused("cp=3", context(), 1, 8, 1).1.contains("cp=3 cannot share 8 leaves"));
        let sequence = tensor().and(Plan::sequence_parallel("tp"));
        assert!(ranges("dp=2,cp=2,tp=2", &context().and(sequence), 4, 8, 1).is_ok());
        for (mesh, leaves, rows, microbatches, help) in [
            ("dp=3", 8, 24, 1, "use 6 leaves"),
            ("dp=2", 8, 12, 1, "use 6 leaves"),
            ("dp=2", 4, 8, 4, "use 8 leaves"),
            ("dp=2", 8, 9, 1, "use a batch whose rows are a multiple of 2"),
            ("", 0, 4, 1, "use 1 leaves"),
        ] {
            let (kind, text) = refused(mesh, Plan::new(), leaves, rows, microbatches);
            assert!(kind == Kind::Config && text.contains(help), "{text}");
        }
    }
}
