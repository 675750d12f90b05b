//! Simulation of a schedule in time, from the times of its passes.

use super::action::{Action, Schedule};
use super::worklist::Worklist;
use std::ops::{Index, IndexMut, Range};

/// A value for each stage and microbatch.
#[derive(Clone, Debug)]
pub(super) struct StageTable<T> {
    num_microbatches: usize,
    cells: Vec<T>,
}

impl<T: Clone> StageTable<T> {
    /// A table with the same value everywhere.
    pub(super) fn new(num_stages: usize, num_microbatches: usize, value: T) -> StageTable<T> {
        StageTable { num_microbatches, cells: vec![value; num_stages * num_microbatches] }
    }
}

impl<T> Index<(usize, usize)> for StageTable<T> {
    type Output = T;

    fn index(&self, (stage, microbatch): (usize, usize)) -> &T {
        &self.cells[stage * self.num_microbatches + microbatch]
    }
}

impl<T> IndexMut<(usize, usize)> for StageTable<T> {
    fn index_mut(&mut self, (stage, microbatch): (usize, usize)) -> &mut T {
        &mut self.cells[stage * self.num_microbatches + microbatch]
    }
}

/// The times of a stage's passes, in one unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassTimes {
    /// The forward pass.
    pub forward: f64,
    /// The input gradients of a backward pass.
    pub input: f64,
    /// The weight gradients of a backward pass.
    pub weight: f64,
}

/// A pass with its start and end.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The pass.
    pub action: Action,
    /// Start and end.
    pub time: Range<f64>,
}

/// A simulated step.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The passes of each rank, in order.
    pub ranks: Vec<Vec<Span>>,
}

/// The ends of forward and backward passes.
struct FinishTimes {
    forward: StageTable<f64>,
    back: StageTable<f64>,
    /// The stages that a stage receives values from, and those it sends values to.
    predecessors: Vec<Vec<usize>>,
    successors: Vec<Vec<usize>>,
}

impl Schedule {
    /// Simulates the schedule: a pass starts when its rank is free and its inputs have arrived, `transfer` after their
    /// pass if it ran on another rank. Stages send values along `links`; `times` has one entry per stage. The schedule
    /// must be verified.
    #[must_use]
    pub fn simulate(&self, links: &[(usize, usize)], times: &[PassTimes], transfer: f64) -> Timeline {
        self.simulate_counting(links, times, transfer).0
    }

    /// [`Schedule::simulate`], and the number of times a rank was visited.
    pub(super) fn simulate_counting(
        &self,
        links: &[(usize, usize)],
        times: &[PassTimes],
        transfer: f64,
    ) -> (Timeline, usize) {
        let (n, m) = (self.num_stages(), self.num_microbatches);
        let open = || StageTable::new(n, m, f64::NAN);
        let (mut predecessors, mut successors) = (vec![Vec::new(); n], vec![Vec::new(); n]);
        for &(from, to) in links {
            predecessors[to].push(from);
            successors[from].push(to);
        }
        let mut ends = FinishTimes { forward: open(), back: open(), predecessors, successors };
        let mut ranks: Vec<Vec<Span>> = vec![Vec::new(); self.ranks.len()];
        let mut at = vec![0; self.ranks.len()];
        let (mut worklist, mut num_visits) = (Worklist::new(self.ranks.len()), 0);
        while let Some(rank) = worklist.next() {
            num_visits += 1;
            while let Some(&action) = self.ranks[rank].get(at[rank]) {
                let Some(ready) = self.ready(action, &ends, transfer) else { break };
                at[rank] += 1;
                let Some(duration) = duration(action, times) else { continue };
                let free = ranks[rank].last().map_or(0.0, |span| span.time.end);
                let start = free.max(ready);
                let end = start + duration;
                if let Some((stage, microbatch, back)) = Schedule::pass(action) {
                    let (table, needed_by) = match back {
                        true => (&mut ends.back, &ends.predecessors[stage]),
                        false => (&mut ends.forward, &ends.successors[stage]),
                    };
                    table[(stage, microbatch)] = end;
                    needed_by.iter().for_each(|other| worklist.wake(self.stage_ranks[*other]));
                }
                ranks[rank].push(Span { action, time: start..end });
            }
        }
        (Timeline { ranks }, num_visits)
    }

    /// The time when all inputs of an action have arrived; `None` if it is not known yet.
    fn ready(&self, action: Action, ends: &FinishTimes, transfer: f64) -> Option<f64> {
        let Some((stage, microbatch, back)) = Schedule::pass(action) else { return Some(0.0) };
        let (others, table) = match back {
            false => (&ends.predecessors[stage], &ends.forward),
            true => (&ends.successors[stage], &ends.back),
        };
        let mut ready: f64 = 0.0;
        for &other in others {
            let made = table[(other, microbatch)];
            if made.is_nan() {
                return None;
            }
            let apart = self.stage_ranks[stage] != self.stage_ranks[other];
            ready = ready.max(made + if apart { transfer } else { 0.0 });
        }
        Some(ready)
    }
}

fn duration(action: Action, times: &[PassTimes]) -> Option<f64> {
    match action {
        Action::Forward { stage, .. } => Some(times[stage].forward),
        Action::Backward { stage, .. } => Some(times[stage].input + times[stage].weight),
        Action::InputGradient { stage, .. } => Some(times[stage].input),
        Action::WeightGradient { stage, .. } => Some(times[stage].weight),
        Action::Send(_) | Action::Receive(_) | Action::Reduce { .. } => None,
    }
}

impl Timeline {
    /// The end of the last pass.
    #[must_use]
    pub fn makespan(&self) -> f64 {
        self.ranks.iter().flatten().map(|span| span.time.end).fold(0.0, f64::max)
    }

    /// The longest time from the first to the last pass of a rank.
    #[must_use]
    pub fn longest_span(&self) -> f64 {
        let span = |rank: &Vec<Span>| Some(rank.last()?.time.end - rank.first()?.time.start);
        self.ranks.iter().filter_map(span).fold(0.0, f64::max)
    }

    /// The pipeline bubble as papers count it: the idle fraction of the longest span, with the work of the busiest
    /// rank. This is the loss if a rank can begin its next step as soon as it has ended this one.
    #[doc(alias = "bubble ratio")]
    #[doc(alias = "pipeline bubble")]
    #[must_use]
    pub fn bubble(&self) -> f64 {
        self.idle(self.longest_span())
    }

    /// The pipeline bubble of a step that ends on all ranks together: the idle fraction of the makespan, with the work
    /// of the busiest rank. This is the loss if no rank can begin its next step before all have ended this one, as a
    /// gradient norm or overflow check over all ranks requires.
    #[must_use]
    pub fn step_bubble(&self) -> f64 {
        self.idle(self.makespan())
    }

    /// The fraction of a span that the busiest rank is idle.
    fn idle(&self, span: f64) -> f64 {
        let work = |rank: &Vec<Span>| rank.iter().map(|s| s.time.end - s.time.start).sum::<f64>();
        let most = self.ranks.iter().map(work).fold(0.0, f64::max);
        if span > 0.0 { (span - most) / span } else { 0.0 }
    }

    /// The number of live microbatches of a rank (forward done, backward not), each with the time from which it holds.
    #[must_use]
    pub fn live(&self, rank: usize) -> Vec<(f64, usize)> {
        let mut live = 0;
        let mut curve = Vec::new();
        for span in &self.ranks[rank] {
            match span.action {
                Action::Forward { .. } => {
                    live += 1;
                    curve.push((span.time.start, live));
                }
                Action::Backward { .. } | Action::WeightGradient { .. } => {
                    live -= 1;
                    curve.push((span.time.end, live));
                }
                _ => {}
            }
        }
        curve
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::{abs_diff_eq, assert_abs_diff_eq};

    fn chain(n: usize) -> Vec<(usize, usize)> {
        (1..n).map(|s| (s - 1, s)).collect()
    }

    /// The bubble of a schedule whose stages all have the same times (given for a whole rank).
    fn bubble(schedule: &Schedule, [forward, input, weight, transfer]: [f64; 4]) -> f64 {
        let n = schedule.num_stages();
        schedule.with_transfers(&chain(n)).verify(&chain(n)).unwrap();
        let v = (n / schedule.ranks.len()) as f64;
        let times = PassTimes { forward: forward / v, input: input / v, weight: weight / v };
        schedule.simulate(&chain(n), &vec![times; n], transfer).bubble()
    }

    #[test]
    fn bubbles_match_closed_forms_for_even_passes() {
        for (p, m) in [(2, 2), (4, 8), (8, 32), (3, 7)] {
            let even = [1.0, 1.0, 1.0, 0.0];
            let fused = (p as f64 - 1.0) / (m as f64 + p as f64 - 1.0);
            let near = |schedule: Schedule, expected: f64| {
                let found = bubble(&schedule, even);
                assert!(abs_diff_eq!(found, expected, epsilon = 1e-12), "{p} {m}: {found}, not {expected}");
            };
            near(Schedule::one_f_one_b(p, m).unwrap(), fused);
            near(Schedule::gpipe(p, m).unwrap(), fused);
            // The span is 3 m + (p - 1) passes instead of 3 (m + p - 1).
            let deferred = (p as f64 - 1.0) / (3.0 * m as f64 + p as f64 - 1.0);
            near(Schedule::zb_h1(p, m).unwrap(), deferred);
            if m >= 2 * p - 1 {
                near(Schedule::zb_h2(p, m).unwrap(), 0.0);
            }
        }
        let even = [1.0, 1.0, 1.0, 0.0];
        let interleaved = Schedule::interleaved(4, 8, 2).unwrap();
        let expected = 3.0 / 2.0 / (8.0 + 3.0 / 2.0);
        assert_abs_diff_eq!(bubble(&interleaved, even), expected, epsilon = 1e-12);
    }

    #[test]
    fn step_bubble_includes_the_pipeline_fill() {
        for (p, m) in [(2, 4), (4, 8), (4, 12)] {
            let bubbles = |schedule: Schedule| {
                let n = schedule.num_stages();
                let part = (n / p) as f64;
                let each = PassTimes { forward: 1.0 / part, input: 1.0 / part, weight: 1.0 / part };
                let timeline = schedule.simulate(&chain(n), &vec![each; n], 0.0);
                [timeline.bubble(), timeline.step_bubble()]
            };
            let near = |found: [f64; 2], idle: [f64; 2]| {
                let expected = idle.map(|idle| idle / (3.0 * m as f64 + idle));
                assert!(abs_diff_eq!(found[..], expected[..], epsilon = 1e-12), "{p} {m}: {found:?}");
            };
            let late = p as f64 - 1.0;
            // In 1F1B the first rank works from the first pass to the last. In the zero-bubble schedules each rank
            // begins a pass later than the one before (half a pass in a V), and works without a break.
            near(bubbles(Schedule::one_f_one_b(p, m).unwrap()), [3.0 * late, 3.0 * late]);
            near(bubbles(Schedule::zb_h1(p, m).unwrap()), [late, late]);
            near(bubbles(Schedule::zb_h2(p, m).unwrap()), [0.0, late]);
            near(bubbles(Schedule::zb_v(p, m).unwrap()), [0.0, 0.5 * late]);
        }
    }

    /// Qi et al., arXiv 2401.10241: ranks, microbatches, stages per rank when interleaved, times of Table 9, and the
    /// bubble rates of Table 5 for 1F1B, interleaved 1F1B, ZB-H1 and ZB-H2.
    type Row = (usize, [usize; 3], usize, [[f64; 4]; 3], [[f64; 4]; 3]);
    #[rustfmt::skip]
    const PUBLISHED: [Row; 4] = [
        (8, [24, 32, 64], 3,
         [[18.522, 18.086, 9.337, 0.601], [18.513, 18.086, 9.331, 0.626], [18.546, 18.097, 9.321, 0.762]],
         [[0.2431, 0.1055, 0.1585, 0.1083], [0.1985, 0.0818, 0.1242, 0.0837], [0.1240, 0.0443, 0.0674, 0.0444]]),
        (8, [24, 32, 64], 4,
         [[29.718, 29.444, 19.927, 0.527], [29.802, 29.428, 19.530, 0.577], [29.935, 29.621, 19.388, 0.535]],
         [[0.2347, 0.0808, 0.1323, 0.0698], [0.1898, 0.0628, 0.1045, 0.0559], [0.1091, 0.0320, 0.0554, 0.0294]]),
        (16, [48, 64, 128], 3,
         [[11.347, 11.248, 8.132, 0.377], [11.307, 11.254, 8.101, 0.379], [11.325, 11.308, 8.109, 0.378]],
         [[0.2552, 0.1104, 0.1397, 0.0672], [0.2082, 0.0852, 0.1088, 0.0516], [0.1251, 0.0445, 0.0576, 0.0266]]),
        (32, [96, 128, 256], 2,
         [[10.419, 10.207, 7.715, 0.408], [10.408, 10.204, 7.703, 0.408], [10.402, 10.248, 7.698, 0.460]],
         [[0.2646, 0.1493, 0.1421, 0.0641], [0.2168, 0.1164, 0.1106, 0.0490], [0.1352, 0.0624, 0.0594, 0.0257]]),
    ];

    #[test]
    fn bubbles_match_published_rates() {
        for (p, ms, v, times, rates) in PUBLISHED {
            for ((m, times), rates) in ms.into_iter().zip(times).zip(rates) {
                let found = [
                    bubble(&Schedule::one_f_one_b(p, m).unwrap(), times),
                    bubble(&Schedule::interleaved(p, m, v).unwrap(), times),
                    bubble(&Schedule::zb_h1(p, m).unwrap(), times),
                    bubble(&Schedule::zb_h2(p, m).unwrap(), times),
                ];
                for (i, (found, published)) in found.into_iter().zip(rates).enumerate() {
                    let bound = if i == 1 { 0.004 } else { 0.000_051 };
                    assert!(
                        abs_diff_eq!(found, published, epsilon = bound),
                        "p {p} m {m} column {i}: {found}, not {published}"
                    );
                }
            }
        }
    }

    /// Table 8 of the same paper has rates of ZB-V for times that it does not print. The times of Table 9 are of other
    /// numbers of ranks (and of a model with the same name). With them the rates differ from Table 8 by the distances
    /// below: an extrapolation without fitted numbers.
    #[test]
    fn zb_v_bubbles_differ_from_published_rates_as_stated() {
        let table_8: [(usize, [f64; 3], [f64; 3]); 3] = [
            (16, [0.0697, 0.0533, 0.0274], [-0.0215, -0.0145, -0.0076]),
            (24, [0.0638, 0.0483, 0.0250], [-0.0104, -0.0074, -0.0041]),
            (32, [0.0593, 0.0451, 0.0236], [-0.0049, -0.0037, -0.0011]),
        ];
        for ((p, published, distances), (_, _, _, times, _)) in table_8.into_iter().zip(&PUBLISHED[1..]) {
            for (i, m) in [3 * p, 4 * p, 8 * p].into_iter().enumerate() {
                let distance = bubble(&Schedule::zb_v(p, m).unwrap(), times[i]) - published[i];
                assert!(abs_diff_eq!(distance, distances[i], epsilon = 0.000_051), "p {p} m {m}: {distance}");
            }
        }
    }
}
