//! Text to token numbers and back: a byte a token, or as `tokenizer.json` of a model folder says.

use shardgrad::nn::ModelConfig;
use shardgrad::{Error, Kind, Result};
use std::path::Path;

/// The file of a model folder that tells its tokens.
pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";
/// Files of older libraries that tell the tokens of a model.
const OTHER_FILES: [&str; 5] = ["vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"];
/// No file of tokens is longer than this; it is held as a whole.
#[cfg(feature = "tokenizers")]
const FILE_BYTES_MAX: u64 = 1_000_000_000;
/// The number of byte values.
pub(crate) const BYTES: usize = 256;

/// How text becomes token numbers.
#[derive(Debug)]
pub(crate) enum Tokenizer {
    /// Each byte is the token of its value.
    Bytes,
    /// As the file says, in tokens below a number.
    #[cfg(feature = "tokenizers")]
    File(Box<tokenizers::Tokenizer>, usize),
}

impl Tokenizer {
    /// The tokenizer of a model: of its folder, if it has one, else bytes.
    ///
    /// # Errors
    /// `Kind::Unsupported` for a folder with a tokenizer file if this program was built without the feature `tokenizers`, and for one
    /// that tells its tokens in other files only;
    /// `Kind::Checkpoint` for what is no file of the folder (a link out of it, a pipe, a device), or is too long;
    /// `Kind::Data` for a file that cannot be read; `Kind::Config` for a vocabulary that is larger than the model's.
    pub(crate) fn of(dir: Option<&Path>, config: &ModelConfig) -> Result<Tokenizer> {
        let find = |name: &str| dir.map(|dir| dir.join(name)).filter(|path| path.symlink_metadata().is_ok());
        let path = find(TOKENIZER_FILE);
        if let (None, Some(other)) = (&path, OTHER_FILES.iter().find_map(|name| find(name))) {
            let why = format!("{}: tokens are told here, but only {TOKENIZER_FILE} is read", other.display());
            let help = "write that file with the library of the model (a fast tokenizer saves it), or give token numbers";
            return Err(Error::new(Kind::Unsupported, why).detail("help", help));
        }
        let there = dir.filter(|_| path.is_some());
        let tokenizer = there.map_or(Ok(Tokenizer::Bytes), Tokenizer::read)?;
        let (needs, has) = (tokenizer.vocab(), config.vocab_size());
        if needs <= has {
            return Ok(tokenizer);
        }
        let why = match &tokenizer {
            Tokenizer::Bytes => format!("a vocabulary of {has} tokens is too small for bytes of text"),
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(..) => format!("a tokenizer of {needs} tokens for a model of {has}"),
        };
        let help = format!("give token numbers instead of text, or a model with {needs} tokens or more");
        Err(Error::new(Kind::Config, why).detail("help", help))
    }

    #[cfg(feature = "tokenizers")]
    fn read(dir: &Path) -> Result<Tokenizer> {
        let path = dir.join(TOKENIZER_FILE);
        let told = |e| Error::new(Kind::Data, format!("{}: no tokenizer can be read: {e}", path.display()));
        let text = shardgrad::nn::hf::read_text(dir, TOKENIZER_FILE, FILE_BYTES_MAX)?;
        let mut file = tokenizers::Tokenizer::from_bytes(text).map_err(told)?;
        // Many files say to cut texts and to fill them up, for models that read one at a time.
        file.with_padding(None).with_truncation(None).map_err(told)?;
        let last = file.get_vocab(true).into_values().max();
        Ok(Tokenizer::File(Box::new(file), last.map_or(0, |last| last as usize + 1)))
    }

    #[cfg(not(feature = "tokenizers"))]
    fn read(dir: &Path) -> Result<Tokenizer> {
        let path = dir.join(TOKENIZER_FILE);
        let why = format!("{}: this program was built without tokenizers", path.display());
        let help = "build it with `cargo build --release --features tokenizers`; train and eval take token numbers too (--tokens, .bin)";
        Err(Error::new(Kind::Unsupported, why).detail("help", help))
    }

    /// How many tokens there may be: one more than the largest.
    pub(crate) fn vocab(&self) -> usize {
        match self {
            Tokenizer::Bytes => BYTES,
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(_, vocab) => *vocab,
        }
    }

    /// Whether a token is a byte.
    pub(crate) fn is_bytes(&self) -> bool {
        matches!(self, Tokenizer::Bytes)
    }

    /// The tokens of a text, without any that mark its start or end.
    ///
    /// # Errors
    /// `Kind::Data` if the tokenizer has no token for some of the text.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(file, _) => Ok(cut(file, text, false)?.get_ids().to_vec()),
        }
    }

    /// The tokens of a text that goes on: behind those that the tokenizer puts at the start of a text, and without any that it puts
    /// at the end.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub(crate) fn encode_start(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => self.encode(text),
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(file, _) => {
                let made = cut(file, text, true)?;
                let put = made.get_special_tokens_mask().iter().rev().take_while(|put| **put == 1).count();
                Ok(made.get_ids()[..made.len() - put].to_vec())
            }
        }
    }

    /// Whether a token is one byte of a run that is joined as a whole: each further byte may change what those before it stand
    /// for, also letters that were whole.
    pub(crate) fn is_part_of_run(
        &self,
        #[cfg_attr(not(feature = "tokenizers"), expect(unused_variables))] token: u32,
    ) -> bool {
        match self {
            Tokenizer::Bytes => false,
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(file, _) => file.id_to_token(token).is_some_and(|text| is_byte(&text)),
        }
    }

    /// The text of some tokens, in UTF-8 as far as it goes.
    ///
    /// # Errors
    /// `Kind::Data` if the tokenizer cannot join them.
    pub(crate) fn decode(&self, tokens: &[u32]) -> Result<Vec<u8>> {
        match self {
            Tokenizer::Bytes => Ok(tokens.iter().map(|token| *token as u8).collect()),
            #[cfg(feature = "tokenizers")]
            Tokenizer::File(file, _) => {
                let told = |e| Error::new(Kind::Data, format!("tokens cannot be joined to text: {e}"));
                Ok(file.decode(tokens, true).map_err(told)?.into_bytes())
            }
        }
    }
}

/// Whether a token is named as a byte: `<0xE5>`.
#[cfg(feature = "tokenizers")]
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// The tokens of a text, with those that mark its start and end or without.
#[cfg(feature = "tokenizers")]
fn cut(file: &tokenizers::Tokenizer, text: &str, marked: bool) -> Result<tokenizers::Encoding> {
    let told = |e| Error::new(Kind::Data, format!("the text cannot be cut into tokens: {e}"));
    file.encode_fast(text, marked).map_err(told)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_their_own_tokens() {
        let config = ModelConfig::preset("tiny").unwrap();
        let bytes = Tokenizer::of(None, &config).unwrap();
        assert_eq!(bytes.encode("aé").unwrap(), [97, 195, 169]);
        assert_eq!(bytes.decode(&[97, 195, 169]).unwrap(), "aé".as_bytes());
        let ModelConfig::Gpt2(mut small) = config else { panic!("a GPT-2") };
        small.vocab_size = 255;
        let error = Tokenizer::of(None, &small.into()).unwrap_err();
        assert_eq!(error.message(), "a vocabulary of 255 tokens is too small for bytes of text");
    }

    /// Files made, and texts cut and joined, by the library that such files come from (`tests/hf/make_tokenizers.py`).
    #[cfg(feature = "tokenizers")]
    #[test]
    fn texts_are_cut_and_joined_as_the_file_says() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers");
        let text = std::fs::read_to_string(data.join("expected.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
        let ModelConfig::Gpt2(mut config) = ModelConfig::preset("tiny").unwrap() else { panic!("a GPT-2") };
        config.vocab_size = 290;
        let config = ModelConfig::Gpt2(config);
        for (name, cases) in expected.as_object().unwrap() {
            let file = Tokenizer::of(Some(&data.join(name)), &config).unwrap();
            assert!(!file.is_bytes() && file.vocab() <= 290, "{name}");
            for case in cases.as_array().unwrap() {
                let ids: Vec<u32> =
                    case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
                assert_eq!(file.encode(case["text"].as_str().unwrap()).unwrap(), ids, "{name}");
                // The second file marks the start of a text by its token 2, and the end by another.
                let start = [&[2][..usize::from(name == "wordpiece")], &ids].concat();
                assert_eq!(file.encode_start(case["text"].as_str().unwrap()).unwrap(), start, "{name}");
                assert_eq!(file.decode(&ids).unwrap(), case["back"].as_str().unwrap().as_bytes(), "{name}");
            }
        }
        let small = ModelConfig::preset("tiny").unwrap();
        let error = Tokenizer::of(Some(&data.join("bpe")), &small).unwrap_err();
        assert_eq!(error.message(), "a tokenizer of 290 tokens for a model of 256");
    }

    #[cfg(feature = "tokenizers")]
    #[test]
    fn a_bad_tokenizer_file_is_named() {
        let dir = crate::data::scratch::Scratch::new();
        let config = ModelConfig::preset("tiny").unwrap();
        for text in ["", "{}", "[1]", "{\"model\": {\"type\": \"Magic\"}}"] {
            let path = dir.file(TOKENIZER_FILE, text);
            let error = Tokenizer::of(Some(&dir.path("")), &config).unwrap_err();
            assert_eq!(error.kind(), Kind::Data);
            assert!(error.message().starts_with(&format!("{}: no tokenizer", path.display())), "{error}");
        }
    }

    /// Without suspicion the pipe is waited for, the device read without end.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn a_tokenizer_file_is_a_file_of_its_folder() {
        use std::os::unix::fs::symlink;
        let (dir, other) = (crate::data::scratch::Scratch::new(), crate::data::scratch::Scratch::new());
        let config = ModelConfig::preset("tiny").unwrap();
        let path = dir.path(TOKENIZER_FILE);
        let told = |why: &str| {
            let error = Tokenizer::of(Some(&dir.path("")), &config).unwrap_err();
            assert!(error.kind() == Kind::Checkpoint && error.message().ends_with(why), "{error}");
            std::fs::remove_file(&path).unwrap();
        };
        symlink(other.file("x", "{}"), &path).unwrap();
        told("is a link that leads out of its folder, which is not followed");
        symlink("/dev/zero", &path).unwrap();
        told("is a link that leads out of its folder, which is not followed");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        told("is a pipe or a device, not a file");
    }

    #[cfg(not(feature = "tokenizers"))]
    #[test]
    fn a_tokenizer_file_is_not_passed_over() {
        let dir = crate::data::scratch::Scratch::new();
        dir.file(TOKENIZER_FILE, "{}");
        let config = ModelConfig::preset("tiny").unwrap();
        let error = Tokenizer::of(Some(&dir.path("")), &config).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.message().ends_with("this program was built without tokenizers"), "{error}");
        assert!(error.details()[0].1.contains("--features tokenizers"));
    }
}
