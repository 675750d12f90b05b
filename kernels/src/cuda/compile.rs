//! The run-time compiler: CUDA C++ in, machine code of one architecture out, kept on disk between runs. It needs no
//! driver and no card.

use super::cache::{Cache, Entry};
use super::library::{NVRTC, SearchPaths, foreign};
use super::usage::{self, Usage};
use crate::error::KernelError;
use cudarc::nvrtc::sys::nvrtcProgram;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;
use std::ptr;

foreign!(Table, NVRTC, cudarc::nvrtc::sys, nvrtcResult {
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
        KernelError::Device {
            call,
            why: format!("the compiler failed with code {answer}"),
            is_permanent: false,
        }
    }
}

/// Where a source does not say how many blocks must fit a multiprocessor, the assembler decides, and rather spills a few bytes
/// than let fewer fit. Two are enough: threads get the registers that they need.
const REGISTERS_AS_NEEDED: &str = "--ptxas-options=--minnctapersm=2";

/// The compiler's own cache would give the code without what the assembler says of it.
const COMPILED_HERE: &str = "--no-cache";

/// What is to be compiled.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// Whose source this is, for messages.
    pub kernel: &'a str,
    /// CUDA C++ without includes.
    pub text: &'a str,
}

/// BackendProvider code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The file that a driver loads.
    pub cubin: Vec<u8>,
    /// What each entry takes.
    pub usage: Vec<Usage>,
    /// Whether it was kept from an earlier run.
    pub kept: bool,
}

/// The compiler that was found on this machine.
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
    /// [`KernelError::Library`] where it is missing, too old or not what its name says.
    pub fn open(places: &SearchPaths) -> Result<Compiler, KernelError> {
        let library = places.open(&NVRTC)?;
        // The compiler asks the loader for this one by name, and its folder need not be on the loader's path.
        let builtins = library.open_beside("libnvrtc-builtins.so");
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the type is that of the bindings; two places that outlive the call.
        unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                library.function(&NVRTC, "nvrtcVersion")?;
            version(&mut major, &mut minor);
        }
        let number = usize::try_from(major * 1000 + minor * 10).unwrap_or(0);
        NVRTC.check(number, &format!("{major}.{minor}"), library.file())?;
        let table = Table::load(library)?;
        let cache = places.cache.as_deref().map(Cache::new);
        Ok(Compiler { table, version: (major, minor), cache, _builtins: builtins })
    }

    /// Its version: major, minor.
    #[must_use]
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The file that it came from.
    #[must_use]
    pub fn file(&self) -> &Path {
        self.table.opened.file()
    }

    /// BackendProvider code of a program for an architecture such as `sm_90a`: from the cache where that has it, else compiled
    /// and put there. The same program gives the same code.
    ///
    /// # Errors
    /// [`KernelError::Compile`] with the compiler's log.
    pub fn compile(&self, program: &Program<'_>, architecture: &str) -> Result<Compiled, KernelError> {
        let architecture = format!("--gpu-architecture={architecture}");
        let options =
            [&*architecture, "--std=c++17", "--ptxas-options=-v", REGISTERS_AS_NEEDED, COMPILED_HERE];
        let (major, minor) = self.version;
        let key = format!("nvrtc {major}.{minor}\n{}\n{}", options.join("\n"), program.text);
        let found = self.cache.as_ref().and_then(|cache| cache.read(&key));
        let kept = found.is_some();
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
        Ok(Compiled { usage: usage::read(&entry.log), cubin: entry.cubin, kept })
    }

    fn run(&self, program: &Program<'_>, options: &[&str]) -> Result<Entry, KernelError> {
        let refuse = |log: String| KernelError::Compile { kernel: program.kernel.into(), log };
        let text = |t: &str| CString::new(t).map_err(|_| refuse("a text with a zero byte".into()));
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

/// A program of the compiler, destroyed when dropped.
struct Handle<'a> {
    table: &'a Table,
    program: nvrtcProgram,
}

impl Handle<'_> {
    fn log(&self) -> Result<String, KernelError> {
        let mut bytes = 0;
        // SAFETY: the program is alive, the place outlives the call.
        unsafe { self.table.nvrtcGetProgramLogSize(self.program, &mut bytes) }?;
        let mut log = vec![0u8; bytes.max(1)];
        // SAFETY: the log has as many bytes as the compiler asked for, its zero byte among them.
        unsafe { self.table.nvrtcGetProgramLog(self.program, log.as_mut_ptr().cast()) }?;
        let end = CStr::from_bytes_until_nul(&log).map_or(&log[..], CStr::to_bytes);
        Ok(String::from_utf8_lossy(end).into_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, KernelError> {
        let mut bytes = 0;
        // SAFETY: the program is alive, the place outlives the call.
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

    /// The compiler of this machine, with a cache of its own; `None`, with a line that says so, where there is none.
    fn compiler(name: &str) -> Option<(Compiler, std::path::PathBuf)> {
        let folder = std::env::temp_dir().join(format!("shardgrad-{name}-{}", std::process::id()));
        let places = SearchPaths { cache: Some(folder.clone()), ..SearchPaths::from_env() };
        match Compiler::open(&places) {
            Ok(compiler) => Some((compiler, folder)),
            Err(error) => {
                use std::io::Write as _;
                let _ = writeln!(std::io::stderr(), "skipped: {error}");
                None
            }
        }
    }

    #[test]
    fn a_program_is_compiled_once_and_a_damaged_file_anew() {
        let Some((compiler, folder)) = compiler("cubins") else { return };
        let (two, three) = (twice("2.0f"), twice("3.0f"));
        let program = Program { kernel: "twice", text: &two };
        for architecture in ["sm_80", "sm_90a"] {
            let first = compiler.compile(&program, architecture).unwrap();
            assert!(!first.kept && first.cubin.starts_with(b"\x7fELF"));
            assert_eq!(
                (first.usage.len(), &*first.usage[0].entry, first.usage[0].spill_bytes),
                (1, "twice", 0)
            );
            assert!(first.usage[0].registers > 0);
            let second = compiler.compile(&program, architecture).unwrap();
            assert!(second.kept && second.cubin == first.cubin && second.usage == first.usage);
        }
        assert!(!compiler.compile(&Program { text: &three, ..program }, "sm_80").unwrap().kept);
        for file in fs::read_dir(folder.join("cubin")).unwrap().flatten() {
            let mut bytes = fs::read(file.path()).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(file.path(), bytes).unwrap();
        }
        assert!(!compiler.compile(&program, "sm_80").unwrap().kept, "a damaged file is not used");
        assert!(compiler.compile(&program, "sm_80").unwrap().kept, "and is replaced");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_refused_source_is_an_error_with_the_log() {
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
