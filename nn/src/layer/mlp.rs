//! The feed-forward half of a block.

use super::linear::Linear;
use crate::module;
use crate::param::Init;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Value, ops};
use std::rc::Rc;

module! {
    /// y = gelu(x w1 + b1) w2 + b2, with the tanh form of GELU.
    #[derive(Debug)]
    pub struct Mlp {
        /// `[d]` to `[hidden]`.
        pub c_fc: Linear,
        /// `[hidden]` to `[d]`.
        pub c_proj: Linear,
    }
}

impl Mlp {
    /// For rows of width `d`.
    #[must_use]
    pub fn new(d: usize, hidden: usize) -> Mlp {
        Mlp { c_fc: Linear::new(d, hidden), c_proj: Linear::new(hidden, d) }
    }

    /// The same layer with other initial weights: of the first product, and of the one that ends in the residual stream.
    #[must_use]
    pub fn init(self, first: Init, last: Init) -> Mlp {
        Mlp { c_fc: self.c_fc.init(first), c_proj: self.c_proj.init(last) }
    }

    /// `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dim of x is not d.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.ended(x, None)
    }

    /// residual + y, in one pass at the end of the last product where nothing happens in between: `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// As [`Mlp::forward`], and if the residual cannot be added to what comes out.
    #[track_caller]
    #[must_use]
    pub fn forward_onto(&self, x: &Var, residual: &Var) -> Var {
        self.ended(x, Some(residual))
    }

    #[track_caller]
    fn ended(&self, x: &Var, residual: Option<&Var>) -> Var {
        let (first, last) = (&self.c_fc, &self.c_proj);
        match (&first.bias, &last.bias) {
            // Nothing happens between the two products, so that one op can do them.
            (Some(b1), Some(b2)) if first.out.is_silent() && last.input.is_silent() => {
                let b1 = b1.on(x);
                let x = first.input.at(x);
                let w1 = first.weight.on(&x);
                if !first.sums_are_whole(&x, &w1) {
                    return last.ended(&first.through(&x, &w1, Some(&b1), None).gelu(), residual);
                }
                let (b2, w2) = (b2.on(&x), last.weight.on(&x));
                if !w2.layout().dims()[1].is_whole() || !w2.layout().partial().is_empty() {
                    return last.ended(&first.through(&x, &w1, Some(&b1), None).gelu(), residual);
                }
                // What happens in the op is told of the place between its products.
                let x = first.out.at(&x);
                let h = [&w1.layout().dims()[1], &w2.layout().dims()[0]];
                let y = match (h.iter().all(|dim| dim.is_whole()), residual) {
                    (true, Some(r)) if last.ends_with(r, &x, &w2) => {
                        let op = Rc::new(ops::mlp::Mlp { has_last_bias: true, has_residual: true });
                        return last.out.at(&Var::apply_one(op, &[&x, &w1, &b1, &w2, &b2, r]));
                    }
                    (true, _) => last.out.at(&x.mlp(&w1, &b1, &w2, Some(&b2))),
                    (false, _) => last.out.at(&x.mlp(&w1, &b1, &w2, None)).add(&b2),
                };
                match residual {
                    Some(residual) => residual.add(&y),
                    None => y,
                }
            }
            _ => last.ended(&first.forward(x).gelu(), residual),
        }
    }
}
