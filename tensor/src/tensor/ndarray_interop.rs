//! Conversions between tensors and arrays of the crate `ndarray`. Only with the feature `ndarray`.
//!
//! ```
//! use ndarray::{ArrayD, array};
//! use shardgrad_dist::{Mesh, World};
//! use shardgrad_tensor::{Tensor, Value};
//!
//! World::run(Mesh::single(), |rank| {
//!     let x = Tensor::try_from((rank, &array![[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]))?;
//!     let y: ArrayD<f32> = (&x.transpose(0, 1)).try_into()?;
//!     assert_eq!(y, array![[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]].into_dyn());
//!     Ok(())
//! })?;
//! # Ok::<(), shardgrad_dist::Error>(())
//! ```

use crate::tensor::Tensor;
use ndarray::{ArrayBase, ArrayD, Data, Dimension, IxDyn};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::Element;

/// Makes an unsharded tensor with the shape and dtype of an array; every rank passes the same array, whose elements may
/// have any order in memory.
impl<T: Element, S: Data<Elem = T>, D: Dimension> TryFrom<(&Rank, &ArrayBase<S, D>)> for Tensor {
    type Error = Error;

    /// # Errors
    /// `Kind::OutOfMemory`.
    #[track_caller]
    fn try_from((rank, array): (&Rank, &ArrayBase<S, D>)) -> Result<Tensor> {
        match array.as_slice() {
            Some(data) => Tensor::from_host(rank, array.shape(), data),
            None => Tensor::from_host(rank, array.shape(), &array.iter().copied().collect::<Vec<T>>()),
        }
    }
}

/// Gathers the whole tensor to the host, as [`Tensor::to_host`] does. A collective call.
impl<T: Element> TryFrom<&Tensor> for ArrayD<T> {
    type Error = Error;

    /// # Errors
    /// `Kind::DType` if `T` is not the tensor's dtype; `Kind::Unsupported` on the null back end; errors of the
    /// collectives.
    #[track_caller]
    fn try_from(x: &Tensor) -> Result<ArrayD<T>> {
        let data = x.to_host::<T>()?;
        ArrayD::from_shape_vec(IxDyn(&x.shape()), data)
            .map_err(|e| Error::new(Kind::Shape, format!("cannot make an array of {}: {e}", x.layout())))
    }
}
