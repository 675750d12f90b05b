//! Tests of allocation, caching, chunks and last handles.

use super::*;
use std::sync::Mutex;

#[test]
fn freed_block_is_reused() {
    let a = Allocator::default();
    drop(a.alloc(1000).unwrap());
    let b = a.alloc(990).unwrap();
    assert_eq!(a.stats().num_system_allocs, 1);
    assert_eq!(b.bytes(), 990);
    drop(b);
    a.release_cache();
    assert_eq!(a.stats().reserved_bytes, 0);
}

#[test]
fn shared_buffer_cannot_be_written() {
    let mut b = Allocator::default().alloc(16).unwrap();
    b.as_mut::<f32>().unwrap()[1] = 2.0;
    let c = b.clone();
    assert!(b.as_mut::<f32>().is_none());
    drop(c);
    assert_eq!(b.as_slice::<f32>()[1], 2.0);
    assert!(b.is_unique());
}

#[test]
fn exceeding_the_limit_is_out_of_memory() {
    let a = Allocator::with_limit(1 << 20);
    let held = a.alloc(1 << 19).unwrap();
    let error = a.alloc(1 << 20).unwrap_err();
    assert!(error.to_string().contains("1048576 bytes"), "{error}");
    drop(held);
    a.alloc(1 << 20).unwrap();
}

#[derive(Debug, Default)]
struct RecordingAllocator(Mutex<Vec<u64>>);

impl DeviceAllocator for RecordingAllocator {
    fn give_back(&self, address: u64) {
        self.0.lock().unwrap().push(address);
    }
}

#[test]
fn device_memory_returns_to_its_allocator() {
    let home = Arc::new(RecordingAllocator::default());
    let buffer = Buffer::on_device(4096, 12, home.clone());
    assert_eq!((buffer.device_address(), buffer.bytes(), buffer.has_memory()), (Some(4096), 12, true));
    let read = std::panic::AssertUnwindSafe(|| buffer.as_slice::<f32>().len());
    let read = std::panic::catch_unwind(read);
    assert!(read.is_err());
    let other = buffer.clone();
    drop(buffer);
    assert!(home.0.lock().unwrap().is_empty());
    drop(other);
    assert_eq!(*home.0.lock().unwrap(), [4096]);
}

#[test]
fn cache_is_freed_with_the_allocator() {
    let a = Allocator::default();
    let (held, shared) = (a.alloc(100).unwrap(), Arc::downgrade(&a.0.0));
    let large = a.alloc(1 << 20).unwrap();
    drop((a.alloc(100).unwrap(), a.alloc(5000).unwrap()));
    let reserved = || shared.upgrade().unwrap().state.with(|s| s.stats).reserved_bytes;
    assert_eq!(reserved(), CHUNK_MIN + 2 * 128 + 5120);
    drop(a.clone());
    assert_eq!(reserved(), CHUNK_MIN + 2 * 128 + 5120, "there is another handle");
    drop(a);
    assert_eq!(reserved(), CHUNK_MIN + 128, "a block in use stays");
    drop(large);
    assert_eq!(reserved(), 128, "a chunk goes with its last block");
    drop(held.clone());
    drop(held);
    assert!(shared.upgrade().is_none());
}

#[test]
fn large_blocks_share_a_chunk() {
    let a = Allocator::default();
    let mut parts = [30 << 20, 3 << 20, 300_000].map(|bytes| a.alloc(bytes).unwrap());
    let in_use = (33 << 20) + 74 * 4096;
    assert_eq!((a.stats().num_system_allocs, a.stats().in_use_bytes), (1, in_use));
    for (i, part) in parts.iter_mut().enumerate() {
        part.as_mut::<u8>().unwrap().fill(i as u8);
    }
    let own = |(i, part): (usize, &Buffer)| part.as_slice::<u8>().iter().all(|x| *x == i as u8);
    assert!(parts.iter().enumerate().all(own), "parts share nothing");
    let [first, second, third] = parts;
    drop((first, second));
    drop(a.alloc(33 << 20).unwrap());
    assert_eq!(a.stats().num_system_allocs, 1, "neighbours are joined");
    let other = a.alloc(CHUNK_MIN + 1).unwrap();
    assert_eq!((a.stats().num_system_allocs, a.stats().reserved_bytes), (2, 2 * CHUNK_MIN + 4096));
    a.release_cache();
    assert_eq!(a.stats().num_system_allocs, 2);
    drop(other);
    a.release_cache();
    assert_eq!(a.stats().reserved_bytes, CHUNK_MIN, "the chunk of a block in use stays");
    drop(third);
    a.release_cache();
    assert_eq!((a.stats().reserved_bytes, a.stats().in_use_bytes), (0, 0));
}

#[test]
fn chunks_grow_with_reserved_memory() {
    let a = Allocator::default();
    let held: Vec<Buffer> = (0..40).map(|_| a.alloc(16 << 20).unwrap()).collect();
    // 64, 64, 64, 96, 144 and 216 MiB.
    assert_eq!((a.stats().num_system_allocs, a.stats().reserved_bytes), (6, 648 << 20));
    drop(held);
}

#[test]
fn chunk_under_a_limit_takes_all_that_is_left() {
    let a = Allocator::with_limit(100 << 20);
    let mut held: Vec<Buffer> = [40 << 20, 40 << 20, 20 << 20].map(|bytes| a.alloc(bytes).unwrap()).into();
    assert_eq!((a.stats().num_system_allocs, a.stats().reserved_bytes), (1, 100 << 20));
    assert!(a.alloc(1 << 20).is_err() && a.alloc(1000).is_err());
    held.remove(1);
    held.extend((0..100).map(|_| a.alloc(1000).unwrap()));
    held.push(a.alloc(39 << 20).unwrap());
    assert_eq!(a.stats().reserved_bytes, 100 << 20, "small blocks are cut from it");
    drop(held);
    drop(a.alloc(100 << 20).unwrap());
    let small: Vec<Buffer> = (0..100).map(|_| a.alloc(1000).unwrap()).collect();
    assert_eq!(a.stats().reserved_bytes, 100 << 10, "the chunk made room");
    drop(small);
}

#[test]
fn small_blocks_are_cut_from_chunks_at_the_limit() {
    let a = Allocator::with_limit(1 << 20);
    let whole = a.alloc(1 << 20).unwrap();
    assert!(a.alloc(100).is_err());
    drop(whole);
    let _half = a.alloc(1 << 19).unwrap();
    a.release_cache();
    let mut small = a.alloc(100).unwrap();
    small.as_mut::<u8>().unwrap().fill(7);
    assert_eq!(small.as_slice::<u8>(), [7; 100]);
}

#[test]
fn blocks_return_while_the_cache_is_released() {
    let a = Allocator::default();
    let (sender, receiver) = std::sync::mpsc::channel::<Buffer>();
    let is_done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            receiver.into_iter().for_each(drop);
            is_done.store(true, Ordering::Release);
        });
        scope.spawn(|| {
            while !is_done.load(Ordering::Acquire) {
                a.release_cache();
            }
        });
        for _ in 0..2000 {
            drop(a.alloc(2 << 20).unwrap());
            sender.send(a.alloc(1 << 19).unwrap()).unwrap();
        }
        drop(sender);
    });
    a.release_cache();
    assert_eq!((a.stats().in_use_bytes, a.stats().reserved_bytes), (0, 0));
}

#[test]
fn blocks_of_all_sizes_do_not_overlap() {
    let a = Allocator::default();
    let mut held: Vec<(i64, Buffer)> = Vec::new();
    let mut random = 1u64;
    for i in 0..3000i64 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if held.len() > 12 || random >> 33 & 1 == 0 {
            let at = (random >> 34) as usize % held.len().max(1);
            if let Some((mark, buffer)) = (at < held.len()).then(|| held.swap_remove(at)) {
                let words = buffer.as_slice::<i64>();
                assert!(words.iter().step_by(509).chain(words.last()).all(|x| *x == mark));
            }
        } else {
            let mut buffer = a.alloc(8 + ((random >> 35) as usize % (3 << 20)) / 8 * 8).unwrap();
            buffer.as_mut::<i64>().unwrap().fill(i);
            held.push((i, buffer));
        }
    }
    drop(held);
    assert_eq!(a.stats().in_use_bytes, 0);
    a.release_cache();
    assert_eq!(a.stats().reserved_bytes, 0, "every block is whole again");
}

#[test]
fn two_threads_may_drop_the_last_handles_at_once() {
    let a = Allocator::default();
    let (sender, receiver) = std::sync::mpsc::channel::<Buffer>();
    std::thread::scope(|scope| {
        scope.spawn(|| receiver.into_iter().for_each(drop));
        for i in 0..20_000i64 {
            let mut buffer = a.alloc(64 << (i % 3)).unwrap();
            buffer.as_mut::<i64>().unwrap().fill(i);
            sender.send(buffer.clone()).unwrap();
            assert!(buffer.as_slice::<i64>().iter().all(|x| *x == i), "shared memory is not handed out");
        }
        drop(sender);
    });
    assert_eq!(a.stats().in_use_bytes, 0);
    a.release_cache();
    assert_eq!(a.stats().reserved_bytes, 0, "every block came back");
}
