//! The launchers, by the variables that each sets, and a [`Process`] from them.

use super::variables::Variables;
use super::{Process, incomplete, slurm};
use crate::error::{Error, Kind, Result};

/// The port of rank 0 unless a variable says otherwise; PyTorch's default.
const PORT: u16 = 29500;
/// The variable that names the port on which ranks meet.
const PORT_VARIABLE: &str = "SHARDGRAD_PORT";
const LOOPBACK: &str = "127.0.0.1";
/// All addresses of this machine, for a rank 0 that is not told by which the others reach it.
const ANY_ADDRESS: &str = "0.0.0.0";

/// What else a launcher sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Torchrun,
    OpenMpi,
    Mpich,
    Slurm,
    AwsBatch,
    LeaderWorkerSet,
}

/// The variables of one launcher.
struct Launcher {
    family: Family,
    name: &'static str,
    rank: &'static str,
    count: &'static str,
    /// The number of the process on its machine, and how many are there. Platforms that start one process per machine set neither.
    local: Option<(&'static str, &'static str)>,
}

/// A launcher that runs on top of another comes before it: the variables of the other describe the launcher's own processes.
const LAUNCHERS: [Launcher; 6] = [
    Launcher {
        family: Family::Torchrun,
        name: "torchrun",
        rank: "RANK",
        count: "WORLD_SIZE",
        local: Some(("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    },
    Launcher {
        family: Family::OpenMpi,
        name: "mpirun of Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        count: "OMPI_COMM_WORLD_SIZE",
        local: Some(("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")),
    },
    Launcher {
        family: Family::Mpich,
        name: "mpiexec of MPICH",
        rank: "PMI_RANK",
        count: "PMI_SIZE",
        local: Some(("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    },
    Launcher {
        family: Family::Slurm,
        name: "srun",
        rank: "SLURM_PROCID",
        // Of the step, not of the job: a script that sbatch runs sees the tasks of its job, but is one process.
        count: "SLURM_STEP_NUM_TASKS",
        local: Some(("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
    },
    Launcher {
        family: Family::AwsBatch,
        name: "AWS Batch",
        rank: "AWS_BATCH_JOB_NODE_INDEX",
        count: "AWS_BATCH_JOB_NUM_NODES",
        local: None,
    },
    Launcher {
        family: Family::LeaderWorkerSet,
        name: "a LeaderWorkerSet",
        rank: "LWS_WORKER_INDEX",
        count: "LWS_GROUP_SIZE",
        local: None,
    },
];

/// A process among those on its machine.
struct Local {
    rank: usize,
    count: usize,
    /// Whether the launcher states that all ranks are on this machine.
    is_all: bool,
}

/// Reads the process that the environment describes; `None` if it is alone.
///
/// # Errors
/// `Kind::Config` naming the variable that is missing or makes no sense.
pub(super) fn read(variables: &Variables<'_>) -> Result<Option<Process>> {
    for launcher in &LAUNCHERS {
        let Some(num_ranks) = variables.count(launcher.count)?.filter(|count| *count > 1) else { continue };
        if launcher.family == Family::Mpich && slurm::sets_pmi(variables) {
            continue;
        }
        return launcher.process(variables, num_ranks).map(Some);
    }
    if !variables.is_set("WORLD_SIZE") {
        incomplete::refuse(variables)?;
    }
    Ok(None)
}

impl Launcher {
    fn process(&self, variables: &Variables<'_>, num_ranks: usize) -> Result<Process> {
        let rank = self.rank(variables, num_ranks)?;
        let local = self.local(variables, rank, num_ranks)?;
        let host = self.host(variables, rank, num_ranks, &local)?;
        let process = Process::new(rank, num_ranks, &host, self.port(variables)?)?;
        let run = match self.family {
            Family::Torchrun => variables.get("TORCHELASTIC_RUN_ID").unwrap_or_default(),
            Family::OpenMpi => variables.get("PMIX_NAMESPACE").unwrap_or_default(),
            Family::Mpich | Family::Slurm => slurm::run_name(variables)?,
            Family::AwsBatch | Family::LeaderWorkerSet => String::new(),
        };
        Ok(process.beside(local.rank, local.count)?.of_run(&run))
    }

    fn rank(&self, variables: &Variables<'_>, num_ranks: usize) -> Result<usize> {
        let Launcher { name, rank, count, .. } = *self;
        let missing = || {
            let why =
                format!("{count} is {num_ranks}, but {rank} does not say which of them this process is");
            let help = format!("start it with {name}, set {rank} for each process, or unset {count}");
            Error::new(Kind::Config, why).detail("help", help)
        };
        let index = below(num_ranks, rank, variables.count(rank)?.ok_or_else(missing)?, count)?;
        if self.family != Family::AwsBatch {
            return Ok(index);
        }
        // Rank 0 is the node whose address the others know, whatever its index.
        let main = "AWS_BATCH_JOB_MAIN_NODE_INDEX";
        let main_index = variables.count(main)?.ok_or_else(|| {
            Error::new(Kind::Config, format!("{count} is {num_ranks}, but {main} is not set"))
                .detail("help", "set RANK, WORLD_SIZE and MASTER_ADDR for each process instead")
        })?;
        Ok((index + num_ranks - below(num_ranks, main, main_index, count)?) % num_ranks)
    }

    /// The number of the process on its machine, and how many are there; as if it were alone, where nothing is stated.
    fn local(&self, variables: &Variables<'_>, rank: usize, num_ranks: usize) -> Result<Local> {
        let alone = Local { rank: 0, count: 1, is_all: false };
        let Some((name, of)) = self.local else { return Ok(alone) };
        let stated = match self.family {
            Family::Slurm => slurm::num_local_tasks(variables)?,
            _ => variables.count(of)?,
        };
        match (variables.count(name)?, stated) {
            (Some(at), Some(all)) if at >= all => {
                Err(Error::new(Kind::Config, format!("{name} of rank {rank} is {at}, but {of} is {all}")))
            }
            (Some(at), Some(all)) => Ok(Local { rank: at, count: all, is_all: all == num_ranks }),
            (Some(at), None) => Ok(Local { rank: at, count: at + 1, is_all: false }),
            (None, _) => Ok(alone),
        }
    }

    /// The machine of rank 0. `MASTER_ADDR` precedes all that launchers state.
    fn host(
        &self,
        variables: &Variables<'_>,
        rank: usize,
        num_ranks: usize,
        local: &Local,
    ) -> Result<String> {
        if let Some(host) = variables.get("MASTER_ADDR") {
            return Ok(host);
        }
        let lacks = |name: &str| format!("{} is {num_ranks}, but {name} is not set", self.count);
        let refused = |why: String| {
            let help = "set MASTER_ADDR to a name or an address of the machine of rank 0, the same for all processes";
            Error::new(Kind::Config, why).detail("help", help)
        };
        let from = |name: &str| variables.get(name).ok_or_else(|| refused(lacks(name)));
        match self.family {
            // By hand, nothing states that all are on this machine.
            Family::Torchrun => Err(refused(lacks("MASTER_ADDR"))),
            Family::OpenMpi | Family::Mpich | Family::Slurm if local.is_all => Ok(LOOPBACK.to_string()),
            Family::Slurm => {
                slurm::first_node_of_step(variables).ok_or_else(|| refused(lacks("MASTER_ADDR")))
            }
            Family::OpenMpi | Family::Mpich => {
                let is_first = slurm::is_on_first_node_of_job(variables)?;
                let first = slurm::first_node_of_job(variables);
                let (Some(is_first), Some(first)) = (is_first, first) else {
                    return Err(refused(lacks("MASTER_ADDR")));
                };
                // Rank 0 is the first of its node, so another rank that is the first of a node shows where rank 0 is not. A rank
                // that shows nothing relies on rank 0, which refuses if it is elsewhere, and mpirun then ends all.
                if is_first != (rank == 0) && (rank == 0 || local.rank == 0) {
                    let why = format!(
                        "{}, and rank 0 is not on {first}, the first node of the job",
                        lacks("MASTER_ADDR")
                    );
                    return Err(refused(why));
                }
                Ok(first)
            }
            // The main node has no variable with its own address.
            Family::AwsBatch if rank == 0 => Ok(ANY_ADDRESS.to_string()),
            Family::AwsBatch => from("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"),
            Family::LeaderWorkerSet => from("LWS_LEADER_ADDRESS"),
        }
    }

    /// The port on which ranks meet.
    fn port(&self, variables: &Variables<'_>) -> Result<u16> {
        if let Some(port) = variables.port(PORT_VARIABLE)? {
            return Ok(port);
        }
        if let Some(port) = variables.port("MASTER_PORT")? {
            let store = variables.get("TORCHELASTIC_USE_AGENT_STORE");
            let is_taken = store.is_some_and(|value| value.eq_ignore_ascii_case("true"));
            // The highest port has none above it.
            return Ok(if is_taken { port.checked_add(1).unwrap_or(port - 1) } else { port });
        }
        // With MASTER_ADDR, ranks of mpirun may be outside of the job, where they do not see its id.
        let sees_job = self.family == Family::Slurm || !variables.is_set("MASTER_ADDR");
        let port = match self.family {
            Family::Slurm | Family::Mpich if sees_job => slurm::port(variables, true)?,
            // Ranks of Open MPI on the node of mpirun are outside of the step to which those on other nodes belong.
            Family::OpenMpi if sees_job => slurm::port(variables, false)?,
            _ => None,
        };
        Ok(port.unwrap_or(PORT))
    }
}

/// Returns an index that is below a count.
///
/// # Errors
/// `Kind::Config` for one that is not.
fn below(limit: usize, name: &str, index: usize, count: &str) -> Result<usize> {
    if index < limit {
        return Ok(index);
    }
    let why = format!("{name} is {index}, but {count} is {limit}: ranks are counted from 0");
    Err(Error::new(Kind::Config, why))
}
