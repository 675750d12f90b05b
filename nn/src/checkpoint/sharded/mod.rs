//! Saving and loading sharded models: from any mesh, on any other.

pub(crate) mod gather;
pub(crate) mod cast_rule;
pub(crate) mod save;
pub(crate) mod weight_snapshot;
