//! The text of tokens that come one by one, told as far as no later token can change it.

use crate::tokenizer::Tokenizer;
use shardgrad::prelude::*;

/// What stands for a letter of which some bytes are missing.
const UNFINISHED: char = '\u{fffd}';

/// The text behind a prompt. Only the last tokens are joined again when one comes: as many as the text of the next one may
/// depend on, from a place on at which a letter ends.
pub(super) struct Text<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens.
    tokens: Vec<u32>,
    /// How many of them have a text that no token behind them changes.
    settled: usize,
    /// The text of those.
    known: String,
    /// The text of all of them.
    now: String,
    /// Whether the next token may change the text of the last.
    is_open: bool,
    /// All that was told.
    told: String,
}

impl<'a> Text<'a> {
    /// Behind the tokens of a prompt.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub(super) fn behind(prompt: &[u32], tokenizer: &'a Tokenizer) -> Result<Text<'a>> {
        let known = joined(tokenizer, prompt)?;
        Ok(Text {
            tokenizer,
            tokens: prompt.to_vec(),
            settled: prompt.len(),
            now: known.clone(),
            known,
            is_open: prompt.last().is_some_and(|token| tokenizer.is_part_of_run(*token)),
            told: String::new(),
        })
    }

    /// The text that one more token makes known.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub(super) fn push(&mut self, token: u32) -> Result<String> {
        self.tokens.push(token);
        let now = joined(self.tokenizer, &self.tokens)?;
        // A token without a text ends no run of bytes.
        self.is_open = self.tokenizer.is_part_of_run(token) || self.is_open && now == self.now;
        self.now = now;
        if self.is_open || self.now.ends_with(UNFINISHED) {
            return Ok(String::new());
        }
        let fresh = self.rest();
        // The text of a token may depend on whether any stands before it.
        let last = joined(self.tokenizer, &self.tokens[self.settled..])?;
        if !last.is_empty() {
            self.tokens.drain(..self.settled);
            self.now = last;
        }
        (self.settled, self.known) = (self.tokens.len(), self.now.clone());
        self.told.push_str(&fresh);
        Ok(fresh)
    }

    /// What the next token might have changed, and all that was told, with that.
    pub(super) fn end(mut self) -> (String, String) {
        let rest = self.rest();
        self.told.push_str(&rest);
        (rest, self.told)
    }

    /// What is behind the text that is known.
    fn rest(&self) -> String {
        let alike = self.known.chars().zip(self.now.chars()).take_while(|(a, b)| a == b);
        self.now[alike.map(|(letter, _)| letter.len_utf8()).sum()..].to_string()
    }
}

/// The text of tokens; what is no UTF-8 is shown as such.
fn joined(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<String> {
    Ok(String::from_utf8_lossy(&tokenizer.decode(tokens)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is told with each token, and at the end.
    fn told(tokenizer: &Tokenizer, prompt: &[u32], tokens: &[u32]) -> Vec<String> {
        let mut text = Text::behind(prompt, tokenizer).unwrap();
        let mut told: Vec<String> = tokens.iter().map(|token| text.push(*token).unwrap()).collect();
        let (rest, all) = text.end();
        told.push(rest);
        assert_eq!(told.concat(), all);
        told
    }

    #[test]
    fn bytes_are_told_by_whole_letters_and_none_is_lost() {
        let told = |bytes: &[u8]| {
            told(&Tokenizer::Bytes, &[97], &bytes.iter().copied().map(u32::from).collect::<Vec<_>>())
        };
        assert_eq!(told("bé".as_bytes()), ["b", "", "é", ""]);
        // A letter that breaks off, and a whole one behind it.
        assert_eq!(told(&[0xe0, 0xe1, 0xa0, 0xa0]).concat(), "\u{fffd}\u{1820}");
        assert_eq!(told(&[0xe0, 0xde, 0xbf]).concat(), "\u{fffd}\u{7bf}");
        // A letter that never ends.
        assert_eq!(told(&[b'b', 0xee]), ["b", "", "\u{fffd}"]);
        assert_eq!(
            told(&[0xff, 0xff, b'c', 0xe5, 0x8c, 0x97]),
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
            Tokenizer::of(Some(dir), &config.into()).unwrap()
        }

        /// As in Llama 2: words behind a mark, and bytes for what is no word.
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
        fn a_run_of_bytes_is_told_when_it_has_ended() {
            let dir = Scratch::new();
            let tokenizer = with_bytes(&dir);
            let byte = |byte: u32| 6 + byte;
            let [e5, b8c, b97, e4] = [0xe5, 0x8c, 0x97, 0xe4].map(byte);
            assert_eq!(told(&tokenizer, &[2], &[e5, b8c, b97, 2]), ["", "", "", "北 the", ""]);
            let broken = "\u{fffd}".repeat(4) + " the";
            assert_eq!(told(&tokenizer, &[2], &[e5, b8c, b97, e4, 2]), ["", "", "", "", &broken, ""]);
            assert_eq!(told(&tokenizer, &[2], &[e5, b8c, b97, 1, e4, 2]).concat(), broken, "a mark between");
            assert_eq!(told(&tokenizer, &[2], &[e5, b8c, b97]), ["", "", "", "北"]);
        }

        #[test]
        fn what_is_told_token_by_token_is_the_text_of_all() {
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
                    let whole = joined(&tokenizer, &[&prompt[..], &tokens].concat()).unwrap();
                    let start = joined(&tokenizer, &prompt).unwrap();
                    let made = start + &told(&tokenizer, &prompt, &tokens).concat();
                    assert_eq!(made, whole, "{name}, case {case}: {tokens:?}");
                }
            }
        }
    }
}
