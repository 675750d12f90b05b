//! A training step of a GPT by candle, in f32 on the CPU: pre-norm blocks with biases, tanh GELU, learned positions,
//! untied output layer, AdamW. `benches/peers.py` runs it.

#![forbid(unsafe_code)]

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{AdamW, Embedding, Init, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use candle_nn::{loss, ops};
// A dependency only for its feature, which enables the matmuls of candle.
use gemm as _;
use peer_steps::{Benchmark, Shape};

const RANDOM: Init = Init::Randn { mean: 0.0, stdev: 0.02 };

/// Linear layer with weight `[fan_out, fan_in]` and optional bias.
fn linear(fan_in: usize, fan_out: usize, has_bias: bool, vars: VarBuilder<'_>) -> Result<Linear> {
    let weight = vars.get_with_hints((fan_out, fan_in), "weight", RANDOM)?;
    let bias = has_bias.then(|| vars.get_with_hints(fan_out, "bias", Init::Const(0.0))).transpose()?;
    Ok(Linear::new(weight, bias))
}

/// Layer norm from differentiable ops; the fused one of candle has no gradient.
struct Norm {
    weight: Tensor,
    bias: Tensor,
}

impl Norm {
    fn new(width: usize, vars: VarBuilder<'_>) -> Result<Norm> {
        let weight = vars.get_with_hints(width, "weight", Init::Const(1.0))?;
        Ok(Norm { weight, bias: vars.get_with_hints(width, "bias", Init::Const(0.0))? })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::layer_norm_slow(x, &self.weight, &self.bias, 1e-5)
    }
}

/// Pre-norm block: attention and MLP with residual connections.
struct Block {
    norms: [Norm; 2],
    fused: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(width: usize, vars: VarBuilder<'_>) -> Result<Block> {
        Ok(Block {
            norms: [Norm::new(width, vars.pp("norm1"))?, Norm::new(width, vars.pp("norm2"))?],
            fused: linear(width, 3 * width, true, vars.pp("fused"))?,
            out: linear(width, width, true, vars.pp("out"))?,
            up: linear(width, 4 * width, true, vars.pp("up"))?,
            down: linear(4 * width, width, true, vars.pp("down"))?,
        })
    }

    /// Maps `[rows * seq, width]` to the same shape: 2-D matmuls are faster in candle than batched ones.
    fn forward(&self, x: &Tensor, shape: &Shape, hidden: &Tensor) -> Result<Tensor> {
        let Shape { width, heads, seq, rows, .. } = *shape;
        let channels = width / heads;
        let fused =
            self.fused.forward(&self.norms[0].forward(x)?)?.reshape((rows, seq, 3, heads, channels))?;
        // q, k, v is the first dim, so that the gradient concatenates contiguous blocks.
        let split = fused.permute((2, 0, 3, 1, 4))?;
        let part = |which: usize| split.get(which)?.contiguous();
        let (query, key, value) = (part(0)?, part(1)?, part(2)?);
        let scores = (query.matmul(&key.t()?)? * (channels as f64).powf(-0.5))?.broadcast_add(hidden)?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&value)?;
        let mixed = mixed.transpose(1, 2)?.contiguous()?.reshape((rows * seq, width))?;
        let x = (x + self.out.forward(&mixed)?)?;
        // In candle, `gelu` is the tanh approximation.
        let inner = self.up.forward(&self.norms[1].forward(&x)?)?.gelu()?;
        &x + self.down.forward(&inner)?
    }
}

struct Gpt {
    tokens: Embedding,
    places: Tensor,
    blocks: Vec<Block>,
    norm: Norm,
    head: Linear,
    /// Returns the causal mask added to the scores: 0, or minus infinity for later tokens.
    hidden: Tensor,
    shape: Shape,
}

impl Gpt {
    fn new(shape: Shape, vars: VarBuilder<'_>) -> Result<Gpt> {
        let Shape { blocks, width, seq, vocab, .. } = shape;
        let later = |at: usize| if at % seq > at / seq { f32::NEG_INFINITY } else { 0.0 };
        let hidden: Vec<f32> = (0..seq * seq).map(later).collect();
        Ok(Gpt {
            tokens: Embedding::new(vars.get_with_hints((vocab, width), "tokens", RANDOM)?, width),
            places: vars.get_with_hints((seq, width), "places", RANDOM)?,
            blocks: (0..blocks).map(|i| Block::new(width, vars.pp(i))).collect::<Result<_>>()?,
            norm: Norm::new(width, vars.pp("norm"))?,
            head: linear(width, vocab, false, vars.pp("head"))?,
            hidden: Tensor::from_vec(hidden, (seq, seq), vars.device())?,
            shape,
        })
    }

    /// Returns the mean cross entropy of targets `[rows * seq]` given `ids` `[rows, seq]`.
    fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let Shape { width, seq, rows, .. } = self.shape;
        let x = self.tokens.forward(ids)?.broadcast_add(&self.places)?.reshape((rows * seq, width))?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x, &self.shape, &self.hidden))?;
        loss::cross_entropy(&self.head.forward(&self.norm.forward(&x)?)?, targets)
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let asked = Benchmark::of(std::env::args().skip(1))?;
    let Shape { seq, rows, .. } = asked.shape;
    let vars = VarMap::new();
    let gpt = Gpt::new(asked.shape, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let rates = ParamsAdamW { lr: 1e-3, weight_decay: 0.1, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(vars.all_vars(), rates)?;
    let [ids, targets] = asked.shape.batch();
    let ids = Tensor::from_vec(ids, (rows, seq), &Device::Cpu)?;
    let targets = Tensor::from_vec(targets, rows * seq, &Device::Cpu)?;
    Ok(asked.run(|| {
        let loss = gpt.loss(&ids, &targets)?;
        optimizer.backward_step(&loss)?;
        loss.to_scalar::<f32>()
    })?)
}
