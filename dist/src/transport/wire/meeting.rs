//! How the processes of a world find each other.
//!
//! Rank 0 listens at the port that all know. Every other rank listens at a port of its own, comes to rank 0 and says who it is, what
//! program it is and which mesh it was given. When all have come, rank 0 gives each a secret of this meeting and where the others
//! listen; each then goes to those of lower numbers and lets in those of higher ones. Whoever says something else is a stranger and
//! is sent away.

use crate::bytes::{Reading, Writing};
use crate::error::{Error, Kind, Result};
use crate::process::Process;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// What each side says first. The number is that of the frames, which changes with them.
const MAGIC: &[u8; 18] = b"shardgrad ranks 1\n";
/// No greeting and no answer is longer.
const BYTES_MAX: usize = 1 << 20;
/// How long somebody who has come may take to say who it is.
const GREETING: Duration = Duration::from_secs(5);
/// How often a door is looked at, and somebody who is not there yet is called again.
const NAP: Duration = Duration::from_millis(5);
/// How long one attempt to reach somebody lasts.
const ATTEMPT: Duration = Duration::from_secs(2);
/// How much longer than rank 0 the others wait for what it says.
const GRACE: Duration = Duration::from_secs(5);

const LONGER: &str =
    "see that all were started; a longer limit is set with World::timeout (--timeout on the command line)";

/// What all processes of a world are to have alike, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) version: String,
    pub(crate) num_ranks: usize,
    pub(crate) mesh: String,
    /// A number made from the program's file; 0 where it cannot be read, which is compared with nothing.
    pub(crate) program: u64,
}

impl Facts {
    /// What another process has otherwise, as a sentence goes on behind its name.
    fn unlike(&self, other: &Facts) -> Option<String> {
        let Facts { version, num_ranks, mesh, program } = other;
        if *version != self.version {
            return Some(format!("is of version {version} of shardgrad, rank 0 of version {}", self.version));
        }
        if *num_ranks != self.num_ranks {
            return Some(format!("was told of {num_ranks} ranks, rank 0 of {}", self.num_ranks));
        }
        if *mesh != self.mesh {
            return Some(format!("has {mesh}, rank 0 has {}", self.mesh));
        }
        let is_other = *program != self.program && *program != 0 && self.program != 0;
        is_other
            .then(|| "runs another program than rank 0: other bytes of the file that was started".to_string())
    }
}

/// What a process says of itself to rank 0.
#[derive(Clone, Debug)]
struct Greeting {
    rank: usize,
    run: String,
    facts: Facts,
    /// Where it listens.
    port: u16,
}

impl Greeting {
    fn write(&self) -> Vec<u8> {
        let (mut out, facts) = (Writing::default(), &self.facts);
        out.count(self.rank).text(&self.run).number(self.port.into());
        out.text(&facts.version).count(facts.num_ranks).text(&facts.mesh).number(facts.program);
        out.0
    }

    fn read(bytes: &[u8]) -> Option<Greeting> {
        let mut from = Reading(bytes);
        let (rank, run, port) =
            (from.count()?, from.text()?.to_string(), u16::try_from(from.number()?).ok()?);
        let (version, num_ranks) = (from.text()?.to_string(), from.count()?);
        let facts = Facts { version, num_ranks, mesh: from.text()?.to_string(), program: from.number()? };
        Some(Greeting { rank, run, facts, port })
    }
}

/// Where a rank listens: address and port.
type Place = (String, u16);

/// What rank 0 answers.
enum Answer {
    /// The secret of the meeting, and where each rank listens; no address for those on the machine of rank 0.
    Welcome(u64, Vec<Place>),
    Refused(Error),
}

impl Answer {
    fn write(&self) -> Vec<u8> {
        let mut out = Writing::default();
        match self {
            Answer::Welcome(secret, places) => {
                out.number(1).number(*secret).count(places.len());
                for (host, port) in places {
                    out.text(host).number((*port).into());
                }
            }
            Answer::Refused(error) => error.write(out.number(2)),
        }
        out.0
    }

    fn read(bytes: &[u8]) -> Option<Answer> {
        let mut from = Reading(bytes);
        match from.number()? {
            1 => {
                let (secret, count) = (from.number()?, from.count()?);
                let mut place = || Some((from.text()?.to_string(), u16::try_from(from.number()?).ok()?));
                Some(Answer::Welcome(secret, (0..count).map(|_| place()).collect::<Option<_>>()?))
            }
            2 => Some(Answer::Refused(Error::read(&mut from)?)),
            _ => None,
        }
    }
}

/// Somebody who has come and has said something that makes sense here.
struct Guest<T> {
    stream: TcpStream,
    said: T,
}

/// A process on its way to the others.
#[derive(Debug)]
pub(crate) struct Party<'a> {
    process: &'a Process,
    facts: Facts,
    limit: Duration,
    start: Instant,
}

impl<'a> Party<'a> {
    /// Nobody is met yet. All have to come within the limit.
    pub(crate) fn new(process: &'a Process, facts: Facts, limit: Duration) -> Party<'a> {
        Party { process, facts, limit, start: Instant::now() }
    }

    /// Connections to all other ranks, by their numbers.
    ///
    /// # Errors
    /// `Kind::Timeout` naming the ranks that did not come; `Kind::Config` for one that has another version, program, mesh or count of
    /// ranks; `Kind::Io` for a port that cannot be listened at, and where somebody cannot be reached.
    pub(crate) fn meet(&self) -> Result<Vec<Option<TcpStream>>> {
        match self.process.rank() {
            _ if self.process.num_ranks() == 1 => Ok(vec![None]),
            0 => self.host(),
            _ => self.visit(),
        }
    }

    fn left(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    /// The addresses at which others can reach this machine, the better first: none but its own, where that of rank 0 is one.
    fn addresses(&self) -> [IpAddr; 2] {
        let any = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
        match self.process.host() {
            "localhost" => [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
            // The second version takes connections of the first too; a machine may have the one or the other.
            host => host.parse().ok().filter(IpAddr::is_loopback).map_or(any, |ip| [ip, ip]),
        }
    }

    /// Listens where the others can reach this machine.
    fn listen(&self, port: u16) -> Result<TcpListener> {
        let [first, second] = self.addresses();
        let found = TcpListener::bind(SocketAddr::new(first, port)).or_else(|e| match e.kind() {
            ErrorKind::AddrInUse | ErrorKind::PermissionDenied => Err(e),
            _ => TcpListener::bind(SocketAddr::new(second, port)),
        });
        let listener = found.map_err(|e| {
            let why = format!("rank {} cannot listen at port {port}: {e}", self.process.rank());
            let help = "give all processes another port with SHARDGRAD_PORT";
            Error::new(Kind::Io, why).detail("help", help)
        })?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// Rank 0: waits for all others, compares what they say, and tells them of each other.
    fn host(&self) -> Result<Vec<Option<TcpStream>>> {
        let listener = self.listen(self.process.port())?;
        let mut guests: Vec<Option<Guest<Greeting>>> = (0..self.process.num_ranks()).map(|_| None).collect();
        let (door, came) = channel();
        let outcome = loop {
            let missing: Vec<usize> = (1..guests.len()).filter(|rank| guests[*rank].is_none()).collect();
            if missing.is_empty() {
                break Ok(());
            }
            if self.left().is_zero() {
                break Err(self.absent(&missing));
            }
            open(&listener, &door, Greeting::read);
            let Some(guest) = next(&came) else { continue };
            if let Err(refused) = self.let_in(guest, &mut guests) {
                break Err(refused);
            }
        };
        match outcome {
            Ok(()) => self.welcome(guests),
            Err(error) => {
                let answer = Answer::Refused(error.clone()).write();
                guests.into_iter().flatten().for_each(|mut guest| drop(say(&mut guest.stream, &answer)));
                Err(error)
            }
        }
    }

    /// Takes in a guest, or sends it away.
    ///
    /// # Errors
    /// Why nobody can go on: one of this run is unlike.
    fn let_in(&self, mut guest: Guest<Greeting>, guests: &mut [Option<Guest<Greeting>>]) -> Result<()> {
        let Greeting { rank, run, facts, .. } = &guest.said;
        let (rank, of) =
            (*rank, guest.stream.peer_addr().map_or(String::new(), |a| format!(" of {}", a.ip())));
        let refused = |why: String| Error::new(Kind::Config, why);
        if run != self.process.run() {
            let own = self.process.run();
            let why = format!("rank {rank}{of} is of the run `{run}`, what listens here is of `{own}`");
            let error = refused(why).detail("help", "give each run a port of its own with SHARDGRAD_PORT");
            send_away(&mut guest.stream, error);
            return Ok(());
        }
        if let Some(unlike) = self.facts.unlike(facts) {
            let error = refused(format!("rank {rank}{of} {unlike}"))
                .detail("help", "start one program with the same options on all machines");
            send_away(&mut guest.stream, error.clone());
            return Err(error);
        }
        match guests.get(rank) {
            Some(None) if rank > 0 => guests[rank] = Some(guest),
            Some(_) => {
                let why = format!("there are two processes with the number {rank}, one{of}");
                let help =
                    "see that RANK is another one for each, and that no process of an earlier run is left";
                send_away(&mut guest.stream, refused(why).detail("help", help));
            }
            None => send_away(&mut guest.stream, refused(format!("there is no rank {rank}"))),
        }
        Ok(())
    }

    /// The error of ranks that did not come to rank 0.
    fn absent(&self, missing: &[usize]) -> Error {
        let names: Vec<String> = missing.iter().map(usize::to_string).collect();
        let many = if missing.len() > 1 { "ranks" } else { "rank" };
        let (names, limit, port) = (names.join(", "), self.limit, self.process.port());
        let why = format!("{many} {names} did not come to rank 0 at port {port} within {limit:?}");
        let at = format!("{}:{port}", self.process.host());
        Error::new(Kind::Timeout, why).detail("rank 0", at).detail("help", LONGER)
    }

    fn welcome(&self, guests: Vec<Option<Guest<Greeting>>>) -> Result<Vec<Option<TcpStream>>> {
        let place = |guest: &Option<Guest<Greeting>>| {
            let Some(Guest { stream, said }) = guest else { return Ok((String::new(), 0)) };
            let ip = stream.peer_addr()?.ip().to_canonical();
            Ok((if ip.is_loopback() { String::new() } else { ip.to_string() }, said.port))
        };
        let places = guests.iter().map(place).collect::<Result<Vec<_>>>()?;
        let answer = Answer::Welcome(secret(), places).write();
        let mut streams = vec![None];
        for (rank, guest) in guests.into_iter().enumerate().skip(1) {
            let mut stream = guest.expect("all have come").stream;
            say(&mut stream, &answer).map_err(|e| {
                Error::new(Kind::PeerLost, format!("rank {rank} was lost before all had come: {e}"))
            })?;
            streams.push(Some(stream));
        }
        Ok(streams)
    }

    /// Any other rank: goes to rank 0, then to those of lower numbers, and lets those of higher numbers in.
    fn visit(&self) -> Result<Vec<Option<TcpStream>>> {
        let listener = self.listen(0)?;
        let port = listener.local_addr()?.port();
        let me = self.process.rank();
        let greeting = Greeting { rank: me, run: self.process.run().into(), facts: self.facts.clone(), port };
        let (first, secret, places) = self.greet(&greeting.write())?;
        let zero = first.peer_addr()?.ip();
        let mut streams: Vec<Option<TcpStream>> = (0..places.len()).map(|_| None).collect();
        streams[0] = Some(first);
        let mut pass = Writing::default();
        pass.number(secret).count(me);
        for (rank, (host, port)) in places.iter().enumerate().take(me).skip(1) {
            // Those that rank 0 reaches on its own machine are reached there.
            let ip = if host.is_empty() { Some(zero) } else { host.parse().ok() };
            let stream = ip.ok_or_else(|| "it has no address".to_string());
            let stream = stream.and_then(|ip| self.reach(&[SocketAddr::new(ip, *port)], &pass.0));
            streams[rank] = Some(stream.map_err(|e| self.unreached(rank, host, *port, &e))?);
        }
        let (door, came) = channel();
        loop {
            let missing: Vec<usize> =
                (me + 1..places.len()).filter(|rank| streams[*rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(streams);
            }
            if self.left() + GRACE == GRACE {
                let e = format!("none of {missing:?} has come within {:?}", self.limit);
                return Err(self.unreached(me, "this machine", port, &e));
            }
            open(&listener, &door, move |bytes| {
                let mut from = Reading(bytes);
                Some(from.number()?).filter(|told| *told == secret)?;
                from.count()
            });
            if let Some(Guest { stream, said }) = next(&came)
                && missing.contains(&said)
            {
                streams[said] = Some(stream);
            }
        }
    }

    fn unreached(&self, rank: usize, host: &str, port: u16, why: &str) -> Error {
        let me = self.process.rank();
        let host = if host.is_empty() { self.process.host() } else { host };
        let what = match rank == me {
            true => format!("rank {me} was not reached by ranks of higher numbers: {why}"),
            false => format!("rank {me} cannot reach rank {rank} at {host}:{port}: {why}"),
        };
        let help =
            "every machine must reach every other one at any port above 1023; see to firewalls and names";
        Error::new(Kind::Io, what).detail("help", help)
    }

    /// Says to rank 0 who this is, as soon as it listens, and waits for its answer.
    fn greet(&self, greeting: &[u8]) -> Result<(TcpStream, u64, Vec<Place>)> {
        let (host, port) = (self.process.host(), self.process.port());
        let mut why = "it was not tried".to_string();
        while !self.left().is_zero() {
            let found = (host, port).to_socket_addrs().map_err(|e| e.to_string());
            let addresses: Vec<SocketAddr> = found.map_or_else(
                |e| {
                    why = e;
                    Vec::new()
                },
                Iterator::collect,
            );
            match self.reach(&addresses, greeting) {
                Err(e) if addresses.is_empty() => drop(e),
                Err(e) => why = e,
                Ok(mut stream) => match hear(&mut stream, self.left() + GRACE) {
                    Ok(bytes) => match Answer::read(&bytes) {
                        Some(Answer::Welcome(secret, places)) if places.len() == self.process.num_ranks() => {
                            return Ok((stream, secret, places));
                        }
                        Some(Answer::Refused(error)) => return Err(error),
                        _ => why = "what answers makes no sense".to_string(),
                    },
                    Err(e) => why = e,
                },
            }
            std::thread::sleep(NAP);
        }
        let me = self.process.rank();
        let text = format!("rank {me} did not meet rank 0 at {host}:{port} within {:?}: {why}", self.limit);
        let help = "see that rank 0 runs on the machine that MASTER_ADDR names, and that this port of it can be reached";
        Err(Error::new(Kind::Timeout, text).detail("help", help).detail("help", LONGER))
    }

    /// Connects to one of some addresses and says something.
    fn reach(&self, addresses: &[SocketAddr], said: &[u8]) -> Result<TcpStream, String> {
        let mut why = "there is no address".to_string();
        for address in addresses {
            match TcpStream::connect_timeout(address, ATTEMPT) {
                Ok(mut stream) => match say(&mut stream, said) {
                    Ok(()) => return Ok(stream),
                    Err(e) => why = e.to_string(),
                },
                Err(e) => why = e.to_string(),
            }
        }
        Err(why)
    }
}

/// A number that no stranger guesses.
fn secret() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// Says why somebody is sent away.
fn send_away(stream: &mut TcpStream, error: Error) {
    // Who does not hear it is gone.
    let _ = say(stream, &Answer::Refused(error).write());
}

/// Lets in all who stand at the door: a thread for each hears what it says, so that one that says nothing holds nobody up.
fn open<T: Send + 'static>(
    listener: &TcpListener,
    door: &Sender<Guest<T>>,
    read: impl Fn(&[u8]) -> Option<T> + Clone + Send + 'static,
) {
    while let Ok((mut stream, _)) = listener.accept() {
        let (door, read) = (door.clone(), read.clone());
        // Where there is no thread to be had, it comes again.
        let _ = std::thread::Builder::new().name("door".to_string()).spawn(move || {
            stream.set_nonblocking(false).ok()?;
            let said = read(&hear(&mut stream, GREETING).ok()?)?;
            door.send(Guest { stream, said }).ok()
        });
    }
}

/// Who has said something by now, or does so soon.
fn next<T>(came: &Receiver<Guest<T>>) -> Option<Guest<T>> {
    came.recv_timeout(NAP).ok()
}

fn say(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.set_write_timeout(Some(GREETING))?;
    let len = (bytes.len() as u64).to_le_bytes();
    stream.write_all(&[MAGIC.as_slice(), &len, bytes].concat())
}

/// What the other end says first, within a limit.
fn hear(stream: &mut TcpStream, limit: Duration) -> Result<Vec<u8>, String> {
    let start = Instant::now();
    let mut fill = |part: &mut [u8]| {
        let mut done = 0;
        while done < part.len() {
            let left = limit.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
            stream.set_read_timeout(Some(left)).map_err(|e| e.to_string())?;
            match stream.read(&mut part[done..]) {
                Ok(0) => return Err("the connection was closed without an answer".to_string()),
                Ok(count) => done += count,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(format!("it said nothing for {limit:?}"));
                }
                Err(e) => return Err(e.to_string()),
            }
        }
        Ok(())
    };
    let stranger = || "what answers there is no rank of shardgrad, or one of another version".to_string();
    let (mut magic, mut len) = ([0; MAGIC.len()], [0; 8]);
    fill(&mut magic)?;
    if magic != *MAGIC {
        return Err(stranger());
    }
    fill(&mut len)?;
    let len = usize::try_from(u64::from_le_bytes(len)).ok().filter(|len| *len <= BYTES_MAX);
    let mut bytes = vec![0; len.ok_or_else(stranger)?];
    fill(&mut bytes)?;
    Ok(bytes)
}
