//! Products that add to what microbatches have added up before: they are launched, and they change no bit.

use crate::pipelines::Run;
use shardgrad::kernels::{
    Backend, BackendConfig, BackendProvider, Buffer, Cost, CpuProvider, Device, Kernel, KernelError, Launch,
    MemoryStats,
};
use shardgrad::nn::{LlamaConfig, LlamaKind};
use shardgrad::prelude::*;
use shardgrad::tensor::control::first_not_finite;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Of the models below: the width, and how many tokens there are.
const WIDTH: usize = 12;
const VOCAB: usize = 19;

/// Which kernels were launched, with the extents of their first outputs.
type Launches = Arc<Mutex<Vec<(&'static str, Vec<usize>)>>>;

/// The processor, which notes what it is asked for.
#[derive(Clone, Debug, Default)]
struct Noting(Launches);

impl BackendProvider for Noting {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn backend(&self, settings: BackendConfig) -> std::result::Result<Arc<dyn Backend>, KernelError> {
        Ok(Arc::new(OneRank { host: CpuProvider.backend(settings)?, launches: self.0.clone() }))
    }
}

#[derive(Debug)]
struct OneRank {
    host: Arc<dyn Backend>,
    launches: Launches,
}

impl Backend for OneRank {
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

/// What some steps leave: per rank the bits of the parameters, and how often each kernel was launched for which extents.
struct Left {
    bits: Vec<Vec<Vec<u64>>>,
    launches: BTreeMap<(&'static str, Vec<usize>), usize>,
}

impl Left {
    /// How often a kernel was launched for a matrix as large as the least weight, the table left out.
    fn count(&self, kernel: &str) -> usize {
        let of = |((name, extents), _): &(&(&str, Vec<usize>), &usize)| {
            let is_weight = extents.iter().product::<usize>() >= WIDTH * WIDTH && **extents != [VOCAB, WIDTH];
            *name == kernel && is_weight
        };
        self.launches.iter().filter(of).map(|(_, count)| count).sum()
    }
}

/// Takes some steps on a mesh. Where somebody watches, cotangents are added one by one.
fn steps(run: &Run, mesh: &str, is_watched: bool) -> Left {
    let noting = Noting::default();
    let world = World::new(Mesh::parse(mesh).unwrap()).threads(2).on(Arc::new(noting.clone()));
    let bits = world.launch(|rank| {
        let mut trainer = run.trainer(rank)?;
        let here = trainer.rank().clone();
        for _ in 0..run.steps {
            let mut step = || trainer.step(&[]).map(drop);
            if is_watched { first_not_finite(&here, step).map(drop)? } else { step()? }
        }
        let bits = |param: &Param| Ok(param.tensor().to_local_f64()?.iter().map(|x| x.to_bits()).collect());
        trainer
            .model()
            .params()
            .iter()
            .filter(|param| param.is_here())
            .map(bits)
            .collect::<Result<Vec<Vec<u64>>>>()
    });
    let bits = bits.unwrap_or_else(|e| panic!("{mesh}: {e}"));
    let mut launches = BTreeMap::new();
    let seen = noting.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    seen.into_iter().for_each(|launch| *launches.entry(launch).or_insert(0) += 1);
    Left { bits, launches }
}

/// Models whose weights have a bias or none, and whose table is used once or twice.
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

/// Compares steps with those whose cotangents are added one by one. Sums of cotangents that are narrower are added up as ever.
fn examine(name: &str, run: &Run, mesh: &str) {
    let (added, apart) = (steps(run, mesh, false), steps(run, mesh, true));
    let what = format!("{name} on {mesh}");
    assert!(added.bits == apart.bits, "{what}: parameters differ");
    if !mesh.contains("tp") && run.dtype != DType::BF16 {
        assert_eq!(added.count("accumulate"), 0, "{what}: {:?}", added.launches);
        assert!(added.count("product_add") > apart.count("product_add"), "{what}");
    }
}

#[test]
fn a_product_that_adds_changes_no_bit() {
    for (name, run) in runs() {
        for mesh in ["", "dp=2", "tp=2", "tp=3", "dp=2,tp=2"] {
            examine(name, &run, mesh);
        }
    }
}

#[test]
fn nor_does_one_on_a_stage_of_a_pipeline() {
    let pipelines = [
        ("pp=2", "1f1b"),
        ("pp=2", "zb-h1"),
        ("pp=2,dp=2", "zb-v"),
        ("pp=3", "interleaved"),
        ("pp=2,tp=2", "zb-h2"),
    ];
    for (name, run) in runs() {
        for (mesh, schedule) in pipelines {
            let run = Run { plan: run.plan.clone().schedule(schedule), ..run.clone() };
            examine(&format!("{name}, {schedule}"), &run, mesh);
        }
    }
}
