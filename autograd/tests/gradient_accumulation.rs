//! Gradient accumulation over rounds and microbatches has the bits of the gradients of each, added in order. Sums over
//! ranks in 16-bit floats are rounded once.

use shardgrad_autograd::pipeline::{PipelineInputs, Runner, Schedule, Stages};
use shardgrad_autograd::{Gradients, Program, ReplayNoise, Tape, Var};
use shardgrad_dist::{Mesh, Rank, Result, World};
use shardgrad_tensor::{DType, Elementwise, Layout, Resharding, Tensor, Value};

const WIDTH: usize = 12;
const ROWS: usize = 5;
const COUNT: usize = 4;
/// The uses of the weights: once; twice; twice in a block; once in a block; twice by one op.
const KEYS: std::ops::Range<u64> = 0..5;

fn normal(rank: &Rank, rows: usize, stream: u64) -> Result<Tensor> {
    Tensor::normal(rank, &Layout::invariant(rank.mesh(), DType::F32, &[rows, WIDTH]), 7, stream, 0.5)
}

fn text(args: &[Var]) -> Result<Vec<Var>> {
    let (x, tape) = (&args[0], args[0].tape().clone());
    let weights = KEYS.map(|key| Ok(tape.leaf(key, &normal(x.rank(), WIDTH, key)?)));
    let w: Vec<Var> = weights.collect::<Result<_>>()?;
    let y = x.matmul(&w[0]).gelu().matmul(&w[1]).gelu().matmul(&w[1]);
    let block = |a: &[Var]| Ok(vec![a[0].matmul(&a[1]).gelu().matmul(&a[1]).gelu().matmul(&a[2])]);
    let y = tape.checkpoint(&[y, w[2].clone(), w[3].clone()], block)?.remove(0);
    Ok(vec![y.matmul(&w[4].matmul(&w[4])).sum()])
}

fn bits(gradients: &Gradients) -> Result<Vec<Vec<u64>>> {
    gradients.values().map(|g| Ok(g.to_f64()?.iter().map(|x| x.to_bits()).collect())).collect()
}

/// The gradients of some microbatches on one tape.
fn gradients(rank: &Rank, microbatches: std::ops::Range<usize>) -> Result<Gradients> {
    let tape = Tape::new(rank);
    for microbatch in microbatches {
        let x = tape.constant(normal(rank, ROWS, 100 + microbatch as u64)?);
        text(&[x])?[0].backward()?;
    }
    Ok(tape.gradients())
}

/// The sum of the gradients of each microbatch.
fn expected(rank: &Rank) -> Result<Gradients> {
    let mut sums = gradients(rank, 0..1)?;
    for microbatch in 1..COUNT {
        for (key, gradient) in gradients(rank, microbatch..microbatch + 1)? {
            let sum = sums.remove(&key).expect("each microbatch reaches all").accumulate(&gradient)?;
            sums.insert(key, sum);
        }
    }
    Ok(sums)
}

/// The gradients of a pipeline with one rank, which has all uses of a weight.
fn pipelined(rank: &Rank, name: &str) -> Result<Gradients> {
    let axis = rank.mesh().axis("pp").expect("the mesh has one");
    let here = rank.slice(axis);
    let layout = Layout::invariant(here.mesh(), DType::F32, &[ROWS, WIDTH]);
    let stages = Stages::new(Program::record(&here, &[layout], None, text)?, &[]);
    let schedule = Schedule::named(name, 1, COUNT)?.with_transfers(&stages.links());
    let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
    let outcome = runner.run(&PipelineInputs {
        arguments: &|m| Ok(vec![normal(&here, ROWS, 100 + m as u64)?]),
        parameter: &|key| normal(&here, WIDTH, key).expect("there is memory"),
        is_trained: &|_| true,
        draw: &|_| ReplayNoise::Off,
        weight: 1.0,
    })?;
    Ok(outcome.gradients)
}

#[test]
fn pipeline_accumulates_microbatches_in_order() {
    for name in ["1f1b", "zb-h1"] {
        World::run(Mesh::parse("pp=1").unwrap(), |rank| {
            let (sums, expected) = (pipelined(rank, name)?, expected(rank)?);
            assert!(sums.keys().eq(expected.keys()) && sums.keys().copied().eq(KEYS), "{name}");
            for ((key, sum), expected) in KEYS.zip(bits(&sums)?).zip(bits(&expected)?) {
                assert!(sum == expected, "{name}: the gradient of {key}");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn rounds_accumulate_checkpointed_gradients_in_order() {
    World::run(Mesh::single(), |rank| {
        let (sums, expected) = (bits(&gradients(rank, 0..COUNT)?)?, bits(&expected(rank)?)?);
        // The weights with one cotangent per round; a block gives one. A weight used twice outside a block is added twice.
        for key in [0, 2, 3] {
            assert!(sums[key] == expected[key], "the gradient of {key}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn taken_gradients_are_not_overwritten() {
    World::run(Mesh::single(), |rank| {
        let tape = Tape::new(rank);
        let w = normal(rank, WIDTH, 0)?;
        let round = |x: u64| {
            let x = tape.constant(normal(rank, ROWS, 100 + x)?);
            x.matmul(&tape.leaf(0, &w)).gelu().sum().backward()
        };
        round(0)?;
        let held = tape.gradients();
        let before = bits(&held)?;
        round(1)?;
        round(2)?;
        let others = tape.gradients();
        assert!(bits(&held)? == before && bits(&others)? != before);
        Ok(())
    })
    .unwrap();
}

/// Numbers that bf16 holds exactly. Their sum is -0.5, but partial sums of four ranks are near 200 in absolute value,
/// where neighbouring bf16 numbers are 1 apart.
const CANCELLING: [f64; 12] =
    [100.0, 60.5, 40.25, -99.5, -61.0, -40.0, 90.0, 70.5, 30.25, -91.0, -70.0, -30.5];

/// A function of x, which is sharded, and a broadcast parameter y, whose gradient is a sum over x.
struct Repeated {
    name: &'static str,
    f: fn(&Var, &Var) -> Var,
    /// The elements of x, all equal; the cotangents are then the cancelling numbers. `None`: x is the cancelling
    /// numbers, the cotangents are 1.
    x: Option<f64>,
    y: f64,
    gradient: f64,
}

const REPEATED: [Repeated; 10] = [
    Repeated { name: "add", f: |x, y| x.add(y), x: Some(1.0), y: 1.0, gradient: -0.5 },
    Repeated { name: "sub", f: |x, y| x.sub(y), x: Some(1.0), y: 1.0, gradient: 0.5 },
    Repeated { name: "mul", f: |x, y| x.mul(y), x: None, y: 1.0, gradient: -0.5 },
    Repeated { name: "mul, swapped", f: |x, y| y.mul(x), x: Some(2.0), y: 1.0, gradient: -1.0 },
    Repeated { name: "the divisor", f: |x, y| x.div(y), x: None, y: 2.0, gradient: 0.125 },
    Repeated { name: "the dividend", f: |x, y| y.div(x), x: Some(1.0), y: 1.0, gradient: -0.5 },
    Repeated { name: "pow", f: |x, y| y.pow(x), x: None, y: 1.0, gradient: -0.5 },
    Repeated { name: "maximum", f: |x, y| y.maximum(x), x: Some(1.0), y: 512.0, gradient: -0.5 },
    Repeated {
        name: "where_cond",
        f: |x, y| x.gt_scalar(0.0).where_cond(y, x),
        x: Some(1.0),
        y: 1.0,
        gradient: -0.5,
    },
    Repeated {
        name: "a bias",
        f: |x, y| {
            let w = x.constant(Tensor::from_host(x.rank(), &[1, 1], &[1.0]).unwrap()).cast(x.dtype());
            x.reshape(&[12, 1]).linear(&w, Some(y), None).reshape(&[12])
        },
        x: Some(1.0),
        y: 1.0,
        gradient: -0.5,
    },
];

/// The gradient of a parameter that is stored in the first dtype and computed in the second.
fn repeated(
    rank: &Rank,
    (case, shape): (&Repeated, &[usize]),
    [stored, dtype]: [DType; 2],
    in_block: bool,
) -> Result<Tensor> {
    let (tape, mesh) = (Tape::new(rank), rank.mesh());
    let split = if mesh.num_ranks() > 1 { "f64[12@a]" } else { "f64[12]" };
    let known = |data: &[f64]| Tensor::from_global(rank, &Layout::parse(split, mesh)?, data);
    let of = |x: Option<f64>| -> Result<Var> {
        Ok(tape.constant(known(&x.map_or(CANCELLING, |x| [x; 12]))?).cast(dtype))
    };
    let (x, weights) = (of(case.x)?, of(if case.x.is_some() { None } else { Some(1.0) })?);
    let y = tape.leaf(0, &Tensor::full(rank, &Layout::invariant(mesh, stored, shape), case.y)?);
    let y = y.to_layout(&Layout::invariant(mesh, dtype, shape));
    let z = match in_block {
        true => tape.checkpoint(&[x, y], |a| Ok(vec![(case.f)(&a[0], &a[1])]))?.remove(0),
        false => (case.f)(&x, &y),
    };
    z.mul(&weights).sum().backward()?;
    Ok(tape.gradients().remove(&0).expect("it is a parameter"))
}

#[test]
fn broadcast_gradient_is_rounded_after_the_reduction() {
    for (mesh, in_block) in [("a=1", false), ("a=4", false), ("a=4", true)] {
        for dtypes in [[DType::BF16; 2], [DType::F16; 2], [DType::F32, DType::BF16]] {
            let shapes: [&[usize]; 2] = [&[], &[1]];
            let all = REPEATED.iter().flat_map(|case| shapes.map(|shape| (case, shape)));
            for (case, shape) in all.filter(|(case, shape)| case.name != "a bias" || !shape.is_empty()) {
                let made = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                    let gradient = repeated(rank, (case, shape), dtypes, in_block)?;
                    Ok((gradient.dtype(), gradient.to_f64()?))
                });
                let what =
                    format!("{} of {shape:?} on {mesh} in {dtypes:?}, in a block: {in_block}", case.name);
                for rank in made.unwrap_or_else(|e| panic!("{what}: {e}")) {
                    assert_eq!(rank, (dtypes[0], vec![case.gradient]), "{what}");
                }
            }
        }
    }
}

/// A layer of two channels and its parameters, whose gradients are sums of 12 cotangents times 1 or -1.
struct Layer {
    name: &'static str,
    f: fn(&Var, &[Var]) -> Var,
    parameters: &'static [&'static [f64]],
    gradients: &'static [&'static [f64]],
}

/// The rows are (1, -1), which are already normalized; for gelu they are far on the side with slope 1.
const LAYERS: [Layer; 3] = [
    Layer {
        name: "layer norm",
        f: |x, p| x.layer_norm(&p[0], &p[1], 0.0),
        parameters: &[&[1.0, 1.0], &[0.0, 0.0]],
        gradients: &[&[-0.5, 0.5], &[-0.5, -0.5]],
    },
    Layer {
        name: "rms norm",
        f: |x, p| x.rms_norm(&p[0], 0.0),
        parameters: &[&[1.0, 1.0]],
        gradients: &[&[-0.5, 0.5]],
    },
    Layer {
        name: "the biases of an mlp",
        f: |x, p| {
            let one = [1.0, 0.0, 0.0, 1.0];
            let w = x.constant(Tensor::from_host(x.rank(), &[2, 2], &one).unwrap()).cast(x.dtype());
            x.mlp(&w, &p[0], &w, Some(&p[1]), None)
        },
        parameters: &[&[32.0, 32.0], &[0.0, 0.0]],
        gradients: &[&[-0.5, -0.5], &[-0.5, -0.5]],
    },
];

#[test]
fn norm_and_bias_gradients_are_rounded_after_the_reduction() {
    for mesh in ["a=1", "a=4"] {
        for (dtypes, layer) in [[DType::BF16; 2], [DType::F32, DType::BF16]]
            .into_iter()
            .flat_map(|d| LAYERS.iter().map(move |l| (d, l)))
        {
            let made = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let (tape, mesh, [stored, dtype]) = (Tape::new(rank), rank.mesh(), dtypes);
                let split =
                    Layout::parse(if mesh.num_ranks() > 1 { "f64[12@a, 2]" } else { "f64[12, 2]" }, mesh)?;
                let of = |f: &dyn Fn(usize) -> f64| -> Result<Var> {
                    let data: Vec<f64> = (0..24).map(f).collect();
                    Ok(tape.constant(Tensor::from_global(rank, &split, &data)?).cast(dtype))
                };
                let (x, weights) =
                    (of(&|at| if at % 2 == 0 { 1.0 } else { -1.0 })?, of(&|at| CANCELLING[at / 2])?);
                let leaf = |(key, data): (usize, &&[f64])| -> Result<Var> {
                    let own = Tensor::from_host(rank, &[2], data)?.cast(stored);
                    Ok(tape.leaf(key as u64, &own).to_layout(&Layout::invariant(mesh, dtype, &[2])))
                };
                let parameters: Vec<Var> =
                    layer.parameters.iter().enumerate().map(leaf).collect::<Result<_>>()?;
                (layer.f)(&x, &parameters).mul(&weights).sum().backward()?;
                tape.gradients().values().map(|g| Ok((g.dtype(), g.to_f64()?))).collect::<Result<Vec<_>>>()
            });
            let want: Vec<(DType, Vec<f64>)> =
                layer.gradients.iter().map(|g| (dtypes[0], g.to_vec())).collect();
            let what = format!("{} on {mesh} in {dtypes:?}", layer.name);
            for rank in made.unwrap_or_else(|e| panic!("{what}: {e}")) {
                assert_eq!(rank, want, "{what}");
            }
        }
    }
}
