//! The issue order of a trainer's collectives: proved before its first step, refused where ranks swap calls of two groups.

use crate::support::{ROWS, config, run, tokens_and_targets};
use crate::traces::traced;
use shardgrad_autograd::Var;
use shardgrad_nn::{LanguageModel, Linear, Param, Plan, Sgd, Trainer, TrainerConfig};
use shardgrad_tensor::{
    DType, Error, Kind, Layout, Mesh, Rank, Record, Resharding, Result, Tensor, Value, World,
};
use std::ops::Range;

/// The path of the calls that compare the order.
const PROOF: &str = "issue order";

/// A sum over the ranks of one axis, in the forward pass.
fn sum_over(x: &Var, axis: &str) -> Var {
    let rank = x.rank();
    let partial = Layout::parse(&format!("f32[2] +{axis}"), rank.mesh()).unwrap_or_else(|e| e.raise());
    let terms = x.constant(Tensor::zeros(rank, &partial).unwrap_or_else(|e| e.raise()));
    terms.to_layout(&Layout::invariant(rank.mesh(), DType::F32, &[2]))
}

/// A trainer whose loss sums over the axes `a` and `b` of a square of ranks, over `b` first on the ranks `swapped`.
fn trainer<'t>(rank: &Rank, swapped: &'t [usize], proves_issue_order: bool) -> Result<Trainer<'t, Linear>> {
    let plan = Plan::data_parallel("a").and(Plan::data_parallel("b"));
    let layout = |rank: &Rank, rows: usize| Layout::parse(&format!("f32[{rows}@a@b, 3]"), rank.mesh());
    let read = move |rank: &Rank, _: u64, rows: Range<usize>| {
        Ok(vec![Tensor::full(rank, &layout(rank, rows.len())?, 1.0)?])
    };
    let loss = move |model: &Linear, x: &[Var]| {
        let is_swapped = swapped.contains(&x[0].rank().index());
        let axes = if is_swapped { ["b", "a"] } else { ["a", "b"] };
        axes.iter().for_each(|axis| drop(sum_over(&x[0], axis)));
        model.forward(&x[0]).square().mean()
    };
    let config = TrainerConfig { proves_issue_order, ..TrainerConfig::new(4) };
    Trainer::new(rank, Linear::new(3, 2), &plan, Sgd::new(0.1), config, read, loss)
}

fn num_proofs(records: &[Record]) -> usize {
    records.iter().filter(|record| record.path == PROOF).count()
}

#[test]
fn swapped_calls_of_two_groups_are_refused_before_the_first_step() {
    // Each rank waits for the next one around the square.
    let refused = run("a=2,b=2", |rank| {
        let mut trainer = trainer(rank, &[0, 3], true)?;
        let before = trainer.model().param("weight")?.tensor().to_f64()?;
        rank.trace().enable();
        rank.trace().take();
        let error = trainer.step().unwrap_err();
        let records = rank.trace().take();
        assert!(records.iter().all(|record| record.path == PROOF), "{records:?}");
        assert_eq!(trainer.state().step, 0);
        assert_eq!(trainer.model().param("weight")?.tensor().to_f64()?, before);
        Ok(error)
    });
    for (rank, error) in refused.into_iter().enumerate() {
        let shown = error.to_string();
        assert_eq!(error.kind(), Kind::Collective, "{shown}");
        for part in [
            "the collectives of mesh(a=2, b=2) have no common issue order",
            "rank 0 issues #1 all_reduce(sum) f32[2] over b at ",
            " before #1 all_reduce(sum) f32[2] over a at ",
            "rank 1 issues #1 all_reduce(sum) f32[2] over a at ",
            "issue_order.rs:",
            "issue the calls of these groups in one order on all ranks that share them",
        ] {
            assert!(shown.contains(part), "rank {rank}: no `{part}` in:\n{shown}");
        }
    }
}

/// The error of a world whose ranks train without proof.
fn unproved() -> Error {
    let world =
        World::run(Mesh::parse("a=2,b=2").unwrap(), |rank| trainer(rank, &[0, 3], false)?.step().map(drop));
    world.unwrap_err()
}

#[test]
fn without_proof_the_ranks_wait_for_each_other_in_the_first_step() {
    let shown = unproved().to_string();
    assert!(!shown.contains("no common issue order") && shown.contains("deadlock"), "{shown}");
}

#[test]
fn the_order_is_proved_once_and_again_when_other_parameters_are_frozen() {
    let proofs = run("a=2,b=2", |rank| {
        let mut trainer = trainer(rank, &[], true)?;
        let mut steps = Vec::new();
        for step in 0..4 {
            if step == 2 {
                trainer.model().param("bias")?.set_frozen(true);
            }
            steps.push(num_proofs(&traced(rank, || trainer.step().map(drop))?));
        }
        Ok(steps)
    });
    // Ranks with equal traces exchange their hashes alone.
    assert_eq!(proofs, vec![[1, 0, 1, 0]; 4]);
}

#[test]
fn meshes_with_one_group_of_ranks_are_not_compared() {
    let proofs = run("a=2", |rank| {
        let plan = Plan::data_parallel("a");
        let read = |rank: &Rank, _: u64, rows: Range<usize>| {
            let layout = Layout::parse(&format!("f32[{}@a, 3]", rows.len()), rank.mesh())?;
            Ok(vec![Tensor::full(rank, &layout, 1.0)?])
        };
        let loss = |model: &Linear, x: &[Var]| model.forward(&x[0]).square().mean();
        let config = TrainerConfig::new(4);
        let mut trainer = Trainer::new(rank, Linear::new(3, 2), &plan, Sgd::new(0.1), config, read, loss)?;
        Ok(num_proofs(&traced(rank, || trainer.step().map(drop))?))
    });
    assert_eq!(proofs, [0, 0]);
}

#[test]
fn a_loss_that_reads_values_trains_without_proof() {
    let losses = run("a=2,b=2", |rank| {
        let plan = Plan::data_parallel("a").and(Plan::data_parallel("b"));
        let read = |rank: &Rank, _: u64, rows: Range<usize>| {
            let layout = Layout::parse(&format!("f32[{}@a@b, 3]", rows.len()), rank.mesh())?;
            Ok(vec![Tensor::full(rank, &layout, 1.0)?])
        };
        let loss = |model: &Linear, x: &[Var]| {
            let loss = model.forward(&x[0]).square().mean();
            loss.item().unwrap_or_else(|e| e.raise());
            loss
        };
        let config = TrainerConfig::new(4);
        let mut trainer = Trainer::new(rank, Linear::new(3, 2), &plan, Sgd::new(0.1), config, read, loss)?;
        let first = traced(rank, || trainer.step().map(drop))?;
        Ok((num_proofs(&first), trainer.step()?.loss))
    });
    assert!(losses.iter().all(|(proofs, loss)| *proofs == 1 && loss.is_finite()), "{losses:?}");
}

/// Losses of three steps, and the parameters after them.
fn trained(mesh: &str, plan: &Plan, microbatches: usize, proves_issue_order: bool) -> Vec<Vec<f64>> {
    let config = config();
    let of_rank = run(mesh, |rank| {
        let read = |rank: &Rank, _: u64, rows: Range<usize>| tokens_and_targets(rank, plan, rows, 0);
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
        let settings = TrainerConfig { microbatches, proves_issue_order, ..TrainerConfig::new(ROWS) };
        let module = LanguageModel::new(&config.clone().into());
        let mut trainer = Trainer::new(rank, module, plan, Sgd::new(0.1), settings, read, loss)?;
        let mut values: Vec<f64> = (0..3).map(|_| Ok(trainer.step()?.loss)).collect::<Result<_>>()?;
        let local = |param: &&Param| param.is_local();
        for param in trainer.model().params().iter().filter(local) {
            values.extend(param.tensor().to_local_f64()?);
        }
        Ok(values)
    });
    assert!(of_rank.iter().flatten().all(|value| value.is_finite()), "{mesh}");
    of_rank
}

#[test]
fn the_proof_changes_no_bits() {
    let gpt2 = |plan: Plan| LanguageModel::plan(&config().into()).and(plan);
    let ring = Plan::context_parallel("cp").ring();
    let schedule = |name: &str| Plan::pipeline_parallel("pp").pipeline_schedule(name);
    for (mesh, plan) in [
        ("dp=2,tp=2", gpt2(Plan::sequence_parallel("tp"))),
        ("dp=2,tp=2", gpt2(Plan::zero(2, "dp"))),
        ("fsdp=2,tp=2", gpt2(Plan::new())),
        ("dp=2,cp=2", gpt2(ring)),
        ("pp=2", gpt2(schedule("1f1b"))),
        ("pp=2,fsdp=2", gpt2(schedule("zb-h1")).gathered_bytes_max(0)),
    ] {
        let [proved, unproved] = [true, false].map(|proves| trained(mesh, &plan, 2, proves));
        assert!(proved == unproved, "{mesh}: other bits\n{plan}");
    }
}
