//! The meetings of the thread transport under the model checker loom, in every order in which a few threads can run:
//! `RUSTFLAGS="--cfg loom" cargo test -p shardgrad-dist --lib loom`.

use crate::call::{Issued, Print};
use crate::group::Group;
use crate::mesh::AxisSet;
use crate::sync::RwLock;
use crate::table::{Entry, Letter};
use loom::sync::Arc;
use loom::thread;
use shardgrad_kernels::{Buffer, SyncEvent};
use std::time::Duration;

/// Members write, come, read what all have written, and come again before they write anew: nobody waits for ever and
/// nobody reads what belongs to another round.
fn meetings(size: usize, rounds: usize, preemptions: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let group = Arc::new(Group::new(size));
        let shown = Arc::new((0..size).map(|_| RwLock::new(0)).collect::<Vec<_>>());
        let member = move |me: usize, group: &Group, shown: &[RwLock<usize>]| {
            for round in 1..=rounds {
                *shown[me].write().unwrap() = round;
                group.come(&group.arrived, Duration::ZERO, || Ok(())).unwrap();
                for other in shown {
                    assert_eq!(*other.read().unwrap(), round, "what was written for this round");
                }
                group.come(&group.left, Duration::ZERO, || Ok(())).unwrap();
            }
        };
        let others: Vec<_> = (1..size)
            .map(|me| {
                let (group, shown) = (group.clone(), shown.clone());
                thread::spawn(move || member(me, &group, &shown))
            })
            .collect();
        member(0, &group, &shown);
        others.into_iter().for_each(|t| t.join().unwrap());
    });
}

/// Members show each other a number in each of a few calls and come to one meeting in each: everyone reads those of the call.
fn notes(size: usize, calls: u64, preemptions: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let group = Arc::new(Group::new(size));
        let member = move |me: usize, group: &Group| {
            for number in 1..=calls {
                group.show(me, number, Print { call: number, path: 0, mark: 0 }, &[number as u8; 8]);
                group.come(&group.arrived, Duration::ZERO, || Ok(())).unwrap();
                assert!(group.has_met(number) && group.prints_agree(number));
                for other in 0..size {
                    let mut seen = [0; 8];
                    assert!(group.read(other, number, &mut seen));
                    assert_eq!(seen, [number as u8; 8], "what was shown in this call");
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
fn loom_two_members_read_the_notes_of_each_call() {
    notes(2, 3, 3);
}

#[test]
fn loom_three_members_read_the_notes_of_each_call() {
    notes(3, 2, 2);
}

#[test]
fn loom_two_members_meet_twice() {
    meetings(2, 2, 3);
}

#[test]
fn loom_three_members_meet() {
    meetings(3, 1, 2);
}

#[test]
fn loom_a_letter_wakes_who_waits_for_it() {
    loom::model(|| {
        let entry = Arc::new(Entry::new());
        let to = entry.clone();
        let sender = thread::spawn(move || {
            for _ in 0..2 {
                let letter = Letter {
                    from: 1,
                    issued: Issued::nothing(),
                    x: Buffer::without_memory(4),
                    ready: SyncEvent::default(),
                };
                to.deliver(letter);
            }
        });
        for _ in 0..2 {
            let there = || entry.has_letter(AxisSet::EMPTY, 1);
            entry.parking.wait(Duration::ZERO, there, || Ok(())).unwrap();
            assert!(entry.take_letter(AxisSet::EMPTY, 1).is_some(), "only its addressee takes a letter");
        }
        sender.join().unwrap();
    });
}
