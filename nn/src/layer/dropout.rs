//! Dropout whose mask is independent of the mesh.

use crate::module::activation_point::ActivationPoint;
use crate::module::name::random_key;
use crate::module::{Module, ModuleLeaf};
use shardgrad_autograd::{Tape, Var};
use shardgrad_tensor::{Error, Kind, Value};

/// Dropout: y = x / (1 - p) where the random number of an element is at least p, else 0. On tapes without noise, the default,
/// dropout is the identity; [`Tape::set_noise`] turns it on, as the trainer does.
///
/// The random number is a function of the seed of the run, the name of the layer, the count of its uses in the forward pass, the
/// step, and the element's index in the global batch (rows are the first dim), so neither mesh nor microbatches change the mask. A
/// dropout layer is also an activation point.
#[doc(alias = "nn.Dropout")]
#[derive(Debug, Default)]
pub struct Dropout {
    point: ActivationPoint,
    p: f64,
}

impl Dropout {
    /// A layer that drops elements with probability `p`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if `p` is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn new(p: f64) -> Dropout {
        if !(0.0..1.0).contains(&p) {
            let text = format!("a dropout probability must be at least 0 and below 1, but is {p}");
            Error::new(Kind::Config, text).at(std::panic::Location::caller()).raise();
        }
        Dropout { point: ActivationPoint::default(), p }
    }

    /// Whether the layer drops elements on this tape.
    pub(super) fn is_active(&self, tape: &Tape) -> bool {
        self.p > 0.0 && tape.noise().is_some()
    }

    /// Whether the layer is the identity on this tape: no dropout, and no rule of the plan for its activation point.
    pub(crate) fn is_identity(&self, tape: &Tape) -> bool {
        !self.is_active(tape) && self.point.is_unconstrained()
    }

    /// Applies dropout to x, of any shape whose first dim is the rows of the batch.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` on a tape with noise before [`Model::new`](crate::Model::new) has named the layer.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        let x = self.point.constrain(x);
        // The noise is read only if p > 0: a program that reads the noise depends on the step.
        let Some(noise) = (self.p > 0.0).then(|| x.tape().noise()).flatten() else { return x };
        let name = self.point.name().unwrap_or_else(|| {
            let text = "a dropout layer is used before Model::new has named it; its mask depends on the name";
            Error::new(Kind::Config, text).at(std::panic::Location::caller()).raise()
        });
        let first = random_key(noise.seed, &name);
        // A layer that is used several times draws another mask each time.
        let mask_key = match x.tape().count_draw(first) {
            0 => first,
            before => random_key(first, &before.to_string()),
        };
        x.dropout_of_step(self.p, mask_key, noise.step, noise.first_row)
    }
}

impl Module for Dropout {
    fn children(&self, _: &mut dyn FnMut(&str, &dyn Module)) {}

    fn leaf(&self) -> Option<ModuleLeaf<'_>> {
        Some(ModuleLeaf::Point(&self.point))
    }
}
