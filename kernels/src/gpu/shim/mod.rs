//! Runs launch plans on the host, for tests: g++ compiles each program against `shim.h`, which runs the threads of a block as fibers, on
//! copies of the operands between guards.

mod build;
mod load;
mod occupancy;

pub(crate) use build::compiler_is_found;
pub(crate) use load::Traffic;
pub(crate) use occupancy::{check_programs, is_full};

use super::{Epilogue, FAULTS_MAX, Grid, GridArg, LaunchPlan, Matmul, Step};
use crate::buffer::Buffer;
use crate::cpu::Pool;
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Kernel, Launch};
use crate::op::batched_matmul::BATCHED_MATMUL;
use load::{RawArg, RawGrid};
use std::collections::BTreeMap;

/// The orders in which threads run between waits; every order must give the same bits.
pub(crate) const ORDERS: [u64; 3] = [0, 1, 7];

/// Guard bytes before and after each operand, which no kernel may change.
const GUARD: usize = 4096;
/// The alignment of operands, as on a GPU.
const ALIGNMENT: usize = 256;
/// The byte of unused memory: NaN as a float, and out of range as an index, so that reads out of bounds show in results.
const STALE: u8 = 0xff;

/// A copy of an operand between guards.
struct GuardedMemory {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl GuardedMemory {
    fn stale(bytes: usize) -> GuardedMemory {
        let memory = vec![STALE; bytes + 2 * GUARD + ALIGNMENT];
        let start = GUARD + (memory.as_ptr() as usize + GUARD).wrapping_neg() % ALIGNMENT;
        GuardedMemory { memory, start, bytes }
    }

    fn copy_of(contents: &[u8]) -> GuardedMemory {
        let mut guarded = GuardedMemory::stale(contents.len());
        guarded.contents_mut().copy_from_slice(contents);
        guarded
    }

    fn contents(&self) -> &[u8] {
        &self.memory[self.start..][..self.bytes]
    }

    fn contents_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.bytes]
    }

    fn address(&mut self, offset: usize) -> RawArg {
        RawArg::Pointer(self.memory[self.start..].as_mut_ptr().wrapping_add(offset))
    }

    fn guards_are_intact(&self) -> bool {
        let guards = [&self.memory[..self.start], &self.memory[self.start + self.bytes..]];
        guards.iter().all(|guard| guard.iter().all(|&byte| byte == STALE))
    }
}

/// The memory of one launch.
struct Memory {
    inputs: Vec<GuardedMemory>,
    outputs: Vec<GuardedMemory>,
    scratch: Vec<GuardedMemory>,
    fault: GuardedMemory,
}

impl Memory {
    /// Copies the operands of a launch.
    fn new(launch: &Launch<'_>, plan: &LaunchPlan) -> Memory {
        let copy = |buffer: &Buffer| GuardedMemory::copy_of(buffer.as_slice::<u8>());
        Memory {
            inputs: launch.inputs.iter().map(|x| copy(x.buffer)).collect(),
            outputs: launch.outputs.iter().map(|y| copy(y.buffer)).collect(),
            scratch: plan.scratch_bytes().iter().map(|&bytes| GuardedMemory::stale(bytes)).collect(),
            fault: GuardedMemory::copy_of(&[0; FAULT_BYTES * FAULTS_MAX]),
        }
    }

    /// Returns start and end of each operand.
    fn ranges(&self) -> Vec<[u64; 2]> {
        let all = self.inputs.iter().chain(&self.outputs).chain(&self.scratch);
        all.map(|guarded| guarded.contents().as_ptr_range())
            .map(|r| [r.start, r.end].map(|at| at.addr() as u64))
            .collect()
    }

    /// Returns an argument of a grid as the call takes it.
    fn argument(&mut self, launch: &Launch<'_>, arg: &GridArg) -> RawArg {
        match arg {
            GridArg::Input(i) => {
                let x = &launch.inputs[*i];
                self.inputs[*i].address(x.view.offset * x.dtype.size())
            }
            GridArg::Output(i) => {
                let y = &launch.outputs[*i];
                self.outputs[*i].address(y.view.offset * y.dtype.size())
            }
            GridArg::Scratch(i) => self.scratch[*i].address(0),
            GridArg::Fault | GridArg::Faults => self.fault.address(0),
            GridArg::I32(x) => RawArg::I32(*x),
            GridArg::I64(x) => RawArg::I64(*x),
            GridArg::F32(x) => RawArg::F32(*x),
            GridArg::F64(x) => RawArg::F64(*x),
            GridArg::I64s(x) => RawArg::I64s(x.clone()),
            GridArg::Addresses(operands) => {
                let address = |arg: &GridArg| match self.argument(launch, arg) {
                    RawArg::Pointer(at) => at.expose_provenance() as i64,
                    other => unreachable!("{other:?} has no address"),
                };
                RawArg::I64s(operands.iter().map(address).collect())
            }
        }
    }
}

/// Bytes of a `Fault` of the prelude: lock and found, index, position, rows.
const FAULT_BYTES: usize = 32;

/// Plans and runs a launch; returns the extra ulps of the plan. Errors come from the plan, the compiler, the shim or the guards, or
/// report an index out of range.
pub(crate) fn run(kernel: &Kernel, launch: &mut Launch<'_>, order: u64) -> Result<f64, String> {
    run_planned(kernel, &plan(kernel, launch, SHARED_BYTES_MAX)?, launch, order)
}

/// Runs the plan for GPUs with little shared memory; `None` if that is the same plan. Otherwise as [`run`].
pub(crate) fn run_with_small_shared_memory(
    kernel: &Kernel,
    launch: &mut Launch<'_>,
    order: u64,
) -> Option<Result<f64, String>> {
    let [large, small] = [SHARED_BYTES_MAX, SHARED_BYTES_MIN].map(|max| plan(kernel, launch, max));
    let small = small.ok().filter(|small| large.is_ok_and(|large| large.steps() != small.steps()))?;
    Some(run_planned(kernel, &small, launch, order))
}

/// The most shared memory per block on capability 9.0, and on 8.6, 8.9 and 12.0.
const SHARED_BYTES_MAX: u32 = 227 << 10;
const SHARED_BYTES_MIN: u32 = 99 << 10;

fn plan(kernel: &Kernel, launch: &Launch<'_>, shared_bytes_max: u32) -> Result<LaunchPlan, String> {
    let gpu = kernel.gpu.as_ref().expect("only kernels with a plan are run");
    let mut plan = LaunchPlan::new(shared_bytes_max);
    (gpu.plan)(launch, &mut plan).map_err(|e| e.to_string())?;
    let most =
        plan.steps().iter().map(|step| if let Step::Grid(grid) = step { grid.shared_bytes } else { 0 }).max();
    match most.filter(|bytes| *bytes > shared_bytes_max) {
        Some(bytes) => {
            Err(format!("a block uses {bytes} bytes of shared memory; the limit is {shared_bytes_max}"))
        }
        None => Ok(plan),
    }
}

/// Plans and runs a launch, and returns the memory traffic of each grid by its entry. Products by a library are not counted; those with
/// epilogues are an error.
pub(crate) fn memory_traffic(
    kernel: &Kernel,
    launch: &mut Launch<'_>,
) -> Result<Vec<(&'static str, Traffic)>, String> {
    let (gpu, plan) = (
        kernel.gpu.as_ref().expect("only kernels with a plan are run"),
        plan(kernel, launch, SHARED_BYTES_MAX)?,
    );
    let (mut memory, entries) = (Memory::new(launch, &plan), entries(&plan, gpu.source));
    let global = memory.ranges();
    let mut found = Vec::new();
    for step in plan.steps() {
        let grid = match step {
            Step::Grid(grid) => grid,
            Step::Matmul(product) if product.epilogue == Epilogue::Plain => {
                run_matmul(*product, launch, &mut memory)?;
                continue;
            }
            Step::Matmul(_) => return Err("an epilogue of the library has no counters".into()),
        };
        let body = grid.body(gpu.source);
        let library = build::library(&body, &entries[&body], true)?;
        let args: Vec<RawArg> = grid.args.iter().map(|arg| memory.argument(launch, arg)).collect();
        found.push((grid.entry, load::count(&library, grid.entry, &args, &raw(grid, ORDERS[0]), &global)?));
    }
    Ok(found)
}

fn run_planned(
    kernel: &Kernel,
    plan: &LaunchPlan,
    launch: &mut Launch<'_>,
    order: u64,
) -> Result<f64, String> {
    let gpu = kernel.gpu.as_ref().expect("only kernels with a plan are run");
    let mut memory = Memory::new(launch, plan);
    let entries = entries(plan, gpu.source);
    for step in plan.steps() {
        match step {
            Step::Grid(grid) => {
                let body = grid.body(gpu.source);
                let library = build::library(&body, &entries[&body], false)?;
                let text = grid.program(gpu.source);
                occupancy::check(kernel.name, grid, &text, &build::folder()?, plan.shared_bytes_max())?;
                run_grid(grid, launch, &mut memory, &library, order)
                    .map_err(|e| format!("{} {:?}: {e}", grid.entry, grid.defines))?;
            }
            Step::Matmul(product) if product.epilogue == Epilogue::Plain => {
                run_matmul(*product, launch, &mut memory)?;
            }
            Step::Matmul(_) => run_reference(kernel, launch, &mut memory)?,
        }
    }
    check_and_copy_back(kernel, launch, &memory)?;
    Ok(plan.extra_ulps())
}

/// Returns the entries that a plan runs, by program.
fn entries<'a>(plan: &'a LaunchPlan, source: &str) -> BTreeMap<String, Vec<&'a str>> {
    let mut entries = BTreeMap::<String, Vec<&str>>::new();
    for step in plan.steps() {
        if let Step::Grid(grid) = step {
            let of_program = entries.entry(grid.body(source)).or_default();
            of_program.push(grid.entry);
            of_program.sort_unstable();
            of_program.dedup();
        }
    }
    entries
}

fn run_grid(
    grid: &Grid,
    launch: &Launch<'_>,
    memory: &mut Memory,
    library: &std::path::Path,
    order: u64,
) -> Result<(), String> {
    let [x, y, z] = grid.blocks;
    if x > i32::MAX as u32 || y.max(z) > 65_535 {
        return Err(format!("a grid of {x} x {y} x {z} blocks exceeds the limits of a device"));
    }
    let args: Vec<RawArg> = grid.args.iter().map(|arg| memory.argument(launch, arg)).collect();
    load::run(library, grid.entry, &args, &raw(grid, order))
}

fn raw(grid: &Grid, order: u64) -> RawGrid {
    RawGrid { blocks: grid.blocks, threads: grid.threads, shared_bytes: grid.shared_bytes, order }
}

/// Runs a product by the reference of `batched_matmul`.
fn run_matmul(product: Matmul, launch: &mut Launch<'_>, memory: &mut Memory) -> Result<(), String> {
    let inputs: [Arg<'_>; 2] = [product.a, product.b].map(|i| launch.inputs[i]);
    let c = &mut launch.outputs[product.c];
    c.buffer
        .as_mut::<u8>()
        .expect("an output buffer has one handle")
        .copy_from_slice(memory.outputs[product.c].contents());
    let output = ArgMut { buffer: &mut *c.buffer, dtype: c.dtype, view: c.view };
    let mut step = Launch { inputs: &inputs, outputs: &mut [output], scalars: &[] };
    (BATCHED_MATMUL.reference)(&Pool::new(1), &mut step).map_err(|e| e.to_string())?;
    memory.outputs[product.c].contents_mut().copy_from_slice(c.buffer.as_slice::<u8>());
    Ok(())
}

/// Runs the reference of a kernel: a product with an epilogue is a whole kernel, which the device library computes.
fn run_reference(kernel: &Kernel, launch: &mut Launch<'_>, memory: &mut Memory) -> Result<(), String> {
    (kernel.reference)(&Pool::new(1), launch).map_err(|e| e.to_string())?;
    for (y, made) in launch.outputs.iter().zip(&mut memory.outputs) {
        made.contents_mut().copy_from_slice(y.buffer.as_slice::<u8>());
    }
    Ok(())
}

/// Checks the guards, the inputs and the fault record, then copies the results to the outputs.
fn check_and_copy_back(kernel: &Kernel, launch: &mut Launch<'_>, memory: &Memory) -> Result<(), String> {
    for (what, all) in
        [("input", &memory.inputs), ("output", &memory.outputs), ("scratch memory", &memory.scratch)]
    {
        if let Some(i) = all.iter().position(|guarded| !guarded.guards_are_intact()) {
            return Err(format!("wrote outside of the memory of {what} {i}"));
        }
    }
    let same = |(x, copy): (&Arg<'_>, &GuardedMemory)| x.buffer.as_slice::<u8>() == copy.contents();
    if let Some(i) = launch.inputs.iter().zip(&memory.inputs).position(|pair| !same(pair)) {
        return Err(format!("wrote to input {i}"));
    }
    let words: Vec<i64> = memory
        .fault
        .contents()
        .chunks_exact(8)
        .map(|w| i64::from_ne_bytes(w.try_into().expect("eight bytes")))
        .collect();
    if words[0] != 0 {
        let (index, position, rows) = (words[1], words[2] as usize, words[3] as usize);
        return Err(KernelError::Index { kernel: kernel.name, index, position, rows }.to_string());
    }
    for (y, copy) in launch.outputs.iter_mut().zip(&memory.outputs) {
        y.buffer.as_mut::<u8>().expect("an output buffer has one handle").copy_from_slice(copy.contents());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
