//! Records: the pieces in which a connection sends its bytes after the handshake.
//!
//! Both ends know how many bytes the next record holds, so no length travels unprotected. A record is its bytes, followed by a tag
//! if the connection is authenticated, or is an encrypted message of the Noise protocol. Each direction has its own key and numbers its
//! records from 0; the number enters the tag. So a changed, dropped, repeated, reordered or reflected record does not verify, and
//! neither does any later one.
//!
//! The hash of a tag reads the contents first and the number last: the hash tree then starts at the contents, and its leaves are
//! hashed eight at a time. With the number first, each record costs twice the time.

use snow::StatelessTransportState;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

/// The most bytes of one encrypted record: a message of the Noise protocol has at most 65535 bytes with its tag.
pub(super) const ENCRYPTED_BYTES_MAX: usize = 63 << 10;
/// The most bytes of any other record: a power of two, which is one full hash tree; enough that a system call per record costs little;
/// and so few that sender, network and receiver work on different records of a message, each in its cache.
const UNENCRYPTED_BYTES_MAX: usize = 128 << 10;
/// The bytes of the tag of an encrypted record (AES-GCM).
pub(super) const ENCRYPTED_TAG_BYTES: usize = 16;
/// The most bytes that a record is longer than its contents.
pub(super) const TAG_BYTES_MAX: usize = blake3::OUT_LEN;
/// An encrypted direction changes its key after this many records, long before AES-GCM loses margin (RFC 8446, 5.5); in tests soon.
const REKEY_EVERY: u64 = if cfg!(test) { 8 } else { 1 << 24 };
/// The context of the keys of tags, which separates them from the keys of the encryption.
const TAG_KEY_CONTEXT: &str = "shardgrad 2026-11-24 tags of records";

/// How a connection protects its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    /// Not at all.
    None,
    /// A tag of keyed BLAKE3 behind each record.
    Authenticated,
    /// AES-256-GCM, as the transport messages of the Noise protocol.
    Encrypted,
}

impl Protection {
    /// The name in messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Protection::None => "not protected",
            Protection::Authenticated => "authenticated",
            Protection::Encrypted => "encrypted",
        }
    }

    /// The most bytes of one record.
    pub(super) fn record_bytes_max(self) -> usize {
        if self == Protection::Encrypted { ENCRYPTED_BYTES_MAX } else { UNENCRYPTED_BYTES_MAX }
    }
}

/// A record that does not verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tampered {
    /// The number of the record in its direction.
    pub(super) number: u64,
}

/// The cipher of both directions of a connection.
type Cipher = Arc<RwLock<StatelessTransportState>>;

/// The keys of a connection after its handshake.
pub(super) struct Session {
    cipher: Option<Cipher>,
    send_key: [u8; 32],
    receive_key: [u8; 32],
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

impl Session {
    /// The keys from a finished handshake: the cipher of the transport messages, and the raw keys of this end's two directions.
    pub(super) fn new(cipher: StatelessTransportState, raw_keys: [[u8; 32]; 2]) -> Session {
        let [send_key, receive_key] = raw_keys.map(|key| blake3::derive_key(TAG_KEY_CONTEXT, &key));
        Session { cipher: Some(Arc::new(RwLock::new(cipher))), send_key, receive_key }
    }

    /// The ends of a connection without keys, for tests of what it carries.
    #[cfg(test)]
    pub(super) fn unprotected() -> Session {
        Session { cipher: None, send_key: [0; 32], receive_key: [0; 32] }
    }

    /// The two directions of the connection.
    pub(super) fn split(self, protection: Protection) -> (Sealer, Opener) {
        let Session { cipher, send_key, receive_key } = self;
        let sealer = Sealer { protection, cipher: cipher.clone(), key: send_key, number: 0 };
        (sealer, Opener { protection, cipher, key: receive_key, number: 0 })
    }
}

/// Computes the tag of a record. The number has a fixed length, so contents and number cannot be confused.
fn tag(key: &[u8; 32], number: u64, parts: &[&[u8]]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    for part in parts {
        hasher.update(part);
    }
    hasher.update(&number.to_le_bytes());
    hasher.finalize()
}

/// The outgoing direction of a connection.
pub(super) struct Sealer {
    pub(super) protection: Protection,
    cipher: Option<Cipher>,
    key: [u8; 32],
    number: u64,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer").field("protection", &self.protection).finish_non_exhaustive()
    }
}

impl Sealer {
    /// Returns the tag of the next record, whose contents are sent from where they are; `None` if the connection has no tags.
    ///
    /// # Panics
    /// If the connection is encrypted.
    pub(super) fn detached_tag(&mut self, contents: &[u8]) -> Option<blake3::Hash> {
        assert_ne!(self.protection, Protection::Encrypted, "bug: contents that would be sent as they are");
        let number = self.number;
        self.number += 1;
        (self.protection == Protection::Authenticated).then(|| tag(&self.key, number, &[contents]))
    }

    /// Appends a record with these parts to `out`; at most [`Protection::record_bytes_max`] in all.
    pub(super) fn seal(&mut self, parts: &[&[u8]], out: &mut Vec<u8>) {
        let number = self.number;
        self.number += 1;
        match (self.protection, &self.cipher) {
            (Protection::None, _) => parts.iter().for_each(|part| out.extend_from_slice(part)),
            (Protection::Authenticated, _) => {
                parts.iter().for_each(|part| out.extend_from_slice(part));
                out.extend_from_slice(tag(&self.key, number, parts).as_bytes());
            }
            (Protection::Encrypted, cipher) => {
                let cipher = cipher.as_ref().expect("bug: an encrypted connection without a cipher");
                if number > 0 && number.is_multiple_of(REKEY_EVERY) {
                    cipher.write().unwrap_or_else(PoisonError::into_inner).rekey_outgoing();
                }
                let start = out.len();
                let whole;
                let payload = match parts {
                    [one] => one,
                    _ => {
                        whole = parts.concat();
                        &whole[..]
                    }
                };
                out.resize(start + payload.len() + ENCRYPTED_TAG_BYTES, 0);
                let cipher = cipher.read().unwrap_or_else(PoisonError::into_inner);
                let sealed = cipher.write_message(number, payload, &mut out[start..]);
                sealed.expect("bug: a record that is too long");
            }
        }
    }
}

/// The incoming direction of a connection.
pub(super) struct Opener {
    pub(super) protection: Protection,
    cipher: Option<Cipher>,
    key: [u8; 32],
    number: u64,
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opener").field("protection", &self.protection).finish_non_exhaustive()
    }
}

impl Opener {
    /// The bytes of a record with `len` bytes of contents.
    pub(super) fn record_bytes(&self, len: usize) -> usize {
        len + match self.protection {
            Protection::None => 0,
            Protection::Authenticated => TAG_BYTES_MAX,
            Protection::Encrypted => ENCRYPTED_TAG_BYTES,
        }
    }

    /// Verifies the next record, whose contents came as they are.
    ///
    /// # Errors
    /// A record that does not verify: its contents must not be used.
    ///
    /// # Panics
    /// If the connection is encrypted.
    pub(super) fn verify(&mut self, contents: &[u8], sent: &[u8]) -> Result<(), Tampered> {
        assert_ne!(self.protection, Protection::Encrypted, "bug: contents that came as they are");
        let number = self.number;
        self.number += 1;
        if self.protection == Protection::None {
            return Ok(());
        }
        let sent = sent.try_into().map_err(|_| Tampered { number })?;
        // The comparison of hashes takes constant time.
        match tag(&self.key, number, &[contents]) == blake3::Hash::from_bytes(sent) {
            true => Ok(()),
            false => Err(Tampered { number }),
        }
    }

    /// Appends the contents of the next record to `out`.
    ///
    /// # Errors
    /// A record that does not verify; `out` is unchanged then.
    pub(super) fn open(&mut self, record: &[u8], out: &mut Vec<u8>) -> Result<(), Tampered> {
        if self.protection != Protection::Encrypted {
            let (contents, sent) = record.split_at(record.len().saturating_sub(self.record_bytes(0)));
            self.verify(contents, sent)?;
            out.extend_from_slice(contents);
            return Ok(());
        }
        let number = self.number;
        self.number += 1;
        let cipher = self.cipher.as_ref().expect("bug: an encrypted connection without a cipher");
        if number > 0 && number.is_multiple_of(REKEY_EVERY) {
            cipher.write().unwrap_or_else(PoisonError::into_inner).rekey_incoming();
        }
        let start = out.len();
        // Room for the tag too: the cipher may decrypt it in place.
        out.resize(start + record.len(), 0);
        let cipher = cipher.read().unwrap_or_else(PoisonError::into_inner);
        let opened = cipher.read_message(number, record, &mut out[start..]);
        out.truncate(start + opened.as_ref().copied().unwrap_or(0));
        opened.map(drop).map_err(|_| Tampered { number })
    }
}
