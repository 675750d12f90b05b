//! Known sums, agreement with the reference, and the documented order, bit for bit, for any strides.

use super::*;
use crate::backend::upload;
use crate::cpu_backend::Cpu;
use crate::dtype::DType;
use crate::kernel::Scalar;
use crate::op::finite_difference::{Value, evaluate};
use crate::op::kernel_check::{Case, Kind, values};
use crate::strides::Strides;

const EACH: [&Kernel; 3] = [&SUM, &MAX, &MIN];

fn scalars(num_reduced: usize, c: f64) -> [Scalar; 2] {
    [Scalar::Int(num_reduced as i64), Scalar::Real(c)]
}

/// MAX and MIN take no factor.
fn scalars_of(kernel: &Kernel, num_reduced: usize) -> Vec<Scalar> {
    let both = scalars(num_reduced, 0.25);
    if kernel.name != "sum" { both[..1].to_vec() } else { both.to_vec() }
}

#[test]
fn matches_known_values() {
    let x = Value::real(&[2, 3], &[1.0, 2.0, 3.0, -4.0, 5.5, -6.0]);
    let run = |kernel: &Kernel, out: &[usize], with: &[Scalar]| {
        evaluate(kernel, std::slice::from_ref(&x), &[out], with).remove(0)
    };
    assert_eq!(run(&SUM, &[2], &scalars(1, 1.0)), [6.0, -4.5]);
    assert_eq!(run(&SUM, &[], &scalars(2, 0.5)), [0.75]);
    assert_eq!(run(&SUM, &[2, 3], &scalars(0, 2.0))[3], -8.0);
    assert_eq!(run(&MAX, &[2], &scalars(1, 1.0)[..1]), [3.0, 5.5]);
    assert_eq!(run(&MIN, &[2], &scalars(1, 1.0)[..1]), [1.0, -6.0]);
    assert_eq!(run(&SUM_SQUARES, &[], &[]), [1.0 + 4.0 + 9.0 + 16.0 + 30.25 + 36.0]);
}

#[test]
fn fast_paths_match_the_reference() {
    for kernel in EACH {
        for (shape, num) in [
            (&[7, 300][..], 1),
            (&[3, 4, 5, 6], 2),
            (&[2, 700, 33], 1),
            (&[40_000], 1),
            (&[5, 17], 0),
            (&[600, 40], 1),
            (&[9000, 1], 1),
            (&[3, 50, 1, 1], 2),
        ] {
            let x = values(1, shape.iter().product());
            let kept = &shape[..shape.len() - num];
            let case = Case::new(kernel).input(shape, &x).scalars(&scalars_of(kernel, num)).scale(1.0);
            case.clone().output(kept).strided().run();
            case.output_as(Kind::Accumulator, kept).strided().run();
        }
        Case::new(kernel).input(&[3, 0], &[]).output(&[3]).scalars(&scalars_of(kernel, 1)).run();
        Case::new(kernel).input(&[0, 3], &[]).output(&[0]).scalars(&scalars_of(kernel, 1)).run();
        Case::new(kernel).input(&[], &[3.0]).output(&[]).scalars(&scalars_of(kernel, 0)).run();
    }
    for shape in [&[70, 300][..], &[5], &[0, 4], &[]] {
        let x = values(2, shape.iter().product());
        Case::new(&SUM_SQUARES).input(shape, &x).output_as(Kind::Fixed(DType::F64), &[]).strided().run();
    }
}

/// More operands than one launch on a GPU takes; short ones, empty ones, and long ones that are cut into branches.
fn sizes_of_many() -> Vec<usize> {
    (0..170).map(|i| [1, 0, 300, 17, 256, 4100][i % 6]).chain([16_384, 40_001]).collect()
}

#[test]
fn sum_squares_many_matches_the_reference() {
    let sizes = sizes_of_many();
    for k in [0, 1, 7, sizes.len()] {
        let case = Case::new(&SUM_SQUARES_MANY).output_as(Kind::Fixed(DType::F64), &[k]);
        let case = sizes[sizes.len() - k..].iter().enumerate().fold(case, |case, (i, &n)| {
            let view = Strides::contiguous(&[n]).at([0, 3][i % 2]);
            case.input_view(Kind::Tested, view, &values(i as u64, n + 3))
        });
        case.run();
    }
    // More parts than threads that combine them.
    let n = 300 * 16_384 + 5;
    let case = Case::new(&SUM_SQUARES_MANY).input(&[n], &values(1, n)).input(&[2], &[1.0, 2.0]);
    case.output_as(Kind::Fixed(DType::F64), &[2]).run_for(&[DType::F32]);
}

/// Returns the bits of the sums of squares of runs of a memory by an implementation.
fn squares_by(code: &dyn Fn(&mut Launch<'_>), sizes: &[usize], memory: &[f32]) -> Vec<u64> {
    let cpu = Cpu::backend(2);
    let x = upload(&*cpu, memory).unwrap();
    let views: Vec<Strides> = sizes.iter().map(|&n| Strides::contiguous(&[n])).collect();
    let inputs: Vec<Arg<'_>> = views.iter().map(|view| Arg { buffer: &x, dtype: DType::F32, view }).collect();
    let mut y = upload(&*cpu, &vec![0f64; sizes.len()]).unwrap();
    let out = Strides::contiguous(&[sizes.len()]);
    let mut outputs = [ArgMut { buffer: &mut y, dtype: DType::F64, view: &out }];
    code(&mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] });
    y.as_slice::<f64>().iter().map(|y| y.to_bits()).collect()
}

#[test]
fn sum_squares_many_has_the_bits_of_sum_squares() {
    let mut sizes = sizes_of_many();
    sizes.push(300 * 16_384 + 5);
    let memory: Vec<f32> = values(7, sizes[sizes.len() - 1]).iter().map(|&x| x as f32).collect();
    let cpu = Cpu::backend(2);
    let on_cpu = |kernel: &'static Kernel| {
        let cpu = &cpu;
        move |launch: &mut Launch<'_>| cpu.launch(kernel, launch).unwrap()
    };
    let each: Vec<u64> =
        sizes.iter().flat_map(|n| squares_by(&on_cpu(&SUM_SQUARES), &[*n], &memory)).collect();
    assert_eq!(squares_by(&on_cpu(&SUM_SQUARES_MANY), &sizes, &memory), each);
    #[cfg(feature = "cuda")]
    if crate::gpu::shim::compiler_is_found() {
        let on_gpu = |launch: &mut Launch<'_>| {
            crate::gpu::shim::run(&SUM_SQUARES_MANY, launch, crate::gpu::shim::ORDERS[0]).unwrap();
        };
        assert_eq!(squares_by(&on_gpu, &sizes, &memory), each, "GPU source");
    }
}

#[test]
fn special_values() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    for special in [[inf, 1.0], [-inf, 2.0], [inf, -inf], [nan, 1.0], [2.0, nan]] {
        let mut x = values(6, 2 * 300);
        (x[7], x[290]) = (special[0], special[1]);
        for view in [Strides::contiguous(&[2, 300]), Strides::contiguous(&[300, 2]).permute(&[1, 0])] {
            for kernel in EACH {
                let case = Case::new(kernel).input_view(Kind::Tested, view.clone(), &x).output(&[2]);
                case.scalars(&scalars_of(kernel, 1)).run();
            }
        }
    }
}

#[test]
fn column_reductions_match_the_reference() {
    for [rows, cols] in [[1000, 130], [300, 16], [5, 1000], [0, 40], [257, 129]] {
        let x = values(3, rows * cols);
        let view = Strides::contiguous(&[rows, cols]).permute(&[1, 0]);
        for kernel in EACH {
            let case = Case::new(kernel).input_view(Kind::Tested, view.clone(), &x).scale(1.0);
            case.output(&[cols]).scalars(&scalars_of(kernel, 1)).run();
        }
    }
    let view = Strides::contiguous(&[3, 70, 4, 50]).permute(&[0, 3, 1, 2]);
    let case = Case::new(&SUM).input_view(Kind::Tested, view, &values(4, 42_000)).output(&[3, 50]);
    case.scalars(&scalars(2, 1.0)).scale(1.0).run();
}

/// The documented order, literally.
fn stated(x: &[f32]) -> f32 {
    fn tree(blocks: &[f32]) -> f32 {
        match blocks {
            [] => 0.0,
            [one] => *one,
            _ => {
                let (left, right) = blocks.split_at(blocks.len().next_power_of_two() / 2);
                tree(left) + tree(right)
            }
        }
    }
    let block = |x: &[f32]| {
        let mut lanes: Vec<f32> = (0..16).map(|l| x.iter().skip(l).step_by(16).sum::<f32>() + 0.0).collect();
        while lanes.len() > 1 {
            let half = lanes.split_off(lanes.len() / 2);
            lanes.iter_mut().zip(half).for_each(|(a, b)| *a += b);
        }
        lanes[0]
    };
    tree(&x.chunks(256).map(block).collect::<Vec<_>>())
}

/// The bits of the sums over the last dim.
fn sums(view: Strides, memory: &[f32]) -> Vec<u32> {
    let cpu = Cpu::backend(2);
    let (x, out) = (upload(&*cpu, memory).unwrap(), Strides::contiguous(&view.shape[..1]));
    let mut y = upload(&*cpu, &vec![0f32; view.shape[0]]).unwrap();
    let inputs = [Arg { buffer: &x, dtype: DType::F32, view: &view }];
    let mut outputs = [ArgMut { buffer: &mut y, dtype: DType::F32, view: &out }];
    let scalars = scalars(1, 1.0);
    cpu.launch(&SUM, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &scalars }).unwrap();
    y.as_slice::<f32>().iter().map(|y| y.to_bits()).collect()
}

#[test]
fn bits_follow_the_stated_order_for_all_strides() {
    for [rows, cols] in [[20, 3000], [17, 256], [3, 100], [1, 70_000], [33, 16_384], [9000, 1]] {
        let mut x: Vec<f32> = values(5, rows * cols).iter().map(|&x| x as f32).collect();
        x[0] = -0.0;
        let mut transposed = vec![0f32; x.len()];
        (0..x.len()).for_each(|i| transposed[i % cols * rows + i / cols] = x[i]);
        let right: Vec<u32> = x.chunks(cols).map(|row| stated(row).to_bits()).collect();
        assert_eq!(sums(Strides::contiguous(&[rows, cols]), &x), right, "rows {rows} {cols}");
        assert_eq!(
            sums(Strides::contiguous(&[cols, rows]).permute(&[1, 0]), &transposed),
            right,
            "columns {rows} {cols}"
        );
    }
    let x: Vec<f32> = values(5, 3000).iter().map(|&x| x as f32).collect();
    assert_ne!(stated(&x), x.iter().sum::<f32>(), "the numbers distinguish the orders");
}
