//! Fill: one value for all elements.

mod gpu;

use crate::cpu::Pool;
use crate::dtype::Element;
use crate::error::KernelError;
use crate::kernel::{Bound, GpuCode, Kernel, Launch};
use crate::match_dtype;
use crate::op::pointwise::scatter;
use crate::op::rows::operands;
use crate::op::strided_iter::{StridedIter, element_offset};

/// y = v.
///
/// - out: y: any dtype, any strides without overlap
/// - scalars: \[Real v\], rounded to y's dtype (integers towards zero)
pub static FILL: Kernel = Kernel {
    name: "fill",
    reference: plain,
    cpu: Some(fast),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::plan }),
    flops: |_| 0,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

fn plain(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([], [y], scalars) = operands(launch);
    match_dtype!(y.dtype, T => {
        let memory = y.buffer.as_mut::<T>().expect("an output buffer has one handle");
        (0..y.view.numel()).for_each(|i| memory[element_offset(y.view, i)] = T::from_f64(scalars[0].real()));
    });
    Ok(())
}

fn fast(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([], [y], scalars) = operands(launch);
    match_dtype!(y.dtype, T => {
        let value = T::from_f64(scalars[0].real());
        let iter = StridedIter::in_memory_order([y.view]);
        scatter::<1, T>(pool, &iter, y, 1, |iter, memory, start| {
            let [step] = iter.steps();
            iter.for_each_run(0..iter.numel(), |[at], length| match step {
                1 => memory[at - start..][..length].fill(value),
                _ => memory[at - start..].iter_mut().step_by(step).take(length).for_each(|y| *y = value),
            });
        });
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::Scalar;
    use crate::op::kernel_check::{Case, Kind};
    use crate::strides::Strides;

    #[test]
    fn every_dtype_and_any_strides() {
        let whole = Strides::contiguous(&[6, 50, 20]);
        let views = [
            whole.clone(),
            whole.narrow(1, 7, 40),
            whole.permute(&[2, 0, 1]),
            whole.select(2, 3),
            whole.narrow(0, 2, 2),
        ];
        for view in views {
            let case = Case::new(&FILL).output_view(Kind::Tested, view, &[5.0; 6000]);
            case.clone().scalars(&[Scalar::Real(1.3)]).run_for(&[
                DType::F64,
                DType::F32,
                DType::BF16,
                DType::F16,
            ]);
            case.scalars(&[Scalar::Int(1)]).run_for(&[DType::I64, DType::U8, DType::Bool]);
        }
        Case::new(&FILL).output(&[70_000]).scalars(&[Scalar::Real(-2.0)]).run();
        Case::new(&FILL).output(&[]).scalars(&[Scalar::Real(-2.0)]).run();
    }
}
