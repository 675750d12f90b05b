//! Gradient checks: every layer and model against finite differences in f64, for all parameters and all real inputs: of layers by
//! element, of models along one direction. `FILES` lists the file of each; a file without an entry fails a test.

use crate::support::run;
use shardgrad_autograd::{Key, Noise, Tape, Var};
use shardgrad_nn::ExpertsConfig;
use shardgrad_nn::{
    Attention, Bert, BertConfig, Block, Dropout, Embedding, EncoderAttention, GatedMlp, Gpt2, Gpt2Config,
    GroupedQueryAttention, LanguageModel, LayerNorm, Linear, Llama, LlamaConfig, LlamaKind, Lora,
    MixtureOfExperts, Mlp, Model, Module, PackedDocuments, Param, Plan, RmsNorm, cross_entropy,
};
use shardgrad_tensor::ops::Input;
use shardgrad_tensor::{DType, Rank, Result, Tensor, Value};
use shardgrad_testing::GlobalTensor;
use shardgrad_testing::op_check::find_disagreement;
use std::collections::BTreeSet;
use std::path::Path;

/// The first key of inputs, which are leaves like parameters, beyond the keys of the model.
const INPUT_KEY: Key = 1 << 32;

/// How a module is called on its inputs.
type Forward<M> = fn(&M, &[Var]) -> Var;

/// The directions in which a parameter or an input is shifted.
#[derive(Clone, Copy)]
enum Directions {
    /// Each element alone: for layers.
    Elements,
    /// One pseudorandom direction, along which a wrong element shows as well: for models, which have many parameters.
    Pseudorandom,
}

/// A module, how to call it, and its inputs.
struct Subject<M> {
    module: M,
    forward: Forward<M>,
    inputs: Vec<Input>,
    /// Whether dropout is on.
    noise: bool,
    directions: Directions,
}

/// A module on values that can be perturbed.
struct Probe<'a> {
    forward: &'a dyn Fn(&[Var]) -> Var,
    inputs: Vec<GlobalTensor>,
    noise: bool,
    directions: Directions,
}

impl Probe<'_> {
    /// The sum of the results weighted with pseudorandom numbers.
    fn loss(&self, tape: &Tape) -> Result<Var> {
        tape.set_noise(self.noise.then_some(Noise { seed: 3, step: 5, first_row: 2 }));
        let inputs: Vec<Var> = self
            .inputs
            .iter()
            .zip(INPUT_KEY..)
            .map(|(x, key)| {
                let tensor = host(tape.rank(), x)?;
                Ok(if x.dtype.is_float() { tape.leaf(key, &tensor) } else { tape.constant(tensor) })
            })
            .collect::<Result<_>>()?;
        let y = (self.forward)(&inputs);
        let weights = host(tape.rank(), &GlobalTensor::draw(&Input::real(&y.shape()), 99))?;
        Ok(y.mul(&tape.constant(weights)).sum())
    }
}

fn host(rank: &Rank, x: &GlobalTensor) -> Result<Tensor> {
    let tensor = Tensor::from_host(rank, &x.shape, &x.data)?;
    Ok(tensor.cast(x.dtype))
}

/// Pseudorandom values, small enough that neither softmax nor GELU saturates.
fn moderate(shape: &[usize], seed: u64) -> GlobalTensor {
    let mut drawn = GlobalTensor::draw(&Input::real(shape), seed);
    drawn.data.iter_mut().for_each(|x| *x *= 0.375);
    drawn
}

/// Fails unless every gradient of the subject exists, is not all zeros, and matches finite differences.
fn check<M: Module>(what: &str, make: impl Fn() -> Subject<M> + Sync) {
    run("", |rank| {
        let Subject { module, forward, inputs, noise, directions } = make();
        let model = Model::with_dtype(rank, module, &Plan::new(), 1, DType::F64)?;
        let forward = |inputs: &[Var]| forward(&model, inputs);
        let drawn = |(input, seed): (&Input, u64)| match input {
            Input::Real(shape) => moderate(shape, seed),
            other => GlobalTensor::draw(other, seed),
        };
        let inputs = inputs.iter().zip(1..).map(drawn).collect();
        let probe = Probe { forward: &forward, inputs, noise, directions };
        compare(what, model.params(), [&|| model.tape(), &|| model.inference_tape()], probe)
    });
}

/// [`check`] of a module with these parameters, on tapes that record and on tapes that do not: compiled once, not for each module.
fn compare(
    what: &str,
    params: &[Param],
    [tape, inference_tape]: [&dyn Fn() -> Tape; 2],
    mut probe: Probe<'_>,
) -> Result<()> {
    let tape = tape();
    let rank = tape.rank();
    for (param, seed) in params.iter().zip(1000..) {
        param.set_tensor(host(rank, &moderate(param.shape(), seed))?)?;
    }
    probe.loss(&tape)?.backward()?;
    let gradients = tape.gradients();
    let value = |probe: &Probe<'_>| probe.loss(&inference_tape())?.item();
    let claimed = |key: Key, name: &str| -> Result<Vec<f64>> {
        let gradient = gradients.get(&key).unwrap_or_else(|| panic!("{what}: none reaches {name}"));
        let claimed = gradient.to_f64()?;
        assert!(claimed.iter().any(|g| *g != 0.0), "{what}: the gradient of {name} is all zeros");
        Ok(claimed)
    };
    let directions = probe.directions;
    for param in params {
        let start =
            GlobalTensor { dtype: DType::F64, shape: param.shape().to_vec(), data: param.tensor().to_f64()? };
        let found =
            directions.find_disagreement(&claimed(param.key(), &param.name())?, &start, |shifted| {
                param.set_tensor(host(rank, shifted)?)?;
                value(&probe)
            })?;
        param.set_tensor(host(rank, &start)?)?;
        assert_eq!(found, None, "{what}: {} (direction, gradient, differences)", param.name());
    }
    for i in 0..probe.inputs.len() {
        let start = probe.inputs[i].clone();
        if !start.dtype.is_float() {
            continue;
        }
        let claimed = claimed(INPUT_KEY + i as Key, &format!("input {i}"))?;
        let found = directions.find_disagreement(&claimed, &start, |shifted| {
            probe.inputs[i] = shifted.clone();
            value(&probe)
        })?;
        probe.inputs[i] = start;
        assert_eq!(found, None, "{what}: input {i} (direction, gradient, differences)");
    }
    Ok(())
}

impl Directions {
    /// Returns the first direction along which a gradient differs from the central difference of a function around `start`: its
    /// number, the derivative by the gradient, and the difference.
    fn find_disagreement(
        self,
        gradient: &[f64],
        start: &GlobalTensor,
        mut value: impl FnMut(&GlobalTensor) -> Result<f64>,
    ) -> Result<Option<(usize, f64, f64)>> {
        let numel = start.data.len();
        let directions: Vec<Vec<f64>> = match self {
            Directions::Elements => {
                (0..numel).map(|at| (0..numel).map(|i| f64::from(u8::from(i == at))).collect()).collect()
            }
            Directions::Pseudorandom => vec![GlobalTensor::draw(&Input::real(&start.shape), 7).data],
        };
        let along = |direction: &Vec<f64>| gradient.iter().zip(direction).map(|(g, d)| g * d).sum();
        let claimed: Vec<f64> = directions.iter().map(along).collect();
        find_disagreement(&claimed, |number, by| {
            let moved = start.data.iter().zip(&directions[number]).map(|(x, d)| x + by * d);
            value(&GlobalTensor { data: moved.collect(), ..start.clone() })
        })
    }
}

/// A subject on real inputs of these shapes.
fn on<M>(module: M, shapes: &[&[usize]], forward: Forward<M>) -> Subject<M> {
    let inputs = shapes.iter().map(|s| Input::real(s)).collect();
    Subject { module, forward, inputs, noise: false, directions: Directions::Elements }
}

impl<M> Subject<M> {
    fn inputs(self, inputs: &[Input]) -> Subject<M> {
        Subject { inputs: inputs.to_vec(), ..self }
    }

    fn noisy(self) -> Subject<M> {
        Subject { noise: true, ..self }
    }

    /// With the directions for models.
    fn model(self) -> Subject<M> {
        Subject { directions: Directions::Pseudorandom, ..self }
    }
}

fn attention() {
    let layer = || Attention::new(6, 2);
    check("causal", || on(layer(), &[&[2, 3, 6]], |m, x| m.forward(&x[0])));
    check("to all", || on(layer().causal(false), &[&[2, 3, 6]], |m, x| m.forward(&x[0])));
    check("noisy", || on(layer().dropout(0.3), &[&[2, 3, 6]], |m, x| m.forward(&x[0])).noisy());
    let to_all = || layer().causal(false).dropout(0.3);
    check("noisy to all", || on(to_all(), &[&[2, 3, 6]], |m, x| m.forward(&x[0])).noisy());
}

fn block() {
    let layer = |p| Block::new(4, Attention::new(4, 2).dropout(p), Mlp::new(4, 5), 1e-5, p);
    check("block", || on(layer(0.0), &[&[2, 3, 4]], |m, x| m.forward(&x[0])));
    check("noisy block", || on(layer(0.25), &[&[2, 3, 4]], |m, x| m.forward(&x[0])).noisy());
}

fn dropout() {
    check("dropout", || on(Dropout::new(0.3), &[&[3, 5]], |m, x| m.forward(&x[0])).noisy());
    check("no dropout", || on(Dropout::new(0.3), &[&[3, 5]], |m, x| m.forward(&x[0])));
}

fn embedding() {
    let ids = [Input::index(&[2, 3], 4)];
    check("lookup", || on(Embedding::new(4, 3), &[], |m, x| m.forward(&x[0])).inputs(&ids));
    check("logits", || on(Embedding::new(4, 3), &[&[2, 3]], |m, x| m.logits(&x[0])));
    check("rows", || on(Embedding::new(4, 3), &[], |m, x| m.rows(&x[0], 1..3)).inputs(&ids));
    check("first rows", || on(Embedding::new(4, 3), &[], |m, x| m.first_rows(&x[0], 2)).inputs(&ids));
}

fn layer_norm() {
    let layer = || LayerNorm::new(5).eps(1e-3);
    check("layer norm", || on(layer(), &[&[2, 3, 5]], |m, x| m.forward(&x[0])));
    check("layer norm and residual", || on(layer(), &[&[2, 3, 5]], |m, x| x[0].mul(&m.forward(&x[0]))));
}

fn rms_norm() {
    let layer = || RmsNorm::new(5).eps(1e-3);
    check("rms norm", || on(layer(), &[&[2, 3, 5]], |m, x| m.forward(&x[0])));
    check("rms norm and residual", || on(layer(), &[&[2, 3, 5]], |m, x| x[0].mul(&m.forward(&x[0]))));
}

fn linear() {
    check("plain", || on(Linear::new(3, 4), &[&[2, 3]], |m, x| m.forward(&x[0])));
    check("no bias", || on(Linear::new(3, 4).without_bias(), &[&[2, 3]], |m, x| m.forward(&x[0])));
    check("to heads", || on(Linear::general(&[3], &[2, 2]), &[&[2, 5, 3]], |m, x| m.forward(&x[0])));
    let joined = || Linear::general(&[2, 3], &[4]).without_bias();
    check("from heads", || on(joined(), &[&[2, 2, 3]], |m, x| m.forward(&x[0])));
}

fn mlp() {
    check("mlp", || on(Mlp::new(3, 5), &[&[2, 2, 3]], |m, x| m.forward(&x[0])));
}

fn gpt2() {
    let tokens = [Input::index(&[2, 3], 5), Input::index(&[2, 3], 5)];
    for (tied, recompute, p) in [(true, false, 0.0), (false, false, 0.2), (true, true, 0.2)] {
        let config =
            Gpt2Config { tie_word_embeddings: tied, ..Gpt2Config::new(5, 4, 4, 2, 2).with_dropout(p) };
        let make = || {
            let module = Gpt2::new(&config).recompute(recompute);
            on(module, &[], |m, x| m.loss(&x[0], &x[1])).inputs(&tokens).noisy().model()
        };
        check(&format!("tied {tied}, recompute {recompute}, dropout {p}"), make);
    }
}

fn gated_mlp() {
    for bias in [false, true] {
        check("gated mlp", || on(GatedMlp::new(3, 5, bias), &[&[2, 2, 3]], |m, x| m.forward(&x[0])));
    }
}

fn mixture_of_experts() {
    for renormalize in [false, true] {
        let layer = || MixtureOfExperts::new(3, 5, 4, 2, renormalize);
        check("experts", || on(layer(), &[&[2, 2, 3]], |m, x| m.forward(&x[0]).0));
        check("experts and their scores", || {
            on(layer(), &[&[2, 2, 3]], |m, x| {
                let (y, routes) = m.forward(&x[0]);
                y.add(&routes.scores.square().sum_dims(&[2]).expand(2, 3))
            })
        });
    }
}

fn grouped_query_attention() {
    let layer = || GroupedQueryAttention::new(3, [2, 2, 4], &[1.0, 0.3]);
    check("grouped", || on(layer(), &[&[2, 3, 3]], |m, x| m.forward(&x[0])));
    let rich = || layer().with_bias(true, true).with_qk_norm(1e-3);
    check("biases and norms", || on(rich(), &[&[2, 3, 3]], |m, x| m.forward(&x[0])));
    check("noisy", || on(rich().dropout(0.3), &[&[2, 3, 3]], |m, x| m.forward(&x[0])).noisy());
}

fn packed_documents() {
    let inputs = [Input::real(&[2, 4, 4]), Input::index(&[2, 4], 2), Input::index(&[2, 4], 4)];
    fn documents(x: &[Var]) -> PackedDocuments {
        PackedDocuments { segments: x[1].clone(), positions: x[2].clone() }
    }
    let forward: Forward<Block> = |m, x| m.forward_packed(&x[0], &documents(x));
    let block = || Block::new(4, Attention::new(4, 2), Mlp::new(4, 5), 1e-5, 0.0);
    check("packed block", || on(block(), &[], forward).inputs(&inputs));
    let forward: Forward<GroupedQueryAttention> = |m, x| m.forward_packed(&x[0], &documents(x), None);
    let grouped = || GroupedQueryAttention::new(4, [2, 2, 4], &[1.0, 0.3]).sliding_window(Some(2));
    check("packed grouped", || on(grouped(), &[], forward).inputs(&inputs));
}

fn llama() {
    let tokens = [Input::index(&[2, 3], 5), Input::index(&[2, 3], 5)];
    let cases = LlamaKind::ALL.into_iter().zip([(true, false, 0.0), (false, true, 0.2)].into_iter().cycle());
    for (kind, (tied, recompute, p)) in cases {
        let config = LlamaConfig {
            tie_word_embeddings: tied,
            attention_dropout: p,
            ..LlamaConfig::new(kind, 5, 4, [4, 3], 2, [2, 1])
        };
        let make = || {
            let module = Llama::new(&config).recompute(recompute);
            on(module, &[], |m, x| m.loss(&x[0], &x[1])).inputs(&tokens).noisy().model()
        };
        check(&format!("{kind:?}, tied {tied}, recompute {recompute}, dropout {p}"), make);
    }
    let mut config = LlamaConfig::new(LlamaKind::Mixtral, 5, 4, [4, 3], 2, [2, 1]);
    let balanced = ExpertsConfig {
        output_router_logits: true,
        router_aux_loss_coef: 0.5,
        ..ExpertsConfig::new(3, 2, 3)
    };
    config.experts = Some(balanced);
    let make = || on(Llama::new(&config), &[], |m, x| m.loss(&x[0], &x[1])).inputs(&tokens).model();
    check("with the load-balancing loss", make);
}

fn encoder_attention() {
    let layer = || EncoderAttention::new(6, 2);
    check("to all", || on(layer(), &[&[2, 3, 6]], |m, x| m.forward(&x[0], None)));
    check("masked", || on(layer(), &[&[2, 3, 6], &[2, 3]], |m, x| m.forward(&x[0], Some(&x[1]))));
    check("noisy", || on(layer().dropout(0.3), &[&[2, 3, 6]], |m, x| m.forward(&x[0], None)).noisy());
}

fn bert() {
    let tokens = [Input::index(&[2, 3], 5), Input::index(&[2, 3], 5), Input::index(&[2, 3], 2)];
    for (tied, recompute, p) in [(true, false, 0.0), (false, true, 0.2)] {
        let config =
            BertConfig { tie_word_embeddings: tied, ..BertConfig::new(5, 4, [4, 3], 2, 2).with_dropout(p) };
        let make = || {
            let module = Bert::new(&config).recompute(recompute);
            on(module, &[], |m, x| m.loss(&x[0], &x[1], None, Some(&x[2]))).inputs(&tokens).noisy().model()
        };
        check(&format!("tied {tied}, recompute {recompute}, dropout {p}"), make);
    }
}

fn language() {
    let tokens = [Input::index(&[2, 3], 5), Input::index(&[2, 3], 5)];
    let (gpt2, llama) =
        (Gpt2Config::new(5, 4, 4, 1, 2), LlamaConfig::new(LlamaKind::Llama, 5, 4, [4, 3], 1, [2, 1]));
    for config in [gpt2.into(), llama.into()] {
        let make =
            || on(LanguageModel::new(&config), &[], |m, x| m.loss(&x[0], &x[1])).inputs(&tokens).model();
        check("of a family", make);
    }
}

fn lora() {
    for (from, to) in [(&[4][..], &[3][..]), (&[2, 2], &[3, 2])] {
        let make = || {
            let layer = Linear::general(from, to).adapt("*", |layer| Lora::new(layer, 2).alpha(3.0));
            Subject { noise: true, ..on(layer, &[&[&[2], from].concat()], |m, x| m.forward(&x[0])) }
        };
        check("LoRA", make);
    }
}

/// The file of each layer and model, and its check.
const FILES: &[(&str, fn())] = &[
    ("layer/attention", attention),
    ("layer/block", block),
    ("layer/documents", packed_documents),
    ("layer/dropout", dropout),
    ("layer/embedding", embedding),
    ("layer/gated_mlp", gated_mlp),
    ("layer/mixture_of_experts", mixture_of_experts),
    ("layer/feed_forward", llama),
    ("layer/grouped_query_attention", grouped_query_attention),
    ("layer/layer_norm", layer_norm),
    ("layer/linear", linear),
    ("layer/lora", lora),
    ("layer/mlp", mlp),
    ("layer/rms_norm", rms_norm),
    ("layer/encoder_attention", encoder_attention),
    ("model/bert", bert),
    ("model/gpt2", gpt2),
    ("model/language", language),
    ("model/llama", llama),
];

#[test]
fn gradients_of_layers_and_models_match_finite_differences() {
    FILES.iter().for_each(|(_, check)| check());
}

#[test]
fn the_gradient_of_cross_entropy_matches_finite_differences() {
    let inputs = [Input::real(&[2, 3, 5]), Input::index(&[2, 3], 5)];
    // The loss has no parameters, so any module does.
    let make = || on(Dropout::new(0.0), &[], |_, x| cross_entropy(&x[0], &x[1])).inputs(&inputs);
    check("cross entropy", make);
}

#[test]
fn every_layer_and_model_file_has_a_gradient_check() {
    let mut found = BTreeSet::new();
    for folder in ["layer", "model"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(folder);
        for file in std::fs::read_dir(path).unwrap() {
            let name = file.unwrap().path().file_stem().unwrap().to_str().unwrap().to_string();
            // The KV cache computes nothing; the steps that models share are checked with each model.
            if !["mod", "blocks", "kv_cache"].contains(&name.as_str()) {
                found.insert(format!("{folder}/{name}"));
            }
        }
    }
    let listed: BTreeSet<String> = FILES.iter().map(|(name, _)| (*name).to_string()).collect();
    assert_eq!(found, listed, "files of nn/src, and entries of FILES: give each layer and model a check");
}
