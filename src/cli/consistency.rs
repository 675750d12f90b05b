//! Consistency of the inputs of ranks that are processes: data, tokenizer, config, weights and start step are compared when the ranks
//! connect, before the first step. Contents are compared by hash, because paths may differ between machines.

use super::ranks::Ranks;
use crate::data::{ContentHash, Sampler};
use crate::outputs::io_error;
use crate::tokenizer::TOKENIZER_FILE;
use shardgrad::Result;
use shardgrad::nn::ModelConfig;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Name of the compared group in error messages.
const START: &str = "starting points";
/// The file of a model folder with the end-of-text tokens.
const GENERATION_FILE: &str = "generation_config.json";

/// Adds the first step and the checkpoint of the run to the compared values.
///
/// # Errors
/// `Kind::Io` if a file of the checkpoint cannot be read.
pub(super) fn with_next_step_from(ranks: &Ranks, from: Option<(usize, &Path)>) -> Result<Ranks> {
    let next = match from {
        None => "1".to_string(),
        Some((step, dir)) => format!("{} (checkpoint with hash {})", step + 1, hash_of(&model_files(dir)?)?),
    };
    Ok(with_next_step(ranks, &next))
}

/// Checks, on a rank that has no steps left, that no other rank has either.
///
/// # Errors
/// `Kind::Config` if another rank has steps left; as [`World::join`](shardgrad::dist::World::join).
pub(super) fn check_all_are_done(ranks: &Ranks) -> Result<()> {
    match ranks.are_processes() {
        true => with_next_step(ranks, "none").launch(|_| Ok(())).map(drop),
        false => Ok(()),
    }
}

fn with_next_step(ranks: &Ranks, next: &str) -> Ranks {
    ranks.with(|world| world.check_consistent(START, [("the next step".to_string(), next.to_string())]))
}

/// Adds hashes of the data, tokenizer, config and weights to the compared values. Ranks that are threads compare nothing: they share
/// these inputs.
///
/// # Errors
/// `Kind::Io` if a file cannot be read; as [`Sampler::content_hash`].
pub(super) fn with_input_hashes(
    ranks: &Ranks,
    config: &ModelConfig,
    model: Option<&Path>,
    data: Option<&Sampler>,
) -> Result<Ranks> {
    if !ranks.are_processes() {
        return Ok(ranks.clone());
    }
    let named = |name: &str| model.map(|dir| dir.join(name)).filter(|path| path.is_file());
    let mut inputs = Vec::new();
    if let Some(data) = data {
        inputs.push(("the hash of the data", data.content_hash()?));
    }
    inputs.push((
        "the hash of the tokenizer",
        match named(TOKENIZER_FILE) {
            Some(path) => hash_of(&[path])?,
            None => "none (bytes)".to_string(),
        },
    ));
    let mut shape = ContentHash::default();
    shape.add(config.to_json().as_bytes());
    if let Some(path) = named(GENERATION_FILE) {
        add_file(&mut shape, &path)?;
    }
    inputs.push(("the hash of the model's config", shape.hex()));
    inputs.push((
        "the hash of the weights",
        match model {
            Some(dir) => hash_of(&model_files(dir)?)?,
            None => "none (fresh weights)".to_string(),
        },
    ));
    let inputs = inputs.into_iter().map(|(name, value)| (name.to_string(), value));
    Ok(ranks.with(|world| world.check_consistent("inputs", inputs)))
}

/// Returns the safetensors files of a folder and the run state of a checkpoint, sorted by name.
fn model_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let is_read = |path: &PathBuf| {
        let is_state = path.file_name().is_some_and(|name| name == shardgrad::nn::checkpoint::STATE_FILE);
        path.is_file() && (is_state || path.extension().is_some_and(|e| e == "safetensors"))
    };
    let found = fs::read_dir(dir).and_then(|entries| {
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<PathBuf>>>()
    });
    let mut files: Vec<PathBuf> =
        found.map_err(|e| io_error("read", dir, &e))?.into_iter().filter(is_read).collect();
    files.sort();
    Ok(files)
}

/// Returns the hash of the names and contents of files.
fn hash_of(files: &[PathBuf]) -> Result<String> {
    let mut hash = ContentHash::default();
    files.iter().try_for_each(|path| add_file(&mut hash, path))?;
    Ok(hash.hex())
}

fn add_file(hash: &mut ContentHash, path: &Path) -> Result<()> {
    let failed = |e: std::io::Error| io_error("read", path, &e);
    let file = File::open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    hash.add(path.file_name().unwrap_or_default().as_encoded_bytes());
    hash.add_contents(found.len(), |at, part| file.read_exact_at(part, at).map_err(failed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;
    use shardgrad::Kind;

    #[test]
    fn folder_hash_covers_tensors_and_state() {
        let hash = |files: &[(&str, &str)]| {
            let dir = Scratch::new();
            files.iter().for_each(|(name, text)| drop(dir.file(name, text)));
            hash_of(&model_files(&dir.path("")).unwrap()).unwrap()
        };
        let (weights, state) = (("model.safetensors", "abc"), (shardgrad::nn::checkpoint::STATE_FILE, "{}"));
        let own = hash(&[weights, state]);
        assert_eq!(own, hash(&[state, weights, ("README.md", "x")]));
        assert_ne!(own, hash(&[("model.safetensors", "abd"), state]));
        assert_ne!(own, hash(&[("other.safetensors", "abc"), state]));
        assert_ne!(own, hash(&[weights]));
        assert_eq!(model_files(Path::new("/no/such/folder")).unwrap_err().kind(), Kind::Io);
    }
}
