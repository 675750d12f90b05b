//! Expert parallelism, alone and with every other axis: losses match one rank, generated text does not depend on the mesh, and a rank
//! holds only its experts.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use crate::explain::peak_bytes;
use crate::resume::{refused, text, train};
use crate::training_run::{Run, same, same_bits};
use shardgrad::nn::ExpertsConfig;
use shardgrad::nn::{LanguageModel, LlamaConfig, LlamaKind};
use shardgrad_testing::sample;

fn run(kind: LlamaKind, experts: ExpertsConfig) -> Run {
    let config = LlamaConfig {
        experts: Some(experts),
        initializer_range: 0.2,
        ..LlamaConfig::new(kind, 19, 8, [12, 10], 4, [6, 3])
    };
    let config = config.into();
    Run { plan: LanguageModel::plan(&config), config, ..Run::new(3) }
}

/// To rounding: with canonical sums no rows of experts are gathered or exchanged.
#[test]
fn losses_match_one_rank_on_every_combination_of_axes() {
    let models = [
        (LlamaKind::Mixtral, ExpertsConfig::new(5, 2, 10)),
        (LlamaKind::Qwen3Moe, ExpertsConfig { decoder_sparse_step: 2, ..ExpertsConfig::new(8, 3, 6) }),
    ];
    for (number, (kind, experts)) in models.into_iter().enumerate() {
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
        for (mesh, microbatches, recompute) in sample(number, cases) {
            let many = Run { microbatches, recompute, ..run.clone() };
            same(&one, &many.losses(mesh), 1e-9, &format!("{kind:?} on {mesh} in {microbatches}"));
        }
    }
}

#[test]
fn runs_with_canonical_sums_have_the_bits_of_one_rank() {
    let run = Run { rows: 12, steps: 2, ..run(LlamaKind::Mixtral, ExpertsConfig::new(5, 2, 10)) };
    let run = run.in_leaves(12);
    let one = run.bits("");
    let cases = [
        ("ep=2", 3, false),
        ("ep=3,tp=2", 1, true),
        ("dp=2,ep=2", 3, false),
        ("ep=2,cp=2", 1, false),
        ("pp=2,dp=2,ep=2", 1, false),
    ];
    for (mesh, microbatches, recompute) in cases {
        let many = Run { microbatches, recompute, ..run.clone() };
        same_bits(&one, &many.bits(mesh), &format!("{mesh} in {microbatches}"));
    }
}

#[test]
fn losses_of_exchanged_experts_match_one_rank() {
    let run = run(LlamaKind::Mixtral, ExpertsConfig::new(5, 2, 10));
    let one = run.losses("");
    let cases = [
        ("ep=2", 1, false),
        ("ep=3", 2, true),
        ("ep=4", 1, false),
        ("ep=6", 1, false),
        ("dp=2,ep=2", 1, false),
        ("ep=2,tp=2", 3, false),
        ("ep=2,cp=2", 1, true),
        ("pp=2,ep=2", 3, false),
        ("pp=2,dp=2,ep=2", 1, false),
    ];
    for (mesh, microbatches, recompute) in cases {
        let many = Run { microbatches, recompute, plan: run.plan.clone().exchange_experts(), ..run.clone() };
        same(&one, &many.losses(mesh), 1e-9, &format!("exchanged on {mesh} in {microbatches}"));
    }
}

#[test]
fn split_backward_schedules_support_expert_parallel() {
    let run = Run { microbatches: 3, steps: 2, ..run(LlamaKind::Mixtral, ExpertsConfig::new(4, 2, 10)) };
    let one = run.losses("");
    for schedule in ["gpipe", "zb-h1", "zb-v"] {
        for plan in [run.plan.clone().gather_experts(), run.plan.clone().exchange_experts()] {
            let many = Run { plan: plan.pipeline_schedule(schedule), ..run.clone() };
            same(&one, &many.losses("pp=2,ep=2"), 1e-10, schedule);
        }
    }
}

#[test]
fn generated_text_does_not_depend_on_the_mesh() {
    let folder = Folder::new("experts-generate");
    let (data, out) = (text(&folder), folder.path("out"));
    let train = ["--batch", "4", "--seq", "16", "--preset", "mixtral-tiny", "--steps", "3", "--dtype", "f64"];
    let train = [&["train", "--data", &data, "--out", &out, "--mesh", "ep=2"], &train[..]].concat();
    let (code, message) = exit_code_and_stderr(&train);
    assert_eq!(code, 0, "{message}");
    let model = folder.path("out/model");
    let text = |mesh: &str| {
        let args = ["--prompt", "The quick", "--tokens", "12", "--greedy", "--dtype", "f64", "--mesh", mesh];
        let output = shardgrad(&[&["generate", "--model", &model], &args[..]].concat());
        assert!(output.status.success(), "{mesh}: {output:?}");
        output.stdout
    };
    let alone = text("dp=1");
    assert!(alone.len() > 9, "text follows the prompt");
    for mesh in ["ep=2", "ep=2,tp=2"] {
        assert_eq!(text(mesh), alone, "{mesh}");
    }
}

#[test]
fn balanced_runs_log_the_load_and_resume_alike_on_other_meshes() {
    let folder = Folder::new("balanced-experts");
    let text = text(&folder);
    let options = ["--data", &text, "--preset", "mixtral-nano", "--threads", "1", "--save-every", "2"];
    let options = [&options[..], &["--router-bias-update-rate", "0.05"]].concat();
    let [alone, many] = ["alone", "many"].map(|name| folder.path(name));
    train(&[&options[..], &["--steps", "4", "--out", &alone]].concat());
    train(&[&options[..], &["--steps", "2", "--mesh", "pp=2,ep=2", "--out", &many]].concat());
    train(&[&options[..], &["--steps", "4", "--mesh", "dp=2,tp=2", "--out", &many, "--resume"]].concat());
    let lines = |out: &str| -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(format!("{out}/metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let (alone, many) = (lines(&alone), lines(&many));
    assert_eq!((alone.len(), many.len()), (4, 4));
    let whole = |line: &serde_json::Value, of: &str| {
        line[format!("expert_tokens_{of}")].as_f64().map(|tokens| tokens as u64)
    };
    for (a, b) in alone.iter().zip(&many) {
        let fields = ["expert_imbalance", "expert_imbalance_max", "expert_tokens_min", "expert_tokens_max"];
        for field in fields.into_iter().chain(["tokens_per_expert"]) {
            assert_eq!(a[field], b[field], "{field}: {a} {b}");
        }
        assert!(a["expert_imbalance"].as_f64().is_some_and(|x| (1.0..=8.0).contains(&x)), "{a}");
        let layers = a["tokens_per_expert"].as_array().unwrap();
        let tokens = layers.iter().flat_map(|layer| layer.as_array().unwrap()).map(|n| n.as_u64().unwrap());
        assert_eq!((tokens.clone().max(), tokens.min()), (whole(a, "max"), whole(a, "min")), "{a}");
    }
    let config = std::fs::read_to_string(folder.path("many/model/config.json")).unwrap();
    assert!(config.contains("\"router_bias_update_rate\": 0.05"), "{config}");
    // The saved model has its biases, and a model without them begins with zeros.
    let model = folder.path("many/model");
    let (code, message) = exit_code_and_stderr(&["eval", "--model", &model, "--data", &text, "--seq", "16"]);
    assert_eq!(code, 0, "{message}");
    let message = refused(&["--data", &text, "--preset", "tiny", "--router-bias-update-rate", "0.05"]);
    assert!(message.contains("the model has none"), "{message}");
}

#[test]
fn rank_holds_only_its_experts() {
    let peak =
        |mesh| peak_bytes(&["--preset", "mixtral-tiny", "--seq", "16", "--batch", "4", "--mesh", mesh]);
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
