//! The exact mean over unequal counts: losses and gradients of random masks and weights on meshes, in microbatches, against one rank
//! that sees the whole batch. To rounding: the reference is one sum over the batch, without leaves.

use crate::support::{max_difference, run};
use approx::{abs_diff_eq, abs_diff_ne};
use proptest::prelude::*;
use shardgrad_autograd::Var;
use shardgrad_nn::loss::IGNORE_INDEX;
use shardgrad_nn::{
    CrossEntropy, ExpertsConfig, Gpt2Config, LanguageModel, Linear, LlamaConfig, LlamaKind, Loss,
    MicrobatchLosses, Model, ModelConfig, Optimizer, Plan, Precision, Sgd, StepArgs, StepReport, Trainer,
    TrainerConfig, module,
};
use shardgrad_tensor::{DType, Elementwise, Kind, Layout, Mesh, Rank, Result, Tensor, Value, World};
use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) const SEQ: usize = 4;
const VOCAB: usize = 7;
const SEED: u64 = 5;

/// Meshes, and whether their model has experts.
pub(crate) const MESHES: [(&str, bool); 14] = [
    ("", false),
    ("dp=2", false),
    ("dp=3", false),
    ("cp=2", false),
    ("tp=2", false),
    ("dp=2,cp=2", false),
    ("pp=2", false),
    ("pp=2,dp=2", false),
    ("pp=2,cp=2", false),
    ("ep=2", true),
    ("dp=2,ep=2", true),
    ("ep=2,cp=2", true),
    ("pp=2,ep=2", true),
    ("ep=3,tp=2", true),
];

/// Parameters or gradients by name.
type Named = BTreeMap<String, Vec<f64>>;

/// A batch of rows whose tokens count unequally.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    microbatches: usize,
    /// Rows of a microbatch.
    rows: usize,
    has_experts: bool,
    /// [`IGNORE_INDEX`] where a token does not count.
    labels: Vec<i64>,
    /// A weight for each token, if tokens are weighted.
    weights: Option<Vec<f64>>,
}

/// Numbers from a seed: splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

impl Case {
    /// Random masks: microbatches, rows and tokens without labels, and single tokens of theirs that are masked.
    pub(crate) fn random(
        microbatches: usize,
        rows: usize,
        has_experts: bool,
        is_weighted: bool,
        seed: u64,
    ) -> Case {
        let mut random = Random(seed);
        let empty_microbatch = random.below(2 * microbatches);
        let empty_row = random.below(2 * rows);
        let empty_token = random.below(2 * SEQ);
        let mut labels = Vec::new();
        for microbatch in 0..microbatches {
            let share = random.below(5);
            for row in 0..rows {
                for token in 0..SEQ {
                    let is_empty = microbatch == empty_microbatch || row == empty_row || token == empty_token;
                    let is_masked = is_empty || random.below(4) >= share;
                    labels.push(if is_masked { IGNORE_INDEX } else { random.below(VOCAB) as i64 });
                }
            }
        }
        if labels.iter().all(|label| *label == IGNORE_INDEX) {
            let last = labels.len() - 1;
            labels[last] = 3;
        }
        let weights = labels.iter().map(|_| (1 + random.below(1000)) as f64 / 300.0).collect();
        Case { microbatches, rows, has_experts, labels, weights: is_weighted.then_some(weights) }
    }

    /// Rows of the batch.
    pub(crate) fn num_rows(&self) -> usize {
        self.microbatches * self.rows
    }

    pub(crate) fn config(&self) -> ModelConfig {
        if self.has_experts {
            let config = LlamaConfig::new(LlamaKind::Mixtral, VOCAB, SEQ, [8, 5], 2, [2, 2]);
            LlamaConfig { experts: Some(ExpertsConfig::new(3, 2, 5)), ..config }.into()
        } else {
            Gpt2Config { initializer_range: 0.3, ..Gpt2Config::new(VOCAB, SEQ, 6, 2, 2) }.into()
        }
    }

    pub(crate) fn plan(&self) -> Plan {
        LanguageModel::plan(&self.config())
    }

    /// The arguments of the loss for some rows of the batch: ids, labels and weights.
    pub(crate) fn arguments(&self, rank: &Rank, rows: Range<usize>) -> Result<Vec<Tensor>> {
        let layout = |dtype| self.plan().batch_layout(rank.mesh(), dtype, &[rows.len(), SEQ]);
        let tokens = rows.start * SEQ..rows.end * SEQ;
        let ids: Vec<i64> = tokens.clone().map(|t| ((t * t + t / 3) % VOCAB) as i64).collect();
        let labels = &self.labels[tokens.clone()];
        let all = self.weights.clone().unwrap_or_else(|| vec![1.0; self.labels.len()]);
        Ok(vec![
            Tensor::from_global(rank, &layout(DType::I64)?, &ids)?,
            Tensor::from_global(rank, &layout(DType::I64)?, labels)?,
            Tensor::from_global(rank, &layout(DType::F64)?, &all[tokens])?,
        ])
    }

    fn loss(&self, model: &LanguageModel, x: &[Var]) -> Loss {
        if self.weights.is_none() {
            return model.masked_loss(&x[0], &x[1]);
        }
        let rows = CrossEntropy::MASKED.per_row(&model.forward(&x[0]), &x[1]);
        let weights = x[2].mul(&x[1].ne_scalar(IGNORE_INDEX as f64).cast(DType::F64));
        Loss::weighted(rows.mul(&weights).sum(), weights.sum())
    }

    /// The sum of the weights of all tokens that count.
    fn count(&self) -> f64 {
        let weight = |(i, label): (usize, &i64)| {
            let weight = self.weights.as_ref().map_or(1.0, |weights| weights[i]);
            if *label == IGNORE_INDEX { 0.0 } else { weight }
        };
        self.labels.iter().enumerate().map(weight).sum()
    }

    /// Loss and gradients of the whole batch on one rank, without a loss of a step.
    fn reference(&self) -> (f64, Named) {
        let mut ranks = run("", |rank| {
            let module = LanguageModel::new(&self.config());
            let model = Model::with_dtype(rank, module, &self.plan(), SEED, DType::F64)?;
            let tape = model.tape();
            let all = 0..self.num_rows();
            let x: Vec<Var> = self.arguments(rank, all)?.into_iter().map(|x| tape.constant(x)).collect();
            let rows = CrossEntropy::MASKED.per_row(&model.forward(&x[0]), &x[1]);
            let loss = rows.mul(&x[2]).sum().scale(1.0 / self.count());
            loss.backward()?;
            let gradients = tape.gradients();
            let of = |param: &shardgrad_nn::Param| {
                let gradient = gradients.get(&param.key()).map(Tensor::to_f64).transpose()?;
                Ok((param.name(), gradient.unwrap_or_else(|| vec![0.0; param.numel()])))
            };
            Ok((loss.item()?, model.params().iter().map(of).collect::<Result<Named>>()?))
        });
        ranks.swap_remove(0)
    }

    /// Report and gradients of a step of a trainer on a mesh.
    fn trained(&self, mesh: &str) -> (StepReport, Named) {
        let ranks = run(mesh, |rank| {
            let (config, plan) = (self.config(), self.plan());
            let settings = TrainerConfig {
                microbatches: self.microbatches,
                seed: SEED,
                dtype: DType::F64,
                ..TrainerConfig::new(self.num_rows())
            };
            let read = |rank: &Rank, _: u64, rows: Range<usize>| self.arguments(rank, rows);
            let loss = |model: &LanguageModel, x: &[Var]| self.loss(model, x);
            let module = LanguageModel::new(&config);
            let mut trainer = Trainer::new(rank, module, &plan, Sgd::new(1.0), settings, read, loss)?;
            let before = values(trainer.model())?;
            let report = trainer.step()?;
            Ok((report, descent(before, &values(trainer.model())?)))
        });
        merged(ranks)
    }

    /// Report and gradients of a step of a training loop without a trainer.
    fn looped(&self, mesh: &str) -> (StepReport, Named) {
        let ranks = run(mesh, |rank| {
            let module = LanguageModel::new(&self.config());
            let model = Model::with_dtype(rank, module, &self.plan(), SEED, DType::F64)?;
            let tape = model.tape().for_rounds(self.microbatches);
            let mut losses = MicrobatchLosses::new(self.microbatches);
            for microbatch in 0..self.microbatches {
                let rows = microbatch * self.rows..(microbatch + 1) * self.rows;
                let x: Vec<Var> = self.arguments(rank, rows)?.into_iter().map(|x| tape.constant(x)).collect();
                losses.backward(self.loss(&model, &x))?;
            }
            let before = values(&model)?;
            let args = losses.step_args(StepArgs::new(1.0))?;
            let report = Sgd::new(1.0).step(&model, tape.gradients(), args)?;
            Ok((report, descent(before, &values(&model)?)))
        });
        merged(ranks)
    }

    /// Panics unless a step equals the whole batch on one rank.
    fn assert_exact(
        &self,
        mesh: &str,
        (loss, expected): &(f64, Named),
        (report, gradients): &(StepReport, Named),
    ) {
        let what = || format!("{mesh}, {self:?}");
        let near = |found: f64, expected: f64| abs_diff_eq!(found, expected, epsilon = 1e-12);
        assert!(near(report.loss, *loss), "{}: loss {} instead of {loss}", what(), report.loss);
        let count = report.count.expect("the loss has a count");
        assert!(near(count, self.count()), "{}: {count} instead of {}", what(), self.count());
        assert!(self.weights.is_some() || count == self.count(), "{}: {count}", what());
        assert!(gradients.keys().eq(expected.keys()), "{}: {:?}", what(), gradients.keys());
        let mut squares = 0.0;
        for (name, gradient) in gradients {
            let worst = max_difference(gradient, &expected[name]);
            assert!(worst < 1e-12, "{}: the gradient of {name} differs by {worst:e}", what());
            squares += expected[name].iter().map(|x| x * x).sum::<f64>();
        }
        assert!(near(report.grad_norm, squares.sqrt()), "{}: norm {}", what(), report.grad_norm);
    }
}

/// The values of the parameters of this rank's stage.
fn values<M: shardgrad_nn::Module>(model: &Model<M>) -> Result<Named> {
    let local = model.params().iter().filter(|param| param.is_local());
    local.map(|param| Ok((param.name(), param.tensor().to_f64()?))).collect()
}

/// The gradients of a step of size 1: what it subtracts.
fn descent(before: Named, after: &Named) -> Named {
    let difference = |(name, old): (String, Vec<f64>)| {
        let gradient = old.iter().zip(&after[&name]).map(|(old, new)| old - new).collect();
        (name, gradient)
    };
    before.into_iter().map(difference).collect()
}

/// The report, which all ranks have, and the parameters of all stages, of which all holders have the same.
fn merged(ranks: Vec<(StepReport, Named)>) -> (StepReport, Named) {
    let (report, mut all) = ranks[0].clone();
    for (other, gradients) in ranks {
        assert_eq!(other, report);
        for (name, gradient) in gradients {
            let known = all.entry(name.clone()).or_insert_with(|| gradient.clone());
            assert_eq!(*known, gradient, "{name}");
        }
    }
    (report, all)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Equality with one rank's gradient of the whole batch, for random masks and weights on random meshes. Microbatches of one row
    /// leave ranks of `dp` and `ep` without rows.
    #[test]
    fn exact_mean_over_unequal_counts_on_every_mesh(
        mesh in 0..MESHES.len(),
        microbatches in 1usize..=8,
        rows in 1usize..=3,
        is_weighted: bool,
        seed: u64,
    ) {
        let (mesh, has_experts) = MESHES[mesh];
        let case = Case::random(microbatches, rows, has_experts, is_weighted, seed);
        let alone = case.reference();
        case.assert_exact(mesh, &alone, &case.trained(mesh));
        if !mesh.contains("pp") {
            case.assert_exact(mesh, &alone, &case.looped(mesh));
        }
    }
}

/// Labels of 3 microbatches of 2 rows: the second microbatch is empty, and so is the first row of each, which is the first rank's.
fn with_empty_parts(has_experts: bool) -> Case {
    let none = IGNORE_INDEX;
    let mut labels = vec![none; 3 * 2 * SEQ];
    labels[SEQ..2 * SEQ].copy_from_slice(&[1, none, 4, 6]);
    labels[5 * SEQ + 2] = 2;
    Case { microbatches: 3, rows: 2, has_experts, labels, weights: None }
}

#[test]
fn an_empty_microbatch_and_an_empty_rank_count_nothing() {
    for (mesh, has_experts) in MESHES {
        let case = with_empty_parts(has_experts);
        let found = case.trained(mesh);
        case.assert_exact(mesh, &case.reference(), &found);
        assert_eq!(found.0.count, Some(4.0));
    }
    // The mean of the means of the microbatches is another number, and NaN with an empty one.
    let case = with_empty_parts(false);
    let cut =
        Case { microbatches: 2, labels: [&case.labels[..2 * SEQ], &case.labels[4 * SEQ..]].concat(), ..case };
    let (exact, _) = cut.reference();
    let mean_of_means = run("", |rank| {
        let module = LanguageModel::new(&cut.config());
        let model = Model::with_dtype(rank, module, &cut.plan(), SEED, DType::F64)?;
        let tape = model.inference_tape();
        let mut sum = 0.0;
        for microbatch in 0..2 {
            let x = cut.arguments(rank, 2 * microbatch..2 * microbatch + 2)?;
            let x: Vec<Var> = x.into_iter().map(|x| tape.constant(x)).collect();
            sum += cut.loss(&model, &x).value().item()? / 2.0;
        }
        Ok(sum)
    });
    assert!(abs_diff_ne!(mean_of_means[0], exact, epsilon = 1e-3), "{mean_of_means:?} and {exact}");
}

#[test]
fn a_step_without_any_label_changes_nothing() {
    for mesh in ["", "dp=2", "pp=2"] {
        let labels = vec![IGNORE_INDEX; 2 * 2 * SEQ];
        let case = Case { microbatches: 2, rows: 2, has_experts: false, labels, weights: None };
        let (report, gradients) = case.trained(mesh);
        assert_eq!((report.loss, report.grad_norm, report.count), (0.0, 0.0, Some(0.0)), "{mesh}");
        assert!(!report.skipped && gradients.values().flatten().all(|x| *x == 0.0), "{mesh}");
    }
}

module! {
    /// Two matrices.
    struct Product { up: Linear, down: Linear }
}

/// Width of the rows of [`Product`].
const WIDTH: usize = 3;

/// Integers for a step of [`Product`]: rows of tokens, and their weights, whose sum is a power of two.
struct Integers {
    rows: usize,
    x: Vec<f64>,
    weights: Vec<f64>,
}

impl Integers {
    fn new(rows: usize, seed: u64) -> Integers {
        let mut random = Random(seed);
        let x = (0..rows * SEQ * WIDTH).map(|_| random.below(7) as f64 - 3.0).collect();
        let mut weights: Vec<f64> = (0..rows * SEQ).map(|_| random.below(4) as f64).collect();
        weights[0] = 1.0;
        let sum: f64 = weights.iter().sum();
        *weights.last_mut().expect("there are rows") += sum.log2().ceil().exp2() - sum;
        Integers { rows, x, weights }
    }

    /// Report and parameters after a step on a mesh.
    fn step(&self, mesh: &str, microbatches: usize) -> (StepReport, Named) {
        let ranks = run(mesh, |rank| {
            let plan = Plan::data_parallel("dp").and(Plan::data_parallel("ep"));
            let plan = plan.and(Plan::context_parallel("cp")).and(Plan::pipeline_parallel("pp"));
            let layers = || Linear::new(WIDTH, WIDTH).without_bias();
            let module = Product { up: layers(), down: layers() };
            let settings = TrainerConfig { microbatches, dtype: DType::F64, ..TrainerConfig::new(self.rows) };
            let read = |rank: &Rank, _: u64, rows: Range<usize>| {
                let part = |all: &[f64], shape: &[usize]| {
                    let layout = plan.batch_layout(rank.mesh(), DType::F64, shape)?;
                    let len = all.len() / self.rows;
                    Tensor::from_global(rank, &layout, &all[rows.start * len..rows.end * len])
                };
                let count = rows.len();
                Ok(vec![part(&self.x, &[count, SEQ, WIDTH])?, part(&self.weights, &[count, SEQ])?])
            };
            let loss = |model: &Product, x: &[Var]| {
                let y = model.down.forward(&model.up.forward(&x[0]));
                Loss::weighted(y.mul(&x[1].expand(2, WIDTH)).sum(), x[1].sum())
            };
            let mut trainer = Trainer::new(rank, module, &plan, Sgd::new(1.0), settings, read, loss)?;
            for (i, param) in trainer.model().params().iter().enumerate().filter(|(_, p)| p.is_local()) {
                let integers: Vec<f64> =
                    (0..WIDTH * WIDTH).map(|at| ((at * at + i) % 5) as f64 - 2.0).collect();
                param.set_tensor(Tensor::from_global(trainer.rank(), &param.layout(), &integers)?)?;
            }
            let report = trainer.step()?;
            Ok((report, values(trainer.model())?))
        });
        merged(ranks)
    }
}

#[test]
fn integers_with_a_power_of_two_as_count_have_the_same_bits_on_every_mesh() {
    let meshes =
        ["", "dp=2", "dp=3", "cp=2", "ep=2", "pp=2", "dp=2,cp=2", "pp=2,dp=2", "pp=2,cp=2", "ep=2,dp=2"];
    for microbatches in 1..=8 {
        let integers = Integers::new(2 * microbatches, microbatches as u64);
        let (report, params) = integers.step("", 1);
        let count = report.count.expect("the loss has a count");
        assert!(count.log2().fract() == 0.0 && report.grad_norm > 0.0, "{report:?}");
        assert!(params.values().flatten().any(|x| x.fract() != 0.0), "the count divides");
        for mesh in meshes {
            let found = integers.step(mesh, microbatches);
            assert_eq!(found, (report.clone(), params.clone()), "{mesh}, {microbatches} microbatches");
        }
    }
}

#[test]
fn f16_scales_the_sum_as_it_scales_a_mean() {
    for (mesh, microbatches) in [("", 1), ("", 2), ("dp=2", 4), ("pp=2", 4)] {
        let steps = |dtype: DType| {
            let case = Case::random(microbatches, 4 / microbatches, false, false, 11);
            let mut ranks = run(mesh, |rank| {
                let (config, plan) = (case.config(), case.plan());
                let settings = TrainerConfig {
                    microbatches,
                    dtype,
                    clip: Some(0.5),
                    param_dtype: Some(Precision::mixed(DType::F16).param_dtype),
                    ..TrainerConfig::new(4)
                };
                let read = |rank: &Rank, _: u64, rows: Range<usize>| case.arguments(rank, rows);
                let loss = |model: &LanguageModel, x: &[Var]| case.loss(model, x);
                let module = LanguageModel::new(&config);
                let mut trainer = Trainer::new(rank, module, &plan, Sgd::new(0.1), settings, read, loss)?;
                (0..4).map(|_| trainer.step()).collect::<Result<Vec<StepReport>>>()
            });
            ranks.swap_remove(0)
        };
        for (narrow, wide) in steps(DType::F16).iter().zip(steps(DType::F32)) {
            assert!(!narrow.skipped && narrow.loss_scale == Some(65_536.0), "{mesh}: {narrow:?}");
            let near = |a: f64, b: f64| abs_diff_eq!(a, b, epsilon = 0.02 * b.abs());
            assert!(
                near(narrow.loss, wide.loss) && near(narrow.grad_norm, wide.grad_norm),
                "{narrow:?} {wide:?}"
            );
            assert_eq!(narrow.count, wide.count);
        }
    }
}

#[test]
fn losses_of_different_forms_in_one_step_are_refused() {
    let refused = |second: fn(&Var) -> Loss| {
        let ended = World::run(Mesh::single(), |rank| {
            let model = Model::new(rank, Linear::new(1, 1), &Plan::new(), 1)?;
            let tape = model.tape();
            let x = tape.constant(Tensor::from_host(rank, &[2, 1], &[1.0f32, 2.0])?);
            let mut losses = MicrobatchLosses::new(2);
            losses.backward(model.forward(&x).mean())?;
            losses.backward(second(&model.forward(&x)))
        });
        let error = ended.unwrap_err();
        assert_eq!(error.kind(), Kind::Config, "{error}");
        error.message().to_string()
    };
    let message = refused(|y| Loss::weighted(y.sum(), y.sum()));
    assert!(message.starts_with("the loss of microbatch 1 is "), "{message}");
    let message = refused(|y| Loss::mean(y.mean()).also("mean", y.mean()));
    assert!(message.starts_with("the loss of microbatch 1 is "), "{message}");
    let message = refused(|y| Loss::mean(y.mean()).also("mean", y.mean()).also_sum("mean", y.sum()));
    assert_eq!(message, "the loss has two auxiliary outputs `mean`");
    let ended = World::run(Mesh::single(), |rank| {
        let zero = Tensor::zeros(rank, &Layout::invariant(rank.mesh(), DType::F64, &[2]))?;
        let model = Model::new(rank, Linear::new(1, 1), &Plan::new(), 1)?;
        let zero = model.tape().constant(zero);
        Ok(Loss::weighted(zero.sum(), zero).value().shape().len())
    });
    assert_eq!(ended.unwrap_err().message(), "the count of a weighted loss is f64[2], but must be a scalar");
    let few = MicrobatchLosses::new(2).step_args(StepArgs::new(0.1)).unwrap_err();
    assert_eq!(few.message(), "a step of 2 microbatches has 0 losses");
}
