//! Damaged or malicious model folders: each kind of defect is an error that names the reason, before anything of the claimed size is
//! allocated.

use crate::save_and_load::Folder;
use crate::support::Setup;
use proptest::prelude::*;
use shardgrad_nn::checkpoint::safetensors_header::{DIMS_MAX, HEADER_BYTES_MAX, TENSORS_MAX, parse};
use shardgrad_nn::checkpoint::{INDEX_FILE, TensorFile, WEIGHTS_FILE, Weights};
use shardgrad_tensor::{Error, Kind, Mesh, World};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// A safetensors file of this header and payload, with the correct length field.
pub(crate) fn file(header: &str, payload: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), payload].concat()
}

/// A header of consecutive U8 tensors.
fn header(tensors: &[(&str, usize)]) -> String {
    let mut at = 0;
    let entries: Vec<String> = tensors
        .iter()
        .map(|(name, n)| {
            at += n;
            let start = at - n;
            format!(r#""{name}":{{"dtype":"U8","shape":[{n}],"data_offsets":[{start},{at}]}}"#)
        })
        .collect();
    format!("{{{}}}", entries.join(","))
}

/// A folder with these files.
fn folder(name: &str, files: &[(&str, Vec<u8>)]) -> Folder {
    let dir = Folder::new(name);
    fs::create_dir_all(&dir.0).unwrap();
    files.iter().for_each(|(name, bytes)| fs::write(dir.0.join(name), bytes).unwrap());
    dir
}

fn checkpoint_error<T: std::fmt::Debug>(result: Result<T, Error>) -> Error {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), Kind::Checkpoint, "{error}");
    error
}

/// The error message of opening a file.
fn message(name: &str, bytes: &[u8]) -> String {
    let dir = folder(name, &[(WEIGHTS_FILE, bytes.to_vec())]);
    checkpoint_error(Weights::open(&dir.0)).message().rsplit_once(".safetensors: ").unwrap().1.to_string()
}

/// The error details of opening a folder, one line each.
fn details_of(dir: &Folder) -> Vec<String> {
    let error = checkpoint_error(Weights::open(&dir.0));
    error.details().iter().map(|(label, text)| format!("{label}: {text}")).collect()
}

fn index(entries: &[(&str, &str)]) -> Vec<u8> {
    let map: Vec<String> = entries.iter().map(|(tensor, file)| format!("{tensor:?}: {file:?}")).collect();
    format!("{{\"weight_map\": {{{}}}}}", map.join(", ")).into_bytes()
}

#[test]
fn a_header_length_beyond_the_file_or_the_limit_is_an_error_before_allocation() {
    let claim = |n: u64| [&n.to_le_bytes()[..], b"{}"].concat();
    for n in [3, 1 << 20, HEADER_BYTES_MAX, HEADER_BYTES_MAX + 1, 1 << 40, i64::MAX as u64, u64::MAX] {
        assert_eq!(
            message("length", &claim(n)),
            format!("the header length is {n} bytes, but the file has 10 bytes")
        );
    }
    for n in [0, 1] {
        assert!(!message("length", &claim(n)).is_empty(), "a header has at least two bytes");
    }
    // A sparse file as large as it claims: the limit applies.
    let dir = folder("sparse", &[(WEIGHTS_FILE, (HEADER_BYTES_MAX + 1).to_le_bytes().to_vec())]);
    fs::OpenOptions::new().write(true).open(dir.0.join(WEIGHTS_FILE)).unwrap().set_len(1 << 41).unwrap();
    assert!(
        checkpoint_error(Weights::open(&dir.0)).message().contains("the header length is 100000001 bytes")
    );
}

#[test]
fn a_header_that_is_not_utf8_not_json_or_has_trailing_text_is_an_error() {
    for (header, payload, why) in [
        ("\u{fffd}", 0, "does not start with `{`"),
        ("[]", 0, "does not start with `{`"),
        (" {}", 0, "does not start with `{`"),
        ("{", 0, "cannot be read"),
        ("{}x", 0, "trailing characters"),
        ("{}{}", 0, "trailing characters"),
        ("{\"a\":1}", 0, "cannot be read"),
        ("{}", 1, "but 1 bytes follow the header"),
    ] {
        let found = message("text", &file(header, &vec![0; payload]));
        assert!(found.contains(why), "{header}: {found}");
    }
    let bytes = [&3u64.to_le_bytes()[..], b"{\xff}"].concat();
    assert_eq!(message("utf8", &bytes), "the header is not UTF-8 at byte 9");
}

#[test]
fn deep_nesting_and_huge_numbers_are_errors() {
    let with = |shape: &str, offsets: &str| {
        file(&format!(r#"{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#), &[0])
    };
    assert!(Weights::open(&folder("good", &[(WEIGHTS_FILE, with("[1]", "[0,1]"))]).0).is_ok());
    let huge = format!("[{}]", "9".repeat(400));
    let deep = "[".repeat(1_000_000);
    for bad in ["[1.0]", "[-1]", "[\"1\"]", "[null]", "[[1]]", "[1e0]", "{}", "1", &huge, &deep] {
        assert!(message("numbers", &with(bad, "[0,1]")).contains("cannot be read"), "{:.40}", bad);
    }
    for bad in ["[0]", "[0,1,2]", "[0,1.0]", "[\"0\",1]", "[-0.5,1]", &deep] {
        assert!(message("numbers", &with("[1]", bad)).contains("cannot be read"), "{:.40}", bad);
    }
    assert!(
        message("numbers", &with("[1]", &format!("[0,{}]", u64::MAX))).contains("takes 1 bytes, not 0..")
    );
}

#[test]
fn duplicate_keys_and_invalid_tensor_names_are_errors() {
    let entry = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let pair =
        |a: &str, b: &str| message("keys", &file(&format!("{{\"{a}\":{entry},\"{b}\":{entry}}}"), &[]));
    assert!(pair("a", "a").contains("`a` occurs twice"));
    assert!(pair("a", "\\u0061").contains("`a` occurs twice"), "however it is written");
    for bad in ["", "\\u0000", "a\\u0000b", "a\\nb", "\\u0085", &"x".repeat(1025)] {
        assert!(pair("a", bad).contains("is not a valid tensor name"), "{bad:?}");
    }
    let metadata = r#"{"__metadata__":{"x":"1"},"__metadata__":{"x":"1"}}"#;
    assert!(message("keys", &file(metadata, &[])).contains("`__metadata__` occurs twice"));
    assert!(
        message("keys", &file(r#"{"__metadata__":{"x":"1","x":"2"}}"#, &[])).contains("key `x` occurs twice")
    );
    let twice = entry.replacen('{', "{\"dtype\":\"U8\",", 1);
    assert!(message("keys", &file(&format!("{{\"a\":{twice}}}"), &[])).contains("duplicate field"));
}

/// Sizes of consecutive tensors, some of which may be empty.
fn layouts() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(0usize..9, 1..6)
}

/// A header of tensors at given byte ranges.
fn at_places(places: &[[i64; 2]]) -> String {
    let entry = |(i, [start, end]): (usize, &[i64; 2])| {
        let n = end - start;
        format!(r#""t{i}":{{"dtype":"U8","shape":[{n}],"data_offsets":[{start},{end}]}}"#)
    };
    format!("{{{}}}", places.iter().enumerate().map(entry).collect::<Vec<_>>().join(","))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tensors_that_overlap_or_leave_a_gap_or_leave_the_file_are_errors(
        sizes in layouts(), which in 0usize..6, by in prop_oneof![-3i64..0, 1i64..4], order in any::<u64>(),
    ) {
        let mut at = 0;
        let mut places: Vec<[i64; 2]> = sizes.iter().map(|n| { at += *n as i64; [at - *n as i64, at] }).collect();
        let total = at as u64;
        let read = |places: &[[i64; 2]], payload| parse(Path::new("m"), at_places(places).as_bytes(), payload);
        // In any order in the text, as long as the ranges cover the payload.
        let count = places.len();
        places.rotate_left(order as usize % count);
        prop_assert!(read(&places, total).is_ok());
        prop_assert!(read(&places, total + 1).is_err());
        prop_assert!(total == 0 || read(&places, total - 1).is_err());
        // A moved tensor overlaps another, or leaves a gap or the file; an empty one must be between two.
        let which = which % count;
        let [start, end] = places[which];
        let moved = [start + by, end + by];
        let between = start == end && (moved[0] == 0 || places.iter().any(|p| p[1] == moved[0]));
        if moved[0] >= 0 && !between {
            let mut bad = places.clone();
            bad[which] = moved;
            prop_assert!(read(&bad, total).is_err(), "{bad:?}");
        }
        // A longer or shorter tensor overlaps or leaves a gap.
        if end + by >= start {
            let mut bad = places.clone();
            bad[which] = [start, end + by];
            prop_assert!(read(&bad, total).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_shape_that_does_not_match_its_bytes_is_an_error(
        shape in proptest::collection::vec(prop_oneof![0u64..5, Just(1 << 32), Just(u64::MAX)], 0..DIMS_MAX + 3),
        length in 0u64..200,
    ) {
        let text = format!(r#"{{"a":{{"dtype":"F32","shape":{shape:?},"data_offsets":[0,{length}]}}}}"#);
        let found = parse(Path::new("m"), text.as_bytes(), length);
        // The nonzero extents must not overflow, even if a zero makes the tensor empty.
        let product = shape.iter().filter(|d| **d > 0).fold(4u128, |n, d| n.saturating_mul(u128::from(*d)));
        let bytes = if shape.contains(&0) { 0 } else { product };
        let fits = shape.len() <= DIMS_MAX && product <= i64::MAX as u128 && bytes == u128::from(length);
        prop_assert_eq!(found.is_ok(), fits, "{}", text);
    }
}

#[test]
fn unsupported_dtypes_are_named() {
    for dtype in ["I32", "F4", "F8_E4M3", "U16", "C64", "f32", "", "F32 "] {
        let text = format!(r#"{{"a":{{"dtype":{dtype:?},"shape":[0],"data_offsets":[0,0]}}}}"#);
        let dir = folder("dtypes", &[(WEIGHTS_FILE, file(&text, &[]))]);
        let error = checkpoint_error(Weights::open(&dir.0));
        assert!(error.message().ends_with(&format!("the unsupported dtype {dtype:?}")), "{error}");
        assert_eq!(error.details()[0].1, "supported dtypes: F64, F32, BF16, F16, I64, U8, BOOL");
    }
}

#[test]
fn all_mismatches_with_the_model_are_reported_at_once() {
    let setup = Setup::new();
    let dir = Folder::new("misfits");
    crate::support::run("", |rank| setup.model(rank)?.save(&dir.0));
    let path = dir.0.join(WEIGHTS_FILE);
    let bytes = fs::read(&path).unwrap();
    // Integers of the same number of bytes, a transposed matrix, and a renamed tensor.
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
    let mut entries: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
    // A program that changes tensors drops their checksums.
    entries["__metadata__"].as_object_mut().unwrap().retain(|key, _| !key.starts_with("xxh3."));
    let mut names: Vec<String> = entries.keys().filter(|n| *n != "__metadata__").cloned().collect();
    names.sort();
    let [transposed, integers, renamed] = ["mlp.c_fc.weight", "wpe.weight", "ln_f.bias"]
        .map(|end| names.iter().find(|name| name.ends_with(end)).unwrap().clone());
    entries[&transposed]["shape"].as_array_mut().unwrap().reverse();
    entries[&integers]["dtype"] = "I64".into();
    let offsets = entries[&integers]["data_offsets"].clone();
    entries[&integers]["shape"] =
        vec![(offsets[1].as_u64().unwrap() - offsets[0].as_u64().unwrap()) / 8].into();
    let moved = entries.remove(&renamed).unwrap();
    entries.insert("extra".to_string(), moved);
    fs::write(&path, file(&serde_json::to_string(&entries).unwrap(), &bytes[8 + length..])).unwrap();
    let error = World::run(Mesh::single(), |rank| {
        let model = setup.model(rank)?;
        let before = model.param("wte.weight")?.tensor().to_f64()?;
        let error = checkpoint_error(model.load(&dir.0));
        assert_eq!(model.param("wte.weight")?.tensor().to_f64()?, before, "nothing was changed");
        Err::<(), _>(error)
    })
    .unwrap_err();
    assert!(error.message().ends_with("4 tensor(s) do not fit the model"), "{error}");
    let of = |label: &str| &error.details().iter().find(|(found, _)| *found == label).unwrap().1;
    assert_eq!((of("missing"), of("unknown")), (&renamed, &"extra".to_string()));
    assert!(of("unlike").contains(&transposed) && of("unlike").contains(&integers), "{error}");
    assert!(of("unlike").contains("is i64["), "{error}");
}

#[test]
fn an_index_can_only_name_files_of_its_folder() {
    let good = file(&header(&[("a", 2)]), &[1, 2]);
    for name in
        ["../x", "/etc/passwd", "..", ".", "", "a/b", "./1.safetensors", "1.safetensors/", "a\\b", "\\\\s\\x"]
    {
        let dir = folder("astray", &[("1.safetensors", good.clone()), (INDEX_FILE, index(&[("a", name)]))]);
        assert_eq!(details_of(&dir), [format!("name: {name:?} is not a plain file name")]);
    }
    let zero = br#"{"weight_map": {"a": "1.safetensors\u0000"}}"#;
    let dir = folder("astray", &[(INDEX_FILE, zero.to_vec())]);
    assert!(details_of(&dir)[0].ends_with("is not a plain file name"));
    let twice = br#"{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}"#;
    let dir = folder("astray", &[(INDEX_FILE, twice.to_vec())]);
    assert!(checkpoint_error(Weights::open(&dir.0)).message().contains("key `a` occurs twice"));
    for text in ["{}", "[]", "", "{\"weight_map\": []}", "{\"weight_map\": {\"a\": 1}}"] {
        let dir = folder("astray", &[(INDEX_FILE, text.into())]);
        assert!(
            checkpoint_error(Weights::open(&dir.0)).message().contains("cannot be parsed as an index"),
            "{text}"
        );
    }
}

#[test]
fn folders_and_devices_are_not_opened() {
    let dir = folder("special", &[(INDEX_FILE, index(&[("a", "sub"), ("b", "null"), ("c", "none")]))]);
    fs::create_dir(dir.0.join("sub")).unwrap();
    symlink("/dev/zero", dir.0.join("null")).unwrap();
    let found = details_of(&dir);
    assert!(found[0].ends_with("none: no such file"), "{found:?}");
    assert!(found[1].ends_with("null: is a symlink out of its folder, which is not followed"), "{found:?}");
    assert!(found[2].ends_with("sub: is a folder, not a file"), "{found:?}");
    assert_eq!(found.len(), 3);
}

#[test]
fn symlinks_are_followed_within_the_folder_and_the_hugging_face_cache_only() {
    let good = file(&header(&[("a", 2)]), &[1, 2]);
    let outside = folder("outside", &[("m", good.clone())]);
    let dir = folder("links", &[("real", good.clone())]);
    let link = dir.0.join(WEIGHTS_FILE);
    symlink(outside.0.join("m"), &link).unwrap();
    let error = checkpoint_error(Weights::open(&dir.0));
    assert!(error.message().ends_with("is a symlink out of its folder, which is not followed"));
    fs::remove_file(&link).unwrap();
    symlink("real", &link).unwrap();
    assert_eq!(Weights::open(&dir.0).unwrap().read("a").unwrap(), [1, 2]);
    assert!(TensorFile::open_within(&dir.0, "real").is_ok());
    fs::remove_file(&link).unwrap();
    symlink("gone", &link).unwrap();
    assert!(checkpoint_error(Weights::open(&dir.0)).message().ends_with("no such file"));
    // models--x/snapshots/1/model.safetensors -> ../../blobs/2
    let cache = folder("cache", &[]);
    let snapshot = cache.0.join("snapshots/1");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(cache.0.join("blobs")).unwrap();
    fs::write(cache.0.join("blobs/2"), &good).unwrap();
    symlink("../../blobs/2", snapshot.join(WEIGHTS_FILE)).unwrap();
    assert_eq!(Weights::open(&snapshot).unwrap().read("a").unwrap(), [1, 2]);
    // The folder itself may be a symlink, because the user named it.
    let alias = outside.0.join("alias");
    symlink(&snapshot, &alias).unwrap();
    assert!(Weights::open(&alias).is_ok());
}

#[test]
fn all_differences_between_index_and_files_are_reported() {
    let one = file(&header(&[("a", 2), ("extra", 1)]), &[1, 2, 3]);
    let two = file(&header(&[("b", 1), ("c", 1)]), &[4, 5]);
    let map = index(&[
        ("a", "1.safetensors"),
        ("b", "1.safetensors"),
        ("c", "2.safetensors"),
        ("d", "2.safetensors"),
        ("e", "3.safetensors"),
        ("f", "../4"),
    ]);
    let dir = folder("matrix", &[("1.safetensors", one), ("2.safetensors", two), (INDEX_FILE, map)]);
    let third = dir.0.join("3.safetensors").display().to_string();
    assert_eq!(
        details_of(&dir),
        [
            "name: \"../4\" is not a plain file name".to_string(),
            format!("file: {third}: no such file"),
            "unknown: `extra` of 1.safetensors is not in the index".to_string(),
            "elsewhere: `b` is in 2.safetensors, but the index says \"1.safetensors\"".to_string(),
            "missing: `b` is not in 1.safetensors".to_string(),
            "missing: `d` is not in 2.safetensors".to_string(),
        ]
    );
}

#[test]
fn tensors_cannot_claim_more_bytes_than_the_file_has() {
    // The tensors together have as many bytes as the file: there is no decompression.
    let bytes = file(&header(&[("a", 1000), ("b", 24)]), &[7; 1024]);
    let dir = folder("bomb", &[(WEIGHTS_FILE, bytes.clone())]);
    let weights = Weights::open(&dir.0).unwrap();
    let sum: u64 = weights.tensors().map(|t| t.bytes.end - t.bytes.start).sum();
    assert!(sum <= bytes.len() as u64);
    let claim = r#"{"a":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}}"#;
    assert!(message("bomb", &file(claim, &[0])).ends_with("but 1 bytes follow the header"));
    let same = r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#;
    assert!(message("bomb", &file(same, &[0; 8])).contains("overlaps"), "two tensors of the same bytes");
}

#[test]
fn too_many_tensors_are_an_error_before_the_whole_header_is_parsed() {
    let names: Vec<String> = (0..=TENSORS_MAX).map(|i| format!("t{i}")).collect();
    let tensors: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let most = header(&tensors[..TENSORS_MAX]);
    assert_eq!(
        parse(Path::new("m"), most.as_bytes(), TENSORS_MAX as u64).unwrap().tensors.len(),
        TENSORS_MAX
    );
    // A header of the largest size: parsing stops at the first tensor beyond the limit.
    let mut long = header(&tensors);
    long.pop();
    long += &" ".repeat(HEADER_BYTES_MAX as usize - long.len());
    let error = checkpoint_error(parse(Path::new("m"), long.as_bytes(), 0));
    assert!(error.message().contains("there are more than 262144 tensors"), "{error}");
}
