//! What elementwise ops of several arguments share: shapes are aligned at the last dim; an argument with fewer dims is
//! repeated along the leading dims, one with an extent of 1 along that dim.

use super::labels::{DIMS_MAX, letter};
use super::sum::Sum;
use crate::op::{DTypes, Fixed, Local, Op, Pieces, Vjp, common_float, unwind};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::reduce::SUM;
use shardgrad_kernels::{DType, Dims, Kernel, Scalar};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::rc::Rc;

/// Which argument is repeated, and along which dims. The number is how many dims the repeated one has.
#[derive(Clone, Debug)]
pub(super) enum Broadcast {
    /// Neither: the shapes are equal.
    Same,
    /// The second, along leading dims only: a bias, a table of positions.
    Second(usize),
    /// The first, along leading dims only.
    First(usize),
    /// Any of them, along any dims.
    Any(Rc<Any>),
}

/// Arguments of known shapes. A dim of extent 1 that is repeated is `1` in the signature: it is never split, and where
/// another argument is split there, this one is a copy on every rank, its cotangent pending.
#[derive(Debug)]
pub(super) struct Any {
    signature: String,
    shapes: Vec<Dims>,
}

const SAME: &str = "..m, ..m -> ..m";

const SECOND: [&str; 6] = [
    "..m,  -> ..m",
    "..m d, d -> ..m d",
    "..m d e, d e -> ..m d e",
    "..m d e f, d e f -> ..m d e f",
    "..m d e f g, d e f g -> ..m d e f g",
    "..m d e f g h, d e f g h -> ..m d e f g h",
];

const FIRST: [&str; 6] = [
    ", ..m -> ..m",
    "d, ..m d -> ..m d",
    "d e, ..m d e -> ..m d e",
    "d e f, ..m d e f -> ..m d e f",
    "d e f g, ..m d e f g -> ..m d e f g",
    "d e f g h, ..m d e f g h -> ..m d e f g h",
];

/// The label of a dim. Broadcasting sets no limit to their number.
fn label(d: usize) -> Cow<'static, str> {
    if d < DIMS_MAX { letter(d).into() } else { format!("d{d}").into() }
}

/// The shape that arguments of some shapes are repeated to. Extents that fit nowhere are left for the rule to refuse.
fn joined(shapes: &[&[usize]]) -> Dims {
    let ndim = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let extent = |d: usize| {
        let there = shapes.iter().filter_map(|s| s.get((d + s.len()).checked_sub(ndim)?).copied());
        there.fold(1, |joined, extent| if joined == 1 { extent } else { joined })
    };
    (0..ndim).map(extent).collect()
}

impl Broadcast {
    /// From the numbers of dims, of arguments without extents of 1 to repeat. A repeated argument has at most five dims.
    pub(super) fn of(first: usize, second: usize) -> Broadcast {
        match first.cmp(&second) {
            std::cmp::Ordering::Equal => Broadcast::Same,
            std::cmp::Ordering::Greater => Broadcast::Second(second),
            std::cmp::Ordering::Less => Broadcast::First(first),
        }
    }

    /// From the shapes of two arguments.
    pub(super) fn between(first: &[usize], second: &[usize]) -> Broadcast {
        let pairs = || first.iter().rev().zip(second.iter().rev());
        let repeats = pairs().any(|(a, b)| a != b && (*a == 1 || *b == 1));
        if repeats || first.len().min(second.len()) > 5 && first.len() != second.len() {
            return Broadcast::among(&[first, second]);
        }
        Broadcast::of(first.len(), second.len())
    }

    /// From the shapes of any number of arguments.
    pub(super) fn among(shapes: &[&[usize]]) -> Broadcast {
        let whole = joined(shapes);
        let labels = |shape: &[usize]| {
            let lead = whole.len() - shape.len();
            let word = |(d, &extent): (usize, &usize)| {
                if extent == 1 && whole[lead + d] != 1 { "1".into() } else { label(lead + d) }
            };
            shape.iter().enumerate().map(word).collect::<Vec<_>>().join(" ")
        };
        let inputs: Vec<String> = shapes.iter().map(|s| labels(s)).collect();
        let signature = format!("{} -> {}", inputs.join(", "), labels(&whole));
        Broadcast::Any(Rc::new(Any { signature, shapes: shapes.iter().map(|s| (*s).into()).collect() }))
    }

    /// The signature of the op.
    pub(super) fn signature(&self) -> &str {
        match self {
            Broadcast::Same => SAME,
            Broadcast::Second(n) => SECOND[(*n).min(5)],
            Broadcast::First(n) => FIRST[(*n).min(5)],
            Broadcast::Any(any) => &any.signature,
        }
    }

    /// What is fixed of an op with one of the signatures that stand above.
    pub(super) fn fixed<O: Op + 'static>(&self) -> Option<Fixed> {
        match self {
            Broadcast::Same => Some(Fixed::of::<O>(SAME)),
            Broadcast::Second(n) => Some(Fixed::of::<O>(SECOND[(*n).min(5)])),
            Broadcast::First(n) => Some(Fixed::of::<O>(FIRST[(*n).min(5)])),
            Broadcast::Any(_) => None,
        }
    }

    /// Runs a kernel on all arguments, each repeated by its strides to the shape of the result.
    pub(super) fn launch(
        local: &Local<'_>,
        kernel: &Kernel,
        x: &[&Piece],
        scalars: &[Scalar],
    ) -> Result<Pieces> {
        let mut made = Pieces::from_buf([local.output(0)?]);
        let out = &mut made[0];
        if x.iter().all(|p| p.view.is_shaped_as(&out.view)) {
            launch(local.rank, kernel, x, &mut [out], scalars)?;
            return Ok(made);
        }
        let spread = |p: &&Piece| {
            let view = p.view.broadcast(&out.view.shape);
            p.viewed(view.expect("the signature has matched the dims from the last on"))
        };
        let spread: Vec<Piece> = x.iter().map(spread).collect();
        launch(local.rank, kernel, &spread.iter().collect::<Vec<_>>(), &mut [out], scalars)?;
        Ok(made)
    }

    /// Whether argument `i` is repeated.
    fn repeats(&self, i: usize) -> bool {
        match self {
            Broadcast::Same => false,
            Broadcast::Second(_) => i == 1,
            Broadcast::First(_) => i == 0,
            Broadcast::Any(any) => {
                let shapes: SmallVec<[&[usize]; 3]> = any.shapes.iter().map(|s| &s[..]).collect();
                joined(&shapes) != any.shapes[i]
            }
        }
    }

    /// An operand of the terms whose sum is the cotangent of argument `i`: in the accumulator, so that 16-bit floats are rounded
    /// after the sum and not before it.
    pub(super) fn of_terms(&self, x: &Tensor, i: usize) -> Tensor {
        if !self.repeats(i) {
            return x.clone();
        }
        unwind(x.clone().converted(x.dtype().accumulator()))
    }

    /// The cotangent of argument `i` from its terms: summed over the dims along which the argument is repeated. In 16-bit floats a
    /// sum that is pending stays in the accumulator (see [`check_lawful`](crate::op::check_lawful)), otherwise it is rounded once.
    pub(super) fn reduced(&self, cx: &Vjp<'_>, terms: Tensor, i: usize) -> Tensor {
        self.sum(terms, i, cx.input_layouts[i].dtype())
    }

    fn sum(&self, terms: Tensor, i: usize, dtype: DType) -> Tensor {
        let (ndim, accumulator) = (terms.layout().ndim(), dtype.accumulator());
        let sum = match self {
            _ if !self.repeats(i) => return terms,
            Broadcast::Second(n) | Broadcast::First(n) if dtype == accumulator => {
                return Tensor::result(Sum::leading(ndim, ndim - n), &[&terms]);
            }
            Broadcast::Second(n) | Broadcast::First(n) => sum_to(&terms, &terms.shape()[ndim - n..]),
            Broadcast::Any(any) => sum_to(&terms, &any.shapes[i]),
            Broadcast::Same => return terms,
        };
        let is_complete = sum.layout().partial().is_empty();
        if is_complete { unwind(sum.converted(dtype)) } else { sum }
    }
}

/// The sum over the dims that a shape lacks or has an extent of 1 for, in the accumulator.
fn sum_to(terms: &Tensor, shape: &[usize]) -> Tensor {
    let whole = terms.shape();
    let lead = whole.len() - shape.len();
    let repeated = |d: usize| d < lead || shape[d - lead] == 1 && whole[d] != 1;
    let dims: Dims = (0..whole.len()).filter(|&d| repeated(d)).collect();
    let left = (lead..whole.len()).map(|d| if repeated(d) { "1".into() } else { label(d) });
    let [full, left] = [(0..whole.len()).map(label).collect::<Vec<_>>(), left.collect()].map(|t| t.join(" "));
    let signature = format!("{full} -> {left}");
    Tensor::result(Rc::new(SumTo { signature, dims }), &[terms])
}

/// `a b c -> 1 c`: the sum over some dims, of which leading ones disappear and others are left with an extent of 1. Any float; the
/// result is in the accumulator.
#[derive(Debug)]
struct SumTo {
    signature: String,
    dims: Dims,
}

impl Op for SumTo {
    fn name(&self) -> &'static str {
        "sum_to"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&[common_float(inputs)?.accumulator()]))
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let stay = (0..x[0].view.ndim()).filter(|d| !self.dims.contains(d));
        let order: Dims = stay.chain(self.dims.iter().copied()).collect();
        let turned = x[0].viewed(x[0].view.permute(&order));
        local.launch(&SUM, &[&turned], &[Scalar::Int(self.dims.len() as i64), Scalar::Real(1.0)])
    }
}

/// f(x, y) g elementwise, for a kernel of x, y and g: what the cotangent of an argument of a function of two arguments is
/// before it is summed. Linear in g.
#[derive(Debug)]
pub(super) struct PairBackward {
    kernel: &'static Kernel,
    shape: Broadcast,
}

impl PairBackward {
    /// In the shape of g, to which x and y are repeated.
    pub(super) fn of(kernel: &'static Kernel, x: &Tensor, y: &Tensor, g: &Tensor) -> Tensor {
        let shape = Broadcast::among(&[&x.shape(), &y.shape(), &g.shape()]);
        Tensor::result(Rc::new(PairBackward { kernel, shape }), &[x, y, g])
    }
}

impl Op for PairBackward {
    fn name(&self) -> &'static str {
        self.kernel.name
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[2]]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        Broadcast::launch(local, self.kernel, x, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_by_hand() {
        let between = |a: &[usize], b: &[usize]| Broadcast::between(a, b).signature().to_string();
        assert_eq!(between(&[5, 3], &[5, 3]), "..m, ..m -> ..m");
        assert_eq!(between(&[5, 3], &[3]), "..m d, d -> ..m d");
        assert_eq!(between(&[5, 1, 3], &[4, 1]), "a 1 c, b 1 -> a b c");
        assert_eq!(between(&[1, 1], &[1, 1]), "..m, ..m -> ..m");
        assert_eq!(between(&[1], &[2, 1]), "d, ..m d -> ..m d");
        assert_eq!(between(&[0, 3], &[1, 3]), "a b, 1 b -> a b");
        let three = Broadcast::among(&[&[3], &[2, 1], &[]]);
        assert_eq!(three.signature(), "b, a 1,  -> a b");
    }

    #[test]
    fn any_number_of_dims_is_repeated() {
        use crate::value::Value;
        use shardgrad_dist::{Mesh, World};
        let mesh = Mesh::parse("a=2").unwrap();
        World::run(mesh.clone(), |rank| {
            let shape = |at: usize| (0..14).map(|d| if d == at { 2 } else { 1 }).collect::<Dims>();
            let x = Tensor::from_host(rank, &shape(0), &[1.0f64, 2.0])?;
            let y = Tensor::from_host(rank, &shape(13), &[10.0f64, 20.0])?;
            for x in [
                x.clone(),
                x.to_layout_at(
                    &x.layout().with_state(shardgrad_dist::Axis(0), crate::state::State::Shard(0)),
                    std::panic::Location::caller(),
                )?,
            ] {
                let z = x.add(&y);
                assert_eq!(z.to_host::<f64>()?, [11.0, 21.0, 12.0, 22.0]);
                let dy = Broadcast::between(&x.shape(), &y.shape()).sum(z, 1, DType::F64);
                assert_eq!((dy.shape(), dy.to_host::<f64>()?), (y.shape(), vec![23.0, 43.0]));
            }
            Ok(())
        })
        .unwrap();
    }
}
