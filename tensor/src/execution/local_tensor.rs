//! The local tensor of one rank: a typed, strided view of a buffer, without a layout.

use crate::execution::context::Context;
use crate::layout::lineage::Lineage;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::copy::COPY;
use shardgrad_kernels::op::fill::FILL;
use shardgrad_kernels::{
    Arg, ArgMut, Buffer, DType, Element, Kernel, Launch, Scalar, Strides, download, upload,
};
use smallvec::SmallVec;
use std::sync::Arc;

/// Shape, strides and offset of a local tensor, shared because many local tensors have the same.
#[doc(alias = "strides")]
pub type View = Arc<Strides>;

/// The part of a tensor that one rank holds (`DTensor.to_local()` in PyTorch, a shard's `data` in JAX): buffer, dtype
/// and strided view. It may be a shard, a copy or one term of a partial sum. Cloning shares the memory.
#[doc(alias = "to_local")]
#[doc(alias = "addressable_shards")]
#[derive(Clone, Debug)]
pub struct LocalTensor {
    /// The memory.
    pub buffer: Buffer,
    /// The dtype of the elements.
    pub dtype: DType,
    /// Shape, strides and offset of the elements.
    pub view: View,
    /// The lineage of the elements.
    pub lineage: Lineage,
}

impl LocalTensor {
    /// Allocates a row-major local tensor with arbitrary contents.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "empty")]
    pub fn alloc(rank: &Rank, dtype: DType, shape: &[usize]) -> Result<LocalTensor> {
        LocalTensor::alloc_with_view(rank, dtype, Strides::contiguous(shape).into())
    }

    /// Allocates memory with arbitrary contents for a row-major view.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub(crate) fn alloc_with_view(rank: &Rank, dtype: DType, view: View) -> Result<LocalTensor> {
        let buffer = rank.backend().alloc(view.numel() * dtype.size())?;
        Ok(LocalTensor { buffer, dtype, view, lineage: Lineage::UNKNOWN })
    }

    /// Wraps a filled buffer, such as a received message: row-major from its first byte.
    #[must_use]
    pub fn from_buffer(buffer: Buffer, dtype: DType, shape: &[usize]) -> LocalTensor {
        LocalTensor { buffer, dtype, view: Strides::contiguous(shape).into(), lineage: Lineage::UNKNOWN }
    }

    /// Allocates a row-major local tensor with one value everywhere.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn full(rank: &Rank, dtype: DType, shape: &[usize], value: f64) -> Result<LocalTensor> {
        let mut local = LocalTensor::alloc(rank, dtype, shape)?;
        launch(rank, &FILL, &[], &mut [&mut local], &[Scalar::Real(value)])?;
        Ok(local)
    }

    /// Uploads host data into a new row-major local tensor.
    ///
    /// # Errors
    /// `Kind::Shape` unless `data` has as many elements as the shape; `Kind::OutOfMemory`.
    pub fn upload<T: Element>(rank: &Rank, shape: &[usize], data: &[T]) -> Result<LocalTensor> {
        let places = shape.iter().try_fold(1usize, |n, extent| n.checked_mul(*extent));
        if places != Some(data.len()) {
            let text = format!("{} elements for a local tensor of shape {shape:?}", data.len());
            return Err(
                Error::new(Kind::Shape, text).detail("help", "pass as many elements as the local shape has")
            );
        }
        let buffer = upload(&**rank.backend(), data)?;
        Ok(LocalTensor::from_buffer(buffer, T::DTYPE, shape))
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.view.numel()
    }

    /// Returns the same memory under another view.
    #[doc(alias = "as_strided")]
    #[doc(alias = "view")]
    #[must_use]
    pub fn with_view(&self, view: impl Into<View>) -> LocalTensor {
        LocalTensor {
            buffer: self.buffer.clone(),
            dtype: self.dtype,
            view: view.into(),
            lineage: self.lineage,
        }
    }

    /// Returns a row-major tensor without gaps: itself, or a copy.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn contiguous(&self, rank: &Rank) -> Result<LocalTensor> {
        if self.view.is_contiguous() { Ok(self.clone()) } else { self.to_dtype(rank, self.dtype) }
    }

    /// Returns a row-major tensor that starts at the first byte of its buffer, as collectives need: itself, or a
    /// copy.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn flat(&self, rank: &Rank) -> Result<LocalTensor> {
        if self.is_flat() { Ok(self.clone()) } else { self.to_dtype(rank, self.dtype) }
    }

    fn is_flat(&self) -> bool {
        self.view.is_contiguous() && self.view.offset == 0
    }

    /// Allocates a row-major local tensor of the same shape, contents arbitrary.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "empty_like")]
    pub(crate) fn alloc_like(&self, rank: &Rank, dtype: DType) -> Result<LocalTensor> {
        if self.is_flat() {
            return LocalTensor::alloc_with_view(rank, dtype, self.view.clone());
        }
        LocalTensor::alloc(rank, dtype, &self.view.shape)
    }

    /// Returns a row-major copy with a dtype.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "to")]
    pub fn to_dtype(&self, rank: &Rank, dtype: DType) -> Result<LocalTensor> {
        let mut copy = self.alloc_like(rank, dtype)?;
        launch(rank, &COPY, &[self], &mut [&mut copy], &[])?;
        copy.lineage = self.lineage;
        Ok(copy)
    }

    /// Copies elements into the part of this tensor that `at` selects. The memory must not be shared.
    ///
    /// # Errors
    /// Errors of the copy kernel.
    #[doc(alias = "copy_")]
    pub fn write(&mut self, rank: &Rank, at: impl Into<View>, from: &LocalTensor) -> Result<()> {
        let whole = std::mem::replace(&mut self.view, at.into());
        let done = launch(rank, &COPY, &[from], &mut [self], &[]);
        self.view = whole;
        done
    }

    /// Downloads the first `numel` elements of the buffer, whatever the view (none on the null back end).
    ///
    /// # Errors
    /// Errors of the device.
    pub fn download<T: Element>(&self, rank: &Rank, numel: usize) -> Result<Vec<T>> {
        Ok(download(&**rank.backend(), &self.buffer, numel)?)
    }

    /// Downloads the elements, row-major, as f64 (empty on the null back end).
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn to_f64(&self, rank: &Rank) -> Result<Vec<f64>> {
        let copy = self.to_dtype(rank, DType::F64)?;
        copy.download(rank, copy.numel())
    }
}

/// Launches a kernel on local tensors, with errors that name the kernel and the module path.
///
/// # Errors
/// Errors of the kernel, with the path in the model.
pub fn launch(
    rank: &Rank,
    kernel: &Kernel,
    inputs: &[&LocalTensor],
    outputs: &mut [&mut LocalTensor],
    scalars: &[Scalar],
) -> Result<()> {
    with_mapped(inputs, as_arg, |inputs| match outputs {
        [one] => launch_args(rank, kernel, inputs, &mut [as_arg_mut(one)], scalars),
        all => {
            let mut outputs: Vec<ArgMut<'_>> = all.iter_mut().map(|p| as_arg_mut(p)).collect();
            launch_args(rank, kernel, inputs, &mut outputs, scalars)
        }
    })
}

/// [`launch`] on operands whose views may differ from those of their local tensors.
///
/// # Errors
/// As for [`launch`].
pub(crate) fn launch_args<'a>(
    rank: &Rank,
    kernel: &Kernel,
    inputs: &'a [Arg<'a>],
    outputs: &'a mut [ArgMut<'a>],
    scalars: &'a [Scalar],
) -> Result<()> {
    if inputs.iter().any(|x| !x.buffer.has_memory()) && !rank.is_dry_run() {
        return Err(Error::new(
            Kind::Unsupported,
            "a value is read where only its layout is known (a meta tensor)",
        )
        .detail("help", "while a program is recorded, return the tensor and read it afterwards"));
    }
    let launched = rank.backend().launch(kernel, &mut Launch { inputs, outputs, scalars });
    launched.map_err(|e| match &*Context::of(rank).path() {
        "" => Error::from(e),
        path => Error::from(e).detail("at", path),
    })
}

/// Calls `go` with the results of `f` on all items. Short lists stay on the stack.
#[inline(always)]
pub fn with_mapped<'a, T, U: 'a, R>(items: &'a [T], f: impl Fn(&'a T) -> U, go: impl FnOnce(&[U]) -> R) -> R {
    match items {
        [] => go(&[]),
        [a] => go(&[f(a)]),
        [a, b] => go(&[f(a), f(b)]),
        [a, b, c] => go(&[f(a), f(b), f(c)]),
        all => go(&all.iter().map(f).collect::<SmallVec<[U; 6]>>()),
    }
}

/// A local tensor as a kernel input.
pub(crate) fn as_arg<'a>(local: &&'a LocalTensor) -> Arg<'a> {
    Arg { buffer: &local.buffer, dtype: local.dtype, view: &local.view }
}

/// A local tensor as a kernel output.
pub(crate) fn as_arg_mut(local: &mut LocalTensor) -> ArgMut<'_> {
    ArgMut { buffer: &mut local.buffer, dtype: local.dtype, view: &local.view }
}
