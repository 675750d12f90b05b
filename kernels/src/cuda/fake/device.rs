//! Runs the test cases of kernels on a GPU too: on the first GPU of the machine with `SHARDGRAD_KERNELS_ON=cuda`, on the fake GPU with
//! `SHARDGRAD_KERNELS_ON=fake`.

use crate::backend::Backend;
use crate::buffer::Buffer;
use crate::cuda::{CudaDevice, SearchPaths};
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Kernel, Launch};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A GPU for one test at a time, because the next download reports the faults of all.
struct ExclusiveGpu(Mutex<Arc<dyn Backend>>);

/// Returns the requested GPU.
fn gpu() -> Option<&'static ExclusiveGpu> {
    static CARD: OnceLock<Option<ExclusiveGpu>> = OnceLock::new();
    let open = || {
        let paths = match &*std::env::var("SHARDGRAD_KERNELS_ON").unwrap_or_default() {
            "" => return None,
            "cuda" => SearchPaths::from_env(),
            "fake" => {
                // The folder is deleted by no one: it lives as long as the test process.
                let folder = Box::leak(Box::new(super::gpu("")?));
                folder.search_paths()
            }
            other => panic!("SHARDGRAD_KERNELS_ON={other}: must be cuda or fake"),
        };
        let provider = CudaDevice::open(&paths, 0).unwrap_or_else(|e| panic!("{e}"));
        Some(ExclusiveGpu(Mutex::new(
            crate::provider::BackendProvider::backend(&*provider, crate::provider::BackendConfig::default())
                .unwrap_or_else(|e| panic!("{e}")),
        )))
    };
    CARD.get_or_init(open).as_ref()
}

/// Whether a GPU is requested.
pub(crate) fn is_requested() -> bool {
    gpu().is_some()
}

/// Runs a launch on copies of its operands on the requested GPU; `None` without a request.
pub(crate) fn run(kernel: &Kernel, launch: &mut Launch<'_>) -> Option<Result<(), KernelError>> {
    let gpu = gpu()?.0.lock().unwrap_or_else(PoisonError::into_inner);
    Some(run_on_copies(&**gpu, kernel, launch))
}

fn run_on_copies(gpu: &dyn Backend, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let up = |x: &Buffer| -> Result<Buffer, KernelError> {
        let mut copy = gpu.alloc(x.bytes())?;
        gpu.upload(x.as_slice::<u8>(), &mut copy)?;
        Ok(copy)
    };
    let read = launch.inputs.iter().map(|x| up(x.buffer)).collect::<Result<Vec<Buffer>, KernelError>>()?;
    let mut written =
        launch.outputs.iter().map(|y| up(y.buffer)).collect::<Result<Vec<Buffer>, KernelError>>()?;
    let inputs: Vec<Arg<'_>> =
        launch.inputs.iter().zip(&read).map(|(x, buffer)| Arg { buffer, ..*x }).collect();
    let mut outputs: Vec<ArgMut<'_>> = (launch.outputs.iter().zip(&mut written))
        .map(|(y, buffer)| ArgMut { buffer, dtype: y.dtype, view: y.view })
        .collect();
    gpu.launch(kernel, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: launch.scalars })?;
    for (y, buffer) in launch.outputs.iter_mut().zip(&written) {
        gpu.download(buffer, y.buffer.as_mut::<u8>().expect("an output buffer has one handle"))?;
    }
    if written.is_empty() { gpu.synchronize() } else { Ok(()) }
}
