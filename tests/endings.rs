//! How runs of `train` end: what is refused leaves an earlier run as it is, and what was trained is saved, whatever ended it.

use crate::cli::{Folder, shardgrad, told};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const SMALL: [&str; 6] = ["--batch", "4", "--seq", "16", "--mesh", "dp=2"];

fn text(folder: &Folder, repeats: usize) -> String {
    folder.file("text", "The quick brown fox jumps over the lazy dog. ".repeat(repeats))
}

/// Every file below a folder, with its bytes.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let found = entries.flat_map(|path| match path.is_dir() {
        true => files(&path),
        false => BTreeMap::from([(path.display().to_string(), fs::read(&path).unwrap())]),
    });
    found.collect()
}

/// `train`, running, with where it writes to.
fn spawned(args: &[&str], stdout: Stdio, stderr: Stdio) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
    command.arg("train").args(SMALL).args(args).stdout(stdout).stderr(stderr).spawn().unwrap()
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn what_is_refused_leaves_an_earlier_run_as_it_is() {
    let folder = Folder::new("earlier");
    let (data, out) = (text(&folder, 200), folder.path("out"));
    let train = |more: &[&str]| {
        let all = [&["train", "--data", &data, "--out", &out, "--steps", "2"], &SMALL[..4], more].concat();
        told(&all)
    };
    let (code, said) = train(&["--mesh", "tp=2"]);
    assert_eq!(code, 0, "{said}");
    let earlier = files(Path::new(&out));
    let (metrics, beyond) = (format!("{out}/metrics.jsonl"), folder.path("no/where"));
    let odd = format!("{out}/../out/metrics.jsonl");
    for (more, parts) in [
        (&["--mesh", "tp=8"][..], &["heads"][..]),
        (&["--trace", &metrics], &["would replace a file of", "--trace FILE"]),
        (&["--trace", &odd], &["would replace a file of"]),
        (&["--trace", &data], &["would replace a file of"]),
        (&["--trace", "/dev/null"], &["/dev/null: a folder, a pipe or a device"]),
        (&["--trace", &beyond], &["No such file", "--trace FILE"]),
        (&["--model", &out], &["config.json", &format!("did you mean `{out}/model`?")]),
    ] {
        let (code, said) = train(more);
        assert!(code == 2 && parts.iter().all(|part| said.contains(part)), "{more:?}: {said}");
    }
    let other = File::options().write(true).open(format!("{out}/.lock")).unwrap();
    other.lock().unwrap();
    let (code, said) = train(&[]);
    assert!(code == 2 && said.contains("another run is writing to") && said.contains("--out DIR"), "{said}");
    assert!(files(Path::new(&out)) == earlier, "nothing has changed");
    drop(other);
    // In place, files of the model that training does not change stay.
    let model = format!("{out}/model");
    let kept = ["tokenizer_config.json", "special_tokens_map.json"]
        .map(|name| folder.file(&format!("out/model/{name}"), name));
    let (code, said) = train(&["--model", &model]);
    assert_eq!(code, 0, "{said}");
    assert!(kept.iter().all(|path| path.ends_with(&fs::read_to_string(path).unwrap()) && !path.is_empty()));
    assert!(kept.iter().all(|path| fs::metadata(path).unwrap().len() > 0));
    // A file where the model should be is found before the first step.
    fs::remove_dir_all(&model).unwrap();
    fs::remove_file(&metrics).unwrap();
    fs::write(&model, "a file").unwrap();
    let (code, said) = train(&[]);
    assert!(code == 2 && said.contains("model: it is no folder") && said.contains("--out DIR"), "{said}");
    assert!(!Path::new(&metrics).exists());
}

#[test]
fn a_run_outlives_those_who_read_what_it_says() {
    let folder = Folder::new("outlives");
    let data = text(&folder, 50);
    for (name, stdout, stderr) in
        [("gone", Stdio::piped(), Stdio::piped()), ("full", full(), Stdio::piped()), ("both", full(), full())]
    {
        let out = folder.path(name);
        let args = ["--data", &data, "--out", &out, "--steps", "3", "--json"];
        let mut child = spawned(&args, stdout, stderr);
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{name}: {said}");
        assert!(Path::new(&out).join("model/model.safetensors").is_file(), "{name}");
        assert_eq!(said.matches("cannot write to stdout").count(), usize::from(name == "full"), "{said}");
    }
    let refused = spawned(&["--data", "/no/such/file"], Stdio::null(), full()).wait().unwrap();
    assert_eq!(refused.code(), Some(2), "nobody hears why, and that is no panic");
}

fn is_hangup_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() & 1 == 1)
}

#[test]
fn a_signal_ends_a_measurement_and_a_finished_run_was_not_stopped() {
    let folder = Folder::new("measuring");
    // Its held-out tenth takes far longer than a step.
    let data = text(&folder, 40_000);
    let cases = [("1", "-TERM", 0), ("3", "-INT", 130), ("3", "-HUP", 130)];
    // Who lets this process ignore SIGHUP, as `nohup` does, lets a run ignore it too.
    for (steps, signal, code) in cases.into_iter().filter(|case| case.1 != "-HUP" || !is_hangup_ignored()) {
        let out = folder.path(&format!("out{signal}"));
        let args = ["--data", &data, "--out", &out, "--steps", steps, "--eval-every", "1"];
        let mut child = spawned(&args, Stdio::piped(), Stdio::piped());
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut lines = stdout.lines();
        // From this line on signals are caught.
        lines.find(|line| line.as_ref().unwrap().starts_with("training ")).unwrap().unwrap();
        // Long enough for a step where all is well, and not for a measurement; what is left behind is the same.
        std::thread::sleep(Duration::from_millis(if signal == "-INT" { 500 } else { 0 }));
        let kill = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        assert!(kill.success());
        lines.for_each(drop);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{signal}: {said}");
        assert!(said.contains(&format!("stopping: step 1 of {steps} is done")), "{said}");
        assert_eq!(said.contains("stopped by a signal after step 1"), code == 130, "{said}");
        let metrics = fs::read_to_string(Path::new(&out).join("metrics.jsonl")).unwrap();
        assert!(metrics.lines().count() == 1 && !metrics.contains("val_loss"), "{metrics}");
        assert!(Path::new(&out).join("model/model.safetensors").is_file());
    }
}

#[test]
fn what_cannot_be_read_after_good_steps_ends_the_run_with_a_saved_model() {
    let folder = Folder::new("unread");
    // Rows of 16 tokens, 4 a step: token 150 is in step 3; token 970 is held out.
    for (bad, mesh, steps, saved) in
        [(150, "dp=1", 5, 2), (150, "tp=2", 5, 2), (970, "dp=2", 2, 2), (970, "pp=2", 2, 2)]
    {
        let tokens: Vec<u8> =
            (0..1000u16).flat_map(|i| if i == bad { 300 } else { i % 251 }.to_le_bytes()).collect();
        let (data, out) = (folder.file("ids.bin", tokens), folder.path(&format!("{bad}{mesh}")));
        let steps = steps.to_string();
        let given = ["train", "--data", &data, "--out", &out, "--no-shuffle", "--steps", &steps];
        let (code, said) = told(&[&given[..], &SMALL[..4], &["--mesh", mesh]].concat());
        assert_eq!(code, 2, "{said}");
        assert!(said.contains(&format!("token {bad} is 300, outside of the vocabulary 0..256")), "{said}");
        assert!(said.contains(&format!("the model after step {saved}, in {out}/model")), "{said}");
        assert!(Path::new(&out).join("model/model.safetensors").is_file());
        let metrics = fs::read_to_string(Path::new(&out).join("metrics.jsonl")).unwrap();
        assert_eq!(metrics.lines().count(), saved, "{mesh}");
        assert!(Path::new(&out).join("loss.svg").is_file());
    }
}

#[test]
fn what_is_measured_is_written_to_a_file_of_its_own() {
    let folder = Folder::new("targets");
    let (data, out) = (text(&folder, 50), folder.path("out"));
    let output =
        shardgrad(&[&["train", "--data", &data, "--out", &out, "--steps", "1"], &SMALL[..]].concat());
    assert!(output.status.success(), "{output:?}");
    let model = format!("{out}/model");
    let weights = format!("{model}/model.safetensors");
    let before = (fs::read(&weights).unwrap(), fs::read(&data).unwrap());
    for target in [&weights, &data, "/dev/null", &folder.path("no/where")] {
        let (code, said) =
            told(&["eval", "--model", &model, "--data", &data, "--seq", "16", "--logits", target]);
        assert!(code == 2 && said.contains("give another file with --logits FILE"), "{said}");
    }
    assert!(before == (fs::read(&weights).unwrap(), fs::read(&data).unwrap()));
}
