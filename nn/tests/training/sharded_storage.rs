//! Parameters stored as shards (ZeRO, FSDP) by one rule: losses, gradients, bytes and collectives; and what activation
//! checkpointing does with the gathered forms.

use crate::support::{ROWS, run, values};
use crate::traces::{counts, traced};
use approx::abs_diff_eq;
use shardgrad_autograd::Var;
use shardgrad_nn::{AdamW, Linear, Model, Optimizer, Param, Plan, module};
use shardgrad_tensor::{DType, Phase, Rank, Result, Tensor, Value};
use std::collections::BTreeMap;

pub(crate) const WIDTH: usize = 64;
pub(crate) const LAYERS: usize = 6;
/// Bytes of one weight in f64.
const WEIGHT: usize = WIDTH * WIDTH * 8;

module! {
    /// Linear layers in a row, and a scalar by which the result is scaled.
    pub(crate) struct Deep { pub(crate) layers: Vec<Linear>, scale: Param }
}

impl Deep {
    pub(crate) fn new() -> Deep {
        Deep::with_layers(LAYERS)
    }

    pub(crate) fn with_layers(num_layers: usize) -> Deep {
        let layers = (0..num_layers).map(|_| Linear::new(WIDTH, WIDTH)).collect();
        Deep { layers, scale: Param::new(&[]).init(shardgrad_nn::Init::Ones) }
    }

    pub(crate) fn forward(&self, x: &Var, recompute: bool) -> Result<Var> {
        let mut x = x.clone();
        for layer in &self.layers {
            let block = |x: &Var| layer.forward(x).gelu().add(x);
            x = match recompute {
                true => x.tape().clone().checkpoint(&[x], |x| Ok(vec![block(&x[0])]))?.swap_remove(0),
                false => block(&x),
            };
        }
        Ok(x.square().mean().mul(&self.scale.on(&x)))
    }
}

/// All parameters whole on every rank, or as shards where they have rows to shard.
fn plan(sharded: bool) -> Plan {
    // Weights are distinguished by their size.
    let plan = Plan::data_parallel("dp").gradient_buckets(0, 0);
    if sharded { plan.store("*", "dp@0|=") } else { plan }
}

/// The results of steps on a rank.
#[derive(Debug)]
struct Outcome {
    losses: Vec<f64>,
    gradients: BTreeMap<String, Vec<f64>>,
    /// Collectives of forward and backward of the first step.
    collectives: Vec<String>,
    /// Peak bytes of the first step beyond those held before it.
    peak: usize,
    /// Bytes of parameters and optimizer state that this rank holds.
    stored: usize,
}

fn outcome(mesh: &str, sharded: bool, recompute: bool, microbatches: usize) -> Outcome {
    let plan = plan(sharded);
    run(mesh, |rank| on_rank(rank, &plan, recompute, microbatches)).swap_remove(0)
}

fn on_rank(rank: &Rank, plan: &Plan, recompute: bool, microbatches: usize) -> Result<Outcome> {
    let before = rank.backend().memory().in_use_bytes;
    let model = Model::with_dtype(rank, Deep::new(), plan, 1, DType::F64)?;
    let mut optim = AdamW::new(1e-3);
    let rows = ROWS / microbatches;
    let layout = plan.batch_layout(rank.mesh(), DType::F64, &[rows, WIDTH])?;
    let mut outcome = Outcome {
        losses: Vec::new(),
        gradients: BTreeMap::new(),
        collectives: Vec::new(),
        peak: 0,
        stored: 0,
    };
    for step in 0..3 {
        let mut gradients = shardgrad_autograd::Gradients::new();
        let mut records = traced(rank, || {
            let tape = model.tape().for_rounds(microbatches);
            for microbatch in 0..microbatches {
                let x =
                    Tensor::from_fn(rank, &layout, |i| ((i + microbatch * rows * WIDTH) % 13) as f64 / 13.0)?;
                if microbatch + 1 == microbatches {
                    tape.expect_gradients();
                }
                let loss = model.forward(&tape.constant(x), recompute)?.scale(1.0 / microbatches as f64);
                outcome.losses.push(loss.item()?);
                loss.backward()?;
            }
            gradients = tape.gradients();
            Ok(())
        })?;
        if step == 0 {
            outcome.peak = rank.backend().memory().peak_bytes - before;
            outcome.gradients = values(&model, &gradients)?;
            records.retain(|r| r.phase != Phase::Control && r.numel() >= WIDTH * WIDTH / 2);
            outcome.collectives = counts(&records);
        }
        optim.update(&model, gradients)?;
    }
    outcome.stored = rank.backend().memory().in_use_bytes - before;
    Ok(outcome)
}

#[test]
fn one_rule_shards_parameters_gradients_and_optimizer_state() {
    let alone = outcome("", true, false, 1);
    let near = |a: &Outcome, b: &Outcome| abs_diff_eq!(a.losses[..], b.losses[..], epsilon = 1e-12);
    let mut stored = BTreeMap::new();
    for mesh in ["dp=2", "dp=4"] {
        for sharded in [false, true] {
            let many = outcome(mesh, sharded, false, 1);
            assert!(near(&many, &alone), "{mesh}: {:?} {:?}", many.losses, alone.losses);
            stored.insert((mesh, sharded), many.stored);
        }
    }
    // Weights and the two moments of AdamW; what is left are biases, the scalar and the step count.
    let weights = 3 * LAYERS * WEIGHT;
    for (mesh, ranks) in [("dp=2", 2), ("dp=4", 4)] {
        let (copies, shards) = (stored[&(mesh, false)], stored[&(mesh, true)]);
        assert!(copies >= weights && copies < weights * 11 / 10, "{mesh}: {copies}");
        assert!(shards >= weights / ranks && shards < weights / ranks * 11 / 10, "{mesh}: {shards}");
    }
}

#[test]
fn gathered_parameters_of_checkpointed_blocks_are_freed_and_gathered_again() {
    let gathers =
        |n: usize| vec![format!("backward reduce_scatter {LAYERS}"), format!("forward all_gather {n}")];
    for microbatches in [1, 2, 4] {
        let plain = outcome("dp=2", true, false, microbatches);
        let freed = outcome("dp=2", true, true, microbatches);
        assert_eq!(plain.losses, freed.losses, "{microbatches} microbatches");
        assert_eq!(plain.gradients, freed.gradients, "{microbatches} microbatches");
        // Without checkpointing once a step; with it in each forward pass and in each recomputation. Gradients are reduced once.
        assert_eq!(plain.collectives, gathers(LAYERS), "{microbatches} microbatches");
        assert_eq!(freed.collectives, gathers(2 * LAYERS * microbatches), "{microbatches} microbatches");
    }
    let [plain, freed] = [false, true].map(|recompute| outcome("dp=2", true, recompute, 1));
    assert!(
        plain.peak - freed.peak > (LAYERS - 2) * WEIGHT,
        "{} and {} bytes: all gathered weights, or one at a time",
        plain.peak,
        freed.peak
    );
}

#[test]
fn parameters_stored_whole_move_as_often_with_checkpointing_as_without() {
    let [plain, again] = [false, true].map(|recompute| outcome("dp=2", false, recompute, 2));
    assert_eq!(plain.losses, again.losses);
    assert_eq!(plain.collectives, [format!("backward all_reduce {LAYERS}")]);
    assert_eq!(plain.collectives, again.collectives);
}

#[test]
fn a_parameter_that_is_also_used_outside_of_the_block_is_gathered_once() {
    let gathers = run("dp=2", |rank| {
        let plan = plan(true);
        let model = Model::with_dtype(rank, Deep::new(), &plan, 1, DType::F64)?;
        let layout = plan.batch_layout(rank.mesh(), DType::F64, &[ROWS, WIDTH])?;
        let layer = &model.layers[0];
        let records = traced(rank, || {
            let tape = model.tape();
            let x = layer.forward(&tape.constant(Tensor::full(rank, &layout, 0.5)?));
            let y = tape.checkpoint(&[x], |x| Ok(vec![layer.forward(&x[0]).gelu()]))?.swap_remove(0);
            y.square().mean().backward()?;
            assert_eq!(tape.gradients().len(), 2);
            Ok(())
        })?;
        Ok(counts(&records))
    });
    assert_eq!(gathers[0], ["backward reduce_scatter 2", "forward all_gather 2"], "weight and bias");
}

module! {
    /// Square weights, each of a block of its own.
    struct Weights { weights: Vec<Param> }
}

/// Loss of checkpointed blocks, the bytes that a rank holds after the forward pass beyond the model, and the peak of the step beyond
/// it. With `scaled`, blocks use copies of the gathered weights.
fn checkpointed_bytes(scaled: bool) -> (f64, usize, usize) {
    let plan = plan(true);
    run("dp=2", |rank| {
        let weight = || Param::new(&[WIDTH, WIDTH]).init(shardgrad_nn::Init::Normal(0.1));
        let module = Weights { weights: (0..LAYERS).map(|_| weight()).collect() };
        let model = Model::with_dtype(rank, module, &plan, 1, DType::F64)?;
        let memory = || rank.backend().memory();
        let before = memory().in_use_bytes;
        let layout = plan.batch_layout(rank.mesh(), DType::F64, &[ROWS, WIDTH])?;
        let tape = model.tape();
        let mut x = tape.constant(Tensor::from_fn(rank, &layout, |i| (i % 13) as f64 / 13.0)?);
        for weight in &model.weights {
            let block = |x: &[Var]| {
                let weight = weight.on(&x[0]);
                let weight = if scaled { weight.scale(1.0) } else { weight };
                Ok(vec![x[0].matmul(&weight).gelu().add(&x[0])])
            };
            x = tape.checkpoint(&[x], block)?.swap_remove(0);
        }
        let loss = x.square().mean();
        drop(x);
        let held = memory().in_use_bytes - before;
        let value = loss.item()?;
        loss.backward()?;
        Ok((value, held, memory().peak_bytes - before))
    })
    .swap_remove(0)
}

/// A gathered weight dies with its last use in a block, whether ops of the block save the weight itself or a copy of it.
#[test]
fn checkpointed_blocks_hold_no_gathered_weight_whether_they_use_it_or_a_copy() {
    let [gathered, copied] = [false, true].map(checkpointed_bytes);
    assert_eq!(gathered.0, copied.0, "the same loss");
    assert_eq!(gathered.1, copied.1, "the same bytes after the forward pass");
    // The inputs of the blocks and the result of the last one, of half of the rows; and less than a row for scalars.
    let inputs = (LAYERS + 1) * (ROWS / 2) * WIDTH * 8;
    assert!((inputs..inputs + WIDTH * 8).contains(&gathered.1), "{} bytes, {inputs} of inputs", gathered.1);
    // The copy of a weight and its gradient take memory too.
    assert!(gathered.2 <= copied.2, "{} and {} bytes at the peak", gathered.2, copied.2);
}
