//! The texts of everything that can go wrong between ranks.

use crate::call::{Issued, ORIGIN, Op};
use crate::error::{Error, Kind};
use crate::mesh::Mesh;
use crate::table::{Failure, Seen, State};
use std::time::Duration;

const LONGER: &str = "a longer limit is set with World::timeout (--timeout on the command line)";
const SAME_CALLS: &str = "all ranks of a group make the same calls in the same order";
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
        error = error.detail("given", format!("{}: {told}", list(ranks)));
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
    for rank in absent {
        error = error.detail("absent", format!("rank {rank}: {}", whereabouts(mesh, &seen[rank], rank)));
    }
    error.detail("help", LONGER)
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
pub(crate) fn not_taken(mesh: &Mesh, rank: usize, to: usize, call: &Issued, limit: Duration) -> Error {
    let call = call.text(mesh, rank);
    Error::new(
        Kind::Timeout,
        format!("rank {rank} waited more than {limit:?} for rank {to} to take what it sends in {call}"),
    )
    .detail("rank", mesh.describe(rank))
    .detail("help", LONGER)
}

/// The error of a message that nobody has received at the end.
pub(crate) fn unread(mesh: &Mesh, to: usize, (from, issued): (usize, &Issued)) -> Error {
    let call = issued.text(mesh, from);
    Error::new(
        Kind::Collective,
        format!("rank {from} called {call}, and rank {to} returned without receiving it"),
    )
}

/// The error of a rank that has to stop because of another one. `doing` continues `while rank 3 ...`.
pub(crate) fn lost(mesh: &Mesh, failure: &Failure, rank: usize, doing: &str) -> Error {
    Error::new(Kind::PeerLost, format!("rank {} failed while rank {rank} {doing}", failure.origin))
        .detail("cause", failure.error.to_string())
        .detail("rank", mesh.describe(rank))
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
