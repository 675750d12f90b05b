//! Launching the ranks of a command: as threads of this process, or as one rank among processes started by a launcher.

use shardgrad::dist::{Mesh, Process, Rank, Rendezvous, World};
use shardgrad::{Error, Kind, Result};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A process that waits this long for the others to join prints a message.
const WAIT_REPORT_AFTER: Duration = Duration::from_secs(5);

/// The ranks of a command before they are launched.
#[derive(Clone, Debug)]
pub(crate) struct Ranks {
    world: World,
    process: Option<Process>,
    rendezvous: Option<Arc<Rendezvous>>,
}

/// Connection to the launcher and options of the command line, before a command runs.
#[derive(Debug, Default)]
pub(crate) struct Startup {
    /// The open rendezvous with the other processes, if any.
    pub(crate) rendezvous: Option<Arc<Rendezvous>>,
    /// Names and values of the options that must be equal in all processes.
    pub(crate) options: Vec<(String, String)>,
}

/// Reads from the environment which rank this process is, if a launcher started several.
///
/// # Errors
/// `Kind::Config` naming the variable that is missing or invalid.
pub(crate) fn process() -> Result<Option<Process>> {
    Process::from_environment()
}

/// Returns whether this process is rank 0 (or the only one), which prints and writes the files of the run.
pub(crate) fn is_rank_zero() -> bool {
    process().ok().flatten().is_none_or(|process| process.rank() == 0)
}

/// Environment variables of launchers that wait for the processes they start; a shell may start processes and end.
const LAUNCHER_VARIABLES: [&str; 4] =
    ["TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// Returns whether a launcher started this process and waits for it; then the end of the launcher must end the run.
pub(crate) fn has_launcher() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    LAUNCHER_VARIABLES.into_iter().any(is_set) && process().is_ok_and(|process| process.is_some())
}

/// Returns the number of ranks of a mesh on this machine.
pub(super) fn num_local_ranks(mesh: &Mesh) -> usize {
    process().ok().flatten().map_or(mesh.num_ranks(), |process| process.num_local_ranks())
}

impl Ranks {
    /// Creates all ranks of a world as threads, or the one rank of this process.
    ///
    /// # Errors
    /// `Kind::Config` if the number of processes is not the number of ranks of the mesh.
    pub(crate) fn new(world: World, mesh: &Mesh, process: Option<Process>) -> Result<Ranks> {
        if let Some(count) = process.as_ref().map(Process::num_ranks).filter(|n| *n != mesh.num_ranks()) {
            let why = format!("--mesh has {} rank(s), but {count} processes were started", mesh.num_ranks());
            let help =
                format!("each process is one rank: use a mesh of {count} ranks, such as --mesh dp={count}");
            return Err(Error::new(Kind::Config, why).detail("help", help));
        }
        let world = match process {
            Some(_) => world.on_wait(WAIT_REPORT_AFTER, |line| eprintln!("{line}")),
            None => world,
        };
        Ok(Ranks { world, process, rendezvous: None })
    }

    /// Sets the open rendezvous, and the options to compare.
    #[must_use]
    pub(crate) fn started_by(self, startup: &Startup) -> Ranks {
        let world = self.world.check_consistent("options", startup.options.iter().cloned());
        // The process of the rendezvous also knows the token, for a second rendezvous.
        let process = startup.rendezvous.as_ref().map(|rendezvous| rendezvous.process().clone());
        Ranks { world, rendezvous: startup.rendezvous.clone(), process: process.or(self.process) }
    }

    /// Lets sums over NCCL have the bits of those over other transports.
    #[cfg(feature = "nccl")]
    #[must_use]
    pub(crate) fn with_tree_sums(self) -> Ranks {
        self.with(World::tree_sums)
    }

    /// Lets sums over NCCL have the bits of those over other transports: without NCCL they have.
    #[cfg(not(feature = "nccl"))]
    #[must_use]
    pub(crate) fn with_tree_sums(self) -> Ranks {
        self
    }

    /// Describes what the order of sums over NCCL depends on, if ranks use NCCL and its library is found.
    #[cfg(feature = "nccl")]
    pub(crate) fn describe_nccl(&self) -> Option<String> {
        self.world.describe_nccl().filter(|_| self.are_processes())
    }

    /// Returns whether the ranks are processes.
    pub(crate) fn are_processes(&self) -> bool {
        self.process.is_some()
    }

    /// Returns the ranks of a world that run in this process.
    pub(crate) fn local_ranks(&self, num_ranks: usize) -> Range<usize> {
        self.process.as_ref().map_or(0..num_ranks, |process| process.rank()..process.rank() + 1)
    }

    /// Returns the rank of one process among several.
    #[cfg(test)]
    pub(crate) fn with_process(&self, process: Process) -> Ranks {
        Ranks { process: Some(process), ..self.clone() }
    }

    /// Returns the same ranks for another world after the first: processes connect at a new rendezvous.
    #[must_use]
    pub(crate) fn reconnected(self) -> Ranks {
        Ranks { rendezvous: None, ..self }
    }

    /// Changes the configuration of the world.
    #[must_use]
    pub(crate) fn with(&self, set_up: impl FnOnce(World) -> World) -> Ranks {
        Ranks { world: set_up(self.world.clone()), ..self.clone() }
    }

    /// Runs `f` on every rank of this process and returns the results in rank order.
    ///
    /// # Errors
    /// As [`World::launch`] and [`World::join`].
    pub(crate) fn launch<T: Send>(&self, f: impl Fn(&Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
        let world = self.world.clone();
        match (&self.process, &self.rendezvous) {
            (None, _) => world.launch(f),
            (Some(_), Some(rendezvous)) => world.join_at(rendezvous, |rank| f(rank)).map(|own| vec![own]),
            (Some(process), None) => world.join(process, |rank| f(rank)).map(|own| vec![own]),
        }
    }
}
