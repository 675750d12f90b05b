//! The parts of a training step that work on tensors: control flags, gradient norm, overflow check, graph capture, consistency
//! of copies, and the optimizer's update.

pub mod control;
pub mod anomaly_report;
pub mod grad_norm;
pub mod overflow_check;
pub mod graph_capture;
pub mod consistency;
pub mod optimizer_step;
