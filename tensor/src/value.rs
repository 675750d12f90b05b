//! The methods that users see, written once for plain tensors and for recorded variables.

use crate::layout::Layout;
use crate::op::{Op, unwind};
use crate::ops::add::Add;
use crate::ops::add_scalar::AddScalar;
use crate::ops::attention::{Attention, Mask};
use crate::ops::cast::Cast;
use crate::ops::concat::Concat;
use crate::ops::cross_entropy_terms::CrossEntropyTerms;
use crate::ops::div::Div;
use crate::ops::dropout::Dropout;
use crate::ops::einsum;
use crate::ops::embedding::Embedding;
use crate::ops::exp::Exp;
use crate::ops::gelu::Gelu;
use crate::ops::layer_norm::LayerNorm;
use crate::ops::linear::Linear;
use crate::ops::log::Log;
use crate::ops::max_last::MaxLast;
use crate::ops::mlp::Mlp;
use crate::ops::mul::Mul;
use crate::ops::neg::Neg;
use crate::ops::permute::Permute;
use crate::ops::reciprocal::Reciprocal;
use crate::ops::relu::Relu;
use crate::ops::reshape::Reshape;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::rope::Rope;
use crate::ops::scale::Scale;
use crate::ops::silu::Silu;
use crate::ops::slice::{Pad, Slice};
use crate::ops::softmax::Softmax;
use crate::ops::sqrt::Sqrt;
use crate::ops::square::Square;
use crate::ops::sub::Sub;
use crate::ops::sum::{Expand, Sum};
use crate::ops::sum_squares::SumSquares;
use crate::ops::swiglu::SwiGlu;
use crate::ops::tanh::Tanh;
use crate::ops::unbind::{Stack, Unbind};
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank};
use shardgrad_kernels::{DType, Dims};
use smallvec::SmallVec;
use std::ops::Range;
use std::rc::Rc;

/// A tensor in the eyes of model code. Misuse unwinds with the [`Error`] that names op, layouts and line.
pub trait Value: Clone {
    /// The plain tensor behind the value.
    fn tensor(&self) -> &Tensor;

    /// Applies an op; gives its visible outputs.
    #[track_caller]
    fn apply(op: Rc<dyn Op>, args: &[&Self]) -> SmallVec<[Self; 2]>;

    /// How the value lies on the mesh.
    fn layout(&self) -> &Layout {
        self.tensor().layout()
    }

    /// The rank that holds this piece of the value.
    fn rank(&self) -> &Rank {
        self.tensor().rank()
    }

    /// The global shape.
    fn shape(&self) -> Dims {
        self.tensor().shape()
    }

    /// The dtype.
    fn dtype(&self) -> DType {
        self.tensor().dtype()
    }

    /// Applies an op with one visible output.
    #[track_caller]
    fn apply_one(op: Rc<dyn Op>, args: &[&Self]) -> Self {
        Self::apply(op, args).swap_remove(0)
    }

    /// Applies an op with one visible output that was made for this call: plain tensors need no handle of it.
    #[track_caller]
    fn apply_new<O: Op + 'static>(op: O, args: &[&Self]) -> Self {
        Self::apply_one(Rc::new(op), args)
    }

    /// x w over the last dim of x and the last but one of w: `[.., m, k] x [.., k, n] -> [.., m, n]`. Leading dims are
    /// matched from the right; one that is missing or has extent 1 is repeated. A vector is `[k]` on either side.
    #[track_caller]
    #[must_use]
    fn matmul(&self, w: &Self) -> Self {
        Self::apply_one(unwind(einsum::product(self.layout().extents(), w.layout().extents())), &[self, w])
    }

    /// x w^T: `[..m, n] x [k, n] -> [..m, k]`.
    #[track_caller]
    #[must_use]
    fn matmul_nt(&self, w: &Self) -> Self {
        Self::apply_one(einsum::matmul_nt(), &[self, w])
    }

    /// x w + b in one pass: `[..m, k] x [k, n] + [n] -> [..m, n]`. k must be whole; else multiply and add.
    #[track_caller]
    #[must_use]
    fn linear(&self, w: &Self, b: &Self) -> Self {
        Self::apply_new(Linear::new(1, 1), &[self, w, b])
    }

    /// gelu(x w1 + b1) w2 (+ b2), GELU in its tanh form: `[..m, d]`, `[d, h]`, `[h]`, `[h, e]` (and `[e]`) give `[..m, e]`. d and e
    /// must be whole, and with b2 so must h; without it the result is pending where h is split.
    #[track_caller]
    #[must_use]
    fn mlp(&self, w1: &Self, b1: &Self, w2: &Self, b2: Option<&Self>) -> Self {
        let op = Rc::new(Mlp { has_last_bias: b2.is_some(), has_residual: false });
        match b2 {
            None => Self::apply_one(op, &[self, w1, b1, w2]),
            Some(b2) => Self::apply_one(op, &[self, w1, b1, w2, b2]),
        }
    }

    /// The product of two tensors by an index signature, such as `b t d, d h c -> b t h c`.
    #[track_caller]
    #[must_use]
    fn einsum(&self, signature: &str, other: &Self) -> Self {
        Self::apply_new(unwind(einsum::Einsum::new(signature)), &[self, other])
    }

    /// x + y; missing dims and extents of 1 are repeated, shapes aligned at the last dim.
    #[track_caller]
    #[must_use]
    fn add(&self, other: &Self) -> Self {
        Self::apply_new(Add::between(self.layout().extents(), other.layout().extents()), &[self, other])
    }

    /// x - y; missing dims and extents of 1 are repeated, shapes aligned at the last dim.
    #[track_caller]
    #[must_use]
    fn sub(&self, other: &Self) -> Self {
        Self::apply_new(Sub::between(self.layout().extents(), other.layout().extents()), &[self, other])
    }

    /// x y elementwise; missing dims and extents of 1 are repeated, shapes aligned at the last dim.
    #[track_caller]
    #[must_use]
    fn mul(&self, other: &Self) -> Self {
        Self::apply_new(Mul::between(self.layout().extents(), other.layout().extents()), &[self, other])
    }

    /// x / y; missing dims and extents of 1 are repeated, shapes aligned at the last dim.
    #[track_caller]
    #[must_use]
    fn div(&self, other: &Self) -> Self {
        Self::apply_new(Div::between(self.layout().extents(), other.layout().extents()), &[self, other])
    }

    /// c x for a number c.
    #[track_caller]
    #[must_use]
    fn scale(&self, factor: f64) -> Self {
        Self::apply_new(Scale { factor }, &[self])
    }

    /// x + c for a number c. A pending sum is completed.
    #[track_caller]
    #[must_use]
    fn add_scalar(&self, term: f64) -> Self {
        Self::apply_new(AddScalar { term }, &[self])
    }

    /// -x.
    #[track_caller]
    #[must_use]
    fn neg(&self) -> Self {
        Self::apply_new(Neg, &[self])
    }

    /// exp(x).
    #[track_caller]
    #[must_use]
    fn exp(&self) -> Self {
        Self::apply_new(Exp, &[self])
    }

    /// ln(x).
    #[track_caller]
    #[must_use]
    fn log(&self) -> Self {
        Self::apply_new(Log, &[self])
    }

    /// The square root of x.
    #[track_caller]
    #[must_use]
    fn sqrt(&self) -> Self {
        Self::apply_new(Sqrt, &[self])
    }

    /// x^2.
    #[track_caller]
    #[must_use]
    fn square(&self) -> Self {
        Self::apply_new(Square, &[self])
    }

    /// 1 / x.
    #[track_caller]
    #[must_use]
    fn reciprocal(&self) -> Self {
        Self::apply_new(Reciprocal, &[self])
    }

    /// tanh(x).
    #[track_caller]
    #[must_use]
    fn tanh(&self) -> Self {
        Self::apply_new(Tanh, &[self])
    }

    /// max(x, 0).
    #[track_caller]
    #[must_use]
    fn relu(&self) -> Self {
        Self::apply_new(Relu, &[self])
    }

    /// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
    #[track_caller]
    #[must_use]
    fn gelu(&self) -> Self {
        Self::apply_new(Gelu, &[self])
    }

    /// x / (1 + exp(-x)).
    #[track_caller]
    #[must_use]
    fn silu(&self) -> Self {
        Self::apply_new(Silu, &[self])
    }

    /// silu(x) u elementwise, with silu(x) = x / (1 + exp(-x)).
    #[track_caller]
    #[must_use]
    fn swiglu(&self, u: &Self) -> Self {
        Self::apply_new(SwiGlu, &[self, u])
    }

    /// The sum of all elements, a scalar.
    #[track_caller]
    #[must_use]
    fn sum(&self) -> Self {
        let dims: Dims = (0..self.layout().ndim()).collect();
        self.sum_dims(&dims)
    }

    /// The mean of all elements, a scalar.
    #[track_caller]
    #[must_use]
    fn mean(&self) -> Self {
        let dims: Dims = (0..self.layout().ndim()).collect();
        self.mean_dims(&dims)
    }

    /// The sum over some dims, which disappear.
    #[track_caller]
    #[must_use]
    fn sum_dims(&self, dims: &[usize]) -> Self {
        Self::apply_one(unwind(Sum::over(self.layout().ndim(), dims, false)), &[self])
    }

    /// The mean over some dims, which disappear.
    #[track_caller]
    #[must_use]
    fn mean_dims(&self, dims: &[usize]) -> Self {
        Self::apply_one(unwind(Sum::over(self.layout().ndim(), dims, true)), &[self])
    }

    /// The sum of all squares in f64, a scalar without gradient.
    #[track_caller]
    #[must_use]
    fn sum_squares(&self) -> Self {
        Self::apply_new(SumSquares, &[self])
    }

    /// The largest element along the last dim, in the accumulator dtype, without gradient.
    #[track_caller]
    #[must_use]
    fn max_last(&self) -> Self {
        Self::apply_new(MaxLast, &[self])
    }

    /// x repeated `extent` times along a new dim, counted in the result.
    #[track_caller]
    #[must_use]
    fn expand(&self, dim: usize, extent: usize) -> Self {
        let mut shape = self.shape();
        shape.insert(dim.min(shape.len()), extent);
        Self::apply_one(unwind(Expand::to(&shape, &[dim])), &[self])
    }

    /// x in another dtype.
    #[track_caller]
    #[must_use]
    fn cast(&self, dtype: DType) -> Self {
        if self.dtype() == dtype {
            return self.clone();
        }
        Self::apply_one(Cast::of(self.dtype(), dtype), &[self])
    }

    /// The same elements in row-major order under another (global) shape.
    #[track_caller]
    #[must_use]
    fn reshape(&self, shape: &[usize]) -> Self {
        Self::apply_one(unwind(Reshape::to(&self.shape(), shape)), &[self])
    }

    /// The dims in another order: dim i of the result is dim `order[i]` of x.
    #[track_caller]
    #[must_use]
    fn permute(&self, order: &[usize]) -> Self {
        Self::apply_one(unwind(Permute::by(self.layout().ndim(), order)), &[self])
    }

    /// Two dims exchanged.
    #[track_caller]
    #[must_use]
    fn transpose(&self, first: usize, second: usize) -> Self {
        let (ndim, most) = (self.layout().ndim(), first.max(second));
        if most >= ndim {
            let text = format!("transpose: there is no dim {most} among {ndim}");
            unwind(Err::<(), _>(Error::new(Kind::Shape, text).detail("help", "dims are counted from 0")));
        }
        let mut order: Dims = (0..ndim).collect();
        order.swap(first, second);
        self.permute(&order)
    }

    /// The slices along a dim, which disappears.
    #[track_caller]
    #[must_use]
    fn unbind(&self, dim: usize) -> SmallVec<[Self; 2]> {
        let count = self.shape().get(dim).copied().unwrap_or(1);
        Self::apply(unwind(Unbind::along(self.layout().ndim(), dim, count)), &[self])
    }

    /// Tensors of one shape side by side along a new dim, counted in the result.
    ///
    /// # Panics
    /// If there is no tensor.
    #[track_caller]
    #[must_use]
    fn stack(parts: &[&Self], dim: usize) -> Self {
        let ndim = parts.first().expect("a stack of at least one tensor").layout().ndim();
        Self::apply_one(unwind(Stack::along(ndim, dim, parts.len())), parts)
    }

    /// Tensors one after another along a dim that no axis splits.
    ///
    /// # Panics
    /// If there is no tensor.
    #[track_caller]
    #[must_use]
    fn concat(parts: &[&Self], dim: usize) -> Self {
        let ndim = parts.first().expect("at least one tensor is joined").layout().ndim();
        Self::apply_one(unwind(Concat::along(ndim, dim, parts.len())), parts)
    }

    /// A range of a dim that no axis splits.
    #[track_caller]
    #[must_use]
    fn slice(&self, dim: usize, range: Range<usize>) -> Self {
        let extent = self.shape().get(dim).copied().unwrap_or(0);
        Self::apply_one(unwind(Slice::along(self.layout().ndim(), extent, dim, range)), &[self])
    }

    /// One element of a dim that no axis splits; the dim disappears.
    #[track_caller]
    #[must_use]
    fn select(&self, dim: usize, index: usize) -> Self {
        let mut shape = self.shape();
        let slice = self.slice(dim, index..index + 1);
        shape.remove(dim);
        slice.reshape(&shape)
    }

    /// Zeros before and behind the elements of a dim that no axis splits.
    #[track_caller]
    #[must_use]
    fn pad(&self, dim: usize, before: usize, after: usize) -> Self {
        Self::apply_one(unwind(Pad::along(self.layout().ndim(), dim, before, after, 0.0)), &[self])
    }

    /// exp(x_i) / sum_j exp(x_j) over the last dim.
    #[track_caller]
    #[must_use]
    fn softmax(&self) -> Self {
        Self::apply_new(Softmax, &[self])
    }

    /// (x - mean) / sqrt(var + eps) w + b over the last dim.
    #[track_caller]
    #[must_use]
    fn layer_norm(&self, w: &Self, b: &Self, eps: f64) -> Self {
        Self::apply_new(LayerNorm { eps, has_residual: false }, &[self, w, b])
    }

    /// x / sqrt(mean(x^2) + eps) w over the last dim.
    #[track_caller]
    #[must_use]
    fn rms_norm(&self, w: &Self, eps: f64) -> Self {
        Self::apply_new(RmsNorm { eps, has_residual: false }, &[self, w])
    }

    /// Rotary positions on `[b, t, .., c]`: channels i and i + c/2 turned by (first + index along t) `frequencies[i]`.
    #[track_caller]
    #[must_use]
    fn rope(&self, frequencies: &Rc<[f64]>, first: usize) -> Self {
        Self::apply_one(unwind(Rope::of(&self.shape(), frequencies.clone(), first)), &[self])
    }

    /// Rows of this table, `[v, d]`, by index (i64, any shape): `[.., d]`.
    #[track_caller]
    #[must_use]
    fn embedding(&self, index: &Self) -> Self {
        Self::apply_new(Embedding, &[self, index])
    }

    /// Scaled dot-product attention of queries `[b, t, h, c]` on keys and values `[b, s, h, c]`; or of grouped queries
    /// `[b, t, g, r, c]` on `[b, s, g, c]`. If causal, the last query sees all keys and each one before it one less.
    #[track_caller]
    #[must_use]
    fn attention(&self, k: &Self, v: &Self, causal: bool) -> Self {
        let mask = if causal { Mask::Causal } else { Mask::None };
        Self::apply_one(Attention::of(self.layout().ndim(), mask), &[self, k, v])
    }

    /// Causal [`Value::attention`] in which a query sees the last `keys` keys, its own included, and none before them; all of
    /// them if there are no more.
    /// Beltagy, Peters and Cohan, arXiv 2004.05150.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a window of 0 keys.
    #[track_caller]
    #[must_use]
    fn window_attention(&self, k: &Self, v: &Self, keys: usize) -> Self {
        if keys == 0 {
            let error = Error::new(Kind::Config, "attention: a window of 0 keys shows a query nothing");
            error.detail("help", "give 1 key or more").at(std::panic::Location::caller()).raise();
        }
        Self::apply_one(Attention::of(self.layout().ndim(), Mask::Window(keys)), &[self, k, v])
    }

    /// Of logits `[.., v]` and targets (i64, `[..]`): ln(sum_j exp(z_j)) and z_target, in the accumulator dtype. The
    /// cross-entropy is first - second.
    #[track_caller]
    #[must_use]
    fn cross_entropy_terms(&self, target: &Self) -> (Self, Self) {
        let mut outputs = Self::apply(Rc::new(CrossEntropyTerms), &[self, target]);
        let picked = outputs.pop().expect("the op has two outputs");
        (outputs.pop().expect("the op has two outputs"), picked)
    }

    /// Zeros with probability p, x / (1 - p) elsewhere, by random numbers of a key and a stream that are counted by global
    /// element index; dim 0 is counted from `first_row` on. p = 1 gives zeros. On a pipeline they are these in every step.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if p is not in 0..=1.
    #[track_caller]
    #[must_use]
    fn dropout(&self, p: f64, key: u64, stream: u64, first_row: u64) -> Self {
        Self::apply_one(unwind(Dropout::of(p, key, stream, first_row)), &[self])
    }

    /// [`Value::dropout`] by the numbers of a key in a step, which layers draw: a replayed program draws those of its own step
    /// and row, or lets x pass in inference.
    #[track_caller]
    #[must_use]
    fn dropout_of_step(&self, p: f64, key: u64, step: u64, first_row: u64) -> Self {
        Self::apply_one(unwind(Dropout::of_step(p, key, step, first_row)), &[self])
    }
}
