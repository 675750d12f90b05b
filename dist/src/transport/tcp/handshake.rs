//! The handshake of a connection: both ends prove that they have the token, by the Noise protocol NNpsk0.
//!
//! The first message holds a fresh public key and a tag that only a process with the token can compute, the reply likewise. Both
//! have a fixed length and no other contents: they show neither rank, mesh nor version. Only the first record after the reply proves
//! to the end that replied that the handshake is not a recorded one. The prologue binds a handshake to its purpose: a message for rank 0
//! is worth nothing to another rank, and none of one rendezvous is worth anything in another.

use super::record::Session;
use snow::{Builder, HandshakeState};
use std::fmt;

/// Diffie-Hellman over Curve25519 without static keys, keyed by the token from the first message on.
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_BLAKE2s";
/// The bytes of each of the two messages: a public key and a tag.
pub(super) const HANDSHAKE_BYTES: usize = 48;
/// The context in which the key of handshakes is derived from the token.
const KEY_CONTEXT: &str = "shardgrad 2026-11-24 token of a run";

/// The key of the handshakes of a run, derived from its token.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Key([u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    pub(super) fn of_token(token: &[u8]) -> Key {
        Key(blake3::derive_key(KEY_CONTEXT, token))
    }

    fn builder<'a>(&'a self, prologue: &'a [u8]) -> Builder<'a> {
        let builder = Builder::new(PATTERN.parse().expect("bug: an unknown pattern"));
        let keyed = builder.psk(0, &self.0).and_then(|builder| builder.prologue(prologue));
        keyed.expect("bug: a key or prologue set twice")
    }
}

/// 32 random bytes from the operating system.
pub(super) fn random_bytes() -> [u8; 32] {
    let builder = Builder::new(PATTERN.parse().expect("bug: an unknown pattern"));
    let pair = builder.generate_keypair().expect("the operating system has no random numbers");
    pair.private.try_into().expect("bug: a private key of another length")
}

/// The end of a handshake that connects.
pub(super) struct Initiator(HandshakeState);

impl Initiator {
    /// Starts a handshake. Returns the first message.
    pub(super) fn begin(key: &Key, prologue: &[u8]) -> (Initiator, [u8; HANDSHAKE_BYTES]) {
        let mut state = key.builder(prologue).build_initiator().expect("bug: an invalid handshake");
        let mut message = [0; HANDSHAKE_BYTES];
        state.write_message(&[], &mut message).expect("bug: a first message of another length");
        (Initiator(state), message)
    }

    /// Finishes the handshake with the reply; `None` if the other end has another token or prologue.
    pub(super) fn finish(self, reply: &[u8; HANDSHAKE_BYTES]) -> Option<Session> {
        let Initiator(mut state) = self;
        state.read_message(reply, &mut []).ok()?;
        Some(session(state, true))
    }
}

/// Answers a first message. Returns the keys and the reply; `None` if the other end has another token or prologue.
pub(super) fn respond(
    key: &Key,
    prologue: &[u8],
    message: &[u8; HANDSHAKE_BYTES],
) -> Option<(Session, [u8; HANDSHAKE_BYTES])> {
    let mut state = key.builder(prologue).build_responder().ok()?;
    state.read_message(message, &mut []).ok()?;
    let mut reply = [0; HANDSHAKE_BYTES];
    state.write_message(&[], &mut reply).ok()?;
    Some((session(state, false), reply))
}

fn session(mut state: HandshakeState, is_initiator: bool) -> Session {
    let (of_initiator, of_responder) = state.dangerously_get_raw_split();
    let raw_keys = if is_initiator { [of_initiator, of_responder] } else { [of_responder, of_initiator] };
    let cipher = state.into_stateless_transport_mode().expect("bug: an unfinished handshake");
    Session::new(cipher, raw_keys)
}

#[cfg(test)]
mod tests {
    use super::super::record::{Opener, Protection, Sealer, Tampered};
    use super::*;

    fn connected(protection: Protection) -> [(Sealer, Opener); 2] {
        let key = Key::of_token(b"0123456789abcdef");
        let (initiator, first) = Initiator::begin(&key, b"test");
        let (session, reply) = respond(&key, b"test", &first).unwrap();
        [initiator.finish(&reply).unwrap().split(protection), session.split(protection)]
    }

    #[test]
    fn other_tokens_prologues_reflections_and_flipped_bits_are_rejected() {
        let (key, other) = (Key::of_token(b"0123456789abcdef"), Key::of_token(b"0123456789abcdeF"));
        let (initiator, first) = Initiator::begin(&key, b"a");
        assert!(respond(&other, b"a", &first).is_none() && respond(&key, b"b", &first).is_none());
        assert!(initiator.finish(&first).is_none(), "a reflected message");
        for at in 0..HANDSHAKE_BYTES {
            let mut flipped = first;
            flipped[at] ^= 1;
            assert!(respond(&key, b"a", &flipped).is_none(), "byte {at}");
            let (initiator, first) = Initiator::begin(&key, b"a");
            let (_, mut reply) = respond(&key, b"a", &first).unwrap();
            reply[at] ^= 0x40;
            assert!(initiator.finish(&reply).is_none(), "byte {at}");
        }
        // A recorded first message gets a reply, but other keys: what was recorded after it does not open.
        let (initiator, first) = Initiator::begin(&key, b"a");
        let (_, reply) = respond(&key, b"a", &first).unwrap();
        let (mut sealer, _) = initiator.finish(&reply).unwrap().split(Protection::Encrypted);
        let mut recorded = Vec::new();
        sealer.seal(&[b"hello"], &mut recorded);
        let (again, _) = respond(&key, b"a", &first).unwrap();
        let (_, mut opener) = again.split(Protection::Encrypted);
        assert_eq!(opener.open(&recorded, &mut Vec::new()), Err(Tampered { number: 0 }));
        assert_ne!(random_bytes(), random_bytes());
    }

    #[test]
    fn records_open_once_in_order_and_in_one_direction() {
        for protection in [Protection::Authenticated, Protection::Encrypted] {
            let [(mut sealer, mut back), (_, mut opener)] = connected(protection);
            let mut records = Vec::new();
            for text in ["", "one", "two, three"] {
                let mut record = Vec::new();
                let (a, b) = text.as_bytes().split_at(text.len() / 2);
                sealer.seal(&[a, b], &mut record);
                assert_eq!(record.len(), opener.record_bytes(text.len()));
                records.push((text, record));
            }
            assert!(back.open(&records[0].1, &mut Vec::new()).is_err(), "reflected");
            for (text, record) in &records {
                let mut out = b"x".to_vec();
                opener.open(record, &mut out).unwrap();
                assert_eq!(out, [b"x", text.as_bytes()].concat());
            }
            let mut out = Vec::new();
            assert_eq!(opener.open(&records[2].1, &mut out), Err(Tampered { number: 3 }), "doubled");
            assert!(out.is_empty());
            let [(mut sealer, _), (_, mut opener)] = connected(protection);
            let mut two = [Vec::new(), Vec::new()];
            two.iter_mut().for_each(|record| sealer.seal(&[b"same"], record));
            assert_eq!(opener.open(&two[1], &mut out), Err(Tampered { number: 0 }), "reordered");
            let [(mut sealer, _), (_, mut opener)] = connected(protection);
            let mut record = Vec::new();
            sealer.seal(&[b"text"], &mut record);
            *record.last_mut().unwrap() ^= 1;
            assert_eq!(opener.open(&record, &mut out), Err(Tampered { number: 0 }), "flipped");
            assert_eq!(opener.open(&[], &mut out), Err(Tampered { number: 1 }), "cut");
        }
    }

    #[test]
    fn new_keys_are_taken_at_the_same_record_at_both_ends() {
        let [(mut sealer, _), (mut back, mut opener)] = connected(Protection::Encrypted);
        for number in 0..30u8 {
            let (mut record, mut out) = (Vec::new(), Vec::new());
            sealer.seal(&[&[number; 20]], &mut record);
            opener.open(&record, &mut out).unwrap();
            assert_eq!(out, [number; 20]);
            // The other direction has keys of its own.
            back.seal(&[b"x"], &mut record);
        }
    }
}
