//! Graph capture on a fake GPU, compared with separate launches.

use super::fake;
use super::tests::{backend, twice};
use crate::backend::{Backend, download, upload};
use crate::buffer::Buffer;
use crate::cpu_backend::Cpu;
use crate::error::KernelError;
use std::panic::{AssertUnwindSafe, catch_unwind};

const N: usize = 300;

/// Computes x = x - 12.5 through temporary memory; returns `other_input` - 2.5 in new memory.
fn step(on: &dyn Backend, x: &mut Buffer, other_input: &Buffer) -> Result<Buffer, KernelError> {
    let mut out = on.alloc(4 * N)?;
    for _ in 0..2 {
        let mut middle = on.alloc(4 * N)?;
        twice(on, x, &mut middle, N, 2.0)?;
        let mut other = on.alloc(4 * N)?;
        twice(on, &middle, &mut other, N, 0.5)?;
        twice(on, &other, x, N, 1.0)?;
    }
    twice(on, other_input, &mut out, N, 1.0)?;
    Ok(out)
}

fn floats(on: &dyn Backend, buffer: &Buffer) -> Vec<f32> {
    download(on, buffer, N).unwrap()
}

#[test]
fn replay_gives_the_results_of_separate_launches() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    let before = gpu.memory().in_use_bytes;
    let data: Vec<f32> = (0..N).map(|i| 100.0 + i as f32).collect();
    let (mut x, mut y) = (upload(&*gpu, &data).unwrap(), upload(&*gpu, &data).unwrap());
    let other_input = upload(&*gpu, &[7f32; N]).unwrap();
    let mut out = None;
    let graph = gpu
        .capture(&mut || {
            out = Some(step(&*gpu, &mut x, &other_input)?);
            Ok(())
        })
        .unwrap();
    let out = out.unwrap();
    assert_eq!(floats(&*gpu, &x), data, "capture executes nothing");
    let own = other_input.device_address();
    let spare = other_input.clone();
    drop(other_input);
    for round in 0..6 {
        // Other work in between, on memory that must not belong to the graph.
        let junk = upload(&*gpu, &[900f32; N]).unwrap();
        assert_ne!(junk.device_address(), own);
        gpu.replay(&graph).unwrap();
        let same = step(&*gpu, &mut y, &spare).unwrap();
        assert_eq!(floats(&*gpu, &x), floats(&*gpu, &y), "{round}");
        assert_eq!(floats(&*gpu, &out), floats(&*gpu, &same), "{round}");
    }
    drop(spare);
    let blocks: Vec<Buffer> = (0..40).map(|_| upload(&*gpu, &[900f32; N]).unwrap()).collect();
    assert!(blocks.iter().all(|block| block.device_address() != own), "the graph still reads it");
    gpu.replay(&graph).unwrap();
    assert_eq!(floats(&*gpu, &out), [4.5; N]);
    assert!(gpu.memory().in_use_bytes > before);
    drop((graph, blocks, x, y, out));
    assert_eq!(gpu.memory().in_use_bytes, before, "all memory is returned");
}

#[test]
fn synchronizing_calls_are_refused_during_capture() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    let x = upload(&*gpu, &[1f32; N]).unwrap();
    let refused = |work: &mut dyn FnMut() -> Result<(), KernelError>, what: &str| {
        let error = gpu.capture(work).unwrap_err();
        assert_eq!(error.to_string(), format!("graph capture: a graph cannot contain work that {what}"));
    };
    refused(&mut || download::<f32>(&*gpu, &x, N).map(drop), "copies to the host");
    refused(&mut || upload(&*gpu, &[1f32]).map(drop), "copies from the host");
    refused(&mut || gpu.record_event().map(drop), "records an event for other back ends");
    refused(&mut || gpu.synchronize(), "waits until all work is done");
    refused(&mut || gpu.capture(&mut || Ok(())).map(drop), "captures other work");
    // A capture works after failed and panicked ones.
    let unwound = catch_unwind(AssertUnwindSafe(|| gpu.capture(&mut || panic!("in between"))));
    assert!(unwound.is_err());
    let graph = gpu.capture(&mut || Ok(())).unwrap();
    gpu.replay(&graph).unwrap();
    assert_eq!(floats(&*gpu, &x), [1.0; N]);
    let error = Cpu::backend(1).capture(&mut || Ok(())).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { kernel: "capture", .. }));
}

#[test]
fn graph_retains_memory_of_another_graph() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    let x = upload(&*gpu, &[8f32; N]).unwrap();
    let doubled = |from: &Buffer| {
        let mut out = None;
        let graph = gpu.capture(&mut || {
            let to = out.insert(gpu.alloc(4 * N)?);
            twice(&*gpu, from, to, N, 2.0)
        });
        (graph.unwrap(), out.unwrap())
    };
    let (first, middle) = doubled(&x);
    gpu.replay(&first).unwrap();
    let (second, out) = doubled(&middle);
    // The fake driver overwrites freed memory.
    drop((first, middle, x));
    gpu.replay(&second).unwrap();
    assert_eq!(floats(&*gpu, &out), [2.0 * 13.5 - 2.5; N]);
}

#[test]
fn cost_counts_at_replay() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    let (mut x, other_input) = (upload(&*gpu, &[100f32; N]).unwrap(), upload(&*gpu, &[7f32; N]).unwrap());
    let before = gpu.cost();
    step(&*gpu, &mut x, &other_input).unwrap();
    let once = gpu.cost().flops - before.flops;
    let graph = gpu.capture(&mut || step(&*gpu, &mut x, &other_input).map(drop)).unwrap();
    assert_eq!(gpu.cost().flops - before.flops, once);
    gpu.replay(&graph).unwrap();
    gpu.replay(&graph).unwrap();
    assert_eq!(gpu.cost().flops - before.flops, 3 * once);
    assert!(once > 0);
}

#[test]
fn failed_capture_releases_its_memory() {
    let Some(folder) = fake::gpu("small-gpu") else { return };
    let gpu = backend(&folder);
    let before = gpu.memory();
    let over = || KernelError::NotCapturable { what: "is over" };
    // Of 160 MiB: a leak would fail soon.
    for _ in 0..4 {
        let error = gpu.capture(&mut || gpu.alloc(60 << 20).and(Err(over()))).unwrap_err();
        assert_eq!(error, over());
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            gpu.capture(&mut || {
                let _held = gpu.alloc(60 << 20)?;
                panic!("in between")
            })
        }));
        assert!(unwound.is_err());
    }
    assert_eq!(gpu.memory().reserved_bytes, before.reserved_bytes);
    let mut held = None;
    let error = gpu.capture(&mut || {
        held = Some(gpu.alloc(4 * N)?);
        Err(over())
    });
    assert_eq!(error.unwrap_err(), KernelError::CaptureOutputHeld { bytes: 1536 });
    drop(held);
    assert_eq!(gpu.memory().in_use_bytes, before.in_use_bytes);
}

#[test]
fn failed_instantiation_reports_outputs_that_are_still_held() {
    let Some(folder) = fake::gpu("no-graph") else { return };
    let gpu = backend(&folder);
    let before = gpu.memory().in_use_bytes;
    let error = gpu.capture(&mut || gpu.alloc(4 * N).map(drop)).unwrap_err();
    assert!(matches!(error, KernelError::Device { .. }), "the error of the driver: {error}");
    let mut held = None;
    let error = gpu.capture(&mut || {
        held = Some(gpu.alloc(4 * N)?);
        Ok(())
    });
    assert_eq!(error.unwrap_err(), KernelError::CaptureOutputHeld { bytes: 1536 });
    drop(held);
    assert_eq!(gpu.memory().in_use_bytes, before);
    // Separate launches still work.
    let mut x = upload(&*gpu, &[100f32; N]).unwrap();
    let other_input = upload(&*gpu, &[7f32; N]).unwrap();
    assert_eq!(floats(&*gpu, &step(&*gpu, &mut x, &other_input).unwrap()), [4.5; N]);
}

#[test]
fn failed_capture_leaves_the_cost_unchanged() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    let (mut x, other_input) = (upload(&*gpu, &[100f32; N]).unwrap(), upload(&*gpu, &[7f32; N]).unwrap());
    step(&*gpu, &mut x, &other_input).unwrap();
    let before = gpu.cost();
    assert!(before.flops > 0);
    let refused = gpu.capture(&mut || {
        step(&*gpu, &mut x, &other_input)?;
        gpu.synchronize()
    });
    assert!(refused.is_err());
    assert_eq!(gpu.cost(), before);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        gpu.capture(&mut || {
            step(&*gpu, &mut x, &other_input)?;
            panic!("in between")
        })
    }));
    assert!(unwound.is_err());
    assert_eq!(gpu.cost(), before);
}

#[test]
fn chunks_freed_during_capture_are_returned_later() {
    let Some(folder) = fake::gpu("small-gpu") else { return };
    let gpu = backend(&folder);
    // Of 160 MiB.
    for _ in 0..4 {
        let mut held = None;
        let first = gpu.capture(&mut || {
            held = Some(gpu.alloc(60 << 20)?);
            Ok(())
        });
        drop(first.unwrap());
        let second = gpu.capture(&mut || {
            // Drops the last handle of the memory of the first graph.
            held = None;
            Ok(())
        });
        drop(second.unwrap());
    }
    let most = gpu.alloc(80 << 20).map(|_| ());
    assert_eq!(most, Ok(()));
}
