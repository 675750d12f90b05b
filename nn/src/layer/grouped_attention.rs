//! Attention whose query heads share key heads in groups, with rotary positions.

use super::attention::hidden_keys;
use super::dropout::Dropout;
use super::linear::Linear;
use super::rms_norm::RmsNorm;
use crate::cache::Past;
use crate::module;
use crate::param::Init;
use crate::point::Point;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Value};
use std::rc::Rc;

module! {
    /// softmax(q k^T / sqrt(c)) v in every head, causal: key head g serves r query heads; queries and keys are turned by
    /// their positions. Ainslie et al., arXiv 2305.13245; Su et al., arXiv 2104.09864.
    ///
    /// Two points of its own: `keys`, turned, and `values`, as they arrive where queries read them.
    #[derive(Debug)]
    pub struct GroupedAttention {
        /// `[d]` to `[g, r, c]`.
        pub q_proj: Linear,
        /// `[d]` to `[g, c]`.
        pub k_proj: Linear,
        /// `[d]` to `[g, c]`.
        pub v_proj: Linear,
        /// `[g, r, c]` to `[d]`.
        pub o_proj: Linear,
        /// Of the channels of each query, before it is turned.
        pub q_norm: Option<RmsNorm>,
        /// Of the channels of each key, before it is turned.
        pub k_norm: Option<RmsNorm>,
        keys: Point,
        values: Point,
        drop: Dropout;
        frequencies: Rc<[f64]>,
        window: Option<usize>,
    }
}

impl GroupedAttention {
    /// `[key heads, query heads of each, channels]` for rows of width `d`; pair i of the channels turns by
    /// `frequencies[i]` a position. Weights are transposed in files; there are no biases and no norms.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if there are not twice as many channels as frequencies, or no heads.
    #[track_caller]
    #[must_use]
    pub fn new(d: usize, [g, r, c]: [usize; 3], frequencies: &[f64]) -> GroupedAttention {
        if g * r * c == 0 || c != 2 * frequencies.len() {
            let pairs = frequencies.len();
            let text = format!("{g} groups of {r} heads of {c} channels with {pairs} frequencies");
            Error::new(Kind::Config, text)
                .detail("help", "give at least one group and head, and one frequency per pair of channels")
                .at(std::panic::Location::caller())
                .raise();
        }
        let linear =
            |from: &[usize], to: &[usize]| Linear::shaped(from, to).transposed_in_files().without_bias();
        GroupedAttention {
            q_proj: linear(&[d], &[g, r, c]),
            k_proj: linear(&[d], &[g, c]),
            v_proj: linear(&[d], &[g, c]),
            o_proj: linear(&[g, r, c], &[d]),
            q_norm: None,
            k_norm: None,
            keys: Point::default(),
            values: Point::default(),
            drop: Dropout::default(),
            frequencies: frequencies.into(),
            window: None,
        }
    }

    /// The same layer, in which a token attends to the last `keys` tokens only, itself included.
    #[must_use]
    pub fn window(self, keys: Option<usize>) -> GroupedAttention {
        GroupedAttention { window: keys, ..self }
    }

    /// The same layer with biases in the products that make queries, keys and values, and in the one that joins heads.
    #[must_use]
    pub fn bias(self, inputs: bool, output: bool) -> GroupedAttention {
        GroupedAttention {
            q_proj: self.q_proj.with_bias(inputs),
            k_proj: self.k_proj.with_bias(inputs),
            v_proj: self.v_proj.with_bias(inputs),
            o_proj: self.o_proj.with_bias(output),
            ..self
        }
    }

    /// The same layer with a norm of the channels of each query and key.
    #[must_use]
    pub fn normed(self, eps: f64) -> GroupedAttention {
        let norm = || Some(RmsNorm::new(2 * self.frequencies.len()).eps(eps));
        GroupedAttention { q_norm: norm(), k_norm: norm(), ..self }
    }

    /// The same layer with dropout on its attention weights. On tapes with noise it then keeps all weights, `t` times `t` a
    /// head; without, none.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if `p` is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn dropout(self, p: f64) -> GroupedAttention {
        GroupedAttention { drop: Dropout::new(p), ..self }
    }

    /// The same layer with other initial weights.
    #[must_use]
    pub fn init(self, init: Init) -> GroupedAttention {
        GroupedAttention {
            q_proj: self.q_proj.init(init),
            k_proj: self.k_proj.init(init),
            v_proj: self.v_proj.init(init),
            o_proj: self.o_proj.init(init),
            ..self
        }
    }

    /// `[b, t, d]` to `[b, t, d]`.
    ///
    /// # Panics
    /// Unwinds with an error if x has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.attend(x, None)
    }

    /// The same, after what was read before: `past` then holds the rows of x too, but of those before them little more than
    /// the window.
    ///
    /// # Panics
    /// As [`GroupedAttention::forward`], and if `past` is of another layer.
    #[track_caller]
    #[must_use]
    pub fn attend(&self, x: &Var, past: Option<&mut Past>) -> Var {
        self.o_proj.forward(&self.mixed(x, past))
    }

    /// residual + what [`GroupedAttention::attend`] yields, in one pass at the end of the last product where nothing happens in between.
    ///
    /// # Panics
    /// As [`GroupedAttention::attend`], and if the residual cannot be added to what comes out.
    #[track_caller]
    #[must_use]
    pub fn attend_onto(&self, x: &Var, past: Option<&mut Past>, residual: &Var) -> Var {
        self.o_proj.forward_onto(&self.mixed(x, past), residual)
    }

    /// What the heads yield, before they are joined.
    #[track_caller]
    fn mixed(&self, x: &Var, past: Option<&mut Past>) -> Var {
        let normed =
            |norm: &Option<RmsNorm>, x: Var| norm.as_ref().map_or(x.clone(), |norm| norm.forward(&x));
        let first = past.as_ref().map_or(0, |past| past.len());
        let q = normed(&self.q_norm, self.q_proj.forward(x)).rope(&self.frequencies, first);
        let k = normed(&self.k_norm, self.k_proj.forward(x)).rope(&self.frequencies, first);
        let (k, v) = (self.keys.at(&k), self.values.at(&self.v_proj.forward(x)));
        let (k, v) = match past {
            Some(past) => {
                self.window.into_iter().for_each(|keys| past.forget_beyond(keys));
                past.extend(&k, &v)
            }
            None => (k, v),
        };
        match self.window {
            _ if self.drop.is_on(x.tape()) => self.spelled_out(&q, &k, &v),
            Some(keys) => q.window_attention(&k, &v, keys),
            None => q.attention(&k, &v, true),
        }
    }

    /// The same by single ops, with dropout between them.
    #[track_caller]
    fn spelled_out(&self, q: &Var, k: &Var, v: &Var) -> Var {
        let c = *q.shape().last().expect("queries have channels");
        let scores = q.einsum("b t g r c, b s g c -> b g r t s", k).scale(1.0 / (c as f64).sqrt());
        let scores = scores.add(&hidden_keys(q, k.shape()[1], self.window));
        self.drop.forward(&scores.softmax()).einsum("b g r t s, b s g c -> b t g r c", v)
    }
}
