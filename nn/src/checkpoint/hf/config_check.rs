//! Checks a config against the headers of the weights in its folder, before anything of the config's size is allocated.

use crate::checkpoint::atomic::disk::{file_error, read_text};
use crate::checkpoint::file_names::{CONFIG_BYTES_MAX, CONFIG_FILE, WEIGHTS_FILE};
use crate::checkpoint::tensors::weights::Weights;
use shardgrad_tensor::Result;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A matrix of a model: its name in files, and for each dim the config field and its extent.
pub(super) type ExpectedShape = (&'static str, [(&'static str, usize); 2]);

/// The tensor shapes that a config implies for its weights.
pub(super) struct ExpectedShapes {
    /// An optional prefix of names in files.
    pub(super) prefix: &'static str,
    /// The number of blocks.
    pub(super) blocks: BlockCount,
    /// Matrices that determine every large extent; of the blocks only the first.
    pub(super) matrices: Vec<ExpectedShape>,
}

/// The number of blocks that a config implies.
#[derive(Clone, Copy)]
pub(super) struct BlockCount {
    /// The config field.
    pub(super) field: &'static str,
    pub(super) count: usize,
    /// The part of tensor names before the index of a block.
    pub(super) name_part: &'static str,
}

/// Reads the config file of a folder: its path and its text.
pub(super) fn config_text(dir: &Path) -> Result<(PathBuf, String)> {
    let help = format!("a model folder holds {CONFIG_FILE} and {WEIGHTS_FILE}");
    let text = read_text(dir, CONFIG_FILE, CONFIG_BYTES_MAX).map_err(|e| e.detail("help", help))?;
    Ok((dir.join(CONFIG_FILE), text))
}

impl ExpectedShapes {
    /// Rejects a config that does not fit the weights of its folder; without weights every config fits. Reads headers only. Loading
    /// reports all other mismatches.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the fields, and as [`Weights::open`] if there are weights.
    pub(super) fn check(&self, dir: &Path) -> Result<()> {
        let Some(weights) = Weights::find(dir)? else { return Ok(()) };
        let errors = self.errors(&weights);
        if errors.is_empty() {
            return Ok(());
        }
        let error =
            file_error(&dir.join(CONFIG_FILE), "describes another model than the weights in the folder");
        let error = errors.into_iter().fold(error, |error, error_text| error.detail("field", error_text));
        let name = weights.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        Err(error.detail("help", format!("take {CONFIG_FILE} and {name} from the same model")))
    }

    fn errors(&self, weights: &Weights) -> Vec<String> {
        let mut errors = Vec::new();
        let BlockCount { field, count, name_part } = self.blocks;
        let found = count_blocks(weights, name_part);
        if found != count {
            errors.push(format!("`{field}` is {count}, but the files have {found} blocks"));
        }
        let numel = |shape: &[usize]| shape.iter().map(|n| *n as u128).product::<u128>();
        let held: u128 = weights.tensors().map(|t| numel(&t.shape)).sum();
        for (name, dims) in &self.matrices {
            let tensor = weights.get(&format!("{}{name}", self.prefix)).or_else(|| weights.get(name));
            match tensor {
                Some(tensor) if tensor.shape.len() == dims.len() => {
                    let other = dims.iter().zip(&tensor.shape).filter(|((_, extent), held)| extent != *held);
                    errors.extend(other.map(|((field, extent), _)| {
                        format!(
                            "`{field}` is {extent}, but the files have {} {:?}",
                            tensor.name, tensor.shape
                        )
                    }));
                }
                // Loading reports a missing tensor; here only a matrix larger than all weights together is an error, because the model
                // would be allocated before it is loaded.
                _ => {
                    let [(rows, m), (columns, n)] = *dims;
                    if numel(&[m, n]) > held {
                        errors.push(format!(
                            "`{rows}` is {m}, `{columns}` {n}, but the files have {held} elements in all"
                        ));
                    }
                }
            }
        }
        errors
    }
}

/// Counts the blocks in files by the distinct indices that follow `name_part` in tensor names.
fn count_blocks(weights: &Weights, name_part: &str) -> usize {
    let number = |name: &str| {
        let mut parts = name.split('.').skip_while(|part| *part != name_part).skip(1);
        parts.next().and_then(|number| number.parse::<usize>().ok())
    };
    weights.tensors().filter_map(|t| number(&t.name)).collect::<BTreeSet<_>>().len()
}

#[cfg(test)]
mod tests {
    use super::super::model_config::ModelConfig;
    use crate::checkpoint::atomic::disk::scratch::Scratch;
    use crate::checkpoint::tensors::safetensors_file::TensorWriter;
    use shardgrad_tensor::{DType, Kind};

    /// The errors of reading a folder of a modified config and weights with these shapes.
    fn errors_of(
        family: &str,
        tensors: &[(&str, [usize; 2])],
        from: &str,
        to: &str,
    ) -> Result<(), Vec<String>> {
        let dir = Scratch::new();
        let entries: Vec<_> = tensors.iter().map(|(n, s)| (n.to_string(), DType::U8, s.to_vec())).collect();
        let mut writer = TensorWriter::create(&dir.path("model.safetensors"), &entries).unwrap();
        for (name, _, shape) in &entries {
            writer.append(name, &vec![0; shape.iter().product()]).unwrap();
        }
        writer.finish().unwrap();
        let text = ModelConfig::preset(family).unwrap().to_json();
        assert!(text.contains(from), "{from}");
        dir.file("config.json", text.replacen(from, to, 1).as_bytes());
        ModelConfig::read(&dir.path("")).map(drop).map_err(|error| {
            assert_eq!(error.kind(), Kind::Checkpoint);
            assert!(
                error
                    .message()
                    .ends_with("config.json: describes another model than the weights in the folder")
            );
            let fields = error.details().iter().filter(|(label, _)| *label == "field");
            fields.map(|(_, text)| text.clone()).collect()
        })
    }

    #[test]
    fn config_fields_that_contradict_the_weights_are_named() {
        let gpt2: Vec<(String, [usize; 2])> = (0..4)
            .map(|i| (format!("transformer.h.{i}.mlp.c_fc.weight"), [128, 512]))
            .chain([("wte.weight".to_string(), [256, 128]), ("wpe.weight".to_string(), [64, 128])])
            .collect();
        let gpt2: Vec<(&str, [usize; 2])> = gpt2.iter().map(|(n, s)| (n.as_str(), *s)).collect();
        let of = |from: &str, to: &str| errors_of("tiny", &gpt2, from, to).unwrap_err().join("; ");
        assert_eq!(errors_of("tiny", &gpt2, "{", "{"), Ok(()));
        assert_eq!(
            of("\"n_layer\": 4", "\"n_layer\": 4000"),
            "`n_layer` is 4000, but the files have 4 blocks"
        );
        assert_eq!(
            of("\"vocab_size\": 256", "\"vocab_size\": 16777216"),
            "`vocab_size` is 16777216, but the files have wte.weight [256, 128]"
        );
        assert_eq!(
            of("\"n_positions\": 64", "\"n_positions\": 16777216"),
            "`n_positions` is 16777216, but the files have wpe.weight [64, 128]"
        );
        assert_eq!(
            of("\"n_inner\": null", "\"n_inner\": 16777216"),
            "`n_inner` is 16777216, but the files have transformer.h.0.mlp.c_fc.weight [128, 512]"
        );
        let wide = of("\"n_embd\": 128", "\"n_embd\": 16777216");
        assert!(wide.contains("`n_embd` is 16777216, but the files have wte.weight [256, 128]"), "{wide}");
        let lacking =
            errors_of("tiny", &gpt2[..4], "\"vocab_size\": 256", "\"vocab_size\": 16777216").unwrap_err();
        assert_eq!(
            lacking,
            ["`vocab_size` is 16777216, `n_embd` 128, but the files have 262144 elements in all"]
        );
    }

    #[test]
    fn llama_and_bert_configs_are_checked_too() {
        let llama = [
            ("model.embed_tokens.weight", [256, 128]),
            ("model.layers.0.mlp.gate_proj.weight", [352, 128]),
            ("model.layers.0.self_attn.q_proj.weight", [128, 128]),
            ("model.layers.0.self_attn.k_proj.weight", [64, 128]),
            ("model.layers.1.x", [1, 1]),
            ("model.layers.2.x", [1, 1]),
            ("model.layers.3.x", [1, 1]),
        ];
        let of = |from: &str, to: &str| errors_of("llama-tiny", &llama, from, to).unwrap_err().join("; ");
        assert_eq!(errors_of("llama-tiny", &llama, "{", "{"), Ok(()));
        assert_eq!(
            of("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5"),
            "`num_hidden_layers` is 5, but the files have 4 blocks"
        );
        assert_eq!(
            of("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4"),
            "`num_key_value_heads` x `head_dim` is 128, but the files have model.layers.0.self_attn.k_proj.weight [64, 128]"
        );
        let head = of("\"head_dim\": 32", "\"head_dim\": 16777216");
        assert!(head.starts_with("`num_attention_heads` x `head_dim` is 67108864, but the files"), "{head}");
        assert_eq!(
            of("\"intermediate_size\": 352", "\"intermediate_size\": 9"),
            "`intermediate_size` is 9, but the files have model.layers.0.mlp.gate_proj.weight [352, 128]"
        );
        let bert = [("bert.embeddings.token_type_embeddings.weight", [3, 768])];
        let found = errors_of("bert-base", &bert, "{", "{").unwrap_err();
        assert_eq!(found[0], "`num_hidden_layers` is 12, but the files have 0 blocks");
        assert_eq!(
            found[1],
            "`vocab_size` is 30522, `hidden_size` 768, but the files have 2304 elements in all"
        );
        let types = "`type_vocab_size` is 2, but the files have bert.embeddings.token_type_embeddings.weight [3, 768]";
        assert!(found.contains(&types.to_string()), "{found:?}");
    }
}
