//! The tape, activation checkpointing, pipelines and fused ops on meshes of threads, against one rank, loops on the host and values computed
//! by hand; and random programs.

mod tape;
mod operators;
mod special_values;
mod lifetimes;
mod unwinding;
mod user_ops;
mod decompositions;
mod activation_checkpoint;
mod gradient_accumulation;
mod gathers_ahead;
mod gated_scan;
mod experts;
mod ring_attention;
mod pipeline;
mod unet;
mod fuzz;
