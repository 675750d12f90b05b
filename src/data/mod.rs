//! What a language model is trained on: text as bytes, files of token numbers, and which rows a step reads.
//!
//! Everything is read with plain reads and held in memory or read by position; nothing is mapped, so a file that shrinks
//! under a run is an error and not a signal. Which tokens a row holds is a pure function of the data, the seed and the
//! number of the row in the whole run, so the mesh does not change what is read.

pub mod text;
pub mod sources;
pub mod tokens;
pub mod sampler;

pub use sampler::{Batch, Order, Sampler};
pub use text::{Corpus, Split};
pub use tokens::TokenFile;

#[cfg(test)]
pub(crate) mod scratch {
    //! A folder for one test, removed at its end.

    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};

    pub(crate) struct Scratch(PathBuf);

    impl Scratch {
        pub(crate) fn new() -> Scratch {
            static COUNT: AtomicUsize = AtomicUsize::new(0);
            let name = format!("shardgrad-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let dir = std::env::temp_dir().join(name);
            std::fs::create_dir_all(&dir).unwrap();
            Scratch(dir)
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
