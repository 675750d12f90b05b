//! Tests of the CUDA back end on a fake GPU: missing libraries, memory, launches, products, events, faults.

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
use approx::abs_diff_eq;
use std::fs;
use std::panic::catch_unwind;
use std::process::Command;
use std::sync::Arc;

fn nothing(_: &Pool, _: &mut Launch<'_>) -> Result<(), KernelError> {
    unreachable!("only the GPU runs it")
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

/// y[i] = T(factor * x[i * stride[1]] + more + rate + shift), through scratch memory; an index fault if the scratch value is not in
/// 0..1000.
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

static MATMUL_KERNEL: Kernel = kernel(
    "batched_matmul",
    GpuCode {
        source: "",
        plan: |_, plan: &mut LaunchPlan| {
            plan.matmul(Matmul { a: 0, b: 1, c: 0, epilogue: Epilogue::Plain });
            Ok(())
        },
    },
);

pub(super) fn backend(folder: &Folder) -> Arc<dyn Backend> {
    CudaDevice::open(&folder.search_paths(), 0).unwrap().backend(BackendConfig::default()).unwrap()
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
fn missing_or_old_library_is_an_error_that_says_what_to_install() {
    let refused = |options: &str, text: &str| {
        let Some(folder) = fake::gpu(options) else { return };
        let error = CudaDevice::open(&folder.search_paths(), 0).unwrap_err();
        let KernelError::Library { why, help, .. } = &error else { panic!("{options}: {error}") };
        assert!(why.contains(text) && help.contains("install"), "{options}: {error}");
    };
    refused("driver=12080", "is for CUDA 12.8, and 13.0 or newer is needed");
    refused("nvrtc=12", "is for CUDA 12.0, and 13.0 or newer is needed");
    refused("blas=120900", "is for CUDA 12.9, and 13.0 or newer is needed");
    refused("no-gpu", "does not start: cuInit: CUDA_ERROR_NO_DEVICE (100)");
    refused("no-start", "does not start: cuInit: CUDA_ERROR_UNKNOWN (999)");
    refused("old-gpu", "has compute capability 7.0; 8.0 is needed");
    let Some(folder) = fake::gpu("") else { return };
    let error = CudaDevice::open(&folder.search_paths(), 1).unwrap_err();
    assert!(error.to_string().contains("GPU 1 does not exist; the driver reports 1 GPUs"), "{error}");
    assert_eq!(CudaDevice::open(&folder.search_paths(), 0).unwrap().device(), Device::Cuda(0));
}

#[test]
fn invalid_library_file_is_an_error() {
    if fake::is_skipped() {
        return;
    }
    let folder = Folder::new();
    let text = |paths: &SearchPaths| CudaDevice::open(paths, 0).unwrap_err().to_string();
    assert!(text(&folder.search_paths()).contains("which contains no libcuda.so"));
    fs::write(folder.0.join("libcuda.so.1"), "no library").unwrap();
    assert!(text(&folder.search_paths()).contains("SHARDGRAD_CUDA_PATH"), "{}", text(&folder.search_paths()));
    fs::remove_file(folder.0.join("libcuda.so.1")).unwrap();
    fake::library("int nothing;", &folder.0.join("libcuda.so.1"));
    assert!(
        text(&folder.search_paths()).contains("has no function cuDriverGetVersion"),
        "{}",
        text(&folder.search_paths())
    );
    let other = Folder::new();
    let half = "extern \"C\" __attribute__((visibility(\"default\"))) int cuDriverGetVersion(int *v) { *v = 13000; return 0; }";
    fake::library(half, &other.0.join("libcuda.so.1"));
    assert!(
        text(&other.search_paths()).contains("has no function cuInit"),
        "{}",
        text(&other.search_paths())
    );
}

#[test]
fn upload_and_download_round_trip_for_all_sizes() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    for bytes in [0usize, 1, 3, 4096, (9 << 20) + 5] {
        let data: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 300) as u8).collect();
        let buffer = upload(&*gpu, &data).unwrap();
        assert!(buffer.device_address().is_some_and(|a| a % 256 == 0));
        assert!(download::<u8>(&*gpu, &buffer, bytes).unwrap() == data, "{bytes}");
    }
    gpu.synchronize().unwrap();
    assert_eq!(gpu.memory().num_system_allocs, 2, "a chunk of each kind");
    // More uploads than staging memory holds, some of them in pieces.
    let sizes = [5usize, 400_000, 4096, 600_000, 70_000, 100];
    let bytes = |i: usize| -> Vec<u8> { (0..sizes[i % 6]).map(|at| (at * 3 + i * 11) as u8).collect() };
    let uploads: Vec<Buffer> = (0..60).map(|i| upload(&*gpu, &bytes(i)).unwrap()).collect();
    for (i, buffer) in uploads.iter().enumerate() {
        assert!(download::<u8>(&*gpu, buffer, sizes[i % 6]).unwrap() == bytes(i), "{i}");
    }
}

/// The command line, whose process has one thread at first, is tested on a fake GPU by `tests/async_collectives.rs`.
#[test]
fn environment_of_a_process_with_several_threads_is_not_changed() {
    let before = std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS");
    let (done, wait) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || wait.recv());
        assert!(!super::reserve_hardware_queues());
        drop(done);
    });
    assert_eq!(std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS"), before);
}

#[test]
fn fake_gpu_finds_planted_faults() {
    let Some(folder) = fake::planted_faults() else { return };
    let done = Command::new(folder.0.join("planted")).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    folder.take_faults();
}

/// y = 2 x through static and dynamic shared memory, which only together exceed what a block has without opt-in.
static SHARED: Kernel = kernel(
    "shared",
    GpuCode {
        source: "extern \"C\" __global__ void through(const float *x, float *y) {\n\
                __shared__ float fixed[10240];\n\
                DYNAMIC_SHARED(float, more);\n\
                fixed[10239 - threadIdx.x] = x[threadIdx.x];\n\
                __syncthreads();\n\
                more[5119 - threadIdx.x] = 2 * fixed[10239 - threadIdx.x];\n\
                y[threadIdx.x] = more[5119 - threadIdx.x];\n\
            }\n",
        plan: |_, plan| {
            let args = vec![GridArg::Input(0), GridArg::Output(0)];
            let (defines, blocks) = (Vec::new(), [1; 3]);
            plan.grid(Grid { entry: "through", defines, blocks, threads: 64, shared_bytes: 20 << 10, args });
            Ok(())
        },
    },
);

#[test]
fn static_and_dynamic_shared_memory_count_together() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    let (x, mut y) = (upload(&*gpu, &[4f32; 64]).unwrap(), gpu.alloc(256).unwrap());
    let view = Strides::contiguous(&[64]);
    let inputs = [Arg { buffer: &x, dtype: DType::F32, view: &view }];
    let mut outputs = [ArgMut { buffer: &mut y, dtype: DType::F32, view: &view }];
    gpu.launch(&SHARED, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] }).unwrap();
    assert_eq!(download::<f32>(&*gpu, &y, 64).unwrap(), [8.0; 64]);
}

#[test]
fn launch_plan_runs_with_its_arguments() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    let data: Vec<f32> = (0..500).map(|i| i as f32).collect();
    let x = upload(&*gpu, &data).unwrap();
    let view = Strides::new([100][..].into(), [4][..].into(), 8);
    let mut y = gpu.alloc(4 * 120).unwrap();
    let to = Strides::contiguous(&[120]).narrow(0, 20, 120);
    let inputs = [Arg { buffer: &x, dtype: DType::F32, view: &view }];
    let mut outputs = [ArgMut { buffer: &mut y, dtype: DType::F32, view: &to }];
    let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[Scalar::Real(2.0)] };
    gpu.launch(&TWICE, &mut launch).unwrap();
    let none = Kernel { gpu: None, ..kernel("none", GpuCode { source: "", plan: |_, _| Ok(()) }) };
    let error = gpu.launch(&none, &mut launch).unwrap_err();
    assert_eq!(error.to_string(), "none: no kernel for cuda");
    let expected: Vec<f32> = (0..100).map(|i| 2.0 * (8 + 4 * i) as f32 + 0.5 - 3.0).collect();
    assert_eq!(download::<f32>(&*gpu, &y, 120).unwrap()[20..], expected);
    assert_eq!(gpu.cost().flops, 7);
}

#[test]
fn index_out_of_range_is_reported_by_the_next_download() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = backend(&folder);
    let x = upload(&*gpu, &[1f32, 2.0, 900.0, -4.0, 600.0]).unwrap();
    let mut y = gpu.alloc(20).unwrap();
    twice(&*gpu, &x, &mut y, 5, 2.0).unwrap();
    let error = download::<f32>(&*gpu, &y, 5).unwrap_err();
    assert_eq!(error, KernelError::Index { kernel: "twice", index: 1800, position: 2, rows: 1000 });
    twice(&*gpu, &x, &mut y, 5, 0.0).unwrap();
    assert_eq!(download::<f32>(&*gpu, &y, 5).unwrap(), [-2.5; 5], "the download cleared the record");
    twice(&*gpu, &x, &mut y, 5, -1.0).unwrap();
    assert!(gpu.synchronize().is_err());
}

/// Passes data from a writer to a reader on another stream; returns the errors.
fn relay_between_streams(folder: &Folder) -> Result<(), KernelError> {
    let gpu = CudaDevice::open(&folder.search_paths(), 0).unwrap();
    let [writer, reader] = [(); 2].map(|()| gpu.backend(BackendConfig::default()).unwrap());
    for round in 0..3 {
        let mut x = upload(&*writer, &[round as f32 + 10.0; 300])?;
        let mut y = writer.alloc(1200)?;
        twice(&*writer, &x, &mut y, 300, 1.0)?;
        let ready = writer.record_event()?;
        reader.wait_event(&ready)?;
        let mut z = reader.alloc(1200)?;
        twice(&*reader, &y, &mut z, 300, 1.0)?;
        let read = reader.record_event()?;
        writer.wait_event(&read)?;
        // Overwrites both blocks of the writer.
        drop(y);
        writer.upload(&[0xee; 1200], &mut x)?;
        let _other = upload(&*writer, &[0xeeu8; 1200])?;
        assert_eq!(download::<f32>(&*reader, &z, 300)?, [round as f32 + 5.0; 300]);
    }
    Ok(())
}

#[test]
fn events_order_streams_and_are_necessary() {
    let Some(folder) = fake::gpu("") else { return };
    relay_between_streams(&folder).unwrap();
    // Ignored events are a fault each time, whichever stream is faster.
    for _ in 0..3 {
        let Some(folder) = fake::gpu("unordered quiet") else { return };
        let _ = catch_unwind(|| relay_between_streams(&folder));
        let faults = folder.take_faults();
        assert!(faults.contains("nothing orders them"), "{faults}");
    }
}

#[test]
fn out_of_memory_and_lost_contexts_are_reported() {
    let Some(folder) = fake::gpu("small-gpu") else { return };
    let gpu = backend(&folder);
    let held = gpu.alloc(80 << 20).unwrap();
    let error = gpu.alloc(80 << 20).unwrap_err();
    assert!(
        matches!(error, KernelError::OutOfMemory { requested_bytes, .. } if requested_bytes == 80 << 20),
        "{error}"
    );
    drop(held);
    gpu.alloc(85 << 20).unwrap();
    let limited = CudaDevice::open(&folder.search_paths(), 0)
        .unwrap()
        .backend(BackendConfig { memory_bytes_max: 1 << 20, ..BackendConfig::default() });
    assert!(matches!(limited, Err(KernelError::OutOfMemory { .. })));
    let Some(folder) = fake::gpu("lost") else { return };
    let gpu = backend(&folder);
    let x = upload(&*gpu, &[1f32; 4]).unwrap();
    let mut y = gpu.alloc(16).unwrap();
    // The launch succeeds; the next call reports the lost context.
    let error = twice(&*gpu, &x, &mut y, 4, 1.0).and_then(|()| gpu.synchronize()).unwrap_err();
    assert!(matches!(&error, KernelError::Device { lost_gpu: Some(0), .. }), "{error}");
    assert!(
        error.to_string().contains("CUDA_ERROR_LAUNCH_FAILED (719); the device context is lost"),
        "{error}"
    );
}

#[test]
fn available_memory_is_that_of_the_gpu_or_what_the_limit_leaves() {
    for (limit, is_shared) in [(0, true), (140 << 20, false)] {
        let Some(folder) = fake::gpu("small-gpu") else { return };
        let config = BackendConfig { memory_bytes_max: limit, ..BackendConfig::default() };
        let gpu = CudaDevice::open(&folder.search_paths(), 0).unwrap().backend(config).unwrap();
        let available = || gpu.available_memory().unwrap();
        let before = available();
        let held = gpu.alloc(40 << 20).unwrap();
        assert_eq!(before.bytes - available().bytes, 40 << 20);
        drop(held);
        assert_eq!((available(), before.shared_by.is_some()), (before.clone(), is_shared));
    }
}

/// Computes a b of views of host data on a back end.
fn matmul<T: Element>(
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
fn matmul_matches_the_cpu_on_all_strides() {
    let Some(folder) = fake::gpu("") else { return };
    let (gpu, cpu) = (backend(&folder), Cpu::backend(1));
    let transposed = |[g, r, c]: [usize; 3]| Strides::contiguous(&[g, c, r]).permute(&[0, 2, 1]);
    let plain = |shape: [usize; 3]| Strides::contiguous(&shape);
    // Every second row of a wider matrix, and the strides of attention heads.
    let wide =
        |[g, r, c]: [usize; 3]| Strides::contiguous(&[g, 2 * r, c + 3]).narrow(2, 1, 1 + c).narrow(1, 0, r);
    let heads = |[g, r, c]: [usize; 3]| Strides::contiguous(&[r, g, c]).permute(&[1, 0, 2]);
    let shared = |[g, r, c]: [usize; 3]| Strides::contiguous(&[r, c]).broadcast(&[g, r, c]).unwrap();
    let views: [&dyn Fn([usize; 3]) -> Strides; 5] = [&plain, &transposed, &wide, &heads, &shared];
    let memory = |n: usize| (0..n).map(|i| ((i * 37 + 11) % 17) as f64 - 8.0).collect::<Vec<f64>>();
    for dtype in DType::FLOATS {
        for [g, m, n, k] in [[1, 3, 4, 5], [3, 2, 5, 4], [2, 1, 3, 1], [2, 4, 1, 3]] {
            for (x, y, z) in (0..5).flat_map(|x| (0..5).flat_map(move |y| (0..4).map(move |z| (x, y, z)))) {
                let (a, b, c) = (views[x]([g, m, k]), views[y]([g, k, n]), views[z]([g, m, n]));
                match_float!(dtype, T => {
                    let of = |n: usize| memory(n).into_iter().map(T::from_f64).collect::<Vec<T>>();
                    let (p, q) = (of(a.reach()), of(b.reach()));
                    let operands = [(&p[..], &a), (&q[..], &b)];
                    let got = matmul::<T>(&*gpu, &MATMUL_KERNEL, operands, &c);
                    assert!(got == matmul::<T>(&*cpu, &BATCHED_MATMUL, operands, &c), "{dtype} {a:?} {b:?} {c:?}");
                }, else unreachable!());
            }
        }
    }
}

/// A product with the epilogue number in the first scalar. Inputs: a, b, bias, residual; outputs: c and the second output.
static EPILOGUES: Kernel = kernel(
    "epilogues",
    GpuCode {
        source: "",
        plan: |launch, plan: &mut LaunchPlan| {
            let epilogue = [
                Epilogue::Bias { bias: 2 },
                Epilogue::BiasGelu { bias: 2, pre_gelu: 1 },
                Epilogue::BiasGrad { sums: 1 },
                Epilogue::Add { bias: Some(2), residual: 3 },
                Epilogue::Add { bias: None, residual: 3 },
            ][launch.scalars[0].int() as usize];
            plan.matmul(Matmul { a: 0, b: 1, c: 0, epilogue });
            Ok(())
        },
    },
);

/// Returns c and the second output for row-major operands; all of the batch share one b if `is_shared`.
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
    // The residual has an offset.
    let with_offset = whole.clone().at(3);
    let views = [&Strides::contiguous(&[g, m, k]), &b_view, &line, &with_offset];
    let [a, b, bias, residual] = operands;
    let buffers = [up(a), up(b), up(bias), up(&[&[55.0; 3], residual].concat())];
    let inputs: Vec<Arg<'_>> =
        buffers.iter().zip(views).map(|(buffer, view)| Arg { buffer, dtype: T::DTYPE, view }).collect();
    let extra = if number == 1 { &whole } else { &line };
    let mut results = [&whole, extra].map(|view| up(&vec![77.0; view.numel()]));
    let [c, d] = &mut results;
    let mut outputs = [
        ArgMut { buffer: c, dtype: T::DTYPE, view: &whole },
        ArgMut { buffer: d, dtype: T::DTYPE, view: extra },
    ];
    let mut launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[Scalar::Int(number)] };
    on.launch(&EPILOGUES, &mut launch).unwrap();
    let down = |buffer: &Buffer, n: usize| {
        download::<T>(on, buffer, n).unwrap().into_iter().map(T::to_f64).collect::<Vec<f64>>()
    };
    [down(&results[0], whole.numel()), down(&results[1], extra.numel())]
}

/// Returns the expected outputs of [`epilogue`].
fn expected_epilogue(
    number: i64,
    ([g, m, n, k], is_shared): ([usize; 4], bool),
    [a, b, bias, residual]: [&[f64]; 4],
) -> [Vec<f64>; 2] {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let gate = |x: f64| 0.5 * (1.0 + (root * (x + 0.044715 * x.powi(3))).tanh());
    let gelu = |x: f64| x * gate(x);
    let stack = |p: usize| if is_shared { 0 } else { p };
    let (mut c, mut extra) = (vec![0.0; g * m * n], vec![0.0; if number == 1 { g * m * n } else { n }]);
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
            extra[at] = sum + bias[j];
        }
    }
    match number {
        0 | 3 | 4 => extra.fill(77.0),
        2 => (0..g * k * n).for_each(|at| extra[at % n] += b[if is_shared { at % (k * n) } else { at }]),
        _ => {}
    }
    [c, extra]
}

#[test]
fn f32_matmul_follows_the_precision_setting() {
    let x = 1.0 + 2f64.powi(-9) + 2f64.powi(-20);
    for (precision, left) in MatmulPrecision::EVERY.into_iter().zip([x, 1.0 + 2f64.powi(-9), 1.0]) {
        let Some(folder) = fake::gpu("") else { return };
        let settings = BackendConfig { precision, ..BackendConfig::default() };
        let gpu = CudaDevice::open(&folder.search_paths(), 0).unwrap().backend(settings).unwrap();
        let one = Strides::contiguous(&[1, 1, 1]);
        let got = matmul::<f32>(&*gpu, &MATMUL_KERNEL, [(&[x as f32][..], &one), (&[1.0], &one)], &one);
        assert_eq!(got, [left as f32], "{precision}");
        let got = matmul::<f64>(&*gpu, &MATMUL_KERNEL, [(&[x][..], &one), (&[1.0], &one)], &one);
        assert_eq!(got, [x], "{precision}: f64 is not rounded");
    }
}

/// Returns whether both outputs of an epilogue are near the exact ones.
fn are_near(got: &[Vec<f64>; 2], exact: &[Vec<f64>; 2], epsilon: f64) -> bool {
    got.iter().zip(exact).all(|(got, exact)| abs_diff_eq!(got[..], exact[..], epsilon = epsilon))
}

#[test]
fn epilogues_match_known_values_with_and_without_library_support() {
    let memory =
        |n: usize, by: usize| (0..n).map(|i| ((i * by + 11) % 17) as f64 / 4.0 - 2.0).collect::<Vec<f64>>();
    for options in ["", "plain-products"] {
        let Some(folder) = fake::gpu(options) else { return };
        let gpu = backend(&folder);
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
            let got = epilogue::<f32>(&*gpu, number, shape, operands);
            let exact = expected_epilogue(number, shape, operands);
            assert!(are_near(&got, &exact, 1e-4), "{options} {number} {shape:?}: {got:?} {exact:?}");
        }
        // 256 + 1 + 1 with eight bits: the fused epilogue rounds once, separate kernels round twice.
        let (a, b, bias) = ([256.0, 1.0], [1.0; 16], [1.0; 8]);
        let [c, _] = epilogue::<half::bf16>(&*gpu, 0, ([1, 1, 8, 2], false), [&a, &b, &bias, &bias]);
        assert_eq!(c, [if options.is_empty() { 258.0 } else { 256.0 }; 8]);
        let [c, _] = epilogue::<half::bf16>(&*gpu, 3, ([1, 1, 8, 2], false), [&a, &b, &bias, &bias]);
        assert_eq!(c, [if options.is_empty() { 260.0 } else { 256.0 }; 8], "259 is a tie, and 260 is even");
    }
}

/// Whatever cuBLASLt refuses is computed without it: every epilogue, in every dtype, with and without a residual.
#[test]
fn products_that_the_library_refuses_have_known_values() {
    let memory =
        |n: usize, by: usize| (0..n).map(|i| ((i * by + 11) % 17) as f64 / 4.0 - 2.0).collect::<Vec<f64>>();
    let (shape @ ([g, m, n, k], _), plain) = (([2, 3, 8, 4], false), Strides::contiguous(&[2, 3, 8]));
    let (a, b) = (memory(g * m * k, 37), memory(g * k * n, 29));
    let (bias, residual) = (memory(n, 23), memory(g * m * n, 31));
    let operands = [&a[..], &b, &bias, &residual];
    // The epilogue of cuBLASLt, whether C is another matrix than D, and the number of the epilogue here.
    let epilogues = [(4, 0, 0), (164, 0, 1), (256, 0, 2), (4, 1, 3), (1, 1, 4)];
    for (word, (library_dtype, dtype)) in ["refused=", "not-found="].into_iter().flat_map(|word| {
        [(1, DType::F64), (0, DType::F32), (14, DType::BF16), (2, DType::F16)].map(|dtype| (word, dtype))
    }) {
        // One epilogue alone, then all of them and the plain product.
        let alone = epilogues.map(|(epilogue, c, number)| {
            (format!("{word}{epilogue}:{library_dtype}:{c}"), number..number + 1)
        });
        for (options, numbers) in alone.into_iter().chain([(format!("{word}*:{library_dtype}:*"), 0..5)]) {
            let Some(folder) = fake::gpu(&options) else { return };
            let gpu = backend(&folder);
            for number in numbers.clone() {
                let shape = if number == 2 { ([1, m, n, k], false) } else { shape };
                let got = match_float!(dtype, T => epilogue::<T>(&*gpu, number, shape, operands), else unreachable!());
                let exact = expected_epilogue(number, shape, operands);
                let off = if dtype.size() == 2 { 0.2 } else { 1e-4 };
                assert!(are_near(&got, &exact, off), "{options} {number}: {got:?} {exact:?}");
            }
            if numbers.clone().count() > 1 {
                let view = [Strides::contiguous(&[g, m, k]), Strides::contiguous(&[g, k, n])];
                let got = match_float!(dtype, T => {
                    let of = |x: &[f64]| x.iter().map(|x| T::from_f64(*x)).collect::<Vec<T>>();
                    let operands = [(&of(&a)[..], &view[0]), (&of(&b)[..], &view[1])];
                    let c = matmul::<T>(&*gpu, &MATMUL_KERNEL, operands, &plain);
                    c.into_iter().map(T::to_f64).collect::<Vec<f64>>()
                }, else unreachable!());
                let exact = expected_epilogue(2, shape, operands)[0].clone();
                assert!(abs_diff_eq!(got[..], exact[..], epsilon = 0.2), "{options}: {got:?} {exact:?}");
            }
        }
    }
}
