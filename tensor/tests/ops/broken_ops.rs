//! Mutation tests of the op checks: broken ops, each of which the checks must report.

use crate::layouts::{RowSelection, cases, references, run_rows};
use shardgrad_dist::Result;
use shardgrad_kernels::op::{embedding, random, reduce};
use shardgrad_kernels::{DType, Scalar, Strides};
use shardgrad_tensor::op::{
    Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, infer_by_signature,
};
use shardgrad_tensor::ops::add::Add;
use shardgrad_tensor::ops::dropout::Dropout;
use shardgrad_tensor::ops::embedding::Embedding;
use shardgrad_tensor::ops::layer_norm::LayerNorm;
use shardgrad_tensor::ops::max_last::MaxLast;
use shardgrad_tensor::ops::mul::Mul;
use shardgrad_tensor::ops::scale::Scale;
use shardgrad_tensor::ops::softmax::Softmax;
use shardgrad_tensor::ops::sum::Sum;
use shardgrad_tensor::ops::sum_squares::SumSquares;
use shardgrad_tensor::ops::unary::Silu;
use shardgrad_tensor::ops::{Case, Input, OpModule};
use shardgrad_tensor::{Context, Inference, Layout, LocalTensor, Placement, Refusal, Tensor, Value as _};
use shardgrad_testing::check_op;
use shardgrad_testing::op_check::{Size, gradcheck};
use std::rc::Rc;

type Forward = fn(&ForwardContext<'_>, &[&LocalTensor]) -> Result<LocalTensors>;
type Tamper = fn(&Vjp<'_>, Cotangents) -> Cotangents;

/// An op with one part replaced.
#[derive(Debug)]
struct Broken {
    inner: Rc<dyn Op>,
    linear_in: Option<&'static [&'static [usize]]>,
    forward: Option<Forward>,
    tamper: Option<Tamper>,
    refuses: bool,
}

impl Broken {
    fn of(inner: Rc<dyn Op>) -> Broken {
        Broken { inner, linear_in: None, forward: None, tamper: None, refuses: false }
    }

    fn on(self, inputs: Vec<Input>) -> Vec<Case> {
        vec![Case::new(Rc::new(self), inputs)]
    }
}

impl Op for Broken {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn signature(&self) -> &str {
        self.inner.signature()
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        self.linear_in.unwrap_or(self.inner.linear_in())
    }

    fn differentiable(&self) -> &'static [bool] {
        self.inner.differentiable()
    }

    fn num_saved(&self) -> usize {
        self.inner.num_saved()
    }

    fn accumulates_in_place(&self) -> bool {
        self.inner.accumulates_in_place()
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        self.inner.saved_for_backward()
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        self.inner.dtypes(inputs, num_outputs)
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        if self.refuses && args[0].mesh().num_ranks() > 1 {
            return Err(Refusal::new("whole", "this op refuses every layout".into(), &[(0, 0)]));
        }
        if self.linear_in.is_some() {
            return infer_by_signature(self, context, args, dtypes, want);
        }
        self.inner.infer(context, args, dtypes, want)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        self.forward.map_or_else(|| self.inner.forward(local, x), |f| f(local, x))
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let cotangents = self.inner.vjp(cx);
        self.tamper.map_or_else(|| cotangents.clone(), |t| t(cx, cotangents.clone()))
    }
}

fn matrix() -> Vec<Input> {
    vec![Input::real(&[5, 4])]
}

fn silu_declared_linear() -> Vec<Case> {
    Broken { linear_in: Some(&[&[0]]), ..Broken::of(Rc::new(Silu)) }.on(matrix())
}

fn squares_declared_linear() -> Vec<Case> {
    Broken { linear_in: Some(&[&[0]]), ..Broken::of(Rc::new(SumSquares)) }.on(matrix())
}

fn add_declared_linear_in_each() -> Vec<Case> {
    Broken { linear_in: Some(&[&[0], &[1]]), ..Broken::of(Add::of(1, 1)) }
        .on(vec![Input::real(&[5]), Input::real(&[5])])
}

fn mean_by_the_local_extent() -> Vec<Case> {
    let forward: Forward = |local, x| {
        let scale = 1.0 / x[0].numel().max(1) as f64;
        local.launch(&reduce::SUM, &[x[0]], &[Scalar::Int(2), Scalar::Real(scale)])
    };
    Broken { forward: Some(forward), ..Broken::of(Rc::new(Sum::over(2, &[0, 1], true).unwrap())) }
        .on(matrix())
}

fn dropout_by_the_local_index() -> Vec<Case> {
    let forward: Forward = |local, x| {
        let mut scalars = vec![Scalar::Real(0.5), Scalar::Int(1), Scalar::Int(1)];
        scalars.extend(x[0].view.shape.iter().flat_map(|&n| [Scalar::Int(n as i64), Scalar::Int(0)]));
        local.launch(&random::DROPOUT, &[&x[0].contiguous(local.rank)?], &scalars)
    };
    let inner = Rc::new(Dropout { p: 0.5, key: 1, stream: 1, first_row: 0, is_step_seeded: false });
    Broken { forward: Some(forward), ..Broken::of(inner) }.on(matrix())
}

fn embedding_without_its_offset() -> Vec<Case> {
    let forward: Forward = |local, x| {
        let rows = local.label("v").0 as i64;
        let x = local.contiguous(x)?;
        local.launch(&embedding::FORWARD, &[&x[0], &x[1]], &[Scalar::Int(0), Scalar::Int(rows)])
    };
    Broken { forward: Some(forward), ..Broken::of(Rc::new(Embedding)) }
        .on(vec![Input::real(&[7, 4]), Input::index(&[5], 7)])
}

fn norm_whose_weight_cotangent_is_not_partial() -> Vec<Case> {
    let tamper: Tamper = |_, mut cotangents| {
        cotangents[1] = cotangents[1].take().map(|dw| {
            let named = dw
                .layout()
                .partial()
                .iter()
                .fold(dw.layout().clone(), |l, a| l.with_placement(a, Placement::Invariant));
            Tensor::assemble(dw.rank(), named, dw.local().clone())
        });
        cotangents
    };
    Broken { tamper: Some(tamper), ..Broken::of(Rc::new(LayerNorm { eps: 1.0 })) }.on(vec![
        Input::real(&[5, 4]),
        Input::real(&[4]),
        Input::real(&[4]),
    ])
}

fn max_without_all_reduce() -> Vec<Case> {
    let forward: Forward = |local, x| local.launch(&reduce::MAX, &[x[0]], &[Scalar::Int(1)]);
    Broken { forward: Some(forward), ..Broken::of(Rc::new(MaxLast)) }.on(matrix())
}

fn doubled_vjp() -> Vec<Case> {
    let tamper: Tamper = |_, cotangents| cotangents.into_iter().map(|c| c.map(|c| c.scale(2.0))).collect();
    Broken { tamper: Some(tamper), ..Broken::of(Mul::of(1, 1)) }
        .on(vec![Input::real(&[5]), Input::real(&[5])])
}

fn vjp_that_ignores_the_mask() -> Vec<Case> {
    let tamper: Tamper = |cx, cotangents| {
        let g = || Some(cx.grad(0));
        cotangents.iter().map(|_| g()).collect()
    };
    Broken { tamper: Some(tamper), ..Broken::of(Add::of(1, 1)) }
        .on(vec![Input::real(&[5]), Input::real(&[5])])
}

fn vjp_with_a_redistribution_step() -> Vec<Case> {
    let tamper: Tamper = |_, cotangents| cotangents.into_iter().map(|c| c.map(|c| c.exp().log())).collect();
    Broken { tamper: Some(tamper), ..Broken::of(Add::of(1, 1)) }
        .on(vec![Input::real(&[5]), Input::real(&[5])])
}

fn strided_memory_read_as_contiguous() -> Vec<Case> {
    let forward: Forward = |local, x| {
        let dense = x[0].with_view(Strides::contiguous(&x[0].view.shape));
        Ok([dense.contiguous(local.rank)?].into_iter().collect())
    };
    Broken { forward: Some(forward), ..Broken::of(Rc::new(Scale { factor: 1.0 })) }.on(matrix())
}

fn refusal_without_help() -> Vec<Case> {
    Broken { refuses: true, ..Broken::of(Rc::new(Silu)) }.on(matrix())
}

/// The text that a check must report, and the broken cases.
type BrokenCase = (&'static str, fn() -> Vec<Case>);

const BROKEN: &[BrokenCase] = &[
    ("needs a redistribution step inside a vjp", silu_declared_linear),
    ("instead of", squares_declared_linear),
    ("instead of", add_declared_linear_in_each),
    ("instead of", mean_by_the_local_extent),
    ("instead of", dropout_by_the_local_index),
    ("instead of", embedding_without_its_offset),
    ("the cotangent of argument 1", norm_whose_weight_cotangent_is_not_partial),
    ("instead of", max_without_all_reduce),
    ("differences say", doubled_vjp),
    ("asked for cotangent 0 alone", vjp_that_ignores_the_mask),
    ("needs a redistribution step inside a vjp", vjp_with_a_redistribution_step),
    ("on views with gaps: output 0", strided_memory_read_as_contiguous),
    ("refused without a repair", refusal_without_help),
];

/// All failures that the checks report for some cases, on one rank and on two.
fn failures(make: fn() -> Vec<Case>) -> Vec<String> {
    let entry = OpModule { name: "broken", cases: make, source: "" };
    let references = references(&[entry]);
    let sizes = vec![Size::Given, Size::One];
    let selection = RowSelection {
        mesh: "a=2",
        sizes,
        strided: &[false, true],
        all_max: 1000,
        sample: 0,
        has_grains: false,
    };
    let mut failures = run_rows(&[entry], &selection).unwrap().failures;
    for (i, reference) in references[0].iter().enumerate() {
        failures.extend(gradcheck(|| cases(&entry).swap_remove(i), reference).err().map(|e| e.to_string()));
    }
    failures
}

#[test]
fn every_broken_op_is_reported() {
    for (at, (report, make)) in BROKEN.iter().enumerate() {
        let found = failures(*make);
        assert!(
            found.iter().any(|f| f.contains(report)),
            "fault {at}: no check reports `{report}`: {found:?}"
        );
    }
}

#[test]
fn correct_ops_are_not_reported() {
    let correct: [fn() -> Vec<Case>; 3] = [
        || Broken::of(Rc::new(Silu)).on(matrix()),
        || Broken::of(Rc::new(MaxLast)).on(matrix()),
        || Broken::of(Mul::of(1, 1)).on(vec![Input::real(&[5]), Input::real(&[5])]),
    ];
    for make in correct {
        assert_eq!(failures(make), [""; 0]);
    }
}

#[test]
fn check_op_macro_checks_a_user_defined_op() {
    let tried = check_op!(Rc::new(Broken::of(Rc::new(Softmax))), [Input::real(&[5, 4])]).unwrap();
    assert!(tried.accepted > 100 && tried.refused > 50, "{tried:?}");
    let wrong = check_op!(
        Rc::new(Broken { linear_in: Some(&[&[0]]), ..Broken::of(Rc::new(SumSquares)) }),
        [Input::real(&[5, 4])]
    );
    assert!(wrong.unwrap_err().to_string().contains("instead of"));
    let tamper: Tamper = |_, mut cotangents| {
        cotangents[1] = None;
        cotangents
    };
    let forgets = check_op!(
        Rc::new(Broken { tamper: Some(tamper), ..Broken::of(Add::of(1, 1)) }),
        [Input::real(&[5]), Input::real(&[5])]
    );
    assert!(forgets.unwrap_err().to_string().contains("returns no cotangent for argument 1"));
    let fixed = check_op!(Rc::new(Broken::of(Rc::new(Silu))), [Input::real(&[3])], fixed).unwrap();
    assert!(fixed.accepted > 40 && fixed.refused == 0, "{fixed:?}");
}
