//! Both proofs for one op, wherever it is written: [`check_op!`](crate::check_op!).

use super::{Row, Setting, Standard, gradients, layouts, row, standard};
use crate::layout::Layout;
use crate::ops::{Case, Input};
use shardgrad_dist::{Error, Kind, Mesh, Result, World};

/// The meshes on which an op is tried.
const MESHES: [&str; 4] = ["a=2", "a=3", "a=2,b=2", "a=2,b=3"];
/// At most so many combinations of layouts a mesh and a size, evenly taken out of all.
const ROWS_MAX: usize = 300;

/// How the extents of a case are changed. A change maps equal extents to equal ones, so labels stay bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// As the case gives them: best such that shards are uneven.
    Given,
    /// Multiples of the number of ranks.
    Even,
    /// At most 2, so that axes of more ranks leave some empty handed.
    Small,
    /// All 1.
    One,
    /// This extent becomes 0.
    Zero(usize),
}

/// The same case with other extents; `None` if it takes no others, or the change means nothing.
#[must_use]
pub fn resized(case: &Case, size: Size, num_ranks: usize) -> Option<Case> {
    let change = |n: usize| match size {
        Size::Given => n,
        Size::Even => n.next_multiple_of(num_ranks),
        Size::Small => n.min(2),
        Size::One => 1,
        Size::Zero(gone) => n * usize::from(n != gone),
    };
    if case.is_fixed && size != Size::Given || size == Size::Small && num_ranks < 3 {
        return None;
    }
    let changed = |input: &Input| {
        let shape: Vec<usize> = input.shape().iter().map(|n| change(*n)).collect();
        Some(match input {
            // There is no index into nothing.
            Input::Index(_, bound) if change(*bound) == 0 && !shape.contains(&0) => return None,
            Input::Index(_, bound) => Input::Index(shape, change(*bound)),
            other => other.with_shape(&shape),
        })
    };
    let inputs = case.inputs.iter().map(changed).collect::<Option<_>>()?;
    Some(Case { inputs, ..case.clone() })
}

/// What was tried of an op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tried {
    /// Combinations of layouts that the op accepts, with or without steps.
    pub accepted: usize,
    /// Combinations that it refuses, and accepts after a repair of its help.
    pub refused: usize,
}

/// Checks one call of an op: its gradient against differences; then, on several meshes, in several sizes (if the case is not
/// fixed), on dense memory and on views with gaps, that values and gradients are those of one rank for every layout, and
/// that the repairs of what is refused work.
///
/// # Errors
/// `Kind::Unsupported` with what is wrong.
pub fn op(make: impl Fn() -> Case + Sync) -> Result<Tried> {
    let mut tried = Tried::default();
    for text in MESHES {
        let mesh = Mesh::parse(text)?;
        for size in [Size::Given, Size::Even, Size::Small, Size::One] {
            let sized = || resized(&make(), size, mesh.num_ranks());
            if sized().is_none() {
                continue;
            }
            let case = || sized().expect("the same case as before");
            let standard = standard(case, 1)?;
            if text == MESHES[0] {
                gradients(case, &standard)?;
            }
            let settings = settings(&mesh, case, &standard)?;
            let rows = World::new(mesh.clone()).threads(1).launch(|rank| {
                let case = case();
                settings.iter().map(|s| row(rank, &case, &standard, s)).collect::<Result<Vec<Row>>>()
            })?;
            let refused = rows[0].iter().filter(|r| **r == Row::Refused).count();
            tried.refused += refused;
            tried.accepted += rows[0].len() - refused;
        }
    }
    if tried.accepted == 0 {
        return Err(Error::new(Kind::Unsupported, format!("{:?} accepts no layouts at all", make().op)));
    }
    Ok(tried)
}

/// Layouts for the arguments of a case, each asked about once, dense and with gaps in turn.
fn settings(mesh: &Mesh, case: impl Fn() -> Case, standard: &Standard) -> Result<Vec<Setting>> {
    let lists: Vec<Vec<Layout>> = standard.inputs.iter().map(|g| layouts(mesh, g.dtype, &g.shape)).collect();
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
            let setting = Setting::of(rank, &case, lists.iter().map(digit).collect(), number)?;
            Ok(Setting { is_strided: number % 2 == 1, ..setting })
        };
        (0..count).map(one).collect()
    })
}

/// Checks an op of yours (see [`op`]): its op as a value, then what goes into it (see [`Input`]). Gives a `Result` of what
/// was tried. Add `fixed` if it was made for these extents.
///
/// ```
/// use shardgrad_tensor::ops::{Input, square::Square};
/// use shardgrad_tensor::check_op;
/// use std::rc::Rc;
///
/// let tried = check_op!(Rc::new(Square), [Input::real(&[5, 3])])?;
/// assert!(tried.accepted > 100);
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
#[macro_export]
macro_rules! check_op {
    ($op:expr, [$($input:expr),* $(,)?] $(,)?) => {
        $crate::check::op(|| $crate::ops::Case::new($op, vec![$($input),*]))
    };
    ($op:expr, [$($input:expr),* $(,)?], fixed $(,)?) => {
        $crate::check::op(|| $crate::ops::Case::fixed($op, vec![$($input),*]))
    };
}
