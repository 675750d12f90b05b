//! Hugging Face model folders: `config.json`, `model.safetensors` and the index of sharded weights; and checkpoint folders.
//!
//! File formats only: bytes, names and shapes, without tensors on a mesh. Files are read by position and never memory-mapped, so
//! that a file truncated during a run causes an error, not a signal.

mod disk;
mod digest;
pub mod safetensors_header;
mod checksum;
pub mod safetensors_file;
mod partial_read;
mod config_fields;
mod sidecar;
mod commit;
mod folder_lock;
mod run_state;
mod atomic_folder;
mod checkpoints;
mod stacked_experts;
pub mod weights;
pub mod weights_writer;
mod config_check;
mod rope;
pub mod gpt2;
pub mod llama;
pub mod bert;
pub mod model_config;

pub(crate) use atomic_folder::AtomicFolder;
pub use bert::{BertConfig, BertHead};
pub use checkpoints::Checkpoints;
pub use commit::check_replaceable;
pub use config_fields::{CONFIG_FILE, WEIGHTS_FILE};
pub use digest::Digest;
pub(crate) use disk::check_space;
pub use disk::{open_within, read_text};
pub use gpt2::Gpt2Config;
pub use llama::{ExpertsConfig, LlamaConfig, LlamaKind};
pub use model_config::ModelConfig;
pub use rope::{RopeConfig, RopeScaling};
pub(crate) use run_state::OptimizerRecord;
pub use run_state::{OPTIMIZER_FILE, RunState, STATE_FILE};
pub(crate) use safetensors_file::SaveId;
pub use safetensors_file::{TensorFile, TensorWriter};
pub use safetensors_header::TensorInfo;
pub use sidecar::SidecarFile;
pub use weights::Weights;
pub use weights_writer::WeightsWriter;
