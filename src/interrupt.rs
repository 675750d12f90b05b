//! Stopping a run: signals, and the end of its launcher.
//!
//! | event | `train` | other commands |
//! |---|---|---|
//! | SIGTERM, SIGXCPU, end of the launcher | saves and stops after the step in progress, however often it comes | end |
//! | SIGHUP, SIGUSR1 | the same | as the system does by default |
//! | SIGINT | the same; a second one at least two seconds later ends the process at once | end |
//! | SIGXFSZ | the write fails with "File too large" | the same |

use shardgrad::{Error, Kind, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXCPU, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::fmt;
use std::os::unix::process::parent_id;
use std::process::exit;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A second SIGINT ends the process if it comes at least this long after the first.
const SECOND_INTERRUPT: Duration = Duration::from_secs(2);
/// Polling interval of the check whether the launcher still runs.
const LAUNCHER_INTERVAL: Duration = Duration::from_millis(500);
/// The exit code of a run that was stopped before its state was saved.
const NOT_SAVED: i32 = 1;

/// Why a run stops before its last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// SIGINT.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// SIGHUP.
    HangUp,
    /// SIGUSR1, which SLURM sends before the time limit if requested (`--signal=USR1@60`).
    User,
    /// SIGXCPU: the soft limit of processor time is reached.
    CpuLimit,
    /// The process that started this one has ended.
    LauncherEnded,
}

impl StopReason {
    /// All reasons. If ranks have different ones, the first in this list counts.
    pub(crate) const ALL: [StopReason; 6] = [
        StopReason::Interrupt,
        StopReason::Terminate,
        StopReason::HangUp,
        StopReason::User,
        StopReason::CpuLimit,
        StopReason::LauncherEnded,
    ];

    fn of_signal(signal: i32) -> Option<StopReason> {
        StopReason::ALL.into_iter().find(|reason| reason.signal() == signal)
    }

    /// The number of the signal; the end of the launcher counts as SIGTERM.
    fn signal(self) -> i32 {
        match self {
            StopReason::Interrupt => SIGINT,
            StopReason::Terminate | StopReason::LauncherEnded => SIGTERM,
            StopReason::HangUp => SIGHUP,
            StopReason::User => SIGUSR1,
            StopReason::CpuLimit => SIGXCPU,
        }
    }

    /// The name in messages and in control flags.
    pub(crate) fn name(self) -> &'static str {
        match self {
            StopReason::Interrupt => "SIGINT",
            StopReason::Terminate => "SIGTERM",
            StopReason::HangUp => "SIGHUP",
            StopReason::User => "SIGUSR1",
            StopReason::CpuLimit => "SIGXCPU",
            StopReason::LauncherEnded => "the end of its launcher",
        }
    }

    /// The exit code of a run whose state was saved, and of a command that has nothing to save: 128 and the number of the signal.
    pub(crate) fn exit_code(self) -> u8 {
        128 + self.signal() as u8
    }
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The request to stop a run. Clones share it, so each rank may hold one; ranks must agree on the step after which they stop.
#[derive(Clone, Debug)]
pub(crate) struct Interrupt(Arc<Mutex<StopRequest>>);

#[derive(Debug, Default)]
struct StopRequest {
    /// Whether the run has begun its first step.
    is_running: bool,
    /// The first reason.
    reason: Option<StopReason>,
    /// When the first SIGINT came.
    interrupted: Option<Instant>,
    /// The step after which the state was saved at the end of the run.
    saved: Option<usize>,
}

impl StopRequest {
    /// Records a reason to stop. Returns exit code and message if the process must end immediately.
    fn add(&mut self, reason: StopReason, now: Instant) -> Option<(i32, String)> {
        if !self.is_running {
            let text = format!("error: stopped by {reason} before the first step; nothing is saved");
            return Some((NOT_SAVED, text));
        }
        self.reason.get_or_insert(reason);
        if reason != StopReason::Interrupt
            || now.duration_since(*self.interrupted.get_or_insert(now)) < SECOND_INTERRUPT
        {
            return None;
        }
        Some(match self.saved {
            Some(step) => {
                let text = format!("error: ended by a second SIGINT; the model after step {step} is saved");
                (reason.exit_code().into(), text)
            }
            None => (NOT_SAVED, "error: ended by a second SIGINT before the model was saved".to_string()),
        })
    }
}

impl Interrupt {
    /// Starts to handle signals, and the end of the parent process if that is a launcher. Before [`Interrupt::begin_steps`] each of them ends the
    /// process. A SIGHUP that was ignored at the start, as under `nohup`, stays ignored.
    ///
    /// # Errors
    /// `Kind::Io` if a handler or thread cannot be installed.
    pub(crate) fn install(has_launcher: bool) -> Result<Interrupt> {
        let interrupt = Interrupt(Arc::default());
        let here = interrupt.clone();
        let hang_up = (!is_ignored(SIGHUP)).then_some(SIGHUP);
        let signals: Vec<i32> = [SIGINT, SIGTERM, SIGUSR1, SIGXCPU].into_iter().chain(hang_up).collect();
        listen(&signals, move |reason| here.receive(reason))?;
        if has_launcher {
            let here = interrupt.clone();
            watch_parent(move || here.receive(StopReason::LauncherEnded))?;
        }
        Ok(interrupt)
    }

    fn request(&self) -> MutexGuard<'_, StopRequest> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn receive(&self, reason: StopReason) {
        // The lock is held until the process has ended, so that no rank starts its first step.
        let mut request = self.request();
        if let Some((code, text)) = request.add(reason, Instant::now()) {
            eprintln!("{text}");
            exit(code);
        }
    }

    /// Returns why the run must stop, if it must.
    #[must_use]
    pub(crate) fn reason(&self) -> Option<StopReason> {
        self.request().reason
    }

    /// From now on stop requests end the run after a step, with its state saved.
    pub(crate) fn begin_steps(&self) {
        self.request().is_running = true;
    }

    /// Records that the final state is saved.
    pub(crate) fn set_saved(&self, step: usize) {
        self.request().saved = Some(step);
    }
}

/// Ends the process with a message at the first SIGINT, SIGTERM or SIGXCPU, or when its launcher ends: for commands that have nothing to save. The
/// exit code is 128 + signal, as in a shell.
///
/// # Errors
/// `Kind::Io` if a handler or thread cannot be installed.
pub(crate) fn end_at_signals(command: &'static str, has_launcher: bool) -> Result<()> {
    let end = move |reason: StopReason| {
        eprintln!("{command}: stopped by {reason}");
        exit(reason.exit_code().into());
    };
    let signals: Vec<i32> =
        [SIGINT, SIGTERM, SIGXCPU].into_iter().filter(|signal| !is_ignored(*signal)).collect();
    listen(&signals, end)?;
    if has_launcher { watch_parent(move || end(StopReason::LauncherEnded)) } else { Ok(()) }
}

/// Turns a write beyond the file size limit (`ulimit -f`) into an error; by default it ends the process.
///
/// # Errors
/// `Kind::Io` if a handler or thread cannot be installed.
pub(crate) fn catch_file_size_limit() -> Result<()> {
    // With any handler, the system call fails with EFBIG.
    flag::register(SIGXFSZ, Arc::default()).map(drop).map_err(|e| system_error("handle SIGXFSZ", &e))
}

/// Calls a function with each received signal, on its own thread.
fn listen(signals: &[i32], mut act: impl FnMut(StopReason) + Send + 'static) -> Result<()> {
    let mut signals = Signals::new(signals).map_err(|e| system_error("handle signals", &e))?;
    let each = move || signals.forever().filter_map(StopReason::of_signal).for_each(&mut act);
    spawn("signals", each)
}

/// Calls a function when the parent process has ended. A thread polls for it: the parent-death signal of Linux is sent when the parent's *thread*
/// that started this process ends.
fn watch_parent(act: impl FnOnce() + Send + 'static) -> Result<()> {
    let parent = parent_id();
    spawn("launcher", move || {
        while parent_id() == parent {
            thread::sleep(LAUNCHER_INTERVAL);
        }
        act();
    })
}

fn spawn(name: &str, f: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = thread::Builder::new().name(name.to_string()).spawn(f);
    thread.map(drop).map_err(|e| system_error(&format!("start the thread `{name}`"), &e))
}

fn system_error(doing: &str, e: &std::io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot {doing}: {e}"))
}

/// Returns whether the process was started with a signal ignored (Linux).
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_late_second_sigint_ends_a_run() {
        let start = Instant::now();
        let after = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let (interrupt, terminate) = (StopReason::Interrupt, StopReason::Terminate);
        let mut request = StopRequest { is_running: true, ..StopRequest::default() };
        for reason in StopReason::ALL.into_iter().skip(1).cycle().take(50) {
            assert_eq!(request.add(reason, start), None);
        }
        assert_eq!(request.reason, Some(terminate), "the first one counts");
        assert_eq!(request.add(interrupt, after(10.0)), None, "the first SIGINT");
        assert_eq!(request.add(interrupt, after(11.9)), None, "too early");
        assert_eq!(request.add(terminate, after(20.0)), None);
        let ended = request.add(interrupt, after(12.0)).unwrap();
        assert_eq!(ended, (1, "error: ended by a second SIGINT before the model was saved".to_string()));
        request.saved = Some(7);
        let (code, text) = request.add(interrupt, after(12.0)).unwrap();
        assert!(code == 130 && text.ends_with("the model after step 7 is saved"), "{text}");
    }

    #[test]
    fn any_stop_before_the_first_step_ends_the_process() {
        for reason in StopReason::ALL {
            let (code, text) = StopRequest::default().add(reason, Instant::now()).unwrap();
            assert_eq!(code, 1);
            assert_eq!(text, format!("error: stopped by {reason} before the first step; nothing is saved"));
        }
    }

    #[test]
    fn exit_codes_are_128_plus_signal() {
        let codes = StopReason::ALL.map(StopReason::exit_code);
        assert_eq!(codes, [130, 143, 129, 138, 152, 143]);
        assert_eq!(StopReason::of_signal(SIGTERM), Some(StopReason::Terminate));
    }
}
