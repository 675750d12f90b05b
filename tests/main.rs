//! The test binary of the root package, one module per subject. Unit tests of a crate are next to its code.

mod training_run;
mod consistency;
mod cli;
#[cfg(feature = "cuda")]
mod fake_gpu;
mod graph_capture;
mod ops_page;
mod errors;
mod silent_mistakes;
mod run_outcomes;
mod explain;
mod resume;
mod plan_files;
mod style_options;
#[cfg(feature = "cuda")]
mod async_collectives;
mod hf;
mod invariants;
mod memory_limits;
mod precision_options;
mod mutants;
mod pipeline_parallel;
mod pipeline_inference;
mod processes;
mod deterministic_option;
mod moved_run_folder;
mod context_parallel_runs;
mod ring_order;
mod expert_parallel_runs;
mod pipeline_schedules;
mod issue_order;
mod strangers;
mod signals;
mod not_finite;
mod packaging;
mod option_limits;
mod rendezvous;
mod eval_batches;
mod damaged_checkpoints;
mod inspect;
mod pack_cache;
mod training_steps;
mod grad_accumulation;
mod cookbook;
mod programs;
#[cfg(feature = "tokenizers")]
mod tokenizer;
mod tidy;
