//! The model folder of a run: checked before training, and its sidecar files.

use crate::outputs::{HELP_OTHER_FOLDER, check_writable, io_error};
use crate::tokenizer::TOKENIZER_FILE;
use shardgrad::nn::checkpoint::{SidecarFile, check_replaceable, open_within};
use shardgrad::{Error, Kind, Result};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Rejects a model folder that a save could not replace, with the same checks as the save, before training.
///
/// # Errors
/// `Kind::Io` with help.
pub(crate) fn check_model_folder(model: &Path) -> Result<()> {
    let refuse = |e: &io::Error| io_error("write", model, e).detail("help", HELP_OTHER_FOLDER);
    let obstacle = |why: String| {
        let help = format!("move it away, or {HELP_OTHER_FOLDER}");
        Error::new(Kind::Io, why).detail("help", help)
    };
    let shown = model.display();
    match fs::metadata(model) {
        Ok(found) if found.is_dir() => {
            check_replaceable(model).map_err(|e| obstacle(e.message().to_string()))?;
            let is_folder = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
            if let Some(folder) = SIDECARS.map(|name| model.join(name)).iter().find(|path| is_folder(path)) {
                return Err(obstacle(format!("cannot write {}: it is a folder", folder.display())));
            }
            check_writable(&model.join(".new")).map_err(|e| refuse(&e))
        }
        Ok(_) => Err(obstacle(format!("cannot write {shown}: it is not a folder"))),
        Err(e) if e.kind() == ErrorKind::NotFound && model.is_symlink() => {
            Err(obstacle(format!("cannot write {shown}: it is a broken link")))
        }
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(refuse(&e)),
    }
}

/// Sidecar files of a model: tokenizer, vocabulary and generation settings, which training does not change.
const SIDECARS: [&str; 12] = [
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// The sidecar files of the source model. They are opened at the start of a run and copied at its end, so that changes in between do not matter.
#[derive(Debug)]
pub(crate) struct Sidecars(Vec<(&'static str, Option<File>)>);

impl Sidecars {
    /// Opens the sidecar files of a folder; none for a new model.
    ///
    /// # Errors
    /// As [`open_within`]: for a link out of the folder, and for a path that is not a regular file.
    pub(crate) fn open(from: Option<&Path>) -> Result<Sidecars> {
        let open = |name: &'static str| {
            let is_there = |from: &&Path| from.join(name).symlink_metadata().is_ok();
            let file = from.filter(is_there).map(|from| open_within(from, name)).transpose()?;
            Ok((name, file.map(|(file, _)| file)))
        };
        SIDECARS.into_iter().map(open).collect::<Result<_>>().map(Sidecars)
    }

    /// Returns all sidecar files for a save: open ones are copied, the others removed.
    pub(crate) fn all(&self) -> impl Iterator<Item = SidecarFile<'_>> {
        self.0.iter().map(|(name, file)| SidecarFile { name, file: file.as_ref() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;
    use std::os::unix::fs::symlink;

    #[test]
    fn unwritable_model_folder_is_refused_before_training() {
        let error_text = |dir: &Scratch, name: &str| {
            let error = check_model_folder(&dir.path("out/model")).unwrap_err();
            let help = "move it away, or use another folder with --out DIR";
            assert_eq!((error.kind(), error.details()[0].1.as_str()), (Kind::Io, help), "{error}");
            let start = format!("cannot write {}: it is ", dir.path(name).display());
            error.message().strip_prefix(&start).unwrap_or_else(|| panic!("{error}")).to_string()
        };
        let dir = Scratch::new();
        dir.file("out/model", "a file");
        assert_eq!(error_text(&dir, "out/model"), "not a folder");
        let dir = Scratch::new();
        dir.file("out/x", "");
        symlink(dir.path("nowhere"), dir.path("out/model")).unwrap();
        assert_eq!(error_text(&dir, "out/model"), "a broken link");
        for (name, what) in [
            ("config.json", "a folder, and saving does not replace it"),
            ("model.safetensors", "a folder, and saving does not replace it"),
            ("model-00001-of-00002.safetensors", "a folder, and saving does not replace it"),
            ("tokenizer.json", "a folder"),
        ] {
            let dir = Scratch::new();
            let name = format!("out/model/{name}");
            dir.file(&format!("{name}/x"), "");
            assert_eq!(error_text(&dir, &name), what);
            // A link to a folder is treated like a folder.
            let linked = dir.path("out");
            fs::rename(linked.join("model"), dir.path("there")).unwrap();
            symlink(dir.path("there"), linked.join("model")).unwrap();
            assert_eq!(error_text(&dir, &name), what);
        }
        let dir = Scratch::new();
        symlink(dir.file("blob", ""), dir.file("out/model/x", "").with_file_name("model.safetensors"))
            .unwrap();
        assert_eq!(
            error_text(&dir, "out/model/model.safetensors"),
            "a symlink, and saving does not replace it"
        );
    }

    #[test]
    fn sidecar_files_must_be_regular_files_inside_the_folder() {
        let dir = Scratch::new();
        let secret = dir.file("secret", "");
        let path = dir.file("from/x", "").with_file_name("vocab.txt");
        symlink(secret, &path).unwrap();
        let error_text =
            |dir: &Scratch| Sidecars::open(Some(&dir.path("from"))).unwrap_err().message().to_string();
        assert!(error_text(&dir).contains("is a symlink out of its folder"), "{}", error_text(&dir));
        fs::remove_file(&path).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(error_text(&dir).contains("is a pipe or a device, not a file"), "{}", error_text(&dir));
        fs::remove_file(&path).unwrap();
        symlink("x", &path).unwrap();
        assert!(Sidecars::open(Some(&dir.path("from"))).unwrap().0.iter().any(|(_, file)| file.is_some()));
    }
}
