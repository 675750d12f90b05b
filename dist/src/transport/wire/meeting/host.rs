//! Rank 0's side of a rendezvous: it waits for all other ranks, compares what they must have alike, and names them to each other.

use super::handshake::{Door, Guest, poll, send};
use super::message::{Answer, Facts, Hello, Place, Report, refusal};
use super::{GRACE, LONGER, Waiting, names, seconds};
use crate::error::{Error, Kind, Result};
use std::io::Read;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How often a rank that waits is told that rank 0 still does.
const NOTE_EVERY: Duration = Duration::from_secs(1);
/// How long rank 0 waits at the end for ranks to take a refusal.
const DRAIN: Duration = Duration::from_millis(200);

/// Another rank that is connected.
#[derive(Debug)]
struct Joiner {
    stream: TcpStream,
    /// The port at which the rank listens, once it is ready and has the facts of rank 0.
    port: Option<u16>,
    is_connected: bool,
}

/// Rank 0 at its listener.
#[derive(Debug)]
pub(super) struct Host {
    door: Door<Hello>,
    own: Hello,
    /// Host and port.
    address: String,
    /// By rank; none for rank 0.
    joiners: Vec<Option<Joiner>>,
    /// Which ranks know that the start has failed.
    told: Vec<bool>,
    /// Why it has.
    failure: Option<Error>,
}

impl Host {
    pub(super) fn new(listener: TcpListener, own: Hello, address: String) -> Host {
        let joiners = (0..own.num_ranks).map(|_| None).collect();
        let told = (0..own.num_ranks).map(|rank| rank == 0).collect();
        Host { door: Door::new(listener), own, address, joiners, told, failure: None }
    }

    /// Waits for all other ranks. Returns the connections to them, by rank.
    ///
    /// # Errors
    /// Why the start fails, which every rank that is connected then knows too.
    pub(super) fn meet(
        &mut self,
        facts: &Facts,
        waiting: &mut Waiting<'_>,
    ) -> Result<Vec<Option<TcpStream>>> {
        match self.gather(facts, waiting).and_then(|()| self.introduce(facts, waiting)) {
            Ok(()) => Ok(self.joiners.drain(..).map(|joiner| joiner.map(|joiner| joiner.stream)).collect()),
            Err(error) => {
                self.refuse(&error);
                self.failure = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Tells every other rank that the start has failed: those that are connected at once, others when they connect within a limit.
    /// The reason is that of [`Host::meet`], else an error of this process.
    pub(super) fn fail(&mut self, error: &Error, limit: Duration) {
        let start = Instant::now();
        let error = self.failure.take().unwrap_or_else(|| refusal(0, error));
        self.refuse(&error);
        let answer = Answer::Refused(error).write();
        let mut late = Vec::new();
        while self.told.contains(&false) && start.elapsed() < limit {
            let Some(Guest { mut stream, message }) = self.door.next(Hello::read) else { continue };
            if self.send_stranger_away(&mut stream, &message) {
                continue;
            }
            let _ = send(&mut stream, &answer);
            let _ = stream.shutdown(Shutdown::Write);
            if let Some(told) = self.told.get_mut(message.rank) {
                *told = true;
            }
            late.push(stream);
        }
        // A connection that is closed with unread bytes may drop what was sent over it.
        let (start, streams) = (Instant::now(), self.joiners.drain(..).flatten().map(|joiner| joiner.stream));
        for mut stream in streams.chain(late) {
            let left = DRAIN.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
            let _ = stream.set_read_timeout(Some(left));
            while stream.read(&mut [0; 1024]).is_ok_and(|count| count > 0) && start.elapsed() < DRAIN {}
        }
    }

    /// Waits until all other ranks are ready.
    fn gather(&mut self, facts: &Facts, waiting: &mut Waiting<'_>) -> Result<()> {
        let mut noted = Instant::now();
        loop {
            let others = || self.joiners.iter().enumerate().skip(1);
            let [mut absent, mut unready] = [Vec::new(), Vec::new()];
            for (rank, joiner) in others() {
                match joiner {
                    None => absent.push(rank),
                    Some(joiner) if joiner.port.is_none() => unready.push(rank),
                    Some(_) => {}
                }
            }
            if absent.is_empty() && unready.is_empty() {
                return Ok(());
            }
            if waiting.is_over() {
                return Err(self.late(&absent, &unready, waiting.limit));
            }
            let at = &self.address;
            waiting.report(|| match absent.is_empty() {
                false => format!("waiting for {} to connect to rank 0 ({at})", names(&absent)),
                true => format!("waiting for {} to get ready, connected to rank 0 ({at})", names(&unready)),
            });
            if let Some(guest) = self.door.next(Hello::read) {
                self.admit(guest)?;
            }
            self.read_reports(facts)?;
            if noted.elapsed() > NOTE_EVERY {
                noted = Instant::now();
                self.note();
            }
        }
    }

    /// Tells ranks that are ready that rank 0 still waits. One that is gone is noticed by the next read.
    fn note(&mut self) {
        let ready = self.joiners.iter_mut().flatten().filter(|joiner| joiner.port.is_some());
        ready.for_each(|joiner| drop(send(&mut joiner.stream, &Answer::Noted.write())));
    }

    /// Sends a process of another run away; whether it is one.
    fn send_stranger_away(&self, stream: &mut TcpStream, hello: &Hello) -> bool {
        let (rank, own, at) = (hello.rank, &self.own.run, &self.address);
        let is_other_rank_zero = rank == 0 && *hello != self.own;
        let why = match hello.run == *own {
            true if is_other_rank_zero => format!("rank 0 of another run listens at {at}"),
            true => return false,
            false => {
                format!("rank {rank} is of the run `{}`, but rank 0 at {at} is of the run `{own}`", hello.run)
            }
        };
        let help = "give each run its own port with SHARDGRAD_PORT";
        let answer = Answer::Refused(Error::new(Kind::Config, why).detail("help", help));
        // Who does not hear it is gone.
        let _ = send(stream, &answer.write());
        true
    }

    /// Takes a rank in, or sends a process of another run away.
    ///
    /// # Errors
    /// Why the start fails for all ranks: a rank of this run that is started with another count, by another version, or twice.
    fn admit(&mut self, guest: Guest<Hello>) -> Result<()> {
        let Guest { mut stream, message } = guest;
        if self.send_stranger_away(&mut stream, &message) {
            return Ok(());
        }
        let Hello { rank, ref version, num_ranks, .. } = message;
        let (own, count) = (&self.own.version, self.own.num_ranks);
        let (why, help) = if version != own {
            let why = format!(
                "ranks run different versions of shardgrad: {own} on rank 0, {version} on rank {rank}"
            );
            (why, "start the same program on all machines")
        } else if num_ranks != count {
            let why = format!(
                "ranks were started with different counts: {count} on rank 0, {num_ranks} on rank {rank}"
            );
            (why, "give every process the same number of ranks (WORLD_SIZE)")
        } else if self.joiners.get(rank).is_none_or(Option::is_some) || rank == 0 {
            let why = format!("two processes were started as rank {rank}");
            (why, "give each process a rank of its own (RANK), and end processes of earlier runs")
        } else {
            // Who does not hear it is gone, which the next read tells.
            let _ = send(&mut stream, &Answer::Noted.write());
            self.joiners[rank] = Some(Joiner { stream, port: None, is_connected: false });
            return Ok(());
        };
        let error = Error::new(Kind::Config, why);
        let error = error.detail("address", format!("of this rank {rank}: {}", address_of(&stream)));
        let error = error.detail("help", help);
        let _ = send(&mut stream, &Answer::Refused(error.clone()).write());
        let _ = stream.shutdown(Shutdown::Write);
        if let Some(told) = self.told.get_mut(rank).filter(|_| self.joiners[rank].is_none()) {
            *told = true;
        }
        Err(error)
    }

    /// Reads what ranks have sent by now.
    ///
    /// # Errors
    /// Why the start fails: a rank that has ended, that cannot take part, or whose facts differ.
    fn read_reports(&mut self, facts: &Facts) -> Result<()> {
        for (rank, joiner) in self.joiners.iter_mut().enumerate() {
            let Some(joiner) = joiner else { continue };
            let bytes = match poll(&mut joiner.stream, Duration::ZERO) {
                Ok(None) => continue,
                Ok(Some(bytes)) => bytes,
                Err(reason) => return Err(ended(rank).detail("reason", reason)),
            };
            match Report::read(&bytes) {
                Some(Report::Ready(theirs, port)) if joiner.port.is_none() => {
                    if let Some(difference) = facts.difference(rank, &theirs) {
                        let at = format!("of rank {rank}: {}", address_of(&joiner.stream));
                        return Err(Error::new(Kind::Config, difference)
                            .detail("address", at)
                            .detail("help", "start every rank with the same program, options and files"));
                    }
                    joiner.port = Some(port);
                }
                Some(Report::Connected) => joiner.is_connected = true,
                Some(Report::Failed(error)) => return Err(refusal(rank, &error)),
                _ => {
                    let why = format!("rank {rank} sent a malformed message while ranks connected");
                    return Err(Error::new(Kind::PeerLost, why));
                }
            }
        }
        Ok(())
    }

    /// Tells each rank where the others listen, and waits until all are connected to each other.
    fn introduce(&mut self, facts: &Facts, waiting: &Waiting<'_>) -> Result<()> {
        let place = |joiner: &Option<Joiner>| {
            let Some(joiner) = joiner else { return Ok((String::new(), 0)) };
            let ip = joiner.stream.peer_addr()?.ip().to_canonical();
            let host = if ip.is_loopback() { String::new() } else { ip.to_string() };
            Ok((host, joiner.port.unwrap_or_default()))
        };
        let places = self.joiners.iter().map(place).collect::<Result<Vec<Place>>>()?;
        self.tell_all(&Answer::Welcome(secret(), places))?;
        let (start, limit) = (Instant::now(), waiting.left().max(GRACE));
        loop {
            let others = self.joiners.iter().enumerate().filter_map(|(rank, j)| Some((rank, j.as_ref()?)));
            let missing: Vec<usize> = others.filter(|(_, j)| !j.is_connected).map(|(rank, _)| rank).collect();
            if missing.is_empty() {
                return self.tell_all(&Answer::Begin);
            }
            if start.elapsed() > limit {
                let (names, limit) = (names(&missing), seconds(limit));
                let why = format!("{names} did not connect to the other ranks within {limit}");
                return Err(Error::new(Kind::Timeout, why).detail("help", LONGER));
            }
            if let Some(guest) = self.door.next(Hello::read) {
                self.admit(guest)?;
            }
            self.read_reports(facts)?;
        }
    }

    fn tell_all(&mut self, answer: &Answer) -> Result<()> {
        let bytes = answer.write();
        for (rank, joiner) in self.joiners.iter_mut().enumerate() {
            let Some(joiner) = joiner else { continue };
            send(&mut joiner.stream, &bytes).map_err(|e| ended(rank).detail("reason", e.to_string()))?;
        }
        Ok(())
    }

    /// Tells all ranks that are connected that the start has failed, unless they know.
    fn refuse(&mut self, error: &Error) {
        let answer = Answer::Refused(error.clone()).write();
        for (joiner, told) in self.joiners.iter_mut().zip(&mut self.told) {
            let Some(joiner) = joiner else { continue };
            if !std::mem::replace(told, true) {
                // Who does not hear it is gone.
                let _ = send(&mut joiner.stream, &answer);
                let _ = joiner.stream.shutdown(Shutdown::Write);
            }
        }
    }

    /// The error of ranks that did not connect, or were not ready, within a limit.
    fn late(&self, absent: &[usize], unready: &[usize], limit: Duration) -> Error {
        let (at, limit) = (&self.address, seconds(limit));
        let (why, help) = match absent.is_empty() {
            false => (format!("{} did not connect to rank 0 ({at}) within {limit}", names(absent)), LONGER),
            true => (
                format!(
                    "{} connected to rank 0 ({at}), but did not get ready within {limit}",
                    names(unready)
                ),
                "reading data or a model takes long there; raise the limit with --timeout",
            ),
        };
        Error::new(Kind::Timeout, why).detail("help", help)
    }
}

/// The error of a rank whose process has ended.
fn ended(rank: usize) -> Error {
    Error::new(Kind::PeerLost, format!("rank {rank}'s process ended before all ranks had connected"))
}

fn address_of(stream: &TcpStream) -> String {
    stream.peer_addr().map_or("unknown".to_string(), |address| address.ip().to_canonical().to_string())
}

/// A number that no stranger guesses.
fn secret() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}
