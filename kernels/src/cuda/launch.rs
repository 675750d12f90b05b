//! Compiled programs in the context of a card, and launches of their entries with arguments packed as a plan says.

use super::compile::{Compiler, Program};
use super::driver::{Context, Stream};
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg};
use crate::kernel::Launch;
use crate::strides::Strides;
use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

/// Shared memory that every entry may have without asking for it.
const SHARED_FREE: u32 = 48 << 10;

/// A compiled program in the context.
#[derive(Debug)]
struct Module {
    context: Arc<Context>,
    handle: usize,
}

impl Module {
    fn new(context: &Arc<Context>, cubin: &[u8]) -> Result<Module, KernelError> {
        let mut handle = ptr::null_mut();
        // SAFETY: the compiler made the file, which states its own length, and it outlives the call, which copies it.
        unsafe { context.bound()?.cuModuleLoadData(&mut handle, cubin.as_ptr().cast()) }?;
        Ok(Module { context: context.clone(), handle: handle.expose_provenance() })
    }

    /// An entry, by its name.
    fn function(&self, name: &str) -> Result<usize, KernelError> {
        let name = CString::new(name).expect("the name of an entry has no zero byte");
        let (mut handle, module) = (ptr::null_mut(), ptr::with_exposed_provenance_mut(self.handle));
        // SAFETY: the module is alive, the name ends in a zero byte, the place outlives the call.
        unsafe { self.context.bound()?.cuModuleGetFunction(&mut handle, module, name.as_ptr()) }?;
        Ok(handle.expose_provenance())
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let module: CUmodule = ptr::with_exposed_provenance_mut(self.handle);
        if let Ok(table) = self.context.bound() {
            // SAFETY: loaded once, unloaded once, after the work that may run it.
            let _ = unsafe { table.cuCtxSynchronize().and_then(|()| table.cuModuleUnload(module)) };
        }
    }
}

/// An entry of a program, ready to be launched.
#[derive(Clone, Copy, Debug)]
struct Entry {
    name: &'static str,
    function: usize,
    /// The shared memory that it may take of a block.
    shared_bytes: u32,
}

/// One program of a source: macros, module, and the entries that were launched.
#[derive(Debug)]
struct Loaded {
    defines: Vec<(&'static str, Cow<'static, str>)>,
    module: Module,
    entries: Vec<Entry>,
}

/// The programs of a card, compiled and loaded at first use. All ranks on the card share them.
#[derive(Debug)]
pub(super) struct Programs {
    compiler: Compiler,
    architecture: String,
    /// By the address of the source, which is static.
    loaded: Mutex<HashMap<usize, Vec<Loaded>>>,
}

impl Programs {
    pub(super) fn new(compiler: Compiler, architecture: String) -> Programs {
        Programs { compiler, architecture, loaded: Mutex::default() }
    }

    /// The entry of a grid. Whoever asks for one that is not there compiles it, and the others wait for that.
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
                programs.push(Loaded { defines: grid.defines.clone(), module, entries: Vec::new() });
                programs.len() - 1
            }
        };
        let program = &mut programs[at];
        let at = match program.entries.iter().position(|e| e.name == grid.entry) {
            Some(at) => at,
            None => {
                let function = program.module.function(grid.entry)?;
                program.entries.push(Entry { name: grid.entry, function, shared_bytes: SHARED_FREE });
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

    /// Gives a grid to a stream: one that the kernel's own plan describes for these operands.
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
        // SAFETY: the entry's module is alive, since programs are never taken out; the values outlive the call, which
        // copies them. The addresses lead to memory of the operands, which goes back to an allocator of this very stream,
        // or is kept until that is behind this work, so that nothing else gets it before this is done. What an entry does with it is as its plan was tested.
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

/// What addresses of a launch lead to.
#[derive(Debug)]
pub(super) struct Operands<'a, 'b> {
    pub(super) launch: &'a Launch<'b>,
    pub(super) scratch: &'a [Buffer],
    /// Where faults of this kernel are noted.
    pub(super) fault: u64,
    /// Where those of all kernels are.
    pub(super) faults: u64,
}

impl Operands<'_, '_> {
    fn address(&self, arg: &GridArg) -> u64 {
        match *arg {
            GridArg::Input(i) => {
                let x = &self.launch.inputs[i];
                place(x.buffer, x.view, x.dtype)
            }
            GridArg::Output(i) => {
                let y = &self.launch.outputs[i];
                place(y.buffer, y.view, y.dtype)
            }
            GridArg::Scratch(i) => self.scratch[i].device_address().expect("scratch memory is of the card"),
            GridArg::Fault => self.fault,
            GridArg::Faults => self.faults,
            _ => unreachable!("only operands have addresses"),
        }
    }
}

/// Where the first element of a view lies.
pub(super) fn place(buffer: &Buffer, view: &Strides, dtype: DType) -> u64 {
    let address = buffer.device_address().expect("bug: an operand on another device");
    assert!(view.reach() * dtype.size() <= buffer.bytes(), "bug: a view reaches outside of its buffer");
    address + (view.offset * dtype.size()) as u64
}

/// The values of a launch, each beginning at a word; nothing is taken from the heap for what launches usually have.
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
            // The low half of a word comes first in memory.
            GridArg::I32(x) => self.words.push(u64::from(x.cast_unsigned())),
            GridArg::F32(x) => self.words.push(u64::from(x.to_bits())),
            GridArg::I64(x) => self.words.push(x.cast_unsigned()),
            GridArg::F64(x) => self.words.push(x.to_bits()),
            GridArg::I64s(numbers) => self.words.extend(numbers.iter().map(|x| x.cast_unsigned())),
            GridArg::Addresses(operands) => self.words.extend(operands.iter().map(address)),
        }
    }

    fn pointers(&mut self) -> SmallVec<[*mut c_void; 32]> {
        let words = self.words.as_mut_ptr();
        self.starts.iter().map(|&at| words.wrapping_add(at).cast()).collect()
    }
}

#[cfg(target_endian = "big")]
compile_error!("arguments of launches are packed little endian");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_lie_as_an_entry_reads_them() {
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
        assert_eq!(
            args.pointers().iter().map(|p| p.addr() - base).collect::<Vec<_>>(),
            [0, 8, 16, 24, 48, 56, 64, 72]
        );
    }
}
