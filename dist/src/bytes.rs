//! Numbers and texts as the bytes that ranks of other processes read.

/// Bytes that grow.
#[derive(Debug, Default)]
pub(crate) struct Writing(pub(crate) Vec<u8>);

impl Writing {
    pub(crate) fn number(&mut self, n: u64) -> &mut Writing {
        self.0.extend_from_slice(&n.to_le_bytes());
        self
    }

    pub(crate) fn count(&mut self, n: usize) -> &mut Writing {
        self.number(n as u64)
    }

    pub(crate) fn counts(&mut self, all: &[usize]) -> &mut Writing {
        self.count(all.len());
        all.iter().fold(self, |out, n| out.count(*n))
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Writing {
        self.count(text.len());
        self.0.extend_from_slice(text.as_bytes());
        self
    }
}

/// Bytes that were received and are not read yet. Whatever they are, reading them gives `None` at worst.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading<'a>(pub(crate) &'a [u8]);

impl<'a> Reading<'a> {
    pub(crate) fn number(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*first))
    }

    pub(crate) fn count(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    /// Counts one after another; no more are made room for than there are bytes.
    pub(crate) fn counts<C: FromIterator<usize>>(&mut self) -> Option<C> {
        (0..self.count()?).map(|_| self.count()).collect()
    }

    pub(crate) fn text(&mut self) -> Option<&'a str> {
        let len = self.count()?;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        std::str::from_utf8(text).ok()
    }
}

/// Returns a text that came from elsewhere with its control characters escaped, so that it cannot steer a terminal.
pub(crate) fn printable(text: &str) -> String {
    // Characters that change the direction of the text behind them mislead as control characters do.
    let steers = |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match steers(c) {
            true => shown.extend(c.escape_debug()),
            false => shown.push(c),
        }
    }
    shown
}

/// [`printable`] of each line of a text.
pub(crate) fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<String>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_is_cut_off_is_not() {
        let mut out = Writing::default();
        out.number(u64::MAX).counts(&[3, 0, 5]).text("h.3.mlp — ü").text("");
        let read = |bytes: &[u8]| {
            let mut from = Reading(bytes);
            let all = (from.number()?, from.counts::<Vec<usize>>()?, from.text()?.to_string());
            Some((all, from.text()?.is_empty() && from.0.is_empty()))
        };
        let whole = ((u64::MAX, vec![3, 0, 5], "h.3.mlp — ü".to_string()), true);
        assert_eq!(read(&out.0), Some(whole));
        assert!((0..out.0.len()).all(|len| read(&out.0[..len]).is_none()));
        assert_eq!(Reading(&[255; 8]).counts::<Vec<usize>>(), None);
        assert_eq!(Reading(&[1, 0, 0, 0, 0, 0, 0, 0, 0xff]).text(), None);
    }

    #[test]
    fn control_characters_are_escaped_and_other_text_stays() {
        assert_eq!(printable("gewöhnlich \"x\" \\ 日本"), "gewöhnlich \"x\" \\ 日本");
        assert_eq!(printable("a\u{1b}[31m\r\n\t\0\u{7f}\u{9b}"), "a\\u{1b}[31m\\r\\n\\t\\0\\u{7f}\\u{9b}");
        assert_eq!(printable("\u{202e}txt"), "\\u{202e}txt");
        assert_eq!(printable_lines("a\u{7}\nb\r\n"), "a\\u{7}\nb\\r\n");
    }
}
