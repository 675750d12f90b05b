//! Training data: text, token files, and the sampler that chooses the rows of a step.
//!
//! Data is held in memory or read by position (pread); tokenized text is first written to a temporary file. Files are not memory-mapped, so a
//! file that shrinks during a run is an error and not a signal. The tokens of a row are a pure function of the data, the seed and the global
//! row number, so they do not depend on the mesh.

mod content_hash;
mod batch;
mod corpus;
mod sources;
mod tokenize;
mod files;
mod token_file;
mod token_order;
mod sampler;

pub(crate) use batch::Batch;
pub(crate) use content_hash::ContentHash;
pub(crate) use corpus::{Corpus, Split, TokenWidth};
pub(crate) use files::{ReadOptions, refuse_written};
pub(crate) use sampler::{RowOrder, Sampler};
pub(crate) use sources::is_source_file;
pub(crate) use token_file::{TokenFile, Vocabulary};
pub(crate) use token_order::TokenOrder;

#[cfg(test)]
pub(crate) mod scratch {
    //! A folder for one test, removed at its end.

    use std::path::PathBuf;

    pub(crate) struct Scratch(PathBuf);

    impl Scratch {
        pub(crate) fn new() -> Scratch {
            let folder = |i| std::env::temp_dir().join(format!("shardgrad-{}-{}", std::process::id(), i));
            // The first free name.
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
