//! One measurement: repeated for a while, told as a line.

use serde_json::json;
use shardgrad::kernels::Device;
use shardgrad::{Error, Kind, Result};
use std::time::{Duration, Instant};

/// A measurement has so many samples at least, of which the median counts.
const SAMPLES_MIN: usize = 5;
/// And no more than so many.
const SAMPLES_MAX: usize = 101;

/// How long to measure, how to tell, and what this machine can do at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bench {
    pub(super) limit: Duration,
    pub(super) json: bool,
    pub(super) roof: Option<Roof>,
    pub(super) device: Device,
}

/// Rates that some cores together reach at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Roof {
    /// Floating-point operations a second, f32.
    pub(super) flops: f64,
    /// Bytes read and written a second, in memory.
    pub(super) bytes: f64,
}

/// How much one call does, for a rate.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// Floating-point operations.
    Flops(f64),
    /// Bytes moved.
    Bytes(f64),
    /// Tokens trained on, and the floating-point operations that they take.
    Tokens(f64, f64),
    /// Nothing but the call itself.
    Call,
}

impl Work {
    /// The rate at so many seconds a call, and its unit.
    fn rate(self, seconds: f64) -> (f64, &'static str) {
        match self {
            Work::Flops(n) => (n / seconds / 1e9, "GFLOP/s"),
            Work::Bytes(n) => (n / seconds / 1e9, "GB/s"),
            Work::Tokens(n, _) => (n / seconds, "tokens/s"),
            Work::Call => (1.0 / seconds, "calls/s"),
        }
    }

    /// The part of the roof that is reached at so many seconds a call. Above 1 for bytes that stay in caches, and for products
    /// of bf16 on CPUs that have dot products of it.
    fn part(self, seconds: f64, roof: Roof) -> Option<f64> {
        match self {
            Work::Flops(n) | Work::Tokens(_, n) => Some(n / seconds / roof.flops),
            Work::Bytes(n) => Some(n / seconds / roof.bytes),
            Work::Call => None,
        }
    }
}

impl Bench {
    /// Seconds of one call: the median over samples of `calls` calls each.
    pub(super) fn seconds(&self, calls: usize, call: impl FnMut() -> Result<()>) -> Result<f64> {
        let samples = self.samples(SAMPLES_MIN, calls, call)?;
        Ok(samples[samples.len() / 2])
    }

    /// Seconds of one call at best: what is left when nothing interferes, for calls that take less than a microsecond.
    pub(super) fn best_seconds(&self, calls: usize, call: impl FnMut() -> Result<()>) -> Result<f64> {
        Ok(self.samples(SAMPLES_MAX, calls, call)?[0])
    }

    /// Seconds of one call in each of at least `least` samples, in order.
    fn samples(&self, least: usize, calls: usize, mut call: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
        let mut sample = || -> Result<f64> {
            let started = Instant::now();
            for _ in 0..calls {
                call()?;
            }
            Ok(started.elapsed().as_secs_f64() / calls as f64)
        };
        // The first one warms caches and allocators; it also says how many there is time for.
        let once = sample()? * calls as f64;
        let count = (self.limit.as_secs_f64() / once.max(1e-9)) as usize;
        let mut samples =
            (0..count.clamp(least, SAMPLES_MAX)).map(|_| sample()).collect::<Result<Vec<f64>>>()?;
        samples.sort_by(f64::total_cmp);
        Ok(samples)
    }

    /// Prints one line.
    pub(super) fn tell(&self, group: &str, case: &str, mesh: &str, seconds: f64, work: Work) {
        self.tell_with(group, (case, mesh), seconds, work, None);
    }

    /// Prints one line, with the most bytes of tensors that all ranks held together.
    pub(super) fn tell_with(
        &self,
        group: &str,
        (case, mesh): (&str, &str),
        seconds: f64,
        work: Work,
        peak_bytes: Option<usize>,
    ) {
        let (rate, unit) = work.rate(seconds);
        let part = self.roof.and_then(|roof| work.part(seconds, roof));
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
        let part = part.map_or(String::new(), |part| format!("  {:.0}% of the roof", 100.0 * part));
        let memory =
            peak_bytes.map_or(String::new(), |bytes| format!("  {:.1} MiB", bytes as f64 / 1_048_576.0));
        println!("{group:<12} {case:<40} {mesh:<10} {time:>10}  {rate:>12.1} {unit}{part}{memory}");
    }
}

/// Refuses to go on with a result that is not what it should be, to a part of `tolerance` of the largest number.
pub(super) fn check(case: &str, got: &[f64], want: &[f64], tolerance: f64) -> Result<()> {
    let scale = want.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    let far = |(g, w): (&f64, &f64)| (g - w).abs().is_nan() || (g - w).abs() > tolerance * scale;
    let wrong = got.iter().zip(want).position(far);
    if got.len() == want.len() && wrong.is_none() {
        return Ok(());
    }
    let at = wrong.unwrap_or(got.len().min(want.len()));
    let text = format!(
        "{case} is wrong at element {at}: {:?} instead of {:?}; not timed",
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
            assert!(text.starts_with("x is wrong at element 1: ") && text.ends_with("; not timed"), "{text}");
        }
    }

    #[test]
    fn parts_of_the_roof() {
        let roof = Roof { flops: 4e9, bytes: 1e9 };
        assert_eq!(Work::Flops(1e9).part(0.5, roof), Some(0.5));
        assert_eq!(Work::Tokens(3.0, 1e9).part(0.25, roof), Some(1.0));
        assert_eq!(Work::Bytes(1e9).part(0.5, roof), Some(2.0));
        assert_eq!(Work::Call.part(0.5, roof), None);
    }

    #[test]
    fn a_measurement_has_samples_enough() {
        let bench = Bench { limit: Duration::from_millis(1), json: false, roof: None, device: Device::Cpu };
        let mut calls = 0;
        let seconds = bench.seconds(3, || {
            calls += 1;
            Ok(())
        });
        assert!(seconds.unwrap() < 1.0 && calls >= 3 * (SAMPLES_MIN + 1), "{calls}");
    }
}
