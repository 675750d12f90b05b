//! The rendezvous host, rank 0: waits for all other ranks, compares their configurations, and sends them each other's addresses.

use super::super::handshake::random_bytes;
use super::super::link::Link;
use super::super::listener::{Incoming, RankListener};
use super::message::{ClientMessage, Hello, HostMessage, ListenAddress, RankGpu, WorldConfig, refusal};
use super::token_file::LeftFile;
use super::{GRACE, JoinWait, POLL_INTERVAL, RAISE_TIMEOUT, names, seconds};
use crate::error::{Error, Kind, Result};
use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// The interval at which rank 0 reports to ready ranks that the rendezvous is still waiting.
const KEEP_WAITING_EVERY: Duration = Duration::from_secs(1);
/// How long rank 0 waits at the end, at most, for ranks to read a refusal and to close their connections.
const DRAIN: Duration = Duration::from_secs(2);

/// A rank that is connected to rank 0.
#[derive(Debug)]
struct ConnectedRank {
    link: Link,
    /// The port on which the rank listens, once it is ready and its configuration has been compared.
    port: Option<u16>,
    is_connected: bool,
}

/// Rank 0 in a rendezvous.
#[derive(Debug)]
pub(super) struct RendezvousHost {
    listener: RankListener,
    /// The file with the token, until all ranks are connected or the start has failed for all.
    _left_file: Option<LeftFile>,
    own: Hello,
    /// Host and port.
    address: String,
    /// By rank; `None` for rank 0.
    ranks: Vec<Option<ConnectedRank>>,
    /// Ranks that are ready, and the GPUs that they share with no other rank.
    gpus: Vec<(usize, RankGpu)>,
    /// Connections that were refused: closed after the other end has read why.
    refused: Vec<TcpStream>,
    /// Which ranks know that the start has failed, by rank.
    is_informed: Vec<bool>,
    /// The error with which the start has failed.
    failure: Option<Error>,
}

impl RendezvousHost {
    pub(super) fn new(
        listener: RankListener,
        left_file: Option<LeftFile>,
        own: Hello,
        address: String,
    ) -> RendezvousHost {
        let ranks = (0..own.num_ranks).map(|_| None).collect();
        let is_informed = (0..own.num_ranks).map(|rank| rank == 0).collect();
        RendezvousHost {
            listener,
            _left_file: left_file,
            own,
            address,
            ranks,
            gpus: Vec::new(),
            refused: Vec::new(),
            is_informed,
            failure: None,
        }
    }

    /// Waits for all other ranks and connects them. Returns the connections by rank.
    ///
    /// # Errors
    /// The reason why the start fails; it is also sent to every connected rank.
    pub(super) fn connect(
        &mut self,
        config: &WorldConfig,
        wait: &mut JoinWait<'_>,
    ) -> Result<Vec<Option<Link>>> {
        self.gpus.extend(config.gpu.clone().map(|gpu| (0, gpu)));
        match self.wait_for_ranks(config, wait).and_then(|()| self.connect_ranks(config, wait)) {
            Ok(()) => {
                let protection = self.own.protection;
                let link = |peer: ConnectedRank| peer.link.protected(protection);
                Ok(self.ranks.drain(..).map(|peer| peer.map(link)).collect())
            }
            Err(error) => {
                self.refuse_all(&error);
                self.failure = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Sends the failure of the start to every other rank: to connected ranks at once, to others if they connect within `limit`. The
    /// reason is the error of [`RendezvousHost::connect`], else `error`, an error of this process.
    pub(super) fn fail(&mut self, error: &Error, limit: Duration) {
        let start = Instant::now();
        let error = self.failure.take().unwrap_or_else(|| refusal(0, error));
        self.refuse_all(&error);
        let answer = HostMessage::Refused(error).encode();
        let mut refused = std::mem::take(&mut self.refused);
        while self.is_informed.contains(&false) && start.elapsed() < limit {
            let Some((mut link, hello)) = self.next_rank() else { continue };
            if self.refuse_other_run(&mut link, &hello) {
                continue;
            }
            let _ = link.send(&answer);
            let _ = link.stream.shutdown(Shutdown::Write);
            if let Some(is_informed) = self.is_informed.get_mut(hello.rank) {
                *is_informed = true;
            }
            refused.push(link.stream);
        }
        // Read remaining bytes: closing a connection with unread data may discard data sent over it.
        let (start, streams) = (Instant::now(), self.ranks.drain(..).flatten().map(|peer| peer.link.stream));
        for mut stream in streams.chain(refused) {
            let left = DRAIN.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
            let _ = stream.set_read_timeout(Some(left));
            while stream.read(&mut [0; 1024]).is_ok_and(|count| count > 0) && start.elapsed() < DRAIN {}
        }
    }

    /// The next rank that has connected and proved that it has the token.
    fn next_rank(&self) -> Option<(Link, Hello)> {
        let Incoming { link, hello } = self.listener.next(POLL_INTERVAL)?;
        Some((link, Hello::decode(&hello)?))
    }

    /// Waits until all other ranks are connected and ready.
    fn wait_for_ranks(&mut self, config: &WorldConfig, wait: &mut JoinWait<'_>) -> Result<()> {
        let mut last_sent = Instant::now();
        loop {
            let others = || self.ranks.iter().enumerate().skip(1);
            let [mut absent, mut unready] = [Vec::new(), Vec::new()];
            for (rank, peer) in others() {
                match peer {
                    None => absent.push(rank),
                    Some(peer) if peer.port.is_none() => unready.push(rank),
                    Some(_) => {}
                }
            }
            if absent.is_empty() && unready.is_empty() {
                return Ok(());
            }
            if wait.is_over() {
                return Err(self.timeout_error(&absent, &unready, wait.limit));
            }
            let at = &self.address;
            wait.report(|| match absent.is_empty() {
                false => format!("waiting for {} to connect to rank 0 ({at})", names(&absent)),
                true => format!("waiting for {} to get ready, connected to rank 0 ({at})", names(&unready)),
            });
            if let Some((link, hello)) = self.next_rank() {
                self.admit(link, &hello)?;
            }
            self.read_reports(config)?;
            if last_sent.elapsed() > KEEP_WAITING_EVERY {
                last_sent = Instant::now();
                self.send_keep_waiting();
            }
        }
    }

    /// Tells ready ranks that rank 0 is still waiting. A lost connection is noticed by the next read.
    fn send_keep_waiting(&mut self) {
        let ready = self.ranks.iter_mut().flatten().filter(|peer| peer.port.is_some());
        ready.for_each(|peer| drop(peer.link.send(&HostMessage::KeepWaiting.encode())));
    }

    /// Refuses a process of another run. Returns whether it is one.
    fn refuse_other_run(&self, link: &mut Link, hello: &Hello) -> bool {
        let (rank, own, at) = (hello.rank, &self.own.run, &self.address);
        let is_other_rank_zero = rank == 0 && *hello != self.own;
        let why = match hello.run == *own {
            true if is_other_rank_zero => format!("rank 0 of another run listens at {at}"),
            true => return false,
            false => {
                format!(
                    "rank {rank} belongs to run `{}`, but rank 0 at {at} belongs to run `{own}`",
                    hello.run
                )
            }
        };
        let help = "give each run its own port with SHARDGRAD_PORT";
        let answer = HostMessage::Refused(Error::new(Kind::Config, why).detail("help", help));
        // A process that cannot be reached has ended.
        let _ = link.send(&answer.encode());
        true
    }

    /// Registers a rank, or refuses a process of another run.
    ///
    /// # Errors
    /// The reason why the start fails: a rank of this run with another version or number of ranks, or two processes with one rank.
    fn admit(&mut self, mut link: Link, hello: &Hello) -> Result<()> {
        if self.refuse_other_run(&mut link, hello) {
            return Ok(());
        }
        let Hello { rank, ref version, num_ranks, protection, .. } = *hello;
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
        } else if protection != self.own.protection {
            let (own, other) = (self.own.protection.name(), protection.name());
            let why = format!(
                "ranks protect their connections differently: {own} on rank 0, {other} on rank {rank}"
            );
            (why, "give every process the same --encrypt, and the same number of local ranks")
        } else if self.ranks.get(rank).is_none_or(Option::is_some) || rank == 0 {
            let why = format!("two processes were started as rank {rank}");
            (why, "give each process a rank of its own (RANK), and stop processes of earlier runs")
        } else {
            // The next read notices a process that cannot be reached.
            let _ = link.send(&HostMessage::KeepWaiting.encode());
            self.ranks[rank] = Some(ConnectedRank { link, port: None, is_connected: false });
            return Ok(());
        };
        let error = Error::new(Kind::Config, why);
        let error = error.detail("address", format!("of this rank {rank}: {}", address_of(&link)));
        let error = error.detail("help", help);
        let _ = link.send(&HostMessage::Refused(error.clone()).encode());
        let _ = link.stream.shutdown(Shutdown::Write);
        if let Some(is_informed) = self.is_informed.get_mut(rank).filter(|_| self.ranks[rank].is_none()) {
            *is_informed = true;
        }
        self.refused.push(link.stream);
        Err(error)
    }

    /// Reads the messages that have arrived from ranks.
    ///
    /// # Errors
    /// The reason why the start fails: a rank that has ended, has reported an error, or has another configuration.
    fn read_reports(&mut self, config: &WorldConfig) -> Result<()> {
        for (rank, peer) in self.ranks.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            let bytes = match peer.link.poll(Duration::ZERO) {
                Ok(None) => continue,
                Ok(Some(bytes)) => bytes,
                Err(reason) => return Err(process_ended(rank).detail("reason", reason)),
            };
            match ClientMessage::decode(&bytes) {
                Some(ClientMessage::Ready(theirs, port)) if peer.port.is_none() => {
                    if let Some(difference) = config.difference(rank, &theirs) {
                        let at = format!("of rank {rank}: {}", address_of(&peer.link));
                        return Err(Error::new(Kind::Config, difference)
                            .detail("address", at)
                            .detail("help", "start every rank with the same program, options and files"));
                    }
                    if let Some(gpu) = theirs.gpu {
                        if let Some((other, _)) = self.gpus.iter().find(|(_, held)| held.uuid == gpu.uuid) {
                            return Err(same_gpu(*other, rank, &gpu));
                        }
                        self.gpus.push((rank, gpu));
                    }
                    peer.port = Some(port);
                }
                Some(ClientMessage::Connected) => peer.is_connected = true,
                Some(ClientMessage::Failed(error)) => return Err(refusal(rank, &error)),
                _ => {
                    let why = format!("rank {rank} sent a malformed message while ranks connected");
                    return Err(Error::new(Kind::PeerLost, why));
                }
            }
        }
        Ok(())
    }

    /// Sends each rank the addresses of all ranks, and waits until all are connected to each other.
    fn connect_ranks(&mut self, config: &WorldConfig, wait: &JoinWait<'_>) -> Result<()> {
        let address = |peer: &Option<ConnectedRank>| {
            let Some(peer) = peer else { return Ok((String::new(), 0)) };
            Ok((peer.link.peer_ip()?.to_string(), peer.port.unwrap_or_default()))
        };
        let addresses = self.ranks.iter().map(address).collect::<Result<Vec<ListenAddress>>>()?;
        self.send_to_all(&HostMessage::Peers(random_bytes(), addresses))?;
        let (start, limit) = (Instant::now(), wait.remaining().max(GRACE));
        loop {
            let others = self.ranks.iter().enumerate().filter_map(|(rank, j)| Some((rank, j.as_ref()?)));
            let missing: Vec<usize> = others.filter(|(_, j)| !j.is_connected).map(|(rank, _)| rank).collect();
            if missing.is_empty() {
                return self.send_to_all(&HostMessage::Start);
            }
            if start.elapsed() > limit {
                let (names, limit) = (names(&missing), seconds(limit));
                let why = format!("{names} did not connect to the other ranks within {limit}");
                return Err(Error::new(Kind::Timeout, why).detail("help", RAISE_TIMEOUT));
            }
            if let Some((link, hello)) = self.next_rank() {
                self.admit(link, &hello)?;
            }
            self.read_reports(config)?;
        }
    }

    fn send_to_all(&mut self, answer: &HostMessage) -> Result<()> {
        let bytes = answer.encode();
        for (rank, peer) in self.ranks.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            peer.link.send(&bytes).map_err(|e| process_ended(rank).detail("reason", e.to_string()))?;
        }
        Ok(())
    }

    /// Sends the failure of the start to all connected ranks that do not know it yet.
    fn refuse_all(&mut self, error: &Error) {
        let answer = HostMessage::Refused(error.clone()).encode();
        for (peer, is_informed) in self.ranks.iter_mut().zip(&mut self.is_informed) {
            let Some(peer) = peer else { continue };
            if !std::mem::replace(is_informed, true) {
                // A process that cannot be reached has ended.
                let _ = peer.link.send(&answer);
                let _ = peer.link.stream.shutdown(Shutdown::Write);
            }
        }
    }

    /// The error of a timeout: ranks that did not connect, or did not get ready.
    fn timeout_error(&self, absent: &[usize], unready: &[usize], limit: Duration) -> Error {
        let (at, limit) = (&self.address, seconds(limit));
        let (why, help) = match absent.is_empty() {
            false => {
                (format!("{} did not connect to rank 0 ({at}) within {limit}", names(absent)), RAISE_TIMEOUT)
            }
            true => (
                format!(
                    "{} connected to rank 0 ({at}), but did not get ready within {limit}",
                    names(unready)
                ),
                "reading data or a model takes long there; raise the timeout with --timeout",
            ),
        };
        let error = Error::new(Kind::Timeout, why).detail("help", help);
        match self.listener.num_rejected() {
            0 => error,
            count => {
                let rejected = format!("{count} connections without the token of this run");
                error.detail("rejected", rejected)
            }
        }
    }
}

/// The error of a rank whose process has ended before all ranks were connected.
fn process_ended(rank: usize) -> Error {
    Error::new(Kind::PeerLost, format!("rank {rank}'s process ended before all ranks had connected"))
}

/// The error of two ranks that have the same GPU.
fn same_gpu(rank: usize, other: usize, gpu: &RankGpu) -> Error {
    let RankGpu { uuid, host } = gpu;
    let (rank, other) = (rank.min(other), rank.max(other));
    let why = format!("ranks {rank} and {other} have the same GPU, {uuid} of host {host}");
    let help = "let each process see all GPUs of its machine, or another one (CUDA_VISIBLE_DEVICES); to share a GPU, name it, as in --device cuda:0 (World::share_gpu)";
    Error::new(Kind::Config, why).detail("help", help)
}

fn address_of(link: &Link) -> String {
    link.peer_ip().map_or("unknown".to_string(), |ip| ip.to_string())
}
