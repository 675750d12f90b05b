//! Snapshots of `explain` for two blocks of each model family: layouts, collectives with bytes and lines, totals.
//! `INSTA_UPDATE=always cargo test explain` rewrites them.

use crate::cli::{Folder, shardgrad};
use shardgrad::nn::{Gpt2Config, LlamaConfig, LlamaKind, ModelConfig};

/// Returns the peak bytes of a rank in a step.
pub(crate) fn peak_bytes(args: &[&str]) -> u64 {
    let output = shardgrad(&[&["explain", "--json"], args].concat());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter(|l| l["kind"] == "total").map(|l| l["peak_bytes"].as_u64().unwrap()).max().unwrap()
}

/// Returns the output without line numbers and folders.
fn explained(folder: &Folder, mesh: &str) -> String {
    let dir = folder.path("");
    let given =
        ["explain", "--model", &dir, "--mesh", mesh, "--batch", "8", "--seq", "16", "--microbatches", "2"];
    let output = shardgrad(&given);
    assert!(output.status.success(), "{output:?}");
    let steady = |line: &str| match line.split_once(".rs:") {
        Some((before, _)) => format!("{before}.rs:LINE"),
        None => line.replace(&dir, "FOLDER"),
    };
    String::from_utf8(output.stdout).unwrap().lines().map(steady).collect::<Vec<_>>().join("\n")
}

#[test]
fn explain_snapshots_on_every_axis() {
    let (gpt2, llama) = (Folder::new("explain-gpt2"), Folder::new("explain-llama"));
    ModelConfig::from(Gpt2Config::new(50, 16, 24, 2, 4)).write(gpt2.path("").as_ref()).unwrap();
    let config = LlamaConfig::new(LlamaKind::Llama, 50, 16, [24, 64], 2, [4, 2]);
    ModelConfig::from(config).write(llama.path("").as_ref()).unwrap();
    let mixtral = Folder::new("explain-mixtral");
    let config = LlamaConfig::new(LlamaKind::Mixtral, 50, 16, [24, 64], 2, [4, 2]);
    ModelConfig::from(config).write(mixtral.path("").as_ref()).unwrap();
    const MESHES: [&str; 6] = ["dp=2", "fsdp=2", "cp=2", "tp=2", "pp=2", "pp=2,dp=2,tp=2"];
    for (family, folder, meshes) in [
        ("gpt2", gpt2, &MESHES[..]),
        ("llama", llama, &MESHES),
        ("mixtral", mixtral, &["ep=2", "ep=4", "dp=2,ep=2,tp=2"]),
    ] {
        for mesh in meshes {
            let name = format!("{family}_{}", mesh.replace(['=', ','], "_"));
            insta::assert_snapshot!(name, explained(&folder, mesh));
        }
    }
}

/// The lines that README.md shows of a command are lines of its output, up to the numbers of source lines.
#[test]
fn readme_shows_lines_of_the_output() {
    let readme = include_str!("../README.md");
    let (_, rest) = readme.split_once("`cargo run --release -- explain ").unwrap();
    let (arguments, rest) = rest.split_once('`').unwrap();
    let block = rest.split("```").nth(1).unwrap().trim_start_matches("text\n");
    let arguments: Vec<&str> = std::iter::once("explain").chain(arguments.split_whitespace()).collect();
    let output = shardgrad(&arguments);
    assert!(output.status.success(), "{output:?}");
    let output = String::from_utf8(output.stdout).unwrap();
    let shown: Vec<&str> = block.lines().filter(|line| !["", "..."].contains(&line.trim())).collect();
    assert!(shown.len() > 10);
    let without_number = |line: &str| line.rsplit_once(".rs:").map_or(line, |(file, _)| file).to_string();
    for line in shown {
        assert!(
            output.lines().any(|printed| without_number(printed) == without_number(line)),
            "README.md shows `{line}`, but it is not in\n{output}"
        );
    }
}

#[test]
fn estimated_stages_cover_the_model() {
    let parameters = |mesh: &str, more: &[&str]| {
        let given = ["explain", "--preset", "tiny", "--batch", "4", "--seq", "8", "--json", "--mesh", mesh];
        let output = shardgrad(&[&given[..], more].concat());
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let mut names: Vec<String> =
            lines.filter(|l| l["kind"] == "parameter").map(|l| l["name"].to_string()).collect();
        names.sort_unstable();
        names
    };
    let mut whole = parameters("dp=1", &[]);
    // The tied embedding is on the first and the last stage.
    whole.push("\"wte.weight\"".to_string());
    whole.sort_unstable();
    for more in [
        &["--cut", "measured"][..],
        &["--schedule", "searched"],
        &["--schedule", "searched-1", "--cut", "measured"],
        &["--schedule", "1f1b"],
    ] {
        for mesh in ["pp=2", "pp=4,dp=2"] {
            // With a V-shaped schedule a rank holds the first and the last stage, and the embedding once.
            let mut names = parameters(mesh, more);
            names.dedup();
            let mut once = whole.clone();
            once.dedup();
            assert_eq!(names, once, "{mesh} {more:?}");
            assert!(parameters(mesh, more).len() <= whole.len(), "{mesh} {more:?}");
        }
    }
    let given = ["explain", "--mesh", "pp=2", "--batch", "4", "--seq", "8"];
    let message = |more: &[&str]| String::from_utf8(shardgrad(&[&given[..], more].concat()).stdout).unwrap();
    assert!(message(&["--cut", "measured"]).contains("are estimates"));
    assert!(!message(&[]).contains("are estimates"));
}

#[test]
fn explained_peak_memory_includes_optimizer_state() {
    // Peak memory: parameters, two AdamW moments, and activations, which grow with the batch.
    let of = |batch: &str| {
        let given =
            ["explain", "--preset", "tiny", "--mesh", "dp=1", "--seq", "64", "--json", "--batch", batch];
        let output = shardgrad(&given);
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let parameters = lines.iter().filter(|l| l["kind"] == "parameter");
        let bytes: f64 = parameters.map(|l| l["bytes"].as_f64().unwrap()).sum();
        let total = lines.iter().find(|l| l["kind"] == "total").unwrap();
        [bytes, total["peak_bytes"].as_f64().unwrap()]
    };
    let ([bytes, at_32], [_, at_64]) = (of("32"), of("64"));
    let lasting = 2.0 * at_32 - at_64;
    assert!((3.0 * bytes..3.5 * bytes).contains(&lasting), "{lasting} of {bytes}");
}

#[test]
fn explain_states_how_stages_gather_their_parameters() {
    let explained = |more: &[&str]| {
        let given = ["explain", "--preset", "tiny", "--mesh", "pp=2,fsdp=2", "--batch", "8", "--seq", "16"];
        let output = shardgrad(&[&given[..], more].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let stages = |text: &str, line: &str| text.lines().filter(|l| l.contains(line)).count();
    let (kept, freed) = (explained(&[]), explained(&["--gathered-bytes-max", "0"]));
    assert_eq!(stages(&kept, "gathered once per step and kept: "), 2, "{kept}");
    assert_eq!(stages(&freed, "gathered by each microbatch, since all take "), 2, "{freed}");
    assert_eq!(stages(&freed, "reduced in each backward pass"), 2, "{freed}");
    // The groups are those of the stage.
    let groups: Vec<&str> = freed.lines().filter(|l| l.contains("by each microbatch")).collect();
    assert!(groups[0].contains("wpe") && !groups[0].contains("ln_f"), "{groups:?}");
    assert!(groups[1].contains("ln_f") && !groups[1].contains("wpe"), "{groups:?}");
    let peak = |bound: &[&str]| {
        let given = ["--preset", "gpt2-124m", "--mesh", "pp=2,fsdp=2", "--batch", "16", "--dtype", "bf16"];
        peak_bytes(&[&given[..], &["--seq", "128"], bound].concat())
    };
    assert!(peak(&["--gathered-bytes-max", "0"]) < peak(&[]));
    // The memory of a rank decides alike; what the step needs is stated, and is enough.
    let needed = |text: &str| -> Vec<u64> {
        let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines.filter_map(|line| line["needed_bytes"].as_u64()).collect()
    };
    let most = *needed(&explained(&["--json"])).iter().max().unwrap();
    let [enough, less] = [most, most / 2].map(|bytes| explained(&["--memory-limit", &bytes.to_string()]));
    assert_eq!(stages(&enough, "gathered once per step and kept: "), 2, "{enough}");
    assert_eq!(stages(&less, "gathered by each microbatch, since all take "), 2, "{less}");
    assert!(less.contains(", with which a step needs about "), "{less}");
}

#[test]
fn activations_that_are_gathered_again_are_listed() {
    let given = ["explain", "--preset", "mixtral-tiny", "--mesh", "tp=2", "--batch", "2", "--seq", "8"];
    let of = |more: &[&str]| {
        let output = shardgrad(&[&given[..], more].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let text = of(&["--sequence-parallel"]);
    let listed = text.lines().find(|line| line.contains("gathered again for the backward pass"));
    let listed = listed.unwrap_or_else(|| panic!("{text}"));
    // Two norms of each of four blocks, and the norm before the output layer.
    assert_eq!(listed.matches("layernorm.out").count(), 8, "{listed}");
    assert!(listed.ends_with("model.norm.out") && listed.contains("while the product before"), "{listed}");
    assert!(!of(&[]).contains("gathered again"));
    let lines = of(&["--sequence-parallel", "--json"]);
    let line = lines.lines().find(|line| line.contains("\"regathered\"")).unwrap_or_default();
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!(line["points"].as_array().map(Vec::len), Some(9));
}

#[test]
fn extra_bytes_of_canonical_sums_are_shown() {
    let given = ["explain", "--preset", "tiny", "--seq", "8", "--deterministic", "mesh"];
    let of = |more: &[&str]| {
        let output = shardgrad(&[&given[..], more].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let extra = |more: &[&str]| -> [u64; 2] {
        let text = of(&[more, &["--json"]].concat());
        let mut lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let line = lines.rfind(|line| line["kind"] == "canonical_sums").unwrap();
        [0, 1].map(|which| line["collective_bytes"][which].as_u64().unwrap())
    };
    let text = of(&["--mesh", "fsdp=2", "--batch", "4"]);
    let (_, section) =
        text.split_once("\nin place of --deterministic run\n").unwrap_or_else(|| panic!("{text}"));
    assert!(text.contains("the batch is cut into 4 leaves"), "{text}");
    let gathered = "stage 3 of ZeRO over fsdp\n  parameters: gathered once per step and kept\n  gradients: reduced once per step";
    assert!(text.contains(gathered), "{text}");
    // Gradients are all-reduced where they were reduce-scattered.
    assert!(section.contains("backward reduce_scatter") && section.contains(" -> none"), "{section}");
    assert!(section.contains("backward all_reduce      none -> "), "{section}");
    assert!(section.contains("\n  collectives ") && section.contains("\n  peak memory "), "{section}");
    // Two ranks have one root each, as many bytes as a plain sum; three leaves of a rank have two roots.
    let [plain, one_root] = extra(&["--mesh", "dp=2", "--batch", "4"]);
    let [other, two_roots] = extra(&["--mesh", "dp=2", "--batch", "6", "--batch-leaves", "6"]);
    assert!(plain == other && one_root > plain && two_roots > one_root, "{plain} {one_root} {two_roots}");
    assert!(two_roots < 2 * plain, "{plain} {two_roots}");
    let [plain, canonical] = extra(&["--mesh", "tp=2", "--batch", "8"]);
    assert!(canonical > plain, "{plain} {canonical}");
}
