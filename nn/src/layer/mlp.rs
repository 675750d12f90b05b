//! MLP of a transformer block, with GELU.

use super::linear::Linear;
use crate::module;
use crate::module::param::Init;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Value, ops};
use std::rc::Rc;

module! {
    /// MLP with GELU in its tanh form: y = gelu(x w1 + b1) w2 + b2.
    #[doc(alias = "FeedForward")]
    #[doc(alias = "FFN")]
    #[doc(alias = "ParallelMLP")]
    #[derive(Debug)]
    pub struct Mlp {
        /// First linear layer, `[d]` to `[hidden]`.
        pub c_fc: Linear,
        /// Second linear layer, `[hidden]` to `[d]`.
        pub c_proj: Linear,
    }
}

impl Mlp {
    /// An MLP with `hidden` units for rows of width `d`.
    #[must_use]
    pub fn new(d: usize, hidden: usize) -> Mlp {
        Mlp { c_fc: Linear::new(d, hidden), c_proj: Linear::new(hidden, d) }
    }

    /// Returns the same layer with other initializers: `first` of the first linear layer, `last` of the second.
    #[must_use]
    pub fn init(self, first: Init, last: Init) -> Mlp {
        Mlp { c_fc: self.c_fc.init(first), c_proj: self.c_proj.init(last) }
    }

    /// Applies the MLP: `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.forward_optional_residual(x, None)
    }

    /// Returns residual + y, with the addition fused into the epilogue of the last product where possible: `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// As [`Mlp::forward`], and if the residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_with_residual(&self, x: &Var, residual: &Var) -> Var {
        self.forward_optional_residual(x, Some(residual))
    }

    #[track_caller]
    fn forward_optional_residual(&self, x: &Var, residual: Option<&Var>) -> Var {
        let (first, last) = (&self.c_fc, &self.c_proj);
        match (&first.bias, &last.bias) {
            // No rule of the plan and no adapter applies between the two products, so one fused op can compute them.
            (Some(b1), Some(b2))
                if first.out.is_unconstrained()
                    && last.input.is_unconstrained()
                    && first.adapter().is_none()
                    && last.adapter().is_none() =>
            {
                let b1 = b1.on(x);
                let x = first.input.constrain(x);
                let w1 = first.weight.on(&x);
                if !first.has_complete_sums(&x, &w1) {
                    return last.forward_optional_residual(
                        &first.project(&x, &w1, Some(&b1), None).gelu(),
                        residual,
                    );
                }
                let (b2, w2) = (b2.on(&x), last.weight.on(&x));
                if !w2.layout().dims()[1].is_unsharded() || !w2.layout().partial().is_empty() {
                    return last.forward_optional_residual(
                        &first.project(&x, &w1, Some(&b1), None).gelu(),
                        residual,
                    );
                }
                // The profiler attributes the op to the path between its products.
                let x = first.out.constrain(&x);
                let h = [&w1.layout().dims()[1], &w2.layout().dims()[0]];
                let y = match (h.iter().all(|dim| dim.is_unsharded()), residual) {
                    (true, Some(r)) if last.can_fuse_residual(r, &x, &w2) => {
                        let op = Rc::new(ops::mlp::Mlp { has_last_bias: true, has_residual: true });
                        return last.out.constrain(&Var::apply_one(op, &[&x, &w1, &b1, &w2, &b2, r]));
                    }
                    (true, _) => last.out.constrain(&x.mlp(&w1, &b1, &w2, Some(&b2))),
                    (false, _) => last.out.constrain(&x.mlp(&w1, &b1, &w2, None)).add(&b2),
                };
                match residual {
                    Some(residual) => residual.add(&y),
                    None => y,
                }
            }
            _ => last.forward_optional_residual(&first.forward(x).gelu(), residual),
        }
    }
}
