//! Replays a step with anomaly detection and reports, on every rank, the op that produced the first NaN or infinity.

use crate::execution::anomaly::AnomalyDetector;
use crate::execution::context::Context;
use crate::tensor::Tensor;
use crate::training_step::control::world_sum;
use shardgrad_dist::{Error, Kind, Rank, Result};
use std::panic::Location;

/// The op that produced the first NaN or infinity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstNonFinite {
    /// Labelled lines for an error: the op, the path in the model, the source line, the rank.
    pub lines: Vec<(&'static str, String)>,
    /// Whether an argument of the op was NaN although no op had produced it: a parameter or an input holds the NaN.
    pub is_input_nan: bool,
}

/// Runs `replay`, such as a step that failed, with anomaly detection, and returns the op that produced the first NaN or
/// infinity: the same on every rank, `None` if no op did. Two all_reduces over all axes after `replay`; every rank calls
/// this together and applies the same ops in `replay`.
///
/// # Errors
/// Errors of `replay` and of the collectives.
#[doc(alias = "detect_anomaly")]
#[doc(alias = "set_detect_anomaly")]
#[doc(alias = "debug_nans")]
#[doc(alias = "checkify")]
#[track_caller]
pub fn find_first_non_finite(
    rank: &Rank,
    replay: impl FnOnce() -> Result<()>,
) -> Result<Option<FirstNonFinite>> {
    let site = Location::caller();
    AnomalyDetector::begin(rank);
    let done = replay();
    let found = AnomalyDetector::end(rank);
    done?;
    let text = found.as_ref().map(|f| f.lines.join("\n")).unwrap_or_default();
    // For each rank of the whole world: the number of the op, counted from 1, the origin of the value, the length of
    // the text, and whether an argument of the op was NaN.
    let world = rank.world();
    let (num_ranks, me) = (world.mesh().num_ranks(), world.index());
    let mut word = vec![0.0; 4 * num_ranks];
    if let Some(found) = &found {
        let source = f64::from(found.source as u8);
        let is_input_nan = f64::from(u8::from(found.is_input_nan));
        let own = [(found.number + 1) as f64, source, text.len() as f64, is_input_nan];
        word[4 * me..4 * me + 4].copy_from_slice(&own);
    }
    let word = world_sum(world, &word, site)?;
    // An op that produced the value precedes ops that received it, which may belong to a later pipeline stage.
    let key = |r: &usize| (word[4 * r + 1] as u64, word[4 * r] as u64, *r);
    let Some(first) = (0..num_ranks).filter(|r| word[4 * r] > 0.0).min_by_key(key) else { return Ok(None) };
    let byte = |i: usize| if me == first { f64::from(text.as_bytes()[i]) } else { 0.0 };
    let bytes: Vec<f64> = (0..word[4 * first + 2] as usize).map(byte).collect();
    let bytes = world_sum(world, &bytes, site)?.into_iter().map(|b| b as u8).collect();
    let text = String::from_utf8(bytes).map_err(|e| Error::new(Kind::Collective, e.to_string()))?;
    let lines = ["first", "at", "called at", "rank"].into_iter().zip(text.lines().map(String::from));
    let lines = lines.filter(|(_, text)| !text.is_empty()).collect();
    Ok(Some(FirstNonFinite { lines, is_input_nan: word[4 * first + 3] > 0.0 }))
}

/// Shows anomaly detection a tensor received from another pipeline stage, so that the ops of this stage are not blamed
/// for its values.
///
/// # Errors
/// Errors of the device.
pub fn note_received(tensor: &Tensor) -> Result<()> {
    let rank = tensor.rank();
    if Context::of(rank).detects_anomalies() {
        AnomalyDetector::inspect_received(rank, tensor.local())
    } else {
        Ok(())
    }
}
