//! Rotary position embedding (RoPE): pairs of channels rotated by angles proportional to the position.

use super::embedding::check_index;
use super::labels::{check_dim, dim_labels_with, invalid_argument};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, common_float};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::op::rope::ROPE;
use shardgrad_kernels::{DType, Scalar};
use smallvec::{SmallVec, smallvec};
use std::rc::Rc;

/// Rotary position embedding (RoPE): rotates pairs of channels by angles proportional to the position.
///
/// On tensors `[b, t, .., c]` of any float dtype: `a b .. x! -> a b .. x!`. With angle a = p f_i, h = c / 2 and
/// position p = first + the global index along t: y_i = x_i cos a - x_(i+h) sin a, y_(i+h) = x_(i+h) cos a + x_i sin a
/// for i < h. Channel i is paired with i + h, as in `transformers`. Channels must not be sharded; positions may be. With a
/// second argument `a b` (i64), its elements are the positions: `a b .. x!, a b -> a b .. x!`.
///
/// Linear. Gradient: dx = g rotated back. Source: Su et al., arXiv 2104.09864.
#[doc(alias = "rotary embedding")]
#[doc(alias = "RotaryEmbedding")]
#[doc(alias = "apply_rotary_pos_emb")]
#[derive(Debug)]
pub struct Rope {
    signature: String,
    frequencies: Rc<[f64]>,
    /// The position of index 0; `None` if positions are an argument.
    first: Option<usize>,
    /// 1 for the rotation, -1 for the inverse rotation.
    sign: f64,
}

impl Rope {
    /// The rotation of tensors of shape `shape`; `frequencies` holds f_i for each pair of channels, `first` is the position of index 0.
    ///
    /// # Errors
    /// `Kind::Shape` if there are fewer than three dims, or not twice as many channels as frequencies.
    pub fn of(shape: &[usize], frequencies: Rc<[f64]>, first: usize) -> Result<Rc<dyn Op>> {
        Rope::checked(shape, frequencies, Some(first))
    }

    /// [`Rope::of`] by positions that are an argument.
    ///
    /// # Errors
    /// As [`Rope::of`].
    pub fn by_positions(shape: &[usize], frequencies: Rc<[f64]>) -> Result<Rc<dyn Op>> {
        Rope::checked(shape, frequencies, None)
    }

    fn checked(shape: &[usize], frequencies: Rc<[f64]>, first: Option<usize>) -> Result<Rc<dyn Op>> {
        check_dim("rope", shape.len(), 2)?;
        let channels = shape[shape.len() - 1];
        if channels != 2 * frequencies.len() {
            let pairs = frequencies.len();
            return invalid_argument(format!(
                "rope: {channels} channels and {pairs} frequencies; the last dim must have two channels per frequency"
            ));
        }
        Ok(Rc::new(Rope::rotation(shape.len(), frequencies, first, 1.0)))
    }

    fn rotation(ndim: usize, frequencies: Rc<[f64]>, first: Option<usize>, sign: f64) -> Rope {
        let tensor = dim_labels_with(ndim, ndim - 1, "x!");
        let positions = if first.is_none() { ", a b" } else { "" };
        Rope { signature: format!("{tensor}{positions} -> {tensor}"), frequencies, first, sign }
    }
}

impl Op for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let (_, range) = local.label("b");
        let frequencies = self.frequencies.iter().map(|f| Scalar::Real(self.sign * f));
        let first = self.first.map_or(0, |first| first + range.start) as i64;
        let scalars: Vec<Scalar> = std::iter::once(Scalar::Int(first)).chain(frequencies).collect();
        let operands = local.contiguous(x)?;
        local.launch(&ROPE, &operands.iter().collect::<SmallVec<[&LocalTensor; 2]>>(), &scalars)
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: if self.first.is_none() { &[1] } else { &[] }, outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        inputs.iter().skip(1).try_for_each(|dtype| check_index(*dtype))?;
        Ok(smallvec![common_float(&inputs[..1])?])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let ndim = cx.output_layouts[0].ndim();
        let back: Rc<dyn Op> =
            Rc::new(Rope::rotation(ndim, self.frequencies.clone(), self.first, -self.sign));
        let g = cx.grad(0);
        let args: SmallVec<[&Tensor; 2]> = match self.first {
            Some(_) => smallvec![&g],
            None => smallvec![&g, cx.input(1)],
        };
        cx.cotangents(|_| Tensor::apply_one(back.clone(), &args))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], first| {
        let frequencies = (0..shape[shape.len() - 1] / 2).map(|i| 0.7f64.powi(i as i32)).collect();
        let op = Rope::of(shape, frequencies, first).expect("a shape of the case");
        Case::fixed_shape(op, vec![Input::real(shape)])
    };
    let by_positions = |shape: &[usize]| {
        let op = Rope::by_positions(shape, [0.7, 0.3].into()).expect("a shape of the case");
        Case::fixed_shape(op, vec![Input::real(shape), Input::index(&shape[..2], 9)])
    };
    vec![case(&[2, 5, 3, 4], 0), case(&[2, 3, 2, 3, 2], 3), case(&[1, 5, 4], 2), by_positions(&[2, 5, 3, 4])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::methods::value::Value;
    use approx::assert_abs_diff_eq;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_quarter_turns_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1, 3, 1, 2], &[1.0f64, 2.0, 1.0, 2.0, 1.0, 2.0])?;
            let quarter: Rc<[f64]> = [std::f64::consts::FRAC_PI_2].into();
            let near = |y: &Tensor, exact: [f64; 6]| {
                let y = y.to_host::<f64>().expect("the tensor is not sharded");
                assert_abs_diff_eq!(y[..], exact[..], epsilon = 1e-15);
            };
            near(&x.rope(&quarter, 0), [1.0, 2.0, -2.0, 1.0, -1.0, -2.0]);
            near(&x.rope(&quarter, 1), [-2.0, 1.0, -1.0, -2.0, 2.0, -1.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn sharded_positions_are_global() {
        World::run(Mesh::parse("a=3").unwrap(), |rank| {
            let values: Vec<f64> = (0..20).map(f64::from).collect();
            let rotated = |layout: &str| -> Result<Vec<f64>> {
                let layout = Layout::parse(layout, rank.mesh())?;
                Tensor::from_global(rank, &layout, &values)?.rope(&[1.0].into(), 4).to_f64()
            };
            assert_eq!(rotated("f64[1, 5@a, 2, 2]")?, rotated("f64[1, 5, 2, 2]")?);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn wrong_numbers_of_frequencies_are_refused() {
        assert!(Rope::of(&[1, 2, 3, 4], [1.0].into(), 0).is_err());
        assert!(Rope::of(&[1, 2, 3, 5], [1.0, 2.0].into(), 0).is_err());
        assert!(Rope::of(&[2, 2], [1.0].into(), 0).is_err());
    }
}
