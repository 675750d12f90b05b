//! ZeRO 3 and FSDP on pipelines: gathered once per step or by microbatch, with the same bits; collectives, bytes and peaks by formula.

use crate::llama;
use crate::sharded_storage::{Deep, WIDTH};
use crate::support::{ROWS, batch, config, max_difference, run};
use crate::traces::traced;
use crate::zero::{GROUP, Run, mixtral, moved};
use shardgrad_autograd::Var;
use shardgrad_autograd::pipeline::NAMES;
use shardgrad_nn::{
    AdamW, GatheringReason, InferenceModel, LanguageModel, LlamaKind, ModelConfig, Optimizer, Param, Plan,
    Precision, ResultRanks, Sgd, StageGathering, Trainer, TrainerConfig,
};
use shardgrad_tensor::{DType, Layout, Mesh, Phase, Rank, Record, Result, Tensor, Value, World};
use shardgrad_testing::sample;
use std::ops::Range;

const MICROBATCHES: usize = 4;

/// Stage 3 with a pipeline schedule, gathered once per step (`false`) or by microbatch.
fn plan(schedule: &str, by_microbatch: bool) -> Plan {
    let plan = Plan::pipeline_parallel("pp").pipeline_schedule(schedule).and(Plan::fsdp("fsdp"));
    plan.gathered_bytes_max(if by_microbatch { 0 } else { usize::MAX })
}

#[test]
fn both_forms_give_the_same_bits_and_the_gradients_of_one_rank_in_every_schedule() {
    for (number, schedule) in NAMES.into_iter().enumerate() {
        for recompute in sample(number, [false, true]) {
            let [by_step, by_microbatch] = [false, true].map(|by_microbatch| {
                let (rows, microbatches) = (2 * MICROBATCHES, MICROBATCHES);
                let case = Run::new(config(), plan(schedule, by_microbatch), "pp=2,fsdp=2");
                Run { rows, microbatches, recompute, ..case }
            });
            let (alone, many) =
                (by_step.alone().after_one_plain_step(), by_microbatch.after_one_plain_step());
            assert_eq!(alone.len(), many.len(), "{schedule}");
            for (name, values) in &alone {
                let worst = max_difference(values, &many[name]);
                assert!(worst < 1e-12, "{schedule}: the gradient of {name} differs by {worst:e}");
            }
            // Measured times decide the order of microbatches, and so of their sums.
            if schedule != "searched" {
                let [a, b] =
                    [by_step, by_microbatch].map(|case| case.train(&AdamW::new(0.01), None, (None, 3, None)));
                assert!(a == b, "{schedule}, recompute {recompute}: other bits");
            }
        }
    }
}

#[test]
fn products_of_styles_train_as_on_one_rank_by_microbatch() {
    let gpt2 = || ModelConfig::from(config());
    let llama = || ModelConfig::from(llama::config(LlamaKind::Llama));
    let by_microbatch = |plan: Plan| plan.gathered_bytes_max(0);
    for (config, plan, mesh) in [
        (gpt2(), Plan::zero(3, "dp"), "pp=2,dp=2"),
        (gpt2(), Plan::new(), "pp=2,fsdp=3"),
        (gpt2(), Plan::new(), "pp=2,dp=2,fsdp=2"),
        (gpt2(), Plan::new(), "pp=2,fsdp=2,tp=2"),
        (llama(), Plan::new(), "pp=2,dp=2,fsdp=2"),
        (llama(), Plan::new().gather_group("model.layers.*.mlp"), "pp=2,fsdp=2"),
        (llama(), Plan::new().pipeline_schedule("zb-h1"), "pp=2,fsdp=2,tp=2"),
        (llama(), Plan::new(), "pp=2,fsdp=2,cp=2"),
        (mixtral().into(), Plan::new(), "pp=2,fsdp=2,ep=2"),
        (mixtral().into(), Plan::zero(3, "dp").pipeline_schedule("zb-h1"), "pp=2,dp=2"),
    ] {
        let run = Run::new(config, by_microbatch(plan), mesh);
        run.assert_like(&run.one_rank());
    }
}

/// A trainer of linear layers in a row.
fn trainer<'t>(
    rank: &Rank,
    plan: &'t Plan,
    num_layers: usize,
    recompute: bool,
    precision: Precision,
    optim: impl Optimizer + 't,
) -> Result<Trainer<'t, Deep>> {
    let dtype = precision.dtype;
    let settings = TrainerConfig {
        microbatches: MICROBATCHES,
        dtype,
        param_dtype: Some(precision.param_dtype),
        copies_checked_every: 0,
        ..TrainerConfig::new(ROWS * MICROBATCHES)
    };
    let read = move |rank: &Rank, _: u64, rows: Range<usize>| {
        let layout = plan.batch_layout(rank.mesh(), dtype, &[rows.len(), WIDTH])?;
        Ok(vec![Tensor::from_fn(rank, &layout, |i| (i % 13) as f64 / 13.0)?])
    };
    let loss = move |model: &Deep, x: &[Var]| {
        let loss = model.forward(&x[0], recompute).unwrap_or_else(|e| e.raise());
        if dtype == DType::BF16 { loss.cast(DType::F32) } else { loss }
    };
    Trainer::new(rank, Deep::with_layers(num_layers), plan, optim, settings, read, loss)
}

/// What a rank of a pipeline moves in a step.
struct Moved {
    /// Calls and bytes of the gathers of forward passes and of the gathers of backward passes.
    gathers: [(usize, u64); 2],
    /// The bytes of the reductions, whose calls are those of buckets.
    reduced: u64,
    /// The number of layers of the rank, and whether the first one is among them.
    layers: usize,
    is_first: bool,
    /// The number of stages of the rank.
    stages: usize,
}

/// What each rank moves in a step.
fn collectives(plan: &Plan, mesh: &str, recompute: bool) -> Vec<Moved> {
    run(mesh, |rank| {
        let mut trainer = trainer(rank, plan, 12, recompute, Precision::of(DType::F64), Sgd::new(0.1))?;
        let records = traced(rank, || trainer.step().map(drop))?;
        let total = |phase: Phase, op: &str| {
            let of_kind = |r: &&Record| (r.phase, r.op) == (phase, op);
            let of_kind: Vec<&Record> = records.iter().filter(of_kind).collect();
            (of_kind.len(), of_kind.iter().map(|r| r.bytes).sum())
        };
        let gathers = [Phase::Forward, Phase::Backward].map(|phase| total(phase, "all_gather"));
        let (_, reduced) = total(Phase::Backward, "reduce_scatter");
        let local: Vec<String> =
            trainer.model().params().iter().filter(|p| p.is_local()).map(Param::name).collect();
        let layers = local.iter().filter(|name| name.ends_with(".weight")).count();
        let here = rank.coordinate(rank.mesh().axis("pp").expect("a pipeline"));
        let schedule = trainer.pipeline_schedule().expect("a pipeline");
        let stages = schedule.stage_ranks.iter().filter(|rank| **rank == here).count();
        let is_first = local.contains(&"layers.0.weight".to_string());
        Ok(Moved { gathers, reduced, layers, is_first, stages })
    })
}

#[test]
fn collectives_and_bytes_follow_closed_formulas_in_every_schedule() {
    let m = MICROBATCHES;
    for (number, schedule) in NAMES.into_iter().enumerate() {
        for (stage, times) in sample(number, [(1, 1), (2, m)]) {
            let plan = Plan::pipeline_parallel("pp").pipeline_schedule(schedule).and(Plan::zero(stage, "dp"));
            for Moved { gathers, reduced, layers, stages, .. } in collectives(&plan, "pp=2,dp=2", false) {
                let once = moved(layers * GROUP, 2);
                // The small parameters of a stage travel together.
                let expected = ([(stages, once), (0, 0)], times as u64 * once);
                assert_eq!((gathers, reduced), expected, "{schedule}, stage {stage}");
            }
        }
        for n in sample(number, [2, 4]) {
            let mesh = format!("pp=2,fsdp={n}");
            for Moved { gathers, reduced, layers, stages, .. } in
                collectives(&plan(schedule, false), &mesh, false)
            {
                let once = moved(layers * GROUP, n);
                let expected = ([(stages, once), (0, 0)], m as u64 * once);
                assert_eq!((gathers, reduced), expected, "{schedule}, {mesh}, by step");
            }
            for recompute in sample(number / 2, [false, true]) {
                for Moved { gathers, reduced, layers, is_first, .. } in
                    collectives(&plan(schedule, true), &mesh, recompute)
                {
                    let once = moved(layers * GROUP, n);
                    // Backward gathers no biases, nor the first weight, whose input has no gradient; a recomputed block needs all
                    // its parameters. The weight gradients of a split backward pass gather nothing: they read inputs alone.
                    let again = match recompute {
                        true => (m * layers, m as u64 * once),
                        false => {
                            let weights = layers - usize::from(is_first);
                            (m * weights, m as u64 * moved(weights * WIDTH * WIDTH, n))
                        }
                    };
                    let expected = ([(m * layers, m as u64 * once), again], m as u64 * once);
                    assert_eq!(
                        (gathers, reduced),
                        expected,
                        "{schedule}, {mesh}, by microbatch, recompute {recompute}"
                    );
                }
            }
        }
    }
}

/// Peak bytes of two steps on each rank, counted by its allocator, and the number of its layers.
fn peaks(plan: &Plan, mesh: &str) -> Vec<(usize, usize)> {
    run(mesh, |rank| {
        let before = rank.backend().memory().in_use_bytes;
        let precision = Precision::mixed(DType::BF16);
        let mut trainer = trainer(rank, plan, 24, true, precision, AdamW::new(1e-3))?;
        trainer.step()?;
        trainer.step()?;
        let layers = trainer.model().params().iter().filter(|p| p.is_local() && p.numel() == WIDTH * WIDTH);
        Ok((rank.backend().memory().peak_bytes - before, layers.count()))
    })
}

#[test]
fn peaks_follow_closed_formulas() {
    for (number, schedule) in ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"].into_iter().enumerate() {
        for (mesh, n) in sample(number, [("pp=2,fsdp=2", 2), ("pp=2,fsdp=4", 4)]) {
            // Each gradient is reduced alone: a bucket would hold all gradients of such a small model.
            let peaks = |form| peaks(&plan(schedule, form).gradient_buckets(1, 1), mesh);
            let [by_step, by_microbatch] = [false, true].map(peaks);
            for ((kept, layers), (freed, _)) in by_step.into_iter().zip(by_microbatch) {
                let states = 16 * layers * GROUP / n;
                // A gradient on its way, in bf16, in f32, packed for the collective, and its shard; and the activations of a few rows.
                let passing = WIDTH * WIDTH * (2 + 4 + 4 + 4) + 24 * 1024;
                let what = format!("{schedule}, {mesh}: {kept} and {freed} bytes");
                assert!(
                    kept >= states + 2 * layers * GROUP,
                    "{what}, by formula {}",
                    states + 2 * layers * GROUP
                );
                let formula = states + 2 * 2 * GROUP;
                assert!(freed >= formula && freed < formula + passing, "{what}, by formula {formula}");
                assert!(kept - freed >= 2 * (layers - 2) * GROUP - 2 * GROUP, "{what}");
            }
        }
    }
}

#[test]
fn each_pipeline_rank_compares_the_bytes_of_its_stages_with_the_bound() {
    let config = ModelConfig::from(config());
    let plan_of = |bytes: usize| LanguageModel::plan(&config).gathered_bytes_max(bytes);
    let gathers = |bytes: usize| {
        let plan = plan_of(bytes);
        let case = Run::new(config.clone(), Plan::new(), "pp=2,fsdp=2");
        run("pp=2,fsdp=2", |rank| {
            let trainer = case.trainer(rank, &plan, Sgd::new(0.1), None)?;
            // In f64; parameters of one entry would not be sharded.
            let held =
                trainer.model().params().iter().filter(|p| p.is_local()).map(Param::numel).sum::<usize>();
            Ok((8 * held, trainer.gathers_by_microbatch()))
        })
    };
    let held: Vec<usize> = gathers(0).into_iter().map(|(bytes, _)| bytes).collect();
    let (small, large) = (held[0].min(held[2]), held[0].max(held[2]));
    assert!(small < large && held[0] == held[1] && held[2] == held[3], "{held:?}");
    for (bound, expected) in [
        (0, [true, true]),
        (small - 1, [true, true]),
        (small, [false, true]),
        (large - 1, [false, true]),
        (large, [false, false]),
    ] {
        for (held, by_microbatch) in gathers(bound) {
            assert_eq!(by_microbatch, expected[usize::from(held == large)], "{held} bytes under {bound}");
        }
    }
}

/// What decides how each pipeline rank gathers parameters: the bytes that it needs and has.
fn memory_of(stages: &[StageGathering]) -> Vec<(u64, Option<u64>)> {
    let memory = |stage: &StageGathering| match stage.reason {
        GatheringReason::Memory { needed_bytes, available_bytes } => (needed_bytes, available_bytes),
        GatheringReason::Bound(max) => panic!("a bound of {max} bytes"),
    };
    stages.iter().map(memory).collect()
}

#[test]
fn without_a_bound_the_memory_of_the_ranks_decides_with_the_same_bits() {
    let case = |rank_memory_bytes: u64| Run {
        rank_memory_bytes: Some(rank_memory_bytes),
        ..Run::new(config(), Plan::new(), "pp=2,fsdp=2")
    };
    let plan = LanguageModel::plan(&config().into());
    // Every rank knows how the stages of all ranks gather.
    let stages = |rank_memory_bytes: u64| {
        let of_ranks = run("pp=2,fsdp=2", |rank| {
            let trainer = case(rank_memory_bytes).trainer(rank, &plan, AdamW::new(0.01), None)?;
            let stages = trainer.stage_gatherings().to_vec();
            let own = &stages[rank.coordinate(rank.mesh().axis("pp").expect("a pipeline"))];
            assert_eq!(own.by_microbatch, trainer.gathers_by_microbatch());
            Ok(stages)
        });
        assert!(of_ranks.iter().all(|stages| *stages == of_ranks[0]), "{of_ranks:?}");
        of_ranks[0].clone()
    };
    let needed: Vec<u64> = memory_of(&stages(1 << 40)).into_iter().map(|(needed, _)| needed).collect();
    let [less, more] = [needed[0].min(needed[1]), needed[0].max(needed[1])];
    assert!(less < more && less > 10_000, "{needed:?}");
    for available in [1, less - 1, less, more - 1, more] {
        let stages = stages(available);
        assert_eq!(memory_of(&stages), needed.iter().map(|n| (*n, Some(available))).collect::<Vec<_>>());
        let by_microbatch: Vec<bool> = stages.iter().map(|stage| stage.by_microbatch).collect();
        assert_eq!(by_microbatch, needed.iter().map(|n| *n > available).collect::<Vec<_>>(), "{available}");
    }
    let [freed, kept] = [1, 1 << 40].map(|bytes| case(bytes).train(&AdamW::new(0.01), None, (None, 3, None)));
    assert!(freed == kept, "other bits");
}

#[test]
fn the_limit_of_a_rank_and_the_free_memory_of_the_host_decide() {
    let case = Run::new(config(), Plan::new(), "pp=2,fsdp=2");
    let plan = LanguageModel::plan(&config().into());
    let available = |world: World| {
        let stages = world.launch(|rank| {
            let trainer = case.trainer(rank, &plan, Sgd::new(0.1), None)?;
            Ok(trainer.stage_gatherings().to_vec())
        });
        let stages = stages.unwrap().swap_remove(0);
        let by_microbatch: Vec<bool> = stages.iter().map(|stage| stage.by_microbatch).collect();
        (memory_of(&stages)[0].1, by_microbatch)
    };
    let world = || World::new(Mesh::parse("pp=2,fsdp=2").unwrap()).threads(1);
    let (limited, by_microbatch) = available(world().memory_limit(64 << 20));
    // The arguments of a microbatch are in memory already.
    let limited = limited.unwrap();
    assert!(limited <= 64 << 20 && limited > 60 << 20 && by_microbatch == [false; 2], "{limited}");
    let (free, _) = available(world());
    if cfg!(target_os = "linux") {
        assert!(free.is_some_and(|bytes| bytes > 1 << 20), "{free:?}");
    }
    // A bound is the bound.
    let bounded = plan.clone().gathered_bytes_max(usize::MAX);
    let reasons = run("pp=2,fsdp=2", |rank| {
        let trainer = Run { rank_memory_bytes: Some(1), ..case.clone() };
        let trainer = trainer.trainer(rank, &bounded, Sgd::new(0.1), None)?;
        Ok(trainer.stage_gatherings().iter().map(|s| (s.by_microbatch, s.reason)).collect::<Vec<_>>())
    });
    assert_eq!(reasons, vec![[(false, GatheringReason::Bound(u64::MAX)); 2]; 4]);
}

#[test]
fn the_needed_memory_is_that_of_the_allocator_and_some() {
    for schedule in ["gpipe", "1f1b", "zb-h1"] {
        let plan = Plan::pipeline_parallel("pp").pipeline_schedule(schedule).and(Plan::fsdp("fsdp"));
        let needed_and_peaks = run("pp=2,fsdp=2", |rank| {
            let before = rank.backend().memory().in_use_bytes;
            let precision = Precision::mixed(DType::BF16);
            let mut trainer = trainer(rank, &plan, 24, true, precision, AdamW::new(1e-3))?;
            trainer.step()?;
            trainer.step()?;
            let own = rank.coordinate(rank.mesh().axis("pp").expect("a pipeline"));
            let needed = memory_of(trainer.stage_gatherings())[own].0;
            Ok((needed, (rank.backend().memory().peak_bytes - before) as u64))
        });
        for (needed, peak) in needed_and_peaks {
            let sixth_more = peak + peak / 6;
            assert!(needed >= peak && needed < sixth_more + peak / 10, "{schedule}: {needed}, {peak}");
        }
    }
}

#[test]
fn frozen_parameters_are_gathered_by_microbatch_too() {
    for schedule in ["1f1b", "zb-h1"] {
        let [untrained, by_step, by_microbatch] =
            [(0.0, false), (0.01, false), (0.01, true)].map(|(lr, form)| {
                let plan = LanguageModel::plan(&config().into()).and(plan(schedule, form));
                let case = Run::new(config(), Plan::new(), "pp=2,fsdp=2");
                run("pp=2,fsdp=2", |rank| {
                    let mut trainer = case.trainer(rank, &plan, AdamW::new(lr), None)?;
                    trainer.model().freeze("h.*.attn.*")?;
                    trainer.model().freeze("wte.weight")?;
                    let losses: Vec<f64> = (0..3).map(|_| Ok(trainer.step()?.loss)).collect::<Result<_>>()?;
                    let here = trainer.model().params().iter().filter(|param| param.is_local());
                    let values: Vec<Vec<f64>> = here.map(|p| p.tensor().to_f64()).collect::<Result<_>>()?;
                    Ok((losses, values))
                })
            });
        assert!(by_step == by_microbatch, "{schedule}");
        assert!(by_step[0].0[2] != untrained[0].0[2], "{schedule}: nothing was trained");
    }
}

#[test]
fn inference_gathers_by_microbatch() {
    let config = ModelConfig::from(config());
    let forward = |mesh: &str, bound: Option<usize>| {
        let plan = LanguageModel::plan(&config);
        let plan = bound.map_or(plan.clone(), |bytes| plan.gathered_bytes_max(bytes));
        run(mesh, |rank| {
            let ids = |rank: &Rank| Ok(vec![Layout::invariant(rank.mesh(), DType::I64, &[2, 6])]);
            let logits = |model: &LanguageModel, x: &[Var]| Ok(vec![model.forward(&x[0])]);
            let module = LanguageModel::new(&config);
            let model = InferenceModel::new(rank, module, &plan, 5, DType::F64, ids, logits)?;
            let microbatches: Vec<Vec<Tensor>> = [0..2, 2..4]
                .into_iter()
                .map(|rows| Ok(vec![batch(model.rank(), &plan, rows, 0)?]))
                .collect::<Result<_>>()?;
            let mut results = Vec::new();
            let records = traced(rank, || {
                results = model.forward(&microbatches, ResultRanks::AllStages, logits)?;
                Ok(())
            })?;
            let values = |x: Option<Tensor>| x.map(|x| x.to_f64()).transpose();
            let values: Vec<_> = results.into_iter().flatten().map(values).collect::<Result<_>>()?;
            Ok((values, records.iter().filter(|r| r.op == "all_gather").count()))
        })
    };
    let (alone, _) = forward("", None).swap_remove(0);
    let [kept, freed] = [None, Some(0)].map(|bound| forward("pp=2,fsdp=2", bound));
    for ((kept, once), (freed, often)) in kept.into_iter().zip(freed) {
        assert!(kept == freed, "other bits");
        assert!(often >= 2 * once && once > 0, "{once} and {often} gathers");
        for (value, alone) in freed.into_iter().zip(&alone) {
            assert!(max_difference(&value.unwrap(), alone.as_ref().unwrap()) < 1e-12);
        }
    }
}
