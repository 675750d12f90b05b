//! The options that every process of a run must have alike, as texts that are compared when the processes connect.
//!
//! Every option of a command is compared unless it is listed here with a reason, so that a new one is.

use super::echo::{VALUE_CHARS_MAX, shortened};
use super::files::read_small;
use crate::data::ContentHash;
use clap::{Arg, ArgMatches, Command};
use shardgrad::autograd::pipeline::Schedule;
use std::path::Path;

/// Options that may differ between processes.
const NOT_COMPARED: [(&str, &str); 16] = [
    ("help", "no option of a run"),
    ("version", "no option of a run"),
    ("config", "the options in the file are compared"),
    ("mesh", "the library compares the mesh that follows"),
    ("data", "machines may have other paths; the contents are compared"),
    ("tokens", "machines may have other paths; the contents are compared"),
    ("model", "machines may have other paths; the contents are compared"),
    ("resume", "machines may have other paths; the checkpoint that is found is compared"),
    ("out", "machines may have other paths; rank 0 alone writes"),
    ("trace", "processes write none"),
    ("logits", "rank 0 alone writes"),
    ("json", "rank 0 alone prints"),
    ("threads", "no result depends on it"),
    ("pin", "no result depends on it"),
    ("memory_limit", "machines may have more or less memory; no result depends on it"),
    ("width", "it says how a file is stored; the contents are compared with it"),
];

/// Returns the names and values of the options of a command that are compared, given or not.
pub(super) fn compared(command: &Command, given: &ArgMatches) -> Vec<(String, String)> {
    let is_compared = |arg: &&Arg| NOT_COMPARED.iter().all(|(name, _)| arg.get_id() != name);
    let value = |arg: &Arg| {
        let id = arg.get_id().as_str();
        let values = given.get_raw(id).into_iter().flatten();
        let values: Vec<String> = values.map(|v| normal(id, &v.to_string_lossy())).collect();
        if values.is_empty() { "not given".to_string() } else { values.join(",") }
    };
    let named = |arg: &Arg| Some((format!("--{}", arg.get_long()?), value(arg)));
    command.get_arguments().filter(is_compared).filter_map(named).collect()
}

/// A value as all who mean the same write it: numbers in one form, a device without its number, a file as the hash of its contents,
/// and the beginning of a long text with the hash of all.
fn normal(id: &str, value: &str) -> String {
    let hash = |bytes: &[u8]| {
        let mut hash = ContentHash::default();
        hash.add(bytes);
        hash.hex()
    };
    if id == "device" {
        return value.split(':').next().unwrap_or_default().to_string();
    }
    let path = Path::new(value);
    if id == "schedule" && path.is_file() && Schedule::named(value, 1, 1).is_err() {
        let text = read_small(path, super::values::LISTS_BYTES_MAX).unwrap_or_default();
        return format!("the lists with hash {}", hash(text.as_bytes()));
    }
    match value.parse::<f64>() {
        _ if value.parse::<u64>().is_ok() => value.to_string(),
        Ok(x) if x.fract() == 0.0 && x.abs() < 1e15 => format!("{x:.0}"),
        Ok(x) => format!("{x:?}"),
        Err(_) if value.chars().count() > VALUE_CHARS_MAX => {
            format!("{} (hash {})", shortened(value), hash(value.as_bytes()))
        }
        Err(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::config;
    use super::*;

    fn of(args: &[&str]) -> Vec<(String, String)> {
        let argv = ["shardgrad"].iter().chain(args).map(Into::into).collect();
        config::parse(argv).unwrap().options
    }

    fn differing(one: &[&str], other: &[&str]) -> Vec<String> {
        let (one, other) = (of(one), of(other));
        assert_eq!(one.len(), other.len());
        let differ = one.into_iter().zip(other).filter(|(a, b)| a != b);
        differ.map(|(a, b)| format!("{} {} {}", a.0, a.1, b.1)).collect()
    }

    #[test]
    fn an_option_is_compared_unless_it_is_listed() {
        let plain = ["train"];
        for (more, told) in [
            (&["--lr", "0.1"][..], "--lr 0.002 0.1"),
            (&["--save-every", "5"], "--save-every not given 5"),
            (&["--no-shuffle"], "--no-shuffle false true"),
            (&["--eval-every", "7"], "--eval-every not given 7"),
            (&["--check-every", "7"], "--check-every 100 7"),
            (&["--dtype", "bf16"], "--dtype f32 bf16"),
            (&["--preset", "s"], "--preset tiny s"),
            (&["--timeout", "5"], "--timeout 60 5"),
            (&["--end-of-text", "5"], "--end-of-text not given 5"),
        ] {
            assert_eq!(differing(&plain, &[&plain[..], more].concat()), [told]);
        }
        let alike =
            ["train", "--out", "x", "--json", "--threads", "3", "--data", "y", "--mesh", "dp=2", "--resume"];
        assert_eq!(differing(&plain, &alike), [""; 0]);
        for command in ["train", "eval", "generate"] {
            let all = of(&[command, "--device", "cpu"]
                .iter()
                .chain(["--prompt", "x"].iter().filter(|_| command == "generate"))
                .copied()
                .collect::<Vec<_>>());
            assert!(all.len() > 8 && all.iter().all(|(name, _)| name.starts_with("--")), "{all:?}");
        }
    }

    #[test]
    fn what_means_the_same_is_the_same() {
        for (id, one, other) in [
            ("lr", "2e-3", "0.002"),
            ("lr", "1", "1.0"),
            ("eps", "1e-8", "0.00000001"),
            ("device", "cuda:0", "cuda:3"),
        ] {
            assert_eq!(normal(id, one), normal(id, other), "{id}");
        }
        assert_eq!(normal("seed", "18446744073709551615"), "18446744073709551615");
        let long = normal("prompt", &"x".repeat(10_000));
        assert!(long.starts_with("xxx") && long.len() < 130, "{long}");
        assert_ne!(long, normal("prompt", &"x".repeat(10_001)));
    }

    #[test]
    fn a_file_of_lists_is_compared_by_its_contents() {
        let dir = crate::data::scratch::Scratch::new();
        let [one, same, other] =
            [("a", "1"), ("b", "1"), ("c", "2")].map(|(name, text)| dir.file(name, text));
        let of = |path: &Path| normal("schedule", path.to_str().unwrap());
        assert!(of(&one) == of(&same) && of(&one) != of(&other));
        assert_eq!(normal("schedule", "1f1b"), "1f1b");
    }
}
