//! The library: found, its version checked, its optional features probed.

use crate::functions::{Functions, RawUniqueId};
use shardgrad_kernels::KernelError;
use shardgrad_kernels::cuda::SearchPaths;
use shardgrad_kernels::cuda::library::NCCL;
use std::ffi::{c_char, c_int};
use std::sync::Arc;

/// Functions that older versions lack, as `doctor` names them.
const OPTIONAL: [(&str, &str); 3] = [
    ("ncclCommRegister", "buffer registration"),
    ("ncclCommWindowRegister", "symmetric windows"),
    ("ncclCommRevoke", "revocation"),
];

/// The variables by which NCCL chooses the algorithm and the protocol of an operation, and the values of [`pin_algorithm`], which are
/// expected to run every operation on every topology.
const PINNED: [(&str, &str); 2] = [("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple")];
/// Linux lists the threads of this process here.
const OWN_THREADS: &str = "/proc/self/task";

/// Sets the variables NCCL_ALGO and NCCL_PROTO that are not set to Ring and Simple, so that NCCL adds in the same order in every run on the
/// same GPUs, whatever it measures or a tuner chooses.
///
/// Call it at the start of `main`: a process may change its environment only while it has a single thread. If it has others already, this
/// function does nothing; then set the variables before the program starts. Returns whether both variables are set.
pub fn pin_algorithm() -> bool {
    let is_alone = std::fs::read_dir(OWN_THREADS).is_ok_and(|threads| threads.count() == 1);
    for (name, value) in PINNED.iter().filter(|(name, _)| is_alone && std::env::var_os(name).is_none()) {
        // SAFETY: this is the only thread of the process, and only it could start others, so nothing else reads the environment meanwhile.
        unsafe { std::env::set_var(name, value) };
    }
    PINNED.iter().all(|(name, _)| std::env::var_os(name).is_some())
}

/// Returns the names and values of the variables by which NCCL chooses algorithm and protocol.
#[must_use]
pub fn algorithm() -> [(&'static str, String); 2] {
    PINNED.map(|(name, _)| (name, std::env::var(name).unwrap_or_else(|_| "not set".to_string())))
}

/// The open library.
#[derive(Debug)]
pub struct Nccl {
    pub(crate) functions: Functions,
    version: usize,
}

/// The id of a communicator, which one of its ranks makes and all of them need (`ncclUniqueId`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl UniqueId {
    pub(crate) fn raw(&self) -> RawUniqueId {
        RawUniqueId { internal: self.0.map(|byte| byte as c_char) }
    }
}

impl Nccl {
    /// Finds and opens the library: the file that `SHARDGRAD_NCCL_PATH` names, else that of a Python package, else that of the loader.
    ///
    /// # Errors
    /// [`KernelError::Library`] if there is none, if it is older than 2.18, or lacks a function.
    pub fn open(paths: &SearchPaths) -> Result<Arc<Nccl>, KernelError> {
        let library = paths.open(&NCCL)?;
        let mut version: c_int = 0;
        // SAFETY: the type of `nccl.h`; the out-pointer outlives the call, which needs no GPU.
        let answer = unsafe {
            let ask: unsafe extern "C" fn(*mut c_int) -> c_int = library.function(&NCCL, "ncclGetVersion")?;
            ask(&mut version)
        };
        let (version, file) = (usize::try_from(version).unwrap_or(0), library.file().display().to_string());
        if answer != 0 {
            let why = Functions::load(library)?.failed("ncclGetVersion", answer);
            return Err(NCCL.error(format!("{file} does not report its version: {why}")));
        }
        if version < NCCL.min_version.0 {
            let (is, least) = (version_text(version), NCCL.min_version.1);
            return Err(NCCL.error(format!("{file} is version {is}, and {least} or newer is needed")));
        }
        Ok(Arc::new(Nccl { functions: Functions::load(library)?, version }))
    }

    /// Returns the version as NCCL numbers it: 23007 is 2.30.7.
    #[must_use]
    pub fn version(&self) -> usize {
        self.version
    }

    /// Describes in one line what the order of its sums depends on: version, algorithm and protocol.
    #[must_use]
    pub fn describe_sums(&self) -> String {
        let [algorithm, protocol] = algorithm().map(|(name, value)| format!("{name}={value}"));
        format!("NCCL {}, {algorithm}, {protocol}", version_text(self.version))
    }

    /// Describes the library in one line: file, version and optional features.
    #[must_use]
    pub fn describe(&self) -> String {
        let library = &self.functions.library;
        // SAFETY: only the presence of the function matters; it is not called.
        let has = |name: &str| unsafe { library.function::<unsafe extern "C" fn()>(&NCCL, name).is_ok() };
        let features =
            OPTIONAL.iter().filter(|(name, _)| has(name)).map(|(_, feature)| format!(", {feature}"));
        format!(
            "{} ({}{})",
            library.file().display(),
            version_text(self.version),
            features.collect::<String>()
        )
    }

    /// Makes the id of a new communicator.
    ///
    /// # Errors
    /// An error of the library.
    pub fn unique_id(&self) -> Result<UniqueId, KernelError> {
        let mut id = RawUniqueId { internal: [0; 128] };
        // SAFETY: the out-pointer outlives the call.
        let answer = unsafe { (self.functions.ncclGetUniqueId)(&mut id) };
        self.functions.check("ncclGetUniqueId", answer)?;
        Ok(UniqueId(id.internal.map(|byte| byte as u8)))
    }
}

/// Formats a version: 23007 is `2.30.7`.
fn version_text(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}
