//! y = v everywhere.

use super::runs::Walk;
use crate::cpu::Pool;
use crate::dtype::Element;
use crate::error::KernelError;
use crate::kernel::{Bound, Kernel, Launch};
use crate::match_dtype;

/// y = v. Out: y (any shape, dtype and strides without overlap). Scalars: Real v, rounded to the dtype.
pub static FILL: Kernel = Kernel { name: "fill", reference: fill, cpu: None, flops: |_| 0, bound: Bound { ulps: 0.0 } };

fn fill(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let (y, value) = (&mut launch.outputs[0], launch.scalars[0].real());
    if y.view.numel() == 0 {
        return Ok(());
    }
    let walk = Walk::new([y.view]);
    match_dtype!(y.dtype, T => {
        let to = y.buffer.as_mut::<T>().expect("an output has one handle");
        let value = T::from_f64(value);
        walk.runs(0..walk.num_runs(), |[at]| match walk.steps {
            [1] => to[at..at + walk.run].fill(value),
            [step] => (0..walk.run).for_each(|i| to[at + i * step] = value),
        });
    });
    Ok(())
}
