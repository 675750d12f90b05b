//! Agreement on a call whose elements another transport carries.

use super::TcpTransport;
use super::assemble::other_group_ranks;
use super::frame::Frame;
use super::world_view::ReceivedCall;
use crate::call::{IssuedCall, Request};
use crate::error::Result;
use crate::report;
use crate::transport::Transport;
use std::time::Instant;

impl TcpTransport {
    /// Waits until all members of the group have made this call, and compares the calls. Detects what [`TcpTransport`] detects in a
    /// collective of its own.
    pub(crate) fn agree(&self, request: &Request<'_>) -> Result<()> {
        let (issued, axes, members) = (self.issue(request), request.call.axes, &request.position.members);
        let mut head = Frame::CallOnly(issued.clone()).encode();
        for group_rank in other_group_ranks(request) {
            self.write(members[group_rank], &mut head, &[], &issued)?;
        }
        self.wait(request, false, |view, member| view.has_call(member, axes, false))?;
        let take = |&member: &usize| self.reply_after(member, self.endpoint.view.take_call(member, axes));
        let arrived: Vec<Option<ReceivedCall>> = members.iter().map(take).collect();
        self.compare(request, &issued, &arrived)
    }

    /// A check during the submission of a call that all members have made: an error if the world fails or the submission takes too long.
    pub(crate) fn submission_check(&self, request: &Request<'_>) -> impl FnMut() -> Result<()> {
        let start = Instant::now();
        move || {
            self.check()?;
            if start.elapsed() <= self.limit() {
                return Ok(());
            }
            let mut issued = IssuedCall::none();
            issued.set(request);
            Err(report::unfinished(&self.endpoint.view.mesh, self.rank(), &issued, self.limit()))
        }
    }
}
