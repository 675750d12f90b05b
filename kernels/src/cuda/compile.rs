//! The run-time compiler (NVRTC): compiles CUDA C++ to machine code (cubin) of one architecture, and caches it on disk. It needs no
//! driver and no GPU.

use super::cache::{Cache, Entry};
use super::library::{NVRTC, SearchPaths, foreign};
use super::usage::{self, Usage};
use crate::error::KernelError;
use cudarc::nvrtc::sys::nvrtcProgram;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;
use std::ptr;
use std::sync::Arc;

foreign!(Table {}, NVRTC, cudarc::nvrtc::sys, nvrtcResult {
    fn nvrtcCreateProgram(program: *mut nvrtcProgram, source: *const c_char, name: *const c_char,
        num_headers: c_int, headers: *const *const c_char, names: *const *const c_char);
    fn nvrtcCompileProgram(program: nvrtcProgram, num_options: c_int, options: *const *const c_char);
    fn nvrtcDestroyProgram(program: *mut nvrtcProgram);
    fn nvrtcGetCUBINSize(program: nvrtcProgram, bytes: *mut usize);
    fn nvrtcGetCUBIN(program: nvrtcProgram, cubin: *mut c_char);
    fn nvrtcGetProgramLogSize(program: nvrtcProgram, bytes: *mut usize);
    fn nvrtcGetProgramLog(program: nvrtcProgram, log: *mut c_char);
});

impl Table {
    fn failed(&self, call: &'static str, answer: c_int) -> KernelError {
        KernelError::Device { call, why: format!("the compiler failed with code {answer}"), lost_gpu: None }
    }
}

/// The default of ptxas for kernels without a minimum of blocks per multiprocessor: two. By itself ptxas would rather spill a few
/// bytes than reduce the number of resident blocks; with two blocks a thread gets the registers it needs.
const REGISTERS_AS_NEEDED: &str = "--ptxas-options=--minnctapersm=2";

/// Disables the cache of NVRTC itself, which returns code without the log of ptxas.
const NO_COMPILER_CACHE: &str = "--no-cache";

/// A program to compile.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// The name of the kernel, for messages.
    pub kernel: &'a str,
    /// CUDA C++ without includes.
    pub text: &'a str,
}

/// Machine code of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompiledProgram {
    /// The cubin, which the driver loads.
    pub cubin: Vec<u8>,
    /// The resources of each entry.
    pub usage: Vec<Usage>,
    /// Whether the code came from the cache on disk.
    pub is_cached: bool,
}

/// The NVRTC library of this machine, and the cache of its results.
#[derive(Debug)]
pub struct Compiler {
    table: Table,
    version: (i32, i32),
    cache: Option<Cache>,
    _builtins: Option<super::library::Library>,
}

impl Compiler {
    /// Finds the compiler.
    ///
    /// # Errors
    /// [`KernelError::Library`] if the library is missing, too old or lacks a function.
    pub fn open(paths: &SearchPaths) -> Result<Compiler, KernelError> {
        let library = paths.open(&NVRTC)?;
        // NVRTC opens its built-ins by name, and their folder need not be on the loader's path.
        let builtins = library.open_sibling("libnvrtc-builtins.so");
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the type is that of the bindings; both out-pointers outlive the call.
        unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                library.function(&NVRTC, "nvrtcVersion")?;
            version(&mut major, &mut minor);
        }
        let number = usize::try_from(major * 1000 + minor * 10).unwrap_or(0);
        NVRTC.check(number, &format!("{major}.{minor}"), library.file())?;
        let table = Table::load(Arc::new(library))?;
        let cache = paths.cache.as_deref().map(Cache::new);
        Ok(Compiler { table, version: (major, minor), cache, _builtins: builtins })
    }

    /// Returns the version: major, minor.
    #[must_use]
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Returns the file of the library.
    #[must_use]
    pub fn file(&self) -> &Path {
        self.table.opened.file()
    }

    /// Compiles a program for an architecture such as `sm_90a`, or returns its cached machine code. The same program gives the same
    /// code.
    ///
    /// # Errors
    /// [`KernelError::Compile`] with the compiler's log.
    pub fn compile(&self, program: &Program<'_>, architecture: &str) -> Result<CompiledProgram, KernelError> {
        let architecture = format!("--gpu-architecture={architecture}");
        let options =
            [&*architecture, "--std=c++17", "--ptxas-options=-v", REGISTERS_AS_NEEDED, NO_COMPILER_CACHE];
        let (major, minor) = self.version;
        let key = format!("nvrtc {major}.{minor}\n{}\n{}", options.join("\n"), program.text);
        let found = self.cache.as_ref().and_then(|cache| cache.read(&key));
        let is_cached = found.is_some();
        let entry = match found {
            Some(entry) => entry,
            None => {
                let entry = self.run(program, &options)?;
                if let Some(cache) = &self.cache {
                    cache.write(&key, &entry);
                }
                entry
            }
        };
        Ok(CompiledProgram { usage: usage::parse_ptxas_log(&entry.log), cubin: entry.cubin, is_cached })
    }

    fn run(&self, program: &Program<'_>, options: &[&str]) -> Result<Entry, KernelError> {
        let refuse = |log: String| KernelError::Compile { kernel: program.kernel.into(), log };
        let text = |t: &str| CString::new(t).map_err(|_| refuse("the source contains a zero byte".into()));
        let (source, name) = (text(program.text)?, text(&format!("{}.cu", program.kernel))?);
        let options = options.iter().map(|o| text(o)).collect::<Result<Vec<CString>, KernelError>>()?;
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut handle = ptr::null_mut();
        // SAFETY: both texts end in a zero byte and outlive the call; there are no headers.
        unsafe {
            self.table.nvrtcCreateProgram(
                &mut handle,
                source.as_ptr(),
                name.as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        }?;
        let program = Handle { table: &self.table, program: handle };
        // SAFETY: the program was created above; the options end in zero bytes and outlive the call.
        let done = unsafe {
            self.table.nvrtcCompileProgram(program.program, options.len() as c_int, options.as_ptr())
        };
        let log = program.log()?;
        match done {
            Ok(()) => Ok(Entry { log, cubin: program.cubin()? }),
            Err(error) if log.trim().is_empty() => Err(error),
            Err(_) => Err(refuse(log)),
        }
    }
}

/// An NVRTC program, destroyed on drop.
struct Handle<'a> {
    table: &'a Table,
    program: nvrtcProgram,
}

impl Handle<'_> {
    fn log(&self) -> Result<String, KernelError> {
        let mut bytes = 0;
        // SAFETY: the program is alive, the out-pointer outlives the call.
        unsafe { self.table.nvrtcGetProgramLogSize(self.program, &mut bytes) }?;
        let mut log = vec![0u8; bytes.max(1)];
        // SAFETY: the log has as many bytes as the compiler asked for, including its zero byte.
        unsafe { self.table.nvrtcGetProgramLog(self.program, log.as_mut_ptr().cast()) }?;
        let end = CStr::from_bytes_until_nul(&log).map_or(&log[..], CStr::to_bytes);
        Ok(String::from_utf8_lossy(end).into_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, KernelError> {
        let mut bytes = 0;
        // SAFETY: the program is alive, the out-pointer outlives the call.
        unsafe { self.table.nvrtcGetCUBINSize(self.program, &mut bytes) }?;
        let mut cubin = vec![0u8; bytes];
        // SAFETY: the memory has as many bytes as the compiler asked for.
        unsafe { self.table.nvrtcGetCUBIN(self.program, cubin.as_mut_ptr().cast()) }?;
        Ok(cubin)
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        // SAFETY: the program was created and is destroyed once, here. There is nothing to do about a refusal.
        let _ = unsafe { self.table.nvrtcDestroyProgram(&mut self.program) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn twice(factor: &str) -> String {
        format!(
            "extern \"C\" __global__ void twice(float *x, int n) {{ int i = blockIdx.x * blockDim.x + threadIdx.x; \
             if (i < n) x[i] = {factor} * x[i]; }}"
        )
    }

    /// Opens the compiler of this machine with its own cache; `None`, with a line on stderr, if there is none.
    fn compiler(name: &str) -> Option<(Compiler, std::path::PathBuf)> {
        let folder = std::env::temp_dir().join(format!("shardgrad-{name}-{}", std::process::id()));
        let paths = SearchPaths { cache: Some(folder.clone()), ..SearchPaths::from_env() };
        match Compiler::open(&paths) {
            Ok(compiler) => Some((compiler, folder)),
            Err(error) => {
                use std::io::Write as _;
                let _ = writeln!(std::io::stderr(), "skipped: {error}");
                None
            }
        }
    }

    #[test]
    fn program_is_cached_and_a_damaged_entry_is_recompiled() {
        let Some((compiler, folder)) = compiler("cubins") else { return };
        let (two, three) = (twice("2.0f"), twice("3.0f"));
        let program = Program { kernel: "twice", text: &two };
        for architecture in ["sm_80", "sm_90a"] {
            let first = compiler.compile(&program, architecture).unwrap();
            assert!(!first.is_cached && first.cubin.starts_with(b"\x7fELF"));
            assert_eq!(
                (first.usage.len(), &*first.usage[0].entry, first.usage[0].spill_bytes),
                (1, "twice", 0)
            );
            assert!(first.usage[0].registers > 0);
            let second = compiler.compile(&program, architecture).unwrap();
            assert!(second.is_cached && second.cubin == first.cubin && second.usage == first.usage);
        }
        assert!(!compiler.compile(&Program { text: &three, ..program }, "sm_80").unwrap().is_cached);
        for file in fs::read_dir(folder.join("cubin")).unwrap().flatten() {
            let mut bytes = fs::read(file.path()).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(file.path(), bytes).unwrap();
        }
        assert!(!compiler.compile(&program, "sm_80").unwrap().is_cached, "a damaged file is not used");
        assert!(compiler.compile(&program, "sm_80").unwrap().is_cached, "and is replaced");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn compile_error_includes_the_log() {
        let Some((compiler, _)) = compiler("refused") else { return };
        let text = "extern \"C\" __global__ void f() { x = 1; }";
        let program = Program { kernel: "wrong", text };
        let error = compiler.compile(&program, "sm_80").unwrap_err();
        assert!(
            matches!(&error, KernelError::Compile { kernel, log } if kernel == "wrong" && log.contains("\"x\""))
        );
        assert!(compiler.compile(&Program { text: "", ..program }, "sm_1").is_err(), "no such architecture");
    }
}
