//! Ordering of asynchronous work between ranks with one or two streams each, checked by vector clocks. The back end computes at once
//! but records which launches each stream is ordered after; a read that is not ordered after its write, or a write that is not
//! ordered after earlier reads, is a race, and is found independently of timing.

use crate::support::{mesh, on, up};
use shardgrad_dist::{Rank, ReduceOp, Result, World};
use shardgrad_kernels::op::copy::COPY;
use shardgrad_kernels::op::fill::FILL;
use shardgrad_kernels::{
    Arg, ArgMut, Backend, BackendConfig, BackendProvider, Buffer, Cost, Cpu, DType, Device, Kernel,
    KernelError, Launch, MemoryStats, Scalar, Strides, SyncEvent,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// A vector clock: for each stream, the last launch that this stream is ordered after.
type VectorClock = Vec<u64>;

/// The last launch that wrote a memory block, and the launches that have read it since: stream and number.
#[derive(Debug, Default)]
struct BlockAccess {
    written: Option<(usize, u64)>,
    read: Vec<(usize, u64)>,
}

#[derive(Debug, Default)]
struct OrderChecker {
    clocks: Vec<VectorClock>,
    /// By address: a reused block keeps its accesses.
    buffers: HashMap<usize, BlockAccess>,
    faults: Vec<String>,
    /// The number of launches while an asynchronous collective of their rank was still running.
    num_overlapped: usize,
}

/// A call of the back end that ranks leave out, to test the checker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Omission {
    #[default]
    None,
    /// `wait_event` for events of other ranks.
    WaitEvent,
    /// The order of a collective after earlier work of its rank.
    BeginAsync,
    /// The wait before the result of a collective is read.
    WaitForResult,
    /// `record_stream`, and the wait before an operand of a collective is written.
    RecordStream,
}

/// CPU back ends with a shared order checker.
#[derive(Debug, Default)]
struct OrderCheckedProvider {
    checker: Arc<Mutex<OrderChecker>>,
    omission: Omission,
    has_async: bool,
}

impl OrderCheckedProvider {
    fn new(has_async: bool, omission: Omission) -> Arc<OrderCheckedProvider> {
        Arc::new(OrderCheckedProvider { omission, has_async, ..OrderCheckedProvider::default() })
    }
}

impl BackendProvider for OrderCheckedProvider {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn backend(&self, settings: BackendConfig) -> Result<Arc<dyn Backend>, KernelError> {
        let cpu = Cpu::backend(settings.num_threads);
        let stream = |comm_stream, is_comm_stream| {
            let mut checker = self.checker.lock().unwrap();
            checker.clocks.push(VectorClock::new());
            let (me, checker, cpu) = (checker.clocks.len() - 1, self.checker.clone(), cpu.clone());
            Stream {
                me,
                checker,
                cpu,
                omission: self.omission,
                comm_stream,
                is_comm_stream,
                used: Mutex::default(),
                finished: Mutex::default(),
            }
        };
        let comm_stream = self.has_async.then(|| Box::new(stream(None, true)));
        Ok(Arc::new(stream(comm_stream, false)))
    }
}

/// The buffers of an asynchronous collective: addresses of its own allocations, and its operands.
type Used = (Vec<usize>, Vec<Buffer>);

/// A stream of a rank: its compute stream or its communication stream.
#[derive(Debug)]
struct Stream {
    me: usize,
    checker: Arc<Mutex<OrderChecker>>,
    cpu: Arc<dyn Backend>,
    omission: Omission,
    /// The communication stream, on a compute stream with asynchronous collectives.
    comm_stream: Option<Box<Stream>>,
    /// Whether this is a communication stream.
    is_comm_stream: bool,
    /// The buffers of the current collective on this stream.
    used: Mutex<Used>,
    /// Finished collectives that the compute stream has not waited for, with the clocks at their ends.
    finished: Mutex<Vec<(Used, VectorClock)>>,
}

impl OrderChecker {
    fn is_ordered_after(&self, who: usize, (whose, launch): (usize, u64)) -> bool {
        whose == who || self.clocks[who].get(whose).is_some_and(|clock| *clock >= launch)
    }

    fn merge_clock(&mut self, who: usize, what: &VectorClock) {
        let own = &mut self.clocks[who];
        own.resize(own.len().max(what.len()), 0);
        own.iter_mut().zip(what).for_each(|(own, other)| *own = (*own).max(*other));
    }

    fn launch(&mut self, me: usize, kernel: &Kernel, launch: &Launch<'_>) {
        let mut next = vec![0; me + 1];
        next[me] = self.clocks[me].get(me).copied().unwrap_or(0) + 1;
        let mut faults = Vec::new();
        for x in launch.inputs {
            let written = self.buffers.entry(x.buffer.address()).or_default().written;
            if written.is_some_and(|w| !self.is_ordered_after(me, w)) {
                faults.push(format!("{}: {me} reads what {written:?} may not have written yet", kernel.name));
            }
        }
        for y in launch.outputs.iter() {
            let BlockAccess { written, read } = &self.buffers[&y.buffer.address()];
            for other in written.iter().chain(read).filter(|other| !self.is_ordered_after(me, **other)) {
                faults.push(format!("{}: {me} writes what {other:?} may still use", kernel.name));
            }
        }
        self.faults.extend(faults);
        let mine = (me, next[me]);
        launch
            .inputs
            .iter()
            .for_each(|x| self.buffers.entry(x.buffer.address()).or_default().read.push(mine));
        for y in launch.outputs.iter() {
            self.buffers.insert(y.buffer.address(), BlockAccess { written: Some(mine), read: Vec::new() });
        }
        self.merge_clock(me, &next);
    }
}

impl Stream {
    fn checker(&self) -> MutexGuard<'_, OrderChecker> {
        self.checker.lock().unwrap()
    }

    fn clock(&self) -> VectorClock {
        self.checker().clocks[self.me].clone()
    }

    /// Orders the next launch after the collectives whose buffers it uses.
    fn wait_for_conflicts(&self, launch: &Launch<'_>) {
        let mut finished = self.finished.lock().unwrap();
        let is_met = |((taken, held), _): &(Used, VectorClock)| {
            let is_taken = |buffer: &Buffer| taken.contains(&buffer.address());
            let is_held = |buffer: &Buffer| held.iter().any(|b| b.same_as(buffer));
            self.omission != Omission::WaitForResult && launch.inputs.iter().any(|x| is_taken(x.buffer))
                || launch.outputs.iter().any(|y| is_taken(y.buffer) || is_held(y.buffer))
        };
        let num_passed = finished.iter().rposition(is_met).map_or(0, |last| last + 1);
        if let Some((_, clock)) = finished.drain(..num_passed).next_back() {
            self.checker().merge_clock(self.me, &clock);
        }
        self.checker().num_overlapped += usize::from(!finished.is_empty());
    }
}

impl Backend for Stream {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let buffer = self.cpu.alloc(bytes)?;
        self.checker().buffers.entry(buffer.address()).or_default();
        if self.is_comm_stream {
            self.used.lock().unwrap().0.push(buffer.address());
        }
        Ok(buffer)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        self.wait_for_conflicts(launch);
        self.checker().launch(self.me, kernel, launch);
        self.cpu.launch(kernel, launch)
    }

    fn memory(&self) -> MemoryStats {
        self.cpu.memory()
    }

    fn cost(&self) -> Cost {
        self.cpu.cost()
    }

    fn num_threads(&self) -> usize {
        self.cpu.num_threads()
    }

    fn record_event(&self) -> Result<SyncEvent, KernelError> {
        Ok(SyncEvent::new(Arc::new(self.clock())))
    }

    fn wait_event(&self, event: &SyncEvent) -> Result<(), KernelError> {
        if let Some(what) =
            event.downcast_ref::<VectorClock>().filter(|_| self.omission != Omission::WaitEvent)
        {
            self.checker().merge_clock(self.me, what);
        }
        Ok(())
    }

    fn begin_async(&self) -> Result<Option<&dyn Backend>, KernelError> {
        let Some(comm_stream) = &self.comm_stream else { return Ok(None) };
        if self.omission != Omission::BeginAsync {
            let clock = self.clock();
            self.checker().merge_clock(comm_stream.me, &clock);
        }
        *comm_stream.used.lock().unwrap() = Used::default();
        Ok(Some(&**comm_stream))
    }

    fn end_async(&self) -> Result<(), KernelError> {
        if let Some(comm_stream) = &self.comm_stream {
            let used = std::mem::take(&mut *comm_stream.used.lock().unwrap());
            self.finished.lock().unwrap().push((used, comm_stream.clock()));
        }
        Ok(())
    }

    fn record_stream(&self, buffer: &Buffer) {
        if self.is_comm_stream && self.omission != Omission::RecordStream {
            self.used.lock().unwrap().1.push(buffer.clone());
        }
    }
}

/// Launches a fill of a buffer.
fn fill(rank: &Rank, x: &mut Buffer, numel: usize, value: f64) -> Result<()> {
    let view = Strides::contiguous(&[numel]);
    let mut outputs = [ArgMut { buffer: x, dtype: DType::F32, view: &view }];
    let inputs: [Arg<'_>; 0] = [];
    let scalars = [Scalar::Real(value)];
    Ok(rank
        .backend()
        .launch(&FILL, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &scalars })?)
}

/// Launches a copy of a buffer to a new buffer.
fn copy(rank: &Rank, x: &Buffer, numel: usize) -> Result<Buffer> {
    let (mut y, view) = (rank.backend().alloc(4 * numel)?, Strides::contiguous(&[numel]));
    let inputs = [Arg { buffer: x, dtype: DType::F32, view: &view }];
    let mut outputs = [ArgMut { buffer: &mut y, dtype: DType::F32, view: &view }];
    rank.backend().launch(&COPY, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] })?;
    Ok(y)
}

/// Every collective and message, with arguments that are written before and after, results that are read at once, later, by the
/// next call or never, and buffers that are freed at once.
fn program(rank: &Rank) -> Result<()> {
    let (call, numel) = (on(rank, "tp"), 40_000);
    let mut x = up(rank, &vec![0f32; numel]);
    let counts = vec![numel / 4; 4];
    for round in 0..3 {
        let value = f64::from(round);
        fill(rank, &mut x, numel, value)?;
        let sum = rank.all_reduce(&call, &x, numel, ReduceOp::Sum)?;
        fill(rank, &mut x, numel, value)?;
        copy(rank, &sum, numel)?;
        rank.all_reduce(&call, &x, 16, ReduceOp::Max)?;
        fill(rank, &mut x, numel, value)?;
        let part = rank.reduce_scatter(&call, &x, &counts)?;
        let given_up = copy(rank, &x, numel)?;
        let whole = rank.all_gather(&call, &part, &counts)?;
        rank.all_reduce(&call, &given_up, numel, ReduceOp::Min)?;
        drop(given_up);
        let mut again = rank.backend().alloc(4 * numel)?;
        fill(rank, &mut again, numel, value)?;
        fill(rank, &mut x, numel, value)?;
        copy(rank, &whole, numel)?;
        rank.all_gather(&call, &x, &counts)?;
        fill(rank, &mut x, numel, value)?;
        rank.all_to_all(&call, &x, &counts, &counts)?;
        fill(rank, &mut x, numel, value)?;
        let from_root = rank.broadcast(&call, (rank.index() == 1).then_some(&x), numel, 1)?;
        drop(from_root);
        fill(rank, &mut x, numel, value)?;
        rank.send(&call, &x, numel, (rank.index() + 1) % 4)?;
        fill(rank, &mut x, numel, value)?;
        let mut y = rank.recv(&call, numel, (rank.index() + 3) % 4)?;
        copy(rank, &y, numel)?;
        fill(rank, &mut y, numel, value)?;
        rank.barrier(&call)?;
    }
    Ok(())
}

#[test]
fn collectives_order_asynchronous_work_by_events() {
    for (seed, has_async) in (0..5).flat_map(|seed| [(seed, false), (seed, true)]) {
        let provider = OrderCheckedProvider::new(has_async, Omission::None);
        World::new(mesh("tp=4")).on_device(provider.clone()).random_delays(seed).launch(program).unwrap();
        let checker = provider.checker.lock().unwrap();
        assert!(checker.faults.is_empty(), "{:#?}", checker.faults);
        assert_eq!(checker.num_overlapped > 0, has_async, "the compute stream goes on during collectives");
    }
}

#[test]
fn checker_finds_left_out_synchronization() {
    let found = |has_async: bool, omission: Omission| {
        let provider = OrderCheckedProvider::new(has_async, omission);
        World::new(mesh("tp=4")).on_device(provider.clone()).launch(program).unwrap();
        let checker = provider.checker.lock().unwrap();
        ["reads what", "writes what"].map(|what| checker.faults.iter().any(|fault| fault.contains(what)))
    };
    assert_eq!(found(false, Omission::WaitEvent), [true, true]);
    assert_eq!(found(true, Omission::WaitEvent), [true, true]);
    assert!(found(true, Omission::BeginAsync)[0]);
    assert!(found(true, Omission::WaitForResult)[0]);
    assert!(found(true, Omission::RecordStream)[1]);
}
