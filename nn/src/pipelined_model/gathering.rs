//! How a pipeline rank gathers the parameters that it stores as shards: once per step, or in each pass of a microbatch.

use crate::module::Module;
use crate::module::param::Param;
use crate::sharded_model::Model;
use shardgrad_autograd::GatheredLifetime;
use shardgrad_autograd::pipeline::Stages;
use shardgrad_tensor::Layout;
use std::collections::BTreeSet;

/// Returns the stages with the gather and reduce policies of the model's parameters. The stages of pipeline rank `own_rank` are
/// gathered once per step and kept, unless their gathered forms take more than the bytes that the plan states. The decision depends
/// on layouts alone, so that all ranks that gather together make the same one.
pub(crate) fn with_gather_policies<M: Module>(
    stages: Stages,
    model: &Model<M>,
    stage_ranks: &[usize],
    own_rank: usize,
) -> Stages {
    let reduced = model.params().iter().filter(|p| p.gather_policy().reduces_each_round).map(Param::key);
    let own = (0..stage_ranks.len()).filter(|stage| stage_ranks[*stage] == own_rank);
    let own: BTreeSet<u64> = own.flat_map(|stage| stages.keys(stage)).collect();
    let group = |param: &Param| match param.gather_policy().lifetime {
        GatheredLifetime::Group(group) if own.contains(&param.key()) => Some((param.key(), group)),
        _ => None,
    };
    let grouped = || model.params().iter().filter_map(|param| Some((param, group(param)?)));
    let bytes: usize = grouped().map(|(param, _)| gathered_bytes(param)).sum();
    let is_kept = model.gathered_bytes_max().is_none_or(|max| bytes <= max);
    let gathered = grouped().map(|(_, group)| group).filter(|_| !is_kept).collect::<Vec<_>>();
    stages.reducing_each_pass(reduced).gathering_each_pass(gathered)
}

/// Returns the bytes of the gathered form of a parameter on the last rank, which are the most of all ranks.
fn gathered_bytes(param: &Param) -> usize {
    let bytes = |layout: Layout| {
        let mesh = layout.mesh();
        let last: Vec<usize> = mesh.axes().map(|axis| mesh.size(axis) - 1).collect();
        layout.local_shape(&last).iter().product::<usize>() * layout.dtype().size()
    };
    param.compute_layout().map_or(0, bytes)
}
