//! Consistency checks across ranks: different weights, data, options or shapes, which no collective notices, are detected before they do harm.

use shardgrad::nn::checkpoint::RunState;
use shardgrad::nn::trainer::{Trainer, TrainerConfig};
use shardgrad::nn::{Init, Linear};
use shardgrad::prelude::*;

/// How the last rank differs from the others.
#[derive(Clone, Copy, PartialEq)]
enum Difference {
    Nothing,
    Rate,
    Seed,
    Step,
    Weight,
    Data,
    Arguments,
}

/// Creates a trainer on each rank, the last of which differs, and runs the consistency check.
fn check_consistency(mesh: &str, difference: Difference) -> Result<()> {
    let ended = World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let difference =
            if rank.index() + 1 == rank.mesh().num_ranks() { difference } else { Difference::Nothing };
        let plan = Plan::copies("tp").and(Plan::data_parallel("dp"));
        let read = |rank: &Rank, _: u64, rows: std::ops::Range<usize>| {
            let mut data = vec![0.5f32; rows.len() * 3];
            if difference == Difference::Data {
                data.fill(0.25);
            }
            let layout = plan.batch_layout(rank.mesh(), DType::F32, &[rows.len(), 3])?;
            let x = Tensor::from_global(rank, &layout, &data)?;
            Ok(vec![x; if difference == Difference::Arguments { 2 } else { 1 }])
        };
        let loss = |model: &Linear, x: &[Var]| model.forward(&x[0]).square().mean();
        let settings =
            TrainerConfig { seed: u64::from(difference == Difference::Seed), ..TrainerConfig::new(4) };
        let optim = AdamW::new(if difference == Difference::Rate { 0.2 } else { 0.1 });
        let model = Linear::new(3, 4).init(Init::Zeros);
        let mut trainer = Trainer::new(rank, model, &plan, optim, settings, read, loss)?;
        if difference == Difference::Step {
            trainer.set_state(&RunState { step: 3, ..trainer.state() });
        }
        if difference == Difference::Weight {
            let bias = trainer.model().bias.as_ref().expect("a linear layer has a bias by default");
            bias.set_tensor(Tensor::from_local(rank, &bias.layout(), &[0f32, 0.0, -0.0, 0.0])?)?;
        }
        trainer.check_consistent()
    });
    ended.map(drop)
}

#[test]
fn each_difference_between_ranks_is_named() {
    for mesh in ["tp=2", "dp=2,tp=2", "dp=3"] {
        check_consistency(mesh, Difference::Nothing).unwrap();
        for (difference, part) in [
            (Difference::Rate, "`optimizer`"),
            (Difference::Seed, "`settings`"),
            (Difference::Step, "`step`"),
            (Difference::Arguments, "`arguments of the loss`"),
            (Difference::Weight, "`bias` first"),
        ] {
            let error = check_consistency(mesh, difference).unwrap_err();
            assert_eq!(error.kind(), Kind::Diverged, "{mesh}: {error}");
            assert!(error.to_string().contains(part), "{mesh}: {error}");
        }
    }
    for mesh in ["tp=2", "dp=2,tp=2"] {
        let error = check_consistency(mesh, Difference::Data).unwrap_err();
        assert!(error.to_string().contains("`argument 0 of the loss` first"), "{error}");
    }
}

/// Computes a scalar from a batch whose shape each rank states itself.
fn of_batch(
    mesh: &str,
    shape: impl Fn(usize) -> [usize; 2] + Sync,
    f: impl Fn(&Var) -> Var + Sync,
) -> Result<Vec<f64>> {
    World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let shape = shape(rank.index());
        let data: Vec<f32> = (0..shape[0] * shape[1]).map(|i| i as f32).collect();
        let layout = Plan::data_parallel("dp").batch_layout(rank.mesh(), DType::F32, &shape)?;
        let batch = Tensor::from_global(rank, &layout, &data)?;
        f(&Tape::inference(rank).constant(batch)).item()
    })
}

#[test]
fn different_batch_shapes_are_detected_behind_a_scalar_loss() {
    let mean = |x: &Var| x.square().mean();
    // More rows, and longer rows.
    for (other, text) in [([6, 4], "f32[6@dp, 4]"), ([4, 7], "f32[4@dp, 7]")] {
        for mesh in ["dp=2", "dp=2,tp=2"] {
            let error = of_batch(mesh, |r| if r == 1 { other } else { [4, 4] }, mean).unwrap_err();
            let error_text = error.to_string();
            assert_eq!(error.kind(), Kind::Collective, "{error_text}");
            for part in ["global shapes", "f32[4@dp, 4] at tests/consistency.rs", text, "same global shape"] {
                assert!(error_text.contains(part), "no `{part}` in: {error_text}");
            }
        }
    }
    let alike = of_batch("dp=2", |_| [4, 4], mean).unwrap();
    assert_eq!(alike, of_batch("dp=1", |_| [4, 4], mean).unwrap().repeat(2));
}

#[test]
fn differing_batch_is_named_despite_later_equal_tensors() {
    let mask = |x: &Var| {
        let mask = Tensor::from_host(x.rank(), &[4, 1], &[1.0f32; 4]).unwrap();
        assert_eq!(mask.to_f64().unwrap().len(), 4);
        x.square().mean()
    };
    let error = of_batch("dp=2", |r| if r == 1 { [6, 4] } else { [4, 4] }, mask).unwrap_err();
    let error_text = error.to_string();
    for part in
        ["rank 0: f32[4@dp, 4] at tests/consistency.rs", "rank 1: f32[6@dp, 4] at tests/consistency.rs"]
    {
        assert!(error_text.contains(part), "no `{part}` in: {error_text}");
    }
}

#[test]
fn shapes_stated_by_an_op_are_compared() {
    let cut = |x: &Var| {
        let other = if x.rank().index() == 1 { 2 } else { 3 };
        x.slice(1, 0..other).sum()
    };
    let error = of_batch("dp=2", |_| [4, 4], cut).unwrap_err();
    assert!(error.kind() == Kind::Collective && error.to_string().contains("global shapes"), "{error}");
}

#[test]
fn local_work_of_one_rank_is_not_compared() {
    let plain = of_batch("dp=2", |_| [4, 4], |x| x.square().mean()).unwrap();
    let noted = of_batch(
        "dp=2",
        |_| [4, 4],
        |x| {
            let is_first = x.rank().index() == 0;
            if is_first {
                // Local computation on one rank, with a shape that the others never create.
                let seen = x.tensor().slice(1, 1..3).square().to_local_f64().unwrap();
                assert_eq!(seen, [1.0, 4.0, 25.0, 36.0]);
            }
            // Values of one rank may differ as long as shapes are equal.
            let x = if is_first { x.neg() } else { x.clone() };
            x.square().mean()
        },
    );
    assert_eq!(noted.unwrap(), plain);
}

#[test]
fn gradients_of_different_batch_shapes_are_not_reduced() {
    let ended = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        let plan = Plan::data_parallel("dp");
        let rows = if rank.index() == 0 { 4 } else { 6 };
        let layout = plan.batch_layout(rank.mesh(), DType::F32, &[rows, 3])?;
        let model = Model::new(rank, Linear::new(3, 2), &plan, 1)?;
        let tape = model.tape();
        let x = tape.constant(Tensor::from_global(rank, &layout, &vec![0.5f32; rows * 3])?);
        model.forward(&x).square().mean().backward()?;
        Ok(tape.gradients().len())
    });
    let error_text = ended.unwrap_err().to_string();
    for part in ["backward", "f32[4@dp, 3]", "f32[6@dp, 3]"] {
        assert!(error_text.contains(part), "no `{part}` in: {error_text}");
    }
}

#[test]
fn different_numbers_of_microbatches_are_a_collective_mismatch() {
    let ended = |rounds: [usize; 2]| {
        World::run(Mesh::parse("dp=2").unwrap(), |rank| {
            let plan = Plan::data_parallel("dp");
            let layout = plan.batch_layout(rank.mesh(), DType::F32, &[4, 3])?;
            let model = Model::new(rank, Linear::new(3, 2), &plan, 1)?;
            let tape = model.tape();
            for _ in 0..rounds[rank.index()] {
                let x = tape.constant(Tensor::from_global(rank, &layout, &[0.5f32; 12])?);
                model.forward(&x).square().mean().backward()?;
            }
            Ok(tape.gradients().len())
        })
    };
    assert_eq!(ended([3, 3]).unwrap(), [2, 2]);
    let error_text = ended([2, 3]).unwrap_err().to_string();
    assert!(error_text.contains("collective mismatch"), "{error_text}");
}

#[test]
fn collectives_inside_an_op_are_compared() {
    // Classes are sharded; both ranks have equally many rows, in batches of different shapes.
    let ended = |shapes: [[usize; 3]; 2]| {
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let shape = shapes[rank.index()];
            let tp = rank.mesh().axis("tp").expect("the mesh has it");
            let layout =
                Layout::invariant(rank.mesh(), DType::F32, &shape).with_placement(tp, Placement::Shard(2));
            let x = Tensor::from_global(rank, &layout, &vec![0.5f32; shape.iter().product()])?;
            x.log_sum_exp(&[2]).to_local_f64()
        })
    };
    assert!(ended([[2, 8, 4]; 2]).is_ok());
    let error_text = ended([[2, 8, 4], [4, 4, 4]]).unwrap_err().to_string();
    assert!(error_text.contains("global shapes"), "{error_text}");
}
