//! Safetensors files written and read back, here and by the reference library.

use super::*;
use crate::checkpoint::atomic::disk::scratch::Scratch;
use safetensors::tensor::{Dtype, TensorView};
use shardgrad_tensor::{DType, Kind};
use std::fs;

fn refused(path: &Path) -> String {
    let error = TensorFile::open(path).unwrap_err();
    assert_eq!(error.kind(), Kind::Checkpoint);
    error.message().replace(&format!("{}: ", path.display()), "")
}

fn two() -> Vec<TensorSpec> {
    vec![
        ("none".to_string(), DType::F32, vec![0, 3]),
        ("w".to_string(), DType::F32, vec![2, 2]),
        ("void".to_string(), DType::F32, vec![0]),
        ("ids".to_string(), DType::I64, vec![1]),
    ]
}

fn write_two(path: &Path) {
    let mut writer = TensorWriter::create(path, &two()).unwrap();
    for x in [1.0f32, 2.0, 3.0, 4.0] {
        assert_eq!(writer.expected().unwrap().name, "w");
        writer.append("w", &x.to_le_bytes()).unwrap();
    }
    writer.append("ids", &7i64.to_le_bytes()).unwrap();
    assert_eq!(writer.expected(), None);
    writer.finish().unwrap();
}

#[test]
fn written_file_is_read_back_here_and_by_reference_library() {
    let dir = Scratch::new();
    let path = dir.path("model.safetensors");
    write_two(&path);
    let file = TensorFile::open(&path).unwrap();
    assert_eq!(file.tensors().len(), 4);
    assert_eq!(file.metadata()["format"], "pt");
    assert_eq!(file.read("ids").unwrap(), 7i64.to_le_bytes());
    assert_eq!(file.read("none").unwrap(), [0u8; 0]);
    let mut row = [0; 8];
    file.read_at("w", 8, &mut row).unwrap();
    assert_eq!(row, [0, 0, 64, 64, 0, 0, 128, 64]);
    let bytes = fs::read(&path).unwrap();
    let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(reference.tensor("w").unwrap().shape(), [2, 2]);
    assert_eq!(reference.tensor("w").unwrap().data(), file.read("w").unwrap());
    assert_eq!(dir.names(), ["model.safetensors"]);
}

#[test]
fn file_of_reference_library_is_read() {
    let dir = Scratch::new();
    let path = dir.path("theirs.safetensors");
    let data: Vec<u8> = (0..24).collect();
    let view = |dtype, shape: &[usize], n| TensorView::new(dtype, shape.to_vec(), &data[..n]).unwrap();
    let tensors = [
        ("a", view(Dtype::F32, &[2, 3], 24)),
        ("b", view(Dtype::BF16, &[5], 10)),
        ("c", view(Dtype::BOOL, &[3], 3)),
        ("d", view(Dtype::F64, &[], 8)),
        ("e", view(Dtype::F16, &[2, 0], 0)),
    ];
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    let file = TensorFile::open(&path).unwrap();
    let dtypes = [DType::F32, DType::BF16, DType::Bool, DType::F64, DType::F16];
    for ((name, n), dtype) in [("a", 24), ("b", 10), ("c", 3), ("d", 8), ("e", 0)].into_iter().zip(dtypes) {
        assert_eq!(file.find(name).unwrap().dtype, dtype);
        assert_eq!(file.read(name).unwrap(), data[..n]);
    }
}

#[test]
fn malformed_files_are_refused_with_a_reason() {
    let dir = Scratch::new();
    assert_eq!(refused(&dir.path("absent")), "no such file");
    assert_eq!(refused(&dir.path("")), "is a folder, not a file");
    assert_eq!(refused(Path::new("/dev/zero")), "is a pipe or a device, not a file");
    assert_eq!(refused(&dir.file("empty", b"")), "has 0 bytes, too few for a safetensors file");
    let long = dir.file("long", &[&u64::MAX.to_le_bytes()[..], b"{}"].concat());
    assert_eq!(refused(&long), format!("the header length is {} bytes, but the file has 10 bytes", u64::MAX));
    let long = dir.file("long", &[&3u64.to_le_bytes()[..], b"{}"].concat());
    assert_eq!(refused(&long), "the header length is 3 bytes, but the file has 10 bytes");
    let huge = dir.path("huge");
    let sparse = File::create(&huge).unwrap();
    sparse.set_len(1 << 40).unwrap();
    sparse.write_all_at(&(HEADER_BYTES_MAX + 1).to_le_bytes(), 0).unwrap();
    assert!(refused(&huge).starts_with("the header length is 100000001 bytes"));
    let text = dir.file("text", b"{\"model_type\": \"gpt2\"}");
    assert!(refused(&text).ends_with("bytes, but the file has 22 bytes"));
}

#[test]
fn truncated_file_is_refused() {
    let dir = Scratch::new();
    let path = dir.path("model.safetensors");
    write_two(&path);
    let bytes = fs::read(&path).unwrap();
    for n in 0..bytes.len() {
        refused(&dir.file("cut", &bytes[..n]));
    }
    refused(&dir.file("more", &[&bytes[..], &[0]].concat()));
}

#[test]
fn file_that_shrinks_while_open_is_an_error() {
    let dir = Scratch::new();
    let path = dir.path("model.safetensors");
    write_two(&path);
    let file = TensorFile::open(&path).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    let error = file.read("ids").unwrap_err();
    assert!(error.message().ends_with("the file shrank while it was read"), "{error}");
}

#[test]
fn read_beyond_tensor_is_refused() {
    let dir = Scratch::new();
    let path = dir.path("m");
    write_two(&path);
    let file = TensorFile::open(&path).unwrap();
    let error = file.read_at("w", 12, &mut [0; 8]).unwrap_err();
    assert!(
        error.message().ends_with("tensor `w` has 16 bytes: cannot read 8 bytes from byte 12 on"),
        "{error}"
    );
    assert!(file.read_at("w", u64::MAX, &mut [0; 8]).is_err());
    let error = file.read("v").unwrap_err();
    assert!(error.message().ends_with("there is no tensor `v`"));
    assert_eq!(error.details()[0].1, "the file contains 4 tensors: none, w, void, ...");
}

#[test]
fn misordered_or_missing_bytes_are_refused_and_old_file_stays() {
    let dir = Scratch::new();
    let path = dir.file("m", b"old");
    let error_text =
        |error: shardgrad_tensor::Error| error.message().rsplit_once(": ").unwrap().1.to_string();
    let mut writer = TensorWriter::create(&path, &two()).unwrap();
    assert_eq!(
        error_text(writer.append("ids", &[0; 8]).unwrap_err()),
        "got 8 bytes of `ids`, expected 16 bytes of `w`"
    );
    assert_eq!(
        error_text(writer.append("w", &[0; 17]).unwrap_err()),
        "got 17 bytes of `w`, expected 16 bytes of `w`"
    );
    writer.append("w", &[0; 10]).unwrap();
    assert_eq!(error_text(writer.finish().unwrap_err()), "6 bytes of `w` are missing");
    assert_eq!(fs::read(&path).unwrap(), b"old");
    let mut writer = TensorWriter::create(&path, &[]).unwrap();
    assert_eq!(error_text(writer.append("w", &[0]).unwrap_err()), "got 1 bytes of `w`, expected no more");
    writer.finish().unwrap();
    assert!(TensorFile::open(&path).unwrap().tensors().is_empty());
    drop(TensorWriter::create(&path, &two()).unwrap());
    assert_eq!(dir.names(), ["m"]);
    let error = TensorWriter::create(&dir.path("no/where"), &two()).unwrap_err();
    assert_eq!(error.kind(), Kind::Io);
    assert!(error.message().ends_with("its folder does not exist"), "{error}");
}
