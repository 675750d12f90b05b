//! Checksums of tensors: a changed byte of the weights, of the optimizer file or of a checksum is refused on every
//! mesh, naming the tensor; files without checksums are loaded.

use crate::bad_files::file;
use crate::checkpoints::{Case, adamw, ends, refused};
use crate::save_and_load::Folder;
use crate::support::{Setup, run};
use shardgrad_nn::checkpoint::{CONFIG_FILE, OPTIMIZER_FILE, TensorFile, WEIGHTS_FILE, Weights};
use shardgrad_tensor::{Kind, Mesh, World};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const MESHES: [&str; 4] = ["", "dp=2", "tp=2", "pp=2"];

/// Saves a checkpoint after one step.
fn save(dir: &Path) {
    ends(Case::new(""), &adamw(), (None, 1, Some(dir)));
}

/// Loads an undamaged checkpoint.
fn load(dir: &Path, mesh: &'static str) {
    ends(Case::new(mesh), &adamw(), (Some(dir), 0, None));
}

/// Returns the byte range of each tensor in a file.
fn payload(path: &Path) -> Vec<(String, [usize; 2])> {
    let header = u64::from_le_bytes(fs::read(path).unwrap()[..8].try_into().unwrap()) as usize;
    let file = TensorFile::open(path).unwrap();
    let place = |at: u64| 8 + header + at as usize;
    file.tensors().iter().map(|t| (t.name.clone(), [place(t.bytes.start), place(t.bytes.end)])).collect()
}

#[test]
fn changed_byte_is_refused_naming_the_tensor() {
    let folder = Folder::new("flipped");
    save(&folder.0);
    for mesh in MESHES {
        load(&folder.0, mesh);
    }
    let mut count = 0;
    for name in [WEIGHTS_FILE, OPTIMIZER_FILE] {
        let path = folder.0.join(name);
        let bytes = fs::read(&path).unwrap();
        for (i, (tensor, [start, end])) in payload(&path).into_iter().enumerate() {
            for (j, at) in [start, (start + end) / 2, end - 1].into_iter().enumerate() {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << ((i + j) % 8);
                fs::write(&path, &flipped).unwrap();
                let mesh = MESHES[(i + j) % MESHES.len()];
                let error = refused(&folder.0, mesh, adamw(), Case::new(mesh));
                let text = format!("{}: tensor `{tensor}` is damaged: its checksum is ", path.display());
                assert!(error.message().starts_with(&text), "{name}, byte {at}: {error}");
                assert_eq!((error.kind(), error.details()[0].0), (Kind::Checkpoint, "help"));
                count += 1;
            }
        }
        fs::write(&path, &bytes).unwrap();
    }
    assert!(count > 200, "{count}");
}

#[test]
fn changed_checksum_is_refused_naming_the_tensor() {
    let folder = Folder::new("flipped-header");
    save(&folder.0);
    for name in [WEIGHTS_FILE, OPTIMIZER_FILE] {
        let path = folder.0.join(name);
        let bytes = fs::read(&path).unwrap();
        let file = TensorFile::open(&path).unwrap();
        for (i, tensor) in file.tensors().iter().enumerate() {
            let entry = format!("\"xxh3.{}\":\"{}\"", tensor.name, file.checksum(&tensor.name).unwrap());
            let start = bytes.windows(entry.len()).position(|part| part == entry.as_bytes()).unwrap();
            // A digit of the checksum, and a letter of the prefix and of the name in its key.
            for at in [start + entry.len() - 2 - i % 16, start + 1 + i % 5, start + 6] {
                let mut flipped = bytes.clone();
                flipped[at] = if flipped[at] == b'1' { b'2' } else { b'1' };
                fs::write(&path, &flipped).unwrap();
                let mesh = MESHES[i % MESHES.len()];
                let error = refused(&folder.0, mesh, adamw(), Case::new(mesh));
                assert_eq!(error.kind(), Kind::Checkpoint);
                let named = error.message().contains(&format!("`{}`", tensor.name)) || at == start + 6;
                assert!(named && error.message().contains("checksum"), "{}: {error}", tensor.name);
            }
        }
        fs::write(&path, &bytes).unwrap();
    }
}

/// Removes the checksums from a file.
fn without_checksums(path: &Path) {
    let bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = std::str::from_utf8(&bytes[8..8 + header]).unwrap();
    let mut entries: BTreeMap<String, serde_json::Value> = serde_json::from_str(text).unwrap();
    entries
        .get_mut("__metadata__")
        .unwrap()
        .as_object_mut()
        .unwrap()
        .retain(|key, _| !key.starts_with("xxh3."));
    fs::write(path, file(&serde_json::to_string(&entries).unwrap(), &bytes[8 + header..])).unwrap();
}

#[test]
fn files_without_checksums_are_loaded_and_counted() {
    let folder = Folder::new("no-checksums");
    save(&folder.0);
    let read = |weights: &Weights| -> Vec<Vec<u8>> {
        weights.tensors().map(|tensor| weights.read(&tensor.name).unwrap()).collect()
    };
    let before = Weights::open(&folder.0).unwrap();
    assert_eq!(before.num_without_checksum(), 0);
    let expected = read(&before);
    [WEIGHTS_FILE, OPTIMIZER_FILE].iter().for_each(|name| without_checksums(&folder.0.join(name)));
    let weights = Weights::open(&folder.0).unwrap();
    assert_eq!(weights.num_without_checksum(), weights.tensors().count());
    assert!(read(&weights) == expected);
    assert!(weights.tensors().all(|tensor| !weights.files()[0].verify(&tensor.name).unwrap()));
    for mesh in MESHES {
        load(&folder.0, mesh);
    }
}

#[test]
fn sharded_files_contain_checksums_of_their_tensors() {
    let folder = Folder::new("checksums-several");
    let setup = Setup::new();
    run("tp=3", |rank| setup.model(rank)?.save_in_files(&folder.0, 3000));
    let weights = Weights::open(&folder.0).unwrap();
    assert!(weights.files().len() > 2 && weights.num_without_checksum() == 0);
    let paths: Vec<PathBuf> = weights.files().iter().map(|file| file.path().to_path_buf()).collect();
    for (i, path) in paths.iter().enumerate() {
        let bytes = fs::read(path).unwrap();
        let (tensor, [start, _]) = payload(path).swap_remove(0);
        let mut flipped = bytes.clone();
        flipped[start + i] ^= 0x10;
        fs::write(path, flipped).unwrap();
        for mesh in ["", "tp=3"] {
            let loaded = World::run(Mesh::parse(mesh).unwrap(), |rank| setup.model(rank)?.load(&folder.0));
            let error = loaded.unwrap_err();
            assert!(error.message().contains(&format!("tensor `{tensor}` is damaged")), "{error}");
        }
        fs::write(path, bytes).unwrap();
    }
    assert!(folder.0.join(CONFIG_FILE).exists());
}
