//! Folders that are written and read again.

use super::super::disk::scratch::Scratch;
use super::super::folder::Weights;
use super::*;
use shardgrad_tensor::{Error, Kind};
use std::fs;

const OLD: &str = "{\"old\": 1}";
const NEW: &str = "{\"new\": 1}";

/// Begins a save of tensors of so many bytes, all of which are `byte`; all are given, none has its name.
fn begin(dir: &Path, (config, byte): (&str, u8), sizes: &[usize], bytes_max: u64) -> Result<WeightsWriter> {
    let entry = |(i, n): (usize, &usize)| (format!("t{i}"), DType::U8, vec![*n]);
    let entries: Vec<Entry> = sizes.iter().enumerate().map(entry).collect();
    let mut writer = WeightsWriter::create(dir, Some(config), &entries, bytes_max)?;
    for (name, _, shape) in &entries {
        writer.append(name, &vec![byte; shape[0]])?;
    }
    Ok(writer)
}

fn write(dir: &Path, what: (&str, u8), sizes: &[usize], bytes_max: u64) -> Result<()> {
    begin(dir, what, sizes, bytes_max)?.finish()
}

/// The bytes of all tensors, and the config, of a folder.
fn read(dir: &Path) -> Result<(Vec<u8>, String)> {
    let weights = Weights::open(dir)?;
    let tensors: Vec<Vec<u8>> =
        (0..weights.tensors().count()).map(|i| weights.read(&format!("t{i}"))).collect::<Result<_>>()?;
    Ok((tensors.concat(), fs::read_to_string(dir.join(CONFIG_FILE)).unwrap()))
}

fn temporary(name: &str) -> String {
    format!("{name}.tmp-{}", std::process::id())
}

#[test]
fn files_are_filled_in_order_and_read_back() {
    let scratch = Scratch::new();
    let dir = &scratch.path("");
    write(dir, (OLD, 7), &[3, 3, 9, 1, 0, 4], 6).unwrap();
    let names = ["1", "2", "3"].map(|i| format!("model-0000{i}-of-00003.safetensors"));
    assert_eq!(scratch.names(), [&[CONFIG_FILE.to_string()], &names[..], &[INDEX_FILE.to_string()]].concat());
    assert_eq!(read(dir).unwrap(), (vec![7; 20], OLD.to_string()));
    let index: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(dir.join(INDEX_FILE)).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 20);
    assert_eq!(index["weight_map"]["t2"], names[1].as_str());
    let entries = ["a", "b"].map(|name| (name.to_string(), DType::U8, vec![2]));
    let mut lacking = WeightsWriter::create(dir, None, &entries, 2).unwrap();
    lacking.append("a", &[1, 2]).unwrap();
    let error = lacking.finish().unwrap_err();
    assert!(error.message().ends_with("model-00002-of-00002.safetensors: its tensors are missing"));
    assert_eq!(read(dir).unwrap(), (vec![7; 20], OLD.to_string()));
}

#[test]
fn what_was_written_last_is_what_is_read_and_nothing_else_is_left() {
    let scratch = Scratch::new();
    let dir = &scratch.path("");
    let others = ["model-00001-of-00004.bin", "tokenizer.json", "x.safetensors", "x.tmp-4294967295"];
    others.iter().for_each(|name| drop(scratch.file(name, b"other")));
    let dead = [CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, "model-00002-of-00009.safetensors"];
    for (i, (count, bytes_max, what)) in [
        (2, 100, OLD),
        (3, 2, OLD),
        (5, 2, NEW),
        (3, 2, NEW),
        (3, 2, OLD),
        (1, 100, OLD),
        (4, 100, NEW),
        (0, 9, NEW),
    ]
    .into_iter()
    .enumerate()
    {
        dead.iter().for_each(|name| drop(scratch.file(&format!("{name}.tmp-4294967295"), b"half")));
        let byte = i as u8 + 1;
        write(dir, (what, byte), &vec![2; count], bytes_max).unwrap();
        assert_eq!(read(dir).unwrap(), (vec![byte; 2 * count], what.to_string()));
        let files = if bytes_max == 2 { count + 1 } else { 1 };
        let found = scratch.names();
        assert_eq!(found.len(), others.len() + 1 + files, "{found:?}");
        assert!(others.iter().all(|name| found.contains(&name.to_string())));
    }
}

#[test]
fn saves_into_one_folder_wait_for_each_other() {
    let scratch = Scratch::new();
    let dir = &scratch.path("");
    write(dir, (OLD, 9), &[2, 2], 2).unwrap();
    let first = begin(dir, (NEW, 1), &[2, 2, 2], 2).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| write(dir, (OLD, 2), &[2, 2, 2], 100));
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(!second.is_finished(), "it writes among the files of another save");
        first.finish().unwrap();
        second.join().unwrap().unwrap();
    });
    assert_eq!(read(dir).unwrap(), (vec![2; 6], OLD.to_string()));
    assert_eq!(scratch.names(), [CONFIG_FILE, WEIGHTS_FILE]);
}

/// A name that cannot be had stands for a full disk: whatever is written last when it is full.
#[test]
fn a_save_that_fails_leaves_the_old_model_whole() {
    for (old_max, new_max, blocked) in [
        (2, 2, "model-00002-of-00003.safetensors"),
        (2, 2, "model-00003-of-00003.safetensors"),
        (2, 2, INDEX_FILE),
        (2, 100, WEIGHTS_FILE),
        (100, 2, "model-00002-of-00003.safetensors"),
        (100, 100, WEIGHTS_FILE),
        (100, 100, CONFIG_FILE),
    ] {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        write(dir, (OLD, 1), &[2, 2, 2], old_max).unwrap();
        fs::create_dir(dir.join(temporary(blocked))).unwrap();
        let before = scratch.names();
        let error = write(dir, (NEW, 2), &[2, 2, 2], new_max).unwrap_err();
        assert_eq!((error.kind(), scratch.names()), (Kind::Io, before), "{blocked}: {error}");
        assert_eq!(read(dir).unwrap(), (vec![1; 6], OLD.to_string()), "{blocked}");
        fs::remove_dir(dir.join(temporary(blocked))).unwrap();
        write(dir, (NEW, 3), &[2, 2, 2], new_max).unwrap();
        assert_eq!(read(dir).unwrap(), (vec![3; 6], NEW.to_string()));
    }
}

/// A file that is taken away before it gets its name stops a save there, as a kill would.
#[test]
fn a_save_that_stops_between_two_names_leaves_the_old_model_or_none() {
    let part = |count| shard_name(2, count);
    // By what the new files replace: another config, files of their names, or nothing.
    for (what, count, is_kept) in [(NEW, 4, false), (OLD, 3, false), (OLD, 4, true)] {
        for old_max in [2, 100] {
            let is_kept = is_kept || what == OLD && old_max == 100;
            let scratch = Scratch::new();
            let dir = &scratch.path("");
            write(dir, (OLD, 1), &[2; 3], old_max).unwrap();
            let writer = begin(dir, (what, 2), &vec![2; count], 2).unwrap();
            fs::remove_file(dir.join(temporary(&part(count)))).unwrap();
            let error = writer.finish().unwrap_err();
            if is_kept {
                assert!(error.to_string().contains("what was there is as it was"), "{error}");
                assert_eq!(read(dir).unwrap(), (vec![1; 6], OLD.to_string()));
            } else {
                let names = scratch.names();
                assert!(!names.contains(&INDEX_FILE.to_string()), "the index comes last: {names:?}");
                assert!(names.contains(&temporary(INDEX_FILE)) && error.to_string().contains("save again"));
                let error = read(dir).unwrap_err();
                assert_eq!(error.kind(), Kind::Checkpoint);
                assert!(error.message().ends_with("holds a save that was interrupted, or is not done yet"));
                assert!(
                    error.details()[0].1.starts_with("save again; what it wrote lies in model"),
                    "{error}"
                );
            }
            write(dir, (what, 3), &[2; 3], 2).unwrap();
            assert_eq!(read(dir).unwrap(), (vec![3; 6], what.to_string()));
            assert_eq!(scratch.names().len(), 5, "nothing is left: {:?}", scratch.names());
        }
    }
}

/// In a folder that held no model.
#[test]
fn a_first_save_that_stops_between_two_names_keeps_what_it_wrote() {
    for (bytes_max, taken, kept) in
        [(100, CONFIG_FILE, WEIGHTS_FILE), (2, CONFIG_FILE, INDEX_FILE), (2, &shard_name(1, 3), INDEX_FILE)]
    {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        let writer = begin(dir, (NEW, 1), &[2; 3], bytes_max).unwrap();
        fs::remove_file(dir.join(temporary(taken))).unwrap();
        let error = writer.finish().unwrap_err();
        let left = scratch.names();
        assert!(left.contains(&temporary(kept)), "{left:?}");
        assert!(error.to_string().contains("the new files lie in"), "{error}");
        let error = read(dir).unwrap_err();
        assert!(error.message().contains("holds a save that was interrupted"), "{error}");
        write(dir, (NEW, 2), &[2; 3], bytes_max).unwrap();
        assert_eq!(read(dir).unwrap(), (vec![2; 6], NEW.to_string()));
        assert!(scratch.names().iter().all(|name| !name.contains("tmp")), "{:?}", scratch.names());
    }
}

#[test]
fn names_that_fall_together_are_refused_before_anything_is_written() {
    let scratch = Scratch::new();
    let entries = ["a", "same", "same"].map(|name| (name.to_string(), DType::U8, vec![2]));
    for bytes_max in [2, 100] {
        let error = WeightsWriter::create(&scratch.path(""), Some(NEW), &entries, bytes_max).unwrap_err();
        assert_eq!(error.kind(), Kind::Checkpoint);
        assert!(error.message().ends_with("tensor `same` is given twice"), "{error}");
        assert_eq!(error.details()[0].1, "give each tensor of the model a name of its own");
        assert_eq!(scratch.names(), [""; 0]);
    }
}

#[test]
fn files_of_two_saves_are_told_apart() {
    let (one, two) = (Scratch::new(), Scratch::new());
    let (dir, name) = (&one.path(""), shard_name(2, 3));
    write(dir, (OLD, 1), &[2, 2, 2], 2).unwrap();
    write(&two.path(""), (OLD, 2), &[2, 2, 2], 2).unwrap();
    fs::copy(two.path(&name), dir.join(&name)).unwrap();
    let told = |error: Error| error.details()[0].1.clone();
    assert_eq!(told(read(dir).unwrap_err()), format!("{name} is of another save than the index"));
    // Another program's index says nothing of saves.
    let index = fs::read_to_string(dir.join(INDEX_FILE)).unwrap();
    let mut index: serde_json::Value = serde_json::from_str(&index).unwrap();
    for metadata in [json!({"total_size": 6}), json!(null), json!([1]), json!({DIGEST: {"x": "y"}})] {
        index["metadata"] = metadata;
        fs::write(dir.join(INDEX_FILE), index.to_string()).unwrap();
        assert_eq!(read(dir).unwrap().0, [1, 1, 2, 2, 1, 1]);
    }
    // What is saved twice is the same twice.
    write(dir, (OLD, 2), &[2, 2, 2], 2).unwrap();
    for name in one.names() {
        assert_eq!(fs::read(one.path(&name)).unwrap(), fs::read(two.path(&name)).unwrap(), "{name}");
    }
}

#[test]
fn the_files_of_a_step_tell_it_and_one_digest() {
    let save = |bytes_max, byte| {
        let (scratch, entries) = (Scratch::new(), ["a", "b"].map(|n| (n.into(), DType::U8, vec![2])));
        let dir = &scratch.path("");
        let mut writer = WeightsWriter::of_step(dir, None, &entries, bytes_max, 7).unwrap();
        entries.iter().for_each(|(name, ..)| writer.append(name, &[byte; 2]).unwrap());
        let (told, save) = (writer.finish_telling().unwrap(), Weights::open(dir).unwrap().save());
        assert!(told.is_some() && save.digest == told && save.step.as_deref() == Some("7"), "{save:?}");
        told
    };
    for max in [2, 100] {
        assert!(save(max, 1) == save(max, 1) && save(max, 1) != save(max, 2));
    }
}

#[test]
fn links_are_not_replaced() {
    let (blobs, scratch) = (Scratch::new(), Scratch::new());
    let blob = blobs.file("blob", b"shared");
    for name in [WEIGHTS_FILE, INDEX_FILE, CONFIG_FILE] {
        std::os::unix::fs::symlink(&blob, scratch.path(name)).unwrap();
        for bytes_max in [2, 100] {
            let error = write(&scratch.path(""), (NEW, 1), &[2, 2], bytes_max).unwrap_err();
            assert!(error.message().ends_with("it is a link, which is not replaced"), "{error}");
            assert_eq!(scratch.names(), [name]);
        }
        fs::remove_file(scratch.path(name)).unwrap();
    }
    assert_eq!(fs::read(&blob).unwrap(), b"shared");
}
