//! The walk over meshes, cases and layouts.

use shardgrad_dist::{Error, Kind, Mesh, Rank, Result, World};
use shardgrad_kernels::DType;
use shardgrad_tensor::check::{Row, Standard, gradients, layouts, row, standard};
use shardgrad_tensor::ops::{Case, Entry, Input, OPS};
use shardgrad_tensor::{Context, Layout};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Rows of one op, counted by what came of them: direct, cast, complete, refused.
pub(crate) type Counts = [usize; 4];

/// At most so many rows a case where there are more.
pub(crate) const ROWS_MAX: usize = 400;

/// The same case with every extent 1, so that all shards but one are empty.
fn with_ones(case: &Case) -> Case {
    let one = |input: &Input| match input {
        Input::Real(s) => Input::Real(vec![1; s.len()]),
        Input::Positive(s) => Input::Positive(vec![1; s.len()]),
        Input::Distinct(s) => Input::Distinct(vec![1; s.len()]),
        Input::Index(s, _) => Input::Index(vec![1; s.len()], 1),
        Input::Bool(s) => Input::Bool(vec![1; s.len()]),
    };
    Case { inputs: case.inputs.iter().map(one).collect(), ..case.clone() }
}

/// The cases of an entry, then those of them that take any extents with extents of 1.
pub(crate) fn cases(entry: &Entry) -> Vec<Case> {
    let mut cases = (entry.cases)();
    let small: Vec<Case> = cases.iter().filter(|c| !c.is_fixed).map(with_ones).collect();
    cases.extend(small);
    cases
}

/// What one rank makes of every case of some entries.
pub(crate) fn standards(entries: &[Entry]) -> Vec<Vec<Standard>> {
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

/// The same layout with some dims counted in grains, by a seed.
fn with_grains(layout: &Layout, seed: usize) -> Layout {
    let grained = layout.dims().iter().enumerate().map(|(d, dim)| {
        let divisors: Vec<usize> = (1..=dim.extent.max(1)).filter(|g| dim.extent % g == 0).collect();
        dim.in_grains(divisors[(seed * 7 + d * 3 + seed / 5) % divisors.len()])
    });
    Layout::new(layout.mesh(), layout.dtype(), grained, layout.partial(), layout.replicate()).unwrap()
}

/// Which rows to run.
#[derive(Clone, Copy)]
pub(crate) struct Choice {
    /// At most so many a case.
    pub(crate) rows_max: usize,
    /// Whether dims are counted in grains.
    pub(crate) has_grains: bool,
}

/// What a rank found: counts by op, and everything that is wrong.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    /// By entry.
    pub(crate) counts: BTreeMap<&'static str, Counts>,
    /// One text each.
    pub(crate) findings: Vec<String>,
}

/// Runs every row of some entries on this rank's mesh.
pub(crate) fn walk(
    rank: &Rank,
    entries: &[Entry],
    standards: &[Vec<Standard>],
    which: Choice,
) -> Result<Walk> {
    let mut walk = Walk::default();
    for (entry, standards) in entries.iter().zip(standards) {
        for (case, standard) in cases(entry).iter().zip(standards) {
            let lists: Vec<Vec<Layout>> =
                standard.inputs.iter().map(|g| layouts(rank.mesh(), g.dtype, &g.shape)).collect();
            for (number, mut choice) in choices(&lists, which.rows_max).into_iter().enumerate() {
                if which.has_grains {
                    choice = choice.iter().enumerate().map(|(i, l)| with_grains(l, number + 5 * i)).collect();
                }
                let outcome = catch_unwind(AssertUnwindSafe(|| row(rank, case, standard, &choice)));
                let outcome = outcome.unwrap_or_else(|payload| {
                    Context::of(rank).set_closed(false);
                    Err(match payload.downcast::<Error>() {
                        Ok(error) => *error,
                        Err(other) => {
                            Error::new(Kind::Panic, other.downcast::<String>().map_or("?".into(), |s| *s))
                        }
                    })
                });
                match outcome {
                    Ok(row) => walk.counts.entry(entry.name).or_default()[row as usize] += 1,
                    Err(e) if [Kind::PeerLost, Kind::Collective, Kind::Timeout].contains(&e.kind()) => {
                        return Err(e);
                    }
                    Err(e) => walk.findings.push(e.to_string()),
                }
            }
        }
    }
    Ok(walk)
}

/// [`walk`] on all ranks of a mesh: the counts of rank 0, the findings of all.
pub(crate) fn walk_mesh(
    mesh: &str,
    entries: &[Entry],
    standards: &[Vec<Standard>],
    which: Choice,
) -> Result<Walk> {
    let world = World::new(Mesh::parse(mesh)?).threads(1);
    let mut walks = world.launch(|rank| walk(rank, entries, standards, which))?;
    let others: Vec<String> = walks.drain(1..).flat_map(|w| w.findings).collect();
    let mut first = walks.remove(0);
    first.findings.extend(others);
    Ok(first)
}

#[test]
fn every_op_on_every_layout() {
    let standards = standards(OPS);
    let rows = |mesh: &str, rows_max, has_grains| {
        let walk = walk_mesh(mesh, OPS, &standards, Choice { rows_max, has_grains }).unwrap();
        assert!(
            walk.findings.is_empty(),
            "{} findings on {mesh}:\n{}",
            walk.findings.len(),
            walk.findings.join("\n")
        );
        for entry in OPS {
            assert!(
                walk.counts[entry.name][..3].iter().sum::<usize>() > 0,
                "{} accepts some row",
                entry.name
            );
        }
        walk.counts.values().fold(Counts::default(), |s, c| std::array::from_fn(|i| s[i] + c[i]))
    };
    let found = [
        ("a=2", rows("a=2", ROWS_MAX, false)),
        ("a=3", rows("a=3", ROWS_MAX, false)),
        ("a=2,b=2", rows("a=2,b=2", 110, false)),
        ("a=2 in grains", rows("a=2", 60, true)),
        ("a=2,b=2 in grains", rows("a=2,b=2", 40, true)),
    ];
    let total: usize = found.iter().flat_map(|f| f.1).sum();
    let line = format!("{total} rows; direct, cast, complete, refused: {found:?}\n");
    std::io::stdout().write_all(line.as_bytes()).unwrap();
    let expected = [
        ("a=2", [1435, 1241, 1490, 2336]),
        ("a=3", [1432, 1241, 1490, 2339]),
        ("a=2,b=2", [4431, 2185, 4309, 5486]),
        ("a=2 in grains", [1356, 847, 926, 985]),
        ("a=2,b=2 in grains", [3751, 811, 1924, 2508]),
        ("a=2", [1499, 1359, 1650, 2482]),
        ("a=3", [1496, 1359, 1650, 2485]),
        ("a=2,b=2", [4724, 2381, 4942, 5988]),
        ("a=2 in grains", [1397, 922, 1042, 1091]),
        ("a=2,b=2 in grains", [4031, 888, 2420, 2481]),
    ];
    assert_eq!(found, expected, "direct, cast, complete and refused rows; new cases change them");
}

#[test]
fn every_gradient_agrees_with_differences() {
    for entry in OPS {
        for (i, standard) in standards(&[*entry]).remove(0).iter().enumerate() {
            gradients(|| cases(entry).swap_remove(i), standard)
                .unwrap_or_else(|e| panic!("{}: {e}", entry.name));
        }
    }
}

#[test]
fn all_layouts_of_a_matrix_are_walked() {
    let count =
        |mesh: &str, ndim: usize| layouts(&Mesh::parse(mesh).unwrap(), DType::F64, &vec![4; ndim]).len();
    // Per axis =, ~, + and a shard per dim; of two axes on one dim there are two orders.
    assert_eq!([count("a=2", 0), count("a=2", 1), count("a=3", 2), count("a=3", 4)], [3, 4, 5, 7]);
    assert_eq!([count("a=2,b=2", 1), count("a=2,b=2", 2)], [17, 27]);
    let texts: std::collections::BTreeSet<String> =
        layouts(&Mesh::parse("a=2,b=2").unwrap(), DType::F64, &[4, 4])
            .iter()
            .map(Layout::to_string)
            .collect();
    assert_eq!(texts.len(), 27);
    assert!(Row::Refused as usize == 3, "counts are indexed by the outcome");
}
