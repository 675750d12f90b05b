//! Roofline of this machine: peak FMA rate in registers, and memory copy bandwidth, on some cores at once.

use super::measurement::{Bench, Roofline, Work};
use shardgrad::Result;
use shardgrad::kernels::cpu::simd::peak::multiply_adds;
use std::hint::black_box;

/// FMAs per accumulator in a sample: some milliseconds.
const DEPTH: usize = 1 << 20;
/// Bytes copied per core: more than caches hold.
const COPIED: usize = 128 << 20;

/// Measures and reports both rates on a number of cores.
pub(super) fn measure(bench: &Bench, cores: usize) -> Result<Roofline> {
    let mut done = vec![0; cores];
    let adding = bench.seconds(1, || {
        on_each(&mut done, |flops| *flops = black_box(multiply_adds(DEPTH)).0);
        Ok(())
    })?;
    let flops = done.iter().sum::<usize>() as f64;
    let mut buffers: Vec<_> = (0..cores).map(|_| (vec![1u8; COPIED], vec![0u8; COPIED])).collect();
    let copying = bench.seconds(1, || {
        on_each(&mut buffers, |(from, to)| to.copy_from_slice(black_box(from)));
        Ok(())
    })?;
    let bytes = (2 * COPIED * cores) as f64;
    let on = if cores == 1 { "1 core".into() } else { format!("{cores} cores") };
    bench.report("roof", "FMA, f32", &on, adding, Work::Flops(flops));
    bench.report("roof", "copy, 128 MiB per core", &on, copying, Work::Bytes(bytes));
    Ok(Roofline { flops: flops / adding, bytes: bytes / copying })
}

/// Runs `work` for each element on its own thread.
fn on_each<T: Send>(each: &mut [T], work: impl Fn(&mut T) + Sync) {
    std::thread::scope(|scope| {
        each.iter_mut().for_each(|own| drop(scope.spawn(|| work(own))));
    });
}
