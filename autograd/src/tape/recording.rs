//! Whether a tape creates nodes, and whether a program is being recorded. An error that unwinds leaves both as they were.

use super::Tape;
use crate::id::Id;
use crate::program::{OpRecord, Recorder, RecordingCache, Slot};
use shardgrad_tensor::Tensor;
use shardgrad_tensor::execution::flag_guard::FlagGuard;
use std::cell::RefMut;
use std::rc::Weak;

/// A recording that runs on a tape; it ends when this is dropped.
pub(super) struct RunningRecording<'t>(&'t Tape);

impl RunningRecording<'_> {
    /// Ends the recording and returns what was recorded.
    pub(super) fn finish(self) -> Recorder {
        self.0.set_recorder(None).unwrap_or_default()
    }
}

impl Drop for RunningRecording<'_> {
    fn drop(&mut self) {
        if self.0.is_recording() {
            self.0.set_recorder(None);
        }
    }
}

/// The recorder of a tape while ops run as if no program were being recorded; the recording goes on when this is dropped.
struct SuspendedRecorder<'t> {
    tape: &'t Tape,
    recorder: Option<Box<Recorder>>,
}

impl Drop for SuspendedRecorder<'_> {
    fn drop(&mut self) {
        self.tape.0.recorder.replace(self.recorder.take());
    }
}

impl Tape {
    /// Runs `f` without recording. Its results are constants, and the tape keeps nothing of a parameter first used in
    /// it.
    #[doc(alias = "torch.no_grad")]
    #[doc(alias = "stop_gradient")]
    pub fn no_grad<T>(&self, f: impl FnOnce() -> T) -> T {
        let _no_grad = FlagGuard::set(&self.0.no_grad, true);
        self.without_nodes(f)
    }

    /// Whether [`Tape::no_grad`] is active.
    pub(super) fn is_no_grad(&self) -> bool {
        self.0.no_grad.get()
    }

    /// Runs `f` without creating nodes; an active recorder continues.
    pub(super) fn without_nodes<T>(&self, f: impl FnOnce() -> T) -> T {
        let _without_nodes = FlagGuard::set(&self.0.records, false);
        f()
    }

    /// Runs `f` as if no block were being recorded, so that the block takes its results as external inputs.
    pub(super) fn outside_recording<T>(&self, f: impl FnOnce() -> T) -> T {
        let _suspended = SuspendedRecorder { tape: self, recorder: self.0.recorder.take() };
        let _with_nodes = FlagGuard::set(&self.0.records, !self.is_no_grad());
        f()
    }

    /// Whether a program is being recorded.
    pub(super) fn is_recording(&self) -> bool {
        self.0.recorder.borrow().is_some()
    }

    /// The number of the running recording; 0 if there is none.
    pub(super) fn recording(&self) -> u32 {
        if self.is_recording() { self.0.num_recordings.get() } else { 0 }
    }

    /// Starts a recording.
    pub(super) fn begin_recording(&self, recorder: Recorder) -> RunningRecording<'_> {
        self.set_recorder(Some(recorder));
        RunningRecording(self)
    }

    /// Starts a recording, or ends it with `None`. Returns the previous recorder.
    fn set_recorder(&self, recorder: Option<Recorder>) -> Option<Recorder> {
        let ended = self.recording();
        self.0.caches.take().iter().filter_map(Weak::upgrade).for_each(|cache| cache.forget(ended));
        self.0.num_recordings.set(self.0.num_recordings.get() + u32::from(recorder.is_some()));
        self.0.recorder.replace(recorder.map(Box::new)).map(|recorder| *recorder)
    }

    /// Registers a cache that drops values of the running recording when the recording ends.
    pub(super) fn register_cache(&self, cache: Weak<dyn RecordingCache>) {
        self.0.caches.borrow_mut().push(cache);
    }

    /// The active recorder. Call only while recording.
    pub(super) fn recorder(&self) -> RefMut<'_, Recorder> {
        let running = self.0.recorder.borrow_mut();
        RefMut::map(running, |running| &mut **running.as_mut().expect("called while recording only"))
    }

    /// The slot of a value that the recording takes as an external input.
    pub(super) fn external_slot(&self, id: Option<Id>, tensor: &Tensor) -> Slot {
        let (key, accumulation) = (id.and_then(|id| self.key_of(id)), self.accumulation_dtype_of(id, tensor));
        self.recorder().external((id, key), tensor, accumulation)
    }

    /// The number of ops recorded so far.
    pub(super) fn num_records(&self) -> usize {
        self.0.recorder.borrow().as_ref().map_or(0, |r| r.program.records.len())
    }

    /// Appends an op record and returns its index.
    pub(super) fn record_op(&self, record: OpRecord) -> u32 {
        let mut recorder = self.recorder();
        recorder.program.records.push(record);
        recorder.program.records.len() as u32 - 1
    }
}
