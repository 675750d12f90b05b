//! Fuzzing over the list of ops, and planted faults, each of which the fuzzer must find and shrink.

use shardgrad_autograd::Var;
use shardgrad_dist::{Error, Result};
use shardgrad_tensor::op::{Cotangents, ForwardContext, LocalTensors, Op, Vjp};
use shardgrad_tensor::ops::{Case, Input, OPS, OpModule};
use shardgrad_tensor::{DType, LocalTensor, Value, View};
use shardgrad_testing::fuzz::{LayoutPattern, Program, Report, Step, TestInput, ValueRef, Verdict, programs};
use shardgrad_testing::fuzz_model;
use std::io::Write as _;
use std::rc::Rc;

/// 1,000 programs, or as many as SHARDGRAD_PROGRAMS says, distributed over the cores.
#[test]
fn random_programs_match_one_rank() {
    let count =
        std::env::var("SHARDGRAD_PROGRAMS").map_or(1000, |n| n.parse().expect("a number of programs"));
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64).min(count);
    let reports: Vec<Result<Report>> = std::thread::scope(|scope| {
        let part = |core: u64| (core * count / cores, (core + 1) * count / cores);
        let start = |core| scope.spawn(move || programs(OPS, part(core).0, part(core).1 - part(core).0));
        let handles: Vec<_> = (0..cores).map(start).collect();
        handles.into_iter().map(|h| h.join().expect("a thread of the test")).collect()
    });
    let faults: Vec<String> = reports.iter().filter_map(|r| r.as_ref().err()).map(Error::to_string).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let mut all = Report::default();
    for report in reports.into_iter().flatten() {
        all.right += report.right;
        all.ill_posed += report.ill_posed;
        all.refused += report.refused;
        all.steps += report.steps;
        all.in_f32 += report.in_f32;
        all.with_empty += report.with_empty;
        all.with_integers += report.with_integers;
        all.with_ties += report.with_ties;
    }
    std::io::stdout().write_all(format!("{count} programs: {all:?}\n").as_bytes()).unwrap();
    assert!(all.right as u64 * 10 >= count * 9, "nine in ten say something: {all:?}");
    assert!(all.steps as u64 >= 5 * count, "programs have some length: {all:?}");
    assert!(all.ill_posed as u64 * 50 <= count + 50, "few hang on the last bits: {all:?}");
    assert!(all.in_f32 as u64 * 5 >= count, "one in five computes in f32: {all:?}");
    assert!(all.with_empty as u64 * 20 >= count, "one in twenty has empty tensors: {all:?}");
    assert!(all.with_integers as u64 * 3 >= count, "one in three has integers or truth values: {all:?}");
    assert!(all.with_ties as u64 * 100 + 50 >= count, "one in a hundred has elements that tie: {all:?}");
}

#[test]
fn programs_are_deterministic_by_seed() {
    for seed in [3, 4, 5] {
        let text = || Program::draw(OPS, seed).unwrap().map(|p| p.to_string());
        assert_eq!(text(), text());
    }
}

/// An op with one planted fault.
#[derive(Debug)]
enum Planted {
    /// Declares the square linear: squares of partial values are not partial values of the square.
    Linear,
    /// Doubles the cotangent on the second rank of an axis.
    Doubled,
    /// Divides by the local extent.
    LocalMean,
    /// Reads its buffer as if the view were contiguous.
    Dense,
    /// Adds one on the second rank in f32.
    Narrow,
    /// Gives one instead of zero on the second rank for a sum over nothing.
    Empty,
}

impl Op for Planted {
    fn name(&self) -> &'static str {
        "planted"
    }

    fn signature(&self) -> &str {
        if matches!(self, Planted::LocalMean | Planted::Empty) { "..m d -> ..m" } else { "..m -> ..m" }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        if matches!(self, Planted::Doubled | Planted::Narrow) { &[] } else { &[&[0]] }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        if local.rank.is_dry_run() {
            return Ok([local.output(0)?].into_iter().collect());
        }
        let shape = x[0].view.shape.clone();
        let x = match self {
            // The elements at the start of the buffer, in memory order.
            Planted::Dense if x[0].numel() * x[0].dtype.size() <= x[0].buffer.bytes() => {
                let mut view = x[0].view.geometry();
                view.offset = 0;
                (0..shape.len()).for_each(|d| view.strides[d] = shape[d + 1..].iter().product());
                x[0].with_view(View::new(view.into()))
            }
            _ => x[0].clone(),
        };
        let values = x.to_f64(local.rank)?;
        let rows = shape.last().copied().unwrap_or(1).max(1);
        let values: Vec<f64> = match self {
            Planted::Linear | Planted::Doubled => values.iter().map(|x| x * x).collect(),
            Planted::Dense => values,
            Planted::Narrow => {
                let off = local.rank.index() == 1 && x.dtype != shardgrad_tensor::DType::F64;
                values.iter().map(|x| x + f64::from(u8::from(off))).collect()
            }
            Planted::Empty => {
                let is_empty = local.inputs[0].extent(shape.len() - 1) == 0;
                let of = f64::from(u8::from(is_empty && local.rank.index() == 1));
                let kept = 0..shape[..shape.len() - 1].iter().product::<usize>();
                kept.map(|row| of + values[row * shape[1]..(row + 1) * shape[1]].iter().sum::<f64>())
                    .collect()
            }
            Planted::LocalMean => {
                let kept = shape[..shape.len() - 1].iter().product::<usize>();
                let mean =
                    |row: usize| values.get(row * rows..(row + 1) * rows).map(|r| r.iter().sum::<f64>());
                (0..kept).map(|row| mean(row).unwrap_or(0.0) / rows as f64).collect()
            }
        };
        let out = local.inference.outputs[0].local_shape(local.rank.coordinates());
        let made = LocalTensor::upload(local.rank, &out, &values)?;
        let made = if x.dtype == made.dtype { made } else { made.to_dtype(local.rank, x.dtype)? };
        Ok([made].into_iter().collect())
    }

    fn saved_for_backward(&self) -> shardgrad_tensor::SavedForBackward {
        shardgrad_tensor::SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let (x, second) = (cx.input(0), cx.rank.index() == 1);
        cx.cotangents(|_| match self {
            Planted::Linear => cx.grad(0),
            Planted::Doubled => x.mul(&cx.grad(0)).scale(if second { 4.0 } else { 2.0 }),
            Planted::Dense | Planted::Narrow => cx.grad(0),
            Planted::LocalMean | Planted::Empty => {
                let goal = cx.cotangent_layout(0);
                let (shape, last) = (goal.shape(), goal.ndim() - 1);
                let op = shardgrad_tensor::ops::sum::Expand::to(&shape, &[last]).expect("the last dim");
                let is_mean = matches!(self, Planted::LocalMean);
                let scale = if is_mean { 1.0 / shape[last].max(1) as f64 } else { 1.0 };
                cx.cotangent(0, op, &[&cx.grad(0)]).scale(scale)
            }
        })
    }
}

fn planted(fault: Planted) -> Vec<Case> {
    vec![Case::new(Rc::new(fault), vec![Input::real(&[5, 3])])]
}

/// The list with one more op.
fn with(cases: fn() -> Vec<Case>) -> Vec<OpModule> {
    let sound = ["add", "sub", "mul", "einsum", "permute", "sum", "relu", "concat"];
    let mut ops: Vec<OpModule> = OPS.iter().filter(|e| sound.contains(&e.name)).copied().collect();
    ops.push(OpModule { name: "planted", cases, source: "" });
    ops
}

/// The cases of a planted fault, and the number of a program soon after which one shows it.
type Fault = (fn() -> Vec<Case>, u64);

#[test]
fn planted_faults_are_found_and_shrunk() {
    let faults: [Fault; 6] = [
        (|| planted(Planted::Linear), 130),
        (|| planted(Planted::Doubled), 0),
        (|| planted(Planted::LocalMean), 30),
        (|| planted(Planted::Dense), 270),
        (|| planted(Planted::Narrow), 40),
        (|| planted(Planted::Empty), 630),
    ];
    for (at, (cases, first)) in faults.into_iter().enumerate() {
        let error: Error = programs(&with(cases), first, 2000).unwrap_err();
        let (_, text) = error.details().iter().find(|(label, _)| *label == "repeat").unwrap();
        let steps = text.matches("Step::").count();
        assert!(text.contains("op: \"planted\""), "fault {at}: {error}");
        assert!(steps <= 4, "fault {at} in {steps} steps: {error}");
        let mesh = text.lines().find(|l| l.contains("mesh:")).unwrap();
        assert!(mesh.contains("=2\"") && mesh.matches('=').count() == 1, "fault {at}: {mesh}");
        assert!(text.ends_with(".check(OPS)?"), "{text}");
        let is_narrow = text.contains("dtype: DType::F32");
        assert_eq!(is_narrow, at == 4, "f64 where that shows it: fault {at}: {text}");
        let inputs = text.split("steps:").next().unwrap();
        assert_eq!(inputs.contains(" 0]"), at == 5, "elements where they show it: fault {at}: {text}");
    }
}

#[test]
fn fuzz_model_macro_accepts_and_rejects_models() {
    let report = fuzz_model!(
        [Input::real(&[4, 6]), Input::real(&[6, 3]), Input::index(&[4], 3)],
        60,
        |x: &[Var]| {
            let y = x[0].matmul(&x[1]).gelu();
            vec![y.sum(), y]
        }
    )
    .unwrap();
    assert!(report.right > 20 && report.ill_posed == 0, "{report:?}");
    let wrong = fuzz_model!([Input::real(&[5, 3])], 60, |x: &[Var]| {
        vec![Var::apply_one(Rc::new(Planted::Linear), &[&x[0]])]
    })
    .unwrap_err();
    assert_eq!(wrong.details()[0], ("mesh", "a=2".to_string()), "{wrong}");
}

/// In f32 sigmoid(expm1(x)) is 1 for an x for which it is less in f64: its floor says nothing about the mesh.
#[test]
fn f32_rounding_of_one_rank_is_ill_posed() {
    let apply = |op: &str, arg| Step::Apply { op: op.into(), case: 0, args: vec![arg], no_grad: false };
    let program = Program {
        mesh: "a=2".into(),
        dtype: DType::F32,
        inputs: vec![TestInput {
            input: Input::real(&[3, 2]),
            layout: LayoutPattern::unsharded(2),
            is_leaf: false,
        }],
        steps: vec![
            apply("expm1", ValueRef::Input(0)),
            apply("sigmoid", ValueRef::Output(0, 0)),
            apply("floor", ValueRef::Output(1, 0)),
        ],
        blocks: vec![],
        outputs: vec![ValueRef::Output(2, 0)],
        seed: 167_525,
    };
    assert!(matches!(program.check(OPS), Ok(Verdict::IllPosed)), "{:?}", program.check(OPS));
    let wide = Program { dtype: DType::F64, ..program };
    assert!(matches!(wide.check(OPS), Ok(Verdict::Right)), "{:?}", wide.check(OPS));
}

/// Partial values of 0, each divided by 3 and rounded, add up to almost 0, where |x| has another slope.
#[test]
fn kink_at_zero_is_ill_posed() {
    let apply = |op: &str, case, args| Step::Apply { op: op.into(), case, args, no_grad: false };
    let feed = |input, marks: &str, is_leaf| TestInput {
        input,
        layout: LayoutPattern::parse(marks).unwrap(),
        is_leaf,
    };
    let program = Program {
        mesh: "a=4".into(),
        dtype: DType::F32,
        inputs: vec![
            feed(Input::real(&[1, 4]), "[, ]", false),
            feed(Input::real(&[4]), "[:1] +a", true),
            feed(Input::Positive(vec![3, 4]), "[, ]", false),
        ],
        steps: vec![
            apply("div", 2, vec![ValueRef::Input(1), ValueRef::Input(2)]),
            apply("abs", 0, vec![ValueRef::Output(0, 0)]),
        ],
        blocks: vec![],
        outputs: vec![ValueRef::Output(1, 0)],
        seed: 316_830,
    };
    assert!(matches!(program.check(OPS), Ok(Verdict::IllPosed)), "{:?}", program.check(OPS));
}
