//! Incremental detokenization: text is emitted as soon as no later token can change it.

use crate::tokenizer::Tokenizer;
use shardgrad::prelude::*;

/// Replacement character for incomplete UTF-8.
const UNFINISHED: char = '\u{fffd}';

/// The text after a prompt, decoded token by token. Only the last tokens are decoded again with each new one: those that its text may depend on,
/// starting at a character boundary.
pub(super) struct TextStreamer<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens.
    tokens: Vec<u32>,
    /// Number of tokens whose text no later token changes.
    settled: usize,
    /// The text of the settled tokens.
    known: String,
    /// The text of all tokens.
    now: String,
    /// Whether the next token may change the text of the last one.
    is_open: bool,
    /// All emitted text.
    emitted: String,
}

impl<'a> TextStreamer<'a> {
    /// Starts after the tokens of a prompt.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub(super) fn after_prompt(prompt: &[u32], tokenizer: &'a Tokenizer) -> Result<TextStreamer<'a>> {
        let known = decode_lossy(tokenizer, prompt)?;
        Ok(TextStreamer {
            tokenizer,
            tokens: prompt.to_vec(),
            settled: prompt.len(),
            now: known.clone(),
            known,
            is_open: prompt.last().is_some_and(|token| tokenizer.is_byte_fallback(*token)),
            emitted: String::new(),
        })
    }

    /// Adds a token and returns the text that it settles.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub(super) fn push(&mut self, token: u32) -> Result<String> {
        self.tokens.push(token);
        let now = decode_lossy(self.tokenizer, &self.tokens)?;
        // A token without text does not end a run of byte tokens.
        self.is_open = self.tokenizer.is_byte_fallback(token) || self.is_open && now == self.now;
        self.now = now;
        if self.is_open || self.now.ends_with(UNFINISHED) {
            return Ok(String::new());
        }
        let fresh = self.rest();
        // The text of a token may depend on whether a token precedes it.
        let last = decode_lossy(self.tokenizer, &self.tokens[self.settled..])?;
        if !last.is_empty() {
            self.tokens.drain(..self.settled);
            self.now = last;
        }
        (self.settled, self.known) = (self.tokens.len(), self.now.clone());
        self.emitted.push_str(&fresh);
        Ok(fresh)
    }

    /// Returns the text that was still open, and all emitted text including it.
    pub(super) fn end(mut self) -> (String, String) {
        let rest = self.rest();
        self.emitted.push_str(&rest);
        (rest, self.emitted)
    }

    /// Returns the text after the settled text.
    fn rest(&self) -> String {
        let alike = self.known.chars().zip(self.now.chars()).take_while(|(a, b)| a == b);
        self.now[alike.map(|(letter, _)| letter.len_utf8()).sum()..].to_string()
    }
}

/// Decodes tokens; invalid UTF-8 becomes replacement characters.
fn decode_lossy(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<String> {
    Ok(String::from_utf8_lossy(&tokenizer.decode(tokens)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the text emitted with each token, and at the end.
    fn emitted(tokenizer: &Tokenizer, prompt: &[u32], tokens: &[u32]) -> Vec<String> {
        let mut text = TextStreamer::after_prompt(prompt, tokenizer).unwrap();
        let mut emitted: Vec<String> = tokens.iter().map(|token| text.push(*token).unwrap()).collect();
        let (rest, all) = text.end();
        emitted.push(rest);
        assert_eq!(emitted.concat(), all);
        emitted
    }

    #[test]
    fn bytes_are_streamed_by_whole_characters() {
        let emitted = |bytes: &[u8]| {
            emitted(&Tokenizer::Bytes, &[97], &bytes.iter().copied().map(u32::from).collect::<Vec<_>>())
        };
        assert_eq!(emitted("bé".as_bytes()), ["b", "", "é", ""]);
        // An incomplete character followed by a whole one.
        assert_eq!(emitted(&[0xe0, 0xe1, 0xa0, 0xa0]).concat(), "\u{fffd}\u{1820}");
        assert_eq!(emitted(&[0xe0, 0xde, 0xbf]).concat(), "\u{fffd}\u{7bf}");
        // A character that is never completed.
        assert_eq!(emitted(&[b'b', 0xee]), ["b", "", "\u{fffd}"]);
        assert_eq!(
            emitted(&[0xff, 0xff, b'c', 0xe5, 0x8c, 0x97]),
            ["", "", "\u{fffd}\u{fffd}c", "", "", "北", ""]
        );
    }

    #[cfg(feature = "tokenizers")]
    mod files {
        use super::*;
        use crate::data::scratch::Scratch;
        use crate::tokenizer::TOKENIZER_FILE;
        use shardgrad::kernels::op::random::uniform_at;
        use shardgrad::nn::ModelConfig;
        use std::path::Path;

        fn open(dir: &Path) -> Tokenizer {
            let ModelConfig::Gpt2(mut config) = ModelConfig::preset("tiny").unwrap() else {
                panic!("a GPT-2")
            };
            config.vocab_size = 300;
            Tokenizer::for_model(Some(dir), &config.into()).unwrap()
        }

        /// As in Llama 2: words with a leading mark, and byte fallback.
        fn with_bytes(dir: &Scratch) -> Tokenizer {
            let words = ["<unk>", "<s>", "\u{2581}the", "\u{2581}", "ing", "\u{2581}cat"].map(String::from);
            let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
            let vocab: serde_json::Map<_, _> =
                words.into_iter().chain(bytes).zip((0..).map(|id: u32| id.into())).collect();
            let json = serde_json::json!({
                "version": "1.0",
                "added_tokens": [{"id": 1, "content": "<s>", "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": true}],
                "normalizer": {"type": "Prepend", "prepend": "\u{2581}"},
                "decoder": {"type": "Sequence", "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
                    {"type": "ByteFallback"}, {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
                "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true, "unk_token": "<unk>"},
            });
            dir.file(TOKENIZER_FILE, json.to_string());
            open(&dir.path(""))
        }

        #[test]
        fn byte_fallback_run_is_streamed_at_its_end() {
            let dir = Scratch::new();
            let tokenizer = with_bytes(&dir);
            let byte = |byte: u32| 6 + byte;
            let [e5, b8c, b97, e4] = [0xe5, 0x8c, 0x97, 0xe4].map(byte);
            assert_eq!(emitted(&tokenizer, &[2], &[e5, b8c, b97, 2]), ["", "", "", "北 the", ""]);
            let broken = "\u{fffd}".repeat(4) + " the";
            assert_eq!(emitted(&tokenizer, &[2], &[e5, b8c, b97, e4, 2]), ["", "", "", "", &broken, ""]);
            assert_eq!(
                emitted(&tokenizer, &[2], &[e5, b8c, b97, 1, e4, 2]).concat(),
                broken,
                "a mark between"
            );
            assert_eq!(emitted(&tokenizer, &[2], &[e5, b8c, b97]), ["", "", "", "北"]);
        }

        #[test]
        fn streamed_text_equals_decoded_text() {
            let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers");
            let dir = Scratch::new();
            for (name, tokenizer) in [
                ("bpe", open(&data.join("bpe"))),
                ("wordpiece", open(&data.join("wordpiece"))),
                ("bytes", with_bytes(&dir)),
                ("none", Tokenizer::Bytes),
            ] {
                let prompt = if name == "bytes" { vec![2, 5] } else { tokenizer.encode("the cat").unwrap() };
                for case in 0..200 {
                    let count = tokenizer.vocab() as f64;
                    let tokens: Vec<u32> = (0..60).map(|i| (count * uniform_at(case, 3, i)) as u32).collect();
                    let whole = decode_lossy(&tokenizer, &[&prompt[..], &tokens].concat()).unwrap();
                    let start = decode_lossy(&tokenizer, &prompt).unwrap();
                    let made = start + &emitted(&tokenizer, &prompt, &tokens).concat();
                    assert_eq!(made, whole, "{name}, case {case}: {tokens:?}");
                }
            }
        }
    }
}
