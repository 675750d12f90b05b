//! Muon on every mesh: the bits of one rank where gradients have them, an independent loop over plain numbers, and what it
//! refuses.

use crate::support::run;
use shardgrad_autograd::Gradients;
use shardgrad_nn::optim::MuonScale;
use shardgrad_nn::{
    Init, Linear, Model, Muon, Optimizer, Optimizers, Param, Plan, Precision, Sgd, StepArgs, module,
};
use shardgrad_tensor::{DType, Kind, Mesh, Rank, Result, Tensor, World};

module! {
    /// Matrices of all kinds: wide, transposed in files, with a dim of heads, and a stack of experts.
    struct Matrices { up: Linear, down: Linear, heads: Linear, experts: Param }
}

impl Matrices {
    fn new() -> Matrices {
        let init = Init::Normal(1.0);
        Matrices {
            up: Linear::new(6, 10).without_bias().init(init),
            down: Linear::new(10, 4).with_transposed_file_shape().without_bias().init(init),
            heads: Linear::general(&[4], &[3, 3]).without_bias().init(init),
            experts: Param::new(&[3, 4, 5]).with_file_order(&[0, 2, 1]).init(init),
        }
    }
}

fn tensor_parallel() -> Plan {
    Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down").store("experts", "tp@0")
}

/// Meshes, and a plan for each: copies, sharded storage, tensor parallelism over rows, columns, heads and experts.
fn cases() -> Vec<(&'static str, Plan)> {
    let zero = || Plan::data_parallel("dp").store("*", "dp@0|=");
    vec![
        ("dp=2", Plan::data_parallel("dp")),
        ("dp=2", zero()),
        ("dp=3", zero().store("heads.weight", "dp@1")),
        ("tp=2", tensor_parallel()),
        ("dp=2,tp=2", Plan::data_parallel("dp").and(tensor_parallel())),
        ("tp=2,dp=3", tensor_parallel().and(Plan::data_parallel("dp")).store("up.weight", "dp@0")),
    ]
}

/// Gradients that are equal on every mesh: small integers that differ by step.
fn gradients(model: &Model<Matrices>, step: usize) -> Result<Gradients> {
    let gradient = |(p, param): (usize, &Param)| {
        let number = |i: usize| ((i * i + 7 * i + 5 * step + 3 * p) % 11) as f64 - 5.0;
        Ok((param.key(), Tensor::from_fn(model.rank(), &param.layout(), number)?))
    };
    model.params().iter().enumerate().map(gradient).collect()
}

/// The parameters after three clipped steps.
fn after_steps(rank: &Rank, plan: &Plan, precision: Precision, mut optim: Muon) -> Result<Vec<Vec<f64>>> {
    let model = Model::with_precision(rank, Matrices::new(), plan, 3, precision)?;
    for step in 0..3 {
        let args = StepArgs { clip: (step == 1).then_some(64.0), ..StepArgs::new(0.125) };
        optim.step(&model, gradients(&model, step)?, args)?;
    }
    model.params().iter().map(|param| param.tensor().to_f64()).collect()
}

#[test]
fn update_has_the_bits_of_one_rank() {
    let optim = || Muon::new(0.125).weight_decay(0.25).scale(MuonScale::MatchRmsAdamW);
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let precision = Precision::of(dtype);
        let steps = |mesh: &str, plan: &Plan| {
            let mut ranks = run(mesh, |rank| after_steps(rank, plan, precision, optim()));
            let first = ranks.swap_remove(0);
            assert!(ranks.iter().all(|other| *other == first), "{mesh}: ranks disagree");
            first
        };
        let alone = steps("", &Plan::new());
        for (mesh, plan) in cases() {
            // The gradient norm is a sum of integers, which is exact in any order.
            assert!(steps(mesh, &plan) == alone, "{dtype} on {mesh}");
        }
    }
}

/// A matrix of plain numbers.
#[derive(Clone)]
struct Plain {
    rows: usize,
    columns: usize,
    numbers: Vec<f64>,
}

impl Plain {
    fn from_fn(rows: usize, columns: usize, f: impl Fn(usize, usize) -> f64) -> Plain {
        let numbers = (0..rows * columns).map(|i| f(i / columns, i % columns)).collect();
        Plain { rows, columns, numbers }
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        self.numbers[i * self.columns + j]
    }

    fn transposed(&self) -> Plain {
        Plain::from_fn(self.columns, self.rows, |i, j| self.at(j, i))
    }

    fn times(&self, other: &Plain) -> Plain {
        Plain::from_fn(self.rows, other.columns, |i, j| {
            (0..self.columns).map(|k| self.at(i, k) * other.at(k, j)).sum()
        })
    }

    fn plus(&self, factor: f64, other: &Plain) -> Plain {
        Plain::from_fn(self.rows, self.columns, |i, j| self.at(i, j) + factor * other.at(i, j))
    }

    fn scaled(&self, factor: f64) -> Plain {
        Plain::from_fn(self.rows, self.columns, |i, j| factor * self.at(i, j))
    }

    fn orthogonalized(&self) -> Plain {
        if self.rows > self.columns {
            return self.transposed().orthogonalized().transposed();
        }
        let norm = self.numbers.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut x = self.scaled(1.0 / (norm + 1e-7));
        for _ in 0..5 {
            let a = x.times(&x.transposed());
            let b = a.scaled(-4.7750).plus(2.0315, &a.times(&a));
            x = x.scaled(3.4445).plus(1.0, &b.times(&x));
        }
        x
    }
}

/// Muon on the plain matrices of the model: number of matrices, rows, columns, and whether rows are outputs.
#[test]
fn update_matches_a_loop_over_plain_numbers() {
    let shapes = [(1, 6, 10, false), (1, 4, 10, true), (1, 4, 9, false), (3, 5, 4, true)];
    for (nesterov, scale) in [(true, MuonScale::Original), (false, MuonScale::MatchRmsAdamW)] {
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let precision = Precision::of(DType::F64);
            let model = Model::with_precision(rank, Matrices::new(), &tensor_parallel(), 3, precision)?;
            let mut optim = Muon::new(0.1).momentum(0.75).nesterov(nesterov).scale(scale).weight_decay(0.5);
            // Plain numbers in file order: rows and columns exchanged where files are transposed.
            let in_file_order =
                |count: usize, rows: usize, columns: usize, transposed: bool, numbers: &[f64]| {
                    let numel = rows * columns;
                    (0..count)
                        .map(|e| {
                            let own = numbers[e * numel..(e + 1) * numel].to_vec();
                            match transposed {
                                true => Plain { rows: columns, columns: rows, numbers: own }.transposed(),
                                false => Plain { rows, columns, numbers: own },
                            }
                        })
                        .collect::<Vec<Plain>>()
                };
            let plain = |p: usize, numbers: &[f64]| {
                let (count, rows, columns, transposed) = shapes[p];
                in_file_order(count, rows, columns, transposed, numbers)
            };
            let mut weights = Vec::new();
            for (p, param) in model.params().iter().enumerate() {
                weights.push(plain(p, &param.tensor().to_f64()?));
            }
            let mut velocities: Vec<Vec<Plain>> =
                weights.iter().map(|w| w.iter().map(|w| w.scaled(0.0)).collect()).collect();
            for step in 0..3 {
                let gradients = gradients(&model, step)?;
                for (p, param) in model.params().iter().enumerate() {
                    let (_, rows, columns, transposed) = shapes[p];
                    let (fan_in, fan_out) = if transposed { (columns, rows) } else { (rows, columns) };
                    let factor = match scale {
                        MuonScale::Original => (fan_out as f64 / fan_in as f64).max(1.0).sqrt(),
                        MuonScale::MatchRmsAdamW => 0.2 * (rows.max(columns) as f64).sqrt(),
                    };
                    let gradient = plain(p, &gradients[&param.key()].to_f64()?);
                    for (e, g) in gradient.iter().enumerate() {
                        let velocity = velocities[p][e].scaled(0.75).plus(0.25, g);
                        let update =
                            if nesterov { velocity.scaled(0.75).plus(0.25, g) } else { velocity.clone() };
                        velocities[p][e] = velocity;
                        let decayed = weights[p][e].scaled(1.0 - 0.1 * 0.5);
                        weights[p][e] = decayed.plus(-0.1 * factor, &update.orthogonalized());
                    }
                }
                optim.update(&model, gradients)?;
            }
            for (p, param) in model.params().iter().enumerate() {
                for (e, found) in plain(p, &param.tensor().to_f64()?).iter().enumerate() {
                    let differences =
                        found.numbers.iter().zip(&weights[p][e].numbers).map(|(a, b)| (a - b).abs());
                    let worst = differences.fold(0.0, f64::max);
                    assert!(worst < 1e-12, "{} {e}: {worst:e}", param.name());
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn vectors_are_refused_and_skipped_steps_change_nothing() {
    run("tp=2", |rank| {
        let model = Model::new(
            rank,
            Linear::new(4, 4),
            &Plan::new().store("weight", "tp@1").store("bias", "tp@0"),
            1,
        )?;
        let error = Muon::new(0.1).check_params(model.params()).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert_eq!(error.message(), "Muon updates matrices, but parameter `bias` has the shape [4]");
        assert!(error.to_string().contains(".otherwise(AdamW::new(3e-4))"), "{error}");
        model.freeze("bias")?;
        Muon::new(0.1).check_params(model.params())?;
        let skipped =
            StepArgs { losses: vec![Tensor::from_host(rank, &[], &[f32::NAN])?], ..StepArgs::new(0.1) };
        let mut optim = Optimizers::new().on("weight", Muon::new(0.1)).otherwise(Sgd::new(0.1));
        let gradient = Tensor::full(rank, &model.param("weight")?.layout(), 1.0)?;
        let before = model.param("weight")?.tensor().to_f64()?;
        let gradients = Gradients::from([(model.param("weight")?.key(), gradient)]);
        model.param("bias")?.set_frozen(false);
        let report = optim.step(&model, gradients, StepArgs { lr: 1.0, ..skipped })?;
        assert!(report.skipped && model.param("weight")?.tensor().to_f64()? == before);
        Ok(())
    });
}
