//! A process that is one rank of a world of processes, read from the environment variables that its launcher sets.

mod variables;

mod incomplete;
mod slurm;

mod launcher;

use crate::error::{Error, Kind, Result};
use variables::Variables;

/// This process among those that are one world: which rank it is, of how many, and where they meet.
///
/// Launchers tell it through the environment ([`Process::from_environment`]); a program that starts its processes by itself says it
/// with [`Process::new`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    rank: usize,
    num_ranks: usize,
    local_rank: usize,
    num_local: usize,
    host: String,
    port: u16,
    run: String,
}

impl Process {
    /// Rank `rank` of `num_ranks`, where rank 0 listens at a port of a host: a name or an address under which all others reach the
    /// machine of rank 0. All are taken to be on one machine until [`Process::beside`] says otherwise.
    ///
    /// # Errors
    /// `Kind::Config` for a rank that is none of so many.
    pub fn new(rank: usize, num_ranks: usize, host: &str, port: u16) -> Result<Process> {
        if rank >= num_ranks {
            let why = format!("there is no rank {rank} among {num_ranks}: ranks are counted from 0");
            return Err(Error::new(Kind::Config, why));
        }
        let (host, run) = (host.to_string(), String::new());
        Ok(Process { rank, num_ranks, local_rank: rank, num_local: num_ranks, host, port, run })
    }

    /// With its number among the processes on its machine, and how many these are: they share the cores.
    ///
    /// # Errors
    /// `Kind::Config` for a number that is none of so many.
    pub fn beside(self, local_rank: usize, num_local: usize) -> Result<Process> {
        if local_rank >= num_local {
            let why = format!("there is no process {local_rank} among {num_local} on a machine");
            return Err(Error::new(Kind::Config, why));
        }
        Ok(Process { local_rank, num_local, ..self })
    }

    /// With the name of the run: processes of another one that come to the same port are sent away.
    #[must_use]
    pub fn of_run(self, run: &str) -> Process {
        Process { run: run.to_string(), ..self }
    }

    /// Reads the process from the variables of its launcher; `None` if no launcher started it as one of several. Launchers are looked
    /// for in this order:
    ///
    /// | launcher | rank and count | on its machine | where rank 0 is |
    /// |---|---|---|---|
    /// | torchrun, or by hand | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
    /// | `mpirun` of Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_SIZE` | as above; this machine, if all are here; the first node of the SLURM job, if rank 0 is there |
    /// | `mpiexec` of MPICH | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | as for Open MPI |
    /// | `srun` of SLURM | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` | as above; this machine, if all are here; the first of `SLURM_STEP_NODELIST` |
    /// | AWS Batch, multi-node parallel job | `AWS_BATCH_JOB_NODE_INDEX`, `AWS_BATCH_JOB_NUM_NODES` | alone | as above; `AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS` |
    /// | LeaderWorkerSet of Kubernetes | `LWS_WORKER_INDEX`, `LWS_GROUP_SIZE` | alone | as above; `LWS_LEADER_ADDRESS` |
    ///
    /// Where `PMI_*` and `SLURM_*` agree, the launcher is `srun`. Ranks of AWS Batch are counted from the main node
    /// (`AWS_BATCH_JOB_MAIN_NODE_INDEX`). The last two rows are from the platforms' documentation and have not been run.
    ///
    /// Ranks meet at `SHARDGRAD_PORT` if that is set, else at `MASTER_PORT` or, under torchrun, whose own store listens there
    /// (`TORCHELASTIC_USE_AGENT_STORE`), the port above it; else at 29500, or within a job of SLURM a port by the ids of job and step.
    ///
    /// Variables that number the processes of a job without their count and the address of rank 0 (`JOB_COMPLETION_INDEX`,
    /// `TPU_WORKER_ID`, `SM_CURRENT_HOST`, `NODE_RANK`) are refused, unless `WORLD_SIZE=1` says that the process is alone.
    ///
    /// # Errors
    /// `Kind::Config` naming the variable that is missing or makes no sense.
    pub fn from_environment() -> Result<Option<Process>> {
        Process::from_variables(&|name| std::env::var(name).ok())
    }

    /// [`Process::from_environment`], of variables that a function knows.
    ///
    /// # Errors
    /// As [`Process::from_environment`].
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Process>> {
        launcher::read(&Variables(variable))
    }

    /// The number of the rank that this process is.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    /// The number of this process among those on its machine.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// How many processes of the world are on this machine.
    #[must_use]
    pub fn num_local(&self) -> usize {
        self.num_local
    }

    /// The machine of rank 0, as the others reach it.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port on which rank 0 listens until all have come.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The name of the run; empty if it has none.
    #[must_use]
    pub fn run(&self) -> &str {
        &self.run
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Option<Process>> {
        let get = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        Process::from_variables(&get)
    }

    fn refused(variables: &[(&str, &str)]) -> String {
        let error = of(variables).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        error.to_string()
    }

    /// Rank, count, number on its machine, how many there, host, port and run.
    fn told(variables: &[(&str, &str)]) -> (usize, usize, usize, usize, String, u16, String) {
        let Process { rank, num_ranks, local_rank, num_local, host, port, run } =
            of(variables).unwrap().unwrap();
        (rank, num_ranks, local_rank, num_local, host, port, run)
    }

    const BY_HAND: [(&str, &str); 4] =
        [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "4000")];

    #[test]
    fn processes_started_by_torchrun_or_by_hand() {
        assert_eq!(told(&BY_HAND), (3, 4, 0, 1, "10.0.0.1".into(), 4000, String::new()));
        let torchrun = [
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ];
        let torchrun = [&BY_HAND[..], &torchrun].concat();
        assert_eq!(told(&torchrun), (3, 4, 1, 2, "10.0.0.1".into(), 4001, "none".into()));
        let last = [&torchrun[..3], &[("MASTER_PORT", "65535")], &torchrun[4..]].concat();
        assert_eq!(told(&last).5, 65534);
        assert_eq!(told(&[&torchrun[..], &[("SHARDGRAD_PORT", "5000")]].concat()).5, 5000);
        assert_eq!(told(&BY_HAND[..3]).5, 29500);
    }

    #[test]
    fn a_process_that_is_alone_is_none_of_several() {
        for alone in
            [&[][..], &[("RANK", "7")], &[("WORLD_SIZE", "1"), ("RANK", "0")], &[("WORLD_SIZE", " ")]]
        {
            assert_eq!(of(alone).unwrap(), None, "{alone:?}");
        }
        // A script of sbatch, which has more tasks.
        assert_eq!(of(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]).unwrap(), None);
    }

    #[test]
    fn processes_of_mpi() {
        let open = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "prterun-1"),
            // Of the process that starts those of its machine.
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "3"),
        ];
        assert_eq!(told(&open), (1, 2, 1, 2, "127.0.0.1".into(), 29500, "prterun-1".into()));
        let apart = [&open[..2], &[("OMPI_COMM_WORLD_LOCAL_RANK", "0"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]];
        assert!(refused(&apart.concat()).contains("MASTER_ADDR is not set"));
        // The number of processes on the machine is not stated: nothing shows that all are here.
        assert!(refused(&open[..3]).contains("MASTER_ADDR is not set"));
        let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "3"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        assert_eq!(told(&mpich), (0, 3, 0, 1, "a".into(), 1, String::new()));
    }

    const STEP: [(&str, &str); 8] = [
        ("SLURM_PROCID", "5"),
        ("SLURM_STEP_NUM_TASKS", "7"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "4,3"),
        ("SLURM_STEP_NODELIST", "gpu[03-04]"),
        ("SLURM_JOB_ID", "123456"),
        ("SLURM_STEP_ID", "2"),
    ];

    /// `STEP` with some variables changed or added.
    fn step_with<'a>(changed: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        let unchanged = STEP.into_iter().filter(|(name, _)| changed.iter().all(|(other, _)| other != name));
        unchanged.chain(changed.iter().copied()).collect()
    }

    #[test]
    fn tasks_of_slurm() {
        assert_eq!(told(&STEP), (5, 7, 1, 3, "gpu03".into(), 29058, "123456.2".into()));
        // Without the id of the step, those of one job share port and name.
        assert_eq!(told(&STEP[..7]), (5, 7, 1, 3, "gpu03".into(), 29056, "123456".into()));
        // The name of a single node may resolve to nothing.
        let one_node = step_with(&[
            ("SLURM_LOCALID", "5"),
            ("SLURM_NODEID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "7"),
            ("SLURM_STEP_NODELIST", "gpu03"),
        ]);
        assert_eq!(told(&one_node), (5, 7, 5, 7, "127.0.0.1".into(), 29058, "123456.2".into()));
        let elsewhere = [&one_node[..], &[("MASTER_ADDR", "a")]].concat();
        assert_eq!(told(&elsewhere).4, "a");
        assert!(refused(&STEP[..5]).contains("MASTER_ADDR is not set"));
    }

    #[test]
    fn srun_that_sets_pmi_is_slurm() {
        let pmi2 = step_with(&[("PMI_RANK", "5"), ("PMI_SIZE", "7")]);
        assert_eq!(told(&pmi2), told(&STEP));
        // Hydra within a job: SLURM's tasks are its proxies.
        let hydra = step_with(&[
            ("PMI_RANK", "5"),
            ("PMI_SIZE", "6"),
            ("MPI_LOCALRANKID", "2"),
            ("MPI_LOCALNRANKS", "3"),
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_JOB_NODELIST", "gpu[03-04]"),
        ]);
        assert_eq!(told(&hydra), (5, 6, 2, 3, "gpu03".into(), 29058, "123456.2".into()));
    }

    #[test]
    fn mpirun_within_a_job_of_slurm_meets_on_the_first_node_if_rank_0_is_there() {
        let mpi = |rank, local_rank, here: &[(&'static str, &'static str)]| {
            let job = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n[1-2]")];
            let ranks = [("OMPI_COMM_WORLD_RANK", rank), ("OMPI_COMM_WORLD_SIZE", "4")];
            let local = [("OMPI_COMM_WORLD_LOCAL_RANK", local_rank), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
            [&job[..], &ranks, &local, here].concat()
        };
        // Started by mpirun itself, in the batch script, or through srun, on all nodes or on the other ones.
        let script = [("SLURMD_NODENAME", "n1"), ("SLURM_NODEID", "0")];
        let first = [("SLURM_STEP_NODELIST", "n[1-2]"), ("SLURM_NODEID", "0"), ("SLURM_STEP_ID", "3")];
        let second = [("SLURM_STEP_NODELIST", "n[1-2]"), ("SLURM_NODEID", "1"), ("SLURM_STEP_ID", "3")];
        let other = [("SLURM_STEP_NODELIST", "n2"), ("SLURM_NODEID", "0")];
        for (rank, local_rank, here) in [
            ("0", "0", &script[..]),
            ("0", "0", &first),
            ("1", "1", &first),
            ("2", "0", &second),
            ("2", "0", &other),
            ("3", "1", &other),
        ] {
            let read = told(&mpi(rank, local_rank, here));
            assert_eq!((read.4.as_str(), read.5), ("n1", 20_707), "rank {rank}, {here:?}");
        }
        for (rank, here) in [("0", &second[..]), ("0", &other), ("2", &first), ("2", &script)] {
            let text = refused(&mpi(rank, "0", here));
            assert!(text.contains("rank 0 is not on n1, the first node of the job"), "{text}");
        }
        // Nothing shows on which node a process is.
        assert!(refused(&mpi("0", "0", &[])).contains("but MASTER_ADDR is not set"));
        let stated = mpi("0", "0", &[&second[..], &[("MASTER_ADDR", "n2")]].concat());
        assert_eq!((told(&stated).4.as_str(), told(&stated).5), ("n2", 29_500));
    }

    #[test]
    fn nodes_of_aws_batch_are_counted_from_the_main_node() {
        let node = |index, main| {
            let count = ("AWS_BATCH_JOB_NUM_NODES", "3");
            vec![count, ("AWS_BATCH_JOB_NODE_INDEX", index), ("AWS_BATCH_JOB_MAIN_NODE_INDEX", main)]
        };
        let address = ("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "10.0.0.7");
        let child = |index, main| [&node(index, main)[..], &[address]].concat();
        assert_eq!(told(&node("0", "0")), (0, 3, 0, 1, "0.0.0.0".into(), 29500, String::new()));
        assert_eq!(told(&child("2", "0")), (2, 3, 0, 1, "10.0.0.7".into(), 29500, String::new()));
        assert_eq!([told(&node("1", "1")).0, told(&child("2", "1")).0, told(&child("0", "1")).0], [0, 1, 2]);
        assert!(
            refused(&node("1", "0")).contains("but AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is not set")
        );
        assert!(refused(&node("1", "0")[..2]).contains("AWS_BATCH_JOB_MAIN_NODE_INDEX is not set"));
        assert!(refused(&node("1", "3")).contains("AWS_BATCH_JOB_MAIN_NODE_INDEX is 3, but"));
        assert!(refused(&node("1", "0")[..1]).contains("AWS_BATCH_JOB_NODE_INDEX does not say which"));
        assert_eq!(of(&[("AWS_BATCH_JOB_NUM_NODES", "1"), ("AWS_BATCH_JOB_NODE_INDEX", "0")]).unwrap(), None);
    }

    #[test]
    fn pods_of_a_leader_worker_set() {
        let pod =
            [("LWS_GROUP_SIZE", "2"), ("LWS_WORKER_INDEX", "1"), ("LWS_LEADER_ADDRESS", "a-0.a.default")];
        assert_eq!(told(&pod), (1, 2, 0, 1, "a-0.a.default".into(), 29500, String::new()));
        assert!(refused(&pod[..2]).contains("LWS_GROUP_SIZE is 2, but LWS_LEADER_ADDRESS is not set"));
        assert!(refused(&pod[..1]).contains("LWS_WORKER_INDEX does not say which"));
        // torchrun within the pods.
        assert_eq!(told(&[&BY_HAND[..], &pod].concat()), told(&BY_HAND));
    }

    #[test]
    fn a_number_without_a_count_and_an_address_is_refused() {
        for name in ["JOB_COMPLETION_INDEX", "NODE_RANK", "TPU_WORKER_ID"] {
            let text = refused(&[(name, "1")]);
            assert!(text.contains("but RANK, WORLD_SIZE and MASTER_ADDR are not set"), "{text}");
            assert_eq!(of(&[(name, "1"), ("WORLD_SIZE", "1")]).unwrap(), None, "{name}");
            assert_eq!(told(&[&BY_HAND[..], &[(name, "1")]].concat()), told(&BY_HAND), "{name}");
        }
    }

    #[test]
    fn what_is_missing_or_makes_no_sense_is_named() {
        assert!(refused(&BY_HAND[1..]).contains("RANK does not say which"));
        assert!(refused(&BY_HAND[..2]).contains("MASTER_ADDR is not set"));
        let with = |name: &'static str, value: &'static str| {
            let others = BY_HAND.into_iter().filter(|(other, _)| *other != name);
            refused(&others.chain([(name, value)]).collect::<Vec<_>>())
        };
        assert_eq!(with("RANK", "4"), "RANK is 4, but WORLD_SIZE is 4: ranks are counted from 0");
        assert!(with("RANK", "-1").starts_with("RANK is `-1`, which is no count"));
        assert!(with("WORLD_SIZE", "four").starts_with("WORLD_SIZE is `four`"));
        assert!(with("MASTER_PORT", "0").starts_with("MASTER_PORT is `0`, which is no port"));
        assert!(with("SHARDGRAD_PORT", "70000").starts_with("SHARDGRAD_PORT is `70000`"));
        let local = [&BY_HAND[..], &[("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")]].concat();
        assert_eq!(refused(&local), "LOCAL_RANK of rank 3 is 2, but LOCAL_WORLD_SIZE is 2");
    }
}
