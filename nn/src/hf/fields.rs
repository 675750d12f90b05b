//! Fields of `config.json` that all families have, read with suspicion: what is wrong is collected, then told at once.

use super::disk::refuse;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use shardgrad_tensor::{DType, Result};
use std::path::Path;

/// The config file's name in a model folder.
pub const CONFIG_FILE: &str = "config.json";
/// The name of the weights file in a model folder.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// The name of the index in a folder whose weights are spread over several files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// The name of the file that tells how texts are continued, in a model folder.
pub(super) const GENERATION_FILE: &str = "generation_config.json";

/// No config file is longer than this.
pub(super) const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// No extent in a config file is larger than this; products of three of them fit u128, parameter counts fit
/// u64.
const EXTENT_MAX: u64 = 1 << 24;
/// No model in a config file has more blocks than this; the deepest that were published have some hundreds.
const BLOCKS_MAX: u64 = 1 << 12;
/// No more characters than these are told of why a field cannot be read.
const WHY_CHARS_MAX: usize = 200;

/// The fields that are read of a config file, none of which must be there.
///
/// # Errors
/// `Kind::Checkpoint` naming the first field of another type, or telling where the text is no JSON.
pub(super) fn fields<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| match bad_field::<T>(text) {
        Some(why) => refuse(path, why),
        None => refuse(path, format_args!("cannot be read as a model config: {e}")),
    })
}

/// The first field that cannot be read, and why.
fn bad_field<T: DeserializeOwned>(text: &str) -> Option<String> {
    let all: Map<String, Value> = serde_json::from_str(text).ok()?;
    all.into_iter().find_map(|(name, value)| {
        let alone = Value::Object(Map::from_iter([(name.clone(), value)]));
        let why = serde_json::from_value::<T>(alone).err()?.to_string();
        let told: String = why.chars().take(WHY_CHARS_MAX).collect();
        Some(format!("`{name}` cannot be read: {told}"))
    })
}

/// A field that is there, whatever it holds: with a default it tells null from silence.
pub(super) fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    held: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(held).map(Some)
}

/// The number of a token, or a list of such numbers.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Ids {
    One(u64),
    Several(Vec<u64>),
}

impl Ids {
    /// All of them, but for those that are no index on this machine.
    pub(super) fn list(&self) -> Vec<usize> {
        let ids = match self {
            Ids::One(id) => std::slice::from_ref(id),
            Ids::Several(ids) => ids,
        };
        ids.iter().filter_map(|id| usize::try_from(*id).ok()).collect()
    }
}

/// What a config tells, and beside it fields that it only keeps: none of these takes the place of what is told.
pub(super) fn below(kept: &Map<String, Value>, told: Value) -> Value {
    let mut all = kept.clone();
    if let Value::Object(told) = told {
        all.extend(told);
    }
    Value::Object(all)
}

/// What is wrong with a config file.
#[derive(Debug, Default)]
pub(super) struct Faults(pub(super) Vec<String>);

impl Faults {
    pub(super) fn add(&mut self, fault: String) {
        self.0.push(fault);
    }

    /// A number of things: at least one, and not beyond what can be multiplied safely. What is refused is 1.
    pub(super) fn extent(&mut self, name: &str, value: Option<u64>, default: Option<u64>) -> usize {
        self.count(name, value.or(default), EXTENT_MAX)
    }

    /// A number of blocks, each of which is made of many things. What is refused is 1.
    pub(super) fn blocks(&mut self, name: &str, value: Option<u64>) -> usize {
        self.count(name, value, BLOCKS_MAX)
    }

    fn count(&mut self, name: &str, value: Option<u64>, max: u64) -> usize {
        match value {
            Some(n) if (1..=max).contains(&n) => return n as usize,
            Some(n) => self.add(format!("`{name}` is {n}, which is outside of 1..={max}")),
            None => self.add(format!("`{name}` is missing")),
        }
        1
    }

    /// A number from zero up to, but not including, a limit.
    pub(super) fn number(&mut self, name: &str, value: Option<f64>, default: f64, below: f64) -> f64 {
        match value.unwrap_or(default) {
            x if (0.0..below).contains(&x) => x,
            x => {
                self.add(format!("`{name}` is {x}, which is not in [0, {below})"));
                default
            }
        }
    }

    /// The dtype of the weights by its two names, `torch_dtype` and `dtype`; f32 where the file is silent.
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
            self.add(format!("`{field}` is {name:?}; held are float64, float32, bfloat16, float16"));
            DType::F32
        })
    }

    /// The config, if nothing is wrong.
    pub(super) fn none_or<T>(self, config: T) -> Result<T, Vec<String>> {
        if self.0.is_empty() { Ok(config) } else { Err(self.0) }
    }
}

/// PyTorch's word for a dtype of weights.
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
