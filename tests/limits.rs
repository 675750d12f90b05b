//! What cannot fit the memory is refused before it begins.

use crate::cli::{Folder, shardgrad, told};
use shardgrad::nn::{Gpt2, Gpt2Config};
use shardgrad::prelude::*;
use std::path::Path;

/// A model folder that writes for ever.
fn model(folder: &Folder) -> String {
    let dir = folder.path("model");
    World::run(Mesh::single(), |rank| {
        let config = Gpt2Config::new(256, 64, 16, 1, 2);
        Model::new(rank, Gpt2::new(&config), &Gpt2::plan(&config), 0)?.save(Path::new(&dir))
    })
    .unwrap();
    dir
}

#[test]
fn what_cannot_fit_is_refused_before_it_begins() {
    let folder = Folder::new("memory");
    let (data, out) = (folder.file("text", "abc ".repeat(3000)), folder.path("out"));
    let train = ["train", "--data", &data, "--out", &out, "--batch", "2", "--seq", "8", "--steps", "1"];
    let with = |more: &[&str]| told(&[&train[..], more].concat());
    // More than a terabyte in weights, gradients and averages, on any machine that runs tests; twice that on two ranks.
    for mesh in ["dp=1", "dp=2", "tp=2", "pp=2"] {
        let (code, said) = with(&["--preset", "llama-70b", "--mesh", mesh]);
        assert_eq!(code, 2, "{said}");
        assert_eq!(said.lines().next().unwrap().matches("TiB").count(), 1, "{said}");
        let asked = format!("training llama-70b on mesh({mesh}) needs about ");
        for part in [asked.as_str(), " left", "help       take a smaller model", "--memory-limit BYTES"] {
            assert!(said.contains(part), "no `{part}` in: {said}");
        }
        assert!(!Path::new(&out).exists(), "nothing is written");
    }
    let (code, said) = with(&["--mesh", "dp=2", "--memory-limit", "100KB"]);
    assert!(code == 2 && said.contains("and --memory-limit allows 97.7 KiB"), "{said}");
    let (code, said) = with(&["--mesh", "dp=2", "--memory-limit", "1GB"]);
    assert_eq!(code, 0, "{said}");
    let model = model(&folder);
    for command in [&["eval", "--data", &data][..], &["generate", "--prompt", "a"]] {
        let limited = [command, &["--model", &model, "--memory-limit", "1KB"]].concat();
        let (code, said) = told(&limited);
        assert!(code == 2 && said.contains("on a rank, and --memory-limit allows 1000 B"), "{said}");
        assert!(shardgrad(&[command, &["--model", &model]].concat()).status.success());
    }
}
