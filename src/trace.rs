//! Chrome trace of the passes and transfers of each rank, for `chrome://tracing` or Perfetto.

use serde_json::{Value, json};
use shardgrad::autograd::pipeline::{Action, TimedAction};
use shardgrad::{Error, Kind, Result};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Events of all ranks, on one clock.
pub(crate) struct Trace {
    path: PathBuf,
    start: Instant,
    /// Rank, step and pass.
    events: Mutex<Vec<(usize, u64, TimedAction)>>,
}

impl Trace {
    /// Starts an empty trace; its clock starts now.
    pub(crate) fn new(path: &Path) -> Trace {
        Trace { path: path.to_path_buf(), start: Instant::now(), events: Mutex::default() }
    }

    /// Adds the passes of a step of a rank.
    pub(crate) fn add(&self, rank: usize, step: u64, passes: &[TimedAction]) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.extend(passes.iter().map(|pass| (rank, step, *pass)));
    }

    /// Writes the file if there are events: a run without a step leaves an older file unchanged.
    ///
    /// # Errors
    /// `Kind::Io` naming it.
    pub(crate) fn write(&self, num_ranks: usize) -> Result<()> {
        let name = |rank: usize| json!({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": format!("rank {rank}")}});
        let microseconds = |at: Instant| at.saturating_duration_since(self.start).as_secs_f64() * 1e6;
        let event = |(rank, step, pass): &(usize, u64, TimedAction)| {
            let (start, end) = (microseconds(pass.start), microseconds(pass.end));
            json!({"name": pass.action.to_string(), "cat": category(pass.action), "ph": "X", "ts": start,
                "dur": end - start, "pid": 0, "tid": rank, "args": {"step": step}})
        };
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.is_empty() {
            return Ok(());
        }
        let all: Vec<Value> = (0..num_ranks).map(name).chain(events.iter().map(event)).collect();
        let text = json!({"traceEvents": all, "displayTimeUnit": "ms"}).to_string();
        std::fs::write(&self.path, text)
            .map_err(|e| Error::new(Kind::Io, format!("cannot write {}: {e}", self.path.display())))
    }
}

fn category(action: Action) -> &'static str {
    match action {
        Action::Forward { .. } => "forward",
        Action::Backward { .. } | Action::InputGradient { .. } | Action::WeightGradient { .. } => "backward",
        Action::Send(_) => "send",
        Action::Receive(_) => "receive",
        Action::Reduce { .. } => "reduce",
    }
}
