//! Auxiliary outputs of a loss, accuracy over sharded classes, and inference with a trainer: on every mesh as on one rank.

use crate::exact_mean::{Case, MESHES, SEQ};
use crate::support::run;
use approx::abs_diff_eq;
use shardgrad_autograd::Var;
use shardgrad_nn::loss::IGNORE_INDEX;
use shardgrad_nn::metric::{accuracy, correct, top_k_correct};
use shardgrad_nn::{CrossEntropy, Deterministic, LanguageModel, Loss, Plan, Sgd, Trainer, TrainerConfig};
use shardgrad_tensor::{DType, Layout, Rank, Reduction, Result, Tensor, Value};
use shardgrad_testing::sample;
use std::ops::Range;

/// Leaves of the 12 rows of some cases and of other sums, for axes of 2 and 3 ranks.
const CANONICAL: Deterministic = Deterministic::Mesh { batch_leaves: 12, sum_leaves: 12 };

/// The number that every microbatch gets as an argument.
const ARGUMENT: f64 = 2.5;

fn trainer<'a>(
    case: &'a Case,
    rank: &Rank,
    microbatches: usize,
    deterministic: Deterministic,
) -> Result<Trainer<'a, LanguageModel>> {
    let settings = TrainerConfig {
        microbatches,
        seed: 5,
        dtype: DType::F64,
        deterministic,
        ..TrainerConfig::new(case.num_rows())
    };
    let read = |rank: &Rank, _: u64, rows: Range<usize>| {
        let mut all = case.arguments(rank, rows)?;
        all.push(Tensor::from_host(rank, &[], &[ARGUMENT])?);
        Ok(all)
    };
    let is_canonical = deterministic != Deterministic::Run;
    let loss = move |model: &LanguageModel, x: &[Var]| {
        let logits = model.forward(&x[0]);
        let (right, count) = CrossEntropy::MASKED.correct(&logits, &x[1]);
        let loss = CrossEntropy::MASKED.loss(&logits, &x[1]);
        let loss = loss.also_weighted("accuracy", right, count).also_sum("tokens", x[2].sum());
        // A mean over rows and over sharded classes has no canonical form.
        let loss = if is_canonical { loss } else { loss.also("logit", logits.mean()) };
        loss.also("argument", x[3].clone()).also_sum("labels", x[1].cast(DType::F64).sum())
    };
    let module = LanguageModel::new(&case.config());
    Trainer::new(rank, module, &case.plan(), Sgd::new(1.0), settings, read, loss)
}

/// In both modes: sums that follow the mesh are over microbatches, which may have fewer rows than ranks.
#[test]
fn auxiliary_outputs_do_not_depend_on_mesh_and_microbatches() {
    for has_experts in [false, true] {
        let outputs = |case: &Case, mesh: &str, microbatches: usize, deterministic: Deterministic| {
            let ranks = run(mesh, |rank| {
                let mut trainer = trainer(case, rank, microbatches, deterministic)?;
                let report = trainer.step()?;
                assert_eq!(report.auxiliary("tokens"), (case.num_rows() * SEQ) as f64);
                assert_eq!(report.auxiliary("argument"), ARGUMENT);
                Ok(report)
            });
            assert!(ranks.iter().all(|report| *report == ranks[0]), "{mesh}: {ranks:?}");
            ranks[0].auxiliary.clone()
        };
        let case = Case::random(4, 2, has_experts, false, 3);
        let expected = outputs(&case, "", 1, Deterministic::Run);
        let names: Vec<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["accuracy", "tokens", "logit", "argument", "labels"]);
        assert!((0.0..=1.0).contains(&expected[0].1), "{expected:?}");
        let many = Case::random(4, 3, has_experts, false, 3);
        let bits = |auxiliary: Vec<(String, f64)>| -> Vec<(String, u64)> {
            auxiliary.into_iter().map(|(name, number)| (name, number.to_bits())).collect()
        };
        let exact = bits(outputs(&many, "", 1, CANONICAL));
        let meshes = MESHES.into_iter().filter(|(_, experts)| *experts == has_experts);
        for (number, (mesh, _)) in meshes.enumerate() {
            for microbatches in sample(number, [1, 4, 8]) {
                let found = outputs(&case, mesh, microbatches, Deterministic::Run);
                let near = |((name, a), (other, b)): (&(String, f64), &(String, f64))| {
                    name == other && abs_diff_eq!(*a, *b, epsilon = 1e-12)
                };
                assert!(
                    found.len() == expected.len() && found.iter().zip(&expected).all(near),
                    "{mesh}, {microbatches}: {found:?} {expected:?}"
                );
            }
            assert_eq!(bits(outputs(&many, mesh, 1, CANONICAL)), exact, "{mesh}");
        }
    }
}

#[test]
fn auxiliary_outputs_change_no_gradient() {
    let case = Case::random(2, 2, false, false, 3);
    for mesh in ["", "dp=2", "pp=2"] {
        let losses = run(mesh, |rank| {
            let mut with = trainer(&case, rank, 2, Deterministic::Run)?;
            let read = |rank: &Rank, _: u64, rows: Range<usize>| case.arguments(rank, rows);
            let settings =
                TrainerConfig { microbatches: 2, seed: 5, dtype: DType::F64, ..TrainerConfig::new(4) };
            let loss = |model: &LanguageModel, x: &[Var]| model.masked_loss(&x[0], &x[1]);
            let module = LanguageModel::new(&case.config());
            let mut without = Trainer::new(rank, module, &case.plan(), Sgd::new(1.0), settings, read, loss)?;
            let mut found = Vec::new();
            for _ in 0..3 {
                found.push((with.step()?, without.step()?));
            }
            Ok(found)
        });
        for (with, without) in losses.into_iter().flatten() {
            assert_eq!((with.loss, with.grad_norm), (without.loss, without.grad_norm), "{mesh}");
        }
    }
}

#[test]
fn inference_with_a_trainer_equals_one_rank_on_every_mesh() {
    for has_experts in [false, true] {
        let case = Case::random(4, 3, has_experts, false, 4);
        let inferred = |mesh: &str| {
            let ranks = run(mesh, |rank| {
                let mut trainer = trainer(&case, rank, 1, CANONICAL)?;
                trainer.step()?;
                let mut found = Vec::new();
                for rows in [0..12, 0..1] {
                    let x = case.arguments(trainer.rank(), rows)?;
                    let class = trainer.infer(&x[..1], |model, x| model.forward(&x[0]).argmax(2))?;
                    let results = trainer.infer_all(&x, |model, x| {
                        let logits = model.forward(&x[0]);
                        vec![x[2].clone(), logits.clone(), logits.amax(&[0, 1, 2])]
                    })?;
                    found.push(class.to_f64()?);
                    for result in results {
                        found.push(result.to_f64()?);
                    }
                }
                trainer.step()?;
                Ok(found)
            });
            assert!(ranks.iter().all(|found| *found == ranks[0]), "{mesh}: ranks disagree");
            ranks[0].clone()
        };
        let expected = inferred("");
        assert_eq!(expected.len(), 8);
        for (mesh, _) in MESHES.into_iter().filter(|(_, experts)| *experts == has_experts) {
            assert_eq!(inferred(mesh), expected, "{mesh}");
        }
    }
}

#[test]
fn accuracy_over_sharded_classes_equals_that_of_one_rank() {
    const CLASSES: usize = 5;
    let logits: Vec<f32> = (0..8 * CLASSES).map(|i| ((i * i * 7 + i * 3) % 11) as f32).collect();
    let targets = [1i64, 1, IGNORE_INDEX, 4, 0, 1, IGNORE_INDEX, 0];
    // By hand: the classes of each row in descending order, the first of ties first.
    let orders: Vec<Vec<usize>> = logits
        .chunks(CLASSES)
        .map(|row| {
            let mut order: Vec<usize> = (0..CLASSES).collect();
            order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
            order
        })
        .collect();
    let hit = |k: usize| -> Vec<f64> {
        let is_hit = |(order, target): (&Vec<usize>, &i64)| order[..k].iter().any(|c| *c as i64 == *target);
        orders.iter().zip(&targets).map(|row| f64::from(u8::from(is_hit(row)))).collect()
    };
    assert!(hit(1).contains(&1.0) && hit(1) != hit(2) && hit(2) != hit(4), "{:?}", hit(1));
    let layouts = [
        ("", "f32[8, 5]"),
        ("tp=2", "f32[8, 5@tp]"),
        ("tp=7", "f32[8, 5@tp]"),
        ("dp=2,tp=3", "f32[8@dp, 5@tp]"),
        ("a=2,b=2", "f32[8, 5@b@a]"),
    ];
    for (mesh, text) in layouts {
        run(mesh, |rank| {
            let layout = Layout::parse(text, rank.mesh())?;
            let tape = shardgrad_autograd::Tape::inference(rank);
            let x = tape.constant(Tensor::from_global(rank, &layout, &logits)?);
            let rows = Plan::data_parallel("dp").batch_layout(rank.mesh(), DType::I64, &[8])?;
            let labels = tape.constant(Tensor::from_global(rank, &rows, &targets)?);
            assert_eq!(correct(&x, &labels).tensor().to_f64()?, hit(1), "{mesh}");
            for k in 1..=CLASSES {
                assert_eq!(top_k_correct(&x, &labels, k).tensor().to_f64()?, hit(k), "{mesh}, {k}");
            }
            let right: f64 = hit(1).iter().sum();
            assert_eq!(accuracy(&x, &labels).item()?, right / 8.0);
            let (sum, count) = CrossEntropy::MASKED.correct(&x, &labels);
            assert_eq!((sum.item()?, count.item()?), (right, 6.0));
            let (sum, count) = CrossEntropy::default().correct(&x, &labels);
            assert_eq!((sum.item()?, count.item()?), (right, 8.0));
            let loss = Loss::mean(x.mean()).also("accuracy", accuracy(&x, &labels));
            assert_eq!(loss.value().item()?, x.mean().item()?);
            Ok(())
        });
    }
}
