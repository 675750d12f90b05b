//! The communication stream of a rank on a fake GPU. A gate that the test opens delays collectives, so that the tests see which work
//! waits for them, independently of timing.

use super::fake::{self, Folder};
use super::tests::twice;
use super::{CudaDevice, tests};
use crate::backend::{AsyncStream, Backend, SyncEvent, download, upload};
use crate::buffer::Buffer;
use crate::cpu::Pool;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg};
use crate::kernel::{Arg, ArgMut, Bound, GpuCode, Kernel, Launch};
use crate::op::copy::COPY;
use crate::provider::{BackendConfig, BackendProvider};
use crate::strides::Strides;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const N: usize = 300;

fn nothing(_: &Pool, _: &mut Launch<'_>) -> Result<(), KernelError> {
    unreachable!("only the GPU runs it")
}

/// A kernel that computes y = x once the gate, which another stream writes, is 1; y = -1 after ten minutes without. A busy machine may keep
/// the threads that open the gate waiting for more than a minute.
macro_rules! held_copy {
    ($entry:literal) => {
        Kernel {
            name: $entry,
            reference: nothing,
            cpu: None,
            gpu: Some(GpuCode {
                source: concat!(
                    "extern \"C\" __global__ void ",
                    $entry,
                    "(const float *gate, const float *x, float *y, int n) {\n\
                        if (threadIdx.x != 0) return;\n\
                        const volatile float *at = gate;\n\
                        for (int naps = 0; *at != 1.f && naps < 600000; ++naps) __nanosleep(1000000);\n\
                        for (int i = 0; i < n; ++i) y[i] = *at == 1.f ? x[i] : -1.f;\n\
                    }\n"
                ),
                plan: |launch, plan| {
                    let n = GridArg::I32(launch.outputs[0].view.numel() as i32);
                    let args = vec![GridArg::Input(0), GridArg::Input(1), GridArg::Output(0), n];
                    let (defines, blocks) = (Vec::new(), [1; 3]);
                    plan.grid(Grid { entry: $entry, defines, blocks, threads: 32, shared_bytes: 0, args });
                    Ok(())
                },
            }),
            flops: |_| 0,
            bytes: None,
            bound: Bound { ulps: 0.0 },
        }
    };
}

/// The copies behind the two gates of a test. The fake GPU runs one launch of a program at a time: were they one program, a copy whose gate
/// is closed could keep one from running whose gate is open, and the test would wait for it before it opens the other.
static HELD: Kernel = held_copy!("held");
static ALSO_HELD: Kernel = held_copy!("also_held");

/// A closed gate, the rank that opens it, and the copy that it delays.
struct Gate {
    keeper: Arc<dyn Backend>,
    buffer: Buffer,
    copy: &'static Kernel,
}

impl Gate {
    fn new(gpu: &CudaDevice) -> Gate {
        Gate::of(&gpu.backend(BackendConfig::default()).unwrap(), &HELD)
    }

    fn of(keeper: &Arc<dyn Backend>, copy: &'static Kernel) -> Gate {
        let buffer = upload(&**keeper, &[0f32]).unwrap();
        keeper.synchronize().unwrap();
        Gate { keeper: keeper.clone(), buffer, copy }
    }

    /// Creates the other closed gate of a test.
    fn another(&self) -> Gate {
        Gate::of(&self.keeper, &ALSO_HELD)
    }

    /// Opens the gate, after a delay in which all work that does not wait for it completes.
    fn open(&mut self) {
        thread::sleep(Duration::from_millis(60));
        self.keeper.upload(&1f32.to_le_bytes(), &mut self.buffer).unwrap();
    }
}

/// Returns a rank with compiled kernels, and a closed gate on the same GPU.
fn rank(folder: &Folder) -> (Arc<dyn Backend>, Gate) {
    rank_on(&CudaDevice::open(&folder.search_paths(), 0).unwrap())
}

fn rank_on(gpu: &CudaDevice) -> (Arc<dyn Backend>, Gate) {
    let compute = gpu.backend(BackendConfig::default()).unwrap();
    let x = upload(&*compute, &[1f32; N]).unwrap();
    let mut y = compute.alloc(4 * N).unwrap();
    let first = Gate::new(gpu);
    for mut gate in [first.another(), first] {
        gate.open();
        held(&*compute, &gate, &x, &mut y);
    }
    twice(&*compute, &x, &mut y, N, 1.0).unwrap();
    compute.synchronize().unwrap();
    (compute, Gate::new(gpu))
}

/// Launches y = x, delayed by a gate.
fn held(on: &dyn Backend, gate: &Gate, x: &Buffer, y: &mut Buffer) {
    let (one, all) = (Strides::contiguous(&[1]), Strides::contiguous(&[N]));
    let arg = |buffer, view| Arg { buffer, dtype: DType::F32, view };
    let inputs = [arg(&gate.buffer, &one), arg(x, &all)];
    let mut outputs = [ArgMut { buffer: y, dtype: DType::F32, view: &all }];
    on.launch(gate.copy, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] }).unwrap();
}

/// Starts an async collective that copies x, delayed by a gate.
fn start_copy(compute: &dyn Backend, gate: &Gate, x: &Buffer) -> Buffer {
    let comm = compute.begin_async().unwrap().expect("a GPU has a communication stream");
    comm.record_stream(x);
    let mut y = comm.alloc(4 * N).unwrap();
    held(comm, gate, x, &mut y);
    compute.end_async().unwrap();
    y
}

/// Returns x - 2.5.
fn minus_2_5(compute: &dyn Backend, x: &Buffer) -> Buffer {
    let mut y = compute.alloc(4 * N).unwrap();
    twice(compute, x, &mut y, N, 1.0).unwrap();
    y
}

fn floats(on: &dyn Backend, buffer: &Buffer) -> Vec<f32> {
    download(on, buffer, N).unwrap()
}

#[test]
fn compute_stream_continues_while_a_collective_is_delayed() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let y = start_copy(&*compute, &gate, &x);
    // The input of the collective may be read.
    assert_eq!(floats(&*compute, &minus_2_5(&*compute, &x)), [6.5; N]);
    gate.open();
    assert_eq!(floats(&*compute, &y), [9.0; N]);
}

#[test]
fn collective_starts_after_earlier_work_of_the_compute_stream() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let mut open = gate.another();
    open.open();
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let mut filled = compute.alloc(4 * N).unwrap();
    held(&*compute, &gate, &x, &mut filled);
    let y = start_copy(&*compute, &open, &filled);
    gate.open();
    assert_eq!(floats(&*compute, &y), [9.0; N]);
}

#[test]
fn reader_waits_for_the_collective_that_writes_its_input() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let y = start_copy(&*compute, &gate, &x);
    let z = minus_2_5(&*compute, &y);
    gate.open();
    assert_eq!(floats(&*compute, &z), [6.5; N]);
    let mut gate = gate.another();
    let y = start_copy(&*compute, &gate, &x);
    thread::scope(|s| {
        s.spawn(|| gate.open());
        assert_eq!(floats(&*compute, &y), [9.0; N], "a copy to the host reads too");
    });
}

#[test]
fn writer_waits_for_the_collective_that_uses_its_output() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let [mut x, mut other] = [9f32, 8.0].map(|value| upload(&*compute, &[value; N]).unwrap());
    let [y, z] = [&x, &other].map(|x| start_copy(&*compute, &gate, x));
    let same = minus_2_5(&*compute, &upload(&*compute, &[7f32; N]).unwrap());
    let mut overwritten = start_copy(&*compute, &gate, &x);
    compute.upload(&[0x11; 4 * N], &mut x).unwrap();
    twice(&*compute, &same, &mut other, N, 1.0).unwrap();
    twice(&*compute, &same, &mut overwritten, N, 1.0).unwrap();
    gate.open();
    assert_eq!((floats(&*compute, &y), floats(&*compute, &z)), (vec![9.0; N], vec![8.0; N]));
    assert_eq!((floats(&*compute, &other), floats(&*compute, &overwritten)), (vec![2.0; N], vec![2.0; N]));
    assert_eq!(floats(&*compute, &x), [f32::from_le_bytes([0x11; 4]); N]);
}

#[test]
fn memory_of_a_pending_collective_is_not_reused() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let before = compute.memory().in_use_bytes;
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let (y, unread) = (start_copy(&*compute, &gate, &x), start_copy(&*compute, &gate, &x));
    drop((x, unread));
    let junk: Vec<Buffer> = (0..20).map(|_| upload(&*compute, &[5f32; N]).unwrap()).collect();
    gate.open();
    assert_eq!(floats(&*compute, &y), [9.0; N]);
    compute.synchronize().unwrap();
    assert!(junk.iter().all(|block| floats(&*compute, block) == [5.0; N]));
    drop((y, junk));
    assert_eq!(compute.memory().in_use_bytes, before, "all memory is returned");
}

#[test]
fn collectives_run_in_order_and_are_waited_for_individually() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let mut late = gate.another();
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let first = start_copy(&*compute, &gate, &x);
    let second = start_copy(&*compute, &late, &first);
    gate.open();
    assert_eq!(floats(&*compute, &minus_2_5(&*compute, &first)), [6.5; N]);
    late.open();
    assert_eq!(floats(&*compute, &second), [9.0; N]);
}

#[test]
fn synchronize_and_events_cover_pending_collectives() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let y = start_copy(&*compute, &gate, &x);
    let reader = tests::backend(&folder);
    compute.record_event().and_then(|point| reader.wait_event(&point)).unwrap();
    let z = minus_2_5(&*reader, &y);
    gate.open();
    assert_eq!(floats(&*reader, &z), [6.5; N]);
    let is_open = AtomicBool::new(false);
    let mut gate = gate.another();
    let y = start_copy(&*compute, &gate, &x);
    drop(x);
    thread::scope(|s| {
        s.spawn(|| {
            thread::sleep(Duration::from_millis(60));
            is_open.store(true, Ordering::Relaxed);
            gate.open();
        });
        compute.synchronize().unwrap();
        assert!(is_open.load(Ordering::Relaxed));
    });
    assert_eq!(floats(&*compute, &y), [9.0; N]);
}

#[test]
fn pending_collectives_retain_limited_memory() {
    let Some(folder) = fake::gpu("") else { return };
    let settings = BackendConfig { memory_bytes_max: 160 << 20, ..BackendConfig::default() };
    let compute = CudaDevice::open(&folder.search_paths(), 0).unwrap().backend(settings).unwrap();
    // Retained memory is released when no other memory is left.
    for _ in 0..3 {
        let x = compute.alloc(70 << 20).unwrap();
        compute.begin_async().unwrap().expect("a GPU has a communication stream").record_stream(&x);
        compute.end_async().unwrap();
    }
    compute.synchronize().unwrap();
    let before = compute.memory().in_use_bytes;
    for _ in 0..300 {
        let x = compute.alloc(4 * N).unwrap();
        compute.begin_async().unwrap().expect("a GPU has a communication stream").record_stream(&x);
        compute.end_async().unwrap();
    }
    let retained = compute.memory().in_use_bytes - before;
    assert!((1..100 * 4 * N).contains(&retained), "{retained}");
}

/// The gradient of a large embedding.
#[test]
fn large_pending_collective_does_not_delay_the_next() {
    let Some(folder) = fake::gpu("big-gpu") else { return };
    let (compute, mut gate) = rank(&folder);
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let large = compute.alloc(1100 << 20).unwrap();
    let comm = compute.begin_async().unwrap().expect("a GPU has a communication stream");
    comm.record_stream(&large);
    let mut y = comm.alloc(4 * N).unwrap();
    held(comm, &gate, &x, &mut y);
    compute.end_async().unwrap();
    let next = start_copy(&*compute, &gate, &x);
    // The compute stream waits for neither.
    assert_eq!(floats(&*compute, &minus_2_5(&*compute, &x)), [6.5; N]);
    gate.open();
    assert_eq!((floats(&*compute, &y), floats(&*compute, &next)), (vec![9.0; N], vec![9.0; N]));
}

/// Starts a copy of x on a stream after an event, delayed by a gate.
fn start_copy_on(stream: &dyn AsyncStream, after: &SyncEvent, gate: &Gate, x: &Buffer) -> Buffer {
    let on = stream.begin(after).unwrap();
    on.record_stream(x);
    let mut y = on.alloc(4 * N).unwrap();
    held(on, gate, x, &mut y);
    stream.end().unwrap();
    y
}

fn open_streams(compute: &dyn Backend) -> [Arc<dyn AsyncStream>; 2] {
    [(); 2].map(|()| compute.open_stream().unwrap().expect("a GPU has further streams"))
}

#[test]
fn further_streams_wait_for_their_events_only() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let (mut late, reader) = (gate.another(), tests::backend(&folder));
    let [first, second] = open_streams(&*compute);
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let [made, also_made] = [&first, &second].map(|stream| stream.back_end_event().unwrap());
    // Later work of the compute stream, of collectives and of the first stream is held up.
    let mut busy = compute.alloc(4 * N).unwrap();
    let y = start_copy_on(&*first, &made, &late, &x);
    let z = start_copy(&*compute, &late, &x);
    held(&*compute, &late, &x, &mut busy);
    let on = second.begin(&also_made).unwrap();
    on.record_stream(&x);
    let done = on.record_event().unwrap();
    second.end().unwrap();
    reader.wait_event(&done).unwrap();
    reader.synchronize().unwrap();
    // What the compute stream does not use does not hold it up.
    late.open();
    let held_up = start_copy_on(&*first, &first.back_end_event().unwrap(), &gate, &x);
    assert_eq!(floats(&*compute, &minus_2_5(&*compute, &x)), [6.5; N]);
    let all = [&y, &z, &busy].map(|copy| floats(&*compute, copy));
    assert!(all.iter().flatten().all(|value| *value == 9.0));
    gate.open();
    assert_eq!(floats(&*compute, &held_up), [9.0; N]);
}

#[test]
fn what_one_stream_writes_another_reads_after_it() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let mut open = gate.another();
    open.open();
    let [first, second] = open_streams(&*compute);
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let y = start_copy_on(&*first, &first.back_end_event().unwrap(), &gate, &x);
    compute.wait_for_writer(&y).unwrap();
    let z = start_copy_on(&*second, &second.back_end_event().unwrap(), &open, &y);
    let w = start_copy(&*compute, &open, &y);
    gate.open();
    assert_eq!((floats(&*compute, &z), floats(&*compute, &w)), (vec![9.0; N], vec![9.0; N]));
}

/// Waits until the operations that run are these.
fn wait_for_running(compute: &dyn Backend, due: &[Option<u64>]) {
    let start = Instant::now();
    while compute.running_async().unwrap() != due {
        assert!(start.elapsed() < Duration::from_secs(300), "{:?}", compute.running_async());
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn running_operations_are_listed_at_the_places_of_their_streams() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let x = upload(&*compute, &[9f32; N]).unwrap();
    // The first place is that of collectives, whose stream the first one creates.
    assert_eq!(compute.running_async().unwrap(), [None]);
    let [first, second] = open_streams(&*compute);
    let y = start_copy_on(&*second, &second.back_end_event().unwrap(), &gate, &x);
    wait_for_running(&*compute, &[None, None, Some(1)]);
    let z = start_copy(&*compute, &gate, &x);
    wait_for_running(&*compute, &[Some(1), None, Some(1)]);
    // The second operation of a stream runs after its first.
    let w = start_copy_on(&*first, &first.back_end_event().unwrap(), &gate, &x);
    let v = start_copy_on(&*first, &first.back_end_event().unwrap(), &gate, &x);
    wait_for_running(&*compute, &[Some(1); 3]);
    gate.open();
    for copy in [y, z, w, v] {
        assert_eq!(floats(&*compute, &copy), [9.0; N]);
    }
    wait_for_running(&*compute, &[None; 3]);
}

#[test]
fn operations_that_are_done_are_dropped_though_none_are_asked_for() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, _gate) = rank(&folder);
    let [stream, _] = open_streams(&*compute);
    compute.running_async().unwrap();
    // Every watched operation holds the event after which it begins.
    let event = Arc::new(());
    let after = SyncEvent::new(event.clone());
    for number in 0..500 {
        stream.begin(&after).unwrap();
        stream.end().unwrap();
        if number % 10 == 9 {
            compute.synchronize().unwrap();
        }
    }
    assert!(Arc::strong_count(&event) < 100, "{} handles", Arc::strong_count(&event));
}

/// A block that one stream reads is given to another one: after its event, because memory is short.
#[test]
fn released_memory_is_written_after_the_stream_that_used_it() {
    let Some(folder) = fake::gpu("") else { return };
    let settings = BackendConfig { memory_bytes_max: 160 << 20, ..BackendConfig::default() };
    let gpu = CudaDevice::open(&folder.search_paths(), 0).unwrap();
    let ((_, mut gate), compute) = (rank_on(&gpu), gpu.backend(settings).unwrap());
    let mut open = gate.another();
    open.open();
    let [first, second] = open_streams(&*compute);
    let (source, mut x) = (upload(&*compute, &[8f32; N]).unwrap(), compute.alloc(70 << 20).unwrap());
    compute.upload(&9f32.to_le_bytes().repeat(N), &mut x).unwrap();
    let y = start_copy_on(&*first, &first.back_end_event().unwrap(), &gate, &x);
    drop(x);
    let on = second.begin(&second.back_end_event().unwrap()).unwrap();
    let mut z = on.alloc(70 << 20).unwrap();
    on.record_stream(&source);
    held(on, &open, &source, &mut z);
    second.end().unwrap();
    gate.open();
    assert_eq!(floats(&*compute, &y), [9.0; N]);
    compute.synchronize().unwrap();
}

/// Two streams of each of five ranks: more than the hardware queues of a GPU by default.
#[test]
fn streams_of_many_ranks_do_not_wait_for_each_other() {
    let Some(folder) = fake::gpu("connections=32") else { return };
    let gpu = CudaDevice::open(&folder.search_paths(), 0).unwrap();
    let (compute, mut gate) = rank_on(&gpu);
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let others = [(); 4].map(|()| gpu.backend(BackendConfig::default()).unwrap());
    for other in &others {
        other.begin_async().unwrap();
        other.end_async().unwrap();
    }
    // The second waits for the first.
    let copies = [start_copy(&*compute, &gate, &x), start_copy(&*compute, &gate, &x)];
    for other in &others {
        let own = upload(&**other, &[9f32; N]).unwrap();
        assert_eq!(floats(&**other, &minus_2_5(&**other, &own)), [6.5; N]);
        let comm = other.begin_async().unwrap().expect("a GPU has a communication stream");
        comm.record_stream(&own);
        let mut copy = comm.alloc(4 * N).unwrap();
        let all = Strides::contiguous(&[N]);
        let inputs = [Arg { buffer: &own, dtype: DType::F32, view: &all }];
        let mut outputs = [ArgMut { buffer: &mut copy, dtype: DType::F32, view: &all }];
        comm.launch(&COPY, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] }).unwrap();
        other.end_async().unwrap();
        assert_eq!(floats(&**other, &copy), [9.0; N]);
    }
    gate.open();
    copies.iter().for_each(|copy| assert_eq!(floats(&*compute, copy), [9.0; N]));
}

/// Pending blocks of a collective start before those of computations.
#[test]
fn communication_stream_has_the_highest_priority() {
    let Some(folder) = fake::gpu("") else { return };
    let gpu = tests::backend(&folder);
    gpu.begin_async().unwrap();
    gpu.end_async().unwrap();
    assert_eq!(folder.stream_priorities(), [0, -5]);
}

#[test]
fn graphs_and_collectives_wait_for_each_other() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let error = compute.capture(&mut || compute.begin_async().map(drop), &mut || ()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "graph capture: a graph cannot contain work that records an event for other back ends"
    );
    let (mut y, mut z) = (start_copy(&*compute, &gate, &x), compute.alloc(4 * N).unwrap());
    let graph = compute.capture(&mut || twice(&*compute, &y, &mut z, N, 1.0), &mut || ()).unwrap();
    compute.replay(&graph).unwrap();
    gate.open();
    assert_eq!(floats(&*compute, &z), [6.5; N]);
    let mut gate = gate.another();
    let copy = start_copy(&*compute, &gate, &z);
    twice(&*compute, &x, &mut y, N, 2.0).unwrap();
    // The graph writes the input of the collective.
    compute.replay(&graph).unwrap();
    gate.open();
    assert_eq!((floats(&*compute, &copy), floats(&*compute, &z)), (vec![6.5; N], vec![13.0; N]));
    let x = upload(&*compute, &[2f32]).unwrap();
    let comm = compute.begin_async().unwrap().expect("a GPU has a communication stream");
    assert!(comm.upload(&[0], &mut comm.alloc(4).unwrap()).is_err());
    assert!(comm.download(&x, &mut [0]).is_err());
    compute.end_async().unwrap();
}

/// The arguments of several microbatches are uploaded while the GPU still computes the first.
#[test]
fn small_uploads_do_not_wait_for_the_gpu() {
    let Some(folder) = fake::gpu("") else { return };
    let (compute, mut gate) = rank(&folder);
    let x = upload(&*compute, &[9f32; N]).unwrap();
    let mut y = compute.alloc(4 * N).unwrap();
    held(&*compute, &gate, &x, &mut y);
    let uploads: Vec<Buffer> = (0..10).map(|i| upload(&*compute, &[i as f32; 80_000]).unwrap()).collect();
    gate.open();
    assert_eq!(floats(&*compute, &y), [9.0; N]);
    for (i, buffer) in uploads.iter().enumerate() {
        assert_eq!(download::<f32>(&*compute, buffer, 80_000).unwrap(), [i as f32; 80_000]);
    }
}
