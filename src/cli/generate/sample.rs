//! The choice of a token by the scores of all.

use crate::cli::args::SamplingArgs;
use std::cmp::Ordering;

/// Chooses among tokens by their logits; `u` is uniform in 0..1.
pub(super) fn choose(logits: &[f64], how: &SamplingArgs, u: f64) -> usize {
    let mut falling = Falling::new(logits, if how.greedy { Some(1) } else { how.top_k });
    let all = falling.order.len();
    let best = falling.order.iter().fold(f64::NEG_INFINITY, |best, token| best.max(logits[*token]));
    let weight = |token: usize| ((logits[token] - best) / how.temperature).exp();
    let total: f64 = falling.order.iter().map(|token| weight(*token)).sum();
    let (mut whole, mut count) = (total, all);
    if let Some(p) = how.top_p {
        let mut sum = 0.0;
        whole = 0.0;
        for i in 0..all {
            let weight = weight(falling.at(i));
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
        let token = falling.at(i);
        left -= weight(token);
        if left < 0.0 {
            return token;
        }
    }
    falling.at(count - 1)
}

/// How many tokens are sorted at first; mostly the choice is among these.
const FIRST: usize = 256;

/// Tokens from the likeliest on, of equal ones the first: sorted as far as anyone looks, which is seldom far.
struct Falling<'a> {
    logits: &'a [f64],
    order: Vec<usize>,
    sorted: usize,
}

impl<'a> Falling<'a> {
    /// Of all tokens, or of so many of the likeliest.
    fn new(logits: &'a [f64], top: Option<usize>) -> Falling<'a> {
        let all = logits.len();
        let mut falling = Falling { logits, order: (0..all).collect(), sorted: 0 };
        if let Some(top) = top.filter(|top| *top < all) {
            falling.sort_to(top);
            falling.order.truncate(top);
        }
        falling
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

    fn how(top_k: Option<usize>, top_p: Option<f64>, greedy: bool) -> SamplingArgs {
        SamplingArgs { temperature: 1.0, top_k, top_p, greedy, seed: 0 }
    }

    #[test]
    fn choices_by_hand() {
        // Probabilities 1/7, 4/7, 2/7.
        let logits = [0.0, 4f64.ln(), 2f64.ln()];
        assert_eq!(choose(&logits, &how(None, None, true), 0.999), 1);
        let pick = |u| choose(&logits, &how(None, None, false), u);
        assert_eq!(
            [pick(0.0), pick(0.57), pick(0.58), pick(0.85), pick(0.86), pick(0.9999)],
            [1, 1, 2, 2, 0, 0]
        );
        assert_eq!(choose(&logits, &how(Some(1), None, false), 0.99), 1);
        assert_eq!(choose(&logits, &how(None, Some(0.6), false), 0.99), 2);
        assert_eq!(choose(&logits, &how(None, Some(0.5), false), 0.99), 1);
        assert_eq!(choose(&[1.0, 3.0, 3.0], &how(None, None, true), 0.0), 1, "the first of equal ones");
    }

    /// The choice with all tokens sorted.
    fn sorted(logits: &[f64], how: &SamplingArgs, u: f64) -> usize {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        order.truncate(how.top_k.unwrap_or(order.len()));
        let weight = |t: &usize| ((logits[*t] - logits[order[0]]) / how.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        if let Some(p) = how.top_p {
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
    fn tokens_are_chosen_as_if_all_were_sorted() {
        // Flat enough that choices lie far down; every third token is as likely as another.
        let logits = |seed: u64| -> Vec<f64> {
            (0..3000u64).map(|i| 4.0 * uniform_at(seed, 1, if i % 3 == 0 { i / 6 } else { i })).collect()
        };
        let mut found = std::collections::BTreeSet::new();
        for case in 0..400 {
            let logits = logits(case % 7);
            let top_k = [None, Some(1), Some(40), Some(1500), Some(3000), Some(9000)][case as usize % 6];
            let top_p = [None, Some(0.01), Some(0.5), Some(0.99), Some(1.0)][case as usize % 5];
            let how =
                SamplingArgs { temperature: [1.0, 0.3, 2.0][case as usize % 3], ..how(top_k, top_p, false) };
            let u = uniform_at(9, 2, case);
            let one = choose(&logits, &how, u);
            assert_eq!(one, sorted(&logits, &how, u), "case {case}: {top_k:?}, {top_p:?}, {u}");
            found.insert(one);
        }
        assert!(found.len() > 150, "{} tokens", found.len());
    }
}
