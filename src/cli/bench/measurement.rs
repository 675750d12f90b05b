//! A measurement: repeated for a time, reported as one line.

use serde_json::json;
use shardgrad::kernels::Device;
use shardgrad::{Error, Kind, Result};
use std::time::{Duration, Instant};

/// Minimum number of samples; the median counts.
const SAMPLES_MIN: usize = 5;
/// Maximum number of samples.
const SAMPLES_MAX: usize = 101;

/// Benchmark settings: measuring time, output format, roofline and device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bench {
    pub(super) limit: Duration,
    pub(super) json: bool,
    pub(super) roofline: Option<Roofline>,
    pub(super) device: Device,
}

/// Peak rates of some cores together (roofline).
#[derive(Clone, Copy, Debug)]
pub(super) struct Roofline {
    /// f32 FLOP/s.
    pub(super) flops: f64,
    /// Memory bandwidth: bytes read and written per second.
    pub(super) bytes: f64,
}

/// The work of a call, for a rate.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// Floating-point operations.
    Flops(f64),
    /// Bytes moved.
    Bytes(f64),
    /// Training tokens, and their FLOPs.
    Tokens(f64, f64),
    /// Calls only.
    Call,
}

impl Work {
    /// Returns the rate and its unit, for a call of `seconds`.
    fn rate(self, seconds: f64) -> (f64, &'static str) {
        match self {
            Work::Flops(n) => (n / seconds / 1e9, "GFLOP/s"),
            Work::Bytes(n) => (n / seconds / 1e9, "GB/s"),
            Work::Tokens(n, _) => (n / seconds, "tokens/s"),
            Work::Call => (1.0 / seconds, "calls/s"),
        }
    }

    /// Returns the fraction of the roofline. It exceeds 1 for bytes in caches, and for bf16 matmuls on CPUs with bf16 dot products.
    fn part(self, seconds: f64, roofline: Roofline) -> Option<f64> {
        match self {
            Work::Flops(n) | Work::Tokens(_, n) => Some(n / seconds / roofline.flops),
            Work::Bytes(n) => Some(n / seconds / roofline.bytes),
            Work::Call => None,
        }
    }
}

impl Bench {
    /// Returns the seconds per call: the median over samples of `calls` calls each.
    pub(super) fn seconds(&self, calls: usize, call: impl FnMut() -> Result<()>) -> Result<f64> {
        let samples = self.samples(SAMPLES_MIN, calls, call)?;
        Ok(samples[samples.len() / 2])
    }

    /// Returns the minimum seconds per call, for calls below a microsecond, where interference dominates the median.
    pub(super) fn best_seconds(&self, calls: usize, call: impl FnMut() -> Result<()>) -> Result<f64> {
        Ok(self.samples(SAMPLES_MAX, calls, call)?[0])
    }

    /// Returns the sorted seconds per call of at least `least` samples.
    fn samples(&self, least: usize, calls: usize, mut call: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
        let mut sample = || -> Result<f64> {
            let started = Instant::now();
            for _ in 0..calls {
                call()?;
            }
            Ok(started.elapsed().as_secs_f64() / calls as f64)
        };
        // The first sample warms caches and allocators, and determines the number of samples.
        let once = sample()? * calls as f64;
        let count = (self.limit.as_secs_f64() / once.max(1e-9)) as usize;
        let mut samples =
            (0..count.clamp(least, SAMPLES_MAX)).map(|_| sample()).collect::<Result<Vec<f64>>>()?;
        samples.sort_by(f64::total_cmp);
        Ok(samples)
    }

    /// Reports one measurement.
    pub(super) fn report(&self, group: &str, case: &str, mesh: &str, seconds: f64, work: Work) {
        self.report_with_memory(group, (case, mesh), seconds, work, None);
    }

    /// Reports one measurement with the peak memory of all ranks together.
    pub(super) fn report_with_memory(
        &self,
        group: &str,
        (case, mesh): (&str, &str),
        seconds: f64,
        work: Work,
        peak_bytes: Option<usize>,
    ) {
        let (rate, unit) = work.rate(seconds);
        let part = self.roofline.and_then(|roofline| work.part(seconds, roofline));
        if self.json {
            let version = env!("CARGO_PKG_VERSION");
            let line = json!({"bench": group, "case": case, "mesh": mesh, "seconds": seconds, "rate": rate,
                "unit": unit, "of_roof": part, "peak_bytes": peak_bytes, "device": self.device.to_string(), "version": version});
            println!("{line}");
            return;
        }
        let time = match seconds {
            s if s < 1e-6 => format!("{:.0} ns", s * 1e9),
            s if s < 1e-3 => format!("{:.2} us", s * 1e6),
            s if s < 1.0 => format!("{:.2} ms", s * 1e3),
            s => format!("{s:.2} s"),
        };
        let part = part.map_or(String::new(), |part| format!("  {:.0}% of roofline", 100.0 * part));
        let memory =
            peak_bytes.map_or(String::new(), |bytes| format!("  {:.1} MiB", bytes as f64 / 1_048_576.0));
        println!("{group:<12} {case:<40} {mesh:<10} {time:>10}  {rate:>12.1} {unit}{part}{memory}");
    }
}

/// Rejects a wrong result, with `tolerance` relative to the largest element.
pub(super) fn check(case: &str, got: &[f64], want: &[f64], tolerance: f64) -> Result<()> {
    let scale = want.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    let far = |(g, w): (&f64, &f64)| (g - w).abs().is_nan() || (g - w).abs() > tolerance * scale;
    let wrong = got.iter().zip(want).position(far);
    if got.len() == want.len() && wrong.is_none() {
        return Ok(());
    }
    let at = wrong.unwrap_or(got.len().min(want.len()));
    let text = format!(
        "{case}: wrong result at element {at}: {:?}, expected {:?}; not timed",
        got.get(at),
        want.get(at)
    );
    Err(Error::new(Kind::NotFinite, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_results_are_not_timed() {
        assert!(check("x", &[1.0, 2.0], &[1.0, 2.0 + 1e-9], 1e-6).is_ok());
        for got in [&[1.0, 2.1][..], &[1.0, f64::NAN], &[1.0]] {
            let text = check("x", got, &[1.0, 2.0], 1e-6).unwrap_err().to_string();
            assert!(
                text.starts_with("x: wrong result at element 1: ") && text.ends_with("; not timed"),
                "{text}"
            );
        }
    }

    #[test]
    fn roofline_fractions() {
        let roofline = Roofline { flops: 4e9, bytes: 1e9 };
        assert_eq!(Work::Flops(1e9).part(0.5, roofline), Some(0.5));
        assert_eq!(Work::Tokens(3.0, 1e9).part(0.25, roofline), Some(1.0));
        assert_eq!(Work::Bytes(1e9).part(0.5, roofline), Some(2.0));
        assert_eq!(Work::Call.part(0.5, roofline), None);
    }

    #[test]
    fn measurement_takes_enough_samples() {
        let bench =
            Bench { limit: Duration::from_millis(1), json: false, roofline: None, device: Device::Cpu };
        let mut calls = 0;
        let seconds = bench.seconds(3, || {
            calls += 1;
            Ok(())
        });
        assert!(seconds.unwrap() < 1.0 && calls >= 3 * (SAMPLES_MIN + 1), "{calls}");
    }
}
