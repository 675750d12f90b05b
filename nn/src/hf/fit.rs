//! What a config says, held against the headers of the weights beside it, before anything is made of its size.

use super::disk::{read_text, refuse};
use super::fields::{CONFIG_BYTES_MAX, CONFIG_FILE, WEIGHTS_FILE};
use super::folder::Weights;
use shardgrad_tensor::Result;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A matrix of a model: its name in files, and for each dim the field that tells its extent, and the extent.
pub(super) type Claim = (&'static str, [(&'static str, usize); 2]);

/// What a config tells of the tensors in files.
pub(super) struct Claims {
    /// What names in files may begin with, beside nothing.
    pub(super) prefix: &'static str,
    /// The field that counts the blocks, their number, and the part of names that the number of a block follows.
    pub(super) blocks: (&'static str, usize, &'static str),
    /// Matrices by which each large extent is known; those of blocks by the first.
    pub(super) matrices: Vec<Claim>,
}

/// The config file of a folder: its path and its text.
pub(super) fn config_text(dir: &Path) -> Result<(PathBuf, String)> {
    let help = format!("a model folder holds {CONFIG_FILE} and {WEIGHTS_FILE}");
    let text = read_text(dir, CONFIG_FILE, CONFIG_BYTES_MAX).map_err(|e| e.detail("help", help))?;
    Ok((dir.join(CONFIG_FILE), text))
}

impl Claims {
    /// Refuses a config of another model than the weights of its folder; one without weights fits. No tensor is read. What
    /// else does not fit is told by whoever loads.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the fields, and as [`Weights::open`] if there are weights.
    pub(super) fn check(&self, dir: &Path) -> Result<()> {
        let Some(weights) = Weights::find(dir)? else { return Ok(()) };
        let faults = self.faults(&weights);
        if faults.is_empty() {
            return Ok(());
        }
        let error = refuse(&dir.join(CONFIG_FILE), "describes another model than the weights beside it");
        let error = faults.into_iter().fold(error, |error, fault| error.detail("field", fault));
        let name = weights.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        Err(error.detail("help", format!("take {CONFIG_FILE} and {name} from the same model")))
    }

    fn faults(&self, weights: &Weights) -> Vec<String> {
        let mut faults = Vec::new();
        let (field, count, part) = self.blocks;
        let found = blocks(weights, part);
        if found != count {
            faults.push(format!("`{field}` is {count}, the files hold {found} blocks"));
        }
        let numel = |shape: &[usize]| shape.iter().map(|n| *n as u128).product::<u128>();
        let held: u128 = weights.tensors().map(|t| numel(&t.shape)).sum();
        for (name, dims) in &self.matrices {
            let tensor = weights.get(&format!("{}{name}", self.prefix)).or_else(|| weights.get(name));
            match tensor {
                Some(tensor) if tensor.shape.len() == dims.len() => {
                    let other = dims.iter().zip(&tensor.shape).filter(|((_, extent), held)| extent != *held);
                    faults.extend(other.map(|((field, extent), _)| {
                        format!("`{field}` is {extent}, the files hold {} {:?}", tensor.name, tensor.shape)
                    }));
                }
                // One that lacks is told when the model is loaded; first it must not be made, larger than all that is there.
                _ => {
                    let [(rows, m), (columns, n)] = *dims;
                    if numel(&[m, n]) > held {
                        faults
                            .push(format!("`{rows}` is {m}, `{columns}` {n}, the files hold {held} numbers"));
                    }
                }
            }
        }
        faults
    }
}

/// The number of blocks in files, each of which has a number behind a part of its names.
fn blocks(weights: &Weights, part: &str) -> usize {
    let number = |name: &str| {
        let mut parts = name.split('.').skip_while(|found| *found != part).skip(1);
        parts.next().and_then(|number| number.parse::<usize>().ok())
    };
    weights.tensors().filter_map(|t| number(&t.name)).collect::<BTreeSet<_>>().len()
}

#[cfg(test)]
mod tests {
    use super::super::disk::scratch::Scratch;
    use super::super::family::ModelConfig;
    use super::super::files::TensorWriter;
    use shardgrad_tensor::{DType, Kind};

    /// A folder of a config whose text is changed, beside weights of no numbers but right headers.
    fn told(family: &str, tensors: &[(&str, [usize; 2])], from: &str, to: &str) -> Result<(), Vec<String>> {
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
                error.message().ends_with("config.json: describes another model than the weights beside it")
            );
            let fields = error.details().iter().filter(|(label, _)| *label == "field");
            fields.map(|(_, text)| text.clone()).collect()
        })
    }

    #[test]
    fn numbers_that_the_files_belie_are_named() {
        let gpt2: Vec<(String, [usize; 2])> = (0..4)
            .map(|i| (format!("transformer.h.{i}.mlp.c_fc.weight"), [128, 512]))
            .chain([("wte.weight".to_string(), [256, 128]), ("wpe.weight".to_string(), [64, 128])])
            .collect();
        let gpt2: Vec<(&str, [usize; 2])> = gpt2.iter().map(|(n, s)| (n.as_str(), *s)).collect();
        let of = |from: &str, to: &str| told("tiny", &gpt2, from, to).unwrap_err().join("; ");
        assert_eq!(told("tiny", &gpt2, "{", "{"), Ok(()));
        assert_eq!(of("\"n_layer\": 4", "\"n_layer\": 4000"), "`n_layer` is 4000, the files hold 4 blocks");
        assert_eq!(
            of("\"vocab_size\": 256", "\"vocab_size\": 16777216"),
            "`vocab_size` is 16777216, the files hold wte.weight [256, 128]"
        );
        assert_eq!(
            of("\"n_positions\": 64", "\"n_positions\": 16777216"),
            "`n_positions` is 16777216, the files hold wpe.weight [64, 128]"
        );
        assert_eq!(
            of("\"n_inner\": null", "\"n_inner\": 16777216"),
            "`n_inner` is 16777216, the files hold transformer.h.0.mlp.c_fc.weight [128, 512]"
        );
        let wide = of("\"n_embd\": 128", "\"n_embd\": 16777216");
        assert!(wide.contains("`n_embd` is 16777216, the files hold wte.weight [256, 128]"), "{wide}");
        let lacking =
            told("tiny", &gpt2[..4], "\"vocab_size\": 256", "\"vocab_size\": 16777216").unwrap_err();
        assert_eq!(lacking, ["`vocab_size` is 16777216, `n_embd` 128, the files hold 262144 numbers"]);
    }

    #[test]
    fn names_of_the_other_families_are_found() {
        let llama = [
            ("model.embed_tokens.weight", [256, 128]),
            ("model.layers.0.mlp.gate_proj.weight", [352, 128]),
            ("model.layers.0.self_attn.q_proj.weight", [128, 128]),
            ("model.layers.0.self_attn.k_proj.weight", [64, 128]),
            ("model.layers.1.x", [1, 1]),
            ("model.layers.2.x", [1, 1]),
            ("model.layers.3.x", [1, 1]),
        ];
        let of = |from: &str, to: &str| told("llama-tiny", &llama, from, to).unwrap_err().join("; ");
        assert_eq!(told("llama-tiny", &llama, "{", "{"), Ok(()));
        assert_eq!(
            of("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5"),
            "`num_hidden_layers` is 5, the files hold 4 blocks"
        );
        assert_eq!(
            of("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4"),
            "`num_key_value_heads` x `head_dim` is 128, the files hold model.layers.0.self_attn.k_proj.weight [64, 128]"
        );
        let head = of("\"head_dim\": 32", "\"head_dim\": 16777216");
        assert!(head.starts_with("`num_attention_heads` x `head_dim` is 67108864, the files"), "{head}");
        assert_eq!(
            of("\"intermediate_size\": 352", "\"intermediate_size\": 9"),
            "`intermediate_size` is 9, the files hold model.layers.0.mlp.gate_proj.weight [352, 128]"
        );
        let bert = [("bert.embeddings.token_type_embeddings.weight", [3, 768])];
        let told = told("bert-base", &bert, "{", "{").unwrap_err();
        assert_eq!(told[0], "`num_hidden_layers` is 12, the files hold 0 blocks");
        assert_eq!(told[1], "`vocab_size` is 30522, `hidden_size` 768, the files hold 2304 numbers");
        let types =
            "`type_vocab_size` is 2, the files hold bert.embeddings.token_type_embeddings.weight [3, 768]";
        assert!(told.contains(&types.to_string()), "{told:?}");
    }
}
