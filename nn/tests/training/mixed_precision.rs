//! Mixed precision: f32 parameters, bf16 compute. Small updates are not lost, forward communication is narrow, and
//! gradients are accumulated and reduced in f32.

use crate::support::{ROWS, Setup, batch, max_difference, run, tokens_and_targets, values};
use crate::traces::traced;
use approx::abs_diff_eq;
use shardgrad_autograd::{Tape, Var};
use shardgrad_nn::optim::LrScheduler;
use shardgrad_nn::{
    AdamW, Gpt2, Init, Model, Optimizer, Param, Plan, Precision, Trainer, TrainerConfig, module,
};
use shardgrad_tensor::{DType, Layout, Mesh, Phase, Rank, Record, Result, Tensor, Value, World};
use std::ops::Range;

const BF16: Precision = Precision::mixed(DType::BF16);

module! {
    /// A module of one parameter.
    struct One { w: Param }
}

impl One {
    fn new() -> One {
        One { w: Param::new(&[4, 3]).init(Init::Ones) }
    }
}

/// Summands of which a sum in bf16, whose spacing is 2 from 256 on, would keep only the first.
const SUMMANDS: [f64; 8] = [256.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];

/// Rows of the summands, repeated over the elements of the parameter, split over `dp`.
fn summands(rank: &Rank, rows: Range<usize>) -> Result<Tensor> {
    let shape = [rows.len(), 4, 3];
    let layout = Plan::data_parallel("dp").batch_layout(rank.mesh(), DType::BF16, &shape)?;
    let all: Vec<f64> = SUMMANDS[rows].iter().flat_map(|x| [*x; 12]).collect();
    Tensor::from_global(rank, &layout.with_dtype(DType::F64), &all).map(|t| t.cast(DType::BF16))
}

/// Gradient of the sum of w x, accumulated over microbatches of this many rows.
fn gradient(mesh: &str, plan: &Plan, rows: usize, sum: impl Fn(&Var, &Var) -> Var + Sync) -> Vec<f64> {
    let made = run(mesh, |rank| {
        let model = Model::with_precision(rank, One::new(), plan, 1, BF16)?;
        let tape = model.tape();
        for first in (0..SUMMANDS.len()).step_by(rows) {
            let x = tape.constant(summands(rank, first..first + rows)?);
            sum(&model.w.on_tape(&tape), &x).backward()?;
        }
        let gradients = tape.gradients();
        let gradient = &gradients[&model.w.key()];
        assert_eq!((gradient.layout(), gradient.dtype()), (model.w.tensor().layout(), DType::F32));
        gradient.to_f64()
    });
    assert!(made.iter().all(|g| *g == made[0]), "{mesh}: ranks disagree");
    made.into_iter().next().unwrap()
}

#[test]
fn gradients_accumulate_in_f32_over_uses_microbatches_and_ranks() {
    let expected = vec![SUMMANDS.iter().sum::<f64>(); 12];
    let elementwise = |w: &Var, x: &Var| w.mul(x).sum();
    let (copies, parts) = (Plan::data_parallel("dp"), Plan::data_parallel("dp").store("w", "dp@0"));
    assert_eq!(gradient("", &Plan::new(), 1, elementwise), expected, "microbatches");
    for plan in [&copies, &parts] {
        assert_eq!(gradient("dp=2", plan, 2, elementwise), expected, "microbatches and ranks");
        assert_eq!(gradient("dp=8", plan, 8, elementwise), expected, "ranks");
    }
    // Each row is a separate use of the parameter, in one microbatch.
    let used = |w: &Var, x: &Var| {
        let row = |i: usize| w.mul(&x.slice(0, i..i + 1)).sum();
        (1..8).fold(row(0), |sum, i| sum.add(&row(i)))
    };
    assert_eq!(gradient("", &Plan::new(), 8, used), expected, "uses");
    let again = |w: &Var, x: &Var| {
        let block = |args: &[Var]| Ok(vec![used(&args[0], &args[1])]);
        w.tape().checkpoint(&[w.clone(), x.clone()], block).unwrap().remove(0)
    };
    assert_eq!(gradient("", &Plan::new(), 8, again), expected, "uses in a block that is computed again");
}

module! {
    /// A module of two parameters in sequence.
    struct Two { a: Param, b: Param }
}

#[test]
fn pipeline_stages_accumulate_gradients_in_f32() {
    let ones = || Param::new(&[4, 3]).init(Init::Ones);
    // The gradient of each is that of the mean over eight microbatches.
    let each = SUMMANDS.iter().sum::<f64>() / 8.0;
    for (tied, expected) in [(false, each * 24f64.sqrt()), (true, 2.0 * each * 12f64.sqrt())] {
        for mesh in ["", "pp=2", "pp=2,dp=2"] {
            let norms = run(mesh, |rank| {
                let plan =
                    Plan::data_parallel("dp").and(Plan::pipeline_parallel("pp").pipeline_schedule("zb-h1"));
                let microbatches = if mesh.contains("dp") { 4 } else { 8 };
                let settings = TrainerConfig { dtype: DType::BF16, microbatches, ..TrainerConfig::new(8) };
                let a = ones();
                let module = Two { b: if tied { a.clone() } else { ones() }, a };
                // A mean over rows, as many as there are in a microbatch.
                let mean = 1.0 / (8 / microbatches) as f64;
                let product = |m: &Two, x: &Var| m.b.on(x).mul(&m.a.on(x).mul(x));
                let loss = |m: &Two, x: &[Var]| product(m, &x[0]).cast(DType::F32).sum().scale(mean);
                let read = |rank: &Rank, _: u64, rows: Range<usize>| Ok(vec![summands(rank, rows)?]);
                let mut trainer = Trainer::new(rank, module, &plan, AdamW::new(1e-3), settings, read, loss)?;
                Ok(trainer.step()?.grad_norm)
            });
            assert!(
                norms.iter().all(|n| abs_diff_eq!(*n, expected, epsilon = 1e-9)),
                "{mesh}, tied {tied}: {norms:?}, not {expected}"
            );
        }
    }
}

#[test]
fn forward_equals_bf16_product_for_trained_and_frozen_parameters() {
    run("dp=2", |rank| {
        let plan = Plan::data_parallel("dp").store("w", "dp@1");
        let model = Model::with_precision(rank, One::new(), &plan, 1, BF16)?;
        let data: Vec<f64> = (0..12).map(|i| 1.0 + f64::from(i) / 1000.0).collect();
        let stored = Tensor::from_global(rank, &model.w.layout().with_dtype(DType::F64), &data)?;
        model.w.set_tensor(stored.cast(DType::F32))?;
        let rounded = |on: &Tape| {
            let w = model.w.on_tape(on);
            assert_eq!(w.layout(), &Layout::parse("bf16[4, 3] ~dp", rank.mesh())?);
            w.tensor().to_local_f64()
        };
        let trained = rounded(&model.tape())?;
        let bf16 = Tensor::from_host(rank, &[12], &data)?.cast(DType::BF16).to_f64()?;
        assert_eq!(trained, bf16);
        model.freeze("w")?;
        assert_eq!(rounded(&model.tape())?, bf16);
        assert_eq!(rounded(&model.inference_tape())?, bf16);
        Ok(())
    });
}

#[test]
fn updates_below_bf16_spacing_are_not_lost() {
    // A step changes 1 by 1e-4; the neighbors of 1 in bf16 are 0.004 below and 0.008 above.
    let ends = |precision| {
        run("", |rank| {
            let model = Model::with_precision(rank, One::new(), &Plan::new(), 1, precision)?;
            let mut optim = AdamW::new(1e-4);
            for _ in 0..60 {
                let tape = model.tape();
                model.w.on_tape(&tape).sum().backward()?;
                optim.update(&model, tape.gradients())?;
            }
            let tape = model.inference_tape();
            Ok((model.w.tensor().to_f64()?[0], model.w.on_tape(&tape).tensor().to_f64()?[0]))
        })
        .remove(0)
    };
    assert_eq!(ends(Precision::of(DType::BF16)), (1.0, 1.0));
    let (stored, computed) = ends(BF16);
    assert!(abs_diff_eq!(stored, 0.994, epsilon = 1e-6), "{stored}");
    assert_eq!(computed, 0.9921875, "60 steps are more than the spacing");
}

/// A tiny GPT-2 in training on one batch.
struct Training {
    precision: Precision,
    plan: Plan,
    microbatches: usize,
    recompute: bool,
    lr: f64,
    steps: usize,
}

/// Losses, and bytes of parameters by name.
type RunResult = (Vec<f64>, Vec<(String, Vec<u8>)>);

impl Training {
    fn new(precision: Precision) -> Training {
        Training { precision, plan: Plan::gpt2(), microbatches: 2, recompute: false, lr: 3e-3, steps: 20 }
    }

    /// Returns losses, and the stored parameters on each rank at the end, equal on all ranks that store them.
    fn run(&self, mesh: &str) -> Vec<RunResult> {
        run(mesh, |rank| {
            let settings = TrainerConfig {
                microbatches: self.microbatches,
                seed: 5,
                dtype: self.precision.dtype,
                param_dtype: Some(self.precision.param_dtype),
                lr_scheduler: Some(LrScheduler::constant(self.lr)),
                clip: Some(1.0),
                ..TrainerConfig::new(ROWS)
            };
            let read =
                |rank: &Rank, _: u64, rows: Range<usize>| tokens_and_targets(rank, &self.plan, rows, 0);
            let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[1]);
            let module = Gpt2::new(&Setup::new().config).recompute(self.recompute);
            let optim = AdamW::new(self.lr).weight_decay(0.1);
            let mut trainer = Trainer::new(rank, module, &self.plan, optim, settings, read, loss)?;
            let losses = (0..self.steps).map(|_| trainer.step().map(|r| r.loss)).collect::<Result<_>>()?;
            trainer.check_consistent()?;
            let here = trainer.model().params().iter().filter(|p| p.is_local());
            let bytes = here.map(|p| Ok((p.name(), p.tensor().to_bytes()?))).collect::<Result<_>>()?;
            Ok((losses, bytes))
        })
    }

    fn losses(&self, mesh: &str) -> Vec<f64> {
        let ranks = self.run(mesh);
        assert!(ranks.iter().all(|r| r.0 == ranks[0].0), "{mesh}: ranks disagree");
        ranks.into_iter().next().unwrap().0
    }
}

/// Mean absolute difference of two loss curves.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f64>() / a.len() as f64
}

#[test]
fn losses_track_f32_with_f32_parameters_but_not_with_bf16_parameters() {
    let losses = |precision| Training { lr: 2e-4, steps: 80, ..Training::new(precision) }.losses("");
    let wide = losses(Precision::of(DType::F32));
    let fall = wide[0] - wide[79];
    let (mixed, bf16) = (losses(BF16), losses(Precision::of(DType::BF16)));
    let (mixed, bf16) = (distance(&mixed, &wide) / fall, distance(&bf16, &wide) / fall);
    assert!(fall > 0.1 && mixed < 0.02 && bf16 > 5.0 * mixed, "{fall} {mixed} {bf16}");
}

#[test]
fn meshes_agree_and_runs_are_bit_reproducible() {
    let training = || Training { steps: 6, ..Training::new(BF16) };
    let one = training().losses("");
    let parts = Plan::gpt2().store("*.weight", "dp@0").store("*.bias", "dp@0");
    for (mesh, plan) in [
        ("dp=2", Plan::gpt2()),
        ("dp=2", parts),
        ("tp=2", Plan::gpt2()),
        ("dp=2,tp=2", Plan::gpt2()),
        ("pp=2", Plan::gpt2()),
        ("pp=2", Plan::gpt2().pipeline_schedule("zb-v")),
        ("pp=2,dp=2", Plan::gpt2().pipeline_schedule("zb-h1")),
    ] {
        let kept = Training { plan: plan.clone(), ..training() };
        let many = kept.run(mesh);
        let worst = max_difference(&one, &many[0].0);
        assert!(worst < 0.03, "{mesh} {plan:?}: {worst}, {one:?} {:?}", many[0].0);
        assert!(kept.run(mesh) == many, "{mesh}: two runs differ");
        let again = Training { recompute: true, plan, ..training() }.run(mesh);
        assert!(again == many, "{mesh}: blocks that are computed again change bits");
    }
}

/// Returns the collectives of one step of the tiny model.
fn step(rank: &Rank, plan: &Plan) -> Result<Vec<Record>> {
    let setup = Setup { plan: plan.clone(), microbatches: 2, ..Setup::new() };
    let model = Model::with_precision(rank, Gpt2::new(&setup.config), plan, 5, BF16)?;
    let tape = model.tape();
    traced(rank, || {
        for microbatch in 0..2 {
            let ids = tape.constant(batch(rank, plan, 2 * microbatch..2 * microbatch + 2, 0)?);
            model.loss(&ids, &ids).backward()?;
        }
        let gradients = tape.gradients();
        assert_eq!(gradients.len(), model.params().len());
        if !rank.is_dry_run() {
            assert_eq!(values(&model, &gradients)?.len(), model.params().len());
        }
        Ok(())
    })
}

#[test]
fn parameters_are_gathered_in_bf16_and_gradients_reduced_in_f32() {
    let sum = |records: &[Record], op: &str, phase: Phase, dtype: DType| -> (usize, u64) {
        let of = records.iter().filter(|r| r.op == op && r.phase == phase && r.dtype == dtype);
        of.fold((0, 0), |(count, bytes), r| (count + r.members().count(), bytes + r.bytes))
    };
    let parts = Plan::gpt2().store("*.weight", "dp@0").store("*.bias", "dp@0");
    let dry =
        |plan: &Plan| World::new(Mesh::parse("dp=2").unwrap()).dry_run(0, |rank| step(rank, plan)).unwrap();
    // Rank 0 receives as many elements as it sends.
    let missing = run("dp=2", |rank| {
        let model = Model::with_precision(rank, Gpt2::new(&Setup::new().config), &parts, 5, BF16)?;
        let held = |p: &Param| p.layout().local_shape(rank.coordinates()).iter().product::<usize>();
        Ok(model.params().iter().map(|p| p.numel() - held(p)).sum::<usize>() as u64)
    })[0];
    let records = dry(&parts);
    assert_eq!(sum(&records, "all_gather", Phase::Forward, DType::BF16), (28, 2 * missing));
    assert_eq!(sum(&records, "reduce_scatter", Phase::Backward, DType::F32), (28, 4 * missing));
    assert_eq!(records.len(), 28 + 1, "gradients share a bucket, and nothing else moves");
    let records = dry(&Plan::gpt2());
    assert_eq!(sum(&records, "all_reduce", Phase::Backward, DType::F32).0, 28);
    assert_eq!(records.len(), 1, "each gradient once, after two microbatches, in one bucket");
    let split =
        World::new(Mesh::parse("tp=2").unwrap()).dry_run(0, |rank| step(rank, &Plan::gpt2())).unwrap();
    assert_eq!(sum(&split, "all_reduce", Phase::Backward, DType::BF16).0, 10, "activations stay narrow");
}

#[test]
fn tied_parameters_are_reduced_in_f32_and_activations_sent_in_bf16() {
    let sent = run("pp=2", |rank| {
        let plan = Plan::gpt2();
        let settings = TrainerConfig { dtype: DType::BF16, microbatches: 2, ..TrainerConfig::new(ROWS) };
        assert_eq!(settings.precision(), BF16);
        let read = |rank: &Rank, _: u64, rows: Range<usize>| tokens_and_targets(rank, &plan, rows, 0);
        let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[1]);
        let module = Gpt2::new(&Setup::new().config);
        let mut trainer = Trainer::new(rank, module, &plan, AdamW::new(1e-3), settings, read, loss)?;
        let mut records = traced(rank, || trainer.step().map(drop))?;
        records.retain(|r| r.op == "send" && r.phase != Phase::Control);
        Ok(records.into_iter().map(|r| (r.phase, r.dtype, r.numel())).collect::<Vec<_>>())
    });
    let shared = (Phase::Backward, DType::F32, 11 * 15);
    let activation = |phase| (phase, DType::BF16, 2 * 6 * 15);
    assert_eq!(sent[0], [activation(Phase::Forward), activation(Phase::Forward), shared]);
    assert_eq!(sent[1], [activation(Phase::Backward), activation(Phase::Backward), shared]);
}
