//! In-place gradient accumulation: matmuls that add to the gradient of earlier microbatches are launched and change no bits.

use crate::training_run::Run;
use shardgrad::kernels::{
    Backend, BackendConfig, BackendProvider, Buffer, Cost, CpuProvider, Device, Kernel, KernelError, Launch,
    MemoryStats,
};
use shardgrad::nn::{LlamaConfig, LlamaKind};
use shardgrad::prelude::*;
use shardgrad::tensor::training_step::anomaly_report::find_first_non_finite;
use shardgrad_testing::sample;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Width and vocabulary size of the models.
const WIDTH: usize = 12;
const VOCAB: usize = 19;

/// Launched kernels with the shape of their first output.
type Launches = Arc<Mutex<Vec<(&'static str, Vec<usize>)>>>;

/// The CPU back end, which records launches.
#[derive(Clone, Debug, Default)]
struct RecordingBackend(Launches);

impl BackendProvider for RecordingBackend {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn backend(&self, settings: BackendConfig) -> std::result::Result<Arc<dyn Backend>, KernelError> {
        Ok(Arc::new(RecordingRank { host: CpuProvider.backend(settings)?, launches: self.0.clone() }))
    }
}

#[derive(Debug)]
struct RecordingRank {
    host: Arc<dyn Backend>,
    launches: Launches,
}

impl Backend for RecordingRank {
    fn device(&self) -> Device {
        self.host.device()
    }

    fn alloc(&self, bytes: usize) -> std::result::Result<Buffer, KernelError> {
        self.host.alloc(bytes)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> std::result::Result<(), KernelError> {
        let extents = launch.outputs[0].view.shape.to_vec();
        self.launches.lock().unwrap_or_else(PoisonError::into_inner).push((kernel.name, extents));
        self.host.launch(kernel, launch)
    }

    fn memory(&self) -> MemoryStats {
        self.host.memory()
    }

    fn cost(&self) -> Cost {
        self.host.cost()
    }

    fn num_threads(&self) -> usize {
        self.host.num_threads()
    }
}

/// Result of some steps: bits of the parameters per rank, and number of launches by kernel and output shape.
struct StepTrace {
    bits: Vec<Vec<Vec<u64>>>,
    launches: BTreeMap<(&'static str, Vec<usize>), usize>,
}

impl StepTrace {
    /// Returns the launches of a kernel with an output at least as large as the smallest weight, except the embedding.
    fn count(&self, kernel: &str) -> usize {
        let of = |((name, extents), _): &(&(&str, Vec<usize>), &usize)| {
            let is_weight = extents.iter().product::<usize>() >= WIDTH * WIDTH && **extents != [VOCAB, WIDTH];
            *name == kernel && is_weight
        };
        self.launches.iter().filter(of).map(|(_, count)| count).sum()
    }
}

/// Runs some steps on a mesh. With anomaly detection, cotangents are added one by one.
fn steps(run: &Run, mesh: &str, detects_anomalies: bool) -> StepTrace {
    let recording = RecordingBackend::default();
    let world = World::new(Mesh::parse(mesh).unwrap()).threads(2).on_device(Arc::new(recording.clone()));
    let bits = world.launch(|rank| {
        let mut trainer = run.trainer(rank)?;
        let here = trainer.rank().clone();
        for _ in 0..run.steps {
            let mut step = || trainer.step().map(drop);
            if detects_anomalies { find_first_non_finite(&here, step).map(drop)? } else { step()? }
        }
        let bits = |param: &Param| Ok(param.tensor().to_local_f64()?.iter().map(|x| x.to_bits()).collect());
        trainer
            .model()
            .params()
            .iter()
            .filter(|param| param.is_local())
            .map(bits)
            .collect::<Result<Vec<Vec<u64>>>>()
    });
    let bits = bits.unwrap_or_else(|e| panic!("{mesh}: {e}"));
    let mut launches = BTreeMap::new();
    let seen = recording.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    seen.into_iter().for_each(|launch| *launches.entry(launch).or_insert(0) += 1);
    StepTrace { bits, launches }
}

/// Models with and without biases, and with tied and untied embeddings.
fn runs() -> Vec<(&'static str, Run)> {
    let gpt2 = Run { microbatches: 3, ..Run::new(2) };
    let llama = LlamaConfig::new(LlamaKind::Llama, VOCAB, 8, [WIDTH, 20], 4, [3, 3]);
    let llama = Run { config: llama.into(), plan: Plan::llama(), ..gpt2.clone() };
    let with = |run: &Run, dtype, recompute| Run { dtype, recompute, ..run.clone() };
    vec![
        ("gpt2 f32", with(&gpt2, DType::F32, false)),
        ("gpt2 f64", with(&gpt2, DType::F64, false)),
        ("gpt2 bf16", with(&gpt2, DType::BF16, false)),
        ("gpt2 f32 recomputed", with(&gpt2, DType::F32, true)),
        ("llama f32", with(&llama, DType::F32, false)),
        ("llama bf16", with(&llama, DType::BF16, false)),
    ]
}

/// Compares steps with those whose cotangents are added one by one. 16-bit cotangents are always added separately.
fn compare_accumulation(name: &str, run: &Run, mesh: &str) {
    let (added, apart) = (steps(run, mesh, false), steps(run, mesh, true));
    let what = format!("{name} on {mesh}");
    assert!(added.bits == apart.bits, "{what}: parameters differ");
    if !mesh.contains("tp") && run.dtype != DType::BF16 {
        assert_eq!(added.count("accumulate"), 0, "{what}: {:?}", added.launches);
        assert!(added.count("product_add") > apart.count("product_add"), "{what}");
    }
}

#[test]
fn accumulating_matmul_changes_no_bits() {
    for (number, (name, run)) in runs().into_iter().enumerate() {
        for mesh in sample(number, ["", "dp=2", "tp=2", "tp=3", "dp=2,tp=2"]) {
            compare_accumulation(name, &run, mesh);
        }
    }
}

#[test]
fn accumulating_matmul_changes_no_bits_on_pipeline_stages() {
    let pipelines = [
        ("pp=2", "1f1b"),
        ("pp=2", "zb-h1"),
        ("pp=2,dp=2", "zb-v"),
        ("pp=3", "interleaved"),
        ("pp=2,tp=2", "zb-h2"),
    ];
    for (number, (name, run)) in runs().into_iter().enumerate() {
        for (mesh, schedule) in sample(number, pipelines) {
            let run = Run { plan: run.plan.clone().pipeline_schedule(schedule), ..run.clone() };
            compare_accumulation(&format!("{name}, {schedule}"), &run, mesh);
        }
    }
}
