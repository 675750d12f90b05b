//! Tokenizers: bytes as tokens, or `tokenizer.json` of a model folder.

use shardgrad::nn::ModelConfig;
use shardgrad::{Error, Kind, Result};
use std::path::Path;

/// The tokenizer file of a model folder.
pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";
/// Tokenizer files of older libraries, which are not supported.
const OTHER_FILES: [&str; 5] = ["vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"];
/// Maximum size of a tokenizer file, which is read whole.
#[cfg(feature = "tokenizers")]
const FILE_BYTES_MAX: u64 = 1_000_000_000;
/// The number of byte values.
pub(crate) const BYTES: usize = 256;

/// Converts text to token ids and back.
#[derive(Debug)]
pub(crate) enum Tokenizer {
    /// Each byte is a token.
    Bytes,
    /// A `tokenizer.json`, and its vocabulary size.
    #[cfg(feature = "tokenizers")]
    File(Box<tokenizers::Tokenizer>, usize),
}

impl Tokenizer {
    /// Loads the tokenizer of a model folder; without a tokenizer file, bytes.
    ///
    /// # Errors
    /// `Kind::Unsupported` for a tokenizer file if this program was built without the feature `tokenizers`, and for a folder with only older
    /// tokenizer files; `Kind::Checkpoint` if it is not a regular file in the folder, or too large; `Kind::Data` if it cannot be parsed;
    /// `Kind::Config` for a vocabulary larger than the model's.
    pub(crate) fn for_model(dir: Option<&Path>, config: &ModelConfig) -> Result<Tokenizer> {
        let find = |name: &str| dir.map(|dir| dir.join(name)).filter(|path| path.symlink_metadata().is_ok());
        let path = find(TOKENIZER_FILE);
        if let (None, Some(other)) = (&path, OTHER_FILES.iter().find_map(|name| find(name))) {
            let why =
                format!("{}: this tokenizer format is not supported, only {TOKENIZER_FILE}", other.display());
            let help = "save a fast tokenizer with transformers (save_pretrained), or use token ids (--tokens, .bin)";
            return Err(Error::new(Kind::Unsupported, why).detail("help", help));
        }
        let tokenizer_dir = dir.filter(|_| path.is_some());
        let tokenizer = tokenizer_dir.map_or(Ok(Tokenizer::Bytes), Tokenizer::read)?;
        let (needs, has) = (tokenizer.vocab(), config.vocab_size());
        if needs <= has {
            return Ok(tokenizer);
        }
        let why = match &tokenizer {
            Tokenizer::Bytes => format!("a vocabulary of {has} tokens is too small for text as bytes"),
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(..) => format!("the tokenizer has {needs} tokens, but the model only {has}"),
        };
        let help = format!("use token ids instead of text, or a model with at least {needs} tokens");
        Err(Error::new(Kind::Config, why).detail("help", help))
    }

    #[cfg(feature = "tokenizers")]
    fn read(dir: &Path) -> Result<Tokenizer> {
        let path = dir.join(TOKENIZER_FILE);
        let failed = |e| Error::new(Kind::Data, format!("{}: invalid tokenizer: {e}", path.display()));
        let text = shardgrad::nn::checkpoint::read_text(dir, TOKENIZER_FILE, FILE_BYTES_MAX)?;
        let mut file = tokenizers::Tokenizer::from_bytes(text).map_err(failed)?;
        // Many files enable truncation and padding, for models that read one sequence at a time.
        file.with_padding(None).with_truncation(None).map_err(failed)?;
        let last = file.get_vocab(true).into_values().max();
        Ok(Tokenizer::File(Box::new(file), last.map_or(0, |last| last as usize + 1)))
    }

    #[cfg(not(feature = "tokenizers"))]
    fn read(dir: &Path) -> Result<Tokenizer> {
        let path = dir.join(TOKENIZER_FILE);
        let why = format!("{}: this program was built without tokenizer support", path.display());
        let help = "build with `cargo build --release --features tokenizers`, or use token ids in train and eval (--tokens, .bin)";
        Err(Error::new(Kind::Unsupported, why).detail("help", help))
    }

    /// Returns the vocabulary size: the largest token id plus one.
    pub(crate) fn vocab(&self) -> usize {
        match self {
            Tokenizer::Bytes => BYTES,
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(_, vocab) => *vocab,
        }
    }

    /// Returns whether tokens are bytes.
    pub(crate) fn is_bytes(&self) -> bool {
        matches!(self, Tokenizer::Bytes)
    }

    /// Encodes a text without BOS and EOS tokens.
    ///
    /// # Errors
    /// `Kind::Data` if the tokenizer cannot encode the text.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(file, _) => Ok(encode_with(file, text, false)?.get_ids().to_vec()),
        }
    }

    /// Encodes a prompt: with the special tokens that the tokenizer puts at the start (BOS), without those at the end.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub(crate) fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => self.encode(text),
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(file, _) => {
                let made = encode_with(file, text, true)?;
                let put = made.get_special_tokens_mask().iter().rev().take_while(|put| **put == 1).count();
                Ok(made.get_ids()[..made.len() - put].to_vec())
            }
        }
    }

    /// Returns whether a token is a byte-fallback token, whose run is decoded as a whole: a further byte may change the text of those before it.
    pub(crate) fn is_byte_fallback(
        &self,
        #[cfg_attr(not(feature = "tokenizers"), expect(unused_variables))] token: u32,
    ) -> bool {
        match self {
            Tokenizer::Bytes => false,
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(file, _) => file.id_to_token(token).is_some_and(|text| is_byte(&text)),
        }
    }

    /// Decodes tokens to bytes, mostly UTF-8.
    ///
    /// # Errors
    /// `Kind::Data` if the tokenizer cannot decode them.
    pub(crate) fn decode(&self, tokens: &[u32]) -> Result<Vec<u8>> {
        match self {
            Tokenizer::Bytes => Ok(tokens.iter().map(|token| *token as u8).collect()),
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(file, _) => {
                let failed = |e| Error::new(Kind::Data, format!("cannot decode tokens: {e}"));
                Ok(file.decode(tokens, true).map_err(failed)?.into_bytes())
            }
        }
    }
}

/// Returns whether a token is a byte-fallback token, such as `<0xE5>`.
#[cfg(feature = "tokenizers")]
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Encodes a text, with or without special tokens at its start and end.
#[cfg(feature = "tokenizers")]
fn encode_with(file: &tokenizers::Tokenizer, text: &str, marked: bool) -> Result<tokenizers::Encoding> {
    let failed = |e| Error::new(Kind::Data, format!("cannot tokenize the text: {e}"));
    file.encode_fast(text, marked).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_their_own_tokens() {
        let config = ModelConfig::preset("tiny").unwrap();
        let bytes = Tokenizer::for_model(None, &config).unwrap();
        assert_eq!(bytes.encode("aé").unwrap(), [97, 195, 169]);
        assert_eq!(bytes.decode(&[97, 195, 169]).unwrap(), "aé".as_bytes());
        let ModelConfig::Gpt2(mut small) = config else { panic!("a GPT-2") };
        small.vocab_size = 255;
        let error = Tokenizer::for_model(None, &small.into()).unwrap_err();
        assert_eq!(error.message(), "a vocabulary of 255 tokens is too small for text as bytes");
    }

    /// Fixtures of the tokenizers library, with its encodings and decodings (`tests/hf/make_tokenizers.py`).
    #[cfg(feature = "tokenizers")]
    #[test]
    fn encode_and_decode_match_the_tokenizers_library() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers");
        let text = std::fs::read_to_string(data.join("expected.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
        let ModelConfig::Gpt2(mut config) = ModelConfig::preset("tiny").unwrap() else { panic!("a GPT-2") };
        config.vocab_size = 290;
        let config = ModelConfig::Gpt2(config);
        for (name, cases) in expected.as_object().unwrap() {
            let file = Tokenizer::for_model(Some(&data.join(name)), &config).unwrap();
            assert!(!file.is_bytes() && file.vocab() <= 290, "{name}");
            for case in cases.as_array().unwrap() {
                let ids: Vec<u32> =
                    case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
                assert_eq!(file.encode(case["text"].as_str().unwrap()).unwrap(), ids, "{name}");
                // The second tokenizer adds the BOS token 2, and an EOS token.
                let start = [&[2][..usize::from(name == "wordpiece")], &ids].concat();
                assert_eq!(file.encode_prompt(case["text"].as_str().unwrap()).unwrap(), start, "{name}");
                assert_eq!(file.decode(&ids).unwrap(), case["back"].as_str().unwrap().as_bytes(), "{name}");
            }
        }
        let small = ModelConfig::preset("tiny").unwrap();
        let error = Tokenizer::for_model(Some(&data.join("bpe")), &small).unwrap_err();
        assert_eq!(error.message(), "the tokenizer has 290 tokens, but the model only 256");
    }

    #[cfg(feature = "tokenizers")]
    #[test]
    fn a_bad_tokenizer_file_is_named() {
        let dir = crate::data::scratch::Scratch::new();
        let config = ModelConfig::preset("tiny").unwrap();
        for text in ["", "{}", "[1]", "{\"model\": {\"type\": \"Magic\"}}"] {
            let path = dir.file(TOKENIZER_FILE, text);
            let error = Tokenizer::for_model(Some(&dir.path("")), &config).unwrap_err();
            assert_eq!(error.kind(), Kind::Data);
            assert!(
                error.message().starts_with(&format!("{}: invalid tokenizer", path.display())),
                "{error}"
            );
        }
    }

    /// Opening a pipe would block, reading a device never ends.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn tokenizer_file_must_be_a_regular_file_inside_the_folder() {
        use std::os::unix::fs::symlink;
        let (dir, other) = (crate::data::scratch::Scratch::new(), crate::data::scratch::Scratch::new());
        let config = ModelConfig::preset("tiny").unwrap();
        let path = dir.path(TOKENIZER_FILE);
        let check_refused = |why: &str| {
            let error = Tokenizer::for_model(Some(&dir.path("")), &config).unwrap_err();
            assert!(error.kind() == Kind::Checkpoint && error.message().ends_with(why), "{error}");
            std::fs::remove_file(&path).unwrap();
        };
        symlink(other.file("x", "{}"), &path).unwrap();
        check_refused("is a symlink out of its folder, which is not followed");
        symlink("/dev/zero", &path).unwrap();
        check_refused("is a symlink out of its folder, which is not followed");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        check_refused("is a pipe or a device, not a file");
    }

    #[cfg(not(feature = "tokenizers"))]
    #[test]
    fn tokenizer_file_is_refused_without_the_tokenizers_feature() {
        let dir = crate::data::scratch::Scratch::new();
        dir.file(TOKENIZER_FILE, "{}");
        let config = ModelConfig::preset("tiny").unwrap();
        let error = Tokenizer::for_model(Some(&dir.path("")), &config).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.message().ends_with("this program was built without tokenizer support"), "{error}");
        assert!(error.details()[0].1.contains("--features tokenizers"));
    }
}
