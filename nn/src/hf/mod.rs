//! The Hugging Face folder layout, read and written as it is: `config.json` and `model.safetensors`.
//!
//! Pure file formats: bytes, names and shapes, but no tensor on a mesh. Files are read by position and never
//! mapped, so that a file that shrinks under a run is an error and not a signal.

mod disk;
mod digest;
mod distinct;
pub mod header;
mod checksum;
pub mod files;
mod part;
mod fields;
mod companion;
mod commit;
mod turn;
mod run_state;
mod whole;
mod stacks;
pub mod folder;
pub mod shards;
mod fit;
mod rotary;
pub mod gpt2;
pub mod llama;
pub mod bert;
pub mod family;

pub use bert::{BertConfig, BertHead};
pub use commit::check_replaceable;
pub use companion::Companion;
pub use digest::Digest;
pub(crate) use disk::check_space;
pub use disk::{open_within, read_text};
pub use family::ModelConfig;
pub use fields::{CONFIG_FILE, WEIGHTS_FILE};
pub(crate) use files::Save;
pub use files::{TensorFile, TensorWriter};
pub use folder::Weights;
pub use gpt2::Gpt2Config;
pub use header::TensorInfo;
pub use llama::{ExpertsConfig, LlamaConfig, LlamaKind};
pub use rotary::{Rotary, RotaryScaling};
pub(crate) use run_state::Told;
pub use run_state::{OPTIMIZER_FILE, RunState, STATE_FILE};
pub use shards::WeightsWriter;
pub use whole::Checkpoints;
pub(crate) use whole::WholeFolder;
