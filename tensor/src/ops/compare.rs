//! z = whether x == y, x != y, x < y, x <= y, x > y, x >= y, elementwise; y is a tensor or a number. Shapes are aligned at
//! the last dim; missing dims and extents of 1 are repeated.

use super::broadcast::Broadcast;
use super::labels::one_dtype;
use super::{Case, Input};
use crate::op::{DTypes, Local, Op, Pieces};
use crate::piece::Piece;
use crate::tensor::integers;
use shardgrad_dist::Result;
use shardgrad_kernels::op::compare_select::{EQ, GE, GT, LE, LT, NE};
use shardgrad_kernels::{DType, Kernel};
use smallvec::SmallVec;
use std::rc::Rc;

/// Which comparison.
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

/// Shapes as [`Add`](super::add::Add), one dtype of any kind; the result is bool. Nothing but `!=` holds of not-a-number.
/// Not differentiable, not linear: pending sums are completed.
#[derive(Debug)]
pub struct Compare {
    relation: Relation,
    shape: Broadcast,
}

/// The same with a number in place of y: rounded to the dtype of x if that is a float; integers and truth values (0 or 1)
/// are compared with the number itself, be it no integer, beyond all of theirs or not a number.
#[derive(Debug)]
pub struct CompareScalar {
    /// Which comparison.
    pub relation: Relation,
    /// The number.
    pub number: f64,
}

impl Compare {
    /// The comparison of tensors of some shapes.
    #[must_use]
    pub fn between(relation: Relation, first: &[usize], second: &[usize]) -> Rc<dyn Op> {
        Rc::new(Compare { relation, shape: Broadcast::between(first, second) })
    }
}

/// What a comparison of a dtype's elements with a number comes to.
enum Answer {
    /// The same for every element.
    Always(bool),
    /// That of a comparison with a number that the dtype holds, or that is rounded to it.
    With(Relation, f64),
}

impl CompareScalar {
    fn answer(&self, dtype: DType) -> Answer {
        use Relation::{Eq, Ge, Gt, Le, Lt, Ne};
        let (relation, number) = (self.relation, self.number);
        let Some(held) = integers(dtype) else { return Answer::With(relation, number) };
        if number.is_nan() {
            Answer::Always(relation == Ne)
        } else if number < held.start {
            Answer::Always(matches!(relation, Ne | Gt | Ge))
        } else if number >= held.end {
            Answer::Always(matches!(relation, Ne | Lt | Le))
        } else if number.fract() == 0.0 {
            Answer::With(relation, number)
        } else {
            // Between two integers: the lower one divides those below from those above.
            match relation {
                Eq | Ne => Answer::Always(relation == Ne),
                Lt | Le => Answer::With(Le, number.floor()),
                Gt | Ge => Answer::With(Gt, number.floor()),
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
        one_dtype(inputs)?;
        Ok(SmallVec::from_slice(&[DType::Bool]))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
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

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        match self.answer(x[0].dtype) {
            Answer::Always(truth) => {
                let truth = f64::from(u8::from(truth));
                Ok([Piece::filled(local.rank, DType::Bool, &x[0].view.shape, truth)?].into_iter().collect())
            }
            Answer::With(relation, number) => {
                let number = Piece::filled(local.rank, x[0].dtype, &[], number)?;
                Broadcast::launch(local, relation.kernel(), &[x[0], &number], &[])
            }
        }
    }
}

pub(super) fn cases() -> Vec<Case> {
    use Relation::{Eq, Ge, Gt, Le, Lt, Ne};
    let case = |relation, x: &[usize], y: &[usize]| {
        let op = Compare::between(relation, x, y);
        Case::fixed(op, vec![Input::real(x), Input::real(y)]).exact()
    };
    let scalar = |relation| {
        Case::new(Rc::new(CompareScalar { relation, number: 0.25 }), vec![Input::real(&[5, 3])]).exact()
    };
    let indices = vec![Input::index(&[5, 3], 4), Input::index(&[3], 4)];
    vec![
        Case::fixed(Compare::between(Eq, &[5, 3], &[3]), indices.clone()).exact(),
        Case::fixed(Compare::between(Ne, &[5, 3], &[3]), indices).exact(),
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
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::DType;

    #[test]
    fn by_hand() {
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

    /// Each relation of integers with numbers, those that are no integers and those that lie beyond them included, as in
    /// exact arithmetic.
    #[test]
    fn integers_are_compared_with_the_number_itself() {
        use super::{CompareScalar, Relation};
        use std::cmp::Ordering;
        use std::rc::Rc;
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
        // Not every i64 is an f64: the integer below c decides, then what c has beyond it.
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
                        let got = Tensor::result(Rc::new(CompareScalar { relation, number }), &[x])
                            .to_host::<u8>()?;
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
