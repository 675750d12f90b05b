//! Pinned host memory through which a rank copies to and from its GPU. An upload returns before the GPU has read its bytes, which are not
//! overwritten until then.

use super::driver::{Context, Event, Pinned, Stream};
use crate::buffer::Buffer;
use crate::error::KernelError;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a piece of a large copy.
const PIECE_BYTES: usize = 4 << 20;
/// Bytes of the ring of small uploads, and of the longest upload that goes through the ring.
const RING_BYTES: usize = 4 << 20;
const RING_UPLOAD_MAX: usize = 512 << 10;
/// Places in the ring are multiples of this.
const RING_GRAIN: usize = 512;

/// The staging memory of a rank.
#[derive(Debug)]
pub(super) struct Staging {
    /// Two pieces, so that one is filled while the other is copied, each with the event after its last upload.
    pieces: [(Pinned, Option<Event>); 2],
    next: usize,
    /// Memory for small uploads, many of which may wait for the GPU: arguments of microbatches and of optimizer steps.
    ring: Pinned,
    /// The end of the last upload in the ring.
    ring_end: usize,
    /// Places in the ring of uploads that may be pending, the oldest first, each with the event after it.
    pending: VecDeque<(Range<usize>, Event)>,
}

impl Staging {
    pub(super) fn new(context: &Arc<Context>) -> Result<Staging, KernelError> {
        let piece = || Ok::<_, KernelError>((Pinned::new(context, PIECE_BYTES)?, None));
        Ok(Staging {
            pieces: [piece()?, piece()?],
            next: 0,
            ring: Pinned::new(context, RING_BYTES)?,
            ring_end: 0,
            pending: VecDeque::new(),
        })
    }

    /// Copies bytes to a buffer, in stream order. Waits for earlier uploads only if the staging memory is full of them.
    pub(super) fn upload(
        &mut self,
        stream: &Stream,
        from: &[u8],
        to: &mut Buffer,
    ) -> Result<(), KernelError> {
        if from.len() <= RING_UPLOAD_MAX {
            let place = self.ring_place(from.len())?;
            let event = stream.upload(from, to, 0, (&mut self.ring, place.start))?;
            self.pending.push_back((place, event));
            return Ok(());
        }
        for (i, part) in from.chunks(PIECE_BYTES).enumerate() {
            let (memory, event) = self.next_piece()?;
            *event = Some(stream.upload(part, to, i * PIECE_BYTES, (memory, 0))?);
        }
        Ok(())
    }

    /// Copies bytes from the start of a buffer, and waits for the copy.
    pub(super) fn download(
        &mut self,
        stream: &Stream,
        from: &Buffer,
        to: &mut [u8],
    ) -> Result<(), KernelError> {
        for (i, part) in to.chunks_mut(PIECE_BYTES).enumerate() {
            let (memory, _) = self.next_piece()?;
            stream.download(from, i * PIECE_BYTES, part, memory)?;
        }
        if !to.is_empty() {
            self.pending.clear();
        }
        Ok(())
    }

    /// Returns the next piece, after its last upload is done.
    fn next_piece(&mut self) -> Result<&mut (Pinned, Option<Event>), KernelError> {
        self.next = 1 - self.next;
        let piece = &mut self.pieces[self.next];
        if let Some(event) = piece.1.take() {
            event.wait()?;
        }
        Ok(piece)
    }

    /// Returns a place in the ring, after the uploads that used it are done.
    fn ring_place(&mut self, bytes: usize) -> Result<Range<usize>, KernelError> {
        let bytes = bytes.next_multiple_of(RING_GRAIN);
        let start = if self.ring_end + bytes > RING_BYTES { 0 } else { self.ring_end };
        let place = start..start + bytes;
        let conflicts = |(used, _): &(Range<usize>, Event)| used.start < place.end && place.start < used.end;
        if let Some(last) = self.pending.iter().rposition(conflicts) {
            // Uploads are done in order.
            self.pending[last].1.wait()?;
            self.pending.drain(..=last);
        }
        self.ring_end = place.end;
        Ok(place)
    }
}
