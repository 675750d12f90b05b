//! What a small op costs in candle: an add of 16 floats, plain, on variables, and with its backward pass.
//! `benches/tape.py` runs it.

#![forbid(unsafe_code)]

use candle_core::{Device, Result, Tensor, Var};
use std::hint::black_box;
use std::time::Instant;

/// As `shardgrad bench tape`: so many calls make a sample, and the best of so many samples counts.
const CALLS: usize = 500;
const SAMPLES: usize = 101;

/// Seconds of a call in the best sample.
fn best(mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..SAMPLES {
        let started = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        best = best.min(started.elapsed().as_secs_f64() / CALLS as f64);
    }
    Ok(best)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let vector = |first: f32| -> Result<Var> {
        let numbers: Vec<f32> = (0..16).map(|i| first + i as f32).collect();
        Var::from_vec(numbers, 16, &Device::Cpu)
    };
    let (x, y) = (vector(1.0)?, vector(-3.0)?);
    let (plain_x, plain_y) = (x.detach(), y.detach());
    let sum = x.add(&y)?;
    assert_eq!(sum.to_vec1::<f32>()?[15], 28.0, "what is timed is right");
    let gradients = sum.sum_all()?.backward()?;
    assert_eq!(gradients.get(&x).map(Tensor::to_vec1::<f32>).transpose()?, Some(vec![1.0; 16]));
    let plain = || {
        black_box(plain_x.add(&plain_y)?);
        Ok(())
    };
    let tracked = || {
        black_box(x.add(&y)?);
        Ok(())
    };
    let backward = || {
        black_box(x.add(&y)?.sum_all()?.backward()?);
        Ok(())
    };
    let cases = [
        ("forward", best(plain)?),
        ("forward, on a tape", best(tracked)?),
        ("with backward", best(backward)?),
    ];
    for (case, seconds) in cases {
        println!("{{\"case\": \"{case}\", \"seconds\": {seconds:e}}}");
    }
    Ok(())
}
