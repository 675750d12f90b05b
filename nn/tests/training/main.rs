//! Models on meshes of threads against one rank: parameter names, initial values, losses, gradients and steps; and
//! counts of the collectives.

mod support;
mod layers;
mod fused_residual;
mod gradcheck;
mod composite_ops;
mod parameter_names;
mod watch;
mod error_sites;
mod mesh_parity;
mod gradient_accumulation;
mod exact_mean;
mod auxiliary;
mod traces;
mod llama;
mod context_parallel;
mod mixture_of_experts;
mod decoding;
mod optimizer_steps;
mod custom_optimizers;
mod mixed_precision;
mod loss_scaling;
mod dropout;
mod save_and_load;
mod plans;
mod sharded_storage;
mod sequence_parallel;
mod adapters;
mod failed_saves;
mod checkpoints;
mod bad_files;
mod checksums;
mod fuzz;
