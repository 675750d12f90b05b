//! Pipelines: a recorded program cut into stages, and the lists of actions by which ranks run them.
//!
//! A schedule is data: a pure function makes it, or a user writes it; [`Schedule::verify`] proves it before the first step,
//! and [`Runner`] follows it. Ranks of one stage work on a mesh without the pipeline axis
//! ([`Rank::slice`](shardgrad_dist::Rank::slice)), so layouts, ops and plans know nothing of stages.

mod table;
mod sweep;
mod action;
mod text;
mod verify;
mod simulate;
mod schedule;
mod trial;
mod vee;
mod dualpipe;
mod search;
mod named;
mod meet;
mod cut;
mod stage;
mod run;
mod profile;

pub use action::{Action, Schedule, Transfer};
pub use cut::Cut;
pub use named::{NAMES, held_max};
pub use profile::Profile;
pub use run::{Feed, Outcome, Passed, Runner};
pub use simulate::{Span, Timeline, Times};
pub use stage::{Stage, Stages};
pub use trial::Search;
pub use verify::Verified;
