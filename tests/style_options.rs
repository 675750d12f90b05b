//! Options that choose styles of parallelism hold for every command: `train` gives the bits of one rank, `eval` its loss, `generate` its
//! tokens, and `explain` states the collectives; the printed plan as a file gives the same run.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use crate::resume::{record, text};
use crate::training_run::same;
use approx::assert_relative_eq;
use serde_json::Value;
use shardgrad_testing::sample;
use std::fs;

/// A style: a preset, the options, and a line of the totals of `explain` that the style alone has.
type StyleOptions = (&'static str, &'static str, &'static str);

const STYLES: [StyleOptions; 11] = [
    ("nano", "--mesh dp=2 --zero 1", "dp forward all_gather"),
    ("nano", "--mesh dp=2 --zero 2", "dp forward all_gather"),
    ("nano", "--mesh dp=2 --zero 3", "dp backward all_gather"),
    ("nano", "--mesh dp=2,fsdp=2", "fsdp backward all_gather"),
    ("nano", "--mesh pp=2,fsdp=2 --gathered-bytes-max 0", "fsdp backward all_gather"),
    ("llama-nano", "--mesh tp=2 --sequence-parallel", "tp forward reduce_scatter"),
    ("nano", "--mesh cp=2 --context gather", "cp forward all_gather"),
    ("nano", "--mesh cp=3 --context ring", "cp forward send"),
    ("llama-nano", "--mesh cp=2 --context exchange", "cp forward all_to_all"),
    ("mixtral-nano", "--mesh ep=2 --experts gather", "ep forward all_gather"),
    ("mixtral-nano", "--mesh ep=2 --experts exchange", "ep forward all_to_all"),
];

fn stdout(args: &[&str]) -> String {
    let output = shardgrad(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A folder with a text, and a trained model of each preset.
struct Commands {
    folder: Folder,
    data: String,
}

impl Commands {
    fn new(name: &str) -> Commands {
        let folder = Folder::new(name);
        let data = text(&folder);
        Commands { folder, data }
    }

    /// The metrics of two training steps.
    fn train(&self, preset: &str, name: &str, more: &[&str]) -> Vec<Value> {
        let out = self.folder.path(name);
        let given = ["train", "--preset", preset, "--data", &self.data, "--out", &out, "--dtype", "f64"];
        let step =
            ["--steps", "2", "--batch", "8", "--seq", "16", "--eval-every", "0", "--microbatches", "2"];
        stdout(&[&given[..], &step, more].concat());
        record(out.as_ref())
    }

    fn eval(&self, model: &str, more: &[&str]) -> f64 {
        let given =
            ["eval", "--model", model, "--data", &self.data, "--seq", "16", "--dtype", "f64", "--json"];
        let line: Value = serde_json::from_str(&stdout(&[&given[..], more].concat())).unwrap();
        line["loss"].as_f64().unwrap()
    }

    fn generate_args<'a>(model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let given = ["generate", "--model", model, "--prompt", "The quick", "--tokens", "6", "--greedy"];
        [&given[..], &["--dtype", "f64", "--json"], more].concat()
    }

    fn explain(preset: &str, more: &[&str]) -> String {
        let given = ["explain", "--preset", preset, "--batch", "8", "--seq", "16", "--microbatches", "2"];
        stdout(&[&given[..], more].concat())
    }
}

/// Canonical sums, and a hash of the weights and of the optimizer state for each step.
const CANONICAL: [&str; 4] = ["--deterministic", "mesh", "--state-hash", "1"];

fn losses(metrics: &[Value]) -> Vec<f64> {
    metrics.iter().map(|line| line["loss"].as_f64().unwrap()).collect()
}

#[test]
fn options_of_styles_hold_for_every_command() {
    let commands = Commands::new("style-options");
    let styles: Vec<StyleOptions> = sample(0, STYLES).collect();
    for preset in ["nano", "llama-nano", "mixtral-nano"] {
        let plain = commands.train(preset, preset, &["--mesh", "dp=1"]);
        let canonical = commands.train(
            preset,
            &format!("{preset}-same"),
            &[&CANONICAL[..], &["--mesh", "dp=1"]].concat(),
        );
        assert!(canonical.len() == 2 && canonical.iter().all(|line| line["state_hash"].is_string()));
        let model = commands.folder.path(&format!("{preset}/model"));
        let loss = commands.eval(&model, &[]);
        let generated = stdout(&Commands::generate_args(&model, &[]));
        for (i, style) in styles.iter().enumerate().filter(|(_, style)| style.0 == preset) {
            let (_, options, collective) = style;
            let options: Vec<&str> = options.split(' ').collect();
            let plan = commands.folder.file(
                &format!("{i}.plan"),
                Commands::explain(preset, &[&options[..], &["--show-plan"]].concat()),
            );
            let explained = Commands::explain(preset, &options);
            let has_collective = |line: &str| {
                let words: Vec<&str> = line.split_whitespace().take(3).collect();
                words.join(" ") == *collective
            };
            assert!(explained.lines().any(has_collective), "{collective}: {explained}");
            let of_file = ["--mesh", options[1], "--plan", &plan];
            assert_eq!(Commands::explain(preset, &of_file), explained, "{options:?}");
            // `explain` has shown the same plan, so that one training from a file is enough for each preset.
            let is_first = styles[..i].iter().all(|style| style.0 != preset);
            let runs = [("options", &options[..]), ("plan", &of_file)];
            for (name, options) in runs.into_iter().take(1 + usize::from(is_first)) {
                let name = format!("{i}-{name}");
                // To rounding: a ring, and a stated way of reaching experts, have no canonical sums.
                if ["--context ring", "--experts"].iter().any(|form| style.1.contains(form)) {
                    let many = commands.train(preset, &name, options);
                    same(&losses(&plain), &losses(&many), 1e-9, style.1);
                } else {
                    let many = commands.train(preset, &name, &[&CANONICAL[..], options].concat());
                    assert_eq!(many, canonical, "{options:?}");
                }
            }
            assert_relative_eq!(commands.eval(&model, &options), loss, max_relative = 1e-9);
            let generate = Commands::generate_args(&model, &options);
            assert_eq!(stdout(&generate), generated, "{options:?}");
        }
    }
}

#[test]
fn training_states_how_pipeline_ranks_gather_their_parameters() {
    let commands = Commands::new("style-memory");
    let out = commands.folder.path("out");
    let given =
        ["train", "--preset", "tiny", "--data", &commands.data, "--out", &out, "--mesh", "pp=2,fsdp=2"];
    let step = ["--steps", "1", "--batch", "4", "--seq", "16", "--eval-every", "0", "--microbatches", "2"];
    for (option, value, when, why) in [
        ("--memory-limit", "1GB", "once per step", "with which a step needs about "),
        ("--gathered-bytes-max", "0", "by each microbatch", "more than gathered_bytes_max"),
    ] {
        let printed = stdout(&[&given[..], &step, &[option, value]].concat());
        let lines: Vec<&str> = printed.lines().filter(|line| line.starts_with("pipeline rank ")).collect();
        assert_eq!(lines.len(), 2, "{printed}");
        for (rank, line) in lines.into_iter().enumerate() {
            let start = format!("pipeline rank {rank} gathers its parameters {when}: ");
            assert!(line.starts_with(&start) && line.contains(why), "{line}");
        }
    }
}

#[test]
fn options_without_their_axes_are_refused_by_every_command() {
    let commands = Commands::new("style-axes");
    commands.train("tiny", "out", &["--mesh", "dp=1"]);
    let (model, out) = (commands.folder.path("out/model"), commands.folder.path("other"));
    let given: [&[&str]; 4] = [
        &["train", "--data", &commands.data, "--out", &out],
        &["eval", "--model", &model, "--data", &commands.data],
        &["generate", "--model", &model, "--prompt", "The"],
        &["explain"],
    ];
    let two = commands.folder.path("two.plan");
    let printed = Commands::explain("tiny", &["--mesh", "dp=2", "--zero", "1", "--show-plan"]);
    fs::write(&two, printed).unwrap();
    let file = format!("--plan {two} --mesh dp=2,fsdp=2");
    for (options, why) in [
        ("--zero 2 --mesh tp=2", "--zero 2 shards over dp, and the mesh has no dp axis"),
        ("--zero 2 --mesh dp=2,fsdp=2", "over fsdp=2 already"),
        (&file, "two axes of the mesh have a stage of ZeRO: `zero 3 fsdp` and `zero 1 dp`"),
        ("--sequence-parallel --mesh dp=2", "--sequence-parallel needs a tp axis"),
        ("--context ring --mesh dp=2", "--context needs a cp axis"),
        ("--experts exchange --mesh dp=2", "--experts needs an ep axis"),
        ("--plan /no/such/file", "/no/such/file"),
    ] {
        for command in given {
            let (code, message) =
                exit_code_and_stderr(&[command, &options.split(' ').collect::<Vec<_>>()].concat());
            assert!(code == 2 && message.contains(why), "{command:?} {options}: {message}");
        }
    }
}

#[test]
fn experts_without_a_choice_are_reached_by_fewer_bytes() {
    // Two experts for each token: two ranks gather rows, three exchange them.
    for (mesh, form) in [("ep=2", "gather"), ("ep=3", "exchange")] {
        let of = |more: &[&str]| Commands::explain("mixtral-tiny", &[&["--mesh", mesh][..], more].concat());
        let other = if form == "gather" { "exchange" } else { "gather" };
        let (chosen, other) = (of(&[]), of(&["--experts", other]));
        let totals = |text: &str| text[text.find("totals").expect("explain has totals")..].to_string();
        assert_eq!(totals(&chosen), totals(&of(&["--experts", form])), "{mesh}");
        assert_ne!(totals(&chosen), totals(&other), "{mesh}");
    }
}
