//! Default training text: the Rust and Markdown files of the working directory.

use super::corpus::cannot_read;
use ignore::{DirEntry, WalkBuilder};
use shardgrad::{Error, Kind, Result};
use std::path::Path;

/// Maximum size of the text; the rest is dropped.
pub(crate) const SOURCES_BYTES_MAX: usize = 16 << 20;

/// Names of folders with build products, which are skipped.
const BUILD_FOLDERS: [&str; 4] = ["build", "node_modules", "runs", "target"];

/// Joins the Rust and Markdown files (`*.rs`, `*.md`) under a folder in the order of their paths, each
/// followed by a newline, and truncates the text to [`SOURCES_BYTES_MAX`] bytes. Returns a description and the text.
///
/// Skips hidden files, files in `.gitignore` (inside a repository or not), folders of build products, symbolic links, and (counted in
/// the description) files that are not UTF-8 or cannot be read.
///
/// # Errors
/// `Kind::Data` if there is no such file; `Kind::Io` if the folder cannot be read.
pub(super) fn read_sources(dir: &Path) -> Result<(String, String)> {
    read_up_to(dir, SOURCES_BYTES_MAX)
}

fn read_up_to(dir: &Path, bytes_max: usize) -> Result<(String, String)> {
    let root = dir.canonicalize().map_err(|e| cannot_read(dir, &e))?;
    let (mut text, mut num_files, mut num_skipped, mut cut) = (String::new(), 0, 0, "");
    for entry in walk(&root) {
        match entry.map(|entry| read_entry(&entry)) {
            Ok(Entry::Text(source)) => {
                num_files += 1;
                text.push_str(&source);
                text.push('\n');
            }
            Ok(Entry::Other) => {}
            Ok(Entry::Unreadable) | Err(_) => num_skipped += 1,
        }
        if text.len() > bytes_max {
            text.truncate(text.floor_char_boundary(bytes_max));
            cut = ", truncated to the limit";
            break;
        }
    }
    let skipped = match num_skipped {
        0 => String::new(),
        n => format!(", {n} skipped that are not readable UTF-8"),
    };
    if num_files == 0 {
        let why = format!("{}: no Rust or Markdown files to train on{skipped}", dir.display());
        let help = "pass text with --data FILE, or run in a folder with such files (files in .gitignore are skipped)";
        return Err(Error::new(Kind::Data, why).detail("help", help));
    }
    let origin = format!("{num_files} Rust and Markdown files of {}{skipped}{cut}", root.display());
    Ok((origin, text))
}

/// Returns whether a path has the extension of a source file.
pub(crate) fn is_source_file(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "rs" || e == "md")
}

/// The contents of a directory entry.
enum Entry {
    Text(String),
    Unreadable,
    Other,
}

fn read_entry(entry: &DirEntry) -> Entry {
    if !is_source_file(entry.path()) || !entry.file_type().is_some_and(|t| t.is_file()) {
        return Entry::Other;
    }
    // One unreadable file among hundreds must not fail a first run.
    match std::fs::read_to_string(entry.path()) {
        Ok(text) => Entry::Text(text),
        _ => Entry::Unreadable,
    }
}

/// Walks a folder, sorted by path.
fn walk(root: &Path) -> ignore::Walk {
    // .gitignore files of parent folders apply only inside a repository: a stray one in a home folder must not hide a project. Global
    // ignore rules of the user never apply, so that all users get the same text.
    let in_repository = root.ancestors().any(|above| above.join(".git").exists());
    WalkBuilder::new(root)
        .require_git(false)
        .parents(in_repository)
        .git_global(false)
        .sort_by_file_name(std::ffi::OsStr::cmp)
        .filter_entry(|entry| entry.depth() == 0 || !is_build_folder(entry))
        .build()
}

fn is_build_folder(entry: &DirEntry) -> bool {
    let is_dir = entry.file_type().is_some_and(|t| t.is_dir());
    let named = entry.file_name().to_str().is_some_and(|name| BUILD_FOLDERS.contains(&name));
    // Cargo and other build tools mark their output folders with this file.
    is_dir && (named || entry.path().join("CACHEDIR.TAG").exists())
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::*;

    fn text(dir: &Scratch) -> String {
        read_sources(&dir.path("")).unwrap().1
    }

    #[test]
    fn files_are_joined_in_path_order() {
        let dir = Scratch::new();
        for name in ["b.md", "a/z.rs", "a.rs", "a/b/c.rs", "B.md", "a-b.rs"] {
            dir.file(name, name);
        }
        dir.file("c.txt", "not this one");
        dir.file("rs", "nor this one");
        assert_eq!(text(&dir), "B.md\na/b/c.rs\na/z.rs\na-b.rs\na.rs\nb.md\n");
        let (origin, _) = read_sources(&dir.path("")).unwrap();
        let root = dir.path("").canonicalize().unwrap();
        assert_eq!(origin, format!("6 Rust and Markdown files of {}", root.display()));
    }

    #[test]
    fn hidden_ignored_built_and_linked_files_are_left_out() {
        let dir = Scratch::new();
        dir.file(".gitignore", "secret.md\n/gen/\n");
        for name in
            ["secret.md", "gen/a.rs", ".hidden.md", ".cache/a.md", "target/a.rs", "x/node_modules/a.md"]
        {
            dir.file(name, "left out");
        }
        dir.file("runs/a.md", "left out");
        dir.file("products/CACHEDIR.TAG", "");
        dir.file("products/a.rs", "left out");
        let outside = Scratch::new();
        std::os::unix::fs::symlink(outside.file("a.md", "left out"), dir.path("link.md")).unwrap();
        std::os::unix::fs::symlink(outside.path(""), dir.path("links")).unwrap();
        std::os::unix::fs::symlink(dir.path(""), dir.path("circle")).unwrap();
        dir.file("kept/gen/a.rs", "kept");
        assert_eq!(text(&dir), "kept\n");
    }

    #[test]
    fn parent_gitignore_applies_only_inside_a_repository() {
        let dir = Scratch::new();
        dir.file(".gitignore", "*.md\n");
        dir.file("project/a.md", "a");
        let project = dir.path("project");
        assert_eq!(read_sources(&project).unwrap().1, "a\n");
        dir.file(".git/HEAD", "");
        let error = read_sources(&project).unwrap_err();
        assert!(error.message().ends_with(": no Rust or Markdown files to train on"), "{error}");
    }

    #[test]
    fn missing_sources_are_explained() {
        let dir = Scratch::new();
        let error = read_sources(&dir.path("")).unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert!(error.message().ends_with(": no Rust or Markdown files to train on"), "{error}");
        assert!(error.details()[0].1.starts_with("pass text with --data FILE"));
        dir.file("a.md", [0xff]);
        let error = read_sources(&dir.path("")).unwrap_err();
        assert!(error.message().ends_with("to train on, 1 skipped that are not readable UTF-8"), "{error}");
        assert_eq!(read_sources(&dir.path("absent")).unwrap_err().kind(), Kind::Io);
    }

    #[test]
    fn text_is_truncated_at_a_character_boundary() {
        let dir = Scratch::new();
        dir.file("a.md", "éé");
        dir.file("b.md", "unread");
        let (origin, text) = read_up_to(&dir.path(""), 3).unwrap();
        assert_eq!(text, "é");
        assert!(origin.starts_with("1 Rust and Markdown files"), "{origin}");
        assert!(origin.ends_with(", truncated to the limit"), "{origin}");
        let (origin, _) = read_up_to(&dir.path(""), 12).unwrap();
        assert!(!origin.contains("truncated"), "{origin}");
    }

    #[test]
    fn files_that_are_not_utf8_are_counted() {
        let dir = Scratch::new();
        dir.file("a.rs", b"\xff");
        let error = read_sources(&dir.path("")).unwrap_err();
        let expected = "no Rust or Markdown files to train on, 1 skipped that are not readable UTF-8";
        assert!(error.message().ends_with(expected), "{error}");
        dir.file("b.rs", "b");
        assert_eq!(text(&dir), "b\n");
        let shown = read_sources(&dir.path("")).unwrap().0;
        assert!(shown.ends_with(", 1 skipped that are not readable UTF-8"), "{shown}");
    }
}
