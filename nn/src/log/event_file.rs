//! Event files of TensorBoard: records with checksums (the framing of TFRecord), each of which is an `Event` in the wire format of
//! protocol buffers. Only what scalars need is written (docs/adr/0033-logs.md).

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// How the names of event files begin: TensorBoard reads files whose names contain this.
pub(super) const NAME_START: &str = "events.out.tfevents";

/// Fields of the messages `Event`, `Summary`, `Summary.Value` and `SessionLog` of TensorBoard.
mod field {
    /// `Event`: seconds since 1970, a double.
    pub(super) const WALL_TIME: u64 = 1;
    /// `Event`: the step.
    pub(super) const STEP: u64 = 2;
    /// `Event`: the version of the file, in the first record.
    pub(super) const FILE_VERSION: u64 = 3;
    /// `Event`: a `Summary`.
    pub(super) const SUMMARY: u64 = 5;
    /// `Event`: a `SessionLog`.
    pub(super) const SESSION_LOG: u64 = 7;
    /// `Summary`: a value; repeated.
    pub(super) const VALUE: u64 = 1;
    /// `Summary.Value`: the name.
    pub(super) const TAG: u64 = 1;
    /// `Summary.Value`: the number, a float.
    pub(super) const SIMPLE_VALUE: u64 = 2;
    /// `SessionLog`: the status.
    pub(super) const STATUS: u64 = 1;
}

/// `SessionLog.START`: readers drop values of this step and later ones that earlier files of the folder hold.
const STATUS_START: u64 = 1;

/// A message in the wire format of protocol buffers.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut number: u64) {
        while number > 0x7f {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    /// The number of a field, and how the field is encoded.
    fn key(&mut self, field: u64, wire_type: u64) {
        self.varint(field << 3 | wire_type);
    }

    fn integer(mut self, field: u64, number: u64) -> Message {
        self.key(field, 0);
        self.varint(number);
        self
    }

    fn double(mut self, field: u64, number: f64) -> Message {
        self.key(field, 1);
        self.0.extend(number.to_le_bytes());
        self
    }

    fn bytes(mut self, field: u64, bytes: &[u8]) -> Message {
        self.key(field, 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    fn float(mut self, field: u64, number: f32) -> Message {
        self.key(field, 5);
        self.0.extend(number.to_le_bytes());
        self
    }

    /// The beginning of an `Event` of now.
    fn event(step: u64) -> Message {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Message::default().double(field::WALL_TIME, now.as_secs_f64()).integer(field::STEP, step)
    }

    /// The message as a record: length, checksum of the length, contents, checksum of the contents.
    fn record(&self) -> Vec<u8> {
        let length = (self.0.len() as u64).to_le_bytes();
        let [of_length, of_contents] = [&length, &self.0[..]].map(|part| masked_crc32c(part).to_le_bytes());
        [&length[..], &of_length, &self.0, &of_contents].concat()
    }
}

/// Returns the first records of a file whose first scalars are of a step.
pub(super) fn first_records(step: u64) -> Vec<u8> {
    let version = Message::event(0).bytes(field::FILE_VERSION, b"brain.Event:2");
    let start = Message::default().integer(field::STATUS, STATUS_START);
    let session = Message::event(step).bytes(field::SESSION_LOG, &start.0);
    [version.record(), session.record()].concat()
}

/// Returns a record with scalars of a step.
pub(super) fn scalars<'a>(step: u64, scalars: impl Iterator<Item = (&'a str, f64)>) -> Vec<u8> {
    let value = |(name, number): (&str, f64)| {
        Message::default().bytes(field::TAG, name.as_bytes()).float(field::SIMPLE_VALUE, number as f32)
    };
    let summary =
        scalars.map(value).fold(Message::default(), |summary, value| summary.bytes(field::VALUE, &value.0));
    Message::event(step).bytes(field::SUMMARY, &summary.0).record()
}

/// Copies event files into a folder, except those that the folder has. A file has the name of an event file only when it is complete.
pub(super) fn copy_missing(files: &[PathBuf], folder: &Path) -> io::Result<()> {
    for file in files {
        let name = file.file_name().unwrap_or_default();
        let to = folder.join(name);
        if !to.exists() {
            let unfinished = folder.join(".events.copying");
            fs::copy(file, &unfinished)?;
            fs::rename(&unfinished, &to)?;
        }
    }
    Ok(())
}

/// Creates an event file of its own in a folder. Readers take files in the order of their names.
pub(super) fn create(folder: &Path) -> io::Result<File> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut number = u64::from(now.subsec_nanos());
    loop {
        let name = format!("{NAME_START}.{:010}.{number:010}.shardgrad", now.as_secs());
        match File::options().append(true).create_new(true).open(folder.join(name)) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => number += 1,
            opened => return opened,
        }
    }
}

/// The checksum of a record: CRC-32C, rotated and shifted, because a checksum of bytes that contain checksums is weak.
fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: a record is short.
fn crc32c(bytes: &[u8]) -> u32 {
    let shifted = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| shifted(crc)))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Splits an event file into the contents of its records, whose checksums must be right.
    pub(in crate::log) fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while !file.is_empty() {
            let (head, rest) = file.split_at(12);
            let length = u64::from_le_bytes(head[..8].try_into().unwrap()) as usize;
            assert_eq!(head[8..], masked_crc32c(&head[..8]).to_le_bytes());
            let (contents, rest) = rest.split_at(length);
            let (checksum, rest) = rest.split_at(4);
            assert_eq!(checksum, masked_crc32c(contents).to_le_bytes());
            records.push(contents.to_vec());
            file = rest;
        }
        records
    }

    /// The contents of a record behind the time of writing, which is the first field.
    fn after_time(record: &[u8]) -> &[u8] {
        assert_eq!(record[0], 9, "field 1 is a double");
        &record[9..]
    }

    #[test]
    fn checksums_match_published_values() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        // Of RFC 3720: 32 bytes of zeros.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked_crc32c(b"123456789"), 0xc78a_b0e5);
    }

    #[test]
    fn events_match_bytes_encoded_by_hand() {
        let found = records(&scalars(300, [("lr", 0.5)].into_iter()));
        // Step 300 is the varint AC 02; then the summary with one value: tag "lr", float 0.5.
        let right = b"\x10\xac\x02\x2a\x0b\x0a\x09\x0a\x02lr\x15\x00\x00\x00\x3f";
        assert_eq!(found.len(), 1);
        assert_eq!(after_time(&found[0]), right);
        let first = records(&first_records(7));
        assert_eq!(after_time(&first[0]), b"\x10\x00\x1a\x0dbrain.Event:2");
        assert_eq!(after_time(&first[1]), b"\x10\x07\x3a\x02\x08\x01");
    }
}
