//! Token sampling: temperature, top-k, nucleus (top-p) and greedy.

use crate::cli::args::SamplingArgs;
use std::cmp::Ordering;

/// Samples a token by its logits; `u` is uniform in [0, 1).
pub(super) fn sample_token(logits: &[f64], sampling: &SamplingArgs, u: f64) -> usize {
    let mut sorted_logits = SortedLogits::new(logits, if sampling.greedy { Some(1) } else { sampling.top_k });
    let all = sorted_logits.order.len();
    let best = sorted_logits.order.iter().fold(f64::NEG_INFINITY, |best, token| best.max(logits[*token]));
    let weight = |token: usize| ((logits[token] - best) / sampling.temperature).exp();
    let total: f64 = sorted_logits.order.iter().map(|token| weight(*token)).sum();
    let (mut whole, mut count) = (total, all);
    if let Some(p) = sampling.top_p {
        let mut sum = 0.0;
        whole = 0.0;
        for i in 0..all {
            let weight = weight(sorted_logits.at(i));
            whole += weight;
            sum += weight / total;
            if sum >= p {
                count = i + 1;
                break;
            }
        }
    }
    let mut left = u * whole;
    for i in 0..count {
        let token = sorted_logits.at(i);
        left -= weight(token);
        if left < 0.0 {
            return token;
        }
    }
    sorted_logits.at(count - 1)
}

/// Number of tokens sorted at first; most samples are among them.
const FIRST: usize = 256;

/// Tokens in descending order of their logits, ties by id. Sorted lazily, since only the first ones are needed.
struct SortedLogits<'a> {
    logits: &'a [f64],
    order: Vec<usize>,
    sorted: usize,
}

impl<'a> SortedLogits<'a> {
    /// Starts with all tokens, or with the `top` most likely.
    fn new(logits: &'a [f64], top: Option<usize>) -> SortedLogits<'a> {
        let all = logits.len();
        let mut sorted_logits = SortedLogits { logits, order: (0..all).collect(), sorted: 0 };
        if let Some(top) = top.filter(|top| *top < all) {
            sorted_logits.sort_to(top);
            sorted_logits.order.truncate(top);
        }
        sorted_logits
    }

    fn at(&mut self, i: usize) -> usize {
        if i >= self.sorted {
            self.sort_to((2 * i).max(FIRST).min(self.order.len()));
        }
        self.order[i]
    }

    fn sort_to(&mut self, end: usize) {
        let logits = self.logits;
        let fall = |a: &usize, b: &usize| -> Ordering { logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)) };
        let rest = &mut self.order[self.sorted..];
        let len = end - self.sorted;
        if len < rest.len() {
            rest.select_nth_unstable_by(len, fall);
        }
        rest[..len].sort_unstable_by(fall);
        self.sorted = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad::kernels::op::random::uniform_at;

    fn sampling(top_k: Option<usize>, top_p: Option<f64>, greedy: bool) -> SamplingArgs {
        SamplingArgs { temperature: 1.0, top_k, top_p, greedy, seed: 0 }
    }

    #[test]
    fn sample_token_matches_hand_computed_choices() {
        // Probabilities 1/7, 4/7, 2/7.
        let logits = [0.0, 4f64.ln(), 2f64.ln()];
        assert_eq!(sample_token(&logits, &sampling(None, None, true), 0.999), 1);
        let pick = |u| sample_token(&logits, &sampling(None, None, false), u);
        assert_eq!(
            [pick(0.0), pick(0.57), pick(0.58), pick(0.85), pick(0.86), pick(0.9999)],
            [1, 1, 2, 2, 0, 0]
        );
        assert_eq!(sample_token(&logits, &sampling(Some(1), None, false), 0.99), 1);
        assert_eq!(sample_token(&logits, &sampling(None, Some(0.6), false), 0.99), 2);
        assert_eq!(sample_token(&logits, &sampling(None, Some(0.5), false), 0.99), 1);
        assert_eq!(
            sample_token(&[1.0, 3.0, 3.0], &sampling(None, None, true), 0.0),
            1,
            "ties go to the first"
        );
    }

    /// Reference: samples with all tokens sorted.
    fn sorted(logits: &[f64], sampling: &SamplingArgs, u: f64) -> usize {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        order.truncate(sampling.top_k.unwrap_or(order.len()));
        let weight = |t: &usize| ((logits[*t] - logits[order[0]]) / sampling.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        if let Some(p) = sampling.top_p {
            let (total, mut sum) = (weights.iter().sum::<f64>(), 0.0);
            let enough = weights.iter().position(|w| {
                sum += w / total;
                sum >= p
            });
            weights.truncate(enough.map_or(weights.len(), |at| at + 1));
        }
        let mut left = u * weights.iter().sum::<f64>();
        let chosen = weights.iter().position(|w| {
            left -= w;
            left < 0.0
        });
        order[chosen.unwrap_or(weights.len() - 1)]
    }

    #[test]
    fn lazy_sort_matches_full_sort() {
        // Flat enough that samples are far down the order; every third token has a tie.
        let logits = |seed: u64| -> Vec<f64> {
            (0..3000u64).map(|i| 4.0 * uniform_at(seed, 1, if i % 3 == 0 { i / 6 } else { i })).collect()
        };
        let mut found = std::collections::BTreeSet::new();
        for case in 0..400 {
            let logits = logits(case % 7);
            let top_k = [None, Some(1), Some(40), Some(1500), Some(3000), Some(9000)][case as usize % 6];
            let top_p = [None, Some(0.01), Some(0.5), Some(0.99), Some(1.0)][case as usize % 5];
            let sampling = SamplingArgs {
                temperature: [1.0, 0.3, 2.0][case as usize % 3],
                ..sampling(top_k, top_p, false)
            };
            let u = uniform_at(9, 2, case);
            let one = sample_token(&logits, &sampling, u);
            assert_eq!(one, sorted(&logits, &sampling, u), "case {case}: {top_k:?}, {top_p:?}, {u}");
            found.insert(one);
        }
        assert!(found.len() > 150, "{} tokens", found.len());
    }
}
