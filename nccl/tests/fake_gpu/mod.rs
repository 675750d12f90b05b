//! A fake GPU for each of several processes, and the processes: this test program, started again for each rank.

#[path = "../../../kernels/src/cuda/fake/libraries.rs"]
mod libraries;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use std::{env, fs, thread};

/// The time after which a process of a test aborts itself: it hangs.
const LIMIT: Duration = Duration::from_secs(280);
/// The functions of NCCL that may fail.
pub(crate) const CALLS: [&str; 14] = [
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommSplit",
    "ncclCommGetAsyncError",
    "ncclCommAbort",
    "ncclCommDestroy",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclAllReduce",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclBroadcast",
    "ncclSend",
    "ncclRecv",
];

/// The most ranks of a test.
const RANKS_MAX: usize = 4;
/// The variables of a process of a test: what it does, its rank, the number of ranks, and the folder of the test.
const SCENARIO: &str = "SHARDGRAD_TEST_SCENARIO";
const RANK: &str = "SHARDGRAD_TEST_RANK";
const SIZE: &str = "SHARDGRAD_TEST_SIZE";
const FOLDER: &str = "SHARDGRAD_TEST_FOLDER";

/// The folder of a test with a fake GPU for each rank, deleted on drop. Dropping it fails the test if a fake GPU reported a fault.
pub(crate) struct FakeGpu(PathBuf);

impl FakeGpu {
    /// Installs the libraries with these options (`fake.cc` lists them); `None`, with a message, without g++.
    pub(crate) fn new(name: &str, options: &str) -> Option<FakeGpu> {
        let folder = env::temp_dir().join(format!("shardgrad-fake-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let gpu = FakeGpu(folder);
        let options = format!("gpus={RANKS_MAX} {options}");
        for rank in 0..RANKS_MAX {
            let own = gpu.rank_folder(rank);
            fs::create_dir_all(&own).unwrap();
            if !libraries::install(&own, &options) {
                return None;
            }
        }
        Some(gpu)
    }

    /// The libraries that a rank opens, with options, refusals and faults of its own.
    fn rank_folder(&self, rank: usize) -> PathBuf {
        self.0.join(format!("rank{rank}"))
    }

    /// Refuses all calls of a function on a rank, with a code.
    pub(crate) fn refuse(&self, rank: usize, call: &str, code: i32) {
        refuse_in(&self.rank_folder(rank), call, 1_000_000, code);
    }

    /// Runs a scenario in as many processes, each one rank. Ranks arrive in no order.
    pub(crate) fn run(&self, scenario: &str, size: usize) -> Vec<Output> {
        let start = |rank: usize| {
            let mut process = Command::new(env::current_exe().unwrap());
            process.args(["--exact", "process_of_a_test", "--nocapture", "--test-threads=1"]);
            process.env(SCENARIO, scenario).env(FOLDER, &self.0);
            process.env(RANK, rank.to_string()).env(SIZE, size.to_string());
            ["CUDA", "NVRTC", "CUBLASLT", "NCCL"].iter().for_each(|library| {
                process.env(format!("SHARDGRAD_{library}_PATH"), self.rank_folder(rank));
            });
            process.env("SHARDGRAD_CACHE_DIR", self.rank_folder(rank));
            process.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let order = [2, 0, 3, 1].into_iter().filter(|rank| *rank < size);
        let mut started: Vec<_> = order.map(|rank| (rank, start(rank))).collect();
        started.sort_by_key(|(rank, _)| *rank);
        started.into_iter().map(|(_, process)| process.wait_with_output().unwrap()).collect()
    }

    /// Runs a scenario that succeeds on every rank.
    pub(crate) fn succeeds(&self, scenario: &str, size: usize) {
        self.run(scenario, size).iter().for_each(succeeded);
    }
}

/// Refuses the next calls of a function in a process whose libraries are in a folder, with a code; or lets them misbehave
/// (`kernels/src/cuda/fake/nccl.h`).
pub(crate) fn refuse_in(folder: &Path, call: &str, times: usize, code: i32) {
    fs::write(folder.join("refuse.txt"), format!("{call} 0 {times} {code}\n")).unwrap();
}

/// The folder of the libraries of this process, a rank of a test.
pub(crate) fn own_folder() -> PathBuf {
    PathBuf::from(env::var_os("SHARDGRAD_NCCL_PATH").expect("a process of a test has its own libraries"))
}

impl Drop for FakeGpu {
    fn drop(&mut self) {
        let of =
            |rank: usize| fs::read_to_string(self.rank_folder(rank).join("faults.txt")).unwrap_or_default();
        let faults: String = (0..RANKS_MAX).map(of).collect();
        let _ = fs::remove_dir_all(&self.0);
        assert!(faults.is_empty() || thread::panicking(), "the fake GPU reports: {faults}");
    }
}

/// Fails the test unless a process has succeeded, and has run its scenario.
pub(crate) fn succeeded(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("done"), "{text}");
}

/// Returns scenario, folder, rank and number of ranks of a process of a test; `None` in the test itself.
pub(crate) fn scenario_of_this_process() -> Option<(String, PathBuf, usize, usize)> {
    let number = |name: &str| env::var(name).unwrap().parse().unwrap();
    let scenario = env::var(SCENARIO).ok()?;
    #[allow(clippy::print_stderr, reason = "the test that started the process shows it")]
    thread::spawn(|| {
        thread::sleep(LIMIT);
        eprintln!("the process hangs");
        std::process::abort();
    });
    Some((scenario, PathBuf::from(env::var_os(FOLDER).unwrap()), number(RANK), number(SIZE)))
}
