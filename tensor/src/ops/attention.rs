//! o_i = sum_j p_ij v_j with p_ij = exp(scale q_i k_j) / sum over the visible j, scale = 1 / sqrt(channels).
//!
//! If causal, query i of t sees the keys j <= i + s - t of s: the last query sees all keys, whether it stands at the end
//! of the same sequence (t = s) or continues one (t < s). With a window of w, the last w of these keys only.

use super::{Case, Input};
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::op::attention::{BACKWARD, BACKWARD_JOINED, FORWARD};
use shardgrad_kernels::{DType, Kernel, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// `b t h c!, b s! h c!, b s! h c! -> b t h c!` on q, k and v, or `b t g r c!, b s! g c!, b s! g c! -> b t g r c!` where r query
/// heads share each of g key heads. One float dtype. The logarithms of the denominators (`b t h`, in the accumulator)
/// are kept for the backward; no t by s matrix is. Keys and channels must be whole; queries may be split.
///
/// With dp_ij = g_i v_j and D_i = sum_c g_i o_i: dv_j = sum_i p_ij g_i, dq_i = scale sum_j p_ij (dp_ij - D_i) k_j,
/// dk_j = scale sum_i p_ij (dp_ij - D_i) q_i; dk and dv are pending over what splits t or r.
#[derive(Debug)]
pub struct Attention {
    mask: Mask,
    grouped: bool,
}

/// All three cotangents, linear in g.
#[derive(Debug)]
struct AttentionBackward {
    mask: Mask,
    grouped: bool,
}

/// `b t! p! h c! -> b t! h c!` on one tensor whose p = 3 parts are the q, k and v of [`Attention`]. Its cotangent is one tensor too, as
/// the product that made it wants it; were they taken apart, it would have to be joined of three. Queries and keys must be whole.
#[derive(Debug)]
pub struct JoinedAttention {
    mask: Mask,
}

/// The cotangent, linear in g.
#[derive(Debug)]
struct JoinedAttentionBackward {
    mask: Mask,
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mask {
    /// All.
    None,
    /// Its own and those before it.
    Causal,
    /// Of these the last ones, so many or all that there are; at least one.
    Window(usize),
}

impl Attention {
    /// Attention of q with 4 dims (batch, query, head, channel) or 5 (batch, query, group, head, channel).
    #[must_use]
    pub(crate) fn of(ndim: usize, mask: Mask) -> Rc<dyn Op> {
        Rc::new(Attention { mask, grouped: ndim == 5 })
    }
}

impl JoinedAttention {
    /// Attention of a tensor `[b, t, 3, h, c]`; if causal, a query sees its own key and those before it.
    ///
    /// # Errors
    /// `Kind::Shape` for another shape.
    pub fn of(shape: &[usize], causal: bool) -> Result<Rc<dyn Op>> {
        if !matches!(shape, [_, _, 3, _, _]) {
            let text = format!("joined attention of {shape:?}, which is not batch, token, 3, head, channel");
            return Err(Error::new(Kind::Shape, text));
        }
        Ok(Rc::new(JoinedAttention { mask: if causal { Mask::Causal } else { Mask::None } }))
    }
}

/// The views of q, k and v.
fn parts(qkv: &Piece) -> [Piece; 3] {
    [0, 1, 2].map(|i| qkv.viewed(qkv.view.select(2, i)))
}

/// Runs a kernel that knows five dims only: tensors of query heads without groups get r = 1 heads each.
fn launch_grouped(
    local: &Local<'_>,
    kernel: &Kernel,
    x: &[&Piece],
    mask: Mask,
    per_query: impl Fn(usize) -> bool,
    written_per_query: impl Fn(usize) -> bool,
) -> Result<Pieces> {
    let grouped = x[0].view.ndim() == 5;
    let with_r = |piece: &Piece| piece.viewed(piece.view.unsqueeze(3));
    let inputs: SmallVec<[Piece; 6]> = x
        .iter()
        .enumerate()
        .map(|(i, p)| if grouped || !per_query(i) { (*p).clone() } else { with_r(p) })
        .collect();
    let inputs: SmallVec<[&Piece; 6]> = inputs.iter().collect();
    let mut outputs: Pieces =
        (0..local.inference.outputs.len()).map(|i| local.output(i)).collect::<Result<_>>()?;
    let views: Vec<_> = outputs.iter().map(|p| p.view.clone()).collect();
    for (i, piece) in outputs.iter_mut().enumerate() {
        if !grouped && written_per_query(i) {
            piece.view = piece.view.unsqueeze(3).into();
        }
    }
    // Keys are whole.
    let ((t, range), s, (c, _)) = (local.label("t"), x[1].view.shape[1], local.label("c"));
    let first = range.start as i64 + s as i64 - t as i64;
    let (causal, window) = match mask {
        Mask::None => (0, 0),
        Mask::Causal => (1, 0),
        // More keys than there are hide none, and may be more than an i64 holds.
        Mask::Window(keys) => (1, keys.min(s) as i64),
    };
    let [causal, first, window] = [causal, first, window].map(Scalar::Int);
    let scalars = [Scalar::Real(1.0 / (c as f64).sqrt()), causal, first, window];
    launch(local.rank, kernel, &inputs, &mut outputs.iter_mut().collect::<Vec<&mut Piece>>(), &scalars)?;
    for (piece, view) in outputs.iter_mut().zip(views) {
        piece.view = view;
    }
    Ok(outputs)
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn signature(&self) -> &str {
        if self.grouped {
            "b t g r c!, b s! g c!, b s! g c! -> b t g r c!, b t g r"
        } else {
            "b t h c!, b s! h c!, b s! h c! -> b t h c!, b t h"
        }
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1, 2], outputs: &[0, 1] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        Ok(SmallVec::from_slice(&[dtype, dtype.accumulator()]))
    }

    fn volume(&self, tuples: usize, _: &[&Layout], _: &[Layout]) -> usize {
        tuples
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        launch_grouped(local, &FORWARD, x, self.mask, |i| i == 0, |_| true)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = Rc::new(AttentionBackward { mask: self.mask, grouped: self.grouped });
        let args = [cx.input(0), cx.input(1), cx.input(2), cx.output(0), cx.output(1), &cx.grad(0)];
        let grads = Tensor::results(op, &args);
        cx.each(|i| grads[i].clone())
    }
}

impl Op for AttentionBackward {
    fn name(&self) -> &'static str {
        "attention_backward"
    }

    fn signature(&self) -> &str {
        if self.grouped {
            "b t g r c!, b s! g c!, b s! g c!, b t g r c!, b t g r, b t g r c! -> b t g r c!, b s! g c!, b s! g c!"
        } else {
            "b t h c!, b s! h c!, b s! h c!, b t h c!, b t h, b t h c! -> b t h c!, b s! h c!, b s! h c!"
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[5]]
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(inputs[0], num_outputs))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        launch_grouped(local, &BACKWARD, x, self.mask, |i| i != 1 && i != 2, |i| i == 0)
    }
}

impl Op for JoinedAttention {
    fn name(&self) -> &'static str {
        "joined_attention"
    }

    fn signature(&self) -> &str {
        "b t! p! h c! -> b t! h c!, b t! h"
    }

    fn volume(&self, _: usize, args: &[&Layout], outputs: &[Layout]) -> usize {
        // Keys are not among the labels.
        outputs.first().map_or(0, Layout::numel).saturating_mul(args[0].extent(1))
    }

    fn num_saved(&self) -> usize {
        1
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0], outputs: &[0, 1] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        Ok(SmallVec::from_slice(&[dtype, dtype.accumulator()]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let [q, k, v] = parts(x[0]);
        launch_grouped(local, &FORWARD, &[&q, &k, &v], self.mask, |i| i == 0, |_| true)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = Rc::new(JoinedAttentionBackward { mask: self.mask });
        let args = [cx.input(0), cx.output(0), cx.output(1), &cx.grad(0)];
        cx.each(|_| Tensor::results(op.clone(), &args).swap_remove(0))
    }
}

impl Op for JoinedAttentionBackward {
    fn name(&self) -> &'static str {
        "joined_attention_backward"
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

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let [q, k, v] = parts(x[0]);
        let args = [&q, &k, &v, x[1], x[2], x[3]];
        launch_grouped(local, &BACKWARD_JOINED, &args, self.mask, |i| i != 1 && i != 2, |_| false)
    }
}

pub(super) fn cases() -> Vec<Case> {
    let joined = |causal, shape: &[usize]| {
        let op = JoinedAttention::of(shape, causal).expect("the shape of a case");
        Case::fixed(op, vec![Input::real(shape)])
    };
    let case = |mask, q: &[usize], k: &[usize]| {
        let inputs = vec![Input::real(q), Input::real(k), Input::real(k)];
        Case::new(Attention::of(q.len(), mask), inputs)
    };
    // Scores of one query are near each other and above 1000.
    let far = |mask, q: &[usize], k: &[usize]| {
        let inputs = vec![Input::offset(q, 8.0), Input::offset(k, 100.0), Input::real(k)];
        Case::new(Attention::of(q.len(), mask), inputs)
    };
    vec![
        case(Mask::Causal, &[2, 5, 3, 2], &[2, 5, 3, 2]),
        case(Mask::None, &[2, 3, 2, 3], &[2, 5, 2, 3]),
        case(Mask::Causal, &[2, 3, 2, 3, 2], &[2, 4, 2, 2]),
        case(Mask::Window(2), &[2, 4, 2, 1, 2], &[2, 5, 2, 2]),
        joined(true, &[2, 4, 3, 3, 2]),
        joined(false, &[3, 3, 3, 2, 2]),
        far(Mask::None, &[2, 3, 2, 3], &[2, 5, 2, 3]),
        far(Mask::Causal, &[2, 3, 2, 3, 2], &[2, 4, 2, 2]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn two_queries_by_hand() {
        World::run(Mesh::single(), |rank| {
            // One head of one channel: scores are products. Query 1 sees both keys with weights 1/4 and 3/4.
            let tensor = |x: &[f64]| Tensor::from_host(rank, &[1, 2, 1, 1], x);
            let (q, k, v) = (tensor(&[1.0, 1.0])?, tensor(&[0.0, 3f64.ln()])?, tensor(&[4.0, 8.0])?);
            let causal = q.attention(&k, &v, true).to_host::<f64>()?;
            let full = q.attention(&k, &v, false).to_host::<f64>()?;
            assert!(causal.iter().zip([4.0, 7.0]).all(|(o, e)| (o - e).abs() < 1e-12), "{causal:?}");
            assert!(full.iter().zip([7.0, 7.0]).all(|(o, e)| (o - e).abs() < 1e-12), "{full:?}");
            let last = q.slice(1, 1..2).attention(&k, &v, true).to_host::<f64>()?;
            assert!(
                (last[0] - 7.0).abs() < 1e-12,
                "the one query that continues two keys sees both: {last:?}"
            );
            let own = q.window_attention(&k, &v, 1).to_host::<f64>()?;
            assert!(own.iter().zip([4.0, 8.0]).all(|(o, e)| (o - e).abs() < 1e-12), "{own:?}");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn one_tensor_or_its_parts_give_the_same() {
        World::run(Mesh::single(), |rank| {
            let numbers: Vec<f32> =
                (0..2 * 5 * 3 * 2 * 4).map(|i| (i * 37 % 19) as f32 / 8.0 - 1.0).collect();
            let qkv = Tensor::from_host(rank, &[2, 5, 3, 2, 4], &numbers)?;
            let [q, k, v] = [0, 1, 2].map(|i| qkv.select(2, i));
            for causal in [true, false] {
                let joined = Tensor::apply_one(JoinedAttention::of(&qkv.shape(), causal)?, &[&qkv]);
                assert_eq!(joined.to_host::<f32>()?, q.attention(&k, &v, causal).to_host::<f32>()?);
            }
            assert_eq!(JoinedAttention::of(&[2, 5, 2, 2, 4], true).unwrap_err().kind(), Kind::Shape);
            let volume = |op: Rc<dyn Op>, args: &[&Tensor]| {
                let args: Vec<&Layout> = args.iter().map(|x| x.layout()).collect();
                crate::op::volume(&*op, rank, &args, &[q.layout().clone()])
            };
            let apart = volume(Attention::of(4, Mask::None), &[&q, &k, &v]);
            assert_eq!(volume(JoinedAttention::of(&qkv.shape(), false)?, &[&qkv]), apart);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_window_without_a_key_is_refused() {
        let error = World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1, 2, 1, 1], &[0.0, 1.0])?;
            let _ = x.window_attention(&x, &x, 0);
            Ok(())
        });
        assert!(error.unwrap_err().message().contains("a window of 0 keys"));
    }

    #[test]
    fn a_window_of_all_keys_hides_none() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1, 3, 1, 1], &[0.5, -1.0, 2.0])?;
            let causal = x.attention(&x, &x, true).to_host::<f64>()?;
            for keys in [3, 4, i64::MAX as usize - 1, i64::MAX as usize, 1 << 63, usize::MAX] {
                assert_eq!(x.window_attention(&x, &x, keys).to_host::<f64>()?, causal, "{keys}");
            }
            let grad = |mask| {
                let saved = Tensor::results(Attention::of(4, mask), &[&x, &x, &x]).remove(0);
                let lse = Tensor::from_host(rank, &[1, 3, 1], &[1.0, 0.5, 2.0])?;
                let op = Rc::new(AttentionBackward { mask, grouped: false });
                let grads = Tensor::results(op, &[&x, &x, &x, &saved, &lse, &x]);
                grads.iter().map(Tensor::to_host::<f64>).collect::<Result<Vec<_>>>()
            };
            assert_eq!(grad(Mask::Window(usize::MAX))?, grad(Mask::Causal)?);
            Ok(())
        })
        .unwrap();
    }
}
