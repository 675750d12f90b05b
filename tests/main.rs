//! The one test binary of the root package. Each module is one subject; a crate's own tests stand beside its code.

mod distance;
mod agreement;
mod cli;
#[cfg(feature = "cuda")]
mod card;
mod captured;
mod documents;
mod errors;
mod endings;
mod explain;
#[cfg(feature = "cuda")]
mod flights;
mod hf;
mod invariants;
mod limits;
mod llama;
mod mixed;
mod mutants;
mod pipelines;
mod processes;
mod moved_output;
mod context;
mod experts;
mod schedules;
mod signals;
mod not_finite;
mod packaging;
mod refusals;
mod rendezvous;
mod remainders;
mod resume;
mod damage;
mod inspect;
mod reuse;
mod steps;
mod sums;
#[cfg(feature = "tokenizers")]
mod tokenizer;
mod tidy;
