//! Evaluation with uneven batches: the loss is the mean over all tokens, for any batch size and mesh.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use approx::relative_eq;
use serde_json::Value as Json;

/// Returns the loss and number of tokens reported by `eval`.
fn measured(args: &[&str]) -> (f64, u64) {
    let output = shardgrad(&[args, &["--dtype", "f64", "--json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    let json: Json = serde_json::from_slice(&output.stdout).unwrap();
    (json["loss"].as_f64().unwrap(), json["tokens"].as_u64().unwrap())
}

#[test]
fn eval_loss_is_independent_of_batch_size_and_mesh() {
    let folder = Folder::new("remainders");
    // Rows with very different losses: the model is trained on the first kind only.
    let known = "the cat sat on the mat. ".repeat(40);
    let (data, out) = (folder.file("text", &known), folder.path("out"));
    let train = ["train", "--data", &data, "--out", &out, "--preset", "nano", "--seq", "8", "--steps", "20"];
    let (code, message) =
        exit_code_and_stderr(&[&train[..], &["--batch", "4", "--eval-every", "0", "--lr", "0.01"]].concat());
    assert_eq!(code, 0, "{message}");
    let model = folder.path("out/model");
    // 7 windows of 8 tokens, the last unlike the others, and 3 more tokens.
    let other = folder.file("other", format!("{}ZQXJKVWY#!?", &known[..48]));
    let eval = ["eval", "--model", &model, "--data", &other, "--split", "all", "--seq", "8"];
    let of = |batch: &str, mesh: &str| measured(&[&eval[..], &["--batch", batch, "--mesh", mesh]].concat());
    let (loss, tokens) = of("7", "dp=1");
    assert_eq!(tokens, 7 * 8);
    for batch in ["1", "2", "3", "4", "5", "6", "100"] {
        for mesh in ["dp=1", "dp=2", "dp=3", "dp=2,tp=2", "cp=2", "pp=2"] {
            let (other, count) = of(batch, mesh);
            assert_eq!(count, tokens);
            let same = relative_eq!(other, loss, max_relative = 1e-9);
            assert!(same, "{mesh}, batch {batch}: {other} instead of {loss}");
        }
    }
}
