//! NCCL's functions, types and numbers, as far as they are used.

use shardgrad_kernels::KernelError;
use shardgrad_kernels::cuda::Library;
use shardgrad_kernels::cuda::library::NCCL;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;

/// `ncclResult_t`.
pub(crate) const SUCCESS: c_int = 0;
pub(crate) const IN_PROGRESS: c_int = 7;
/// `ncclDataType_t`.
pub(crate) const UINT8: c_int = 1;
pub(crate) const INT64: c_int = 4;
pub(crate) const FLOAT32: c_int = 7;
pub(crate) const FLOAT64: c_int = 8;
/// `ncclRedOp_t`.
pub(crate) const SUM: c_int = 0;
pub(crate) const MAX: c_int = 2;
pub(crate) const MIN: c_int = 3;
/// `NCCL_API_MAGIC`.
pub(crate) const MAGIC: c_uint = 0xCAFE_BEEF;
/// `NCCL_CONFIG_UNDEF_INT`.
pub(crate) const UNDEFINED: c_int = c_int::MIN;
/// `NCCL_SPLIT_NOCOLOR`.
pub(crate) const NO_COLOR: c_int = -1;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawUniqueId {
    pub(crate) internal: [c_char; 128],
}

/// `ncclConfig_t` of NCCL 2.18; newer versions have appended fields. `traffic_class` is younger, and stands where 2.18 has padding.
#[repr(C)]
pub(crate) struct Config {
    pub(crate) size: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
    pub(crate) blocking: c_int,
    pub(crate) cga_cluster_size: c_int,
    pub(crate) min_ctas: c_int,
    pub(crate) max_ctas: c_int,
    pub(crate) net_name: *const c_char,
    pub(crate) split_share: c_int,
    pub(crate) traffic_class: c_int,
}

/// What a `ncclComm_t` points to.
#[repr(C)]
pub(crate) struct RawComm([u8; 0]);

/// What a `cudaStream_t` points to.
#[repr(C)]
pub(crate) struct RawStream([u8; 0]);

/// Declares the table of functions that return a `ncclResult_t`; in tests, also their types in C.
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $type:ty),*);)*) => {
        /// The functions of an open library.
        #[allow(non_snake_case, reason = "the library's names")]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> c_int,)*
            error_string: unsafe extern "C" fn(c_int) -> *const c_char,
            last_error: unsafe extern "C" fn(*mut RawComm) -> *const c_char,
            pub(crate) library: Library,
        }

        impl Functions {
            /// Finds every function.
            pub(crate) fn load(library: Library) -> Result<Functions, KernelError> {
                // SAFETY: these are the types of `nccl.h`, which a test compares by a C++ compiler.
                unsafe {
                    Ok(Functions {
                        $($name: library.function(&NCCL, stringify!($name))?,)*
                        error_string: library.function(&NCCL, "ncclGetErrorString")?,
                        last_error: library.function(&NCCL, "ncclGetLastError")?,
                        library,
                    })
                }
            }
        }

        /// For each function its name and the types of its arguments in C.
        #[cfg(test)]
        pub(crate) fn signatures() -> Vec<(&'static str, Vec<&'static str>)> {
            vec![$((stringify!($name), vec![$(<$type as CType>::NAME),*])),*]
        }
    };
}

functions! {
    fn ncclGetUniqueId(id: *mut RawUniqueId);
    fn ncclCommInitRankConfig(comm: *mut *mut RawComm, size: c_int, id: RawUniqueId, rank: c_int, config: *mut Config);
    fn ncclCommSplit(comm: *mut RawComm, color: c_int, key: c_int, new: *mut *mut RawComm, config: *mut Config);
    fn ncclCommGetAsyncError(comm: *mut RawComm, state: *mut c_int);
    fn ncclCommAbort(comm: *mut RawComm);
    fn ncclCommDestroy(comm: *mut RawComm);
    fn ncclGroupStart();
    fn ncclGroupEnd();
    fn ncclAllReduce(x: *const c_void, y: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: *mut RawComm, stream: *mut RawStream);
    fn ncclReduceScatter(x: *const c_void, y: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: *mut RawComm, stream: *mut RawStream);
    fn ncclAllGather(x: *const c_void, y: *mut c_void, count: usize, dtype: c_int, comm: *mut RawComm, stream: *mut RawStream);
    fn ncclBroadcast(x: *const c_void, y: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: *mut RawComm, stream: *mut RawStream);
    fn ncclSend(x: *const c_void, count: usize, dtype: c_int, peer: c_int, comm: *mut RawComm, stream: *mut RawStream);
    fn ncclRecv(y: *mut c_void, count: usize, dtype: c_int, peer: c_int, comm: *mut RawComm, stream: *mut RawStream);
}

impl Functions {
    /// Turns the answer of a call into whether the call is complete; if not, it is in progress.
    pub(crate) fn check(&self, call: &'static str, answer: c_int) -> Result<bool, KernelError> {
        match answer {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            _ => Err(self.failed(call, answer)),
        }
    }

    /// Returns the error of a call, with the library's own text.
    pub(crate) fn failed(&self, call: &'static str, answer: c_int) -> KernelError {
        // SAFETY: both take any value and return static text, or null; the communicator of `ncclGetLastError` is unused.
        let (name, last) =
            unsafe { (text((self.error_string)(answer)), text((self.last_error)(std::ptr::null_mut()))) };
        let why = match &*last {
            "" => format!("{name} ({answer})"),
            last => format!("{name} ({answer}): {last}"),
        };
        KernelError::Device { call, why, lost_gpu: None }
    }
}

/// Copies a text of the library into one line.
///
/// # Safety
/// The pointer is null, or points to a text that ends with a zero byte.
unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: the caller promises a text.
    let text = unsafe { CStr::from_ptr(from) }.to_string_lossy();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Functions").field(&self.library).finish()
    }
}

/// The type of an argument in C. An enum is passed as an `int`, which the test checks.
#[cfg(test)]
pub(crate) trait CType {
    const NAME: &'static str;
}

#[cfg(test)]
macro_rules! c_types {
    ($($type:ty => $name:literal),*) => { $(impl CType for $type { const NAME: &'static str = $name; })* };
}

#[cfg(test)]
c_types! {
    c_int => "int",
    usize => "size_t",
    RawUniqueId => "ncclUniqueId",
    *mut RawUniqueId => "ncclUniqueId*",
    *mut RawComm => "ncclComm_t",
    *mut *mut RawComm => "ncclComm_t*",
    *mut Config => "ncclConfig_t*",
    *mut RawStream => "cudaStream_t",
    *mut c_int => "int*",
    *const c_void => "const void*",
    *mut c_void => "void*"
}
