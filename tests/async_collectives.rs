//! Asynchronous collectives on a communication stream, on the fake GPU: results, training losses, and overlap with computation.

use crate::cli::Folder;
use crate::fake_gpu;
use approx::relative_eq;
use shardgrad::dist::{AxisSet, Call, Origin, Phase, ReduceOp};
use shardgrad::kernels::gpu::{Grid, GridArg};
use shardgrad::kernels::op::copy::COPY;
use shardgrad::kernels::{
    Arg, ArgMut, Backend, Bound, Buffer, GpuCode, Kernel, Launch, Strides, download, upload,
};
use shardgrad::nn::{Gpt2, Gpt2Config, LanguageModel, ModelConfig};
use shardgrad::prelude::*;

use std::ops::Range;
use std::panic::Location;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Elements of a collective: enough for an all-reduce in chunks on four ranks.
const N: usize = 10_000;

#[track_caller]
fn over_tp(rank: &Rank) -> Call<'static> {
    let axes: AxisSet = rank.mesh().axes().collect();
    Call {
        axes,
        dtype: DType::F32,
        phase: Phase::Forward,
        path: "",
        origin: Origin::default(),
        site: Location::caller(),
    }
}

fn up(rank: &Rank, value: impl Fn(usize) -> f32) -> Result<Buffer> {
    let data: Vec<f32> = (0..N).map(value).collect();
    Ok(upload(&**rank.backend(), &data)?)
}

fn down(rank: &Rank, x: &Buffer, numel: usize) -> Result<Vec<f32>> {
    Ok(download(&**rank.backend(), x, numel)?)
}

/// Launches a kernel with one output on whole buffers.
fn launch(on: &dyn Backend, kernel: &Kernel, inputs: &[(&Buffer, usize)]) -> Result<Buffer> {
    let mut y = on.alloc(4 * N)?;
    let views: Vec<Strides> = inputs.iter().map(|(_, numel)| Strides::contiguous(&[*numel])).collect();
    let arg = |((buffer, _), view)| Arg { buffer, dtype: DType::F32, view };
    let inputs: Vec<Arg<'_>> = inputs.iter().copied().zip(&views).map(arg).collect();
    let to = Strides::contiguous(&[N]);
    let mut outputs = [ArgMut { buffer: &mut y, dtype: DType::F32, view: &to }];
    on.launch(kernel, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] })?;
    Ok(y)
}

/// Issues all kinds of collectives. Results are read at once, later, and by other collectives; arguments are overwritten and freed at once, and
/// their memory is reused.
fn calls(rank: &Rank) -> Result<Vec<Vec<f32>>> {
    let (call, own, mut results) = (over_tp(rank), rank.backend(), Vec::new());
    let (size, me, counts) = (rank.mesh().num_ranks(), rank.index(), vec![N / 4; 4]);
    for round in 0..4 {
        let value = |i: usize| ((i * (me + 3) + 7 * round) % 101) as f32 * 0.37;
        let mut x = up(rank, value)?;
        let sum = rank.all_reduce(&call, &x, N, ReduceOp::Sum)?;
        own.upload(&[0x77; 4 * N], &mut x)?;
        results.push(down(rank, &sum, N)?);
        let x = up(rank, value)?;
        let later = rank.all_reduce(&call, &x, N, ReduceOp::Max)?;
        drop(x);
        let junk: Vec<Buffer> = (0..3).map(|_| up(rank, |_| 7e7)).collect::<Result<_>>()?;
        let part = rank.reduce_scatter(&call, &later, &counts)?;
        let whole = rank.all_gather(&call, &part, &counts)?;
        let few = rank.all_reduce(&call, &whole, 5, ReduceOp::Min)?;
        rank.send(&call, &whole, N, (me + 1) % size)?;
        let copied = launch(&**own, &COPY, &[(&whole, N)])?;
        drop(whole);
        let received = rank.recv(&call, N, (me + size - 1) % size)?;
        let exchanged = rank.all_to_all(&call, &copied, &counts, &counts)?;
        drop(copied);
        let root = up(rank, value)?;
        let given = rank.broadcast(&call, (me == round).then_some(&root), N, round)?;
        drop((root, junk));
        let other = up(rank, |_| -7e7)?;
        for (result, numel) in
            [(later, N), (part, N / 4), (few, 5), (received, N), (exchanged, N), (given, N)]
        {
            results.push(down(rank, &result, numel)?);
        }
        drop(other);
    }
    rank.barrier(&call)?;
    Ok(results)
}

fn world(mesh: &str) -> World {
    World::new(Mesh::parse(mesh).unwrap()).threads(1)
}

#[test]
fn async_collectives_match_the_cpu_and_failed_worlds_end() {
    let folder = Folder::new("async-calls");
    let Some(card) = fake_gpu::open(&folder) else { return };
    let on_cpu = world("tp=4").launch(calls).unwrap();
    assert!(world("tp=4").on_device(card.provider.clone()).launch(calls).unwrap() == on_cpu);
    let broken = |rank: &Rank| {
        let x = up(rank, |i| i as f32)?;
        let y = rank.all_reduce(&over_tp(rank), &x, N, ReduceOp::Sum)?;
        drop(x);
        if rank.index() == 2 {
            return Err(Error::new(Kind::Config, "enough"));
        }
        // Two collectives are in flight here, one of which never completes.
        rank.all_gather(&over_tp(rank), &y, &[N / 4; 4]).inspect_err(|_| {
            assert_eq!(download::<f32>(&**rank.backend(), &y, N).unwrap()[1], 4.0);
        })?;
        Ok(())
    };
    let error = world("tp=4").on_device(card.provider.clone()).launch(broken).unwrap_err();
    assert_eq!((error.kind(), error.message()), (Kind::Config, "enough"));
    assert!(world("tp=4").on_device(card.provider.clone()).launch(calls).unwrap() == on_cpu);
}

/// Two streams for each of eight ranks do not share hardware queues.
#[test]
fn command_line_has_hardware_queues_for_many_ranks() {
    let folder = Folder::new("hardware-queues");
    let Some(_gpu) = fake_gpu::open(&folder) else { return };
    let number_of_queues = |set: Option<&str>| {
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
        doctor.arg("doctor").env_remove("CUDA_DEVICE_MAX_CONNECTIONS");
        ["CUDA", "NVRTC", "CUBLASLT"].iter().for_each(|library| {
            doctor.env(format!("SHARDGRAD_{library}_PATH"), &folder.0);
        });
        doctor.envs(set.map(|number| ("CUDA_DEVICE_MAX_CONNECTIONS", number)));
        let output = doctor.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read_to_string(folder.path("connections.txt")).unwrap()
    };
    assert_eq!(number_of_queues(None), "32");
    assert_eq!(number_of_queues(Some("12")), "12");
}

/// y = x as soon as the gate is 1; y = -1 after ten minutes, which are more than a busy machine keeps the test waiting.
static GATED_COPY: Kernel = Kernel {
    name: "gated_copy",
    reference: |_, _| unreachable!("only the GPU runs it"),
    cpu: None,
    gpu: Some(GpuCode {
        source: "extern \"C\" __global__ void gated_copy(const float *gate, const float *x, float *y, int n) {\n\
                if (threadIdx.x != 0) return;\n\
                const volatile float *at = gate;\n\
                for (int naps = 0; *at != 1.f && naps < 600000; ++naps) __nanosleep(1000000);\n\
                for (int i = 0; i < n; ++i) y[i] = *at == 1.f ? x[i] : -1.f;\n\
            }\n",
        plan: |launch, plan| {
            let n = GridArg::I32(launch.outputs[0].view.numel() as i32);
            let args = vec![GridArg::Input(0), GridArg::Input(1), GridArg::Output(0), n];
            let (defines, blocks) = (Vec::new(), [1; 3]);
            plan.grid(Grid { entry: "gated_copy", defines, blocks, threads: 32, shared_bytes: 0, args });
            Ok(())
        },
    }),
    flops: |_| 0,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

#[test]
fn computation_overlaps_a_delayed_all_reduce() {
    let folder = Folder::new("async-delayed");
    let Some(card) = fake_gpu::open(&folder) else { return };
    let keeper = card.provider.backend(shardgrad::kernels::BackendConfig::default()).unwrap();
    let gate = |value: f32| upload(&*keeper, &[value]).unwrap();
    let (open, closed) = (gate(1.0), Mutex::new(gate(0.0)));
    keeper.synchronize().unwrap();
    let is_opened = AtomicBool::new(false);
    let sums = world("tp=2").on_device(card.provider.clone()).launch(|rank| {
        let own = &**rank.backend();
        let x = up(rank, |i| i as f32)?;
        // All kernels are compiled before one waits.
        let copy = launch(own, &GATED_COPY, &[(&open, 1), (&x, N)])?;
        rank.all_reduce(&over_tp(rank), &copy, N, ReduceOp::Sum)?;
        launch(own, &COPY, &[(&x, N)])?;
        own.synchronize()?;
        rank.barrier(&over_tp(rank))?;
        // Rank 1 contributes the delayed operand.
        let late = match rank.index() {
            1 => launch(own, &GATED_COPY, &[(&closed.lock().unwrap(), 1), (&x, N)])?,
            _ => launch(own, &COPY, &[(&x, N)])?,
        };
        let sum = rank.all_reduce(&over_tp(rank), &late, N, ReduceOp::Sum)?;
        if rank.index() == 0 {
            let next = launch(own, &COPY, &[(&late, N)])?;
            assert_eq!(down(rank, &next, N)?[7], 7.0);
            is_opened.store(true, Ordering::Relaxed);
            keeper.upload(&1f32.to_le_bytes(), &mut closed.lock().unwrap())?;
        }
        down(rank, &sum, N)
    });
    let expected: Vec<f32> = (0..N).map(|i| 2.0 * i as f32).collect();
    assert!(is_opened.load(Ordering::Relaxed));
    assert!(
        sums.unwrap().iter().all(|sum| *sum == expected),
        "the all-reduce completed after the gate was opened"
    );
}

const ROWS: usize = 4;
const SEQ: usize = 8;
const VOCAB: usize = 19;

fn config() -> Gpt2Config {
    Gpt2Config { attn_pdrop: 0.0, ..Gpt2Config::new(VOCAB, SEQ, 16, 2, 2).with_dropout(0.0) }
}

/// Inputs and next tokens of a step.
fn read(rank: &Rank, step: u64, rows: Range<usize>) -> Result<Vec<Tensor>> {
    let layout = Gpt2::plan(&config()).batch_layout(rank.mesh(), DType::I64, &[rows.len(), SEQ])?;
    let token = |row: usize, at: usize| ((at * at + 5 * row + 3 * step as usize) % VOCAB) as i64;
    let batch = |offset: usize| {
        let all: Vec<i64> =
            rows.clone().flat_map(|row| (0..SEQ).map(move |at| token(row, at + offset))).collect();
        Tensor::from_global(rank, &layout, &all)
    };
    Ok(vec![batch(0)?, batch(1)?])
}

/// Returns loss and gradient norm of some steps.
fn steps(world: World) -> Vec<[f64; 2]> {
    let mut ranks = world
        .launch(|rank| {
            let config = ModelConfig::from(config());
            let (model, plan) = (LanguageModel::new(&config), LanguageModel::plan(&config));
            let settings =
                TrainerConfig { microbatches: 2, seed: 3, clip: Some(0.5), ..TrainerConfig::new(ROWS) };
            let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
            let mut trainer = Trainer::new(rank, model, &plan, AdamW::new(3e-3), settings, read, loss)?;
            (0..3).map(|_| trainer.step().map(|s| [s.loss, s.grad_norm])).collect::<Result<Vec<_>>>()
        })
        .unwrap();
    ranks.swap_remove(0)
}

#[test]
fn gpu_training_losses_match_the_cpu_on_meshes() {
    let folder = Folder::new("async-steps");
    let Some(card) = fake_gpu::open(&folder) else { return };
    for mesh in ["dp=2,tp=2", "pp=2"] {
        let (there, here) = (steps(world(mesh).on_device(card.provider.clone())), steps(world(mesh)));
        let [on_gpu, on_cpu] = [&there, &here].map(|steps| steps.as_flattened());
        assert!(relative_eq!(on_gpu, on_cpu, max_relative = 1e-6), "{mesh}: {there:?} {here:?}");
    }
}
