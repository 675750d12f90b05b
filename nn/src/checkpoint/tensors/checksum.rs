//! Checksums of tensors: XXH3-64 of the bytes of a tensor as in its file (the global tensor, little endian, row
//! major), as 16 lower-case hexadecimal digits under the metadata key `xxh3.NAME`.

use super::safetensors_header::Header;
use crate::checkpoint::atomic::disk::file_error;
use shardgrad_tensor::Result;
use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Prefix of the metadata keys of checksums; the name of the tensor follows.
const PREFIX: &str = "xxh3.";
/// Number of digits of a checksum.
const DIGITS: usize = 16;

/// Incremental checksum.
#[derive(Clone, Default)]
pub(super) struct Checksum(Xxh3);

impl Checksum {
    /// Computes the checksum of bytes that are all in memory.
    pub(super) fn of(bytes: &[u8]) -> String {
        let mut checksum = Checksum::default();
        checksum.add(bytes);
        checksum.hex()
    }

    /// Adds the next bytes; the checksum does not depend on how the bytes are cut into pieces.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the digits of the checksum of all bytes added so far.
    pub(super) fn hex(&self) -> String {
        format!("{:0DIGITS$x}", self.0.digest())
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checksum({})", self.hex())
    }
}

/// Returns the metadata key of the checksum of a tensor.
pub(super) fn key(tensor: &str) -> String {
    format!("{PREFIX}{tensor}")
}

/// Checks that a header has one well-formed checksum for each of its tensors and none for other tensors, or no
/// checksum at all.
///
/// # Errors
/// `Kind::Checkpoint` naming the file and the tensor.
pub(super) fn check_header(path: &Path, header: &Header) -> Result<()> {
    let damaged = |why: String| {
        let help = "bytes of the header have changed: copy the file again, or use another save; a program that changes \
                    tensors has to drop the `xxh3.` entries of `__metadata__`";
        Err(file_error(path, why).detail("help", help))
    };
    let checksums: Vec<(&str, &String)> = header
        .metadata
        .range(PREFIX.to_string()..)
        .map_while(|(key, digits)| Some((key.strip_prefix(PREFIX)?, digits)))
        .collect();
    if checksums.is_empty() {
        return Ok(());
    }
    let tensors: HashSet<&str> = header.tensors.iter().map(|t| t.name.as_str()).collect();
    for (name, digits) in &checksums {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if !tensors.contains(name) {
            return damaged(format!("the header has a checksum for `{name}`, but no such tensor"));
        }
        if digits.len() != DIGITS || !digits.bytes().all(is_digit) {
            return damaged(format!(
                "the checksum of tensor `{name}` is {digits:?}, not {DIGITS} hexadecimal digits"
            ));
        }
    }
    match header.tensors.iter().find(|t| !header.metadata.contains_key(&key(&t.name))) {
        Some(t) => damaged(format!("the header has checksums, but none for tensor `{}`", t.name)),
        None => Ok(()),
    }
}

/// Compares the checksum of the bytes of a tensor with that in the header.
///
/// # Errors
/// `Kind::Checkpoint` naming the file, the tensor and both checksums.
pub(super) fn compare(path: &Path, tensor: &str, expected: &str, found: &str) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    let why = format!("tensor `{tensor}` is damaged: its checksum is {found}, the header has {expected}");
    let help = "bytes of the file have changed since it was saved: copy it again, or use another save";
    Err(file_error(path, why).detail("help", help))
}

#[cfg(test)]
mod tests {
    use super::super::safetensors_header::parse;
    use super::*;
    use shardgrad_tensor::Kind;

    #[test]
    fn checksum_matches_reference_implementation() {
        // XXH3_64bits of xxHash 0.8 with seed 0.
        assert_eq!(Checksum::of(b""), "2d06800538d394c2");
        assert_eq!(Checksum::of(b"abc"), "78af5f94892f3950");
        let bytes: Vec<u8> = (0..5000u32).map(|i| (i % 251) as u8).collect();
        for cut in [0, 1, 255, 256, 1024, 4999] {
            let mut checksum = Checksum::default();
            checksum.add(&bytes[..cut]);
            checksum.add(&bytes[cut..]);
            assert_eq!(checksum.hex(), Checksum::of(&bytes), "cut at {cut}");
        }
    }

    #[test]
    fn header_with_partial_or_malformed_checksums_is_refused() {
        let header = |metadata: &str| {
            let tensors = ["a", "b"]
                .map(|name| format!(r#""{name}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#));
            let text = format!("{{\"__metadata__\":{{{metadata}}},{}}}", tensors.join(","));
            check_header(Path::new("m"), &parse(Path::new("m"), text.as_bytes(), 0).unwrap())
        };
        let [a, b] = ["a", "b"].map(|name| format!(r#""xxh3.{name}":"2d06800538d394c2""#));
        header("").unwrap();
        header(r#""format":"pt""#).unwrap();
        header(&format!(r#""format":"pt",{a},{b},"z":"1""#)).unwrap();
        for (metadata, why) in [
            (a.clone(), "m: the header has checksums, but none for tensor `b`"),
            (
                format!("{a},{}", b.replace("xxh3.b", "xxh3.c")),
                "m: the header has a checksum for `c`, but no such tensor",
            ),
            (
                format!("{a},{}", b.replace("c2", "C2")),
                "m: the checksum of tensor `b` is \"2d06800538d394C2\", not 16 hexadecimal digits",
            ),
            (
                format!("{a},{}", b.replace("c2", "c")),
                "m: the checksum of tensor `b` is \"2d06800538d394c\", not 16 hexadecimal digits",
            ),
        ] {
            let error = header(&metadata).unwrap_err();
            assert_eq!((error.kind(), error.message()), (Kind::Checkpoint, why));
        }
    }
}
