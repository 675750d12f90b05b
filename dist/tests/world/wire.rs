//! The wire format of a rendezvous, implemented a second time: a rank that a test plays by hand, and what strangers send.

use shardgrad_dist::{Mesh, Process, Token};
use snow::{Builder, HandshakeState, StatelessTransportState};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// The token of the runs of these tests.
pub(crate) const TOKEN: &str = "a token of tests: 0123456789abcdef";
/// The token of processes that connect without one.
pub(crate) const INSECURE: &str = "insecure";
/// The bytes of a first message or its reply, and of a record that names a rank.
pub(crate) const HANDSHAKE_BYTES: usize = 48;
const HELLO_BYTES: usize = 512;
const TAG_BYTES: usize = 16;

/// Rank `rank` of `count` with the token, with the rendezvous at a port of this machine.
pub(crate) fn process(rank: usize, count: usize, port: u16) -> Process {
    Process::new(rank, count, "127.0.0.1", port).unwrap().token(Token::Text(TOKEN.to_string()))
}

pub(crate) fn number(n: u64) -> Vec<u8> {
    n.to_le_bytes().to_vec()
}

pub(crate) fn text(text: &str) -> Vec<u8> {
    [number(text.len() as u64), text.as_bytes().to_vec()].concat()
}

/// Connects to a port of this machine as soon as something listens there.
pub(crate) fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(2)),
        }
    }
}

fn handshake(token: &str, is_initiator: bool) -> HandshakeState {
    let key = blake3::derive_key("shardgrad 2026-11-24 token of a run", token.as_bytes());
    let builder = Builder::new("Noise_NNpsk0_25519_AESGCM_BLAKE2s".parse().unwrap());
    let builder = builder.psk(0, &key).unwrap().prologue(b"shardgrad rendezvous").unwrap();
    if is_initiator { builder.build_initiator() } else { builder.build_responder() }.unwrap()
}

/// The first message of a process with a token.
pub(crate) fn first_message(token: &str) -> Vec<u8> {
    let mut message = vec![0; HANDSHAKE_BYTES];
    handshake(token, true).write_message(&[], &mut message).unwrap();
    message
}

/// The end of a connection that a test plays.
pub(crate) struct Peer {
    pub(crate) stream: TcpStream,
    cipher: StatelessTransportState,
    num_sent: u64,
    num_received: u64,
}

impl Peer {
    /// Connects to rank 0 and names a rank. `protection` is 0 without a token, 1 for authenticated links, 2 for encrypted ones.
    pub(crate) fn hello(port: u16, rank: u64, count: u64, token: &str, protection: u64) -> Peer {
        let mut stream = connect(port);
        let mut state = handshake(token, true);
        let (mut message, mut reply) = ([0; HANDSHAKE_BYTES], [0; HANDSHAKE_BYTES]);
        state.write_message(&[], &mut message).unwrap();
        stream.write_all(&message).unwrap();
        stream.read_exact(&mut reply).unwrap();
        state.read_message(&reply, &mut []).unwrap();
        let cipher = state.into_stateless_transport_mode().unwrap();
        let mut peer = Peer { stream, cipher, num_sent: 0, num_received: 0 };
        let own = [number(1), number(rank), text(""), text(env!("CARGO_PKG_VERSION")), number(count)];
        let mut hello = [&own.concat()[..], &number(protection)].concat();
        hello.resize(HELLO_BYTES, 0);
        peer.send_record(&hello);
        peer
    }

    /// Accepts a connection as rank 0 does, up to the record that names a rank.
    pub(crate) fn accept(listener: &TcpListener) -> Peer {
        let (mut stream, _) = listener.accept().unwrap();
        let mut state = handshake(TOKEN, false);
        let (mut message, mut reply) = ([0; HANDSHAKE_BYTES], [0; HANDSHAKE_BYTES]);
        stream.read_exact(&mut message).unwrap();
        state.read_message(&message, &mut []).unwrap();
        state.write_message(&[], &mut reply).unwrap();
        stream.write_all(&reply).unwrap();
        let cipher = state.into_stateless_transport_mode().unwrap();
        let mut peer = Peer { stream, cipher, num_sent: 0, num_received: 0 };
        peer.receive_record(HELLO_BYTES);
        peer
    }

    fn send_record(&mut self, bytes: &[u8]) {
        let mut record = vec![0; bytes.len() + TAG_BYTES];
        self.cipher.write_message(self.num_sent, bytes, &mut record).unwrap();
        self.num_sent += 1;
        self.stream.write_all(&record).unwrap();
    }

    fn receive_record(&mut self, len: usize) -> Vec<u8> {
        let (mut record, mut bytes) = (vec![0; len + TAG_BYTES], vec![0; len + TAG_BYTES]);
        self.stream.read_exact(&mut record).unwrap();
        self.cipher.read_message(self.num_received, &record, &mut bytes).unwrap();
        self.num_received += 1;
        bytes.truncate(len);
        bytes
    }

    /// Sends a message of the rendezvous.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.send_record(&number(bytes.len() as u64));
        if !bytes.is_empty() {
            self.send_record(bytes);
        }
    }

    /// Receives a message of the rendezvous.
    pub(crate) fn receive(&mut self) -> Vec<u8> {
        let length = self.receive_record(8);
        let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
        if length == 0 { Vec::new() } else { self.receive_record(length) }
    }

    /// Sends that the process is ready and listens on `port`, with no hash of its program, no values to compare and no GPU.
    pub(crate) fn ready(&mut self, port: u64, mesh: &Mesh) {
        let (program, num_values, num_gpus) = (number(0), number(0), number(0));
        self.send(
            &[number(2), number(port), text(&mesh.to_string()), program, num_values, num_gpus].concat(),
        );
    }
}
