//! Graph capture on a fake GPU, compared with separate launches.

use super::tests::{backend, twice};
use super::{CudaDevice, fake};
use crate::backend::{Backend, Graph, download, upload};
use crate::buffer::Buffer;
use crate::cpu_backend::Cpu;
use crate::error::KernelError;
use crate::provider::{BackendConfig, BackendProvider};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

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

/// Captures work whose results need not be dropped if the capture fails.
fn capture(
    on: &dyn Backend,
    work: &mut dyn FnMut() -> Result<(), KernelError>,
) -> Result<Graph, KernelError> {
    on.capture(work, &mut || ())
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
    let graph = capture(&*gpu, &mut || {
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
        let error = capture(&*gpu, work).unwrap_err();
        assert_eq!(error.to_string(), format!("graph capture: a graph cannot contain work that {what}"));
    };
    refused(&mut || download::<f32>(&*gpu, &x, N).map(drop), "copies to the host");
    refused(&mut || upload(&*gpu, &[1f32]).map(drop), "copies from the host");
    refused(&mut || gpu.record_event().map(drop), "records an event for other back ends");
    refused(&mut || gpu.synchronize(), "waits until all work is done");
    refused(&mut || capture(&*gpu, &mut || Ok(())).map(drop), "captures other work");
    // A capture works after failed and panicked ones.
    let unwound = catch_unwind(AssertUnwindSafe(|| capture(&*gpu, &mut || panic!("in between"))));
    assert!(unwound.is_err());
    let graph = capture(&*gpu, &mut || Ok(())).unwrap();
    gpu.replay(&graph).unwrap();
    assert_eq!(floats(&*gpu, &x), [1.0; N]);
    let error = capture(&*Cpu::backend(1), &mut || Ok(())).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { kernel: "capture", .. }));
}

#[test]
fn graph_retains_memory_of_another_graph() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    let x = upload(&*gpu, &[8f32; N]).unwrap();
    let doubled = |from: &Buffer| {
        let mut out = None;
        let graph = capture(&*gpu, &mut || {
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
    let graph = capture(&*gpu, &mut || step(&*gpu, &mut x, &other_input).map(drop)).unwrap();
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
        let error = capture(&*gpu, &mut || gpu.alloc(60 << 20).and(Err(over()))).unwrap_err();
        assert_eq!(error, over());
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            capture(&*gpu, &mut || {
                let _held = gpu.alloc(60 << 20)?;
                panic!("in between")
            })
        }));
        assert!(unwound.is_err());
    }
    assert_eq!(gpu.memory().reserved_bytes, before.reserved_bytes);
    let mut held = None;
    let error = capture(&*gpu, &mut || {
        held = Some(gpu.alloc(4 * N)?);
        Err(over())
    });
    assert_eq!(error.unwrap_err(), KernelError::CaptureOutputHeld { bytes: 1536 });
    drop(held);
    assert_eq!(gpu.memory().in_use_bytes, before.in_use_bytes);
}

#[test]
fn capture_that_the_driver_refuses_at_its_end_discards_the_outputs() {
    for (call, code) in [("cuStreamEndCapture", 901), ("cuGraphInstantiateWithFlags", 2)] {
        let Some(folder) = fake::gpu("") else { return };
        let gpu = backend(&folder);
        let before = gpu.memory().in_use_bytes;
        folder.refuse(call, 0, 2, code);
        let made = Cell::new(None);
        let mut record = || {
            made.set(Some(gpu.alloc(4 * N)?));
            Ok(())
        };
        // The work succeeded, and its results are held: by the caller, who drops them, then by someone else.
        let error = gpu.capture(&mut record, &mut || made.set(None)).unwrap_err();
        assert!(matches!(error, KernelError::Device { .. } | KernelError::OutOfMemory { .. }), "{error}");
        let error = gpu.capture(&mut record, &mut || ()).unwrap_err();
        assert_eq!(error, KernelError::CaptureOutputHeld { bytes: 1536 });
        drop(made.take());
        assert_eq!(gpu.memory().in_use_bytes, before);
        // Separate launches still work, and another capture.
        let mut x = upload(&*gpu, &[100f32; N]).unwrap();
        let other_input = upload(&*gpu, &[7f32; N]).unwrap();
        assert_eq!(floats(&*gpu, &step(&*gpu, &mut x, &other_input).unwrap()), [4.5; N]);
        let graph = capture(&*gpu, &mut || step(&*gpu, &mut x, &other_input).map(drop)).unwrap();
        gpu.replay(&graph).unwrap();
        gpu.synchronize().unwrap();
    }
}

/// Checks that a rank captures and replays while another rank of the GPU `small-gpu` drops all it has, and that the memory of the other
/// rank is free afterwards.
fn check_drop_during_capture(gpu: &dyn Backend, other: Arc<dyn Backend>) {
    let (x, mut y) = (upload(gpu, &[8f32; N]).unwrap(), gpu.alloc(4 * N).unwrap());
    let mut z = upload(&*other, &[1f32; N]).unwrap();
    let graph_of_other = capture(&*other, &mut || twice(&*other, &x, &mut z, N, 1.0)).unwrap();
    let mut dropped = Some((graph_of_other, z, other));
    let graph = capture(gpu, &mut || {
        twice(gpu, &x, &mut y, N, 2.0)?;
        // Chunks, a graph, pinned memory, streams; modules, if the other device is gone with the rank.
        dropped = None;
        twice(gpu, &x, &mut y, N, 1.0)
    });
    gpu.replay(&graph.unwrap()).unwrap();
    assert_eq!(floats(gpu, &y), [5.5; N]);
    // Of 160 MiB, 64 for each rank.
    assert_eq!(gpu.alloc(85 << 20).map(drop), Ok(()));
}

/// While a rank captures, what other ranks of the GPU drop is destroyed later.
#[test]
fn memory_and_graphs_of_other_ranks_are_dropped_during_a_capture() {
    let Some(folder) = fake::gpu("small-gpu") else { return };
    let device = CudaDevice::open(&folder.search_paths(), 0).unwrap();
    let [gpu, other] = [(); 2].map(|()| device.backend(BackendConfig::default()).unwrap());
    check_drop_during_capture(&*gpu, other);
}

/// Two devices of one GPU share its context, so neither synchronizes it while the other one captures.
#[test]
fn second_device_of_a_gpu_frees_memory_during_a_capture() {
    let Some(folder) = fake::gpu("small-gpu") else { return };
    let (gpu, other) = (backend(&folder), backend(&folder));
    check_drop_during_capture(&*gpu, other);
    // Two GPUs of two drivers share nothing.
    let Some(folder) = fake::gpu("") else { return };
    let apart = backend(&folder);
    let graph = capture(&*gpu, &mut || {
        drop(apart.alloc(4 * N)?);
        Ok(())
    });
    gpu.replay(&graph.unwrap()).unwrap();
}

#[test]
fn failed_capture_leaves_the_cost_unchanged() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    let (mut x, other_input) = (upload(&*gpu, &[100f32; N]).unwrap(), upload(&*gpu, &[7f32; N]).unwrap());
    step(&*gpu, &mut x, &other_input).unwrap();
    let before = gpu.cost();
    assert!(before.flops > 0);
    let refused = capture(&*gpu, &mut || {
        step(&*gpu, &mut x, &other_input)?;
        gpu.synchronize()
    });
    assert!(refused.is_err());
    assert_eq!(gpu.cost(), before);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        capture(&*gpu, &mut || {
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
        let first = capture(&*gpu, &mut || {
            held = Some(gpu.alloc(60 << 20)?);
            Ok(())
        });
        drop(first.unwrap());
        let second = capture(&*gpu, &mut || {
            // Drops the last handle of the memory of the first graph.
            held = None;
            Ok(())
        });
        drop(second.unwrap());
    }
    let most = gpu.alloc(80 << 20).map(|_| ());
    assert_eq!(most, Ok(()));
}
