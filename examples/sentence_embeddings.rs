//! Sentence embeddings by a BERT encoder from a Hugging Face folder, with tensor parallelism over two ranks: mean pooling over tokens, normalized
//! to unit length. Prints one JSON list per sentence.
//! `cargo run --release --features tokenizers --example sentence_embeddings -- DIR [SENTENCE..]`

#![allow(clippy::print_stdout, reason = "an example talks to people")]

use shardgrad::nn::{Bert, ModelConfig};
use shardgrad::prelude::*;
use std::path::Path;
use tokenizers::Tokenizer;

const EXAMPLES: [&str; 3] =
    ["A cat sat on the mat.", "There is a cat on the rug.", "Tensors are split over the ranks of a mesh."];

/// Tokenizes sentences to padded rows; returns shape, token ids and attention mask.
fn read(dir: &Path, sentences: &[String]) -> Result<([usize; 2], Vec<i64>, Vec<i64>)> {
    let failed = |e| Error::new(Kind::Data, format!("{}: {e}", dir.join("tokenizer.json").display()));
    let mut tokenizer = Tokenizer::from_file(dir.join("tokenizer.json")).map_err(failed)?;
    tokenizer.with_padding(None);
    let rows = tokenizer.encode_batch(sentences.to_vec(), true).map_err(failed)?;
    let longest = rows.iter().map(|row| row.get_ids().len()).max().unwrap_or(0);
    let padded = |row: &[u32]| -> Vec<i64> {
        let end = std::iter::repeat_n(0, longest - row.len());
        row.iter().copied().map(i64::from).chain(end).collect()
    };
    let ids = rows.iter().flat_map(|row| padded(row.get_ids())).collect();
    let mask = rows.iter().flat_map(|row| padded(&vec![1; row.get_ids().len()])).collect();
    Ok(([rows.len(), longest], ids, mask))
}

/// Returns the embedding of each sentence.
fn embed(rank: &Rank, dir: &Path, sentences: &[String]) -> Result<Vec<Vec<f64>>> {
    let ModelConfig::Bert(config) = ModelConfig::read(dir)? else {
        return Err(Error::new(Kind::Config, format!("{} is not a BERT model", dir.display())));
    };
    let model = Model::new(rank, Bert::new(&config), &Bert::plan(&config), 0)?;
    model.load(dir)?;
    let (shape, ids, mask) = read(dir, sentences)?;
    let tape = model.inference_tape();
    let ids = tape.constant(Tensor::from_host(rank, &shape, &ids)?);
    let mask = tape.constant(Tensor::from_host(rank, &shape, &mask)?);
    let hidden = model.hidden_states(&ids, Some(&mask), None);
    let sums = hidden.einsum("b t d, b t -> b d", &mask.cast(DType::F32)).tensor().to_f64()?;
    // Normalization makes the sum equivalent to the mean.
    let unit = |row: &[f64]| {
        let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        row.iter().map(|x| x / length).collect()
    };
    Ok(sums.chunks_exact(config.hidden_size).map(unit).collect())
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let Some(dir) = args.next() else {
        println!("skipped: pass the folder of a BERT encoder with tokenizer.json, and sentences");
        return Ok(());
    };
    let given: Vec<String> = args.collect();
    let sentences = if given.is_empty() { EXAMPLES.map(String::from).to_vec() } else { given };
    let embedded = World::run(Mesh::parse("tp=2")?, |rank| embed(rank, Path::new(&dir), &sentences))?;
    for row in &embedded[0] {
        println!("{row:?}");
    }
    Ok(())
}
