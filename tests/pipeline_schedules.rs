//! Pipeline schedules in training: user-written schedules, searched schedules and measured stage cuts, and invariants of every schedule.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use crate::training_run::{ROWS, Run, same, same_bits};
use shardgrad::autograd::pipeline::{Cut, NAMES, Schedule};
use shardgrad::dist::Phase;
use shardgrad::nn::{Gpt2Config, LlamaConfig, LlamaKind};
use shardgrad::prelude::*;
use std::fs;
use std::process::Command;

/// 1F1B for two ranks and three microbatches, as a user would write it.
const LISTS: &str =
    "schedule: mine\n0: F0.0 F0.1 B0.0 F0.2\n0: B0.1 B0.2\n1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2\n";

#[test]
fn user_schedule_lists_are_verified_and_followed() {
    let run = Run { microbatches: 3, ..Run::new(2) };
    let lists = Schedule::from_text(LISTS).unwrap();
    // Explicit transfers, which do not fit a model with more links.
    let meeting = lists.with_blocking_transfers(&[(0, 1)]);
    let saved = Schedule::from_text(&lists.with_transfers(&[(0, 1)]).to_text()).unwrap();
    // With canonical sums a rank has three leaves of rows for three microbatches.
    for (mesh, num_leaves) in [("pp=2", 3), ("dp=2,pp=2", 6)] {
        let canonical = run.clone().in_leaves(num_leaves);
        let one = canonical.bits("");
        for lists in [&lists, &meeting, &saved] {
            let many = Run { plan: Plan::gpt2().pipeline_actions(lists.clone()), ..canonical.clone() };
            same_bits(&one, &many.bits(mesh), &format!("lists of a user on {mesh}"));
        }
    }
    let refused = |lists: &Schedule, mesh: &str, microbatches: usize| {
        let plan = Plan::gpt2().pipeline_actions(lists.clone());
        let run = Run { plan, microbatches, ..run.clone() };
        World::run(Mesh::parse(mesh).unwrap(), |rank| run.trainer(rank).map(drop)).unwrap_err().to_string()
    };
    let text = refused(&lists, "pp=2", 2);
    assert!(text.contains("mine is for 2 ranks and 3 microbatches, but the run has 2 and 2"), "{text}");
    assert!(text.contains("use 3 microbatches on a pipeline axis of 2 ranks"), "{text}");
    let text = refused(&lists, "pp=3", 3);
    assert!(text.contains("the run has 3 and 3"), "{text}");
    let broken = Schedule::from_text(&LISTS.replace("B0.1 B0.2", "B0.2 B0.2")).unwrap();
    let text = refused(&broken, "pp=2", 3);
    assert!(text.contains("schedule mine: ") && text.contains("B0.2, is a duplicate"), "{text}");
    // A schedule of forward passes only is valid but does not train.
    let forward = Schedule::from_text("microbatches: 3\n0: F0.0 F0.1 F0.2\n1: F1.0 F1.1 F1.2").unwrap();
    let text = refused(&forward, "pp=2", 3);
    assert!(text.contains("schedule own has no backward pass") && text.contains("as in B0.3"), "{text}");
}

#[test]
fn measured_cuts_and_searched_schedules_do_not_change_losses() {
    let run = Run { microbatches: 3, ..Run::new(2) };
    let canonical = run.clone().in_leaves(ROWS);
    let (one, bits) = (run.losses(""), canonical.bits(""));
    for (mesh, schedule, cut) in [
        ("pp=2", "1f1b", Cut::Measured),
        ("pp=3,dp=2", "searched", Cut::Measured),
        ("pp=2,tp=2", "searched-1", Cut::Balanced),
        ("pp=4", "zb-v", Cut::Measured),
        // Three stages need one stage per rank.
        ("pp=3", "searched", Cut::Layers(vec![1, 2, 1])),
    ] {
        let (plan, what) = (Plan::gpt2().pipeline_schedule(schedule), format!("{mesh} {schedule} {cut:?}"));
        let plan = plan.pipeline_cut(cut.clone());
        match cut {
            // To rounding: a measured cut may group a sum as no canonical sum does, and is refused then.
            Cut::Measured => same(&one, &Run { plan, ..run.clone() }.losses(mesh), 1e-10, &what),
            _ => same_bits(&bits, &Run { plan, ..canonical.clone() }.bits(mesh), &what),
        }
    }
    let plan = Plan::gpt2().pipeline_schedule("searched-2").pipeline_cut(Cut::Measured);
    let run = Run { plan, ..run };
    let ranks = World::run(Mesh::parse("pp=4").unwrap(), |rank| {
        let trainer = run.trainer(rank)?;
        let schedule = trainer.pipeline_schedule().expect("there is a pipeline").clone();
        Ok((schedule.to_text(), trainer.stage_starts().len(), schedule.num_stages()))
    });
    let ranks = ranks.unwrap();
    // Equal schedules on every rank; at most two microbatches in memory, of one or two stages.
    assert!(ranks.iter().all(|t| *t == ranks[0] && t.1 == t.2), "{ranks:?}");
    let schedule = Schedule::from_text(&ranks[0].0).unwrap();
    for list in &schedule.ranks {
        let text: Vec<String> = list.iter().map(ToString::to_string).collect();
        let mut live = 0;
        for action in &text {
            live += i32::from(action.starts_with('F')) - i32::from(action.starts_with(['B', 'W']));
            assert!(live <= 2 * (ranks[0].2 / 4) as i32, "{text:?}");
        }
    }
}

#[test]
fn every_schedule_reduces_each_gradient_element_once() {
    for name in NAMES {
        let run = Run { microbatches: 6, plan: Plan::gpt2().pipeline_schedule(name), ..Run::new(1) };
        for rank in 0..4 {
            // In one run, since newly measured times may change the cut.
            let world = World::new(Mesh::parse("pp=2,dp=2").unwrap());
            let ran = world.dry_run(rank, |rank| {
                let mut trainer = run.trainer(rank)?;
                let here = trainer.model().params().iter().filter(|p| p.is_local());
                let held: usize = here.map(|p| p.numel()).sum();
                rank.trace().take();
                trainer.step()?;
                Ok((held, rank.trace().take()))
            });
            let (held, records) = ran.unwrap();
            let reduced = records.iter().filter(|r| r.op == "all_reduce" && r.phase == Phase::Backward);
            let bytes: u64 = reduced.map(|r| r.bytes).sum();
            assert_eq!(bytes, 8 * held as u64, "{name}, rank {rank}");
        }
    }
}

#[test]
fn schedules_support_empty_ranks_and_low_precision() {
    // One row per microbatch: on dp=2 a rank has none. To rounding: with canonical sums all ranks have equally many leaves.
    let run = Run { microbatches: 6, ..Run::new(2) };
    let one = run.losses("");
    for schedule in ["1f1b", "zb-v"] {
        let many = Run { plan: Plan::gpt2().pipeline_schedule(schedule), ..run.clone() };
        same(&one, &many.losses("pp=2,dp=2"), 1e-10, &format!("{schedule}, a rank without rows"));
    }
    let run = Run { dtype: DType::BF16, microbatches: 3, ..Run::new(2) }.in_leaves(ROWS);
    let one = run.bits("");
    for (mesh, schedule) in [("pp=2", "1f1b"), ("pp=2,dp=2", "zb-h1"), ("pp=2,tp=2", "dualpipe-v")] {
        let many = Run { plan: Plan::gpt2().pipeline_schedule(schedule), ..run.clone() };
        same_bits(&one, &many.bits(mesh), &format!("{schedule} on {mesh} in bf16"));
    }
}

/// In both modes: dropout masks follow the rows of microbatches in the default, of leaves with canonical sums.
#[test]
fn recomputation_and_dropout_work_with_every_schedule_shape() {
    let config = Gpt2Config { attn_pdrop: 0.2, resid_pdrop: 0.2, ..Gpt2Config::new(19, 8, 12, 4, 3) };
    let run = Run { config: config.into(), microbatches: 6, recompute: true, ..Run::new(2) };
    // Six leaves for each of two ranks, so that each schedule has its microbatches.
    let canonical = Run { rows: 12, ..run.clone() }.in_leaves(12);
    let (one, bits) = (run.losses(""), canonical.bits(""));
    for (mesh, schedule) in [
        ("pp=3", "interleaved"),
        ("pp=2,tp=2", "zb-v"),
        ("pp=3,dp=2", "v-min"),
        ("dp=2,pp=2,tp=3", "dualpipe-v"),
        ("pp=2,tp=2", "zb-h2"),
    ] {
        let (plan, what) = (Plan::gpt2().pipeline_schedule(schedule), format!("{schedule} on {mesh}"));
        same(&one, &Run { plan: plan.clone(), ..run.clone() }.losses(mesh), 1e-10, &what);
        same_bits(&bits, &Run { plan, ..canonical.clone() }.bits(mesh), &what);
    }
    let llama = LlamaConfig {
        head_dim: 4,
        attention_dropout: 0.3,
        ..LlamaConfig::new(LlamaKind::Llama, 19, 8, [12, 17], 4, [6, 3])
    };
    let plan = Plan::llama().pipeline_schedule("zb-h1");
    let run = Run { config: llama.into(), plan, microbatches: 3, ..Run::new(2) }.in_leaves(ROWS);
    same_bits(&run.bits(""), &run.bits("pp=2,tp=3"), "llama");
}

/// Long test of `.ci/full`: `PROPTEST_CASES` long runs of every schedule on every mesh in both model families. To rounding: the sums of the
/// default, which follow the mesh; `canonical_meshes.txt` has schedules with canonical sums.
#[test]
fn losses_of_every_schedule_on_more_meshes() {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok());
    let llama = LlamaConfig::new(LlamaKind::Llama, 19, 8, [12, 20], 4, [3, 3]);
    let gpt2 = Run { microbatches: 6, ..Run::new(asked.map_or(10, |_| 100)) };
    let llama = Run { config: llama.into(), plan: Plan::llama(), ..gpt2.clone() };
    let mut cases = Vec::new();
    for mesh in ["pp=2", "pp=3", "pp=2,dp=2", "pp=3,tp=3", "pp=6", "pp=2,dp=2,tp=2", "dp=3,pp=2"] {
        cases.extend(NAMES.iter().flat_map(|name| [(mesh, *name, true), (mesh, *name, false)]));
    }
    let all = cases.len();
    let count = asked.unwrap_or(2).min(all);
    let one = [gpt2.losses(""), llama.losses("")];
    for i in 0..count {
        // Spread over meshes and schedules; 37 is coprime to the number of cases.
        let (mesh, name, is_llama) = cases[i * 37 % all];
        let run = if is_llama { &llama } else { &gpt2 };
        let many = Run { plan: run.plan.clone().pipeline_schedule(name), ..run.clone() };
        let what = format!("{} {name} on {mesh}", if is_llama { "llama" } else { "gpt2" });
        same(&one[usize::from(is_llama)], &many.losses(mesh), 1e-9, &what);
    }
}

#[test]
fn schedule_file_from_plan_is_trained() {
    let folder = Folder::new("lists");
    let lists = folder.path("lists.txt");
    let given = ["plan", "--schedule", "zb-v", "--stages", "2", "--microbatches", "4", "--save", &lists];
    assert!(shardgrad(&given).status.success());
    let text = fs::read_to_string(&lists).unwrap();
    assert!(text.contains("stages on ranks: 0 1 1 0\n0: F0.0 F0.1 "), "{text}");
    assert_eq!(Schedule::from_text(&text).unwrap(), Schedule::zb_v(2, 4).unwrap());
    let output = shardgrad(&["plan", "--schedule", &lists]);
    let message = String::from_utf8(output.stdout).unwrap();
    let start = "zb-v: 2 ranks, 4 microbatches, bubble 4.00% (0.00% if steps overlapped), ";
    assert!(message.starts_with(start), "{message}");
    let data = folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    let out = folder.path("out");
    let train = |schedule: &str, more: &[&str]| {
        let given =
            ["train", "--data", &data, "--out", &out, "--preset", "tiny", "--mesh", "pp=2", "--steps", "2"];
        let rest = ["--seq", "8", "--batch", "8", "--eval-every", "0", "--json", "--schedule", schedule];
        shardgrad(&[&given[..], &rest, more].concat())
    };
    let losses = |schedule: &str, more: &[&str]| {
        let output = train(schedule, more);
        assert!(output.status.success(), "{output:?}");
        let text = fs::read_to_string(folder.0.join("out/metrics.jsonl")).unwrap();
        let loss =
            |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap();
        text.lines().map(loss).collect::<Vec<f64>>()
    };
    let by_name = losses("zb-v", &["--microbatches", "4"]);
    assert_eq!(by_name, losses(&lists, &[]));
    // A searched schedule is written to a file and can be repeated.
    losses("searched", &["--microbatches", "4", "--cut", "measured"]);
    let kept = fs::read_to_string(folder.0.join("out/schedule.txt")).unwrap();
    assert_eq!(Schedule::from_text(&kept).unwrap().num_microbatches, 4);
    losses(&folder.path("out/schedule.txt"), &[]);
    assert_eq!(fs::read_to_string(folder.0.join("out/schedule.txt")).unwrap(), kept);
    // Errors in a schedule file are reported with their position.
    let slip = folder.file("slip.txt", text.replace("0: F0.0 F0.1", "0: F0.0 Q0.1"));
    let (code, message) = exit_code_and_stderr(&["plan", "--schedule", &slip]);
    assert!(code == 2 && message.contains("`Q0.1` is not an action of a schedule"), "{message}");
    assert!(message.contains("F0.0 Q0.1") && message.contains("write F0.3, B0.3"), "{message}");
    let broken = folder.file("broken.txt", text.replace("0: F0.0 F0.1", "0: F0.1 F0.1"));
    let (code, message) = exit_code_and_stderr(&["plan", "--schedule", &broken]);
    assert!(code == 2 && message.contains("action 2 of rank 0, F0.1, is a duplicate"), "{message}");
    let (code, message) = exit_code_and_stderr(&["plan", "--schedule", &lists, "--stages", "3"]);
    assert!(
        code == 2 && message.contains("the schedule file is for 2 ranks and 4 microbatches"),
        "{message}"
    );
    let (nowhere, fifo) = (folder.path("none/lists.txt"), folder.path("fifo"));
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for option in ["--save", "--svg"] {
        let (code, message) = exit_code_and_stderr(&["plan", option, &nowhere]);
        assert!(code == 2 && message.contains("cannot write") && message.contains(option), "{message}");
        // Opening a pipe without a reader would block.
        let (code, message) = exit_code_and_stderr(&["plan", option, &fifo]);
        assert!(code == 2 && message.contains("it is a folder, a pipe or a device"), "{message}");
        let (code, message) = exit_code_and_stderr(&["plan", "--schedule", &lists, option, &lists]);
        assert!(code == 2 && message.contains("would replace a file of"), "{message}");
    }
    // Two outputs with one path: the second would replace the first.
    let both = folder.path("both");
    let (code, message) = exit_code_and_stderr(&["plan", "--save", &both, "--svg", &both]);
    assert!(
        code == 2 && message.contains("would replace a file of") && message.contains("--svg FILE"),
        "{message}"
    );
    assert!(fs::metadata(&both).is_err());
    let output = train(&lists, &["--trace", &lists]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && message.contains("would replace a file of"), "{message}");
    assert_eq!(fs::read_to_string(&lists).unwrap(), text);
    let output = train("1f1b", &["--trace", &folder.path("none/trace.json")]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && message.contains("cannot write"), "{message}");
}

#[test]
fn schedules_are_verified_for_blocking_sends() {
    let folder = Folder::new("blocking");
    let lists = folder.path("lists.txt");
    let output = shardgrad(&["plan", "--schedule", "1f1b", "--blocking", "--save", &lists]);
    let message = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && message.contains("in memory per rank, blocking sends"), "{message}");
    let output = shardgrad(&["plan", "--schedule", &lists, "--blocking"]);
    assert!(output.status.success(), "{output:?}");
    // Both ranks send first: safe with buffered sends, a deadlock with blocking ones.
    let crossed = "0: F0.0 S0>1.0 F0.1 S0>1.1 R1>0.0 B0.0 R1>0.1 B0.1\n\
                   1: R0>1.0 F1.0 B1.0 S1>0.0 R0>1.1 F1.1 B1.1 S1>0.1\n";
    let crossed = folder.file("crossed.txt", crossed);
    assert!(shardgrad(&["plan", "--schedule", &crossed]).status.success());
    let (code, message) = exit_code_and_stderr(&["plan", "--schedule", &crossed, "--blocking"]);
    assert!(code == 2 && message.contains("deadlock: rank 0 waits for rank 1 in S0>1.1"), "{message}");
    for (name, lists, why) in [
        (
            "stage",
            "microbatches: 1\n0: F0.0 F9.0 B0.0\n1: F1.0 B1.0",
            "F9.0, names a stage or microbatch that does not exist (2 stages",
        ),
        (
            "place",
            "microbatches: 1\nstages on ranks: 0 7\n0: F0.0 B0.0\n1: F1.0 B1.0",
            "is on rank 7, but there are 2",
        ),
        ("order", "0: B0.0 F0.0\n1: F1.0 B1.0", "deadlock: rank 0 waits for rank 1 in R1>0.0"),
    ] {
        let lists = folder.file(name, lists);
        for blocking in [&["--blocking"][..], &[]] {
            let (code, message) = exit_code_and_stderr(&[&["plan", "--schedule", &lists], blocking].concat());
            assert!(code == 2 && message.contains(why), "{message}");
        }
    }
}
