//! The order of work between ranks whose back ends do it later, in two streams each: a machine that computes at once but keeps
//! account of what each stream may know to be done. Whoever reads before the writer, or writes before the readers, is found out
//! without any luck of timing.

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

/// For each stream, up to which of its launches everything is known to be done.
type Knowledge = Vec<u64>;

/// Which launch wrote a block last, and which have read it since: stream and number.
#[derive(Debug, Default)]
struct Touched {
    written: Option<(usize, u64)>,
    read: Vec<(usize, u64)>,
}

#[derive(Debug, Default)]
struct Account {
    knowledge: Vec<Knowledge>,
    /// A block that is handed out again has its past.
    buffers: HashMap<usize, Touched>,
    faults: Vec<String>,
    /// How many launches began before a flight of their rank was done.
    num_beside: usize,
}

/// What ranks forget.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Lapse {
    #[default]
    None,
    /// To wait for marks of others.
    Waits,
    /// To let a flight begin behind what was given before.
    Begins,
    /// To wait for what a flight has written.
    Results,
    /// To keep what a flight reads, and to wait before it is written.
    Holds,
}

/// Ranks on the processor under an account.
#[derive(Debug, Default)]
struct Accounted {
    account: Arc<Mutex<Account>>,
    lapse: Lapse,
    has_flights: bool,
}

impl Accounted {
    fn new(has_flights: bool, lapse: Lapse) -> Arc<Accounted> {
        Arc::new(Accounted { lapse, has_flights, ..Accounted::default() })
    }
}

impl BackendProvider for Accounted {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn backend(&self, settings: BackendConfig) -> Result<Arc<dyn Backend>, KernelError> {
        let cpu = Cpu::backend(settings.num_threads);
        let stream = |beside, is_beside| {
            let mut account = self.account.lock().unwrap();
            account.knowledge.push(Knowledge::new());
            let (me, account, cpu) = (account.knowledge.len() - 1, self.account.clone(), cpu.clone());
            Stream {
                me,
                account,
                cpu,
                lapse: self.lapse,
                beside,
                is_beside,
                used: Mutex::default(),
                ended: Mutex::default(),
            }
        };
        let beside = self.has_flights.then(|| Box::new(stream(None, true)));
        Ok(Arc::new(stream(beside, false)))
    }
}

/// What a flight uses: addresses of what it has taken for itself, and what it holds.
type Used = (Vec<usize>, Vec<Buffer>);

/// One order of work of a rank: that of the rank itself, or that of its flights.
#[derive(Debug)]
struct Stream {
    me: usize,
    account: Arc<Mutex<Account>>,
    cpu: Arc<dyn Backend>,
    lapse: Lapse,
    /// Where flights are given.
    beside: Option<Box<Stream>>,
    /// Whether this is such a place.
    is_beside: bool,
    /// What the flight that runs here uses.
    used: Mutex<Used>,
    /// Flights that the rank is not behind, with what is known at their ends.
    ended: Mutex<Vec<(Used, Knowledge)>>,
}

impl Account {
    fn knows(&self, who: usize, (whose, launch): (usize, u64)) -> bool {
        whose == who || self.knowledge[who].get(whose).is_some_and(|known| *known >= launch)
    }

    fn learn(&mut self, who: usize, what: &Knowledge) {
        let own = &mut self.knowledge[who];
        own.resize(own.len().max(what.len()), 0);
        own.iter_mut().zip(what).for_each(|(own, told)| *own = (*own).max(*told));
    }

    fn launch(&mut self, me: usize, kernel: &Kernel, launch: &Launch<'_>) {
        let mut next = vec![0; me + 1];
        next[me] = self.knowledge[me].get(me).copied().unwrap_or(0) + 1;
        let mut faults = Vec::new();
        for x in launch.inputs {
            let written = self.buffers.entry(x.buffer.address()).or_default().written;
            if written.is_some_and(|w| !self.knows(me, w)) {
                faults.push(format!("{}: {me} reads what {written:?} may not have written yet", kernel.name));
            }
        }
        for y in launch.outputs.iter() {
            let Touched { written, read } = &self.buffers[&y.buffer.address()];
            for other in written.iter().chain(read).filter(|other| !self.knows(me, **other)) {
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
            self.buffers.insert(y.buffer.address(), Touched { written: Some(mine), read: Vec::new() });
        }
        self.learn(me, &next);
    }
}

impl Stream {
    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap()
    }

    fn known(&self) -> Knowledge {
        self.account().knowledge[self.me].clone()
    }

    /// Lets what is given next begin behind the flights that it must not meet.
    fn come_behind(&self, launch: &Launch<'_>) {
        let mut ended = self.ended.lock().unwrap();
        let is_met = |((taken, held), _): &(Used, Knowledge)| {
            let is_taken = |buffer: &Buffer| taken.contains(&buffer.address());
            let is_held = |buffer: &Buffer| held.iter().any(|b| b.same_as(buffer));
            self.lapse != Lapse::Results && launch.inputs.iter().any(|x| is_taken(x.buffer))
                || launch.outputs.iter().any(|y| is_taken(y.buffer) || is_held(y.buffer))
        };
        let num_passed = ended.iter().rposition(is_met).map_or(0, |last| last + 1);
        if let Some((_, known)) = ended.drain(..num_passed).next_back() {
            self.account().learn(self.me, &known);
        }
        self.account().num_beside += usize::from(!ended.is_empty());
    }
}

impl Backend for Stream {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let buffer = self.cpu.alloc(bytes)?;
        self.account().buffers.entry(buffer.address()).or_default();
        if self.is_beside {
            self.used.lock().unwrap().0.push(buffer.address());
        }
        Ok(buffer)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        self.come_behind(launch);
        self.account().launch(self.me, kernel, launch);
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
        Ok(SyncEvent::new(Arc::new(self.known())))
    }

    fn wait_event(&self, event: &SyncEvent) -> Result<(), KernelError> {
        if let Some(what) = event.downcast_ref::<Knowledge>().filter(|_| self.lapse != Lapse::Waits) {
            self.account().learn(self.me, what);
        }
        Ok(())
    }

    fn begin_async(&self) -> Result<Option<&dyn Backend>, KernelError> {
        let Some(beside) = &self.beside else { return Ok(None) };
        if self.lapse != Lapse::Begins {
            let known = self.known();
            self.account().learn(beside.me, &known);
        }
        *beside.used.lock().unwrap() = Used::default();
        Ok(Some(&**beside))
    }

    fn end_async(&self) -> Result<(), KernelError> {
        if let Some(beside) = &self.beside {
            let used = std::mem::take(&mut *beside.used.lock().unwrap());
            self.ended.lock().unwrap().push((used, beside.known()));
        }
        Ok(())
    }

    fn record_stream(&self, buffer: &Buffer) {
        if self.is_beside && self.lapse != Lapse::Holds {
            self.used.lock().unwrap().1.push(buffer.clone());
        }
    }
}

/// Fills a buffer on its rank: reads nothing, writes all of it.
fn fill(rank: &Rank, x: &mut Buffer, numel: usize, value: f64) -> Result<()> {
    let view = Strides::contiguous(&[numel]);
    let mut outputs = [ArgMut { buffer: x, dtype: DType::F32, view: &view }];
    let inputs: [Arg<'_>; 0] = [];
    let scalars = [Scalar::Real(value)];
    Ok(rank
        .backend()
        .launch(&FILL, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &scalars })?)
}

/// Copies a buffer to new memory of its rank.
fn copy(rank: &Rank, x: &Buffer, numel: usize) -> Result<Buffer> {
    let (mut y, view) = (rank.backend().alloc(4 * numel)?, Strides::contiguous(&[numel]));
    let inputs = [Arg { buffer: x, dtype: DType::F32, view: &view }];
    let mut outputs = [ArgMut { buffer: &mut y, dtype: DType::F32, view: &view }];
    rank.backend().launch(&COPY, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] })?;
    Ok(y)
}

/// Every collective and message, with arguments that are written before and again after each, results that are read at once, later,
/// by the next call or never, and memory that is given up at once.
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
fn work_that_is_done_later_is_ordered_by_marks() {
    for (seed, has_flights) in (0..5).flat_map(|seed| [(seed, false), (seed, true)]) {
        let machine = Accounted::new(has_flights, Lapse::None);
        World::new(mesh("tp=4")).on(machine.clone()).jitter(seed).launch(program).unwrap();
        let account = machine.account.lock().unwrap();
        assert!(account.faults.is_empty(), "{:#?}", account.faults);
        assert_eq!(account.num_beside > 0, has_flights, "what is given next goes on");
    }
}

#[test]
fn what_ranks_forget_is_found_out() {
    let found = |has_flights: bool, lapse: Lapse| {
        let machine = Accounted::new(has_flights, lapse);
        World::new(mesh("tp=4")).on(machine.clone()).launch(program).unwrap();
        let account = machine.account.lock().unwrap();
        ["reads what", "writes what"].map(|what| account.faults.iter().any(|fault| fault.contains(what)))
    };
    assert_eq!(found(false, Lapse::Waits), [true, true]);
    assert_eq!(found(true, Lapse::Waits), [true, true]);
    assert!(found(true, Lapse::Begins)[0]);
    assert!(found(true, Lapse::Results)[0]);
    assert!(found(true, Lapse::Holds)[1]);
}
