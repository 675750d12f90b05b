//! How a config file asks for windows: in all blocks or none, or by the type of each block.

use super::{LlamaConfig, LlamaKind};
use crate::hf::fields::Faults;
use serde_json::{Map, Value, json};

/// What stands in files for a block whose queries see a window of keys, and for one whose queries see all.
pub(super) const WINDOWED: &str = "sliding_attention";
pub(super) const WHOLE: &str = "full_attention";

/// The fields that tell of windows.
const FIELDS: [&str; 4] = ["layer_types", "max_window_layers", "sliding_window", "use_sliding_window"];

/// How many keys a query sees at most in each block, as fields of a file say; empty where none is hidden from any.
pub(super) fn read(
    fields: &Map<String, Value>,
    config: &LlamaConfig,
    faults: &mut Faults,
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
            Some(n) => faults.extent("sliding_window", Some(n), None),
            None => {
                faults.add(format!("`sliding_window` is {size}, which is no number of keys"));
                1
            }
        },
    };
    let limit = (size < config.max_position_embeddings).then_some(size);
    let Some(limit) = limit else { return Vec::new() };
    let types = fields.get("layer_types").filter(|t| !t.is_null() && !all_alike(kind));
    if let Some(types) = types {
        let types: Vec<&str> = types.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if types.len() != layers || types.iter().any(|t| ![WINDOWED, WHOLE].contains(t)) {
            faults.add(format!("`layer_types` is not a list of {layers} words {WINDOWED} or {WHOLE}"));
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

/// Puts the fields of a config's windows among others. Those that were read stay if they say the same.
pub(super) fn write(config: &LlamaConfig, value: &mut Value) {
    let told = |fields: &Map<String, Value>| {
        let mut faults = Faults::default();
        let windows = read(fields, config, &mut faults);
        let stands = FIELDS.iter().any(|field| fields.contains_key(*field));
        stands && faults.0.is_empty() && same(config, &LlamaConfig { windows, ..config.clone() })
    };
    // A llama's fields tell of no window.
    if config.kind == LlamaKind::Llama || value.as_object().is_some_and(told) {
        return;
    }
    if let Some(fields) = value.as_object_mut() {
        FIELDS.iter().for_each(|field| drop(fields.remove(*field)));
    }
    let windows = hiding(config);
    let size = windows.iter().flatten().next();
    match (config.kind, size) {
        // Without the field, the default of a mistral is a window.
        (LlamaKind::Mistral | LlamaKind::Mixtral, _) => value["sliding_window"] = json!(size),
        (LlamaKind::Qwen3Moe, Some(size)) => {
            value["use_sliding_window"] = json!(true);
            value["sliding_window"] = json!(size);
        }
        (_, None) => {}
        (_, Some(size)) => {
            let kind = |window: &Option<usize>| if window.is_some() { WINDOWED } else { WHOLE };
            value["use_sliding_window"] = json!(true);
            value["sliding_window"] = json!(size);
            value["layer_types"] = windows.iter().map(kind).collect();
        }
    }
}

/// Whether all blocks of a member have the same window, or none has one.
fn all_alike(kind: LlamaKind) -> bool {
    matches!(kind, LlamaKind::Mistral | LlamaKind::Mixtral | LlamaKind::Qwen3Moe)
}

/// Whether two configs hide the same keys.
pub(super) fn same(a: &LlamaConfig, b: &LlamaConfig) -> bool {
    hiding(a) == hiding(b)
}

/// The window of each block, where it hides any key.
fn hiding(config: &LlamaConfig) -> Vec<Option<usize>> {
    let hides = |keys: &usize| *keys < config.max_position_embeddings;
    (0..config.num_hidden_layers).map(|layer| config.window(layer).filter(hides)).collect()
}
