//! The search for NVIDIA libraries at run time, by files only: no program is run.

use crate::error::KernelError;
use std::ffi::c_int;
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The description of an NVIDIA library that the back end loads.
#[derive(Debug)]
pub struct LibrarySpec {
    /// The name in messages.
    pub name: &'static str,
    /// The environment variable that names its file, or the folder of the file.
    pub variable: &'static str,
    /// The file name without the version.
    pub stem: &'static str,
    /// The name for the dynamic loader.
    pub soname: &'static str,
    /// The oldest supported version, as the library reports it, and for messages.
    pub min_version: (usize, &'static str),
    /// Whether Python wheels contain the library.
    pub in_wheels: bool,
    /// What to do if the library is missing or too old.
    pub help: &'static str,
}

/// The CUDA driver: memory, streams, launches.
pub static DRIVER: LibrarySpec = LibrarySpec {
    name: "NVIDIA driver",
    variable: "SHARDGRAD_CUDA_PATH",
    stem: "libcuda.so",
    soname: "libcuda.so.1",
    min_version: (13000, "13.0"),
    in_wheels: false,
    help: "install the NVIDIA driver, version 580 or newer, or name its libcuda.so.1 in SHARDGRAD_CUDA_PATH",
};

/// NVRTC: the compiler of kernels.
pub static NVRTC: LibrarySpec = LibrarySpec {
    name: "run-time compiler",
    variable: "SHARDGRAD_NVRTC_PATH",
    stem: "libnvrtc.so",
    soname: "libnvrtc.so.13",
    min_version: (13000, "13.0"),
    in_wheels: true,
    help: "pip install 'nvidia-cuda-nvrtc==13.0.*', or name its libnvrtc.so.13 in SHARDGRAD_NVRTC_PATH",
};

/// cuBLASLt: products of matrices.
pub static CUBLASLT: LibrarySpec = LibrarySpec {
    name: "cuBLASLt",
    variable: "SHARDGRAD_CUBLASLT_PATH",
    stem: "libcublasLt.so",
    soname: "libcublasLt.so.13",
    min_version: (130_000, "13.0"),
    in_wheels: true,
    help: "pip install 'nvidia-cublas==13.*', or name its libcublasLt.so.13 in SHARDGRAD_CUBLASLT_PATH",
};

/// NCCL: collectives between GPUs. 2.18 is the first version that splits communicators.
pub static NCCL: LibrarySpec = LibrarySpec {
    name: "NCCL",
    variable: "SHARDGRAD_NCCL_PATH",
    stem: "libnccl.so",
    soname: "libnccl.so.2",
    min_version: (21_800, "2.18"),
    in_wheels: true,
    help: "pip install nvidia-nccl-cu13, or name its libnccl.so.2 in SHARDGRAD_NCCL_PATH",
};

impl LibrarySpec {
    /// Returns an error about this library.
    #[must_use]
    pub fn error(&self, why: impl Into<String>) -> KernelError {
        KernelError::Library { library: self.name, why: why.into(), help: self.help.into() }
    }

    /// Returns an error if a version is too old.
    pub(super) fn check(&self, version: usize, shown: &str, file: &Path) -> Result<(), KernelError> {
        if version >= self.min_version.0 {
            return Ok(());
        }
        let why =
            format!("{} is for CUDA {shown}, and {} or newer is needed", file.display(), self.min_version.1);
        Err(self.error(why))
    }
}

/// Where to search for libraries, and where to cache compiled kernels.
#[derive(Clone, Debug, Default)]
pub struct SearchPaths {
    /// Libraries with a fixed path: the name of the environment variable, and the file or its folder.
    pub named: Vec<(&'static str, PathBuf)>,
    /// Folders of Python environments (with `bin` and `lib`).
    pub environments: Vec<PathBuf>,
    /// The folder of the cache of compiled kernels, if there is one.
    pub cache: Option<PathBuf>,
}

impl SearchPaths {
    /// Returns the search paths of the environment: a variable for each library; packages of the active virtual environment and of
    /// the `python3` on the path; a cache in `SHARDGRAD_CACHE_DIR`, else in the cache folder of the user.
    #[must_use]
    pub fn from_env() -> SearchPaths {
        let path = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let specs = [&DRIVER, &NVRTC, &CUBLASLT, &NCCL];
        let named = specs.into_iter().filter_map(|w| Some((w.variable, path(w.variable)?)));
        let own = |home: PathBuf| home.join("shardgrad");
        let cache = path("SHARDGRAD_CACHE_DIR")
            .or_else(|| path("XDG_CACHE_HOME").map(own))
            .or_else(|| path("HOME").map(|home| own(home.join(".cache"))));
        let mut environments: Vec<PathBuf> = path("VIRTUAL_ENV").into_iter().collect();
        let folders = env::var_os("PATH").unwrap_or_default();
        let python = env::split_paths(&folders).map(|f| f.join("python3")).find(|p| p.is_file());
        if let Some(python) = python {
            let prefix = |p: &Path| p.parent().and_then(Path::parent).map(Path::to_path_buf);
            environments.extend(prefix(&python));
            environments.extend(fs::canonicalize(&python).ok().as_deref().and_then(prefix));
        }
        SearchPaths { named: named.collect(), environments, cache }
    }

    /// Returns the library folders of NVIDIA's Python packages.
    fn wheels(&self) -> Vec<PathBuf> {
        let inside = |folder: PathBuf| {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            let mut paths: Vec<PathBuf> = entries.map(|e| e.path()).collect();
            paths.sort();
            paths
        };
        let is_python =
            |p: &PathBuf| p.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with("python3"));
        let libs =
            self.environments.iter().flat_map(|e| [e.join("lib"), e.join("local/lib"), e.join("lib64")]);
        let packages = libs.flat_map(inside).filter(is_python);
        let packages = packages.flat_map(|p| [p.join("site-packages"), p.join("dist-packages")]);
        packages
            .flat_map(|p| inside(p.join("nvidia")))
            .map(|p| p.join("lib"))
            .filter(|p| p.is_dir())
            .collect()
    }

    /// Opens a library: the file that its variable names, and no other; else the file of a Python package; else the file that the
    /// dynamic loader finds.
    ///
    /// # Errors
    /// [`KernelError::Library`] if there is no such file, or it cannot be opened.
    pub fn open(&self, spec: &LibrarySpec) -> Result<Library, KernelError> {
        if let Some((_, path)) = self.named.iter().find(|(name, _)| *name == spec.variable) {
            let file = if path.is_dir() { file_in(path, spec.stem) } else { Some(path.clone()) };
            let file = file.ok_or_else(|| {
                let why = format!("{} is {}, which contains no {}", spec.variable, path.display(), spec.stem);
                spec.error(why)
            })?;
            return Library::open(&file).map_err(|why| spec.error(format!("{}: {why}", spec.variable)));
        }
        if spec.in_wheels {
            let files = self.wheels().into_iter().filter_map(|folder| file_in(&folder, spec.stem));
            if let Some(library) = files.map(|file| Library::open(&file)).find_map(Result::ok) {
                return Ok(library);
            }
        }
        Library::open(Path::new(spec.soname))
            .map_err(|why| spec.error(format!("not found on this machine ({why})")))
    }
}

/// Returns the file of a library in a folder; of several, the one with the longest version.
fn file_in(folder: &Path, stem: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let is_it = |name: &str| {
        let version = name.strip_prefix(stem);
        version.is_some_and(|v| v.chars().all(|c| c == '.' || c.is_ascii_digit()))
    };
    let fits = entries.filter(|e| e.file_name().to_str().is_some_and(is_it));
    fits.map(|e| e.path()).max_by_key(|p| p.as_os_str().len())
}

/// An open library. It is never closed, because its threads may still run.
pub struct Library {
    open: ManuallyDrop<libloading::Library>,
    file: PathBuf,
}

impl Library {
    /// Opens a file, or a library by its name.
    fn open(file: &Path) -> Result<Library, String> {
        // SAFETY: opening runs the library's initialisers; these are libraries of NVIDIA, or files that the user named.
        let open = unsafe { libloading::Library::new(file) }.map_err(|e| e.to_string())?;
        Ok(Library {
            open: ManuallyDrop::new(open),
            file: loaded_path(file).unwrap_or_else(|| file.to_path_buf()),
        })
    }

    /// Opens a library in the folder of this one, if there is one. This library then finds it by name, since it is loaded already.
    pub(super) fn open_sibling(&self, stem: &str) -> Option<Library> {
        Library::open(&file_in(self.file.parent()?, stem)?).ok()
    }

    /// Returns the file that was opened.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns a function of the library.
    ///
    /// # Errors
    /// [`KernelError::Library`] if the library lacks it.
    ///
    /// # Safety
    /// `F` must be a function-pointer type, and the type of this function.
    pub unsafe fn function<F: Copy>(&self, spec: &LibrarySpec, name: &str) -> Result<F, KernelError> {
        // SAFETY: the caller promises that this is the function's type.
        let found = unsafe { self.open.get::<F>(name.as_bytes()) };
        let lacking = |_| spec.error(format!("{} has no function {name}", self.file.display()));
        found.map(|f| *f).map_err(lacking)
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Library({})", self.file.display())
    }
}

/// Returns the file that the loader opened for a bare name.
fn loaded_path(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return None;
    }
    let stem = name.file_name()?.to_str()?.split(".so").next()?.to_string() + ".so";
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let files = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(Path::new);
    let mut ours =
        files.filter(|f| f.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(&stem)));
    ours.next().map(Path::to_path_buf)
}

/// The status of a foreign function; 0 is success.
pub(super) type StatusCode = c_int;

/// Declares the functions of a library: a table of pointers, and for each a method that converts a status other than 0 to an error by
/// `Self::failed`. The compiler checks the types against the generated bindings. The loader of the bindings is not used, because it
/// panics if a library or function is missing and chooses the file itself.
macro_rules! foreign {
    ($table:ident { $($field:ident: $kind:ty)? }, $spec:path, $bindings:path, $status:ident {
        $(fn $name:ident($($arg:ident: $type:ty),*);)*
    }) => {
        #[allow(non_snake_case)]
        pub(super) struct $table {
            $($name: unsafe extern "C" fn($($type),*) -> $crate::cuda::library::StatusCode,)*
            opened: std::sync::Arc<$crate::cuda::library::Library>,
            $($field: $kind,)?
        }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl $table {
            /// Finds every function.
            fn load(
                library: std::sync::Arc<$crate::cuda::library::Library>,
                $($field: $kind,)?
            ) -> Result<$table, $crate::error::KernelError> {
                use $bindings as bindings;
                $({
                    let _: unsafe fn($($type),*) -> bindings::$status = bindings::$name;
                })*
                // SAFETY: the bindings, which are generated from the headers, state these types.
                Ok(unsafe {
                    $table {
                        $($name: library.function(&$spec, stringify!($name))?,)*
                        opened: library,
                        $($field,)?
                    }
                })
            }

            $(
                /// Calls the library function of this name.
                ///
                /// # Safety
                /// The requirements of the library's documentation on the arguments.
                pub(super) unsafe fn $name(&self, $($arg: $type),*) -> Result<(), $crate::error::KernelError> {
                    // SAFETY: the caller meets the function's requirements.
                    let status = unsafe { (self.$name)($($arg),*) };
                    if status == 0 { Ok(()) } else { Err(self.failed(stringify!($name), status)) }
                }
            )*
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_tuple(stringify!($table)).field(&self.opened).finish()
            }
        }
    };
}
pub(super) use foreign;
