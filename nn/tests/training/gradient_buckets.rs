//! Buckets of gradients: their calls, bytes and members, and the same bits for all sizes.

use crate::support::{ROWS, Setup, batch, config, run};
use crate::traces::{counts, traced};
use shardgrad_autograd::Var;
use shardgrad_nn::{
    AdamW, Gpt2, Gpt2Config, LanguageModel, LlamaKind, Model, ModelConfig, Param, Plan, Trainer,
    TrainerConfig, module,
};
use shardgrad_tensor::{DType, Mesh, Phase, Rank, Record, Result, Tensor, Value, World};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Losses, gradient norms and parameters after some steps in f32, on rank 0, with the collectives of the last step.
type Outcome = (Vec<(f64, f64)>, BTreeMap<String, Vec<f64>>, Vec<Record>);

fn outcome(config: &ModelConfig, plan: &Plan, mesh: &str, dtype: DType) -> Outcome {
    let plan = LanguageModel::plan(config).and(plan.clone());
    let train = |rank: &Rank| {
        let read = |rank: &Rank, step: u64, rows: Range<usize>| {
            let first = step as usize;
            Ok(vec![batch(rank, &plan, rows.clone(), first)?, batch(rank, &plan, rows, first + 1)?])
        };
        let settings = TrainerConfig { microbatches: 2, dtype, clip: Some(0.5), ..TrainerConfig::new(ROWS) };
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
        let module = LanguageModel::new(config);
        let mut trainer = Trainer::new(rank, module, &plan, AdamW::new(0.01), settings, read, loss)?;
        let mut reports = Vec::new();
        let mut records = Vec::new();
        for _ in 0..3 {
            records = traced(rank, || {
                let report = trainer.step()?;
                reports.push((report.loss, report.grad_norm));
                Ok(())
            })?;
        }
        let here = trainer.model().params().iter().filter(|param| param.is_local());
        let values: Result<BTreeMap<_, _>> = here.map(|p| Ok((p.name(), p.tensor().to_f64()?))).collect();
        Ok((reports, values?, records))
    };
    run(mesh, train).swap_remove(0)
}

fn backward_calls(records: &[Record]) -> usize {
    records.iter().filter(|r| r.phase == Phase::Backward).count()
}

#[test]
fn results_have_the_same_bits_for_all_sizes() {
    let gpt2 = ModelConfig::from(config());
    let mixtral = ModelConfig::from(crate::llama::config(LlamaKind::Mixtral));
    for (config, plan, mesh) in [
        (&gpt2, Plan::new(), "dp=2"),
        // Uneven chunks of the large all-reduce.
        (&gpt2, Plan::new(), "dp=3"),
        (&gpt2, Plan::new(), "dp=2,tp=2"),
        (&gpt2, Plan::sequence_parallel("tp"), "dp=2,tp=2"),
        (&gpt2, Plan::new(), "pp=2,dp=2"),
        (&gpt2, Plan::zero(1, "dp"), "dp=3"),
        (&gpt2, Plan::zero(2, "dp"), "dp=2"),
        (&gpt2, Plan::zero(2, "dp"), "pp=2,dp=2"),
        (&gpt2, Plan::fsdp("fsdp"), "dp=2,fsdp=2"),
        (&gpt2, Plan::zero(3, "dp"), "dp=2,tp=2"),
        (&mixtral, Plan::new(), "dp=2,ep=2"),
    ] {
        let alone = outcome(config, &plan.clone().gradient_buckets(0, 0), mesh, DType::F32);
        for (first, others) in [(0, 1 << 10), (3000, 5000), (1 << 20, 25 << 20)] {
            let plan = plan.clone().gradient_buckets(first, others);
            let together = outcome(config, &plan, mesh, DType::F32);
            assert_eq!(alone.0, together.0, "{mesh}, {first} and {others} bytes\n{plan}");
            assert!(alone.1 == together.1, "{mesh}, {first} and {others} bytes: other parameters\n{plan}");
            assert_eq!(counts(&alone.2), counts(&together.2), "{mesh}: every gradient once\n{plan}");
            let [before, after] = [&alone.2, &together.2].map(|records| backward_calls(records));
            assert!(after < before, "{mesh}: {after} calls instead of {before}\n{plan}");
        }
    }
    let plan = Plan::new().gradient_buckets(0, 0);
    let alone = outcome(&gpt2, &plan, "dp=3", DType::BF16);
    let together = outcome(&gpt2, &Plan::new(), "dp=3", DType::BF16);
    assert!((&alone.0, &alone.1) == (&together.0, &together.1), "bf16 is rounded once per element");
}

/// Op, axes, elements, bytes and members of the reductions of gradients of a dry step in f32.
fn buckets(mesh: &str, plan: &Plan) -> Vec<String> {
    let setup = Setup::new();
    let mesh = Mesh::parse(mesh).unwrap();
    let records = World::new(mesh.clone()).dry_run(0, |rank| {
        let model = Model::new(rank, Gpt2::new(&setup.config), plan, 5)?;
        let tape = model.tape();
        traced(rank, || {
            let ids = tape.constant(batch(rank, plan, 0..ROWS, 0)?);
            let loss = model.loss(&ids, &ids);
            tape.expect_gradients();
            loss.backward()?;
            assert_eq!(tape.gradients().len(), model.params().len());
            Ok(())
        })
    });
    let is_reduction = |r: &&Record| r.phase == Phase::Backward;
    let line = |r: &Record| {
        let (axes, members) = (mesh.names(r.axes), r.members().collect::<Vec<_>>().join(" "));
        format!("{} {axes} {}[{}] {} B: {members}", r.op, r.dtype, r.numel(), r.bytes)
    };
    records.unwrap().iter().filter(is_reduction).map(line).collect()
}

#[test]
fn buckets_close_by_size_in_the_order_of_completion() {
    assert_lines(&buckets("dp=2", &Plan::gpt2().gradient_buckets(500, 4000)), GOLDEN_DP);
    assert_lines(&buckets("dp=2", &Plan::gpt2().and(Plan::zero(2, "dp"))), GOLDEN_ZERO);
}

/// Compares lines, and shows the actual ones where they differ.
fn assert_lines(lines: &[String], expected: &[&str]) {
    assert!(lines == expected, "the lines are\n{}", lines.join("\n"));
}

const GOLDEN_DP: &[&str] = &[
    "all_reduce dp f32[930] 3720 B: ln_f.bias ln_f.weight h.1.mlp.c_proj.weight",
    "all_reduce dp f32[1005] 4024 B: h.1.mlp.c_proj.bias h.1.mlp.c_fc.weight h.1.mlp.c_fc.bias h.1.ln_2.bias h.1.ln_2.weight",
    "all_reduce dp f32[1890] 7560 B: h.1.attn.c_proj.weight h.1.attn.c_proj.bias h.1.attn.c_attn.weight h.1.attn.c_attn.bias \
     h.1.ln_1.bias h.1.ln_1.weight h.0.mlp.c_proj.weight",
    "all_reduce dp f32[1005] 4024 B: h.0.mlp.c_proj.bias h.0.mlp.c_fc.weight h.0.mlp.c_fc.bias h.0.ln_2.bias h.0.ln_2.weight",
    "all_reduce dp f32[1110] 4440 B: h.0.attn.c_proj.weight h.0.attn.c_proj.bias h.0.attn.c_attn.weight h.0.attn.c_attn.bias \
     h.0.ln_1.bias h.0.ln_1.weight wpe.weight",
    "all_reduce dp f32[165] 664 B: wte.weight",
];
const GOLDEN_ZERO: &[&str] = &[
    "reduce_scatter dp f32[6105] 12536 B: ln_f.bias ln_f.weight h.1.mlp.c_proj.bias h.1.mlp.c_proj.weight h.1.mlp.c_fc.bias \
     h.1.mlp.c_fc.weight h.1.ln_2.bias h.1.ln_2.weight h.1.attn.c_proj.bias h.1.attn.c_proj.weight h.1.attn.c_attn.bias \
     h.1.attn.c_attn.weight h.1.ln_1.bias h.1.ln_1.weight h.0.mlp.c_proj.bias h.0.mlp.c_proj.weight h.0.mlp.c_fc.bias \
     h.0.mlp.c_fc.weight h.0.ln_2.bias h.0.ln_2.weight h.0.attn.c_proj.bias h.0.attn.c_proj.weight h.0.attn.c_attn.bias \
     h.0.attn.c_attn.weight h.0.ln_1.bias h.0.ln_1.weight wpe.weight wte.weight",
];

#[test]
fn few_bytes_are_queued_ahead_of_a_blocking_call() {
    // Some 24 MiB of gradients, of which the largest takes 2 MiB over `tp`.
    let config = Gpt2Config::new(64, 8, 512, 2, 8);
    let largest = |mesh: &str, plan: &Plan| {
        let plan = Plan::gpt2().and(plan.clone());
        let records = World::new(Mesh::parse(mesh).unwrap()).dry_run(0, |rank| {
            // As the model of a pipeline stage.
            let rank = &rank.mesh().axis("pp").map_or(rank.clone(), |axis| rank.slice(axis));
            let model = Model::new(rank, Gpt2::new(&config), &plan, 5)?;
            let tape = model.tape();
            traced(rank, || {
                let ids = tape.constant(batch(rank, &plan, 0..ROWS, 0)?);
                let loss = model.loss(&ids, &ids);
                tape.expect_gradients();
                loss.backward()?;
                assert!(!tape.gradients().is_empty());
                Ok(())
            })
        });
        let records = records.unwrap();
        let buckets = records.iter().filter(|r| r.phase == Phase::Backward && r.members().count() > 1);
        buckets.map(|r| r.numel() * 4).max().expect("gradients share buckets")
    };
    let [limit, tensor] = [4 << 20, 4 << 20];
    assert!(largest("dp=2", &Plan::new()) > 2 * limit);
    for mesh in ["dp=2,tp=2", "pp=2,dp=2"] {
        let largest = largest(mesh, &Plan::new());
        assert!((limit..limit + tensor).contains(&largest), "{mesh}: {largest} bytes");
    }
    // A sixteenth of the gradients where they are sharded. Gradients as large as that travel by themselves.
    let share = 24 << 16;
    for (mesh, plan, limit) in [
        ("pp=2,dp=2", Plan::zero(2, "dp"), share / 2),
        ("fsdp=4", Plan::fsdp("fsdp"), share),
        ("dp=2,cp=2", Plan::zero(2, "dp"), share),
    ] {
        let largest = largest(mesh, &plan);
        assert!(largest < 2 * limit, "{mesh}: {largest} bytes");
    }
}

module! {
    /// Two parameters of which a loss may use one.
    struct Pair { used: Param, other: Param }
}

#[test]
fn parameters_without_a_gradient_are_in_no_bucket() {
    let plan = Plan::data_parallel("dp");
    run("dp=2", |rank| {
        let model = Model::new(rank, Pair { used: Param::new(&[3]), other: Param::new(&[5]) }, &plan, 1)?;
        let tape = model.tape();
        let records = traced(rank, || {
            let loss = model.used.on_tape(&tape).square().sum();
            tape.expect_gradients();
            loss.backward()?;
            assert_eq!(tape.gradients().len(), 1);
            // A tape that is dropped with gradients in a bucket neither waits nor communicates.
            let tape = model.tape();
            let loss = model.other.on_tape(&tape).square().sum();
            tape.expect_gradients();
            loss.backward()
        })?;
        let paths: Vec<&str> = records.iter().map(|r| r.path.as_str()).collect();
        assert_eq!(paths, ["used"]);
        Ok(())
    });
}

#[test]
fn backward_pass_goes_on_while_its_buckets_wait_for_other_ranks() {
    let plan = Plan::data_parallel("dp").gradient_buckets(0, 0);
    let numel = 1 << 16;
    let has_passed = AtomicBool::new(false);
    let gradients = run("dp=2", |rank| {
        let pair = Pair { used: Param::new(&[numel]), other: Param::new(&[numel]) };
        let model = Model::new(rank, pair, &plan, 1)?;
        let tape = model.tape();
        let loss = model.used.on_tape(&tape).mul(&model.other.on_tape(&tape)).sum();
        tape.expect_gradients();
        // Rank 0 passes only if it does not wait in its reductions.
        while rank.index() == 1 && !has_passed.load(Ordering::SeqCst) {
            rank.check();
            std::thread::sleep(Duration::from_millis(1));
        }
        loss.backward()?;
        has_passed.store(true, Ordering::SeqCst);
        tape.gradients().values().map(Tensor::to_f64).collect::<Result<Vec<_>>>()
    });
    assert!(gradients[0].len() == 2 && gradients[0] == gradients[1]);
}

#[test]
fn a_backward_pass_after_the_last_one_still_adds_to_the_gradients() {
    let plan = Plan::data_parallel("dp");
    let gradient = |rank: &Rank, announced: [bool; 2]| -> Result<Vec<f64>> {
        let model = Model::new(rank, Pair { used: Param::new(&[3]), other: Param::new(&[5]) }, &plan, 1)?;
        let tape = model.tape();
        for (at, announces) in announced.into_iter().enumerate() {
            let x = Tensor::full(rank, model.used.tensor().layout(), at as f64 + 2.0)?;
            let loss = model.used.on_tape(&tape).mul(&tape.constant(x)).sum();
            if announces {
                tape.expect_gradients();
            }
            loss.backward()?;
        }
        tape.gradients().values().next().expect("one parameter is used").to_f64()
    };
    let expected = run("dp=2", |rank| gradient(rank, [false, false]));
    assert!(expected[0][0] >= 5.0, "{expected:?}");
    for announced in [[false, true], [true, true], [true, false]] {
        assert_eq!(run("dp=2", |rank| gradient(rank, announced)), expected, "{announced:?}");
    }
}
