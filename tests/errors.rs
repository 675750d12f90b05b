//! Snapshots of error messages, one per kind of mistake. `INSTA_UPDATE=always cargo test errors` rewrites them. Also applies every redistribution
//! that a layout error suggests.

use crate::cli::{Folder, exit_code_and_stderr};
use approx::abs_diff_eq;
use shardgrad::nn::{Gpt2, Gpt2Config};
use shardgrad::prelude::*;
use shardgrad::tensor::training_step::control::world_sum;
use std::fs;
use std::panic::Location;
use std::path::Path;
use std::time::Duration;

/// Returns a message without line numbers and folders.
fn steady(text: &str, folder: Option<&Folder>) -> String {
    let text = folder.map_or(text.to_string(), |f| text.replace(&f.0.display().to_string(), "FOLDER"));
    let mut parts = text.split(".rs:");
    let mut steady = parts.next().unwrap_or_default().to_string();
    for part in parts {
        steady += ".rs:LINE";
        steady += part.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    steady
}

/// Returns the error of rank 0 in a dry run. If all ranks fail alike, which is first depends on timing, so one runs alone.
fn alone<T>(mesh: &str, f: impl FnOnce(&Rank) -> Result<T>) -> Error {
    World::new(Mesh::parse(mesh).unwrap()).dry_run(0, f).map(|_| ()).unwrap_err()
}

/// Returns the error of a program on a mesh.
fn error<T: Send>(mesh: &str, f: impl Fn(&Rank) -> Result<T> + Sync) -> Error {
    World::run(Mesh::parse(mesh).unwrap(), f).map(|_| ()).unwrap_err()
}

fn zeros(rank: &Rank, layout: &str) -> Result<Tensor> {
    Tensor::zeros(rank, &Layout::parse(layout, rank.mesh())?)
}

/// Compares an error with a snapshot, and checks its kind and parts such as the user's line and the help.
fn pinned(name: &str, kind: Kind, error: &Error, parts: &[&str]) {
    let text = steady(&error.to_string(), None);
    assert_eq!(error.kind(), kind, "{text}");
    for part in parts {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    insta::assert_snapshot!(name, text);
}

const OWN_LINE: &str = "line       tests/errors.rs:LINE";
const HELP: &str = "help       ";

#[test]
fn mismatched_shapes_and_dtypes() {
    let shape =
        alone("dp=2", |rank| Ok(zeros(rank, "f32[6@dp, 3]")?.matmul(&zeros(rank, "f32[4, 5]")?)).map(|_| ()));
    pinned("shape", Kind::Shape, &shape, &[OWN_LINE, HELP]);
    let dtype =
        alone("dp=2", |rank| Ok(zeros(rank, "f32[6@dp]")?.add(&zeros(rank, "f64[6@dp]")?)).map(|_| ()));
    pinned("dtype", Kind::DType, &dtype, &[OWN_LINE, HELP]);
    let host = error("", |rank| Tensor::from_host(rank, &[2, 3], &[1.0f32; 5]).map(|_| ()));
    pinned("host_data", Kind::Shape, &host, &[OWN_LINE, HELP]);
    let scalar = error("", |rank| {
        let tape = shardgrad::autograd::Tape::new(rank);
        tape.leaf(1, &zeros(rank, "f32[3]")?).backward()
    });
    pinned("backward_of_no_scalar", Kind::Shape, &scalar, &[OWN_LINE, HELP]);
}

#[test]
fn run_time_errors_of_ops() {
    let index = error("", |rank| {
        let ids = Tensor::from_host(rank, &[2], &[1i64, 7])?;
        let _ = zeros(rank, "f32[5, 3]")?.embedding(&ids);
        Ok(())
    });
    pinned("index_out_of_range", Kind::Data, &index, &[OWN_LINE, "7", "arg 1", HELP]);
    let used_up = error("", |rank| {
        let tape = shardgrad::autograd::Tape::new(rank);
        let y = tape.leaf(1, &zeros(rank, "f32[3]")?).square();
        y.sum().backward()?;
        y.sum().backward()
    });
    pinned("graph_used_up", Kind::Unsupported, &used_up, &[OWN_LINE, HELP]);
    let recorded = alone("pp=2", |rank| {
        let read = |rank: &Rank, _: u64, _: std::ops::Range<usize>| Ok(vec![zeros(rank, "f32[2, 3]")?]);
        let loss = |model: &Linear, x: &[Var]| {
            let y = model.forward(&x[0]);
            let size = y.sum().item().unwrap_or_else(|e| e.raise());
            y.scale(1.0 / size).mean()
        };
        let plan = Plan::pipeline_parallel("pp");
        Trainer::new(rank, Linear::new(3, 3), &plan, AdamW::new(0.1), TrainerConfig::new(2), read, loss)
            .map(|_| ())
    });
    pinned("value_read_while_recorded", Kind::Unsupported, &recorded, &[OWN_LINE, HELP]);
    let folder = Folder::new("errors-io");
    let (code, message) =
        exit_code_and_stderr(&["eval", "--model", &folder.path("nowhere"), "--data", &folder.path("text")]);
    assert_eq!(code, 2);
    insta::assert_snapshot!("no_such_folder", steady(&message, Some(&folder)));
}

#[test]
fn unsupported_layouts_of_ops() {
    let product = |rank: &Rank| Ok(zeros(rank, "f32[6@tp, 8]")?.matmul(&zeros(rank, "f32[8@tp, 4]")?));
    pinned(
        "layout_of_a_product",
        Kind::Layout,
        &alone("tp=2", |r| product(r).map(|_| ())),
        &[OWN_LINE, HELP],
    );
    let norm = alone("dp=2,tp=2", |rank| {
        let plan = Plan::copies("dp").and(Plan::copies("tp"));
        let model = Model::new(rank, LayerNorm::new(8), &plan, 1)?;
        let x = model.tape().constant(zeros(rank, "f32[4@dp, 8@tp]")?);
        let _ = model.forward(&x);
        Ok(())
    });
    pinned("layout_of_a_layer", Kind::Layout, &norm, &[OWN_LINE, HELP, "at         bias"]);
}

/// One case of each class of layout error not covered above.
#[test]
fn every_class_of_layout_error() {
    type Call = fn(&[Tensor]) -> Tensor;
    let classes: [(&str, &str, &[&str], Call); 5] = [
        ("refusal_order", "dp=2,tp=2", &["f32[8@dp@tp, 3]", "f32[8@tp@dp, 3]"], |x| x[0].add(&x[1])),
        ("refusal_grain", "tp=2", &["f32[12:4@tp, 5]", "f32[12@tp, 5]"], |x| x[0].mul(&x[1])),
        ("refusal_reshape", "tp=2", &["f32[12@tp]"], |x| x[0].reshape(&[3, 4])),
        ("refusal_whole", "dp=2,tp=2", &["f32[6@dp, 8@tp]"], |x| x[0].softmax()),
        ("refusal_conflict", "tp=2", &["f32[6@tp, 4]", "f32[6, 4@tp]"], |x| x[0].add(&x[1])),
    ];
    for (name, mesh, layouts, call) in classes {
        let refused = alone(mesh, |rank| {
            let x: Vec<Tensor> = layouts.iter().map(|l| zeros(rank, l)).collect::<Result<_>>()?;
            let _ = call(&x);
            Ok(())
        });
        let parts = [
            OWN_LINE,
            HELP,
            "signature  ",
            "arg 0      f32[",
            "local [",
            "rank       0 (",
            " bytes; result ",
        ];
        pinned(name, Kind::Layout, &refused, &parts);
    }
    let created = alone("tp=2", |rank| zeros(rank, "f32[6:4@tp, 3]"));
    pinned("refusal_create", Kind::Layout, &created, &[HELP, "the nearest valid layout is f32[6:2@tp, 3]"]);
    let stored = alone("tp=2", |rank| Layout::parse("f32[6] +tp", rank.mesh())?.check_storable());
    pinned("refusal_stored", Kind::Layout, &stored, &[HELP, "the nearest valid layout is f32[6]"]);
}

#[test]
fn invalid_meshes_plans_and_options() {
    let mesh = Mesh::parse("dp=2,dp=3").unwrap_err();
    pinned("mesh", Kind::Mesh, &mesh, &[]);
    let (code, message) = exit_code_and_stderr(&["explain", "--mesh", "dp=2,tq=2"]);
    assert_eq!(code, 2);
    insta::assert_snapshot!("mesh_option", message);
    let plan = alone("tp=2", |rank| {
        let plan = Plan::new().store("wieght", "tp@0");
        Model::new(rank, Linear::new(4, 4), &plan, 1).map(|_| ())
    });
    pinned("plan", Kind::Config, &plan, &["weight"]);
}

#[test]
fn diverging_ranks() {
    let unlike = error("tp=2", |rank| {
        let x = zeros(rank, "f32[4@tp]")?;
        if rank.index() == 0 {
            return x.to_host::<f32>().map(|_| ());
        }
        world_sum(rank, &[1.0], Location::caller()).map(|_| ())
    });
    pinned("collective_mismatch", Kind::Collective, &unlike, &["tests/errors.rs:LINE", HELP]);
    let gone = error("tp=2", |rank| {
        let x = zeros(rank, "f32[4@tp]")?;
        if rank.index() == 0 { x.to_host::<f32>().map(|_| ()) } else { Ok(()) }
    });
    pinned("peer_lost", Kind::PeerLost, &gone, &["tests/errors.rs:LINE"]);
    let late = World::new(Mesh::parse("tp=2").unwrap()).timeout(Duration::from_millis(80)).launch(|rank| {
        let x = zeros(rank, "f32[4@tp]")?;
        if rank.index() == 1 {
            // Until rank 0 has timed out.
            loop {
                rank.check();
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        x.to_host::<f32>().map(|_| ())
    });
    pinned("timeout", Kind::Timeout, &late.unwrap_err(), &["tests/errors.rs:LINE", HELP]);
}

#[test]
fn mismatched_model_folders() {
    let folder = Folder::new("errors-checkpoint");
    let dir = folder.path("model");
    let config = |layers| Gpt2Config::new(16, 8, 4, layers, 2);
    let load = |layers| {
        error("", |rank| Model::new(rank, Gpt2::new(&config(layers)), &Plan::new(), 1)?.load(Path::new(&dir)))
    };
    World::run(Mesh::single(), |rank| {
        Model::new(rank, Gpt2::new(&config(1)), &Plan::new(), 1)?.save(Path::new(&dir))
    })
    .unwrap();
    let missing = load(2);
    assert_eq!(missing.kind(), Kind::Checkpoint);
    insta::assert_snapshot!("checkpoint_of_another_model", steady(&missing.to_string(), Some(&folder)));
    let file = Path::new(&dir).join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 7]).unwrap();
    let cut = load(1);
    assert_eq!(cut.kind(), Kind::Checkpoint);
    insta::assert_snapshot!("checkpoint_cut_short", steady(&cut.to_string(), Some(&folder)));
}

#[test]
fn non_finite_numbers_and_out_of_memory() {
    let finite = error("", |rank| {
        let model = Model::new(rank, Linear::new(4, 4), &Plan::new(), 1)?;
        let tape = model.tape();
        model.weight.on_tape(&tape).scale(f64::NAN).sum().backward()?;
        AdamW::new(0.1).update(&model, tape.gradients()).map(|_| ())
    });
    pinned("not_finite", Kind::NotFinite, &finite, &[HELP]);
    let memory = World::new(Mesh::single()).memory_limit(1 << 20).launch(|rank| {
        let x = zeros(rank, "f32[1024]")?;
        let _ = x.einsum("m, n -> m n", &x);
        Ok(())
    });
    pinned("out_of_memory", Kind::OutOfMemory, &memory.unwrap_err(), &[OWN_LINE, HELP, "einsum"]);
}

/// An op call with a layout error: mesh, argument layouts, op.
struct InvalidCall {
    mesh: &'static str,
    layouts: &'static [&'static str],
    call: fn(&[Tensor]) -> Tensor,
}

const INVALID_CALLS: &[InvalidCall] = &[
    InvalidCall { mesh: "tp=2", layouts: &["f64[5@tp, 7]", "f64[7@tp, 4]"], call: |x| x[0].matmul(&x[1]) },
    InvalidCall { mesh: "tp=3", layouts: &["f64[5, 7@tp]", "f64[7, 4@tp]"], call: |x| x[0].matmul(&x[1]) },
    InvalidCall { mesh: "tp=2", layouts: &["f64[6@tp, 4]", "f64[6, 4@tp]"], call: |x| x[0].add(&x[1]) },
    InvalidCall { mesh: "tp=2", layouts: &["f64[12:4@tp, 5]", "f64[12@tp, 5]"], call: |x| x[0].mul(&x[1]) },
    InvalidCall {
        mesh: "dp=2,tp=2",
        layouts: &["f64[8@dp@tp, 3]", "f64[8@tp@dp, 3]"],
        call: |x| x[0].sub(&x[1]),
    },
    InvalidCall { mesh: "dp=2,tp=2", layouts: &["f64[6@dp, 8@tp]"], call: |x| x[0].softmax() },
    InvalidCall {
        mesh: "tp=2",
        layouts: &["f64[4, 6@tp]", "f64[6]", "f64[6]"],
        call: |x| x[0].layer_norm(&x[1], &x[2], 1e-5),
    },
    InvalidCall {
        mesh: "tp=2",
        layouts: &["f64[2, 4, 2, 3]", "f64[2, 4@tp, 2, 3]", "f64[2, 4@tp, 2, 3]"],
        call: |x| x[0].attention(&x[1], &x[2], true),
    },
    InvalidCall { mesh: "tp=2", layouts: &["f64[6@tp, 4]"], call: |x| x[0].slice(0, 1..4) },
    InvalidCall {
        mesh: "tp=2",
        layouts: &["f64[3@tp, 4]", "f64[5@tp, 4]"],
        call: |x| Tensor::concat(&[&x[0], &x[1]], 0),
    },
];

/// Parses a suggested redistribution and returns the layouts after it.
fn repaired(help: &str, layouts: &[Layout]) -> Vec<Layout> {
    let mut layouts = layouts.to_vec();
    let (changes, _) = help.split_once(" (").expect("the costs stand in brackets");
    for change in changes.split(" and ") {
        let words: Vec<&str> = change.split(' ').collect();
        let argument: usize = words[2].parse().unwrap();
        let mesh = layouts[argument].mesh().clone();
        let over = words.iter().position(|w| *w == "over").map(|at| words[at + 1]);
        let axis = over.map_or(mesh.axes().next(), |name| mesh.axis(name)).unwrap();
        layouts[argument] = match words[0] {
            "exchange" => layouts[argument].with_placement(axis, Placement::Shard(words[5].parse().unwrap())),
            "gather" => layouts[argument].with_placement(axis, Placement::Replicate),
            "redistribute" => Layout::parse(change.split_once(" to ").unwrap().1, &mesh).unwrap(),
            other => panic!("what is `{other}`? {help}"),
        };
    }
    layouts
}

#[test]
fn every_suggested_redistribution_works() {
    let values = |layout: &Layout, seed: usize| -> Vec<f64> {
        (0..layout.numel()).map(|i| ((i * 7 + seed * 3) % 11) as f64 - 5.0).collect()
    };
    let mut tried = 0;
    for refused in INVALID_CALLS {
        let mesh = Mesh::parse(refused.mesh).unwrap();
        let given: Vec<Layout> = refused.layouts.iter().map(|t| Layout::parse(t, &mesh).unwrap()).collect();
        let place = |rank: &Rank, layouts: &[Layout]| -> Result<Vec<Tensor>> {
            let one =
                |(seed, layout): (usize, &Layout)| Tensor::from_global(rank, layout, &values(layout, seed));
            layouts.iter().enumerate().map(one).collect()
        };
        let run = |f: &(dyn Fn(&Rank) -> Result<Vec<f64>> + Sync)| World::run(mesh.clone(), f);
        let error = run(&|rank| (refused.call)(&place(rank, &given)?).to_f64()).unwrap_err();
        assert_eq!(error.kind(), Kind::Layout, "{error}");
        let whole: Vec<Layout> =
            given.iter().map(|l| Layout::invariant(&mesh, l.dtype(), &l.shape())).collect();
        let expected = run(&|rank| (refused.call)(&place(rank, &whole)?).to_f64()).unwrap();
        let helps =
            error.details().iter().filter(|(label, text)| *label == "help" && text.contains(" bytes"));
        let before = tried;
        for (_, help) in helps {
            let layouts = repaired(help, &given);
            let got = run(&|rank| {
                let moved = place(rank, &given)?;
                let moved = moved.iter().zip(&layouts).map(|(x, to)| x.to_layout_at(to, Location::caller()));
                let y = (refused.call)(&moved.collect::<Result<Vec<_>>>()?);
                let result = help.split_once("result ").unwrap().1.trim_end_matches(')');
                assert_eq!(y.layout().to_string(), result, "{help}");
                y.to_f64()
            });
            let got = got.unwrap_or_else(|e| panic!("`{help}` does not help: {e}"));
            assert!(abs_diff_eq!(got[0][..], expected[0][..], epsilon = 1e-12), "`{help}` changes the value");
            tried += 1;
        }
        assert!(tried > before, "no redistribution is suggested: {error}");
    }
    assert!(tried >= 2 * INVALID_CALLS.len(), "{tried} repairs of {} refusals", INVALID_CALLS.len());
}
