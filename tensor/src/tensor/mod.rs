//! The distributed tensor: a global tensor as one rank sees it (PyTorch's `DTensor`, a sharded `jax.Array`).

pub mod redistribute;
pub(crate) mod ring;
pub mod gather_ahead;
pub mod reduce_buckets;
pub mod host;
mod show;
pub mod compare;
#[cfg(feature = "ndarray")]
pub mod ndarray_interop;
pub mod fill;
pub mod bytes;
pub mod growable;

use crate::execution::anomaly::AnomalyDetector;
use crate::execution::context::Context;
use crate::execution::local_tensor::{LocalTensor, launch};
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::lineage::Lineage;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::op::binary::{ACCUMULATE, ADD};
use shardgrad_kernels::op::random::{NORMAL, UNIFORM};
use shardgrad_kernels::{Buffer, DType, Dims, Element, PackCacheGuard, Scalar};
use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// A distributed tensor: its layout, and the local tensor that this rank holds. Immutable; cloning copies the handle. It
/// corresponds to PyTorch's `DTensor` and to a sharded `jax.Array`: [`Tensor::from_global`] distributes host data,
/// [`Tensor::from_local`] wraps local data, [`Tensor::to_layout_at`] redistributes, [`Tensor::to_host`] gathers.
#[doc(alias = "DTensor")]
#[doc(alias = "jax.Array")]
#[doc(alias = "distributed_tensor")]
#[doc(alias = "ShardedTensor")]
#[derive(Clone)]
pub struct Tensor(Rc<Inner>);

/// Where a tensor stores its layout. Most tensors are results of ops, whose inference has the layout already; sharing
/// the inference is cheaper than sharing the layout, because its reference count is not atomic.
enum LayoutSource {
    Owned(Layout),
    Output(Rc<Inference>, usize),
}

struct Inner {
    rank: Rank,
    layout_source: LayoutSource,
    local: LocalTensor,
    /// The same value in other layouts, made by implicit steps outside of a tape and cached.
    other_layouts: OnceCell<Box<RefCell<Vec<Tensor>>>>,
}

impl LayoutSource {
    fn layout(&self) -> &Layout {
        match self {
            LayoutSource::Owned(layout) => layout,
            LayoutSource::Output(inference, i) => &inference.outputs[*i],
        }
    }
}

impl Tensor {
    /// Makes a distributed tensor from a local tensor and a layout. The local tensor has the local shape and the
    /// dtype of the layout. A local tensor of unknown lineage gets the lineage of the global shape.
    ///
    /// # Panics
    /// In debug builds, if shape or dtype differ from the layout; callers in this crate guarantee both.
    #[must_use]
    pub fn assemble(rank: &Rank, layout: Layout, mut local: LocalTensor) -> Tensor {
        if local.lineage == Lineage::UNKNOWN {
            local.lineage = Lineage::of(&layout);
        }
        Tensor::with(rank, LayoutSource::Owned(layout), local)
    }

    /// Makes the distributed tensor of an output of an op, with the inferred layout.
    ///
    /// # Panics
    /// As [`Tensor::assemble`].
    #[inline]
    pub(crate) fn output(rank: &Rank, inference: &Rc<Inference>, i: usize, local: LocalTensor) -> Tensor {
        Tensor::with(rank, LayoutSource::Output(inference.clone(), i), local)
    }

    #[inline]
    fn with(rank: &Rank, layout_source: LayoutSource, local: LocalTensor) -> Tensor {
        let layout = layout_source.layout();
        debug_assert_eq!(local.dtype, layout.dtype(), "the local tensor has the dtype of {layout}");
        debug_assert_eq!(
            local.view.shape,
            layout.local_shape(rank.coordinates()),
            "the local tensor has the local shape of {layout} on rank {}",
            rank.index()
        );
        // Moved field by field: a move as a whole would read the fields with wide loads right after narrow
        // stores, and stall on store forwarding.
        let LocalTensor { buffer, dtype, view, lineage } = local;
        let local = LocalTensor { buffer, dtype, view, lineage };
        Tensor(Rc::new(Inner { rank: rank.clone(), layout_source, local, other_layouts: OnceCell::new() }))
    }

    /// Returns the rank that holds the local tensor.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        &self.0.rank
    }

    /// Returns the layout: how the global tensor is distributed over the mesh.
    #[doc(alias = "placements")]
    #[doc(alias = "sharding")]
    #[doc(alias = "device_mesh")]
    #[must_use]
    pub fn layout(&self) -> &Layout {
        self.0.layout_source.layout()
    }

    /// Returns the local tensor of this rank, without communication.
    #[doc(alias = "to_local")]
    #[doc(alias = "addressable_data")]
    #[must_use]
    pub fn local(&self) -> &LocalTensor {
        &self.0.local
    }

    /// Announces that ops will read this tensor several times while the returned guard lives, like a weight in a
    /// step of several microbatches. The back end may then cache the tensor in its packed form
    /// ([`Backend::cache_packed`](shardgrad_kernels::Backend::cache_packed)); results are the same. The guard holds
    /// the memory, so drop it before an update in place.
    #[doc(alias = "prepack")]
    #[must_use]
    pub fn cache_packed(&self) -> PackCacheGuard {
        self.rank().backend().cache_packed(&self.local().buffer)
    }

    /// Returns a number that is unique among living tensors.
    #[doc(alias = "id")]
    #[must_use]
    pub fn identity(&self) -> usize {
        Rc::as_ptr(&self.0).addr()
    }

    /// Whether two handles refer to the same tensor.
    #[doc(alias = "is_same")]
    #[must_use]
    pub fn ptr_eq(&self, other: &Tensor) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Returns the global shape.
    #[doc(alias = "size")]
    #[must_use]
    pub fn shape(&self) -> Dims {
        self.layout().shape()
    }

    /// Returns the dtype.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.layout().dtype()
    }

    /// Makes a meta tensor: a layout without values, on which programs are recorded. Reading its values is an error.
    #[doc(alias = "device_meta")]
    #[doc(alias = "eval_shape")]
    #[doc(alias = "ShapeDtypeStruct")]
    #[doc(alias = "FakeTensor")]
    #[must_use]
    pub fn meta(rank: &Rank, layout: &Layout) -> Tensor {
        let (dtype, shape) = (layout.dtype(), layout.local_shape(rank.coordinates()));
        let buffer = Buffer::without_memory(shape.iter().product::<usize>() * dtype.size());
        Tensor::assemble(rank, layout.clone(), LocalTensor::from_buffer(buffer, dtype, &shape))
    }

    /// Whether the tensor has values, so that it is not a meta tensor.
    #[must_use]
    pub fn has_values(&self) -> bool {
        self.0.local.buffer.has_memory()
    }

    /// Makes a tensor with one value everywhere. On a partial axis the rank at coordinate 0 holds the value, the
    /// others hold zeros.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::DType` for a value that an integer dtype
    /// cannot represent; `Kind::Shape` for more elements than memory can address; `Kind::OutOfMemory`.
    #[doc(alias = "ones")]
    #[track_caller]
    pub fn full(rank: &Rank, layout: &Layout, value: f64) -> Result<Tensor> {
        check_mesh(rank, layout, Location::caller())?;
        check_representable(layout.dtype(), value)?;
        layout.check_addressable()?;
        let value = if holds_zeros(layout, rank) { 0.0 } else { value };
        let local = LocalTensor::full(rank, layout.dtype(), &layout.local_shape(rank.coordinates()), value)?;
        Ok(Tensor::assemble(rank, layout.clone(), local))
    }

    /// Makes a tensor of zeros.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::Shape` for more elements than memory can
    /// address; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn zeros(rank: &Rank, layout: &Layout) -> Result<Tensor> {
        Tensor::full(rank, layout, 0.0)
    }

    /// Makes a tensor of normal random numbers with mean 0, keyed by `key` and `stream` and counted by global
    /// element index, so that the values are the same on any mesh. On a partial axis the rank at coordinate 0 holds
    /// the values, the others hold zeros.
    ///
    /// # Errors
    /// As [`Tensor::zeros`].
    #[doc(alias = "randn")]
    #[doc(alias = "random.normal")]
    #[track_caller]
    pub fn normal(rank: &Rank, layout: &Layout, key: u64, stream: u64, std: f64) -> Result<Tensor> {
        Tensor::random(rank, layout, &NORMAL, key, stream, [0.0, std])
    }

    /// Makes a tensor of uniform random numbers in `low..high`, keyed and distributed as by [`Tensor::normal`].
    ///
    /// # Errors
    /// As [`Tensor::zeros`].
    #[doc(alias = "rand")]
    #[doc(alias = "random.uniform")]
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
        Context::of(rank).note_tensor(layout, site);
        if holds_zeros(layout, rank) {
            return Tensor::zeros(rank, layout);
        }
        layout.check_addressable()?;
        let mut local = LocalTensor::alloc(rank, layout.dtype(), &layout.local_shape(rank.coordinates()))?;
        let mut scalars = vec![
            Scalar::Int(key as i64),
            Scalar::Int(stream as i64),
            Scalar::Real(bounds[0]),
            Scalar::Real(bounds[1]),
        ];
        scalars.extend(index_scalars(layout, rank));
        launch(rank, kernel, &[], &mut [&mut local], &scalars)?;
        Ok(Tensor::assemble(rank, layout.clone(), local))
    }

    /// Returns the tensor with a row-major local tensor without gaps, copied if necessary. A view would keep the
    /// whole buffer of its source alive.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn contiguous(&self) -> Result<Tensor> {
        let local = self.local().contiguous(self.rank())?;
        Ok(Tensor::assemble(self.rank(), self.layout().clone(), local))
    }

    /// Converts to a wider float dtype, without rounding.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn widen(self, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype {
            return Ok(self);
        }
        debug_assert!(self.dtype().size() < dtype.size(), "{} is no wider than {}", dtype, self.dtype());
        self.into_dtype(dtype)
    }

    /// Converts to another float dtype. Each rank rounds its local tensor; of a partial sum, its own term.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "to")]
    #[doc(alias = "astype")]
    pub fn into_dtype(self, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype {
            return Ok(self);
        }
        let local = self.local().to_dtype(self.rank(), dtype)?;
        Ok(Tensor::assemble(self.rank(), self.layout().with_dtype(dtype), local))
    }

    /// Returns the value in another layout, if an implicit step outside of a tape has made it already.
    pub(crate) fn cached_layout(&self, layout: &Layout) -> Option<Tensor> {
        self.0.other_layouts.get()?.borrow().iter().find(|t| t.layout() == layout).cloned()
    }

    /// Caches the value in another layout for the next op that needs it.
    pub(crate) fn cache_layout(&self, other: Tensor) {
        self.0.other_layouts.get_or_init(Box::default).borrow_mut().push(other);
    }

    /// Adds another tensor of the same layout, in place if this handle is the only owner of its memory and fills it (gradient
    /// accumulation). The last view of a larger buffer, such as the sum of a bucket, is copied: in place it would hold the whole buffer.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "accumulate_grad")]
    #[doc(alias = "add_")]
    #[track_caller]
    pub fn accumulate(mut self, other: &Tensor) -> Result<Tensor> {
        debug_assert_eq!(self.layout(), other.layout(), "cotangents of one value share a layout");
        let fills_buffer = self.local().buffer.bytes() == self.local().numel() * self.dtype().size();
        let (is_unique, rank) = (fills_buffer && self.is_unique_contiguous(), self.rank().clone());
        let lineage = self.local().lineage.plus(other.local().lineage);
        if is_unique && !Context::of(&rank).detects_anomalies() {
            return self.update(|sum| {
                sum.lineage = lineage;
                launch(&rank, &ACCUMULATE, &[other.local()], &mut [sum], &[])
            });
        }
        let mut sum = LocalTensor { lineage, ..self.local().alloc_like(&rank, self.dtype())? };
        launch(&rank, &ADD, &[self.local(), other.local()], &mut [&mut sum], &[])?;
        if Context::of(&rank).detects_anomalies() {
            let site = Location::caller();
            AnomalyDetector::inspect(
                &rank,
                "the sum of two cotangents",
                &[self.local(), other.local()],
                &[&sum],
                site,
            )?;
        }
        Ok(Tensor::assemble(&rank, self.layout().clone(), sum))
    }

    /// Updates the local tensor in place; the memory is copied first if it is shared.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn update(self, change: impl FnOnce(&mut LocalTensor) -> Result<()>) -> Result<Tensor> {
        let (rank, layout) = (self.rank().clone(), self.layout().clone());
        let mut local = self.into_unique_local()?;
        change(&mut local)?;
        Ok(Tensor::assemble(&rank, layout, local))
    }

    /// Makes this handle the only owner of contiguous memory, copying the elements if necessary, so that they can be
    /// changed in place.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "make_mut")]
    pub fn make_unique(&mut self) -> Result<()> {
        if let Some(inner) = Rc::get_mut(&mut self.0) {
            // Other layouts of this value may share its memory.
            inner.other_layouts.take();
        }
        if self.is_unique_contiguous() {
            return Ok(());
        }
        let copy = self.local().to_dtype(self.rank(), self.dtype())?;
        *self = Tensor::assemble(self.rank(), self.layout().clone(), copy);
        Ok(())
    }

    /// Whether this is the only handle of the tensor and of its memory, and the memory has no gaps.
    fn is_unique_contiguous(&mut self) -> bool {
        Rc::get_mut(&mut self.0).is_some_and(|i| i.local.view.is_contiguous() && i.local.buffer.is_unique())
    }

    /// Returns layout and local tensor, if this is the only handle of the tensor.
    pub(crate) fn into_parts(self) -> Option<(Layout, LocalTensor)> {
        let Inner { layout_source, local, .. } = Rc::try_unwrap(self.0).ok()?;
        Some((layout_source.layout().clone(), local))
    }

    /// Returns the local tensor on unshared memory, copied if necessary.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub(crate) fn into_unique_local(self) -> Result<LocalTensor> {
        let (rank, mut local) = match Rc::try_unwrap(self.0) {
            Ok(inner) => (inner.rank, inner.local),
            Err(shared) => (shared.rank.clone(), shared.local.clone()),
        };
        let is_unique = local.view.is_contiguous() && local.buffer.is_unique();
        if is_unique { Ok(local) } else { local.to_dtype(&rank, local.dtype) }
    }
}

/// Whether a new tensor is zeros on this rank: on partial axes only the rank at coordinate 0 holds the values.
pub(crate) fn holds_zeros(layout: &Layout, rank: &Rank) -> bool {
    layout.partial().iter().any(|a| rank.coordinate(a) != 0)
}

/// The range of an integer dtype (first value, first value beyond); `None` for floats.
pub(crate) fn integer_range(dtype: DType) -> Option<Range<f64>> {
    match dtype {
        DType::I64 => Some(i64::MIN as f64..-(i64::MIN as f64)),
        DType::U8 => Some(0.0..256.0),
        DType::Bool => Some(0.0..2.0),
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 => None,
    }
}

/// Checks that an integer dtype can represent a number; floats round any number.
pub(crate) fn check_representable(dtype: DType, number: f64) -> Result<()> {
    if integer_range(dtype).is_none_or(|held| held.contains(&number) && number.fract() == 0.0) {
        return Ok(());
    }
    Err(Error::new(Kind::DType, format!("{dtype} cannot represent {number}")).detail(
        "help",
        "pass a value in the range of the dtype, or cast the tensor first: x.cast(DType::F32)",
    ))
}

/// Checks that a layout is on the mesh of the rank.
pub(crate) fn check_mesh(rank: &Rank, layout: &Layout, site: &'static Location<'static>) -> Result<()> {
    if layout.mesh() == rank.mesh() {
        return Ok(());
    }
    let text = format!("the layout is on {}, the rank on {}", layout.mesh(), rank.mesh());
    Err(Error::new(Kind::Mesh, text)
        .detail("layout", layout.to_string())
        .detail("rank", rank.describe())
        .detail("help", "make the layout on the mesh of the rank: rank.mesh()")
        .at(site))
}

/// For each dim, the global extent and the start of this rank's range, as kernels that depend on the position need them.
pub(crate) fn index_scalars(layout: &Layout, rank: &Rank) -> Vec<Scalar> {
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

/// Checks that host data has the Rust type of the layout's dtype. Bools are given as u8.
pub(crate) fn check_host_dtype<T: Element>(layout: &Layout) -> Result<()> {
    let is_truth = T::DTYPE == DType::U8 && layout.dtype() == DType::Bool;
    if T::DTYPE == layout.dtype() || is_truth {
        return Ok(());
    }
    let text = format!("host data of type {} for a tensor of dtype {}", T::DTYPE, layout.dtype());
    let help = match layout.dtype() {
        DType::Bool => "pass bools as u8: 0 is false, any other value is true".to_string(),
        dtype => {
            format!("pass elements of {dtype}, or use a layout with dtype {} and cast the tensor", T::DTYPE)
        }
    };
    Err(Error::new(Kind::DType, text).detail("layout", layout.to_string()).detail("help", help))
}

/// Checks that host data is a whole tensor of a layout.
pub(crate) fn check_host<T: Element>(layout: &Layout, len: usize) -> Result<()> {
    check_host_dtype::<T>(layout)?;
    if len != layout.numel() {
        let text = format!("{len} host elements for a tensor of {} elements", layout.numel());
        return Err(Error::new(Kind::Shape, text).detail("layout", layout.to_string()).detail(
            "help",
            "pass all elements of the global shape, row-major; for this rank's part use Tensor::from_local",
        ));
    }
    Ok(())
}
