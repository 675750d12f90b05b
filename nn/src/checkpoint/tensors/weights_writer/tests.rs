//! Model folders that are written and read back; saves that fail, stop or overlap.

use super::super::weights::Weights;
use super::*;
use crate::checkpoint::atomic::disk::scratch::Scratch;
use shardgrad_tensor::{DType, Error, Kind};
use std::fs;

const OLD: &str = "{\"old\": 1}";
const NEW: &str = "{\"new\": 1}";

/// Begins a save of tensors of these sizes, filled with `byte`: all tensors are written, no file is renamed yet.
fn begin(dir: &Path, (config, byte): (&str, u8), sizes: &[usize], bytes_max: u64) -> Result<WeightsWriter> {
    let entry = |(i, n): (usize, &usize)| (format!("t{i}"), DType::U8, vec![*n]);
    let entries: Vec<TensorSpec> = sizes.iter().enumerate().map(entry).collect();
    let mut writer = WeightsWriter::create(dir, Some(config), &entries, bytes_max)?;
    for (name, _, shape) in &entries {
        writer.append(name, &vec![byte; shape[0]])?;
    }
    Ok(writer)
}

fn write(dir: &Path, what: (&str, u8), sizes: &[usize], bytes_max: u64) -> Result<()> {
    begin(dir, what, sizes, bytes_max)?.finish()
}

/// Reads the bytes of all tensors, and the config, of a folder.
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
fn sharded_files_are_filled_in_order_and_read_back() {
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
fn last_save_replaces_all_files_of_earlier_saves() {
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
fn concurrent_saves_into_one_folder_are_serialized() {
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

/// A name that cannot be used stands for a full disk: the last write fails.
#[test]
fn failed_save_keeps_the_old_model() {
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

/// A file that is removed before its rename stops a save there, as a kill would.
#[test]
fn save_stopped_between_renames_leaves_old_model_or_none() {
    let part = |count| shard_name(2, count);
    // Cases: the new files replace another config, files of the same names, or nothing.
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
                assert!(error.to_string().contains("the old model is unchanged"), "{error}");
                assert_eq!(read(dir).unwrap(), (vec![1; 6], OLD.to_string()));
            } else {
                let names = scratch.names();
                assert!(!names.contains(&INDEX_FILE.to_string()), "the index comes last: {names:?}");
                assert!(names.contains(&temporary(INDEX_FILE)) && error.to_string().contains("save again"));
                let error = read(dir).unwrap_err();
                assert_eq!(error.kind(), Kind::Checkpoint);
                assert!(error.message().ends_with("contains a save that was interrupted, or still runs"));
                assert!(error.details()[0].1.starts_with("save again; its files are model"), "{error}");
            }
            write(dir, (what, 3), &[2; 3], 2).unwrap();
            assert_eq!(read(dir).unwrap(), (vec![3; 6], what.to_string()));
            assert_eq!(scratch.names().len(), 5, "nothing is left: {:?}", scratch.names());
        }
    }
}

/// In a folder without a model.
#[test]
fn first_save_stopped_between_renames_keeps_its_files() {
    for (bytes_max, taken, kept_file) in
        [(100, CONFIG_FILE, WEIGHTS_FILE), (2, CONFIG_FILE, INDEX_FILE), (2, &shard_name(1, 3), INDEX_FILE)]
    {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        let writer = begin(dir, (NEW, 1), &[2; 3], bytes_max).unwrap();
        fs::remove_file(dir.join(temporary(taken))).unwrap();
        let error = writer.finish().unwrap_err();
        let names = scratch.names();
        assert!(names.contains(&temporary(kept_file)), "{names:?}");
        assert!(error.to_string().contains("the new files are in"), "{error}");
        let error = read(dir).unwrap_err();
        assert!(error.message().contains("contains a save that was interrupted"), "{error}");
        write(dir, (NEW, 2), &[2; 3], bytes_max).unwrap();
        assert_eq!(read(dir).unwrap(), (vec![2; 6], NEW.to_string()));
        assert!(scratch.names().iter().all(|name| !name.contains("tmp")), "{:?}", scratch.names());
    }
}

#[test]
fn duplicate_tensor_names_are_refused_before_writing() {
    let scratch = Scratch::new();
    let entries = ["a", "same", "same"].map(|name| (name.to_string(), DType::U8, vec![2]));
    for bytes_max in [2, 100] {
        let error = WeightsWriter::create(&scratch.path(""), Some(NEW), &entries, bytes_max).unwrap_err();
        assert_eq!(error.kind(), Kind::Checkpoint);
        assert!(error.message().ends_with("tensor `same` is given twice"), "{error}");
        assert_eq!(error.details()[0].1, "give each tensor a unique name");
        assert_eq!(scratch.names(), [""; 0]);
    }
}

#[test]
fn files_of_different_saves_are_detected() {
    let (one, two) = (Scratch::new(), Scratch::new());
    let (dir, name) = (&one.path(""), shard_name(2, 3));
    write(dir, (OLD, 1), &[2, 2, 2], 2).unwrap();
    write(&two.path(""), (OLD, 2), &[2, 2, 2], 2).unwrap();
    fs::copy(two.path(&name), dir.join(&name)).unwrap();
    let first_detail = |error: Error| error.details()[0].1.clone();
    assert_eq!(first_detail(read(dir).unwrap_err()), format!("{name} is of another save than the index"));
    // The index of another program has no digests.
    let index = fs::read_to_string(dir.join(INDEX_FILE)).unwrap();
    let mut index: serde_json::Value = serde_json::from_str(&index).unwrap();
    for metadata in [json!({"total_size": 6}), json!(null), json!([1]), json!({DIGEST: {"x": "y"}})] {
        index["metadata"] = metadata;
        fs::write(dir.join(INDEX_FILE), index.to_string()).unwrap();
        assert_eq!(read(dir).unwrap().0, [1, 1, 2, 2, 1, 1]);
    }
    // Two saves of equal tensors are identical.
    write(dir, (OLD, 2), &[2, 2, 2], 2).unwrap();
    for name in one.names() {
        assert_eq!(fs::read(one.path(&name)).unwrap(), fs::read(two.path(&name)).unwrap(), "{name}");
    }
}

#[test]
fn files_contain_step_and_digest() {
    let save = |bytes_max, byte| {
        let (scratch, entries) = (Scratch::new(), ["a", "b"].map(|n| (n.into(), DType::U8, vec![2])));
        let dir = &scratch.path("");
        let mut writer = WeightsWriter::begin(dir, None, &entries, bytes_max, Some(7)).unwrap();
        entries.iter().for_each(|(name, ..)| writer.append(name, &[byte; 2]).unwrap());
        let (digest, save) = (writer.finish_with_digest().unwrap(), Weights::open(dir).unwrap().save_id());
        assert!(digest.is_some() && save.digest == digest && save.step.as_deref() == Some("7"), "{save:?}");
        digest
    };
    for max in [2, 100] {
        assert!(save(max, 1) == save(max, 1) && save(max, 1) != save(max, 2));
    }
}

#[test]
fn symlinks_are_not_replaced() {
    let (blobs, scratch) = (Scratch::new(), Scratch::new());
    let blob = blobs.file("blob", b"shared");
    for name in [WEIGHTS_FILE, INDEX_FILE, CONFIG_FILE] {
        std::os::unix::fs::symlink(&blob, scratch.path(name)).unwrap();
        for bytes_max in [2, 100] {
            let error = write(&scratch.path(""), (NEW, 1), &[2, 2], bytes_max).unwrap_err();
            assert!(error.message().ends_with("it is a symlink, and saving does not replace it"), "{error}");
            assert_eq!(scratch.names(), [name]);
        }
        fs::remove_file(scratch.path(name)).unwrap();
    }
    assert_eq!(fs::read(&blob).unwrap(), b"shared");
}
