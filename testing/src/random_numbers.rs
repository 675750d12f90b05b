//! Reproducible random numbers for tests.

/// Returns `count` numbers in -1..1 that depend on the seed and their position alone.
#[must_use]
pub fn random_numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..count).map(|_| 2.0 * next() - 1.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_and_depend_on_the_seed() {
        let numbers = random_numbers(3, 1000);
        assert_eq!(numbers[..10], random_numbers(3, 10));
        assert_ne!(numbers[..10], random_numbers(4, 10));
        for quarter in [-1.0, -0.5, 0.0, 0.5] {
            let count = numbers.iter().filter(|x| (quarter..quarter + 0.5).contains(*x)).count();
            assert!((200..300).contains(&count), "{count} numbers from {quarter}");
        }
    }
}
