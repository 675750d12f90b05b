//! Why a step was not taken: the op, or the weight, that its first number that is not finite comes from.

use super::Trainer;
use crate::module::Module;
use shardgrad_tensor::control::first_not_finite;
use shardgrad_tensor::{Error, Kind};

/// At most so many weights are named.
const NAMED_MAX: usize = 3;

impl<M: Module> Trainer<'_, M> {
    /// Runs the step again with every op watched, to name the one that made the first number that is not finite, or the weights
    /// that hold NaN already.
    pub(super) fn explain_not_finite(&self, loss: f64, grad_norm: f64) -> Error {
        self.capture.forget();
        let found = first_not_finite(self.model.rank(), || self.gradients().map(drop));
        let step = self.step + 1;
        let text = format!(
            "step {step}: the loss is {loss} and the gradient norm {grad_norm}; the step was not taken"
        );
        let error = match self.loss_scale {
            Some(scale) => Error::new(Kind::NotFinite, text).detail("loss scale", scale.factor().to_string()),
            None => Error::new(Kind::NotFinite, text),
        };
        match found {
            Ok(Some(mut found)) => {
                let weights = if found.is_given_nan { self.model.nan_params() } else { Ok(Vec::new()) };
                let named = weights.ok().and_then(|names| self.nan_weights(&names));
                for (_, line) in found.lines.iter_mut().filter(|(label, _)| *label == "first") {
                    *line = named.clone().unwrap_or_else(|| std::mem::take(line));
                }
                found.lines.into_iter().fold(error, |e, (label, text)| e.detail(label, text))
            }
            Ok(None) => error
                .detail("first", "no op made it: the gradients are finite, but their squares add up to more than f64 holds")
                .detail("help", "a smaller learning rate is the usual cure"),
            Err(cause) => error.detail("replay", cause.message()),
        }
    }

    /// Says which weights hold NaN before the step, if any do.
    fn nan_weights(&self, names: &[String]) -> Option<String> {
        let loaded = if self.step == self.first_step { "loaded " } else { "" };
        let more = names.len().saturating_sub(NAMED_MAX);
        match names {
            [] => None,
            [name] => Some(format!("the {loaded}weight {name} already holds NaN")),
            _ if more == 0 => Some(format!("the {loaded}weights {} already hold NaN", names.join(", "))),
            _ => {
                let first = names[..NAMED_MAX].join(", ");
                Some(format!("the {loaded}weights {first} and {more} more already hold NaN"))
            }
        }
    }
}
