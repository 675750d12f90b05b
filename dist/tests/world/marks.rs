//! The order of work between ranks whose back ends do it later: a machine that computes at once but keeps account of what
//! each back end may know to be done. Whoever reads before the writer, or writes before the readers, is found out without
//! any luck of timing.

use crate::support::{mesh, on, up};
use shardgrad_dist::{Rank, ReduceOp, Result, World};
use shardgrad_kernels::op::fill::FILL;
use shardgrad_kernels::{
    Arg, ArgMut, Backend, Buffer, Cost, Cpu, DType, Device, Kernel, KernelError, Launch, Machine, Mark,
    MemoryStats, Scalar, Settings, Strides,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// For each back end, up to which of its launches everything is known to be done.
type Knowledge = Vec<u64>;

/// Which launch wrote a buffer last, and which have read it since: back end and number.
#[derive(Debug, Default)]
struct Touched {
    written: Option<(usize, u64)>,
    read: Vec<(usize, u64)>,
}

#[derive(Debug, Default)]
struct Account {
    knowledge: Vec<Knowledge>,
    buffers: HashMap<usize, Touched>,
    faults: Vec<String>,
}

/// Ranks on the processor under an account; deaf ones wait for nothing.
#[derive(Debug, Default)]
struct Accounted {
    account: Arc<Mutex<Account>>,
    is_deaf: bool,
}

impl Machine for Accounted {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn backend(&self, settings: Settings) -> Result<Arc<dyn Backend>, KernelError> {
        let mut account = self.account.lock().unwrap();
        let me = account.knowledge.len();
        account.knowledge.push(Knowledge::new());
        let (account, cpu) = (self.account.clone(), Cpu::backend(settings.num_threads));
        Ok(Arc::new(Member { me, account, cpu, is_deaf: self.is_deaf }))
    }
}

#[derive(Debug)]
struct Member {
    me: usize,
    account: Arc<Mutex<Account>>,
    cpu: Arc<dyn Backend>,
    is_deaf: bool,
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

impl Backend for Member {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        let buffer = self.cpu.alloc(bytes)?;
        self.account.lock().unwrap().buffers.insert(buffer.address(), Touched::default());
        Ok(buffer)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        self.account.lock().unwrap().launch(self.me, kernel, launch);
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

    fn mark(&self) -> Result<Mark, KernelError> {
        Ok(Mark::new(Arc::new(self.account.lock().unwrap().knowledge[self.me].clone())))
    }

    fn wait(&self, mark: &Mark) -> Result<(), KernelError> {
        if let Some(what) = mark.point::<Knowledge>().filter(|_| !self.is_deaf) {
            self.account.lock().unwrap().learn(self.me, what);
        }
        Ok(())
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

/// Every collective and message, with arguments that are written before and again after each.
fn program(rank: &Rank) -> Result<()> {
    let (call, numel) = (on(rank, "tp"), 40_000);
    let mut x = up(rank, &vec![0f32; numel]);
    let counts = vec![numel / 4; 4];
    for round in 0..3 {
        let value = f64::from(round);
        fill(rank, &mut x, numel, value)?;
        rank.all_reduce(&call, &x, numel, ReduceOp::Sum)?;
        fill(rank, &mut x, numel, value)?;
        rank.all_reduce(&call, &x, 16, ReduceOp::Max)?;
        fill(rank, &mut x, numel, value)?;
        rank.reduce_scatter(&call, &x, &counts)?;
        fill(rank, &mut x, numel, value)?;
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
        fill(rank, &mut y, numel, value)?;
        rank.barrier(&call)?;
    }
    Ok(())
}

#[test]
fn work_that_is_done_later_is_ordered_by_marks() {
    for seed in 0..5 {
        let machine = Arc::new(Accounted::default());
        World::new(mesh("tp=4")).on(machine.clone()).jitter(seed).launch(program).unwrap();
        let account = machine.account.lock().unwrap();
        assert!(account.faults.is_empty(), "{:#?}", account.faults);
    }
}

#[test]
fn ranks_that_wait_for_no_mark_are_found_out() {
    let machine = Arc::new(Accounted { is_deaf: true, ..Accounted::default() });
    World::new(mesh("tp=4")).on(machine.clone()).launch(program).unwrap();
    let account = machine.account.lock().unwrap();
    assert!(account.faults.iter().any(|f| f.contains("reads what")), "{:#?}", account.faults);
    assert!(account.faults.iter().any(|f| f.contains("writes what")), "{:#?}", account.faults);
}
