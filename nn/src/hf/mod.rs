//! The Hugging Face folder layout, read and written as it is: `config.json` and `model.safetensors`.
//!
//! Pure file formats: bytes, names and shapes, but no tensor on a mesh. Files are read by position and never
//! mapped, so that a file that shrinks under a run is an error and not a signal.

mod disk;
pub mod header;
pub mod files;
pub mod config;
pub mod family;
pub mod folder;

pub use config::Gpt2Config;
pub use family::ModelConfig;
pub use files::{TensorFile, TensorWriter};
pub use folder::Weights;
pub use header::TensorInfo;
