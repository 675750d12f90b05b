//! CUDA graph capture: launches are recorded once and replayed as a whole. A graph contains addresses, so memory allocated during
//! capture comes from a separate allocator, and every other buffer that the launches use is retained until the graph is dropped.

use super::driver::{Context, Resource, Stream};
use super::memory::CachingAllocator;
use crate::buffer::{Buffer, DeviceAllocator};
use crate::error::KernelError;
use cudarc::driver::sys::{CUgraphExec, CUstreamCaptureMode};
use std::collections::HashMap;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

/// The memory of a graph, during capture and after.
#[derive(Debug)]
pub(super) struct CapturedBuffers {
    /// The allocator of the memory allocated during capture.
    pub(super) memory: Arc<CachingAllocator>,
    /// Retained blocks of other allocators, by address.
    retained: HashMap<u64, Arc<dyn DeviceAllocator>>,
}

impl CapturedBuffers {
    fn new(home: &Arc<CachingAllocator>) -> CapturedBuffers {
        CapturedBuffers { memory: home.for_graph(), retained: HashMap::new() }
    }

    /// Retains a buffer that the graph uses. Blocks of the graph's own allocator may be reused by later launches of the capture.
    pub(super) fn retain(&mut self, buffer: &Buffer) {
        let Some((address, allocator)) = buffer.device_allocation() else { return };
        let is_own = ptr::addr_eq(Arc::as_ptr(allocator), Arc::as_ptr(&self.memory));
        if !is_own && !self.retained.contains_key(&address) {
            allocator.retain(address);
            self.retained.insert(address, allocator.clone());
        }
    }
}

impl Drop for CapturedBuffers {
    fn drop(&mut self) {
        self.retained.iter().for_each(|(address, allocator)| allocator.release(*address));
    }
}

/// The memory of the capture in progress; `None` outside of a capture.
pub(super) type CaptureState = Mutex<Option<CapturedBuffers>>;

/// Captures the work that a function submits to a stream, without executing it. If the capture fails after the function succeeded, `discard`
/// drops what the function made.
pub(super) fn capture(
    stream: &Stream,
    rank_memory: &Arc<CachingAllocator>,
    capture_state: &CaptureState,
    work: &mut dyn FnMut() -> Result<(), KernelError>,
    discard: &mut dyn FnMut(),
) -> Result<CapturedGraph, KernelError> {
    let state = || capture_state.lock().unwrap_or_else(PoisonError::into_inner);
    if state().is_some() {
        return Err(KernelError::NotCapturable { what: "captures other work" });
    }
    // Frees memory for the graph, which allocates its own chunks. During capture no chunk is freed: that waits for all work of the GPU.
    rank_memory.release_empty_chunks();
    let clear_state = ClearOnDrop(capture_state);
    let stream_capture = StreamCapture::new(stream)?;
    *state() = Some(CapturedBuffers::new(rank_memory));
    let result = work();
    let buffers = state().take().expect("bug: the capture ended early");
    let exec = stream_capture.end();
    drop(clear_state);
    if result.is_ok() && exec.is_err() {
        discard();
    }
    match result.and(exec) {
        Ok(exec) => Ok(CapturedGraph { exec, _buffers: buffers }),
        Err(error) => {
            let bytes = buffers.memory.stats().in_use_bytes;
            Err(if bytes > 0 { KernelError::CaptureOutputHeld { bytes } } else { error })
        }
    }
}

/// Clears the capture state on drop, also on a panic; dropped after the stream has ended its capture.
struct ClearOnDrop<'a>(&'a CaptureState);

impl Drop for ClearOnDrop<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// A capture on a stream, ended on drop.
struct StreamCapture<'a> {
    stream: &'a Stream,
    is_open: bool,
}

impl<'a> StreamCapture<'a> {
    fn new(stream: &'a Stream) -> Result<StreamCapture<'a>, KernelError> {
        // Relaxed mode allows allocations and module loads during capture.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive; the capture ends when this is dropped.
        let begun = unsafe {
            let table = stream.context().bound()?;
            stream.context().begin_capture();
            table.cuStreamBeginCapture_v2(stream.handle(), mode)
        };
        begun.inspect_err(|_| stream.context().end_capture())?;
        Ok(StreamCapture { stream, is_open: true })
    }

    fn end(mut self) -> Result<GraphExec, KernelError> {
        self.close()
    }

    fn close(&mut self) -> Result<GraphExec, KernelError> {
        self.is_open = false;
        let (context, mut graph, mut exec) = (self.stream.context(), ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is alive and in capture; the out-pointers outlive the calls. The graph is destroyed here, the
        // executable graph once, when the returned value is dropped.
        unsafe {
            let ended = context
                .bound()
                .and_then(|table| table.cuStreamEndCapture(self.stream.handle(), &mut graph).map(|()| table));
            context.end_capture();
            let table = ended?;
            let made = table.cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            let destroyed = table.cuGraphDestroy(graph);
            made?;
            let exec = GraphExec { context: context.clone(), handle: exec.expose_provenance() };
            destroyed.map(|()| exec)
        }
    }
}

impl Drop for StreamCapture<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // The capture failed or panicked: its graph is dropped.
            let _ = self.close();
        }
    }
}

/// An executable graph.
#[derive(Debug)]
struct GraphExec {
    context: Arc<Context>,
    handle: usize,
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        self.context.destroy(Resource::GraphExec(self.handle));
    }
}

/// An executable graph, and the memory that it uses.
#[derive(Debug)]
pub(super) struct CapturedGraph {
    exec: GraphExec,
    _buffers: CapturedBuffers,
}

impl CapturedGraph {
    /// Submits the graph to the stream on which it was captured.
    pub(super) fn replay(&self, stream: &Stream) -> Result<(), KernelError> {
        let handle: CUgraphExec = ptr::with_exposed_provenance_mut(self.exec.handle);
        // SAFETY: graph and stream are alive. The graph retains the memory at its addresses, and work on that memory is submitted
        // to this stream alone.
        unsafe { stream.context().bound()?.cuGraphLaunch(handle, stream.handle()) }
    }
}
