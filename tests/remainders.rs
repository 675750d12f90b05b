//! Measurements whose pieces do not divide: the loss is the mean over all tokens, whatever the batch and the mesh.

use crate::cli::{Folder, shardgrad, told};
use serde_json::Value as Json;

/// The loss and the number of tokens that `eval` reports.
fn measured(args: &[&str]) -> (f64, u64) {
    let output = shardgrad(&[args, &["--dtype", "f64", "--json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    let json: Json = serde_json::from_slice(&output.stdout).unwrap();
    (json["loss"].as_f64().unwrap(), json["tokens"].as_u64().unwrap())
}

#[test]
fn eval_weighs_every_token_alike_whatever_the_batch_and_the_mesh() {
    let folder = Folder::new("remainders");
    // Rows far from each other in loss: the model has seen the first kind only.
    let known = "the cat sat on the mat. ".repeat(40);
    let (data, out) = (folder.file("text", &known), folder.path("out"));
    let train = ["train", "--data", &data, "--out", &out, "--preset", "tiny", "--seq", "8", "--steps", "20"];
    let (code, said) = told(&[&train[..], &["--batch", "4", "--eval-every", "0", "--lr", "0.01"]].concat());
    assert_eq!(code, 0, "{said}");
    let model = folder.path("out/model");
    // 7 windows of 8 tokens, of which the last is unlike the others, and 3 tokens more.
    let other = folder.file("other", format!("{}ZQXJKVWY#!?", &known[..48]));
    let eval = ["eval", "--model", &model, "--data", &other, "--split", "all", "--seq", "8"];
    let of = |batch: &str, mesh: &str| measured(&[&eval[..], &["--batch", batch, "--mesh", mesh]].concat());
    let (loss, tokens) = of("7", "dp=1");
    assert_eq!(tokens, 7 * 8);
    for batch in ["1", "2", "3", "4", "5", "6", "100"] {
        for mesh in ["dp=1", "dp=2", "dp=3", "dp=2,tp=2", "cp=2"] {
            let (other, count) = of(batch, mesh);
            assert_eq!(count, tokens);
            assert!((other - loss).abs() < 1e-9 * loss, "{mesh}, batch {batch}: {other} instead of {loss}");
        }
    }
}
