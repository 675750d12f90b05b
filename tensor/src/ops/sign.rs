//! y = -1, 0 or 1: the sign of x.

use super::{Case, Input};
use crate::op::{Local, Op, Pieces};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::SIGN;
use std::rc::Rc;

/// `..m -> ..m`, any float. Not differentiable. Zeros and not-a-number are their own sign.
#[derive(Debug)]
pub struct Sign;

impl Op for Sign {
    fn name(&self) -> &'static str {
        "sign"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&SIGN, &[x[0]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Sign), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[-2.5f64, 0.0, 3.0, f64::NAN])?;
            let y = x.sign().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(y.iter().zip([-1.0, 0.0, 1.0, f64::NAN]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
