//! Atomic replacement of files and folders: temporary names, lock, sync, rename, and removal of what a killed save left.

pub(crate) mod disk;
pub(crate) mod temporary_name;
pub(crate) mod atomic_file;
pub(crate) mod folder_lock;
pub(crate) mod sidecar;
pub(crate) mod commit;
pub(crate) mod atomic_folder;
