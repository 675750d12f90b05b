//! Saving and loading sharded models: from any mesh, on any other.

pub(crate) mod cast_rule;
pub(crate) mod gather;
pub(crate) mod param_checks;
pub(crate) mod save;
pub(crate) mod load_filter;
pub(crate) mod load;
pub(crate) mod optimizer_state;
pub(crate) mod weight_snapshot;
