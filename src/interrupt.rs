//! SIGINT and SIGTERM: the first asks the run to stop after the step it is in, the second ends the process.

use shardgrad::{Error, Kind, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code of a run that was stopped by a signal.
pub(crate) const EXIT_CODE: i32 = 130;

/// Whether somebody has asked the process to stop. Clones share the answer, so each rank may hold one; ranks
/// must agree on the step at which they act on it.
#[derive(Clone, Debug)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches SIGINT and SIGTERM from now on.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses.
    pub(crate) fn install() -> Result<Interrupt> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag down and raises it, the next finds it up.
            flag::register_conditional_shutdown(signal, EXIT_CODE, Arc::clone(&asked))
                .and_then(|_| flag::register(signal, Arc::clone(&asked)))
                .map_err(|e| Error::new(Kind::Io, format!("cannot catch signal {signal}: {e}")))?;
        }
        Ok(Interrupt(asked))
    }

    /// Whether a signal has come.
    #[must_use]
    pub(crate) fn requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;
    use std::process::Command;

    /// Set in the process that `signals_in_a_process_of_its_own` starts: the signals it shall send itself.
    const SIGNALS: &str = "SHARDGRAD_TEST_SIGNALS";

    /// Signals reach the whole process, so they are tried in a child: this test binary, asked for this test
    /// alone.
    fn child(signals: &str) -> Option<i32> {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "interrupt::tests::signals_in_a_process_of_its_own"]).env(SIGNALS, signals);
        child.output().unwrap().status.code()
    }

    #[test]
    fn signals_in_a_process_of_its_own() {
        if let Ok(signals) = std::env::var(SIGNALS) {
            let interrupt = Interrupt::install().unwrap();
            let held_by_a_rank = interrupt.clone();
            assert!(!held_by_a_rank.requested());
            for signal in signals.split(',') {
                raise(signal.parse().unwrap()).unwrap();
                assert!(held_by_a_rank.requested());
            }
            std::process::exit(7);
        }
        assert_eq!(child(&SIGINT.to_string()), Some(7), "the first signal only raises the flag");
        assert_eq!(child(&SIGTERM.to_string()), Some(7));
        assert_eq!(child(&format!("{SIGINT},{SIGINT}")), Some(EXIT_CODE));
        assert_eq!(child(&format!("{SIGTERM},{SIGINT}")), Some(EXIT_CODE));
    }
}
