//! Agreement on calls whose elements another transport carries, behind their submission.
//!
//! A rank enqueues each such call, submits it and continues. Another thread of the process, the comparer, makes the calls over TCP in the
//! order of the queue, without elements: it sends a call to the other members, waits for theirs, and compares all. For the detection of
//! mismatched calls, deadlocks, departed ranks and timeouts the comparer stands for the rank, which is in the first call of the queue.
//!
//! A call is sent once all calls before it are compared; only calls of one group follow each other at once, because ranks whose orders
//! differ differ between groups. So two ranks, or a cycle of ranks, that submit operations in different orders are a deadlock of their
//! comparers, however far the ranks have run ahead. At most [`PENDING_MAX`] calls of a rank wait for their comparison. A message in the queue
//! is only announced to its receiver, once all calls before are compared ([`super::announced`]).

use super::frame::{CallId, Frame};
use super::wait::AwaitedCall;
use super::world_view::{ReceivedCall, WorldView};
use super::{Endpoint, TcpTransport};
use crate::call::{IssuedCall, Op, Request};
use crate::error::{Error, Kind, Result};
use crate::report;
use crate::sync::{AtomicBool, Mutex, MutexGuard};
use crate::transport::Transport;
use std::collections::VecDeque;
use std::panic::Location;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// The most submitted calls of a rank that are not compared.
const PENDING_MAX: usize = 256;
/// The collectives of a rank that errors can name while the GPU runs them.
const RECENT_MAX: usize = 512;

/// A submitted call that is not compared.
#[derive(Debug)]
struct PendingCall {
    issued: IssuedCall,
    members: Vec<usize>,
    site: &'static Location<'static>,
    /// The timeout of the wait for the other members.
    limit: Duration,
}

/// The submitted calls of a rank that are not compared, in the order of their submission.
#[derive(Debug)]
pub(crate) struct PendingCalls {
    endpoint: Endpoint,
    calls: Mutex<VecDeque<Arc<PendingCall>>>,
    recent: Mutex<RecentCollectives>,
    is_over: AtomicBool,
}

/// The last collectives of a rank, in their order.
#[derive(Debug, Default)]
struct RecentCollectives {
    /// The number of all collectives.
    count: u64,
    last: VecDeque<Arc<PendingCall>>,
}

impl PendingCalls {
    pub(crate) fn new(endpoint: &Endpoint) -> Arc<PendingCalls> {
        let (calls, recent, is_over) = (Mutex::default(), Mutex::default(), AtomicBool::new(false));
        Arc::new(PendingCalls { endpoint: endpoint.clone(), calls, recent, is_over })
    }

    pub(super) fn view(&self) -> &WorldView {
        &self.endpoint.view
    }

    fn calls(&self) -> MutexGuard<'_, VecDeque<Arc<PendingCall>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a collective that is submitted next, or a message that is announced. Waits while the queue is full.
    ///
    /// # Errors
    /// The failure of the world.
    pub(crate) fn push(&self, tcp: &TcpTransport, request: &Request<'_>) -> Result<()> {
        let mut issued = IssuedCall::none();
        issued.set(request);
        let (members, site, limit) = (request.position.members.clone(), request.call.site, tcp.limit());
        self.wait_for(tcp.spin, PENDING_MAX - 1)?;
        let call = Arc::new(PendingCall { issued, members, site, limit });
        if call.issued.op.is_collective() {
            let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
            recent.count += 1;
            recent.last.push_back(call.clone());
            if recent.last.len() > RECENT_MAX {
                recent.last.pop_front();
            }
        }
        self.calls().push_back(call);
        self.view().condvar.notify_all();
        Ok(())
    }

    /// Whether all calls in the queue are compared.
    pub(crate) fn are_compared(&self) -> bool {
        self.calls().is_empty()
    }

    /// Describes a collective by its number among those of this rank, from 1.
    pub(crate) fn describe_collective(&self, number: u64) -> String {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let back = recent.count.checked_sub(number).and_then(|back| usize::try_from(back).ok());
        let at = back.and_then(|back| recent.last.len().checked_sub(back + 1));
        let view = self.view();
        at.map_or("a collective".to_string(), |at| recent.last[at].issued.text(&view.mesh, view.rank))
    }

    /// Waits until all calls in the queue are compared.
    ///
    /// # Errors
    /// The failure of the world.
    pub(crate) fn wait_until_compared(&self, spin: Duration) -> Result<()> {
        self.wait_for(spin, 0)
    }

    /// Waits until at most `count` calls are in the queue. The comparer detects what would make the wait last forever.
    fn wait_for(&self, spin: Duration, count: usize) -> Result<()> {
        self.wait_until(spin, || self.calls().len() <= count)
    }

    /// Waits until something is done that a thread of the session does, which notifies this rank.
    ///
    /// # Errors
    /// The failure of the world.
    pub(crate) fn wait_until(&self, spin: Duration, is_done: impl Fn() -> bool) -> Result<()> {
        let view = self.view();
        view.condvar.wait(spin, || view.has_failed() || is_done(), || Ok(()))?;
        if view.has_failed() { Err(self.failure_error()) } else { Ok(()) }
    }

    /// The error with which this rank stops after the world has failed.
    pub(crate) fn failure_error(&self) -> Error {
        let (view, first) = (self.view(), self.calls().front().cloned());
        match first {
            Some(call) => {
                let call = call.issued.text(&view.mesh, view.rank);
                self.endpoint.failure_error(&format!("waits in {call}"))
            }
            None => self.endpoint.failure_error("computes"),
        }
    }

    /// Wakes the waits of the rank and of the threads of its session.
    pub(crate) fn notify(&self) {
        self.view().condvar.notify_all();
    }

    /// Ends the comparer, and the thread that submits messages.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.view().condvar.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }
}

/// Compares the pending calls of a rank with those of the other members of their groups.
#[derive(Debug)]
pub(crate) struct Comparer {
    tcp: TcpTransport,
    pending: Arc<PendingCalls>,
}

impl Comparer {
    /// Compares calls until the queue is ended or the world has failed.
    pub(crate) fn run(&self) {
        let mut num_sent = 0;
        while let Some(call) = self.next() {
            if let Err(error) = self.compare(&call, &mut num_sent) {
                if !self.pending.is_over() {
                    self.tcp.fail_at(call.site, error);
                }
                return;
            }
            self.pending.calls().pop_front();
            num_sent -= 1;
            self.pending.view().condvar.notify_all();
        }
    }

    /// Waits for the first call of the queue; `None` if there is none to compare any more.
    fn next(&self) -> Option<Arc<PendingCall>> {
        let (view, first) = (self.pending.view(), || self.pending.calls().front().cloned());
        let is_over = || view.has_failed() || self.pending.is_over();
        let _ = view.condvar.wait(Duration::ZERO, || is_over() || first().is_some(), || Ok(()));
        first().filter(|_| !is_over())
    }

    /// Compares the first call of the queue, of which the first `num_sent` calls are sent.
    fn compare(&self, call: &PendingCall, num_sent: &mut usize) -> Result<()> {
        let PendingCall { issued, members, limit, .. } = call;
        if let Op::Send { to } = issued.op {
            *num_sent += 1;
            return self.announce(issued, members[to]);
        }
        let (axes, view) = (issued.axes, self.pending.view());
        view.set_last_call(issued);
        self.tcp.min_timeout.set(*limit);
        self.send(num_sent)?;
        let awaited = AwaitedCall { op: issued.op, axes, members };
        let has_come = |view: &WorldView, member: usize| view.has_call(member, axes, false);
        self.tcp.wait(awaited, false, has_come, &mut || self.send(num_sent))?;
        let take = |&member: &usize| self.tcp.reply_after(member, view.take_call(member, axes));
        let arrived: Vec<Option<ReceivedCall>> = members.iter().map(take).collect();
        self.tcp.compare(members, issued, &arrived)
    }

    /// Announces a message: all calls before it are compared.
    fn announce(&self, issued: &IssuedCall, to: usize) -> Result<()> {
        let view = self.pending.view();
        view.set_last_call(issued);
        view.announce(to, CallId::of(issued));
        self.tcp.count_message(issued, to);
        self.tcp.write(to, &mut Frame::CallOnly(issued.clone()).encode(), &[], issued)
    }

    /// Sends the first call of the queue and those behind it that have its group, unless they are among the first `num_sent`.
    fn send(&self, num_sent: &mut usize) -> Result<()> {
        loop {
            if self.pending.is_over() {
                return Err(Error::new(Kind::PeerLost, "the rank has ended"));
            }
            let call = {
                let calls = self.pending.calls();
                let Some(call) = calls.get(*num_sent) else { return Ok(()) };
                if call.issued.axes != calls[0].issued.axes || !call.issued.op.is_collective() {
                    return Ok(());
                }
                call.clone()
            };
            self.tcp.count_call(&call.issued);
            let mut head = Frame::CallOnly(call.issued.clone()).encode();
            let own = self.pending.view().rank;
            for member in call.members.iter().filter(|member| **member != own) {
                self.tcp.write(*member, &mut head, &[], &call.issued)?;
            }
            *num_sent += 1;
        }
    }
}

impl TcpTransport {
    /// The comparer of the pending calls of this rank. While calls are pending, this transport makes no call of its own.
    pub(crate) fn comparer(&self, pending: &Arc<PendingCalls>) -> Comparer {
        let mut tcp = TcpTransport::new(self.endpoint.clone(), self.timeout, Duration::ZERO);
        tcp.counters = self.counters.clone();
        Comparer { tcp, pending: pending.clone() }
    }

    /// How long a wait of this rank may spin.
    pub(crate) fn spin(&self) -> Duration {
        self.spin
    }

    /// A check during the submission of a call: an error if the world fails or the submission takes too long.
    pub(crate) fn submission_check(&self, request: &Request<'_>) -> impl FnMut() -> Result<()> {
        self.check_of(move || {
            let mut issued = IssuedCall::none();
            issued.set(request);
            issued
        })
    }

    /// A check during the submission of a call, which `issued` describes.
    pub(super) fn check_of(&self, issued: impl Fn() -> IssuedCall) -> impl FnMut() -> Result<()> {
        let start = Instant::now();
        move || {
            self.check()?;
            if start.elapsed() <= self.limit() {
                return Ok(());
            }
            Err(report::unfinished(&self.endpoint.view.mesh, self.rank(), &issued(), self.limit()))
        }
    }
}
