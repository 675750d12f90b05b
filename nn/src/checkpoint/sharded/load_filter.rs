//! `LoadFilter`: which differences between a model and the files that it is loaded from are meant, by name patterns.

use crate::module::name::{matches, nearest};
use shardgrad_tensor::{Error, Kind, Result};

/// The parameters that loading may leave as they are, by patterns of their names
/// ([`matches()`](crate::module::name::matches)). Without a filter, loading refuses files that lack a tensor of the model or have
/// others.
///
/// ```
/// use shardgrad_nn::LoadFilter;
/// // A base model into a model with adapters, and with a new head.
/// let filter = LoadFilter::new().may_lack("*.lora_*").leave_out("lm_head.*");
/// # let _ = filter;
/// ```
#[doc(alias = "strict")]
#[doc(alias = "ignore_mismatched_sizes")]
#[derive(Clone, Debug, Default)]
pub struct LoadFilter {
    lacking: Vec<String>,
    left_out: Vec<String>,
}

impl LoadFilter {
    /// A filter that accepts no difference.
    #[must_use]
    pub fn new() -> LoadFilter {
        LoadFilter::default()
    }

    /// Returns the same filter that also accepts files without the parameters that match: these keep their values. A parameter that
    /// the files have is loaded.
    #[doc(alias = "missing_keys")]
    #[must_use]
    pub fn may_lack(mut self, pattern: &str) -> LoadFilter {
        self.lacking.push(pattern.to_string());
        self
    }

    /// Returns the same filter that also leaves out what matches: such parameters keep their values, also if the files have them in
    /// another shape, and such tensors of the files are ignored.
    #[doc(alias = "unexpected_keys")]
    #[must_use]
    pub fn leave_out(mut self, pattern: &str) -> LoadFilter {
        self.left_out.push(pattern.to_string());
        self
    }

    /// Whether files may lack the parameter of a name.
    pub(crate) fn accepts_missing(&self, name: &str) -> bool {
        self.lacking.iter().any(|pattern| matches(pattern, name))
    }

    /// Whether the parameter or tensor of a name is left out.
    pub(crate) fn leaves_out(&self, name: &str) -> bool {
        self.left_out.iter().any(|pattern| matches(pattern, name))
    }

    /// Rejects patterns that match nothing. `params` are the names of the model, `tensors` those of the files.
    pub(crate) fn check_all_patterns_matched(&self, params: &[&str], tensors: &[&str]) -> Result<()> {
        let is_idle = |pattern: &&String, names: &[&str]| !names.iter().any(|name| matches(pattern, name));
        let lacking = self.lacking.iter().find(|pattern| is_idle(pattern, params));
        let left_out = self.left_out.iter().find(|pattern| is_idle(pattern, &[params, tensors].concat()));
        let Some(pattern) = lacking.or(left_out) else { return Ok(()) };
        let near = nearest(pattern, params.iter().copied()).join(", ");
        Err(Error::new(Kind::Config, format!("the pattern `{pattern}` of the load filter matches nothing"))
            .detail("nearest", near))
    }
}
