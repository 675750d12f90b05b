//! The error of layout inference (sharding propagation): why an op does not accept the layouts of its arguments.

use std::fmt;

/// Why layout inference refused an op, a reshape or a combination of layouts.
#[doc(alias = "sharding_propagation")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason as a code: `conflict` (one axis, two labels), `order` (ranges that do not nest), `whole` (a label
    /// that must be unsharded), `one` (a sharded broadcast dim), `grain` (different shard boundaries), `reshape` (a
    /// shard boundary inside a row), `shape` (extents or numbers of dims that do not match), `mesh` (arguments on
    /// two meshes).
    pub code: &'static str,
    /// The message, one line that names labels, axes, arguments and dims.
    pub message: String,
    /// The positions concerned, as (argument, dim).
    pub positions: Vec<(usize, usize)>,
    /// What helps other than redistributing an argument, if anything does.
    pub hint: Option<String>,
}

impl Refusal {
    /// Makes a refusal about some positions, given as (argument, dim).
    #[must_use]
    pub fn new(code: &'static str, message: String, positions: &[(usize, usize)]) -> Refusal {
        Refusal { code, message, positions: positions.to_vec(), hint: None }
    }

    /// Adds what helps other than redistributing an argument.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Refusal {
        Refusal { hint: Some(hint.into()), ..self }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
