//! Gated scans on GPUs: a thread for each lane, or for each chunk of its steps if there are few lanes.

use super::{BACKWARD, SCAN, SUMMARY, Shape, float, is_reversed};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg, LaunchPlan, type_name};
use crate::kernel::{Kernel, Launch};

pub(super) const SOURCE: &str = include_str!("gpu.cu");

/// Threads per block; equal to the constant in the CUDA source.
const THREADS: usize = 256;
/// Threads of a launch that keep a GPU busy.
const THREADS_BUSY: usize = 1 << 16;
/// Steps of a chunk, at least.
const CHUNK_MIN: usize = 32;

/// The cut of the steps into chunks. Depends on the shape only.
struct Chunks {
    dtype: DType,
    reversed: bool,
    shape: Shape,
    steps: usize,
    count: usize,
}

impl Chunks {
    fn new(kernel: &Kernel, launch: &Launch<'_>, reversed: bool) -> Result<Chunks, KernelError> {
        let (dtype, shape) = (float(kernel, launch)?, Shape::of(&launch.inputs[0]));
        let count = THREADS_BUSY.div_ceil(shape.lanes().max(1)).min(shape.steps / CHUNK_MIN).max(1);
        let steps = shape.steps.div_ceil(count).max(1);
        Ok(Chunks { dtype, reversed, shape, steps, count: shape.steps.div_ceil(steps).max(1) })
    }

    /// Adds a grid of some threads with these arguments, then the extents.
    fn grid(&self, plan: &mut LaunchPlan, entry: &'static str, threads: usize, mut args: Vec<GridArg>) {
        let Shape { steps, inner, .. } = self.shape;
        args.extend(
            [self.shape.lanes(), inner, steps, self.steps, self.count].map(|n| GridArg::I64(n as i64)),
        );
        plan.grid(Grid {
            entry,
            defines: vec![
                ("T", type_name(self.dtype).into()),
                ("REVERSED", if self.reversed { "1".into() } else { "0".into() }),
            ],
            blocks: [num_blocks(threads), 1, 1],
            threads: THREADS as u32,
            shared_bytes: 0,
            args,
        });
    }

    /// Adds the summaries of all chunks of a and x.
    fn summaries(&self, plan: &mut LaunchPlan, x: usize, to: GridArg) {
        let args = vec![GridArg::Input(0), GridArg::Input(x), to];
        self.grid(plan, "gated_scan_summary", self.shape.lanes() * self.count, args);
    }

    /// Adds the carries before all chunks of a and x, from the carry before the rows; returns their address, and whether there are any.
    fn carries(&self, plan: &mut LaunchPlan, x: usize, carry: Option<usize>) -> [GridArg; 2] {
        // Without a carry, the address is not read.
        let address = GridArg::Input(carry.unwrap_or(0));
        let given = [address.clone(), GridArg::I32(i32::from(carry.is_some()))];
        if self.count == 1 {
            return given;
        }
        let bytes = self.shape.lanes() * self.count * size_of::<f64>();
        let (summaries, carries) = (plan.scratch(2 * bytes), plan.scratch(bytes));
        self.summaries(plan, x, summaries.clone());
        let [address, is_given] = given;
        let args = vec![summaries, address, is_given, carries.clone()];
        self.grid(plan, "gated_scan_carries", self.shape.lanes(), args);
        [carries, GridArg::I32(1)]
    }
}

pub(super) fn scan(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let chunks = Chunks::new(&SCAN, launch, is_reversed(launch))?;
    let [carry, is_given] = chunks.carries(plan, 1, (launch.inputs.len() > 2).then_some(2));
    let args = vec![GridArg::Input(0), GridArg::Input(1), carry, is_given, GridArg::Output(0)];
    chunks.grid(plan, "gated_scan", chunks.shape.lanes() * chunks.count, args);
    Ok(())
}

pub(super) fn summary(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let chunks = Chunks::new(&SUMMARY, launch, is_reversed(launch))?;
    if chunks.count == 1 {
        chunks.summaries(plan, 1, GridArg::Output(0));
        return Ok(());
    }
    let summaries = plan.scratch(2 * chunks.shape.lanes() * chunks.count * size_of::<f64>());
    chunks.summaries(plan, 1, summaries.clone());
    let args = vec![summaries, GridArg::Output(0)];
    chunks.grid(plan, "gated_scan_total", chunks.shape.lanes(), args);
    Ok(())
}

pub(super) fn carry(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let [shards, rows, lanes] = launch.inputs[0].view.shape[..] else {
        panic!("the contract asks for three dims");
    };
    let numbers =
        [launch.scalars[0].int(), launch.scalars[1].int(), shards as i64, rows as i64, lanes as i64];
    let mut args = vec![GridArg::Input(0), GridArg::Output(0)];
    args.extend(numbers.map(GridArg::I64));
    plan.grid(Grid {
        entry: "gated_scan_carry",
        defines: vec![("T", type_name(DType::F64).into()), ("REVERSED", "0".into())],
        blocks: [num_blocks(lanes), 1, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
        args,
    });
    Ok(())
}

/// Returns the blocks of some threads.
fn num_blocks(threads: usize) -> u32 {
    u32::try_from(threads.div_ceil(THREADS)).expect("fewer than 2^31 blocks of lanes fit a device")
}

pub(super) fn backward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    let chunks = Chunks::new(&BACKWARD, launch, true)?;
    let edges = (launch.inputs.len() > 3).then_some(3);
    let [carry, is_carried] = chunks.carries(plan, 2, edges);
    let mut args: Vec<GridArg> = (0..3).map(GridArg::Input).collect();
    args.extend([
        carry,
        is_carried,
        GridArg::Input(edges.unwrap_or(0)),
        GridArg::I32(i32::from(edges.is_some())),
    ]);
    args.extend([GridArg::Output(0), GridArg::Output(1)]);
    chunks.grid(plan, "gated_scan_backward", chunks.shape.lanes() * chunks.count, args);
    Ok(())
}
