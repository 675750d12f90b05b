//! What a language model is trained on: texts, files of token numbers, and which rows a step reads.
//!
//! Everything is read with plain reads and held in memory or read by position (tokens of a text that a tokenizer cuts, from a
//! file that they are written to first); nothing is mapped, so a file
//! that shrinks under a run is an error and not a signal. Which tokens a row holds is a pure function of the
//! data, the seed and the number of the row in the whole run, so the mesh does not change what is read.

mod digest;
mod batch;
mod corpus;
mod sources;
mod cut;
mod files;
mod tokens;
mod sampler;

pub(crate) use batch::Batch;
pub(crate) use corpus::{Corpus, Split, Width};
pub(crate) use digest::ContentHash;
pub(crate) use files::{How, refuse_written};
pub(crate) use sampler::{Order, Sampler};
pub(crate) use sources::is_source;
pub(crate) use tokens::{TokenFile, Vocabulary};

#[cfg(test)]
pub(crate) mod scratch {
    //! A folder for one test, removed at its end.

    use std::path::PathBuf;

    pub(crate) struct Scratch(PathBuf);

    impl Scratch {
        pub(crate) fn new() -> Scratch {
            let folder = |i| std::env::temp_dir().join(format!("shardgrad-{}-{}", std::process::id(), i));
            // The first name that no other test has taken.
            let free = |dir: &PathBuf| std::fs::create_dir(dir).is_ok();
            Scratch((0..10_000).map(folder).find(free).unwrap())
        }

        pub(crate) fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }

        /// Writes a file, with its folders.
        pub(crate) fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
            let path = self.path(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, bytes).unwrap();
            path
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
