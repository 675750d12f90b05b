//! Tensors computed from element indices: `from_fn`, `arange`, `linspace`, `bernoulli`. Each rank fills its own part by
//! global index, so the values are the same on any mesh.

use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::tensor::{Tensor, check_mesh, holds_zeros};
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::op::compare_select::LT;
use shardgrad_kernels::{DType, Dims};
use std::panic::Location;

impl Tensor {
    /// Makes a tensor with element f(i) at row-major global index i, rounded to the nearest number of the dtype,
    /// ties to even; for bool any value except 0 is true. On a partial axis the rank at coordinate 0 holds the
    /// values, the others hold zeros.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::Shape` for more elements than memory can
    /// address; `Kind::OutOfMemory`.
    #[doc(alias = "make_array_from_callback")]
    #[doc(alias = "fromfunction")]
    #[track_caller]
    pub fn from_fn(rank: &Rank, layout: &Layout, f: impl Fn(usize) -> f64) -> Result<Tensor> {
        check_mesh(rank, layout, Location::caller())?;
        if holds_zeros(layout, rank) {
            return Tensor::zeros(rank, layout);
        }
        layout.check_addressable()?;
        let local_shape = layout.local_shape(rank.coordinates());
        // Conversions between floats round to nearest, conversions to integers towards zero.
        let is_integer = matches!(layout.dtype(), DType::I64 | DType::U8);
        let value = |i| if is_integer { f(i).round_ties_even() } else { f(i) };
        let values: Vec<f64> = global_indices(layout, rank).into_iter().map(value).collect();
        let local = LocalTensor::upload(rank, &local_shape, &values)?;
        let local =
            if layout.dtype() == DType::F64 { local } else { local.to_dtype(rank, layout.dtype())? };
        Ok(Tensor::assemble(rank, layout.clone(), local))
    }

    /// Makes a tensor with elements start, start + step, start + 2 step, .. in row-major order, each rounded once.
    ///
    /// # Errors
    /// As [`Tensor::from_fn`].
    #[track_caller]
    pub fn arange(rank: &Rank, layout: &Layout, start: f64, step: f64) -> Result<Tensor> {
        Tensor::from_fn(rank, layout, |i| step.mul_add(i as f64, start))
    }

    /// Makes a tensor with evenly spaced numbers from `first` to `last`, both included, in row-major order.
    ///
    /// # Errors
    /// As [`Tensor::from_fn`].
    #[track_caller]
    pub fn linspace(rank: &Rank, layout: &Layout, first: f64, last: f64) -> Result<Tensor> {
        let steps = layout.numel().saturating_sub(1);
        let (span, count) = (last - first, steps as f64);
        // Multiply first unless the product overflows: where first, last and i are integers the product is exact,
        // and only the quotient is rounded.
        let part = |i: f64| if (span * count).is_finite() { span * i / count } else { span * (i / count) };
        let at = |i: usize| if i == steps { last } else { first + part(i as f64) };
        Tensor::from_fn(rank, layout, |i| if i == 0 { first } else { at(i) })
    }

    /// Makes a tensor with elements 1 with probability p, else 0: 1 where [`Tensor::uniform`] of 0..1 in f64 is
    /// below p for the same key and stream. On a partial axis the rank at coordinate 0 holds the values, the others
    /// hold zeros.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn bernoulli(rank: &Rank, layout: &Layout, key: u64, stream: u64, p: f64) -> Result<Tensor> {
        check_mesh(rank, layout, Location::caller())?;
        if holds_zeros(layout, rank) {
            return Tensor::zeros(rank, layout);
        }
        let uniform = Tensor::uniform(rank, &layout.with_dtype(DType::F64), key, stream, 0.0, 1.0)?;
        let shape = layout.local_shape(rank.coordinates());
        let bound = LocalTensor::full(rank, DType::F64, &[], p)?;
        let bound = bound.with_view(bound.view.broadcast(&shape).expect("one element fits any shape"));
        let mut drawn = LocalTensor::alloc(rank, DType::Bool, &shape)?;
        launch(rank, &LT, &[uniform.local(), &bound], &mut [&mut drawn], &[])?;
        let local =
            if layout.dtype() == DType::Bool { drawn } else { drawn.to_dtype(rank, layout.dtype())? };
        Ok(Tensor::assemble(rank, layout.clone(), local))
    }
}

/// Returns the row-major global index of each local element.
fn global_indices(layout: &Layout, rank: &Rank) -> Vec<usize> {
    let ranges: Vec<_> = (0..layout.ndim()).map(|d| layout.range(d, rank.coordinates())).collect();
    let extents: Dims = layout.shape();
    let mut global_indices = vec![0];
    for (range, extent) in ranges.iter().zip(&extents) {
        global_indices =
            global_indices.iter().flat_map(|at| range.clone().map(move |i| at * extent + i)).collect();
    }
    global_indices
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Kind, Mesh, World};

    type Make = fn(&Rank, &Layout) -> Result<Tensor>;

    const MADE: [Make; 6] = [
        |rank, layout| Tensor::arange(rank, layout, 3.0, 2.0),
        |rank, layout| Tensor::linspace(rank, layout, -1.0, 1.0),
        |rank, layout| Tensor::bernoulli(rank, layout, 5, 1, 0.3),
        |rank, layout| Tensor::full(rank, layout, 2.0),
        |rank, layout| Tensor::uniform(rank, layout, 5, 1, -1.0, 2.0),
        |rank, layout| Tensor::normal(rank, layout, 5, 1, 0.5),
    ];

    fn values(mesh: &str, text: &str, make: Make) -> Vec<f64> {
        let made = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            make(rank, &Layout::parse(text, rank.mesh())?)?.to_f64()
        });
        made.unwrap().remove(0)
    }

    /// A smaller mesh, a mesh with another axis name, a mesh with more axes: refused where the tensor is made,
    /// naming the user's line.
    #[test]
    fn a_layout_on_another_mesh_is_refused() {
        let whole: Make = |rank, layout| Tensor::from_global(rank, layout, &vec![1f32; layout.numel()]);
        let own: Make = |rank, layout| Tensor::from_local(rank, layout, &[1f32; 4]);
        for make in MADE.into_iter().chain([whole, own]) {
            for (mesh, text) in
                [("", "f32[8]"), ("b=2", "f32[8@b]"), ("a=2,b=4", "f32[8@b]"), ("a=4", "f32[8]")]
            {
                let other = Mesh::parse(mesh).unwrap();
                let made = World::run(Mesh::parse("a=2").unwrap(), |rank| {
                    make(rank, &Layout::parse(text, &other)?).map(drop)
                });
                let error = made.unwrap_err();
                assert_eq!(error.kind(), Kind::Mesh, "{error}");
                assert_eq!(error.message(), format!("the layout is on {other}, the rank on mesh(a=2)"));
                assert!(error.site().is_some_and(|site| site.file() == file!()), "{error}");
            }
        }
    }

    #[test]
    fn values_are_the_same_on_any_mesh() {
        for make in MADE {
            for dtype in ["f64", "f32", "bf16"] {
                let one = values("a=1", &format!("{dtype}[5, 7]"), make);
                for (mesh, rest) in [
                    ("a=2", "[5@a, 7]"),
                    ("a=2", "[5, 7@a]"),
                    ("a=3,b=2", "[5@a, 7@b]"),
                    ("a=3,b=2", "[5@b@a, 7]"),
                    ("a=8", "[5@a, 7]"),
                    ("a=2", "[5, 7] +a"),
                    ("a=3,b=2", "[5, 7@b] +a"),
                    ("a=3,b=2", "[5, 7] ~a +b"),
                ] {
                    assert_eq!(values(mesh, &format!("{dtype}{rest}"), make), one, "{mesh} {rest}");
                }
            }
        }
    }

    #[test]
    fn made_tensors_match_hand_computed_values() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let layout = |text: &str| Layout::parse(text, rank.mesh());
            assert_eq!(
                Tensor::arange(rank, &layout("i64[5@a]")?, 3.0, -2.0)?.to_f64()?,
                [3.0, 1.0, -1.0, -3.0, -5.0]
            );
            assert_eq!(Tensor::arange(rank, &layout("f32[3] +a")?, 0.0, 1.0)?.to_f64()?, [0.0, 1.0, 2.0]);
            assert_eq!(Tensor::linspace(rank, &layout("f64[3@a]")?, -1.0, 2.0)?.to_f64()?, [-1.0, 0.5, 2.0]);
            assert_eq!(Tensor::linspace(rank, &layout("f64[1]")?, 0.1, 0.7)?.to_f64()?, [0.1]);
            let wide = Tensor::linspace(rank, &layout("f64[4]")?, 0.0, 1e308)?.to_f64()?;
            assert!(wide.iter().all(|x| x.is_finite()), "{wide:?}");
            let drawn = Tensor::bernoulli(rank, &layout("bool[1000@a]")?, 7, 0, 0.25)?.to_f64()?;
            let ones = drawn.iter().sum::<f64>();
            assert!(drawn.iter().all(|x| *x == 0.0 || *x == 1.0) && (200.0..300.0).contains(&ones), "{ones}");
            assert_eq!(Tensor::bernoulli(rank, &layout("f32[9]")?, 7, 0, 0.0)?.to_f64()?, [0.0; 9]);
            assert_eq!(Tensor::bernoulli(rank, &layout("f32[9]")?, 7, 0, 1.0)?.to_f64()?, [1.0; 9]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn unrepresentable_values_and_sizes_are_refused() {
        World::run(Mesh::single(), |rank| {
            let layout = |text: &str| Layout::parse(text, rank.mesh());
            for (text, value) in
                [("i64[2]", 0.5), ("u8[2]", 256.0), ("u8[2]", -1.0), ("bool[2]", 0.5), ("i64[2]", f64::NAN)]
            {
                let error = Tensor::full(rank, &layout(text)?, value).unwrap_err();
                assert_eq!(error.kind(), shardgrad_dist::Kind::DType, "{text}: {error}");
            }
            for (text, value) in [("i64[2]", -3.0), ("u8[2]", 255.0), ("bool[2]", 1.0), ("bf16[2]", 0.5)] {
                assert_eq!(Tensor::full(rank, &layout(text)?, value)?.to_f64()?, [value; 2], "{text}");
            }
            let endless = Layout::invariant(rank.mesh(), DType::F32, &[1 << 40, 1 << 40]);
            let makers: [Make; 4] = [
                |rank, layout| Tensor::zeros(rank, layout),
                |rank, layout| Tensor::full(rank, layout, 1.0),
                |rank, layout| Tensor::normal(rank, layout, 1, 2, 1.0),
                |rank, layout| Tensor::arange(rank, layout, 0.0, 1.0),
            ];
            for make in makers {
                let error = make(rank, &endless).unwrap_err();
                assert_eq!(error.kind(), shardgrad_dist::Kind::Shape, "{error}");
                assert!(error.message().ends_with("has more elements than memory can address"), "{error}");
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn integers_are_rounded_to_nearest() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let layout = |text: &str| Layout::parse(text, rank.mesh());
            let count: Vec<f64> = (0..50).map(f64::from).collect();
            for text in ["i64[50@a]", "u8[50]", "f32[50@a]"] {
                assert_eq!(Tensor::linspace(rank, &layout(text)?, 0.0, 49.0)?.to_f64()?, count, "{text}");
            }
            let tenths: Vec<f64> = (0..11).map(|i| f64::from(i) / 10.0).collect();
            assert_eq!(Tensor::linspace(rank, &layout("f64[11@a]")?, 0.0, 1.0)?.to_f64()?, tenths);
            let halves = Tensor::arange(rank, &layout("i64[6@a]")?, -0.75, 0.75)?;
            assert_eq!(halves.to_host::<i64>()?, [-1, 0, 1, 2, 2, 3]);
            let ties = Tensor::from_fn(rank, &layout("u8[5]")?, |i| i as f64 - 0.5)?;
            assert_eq!(ties.to_f64()?, [0.0, 0.0, 2.0, 2.0, 4.0]);
            let truth = Tensor::from_fn(rank, &layout("bool[3@a]")?, |i| i as f64 / 10.0)?;
            assert_eq!(truth.to_f64()?, [0.0, 1.0, 1.0], "any value except 0 is true");
            Ok(())
        })
        .unwrap();
    }
}
