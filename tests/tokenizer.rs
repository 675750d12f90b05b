//! Training, evaluation and generation with a `tokenizer.json`, on any mesh.

use crate::cli::{Folder, shardgrad};
use approx::assert_relative_eq;
use shardgrad::dist::{Mesh, World};
use std::fs;
use std::path::Path;

/// Runs a command that must succeed; returns stdout.
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
fn train_eval_and_generate_use_the_model_tokenizer() {
    let (folder, start) = folder("tokenizer");
    let texts = folder.0.join("texts");
    fs::create_dir(&texts).unwrap();
    for name in ["a.txt", "b.txt"] {
        fs::write(texts.join(name), "the cat sat on the mat and the dog sat on the log\n".repeat(60))
            .unwrap();
    }
    let (texts, out) = (texts.display().to_string(), folder.path("out"));
    let common = ["--data", &texts, "--seq", "16"];
    let train_output = done(
        &[&["train", "--model", &start, "--steps", "40", "--lr", "1e-2", "--out", &out], &common[..]]
            .concat(),
    );
    assert!(
        train_output.contains("2 files of ") && train_output.contains("nats per token"),
        "{train_output}"
    );
    let model = folder.path("out/model");
    let kept = fs::read(Path::new(&model).join("tokenizer.json")).unwrap();
    assert_eq!(kept, fs::read(Path::new(&start).join("tokenizer.json")).unwrap());
    let loss = |dir: &str, mesh: &str| -> f64 {
        let json = done(&[&["eval", "--model", dir, "--json", "--mesh", mesh], &common[..]].concat());
        serde_json::from_str::<serde_json::Value>(&json).unwrap()["loss"].as_f64().unwrap()
    };
    let (before, after) = (loss(&start, "dp=1"), loss(&model, "dp=1"));
    assert!(after < 0.5 * before, "{before} -> {after}");
    assert_relative_eq!(loss(&model, "tp=2"), after, max_relative = 1e-5);
    let generated = |mesh: &str| {
        done(&[
            "generate", "--model", &model, "--prompt", "the cat", "--tokens", "8", "--greedy", "--mesh", mesh,
        ])
    };
    assert!(generated("dp=1").starts_with("the cat sat"), "{}", generated("dp=1"));
    assert_eq!(generated("tp=2"), generated("dp=1"));
    // The generated " sat" becomes an end-of-text token by generation_config.json.
    let tokens = &fs::read_to_string(Path::new(&model).join("tokenizer.json")).unwrap();
    let tokens: serde_json::Value = serde_json::from_str(tokens).unwrap();
    let sat = tokens["model"]["vocab"]["Ġsat"].as_u64().expect("the file has such a token");
    let file = Path::new(&model).join("generation_config.json");
    fs::write(&file, format!("{{\"eos_token_id\": [1, {sat}]}}")).unwrap();
    assert_eq!(generated("dp=1"), "the cat\n");
    let ignored =
        ["generate", "--model", &model, "--prompt", "the cat", "--tokens", "8", "--greedy", "--ignore-end"];
    assert!(done(&ignored).starts_with("the cat sat"));
    fs::write(&file, "{").unwrap();
    assert_eq!(crate::cli::exit_code_and_stderr(&ignored[..5]).0, 2);
}

#[test]
fn processes_with_different_tokenizers_are_refused() {
    let (folder, start) = folder("two-tokenizers");
    let other = folder.path("other");
    fs::create_dir(&other).unwrap();
    for entry in fs::read_dir(&start).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, Path::new(&other).join(path.file_name().unwrap())).unwrap();
    }
    // Two tokens exchange their ids: the same texts become other rows, which no shape shows.
    let file = Path::new(&other).join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
    vocab["a"] = b;
    vocab["b"] = a;
    fs::write(&file, json.to_string()).unwrap();
    let (data, out) = (folder.file("text", "abba ".repeat(400)), folder.path("out"));
    let port = crate::processes::free_port();
    let start_rank = |(rank, model): (usize, &String)| {
        let args = [
            "train", "--model", model, "--data", &data, "--out", &out, "--mesh", "dp=2", "--seq", "8",
            "--steps", "1",
        ];
        crate::processes::spawn_rank(rank, 2, port, &args)
    };
    let ranks = [&start, &other].into_iter().enumerate().map(start_rank).collect::<Vec<_>>();
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains("the hash of the tokenizer is "), "{message}");
    }
    assert!(!Path::new(&out).join("model").exists());
}
