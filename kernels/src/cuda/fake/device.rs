//! Kernels' own cases on a card: with `SHARDGRAD_KERNELS_ON=cuda` every case of every kernel with a plan runs on the first card
//! of the machine too, with `SHARDGRAD_KERNELS_ON=fake` on the fake one.

use crate::backend::Backend;
use crate::buffer::Buffer;
use crate::cuda::{CudaDevice, SearchPaths};
use crate::error::KernelError;
use crate::kernel::{Arg, ArgMut, Kernel, Launch};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A card of which one test has the turn, since faults are reported to whoever looks next.
struct Turns(Mutex<Arc<dyn Backend>>);

/// The card that was asked for.
fn card() -> Option<&'static Turns> {
    static CARD: OnceLock<Option<Turns>> = OnceLock::new();
    let open = || {
        let places = match &*std::env::var("SHARDGRAD_KERNELS_ON").unwrap_or_default() {
            "" => return None,
            "cuda" => SearchPaths::from_env(),
            "fake" => {
                // The folder stays for the run of the tests.
                let folder = Box::leak(Box::new(super::card("")?));
                folder.places()
            }
            other => panic!("SHARDGRAD_KERNELS_ON={other}; it may be cuda or fake"),
        };
        let machine = CudaDevice::open(&places, 0).unwrap_or_else(|e| panic!("{e}"));
        Some(Turns(Mutex::new(
            crate::provider::BackendProvider::backend(&*machine, crate::provider::BackendConfig::default())
                .unwrap_or_else(|e| panic!("{e}")),
        )))
    };
    CARD.get_or_init(open).as_ref()
}

/// Runs a launch on copies of its operands on the card, if one was asked for.
pub(crate) fn run(kernel: &Kernel, launch: &mut Launch<'_>) -> Option<Result<(), KernelError>> {
    let card = card()?.0.lock().unwrap_or_else(PoisonError::into_inner);
    Some(copied(&**card, kernel, launch))
}

fn copied(card: &dyn Backend, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let up = |x: &Buffer| -> Result<Buffer, KernelError> {
        let mut copy = card.alloc(x.bytes())?;
        card.upload(x.as_slice::<u8>(), &mut copy)?;
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
    card.launch(kernel, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: launch.scalars })?;
    for (y, buffer) in launch.outputs.iter_mut().zip(&written) {
        card.download(buffer, y.buffer.as_mut::<u8>().expect("an output buffer has one handle"))?;
    }
    if written.is_empty() { card.synchronize() } else { Ok(()) }
}
