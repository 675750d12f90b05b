//! Where the token of a run comes from: the secret by which its processes recognize each other.

use std::fmt;
use std::path::PathBuf;

/// The source of the token of a run, a secret that all of its processes share ([`Process::token`](crate::Process::token)). A process
/// that does not prove that it has the token takes no rank, and nothing that it sends is believed.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Token {
    /// The token itself, at least 16 characters, as from `openssl rand -hex 32`.
    Text(String),
    /// A file with the token, the same on all machines.
    File(PathBuf),
    /// A folder that all machines share: rank 0 leaves a file with a random token there, which only its user can read, and removes it
    /// when all ranks are connected.
    Folder(PathBuf),
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Token::Text(_) => f.write_str("Text(..)"),
            Token::File(path) => f.debug_tuple("File").field(path).finish(),
            Token::Folder(path) => f.debug_tuple("Folder").field(path).finish(),
        }
    }
}
