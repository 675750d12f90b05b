//! Messages whose elements another transport carries.
//!
//! A sender keeps its message and announces it over TCP, once all its calls before are compared. The receiver, in its recv and with all its
//! calls before compared, compares the message and asks for it. Then both ends submit it, the sender in a thread of its own. So a send
//! does not wait for its recv, and both ends submit messages in the order in which the receivers ask for them.

use super::TcpTransport;
use super::agreement::PendingCalls;
use super::assemble::upload;
use super::frame::{CallId, Frame};
use crate::call::{IssuedCall, Request};
use crate::error::{Error, Result};
use shardgrad_kernels::{Backend, Buffer};
use std::panic::Location;
use std::time::Duration;

/// A message between this rank and another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MessageId {
    /// The other rank.
    pub(crate) peer: usize,
    id: CallId,
}

/// What a recv has received.
#[derive(Debug)]
pub(crate) enum Received {
    Elements(Buffer),
    /// Its elements come by another transport, once this rank [asks for them](TcpTransport::request_message).
    Announced(MessageId),
}

/// The call of a message that its sender keeps.
#[derive(Debug)]
pub(crate) struct SentCall {
    issued: IssuedCall,
    site: &'static Location<'static>,
}

impl PendingCalls {
    /// Waits, in the thread that submits messages, for the next message that its receiver asks for. `None` once the queue is ended or the
    /// world has failed.
    pub(crate) fn next_requested(&self) -> Option<MessageId> {
        let view = self.view();
        let is_over = || view.has_failed() || self.is_over();
        let _ = view.condvar.wait(Duration::ZERO, || is_over() || view.has_requested(), || Ok(()));
        if is_over() {
            return None;
        }
        view.take_requested().map(|(peer, id)| MessageId { peer, id })
    }
}

impl TcpTransport {
    /// Describes a send: the message, and its call.
    pub(crate) fn sent_call(&self, request: &Request<'_>, to: usize) -> (MessageId, SentCall) {
        let mut issued = IssuedCall::none();
        issued.set(request);
        (MessageId { peer: to, id: CallId::of(&issued) }, SentCall { issued, site: request.call.site })
    }

    /// Waits for the message of a recv and compares both calls.
    ///
    /// # Errors
    /// As a recv.
    pub(crate) fn receive(
        &self,
        backend: &dyn Backend,
        request: &Request<'_>,
        from: usize,
    ) -> Result<Received> {
        let message = self.take_message(request, from)?;
        if message.is_call_only {
            return Ok(Received::Announced(MessageId { peer: from, id: CallId::of(&message.issued) }));
        }
        upload(backend, message.elements()).map(Received::Elements)
    }

    /// Asks the sender of an announced message to submit it.
    ///
    /// # Errors
    /// The failure of the world; a timeout.
    pub(crate) fn request_message(&self, id: &MessageId, request: &Request<'_>) -> Result<()> {
        let mut issued = IssuedCall::none();
        issued.set(request);
        self.write(id.peer, &mut Frame::ClearToSend(id.id).encode(), &[], &issued)
    }

    /// An end of this transport for the thread that submits messages.
    pub(crate) fn for_messages(&self) -> TcpTransport {
        TcpTransport::new(self.endpoint.clone(), self.timeout, Duration::ZERO)
    }

    /// A check during the submission of a message by its sender: an error if the world fails or the submission takes too long.
    pub(crate) fn message_check(&self, call: &SentCall) -> impl FnMut() -> Result<()> {
        self.check_of(|| call.issued.clone())
    }

    /// Fails the world with the error of a message that this rank has sent.
    pub(crate) fn fail_message(&self, call: &SentCall, error: Error) {
        self.fail_at(call.site, error);
    }
}
