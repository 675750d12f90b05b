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

/// A text as a terminal can show it, in one line: what is invisible, moves the cursor or turns the direction of reading is escaped.
/// Characters beyond the first `chars_max` are dropped, with `…` in their place.
pub(crate) fn printable(text: &str, chars_max: usize) -> String {
    let mut out = String::new();
    for (at, c) in text.chars().enumerate() {
        if at == chars_max {
            out.push('…');
            break;
        }
        match c {
            '\\' | '"' | '\'' => out.push(c),
            _ => out.extend(c.escape_debug()),
        }
    }
    out
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printable_text_has_no_character_that_acts_on_a_terminal() {
        assert_eq!(printable(r#"h.3 — ü "a\b" it's"#, 100), r#"h.3 — ü "a\b" it's"#);
        assert_eq!(printable("\x1b[31m\r\n\t\0\u{9b}", 100), r"\u{1b}[31m\r\n\t\0\u{9b}");
        assert_eq!(printable("a\u{202e}b\u{2028}c\u{200b}", 100), r"a\u{202e}b\u{2028}c\u{200b}");
        assert_eq!((printable("abc", 3), printable("abcd", 3)), ("abc".to_string(), "abc…".to_string()));
    }

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
}
