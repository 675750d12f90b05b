//! Elementwise sum of two tensors: z = x + y. Shapes broadcast as in NumPy.

use super::broadcast::Broadcast;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, PlanKey, Vjp};
use shardgrad_dist::Result;
use shardgrad_kernels::op::binary::ADD;
use std::rc::Rc;

/// Elementwise sum of two tensors: z = x + y.
///
/// Shapes are aligned at the last dim; missing leading dims and dims of extent 1 are broadcast, as in NumPy. One float
/// dtype. Signature: `..m, ..m -> ..m`, `..m d, d -> ..m d` (a bias), `..m d e, d e -> ..m d e`, ...
///
/// Gradient: dx = g, dy = g; summed over the broadcast dims of an argument. Linear in both jointly: partial sums of
/// both stay partial.
#[derive(Debug)]
pub struct Add {
    shape: Broadcast,
    /// Whether partial sums of both arguments stay partial.
    is_linear: bool,
}

/// The type in plan keys of an [`Add`] that is not linear.
struct CompleteAdd;

impl Add {
    /// The sum of two tensors of these shapes.
    #[must_use]
    pub fn between(first: &[usize], second: &[usize]) -> Add {
        Add { shape: Broadcast::between(first, second), is_linear: true }
    }

    /// The sum of a residual and the result of a layer, of these shapes. Partial sums of both are completed: the norm before the
    /// layer has completed the residual already, and the next one reads the sum.
    pub(super) fn residual(first: &[usize], second: &[usize]) -> Add {
        Add { is_linear: false, ..Add::between(first, second) }
    }

    /// The same from the numbers of dims: dims of extent 1 are not broadcast.
    #[must_use]
    pub fn of(first: usize, second: usize) -> Rc<dyn Op> {
        Rc::new(Add { shape: Broadcast::of(first, second), is_linear: true })
    }
}

impl Op for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn plan_key(&self) -> Option<PlanKey> {
        if self.is_linear { self.shape.plan_key::<Add>() } else { self.shape.plan_key::<CompleteAdd>() }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        if self.is_linear { &[&[0, 1]] } else { &[] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Broadcast::launch(local, &ADD, x, &[])
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| self.shape.sum_to_argument(cx, cx.grad(0), i))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let real = Input::real;
    vec![
        Case::new(Add::of(2, 2), vec![real(&[5, 3]), real(&[5, 3])]).exact(),
        Case::new(Add::of(2, 1), vec![real(&[5, 8]), real(&[8])]).exact(),
        Case::new(Add::of(3, 2), vec![real(&[2, 5, 3]), real(&[5, 3])]).exact(),
        Case::new(Add::of(1, 3), vec![real(&[5]), real(&[2, 3, 5])]).exact(),
        Case::new(Add::of(1, 0), vec![real(&[5]), real(&[])]).exact(),
        Case::fixed_shape(Rc::new(Add::between(&[5, 1], &[3])), vec![real(&[5, 1]), real(&[3])]).exact(),
        Case::fixed_shape(Rc::new(Add::between(&[1, 3], &[5, 1])), vec![real(&[1, 3]), real(&[5, 1])])
            .exact(),
        Case::fixed_shape(Rc::new(Add::between(&[2, 5, 3], &[5, 1])), vec![real(&[2, 5, 3]), real(&[5, 1])])
            .exact(),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Kind, Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn matches_sums_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
            let b = Tensor::from_host(rank, &[2], &[10.0f32, 20.0])?;
            assert_eq!(x.add(&x).to_host::<f32>()?, [2.0, 4.0, 6.0, 8.0]);
            assert_eq!(x.add(&b).to_host::<f32>()?, [11.0, 22.0, 13.0, 24.0]);
            assert_eq!(b.add(&x).to_host::<f32>()?, [11.0, 22.0, 13.0, 24.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn different_or_integer_dtypes_are_refused() {
        let refused = |other: DType| {
            World::run(Mesh::single(), |rank| {
                let x = Tensor::from_host(rank, &[1], &[1.0f32])?;
                let _ = x.add(&Tensor::zeros(rank, &x.layout().with_dtype(other))?);
                Ok(())
            })
            .unwrap_err()
        };
        let two = refused(DType::F64).to_string();
        assert!(
            two.contains("add: the arguments have the dtypes f32 and f64")
                && two.contains("cast one of them"),
            "{two}"
        );
        assert!(refused(DType::I64).to_string().contains("add: argument 1 has the dtype i64"));
        assert_eq!(refused(DType::I64).kind(), Kind::DType);
    }
}
