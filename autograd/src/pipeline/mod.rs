//! Pipeline parallelism: a recorded program cut into stages, and the schedules (lists of actions) by which ranks run
//! them.
//!
//! A schedule is data, made by a pure function or written by a user. [`Schedule::verify`] checks it before the first
//! step, and [`Runner`] runs it. The ranks of one stage work on a mesh without the pipeline axis
//! ([`Rank::slice`](shardgrad_dist::Rank::slice)), so layouts, ops and plans know nothing of stages.

mod worklist;
mod action;
mod text;
mod simulate;
mod verify;
mod schedule;
mod list_scheduling;
mod v_shaped;
mod dualpipe;
mod search;
mod named;
mod rendezvous;
mod cut;
mod stage;
mod run;
mod profile;

pub use action::{Action, Schedule, Transfer};
pub use cut::Cut;
pub use list_scheduling::ScheduleSearch;
pub use named::{NAMES, in_flight_max};
pub use profile::Profile;
pub use run::{PipelineInputs, PipelineOutputs, Runner, TimedAction};
pub use simulate::{PassTimes, Span, Timeline};
pub use stage::{Stage, Stages};
pub use verify::Verified;
