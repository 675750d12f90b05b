//! The entry of fuzzers to everything that decodes bytes from a connection (`fuzz/`), and the same as a test.

use super::frame::{Frame, PREFIX_BYTES, lengths};
use super::handshake::{HANDSHAKE_BYTES, Initiator, Key, respond};
use super::record::Protection;
use super::rendezvous::message::{ClientMessage, Hello, HostMessage, decode_rank};
use crate::mesh::Mesh;

/// Decodes bytes as everything that a process reads from a connection: as a handshake, a record, a prefix, each kind of frame and each
/// message of a rendezvous. Returns how many of these accept them.
///
/// # Panics
/// Never; a panic is a bug that a fuzzer finds.
#[must_use]
pub fn decode_untrusted(bytes: &[u8]) -> usize {
    let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]).expect("bug: an invalid mesh");
    let frames = (0..=13).filter(|kind| Frame::decode(*kind, bytes, &mesh).is_some()).count();
    let prefix = bytes.first_chunk::<PREFIX_BYTES>().and_then(lengths).is_some();
    let hello = Hello::decode(bytes).is_some() || decode_rank(bytes).is_some();
    let messages = ClientMessage::decode(bytes).is_some() || HostMessage::decode(bytes).is_some();
    let proved = decode_without_the_token(bytes);
    frames + usize::from(prefix) + usize::from(hello) + usize::from(messages) + usize::from(proved)
}

/// Treats bytes as those of a stranger: whether they pass as a first message, a reply or a record.
fn decode_without_the_token(bytes: &[u8]) -> bool {
    let key = Key::of_token(b"0123456789abcdef");
    if let Some(message) = bytes.first_chunk::<HANDSHAKE_BYTES>() {
        let (initiator, _) = Initiator::begin(&key, b"fuzz");
        if respond(&key, b"fuzz", message).is_some() || initiator.finish(message).is_some() {
            return true;
        }
    }
    let (initiator, first) = Initiator::begin(&key, b"fuzz");
    let (_, reply) = respond(&key, b"fuzz", &first).expect("bug: an own message is rejected");
    let session = initiator.finish(&reply).expect("bug: an own reply is rejected");
    let (_, mut opener) = session.split(Protection::Encrypted);
    let mut out = Vec::new();
    if opener.open(bytes, &mut out).is_ok() {
        return true;
    }
    opener.protection = Protection::Authenticated;
    opener.open(bytes, &mut out).is_ok() || !out.is_empty()
}

#[cfg(test)]
mod tests {
    use super::super::frame::CallId;
    use super::*;
    use crate::call::IssuedCall;
    use crate::error::{Error, Kind};
    use crate::world_state::Failure;

    /// Pseudo-random numbers (xorshift).
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, limit: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % limit.max(1) as u64) as usize
        }
    }

    #[test]
    fn changed_encodings_neither_panic_nor_pass_without_the_token() {
        let error = || Error::new(Kind::Io, "no disk").detail("help", "buy one");
        let frames = [
            Frame::Call(IssuedCall::none()),
            Frame::ReducedChunk(3),
            Frame::Failed(Failure { error: error(), origin: 3, affected: vec![1, 2] }),
            Frame::Returned(IssuedCall::none()),
            Frame::Elements(CallId { is_message: true, bits: 3, number: 5 }),
            Frame::Credit(7),
        ];
        let mut seeds: Vec<Vec<u8>> =
            frames.iter().map(|frame| frame.encode()[PREFIX_BYTES..].to_vec()).collect();
        seeds.push(frames[0].encode());
        seeds.push(ClientMessage::Failed(error()).encode());
        seeds.push(HostMessage::Peers([7; 32], vec![("10.0.0.1".to_string(), 4000); 3]).encode());
        seeds.push(HostMessage::Refused(error()).encode());
        assert!(seeds.iter().all(|seed| decode_untrusted(seed) > 0), "a seed is not accepted as it is");
        let mut numbers = Numbers(0x9E37_79B9_7F4A_7C15);
        let mut accepted = 0;
        for case in 0..20_000 {
            let mut bytes = seeds[case % seeds.len()].clone();
            for _ in 0..=numbers.below(4) {
                let (at, other) = (numbers.below(bytes.len()), numbers.below(256) as u8);
                match numbers.below(5) {
                    0 if !bytes.is_empty() => bytes[at] = other,
                    1 if !bytes.is_empty() => bytes[at] ^= 1 << (other % 8),
                    2 => bytes.truncate(at),
                    3 => bytes.insert(at, other),
                    _ => bytes.extend_from_slice(&[other; 9][..numbers.below(10)]),
                }
            }
            // The handshakes take most of the time: one case in fifty.
            if case % 50 == 0 {
                assert!(!decode_without_the_token(&bytes), "case {case}");
            }
            let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
            accepted += (0..=13).filter(|kind| Frame::decode(*kind, &bytes, &mesh).is_some()).count();
            let _ = (Hello::decode(&bytes), decode_rank(&bytes));
            let _ = (ClientMessage::decode(&bytes), HostMessage::decode(&bytes));
        }
        assert!(accepted > 1000, "{accepted}: the cases are too far from valid ones");
    }
}
