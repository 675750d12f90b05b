//! A training step of a GPT by burn, in f32 on its CPU back end `flex`: pre-norm blocks with biases, GELU, learned
//! positions, untied output layer, AdamW. `benches/peers.py` runs it.
//!
//! GELU uses erf, which is a kernel in burn; the tanh approximation would be a slower chain of ops.

#![forbid(unsafe_code)]

use burn::module::{Initializer, Module};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::activation::{gelu, softmax};
use peer_steps::{Benchmark, Shape};
use std::convert::Infallible;

const RANDOM: Initializer = Initializer::Normal { mean: 0.0, std: 0.02 };

fn linear(fan_in: usize, fan_out: usize, has_bias: bool, device: &Device) -> Linear {
    LinearConfig::new(fan_in, fan_out).with_bias(has_bias).with_initializer(RANDOM).init(device)
}

fn embedding(count: usize, width: usize, device: &Device) -> Embedding {
    EmbeddingConfig::new(count, width).with_initializer(RANDOM).init(device)
}

/// Pre-norm block: attention and MLP with residual connections.
#[derive(Module, Debug)]
struct Block {
    norms: [LayerNorm; 2],
    fused: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(width: usize, device: &Device) -> Block {
        Block {
            norms: [(); 2].map(|()| LayerNormConfig::new(width).init(device)),
            fused: linear(width, 3 * width, true, device),
            out: linear(width, width, true, device),
            up: linear(width, 4 * width, true, device),
            down: linear(4 * width, width, true, device),
        }
    }

    /// Maps `[rows, seq, width]` to the same shape; `hidden` is the causal mask, true for later tokens.
    fn forward(&self, x: Tensor<3>, heads: usize, hidden: &Tensor<4, Bool>) -> Tensor<3> {
        let [rows, seq, width] = x.dims();
        let channels = width / heads;
        let fused = self.fused.forward(self.norms[0].forward(x.clone()));
        let part = |which: usize| {
            fused
                .clone()
                .narrow(2, which * width, width)
                .reshape([rows, seq, heads, channels])
                .swap_dims(1, 2)
        };
        let scores = part(0).matmul(part(1).transpose()) * (channels as f64).powf(-0.5);
        let mixed = softmax(scores.mask_fill(hidden.clone(), f32::NEG_INFINITY), 3).matmul(part(2));
        let x = x + self.out.forward(mixed.swap_dims(1, 2).reshape([rows, seq, width]));
        let inner = gelu(self.up.forward(self.norms[1].forward(x.clone())));
        x + self.down.forward(inner)
    }
}

#[derive(Module, Debug)]
struct Gpt {
    tokens: Embedding,
    places: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(shape: &Shape, device: &Device) -> Gpt {
        Gpt {
            tokens: embedding(shape.vocab, shape.width, device),
            places: embedding(shape.seq, shape.width, device),
            blocks: (0..shape.blocks).map(|_| Block::new(shape.width, device)).collect(),
            norm: LayerNormConfig::new(shape.width).init(device),
            head: linear(shape.width, shape.vocab, false, device),
        }
    }
}

/// Inputs, targets, positions and causal mask.
struct Batch {
    ids: Tensor<2, Int>,
    targets: Tensor<1, Int>,
    places: Tensor<2, Int>,
    hidden: Tensor<4, Bool>,
    cross_entropy: CrossEntropyLoss,
    heads: usize,
}

impl Batch {
    fn new(shape: &Shape, device: &Device) -> Batch {
        let Shape { rows, seq, heads, .. } = *shape;
        let [ids, targets] = shape.batch().map(|ids| Tensor::<1, Int>::from_ints(&ids[..], device));
        let hidden = Tensor::<2, Bool>::tril_mask([seq, seq], 0, device).reshape([1, 1, seq, seq]);
        Batch {
            ids: ids.reshape([rows, seq]),
            targets,
            places: Tensor::<1, Int>::arange(0..seq as i64, device).reshape([1, seq]),
            hidden: hidden.expand([rows, heads, seq, seq]),
            cross_entropy: CrossEntropyLossConfig::new().init(device),
            heads,
        }
    }

    /// Returns the mean cross entropy of the targets.
    fn loss(&self, gpt: &Gpt) -> Tensor<1> {
        let x = gpt.tokens.forward(self.ids.clone()) + gpt.places.forward(self.places.clone());
        let x = gpt.blocks.iter().fold(x, |x, block| block.forward(x, self.heads, &self.hidden));
        let logits = gpt.head.forward(gpt.norm.forward(x)).flatten(0, 1);
        self.cross_entropy.forward(logits, self.targets.clone())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let asked = Benchmark::of(std::env::args().skip(1))?;
    let device = Device::flex().autodiff();
    let batch = Batch::new(&asked.shape, &device);
    let mut gpt = Gpt::new(&asked.shape, &device);
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.1).init();
    asked.run(|| {
        let loss = batch.loss(&gpt);
        let gradients = GradientsParams::from_grads(loss.backward(), &gpt);
        gpt = optimizer.step(1e-3, gpt.clone(), gradients);
        Ok::<f32, Infallible>(loss.into_scalar())
    })?;
    Ok(())
}
