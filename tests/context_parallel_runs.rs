//! Context parallelism (tokens of a row sharded over ranks), alone and with every other axis: losses, gradient norms and weights have the
//! bits of one rank, logits are gathered, and memory per rank shrinks.

use crate::cli::{Folder, exit_code_and_stderr};
use crate::explain::peak_bytes;
use crate::resume::text;
use crate::training_run::{ROWS, Run, gpt2, same, same_bits};
use shardgrad::nn::{LlamaConfig, LlamaKind};
use shardgrad::prelude::*;
use shardgrad_testing::sample;
use std::fs;

#[test]
fn runs_have_the_bits_of_one_rank_on_every_combination_of_axes() {
    let llama = LlamaConfig {
        windows: vec![Some(3); 4],
        ..LlamaConfig::new(LlamaKind::Mistral, 19, 8, [12, 20], 4, [6, 3])
    };
    let runs = [
        (Run { config: gpt2(0.0).into(), ..Run::new(2) }, false),
        (Run { config: gpt2(0.2).into(), ..Run::new(2) }, true),
        (Run { config: llama.into(), plan: Plan::llama(), ..Run::new(2) }, false),
    ];
    for (number, (run, dropped)) in runs.into_iter().enumerate() {
        let run = run.in_leaves(ROWS);
        let one = run.bits("");
        let cases = [
            ("cp=2", 1, false),
            ("cp=3", 6, true),
            ("dp=2,cp=2", 3, false),
            ("cp=2,tp=2", 2, true),
            ("dp=2,cp=2,tp=2", 1, false),
            ("pp=2,cp=2", 3, false),
            ("pp=4,cp=3", 2, true),
            ("pp=2,dp=2,cp=2", 3, false),
        ];
        for (mesh, microbatches, recompute) in sample(number, cases) {
            let many = Run { microbatches, recompute, ..run.clone() };
            same_bits(&one, &many.bits(mesh), &format!("{mesh} in {microbatches}, dropout {dropped}"));
        }
    }
}

/// In both modes: the default reduces gradients during the last backward pass, in an order that a split backward pass decides.
#[test]
fn split_backward_schedules_support_context_parallel() {
    let run = Run { config: gpt2(0.1).into(), microbatches: 3, ..Run::new(2) };
    let canonical = run.clone().in_leaves(ROWS);
    let (one, bits) = (run.losses(""), canonical.bits(""));
    for schedule in ["gpipe", "zb-h1", "zb-v"] {
        let plan = Plan::gpt2().pipeline_schedule(schedule);
        same(&one, &Run { plan: plan.clone(), ..run.clone() }.losses("pp=2,cp=2"), 1e-10, schedule);
        same_bits(&bits, &Run { plan, ..canonical.clone() }.bits("pp=2,cp=2"), schedule);
    }
}

#[test]
fn exchange_has_the_bits_of_one_rank_with_pipelines_and_in_low_precision() {
    let run = Run { config: gpt2(0.0).into(), microbatches: 3, ..Run::new(2) }.in_leaves(ROWS);
    let one = run.bits("");
    let plan = Plan::gpt2().exchange();
    for (mesh, schedule) in [("pp=2,cp=2", "zb-v"), ("pp=2,dp=2,cp=2", "1f1b"), ("pp=2,cp=3", "zb-h1")] {
        let many = Run { plan: plan.clone().pipeline_schedule(schedule), ..run.clone() };
        same_bits(&one, &many.bits(mesh), &format!("{mesh}, {schedule}"));
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let narrow = Run { dtype, ..run.clone() };
        let many = Run { plan: plan.clone(), ..narrow.clone() };
        same_bits(&narrow.bits(""), &many.bits("cp=3"), &dtype.to_string());
    }
}

/// To rounding: a ring adds in the order of its ranks.
#[test]
fn ring_matches_one_rank_with_pipelines_and_in_low_precision() {
    let run = Run { config: gpt2(0.0).into(), microbatches: 3, ..Run::new(2) };
    let (one, plan) = (run.losses(""), Plan::gpt2().ring());
    for (mesh, schedule) in [("pp=2,cp=2", "zb-v"), ("pp=2,dp=2,cp=2", "1f1b"), ("pp=2,cp=3", "zb-h1")] {
        let many = Run { plan: plan.clone().pipeline_schedule(schedule), ..run.clone() };
        same(&one, &many.losses(mesh), 1e-10, &format!("{mesh}, {schedule}"));
    }
    for (dtype, bound) in [(DType::F32, 1e-4), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let narrow = Run { dtype, ..run.clone() };
        let many = Run { plan: plan.clone(), ..narrow.clone() };
        same(&narrow.losses(""), &many.losses("cp=3"), bound, &dtype.to_string());
    }
}

#[test]
fn runs_in_low_precision_have_the_bits_of_one_rank() {
    for dtype in [DType::F16, DType::BF16] {
        let run = Run { dtype, ..Run::new(2) }.in_leaves(ROWS);
        let one = run.bits("");
        for mesh in ["cp=2", "dp=2,cp=2", "pp=2,cp=2"] {
            same_bits(&one, &run.bits(mesh), &format!("{dtype} on {mesh}"));
        }
    }
}

#[test]
fn rank_holds_only_activations_of_its_tokens() {
    let peak = |mesh| peak_bytes(&["--preset", "tiny", "--seq", "64", "--batch", "32", "--mesh", mesh]);
    let [one, two, four] = ["dp=1", "cp=2", "cp=4"].map(peak);
    assert!(two < one * 7 / 10 && four < two * 7 / 10, "{one}, {two}, {four} bytes");
    let folder = Folder::new("context-memory");
    let (data, out, limit) = (text(&folder), folder.path("out"), one.to_string());
    let train = |mesh: &str| {
        let args =
            ["train", "--data", &data, "--out", &out, "--preset", "tiny", "--seq", "64", "--batch", "32"];
        exit_code_and_stderr(
            &[&args[..], &["--steps", "1", "--memory-limit", &limit, "--eval-every", "0", "--mesh", mesh]]
                .concat(),
        )
    };
    let (code, message) = train("dp=1");
    assert!(code == 2 && message.contains("but --memory-limit is "), "{message}");
    let (code, message) = train("cp=2");
    assert_eq!(code, 0, "{message}");
}

#[test]
fn logits_of_context_parallel_are_gathered() {
    let folder = Folder::new("context-logits");
    let (data, model) = (text(&folder), folder.path("out/model"));
    let (code, message) = exit_code_and_stderr(&[
        "train",
        "--data",
        &data,
        "--out",
        &folder.path("out"),
        "--steps",
        "1",
        "--mesh",
        "cp=2",
    ]);
    assert_eq!(code, 0, "{message}");
    let written = |mesh: &str| {
        let file = folder.path(&format!("{mesh}.safetensors"));
        let args =
            ["eval", "--model", &model, "--data", &data, "--seq", "9", "--batch", "3", "--dtype", "f64"];
        let (code, message) =
            exit_code_and_stderr(&[&args[..], &["--mesh", mesh, "--logits", &file]].concat());
        assert_eq!(code, 0, "{message}");
        fs::read(file).unwrap()
    };
    let one = written("dp=1");
    for mesh in ["cp=2", "dp=2,cp=4"] {
        // Logits are stored in f32; the f64 values agree to rounding.
        let differ = one.iter().zip(&written(mesh)).filter(|(a, b)| a != b).count();
        assert!(one.len() > 3 * 9 * 256 * 4 && differ * 100 < one.len(), "{mesh}: {differ} of {}", one.len());
    }
}
