//! A number that is not finite stops a run on every rank, before the update, with a message that names step, op, place in
//! the model and rank: the same message whatever the timing.

use crate::cli::{Folder, told};
use shardgrad::nn::{Gpt2, Gpt2Config};
use shardgrad::prelude::*;
use std::fs;
use std::path::Path;

const WIDTH: usize = 8;
const HIDDEN: usize = 4 * WIDTH;
const BYTES: usize = 256;

/// A model folder in which some parameters have other values: `values(name, element)` replaces what it gives.
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

/// Trains on rows of eight `a`, the row `row` with a `z` in it, two rows a step, on a mesh, behind which options may stand. Gives
/// what was said and how many steps were taken.
fn train(folder: &Folder, model: &str, row: usize, mesh: &str, dtype: &str) -> (String, usize) {
    let mut text = vec![b'a'; 800];
    text[8 * row + 3] = b'z';
    let (data, out) = (folder.file("text", text), folder.path("out"));
    let given = ["train", "--model", model, "--data", &data, "--out", &out, "--dtype", dtype, "--mesh"];
    let mesh_and_options: Vec<&str> = mesh.split(' ').collect();
    let rest = ["--no-shuffle", "--batch", "2", "--seq", "8", "--steps", "5", "--eval-every", "0"];
    let (code, said) = told(&[&given[..], &mesh_and_options, &rest].concat());
    assert_eq!(code, 1, "{mesh}: {said}");
    // Without a good step nothing is left behind; after one its weights would be, were all of them finite.
    let steps = fs::read_to_string(Path::new(&out).join("metrics.jsonl")).map_or(0, |m| m.lines().count());
    assert!(!Path::new(&out).join("model").exists(), "{mesh}: {said}");
    let unsaved = format!("after step {steps} 1 of 29 tensors are not finite, `wte.weight` first");
    assert_eq!(said.contains(&unsaved), steps > 0, "{mesh}: {said}");
    let step = format!("error: step {}: the loss is ", steps + 1);
    assert!(said.contains(&step) && said.contains("; the step was not taken"), "{mesh}: {said}");
    (said, steps)
}

/// The text behind a label of a message.
fn line<'a>(said: &'a str, label: &str) -> &'a str {
    let found = said.lines().find_map(|l| l.trim_start().strip_prefix(label));
    found.unwrap_or_else(|| panic!("no line `{label}` in: {said}")).trim()
}

#[test]
fn the_op_of_the_forward_pass_and_the_rank_that_holds_it_are_named() {
    let folder = Folder::new("not-finite-forward");
    // The second half of the hidden units: on tp=2 the second rank has them.
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
        let (said, steps) = train(&folder, &model, 50, mesh, "f32");
        assert_eq!(steps, 0);
        assert!(line(&said, "first").starts_with("mlp: the result is "), "{mesh}: {said}");
        assert_eq!(line(&said, "at"), "h.1.mlp.c_fc.out", "{mesh}");
        assert!(line(&said, "rank").starts_with(rank), "{mesh}: {said}");
        assert!(line(&said, "asked for").contains(".rs:"), "{mesh}: {said}");
    }
}

#[test]
fn the_stage_of_a_pipeline_that_made_it_is_named_not_those_that_were_given_it() {
    let folder = Folder::new("not-finite-stage");
    let huge =
        |name: &str, i: usize| (name == "h.0.mlp.c_fc.weight" && i % HIDDEN >= HIDDEN / 2).then_some(3e38);
    let model = model(&folder, DType::F32, huge);
    for (mesh, rank) in [("pp=2", "0 (pp=0)"), ("pp=2,dp=2", "0 (pp=0, dp=0)")] {
        let (said, _) = train(&folder, &model, 50, mesh, "f32");
        assert!(line(&said, "first").starts_with("mlp: the result is "), "{mesh}: {said}");
        assert_eq!(line(&said, "at"), "h.0.mlp.c_fc.out", "{mesh}");
        assert!(line(&said, "rank").starts_with(rank), "{mesh}: {said}");
    }
}

#[test]
fn a_parameter_that_is_not_a_number_is_told_from_an_op_at_the_step_that_meets_it() {
    let folder = Folder::new("not-finite-parameter");
    let row = usize::from(b'z');
    let nan = |name: &str, i: usize| (name == "wte.weight" && i / WIDTH == row).then_some(f64::NAN);
    let model = model(&folder, DType::F32, nan);
    // Row 5 is the second of step 3.
    for (mesh, rank) in [
        ("dp=1", "0 (dp=0)"),
        ("dp=2", "1 (dp=1)"),
        ("tp=2", "0 (tp=0)"),
        ("dp=2,tp=2", "2 (dp=1, tp=0)"),
        ("pp=2 --cut 1,1", "0 (pp=0)"),
        // The second stage is the head alone: few ops, of which the first is given what the first stage made of the parameter.
        ("pp=2 --cut 2,0", "0 (pp=0)"),
    ] {
        let (said, steps) = train(&folder, &model, 5, mesh, "f32");
        assert_eq!(steps, 2, "{mesh}");
        assert_eq!(line(&said, "first"), "the weight wte.weight already holds NaN", "{mesh}: {said}");
        assert_eq!(line(&said, "at"), "wte.weight", "{mesh}");
        assert!(line(&said, "rank").starts_with(rank), "{mesh}: {said}");
    }
}

#[test]
fn a_loaded_weight_that_holds_nan_is_named_at_the_first_step() {
    let folder = Folder::new("not-finite-loaded");
    let nan = |name: &str, i: usize| (name == "h.1.mlp.c_fc.weight" && i == 200).then_some(f64::NAN);
    let model = model(&folder, DType::F32, nan);
    let (data, out) = (folder.file("text", "a".repeat(800)), folder.path("out"));
    for mesh in ["dp=1", "dp=2", "tp=2", "pp=2"] {
        let given = ["train", "--model", &model, "--data", &data, "--out", &out, "--mesh", mesh];
        let (code, said) = told(&[&given[..], &["--batch", "2", "--seq", "8", "--steps", "2"]].concat());
        assert_eq!(code, 1, "{mesh}: {said}");
        let first = "the loaded weight h.1.mlp.c_fc.weight already holds NaN";
        assert_eq!(line(&said, "first"), first, "{mesh}: {said}");
        assert_eq!(line(&said, "at"), "h.1.mlp.c_fc.out", "{mesh}: {said}");
    }
}

/// A head of large numbers of both signs behind a small norm: logits are 0, and only the gradient of the norm's weight is
/// large, 2.6 times the numbers of the head.
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
fn what_is_measured_or_chosen_with_such_weights_is_an_error() {
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
        let (code, said) = told(&[args, &["--model", &model]].concat());
        assert!(code == 1 && said.starts_with(why), "{said}");
        assert!(line(&said, "help").ends_with("not finite, or too large for --dtype"), "{said}");
    }
}

#[test]
fn an_op_of_the_backward_pass_is_named() {
    let folder = Folder::new("not-finite-backward");
    let model = model(&folder, DType::F32, |name, i| large_head(name, i, 3e38));
    let on_pipeline = ("pp=2 --cut 1,1", '1');
    for (mesh, rank) in [("dp=1", '0'), ("dp=2", '0'), ("tp=2", '0'), ("dp=2,tp=2", '0'), on_pipeline] {
        let (said, steps) = train(&folder, &model, 50, mesh, "f32");
        assert_eq!(steps, 0);
        assert!(said.contains("the loss is 5.5"), "{mesh}: the forward pass is sound: {said}");
        assert!(line(&said, "first").starts_with("layer_norm_backward: the result is "), "{mesh}: {said}");
        assert_eq!(line(&said, "at"), "ln_f.bias, in the backward pass", "{mesh}");
        assert!(line(&said, "rank").starts_with(rank), "{mesh}: {said}");
        assert!(!said.contains("asked for"), "{mesh}: a line of a vjp is no user's: {said}");
    }
}

#[test]
fn a_norm_beyond_all_numbers_is_told_from_a_gradient() {
    let folder = Folder::new("not-finite-norm");
    let model = model(&folder, DType::F64, |name, i| large_head(name, i, 1e200));
    for mesh in ["dp=1", "dp=2", "tp=2", "pp=2"] {
        let (said, steps) = train(&folder, &model, 50, mesh, "f64");
        assert_eq!(steps, 0);
        assert!(said.contains("the loss is 5.5") && said.contains("gradient norm inf"), "{mesh}: {said}");
        assert!(
            line(&said, "first").starts_with("no op made it: the gradients are finite"),
            "{mesh}: {said}"
        );
        assert_eq!(line(&said, "help"), "a smaller learning rate is the usual cure", "{mesh}");
    }
}
