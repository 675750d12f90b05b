//! CommStream of a rank on a fake card. Work is held back by a gate that the test opens, so that what must wait for it and what need
//! not is seen without any luck of timing.

use super::fake::{self, Folder};
use super::tests::twice;
use super::{CudaDevice, tests};
use crate::backend::{Backend, download, upload};
use crate::buffer::Buffer;
use crate::cpu::Pool;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Grid, GridArg};
use crate::kernel::{Arg, ArgMut, Bound, GpuCode, Kernel, Launch};
use crate::provider::{BackendConfig, BackendProvider};
use crate::strides::Strides;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const N: usize = 300;

fn nothing(_: &Pool, _: &mut Launch<'_>) -> Result<(), KernelError> {
    unreachable!("only the card runs it")
}

/// y = x as soon as the gate, which another stream writes, is 1; y = -1 where that does not come to pass for seconds.
static HELD: Kernel = Kernel {
    name: "held",
    reference: nothing,
    cpu: None,
    gpu: Some(GpuCode {
        source: "extern \"C\" __global__ void held(const float *gate, const float *x, float *y, int n) {\n\
                if (threadIdx.x != 0) return;\n\
                const volatile float *at = gate;\n\
                for (i64 spins = 0; *at != 1.f && spins < 4000000000; ++spins);\n\
                for (int i = 0; i < n; ++i) y[i] = *at == 1.f ? x[i] : -1.f;\n\
            }\n",
        plan: |launch, plan| {
            let n = GridArg::I32(launch.outputs[0].view.numel() as i32);
            let args = vec![GridArg::Input(0), GridArg::Input(1), GridArg::Output(0), n];
            let (defines, blocks) = (Vec::new(), [1; 3]);
            plan.grid(Grid { entry: "held", defines, blocks, threads: 32, shared_bytes: 0, args });
            Ok(())
        },
    }),
    flops: |_| 0,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

/// A gate that is closed, and the rank that opens it.
struct Gate {
    keeper: Arc<dyn Backend>,
    buffer: Buffer,
}

impl Gate {
    fn new(card: &CudaDevice) -> Gate {
        Gate::of(&card.backend(BackendConfig::default()).unwrap())
    }

    fn of(keeper: &Arc<dyn Backend>) -> Gate {
        let buffer = upload(&**keeper, &[0f32]).unwrap();
        keeper.synchronize().unwrap();
        Gate { keeper: keeper.clone(), buffer }
    }

    /// Another one, closed.
    fn another(&self) -> Gate {
        Gate::of(&self.keeper)
    }

    /// Opens it, after a while in which all that does not wait for it is done.
    fn open(&mut self) {
        thread::sleep(Duration::from_millis(60));
        self.keeper.upload(&1f32.to_le_bytes(), &mut self.buffer).unwrap();
    }
}

/// A rank whose kernels are compiled, and a gate on the same card.
fn rank(folder: &Folder) -> (Arc<dyn Backend>, Gate) {
    let card = CudaDevice::open(&folder.places(), 0).unwrap();
    let own = card.backend(BackendConfig::default()).unwrap();
    let mut open = Gate::new(&card);
    open.open();
    let x = upload(&*own, &[1f32; N]).unwrap();
    let mut y = own.alloc(4 * N).unwrap();
    held(&*own, &open, &x, &mut y);
    twice(&*own, &x, &mut y, N, 1.0).unwrap();
    own.synchronize().unwrap();
    (own, Gate::new(&card))
}

/// y = x, held back by a gate.
fn held(on: &dyn Backend, gate: &Gate, x: &Buffer, y: &mut Buffer) {
    let (one, all) = (Strides::contiguous(&[1]), Strides::contiguous(&[N]));
    let arg = |buffer, view| Arg { buffer, dtype: DType::F32, view };
    let inputs = [arg(&gate.buffer, &one), arg(x, &all)];
    let mut outputs = [ArgMut { buffer: y, dtype: DType::F32, view: &all }];
    on.launch(&HELD, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] }).unwrap();
}

/// A flight that copies, held back by a gate.
fn flight(own: &dyn Backend, gate: &Gate, x: &Buffer) -> Buffer {
    let flight = own.begin_async().unwrap().expect("cards have flights");
    flight.record_stream(x);
    let mut y = flight.alloc(4 * N).unwrap();
    held(flight, gate, x, &mut y);
    own.end_async().unwrap();
    y
}

/// x + 1.5 - 4.
fn less(own: &dyn Backend, x: &Buffer) -> Buffer {
    let mut y = own.alloc(4 * N).unwrap();
    twice(own, x, &mut y, N, 1.0).unwrap();
    y
}

fn floats(on: &dyn Backend, buffer: &Buffer) -> Vec<f32> {
    download(on, buffer, N).unwrap()
}

#[test]
fn what_is_given_next_is_done_while_a_flight_is_held_back() {
    let Some(folder) = fake::card("") else { return };
    let (own, mut gate) = rank(&folder);
    let x = upload(&*own, &[9f32; N]).unwrap();
    let y = flight(&*own, &gate, &x);
    // What the flight reads may be read.
    assert_eq!(floats(&*own, &less(&*own, &x)), [6.5; N]);
    gate.open();
    assert_eq!(floats(&*own, &y), [9.0; N]);
}

#[test]
fn a_flight_begins_behind_what_was_given_before() {
    let Some(folder) = fake::card("") else { return };
    let (own, mut gate) = rank(&folder);
    let mut open = gate.another();
    open.open();
    let x = upload(&*own, &[9f32; N]).unwrap();
    let mut filled = own.alloc(4 * N).unwrap();
    held(&*own, &gate, &x, &mut filled);
    let y = flight(&*own, &open, &filled);
    gate.open();
    assert_eq!(floats(&*own, &y), [9.0; N]);
}

#[test]
fn what_a_flight_writes_is_read_behind_it() {
    let Some(folder) = fake::card("") else { return };
    let (own, mut gate) = rank(&folder);
    let x = upload(&*own, &[9f32; N]).unwrap();
    let y = flight(&*own, &gate, &x);
    let z = less(&*own, &y);
    gate.open();
    assert_eq!(floats(&*own, &z), [6.5; N]);
    let mut gate = gate.another();
    let y = flight(&*own, &gate, &x);
    thread::scope(|s| {
        s.spawn(|| gate.open());
        assert_eq!(floats(&*own, &y), [9.0; N], "a copy to the host reads too");
    });
}

#[test]
fn what_a_flight_reads_or_writes_is_written_behind_it() {
    let Some(folder) = fake::card("") else { return };
    let (own, mut gate) = rank(&folder);
    let [mut x, mut other] = [9f32, 8.0].map(|value| upload(&*own, &[value; N]).unwrap());
    let [y, z] = [&x, &other].map(|x| flight(&*own, &gate, x));
    let same = less(&*own, &upload(&*own, &[7f32; N]).unwrap());
    let mut overwritten = flight(&*own, &gate, &x);
    own.upload(&[0x11; 4 * N], &mut x).unwrap();
    twice(&*own, &same, &mut other, N, 1.0).unwrap();
    twice(&*own, &same, &mut overwritten, N, 1.0).unwrap();
    gate.open();
    assert_eq!((floats(&*own, &y), floats(&*own, &z)), (vec![9.0; N], vec![8.0; N]));
    assert_eq!((floats(&*own, &other), floats(&*own, &overwritten)), (vec![2.0; N], vec![2.0; N]));
    assert_eq!(floats(&*own, &x), [f32::from_le_bytes([0x11; 4]); N]);
}

#[test]
fn what_a_flight_uses_is_not_used_again_before_it_is_done() {
    let Some(folder) = fake::card("") else { return };
    let (own, mut gate) = rank(&folder);
    let before = own.memory().in_use_bytes;
    let x = upload(&*own, &[9f32; N]).unwrap();
    let (y, unread) = (flight(&*own, &gate, &x), flight(&*own, &gate, &x));
    drop((x, unread));
    let junk: Vec<Buffer> = (0..20).map(|_| upload(&*own, &[5f32; N]).unwrap()).collect();
    gate.open();
    assert_eq!(floats(&*own, &y), [9.0; N]);
    own.synchronize().unwrap();
    assert!(junk.iter().all(|block| floats(&*own, block) == [5.0; N]));
    drop((y, junk));
    assert_eq!(own.memory().in_use_bytes, before, "all of it comes back");
}

#[test]
fn flights_come_one_after_another_and_each_is_waited_for_by_itself() {
    let Some(folder) = fake::card("") else { return };
    let (own, mut gate) = rank(&folder);
    let mut late = gate.another();
    let x = upload(&*own, &[9f32; N]).unwrap();
    let first = flight(&*own, &gate, &x);
    let second = flight(&*own, &late, &first);
    gate.open();
    assert_eq!(floats(&*own, &less(&*own, &first)), [6.5; N]);
    late.open();
    assert_eq!(floats(&*own, &second), [9.0; N]);
}

#[test]
fn the_end_of_a_rank_and_the_marks_that_it_shows_are_behind_its_flights() {
    let Some(folder) = fake::card("") else { return };
    let (own, mut gate) = rank(&folder);
    let x = upload(&*own, &[9f32; N]).unwrap();
    let y = flight(&*own, &gate, &x);
    let reader = tests::backend(&folder);
    own.record_event().and_then(|point| reader.wait_event(&point)).unwrap();
    let z = less(&*reader, &y);
    gate.open();
    assert_eq!(floats(&*reader, &z), [6.5; N]);
    let is_open = AtomicBool::new(false);
    let mut gate = gate.another();
    let y = flight(&*own, &gate, &x);
    drop(x);
    thread::scope(|s| {
        s.spawn(|| {
            thread::sleep(Duration::from_millis(60));
            is_open.store(true, Ordering::Relaxed);
            gate.open();
        });
        own.synchronize().unwrap();
        assert!(is_open.load(Ordering::Relaxed));
    });
    assert_eq!(floats(&*own, &y), [9.0; N]);
}

#[test]
fn flights_keep_no_more_memory_than_they_may() {
    let Some(folder) = fake::card("") else { return };
    let settings = BackendConfig { memory_bytes_max: 160 << 20, ..BackendConfig::default() };
    let own = CudaDevice::open(&folder.places(), 0).unwrap().backend(settings).unwrap();
    // What is kept is let go where there is no other memory.
    for _ in 0..3 {
        let x = own.alloc(70 << 20).unwrap();
        own.begin_async().unwrap().expect("cards have flights").record_stream(&x);
        own.end_async().unwrap();
    }
    own.synchronize().unwrap();
    let before = own.memory().in_use_bytes;
    for _ in 0..300 {
        let x = own.alloc(4 * N).unwrap();
        own.begin_async().unwrap().expect("cards have flights").record_stream(&x);
        own.end_async().unwrap();
    }
    let kept = own.memory().in_use_bytes - before;
    assert!((1..100 * 4 * N).contains(&kept), "{kept}");
}

#[test]
fn flights_and_captured_work_keep_out_of_each_others_way() {
    let Some(folder) = fake::card("") else { return };
    let (own, mut gate) = rank(&folder);
    let x = upload(&*own, &[9f32; N]).unwrap();
    let error = own.capture(&mut || own.begin_async().map(drop)).unwrap_err();
    assert_eq!(error.to_string(), "work that is being captured records an event for other back ends");
    let (mut y, mut z) = (flight(&*own, &gate, &x), own.alloc(4 * N).unwrap());
    let graph = own.capture(&mut || twice(&*own, &y, &mut z, N, 1.0)).unwrap();
    own.replay(&graph).unwrap();
    gate.open();
    assert_eq!(floats(&*own, &z), [6.5; N]);
    let mut gate = gate.another();
    let copy = flight(&*own, &gate, &z);
    twice(&*own, &x, &mut y, N, 2.0).unwrap();
    // It writes what the flight reads.
    own.replay(&graph).unwrap();
    gate.open();
    assert_eq!((floats(&*own, &copy), floats(&*own, &z)), (vec![6.5; N], vec![13.0; N]));
    let x = upload(&*own, &[2f32]).unwrap();
    let flight = own.begin_async().unwrap().expect("cards have flights");
    assert!(flight.upload(&[0], &mut flight.alloc(4).unwrap()).is_err());
    assert!(flight.download(&x, &mut [0]).is_err());
    own.end_async().unwrap();
}
