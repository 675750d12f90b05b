//! Expert parallelism, alone and with every other axis: losses match one rank, models and checkpoints load on any mesh, and a rank holds only its
//! experts.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use crate::pipeline_parallel::{Run, same};
use serde_json::Value as Json;
use shardgrad::nn::ExpertsConfig;
use shardgrad::nn::{LanguageModel, LlamaConfig, LlamaKind};
use std::fs;
use std::path::Path;

fn run(kind: LlamaKind, experts: ExpertsConfig) -> Run {
    let config = LlamaConfig {
        experts: Some(experts),
        initializer_range: 0.2,
        ..LlamaConfig::new(kind, 19, 8, [12, 10], 4, [6, 3])
    };
    let config = config.into();
    Run { plan: LanguageModel::plan(&config), config, ..Run::new(8) }
}

#[test]
fn losses_match_one_rank_on_every_combination_of_axes() {
    for (kind, experts) in [
        (LlamaKind::Mixtral, ExpertsConfig::new(5, 2, 10)),
        (LlamaKind::Qwen3Moe, ExpertsConfig { decoder_sparse_step: 2, ..ExpertsConfig::new(8, 3, 6) }),
    ] {
        let run = run(kind, experts);
        let one = run.losses("");
        let cases = [
            ("ep=2", 1, false),
            ("ep=3", 6, true),
            ("dp=2,ep=2", 3, false),
            ("ep=2,tp=3", 2, true),
            ("dp=2,ep=2,tp=2", 1, false),
            ("ep=2,cp=2", 3, false),
            ("pp=2,ep=2", 3, false),
            ("pp=4,ep=3", 2, true),
            ("pp=2,dp=2,ep=2", 3, false),
        ];
        for (mesh, microbatches, recompute) in cases {
            let many = Run { microbatches, recompute, ..run.clone() };
            same(&one, &many.losses(mesh), 1e-9, &format!("{kind:?} on {mesh} in {microbatches}"));
        }
    }
}

#[test]
fn split_backward_schedules_support_expert_parallel() {
    let run = Run { microbatches: 3, steps: 4, ..run(LlamaKind::Mixtral, ExpertsConfig::new(4, 2, 10)) };
    let one = run.losses("");
    for schedule in ["gpipe", "zb-h1", "zb-v"] {
        let many = Run { plan: run.plan.clone().pipeline_schedule(schedule), ..run.clone() };
        same(&one, &many.losses("pp=2,ep=2"), 1e-10, schedule);
    }
}

const SMALL: [&str; 10] =
    ["--batch", "4", "--seq", "16", "--lr-schedule", "constant", "--eval-every", "2", "--dtype", "f64"];

fn text(folder: &Folder) -> String {
    folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(60))
}

/// Returns training and validation losses of a run.
fn losses(out: &str) -> Vec<f64> {
    let lines = fs::read_to_string(Path::new(out).join("metrics.jsonl")).unwrap();
    let lines: Vec<Json> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.iter().flat_map(|l| [l["loss"].as_f64(), l["val_loss"].as_f64()]).flatten().collect()
}

#[test]
fn checkpoint_of_expert_parallel_run_is_read_on_any_mesh() {
    let folder = Folder::new("experts-resumed");
    let data = text(&folder);
    let train = |out: &str, more: &[&str]| {
        let args = ["train", "--data", &data, "--out", out, "--preset", "mixtral-tiny", "--save-every", "3"];
        let (code, message) = exit_code_and_stderr(&[&args[..], &SMALL, more].concat());
        assert_eq!(code, 0, "{more:?}: {message}");
        losses(out)
    };
    let one = train(&folder.path("one"), &["--steps", "6", "--mesh", "dp=1"]);
    for (first, then) in [("ep=2", "dp=2"), ("tp=2", "dp=2,ep=3"), ("pp=2,ep=2", "ep=5")] {
        let out = folder.path(first);
        train(&out, &["--steps", "3", "--mesh", first]);
        let many = train(&out, &["--steps", "6", "--mesh", then, "--resume"]);
        let many = [&many[..4], &many[many.len() - 5..]].concat();
        same(&one, &many, 1e-9, &format!("on {first}, then on {then}"));
    }
    let model = folder.path("ep=2/model");
    let message = |mesh: &str| {
        let args = [
            "generate",
            "--model",
            &model,
            "--prompt",
            "The quick",
            "--tokens",
            "12",
            "--greedy",
            "--dtype",
            "f64",
        ];
        let (code, message) = exit_code_and_stderr(&[&args[..], &["--mesh", mesh]].concat());
        assert_eq!(code, 0, "{mesh}: {message}");
        message
    };
    let alone = message("dp=1");
    for mesh in ["ep=2", "ep=2,tp=2"] {
        assert_eq!(message(mesh), alone, "{mesh}");
    }
}

/// Returns the peak bytes of a rank in a step.
fn peak(mesh: &str) -> u64 {
    let given =
        ["explain", "--preset", "mixtral-tiny", "--seq", "16", "--batch", "4", "--json", "--mesh", mesh];
    let output = shardgrad(&given);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Json>(line).unwrap());
    lines.filter(|l| l["kind"] == "total").map(|l| l["peak_bytes"].as_u64().unwrap()).max().unwrap()
}

#[test]
fn rank_holds_only_its_experts() {
    let [one, two, four] = ["dp=1", "ep=2", "ep=4"].map(peak);
    assert!(two < one * 7 / 10 && four < two * 8 / 10, "{one}, {two}, {four} bytes");
}

#[test]
fn expert_axis_without_experts_is_refused_with_help() {
    for command in [&["train"][..], &["explain"]] {
        let (code, message) =
            exit_code_and_stderr(&[command, &["--preset", "tiny", "--mesh", "dp=2,ep=2"]].concat());
        assert!(
            code == 2
                && message.contains("no experts to shard over ep=2")
                && message.contains("use dp instead"),
            "{message}"
        );
    }
}
