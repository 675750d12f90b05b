//! Sums over rounds and microbatches have the bits of the gradients of each, added up in their order.

use shardgrad_autograd::pipeline::{Feed, Runner, Schedule, Stages};
use shardgrad_autograd::{Draw, Gradients, Program, Tape, Var};
use shardgrad_dist::{Mesh, Rank, Result, World};
use shardgrad_tensor::{DType, Layout, Tensor, Value};

const WIDTH: usize = 12;
const ROWS: usize = 5;
const COUNT: usize = 4;
/// Of the weights: used once; twice; twice in a block; once in a block; by an op that takes it twice.
const KEYS: std::ops::Range<u64> = 0..5;

fn normal(rank: &Rank, rows: usize, stream: u64) -> Result<Tensor> {
    Tensor::normal(rank, &Layout::invariant(rank.mesh(), DType::F32, &[rows, WIDTH]), 7, stream, 0.5)
}

fn text(args: &[Var]) -> Result<Vec<Var>> {
    let (x, tape) = (&args[0], args[0].tape().clone());
    let weights = KEYS.map(|key| Ok(tape.leaf(key, &normal(x.rank(), WIDTH, key)?)));
    let w: Vec<Var> = weights.collect::<Result<_>>()?;
    let y = x.matmul(&w[0]).gelu().matmul(&w[1]).gelu().matmul(&w[1]);
    let block = |a: &[Var]| Ok(vec![a[0].matmul(&a[1]).gelu().matmul(&a[1]).gelu().matmul(&a[2])]);
    let y = tape.checkpoint(&[y, w[2].clone(), w[3].clone()], block)?.remove(0);
    Ok(vec![y.matmul(&w[4].matmul(&w[4])).sum()])
}

fn bits(gradients: &Gradients) -> Result<Vec<Vec<u64>>> {
    gradients.values().map(|g| Ok(g.to_f64()?.iter().map(|x| x.to_bits()).collect())).collect()
}

/// The gradients of some microbatches on one tape.
fn gradients(rank: &Rank, microbatches: std::ops::Range<usize>) -> Result<Gradients> {
    let tape = Tape::new(rank);
    for microbatch in microbatches {
        let x = tape.constant(normal(rank, ROWS, 100 + microbatch as u64)?);
        text(&[x])?[0].backward()?;
    }
    Ok(tape.gradients())
}

/// Gradients of each microbatch, added up.
fn expected(rank: &Rank) -> Result<Gradients> {
    let mut sums = gradients(rank, 0..1)?;
    for microbatch in 1..COUNT {
        for (key, gradient) in gradients(rank, microbatch..microbatch + 1)? {
            let sum = sums.remove(&key).expect("each microbatch reaches all").accumulate(&gradient)?;
            sums.insert(key, sum);
        }
    }
    Ok(sums)
}

/// Those of a pipeline of one rank, which has all uses of a weight.
fn piped(rank: &Rank, name: &str) -> Result<Gradients> {
    let axis = rank.mesh().axis("pp").expect("the mesh has one");
    let here = rank.slice(axis);
    let layout = Layout::invariant(here.mesh(), DType::F32, &[ROWS, WIDTH]);
    let stages = Stages::new(Program::record(&here, &[layout], None, text)?, &[]);
    let schedule = Schedule::named(name, 1, COUNT)?.with_transfers(&stages.links());
    let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
    let outcome = runner.run(&Feed {
        arguments: &|m| Ok(vec![normal(&here, ROWS, 100 + m as u64)?]),
        parameter: &|key| normal(&here, WIDTH, key).expect("there is memory"),
        is_trained: &|_| true,
        draw: &|_| Draw::Off,
        weight: 1.0,
    })?;
    Ok(outcome.gradients)
}

#[test]
fn microbatches_of_a_stage_add_up_in_their_order_whatever_uses_a_weight_has() {
    for name in ["1f1b", "zb-h1"] {
        World::run(Mesh::parse("pp=1").unwrap(), |rank| {
            let (sums, expected) = (piped(rank, name)?, expected(rank)?);
            assert!(sums.keys().eq(expected.keys()) && sums.keys().copied().eq(KEYS), "{name}");
            for ((key, sum), expected) in KEYS.zip(bits(&sums)?).zip(bits(&expected)?) {
                assert!(sum == expected, "{name}: the gradient of {key}");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn rounds_add_what_a_block_gives_in_their_order() {
    World::run(Mesh::single(), |rank| {
        let (sums, expected) = (bits(&gradients(rank, 0..COUNT)?)?, bits(&expected(rank)?)?);
        // Of the block; a weight that is used twice outside of one is added to the sum twice.
        for key in [0, 2, 3] {
            assert!(sums[key] == expected[key], "the gradient of {key}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_that_were_handed_out_stay_as_they_are() {
    World::run(Mesh::single(), |rank| {
        let tape = Tape::new(rank);
        let w = normal(rank, WIDTH, 0)?;
        let round = |x: u64| {
            let x = tape.constant(normal(rank, ROWS, 100 + x)?);
            x.matmul(&tape.leaf(0, &w)).gelu().sum().backward()
        };
        round(0)?;
        let held = tape.gradients();
        let before = bits(&held)?;
        round(1)?;
        round(2)?;
        let others = tape.gradients();
        assert!(bits(&held)? == before && bits(&others)? != before);
        Ok(())
    })
    .unwrap();
}
