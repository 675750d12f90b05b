//! The key of a rendezvous: where its token comes from, and the file in which rank 0 leaves a token for the other ranks.

use super::super::handshake::{Key, random_bytes};
use super::addresses;
use crate::error::{Error, Kind, Result};
use crate::process::{Process, Token};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The fewest characters of a token: enough that nobody finds it by trying.
const TOKEN_CHARS_MIN: usize = 16;
/// The longest token file.
const FILE_BYTES_MAX: u64 = 4096;
/// The token of processes that connect without one.
const INSECURE: &[u8] = b"insecure";

/// The source of the key of a rendezvous.
#[derive(Clone, Debug)]
pub(super) enum KeySource {
    /// The key itself.
    Known(Key),
    /// The file that rank 0 leaves.
    LeftFile(PathBuf),
}

impl KeySource {
    /// The source for a process.
    ///
    /// # Errors
    /// `Kind::Config` for several machines without a token, for a token that is too short, and for a token file that other users can
    /// read or change; `Kind::Io` for a token file that cannot be read, and a run-time folder that cannot be used.
    pub(super) fn of(process: &Process) -> Result<KeySource> {
        if process.is_insecure() {
            return Ok(KeySource::Known(Key::of_token(INSECURE)));
        }
        match process.token_source() {
            Some(Token::Text(text)) => Ok(KeySource::Known(key(text, "the token (SHARDGRAD_TOKEN)")?)),
            Some(Token::File(path)) => Ok(KeySource::Known(given_key(path)?)),
            Some(Token::Folder(folder)) => {
                Ok(KeySource::LeftFile(folder.join(format!(".token-{}", address_name(process)))))
            }
            None if process.is_on_one_machine() => {
                let name = format!("{}.token", address_name(process));
                Ok(KeySource::LeftFile(run_time_folder()?.join(name)))
            }
            None => {
                let why = "ranks on several machines need a token: without it, anyone who reaches their ports could take a rank";
                let help = "set SHARDGRAD_TOKEN to the same secret on all machines (as from `openssl rand -hex 32`), or give --token-file FILE; \
                            --insecure connects without";
                Err(Error::new(Kind::Config, why).detail("help", help))
            }
        }
    }

    /// The key, read anew from the file that rank 0 leaves.
    ///
    /// # Errors
    /// The reason why there is no key, or none yet.
    pub(super) fn key(&self) -> Result<Key, String> {
        match self {
            KeySource::Known(key) => Ok(key.clone()),
            KeySource::LeftFile(path) => left_key(path),
        }
    }

    /// Creates the file of rank 0, if there is to be one. Returns the key.
    ///
    /// # Errors
    /// `Kind::Io` if the file cannot be written.
    pub(super) fn leave(self) -> Result<(Key, Option<LeftFile>)> {
        match self {
            KeySource::Known(key) => Ok((key, None)),
            KeySource::LeftFile(path) => {
                let text: String = random_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
                let key = Key::of_token(text.as_bytes());
                let file = LeftFile { path, text };
                file.write().map_err(|e| {
                    let why =
                        format!("rank 0 cannot write the token of the run to {}: {e}", file.path.display());
                    Error::new(Kind::Io, why).detail("help", "set SHARDGRAD_TOKEN, or give --token-file FILE")
                })?;
                Ok((key, Some(file)))
            }
        }
    }
}

/// Names the address of rank 0, host and port, in the name of a file: runs at other addresses may share the folder. A rank 0 without a
/// host of its own names the address at which it listens, by which the others reach it.
fn address_name(process: &Process) -> String {
    let is_unspecified = process.host().parse().is_ok_and(|ip: IpAddr| ip.is_unspecified());
    let listening = is_unspecified.then(|| addresses::of_rank_zero(process).ok()).flatten();
    let host = listening.and_then(|all| all.first().map(|address| address.ip().to_string()));
    let host = host.unwrap_or_else(|| process.host().to_ascii_lowercase());
    format!("{}-{}", host.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "_"), process.port())
}

/// The file with a random token that rank 0 has left. Dropping it removes the file.
#[derive(Debug)]
pub(super) struct LeftFile {
    path: PathBuf,
    text: String,
}

impl LeftFile {
    /// Writes the file at once, readable only by this user.
    fn write(&self) -> std::io::Result<()> {
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        // The name cannot be guessed, so another user who may write to the folder cannot create the file first.
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{}", blake3::hash(self.text.as_bytes()).to_hex()));
        let new = PathBuf::from(name);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        let written = file
            .write_all(self.text.as_bytes())
            .and_then(|()| file.sync_all())
            .and_then(|()| fs::rename(&new, &self.path));
        written.inspect_err(|_| drop(fs::remove_file(&new)))
    }
}

impl Drop for LeftFile {
    fn drop(&mut self) {
        // Another run may have replaced the file.
        if read_token(&self.path).is_ok_and(|text| text == self.text) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn key(token: &str, name: &str) -> Result<Key> {
    let (token, least) = (token.trim(), TOKEN_CHARS_MIN);
    let count = token.chars().count();
    if count < least {
        let why = format!("{name} has {count} characters; a token has at least {least}");
        return Err(Error::new(Kind::Config, why).detail("help", "generate one with `openssl rand -hex 32`"));
    }
    Ok(Key::of_token(token.as_bytes()))
}

/// The key in a file that the user has named.
fn given_key(path: &Path) -> Result<Key> {
    let name = format!("the token file {}", path.display());
    let failed = |e: std::io::Error| Error::new(Kind::Io, format!("cannot read {name}: {e}"));
    // Links are followed: Kubernetes mounts the files of a Secret as links.
    let mode = fs::metadata(path).map_err(failed)?.mode();
    if mode & 0o027 != 0 {
        let why = format!("{name} has mode {:03o}: other users can read or change it", mode & 0o777);
        let help = format!("chmod 600 {}; for a Secret of Kubernetes, defaultMode: 0400", path.display());
        return Err(Error::new(Kind::Config, why).detail("help", help));
    }
    key(&read_token(path).map_err(failed)?, &name)
}

/// The key in the file that rank 0 has left.
fn left_key(path: &Path) -> Result<Key, String> {
    let name = path.display();
    // Opening the folder makes a network file system look for new files, instead of remembering that there was none.
    let _ = path.parent().map(fs::read_dir);
    let found = fs::symlink_metadata(path).map_err(|e| match e.kind() {
        ErrorKind::NotFound => format!("rank 0 has left no token in {name}"),
        _ => format!("cannot read the token of the run in {name}: {e}"),
    })?;
    if !found.is_file() || user_id().is_some_and(|own| own != found.uid()) || found.mode() & 0o077 != 0 {
        return Err(format!("{name} is not a file of this user that only this user can read"));
    }
    let text = read_token(path).map_err(|e| format!("cannot read the token of the run in {name}: {e}"))?;
    key(&text, &format!("the token in {name}")).map_err(|e| e.message().to_string())
}

fn read_token(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text.trim().to_string())
}

/// The id of the user of this process, where the system shows it.
fn user_id() -> Option<u32> {
    fs::metadata("/proc/self").ok().map(|found| found.uid())
}

/// The folder of this user for files that last as long as a run; created if missing.
fn run_time_folder() -> Result<PathBuf> {
    let is_own = |path: &Path| {
        let found = fs::symlink_metadata(path);
        found.is_ok_and(|found| {
            found.is_dir() && user_id().is_none_or(|own| own == found.uid()) && found.mode() & 0o022 == 0
        })
    };
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| is_own(path));
    let folder = match (named, user_id()) {
        (Some(folder), _) => folder.join("shardgrad"),
        (None, Some(user)) => std::env::temp_dir().join(format!("shardgrad-{user}")),
        (None, None) => std::env::temp_dir().join("shardgrad"),
    };
    let failed = |why: String| {
        let why = format!("cannot use {} for the token of the run: {why}", folder.display());
        let help =
            "set SHARDGRAD_TOKEN, give --token-file FILE, or set XDG_RUNTIME_DIR to a folder of this user";
        Error::new(Kind::Io, why).detail("help", help)
    };
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(failed(e.to_string())),
        _ if !is_own(&folder) => {
            Err(failed("it is not a folder of this user that only this user can write".to_string()))
        }
        _ => Ok(folder),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of this test, removed at its end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new() -> Scratch {
            let name: String = random_bytes()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
            let path = std::env::temp_dir().join(format!("shardgrad-test-{name}"));
            DirBuilder::new().mode(0o700).create(&path).unwrap();
            Scratch(path)
        }

        fn file(&self, name: &str, text: &str, mode: u32) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
            path
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn process() -> Process {
        Process::new(0, 2, "10.0.0.1", 4000).unwrap().with_local_rank(0, 1).unwrap()
    }

    #[test]
    fn several_machines_without_a_token_are_refused() {
        let error = KeySource::of(&process()).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        let text = error.to_string();
        for part in ["need a token", "SHARDGRAD_TOKEN", "--token-file FILE", "--insecure"] {
            assert!(text.contains(part), "{text}");
        }
        let insecure = KeySource::of(&process().insecure()).unwrap();
        assert!(matches!(insecure, KeySource::Known(_)));
    }

    #[test]
    fn given_tokens_are_checked() {
        let scratch = Scratch::new();
        let of = |token: Token| KeySource::of(&process().token(token)).and_then(|source| source.leave());
        let text = of(Token::Text(" 0123456789abcdef\n".to_string())).unwrap().0;
        assert!(text == of(Token::File(scratch.file("a", "0123456789abcdef\n", 0o600))).unwrap().0);
        assert!(text != of(Token::File(scratch.file("b", "0123456789abcdeF", 0o400))).unwrap().0);
        let short = of(Token::Text("0123456789abcde".to_string())).unwrap_err();
        assert!(short.message().contains("has 15 characters"), "{short}");
        assert!(!short.to_string().contains("0123456789"), "a token is printed: {short}");
        for mode in [0o644, 0o604, 0o620, 0o602] {
            let error = of(Token::File(scratch.file("c", "0123456789abcdef", mode))).unwrap_err();
            assert!(error.message().contains("other users can read or change it"), "{mode:o}: {error}");
        }
        assert_eq!(of(Token::File(scratch.0.join("none"))).unwrap_err().kind(), Kind::Io);
    }

    #[test]
    fn runs_at_other_addresses_have_other_files() {
        let path = |host: &str, port: u16| {
            let process = Process::new(0, 2, host, port).unwrap().with_local_rank(0, 1).unwrap();
            match KeySource::of(&process.token(Token::Folder("out".into()))).unwrap() {
                KeySource::LeftFile(path) => path.display().to_string(),
                KeySource::Known(_) => panic!("a folder names a file"),
            }
        };
        assert_eq!(path("10.0.0.1", 4000), "out/.token-10.0.0.1-4000");
        assert_eq!(path("Node-3.cluster", 4000), "out/.token-node_3.cluster-4000");
        assert_eq!(path("../::1", 4000), "out/.token-..___1-4000");
        assert_ne!(path("10.0.0.1", 4000), path("10.0.0.1", 4001));
        // A machine without a route has no address but this.
        let own = path("0.0.0.0", 4000);
        let found = addresses::of_rank_zero(&Process::new(0, 2, "0.0.0.0", 4000).unwrap());
        let expected = found.map_or("0.0.0.0".to_string(), |all| all[0].ip().to_string());
        assert_eq!(own, format!("out/.token-{expected}-4000"));
    }

    #[test]
    fn file_of_rank_zero_is_private_and_removed() {
        let scratch = Scratch::new();
        let source = KeySource::of(&process().token(Token::Folder(scratch.0.join("out")))).unwrap();
        let KeySource::LeftFile(path) = source.clone() else { panic!("{source:?}") };
        let early = source.key().unwrap_err();
        assert!(early.starts_with("rank 0 has left no token in"), "{early}");
        let (key, file) = source.clone().leave().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(source.key().unwrap() == key);
        // A second run leaves another token; the end of the first one does not remove it.
        let (second, other) = source.clone().leave().unwrap();
        assert!(second != key);
        drop(file);
        assert!(source.key().unwrap() == second);
        drop(other);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
        // Files that others may have written or read are not believed.
        fs::write(&path, "0123456789abcdef").unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        assert!(source.key().unwrap_err().contains("only this user can read"));
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(scratch.file("own", "0123456789abcdef", 0o600), &path).unwrap();
        assert!(source.key().unwrap_err().contains("only this user can read"));
    }
}
