//! Tokenizing text files chunk by chunk into a temporary token file, which is then read by position.

use super::corpus::{Segment, Source, TokenWidth, not_utf8, read_failed};
use crate::tokenizer::Tokenizer;
use shardgrad::{Error, Kind, Result};
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Bytes of text tokenized at a time; a tokenizer needs about 100 times as much memory.
const CHUNK_BYTES: usize = 1 << 20;
/// Bytes of context on either side by which a split point is checked.
const CONTEXT_BYTES: usize = 512;
/// Maximum number of split points tried per chunk.
const SPLITS_TRIED_MAX: usize = 64;

/// A temporary token file. It is unlinked right after creation, so the system frees it however the program ends.
#[derive(Debug)]
pub(super) struct TokensOnDisk {
    file: Arc<File>,
    width: TokenWidth,
    vocab: usize,
    len: u64,
}

impl TokensOnDisk {
    /// Creates an empty file in a folder, which is created if missing; `vocab` is the vocabulary size.
    ///
    /// # Errors
    /// `Kind::Io` if the file cannot be created.
    pub(super) fn new(dir: &Path, vocab: usize) -> Result<TokensOnDisk> {
        let refused = |e: std::io::Error| {
            let why = format!("cannot create a temporary token file in {}: {e}", dir.display());
            Error::new(Kind::Io, why).detail("help", "use a writable folder (--out, or TMPDIR)")
        };
        fs::create_dir_all(dir).map_err(refused)?;
        let file = create_unlinked(dir).map_err(refused)?;
        Ok(TokensOnDisk { file: Arc::new(file), width: TokenWidth::of(vocab), vocab, len: 0 })
    }

    /// Appends tokens.
    fn append(&mut self, tokens: &[u32]) -> Result<()> {
        if let Some(token) = tokens.iter().find(|token| **token as usize >= self.vocab) {
            let why =
                format!("the tokenizer returned token {token}, outside the vocabulary 0..{}", self.vocab);
            return Err(Error::new(Kind::Data, why).detail("help", "use the tokenizer.json of this model"));
        }
        let bytes = self.width.to_bytes(tokens);
        let at = self.len * self.width.bytes() as u64;
        let failed = |e| Error::new(Kind::Io, format!("cannot write tokens to disk: {e}"));
        self.file.write_all_at(&bytes, at).map_err(failed)?;
        self.len += tokens.len() as u64;
        Ok(())
    }

    /// Tokenizes a text file of `len` bytes and appends its tokens: those of the whole text, as far as the context around split points
    /// shows.
    ///
    /// # Errors
    /// `Kind::Data` if the file is not UTF-8 (with the offset of the first bad byte) or became shorter; errors of the tokenizer;
    /// `Kind::OutOfMemory` for a very long text without a split point; `Kind::Io` if the file cannot be read.
    pub(super) fn tokenize(
        &mut self,
        path: &Path,
        file: &File,
        len: u64,
        tokenizer: &Tokenizer,
    ) -> Result<Segment> {
        self.tokenize_in_chunks(path, (file, len), tokenizer, CHUNK_BYTES)
    }

    fn tokenize_in_chunks(
        &mut self,
        path: &Path,
        (file, len): (&File, u64),
        tokenizer: &Tokenizer,
        chunk: usize,
    ) -> Result<Segment> {
        let (first, mut held, mut done, mut wanted) = (self.len, Vec::new(), 0u64, chunk);
        let mut before = String::new();
        loop {
            let at = done + held.len() as u64;
            let more = wanted.saturating_sub(held.len()).min(usize::try_from(len - at).unwrap_or(usize::MAX));
            read_more(path, file, at, more, &mut held)?;
            let is_last = at + more as u64 == len;
            let text = match std::str::from_utf8(&held) {
                Ok(text) => text,
                // A character cut by the end of the chunk is completed by the next read.
                Err(e) if e.error_len().is_none() && !is_last => {
                    std::str::from_utf8(&held[..e.valid_up_to()]).expect("so much is valid")
                }
                Err(e) => {
                    return Err(not_utf8(path, done + e.valid_up_to() as u64, held[e.valid_up_to()]));
                }
            };
            if is_last {
                self.append(&encode_after(tokenizer, &before, text)?)?;
                break;
            }
            match find_split(tokenizer, text)? {
                Some(at) => {
                    self.append(&encode_after(tokenizer, &before, &text[..at])?)?;
                    before = text[text.floor_char_boundary(at.saturating_sub(CONTEXT_BYTES))..at].to_string();
                    held.drain(..at);
                    (done, wanted) = (done + at as u64, chunk);
                }
                None => wanted = held.len().saturating_mul(2),
            }
        }
        let start = first * self.width.bytes() as u64;
        let source = Source::Unlinked(self.file.clone(), start);
        Ok(Segment { source, width: self.width, len: self.len - first })
    }
}

/// Creates a file and unlinks it.
fn create_unlinked(dir: &Path) -> std::io::Result<File> {
    let mut tries = 0;
    loop {
        let path = dir.join(format!(".tokens-{}-{tries}.bin", std::process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
            // Left by a program that was killed before the unlink.
            Err(e) if e.kind() == ErrorKind::AlreadyExists && tries < 100 => tries += 1,
            made => return made.and_then(|file| fs::remove_file(&path).map(|()| file)),
        }
    }
}

/// Appends `more` bytes of a file from byte `at` on.
fn read_more(path: &Path, file: &File, at: u64, more: usize, held: &mut Vec<u8>) -> Result<()> {
    let had = held.len();
    if held.try_reserve(more).is_err() {
        let why = format!(
            "{}: not enough memory to tokenize {} bytes of text without a line or word break",
            path.display(),
            had + more
        );
        let help = "add line breaks, or tokenize the file elsewhere and pass a .bin file of token ids";
        return Err(Error::new(Kind::OutOfMemory, why).detail("help", help));
    }
    held.resize(had + more, 0);
    file.read_exact_at(&mut held[had..], at).map_err(|e| read_failed(path, &e))
}

/// Finds the last split point in the second half of a text, where splitting does not change the tokens: the start of a line, else the end of a
/// word.
fn find_split(tokenizer: &Tokenizer, text: &str) -> Result<Option<usize>> {
    let bytes = text.as_bytes();
    let later = (text.len() / 2).max(2)..text.len().saturating_sub(1);
    let is_not_space = |at: usize| !bytes[at].is_ascii_whitespace();
    let is_line_start = |at: &usize| bytes[at - 1] == b'\n' && is_not_space(at - 2) && is_not_space(*at);
    let is_word_end = |at: &usize| bytes[*at] == b' ' && is_not_space(at - 1) && is_not_space(at + 1);
    let lines = later.clone().rev().filter(is_line_start).take(SPLITS_TRIED_MAX);
    let words = later.rev().filter(is_word_end).take(SPLITS_TRIED_MAX);
    for at in lines.chain(words) {
        if is_token_boundary(tokenizer, text, at)? {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Returns whether a position is a token boundary, as far as the context around it shows.
fn is_token_boundary(tokenizer: &Tokenizer, text: &str, at: usize) -> Result<bool> {
    let from = text.floor_char_boundary(at.saturating_sub(CONTEXT_BYTES));
    let to = text.ceil_char_boundary((at + CONTEXT_BYTES).min(text.len()));
    Ok(tokenizer.encode(&text[from..to])?.starts_with(&tokenizer.encode(&text[from..at])?))
}

/// Encodes a text in the context of the text before it. Alone it could have other tokens: some tokenizers prepend a space.
fn encode_after(tokenizer: &Tokenizer, before: &str, text: &str) -> Result<Vec<u32>> {
    if before.is_empty() {
        return tokenizer.encode(text);
    }
    let had = tokenizer.encode(before)?.len();
    Ok(tokenizer.encode(&[before, text].concat())?.into_iter().skip(had).collect())
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests {
    use super::super::corpus::{Corpus, Split};
    use super::super::scratch::Scratch;
    use super::*;
    use shardgrad::nn::ModelConfig;

    fn tokenizer(name: &str) -> Tokenizer {
        let ModelConfig::Gpt2(mut config) = ModelConfig::preset("tiny").unwrap() else { panic!("a GPT-2") };
        config.vocab_size = 290;
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers");
        Tokenizer::for_model(Some(&data.join(name)), &ModelConfig::Gpt2(config)).unwrap()
    }

    /// A tokenizer as of Llama 2: prepends a space, treats spaces as characters, no pre-tokenization, byte fallback.
    fn blank_before(dir: &Scratch) -> Tokenizer {
        let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
        let others = ["▁", "t", "h", "e", "c", "a", "o", "s", "▁t", "▁th", "▁the"].map(String::from);
        let all = ["<unk>".to_string()].into_iter().chain(bytes).chain(others);
        let vocab: serde_json::Map<_, _> = all.enumerate().map(|(id, token)| (token, id.into())).collect();
        let file = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ]},
            "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocab, "merges": ["▁ t", "▁t h", "▁th e"],
            },
        });
        dir.file("tokenizer.json", file.to_string());
        let ModelConfig::Gpt2(mut config) = ModelConfig::preset("tiny").unwrap() else { panic!("a GPT-2") };
        config.vocab_size = 290;
        Tokenizer::for_model(Some(&dir.path("")), &ModelConfig::Gpt2(config)).unwrap()
    }

    /// Lines, blank lines, runs of spaces, multi-byte characters, very long words.
    fn text() -> String {
        let lines = [
            "the cat sat on the mat",
            "",
            "  the dog   sat",
            "\tthe log \r",
            "été, naïve, 北京 and 東京 at once!",
            " ",
            "x".repeat(150).leak(),
            "123 + 4567 = 4690; the\u{a0}end",
            "<|endoftext|> the cat",
        ];
        (0..90).map(|i| lines[(i * i + i / 7) % lines.len()]).collect::<Vec<_>>().join("\n")
    }

    fn cut(dir: &Scratch, text: &str, tokenizer: &Tokenizer, chunk: usize) -> Result<(Vec<u32>, u64)> {
        let path = dir.file("text", text);
        let file = File::open(&path).unwrap();
        let mut disk = TokensOnDisk::new(&dir.path("tokens"), 290)?;
        disk.append(&[7, 8, 9])?;
        let part = disk.tokenize_in_chunks(&path, (&file, text.len() as u64), tokenizer, chunk)?;
        assert_eq!(fs::read_dir(dir.path("tokens")).unwrap().count(), 0, "the file is unlinked");
        let corpus = Corpus::of("t".into(), 290, vec![part]);
        let (mut ids, len) = (Vec::new(), corpus.len(Split::All));
        corpus.read(Split::All, 0, len as usize, &mut ids)?;
        Ok((ids.into_iter().map(|id| id as u32).collect(), len))
    }

    #[test]
    fn chunked_tokenization_equals_whole_tokenization() {
        let (dir, text) = (Scratch::new(), text());
        let folder = Scratch::new();
        for (name, tokenizer) in [
            ("bpe", tokenizer("bpe")),
            ("wordpiece", tokenizer("wordpiece")),
            ("blank before", blank_before(&folder)),
        ] {
            assert!(find_split(&tokenizer, &text).unwrap().is_some(), "{name}: a split point exists");
            let whole = tokenizer.encode(&text).unwrap();
            for chunk in [1, 16, 50, 64, 101, 500, 4000, text.len() - 1, text.len(), text.len() + 1] {
                let (ids, len) = cut(&dir, &text, &tokenizer, chunk).unwrap();
                assert!(ids == whole, "{name}, pieces of {chunk} bytes");
                assert_eq!(len, whole.len() as u64);
            }
            // Chunks that end anywhere have other tokens, so the test can fail.
            let cut = |n: usize| {
                let mut ids = Vec::new();
                let mut rest = &text[..];
                while !rest.is_empty() {
                    let (chunk, after) = rest.split_at(rest.ceil_char_boundary(n.min(rest.len())));
                    ids.extend(tokenizer.encode(chunk).unwrap());
                    rest = after;
                }
                ids
            };
            assert!([50, 64, 101].iter().all(|n| cut(*n) != whole), "{name}");
        }
    }

    #[test]
    fn invalid_utf8_is_reported_with_its_offset() {
        let (dir, tokenizer) = (Scratch::new(), tokenizer("bpe"));
        let mut bytes = text().into_bytes();
        bytes.truncate(900);
        bytes.extend(b"\xe9 and more\n".repeat(40));
        let path = dir.file("bad", &bytes);
        let file = File::open(&path).unwrap();
        let bad = std::str::from_utf8(&bytes).unwrap_err().valid_up_to();
        for chunk in [64, 900, 10_000] {
            let mut disk = TokensOnDisk::new(&dir.path(""), 290).unwrap();
            let error =
                disk.tokenize_in_chunks(&path, (&file, bytes.len() as u64), &tokenizer, chunk).unwrap_err();
            assert!(error.message().contains(&format!("not UTF-8 text: byte {bad} is 0x")), "{error}");
            let error = disk.tokenize_in_chunks(&path, (&file, 1 << 20), &tokenizer, 1 << 20).unwrap_err();
            assert!(error.message().ends_with("the file shrank while it was read"), "{error}");
        }
        let mut disk = TokensOnDisk::new(&dir.path(""), 290).unwrap();
        let error = disk.append(&[289, 290]).unwrap_err();
        assert_eq!(error.message(), "the tokenizer returned token 290, outside the vocabulary 0..290");
        let error = TokensOnDisk::new(&dir.file("file", "x"), 290).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
    }
}
