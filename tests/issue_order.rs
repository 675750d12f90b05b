//! The order in which ranks issue collectives and messages in training steps: one order over all groups, as operations of several
//! communicators need that run in the order of their issue.

use crate::training_run::Run;
use shardgrad::dist::{Record, check_issue_order};
use shardgrad::nn::{ExpertsConfig, LlamaConfig, LlamaKind};
use shardgrad::prelude::*;

/// The collectives and messages of two steps of each rank: the first one also compares copies.
fn traces(run: &Run, mesh: &Mesh) -> Vec<Vec<Record>> {
    let trace = |rank: usize| {
        World::new(mesh.clone()).dry_run(rank, |rank| {
            let mut trainer = run.trainer(rank)?;
            (0..2).try_for_each(|_| trainer.step().map(drop))?;
            Ok(rank.trace().take())
        })
    };
    (0..mesh.num_ranks()).map(|rank| trace(rank).unwrap()).collect()
}

#[test]
fn ranks_of_every_style_issue_their_calls_in_one_order() {
    let plain = Plan::gpt2;
    let pipeline = |schedule: &str| Plan::gpt2().pipeline_schedule(schedule);
    let mixtral = LlamaConfig {
        experts: Some(ExpertsConfig::new(4, 2, 9)),
        ..LlamaConfig::new(LlamaKind::Mixtral, 19, 8, [16, 20], 2, [4, 2])
    };
    let experts = |mesh, plan| (mesh, Run { config: mixtral.clone().into(), plan, ..Run::new(2) });
    let dense = [
        ("dp=2,tp=2", plain()),
        ("dp=3,tp=2,cp=2", plain()),
        ("fsdp=2", plain()),
        ("dp=2,fsdp=3,tp=2", plain()),
        ("cp=3", Plan::gpt2().and(Plan::context_parallel("cp").ring())),
        ("pp=2,dp=2,tp=2", pipeline("1f1b")),
        ("pp=2,fsdp=2", pipeline("gpipe")),
        ("dp=2,pp=3", pipeline("interleaved")),
        ("pp=2,dp=2", pipeline("zb-v")),
        ("tp=2,pp=4", pipeline("zb-h2")),
        ("dp=2,tp=2", plain().and(Plan::zero(2, "dp"))),
        ("pp=2,dp=2", plain().and(Plan::zero(3, "dp")).gathered_bytes_max(0)),
        ("dp=2,tp=2", plain().and(Plan::sequence_parallel("tp"))),
        ("cp=2,tp=2", plain().exchange()),
        ("pp=2,cp=2", plain().ring()),
    ];
    let dense = dense.map(|(mesh, plan)| (mesh, Run { plan, ..Run::new(2) }));
    let with_experts = [
        experts("dp=2,ep=2", Plan::llama_moe().gather_experts()),
        experts("ep=3", Plan::llama_moe().exchange_experts()),
    ];
    for (mesh, run) in dense.into_iter().chain(with_experts) {
        let (mesh, run) = (Mesh::parse(mesh).unwrap(), Run { microbatches: 3, ..run });
        let traces = traces(&run, &mesh);
        assert!(traces.iter().all(|trace| trace.len() > 10), "{mesh}");
        check_issue_order(&mesh, &traces).unwrap_or_else(|error| panic!("{mesh}: {error}"));
        // The same calls in another order on one rank.
        let last = traces.last().expect("a mesh has a rank");
        let is_collective = |record: &Record| record.peer.is_none() && mesh.group_size(record.axes) > 1;
        let differs = |pair: &[Record]| {
            pair.iter().all(is_collective) && (pair[0].axes, pair[0].seq) != (pair[1].axes, pair[1].seq)
        };
        let at: Vec<usize> = (1..last.len()).filter(|at| differs(&last[at - 1..=*at])).collect();
        let is_found = |at: usize| {
            let mut swapped = traces.clone();
            swapped.last_mut().expect("a mesh has a rank").swap(at - 1, at);
            check_issue_order(&mesh, &swapped).is_err()
        };
        assert!(at.into_iter().any(is_found), "{mesh}: swapped calls are not found");
    }
}
