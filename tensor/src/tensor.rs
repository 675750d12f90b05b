//! The handle: a global tensor as one rank sees it.

use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::lineage::Lineage;
use crate::piece::{Piece, launch};
use crate::watch::Watch;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::binary::{ACCUMULATE, ADD};
use shardgrad_kernels::op::random::{NORMAL, UNIFORM};
use shardgrad_kernels::{Buffer, DType, Dims, Element, PackCacheGuard, Scalar};
use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// A global tensor: its layout, and the piece that this rank holds. Immutable; cloning copies the handle.
#[derive(Clone)]
pub struct Tensor(Rc<Inner>);

/// Where the layout of a tensor stands. Most tensors are results of ops, whose inference has it already; to share that costs
/// less than to share a layout, as it stays on its thread.
enum Lies {
    Own(Layout),
    Output(Rc<Inference>, usize),
}

struct Inner {
    rank: Rank,
    lies: Lies,
    piece: Piece,
    /// Other layouts of the same value, made once by implied steps outside of a tape.
    forms: OnceCell<Box<RefCell<Vec<Tensor>>>>,
}

impl Lies {
    fn layout(&self) -> &Layout {
        match self {
            Lies::Own(layout) => layout,
            Lies::Output(inference, i) => &inference.outputs[*i],
        }
    }
}

impl Tensor {
    /// Puts a piece under a layout. The piece has the local shape and the dtype of the layout. One of unknown lineage comes from
    /// this shape.
    ///
    /// # Panics
    /// In debug builds, if shape or dtype differ: callers inside the library guarantee them.
    #[must_use]
    pub fn assemble(rank: &Rank, layout: Layout, mut piece: Piece) -> Tensor {
        if piece.lineage == Lineage::UNKNOWN {
            piece.lineage = Lineage::of(&layout);
        }
        Tensor::with(rank, Lies::Own(layout), piece)
    }

    /// Puts a piece under the layout that was inferred for an output of an op.
    ///
    /// # Panics
    /// As [`Tensor::assemble`].
    #[inline]
    pub(crate) fn output(rank: &Rank, inference: &Rc<Inference>, i: usize, piece: Piece) -> Tensor {
        Tensor::with(rank, Lies::Output(inference.clone(), i), piece)
    }

    #[inline]
    fn with(rank: &Rank, lies: Lies, piece: Piece) -> Tensor {
        let layout = lies.layout();
        debug_assert_eq!(piece.dtype, layout.dtype(), "the piece has the dtype of {layout}");
        debug_assert_eq!(
            piece.view.shape,
            layout.local_shape(rank.coordinates()),
            "the piece has the local shape of {layout} on rank {}",
            rank.index()
        );
        // Part by part: as a whole it would be read at once where its parts were just written, and wait for them.
        let Piece { buffer, dtype, view, lineage } = piece;
        let piece = Piece { buffer, dtype, view, lineage };
        Tensor(Rc::new(Inner { rank: rank.clone(), lies, piece, forms: OnceCell::new() }))
    }

    /// The rank that holds this piece.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        &self.0.rank
    }

    /// How the global tensor lies on the mesh.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        self.0.lies.layout()
    }

    /// What this rank holds.
    #[must_use]
    pub fn piece(&self) -> &Piece {
        &self.0.piece
    }

    /// Says that ops will read it several times while what comes back lives: a parameter in a step of several microbatches. The
    /// back end may keep beside it what it makes of it then ([`Backend::cache_packed`](shardgrad_kernels::Backend::cache_packed)); results are the
    /// same. Its memory is held so long, so that an update in place comes after.
    #[must_use]
    pub fn reuse(&self) -> PackCacheGuard {
        self.rank().backend().cache_packed(&self.piece().buffer)
    }

    /// A number that no other living tensor has.
    #[must_use]
    pub fn identity(&self) -> usize {
        Rc::as_ptr(&self.0).addr()
    }

    /// Whether two handles name the same tensor.
    #[must_use]
    pub fn same_as(&self, other: &Tensor) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// The global shape.
    #[must_use]
    pub fn shape(&self) -> Dims {
        self.layout().shape()
    }

    /// The dtype.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.layout().dtype()
    }

    /// A layout that stands for a tensor whose values are not here: what a program is recorded on. To read it is an
    /// error.
    #[must_use]
    pub fn outline(rank: &Rank, layout: &Layout) -> Tensor {
        let (dtype, shape) = (layout.dtype(), layout.local_shape(rank.coordinates()));
        let buffer = Buffer::without_memory(shape.iter().product::<usize>() * dtype.size());
        Tensor::assemble(rank, layout.clone(), Piece::received(buffer, dtype, &shape))
    }

    /// Whether the values are here, so that this is no outline.
    #[must_use]
    pub fn has_values(&self) -> bool {
        self.0.piece.buffer.has_memory()
    }

    /// A tensor with one value everywhere. On a pending axis coordinate 0 holds the value, the others zeros.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::DType` for a value that a dtype of integers does not
    /// hold; `Kind::Shape` for more elements than memory has addresses; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn full(rank: &Rank, layout: &Layout, value: f64) -> Result<Tensor> {
        check_mesh(rank, layout, Location::caller())?;
        check_held(layout.dtype(), value)?;
        layout.check_addressable()?;
        let value = if adds_zeros(layout, rank) { 0.0 } else { value };
        let piece = Piece::filled(rank, layout.dtype(), &layout.local_shape(rank.coordinates()), value)?;
        Ok(Tensor::assemble(rank, layout.clone(), piece))
    }

    /// Zeros.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::Shape` for more elements than memory has addresses;
    /// `Kind::OutOfMemory`.
    #[track_caller]
    pub fn zeros(rank: &Rank, layout: &Layout) -> Result<Tensor> {
        Tensor::full(rank, layout, 0.0)
    }

    /// Normal numbers of mean 0, keyed by `key` and counted by global element index: the same on any mesh. On a pending axis
    /// coordinate 0 holds the numbers, the others zeros.
    ///
    /// # Errors
    /// As [`Tensor::zeros`].
    #[track_caller]
    pub fn normal(rank: &Rank, layout: &Layout, key: u64, stream: u64, std: f64) -> Result<Tensor> {
        Tensor::random(rank, layout, &NORMAL, key, stream, [0.0, std])
    }

    /// Uniform numbers in `low..high`, keyed, counted and placed as by [`Tensor::normal`].
    ///
    /// # Errors
    /// As [`Tensor::zeros`].
    #[track_caller]
    pub fn uniform(
        rank: &Rank,
        layout: &Layout,
        key: u64,
        stream: u64,
        low: f64,
        high: f64,
    ) -> Result<Tensor> {
        Tensor::random(rank, layout, &UNIFORM, key, stream, [low, high])
    }

    #[track_caller]
    fn random(
        rank: &Rank,
        layout: &Layout,
        kernel: &'static shardgrad_kernels::Kernel,
        key: u64,
        stream: u64,
        bounds: [f64; 2],
    ) -> Result<Tensor> {
        let site = Location::caller();
        check_mesh(rank, layout, site)?;
        Context::of(rank).set_given(layout, site);
        if adds_zeros(layout, rank) {
            return Tensor::zeros(rank, layout);
        }
        layout.check_addressable()?;
        let mut piece = Piece::alloc(rank, layout.dtype(), &layout.local_shape(rank.coordinates()))?;
        let mut scalars = vec![
            Scalar::Int(key as i64),
            Scalar::Int(stream as i64),
            Scalar::Real(bounds[0]),
            Scalar::Real(bounds[1]),
        ];
        scalars.extend(box_scalars(layout, rank));
        launch(rank, kernel, &[], &mut [&mut piece], &scalars)?;
        Ok(Tensor::assemble(rank, layout.clone(), piece))
    }

    /// The same tensor with its piece row-major and without gaps, copied where it is not: a view would hold all that it
    /// was taken from.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn contiguous(&self) -> Result<Tensor> {
        let piece = self.piece().contiguous(self.rank())?;
        Ok(Tensor::assemble(self.rank(), self.layout().clone(), piece))
    }

    /// The same numbers in a wider float dtype, which holds each of them.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn widened(self, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype {
            return Ok(self);
        }
        debug_assert!(self.dtype().size() < dtype.size(), "{} is no wider than {}", dtype, self.dtype());
        self.converted(dtype)
    }

    /// The same tensor in another float dtype. Each rank rounds what it holds, of a pending sum its own part.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn converted(self, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype {
            return Ok(self);
        }
        let piece = self.piece().converted(self.rank(), dtype)?;
        Ok(Tensor::assemble(self.rank(), self.layout().with_dtype(dtype), piece))
    }

    /// Another layout of this value, if an implied step outside of a tape has made it already.
    pub(crate) fn form(&self, layout: &Layout) -> Option<Tensor> {
        self.0.forms.get()?.borrow().iter().find(|t| t.layout() == layout).cloned()
    }

    /// Keeps another layout of this value for the next op that implies it.
    pub(crate) fn keep_form(&self, form: Tensor) {
        self.0.forms.get_or_init(Box::default).borrow_mut().push(form);
    }

    /// This tensor with another of the same layout added to it, in place where nobody else holds the memory.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[track_caller]
    pub fn accumulate(mut self, other: &Tensor) -> Result<Tensor> {
        debug_assert_eq!(self.layout(), other.layout(), "cotangents of one value share a layout");
        let (owned, rank) = (self.is_own(), self.rank().clone());
        let lineage = self.piece().lineage.plus(other.piece().lineage);
        if owned && !Context::of(&rank).is_watched() {
            return self.update(|sum| {
                sum.lineage = lineage;
                launch(&rank, &ACCUMULATE, &[other.piece()], &mut [sum], &[])
            });
        }
        let mut sum = Piece { lineage, ..self.piece().alike(&rank, self.dtype())? };
        launch(&rank, &ADD, &[self.piece(), other.piece()], &mut [&mut sum], &[])?;
        if Context::of(&rank).is_watched() {
            let site = Location::caller();
            Watch::look(&rank, "the sum of two cotangents", &[self.piece(), other.piece()], &[&sum], site)?;
        }
        Ok(Tensor::assemble(&rank, self.layout().clone(), sum))
    }

    /// The piece for writing in place, on memory that nobody shares (a copy is made if somebody does).
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn update(self, change: impl FnOnce(&mut Piece) -> Result<()>) -> Result<Tensor> {
        let (rank, layout) = (self.rank().clone(), self.layout().clone());
        let mut piece = self.into_own_piece()?;
        change(&mut piece)?;
        Ok(Tensor::assemble(&rank, layout, piece))
    }

    /// Copies the numbers where somebody else holds their memory, or where they lie with gaps, so that they can be changed in place.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn own(&mut self) -> Result<()> {
        if let Some(inner) = Rc::get_mut(&mut self.0) {
            // Other layouts of this value may lie in the same memory.
            inner.forms.take();
        }
        if self.is_own() {
            return Ok(());
        }
        let copy = self.piece().converted(self.rank(), self.dtype())?;
        *self = Tensor::assemble(self.rank(), self.layout().clone(), copy);
        Ok(())
    }

    /// Whether nobody else holds this tensor or its memory, and it lies without gaps.
    fn is_own(&mut self) -> bool {
        Rc::get_mut(&mut self.0).is_some_and(|i| i.piece.view.is_contiguous() && i.piece.buffer.is_unique())
    }

    /// Layout and piece, if this is the only handle of the tensor.
    pub(crate) fn into_parts(self) -> Option<(Layout, Piece)> {
        let Inner { lies, piece, .. } = Rc::try_unwrap(self.0).ok()?;
        Some((lies.layout().clone(), piece))
    }

    /// The piece, on memory that nobody shares (a copy is made if somebody does).
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub(crate) fn into_own_piece(self) -> Result<Piece> {
        let (rank, mut piece) = match Rc::try_unwrap(self.0) {
            Ok(inner) => (inner.rank, inner.piece),
            Err(shared) => (shared.rank.clone(), shared.piece.clone()),
        };
        let owned = piece.view.is_contiguous() && piece.buffer.is_unique();
        if owned { Ok(piece) } else { piece.converted(&rank, piece.dtype) }
    }
}

/// Whether this rank's part of every pending sum is zeros: a tensor that is made lies at coordinate 0 of pending axes.
pub(crate) fn adds_zeros(layout: &Layout, rank: &Rank) -> bool {
    layout.partial().iter().any(|a| rank.coordinate(a) != 0)
}

/// Where the integers of a dtype begin and where they end (the first beyond them); `None` for floats.
pub(crate) fn integers(dtype: DType) -> Option<Range<f64>> {
    match dtype {
        DType::I64 => Some(i64::MIN as f64..-(i64::MIN as f64)),
        DType::U8 => Some(0.0..256.0),
        DType::Bool => Some(0.0..2.0),
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 => None,
    }
}

/// Refuses a number that a dtype of integers does not hold; to floats any number is rounded.
pub(crate) fn check_held(dtype: DType, number: f64) -> Result<()> {
    if integers(dtype).is_none_or(|held| held.contains(&number) && number.fract() == 0.0) {
        return Ok(());
    }
    Err(Error::new(Kind::DType, format!("{dtype} holds no {number}"))
        .detail("help", "give a number that it holds, or cast the tensor first: x.cast(DType::F32)"))
}

/// Refuses a layout on another mesh than that of the rank, which has no place in it.
pub(crate) fn check_mesh(rank: &Rank, layout: &Layout, site: &'static Location<'static>) -> Result<()> {
    if layout.mesh() == rank.mesh() {
        return Ok(());
    }
    let text = format!("a layout on {} for a rank of {}", layout.mesh(), rank.mesh());
    Err(Error::new(Kind::Mesh, text)
        .detail("layout", layout.to_string())
        .detail("rank", rank.describe())
        .detail("help", "make the layout on the mesh of the rank, rank.mesh()")
        .at(site))
}

/// Per dim the global extent and where this rank's range starts: what position-aware kernels are told.
pub(crate) fn box_scalars(layout: &Layout, rank: &Rank) -> Vec<Scalar> {
    (0..layout.ndim())
        .flat_map(|d| {
            let start = layout.range(d, rank.coordinates()).start;
            [Scalar::Int(layout.extent(d) as i64), Scalar::Int(start as i64)]
        })
        .collect()
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} on rank {})", self.layout(), self.rank().index())
    }
}

/// Refuses host data of a Rust type that a tensor of the layout's dtype is not made of. Truth values are given as u8.
pub(crate) fn check_host_dtype<T: Element>(layout: &Layout) -> Result<()> {
    let is_truth = T::DTYPE == DType::U8 && layout.dtype() == DType::Bool;
    if T::DTYPE == layout.dtype() || is_truth {
        return Ok(());
    }
    let text = format!("host data of {} for a tensor of {}", T::DTYPE, layout.dtype());
    let help = match layout.dtype() {
        DType::Bool => "give truth values as u8: 0 is false, all else is true".to_string(),
        dtype => format!("give elements of {dtype}, or state a layout of {} and cast the tensor", T::DTYPE),
    };
    Err(Error::new(Kind::DType, text).detail("layout", layout.to_string()).detail("help", help))
}

/// Refuses host data that is no whole tensor of a layout.
pub(crate) fn check_host<T: Element>(layout: &Layout, len: usize) -> Result<()> {
    check_host_dtype::<T>(layout)?;
    if len != layout.numel() {
        let text = format!("{len} host elements for a tensor of {} elements", layout.numel());
        return Err(Error::new(Kind::Shape, text)
            .detail("layout", layout.to_string())
            .detail("help", "give one element for each place of the global shape, row-major"));
    }
    Ok(())
}
