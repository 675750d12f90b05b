//! End-to-end tests of the command line: error messages, exit codes and outputs.

use approx::relative_eq;
use shardgrad::kernels::DType;
use shardgrad::nn::checkpoint::TensorWriter;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A temporary folder of one test, removed on drop.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    /// `name` must be unique among the tests of a process.
    pub(crate) fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("shardgrad-cli-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(crate) fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path.display().to_string()
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn shardgrad(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shardgrad")).args(args).output().unwrap()
}

/// Runs a command and returns its exit code and stderr.
pub(crate) fn exit_code_and_stderr(args: &[&str]) -> (i32, String) {
    let output = shardgrad(args);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!text.contains("panicked at"), "a raw panic reached the user: {text}");
    (output.status.code().expect("it exits by itself"), text)
}

fn text(folder: &Folder) -> String {
    folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(200))
}

#[test]
fn short_validation_split_is_allowed_without_evaluation() {
    let folder = Folder::new("unmeasured");
    let (data, out) = (folder.file("text", "abc".repeat(100)), folder.path("out"));
    let train = ["train", "--data", &data, "--out", &out, "--seq", "64", "--steps", "1", "--mesh", "dp=1"];
    let (code, message) = exit_code_and_stderr(&train);
    assert!(code == 2 && message.contains("the validation split (last 10%) has 30 bytes"), "{message}");
    let (code, message) = exit_code_and_stderr(&[&train[..], &["--eval-every", "0"]].concat());
    assert_eq!(code, 0, "{message}");
}

#[test]
fn misuse_exits_with_2_and_help() {
    let folder = Folder::new("misuse");
    let data = text(&folder);
    let latin =
        folder.file("latin", [b"caf".as_slice(), &[0xe9], b" au lait ".as_slice()].concat().repeat(300));
    let (empty, short) = (folder.file("empty", ""), folder.file("short", "abc"));
    let (out, long) = (folder.path("out"), folder.path("long"));
    let ids = [("input_ids".to_string(), DType::I64, vec![1, 81])];
    let mut rows = TensorWriter::create(Path::new(&long), &ids).unwrap();
    rows.append("input_ids", &[0; 8 * 81]).unwrap();
    rows.finish().unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&["train", "--stepps", "3"], &["unexpected argument '--stepps'", "--steps"]),
        (&["trian"], &["unrecognized subcommand 'trian'", "train"]),
        (&["train", "--steps", "0"], &["--steps"]),
        (&["train", "--lr=-1"], &["--lr"]),
        (&["train", "--preset", "tinny"], &["did you mean `tiny`?"]),
        (&["train", "--mesh", "tp=2,tq=2"], &["unknown mesh axis `tq`", "did you mean `tp`?"]),
        (&["train", "--mesh", "tp=0"], &["size 0"]),
        (&["train", "--mesh", "dp=100,tp=100"], &["10000 ranks"]),
        (&["train", "--data", "/no/such/file"], &["/no/such/file: no such file"]),
        (&["train", "--data", &folder.path("none")], &["none: no such file"]),
        (&["train", "--data", &data, "--end-of-text", "256"], &["--end-of-text 256", "0..256"]),
        (
            &["train", "--data", &data, "--end-of-text", "10"],
            &["is inserted between texts, and only one text is"],
        ),
        (&["train", "--data", &data, "--cast"], &["--cast applies to weights loaded with --model"]),
        (
            &["train", "--data", &data, "--dtype", "f64", "--matmul-precision", "medium"],
            &["--matmul-precision medium", "--dtype f64 has none"],
        ),
        (&["explain", "--preset", "tiny", "--seq", "999"], &["--seq 999 exceeds the 64 positions"]),
        (&["train", "--tokens", &long], &["rows have 80 tokens, but the model has 64 positions", "--tokens"]),
        (&["bench", "growth", "--picture", "/no/such/growth.svg"], &["/no/such/growth.svg", "--picture"]),
        (&["train", "--data", &data, "--shard-size", "5 fish"], &["500MB or 5GB"]),
        (&["train", "--data", &empty], &["empty"]),
        (&["train", "--data", &short], &["bytes, but --seq 64 needs at least 65"]),
        (&["train", "--data", &latin], &["UTF-8", "byte 3"]),
        (&["train", "--data", &data, "--seq", "9999"], &["--seq 9999", "64 positions"]),
        (&["train", "--data", &data, "--param-dtype", "bf16"], &["--param-dtype bf16", "--dtype f32"]),
        (
            &["train", "--data", &data, "--dtype", "f16", "--param-dtype", "bf16"],
            &["every value of --dtype f16"],
        ),
        (&["explain", "--dtype", "f64", "--param-dtype", "f32"], &["--param-dtype f32", "--dtype f64"]),
        (&["eval", "--model", &out, "--param-dtype", "f32"], &["unexpected argument '--param-dtype'"]),
        (&["train", "--data", &data, "--batch", "5", "--microbatches", "2"], &["--microbatches"]),
        (&["train", "--data", &data, "--out", "/proc/nowhere"], &["/proc/nowhere"]),
        (&["eval", "--model", "/no/such/model", "--data", &data], &["/no/such/model"]),
        (&["generate", "--model", "/no/such/model", "--prompt", "x"], &["/no/such/model"]),
        (&["generate"], &["--prompt"]),
        (&["train", "--data", &data, "--zero", "4"], &["--zero", "the stages are 1, 2 and 3"]),
        (
            &["train", "--data", &data, "--zero", "2", "--mesh", "tp=2"],
            &["--zero 2 shards over dp, and the mesh has no dp axis"],
        ),
        (
            &["train", "--data", &data, "--zero", "1", "--mesh", "dp=2,fsdp=2"],
            &[
                "--zero 1 shards over dp, but the mesh shards parameters over fsdp=2 already",
                "hybrid sharding",
            ],
        ),
        (&["explain", "--zero", "3", "--mesh", "pp=2"], &["--zero 3 shards over dp"]),
    ];
    for (args, parts) in cases {
        let mut args = args.to_vec();
        if args[0] == "train" && !args.contains(&"--out") {
            args.extend(["--out", &out]);
        }
        let (code, message) = exit_code_and_stderr(&args);
        assert_eq!(code, 2, "{args:?}: {message}");
        for part in *parts {
            assert!(message.contains(part), "{args:?} should mention `{part}`: {message}");
        }
    }
}

#[test]
fn non_finite_loss_stops_every_rank_before_the_update() {
    let folder = Folder::new("nan");
    let (data, out) = (text(&folder), folder.path("out"));
    let (code, message) = exit_code_and_stderr(&[
        "train",
        "--data",
        &data,
        "--out",
        &out,
        "--mesh",
        "dp=2,tp=2",
        "--steps",
        "50",
        "--batch",
        "4",
        "--seq",
        "8",
        "--lr",
        "1e30",
        "--warmup",
        "0",
        "--grad-clip",
        "0",
        "--eval-every",
        "0",
    ]);
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("the update was not applied") && message.contains("error: step "), "{message}");
    assert!(
        message.contains("use a smaller --lr") && message.contains("saved      the model after step "),
        "{message}"
    );
    assert!(Path::new(&out).join("model/model.safetensors").is_file());
}

#[test]
fn run_leaves_metrics_plot_and_model_readable_on_another_mesh() {
    let folder = Folder::new("run");
    let (data, out) = (text(&folder), folder.path("out"));
    let common = ["--batch", "4", "--seq", "16"];
    let train =
        ["train", "--data", &data, "--out", &out, "--mesh", "tp=2", "--steps", "12", "--eval-every", "6"];
    let output = shardgrad(&[&train[..], &common].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.contains("validation loss") && printed.contains("generate --model"), "{printed}");
    let metrics = fs::read_to_string(Path::new(&out).join("metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 12);
    assert!(fs::read_to_string(Path::new(&out).join("loss.svg")).unwrap().contains("<svg"));
    let model = format!("{out}/model");
    let losses = [
        "",
        "tp=2",
        "dp=2",
        "dp=3,tp=2",
        "cp=2",
        "dp=2,cp=3",
        "pp=2,tp=2",
        "dp=2,fsdp=2",
        "pp=2,fsdp=2",
        "dp=2 --zero 3",
    ]
    .map(|mesh| {
        let eval = ["eval", "--model", &model, "--data", &data, "--seq", "16", "--json", "--mesh"];
        let output = shardgrad(&eval.into_iter().chain(mesh.split(' ')).collect::<Vec<_>>());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        line["loss"].as_f64().unwrap()
    });
    assert!(losses.iter().all(|l| relative_eq!(*l, losses[0], max_relative = 1e-5)), "{losses:?}");
    let generate = ["generate", "--model", &model, "--prompt", "The ", "--tokens", "5", "--greedy", "--json"];
    let meshes =
        ["", "tp=2", "pp=2", "fsdp=2", "cp=2", "cp=2 --context ring", "cp=2,tp=2 --context exchange"];
    let texts = meshes.map(|mesh| {
        let output =
            shardgrad(&generate.into_iter().chain(["--mesh"]).chain(mesh.split(' ')).collect::<Vec<_>>());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "generation does not depend on the mesh");
}

#[test]
fn explain_matches_theoretical_collective_bytes() {
    let output =
        shardgrad(&["explain", "--preset", "tiny", "--mesh", "tp=2", "--batch", "2", "--seq", "8", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    let records: Vec<serde_json::Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let blocks = |phase: &str| {
        let found = records.iter().filter(|r| {
            let in_block = r["path"].as_str().is_some_and(|p| p.starts_with("h."));
            r["kind"] == "collective" && r["phase"] == phase && in_block
        });
        found
            .map(|r| (r["op"].as_str().unwrap().to_string(), r["bytes"].as_u64().unwrap()))
            .collect::<Vec<_>>()
    };
    // Four blocks, two all-reduces each way, of 2 x 8 x 128 f32 elements: 2 (N - N/2) bytes per rank.
    let one = ("all_reduce".to_string(), 2 * 8 * 128 * 4);
    assert_eq!(blocks("forward"), vec![one.clone(); 8]);
    assert_eq!(blocks("backward"), vec![one; 8]);
}

#[test]
fn doctor_lists_libraries_and_survives_invalid_ones() {
    let folder = Folder::new("doctor");
    let fake = folder.file("libcuda.so.1", "no library");
    let doctor = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
        let output = command.args(args).env("LD_LIBRARY_PATH", &folder.0).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let found: serde_json::Value = serde_json::from_str(&doctor(&["doctor", "--json"])).unwrap();
    let listed = found["libraries"]["libcuda.so"].as_array().unwrap();
    let fake = Path::new(&fake).canonicalize().unwrap();
    assert!(listed.contains(&fake.display().to_string().into()), "{found}");
    assert!(
        found["cores"].as_u64().unwrap() > 0 && (found["cuda"] == false) != cfg!(feature = "cuda"),
        "{found}"
    );
    let text = doctor(&["doctor"]);
    assert!(
        text.contains("not in this build") != cfg!(feature = "cuda")
            && text.contains(&fake.display().to_string()),
        "{text}"
    );
}

#[test]
fn options_are_read_from_a_config_file() {
    let folder = Folder::new("config");
    let data = text(&folder);
    let file = folder.file("run.toml", "split = \"all\"\nseq = 16\n");
    let out = folder.path("out");
    let train = ["train", "--data", &data, "--out", &out, "--steps", "1", "--batch", "2", "--mesh", "dp=1"];
    let small = folder.file("train.toml", "seq = 16\neval_every = 0\n");
    assert!(shardgrad(&[&train[..], &["--config", &small]].concat()).status.success());
    let model = format!("{out}/model");
    let tokens = |rest: &[&str]| {
        let eval = ["eval", "--model", &model, "--data", &data, "--config", &file, "--json"];
        let output = shardgrad(&[&eval[..], rest].concat());
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        line["tokens"].as_u64().unwrap()
    };
    assert_eq!((tokens(&[]) % 16, tokens(&[]) > tokens(&["--split", "val"])), (0, true));
    let wrong = folder.file("wrong.toml", "sequence = 3\nbatch = \"two\"\n");
    let (code, message) = exit_code_and_stderr(&["eval", "--config", &wrong]);
    assert_eq!(code, 2, "{message}");
    for part in ["wrong.toml has invalid options", "`sequence`", "`batch`: expected a number"] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(exit_code_and_stderr(&["eval", "--config", "/no/such/file"]).0, 2);
}

#[test]
fn trace_contains_every_pass_of_every_rank() {
    let folder = Folder::new("trace");
    let (data, trace) = (text(&folder), folder.path("trace.json"));
    let given = [
        "train",
        "--data",
        &data,
        "--out",
        &folder.path("out"),
        "--mesh",
        "pp=2",
        "--steps",
        "2",
        "--seq",
        "8",
    ];
    let rest = [
        "--batch",
        "4",
        "--microbatches",
        "2",
        "--schedule",
        "zb-h1",
        "--eval-every",
        "0",
        "--trace",
        &trace,
    ];
    let output = shardgrad(&[&given[..], &rest].concat());
    assert!(output.status.success(), "{output:?}");
    let read: serde_json::Value = serde_json::from_str(&fs::read_to_string(&trace).unwrap()).unwrap();
    let events = read["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().filter(|e| e["name"] == name).count();
    for name in ["F0.0", "F1.1", "I0.1", "W1.0", "S0>1.0", "R1>0.1"] {
        assert_eq!(named(name), 2, "{name} in two steps");
    }
}

#[test]
fn plan_draws_a_schedule() {
    let folder = Folder::new("plan");
    let svg = folder.path("plan.svg");
    let output =
        shardgrad(&["plan", "--schedule", "zb-h1", "--stages", "4", "--microbatches", "8", "--svg", &svg]);
    let message = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && message.starts_with("zb-h1: 4 ranks, 8 microbatches, bubble 11.11%"),
        "{message}"
    );
    assert!(fs::read_to_string(&svg).unwrap().contains("rank 3"));
    let (code, message) = exit_code_and_stderr(&["plan", "--schedule", "zb-h9"]);
    assert!(code == 2 && message.contains("did you mean `zb-h"), "{message}");
}

/// Trains one step and saves the model in a dtype.
fn trained(folder: &Folder, dtype: &str) -> String {
    let out = folder.path(&format!("out-{dtype}"));
    let train =
        ["train", "--data", &text(folder), "--out", &out, "--steps", "1", "--batch", "2", "--seq", "16"];
    let output = shardgrad(&[&train[..], &["--eval-every", "0", "--save-dtype", dtype]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    format!("{out}/model")
}

#[test]
fn weights_are_rounded_only_with_cast() {
    let folder = Folder::new("cast");
    let [wide, narrow] = ["f64", "bf16"].map(|dtype| trained(&folder, dtype));
    let (data, out) = (text(&folder), folder.path("again"));
    let run = |command: &str, model: &str, more: &[&str]| {
        let all: &[&str] = match command {
            "generate" => &["--prompt", "The ", "--tokens", "2", "--mesh", "tp=2", "--json"],
            "eval" => &["--data", &data, "--seq", "16", "--json"],
            _ => &["--data", &data, "--out", &out, "--steps", "1", "--batch", "2", "--seq", "16", "--json"],
        };
        let output = shardgrad(&[&[command, "--model", model], all, more].concat());
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    for command in ["train", "eval", "generate"] {
        let (code, message) = run(command, &wide, &[]);
        assert!(
            code == 2 && message.contains("is f64, the parameter f32, ") && message.contains("--cast"),
            "{message}"
        );
        let (code, message) = run(command, &wide, &["--cast"]);
        assert!(code == 0 && message.lines().count() == 1, "{message}");
        assert!(
            message.starts_with(&wide) && message.contains(" tensors of f64 are rounded to f32"),
            "{message}"
        );
        let (code, message) = run(command, &narrow, &[]);
        assert!(code == 0 && message.lines().count() == 1, "{message}");
        assert!(
            message.starts_with(&narrow) && message.contains(" tensors of bf16 are widened to f32"),
            "{message}"
        );
        assert_eq!(run(command, &narrow, &["--dtype", "bf16", "--cast"]).0, 0);
    }
}

#[test]
fn closed_stdout_is_not_an_error() {
    use std::io::Read;
    let folder = Folder::new("pipe");
    let model = trained(&folder, "f32");
    for args in [
        &["plan", "--stages", "32", "--microbatches", "256", "--json"][..],
        &["generate", "--model", &model, "--prompt", "The quick brown fox", "--tokens", "400"],
    ] {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_shardgrad"))
            .args(args)
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = child.stdout.take().unwrap();
        out.read_exact(&mut [0; 10]).unwrap();
        drop(out);
        let output = child.wait_with_output().unwrap();
        assert!(!output.status.success() && output.stderr.is_empty(), "{args:?}: {output:?}");
    }
}

/// Random bytes contain incomplete characters, in the middle and at the end.
#[test]
fn printed_text_equals_json_text() {
    use shardgrad::nn::{Gpt2, Gpt2Config, Model};
    let folder = Folder::new("printed");
    let model = folder.path("model");
    shardgrad::dist::World::run(shardgrad::dist::Mesh::single(), |rank| {
        let config = Gpt2Config { initializer_range: 0.3, ..Gpt2Config::new(256, 16, 8, 1, 2) };
        Model::new(rank, Gpt2::new(&config), &Gpt2::plan(&config), 0)?.save(std::path::Path::new(&model))
    })
    .unwrap();
    let mut ends = 0;
    for seed in ["0", "1", "2", "3", "4", "5"] {
        let given = ["generate", "--model", &model, "--prompt", "é", "--tokens", "40", "--seed", seed];
        let printed = String::from_utf8(shardgrad(&given).stdout).unwrap();
        let json = shardgrad(&[&given[..], &["--json"]].concat()).stdout;
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(printed, format!("{}\n", json["text"].as_str().unwrap()), "seed {seed}");
        let tokens: Vec<u8> = serde_json::from_value(json["tokens"].clone()).unwrap();
        let bytes = ["é".as_bytes(), &tokens].concat();
        assert_eq!(
            (tokens.len(), String::from_utf8_lossy(&bytes)),
            (40, json["text"].as_str().unwrap().into())
        );
        ends += usize::from(printed.ends_with("\u{fffd}\n"));
    }
    assert!(ends > 0, "no text ends within a character");
}

#[test]
fn ranks_do_not_wait_for_a_paused_reader() {
    use std::fs::File;
    use std::io::{Read, Write};
    let folder = Folder::new("pager");
    let (model, fifo) = (trained(&folder, "f32"), folder.path("fifo"));
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let mut pipe = File::options().read(true).write(true).open(&fifo).unwrap();
    // Fill the pipe buffer of Linux, so that further writes block.
    pipe.write_all(&[b'.'; 1 << 16]).unwrap();
    let given = ["generate", "--model", &model, "--prompt", "The quick", "--tokens", "20", "--ignore-end"];
    let child = std::process::Command::new(env!("CARGO_BIN_EXE_shardgrad"))
        .args([&given[..], &["--mesh", "tp=2", "--timeout", "1"]].concat())
        .stdout(File::options().write(true).open(&fifo).unwrap())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Longer than --timeout.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    pipe.read_exact(&mut [0; 1 << 16]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut text = [0; 9];
    pipe.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"The quick");
}
