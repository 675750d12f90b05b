//! Work that is noted once and given again as a whole. What is noted holds addresses: memory that is taken meanwhile comes from an
//! allocator of its own, and whatever else the work uses is kept too, whoever else drops it, until the graph is dropped.

use super::driver::{Context, Stream};
use super::memory::Memory;
use crate::buffer::{Buffer, DeviceAllocator};
use crate::error::KernelError;
use cudarc::driver::sys::{CUgraphExec, CUstreamCaptureMode};
use std::collections::HashMap;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

/// What is kept for work that is being noted, or was.
#[derive(Debug)]
pub(super) struct CapturedBuffers {
    /// Where memory comes from meanwhile.
    pub(super) memory: Arc<Memory>,
    /// Blocks that others have taken, of this rank's memory or of any other, and who gets them back.
    kept: HashMap<u64, Arc<dyn DeviceAllocator>>,
}

impl CapturedBuffers {
    fn new(home: &Arc<Memory>) -> CapturedBuffers {
        CapturedBuffers { memory: home.for_graph(), kept: HashMap::new() }
    }

    /// Keeps what the work uses. Blocks that were taken for it may be used again by what is noted later.
    pub(super) fn keep(&mut self, buffer: &Buffer) {
        let Some((address, keeper)) = buffer.on_its_device() else { return };
        let is_own = ptr::addr_eq(Arc::as_ptr(keeper), Arc::as_ptr(&self.memory));
        if !is_own && !self.kept.contains_key(&address) {
            keeper.keep(address);
            self.kept.insert(address, keeper.clone());
        }
    }
}

impl Drop for CapturedBuffers {
    fn drop(&mut self) {
        self.kept.iter().for_each(|(address, keeper)| keeper.release(*address));
    }
}

/// What a rank keeps while work is being noted; nothing otherwise.
pub(super) type CaptureState = Mutex<Option<CapturedBuffers>>;

/// Notes the work that a function gives to a stream. Nothing of it is done.
pub(super) fn capture(
    stream: &Stream,
    home: &Arc<Memory>,
    capture_state: &CaptureState,
    work: &mut dyn FnMut() -> Result<(), KernelError>,
) -> Result<CapturedGraph, KernelError> {
    let locked = || capture_state.lock().unwrap_or_else(PoisonError::into_inner);
    if locked().is_some() {
        return Err(KernelError::NotCapturable { what: "captures other work" });
    }
    // Memory of an earlier time is of more use to the graph. Nothing goes back to the driver while work is noted, since it waits
    // for all work first.
    home.release_empty_chunks();
    let ends = Ends(capture_state);
    let begun = Begun::new(stream)?;
    *locked() = Some(CapturedBuffers::new(home));
    let done = work();
    let holdings = locked().take().expect("bug: capture_state goes on until here");
    let program = begun.end();
    drop(ends);
    match done.and(program) {
        Ok(program) => Ok(CapturedGraph { program, _holdings: holdings }),
        Err(error) => {
            let bytes = holdings.memory.stats().in_use_bytes;
            Err(if bytes > 0 { KernelError::CaptureOutputHeld { bytes } } else { error })
        }
    }
}

/// Ends the capture_state of a rank, whatever happens in between: after the stream has been told.
struct Ends<'a>(&'a CaptureState);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// A stream that notes what it is given, until this is dropped.
struct Begun<'a> {
    stream: &'a Stream,
    is_open: bool,
}

impl<'a> Begun<'a> {
    fn new(stream: &'a Stream) -> Result<Begun<'a>, KernelError> {
        // Other calls of this thread stay allowed: memory is taken and programs are loaded while work is noted.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive; it is told to end when this is dropped.
        unsafe { stream.context().bound()?.cuStreamBeginCapture_v2(stream.handle(), mode) }?;
        Ok(Begun { stream, is_open: true })
    }

    fn end(mut self) -> Result<Program, KernelError> {
        self.close()
    }

    fn close(&mut self) -> Result<Program, KernelError> {
        self.is_open = false;
        let (context, mut graph, mut program) = (self.stream.context(), ptr::null_mut(), ptr::null_mut());
        let table = context.bound()?;
        // SAFETY: the stream is alive and notes work; the places outlive the calls. The graph is destroyed here, the program
        // once, when what is given back is dropped.
        unsafe {
            table.cuStreamEndCapture(self.stream.handle(), &mut graph)?;
            let made = table.cuGraphInstantiateWithFlags(&mut program, graph, 0);
            let destroyed = table.cuGraphDestroy(graph);
            made?;
            let program = Program { context: context.clone(), handle: program.expose_provenance() };
            destroyed.map(|()| program)
        }
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // What was noted is not spec.
            let _ = self.close();
        }
    }
}

/// What a card runs as a whole.
#[derive(Debug)]
struct Program {
    context: Arc<Context>,
    handle: usize,
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Ok(table) = self.context.bound() {
            let handle: CUgraphExec = ptr::with_exposed_provenance_mut(self.handle);
            // SAFETY: made once, destroyed once, after all work that may be part of it.
            let _ = unsafe { table.cuCtxSynchronize().and_then(|()| table.cuGraphExecDestroy(handle)) };
        }
    }
}

/// Work that was noted, and what is kept for it.
#[derive(Debug)]
pub(super) struct CapturedGraph {
    program: Program,
    _holdings: CapturedBuffers,
}

impl CapturedGraph {
    /// Gives the work to the stream that it was noted on.
    pub(super) fn replay(&self, stream: &Stream) -> Result<(), KernelError> {
        let handle: CUgraphExec = ptr::with_exposed_provenance_mut(self.program.handle);
        // SAFETY: program and stream are alive. The addresses in it lead to memory that is kept for it, and work on that memory
        // is given to this stream alone.
        unsafe { stream.context().bound()?.cuGraphLaunch(handle, stream.handle()) }
    }
}
