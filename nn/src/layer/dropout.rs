//! Dropout whose mask does not depend on the mesh.

use crate::module::{Leaf, Module};
use crate::name::key;
use crate::point::Point;
use shardgrad_autograd::{Tape, Var};
use shardgrad_tensor::{Error, Kind, Value};

/// y = x / (1 - p) where a random number of the element is at least p, else 0; the identity on tapes without noise, which is
/// how they begin ([`Tape::set_noise`]; trainers do it).
///
/// The random number is a function of the run's seed, the name of this layer, which of its uses in a round it is, the step, and
/// the element's index in the global batch (rows are the first dim): neither mesh nor microbatches change it. To plans it is a point.
#[derive(Debug, Default)]
pub struct Dropout {
    point: Point,
    p: f64,
}

impl Dropout {
    /// Drops elements with probability `p`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if `p` is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn new(p: f64) -> Dropout {
        if !(0.0..1.0).contains(&p) {
            let text = format!("a dropout probability of {p} is not in 0..1");
            Error::new(Kind::Config, text).at(std::panic::Location::caller()).raise();
        }
        Dropout { point: Point::default(), p }
    }

    /// Whether anything is dropped on a tape.
    pub(super) fn is_on(&self, tape: &Tape) -> bool {
        self.p > 0.0 && tape.noise().is_some()
    }

    /// Whether on a tape nothing happens here at all.
    pub(crate) fn is_off(&self, tape: &Tape) -> bool {
        !self.is_on(tape) && self.point.is_silent()
    }

    /// Any shape with the rows of the batch first, to the same shape.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if noise is on and no model has named this layer.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        let x = self.point.at(x);
        // A tape is asked for the noise only where it matters: who asks is of that step.
        let Some(noise) = (self.p > 0.0).then(|| x.tape().noise()).flatten() else { return x };
        let name = self.point.name().unwrap_or_else(|| {
            let text = "a dropout layer draws by its name, but no model has placed it";
            Error::new(Kind::Config, text).at(std::panic::Location::caller()).raise()
        });
        let first = key(noise.seed, &name);
        // A layer that a text uses several times draws other numbers each time.
        let drawn = match x.tape().count_draw(first) {
            0 => first,
            before => key(first, &before.to_string()),
        };
        x.dropout_of_step(self.p, drawn, noise.step, noise.first_row)
    }
}

impl Module for Dropout {
    fn children(&self, _: &mut dyn FnMut(&str, &dyn Module)) {}

    fn leaf(&self) -> Option<Leaf<'_>> {
        Some(Leaf::Point(&self.point))
    }
}
