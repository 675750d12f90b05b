//! Skipped steps: a smaller loss scale cures an overflow; otherwise an error names the first op, the weights or the control
//! number that is not finite.

use super::Trainer;
use crate::module::Module;
use crate::optim::LossScale;
use shardgrad_tensor::training_step::anomaly_report::find_first_non_finite;
use shardgrad_tensor::{Error, Kind, Result, StepReport};

/// Largest number of weights that an error names.
const NAMED_MAX: usize = 3;

impl<M: Module> Trainer<'_, M> {
    /// Returns an error for a skipped step, unless only gradients are not finite and the loss scale can decrease.
    pub(super) fn check_smaller_loss_scale_helps(&self, report: &StepReport) -> Result<()> {
        let StepReport { loss, grad_norm, control, .. } = report;
        let number = control.iter().find(|(_, sum)| !sum.is_finite());
        match number.filter(|_| loss.is_finite() && grad_norm.is_finite()) {
            Some((name, sum)) => {
                let step = self.step + 1;
                let text = format!(
                    "step {step}: control number `{name}` sums to {sum} over all ranks; the update was not applied"
                );
                Err(Error::new(Kind::NotFinite, text)
                    .detail("help", "loss and gradients are finite: check the `control` argument of Trainer::step_with on each rank"))
            }
            None if number.is_none()
                && loss.is_finite()
                && self.loss_scale.is_some_and(LossScale::can_decrease) =>
            {
                Ok(())
            }
            None => Err(self.explain_not_finite(*loss, *grad_norm)),
        }
    }

    /// Repeats forward and backward with anomaly detection, and returns an error that names the op that made the
    /// first number that is not finite, or the weights that already contain NaN.
    #[doc(alias = "detect_anomaly")]
    fn explain_not_finite(&self, loss: f64, grad_norm: f64) -> Error {
        self.capture.clear();
        let found = find_first_non_finite(self.model.rank(), || self.uncaptured_pass().map(drop));
        let step = self.step + 1;
        let text = format!(
            "step {step}: the loss is {loss} and the gradient norm {grad_norm}; the update was not applied"
        );
        let error = match self.loss_scale {
            Some(scale) => Error::new(Kind::NotFinite, text).detail("loss scale", scale.factor().to_string()),
            None => Error::new(Kind::NotFinite, text),
        };
        match found {
            Ok(Some(mut found)) => {
                let weights = if found.is_input_nan { self.model.nan_params() } else { Ok(Vec::new()) };
                let named = weights.ok().and_then(|names| self.nan_weights(&names));
                for (_, line) in found.lines.iter_mut().filter(|(label, _)| *label == "first") {
                    *line = named.clone().unwrap_or_else(|| std::mem::take(line));
                }
                found.lines.into_iter().fold(error, |e, (label, text)| e.detail(label, text))
            }
            Ok(None) => error
                .detail(
                    "first",
                    "no op: all gradients are finite, but the sum of their squares overflows f64",
                )
                .detail("help", "try a smaller learning rate"),
            Err(cause) => error.detail("replay", cause.message()),
        }
    }

    /// Returns the sentence that names weights that contained NaN before the step, if there are any.
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
