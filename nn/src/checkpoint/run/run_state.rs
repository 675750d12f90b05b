//! Run state of a checkpoint, besides its tensors: `trainer_state.json`.

use crate::checkpoint::atomic::atomic_file::write_text;
use crate::checkpoint::atomic::disk::{file_error, read_text};
use crate::checkpoint::file_names::STATE_FILE;
use crate::optim::LossScale;
use serde::{Deserialize, Serialize};
use shardgrad_tensor::Result;
use std::collections::BTreeMap;
use std::path::Path;

/// Version of the format.
const VERSION: u64 = 1;
/// Longest state file that is read, in bytes.
const STATE_BYTES_MAX: u64 = 1 << 24;

/// State of a run besides weights and optimizer state.
#[doc(alias = "TrainState")]
#[doc(alias = "TrainerState")]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunState {
    /// Number of steps taken, including those that loss scaling skipped; equals the number of the next step, from 0.
    pub step: u64,
    /// Loss scale of the next step; `None` without loss scaling.
    pub loss_scale: Option<LossScale>,
    /// The canonical sums of the run, if its bits do not depend on the mesh ([`Deterministic::Mesh`](crate::Deterministic::Mesh)).
    pub canonical_sums: Option<CanonicalSums>,
    /// Notes of the training program, by name.
    pub notes: BTreeMap<String, String>,
}

/// What decides the order of canonical sums; a run that resumes with another one would have other bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CanonicalSums {
    /// The version of the tree of sums.
    pub version: u64,
    /// The number of leaves of the batch.
    pub batch_leaves: usize,
    /// The number of leaves of all other sums; 0 in files of versions that had one leaf in the order of the kernels.
    #[serde(default)]
    pub sum_leaves: usize,
}

/// The optimizer, as `trainer_state.json` records it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct OptimizerRecord {
    /// Hyperparameters, for readers: [`Optimizer::describe`](crate::Optimizer::describe). Not parsed.
    pub(crate) settings: String,
    /// Names of the state tensors of a parameter.
    #[serde(rename = "keeps")]
    pub(crate) state_names: Vec<String>,
    pub(crate) num_steps: u64,
    /// Digest of the optimizer file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<String>,
}

/// Contents of the file.
#[derive(Serialize, Deserialize)]
struct StateJson {
    version: u64,
    global_step: u64,
    optimizer: OptimizerRecord,
    /// Digest of the files of weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights_digest: Option<String>,
    loss_scale: Option<LossScaleJson>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    canonical_sums: Option<CanonicalSums>,
    notes: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
struct LossScaleJson {
    factor: f64,
    good_steps: u32,
}

/// The version alone, which decides how the rest is read.
#[derive(Deserialize)]
struct Version {
    version: u64,
}

impl RunState {
    /// Reads the run state of a checkpoint.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the file if it is missing, cannot be read, or has another version; `Kind::Io` if the
    /// system refuses.
    pub fn read(dir: &Path) -> Result<RunState> {
        RunState::read_all(dir).map(|(state, ..)| state)
    }

    /// Reads the run state, the optimizer, and the digest of the weights, if there is one.
    pub(crate) fn read_all(dir: &Path) -> Result<(RunState, OptimizerRecord, Option<String>)> {
        let path = dir.join(STATE_FILE);
        let text = read_text(dir, STATE_FILE, STATE_BYTES_MAX)?;
        let parse_error =
            |e: serde_json::Error| file_error(&path, format_args!("cannot be parsed as a run state: {e}"));
        let Version { version } = serde_json::from_str(&text).map_err(parse_error)?;
        if version != VERSION {
            let why = format_args!("has format version {version}, this release reads version {VERSION}");
            return Err(file_error(&path, why).detail("help", "resume with the release that wrote it"));
        }
        let StateJson {
            global_step: step, optimizer, weights_digest, loss_scale, canonical_sums, notes, ..
        } = serde_json::from_str(&text).map_err(parse_error)?;
        if let Some(LossScaleJson { factor, .. }) =
            loss_scale.as_ref().filter(|s| !(s.factor > 0.0 && s.factor.is_finite()))
        {
            return Err(file_error(
                &path,
                format_args!("has the loss scale {factor}, which is not a finite number above 0"),
            ));
        }
        let loss_scale =
            loss_scale.map(|LossScaleJson { factor, good_steps }| LossScale::new(factor, good_steps));
        Ok((RunState { step, loss_scale, canonical_sums, notes }, optimizer, weights_digest))
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses; `Kind::Checkpoint` for a loss scale that JSON cannot represent.
    pub(crate) fn write(
        &self,
        dir: &Path,
        optimizer: OptimizerRecord,
        weights_digest: Option<String>,
    ) -> Result<()> {
        let path = dir.join(STATE_FILE);
        let scale = |s: LossScale| LossScaleJson { factor: s.factor(), good_steps: s.good_steps() };
        let (loss_scale, notes) = (self.loss_scale.map(scale), self.notes.clone());
        let (version, global_step) = (VERSION, self.step);
        let canonical_sums = self.canonical_sums;
        let text =
            StateJson { version, global_step, optimizer, weights_digest, loss_scale, canonical_sums, notes };
        let text = serde_json::to_string_pretty(&text).map_err(|e| file_error(&path, e))?;
        write_text(&path, &(text + "\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::atomic::disk::scratch::Scratch;
    use shardgrad_tensor::Kind;

    #[test]
    fn loss_scale_round_trips_bit_for_bit() {
        let dir = Scratch::new();
        let optimizer =
            OptimizerRecord { settings: String::new(), state_names: Vec::new(), num_steps: 0, digest: None };
        let mut bits = 0x1234_5678_9abc_def1u64;
        for _ in 0..64 {
            bits = bits.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            // From 2^-20 to 2^43, with all bits of the mantissa.
            let factor = f64::from_bits((1003 + (bits >> 58)) << 52 | bits & ((1 << 52) - 1));
            let state = RunState { loss_scale: Some(LossScale::new(factor, 0)), ..RunState::default() };
            state.write(&dir.path(""), optimizer.clone(), None).unwrap();
            let read = RunState::read(&dir.path("")).unwrap().loss_scale.unwrap().factor();
            assert_eq!(read.to_bits(), factor.to_bits(), "{factor}");
        }
    }

    #[test]
    fn run_state_round_trips_and_malformed_files_are_refused() {
        let dir = Scratch::new();
        let notes = BTreeMap::from([("seed".to_string(), "7".to_string())]);
        let (settings, state_names) = ("SGD".to_string(), vec!["m".to_string()]);
        let optimizer =
            OptimizerRecord { settings, state_names, num_steps: 6, digest: Some("0123".to_string()) };
        for loss_scale in [None, Some(LossScale::new(0.1, 1999))] {
            let canonical_sums =
                loss_scale.map(|_| CanonicalSums { version: 1, batch_leaves: 24, sum_leaves: 8 });
            let state = RunState { step: 8, loss_scale, canonical_sums, notes: notes.clone() };
            let weights = Some("4567".to_string());
            state.write(&dir.path(""), optimizer.clone(), weights.clone()).unwrap();
            assert_eq!(RunState::read_all(&dir.path("")).unwrap(), (state, optimizer.clone(), weights));
        }
        let whole = std::fs::read_to_string(dir.path(STATE_FILE)).unwrap();
        for (text, why) in [
            (whole[..whole.len() / 2].to_string(), "cannot be parsed as a run state: EOF"),
            ("{}".to_string(), "missing field `version`"),
            (
                whole.replace("\"version\": 1", "\"version\": 2"),
                "has format version 2, this release reads version 1",
            ),
            (whole.replace("global_step", "step"), "missing field `global_step`"),
            (whole.replace("0.1", "-1.0"), "has the loss scale -1"),
        ] {
            dir.file(STATE_FILE, text.as_bytes());
            let error = RunState::read(&dir.path("")).unwrap_err();
            assert!(error.kind() == Kind::Checkpoint && error.message().contains(why), "{error}");
        }
    }
}
