//! CapturedGraph work on a fake card, epilogue_operands the same work given each time.

use super::fake;
use super::tests::{backend, twice};
use crate::backend::{Backend, download, upload};
use crate::buffer::Buffer;
use crate::cpu_backend::Cpu;
use crate::error::KernelError;
use std::panic::{AssertUnwindSafe, catch_unwind};

const N: usize = 300;

/// x = x - 12.5 by way of memory that is taken and given back; gives `kept` - 2.5 in memory of its own.
fn step(on: &dyn Backend, x: &mut Buffer, kept: &Buffer) -> Result<Buffer, KernelError> {
    let mut out = on.alloc(4 * N)?;
    for _ in 0..2 {
        let mut middle = on.alloc(4 * N)?;
        twice(on, x, &mut middle, N, 2.0)?;
        let mut other = on.alloc(4 * N)?;
        twice(on, &middle, &mut other, N, 0.5)?;
        twice(on, &other, x, N, 1.0)?;
    }
    twice(on, kept, &mut out, N, 1.0)?;
    Ok(out)
}

fn floats(on: &dyn Backend, buffer: &Buffer) -> Vec<f32> {
    download(on, buffer, N).unwrap()
}

#[test]
fn captured_work_gives_what_the_same_work_gives_each_time() {
    let Some(folder) = fake::card("") else { return };
    let card = backend(&folder);
    let before = card.memory().in_use_bytes;
    let data: Vec<f32> = (0..N).map(|i| 100.0 + i as f32).collect();
    let (mut x, mut y) = (upload(&*card, &data).unwrap(), upload(&*card, &data).unwrap());
    let kept = upload(&*card, &[7f32; N]).unwrap();
    let mut out = None;
    let graph = card
        .capture(&mut || {
            out = Some(step(&*card, &mut x, &kept)?);
            Ok(())
        })
        .unwrap();
    let out = out.unwrap();
    assert_eq!(floats(&*card, &x), data, "nothing of it is done while it is captured");
    let own = kept.device_address();
    let spare = kept.clone();
    drop(kept);
    for round in 0..6 {
        // Work of other kinds in between, on memory that must not be the graph's.
        let junk = upload(&*card, &[900f32; N]).unwrap();
        assert_ne!(junk.device_address(), own);
        card.replay(&graph).unwrap();
        let same = step(&*card, &mut y, &spare).unwrap();
        assert_eq!(floats(&*card, &x), floats(&*card, &y), "{round}");
        assert_eq!(floats(&*card, &out), floats(&*card, &same), "{round}");
    }
    drop(spare);
    let blocks: Vec<Buffer> = (0..40).map(|_| upload(&*card, &[900f32; N]).unwrap()).collect();
    assert!(blocks.iter().all(|block| block.device_address() != own), "the graph still reads it");
    card.replay(&graph).unwrap();
    assert_eq!(floats(&*card, &out), [4.5; N]);
    assert!(card.memory().in_use_bytes > before);
    drop((graph, blocks, x, y, out));
    assert_eq!(card.memory().in_use_bytes, before, "all of it comes back");
}

#[test]
fn what_cannot_be_part_of_a_graph_is_refused() {
    let Some(folder) = fake::card("") else { return };
    let card = backend(&folder);
    let x = upload(&*card, &[1f32; N]).unwrap();
    let refused = |work: &mut dyn FnMut() -> Result<(), KernelError>, what: &str| {
        let error = card.capture(work).unwrap_err();
        assert_eq!(error.to_string(), format!("work that is being captured {what}"));
    };
    refused(&mut || download::<f32>(&*card, &x, N).map(drop), "copies to the host");
    refused(&mut || upload(&*card, &[1f32]).map(drop), "copies from the host");
    refused(&mut || card.record_event().map(drop), "records an event for other back ends");
    refused(&mut || card.synchronize(), "waits until all work is done");
    refused(&mut || card.capture(&mut || Ok(())).map(drop), "captures other work");
    // Whatever ended a capture, the next begins anew.
    let unwound = catch_unwind(AssertUnwindSafe(|| card.capture(&mut || panic!("in between"))));
    assert!(unwound.is_err());
    let graph = card.capture(&mut || Ok(())).unwrap();
    card.replay(&graph).unwrap();
    assert_eq!(floats(&*card, &x), [1.0; N]);
    let error = Cpu::backend(1).capture(&mut || Ok(())).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { kernel: "capture", .. }));
}

#[test]
fn a_graph_keeps_what_it_reads_of_another() {
    let Some(folder) = fake::card("") else { return };
    let card = backend(&folder);
    let x = upload(&*card, &[8f32; N]).unwrap();
    let doubled = |from: &Buffer| {
        let mut out = None;
        let graph = card.capture(&mut || {
            let to = out.insert(card.alloc(4 * N)?);
            twice(&*card, from, to, N, 2.0)
        });
        (graph.unwrap(), out.unwrap())
    };
    let (first, middle) = doubled(&x);
    card.replay(&first).unwrap();
    let (second, out) = doubled(&middle);
    // Memory that goes back to the driver is overwritten there.
    drop((first, middle, x));
    card.replay(&second).unwrap();
    assert_eq!(floats(&*card, &out), [2.0 * 13.5 - 2.5; N]);
}

#[test]
fn work_costs_when_it_is_done() {
    let Some(folder) = fake::card("") else { return };
    let card = backend(&folder);
    let (mut x, kept) = (upload(&*card, &[100f32; N]).unwrap(), upload(&*card, &[7f32; N]).unwrap());
    let before = card.cost();
    step(&*card, &mut x, &kept).unwrap();
    let once = card.cost().flops - before.flops;
    let graph = card.capture(&mut || step(&*card, &mut x, &kept).map(drop)).unwrap();
    assert_eq!(card.cost().flops - before.flops, once);
    card.replay(&graph).unwrap();
    card.replay(&graph).unwrap();
    assert_eq!(card.cost().flops - before.flops, 3 * once);
    assert!(once > 0);
}

#[test]
fn what_ended_early_leaves_no_memory_and_no_contents_behind() {
    let Some(folder) = fake::card("small-card") else { return };
    let card = backend(&folder);
    let before = card.memory();
    let over = || KernelError::NotCapturable { what: "is over" };
    // Of 160 MiB; what were not given back would be missed soon.
    for _ in 0..4 {
        let error = card.capture(&mut || card.alloc(60 << 20).and(Err(over()))).unwrap_err();
        assert_eq!(error, over());
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            card.capture(&mut || {
                let _held = card.alloc(60 << 20)?;
                panic!("in between")
            })
        }));
        assert!(unwound.is_err());
    }
    assert_eq!(card.memory().reserved_bytes, before.reserved_bytes);
    let mut held = None;
    let error = card.capture(&mut || {
        held = Some(card.alloc(4 * N)?);
        Err(over())
    });
    assert_eq!(error.unwrap_err(), KernelError::CaptureOutputHeld { bytes: 1536 });
    drop(held);
    assert_eq!(card.memory().in_use_bytes, before.in_use_bytes);
}

#[test]
fn a_graph_that_a_card_does_not_make_leaves_nothing_without_contents() {
    let Some(folder) = fake::card("no-graph") else { return };
    let card = backend(&folder);
    let before = card.memory().in_use_bytes;
    let told = card.capture(&mut || card.alloc(4 * N).map(drop)).unwrap_err();
    assert!(matches!(told, KernelError::Device { .. }), "what the card says: {told}");
    let mut held = None;
    let error = card.capture(&mut || {
        held = Some(card.alloc(4 * N)?);
        Ok(())
    });
    assert_eq!(error.unwrap_err(), KernelError::CaptureOutputHeld { bytes: 1536 });
    drop(held);
    assert_eq!(card.memory().in_use_bytes, before);
    // Work that is given each time goes on.
    let mut x = upload(&*card, &[100f32; N]).unwrap();
    let kept = upload(&*card, &[7f32; N]).unwrap();
    assert_eq!(floats(&*card, &step(&*card, &mut x, &kept).unwrap()), [4.5; N]);
}

#[test]
fn what_was_done_before_has_its_cost_however_a_capture_ends() {
    let Some(folder) = fake::card("") else { return };
    let card = backend(&folder);
    let (mut x, kept) = (upload(&*card, &[100f32; N]).unwrap(), upload(&*card, &[7f32; N]).unwrap());
    step(&*card, &mut x, &kept).unwrap();
    let before = card.cost();
    assert!(before.flops > 0);
    let refused = card.capture(&mut || {
        step(&*card, &mut x, &kept)?;
        card.synchronize()
    });
    assert!(refused.is_err());
    assert_eq!(card.cost(), before);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        card.capture(&mut || {
            step(&*card, &mut x, &kept)?;
            panic!("in between")
        })
    }));
    assert!(unwound.is_err());
    assert_eq!(card.cost(), before);
}

#[test]
fn memory_that_is_given_up_while_work_is_noted_is_given_back_later() {
    let Some(folder) = fake::card("small-card") else { return };
    let card = backend(&folder);
    // Of 160 MiB.
    for _ in 0..4 {
        let mut held = None;
        let first = card.capture(&mut || {
            held = Some(card.alloc(60 << 20)?);
            Ok(())
        });
        drop(first.unwrap());
        let second = card.capture(&mut || {
            // The last handle of the memory of the first graph.
            held = None;
            Ok(())
        });
        drop(second.unwrap());
    }
    let most = card.alloc(80 << 20).map(|_| ());
    assert_eq!(most, Ok(()));
}
