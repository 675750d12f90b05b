//! Value parsers of options, with one-line errors.

use super::nearest::nearest;
use crate::outputs::io_error;
use shardgrad::autograd::pipeline::{Cut, NAMES, PassTimes, Schedule};
use shardgrad::dist::Mesh;
use shardgrad::kernels::Device;
use shardgrad::nn::plan::PipelineSchedule;
use shardgrad::nn::{ModelConfig, Plan};
use shardgrad::{Error, Kind, Result};
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Mesh axes in their fixed order, outermost first.
pub(crate) const AXES: [&str; 6] = ["pp", "dp", "fsdp", "ep", "cp", "tp"];

/// Maximum of counts; steps times batch then fit 64 bits.
const COUNT_MAX: usize = 1 << 31;
/// Maximum number of threads of a process.
pub(super) const THREADS_MAX: usize = 1024;
/// Minimum of the times of a pipeline; the maximum is its inverse.
const TIME_MIN: f64 = 1e-6;
/// Maximum size of a schedule file.
pub(super) const LISTS_BYTES_MAX: u64 = 64 << 20;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) u64);

/// Parses a mesh such as `dp=2,tp=2` and sorts its axes into their fixed order; omitted axes have size 1. Axes of other names, of a
/// plan file, come last, in the order given.
pub(super) fn mesh(text: &str) -> Result<Mesh> {
    let read = Mesh::parse(text)?;
    let known = AXES.iter().filter_map(|name| read.axis(name));
    let own = read.axes().filter(|axis| !AXES.contains(&read.name(*axis)));
    let axes: Vec<(&str, usize)> = known.chain(own).map(|axis| (read.name(axis), read.size(axis))).collect();
    Mesh::new(&axes)
}

/// Parses a device.
pub(super) fn device(text: &str) -> Result<Device, String> {
    let runs = |device: &Device| *device != Device::Null;
    Device::parse(text).filter(runs).ok_or_else(|| "expected cpu, cuda or cuda:N".into())
}

/// Parses the name of a preset.
pub(super) fn preset(text: &str) -> Result<String, String> {
    if ModelConfig::preset_names().any(|name| name == text) {
        return Ok(text.to_string());
    }
    let near =
        nearest(text, ModelConfig::preset_names()).map_or(String::new(), |n| format!("did you mean `{n}`? "));
    let names: Vec<&str> = ModelConfig::preset_names().collect();
    Err(format!("unknown preset; {near}presets are {}", names.join(", ")))
}

/// The largest plan file.
pub(super) const PLAN_BYTES_MAX: u64 = 1 << 20;

/// Parses how layers are partitioned into stages.
pub(super) fn cut(text: &str) -> Result<Cut> {
    text.parse()
}

/// A pipeline schedule, and the file it was read from, if it is not a named one.
#[derive(Clone, Debug)]
pub(crate) struct ScheduleArg {
    pub(crate) passes: PipelineSchedule,
    pub(crate) file: Option<PathBuf>,
}

/// Parses the name of a pipeline schedule, or reads a schedule file.
pub(super) fn schedule(text: &str) -> Result<ScheduleArg> {
    let refused = match Schedule::named(text, 1, 1) {
        Ok(_) => return Ok(ScheduleArg { passes: PipelineSchedule::Named(text.to_string()), file: None }),
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
            format!("{near}schedules are {}, or a file written by `plan --save FILE`", NAMES.join(", "));
        let error = Error::new(Kind::Config, "neither a schedule nor an existing file");
        return Err(error.detail("help", help));
    }
    let lists = Schedule::from_text(&read_small(path, LISTS_BYTES_MAX)?)?;
    Ok(ScheduleArg { passes: PipelineSchedule::Actions(lists), file: Some(path.to_path_buf()) })
}

/// A parallelism plan, and the file it was read from.
#[derive(Clone, Debug)]
pub(crate) struct PlanArg {
    pub(crate) plan: Plan,
    pub(crate) file: PathBuf,
}

/// Reads a plan file.
pub(super) fn plan(text: &str) -> Result<PlanArg> {
    let file = PathBuf::from(text);
    let plan = read_small(&file, PLAN_BYTES_MAX)?.parse()?;
    Ok(PlanArg { plan, file })
}

/// A plan that `explain --diff` compares.
#[derive(Clone, Debug)]
pub(crate) enum PlanChoice {
    /// The plan of the model's family.
    Family,
    /// The plan of a file.
    File(Box<PlanArg>),
}

impl PlanChoice {
    /// Returns the plan; `family` is that of the model's family.
    pub(crate) fn plan_or(&self, family: &Plan) -> Plan {
        match self {
            PlanChoice::Family => family.clone(),
            PlanChoice::File(file) => file.plan.clone(),
        }
    }
}

/// Parses `family`, or reads a plan file.
pub(super) fn plan_choice(text: &str) -> Result<PlanChoice> {
    if text == "family" { Ok(PlanChoice::Family) } else { plan(text).map(Box::new).map(PlanChoice::File) }
}

/// Parses three times: forward, input gradients, weight gradients.
pub(super) fn times(text: &str) -> Result<PassTimes, String> {
    let known = |x: f64| (TIME_MIN..=1.0 / TIME_MIN).contains(&x);
    let time = |text: &str| number(text.trim(), "numbers from 0.000001 to 1000000, as in 1,1,1", known);
    let parts: Vec<f64> = text.split(',').map(time).collect::<Result<_, _>>()?;
    match parts[..] {
        [forward, input, weight] => Ok(PassTimes { forward, input, weight }),
        _ => Err("must be three times, as in 1,1,1".to_string()),
    }
}

/// Parses the time of a transfer.
pub(super) fn transfer(text: &str) -> Result<f64, String> {
    number(text, "a number from 0 to 1000000", |x| (0.0..=1.0 / TIME_MIN).contains(&x))
}

/// Parses the number of threads per rank.
pub(super) fn threads(text: &str) -> Result<usize, String> {
    let found = count(text).ok().filter(|n| *n <= THREADS_MAX);
    found.ok_or_else(|| format!("must be an integer from 1 to {THREADS_MAX}"))
}

/// Parses a seed.
pub(super) fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("must be an integer from 0 to {}", u64::MAX))
}

/// Parses a token id.
pub(super) fn token(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("must be an integer from 0 to {}", u32::MAX))
}

/// Parses an integer of at least 1.
pub(super) fn count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n) if (1..=COUNT_MAX).contains(&n) => Ok(n),
        Ok(n) if n > COUNT_MAX => Err(format!("must be at most {COUNT_MAX}")),
        _ => Err("must be an integer of at least 1".to_string()),
    }
}

/// Parses a stage of ZeRO.
pub(super) fn zero_stage(text: &str) -> Result<usize, String> {
    let stage = text.parse().ok().filter(|stage| (1..=3).contains(stage));
    stage.ok_or_else(|| "the stages are 1, 2 and 3".to_string())
}

/// Parses an integer of at least 0.
pub(super) fn count_or_none(text: &str) -> Result<usize, String> {
    if text == "0" { Ok(0) } else { count(text).map_err(|why| why.replace("at least 1", "at least 0")) }
}

/// Parses a positive number of bytes: `5GB`, `500MB`, `20KB` (powers of 1000), or without a unit.
pub(super) fn bytes(text: &str) -> Result<Bytes, String> {
    let units = [("GB", 1_000_000_000), ("MB", 1_000_000), ("KB", 1000), ("", 1)];
    let read = |(unit, size): (&str, u64)| {
        text.strip_suffix(unit)?.trim_end().parse::<u64>().ok()?.checked_mul(size)
    };
    let found = units.into_iter().find_map(read).filter(|n| *n > 0).map(Bytes);
    found.ok_or_else(|| "must be a number of bytes above 0, as in 500MB or 5GB".to_string())
}

/// Parses a number of bytes, which may be 0.
pub(super) fn bytes_or_none(text: &str) -> Result<Bytes, String> {
    if text == "0" {
        Ok(Bytes(0))
    } else {
        bytes(text).map_err(|why| why.replace("above 0", "of at least 0"))
    }
}

/// Parses a finite number for which `good` holds; `what` describes the valid numbers.
fn number(text: &str, what: &str, good: impl Fn(f64) -> bool) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|x| x.is_finite() && good(*x)).ok_or_else(|| format!("must be {what}"))
}

/// Parses a number above 0.
pub(super) fn positive(text: &str) -> Result<f64, String> {
    number(text, "a number above 0", |x| x > 0.0)
}

/// Parses a number of at least 0.
pub(super) fn not_negative(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 0", |x| x >= 0.0)
}

/// Parses a number in [0, 1).
pub(super) fn below_one(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 0 and below 1", |x| (0.0..1.0).contains(&x))
}

/// Parses a number in (0, 1].
pub(super) fn fraction(text: &str) -> Result<f64, String> {
    number(text, "a number above 0 and at most 1", |x| x > 0.0 && x <= 1.0)
}

/// Parses a duration in seconds.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    number(text, "a number of seconds from 0.001 to 1000000", |x| (1e-3..=1e6).contains(&x))
        .map(Duration::from_secs_f64)
}

/// Reads a regular text file of at most `bytes_max` bytes.
///
/// # Errors
/// `Kind::Io` if the file cannot be read; `Kind::Data` for a pipe, a device, a folder, or a larger file.
pub(super) fn read_small(path: &Path, bytes_max: u64) -> Result<String> {
    let refuse = |why: String| Err(Error::new(Kind::Data, format!("{}: {why}", path.display())));
    let found = fs::metadata(path).map_err(|e| io_error("read", path, &e))?;
    if !found.is_file() {
        return refuse("is a folder, a pipe or a device, not a file".to_string());
    }
    let mut text = String::new();
    let file = File::open(path).map_err(|e| io_error("read", path, &e))?;
    file.take(bytes_max + 1).read_to_string(&mut text).map_err(|e| io_error("read", path, &e))?;
    if text.len() as u64 > bytes_max {
        return refuse(format!("has more than {bytes_max} bytes"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;

    #[test]
    fn byte_sizes_are_parsed() {
        assert_eq!(
            ["5GB", "12 MB", "3KB", "7"].map(|text| bytes(text).unwrap()),
            [5_000_000_000, 12_000_000, 3000, 7].map(Bytes)
        );
        for bad in ["", "GB", "0", "0MB", "-1", "1.5GB", "5TB", "99999999999999GB"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn mesh_axes_are_sorted() {
        for (text, shown) in [
            ("", "mesh()"),
            ("tp=2", "mesh(tp=2)"),
            ("tp=2, dp=3", "mesh(dp=3, tp=2)"),
            ("tp=2,cp=1,ep=2,fsdp=2,dp=3,pp=4", "mesh(pp=4, dp=3, fsdp=2, ep=2, cp=1, tp=2)"),
        ] {
            assert_eq!(mesh(text).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn invalid_meshes_are_explained() {
        let error_text = |text: &str| {
            let error = mesh(text).unwrap_err();
            assert_eq!(error.kind(), Kind::Mesh);
            error.to_string().replace("\n  help       ", "; ")
        };
        assert_eq!(error_text("tp=2,tp=2"), "axis `tp` is named twice in the mesh");
        assert_eq!(error_text("tp=0"), "axis `tp` has size 0; leave it out or give it size 1");
        assert_eq!(error_text("tp"), "`tp` is not a mesh axis: write axis=size, as in dp=2,tp=2");
        assert_eq!(error_text("tp=-1"), "`tp=-1` is not a mesh axis: write axis=size, as in dp=2,tp=2");
        assert_eq!(
            error_text("tp=99999999999"),
            "axis `tp` of size 99999999999 makes the mesh larger than 2^31 ranks"
        );
    }

    #[test]
    fn presets_are_checked() {
        assert_eq!(preset("tiny").unwrap(), "tiny");
        assert!(preset("tinny").unwrap_err().starts_with("unknown preset; did you mean `tiny`? presets are"));
        assert!(preset("bert").unwrap_err().starts_with("unknown preset; presets are nano, "));
    }

    #[test]
    fn number_parsers_check_their_bounds() {
        let counts = ["0", "1", "2147483648", "2147483649", "-1", "1.5", "", "x", "99999999999999999999"];
        assert_eq!(
            counts.map(|t| count(t).ok()),
            [None, Some(1), Some(1 << 31), None, None, None, None, None, None]
        );
        assert_eq!(count_or_none("0"), Ok(0));
        assert_eq!(count_or_none("-1").unwrap_err(), "must be an integer of at least 0");
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

    #[test]
    fn read_small_refuses_long_and_special_files() {
        let dir = Scratch::new();
        assert_eq!(read_small(&dir.file("f", "four"), 4).unwrap(), "four");
        let error_text = |path: &Path| read_small(path, 3).unwrap_err().message().to_string();
        assert!(error_text(&dir.path("f")).ends_with("f: has more than 3 bytes"));
        assert!(error_text(Path::new("/dev/zero")).ends_with("is a folder, a pipe or a device, not a file"));
    }
}
