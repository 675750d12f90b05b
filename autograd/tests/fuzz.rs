//! Random programs over the list of ops; and planted faults, each of which the fuzzer must find and make small.

use shardgrad_autograd::fuzz::{Feed, Marks, Place, Program, Report, Step, Verdict, programs};
use shardgrad_autograd::{Var, fuzz_model};
use shardgrad_dist::{Error, Result};
use shardgrad_tensor::op::{Cotangents, Local, Op, Pieces, Vjp};
use shardgrad_tensor::ops::{Case, Entry, Input, OPS};
use shardgrad_tensor::{DType, Piece, Tensor, Value, View};
use std::io::Write as _;
use std::rc::Rc;

/// 2,000 programs, or as many as SHARDGRAD_PROGRAMS says, shared among the cores.
#[test]
fn random_programs_are_those_of_one_rank() {
    let count =
        std::env::var("SHARDGRAD_PROGRAMS").map_or(2000, |n| n.parse().expect("a number of programs"));
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
        all.narrow += report.narrow;
        all.empty += report.empty;
        all.whole += report.whole;
        all.ties += report.ties;
    }
    std::io::stdout().write_all(format!("{count} programs: {all:?}\n").as_bytes()).unwrap();
    assert!(all.right as u64 * 10 >= count * 9, "nine in ten say something: {all:?}");
    assert!(all.steps as u64 >= 5 * count, "programs have some length: {all:?}");
    assert!(all.ill_posed as u64 * 50 <= count + 50, "few hang on the last bits: {all:?}");
    assert!(all.narrow as u64 * 5 >= count, "one in five computes in f32: {all:?}");
    assert!(all.empty as u64 * 20 >= count, "one in twenty has empty tensors: {all:?}");
    assert!(all.whole as u64 * 3 >= count, "one in three has integers or truth values: {all:?}");
    assert!(all.ties as u64 * 100 + 50 >= count, "one in a hundred has elements that tie: {all:?}");
}

#[test]
fn the_same_number_gives_the_same_program() {
    for seed in [3, 4, 5] {
        let text = || Program::draw(OPS, seed).unwrap().map(|p| p.to_string());
        assert_eq!(text(), text());
    }
}

/// Squares, wrong in one way.
#[derive(Debug)]
enum Planted {
    /// Declared linear: squares of pending parts are not parts of the square.
    Linear,
    /// Twice the cotangent on the second rank of an axis.
    Doubled,
    /// Forward by the local extent.
    LocalMean,
    /// Reads its memory as if it had no gaps.
    Dense,
    /// Off by one on the second rank in f32.
    Narrow,
    /// A sum that is one on the second rank where there is nothing to sum.
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

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        if local.rank.is_dry() {
            return Ok([local.output(0)?].into_iter().collect());
        }
        let shape = x[0].view.shape.clone();
        let x = match self {
            // What lies at the start of the memory, in the order of the memory.
            Planted::Dense if x[0].numel() * x[0].dtype.size() <= x[0].buffer.bytes() => {
                let mut view = x[0].view.geometry();
                view.offset = 0;
                (0..shape.len()).for_each(|d| view.strides[d] = shape[d + 1..].iter().product());
                x[0].viewed(View::new(view.into()))
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
        let made = Piece::upload(local.rank, &out, &values)?;
        let made = if x.dtype == made.dtype { made } else { made.converted(local.rank, x.dtype)? };
        Ok([made].into_iter().collect())
    }

    fn keeps(&self) -> shardgrad_tensor::Keeps {
        shardgrad_tensor::Keeps { inputs: &[0], outputs: &[] }
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let (x, second) = (cx.input(0), cx.rank.index() == 1);
        cx.each(|_| match self {
            Planted::Linear => cx.grad(0),
            Planted::Doubled => x.mul(&cx.grad(0)).scale(if second { 4.0 } else { 2.0 }),
            Planted::Dense | Planted::Narrow => cx.grad(0),
            Planted::LocalMean | Planted::Empty => {
                let goal = cx.goal(0);
                let (shape, last) = (goal.shape(), goal.ndim() - 1);
                let op = shardgrad_tensor::ops::sum::Expand::to(&shape, &[last]).expect("the last dim");
                let is_mean = matches!(self, Planted::LocalMean);
                let scale = if is_mean { 1.0 / shape[last].max(1) as f64 } else { 1.0 };
                Tensor::apply_with(op, &[&cx.grad(0)], goal).scale(scale)
            }
        })
    }
}

fn planted(fault: Planted) -> Vec<Case> {
    vec![Case::new(Rc::new(fault), vec![Input::real(&[5, 3])])]
}

/// The list with one op more.
fn with(cases: fn() -> Vec<Case>) -> Vec<Entry> {
    let sound = ["add", "sub", "mul", "einsum", "permute", "sum", "relu", "concat"];
    let mut ops: Vec<Entry> = OPS.iter().filter(|e| sound.contains(&e.name)).copied().collect();
    ops.push(Entry { name: "planted", cases, source: "" });
    ops
}

#[test]
fn planted_faults_are_found_and_made_small() {
    let faults: [fn() -> Vec<Case>; 6] = [
        || planted(Planted::Linear),
        || planted(Planted::Doubled),
        || planted(Planted::LocalMean),
        || planted(Planted::Dense),
        || planted(Planted::Narrow),
        || planted(Planted::Empty),
    ];
    for (at, cases) in faults.into_iter().enumerate() {
        let error: Error = programs(&with(cases), 0, 2000).unwrap_err();
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
fn models_are_fuzzed_by_one_macro() {
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
fn what_one_rank_cannot_hold_in_f32_is_not_held_against_a_mesh() {
    let apply = |op: &str, arg| Step::Apply { op: op.into(), case: 0, args: vec![arg], is_quiet: false };
    let program = Program {
        mesh: "a=2".into(),
        dtype: DType::F32,
        inputs: vec![Feed { input: Input::real(&[3, 2]), marks: Marks::whole(2), is_leaf: false }],
        steps: vec![
            apply("expm1", Place::Input(0)),
            apply("sigmoid", Place::Made(0, 0)),
            apply("floor", Place::Made(1, 0)),
        ],
        blocks: vec![],
        outputs: vec![Place::Made(2, 0)],
        seed: 167_525,
    };
    assert!(matches!(program.check(OPS), Ok(Verdict::IllPosed)), "{:?}", program.check(OPS));
    let wide = Program { dtype: DType::F64, ..program };
    assert!(matches!(wide.check(OPS), Ok(Verdict::Right)), "{:?}", wide.check(OPS));
}

/// Pending parts of 0, each divided by 3 and rounded, add up to almost 0, where |x| has another slope.
#[test]
fn a_kink_at_nothing_is_not_held_against_a_mesh() {
    let apply = |op: &str, case, args| Step::Apply { op: op.into(), case, args, is_quiet: false };
    let feed = |input, marks: &str, is_leaf| Feed { input, marks: Marks::parse(marks).unwrap(), is_leaf };
    let program = Program {
        mesh: "a=4".into(),
        dtype: DType::F32,
        inputs: vec![
            feed(Input::real(&[1, 4]), "[, ]", false),
            feed(Input::real(&[4]), "[:1] +a", true),
            feed(Input::Positive(vec![3, 4]), "[, ]", false),
        ],
        steps: vec![
            apply("div", 2, vec![Place::Input(1), Place::Input(2)]),
            apply("abs", 0, vec![Place::Made(0, 0)]),
        ],
        blocks: vec![],
        outputs: vec![Place::Made(1, 0)],
        seed: 316_830,
    };
    assert!(matches!(program.check(OPS), Ok(Verdict::IllPosed)), "{:?}", program.check(OPS));
}
