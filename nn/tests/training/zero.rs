//! ZeRO 1, 2 and 3, FSDP and hybrid sharding: losses, gradients and checkpoints as on one rank; collectives and bytes by formula. To
//! rounding: canonical sums replace these collectives, and `canonical_sums.rs` compares their bits.

use crate::llama;
use crate::save_and_load::Folder;
use crate::sharded_storage::{Deep, LAYERS, WIDTH};
use crate::support::{ROWS, batch, config, max_difference, run};
use crate::traces::traced;
use shardgrad_autograd::{Gradients, Tape, Var};
use shardgrad_nn::{
    AdamW, ExpertsConfig, Gpt2Config, Init, LanguageModel, LlamaConfig, LlamaKind, Model, ModelConfig,
    Optimizer, Param, Plan, Precision, Sgd, Trainer, TrainerConfig, checkpoint, module,
};
use shardgrad_tensor::{DType, Phase, Rank, Record, Result, Tensor, Value};
use shardgrad_testing::sample;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A run of a model on a mesh.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) config: ModelConfig,
    /// Added to the plan of the model.
    pub(crate) plan: Plan,
    pub(crate) mesh: &'static str,
    pub(crate) rows: usize,
    pub(crate) microbatches: usize,
    pub(crate) recompute: bool,
    /// The memory that a rank is assumed to have.
    pub(crate) rank_memory_bytes: Option<u64>,
}

impl Run {
    pub(crate) fn new(config: impl Into<ModelConfig>, plan: Plan, mesh: &'static str) -> Run {
        let (config, rank_memory_bytes) = (config.into(), None);
        Run { config, plan, mesh, rows: ROWS, microbatches: 2, recompute: false, rank_memory_bytes }
    }

    pub(crate) fn alone(&self) -> Run {
        Run { plan: Plan::new(), mesh: "", ..self.clone() }
    }

    pub(crate) fn trainer<'t>(
        &self,
        rank: &Rank,
        plan: &'t Plan,
        optim: impl Optimizer + 't,
        clip: Option<f64>,
    ) -> Result<Trainer<'t, LanguageModel>> {
        let read = move |rank: &Rank, step: u64, rows: Range<usize>| {
            let first = step as usize;
            Ok(vec![batch(rank, plan, rows.clone(), first)?, batch(rank, plan, rows, first + 1)?])
        };
        let settings = TrainerConfig {
            microbatches: self.microbatches,
            dtype: DType::F64,
            clip,
            rank_memory_bytes: self.rank_memory_bytes,
            ..TrainerConfig::new(self.rows)
        };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
        let module = LanguageModel::new(&self.config).recompute(self.recompute);
        Trainer::new(rank, module, plan, optim, settings, read, loss)
    }

    /// Losses, and the parameters after the last step.
    pub(crate) fn train<O: Optimizer + Clone + Sync>(
        &self,
        optim: &O,
        clip: Option<f64>,
        (from, steps, to): (Option<&Path>, usize, Option<&Path>),
    ) -> (Vec<f64>, BTreeMap<String, Vec<f64>>) {
        let plan = LanguageModel::plan(&self.config).and(self.plan.clone());
        let ranks = run(self.mesh, |rank| {
            let mut trainer = self.trainer(rank, &plan, optim.clone(), clip)?;
            if let Some(dir) = from {
                trainer.resume(dir)?;
            }
            let losses: Vec<f64> = (0..steps).map(|_| Ok(trainer.step()?.loss)).collect::<Result<_>>()?;
            if let Some(dir) = to {
                checkpoint::save(dir, trainer.model(), trainer.optim(), &trainer.state(), &[])?;
            }
            let here = trainer.model().params().iter().filter(|param| param.is_local());
            let values: Result<BTreeMap<_, _>> = here.map(|p| Ok((p.name(), p.tensor().to_f64()?))).collect();
            Ok((losses, values?))
        });
        let (losses, mut params) = (ranks[0].0.clone(), BTreeMap::new());
        for (others, values) in ranks {
            assert_eq!(losses, others, "{}: ranks disagree", self.mesh);
            for (name, value) in values {
                let known = params.entry(name).or_insert_with(|| value.clone());
                assert_eq!(*known, value, "{}: ranks disagree", self.mesh);
            }
        }
        (losses, params)
    }

    /// The initial parameters minus the gradients.
    pub(crate) fn after_one_plain_step(&self) -> BTreeMap<String, Vec<f64>> {
        self.train(&Sgd::new(1.0), None, (None, 1, None)).1
    }

    /// The losses of a few steps: in the third, weights depend on the moments of two steps.
    fn losses(&self) -> Vec<f64> {
        self.train(&AdamW::new(0.01).weight_decay(0.1), Some(1.0), (None, 4, None)).0
    }

    /// The results of the model on one rank.
    pub(crate) fn one_rank(&self) -> OneRank {
        let alone = self.alone();
        let losses = alone.losses();
        let untrained = alone.train(&AdamW::new(0.0), Some(1.0), (None, losses.len(), None)).0;
        assert!(losses[0] == untrained[0] && losses[1] != untrained[1], "nothing is trained: {losses:?}");
        OneRank { params: alone.after_one_plain_step(), losses }
    }

    /// Fails unless the gradients of a step, and the losses of some, are those of one rank.
    pub(crate) fn assert_like(&self, one: &OneRank) {
        let what = format!("{} with\n{}", self.mesh, self.plan);
        let many = self.after_one_plain_step();
        assert_eq!(one.params.len(), many.len(), "{what}");
        for (name, values) in &one.params {
            let worst = max_difference(values, &many[name]);
            assert!(worst < 1e-12, "{what}: the gradient of {name} differs by {worst:e}");
        }
        let worst = max_difference(&one.losses, &self.losses());
        assert!(worst < 1e-9, "{what}: losses differ by {worst:e}");
    }
}

/// A run on one rank: the initial parameters minus the gradients, and the losses of some steps.
pub(crate) struct OneRank {
    params: BTreeMap<String, Vec<f64>>,
    losses: Vec<f64>,
}

pub(crate) fn mixtral() -> LlamaConfig {
    LlamaConfig { experts: Some(ExpertsConfig::new(4, 2, 9)), ..llama::config(LlamaKind::Mixtral) }
}

/// Plans and meshes, on which no dim of the models is divisible by all axes.
fn styles() -> Vec<(Plan, &'static str)> {
    let zero = |stage| Plan::zero(stage, "dp");
    vec![
        (zero(1), "dp=2"),
        (zero(2), "dp=2"),
        (zero(3), "dp=2"),
        (zero(2), "dp=3"),
        (zero(3), "dp=3"),
        (Plan::new(), "fsdp=2"),
        (Plan::new(), "fsdp=4"),
        (Plan::new(), "dp=2,fsdp=2"),
        (zero(1), "dp=2,tp=2"),
        (zero(2), "dp=2,tp=2"),
        (Plan::new(), "fsdp=2,tp=2"),
        (Plan::new(), "fsdp=2,cp=2"),
        (zero(1), "pp=2,dp=2"),
        (zero(2), "pp=2,dp=2"),
        (zero(3), "pp=2,dp=2"),
        (Plan::new().pipeline_schedule("zb-h1"), "pp=2,fsdp=2"),
        (Plan::new(), "pp=2,dp=2,fsdp=2"),
    ]
}

#[test]
fn gpt2_trains_as_on_one_rank() {
    let one = Run::new(config(), Plan::new(), "").one_rank();
    for (plan, mesh) in styles() {
        Run::new(config(), plan, mesh).assert_like(&one);
    }
    for (plan, mesh) in
        [(Plan::zero(1, "dp"), "dp=2"), (Plan::zero(2, "dp"), "dp=2"), (Plan::new(), "fsdp=2")]
    {
        Run { recompute: true, ..Run::new(config(), plan, mesh) }.assert_like(&one);
    }
}

#[test]
fn llama_trains_as_on_one_rank() {
    let one = Run::new(llama::config(LlamaKind::Llama), Plan::new(), "").one_rank();
    for (plan, mesh) in sample(1, styles()) {
        Run::new(llama::config(LlamaKind::Llama), plan, mesh).assert_like(&one);
    }
}

#[test]
fn mixtral_trains_as_on_one_rank() {
    let one = Run::new(mixtral(), Plan::new(), "").one_rank();
    for (plan, mesh) in [
        (Plan::zero(1, "dp"), "dp=2,ep=2"),
        (Plan::zero(2, "dp"), "dp=2,ep=2"),
        (Plan::new(), "fsdp=2,ep=2"),
        (Plan::new(), "fsdp=3"),
        (Plan::new(), "fsdp=2,ep=2,tp=2"),
        (Plan::zero(2, "dp"), "pp=2,dp=2,ep=2"),
    ] {
        Run::new(mixtral(), plan, mesh).assert_like(&one);
    }
}

#[test]
fn checkpoints_resume_in_every_other_style() {
    let folder = Folder::new("zero");
    let optim = AdamW::new(0.02).weight_decay(0.1);
    let whole = Run::new(config(), Plan::new(), "").train(&optim, Some(1.0), (None, 5, None));
    let styles = [
        (Plan::new(), ""),
        (Plan::new(), "dp=2"),
        (Plan::zero(1, "dp"), "dp=3"),
        (Plan::zero(2, "dp"), "dp=2,tp=2"),
        (Plan::zero(3, "dp").gathered_bytes_max(0), "pp=2,dp=2"),
        (Plan::new(), "fsdp=2"),
        (Plan::new().pipeline_schedule("zb-h1"), "pp=2,fsdp=2"),
        (Plan::new(), "dp=2,fsdp=2"),
    ];
    let dir = |style: usize| folder.0.join(format!("checkpoint-{style}"));
    let first: Vec<Vec<f64>> = styles
        .iter()
        .enumerate()
        .map(|(i, (plan, mesh))| {
            let first = Run::new(config(), plan.clone(), mesh);
            first.train(&optim, Some(1.0), (None, 3, Some(&dir(i)))).0
        })
        .collect();
    for (i, losses) in first.iter().enumerate() {
        let others = styles.iter().enumerate().filter(|(j, _)| *j != i);
        for (_, (plan, mesh)) in sample(i, others) {
            let second = Run::new(config(), plan.clone(), mesh);
            let (rest, params) = second.train(&optim, Some(1.0), (Some(&dir(i)), 2, None));
            let losses = [&losses[..], &rest[..]].concat();
            let what = format!("{} with\n{}then {mesh} with\n{plan}", styles[i].1, styles[i].0);
            assert!(max_difference(&losses, &whole.0) < 1e-10, "{what}: {losses:?}");
            for (name, values) in &whole.1 {
                assert!(max_difference(values, &params[name]) < 1e-9, "{what}: {name}");
            }
        }
    }
}

/// The number of elements of the sharded parameters of the layers.
pub(crate) const PARAMS: usize = LAYERS * (WIDTH * WIDTH + WIDTH);
/// The elements of one layer, which is a gather group.
pub(crate) const GROUP: usize = PARAMS / LAYERS;

fn deep(rank: &Rank, plan: &Plan, precision: Precision) -> Result<Model<Deep>> {
    Model::with_precision(rank, Deep::new(), plan, 1, precision)
}

/// Runs forward and backward of a microbatch of `rows` rows.
fn microbatch(model: &Model<Deep>, plan: &Plan, tape: &Tape, rows: usize, recompute: bool) -> Result<()> {
    let layout = plan.batch_layout(model.rank().mesh(), model.dtype(), &[rows, WIDTH])?;
    let x = Tensor::from_fn(model.rank(), &layout, |i| (i % 13) as f64 / 13.0)?;
    model.forward(&tape.constant(x), recompute)?.backward()
}

/// The collectives of a step on rank 0: phase, op, number of calls and bytes.
fn collectives(plan: &Plan, mesh: &str, microbatches: usize, recompute: bool) -> Vec<(String, usize, u64)> {
    let plan = Plan::data_parallel("dp").and(plan.clone());
    let mut records = run(mesh, |rank| {
        let model = deep(rank, &plan, Precision::of(DType::F64))?;
        traced(rank, || {
            let tape = model.tape().for_rounds(microbatches);
            for _ in 0..microbatches {
                microbatch(&model, &plan, &tape, ROWS, recompute)?;
            }
            assert_eq!(tape.gradients().len(), model.params().len());
            Ok(())
        })
    })
    .swap_remove(0);
    // The scalar is a copy on every rank.
    records.retain(|r: &Record| r.phase != Phase::Control && r.numel() > 1);
    let mut totals: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for record in &records {
        let total = totals.entry(format!("{:?} {}", record.phase, record.op).to_lowercase()).or_default();
        *total = (total.0 + record.members().count(), total.1 + record.bytes);
    }
    totals.into_iter().map(|(name, (calls, bytes))| (name, calls, bytes)).collect()
}

/// Bytes of `params` elements in f64 that a rank of N receives in an all-gather, or sends in a reduce-scatter.
pub(crate) fn moved(params: usize, ranks: usize) -> u64 {
    (params * 8 / ranks * (ranks - 1)) as u64
}

#[test]
fn collectives_and_bytes_follow_closed_formulas() {
    let tensors = 2 * LAYERS;
    let line = |name: &str, calls: usize, bytes: u64| (name.to_string(), calls, bytes);
    let weights = PARAMS - LAYERS * WIDTH;
    for (mesh, n) in [("dp=2", 2), ("dp=4", 4)] {
        for m in [1, 2, 3] {
            let of = |stage, recompute| collectives(&Plan::zero(stage, "dp"), mesh, m, recompute);
            let once = moved(PARAMS, n);
            let scattered =
                |times: usize| line("backward reduce_scatter", times * tensors, times as u64 * once);
            // All parameters are small, and travel together.
            let gathered = || line("forward all_gather", 1, once);
            for recompute in [false, true] {
                assert_eq!(of(1, recompute), [scattered(1), gathered()], "stage 1, {mesh}, {m}, {recompute}");
                assert_eq!(of(2, recompute), [scattered(m), gathered()], "stage 2, {mesh}, {m}, {recompute}");
            }
            // The weight and the bias of a group travel together.
            let gathered = |times: usize| line("forward all_gather", times * LAYERS, times as u64 * once);
            // Backward gathers neither biases, nor the first weight, whose input has no gradient, nor the last group, which is still
            // there.
            let again = m as u64 * moved(weights / LAYERS * (LAYERS - 2), n);
            let again = line("backward all_gather", m * (LAYERS - 2), again);
            assert_eq!(of(3, false), [again, scattered(m), gathered(m)], "stage 3, {mesh}, {m}");
            // A recomputed block needs all its parameters.
            let again = m as u64 * moved(GROUP * (LAYERS - 1), n);
            let again = line("backward all_gather", m * (LAYERS - 1), again);
            assert_eq!(of(3, true), [again, scattered(m), gathered(m)], "stage 3 with blocks, {mesh}, {m}");
        }
    }
    // Hybrid: shards travel over fsdp with each microbatch, and the sums of their gradients over dp once.
    let m = 3;
    let hybrid = collectives(&Plan::fsdp("fsdp"), "dp=2,fsdp=2", m, false);
    let again = m as u64 * moved(weights / LAYERS * (LAYERS - 2), 2);
    let expected = [
        line("backward all_gather", m * (LAYERS - 2), again),
        // 2 (N - 1) / N of the gradients of a shard.
        line("backward all_reduce", tensors, (PARAMS / 2 * 8) as u64),
        line("backward reduce_scatter", m * tensors, m as u64 * moved(PARAMS, 2)),
        line("forward all_gather", m * LAYERS, m as u64 * moved(PARAMS, 2)),
    ];
    assert_eq!(hybrid, expected);
}

#[test]
fn pipeline_stages_gather_once_and_reduce_as_stated() {
    for (stage, zero) in [(1, Plan::zero(1, "dp")), (2, Plan::zero(2, "dp")), (3, Plan::zero(3, "dp"))] {
        let case = Run::new(config(), zero, "pp=2,dp=2");
        let plan = LanguageModel::plan(&case.config).and(case.plan.clone());
        let counts = run(case.mesh, |rank| {
            let mut trainer = case.trainer(rank, &plan, Sgd::new(0.1), None)?;
            let records = traced(rank, || trainer.step().map(drop))?;
            // The first update also compares the copies of gradients and parameters.
            let is_of_step = |r: &&Record| r.phase != Phase::Control && r.numel() > 1;
            let of = |op: &str| -> usize {
                let calls = records.iter().filter(is_of_step).filter(|r| r.op == op);
                calls.map(|r| r.members().count()).sum()
            };
            let here = trainer.model().params().iter().filter(|p| p.is_local()).count();
            Ok((here, of("all_gather"), of("reduce_scatter")))
        });
        let times = if stage == 1 { 1 } else { case.microbatches };
        for (here, gathers, reductions) in counts {
            assert_eq!((gathers, reductions), (here, times * here), "stage {stage}");
        }
    }
}

#[test]
fn small_parameters_that_a_step_keeps_share_a_gather() {
    // A table of more than 64 KiB among small parameters.
    let config = Gpt2Config::new(2400, 8, 8, 2, 2);
    for (plan, mesh) in [
        (Plan::zero(1, "dp"), "dp=2"),
        (Plan::zero(2, "dp"), "dp=2"),
        (Plan::zero(1, "dp"), "dp=2,tp=2"),
        (Plan::zero(2, "dp"), "pp=2,dp=2"),
        (Plan::zero(3, "dp"), "pp=2,dp=2"),
        (Plan::new(), "pp=2,dp=2,fsdp=2"),
    ] {
        let case = Run::new(config.clone(), plan, mesh);
        let plan = LanguageModel::plan(&case.config).and(case.plan.clone());
        let gathers = run(mesh, |rank| {
            let mut trainer = case.trainer(rank, &plan, Sgd::new(0.1), None)?;
            let mut records = traced(rank, || trainer.step().map(drop))?;
            records.retain(|r| r.op == "all_gather" && r.phase == Phase::Forward && r.numel() > 1);
            let here = trainer.model().params().iter().filter(|p| p.is_local()).count();
            Ok((here, records.iter().map(|r| r.members().count()).collect::<Vec<_>>()))
        });
        for (here, mut members) in gathers {
            members.sort_unstable();
            // The last stage may have the table alone.
            let expected = [1, here - 1];
            let expected = if here == 1 { &expected[..1] } else { &expected };
            assert_eq!(members, expected, "{mesh} with\n{}", case.plan);
        }
        case.assert_like(&case.one_rank());
    }
}

#[test]
fn one_group_is_gathered_ahead() {
    let plan = Plan::fsdp("fsdp");
    let paths = run("fsdp=2", |rank| {
        let model = deep(rank, &plan, Precision::of(DType::F64))?;
        let groups = model.gather_groups();
        assert_eq!(
            (groups[1].0, &groups[1].1[..]),
            ("layers.1", &["layers.1.weight".to_string(), "layers.1.bias".into()][..])
        );
        assert_eq!(groups.len(), LAYERS, "a scalar is not sharded");
        let layout = plan.batch_layout(rank.mesh(), DType::F64, &[ROWS, WIDTH])?;
        let tape = model.tape();
        let mut x = tape.constant(Tensor::full(rank, &layout, 0.5)?);
        let mut paths = Vec::new();
        // Out of order in the first pass: the expected order is then that of the pass before.
        for order in [[1, 0, 2, 4], [1, 0, 2, 4]] {
            for layer in order {
                let records = traced(rank, || {
                    x = model.layers[layer].forward(&x);
                    Ok(())
                })?;
                paths.push((layer, records.into_iter().map(|r| r.path).collect::<Vec<_>>()));
            }
            x.square().mean().backward()?;
            x = tape.constant(Tensor::full(rank, &layout, 0.5)?);
        }
        Ok(paths)
    })
    .swap_remove(0);
    let of = |layer: usize, names: &[&str]| {
        (layer, names.iter().map(|n| format!("layers.{n}")).collect::<Vec<_>>())
    };
    assert_eq!(paths[..4], [of(1, &["1", "2"]), of(0, &["0"]), of(2, &["2", "3"]), of(4, &["4", "5"])]);
    assert_eq!(paths[4..], [of(1, &["1", "0"]), of(0, &["2"]), of(2, &["4"]), of(4, &[])]);
}

module! {
    /// Three gather groups.
    struct Three { first: Param, second: Param, third: Param }
}

#[test]
fn forward_pass_goes_on_while_the_next_group_waits_for_other_ranks() {
    let (numel, plan) = (1 << 16, Plan::fsdp("fsdp"));
    let has_passed = AtomicBool::new(false);
    let sums = run("fsdp=2", |rank| {
        let [first, second, third] = [(); 3].map(|()| Param::new(&[numel]).init(Init::Normal(1.0)));
        let model = Model::new(rank, Three { first, second, third }, &plan, 1)?;
        let tape = model.tape();
        let first = model.first.on_tape(&tape);
        // Rank 0 passes the second group only if it does not wait for the third.
        while rank.index() == 1 && !has_passed.load(Ordering::SeqCst) {
            rank.check();
            std::thread::sleep(Duration::from_millis(1));
        }
        let second = model.second.on_tape(&tape);
        has_passed.store(true, Ordering::SeqCst);
        let sum = first.mul(&second).mul(&model.third.on_tape(&tape)).sum();
        sum.backward()?;
        assert_eq!(tape.gradients().len(), 3);
        sum.tensor().item()
    });
    let alone = run("", |rank| {
        let [first, second, third] = [(); 3].map(|()| Param::new(&[numel]).init(Init::Normal(1.0)));
        let model = Model::new(rank, Three { first, second, third }, &plan, 1)?;
        let tape = model.tape();
        let [first, second, third] = [&model.first, &model.second, &model.third].map(|p| p.on_tape(&tape));
        first.mul(&second).mul(&third).sum().tensor().item()
    });
    assert!(sums[0] == sums[1] && sums[0] == alone[0], "{sums:?} {alone:?}");
}

/// Bytes that a rank holds, counted by its allocator: between two microbatches of a step, and at the peak of the step.
fn held(plan: &Plan, mesh: &str, num_layers: usize) -> (usize, usize) {
    let plan = Plan::data_parallel("dp").and(plan.clone());
    let held = |rank: &Rank| {
        let before = rank.backend().memory().in_use_bytes;
        let module = Deep::with_layers(num_layers);
        let model = Model::with_precision(rank, module, &plan, 1, Precision::mixed(DType::BF16))?;
        let mut optim = AdamW::new(1e-3);
        let mut between = 0;
        for _ in 0..2 {
            // The second step holds the optimizer state, which the first one makes.
            let tape = model.tape();
            microbatch(&model, &plan, &tape, ROWS, true)?;
            between = rank.backend().memory().in_use_bytes - before;
            microbatch(&model, &plan, &tape, ROWS, true)?;
            let gradients: Gradients = tape.gradients();
            optim.update(&model, gradients)?;
        }
        Ok((between, rank.backend().memory().peak_bytes - before))
    };
    run(mesh, held).into_iter().max().expect("a mesh has a rank")
}

#[test]
fn bytes_per_rank_follow_closed_formulas() {
    // Parameters, gradients and two moments in f32, and the computed form in bf16.
    let near = |bytes: usize, formula: usize| bytes >= formula && bytes < formula + 2048;
    let p = PARAMS;
    for (mesh, n) in [("dp=2", 2), ("dp=4", 4)] {
        // A bucket would hold gradients of all layers of so small a model.
        let held = |plan: Plan| held(&plan.gradient_buckets(0, 0), mesh, LAYERS);
        let [none, one, two, three] = [
            held(Plan::new()),
            held(Plan::zero(1, "dp")),
            held(Plan::zero(2, "dp")),
            held(Plan::zero(3, "dp")),
        ];
        let formulas = [18 * p, 6 * p + 12 * p / n, 2 * p + 16 * p / n, 16 * p / n];
        for ((bytes, _), formula) in [none, one, two, three].into_iter().zip(formulas) {
            assert!(near(bytes, formula), "{mesh}: {bytes} bytes, by formula {formula}");
        }
        let peaks = [none, one, two, three].map(|(_, peak)| peak);
        // A gradient on its way: in bf16, in f32, packed for the collective, and its shard.
        let passing = WIDTH * WIDTH * (2 + 4 + 4 + 4) + 8192;
        assert!(peaks[0] >= formulas[0], "{mesh}: {peaks:?}");
        for (peak, formula) in peaks[1..].iter().zip([formulas[1], formulas[2], formulas[3] + 2 * 2 * GROUP])
        {
            assert!(*peak < formula + passing, "{mesh}: {peaks:?}, by formula {formula} and {passing}");
        }
        assert!(peaks.is_sorted_by(|a, b| a > b), "{mesh}: {peaks:?}");
    }
}

/// With the default buckets of P / 4 bytes of gradients: one is filled while two are packed or reduced, and each has a result. On many
/// ranks the first forward pass is the peak of stage 2: the shared gather of all parameters takes 2 P before it is taken apart, and the
/// sums of gradients do not exist yet. Sums that held the buckets that they arrived in would take 4 P / N more.
#[test]
fn peaks_with_buckets_stay_near_the_formulas() {
    let num_layers = 16 * LAYERS;
    let p = num_layers * GROUP;
    for (mesh, n) in [("dp=2", 2), ("dp=4", 4)] {
        let formulas = [2 * p + 16 * p / n, 16 * p / n + 2 * 2 * GROUP];
        for (stage, formula) in [2, 3].into_iter().zip(formulas) {
            let (_, peak) = held(&Plan::zero(stage, "dp"), mesh, num_layers);
            let bound = formula + 5 * p / 4;
            assert!(
                peak < bound,
                "stage {stage}, {mesh}: {peak} bytes, by formula {formula} and at most {bound}"
            );
        }
    }
}
