//! Functions composed of several ops: values and gradients on every layout equal those of one rank, and gradients equal finite
//! differences.

use crate::support::run;
use approx::relative_eq;
use shardgrad_autograd::{Tape, Var};
use shardgrad_tensor::ops::Input;
use shardgrad_tensor::{DType, Elementwise, Error, Kind, Layout, Rank, Reduction, Result, Tensor, Value};
use shardgrad_testing::GlobalTensor;
use shardgrad_testing::op_check::{find_disagreement, layouts};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A name, a function, the shape of its argument, and whether it accepts every layout.
type Subject = (&'static str, fn(&Var) -> Var, &'static [usize], bool);

const SUBJECTS: &[Subject] = &[
    ("mish", |x| x.mish(), &[5, 3], true),
    ("hard_swish", |x| x.scale(2.0).hard_swish(), &[5, 3], true),
    ("var", |x| x.var(&[1], 1.0), &[3, 5], true),
    ("var of all", |x| x.var(&[0, 1], 0.0), &[3, 5], true),
    ("std", |x| x.std(&[0], 1.0), &[5, 3], true),
    ("1-norm", |x| x.norm(&[1], 1.0), &[3, 5], true),
    ("2-norm", |x| x.norm(&[1], 2.0), &[3, 5], true),
    ("3-norm", |x| x.norm(&[0], 3.0), &[3, 5], true),
    ("norm of the largest", |x| x.norm(&[0], f64::INFINITY), &[3, 5], true),
    ("log_softmax", |x| x.log_softmax(1), &[3, 5], true),
    ("log_softmax along rows", |x| x.log_softmax(0), &[3, 5], true),
    ("softmax_dim", |x| x.softmax_dim(0), &[4, 3], false),
    ("group_norm", group_norm, &[2, 4, 3], false),
    ("unbind and stack of 17 rows", |x| joined(&x.unbind(0), Var::stack), &[17, 2], false),
    ("concat of 18 slices", |x| joined(&overlapping_pairs(x), Var::concat), &[19, 2], false),
];

/// Joins values along dim 0, the last first.
fn joined(parts: &[Var], join: fn(&[&Var], usize) -> Var) -> Var {
    join(&parts.iter().rev().collect::<Vec<&Var>>(), 0)
}

/// Each row of x with the next one.
fn overlapping_pairs(x: &Var) -> Vec<Var> {
    (0..x.shape()[0] - 1).map(|row| x.slice(0, row..row + 2)).collect()
}

fn group_norm(x: &Var) -> Var {
    let row = |seed| {
        let drawn = GlobalTensor::draw(&Input::real(&[4]), seed);
        x.constant(Tensor::from_host(x.rank(), &[4], &drawn.data).expect("a small tensor"))
    };
    x.group_norm(2, &row(5), &row(6), 0.25)
}

/// The weighted sum of a function's results, and its gradient.
fn gradient(rank: &Rank, subject: &Subject, x: &GlobalTensor, layout: &Layout) -> Result<(f64, Vec<f64>)> {
    let tape = Tape::new(rank);
    let y = (subject.1)(&tape.leaf(7, &x.distribute(rank, layout)?));
    let weights = GlobalTensor::draw(&Input::real(&y.shape()), 99);
    let loss = y.mul(&tape.constant(Tensor::from_host(rank, &weights.shape, &weights.data)?)).sum();
    loss.backward()?;
    let gradient = tape.gradients().remove(&7).expect("the leaf has a gradient");
    assert_eq!(*gradient.layout(), layout.dual(), "{}", subject.0);
    Ok((loss.item()?, gradient.to_f64()?))
}

fn unsharded(rank: &Rank, subject: &Subject) -> Layout {
    Layout::invariant(rank.mesh(), DType::F64, subject.2)
}

/// Value and gradient on one rank.
fn alone(subject: &Subject) -> (f64, Vec<f64>) {
    let x = GlobalTensor::draw(&Input::real(subject.2), 3);
    run("", |rank| gradient(rank, subject, &x, &unsharded(rank, subject))).remove(0)
}

#[test]
fn gradients_match_finite_differences() {
    for subject in SUBJECTS {
        let (_, claimed) = alone(subject);
        run("", |rank| {
            let mut x = GlobalTensor::draw(&Input::real(subject.2), 3);
            let found = find_disagreement(&claimed, |at, by| {
                let before = x.data[at];
                x.data[at] = before + by;
                let loss = gradient(rank, subject, &x, &unsharded(rank, subject));
                x.data[at] = before;
                Ok(loss?.0)
            })?;
            assert_eq!(found, None, "{} (element, gradient, differences)", subject.0);
            Ok(())
        });
    }
}

#[test]
fn every_layout_matches_one_rank() {
    for subject in SUBJECTS {
        let (value, right) = alone(subject);
        for mesh in ["a=2", "a=3", "a=2,b=2"] {
            run(mesh, |rank| {
                let x = GlobalTensor::draw(&Input::real(subject.2), 3);
                let mut accepted = 0;
                for layout in layouts(rank.mesh(), DType::F64, subject.2) {
                    let made = catch_unwind(AssertUnwindSafe(|| gradient(rank, subject, &x, &layout)));
                    let (loss, got) = match made {
                        Ok(made) => made?,
                        Err(payload) => match payload.downcast::<Error>() {
                            Ok(refused) if refused.kind() == Kind::Layout && !subject.3 => continue,
                            Ok(other) => return Err(*other),
                            Err(other) => std::panic::resume_unwind(other),
                        },
                    };
                    accepted += 1;
                    let same = relative_eq!(loss, value, epsilon = 1e-11, max_relative = 1e-11)
                        && relative_eq!(got[..], right[..], epsilon = 1e-11, max_relative = 1e-11);
                    assert!(same, "{} on {layout}: {loss} {got:?} instead of {value} {right:?}", subject.0);
                }
                assert!(accepted >= 3, "{} accepts some layouts of {mesh}", subject.0);
                Ok(())
            });
        }
    }
}
