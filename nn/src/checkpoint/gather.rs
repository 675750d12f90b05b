//! Tensors brought to the first rank, which writes, and word of how its writing ended.

use crate::param::Param;
use shardgrad_tensor::control::{pass_bytes, world_sum};
use shardgrad_tensor::{DType, Error, Kind, Layout, Rank, Result, Tensor};
use std::panic::Location;

/// What writing may be refused for.
const KINDS: [Kind; 3] = [Kind::Io, Kind::Checkpoint, Kind::OutOfMemory];

/// Hands the outcome of the first rank's writing to all: each of them returns the same, so that they stay together. Every rank
/// calls this together.
pub(crate) fn tell(rank: &Rank, done: Result<()>, site: &'static Location<'static>) -> Result<()> {
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
    let word = world_sum(world, &[kind as f64, text.len() as f64], site)?;
    if word[0] == 0.0 {
        return Ok(());
    }
    let byte = |i: usize| f64::from(text.as_bytes().get(i).copied().unwrap_or(0));
    let bytes: Vec<f64> = (0..word[1] as usize).map(byte).collect();
    let bytes: Vec<u8> = world_sum(world, &bytes, site)?.into_iter().map(|byte| byte as u8).collect();
    let text = String::from_utf8_lossy(&bytes);
    let (message, helps) = text.split_once('\n').unwrap_or((&text, ""));
    let error = Error::new(KINDS[word[0] as usize - 1], message);
    let error = helps.lines().fold(error, |e, help| e.detail("help", help));
    Err(error.detail("rank", world.mesh().describe(0)))
}

/// The bytes of a whole tensor that lies as a parameter does, such as its value, of `dtype`, on the first rank at least: `part`
/// gives this rank's, the stage that counts the parameter gathers it, and passes it on when the first rank asks for it. What is
/// sent waits in memory until it is received, so the first rank has to have come to a parameter before the stages behind it send
/// theirs.
pub(crate) fn bring(
    rank: &Rank,
    param: &Param,
    dtype: DType,
    part: impl FnOnce() -> Result<Tensor>,
    site: &'static Location<'static>,
) -> Result<Option<Vec<u8>>> {
    let gathered = || {
        let part = part()?;
        let whole = Layout::invariant(part.layout().mesh(), dtype, &part.shape());
        part.to_layout_at(&whole, site)?.to_bytes()
    };
    let home = param.home();
    if let Some(home) = home.as_ref().filter(|_| rank.index() == 0) {
        pass_bytes(rank.world(), home.axis, [0, home.places[0]], &[1], 1, site)?;
    }
    let bytes = if param.counts_here() { gathered()? } else { Vec::new() };
    match home {
        Some(home) if rank.index() == 0 => {
            let len = param.numel() * dtype.size();
            pass_bytes(rank.world(), home.axis, [home.places[0], 0], &bytes, len, site)
        }
        Some(_) => Ok(None),
        None => Ok(Some(bytes)),
    }
}
