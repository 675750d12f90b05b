//! Opening the files of `--data`: text files, folders of them, and `.bin` token files.

use super::corpus::{Corpus, Segment, Source, TokenWidth, cannot_read, not_utf8, read_failed};
use super::sources::read_sources;
use super::tokenize::TokensOnDisk;
use crate::tokenizer::Tokenizer;
use ignore::WalkBuilder;
use shardgrad::nn::ModelConfig;
use shardgrad::{Error, Kind, Result};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Maximum number of files kept open; with more, files are opened for each read.
const OPEN_MAX: usize = 64;
/// Maximum number of files in a folder, against mistakes.
const FILES_MAX: usize = 1 << 16;
/// Size of a read while checking a file.
const CHUNK_BYTES: usize = 1 << 20;
/// Extension of token files.
const TOKEN_EXTENSION: &str = "bin";

/// How text and token files are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadOptions<'a> {
    /// The model folder, if any, which may contain a tokenizer.
    pub(crate) model: Option<&'a Path>,
    /// The model configuration.
    pub(crate) config: &'a ModelConfig,
    /// Integer type in `.bin` files; `None` selects it by the vocabulary ([`ReadOptions::width`]).
    pub(crate) width: Option<TokenWidth>,
    /// Token between texts; `None` selects the end-of-text token of the model ([`ReadOptions::end`]).
    pub(crate) end: Option<u32>,
    /// Folder of temporary files; `None` selects that of the system ([`ReadOptions::scratch`]).
    pub(crate) scratch: Option<&'a Path>,
    /// Files and folders that the run writes, links resolved; they are not read.
    pub(crate) output_paths: &'a [PathBuf],
}

impl ReadOptions<'_> {
    /// Returns the integer type: u16 for vocabularies up to 65536 tokens, else u32.
    fn width(&self) -> TokenWidth {
        self.width.unwrap_or(TokenWidth::of(self.config.vocab_size()))
    }

    /// Rejects `--width` without token files.
    fn check_width(&self, files: &[PathBuf]) -> Result<()> {
        if self.width.is_none() || files.iter().any(|path| is_token_file(path)) {
            return Ok(());
        }
        let why = format!("--width applies to .{TOKEN_EXTENSION} files, and no such file is read");
        Err(Error::new(Kind::Config, why)
            .detail("help", format!("omit it, or rename the token file to NAME.{TOKEN_EXTENSION}")))
    }

    /// Rejects `--end-of-text` with fewer than two texts.
    fn check_end_of_text(&self, num_texts: usize) -> Result<()> {
        if self.end.is_none() || num_texts > 1 {
            return Ok(());
        }
        let read = if num_texts == 0 { "no text is" } else { "only one text is" };
        let why = format!("--end-of-text is inserted between texts, and {read} read");
        Err(Error::new(Kind::Config, why).detail("help", "omit it, or pass more texts with --data"))
    }

    /// Returns the folder of temporary files.
    fn scratch(&self) -> PathBuf {
        self.scratch.map_or_else(std::env::temp_dir, Path::to_path_buf)
    }

    /// Returns the token between texts: as given, else the end-of-text token of the model if it is valid and not a byte, else a newline for byte
    /// tokens.
    fn end(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let known = self.config.eos_token_id().filter(|id| *id < self.config.vocab_size());
        let bytes = tokenizer.is_bytes();
        let model_token = known.filter(|id| !bytes || *id >= Corpus::VOCAB).map(|id| id as u32);
        self.end.or(model_token).or(bytes.then_some(u32::from(b'\n')))
    }
}

impl Corpus {
    /// Reads the Rust and Markdown files of a folder as one text.
    ///
    /// # Errors
    /// `Kind::Data` if there are none; errors of the tokenizer.
    pub(crate) fn from_sources(dir: &Path, options: &ReadOptions<'_>) -> Result<Corpus> {
        options.check_width(&[])?;
        options.check_end_of_text(1)?;
        let (origin, text) = read_sources(dir)?;
        let tokenizer = Tokenizer::for_model(options.model, options.config)?;
        let part = if tokenizer.is_bytes() {
            Segment::of_bytes(text.into_bytes())
        } else {
            Segment::of(&tokenizer.encode(&text)?)
        };
        Ok(Corpus::of(origin, options.config.vocab_size(), vec![part]))
    }

    /// Lists the files that [`Corpus::open`] reads, and those that it skips, without reading them.
    ///
    /// # Errors
    /// As [`Corpus::open`], as far as names tell.
    pub(crate) fn input_files(paths: &[PathBuf], options: &ReadOptions<'_>) -> Result<[Vec<PathBuf>; 2]> {
        let (mut files, mut skipped) = (Vec::new(), Vec::new());
        for path in paths {
            list_files(path, options.output_paths, &mut files, &mut skipped)?;
        }
        options.check_width(&files)?;
        options.check_end_of_text(files.iter().filter(|path| !is_token_file(path)).count())?;
        Ok([files, skipped])
    }

    /// Concatenates files, and all files of folders, into a corpus.
    ///
    /// A `.bin` file contains token ids. Any other file is UTF-8 text; the end-of-text token is inserted between two texts. Byte texts and token
    /// files stay on disk and are read by position; tokenized texts are written to a temporary token file. Outputs of the run
    /// ([`ReadOptions::output_paths`]) in a folder are skipped, and named in the description.
    ///
    /// # Errors
    /// `Kind::Data` naming the file if it is missing, a pipe or a device, empty, not UTF-8 (with the offset of the first bad byte), an output of
    /// the run, or not a whole number of tokens long, and for a folder without files; `Kind::Config` for `--width` without token files and
    /// `--end-of-text` without two texts; errors of the tokenizer; `Kind::Io` if a file cannot be read.
    pub(crate) fn open(paths: &[PathBuf], options: &ReadOptions<'_>) -> Result<Corpus> {
        let [files, skipped] = Corpus::input_files(paths, options)?;
        let keep = files.len() <= OPEN_MAX;
        let (mut tokenizer, mut disk) = (None, None);
        let (mut parts, mut texts) = (Vec::new(), 0);
        for path in &files {
            if is_token_file(path) {
                parts.push(token_segment(path, options.width(), keep)?);
                continue;
            }
            let tokenizer = match &mut tokenizer {
                Some(tokenizer) => tokenizer,
                none => none.insert(Tokenizer::for_model(options.model, options.config)?),
            };
            if texts > 0 {
                parts.extend(options.end(tokenizer).map(|end| separator_segment(end, tokenizer.is_bytes())));
            }
            texts += 1;
            parts.push(text_segment(path, (tokenizer, &mut disk), options, keep)?);
        }
        let origin = match (files.as_slice(), paths) {
            ([only], _) => only.display().to_string(),
            (_, [folder]) => format!("{} files of {}", files.len(), folder.display()),
            _ => format!("{} files", files.len()),
        };
        let origin = match skipped.as_slice() {
            [] => origin,
            skipped => {
                let skipped: Vec<String> = skipped.iter().map(|path| path.display().to_string()).collect();
                format!("{origin} (without {}, which the run writes)", skipped.join(", "))
            }
        };
        Ok(Corpus::of(origin, options.config.vocab_size(), parts))
    }
}

/// Returns the token between two texts as a segment, of bytes if the texts are bytes.
fn separator_segment(end: u32, bytes: bool) -> Segment {
    match u8::try_from(end) {
        Ok(byte) if bytes => Segment::of_bytes(vec![byte]),
        _ => Segment::of(&[end]),
    }
}

/// Returns whether a file is a token file.
fn is_token_file(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == TOKEN_EXTENSION)
}

fn refuse(path: &Path, why: &str, help: &str) -> Error {
    Error::new(Kind::Data, format!("{}: {why}", path.display())).detail("help", help)
}

/// Returns whether a path is one of the given paths, or inside one.
fn is_at(places: &[PathBuf], path: &Path) -> bool {
    let is_inside = |at: PathBuf| places.iter().any(|place| at.starts_with(place));
    !places.is_empty() && fs::canonicalize(path).is_ok_and(is_inside)
}

/// Rejects an input that the run writes.
///
/// # Errors
/// `Kind::Data` naming the path.
pub(crate) fn refuse_written(path: &Path, output_paths: &[PathBuf]) -> Result<()> {
    if is_at(output_paths, path) {
        let why = "the run writes this file or folder and cannot read it";
        return Err(refuse(path, why, "use another folder with --out DIR, or read a copy"));
    }
    Ok(())
}

/// Lists a file, or the files of a folder sorted by path. Hidden files are ignored; outputs of the run are added to `skipped`.
fn list_files(
    path: &Path,
    output_paths: &[PathBuf],
    files: &mut Vec<PathBuf>,
    skipped: &mut Vec<PathBuf>,
) -> Result<()> {
    const HELP: &str = "pass UTF-8 text files, folders of them, or .bin token files with --data";
    let kind = match fs::metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Err(refuse(path, "no such file", HELP)),
        Err(e) => return Err(cannot_read(path, &e)),
        Ok(found) => found,
    };
    refuse_written(path, output_paths)?;
    if kind.is_file() {
        files.push(path.to_path_buf());
        return Ok(());
    }
    if !kind.is_dir() {
        return Err(refuse(path, "is a pipe or a device, not a file", "write the text to a file first"));
    }
    let before = files.len();
    let walk =
        WalkBuilder::new(path).standard_filters(false).hidden(true).sort_by_file_name(Ord::cmp).build();
    for entry in walk {
        let entry =
            entry.map_err(|e| Error::new(Kind::Io, format!("cannot read {}: {e}", path.display())))?;
        if is_at(output_paths, entry.path()) {
            if !skipped.iter().any(|above| entry.path().starts_with(above)) {
                skipped.push(entry.into_path());
            }
            continue;
        }
        if entry.depth() > 0 && entry.path_is_symlink() {
            let why = "is a symbolic link, which is not followed inside a folder";
            return Err(refuse(entry.path(), why, "pass its target with --data, or replace it by the file"));
        }
        if entry.file_type().is_some_and(|kind| kind.is_file()) {
            files.push(entry.into_path());
        }
        if files.len() - before > FILES_MAX {
            let why = format!("the folder has more than {FILES_MAX} files");
            return Err(refuse(path, &why, "pass the folder of the texts only, or concatenate them"));
        }
    }
    if files.len() == before {
        return Err(refuse(path, "the folder has no files", HELP));
    }
    Ok(())
}

/// Opens a non-empty file and returns its length.
fn open(path: &Path) -> Result<(File, u64)> {
    let file = File::open(path).map_err(|e| cannot_read(path, &e))?;
    let len = file.metadata().map_err(|e| cannot_read(path, &e))?.len();
    if len == 0 {
        return Err(refuse(path, "the file is empty", "remove it from --data"));
    }
    Ok((file, len))
}

/// Opens a token file. Token ids are checked when they are read.
fn token_segment(path: &Path, width: TokenWidth, keep: bool) -> Result<Segment> {
    let (file, bytes) = open(path)?;
    let size = width.bytes() as u64;
    if !bytes.is_multiple_of(size) {
        let why = format!("{bytes} bytes is not a whole number of {size}-byte tokens");
        return Err(refuse(path, &why, "the file is truncated, or --width is wrong"));
    }
    Ok(Segment { source: Source::File(path.to_path_buf(), keep.then_some(file)), width, len: bytes / size })
}

/// Opens and checks a text file, and tokenizes it if tokens are not bytes.
fn text_segment(
    path: &Path,
    (tokenizer, disk): (&Tokenizer, &mut Option<TokensOnDisk>),
    options: &ReadOptions<'_>,
    keep: bool,
) -> Result<Segment> {
    let (file, len) = open(path)?;
    if tokenizer.is_bytes() {
        check_utf8(path, &file, len)?;
        let source = Source::File(path.to_path_buf(), keep.then_some(file));
        return Ok(Segment { source, width: TokenWidth::U8, len });
    }
    let disk = match disk {
        Some(disk) => disk,
        none => none.insert(TokensOnDisk::new(&options.scratch(), options.config.vocab_size())?),
    };
    disk.tokenize(path, &file, len, tokenizer)
}

/// Checks that a file is UTF-8.
fn check_utf8(path: &Path, file: &File, len: u64) -> Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES.min(usize::try_from(len).unwrap_or(CHUNK_BYTES))];
    let mut at = 0;
    while at < len {
        let n = (len - at).min(chunk.len() as u64);
        let piece = &mut chunk[..n as usize];
        file.read_exact_at(piece, at).map_err(|e| read_failed(path, &e))?;
        match std::str::from_utf8(piece) {
            Ok(_) => at += n,
            // A character cut by the end of the chunk is read again with the next chunk.
            Err(e) if e.error_len().is_none() && at + n < len && e.valid_up_to() > 0 => {
                at += e.valid_up_to() as u64
            }
            Err(e) => return Err(not_utf8(path, at + e.valid_up_to() as u64, piece[e.valid_up_to()])),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::corpus::Split;
    use super::super::scratch::Scratch;
    use super::*;
    use std::os::unix::fs::symlink;

    fn config(vocab: usize, end: Option<usize>) -> ModelConfig {
        let ModelConfig::Gpt2(mut config) = ModelConfig::preset("tiny").unwrap() else { panic!("a GPT-2") };
        (config.vocab_size, config.eos_token_id) = (vocab, end);
        config.into()
    }

    fn options(config: &ModelConfig) -> ReadOptions<'_> {
        ReadOptions { model: None, config, width: None, end: None, scratch: None, output_paths: &[] }
    }

    fn open_as(paths: &[PathBuf], config: &ModelConfig, width: Option<TokenWidth>) -> Result<Corpus> {
        Corpus::open(paths, &ReadOptions { width, ..options(config) })
    }

    fn ids(corpus: &Corpus) -> Vec<i64> {
        let mut ids = Vec::new();
        corpus.read(Split::All, 0, corpus.len(Split::All) as usize, &mut ids).unwrap();
        ids
    }

    fn error_text(path: &Path) -> (Kind, String, String) {
        let error = open_as(&[path.to_path_buf()], &config(256, None), None).unwrap_err();
        let message =
            error.message().strip_prefix(&format!("{}: ", path.display())).unwrap_or(error.message());
        (error.kind(), message.to_string(), error.details().first().map_or(String::new(), |d| d.1.clone()))
    }

    #[test]
    fn text_is_read_verbatim() {
        let dir = Scratch::new();
        let text = "\u{feff}a\r\nb\0é";
        let corpus = open_as(&[dir.file("t.txt", text)], &config(256, None), None).unwrap();
        assert_eq!(corpus.tokens(Split::All), text.as_bytes());
        assert_eq!(corpus.to_string(), format!("{}, 10 bytes", dir.path("t.txt").display()));
        assert_eq!(corpus.unit(), "byte");
    }

    #[test]
    fn character_across_chunk_boundary_is_valid() {
        let dir = Scratch::new();
        let long = format!("{}é{}", "x".repeat(CHUNK_BYTES - 1), "y".repeat(10));
        let corpus = open_as(&[dir.file("t", &long)], &config(256, None), None).unwrap();
        assert_eq!(corpus.len(Split::All), long.len() as u64);
        let mut bytes = long.into_bytes();
        bytes[CHUNK_BYTES] = b'z';
        let (_, message, _) = error_text(&dir.file("t", bytes));
        assert_eq!(message, format!("not UTF-8 text: byte {} is 0xc3", CHUNK_BYTES - 1));
    }

    #[test]
    fn invalid_files_are_named_with_help() {
        let dir = Scratch::new();
        let (kind, message, help) = error_text(&dir.path("absent"));
        assert_eq!((kind, message.as_str()), (Kind::Data, "no such file"));
        assert!(help.ends_with("with --data"), "{help}");
        assert_eq!(error_text(&dir.path("")).1, "the folder has no files");
        assert_eq!(error_text(Path::new("/dev/zero")).1, "is a pipe or a device, not a file");
        assert_eq!(error_text(&dir.file("empty", "")).1, "the file is empty");
        let (kind, message, help) = error_text(&dir.file("latin1", b"caf\xe9 noir"));
        assert_eq!((kind, message.as_str()), (Kind::Data, "not UTF-8 text: byte 3 is 0xe9"));
        assert!(help.starts_with("convert it to UTF-8"));
        assert_eq!(error_text(&dir.file("cut", b"caf\xc3")).1, "not UTF-8 text: byte 3 is 0xc3");
        let (kind, message, _) = error_text(&dir.file("file", "x").join("under"));
        assert_eq!(kind, Kind::Io);
        assert!(message.starts_with("cannot read "), "{message}");
        assert_eq!(
            error_text(&dir.file("odd.bin", "abc")).1,
            "3 bytes is not a whole number of 2-byte tokens"
        );
    }

    #[test]
    fn folder_documents_are_joined_with_a_separator_token() {
        let dir = Scratch::new();
        for (name, text) in [("b.txt", "bb"), ("a/2.txt", "2"), ("a/1.md", "1"), ("c", "c"), (".hidden", "x")]
        {
            dir.file(name, text);
        }
        let all = [dir.path("")];
        let plain = open_as(&all, &config(256, None), None).unwrap();
        assert_eq!(plain.tokens(Split::All), b"1\n2\nbb\nc");
        assert!(plain.to_string().starts_with("4 files of "), "{plain}");
        let marked = open_as(&all, &config(300, Some(299)), None).unwrap();
        assert_eq!(ids(&marked), [49, 299, 50, 299, 98, 98, 299, 99]);
        let beyond = open_as(&all, &config(256, Some(50256)), None).unwrap();
        assert_eq!(beyond.tokens(Split::All), b"1\n2\nbb\nc", "a token id outside the vocabulary");
        let config = config(300, Some(299));
        let asked = ReadOptions { end: Some(7), ..options(&config) };
        assert_eq!(ids(&Corpus::open(&all, &asked).unwrap())[1], 7);
        let two = [dir.path("c"), dir.path("b.txt")];
        assert_eq!(open_as(&two, &config, None).unwrap().to_string(), "2 files, 4 tokens");
    }

    #[test]
    fn run_outputs_are_not_read_as_data() {
        let dir = Scratch::new();
        for name in ["a.txt", "run/b.txt", "run/metrics.jsonl", "run/model/vocab.txt", "run/models.txt"] {
            dir.file(name, &name[..1]);
        }
        symlink(dir.path("run/metrics.jsonl"), dir.path("link")).unwrap();
        let places = ["run/metrics.jsonl", "run/model"].map(|name| dir.path(name).canonicalize().unwrap());
        let config = config(256, None);
        let with_outputs = ReadOptions { output_paths: &places, ..options(&config) };
        let read =
            |path: PathBuf| Corpus::open(&[path], &with_outputs).map(|corpus| corpus.tokens(Split::All));
        assert_eq!(read(dir.path("")).unwrap(), b"a\nr\nr", "a.txt, run/b.txt and run/models.txt");
        assert_eq!(read(dir.path("run")).unwrap(), b"r\nr");
        // Skipped paths are named, a folder once.
        let run = dir.path("run").display().to_string();
        assert_eq!(
            Corpus::open(&[dir.path("run")], &with_outputs).unwrap().to_string(),
            format!(
                "2 files of {run} (without {run}/metrics.jsonl, {run}/model, which the run writes), 3 bytes"
            )
        );
        for name in
            ["run/metrics.jsonl", "run/../run/metrics.jsonl", "link", "run/model/vocab.txt", "run/model"]
        {
            let error = read(dir.path(name)).unwrap_err();
            assert_eq!(error.kind(), Kind::Data, "{name}");
            assert!(
                error.message().ends_with("the run writes this file or folder and cannot read it"),
                "{error}"
            );
            assert!(error.details()[0].1.contains("--out DIR"), "{error}");
        }
    }

    #[test]
    fn token_width_follows_vocabulary_or_option() {
        let dir = Scratch::new();
        let [a, b] = [dir.file("a.bin", [1, 0, 2, 1]), dir.file("b.bin", [3, 0, 0, 0])];
        assert_eq!(
            ids(&open_as(&[a.clone(), b.clone()], &config(65_536, None), None).unwrap()),
            [1, 258, 3, 0]
        );
        let wide = [a.clone(), b];
        assert_eq!(ids(&open_as(&wide, &config(1 << 30, None), None).unwrap()), [16_908_289, 3]);
        assert_eq!(ids(&open_as(&wide, &config(1 << 30, None), Some(TokenWidth::U16)).unwrap()).len(), 4);
        // A text after token ids is not a second text: no separator is inserted.
        let mixed = open_as(&[a, dir.file("t", "x")], &config(300, Some(299)), None).unwrap();
        assert_eq!((ids(&mixed), mixed.unit()), (vec![1, 258, 120], "token"));
    }

    #[test]
    fn token_outside_vocabulary_is_reported_with_its_position() {
        let dir = Scratch::new();
        let path = dir.file("a.bin", [1, 0, 2, 0, 9, 1]);
        let corpus = open_as(std::slice::from_ref(&path), &config(256, None), None).unwrap();
        let mut ids = Vec::new();
        corpus.read(Split::All, 0, 2, &mut ids).unwrap();
        let error = corpus.read(Split::All, 1, 2, &mut ids).unwrap_err();
        let error_text = format!("{}: token 2 is 265, outside the vocabulary 0..256", path.display());
        assert_eq!((error.kind(), error.message()), (Kind::Data, error_text.as_str()));
    }

    #[test]
    fn shrunk_file_is_an_error_and_many_files_are_reopened() {
        let dir = Scratch::new();
        for i in 0..OPEN_MAX as u8 + 6 {
            dir.file(&format!("{i:03}"), [b'a' + i % 26]);
        }
        let corpus = open_as(&[dir.path("")], &config(256, None), None).unwrap();
        let tokens = corpus.tokens(Split::All);
        assert!((0..OPEN_MAX + 6).all(|i| tokens[2 * i] == b'a' + i as u8 % 26));
        dir.file("003", "");
        let error = corpus.read(Split::All, 6, 1, &mut Vec::new()).unwrap_err();
        assert!(error.message().ends_with("003: the file shrank while it was read"), "{error}");
    }
}
