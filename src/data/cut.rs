//! Texts that a tokenizer cuts into tokens: a piece at a time, onto disk, and read from there by position.

use super::corpus::{Part, Source, Width, bad_byte, short};
use crate::tokenizer::Tokenizer;
use shardgrad::{Error, Kind, Result};
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// So much text is cut at a time: a tokenizer needs about a hundred times as much memory.
const PIECE_BYTES: usize = 1 << 20;
/// So much text on either side decides whether two pieces have the tokens of the whole.
const AROUND_BYTES: usize = 512;
/// So many places for a border are tried in a piece.
const BORDERS_MAX: usize = 64;

/// A file of token numbers, without a name: it is gone when nobody reads it any more, however the program ends.
#[derive(Debug)]
pub(super) struct TokensOnDisk {
    file: Arc<File>,
    width: Width,
    vocab: usize,
    len: u64,
}

impl TokensOnDisk {
    /// An empty file in a folder, which is made if there is none; `vocab` is the number of tokens.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses.
    pub(super) fn new(dir: &Path, vocab: usize) -> Result<TokensOnDisk> {
        let refused = |e: std::io::Error| {
            let why = format!("cannot make a file for tokens in {}: {e}", dir.display());
            Error::new(Kind::Io, why)
                .detail("help", "give a folder that can be written to (--out, or TMPDIR)")
        };
        fs::create_dir_all(dir).map_err(refused)?;
        let file = nameless(dir).map_err(refused)?;
        Ok(TokensOnDisk { file: Arc::new(file), width: Width::of(vocab), vocab, len: 0 })
    }

    /// Appends tokens.
    fn append(&mut self, tokens: &[u32]) -> Result<()> {
        if let Some(token) = tokens.iter().find(|token| **token as usize >= self.vocab) {
            let why =
                format!("the tokenizer gives token {token}, outside of the vocabulary 0..{}", self.vocab);
            return Err(Error::new(Kind::Data, why).detail("help", "use the tokenizer of this model"));
        }
        let bytes = self.width.to_bytes(tokens);
        let at = self.len * self.width.bytes() as u64;
        let told = |e| Error::new(Kind::Io, format!("cannot write tokens to disk: {e}"));
        self.file.write_all_at(&bytes, at).map_err(told)?;
        self.len += tokens.len() as u64;
        Ok(())
    }

    /// Cuts a text file of `len` bytes and appends its tokens. They are those of the text as a whole, as far as the text
    /// around the borders of pieces tells.
    ///
    /// # Errors
    /// `Kind::Data` if it is not UTF-8 (with the offset of the first bad byte), or has become shorter; what the tokenizer
    /// reports; `Kind::OutOfMemory` for a text that has no border for long; `Kind::Io` if the system refuses.
    pub(super) fn cut(&mut self, path: &Path, file: &File, len: u64, tokenizer: &Tokenizer) -> Result<Part> {
        self.cut_by(path, (file, len), tokenizer, PIECE_BYTES)
    }

    fn cut_by(
        &mut self,
        path: &Path,
        (file, len): (&File, u64),
        tokenizer: &Tokenizer,
        piece: usize,
    ) -> Result<Part> {
        let (first, mut held, mut done, mut wanted) = (self.len, Vec::new(), 0u64, piece);
        let mut before = String::new();
        loop {
            let at = done + held.len() as u64;
            let more = wanted.saturating_sub(held.len()).min(usize::try_from(len - at).unwrap_or(usize::MAX));
            read_on(path, file, at, more, &mut held)?;
            let is_last = at + more as u64 == len;
            let text = match std::str::from_utf8(&held) {
                Ok(text) => text,
                // A letter that the end of the piece cuts is whole with the next one.
                Err(e) if e.error_len().is_none() && !is_last => {
                    std::str::from_utf8(&held[..e.valid_up_to()]).expect("so much is valid")
                }
                Err(e) => {
                    return Err(bad_byte(path, done + e.valid_up_to() as u64, held[e.valid_up_to()]));
                }
            };
            if is_last {
                self.append(&following(tokenizer, &before, text)?)?;
                break;
            }
            match border(tokenizer, text)? {
                Some(at) => {
                    self.append(&following(tokenizer, &before, &text[..at])?)?;
                    before = text[text.floor_char_boundary(at.saturating_sub(AROUND_BYTES))..at].to_string();
                    held.drain(..at);
                    (done, wanted) = (done + at as u64, piece);
                }
                None => wanted = held.len().saturating_mul(2),
            }
        }
        let start = first * self.width.bytes() as u64;
        let source = Source::Nameless(self.file.clone(), start);
        Ok(Part { source, width: self.width, len: self.len - first })
    }
}

/// A new file that has lost its name already.
fn nameless(dir: &Path) -> std::io::Result<File> {
    let mut tries = 0;
    loop {
        let path = dir.join(format!(".tokens-{}-{tries}.bin", std::process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
            // What a program left that was killed right here.
            Err(e) if e.kind() == ErrorKind::AlreadyExists && tries < 100 => tries += 1,
            made => return made.and_then(|file| fs::remove_file(&path).map(|()| file)),
        }
    }
}

/// Appends `more` bytes of a file from byte `at` on.
fn read_on(path: &Path, file: &File, at: u64, more: usize, held: &mut Vec<u8>) -> Result<()> {
    let had = held.len();
    if held.try_reserve(more).is_err() {
        let why = format!("{}: no memory for {} bytes of text in one piece", path.display(), had + more);
        let help = "break its lines, or cut it into tokens elsewhere and give them as a .bin file";
        return Err(Error::new(Kind::OutOfMemory, why).detail("help", help));
    }
    held.resize(had + more, 0);
    file.read_exact_at(&mut held[had..], at).map_err(|e| short(path, &e))
}

/// The last place in the later half of a text where it can be cut in two without another token: the start of a line, or else
/// the end of a word.
fn border(tokenizer: &Tokenizer, text: &str) -> Result<Option<usize>> {
    let bytes = text.as_bytes();
    let later = (text.len() / 2).max(2)..text.len().saturating_sub(1);
    let letter = |at: usize| !bytes[at].is_ascii_whitespace();
    let line = |at: &usize| bytes[at - 1] == b'\n' && letter(at - 2) && letter(*at);
    let word = |at: &usize| bytes[*at] == b' ' && letter(at - 1) && letter(at + 1);
    let lines = later.clone().rev().filter(line).take(BORDERS_MAX);
    let words = later.rev().filter(word).take(BORDERS_MAX);
    for at in lines.chain(words) {
        if parts(tokenizer, text, at)? {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Whether no token lies on both sides of a place, as far as the text around it tells.
fn parts(tokenizer: &Tokenizer, text: &str, at: usize) -> Result<bool> {
    let from = text.floor_char_boundary(at.saturating_sub(AROUND_BYTES));
    let to = text.ceil_char_boundary((at + AROUND_BYTES).min(text.len()));
    Ok(tokenizer.encode(&text[from..to])?.starts_with(&tokenizer.encode(&text[from..at])?))
}

/// The tokens of a text behind another one, from which a border parts it. Alone it could have others: some tokenizers put a
/// blank before whatever begins.
fn following(tokenizer: &Tokenizer, before: &str, text: &str) -> Result<Vec<u32>> {
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
        Tokenizer::of(Some(&data.join(name)), &ModelConfig::Gpt2(config)).unwrap()
    }

    /// As those of Llama 2: a blank before the text, blanks as letters, no words, bytes for what has no token.
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
        Tokenizer::of(Some(&dir.path("")), &ModelConfig::Gpt2(config)).unwrap()
    }

    /// Lines, blank lines, runs of spaces, letters of several bytes, words without an end.
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

    fn cut(dir: &Scratch, text: &str, tokenizer: &Tokenizer, piece: usize) -> Result<(Vec<u32>, u64)> {
        let path = dir.file("text", text);
        let file = File::open(&path).unwrap();
        let mut disk = TokensOnDisk::new(&dir.path("tokens"), 290)?;
        disk.append(&[7, 8, 9])?;
        let part = disk.cut_by(&path, (&file, text.len() as u64), tokenizer, piece)?;
        assert_eq!(fs::read_dir(dir.path("tokens")).unwrap().count(), 0, "the file has no name");
        let corpus = Corpus::of("t".into(), 290, vec![part]);
        let (mut ids, len) = (Vec::new(), corpus.len(Split::All));
        corpus.read(Split::All, 0, len as usize, &mut ids)?;
        Ok((ids.into_iter().map(|id| id as u32).collect(), len))
    }

    #[test]
    fn pieces_have_the_tokens_of_the_whole() {
        let (dir, text) = (Scratch::new(), text());
        let folder = Scratch::new();
        for (name, tokenizer) in [
            ("bpe", tokenizer("bpe")),
            ("wordpiece", tokenizer("wordpiece")),
            ("blank before", blank_before(&folder)),
        ] {
            assert!(border(&tokenizer, &text).unwrap().is_some(), "{name}: it is cut at all");
            let whole = tokenizer.encode(&text).unwrap();
            for piece in [1, 16, 50, 64, 101, 500, 4000, text.len() - 1, text.len(), text.len() + 1] {
                let (ids, len) = cut(&dir, &text, &tokenizer, piece).unwrap();
                assert!(ids == whole, "{name}, pieces of {piece} bytes");
                assert_eq!(len, whole.len() as u64);
            }
            // Pieces that end anywhere have other tokens, and this would see it.
            let cut = |n: usize| {
                let mut ids = Vec::new();
                let mut rest = &text[..];
                while !rest.is_empty() {
                    let (piece, after) = rest.split_at(rest.ceil_char_boundary(n.min(rest.len())));
                    ids.extend(tokenizer.encode(piece).unwrap());
                    rest = after;
                }
                ids
            };
            assert!([50, 64, 101].iter().all(|n| cut(*n) != whole), "{name}");
        }
    }

    #[test]
    fn bad_texts_are_refused_at_their_place() {
        let (dir, tokenizer) = (Scratch::new(), tokenizer("bpe"));
        let mut bytes = text().into_bytes();
        bytes.truncate(900);
        bytes.extend(b"\xe9 and more\n".repeat(40));
        let path = dir.file("bad", &bytes);
        let file = File::open(&path).unwrap();
        let bad = std::str::from_utf8(&bytes).unwrap_err().valid_up_to();
        for piece in [64, 900, 10_000] {
            let mut disk = TokensOnDisk::new(&dir.path(""), 290).unwrap();
            let error = disk.cut_by(&path, (&file, bytes.len() as u64), &tokenizer, piece).unwrap_err();
            assert!(error.message().contains(&format!("not UTF-8 text: byte {bad} is 0x")), "{error}");
            let error = disk.cut_by(&path, (&file, 1 << 20), &tokenizer, 1 << 20).unwrap_err();
            assert!(error.message().ends_with("the file became shorter while it was read"), "{error}");
        }
        let mut disk = TokensOnDisk::new(&dir.path(""), 290).unwrap();
        let error = disk.append(&[289, 290]).unwrap_err();
        assert_eq!(error.message(), "the tokenizer gives token 290, outside of the vocabulary 0..290");
        let error = TokensOnDisk::new(&dir.file("file", "x"), 290).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
    }
}
