//! y_i = x_i / (1 - p) where a random number in 0..1 is at least p, else 0.

use super::{Case, Input};
use crate::op::{Cotangents, Local, Op, Pieces, Vjp};
use crate::piece::Piece;
use crate::tensor::{Tensor, box_scalars};
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::random::DROPOUT;
use std::rc::Rc;

/// `..m -> ..m`, any float. Linear. dx = the same op on g.
///
/// The random number is a function of the key, the stream and the global index of the element, so neither the layout
/// nor the number of ranks matters. Dim 0 counts rows of the global batch from `first_row` on, so neither do microbatches.
#[derive(Clone, Debug)]
pub struct Dropout {
    /// The share of elements that become zero, 0 to 1.
    pub p: f64,
    /// Which random numbers: seed, name, step in one word.
    pub key: u64,
    /// Which stream of that key.
    pub stream: u64,
    /// Row of the global batch with which dim 0 begins.
    pub first_row: u64,
    /// Whether stream and row are those of a step, which a replay of another step has others for, and inference none.
    pub of_step: bool,
}

impl Dropout {
    /// The op for a probability, by the random numbers of a key and a stream.
    ///
    /// # Errors
    /// `Kind::Config` if `p` is not in 0..=1.
    pub fn of(p: f64, key: u64, stream: u64, first_row: u64) -> Result<Rc<dyn Op>> {
        Ok(Rc::new(Dropout { p, key, stream, first_row, of_step: false }.checked()?))
    }

    /// The op for a probability, by the random numbers that a key has in a step.
    ///
    /// # Errors
    /// As [`Dropout::of`].
    pub fn of_step(p: f64, key: u64, step: u64, first_row: u64) -> Result<Rc<dyn Op>> {
        Ok(Rc::new(Dropout { p, key, stream: step, first_row, of_step: true }.checked()?))
    }

    fn checked(self) -> Result<Dropout> {
        let p = self.p;
        if (0.0..=1.0).contains(&p) {
            return Ok(self);
        }
        Err(Error::new(Kind::Config, format!("dropout: {p} is no probability"))
            .detail("help", "give the share of elements that become zero, from 0 to 1"))
    }
}

impl Op for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn redrawn(&self, step: u64, first_row: u64) -> Option<Rc<dyn Op>> {
        self.of_step.then(|| Rc::new(Dropout { stream: step, first_row, ..self.clone() }) as Rc<dyn Op>)
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let mut scalars =
            vec![Scalar::Real(self.p), Scalar::Int(self.key as i64), Scalar::Int(self.stream as i64)];
        let mut places = box_scalars(&local.inference.outputs[0], local.rank);
        if let Some(start) = places.get_mut(1) {
            *start = Scalar::Int(start.int() + self.first_row as i64);
        }
        scalars.append(&mut places);
        local.launch(&DROPOUT, &[&x[0].contiguous(local.rank)?], &scalars)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op: Rc<dyn Op> = Rc::new(self.clone());
        cx.each(|_| Tensor::results(op.clone(), &[&cx.grad(0)]).remove(0))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |p, first_row, input| {
        let op = Dropout { p, key: 11, stream: 3, first_row, of_step: false };
        Case::new(Rc::new(op), vec![input]).exact()
    };
    vec![
        case(0.5, 0, Input::real(&[5, 8])),
        case(0.5, 6, Input::real(&[2, 5, 3])),
        case(0.5, 0, Input::real(&[])),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn rows_are_counted_in_the_global_batch() {
        World::run(Mesh::single(), |rank| {
            let ones = |n: usize| Tensor::from_host(rank, &[n, 4], &vec![1.0f64; 4 * n]);
            let whole = ones(6)?.dropout(0.25, 7, 1, 0).to_host::<f64>()?;
            assert!(whole.iter().all(|y| *y == 0.0 || *y == 1.0 / 0.75));
            assert!(whole.contains(&0.0) && whole.contains(&(1.0 / 0.75)), "{whole:?}");
            assert_eq!(ones(4)?.dropout(0.25, 7, 1, 2).to_host::<f64>()?, whole[8..]);
            assert_ne!(ones(6)?.dropout(0.25, 8, 1, 0).to_host::<f64>()?, whole, "another key");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn only_what_a_step_has_drawn_is_drawn_again() {
        assert!(Dropout::of(0.5, 7, 1, 0).unwrap().redrawn(2, 3).is_none());
        let again = Dropout::of_step(0.5, 7, 1, 0).unwrap().redrawn(2, 3).unwrap();
        let other = Dropout { p: 0.5, key: 7, stream: 2, first_row: 3, of_step: true };
        assert_eq!(format!("{again:?}"), format!("{other:?}"));
    }

    #[test]
    fn what_is_no_probability_is_refused() {
        let dropped = |p| {
            World::run(Mesh::single(), |rank| {
                Tensor::from_host(rank, &[2], &[1.0f64, f64::INFINITY])?.dropout(p, 7, 1, 0).to_host::<f64>()
            })
        };
        for p in [-0.1, 1.5, f64::NAN, f64::INFINITY] {
            let error = dropped(p).unwrap_err();
            assert_eq!(error.kind(), Kind::Config, "{error}");
            assert_eq!(error.message(), format!("dropout: {p} is no probability"));
            assert!(error.details().iter().any(|d| d.0 == "help"), "{error}");
            assert!(error.site().is_some_and(|s| s.file().ends_with("dropout.rs")), "{error}");
        }
        assert_eq!(dropped(0.0).unwrap()[0], [1.0, f64::INFINITY]);
        assert_eq!(dropped(1.0).unwrap()[0], [0.0, 0.0]);
    }
}
