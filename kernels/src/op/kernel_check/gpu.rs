//! Conformance test of GPU sources: through the shim on the host, and on a GPU if one was requested.

use super::{Case, Operand};
#[cfg(feature = "cuda")]
use crate::cuda::fake::device;
use crate::dtype::DType;
#[cfg(feature = "cuda")]
use crate::gpu::shim;
#[cfg(feature = "cuda")]
use crate::kernel::Launch;
#[cfg(feature = "cuda")]
use std::cell::Cell;

/// Whether GPU sources are tested in a dtype, which needs g++: in f32 and bf16, which have their own forms of products and conversions. Those
/// of f64 and f16 are the same with another type: they run on a GPU, on a fake one, and with `SHARDGRAD_CARDS=all`.
#[cfg(feature = "cuda")]
fn is_tested_in(dtype: DType) -> bool {
    let is_rare = [DType::F64, DType::F16].contains(&dtype);
    shim::compiler_is_found() && (!is_rare || shim::is_full() || device::is_requested())
}

impl Case<'_> {
    /// Returns the bytes of all elements of the inputs and of the outputs.
    #[cfg(feature = "cuda")]
    pub(crate) fn operand_bytes(&self, dtype: DType) -> [usize; 2] {
        [&self.inputs, &self.outputs]
            .map(|operands| operands.iter().map(|o| o.view.numel() * o.kind.dtype(dtype).size()).sum())
    }

    /// Returns the memory traffic of each grid of the launch, by its entry.
    #[cfg(feature = "cuda")]
    pub(crate) fn memory_traffic(&self, dtype: DType) -> Vec<(&'static str, shim::Traffic)> {
        let rounded = |operands: &[Operand]| operands.iter().map(|o| o.rounded(dtype)).collect::<Vec<_>>();
        let (inputs, outputs, found) = (rounded(&self.inputs), rounded(&self.outputs), Cell::new(Vec::new()));
        let code = |launch: &mut Launch<'_>| {
            found.set(shim::memory_traffic(self.kernel, launch)?);
            Ok(())
        };
        self.launch_by(&code, dtype, &inputs, &outputs)
            .unwrap_or_else(|e| panic!("{} {dtype}: {e}", self.kernel.name));
        found.take()
    }

    /// Checks that the GPU source agrees, with equal bits in every order of threads.
    #[cfg(feature = "cuda")]
    pub(super) fn verify_on_gpu(
        &self,
        tested: DType,
        inputs: &[Operand],
        outputs: &[Operand],
        exact: &[Vec<f64>],
    ) -> Result<(), String> {
        if self.kernel.gpu.is_none() || !is_tested_in(tested) {
            return Ok(());
        }
        let mut first = None;
        let mut allowed = 0.0;
        for order in shim::ORDERS {
            let allowance = Cell::new(0.0);
            let code = |launch: &mut Launch<'_>| {
                allowance.set(shim::run(self.kernel, launch, order)?);
                Ok(())
            };
            let got =
                self.launch_by(&code, tested, inputs, outputs).map_err(|e| format!("GPU source: {e}"))?;
            allowed = allowance.get();
            self.compare("GPU source", tested, &got, exact, allowed)?;
            let bits: Vec<Vec<u64>> = got.iter().map(|o| o.iter().map(|x| x.to_bits()).collect()).collect();
            if *first.get_or_insert_with(|| bits.clone()) != bits {
                return Err("GPU source: other bits in another order of threads".to_string());
            }
        }
        self.verify_with_small_shared_memory(tested, inputs, outputs, exact)?;
        self.verify_on_cuda(tested, inputs, outputs, exact, allowed)
    }

    /// Checks the plan for GPUs with little shared memory.
    #[cfg(feature = "cuda")]
    fn verify_with_small_shared_memory(
        &self,
        tested: DType,
        inputs: &[Operand],
        outputs: &[Operand],
        exact: &[Vec<f64>],
    ) -> Result<(), String> {
        let allowance = Cell::new(None);
        let code = |launch: &mut Launch<'_>| {
            if let Some(done) = shim::run_with_small_shared_memory(self.kernel, launch, shim::ORDERS[0]) {
                allowance.set(Some(done?));
            }
            Ok(())
        };
        let got = self
            .launch_by(&code, tested, inputs, outputs)
            .map_err(|e| format!("GPU with small shared memory: {e}"))?;
        match allowance.get() {
            Some(allowed) => {
                self.compare("GPU source with small shared memory", tested, &got, exact, allowed)
            }
            None => Ok(()),
        }
    }

    /// Checks the kernel on a GPU, if one was requested.
    #[cfg(feature = "cuda")]
    fn verify_on_cuda(
        &self,
        tested: DType,
        inputs: &[Operand],
        outputs: &[Operand],
        exact: &[Vec<f64>],
        allowance: f64,
    ) -> Result<(), String> {
        let ran = Cell::new(false);
        let code = |launch: &mut Launch<'_>| {
            let Some(done) = device::run(self.kernel, launch) else { return Ok(()) };
            ran.set(true);
            done.map_err(|e| e.to_string())
        };
        let got = self.launch_by(&code, tested, inputs, outputs).map_err(|e| format!("GPU device: {e}"))?;
        if ran.get() { self.compare("GPU device", tested, &got, exact, allowance) } else { Ok(()) }
    }

    /// Checks that the GPU source rejects what the reference rejects, with the same message.
    #[cfg(feature = "cuda")]
    pub(super) fn refused_on_gpu(
        &self,
        tested: DType,
        inputs: &[Operand],
        outputs: &[Operand],
        refusal: &str,
    ) -> Result<(), String> {
        if self.kernel.gpu.is_none() || !is_tested_in(tested) {
            return Ok(());
        }
        for order in shim::ORDERS {
            let code = |launch: &mut Launch<'_>| shim::run(self.kernel, launch, order).map(|_| ());
            match self.launch_by(&code, tested, inputs, outputs) {
                Err(same) if same == refusal => {}
                other => return Err(format!("GPU source: {other:?} instead of {refusal}")),
            }
        }
        let code = |launch: &mut Launch<'_>| match device::run(self.kernel, launch) {
            Some(done) => done.map_err(|e| e.to_string()),
            None => Err(refusal.to_string()),
        };
        match self.launch_by(&code, tested, inputs, outputs) {
            Err(same) if same == refusal => {}
            other => return Err(format!("GPU device: {other:?} instead of {refusal}")),
        }
        Ok(())
    }

    #[cfg(not(feature = "cuda"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "there is no GPU source to run")]
    pub(super) fn verify_on_gpu(
        &self,
        _: DType,
        _: &[Operand],
        _: &[Operand],
        _: &[Vec<f64>],
    ) -> Result<(), String> {
        Ok(())
    }

    #[cfg(not(feature = "cuda"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "there is no GPU source to run")]
    pub(super) fn refused_on_gpu(
        &self,
        _: DType,
        _: &[Operand],
        _: &[Operand],
        _: &str,
    ) -> Result<(), String> {
        Ok(())
    }
}
