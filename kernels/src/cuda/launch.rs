//! Compiled programs of a GPU, and launches of their entries with the arguments of a plan.

use super::compile::{Compiler, Program};
use super::driver::{Context, Resource, Stream};
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg};
use crate::kernel::Launch;
use crate::strides::Strides;
use cudarc::driver::sys::{CUfunction, CUfunction_attribute};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

/// The shared memory, static and dynamic, that a block may use without raising an attribute of its entry.
const SHARED_BYTES_DEFAULT: u32 = 48 << 10;

/// A program loaded into the context.
#[derive(Debug)]
struct Module {
    context: Arc<Context>,
    handle: usize,
}

impl Module {
    fn new(context: &Arc<Context>, cubin: &[u8]) -> Result<Module, KernelError> {
        let mut handle = ptr::null_mut();
        // SAFETY: the image comes from the compiler, states its own length, and outlives the call, which copies it.
        unsafe { context.bound()?.cuModuleLoadData(&mut handle, cubin.as_ptr().cast()) }?;
        Ok(Module { context: context.clone(), handle: handle.expose_provenance() })
    }

    /// Returns the handle of an entry.
    fn function(&self, name: &str) -> Result<usize, KernelError> {
        let name = CString::new(name).expect("the name of an entry has no zero byte");
        let (mut handle, module) = (ptr::null_mut(), ptr::with_exposed_provenance_mut(self.handle));
        // SAFETY: the module is alive, the name ends in a zero byte, the out-pointer outlives the call.
        unsafe { self.context.bound()?.cuModuleGetFunction(&mut handle, module, name.as_ptr()) }?;
        Ok(handle.expose_provenance())
    }

    /// Returns the static shared memory of an entry of this module, in bytes.
    fn static_bytes(&self, function: usize) -> Result<u32, KernelError> {
        let which = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        let (mut bytes, function) = (0, ptr::with_exposed_provenance_mut(function));
        // SAFETY: the module is alive, the out-pointer outlives the call.
        unsafe { self.context.bound()?.cuFuncGetAttribute(&mut bytes, which, function) }?;
        Ok(u32::try_from(bytes).unwrap_or(0))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        self.context.destroy(Resource::Module(self.handle));
    }
}

/// An entry of a program, ready to be launched.
#[derive(Clone, Copy, Debug)]
struct Entry {
    name: &'static str,
    function: usize,
    /// The dynamic shared memory per block that its attribute allows.
    shared_bytes: u32,
}

/// A program of a source: macros, module, and the entries that were launched.
#[derive(Debug)]
struct LoadedProgram {
    defines: Vec<(&'static str, Cow<'static, str>)>,
    module: Module,
    entries: Vec<Entry>,
}

/// The programs of a GPU, compiled and loaded at first use. All ranks on the GPU share them.
#[derive(Debug)]
pub(super) struct Programs {
    compiler: Compiler,
    architecture: String,
    /// By the address of the source, which is static.
    loaded: Mutex<HashMap<usize, Vec<LoadedProgram>>>,
}

impl Programs {
    pub(super) fn new(compiler: Compiler, architecture: String) -> Programs {
        Programs { compiler, architecture, loaded: Mutex::default() }
    }

    /// Returns the entry of a grid. The first thread that needs a program compiles it, under the lock; other threads wait.
    fn entry(
        &self,
        context: &Arc<Context>,
        kernel: &str,
        source: &'static str,
        grid: &Grid,
    ) -> Result<Entry, KernelError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let programs = loaded.entry(source.as_ptr().addr()).or_default();
        let at = match programs.iter().position(|p| p.defines == grid.defines) {
            Some(at) => at,
            None => {
                let text = grid.program(source);
                let compiled = self.compiler.compile(&Program { kernel, text: &text }, &self.architecture)?;
                let module = Module::new(context, &compiled.cubin)?;
                programs.push(LoadedProgram { defines: grid.defines.clone(), module, entries: Vec::new() });
                programs.len() - 1
            }
        };
        let program = &mut programs[at];
        let at = match program.entries.iter().position(|e| e.name == grid.entry) {
            Some(at) => at,
            None => {
                let function = program.module.function(grid.entry)?;
                let shared_bytes =
                    SHARED_BYTES_DEFAULT.saturating_sub(program.module.static_bytes(function)?);
                program.entries.push(Entry { name: grid.entry, function, shared_bytes });
                program.entries.len() - 1
            }
        };
        let entry = &mut program.entries[at];
        if grid.shared_bytes > entry.shared_bytes {
            let which = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let function: CUfunction = ptr::with_exposed_provenance_mut(entry.function);
            // SAFETY: the entry's module is alive.
            unsafe { context.bound()?.cuFuncSetAttribute(function, which, grid.shared_bytes as c_int) }?;
            entry.shared_bytes = grid.shared_bytes;
        }
        Ok(*entry)
    }

    /// Submits a grid to a stream. The plan of the kernel made it for these operands.
    pub(super) fn launch(
        &self,
        stream: &Stream,
        kernel: &str,
        source: &'static str,
        grid: &Grid,
        operands: &Operands<'_, '_>,
    ) -> Result<(), KernelError> {
        let entry = self.entry(stream.context(), kernel, source, grid)?;
        let mut args = Args::default();
        grid.args.iter().for_each(|arg| args.push(arg, &|arg| operands.address(arg)));
        let mut pointers = args.pointers();
        let function: CUfunction = ptr::with_exposed_provenance_mut(entry.function);
        let [x, y, z] = grid.blocks;
        // SAFETY: the entry's module is alive, since programs are never removed; the arguments outlive the call, which copies
        // them. The addresses are those of operands, whose memory is reused on this stream only, or is retained until that stream
        // waits for this work. Tests run the plans of all entries between guards.
        unsafe {
            stream.context().bound()?.cuLaunchKernel(
                function,
                x,
                y,
                z,
                grid.threads,
                1,
                1,
                grid.shared_bytes,
                stream.handle(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
    }
}

/// The operands of a launch, to which its arguments refer.
#[derive(Debug)]
pub(super) struct Operands<'a, 'b> {
    pub(super) launch: &'a Launch<'b>,
    pub(super) scratch: &'a [Buffer],
    /// The address of the fault record of the kernel.
    pub(super) fault: u64,
    /// The address of the fault records of all kernels.
    pub(super) faults: u64,
}

impl Operands<'_, '_> {
    fn address(&self, arg: &GridArg) -> u64 {
        match *arg {
            GridArg::Input(i) => {
                let x = &self.launch.inputs[i];
                element_address(x.buffer, x.view, x.dtype)
            }
            GridArg::Output(i) => {
                let y = &self.launch.outputs[i];
                element_address(y.buffer, y.view, y.dtype)
            }
            GridArg::Scratch(i) => self.scratch[i].device_address().expect("scratch memory is device memory"),
            GridArg::Fault => self.fault,
            GridArg::Faults => self.faults,
            _ => unreachable!("only operands have addresses"),
        }
    }
}

/// Returns the address of the first element of a view.
pub(super) fn element_address(buffer: &Buffer, view: &Strides, dtype: DType) -> u64 {
    let address = buffer.device_address().expect("bug: an operand on another device");
    assert!(view.reach() * dtype.size() <= buffer.bytes(), "bug: a view extends beyond its buffer");
    address + (view.offset * dtype.size()) as u64
}

/// The packed arguments of a launch, each at a 64-bit word; typical launches need no heap memory.
#[derive(Debug, Default)]
struct Args {
    words: SmallVec<[u64; 96]>,
    starts: SmallVec<[usize; 32]>,
}

impl Args {
    fn push(&mut self, arg: &GridArg, address: &impl Fn(&GridArg) -> u64) {
        self.starts.push(self.words.len());
        match arg {
            GridArg::Input(_)
            | GridArg::Output(_)
            | GridArg::Scratch(_)
            | GridArg::Fault
            | GridArg::Faults => self.words.push(address(arg)),
            // Little endian: the low half of the word comes first.
            GridArg::I32(x) => self.words.push(u64::from(x.cast_unsigned())),
            GridArg::F32(x) => self.words.push(u64::from(x.to_bits())),
            GridArg::I64(x) => self.words.push(x.cast_unsigned()),
            GridArg::F64(x) => self.words.push(x.to_bits()),
            GridArg::I64s(numbers) => self.words.extend(numbers.iter().map(|x| x.cast_unsigned())),
            GridArg::Addresses(operands) => self.words.extend(operands.iter().map(address)),
        }
    }

    /// Returns a pointer to each argument; then the end of the last one and a null pointer, which the driver does not read, but the fake
    /// driver: they state the number of arguments and the length of the last.
    fn pointers(&mut self) -> SmallVec<[*mut c_void; 36]> {
        let (words, end) = (self.words.as_mut_ptr(), self.words.len());
        let starts = self.starts.iter().copied().chain([end]).map(|at| words.wrapping_add(at).cast());
        starts.chain([ptr::null_mut()]).collect()
    }
}

#[cfg(target_endian = "big")]
compile_error!("arguments of launches are packed little endian");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_packed_as_the_entry_reads_them() {
        let mut args = Args::default();
        let all = [
            GridArg::Input(1),
            GridArg::I32(-2),
            GridArg::F32(1.5),
            GridArg::I64s(vec![3, -4, 5]),
            GridArg::F64(-0.25),
            GridArg::I64(i64::MIN),
            GridArg::Fault,
            GridArg::Addresses(vec![GridArg::Output(0), GridArg::Fault]),
        ];
        let address = |arg: &GridArg| if *arg == GridArg::Fault { 77 } else { 4096 };
        all.iter().for_each(|arg| args.push(arg, &address));
        let half = |x: u32| u64::from(x);
        let expected = [
            4096,
            half((-2i32).cast_unsigned()),
            half(1.5f32.to_bits()),
            3,
            (-4i64).cast_unsigned(),
            5,
            (-0.25f64).to_bits(),
            1 << 63,
            77,
            4096,
            77,
        ];
        assert_eq!(args.words[..], expected);
        assert_eq!(args.starts[..], [0, 1, 2, 3, 6, 7, 8, 9]);
        let base = args.words.as_ptr().addr();
        let pointers = args.pointers();
        let (last, pointers) = pointers.split_last().unwrap();
        assert!(last.is_null());
        assert_eq!(
            pointers.iter().map(|p| p.addr() - base).collect::<Vec<_>>(),
            [0, 8, 16, 24, 48, 56, 64, 72, 88]
        );
    }
}
