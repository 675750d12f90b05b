//! Non-finite numbers stop a run on every rank before the update, with a message that names step, op, module and rank, independent of timing.

use crate::cli::{Folder, exit_code_and_stderr};
use shardgrad::nn::{Gpt2, Gpt2Config};
use shardgrad::prelude::*;
use std::fs;
use std::path::Path;

const WIDTH: usize = 8;
const HIDDEN: usize = 4 * WIDTH;
const BYTES: usize = 256;

/// Saves a model in which `values(name, element)` replaces some parameters.
fn model(folder: &Folder, dtype: DType, values: impl Fn(&str, usize) -> Option<f64> + Sync) -> String {
    let dir = folder.path("model");
    let config =
        Gpt2Config { tie_word_embeddings: false, ..Gpt2Config::new(BYTES, 8, WIDTH, 2, 2).with_dropout(0.0) };
    World::run(Mesh::single(), |rank| {
        let model = Model::with_dtype(rank, Gpt2::new(&config), &Plan::new(), 1, dtype)?;
        for param in model.params() {
            let mut data = param.tensor().to_f64()?;
            for (i, x) in data.iter_mut().enumerate() {
                *x = values(&param.name(), i).unwrap_or(*x);
            }
            param.set_tensor(Tensor::from_host(rank, param.shape(), &data)?.cast(dtype))?;
        }
        model.save(Path::new(&dir))
    })
    .unwrap();
    dir
}

/// Trains on rows of eight `a`, one of them (`row`) with a `z`, two rows per step; `mesh` may be followed by options. Returns stderr and the
/// number of completed steps.
fn train(folder: &Folder, model: &str, row: usize, mesh: &str, dtype: &str) -> (String, usize) {
    let mut text = vec![b'a'; 800];
    text[8 * row + 3] = b'z';
    let (data, out) = (folder.file("text", text), folder.path("out"));
    let given = ["train", "--model", model, "--data", &data, "--out", &out, "--dtype", dtype, "--mesh"];
    let mesh_and_options: Vec<&str> = mesh.split(' ').collect();
    let rest = ["--no-shuffle", "--batch", "2", "--seq", "8", "--steps", "5", "--eval-every", "0"];
    let (code, message) = exit_code_and_stderr(&[&given[..], &mesh_and_options, &rest].concat());
    assert_eq!(code, 1, "{mesh}: {message}");
    // No model is saved: there is no good step, or its weights are not all finite.
    let steps = fs::read_to_string(Path::new(&out).join("metrics.jsonl")).map_or(0, |m| m.lines().count());
    assert!(!Path::new(&out).join("model").exists(), "{mesh}: {message}");
    let unsaved = format!("after step {steps} 1 of 29 parameters are not finite, first `wte.weight`");
    assert_eq!(message.contains(&unsaved), steps > 0, "{mesh}: {message}");
    let step = format!("error: step {}: the loss is ", steps + 1);
    assert!(message.contains(&step) && message.contains("; the update was not applied"), "{mesh}: {message}");
    (message, steps)
}

/// Returns the text after a label of a message.
fn line<'a>(message: &'a str, label: &str) -> &'a str {
    let found = message.lines().find_map(|l| l.trim_start().strip_prefix(label));
    found.unwrap_or_else(|| panic!("no line `{label}` in: {message}")).trim()
}

#[test]
fn first_non_finite_forward_op_and_rank_are_named() {
    let folder = Folder::new("not-finite-forward");
    // The second half of the hidden units, on the second rank with tp=2.
    let huge =
        |name: &str, i: usize| (name == "h.1.mlp.c_fc.weight" && i % HIDDEN >= HIDDEN / 2).then_some(3e38);
    let model = model(&folder, DType::F32, huge);
    for (mesh, rank) in [
        ("dp=1", "0 (dp=0)"),
        ("dp=2", "0 (dp=0)"),
        ("tp=2", "1 (tp=1)"),
        ("dp=2,tp=2", "1 (dp=0, tp=1)"),
        ("pp=2 --cut 1,1", "1 (pp=1)"),
    ] {
        let (message, steps) = train(&folder, &model, 50, mesh, "f32");
        assert_eq!(steps, 0);
        assert!(line(&message, "first").starts_with("mlp: the result is "), "{mesh}: {message}");
        assert_eq!(line(&message, "at"), "h.1.mlp.c_fc.out", "{mesh}");
        assert!(line(&message, "rank").starts_with(rank), "{mesh}: {message}");
        assert!(line(&message, "called at").contains(".rs:"), "{mesh}: {message}");
    }
}

#[test]
fn pipeline_stage_that_made_the_non_finite_value_is_named() {
    let folder = Folder::new("not-finite-stage");
    let huge =
        |name: &str, i: usize| (name == "h.0.mlp.c_fc.weight" && i % HIDDEN >= HIDDEN / 2).then_some(3e38);
    let model = model(&folder, DType::F32, huge);
    for (mesh, rank) in [("pp=2", "0 (pp=0)"), ("pp=2,dp=2", "0 (pp=0, dp=0)")] {
        let (message, _) = train(&folder, &model, 50, mesh, "f32");
        assert!(line(&message, "first").starts_with("mlp: the result is "), "{mesh}: {message}");
        assert_eq!(line(&message, "at"), "h.0.mlp.c_fc.out", "{mesh}");
        assert!(line(&message, "rank").starts_with(rank), "{mesh}: {message}");
    }
}

#[test]
fn nan_parameter_is_distinguished_from_a_nan_op() {
    let folder = Folder::new("not-finite-parameter");
    let row = usize::from(b'z');
    let nan = |name: &str, i: usize| (name == "wte.weight" && i / WIDTH == row).then_some(f64::NAN);
    let model = model(&folder, DType::F32, nan);
    // Row 5 is the second row of step 3.
    for (mesh, rank) in [
        ("dp=1", "0 (dp=0)"),
        ("dp=2", "1 (dp=1)"),
        ("tp=2", "0 (tp=0)"),
        ("dp=2,tp=2", "2 (dp=1, tp=0)"),
        ("pp=2 --cut 1,1", "0 (pp=0)"),
        // The second stage is only the head, whose first op gets a non-finite input from the first stage.
        ("pp=2 --cut 2,0", "0 (pp=0)"),
    ] {
        let (message, steps) = train(&folder, &model, 5, mesh, "f32");
        assert_eq!(steps, 2, "{mesh}");
        assert_eq!(line(&message, "first"), "the weight wte.weight already holds NaN", "{mesh}: {message}");
        assert_eq!(line(&message, "at"), "wte.weight", "{mesh}");
        assert!(line(&message, "rank").starts_with(rank), "{mesh}: {message}");
    }
}

#[test]
fn loaded_nan_weight_is_named_at_the_first_step() {
    let folder = Folder::new("not-finite-loaded");
    let nan = |name: &str, i: usize| (name == "h.1.mlp.c_fc.weight" && i == 200).then_some(f64::NAN);
    let model = model(&folder, DType::F32, nan);
    let (data, out) = (folder.file("text", "a".repeat(800)), folder.path("out"));
    for mesh in ["dp=1", "dp=2", "tp=2", "pp=2"] {
        let given = ["train", "--model", &model, "--data", &data, "--out", &out, "--mesh", mesh];
        let (code, message) =
            exit_code_and_stderr(&[&given[..], &["--batch", "2", "--seq", "8", "--steps", "2"]].concat());
        assert_eq!(code, 1, "{mesh}: {message}");
        let first = "the loaded weight h.1.mlp.c_fc.weight already holds NaN";
        assert_eq!(line(&message, "first"), first, "{mesh}: {message}");
        assert_eq!(line(&message, "at"), "h.1.mlp.c_fc.out", "{mesh}: {message}");
    }
}

/// Large weights of both signs in the head after a small norm: logits are 0, and only the gradient of the norm's weight is large, 2.6 times the
/// weights of the head.
fn large_head(name: &str, i: usize, large: f64) -> Option<f64> {
    match name {
        "lm_head.weight" if i / WIDTH < BYTES / 2 => Some(large),
        "lm_head.weight" => Some(-large),
        "ln_f.weight" => Some(1.0 / large),
        "wte.weight" => Some(if i.is_multiple_of(WIDTH) { 10.0 } else { 0.0 }),
        _ => None,
    }
}

#[test]
fn eval_and_generate_refuse_nan_weights() {
    let folder = Folder::new("not-finite-result");
    let model = model(&folder, DType::F32, |name, _| (name == "ln_f.weight").then_some(f64::NAN));
    let data = folder.file("text", "a".repeat(400));
    for (args, why) in [
        (&["eval", "--data", &data, "--seq", "8", "--json"][..], "error: eval: the mean loss of "),
        (
            &["generate", "--prompt", "a", "--greedy"],
            "error: generate: the logits of new token 1 are not finite",
        ),
        (&["generate", "--prompt", "a"], "error: generate: the logits of new token 1 are not finite"),
    ] {
        let (code, message) = exit_code_and_stderr(&[args, &["--model", &model]].concat());
        assert!(code == 1 && message.starts_with(why), "{message}");
        assert!(line(&message, "help").ends_with("overflow in --dtype; try --dtype f32"), "{message}");
    }
}

#[test]
fn first_non_finite_backward_op_is_named() {
    let folder = Folder::new("not-finite-backward");
    let model = model(&folder, DType::F32, |name, i| large_head(name, i, 3e38));
    let on_pipeline = ("pp=2 --cut 1,1", '1');
    for (mesh, rank) in [("dp=1", '0'), ("dp=2", '0'), ("tp=2", '0'), ("dp=2,tp=2", '0'), on_pipeline] {
        let (message, steps) = train(&folder, &model, 50, mesh, "f32");
        assert_eq!(steps, 0);
        assert!(message.contains("the loss is 5.5"), "{mesh}: the forward pass is finite: {message}");
        assert!(
            line(&message, "first").starts_with("layer_norm_backward: the result is "),
            "{mesh}: {message}"
        );
        assert_eq!(line(&message, "at"), "ln_f.bias, in the backward pass", "{mesh}");
        assert!(line(&message, "rank").starts_with(rank), "{mesh}: {message}");
        assert!(!message.contains("called at"), "{mesh}: the line is in a vjp, not in user code: {message}");
    }
}

#[test]
fn overflowing_gradient_norm_is_distinguished_from_a_gradient() {
    let folder = Folder::new("not-finite-norm");
    let model = model(&folder, DType::F64, |name, i| large_head(name, i, 1e200));
    for mesh in ["dp=1", "dp=2", "tp=2", "pp=2"] {
        let (message, steps) = train(&folder, &model, 50, mesh, "f64");
        assert_eq!(steps, 0);
        assert!(
            message.contains("the loss is 5.5") && message.contains("gradient norm inf"),
            "{mesh}: {message}"
        );
        assert!(line(&message, "first").starts_with("no op: all gradients are finite"), "{mesh}: {message}");
        assert_eq!(line(&message, "help"), "try a smaller learning rate", "{mesh}");
    }
}
