//! Gathering tensors on rank 0, which writes the files, and broadcasting the result of its writing.

use crate::module::param::Param;
use shardgrad_tensor::training_step::control::{send_bytes, world_sum};
use shardgrad_tensor::{DType, Error, Kind, Layout, Rank, Result, Tensor};
use std::panic::Location;

/// Kinds of errors that writing may return.
const KINDS: [Kind; 3] = [Kind::Io, Kind::Checkpoint, Kind::OutOfMemory];

/// Broadcasts the result of rank 0: every rank returns the same result, so that all ranks stay in step. Every rank
/// calls this together.
pub(crate) fn broadcast_result(
    rank: &Rank,
    done: Result<()>,
    site: &'static Location<'static>,
) -> Result<()> {
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
pub(crate) fn gather_to_rank_zero(
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
