//! An NVIDIA card: kernels by their bytes or operations, and whole steps of models of which rates are published.
//! `benches/card.py` measures PyTorch on the same work, by the same names.

use super::line::{Bench, Work, check};
use super::steps::Training;
use shardgrad::kernels::op::{
    adamw, attention, binary, contract, copy, cross_entropy, embedding, layer_norm, random, reduce, rms_norm,
    rope, softmax, swiglu, unary,
};
use shardgrad::kernels::{
    Arg, ArgMut, Backend, Buffer, DType, Kernel, Launch, Machine, Scalar, Settings, Strides, open, upload,
};
use shardgrad::nn::hf::{Gpt2Config, LlamaConfig};
use shardgrad::nn::{ModelConfig, Precision};
use shardgrad::{Error, Kind, Result};
use std::sync::Arc;

use DType::{BF16, F32, I64};

/// Rows and width of what is bound by memory: an operand of 128 MiB in bf16, more than caches hold.
const ROWS: usize = 65_536;
const WIDTH: usize = 1024;
/// Tokens and their kinds, of a batch of GPT-2; kinds are a multiple of 64, as is usual.
const TOKENS: usize = 32_768;
const VOCAB: usize = 50_304;
/// Parameters that the optimizer steps at once.
const PARAMETERS: usize = 128 << 20;
/// Calls between two waits for the card.
const CALLS: usize = 10;

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug)]
enum Form {
    Plain,
    /// Its last two dims the other way round.
    Turned,
    /// One row, seen as so many.
    Repeated(usize),
}

/// An operand: its dtype, its shape in memory but for turned dims, and how it lies there.
#[derive(Clone, Debug)]
struct Operand(DType, Vec<usize>, Form);

/// A kernel on operands of given shapes.
struct Case {
    name: String,
    kernel: &'static Kernel,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    scalars: Vec<Scalar>,
    /// Whether operations count, not bytes.
    by_flops: bool,
}

impl Case {
    fn new<const I: usize, const O: usize>(
        name: &str,
        kernel: &'static Kernel,
        inputs: [(DType, &[usize]); I],
        outputs: [(DType, &[usize]); O],
        scalars: &[Scalar],
    ) -> Case {
        let operand = |(dtype, shape): (DType, &[usize])| Operand(dtype, shape.to_vec(), Form::Plain);
        let (inputs, outputs) = (inputs.map(operand).to_vec(), outputs.map(operand).to_vec());
        Case { name: name.into(), kernel, inputs, outputs, scalars: scalars.to_vec(), by_flops: false }
    }

    /// a b, where the last two dims of either may lie the other way round.
    fn product([m, k, n]: [usize; 3], [a, b]: [Form; 2]) -> Case {
        let letter = |form: Form| if matches!(form, Form::Turned) { 't' } else { 'n' };
        let name = format!("matmul bf16 {m}x{k}x{n} {}{}", letter(a), letter(b));
        let operands = [Operand(BF16, vec![1, m, k], a), Operand(BF16, vec![1, k, n], b)];
        let outputs = vec![Operand(BF16, vec![1, m, n], Form::Plain)];
        let (inputs, kernel) = (operands.to_vec(), &contract::CONTRACT);
        Case { name, kernel, inputs, outputs, scalars: vec![], by_flops: true }
    }

    /// Causal attention of a batch of sequences, forward and backward.
    fn attention([b, t, g, r, c]: [usize; 5]) -> [Case; 2] {
        let (q, k, rows) = ([b, t, g, r, c], [b, t, g, c], [b, t, g, r]);
        let scalars = [Scalar::Real(1.0 / (c as f64).sqrt()), Scalar::Int(1), Scalar::Int(0), Scalar::Int(0)];
        let name = |way: &str| format!("attention{way} bf16 {b}x{t}x{}x{c}, {g} key heads, causal", g * r);
        let forward = Case::new(
            &name(""),
            &attention::FORWARD,
            [(BF16, &q), (BF16, &k), (BF16, &k)],
            [(BF16, &q), (F32, &rows)],
            &scalars,
        );
        let backward = Case::new(
            &name(" gradient"),
            &attention::BACKWARD,
            [(BF16, &q), (BF16, &k), (BF16, &k), (BF16, &q), (F32, &rows), (BF16, &q)],
            [(BF16, &q), (BF16, &k), (BF16, &k)],
            &scalars,
        );
        [forward, backward].map(|case| Case { by_flops: true, ..case })
    }
}

/// Measures kernels.
pub(super) fn run(bench: &Bench) -> Result<()> {
    let card = open(bench.device)?.backend(Settings::default())?;
    memory_bound().iter().chain(&heavy()).try_for_each(|case| measure(bench, &*card, case))
}

/// Measures steps of models.
pub(super) fn run_steps(bench: &Bench) -> Result<()> {
    let machine = open(bench.device)?;
    gpt2(bench, &machine)?;
    llama(bench, &machine)
}

/// Kernels that should take as long as their bytes need.
fn memory_bound() -> Vec<Case> {
    let mut cases = elements();
    cases.extend(rows());
    cases.extend(tokens());
    for case in &mut cases {
        match case.name.as_str() {
            "turn bf16 8192x8192" | "sum of columns bf16" => case.inputs[0].2 = Form::Turned,
            "add row bf16" => case.inputs[1].2 = Form::Repeated(ROWS),
            _ => {}
        }
    }
    cases
}

/// Kernels of elements: copies, arithmetic, rotations, the optimizer.
fn elements() -> Vec<Case> {
    let (x, w): (&[usize], &[usize]) = (&[ROWS, WIDTH], &[WIDTH]);
    let (turned, heads): (&[usize], &[usize]) = (&[8192, 8192], &[8, 4096, 32, 128]);
    let hidden: &[usize] = &[8192, 14_336];
    let angles: Vec<Scalar> = std::iter::once(Scalar::Int(0))
        .chain((0..64).map(|i| Scalar::Real(1e4f64.powf(-f64::from(i) / 64.0))))
        .collect();
    let step = [1e-3, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.05, 1.0].map(Scalar::Real);
    vec![
        Case::new("copy bf16", &copy::COPY, [(BF16, x)], [(BF16, x)], &[]),
        Case::new("cast bf16 to f32", &copy::COPY, [(BF16, x)], [(F32, x)], &[]),
        Case::new("turn bf16 8192x8192", &copy::COPY, [(BF16, turned)], [(BF16, turned)], &[]),
        Case::new("add bf16", &binary::ADD, [(BF16, x), (BF16, x)], [(BF16, x)], &[]),
        Case::new("add row bf16", &binary::ADD, [(BF16, x), (BF16, w)], [(BF16, x)], &[]),
        Case::new("gelu bf16", &unary::GELU, [(BF16, x)], [(BF16, x)], &[]),
        Case::new("gelu gradient bf16", &unary::GELU_GRAD, [(BF16, x), (BF16, x)], [(BF16, x)], &[]),
        Case::new("rope bf16", &rope::ROTATE, [(BF16, heads)], [(BF16, heads)], &angles),
        Case::new(
            "swiglu gradient bf16",
            &swiglu::BACKWARD,
            [(BF16, hidden), (BF16, hidden), (BF16, hidden)],
            [(BF16, hidden), (BF16, hidden)],
            &[],
        ),
        Case::new(
            "adamw f32",
            &adamw::STEP,
            [(F32, &[PARAMETERS])],
            [(F32, &[PARAMETERS]), (F32, &[PARAMETERS]), (F32, &[PARAMETERS])],
            &step,
        ),
        Case::new("sum of squares f32", &reduce::SUM_SQUARES, [(F32, &[PARAMETERS])], [(F32, &[])], &[]),
    ]
}

/// Kernels of rows: norms, softmax, sums, maxima.
fn rows() -> Vec<Case> {
    let (x, w, rows): (&[usize], &[usize], &[usize]) = (&[ROWS, WIDTH], &[WIDTH], &[ROWS]);
    let (z, of): (&[usize], &[usize]) = (&[TOKENS / 4, VOCAB], &[TOKENS / 4]);
    let eps = [Scalar::Real(1e-5)];
    let last = |c: f64| [Scalar::Int(1), Scalar::Real(c)];
    vec![
        Case::new(
            "layer_norm bf16",
            &layer_norm::FORWARD,
            [(BF16, x), (BF16, w), (BF16, w)],
            [(BF16, x), (F32, rows), (F32, rows)],
            &eps,
        ),
        Case::new(
            "layer_norm gradient bf16",
            &layer_norm::BACKWARD,
            [(BF16, x), (BF16, w), (F32, rows), (F32, rows), (BF16, x)],
            [(BF16, x), (BF16, w), (BF16, w)],
            &[],
        ),
        Case::new(
            "layer_norm gradient bf16, with a residual",
            &layer_norm::BACKWARD,
            [(BF16, x), (BF16, w), (F32, rows), (F32, rows), (BF16, x), (BF16, x)],
            [(BF16, x), (BF16, w), (BF16, w)],
            &[],
        ),
        Case::new(
            "rms_norm bf16",
            &rms_norm::FORWARD,
            [(BF16, x), (BF16, w)],
            [(BF16, x), (F32, rows)],
            &eps,
        ),
        Case::new(
            "rms_norm gradient bf16",
            &rms_norm::BACKWARD,
            [(BF16, x), (BF16, w), (F32, rows), (BF16, x)],
            [(BF16, x), (BF16, w)],
            &[],
        ),
        Case::new(
            "rms_norm gradient bf16, with a residual",
            &rms_norm::BACKWARD,
            [(BF16, x), (BF16, w), (F32, rows), (BF16, x), (BF16, x)],
            [(BF16, x), (BF16, w)],
            &[],
        ),
        Case::new("softmax bf16", &softmax::FORWARD, [(BF16, x)], [(BF16, x)], &[]),
        Case::new("softmax gradient bf16", &softmax::BACKWARD, [(BF16, x), (BF16, x)], [(BF16, x)], &[]),
        Case::new("sum of rows bf16", &reduce::SUM, [(BF16, x)], [(BF16, rows)], &last(1.0)),
        Case::new("sum of columns bf16", &reduce::SUM, [(BF16, &[WIDTH, ROWS])], [(BF16, w)], &last(1.0)),
        Case::new("max of rows bf16, vocabulary", &reduce::MAX, [(BF16, z)], [(BF16, of)], &last(1.0)[..1]),
    ]
}

/// Kernels of tokens: where they come in and where they are compared.
fn tokens() -> Vec<Case> {
    let (x, rows): (&[usize], &[usize]) = (&[ROWS, WIDTH], &[ROWS]);
    let (z, of): (&[usize], &[usize]) = (&[TOKENS / 4, VOCAB], &[TOKENS / 4]);
    let table = [Scalar::Int(0), Scalar::Int(VOCAB as i64)];
    vec![
        Case::new(
            "cross_entropy bf16",
            &cross_entropy::TERMS,
            [(BF16, z), (I64, of)],
            [(F32, of), (F32, of)],
            &table,
        ),
        Case::new(
            "cross_entropy gradient bf16",
            &cross_entropy::BACKWARD,
            [(I64, of), (F32, of), (F32, of), (F32, of)],
            [(BF16, z)],
            &table,
        ),
        Case::new(
            "embedding bf16",
            &embedding::FORWARD,
            [(BF16, &[VOCAB, WIDTH]), (I64, rows)],
            [(BF16, x)],
            &table,
        ),
        Case::new(
            "embedding gradient bf16",
            &embedding::BACKWARD,
            [(I64, rows), (BF16, x)],
            [(BF16, &[VOCAB, WIDTH])],
            &table,
        ),
    ]
}

/// Products and attention.
fn heavy() -> Vec<Case> {
    use Form::{Plain, Turned};
    let nn = [Plain, Plain];
    let products = [
        ([8192, 8192, 8192], nn),
        ([4096, 4096, 4096], nn),
        ([TOKENS, 768, 2304], nn),
        ([TOKENS, 768, 3072], nn),
        ([TOKENS, 3072, 768], nn),
        ([TOKENS, 3072, 768], [Plain, Turned]),
        ([768, TOKENS, 3072], [Turned, Plain]),
        ([TOKENS, 768, VOCAB], [Plain, Turned]),
    ];
    let mut cases: Vec<Case> = products.map(|(dims, turned)| Case::product(dims, turned)).into();
    for dims in [[32, 1024, 12, 1, 64], [4, 4096, 16, 1, 128], [4, 4096, 8, 4, 128], [1, 16_384, 16, 1, 128]]
    {
        cases.extend(Case::attention(dims));
    }
    cases
}

fn measure(bench: &Bench, card: &dyn Backend, case: &Case) -> Result<()> {
    let input = |(i, x): (usize, &Operand)| fill(card, x, i as u64);
    let read = case.inputs.iter().enumerate().map(input).collect::<Result<Vec<_>>>()?;
    // Optimizer states are written in place, so that outputs need contents too.
    let output = |(i, y): (usize, &Operand)| fill(card, y, 16 + i as u64);
    let mut written = case.outputs.iter().enumerate().map(output).collect::<Result<Vec<_>>>()?;
    let views = |all: &[Operand]| all.iter().map(view).collect::<Vec<Strides>>();
    let (from, to) = (views(&case.inputs), views(&case.outputs));
    let args: Vec<Arg<'_>> = (read.iter().zip(&case.inputs).zip(&from))
        .map(|((buffer, x), view)| Arg { buffer, dtype: x.0, view })
        .collect();
    let mut cost = None;
    let seconds = bench.seconds(1, || {
        for _ in 0..CALLS {
            let mut outputs: Vec<ArgMut<'_>> = (written.iter_mut().zip(&case.outputs).zip(&to))
                .map(|((buffer, y), view)| ArgMut { buffer, dtype: y.0, view })
                .collect();
            let mut launch = Launch { inputs: &args, outputs: &mut outputs, scalars: &case.scalars };
            cost.get_or_insert_with(|| case.kernel.cost(&launch));
            card.launch(case.kernel, &mut launch)?;
        }
        Ok(card.finish()?)
    })? / CALLS as f64;
    let cost = cost.unwrap_or_default();
    let work = if case.by_flops { Work::Flops(cost.flops as f64) } else { Work::Bytes(cost.bytes as f64) };
    bench.tell("card_kernels", &case.name, "", seconds, work);
    Ok(())
}

/// Memory with numbers from -1 to 1 (optimizer states want none below 0: from 0 to 1), or tokens.
fn fill(card: &dyn Backend, operand: &Operand, stream: u64) -> Result<Buffer> {
    let Operand(dtype, shape, _) = operand;
    let numel: usize = shape.iter().product();
    if *dtype == I64 {
        let tokens: Vec<i64> = (0..numel).map(|i| ((i * 7919 + i * i % 97) % VOCAB) as i64).collect();
        return Ok(upload(card, &tokens)?);
    }
    let mut buffer = card.alloc(numel * dtype.size())?;
    let view = Strides::contiguous(&[numel]);
    let low = if stream < 16 { -1.0 } else { 0.0 };
    let scalars = [
        Scalar::Int(5),
        Scalar::Int(stream as i64),
        Scalar::Real(low),
        Scalar::Real(1.0),
        Scalar::Int(numel as i64),
        Scalar::Int(0),
    ];
    let outputs = &mut [ArgMut { buffer: &mut buffer, dtype: *dtype, view: &view }];
    card.launch(&random::UNIFORM, &mut Launch { inputs: &[], outputs, scalars: &scalars })?;
    Ok(buffer)
}

/// Where elements lie.
fn view(Operand(_, shape, form): &Operand) -> Strides {
    let last = shape.len().saturating_sub(2);
    let turn = |order: &mut Vec<usize>| order.swap(last, last + 1);
    match form {
        Form::Plain => Strides::contiguous(shape),
        Form::Turned => {
            let (mut lying, mut order) = (shape.clone(), (0..shape.len()).collect());
            turn(&mut lying);
            turn(&mut order);
            Strides::contiguous(&lying).permute(&order)
        }
        Form::Repeated(rows) => {
            let shape = [&[*rows], &shape[..]].concat();
            Strides::contiguous(&shape[1..]).broadcast(&shape).expect("a row is one of many")
        }
    }
}

/// GPT-2 of 124 million parameters on 32 x 1024 tokens, stored in f32, computed in bf16.
fn gpt2(bench: &Bench, machine: &Arc<dyn Machine>) -> Result<()> {
    let name = "gpt2-124m";
    let preset =
        Gpt2Config::preset(name).ok_or_else(|| Error::new(Kind::Config, format!("no preset `{name}`")))?;
    let config = Gpt2Config { vocab_size: VOCAB, ..preset };
    let (precision, machine) = (Precision::mixed(BF16), Some(machine.clone()));
    let training = Training { precision, machine, ..Training::new(config, 32, 1024) };
    let losses = training.run()?.losses;
    check("the first loss", &losses[..1], &[(VOCAB as f64).ln()], 0.05)?;
    training.tell(bench, "card_steps", "gpt2-124m bf16, 32 x 1024 tokens", &losses)?;
    Ok(())
}

/// As many blocks of Llama 3 8B as the card has memory for, on 4 x 4096 tokens, stored and computed in bf16 with optimizer states
/// in f32, and blocks computed again in the backward.
fn llama(bench: &Bench, machine: &Arc<dyn Machine>) -> Result<()> {
    let name = "llama-8b";
    let preset =
        LlamaConfig::preset(name).ok_or_else(|| Error::new(Kind::Config, format!("no preset `{name}`")))?;
    for blocks in [32, 16, 8] {
        let config = ModelConfig::Llama(LlamaConfig { num_hidden_layers: blocks, ..preset.clone() });
        let (precision, recompute, machine) = (Precision::of(BF16), true, Some(machine.clone()));
        let training = Training { precision, recompute, machine, ..Training::new(config, 4, 4096) };
        let losses = match training.run() {
            Err(error) if error.kind() == Kind::OutOfMemory => continue,
            found => found?.losses,
        };
        let case = format!("llama-8b bf16, {blocks} of 32 blocks, 4 x 4096 tokens, recomputing");
        training.tell(bench, "card_steps", &case, &losses)?;
        break;
    }
    Ok(())
}
