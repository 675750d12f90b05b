//! GPU benchmarks: kernels by bytes or FLOPs, and training steps of models with published throughput.
//! `benches/gpu.py` measures PyTorch on the same work, by the same names.

use super::kernel_case::{KernelCase, OperandLayout};
use super::measurement::{Bench, check};
use super::memory_bound::Sizes;
use super::training::Training;
use shardgrad::kernels::op::{attention, batched_matmul};
use shardgrad::kernels::{BackendConfig, BackendProvider, CpuProvider, DType, Device, Scalar, open};
use shardgrad::nn::{Gpt2Config, LlamaConfig};
use shardgrad::nn::{ModelConfig, Precision};
use shardgrad::{Error, Kind, Result};
use std::sync::Arc;

use DType::{BF16, F32};

/// Tokens of a GPT-2 batch, and vocabulary size padded to a multiple of 64, as is usual.
const TOKENS: usize = 32_768;
const VOCAB: usize = 50_304;

/// GPU memory below which half of Llama 3 8B is measured: parameters and gradients in bf16 and two moments in f32 are 12 bytes a parameter.
const WHOLE_LLAMA_BYTES: usize = 100 << 30;

/// Sizes of memory-bound kernels: at least 128 MiB, more than caches hold.
const LARGE: Sizes = Sizes {
    dtype: BF16,
    rows: [65_536, 1024],
    side: 8192,
    heads: [8, 4096, 32, 128],
    hidden: [8192, 14_336],
    logits: [TOKENS / 4, VOCAB],
    parameters: 128 << 20,
};

/// Benchmarks kernels; each is first checked against its reference on small operands.
pub(super) fn run(bench: &Bench) -> Result<()> {
    let gpu = open(bench.device)?.backend(BackendConfig::default())?;
    let host = CpuProvider.backend(BackendConfig::default())?;
    LARGE.small().cases().iter().try_for_each(|case| case.check(&*gpu, &*host, 1.0 / 64.0))?;
    let all = LARGE.cases().into_iter().chain(compute_bound_cases());
    all.into_iter().try_for_each(|case| case.measure(bench, "card_kernels", &*gpu))
}

/// A matmul of operands that may be transposed.
fn product([m, k, n]: [usize; 3], [a, b]: [OperandLayout; 2]) -> KernelCase {
    let letter = |layout: OperandLayout| if matches!(layout, OperandLayout::Transposed) { 't' } else { 'n' };
    let name = format!("matmul bf16 {m}x{k}x{n} {}{}", letter(a), letter(b));
    let operands = [(BF16, &[1, m, k][..]), (BF16, &[1, k, n][..])];
    let case = KernelCase::new(&name, &batched_matmul::BATCHED_MATMUL, operands, [(BF16, &[1, m, n])], &[]);
    KernelCase { by_flops: true, ..case.with_layout(0, a).with_layout(1, b) }
}

/// Causal attention, forward and backward.
fn causal_attention([b, t, g, r, c]: [usize; 5]) -> [KernelCase; 2] {
    let (q, k, rows) = ([b, t, g, r, c], [b, t, g, c], [b, t, g, r]);
    let scalars = [Scalar::Real(1.0 / (c as f64).sqrt()), Scalar::Int(1), Scalar::Int(0), Scalar::Int(0)];
    let name = |way: &str| format!("attention{way} bf16 {b}x{t}x{}x{c}, {g} key heads, causal", g * r);
    let forward = KernelCase::new(
        &name(""),
        &attention::FORWARD,
        [(BF16, &q), (BF16, &k), (BF16, &k)],
        [(BF16, &q), (F32, &rows)],
        &scalars,
    );
    let backward = KernelCase::new(
        &name(" gradient"),
        &attention::BACKWARD,
        [(BF16, &q), (BF16, &k), (BF16, &k), (BF16, &q), (F32, &rows), (BF16, &q)],
        [(BF16, &q), (BF16, &k), (BF16, &k)],
        &scalars,
    );
    [forward, backward].map(|case| KernelCase { by_flops: true, ..case })
}

/// Compute-bound kernels: matmuls and attention.
fn compute_bound_cases() -> Vec<KernelCase> {
    use OperandLayout::{Plain, Transposed};
    let nn = [Plain, Plain];
    let products = [
        ([8192, 8192, 8192], nn),
        ([4096, 4096, 4096], nn),
        ([TOKENS, 768, 2304], nn),
        ([TOKENS, 768, 3072], nn),
        ([TOKENS, 3072, 768], nn),
        ([TOKENS, 3072, 768], [Plain, Transposed]),
        ([768, TOKENS, 3072], [Transposed, Plain]),
        ([TOKENS, 768, VOCAB], [Plain, Transposed]),
    ];
    let mut cases: Vec<KernelCase> = products.map(|(dims, layouts)| product(dims, layouts)).into();
    for dims in [[32, 1024, 12, 1, 64], [4, 4096, 16, 1, 128], [4, 4096, 8, 4, 128], [1, 16_384, 16, 1, 128]]
    {
        cases.extend(causal_attention(dims));
    }
    cases
}

/// Benchmarks training steps of GPT-2 124M on 32 x 1024 tokens, parameters in f32, compute in bf16.
pub(super) fn run_gpt2(bench: &Bench) -> Result<()> {
    let name = "gpt2-124m";
    let preset =
        Gpt2Config::preset(name).ok_or_else(|| Error::new(Kind::Config, format!("no preset `{name}`")))?;
    let config = Gpt2Config { vocab_size: VOCAB, ..preset };
    let (precision, machine) = (Precision::mixed(BF16), Some(open(bench.device)?));
    let run = Training { precision, machine, ..Training::new(config, 32, 1024) };
    let losses = run.run()?.losses;
    check("the first loss", &losses[..1], &[(VOCAB as f64).ln()], 0.05)?;
    let case = "gpt2-124m bf16, 32 x 1024 tokens";
    run.report(bench, "card_steps", &format!("{case}, without graph capture"), &losses)?;
    Training { capture: true, ..run }.report(bench, "card_steps", case, &losses)?;
    Ok(())
}

/// Benchmarks training steps of Llama 3 8B on 4 x 4096 tokens, in bf16 with optimizer state in f32 and activation checkpointing: the whole
/// model, or fewer blocks where the memory of the GPU is smaller.
pub(super) fn run_llama(bench: &Bench) -> Result<()> {
    let machine = open(bench.device)?;
    let blocks_max = if memory_bytes(bench.device)? < WHOLE_LLAMA_BYTES { 16 } else { 32 };
    let mut outcome = Ok(());
    for blocks in [32, 16, 8].into_iter().filter(|blocks| *blocks <= blocks_max) {
        outcome = llama_of(blocks, bench, &machine);
        if !outcome.as_ref().is_err_and(|error| error.kind() == Kind::OutOfMemory) {
            break;
        }
    }
    outcome
}

/// Benchmarks training steps of Llama 3 8B with `blocks` of its 32 blocks.
fn llama_of(blocks: usize, bench: &Bench, machine: &Arc<dyn BackendProvider>) -> Result<()> {
    let name = "llama-8b";
    let preset =
        LlamaConfig::preset(name).ok_or_else(|| Error::new(Kind::Config, format!("no preset `{name}`")))?;
    let config = LlamaConfig { num_hidden_layers: blocks, ..preset };
    // Rows of the output layer are products of a row of norm sqrt(hidden_size) with independent weights.
    let variance = config.hidden_size as f64 * config.initializer_range.powi(2);
    let first = (config.vocab_size as f64).ln() + variance / 2.0;
    let (precision, recompute, machine) = (Precision::of(BF16), true, Some(machine.clone()));
    let config = ModelConfig::Llama(config);
    let run = Training { precision, recompute, machine, ..Training::new(config, 4, 4096) };
    let losses = run.run()?.losses;
    check("the first loss", &losses[..1], &[first], 0.05)?;
    let case = format!("llama-8b bf16, {blocks} of 32 blocks, 4 x 4096 tokens, recomputing");
    Training { capture: true, ..run }.report(bench, "card_steps", &case, &losses)?;
    Ok(())
}

/// Returns the bytes of memory of a GPU.
#[cfg(feature = "cuda")]
fn memory_bytes(gpu: Device) -> Result<usize> {
    use shardgrad::kernels::cuda::{Driver, SearchPaths};
    match gpu {
        Device::Cuda(number) => Ok(Driver::open(&SearchPaths::from_env())?.describe(number)?.memory_bytes),
        Device::Cpu | Device::Null => Ok(0),
    }
}

/// Returns the bytes of memory of a GPU; builds without the CUDA back end open none.
#[cfg(not(feature = "cuda"))]
fn memory_bytes(_: Device) -> Result<usize> {
    Ok(0)
}
