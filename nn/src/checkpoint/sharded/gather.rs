//! Work of rank 0, which writes all files: its result is every rank's result, and it receives tensors that all ranks
//! gather.

use crate::module::param::Param;
use shardgrad_tensor::training_step::control::{send_bytes, world_sum};
use shardgrad_tensor::{DType, Error, Kind, Layout, Rank, Result, Tensor};
use std::panic::Location;
use std::time::Duration;

/// How long ranks wait while rank 0 writes: a disk may stall for long, and giving up would lose the trained weights.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Kinds of errors that writing may return.
const KINDS: [Kind; 3] = [Kind::Io, Kind::Checkpoint, Kind::OutOfMemory];

/// Runs `task` on rank 0 and returns its value there, `None` on the other ranks. Every rank calls this together, and
/// every rank returns the error of rank 0, so that all ranks stay in step.
pub(crate) fn on_rank_zero<T>(
    rank: &Rank,
    site: &'static Location<'static>,
    task: impl FnOnce() -> Result<T>,
) -> Result<Option<T>> {
    let done = (rank.world().index() == 0).then(task).transpose();
    let (value, done) = done.map_or_else(|e| (None, Err(e)), |value| (value, Ok(())));
    broadcast_result(rank, done, site)?;
    Ok(value)
}

/// Functions of the files that rank 0 writes: the first appends a tensor, the second completes the files and returns their
/// digest, if they have one.
pub(crate) type WriterFunctions<W> = (fn(&mut W, &str, &[u8]) -> Result<()>, fn(W) -> Result<Option<String>>);

/// Writer of files on rank 0, of tensors that all ranks gather one by one. Every rank has one and calls its functions
/// together with the others.
pub(crate) struct GatheringWriter<'r, W> {
    rank: &'r Rank,
    site: &'static Location<'static>,
    /// The files, on rank 0.
    files: Option<W>,
    functions: WriterFunctions<W>,
    written: Result<()>,
}

impl<'r, W> GatheringWriter<'r, W> {
    /// Opens the files on rank 0, and reports a refusal on every rank before anything is gathered.
    pub(crate) fn create(
        rank: &'r Rank,
        site: &'static Location<'static>,
        open: impl FnOnce() -> Result<W>,
        functions: WriterFunctions<W>,
    ) -> Result<GatheringWriter<'r, W>> {
        Ok(GatheringWriter { rank, site, files: on_rank_zero(rank, site, open)?, functions, written: Ok(()) })
    }

    /// Writes the next tensor from its bytes, which rank 0 has.
    pub(crate) fn append(&mut self, name: &str, bytes: &[u8]) {
        // After a failed write the remaining tensors are gathered all the same, so that all ranks stay in step.
        if let (Some(files), true) = (&mut self.files, self.written.is_ok()) {
            self.written = self.functions.0(files, name, bytes);
        }
    }

    /// Gathers the next tensor as [`gather_to_rank_zero`] does, and writes it.
    pub(crate) fn gather(
        &mut self,
        name: &str,
        param: &Param,
        dtype: DType,
        part: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        let bytes = gather_to_rank_zero(self.rank, param, dtype, part, self.site)?;
        bytes.iter().for_each(|bytes| self.append(name, bytes));
        Ok(())
    }

    /// Completes the files. No rank returns before they are complete. Returns their digest on rank 0, if they have one.
    pub(crate) fn finish(self) -> Result<Option<String>> {
        let GatheringWriter { rank, site, files, functions: (_, finish), written } = self;
        let finish = || written.and_then(|()| files.map_or(Ok(None), finish));
        on_rank_zero(rank, site, finish).map(Option::flatten)
    }
}

/// Broadcasts the result of rank 0: every rank returns the same result, so that all ranks stay in step. Every rank
/// calls this together.
fn broadcast_result(rank: &Rank, done: Result<()>, site: &'static Location<'static>) -> Result<()> {
    let world = rank.world();
    if world.mesh().num_ranks() == 1 {
        return done;
    }
    let (kind, lines) = done.err().map_or((0, Vec::new()), |e| {
        let helps = e.details().iter().filter(|(label, _)| *label == "help").map(|(_, text)| text.as_str());
        let lines: Vec<String> = [e.message()].into_iter().chain(helps).map(str::to_string).collect();
        (1 + KINDS.iter().position(|kind| *kind == e.kind()).unwrap_or(0), lines)
    });
    let text = lines.join("\n");
    let header = world_sum(world, &[kind as f64, text.len() as f64], site)?;
    let (kind, text_len) = (header[0] as usize, header[1] as usize);
    if kind == 0 {
        return Ok(());
    }
    let byte = |i: usize| f64::from(text.as_bytes().get(i).copied().unwrap_or(0));
    let bytes: Vec<f64> = (0..text_len).map(byte).collect();
    let bytes: Vec<u8> = world_sum(world, &bytes, site)?.into_iter().map(|byte| byte as u8).collect();
    let text = String::from_utf8_lossy(&bytes);
    let (message, helps) = text.split_once('\n').unwrap_or((&text, ""));
    let error = Error::new(KINDS[kind - 1], message);
    let error = helps.lines().fold(error, |e, help| e.detail("help", help));
    Err(error.detail("rank", world.mesh().describe(0)))
}

/// Gathers a global tensor with the layout of a parameter (such as its value) in `dtype`, at least on rank 0; returns
/// its bytes there. `part` returns this rank's part. The stage that owns the parameter gathers the tensor, and sends
/// it when rank 0 asks: sent bytes wait in memory until received, so a stage must not run ahead of rank 0.
fn gather_to_rank_zero(
    rank: &Rank,
    param: &Param,
    dtype: DType,
    part: impl FnOnce() -> Result<Tensor>,
    site: &'static Location<'static>,
) -> Result<Option<Vec<u8>>> {
    let gather = || {
        let part = part()?;
        let replicated = Layout::invariant(part.layout().mesh(), dtype, &part.shape());
        part.to_layout_at(&replicated, site)?.to_bytes()
    };
    let owners = param.owners();
    if let Some(owners) = owners.as_ref().filter(|_| rank.index() == 0) {
        send_bytes(rank.world(), owners.axis, [0, owners.ranks[0]], &[1], 1, site)?;
    }
    let bytes = if param.is_primary_owner() { gather()? } else { Vec::new() };
    match owners {
        Some(owners) if rank.index() == 0 => {
            let len = param.numel() * dtype.size();
            send_bytes(rank.world(), owners.axis, [owners.ranks[0], 0], &bytes, len, site)
        }
        Some(_) => Ok(None),
        None => Ok(Some(bytes)),
    }
}
