//! Parsing and validation of `config.json` fields, shared by all families. Errors are collected and reported together.

use crate::checkpoint::atomic::disk::file_error;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// Largest extent in a config file. Products of three extents fit u128, parameter counts fit u64.
const EXTENT_MAX: u64 = 1 << 24;
/// Largest number of blocks in a config file; the deepest published models have some hundreds.
const BLOCKS_MAX: u64 = 1 << 12;
/// Largest number of characters reported of a parse error.
const WHY_CHARS_MAX: usize = 200;

/// Parses the fields of a config file; all fields are optional.
///
/// # Errors
/// `Kind::Checkpoint` naming the first field of a wrong type, or the position of invalid JSON.
pub(super) fn parse_fields<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| match bad_field::<T>(text) {
        Some(why) => file_error(path, why),
        None => file_error(path, format_args!("cannot be read as a model config: {e}")),
    })
}

/// Parses the fields of a config file, and checks them with `check`, which returns the errors of all fields.
///
/// # Errors
/// `Kind::Checkpoint` if the text is not JSON or describes an unsupported model; all missing and unsupported fields are
/// listed at once.
pub(super) fn parse_config<R: DeserializeOwned, C>(
    path: &Path,
    text: &str,
    check: impl FnOnce(R) -> Result<C, Vec<String>>,
) -> Result<C> {
    check(parse_fields(path, text)?).map_err(|errors| {
        let error = file_error(path, "describes a model that this version does not support");
        errors.into_iter().fold(error, |error, error_text| error.detail("field", error_text))
    })
}

/// Returns the first field that cannot be parsed, and why.
fn bad_field<T: DeserializeOwned>(text: &str) -> Option<String> {
    let all: Map<String, Value> = serde_json::from_str(text).ok()?;
    all.into_iter().find_map(|(name, value)| {
        let alone = Value::Object(Map::from_iter([(name.clone(), value)]));
        let why = serde_json::from_value::<T>(alone).err()?.to_string();
        let shortened: String = why.chars().take(WHY_CHARS_MAX).collect();
        Some(format!("`{name}` cannot be read: {shortened}"))
    })
}

/// Deserializes a present field, also null, to `Some`: together with a serde default it distinguishes null from a missing field.
pub(super) fn deserialize_present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    held: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(held).map(Some)
}

/// A token id, or a list of token ids.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum TokenIds {
    One(u64),
    Several(Vec<u64>),
}

impl TokenIds {
    /// All ids that fit `usize`.
    pub(super) fn list(&self) -> Vec<usize> {
        let ids = match self {
            TokenIds::One(id) => std::slice::from_ref(id),
            TokenIds::Several(ids) => ids,
        };
        ids.iter().filter_map(|id| usize::try_from(*id).ok()).collect()
    }
}

/// Merges the fields of a config with extra fields that were read and kept; a field of the config overrides an extra field.
pub(super) fn merge_fields(extra: &Map<String, Value>, own: Value) -> Value {
    let mut all = extra.clone();
    if let Value::Object(own) = own {
        all.extend(own);
    }
    Value::Object(all)
}

/// The errors in a config file, collected to be reported together.
#[derive(Debug, Default)]
pub(super) struct ConfigErrors(pub(super) Vec<String>);

impl ConfigErrors {
    pub(super) fn add(&mut self, error_text: String) {
        self.0.push(error_text);
    }

    /// Checks an extent: at least 1, and small enough to multiply safely. Returns 1 for an invalid value.
    pub(super) fn extent(&mut self, name: &str, value: Option<u64>, default: Option<u64>) -> usize {
        self.count(name, value.or(default), EXTENT_MAX)
    }

    /// Checks a number of blocks. Returns 1 for an invalid value.
    pub(super) fn blocks(&mut self, name: &str, value: Option<u64>) -> usize {
        self.count(name, value, BLOCKS_MAX)
    }

    fn count(&mut self, name: &str, value: Option<u64>, max: u64) -> usize {
        match value {
            Some(n) if (1..=max).contains(&n) => return n as usize,
            Some(n) => self.add(format!("`{name}` is {n}, but must be in 1..={max}")),
            None => self.add(format!("`{name}` is missing")),
        }
        1
    }

    /// Checks a number in `[0, below)`. Returns the default for an invalid value.
    pub(super) fn number(&mut self, name: &str, value: Option<f64>, default: f64, below: f64) -> f64 {
        match value.unwrap_or(default) {
            x if (0.0..below).contains(&x) => x,
            x => {
                self.add(format!("`{name}` is {x}, but must be in [0, {below})"));
                default
            }
        }
    }

    /// The dtype of the weights from its two field names, `torch_dtype` and `dtype`; f32 if neither is present.
    pub(super) fn dtype(&mut self, name: Option<&str>, other: Option<&str>) -> DType {
        let [name, other] = [name, other].map(|name| name.map(|n| n.strip_prefix("torch.").unwrap_or(n)));
        if let (Some(name), Some(other)) = (name, other)
            && name != other
        {
            self.add(format!("`torch_dtype` is {name:?}, but `dtype` is {other:?}"));
        }
        let field = if name.is_none() && other.is_some() { "dtype" } else { "torch_dtype" };
        let name = name.or(other).unwrap_or("float32");
        DType::FLOATS.into_iter().find(|d| dtype_name(*d) == name).unwrap_or_else(|| {
            self.add(format!("`{field}` is {name:?}; supported: float64, float32, bfloat16, float16"));
            DType::F32
        })
    }

    /// Returns the config if there are no errors.
    pub(super) fn into_result<T>(self, config: T) -> Result<T, Vec<String>> {
        if self.0.is_empty() { Ok(config) } else { Err(self.0) }
    }
}

/// PyTorch's name of a dtype.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "float64",
        DType::F32 => "float32",
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        DType::I64 => "int64",
        DType::U8 => "uint8",
        DType::Bool => "bool",
    }
}
