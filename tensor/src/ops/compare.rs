//! Elementwise comparison x == y, x != y, x < y, x <= y, x > y or x >= y with a tensor or a number. Shapes broadcast as
//! in NumPy.

use super::broadcast::Broadcast;
use super::labels::common_dtype;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{DTypes, ForwardContext, LocalTensors, Op};
use crate::tensor::integer_range;
use shardgrad_dist::Result;
use shardgrad_kernels::op::compare_select::{EQ, GE, GT, LE, LT, NE};
use shardgrad_kernels::{DType, Kernel};
use smallvec::SmallVec;
use std::rc::Rc;

/// The relation that a comparison tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// x == y
    Eq,
    /// x != y
    Ne,
    /// x < y
    Lt,
    /// x <= y
    Le,
    /// x > y
    Gt,
    /// x >= y
    Ge,
}

impl Relation {
    fn kernel(self) -> &'static Kernel {
        match self {
            Relation::Eq => &EQ,
            Relation::Ne => &NE,
            Relation::Lt => &LT,
            Relation::Le => &LE,
            Relation::Gt => &GT,
            Relation::Ge => &GE,
        }
    }
}

/// Elementwise comparison of two tensors; the result is bool.
///
/// Shapes broadcast as for [`Add`](super::add::Add); the arguments have one dtype of any kind. With NaN every relation
/// but `!=` is false. Not differentiable, not linear: partial sums are reduced first.
#[doc(alias = "eq")]
#[doc(alias = "ne")]
#[doc(alias = "lt")]
#[doc(alias = "le")]
#[doc(alias = "gt")]
#[doc(alias = "ge")]
#[doc(alias = "equal")]
#[doc(alias = "less")]
#[doc(alias = "greater")]
#[derive(Debug)]
pub struct Compare {
    relation: Relation,
    shape: Broadcast,
}

/// Elementwise comparison with a number; the result is bool.
///
/// The number is rounded to the dtype of x if that is a float. Integers and bools (0 or 1) are compared with the exact
/// number, also if it is not an integer, outside the range of the dtype, or NaN.
#[derive(Debug)]
pub struct CompareScalar {
    /// The relation that is tested.
    pub relation: Relation,
    /// The number.
    pub number: f64,
}

impl Compare {
    /// The comparison of two tensors of these shapes.
    #[must_use]
    pub fn between(relation: Relation, first: &[usize], second: &[usize]) -> Rc<dyn Op> {
        Rc::new(Compare { relation, shape: Broadcast::between(first, second) })
    }
}

/// A comparison with a number, simplified for the dtype of the tensor.
enum ScalarComparison {
    /// The result is the same for every element.
    Constant(bool),
    /// A comparison with a number that the dtype represents, or that is rounded to the dtype.
    Compare(Relation, f64),
}

impl CompareScalar {
    fn simplify(&self, dtype: DType) -> ScalarComparison {
        use Relation::{Eq, Ge, Gt, Le, Lt, Ne};
        let (relation, number) = (self.relation, self.number);
        let Some(held) = integer_range(dtype) else { return ScalarComparison::Compare(relation, number) };
        if number.is_nan() {
            ScalarComparison::Constant(relation == Ne)
        } else if number < held.start {
            ScalarComparison::Constant(matches!(relation, Ne | Gt | Ge))
        } else if number >= held.end {
            ScalarComparison::Constant(matches!(relation, Ne | Lt | Le))
        } else if number.fract() == 0.0 {
            ScalarComparison::Compare(relation, number)
        } else {
            // The number lies between two integers: compare with the lower one.
            match relation {
                Eq | Ne => ScalarComparison::Constant(relation == Ne),
                Lt | Le => ScalarComparison::Compare(Le, number.floor()),
                Gt | Ge => ScalarComparison::Compare(Gt, number.floor()),
            }
        }
    }
}

impl Op for Compare {
    fn name(&self) -> &'static str {
        self.relation.kernel().name
    }

    fn signature(&self) -> &str {
        self.shape.signature()
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false, false]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        common_dtype(inputs)?;
        Ok(SmallVec::from_slice(&[DType::Bool]))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Broadcast::launch(local, self.relation.kernel(), x, &[])
    }
}

impl Op for CompareScalar {
    fn name(&self) -> &'static str {
        self.relation.kernel().name
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
        Ok(SmallVec::from_slice(&[DType::Bool]))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        match self.simplify(x[0].dtype) {
            ScalarComparison::Constant(truth) => {
                let truth = f64::from(u8::from(truth));
                Ok([LocalTensor::full(local.rank, DType::Bool, &x[0].view.shape, truth)?]
                    .into_iter()
                    .collect())
            }
            ScalarComparison::Compare(relation, number) => {
                let number = LocalTensor::full(local.rank, x[0].dtype, &[], number)?;
                Broadcast::launch(local, relation.kernel(), &[x[0], &number], &[])
            }
        }
    }
}

pub(super) fn cases() -> Vec<Case> {
    use Relation::{Eq, Ge, Gt, Le, Lt, Ne};
    let case = |relation, x: &[usize], y: &[usize]| {
        let op = Compare::between(relation, x, y);
        Case::fixed_shape(op, vec![Input::real(x), Input::real(y)]).exact()
    };
    let scalar = |relation| {
        Case::new(Rc::new(CompareScalar { relation, number: 0.25 }), vec![Input::real(&[5, 3])]).exact()
    };
    let indices = vec![Input::index(&[5, 3], 4), Input::index(&[3], 4)];
    vec![
        Case::fixed_shape(Compare::between(Eq, &[5, 3], &[3]), indices.clone()).exact(),
        Case::fixed_shape(Compare::between(Ne, &[5, 3], &[3]), indices).exact(),
        case(Lt, &[5, 3], &[5, 3]),
        case(Le, &[5, 1], &[3]),
        case(Gt, &[5], &[2, 5]),
        case(Ge, &[5, 3], &[]),
        scalar(Lt),
        scalar(Ge),
    ]
}

#[cfg(test)]
mod tests {
    use crate::methods::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn matches_values_computed_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[3], &[1.0f32, 2.0, f32::NAN])?;
            let y = Tensor::from_host(rank, &[3], &[2.0f32, 2.0, 2.0])?;
            for (z, right) in [
                (x.eq(&y), [0u8, 1, 0]),
                (x.ne(&y), [1, 0, 1]),
                (x.lt(&y), [1, 0, 0]),
                (x.le(&y), [1, 1, 0]),
                (x.gt(&y), [0, 0, 0]),
                (y.ge(&x), [1, 1, 0]),
                (x.gt_scalar(1.5), [0, 1, 0]),
                (x.ne_scalar(1.0), [0, 1, 1]),
            ] {
                assert_eq!((z.dtype(), z.to_host::<u8>()?.as_slice()), (DType::Bool, &right[..]));
            }
            Ok(())
        })
        .unwrap();
    }

    /// Every relation of integers with numbers agrees with exact arithmetic, also for fractions and numbers out of range.
    #[test]
    fn integers_are_compared_with_the_exact_number() {
        use super::{CompareScalar, Relation};
        use std::cmp::Ordering;
        let (low, high) = (i64::MIN as f64, -(i64::MIN as f64));
        let numbers = [
            f64::NAN,
            f64::NEG_INFINITY,
            -1e300,
            low,
            -1.0,
            -0.5,
            0.0,
            0.5,
            1.0,
            1.5,
            254.5,
            255.0,
            255.5,
            256.0,
            300.0,
            2f64.powi(53),
            high,
            1e300,
            f64::INFINITY,
        ];
        // Not every i64 is an f64: compare with floor(c) first, then with the fraction of c.
        let order = |x: i64, c: f64| match c {
            c if c.is_nan() => None,
            c if c >= high => Some(Ordering::Less),
            c if c < low => Some(Ordering::Greater),
            c => Some(x.cmp(&(c.floor() as i64)).then(if c > c.floor() {
                Ordering::Less
            } else {
                Ordering::Equal
            })),
        };
        let holds = |relation, order: Option<Ordering>| match relation {
            Relation::Eq => order.is_some_and(Ordering::is_eq),
            Relation::Ne => !order.is_some_and(Ordering::is_eq),
            Relation::Lt => order.is_some_and(Ordering::is_lt),
            Relation::Le => order.is_some_and(Ordering::is_le),
            Relation::Gt => order.is_some_and(Ordering::is_gt),
            Relation::Ge => order.is_some_and(Ordering::is_ge),
        };
        World::run(Mesh::single(), |rank| {
            let wide = [i64::MIN, -1, 0, 1, 2, 255, (1 << 53) + 1, i64::MAX];
            let bytes = [0u8, 1, 254, 255];
            let x = Tensor::from_host(rank, &[8], &wide)?;
            let y = Tensor::from_host(rank, &[4], &bytes)?;
            let z = y.lt_scalar(1.0);
            let truth = [1i64, 0, 0, 0];
            for relation in
                [Relation::Eq, Relation::Ne, Relation::Lt, Relation::Le, Relation::Gt, Relation::Ge]
            {
                for number in numbers {
                    let right =
                        |x: &[i64]| x.iter().map(|x| u8::from(holds(relation, order(*x, number)))).collect();
                    for (x, values) in [(&x, &wide[..]), (&y, &bytes.map(i64::from)), (&z, &truth)] {
                        let got =
                            Tensor::apply_one(CompareScalar { relation, number }, &[x]).to_host::<u8>()?;
                        let right: Vec<u8> = right(values);
                        assert_eq!(got, right, "{values:?} {relation:?} {number}");
                    }
                }
            }
            Ok(())
        })
        .unwrap();
    }
}
