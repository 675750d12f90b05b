//! Attention with several heads, in the form of GPT-2.

use super::dropout::Dropout;
use super::linear::Linear;
use crate::cache::Past;
use crate::module;
use crate::param::Init;
use crate::point::Point;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Error, Kind, Tensor, Value, ops, unwind};

module! {
    /// softmax(q k^T / sqrt(c)) v in every head, between one product that makes q, k, v and one that joins the heads.
    /// Vaswani et al., arXiv 1706.03762.
    ///
    /// Two points of its own: `keys` and `values`, as they arrive where queries read them.
    #[derive(Debug)]
    pub struct Attention {
        /// `[d]` to `[3, h, c]`: q, k and v of all heads.
        pub c_attn: Linear,
        /// `[h, c]` to `[d]`.
        pub c_proj: Linear,
        keys: Point,
        values: Point,
        drop: Dropout;
        causal: bool,
    }
}

impl Attention {
    /// `heads` heads for rows of width `d`; a token attends to itself and those before it.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the heads do not divide the width.
    #[track_caller]
    #[must_use]
    pub fn new(d: usize, heads: usize) -> Attention {
        if heads == 0 || !d.is_multiple_of(heads) {
            let text = format!("{heads} heads do not divide a width of {d}");
            Error::new(Kind::Config, text).at(std::panic::Location::caller()).raise();
        }
        let (h, c) = (heads, d / heads);
        Attention {
            c_attn: Linear::shaped(&[d], &[3, h, c]).never_empty(2, "heads"),
            c_proj: Linear::shaped(&[h, c], &[d]).never_empty(0, "heads"),
            keys: Point::default(),
            values: Point::default(),
            drop: Dropout::default(),
            causal: true,
        }
    }

    /// The same layer; without `causal` a token attends to all others.
    #[must_use]
    pub fn causal(self, causal: bool) -> Attention {
        Attention { causal, ..self }
    }

    /// The same layer with dropout on its attention weights. On tapes with noise it then keeps all weights, `t` times `t` a
    /// head; without, none.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if `p` is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn dropout(self, p: f64) -> Attention {
        Attention { drop: Dropout::new(p), ..self }
    }

    /// The same layer with other initial weights: of the first product, and of the one that ends in the residual stream.
    #[must_use]
    pub fn init(self, first: Init, last: Init) -> Attention {
        Attention { c_attn: self.c_attn.init(first), c_proj: self.c_proj.init(last), ..self }
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

    /// The same, after what was read before: `past` then holds the rows of x too.
    ///
    /// # Panics
    /// As [`Attention::forward`], and if `past` is of another layer.
    #[track_caller]
    #[must_use]
    pub fn attend(&self, x: &Var, past: Option<&mut Past>) -> Var {
        self.c_proj.forward(&self.mixed(x, past))
    }

    /// residual + what [`Attention::attend`] yields, in one pass at the end of the last product where nothing happens in between.
    ///
    /// # Panics
    /// As [`Attention::attend`], and if the residual cannot be added to what comes out.
    #[track_caller]
    #[must_use]
    pub fn attend_onto(&self, x: &Var, past: Option<&mut Past>, residual: &Var) -> Var {
        self.c_proj.forward_onto(&self.mixed(x, past), residual)
    }

    /// What the heads yield, before they are joined.
    #[track_caller]
    fn mixed(&self, x: &Var, past: Option<&mut Past>) -> Var {
        let (qkv, is_off) = (self.c_attn.forward(x), !self.drop.is_on(x.tape()));
        let stay = self.keys.is_silent() && self.values.is_silent() && qkv.layout().dims()[1].is_whole();
        if is_off && past.is_none() && stay {
            let op = unwind(ops::attention::JoinedAttention::of(&qkv.shape(), self.causal));
            return Var::apply_one(op, &[&qkv]);
        }
        let qkv = qkv.unbind(2);
        let (q, k, v) = (&qkv[0], self.keys.at(&qkv[1]), self.values.at(&qkv[2]));
        let (k, v) = match past {
            Some(past) => past.extend(&k, &v),
            None => (k, v),
        };
        if is_off { q.attention(&k, &v, self.causal) } else { self.spelled_out(q, &k, &v) }
    }

    /// The same by single ops, with dropout between them.
    #[track_caller]
    fn spelled_out(&self, q: &Var, k: &Var, v: &Var) -> Var {
        let c = q.shape()[3];
        let mut scores = q.einsum("b t h c, b s h c -> b h t s", k).scale(1.0 / (c as f64).sqrt());
        if self.causal {
            scores = scores.add(&hidden_keys(q, k.shape()[1], None));
        }
        self.drop.forward(&scores.softmax()).einsum("b h t s, b s h c -> b t h c", v)
    }
}

/// What is added to scores `[.., t, s]` of the queries `[b, t, ..]` so that the last sees all keys, and each one before it
/// one less; with a window, the last so many of these.
#[track_caller]
pub(super) fn hidden_keys(q: &Var, s: usize, window: Option<usize>) -> Var {
    let t = q.shape()[1];
    // Key j is hidden from query i behind it, and as many as there are in a window before it.
    let is_hidden = |(i, j)| j + t > i + s || window.is_some_and(|keys| j + t + keys <= i + s);
    let hidden = |at: usize| if is_hidden((at / s, at % s)) { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> = (0..t * s).map(hidden).collect();
    q.constant(unwind(Tensor::from_host(q.rank(), &[t, s], &mask)).cast(q.dtype()))
}
