//! Errors of a user's op name the op and the line that applied it.

use shardgrad_autograd::Tape;
use shardgrad_dist::{Error, Kind, Mesh, Result, World};
use shardgrad_tensor::{
    Cotangents, ForwardContext, Layout, LocalTensor, LocalTensors, Op, SavedForBackward, Tensor, Value, Vjp,
};
use std::rc::Rc;

/// y = x + x', with a vjp that the test chooses.
#[derive(Debug)]
struct Mine(fn(&Vjp<'_>) -> Cotangents);

impl Op for Mine {
    fn name(&self) -> &'static str {
        "mine"
    }

    fn signature(&self) -> &str {
        "..m, ..m -> ..m"
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[0], outputs: &[] }
    }

    fn forward(&self, _: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Ok([x[0].clone()].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        (self.0)(cx)
    }
}

/// The error of a backward pass through the op.
fn error(vjp: fn(&Vjp<'_>) -> Cotangents) -> Error {
    let ran = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        let layout = Layout::parse("f32[4@dp, 8]", rank.mesh())?;
        let (tape, x) = (Tape::new(rank), Tensor::full(rank, &layout, 2.0)?);
        let (a, b) = (tape.leaf(1, &x), tape.leaf(2, &x));
        Value::apply_one(Rc::new(Mine(vjp)), &[&a, &b]).sum().backward()
    });
    ran.expect_err("the vjp is wrong")
}

#[test]
fn vjp_errors_name_the_op() {
    type Case = (fn(&Vjp<'_>) -> Cotangents, Kind, &'static str);
    let cases: [Case; 6] = [
        (
            |cx| cx.cotangents(|i| cx.grad(0).mul(cx.input(0)).sum_dims(&[i])),
            Kind::Layout,
            "mine: the vjp returns f32[8] +dp as the cotangent of argument 0",
        ),
        (
            |cx| cx.cotangents(|_| cx.input(1).clone()),
            Kind::Unsupported,
            "the vjp reads argument 1, which Op::saved_for_backward",
        ),
        (
            |cx| cx.cotangents(|_| cx.input(5).clone()),
            Kind::Unsupported,
            "the vjp reads argument 5, but there are 2",
        ),
        (
            |cx| cx.cotangents(|_| cx.output(0).clone()),
            Kind::Unsupported,
            "the vjp reads output 0, which Op::saved_for_backward",
        ),
        (
            |cx| cx.cotangents(|_| cx.grad(1)),
            Kind::Unsupported,
            "the vjp reads the cotangent of output 1, but there are 1",
        ),
        (
            |_| [None, None].into_iter().collect(),
            Kind::Unsupported,
            "mine: the vjp returns no cotangent for argument 0",
        ),
    ];
    for (vjp, kind, text) in cases {
        let error = error(vjp);
        assert!(error.kind() == kind && error.message().starts_with(text), "{text}: {error}");
        assert!(error.details().iter().any(|(label, of)| *label == "vjp" && of == "mine"), "{error}");
        assert!(error.site().is_some_and(|s| s.file() == file!()), "{error}");
    }
}
