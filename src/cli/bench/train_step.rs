//! Training-step benchmarks of presets.

use super::measurement::{Bench, check};
use super::training::Training;
use shardgrad::nn::hf::Gpt2Config;
use shardgrad::{Error, Kind, Result};

/// Preset, rows and sequence length of the quick benchmark.
const SMALL: (&str, usize, usize) = ("tiny", 8, 64);
/// Presets that are compared with other frameworks.
const LARGE: [(&str, usize, usize); 3] = [("s", 8, 128), ("m", 8, 256), ("l", 2, 256)];

/// Checks that losses match one rank, then measures.
pub(super) fn run(bench: &Bench) -> Result<()> {
    on_meshes(bench, SMALL, &["dp=2", "tp=2", "dp=2,tp=2"])
}

/// The same for large presets.
pub(super) fn run_large(bench: &Bench) -> Result<()> {
    LARGE.into_iter().try_for_each(|preset| on_meshes(bench, preset, &["dp=2", "tp=2"]))
}

fn on_meshes(bench: &Bench, (name, rows, seq): (&str, usize, usize), meshes: &[&str]) -> Result<()> {
    let config =
        Gpt2Config::preset(name).ok_or_else(|| Error::new(Kind::Config, format!("no preset `{name}`")))?;
    let case = format!("{name} f32, {rows} x {seq} tokens");
    let one = Training::new(config.clone(), rows, seq);
    // With initial weights all tokens are about equally likely.
    let uniform = (config.vocab_size as f64).ln();
    let losses = one.run()?.losses;
    check("the first loss", &losses[..1], &[uniform], 0.05)?;
    one.report(bench, "train_step", &case, &losses)?;
    for mesh in meshes {
        let split = Training { mesh: (*mesh).to_string(), ..one.clone() };
        split.report(bench, "train_step", &case, &losses)?;
    }
    Ok(())
}
