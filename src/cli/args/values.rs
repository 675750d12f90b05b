//! The values of options: text in, checked values out. What is refused is told in one line.

use super::files::read_small;
use super::nearest::nearest;
use shardgrad::autograd::pipeline::{Cut, NAMES, Schedule, Times};
use shardgrad::dist::Mesh;
use shardgrad::kernels::Device;
use shardgrad::nn::ModelConfig;
use shardgrad::nn::plan::PassOrder;
use shardgrad::{Error, Kind, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The axes of a mesh in their fixed order, outermost first.
pub(crate) const AXES: [&str; 5] = ["pp", "dp", "ep", "cp", "tp"];

/// No count is larger than this; steps times batch then fit 64 bits.
const COUNT_MAX: usize = 1 << 31;
/// One process has no more threads than these.
pub(super) const THREADS_MAX: usize = 1024;
/// The times of a pipeline lie between this and its inverse.
const TIME_MIN: f64 = 1e-6;
/// A file of lists has no more bytes than these.
pub(super) const LISTS_BYTES_MAX: u64 = 64 << 20;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) u64);

/// A mesh such as `dp=2,tp=2`: its axes are put into their fixed order; those left out have one rank and do
/// not appear.
pub(super) fn mesh(text: &str) -> Result<Mesh> {
    let read = Mesh::parse(text)?;
    for axis in read.axes() {
        let name = read.name(axis);
        if AXES.contains(&name) {
            continue;
        }
        let help = match nearest(name, AXES) {
            Some(near) => format!("did you mean `{near}`? "),
            None => String::new(),
        };
        let error = Error::new(Kind::Mesh, format!("there is no mesh axis `{name}`"));
        return Err(error.detail("help", format!("{help}the axes are {}", AXES.join(", "))));
    }
    let axes: Vec<(&str, usize)> =
        AXES.iter().filter_map(|name| read.axis(name).map(|axis| (*name, read.size(axis)))).collect();
    Mesh::new(&axes)
}

/// A device on which ranks run.
pub(super) fn device(text: &str) -> Result<Device, String> {
    let runs = |device: &Device| *device != Device::Null;
    Device::parse(text).filter(runs).ok_or_else(|| "devices are cpu, cuda and cuda:N, N from 0".into())
}

/// The name of a preset.
pub(super) fn preset(text: &str) -> Result<String, String> {
    if ModelConfig::preset_names().any(|name| name == text) {
        return Ok(text.to_string());
    }
    let near =
        nearest(text, ModelConfig::preset_names()).map_or(String::new(), |n| format!("did you mean `{n}`? "));
    let names: Vec<&str> = ModelConfig::preset_names().collect();
    Err(format!("there is no such preset; {near}presets are {}", names.join(", ")))
}

/// Where a pipeline is cut.
pub(super) fn cut(text: &str) -> Result<Cut> {
    text.parse()
}

/// An order of passes, and the file that it was read from, if it is not known by its name.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) passes: PassOrder,
    pub(crate) file: Option<PathBuf>,
}

/// The name of a pipeline schedule, or a file with the lists of one.
pub(super) fn schedule(text: &str) -> Result<Order> {
    let refused = match Schedule::named(text, 1, 1) {
        Ok(_) => return Ok(Order { passes: PassOrder::Named(text.to_string()), file: None }),
        Err(e) => e,
    };
    let path = Path::new(text);
    if !path.exists() {
        let counts =
            |rest: &str| rest.strip_prefix('-').is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
        if ["interleaved", "searched"].iter().any(|name| text.strip_prefix(name).is_some_and(counts)) {
            return Err(refused);
        }
        let near = nearest(text, NAMES).map_or(String::new(), |n| format!("did you mean `{n}`? "));
        let help =
            format!("{near}schedules are {}, or a file with lists (plan --save FILE)", NAMES.join(", "));
        let error = Error::new(Kind::Config, "there is no such schedule and no such file");
        return Err(error.detail("help", help));
    }
    let lists = Schedule::from_text(&read_small(path, LISTS_BYTES_MAX)?)?;
    Ok(Order { passes: PassOrder::Lists(lists), file: Some(path.to_path_buf()) })
}

/// Three times of a pass: forward, gradients of inputs, gradients of weights.
pub(super) fn times(text: &str) -> Result<Times, String> {
    let known = |x: f64| (TIME_MIN..=1.0 / TIME_MIN).contains(&x);
    let time = |text: &str| number(text.trim(), "numbers from 0.000001 to 1000000, as in 1,1,1", known);
    let parts: Vec<f64> = text.split(',').map(time).collect::<Result<_, _>>()?;
    match parts[..] {
        [forward, input, weight] => Ok(Times { forward, input, weight }),
        _ => Err("must be three times, as in 1,1,1".to_string()),
    }
}

/// The time of a transfer.
pub(super) fn transfer(text: &str) -> Result<f64, String> {
    number(text, "a number from 0 to 1000000", |x| (0.0..=1.0 / TIME_MIN).contains(&x))
}

/// The threads of a rank.
pub(super) fn threads(text: &str) -> Result<usize, String> {
    let found = count(text).ok().filter(|n| *n <= THREADS_MAX);
    found.ok_or_else(|| format!("must be a whole number from 1 to {THREADS_MAX}"))
}

/// A seed.
pub(super) fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u64::MAX))
}

/// The number of a token.
pub(super) fn token(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u32::MAX))
}

/// A whole number of at least one.
pub(super) fn count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n) if (1..=COUNT_MAX).contains(&n) => Ok(n),
        Ok(n) if n > COUNT_MAX => Err(format!("must be at most {COUNT_MAX}")),
        _ => Err("must be a whole number of at least 1".to_string()),
    }
}

/// A whole number, zero included.
pub(super) fn count_or_none(text: &str) -> Result<usize, String> {
    if text == "0" { Ok(0) } else { count(text).map_err(|why| why.replace("at least 1", "at least 0")) }
}

/// A number of bytes, at least one: `5GB`, `500MB`, `20KB` (powers of 1000), or without a unit.
pub(super) fn bytes(text: &str) -> Result<Bytes, String> {
    let units = [("GB", 1_000_000_000), ("MB", 1_000_000), ("KB", 1000), ("", 1)];
    let read = |(unit, size): (&str, u64)| {
        text.strip_suffix(unit)?.trim_end().parse::<u64>().ok()?.checked_mul(size)
    };
    let found = units.into_iter().find_map(read).filter(|n| *n > 0).map(Bytes);
    found.ok_or_else(|| "must be a number of bytes above 0, as in 500MB or 5GB".to_string())
}

/// A finite number for which `good` holds; `what` says which ones those are.
fn number(text: &str, what: &str, good: impl Fn(f64) -> bool) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|x| x.is_finite() && good(*x)).ok_or_else(|| format!("must be {what}"))
}

/// A number above zero.
pub(super) fn positive(text: &str) -> Result<f64, String> {
    number(text, "a number above 0", |x| x > 0.0)
}

/// A number of at least zero.
pub(super) fn not_negative(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 0", |x| x >= 0.0)
}

/// A number of at least zero and below one.
pub(super) fn below_one(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 0 and below 1", |x| (0.0..1.0).contains(&x))
}

/// A number above zero and at most one.
pub(super) fn fraction(text: &str) -> Result<f64, String> {
    number(text, "a number above 0 and at most 1", |x| x > 0.0 && x <= 1.0)
}

/// A time in seconds.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    number(text, "a number of seconds from 0.001 to 1000000", |x| (1e-3..=1e6).contains(&x))
        .map(Duration::from_secs_f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_by_hand() {
        assert_eq!(
            ["5GB", "12 MB", "3KB", "7"].map(|text| bytes(text).unwrap()),
            [5_000_000_000, 12_000_000, 3000, 7].map(Bytes)
        );
        for bad in ["", "GB", "0", "0MB", "-1", "1.5GB", "5TB", "99999999999999GB"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn meshes_are_put_in_order() {
        for (text, shown) in [
            ("", "mesh()"),
            ("tp=2", "mesh(tp=2)"),
            ("tp=2, dp=3", "mesh(dp=3, tp=2)"),
            ("tp=2,cp=1,ep=2,dp=3,pp=4", "mesh(pp=4, dp=3, ep=2, cp=1, tp=2)"),
        ] {
            assert_eq!(mesh(text).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn bad_meshes_are_explained() {
        let told = |text: &str| {
            let error = mesh(text).unwrap_err();
            assert_eq!(error.kind(), Kind::Mesh);
            error.to_string().replace("\n  help       ", "; ")
        };
        assert_eq!(
            told("dp=2,tq=2"),
            "there is no mesh axis `tq`; did you mean `tp`? the axes are pp, dp, ep, cp, tp"
        );
        assert_eq!(told("model=2"), "there is no mesh axis `model`; the axes are pp, dp, ep, cp, tp");
        assert_eq!(told("tp=2,tp=2"), "axis `tp` is named twice in the mesh");
        assert_eq!(told("tp=0"), "axis `tp` has size 0; leave it out or give it size 1");
        assert_eq!(told("tp"), "`tp` is no mesh axis; write axis=size, as in dp=2,tp=2");
        assert_eq!(told("tp=-1"), "`tp=-1` is no mesh axis; write axis=size, as in dp=2,tp=2");
        assert_eq!(told("tp=99999999999"), "axis `tp` takes the mesh beyond 2^31 ranks");
    }

    #[test]
    fn presets_are_checked() {
        assert_eq!(preset("tiny").unwrap(), "tiny");
        assert!(
            preset("tinny")
                .unwrap_err()
                .starts_with("there is no such preset; did you mean `tiny`? presets are")
        );
        assert!(preset("bert").unwrap_err().starts_with("there is no such preset; presets are tiny, "));
    }

    #[test]
    fn numbers_are_checked_at_their_limits() {
        let counts = ["0", "1", "2147483648", "2147483649", "-1", "1.5", "", "x", "99999999999999999999"];
        assert_eq!(
            counts.map(|t| count(t).ok()),
            [None, Some(1), Some(1 << 31), None, None, None, None, None, None]
        );
        assert_eq!(count_or_none("0"), Ok(0));
        assert_eq!(count_or_none("-1").unwrap_err(), "must be a whole number of at least 0");
        type Check = fn(&str) -> Result<f64, String>;
        let cases: [(Check, [bool; 7]); 4] = [
            (positive, [false, false, false, true, true, true, true]),
            (not_negative, [false, true, true, true, true, true, true]),
            (below_one, [false, true, true, true, true, false, false]),
            (fraction, [false, false, false, true, true, true, false]),
        ];
        for (check, good) in cases {
            let got = ["-1e-9", "0", "-0", "1e-9", "0.999", "1", "1.001"].map(|text| check(text).is_ok());
            assert_eq!(got, good);
            assert!(["nan", "inf", "-inf", "1e999", "", "one"].iter().all(|text| check(text).is_err()));
        }
        assert_eq!(seconds("0.5").unwrap(), Duration::from_millis(500));
        assert!(["0", "-1", "nan", "1e7", "x"].iter().all(|text| seconds(text).is_err()));
    }
}
