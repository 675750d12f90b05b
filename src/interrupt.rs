//! SIGINT, SIGTERM and SIGHUP: the first asks a training to stop after the step it is in; a second SIGINT or SIGTERM ends the
//! process, unless the run has begun to save. Other commands end at the first one.

use shardgrad::{Error, Kind, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{SigId, flag, low_level};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// The exit code of a run that was stopped by a signal.
pub(crate) const EXIT_CODE: i32 = 130;

/// How often a command that ends at the first signal looks for one.
const WATCH: Duration = Duration::from_millis(20);

/// Whether somebody has asked the process to stop. Clones share the answer, so each rank may hold one; ranks
/// must agree on the step at which they act on it.
#[derive(Clone, Debug)]
pub(crate) struct Interrupt {
    asked: Arc<AtomicBool>,
    /// What ends the process at the second signal.
    ends: Arc<[SigId]>,
}

impl Interrupt {
    /// Catches the signals from now on. A SIGHUP that the caller has the process ignore, as `nohup` does, stays ignored;
    /// one alone never ends the process, since a terminal that closes may send several.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses.
    pub(crate) fn install() -> Result<Interrupt> {
        let asked = Arc::new(AtomicBool::new(false));
        let mut ends = Vec::new();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag down and raises it, the next finds it up.
            let end = flag::register_conditional_shutdown(signal, EXIT_CODE, Arc::clone(&asked));
            ends.push(end.map_err(failed(signal))?);
            flag::register(signal, Arc::clone(&asked)).map_err(failed(signal))?;
        }
        if !is_ignored(SIGHUP) {
            flag::register(SIGHUP, Arc::clone(&asked)).map_err(failed(SIGHUP))?;
        }
        Ok(Interrupt { asked, ends: ends.into() })
    }

    /// Whether a signal has come.
    #[must_use]
    pub(crate) fn requested(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// From now on no number of signals ends the process: it is about to save what it has.
    pub(crate) fn hold(&self) {
        for end in self.ends.iter() {
            low_level::unregister(*end);
        }
    }
}

/// Ends the process at the first SIGINT or SIGTERM from now on, with a word: for commands that have nothing to save. The exit code
/// is that of a shell for a process that the signal ends.
///
/// # Errors
/// `Kind::Io` if the system refuses.
pub(crate) fn end_at_signals(command: &'static str) -> Result<()> {
    let came = Arc::new(AtomicUsize::new(0));
    for signal in [SIGINT, SIGTERM].into_iter().filter(|signal| !is_ignored(*signal)) {
        flag::register_usize(signal, Arc::clone(&came), signal as usize).map_err(failed(signal))?;
    }
    let watch = move || loop {
        thread::sleep(WATCH);
        let name = match came.load(Ordering::SeqCst) as i32 {
            0 => continue,
            SIGINT => "SIGINT",
            _ => "SIGTERM",
        };
        eprintln!("{command}: stopped by {name}");
        std::process::exit(128 + came.load(Ordering::SeqCst) as i32);
    };
    let watcher = thread::Builder::new().name("signals".to_string()).spawn(watch);
    watcher.map(drop).map_err(|e| Error::new(Kind::Io, format!("no thread that waits for signals: {e}")))
}

fn failed(signal: i32) -> impl Fn(std::io::Error) -> Error {
    move |e| Error::new(Kind::Io, format!("cannot catch signal {signal}: {e}"))
}

/// Whether the process was started with a signal ignored, where the system tells (Linux).
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;
    use std::process::Command;

    /// Set in the process that `signals_in_a_process_of_its_own` starts: the signals it shall send itself; 0 is the
    /// beginning of the save.
    const SIGNALS: &str = "SHARDGRAD_TEST_SIGNALS";

    /// Signals reach the whole process, so they are tried in a child: this test binary, asked for this test
    /// alone.
    fn child(signals: &[i32]) -> Option<i32> {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let signals: Vec<String> = signals.iter().map(i32::to_string).collect();
        child.args(["--exact", "interrupt::tests::signals_in_a_process_of_its_own"]);
        child.env(SIGNALS, signals.join(",")).output().unwrap().status.code()
    }

    #[test]
    fn signals_in_a_process_of_its_own() {
        if let Ok(signals) = std::env::var(SIGNALS) {
            let interrupt = Interrupt::install().unwrap();
            let held_by_a_rank = interrupt.clone();
            assert!(!held_by_a_rank.requested());
            for signal in signals.split(',') {
                match signal.parse().unwrap() {
                    0 => interrupt.hold(),
                    signal => raise(signal).unwrap(),
                }
                assert!(held_by_a_rank.requested());
            }
            std::process::exit(7);
        }
        assert_eq!(child(&[SIGINT]), Some(7), "the first signal only raises the flag");
        assert_eq!(child(&[SIGTERM]), Some(7));
        assert_eq!(child(&[SIGINT, SIGINT]), Some(EXIT_CODE));
        assert_eq!(child(&[SIGTERM, SIGINT]), Some(EXIT_CODE));
        if !is_ignored(SIGHUP) {
            assert_eq!(child(&[SIGHUP, SIGHUP]), Some(7), "a terminal that closes says so twice");
            assert_eq!(child(&[SIGHUP, SIGTERM]), Some(EXIT_CODE));
        }
        assert_eq!(child(&[SIGINT, 0, SIGINT, SIGTERM, SIGINT]), Some(7), "nothing ends a save");
    }
}
