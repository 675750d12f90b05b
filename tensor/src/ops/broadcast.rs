//! Broadcasting of elementwise ops as in NumPy: shapes are aligned at the last dim; missing leading dims and dims of
//! extent 1 are repeated. And the sum over the repeated dims in their vjps.

use super::labels::{DIMS_MAX, dim_label};
use super::sum::Sum;
use crate::execution::context::Context;
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::op::{
    CanonicalForm, DTypes, ForwardContext, LocalTensors, Op, PlanKey, Vjp, common_float, unwind,
};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::reduce::SUM;
use shardgrad_kernels::{DType, Dims, Kernel, Scalar};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::rc::Rc;

/// Which argument of an op is broadcast, and along which dims; a number is how many dims the broadcast argument has.
#[derive(Clone, Debug)]
pub(super) enum Broadcast {
    /// Neither: the shapes are equal.
    Same,
    /// The second, along leading dims only: a bias, a table of position embeddings.
    Second(usize),
    /// The first, along leading dims only.
    First(usize),
    /// Any of them, along any dims.
    Any(Rc<Any>),
}

/// Arguments of known shapes, each of which may be broadcast along any dims.
///
/// A dim of extent 1 that is broadcast is `1` in the signature: it is never sharded. Where another argument is sharded
/// there, this one is replicated and its cotangent is partial.
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

/// The label of a dim; there is no limit to the number of dims.
fn label(d: usize) -> Cow<'static, str> {
    if d < DIMS_MAX { dim_label(d).into() } else { format!("d{d}").into() }
}

/// The shape that tensors of these shapes broadcast to. Extents that do not match are left for layout inference to refuse.
fn broadcast_shape(shapes: &[&[usize]]) -> Dims {
    let ndim = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let extent = |d: usize| {
        let there = shapes.iter().filter_map(|s| s.get((d + s.len()).checked_sub(ndim)?).copied());
        there.fold(1, |common, extent| if common == 1 { extent } else { common })
    };
    (0..ndim).map(extent).collect()
}

impl Broadcast {
    /// From the numbers of dims, where no dim of extent 1 is broadcast. A broadcast argument has at most five dims.
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
        let common = broadcast_shape(shapes);
        let labels = |shape: &[usize]| {
            let lead = common.len() - shape.len();
            let word = |(d, &extent): (usize, &usize)| {
                if extent == 1 && common[lead + d] != 1 { "1".into() } else { label(lead + d) }
            };
            shape.iter().enumerate().map(word).collect::<Vec<_>>().join(" ")
        };
        let inputs: Vec<String> = shapes.iter().map(|s| labels(s)).collect();
        let signature = format!("{} -> {}", inputs.join(", "), labels(&common));
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

    /// The plan-cache key of an op with one of the constant signatures above.
    pub(super) fn plan_key<O: 'static>(&self) -> Option<PlanKey> {
        match self {
            Broadcast::Same => Some(PlanKey::of::<O>(SAME)),
            Broadcast::Second(n) => Some(PlanKey::of::<O>(SECOND[(*n).min(5)])),
            Broadcast::First(n) => Some(PlanKey::of::<O>(FIRST[(*n).min(5)])),
            Broadcast::Any(_) => None,
        }
    }

    /// Runs a kernel on all arguments, each broadcast by its strides to the shape of the result.
    pub(super) fn launch(
        local: &ForwardContext<'_>,
        kernel: &Kernel,
        x: &[&LocalTensor],
        scalars: &[Scalar],
    ) -> Result<LocalTensors> {
        let mut outputs = LocalTensors::from_buf([local.output(0)?]);
        let out = &mut outputs[0];
        if x.iter().all(|p| p.view.is_shaped_as(&out.view)) {
            launch(local.rank, kernel, x, &mut [out], scalars)?;
            return Ok(outputs);
        }
        let expanded = |p: &&LocalTensor| {
            let view = p.view.broadcast(&out.view.shape);
            p.with_view(view.expect("the signature has matched the dims, aligned at the last"))
        };
        let expanded: Vec<LocalTensor> = x.iter().map(expanded).collect();
        launch(local.rank, kernel, &expanded.iter().collect::<Vec<_>>(), &mut [out], scalars)?;
        Ok(outputs)
    }

    /// Whether argument `i` is broadcast.
    fn is_broadcast(&self, i: usize) -> bool {
        match self {
            Broadcast::Same => false,
            Broadcast::Second(_) => i == 1,
            Broadcast::First(_) => i == 0,
            Broadcast::Any(any) => {
                let shapes: SmallVec<[&[usize]; 3]> = any.shapes.iter().map(|s| &s[..]).collect();
                broadcast_shape(&shapes) != any.shapes[i]
            }
        }
    }

    /// An operand of the terms whose sum is the cotangent of argument `i`: in the accumulator dtype if the argument is broadcast,
    /// so that 16-bit floats are rounded after the sum and not before it.
    pub(super) fn widen_if_broadcast(&self, x: &Tensor, i: usize) -> Tensor {
        if !self.is_broadcast(i) {
            return x.clone();
        }
        unwind(x.clone().into_dtype(x.dtype().accumulator()))
    }

    /// The cotangent of argument `i` from its terms: summed over the broadcast dims of the argument. In 16-bit floats a partial
    /// sum stays in the accumulator dtype (see
    /// [`check_cotangent_layouts`](crate::op::check_cotangent_layouts)), otherwise it is rounded once.
    pub(super) fn sum_to_argument(&self, cx: &Vjp<'_>, terms: Tensor, i: usize) -> Tensor {
        self.sum(terms, i, cx.input_layouts[i].dtype())
    }

    fn sum(&self, terms: Tensor, i: usize, dtype: DType) -> Tensor {
        let is_canonical = Context::of(terms.rank()).sum_tree().is_some();
        let (terms, accumulator) = match is_canonical && self.is_broadcast(i) {
            // Each leaf and node is rounded, since a rank's part of the sum is.
            true => (unwind(terms.into_dtype(dtype)), dtype),
            false => (terms, dtype.accumulator()),
        };
        let ndim = terms.layout().ndim();
        let sum = match self {
            _ if !self.is_broadcast(i) => return terms,
            Broadcast::Second(n) | Broadcast::First(n) if dtype == accumulator => {
                return Tensor::apply_one(Sum::leading(ndim, ndim - n), &[&terms]);
            }
            Broadcast::Second(n) | Broadcast::First(n) => sum_to(&terms, &terms.shape()[ndim - n..]),
            Broadcast::Any(any) => sum_to(&terms, &any.shapes[i]),
            Broadcast::Same => return terms,
        };
        let is_complete = sum.layout().partial().is_empty();
        if is_complete { unwind(sum.into_dtype(dtype)) } else { sum }
    }
}

/// The sum over the dims that a shape lacks or has with extent 1 (`sum_to_size`), in the accumulator dtype.
fn sum_to(terms: &Tensor, shape: &[usize]) -> Tensor {
    let terms_shape = terms.shape();
    let lead = terms_shape.len() - shape.len();
    let repeated = |d: usize| d < lead || shape[d - lead] == 1 && terms_shape[d] != 1;
    let dims: Dims = (0..terms_shape.len()).filter(|&d| repeated(d)).collect();
    let left = (lead..terms_shape.len()).map(|d| if repeated(d) { "1".into() } else { label(d) });
    let [full, left] =
        [(0..terms_shape.len()).map(label).collect::<Vec<_>>(), left.collect()].map(|t| t.join(" "));
    let signature = format!("{full} -> {left}");
    Tensor::apply_one(SumTo { signature, dims }, &[terms])
}

/// Sum over some dims: `a b c -> 1 c`. Leading summed dims disappear, others keep extent 1. Any float dtype; the result is in the
/// accumulator dtype.
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

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Leaves
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let remaining = (0..x[0].view.ndim()).filter(|d| !self.dims.contains(d));
        let order: Dims = remaining.chain(self.dims.iter().copied()).collect();
        let reduced_last = x[0].with_view(x[0].view.permute(&order));
        local.launch(&SUM, &[&reduced_last], &[Scalar::Int(self.dims.len() as i64), Scalar::Real(1.0)])
    }
}

/// Backward of an elementwise function of two arguments by a kernel of x, y and g: f(x, y) g, before the sum over broadcast
/// dims. Linear in g.
#[derive(Debug)]
pub(super) struct BinaryBackward {
    kernel: &'static Kernel,
    shape: Broadcast,
}

impl BinaryBackward {
    /// The terms in the shape of g, to which x and y broadcast.
    pub(super) fn of(kernel: &'static Kernel, x: &Tensor, y: &Tensor, g: &Tensor) -> Tensor {
        let shape = Broadcast::among(&[&x.shape(), &y.shape(), &g.shape()]);
        Tensor::apply_one(BinaryBackward { kernel, shape }, &[x, y, g])
    }
}

impl Op for BinaryBackward {
    fn name(&self) -> &'static str {
        self.kernel.name
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[2]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Broadcast::launch(local, self.kernel, x, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_match_hand_written_ones() {
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
    fn fourteen_dims_broadcast() {
        use crate::methods::value::Value;
        use shardgrad_dist::{Mesh, World};
        let mesh = Mesh::parse("a=2").unwrap();
        World::run(mesh.clone(), |rank| {
            let shape = |at: usize| (0..14).map(|d| if d == at { 2 } else { 1 }).collect::<Dims>();
            let x = Tensor::from_host(rank, &shape(0), &[1.0f64, 2.0])?;
            let y = Tensor::from_host(rank, &shape(13), &[10.0f64, 20.0])?;
            for x in [
                x.clone(),
                x.to_layout_at(
                    &x.layout().with_placement(
                        shardgrad_dist::Axis(0),
                        crate::layout::placement::Placement::Shard(0),
                    ),
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
