//! Error messages about ranks: mismatched collectives, deadlocks, timeouts, lost peers and malformed messages.

use crate::call::{IssuedCall, ORIGIN_DIFFERS, Op};
use crate::encoding::printable;
use crate::error::{Error, Kind};
use crate::mesh::Mesh;
use crate::world_state::{Failure, RankSnapshot, RankStatus};
use std::collections::HashSet;
use std::time::Duration;

/// The most characters of another rank's message that this rank repeats.
const CAUSE_CHARS_MAX: usize = 200;
/// The most characters shown of an input.
const INPUT_CHARS_MAX: usize = 1000;
const RAISE_TIMEOUT: &str = "raise the timeout with World::timeout (--timeout on the command line)";
const SILENT: &str = "the network may be down, or the process stopped: check the connection between the machines, and for SIGSTOP";
const SAME_CALLS: &str = "all ranks of a group must make the same calls in the same order";
const SAME_PROGRAM: &str =
    "start the same program on all machines, and let no other program connect to its ports";
const SAME_SHAPES: &str = "all ranks must create a tensor with the same global shape: drop the surplus elements of a rank, or pad, before creating the tensor";

/// The error of a group whose members made different calls; `None` if all match.
pub(crate) fn mismatch(mesh: &Mesh, members: &[usize], calls: &[&IssuedCall]) -> Option<Error> {
    // Compare all pairs: the first call may leave out its path or origin, which match any.
    let pairs = || (0..calls.len()).flat_map(|i| (0..i).map(move |j| (j, i)));
    let differences = pairs().map(|(j, i)| calls[j].differences(calls[i])).find(|d| !d.is_empty());
    match differences {
        Some(differences) => Some(call_mismatch(mesh, members, calls, &differences)),
        None if calls[0].op == Op::AllToAll => split_mismatch(mesh, members, calls),
        None => None,
    }
}

/// The error about different calls: one clause per distinct call, with the ranks that made it.
fn call_mismatch(mesh: &Mesh, members: &[usize], calls: &[&IssuedCall], differences: &[&str]) -> Error {
    let mut classes: Vec<(&IssuedCall, Vec<usize>)> = Vec::new();
    for (&call, &rank) in calls.iter().zip(members) {
        match classes.iter_mut().find(|(first, _)| first.differences(call).is_empty()) {
            Some((_, ranks)) => ranks.push(rank),
            None => classes.push((call, vec![rank])),
        }
    }
    let clauses: Vec<String> = classes
        .iter()
        .map(|(call, ranks)| format!("{} called {}", list(ranks), call.text(mesh, ranks[0])))
        .collect();
    let mut error = Error::new(Kind::Collective, format!("collective mismatch: {}", clauses.join(", ")))
        .detail("differs", differences.join(", "))
        .detail("ranks", format!("{members:?} of {mesh}"));
    // Calls of different lines differ in their shapes too, without being wrong.
    let lines: HashSet<String> = classes.iter().map(|(call, _)| call.line()).collect();
    if !differences.contains(&ORIGIN_DIFFERS) || lines.len() > 1 {
        return error.detail("help", SAME_CALLS);
    }
    let inputs: Vec<&str> = classes.iter().map(|(call, _)| call.recent_inputs.as_str()).collect();
    for ((_, ranks), input) in
        classes.iter().zip(differing_inputs(&inputs)).filter(|(_, input)| !input.is_empty())
    {
        error = error.detail("given", format!("{}: {}", list(ranks), printable(input, INPUT_CHARS_MAX)));
    }
    error.detail("help", SAME_SHAPES)
}

/// Picks from each rank's recent inputs the one to show: the newest input of the line of user code, searched from the newest, at
/// which all ranks have an input and the inputs differ; each rank's newest input if there is no such line.
fn differing_inputs<'a>(lists: &[&'a str]) -> Vec<&'a str> {
    let at = |line: &'a str| line.rsplit_once(" at ").map_or(line, |(_, site)| site);
    let newest = |list: &'a str, site: &str| list.lines().find(|line| at(line) == site);
    let of_site = |site: &'a str| lists.iter().map(|list| newest(list, site)).collect::<Option<Vec<&str>>>();
    let sites = lists[0].lines().map(at);
    let differing = sites.filter_map(of_site).find(|newest| newest.iter().any(|line| *line != newest[0]));
    differing.unwrap_or_else(|| lists.iter().map(|list| list.lines().next().unwrap_or("")).collect())
}

fn split_mismatch(mesh: &Mesh, members: &[usize], calls: &[&IssuedCall]) -> Option<Error> {
    let pairs = (0..calls.len()).flat_map(|i| (0..calls.len()).map(move |j| (i, j)));
    let (i, j) = pairs.into_iter().find(|&(i, j)| calls[i].counts[j] != calls[j].received[i])?;
    let (from, to) = (members[i], members[j]);
    let message = format!(
        "collective mismatch: rank {from} sends {} elements to rank {to} in {}, \
         rank {to} expects {} from rank {from} in {}",
        calls[i].counts[j],
        calls[i].text(mesh, from),
        calls[j].received[i],
        calls[j].text(mesh, to)
    );
    Some(
        Error::new(Kind::Collective, message)
            .detail("differs", "splits")
            .detail("ranks", format!("{members:?} of {mesh}"))
            .detail("help", "the elements that member i sends to member j must be those that member j receives from member i"),
    )
}

/// The error of a message that does not match the recv of its receiver; `None` if the message matches.
pub(crate) fn wrong_message(
    mesh: &Mesh,
    from: usize,
    sent: &IssuedCall,
    to: usize,
    expected: &IssuedCall,
) -> Option<Error> {
    let differences = sent.differences(expected);
    (!differences.is_empty()).then(|| {
        let (sent, expected) = (sent.text(mesh, from), expected.text(mesh, to));
        Error::new(
            Kind::Collective,
            format!("collective mismatch: rank {from} called {sent}, rank {to} called {expected}"),
        )
        .detail("differs", differences.join(", "))
        .detail("help", "messages of a pair of ranks are received in the order in which they are sent")
    })
}

/// The error of a deadlock: a cycle of ranks, each of which waits for the next.
pub(crate) fn cycle(mesh: &Mesh, seen: &[RankSnapshot], ranks: &[usize]) -> Error {
    let next = |i: usize| ranks[(i + 1) % ranks.len()];
    let wait = |i: usize| {
        let whom = if next(i) == ranks[i] { "itself".to_string() } else { format!("rank {}", next(i)) };
        format!("rank {} waits for {whom} in {}", ranks[i], seen[ranks[i]].issued.text(mesh, ranks[i]))
    };
    let waits: Vec<String> = (0..ranks.len()).map(wait).collect();
    Error::new(Kind::Collective, format!("deadlock: {}", waits.join(", ")))
        .detail("ranks", format!("{ranks:?} of {mesh}"))
        .detail(
            "help",
            "ranks that share groups must call them in the same order; a recv needs an earlier send of its peer",
        )
}

/// The error of waiting for a rank that has returned or failed.
pub(crate) fn departed(mesh: &Mesh, seen: &[RankSnapshot], waiting: usize, gone: usize) -> Error {
    let call = seen[waiting].issued.text(mesh, waiting);
    let how = activity(mesh, &seen[gone], gone);
    Error::new(Kind::PeerLost, format!("rank {gone} left ({how}) while rank {waiting} waits in {call}"))
        .detail("rank", mesh.describe(waiting))
        .detail("help", SAME_CALLS)
}

/// The error of a wait for absent ranks that exceeded its timeout: the ranks that have arrived, and what each absent rank does.
pub(crate) fn timed_out(mesh: &Mesh, seen: &[RankSnapshot], waiting: usize, limit: Duration) -> Error {
    let call = seen[waiting].issued.text(mesh, waiting);
    let (absent, arrived): (Vec<usize>, Vec<usize>) = mesh
        .group(waiting, seen[waiting].issued.axes)
        .into_iter()
        .partition(|r| seen[waiting].absent.contains(r));
    let mut error = Error::new(
        Kind::Timeout,
        format!("rank {waiting} waited more than {limit:?} in {call} for {}", list(&absent)),
    )
    .detail("rank", mesh.describe(waiting));
    if seen[waiting].issued.op.is_collective() {
        error = error.detail("arrived", list(&arrived));
    }
    let is_silent = absent.iter().any(|rank| seen[*rank].is_silent());
    for rank in absent {
        error = error.detail("absent", describe_status(mesh, &seen[rank], rank));
    }
    error.detail("help", if is_silent { SILENT } else { RAISE_TIMEOUT })
}

/// The error of a timeout in a call that all members have entered but not all have finished.
pub(crate) fn unfinished(mesh: &Mesh, rank: usize, call: &IssuedCall, limit: Duration) -> Error {
    let call = call.text(mesh, rank);
    Error::new(
        Kind::Timeout,
        format!("rank {rank} waited more than {limit:?} for the others to finish {call}"),
    )
    .detail("rank", mesh.describe(rank))
    .detail("help", RAISE_TIMEOUT)
}

/// The error of a timeout on a GPU, in a call that all members have made alike.
#[cfg(feature = "nccl")]
pub(crate) fn stuck(mesh: &Mesh, rank: usize, call: &str, limit: Duration) -> Error {
    Error::new(Kind::Timeout, format!("the GPU of rank {rank} waited more than {limit:?} for other GPUs in {call}"))
        .detail("rank", mesh.describe(rank))
        .detail("help", "look for warnings of NCCL (NCCL_DEBUG=WARN); raise the timeout with --timeout if GPUs compute that long between two calls")
}

/// The error of a timeout in a send: the receiver takes nothing.
pub(crate) fn send_timed_out(
    mesh: &Mesh,
    rank: usize,
    to: usize,
    seen: &RankSnapshot,
    call: &IssuedCall,
    limit: Duration,
) -> Error {
    let call = call.text(mesh, rank);
    Error::new(
        Kind::Timeout,
        format!("rank {rank} waited more than {limit:?} for rank {to} to receive the data of {call}"),
    )
    .detail("rank", mesh.describe(rank))
    .detail("receiver", describe_status(mesh, seen, to))
    .detail("help", if seen.is_silent() { SILENT } else { RAISE_TIMEOUT })
}

/// The error of a message that was never received.
pub(crate) fn not_received(mesh: &Mesh, to: usize, from: usize, issued: &IssuedCall) -> Error {
    let call = issued.text(mesh, from);
    Error::new(
        Kind::Collective,
        format!("rank {from} called {call}, and rank {to} returned without receiving it"),
    )
}

/// The error of a process that closed its connections without reporting a failure.
pub(crate) fn process_ended(rank: usize) -> Error {
    Error::new(Kind::PeerLost, format!("rank {rank}'s process ended (killed or crashed)")).detail(
        "help",
        "look for the cause in the output of that process, or in the log of its machine (out of memory?)",
    )
}

/// The error of an unresponsive process: from here, a network failure and a stopped process look the same.
pub(crate) fn unresponsive(rank: usize, silence: Duration) -> Error {
    let seconds = silence.as_secs();
    let why = format!(
        "nothing received from rank {rank} for {seconds} s: the network may be down, or the process stopped"
    );
    Error::new(Kind::PeerLost, why)
        .detail("help", "check the connection between the machines, and for SIGSTOP")
}

/// The error of a process that sent a malformed message.
pub(crate) fn malformed(rank: usize) -> Error {
    Error::new(Kind::PeerLost, format!("rank {rank} sent a malformed message")).detail("help", SAME_PROGRAM)
}

/// The error of a message that was announced while the queue of announced messages is full.
pub(crate) fn too_many_announced(mesh: &Mesh, rank: usize, from: usize, issued: &IssuedCall) -> Error {
    let call = issued.text(mesh, from);
    let why = format!(
        "rank {from} has sent too many messages that rank {rank} has not received: {call} is one more"
    );
    Error::new(Kind::PeerLost, why).detail("help", "receive messages before more of them are sent")
}

/// The error of bytes that the other end of a connection has not sent here and now: they were changed, dropped, repeated or reordered on
/// their way. `number` is that of the record.
pub(crate) fn tampered(rank: usize, from: usize, number: u64) -> Error {
    let why = format!(
        "the connection from rank {from} to rank {rank} was tampered with: record {number} does not verify"
    );
    Error::new(Kind::PeerLost, why).detail(
        "help",
        "a machine or program between the ranks changes what they send; look for it before the next run",
    )
}

/// The error of a message, or a shared buffer, whose size does not match its call.
pub(crate) fn wrong_size(
    mesh: &Mesh,
    from: usize,
    call: &IssuedCall,
    bytes: usize,
    expected: usize,
) -> Error {
    let call = call.text(mesh, from);
    let why = format!("rank {from} sent a malformed message: {bytes} bytes for {call}, expected {expected}");
    Error::new(Kind::PeerLost, why).detail("help", SAME_PROGRAM)
}

/// The one-line reason why a rank stops that has not failed itself.
pub(crate) fn stops_too(failure: &Failure, rank: usize) -> String {
    let why = printable(failure.error.message(), CAUSE_CHARS_MAX);
    match failure.is_of_origin() {
        true => format!("rank {} failed: {why}; rank {rank} stops too", failure.origin),
        false => format!("{why}; rank {rank} stops too"),
    }
}

/// The error of a rank that has to stop because another rank failed. `doing` continues `rank 3 ...`. The error has the details of
/// the failure on one rank only, if the failed rank's process can no longer report them.
pub(crate) fn lost(failure: &Failure, rank: usize, doing: &str) -> Error {
    let error = Error::new(Kind::PeerLost, stops_too(failure, rank)).caused_by(failure.error.kind());
    if !failure.is_lost_process() || failure.reporter() != rank {
        return error;
    }
    let details = failure.error.details().iter().cloned();
    details
        .fold(error, |error, (label, text)| error.detail(label, text))
        .detail("meanwhile", format!("rank {rank} {doing}"))
}

/// The error that a process reports after its world has failed, from the error with which its rank ended. Of several processes with
/// the same error, one reports it with its details, all others in one line. `earlier` is the failure of a rank with a lower number
/// that failed independently with the same message.
pub(crate) fn last_error(failure: &Failure, earlier: Option<&Failure>, rank: usize, error: Error) -> Error {
    let short = |kind: Kind, failure: &Failure| {
        Error::new(kind, stops_too(failure, rank)).caused_by(failure.error.kind())
    };
    let own = &failure.error;
    if failure.is_of(rank) {
        return match earlier {
            _ if failure.affected.first().is_some_and(|first| *first != rank) => short(own.kind(), failure),
            Some(first) => short(own.kind(), first),
            None => own.clone(),
        };
    }
    let is_same_error =
        failure.origin != rank && (error.kind(), error.message()) == (own.kind(), own.message());
    let is_short = error.kind() == Kind::PeerLost && error.message() == stops_too(failure, rank);
    if failure.reporter() != rank && (is_same_error || is_short) {
        short(error.kind(), failure)
    } else {
        error
    }
}

/// The status of an awaited rank, as a sentence.
fn describe_status(mesh: &Mesh, seen: &RankSnapshot, rank: usize) -> String {
    if !seen.is_silent() {
        return format!("rank {rank}: {}", activity(mesh, seen, rank));
    }
    let silence = format!("no heartbeat from rank {rank} for {} s", seen.silence.as_secs());
    match seen.issued.number {
        0 => format!("{silence}; it has made no call yet"),
        _ => format!("{silence}; its last call was {}", seen.issued.text(mesh, rank)),
    }
}

/// What an awaited rank does, or has done last.
fn activity(mesh: &Mesh, seen: &RankSnapshot, rank: usize) -> String {
    let (status, called) = (seen.status, seen.issued.number > 0);
    let call = seen.issued.text(mesh, rank);
    match (status, called) {
        (RankStatus::Running, true) if seen.is_waiting => format!("waits in {call}"),
        (RankStatus::Running, true) => format!("computing since {call}"),
        (RankStatus::Running, false) => "computing, no call yet".to_string(),
        (RankStatus::Returned, true) => format!("returned after its call {call}"),
        (RankStatus::Returned, false) => "returned without a call".to_string(),
        (RankStatus::Failed, true) => format!("failed after its call {call}"),
        (RankStatus::Failed, false) => "failed without a call".to_string(),
    }
}

/// `rank 3`, or `ranks 0, 1, 3`.
fn list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match names.len() {
        0 => "no rank".to_string(),
        1 => format!("rank {}", names[0]),
        _ => format!("ranks {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world_state::WorldState;

    #[test]
    fn timeout_errors_name_the_timeout_option() {
        let mesh = Mesh::new(&[("dp", 2)]).unwrap();
        let (seen, limit) = (WorldState::new(mesh.clone()).snapshot(), Duration::from_secs(1));
        let late = [timed_out(&mesh, &seen, 0, limit), unfinished(&mesh, 0, &IssuedCall::none(), limit)];
        for error in late {
            let help = error.details().iter().find(|(label, _)| *label == "help");
            assert!(help.is_some_and(|(_, text)| text.contains("--timeout")), "{error}");
        }
    }
}
