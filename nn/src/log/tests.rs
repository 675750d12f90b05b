//! Tests of the log: contents of both files, earlier runs, ranks, and errors.

use super::event_file::tests::records;
use super::{LINES_FILE, Log, Scalar};
use crate::checkpoint::scratch::Scratch;
use shardgrad_tensor::{ControlFlags, Error, Kind, Mesh, StepReport, World};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

/// A field of a message: its number, and its bytes or its number.
fn fields(mut message: &[u8]) -> Vec<(u64, Vec<u8>, u64)> {
    fn varint(from: &mut &[u8]) -> u64 {
        let end = from.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
        let (bytes, rest) = from.split_at(end);
        *from = rest;
        bytes.iter().rev().fold(0, |number, byte| number << 7 | u64::from(byte & 0x7f))
    }
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let length = match key & 7 {
            0 => {
                let number = varint(&mut message);
                fields.push((key >> 3, Vec::new(), number));
                continue;
            }
            1 => 8,
            2 => varint(&mut message) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        let (bytes, rest) = message.split_at(length);
        message = rest;
        fields.push((key >> 3, bytes.to_vec(), 0));
    }
    fields
}

/// The scalars of an event file as (step, name, number), and the steps at which sessions start.
fn events(file: &Path) -> (Vec<(u64, String, f32)>, Vec<u64>) {
    let (mut scalars, mut starts) = (Vec::new(), Vec::new());
    for record in records(&fs::read(file).unwrap()) {
        let event = fields(&record);
        let step = event.iter().find(|(field, ..)| *field == 2).unwrap().2;
        for (field, bytes, _) in &event {
            match field {
                5 => scalars.extend(fields(bytes).into_iter().map(|(_, value, _)| {
                    let value = fields(&value);
                    let number = f32::from_le_bytes(value[1].1[..].try_into().unwrap());
                    (step, String::from_utf8(value[0].1.clone()).unwrap(), number)
                })),
                7 => starts.push(step),
                _ => {}
            }
        }
    }
    (scalars, starts)
}

fn lines(folder: &Path) -> String {
    fs::read_to_string(folder.join(LINES_FILE)).unwrap()
}

fn log_steps(folder: &Path, steps: std::ops::Range<u64>, value: f64) {
    let log = Log::to(folder).unwrap();
    steps.for_each(|step| log.write(step, &[("loss", value.into())]).unwrap());
}

#[test]
fn both_files_hold_the_scalars_of_each_step() {
    let dir = Scratch::new();
    let folder = dir.path("runs/a");
    let log = Log::to(&folder).unwrap();
    log.write(1, &[("loss", 5.5.into()), ("skipped", true.into())]).unwrap();
    // The object of a step stays open until the next one begins.
    assert_eq!(lines(&folder), "{\"step\":1,\"loss\":5.5,\"skipped\":true");
    log.write(1, &[("val \"loss\"", 0.1.into())]).unwrap();
    log.write(300, &[("loss", f64::NAN.into()), ("lr", 3e-4.into())]).unwrap();
    log.end_step().unwrap();
    log.sync().unwrap();
    let right = "{\"step\":1,\"loss\":5.5,\"skipped\":true,\"val \\\"loss\\\"\":0.1}\n\
                 {\"step\":300,\"loss\":null,\"lr\":0.0003}\n";
    assert_eq!(lines(&folder), right);
    let [file] = &Log::event_files(&folder)[..] else { panic!("one event file") };
    let (scalars, starts) = events(file);
    let scalar = |step, name: &str, number| (step, name.to_string(), number);
    assert!(scalars[3].2.is_nan() && scalars[3].0 == 300);
    assert_eq!(
        scalars[..3],
        [scalar(1, "loss", 5.5), scalar(1, "skipped", 1.0), scalar(1, "val \"loss\"", 0.1)]
    );
    assert_eq!((&scalars[4..], &starts[..]), (&[scalar(300, "lr", 3e-4)][..], &[1][..]));
}

#[test]
fn resumed_log_has_each_step_once() {
    let dir = Scratch::new();
    let folder = dir.path("run");
    log_steps(&folder, 1..6, 1.0);
    // A killed run leaves an incomplete line.
    let killed = lines(&folder) + "{\"step\":6,\"loss\":1.";
    fs::write(folder.join(LINES_FILE), &killed).unwrap();
    let log = Log::to(&folder).unwrap();
    assert_eq!(lines(&folder), killed, "nothing changes before the first write");
    log.write(4, &[("loss", 2.0.into())]).unwrap();
    drop(log);
    let line = |step, loss| format!("{{\"step\":{step},\"loss\":{loss:?}}}\n");
    let kept: String = (1..4).map(|step| line(step, 1.0)).collect();
    assert_eq!(lines(&folder), kept + &line(4, 2.0));
    let starts: Vec<_> = Log::event_files(&folder).iter().map(|file| events(file).1).collect();
    assert_eq!(starts, [[1], [4]], "TensorBoard drops steps from 4 on of the first file");
    // A log that goes on after the last step appends, and one that begins anew replaces the file.
    log_steps(&folder, 5..6, 2.0);
    assert_eq!(lines(&folder).lines().count(), 5);
    log_steps(&folder, 1..2, 3.0);
    assert_eq!(lines(&folder), line(1, 3.0));
    let other = Log::to(dir.path("other")).unwrap().with_earlier_lines(line(1, 3.0).into());
    other.write(2, &[("loss", 3.0.into())]).unwrap();
    drop(other);
    assert_eq!(lines(&dir.path("other")), line(1, 3.0) + &line(2, 3.0));
}

#[test]
fn log_in_another_folder_begins_with_the_event_files_of_the_resumed_run() {
    let dir = Scratch::new();
    let [first, second] = ["first", "second"].map(|name| dir.path(name));
    log_steps(&first, 1..4, 1.0);
    for step in 3..5 {
        let log = Log::to(&second).unwrap().with_earlier_events(&first);
        assert_eq!(
            Log::event_files(&second).len(),
            2 * (step - 3),
            "nothing is copied before the first write"
        );
        log.write(step as u64, &[("loss", 2.0.into())]).unwrap();
        drop(log);
        let steps: Vec<Vec<u64>> = Log::event_files(&second)
            .iter()
            .map(|file| events(file).0.iter().map(|(step, ..)| *step).collect())
            .collect();
        assert_eq!(steps, [&[1, 2, 3][..], &[3], &[4]][..step - 1]);
        fs::rename(&first, dir.path("gone")).ok();
    }
    let num_files = fs::read_dir(&second).unwrap().count();
    assert_eq!(num_files, 4, "the lines, and three event files");
}

#[test]
fn report_has_the_auxiliary_outputs_by_name() {
    let dir = Scratch::new();
    let mut report = StepReport {
        loss: 0.5,
        count: None,
        grad_norm: 2.0,
        lr: 0.25,
        loss_scale: None,
        grad_scale: 1.0,
        skipped: false,
        control: ControlFlags::new(),
        auxiliary: vec![("accuracy".to_string(), 0.75), ("tokens".to_string(), 12.0)],
        auxiliary_vectors: Vec::new(),
    };
    World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        let log = Log::to(dir.path("run"))?;
        log.report(rank, 1, &report)
    })
    .unwrap();
    let right = "{\"step\":1,\"loss\":0.5,\"grad_norm\":2.0,\"lr\":0.25,\"accuracy\":0.75,\"tokens\":12.0}\n";
    assert_eq!(lines(&dir.path("run")), right);
    let (scalars, _) = events(&Log::event_files(&dir.path("run"))[0]);
    let names: Vec<&str> = scalars.iter().map(|(_, name, _)| name.as_str()).collect();
    assert_eq!(names, ["loss", "grad_norm", "lr", "accuracy", "tokens"]);
    assert_eq!((scalars[3].2, scalars[4].2), (0.75, 12.0));
    report.auxiliary[1].0 = "lr".to_string();
    let refused = World::run(Mesh::single(), |rank| Log::to(dir.path("other"))?.report(rank, 1, &report));
    assert_eq!(refused.unwrap_err().message(), "`lr` of step 1 is logged twice");
}

#[test]
fn rank_zero_writes() {
    let dir = Scratch::new();
    let folder = dir.path("run");
    World::run(Mesh::parse("dp=3").unwrap(), |rank| {
        let log = Log::to(&folder)?;
        log.scalars(rank, 1, &[("rank", rank.index() as f64)])
    })
    .unwrap();
    assert_eq!((&*lines(&folder), Log::event_files(&folder).len()), ("{\"step\":1,\"rank\":0.0}\n", 1));
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let dir = Scratch::new();
    let log = Log::to(dir.path("run")).unwrap();
    let loss: &[(&str, Scalar)] = &[("loss", 1.0.into())];
    log.write(5, loss).unwrap();
    let text = |refused: Result<(), Error>| {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        error.message().to_string()
    };
    assert_eq!(text(log.write(4, loss)), "step 4 is logged after step 5");
    assert_eq!(text(log.write(5, loss)), "`loss` of step 5 is logged twice");
    assert_eq!(text(log.write(6, &[loss, loss].concat())), "`loss` of step 6 is logged twice");
    assert_eq!(text(log.write(6, &[("step", 1.0.into())])), "`step` of step 6 is logged twice");
    log.end_step().unwrap();
    assert_eq!(text(log.write(5, &[("lr", 1.0.into())])), "step 5 is logged again after its end");
    assert_eq!(lines(&dir.path("run")), "{\"step\":5,\"loss\":1.0}\n");
}

#[test]
fn files_that_cannot_be_written_are_errors() {
    let dir = Scratch::new();
    fs::write(dir.path("file"), "").unwrap();
    for folder in ["file", "file/below"] {
        let error = Log::to(dir.path(folder)).unwrap_err();
        assert!(error.kind() == Kind::Io && error.message().starts_with("cannot write "), "{error}");
    }
    fs::create_dir_all(dir.path("run").join(LINES_FILE)).unwrap();
    let error = Log::to(dir.path("run")).unwrap().write(1, &[("loss", 1.0.into())]).unwrap_err();
    assert!(error.kind() == Kind::Io && error.message().contains("run/metrics.jsonl: "), "{error}");
}

#[test]
fn scalars_refused_by_a_full_disk_are_written_later() {
    let dir = Scratch::new();
    let full = || Some(File::options().write(true).open("/dev/full").unwrap());
    fs::create_dir(dir.path("run")).unwrap();
    symlink("/dev/full", dir.path("run").join(LINES_FILE)).unwrap();
    let log = Log::to(dir.path("run")).unwrap();
    log.files().events.file = full();
    for step in 1..3 {
        let error = log.write(step, &[("loss", 1.0.into())]).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(error.message().contains("metrics.jsonl: No space left on device"), "{error}");
    }
    for name in [LINES_FILE, "events.out.tfevents.1"] {
        fs::remove_file(dir.path("run").join(name)).ok();
        let file = File::options().append(true).create_new(true).open(dir.path("run").join(name)).unwrap();
        let mut files = log.files();
        if name == LINES_FILE { files.lines.file = Some(file) } else { files.events.file = Some(file) }
    }
    log.write(3, &[("loss", 1.0.into())]).unwrap();
    drop(log);
    assert_eq!(lines(&dir.path("run")).lines().count(), 3);
    assert_eq!(events(&Log::event_files(&dir.path("run"))[0]).0.len(), 3);
}

#[test]
fn symlinks_are_followed_and_truncated_files_have_no_gap() {
    let dir = Scratch::new();
    fs::create_dir(dir.path("run")).unwrap();
    let path = dir.path("run").join(LINES_FILE);
    for target in ["there", "missing"] {
        if target == "there" {
            log_steps(&dir.path("steps"), 1..4, 1.0);
            fs::rename(dir.path("steps").join(LINES_FILE), dir.path(target)).unwrap();
        }
        symlink(dir.path(target), &path).unwrap();
        log_steps(&dir.path("run"), 2..3, 2.0);
        assert_eq!(fs::read_link(&path).unwrap(), dir.path(target));
        let num_lines = if target == "there" { 2 } else { 1 };
        assert_eq!(lines(&dir.path("run")).lines().count(), num_lines);
        fs::remove_file(&path).unwrap();
    }
    let log = Log::to(dir.path("run")).unwrap();
    log.write(1, &[("loss", 1.0.into())]).unwrap();
    log.end_step().unwrap();
    File::create(&path).unwrap();
    log.write(2, &[("loss", 1.0.into())]).unwrap();
    drop(log);
    assert_eq!(lines(&dir.path("run")), "{\"step\":2,\"loss\":1.0}\n");
}
