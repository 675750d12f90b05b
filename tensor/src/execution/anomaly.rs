//! Anomaly detection: finds the op that produces the first NaN or infinity. Slow, for replaying a step that failed.

use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use shardgrad_dist::{Phase, Rank, Result};
use std::cell::{Cell, RefCell};
use std::panic::Location;

/// The op that only moves values, from other ranks too: a NaN that it outputs was made elsewhere.
const CARRIER: &str = "redistribute";

/// What one rank observed since anomaly detection began. Every rank applies the same ops in the same order, so op
/// numbers can be compared between ranks.
#[doc(alias = "detect_anomaly")]
#[doc(alias = "debug_nans")]
#[derive(Debug, Default)]
pub(crate) struct AnomalyDetector {
    num_ops: Cell<u64>,
    /// Whether another pipeline stage has sent a NaN or infinity.
    received_non_finite: Cell<bool>,
    found: RefCell<Option<Anomaly>>,
}

/// The op that produced the first NaN or infinity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Anomaly {
    /// The number of ops before this one.
    pub(crate) number: u64,
    /// Where the value comes from.
    pub(crate) source: Source,
    /// Whether an argument of the op is NaN although no op produced it: a parameter or an input holds it.
    pub(crate) is_input_nan: bool,
    /// The op and its result; the path in the model; the source line, if known; the rank.
    pub(crate) lines: [String; 4],
}

/// The origin of a NaN or infinity, most significant first: of two ranks the lesser origin is the cause. Op numbers
/// cannot be compared between the stages of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    /// The op produced the value from finite arguments.
    Op,
    /// An argument of the op already held a bad value, such as a parameter.
    Input,
    /// An argument held a bad value after another stage had sent one.
    Received,
}

impl AnomalyDetector {
    /// Starts anomaly detection.
    pub(crate) fn begin(rank: &Rank) {
        let watch = rank.extension::<AnomalyDetector>();
        watch.num_ops.set(0);
        watch.received_non_finite.set(false);
        *watch.found.borrow_mut() = None;
        Context::of(rank).set_anomaly_detection(true);
    }

    /// Stops anomaly detection and returns the anomaly found.
    pub(crate) fn end(rank: &Rank) -> Option<Anomaly> {
        Context::of(rank).set_anomaly_detection(false);
        rank.extension::<AnomalyDetector>().found.borrow_mut().take()
    }

    /// Inspects a tensor received from another stage.
    pub(crate) fn inspect_received(rank: &Rank, local: &LocalTensor) -> Result<()> {
        if worst(rank, local)?.is_some() {
            rank.extension::<AnomalyDetector>().received_non_finite.set(true);
        }
        Ok(())
    }

    /// Inspects the result of an op. An infinity in an argument may stay in the result, since masks are infinite.
    pub(crate) fn inspect(
        rank: &Rank,
        op: &str,
        inputs: &[&LocalTensor],
        outputs: &[&LocalTensor],
        site: &'static Location<'static>,
    ) -> Result<()> {
        let watch = rank.extension::<AnomalyDetector>();
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
        // The first argument that holds a NaN, else the first with an infinity.
        let mut given: Option<(usize, (usize, f64))> = None;
        for (i, input) in inputs.iter().enumerate() {
            if let Some(found) = worst(rank, input)?
                && given.is_none_or(|(_, known)| found.1.is_nan() && !known.1.is_nan())
            {
                given = Some((i, found));
            }
        }
        // An infinity counts too.
        let source = match (given, watch.received_non_finite.get()) {
            (None, _) => Source::Op,
            (Some(_), false) => Source::Input,
            (Some(_), true) => Source::Received,
        };
        let is_input_nan = given.is_some_and(|(_, (_, x))| x.is_nan());
        let what = match given {
            _ if op == CARRIER && value.is_nan() => return Ok(()),
            Some((i, (at, x))) if x.is_nan() => {
                format!("{op}: argument {i} already is {x}, at local element {at}: no op produced it")
            }
            Some(_) if value.is_infinite() => return Ok(()),
            Some((i, (_, x))) => {
                format!("{op}: the result is {value} at local element {at}; argument {i} holds {x}")
            }
            None => format!("{op}: the result is {value} at local element {at}"),
        };
        let context = Context::of(rank);
        // In the backward pass the source line is inside a vjp, which does not help a user.
        let (pass, line) = match context.phase() {
            Phase::Backward => (", in the backward pass", String::new()),
            _ => ("", format!("{}:{}", site.file(), site.line())),
        };
        let place = format!("{}{pass}", context.path());
        let lines = [what, place, line, rank.describe()];
        *watch.found.borrow_mut() = Some(Anomaly { number, source, is_input_nan, lines });
        Ok(())
    }
}

/// Returns index and value of the first NaN, else of the first infinity.
fn worst(rank: &Rank, local: &LocalTensor) -> Result<Option<(usize, f64)>> {
    if !local.dtype.is_float() {
        return Ok(None);
    }
    let values = local.to_f64(rank)?;
    let first = |bad: fn(&f64) -> bool| values.iter().position(bad).map(|at| (at, values[at]));
    Ok(first(|x| x.is_nan()).or_else(|| first(|x| x.is_infinite())))
}
