//! The order of a canonical sum inside of a matrix product: which steps of k are multiplied into which partial tile, and how partial
//! tiles are joined in the tree over the leaves of k.
//!
//! Leaves in order are a binary counter, so that partial tiles are a stack: slot 0 has the sum of the first node, and a join adds the last
//! slot to the slot before it. Blocks of steps that are packed at a time hold whole leaves, or a part of one; slots that outlive a block
//! are held in memory, the others in the cache.

use crate::sum_tree::{SumTree, TreeSums};
use std::convert::Infallible;

/// The leaves of the summed dims (k0, k1) of a matrix product: all of k0 and a range of k1 each, summed in the order of k0, then k1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SumLeaves {
    /// The tree over the leaves.
    pub(crate) tree: SumTree,
    /// The first leaf. The leaves are those of one node of the tree.
    pub(crate) first: usize,
    /// The borders in k1: leaf `first` + i has those from border i to border i + 1.
    pub(crate) borders: Vec<usize>,
    /// The extent of k0.
    pub(crate) outer: usize,
}

impl SumLeaves {
    /// Returns the number of terms of all leaves.
    pub(crate) fn num_terms(&self) -> usize {
        match self.borders[..] {
            [start, .., end] => self.outer * (end - start),
            _ => 0,
        }
    }
}

/// How blocks of steps are formed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRule {
    /// Terms of a leaf that are summed before they are added to its sum.
    pub(crate) part: usize,
    /// The most steps of a block.
    pub(crate) depth_max: usize,
    /// A leaf begins at a multiple of so many packed steps.
    pub(crate) alignment: usize,
    /// Whether sums of leaves and of nodes are rounded, because the dtype is narrower than the accumulator.
    pub(crate) rounds: bool,
}

/// A partial tile: in the cache of the tile that is computed, or held in memory between blocks. Slot 0, held, is c.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    Cached(usize),
    Held(usize),
}

/// An operation on partial tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TileOp {
    /// Writes, or adds to, the product of some packed steps of the block.
    Multiply {
        first: usize,
        depth: usize,
        to: Slot,
        add: bool,
    },
    /// Rounds the sum of a leaf.
    Round {
        to: Slot,
        from: Slot,
    },
    /// Adds the sums of two nodes, and rounds.
    Join {
        to: Slot,
        left: Slot,
        right: Slot,
    },
    Copy {
        to: Slot,
        from: Slot,
    },
}

impl TileOp {
    fn target(&self) -> Slot {
        match *self {
            TileOp::Multiply { to, .. }
            | TileOp::Round { to, .. }
            | TileOp::Join { to, .. }
            | TileOp::Copy { to, .. } => to,
        }
    }

    fn with_target(self, to: Slot) -> TileOp {
        match self {
            TileOp::Multiply { first, depth, add, .. } => TileOp::Multiply { first, depth, to, add },
            TileOp::Round { from, .. } => TileOp::Round { to, from },
            TileOp::Join { left, right, .. } => TileOp::Join { to, left, right },
            TileOp::Copy { from, .. } => TileOp::Copy { to, from },
        }
    }
}

/// Packed steps whose terms are contiguous in k1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Their position in k0 and the first in k1.
    pub(crate) from: [usize; 2],
    pub(crate) len: usize,
    /// The first packed step, counted from the start of the block.
    pub(crate) at: usize,
}

/// Steps that are packed at a time, and what is computed of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepBlock {
    /// The packed steps of earlier blocks.
    pub(crate) first: usize,
    /// Packed steps.
    pub(crate) depth: usize,
    pub(crate) segments: Vec<Segment>,
    pub(crate) ops: Vec<TileOp>,
}

impl StepBlock {
    /// Adds a segment, to the last one if they are contiguous in k1 and packed.
    fn add_segment(&mut self, next: Segment) {
        match self.segments.last_mut() {
            Some(last)
                if [last.from[0], last.from[1] + last.len] == next.from && last.at + last.len == next.at =>
            {
                last.len += next.len;
            }
            _ => self.segments.push(next),
        }
    }
}

/// The schedule of a product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeafSchedule {
    pub(crate) blocks: Vec<StepBlock>,
    /// Slots in the cache.
    pub(crate) num_cached: usize,
    /// Slots that are held between blocks, slot 0 included.
    pub(crate) num_held: usize,
}

/// An operation on slots by number, before it is known where they are.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// `terms` of a leaf from term `first` on; `start` is the position of the leaf in k1.
    Multiply {
        start: usize,
        len: usize,
        first: usize,
        terms: usize,
        slot: usize,
        add: bool,
        opens_block: bool,
    },
    Round {
        slot: usize,
    },
    Join {
        left: usize,
        right: usize,
    },
}

impl LeafSchedule {
    /// Returns the schedule of a product; without blocks if no leaf has a term.
    ///
    /// # Panics
    /// If the leaves are not those of one node of the tree.
    pub(crate) fn new(leaves: &SumLeaves, rule: BlockRule) -> LeafSchedule {
        let schedule = LeafSchedule { blocks: Vec::new(), num_cached: 0, num_held: 0 };
        let mut builder = Builder { schedule, block: StepBlock::default(), slots: Vec::new() };
        for step in steps(leaves, rule) {
            builder.add(step, rule);
        }
        builder.finish_block();
        builder.schedule
    }

    /// Returns the packed steps of all blocks.
    pub(crate) fn num_steps(&self) -> usize {
        self.blocks.last().map_or(0, |block| block.first + block.depth)
    }
}

/// Returns the steps of all leaves in order.
fn steps(leaves: &SumLeaves, rule: BlockRule) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut sums = TreeSums::new(leaves.tree);
    let mut num_live = 0;
    let longest = leaves.borders.windows(2).map(|pair| leaves.outer * (pair[1] - pair[0])).max().unwrap_or(0);
    // A block has the leaves of a node, so that few slots outlive it.
    let fitting = rule.depth_max / longest.max(1).next_multiple_of(rule.alignment);
    let leaves_per_block = 1 << fitting.max(1).ilog2();
    for (number, pair) in leaves.borders.windows(2).enumerate() {
        let leaf = leaves.first + number;
        let (start, len) = (pair[0], pair[1] - pair[0]);
        let slot = (leaves.outer * len > 0).then_some(num_live);
        if let Some(slot) = slot {
            num_live += 1;
            for first in (0..leaves.outer * len).step_by(rule.part) {
                let terms = rule.part.min(leaves.outer * len - first);
                let opens_block = first == 0 && leaf.is_multiple_of(leaves_per_block);
                steps.push(Step::Multiply { start, len, first, terms, slot, add: first > 0, opens_block });
            }
            steps.extend(rule.rounds.then_some(Step::Round { slot }));
        }
        let Ok(()) = sums.add(SumTree::leaf(leaf), slot, |left, right| {
            num_live -= 1;
            match steps.last_mut() {
                // The product of a whole leaf is added to the sum to its left.
                Some(Step::Multiply { slot, add: add @ false, .. }) if *slot == right => {
                    (*slot, *add) = (left, true);
                }
                _ => steps.push(Step::Join { left, right }),
            }
            Ok::<_, Infallible>(left)
        });
    }
    assert!(sums.into_roots().count() <= 1, "the leaves are those of one node");
    steps
}

/// A schedule that is made step by step.
struct Builder {
    schedule: LeafSchedule,
    block: StepBlock,
    /// Where each live slot is.
    slots: Vec<Slot>,
}

impl Builder {
    fn add(&mut self, step: Step, rule: BlockRule) {
        let op = match step {
            Step::Multiply { start, len, first, terms, slot, add, opens_block } => {
                let fits = self.block.depth.next_multiple_of(rule.alignment) + terms <= rule.depth_max;
                if opens_block || !fits {
                    self.finish_block();
                }
                let at = self.block.depth.next_multiple_of(rule.alignment);
                let mut done = 0;
                while done < terms {
                    let (row, within) = ((first + done) / len, (first + done) % len);
                    let count = (len - within).min(terms - done);
                    self.block.add_segment(Segment {
                        from: [row, start + within],
                        len: count,
                        at: at + done,
                    });
                    done += count;
                }
                self.block.depth = (at + terms).next_multiple_of(rule.alignment);
                if slot == self.slots.len() {
                    self.slots.push(Slot::Cached(slot));
                    self.schedule.num_cached = self.schedule.num_cached.max(slot + 1);
                }
                TileOp::Multiply { first: at, depth: terms, to: self.slots[slot], add }
            }
            Step::Round { slot } => TileOp::Round { to: self.slots[slot], from: self.slots[slot] },
            Step::Join { left, right } => {
                debug_assert!(
                    left + 2 == self.slots.len() && right + 1 == self.slots.len(),
                    "slots are a stack"
                );
                let right = self.slots.swap_remove(right);
                TileOp::Join { to: self.slots[left], left: self.slots[left], right }
            }
        };
        self.block.ops.push(op);
    }

    /// Ends a block: its live slots are held.
    fn finish_block(&mut self) {
        if self.block.ops.is_empty() {
            return;
        }
        let mut block = std::mem::take(&mut self.block);
        for (number, slot) in self.slots.iter_mut().enumerate() {
            let held = Slot::Held(number);
            let from = std::mem::replace(slot, held);
            if from == held {
                continue;
            }
            // The last write of the slot goes to memory at once, unless it adds to what is in the cache.
            match block.ops.iter_mut().rfind(|op| op.target() == from) {
                Some(op) if !matches!(op, TileOp::Multiply { add: true, .. }) => *op = op.with_target(held),
                _ => block.ops.push(TileOp::Copy { to: held, from }),
            }
        }
        self.schedule.num_held = self.schedule.num_held.max(self.slots.len());
        let first = self.schedule.num_steps();
        self.schedule.blocks.push(StepBlock { first, ..block });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums numbers as a schedule says, with the terms of a part, and of all other operations, as text.
    fn run(leaves: &SumLeaves, rule: BlockRule) -> (String, LeafSchedule) {
        let schedule = LeafSchedule::new(leaves, rule);
        let mut tiles: Vec<(Slot, String)> = Vec::new();
        let get = |tiles: &[(Slot, String)], at: Slot| -> String {
            tiles.iter().rev().find(|(slot, _)| *slot == at).expect("a slot that was written").1.clone()
        };
        for block in &schedule.blocks {
            // Nothing in the cache outlives a block.
            tiles.retain(|(slot, _)| matches!(slot, Slot::Held(_)));
            assert!(block.depth <= rule.depth_max, "{block:?}");
            for op in &block.ops {
                let (to, value) = match *op {
                    TileOp::Multiply { first, depth, to, add } => {
                        let of = |step: usize| {
                            let segment =
                                block.segments.iter().find(|s| (s.at..s.at + s.len).contains(&step));
                            let segment = segment.expect("each step of a product is packed");
                            format!(
                                "{}{}",
                                (b'a' + segment.from[0] as u8) as char,
                                segment.from[1] + step - segment.at
                            )
                        };
                        let part = (first..first + depth).map(of).collect::<Vec<_>>().join("");
                        (to, if add { format!("({} {part})", get(&tiles, to)) } else { part })
                    }
                    TileOp::Round { to, from } => (to, format!("~{}", get(&tiles, from))),
                    TileOp::Join { to, left, right } => {
                        let sum = format!("({} {})", get(&tiles, left), get(&tiles, right));
                        (to, if rule.rounds { format!("~{sum}") } else { sum })
                    }
                    TileOp::Copy { to, from } => (to, get(&tiles, from)),
                };
                tiles.push((to, value));
            }
        }
        let sum = if tiles.is_empty() { String::new() } else { get(&tiles, Slot::Held(0)) };
        (sum, schedule)
    }

    fn leaves(num_leaves: usize, first: usize, borders: &[usize], outer: usize) -> SumLeaves {
        SumLeaves { tree: SumTree::new(num_leaves), first, borders: borders.to_vec(), outer }
    }

    #[test]
    fn sums_have_the_order_of_the_tree_however_blocks_are_cut() {
        let cases = [
            // Four leaves; absent leaves; leaves of several parts; a node of a larger tree; two rows.
            (leaves(4, 0, &[0, 1, 2, 3, 4], 1), "((a0 a1) (a2 a3))"),
            (leaves(4, 0, &[0, 1, 1, 2, 2], 1), "(a0 a1)"),
            (leaves(6, 0, &[0, 1, 2, 3, 3, 4, 5], 1), "(((a0 a1) a2) (a3 a4))"),
            (leaves(2, 0, &[0, 3, 8], 1), "((a0a1 a2) ((a3a4 a5a6) a7))"),
            (leaves(6, 4, &[0, 1, 2], 1), "(a0 a1)"),
            (leaves(2, 0, &[0, 1, 2], 2), "(a0b0 a1b1)"),
            (leaves(1, 0, &[0, 3], 2), "((a0a1 a2b0) b1b2)"),
            (leaves(8, 0, &[0; 9], 1), ""),
        ];
        for (leaves, expected) in cases {
            for depth_max in [2, 3, 4, 100] {
                let rule = BlockRule { part: 2, depth_max, alignment: 1, rounds: false };
                assert_eq!(run(&leaves, rule).0, expected, "{leaves:?}, blocks of {depth_max}");
            }
        }
        let rule = BlockRule { part: 2, depth_max: 2, alignment: 1, rounds: true };
        let (sum, _) = run(&leaves(4, 0, &[0, 3, 4, 4, 5], 1), rule);
        assert_eq!(sum, "~(~(~(a0a1 a2) ~a3) ~a4)");
    }

    #[test]
    fn aligned_leaves_begin_at_whole_steps_in_one_block() {
        let rule = BlockRule { part: 4, depth_max: usize::MAX, alignment: 2, rounds: true };
        let (sum, schedule) = run(&leaves(2, 0, &[0, 1, 6], 1), rule);
        assert_eq!(sum, "~(~a0 ~(a1a2a3a4 a5))");
        let at: Vec<usize> = schedule.blocks[0].segments.iter().map(|segment| segment.at).collect();
        assert_eq!((at, schedule.num_steps(), schedule.num_cached, schedule.num_held), (vec![0, 2], 8, 2, 1));
    }

    #[test]
    fn few_slots_outlive_a_block() {
        let borders: Vec<usize> = (0..=8).map(|leaf| leaf * 3).collect();
        for (depth_max, held, blocks) in [(6, 2, 4), (9, 2, 4), (12, 1, 2), (24, 1, 1)] {
            let rule = BlockRule { part: depth_max, depth_max, alignment: 1, rounds: false };
            let (_, schedule) = run(&leaves(8, 0, &borders, 1), rule);
            assert_eq!((schedule.num_held, schedule.blocks.len()), (held, blocks), "{schedule:?}");
        }
    }
}
