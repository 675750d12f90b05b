//! A process that is one rank of a world of processes, as its launcher tells it.

use crate::error::{Error, Kind, Result};

/// Where rank 0 listens unless a launcher says otherwise; the port that PyTorch takes.
const PORT: u16 = 29500;
/// The variable that names the port on which ranks meet.
const PORT_VARIABLE: &str = "SHARDGRAD_PORT";
/// Ports for jobs of SLURM are taken from here on, by the number of the job.
const SLURM_PORT: u16 = 20_000;
const SLURM_PORTS: u64 = 10_000;

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

    /// What the launcher of this process tells it; `None` if none has started it as one of several. Known are, in this order:
    ///
    /// | launcher | rank and count | on its machine | where rank 0 is |
    /// |---|---|---|---|
    /// | torchrun, or by hand | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
    /// | `mpirun` of Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_SIZE` | as above; this machine, if all are here |
    /// | `mpiexec` of MPICH | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | as above; this machine, if all are here |
    /// | `srun` of SLURM | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` | as above; the first of `SLURM_STEP_NODELIST` |
    ///
    /// Ranks meet at `SHARDGRAD_PORT` if that is set, else at `MASTER_PORT` or, under torchrun, whose own store listens there
    /// (`TORCHELASTIC_USE_AGENT_STORE`), the port behind it; else at 29500, or for jobs of SLURM a port by the number of the job.
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
        let told = Variables(variable);
        for launcher in &LAUNCHERS {
            if let Some(num_ranks) = told.count(launcher.count)?.filter(|count| *count > 1) {
                return told.process(launcher, num_ranks).map(Some);
            }
        }
        Ok(None)
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

/// The variables of one launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    count: &'static str,
    local_rank: &'static str,
    num_local: &'static str,
    /// What names the run, if anything does.
    run: Option<&'static str>,
}

const TORCHRUN: Launcher = Launcher {
    name: "torchrun",
    rank: "RANK",
    count: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    num_local: "LOCAL_WORLD_SIZE",
    run: Some("TORCHELASTIC_RUN_ID"),
};
const SLURM: Launcher = Launcher {
    name: "srun",
    rank: "SLURM_PROCID",
    // Of the step, not of the job: a script that sbatch runs is told the tasks of its job, but is one process.
    count: "SLURM_STEP_NUM_TASKS",
    local_rank: "SLURM_LOCALID",
    num_local: "SLURM_STEP_TASKS_PER_NODE",
    run: Some("SLURM_JOB_ID"),
};
/// One that runs on top of another comes before it: what the other tells is then of its own processes.
const LAUNCHERS: [Launcher; 4] = [
    TORCHRUN,
    Launcher {
        name: "mpirun of Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        count: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        num_local: "OMPI_COMM_WORLD_LOCAL_SIZE",
        run: Some("PMIX_NAMESPACE"),
    },
    Launcher {
        name: "mpiexec of MPICH",
        rank: "PMI_RANK",
        count: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        num_local: "MPI_LOCALNRANKS",
        run: None,
    },
    SLURM,
];

/// What the environment tells.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// A variable that is set to something.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty())
    }

    fn count(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let junk = |_| Error::new(Kind::Config, format!("{name} is `{value}`, which is no count"));
        value.parse().map(Some).map_err(junk)
    }

    fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let port = value.parse().ok().filter(|port| *port > 0);
        let why = || format!("{name} is `{value}`, which is no port: one is a number from 1 to 65535");
        port.map(Some).ok_or_else(|| Error::new(Kind::Config, why()))
    }

    fn process(&self, launcher: &Launcher, num_ranks: usize) -> Result<Process> {
        let Launcher { name, rank, count, .. } = *launcher;
        let missing = || {
            let why =
                format!("{count} is {num_ranks}, but {rank} does not say which of them this process is");
            let help = format!("start it with {name}, set {rank} for each process, or unset {count}");
            Error::new(Kind::Config, why).detail("help", help)
        };
        let at = self.count(rank)?.ok_or_else(missing)?;
        if at >= num_ranks {
            let why = format!("{rank} is {at}, but {count} is {num_ranks}: ranks are counted from 0");
            return Err(Error::new(Kind::Config, why));
        }
        let (local_rank, num_local) = self.local(launcher, at)?;
        let host = self.host(launcher, num_ranks, num_local)?;
        let process = Process::new(at, num_ranks, &host, self.meeting_port(launcher)?)?;
        let run = launcher.run.and_then(|run| self.get(run)).unwrap_or_default();
        Ok(process.beside(local_rank, num_local)?.of_run(&run))
    }

    /// The number of a process on its machine, and how many are there; as if it were alone, where nothing is told.
    fn local(&self, launcher: &Launcher, rank: usize) -> Result<(usize, usize)> {
        let at = self.count(launcher.local_rank)?;
        let all = match self.get(launcher.num_local) {
            Some(list) if launcher.name == SLURM.name => {
                tasks_on(&list, self.count("SLURM_NODEID")?.unwrap_or(0))
            }
            _ => self.count(launcher.num_local)?,
        };
        match (at, all) {
            (Some(at), Some(all)) if at >= all => {
                let (name, of) = (launcher.local_rank, launcher.num_local);
                Err(Error::new(Kind::Config, format!("{name} of rank {rank} is {at}, but {of} is {all}")))
            }
            (Some(at), all) => Ok((at, all.unwrap_or(at + 1))),
            (None, _) => Ok((0, 1)),
        }
    }

    fn host(&self, launcher: &Launcher, num_ranks: usize, num_local: usize) -> Result<String> {
        if let Some(host) = self.get("MASTER_ADDR") {
            return Ok(host);
        }
        if launcher.name == SLURM.name
            && let Some(first) = self.get("SLURM_STEP_NODELIST").as_deref().and_then(first_node)
        {
            return Ok(first);
        }
        // By hand, nothing tells that all are on this machine.
        if num_local == num_ranks && launcher.name != TORCHRUN.name {
            return Ok("127.0.0.1".to_string());
        }
        let why = format!("{} is {num_ranks}, but MASTER_ADDR is not set", launcher.count);
        let help =
            "set MASTER_ADDR to a name or an address of the machine of rank 0, the same for all processes";
        Err(Error::new(Kind::Config, why).detail("help", help))
    }

    fn meeting_port(&self, launcher: &Launcher) -> Result<u16> {
        if let Some(port) = self.port(PORT_VARIABLE)? {
            return Ok(port);
        }
        let is_taken =
            self.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
        if let Some(port) = self.port("MASTER_PORT")? {
            // Behind the last port there is none.
            return Ok(if is_taken { port.checked_add(1).unwrap_or(port - 1) } else { port });
        }
        let job = if launcher.name == SLURM.name { self.count("SLURM_JOB_ID")? } else { None };
        Ok(job.map_or(PORT, |job| SLURM_PORT + (job as u64 % SLURM_PORTS) as u16))
    }
}

/// The tasks on a node, of a list like `4(x2),3`.
fn tasks_on(list: &str, node: usize) -> Option<usize> {
    let mut before = 0;
    for part in list.split(',') {
        let (tasks, times) = match part.split_once("(x") {
            None => (part, 1),
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
        };
        before += times;
        if node < before {
            return tasks.trim().parse().ok();
        }
    }
    None
}

/// The first node of a list like `gpu[03-06,9],login1` or `n1,n2`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let Some(rest) = rest.strip_prefix('[') else { return Some(name.to_string()).filter(|n| !n.is_empty()) };
    let (inside, behind) = rest.split_once(']')?;
    let first = inside.split([',', '-']).next()?;
    let behind = behind.split(',').next().unwrap_or_default();
    Some(format!("{name}{first}{behind}"))
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
        let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "3"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        assert_eq!(told(&mpich), (0, 3, 0, 1, "a".into(), 1, String::new()));
    }

    #[test]
    fn tasks_of_slurm() {
        let step = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "7"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "4,3"),
            ("SLURM_STEP_NODELIST", "gpu[03-04]"),
            ("SLURM_JOB_ID", "123456"),
        ];
        assert_eq!(told(&step), (5, 7, 1, 3, "gpu03".into(), 23456, "123456".into()));
        for (list, first) in [
            ("n1,n2", "n1"),
            ("n7", "n7"),
            ("a[1,3]-x,b", "a1-x"),
            ("a[09-11],b[1-2]", "a09"),
            ("x,a[1-2]", "x"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        let on = |node| tasks_on("4(x2),3", node);
        assert_eq!([on(0), on(1), on(2), on(3)], [Some(4), Some(4), Some(3), None]);
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
