//! f32 matmuls by the crate gemm: reads one shape per line and prints the rate of each.
//! `benches/products.py` runs it and sets the number of rayon threads.

use gemm::Parallelism;
use std::error::Error;
use std::io::stdin;
use std::time::Instant;

const USAGE: &str =
    "usage: THREADS SECONDS, and lines of M K N and `plain`, `b transposed` or `a transposed` to read";
/// FLOPs per sample, enough for the clock resolution.
const SAMPLE: f64 = 5e6;
/// Number of samples per shape; the median counts.
const SAMPLES_MIN: usize = 5;
const SAMPLES_MAX: usize = 101;
/// Number of elements compared with sums in f64.
const CHECKED: usize = 64;
const TOLERANCE: f64 = 1e-5;
/// Maximum m, k and n, so that element counts do not overflow.
const EXTENT_MAX: usize = 65_536;

/// A matrix with row and column strides.
struct Matrix {
    data: Vec<f32>,
    strides: [usize; 2],
}

impl Matrix {
    /// Returns random numbers in -1..1, row-major or column-major.
    fn random([rows, cols]: [usize; 2], transposed: bool, seed: usize) -> Matrix {
        let number = |i: usize| ((i * 7919 + seed * 104_729) % 2001) as f32 / 1000.0 - 1.0;
        let strides = if transposed { [1, rows] } else { [cols, 1] };
        Matrix { data: (0..rows * cols).map(number).collect(), strides }
    }

    fn at(&self, row: usize, col: usize) -> f32 {
        self.data[row * self.strides[0] + col * self.strides[1]]
    }
}

/// c = a b, of `[m, k]` and `[k, n]`.
struct Product {
    extents: [usize; 3],
    a: Matrix,
    b: Matrix,
    c: Matrix,
}

impl Product {
    /// Parses a line such as `128 64 128 b transposed`.
    fn of(line: &str) -> Option<Product> {
        let mut words = line.splitn(4, ' ');
        let mut extent = || words.next()?.parse().ok().filter(|n| (1..=EXTENT_MAX).contains(n));
        let [m, k, n]: [usize; 3] = [extent()?, extent()?, extent()?];
        let transposed = words.next()?;
        ["plain", "b transposed", "a transposed"].contains(&transposed).then(|| Product {
            extents: [m, k, n],
            a: Matrix::random([m, k], transposed == "a transposed", 1),
            b: Matrix::random([k, n], transposed == "b transposed", 2),
            c: Matrix { data: vec![0.0; m * n], strides: [n, 1] },
        })
    }

    fn form(&mut self, threads: Parallelism) {
        let [m, k, n] = self.extents;
        let [a, b, c] = [&self.a, &self.b, &self.c].map(|matrix| matrix.strides.map(|step| step as isize));
        let (into, left, right) = (self.c.data.as_mut_ptr(), self.a.data.as_ptr(), self.b.data.as_ptr());
        // SAFETY: every row and column of the extents has its element in each matrix, at the steps that it was made
        // with; c is borrowed for writing.
        unsafe {
            gemm::gemm(
                m, n, k, into, c[1], c[0], false, left, a[1], a[0], right, b[1], b[0], 0.0, 1.0, false,
                false, false, threads,
            );
        }
    }

    /// Returns whether some elements match sums in f64, relative to the largest.
    fn is_right(&self) -> bool {
        let [m, k, n] = self.extents;
        let places = || (0..CHECKED).map(|i| (i * 7919 % m, i * 104_729 % n));
        let term = |(i, j), p| f64::from(self.a.at(i, p)) * f64::from(self.b.at(p, j));
        let sums: Vec<f64> = places().map(|place| (0..k).map(|p| term(place, p)).sum()).collect();
        let scale = sums.iter().fold(1.0, |most: f64, sum| most.max(sum.abs()));
        places().zip(&sums).all(|((i, j), sum)| (f64::from(self.c.at(i, j)) - sum).abs() <= TOLERANCE * scale)
    }

    /// Returns GFLOP/s of the median sample, for samples that take `seconds` in total.
    fn gflops(&mut self, threads: Parallelism, limit: f64) -> f64 {
        let flops = 2.0 * self.extents.iter().product::<usize>() as f64;
        let calls = (SAMPLE / flops).ceil() as usize;
        let mut sample = || {
            let started = Instant::now();
            (0..calls).for_each(|_| self.form(threads));
            started.elapsed().as_secs_f64()
        };
        // The first sample warms caches, and determines the number of samples.
        let count = ((limit / sample()) as usize).clamp(SAMPLES_MIN, SAMPLES_MAX);
        let mut samples: Vec<f64> = (0..count).map(|_| sample()).collect();
        samples.sort_by(f64::total_cmp);
        flops * calls as f64 / samples[count / 2] / 1e9
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [threads, seconds] = &words[..] else { return Err(USAGE.into()) };
    let (threads, limit): (usize, f64) = (threads.parse()?, seconds.parse()?);
    let threads = if threads == 1 { Parallelism::None } else { Parallelism::Rayon(threads) };
    for line in stdin().lines() {
        let line = line?;
        let mut product = Product::of(&line).ok_or_else(|| format!("`{line}` is no shape; {USAGE}"))?;
        product.form(threads);
        if !product.is_right() {
            return Err(format!("{line} is wrong; not timed").into());
        }
        println!("{{\"shape\": \"{line}\", \"gflops\": {:?}}}", product.gflops(threads, limit));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_right_however_operands_lie() {
        for transposed in ["plain", "b transposed", "a transposed"] {
            let mut product = Product::of(&format!("5 70 33 {transposed}")).unwrap();
            assert!(!product.is_right(), "nothing is formed yet");
            product.form(Parallelism::None);
            assert!(product.is_right(), "{transposed}");
            product.c.data[0] = f32::NAN;
            assert!(!product.is_right());
        }
    }

    #[test]
    fn what_is_no_shape_is_refused() {
        for line in ["", "1 2 3", "1 2 3 transposed", "0 2 3 plain", "1 2 x plain", "1 2 70000 plain"] {
            assert!(Product::of(line).is_none(), "{line}");
        }
    }
}
