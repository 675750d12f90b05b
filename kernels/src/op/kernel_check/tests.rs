//! Planted bugs, which the conformance test must find.

use super::*;
use crate::error::KernelError;
use crate::kernel::Bound;

/// y = 2x, with a bug selected by a scalar.
fn double(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let (x, fault) = (launch.inputs[0], launch.scalars[0].int());
    write(x, &mut launch.outputs[0], fault, pool);
    Ok(())
}

fn correct_double(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    write(launch.inputs[0], &mut launch.outputs[0], 0, pool);
    Ok(())
}

fn write(x: Arg<'_>, y: &mut ArgMut<'_>, fault: i64, pool: &Pool) {
    let (from, to) = (places(x.view), places(y.view));
    crate::match_float!(x.dtype, T => {
        let source = x.buffer.as_slice::<T>();
        let target = y.buffer.as_mut::<T>().unwrap();
        for (i, (&f, &t)) in from.iter().zip(&to).enumerate() {
            let factor = match fault {
                1 if i == 5 => 2.001,
                2 if pool.num_threads() == 3 && i == 4 => 2.0 + 3e-8,
                _ => 2.0,
            };
            target[if fault == 3 && i == 3 { t + 1 } else { t }] = T::from_f64(source[f].to_f64() * factor);
        }
    }, else unreachable!());
}

const fn kernel(ulps: f64) -> Kernel {
    Kernel {
        name: "double",
        reference: correct_double,
        cpu: Some(double),
        gpu: None,
        flops: |_| 0,
        bytes: None,
        bound: Bound { ulps },
    }
}

fn verdict(fault: i64) -> Result<(), String> {
    let view = Strides::new([2, 4][..].into(), [8, 2][..].into(), 0);
    Case::new(&kernel(2.0))
        .input(&[2, 4], &values(3, 8))
        .output_view(Kind::Tested, view, &[STALE; 16])
        .scalars(&[Scalar::Int(fault)])
        .strided()
        .verify(&DType::FLOATS)
}

#[test]
fn correct_kernel_passes_and_planted_bugs_are_found() {
    verdict(0).unwrap();
    let wrong = verdict(1).unwrap_err();
    assert!(wrong.contains("double f64: fast path, output 0, element 10"), "{wrong}");
    assert!(verdict(3).unwrap_err().contains("element"), "a value in the wrong place");
}

#[test]
fn bits_that_depend_on_the_number_of_threads_are_found() {
    let loose = kernel(1e9);
    let case = Case::new(&loose).input(&[8], &values(3, 8)).output(&[8]).scalars(&[Scalar::Int(2)]);
    assert!(case.verify(&[DType::F64]).unwrap_err().contains("3 threads give other bits than one"));
}

#[test]
fn units_and_offsets_match_known_values() {
    assert_eq!(unit(DType::F32, 1.0), f64::from(f32::EPSILON));
    assert_eq!(unit(DType::BF16, 3.0), 2f64.powi(-6));
    assert_eq!(unit(DType::F16, 0.0), 2f64.powi(-24));
    assert_eq!(places(&Strides::contiguous(&[2, 3]).permute(&[1, 0])), [0, 3, 1, 4, 2, 5]);
}
