//! Blocks, their cache and their cutting.

use super::*;
use std::sync::Mutex;

#[test]
fn a_freed_block_is_used_again() {
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
fn a_shared_buffer_cannot_be_written() {
    let mut b = Allocator::default().alloc(16).unwrap();
    b.as_mut::<f32>().unwrap()[1] = 2.0;
    let c = b.clone();
    assert!(b.as_mut::<f32>().is_none());
    drop(c);
    assert_eq!(b.as_slice::<f32>()[1], 2.0);
    assert!(b.is_unique());
}

#[test]
fn a_limit_is_an_error_with_figures() {
    let a = Allocator::with_limit(1 << 20);
    let held = a.alloc(1 << 19).unwrap();
    let error = a.alloc(1 << 20).unwrap_err();
    assert!(error.to_string().contains("1048576 bytes"), "{error}");
    drop(held);
    a.alloc(1 << 20).unwrap();
}

#[derive(Debug, Default)]
struct Returned(Mutex<Vec<u64>>);

impl Keeper for Returned {
    fn give_back(&self, address: u64) {
        self.0.lock().unwrap().push(address);
    }
}

#[test]
fn memory_of_a_device_is_an_address_and_goes_home() {
    let home = Arc::new(Returned::default());
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
fn the_cache_goes_with_the_allocator() {
    let a = Allocator::default();
    let (held, shared) = (a.alloc(100).unwrap(), Arc::downgrade(&a.0.0));
    drop((a.alloc(100).unwrap(), a.alloc(5000).unwrap()));
    assert_eq!(shared.upgrade().unwrap().state.with(|s| s.stats).reserved_bytes, 2 * 128 + 5120);
    drop(a.clone());
    assert_eq!(a.stats().reserved_bytes, 2 * 128 + 5120, "there is another handle");
    drop(a);
    assert_eq!(shared.upgrade().unwrap().state.with(|s| s.stats).reserved_bytes, 128, "what is held stays");
    drop(held.clone());
    drop(held);
    assert!(shared.upgrade().is_none());
}

#[test]
fn a_large_block_is_cut_up_and_whole_again() {
    let a = Allocator::default();
    drop(a.alloc(8 << 20).unwrap());
    let mut parts = [3 << 20, 3 << 20, 1 << 20].map(|bytes| a.alloc(bytes).unwrap());
    assert_eq!((a.stats().num_system_allocs, a.stats().in_use_bytes), (1, 7 << 20));
    for (i, part) in parts.iter_mut().enumerate() {
        part.as_mut::<u8>().unwrap().fill(i as u8);
    }
    let own = |(i, part): (usize, &Buffer)| part.as_slice::<u8>().iter().all(|x| *x == i as u8);
    assert!(parts.iter().enumerate().all(own), "parts share nothing");
    let [first, second, third] = parts;
    drop((first, third));
    drop(a.alloc(3 << 20).unwrap());
    assert_eq!(a.stats().num_system_allocs, 1, "a part that was given back is used again");
    let other = a.alloc(8 << 20).unwrap();
    assert_eq!(a.stats().num_system_allocs, 2, "a part is in use");
    drop((second, other));
    let both = [a.alloc(8 << 20).unwrap(), a.alloc(8 << 20).unwrap()];
    assert_eq!(a.stats().num_system_allocs, 2);
    drop(both);
    drop(a.alloc(1000).unwrap());
    assert_eq!(a.stats().num_system_allocs, 3, "large blocks are not cut for small ones");
    let held = a.alloc(1 << 20).unwrap();
    a.release_cache();
    assert_eq!(a.stats().reserved_bytes, 8 << 20, "what is in use is part of a block");
    drop(a.alloc(6 << 20).unwrap());
    assert_eq!(a.stats().reserved_bytes, 8 << 20, "the rest of it is there still");
    drop(held);
    a.release_cache();
    assert_eq!((a.stats().reserved_bytes, a.stats().in_use_bytes), (0, 0));
}

#[test]
fn under_a_limit_large_blocks_stay_whole() {
    let a = Allocator::with_limit(10 << 20);
    drop(a.alloc(8 << 20).unwrap());
    let held = a.alloc(1 << 20).unwrap();
    drop(a.alloc(8 << 20).unwrap());
    assert_eq!((a.stats().num_system_allocs, a.stats().reserved_bytes), (2, 9 << 20));
    drop(held);
}

#[test]
fn parts_come_back_while_the_cache_is_emptied() {
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
fn blocks_of_all_sizes_share_nothing() {
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
fn last_handles_may_go_at_once_on_two_threads() {
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
