//! Header of a safetensors file: names, dtypes, shapes and byte ranges of its tensors. Parses and renders text;
//! touches no file.
//!
//! A file is `length: u64 LE | header: JSON of that length | payload`. The header maps each tensor name to `{"dtype",
//! "shape", "data_offsets": [begin, end]}` with offsets into the payload, and `__metadata__` to a map of strings. The
//! tensors must cover the payload without gap or overlap, so that a file has one interpretation only.

use crate::checkpoint::atomic::disk::file_error;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use shardgrad_tensor::{DType, Result};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::path::Path;

/// Longest header that is read or written, in bytes.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Largest number of dims of a tensor.
pub const DIMS_MAX: usize = 8;
/// Largest number of tensors of a file.
pub const TENSORS_MAX: usize = 1 << 18;
/// Longest tensor name, in bytes.
pub const NAME_BYTES_MAX: usize = 1024;

/// Key of the header for entries that are not tensors.
const METADATA: &str = "__metadata__";
/// Key of `__metadata__` for the digest of a file that belongs to a set of files.
pub(crate) const DIGEST: &str = "shardgrad_digest";
/// Key of `__metadata__` for the step of the run after which a file was saved.
pub(crate) const STEP: &str = "shardgrad_step";

/// Returns the name of a dtype in safetensors files.
const fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::BF16 => "BF16",
        DType::F16 => "F16",
        DType::I64 => "I64",
        DType::U8 => "U8",
        DType::Bool => "BOOL",
    }
}

/// Name, dtype and global shape of a tensor to be written.
pub type TensorSpec = (String, DType, Vec<usize>);

/// Name, dtype, shape and byte range of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, such as `transformer.h.0.attn.c_attn.weight`.
    pub name: String,
    /// Dtype in the file.
    pub dtype: DType,
    /// Global shape, row major.
    pub shape: Vec<usize>,
    /// Byte range (little endian) from the start of the payload.
    pub bytes: Range<u64>,
}

/// A checked header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Tensors in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
    /// Entries of `__metadata__`.
    pub metadata: BTreeMap<String, String>,
}

/// Returns the number of bytes of a tensor; `None` if it exceeds 2^63.
#[must_use]
pub fn num_bytes(dtype: DType, shape: &[usize]) -> Option<u64> {
    // An extent of 0 must not hide an overflow of the others: such a shape cannot be represented.
    shape
        .iter()
        .try_fold(dtype.size() as u64, |n, &extent| match extent as u64 {
            0 => Some(n),
            extent => n.checked_mul(extent).filter(|n| *n <= i64::MAX as u64),
        })
        .map(|n| if shape.contains(&0) { 0 } else { n })
}

/// Parses the header text of the file at `path` (for errors), whose payload has `payload_bytes` bytes.
///
/// # Errors
/// `Kind::Checkpoint` for text that is not UTF-8 or not JSON, unknown fields, a tensor name or metadata key used
/// twice, more than [`TENSORS_MAX`] tensors, an unknown or unsupported dtype, more than [`DIMS_MAX`] dims, a byte
/// range that does not fit dtype and shape, and byte ranges that leave a gap, overlap, or do not end with the file.
pub fn parse(path: &Path, text: &[u8], payload_bytes: u64) -> Result<Header> {
    let text = std::str::from_utf8(text).map_err(|e| {
        file_error(path, format_args!("the header is not UTF-8 at byte {}", 8 + e.valid_up_to()))
    })?;
    if !text.starts_with('{') {
        return Err(file_error(path, "the header does not start with `{`")
            .detail("help", "is this a safetensors file?"));
    }
    let UniqueKeys::<RawHeader>(raw) = serde_json::from_str(text)
        .map_err(|e| file_error(path, format_args!("the header cannot be read: {e}")))?;
    let mut tensors =
        raw.tensors.into_iter().map(|(name, raw)| raw.check(path, name)).collect::<Result<Vec<_>>>()?;
    tensors.sort_by_key(|t| (t.bytes.start, t.bytes.end));
    let mut end = 0;
    for t in &tensors {
        if t.bytes.start != end {
            let what = if t.bytes.start > end { "leaves a gap after" } else { "overlaps the tensor before" };
            return Err(file_error(
                path,
                format_args!("tensor `{}` {what} byte {end} of the payload", t.name),
            ));
        }
        end = t.bytes.end;
    }
    if end != payload_bytes {
        let why = format!("the tensors take {end} bytes, but {payload_bytes} bytes follow the header");
        let help = if end > payload_bytes {
            "the file is truncated: copy it again"
        } else {
            "bytes follow the last tensor"
        };
        return Err(file_error(path, why).detail("help", help));
    }
    Ok(Header { tensors, metadata: raw.metadata })
}

/// Renders the header text of tensors whose bytes follow each other in this order, padded with spaces to a multiple
/// of 8 bytes. The entries of `__metadata__` come first: `{"format": "pt"}`, so that PyTorch programs open the file,
/// and `more`. Equal arguments give equal bytes.
///
/// # Errors
/// `Kind::Checkpoint` for what [`parse`] would refuse: a bad or repeated name, too many dims, too many bytes.
pub(super) fn render(
    path: &Path,
    tensors: &[TensorSpec],
    more: &BTreeMap<String, String>,
) -> Result<(String, Header)> {
    let mut metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    metadata.extend(more.clone());
    let mut header = Header { tensors: Vec::with_capacity(tensors.len()), metadata };
    let mut text = format!("{{\"{METADATA}\":{}", serde_json::json!(header.metadata));
    let (mut names, mut end) = (HashSet::new(), 0u64);
    for (name, dtype, shape) in tensors {
        check_name(path, name)?;
        if !names.insert(name) {
            return Err(file_error(path, format_args!("tensor `{name}` is given twice")));
        }
        let start = end;
        end = num_bytes(*dtype, shape)
            .filter(|_| shape.len() <= DIMS_MAX)
            .and_then(|n| start.checked_add(n))
            .filter(|end| *end <= i64::MAX as u64)
            .ok_or_else(|| {
                file_error(path, format_args!("tensor `{name}` of shape {shape:?} is too large for a file"))
            })?;
        let entry =
            serde_json::json!({ "dtype": dtype_name(*dtype), "shape": shape, "data_offsets": [start, end] });
        text += &format!(",{}:{entry}", serde_json::json!(name));
        let (name, shape) = (name.clone(), shape.clone());
        header.tensors.push(TensorInfo { name, dtype: *dtype, shape, bytes: start..end });
    }
    text.push('}');
    while text.len() % 8 != 0 {
        text.push(' ');
    }
    if text.len() as u64 > HEADER_BYTES_MAX || tensors.len() > TENSORS_MAX {
        return Err(file_error(
            path,
            format_args!("a header of {} tensors and {} bytes is too long", tensors.len(), text.len()),
        ));
    }
    Ok((text, header))
}

fn check_name(path: &Path, name: &str) -> Result<()> {
    if name.is_empty()
        || name.len() > NAME_BYTES_MAX
        || name.chars().any(char::is_control)
        || name == METADATA
    {
        let shown: String = name.chars().take(40).collect();
        let why = format!("{shown:?} is not a valid tensor name");
        return Err(file_error(path, why)
            .detail("help", format!("use 1 to {NAME_BYTES_MAX} bytes without control characters")));
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl RawTensor {
    fn check(self, path: &Path, name: String) -> Result<TensorInfo> {
        check_name(path, &name)?;
        let dtype = DType::ALL.into_iter().find(|d| dtype_name(*d) == self.dtype).ok_or_else(|| {
            let supported = DType::ALL.map(dtype_name);
            let why = format!("tensor `{name}` has the unsupported dtype {:?}", self.dtype);
            file_error(path, why).detail("help", format!("supported dtypes: {}", supported.join(", ")))
        })?;
        if self.shape.len() > DIMS_MAX {
            let why =
                format!("tensor `{name}` has {} dims, at most {DIMS_MAX} are supported", self.shape.len());
            return Err(file_error(path, why));
        }
        let [start, end] = self.data_offsets;
        let shape: Option<Vec<usize>> = self.shape.iter().map(|&n| usize::try_from(n).ok()).collect();
        let need = shape.as_deref().and_then(|shape| num_bytes(dtype, shape));
        match (shape, need) {
            (Some(shape), Some(need)) if start <= end && end - start == need => {
                Ok(TensorInfo { name, dtype, shape, bytes: start..end })
            }
            (_, need) => {
                let need = need.map_or("more than 2^63".to_string(), |n| n.to_string());
                let why = format!(
                    "tensor `{name}`: {dtype}{:?} takes {need} bytes, not {start}..{end}",
                    self.shape
                );
                Err(file_error(path, why))
            }
        }
    }
}

/// A map that is read entry by entry.
pub(super) trait Entries: Default {
    /// Description for errors.
    const EXPECTED: &'static str;

    /// Reads the value of a key.
    fn read<'de, A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error>;
}

/// Deserializes a map; refuses a key that occurs twice, of which a map type would silently drop one.
#[derive(Debug)]
pub(super) struct UniqueKeys<T>(pub(super) T);

impl<'de, T: Entries> Deserialize<'de> for UniqueKeys<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<UniqueKeys<T>, D::Error> {
        struct EntryVisitor<T>(PhantomData<T>);
        impl<'de, T: Entries> Visitor<'de> for EntryVisitor<T> {
            type Value = UniqueKeys<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::EXPECTED)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueKeys<T>, A::Error> {
                let (mut entries, mut keys) = (T::default(), HashSet::new());
                while let Some(key) = map.next_key::<String>()? {
                    if !keys.insert(key.clone()) {
                        return Err(A::Error::custom(format_args!("key `{key}` occurs twice")));
                    }
                    entries.read(key, &mut map)?;
                }
                Ok(UniqueKeys(entries))
            }
        }
        from.deserialize_map(EntryVisitor(PhantomData))
    }
}

impl Entries for BTreeMap<String, String> {
    const EXPECTED: &'static str = "a map of strings";

    fn read<'de, A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error> {
        self.insert(key, map.next_value()?);
        Ok(())
    }
}

/// A header before its checks.
#[derive(Default)]
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

impl Entries for RawHeader {
    const EXPECTED: &'static str = "a map from tensor names to their dtype, shape and offsets";

    fn read<'de, A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error> {
        if key == METADATA {
            self.metadata = map.next_value::<UniqueKeys<_>>()?.0;
        } else if self.tensors.len() == TENSORS_MAX {
            return Err(A::Error::custom(format_args!("there are more than {TENSORS_MAX} tensors")));
        } else {
            self.tensors.push((key, map.next_value()?));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::Metadata;
    use shardgrad_tensor::Kind;

    const GOOD: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]},
        "a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"e":{"dtype":"I64","shape":[0,5],"data_offsets":[24,24]}}  "#;

    fn message(text: &str, payload: u64) -> String {
        parse(Path::new("m"), text.as_bytes(), payload).unwrap_err().message().to_string()
    }

    #[test]
    fn header_is_parsed_in_payload_order() {
        let header = parse(Path::new("m"), GOOD.as_bytes(), 30).unwrap();
        let names: Vec<&str> = header.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["a", "e", "b"]);
        assert_eq!(header.tensors[0].shape, [2, 3]);
        assert_eq!(header.tensors[2].dtype, DType::BF16);
        assert_eq!(header.tensors[2].bytes, 24..30);
        assert_eq!(header.metadata["format"], "pt");
        assert_eq!(parse(Path::new("m"), b"{}", 0).unwrap(), Header::default());
    }

    #[test]
    fn malformed_headers_are_refused() {
        let change = |from: &str, to: &str| {
            assert!(GOOD.contains(from), "{from}");
            message(&GOOD.replacen(from, to, 1), 30)
        };
        assert_eq!(change("F32", "I32"), "m: tensor `a` has the unsupported dtype \"I32\"");
        assert_eq!(change("[24,30]", "[26,32]"), "m: tensor `b` leaves a gap after byte 24 of the payload");
        assert_eq!(
            change("[24,30]", "[22,28]"),
            "m: tensor `b` overlaps the tensor before byte 24 of the payload"
        );
        assert_eq!(change("[24,30]", "[24,31]"), "m: tensor `b`: bf16[3] takes 6 bytes, not 24..31");
        assert_eq!(change("[24,30]", "[30,24]"), "m: tensor `b`: bf16[3] takes 6 bytes, not 30..24");
        assert_eq!(
            change("[0,5]", "[0,5,1,1,1,1,1,1,1]"),
            "m: tensor `e` has 9 dims, at most 8 are supported"
        );
        assert_eq!(
            change("[0,5]", "[0,4294967296,4294967296]"),
            "m: tensor `e`: i64[0, 4294967296, 4294967296] takes more than 2^63 bytes, not 24..24"
        );
        assert!(change("\"b\":", "\"a\":").contains("`a` occurs twice"));
        assert!(change("\"format\":\"pt\"", "\"x\":\"1\",\"x\":\"2\"").contains("key `x` occurs twice"));
        assert!(change("{\"format\":\"pt\"}", "{\"format\":[]}").contains("expected a string"));
        assert!(change("\"b\":", "\"__metadata__\":").contains("occurs twice"));
        assert!(change("\"b\":", "\"b\\u0000\":").contains("is not a valid tensor name"));
        assert!(change("\"b\":", "\"\":").contains("is not a valid tensor name"));
        assert!(change("[3]", "[3.0]").contains("expected u64"));
        assert!(change("[3]", "[-3]").contains("expected u64"));
        assert!(change("[24,30]", "[\"24\",30]").contains("expected u64"));
        assert!(change("[24,30]", "[24,30,31]").contains("trailing characters"));
        assert!(
            change("\"dtype\":\"F32\"", "\"dtype\":\"F32\",\"dtype\":\"F32\"")
                .contains("duplicate field `dtype`")
        );
        assert!(change("\"dtype\":\"F32\"", "\"dtype\":\"F32\",\"more\":1").contains("unknown field `more`"));
        assert!(change("\"dtype\":\"F32\",", "").contains("missing field `dtype`"));
        assert!(change("}}  ", "}} x").contains("trailing characters"));
        assert_eq!(message(GOOD, 29), "m: the tensors take 30 bytes, but 29 bytes follow the header");
        assert_eq!(message(GOOD, 31), "m: the tensors take 30 bytes, but 31 bytes follow the header");
        assert_eq!(message(" {}", 0), "m: the header does not start with `{`");
        assert!(message(&"[".repeat(200), 0).contains("does not start with `{`"));
        assert!(message(&format!("{{\"a\":{}", "[".repeat(100_000)), 0).contains("cannot be read"));
        let error = parse(Path::new("m"), b"{\"\xff\":1}", 0).unwrap_err();
        assert_eq!(error.message(), "m: the header is not UTF-8 at byte 10");
        assert_eq!(error.kind(), Kind::Checkpoint);
    }

    /// The reasons for an own parser (decision record 21): if one fails, the reference library has caught up.
    #[test]
    fn reference_library_accepts_headers_that_are_refused_here() {
        for (from, to) in [
            ("\"b\":", "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},\"b\":"),
            ("\"format\":\"pt\"", "\"x\":\"1\",\"x\":\"2\""),
            ("\"dtype\":\"F32\"", "\"dtype\":\"F32\",\"more\":1"),
            ("[0,5]", "[0,5,1,1,1,1,1,1,1]"),
            ("[0,5]", "[0,4294967296,4294967296]"),
            ("\"b\":", "\"b\\u0000\":"),
            ("\"b\":", "\"\":"),
            ("{\"format\":\"pt\"}", "null"),
        ] {
            let text = GOOD.replacen(from, to, 1);
            assert!(text != GOOD && parse(Path::new("m"), text.as_bytes(), 30).is_err(), "{to}");
            let reference: Metadata = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{to}: {e}"));
            assert_eq!(reference.data_len(), 30);
        }
        // Neither the tensor nor the bytes are named.
        let error = serde_json::from_str::<Metadata>(&GOOD.replacen("[24,30]", "[24,31]", 1)).unwrap_err();
        assert_eq!(error.to_string(), "invalid shape, data type, or offset for tensor");
    }

    #[test]
    fn rendered_header_parses_back() {
        let tensors = vec![
            ("w \"q\" é".to_string(), DType::F32, vec![2, 3]),
            ("empty".to_string(), DType::U8, vec![0]),
            ("one".to_string(), DType::F64, vec![]),
        ];
        let (text, header) = render(Path::new("m"), &tensors, &BTreeMap::new()).unwrap();
        assert_eq!(text.len() % 8, 0);
        assert_eq!(parse(Path::new("m"), text.as_bytes(), 32).unwrap(), header);
        let refused = |name: &str, shape: Vec<usize>| {
            let tensors = [tensors[0].clone(), (name.to_string(), DType::F32, shape)];
            render(Path::new("m"), &tensors, &BTreeMap::new()).unwrap_err().message().to_string()
        };
        assert_eq!(refused("w \"q\" é", vec![1]), "m: tensor `w \"q\" é` is given twice");
        assert_eq!(
            refused("x", vec![usize::MAX, 2]),
            format!("m: tensor `x` of shape [{}, 2] is too large for a file", usize::MAX)
        );
        assert_eq!(
            refused("x", vec![1; 9]),
            "m: tensor `x` of shape [1, 1, 1, 1, 1, 1, 1, 1, 1] is too large for a file"
        );
        assert_eq!(refused("__metadata__", vec![1]), "m: \"__metadata__\" is not a valid tensor name");
    }

    #[test]
    fn header_with_changed_byte_is_refused_or_covers_the_payload() {
        // Whatever byte changes, the parser neither panics nor accepts byte ranges that do not cover the payload
        // exactly, and the reference library reads the same tensors.
        let mut accepted = 0;
        for at in 0..GOOD.len() {
            for byte in (0..=255u8).step_by(5).chain(*b"0123456789[]{},:\"") {
                let mut text = GOOD.as_bytes().to_vec();
                text[at] = byte;
                if let Ok(header) = parse(Path::new("m"), &text, 30) {
                    accepted += 1;
                    let reference: Metadata = serde_json::from_slice(&text).unwrap();
                    assert_eq!((reference.data_len(), reference.tensors().len()), (30, header.tensors.len()));
                    let mut end = 0;
                    for t in &header.tensors {
                        assert_eq!(t.bytes.start, end);
                        assert_eq!(reference.info(&t.name).unwrap().shape, t.shape);
                        assert_eq!(num_bytes(t.dtype, &t.shape), Some(t.bytes.end - t.bytes.start));
                        end = t.bytes.end;
                    }
                    assert_eq!(end, 30);
                }
            }
            assert!(parse(Path::new("m"), &GOOD.as_bytes()[..at], 30).is_err() || at + 2 >= GOOD.len());
        }
        assert!(accepted > 0, "names may change");
    }

    #[test]
    fn long_header_is_parsed_in_linear_time() {
        let tensors: Vec<_> = (0..100_000).map(|i| (format!("t{i}"), DType::U8, vec![1])).collect();
        let (text, header) = render(Path::new("m"), &tensors, &BTreeMap::new()).unwrap();
        let begun = std::time::Instant::now();
        assert_eq!(parse(Path::new("m"), text.as_bytes(), 100_000).unwrap(), header);
        assert!(begun.elapsed().as_secs() < 5);
    }
}
