//! Optimizer steps on every mesh against a loop over plain numbers.

use crate::support::{Setup, near, run};
use crate::traces::{counts, traced};
use approx::abs_diff_eq;
use shardgrad_nn::optim::ParamGroup;
use shardgrad_nn::{AdamW, ControlFlags, Gpt2, Init, Model, Optimizer, Param, Plan, Sgd, StepArgs, module};
use shardgrad_tensor::{DType, Error, Kind, Result, Value};

module! {
    /// Two parameters, one of which has weight decay.
    struct Two { matrix: Param, vector: Param }
}

impl Two {
    fn new() -> Two {
        let normal = Init::Normal(1.0);
        Two { matrix: Param::new(&[5, 3]).init(normal), vector: Param::new(&[7]).init(normal) }
    }
}

/// AdamW on plain numbers, as in the paper.
struct Plain {
    w: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
    decay: f64,
    lr_scale: f64,
}

impl Plain {
    fn new(w: Vec<f64>, decay: f64, lr_scale: f64) -> Plain {
        Plain { m: vec![0.0; w.len()], v: vec![0.0; w.len()], w, decay, lr_scale }
    }

    fn step(&mut self, g: &[f64], lr: f64, t: i32) {
        let lr = lr * self.lr_scale;
        for (i, &g) in g.iter().enumerate() {
            self.m[i] = 0.8 * self.m[i] + 0.2 * g;
            self.v[i] = 0.9 * self.v[i] + 0.1 * g * g;
            let (m, v) = (self.m[i] / (1.0 - 0.8f64.powi(t)), self.v[i] / (1.0 - 0.9f64.powi(t)));
            self.w[i] -= lr * self.decay * self.w[i] + lr * m / (v.sqrt() + 1e-6);
        }
    }
}

/// Gradient of sum w^2 sin(k), which changes direction every step.
fn slope(w: &[f64], step: usize) -> Vec<f64> {
    w.iter().map(|w| 2.0 * w * (1.0 + step as f64).sin()).collect()
}

#[test]
fn adamw_matches_reference_loop() {
    for mesh in ["", "tp=2", "tp=3", "dp=2,tp=2"] {
        run(mesh, |rank| {
            let plan = Plan::new().store("matrix", "tp@1 dp@0").store("vector", "dp@0");
            let model = Model::with_dtype(rank, Two::new(), &plan, 1, DType::F64)?;
            let mut optim = AdamW::new(0.1).betas(0.8, 0.9).eps(1e-6).weight_decay(0.5);
            optim = optim.group("vec*", ParamGroup { lr_scale: Some(0.3), weight_decay: None });
            let mut plain = [
                Plain::new(model.matrix.tensor().to_f64()?, 0.5, 1.0),
                Plain::new(model.vector.tensor().to_f64()?, 0.0, 0.3),
            ];
            for step in 0..6 {
                let tape = model.tape();
                let (a, b) = (model.matrix.on_tape(&tape), model.vector.on_tape(&tape));
                let loss = a.square().sum().add(&b.square().sum()).scale((1.0 + step as f64).sin());
                loss.backward()?;
                let clip = (step % 2 == 1).then_some(0.75);
                let control = ControlFlags::new().flag("set", true).number("step", step as f64);
                let lr = 0.1 / (1 + step) as f64;
                let losses = vec![loss.tensor().clone()];
                let args = StepArgs { clip, losses, control, ..StepArgs::new(lr) };
                let report = optim.step(&model, tape.gradients(), args)?;
                assert!(near(report.loss, loss.item()?), "{mesh}: {} and {}", report.loss, loss.item()?);
                let mut grads = [slope(&plain[0].w, step), slope(&plain[1].w, step)];
                let norm = grads.iter().flatten().map(|g| g * g).sum::<f64>().sqrt();
                assert!(near(report.grad_norm, norm), "{mesh}: {} and {norm}", report.grad_norm);
                let ranks = rank.mesh().num_ranks() as f64;
                let sums = ["set", "step"].map(|name| report.control.get(name));
                assert_eq!((sums, report.skipped), ([ranks, ranks * step as f64], false));
                if let Some(most) = clip {
                    assert!(norm > most, "the clip is felt");
                    grads.iter_mut().flatten().for_each(|g| *g *= most / norm);
                }
                for (plain, (grad, param)) in
                    plain.iter_mut().zip(grads.iter().zip([&model.matrix, &model.vector]))
                {
                    plain.step(grad, lr, step as i32 + 1);
                    let got = param.tensor().to_f64()?;
                    assert!(abs_diff_eq!(got[..], plain.w[..], epsilon = 1e-12), "{mesh}: {got:?}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn sgd_matches_reference_loop_and_resumes() {
    run("tp=2", |rank| {
        let plan = Plan::new().store("matrix", "tp@0");
        let model = Model::with_dtype(rank, Two::new(), &plan, 1, DType::F64)?;
        let params = [&model.matrix, &model.vector];
        let mut w: Vec<Vec<f64>> = params.iter().map(|p| p.tensor().to_f64()).collect::<Result<_>>()?;
        let mut v: Vec<Vec<f64>> = w.iter().map(|w| vec![0.0; w.len()]).collect();
        let mut optim = Sgd::new(0.1).momentum(0.8).weight_decay(0.5);
        for step in 0..4 {
            let tape = model.tape();
            let (a, b) = (model.matrix.on_tape(&tape), model.vector.on_tape(&tape));
            a.square().sum().add(&b.square().sum()).backward()?;
            optim.update(&model, tape.gradients())?;
            for ((w, v), decay) in w.iter_mut().zip(&mut v).zip([0.5, 0.0]) {
                for (w, v) in w.iter_mut().zip(v) {
                    *v = 0.8 * *v + 2.0 * *w + decay * *w;
                    *w -= 0.1 * *v;
                }
            }
            for (param, w) in params.iter().zip(&w) {
                let got = param.tensor().to_f64()?;
                assert!(abs_diff_eq!(got[..], w[..], epsilon = 1e-12), "step {step}: {got:?}");
            }
            let velocities: Vec<_> =
                params.iter().map(|p| optim.velocity(p).expect("it has stepped")).collect();
            let saved = params.iter().copied().zip(velocities);
            let mut other = Sgd::new(0.1).momentum(0.8).weight_decay(0.5);
            other.restore(optim.num_steps(), saved)?;
            optim = other;
        }
        assert_eq!(optim.num_steps(), 4);
        Ok(())
    });
}

#[test]
fn non_finite_gradient_changes_nothing() {
    run("tp=2", |rank| {
        let model = Model::new(rank, Two::new(), &Plan::new().store("matrix", "tp@0"), 1)?;
        let mut optim = AdamW::new(0.1);
        let before = model.matrix.tensor().to_f64()?;
        let step = |optim: &mut AdamW, factor: f64, number: f64| {
            let tape = model.tape();
            model.matrix.on_tape(&tape).scale(factor).sum().backward()?;
            let control = ControlFlags::new().number("number", number);
            optim.step(&model, tape.gradients(), StepArgs { control, ..StepArgs::new(0.1) })
        };
        let here = if rank.index() == 1 { f64::NAN } else { 0.0 };
        assert!(step(&mut optim, f64::INFINITY, 0.0)?.skipped);
        assert!(step(&mut optim, 1.0, here)?.skipped, "the number of one rank stops all");
        assert_eq!((model.matrix.tensor().to_f64()?, optim.num_steps()), (before.clone(), 0));
        let tape = model.tape();
        model.matrix.on_tape(&tape).scale(f64::NAN).sum().backward()?;
        assert_eq!(optim.update(&model, tape.gradients()).unwrap_err().kind(), Kind::NotFinite);
        assert!(!step(&mut optim, 1.0, 0.0)?.skipped);
        assert_ne!(model.matrix.tensor().to_f64()?, before);
        Ok(())
    });
}

#[test]
fn frozen_parameters_are_unchanged_and_cost_nothing() {
    run("dp=2", |rank| {
        let setup = Setup::new();
        let model = setup.model(rank)?;
        assert_eq!(model.freeze("h.0.*")?, 12);
        assert!(model.freeze("h.7.*").is_err());
        let tape = model.tape();
        rank.trace().enable();
        setup.backward(&model, &tape)?;
        let gradients = tape.gradients();
        let records = rank.trace().take();
        let reduced: usize =
            records.iter().filter(|r| r.op == "all_reduce").map(|r| r.members().count()).sum();
        assert_eq!((gradients.len(), reduced), (16, 16 + 1), "one more for reading the loss");
        let before = model.param("h.0.mlp.c_fc.weight")?.tensor().to_f64()?;
        AdamW::new(0.1).update(&model, gradients)?;
        assert_eq!(model.param("h.0.mlp.c_fc.weight")?.tensor().to_f64()?, before);
        Ok(())
    });
}

#[test]
fn unfrozen_parameter_uses_its_own_step_count_for_bias_correction() {
    run("tp=2", |rank| {
        let step = |model: &Model<Two>, optim: &mut AdamW| {
            let tape = model.tape();
            let (a, b) = (model.matrix.on_tape(&tape), model.vector.on_tape(&tape));
            a.square().sum().add(&b.square().sum()).backward()?;
            optim.update(model, tape.gradients())
        };
        let plan = Plan::new().store("matrix", "tp@0");
        let model = || Model::with_dtype(rank, Two::new(), &plan, 1, DType::F64);
        let (late, mut optim) = (model()?, AdamW::new(0.1).betas(0.9, 0.9999));
        late.vector.set_frozen(true);
        for _ in 0..3 {
            step(&late, &mut optim)?;
        }
        late.vector.set_frozen(false);
        let mut again = AdamW::new(0.1).betas(0.9, 0.9999);
        for _ in 0..2 {
            step(&late, &mut optim)?;
            let states = late.params().iter().filter_map(|p| Some((p, optim.state(p)?)));
            again.restore(optim.num_steps(), states)?;
            std::mem::swap(&mut optim, &mut again);
        }
        let (fresh, mut from_the_start) = (model()?, AdamW::new(0.1).betas(0.9, 0.9999));
        for _ in 0..2 {
            step(&fresh, &mut from_the_start)?;
        }
        assert!(late.vector.tensor().to_f64()? == fresh.vector.tensor().to_f64()?);
        let steps = [&late.matrix, &late.vector].map(|p| optim.state(p).map(|state| state.num_steps));
        assert_eq!((steps, optim.num_steps()), ([Some(5), Some(2)], 5));
        Ok(())
    });
}

#[test]
fn frozen_shards_are_gathered_once_per_step() {
    run("dp=2", |rank| {
        let plan = Plan::new().store("*", "dp@0").compute("*", "dp=");
        let model = Model::new(rank, Two::new(), &plan, 1)?;
        model.matrix.set_frozen(true);
        let gathered = traced(rank, || {
            let tape = model.tape();
            for _ in 0..4 {
                let (matrix, vector) = (model.matrix.on_tape(&tape), model.vector.on_tape(&tape));
                matrix.square().sum().add(&vector.sum()).backward()?;
            }
            assert_eq!(tape.gradients().keys().collect::<Vec<_>>(), [&model.vector.key()]);
            Ok(())
        })?;
        assert_eq!(counts(&gathered), ["forward all_gather 2"]);
        Ok(())
    });
}

#[test]
fn adamw_resumes_from_restored_moments() {
    run("dp=2,tp=2", |rank| {
        let setup = Setup::new();
        let train = |model: &Model<Gpt2>, optim: &mut AdamW, steps: usize| {
            for _ in 0..steps {
                let tape = model.tape();
                setup.backward(model, &tape)?;
                optim.update(model, tape.gradients())?;
            }
            Ok::<(), Error>(())
        };
        let (uninterrupted, mut optim) = (setup.model(rank)?, AdamW::new(0.01));
        train(&uninterrupted, &mut optim, 4)?;
        let (first, mut optim) = (setup.model(rank)?, AdamW::new(0.01));
        train(&first, &mut optim, 2)?;
        let second = setup.model(rank)?;
        let mut again = AdamW::new(0.01);
        let pairs = second.params().iter().zip(first.params());
        for (to, from) in pairs.clone() {
            to.set_tensor(from.tensor())?;
        }
        again.restore(optim.num_steps(), pairs.filter_map(|(to, from)| Some((to, optim.state(from)?))))?;
        train(&second, &mut again, 2)?;
        for (a, b) in uninterrupted.params().iter().zip(second.params()) {
            assert!(a.tensor().to_f64()? == b.tensor().to_f64()?, "{}", a.name());
        }
        let swapped = [(&uninterrupted.params()[0], optim.state(&first.params()[3]).unwrap())];
        assert_eq!(again.restore(0, swapped).unwrap_err().kind(), Kind::Layout);
        Ok(())
    });
}

#[test]
fn bf16_parameters_train_with_f32_moments() {
    run("dp=2,tp=2", |rank| {
        let setup = Setup::new();
        let model = Model::with_dtype(rank, Gpt2::new(&setup.config), &setup.plan, 5, DType::BF16)?;
        let mut optim = AdamW::new(0.01);
        let mut losses = Vec::new();
        for _ in 0..8 {
            let tape = model.tape();
            losses.push(setup.backward(&model, &tape)?.0);
            optim.update(&model, tape.gradients())?;
        }
        assert!(losses[7] < losses[0] - 0.2, "{losses:?}");
        let [m, _] = optim.state(&model.params()[0]).unwrap().moments;
        assert_eq!((m.dtype(), model.params()[0].tensor().dtype()), (DType::F32, DType::BF16));
        Ok(())
    });
    let result = shardgrad_tensor::World::run(shardgrad_tensor::Mesh::single(), |rank| {
        Model::with_dtype(rank, Two::new(), &Plan::new(), 1, DType::I64).map(|_| ())
    });
    assert_eq!(result.unwrap_err().kind(), Kind::DType);
}
