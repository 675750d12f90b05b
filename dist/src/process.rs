//! A process that is one rank of a world, read from the environment variables of its launcher (torchrun, mpirun, srun, ...).

mod environment;
mod token;
mod incomplete_environment;
mod slurm;
mod launcher;

pub use token::Token;

use crate::error::{Error, Kind, Result};
use environment::EnvVars;

/// The rank of this process, the number of ranks, and the address of the rendezvous (PyTorch: `RANK`, `WORLD_SIZE`, `MASTER_ADDR`,
/// `MASTER_PORT`).
///
/// [`Process::from_environment`] reads them from the variables of a launcher; a program that starts its processes itself uses
/// [`Process::new`].
#[doc(alias = "RANK")]
#[doc(alias = "WORLD_SIZE")]
#[doc(alias = "LOCAL_RANK")]
#[doc(alias = "MASTER_ADDR")]
#[doc(alias = "MASTER_PORT")]
#[doc(alias = "torchrun")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    rank: usize,
    num_ranks: usize,
    local_rank: usize,
    num_local_ranks: usize,
    host: String,
    port: u16,
    listen_host: Option<String>,
    run_id: String,
    token: Option<Token>,
    is_insecure: bool,
    is_encrypted: Option<bool>,
}

impl Process {
    /// Rank `rank` of `num_ranks`, with the rendezvous at `host` and `port`: a host name or address by which all other ranks reach the
    /// machine of rank 0, and the port on which rank 0 listens there. All ranks are taken to be on one machine, unless
    /// [`Process::with_local_rank`] is called.
    ///
    /// # Errors
    /// `Kind::Config` if `rank` is not below `num_ranks`.
    pub fn new(rank: usize, num_ranks: usize, host: &str, port: u16) -> Result<Process> {
        if rank >= num_ranks {
            let why = format!("there is no rank {rank} among {num_ranks}: ranks are counted from 0");
            return Err(Error::new(Kind::Config, why));
        }
        Ok(Process {
            rank,
            num_ranks,
            local_rank: rank,
            num_local_ranks: num_ranks,
            host: host.to_string(),
            port,
            listen_host: None,
            run_id: String::new(),
            token: None,
            is_insecure: false,
            is_encrypted: None,
        })
    }

    /// Sets the rank of this process among the processes on its machine, and their number: they share the cores.
    ///
    /// # Errors
    /// `Kind::Config` if `local_rank` is not below `num_local_ranks`.
    pub fn with_local_rank(self, local_rank: usize, num_local_ranks: usize) -> Result<Process> {
        if local_rank >= num_local_ranks {
            let why = format!(
                "there is no local rank {local_rank} among {num_local_ranks} processes on a machine: local ranks are counted from 0"
            );
            return Err(Error::new(Kind::Config, why));
        }
        Ok(Process { local_rank, num_local_ranks, ..self })
    }

    /// Sets where rank 0 listens: a name or an address of its machine, or `0.0.0.0` for all of its addresses. Default: at the host by
    /// which the others reach it. A host that is no address of that machine needs it, such as the virtual address of a Kubernetes
    /// Service. The other ranks ignore it.
    #[must_use]
    pub fn listen(self, host: &str) -> Process {
        Process { listen_host: Some(host.to_string()), ..self }
    }

    /// Sets the id of the run: rank 0 rejects processes of other runs that connect to the same port.
    #[must_use]
    pub fn with_run_id(self, run_id: &str) -> Process {
        Process { run_id: run_id.to_string(), ..self }
    }

    /// Sets the token of the run, which each process proves to each other one. Default: if all ranks are on one machine, a random token
    /// that rank 0 leaves in a file of the user's run-time folder (`XDG_RUNTIME_DIR`, else a folder of the temporary folder) until all
    /// ranks are connected. Ranks on several machines have no default: without a token, [`Rendezvous::open`](crate::Rendezvous::open)
    /// is an error unless the process is [`insecure`](Process::insecure).
    #[must_use]
    pub fn token(self, token: Token) -> Process {
        Process { token: Some(token), is_insecure: false, ..self }
    }

    /// Connects without a token: anyone who reaches the ports of the ranks can take a rank, read and change what is sent, and end the run.
    #[must_use]
    pub fn insecure(self) -> Process {
        Process { token: None, is_insecure: true, ..self }
    }

    /// Sets whether connections are encrypted; they are authenticated in any case, unless the process is
    /// [`insecure`](Process::insecure). All ranks need the same choice. Default: encrypted between machines, not on one machine.
    #[must_use]
    pub fn encrypt(self, is_encrypted: bool) -> Process {
        Process { is_encrypted: Some(is_encrypted), ..self }
    }

    /// Reads the process from the environment variables of its launcher; `None` if the process is alone. Launchers are recognized in
    /// this order:
    ///
    /// | launcher | rank and count | local rank and count | host of rank 0 |
    /// |---|---|---|---|
    /// | torchrun, or started by hand | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
    /// | `mpirun` of Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_SIZE` | as above; else this machine, if all ranks are on it; else the first node of the SLURM job, if rank 0 is there |
    /// | `mpiexec` of MPICH | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | as for Open MPI |
    /// | `srun` of SLURM | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` | as above; else this machine, if all ranks are on it; else the first of `SLURM_STEP_NODELIST` |
    /// | AWS Batch, multi-node parallel job | `AWS_BATCH_JOB_NODE_INDEX`, `AWS_BATCH_JOB_NUM_NODES` | one process per machine | as above; else `AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS` |
    /// | LeaderWorkerSet of Kubernetes | `LWS_WORKER_INDEX`, `LWS_GROUP_SIZE` | one process per machine | as above; else `LWS_LEADER_ADDRESS` |
    ///
    /// If `PMI_*` and `SLURM_*` agree, the launcher is `srun`. Ranks of AWS Batch are counted from the main node
    /// (`AWS_BATCH_JOB_MAIN_NODE_INDEX`). The last two rows are from the platforms' documentation and have not been run.
    ///
    /// The port of the rendezvous is `SHARDGRAD_PORT` if that is set; else `MASTER_PORT` or, if torchrun's own store listens there
    /// (`TORCHELASTIC_USE_AGENT_STORE`), the port above it; else 29500, or within a SLURM job a port computed from the ids of job and
    /// step.
    ///
    /// Variables that number the processes of a job without their count and the address of rank 0 (`JOB_COMPLETION_INDEX`,
    /// `TPU_WORKER_ID`, `SM_CURRENT_HOST`, `NODE_RANK`) are an error, unless `WORLD_SIZE=1` states that the process is alone.
    ///
    /// `SHARDGRAD_TOKEN` is the [token](Process::token) of the run, `SHARDGRAD_LISTEN` where rank 0 [listens](Process::listen).
    ///
    /// # Errors
    /// `Kind::Config` naming the variable that is missing or invalid.
    #[doc(alias = "env://")]
    pub fn from_environment() -> Result<Option<Process>> {
        Process::from_variables(&|name| std::env::var(name).ok())
    }

    /// [`Process::from_environment`] with a lookup function in place of the environment.
    ///
    /// # Errors
    /// As [`Process::from_environment`].
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Process>> {
        launcher::read(&EnvVars(variable))
    }

    /// The rank of this process.
    #[doc(alias = "get_rank")]
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    #[doc(alias = "get_world_size")]
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    /// The rank of this process among the processes on its machine.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The number of processes of the world on this machine.
    #[doc(alias = "LOCAL_WORLD_SIZE")]
    #[must_use]
    pub fn num_local_ranks(&self) -> usize {
        self.num_local_ranks
    }

    /// The host name or address of rank 0.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port on which rank 0 listens until all ranks are connected.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where rank 0 [listens](Process::listen), if not at its host.
    #[must_use]
    pub fn listen_host(&self) -> Option<&str> {
        self.listen_host.as_deref()
    }

    /// Whether all ranks are on this machine.
    #[must_use]
    pub fn is_on_one_machine(&self) -> bool {
        let is_loopback = self.host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
        self.num_local_ranks == self.num_ranks || is_loopback || self.host == "localhost"
    }

    /// Whether the process connects [without a token](Process::insecure).
    #[must_use]
    pub fn is_insecure(&self) -> bool {
        self.is_insecure
    }

    /// Whether connections are [encrypted](Process::encrypt).
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        !self.is_insecure && self.is_encrypted.unwrap_or(!self.is_on_one_machine())
    }

    /// Whether a [token](Process::token) is set.
    #[must_use]
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// The source of the token, if one is set.
    pub(crate) fn token_source(&self) -> Option<&Token> {
        self.token.as_ref()
    }

    /// The id of the run; empty if it has none.
    #[doc(alias = "TORCHELASTIC_RUN_ID")]
    #[doc(alias = "rdzv_id")]
    #[must_use]
    pub fn run_id(&self) -> &str {
        &self.run_id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Process>> {
        let get = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        Process::from_variables(&get)
    }

    fn error_text(variables: &[(&str, &str)]) -> String {
        let error = read(variables).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        error.to_string()
    }

    fn parsed(variables: &[(&str, &str)]) -> Process {
        read(variables).unwrap().unwrap()
    }

    /// The process with these numbers: rank, number of ranks, local rank, number of local ranks.
    fn process(numbers: [usize; 4], host: &str, port: u16, run_id: &str) -> Process {
        let [rank, num_ranks, local_rank, num_local_ranks] = numbers;
        let process = Process::new(rank, num_ranks, host, port).unwrap();
        process.with_local_rank(local_rank, num_local_ranks).unwrap().with_run_id(run_id)
    }

    const BY_HAND: [(&str, &str); 4] =
        [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "4000")];

    #[test]
    fn processes_started_by_torchrun_or_by_hand() {
        assert_eq!(parsed(&BY_HAND), process([3, 4, 0, 1], "10.0.0.1", 4000, ""));
        let torchrun = [
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ];
        let torchrun = [&BY_HAND[..], &torchrun].concat();
        assert_eq!(parsed(&torchrun), process([3, 4, 1, 2], "10.0.0.1", 4001, "none"));
        let last = [&torchrun[..3], &[("MASTER_PORT", "65535")], &torchrun[4..]].concat();
        assert_eq!(parsed(&last).port, 65534);
        assert_eq!(parsed(&[&torchrun[..], &[("SHARDGRAD_PORT", "5000")]].concat()).port, 5000);
        assert_eq!(parsed(&BY_HAND[..3]).port, 29500);
        let forwarded = parsed(&[&BY_HAND[..], &[("SHARDGRAD_LISTEN", "0.0.0.0")]].concat());
        assert_eq!((forwarded.host(), forwarded.listen_host()), ("10.0.0.1", Some("0.0.0.0")));
    }

    #[test]
    fn token_is_read_and_never_printed() {
        let with_token = parsed(&[&BY_HAND[..], &[("SHARDGRAD_TOKEN", "0123456789abcdef")]].concat());
        assert_eq!(with_token.token_source(), Some(&Token::Text("0123456789abcdef".to_string())));
        assert!(!format!("{with_token:?}").contains("0123456789abcdef"));
        assert!(!with_token.is_on_one_machine() && with_token.is_encrypted());
        assert!(!with_token.clone().encrypt(false).is_encrypted());
        let insecure = with_token.insecure();
        assert!(insecure.is_insecure() && !insecure.is_encrypted() && insecure.token_source().is_none());
        let local = parsed(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]);
        assert!(local.is_on_one_machine() && !local.is_encrypted() && local.token_source().is_none());
    }

    #[test]
    fn process_without_a_launcher_is_alone() {
        for alone in
            [&[][..], &[("RANK", "7")], &[("WORLD_SIZE", "1"), ("RANK", "0")], &[("WORLD_SIZE", " ")]]
        {
            assert_eq!(read(alone).unwrap(), None, "{alone:?}");
        }
        // A batch script under sbatch is one process, although its job has several tasks.
        assert_eq!(read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]).unwrap(), None);
    }

    #[test]
    fn processes_started_by_mpirun_and_mpiexec() {
        let open = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "prterun-1"),
            // Of mpirun's daemon, which starts the processes of its machine.
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "3"),
        ];
        assert_eq!(parsed(&open), process([1, 2, 1, 2], "127.0.0.1", 29500, "prterun-1"));
        let apart = [&open[..2], &[("OMPI_COMM_WORLD_LOCAL_RANK", "0"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]];
        assert!(error_text(&apart.concat()).contains("MASTER_ADDR is not set"));
        // Without the number of processes on the machine, nothing shows that all ranks are here.
        assert!(error_text(&open[..3]).contains("MASTER_ADDR is not set"));
        let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "3"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        assert_eq!(parsed(&mpich), process([0, 3, 0, 1], "a", 1, ""));
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

    /// `STEP` with variables changed or added.
    fn step_with<'a>(changed: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        let unchanged = STEP.into_iter().filter(|(name, _)| changed.iter().all(|(other, _)| other != name));
        unchanged.chain(changed.iter().copied()).collect()
    }

    #[test]
    fn tasks_started_by_srun() {
        assert_eq!(parsed(&STEP), process([5, 7, 1, 3], "gpu03", 29058, "123456.2"));
        // Without the id of the step, all steps of a job share port and run id.
        assert_eq!(parsed(&STEP[..7]), process([5, 7, 1, 3], "gpu03", 29056, "123456"));
        // The name of a single node may not resolve; the loopback address always works.
        let one_node = step_with(&[
            ("SLURM_LOCALID", "5"),
            ("SLURM_NODEID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "7"),
            ("SLURM_STEP_NODELIST", "gpu03"),
        ]);
        assert_eq!(parsed(&one_node), process([5, 7, 5, 7], "127.0.0.1", 29058, "123456.2"));
        let elsewhere = [&one_node[..], &[("MASTER_ADDR", "a")]].concat();
        assert_eq!(parsed(&elsewhere).host, "a");
        assert!(error_text(&STEP[..5]).contains("MASTER_ADDR is not set"));
    }

    #[test]
    fn srun_with_pmi_variables_is_not_mpich() {
        let pmi2 = step_with(&[("PMI_RANK", "5"), ("PMI_SIZE", "7")]);
        assert_eq!(parsed(&pmi2), parsed(&STEP));
        // MPICH's Hydra within a job: the tasks of SLURM are Hydra's proxies.
        let hydra = step_with(&[
            ("PMI_RANK", "5"),
            ("PMI_SIZE", "6"),
            ("MPI_LOCALRANKID", "2"),
            ("MPI_LOCALNRANKS", "3"),
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_JOB_NODELIST", "gpu[03-04]"),
        ]);
        assert_eq!(parsed(&hydra), process([5, 6, 2, 3], "gpu03", 29058, "123456.2"));
    }

    #[test]
    fn mpirun_in_a_slurm_job_uses_the_first_node_if_rank_0_is_there() {
        let mpi = |rank, local_rank, here: &[(&'static str, &'static str)]| {
            let job = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n[1-2]")];
            let ranks = [("OMPI_COMM_WORLD_RANK", rank), ("OMPI_COMM_WORLD_SIZE", "4")];
            let local = [("OMPI_COMM_WORLD_LOCAL_RANK", local_rank), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
            [&job[..], &ranks, &local, here].concat()
        };
        // Ranks started by mpirun itself in the batch script, or through srun, on all nodes or on the other nodes.
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
            let read = parsed(&mpi(rank, local_rank, here));
            assert_eq!((read.host.as_str(), read.port), ("n1", 20_707), "rank {rank}, {here:?}");
        }
        for (rank, here) in [("0", &second[..]), ("0", &other), ("2", &first), ("2", &script)] {
            let text = error_text(&mpi(rank, "0", here));
            assert!(text.contains("rank 0 is not on n1, the first node of the job"), "{text}");
        }
        // No variable shows the node of the process.
        assert!(error_text(&mpi("0", "0", &[])).contains("but MASTER_ADDR is not set"));
        let stated = mpi("0", "0", &[&second[..], &[("MASTER_ADDR", "n2")]].concat());
        assert_eq!((parsed(&stated).host.as_str(), parsed(&stated).port), ("n2", 29_500));
    }

    #[test]
    fn nodes_of_aws_batch_are_counted_from_the_main_node() {
        let node = |index, main| {
            let count = ("AWS_BATCH_JOB_NUM_NODES", "3");
            vec![count, ("AWS_BATCH_JOB_NODE_INDEX", index), ("AWS_BATCH_JOB_MAIN_NODE_INDEX", main)]
        };
        let address = ("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "10.0.0.7");
        let child = |index, main| [&node(index, main)[..], &[address]].concat();
        assert_eq!(parsed(&node("0", "0")), process([0, 3, 0, 1], "0.0.0.0", 29500, ""));
        assert_eq!(parsed(&child("2", "0")), process([2, 3, 0, 1], "10.0.0.7", 29500, ""));
        assert_eq!(
            [parsed(&node("1", "1")).rank, parsed(&child("2", "1")).rank, parsed(&child("0", "1")).rank],
            [0, 1, 2]
        );
        assert!(
            error_text(&node("1", "0"))
                .contains("but AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is not set")
        );
        assert!(error_text(&node("1", "0")[..2]).contains("AWS_BATCH_JOB_MAIN_NODE_INDEX is not set"));
        assert!(error_text(&node("1", "3")).contains("AWS_BATCH_JOB_MAIN_NODE_INDEX is 3, but"));
        assert!(error_text(&node("1", "0")[..1]).contains("AWS_BATCH_JOB_NODE_INDEX is not set"));
        assert_eq!(
            read(&[("AWS_BATCH_JOB_NUM_NODES", "1"), ("AWS_BATCH_JOB_NODE_INDEX", "0")]).unwrap(),
            None
        );
    }

    #[test]
    fn pods_of_a_kubernetes_leader_worker_set() {
        let pod =
            [("LWS_GROUP_SIZE", "2"), ("LWS_WORKER_INDEX", "1"), ("LWS_LEADER_ADDRESS", "a-0.a.default")];
        assert_eq!(parsed(&pod), process([1, 2, 0, 1], "a-0.a.default", 29500, ""));
        assert!(error_text(&pod[..2]).contains("LWS_GROUP_SIZE is 2, but LWS_LEADER_ADDRESS is not set"));
        assert!(error_text(&pod[..1]).contains("LWS_WORKER_INDEX is not set"));
        // torchrun inside the pods.
        assert_eq!(parsed(&[&BY_HAND[..], &pod].concat()), parsed(&BY_HAND));
    }

    #[test]
    fn index_without_count_and_address_is_an_error() {
        for name in ["JOB_COMPLETION_INDEX", "NODE_RANK", "TPU_WORKER_ID"] {
            let text = error_text(&[(name, "1")]);
            assert!(text.contains("but RANK, WORLD_SIZE and MASTER_ADDR are not set"), "{text}");
            assert_eq!(read(&[(name, "1"), ("WORLD_SIZE", "1")]).unwrap(), None, "{name}");
            assert_eq!(parsed(&[&BY_HAND[..], &[(name, "1")]].concat()), parsed(&BY_HAND), "{name}");
        }
    }

    #[test]
    fn errors_name_the_missing_or_invalid_variable() {
        assert!(error_text(&BY_HAND[1..]).contains("WORLD_SIZE is 4, but RANK is not set"));
        assert!(error_text(&BY_HAND[..2]).contains("MASTER_ADDR is not set"));
        let with = |name: &'static str, value: &'static str| {
            let others = BY_HAND.into_iter().filter(|(other, _)| *other != name);
            error_text(&others.chain([(name, value)]).collect::<Vec<_>>())
        };
        assert_eq!(with("RANK", "4"), "RANK is 4, but WORLD_SIZE is 4: ranks are counted from 0");
        assert!(with("RANK", "-1").starts_with("RANK is `-1`, which is not a whole number"));
        assert!(with("WORLD_SIZE", "four").starts_with("WORLD_SIZE is `four`"));
        assert!(with("MASTER_PORT", "0").starts_with("MASTER_PORT is `0`, which is not a port"));
        assert!(with("SHARDGRAD_PORT", "70000").starts_with("SHARDGRAD_PORT is `70000`"));
        let local = [&BY_HAND[..], &[("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")]].concat();
        assert_eq!(error_text(&local), "LOCAL_RANK of rank 3 is 2, but LOCAL_WORLD_SIZE is 2");
    }
}
