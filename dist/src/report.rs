//! The texts of everything that can go wrong between ranks.

use crate::bytes::printable;
use crate::call::{Issued, ORIGIN, Op};
use crate::error::{Error, Kind};
use crate::mesh::Mesh;
use crate::table::{Failure, Seen, State};
use std::time::Duration;

/// Characters of the message of another rank, where this rank repeats it.
const CAUSE_CHARS_MAX: usize = 200;
/// Characters of what a rank was given.
const GIVEN_CHARS_MAX: usize = 1000;
const LONGER: &str = "a longer limit is set with World::timeout (--timeout on the command line)";
const SILENT: &str =
    "the network may be cut, or the process stopped: check the links between the machines, and for SIGSTOP";
const SAME_CALLS: &str = "all ranks of a group make the same calls in the same order";
const SAME_PROGRAM: &str =
    "start the same program on all machines, and let nothing else connect to its ports";
const SAME_SHAPES: &str = "all ranks must give the same global shape: leave out what a rank has more of, or pad the numbers, before a tensor is made of them";

/// The error of a group whose members called unlike things; `None` if all agree.
pub(crate) fn mismatch(mesh: &Mesh, members: &[usize], calls: &[&Issued]) -> Option<Error> {
    // Not with the first alone: it may know less than others.
    let pairs = || (0..calls.len()).flat_map(|i| (0..i).map(move |j| (j, i)));
    let differences = pairs().map(|(j, i)| calls[j].differences(calls[i])).find(|d| !d.is_empty());
    match differences {
        Some(differences) => Some(unlike(mesh, members, calls, &differences)),
        None if calls[0].op == Op::AllToAll => unlike_splits(mesh, members, calls),
        None => None,
    }
}

/// One clause for each kind of call, with the ranks that made it.
fn unlike(mesh: &Mesh, members: &[usize], calls: &[&Issued], differences: &[&str]) -> Error {
    let mut classes: Vec<(&Issued, Vec<usize>)> = Vec::new();
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
    if !differences.contains(&ORIGIN) {
        return error.detail("help", SAME_CALLS);
    }
    let given: Vec<&str> = classes.iter().map(|(call, _)| call.given.as_str()).collect();
    for ((_, ranks), told) in classes.iter().zip(unlike_given(&given)).filter(|(_, told)| !told.is_empty()) {
        error = error.detail("given", format!("{}: {}", list(ranks), printable(told, GIVEN_CHARS_MAX)));
    }
    error.detail("help", SAME_SHAPES)
}

/// Of each list of what was given, the newest of the line of the program at which, looked back from the end, all were given
/// something and not all the same; the newest of all where there is no such line.
fn unlike_given<'a>(lists: &[&'a str]) -> Vec<&'a str> {
    let at = |told: &'a str| told.rsplit_once(" at ").map_or(told, |(_, site)| site);
    let newest = |list: &'a str, site: &str| list.lines().find(|told| at(told) == site);
    let of_site = |site: &'a str| lists.iter().map(|list| newest(list, site)).collect::<Option<Vec<&str>>>();
    let sites = lists[0].lines().map(at);
    let unlike = sites.filter_map(of_site).find(|told| told.iter().any(|one| *one != told[0]));
    unlike.unwrap_or_else(|| lists.iter().map(|list| list.lines().next().unwrap_or("")).collect())
}

fn unlike_splits(mesh: &Mesh, members: &[usize], calls: &[&Issued]) -> Option<Error> {
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
            .detail("help", "what member i sends to j is what member j receives from i"),
    )
}

/// The error of a message that is not what its receiver asked for; `None` if it is.
pub(crate) fn wrong_letter(
    mesh: &Mesh,
    (from, issued): (usize, &Issued),
    to: usize,
    asked: &Issued,
) -> Option<Error> {
    let differences = issued.differences(asked);
    (!differences.is_empty()).then(|| {
        let (sent, asked) = (issued.text(mesh, from), asked.text(mesh, to));
        Error::new(
            Kind::Collective,
            format!("collective mismatch: rank {from} called {sent}, rank {to} called {asked}"),
        )
        .detail("differs", differences.join(", "))
        .detail("help", "messages of a pair of ranks are received in the order in which they are sent")
    })
}

/// The error of ranks that wait for each other.
pub(crate) fn cycle(mesh: &Mesh, seen: &[Seen], ranks: &[usize]) -> Error {
    let next = |i: usize| ranks[(i + 1) % ranks.len()];
    let wait = |i: usize| {
        let whom = if next(i) == ranks[i] { "itself".to_string() } else { format!("rank {}", next(i)) };
        format!("rank {} waits for {whom} in {}", ranks[i], seen[ranks[i]].issued.text(mesh, ranks[i]))
    };
    let waits: Vec<String> = (0..ranks.len()).map(wait).collect();
    Error::new(Kind::Collective, format!("ranks wait in a circle: {}", waits.join(", ")))
        .detail("ranks", format!("{ranks:?} of {mesh}"))
        .detail(
            "help",
            "ranks that share groups call them in the same order; a recv needs a send of its peer before",
        )
}

/// The error of waiting for a rank that is gone.
pub(crate) fn departed(mesh: &Mesh, seen: &[Seen], waiting: usize, gone: usize) -> Error {
    let call = seen[waiting].issued.text(mesh, waiting);
    let how = whereabouts(mesh, &seen[gone], gone);
    Error::new(Kind::PeerLost, format!("rank {gone} left ({how}) while rank {waiting} waits in {call}"))
        .detail("rank", mesh.describe(waiting))
        .detail("help", SAME_CALLS)
}

/// The error of a wait that took too long: who has come, who has not, and where those are.
pub(crate) fn overdue(mesh: &Mesh, seen: &[Seen], waiting: usize, limit: Duration) -> Error {
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
        error = error.detail("absent", state(mesh, &seen[rank], rank));
    }
    error.detail("help", if is_silent { SILENT } else { LONGER })
}

/// The error of a wait for members that have come but do not finish.
pub(crate) fn unfinished(mesh: &Mesh, rank: usize, call: &Issued, limit: Duration) -> Error {
    let call = call.text(mesh, rank);
    Error::new(
        Kind::Timeout,
        format!("rank {rank} waited more than {limit:?} for the others to finish {call}"),
    )
    .detail("rank", mesh.describe(rank))
    .detail("help", LONGER)
}

/// The error of a rank that takes nothing of what is sent to it.
pub(crate) fn not_taken(
    mesh: &Mesh,
    rank: usize,
    (to, seen): (usize, &Seen),
    call: &Issued,
    limit: Duration,
) -> Error {
    let call = call.text(mesh, rank);
    Error::new(
        Kind::Timeout,
        format!("rank {rank} waited more than {limit:?} for rank {to} to take what it sends in {call}"),
    )
    .detail("rank", mesh.describe(rank))
    .detail("receiver", state(mesh, seen, to))
    .detail("help", if seen.is_silent() { SILENT } else { LONGER })
}

/// The error of a message that nobody has received at the end.
pub(crate) fn unread(mesh: &Mesh, to: usize, (from, issued): (usize, &Issued)) -> Error {
    let call = issued.text(mesh, from);
    Error::new(
        Kind::Collective,
        format!("rank {from} called {call}, and rank {to} returned without receiving it"),
    )
}

/// The error of a process that has closed its connections without a word.
pub(crate) fn process_ended(rank: usize) -> Error {
    Error::new(Kind::PeerLost, format!("rank {rank}'s process ended (killed or crashed)"))
        .detail("help", "the output of that process, or the log of its machine, says why")
}

/// The error of a process of which nothing is heard: from here, a cut link and a stopped process look the same.
pub(crate) fn silent(rank: usize, silence: Duration) -> Error {
    let seconds = silence.as_secs();
    let why = format!(
        "nothing heard of rank {rank} for {seconds} s; the network may be cut, or the process stopped"
    );
    Error::new(Kind::PeerLost, why).detail("help", "check the links between the machines, and for SIGSTOP")
}

/// The error of a process that sends what is no message of a rank.
pub(crate) fn malformed(rank: usize) -> Error {
    Error::new(Kind::PeerLost, format!("rank {rank} sent a malformed message")).detail("help", SAME_PROGRAM)
}

/// The error of a message, or of a shared buffer, that is not as long as its call says.
pub(crate) fn wrong_size(mesh: &Mesh, (from, call): (usize, &Issued), bytes: usize, due: usize) -> Error {
    let call = call.text(mesh, from);
    let why = format!("rank {from} sent a malformed message: {bytes} bytes for {call}, {due} are due");
    Error::new(Kind::PeerLost, why).detail("help", SAME_PROGRAM)
}

/// Why a rank stops that did not fail itself, in one line.
pub(crate) fn stops_too(failure: &Failure, rank: usize) -> String {
    let why = printable(failure.error.message(), CAUSE_CHARS_MAX);
    match failure.is_of_origin() {
        true => format!("rank {} failed: {why}; rank {rank} stops too", failure.origin),
        false => format!("{why}; rank {rank} stops too"),
    }
}

/// The error of a rank that has to stop because of another one. `doing` continues `rank 3 ...`. The details of the failure are
/// part of it on one rank only, where the rank that they belong to can report nothing any more.
pub(crate) fn lost(failure: &Failure, rank: usize, doing: &str) -> Error {
    let error = Error::new(Kind::PeerLost, stops_too(failure, rank));
    if !failure.is_lost_process() || failure.reporter() != rank {
        return error;
    }
    let details = failure.error.details().iter().cloned();
    details
        .fold(error, |error, (label, text)| error.detail(label, text))
        .detail("meanwhile", format!("rank {rank} {doing}"))
}

/// The error with which a process ends after a failure of its world, from the one with which its rank ended. Of several processes
/// that have one message to report, one prints it with its details. `alike` is the failure of a rank of lower number that failed by
/// itself with the same message.
pub(crate) fn last_error(failure: &Failure, alike: Option<&Failure>, rank: usize, error: Error) -> Error {
    let short = |kind: Kind, failure: &Failure| Error::new(kind, stops_too(failure, rank));
    let own = &failure.error;
    if failure.is_of(rank) {
        return match alike {
            _ if failure.told.first().is_some_and(|first| *first != rank) => short(own.kind(), failure),
            Some(first) => short(own.kind(), first),
            None => own.clone(),
        };
    }
    let is_alike = failure.origin != rank && (error.kind(), error.message()) == (own.kind(), own.message());
    let is_short = error.kind() == Kind::PeerLost && error.message() == stops_too(failure, rank);
    if failure.reporter() != rank && (is_alike || is_short) { short(error.kind(), failure) } else { error }
}

/// How a rank is that others wait for, as a sentence.
fn state(mesh: &Mesh, seen: &Seen, rank: usize) -> String {
    if !seen.is_silent() {
        return format!("rank {rank}: {}", whereabouts(mesh, seen, rank));
    }
    let silence = format!("no sign of life from rank {rank} for {} s", seen.silence.as_secs());
    match seen.issued.number {
        0 => format!("{silence}; it has made no call"),
        _ => format!("{silence}; its last call was {}", seen.issued.text(mesh, rank)),
    }
}

/// Where a rank is that others wait for.
fn whereabouts(mesh: &Mesh, seen: &Seen, rank: usize) -> String {
    let (state, called) = (seen.state, seen.issued.number > 0);
    let call = seen.issued.text(mesh, rank);
    match (state, called) {
        (State::Running, true) if seen.waiting => format!("waits in {call}"),
        (State::Running, true) => format!("computing since {call}"),
        (State::Running, false) => "computing, no call so far".to_string(),
        (State::Returned, true) => format!("returned after its call {call}"),
        (State::Returned, false) => "returned without a call".to_string(),
        (State::Failed, true) => format!("failed after its call {call}"),
        (State::Failed, false) => "failed without a call".to_string(),
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
    use crate::table::Table;

    #[test]
    fn whoever_waited_too_long_is_told_how_to_wait_longer() {
        let mesh = Mesh::new(&[("dp", 2)]).unwrap();
        let (seen, limit) = (Table::new(mesh.clone()).look(), Duration::from_secs(1));
        let late = [overdue(&mesh, &seen, 0, limit), unfinished(&mesh, 0, &Issued::nothing(), limit)];
        for error in late {
            let help = error.details().iter().find(|(label, _)| *label == "help");
            assert!(help.is_some_and(|(_, text)| text.contains("--timeout")), "{error}");
        }
    }
}
