//! Bugs of kinds that other frameworks have shipped, planted one at a time: each check must find its own.

use super::model::{Bug, Sample};
use super::{no_dead_parameter, replicas_agree, same_gradients};
use shardgrad::prelude::*;
use shardgrad::tensor::op::{Cotangents, Local, Op, Pieces, Vjp};
use shardgrad::tensor::{Piece, ops};
use std::rc::Rc;

/// An op that is wrong in one way.
#[derive(Debug)]
struct Broken(Bug);

impl Op for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn forward(&self, local: &Local<'_>, x: &[Piece]) -> Result<Pieces> {
        match self.0 {
            Bug::PendingThroughRelu => {
                let mut y = local.output(0)?;
                let kernel = &shardgrad::kernels::op::unary::RELU;
                shardgrad::tensor::launch(local.rank, kernel, &[&x[0]], &mut [&mut y], &[])?;
                Ok([y].into_iter().collect())
            }
            _ => Ok([x[0].clone()].into_iter().collect()),
        }
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| match self.0 {
            Bug::WorldScaledVjp => cx.grad(0).scale(cx.rank.mesh().num_ranks() as f64),
            Bug::ZeroVjp => cx.grad(0).scale(0.0),
            _ => cx.grad(0),
        })
    }
}

/// What stands between the two products of a block.
pub(crate) fn forward(h: &Var, bug: Bug) -> Var {
    if matches!(bug, Bug::WorldScaledVjp | Bug::ZeroVjp) { Var::apply_one(Rc::new(Broken(bug)), &[h]) } else { h.clone() }
}

/// What stands between a block's result and the residual.
pub(crate) fn residual(y: &Var, bug: Bug) -> Var {
    if bug == Bug::PendingThroughRelu { Var::apply_one(Rc::new(Broken(bug)), &[y]) } else { y.clone() }
}

/// The mean over all tokens.
pub(crate) fn mean(losses: &Var, bug: Bug) -> Var {
    if bug != Bug::LocalMean {
        return losses.mean();
    }
    let local = losses.tensor().piece().numel().max(1);
    losses.sum().scale(1.0 / local as f64)
}

/// The learning rate of a rank.
pub(crate) fn rate(rank: &Rank, lr: f64, bug: Bug) -> f64 {
    if bug == Bug::RankRate { lr * (1.0 + rank.index() as f64) } else { lr }
}

/// Initialises the first norm's weight by rank.
pub(crate) fn initialise<M: Module>(model: &Model<M>, bug: Bug) -> Result<()> {
    if bug != Bug::RankInit {
        return Ok(());
    }
    let rank = model.rank();
    let param = model.params().iter().find(|p| p.name().ends_with("norm.weight")).expect("a block has a norm");
    let layout = param.tensor().layout().clone();
    let numel = layout.local_shape(rank.coordinates()).iter().product();
    param.set_tensor(Tensor::from_local(rank, &layout, &vec![1.0 + rank.index() as f64; numel])?)
}

/// The gradients that a rank updates with.
pub(crate) fn skip<M: Module>(rank: &Rank, model: &Model<M>, mut gradients: Gradients, bug: Bug) -> Gradients {
    if bug == Bug::RankSkips && rank.index() == 1 {
        let param = model.params().iter().find(|p| p.name().ends_with("norm.bias")).expect("a block has a norm");
        let zeros = Tensor::zeros(rank, param.tensor().layout()).expect("a small tensor");
        gradients.insert(param.key(), zeros);
    }
    gradients
}

/// A case in which every bug shows.
fn sample() -> Sample {
    Sample {
        dp: 2,
        tp: 2,
        width: 4,
        hidden: 5,
        vocabulary: 7,
        rows: 3,
        columns: 3,
        num_blocks: 2,
        split_hidden: true,
        split_vocabulary: true,
        store_sharded: false,
        rounds: 1,
        seed: 3,
        integers: false,
    }
}

#[test]
fn the_sample_without_a_bug_is_right() {
    let sample = sample();
    let one = sample.train(&Mesh::single(), Bug::None).unwrap();
    let many = sample.train(&sample.mesh(), Bug::None).unwrap();
    assert_eq!(same_gradients(&one, &many, 1e-10), Ok(()));
    assert_eq!(no_dead_parameter(&many), Ok(()));
    assert_eq!(replicas_agree(&many), Ok(()));
}

#[test]
fn wrong_gradients_are_found() {
    for bug in [Bug::PendingThroughRelu, Bug::LocalMean, Bug::WorldScaledVjp] {
        let one = sample().train(&Mesh::single(), bug).unwrap();
        let many = sample().train(&sample().mesh(), bug).unwrap();
        assert!(same_gradients(&one, &many, 1e-6).is_err(), "{bug:?} was not found");
    }
}

#[test]
fn dead_parameters_are_found() {
    for bug in [Bug::ZeroVjp, Bug::Detached, Bug::Masked] {
        let many = sample().train(&sample().mesh(), bug).unwrap();
        assert!(no_dead_parameter(&many).is_err(), "{bug:?} was not found");
    }
}

#[test]
fn drifting_replicas_are_found() {
    for bug in [Bug::RankRate, Bug::RankInit, Bug::RankSkips] {
        let many = sample().train(&sample().mesh(), bug).unwrap();
        assert!(replicas_agree(&many).is_err(), "{bug:?} was not found");
    }
}

/// The list of ops has no broken one in it.
#[test]
fn broken_ops_stay_in_the_tests() {
    assert!(ops::OPS.iter().all(|entry| entry.name != "broken"));
}
