//! Encoding of numbers and texts for other processes: little-endian `u64`, and UTF-8 behind its length.

/// Appends numbers and texts to a byte vector.
#[derive(Debug, Default)]
pub(crate) struct Encoder(pub(crate) Vec<u8>);

impl Encoder {
    pub(crate) fn number(&mut self, n: u64) -> &mut Encoder {
        self.0.extend_from_slice(&n.to_le_bytes());
        self
    }

    pub(crate) fn count(&mut self, n: usize) -> &mut Encoder {
        self.number(n as u64)
    }

    pub(crate) fn counts(&mut self, all: &[usize]) -> &mut Encoder {
        self.count(all.len());
        all.iter().fold(self, |out, n| out.count(*n))
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Encoder {
        self.count(text.len());
        self.0.extend_from_slice(text.as_bytes());
        self
    }
}

/// Escapes a text so that a terminal shows it in one line: characters that are invisible, move the cursor or change the text
/// direction are escaped. Characters beyond the first `chars_max` are replaced by `…`.
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

/// Reads numbers and texts from received bytes. Invalid bytes give `None`, never a panic.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoder<'a>(pub(crate) &'a [u8]);

impl<'a> Decoder<'a> {
    pub(crate) fn number(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*first))
    }

    pub(crate) fn count(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    /// Reads a length and as many counts. Memory is bounded by the bytes received, whatever the length states.
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
    fn printable_escapes_control_characters() {
        assert_eq!(printable(r#"h.3 — ü "a\b" it's"#, 100), r#"h.3 — ü "a\b" it's"#);
        assert_eq!(printable("\x1b[31m\r\n\t\0\u{9b}", 100), r"\u{1b}[31m\r\n\t\0\u{9b}");
        assert_eq!(printable("a\u{202e}b\u{2028}c\u{200b}", 100), r"a\u{202e}b\u{2028}c\u{200b}");
        assert_eq!((printable("abc", 3), printable("abcd", 3)), ("abc".to_string(), "abc…".to_string()));
    }

    #[test]
    fn decoder_reads_what_the_encoder_wrote_and_rejects_truncated_bytes() {
        let mut out = Encoder::default();
        out.number(u64::MAX).counts(&[3, 0, 5]).text("h.3.mlp — ü").text("");
        let read = |bytes: &[u8]| {
            let mut from = Decoder(bytes);
            let all = (from.number()?, from.counts::<Vec<usize>>()?, from.text()?.to_string());
            Some((all, from.text()?.is_empty() && from.0.is_empty()))
        };
        let whole = ((u64::MAX, vec![3, 0, 5], "h.3.mlp — ü".to_string()), true);
        assert_eq!(read(&out.0), Some(whole));
        assert!((0..out.0.len()).all(|len| read(&out.0[..len]).is_none()));
        assert_eq!(Decoder(&[255; 8]).counts::<Vec<usize>>(), None);
        assert_eq!(Decoder(&[1, 0, 0, 0, 0, 0, 0, 0, 0xff]).text(), None);
    }
}
