//! Values of the command line in messages: cut, so that a long one does not hide what is wrong with it.

use std::ffi::OsString;
use std::path::Path;

/// A message shows no more characters of an argument.
pub(crate) const VALUE_CHARS_MAX: usize = 80;

/// The first characters of a value.
pub(crate) fn shortened(value: &str) -> String {
    match value.char_indices().nth(VALUE_CHARS_MAX) {
        None => value.to_string(),
        Some((end, _)) => format!("{}...", &value[..end]),
    }
}

/// Returns a message with every argument that it repeats cut to 80 characters, but for names of files that exist.
pub(crate) fn with_short_arguments(message: &str, argv: &[OsString]) -> String {
    let values = argv.iter().map(|argument| argument.to_string_lossy().into_owned());
    let values = values.flat_map(|argument| {
        let value = argument.split_once('=').map(|(_, value)| value.to_string());
        [Some(argument), value]
    });
    let mut long: Vec<String> =
        values.flatten().filter(|v| v.chars().count() > VALUE_CHARS_MAX && !Path::new(v).exists()).collect();
    // A value may be a part of another one.
    long.sort_by_key(|value| std::cmp::Reverse(value.len()));
    long.iter().fold(message.to_string(), |message, value| message.replace(value, &shortened(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_arguments_are_cut_and_others_stay() {
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
