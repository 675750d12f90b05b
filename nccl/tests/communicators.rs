//! Communicators of two to four processes on the fake GPU and its NCCL: every operation, uneven and empty parts, refused calls, lost and
//! unlike peers, aborts in flight.

mod fake_gpu;

use fake_gpu::{CALLS, FakeGpu, own_folder, scenario_of_this_process};
use shardgrad_kernels::cuda::{CudaDevice, SearchPaths};
use shardgrad_kernels::{
    Backend, BackendConfig, BackendProvider, Buffer, DType, KernelError, ResultCheck, download, upload,
};
use shardgrad_nccl::{Communicator, Nccl, Part, ReduceOp, SplitGroup, UniqueId};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

/// How long a wait may last before the process gives up.
const LIMIT: Duration = Duration::from_secs(20);

/// The check of results that are valid until operations are aborted.
#[derive(Debug)]
struct IsValid(AtomicBool);

impl ResultCheck for IsValid {
    fn check(&self) -> Outcome<()> {
        let why = KernelError::Device { call: "ncclCommAbort", why: "enough".into(), lost_gpu: None };
        if self.0.load(Ordering::SeqCst) { Ok(()) } else { Err(why) }
    }
}

/// One process: its back end and its communicator of all ranks.
struct Member {
    // Before the back end, which waits for all work when it is dropped.
    comm: Communicator,
    own: Arc<dyn Backend>,
    rank: usize,
}

type Outcome<T> = Result<T, KernelError>;

/// Returns a check that fails after the limit.
fn until_limit() -> impl FnMut() -> Outcome<()> {
    let start = Instant::now();
    move || match start.elapsed() > LIMIT {
        true => Err(KernelError::Device { call: "a wait", why: "too long".into(), lost_gpu: None }),
        false => Ok(()),
    }
}

impl Member {
    fn join(folder: &Path, rank: usize, size: usize) -> Outcome<Member> {
        let paths = SearchPaths::from_env();
        let own = CudaDevice::open(&paths, rank)?.backend(BackendConfig::default())?;
        let nccl = Nccl::open(&paths)?;
        let file = folder.join("id");
        if rank == 0 {
            fs::write(folder.join("draft"), nccl.unique_id()?.0).unwrap();
            fs::rename(folder.join("draft"), &file).unwrap();
        }
        let mut tick = until_limit();
        let id = loop {
            match fs::read(&file) {
                Ok(id) => break UniqueId(id.try_into().unwrap()),
                Err(_) => tick()?,
            }
            thread::sleep(Duration::from_millis(1));
        };
        let comm = Communicator::join(&nccl, &*own, &id, (rank, size), &mut tick)?;
        Ok(Member { own, comm, rank })
    }

    /// Submits parts to the communication stream; returns `numel` elements.
    fn submit(&self, comm: &Communicator, x: &Buffer, bytes: usize, parts: &[Part]) -> Outcome<Buffer> {
        let on = self.own.begin_async()?.expect("a GPU has a communication stream");
        let mut y = on.alloc(bytes)?;
        let submitted = comm.submit(on, Some(x), Some(&mut y), parts, &mut until_limit());
        self.own.end_async()?;
        submitted.map(|()| y)
    }

    fn up(&self, values: &[f32]) -> Outcome<Buffer> {
        upload(&*self.own, values)
    }

    fn down(&self, y: &Buffer, numel: usize) -> Outcome<Vec<f32>> {
        download(&*self.own, y, numel)
    }

    /// The element i of a rank.
    fn value(rank: usize, i: usize) -> f32 {
        (100 * rank + i) as f32
    }

    fn values(&self, numel: usize) -> Vec<f32> {
        (0..numel).map(|i| Member::value(self.rank, i)).collect()
    }

    /// Runs every operation and compares its result with the definition.
    fn all_operations(&self, comm: &Communicator, members: &[usize]) -> Outcome<()> {
        let me = members.iter().position(|rank| *rank == self.rank).unwrap();
        let (size, n) = (members.len(), 6);
        let x = self.up(&self.values(n * size))?;
        let over = |each: &dyn Fn(usize) -> f32| members.iter().map(|rank| each(*rank)).collect::<Vec<f32>>();
        for (op, reduce) in [
            (ReduceOp::Sum, (|a, b| a + b) as fn(f32, f32) -> f32),
            (ReduceOp::Max, f32::max),
            (ReduceOp::Min, f32::min),
        ] {
            let y = self.submit(comm, &x, 4 * n, &[Part::AllReduce { numel: n, dtype: DType::F32, op }])?;
            let due = |i: usize| over(&|rank| Member::value(rank, i)).into_iter().reduce(reduce).unwrap();
            assert_eq!(self.down(&y, n)?, (0..n).map(due).collect::<Vec<f32>>(), "{op:?}");
        }
        let y = self.submit(comm, &x, 4 * n, &[Part::ReduceScatter { numel: n, dtype: DType::F32 }])?;
        let due = |i: usize| over(&|rank| Member::value(rank, me * n + i)).into_iter().sum::<f32>();
        assert_eq!(self.down(&y, n)?, (0..n).map(due).collect::<Vec<f32>>());
        let y = self.submit(comm, &x, 4 * n * size, &[Part::AllGather { bytes: 4 * n }])?;
        let due =
            members.iter().flat_map(|rank| (0..n).map(|i| Member::value(*rank, i))).collect::<Vec<f32>>();
        assert_eq!(self.down(&y, n * size)?, due);
        for (root, rank) in members.iter().enumerate() {
            let on = self.own.begin_async()?.unwrap();
            let mut y = on.alloc(4 * n)?;
            let (x, y_or_none) = if me == root { (Some(&x), None) } else { (None, Some(&mut y)) };
            comm.submit(on, x, y_or_none, &[Part::Broadcast { bytes: 4 * n, root }], &mut until_limit())?;
            self.own.end_async()?;
            if me != root {
                let due = (0..n).map(|i| Member::value(*rank, i)).collect::<Vec<f32>>();
                assert_eq!(self.down(&y, n)?, due, "from {root}");
            }
        }
        // Rank i sends rank j a run of i + j elements, none from 0 to 0 and to itself.
        let run = |i: usize, j: usize| if i == j { 0 } else { 4 * (i + j) };
        let mut parts = Vec::new();
        let mut at = 0;
        for other in 0..size {
            parts.push(Part::Recv { range: at..at + run(other, me), from: other });
            parts.push(Part::Send { range: 0..run(me, other), to: other });
            at += run(other, me);
        }
        parts.retain(
            |part| !matches!(part, Part::Send { range, .. } | Part::Recv { range, .. } if range.is_empty()),
        );
        let y = self.submit(comm, &x, at, &parts)?;
        let due =
            (0..size).flat_map(|from| (0..run(from, me) / 4).map(move |i| Member::value(members[from], i)));
        assert_eq!(self.down(&y, at / 4)?, due.collect::<Vec<f32>>());
        Ok(())
    }

    /// Splits the communicator once its operations are done, as NCCL demands.
    fn split(&self, color: usize, rank: usize, size: usize) -> Outcome<Communicator> {
        self.own.synchronize()?;
        let group = SplitGroup { color, rank, size, num_blocks_max: 0 };
        Ok(self.comm.split(Some(&group), &mut until_limit())?.expect("the rank joins"))
    }

    /// Makes every call of the library, of which one is refused.
    fn every_call(&self, size: usize) -> Outcome<()> {
        self.all_operations(&self.comm, &(0..size).collect::<Vec<usize>>())?;
        self.split(0, self.rank, size)?.destroy(LIMIT)
    }

    /// Begins an all-reduce and returns how its result is read: the error of the result check if it is aborted.
    fn aborted_all_reduce(&self, numel: usize, is_over: impl Fn() -> bool + Sync) -> Outcome<Vec<f32>> {
        let x = self.up(&self.values(numel))?;
        let is_valid = Arc::new(IsValid(AtomicBool::new(true)));
        self.own.set_result_check(is_valid.clone());
        thread::scope(|scope| {
            let y = self.submit(
                &self.comm,
                &x,
                4 * numel,
                &[Part::AllReduce { numel, dtype: DType::F32, op: ReduceOp::Sum }],
            )?;
            scope.spawn(|| {
                while !is_over() {
                    thread::sleep(Duration::from_millis(2));
                }
                is_valid.0.store(false, Ordering::SeqCst);
                self.comm.abort(LIMIT).unwrap();
            });
            self.down(&y, numel)
        })
    }
}

/// Lets other ranks know that this rank has come as far as they wait for.
fn arrive(folder: &Path, rank: usize) {
    fs::write(folder.join(format!("arrived{rank}")), "").unwrap();
}

/// Waits until ranks have arrived.
fn wait_for(folder: &Path, ranks: Range<usize>) -> Outcome<()> {
    let mut tick = until_limit();
    while !ranks.clone().all(|rank| folder.join(format!("arrived{rank}")).exists()) {
        tick()?;
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Waits until the library of this process has so many communicators.
fn wait_for_communicators(count: usize) -> Outcome<()> {
    let (file, mut tick) = (own_folder().join("communicators.txt"), until_limit());
    while fs::read_to_string(&file).unwrap_or_default() != count.to_string() {
        tick()?;
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Returns the message of an expected error.
fn message<T: std::fmt::Debug>(outcome: Outcome<T>) -> String {
    outcome.unwrap_err().to_string()
}

/// What each rank of a scenario does.
fn scenario(name: &str, folder: &Path, rank: usize, size: usize) -> Outcome<()> {
    if let Some(call) = name.strip_prefix("refused ") {
        let joined = Member::join(folder, rank, size);
        let text = match &joined {
            Err(error) => error.to_string(),
            Ok(member) => message(member.every_call(size)),
        };
        assert!(
            text.contains("invalid usage (5)") && text.contains(&format!("the fake refuses {call}")),
            "{text}"
        );
        // A rank that leaves earlier closes its connections, which is an error of its peers.
        arrive(folder, rank);
        return wait_for(folder, 0..size);
    }
    let member = Member::join(folder, rank, size)?;
    let everyone: Vec<usize> = (0..size).collect();
    match name {
        "all" => {
            member.all_operations(&member.comm, &everyone)?;
            // Groups as of a mesh of two axes: neighbors, and ranks with the same parity.
            for color in [|rank: usize| rank / 2, |rank: usize| rank % 2] {
                let of = |other: &usize| color(*other);
                let members: Vec<usize> =
                    everyone.iter().copied().filter(|other| of(other) == of(&rank)).collect();
                let key = members.iter().position(|other| *other == rank).unwrap();
                let split = member.split(of(&rank), key, members.len())?;
                member.all_operations(&split, &members)?;
                member.own.synchronize()?;
                split.destroy(LIMIT)?;
            }
            // Two ranks join a communicator, and others none.
            let (color, size) = (7, 2);
            let pair = SplitGroup { color, rank, size, num_blocks_max: 4 };
            let pair = member.comm.split((rank < 2).then_some(&pair), &mut until_limit())?;
            assert_eq!(pair.is_some(), rank < 2);
            if let Some(pair) = pair {
                member.all_operations(&pair, &everyone[..2])?;
                member.own.synchronize()?;
                pair.destroy(LIMIT)?;
            }
            member.own.synchronize()?;
            member.comm.destroy(LIMIT)?;
        }
        "lost" if rank == 0 => {
            wait_for(folder, 1..size)?;
            std::process::exit(0);
        }
        "lost" => {
            let is_lost = || {
                arrive(folder, rank);
                member.comm.check().is_err()
            };
            let text = message(member.aborted_all_reduce(5, is_lost));
            assert_eq!(text, "ncclCommAbort: enough");
        }
        "unlike" => {
            // Each rank passes another count; without an abort they wait for ever.
            let start = Instant::now();
            let text =
                message(member.aborted_all_reduce(5 + rank, || start.elapsed() > Duration::from_millis(300)));
            assert_eq!(text, "ncclCommAbort: enough");
            let x = member.up(&[1.0])?;
            let text = message(member.submit(&member.comm, &x, 4, &[Part::AllGather { bytes: 1 }]));
            assert_eq!(text, "ncclCommAbort: the communicator is aborted");
        }
        "late" => {
            thread::sleep(Duration::from_millis(200 * rank as u64));
            member.all_operations(&member.comm, &everyone)?;
            member.own.synchronize()?;
            member.comm.destroy(LIMIT)?;
        }
        // Rank 0 gives up its wait for a communicator that the library makes all the same, once rank 1 splits too.
        "unfinished split" => {
            let group = SplitGroup { color: 0, rank, size, num_blocks_max: 0 };
            if rank == 0 {
                let give_up = || KernelError::Device { call: "a wait", why: "enough".into(), lost_gpu: None };
                let split = member.comm.split(Some(&group), &mut || Err(give_up()));
                assert_eq!(message(split), "a wait: enough");
                arrive(folder, 0);
                wait_for_communicators(2)?;
                // An abort on this rank would keep rank 1 from finishing its own.
                wait_for(folder, 1..2)?;
            } else {
                wait_for(folder, 0..1)?;
                let split = member.comm.split(Some(&group), &mut until_limit())?;
                arrive(folder, 1);
                drop(split);
            }
            member.comm.abort(LIMIT)?;
            wait_for_communicators(0)?;
        }
        _ => panic!("no scenario {name}"),
    }
    Ok(())
}

/// What the processes of the other tests run; nothing without their variables.
#[test]
#[allow(clippy::print_stdout, reason = "the test that started the process reads it")]
fn process_of_a_test() {
    if let Some((name, folder, rank, size)) = scenario_of_this_process() {
        scenario(&name, &folder, rank, size).unwrap();
        println!("done");
    }
}

#[test]
fn operations_match_their_definitions_on_two_and_four_processes() {
    for size in [2, 4] {
        let Some(gpu) = FakeGpu::new(&format!("all{size}"), "") else { return };
        gpu.succeeds("all", size);
    }
}

#[test]
fn late_ranks_are_waited_for() {
    let Some(gpu) = FakeGpu::new("late", "") else { return };
    gpu.succeeds("late", 3);
}

#[test]
fn lost_peer_is_an_asynchronous_error_and_aborted() {
    let Some(gpu) = FakeGpu::new("lost", "") else { return };
    gpu.run("lost", 3)[1..].iter().for_each(fake_gpu::succeeded);
}

#[test]
fn unlike_calls_wait_until_they_are_aborted() {
    let Some(gpu) = FakeGpu::new("unlike", "") else { return };
    gpu.succeeds("unlike", 2);
}

#[test]
fn communicator_of_a_split_that_is_given_up_is_aborted_with_its_parent() {
    let Some(gpu) = FakeGpu::new("unfinished-split", "") else { return };
    gpu.succeeds("unfinished split", 2);
}

#[test]
fn refused_calls_are_errors_with_the_text_of_the_library() {
    // An abort follows another error only.
    for call in CALLS.into_iter().filter(|call| *call != "ncclCommAbort") {
        // A rank alone sends to nobody.
        let size = if ["ncclSend", "ncclRecv"].contains(&call) { 2 } else { 1 };
        let Some(gpu) = FakeGpu::new("refused", "") else { return };
        (0..size).for_each(|rank| gpu.refuse(rank, call, 5));
        gpu.succeeds(&format!("refused {call}"), size);
    }
}
