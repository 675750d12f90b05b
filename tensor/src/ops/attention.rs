//! Scaled dot-product attention: o_i = sum_j p_ij v_j with p_ij = exp(scale q_i k_j) / sum over the visible keys j,
//! scale = 1 / sqrt(channels).
//!
//! If causal, query i of t sees the keys j <= i + s - t of s: the last query sees all keys, whether queries and keys
//! are the same sequence (t = s) or the queries continue it (t < s, a KV cache). With a sliding window of w keys, a
//! query sees the last w of these keys only. With packed documents, a query sees the keys of its own document, and if
//! causal those of positions up to its own.

use super::attention_mask::{AttentionLaunch, DocumentIds, Mask, check_documents, forward_dtypes};
use super::ring_attention::RingAttention;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::dim::Dim;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, Decomposition, ForwardContext, LocalTensors, Op, Operand, PlanKey,
    SavedForBackward, Vjp,
};
use crate::ops::unbind::Unbind;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::op::attention::{BACKWARD, BACKWARD_JOINED, FORWARD};
use shardgrad_kernels::{DType, Kernel};
use smallvec::SmallVec;
use std::rc::Rc;

/// Scaled dot-product attention without a stored score matrix (as FlashAttention), full, causal or with a sliding
/// window.
///
/// On q, k and v of one float dtype: `b t h c!, b s! h c!, b s! h c! -> b t h c!` (multi-head), or `b t g r c!, b s! g
/// c!, b s! g c! -> b t g r c!` where r query heads share each of g key heads (grouped-query attention; multi-query for
/// g = 1). With packed documents two more arguments `b s!, b s!` (i64): the segment ids and positions of the keys, the last
/// t of which are those of the queries. The logarithms of the softmax denominators (`b t h`, in the accumulator dtype) are saved for backward; a t
/// by s matrix is not. The kernel does not take sharded keys and channels; queries, heads and batch may be sharded.
///
/// Decomposition: [`RingAttention`] where keys are sharded over the same axes as queries, t = s.
///
/// Gradient, with dp_ij = g_i v_j and D_i = sum_c g_i o_i: dv_j = sum_i p_ij g_i, dq_i = scale sum_j p_ij (dp_ij - D_i)
/// k_j, dk_j = scale sum_i p_ij (dp_ij - D_i) q_i; dk and dv are partial sums over the axes that shard t or r.
///
/// Source: Vaswani et al., arXiv 1706.03762; Dao et al., arXiv 2205.14135.
#[doc(alias = "scaled_dot_product_attention")]
#[doc(alias = "flash attention")]
#[doc(alias = "multi-head attention")]
#[doc(alias = "grouped-query attention")]
#[doc(alias = "GQA")]
#[doc(alias = "MQA")]
#[doc(alias = "sliding window")]
#[doc(alias = "document mask")]
#[doc(alias = "varlen")]
#[derive(Debug)]
pub struct Attention {
    mask: Mask,
    is_grouped: bool,
    has_documents: bool,
}

/// Backward of [`Attention`]: the cotangents of q, k and v, linear in g.
#[derive(Debug)]
struct AttentionBackward {
    mask: Mask,
    is_grouped: bool,
    has_documents: bool,
}

/// Signature of [`QkvPackedAttention`].
const PACKED: &str = "b t! p! h c! -> b t! h c!, b t! h";

/// [`Attention`] on one tensor that packs q, k and v along dim p = 3: `b t! p! h c! -> b t! h c!`.
///
/// The cotangent is one packed tensor too, as the fused QKV projection needs; separate cotangents would have to be
/// concatenated. The kernel does not take sharded queries and keys.
///
/// Decomposition: heads(attention(queries(q), keys(k), values(v))) of the unbound q, k and v, with the points `keys`, `values`,
/// `queries` and `heads`. The kernel computes all of it where tokens are unsharded and no point changes a value.
#[doc(alias = "flash_attn_qkvpacked_func")]
#[doc(alias = "fused qkv")]
#[derive(Debug)]
pub struct QkvPackedAttention {
    mask: Mask,
}

/// Backward of [`QkvPackedAttention`]: the packed cotangent, linear in g.
#[derive(Debug)]
struct QkvPackedAttentionBackward {
    mask: Mask,
}

impl Attention {
    /// Attention of q with 4 dims (batch, query, head, channel) or 5 (batch, query, group, head, channel).
    #[must_use]
    pub(crate) fn of(ndim: usize, mask: Mask) -> Rc<dyn Op> {
        Rc::new(Attention { mask, is_grouped: ndim == 5, has_documents: false })
    }

    /// [`Attention::of`] with packed documents.
    #[must_use]
    pub(crate) fn of_documents(ndim: usize, mask: Mask) -> Rc<dyn Op> {
        Rc::new(Attention { mask, is_grouped: ndim == 5, has_documents: true })
    }

    fn static_signature(&self) -> &'static str {
        match (self.is_grouped, self.has_documents) {
            (false, false) => "b t h c!, b s! h c!, b s! h c! -> b t h c!, b t h",
            (true, false) => "b t g r c!, b s! g c!, b s! g c! -> b t g r c!, b t g r",
            (false, true) => "b t h c!, b s! h c!, b s! h c!, b s!, b s! -> b t h c!, b t h",
            (true, true) => "b t g r c!, b s! g c!, b s! g c!, b s!, b s! -> b t g r c!, b t g r",
        }
    }
}

impl QkvPackedAttention {
    /// The point of the keys, before attention.
    pub const KEYS: usize = 0;
    /// The point of the values, before attention.
    pub const VALUES: usize = 1;
    /// The point of the queries, before attention.
    pub const QUERIES: usize = 2;
    /// The point of the outputs of the heads.
    pub const HEADS: usize = 3;

    /// Attention of a tensor `[b, t, 3, h, c]`; if causal, a query sees its own key and the keys before it.
    ///
    /// # Errors
    /// `Kind::Shape` for a tensor of another shape.
    pub fn of(shape: &[usize], causal: bool) -> Result<Rc<dyn Op>> {
        if !matches!(shape, [_, _, 3, _, _]) {
            let text = format!(
                "qkv_packed_attention: needs the shape [batch, token, 3, head, channel], got {shape:?}"
            );
            return Err(Error::new(Kind::Shape, text));
        }
        Ok(Rc::new(QkvPackedAttention { mask: if causal { Mask::Causal } else { Mask::None } }))
    }

    fn parts(&self, num_points: usize) -> Decomposition {
        let mut parts = Decomposition::new(num_points);
        let Operand::Output(qkv, q) = parts.apply_with_points(Unbind::of(5, 2, 3), &[Operand::Arg(0)], 0..0)
        else {
            unreachable!("the output of a step")
        };
        let q = parts.pass(Operand::Output(qkv, q), QkvPackedAttention::QUERIES);
        let k = parts.pass(Operand::Output(qkv, 1), QkvPackedAttention::KEYS);
        let v = parts.pass(Operand::Output(qkv, 2), QkvPackedAttention::VALUES);
        let heads = parts.apply_with_points(Attention::of(4, self.mask), &[q, k, v], 0..0);
        parts.pass(heads, QkvPackedAttention::HEADS);
        parts
    }
}

/// Views of q, k and v in a packed tensor.
fn split_qkv(qkv: &LocalTensor) -> [LocalTensor; 3] {
    [0, 1, 2].map(|i| qkv.with_view(qkv.view.select(2, i)))
}

/// Runs an attention kernel, which takes five dims: tensors of queries without groups get a dim of r = 1 heads per group.
fn launch_with_groups(
    local: &ForwardContext<'_>,
    kernel: &Kernel,
    x: &[&LocalTensor],
    (mask, documents): (Mask, Option<DocumentIds<'_>>),
    per_query: impl Fn(usize) -> bool,
    output_per_query: impl Fn(usize) -> bool,
) -> Result<LocalTensors> {
    let is_grouped = x[0].view.ndim() == 5;
    let with_r = |tensor: &LocalTensor| tensor.with_view(tensor.view.unsqueeze(3));
    let inputs: SmallVec<[LocalTensor; 6]> = x
        .iter()
        .enumerate()
        .map(|(i, p)| if is_grouped || !per_query(i) { (*p).clone() } else { with_r(p) })
        .collect();
    let inputs: SmallVec<[&LocalTensor; 6]> = inputs.iter().collect();
    let mut outputs: LocalTensors =
        (0..local.inference.outputs.len()).map(|i| local.output(i)).collect::<Result<_>>()?;
    let views: Vec<_> = outputs.iter().map(|p| p.view.clone()).collect();
    for (i, tensor) in outputs.iter_mut().enumerate() {
        if !is_grouped && output_per_query(i) {
            tensor.view = tensor.view.unsqueeze(3).into();
        }
    }
    // Keys are not sharded.
    let ((t, range), s, (c, _)) = (local.label("t"), x[1].view.shape[1], local.label("c"));
    let first = range.start as i64 + s as i64 - t as i64;
    let (rank, queries, keys) = (local.rank, first..first + range.len() as i64, 0..s as i64);
    let documents = match documents {
        Some(_) if t > s => return check_documents("attention", s, s, t).map(|()| outputs),
        Some([segments, positions]) => Some([segments.contiguous(rank)?, positions.contiguous(rank)?]),
        None => None,
    };
    let documents = documents.as_ref().map(|[segments, positions]| [segments, positions]);
    AttentionLaunch { rank, mask, c, queries, keys, documents }.run(
        kernel,
        &inputs,
        &mut outputs.iter_mut().collect::<Vec<&mut LocalTensor>>(),
    )?;
    for (tensor, view) in outputs.iter_mut().zip(views) {
        tensor.view = view;
    }
    Ok(outputs)
}

/// The documents among the arguments, which follow `own` tensors.
fn documents_after<'a>(own: usize, x: &[&'a LocalTensor]) -> Option<DocumentIds<'a>> {
    x.get(own..own + 2).map(|ids| [ids[0], ids[1]])
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn signature(&self) -> &str {
        self.static_signature()
    }

    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<Attention>(self.static_signature()))
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        match self.has_documents {
            true => SavedForBackward { inputs: &[0, 1, 2, 3, 4], outputs: &[0, 1] },
            false => SavedForBackward { inputs: &[0, 1, 2], outputs: &[0, 1] },
        }
    }

    fn decompose(&self, args: &[&Layout], _: &[bool]) -> Option<Decomposition> {
        let tokens = |i: usize| args.get(i).and_then(|layout| layout.dims().get(1));
        let (queries, keys) = (tokens(0)?, tokens(1)?);
        if keys.is_unsharded() || (queries.extent, queries.axes) != (keys.extent, keys.axes) {
            return None;
        }
        let Attention { mask, is_grouped, has_documents } = *self;
        let args: SmallVec<[Operand; 5]> = (0..args.len()).map(Operand::Arg).collect();
        let mut parts = Decomposition::new(0);
        parts.apply(RingAttention { mask, is_grouped, has_documents }, &args);
        Some(parts)
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        forward_dtypes(inputs)
    }

    fn estimate_work(&self, tuples: usize, _: &[&Layout], _: &[Layout]) -> usize {
        tuples
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let mask = (self.mask, documents_after(3, x));
        launch_with_groups(local, &FORWARD, &x[..3], mask, |i| i == 0, |_| true)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let Attention { mask, is_grouped, has_documents } = *self;
        let op = Rc::new(AttentionBackward { mask, is_grouped, has_documents });
        let (documents, g) = (if has_documents { 3..5 } else { 3..3 }, cx.grad(0));
        let tensors = [cx.input(0), cx.input(1), cx.input(2), cx.output(0), cx.output(1), &g];
        let args: SmallVec<[&Tensor; 8]> =
            tensors.into_iter().chain(documents.map(|i| cx.input(i))).collect();
        let grads = Tensor::apply(op, &args);
        cx.cotangents(|i| grads[i].clone())
    }
}

impl Op for AttentionBackward {
    fn name(&self) -> &'static str {
        "attention_backward"
    }

    fn signature(&self) -> &str {
        match (self.is_grouped, self.has_documents) {
            (false, false) => {
                "b t h c!, b s! h c!, b s! h c!, b t h c!, b t h, b t h c! -> b t h c!, b s! h c!, b s! h c!"
            }
            (true, false) => {
                "b t g r c!, b s! g c!, b s! g c!, b t g r c!, b t g r, b t g r c! -> b t g r c!, b s! g c!, b s! g c!"
            }
            (false, true) => {
                "b t h c!, b s! h c!, b s! h c!, b t h c!, b t h, b t h c!, b s!, b s! -> b t h c!, b s! h c!, b s! h c!"
            }
            (true, true) => {
                "b t g r c!, b s! g c!, b s! g c!, b t g r c!, b t g r, b t g r c!, b s!, b s! -> b t g r c!, b s! g c!, b s! g c!"
            }
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[5]]
    }

    /// dk and dv are sums over leaves of queries.
    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Leaves
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(inputs[0], num_outputs))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let mask = (self.mask, documents_after(6, x));
        launch_with_groups(local, &BACKWARD, &x[..6], mask, |i| i != 1 && i != 2, |i| i == 0)
    }
}

impl Op for QkvPackedAttention {
    fn name(&self) -> &'static str {
        "qkv_packed_attention"
    }

    fn plan_key(&self) -> Option<PlanKey> {
        Some(PlanKey::of::<QkvPackedAttention>(PACKED))
    }

    fn decompose(&self, args: &[&Layout], points: &[bool]) -> Option<Decomposition> {
        let are_tokens_whole = args[0].dims().get(1).is_none_or(Dim::is_unsharded);
        let is_one_kernel = are_tokens_whole && points.iter().all(|is_identity| *is_identity);
        (!is_one_kernel).then(|| self.parts(points.len()))
    }

    fn decompose_canonical(&self, _: &[&Layout], points: &[bool]) -> Option<Decomposition> {
        Some(self.parts(points.len()))
    }

    fn signature(&self) -> &str {
        PACKED
    }

    fn estimate_work(&self, _: usize, args: &[&Layout], outputs: &[Layout]) -> usize {
        // The signature has no label for the keys.
        outputs.first().map_or(0, Layout::numel).saturating_mul(args[0].extent(1))
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[0, 1] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        forward_dtypes(inputs)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let [q, k, v] = split_qkv(x[0]);
        launch_with_groups(local, &FORWARD, &[&q, &k, &v], (self.mask, None), |i| i == 0, |_| true)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = Rc::new(QkvPackedAttentionBackward { mask: self.mask });
        let args = [cx.input(0), cx.output(0), cx.output(1), &cx.grad(0)];
        cx.cotangents(|_| Tensor::apply(op.clone(), &args).swap_remove(0))
    }
}

impl Op for QkvPackedAttentionBackward {
    fn name(&self) -> &'static str {
        "qkv_packed_attention_backward"
    }

    fn signature(&self) -> &str {
        "b t! p! h c!, b t! h c!, b t! h, b t! h c! -> b t! p! h c!"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[3]]
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(inputs[0], num_outputs))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let [q, k, v] = split_qkv(x[0]);
        let args = [&q, &k, &v, x[1], x[2], x[3]];
        let mask = (self.mask, None);
        launch_with_groups(local, &BACKWARD_JOINED, &args, mask, |i| i != 1 && i != 2, |_| false)
    }
}

pub(super) fn cases() -> Vec<Case> {
    let packed = |causal, shape: &[usize]| {
        let op = QkvPackedAttention::of(shape, causal).expect("the shape of a case");
        Case::fixed_shape(op, vec![Input::real(shape)])
    };
    let case = |mask, q: &[usize], k: &[usize]| {
        let inputs = vec![Input::real(q), Input::real(k), Input::real(k)];
        Case::new(Attention::of(q.len(), mask), inputs)
    };
    // The scores of one query are close to each other and above 1000.
    let far = |mask, q: &[usize], k: &[usize]| {
        let inputs = vec![Input::offset(q, 8.0), Input::offset(k, 100.0), Input::real(k)];
        Case::new(Attention::of(q.len(), mask), inputs)
    };
    // Queries of the last tokens of rows of documents.
    let packed_documents = |mask, q: &[usize], k: &[usize]| {
        let mut inputs = vec![Input::real(q), Input::real(k), Input::real(k)];
        inputs.extend([Input::index(&k[..2], 2), Input::index(&k[..2], k[1])]);
        Case::new(Attention::of_documents(q.len(), mask), inputs)
    };
    vec![
        case(Mask::Causal, &[2, 5, 3, 2], &[2, 5, 3, 2]),
        case(Mask::None, &[2, 3, 2, 3], &[2, 5, 2, 3]),
        case(Mask::Causal, &[2, 3, 2, 3, 2], &[2, 4, 2, 2]),
        case(Mask::Window(2), &[2, 4, 2, 1, 2], &[2, 5, 2, 2]),
        packed(true, &[2, 4, 3, 3, 2]),
        packed(false, &[3, 3, 3, 2, 2]),
        far(Mask::None, &[2, 3, 2, 3], &[2, 5, 2, 3]),
        far(Mask::Causal, &[2, 3, 2, 3, 2], &[2, 4, 2, 2]),
        packed_documents(Mask::Causal, &[2, 5, 3, 2], &[2, 5, 3, 2]),
        packed_documents(Mask::Window(2), &[2, 3, 2, 3, 2], &[2, 5, 2, 2]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use approx::assert_abs_diff_eq;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_two_queries_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            // One head of one channel: scores are products. Query 1 sees both keys with weights 1/4 and 3/4.
            let tensor = |x: &[f64]| Tensor::from_host(rank, &[1, 2, 1, 1], x);
            let (q, k, v) = (tensor(&[1.0, 1.0])?, tensor(&[0.0, 3f64.ln()])?, tensor(&[4.0, 8.0])?);
            let causal = q.attention(&k, &v, true).to_host::<f64>()?;
            let full = q.attention(&k, &v, false).to_host::<f64>()?;
            assert_abs_diff_eq!(causal[..], [4.0, 7.0][..], epsilon = 1e-12);
            assert_abs_diff_eq!(full[..], [7.0, 7.0][..], epsilon = 1e-12);
            let last = q.slice(1, 1..2).attention(&k, &v, true).to_host::<f64>()?;
            // The one query that continues two keys sees both.
            assert_abs_diff_eq!(last[..], [7.0][..], epsilon = 1e-12);
            let own = q.window_attention(&k, &v, 1).to_host::<f64>()?;
            assert_abs_diff_eq!(own[..], [4.0, 8.0][..], epsilon = 1e-12);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn packed_qkv_agrees_with_separate_tensors() {
        World::run(Mesh::single(), |rank| {
            let numbers: Vec<f32> =
                (0..2 * 5 * 3 * 2 * 4).map(|i| (i * 37 % 19) as f32 / 8.0 - 1.0).collect();
            let qkv = Tensor::from_host(rank, &[2, 5, 3, 2, 4], &numbers)?;
            let [q, k, v] = [0, 1, 2].map(|i| qkv.select(2, i));
            for causal in [true, false] {
                let packed = Tensor::apply_one(QkvPackedAttention::of(&qkv.shape(), causal)?, &[&qkv]);
                assert_eq!(packed.to_host::<f32>()?, q.attention(&k, &v, causal).to_host::<f32>()?);
            }
            assert_eq!(QkvPackedAttention::of(&[2, 5, 2, 2, 4], true).unwrap_err().kind(), Kind::Shape);
            let volume = |op: Rc<dyn Op>, args: &[&Tensor]| {
                let args: Vec<&Layout> = args.iter().map(|x| x.layout()).collect();
                crate::op::estimate_work(&*op, rank, &args, &[q.layout().clone()])
            };
            let apart = volume(Attention::of(4, Mask::None), &[&q, &k, &v]);
            assert_eq!(volume(QkvPackedAttention::of(&qkv.shape(), false)?, &[&qkv]), apart);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn window_of_0_keys_is_refused() {
        let error = World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1, 2, 1, 1], &[0.0, 1.0])?;
            let _ = x.window_attention(&x, &x, 0);
            Ok(())
        });
        assert!(error.unwrap_err().message().contains("a window of 0 keys"));
    }

    #[test]
    fn window_of_all_keys_equals_causal() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1, 3, 1, 1], &[0.5, -1.0, 2.0])?;
            let causal = x.attention(&x, &x, true).to_host::<f64>()?;
            for keys in [3, 4, i64::MAX as usize - 1, i64::MAX as usize, 1 << 63, usize::MAX] {
                assert_eq!(x.window_attention(&x, &x, keys).to_host::<f64>()?, causal, "{keys}");
            }
            let grad = |mask| {
                let saved = Tensor::apply(Attention::of(4, mask), &[&x, &x, &x]).remove(0);
                let lse = Tensor::from_host(rank, &[1, 3, 1], &[1.0, 0.5, 2.0])?;
                let op = Rc::new(AttentionBackward { mask, is_grouped: false, has_documents: false });
                let grads = Tensor::apply(op, &[&x, &x, &x, &saved, &lse, &x]);
                grads.iter().map(Tensor::to_host::<f64>).collect::<Result<Vec<_>>>()
            };
            assert_eq!(grad(Mask::Window(usize::MAX))?, grad(Mask::Causal)?);
            Ok(())
        })
        .unwrap();
    }
}
