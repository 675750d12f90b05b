//! Recognizes the launcher of a process by its environment variables, and reads a [`Process`] from them.

use super::environment::EnvVars;
use super::{Process, Token, incomplete_environment, slurm};
use crate::error::{Error, Kind, Result};

/// The port of rank 0 unless a variable says otherwise; PyTorch's default.
const PORT: u16 = 29500;
/// The variable for the port of the rendezvous.
const PORT_VARIABLE: &str = "SHARDGRAD_PORT";
/// The variable for the token of the run.
const TOKEN_VARIABLE: &str = "SHARDGRAD_TOKEN";
/// The variable for the address at which rank 0 listens.
const LISTEN_VARIABLE: &str = "SHARDGRAD_LISTEN";
const LOOPBACK: &str = "127.0.0.1";
/// All addresses of this machine, for a rank 0 that does not know by which address the others reach it.
const ANY_ADDRESS: &str = "0.0.0.0";

/// The launchers, by the other variables that they set.
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
    /// Local rank and local count. Platforms that start one process per machine set neither.
    local: Option<(&'static str, &'static str)>,
}

/// The launchers in the order of recognition. A launcher that runs on top of another comes before it: the variables of the other
/// describe the launcher's own processes.
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

/// Reads the process that the environment describes; `None` for a single process.
///
/// # Errors
/// `Kind::Config` naming the variable that is missing or invalid.
pub(super) fn read(variables: &EnvVars<'_>) -> Result<Option<Process>> {
    for launcher in &LAUNCHERS {
        let Some(num_ranks) = variables.count(launcher.count)?.filter(|count| *count > 1) else { continue };
        if launcher.family == Family::Mpich && slurm::sets_pmi(variables) {
            continue;
        }
        return launcher.process(variables, num_ranks).map(Some);
    }
    if !variables.is_set("WORLD_SIZE") {
        incomplete_environment::refuse(variables)?;
    }
    Ok(None)
}

impl Launcher {
    fn process(&self, variables: &EnvVars<'_>, num_ranks: usize) -> Result<Process> {
        let rank = self.rank(variables, num_ranks)?;
        let local = self.local(variables, rank, num_ranks)?;
        let host = self.host(variables, rank, num_ranks, &local)?;
        let process = Process::new(rank, num_ranks, &host, self.port(variables)?)?;
        let run_id = match self.family {
            Family::Torchrun => variables.get("TORCHELASTIC_RUN_ID").unwrap_or_default(),
            Family::OpenMpi => variables.get("PMIX_NAMESPACE").unwrap_or_default(),
            Family::Mpich | Family::Slurm => slurm::run_id(variables)?,
            Family::AwsBatch | Family::LeaderWorkerSet => String::new(),
        };
        let process = process.with_local_rank(local.rank, local.count)?.with_run_id(&run_id);
        let process = match variables.get(LISTEN_VARIABLE) {
            Some(host) => process.listen(&host),
            None => process,
        };
        Ok(match variables.get(TOKEN_VARIABLE) {
            Some(token) => process.token(Token::Text(token)),
            None => process,
        })
    }

    fn rank(&self, variables: &EnvVars<'_>, num_ranks: usize) -> Result<usize> {
        let Launcher { name, rank, count, .. } = *self;
        let missing = || {
            let why =
                format!("{count} is {num_ranks}, but {rank} is not set: the rank of this process is unknown");
            let help = format!("start it with {name}, set {rank} for each process, or unset {count}");
            Error::new(Kind::Config, why).detail("help", help)
        };
        let index = below(num_ranks, rank, variables.count(rank)?.ok_or_else(missing)?, count)?;
        if self.family != Family::AwsBatch {
            return Ok(index);
        }
        // Rank 0 is the main node, whose address the other nodes know, whatever its index.
        let main = "AWS_BATCH_JOB_MAIN_NODE_INDEX";
        let main_index = variables.count(main)?.ok_or_else(|| {
            Error::new(Kind::Config, format!("{count} is {num_ranks}, but {main} is not set"))
                .detail("help", "set RANK, WORLD_SIZE and MASTER_ADDR for each process instead")
        })?;
        Ok((index + num_ranks - below(num_ranks, main, main_index, count)?) % num_ranks)
    }

    /// The local rank and the local count; 0 of 1 if they are not stated.
    fn local(&self, variables: &EnvVars<'_>, rank: usize, num_ranks: usize) -> Result<Local> {
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

    /// The host of rank 0. `MASTER_ADDR` takes precedence over the launcher's own variables.
    fn host(&self, variables: &EnvVars<'_>, rank: usize, num_ranks: usize, local: &Local) -> Result<String> {
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
            // For processes started by hand, nothing states that all are on this machine.
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
                // Rank 0 is the first rank of its node, so the first rank of another node shows where rank 0 is not. The other
                // ranks rely on rank 0, which fails here if it is on another node, and mpirun then ends all ranks.
                if is_first != (rank == 0) && (rank == 0 || local.rank == 0) {
                    let why = format!(
                        "{}, and rank 0 is not on {first}, the first node of the job",
                        lacks("MASTER_ADDR")
                    );
                    return Err(refused(why));
                }
                Ok(first)
            }
            // The main node itself has no variable with its address.
            Family::AwsBatch if rank == 0 => Ok(ANY_ADDRESS.to_string()),
            Family::AwsBatch => from("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"),
            Family::LeaderWorkerSet => from("LWS_LEADER_ADDRESS"),
        }
    }

    /// The port of the rendezvous.
    fn port(&self, variables: &EnvVars<'_>) -> Result<u16> {
        if let Some(port) = variables.port(PORT_VARIABLE)? {
            return Ok(port);
        }
        if let Some(port) = variables.port("MASTER_PORT")? {
            let store = variables.get("TORCHELASTIC_USE_AGENT_STORE");
            let is_taken = store.is_some_and(|value| value.eq_ignore_ascii_case("true"));
            // There is no port above the highest.
            return Ok(if is_taken { port.checked_add(1).unwrap_or(port - 1) } else { port });
        }
        // With MASTER_ADDR, ranks of mpirun may run outside of the job, where its id is not set.
        let sees_job = self.family == Family::Slurm || !variables.is_set("MASTER_ADDR");
        let port = match self.family {
            Family::Slurm | Family::Mpich if sees_job => slurm::port(variables, true)?,
            // Ranks of Open MPI on the node of mpirun do not belong to the step of the ranks on other nodes.
            Family::OpenMpi if sees_job => slurm::port(variables, false)?,
            _ => None,
        };
        Ok(port.unwrap_or(PORT))
    }
}

/// Returns `index` if it is below `limit`.
///
/// # Errors
/// `Kind::Config` naming both variables if it is not.
fn below(limit: usize, name: &str, index: usize, count: &str) -> Result<usize> {
    if index < limit {
        return Ok(index);
    }
    let why = format!("{name} is {index}, but {count} is {limit}: ranks are counted from 0");
    Err(Error::new(Kind::Config, why))
}
