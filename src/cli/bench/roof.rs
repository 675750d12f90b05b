//! What this machine can do at most: multiply-adds in registers, and copies in memory, on some cores at once.

use super::line::{Bench, Roof, Work};
use shardgrad::Result;
use shardgrad::kernels::cpu::simd::peak::multiply_adds;
use std::hint::black_box;

/// Multiply-adds of each sum in a sample: some milliseconds.
const DEPTH: usize = 1 << 20;
/// Bytes that a core copies: more than caches hold.
const COPIED: usize = 128 << 20;

/// Measures both rates of so many cores and tells them.
pub(super) fn measure(bench: &Bench, cores: usize) -> Result<Roof> {
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
    bench.tell("roof", "multiply-adds, f32", &on, adding, Work::Flops(flops));
    bench.tell("roof", "copies, 128 MiB a core", &on, copying, Work::Bytes(bytes));
    Ok(Roof { flops: flops / adding, bytes: bytes / copying })
}

/// The work of each core on a thread of its own.
fn on_each<T: Send>(each: &mut [T], work: impl Fn(&mut T) + Sync) {
    std::thread::scope(|scope| {
        each.iter_mut().for_each(|own| drop(scope.spawn(|| work(own))));
    });
}
