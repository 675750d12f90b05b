//! Sliding window fields of Llama family configs: one window for all blocks, or by the type of each block.

use super::{LlamaConfig, LlamaKind};
use crate::checkpoint::hf::config_fields::ConfigErrors;
use serde_json::{Map, Value, json};

/// The types of blocks in files: with a sliding window, and with full attention.
pub(super) const WINDOWED: &str = "sliding_attention";
pub(super) const FULL: &str = "full_attention";

/// The fields of sliding windows.
const FIELDS: [&str; 4] = ["layer_types", "max_window_layers", "sliding_window", "use_sliding_window"];

/// Reads the sliding window of each block from the fields of a file; empty if no block has a window.
pub(super) fn read(
    fields: &Map<String, Value>,
    config: &LlamaConfig,
    errors: &mut ConfigErrors,
) -> Vec<Option<usize>> {
    let (kind, layers) = (config.kind, config.num_hidden_layers);
    let field = fields.get("sliding_window");
    let on = match kind {
        LlamaKind::Llama => false,
        LlamaKind::Mistral => field.is_none_or(|size| !size.is_null()),
        LlamaKind::Mixtral => field.is_some_and(|size| !size.is_null()),
        LlamaKind::Qwen2 | LlamaKind::Qwen3 | LlamaKind::Qwen3Moe => {
            fields.get("use_sliding_window").and_then(Value::as_bool) == Some(true)
                && field.is_none_or(|size| !size.is_null())
        }
    };
    if !on {
        return Vec::new();
    }
    let size = match field {
        None => 4096,
        Some(size) => match size.as_u64() {
            Some(n) => errors.extent("sliding_window", Some(n), None),
            None => {
                errors.add(format!("`sliding_window` is {size}, but must be a number of keys"));
                1
            }
        },
    };
    let limit = (size < config.max_position_embeddings).then_some(size);
    let Some(limit) = limit else { return Vec::new() };
    let types = fields.get("layer_types").filter(|t| !t.is_null() && !has_uniform_window(kind));
    if let Some(types) = types {
        let types: Vec<&str> = types.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if types.len() != layers || types.iter().any(|t| ![WINDOWED, FULL].contains(t)) {
            errors
                .add(format!("`layer_types` must be a list of {layers} entries, each {WINDOWED} or {FULL}"));
        }
        return types.iter().map(|t| (*t == WINDOWED).then_some(limit)).collect();
    }
    let first = match kind {
        LlamaKind::Qwen2 | LlamaKind::Qwen3 => {
            fields.get("max_window_layers").and_then(Value::as_u64).unwrap_or(28) as usize
        }
        _ => 0,
    };
    match first {
        _ if first >= layers => Vec::new(),
        _ => (0..layers).map(|layer| (layer >= first).then_some(limit)).collect(),
    }
}

/// Writes the fields of the windows into a config file. Fields that were read stay if they mean the same windows.
pub(super) fn write(config: &LlamaConfig, value: &mut Value) {
    let is_stated = |fields: &Map<String, Value>| {
        let mut errors = ConfigErrors::default();
        let windows = read(fields, config, &mut errors);
        let is_present = FIELDS.iter().any(|field| fields.contains_key(*field));
        is_present && errors.0.is_empty() && same_windows(config, &LlamaConfig { windows, ..config.clone() })
    };
    // llama has no window fields.
    if config.kind == LlamaKind::Llama || value.as_object().is_some_and(is_stated) {
        return;
    }
    if let Some(fields) = value.as_object_mut() {
        FIELDS.iter().for_each(|field| drop(fields.remove(*field)));
    }
    let windows = effective_windows(config);
    let size = windows.iter().flatten().next();
    match (config.kind, size) {
        // Always written: without the field mistral defaults to a window.
        (LlamaKind::Mistral | LlamaKind::Mixtral, _) => value["sliding_window"] = json!(size),
        (LlamaKind::Qwen3Moe, Some(size)) => {
            value["use_sliding_window"] = json!(true);
            value["sliding_window"] = json!(size);
        }
        (_, None) => {}
        (_, Some(size)) => {
            let kind = |window: &Option<usize>| if window.is_some() { WINDOWED } else { FULL };
            value["use_sliding_window"] = json!(true);
            value["sliding_window"] = json!(size);
            value["layer_types"] = windows.iter().map(kind).collect();
        }
    }
}

/// Whether all blocks of a member have the same window or none.
fn has_uniform_window(kind: LlamaKind) -> bool {
    matches!(kind, LlamaKind::Mistral | LlamaKind::Mixtral | LlamaKind::Qwen3Moe)
}

/// Whether two configs have the same effective windows.
pub(super) fn same_windows(a: &LlamaConfig, b: &LlamaConfig) -> bool {
    effective_windows(a) == effective_windows(b)
}

/// The window of each block, if it is smaller than the number of positions.
fn effective_windows(config: &LlamaConfig) -> Vec<Option<usize>> {
    let hides = |keys: &usize| *keys < config.max_position_embeddings;
    (0..config.num_hidden_layers).map(|layer| config.window(layer).filter(hides)).collect()
}
