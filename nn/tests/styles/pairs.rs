//! The table of combinations is a covering array: every pair of levels that is allowed occurs in some row. Pairs that are not allowed
//! are listed with the reason.

use crate::combination::{Combination, NUM_IN_GATE, columns, combinations};
use crate::training::Training;
use shardgrad_nn::Sgd;
use shardgrad_tensor::{DType, Mesh, Phase, Record, World};
use std::collections::BTreeSet;

/// Most ranks of a combination.
const NUM_RANKS_MAX: usize = 16;

/// A column and a word in it.
type Level = (&'static str, &'static str);

/// Why levels do not occur together.
#[derive(Clone, Copy, Debug)]
enum Why {
    /// The library refuses them with this sentence.
    Refused(&'static str),
    /// The first level has no effect beside the others: the mesh lacks the axis of the style. The command line refuses it.
    NoEffect,
}

use Why::{NoEffect, Refused};

const NO_EXPERTS: [Why; 2] = [
    Refused("gather_experts: begin the plan with Plan::expert_parallel(axis)"),
    Refused("exchange_experts: begin the plan with Plan::expert_parallel(axis)"),
];

/// Levels that are not allowed together.
const EXCLUDED: [(&[Level], Why); 10] = [
    (&[("shards", "zero1"), ("dp", "1")], NoEffect),
    (&[("shards", "zero2"), ("dp", "1")], NoEffect),
    (&[("shards", "zero3"), ("dp", "1")], NoEffect),
    (&[("sequence", "yes"), ("tp", "1")], NoEffect),
    (&[("experts", "gather=2"), ("model", "gpt2")], NO_EXPERTS[0]),
    (&[("experts", "gather=2"), ("model", "llama")], NO_EXPERTS[0]),
    (&[("experts", "exchange=3"), ("model", "gpt2")], NO_EXPERTS[1]),
    (&[("experts", "exchange=3"), ("model", "llama")], NO_EXPERTS[1]),
    (
        &[("pipeline", "interleaved=2"), ("microbatches", "1")],
        Refused("the number of microbatches (1) is not a multiple of the number of ranks (2)"),
    ),
    (
        &[("pipeline", "interleaved=2"), ("microbatches", "3")],
        Refused("the number of microbatches (3) is not a multiple of the number of ranks (2)"),
    ),
];

/// Whether two levels are never allowed together.
fn is_excluded(a: Level, b: Level) -> bool {
    EXCLUDED.iter().any(|(levels, _)| *levels == [a, b] || *levels == [b, a])
}

/// All pairs of levels of a combination.
fn pairs_of(combination: &Combination) -> impl Iterator<Item = (Level, Level)> {
    let levels = combination.levels();
    let num = levels.len();
    (0..num).flat_map(move |i| {
        let levels = levels.clone();
        (i + 1..num).map(move |j| (levels[i], levels[j]))
    })
}

/// Whether no levels of a combination are excluded, and the ranks are few enough.
pub(crate) fn is_allowed(combination: &Combination) -> bool {
    let own = combination.levels();
    let is_excluded = |(levels, _): &(&[Level], Why)| levels.iter().all(|level| own.contains(level));
    combination.num_ranks_in_all() <= NUM_RANKS_MAX && !EXCLUDED.iter().any(is_excluded)
}

/// All levels of the table.
fn levels() -> BTreeSet<Level> {
    combinations().iter().flat_map(Combination::levels).collect()
}

/// The pairs of levels that the combinations lack.
fn missing(all: &[Combination]) -> Vec<(Level, Level)> {
    let found: BTreeSet<(Level, Level)> = all.iter().flat_map(pairs_of).collect();
    let (levels, columns) = (levels(), columns());
    let at = |level: &Level| columns.iter().position(|name| *name == level.0);
    let pairs = levels.iter().flat_map(|a| levels.iter().map(move |b| (*a, *b)));
    pairs.filter(|(a, b)| at(a) < at(b) && !is_excluded(*a, *b) && !found.contains(&(*a, *b))).collect()
}

#[test]
fn every_allowed_pair_of_levels_occurs() {
    let all = combinations();
    assert!(all.len() >= 30);
    for (i, combination) in all.iter().enumerate() {
        assert!(is_allowed(combination), "row {}", i + 1);
    }
    assert_eq!(missing(&all), []);
    assert!(!missing(&all[1..]).is_empty(), "pairs of a missing row are missed");
}

#[test]
fn rows_of_the_gate_hold_every_style() {
    let gate: BTreeSet<Level> = combinations()[..NUM_IN_GATE].iter().flat_map(Combination::levels).collect();
    for level in levels() {
        let is_style =
            ["model", "pipeline", "shards", "context", "experts", "sequence", "recompute"].contains(&level.0);
        assert!(!is_style || gate.contains(&level), "{level:?} is in no row of the gate");
    }
}

/// The smallest combination with some levels.
fn smallest(levels: &[Level]) -> Combination {
    let words = [
        ("model", "mixtral"),
        ("pipeline", "-"),
        ("microbatches", "1"),
        ("dp", "1"),
        ("shards", "-"),
        ("context", "-"),
        ("experts", "-"),
        ("tp", "1"),
        ("sequence", "-"),
        ("recompute", "-"),
    ];
    let all = words.into_iter().chain(levels.iter().copied());
    all.fold(combinations()[0].clone(), |combination, (column, word)| combination.with(column, word))
}

/// The collectives of a step on rank 0, without memory, arithmetic and communication.
fn collectives(combination: &Combination) -> shardgrad_tensor::Result<Vec<Record>> {
    let (task, style) = (combination.task(), combination.how());
    let training = Training { task: &task, style: &style, dtype: DType::F64 };
    World::new(Mesh::parse(&style.mesh).unwrap()).dry_run(0, |rank| {
        let mut trainer = training.trainer(rank, Sgd::new(0.1), None)?;
        rank.trace().take();
        trainer.step()?;
        let mut records = rank.trace().take();
        records.retain(|record| record.phase != Phase::Control);
        Ok(records)
    })
}

#[test]
fn excluded_levels_are_refused_or_have_no_effect() {
    for (levels, why) in EXCLUDED {
        let found = collectives(&smallest(levels));
        match why {
            Refused(sentence) => {
                let error = found.expect_err(sentence);
                assert!(error.to_string().contains(sentence), "{levels:?}: {error}");
            }
            NoEffect => {
                assert_eq!(found.unwrap(), collectives(&smallest(&levels[1..])).unwrap(), "{levels:?}")
            }
        }
    }
}
