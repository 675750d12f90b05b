//! Calls an entry of a program that was compiled for the host.

use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;

/// The part of a grid that the shim reads: `shim::Grid` of `shim.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawGrid {
    pub(super) blocks: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
    pub(super) order: u64,
}

/// An argument of a call; `shim.h` identifies its type by a letter.
#[derive(Debug)]
pub(super) enum RawArg {
    /// `p`.
    Pointer(*mut u8),
    /// `i`.
    I32(i32),
    /// `l`.
    I64(i64),
    /// `f`.
    F32(f32),
    /// `d`.
    F64(f64),
    /// `s`: a struct of `long long`.
    I64s(Vec<i64>),
}

impl RawArg {
    fn letter(&self) -> u8 {
        match self {
            RawArg::Pointer(_) => b'p',
            RawArg::I32(_) => b'i',
            RawArg::I64(_) => b'l',
            RawArg::F32(_) => b'f',
            RawArg::F64(_) => b'd',
            RawArg::I64s(_) => b's',
        }
    }

    fn bytes(&self) -> u32 {
        match self {
            RawArg::I32(_) | RawArg::F32(_) => 4,
            RawArg::Pointer(_) | RawArg::I64(_) | RawArg::F64(_) => 8,
            RawArg::I64s(numbers) => 8 * numbers.len() as u32,
        }
    }

    fn address(&self) -> *const c_void {
        match self {
            RawArg::Pointer(x) => std::ptr::from_ref(x).cast(),
            RawArg::I32(x) => std::ptr::from_ref(x).cast(),
            RawArg::I64(x) => std::ptr::from_ref(x).cast(),
            RawArg::F32(x) => std::ptr::from_ref(x).cast(),
            RawArg::F64(x) => std::ptr::from_ref(x).cast(),
            RawArg::I64s(x) => x.as_ptr().cast(),
        }
    }
}

/// The function that `SHIM_ENTRY` of `shim.h` defines for an entry.
type Entry = unsafe extern "C" fn(
    *const *const c_void,
    *const c_char,
    *const u32,
    u32,
    *const RawGrid,
) -> *const c_char;

/// Runs an entry of a compiled program; the error is the message of the shim. Pointer arguments must be aligned for the kernel's types,
/// and their memory must not be used elsewhere during the call.
pub(super) fn run(library: &Path, entry: &str, args: &[RawArg], grid: &RawGrid) -> Result<(), String> {
    let addresses: Vec<*const c_void> = args.iter().map(RawArg::address).collect();
    let letters =
        CString::new(args.iter().map(RawArg::letter).collect::<Vec<u8>>()).expect("letters are no zeros");
    let sizes: Vec<u32> = args.iter().map(RawArg::bytes).collect();
    // SAFETY: the library was compiled by this test from our own sources; its initialisers touch its own data only.
    let library = unsafe { Library::new(library) }.map_err(|e| e.to_string())?;
    let symbol = format!("shim_{entry}");
    // SAFETY: `SHIM_ENTRY` declares every symbol of this name with this type.
    let code = unsafe { library.get::<Entry>(symbol.as_bytes()) }.map_err(|e| e.to_string())?;
    let count = args.len() as u32;
    // SAFETY: the entry compares letters and sizes before it reads an argument, so it reads within each argument. The accesses
    // of kernels through pointers are under test; guards around all memory detect writes out of bounds.
    let message = unsafe { code(addresses.as_ptr(), letters.as_ptr(), sizes.as_ptr(), count, grid) };
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: the shim returns a zero-terminated text that lives until the thread's next launch.
    Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
}

/// The memory traffic of a grid: `Traffic` of `counters.cc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traffic {
    /// The sectors of 32 bytes of global memory that warps load and store, each once per request.
    pub(crate) loaded_sectors: u64,
    pub(crate) stored_sectors: u64,
    /// Passes over the banks of shared memory, and the fewest that the requests may take.
    pub(crate) shared_passes: u64,
    pub(crate) shared_passes_least: u64,
}

/// As [`run`] with a program that counts its memory traffic; `global` are the start and the end of each range of global memory.
pub(super) fn count(
    library: &Path,
    entry: &str,
    args: &[RawArg],
    grid: &RawGrid,
    global: &[[u64; 2]],
) -> Result<Traffic, String> {
    type Begin = unsafe extern "C" fn(*const [u64; 2], u32);
    type End = unsafe extern "C" fn(*mut Traffic);
    // SAFETY: as in `run`.
    let counters = unsafe { Library::new(library) }.map_err(|e| e.to_string())?;
    // SAFETY: `counters.cc` declares both with these types.
    let (begin, end) = unsafe {
        let begin = counters.get::<Begin>(b"shim_begin_traffic").map_err(|e| e.to_string())?;
        (begin, counters.get::<End>(b"shim_end_traffic").map_err(|e| e.to_string())?)
    };
    // SAFETY: the ranges outlive the call, which copies them.
    unsafe { begin(global.as_ptr(), global.len() as u32) };
    let done = run(library, entry, args, grid);
    let mut traffic = Traffic::default();
    // SAFETY: the out-pointer outlives the call.
    unsafe { end(&mut traffic) };
    done.map(|()| traffic)
}
