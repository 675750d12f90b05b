//! Conversion between arrays of the crate `ndarray` and tensors, with any strides and layouts.
#![cfg(feature = "ndarray")]

use ndarray::{Array2, ArrayD, arr0, array, s};
use shardgrad_dist::{Kind, Mesh, World};
use shardgrad_tensor::{Layout, Tensor};
use std::panic::Location;

#[test]
fn arrays_convert_to_tensors_and_back() {
    World::run(Mesh::parse("a=2").unwrap(), |rank| {
        let whole = Array2::from_shape_fn((4, 6), |(i, j)| (10 * i + j) as i64);
        // Transposed, every other column, in reverse order.
        let view = whole.slice(s![.., ..;-2]);
        let x = Tensor::try_from((rank, &view.t()))?;
        assert_eq!(x.to_host::<i64>()?[..4], [5, 15, 25, 35]);
        let split = x.to_layout_at(&Layout::parse("i64[3, 4@a]", rank.mesh())?, Location::caller())?;
        assert_eq!(ArrayD::<i64>::try_from(&split)?, view.t().to_owned().into_dyn());
        let scalar: ArrayD<f32> = (&Tensor::try_from((rank, &arr0(2.5f32)))?).try_into()?;
        assert_eq!(scalar, arr0(2.5).into_dyn());
        let empty = Tensor::try_from((rank, &Array2::<f64>::zeros((0, 3))))?;
        assert_eq!(ArrayD::<f64>::try_from(&empty)?.shape(), [0, 3]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn array_of_another_dtype_is_an_error() {
    let error = World::run(Mesh::single(), |rank| {
        let x = Tensor::try_from((rank, &array![1.0f32, 2.0]))?;
        ArrayD::<f64>::try_from(&x).map(|_| ())
    });
    assert_eq!(error.unwrap_err().kind(), Kind::DType);
}
