//! Tests of `local_map`: values, gradients, refused layouts and local tensors, dry runs.

use super::*;
use crate::execution::local_tensor::launch;
use shardgrad_dist::{Mesh, World};
use shardgrad_kernels::Scalar;
use shardgrad_kernels::op::reduce::SUM;
use std::cell::RefCell;

/// The sum of the elements that a rank holds.
fn total(rank: &Rank, x: &[LocalTensor]) -> Result<LocalTensors> {
    let mut y = LocalTensor::alloc(rank, x[0].dtype, &[])?;
    launch(rank, &SUM, &[&x[0]], &mut [&mut y], &[Scalar::Int(1), Scalar::Real(1.0)])?;
    Ok([y].into_iter().collect())
}

/// The cotangent of the sum, repeated.
fn repeated(_: &Rank, x: &[LocalTensor], g: &[LocalTensor]) -> Result<LocalTensors> {
    let view = g[0].view.broadcast(&x[0].view.shape).expect("a scalar repeats to any shape");
    Ok([g[0].with_view(view)].into_iter().collect())
}

fn summed(x: &Tensor, cotangents: &[Layout]) -> Tensor {
    let scalar = Layout::parse("f64[] +a", x.rank().mesh()).unwrap();
    let layouts = LocalMapLayouts { inputs: &[x.layout().clone()], outputs: &[scalar], cotangents };
    local_map("total", &[x], layouts, total, repeated).remove(0)
}

#[test]
fn cotangent_comes_from_the_backward_function() {
    World::run(Mesh::parse("a=2").unwrap(), |rank| {
        let layout = Layout::parse("f64[5@a]", rank.mesh())?;
        let x = Tensor::zeros(rank, &layout)?;
        let scalar = Layout::parse("f64[] +a", rank.mesh())?;
        let (inputs, outputs) = ([layout.clone()], [scalar.clone()]);
        let layouts = LocalMapLayouts { inputs: &inputs, outputs: &outputs, cotangents: &inputs };
        let cotangents = LocalMap::new("total", layouts, total, repeated).vjp(&Vjp {
            rank,
            inputs: &[Some(x)],
            outputs: &[None],
            input_layouts: &inputs,
            output_layouts: &outputs,
            grads: &[Some(Tensor::full(rank, &scalar.dual(), 2.5)?)],
            needs_input_grad: &[true],
            donated: RefCell::default(),
            accumulators: &[],
        });
        let dx = cotangents[0].as_ref().expect("it was wanted");
        assert_eq!((dx.layout(), dx.to_f64()?), (&layout, vec![2.5; 5]));
        Ok(())
    })
    .unwrap();
}

#[test]
fn local_sum_gives_a_partial_sum() {
    World::run(Mesh::parse("a=2").unwrap(), |rank| {
        let layout = Layout::parse("f64[5@a]", rank.mesh())?;
        let x = Tensor::from_global(rank, &layout, &[1.0, 2.0, 3.0, 4.0, 5.0])?;
        let y = summed(&x, &[layout]);
        assert_eq!(y.layout().to_string(), "f64[] +a");
        assert_eq!(y.item()?, 15.0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn mismatched_layouts_are_refused() {
    let refused = |x: &'static str, cotangent: &'static str| {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let x = Tensor::zeros(rank, &Layout::parse(x, rank.mesh())?)?;
            let _ = summed(&x, &[Layout::parse(cotangent, rank.mesh())?]);
            Ok(())
        })
        .unwrap_err()
        .to_string()
    };
    let error = refused("f64[5@a]", "f64[5] +a");
    assert!(
        error.contains("argument 0 is f64[5@a], whose cotangent must be f64[5@a], not f64[5] +a"),
        "{error}"
    );
    assert!(refused("f64[5] ~a", "f64[5]").contains("whose cotangent must be f64[5] +a"), "{error}");
}

type Make = fn(&Rank, &[LocalTensor]) -> Result<LocalTensors>;

const WRONG: [(Make, &str); 4] = [
    (|_, _| Ok(LocalTensors::new()), "0 local tensors for 1"),
    (|_, x| Ok([x[0].clone(), x[0].clone()].into_iter().collect()), "2 local tensors for 1"),
    (
        |rank, _| Ok([LocalTensor::full(rank, DType::F64, &[1], 0.0)?].into_iter().collect()),
        "f64[1] as local tensor 0; of f64[4@a] this rank holds f64[2]",
    ),
    (|rank, x| Ok([x[0].to_dtype(rank, DType::F32)?].into_iter().collect()), "f32[2] as local tensor 0;"),
];

#[test]
fn mismatched_local_results_are_refused() {
    for (make, what) in WRONG {
        let error = World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let layout = [Layout::parse("f64[4@a]", rank.mesh())?];
            let x = Tensor::zeros(rank, &layout[0])?;
            let layouts = LocalMapLayouts { inputs: &layout, outputs: &layout, cotangents: &layout };
            let _ = local_map("mine", &[&x], layouts, make, |_, x, _| Ok(x.iter().cloned().collect()));
            Ok(())
        })
        .unwrap_err();
        assert_eq!(error.kind(), Kind::Shape, "{error}");
        assert!(error.message().starts_with("local_map mine: the forward function returned"), "{error}");
        assert!(error.message().contains(what), "{error}");
        assert!(error.site().is_some_and(|s| s.file() == file!()), "{error}");
        assert!(error.details().iter().any(|d| d.0 == "help"), "{error}");
    }
}

#[test]
fn mismatched_local_cotangents_are_refused() {
    for (make, what) in WRONG {
        let error = World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let layout = [Layout::parse("f64[4@a]", rank.mesh())?];
            let x = Tensor::zeros(rank, &layout[0])?;
            let layouts = LocalMapLayouts { inputs: &layout, outputs: &layout, cotangents: &layout };
            let same = |_: &Rank, x: &[LocalTensor]| Ok(x.iter().cloned().collect());
            let _ = LocalMap::new("mine", layouts, same, move |rank, x, _| make(rank, x)).vjp(&Vjp {
                rank,
                inputs: &[Some(x.clone())],
                outputs: &[None],
                input_layouts: &layout,
                output_layouts: &layout,
                grads: &[Some(x)],
                needs_input_grad: &[true],
                donated: RefCell::default(),
                accumulators: &[],
            });
            Ok(())
        })
        .unwrap_err();
        assert_eq!(error.kind(), Kind::Shape, "{error}");
        assert!(error.message().starts_with("local_map mine: the backward function returned"), "{error}");
        assert!(error.message().contains(what), "{error}");
    }
}

/// The functions read values, which a dry run does not have.
#[test]
fn dry_run_does_not_call_the_functions() {
    let read = |rank: &Rank, x: &[LocalTensor]| {
        let first = x[0].to_f64(rank)?[0];
        Ok([LocalTensor::upload(rank, &x[0].view.shape, &vec![first; x[0].numel()])?].into_iter().collect())
    };
    let on = |rank: &Rank| {
        let layout = [Layout::parse("f64[4@a]", rank.mesh())?];
        let x = Tensor::full(rank, &layout[0], 1.0)?;
        let layouts = LocalMapLayouts { inputs: &layout, outputs: &layout, cotangents: &layout };
        let y = local_map("mine", &[&x], layouts, read, |_, x, _| Ok(x.iter().cloned().collect())).remove(0);
        let dx = LocalMap::new("mine", layouts, read, move |rank, x, _| read(rank, x)).vjp(&Vjp {
            rank,
            inputs: &[Some(x.clone())],
            outputs: &[None],
            input_layouts: &layout,
            output_layouts: &layout,
            grads: &[Some(x)],
            needs_input_grad: &[true],
            donated: RefCell::default(),
            accumulators: &[],
        });
        Ok([y.layout().to_string(), dx[0].as_ref().expect("it was wanted").layout().to_string()])
    };
    assert_eq!(World::new(Mesh::parse("a=2").unwrap()).dry_run(1, on).unwrap(), ["f64[4@a]"; 2]);
    assert_eq!(World::run(Mesh::parse("a=2").unwrap(), on).unwrap()[0], ["f64[4@a]"; 2]);
}

#[test]
fn upload_needs_as_many_elements_as_the_shape() {
    World::run(Mesh::single(), |rank| {
        for (shape, held) in [(&[2, 3][..], 5), (&[2, 3], 7), (&[], 0), (&[usize::MAX, 2], 1)] {
            let error = LocalTensor::upload(rank, shape, &vec![0.0f64; held]).unwrap_err();
            assert_eq!(error.kind(), Kind::Shape, "{error}");
            assert_eq!(error.message(), format!("{held} elements for a local tensor of shape {shape:?}"));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn local_map_without_arguments_is_refused() {
    let error = World::run(Mesh::single(), |rank| {
        let outputs = [Layout::parse("f64[4]", rank.mesh())?];
        let layouts = LocalMapLayouts { inputs: &[], outputs: &outputs, cotangents: &[] };
        let made: SmallVec<[Tensor; 2]> = local_map(
            "mine",
            &[],
            layouts,
            |_, _| Ok(LocalTensors::new()),
            |_, _, _| Ok(LocalTensors::new()),
        );
        Ok(made.len())
    })
    .unwrap_err();
    assert_eq!(error.kind(), Kind::Shape, "{error}");
    assert_eq!(error.message(), "local_map mine: needs at least one argument");
    assert!(error.site().is_some(), "{error}");
}
