//! Layout test and gradcheck for one op, in this crate or outside: [`check_op!`](crate::check_op!).

use super::{LayoutCase, Reference, RowOutcome, check_row, gradcheck, layouts, reference};
use shardgrad_dist::{Error, Kind, Mesh, Result, World};
use shardgrad_tensor::Layout;
use shardgrad_tensor::ops::{Case, Input};

/// The meshes of the layout test.
const MESHES: [&str; 4] = ["a=2", "a=3", "a=2,b=2", "a=2,b=3"];
/// The maximum number of combinations of layouts for each mesh and size, evenly taken out of all.
const ROWS_MAX: usize = 300;

/// How the extents of a case are changed. Equal extents stay equal, so labels stay bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// As the case gives them: best such that shards are uneven.
    Given,
    /// Multiples of the number of ranks.
    Even,
    /// At most 2, so that axes with more ranks have empty shards.
    Small,
    /// All 1.
    One,
    /// This extent becomes 0.
    Zero(usize),
}

/// Returns the case with other extents; `None` if it takes no others, or the change has no effect.
#[must_use]
pub fn resize(case: &Case, size: Size, num_ranks: usize) -> Option<Case> {
    let change = |n: usize| match size {
        Size::Given => n,
        Size::Even => n.next_multiple_of(num_ranks),
        Size::Small => n.min(2),
        Size::One => 1,
        Size::Zero(gone) => n * usize::from(n != gone),
    };
    if case.has_fixed_shape && size != Size::Given || size == Size::Small && num_ranks < 3 {
        return None;
    }
    let changed = |input: &Input| {
        let shape: Vec<usize> = input.shape().iter().map(|n| change(*n)).collect();
        Some(match input {
            // An empty dim has no valid index.
            Input::Index(_, bound) if change(*bound) == 0 && !shape.contains(&0) => return None,
            Input::Index(_, bound) => Input::Index(shape, change(*bound)),
            other => other.with_shape(&shape),
        })
    };
    let inputs = case.inputs.iter().map(changed).collect::<Option<_>>()?;
    Some(Case { inputs, ..case.clone() })
}

/// The numbers of layout combinations that were checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckCounts {
    /// Combinations that the op accepts, with or without implicit steps.
    pub accepted: usize,
    /// Combinations that the op refuses, and accepts after a repair.
    pub refused: usize,
}

/// Checks one call of an op: gradcheck; then, on several meshes, in several sizes (if the case is not fixed), on dense
/// memory and on strided views, that values and gradients match one rank for every layout, and that the repairs of
/// refusals work.
///
/// # Errors
/// `Kind::Unsupported` with the defect.
pub fn check_op(make: impl Fn() -> Case + Sync) -> Result<CheckCounts> {
    let mut tried = CheckCounts::default();
    for text in MESHES {
        let mesh = Mesh::parse(text)?;
        for size in [Size::Given, Size::Even, Size::Small, Size::One] {
            let sized = || resize(&make(), size, mesh.num_ranks());
            if sized().is_none() {
                continue;
            }
            let case = || sized().expect("the same case as before");
            let reference = reference(case, 1)?;
            if text == MESHES[0] {
                gradcheck(case, &reference)?;
            }
            let layout_cases = layout_cases(&mesh, case, &reference)?;
            let rows = World::new(mesh.clone()).threads(1).launch(|rank| {
                let case = case();
                layout_cases
                    .iter()
                    .map(|s| check_row(rank, &case, &reference, s))
                    .collect::<Result<Vec<RowOutcome>>>()
            })?;
            let refused = rows[0].iter().filter(|r| **r == RowOutcome::Refused).count();
            tried.refused += refused;
            tried.accepted += rows[0].len() - refused;
        }
    }
    if tried.accepted == 0 {
        return Err(Error::new(Kind::Unsupported, format!("{:?} accepts no layouts at all", make().op)));
    }
    Ok(tried)
}

/// Layouts for the arguments of a case, dense and strided alternately, each asked about once.
fn layout_cases(mesh: &Mesh, case: impl Fn() -> Case, reference: &Reference) -> Result<Vec<LayoutCase>> {
    let lists: Vec<Vec<Layout>> = reference.inputs.iter().map(|g| layouts(mesh, g.dtype, &g.shape)).collect();
    let total: usize = lists.iter().map(Vec::len).product();
    let count = total.min(ROWS_MAX);
    World::new(mesh.clone()).dry_run(0, |rank| {
        let case = case();
        let one = |number: usize| {
            let mut rest = number * total / count;
            let digit = |list: &Vec<Layout>| {
                let layout = list[rest % list.len()].clone();
                rest /= list.len();
                layout
            };
            let layout_case = LayoutCase::of(rank, &case, lists.iter().map(digit).collect(), number)?;
            Ok(LayoutCase { is_strided: number % 2 == 1, ..layout_case })
        };
        (0..count).map(one).collect()
    })
}
