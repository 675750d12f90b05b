//! The header of a safetensors file: which tensors stand where. Text in, checked facts out; no file is touched here.
//!
//! A file is `length: u64 LE | header: JSON of that length | payload`. The header maps each tensor's name to
//! `{"dtype", "shape", "data_offsets": [begin, end]}` with offsets into the payload, and `__metadata__` to a map of
//! strings. The tensors must cover the payload without hole or overlap, so that a file has one reading only.

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use shardgrad_tensor::{DType, Error, Kind, Result};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// The longest header that is read or written.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// The most dims of one tensor.
pub const DIMS_MAX: usize = 8;
/// The longest tensor name.
pub const NAME_BYTES_MAX: usize = 1024;

/// The dtypes of the format that shardgrad holds; the text is what stands in files.
const DTYPES: [(&str, DType); 7] = [
    ("F64", DType::F64),
    ("F32", DType::F32),
    ("BF16", DType::BF16),
    ("F16", DType::F16),
    ("I64", DType::I64),
    ("U8", DType::U8),
    ("BOOL", DType::Bool),
];

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, such as `transformer.h.0.attn.c_attn.weight`.
    pub name: String,
    /// Its dtype in the file.
    pub dtype: DType,
    /// Its global shape, row major.
    pub shape: Vec<usize>,
    /// Its bytes (little endian), counted from the start of the payload.
    pub bytes: Range<u64>,
}

/// What a header says, checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The tensors in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
    /// The free text entries of `__metadata__`.
    pub metadata: BTreeMap<String, String>,
}

/// An error about a file: `path: why`.
pub(super) fn refuse(path: &Path, why: impl fmt::Display) -> Error {
    Error::new(Kind::Checkpoint, format!("{}: {why}", path.display()))
}

/// The bytes that a tensor of this dtype and shape takes; `None` where they exceed 2^63.
#[must_use]
pub fn num_bytes(dtype: DType, shape: &[usize]) -> Option<u64> {
    // An extent of 0 must not hide that the others overflow: no tensor of that shape could ever be named.
    shape
        .iter()
        .try_fold(dtype.size() as u64, |n, &extent| match extent as u64 {
            0 => Some(n),
            extent => n.checked_mul(extent).filter(|n| *n <= i64::MAX as u64),
        })
        .map(|n| if shape.contains(&0) { 0 } else { n })
}

/// Reads the header text of the file at `path` (named in errors), whose payload has `payload_bytes` bytes.
///
/// # Errors
/// `Kind::Checkpoint` for text that is not UTF-8 or not JSON, unknown fields, a name or a metadata key used twice, a
/// dtype that is unknown or not held here, more than [`DIMS_MAX`] dims, a byte range that does not fit dtype and
/// shape, and ranges that leave a hole, overlap, or do not end with the file.
pub fn parse(path: &Path, text: &[u8], payload_bytes: u64) -> Result<Header> {
    let text = std::str::from_utf8(text)
        .map_err(|e| refuse(path, format_args!("the header is not UTF-8 at byte {}", 8 + e.valid_up_to())))?;
    if !text.starts_with('{') {
        return Err(refuse(path, "the header does not start with `{`").detail("help", "is this a safetensors file?"));
    }
    let raw: RawHeader =
        serde_json::from_str(text).map_err(|e| refuse(path, format_args!("the header cannot be read: {e}")))?;
    let mut tensors =
        raw.tensors.into_iter().map(|(name, raw)| raw.check(path, name)).collect::<Result<Vec<_>>>()?;
    tensors.sort_by_key(|t| (t.bytes.start, t.bytes.end));
    let mut end = 0;
    for t in &tensors {
        if t.bytes.start != end {
            let what = if t.bytes.start > end { "leaves a hole after" } else { "overlaps the tensor before" };
            return Err(refuse(path, format_args!("tensor `{}` {what} byte {end} of the payload", t.name)));
        }
        end = t.bytes.end;
    }
    if end != payload_bytes {
        let why = format!("the tensors take {end} bytes, but {payload_bytes} bytes follow the header");
        let help = if end > payload_bytes { "the file is cut short; copy it again" } else { "bytes follow the last tensor" };
        return Err(refuse(path, why).detail("help", help));
    }
    Ok(Header { tensors, metadata: raw.metadata })
}

/// Writes the header text of tensors whose bytes follow each other in the given order, padded with spaces to a multiple
/// of 8 bytes, as `{"format": "pt"}` files that PyTorch programs open.
///
/// # Errors
/// `Kind::Checkpoint` for what [`parse`] would refuse: a bad or doubled name, too many dims, too many bytes.
pub fn render(path: &Path, tensors: &[(String, DType, Vec<usize>)]) -> Result<(String, Header)> {
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut header = Header { tensors: Vec::with_capacity(tensors.len()), metadata };
    let mut text = format!("{{\"__metadata__\":{}", serde_json::json!(header.metadata));
    let (mut names, mut end) = (HashSet::new(), 0u64);
    for (name, dtype, shape) in tensors {
        check_name(path, name)?;
        if !names.insert(name) {
            return Err(refuse(path, format_args!("tensor `{name}` is given twice")));
        }
        let start = end;
        end = num_bytes(*dtype, shape)
            .filter(|_| shape.len() <= DIMS_MAX)
            .and_then(|n| start.checked_add(n))
            .filter(|end| *end <= i64::MAX as u64)
            .ok_or_else(|| refuse(path, format_args!("tensor `{name}` of shape {shape:?} does not fit a file")))?;
        let word = DTYPES.iter().find(|d| d.1 == *dtype).map_or("F32", |d| d.0);
        let entry = serde_json::json!({ "dtype": word, "shape": shape, "data_offsets": [start, end] });
        text += &format!(",{}:{entry}", serde_json::json!(name));
        let (name, shape) = (name.clone(), shape.clone());
        header.tensors.push(TensorInfo { name, dtype: *dtype, shape, bytes: start..end });
    }
    text.push('}');
    while text.len() % 8 != 0 {
        text.push(' ');
    }
    if text.len() as u64 > HEADER_BYTES_MAX {
        return Err(refuse(path, format_args!("a header of {} bytes is too long", text.len())));
    }
    Ok((text, header))
}

fn check_name(path: &Path, name: &str) -> Result<()> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) || name == "__metadata__" {
        let shown: String = name.chars().take(40).collect();
        let why = format!("{shown:?} cannot name a tensor");
        return Err(refuse(path, why).detail("help", format!("1 to {NAME_BYTES_MAX} bytes, no control characters")));
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
        let dtype = DTYPES.iter().find(|d| d.0 == self.dtype).map(|d| d.1).ok_or_else(|| {
            let held: Vec<&str> = DTYPES.iter().map(|d| d.0).collect();
            let why = format!("tensor `{name}` has the dtype {:?}, which is not held here", self.dtype);
            refuse(path, why).detail("help", format!("held are {}", held.join(", ")))
        })?;
        if self.shape.len() > DIMS_MAX {
            let why = format!("tensor `{name}` has {} dims, at most {DIMS_MAX} are held", self.shape.len());
            return Err(refuse(path, why));
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
                let why = format!("tensor `{name}`: {dtype}{:?} takes {need} bytes, not {start}..{end}", self.shape);
                Err(refuse(path, why))
            }
        }
    }
}

/// The header as it stands, with the duplicate keys that a map type would swallow refused.
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

struct Metadata(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Metadata, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut found = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if found.contains_key(&key) {
                        return Err(A::Error::custom(format_args!("metadata key `{key}` stands twice")));
                    }
                    found.insert(key, value);
                }
                Ok(Metadata(found))
            }
        }
        from.deserialize_map(Strings)
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<RawHeader, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensor names to their dtype, shape and offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut raw = RawHeader { tensors: Vec::new(), metadata: BTreeMap::new() };
                let mut names = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !names.insert(name.clone()) {
                        return Err(A::Error::custom(format_args!("`{name}` stands twice")));
                    }
                    if name == "__metadata__" {
                        raw.metadata = map.next_value::<Metadata>()?.0;
                    } else {
                        raw.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(raw)
            }
        }
        from.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(text: &str, payload: u64) -> String {
        parse(Path::new("m"), text.as_bytes(), payload).unwrap_err().message().to_string()
    }
}
