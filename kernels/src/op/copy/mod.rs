//! y = x, with conversion of the dtype.

use super::runs::Walk;
use crate::cpu::{Pool, vectorized};
use crate::dtype::Element;
use crate::error::KernelError;
use crate::kernel::{ArgMut, Bound, Kernel, Launch};
use crate::match_dtype;
use half::f16;

/// y = x. In: x (any shape, strides and dtype). Out: y (the same shape, any strides without overlap, any dtype).
/// Floats are rounded to nearest even, to integers towards zero. Exact where the dtype of y holds every value of x.
pub static COPY: Kernel = Kernel { name: "copy", reference: copy, cpu: None, flops: |_| 0, bound: Bound { ulps: 0.0 } };

fn copy(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let (x, y) = (&launch.inputs[0], &mut launch.outputs[0]);
    let walk = Walk::new([x.view, y.view]);
    if x.view.numel() == 0 {
        return Ok(());
    }
    if x.dtype == y.dtype {
        // Bits are moved, not values: one body per size.
        match x.dtype.size() {
            1 => move_bits(x.buffer.as_slice::<u8>(), y, &walk),
            2 => move_bits(x.buffer.as_slice::<f16>(), y, &walk),
            4 => move_bits(x.buffer.as_slice::<f32>(), y, &walk),
            _ => move_bits(x.buffer.as_slice::<i64>(), y, &walk),
        }
        return Ok(());
    }
    match_dtype!(x.dtype, S => {
        let from = x.buffer.as_slice::<S>();
        match_dtype!(y.dtype, D => convert(from, y.buffer.as_mut::<D>().expect("an output has one handle"), &walk))
    });
    Ok(())
}

fn move_bits<T: Element>(from: &[T], y: &mut ArgMut<'_>, walk: &Walk<2>) {
    let to = y.buffer.as_mut::<T>().expect("an output has one handle");
    walk.runs(0..walk.num_runs(), |[a, b]| match walk.steps {
        [1, 1] => to[b..b + walk.run].copy_from_slice(&from[a..a + walk.run]),
        [sa, sb] => (0..walk.run).for_each(|i| to[b + i * sb] = from[a + i * sa]),
    });
}

fn convert<S: Element, D: Element>(from: &[S], to: &mut [D], walk: &Walk<2>) {
    vectorized(|| {
        walk.runs(0..walk.num_runs(), |[a, b]| match walk.steps {
            [1, 1] => {
                let (from, to) = (&from[a..a + walk.run], &mut to[b..b + walk.run]);
                to.iter_mut().zip(from).for_each(|(t, f)| *t = D::from_f64(f.to_f64()));
            }
            [sa, sb] => (0..walk.run).for_each(|i| to[b + i * sb] = D::from_f64(from[a + i * sa].to_f64())),
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::backend::{Backend, Cpu, upload};
    use crate::kernel::Arg;
    use crate::strides::Strides;

    #[test]
    fn a_transposed_copy_converts() {
        let cpu: std::sync::Arc<dyn Backend> = Cpu::new(1);
        let x = upload(&*cpu, &[1.0f32, 2.5, -3.0, 4.0, 5.0, 6.0]).unwrap();
        let mut y = cpu.alloc(48).unwrap();
        let (view, to) = (Strides::contiguous(&[2, 3]).permute(&[1, 0]), Strides::contiguous(&[3, 2]));
        let inputs = [Arg { buffer: &x, dtype: DType::F32, view: &view }];
        let mut outputs = [ArgMut { buffer: &mut y, dtype: DType::I64, view: &to }];
        cpu.launch(&COPY, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] }).unwrap();
        assert_eq!(y.as_slice::<i64>(), [1, 4, 2, 5, -3, 6]);
    }
}
