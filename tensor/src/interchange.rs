//! Tensors from arrays of the crate `ndarray`, and back. Only with the feature `ndarray`.
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

/// A whole tensor that every rank holds in full, of the array's shape and of the dtype of its elements; every rank gives the
/// same array. Its elements may lie in any order in memory.
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

/// The whole tensor on the host, as [`Tensor::to_host`]: every rank calls this together.
impl<T: Element> TryFrom<&Tensor> for ArrayD<T> {
    type Error = Error;

    /// # Errors
    /// `Kind::DType` if `T` is not the tensor's type; `Kind::Unsupported` on the null back end; what the collectives report.
    #[track_caller]
    fn try_from(x: &Tensor) -> Result<ArrayD<T>> {
        let data = x.to_host::<T>()?;
        ArrayD::from_shape_vec(IxDyn(&x.shape()), data)
            .map_err(|e| Error::new(Kind::Shape, format!("no array of {}: {e}", x.layout())))
    }
}
