//! Tensor contraction by an index signature: c = sum over the labels that the output lacks of a * b.
//!
//! matmul, its transposed forms and batched products are this op with other signatures. The vjp is the same op twice:
//! for `A, B -> C`, da = `C, B -> A` and db = `A, C -> B`.

use super::labels::invalid_argument;
use super::{Case, Input};
use crate::execution::local_tensor::{LocalTensor, View, as_arg, as_arg_mut, launch_args};
use crate::layout::Layout;
use crate::layout::signature::{Labels, Mark, Signature, Term};
use crate::op::{
    CanonicalForm, Cotangents, ForwardContext, LeafCut, LocalTensors, Op, PlanKey, SavedForBackward, Vjp,
};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::batched_matmul::BATCHED_MATMUL;
use shardgrad_kernels::op::leaf_matmul::LEAF_MATMUL;
use shardgrad_kernels::op::linear::MATMUL_ADD;
use shardgrad_kernels::{Arg, ArgMut, Dims, Strides};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::rc::Rc;

/// Contraction of two tensors by an index signature such as `..m k, k n -> ..m n` (`torch.einsum`, `jnp.einsum`,
/// `lax.dot_general`).
///
/// Each label of an argument must occur in the output or in the other argument, and at most once per tensor. `1` is a
/// dim of extent 1 without a label. Arguments and result have one float dtype; 16-bit floats are summed in f32. Linear
/// in each argument; the result is a partial sum over the axes that shard the summed labels.
#[doc(alias = "matmul")]
#[doc(alias = "bmm")]
#[doc(alias = "mm")]
#[doc(alias = "dot_general")]
#[doc(alias = "tensordot")]
#[doc(alias = "contraction")]
#[doc(alias = "gemm")]
#[derive(Debug)]
pub struct Einsum {
    signature: Cow<'static, str>,
}

impl Einsum {
    /// The contraction of a signature with two arguments and one output.
    ///
    /// # Errors
    /// `Kind::Shape` if the text is not a [`Signature`] of that form.
    pub fn new(signature: &str) -> Result<Einsum> {
        let read = Signature::read(signature).map_err(|e| {
            Error::new(e.kind(), format!("einsum: {}", e.message())).detail(
                "help",
                "labels are separated by blanks, as in `b t d, d h -> b t h`; `..m` must come first in its tensor",
            )
        })?;
        let refuse = |why: &str| Err(Error::new(Kind::Shape, format!("einsum: `{signature}` {why}")));
        let ([a, b], [c]) = (read.inputs(), read.outputs()) else {
            return refuse("is not of the form `a b, b c -> a c`");
        };
        if [a, b, c].into_iter().flatten().any(|x| matches!(x.mark, Mark::Unsharded | Mark::Indexed)) {
            return refuse("is not of the form `a b, b c -> a c`");
        }
        // Terms without marks are equal if their labels are.
        let lacks =
            |others: [&[Term]; 2], x: &Term| x.mark != Mark::Unit && !others.iter().any(|t| t.contains(x));
        if a.iter().any(|x| lacks([b, c], x)) || b.iter().any(|x| lacks([a, c], x)) {
            return refuse("has a label in one argument only: sum over it first, or use contract");
        }
        if c.iter().any(|x| lacks([a, b], x)) {
            return refuse("has an output label that no argument has");
        }
        Ok(Einsum { signature: signature.to_string().into() })
    }

    /// The contraction of a signature that is known to be valid.
    pub(super) fn of(signature: impl Into<Cow<'static, str>>) -> Einsum {
        Einsum { signature: signature.into() }
    }

    /// [`Einsum::transpose`] of the contraction of a signature that is known to be valid.
    pub(super) fn transpose_of(signature: Cow<'static, str>, i: usize) -> Einsum {
        Einsum { signature }.transpose(i)
    }

    /// The contraction that gives the cotangent of argument `i`: the cotangent of the output takes the place of the argument.
    fn transpose(&self, i: usize) -> Einsum {
        if let Some([_, transposes @ ..]) = TRANSPOSES.iter().find(|[known, ..]| *known == &*self.signature) {
            return Einsum::of(transposes[i]);
        }
        let (inputs, c) = self.signature.split_once("->").expect("checked when the op was made");
        let (a, b) = inputs.split_once(',').expect("checked when the op was made");
        match i {
            0 => Einsum::of(format!("{c}, {b} -> {a}")),
            _ => Einsum::of(format!("{a}, {c} -> {b}")),
        }
    }
}

pub(super) const MATMUL: &str = "..m k, k n -> ..m n";

/// Usual contractions, each with the contractions of its cotangents ([`Einsum::transpose`]): constant texts, so that their plans are
/// cached.
const TRANSPOSES: [[&str; 3]; 7] = [
    [MATMUL, "..m n, k n -> ..m k", "..m k, ..m n -> k n"],
    ["..m n, k n -> ..m k", MATMUL, "..m n, ..m k -> k n"],
    ["..m k, k -> ..m", "..m, k -> ..m k", "..m k, ..m -> k"],
    ["..b m k, ..b k n -> ..b m n", "..b m n, ..b k n -> ..b m k", "..b m k, ..b m n -> ..b k n"],
    // Linear layers to and from several dims, such as heads.
    ["..m i0, i0 o0 o1 -> ..m o0 o1", "..m o0 o1, i0 o0 o1 -> ..m i0", "..m i0, ..m o0 o1 -> i0 o0 o1"],
    [
        "..m i0, i0 o0 o1 o2 -> ..m o0 o1 o2",
        "..m o0 o1 o2, i0 o0 o1 o2 -> ..m i0",
        "..m i0, ..m o0 o1 o2 -> i0 o0 o1 o2",
    ],
    ["..m i0 i1, i0 i1 o0 -> ..m o0", "..m o0, i0 i1 o0 -> ..m i0 i1", "..m i0 i1, ..m o0 -> i0 i1 o0"],
];

/// The term of a dim of extent 1 without a label.
const ONE: &str = "1";

/// Matrix product x w for any numbers of dims, as `torch.matmul`: `[.., m, k] x [.., k, n] -> [.., m, n]`.
///
/// Leading dims are aligned at the right and broadcast where one is missing or has extent 1. The dim of a vector is k.
///
/// # Errors
/// `Kind::Shape` if an argument is a scalar. Extents that do not match are refused when the op is applied.
pub fn product(x: &[usize], w: &[usize]) -> Result<Einsum> {
    let (x, w) = match (x.len(), w.len()) {
        (0, _) | (_, 0) => return invalid_argument("matmul: a scalar has no dim to sum over; use x.mul(y)"),
        (_, 1) => return Ok(Einsum::of("..m k, k -> ..m")),
        (_, 2) => return Ok(matmul()),
        (1, _) => return Ok(Einsum::of("k, ..b k n -> ..b n")),
        (m, n) => (&x[..m - 2], &w[..n - 2]),
    };
    if x == w {
        return Ok(Einsum::of("..b m k, ..b k n -> ..b m n"));
    }
    let width = x.len().max(w.len());
    let extent = |side: &[usize], d: usize| (d + side.len()).checked_sub(width).map(|at| side[at]);
    let label = |side: &[usize], other: &[usize], d: usize| match (extent(side, d), extent(other, d)) {
        (None, _) => None,
        (Some(1), Some(n)) if n != 1 => Some(ONE.to_string()),
        _ => Some(format!("b{d}")),
    };
    let batch = |side, other| (0..width).filter_map(|d| label(side, other, d)).collect::<Vec<_>>().join(" ");
    let all = (0..width).map(|d| format!("b{d}")).collect::<Vec<_>>().join(" ");
    Ok(Einsum::of(format!("{} m k, {} k n -> {all} m n", batch(x, w), batch(w, x))))
}

/// Matrix product x w: `..m k, k n -> ..m n`.
#[must_use]
pub fn matmul() -> Einsum {
    Einsum::of(MATMUL)
}

/// Matrix product x w^T: `..m n, k n -> ..m k` (a tied output head).
#[must_use]
pub fn matmul_nt() -> Einsum {
    Einsum::of("..m n, k n -> ..m k")
}

/// Matrix product x^T y over all leading dims: `..m k, ..m n -> k n` (a weight gradient).
#[must_use]
pub fn matmul_tn() -> Einsum {
    Einsum::of("..m k, ..m n -> k n")
}

/// The tensors of a contraction as batched matrices. Depends on the labels and on the views of the arguments.
struct BatchedMatrices {
    left: GroupedView,
    right: GroupedView,
    out: GroupedView,
    /// The output as row-major matrices, if its strides are that, and whether these are transposed.
    row_major_out: Option<(View, bool)>,
}

/// The order of dims that transposes batched matrices.
const TRANSPOSE: [usize; 3] = [0, 2, 1];

/// A tensor as one dim for each group of labels.
enum GroupedView {
    /// A view of the tensor.
    InPlace(View),
    /// A contiguous copy of a view, where the strides allow no view with a dim for each group.
    Copied { from: View, copy: View },
}

impl GroupedView {
    fn of(view: &Strides, labels: &[u8], groups: &[&[u8]]) -> GroupedView {
        let (order, shape) = order_and_shape(view, labels, groups);
        let from = view.permute(&order);
        match from.reshape(&shape) {
            Some(view) => GroupedView::InPlace(view.into()),
            None => GroupedView::Copied { from: from.into(), copy: Strides::contiguous(&shape).into() },
        }
    }

    /// The contiguous copy of an operand, if it needs one.
    fn copied(&self, rank: &Rank, x: &LocalTensor) -> Result<Option<LocalTensor>> {
        match self {
            GroupedView::InPlace(_) => Ok(None),
            GroupedView::Copied { from, copy } => {
                Ok(Some(x.with_view(from.clone()).to_dtype(rank, x.dtype)?.with_view(copy.clone())))
            }
        }
    }

    /// The operand as kernel argument: its view or its copy.
    fn read<'a>(&'a self, x: &'a LocalTensor, copy: &'a Option<LocalTensor>) -> Arg<'a> {
        match (self, copy) {
            (GroupedView::InPlace(view), _) => Arg { buffer: &x.buffer, dtype: x.dtype, view },
            (GroupedView::Copied { .. }, copy) => as_arg(&copy.as_ref().expect("made above")),
        }
    }

    /// The view as row-major matrices, if possible, and whether these are transposed.
    fn row_major(&self) -> Option<(View, bool)> {
        let GroupedView::InPlace(view) = self else { return None };
        let transposed = view.permute(&TRANSPOSE);
        match (view.is_contiguous(), transposed.is_contiguous()) {
            (true, _) => Some((view.clone(), false)),
            (false, true) => Some((transposed.into(), true)),
            (false, false) => None,
        }
    }

    /// Calls `f` to write an output, through a contiguous copy if it needs one.
    fn write(
        &self,
        rank: &Rank,
        out: &mut LocalTensor,
        f: impl FnOnce(ArgMut<'_>) -> Result<()>,
    ) -> Result<()> {
        match self {
            GroupedView::InPlace(view) => f(ArgMut { buffer: &mut out.buffer, dtype: out.dtype, view }),
            GroupedView::Copied { from, copy } => {
                let mut grouped = LocalTensor::alloc_with_view(rank, out.dtype, copy.clone())?;
                f(as_arg_mut(&mut grouped))?;
                out.write(rank, from.clone(), &grouped.with_view(Strides::contiguous(&from.shape)))
            }
        }
    }
}

/// The labels of a contraction: those of both arguments and the output, of the output and one argument, and the summed ones.
struct Groups {
    batch: SmallVec<[u8; 8]>,
    m: SmallVec<[u8; 8]>,
    n: SmallVec<[u8; 8]>,
    k: SmallVec<[u8; 8]>,
}

impl Groups {
    fn of(labels: &Labels) -> Groups {
        let [a, b, c] = [&labels.inputs()[0], &labels.inputs()[1], &labels.outputs()[0]];
        let group = |of: &[u8], has: [(&[u8], bool); 2]| -> SmallVec<[u8; 8]> {
            let is_in = |label: &u8| has.iter().all(|(tensor, has)| tensor.contains(label) == *has);
            of.iter().copied().filter(|label| *label != Labels::UNIT && is_in(label)).collect()
        };
        Groups {
            batch: group(c, [(a, true), (b, true)]),
            m: group(c, [(a, true), (b, false)]),
            n: group(c, [(a, false), (b, true)]),
            k: group(a, [(b, true), (c, false)]),
        }
    }
}

/// The tensors of a contraction over leaves of a label as batched matrices, whose summed dims are those before the label and those from
/// the label on.
struct LeafMatrices {
    left: GroupedView,
    right: GroupedView,
    out: GroupedView,
    /// Elements of the summed dims for each element of the label.
    inner: usize,
}

impl LeafMatrices {
    /// `None` if the label is not summed.
    fn of(labels: &Labels, label: u8, x: &[&LocalTensor], out: &LocalTensor) -> Option<LeafMatrices> {
        let Groups { batch, m, n, k } = Groups::of(labels);
        let (before, from) = k.split_at(k.iter().position(|known| *known == label)?);
        let a = &labels.inputs()[0];
        let extent =
            |label: &u8| x[0].view.shape[a.iter().position(|known| known == label).expect("a label of a")];
        Some(LeafMatrices {
            left: GroupedView::of(&x[0].view, a, &[&batch, &m, before, from]),
            right: GroupedView::of(&x[1].view, &labels.inputs()[1], &[&batch, before, from, &n]),
            out: GroupedView::of(&out.view, &labels.outputs()[0], &[&batch, &m, &n]),
            inner: from[1..].iter().map(extent).product(),
        })
    }
}

impl BatchedMatrices {
    fn of(labels: &Labels, x: &[&LocalTensor], out: &LocalTensor) -> BatchedMatrices {
        let Groups { batch, m, n, k } = Groups::of(labels);
        let out = GroupedView::of(&out.view, &labels.outputs()[0], &[&batch, &m, &n]);
        BatchedMatrices {
            left: GroupedView::of(&x[0].view, &labels.inputs()[0], &[&batch, &m, &k]),
            right: GroupedView::of(&x[1].view, &labels.inputs()[1], &[&batch, &k, &n]),
            row_major_out: out.row_major(),
            out,
        }
    }

    /// Adds the product to the accumulator of the output. Returns false and does nothing if there is no accumulator, or the output is
    /// not row-major.
    ///
    /// A transposed output is the product of the transposed factors in reverse order, with the same order of sums.
    fn multiply_accumulate(
        &self,
        local: &ForwardContext<'_>,
        [a, b]: [&Arg<'_>; 2],
        out: &mut LocalTensor,
    ) -> Result<bool> {
        let Some((view, transposed)) = &self.row_major_out else { return Ok(false) };
        let Some(sum) = local.take_product_accumulator(0) else { return Ok(false) };
        let r = sum.with_view(Strides::contiguous(&view.shape).at(sum.view.offset));
        let views = [a, b].map(|x| if *transposed { x.view.permute(&TRANSPOSE) } else { x.view.clone() });
        let [a, b] = [(a, &views[0]), (b, &views[1])].map(|(x, view)| Arg { view, ..*x });
        let factors = if *transposed { [b, a] } else { [a, b] };
        let inputs = [factors[0], factors[1], as_arg(&&r)];
        let out = ArgMut { buffer: &mut out.buffer, dtype: out.dtype, view };
        launch_args(local.rank, &MATMUL_ADD, &inputs, &mut [out], &[])?;
        Ok(true)
    }
}

/// The dims of a view in the order of the groups, without dims of extent 1 that have no label, and the number of elements of each group.
fn order_and_shape(view: &Strides, labels: &[u8], groups: &[&[u8]]) -> (Dims, Dims) {
    let dim = |label: &u8| labels.iter().position(|l| l == label).expect("a group is taken from the labels");
    let order = groups.iter().flat_map(|group| group.iter().map(dim)).collect();
    (order, groups.iter().map(|group| group.iter().map(|label| view.shape[dim(label)]).product()).collect())
}

impl Op for Einsum {
    fn name(&self) -> &'static str {
        match &*self.signature {
            "..m k, k n -> ..m n" | "..m k, k -> ..m" => "matmul",
            "k, ..b k n -> ..b n" | "..b m k, ..b k n -> ..b m n" => "matmul",
            "..m n, k n -> ..m k" => "matmul_nt",
            "..m k, ..m n -> k n" => "matmul_tn",
            _ => "einsum",
        }
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn plan_key(&self) -> Option<PlanKey> {
        match self.signature {
            Cow::Borrowed(text) => Some(PlanKey::of::<Einsum>(text)),
            Cow::Owned(_) => None,
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0], &[1]]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0, 1], outputs: &[] }
    }

    fn saved_for_backward_of(&self, needs_input_grad: &[bool]) -> SavedForBackward {
        SavedForBackward::for_product(needs_input_grad)
    }

    fn estimate_work(&self, tuples: usize, _: &[&Layout], _: &[Layout]) -> usize {
        tuples
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Leaves
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let mut out = local.output(0)?;
        let matrices = local.memoize(x, || BatchedMatrices::of(local.inference.labels(), x, &out));
        let copies = [matrices.left.copied(local.rank, x[0])?, matrices.right.copied(local.rank, x[1])?];
        let inputs = [matrices.left.read(x[0], &copies[0]), matrices.right.read(x[1], &copies[1])];
        if !matrices.multiply_accumulate(local, inputs.each_ref(), &mut out)? {
            matrices.out.write(local.rank, &mut out, |out| {
                launch_args(local.rank, &BATCHED_MATMUL, &inputs, &mut [out], &[])
            })?;
        }
        Ok([out].into_iter().collect())
    }

    fn forward_of_leaves(
        &self,
        local: &ForwardContext<'_>,
        x: &[&LocalTensor],
        cut: &LeafCut,
    ) -> Option<Result<LocalTensors>> {
        let sum = |mut out: LocalTensor| {
            let labels = local.inference.labels();
            let matrices = local.memoize(x, || LeafMatrices::of(labels, cut.label, x, &out));
            let Some(LeafMatrices { left, right, out: grouped, inner }) = &*matrices else { return Ok(None) };
            let copies = [left.copied(local.rank, x[0])?, right.copied(local.rank, x[1])?];
            let inputs = [left.read(x[0], &copies[0]), right.read(x[1], &copies[1])];
            grouped.write(local.rank, &mut out, |out| {
                launch_args(local.rank, &LEAF_MATMUL, &inputs, &mut [out], &cut.leaves.scalars(*inner))
            })?;
            Ok(Some([out].into_iter().collect()))
        };
        local.output(0).and_then(sum).transpose()
    }

    fn accumulates_in_place(&self) -> bool {
        true
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| {
            let (op, grad) = (self.transpose(i), cx.grad(0));
            let args = if i == 0 { [&grad, cx.input(1)] } else { [cx.input(0), &grad] };
            cx.cotangent(i, op, &args)
        })
    }
}

/// Products of all shapes that the models use.
pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let multiply = |x: &[usize], w: &[usize]| {
        Case::fixed_shape(Rc::new(product(x, w).expect("dims of the case")), vec![real(x), real(w)]).exact()
    };
    vec![
        Case::new(Rc::new(matmul()), vec![real(&[5, 7]), real(&[7, 4])]).exact(),
        Case::new(Rc::new(matmul()), vec![real(&[2, 3, 5]), real(&[5, 4])]).exact(),
        Case::new(Rc::new(matmul_nt()), vec![real(&[5, 7]), real(&[4, 7])]).exact(),
        Case::new(Rc::new(matmul_tn()), vec![real(&[5, 7]), real(&[5, 4])]).exact(),
        Case::new(Rc::new(Einsum::of("b m k, b k n -> b m n")), vec![real(&[3, 5, 7]), real(&[3, 7, 4])])
            .exact(),
        Case::new(
            Rc::new(Einsum::of("b t d, d p h c -> b t p h c")),
            vec![real(&[2, 3, 5]), real(&[5, 3, 2, 4])],
        )
        .exact(),
        Case::new(
            Rc::new(Einsum::of("b t h c, h c d -> b t d")),
            vec![real(&[2, 3, 2, 4]), real(&[2, 4, 5])],
        )
        .exact(),
        multiply(&[2, 3, 5], &[2, 5, 4]),
        multiply(&[3, 2, 5], &[2, 3, 5, 4]),
        multiply(&[3, 1, 2, 5], &[1, 2, 5, 3]),
        multiply(&[5], &[2, 5, 3]),
        multiply(&[3, 5], &[5]),
        multiply(&[5], &[5]),
        multiply(&[3, 0], &[0, 2]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_products_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
            let w = Tensor::from_host(rank, &[2, 3], &[1.0f64, 0.0, -1.0, 2.0, 1.0, 0.0])?;
            assert_eq!(x.matmul(&w).to_host::<f64>()?, [5.0, 2.0, -1.0, 11.0, 4.0, -3.0]);
            assert_eq!(x.einsum("a b, a b -> a", &x).to_host::<f64>()?, [5.0, 25.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn matches_batched_and_vector_products_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 1, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
            let w = Tensor::from_host(rank, &[2, 2, 1], &[1.0f64, 10.0, 100.0, 1000.0])?;
            assert_eq!(x.matmul(&w).to_host::<f64>()?, [21.0, 4300.0]);
            let v = Tensor::from_host(rank, &[2], &[1.0f64, -1.0])?;
            assert_eq!(v.matmul(&w).to_host::<f64>()?, [-9.0, -900.0]);
            assert_eq!(x.matmul(&v).to_host::<f64>()?, [-1.0, -1.0]);
            assert_eq!(v.matmul(&v).to_host::<f64>()?, [2.0]);
            let one = Tensor::from_host(rank, &[1, 1, 2], &[1.0f64, 1.0])?;
            assert_eq!(one.matmul(&w).to_host::<f64>()?, [11.0, 1100.0]);
            assert_eq!(one.matmul(&w).shape().as_slice(), [2, 1, 1]);
            Ok(())
        })
        .unwrap();
        assert!(product(&[], &[2]).is_err());
    }

    #[test]
    fn constant_transposes_are_those_of_their_text() {
        for [text, transposes @ ..] in TRANSPOSES {
            let (inputs, c) = text.split_once(" -> ").unwrap();
            let (a, b) = inputs.split_once(", ").unwrap();
            assert_eq!(transposes, [format!("{c}, {b} -> {a}"), format!("{a}, {c} -> {b}")]);
            for i in 0..2 {
                assert!(Einsum::of(text).transpose(i).plan_key().is_some(), "{text}");
            }
        }
    }

    #[test]
    fn contiguous_and_transposed_arguments_of_one_layout_are_distinguished() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
            let transposed = x.permute(&[1, 0]);
            for _ in 0..2 {
                assert_eq!(x.matmul(&x).to_host::<f64>()?, [7.0, 10.0, 15.0, 22.0]);
                assert_eq!(transposed.matmul(&x).to_host::<f64>()?, [10.0, 14.0, 14.0, 20.0]);
                assert_eq!(x.matmul(&transposed).to_host::<f64>()?, [5.0, 11.0, 11.0, 25.0]);
                assert_eq!(transposed.sum_dims(&[0]).to_host::<f64>()?, [3.0, 7.0]);
                assert_eq!(x.sum_dims(&[0]).to_host::<f64>()?, [4.0, 6.0]);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn signatures_that_are_no_contraction_are_refused() {
        for bad in ["a b -> a", "a a, a b -> b", "a b, c -> b c", "a, b -> c", "a!, a -> ", "a, b, c -> a"] {
            assert!(Einsum::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn invalid_signatures_are_refused_with_the_line() {
        for bad in [
            "b ..m k, k n -> b ..m n",
            "..m k, ..n k -> ..m ..n",
            "..m k, k m0 -> ..m m0",
            "a' b, b -> a'",
            "..m m, m -> ..m",
            ".., .. -> ..",
        ] {
            let error = World::run(Mesh::single(), |rank| {
                let x = Tensor::from_host(rank, &[2, 2], &[0.0f64; 4])?;
                let _ = x.einsum(bad, &x);
                Ok(())
            })
            .unwrap_err();
            assert_eq!(error.kind(), Kind::Shape, "{bad}: {error}");
            assert!(error.message().starts_with(&format!("einsum: `{bad}` is not a signature")), "{error}");
            assert!(error.site().is_some_and(|s| s.file().ends_with("einsum.rs")), "{error}");
            assert!(error.details().iter().any(|d| d.0 == "help"), "{error}");
        }
    }
}
