//! The part of a tensor that one rank holds: a typed view of a local buffer. No placement is known here.

use crate::context::Context;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::copy::COPY;
use shardgrad_kernels::op::fill::FILL;
use shardgrad_kernels::{
    Arg, ArgMut, Buffer, DType, Element, Kernel, Launch, Scalar, Strides, download, upload,
};
use smallvec::SmallVec;

/// A local tensor: memory, dtype and view. Cloning shares the memory.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The memory.
    pub buffer: Buffer,
    /// What its elements are.
    pub dtype: DType,
    /// Where they lie.
    pub view: Strides,
}

impl Piece {
    /// New memory with arbitrary contents, row-major.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn alloc(rank: &Rank, dtype: DType, shape: &[usize]) -> Result<Piece> {
        let numel: usize = shape.iter().product();
        let buffer = rank.backend().alloc(numel * dtype.size())?;
        Ok(Piece { buffer, dtype, view: Strides::contiguous(shape) })
    }

    /// The memory that a message came in, row-major from its first byte.
    #[must_use]
    pub fn received(buffer: Buffer, dtype: DType, shape: &[usize]) -> Piece {
        Piece { buffer, dtype, view: Strides::contiguous(shape) }
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
    /// `Kind::OutOfMemory`.
    pub fn upload<T: Element>(rank: &Rank, shape: &[usize], data: &[T]) -> Result<Piece> {
        debug_assert_eq!(
            data.len(),
            shape.iter().product::<usize>(),
            "one element for each place of the shape"
        );
        let buffer = upload(&**rank.backend(), data)?;
        Ok(Piece { buffer, dtype: T::DTYPE, view: Strides::contiguous(shape) })
    }

    /// The number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.view.numel()
    }

    /// The same memory seen through another view.
    #[must_use]
    pub fn viewed(&self, view: Strides) -> Piece {
        Piece { buffer: self.buffer.clone(), dtype: self.dtype, view }
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
        let whole = self.view.is_contiguous() && self.view.offset == 0;
        if whole { Ok(self.clone()) } else { self.converted(rank, self.dtype) }
    }

    /// A row-major copy in a dtype.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn converted(&self, rank: &Rank, dtype: DType) -> Result<Piece> {
        let mut copy = Piece::alloc(rank, dtype, &self.view.shape)?;
        launch(rank, &COPY, &[self], &mut [&mut copy], &[])?;
        Ok(copy)
    }

    /// Copies elements into a part of this piece, whose memory nobody shares.
    ///
    /// # Errors
    /// What the copy kernel reports.
    pub fn write(&mut self, rank: &Rank, at: Strides, from: &Piece) -> Result<()> {
        let whole = std::mem::replace(&mut self.view, at);
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
    if inputs.iter().any(|p| !p.buffer.has_memory()) && !rank.is_dry() {
        return Err(Error::new(Kind::Unsupported, "a value is read where only its layout is known")
            .detail("help", "while a program is recorded, return the tensor and read it afterwards"));
    }
    let inputs: SmallVec<[Arg<'_>; 6]> =
        inputs.iter().map(|p| Arg { buffer: &p.buffer, dtype: p.dtype, view: &p.view }).collect();
    let launched = match outputs {
        [one] => rank
            .backend()
            .launch(kernel, &mut Launch { inputs: &inputs, outputs: &mut [written(one)], scalars }),
        all => {
            let mut outputs: Vec<ArgMut<'_>> = all.iter_mut().map(|p| written(p)).collect();
            rank.backend().launch(kernel, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars })
        }
    };
    launched.map_err(|e| match &*Context::of(rank).path() {
        "" => Error::from(e),
        path => Error::from(e).detail("at", path),
    })
}

/// A piece as an operand that a kernel writes.
fn written(piece: &mut Piece) -> ArgMut<'_> {
    ArgMut { buffer: &mut piece.buffer, dtype: piece.dtype, view: &piece.view }
}
