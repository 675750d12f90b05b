//! The walk over meshes, cases and layouts.

use shardgrad_dist::{Error, Kind, Mesh, Rank, Result, World};
use shardgrad_tensor::check::{Row, Standard, gradients, layouts, row, standard};
use shardgrad_tensor::ops::{Case, Entry, Input, OPS};
use shardgrad_tensor::{Context, Layout};
use shardgrad_kernels::DType;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Rows of one op, counted by what came of them: direct, cast, complete, refused.
pub type Counts = [usize; 4];

/// At most so many rows a case where there are more.
pub const ROWS_MAX: usize = 400;

/// The same case with every extent 1, so that all shards but one are empty.
fn with_ones(case: &Case) -> Case {
    let one = |input: &Input| match input {
        Input::Real(s) => Input::Real(vec![1; s.len()]),
        Input::Positive(s) => Input::Positive(vec![1; s.len()]),
        Input::Index(s, _) => Input::Index(vec![1; s.len()], 1),
    };
    Case { inputs: case.inputs.iter().map(one).collect(), ..case.clone() }
}

/// The cases of an entry, then those of them that take any extents with extents of 1.
pub fn cases(entry: &Entry) -> Vec<Case> {
    let mut cases = (entry.cases)();
    let small: Vec<Case> = cases.iter().filter(|c| !c.is_fixed).map(with_ones).collect();
    cases.extend(small);
    cases
}

/// What one rank makes of every case of some entries.
pub fn standards(entries: &[Entry]) -> Vec<Vec<Standard>> {
    let of = |entry: &Entry| {
        let make = |i: usize| standard(|| cases(entry).swap_remove(i), 1 + i as u64);
        (0..cases(entry).len()).map(|i| make(i).unwrap_or_else(|e| panic!("{}: {e}", entry.name))).collect()
    };
    entries.iter().map(of).collect()
}

/// Every choice of one element a list, or `count_max` of them by a fixed seed.
fn choices(lists: &[Vec<Layout>], count_max: usize) -> Vec<Vec<Layout>> {
    let total: usize = lists.iter().map(Vec::len).product();
    let pick = |mut number: usize| -> Vec<Layout> {
        let digit = |list: &Vec<Layout>| {
            let layout = list[number % list.len()].clone();
            number /= list.len();
            layout
        };
        lists.iter().map(digit).collect()
    };
    if total <= count_max {
        return (0..total).map(pick).collect();
    }
    let mut state = total as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize) % total
    };
    (0..count_max).map(|_| pick(next())).collect()
}

/// What a rank found: counts by op, and everything that is wrong.
#[derive(Debug, Default)]
pub struct Walk {
    /// By entry.
    pub counts: BTreeMap<&'static str, Counts>,
    /// One text each.
    pub findings: Vec<String>,
}

/// Runs every row of some entries on this rank's mesh.
pub fn walk(rank: &Rank, entries: &[Entry], standards: &[Vec<Standard>], rows_max: usize) -> Result<Walk> {
    let mut walk = Walk::default();
    for (entry, standards) in entries.iter().zip(standards) {
        for (case, standard) in cases(entry).iter().zip(standards) {
            let lists: Vec<Vec<Layout>> =
                standard.inputs.iter().map(|g| layouts(rank.mesh(), g.dtype, &g.shape)).collect();
            for choice in choices(&lists, rows_max) {
                let outcome = catch_unwind(AssertUnwindSafe(|| row(rank, case, standard, &choice)));
                let outcome = outcome.unwrap_or_else(|payload| {
                    Context::of(rank).set_closed(false);
                    Err(match payload.downcast::<Error>() {
                        Ok(error) => *error,
                        Err(other) => Error::new(Kind::Panic, other.downcast::<String>().map_or("?".into(), |s| *s)),
                    })
                });
                match outcome {
                    Ok(row) => walk.counts.entry(entry.name).or_default()[row as usize] += 1,
                    Err(e) if [Kind::PeerLost, Kind::Collective, Kind::Timeout].contains(&e.kind()) => return Err(e),
                    Err(e) => walk.findings.push(e.to_string()),
                }
            }
        }
    }
    Ok(walk)
}

/// [`walk`] on all ranks of a mesh: the counts of rank 0, the findings of all.
pub fn walk_mesh(mesh: &str, entries: &[Entry], standards: &[Vec<Standard>], rows_max: usize) -> Result<Walk> {
    let world = World::new(Mesh::parse(mesh)?).threads(1);
    let mut walks = world.launch(|rank| walk(rank, entries, standards, rows_max))?;
    let others: Vec<String> = walks.drain(1..).flat_map(|w| w.findings).collect();
    let mut first = walks.remove(0);
    first.findings.extend(others);
    Ok(first)
}

#[test]
fn every_op_on_every_layout() {
    let standards = standards(OPS);
    let mut total = Counts::default();
    let mut by_mesh = Vec::new();
    for (mesh, rows_max) in [("a=2", ROWS_MAX), ("a=3", ROWS_MAX), ("a=2,b=2", 60)] {
        let walk = walk_mesh(mesh, OPS, &standards, rows_max).unwrap();
        assert!(walk.findings.is_empty(), "{} findings on {mesh}:\n{}", walk.findings.len(), walk.findings.join("\n"));
        let sum = walk.counts.values().fold(Counts::default(), |s, c| std::array::from_fn(|i| s[i] + c[i]));
        total = std::array::from_fn(|i| total[i] + sum[i]);
        by_mesh.push(sum);
        for entry in OPS {
            assert!(walk.counts[entry.name][..3].iter().sum::<usize>() > 0, "{} accepts some row", entry.name);
        }
    }
    let line = format!("rows [direct, cast, complete, refused] by mesh: {by_mesh:?}, in all {total:?}\n");
    std::io::stdout().write_all(line.as_bytes()).unwrap();
    assert!(total.iter().sum::<usize>() >= 20_000, "{total:?}");
}

#[test]
fn every_gradient_agrees_with_differences() {
    for entry in OPS {
        for (i, standard) in standards(&[*entry]).remove(0).iter().enumerate() {
            gradients(|| cases(entry).swap_remove(i), standard).unwrap_or_else(|e| panic!("{}: {e}", entry.name));
        }
    }
}

#[test]
fn all_layouts_of_a_matrix_are_walked() {
    let count = |mesh: &str, ndim: usize| layouts(&Mesh::parse(mesh).unwrap(), DType::F64, &vec![4; ndim]).len();
    // Per axis =, ~, + and a shard per dim; of two axes on one dim there are two orders.
    assert_eq!([count("a=2", 0), count("a=2", 1), count("a=3", 2), count("a=3", 4)], [3, 4, 5, 7]);
    assert_eq!([count("a=2,b=2", 1), count("a=2,b=2", 2)], [17, 27]);
    let texts: std::collections::BTreeSet<String> =
        layouts(&Mesh::parse("a=2,b=2").unwrap(), DType::F64, &[4, 4]).iter().map(Layout::to_string).collect();
    assert_eq!(texts.len(), 27);
    assert!(Row::Refused as usize == 3, "counts are indexed by the outcome");
}
