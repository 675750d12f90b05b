//! Options that must be equal in all processes of a run, compared as strings when the processes connect.
//!
//! Every option is compared unless it is listed in [`NOT_COMPARED`] with a reason, so that new options are compared by default.

use super::truncate::{VALUE_CHARS_MAX, shortened};
use super::values::read_small;
use crate::data::ContentHash;
use clap::{Arg, ArgMatches, Command};
use shardgrad::autograd::pipeline::Schedule;
use std::path::Path;

/// Options that may differ between processes, with the reason.
const NOT_COMPARED: [(&str, &str); 17] = [
    ("help", "not an option of a run"),
    ("version", "not an option of a run"),
    ("config", "the options in the file are compared"),
    ("mesh", "the library compares the resulting mesh"),
    ("data", "paths may differ between machines; the contents are compared"),
    ("tokens", "paths may differ between machines; the contents are compared"),
    ("model", "paths may differ between machines; the contents are compared"),
    ("resume", "paths may differ between machines; the checkpoint is compared"),
    ("token_file", "paths may differ between machines; the token is proved"),
    ("listen", "only rank 0 listens there"),
    ("out", "paths may differ between machines; only rank 0 writes"),
    ("trace", "not supported for processes"),
    ("json", "only rank 0 prints"),
    ("threads", "no result depends on it"),
    ("pin", "no result depends on it"),
    ("memory_limit", "memory may differ between machines; no result depends on it"),
    ("width", "a property of the file; the token ids are compared"),
];

/// Returns the names and values of the compared options of a command, those not given included.
pub(super) fn options_to_compare(command: &Command, given: &ArgMatches) -> Vec<(String, String)> {
    let is_compared = |arg: &&Arg| NOT_COMPARED.iter().all(|(name, _)| arg.get_id() != name);
    let value = |arg: &Arg| {
        let id = arg.get_id().as_str();
        let values = given.get_raw(id).into_iter().flatten();
        let values: Vec<String> = values.map(|v| canonical(id, &v.to_string_lossy())).collect();
        if values.is_empty() { "not given".to_string() } else { values.join(",") }
    };
    let named = |arg: &Arg| Some((format!("--{}", arg.get_long()?), value(arg)));
    command.get_arguments().filter(is_compared).filter_map(named).collect()
}

/// Returns the canonical form of a value: numbers in one notation, a device without its index, a schedule file as the hash of its
/// contents, a long text as its beginning and a hash. Of the file of `--logits` only whether it is given: all ranks compute the logits, and
/// paths may differ between machines.
fn canonical(id: &str, value: &str) -> String {
    let hash = |bytes: &[u8]| {
        let mut hash = ContentHash::default();
        hash.add(bytes);
        hash.hex()
    };
    if id == "device" {
        return value.split(':').next().unwrap_or_default().to_string();
    }
    if id == "logits" {
        return "given".to_string();
    }
    let path = Path::new(value);
    if id == "schedule" && path.is_file() && Schedule::named(value, 1, 1).is_err() {
        let text = read_small(path, super::values::LISTS_BYTES_MAX).unwrap_or_default();
        return format!("schedule file with hash {}", hash(text.as_bytes()));
    }
    if id == "plan" {
        let text = read_small(path, super::values::PLAN_BYTES_MAX).unwrap_or_default();
        return format!("plan file with hash {}", hash(text.as_bytes()));
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
    fn options_are_compared_unless_listed() {
        let plain = ["train"];
        for (more, expected) in [
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
            assert_eq!(differing(&plain, &[&plain[..], more].concat()), [expected]);
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
    fn equivalent_values_have_one_canonical_form() {
        for (id, one, other) in [
            ("lr", "2e-3", "0.002"),
            ("lr", "1", "1.0"),
            ("eps", "1e-8", "0.00000001"),
            ("device", "cuda:0", "cuda:3"),
            ("logits", "/here/logits", "/there/logits"),
        ] {
            assert_eq!(canonical(id, one), canonical(id, other), "{id}");
        }
        assert_eq!(canonical("seed", "18446744073709551615"), "18446744073709551615");
        let long = canonical("prompt", &"x".repeat(10_000));
        assert!(long.starts_with("xxx") && long.len() < 130, "{long}");
        assert_ne!(long, canonical("prompt", &"x".repeat(10_001)));
    }

    #[test]
    fn schedule_files_are_compared_by_contents() {
        let dir = crate::data::scratch::Scratch::new();
        let [one, same, other] =
            [("a", "1"), ("b", "1"), ("c", "2")].map(|(name, text)| dir.file(name, text));
        let of = |path: &Path| canonical("schedule", path.to_str().unwrap());
        assert!(of(&one) == of(&same) && of(&one) != of(&other));
        assert_eq!(canonical("schedule", "1f1b"), "1f1b");
    }
}
