//! Names of the files of model folders and checkpoints.

/// Config of a model.
pub const CONFIG_FILE: &str = "config.json";
/// Weights of a model.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// Index of weights in several files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Generation settings of a model.
pub(crate) const GENERATION_FILE: &str = "generation_config.json";
/// Optimizer state in a checkpoint.
pub const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// Run state in a checkpoint, with the name that the Hugging Face Trainer uses.
pub const STATE_FILE: &str = "trainer_state.json";

/// Largest size of a config file in bytes.
pub(crate) const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Returns the name of one of several files of weights, counted from 1.
pub(crate) fn shard_name(i: usize, count: usize) -> String {
    format!("model-{i:05}-of-{count:05}.safetensors")
}

/// Whether this is a name that [`shard_name`] returns.
pub(crate) fn is_shard(name: &str) -> bool {
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    numbers.and_then(|numbers| numbers.split_once("-of-")).is_some_and(|(i, count)| {
        [i, count].iter().all(|n| n.len() >= 5 && n.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// Whether a save may write or remove a file of this name.
pub(crate) fn is_managed_name(name: &str) -> bool {
    [CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE].contains(&name) || is_shard(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_are_recognized() {
        assert!(is_shard(&shard_name(1, 4)) && is_shard(&shard_name(123_456, 234_567)));
        for other in [
            "model.safetensors",
            "model-1-of-4.safetensors",
            "model-00001-of-00004.bin",
            "model-00001-of-0000x.safetensors",
            "my-model-00001-of-00004.safetensors",
            "model-00001-of-00004.safetensors.index.json",
        ] {
            assert!(!is_shard(other), "{other}");
        }
    }
}
