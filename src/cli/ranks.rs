//! How the ranks of a command are started: as threads of this process, or this process is one of several that a launcher started.

use shardgrad::dist::{Mesh, Process, Rank, Rendezvous, World};
use shardgrad::{Error, Kind, Result};
use std::sync::Arc;
use std::time::Duration;

/// After so long a process says that it waits for the others to join.
const WAIT_REPORTED: Duration = Duration::from_secs(5);

/// The ranks of a command, to be launched.
#[derive(Clone, Debug)]
pub(crate) struct Ranks {
    world: World,
    process: Option<Process>,
    rendezvous: Option<Arc<Rendezvous>>,
}

/// What the program has of its launcher and its command line before a command begins.
#[derive(Debug, Default)]
pub(crate) struct Startup {
    /// Where this process meets the other ranks, if there are any.
    pub(crate) rendezvous: Option<Arc<Rendezvous>>,
    /// Names and values of the options that all processes must have alike.
    pub(crate) options: Vec<(String, String)>,
}

/// This process as one rank of several, if its launcher says so.
///
/// # Errors
/// `Kind::Config` naming the variable that is missing or makes no sense.
pub(crate) fn process() -> Result<Option<Process>> {
    Process::from_environment()
}

/// Whether this process is the one of its run that tells, and writes what all share. What the environment has wrong is told
/// elsewhere.
pub(crate) fn leads() -> bool {
    process().ok().flatten().is_none_or(|process| process.rank() == 0)
}

/// Variables of launchers that start processes and wait for them. By hand, a shell may start them and end.
const LAUNCHER_VARIABLES: [&str; 4] =
    ["TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// Whether a launcher has started this process as one of several, and waits for it: where it ends, nobody else does.
pub(crate) fn has_launcher() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    LAUNCHER_VARIABLES.into_iter().any(is_set) && process().is_ok_and(|process| process.is_some())
}

/// How many of the ranks of a mesh are on this machine.
pub(super) fn num_here(mesh: &Mesh) -> usize {
    process().ok().flatten().map_or(mesh.num_ranks(), |process| process.num_local())
}

impl Ranks {
    /// All ranks of a world, as threads, or the one that this process is.
    ///
    /// # Errors
    /// `Kind::Config` for a mesh that has another number of ranks than there are processes.
    pub(crate) fn new(world: World, mesh: &Mesh, process: Option<Process>) -> Result<Ranks> {
        if let Some(count) = process.as_ref().map(Process::num_ranks).filter(|n| *n != mesh.num_ranks()) {
            let why =
                format!("--mesh gives {} rank(s), but {count} processes were started", mesh.num_ranks());
            let help = format!("each process is one rank: give a mesh of {count}, as --mesh dp={count}");
            return Err(Error::new(Kind::Config, why).detail("help", help));
        }
        let world = match process {
            Some(_) => world.on_wait(WAIT_REPORTED, |line| eprintln!("{line}")),
            None => world,
        };
        Ok(Ranks { world, process, rendezvous: None })
    }

    /// The same ranks, which meet at the rendezvous that is open and compare their options.
    #[must_use]
    pub(crate) fn started_by(self, startup: &Startup) -> Ranks {
        let world = self.world.consistent("options", startup.options.iter().cloned());
        Ranks { world, rendezvous: startup.rendezvous.clone(), ..self }
    }

    /// Whether other ranks are other processes.
    pub(crate) fn are_processes(&self) -> bool {
        self.process.is_some()
    }

    /// The same ranks in a world that is set up otherwise.
    #[must_use]
    pub(crate) fn with(&self, set_up: impl FnOnce(World) -> World) -> Ranks {
        Ranks { world: set_up(self.world.clone()), ..self.clone() }
    }

    /// Runs `f` on every rank of this process: on all, by their numbers, or on the one that it is.
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
