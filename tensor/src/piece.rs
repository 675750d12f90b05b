//! The part of a tensor that one rank holds: a typed view of a local buffer. No placement is known here.

use crate::context::Context;
use crate::lineage::Lineage;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::copy::COPY;
use shardgrad_kernels::op::fill::FILL;
use shardgrad_kernels::{
    Arg, ArgMut, Buffer, DType, Element, Kernel, Launch, Scalar, Strides, download, upload,
};
use smallvec::SmallVec;
use std::sync::Arc;

/// Where the elements of a piece lie. Most lie as many others do, so it is shared.
pub type View = Arc<Strides>;

/// A local tensor: memory, dtype and view. Cloning shares the memory.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The memory.
    pub buffer: Buffer,
    /// What its elements are.
    pub dtype: DType,
    /// Where they lie.
    pub view: View,
    /// What its elements come from.
    pub lineage: Lineage,
}

impl Piece {
    /// New memory with arbitrary contents, row-major.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn alloc(rank: &Rank, dtype: DType, shape: &[usize]) -> Result<Piece> {
        Piece::under(rank, dtype, Strides::contiguous(shape).into())
    }

    /// New memory with arbitrary contents under a row-major view.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub(crate) fn under(rank: &Rank, dtype: DType, view: View) -> Result<Piece> {
        let buffer = rank.backend().alloc(view.numel() * dtype.size())?;
        Ok(Piece { buffer, dtype, view, lineage: Lineage::UNKNOWN })
    }

    /// Memory that was filled, as by a message: row-major from its first byte.
    #[must_use]
    pub fn received(buffer: Buffer, dtype: DType, shape: &[usize]) -> Piece {
        Piece { buffer, dtype, view: Strides::contiguous(shape).into(), lineage: Lineage::UNKNOWN }
    }

    /// New memory with one value everywhere, row-major.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn filled(rank: &Rank, dtype: DType, shape: &[usize], value: f64) -> Result<Piece> {
        let mut piece = Piece::alloc(rank, dtype, shape)?;
        launch(rank, &FILL, &[], &mut [&mut piece], &[Scalar::Real(value)])?;
        Ok(piece)
    }

    /// New memory with elements from the host, row-major.
    ///
    /// # Errors
    /// `Kind::Shape` unless there is one element for each place of the shape; `Kind::OutOfMemory`.
    pub fn upload<T: Element>(rank: &Rank, shape: &[usize], data: &[T]) -> Result<Piece> {
        let places = shape.iter().try_fold(1usize, |n, extent| n.checked_mul(*extent));
        if places != Some(data.len()) {
            let text = format!("{} elements for a piece of shape {shape:?}", data.len());
            return Err(
                Error::new(Kind::Shape, text).detail("help", "give one element for each place of the shape")
            );
        }
        let buffer = upload(&**rank.backend(), data)?;
        Ok(Piece::received(buffer, T::DTYPE, shape))
    }

    /// The number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.view.numel()
    }

    /// The same memory seen through another view.
    #[must_use]
    pub fn viewed(&self, view: impl Into<View>) -> Piece {
        Piece { buffer: self.buffer.clone(), dtype: self.dtype, view: view.into(), lineage: self.lineage }
    }

    /// This piece if it lies row-major without gaps, else a copy that does.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn contiguous(&self, rank: &Rank) -> Result<Piece> {
        if self.view.is_contiguous() { Ok(self.clone()) } else { self.converted(rank, self.dtype) }
    }

    /// A row-major piece that starts at its buffer's first byte: what a collective sends.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn flat(&self, rank: &Rank) -> Result<Piece> {
        if self.is_flat() { Ok(self.clone()) } else { self.converted(rank, self.dtype) }
    }

    fn is_flat(&self) -> bool {
        self.view.is_contiguous() && self.view.offset == 0
    }

    /// New memory for as many elements in the same shape, row-major, contents arbitrary.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub(crate) fn alike(&self, rank: &Rank, dtype: DType) -> Result<Piece> {
        if self.is_flat() {
            return Piece::under(rank, dtype, self.view.clone());
        }
        Piece::alloc(rank, dtype, &self.view.shape)
    }

    /// A row-major copy in a dtype.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn converted(&self, rank: &Rank, dtype: DType) -> Result<Piece> {
        let mut copy = self.alike(rank, dtype)?;
        launch(rank, &COPY, &[self], &mut [&mut copy], &[])?;
        copy.lineage = self.lineage;
        Ok(copy)
    }

    /// Copies elements into a part of this piece, whose memory nobody shares.
    ///
    /// # Errors
    /// What the copy kernel reports.
    pub fn write(&mut self, rank: &Rank, at: impl Into<View>, from: &Piece) -> Result<()> {
        let whole = std::mem::replace(&mut self.view, at.into());
        let done = launch(rank, &COPY, &[from], &mut [self], &[]);
        self.view = whole;
        done
    }

    /// The first `numel` elements of the memory on the host, whatever the view (none on the null back end).
    ///
    /// # Errors
    /// What the device reports.
    pub fn front<T: Element>(&self, rank: &Rank, numel: usize) -> Result<Vec<T>> {
        Ok(download(&**rank.backend(), &self.buffer, numel)?)
    }

    /// The elements on the host, row-major, as f64 (empty on the null back end).
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn to_f64(&self, rank: &Rank) -> Result<Vec<f64>> {
        let copy = self.converted(rank, DType::F64)?;
        copy.front(rank, copy.numel())
    }
}

/// Runs a kernel on pieces, with an error that names it.
///
/// # Errors
/// What the kernel reports, with the place in the model.
pub fn launch(
    rank: &Rank,
    kernel: &Kernel,
    inputs: &[&Piece],
    outputs: &mut [&mut Piece],
    scalars: &[Scalar],
) -> Result<()> {
    listed(inputs, read, |inputs| match outputs {
        [one] => launch_lent(rank, kernel, inputs, &mut [written(one)], scalars),
        all => {
            let mut outputs: Vec<ArgMut<'_>> = all.iter_mut().map(|p| written(p)).collect();
            launch_lent(rank, kernel, inputs, &mut outputs, scalars)
        }
    })
}

/// [`launch`] on operands that may be seen otherwise than their pieces are.
///
/// # Errors
/// As for [`launch`].
pub(crate) fn launch_lent<'a>(
    rank: &Rank,
    kernel: &Kernel,
    inputs: &'a [Arg<'a>],
    outputs: &'a mut [ArgMut<'a>],
    scalars: &'a [Scalar],
) -> Result<()> {
    if inputs.iter().any(|x| !x.buffer.has_memory()) && !rank.is_dry() {
        return Err(Error::new(Kind::Unsupported, "a value is read where only its layout is known")
            .detail("help", "while a program is recorded, return the tensor and read it afterwards"));
    }
    let launched = rank.backend().launch(kernel, &mut Launch { inputs, outputs, scalars });
    launched.map_err(|e| match &*Context::of(rank).path() {
        "" => Error::from(e),
        path => Error::from(e).detail("at", path),
    })
}

/// Calls `go` with what `f` makes of each item. Few of them, which is usual, need no list.
#[inline(always)]
pub fn listed<'a, T, U: 'a, R>(items: &'a [T], f: impl Fn(&'a T) -> U, go: impl FnOnce(&[U]) -> R) -> R {
    match items {
        [] => go(&[]),
        [a] => go(&[f(a)]),
        [a, b] => go(&[f(a), f(b)]),
        [a, b, c] => go(&[f(a), f(b), f(c)]),
        all => go(&all.iter().map(f).collect::<SmallVec<[U; 6]>>()),
    }
}

/// A piece as an operand that a kernel reads.
pub(crate) fn read<'a>(piece: &&'a Piece) -> Arg<'a> {
    Arg { buffer: &piece.buffer, dtype: piece.dtype, view: &piece.view }
}

/// A piece as an operand that a kernel writes.
pub(crate) fn written(piece: &mut Piece) -> ArgMut<'_> {
    ArgMut { buffer: &mut piece.buffer, dtype: piece.dtype, view: &piece.view }
}
