//! LoRA: a low-rank adapter of a linear layer.

use super::dropout::Dropout;
use super::linear::Linear;
use crate::module::Module;
use crate::module::adapter::{Adaptable, Adapter};
use crate::module::param::Init;
use serde_json::json;
use shardgrad_autograd::Var;
use shardgrad_tensor::ops::scale::Scale;
use shardgrad_tensor::{Error, Kind, Value};
use std::panic::Location;
use std::rc::Rc;

/// Low-rank adapter (LoRA) of a linear layer x w + b: adds (alpha / r) (dropout(x) a) b, where a is `[in.., r]` and b is
/// `[r, out..]`. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
///
/// b starts with zeros, so that an adapted model starts as the model without adapters; a is initialized as a linear layer is. In
/// the model the two are `lora_A.weight` and `lora_B.weight` of the layer. Where the plan has no rule for them, they are sharded as
/// the weight of the layer is: a as its input dims, b as its output dims. So an adapter adds no collective in the forward pass.
///
/// ```
/// use shardgrad_nn::{Linear, Lora, Module};
/// let layers = vec![Linear::new(8, 4), Linear::new(4, 2)].adapt("0", |layer| Lora::new(layer, 2).alpha(4.0));
/// let mut names = Vec::new();
/// shardgrad_nn::module::visit_leaves(&layers, &mut |path, leaf| {
///     if let shardgrad_nn::ModuleLeaf::Param(param) = leaf {
///         names.push(format!("{path} {:?}", param.shape()));
///     }
/// });
/// assert_eq!(names[2..4], ["0.lora_A.weight [8, 2]", "0.lora_B.weight [2, 4]"]);
/// assert_eq!(names.len(), 6);
/// ```
#[doc(alias = "LoRA")]
#[doc(alias = "PEFT")]
#[doc(alias = "LoraConfig")]
#[derive(Debug)]
pub struct Lora {
    a: Linear,
    b: Linear,
    dropout: Dropout,
    rank: usize,
    alpha: f64,
    p: f64,
}

impl Lora {
    /// An adapter of rank `rank` for a layer, with alpha equal to the rank (factor 1) and without dropout.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for rank 0.
    #[track_caller]
    #[must_use]
    pub fn new(layer: &dyn Adaptable, rank: usize) -> Lora {
        if rank == 0 {
            Error::new(Kind::Config, "an adapter of rank 0 has no parameters")
                .detail("help", "give a rank of at least 1; 8 is usual")
                .at(Location::caller())
                .raise();
        }
        let weight = layer.adapted_weight();
        let (from, to) = weight.shape().split_at(layer.num_in());
        let matrix = |from: &[usize], to: &[usize]| {
            Linear::general(from, to).with_transposed_file_shape().without_bias()
        };
        let (mut a, mut b) = (matrix(from, &[rank]), matrix(&[rank], to).init(Init::Zeros));
        let all = 0..weight.shape().len();
        let dims_of_a: Vec<Option<usize>> = all.clone().map(|d| (d < from.len()).then_some(d)).collect();
        let dims_of_b: Vec<Option<usize>> = all.map(|d| d.checked_sub(from.len()).map(|d| d + 1)).collect();
        a.weight = a.weight.sharded_like(weight, &dims_of_a);
        b.weight = b.weight.sharded_like(weight, &dims_of_b);
        Lora { a, b, dropout: Dropout::default(), rank, alpha: rank as f64, p: 0.0 }
    }

    /// Returns the same adapter with another alpha: its term is scaled by alpha / rank.
    #[doc(alias = "lora_alpha")]
    #[must_use]
    pub fn alpha(self, alpha: f64) -> Lora {
        Lora { alpha, ..self }
    }

    /// Returns the same adapter with dropout on its input.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if `p` is not in `0..1`.
    #[doc(alias = "lora_dropout")]
    #[track_caller]
    #[must_use]
    pub fn dropout(self, p: f64) -> Lora {
        Lora { dropout: Dropout::new(p), p, ..self }
    }
}

impl Module for Lora {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        visit("lora_A", &self.a);
        visit("lora_B", &self.b);
        visit("lora_dropout", &self.dropout);
    }
}

impl Adapter for Lora {
    #[track_caller]
    fn forward(&self, x: &Var) -> Var {
        self.forward_at(x, Location::caller())
    }

    fn forward_at(&self, x: &Var, site: &'static Location<'static>) -> Var {
        let narrow = self.a.product_at(&self.dropout.forward_at(x, site), site);
        // The narrow tensor is the cheapest place for the factor.
        let narrow = match self.alpha / self.rank as f64 {
            1.0 => narrow,
            factor => Var::apply_at(Rc::new(Scale { factor }), &[&narrow], &[], site).swap_remove(0),
        };
        self.b.product_at(&narrow, site)
    }

    fn peft_config(&self) -> Option<Vec<(&'static str, serde_json::Value)>> {
        Some(vec![
            ("peft_type", json!("LORA")),
            ("r", json!(self.rank)),
            ("lora_alpha", json!(self.alpha)),
            ("lora_dropout", json!(self.p)),
            ("bias", json!("none")),
        ])
    }
}
