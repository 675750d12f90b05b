//! Documents from files that the user names: texts, folders of them, and files of token numbers.

use super::corpus::{Corpus, Part, Source, Width, bad_byte, failed, short};
use super::cut::TokensOnDisk;
use super::sources::read_sources;
use crate::tokenizer::Tokenizer;
use ignore::WalkBuilder;
use shardgrad::nn::ModelConfig;
use shardgrad::{Error, Kind, Result};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Files of more than these are opened anew for each row.
const OPEN_MAX: usize = 64;
/// A folder of more files than these was hardly meant.
const FILES_MAX: usize = 1 << 16;
/// So many bytes are checked at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// How a file of token numbers is called.
const NUMBERS: &str = "bin";

/// How documents are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How<'a> {
    /// The folder of the model, if it has one: it may hold a tokenizer.
    pub(crate) model: Option<&'a Path>,
    /// The shape of the model.
    pub(crate) config: &'a ModelConfig,
    /// The width of numbers in `.bin` files; as [`How::width`] says if `None`.
    pub(crate) width: Option<Width>,
    /// The token that is put between texts; as [`How::end`] says if `None`.
    pub(crate) end: Option<u32>,
    /// The folder of files that are needed while the program runs; as [`How::scratch`] says if `None`.
    pub(crate) scratch: Option<&'a Path>,
    /// Files and folders that the program replaces meanwhile, links followed: nothing is read there.
    pub(crate) written: &'a [PathBuf],
}

impl How<'_> {
    /// Two bytes are enough for a vocabulary of up to 65536 tokens.
    fn width(&self) -> Width {
        self.width.unwrap_or(Width::of(self.config.vocab_size()))
    }

    /// Refuses a width of numbers where there are none.
    fn check_width(&self, files: &[PathBuf]) -> Result<()> {
        if self.width.is_none() || files.iter().any(|path| is_numbers(path)) {
            return Ok(());
        }
        let why = format!("--width is about token numbers, and no file that is read ends in .{NUMBERS}");
        Err(Error::new(Kind::Config, why)
            .detail("help", format!("leave it out, or call the file NAME.{NUMBERS}")))
    }

    /// Refuses a token between texts where there are no two.
    fn check_end(&self, num_texts: usize) -> Result<()> {
        if self.end.is_none() || num_texts > 1 {
            return Ok(());
        }
        let read = if num_texts == 0 { "none is" } else { "one text is" };
        let why = format!("--end-of-text stands between two texts, and {read} read");
        Err(Error::new(Kind::Config, why).detail("help", "leave it out, or name more texts with --data"))
    }

    /// That of the system for temporary files.
    fn scratch(&self) -> PathBuf {
        self.scratch.map_or_else(std::env::temp_dir, Path::to_path_buf)
    }

    /// The end-of-text token of the model, if it is one of its tokens and no byte; bytes are parted by a newline.
    fn end(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let known = self.config.end_of_text().filter(|id| *id < self.config.vocab_size());
        let bytes = tokenizer.is_bytes();
        let usual = known.filter(|id| !bytes || *id >= Corpus::VOCAB).map(|id| id as u32);
        self.end.or(usual).or(bytes.then_some(u32::from(b'\n')))
    }
}

impl Corpus {
    /// The Rust and Markdown sources of a folder, as one text.
    ///
    /// # Errors
    /// `Kind::Data` if the folder holds none; what the tokenizer of the model reports.
    pub(crate) fn from_sources(dir: &Path, how: &How<'_>) -> Result<Corpus> {
        how.check_width(&[])?;
        how.check_end(1)?;
        let (origin, text) = read_sources(dir)?;
        let tokenizer = Tokenizer::of(how.model, how.config)?;
        let part = if tokenizer.is_bytes() {
            Part::of_bytes(text.into_bytes())
        } else {
            Part::of(&tokenizer.encode(&text)?)
        };
        Ok(Corpus::of(origin, how.config.vocab_size(), vec![part]))
    }

    /// The files of which [`Corpus::open`] makes documents, and what it passes over. Nothing is read.
    ///
    /// # Errors
    /// As [`Corpus::open`], of names.
    pub(crate) fn find(paths: &[PathBuf], how: &How<'_>) -> Result<[Vec<PathBuf>; 2]> {
        let (mut files, mut passed) = (Vec::new(), Vec::new());
        for path in paths {
            expand(path, how.written, &mut files, &mut passed)?;
        }
        how.check_width(&files)?;
        how.check_end(files.iter().filter(|path| !is_numbers(path)).count())?;
        Ok([files, passed])
    }

    /// The documents of files, and of all files of folders, one behind the other.
    ///
    /// A file whose name ends in `.bin` holds token numbers and is taken as it is. Any other is a text in UTF-8, and between
    /// two texts stands the end-of-text token. Texts of bytes and numbers stay on disk and are read by position; of texts that
    /// a tokenizer cuts the tokens are written to disk and read from there. What the program itself writes into a folder
    /// ([`How::written`]) is passed over, and named in the text form.
    ///
    /// # Errors
    /// `Kind::Data` naming the file if it is missing, a pipe or a device, empty, not UTF-8 (with the offset of the first bad
    /// byte), written by the program, or has a length that is not a whole number of tokens; `Kind::Config` for a width where no file
    /// has numbers, and for a token between texts where there are no two; for a folder without files; what the tokenizer of the
    /// model reports; `Kind::Io` if the system refuses.
    pub(crate) fn open(paths: &[PathBuf], how: &How<'_>) -> Result<Corpus> {
        let [files, passed] = Corpus::find(paths, how)?;
        let keep = files.len() <= OPEN_MAX;
        let (mut tokenizer, mut disk) = (None, None);
        let (mut parts, mut texts) = (Vec::new(), 0);
        for path in &files {
            if is_numbers(path) {
                parts.push(numbers(path, how.width(), keep)?);
                continue;
            }
            let tokenizer = match &mut tokenizer {
                Some(tokenizer) => tokenizer,
                none => none.insert(Tokenizer::of(how.model, how.config)?),
            };
            if texts > 0 {
                parts.extend(how.end(tokenizer).map(|end| separator(end, tokenizer.is_bytes())));
            }
            texts += 1;
            parts.push(text(path, (tokenizer, &mut disk), how, keep)?);
        }
        let origin = match (files.as_slice(), paths) {
            ([only], _) => only.display().to_string(),
            (_, [folder]) => format!("{} files of {}", files.len(), folder.display()),
            _ => format!("{} files", files.len()),
        };
        let origin = match passed.as_slice() {
            [] => origin,
            passed => {
                let passed: Vec<String> = passed.iter().map(|path| path.display().to_string()).collect();
                format!("{origin} (without {}, which the run replaces)", passed.join(", "))
            }
        };
        Ok(Corpus::of(origin, how.config.vocab_size(), parts))
    }
}

/// A token between two texts; a byte, if it is one and texts are bytes.
fn separator(end: u32, bytes: bool) -> Part {
    match u8::try_from(end) {
        Ok(byte) if bytes => Part::of_bytes(vec![byte]),
        _ => Part::of(&[end]),
    }
}

/// Whether a file holds token numbers.
fn is_numbers(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == NUMBERS)
}

fn refuse(path: &Path, why: &str, help: &str) -> Error {
    Error::new(Kind::Data, format!("{}: {why}", path.display())).detail("help", help)
}

/// Whether a path leads to one of these places, or below one.
fn is_at(places: &[PathBuf], path: &Path) -> bool {
    let lies = |at: PathBuf| places.iter().any(|place| at.starts_with(place));
    !places.is_empty() && fs::canonicalize(path).is_ok_and(lies)
}

/// Refuses what the program would replace while it reads it.
///
/// # Errors
/// `Kind::Data` naming it.
pub(crate) fn refuse_written(path: &Path, written: &[PathBuf]) -> Result<()> {
    if is_at(written, path) {
        let why = "the run would replace it while it reads it";
        return Err(refuse(path, why, "give another folder with --out DIR, or copy what is to be read"));
    }
    Ok(())
}

/// A file, or the files of a folder in the order of their paths; hidden ones are passed over, and so are files and folders that are
/// written, which are told as `passed`.
fn expand(
    path: &Path,
    written: &[PathBuf],
    files: &mut Vec<PathBuf>,
    passed: &mut Vec<PathBuf>,
) -> Result<()> {
    const HELP: &str = "give names of UTF-8 text files, folders of them, or .bin files with --data";
    let kind = match fs::metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Err(refuse(path, "there is no such file", HELP)),
        Err(e) => return Err(failed(path, &e)),
        Ok(found) => found,
    };
    refuse_written(path, written)?;
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
        if is_at(written, entry.path()) {
            if !passed.iter().any(|above| entry.path().starts_with(above)) {
                passed.push(entry.into_path());
            }
            continue;
        }
        if entry.depth() > 0 && entry.path_is_symlink() {
            let why = "is a link, which is not followed in a folder";
            return Err(refuse(
                entry.path(),
                why,
                "name what it leads to with --data, or put the file itself there",
            ));
        }
        if entry.file_type().is_some_and(|kind| kind.is_file()) {
            files.push(entry.into_path());
        }
        if files.len() - before > FILES_MAX {
            let why = format!("the folder has more than {FILES_MAX} files");
            return Err(refuse(path, &why, "name the folder of the texts themselves, or join them"));
        }
    }
    if files.len() == before {
        return Err(refuse(path, "the folder has no files", HELP));
    }
    Ok(())
}

/// Opens a file that is not empty, and tells its length.
fn open(path: &Path) -> Result<(File, u64)> {
    let file = File::open(path).map_err(|e| failed(path, &e))?;
    let len = file.metadata().map_err(|e| failed(path, &e))?.len();
    if len == 0 {
        return Err(refuse(path, "the file is empty", "leave it out"));
    }
    Ok((file, len))
}

/// A file of token numbers. They are checked where they are read.
fn numbers(path: &Path, width: Width, keep: bool) -> Result<Part> {
    let (file, bytes) = open(path)?;
    let size = width.bytes() as u64;
    if !bytes.is_multiple_of(size) {
        let why = format!("{bytes} bytes is not a whole number of {size}-byte tokens");
        return Err(refuse(path, &why, "the file is cut short, or its numbers have another width (--width)"));
    }
    Ok(Part { source: Source::File(path.to_path_buf(), keep.then_some(file)), width, len: bytes / size })
}

/// A text in UTF-8.
fn text(
    path: &Path,
    (tokenizer, disk): (&Tokenizer, &mut Option<TokensOnDisk>),
    how: &How<'_>,
    keep: bool,
) -> Result<Part> {
    let (file, len) = open(path)?;
    if tokenizer.is_bytes() {
        check_utf8(path, &file, len)?;
        let source = Source::File(path.to_path_buf(), keep.then_some(file));
        return Ok(Part { source, width: Width::U8, len });
    }
    let disk = match disk {
        Some(disk) => disk,
        none => none.insert(TokensOnDisk::new(&how.scratch(), how.config.vocab_size())?),
    };
    disk.cut(path, &file, len, tokenizer)
}

/// Reads a file once, a piece at a time, to see that it is UTF-8.
fn check_utf8(path: &Path, file: &File, len: u64) -> Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES.min(usize::try_from(len).unwrap_or(CHUNK_BYTES))];
    let mut at = 0;
    while at < len {
        let n = (len - at).min(chunk.len() as u64);
        let piece = &mut chunk[..n as usize];
        file.read_exact_at(piece, at).map_err(|e| short(path, &e))?;
        match std::str::from_utf8(piece) {
            Ok(_) => at += n,
            // A letter that the end of the piece cuts is read again with the next one.
            Err(e) if e.error_len().is_none() && at + n < len && e.valid_up_to() > 0 => {
                at += e.valid_up_to() as u64
            }
            Err(e) => return Err(bad_byte(path, at + e.valid_up_to() as u64, piece[e.valid_up_to()])),
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

    fn how(config: &ModelConfig) -> How<'_> {
        How { model: None, config, width: None, end: None, scratch: None, written: &[] }
    }

    fn open_as(paths: &[PathBuf], config: &ModelConfig, width: Option<Width>) -> Result<Corpus> {
        Corpus::open(paths, &How { width, ..how(config) })
    }

    fn ids(corpus: &Corpus) -> Vec<i64> {
        let mut ids = Vec::new();
        corpus.read(Split::All, 0, corpus.len(Split::All) as usize, &mut ids).unwrap();
        ids
    }

    fn told(path: &Path) -> (Kind, String, String) {
        let error = open_as(&[path.to_path_buf()], &config(256, None), None).unwrap_err();
        let message =
            error.message().strip_prefix(&format!("{}: ", path.display())).unwrap_or(error.message());
        (error.kind(), message.to_string(), error.details().first().map_or(String::new(), |d| d.1.clone()))
    }

    #[test]
    fn text_is_read_byte_for_byte() {
        let dir = Scratch::new();
        let text = "\u{feff}a\r\nb\0é";
        let corpus = open_as(&[dir.file("t.txt", text)], &config(256, None), None).unwrap();
        assert_eq!(corpus.tokens(Split::All), text.as_bytes());
        assert_eq!(corpus.to_string(), format!("{}, 10 bytes", dir.path("t.txt").display()));
        assert_eq!(corpus.unit(), "byte");
    }

    #[test]
    fn a_letter_over_the_border_of_two_pieces_is_whole() {
        let dir = Scratch::new();
        let long = format!("{}é{}", "x".repeat(CHUNK_BYTES - 1), "y".repeat(10));
        let corpus = open_as(&[dir.file("t", &long)], &config(256, None), None).unwrap();
        assert_eq!(corpus.len(Split::All), long.len() as u64);
        let mut bytes = long.into_bytes();
        bytes[CHUNK_BYTES] = b'z';
        let (_, message, _) = told(&dir.file("t", bytes));
        assert_eq!(message, format!("not UTF-8 text: byte {} is 0xc3", CHUNK_BYTES - 1));
    }

    #[test]
    fn bad_files_are_named_with_a_repair() {
        let dir = Scratch::new();
        let (kind, message, help) = told(&dir.path("absent"));
        assert_eq!((kind, message.as_str()), (Kind::Data, "there is no such file"));
        assert!(help.ends_with("with --data"), "{help}");
        assert_eq!(told(&dir.path("")).1, "the folder has no files");
        assert_eq!(told(Path::new("/dev/zero")).1, "is a pipe or a device, not a file");
        assert_eq!(told(&dir.file("empty", "")).1, "the file is empty");
        let (kind, message, help) = told(&dir.file("latin1", b"caf\xe9 noir"));
        assert_eq!((kind, message.as_str()), (Kind::Data, "not UTF-8 text: byte 3 is 0xe9"));
        assert!(help.starts_with("convert it to UTF-8"));
        assert_eq!(told(&dir.file("cut", b"caf\xc3")).1, "not UTF-8 text: byte 3 is 0xc3");
        let (kind, message, _) = told(&dir.file("file", "x").join("under"));
        assert_eq!(kind, Kind::Io);
        assert!(message.starts_with("cannot read "), "{message}");
        assert_eq!(told(&dir.file("odd.bin", "abc")).1, "3 bytes is not a whole number of 2-byte tokens");
    }

    #[test]
    fn documents_of_a_folder_follow_each_other_with_a_token_between() {
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
        assert_eq!(beyond.tokens(Split::All), b"1\n2\nbb\nc", "a token that the model lacks");
        let config = config(300, Some(299));
        let asked = How { end: Some(7), ..how(&config) };
        assert_eq!(ids(&Corpus::open(&all, &asked).unwrap())[1], 7);
        let two = [dir.path("c"), dir.path("b.txt")];
        assert_eq!(open_as(&two, &config, None).unwrap().to_string(), "2 files, 4 tokens");
    }

    #[test]
    fn what_is_written_meanwhile_is_no_text() {
        let dir = Scratch::new();
        for name in ["a.txt", "run/b.txt", "run/metrics.jsonl", "run/model/vocab.txt", "run/models.txt"] {
            dir.file(name, &name[..1]);
        }
        symlink(dir.path("run/metrics.jsonl"), dir.path("link")).unwrap();
        let places = ["run/metrics.jsonl", "run/model"].map(|name| dir.path(name).canonicalize().unwrap());
        let config = config(256, None);
        let written = How { written: &places, ..how(&config) };
        let read = |path: PathBuf| Corpus::open(&[path], &written).map(|corpus| corpus.tokens(Split::All));
        assert_eq!(read(dir.path("")).unwrap(), b"a\nr\nr", "a.txt, run/b.txt and run/models.txt");
        assert_eq!(read(dir.path("run")).unwrap(), b"r\nr");
        // What is passed over is told, a folder as one.
        let run = dir.path("run").display().to_string();
        assert_eq!(
            Corpus::open(&[dir.path("run")], &written).unwrap().to_string(),
            format!(
                "2 files of {run} (without {run}/metrics.jsonl, {run}/model, which the run replaces), 3 bytes"
            )
        );
        for name in
            ["run/metrics.jsonl", "run/../run/metrics.jsonl", "link", "run/model/vocab.txt", "run/model"]
        {
            let error = read(dir.path(name)).unwrap_err();
            assert_eq!(error.kind(), Kind::Data, "{name}");
            assert!(error.message().ends_with("the run would replace it while it reads it"), "{error}");
            assert!(error.details()[0].1.contains("--out DIR"), "{error}");
        }
    }

    #[test]
    fn numbers_have_the_width_of_the_vocabulary_or_that_which_is_asked_for() {
        let dir = Scratch::new();
        let [a, b] = [dir.file("a.bin", [1, 0, 2, 1]), dir.file("b.bin", [3, 0, 0, 0])];
        assert_eq!(
            ids(&open_as(&[a.clone(), b.clone()], &config(65_536, None), None).unwrap()),
            [1, 258, 3, 0]
        );
        let wide = [a.clone(), b];
        assert_eq!(ids(&open_as(&wide, &config(1 << 30, None), None).unwrap()), [16_908_289, 3]);
        assert_eq!(ids(&open_as(&wide, &config(1 << 30, None), Some(Width::U16)).unwrap()).len(), 4);
        // A text behind numbers is no second text: nothing stands between them.
        let mixed = open_as(&[a, dir.file("t", "x")], &config(300, Some(299)), None).unwrap();
        assert_eq!((ids(&mixed), mixed.unit()), (vec![1, 258, 120], "token"));
    }

    #[test]
    fn a_number_that_is_no_token_is_named_with_its_place() {
        let dir = Scratch::new();
        let path = dir.file("a.bin", [1, 0, 2, 0, 9, 1]);
        let corpus = open_as(std::slice::from_ref(&path), &config(256, None), None).unwrap();
        let mut ids = Vec::new();
        corpus.read(Split::All, 0, 2, &mut ids).unwrap();
        let error = corpus.read(Split::All, 1, 2, &mut ids).unwrap_err();
        let told = format!("{}: token 2 is 265, outside of the vocabulary 0..256", path.display());
        assert_eq!((error.kind(), error.message()), (Kind::Data, told.as_str()));
    }

    #[test]
    fn a_file_that_shrinks_is_an_error_and_many_files_need_no_handle() {
        let dir = Scratch::new();
        for i in 0..OPEN_MAX as u8 + 6 {
            dir.file(&format!("{i:03}"), [b'a' + i % 26]);
        }
        let corpus = open_as(&[dir.path("")], &config(256, None), None).unwrap();
        let tokens = corpus.tokens(Split::All);
        assert!((0..OPEN_MAX + 6).all(|i| tokens[2 * i] == b'a' + i as u8 % 26));
        dir.file("003", "");
        let error = corpus.read(Split::All, 6, 1, &mut Vec::new()).unwrap_err();
        assert!(error.message().ends_with("003: the file became shorter while it was read"), "{error}");
    }
}
