//! Invariants of training steps: bounded stack, no new memory in steady state, results independent of timing, threads and mesh. To
//! rounding on meshes: a loop without a trainer sums in the order of the mesh.

use crate::training_run::same;
use shardgrad::kernels::MatmulPrecision;
use shardgrad::kernels::cpu::gemm::rounds_to_bf16;
use shardgrad::nn::model::{Gpt2, Gpt2Config};
use shardgrad::prelude::*;
use shardgrad_testing::max_difference;
use std::time::Duration;

fn config(dropout: f64) -> Gpt2Config {
    let mut config = Gpt2Config::new(19, 8, 12, 2, 3);
    (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) = (dropout, 0.0, dropout);
    config
}

struct Run {
    losses: Vec<f64>,
    bits: Vec<Vec<u64>>,
    system_allocs: Vec<usize>,
}

/// Trains a small GPT-2 for some steps.
fn train(world: World, dtype: DType, steps: usize, rounds: usize, dropout: f64) -> Run {
    let ranks = world
        .launch(|rank| {
            let config = config(dropout);
            let plan = Gpt2::plan(&config);
            let model = Model::with_dtype(rank, Gpt2::new(&config), &plan, 5, dtype)?;
            let mut optim = AdamW::new(3e-3);
            let (mut losses, mut allocs) = (Vec::new(), Vec::new());
            for step in 0..steps {
                let tape = model.tape();
                let mut loss_sum = 0.0;
                for round in 0..rounds {
                    let rows = 6 / rounds;
                    tape.set_noise(Some(Noise {
                        seed: 1,
                        step: step as u64,
                        first_row: (round * rows) as u64,
                    }));
                    let batch = |shift| tokens(rank, &plan, step, round * rows..(round + 1) * rows, shift);
                    let loss = model.loss(&tape.constant(batch(0)?), &tape.constant(batch(1)?));
                    let loss = loss.scale(1.0 / rounds as f64);
                    loss_sum += loss.item()?;
                    loss.backward()?;
                }
                optim.step(&model, tape.gradients(), StepArgs { clip: Some(1.0), ..StepArgs::new(3e-3) })?;
                losses.push(loss_sum);
                allocs.push(rank.backend().memory().num_system_allocs);
            }
            let mut bits = Vec::new();
            for param in model.params() {
                bits.push(param.tensor().to_f64()?.iter().map(|x| x.to_bits()).collect());
            }
            Ok(Run { losses, bits, system_allocs: allocs })
        })
        .unwrap();
    ranks.into_iter().next().expect("a world has a rank")
}

fn tokens(
    rank: &Rank,
    plan: &Plan,
    step: usize,
    rows: std::ops::Range<usize>,
    shift: usize,
) -> Result<Tensor> {
    let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), 8])?;
    let token = |r: usize, t: usize| ((r * 5 + (t + shift) * (t + shift) + step * 3) % 19) as i64;
    let all: Vec<i64> = rows.flat_map(|r| (0..8).map(move |t| token(r, t))).collect();
    Tensor::from_global(rank, &layout, &all)
}

fn mesh(text: &str) -> World {
    World::new(Mesh::parse(text).unwrap()).threads(1)
}

const MESHES: [&str; 6] = ["tp=2", "dp=2", "dp=2,tp=2", "tp=3", "dp=3", "dp=2,tp=3"];

#[test]
fn losses_do_not_depend_on_the_mesh_in_f64() {
    let one = train(mesh(""), DType::F64, 30, 1, 0.0);
    for text in MESHES {
        let many = train(mesh(text), DType::F64, 30, 1, 0.0);
        same(&one.losses, &many.losses, 1e-9, text);
    }
}

#[test]
fn losses_do_not_depend_on_the_mesh_in_f32() {
    let one = train(mesh(""), DType::F32, 30, 1, 0.0);
    for text in MESHES {
        let many = train(mesh(text), DType::F32, 30, 1, 0.0);
        same(&one.losses[..20], &many.losses[..20], 1e-5, text);
        same(&one.losses[20..], &many.losses[20..], 1e-3, text);
    }
}

#[test]
fn the_same_run_gives_the_same_bits() {
    for text in ["dp=2,tp=2", "tp=3"] {
        let first = train(mesh(text), DType::F32, 5, 1, 0.1);
        for (threads, jitter) in [(1, None), (2, None), (1, Some(1)), (2, Some(2))] {
            let world = mesh(text).threads(threads);
            let again =
                train(jitter.map_or(world.clone(), |seed| world.random_delays(seed)), DType::F32, 5, 1, 0.1);
            assert_eq!(first.losses, again.losses, "{text}, {threads} threads, jitter {jitter:?}");
            assert!(
                first.bits == again.bits,
                "{text}, {threads} threads, jitter {jitter:?}: parameters differ"
            );
        }
    }
}

#[test]
fn steady_state_steps_allocate_no_system_memory() {
    for text in ["", "dp=2", "dp=2,tp=2"] {
        let run = train(mesh(text), DType::F32, 12, 2, 0.1);
        let steady = &run.system_allocs[3..];
        assert!(steady.iter().all(|n| *n == steady[0]), "{text}: {:?}", run.system_allocs);
    }
}

#[test]
fn million_op_tape_is_dropped_on_a_small_stack() {
    let build = || {
        World::new(Mesh::single()).dry_run(0, |rank| {
            let tape = Tape::new(rank);
            let leaf = tape.leaf(1, &Tensor::from_host(rank, &[2], &[1.0f32, 2.0])?);
            let mut x = leaf.clone();
            for _ in 0..1_000_000 {
                x = x.add(&leaf);
            }
            assert_eq!(tape.num_nodes(), 1_000_000);
            drop(x);
            Ok(())
        })
    };
    let thread = std::thread::Builder::new().stack_size(2 << 20).spawn(build).unwrap();
    thread.join().expect("no overflow").unwrap();
}

#[test]
fn deep_backward_runs_on_a_small_stack() {
    let build = || {
        World::new(Mesh::single()).timeout(Duration::from_secs(60)).dry_run(0, |rank| {
            let tape = Tape::new(rank);
            let leaf = tape.leaf(1, &Tensor::from_host(rank, &[2], &[1.0f32, 2.0])?);
            let mut x = leaf.clone();
            for _ in 0..50_000 {
                x = x.add(&leaf);
            }
            x.sum().backward()?;
            assert_eq!(tape.gradients().len(), 1);
            Ok(())
        })
    };
    let thread = std::thread::Builder::new().stack_size(2 << 20).spawn(build).unwrap();
    thread.join().expect("no overflow").unwrap();
}

#[test]
fn matmul_precision_bounds_hold_on_every_mesh_and_thread_count() {
    let run = |axes: &str, precision, threads| {
        let world = mesh(axes).matmul_precision(precision).threads(threads);
        train(world, DType::F32, 4, 2, 0.0)
    };
    let exact = run("", MatmulPrecision::Highest, 1);
    for (precision, near) in [(MatmulPrecision::High, 1e-4), (MatmulPrecision::Medium, 2e-2)] {
        let one = run("", precision, 1);
        assert_eq!(
            one.bits != exact.bits,
            rounds_to_bf16(precision),
            "{precision:?}: it reaches the products"
        );
        assert_eq!(one.bits, run("", precision, 3).bits, "{precision}: threads");
        for axes in ["", "dp=2", "tp=2", "dp=3,tp=3"] {
            let losses = run(axes, precision, 1).losses;
            assert!(
                max_difference(&losses, &exact.losses) <= near,
                "{precision} {axes}: {losses:?}, not {:?}",
                exact.losses
            );
        }
    }
}
