//! Pipelines: a recorded program cut into stages, and the lists of actions by which ranks run them.
//!
//! A schedule is data: a pure function makes it, [`Schedule::verify`] proves it before the first step, and
//! [`Runner`] follows it. Ranks of one stage work on a mesh without the pipeline axis
//! ([`Rank::slice`](shardgrad_dist::Rank::slice)), so layouts, ops and plans know nothing of stages.

mod action;
mod schedule;
mod verify;
mod simulate;
mod search;
mod named;
mod cut;
mod stage;
mod run;

pub use action::{Action, Schedule, Transfer};
pub use cut::Cut;
pub use named::NAMES;
pub use run::{Feed, Outcome, Passed, Runner};
pub use search::Search;
pub use simulate::{Span, Timeline, Times};
pub use stage::{Stage, Stages};
pub use verify::Verified;
