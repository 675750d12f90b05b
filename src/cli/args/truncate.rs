//! Truncation of long command-line arguments in messages.

use std::ffi::OsString;
use std::path::Path;

/// Maximum number of characters of an argument in a message.
pub(crate) const VALUE_CHARS_MAX: usize = 80;

/// Truncates a value to [`VALUE_CHARS_MAX`] characters.
pub(crate) fn shortened(value: &str) -> String {
    match value.char_indices().nth(VALUE_CHARS_MAX) {
        None => value.to_string(),
        Some((end, _)) => format!("{}...", &value[..end]),
    }
}

/// Truncates every argument that a message repeats to 80 characters, except names of existing files.
pub(crate) fn with_short_arguments(message: &str, argv: &[OsString]) -> String {
    let values = argv.iter().map(|argument| argument.to_string_lossy().into_owned());
    let values = values.flat_map(|argument| {
        let value = argument.split_once('=').map(|(_, value)| value.to_string());
        [Some(argument), value]
    });
    let mut long: Vec<String> =
        values.flatten().filter(|v| v.chars().count() > VALUE_CHARS_MAX && !Path::new(v).exists()).collect();
    // One value may contain another.
    long.sort_by_key(|value| std::cmp::Reverse(value.len()));
    long.iter().fold(message.to_string(), |message, value| message.replace(value, &shortened(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_arguments_are_truncated() {
        let long = "é".repeat(10_000);
        let argv = ["shardgrad", "train", "--lr", &long, "-x"].map(OsString::from);
        let shown = with_short_arguments(&format!("invalid value '{long}' for '--lr'"), &argv);
        assert_eq!(shown, format!("invalid value '{}...' for '--lr'", "é".repeat(80)));
        let argv = [format!("--lr={long}x").into(), long.clone().into()];
        let shown = with_short_arguments(&format!("'{long}x', '{long}'"), &argv);
        assert_eq!(shown, format!("'{0}...', '{0}...'", "é".repeat(80)));
        let short = "y".repeat(80);
        assert_eq!(with_short_arguments(&short, &[short.clone().into()]), short);
    }
}
