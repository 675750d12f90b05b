//! Checkpoints of a run: when they are saved, which one a run resumes from, the model folder, and the rescue of weights
//! when a world fails. The formats and the atomic replacement are those of [`shardgrad::nn::checkpoint`].

pub(crate) mod model_folder;
pub(crate) mod save;
mod sound_checkpoint;
pub(crate) mod resume;
pub(crate) mod rescue;
