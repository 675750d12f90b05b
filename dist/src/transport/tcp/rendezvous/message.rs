//! The messages of a rendezvous and their encoding.

use super::super::listener::HELLO_BYTES;
use super::super::record::Protection;
use crate::encoding::{Decoder, Encoder, printable};
use crate::error::{Error, Kind};

/// The most characters that an error message shows of a value.
const VALUE_CHARS_MAX: usize = 120;
/// The most differences that an error message shows.
const DIFFERENCES_MAX: usize = 4;

/// Named values that must be equal on every process of a world, under one subject: "options", "inputs".
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConsistentValues {
    pub(crate) subject: String,
    /// Names and values, in the order in which differences are reported.
    pub(crate) named: Vec<(String, String)>,
}

/// The GPU of a rank, and the name of its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankGpu {
    pub(crate) uuid: String,
    pub(crate) host: String,
}

/// The configuration of a process, which must be equal on every process of a world, except for its GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WorldConfig {
    pub(crate) mesh: String,
    /// A hash of the program's file; 0 if the file cannot be read, which matches any hash.
    pub(crate) program: u64,
    pub(crate) values: Vec<ConsistentValues>,
    /// The GPU that this process shares with no other one, if it has one.
    pub(crate) gpu: Option<RankGpu>,
}

impl WorldConfig {
    /// The differences between this configuration, of rank 0, and that of another rank, as an error message; `None` if they are equal.
    pub(super) fn difference(&self, rank: usize, other: &WorldConfig) -> Option<String> {
        let WorldConfig { mesh, program, values, gpu: _ } = other;
        if *mesh != self.mesh {
            let own = &self.mesh;
            return Some(format!("ranks got different meshes: {own} on rank 0, {mesh} on rank {rank}"));
        }
        if *program != self.program && *program != 0 && self.program != 0 {
            return Some(format!(
                "ranks run different programs: rank {rank} started another file than rank 0"
            ));
        }
        let of = |subject: &str| values.iter().find(|v| v.subject == subject).map_or(&[][..], |v| &v.named);
        let differing = self.values.iter().find_map(|own| {
            let found = differences(&own.named, of(&own.subject), rank);
            (!found.is_empty()).then(|| (own.subject.clone(), found))
        });
        let (subject, mut found) = differing?;
        let more = found.len().saturating_sub(DIFFERENCES_MAX);
        found.truncate(DIFFERENCES_MAX);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        Some(format!("ranks got different {subject}: {}{more}", found.join("; ")))
    }
}

/// One clause for each name whose value on rank 0 (`own`) differs from that on `rank` (`other`).
fn differences<'a>(own: &'a [(String, String)], other: &'a [(String, String)], rank: usize) -> Vec<String> {
    let value = |all: &'a [(String, String)], name: &str| {
        all.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    };
    let shown = |value: Option<&str>| value.map_or("not given".to_string(), shortened);
    let added = other.iter().filter(|(name, _)| own.iter().all(|(n, _)| n != name));
    let names = own.iter().chain(added).map(|(name, _)| name);
    names
        .map(|name| (name, value(own, name), value(other, name)))
        .filter(|(_, own, other)| own != other)
        .map(|(name, own, other)| {
            format!("{name} is {} on rank 0, {} on rank {rank}", shown(own), shown(other))
        })
        .collect()
}

/// Truncates a long value.
fn shortened(value: &str) -> String {
    match value.char_indices().nth(VALUE_CHARS_MAX) {
        None => value.to_string(),
        Some((end, _)) => format!("{}...", &value[..end]),
    }
}

/// The most characters of a run id or version that are sent as they are.
const RUN_CHARS_MAX: usize = 100;

/// A run id as it is compared and shown: without control characters, and a long one as its beginning and a hash.
pub(super) fn shown_run(run: &str) -> String {
    let whole = printable(run, usize::MAX);
    match whole.char_indices().nth(RUN_CHARS_MAX) {
        None if whole.len() <= RUN_CHARS_MAX => whole,
        _ => format!(
            "{}... (hash {})",
            printable(run, RUN_CHARS_MAX / 4),
            blake3::hash(run.as_bytes()).to_hex()
        ),
    }
}

/// The first record of a process to rank 0, sent as soon as both have proved that they have the token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::transport::tcp) struct Hello {
    pub(super) rank: usize,
    pub(super) run: String,
    pub(super) version: String,
    pub(super) num_ranks: usize,
    pub(super) protection: Protection,
}

const PROTECTIONS: [Protection; 3] = [Protection::None, Protection::Authenticated, Protection::Encrypted];

impl Hello {
    pub(in crate::transport::tcp) fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::default();
        out.number(1).count(self.rank).text(&self.run).text(&self.version).count(self.num_ranks);
        out.count(self.protection as usize);
        padded(out)
    }

    /// Decodes a record; bytes behind the last field are ignored.
    pub(in crate::transport::tcp) fn decode(bytes: &[u8]) -> Option<Hello> {
        let mut from = Decoder(bytes);
        from.number().filter(|kind| *kind == 1)?;
        let (rank, run) = (from.count()?, printable(from.text()?, usize::MAX));
        let version = printable(from.text()?, usize::MAX);
        let num_ranks = from.count()?;
        Some(Hello { rank, run, version, num_ranks, protection: *PROTECTIONS.get(from.count()?)? })
    }
}

/// The first record of a rank to another rank than 0: its own number.
pub(super) fn encode_rank(rank: usize) -> Vec<u8> {
    let mut out = Encoder::default();
    out.number(2).count(rank);
    padded(out)
}

/// Decodes a record of [`encode_rank`].
pub(in crate::transport::tcp) fn decode_rank(bytes: &[u8]) -> Option<usize> {
    let mut from = Decoder(bytes);
    from.number().filter(|kind| *kind == 2)?;
    from.count()
}

/// The bytes of a first record: all have the same length, which shows nothing.
fn padded(out: Encoder) -> Vec<u8> {
    let Encoder(mut bytes) = out;
    bytes.resize(HELLO_BYTES, 0);
    bytes
}

/// The random number of a rendezvous, which handshakes between other ranks than 0 contain.
pub(in crate::transport::tcp) type Nonce = [u8; 32];

/// A later message of a rank to rank 0.
#[derive(Clone, Debug)]
pub(in crate::transport::tcp) enum ClientMessage {
    /// The process is ready: its configuration, and the port on which it listens.
    Ready(WorldConfig, u16),
    /// The process is connected to all other ranks.
    Connected,
    /// The process has failed.
    Failed(Error),
}

impl ClientMessage {
    pub(in crate::transport::tcp) fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::default();
        match self {
            ClientMessage::Ready(config, port) => {
                out.number(2).number((*port).into()).text(&config.mesh).number(config.program);
                out.count(config.values.len());
                for ConsistentValues { subject, named } in &config.values {
                    out.text(subject).count(named.len());
                    for (name, value) in named {
                        out.text(name).text(value);
                    }
                }
                let gpus: &[RankGpu] = config.gpu.as_slice();
                out.count(gpus.len());
                for gpu in gpus {
                    out.text(&gpu.uuid).text(&gpu.host);
                }
            }
            ClientMessage::Connected => drop(out.number(3)),
            ClientMessage::Failed(error) => error.encode(out.number(4)),
        }
        out.0
    }

    pub(in crate::transport::tcp) fn decode(bytes: &[u8]) -> Option<ClientMessage> {
        let mut from = Decoder(bytes);
        match from.number()? {
            2 => {
                let port = u16::try_from(from.number()?).ok()?;
                let (mesh, program) = (printable(from.text()?, usize::MAX), from.number()?);
                let values = (0..from.count()?).map(|_| {
                    let (subject, count) = (printable(from.text()?, usize::MAX), from.count()?);
                    let mut pair =
                        || Some((printable(from.text()?, usize::MAX), printable(from.text()?, usize::MAX)));
                    Some(ConsistentValues {
                        subject,
                        named: (0..count).map(|_| pair()).collect::<Option<_>>()?,
                    })
                });
                let values = values.collect::<Option<_>>()?;
                let gpu = match from.count()? {
                    0 => None,
                    _ => Some(RankGpu {
                        uuid: printable(from.text()?, VALUE_CHARS_MAX),
                        host: printable(from.text()?, VALUE_CHARS_MAX),
                    }),
                };
                Some(ClientMessage::Ready(WorldConfig { mesh, program, values, gpu }, port))
            }
            3 => Some(ClientMessage::Connected),
            4 => Some(ClientMessage::Failed(Error::decode(&mut from)?)),
            _ => None,
        }
    }
}

/// The address and port on which a rank listens.
pub(in crate::transport::tcp) type ListenAddress = (String, u16);

/// A message of rank 0 to another rank.
#[derive(Debug)]
pub(in crate::transport::tcp) enum HostMessage {
    /// The rank is registered and has to wait for other ranks. Repeated while it waits.
    KeepWaiting,
    /// All ranks are ready: the random number of this rendezvous, and the address of each rank.
    Peers(Nonce, Vec<ListenAddress>),
    /// All ranks are connected to each other.
    Start,
    /// The start has failed, or the process belongs to another run.
    Refused(Error),
}

impl HostMessage {
    pub(in crate::transport::tcp) fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::default();
        match self {
            HostMessage::KeepWaiting => drop(out.number(1)),
            HostMessage::Peers(nonce, addresses) => {
                out.number(2).0.extend_from_slice(nonce);
                out.count(addresses.len());
                for (host, port) in addresses {
                    out.text(host).number((*port).into());
                }
            }
            HostMessage::Start => drop(out.number(3)),
            HostMessage::Refused(error) => error.encode(out.number(4)),
        }
        out.0
    }

    pub(in crate::transport::tcp) fn decode(bytes: &[u8]) -> Option<HostMessage> {
        let mut from = Decoder(bytes);
        match from.number()? {
            1 => Some(HostMessage::KeepWaiting),
            2 => {
                let (nonce, rest) = from.0.split_first_chunk()?;
                from = Decoder(rest);
                let count = from.count()?;
                let mut address = || Some((from.text()?.to_string(), u16::try_from(from.number()?).ok()?));
                Some(HostMessage::Peers(*nonce, (0..count).map(|_| address()).collect::<Option<_>>()?))
            }
            3 => Some(HostMessage::Start),
            4 => Some(HostMessage::Refused(Error::decode(&mut from)?)),
            _ => None,
        }
    }
}

/// An error of a process before the start, as the other ranks report it.
pub(super) fn refusal(rank: usize, error: &Error) -> Error {
    let text = format!("rank {rank} refused to start: {}", error.message());
    // A signal to another process is no request to stop this one.
    let kind = if error.kind() == Kind::Interrupted { Kind::PeerLost } else { error.kind() };
    error.details().iter().fold(Error::new(kind, text), |e, (label, text)| e.detail(label, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(options: &[(&str, &str)], inputs: &[(&str, &str)]) -> WorldConfig {
        let values = [("options", options), ("inputs", inputs)].map(|(subject, named)| ConsistentValues {
            subject: subject.to_string(),
            named: named.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect(),
        });
        let gpu = Some(RankGpu { uuid: "GPU-1".to_string(), host: "a\nb".to_string() });
        WorldConfig { mesh: "mesh(dp=2)".to_string(), program: 7, values: values.into(), gpu }
    }

    #[test]
    fn difference_names_both_values() {
        let own = config(&[("--lr", "0.002"), ("--seed", "0")], &[("data", "a")]);
        let differs = |other: &WorldConfig| own.difference(3, other);
        assert_eq!(differs(&own), None);
        assert_eq!(differs(&WorldConfig { program: 0, ..own.clone() }), None);
        let other = config(&[("--lr", "0.1"), ("--seed", "0")], &[("data", "b")]);
        assert_eq!(
            differs(&other).unwrap(),
            "ranks got different options: --lr is 0.002 on rank 0, 0.1 on rank 3"
        );
        let other = config(&[("--lr", "0.002"), ("--new", "x")], &[("data", "a")]);
        assert_eq!(
            differs(&other).unwrap(),
            "ranks got different options: --seed is 0 on rank 0, not given on rank 3; \
             --new is not given on rank 0, x on rank 3"
        );
        let other = config(&[("--lr", "0.002"), ("--seed", "0")], &[]);
        assert_eq!(
            differs(&other).unwrap(),
            "ranks got different inputs: data is a on rank 0, not given on rank 3"
        );
        let other = WorldConfig { mesh: "mesh(tp=2)".into(), ..own.clone() };
        assert_eq!(
            differs(&other).unwrap(),
            "ranks got different meshes: mesh(dp=2) on rank 0, mesh(tp=2) on rank 3"
        );
        assert!(differs(&WorldConfig { program: 8, ..own.clone() }).unwrap().contains("different programs"));
    }

    #[test]
    fn many_and_long_differences_are_truncated() {
        let long = "x".repeat(10_000);
        let names = ["a", "b", "c", "d", "e", "f"];
        let of = |value: &str| config(&names.map(|name| (name, value)), &[]);
        let text = of("1").difference(1, &of(&long)).unwrap();
        assert!(text.ends_with("on rank 1; and 2 more") && text.len() < 1000, "{text}");
        assert!(
            of(&long).difference(1, &of(&format!("{long}x"))).is_some(),
            "truncated parts are compared too"
        );
    }

    #[test]
    fn decoded_messages_equal_encoded_ones_with_escaped_texts() {
        let config = config(&[("--prompt", "a\u{1b}[2Jb\nc")], &[]);
        let bytes = ClientMessage::Ready(config, 4000).encode();
        let Some(ClientMessage::Ready(read, 4000)) = ClientMessage::decode(&bytes) else { panic!() };
        assert_eq!(read.values[0].named, [("--prompt".to_string(), "a\\u{1b}[2Jb\\nc".to_string())]);
        assert_eq!(read.gpu, Some(RankGpu { uuid: "GPU-1".to_string(), host: "a\\nb".to_string() }));
        assert!((0..bytes.len()).all(|len| ClientMessage::decode(&bytes[..len]).is_none()));
        let protection = Protection::Encrypted;
        let hello = Hello { rank: 3, run: "a\rb".into(), version: "0.1.0".into(), num_ranks: 4, protection };
        let bytes = hello.encode();
        assert_eq!(bytes.len(), HELLO_BYTES);
        assert_eq!(Hello::decode(&bytes).unwrap(), Hello { run: "a\\rb".into(), ..hello.clone() });
        let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 8;
        assert!((0..end).all(|len| Hello::decode(&bytes[..len]).is_none()));
        let long = shown_run(&"\u{1b}é".repeat(1000));
        assert_eq!(Hello { run: long.clone(), ..hello.clone() }.encode().len(), HELLO_BYTES);
        assert_eq!(Hello::decode(&Hello { run: long.clone(), ..hello.clone() }.encode()).unwrap().run, long);
        assert_ne!(long, shown_run(&"\u{1b}é".repeat(1001)));
        assert_eq!((decode_rank(&encode_rank(7)), decode_rank(&bytes)), (Some(7), None));
        let error = Error::new(Kind::Data, "bad\u{7}").detail("help", "one\ntwo\u{1b}");
        let Some(ClientMessage::Failed(read)) = ClientMessage::decode(&ClientMessage::Failed(error).encode())
        else {
            panic!()
        };
        assert_eq!((read.message(), read.details()[0].1.as_str()), ("bad\\u{7}", "one\ntwo\\u{1b}"));
        let addresses = vec![(String::new(), 0), ("10.0.0.2".to_string(), 65535)];
        let Some(HostMessage::Peers([5, ..], read)) =
            HostMessage::decode(&HostMessage::Peers([5; 32], addresses.clone()).encode())
        else {
            panic!()
        };
        assert_eq!(read, addresses);
    }
}
