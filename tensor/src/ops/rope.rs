//! Rotary position embedding (RoPE): pairs of channels rotated by angles proportional to the position.

use super::labels::{check_dim, dim_labels_with, invalid_argument};
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, Vjp};
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::rope::ROPE;
use std::rc::Rc;

/// Rotary position embedding (RoPE): rotates pairs of channels by angles proportional to the position.
///
/// On tensors `[b, t, .., c]` of any float dtype: `a b .. x! -> a b .. x!`. With angle a = p f_i, h = c / 2 and
/// position p = first + the global index along t: y_i = x_i cos a - x_(i+h) sin a, y_(i+h) = x_(i+h) cos a + x_i sin a
/// for i < h. Channel i is paired with i + h, as in `transformers`. Channels must not be sharded; positions may be.
///
/// Linear. Gradient: dx = g rotated back. Source: Su et al., arXiv 2104.09864.
#[doc(alias = "rotary embedding")]
#[doc(alias = "RotaryEmbedding")]
#[doc(alias = "apply_rotary_pos_emb")]
#[derive(Debug)]
pub struct Rope {
    signature: String,
    frequencies: Rc<[f64]>,
    first: usize,
    /// 1 for the rotation, -1 for the inverse rotation.
    sign: f64,
}

impl Rope {
    /// The rotation of tensors of shape `shape`; `frequencies` holds f_i for each pair of channels, `first` is the position of index 0.
    ///
    /// # Errors
    /// `Kind::Shape` if there are fewer than three dims, or not twice as many channels as frequencies.
    pub fn of(shape: &[usize], frequencies: Rc<[f64]>, first: usize) -> Result<Rc<dyn Op>> {
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

    fn rotation(ndim: usize, frequencies: Rc<[f64]>, first: usize, sign: f64) -> Rope {
        let tensor = dim_labels_with(ndim, ndim - 1, "x!");
        Rope { signature: format!("{tensor} -> {tensor}"), frequencies, first, sign }
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
        let scalars: Vec<Scalar> =
            std::iter::once(Scalar::Int((self.first + range.start) as i64)).chain(frequencies).collect();
        local.launch(&ROPE, &[&x[0].contiguous(local.rank)?], &scalars)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let ndim = cx.output_layouts[0].ndim();
        let back: Rc<dyn Op> =
            Rc::new(Rope::rotation(ndim, self.frequencies.clone(), self.first, -self.sign));
        cx.cotangents(|_| Tensor::apply_one(back.clone(), &[&cx.grad(0)]))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |shape: &[usize], first| {
        let frequencies = (0..shape[shape.len() - 1] / 2).map(|i| 0.7f64.powi(i as i32)).collect();
        let op = Rope::of(shape, frequencies, first).expect("a shape of the case");
        Case::fixed_shape(op, vec![Input::real(shape)])
    };
    vec![case(&[2, 5, 3, 4], 0), case(&[2, 3, 2, 3, 2], 3), case(&[1, 5, 4], 2)]
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
