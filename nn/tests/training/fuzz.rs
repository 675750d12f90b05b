//! Fuzzing of model folders: whatever the files contain, the reader ends soon, with a model or with an error of the
//! right kind, and allocates no more memory than the files have bytes.

use crate::bad_files::file;
use crate::save_and_load::Folder;
use shardgrad_nn::ModelConfig;
use shardgrad_nn::checkpoint::safetensors_header::parse;
use shardgrad_nn::checkpoint::{CONFIG_FILE, INDEX_FILE, Weights};
use shardgrad_tensor::{Kind, Result};
use std::fs;
use std::path::Path;

/// Deterministic random numbers (SplitMix64): Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators", 2014.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Text inserted as damage: words of the formats, and numbers at the limits.
const WORDS: [&str; 36] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\u0000",
    "\\",
    "null",
    "true",
    "-1",
    "0",
    "1e400",
    "0.5",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "99999999999999999999999",
    "\"__metadata__\":{}",
    "\"dtype\"",
    "\"F32\"",
    "\"BOOL\"",
    "\"shape\"",
    "\"data_offsets\"",
    "[0,0]",
    "[[[[[[[[",
    "../",
    "/dev/zero",
    "weight_map",
    "llama",
    "gpt2",
    "\"sliding_window\":0,",
    "\"n_embd\":0,",
    "\u{feff}",
    "\u{0}",
];

/// Changes a text at some random places.
fn damaged(text: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = text.to_vec();
    for _ in 0..1 + numbers.below(4) {
        let at = numbers.below(bytes.len() + 1);
        let end = (at + 1 + numbers.below(12)).min(bytes.len());
        match numbers.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << numbers.below(8),
            1 if at < bytes.len() => bytes[at] = numbers.next() as u8,
            2 => drop(bytes.drain(at.min(end)..end)),
            3 => bytes.truncate(at),
            4 => {
                let part = bytes[at.min(end)..end].to_vec();
                let to = numbers.below(bytes.len() + 1);
                bytes.splice(to..to, part);
            }
            5 => {
                // Change a number.
                let digits = |b: &u8| b.is_ascii_digit();
                if let Some(first) = bytes[at..].iter().position(digits).map(|i| at + i) {
                    let last =
                        bytes[first..].iter().position(|b| !digits(b)).map_or(bytes.len(), |i| first + i);
                    let other = [0, 1, 7, 255, 1 << 32, u64::MAX / 8, u64::MAX][numbers.below(7)].to_string();
                    bytes.splice(first..last, other.into_bytes());
                }
            }
            _ => {
                let word = WORDS[numbers.below(WORDS.len())].bytes();
                bytes.splice(at..at, word);
            }
        }
    }
    bytes
}

/// Number of cases: from the environment, or else `usual`.
fn cases(usual: u64) -> u64 {
    std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

/// Panics on a kind of error that a bad file must not cause; returns whether the file was accepted.
fn check_result<T>(result: Result<T>, bytes: &[u8]) -> bool {
    if let Err(error) = &result {
        let shown = String::from_utf8_lossy(bytes);
        assert_eq!(error.kind(), Kind::Checkpoint, "{error} of {shown}");
        assert!(error.message().len() < 20_000, "{error}");
    }
    result.is_ok()
}

const HEADER: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]},
    "a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"e":{"dtype":"I64","shape":[0,5],"data_offsets":[24,24]}}  "#;

/// Peak memory of this process, in KiB.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

#[test]
fn damaged_headers_are_refused_or_parsed() {
    let (mut accepted, count) = (0, cases(40_000));
    for seed in 0..count {
        let text = damaged(HEADER.as_bytes(), &mut Numbers(seed));
        let read = parse(Path::new("m"), &text, 30);
        if let Ok(header) = &read {
            let mut end = 0;
            for tensor in &header.tensors {
                assert_eq!(tensor.bytes.start, end, "tensors of an accepted header cover the file once");
                end = tensor.bytes.end;
            }
            assert_eq!(end, 30);
        }
        accepted += u64::from(check_result(read, &text));
    }
    assert!(accepted > 0 && accepted < count, "{accepted} of {count}: damage of both kinds");
}

#[test]
fn damaged_configs_are_refused_or_parsed() {
    let presets: Vec<String> =
        ModelConfig::preset_names().map(|name| ModelConfig::preset(name).unwrap().to_json()).collect();
    let (mut accepted, count) = (0, cases(20_000));
    for seed in 0..count {
        let text = damaged(presets[seed as usize % presets.len()].as_bytes(), &mut Numbers(seed));
        let Ok(text) = String::from_utf8(text) else { continue };
        let read = ModelConfig::parse(Path::new("c"), &text);
        if let Ok(config) = &read {
            let again = ModelConfig::parse(Path::new("c"), &config.to_json()).unwrap();
            assert_eq!(again.max_positions(), config.max_positions(), "an accepted config can be written");
        }
        accepted += u64::from(check_result(read, text.as_bytes()));
    }
    assert!(accepted > 0 && accepted < count, "{accepted} of {count}: damage of both kinds");
}

#[test]
fn damaged_folders_are_refused_or_loaded() {
    let dir = Folder::new("fuzz");
    fs::create_dir_all(&dir.0).unwrap();
    let part = |name: &str, n: u8| {
        file(
            &format!(r#"{{"{name}":{{"dtype":"U8","shape":[{n}],"data_offsets":[0,{n}]}}}}"#),
            &vec![n; n.into()],
        )
    };
    let index =
        br#"{"metadata":{"total_size":8},"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#.to_vec();
    let undamaged = [("1.safetensors", part("a", 5)), ("2.safetensors", part("b", 3)), (INDEX_FILE, index)];
    let before = peak_kib();
    let (mut accepted, count) = (0, cases(1_500));
    for seed in 0..count {
        let mut numbers = Numbers(seed);
        let damaged_file = numbers.below(3);
        for (i, (name, bytes)) in undamaged.iter().enumerate() {
            let bytes = if i == damaged_file { damaged(bytes, &mut numbers) } else { bytes.clone() };
            fs::write(dir.0.join(name), bytes).unwrap();
        }
        let opened = Weights::open(&dir.0);
        if let Ok(weights) = &opened {
            for tensor in weights.tensors() {
                assert_eq!(
                    weights.read(&tensor.name).unwrap().len() as u64,
                    tensor.bytes.end - tensor.bytes.start
                );
            }
        }
        accepted += u64::from(check_result(opened, undamaged[damaged_file].0.as_bytes()));
    }
    assert!(accepted > 0 && accepted < count, "{accepted} of {count}: damage of both kinds");
    // Other tests run concurrently; believing a claimed length would take far more.
    let grown = peak_kib() - before;
    assert!(grown < 1 << 20, "{grown} KiB for files of a hundred bytes");
}

#[test]
fn error_names_the_damaged_config_file() {
    let dir = Folder::new("fuzz-config");
    fs::create_dir_all(&dir.0).unwrap();
    let (count, mut accepted) = (cases(300), 0);
    let undamaged = ModelConfig::preset("tiny").unwrap().to_json();
    for seed in 0..count {
        let text = damaged(undamaged.as_bytes(), &mut Numbers(seed));
        fs::write(dir.0.join(CONFIG_FILE), &text).unwrap();
        match ModelConfig::read(&dir.0) {
            Ok(_) => accepted += 1,
            Err(error) => {
                assert_eq!(error.kind(), Kind::Checkpoint, "{error}");
                assert!(error.message().contains(CONFIG_FILE), "{error}");
            }
        }
    }
    assert!(accepted > 0 && accepted < count, "{accepted} of {count}: damage of both kinds");
}
