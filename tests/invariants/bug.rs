//! Planted bugs, of kinds that other frameworks have shipped.

use shardgrad::prelude::*;
use shardgrad::tensor::LocalTensor;
use shardgrad::tensor::op::{Cotangents, ForwardContext, LocalTensors, Op, Vjp};
use std::rc::Rc;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    None,
    /// A non-linear op is applied to a partial sum.
    PendingThroughRelu,
    /// A mean divides by the local extent.
    LocalMean,
    /// A vjp scales by the size of the world.
    WorldScaledVjp,
    /// A vjp returns zeros.
    ZeroVjp,
    /// A layer reads a detached copy of its input.
    Detached,
    /// A parameter is multiplied by a mask of zeros.
    Masked,
    /// Each rank uses another learning rate.
    RankRate,
    /// A replicated parameter is initialised differently per rank.
    RankInit,
    /// One rank skips the update of a parameter.
    RankSkips,
}

/// An op with a planted bug.
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

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        match self.0 {
            Bug::PendingThroughRelu => {
                let mut y = local.output(0)?;
                let kernel = &shardgrad::kernels::op::unary::RELU;
                shardgrad::tensor::launch(local.rank, kernel, &[x[0]], &mut [&mut y], &[])?;
                Ok([y].into_iter().collect())
            }
            _ => Ok([x[0].clone()].into_iter().collect()),
        }
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|_| match self.0 {
            Bug::WorldScaledVjp => cx.grad(0).scale(cx.rank.mesh().num_ranks() as f64),
            Bug::ZeroVjp => cx.grad(0).scale(0.0),
            _ => cx.grad(0),
        })
    }
}

/// The identity between the two linear layers of a block, or a broken op.
pub(crate) fn forward(h: &Var, bug: Bug) -> Var {
    if matches!(bug, Bug::WorldScaledVjp | Bug::ZeroVjp) {
        Var::apply_one(Rc::new(Broken(bug)), &[h])
    } else {
        h.clone()
    }
}

/// The second linear layer of a block.
pub(crate) fn down(layer: &Linear, h: &Var, bug: Bug) -> Var {
    if bug != Bug::PendingThroughRelu {
        return layer.forward(h);
    }
    let pending = h.matmul(&layer.weight.on(h));
    let passed = Var::apply_one(Rc::new(Broken(bug)), &[&pending]);
    passed.add(&layer.bias.as_ref().expect("the layer has a bias").on(h))
}

/// The mean over all tokens.
pub(crate) fn mean(losses: &Var, bug: Bug) -> Var {
    if bug != Bug::LocalMean {
        return losses.mean();
    }
    let local = losses.tensor().local().numel().max(1);
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
    let param =
        model.params().iter().find(|p| p.name().ends_with("norm.weight")).expect("a block has a norm");
    let layout = param.tensor().layout().clone();
    let numel = layout.local_shape(rank.coordinates()).iter().product();
    param.set_tensor(Tensor::from_local(rank, &layout, &vec![1.0 + rank.index() as f64; numel])?)
}

/// Returns the gradients of a rank, one zeroed with `Bug::RankSkips`.
pub(crate) fn skip<M: Module>(
    rank: &Rank,
    model: &Model<M>,
    mut gradients: Gradients,
    bug: Bug,
) -> Gradients {
    if bug == Bug::RankSkips && rank.index() == 1 {
        let param =
            model.params().iter().find(|p| p.name().ends_with("norm.bias")).expect("a block has a norm");
        let zeros = Tensor::zeros(rank, param.tensor().layout()).expect("a small tensor");
        gradients.insert(param.key(), zeros);
    }
    gradients
}
