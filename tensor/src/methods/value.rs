//! The [`Value`] trait: the tensor methods of model code, written once for plain tensors and for recorded variables
//! (`torch.Tensor` methods).

use crate::layout::Layout;
use crate::op::{Op, OpHandle, Point, unwind};
use crate::ops::ARGUMENTS_MAX;
use crate::ops::add::Add;
use crate::ops::attention::{Attention, QkvPackedAttention};
use crate::ops::attention_mask::Mask;
use crate::ops::cast::Cast;
use crate::ops::concat::Concat;
use crate::ops::cross_entropy_terms::CrossEntropyTerms;
use crate::ops::div::Div;
use crate::ops::dropout::Dropout;
use crate::ops::einsum;
use crate::ops::embedding::Embedding;
use crate::ops::layer_norm::LayerNorm;
use crate::ops::linear::Linear;
use crate::ops::max_last::MaxLast;
use crate::ops::mlp::Mlp;
use crate::ops::mul::Mul;
use crate::ops::neg::Neg;
use crate::ops::permute::Permute;
use crate::ops::reshape::Reshape;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::rope::Rope;
use crate::ops::scale::Scale;
use crate::ops::slice::{Pad, Slice};
use crate::ops::softmax::Softmax;
use crate::ops::split::Split;
use crate::ops::sub::Sub;
use crate::ops::sum::{Expand, Sum};
use crate::ops::sum_squares::SumSquares;
use crate::ops::swiglu::SwiGlu;
use crate::ops::unary::{ops_of_value, unary_methods};
use crate::ops::unbind::{Stack, Unbind};
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank};
use shardgrad_kernels::{DType, Dims};
use smallvec::SmallVec;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// A tensor in model code: a plain [`Tensor`] or a recorded variable of a tape. A misuse unwinds with the [`Error`] that
/// names op, layouts and source line.
#[doc(alias = "torch.Tensor")]
#[doc(alias = "Variable")]
pub trait Value: Clone {
    /// Returns the plain tensor of the value.
    fn tensor(&self) -> &Tensor;

    /// Applies an op with its points, if any, for the caller's line `site`, and returns its visible outputs.
    fn apply_at(
        op: Rc<dyn Op>,
        args: &[&Self],
        points: &[&dyn Point<Self>],
        site: &'static Location<'static>,
    ) -> SmallVec<[Self; 2]>;

    /// Returns the layout of the value.
    fn layout(&self) -> &Layout {
        self.tensor().layout()
    }

    /// Returns the rank that holds the local tensor.
    fn rank(&self) -> &Rank {
        self.tensor().rank()
    }

    /// Returns the global shape.
    fn shape(&self) -> Dims {
        self.tensor().shape()
    }

    /// Returns the dtype.
    fn dtype(&self) -> DType {
        self.tensor().dtype()
    }

    /// Applies an op and returns its visible outputs.
    #[track_caller]
    fn apply(op: impl OpHandle, args: &[&Self]) -> SmallVec<[Self; 2]> {
        Self::apply_at(op.into_shared(), args, &[], Location::caller())
    }

    /// Applies an op with one visible output.
    #[track_caller]
    fn apply_one(op: impl OpHandle, args: &[&Self]) -> Self {
        Self::apply(op, args).swap_remove(0)
    }

    /// Matrix product x w over the last dim of x and the last but one of w: `[.., m, k] x [.., k, n] -> [.., m, n]`.
    /// Leading dims broadcast, aligned at the right. A vector is `[k]` on either side.
    #[doc(alias = "mm")]
    #[doc(alias = "bmm")]
    #[doc(alias = "dot")]
    #[doc(alias = "torch.matmul")]
    #[doc(alias = "dot_general")]
    #[track_caller]
    #[must_use]
    fn matmul(&self, w: &Self) -> Self {
        Self::apply_one(unwind(einsum::product(self.layout().extents(), w.layout().extents())), &[self, w])
    }

    /// Matrix product with a transposed weight, x w^T: `[..m, n] x [k, n] -> [..m, k]`.
    #[doc(alias = "functional.linear")]
    #[doc(alias = "transposed")]
    #[track_caller]
    #[must_use]
    fn matmul_nt(&self, w: &Self) -> Self {
        Self::apply_one(einsum::matmul_nt(), &[self, w])
    }

    /// Linear layer (x w + b) + residual: `[..m, k] x [k, n] + [n] + [..m, n] -> [..m, n]`, where bias and residual are optional. One
    /// kernel where the sums over k are complete; otherwise the product is completed before bias and residual are added.
    #[doc(alias = "addmm")]
    #[doc(alias = "functional.linear")]
    #[doc(alias = "epilogue")]
    #[track_caller]
    #[must_use]
    fn linear(&self, w: &Self, bias: Option<&Self>, residual: Option<&Self>) -> Self {
        self.linear_general(w, 1, bias, residual, &[])
    }

    /// [`Value::linear`] from the last `num_in` dims of x, which w begins with, to all other dims of w, with the points
    /// [`Linear::OUT`] and [`Linear::BRANCH`].
    #[doc(alias = "DenseGeneral")]
    #[doc(alias = "tensordot")]
    #[track_caller]
    #[must_use]
    fn linear_general(
        &self,
        w: &Self,
        num_in: usize,
        bias: Option<&Self>,
        residual: Option<&Self>,
        points: &[&dyn Point<Self>],
    ) -> Self {
        self.linear_packed(w, (num_in, 0), bias, residual, points)
    }

    /// [`Value::linear_general`], of whose output dims the first `num_packed` are never sharded ([`Linear::with_packed_dims`]).
    #[track_caller]
    #[must_use]
    fn linear_packed(
        &self,
        w: &Self,
        (num_in, num_packed): (usize, usize),
        bias: Option<&Self>,
        residual: Option<&Self>,
        points: &[&dyn Point<Self>],
    ) -> Self {
        let op = Linear::new(num_in, w.layout().ndim().saturating_sub(num_in)).with_packed_dims(num_packed);
        let op = op.with_bias(bias.is_some()).with_residual(residual.is_some());
        let args: SmallVec<[&Self; 4]> = [self, w].into_iter().chain(bias).chain(residual).collect();
        Self::apply_at(Rc::new(op), &args, points, Location::caller()).swap_remove(0)
    }

    /// Feed-forward layer (gelu(x w1 + b1) w2 + b2) + residual, GELU in its tanh form: `[..m, d]`, `[d, h]`, `[h]`, `[h, e]` and,
    /// optionally, `[e]` and `[..m, e]` give `[..m, e]`. One kernel where d and e are unsharded; without b2 and residual the result
    /// is then a partial sum where h is sharded (tensor parallelism).
    #[doc(alias = "feed_forward")]
    #[doc(alias = "ffn")]
    #[track_caller]
    #[must_use]
    fn mlp(&self, w1: &Self, b1: &Self, w2: &Self, b2: Option<&Self>, residual: Option<&Self>) -> Self {
        self.mlp_general([w1, w2], [Some(b1), b2], residual, &[])
    }

    /// [`Value::mlp`] with or without each bias, with the points [`Mlp::HIDDEN`], [`Mlp::INPUT`], [`Mlp::OUT`] and [`Mlp::BRANCH`].
    #[track_caller]
    #[must_use]
    fn mlp_general(
        &self,
        [w1, w2]: [&Self; 2],
        [b1, b2]: [Option<&Self>; 2],
        residual: Option<&Self>,
        points: &[&dyn Point<Self>],
    ) -> Self {
        let op = Mlp {
            has_first_bias: b1.is_some(),
            has_last_bias: b2.is_some(),
            has_residual: residual.is_some(),
        };
        let args: SmallVec<[&Self; 6]> =
            [self, w1].into_iter().chain(b1).chain([w2]).chain(b2).chain(residual).collect();
        Self::apply_at(Rc::new(op), &args, points, Location::caller()).swap_remove(0)
    }

    /// The product of two tensors by an einsum signature, such as `b t d, d h c -> b t h c`.
    #[track_caller]
    #[must_use]
    fn einsum(&self, signature: &str, other: &Self) -> Self {
        Self::apply_one(unwind(einsum::Einsum::new(signature)), &[self, other])
    }

    /// x + y elementwise, with broadcasting aligned at the last dim.
    #[track_caller]
    #[must_use]
    fn add(&self, other: &Self) -> Self {
        Self::apply_one(Add::between(self.layout().extents(), other.layout().extents()), &[self, other])
    }

    /// x - y elementwise, with broadcasting aligned at the last dim.
    #[track_caller]
    #[must_use]
    fn sub(&self, other: &Self) -> Self {
        Self::apply_one(Sub::between(self.layout().extents(), other.layout().extents()), &[self, other])
    }

    /// x y elementwise, with broadcasting aligned at the last dim.
    #[track_caller]
    #[must_use]
    fn mul(&self, other: &Self) -> Self {
        Self::apply_one(Mul::between(self.layout().extents(), other.layout().extents()), &[self, other])
    }

    /// x / y elementwise, with broadcasting aligned at the last dim.
    #[track_caller]
    #[must_use]
    fn div(&self, other: &Self) -> Self {
        Self::apply_one(Div::between(self.layout().extents(), other.layout().extents()), &[self, other])
    }

    /// c x for a scalar c.
    #[doc(alias = "mul_scalar")]
    #[track_caller]
    #[must_use]
    fn scale(&self, factor: f64) -> Self {
        Self::apply_one(Scale { factor }, &[self])
    }

    ops_of_value!(unary_methods);

    /// -x elementwise.
    #[doc(alias = "negative")]
    #[track_caller]
    #[must_use]
    fn neg(&self) -> Self {
        Self::apply_one(Neg, &[self])
    }

    /// SwiGLU: silu(x) u elementwise, with silu(x) = x / (1 + exp(-x)).
    #[doc(alias = "silu_and_mul")]
    #[track_caller]
    #[must_use]
    fn swiglu(&self, u: &Self) -> Self {
        Self::apply_one(SwiGlu, &[self, u])
    }

    /// Sum of all elements, a scalar.
    #[track_caller]
    #[must_use]
    fn sum(&self) -> Self {
        let dims: Dims = (0..self.layout().ndim()).collect();
        self.sum_dims(&dims)
    }

    /// Mean of all elements, a scalar.
    #[track_caller]
    #[must_use]
    fn mean(&self) -> Self {
        let dims: Dims = (0..self.layout().ndim()).collect();
        self.mean_dims(&dims)
    }

    /// Sum over some dims, which are removed.
    #[doc(alias = "reduce_sum")]
    #[track_caller]
    #[must_use]
    fn sum_dims(&self, dims: &[usize]) -> Self {
        Self::apply_one(unwind(Sum::over(self.layout().ndim(), dims, false)), &[self])
    }

    /// Mean over some dims, which are removed.
    #[track_caller]
    #[must_use]
    fn mean_dims(&self, dims: &[usize]) -> Self {
        Self::apply_one(unwind(Sum::over(self.layout().ndim(), dims, true)), &[self])
    }

    /// Sum of the squares of all elements in f64, a scalar without gradient.
    #[track_caller]
    #[must_use]
    fn sum_squares(&self) -> Self {
        Self::apply_one(SumSquares, &[self])
    }

    /// Maximum along the last dim, in the accumulator dtype, without gradient.
    #[track_caller]
    #[must_use]
    fn max_last(&self) -> Self {
        Self::apply_one(MaxLast, &[self])
    }

    /// Repeats x `extent` times along a new dim, at position `dim` of the result, without a copy.
    #[doc(alias = "broadcast_in_dim")]
    #[track_caller]
    #[must_use]
    fn expand(&self, dim: usize, extent: usize) -> Self {
        let mut shape = self.shape();
        shape.insert(dim.min(shape.len()), extent);
        Self::apply_one(unwind(Expand::to(&shape, &[dim])), &[self])
    }

    /// Converts x to another dtype.
    #[doc(alias = "astype")]
    #[doc(alias = "to")]
    #[doc(alias = "convert_element_type")]
    #[doc(alias = "type_as")]
    #[track_caller]
    #[must_use]
    fn cast(&self, dtype: DType) -> Self {
        if self.dtype() == dtype {
            return self.clone();
        }
        Self::apply_one(Cast::of(self.dtype(), dtype), &[self])
    }

    /// Reshapes to another global shape with the same elements in row-major order.
    #[doc(alias = "view")]
    #[track_caller]
    #[must_use]
    fn reshape(&self, shape: &[usize]) -> Self {
        Self::apply_one(unwind(Reshape::to(&self.shape(), shape)), &[self])
    }

    /// Permutes the dims: dim i of the result is dim `order[i]` of x.
    #[track_caller]
    #[must_use]
    fn permute(&self, order: &[usize]) -> Self {
        Self::apply_one(unwind(Permute::by(self.layout().ndim(), order)), &[self])
    }

    /// Swaps two dims.
    #[doc(alias = "swapaxes")]
    #[doc(alias = "transposed")]
    #[track_caller]
    #[must_use]
    fn transpose(&self, first: usize, second: usize) -> Self {
        let (ndim, most) = (self.layout().ndim(), first.max(second));
        if most >= ndim {
            let text = format!("transpose: dim {most} is out of range for {ndim} dims");
            unwind(Err::<(), _>(Error::new(Kind::Shape, text).detail("help", "dims count from 0")));
        }
        let mut order: Dims = (0..ndim).collect();
        order.swap(first, second);
        self.permute(&order)
    }

    /// Splits x into its slices along a dim, which is removed; any number of slices.
    #[track_caller]
    #[must_use]
    fn unbind(&self, dim: usize) -> SmallVec<[Self; 2]> {
        let count = self.shape().get(dim).copied().unwrap_or(1);
        if count > ARGUMENTS_MAX {
            let (size, mut slices) = (count.div_ceil(ARGUMENTS_MAX), SmallVec::new());
            let sizes: Dims = (0..count).step_by(size).map(|first| size.min(count - first)).collect();
            for group in Self::apply(unwind(Split::along(self.layout().ndim(), count, dim, &sizes)), &[self])
            {
                slices.extend(group.unbind(dim));
            }
            return slices;
        }
        Self::apply(unwind(Unbind::along(self.layout().ndim(), dim, count)), &[self])
    }

    /// Stacks tensors of one shape along a new dim, at position `dim` of the result; any number of tensors. More than 16 are stacked in
    /// groups of 16, each group is copied once more.
    ///
    /// # Panics
    /// If `parts` is empty.
    #[track_caller]
    #[must_use]
    fn stack(parts: &[&Self], dim: usize) -> Self {
        if parts.len() > ARGUMENTS_MAX {
            let mut groups = Vec::new();
            for group in parts.chunks(ARGUMENTS_MAX) {
                groups.push(Self::stack(group, dim));
            }
            return Self::concat(&groups.iter().collect::<Vec<_>>(), dim);
        }
        let ndim = parts.first().expect("a stack of at least one tensor").layout().ndim();
        Self::apply_one(unwind(Stack::along(ndim, dim, parts.len())), parts)
    }

    /// Concatenates tensors along an unsharded dim; any number of tensors. More than 16 are concatenated in groups of 16, each group is
    /// copied once more.
    ///
    /// # Panics
    /// If `parts` is empty.
    #[doc(alias = "cat")]
    #[doc(alias = "concatenate")]
    #[track_caller]
    #[must_use]
    fn concat(parts: &[&Self], dim: usize) -> Self {
        if parts.len() > ARGUMENTS_MAX {
            let mut groups = Vec::new();
            for group in parts.chunks(ARGUMENTS_MAX) {
                groups.push(Self::concat(group, dim));
            }
            return Self::concat(&groups.iter().collect::<Vec<_>>(), dim);
        }
        let ndim = parts.first().expect("at least one tensor is joined").layout().ndim();
        Self::apply_one(unwind(Concat::along(ndim, dim, parts.len())), parts)
    }

    /// Slices a range of an unsharded dim.
    #[doc(alias = "narrow")]
    #[doc(alias = "dynamic_slice")]
    #[track_caller]
    #[must_use]
    fn slice(&self, dim: usize, range: Range<usize>) -> Self {
        let extent = self.shape().get(dim).copied().unwrap_or(0);
        Self::apply_one(unwind(Slice::along(self.layout().ndim(), extent, dim, range)), &[self])
    }

    /// Selects one index of an unsharded dim, which is removed.
    #[track_caller]
    #[must_use]
    fn select(&self, dim: usize, index: usize) -> Self {
        let mut shape = self.shape();
        let slice = self.slice(dim, index..index + 1);
        shape.remove(dim);
        slice.reshape(&shape)
    }

    /// Pads an unsharded dim with zeros before and after its elements.
    #[track_caller]
    #[must_use]
    fn pad(&self, dim: usize, before: usize, after: usize) -> Self {
        Self::apply_one(unwind(Pad::along(self.layout().ndim(), dim, before, after, 0.0)), &[self])
    }

    /// Softmax exp(x_i) / sum_j exp(x_j) over the last dim.
    #[track_caller]
    #[must_use]
    fn softmax(&self) -> Self {
        Self::apply_one(Softmax, &[self])
    }

    /// Layer norm (x - mean) / sqrt(var + eps) w + b over the last dim.
    #[doc(alias = "LayerNorm")]
    #[track_caller]
    #[must_use]
    fn layer_norm(&self, w: &Self, b: &Self, eps: f64) -> Self {
        Self::apply_one(LayerNorm { eps }, &[self, w, b])
    }

    /// RMS norm x / sqrt(mean(x^2) + eps) w over the last dim.
    #[doc(alias = "RMSNorm")]
    #[track_caller]
    #[must_use]
    fn rms_norm(&self, w: &Self, eps: f64) -> Self {
        Self::apply_one(RmsNorm { eps }, &[self, w])
    }

    /// Rotary position embedding on `[b, t, .., c]`: rotates channels i and i + c/2 by the angle (first + index
    /// along t) `frequencies[i]`.
    #[doc(alias = "rotary_embedding")]
    #[doc(alias = "apply_rotary_pos_emb")]
    #[doc(alias = "RoPE")]
    #[track_caller]
    #[must_use]
    fn rope(&self, frequencies: &Rc<[f64]>, first: usize) -> Self {
        Self::apply_one(unwind(Rope::of(&self.shape(), frequencies.clone(), first)), &[self])
    }

    /// [`Value::rope`] by positions `[b, t]` (i64), for example of packed documents.
    #[doc(alias = "position_ids")]
    #[track_caller]
    #[must_use]
    fn rope_at(&self, frequencies: &Rc<[f64]>, positions: &Self) -> Self {
        Self::apply_one(unwind(Rope::by_positions(&self.shape(), frequencies.clone())), &[self, positions])
    }

    /// Embedding lookup: rows of this table, `[v, d]`, by index (i64, any shape), give `[.., d]`.
    #[doc(alias = "take")]
    #[doc(alias = "gather")]
    #[track_caller]
    #[must_use]
    fn embedding(&self, index: &Self) -> Self {
        Self::apply_one(Embedding, &[self, index])
    }

    /// Scaled dot-product attention of queries `[b, t, h, c]` on keys and values `[b, s, h, c]`, or of grouped
    /// queries `[b, t, g, r, c]` on `[b, s, g, c]` (grouped-query attention). If causal, the last query sees all
    /// keys and each query before it one less.
    #[doc(alias = "scaled_dot_product_attention")]
    #[doc(alias = "flash_attention")]
    #[doc(alias = "sdpa")]
    #[track_caller]
    #[must_use]
    fn attention(&self, k: &Self, v: &Self, causal: bool) -> Self {
        let mask = if causal { Mask::Causal } else { Mask::None };
        Self::apply_one(Attention::of(self.layout().ndim(), mask), &[self, k, v])
    }

    /// [`Value::attention`] within packed documents: a query sees the keys of its own document only. `documents` are the segment
    /// ids and the positions of the keys, `[b, s]` each (i64); the last t of them are those of the queries. If causal, a query
    /// sees the keys of its document with positions up to its own; with a window of w, those less than w before.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a window of 0 keys, or one without causality.
    #[doc(alias = "varlen_attention")]
    #[doc(alias = "flash_attn_varlen_func")]
    #[doc(alias = "document_mask")]
    #[doc(alias = "segment_ids")]
    #[track_caller]
    #[must_use]
    fn document_attention(
        &self,
        k: &Self,
        v: &Self,
        documents: [&Self; 2],
        causal: bool,
        window: Option<usize>,
    ) -> Self {
        let mask = match (causal, window) {
            (false, None) => Mask::None,
            (true, None) => Mask::Causal,
            (true, Some(keys)) if keys > 0 => Mask::Window(keys),
            (_, Some(keys)) => {
                let text = format!("attention: a window of {keys} keys, causal {causal}");
                let error = Error::new(Kind::Config, text);
                error
                    .detail("help", "pass a window of at least 1 key, and only to causal attention")
                    .at(Location::caller())
                    .raise()
            }
        };
        let op = Attention::of_documents(self.layout().ndim(), mask);
        Self::apply_one(op, &[self, k, v, documents[0], documents[1]])
    }

    /// [`Value::attention`] of q, k and v that are packed along dim 2 of this tensor, `[b, t, 3, h, c]`, with the points
    /// [`QkvPackedAttention::KEYS`], [`QkvPackedAttention::VALUES`], [`QkvPackedAttention::QUERIES`] and
    /// [`QkvPackedAttention::HEADS`], in this order. One kernel where tokens are unsharded.
    #[doc(alias = "flash_attn_qkvpacked_func")]
    #[track_caller]
    #[must_use]
    fn qkv_packed_attention(&self, causal: bool, points: &[&dyn Point<Self>]) -> Self {
        let op = unwind(QkvPackedAttention::of(&self.shape(), causal));
        Self::apply_at(op, &[self], points, Location::caller()).swap_remove(0)
    }

    /// Causal sliding-window [`Value::attention`]: a query sees the last `keys` keys, its own included; all of them
    /// if there are no more. Beltagy, Peters and Cohan, arXiv 2004.05150.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a window of 0 keys.
    #[doc(alias = "sliding_window")]
    #[doc(alias = "local_attention")]
    #[track_caller]
    #[must_use]
    fn window_attention(&self, k: &Self, v: &Self, keys: usize) -> Self {
        if keys == 0 {
            let error = Error::new(Kind::Config, "attention: a window of 0 keys is empty");
            error
                .detail("help", "pass a window of at least 1 key")
                .at(std::panic::Location::caller())
                .raise();
        }
        Self::apply_one(Attention::of(self.layout().ndim(), Mask::Window(keys)), &[self, k, v])
    }

    /// The two terms of the cross-entropy of logits `[.., v]` and targets (i64, `[..]`): ln(sum_j exp(z_j)) and
    /// z_target, in the accumulator dtype. The cross-entropy is first - second.
    #[doc(alias = "cross_entropy")]
    #[doc(alias = "nll_loss")]
    #[track_caller]
    #[must_use]
    fn cross_entropy_terms(&self, target: &Self) -> (Self, Self) {
        let mut outputs = Self::apply(Rc::new(CrossEntropyTerms), &[self, target]);
        let picked = outputs.pop().expect("the op has two outputs");
        (outputs.pop().expect("the op has two outputs"), picked)
    }

    /// Dropout: zero with probability p, x / (1 - p) elsewhere, by random numbers of a key and a stream counted by
    /// global element index; dim 0 is counted from `first_row`. p = 1 gives zeros. In a pipeline the mask is the
    /// same in every step.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if p is not in 0..=1.
    #[track_caller]
    #[must_use]
    fn dropout(&self, p: f64, key: u64, stream: u64, first_row: u64) -> Self {
        Self::apply_one(unwind(Dropout::of(p, key, stream, first_row)), &[self])
    }

    /// [`Value::dropout`] with a mask that depends on the step, as layers use it: a replayed program draws the mask
    /// of its own step and row, or passes x unchanged in inference.
    #[track_caller]
    #[must_use]
    fn dropout_of_step(&self, p: f64, key: u64, step: u64, first_row: u64) -> Self {
        Self::apply_one(unwind(Dropout::for_step(p, key, step, first_row)), &[self])
    }
}

impl Value for Tensor {
    fn tensor(&self) -> &Tensor {
        self
    }

    fn apply_at(
        op: Rc<dyn Op>,
        args: &[&Tensor],
        points: &[&dyn Point<Tensor>],
        site: &'static Location<'static>,
    ) -> SmallVec<[Tensor; 2]> {
        Tensor::apply_at(op, args, points, site)
    }

    // Plain tensors record nothing, so an op needs no shared handle.
    #[track_caller]
    fn apply_one(op: impl OpHandle, args: &[&Tensor]) -> Tensor {
        Tensor::apply_one(op, args)
    }
}
