//! Tests of the thread transport's barriers, slots and messages, and of the queue of a communication thread, under the model checker loom, over all interleavings of a few threads:
//! `RUSTFLAGS="--cfg loom" cargo test -p shardgrad-dist --lib loom`.

use super::call_queue::{CallFailure, CallQueue};
use crate::call::{Fingerprint, IssuedCall};
use crate::error::{Error, Kind};
use crate::group_sync::GroupSync;
use crate::mesh::AxisSet;
use crate::sync::RwLock;
use crate::world_state::{Message, RankState};
use loom::sync::Arc;
use loom::thread;
use shardgrad_kernels::{Buffer, SyncEvent};
use std::time::Duration;

/// Members write, enter a barrier, read what all have written, and enter a second barrier before they write again: no member waits
/// forever or reads the data of another round.
fn two_barriers(size: usize, rounds: usize, preemptions: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let group = Arc::new(GroupSync::new(size));
        let published = Arc::new((0..size).map(|_| RwLock::new(0)).collect::<Vec<_>>());
        let member = move |me: usize, group: &GroupSync, published: &[RwLock<usize>]| {
            for round in 1..=rounds {
                *published[me].write().unwrap() = round;
                group.wait_for_all(&group.arrived, Duration::ZERO, || Ok(())).unwrap();
                for other in published {
                    assert_eq!(*other.read().unwrap(), round, "data of this round");
                }
                group.wait_for_all(&group.finished, Duration::ZERO, || Ok(())).unwrap();
            }
        };
        let others: Vec<_> = (1..size)
            .map(|me| {
                let (group, published) = (group.clone(), published.clone());
                thread::spawn(move || member(me, &group, &published))
            })
            .collect();
        member(0, &group, &published);
        others.into_iter().for_each(|t| t.join().unwrap());
    });
}

/// Members publish a number in their slot for each of a few calls, with one barrier per call: all members read the numbers of that
/// call.
fn slots(size: usize, calls: u64, preemptions: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let group = Arc::new(GroupSync::new(size));
        let member = move |me: usize, group: &GroupSync| {
            for number in 1..=calls {
                group.publish(
                    me,
                    number,
                    Fingerprint { call: number, path: 0, origin: 0 },
                    &[number as u8; 8],
                );
                group.wait_for_all(&group.arrived, Duration::ZERO, || Ok(())).unwrap();
                assert!(group.have_all_arrived(number) && group.fingerprints_agree(number));
                for other in 0..size {
                    let mut seen = [0; 8];
                    assert!(group.read(other, number, &mut seen));
                    assert_eq!(seen, [number as u8; 8], "payload of this call");
                }
            }
        };
        let others: Vec<_> = (1..size)
            .map(|me| {
                let group = group.clone();
                thread::spawn(move || member(me, &group))
            })
            .collect();
        member(0, &group);
        others.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn loom_two_members_read_the_slots_of_each_call() {
    slots(2, 3, 3);
}

#[test]
fn loom_three_members_read_the_slots_of_each_call() {
    slots(3, 2, 2);
}

#[test]
fn loom_two_members_pass_barriers_twice() {
    two_barriers(2, 2, 3);
}

#[test]
fn loom_three_members_pass_barriers() {
    two_barriers(3, 1, 2);
}

#[test]
fn loom_message_wakes_its_receiver() {
    loom::model(|| {
        let rank_state = Arc::new(RankState::new());
        let to = rank_state.clone();
        let sender = thread::spawn(move || {
            for _ in 0..2 {
                let message = Message {
                    from: 1,
                    issued: IssuedCall::none(),
                    x: Buffer::without_memory(4),
                    ready: SyncEvent::default(),
                };
                to.deliver(message);
            }
        });
        for _ in 0..2 {
            let there = || rank_state.has_message(AxisSet::EMPTY, 1);
            rank_state.condvar.wait(Duration::ZERO, there, || Ok(())).unwrap();
            assert!(
                rank_state.take_message(AxisSet::EMPTY, 1).is_some(),
                "only the receiver takes a message"
            );
        }
        sender.join().unwrap();
    });
}

/// A rank hands three calls to its communication thread, waits for the second and for all, and ends the thread; call `failing` fails.
fn queued_calls(failing: Option<u64>) {
    loom::model(move || {
        let queue = Arc::new(CallQueue::new());
        let of_thread = queue.clone();
        let comm_thread = thread::spawn(move || {
            let mut ran = Vec::new();
            while let Some(call) = of_thread.next() {
                ran.push(call);
                let failure = || CallFailure::Error(Error::new(Kind::Timeout, "late"));
                of_thread.finish_call(if failing == Some(call) { Err(failure()) } else { Ok(()) });
            }
            ran
        });
        queue.add(1);
        assert_eq!(queue.add(2), 2);
        assert_eq!(queue.wait_until_finished(2).is_err(), failing == Some(2));
        queue.add(3);
        assert_eq!(queue.wait_until_finished(3).is_err(), failing == Some(2));
        queue.close();
        let ran = if failing == Some(2) { vec![1, 2] } else { vec![1, 2, 3] };
        assert_eq!(comm_thread.join().unwrap(), ran, "in the order of issue, none after a failure");
    });
}

#[test]
fn loom_communication_thread_runs_calls_in_the_order_of_issue() {
    queued_calls(None);
}

#[test]
fn loom_communication_thread_runs_no_call_after_a_failure() {
    queued_calls(Some(2));
}
