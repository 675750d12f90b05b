//! The loop takes any optimizer: descent and a rule of one's own take the same steps on every mesh and on a pipeline.

use crate::support::{ROWS, Setup, batch, run};
use shardgrad_autograd::Var;
use shardgrad_nn::optim::Kept;
use shardgrad_nn::{AdamW, Gpt2, Optimizer, Param, Plan, Schedule, Settings, Sgd, Trainer};
use shardgrad_tensor::{DType, Elementwise, Kind, Mesh, Rank, Result, Tensor, Value, World};
use std::ops::Range;

/// w = w - lr sign(g) (Bernstein and others, arXiv 1802.04434).
#[derive(Debug, Default)]
struct Signs {
    num_steps: u64,
}

impl Optimizer for Signs {
    fn lr(&self) -> f64 {
        1e-3
    }

    fn describe(&self) -> String {
        format!("signs after {} steps", self.num_steps)
    }

    fn num_steps(&self) -> u64 {
        self.num_steps
    }

    fn begin(&mut self) {
        self.num_steps += 1;
    }

    fn change(&mut self, params: &[(&Param, Tensor)], lr: f64, _: f64) -> Result<()> {
        let sign = |gradient: &Tensor| gradient.sign().scale(lr);
        params.iter().try_for_each(|(param, gradient)| param.set_tensor(param.tensor().sub(&sign(gradient))))
    }
}

/// Losses and norms of some steps on one rank of a mesh, clipped.
fn run_with(rank: &Rank, optim: impl Optimizer) -> Result<Vec<[f64; 2]>> {
    let plan = Plan::gpt2();
    let settings =
        Settings { dtype: DType::F64, microbatches: 2, seed: 5, clip: Some(1.0), ..Settings::new(ROWS) };
    let read = |rank: &Rank, _: u64, rows: Range<usize>| {
        Ok(vec![batch(rank, &plan, rows.clone(), 0)?, batch(rank, &plan, rows, 1)?])
    };
    let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[1]);
    let module = Gpt2::new(&Setup::new().config);
    let mut trainer = Trainer::new(rank, module, &plan, optim, settings, read, loss)?;
    let mut found = Vec::new();
    for step in 0..4 {
        trainer.check_alike()?;
        let report = trainer.step(&[])?;
        assert_eq!((report.lr, trainer.optim().num_steps()), (trainer.optim().lr(), step + 1));
        found.push([report.loss, report.grad_norm]);
    }
    // A number that rides along is named if it alone is at fault, on every rank.
    let odd = if rank.index() == 0 { f64::NAN } else { 1.0 };
    let error = trainer.step(&[2.0, odd]).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFinite);
    let named = "step 5: control number 1 is NaN over all ranks; the step was not taken";
    assert_eq!(error.message(), named);
    Ok(found)
}

#[test]
fn every_optimizer_takes_the_same_steps_on_every_mesh() {
    let on = |mesh: &str, which: usize| {
        let ended = World::run(Mesh::parse(mesh).unwrap(), |rank| match which {
            0 => run_with(rank, Sgd::new(0.1).momentum(0.5).nesterov().weight_decay(0.1)),
            1 => run_with(rank, AdamW::new(0.01).weight_decay(0.1)),
            _ => run_with(rank, Signs::default()),
        });
        let mut ranks = ended.unwrap_or_else(|e| panic!("optimizer {which} on {mesh}: {e}"));
        let first = ranks.swap_remove(0);
        assert!(ranks.iter().all(|r| *r == first), "optimizer {which} on {mesh}: ranks disagree");
        first
    };
    for which in 0..3 {
        let alone = on("", which);
        assert!(alone[3][0] < alone[0][0], "optimizer {which}: {alone:?}");
        for mesh in ["dp=2", "tp=2", "pp=2", "dp=2,tp=2"] {
            let here = on(mesh, which);
            let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-8;
            let same = here.as_flattened().iter().zip(alone.as_flattened()).all(near);
            assert!(same, "optimizer {which} on {mesh}: {here:?} {alone:?}");
        }
    }
}

/// A trainer of the tiny model.
fn trainer<'t>(rank: &Rank, plan: &'t Plan, optim: impl Optimizer + 't) -> Result<Trainer<'t, Gpt2>> {
    let schedule = Some(Schedule::constant(0.01).warmup(2).linear(6, 0.001));
    let settings = Settings {
        dtype: DType::F64,
        microbatches: 2,
        seed: 5,
        schedule,
        clip: Some(1.0),
        ..Settings::new(ROWS)
    };
    let read = |rank: &Rank, step: u64, rows: Range<usize>| {
        let first = (step % 2) as usize;
        Ok(vec![batch(rank, plan, rows.clone(), first)?, batch(rank, plan, rows, 1)?])
    };
    let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[1]);
    Trainer::new(rank, Gpt2::new(&Setup::new().config), plan, optim, settings, read, loss)
}

#[test]
fn a_trainer_goes_on_with_what_another_kept() {
    let plan = Plan::gpt2();
    for (mesh, adam) in [("", true), ("dp=2,tp=2", true), ("pp=2", true), ("pp=2", false), ("tp=2", false)] {
        run(mesh, |rank| {
            let new = || match adam {
                true => trainer(rank, &plan, AdamW::new(0.01).weight_decay(0.1)),
                false => trainer(rank, &plan, Sgd::new(0.01).momentum(0.9)),
            };
            let (mut whole, mut second) = (new()?, new()?);
            let reports: Vec<_> = (0..5).map(|_| whole.step(&[])).collect::<Result<_>>()?;
            let mut first = new()?;
            first.step(&[])?;
            first.step(&[])?;
            let here = |t: &Trainer<'_, Gpt2>| -> Vec<Param> {
                t.model().params().iter().filter(|p| p.is_here()).cloned().collect()
            };
            let mut kept: Vec<(Param, Kept)> = Vec::new();
            for (from, to) in here(&first).iter().zip(here(&second)) {
                to.set_tensor(from.tensor())?;
                kept.extend(first.optim().kept(from).map(|kept| (to, kept)));
            }
            assert!(!kept.is_empty());
            second.optim_mut().go_on(first.optim().num_steps(), kept)?;
            second.skip_to(2);
            for report in &reports[2..] {
                assert_eq!(second.step(&[])?, *report, "{mesh}");
            }
            let none = vec![(here(&second)[0].clone(), Kept { num_steps: 1, tensors: Vec::new() })];
            assert_eq!(second.optim_mut().go_on(1, none).unwrap_err().kind(), Kind::Config);
            let mut signs = trainer(rank, &plan, Signs::default())?;
            assert_eq!(signs.optim_mut().go_on(1, Vec::new()).unwrap_err().kind(), Kind::Unsupported);
            Ok(())
        });
    }
}

#[test]
fn ranks_with_unlike_optimizers_are_told_so() {
    let ended = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        run_with(rank, Sgd::new(0.1).momentum(if rank.index() == 0 { 0.5 } else { 0.6 }))
    });
    let error = ended.unwrap_err();
    assert_eq!(error.kind(), Kind::Diverged);
    assert!(error.to_string().contains("optimizer"), "{error}");
}
