//! Bits that do not depend on the number of data-parallel ranks and of microbatches, nor on pipelines: losses, counts, gradient norms, weights and
//! optimizer state, bit for bit.

use crate::llama;
use crate::save_and_load::Folder;
use crate::support::{SEQ, VOCAB, config, run};
use shardgrad_autograd::Var;
use shardgrad_nn::{
    AdamW, Deterministic, ExpertsConfig, Gpt2Config, LanguageModel, LlamaConfig, LlamaKind, Loss,
    ModelConfig, Optimizer, Plan, StateHash, Trainer, TrainerConfig, checkpoint,
};
use shardgrad_tensor::{DType, Elementwise, Kind, Rank, Result, Tensor, Value};
use shardgrad_testing::sample;
use std::ops::Range;
use std::path::Path;

/// The steps of a run. The second computes with updated weights, and its update with the moments of the first.
const STEPS: u64 = 2;

/// A run of a model with dropout, clipping and unequal numbers of labels.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) config: ModelConfig,
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    /// The tokens of a row.
    pub(crate) tokens: usize,
    pub(crate) deterministic: Deterministic,
    /// Whether the loss is a mean over the rows of a leaf rather than a sum with a count.
    pub(crate) is_mean: bool,
}

/// Losses, counts, norms and auxiliary outputs of each step as bits, and the hash of the last state.
pub(crate) type Bits = (Vec<[u64; 4]>, StateHash);

pub(crate) fn gpt2_with_dropout() -> Gpt2Config {
    Gpt2Config { initializer_range: 0.3, ..config() }.with_dropout(0.2)
}

pub(crate) fn gpt2() -> ModelConfig {
    gpt2_with_dropout().into()
}

impl Run {
    pub(crate) fn new(config: ModelConfig) -> Run {
        let deterministic = Deterministic::Mesh { batch_leaves: 12, sum_leaves: 8 };
        Run { config, dtype: DType::F32, rows: 24, tokens: SEQ, deterministic, is_mean: false }
    }

    pub(crate) fn trainer<'t>(
        &self,
        rank: &Rank,
        plan: &'t Plan,
        microbatches: usize,
    ) -> Result<Trainer<'t, LanguageModel>> {
        self.trainer_with(rank, plan, microbatches, AdamW::new(0.05).weight_decay(0.1))
    }

    /// [`Run::trainer`] with an optimizer.
    pub(crate) fn trainer_with<'t>(
        &self,
        rank: &Rank,
        plan: &'t Plan,
        microbatches: usize,
        optim: impl Optimizer + 't,
    ) -> Result<Trainer<'t, LanguageModel>> {
        let tokens = self.tokens;
        let read = move |rank: &Rank, step: u64, rows: Range<usize>| {
            let token = |row: usize, t: usize| {
                ((row * 7 + t * 5 + row * t * 3 + t * t + step as usize) % VOCAB) as i64
            };
            let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), tokens])?;
            // Row r has r % (tokens + 1) labels.
            let label = |row: usize, t: usize| if t < row % (tokens + 1) { token(row, t + 1) } else { -100 };
            let all = |of: &dyn Fn(usize, usize) -> i64| -> Vec<i64> {
                rows.clone().flat_map(|row| (0..tokens).map(move |t| of(row, t))).collect()
            };
            Ok(vec![
                Tensor::from_global(rank, &layout, &all(&token))?,
                Tensor::from_global(rank, &layout, &all(&label))?,
            ])
        };
        let settings = TrainerConfig {
            microbatches,
            dtype: self.dtype,
            seed: 3,
            clip: Some(0.5),
            deterministic: self.deterministic,
            ..TrainerConfig::new(self.rows)
        };
        let is_mean = self.is_mean;
        let loss = move |model: &LanguageModel, x: &[Var]| match is_mean {
            true => model.loss_from_batch(&[x[0].clone(), x[0].clone()]),
            false => {
                let loss: Loss = model.masked_loss(&x[0], &x[1]);
                loss.also_sum("labels", x[1].ne_scalar(-100.0).cast(DType::F32).sum())
            }
        };
        Trainer::new(rank, LanguageModel::new(&self.config), plan, optim, settings, read, loss)
    }

    /// Trains for some steps after a checkpoint, and saves one.
    fn train(&self, mesh: &str, microbatches: usize, steps: u64, folders: [Option<&Path>; 2]) -> Bits {
        self.train_as(&LanguageModel::plan(&self.config), mesh, microbatches, steps, folders)
    }

    /// [`Run::train`] by a plan.
    pub(crate) fn train_as(
        &self,
        plan: &Plan,
        mesh: &str,
        microbatches: usize,
        steps: u64,
        [from, to]: [Option<&Path>; 2],
    ) -> Bits {
        let ranks = run(mesh, |rank| {
            let mut trainer = self.trainer(rank, plan, microbatches)?;
            from.map(|from| trainer.resume(from)).transpose()?;
            let mut reports = Vec::new();
            for _ in 0..steps {
                let report = trainer.step()?;
                assert!(report.loss.is_finite() && report.grad_norm > 0.0 && !report.skipped);
                let labels = report.auxiliary.first().map_or(0.0, |(_, labels)| *labels);
                reports.push(
                    [report.loss, report.count.unwrap_or(0.0), report.grad_norm, labels].map(f64::to_bits),
                );
            }
            trainer.check_consistent()?;
            if let Some(to) = to {
                checkpoint::save(to, trainer.model(), trainer.optim(), &trainer.state(), &[])?;
            }
            Ok((reports, trainer.state_hash()?))
        });
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{mesh}: ranks disagree");
        ranks[0].clone()
    }

    fn bits(&self, mesh: &str, microbatches: usize) -> Bits {
        self.train(mesh, microbatches, STEPS, [None, None])
    }
}

/// Meshes and microbatches whose product divides 12 leaves: a rank holds 12, 6, 4, 3, 2 and 1 leaves, and sends one root or two.
const CUTS: [(&str, usize); 9] = [
    ("", 12),
    ("", 3),
    ("dp=2", 1),
    ("dp=2", 2),
    ("dp=3", 4),
    ("dp=3", 1),
    ("dp=4", 1),
    ("dp=6", 2),
    ("dp=12", 1),
];

/// Some of [`CUTS`]: a rank holds 12, 6, 3 and 2 leaves.
const FEW_CUTS: [(&str, usize); 4] = [("", 3), ("dp=2", 2), ("dp=4", 1), ("dp=6", 2)];

fn check_cuts(run: &Run, cuts: &[(&str, usize)], what: &str) -> Bits {
    let alone = run.bits("", 1);
    for &(mesh, microbatches) in cuts {
        assert_eq!(run.bits(mesh, microbatches), alone, "{what} on {mesh} in {microbatches} microbatches");
    }
    alone
}

#[test]
fn bits_are_those_of_one_rank_for_every_number_of_ranks_and_microbatches() {
    let of = |config: LlamaConfig| Run::new(config.into());
    let mixtral =
        LlamaConfig { experts: Some(ExpertsConfig::new(4, 2, 9)), ..llama::config(LlamaKind::Mixtral) };
    let f32 = check_cuts(&Run::new(gpt2()), &CUTS, "gpt2");
    let bf16 = check_cuts(&Run { dtype: DType::BF16, ..Run::new(gpt2()) }, &FEW_CUTS, "gpt2 in bf16");
    let mean = check_cuts(&Run { is_mean: true, ..Run::new(gpt2()) }, &FEW_CUTS, "gpt2 with a mean");
    let llama = check_cuts(&of(llama::config(LlamaKind::Llama)), &FEW_CUTS, "llama");
    let mixtral = check_cuts(&of(mixtral), &FEW_CUTS, "mixtral");
    let hashes = [f32, bf16, mean, llama, mixtral].map(|(_, hash)| hash);
    assert!((1..5).all(|i| !hashes[..i].contains(&hashes[i])), "the runs differ: {hashes:?}");
}

/// Six heads of 5 channels over width 30 and 11 tokens: neither divides 8 leaves.
fn wide_gpt2() -> ModelConfig {
    Gpt2Config { initializer_range: 0.3, ..Gpt2Config::new(VOCAB, 8, 30, 2, 6) }.with_dropout(0.2).into()
}

/// Six groups of two heads.
fn wide_llama() -> ModelConfig {
    let llama = LlamaConfig::new(LlamaKind::Llama, VOCAB, 8, [10, 7], 2, [12, 6]);
    LlamaConfig { head_dim: 4, initializer_range: 0.3, ..llama }.into()
}

/// Meshes of tensor-parallel ranks, alone and with data-parallel ranks, pipelines and microbatches.
const TENSOR_CUTS: [(&str, usize); 6] =
    [("tp=2", 1), ("tp=4", 3), ("dp=2,tp=2", 1), ("tp=2,dp=3", 2), ("dp=2,tp=4", 1), ("pp=2,tp=2", 3)];

/// Compares a run on the meshes, a sample with this number, with one rank.
fn check_tensor_cuts(run: &Run, what: &str, number: usize) {
    let alone = run.bits("", 1);
    for (mesh, microbatches) in sample(number, TENSOR_CUTS) {
        assert_eq!(run.bits(mesh, microbatches), alone, "{what} on {mesh} in {microbatches} microbatches");
    }
}

#[test]
fn bits_are_those_of_one_rank_for_every_number_of_tensor_parallel_ranks() {
    check_tensor_cuts(&Run::new(wide_gpt2()), "gpt2", 0);
    check_tensor_cuts(&Run::new(wide_llama()), "llama", 1);
}

#[test]
fn bits_in_bf16_are_those_of_one_rank_for_every_number_of_tensor_parallel_ranks() {
    check_tensor_cuts(&Run { dtype: DType::BF16, ..Run::new(wide_gpt2()) }, "gpt2 in bf16", 1);
    check_tensor_cuts(&Run { dtype: DType::BF16, ..Run::new(wide_llama()) }, "llama in bf16", 0);
}

/// Meshes whose tensor-parallel ranks hold 8, 12, 6 and 4 of 24 leaves: a node, or two.
const ODD_CUTS: [(&str, usize); 5] =
    [("tp=3", 1), ("dp=3,tp=2", 2), ("tp=4", 1), ("tp=6", 1), ("pp=2,tp=2", 3)];

/// Compares a run on the meshes, a sample with this number, with one rank.
fn check_odd_cuts(run: Run, what: &str, number: usize) {
    let run = Run { deterministic: Deterministic::Mesh { batch_leaves: 12, sum_leaves: 24 }, ..run };
    let alone = run.bits("", 1);
    for (mesh, microbatches) in sample(number, ODD_CUTS) {
        assert_eq!(run.bits(mesh, microbatches), alone, "{what} on {mesh} in {microbatches} microbatches");
    }
}

#[test]
fn bits_are_those_of_one_rank_where_a_rank_holds_several_nodes_of_a_sum() {
    check_odd_cuts(Run::new(wide_gpt2()), "gpt2", 0);
    check_odd_cuts(Run { dtype: DType::BF16, ..Run::new(wide_gpt2()) }, "gpt2 in bf16", 1);
    check_odd_cuts(Run::new(wide_llama()), "llama", 0);
}

#[test]
fn other_leaves_and_the_order_of_the_mesh_have_other_bits() {
    let run = Run::new(gpt2());
    let twelve = run.bits("", 1);
    let other = Run { deterministic: Deterministic::Mesh { batch_leaves: 6, sum_leaves: 8 }, ..run.clone() };
    assert_ne!(other.bits("", 1).1, twelve.1, "the number of leaves decides the order");
    let plain = Run { deterministic: Deterministic::Run, ..run };
    let differ = |mesh, microbatches| plain.bits(mesh, microbatches).1 != plain.bits("", 1).1;
    assert!(differ("dp=2", 1) && differ("", 2), "without canonical sums the mesh decides the order");
}

#[test]
fn pipelines_and_sharded_storage_have_the_bits_of_one_rank() {
    let mixtral: ModelConfig =
        LlamaConfig { experts: Some(ExpertsConfig::new(4, 2, 9)), ..llama::config(LlamaKind::Mixtral) }
            .into();
    let plan = |config: &ModelConfig| LanguageModel::plan(config);
    let untied = Gpt2Config { initializer_range: 0.3, tie_word_embeddings: false, ..config() };
    for (run, schedules, what) in [
        (Run::new(gpt2()), &["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved"][..], "gpt2"),
        (
            Run { dtype: DType::BF16, ..Run::new(untied.with_dropout(0.2).into()) },
            &["zb-h1"],
            "gpt2 in bf16, untied",
        ),
        (Run { is_mean: true, ..Run::new(mixtral) }, &["zb-v"], "mixtral with a mean"),
    ] {
        let alone = run.bits("", 1);
        for (number, schedule) in schedules.iter().enumerate() {
            let plan = plan(&run.config).pipeline_schedule(schedule);
            for mesh in sample(number, ["pp=2", "pp=2,dp=3"]) {
                let bits = run.train_as(&plan, mesh, 1, STEPS, [None, None]);
                assert_eq!(bits, alone, "{what} on {mesh} by {schedule}");
            }
        }
        for (more, mesh) in [
            (Plan::zero(1, "dp"), "dp=2"),
            (Plan::zero(2, "dp"), "dp=4"),
            (Plan::zero(3, "dp"), "dp=2"),
            (Plan::fsdp("fsdp"), "dp=3,fsdp=2"),
            (Plan::fsdp("fsdp"), "pp=2,dp=2,fsdp=2"),
        ] {
            let bits = run.train_as(&plan(&run.config).and(more), mesh, 1, STEPS, [None, None]);
            assert_eq!(bits, alone, "{what} with shards on {mesh}");
        }
    }
}

#[test]
fn run_that_resumes_on_another_number_of_ranks_ends_with_the_same_bits() {
    let (folder, run) = (Folder::new("canonical-resume"), Run::new(gpt2()));
    let (first, second) = (folder.0.join("first"), folder.0.join("second"));
    let (whole, hash) = run.train("dp=4", 1, 6, [None, None]);
    let mut parts = run.train("dp=2", 3, 2, [None, Some(&first)]).0;
    let sharded = LanguageModel::plan(&run.config).and(Plan::fsdp("fsdp"));
    parts.extend(run.train_as(&sharded, "dp=3,fsdp=2", 1, 1, [Some(&first), Some(&second)]).0);
    parts.extend(run.train("pp=2,dp=3", 1, 1, [Some(&second), Some(&first)]).0);
    let (last, resumed) = run.train("", 4, 2, [Some(&first), None]);
    parts.extend(last);
    assert_eq!((parts, resumed), (whole, hash));
}

#[test]
fn checkpoint_of_other_canonical_sums_is_refused() {
    let (folder, run) = (Folder::new("canonical-refused"), Run::new(gpt2()));
    let dir = folder.0.join("checkpoint");
    run.train("dp=2", 1, 1, [None, Some(&dir)]);
    let refused = |deterministic| {
        let run = Run { deterministic, ..run.clone() };
        let plan = LanguageModel::plan(&run.config);
        let errors =
            crate::support::run("", |rank| Ok(run.trainer(rank, &plan, 1)?.resume(&dir).unwrap_err()));
        assert_eq!(errors[0].kind(), Kind::Config);
        errors[0].message().to_string()
    };
    let text = refused(Deterministic::Mesh { batch_leaves: 6, sum_leaves: 8 });
    assert!(
        text.starts_with("sums are canonical over 6 leaves of the batch and 8 of other sums (version 1)"),
        "{text}"
    );
    let text = refused(Deterministic::Run);
    assert!(
        text.starts_with("sums are in the order of the mesh") && text.contains("canonical over 12 leaves"),
        "{text}"
    );
}

#[test]
fn evaluation_counts_rows_once_and_a_dry_run_records_the_collectives() {
    let run = Run::new(gpt2());
    let plan = LanguageModel::plan(&run.config);
    let losses = |mesh| {
        crate::support::run(mesh, |rank| {
            let trainer = run.trainer(rank, &plan, 1)?;
            let ids = crate::support::batch(trainer.rank(), &plan, 0..4, 0)?;
            let part = trainer.partial_loss(&[ids.clone(), ids])?;
            Ok((part.sum.to_bits(), part.count.map(f64::to_bits)))
        })
    };
    let alone = losses("")[0];
    assert_eq!(losses("dp=2"), [alone, (0, Some(0))]);
    shardgrad_tensor::World::new(shardgrad_tensor::Mesh::parse("dp=2").unwrap())
        .dry_run(1, |rank| {
            let mut trainer = run.trainer(rank, &plan, 1)?;
            rank.trace().enable();
            trainer.step()?;
            // Two roots of six leaves: an all-to-all and an all-gather for each gradient, of which the tied embedding has two, and for the
            // scalars; the comparison of copies; the squares of the gradients; the control word.
            let num_gradients = trainer.model().params().len() + 1;
            assert_eq!(rank.trace().take().len(), 2 * num_gradients + 2 + 1 + 2);
            Ok(())
        })
        .unwrap();
}
