//! Tensors from host data, and back: distribute, wrap local data, gather.

use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::tensor::{Tensor, check_host, check_host_dtype, check_mesh, holds_zeros};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::host_vec::try_with_capacity;
use shardgrad_kernels::{DType, Element, Strides};
use std::panic::Location;

impl Tensor {
    /// Makes an unsharded tensor from row-major host data; every rank passes the same data and holds all of it (`=`
    /// on every axis).
    ///
    /// # Errors
    /// `Kind::Shape` if `data` does not have as many elements as the shape, or memory cannot address so many;
    /// `Kind::OutOfMemory`.
    #[doc(alias = "tensor")]
    #[doc(alias = "asarray")]
    #[doc(alias = "from_numpy")]
    #[track_caller]
    pub fn from_host<T: Element>(rank: &Rank, shape: &[usize], data: &[T]) -> Result<Tensor> {
        let site = Location::caller();
        let layout = Layout::checked_invariant(rank.mesh(), T::DTYPE, shape).map_err(|e| e.at(site))?;
        Tensor::from_global(rank, &layout, data)
    }

    /// Distributes a global tensor: every rank passes the same row-major host data and keeps its own part, without
    /// communication. On a partial axis the rank at coordinate 0 holds the values, the others hold zeros. Bools are
    /// given as u8; any value except 0 is true.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::Shape` or `Kind::DType` if `data` does not
    /// match the layout; `Kind::OutOfMemory`.
    #[doc(alias = "distribute_tensor")]
    #[doc(alias = "device_put")]
    #[doc(alias = "shard_tensor")]
    #[track_caller]
    pub fn from_global<T: Element>(rank: &Rank, layout: &Layout, data: &[T]) -> Result<Tensor> {
        let site = Location::caller();
        check_mesh(rank, layout, site)?;
        check_host::<T>(layout, data.len()).map_err(|e| e.at(site))?;
        Context::of(rank).note_tensor(layout, site);
        let here = rank.coordinates();
        if holds_zeros(layout, rank) {
            return Tensor::zeros(rank, layout);
        }
        let mut view = Strides::contiguous(&layout.shape());
        for d in 0..layout.ndim() {
            let range = layout.range(d, here);
            view = view.narrow(d, range.start, range.end);
        }
        let local = if view.numel() == layout.numel() {
            LocalTensor::upload(rank, &view.shape, data)?
        } else {
            LocalTensor::upload(rank, &view.shape, &copy_view(data, &view)?)?
        };
        Ok(Tensor::assemble(rank, layout.clone(), into_layout_dtype(local, layout, rank)?))
    }

    /// Makes a distributed tensor from this rank's local elements (row-major, local shape), without communication.
    /// Every rank calls it with the same layout; the caller guarantees that the local tensors belong together. Bools
    /// are given as u8; any value except 0 is true.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::Shape` if `data` does not have as many
    /// elements as the local shape; `Kind::DType`; `Kind::OutOfMemory`.
    #[doc(alias = "make_array_from_single_device_arrays")]
    #[track_caller]
    pub fn from_local<T: Element>(rank: &Rank, layout: &Layout, data: &[T]) -> Result<Tensor> {
        let site = Location::caller();
        check_mesh(rank, layout, site)?;
        let local_shape = layout.local_shape(rank.coordinates());
        if data.len() != local_shape.iter().product::<usize>() {
            let text =
                format!("{} local elements for a local shape of {:?}", data.len(), local_shape.as_slice());
            return Err(Error::new(Kind::Shape, text)
                .detail("layout", layout.to_string())
                .detail("rank", rank.describe())
                .detail("help", "pass this rank's part only; for the whole tensor use Tensor::from_global")
                .at(site));
        }
        check_host_dtype::<T>(layout).map_err(|e| e.at(site))?;
        Context::of(rank).note_tensor(layout, site);
        let local = LocalTensor::upload(rank, &local_shape, data)?;
        Ok(Tensor::assemble(rank, layout.clone(), into_layout_dtype(local, layout, rank)?))
    }

    /// Gathers the whole tensor to the host, row-major, on every rank: partial sums are reduced, shards gathered. A
    /// collective call: every rank calls it together.
    ///
    /// # Errors
    /// `Kind::DType` if `T` is not the tensor's dtype; `Kind::Unsupported` on the null back end, which has no
    /// values; errors of the collectives.
    #[doc(alias = "full_tensor")]
    #[doc(alias = "numpy")]
    #[doc(alias = "device_get")]
    #[doc(alias = "process_allgather")]
    #[track_caller]
    pub fn to_host<T: Element>(&self) -> Result<Vec<T>> {
        let site = Location::caller();
        self.check_readable(site)?;
        let fits = T::DTYPE == self.dtype() || (T::DTYPE == DType::U8 && self.dtype() == DType::Bool);
        if !fits {
            let text = format!("a tensor of dtype {} read as {}", self.dtype(), T::DTYPE);
            return Err(Error::new(Kind::DType, text).at(site));
        }
        let flat = self.to_layout_at(&self.replicated_layout(), site)?.local().flat(self.rank())?;
        // A view at the front of a larger buffer is flat too.
        flat.download(self.rank(), flat.numel())
    }

    /// Gathers the whole tensor to the host as f64, as [`Tensor::to_host`] does. A collective call.
    ///
    /// # Errors
    /// Errors of the collectives.
    #[doc(alias = "full_tensor")]
    #[track_caller]
    pub fn to_f64(&self) -> Result<Vec<f64>> {
        let site = Location::caller();
        self.check_readable(site)?;
        self.to_layout_at(&self.replicated_layout(), site)?.local().to_f64(self.rank())
    }

    /// Returns the element of a tensor with one element, reduced over partial axes. A collective call: every rank
    /// calls it together.
    ///
    /// # Errors
    /// `Kind::Shape` if the tensor does not have exactly one element.
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        let values = self.to_f64()?;
        match values[..] {
            [x] => Ok(x),
            _ => Err(Error::new(
                Kind::Shape,
                format!("item() of a tensor with {} elements", self.layout().numel()),
            )
            .at(Location::caller())),
        }
    }

    /// Returns this rank's local elements, row-major, as f64. No communication.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "to_local")]
    pub fn to_local_f64(&self) -> Result<Vec<f64>> {
        self.local().to_f64(self.rank())
    }

    /// Redistributes the tensor to another layout along the cheapest route. A collective call: every rank calls it
    /// together. `site` is the source line that errors name.
    ///
    /// # Errors
    /// `Kind::Layout` for a layout with another mesh, dtype or shape; errors of the collectives.
    #[doc(alias = "redistribute")]
    #[doc(alias = "device_put")]
    #[doc(alias = "with_sharding_constraint")]
    #[doc(alias = "reshard")]
    pub fn to_layout_at(&self, to: &Layout, site: &'static Location<'static>) -> Result<Tensor> {
        let route = Context::of(self.rank()).routes.route(self.layout(), to, self.dtype().is_float())?;
        crate::tensor::redistribute::run(self, &route.steps, to, site)
    }

    /// Refuses to read a tensor without values.
    pub(super) fn check_readable(&self, site: &'static Location<'static>) -> Result<()> {
        if self.has_values() {
            return Ok(());
        }
        if !self.rank().is_dry_run() {
            let text = "a value is read where only its layout is known (a meta tensor)";
            return Err(Error::new(Kind::Unsupported, text)
                .detail("help", "while a program is recorded, return the tensor and read it afterwards")
                .at(site));
        }
        Err(Error::new(Kind::Unsupported, "a value is read on the null back end, which has no values")
            .detail("help", "a program that is explained or recorded must not read values")
            .at(site))
    }

    fn replicated_layout(&self) -> Layout {
        Layout::invariant(self.layout().mesh(), self.dtype(), &self.shape())
    }
}

/// Converts uploaded data to the dtype of the layout: bytes that stand for bools become 0 or 1.
fn into_layout_dtype(local: LocalTensor, layout: &Layout, rank: &Rank) -> Result<LocalTensor> {
    if local.dtype == layout.dtype() { Ok(local) } else { local.to_dtype(rank, layout.dtype()) }
}

/// Copies the elements of a view of host data, row-major.
fn copy_view<T: Element>(data: &[T], view: &Strides) -> Result<Vec<T>> {
    let mut out = try_with_capacity(view.numel(), "this rank's part of a tensor")?;
    if view.numel() == 0 {
        return Ok(out);
    }
    let inner = view.shape.last().copied().unwrap_or(1);
    let outer: usize = view.numel() / inner.max(1);
    let mut index = vec![0usize; view.ndim().saturating_sub(1)];
    for _ in 0..outer {
        let start = view.offset + index.iter().zip(&view.strides).map(|(i, s)| i * s).sum::<usize>();
        out.extend_from_slice(&data[start..start + inner]);
        for d in (0..index.len()).rev() {
            index[d] += 1;
            if index[d] < view.shape[d] {
                break;
            }
            index[d] = 0;
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::elementwise::Elementwise;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn bools_from_bytes_are_0_or_1() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let layout = Layout::parse("bool[4@a]", rank.mesh())?;
            let right = Tensor::from_global(rank, &layout, &[0u8, 1, 1, 1])?;
            let x = Tensor::from_global(rank, &layout, &[0u8, 1, 2, 255])?;
            let own: &[u8] = if rank.index() == 0 { &[0, 7] } else { &[255, 128] };
            for x in [x, Tensor::from_local(rank, &layout, own)?] {
                assert_eq!(x.to_host::<u8>()?[2..], [1, 1]);
                assert_eq!(x.dtype(), DType::Bool);
                assert!(x.eq(&right).to_f64()?[2..].iter().all(|same| *same == 1.0));
            }
            let bytes = Tensor::from_global(rank, &layout.with_dtype(DType::U8), &[0u8, 1, 2, 255])?;
            assert_eq!(bytes.to_host::<u8>()?, [0, 1, 2, 255], "bytes stay as they are");
            let whole = Tensor::from_global(rank, &Layout::parse("bool[3]", rank.mesh())?, &[3u8, 0, 1])?;
            assert_eq!(whole.to_host::<u8>()?, [1, 0, 1]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn host_data_of_another_dtype_is_refused_with_help() {
        let refused = |make: fn(&Rank, &Layout) -> Result<Tensor>| {
            let made = World::run(Mesh::parse("a=2").unwrap(), |rank| {
                make(rank, &Layout::parse("bool[2]", rank.mesh())?).map(|_| ())
            });
            made.unwrap_err()
        };
        let errors = [
            refused(|rank, layout| Tensor::from_global(rank, layout, &[0i64, 1])),
            refused(|rank, layout| Tensor::from_local(rank, layout, &[0i64, 1])),
        ];
        for error in errors {
            assert_eq!(error.kind(), Kind::DType);
            let labels: Vec<&str> = error.details().iter().map(|d| d.0).collect();
            assert_eq!(labels[..2], ["layout", "help"], "{error}");
            assert!(error.site().is_some_and(|s| s.file().ends_with("host.rs")), "{error}");
        }
    }

    #[test]
    fn shapes_beyond_the_address_space_are_refused() {
        let made = World::run(Mesh::single(), |rank| {
            Tensor::from_host::<f32>(rank, &[1 << 32, 1 << 32], &[]).map(|_| ())
        });
        let error = made.unwrap_err();
        assert_eq!(error.kind(), Kind::Shape, "{error}");
        assert!(error.message().contains("more elements than memory can address"), "{error}");
        assert!(error.site().is_some_and(|s| s.file().ends_with("host.rs")), "{error}");
    }
}
