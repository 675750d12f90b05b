//! Why a rule says no.

use std::fmt;

/// An op, a reshape or a join of layouts that is not allowed, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason in one word: `conflict` (one axis, two labels), `order` (ranges that do not nest), `whole` (a label
    /// that must not be split), `one` (a split broadcast dim), `grain` (cuts at other places), `reshape` (a cut
    /// inside a row), `shape` (extents or numbers of dims that do not fit), `mesh` (arguments on two meshes).
    pub code: &'static str,
    /// One line that names labels, axes, arguments and dims.
    pub message: String,
    /// The places concerned: argument and dim.
    pub places: Vec<(usize, usize)>,
    /// What helps besides moving data, where there is such a thing.
    pub hint: Option<String>,
}

impl Refusal {
    /// A refusal that concerns some places, given as argument and dim.
    #[must_use]
    pub fn new(code: &'static str, message: String, places: &[(usize, usize)]) -> Refusal {
        Refusal { code, message, places: places.to_vec(), hint: None }
    }

    /// Adds what helps besides moving data.
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
