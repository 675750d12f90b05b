//! Waits of a rank for other ranks: for their calls, for the elements of these calls, and for room for its own; and the detection of
//! deadlocks.

use super::TcpTransport;
use super::frame::{CallId, Frame, Probe};
use super::world_view::{ReceivedCall, WorldView};
use super::{FINAL_SEND_TIMEOUT, Transport};
use crate::call::{IssuedCall, Op, Request};
use crate::error::Result;
use crate::mesh::AxisSet;
use crate::report;
use crate::spin_condvar::WaitClock;
use crate::world_state::RankStatus;
use std::time::{Duration, Instant};

/// A rank that has waited this long announces its wait to all others, and sends probes.
const ANNOUNCE_AFTER: Duration = Duration::from_millis(50);
/// The interval between the probes of a waiting rank; longer in large worlds, where each probe is forwarded to many ranks.
const PROBE_EVERY: Duration = Duration::from_millis(200);
/// The number of ranks up to which the interval is not prolonged.
const FREQUENT_PROBERS_MAX: usize = 8;
/// A rank that waits for others lets the sender of an announced message go on after this time: they may wait for that sender.
const HOLD_AFTER: Duration = Duration::from_millis(100);
/// The same for a rank that waits for room for a message of its own: senders in a ring all do.
const HOLD_AFTER_IN_SEND: Duration = Duration::from_millis(10);

/// One wait of this rank for other ranks.
struct Wait<'a> {
    request: &'a Request<'a>,
    /// Whether the awaited ranks have made the call, and only its elements are missing.
    has_calls: bool,
    clock: WaitClock,
    /// The waited time at which the next probe is sent.
    next: Duration,
    is_announced: bool,
}

impl TcpTransport {
    /// Waits until the calls of all members of the group have arrived, or the awaited message; first without their elements, which this
    /// rank asks for then.
    pub(super) fn wait_for_calls(&self, request: &Request<'_>) -> Result<()> {
        let (axes, is_message) = (request.call.axes, !request.op.is_collective());
        let sender = match request.op {
            Op::Recv { from } => Some(request.position.members[from]),
            _ => None,
        };
        let is_other = |member: usize| sender.is_some_and(|sender| sender != member);
        self.wait(request, false, |view, member| {
            is_other(member) || view.has_call(member, axes, is_message)
        })?;
        if self.endpoint.view.num_announced() == 0 {
            return Ok(());
        }
        self.wait(request, true, |view, member| {
            is_other(member) || view.has_elements(member, axes, is_message)
        })
    }

    /// Waits until `has_come` holds for every other member of the group; for a recv, which may be from this rank itself, for all members.
    /// `has_calls` states whether all have made the call, and only its elements are missing.
    pub(super) fn wait(
        &self,
        request: &Request<'_>,
        has_calls: bool,
        has_come: impl Fn(&WorldView, usize) -> bool,
    ) -> Result<()> {
        let view = &self.endpoint.view;
        let is_alone = matches!(request.op, Op::Recv { .. });
        let missing = |member: &usize| (is_alone || *member != view.rank) && !has_come(view, *member);
        let absent = || request.position.members.iter().copied().filter(missing).collect::<Vec<usize>>();
        let done = || !request.position.members.iter().any(&missing);
        self.counters().waits += 1;
        let (clock, next, is_announced) = (WaitClock::default(), ANNOUNCE_AFTER, false);
        let mut wait = Wait { request, has_calls, clock, next, is_announced };
        self.answer_in(&wait, &absent);
        view.condvar.wait(self.spin, done, || self.check_wait(&mut wait, &absent))?;
        if wait.is_announced {
            self.endpoint.connections.send_to_all(&Frame::Resumed, FINAL_SEND_TIMEOUT);
        }
        Ok(())
    }

    /// Checks a wait, every ten milliseconds and whenever a frame arrives: returns an error if the world has failed, an awaited rank
    /// has ended, or the wait exceeds its timeout; else forwards and sends probes.
    fn check_wait(&self, wait: &mut Wait<'_>, absent: &dyn Fn() -> Vec<usize>) -> Result<()> {
        let (view, me) = (&self.endpoint.view, self.rank());
        let waited = wait.clock.advance(Instant::now());
        let (members, mesh) = (&wait.request.position.members, &view.mesh);
        if !view.has_failed() {
            let gone = absent().into_iter().find(|r| *r != me && view.status(*r) != RankStatus::Running);
            // It may have sent the awaited data before it ended.
            let gone = gone.filter(|gone| !wait.has_calls && absent().contains(gone));
            if absent().contains(&me) {
                self.fail(report::cycle(mesh, &view.snapshot(&[me]), &[me]), vec![me]);
            } else if let Some(gone) = gone {
                let error = report::departed(mesh, &view.snapshot(&absent()), me, gone);
                self.fail(error, with_last(members, &[gone]));
            } else if waited > self.limit() && !absent().is_empty() {
                let error = report::timed_out(mesh, &view.snapshot(&absent()), me, self.limit());
                self.fail(error, with_last(members, &absent()));
            } else {
                self.answer_in(wait, absent);
                self.probe(wait, waited, &absent());
            }
        }
        if view.has_failed() {
            let call = view.last(me).text(mesh, me);
            return Err(self.failure_error(&format!("waits in {call}")));
        }
        Ok(())
    }

    /// Waits, after a message was announced, until the receiver asks for its elements, or replies that it cannot soon.
    pub(super) fn wait_for_answer(&self, to: usize, issued: &IssuedCall) -> Result<()> {
        let (view, id, mut clock) = (&self.endpoint.view, CallId::of(issued), WaitClock::default());
        let answer = || self.answer_announcements(None, &[to], HOLD_AFTER_IN_SEND);
        answer();
        view.condvar.wait(
            Duration::ZERO,
            || !view.is_unanswered(to, id),
            || {
                answer();
                self.check_send(&mut clock, to, issued)
            },
        )
    }

    /// Replies to ranks that have announced calls, during a wait for the ranks `absent`.
    fn answer_in(&self, wait: &Wait<'_>, absent: &dyn Fn() -> Vec<usize>) {
        if self.endpoint.view.num_announced() > 0 {
            let awaited = (wait.request.call.axes, !wait.request.op.is_collective());
            // Elements come without another step of any rank, so nobody waits for a sender that is not let go on.
            let pause = if wait.has_calls { Duration::MAX } else { HOLD_AFTER };
            self.answer_announcements(Some(awaited), &absent(), pause);
        }
    }

    /// Replies to ranks that have announced calls: asks the ranks `absent` for the elements of the call that this rank waits for, and lets
    /// the senders of other messages go on after `pause`; at once if this rank waits for their calls, or for their answer.
    fn answer_announcements(&self, awaited: Option<(AxisSet, bool)>, absent: &[usize], pause: Duration) {
        let view = &self.endpoint.view;
        if view.num_announced() == 0 {
            return;
        }
        for from in (0..view.mesh.num_ranks()).filter(|from| *from != view.rank) {
            let is_absent = absent.contains(&from);
            let pause = if is_absent && pause < Duration::MAX { Duration::ZERO } else { pause };
            while let Some(reply) = view.next_waiting_reply(from, awaited.filter(|_| is_absent), pause) {
                self.send_reply(from, &reply);
            }
        }
    }

    /// Sends the replies that are due after a call of a rank was taken out of its queue, and passes the call on.
    pub(super) fn reply_after(
        &self,
        from: usize,
        taken: Option<(ReceivedCall, bool)>,
    ) -> Option<ReceivedCall> {
        let (call, is_reply_due) = taken?;
        while let Some(reply) = is_reply_due.then(|| self.endpoint.view.next_reply(from)).flatten() {
            self.send_reply(from, &reply);
        }
        Some(call)
    }

    fn send_reply(&self, to: usize, reply: &Frame) {
        // The next check notices a failure.
        let _ = self.endpoint.connections.send(to, &mut reply.encode(), &[], || self.check());
    }

    /// Forwards the probes of other ranks; after a while, announces this wait and sends a probe of its own.
    fn probe(&self, wait: &mut Wait<'_>, waited: Duration, absent: &[usize]) {
        let (view, connections, me) = (&self.endpoint.view, &self.endpoint.connections, self.rank());
        let own = view.last(me);
        for probe in view.take_probes() {
            self.forward_probe(probe, &own, absent);
        }
        if waited < wait.next {
            return;
        }
        let num_ranks = view.mesh.num_ranks();
        wait.next = waited + PROBE_EVERY * num_ranks.div_ceil(FREQUENT_PROBERS_MAX) as u32;
        if !std::mem::replace(&mut wait.is_announced, true) {
            connections.send_to_all(&Frame::Waiting(own.clone()), FINAL_SEND_TIMEOUT);
        }
        let round = {
            let mut counters = self.counters();
            counters.round += 1;
            counters.round
        };
        self.send_probe(&Probe { round, path: vec![(me, own)] }, absent);
    }

    /// Forwards a probe to the ranks that this rank waits for. A probe of its own that has returned is a deadlock and fails the world.
    fn forward_probe(&self, mut probe: Probe, own: &IssuedCall, absent: &[usize]) {
        let (view, me) = (&self.endpoint.view, self.rank());
        let (first, asked) = &probe.path[0];
        let (sender, call) = &probe.path[probe.path.len() - 1];
        if !self.is_waited_for_by(*sender, call) {
            return;
        }
        if *first == me {
            if view.still_waits_in(asked) {
                let ranks: Vec<usize> = probe.path.iter().map(|(rank, _)| *rank).collect();
                let mut seen = view.snapshot(absent);
                probe.path.into_iter().for_each(|(rank, issued)| seen[rank].issued = issued);
                let error = report::cycle(&view.mesh, &seen, &ranks);
                self.fail(error, with_last(&ranks, &[]));
            }
            return;
        }
        let mut counters = self.counters();
        let now = (probe.round, counters.waits);
        let is_new = counters.forwarded.insert(*first, now) != Some(now);
        drop(counters);
        if is_new && probe.path.iter().all(|(rank, _)| *rank != me) {
            probe.path.push((me, own.clone()));
            self.send_probe(&probe, absent);
        }
    }

    fn send_probe(&self, probe: &Probe, to: &[usize]) {
        let mut head = Frame::Probe(probe.clone()).encode();
        for to in to {
            // The next check of the wait notices a failure.
            let _ = self.endpoint.connections.send(*to, &mut head, &[], || self.check());
        }
    }

    /// Whether the rank `by` still waits for this rank in `call`: whether this rank has not made the matching call yet.
    fn is_waited_for_by(&self, by: usize, call: &IssuedCall) -> bool {
        let (bits, counters) = (call.axes.bits(), self.counters());
        let number = match call.op {
            Op::Recv { .. } => counters.messages.get(&(bits, by)),
            _ => counters.calls.get(&bits),
        };
        number.is_none_or(|number| *number < call.number)
    }
}

/// Sorts ranks by number, those in `last` behind all others: the first rank reports the error, and ranks in `last` may be unable to.
fn with_last(ranks: &[usize], last: &[usize]) -> Vec<usize> {
    let mut sorted = ranks.to_vec();
    sorted.sort_by_key(|rank| (last.contains(rank), *rank));
    sorted
}
