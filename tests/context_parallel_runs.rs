//! Context parallelism (tokens of a row sharded over ranks), alone and with every other axis: losses match one rank, logits are
//! gathered, and memory per rank shrinks.

use crate::cli::{Folder, exit_code_and_stderr};
use crate::explain::peak_bytes;
use crate::resume::text;
use crate::training_run::{Run, gpt2, same};
use shardgrad::nn::{LlamaConfig, LlamaKind};
use shardgrad::prelude::*;
use std::fs;

#[test]
fn losses_match_one_rank_on_every_combination_of_axes() {
    let llama = LlamaConfig {
        windows: vec![Some(3); 4],
        ..LlamaConfig::new(LlamaKind::Mistral, 19, 8, [12, 20], 4, [6, 3])
    };
    for (run, dropped) in [
        (Run { config: gpt2(0.0).into(), ..Run::new(8) }, false),
        (Run { config: gpt2(0.2).into(), ..Run::new(8) }, true),
        (Run { config: llama.into(), plan: Plan::llama(), ..Run::new(8) }, false),
    ] {
        let one = run.losses("");
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
        for (mesh, microbatches, recompute) in cases {
            let many = Run { microbatches, recompute, ..run.clone() };
            same(&one, &many.losses(mesh), 1e-10, &format!("{mesh} in {microbatches}, dropout {dropped}"));
        }
    }
}

#[test]
fn split_backward_schedules_support_context_parallel() {
    let run = Run { config: gpt2(0.1).into(), microbatches: 3, ..Run::new(4) };
    let one = run.losses("");
    for schedule in ["gpipe", "zb-h1", "zb-v"] {
        let many = Run { plan: Plan::gpt2().pipeline_schedule(schedule), ..run.clone() };
        same(&one, &many.losses("pp=2,cp=2"), 1e-10, schedule);
    }
}

#[test]
fn ring_and_exchange_match_one_rank_with_pipelines_and_in_low_precision() {
    let run = Run { config: gpt2(0.0).into(), microbatches: 3, ..Run::new(6) };
    let one = run.losses("");
    for (form, plan) in [("ring", Plan::gpt2().ring()), ("exchange", Plan::gpt2().exchange())] {
        for (mesh, schedule) in [("pp=2,cp=2", "zb-v"), ("pp=2,dp=2,cp=2", "1f1b"), ("pp=2,cp=3", "zb-h1")] {
            let many = Run { plan: plan.clone().pipeline_schedule(schedule), ..run.clone() };
            same(&one, &many.losses(mesh), 1e-10, &format!("{form} on {mesh}, {schedule}"));
        }
        for (dtype, bound) in [(DType::F32, 1e-4), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
            let narrow = Run { dtype, plan: plan.clone(), ..run.clone() };
            let one = Run { dtype, ..run.clone() }.losses("");
            same(&one, &narrow.losses("cp=3"), bound, &format!("{form}, {dtype}"));
        }
    }
}

#[test]
fn low_precision_differs_by_rounding_only() {
    for (dtype, bound) in [(DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let run = Run { dtype, ..Run::new(4) };
        let one = run.losses("");
        for mesh in ["cp=2", "dp=2,cp=2", "pp=2,cp=2"] {
            same(&one, &run.losses(mesh), bound, &format!("{dtype} on {mesh}"));
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
