//! Watching for the op that makes the first number that is not finite: slow, for the replay of a step that went wrong.

use crate::context::Context;
use crate::piece::Piece;
use shardgrad_dist::{Phase, Rank, Result};
use std::cell::{Cell, RefCell};
use std::panic::Location;

/// The op that carries what is there, from other ranks too: it makes no not-a-number that no op or parameter has made.
const CARRIER: &str = "redistribute";

/// What one rank saw since its watch began. Every rank applies the same ops in the same order, so that their numbers
/// can be compared between ranks.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    num_ops: Cell<u64>,
    /// Whether another rank has sent a number that is not finite.
    was_sent: Cell<bool>,
    found: RefCell<Option<Finding>>,
}

/// The op that made the first number that is not finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// How many ops came before.
    pub(crate) number: u64,
    /// Where what is not a number comes from.
    pub(crate) source: Source,
    /// Whether an argument of the op is NaN although no op made it so: a parameter or an input is.
    pub(crate) is_given_nan: bool,
    /// The op and what it made; where in the model; the line that asked for it, if any; the rank.
    pub(crate) lines: [String; 4],
}

/// Where a number that is not finite comes from; of two ranks, the one with the lesser source is where it began. Numbers of ops
/// cannot be compared between the stages of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    /// The op made it.
    Op,
    /// The op was given it: a parameter was bad.
    Given,
    /// The op was given it after another stage had sent one.
    Sent,
}

impl Watch {
    /// Starts afresh.
    pub(crate) fn begin(rank: &Rank) {
        let watch = rank.extension::<Watch>();
        watch.num_ops.set(0);
        watch.was_sent.set(false);
        *watch.found.borrow_mut() = None;
        Context::of(rank).set_watched(true);
    }

    /// Stops; gives what was found.
    pub(crate) fn end(rank: &Rank) -> Option<Finding> {
        Context::of(rank).set_watched(false);
        rank.extension::<Watch>().found.borrow_mut().take()
    }

    /// Looks at what another stage has sent to a watched rank.
    pub(crate) fn look_at_sent(rank: &Rank, piece: &Piece) -> Result<()> {
        if worst(rank, piece)?.is_some() {
            rank.extension::<Watch>().was_sent.set(true);
        }
        Ok(())
    }

    /// Looks at the result of an op on a watched rank. What is infinite already may stay so: masks are.
    pub(crate) fn look(
        rank: &Rank,
        op: &str,
        inputs: &[&Piece],
        outputs: &[&Piece],
        site: &'static Location<'static>,
    ) -> Result<()> {
        let watch = rank.extension::<Watch>();
        let number = watch.num_ops.replace(watch.num_ops.get() + 1);
        if watch.found.borrow().is_some() {
            return Ok(());
        }
        let mut made: Option<(usize, f64)> = None;
        for output in outputs {
            if let Some(found) = worst(rank, output)?
                && made.is_none_or(|known| found.1.is_nan() && !known.1.is_nan())
            {
                made = Some(found);
            }
        }
        let Some((at, value)) = made else { return Ok(()) };
        // The first argument that holds a not-a-number, else the first with an infinity.
        let mut given: Option<(usize, (usize, f64))> = None;
        for (i, input) in inputs.iter().enumerate() {
            if let Some(found) = worst(rank, input)?
                && given.is_none_or(|(_, known)| found.1.is_nan() && !known.1.is_nan())
            {
                given = Some((i, found));
            }
        }
        // An infinity counts too.
        let source = match (given, watch.was_sent.get()) {
            (None, _) => Source::Op,
            (Some(_), false) => Source::Given,
            (Some(_), true) => Source::Sent,
        };
        let is_given_nan = given.is_some_and(|(_, (_, x))| x.is_nan());
        let what = match given {
            _ if op == CARRIER && value.is_nan() => return Ok(()),
            Some((i, (at, x))) if x.is_nan() => {
                format!("{op}: argument {i} already is {x}, at local element {at}: no op made it")
            }
            Some(_) if value.is_infinite() => return Ok(()),
            Some((i, (_, x))) => {
                format!("{op}: the result is {value} at local element {at}; argument {i} holds {x}")
            }
            None => format!("{op}: the result is {value} at local element {at}"),
        };
        let context = Context::of(rank);
        // Backward, the op stands on a line of a vjp, which tells a user nothing.
        let (pass, line) = match context.phase() {
            Phase::Backward => (", in the backward pass", String::new()),
            _ => ("", format!("{}:{}", site.file(), site.line())),
        };
        let place = format!("{}{pass}", context.path());
        let lines = [what, place, line, rank.describe()];
        *watch.found.borrow_mut() = Some(Finding { number, source, is_given_nan, lines });
        Ok(())
    }
}

/// The first not-a-number of a piece, else its first infinity.
fn worst(rank: &Rank, piece: &Piece) -> Result<Option<(usize, f64)>> {
    if !piece.dtype.is_float() {
        return Ok(None);
    }
    let values = piece.to_f64(rank)?;
    let first = |bad: fn(&f64) -> bool| values.iter().position(bad).map(|at| (at, values[at]));
    Ok(first(|x| x.is_nan()).or_else(|| first(|x| x.is_infinite())))
}
