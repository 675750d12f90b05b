//! What a checkpoint tells of a run beside tensors: `trainer_state.json`.

use super::disk::{read_text, refuse, write_text};
use crate::optim::LossScale;
use serde::{Deserialize, Serialize};
use shardgrad_tensor::Result;
use std::collections::BTreeMap;
use std::path::Path;

/// The file that tells where a run stands, in a checkpoint; named as the Hugging Face Trainer names it.
pub const STATE_FILE: &str = "trainer_state.json";
/// The file of what the optimizer keeps, in a checkpoint.
pub const OPTIMIZER_FILE: &str = "optimizer.safetensors";

/// The version of the format.
const VERSION: u64 = 1;
/// No state is longer than this.
const STATE_BYTES_MAX: u64 = 1 << 24;

/// Where a run stands beside its weights and what its optimizer keeps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunState {
    /// How many steps were taken, those that a loss scale left out too: the number of the next one, from 0.
    pub step: u64,
    /// By what the next loss is multiplied, where losses are scaled.
    pub loss_scale: Option<LossScale>,
    /// What the program that trains wants to find again, by name.
    pub notes: BTreeMap<String, String>,
}

/// An optimizer, as a checkpoint tells of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Told {
    /// Its settings, for people.
    pub(crate) settings: String,
    /// What it keeps of a parameter.
    pub(crate) keeps: Vec<String>,
    pub(crate) num_steps: u64,
    /// The digest of its file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<String>,
}

/// The text of the file.
#[derive(Serialize, Deserialize)]
struct Text {
    version: u64,
    global_step: u64,
    optimizer: Told,
    /// The digest of the files of weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights_digest: Option<String>,
    loss_scale: Option<Scale>,
    notes: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
struct Scale {
    factor: f64,
    good_steps: u32,
}

/// Only the version, which says how to read the rest.
#[derive(Deserialize)]
struct Version {
    version: u64,
}

impl RunState {
    /// Reads what a checkpoint tells.
    ///
    /// # Errors
    /// `Kind::Checkpoint` naming the file if it is missing, cannot be read, or is of another version; `Kind::Io` if the system
    /// refuses.
    pub fn read(dir: &Path) -> Result<RunState> {
        RunState::read_all(dir).map(|(state, ..)| state)
    }

    /// [`RunState::read`], the optimizer, and the digest of the weights, if it is told.
    pub(crate) fn read_all(dir: &Path) -> Result<(RunState, Told, Option<String>)> {
        let path = dir.join(STATE_FILE);
        let text = read_text(dir, STATE_FILE, STATE_BYTES_MAX)?;
        let bad =
            |e: serde_json::Error| refuse(&path, format_args!("cannot be read as the state of a run: {e}"));
        let Version { version } = serde_json::from_str(&text).map_err(bad)?;
        if version != VERSION {
            let why = format_args!("is of version {version} of the format, of which {VERSION} is read");
            return Err(refuse(&path, why).detail("help", "go on with the release that wrote it"));
        }
        let Text { global_step: step, optimizer, weights_digest, loss_scale, notes, .. } =
            serde_json::from_str(&text).map_err(bad)?;
        if let Some(Scale { factor, .. }) =
            loss_scale.as_ref().filter(|s| !(s.factor > 0.0 && s.factor.is_finite()))
        {
            return Err(refuse(&path, format_args!("has a loss scale of {factor}, which scales nothing")));
        }
        let loss_scale = loss_scale.map(|Scale { factor, good_steps }| LossScale::new(factor, good_steps));
        Ok((RunState { step, loss_scale, notes }, optimizer, weights_digest))
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses; `Kind::Checkpoint` for a loss scale that no file can hold.
    pub(crate) fn write(&self, dir: &Path, optimizer: Told, weights_digest: Option<String>) -> Result<()> {
        let path = dir.join(STATE_FILE);
        let scale = |s: LossScale| Scale { factor: s.factor(), good_steps: s.good_steps() };
        let (loss_scale, notes) = (self.loss_scale.map(scale), self.notes.clone());
        let (version, global_step) = (VERSION, self.step);
        let text = Text { version, global_step, optimizer, weights_digest, loss_scale, notes };
        let text = serde_json::to_string_pretty(&text).map_err(|e| refuse(&path, e))?;
        write_text(&path, &(text + "\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk::scratch::Scratch;
    use super::*;
    use shardgrad_tensor::Kind;

    #[test]
    fn a_loss_scale_comes_back_bit_for_bit() {
        let dir = Scratch::new();
        let optimizer = Told { settings: String::new(), keeps: Vec::new(), num_steps: 0, digest: None };
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
    fn what_is_written_is_read_back_and_the_rest_is_refused() {
        let dir = Scratch::new();
        let notes = BTreeMap::from([("seed".to_string(), "7".to_string())]);
        let (settings, keeps) = ("SGD".to_string(), vec!["m".to_string()]);
        let optimizer = Told { settings, keeps, num_steps: 6, digest: Some("0123".to_string()) };
        for loss_scale in [None, Some(LossScale::new(0.1, 1999))] {
            let state = RunState { step: 8, loss_scale, notes: notes.clone() };
            let weights = Some("4567".to_string());
            state.write(&dir.path(""), optimizer.clone(), weights.clone()).unwrap();
            assert_eq!(RunState::read_all(&dir.path("")).unwrap(), (state, optimizer.clone(), weights));
        }
        let whole = std::fs::read_to_string(dir.path(STATE_FILE)).unwrap();
        for (text, why) in [
            (whole[..whole.len() / 2].to_string(), "cannot be read as the state of a run: EOF"),
            ("{}".to_string(), "missing field `version`"),
            (
                whole.replace("\"version\": 1", "\"version\": 2"),
                "is of version 2 of the format, of which 1 is read",
            ),
            (whole.replace("global_step", "step"), "missing field `global_step`"),
            (whole.replace("0.1", "-1.0"), "has a loss scale of -1"),
        ] {
            dir.file(STATE_FILE, text.as_bytes());
            let error = RunState::read(&dir.path("")).unwrap_err();
            assert!(error.kind() == Kind::Checkpoint && error.message().contains(why), "{error}");
        }
    }
}
