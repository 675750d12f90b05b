//! Plan files of the command line: the plan of docs/plans.md, the printed plan of a family, differences, and faulty files.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use crate::resume::{record, text};
use std::fs;

/// The plan that docs/plans.md shows.
fn documented_plan() -> String {
    let page = include_str!("../docs/plans.md");
    let (_, plan) = page.split_once("```plan\n").unwrap();
    plan.split_once("```").unwrap().0.to_string()
}

fn stdout(args: &[&str]) -> String {
    let output = shardgrad(args);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_documented_grid_trains_as_one_rank() {
    let folder = Folder::new("plan-grid");
    let file = folder.path("grid.plan");
    fs::write(&file, documented_plan()).unwrap();
    let data = text(&folder);
    let trained = |name: &str, more: &[&str]| {
        let out = folder.path(name);
        let step = ["--steps", "3", "--batch", "4", "--seq", "16", "--eval-every", "0"];
        let given = ["train", "--preset", "tiny", "--data", &data, "--out", &out];
        let canonical = ["--deterministic", "mesh", "--state-hash", "1"];
        stdout(&[&given[..], &step, &canonical, more].concat());
        record(out.as_ref())
    };
    let want = trained("one", &["--mesh", "dp=1"]);
    assert!(want.len() == 3 && want.iter().all(|line| line["state_hash"].is_string()), "{want:?}");
    for mesh in ["x=2,y=2", "x=1,y=2"] {
        let got = trained(&mesh.replace(['=', ','], "_"), &["--mesh", mesh, "--plan", &file]);
        assert_eq!(got, want, "{mesh}");
    }
}

#[test]
fn a_printed_plan_is_the_plan_of_the_family() {
    let folder = Folder::new("plan-printed");
    for (preset, mesh) in [("tiny", "pp=2,dp=2,tp=2"), ("mixtral-tiny", "ep=2,fsdp=2")] {
        let step = ["explain", "--preset", preset, "--mesh", mesh, "--batch", "4", "--seq", "8"];
        let file = folder.path(preset);
        fs::write(&file, stdout(&[&step[..], &["--show-plan"]].concat())).unwrap();
        assert_eq!(stdout(&[&step[..], &["--plan", &file]].concat()), stdout(&step));
        let diff = stdout(&[&step[..], &["--diff", "family", &file]].concat());
        for part in ["parameters: equal\n", "activations per microbatch: equal\n", "collectives: equal\n"] {
            assert!(diff.contains(part), "{diff}");
        }
    }
}

#[test]
fn differences_of_two_plans_are_listed() {
    let folder = Folder::new("plan-diff");
    let file = folder.path("my.plan");
    fs::write(&file, "batch dp@0\ncompute * dp~\nstore wte.weight dp@0\n").unwrap();
    let step = ["explain", "--preset", "tiny", "--mesh", "dp=2", "--batch", "4", "--seq", "8"];
    let diff = stdout(&[&step[..], &["--diff", "family", &file]].concat());
    assert!(diff.contains("wte.weight  f32[256, 128] 128.0 KiB -> f32[256@dp, 128] 64.0 KiB\n"), "{diff}");
    assert!(diff.contains("dp     backward reduce_scatter  none -> 1 calls"), "{diff}");
    let json = stdout(&[&step[..], &["--json", "--diff", "family", &file]].concat());
    let lines: Vec<serde_json::Value> =
        json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let parameter = lines.iter().find(|line| line["kind"] == "parameter").unwrap();
    assert_eq!(parameter["layouts"], serde_json::json!(["f32[256, 128]", "f32[256@dp, 128]"]));
    assert_eq!(parameter["bytes"], serde_json::json!([131_072, 65_536]));
    assert_eq!(lines.iter().filter(|line| line["kind"] == "parameter").count(), 1);
}

#[test]
fn faulty_plan_files_are_refused_with_their_lines() {
    let folder = Folder::new("plan-faults");
    let file = folder.path("bad.plan");
    fs::write(&file, "# rows\nbatch dp@0\nstroe w tp@0\n").unwrap();
    let (code, text) = exit_code_and_stderr(&["explain", "--plan", &file]);
    assert!(
        code == 2 && text.contains("3: stroe w tp@0") && text.contains("did you mean `store`?"),
        "{text}"
    );
    let (code, text) = exit_code_and_stderr(&["explain", "--plan", &folder.path("none.plan")]);
    assert!(code == 2 && text.contains("none.plan"), "{text}");
    fs::write(&file, "batch dp@0\ncompute * dp~\nstore h.*.atn.weight tp@0\n").unwrap();
    let (code, text) = exit_code_and_stderr(&["explain", "--mesh", "dp=2", "--plan", &file]);
    assert!(code == 2 && text.contains("h.*.atn.weight tp@0: no such parameters; nearest"), "{text}");
    fs::write(&file, "batch dp@0\ncompute * dp~\n").unwrap();
    let (code, text) = exit_code_and_stderr(&["explain", "--mesh", "dp=2,tp=2", "--plan", &file]);
    assert!(code == 2 && text.contains("the plan does not use the mesh axis tp=2"), "{text}");
}
