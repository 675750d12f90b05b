//! What executes ops on one rank: local tensors and kernel launches, the context of a rank, and its caches of inferences and plans.

mod direct_mapped_cache;
pub mod flag_guard;
pub(crate) mod inference_cache;
pub mod plan_cache;
pub mod context;
pub mod local_tensor;
pub(crate) mod anomaly;
