//! y = the largest integer that is not above x.

use super::{Case, Input};
use crate::op::{Local, Op, Pieces};
use crate::piece::Piece;
use shardgrad_dist::Result;
use shardgrad_kernels::op::elementary::FLOOR;
use std::rc::Rc;

/// `..m -> ..m`, any float. Not differentiable: the slope is 0 wherever there is one.
#[derive(Debug)]
pub struct Floor;

impl Op for Floor {
    fn name(&self) -> &'static str {
        "floor"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false]
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        local.launch(&FLOOR, &[x[0]], &[])
    }
}

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new(Rc::new(Floor), vec![Input::real(&[5, 3])]).exact()]
}

#[cfg(test)]
mod tests {
    use crate::elementwise::Elementwise;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[4], &[-1.5f64, 1.5, 2.0, f64::INFINITY])?;
            let y = x.floor().to_host::<f64>()?;
            let near = |y: f64, e: f64| y == e || (y.is_nan() && e.is_nan()) || (y - e).abs() < 1e-14;
            assert!(y.iter().zip([-2.0, 1.0, 2.0, f64::INFINITY]).all(|(&y, e)| near(y, e)), "{y:?}");
            Ok(())
        })
        .unwrap();
    }
}
