//! c = sum over the labels that the output lacks of a * b: every product of two tensors of labels.
//!
//! matmul, its transposed forms and batched products are all this op with another signature. Its vjp is the
//! same op twice: for `A, B -> C`, da = `C, B -> A` and db = `A, C -> B`.

use super::labels::misuse;
use super::{Case, Input};
use crate::layout::Layout;
use crate::op::{Cotangents, Keeps, Local, Op, Pieces, Vjp};
use crate::piece::{Piece, View, launch_lent, read, written};
use crate::signature::{Labels, Mark, Signature, Term};
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::batched_matmul::BATCHED_MATMUL;
use shardgrad_kernels::op::linear::PRODUCT_ADD;
use shardgrad_kernels::{Arg, ArgMut, Dims, Strides};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::rc::Rc;

/// A product of two tensors by an index signature such as `..m k, k n -> ..m n`.
///
/// Every label of one argument stands in the output or in the other argument; no label stands twice in one tensor. `1` is
/// no label but a dim of extent 1. Arguments and result: one float dtype, sums in f32 for the 16-bit floats.
#[derive(Debug)]
pub struct Einsum {
    signature: Cow<'static, str>,
}

impl Einsum {
    /// The product of a signature with two arguments and one output.
    ///
    /// # Errors
    /// `Kind::Shape` when the text is not of that form, or is no [`Signature`] at all.
    pub fn new(signature: &str) -> Result<Einsum> {
        let read = Signature::read(signature).map_err(|e| {
            Error::new(e.kind(), format!("einsum: {}", e.message())).detail(
                "help",
                "labels are words apart by blanks, as in `b t d, d h -> b t h`; `..m` leads its tensor",
            )
        })?;
        let refuse = |why: &str| Err(Error::new(Kind::Shape, format!("einsum: `{signature}` {why}")));
        let ([a, b], [c]) = (read.inputs(), read.outputs()) else {
            return refuse("is not of the form `a b, b c -> a c`");
        };
        if [a, b, c].into_iter().flatten().any(|x| matches!(x.mark, Mark::Whole | Mark::Indexed)) {
            return refuse("is not of the form `a b, b c -> a c`");
        }
        // Without marks a term is its label.
        let lacks =
            |others: [&[Term]; 2], x: &Term| x.mark != Mark::One && !others.iter().any(|t| t.contains(x));
        if a.iter().any(|x| lacks([b, c], x)) || b.iter().any(|x| lacks([a, c], x)) {
            return refuse("has a label that stands in one argument only; sum it before, or use contract");
        }
        if c.iter().any(|x| lacks([a, b], x)) {
            return refuse("has an output label that no argument has");
        }
        Ok(Einsum { signature: signature.to_string().into() })
    }

    /// The same product, for signatures written in this library.
    pub(super) fn of(signature: impl Into<Cow<'static, str>>) -> Rc<dyn Op> {
        Rc::new(Einsum { signature: signature.into() })
    }

    /// The product that gives the cotangent of argument `i`: that of the output stands in the place of the argument.
    fn transposed(&self, i: usize) -> Rc<dyn Op> {
        let (inputs, c) = self.signature.split_once("->").expect("checked when the op was made");
        let (a, b) = inputs.split_once(',').expect("checked when the op was made");
        match (&*self.signature, i) {
            // As below, by names that are usual.
            (MATMUL, 0) => matmul_nt(),
            (MATMUL, _) => matmul_tn(),
            (_, 0) => Einsum::of(format!("{c}, {b} -> {a}")),
            _ => Einsum::of(format!("{a}, {c} -> {b}")),
        }
    }
}

const MATMUL: &str = "..m k, k n -> ..m n";

/// A dim of extent 1 that belongs to no group.
const ONE: &str = "1";

/// x w for any numbers of dims: `[.., m, k] x [.., k, n] -> [.., m, n]`, with leading dims matched from the right, repeated
/// where one is missing or has extent 1. One dim alone is k.
///
/// # Errors
/// Of kind `Kind::Shape` if an argument has no dim. Extents that do not match are found when the op is applied.
pub fn product(x: &[usize], w: &[usize]) -> Result<Rc<dyn Op>> {
    let (x, w) = match (x.len(), w.len()) {
        (0, _) | (_, 0) => return misuse("matmul: a scalar has no dim to sum over; multiply elementwise"),
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

/// `..m k, k n -> ..m n`: x w.
#[must_use]
pub fn matmul() -> Rc<dyn Op> {
    Einsum::of(MATMUL)
}

/// `..m n, k n -> ..m k`: x w^T (a tied output head).
#[must_use]
pub fn matmul_nt() -> Rc<dyn Op> {
    Einsum::of("..m n, k n -> ..m k")
}

/// `..m k, ..m n -> k n`: x^T y over all leading dims.
#[must_use]
pub fn matmul_tn() -> Rc<dyn Op> {
    Einsum::of("..m k, ..m n -> k n")
}

/// How the tensors of a product are stacks of matrices. It depends on labels, and on how the arguments lie.
struct Stacks {
    left: Seen,
    right: Seen,
    out: Seen,
    /// The output as row-major matrices, if it lies so, and whether they are the turned ones.
    ended: Option<(View, bool)>,
}

/// Of a stack of matrices, those of the turned ones.
const TURN: [usize; 3] = [0, 2, 1];

/// Three groups of labels in order, seen as three dims.
enum Seen {
    /// In the memory as it is.
    Here(View),
    /// In a row-major copy of a view, where the strides allow no other way.
    Copied { from: View, copy: View },
}

impl Seen {
    fn of(view: &Strides, labels: &[u8], groups: [&[u8]; 3]) -> Seen {
        let (order, shape) = order_and_shape(view, labels, groups);
        let from = view.permute(&order);
        match from.reshape(&shape) {
            Some(view) => Seen::Here(view.into()),
            None => Seen::Copied { from: from.into(), copy: Strides::contiguous(&shape).into() },
        }
    }

    /// A copy of an operand, if there must be one.
    fn copied(&self, rank: &Rank, x: &Piece) -> Result<Option<Piece>> {
        match self {
            Seen::Here(_) => Ok(None),
            Seen::Copied { from, copy } => {
                Ok(Some(x.viewed(from.clone()).converted(rank, x.dtype)?.viewed(copy.clone())))
            }
        }
    }

    /// An operand, in its copy if it has one.
    fn read<'a>(&'a self, x: &'a Piece, copy: &'a Option<Piece>) -> Arg<'a> {
        match (self, copy) {
            (Seen::Here(view), _) => Arg { buffer: &x.buffer, dtype: x.dtype, view },
            (Seen::Copied { .. }, copy) => read(&copy.as_ref().expect("made above")),
        }
    }

    /// As row-major matrices, and whether they are the turned ones.
    fn row_major(&self) -> Option<(View, bool)> {
        let Seen::Here(view) = self else { return None };
        let turned = view.permute(&TURN);
        match (view.is_contiguous(), turned.is_contiguous()) {
            (true, _) => Some((view.clone(), false)),
            (false, true) => Some((turned.into(), true)),
            (false, false) => None,
        }
    }

    /// Lets `f` write an output, through a copy if it must be.
    fn write(&self, rank: &Rank, out: &mut Piece, f: impl FnOnce(ArgMut<'_>) -> Result<()>) -> Result<()> {
        match self {
            Seen::Here(view) => f(ArgMut { buffer: &mut out.buffer, dtype: out.dtype, view }),
            Seen::Copied { from, copy } => {
                let mut grouped = Piece::under(rank, out.dtype, copy.clone())?;
                f(written(&mut grouped))?;
                out.write(rank, from.clone(), &grouped.viewed(Strides::contiguous(&from.shape)))
            }
        }
    }
}

impl Stacks {
    fn of(labels: &Labels, x: &[&Piece], out: &Piece) -> Stacks {
        let [a, b, c] = [&labels.inputs()[0], &labels.inputs()[1], &labels.outputs()[0]];
        let group = |of: &[u8], has: [(&[u8], bool); 2]| -> SmallVec<[u8; 8]> {
            let is_in = |label: &u8| has.iter().all(|(tensor, has)| tensor.contains(label) == *has);
            of.iter().copied().filter(|label| *label != Labels::ONE && is_in(label)).collect()
        };
        let batch = group(c, [(a, true), (b, true)]);
        let m = group(c, [(a, true), (b, false)]);
        let n = group(c, [(a, false), (b, true)]);
        let k = group(a, [(b, true), (c, false)]);
        let out = Seen::of(&out.view, c, [&batch, &m, &n]);
        Stacks {
            left: Seen::of(&x[0].view, a, [&batch, &m, &k]),
            right: Seen::of(&x[1].view, b, [&batch, &k, &n]),
            ended: out.row_major(),
            out,
        }
    }

    /// The product added to what the output may be added to; false, and nothing is done, if there is none, or the output lies as no
    /// kernel ends it. The turned matrices are the product of the turned ones, with the same sums.
    fn add(&self, local: &Local<'_>, [a, b]: [&Arg<'_>; 2], out: &mut Piece) -> Result<bool> {
        let Some((view, turned)) = &self.ended else { return Ok(false) };
        let Some(sum) = local.take_sum(0) else { return Ok(false) };
        let r = sum.viewed(Strides::contiguous(&view.shape).at(sum.view.offset));
        let views = [a, b].map(|x| if *turned { x.view.permute(&TURN) } else { x.view.clone() });
        let [a, b] = [(a, &views[0]), (b, &views[1])].map(|(x, view)| Arg { view, ..*x });
        let factors = if *turned { [b, a] } else { [a, b] };
        let inputs = [factors[0], factors[1], read(&&r)];
        let out = ArgMut { buffer: &mut out.buffer, dtype: out.dtype, view };
        launch_lent(local.rank, &PRODUCT_ADD, &inputs, &mut [out], &[])?;
        Ok(true)
    }
}

/// The dims of a view in the order of the groups, dims of extent 1 without a label left out, and how many elements a group has.
fn order_and_shape(view: &Strides, labels: &[u8], groups: [&[u8]; 3]) -> (Dims, [usize; 3]) {
    let dim = |label: &u8| labels.iter().position(|l| l == label).expect("a group is taken from the labels");
    let order = groups.iter().flat_map(|group| group.iter().map(dim)).collect();
    (order, groups.map(|group| group.iter().map(|label| view.shape[dim(label)]).product()))
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

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0], &[1]]
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1], outputs: &[] }
    }

    fn keeps_for(&self, wanted: &[bool]) -> Keeps {
        Keeps::of_product(wanted)
    }

    fn volume(&self, tuples: usize, _: &[&Layout], _: &[Layout]) -> usize {
        tuples
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let mut out = local.output(0)?;
        let stacks = local.noted(x, || Stacks::of(local.inference.labels(), x, &out));
        let copies = [stacks.left.copied(local.rank, x[0])?, stacks.right.copied(local.rank, x[1])?];
        let inputs = [stacks.left.read(x[0], &copies[0]), stacks.right.read(x[1], &copies[1])];
        if !stacks.add(local, inputs.each_ref(), &mut out)? {
            stacks.out.write(local.rank, &mut out, |out| {
                launch_lent(local.rank, &BATCHED_MATMUL, &inputs, &mut [out], &[])
            })?;
        }
        Ok([out].into_iter().collect())
    }

    fn takes_sums(&self) -> bool {
        true
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| {
            let (op, grad) = (self.transposed(i), cx.grad(0));
            let args = if i == 0 { [&grad, cx.input(1)] } else { [cx.input(0), &grad] };
            Tensor::apply_onto(op, &args, cx.goal(i), cx.sum(i))
        })
    }
}

/// Products of every shape that the models use.
pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    let multiply = |x: &[usize], w: &[usize]| {
        Case::fixed(product(x, w).expect("dims of the case"), vec![real(x), real(w)]).exact()
    };
    vec![
        Case::new(matmul(), vec![real(&[5, 7]), real(&[7, 4])]).exact(),
        Case::new(matmul(), vec![real(&[2, 3, 5]), real(&[5, 4])]).exact(),
        Case::new(matmul_nt(), vec![real(&[5, 7]), real(&[4, 7])]).exact(),
        Case::new(matmul_tn(), vec![real(&[5, 7]), real(&[5, 4])]).exact(),
        Case::new(Einsum::of("b m k, b k n -> b m n"), vec![real(&[3, 5, 7]), real(&[3, 7, 4])]).exact(),
        Case::new(Einsum::of("b t d, d p h c -> b t p h c"), vec![real(&[2, 3, 5]), real(&[5, 3, 2, 4])])
            .exact(),
        Case::new(Einsum::of("b t h c, h c d -> b t d"), vec![real(&[2, 3, 2, 4]), real(&[2, 4, 5])]).exact(),
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
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn a_product_by_hand() {
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
    fn batches_and_vectors_by_hand() {
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
    fn arguments_of_one_layout_may_lie_in_two_ways() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
            let turned = x.permute(&[1, 0]);
            for _ in 0..2 {
                assert_eq!(x.matmul(&x).to_host::<f64>()?, [7.0, 10.0, 15.0, 22.0]);
                assert_eq!(turned.matmul(&x).to_host::<f64>()?, [10.0, 14.0, 14.0, 20.0]);
                assert_eq!(x.matmul(&turned).to_host::<f64>()?, [5.0, 11.0, 11.0, 25.0]);
                assert_eq!(turned.sum_dims(&[0]).to_host::<f64>()?, [3.0, 7.0]);
                assert_eq!(x.sum_dims(&[0]).to_host::<f64>()?, [4.0, 6.0]);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_signature_that_is_no_product_is_refused() {
        for bad in ["a b -> a", "a a, a b -> b", "a b, c -> b c", "a, b -> c", "a!, a -> ", "a, b, c -> a"] {
            assert!(Einsum::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_text_that_is_no_signature_is_refused_with_the_line() {
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
            assert!(error.message().starts_with(&format!("einsum: `{bad}` is no signature")), "{error}");
            assert!(error.site().is_some_and(|s| s.file().ends_with("einsum.rs")), "{error}");
            assert!(error.details().iter().any(|d| d.0 == "help"), "{error}");
        }
    }
}
