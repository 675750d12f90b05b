//! Typed access to the environment variables of a process.

use crate::error::{Error, Kind, Result};

/// Environment variables by name, behind a lookup function.
pub(super) struct EnvVars<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl EnvVars<'_> {
    /// Returns the value of a variable, without surrounding spaces; `None` if the variable is unset or empty.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty())
    }

    /// Whether a variable is set and not empty.
    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Whether two variables are set to the same value.
    pub(super) fn are_equal(&self, a: &str, b: &str) -> bool {
        self.get(a).is_some_and(|value| self.get(b) == Some(value))
    }

    /// Returns the number in a variable.
    ///
    /// # Errors
    /// `Kind::Config` for a value that is not a whole number.
    pub(super) fn count(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let junk =
            |_| Error::new(Kind::Config, format!("{name} is `{value}`, which is not a whole number from 0"));
        value.parse().map(Some).map_err(junk)
    }

    /// Returns the port in a variable.
    ///
    /// # Errors
    /// `Kind::Config` for a value that is not a number from 1 to 65535.
    pub(super) fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let port = value.parse().ok().filter(|port| *port > 0);
        let why = || format!("{name} is `{value}`, which is not a port: give a number from 1 to 65535");
        port.map(Some).ok_or_else(|| Error::new(Kind::Config, why()))
    }
}
