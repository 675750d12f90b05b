//! Training with the tokens of a row split over ranks, alone and beside every other split: the losses of one rank; files that any
//! mesh reads; and what a rank holds.

use crate::cli::{Folder, shardgrad, told};
use crate::pipelines::{Run, same};
use serde_json::Value as Json;
use shardgrad::nn::{Gpt2Config, LlamaConfig, LlamaKind};
use shardgrad::prelude::*;
use std::fs;
use std::path::Path;

/// A decoder of 8 positions with dropout everywhere.
fn gpt2(dropout: f64) -> Gpt2Config {
    Gpt2Config::new(19, 8, 12, 4, 3).with_dropout(dropout)
}

#[test]
fn steps_are_those_of_one_rank_on_every_product_of_splits() {
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
fn schedules_that_split_the_backward_pass_take_split_tokens() {
    let run = Run { config: gpt2(0.1).into(), microbatches: 3, ..Run::new(4) };
    let one = run.losses("");
    for schedule in ["gpipe", "zb-h1", "zb-v"] {
        let many = Run { plan: Plan::gpt2().schedule(schedule), ..run.clone() };
        same(&one, &many.losses("pp=2,cp=2"), 1e-10, schedule);
    }
}

#[test]
fn narrow_floats_differ_by_their_rounding() {
    for (dtype, bound) in [(DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let run = Run { dtype, ..Run::new(4) };
        let one = run.losses("");
        for mesh in ["cp=2", "dp=2,cp=2", "pp=2,cp=2"] {
            same(&one, &run.losses(mesh), bound, &format!("{dtype} on {mesh}"));
        }
    }
}

const SMALL: [&str; 10] =
    ["--batch", "4", "--seq", "16", "--lr-schedule", "constant", "--eval-every", "2", "--dtype", "f64"];

fn text(folder: &Folder) -> String {
    folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(60))
}

/// Losses of a run, those held out too.
fn losses(out: &str) -> Vec<f64> {
    let lines = fs::read_to_string(Path::new(out).join("metrics.jsonl")).unwrap();
    let lines: Vec<Json> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.iter().flat_map(|l| [l["loss"].as_f64(), l["val_loss"].as_f64()]).flatten().collect()
}

#[test]
fn a_run_goes_on_from_a_checkpoint_of_another_split() {
    let folder = Folder::new("context-resumed");
    let data = text(&folder);
    for preset in ["tiny", "llama-tiny"] {
        let train = |out: &str, more: &[&str]| {
            let args = ["train", "--data", &data, "--out", out, "--preset", preset, "--save-every", "3"];
            let (code, said) = told(&[&args[..], &SMALL, more].concat());
            assert_eq!(code, 0, "{more:?}: {said}");
            losses(out)
        };
        let one = train(&folder.path(&format!("{preset}-one")), &["--steps", "6", "--mesh", "dp=1"]);
        assert_eq!(one.len(), 9);
        for (first, then) in [("cp=2", "dp=2"), ("tp=2", "dp=2,cp=3"), ("pp=2,cp=2", "cp=5")] {
            let out = folder.path(&format!("{preset}-{first}"));
            train(&out, &["--steps", "3", "--mesh", first]);
            let many = train(&out, &["--steps", "6", "--mesh", then, "--resume"]);
            // What is held out is measured after the last step too.
            let many = [&many[..4], &many[many.len() - 5..]].concat();
            same(&one, &many, 1e-9, &format!("{preset} on {first}, then on {then}"));
        }
    }
}

/// The most bytes that a rank holds in a step.
fn peak(mesh: &str) -> u64 {
    let given = ["explain", "--preset", "tiny", "--seq", "64", "--batch", "32", "--json", "--mesh", mesh];
    let output = shardgrad(&given);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Json>(line).unwrap());
    lines.filter(|l| l["kind"] == "total").map(|l| l["peak_bytes"].as_u64().unwrap()).max().unwrap()
}

#[test]
fn a_rank_holds_the_activations_of_its_tokens_and_is_judged_by_them() {
    let [one, two, four] = ["dp=1", "cp=2", "cp=4"].map(peak);
    assert!(two < one * 7 / 10 && four < two * 7 / 10, "{one}, {two}, {four} bytes");
    let folder = Folder::new("context-memory");
    let (data, out, limit) = (text(&folder), folder.path("out"), ((one + two) / 2).to_string());
    let train = |mesh: &str| {
        let args =
            ["train", "--data", &data, "--out", &out, "--preset", "tiny", "--seq", "64", "--batch", "32"];
        told(
            &[&args[..], &["--steps", "1", "--memory-limit", &limit, "--eval-every", "0", "--mesh", mesh]]
                .concat(),
        )
    };
    let (code, said) = train("dp=1");
    assert!(code == 2 && said.contains("--memory-limit allows"), "{said}");
    let (code, said) = train("cp=2");
    assert_eq!(code, 0, "{said}");
}

#[test]
fn logits_of_split_tokens_are_written_whole() {
    let folder = Folder::new("context-logits");
    let (data, model) = (text(&folder), folder.path("out/model"));
    let (code, said) =
        told(&["train", "--data", &data, "--out", &folder.path("out"), "--steps", "1", "--mesh", "cp=2"]);
    assert_eq!(code, 0, "{said}");
    let written = |mesh: &str| {
        let file = folder.path(&format!("{mesh}.safetensors"));
        let args =
            ["eval", "--model", &model, "--data", &data, "--seq", "9", "--batch", "3", "--dtype", "f64"];
        let (code, said) = told(&[&args[..], &["--mesh", mesh, "--logits", &file]].concat());
        assert_eq!(code, 0, "{said}");
        fs::read(file).unwrap()
    };
    let one = written("dp=1");
    for mesh in ["cp=2", "dp=2,cp=4"] {
        // In f32, of numbers that agree to the rounding of f64.
        let differ = one.iter().zip(&written(mesh)).filter(|(a, b)| a != b).count();
        assert!(one.len() > 3 * 9 * 256 * 4 && differ * 100 < one.len(), "{mesh}: {differ} of {}", one.len());
    }
}
