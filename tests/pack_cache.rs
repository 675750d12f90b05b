//! The pack cache: prepacked weights shared by the microbatches of a step change no bits and are dropped before the update.

use shardgrad::kernels::{
    Backend, BackendConfig, BackendProvider, Buffer, Cost, CpuProvider, Device, Kernel, KernelError, Launch,
    MemoryStats, PackCacheGuard,
};
use shardgrad::nn::model::{Gpt2, Gpt2Config};
use shardgrad::prelude::*;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const SEQ: usize = 8;
const ROWS: usize = 32;
/// Large enough that weights are packed instead of read in place.
const WIDTH: usize = 96;

/// The CPU back end, with the pack cache enabled or disabled.
#[derive(Debug)]
struct CountingBackend {
    caches_packed: bool,
    /// Number of optimizer launches while operands were cached, and number of cached buffers.
    counts: Arc<[AtomicUsize; 2]>,
}

#[derive(Debug)]
struct CountingRank {
    host: Arc<dyn Backend>,
    caches_packed: bool,
    held: Arc<AtomicUsize>,
    counts: Arc<[AtomicUsize; 2]>,
}

/// Decrements the count on drop.
struct CountedGuard(Arc<AtomicUsize>, #[expect(dead_code, reason = "it ends with this")] PackCacheGuard);

impl Drop for CountedGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl BackendProvider for CountingBackend {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn backend(&self, config: BackendConfig) -> Result<Arc<dyn Backend>, KernelError> {
        let (host, counts, held) = (CpuProvider.backend(config)?, self.counts.clone(), Arc::default());
        Ok(Arc::new(CountingRank { host, caches_packed: self.caches_packed, held, counts }))
    }
}

impl Backend for CountingRank {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, KernelError> {
        self.host.alloc(bytes)
    }

    fn launch(&self, kernel: &Kernel, launch: &mut Launch<'_>) -> Result<(), KernelError> {
        if kernel.name == "adamw" && self.held.load(Ordering::Relaxed) > 0 {
            self.counts[0].fetch_add(1, Ordering::Relaxed);
        }
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

    fn cache_packed(&self, buffer: &Buffer) -> PackCacheGuard {
        if !self.caches_packed {
            return PackCacheGuard::default();
        }
        self.held.fetch_add(1, Ordering::Relaxed);
        self.counts[1].fetch_add(1, Ordering::Relaxed);
        PackCacheGuard::new(CountedGuard(self.held.clone(), self.host.cache_packed(buffer)))
    }
}

/// Results of a run, of all ranks.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<f64>,
    bits: Vec<Vec<u64>>,
}

/// Peak bytes of the first rank, and its system allocations after each step.
struct Memory {
    peak: usize,
    system_allocs: Vec<usize>,
}

struct Run {
    mesh: &'static str,
    plan: Plan,
    dtype: DType,
    microbatches: usize,
    recompute: bool,
}

impl Run {
    fn new(mesh: &'static str) -> Run {
        Run { mesh, plan: Plan::gpt2(), dtype: DType::F32, microbatches: 4, recompute: false }
    }

    fn trained(&self, machine: CountingBackend) -> (Trained, Memory) {
        let world = World::new(Mesh::parse(self.mesh).unwrap()).threads(1).on_device(Arc::new(machine));
        let ranks = world.launch(|rank| self.on_rank(rank)).unwrap_or_else(|e| panic!("{}: {e}", self.mesh));
        let (trained, memory): (Vec<Trained>, Vec<Memory>) = ranks.into_iter().unzip();
        let memory = memory.into_iter().next().expect("a world has a rank");
        let losses = trained.iter().flat_map(|trained| trained.losses.clone()).collect();
        (Trained { losses, bits: trained.into_iter().flat_map(|trained| trained.bits).collect() }, memory)
    }

    fn on_rank(&self, rank: &Rank) -> Result<(Trained, Memory)> {
        let mut config = Gpt2Config::new(19, SEQ, WIDTH, 4, 2);
        (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) = (0.0, 0.0, 0.0);
        let settings = TrainerConfig {
            microbatches: self.microbatches,
            seed: 5,
            dtype: self.dtype,
            clip: Some(1.0),
            ..TrainerConfig::new(ROWS)
        };
        let read = |rank: &Rank, step: u64, rows: Range<usize>| {
            let layout = self.plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), SEQ])?;
            let token = |r: usize, t: usize| ((r * 5 + t * t + step as usize * 3) % 19) as i64;
            let of = |shift: usize| -> Vec<i64> {
                rows.clone().flat_map(|r| (0..SEQ).map(move |t| token(r, t + shift))).collect()
            };
            Ok(vec![Tensor::from_global(rank, &layout, &of(0))?, Tensor::from_global(rank, &layout, &of(1))?])
        };
        let loss = |model: &Gpt2, x: &[Var]| model.loss(&x[0], &x[1]);
        let model = Gpt2::new(&config).recompute(self.recompute);
        let mut trainer = Trainer::new(rank, model, &self.plan, AdamW::new(3e-3), settings, read, loss)?;
        let (mut losses, mut system_allocs) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            losses.push(trainer.step()?.loss);
            system_allocs.push(rank.backend().memory().num_system_allocs);
        }
        let here = trainer.model().params().iter().filter(|param| param.is_local());
        let bits = here.map(|param| {
            let numbers = param.tensor().to_local_f64()?;
            Ok(numbers.into_iter().map(f64::to_bits).collect())
        });
        let bits = bits.collect::<Result<_>>()?;
        let memory = Memory { peak: rank.backend().memory().peak_bytes, system_allocs };
        Ok((Trained { losses, bits }, memory))
    }

    /// Compares runs with and without the cache; returns the number of cached buffers and the difference of the peaks.
    fn compared(&self) -> (usize, isize) {
        let counts: Arc<[AtomicUsize; 2]> = Arc::default();
        let (with, memory) = self.trained(CountingBackend { caches_packed: true, counts: counts.clone() });
        let (without, before) =
            self.trained(CountingBackend { caches_packed: false, counts: Arc::default() });
        let what = format!("{} {} {}", self.mesh, self.dtype, self.microbatches);
        assert!(with == without, "{what}: {:?}, not {:?}", with.losses, without.losses);
        let [early, num_cached] = [0, 1].map(|i| counts[i].load(Ordering::Relaxed));
        assert_eq!(early, 0, "{what}: the cache is empty during updates");
        let steady = &memory.system_allocs[3..];
        // The number of pipeline messages in flight depends on timing.
        let is_settled = !self.mesh.starts_with("pp");
        assert!(!is_settled || steady.iter().all(|n| *n == steady[0]), "{what}: {:?}", memory.system_allocs);
        (num_cached, memory.peak as isize - before.peak as isize)
    }
}

#[test]
fn pack_cache_changes_no_bits() {
    // The weights of two blocks, packed in both orientations.
    let weights = (2 * 2 * 12 * WIDTH * WIDTH * 4) as isize;
    let (num_cached, more) = Run::new("").compared();
    assert!(num_cached > 0 && more > weights / 2, "{more} bytes are held beside {weights}");
    let (num_cached, more) = Run { microbatches: 1, ..Run::new("") }.compared();
    assert_eq!((num_cached, more), (0, 0), "one microbatch shares nothing");
    let recompute = Run { recompute: true, ..Run::new("") };
    let f64s = Run { dtype: DType::F64, ..Run::new("") };
    let bf16s = Run { dtype: DType::BF16, ..Run::new("") };
    let on_pipeline = |name: &str| Run { plan: Plan::gpt2().pipeline_schedule(name), ..Run::new("pp=2") };
    let pipelines = ["1f1b", "zb-h1", "interleaved"].map(on_pipeline);
    let split = ["dp=2", "tp=2"].map(Run::new);
    for run in [recompute, f64s, bf16s].into_iter().chain(split).chain(pipelines) {
        let (num_cached, _) = run.compared();
        assert!(num_cached > 0, "{}: packed operands are cached", run.mesh);
    }
}
