//! Gradients at equal elements and at NaN, compared with those of PyTorch.

use shardgrad_autograd::{Tape, Var};
use shardgrad_dist::{Mesh, Result, World};
use shardgrad_tensor::methods::elementwise::Elementwise;
use shardgrad_tensor::methods::reduction::Reduction;
use shardgrad_tensor::{DType, Layout, Tensor, Value};

const NAN: f64 = f64::NAN;

/// Gradients of the sum of `f` with respect to arguments of one layout.
fn gradients(mesh: &str, layout: &str, args: &[&[f64]], f: fn(&[Var]) -> Var) -> Vec<Vec<f64>> {
    let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let (tape, layout) = (Tape::new(rank), Layout::parse(layout, rank.mesh())?);
        let leaf = |(key, data): (usize, &&[f64])| {
            let x = Tensor::from_global(rank, &layout.with_dtype(DType::F64), data)?;
            Ok(tape.leaf(key as u64, &x.cast(layout.dtype())))
        };
        let leaves: Vec<Var> = args.iter().enumerate().map(leaf).collect::<Result<_>>()?;
        f(&leaves).cast(DType::F64).sum().backward()?;
        tape.gradients().values().map(Tensor::to_f64).collect::<Result<Vec<_>>>()
    });
    ranks.unwrap().remove(0)
}

/// Compares bit by bit, except that any NaN equals any other.
fn assert_same(got: &[f64], want: &[f64], what: &str) {
    let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
    let all = got.len() == want.len() && got.iter().zip(want).all(same);
    assert!(all, "{what}: {got:?} instead of {want:?}");
}

#[test]
fn std_gradient_of_equal_elements_is_zero() {
    let x = [3.0, 3.0, 3.0, 3.0, 1.0, 2.0, 2.0, 3.0];
    for dtype in ["f64", "f32", "bf16", "f16"] {
        for (mesh, shape) in [("", "[2, 4]"), ("a=2", "[2, 4@a]"), ("a=2", "[2@a, 4]")] {
            for correction in [|x: &[Var]| x[0].std(&[1], 0.0), |x: &[Var]| x[0].std(&[1], 1.0)] {
                let got = gradients(mesh, &format!("{dtype}{shape}"), &[&x], correction).remove(0);
                assert_same(&got[..4], &[0.0; 4], &format!("{dtype}{shape}"));
                let varied = got[4] < -0.3 && got[5..7] == [0.0, 0.0] && got[7] == -got[4];
                assert!(varied, "{dtype}{shape}: the row of unequal elements: {got:?}");
            }
        }
    }
}

#[test]
fn sample_std_gradient_of_one_element_is_nan() {
    let got = gradients("", "f64[2, 1]", &[&[3.0, 1.0]], |x| x[0].std(&[1], 1.0)).remove(0);
    assert!(got.iter().all(|g| g.is_nan()), "{got:?}");
}

#[test]
fn maximum_and_minimum_of_nan_send_the_gradient_to_both() {
    let (a, b) = ([1.0, 5.0, 2.0, NAN, 1.0, NAN], [4.0, 3.0, 2.0, 1.0, NAN, NAN]);
    for dtype in ["f64", "f32", "bf16", "f16"] {
        for (mesh, shape) in [("", "[6]"), ("a=2", "[6@a]"), ("a=4", "[6] +a")] {
            let of = |f| gradients(mesh, &format!("{dtype}{shape}"), &[&a, &b], f);
            let got = of(|x| x[0].maximum(&x[1]));
            assert_same(&got[0], &[0.0, 1.0, 0.5, 1.0, 1.0, 1.0], dtype);
            assert_same(&got[1], &[1.0, 0.0, 0.5, 1.0, 1.0, 1.0], dtype);
            let got = of(|x| x[0].minimum(&x[1]));
            assert_same(&got[0], &[1.0, 0.0, 0.5, 1.0, 1.0, 1.0], dtype);
            assert_same(&got[1], &[0.0, 1.0, 0.5, 1.0, 1.0, 1.0], dtype);
        }
    }
}

#[test]
fn maxima_that_tie_share_the_gradient_over_all_shards() {
    // Three of four elements tie, in two or three shards.
    let x = [7.0, 1.0, 7.0, 7.0];
    for (mesh, layout) in [("", "f64[1, 4]"), ("a=2", "f64[1, 4@a]"), ("a=3", "f64[1, 4@a]")] {
        for (sign, f) in [(1.0, (|x| x[0].amax(&[1])) as fn(&[Var]) -> Var), (-1.0, |x| x[0].amin(&[1]))] {
            let got = gradients(mesh, layout, &[&x.map(|x| sign * x)], f).remove(0);
            assert_same(&got, &[1.0 / 3.0, 0.0, 1.0 / 3.0, 1.0 / 3.0], &format!("{layout} on {mesh}"));
        }
    }
}

#[test]
fn amax_and_amin_gradient_of_a_nan_row_is_nan() {
    let x = [1.0, NAN, 3.0, 5.0, 5.0, 1.0];
    for dtype in ["f64", "f32", "bf16", "f16"] {
        for (mesh, shape) in [("", "[2, 3]"), ("a=2", "[2, 3@a]"), ("a=4", "[2, 3@a]")] {
            let of = |f| gradients(mesh, &format!("{dtype}{shape}"), &[&x], f).remove(0);
            assert_same(&of(|x| x[0].amax(&[1])), &[NAN, NAN, NAN, 0.5, 0.5, 0.0], dtype);
            assert_same(&of(|x| x[0].amin(&[1])), &[NAN, NAN, NAN, 0.0, 0.0, 1.0], dtype);
        }
    }
}

#[test]
fn clamp_and_relu_gradients_at_kinks_and_nan() {
    for dtype in ["f64", "f32", "bf16", "f16"] {
        let of = |f| gradients("", &format!("{dtype}[4]"), &[&[-1.0, 0.0, 2.0, NAN]], f).remove(0);
        assert_same(&of(|x| x[0].clamp(-0.5, 1.0)), &[0.0, 1.0, 0.0, 0.0], "clamp");
        assert_same(&of(|x| x[0].clamp(-0.5, f64::INFINITY)), &[0.0, 1.0, 1.0, 0.0], "clamp from below");
        assert_same(&of(|x| x[0].relu()), &[0.0, 0.0, 1.0, 1.0], "relu");
        assert_same(&of(|x| x[0].leaky_relu(0.5)), &[0.5, 0.5, 1.0, 0.5], "leaky relu");
    }
}
