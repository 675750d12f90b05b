//! A ring of ranks: local tensors pass from each shard of a dim to the next, for ops that need all shards one after another.

use crate::execution::local_tensor::LocalTensor;
use crate::layout::dim::Dim;
use crate::layout::lineage::Lineage;
use crate::tensor::redistribute::{recv, send};
use shardgrad_dist::{AxisSet, Rank, Result};
use shardgrad_kernels::DType;
use std::ops::Range;
use std::panic::Location;

/// The ranks that hold the shards of a dim, as a ring in the order of the shards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring<'a> {
    rank: &'a Rank,
    dim: Dim,
    /// The shard of this rank.
    own: usize,
    num_shards: usize,
    /// What the ranks compare: the lineage of what they pass on.
    lineage: Lineage,
    site: &'static Location<'static>,
}

impl<'a> Ring<'a> {
    /// The ring of the ranks that shard a dim. All of them pass on tensors of one lineage.
    pub(crate) fn new(
        rank: &'a Rank,
        dim: Dim,
        lineage: Lineage,
        site: &'static Location<'static>,
    ) -> Ring<'a> {
        let (own, num_shards) = dim.shard_index(rank.mesh(), rank.coordinates());
        Ring { rank, dim, own, num_shards, lineage, site }
    }

    /// The number of shards.
    pub(crate) fn num_shards(&self) -> usize {
        self.num_shards
    }

    /// The range of the dim in the shard that is `hops` shards before that of this rank, around the ring.
    pub(crate) fn range(&self, hops: usize) -> Range<usize> {
        let shard = (self.own + self.num_shards - hops % self.num_shards) % self.num_shards;
        self.dim.shard_start(shard, self.num_shards)..self.dim.shard_start(shard + 1, self.num_shards)
    }

    /// The group of the ring, and the group rank of the rank whose shard comes `ahead` shards after that of this rank.
    fn neighbor(&self, ahead: usize) -> (AxisSet, usize) {
        let mesh = self.rank.mesh();
        let mut shard = (self.own + ahead) % self.num_shards;
        let mut coordinates = self.rank.coordinates().to_vec();
        for axis in self.dim.axes.iter().rev() {
            coordinates[usize::from(axis.0)] = shard % mesh.size(axis);
            shard /= mesh.size(axis);
        }
        let axes: AxisSet = self.dim.axes.iter().collect();
        (axes, axes.iter().fold(0, |index, axis| index * mesh.size(axis) + coordinates[usize::from(axis.0)]))
    }

    /// A lane for tensors of a dtype, each of which goes to the next rank.
    pub(crate) fn lane(&self, dtype: DType) -> RingLane<'_> {
        let num_messages = self.num_shards - 1;
        RingLane { ring: self, dtype, num_messages, num_sent: 0, num_received: 0, is_unread: false }
    }
}

/// The messages of one kind around a [`Ring`]: each rank sends to the next rank as many as there are other ranks, and receives as many.
///
/// A send does not wait for the receiver, but a lane has at most one unread message: the receiver acknowledges each message but the
/// last, and the sender waits for the acknowledgement before the next send. So no rank, however slow, collects the messages of others.
#[derive(Debug)]
pub(crate) struct RingLane<'a> {
    ring: &'a Ring<'a>,
    dtype: DType,
    num_messages: usize,
    num_sent: usize,
    num_received: usize,
    /// Whether the last message was not acknowledged yet.
    is_unread: bool,
}

impl RingLane<'_> {
    /// Sends a tensor to the next rank.
    ///
    /// # Errors
    /// Errors of the messages.
    pub(crate) fn pass_on(&mut self, x: LocalTensor) -> Result<()> {
        self.wait_until_read()?;
        let ring = self.ring;
        send(ring.rank, &LocalTensor { lineage: ring.lineage, ..x }, ring.neighbor(1), ring.site)?;
        self.num_sent += 1;
        self.is_unread = self.num_sent < self.num_messages;
        Ok(())
    }

    /// Receives the next tensor of the rank before this one.
    ///
    /// # Errors
    /// Errors of the messages.
    pub(crate) fn receive(&mut self, shape: &[usize]) -> Result<LocalTensor> {
        let ring = self.ring;
        let previous = ring.neighbor(ring.num_shards - 1);
        let received = recv(ring.rank, (self.dtype, ring.lineage, shape), previous, ring.site)?;
        self.num_received += 1;
        if self.num_received < self.num_messages {
            let nothing = LocalTensor::alloc(ring.rank, self.dtype, &[0])?;
            send(ring.rank, &nothing, previous, ring.site)?;
        }
        Ok(received)
    }

    /// Waits until the next rank has received the last message, whose memory is free then.
    ///
    /// # Errors
    /// Errors of the messages.
    pub(crate) fn wait_until_read(&mut self) -> Result<()> {
        if std::mem::take(&mut self.is_unread) {
            let ring = self.ring;
            recv(ring.rank, (self.dtype, Lineage::UNKNOWN, &[0]), ring.neighbor(1), ring.site)?;
        }
        Ok(())
    }
}
