//! The walk over meshes, cases, sizes, layouts and views.

use shardgrad_dist::{Error, Kind, Mesh, Rank, Result, World};
use shardgrad_kernels::DType;
use shardgrad_tensor::check::{Row, Setting, Size, Standard, gradients, layouts, resized, row, standard};
use shardgrad_tensor::ops::{Case, Entry, OPS};
use shardgrad_tensor::{Context, Layout};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Rows of one op, counted by what came of them: direct, cast, complete, refused.
pub(crate) type Counts = [usize; 4];

/// The cases of an entry in some sizes.
pub(crate) fn sized(entry: &Entry, sizes: &[Size], num_ranks: usize) -> Vec<Case> {
    let of = |case: &Case| sizes.iter().filter_map(|s| resized(case, *s, num_ranks)).collect::<Vec<_>>();
    (entry.cases)().iter().flat_map(of).collect()
}

/// The cases of an entry as given and with extents of 1.
pub(crate) fn cases(entry: &Entry) -> Vec<Case> {
    sized(entry, &[Size::Given, Size::One], 1)
}

/// What one rank makes of every case of some entries.
pub(crate) fn standards(entries: &[Entry]) -> Vec<Vec<Standard>> {
    let of = |entry: &Entry| {
        let make = |i: usize| standard(|| cases(entry).swap_remove(i), 1 + i as u64);
        (0..cases(entry).len()).map(|i| make(i).unwrap_or_else(|e| panic!("{}: {e}", entry.name))).collect()
    };
    entries.iter().map(of).collect()
}

/// Each extent above 1 of the cases of an entry, once.
fn extents(entry: &Entry) -> Vec<usize> {
    let cases = (entry.cases)();
    let all = cases.iter().flat_map(|c| &c.inputs).flat_map(|i| i.shape().to_vec());
    all.filter(|n| *n > 1).collect::<std::collections::BTreeSet<usize>>().into_iter().collect()
}

/// Every choice of one element a list, or `count_max` of them by a fixed seed.
fn choices(lists: &[Vec<Layout>], count_max: usize, seed: u64) -> Vec<Vec<Layout>> {
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

/// The same layout with some dims counted in grains, by a seed.
fn with_grains(layout: &Layout, seed: usize) -> Layout {
    let grained = layout.dims().iter().enumerate().map(|(d, dim)| {
        let divisors: Vec<usize> = (1..=dim.extent.max(1)).filter(|g| dim.extent % g == 0).collect();
        dim.in_grains(divisors[(seed * 7 + d * 3 + seed / 5) % divisors.len()])
    });
    Layout::new(layout.mesh(), layout.dtype(), grained, layout.partial(), layout.replicate()).unwrap()
}

/// Which rows to run on a mesh.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// The mesh, as text.
    pub(crate) mesh: &'static str,
    /// In which sizes; `Zero(0)` stands for each extent in turn.
    pub(crate) sizes: Vec<Size>,
    /// On views with gaps, and without: both may be asked for.
    pub(crate) strided: &'static [bool],
    /// All rows of a case that has at most so many.
    pub(crate) all_max: usize,
    /// So many rows of a case that has more.
    pub(crate) sample: usize,
    /// Whether dims are counted in grains.
    pub(crate) has_grains: bool,
}

/// What a part found: counts by op, and everything that is wrong.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    /// By entry.
    pub(crate) counts: BTreeMap<&'static str, Counts>,
    /// By entry, cases without elements that the op refuses on one rank.
    pub(crate) meaningless: BTreeMap<&'static str, usize>,
    /// One text each.
    pub(crate) findings: Vec<String>,
}

/// A case with what one rank makes of it, and the settings that are to be run.
struct Task<'a> {
    entry: &'a Entry,
    /// Its sizes and its number among the sized cases.
    place: (Vec<Size>, usize),
    standard: Standard,
    settings: Vec<Setting>,
}

impl Part {
    /// The same part in one size.
    fn in_size(&self, size: Size) -> Part {
        Part { sizes: vec![size], ..self.clone() }
    }

    fn mesh(&self) -> Mesh {
        Mesh::parse(self.mesh).unwrap()
    }

    fn sizes_of(&self, entry: &Entry) -> Vec<Size> {
        let of = |size: &Size| match size {
            Size::Zero(0) => extents(entry).into_iter().map(Size::Zero).collect(),
            other => vec![*other],
        };
        self.sizes.iter().flat_map(of).collect()
    }

    /// The settings of a case, asked for on one rank without values.
    fn settings(&self, rank: &Rank, case: &Case, standard: &Standard, walk: &mut Walk) -> Vec<Setting> {
        let lists: Vec<Vec<Layout>> =
            standard.inputs.iter().map(|g| layouts(rank.mesh(), g.dtype, &g.shape)).collect();
        let total: usize = lists.iter().map(Vec::len).product();
        let count_max = if total <= self.all_max { total } else { self.sample };
        let seed = standard
            .inputs
            .iter()
            .flat_map(|g| &g.shape)
            .fold(1u64, |s, n| s.wrapping_mul(31).wrapping_add(*n as u64));
        let mut settings = Vec::new();
        for &is_strided in self.strided {
            let seed = seed.wrapping_mul(2).wrapping_add(u64::from(is_strided));
            for (number, mut choice) in choices(&lists, count_max, seed).into_iter().enumerate() {
                if self.has_grains {
                    choice = choice.iter().enumerate().map(|(i, l)| with_grains(l, number + 5 * i)).collect();
                }
                match caught(rank, || Setting::of(rank, case, choice, number)) {
                    Ok(setting) => settings.push(Setting { is_strided, ..setting }),
                    Err(e) => walk.findings.push(e.to_string()),
                }
            }
        }
        settings
    }

    fn tasks<'a>(&self, entries: &'a [Entry], walk: &mut Walk) -> Vec<Task<'a>> {
        let mesh = self.mesh();
        let num_ranks = mesh.num_ranks();
        let mut tasks = Vec::new();
        for entry in entries {
            let sizes = self.sizes_of(entry);
            for at in 0..sized(entry, &sizes, num_ranks).len() {
                let case = || sized(entry, &sizes, num_ranks).swap_remove(at);
                match standard(case, 1 + at as u64) {
                    Ok(standard) => {
                        let place = (sizes.clone(), at);
                        tasks.push(Task { entry, place, standard, settings: Vec::new() });
                    }
                    Err(e)
                        if ![Kind::Panic, Kind::Unsupported].contains(&e.kind())
                            && case().inputs.iter().any(|i| i.shape().contains(&0)) =>
                    {
                        *walk.meaningless.entry(entry.name).or_default() += 1;
                    }
                    Err(e) => walk.findings.push(format!("{}: {e}", entry.name)),
                }
            }
        }
        let planned = World::new(mesh).dry_run(0, |rank| {
            for task in &mut tasks {
                let case = sized(task.entry, &task.place.0, num_ranks).swap_remove(task.place.1);
                task.settings = self.settings(rank, &case, &task.standard, walk);
            }
            Ok(())
        });
        planned.unwrap();
        tasks
    }
}

/// A row's outcome, whatever way it ends in.
fn caught<T>(rank: &Rank, f: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|payload| {
        Context::of(rank).set_closed(false);
        Err(match payload.downcast::<Error>() {
            Ok(error) => *error,
            Err(other) => Error::new(Kind::Panic, other.downcast::<String>().map_or("?".into(), |s| *s)),
        })
    })
}

/// Runs every task on this rank's mesh.
fn work(rank: &Rank, tasks: &[Task<'_>]) -> Result<Walk> {
    let mut walk = Walk::default();
    for task in tasks {
        let case = sized(task.entry, &task.place.0, rank.mesh().num_ranks()).swap_remove(task.place.1);
        for setting in &task.settings {
            match caught(rank, || row(rank, &case, &task.standard, setting)) {
                Ok(row) => walk.counts.entry(task.entry.name).or_default()[row as usize] += 1,
                Err(e) if [Kind::PeerLost, Kind::Collective, Kind::Timeout].contains(&e.kind()) => {
                    return Err(e);
                }
                Err(e) => walk.findings.push(e.to_string()),
            }
        }
    }
    Ok(walk)
}

/// Runs a part on all ranks of its mesh: the counts of rank 0, the findings of all.
pub(crate) fn walk(entries: &[Entry], part: &Part) -> Result<Walk> {
    let mut all = Walk::default();
    let tasks = part.tasks(entries, &mut all);
    let walks = World::new(part.mesh()).threads(1).launch(|rank| work(rank, &tasks))?;
    for (at, walk) in walks.into_iter().enumerate() {
        if at == 0 {
            all.counts = walk.counts;
        }
        all.findings.extend(walk.findings);
    }
    Ok(all)
}

const SIZES: [Size; 5] = [Size::Given, Size::Even, Size::Small, Size::One, Size::Zero(0)];
const BOTH: &[bool] = &[false, true];

/// What is run: a fixed slice, or all of it.
fn parts(is_full: bool) -> Vec<Part> {
    let part = |mesh, all_max, sample| Part {
        mesh,
        sizes: SIZES.into(),
        strided: BOTH,
        all_max,
        sample,
        has_grains: false,
    };
    let (every, one, two) = ("a=2", ["a=2", "a=3", "a=4"], ["a=2,b=2", "a=2,b=3"]);
    let mut parts = Vec::new();
    if is_full {
        parts.extend(one.map(|mesh| part(mesh, usize::MAX, 0)));
        parts.extend(two.map(|mesh| part(mesh, 2000, 500)));
    } else {
        let given = part(every, 400, 400).in_size(Size::Given);
        parts.push(Part { strided: &[false], ..given });
        parts.extend(one.map(|mesh| part(mesh, 5, 5)));
        parts.extend(two.map(|mesh| part(mesh, 3, 3)));
    }
    for (mesh, rows) in [("a=2", 20), ("a=2,b=2", 12)] {
        let rows = if is_full { 50 * rows } else { rows };
        let given = part(mesh, rows, rows).in_size(Size::Given);
        parts.push(Part { strided: &[false], has_grains: true, ..given });
    }
    parts
}

/// One line an op: rows by what came of them, and cases without elements that have no meaning for it.
fn table(counts: &BTreeMap<&str, Counts>, meaningless: &BTreeMap<&str, usize>) -> String {
    let mut text = "op direct cast complete refused; empty cases without a meaning\n".to_string();
    for entry in OPS {
        let [direct, cast, complete, refused] = counts.get(entry.name).copied().unwrap_or_default();
        let none = meaningless.get(entry.name).copied().unwrap_or_default();
        text += &format!("{} {direct} {cast} {complete} {refused}; {none}\n", entry.name);
    }
    text
}

/// Compares with a file beside the test, or writes it.
fn pinned(file: &str, text: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(file);
    if std::env::var_os("SHARDGRAD_UPDATE").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = text.lines().zip(known.lines().chain(std::iter::repeat(""))).find(|(a, b)| a != b);
    assert!(
        known == text,
        "the rows are not those of tests/data/{file}, first at {differs:?}; where ops or cases are new, run: \
         SHARDGRAD_UPDATE=1 cargo test -p shardgrad-tensor --test ops"
    );
}

/// The slice of the inner ring, or with SHARDGRAD_ROWS=all every row.
#[test]
fn every_op_on_every_layout() {
    let is_full = std::env::var("SHARDGRAD_ROWS").is_ok_and(|v| v == "all");
    let mut counts = BTreeMap::<&str, Counts>::new();
    let mut meaningless = BTreeMap::<&str, usize>::new();
    let mut lines = String::new();
    for part in parts(is_full) {
        let from = std::time::Instant::now();
        let mut sum = Counts::default();
        for size in &part.sizes {
            let found = walk(OPS, &part.in_size(*size)).unwrap();
            let wrong = found.findings;
            assert!(wrong.is_empty(), "{} findings on {}:\n{}", wrong.len(), part.mesh, wrong.join("\n"));
            for (name, row) in found.counts {
                let op = counts.entry(name).or_default();
                (0..4).for_each(|i| (op[i], sum[i]) = (op[i] + row[i], sum[i] + row[i]));
            }
            for (name, count) in found.meaningless {
                *meaningless.entry(name).or_default() += count;
            }
        }
        let grains = if part.has_grains { " in grains" } else { "" };
        lines += &format!("{}{grains}: {sum:?} in {:.1} s\n", part.mesh, from.elapsed().as_secs_f64());
    }
    let total: usize = counts.values().flatten().sum();
    let text = format!("{lines}{total} rows; direct, cast, complete, refused and repaired\n");
    std::io::stdout().write_all(text.as_bytes()).unwrap();
    for entry in OPS {
        assert!(counts[entry.name][..3].iter().sum::<usize>() > 0, "{} accepts some row", entry.name);
    }
    assert!(total >= if is_full { 150_000 } else { 20_000 }, "{total} rows");
    let table = table(&counts, &meaningless);
    if is_full {
        std::io::stdout().write_all(table.as_bytes()).unwrap();
    } else {
        pinned("rows.txt", &table);
    }
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
