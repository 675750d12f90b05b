//! Dropout whose mask is independent of the mesh.

use crate::module::activation_point::ActivationPoint;
use crate::module::name::random_key;
use crate::module::{Module, ModuleLeaf};
use shardgrad_autograd::{Noise, Tape, Var};
use shardgrad_tensor::{Error, Kind, Point, Value, ops};
use std::panic::Location;

/// Dropout: y = x / (1 - p) where the random number of an element is at least p, else 0. [`Tape::set_noise`] sets the random numbers
/// of a step, as the trainer does; a training tape without them is refused, because nothing would be dropped unnoticed. On inference
/// tapes, and after `set_noise(None)`, dropout is the identity.
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

    /// The random numbers that the layer draws by on this tape; `None` if it drops nothing.
    fn noise_at(&self, tape: &Tape, site: &'static Location<'static>) -> Option<Noise> {
        // The noise is read only if p > 0: a program that reads the noise depends on the step.
        if self.p == 0.0 {
            return None;
        }
        if tape.lacks_noise() {
            let name = self
                .point
                .name()
                .map_or_else(|| "a dropout layer".to_string(), |name| format!("dropout layer `{name}`"));
            let text = format!(
                "{name} (p = {}) has no random numbers on a training tape and would drop nothing",
                self.p
            );
            Error::new(Kind::Config, text)
                .detail("help", "call tape.set_noise(Some(Noise { seed, step, first_row: 0 })) before the forward pass of each step; to train without dropout, call tape.set_noise(None)")
                .at(site)
                .raise();
        }
        tape.noise()
    }

    /// Whether the layer is known to drop nothing on this tape. A tape that lacks random numbers is refused where the layer is applied,
    /// by the caller's line.
    fn drops_nothing(&self, tape: &Tape) -> bool {
        self.p == 0.0 || !tape.lacks_noise() && tape.noise().is_none()
    }

    /// Whether the layer drops elements on this tape.
    ///
    /// # Panics
    /// As [`Dropout::forward`] without random numbers.
    #[track_caller]
    pub(super) fn is_active(&self, tape: &Tape) -> bool {
        self.noise_at(tape, Location::caller()).is_some()
    }

    /// The end of a residual block: the addition of dropout(y) to x.
    pub fn then_add<'a>(&'a self, x: &'a Var) -> Residual<'a> {
        Residual { x, dropout: Some(self) }
    }

    /// Applies dropout to x, of any shape whose first dim is the rows of the batch.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` on a training tape on which [`Tape::set_noise`] was not called, and on a tape with noise before
    /// [`Model::new`](crate::Model::new) has named the layer.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.forward_at(x, Location::caller())
    }

    /// [`Dropout::forward`] for the caller's line `site`.
    pub(super) fn forward_at(&self, x: &Var, site: &'static Location<'static>) -> Var {
        let x = self.point.constrain_at(x, site);
        let Some(noise) = self.noise_at(x.tape(), site) else { return x };
        let name = self.point.name().unwrap_or_else(|| {
            let text = "a dropout layer is used before Model::new has named it; its mask depends on the name";
            Error::new(Kind::Config, text).at(site).raise()
        });
        let first = random_key(noise.seed, &name);
        // A layer that is used several times draws another mask each time.
        let mask_key = match x.tape().count_draw(first) {
            0 => first,
            before => random_key(first, &before.to_string()),
        };
        let op = ops::dropout::Dropout::for_step(self.p, mask_key, noise.step, noise.first_row);
        Var::apply_at(op.unwrap_or_else(|e| e.at(site).raise()), &[&x], &[], site).swap_remove(0)
    }
}

/// Dropout inside of a fused op, before the residual is added.
impl Point<Var> for Dropout {
    fn is_identity(&self, x: &Var) -> bool {
        self.drops_nothing(x.tape()) && self.point.is_identity(x)
    }

    fn pass(&self, x: &Var, site: &'static Location<'static>) -> Var {
        if self.is_identity(x) { x.clone() } else { self.forward_at(x, site) }
    }

    fn enter(&self, x: &Var) {
        self.point.enter(x);
    }
}

/// The end of a residual block: x + dropout(y), where y is the result of the layer that takes this argument, which adds x in the
/// epilogue of its last product where it can. From a variable, without dropout.
#[doc(alias = "residual_connection")]
#[doc(alias = "skip connection")]
#[doc(alias = "bias_dropout_add")]
#[derive(Clone, Copy, Debug)]
pub struct Residual<'a> {
    /// The residual.
    pub x: &'a Var,
    /// Dropout of y.
    pub dropout: Option<&'a Dropout>,
}

impl<'a> Residual<'a> {
    /// The residual, and the point before its addition.
    pub(super) fn parts(residual: Option<Residual<'a>>) -> (Option<&'a Var>, &'a dyn Point<Var>) {
        match residual {
            Some(Residual { x, dropout: Some(dropout) }) => (Some(x), dropout),
            Some(Residual { x, dropout: None }) => (Some(x), &()),
            None => (None, &()),
        }
    }
}

impl<'a> From<&'a Var> for Residual<'a> {
    fn from(x: &'a Var) -> Residual<'a> {
        Residual { x, dropout: None }
    }
}

impl Module for Dropout {
    fn children(&self, _: &mut dyn FnMut(&str, &dyn Module)) {}

    fn leaf(&self) -> Option<ModuleLeaf<'_>> {
        Some(ModuleLeaf::Point(&self.point))
    }
}
