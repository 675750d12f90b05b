//! Loss scaling: gradients, norms and updates equal those of the unscaled loss; an overflow is skipped on all ranks.

use crate::support::{ROWS, Setup, batch, run, tokens_and_targets};
use shardgrad_autograd::Var;
use shardgrad_nn::optim::{LossScale, grad_norm};
use shardgrad_nn::{
    AdamW, ControlFlags, Gpt2, Model, Optimizer, Plan, Precision, Sgd, StepArgs, StepReport, Trainer,
    TrainerConfig,
};
use shardgrad_tensor::{DType, Error, Kind, Mesh, Rank, Result, Tensor, Value, World};
use std::ops::Range;

const MESHES: [&str; 5] = ["", "dp=2", "tp=2", "pp=2", "dp=2,tp=2"];

#[test]
fn update_with_loss_scale_matches_unscaled_update_bit_for_bit() {
    run("dp=2", |rank| {
        let setup = Setup::new();
        let build = || {
            let precision = Precision::of(DType::F32);
            Model::with_precision(rank, Gpt2::new(&setup.config), &setup.plan, 5, precision)
        };
        for clip in [None, Some(1e-3)] {
            let mut ends = Vec::new();
            for loss_scale in [1.0, 1024.0] {
                let (by_adam, by_descent) = (build()?, build()?);
                let (mut adam, mut descent) = (AdamW::new(0.01), Sgd::new(0.5).momentum(0.5));
                let mut norms = Vec::new();
                let mut found = Vec::new();
                for (model, adamw) in [(&by_adam, true), (&by_descent, false)] {
                    let tape = model.tape();
                    let ids = tape.constant(batch(rank, &setup.plan, 0..ROWS, 0)?);
                    model.loss(&ids, &ids).backward_scaled(loss_scale)?;
                    let gradients = tape.gradients();
                    let raw = grad_norm(rank, model.params(), &gradients)?;
                    let args = StepArgs { clip, loss_scale: Some(loss_scale), ..StepArgs::new(0.01) };
                    let report = match adamw {
                        true => adam.step(model, gradients, args)?,
                        false => descent.step(model, gradients, args)?,
                    };
                    assert!(!report.skipped && report.grad_norm > 0.01);
                    assert_eq!(raw, report.grad_norm * loss_scale);
                    norms.push(report.grad_norm);
                    for param in model.params() {
                        found.push(param.tensor().to_bytes()?);
                    }
                }
                for param in by_adam.params() {
                    for mean in adam.state(param).expect("it was stepped").moments {
                        found.push(mean.to_bytes()?);
                    }
                }
                ends.push((norms, found));
            }
            assert!(ends[0] == ends[1], "clipped at {clip:?}");
        }
        Ok(())
    });
}

/// The tiny GPT-2 in f16 with its loss times a factor.
struct Training {
    factor: f64,
    steps: usize,
    /// One element of this parameter is NaN.
    bad: Option<&'static str>,
}

/// Reports, number of updates, and loss scale that a rank saw.
type Seen = (Vec<StepReport>, u64, LossScale);

impl Training {
    fn on(&self, rank: &Rank, dtype: DType) -> Result<Seen> {
        let plan = Plan::gpt2();
        let settings =
            TrainerConfig { dtype, microbatches: 2, seed: 5, clip: Some(1.0), ..TrainerConfig::new(ROWS) };
        let read = |rank: &Rank, _: u64, rows: Range<usize>| tokens_and_targets(rank, &plan, rows, 0);
        let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[1]).scale(self.factor);
        let module = Gpt2::new(&Setup::new().config);
        let mut trainer = Trainer::new(rank, module, &plan, AdamW::new(3e-3), settings, read, loss)?;
        for param in trainer.model().params().iter().filter(|p| p.is_local()) {
            if self.bad == Some(&*param.name()) {
                param.set_tensor(Tensor::full(trainer.rank(), &param.layout(), f64::NAN)?)?;
            }
        }
        let bytes = |trainer: &Trainer<'_, Gpt2>| {
            let here = trainer.model().params().iter().filter(|p| p.is_local());
            here.map(|p| p.tensor().to_bytes()).collect::<Result<Vec<_>>>()
        };
        let mut reports = Vec::new();
        for _ in 0..self.steps {
            let (before, applied) = (bytes(&trainer)?, trainer.optim().num_steps());
            let report = trainer.step_with(ControlFlags::new().number("one", 1.0))?;
            assert_eq!(
                report.skipped,
                bytes(&trainer)? == before,
                "parameters stay if and only if it is skipped"
            );
            assert_eq!(trainer.optim().num_steps() - applied, u64::from(!report.skipped));
            trainer.check_consistent()?;
            reports.push(report);
        }
        let scale = trainer.loss_scale().unwrap_or(LossScale::new(1.0, 0));
        Ok((reports, trainer.optim().num_steps(), scale))
    }

    fn run(&self, mesh: &str, dtype: DType) -> Result<Seen> {
        let mut ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| self.on(rank, dtype))?;
        let first = ranks.swap_remove(0);
        // The norms of skipped steps are not finite.
        assert!(ranks.iter().all(|r| format!("{r:?}") == format!("{first:?}")), "{mesh}: ranks disagree");
        Ok(first)
    }
}

#[test]
fn losses_and_norms_track_f32() {
    let training = Training { factor: 1.0, steps: 30, bad: None };
    let (wide, ..) = training.run("", DType::F32).unwrap();
    assert!(wide.iter().all(|r| r.loss_scale.is_none() && !r.skipped));
    for mesh in MESHES {
        let (f16, applied, scale) = training.run(mesh, DType::F16).unwrap();
        assert_eq!((applied, scale), (30, LossScale::new(65_536.0, 30)), "{mesh}");
        for (a, b) in wide.iter().zip(&f16) {
            assert_eq!((b.loss_scale, b.skipped), (Some(65_536.0), false));
            let (loss, norm) = ((a.loss - b.loss).abs(), (a.grad_norm - b.grad_norm).abs());
            assert!(loss < 5e-3 && norm < 2e-2 * a.grad_norm, "{mesh}: {a:?} {b:?}");
        }
    }
}

#[test]
fn overflow_skips_the_step_on_all_ranks_and_halves_the_scale() {
    for mesh in MESHES {
        let (reports, applied, scale) =
            Training { factor: 4096.0, steps: 24, bad: None }.run(mesh, DType::F16).unwrap();
        let skipped = reports.iter().filter(|r| r.skipped).count();
        // Of 12 targets in a microbatch each has at most 4096 scale / 24 at its logits, and f16 ends at 65504.
        assert!((6..12).contains(&skipped), "{mesh}: {skipped} of {reports:?}");
        assert!(reports[..6].iter().all(|r| r.skipped), "{mesh}: {reports:?}");
        assert_eq!(applied as usize + skipped, 24);
        let mut factor = 65_536.0;
        for report in &reports {
            assert_eq!(report.loss_scale, Some(factor), "{mesh}");
            assert_eq!(report.skipped, !report.grad_norm.is_finite());
            assert!(report.loss.is_finite());
            factor /= if report.skipped { 2.0 } else { 1.0 };
        }
        assert_eq!(scale.factor(), factor);
        assert!(reports[23].loss < 0.9 * reports[0].loss, "{mesh}: the loss keeps falling");
    }
}

/// Whether a scaled 16-bit loss is finite would depend on the number of microbatches by which it is divided first.
#[test]
fn loss_of_16_bits_is_refused() {
    for dtype in [DType::F16, DType::BF16] {
        for mesh in ["", "dp=2", "pp=2"] {
            let run = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let plan = Plan::gpt2();
                let settings =
                    TrainerConfig { dtype: DType::F16, microbatches: 2, ..TrainerConfig::new(ROWS) };
                let read = |rank: &Rank, _: u64, rows: Range<usize>| Ok(vec![batch(rank, &plan, rows, 0)?]);
                let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[0]).cast(dtype);
                let module = Gpt2::new(&Setup::new().config);
                Trainer::new(rank, module, &plan, AdamW::new(3e-3), settings, read, loss)?.step()
            });
            let error = run.unwrap_err();
            assert_eq!(error.kind(), Kind::DType, "{mesh}: {error}");
            assert!(error.message().starts_with(&format!("the loss has dtype {dtype}")), "{mesh}: {error}");
            assert!(error.details()[0].1.contains("x.cast(DType::F32).mean()"), "{mesh}: {error}");
        }
    }
}

fn stopped(result: Result<Seen>) -> Error {
    let error = result.map(drop).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFinite);
    error
}

#[test]
fn overflow_at_minimal_scale_stops_the_run() {
    for mesh in ["", "dp=2", "pp=2"] {
        // An overflow of the loss itself stops the run at once.
        let nan = Training { factor: 1.0, steps: 3, bad: Some("ln_f.weight") };
        let error = stopped(nan.run(mesh, DType::F16));
        assert!(error.message().starts_with("step 1: the loss is NaN"), "{mesh}: {error}");
        // Gradients that overflow f16 at any scale stop the run once the scale is 1.
        let error = stopped(Training { factor: 1e8, steps: 40, bad: None }.run(mesh, DType::F16));
        assert!(error.message().starts_with("step 17: the loss is 2"), "{mesh}: {error}");
        assert!(error.details().contains(&("loss scale", "1".to_string())), "{mesh}: {error}");
        // Without loss scaling no step is skipped.
        let error = stopped(Training { factor: 1e39, steps: 3, bad: None }.run(mesh, DType::BF16));
        assert!(error.message().starts_with("step 1: "), "{mesh}: {error}");
    }
}
