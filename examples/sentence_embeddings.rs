//! Sentence embeddings by a BERT encoder of a Hugging Face folder, its heads split over two ranks: the mean of the vectors of
//! a sentence's tokens, brought to length 1. One JSON list a sentence.
//! `cargo run --release --features tokenizers --example sentence_embeddings -- DIR [SENTENCE..]`

#![allow(clippy::print_stdout, reason = "an example talks to people")]

use shardgrad::nn::{Bert, ModelConfig};
use shardgrad::prelude::*;
use std::path::Path;
use tokenizers::Tokenizer;

const USUAL: [&str; 3] =
    ["A cat sat on the mat.", "There is a cat on the rug.", "Tensors are split over the ranks of a mesh."];

/// Rows of tokens, filled up to one length, and where there are tokens.
fn read(dir: &Path, sentences: &[String]) -> Result<([usize; 2], Vec<i64>, Vec<i64>)> {
    let told = |e| Error::new(Kind::Data, format!("{}: {e}", dir.join("tokenizer.json").display()));
    let mut tokenizer = Tokenizer::from_file(dir.join("tokenizer.json")).map_err(told)?;
    tokenizer.with_padding(None);
    let rows = tokenizer.encode_batch(sentences.to_vec(), true).map_err(told)?;
    let longest = rows.iter().map(|row| row.get_ids().len()).max().unwrap_or(0);
    let filled = |row: &[u32]| -> Vec<i64> {
        let end = std::iter::repeat_n(0, longest - row.len());
        row.iter().copied().map(i64::from).chain(end).collect()
    };
    let ids = rows.iter().flat_map(|row| filled(row.get_ids())).collect();
    let mask = rows.iter().flat_map(|row| filled(&vec![1; row.get_ids().len()])).collect();
    Ok(([rows.len(), longest], ids, mask))
}

/// An embedding of each sentence.
fn embed(rank: &Rank, dir: &Path, sentences: &[String]) -> Result<Vec<Vec<f64>>> {
    let ModelConfig::Bert(config) = ModelConfig::read(dir)? else {
        return Err(Error::new(Kind::Config, format!("{} is no BERT", dir.display())));
    };
    let model = Model::new(rank, Bert::new(&config), &Bert::plan(&config), 0)?;
    model.load(dir)?;
    let (shape, ids, mask) = read(dir, sentences)?;
    let tape = model.inference_tape();
    let ids = tape.constant(Tensor::from_host(rank, &shape, &ids)?);
    let mask = tape.constant(Tensor::from_host(rank, &shape, &mask)?);
    let hidden = model.hidden_states(&ids, Some(&mask), None);
    let sums = hidden.einsum("b t d, b t -> b d", &mask.cast(DType::F32)).tensor().to_f64()?;
    // A mean is a sum of another length.
    let unit = |row: &[f64]| {
        let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        row.iter().map(|x| x / length).collect()
    };
    Ok(sums.chunks_exact(config.hidden_size).map(unit).collect())
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let Some(dir) = args.next() else {
        println!("skipped: name the folder of a BERT encoder with its tokenizer.json, and sentences");
        return Ok(());
    };
    let given: Vec<String> = args.collect();
    let sentences = if given.is_empty() { USUAL.map(String::from).to_vec() } else { given };
    let embedded = World::run(Mesh::parse("tp=2")?, |rank| embed(rank, Path::new(&dir), &sentences))?;
    for row in &embedded[0] {
        println!("{row:?}");
    }
    Ok(())
}
