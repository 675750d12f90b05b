//! Dropout: y_i = x_i / (1 - p) where a uniform random number in 0..1 is at least p, else 0.

use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::op::{Cotangents, ForwardContext, LocalTensors, Op, Vjp};
use crate::tensor::{Tensor, index_scalars};
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::random::DROPOUT;
use std::rc::Rc;

/// Dropout: zeroes each element with probability p and scales the others by 1 / (1 - p); `..m -> ..m`.
///
/// Any float dtype. Linear. Gradient: dx = the same op on g, with the same random numbers.
///
/// The random numbers are counter-based: a function of key, stream and global index of the element, so they depend
/// neither on the layout nor on the number of ranks. Dim 0 counts rows of the global batch from `first_row` on, so they
/// do not depend on microbatches either.
#[derive(Clone, Debug)]
pub struct Dropout {
    /// p, the probability of an element to become zero, 0 to 1.
    pub p: f64,
    /// Key of the random numbers: seed, name and step mixed into one word.
    pub key: u64,
    /// Stream of that key.
    pub stream: u64,
    /// Row of the global batch that is index 0 of dim 0.
    pub first_row: u64,
    /// Whether stream and row belong to a training step: a replay for another step replaces them, and inference drops the op.
    pub is_step_seeded: bool,
}

impl Dropout {
    /// Dropout with the random numbers of a key and a stream.
    ///
    /// # Errors
    /// `Kind::Config` if `p` is not in `0.0..=1.0`.
    pub fn of(p: f64, key: u64, stream: u64, first_row: u64) -> Result<Rc<dyn Op>> {
        Ok(Rc::new(Dropout { p, key, stream, first_row, is_step_seeded: false }.checked()?))
    }

    /// Dropout with the random numbers of a key in a training step.
    ///
    /// # Errors
    /// As [`Dropout::of`].
    pub fn for_step(p: f64, key: u64, step: u64, first_row: u64) -> Result<Rc<dyn Op>> {
        Ok(Rc::new(Dropout { p, key, stream: step, first_row, is_step_seeded: true }.checked()?))
    }

    fn checked(self) -> Result<Dropout> {
        let p = self.p;
        if (0.0..=1.0).contains(&p) {
            return Ok(self);
        }
        Err(Error::new(Kind::Config, format!("dropout: p = {p} is not a probability"))
            .detail("help", "p is the probability of an element to become zero, from 0 to 1"))
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

    fn reseed(&self, step: u64, first_row: u64) -> Option<Rc<dyn Op>> {
        self.is_step_seeded
            .then(|| Rc::new(Dropout { stream: step, first_row, ..self.clone() }) as Rc<dyn Op>)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let mut scalars =
            vec![Scalar::Real(self.p), Scalar::Int(self.key as i64), Scalar::Int(self.stream as i64)];
        let mut indices = index_scalars(&local.inference.outputs[0], local.rank);
        if let Some(start) = indices.get_mut(1) {
            *start = Scalar::Int(start.int() + self.first_row as i64);
        }
        scalars.append(&mut indices);
        local.launch(&DROPOUT, &[&x[0].contiguous(local.rank)?], &scalars)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op: Rc<dyn Op> = Rc::new(self.clone());
        cx.cotangents(|_| Tensor::apply(op.clone(), &[&cx.grad(0)]).remove(0))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |p, first_row, input| {
        let op = Dropout { p, key: 11, stream: 3, first_row, is_step_seeded: false };
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
    use crate::methods::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn random_numbers_depend_on_the_row_of_the_global_batch() {
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
    fn only_step_seeded_dropout_is_reseeded_for_another_step() {
        assert!(Dropout::of(0.5, 7, 1, 0).unwrap().reseed(2, 3).is_none());
        let again = Dropout::for_step(0.5, 7, 1, 0).unwrap().reseed(2, 3).unwrap();
        let other = Dropout { p: 0.5, key: 7, stream: 2, first_row: 3, is_step_seeded: true };
        assert_eq!(format!("{again:?}"), format!("{other:?}"));
    }

    #[test]
    fn values_of_p_outside_0_to_1_are_refused() {
        let dropped = |p| {
            World::run(Mesh::single(), |rank| {
                Tensor::from_host(rank, &[2], &[1.0f64, f64::INFINITY])?.dropout(p, 7, 1, 0).to_host::<f64>()
            })
        };
        for p in [-0.1, 1.5, f64::NAN, f64::INFINITY] {
            let error = dropped(p).unwrap_err();
            assert_eq!(error.kind(), Kind::Config, "{error}");
            assert_eq!(error.message(), format!("dropout: p = {p} is not a probability"));
            assert!(error.details().iter().any(|d| d.0 == "help"), "{error}");
            assert!(error.site().is_some_and(|s| s.file().ends_with("dropout.rs")), "{error}");
        }
        assert_eq!(dropped(0.0).unwrap()[0], [1.0, f64::INFINITY]);
        assert_eq!(dropped(1.0).unwrap()[0], [0.0, 0.0]);
    }
}
