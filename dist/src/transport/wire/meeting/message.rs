//! The messages of a rendezvous and their bytes.

use crate::bytes::{Reading, Writing, printable};
use crate::error::{Error, Kind};

/// An error message shows no more characters of a value that a process sent.
const VALUE_CHARS_MAX: usize = 120;
/// An error message shows no more differences.
const DIFFERENCES_MAX: usize = 4;

/// Values that every process of a world must have alike, under one subject: "options", "inputs".
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Values {
    pub(crate) subject: String,
    /// Names and values, in the order in which differences are reported.
    pub(crate) named: Vec<(String, String)>,
}

/// What every process of a world must have alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) mesh: String,
    /// A hash of the program's file; 0 where it cannot be read, which is compared with nothing.
    pub(crate) program: u64,
    pub(crate) values: Vec<Values>,
}

impl Facts {
    /// The differences between these facts of rank 0 and those of another rank, as the message of an error.
    pub(super) fn difference(&self, rank: usize, other: &Facts) -> Option<String> {
        let Facts { mesh, program, values } = other;
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

/// One sentence for each name whose value is another one on rank 0 (`own`) than on `rank` (`other`).
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

/// The first characters of a value.
fn shortened(value: &str) -> String {
    match value.char_indices().nth(VALUE_CHARS_MAX) {
        None => value.to_string(),
        Some((end, _)) => format!("{}...", &value[..end]),
    }
}

/// The first message of a process to rank 0, sent as soon as it is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: usize,
    pub(super) run: String,
    pub(super) version: String,
    pub(super) num_ranks: usize,
}

impl Hello {
    pub(super) fn write(&self) -> Vec<u8> {
        let mut out = Writing::default();
        out.number(1).count(self.rank).text(&self.run).text(&self.version).count(self.num_ranks);
        out.0
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Hello> {
        let mut from = Reading(bytes);
        from.number().filter(|kind| *kind == 1)?;
        let (rank, run) = (from.count()?, printable(from.text()?, usize::MAX));
        let version = printable(from.text()?, usize::MAX);
        Some(Hello { rank, run, version, num_ranks: from.count()? })
    }
}

/// A later message of a process to rank 0.
#[derive(Clone, Debug)]
pub(super) enum Report {
    /// The process is ready: its facts, and the port at which it listens.
    Ready(Facts, u16),
    /// The process is connected to all others.
    Connected,
    /// The process cannot take part.
    Failed(Error),
}

impl Report {
    pub(super) fn write(&self) -> Vec<u8> {
        let mut out = Writing::default();
        match self {
            Report::Ready(facts, port) => {
                out.number(2).number((*port).into()).text(&facts.mesh).number(facts.program);
                out.count(facts.values.len());
                for Values { subject, named } in &facts.values {
                    out.text(subject).count(named.len());
                    for (name, value) in named {
                        out.text(name).text(value);
                    }
                }
            }
            Report::Connected => drop(out.number(3)),
            Report::Failed(error) => error.write(out.number(4)),
        }
        out.0
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Report> {
        let mut from = Reading(bytes);
        match from.number()? {
            2 => {
                let port = u16::try_from(from.number()?).ok()?;
                let (mesh, program) = (printable(from.text()?, usize::MAX), from.number()?);
                let values = (0..from.count()?).map(|_| {
                    let (subject, count) = (printable(from.text()?, usize::MAX), from.count()?);
                    let mut pair =
                        || Some((printable(from.text()?, usize::MAX), printable(from.text()?, usize::MAX)));
                    Some(Values { subject, named: (0..count).map(|_| pair()).collect::<Option<_>>()? })
                });
                let values = values.collect::<Option<_>>()?;
                Some(Report::Ready(Facts { mesh, program, values }, port))
            }
            3 => Some(Report::Connected),
            4 => Some(Report::Failed(Error::read(&mut from)?)),
            _ => None,
        }
    }
}

/// Where a rank listens: address and port.
pub(super) type Place = (String, u16);

/// A message of rank 0 to another rank.
#[derive(Debug)]
pub(super) enum Answer {
    /// The rank is known here and waits for the others. Repeated while it waits.
    Noted,
    /// All are ready: the secret of this rendezvous, and where each rank listens; no address for those on the machine of rank 0.
    Welcome(u64, Vec<Place>),
    /// All are connected to each other.
    Begin,
    /// The start has failed, or this process does not belong here.
    Refused(Error),
}

impl Answer {
    pub(super) fn write(&self) -> Vec<u8> {
        let mut out = Writing::default();
        match self {
            Answer::Noted => drop(out.number(1)),
            Answer::Welcome(secret, places) => {
                out.number(2).number(*secret).count(places.len());
                for (host, port) in places {
                    out.text(host).number((*port).into());
                }
            }
            Answer::Begin => drop(out.number(3)),
            Answer::Refused(error) => error.write(out.number(4)),
        }
        out.0
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Answer> {
        let mut from = Reading(bytes);
        match from.number()? {
            1 => Some(Answer::Noted),
            2 => {
                let (secret, count) = (from.number()?, from.count()?);
                let mut place = || Some((from.text()?.to_string(), u16::try_from(from.number()?).ok()?));
                Some(Answer::Welcome(secret, (0..count).map(|_| place()).collect::<Option<_>>()?))
            }
            3 => Some(Answer::Begin),
            4 => Some(Answer::Refused(Error::read(&mut from)?)),
            _ => None,
        }
    }
}

/// The error of a process that cannot take part, as the other ranks report it.
pub(super) fn refusal(rank: usize, error: &Error) -> Error {
    let text = format!("rank {rank} refused to start: {}", error.message());
    // What was asked of another process from outside is no request to this one.
    let kind = if error.kind() == Kind::Interrupted { Kind::PeerLost } else { error.kind() };
    error.details().iter().fold(Error::new(kind, text), |e, (label, text)| e.detail(label, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(options: &[(&str, &str)], inputs: &[(&str, &str)]) -> Facts {
        let values = [("options", options), ("inputs", inputs)].map(|(subject, named)| Values {
            subject: subject.to_string(),
            named: named.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect(),
        });
        Facts { mesh: "mesh(dp=2)".to_string(), program: 7, values: values.into() }
    }

    #[test]
    fn differences_name_both_values() {
        let own = facts(&[("--lr", "0.002"), ("--seed", "0")], &[("data", "a")]);
        let differs = |other: &Facts| own.difference(3, other);
        assert_eq!(differs(&own), None);
        assert_eq!(differs(&Facts { program: 0, ..own.clone() }), None);
        let other = facts(&[("--lr", "0.1"), ("--seed", "0")], &[("data", "b")]);
        assert_eq!(
            differs(&other).unwrap(),
            "ranks got different options: --lr is 0.002 on rank 0, 0.1 on rank 3"
        );
        let other = facts(&[("--lr", "0.002"), ("--new", "x")], &[("data", "a")]);
        assert_eq!(
            differs(&other).unwrap(),
            "ranks got different options: --seed is 0 on rank 0, not given on rank 3; \
             --new is not given on rank 0, x on rank 3"
        );
        let other = facts(&[("--lr", "0.002"), ("--seed", "0")], &[]);
        assert_eq!(
            differs(&other).unwrap(),
            "ranks got different inputs: data is a on rank 0, not given on rank 3"
        );
        let other = Facts { mesh: "mesh(tp=2)".into(), ..own.clone() };
        assert_eq!(
            differs(&other).unwrap(),
            "ranks got different meshes: mesh(dp=2) on rank 0, mesh(tp=2) on rank 3"
        );
        assert!(differs(&Facts { program: 8, ..own.clone() }).unwrap().contains("different programs"));
    }

    #[test]
    fn many_and_long_differences_are_cut() {
        let long = "x".repeat(10_000);
        let names = ["a", "b", "c", "d", "e", "f"];
        let of = |value: &str| facts(&names.map(|name| (name, value)), &[]);
        let text = of("1").difference(1, &of(&long)).unwrap();
        assert!(text.ends_with("on rank 1; and 2 more") && text.len() < 1000, "{text}");
        assert!(of(&long).difference(1, &of(&format!("{long}x"))).is_some(), "what is not shown is compared");
    }

    #[test]
    fn messages_are_read_as_written_and_their_texts_are_escaped() {
        let facts = facts(&[("--prompt", "a\u{1b}[2Jb\nc")], &[]);
        let bytes = Report::Ready(facts, 4000).write();
        let Some(Report::Ready(read, 4000)) = Report::read(&bytes) else { panic!() };
        assert_eq!(read.values[0].named, [("--prompt".to_string(), "a\\u{1b}[2Jb\\nc".to_string())]);
        assert!((0..bytes.len()).all(|len| Report::read(&bytes[..len]).is_none()));
        let hello = Hello { rank: 3, run: "a\rb".into(), version: "0.1.0".into(), num_ranks: 4 };
        let read = Hello::read(&hello.write()).unwrap();
        assert_eq!(read, Hello { run: "a\\rb".into(), ..hello.clone() });
        assert!((0..hello.write().len()).all(|len| Hello::read(&hello.write()[..len]).is_none()));
        let error = Error::new(Kind::Data, "bad\u{7}").detail("help", "one\ntwo\u{1b}");
        let Some(Report::Failed(read)) = Report::read(&Report::Failed(error).write()) else { panic!() };
        assert_eq!((read.message(), read.details()[0].1.as_str()), ("bad\\u{7}", "one\ntwo\\u{1b}"));
        let places = vec![(String::new(), 0), ("10.0.0.2".to_string(), 65535)];
        let Some(Answer::Welcome(5, read)) = Answer::read(&Answer::Welcome(5, places.clone()).write()) else {
            panic!()
        };
        assert_eq!(read, places);
    }
}
