//! The back end on a fake card: what is missing or refused, memory, launches, products, marks, faults.

use super::fake::{self, Folder};
use super::{CudaDevice, SearchPaths};
use crate::backend::{Backend, download, upload};
use crate::buffer::Buffer;
use crate::cpu::Pool;
use crate::cpu_backend::Cpu;
use crate::device::Device;
use crate::dtype::{DType, Element};
use crate::error::KernelError;
use crate::gpu::{Epilogue, Grid, GridArg, LaunchPlan, Matmul};
use crate::kernel::{Arg, ArgMut, Bound, GpuCode, Kernel, Launch, Scalar};
use crate::match_float;
use crate::op::batched_matmul::BATCHED_MATMUL;
use crate::precision::MatmulPrecision;
use crate::provider::{BackendConfig, BackendProvider};
use crate::strides::Strides;
use std::fs;
use std::sync::Arc;

fn nothing(_: &Pool, _: &mut Launch<'_>) -> Result<(), KernelError> {
    unreachable!("only the card runs it")
}

const fn kernel(name: &'static str, gpu: GpuCode) -> Kernel {
    Kernel {
        name,
        reference: nothing,
        cpu: None,
        gpu: Some(gpu),
        flops: |_| 7,
        bytes: None,
        bound: Bound { ulps: 0.0 },
    }
}

/// y[i] = T(factor * x[i * stride[1]] + more + rate + shift), by way of scratch memory; a fault where x[i] is negative.
static TWICE: Kernel = kernel(
    "twice",
    GpuCode {
        source: "struct Three { i64 at[3]; };\n\
            extern \"C\" __global__ void first(const T *x, float *to, Three strides, int n, double factor) {\n\
                int i = blockIdx.x * blockDim.x + threadIdx.x;\n\
                if (i < n) to[i] = float(factor * widen(x[i * strides.at[1]]));\n\
            }\n\
            extern \"C\" __global__ void second(const float *from, T *y, i64 n, float more, i64 shift, Fault *fault) {\n\
                i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x;\n\
                if (i >= n || !index_fits(fault, i64(from[i]), i, 1000)) return;\n\
                y[i] = narrow<T>(from[i] + more + float(shift));\n\
            }\n",
        plan: |launch, plan| {
            let (x, y) = (&launch.inputs[0], &launch.outputs[0]);
            let n = y.view.numel();
            let middle = plan.scratch(4 * n);
            let defines = vec![("T", crate::gpu::type_name(x.dtype).into())];
            let blocks = [n.div_ceil(64) as u32, 1, 1];
            let args = vec![
                GridArg::Input(0),
                middle.clone(),
                GridArg::I64s(vec![-1, x.view.strides[0] as i64, -1]),
                GridArg::I32(n as i32),
                GridArg::F64(launch.scalars[0].real()),
            ];
            let first = Grid {
                entry: "first",
                defines: defines.clone(),
                blocks,
                threads: 64,
                shared_bytes: 100 << 10,
                args,
            };
            plan.grid(first);
            let args = vec![
                middle,
                GridArg::Output(0),
                GridArg::I64(n as i64),
                GridArg::F32(0.5),
                GridArg::I64(-3),
                GridArg::Fault,
            ];
            plan.grid(Grid { entry: "second", defines, blocks, threads: 64, shared_bytes: 0, args });
            Ok(())
        },
    },
);

static PRODUCTS: Kernel = kernel(
    "batched_matmul",
    GpuCode {
        source: "",
        plan: |_, plan: &mut LaunchPlan| {
            plan.product(Matmul { a: 0, b: 1, c: 0, epilogue: Epilogue::Plain });
            Ok(())
        },
    },
);

pub(super) fn backend(folder: &Folder) -> Arc<dyn Backend> {
    CudaDevice::open(&folder.places(), 0).unwrap().backend(BackendConfig::default()).unwrap()
}

pub(super) fn twice(
    on: &dyn Backend,
    x: &Buffer,
    y: &mut Buffer,
    n: usize,
    factor: f64,
) -> Result<(), KernelError> {
    let (from, to) = (Strides::contiguous(&[n]), Strides::contiguous(&[n]));
    let inputs = [Arg { buffer: x, dtype: DType::F32, view: &from }];
    let mut outputs = [ArgMut { buffer: y, dtype: DType::F32, view: &to }];
    on.launch(
        &TWICE,
        &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[Scalar::Real(factor)] },
    )
}

#[test]
fn what_is_missing_or_too_old_is_an_error_that_says_what_to_install() {
    let refused = |words: &str, text: &str| {
        let Some(folder) = fake::card(words) else { return };
        let error = CudaDevice::open(&folder.places(), 0).unwrap_err();
        let KernelError::Library { why, help, .. } = &error else { panic!("{words}: {error}") };
        assert!(why.contains(text) && help.contains("install"), "{words}: {error}");
    };
    refused("driver=12080", "is for CUDA 12.8, and 13.0 or newer is needed");
    refused("nvrtc=12", "is for CUDA 12.0, and 13.0 or newer is needed");
    refused("blas=120900", "is for CUDA 12.9, and 13.0 or newer is needed");
    refused("no-card", "does not start: cuInit: CUDA_ERROR_NO_DEVICE (100)");
    refused("no-start", "does not start: cuInit: CUDA_ERROR_UNKNOWN (999)");
    refused("old-card", "has compute capability 7.0; 8.0 is needed");
    let Some(folder) = fake::card("") else { return };
    let error = CudaDevice::open(&folder.places(), 1).unwrap_err();
    assert!(error.to_string().contains("there is no card 1; there are 1"), "{error}");
    assert_eq!(CudaDevice::open(&folder.places(), 0).unwrap().device(), Device::Cuda(0));
}

#[test]
fn a_file_that_is_no_library_is_an_error() {
    if fake::is_skipped() {
        return;
    }
    let folder = Folder::new();
    let text = |places: &SearchPaths| CudaDevice::open(places, 0).unwrap_err().to_string();
    assert!(text(&folder.places()).contains("where no libcuda.so is"));
    fs::write(folder.0.join("libcuda.so.1"), "no library").unwrap();
    assert!(text(&folder.places()).contains("SHARDGRAD_CUDA_PATH"), "{}", text(&folder.places()));
    fs::remove_file(folder.0.join("libcuda.so.1")).unwrap();
    fake::library("int nothing;", &folder.0.join("libcuda.so.1"));
    assert!(
        text(&folder.places()).contains("has no function cuDriverGetVersion"),
        "{}",
        text(&folder.places())
    );
    let other = Folder::new();
    let half = "extern \"C\" __attribute__((visibility(\"default\"))) int cuDriverGetVersion(int *v) { *v = 13000; return 0; }";
    fake::library(half, &other.0.join("libcuda.so.1"));
    assert!(text(&other.places()).contains("has no function cuInit"), "{}", text(&other.places()));
}

#[test]
fn contents_of_all_sizes_go_in_and_out() {
    let Some(folder) = fake::card("") else { return };
    let card = backend(&folder);
    for bytes in [0usize, 1, 3, 4096, (9 << 20) + 5] {
        let data: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 300) as u8).collect();
        let buffer = upload(&*card, &data).unwrap();
        assert!(buffer.device_address().is_some_and(|a| a % 256 == 0));
        assert!(download::<u8>(&*card, &buffer, bytes).unwrap() == data, "{bytes}");
    }
    card.synchronize().unwrap();
    assert_eq!(card.memory().num_system_allocs, 2, "a chunk of each kind");
}

#[test]
fn a_plan_is_run_with_its_arguments() {
    let Some(folder) = fake::card("") else { return };
    let card = backend(&folder);
    let data: Vec<f32> = (0..500).map(|i| i as f32).collect();
    let x = upload(&*card, &data).unwrap();
    let view = Strides::new([100][..].into(), [4][..].into(), 8);
    let mut y = card.alloc(4 * 120).unwrap();
    let to = Strides::contiguous(&[120]).narrow(0, 20, 120);
    let inputs = [Arg { buffer: &x, dtype: DType::F32, view: &view }];
    let mut outputs = [ArgMut { buffer: &mut y, dtype: DType::F32, view: &to }];
    let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[Scalar::Real(2.0)] };
    card.launch(&TWICE, &mut launch).unwrap();
    let none = Kernel { gpu: None, ..kernel("none", GpuCode { source: "", plan: |_, _| Ok(()) }) };
    let error = card.launch(&none, &mut launch).unwrap_err();
    assert_eq!(error.to_string(), "none: no kernel for cuda");
    let expected: Vec<f32> = (0..100).map(|i| 2.0 * (8 + 4 * i) as f32 + 0.5 - 3.0).collect();
    assert_eq!(download::<f32>(&*card, &y, 120).unwrap()[20..], expected);
    assert_eq!(card.cost().flops, 7);
}

#[test]
fn an_index_outside_is_reported_by_the_next_download() {
    let Some(folder) = fake::card("") else { return };
    let card = backend(&folder);
    let x = upload(&*card, &[1f32, 2.0, 900.0, -4.0, 600.0]).unwrap();
    let mut y = card.alloc(20).unwrap();
    twice(&*card, &x, &mut y, 5, 2.0).unwrap();
    let error = download::<f32>(&*card, &y, 5).unwrap_err();
    assert_eq!(error, KernelError::Index { kernel: "twice", index: 1800, position: 2, rows: 1000 });
    twice(&*card, &x, &mut y, 5, 0.0).unwrap();
    assert_eq!(download::<f32>(&*card, &y, 5).unwrap(), [-2.5; 5], "and is forgotten then");
    twice(&*card, &x, &mut y, 5, -1.0).unwrap();
    assert!(card.synchronize().is_err());
}

/// What a reader sees of what a writer on another stream has written in many steps, and the writer of what it writes next.
fn relay(folder: &Folder) -> bool {
    let card = CudaDevice::open(&folder.places(), 0).unwrap();
    let [writer, reader] = [(); 2].map(|()| card.backend(BackendConfig::default()).unwrap());
    let mut right = true;
    for round in 0..20 {
        let mut x = upload(&*writer, &[round as f32 + 10.0; 300]).unwrap();
        let mut y = writer.alloc(1200).unwrap();
        twice(&*writer, &x, &mut y, 300, 1.0).unwrap();
        let ready = writer.record_event().unwrap();
        reader.wait_event(&ready).unwrap();
        let mut z = reader.alloc(1200).unwrap();
        twice(&*reader, &y, &mut z, 300, 1.0).unwrap();
        let read = reader.record_event().unwrap();
        writer.wait_event(&read).unwrap();
        // The next use of both blocks of the writer.
        drop(y);
        writer.upload(&[0xee; 1200], &mut x).unwrap();
        let _other = upload(&*writer, &[0xeeu8; 1200]).unwrap();
        let got = download::<f32>(&*reader, &z, 300);
        right &= got.is_ok_and(|z| z == [round as f32 + 5.0; 300]);
    }
    let _ = (writer.synchronize(), reader.synchronize());
    right
}

#[test]
fn marks_order_streams_and_are_needed() {
    let Some(folder) = fake::card("") else { return };
    assert!(relay(&folder));
    let Some(folder) = fake::card("unordered") else { return };
    assert!(!relay(&folder), "a card that ignores events is found out");
}

#[test]
fn a_full_card_is_an_error_with_figures_and_a_lost_one_says_so() {
    let Some(folder) = fake::card("small-card") else { return };
    let card = backend(&folder);
    let held = card.alloc(80 << 20).unwrap();
    let error = card.alloc(80 << 20).unwrap_err();
    assert!(
        matches!(error, KernelError::OutOfMemory { requested_bytes, .. } if requested_bytes == 80 << 20),
        "{error}"
    );
    drop(held);
    card.alloc(85 << 20).unwrap();
    let limited = CudaDevice::open(&folder.places(), 0)
        .unwrap()
        .backend(BackendConfig { memory_bytes_max: 1 << 20, ..BackendConfig::default() });
    assert!(matches!(limited, Err(KernelError::OutOfMemory { .. })));
    let Some(folder) = fake::card("lost") else { return };
    let card = backend(&folder);
    let x = upload(&*card, &[1f32; 4]).unwrap();
    let mut y = card.alloc(16).unwrap();
    // The launch is accepted; whatever comes next is told.
    let error = twice(&*card, &x, &mut y, 4, 1.0).and_then(|()| card.synchronize()).unwrap_err();
    assert!(matches!(&error, KernelError::Device { is_permanent: true, .. }), "{error}");
    assert!(
        error.to_string().contains("CUDA_ERROR_LAUNCH_FAILED (719); the device answers nothing more"),
        "{error}"
    );
}

/// a b of views of these memories, on a back end.
fn product<T: Element>(
    on: &dyn Backend,
    kernel: &Kernel,
    [(a, a_view), (b, b_view)]: [(&[T], &Strides); 2],
    to: &Strides,
) -> Vec<T> {
    let (a, b) = (upload(on, a).unwrap(), upload(on, b).unwrap());
    let stale = vec![T::from_f64(77.0); to.reach()];
    let mut c = upload(on, &stale).unwrap();
    let inputs = [
        Arg { buffer: &a, dtype: T::DTYPE, view: a_view },
        Arg { buffer: &b, dtype: T::DTYPE, view: b_view },
    ];
    let mut outputs = [ArgMut { buffer: &mut c, dtype: T::DTYPE, view: to }];
    on.launch(kernel, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] }).unwrap();
    download(on, &c, to.reach()).unwrap()
}

#[test]
fn products_of_all_strides_that_the_library_knows() {
    let Some(folder) = fake::card("") else { return };
    let (card, cpu) = (backend(&folder), Cpu::backend(1));
    let turn = |[g, r, c]: [usize; 3]| Strides::contiguous(&[g, c, r]).permute(&[0, 2, 1]);
    let plain = |shape: [usize; 3]| Strides::contiguous(&shape);
    // Every second row of something wider, and heads as they lie in attention.
    let wide =
        |[g, r, c]: [usize; 3]| Strides::contiguous(&[g, 2 * r, c + 3]).narrow(2, 1, 1 + c).narrow(1, 0, r);
    let heads = |[g, r, c]: [usize; 3]| Strides::contiguous(&[r, g, c]).permute(&[1, 0, 2]);
    let shared = |[g, r, c]: [usize; 3]| Strides::contiguous(&[r, c]).broadcast(&[g, r, c]).unwrap();
    let views: [&dyn Fn([usize; 3]) -> Strides; 5] = [&plain, &turn, &wide, &heads, &shared];
    let memory = |n: usize| (0..n).map(|i| ((i * 37 + 11) % 17) as f64 - 8.0).collect::<Vec<f64>>();
    for dtype in DType::FLOATS {
        for [g, m, n, k] in [[1, 3, 4, 5], [3, 2, 5, 4], [2, 1, 3, 1], [2, 4, 1, 3]] {
            for (x, y, z) in (0..5).flat_map(|x| (0..5).flat_map(move |y| (0..4).map(move |z| (x, y, z)))) {
                let (a, b, c) = (views[x]([g, m, k]), views[y]([g, k, n]), views[z]([g, m, n]));
                match_float!(dtype, T => {
                    let of = |n: usize| memory(n).into_iter().map(T::from_f64).collect::<Vec<T>>();
                    let (p, q) = (of(a.reach()), of(b.reach()));
                    let operands = [(&p[..], &a), (&q[..], &b)];
                    let got = product::<T>(&*card, &PRODUCTS, operands, &c);
                    assert!(got == product::<T>(&*cpu, &BATCHED_MATMUL, operands, &c), "{dtype} {a:?} {b:?} {c:?}");
                }, else unreachable!());
            }
        }
    }
}

/// A product with the epilogue that a scalar names: inputs a, b, a bias and a residual; outputs c and what is formed.
static ENDINGS: Kernel = kernel(
    "endings",
    GpuCode {
        source: "",
        plan: |launch, plan: &mut LaunchPlan| {
            let epilogue = [
                Epilogue::Bias { bias: 2 },
                Epilogue::BiasGelu { bias: 2, before: 1 },
                Epilogue::SumsOfB { sums: 1 },
                Epilogue::Add { bias: Some(2), residual: 3 },
                Epilogue::Add { bias: None, residual: 3 },
            ][launch.scalars[0].int() as usize];
            plan.product(Matmul { a: 0, b: 1, c: 0, epilogue });
            Ok(())
        },
    },
);

/// c and what is formed epilogue_operands it, for row-major matrices; b is one for all of the stack where `is_shared`.
fn epilogue<T: Element>(
    on: &dyn Backend,
    number: i64,
    ([g, m, n, k], is_shared): ([usize; 4], bool),
    operands: [&[f64]; 4],
) -> [Vec<f64>; 2] {
    let up = |data: &[f64]| upload(on, &data.iter().map(|x| T::from_f64(*x)).collect::<Vec<T>>()).unwrap();
    let b_view = if is_shared {
        Strides::contiguous(&[k, n]).broadcast(&[g, k, n]).unwrap()
    } else {
        Strides::contiguous(&[g, k, n])
    };
    let whole = Strides::contiguous(&[g, m, n]);
    let line = Strides::contiguous(&[n]);
    // The residual begins inside of its memory.
    let behind = whole.clone().at(3);
    let views = [&Strides::contiguous(&[g, m, k]), &b_view, &line, &behind];
    let [a, b, bias, residual] = operands;
    let buffers = [up(a), up(b), up(bias), up(&[&[55.0; 3], residual].concat())];
    let inputs: Vec<Arg<'_>> =
        buffers.iter().zip(views).map(|(buffer, view)| Arg { buffer, dtype: T::DTYPE, view }).collect();
    let epilogue_operands = if number == 1 { &whole } else { &line };
    let mut results = [&whole, epilogue_operands].map(|view| up(&vec![77.0; view.numel()]));
    let [c, d] = &mut results;
    let mut outputs = [
        ArgMut { buffer: c, dtype: T::DTYPE, view: &whole },
        ArgMut { buffer: d, dtype: T::DTYPE, view: epilogue_operands },
    ];
    let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[Scalar::Int(number)] };
    on.launch(&ENDINGS, &mut launch).unwrap();
    let down = |buffer: &Buffer, n: usize| {
        download::<T>(on, buffer, n).unwrap().into_iter().map(T::to_f64).collect::<Vec<f64>>()
    };
    [down(&results[0], whole.numel()), down(&results[1], epilogue_operands.numel())]
}

/// The same by hand.
fn ending_by_hand(
    number: i64,
    ([g, m, n, k], is_shared): ([usize; 4], bool),
    [a, b, bias, residual]: [&[f64]; 4],
) -> [Vec<f64>; 2] {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let gate = |x: f64| 0.5 * (1.0 + (root * (x + 0.044715 * x.powi(3))).tanh());
    let gelu = |x: f64| x * gate(x);
    let stack = |p: usize| if is_shared { 0 } else { p };
    let (mut c, mut epilogue_operands) =
        (vec![0.0; g * m * n], vec![0.0; if number == 1 { g * m * n } else { n }]);
    for (p, i, j) in (0..g * m * n).map(|at| (at / (m * n), at / n % m, at % n)) {
        let sum: f64 = (0..k).map(|l| a[(p * m + i) * k + l] * b[(stack(p) * k + l) * n + j]).sum();
        let at = (p * m + i) * n + j;
        c[at] = match number {
            0 => sum + bias[j],
            1 => gelu(sum + bias[j]),
            3 => sum + bias[j] + residual[at],
            4 => sum + residual[at],
            _ => sum,
        };
        if number == 1 {
            epilogue_operands[at] = sum + bias[j];
        }
    }
    match number {
        0 | 3 | 4 => epilogue_operands.fill(77.0),
        2 => (0..g * k * n)
            .for_each(|at| epilogue_operands[at % n] += b[if is_shared { at % (k * n) } else { at }]),
        _ => {}
    }
    [c, epilogue_operands]
}

#[test]
fn products_of_f32_are_as_exact_as_was_asked_for() {
    let x = 1.0 + 2f64.powi(-9) + 2f64.powi(-20);
    for (precision, left) in MatmulPrecision::EVERY.into_iter().zip([x, 1.0 + 2f64.powi(-9), 1.0]) {
        let Some(folder) = fake::card("") else { return };
        let settings = BackendConfig { precision, ..BackendConfig::default() };
        let card = CudaDevice::open(&folder.places(), 0).unwrap().backend(settings).unwrap();
        let one = Strides::contiguous(&[1, 1, 1]);
        let got = product::<f32>(&*card, &PRODUCTS, [(&[x as f32][..], &one), (&[1.0], &one)], &one);
        assert_eq!(got, [left as f32], "{precision}");
        let got = product::<f64>(&*card, &PRODUCTS, [(&[x][..], &one), (&[1.0], &one)], &one);
        assert_eq!(got, [x], "{precision}: f64 is as it is");
    }
}

#[test]
fn products_end_as_they_are_told_by_the_library_or_by_kernels() {
    let memory =
        |n: usize, by: usize| (0..n).map(|i| ((i * by + 11) % 17) as f64 / 4.0 - 2.0).collect::<Vec<f64>>();
    for words in ["", "plain-products"] {
        let Some(folder) = fake::card(words) else { return };
        let card = backend(&folder);
        let shapes = [
            ([1, 5, 8, 6], false),
            ([3, 4, 16, 5], true),
            ([2, 3, 8, 4], false),
            ([1, 1, 8, 3], false),
            ([1, 4, 5, 6], false),
            ([1, 3, 8, 0], false),
            ([1, 0, 8, 2], false),
        ];
        for (shape @ ([g, m, n, k], is_shared), number) in
            shapes.into_iter().flat_map(|shape| (0..5).map(move |number| (shape, number)))
        {
            if number == 2 && g > 1 {
                continue;
            }
            let (a, b) = (memory(g * m * k, 37), memory(if is_shared { k * n } else { g * k * n }, 29));
            let (bias, residual) = (memory(n, 23), memory(g * m * n, 31));
            let operands = [&a[..], &b, &bias, &residual];
            let got = epilogue::<f32>(&*card, number, shape, operands);
            let exact = ending_by_hand(number, shape, operands);
            let mut both = got.iter().flatten().zip(exact.iter().flatten());
            assert!(both.all(|(x, y)| (x - y).abs() < 1e-4), "{words} {number} {shape:?}: {got:?} {exact:?}");
        }
        // 256 + 1, and 1 more, in eight bits: the library rounds once, kernels round twice.
        let (a, b, bias) = ([256.0, 1.0], [1.0; 16], [1.0; 8]);
        let [c, _] = epilogue::<half::bf16>(&*card, 0, ([1, 1, 8, 2], false), [&a, &b, &bias, &bias]);
        assert_eq!(c, [if words.is_empty() { 258.0 } else { 256.0 }; 8]);
        let [c, _] = epilogue::<half::bf16>(&*card, 3, ([1, 1, 8, 2], false), [&a, &b, &bias, &bias]);
        assert_eq!(c, [if words.is_empty() { 260.0 } else { 256.0 }; 8], "259 lies between, and 260 is even");
    }
}
