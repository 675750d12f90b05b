//! State of a run: the state file, the files of a checkpoint, and the checkpoints in the folder of a run.

pub(crate) mod run_state;
pub(crate) mod checkpoints;
pub(crate) mod checkpoint_files;
