//! Every op on every combination of layouts: runs over meshes, cases, sizes, layouts and views. A row is a case with one layout per
//! argument.

use shardgrad_dist::{Error, Kind, Mesh, Rank, Result, World};
use shardgrad_kernels::DType;
use shardgrad_tensor::Layout;
use shardgrad_tensor::ops::{Case, OPS, OpModule};
use shardgrad_testing::op_check::{
    LayoutCase, Reference, RowOutcome, Size, check_row, gradcheck, layouts, reference, resize,
};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

/// Numbers of rows of one op by outcome: direct, cast, complete, refused.
pub(crate) type Counts = [usize; 4];

/// The cases of an op in some sizes.
pub(crate) fn sized(entry: &OpModule, sizes: &[Size], num_ranks: usize) -> Vec<Case> {
    let of = |case: &Case| sizes.iter().filter_map(|s| resize(case, *s, num_ranks)).collect::<Vec<_>>();
    (entry.cases)().iter().flat_map(of).collect()
}

/// The cases of an op as given and with extents of 1.
pub(crate) fn cases(entry: &OpModule) -> Vec<Case> {
    sized(entry, &[Size::Given, Size::One], 1)
}

/// The single-rank results of every case of some ops.
pub(crate) fn references(entries: &[OpModule]) -> Vec<Vec<Reference>> {
    let of = |entry: &OpModule| {
        let make = |i: usize| reference(|| cases(entry).swap_remove(i), 1 + i as u64);
        (0..cases(entry).len()).map(|i| make(i).unwrap_or_else(|e| panic!("{}: {e}", entry.name))).collect()
    };
    entries.iter().map(of).collect()
}

/// The distinct extents above 1 of the cases of an op.
fn extents(entry: &OpModule) -> Vec<usize> {
    let cases = (entry.cases)();
    let all = cases.iter().flat_map(|c| &c.inputs).flat_map(|i| i.shape().to_vec());
    all.filter(|n| *n > 1).collect::<std::collections::BTreeSet<usize>>().into_iter().collect()
}

/// Every combination of one layout per list, or `count_max` random ones by a fixed seed.
fn layout_combinations(lists: &[Vec<Layout>], count_max: usize, seed: u64) -> Vec<Vec<Layout>> {
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
    let mut state = seed.wrapping_mul(1_000_003).wrapping_add(total as u64);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize) % total
    };
    (0..count_max).map(|_| pick(next())).collect()
}

/// The same layout with grains that a seed chooses.
fn with_grains(layout: &Layout, seed: usize) -> Layout {
    let grained = layout.dims().iter().enumerate().map(|(d, dim)| {
        let divisors: Vec<usize> = (1..=dim.extent.max(1)).filter(|g| dim.extent % g == 0).collect();
        dim.with_grain(divisors[(seed * 7 + d * 3 + seed / 5) % divisors.len()])
    });
    Layout::new(layout.mesh(), layout.dtype(), grained, layout.partial(), layout.replicate()).unwrap()
}

/// A selection of rows on a mesh.
#[derive(Clone, Debug)]
pub(crate) struct RowSelection {
    /// The mesh, as text.
    pub(crate) mesh: &'static str,
    /// The sizes; `Zero(0)` stands for each extent in turn.
    pub(crate) sizes: Vec<Size>,
    /// Whether arguments are views with gaps; both values may be listed.
    pub(crate) strided: &'static [bool],
    /// Cases with at most this many rows run all of them.
    pub(crate) all_max: usize,
    /// The number of rows of a case with more.
    pub(crate) sample: usize,
    /// Whether layouts have grains.
    pub(crate) has_grains: bool,
}

/// The results of a selection: counts by op, and all failures.
#[derive(Debug, Default)]
pub(crate) struct RowResults {
    /// Counts by op.
    pub(crate) counts: BTreeMap<&'static str, Counts>,
    /// The number of cases without elements that the op refuses on one rank, by op.
    pub(crate) refused_empty: BTreeMap<&'static str, usize>,
    /// One text per failure.
    pub(crate) failures: Vec<String>,
}

/// A case with its single-rank results and the placements of arguments to run.
struct Task<'a> {
    entry: &'a OpModule,
    /// The sizes and the index of the case among the sized cases.
    sized_case: (Vec<Size>, usize),
    reference: Reference,
    placements: Vec<LayoutCase>,
}

impl RowSelection {
    /// The same selection in one size.
    fn in_size(&self, size: Size) -> RowSelection {
        RowSelection { sizes: vec![size], ..self.clone() }
    }

    fn mesh(&self) -> Mesh {
        Mesh::parse(self.mesh).unwrap()
    }

    fn sizes_of(&self, entry: &OpModule) -> Vec<Size> {
        let of = |size: &Size| match size {
            Size::Zero(0) => extents(entry).into_iter().map(Size::Zero).collect(),
            other => vec![*other],
        };
        self.sizes.iter().flat_map(of).collect()
    }

    /// The placements of the arguments of a case, planned on one rank without values.
    fn placements(
        &self,
        rank: &Rank,
        case: &Case,
        reference: &Reference,
        results: &mut RowResults,
    ) -> Vec<LayoutCase> {
        let lists: Vec<Vec<Layout>> =
            reference.inputs.iter().map(|g| layouts(rank.mesh(), g.dtype, &g.shape)).collect();
        let total: usize = lists.iter().map(Vec::len).product();
        let count_max = if total <= self.all_max { total } else { self.sample };
        let seed = reference
            .inputs
            .iter()
            .flat_map(|g| &g.shape)
            .fold(1u64, |s, n| s.wrapping_mul(31).wrapping_add(*n as u64));
        let mut placements = Vec::new();
        for &is_strided in self.strided {
            let seed = seed.wrapping_mul(2).wrapping_add(u64::from(is_strided));
            for (number, mut choice) in layout_combinations(&lists, count_max, seed).into_iter().enumerate() {
                if self.has_grains {
                    choice = choice.iter().enumerate().map(|(i, l)| with_grains(l, number + 5 * i)).collect();
                }
                match catch_panics(|| LayoutCase::of(rank, case, choice, number)) {
                    Ok(placement) => placements.push(LayoutCase { is_strided, ..placement }),
                    Err(e) => results.failures.push(e.to_string()),
                }
            }
        }
        placements
    }

    fn tasks<'a>(&self, entries: &'a [OpModule], results: &mut RowResults) -> Vec<Task<'a>> {
        let mesh = self.mesh();
        let num_ranks = mesh.num_ranks();
        let mut tasks = Vec::new();
        for entry in entries {
            let sizes = self.sizes_of(entry);
            for at in 0..sized(entry, &sizes, num_ranks).len() {
                let case = || sized(entry, &sizes, num_ranks).swap_remove(at);
                match reference(case, 1 + at as u64) {
                    Ok(reference) => {
                        let sized_case = (sizes.clone(), at);
                        tasks.push(Task { entry, sized_case, reference, placements: Vec::new() });
                    }
                    Err(e)
                        if ![Kind::Panic, Kind::Unsupported].contains(&e.kind())
                            && case().inputs.iter().any(|i| i.shape().contains(&0)) =>
                    {
                        *results.refused_empty.entry(entry.name).or_default() += 1;
                    }
                    Err(e) => results.failures.push(format!("{}: {e}", entry.name)),
                }
            }
        }
        let planned = World::new(mesh).dry_run(0, |rank| {
            for task in &mut tasks {
                let case = sized(task.entry, &task.sized_case.0, num_ranks).swap_remove(task.sized_case.1);
                task.placements = self.placements(rank, &case, &task.reference, results);
            }
            Ok(())
        });
        planned.unwrap();
        tasks
    }
}

/// Runs a row; a panic becomes an error.
fn catch_panics<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|payload| {
        Err(match payload.downcast::<Error>() {
            Ok(error) => *error,
            Err(other) => Error::new(Kind::Panic, other.downcast::<String>().map_or("?".into(), |s| *s)),
        })
    })
}

/// Runs all tasks on this rank.
fn run_tasks(rank: &Rank, tasks: &[Task<'_>]) -> Result<RowResults> {
    let mut results = RowResults::default();
    for task in tasks {
        let case =
            sized(task.entry, &task.sized_case.0, rank.mesh().num_ranks()).swap_remove(task.sized_case.1);
        for placement in &task.placements {
            match catch_panics(|| check_row(rank, &case, &task.reference, placement)) {
                Ok(row) => results.counts.entry(task.entry.name).or_default()[row as usize] += 1,
                Err(e) if [Kind::PeerLost, Kind::Collective, Kind::Timeout].contains(&e.kind()) => {
                    return Err(e);
                }
                Err(e) => results.failures.push(e.to_string()),
            }
        }
    }
    Ok(results)
}

/// Runs a selection on all ranks of its mesh: the counts of rank 0, the failures of all ranks.
pub(crate) fn run_rows(entries: &[OpModule], selection: &RowSelection) -> Result<RowResults> {
    let mut all = RowResults::default();
    let tasks = selection.tasks(entries, &mut all);
    let rank_results = World::new(selection.mesh()).threads(1).launch(|rank| run_tasks(rank, &tasks))?;
    for (at, results) in rank_results.into_iter().enumerate() {
        if at == 0 {
            all.counts = results.counts;
        }
        all.failures.extend(results.failures);
    }
    Ok(all)
}

/// [`run_rows`] of all ops, in twice as many worlds at once as there are cores: the ranks of a world wait for each other most of the time.
fn run_all_rows(selection: &RowSelection) -> Result<RowResults> {
    let count = 2 * thread::available_parallelism().map_or(1, usize::from);
    let part = |first: usize| OPS.iter().skip(first).step_by(count).copied().collect::<Vec<_>>();
    let parts = thread::scope(|scope| {
        let worlds: Vec<_> =
            (0..count).map(|first| scope.spawn(move || run_rows(&part(first), selection))).collect();
        worlds.into_iter().map(|world| world.join().expect("a world returns")).collect::<Result<Vec<_>>>()
    });
    let mut all = RowResults::default();
    for results in parts? {
        all.counts.extend(results.counts);
        all.refused_empty.extend(results.refused_empty);
        all.failures.extend(results.failures);
    }
    Ok(all)
}

const SIZES: [Size; 5] = [Size::Given, Size::Even, Size::Small, Size::One, Size::Zero(0)];
const BOTH: &[bool] = &[false, true];

/// The selections of a test run: a fixed sample, or all rows.
fn selections(is_full: bool) -> Vec<RowSelection> {
    let selection = |mesh, all_max, sample| RowSelection {
        mesh,
        sizes: SIZES.into(),
        strided: BOTH,
        all_max,
        sample,
        has_grains: false,
    };
    let (every, one, two) = ("a=2", ["a=2", "a=3", "a=4"], ["a=2,b=2", "a=2,b=3"]);
    let mut selections = Vec::new();
    if is_full {
        selections.extend(one.map(|mesh| selection(mesh, usize::MAX, 0)));
        selections.extend(two.map(|mesh| selection(mesh, 2000, 500)));
    } else {
        let given = selection(every, 120, 120).in_size(Size::Given);
        selections.push(RowSelection { strided: &[false], ..given });
        // Views with and without gaps on the first mesh, then with gaps on every second one.
        let views: [&[bool]; 2] = [&[false], &[true]];
        for (mesh, strided) in one.into_iter().zip([BOTH, views[0], views[1]]) {
            selections.push(RowSelection { strided, ..selection(mesh, 4, 4) });
        }
        for (mesh, strided) in two.into_iter().zip(views) {
            let selection = |rows| RowSelection { strided, ..selection(mesh, rows, rows) };
            let (zero, others): (Vec<Size>, Vec<Size>) =
                SIZES.into_iter().partition(|size| matches!(size, Size::Zero(_)));
            selections.push(RowSelection { sizes: others, ..selection(2) });
            // There are as many cases without elements as extents, and all their shards are empty.
            selections.push(RowSelection { sizes: zero, ..selection(1) });
        }
    }
    for (mesh, rows) in [("a=2", 20), ("a=2,b=2", 6)] {
        let rows = if is_full { 50 * rows } else { rows };
        let given = selection(mesh, rows, rows).in_size(Size::Given);
        selections.push(RowSelection { strided: &[false], has_grains: true, ..given });
    }
    selections
}

/// One line per op: numbers of rows by outcome, and of cases without elements that the op refuses.
fn table(counts: &BTreeMap<&str, Counts>, refused_empty: &BTreeMap<&str, usize>) -> String {
    let mut text = "op direct cast complete refused; empty cases without a meaning\n".to_string();
    for entry in OPS {
        let [direct, cast, complete, refused] = counts.get(entry.name).copied().unwrap_or_default();
        let none = refused_empty.get(entry.name).copied().unwrap_or_default();
        text += &format!("{} {direct} {cast} {complete} {refused}; {none}\n", entry.name);
    }
    text
}

/// Compares a text with a snapshot file, or writes the file.
fn assert_matches_snapshot(file: &str, text: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(file);
    if std::env::var_os("SHARDGRAD_UPDATE").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = text.lines().zip(known.lines().chain(std::iter::repeat(""))).find(|(a, b)| a != b);
    assert!(
        known == text,
        "the rows differ from the snapshot tests/data/{file}, first at {differs:?}; if ops or cases are new, run: \
         SHARDGRAD_UPDATE=1 cargo test -p shardgrad-tensor --test ops"
    );
}

/// A sample of the rows, or with SHARDGRAD_ROWS=all every row.
#[test]
fn every_op_on_every_layout() {
    let is_full = std::env::var("SHARDGRAD_ROWS").is_ok_and(|v| v == "all");
    let mut counts = BTreeMap::<&str, Counts>::new();
    let mut refused_empty = BTreeMap::<&str, usize>::new();
    let mut lines = String::new();
    for selection in selections(is_full) {
        let from = std::time::Instant::now();
        let mut sum = Counts::default();
        for size in &selection.sizes {
            let found = run_all_rows(&selection.in_size(*size)).unwrap();
            let wrong = found.failures;
            assert!(
                wrong.is_empty(),
                "{} failures on {}:\n{}",
                wrong.len(),
                selection.mesh,
                wrong.join("\n")
            );
            for (name, row) in found.counts {
                let op = counts.entry(name).or_default();
                (0..4).for_each(|i| (op[i], sum[i]) = (op[i] + row[i], sum[i] + row[i]));
            }
            for (name, count) in found.refused_empty {
                *refused_empty.entry(name).or_default() += count;
            }
        }
        let grains = if selection.has_grains { " in grains" } else { "" };
        lines += &format!("{}{grains}: {sum:?} in {:.1} s\n", selection.mesh, from.elapsed().as_secs_f64());
    }
    let total: usize = counts.values().flatten().sum();
    let text = format!("{lines}{total} rows; direct, cast, complete, refused and repaired\n");
    std::io::stdout().write_all(text.as_bytes()).unwrap();
    for entry in OPS {
        assert!(counts[entry.name][..3].iter().sum::<usize>() > 0, "{} accepts a row", entry.name);
    }
    assert!(total >= if is_full { 150_000 } else { 20_000 }, "{total} rows");
    let table = table(&counts, &refused_empty);
    if is_full {
        std::io::stdout().write_all(table.as_bytes()).unwrap();
    } else {
        assert_matches_snapshot("rows.txt", &table);
    }
}

#[test]
fn every_gradient_agrees_with_finite_differences() {
    for entry in OPS {
        for (i, reference) in references(&[*entry]).remove(0).iter().enumerate() {
            gradcheck(|| cases(entry).swap_remove(i), reference)
                .unwrap_or_else(|e| panic!("{}: {e}", entry.name));
        }
    }
}

#[test]
fn layouts_of_a_matrix_are_complete() {
    let count =
        |mesh: &str, ndim: usize| layouts(&Mesh::parse(mesh).unwrap(), DType::F64, &vec![4; ndim]).len();
    // Per axis: =, ~, + and a shard of each dim. Two axes on one dim have two orders.
    assert_eq!([count("a=2", 0), count("a=2", 1), count("a=3", 2), count("a=3", 4)], [3, 4, 5, 7]);
    assert_eq!([count("a=2,b=2", 1), count("a=2,b=2", 2)], [17, 27]);
    let texts: std::collections::BTreeSet<String> =
        layouts(&Mesh::parse("a=2,b=2").unwrap(), DType::F64, &[4, 4])
            .iter()
            .map(Layout::to_string)
            .collect();
    assert_eq!(texts.len(), 27);
    assert!(RowOutcome::Refused as usize == 3, "counts are indexed by the outcome");
}
