//! The order of tokens on a causal ring of the command line: losses, gradient norms, validation losses and checkpoints are those of one
//! rank with every other axis, and `explain` states order and balance.

use crate::cli::{Folder, shardgrad};
use crate::resume::{record, text, train};
use crate::training_run::same;
use serde_json::Value;
use shardgrad_testing::sample;
use std::fs;
use std::path::Path;

/// Losses, gradient norms and validation losses of a run in f64, in rows of 16 tokens, which six chunks do not divide.
fn outcome(out: &str, data: &str, more: &[&str]) -> Vec<f64> {
    train(&[&["--data", data, "--out", out, "--dtype", "f64"], more].concat());
    let of = |entry: &Value| ["loss", "grad_norm", "val_loss"].map(|name| entry[name].as_f64());
    record(Path::new(out)).iter().flat_map(of).flatten().collect()
}

fn eval(model: &str, data: &str, more: &[&str]) -> f64 {
    let given = ["eval", "--model", model, "--data", data, "--seq", "16", "--dtype", "f64", "--json"];
    let output = shardgrad(&[&given[..], more].concat());
    assert!(output.status.success(), "{more:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["loss"].as_f64().unwrap()
}

#[test]
fn a_balanced_ring_gives_the_losses_of_one_rank_with_every_other_axis() {
    let folder = Folder::new("ring-order");
    let data = text(&folder);
    let of_all = ["--mesh cp=3", "--mesh pp=2,cp=2 --microbatches 2", "--mesh dp=2,cp=2 --zero 2"];
    let of_tp = ["--mesh cp=2,tp=2 --sequence-parallel", "--mesh pp=2,fsdp=2,cp=2 --schedule zb-h1"];
    let of_experts = ["--mesh ep=2,cp=2 --experts exchange"];
    for (preset, styles) in [
        ("nano", [&of_all[..], &of_tp].concat()),
        ("llama-nano", [&of_all[1..], &of_tp].concat()),
        ("mixtral-nano", [&of_experts[..], &of_all[..1]].concat()),
    ] {
        let common = ["--preset", preset, "--steps", "2"];
        let one_rank = folder.path(preset);
        let one = outcome(&one_rank, &data, &[&common[..], &["--mesh", "dp=1"]].concat());
        assert_eq!(one.len(), 5);
        let model = format!("{one_rank}/model");
        let loss = eval(&model, &data, &[]);
        for (i, style) in sample(0, styles.iter().enumerate()) {
            let style: Vec<&str> = style.split(' ').chain(["--context", "ring"]).collect();
            let out = folder.path(&format!("{preset}-{i}"));
            let many = outcome(&out, &data, &[&common[..], &style].concat());
            same(&one, &many, 1e-9, &format!("{preset}, {style:?}"));
        }
        for mesh in ["cp=3", "pp=2,cp=2"] {
            let of_ring = eval(&model, &data, &["--mesh", mesh, "--context", "ring"]);
            same(&[loss], &[of_ring], 1e-9, &format!("eval of {preset} on {mesh}"));
        }
    }
}

#[test]
fn a_run_on_a_ring_resumes_without_one_and_the_other_way_round() {
    let folder = Folder::new("ring-resumed");
    let data = text(&folder);
    let run = |out: &str, steps: &str, more: &[&str]| {
        outcome(out, &data, &[&["--save-every", "2", "--steps", steps], more].concat())
    };
    let one = run(&folder.path("one"), "4", &["--mesh", "dp=1"]);
    let ring = ["--mesh", "cp=2", "--context", "ring"];
    for (i, [first, then]) in
        [[&ring[..], &["--mesh", "dp=2"]], [&["--mesh", "dp=1"], &ring]].into_iter().enumerate()
    {
        let out = folder.path(&i.to_string());
        run(&out, "2", first);
        let many = run(&out, "4", &[then, &["--resume"]].concat());
        same(&one, &many, 1e-9, &format!("{first:?}, then {then:?}"));
    }
}

#[test]
fn a_ring_keeps_the_order_of_tokens_that_dropout_masks_follow() {
    let folder = Folder::new("ring-dropout");
    let data = text(&folder);
    outcome(&folder.path("first"), &data, &["--mesh", "dp=1", "--steps", "2"]);
    // A ring refuses dropout on attention weights alone.
    let config = Path::new(&folder.path("first")).join("model/config.json");
    let mut fields: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    (fields["embd_pdrop"], fields["resid_pdrop"]) = (0.2.into(), 0.3.into());
    assert_eq!(fields["attn_pdrop"], 0.0);
    fs::write(&config, fields.to_string()).unwrap();
    let model = folder.path("first/model");
    let run = |name: &str, more: &[&str]| {
        outcome(&folder.path(name), &data, &[&["--model", &model, "--steps", "2"], more].concat())
    };
    let one = run("one", &["--mesh", "dp=1"]);
    for mesh in ["cp=2", "dp=2,cp=3"] {
        same(&one, &run(mesh, &["--mesh", mesh, "--context", "ring"]), 1e-9, mesh);
    }
}

#[test]
fn logits_of_a_balanced_ring_are_in_the_order_of_the_row() {
    let folder = Folder::new("ring-logits");
    let data = text(&folder);
    outcome(&folder.path("out"), &data, &["--mesh", "dp=1", "--steps", "2"]);
    let logits = |more: &[&str]| {
        let file = folder.path("logits.safetensors");
        eval(&folder.path("out/model"), &data, &[&["--batch", "2", "--logits", &file], more].concat());
        fs::read(file).unwrap()
    };
    let (one, ring) = (logits(&[]), logits(&["--mesh", "cp=3", "--context", "ring"]));
    // Logits are stored in f32; the f64 values agree to rounding.
    let differ = one.iter().zip(&ring).filter(|(a, b)| a != b).count();
    assert!(one.len() == ring.len() && differ * 100 < one.len(), "{differ} of {}", one.len());
}

#[test]
fn explain_states_the_order_of_tokens_and_the_balance_of_a_ring() {
    let explain = |more: &[&str]| {
        let given = ["explain", "--preset", "tiny", "--batch", "4", "--seq", "64", "--mesh", "cp=4"];
        let output = shardgrad(&[&given[..], more].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let text = explain(&["--context", "ring"]);
    let line = "zigzag order, each of 4 ranks of the ring with a chunk from the head and one from the tail of a row: the busiest computes \
                1.00 times the mean number of causal scores, 1.74 times in the order of the row";
    assert!(text.contains(line), "{text}");
    assert!(!explain(&["--context", "gather"]).contains("causal scores"));
    let json = explain(&["--context", "ring", "--json"]);
    let ring = json.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let ring: Vec<Value> = ring.filter(|line| line["kind"] == "ring").collect();
    assert_eq!(ring.len(), 1);
    // 64 tokens have 64 * 65 / 2 causal scores.
    assert_eq!(
        (&ring[0]["token_order"], &ring[0]["causal_scores"]),
        (&"zigzag".into(), &vec![520; 4].into())
    );
}
