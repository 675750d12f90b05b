//! A model folder with a `tokenizer.json`: trained on text, measured and continued in its tokens, on any mesh.

use crate::cli::{Folder, shardgrad};
use shardgrad::dist::{Mesh, World};
use std::fs;
use std::path::Path;

/// Runs a command that must succeed; gives what it printed.
fn done(args: &[&str]) -> String {
    let output = shardgrad(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A small random model with the byte-level BPE of the fixtures.
fn folder(name: &str) -> (Folder, String) {
    let folder = Folder::new(name);
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers/bpe/tokenizer.json");
    let config = shardgrad::nn::Gpt2Config {
        eos_token_id: Some(0),
        ..shardgrad::nn::Gpt2Config::new(290, 32, 16, 1, 2)
    };
    let start = folder.0.join("start");
    World::run(Mesh::single(), |rank| {
        use shardgrad::nn::{Gpt2, Model};
        Model::new(rank, Gpt2::new(&config), &Gpt2::plan(&config), 0)?.save(&start)
    })
    .unwrap();
    fs::copy(data, start.join("tokenizer.json")).unwrap();
    let start = start.display().to_string();
    (folder, start)
}

#[test]
fn text_is_trained_on_measured_and_continued_in_the_tokens_of_the_model() {
    let (folder, start) = folder("tokenizer");
    let texts = folder.0.join("texts");
    fs::create_dir(&texts).unwrap();
    for name in ["a.txt", "b.txt"] {
        fs::write(texts.join(name), "the cat sat on the mat and the dog sat on the log\n".repeat(60))
            .unwrap();
    }
    let (texts, out) = (texts.display().to_string(), folder.path("out"));
    let common = ["--data", &texts, "--seq", "16"];
    let told = done(
        &[&["train", "--model", &start, "--steps", "40", "--lr", "1e-2", "--out", &out], &common[..]]
            .concat(),
    );
    assert!(told.contains("2 files of ") && told.contains("nats per token"), "{told}");
    let model = folder.path("out/model");
    let kept = fs::read(Path::new(&model).join("tokenizer.json")).unwrap();
    assert_eq!(kept, fs::read(Path::new(&start).join("tokenizer.json")).unwrap());
    let loss = |dir: &str, mesh: &str| -> f64 {
        let json = done(&[&["eval", "--model", dir, "--json", "--mesh", mesh], &common[..]].concat());
        serde_json::from_str::<serde_json::Value>(&json).unwrap()["loss"].as_f64().unwrap()
    };
    let (before, after) = (loss(&start, "dp=1"), loss(&model, "dp=1"));
    assert!(after < 0.5 * before, "{before} -> {after}");
    assert!((loss(&model, "tp=2") / after - 1.0).abs() < 1e-5);
    let said = |mesh: &str| {
        done(&[
            "generate", "--model", &model, "--prompt", "the cat", "--tokens", "8", "--greedy", "--mesh", mesh,
        ])
    };
    assert!(said("dp=1").starts_with("the cat sat"), "{}", said("dp=1"));
    assert_eq!(said("tp=2"), said("dp=1"));
    // It goes on with " sat": a token that another file may say ends a text.
    let tokens = &fs::read_to_string(Path::new(&model).join("tokenizer.json")).unwrap();
    let tokens: serde_json::Value = serde_json::from_str(tokens).unwrap();
    let sat = tokens["model"]["vocab"]["Ġsat"].as_u64().expect("the file has such a token");
    let file = Path::new(&model).join("generation_config.json");
    fs::write(&file, format!("{{\"eos_token_id\": [1, {sat}]}}")).unwrap();
    assert_eq!(said("dp=1"), "the cat\n");
    let ignored =
        ["generate", "--model", &model, "--prompt", "the cat", "--tokens", "8", "--greedy", "--ignore-end"];
    assert!(done(&ignored).starts_with("the cat sat"));
    fs::write(&file, "{").unwrap();
    assert_eq!(crate::cli::told(&ignored[..5]).0, 2);
}
