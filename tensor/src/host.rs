//! In from the host, out to the host.

use crate::context::Context;
use crate::layout::Layout;
use crate::piece::Piece;
use crate::tensor::{Tensor, adds_zeros, check_host, check_host_dtype, check_mesh};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::host_vec::try_with_capacity;
use shardgrad_kernels::{DType, Element, Strides};
use std::panic::Location;

impl Tensor {
    /// A whole tensor that every rank holds in full (state `=` on every axis). `data` is row-major.
    ///
    /// # Errors
    /// `Kind::Shape` if `data` has another length than the shape, or there is no memory of such an extent;
    /// `Kind::OutOfMemory`.
    #[track_caller]
    pub fn from_host<T: Element>(rank: &Rank, shape: &[usize], data: &[T]) -> Result<Tensor> {
        let site = Location::caller();
        let layout = Layout::checked_invariant(rank.mesh(), T::DTYPE, shape).map_err(|e| e.at(site))?;
        Tensor::from_global(rank, &layout, data)
    }

    /// Takes this rank's piece out of the whole tensor, which every rank gives alike. On a pending axis
    /// coordinate 0 holds the values, the others zeros. Truth values are given as u8; all but 0 is true.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::Shape` or `Kind::DType` if `data` does not fit the
    /// layout; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn from_global<T: Element>(rank: &Rank, layout: &Layout, data: &[T]) -> Result<Tensor> {
        let site = Location::caller();
        check_mesh(rank, layout, site)?;
        check_host::<T>(layout, data.len()).map_err(|e| e.at(site))?;
        Context::of(rank).set_given(layout, site);
        let here = rank.coordinates();
        if adds_zeros(layout, rank) {
            return Tensor::zeros(rank, layout);
        }
        let mut view = Strides::contiguous(&layout.shape());
        for d in 0..layout.ndim() {
            let range = layout.range(d, here);
            view = view.narrow(d, range.start, range.end);
        }
        let piece = if view.numel() == layout.numel() {
            Piece::upload(rank, &view.shape, data)?
        } else {
            Piece::upload(rank, &view.shape, &gather_rows(data, &view)?)?
        };
        Ok(Tensor::assemble(rank, layout.clone(), as_stated(piece, layout, rank)?))
    }

    /// Puts this rank's own elements (row-major, local shape) under a layout. Every rank calls this alike; that the
    /// pieces belong together is the caller's word. Truth values are given as u8; all but 0 is true.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::Shape` if the elements are not as many as the local
    /// shape asks for; `Kind::DType`; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn from_local<T: Element>(rank: &Rank, layout: &Layout, data: &[T]) -> Result<Tensor> {
        let site = Location::caller();
        check_mesh(rank, layout, site)?;
        let local = layout.local_shape(rank.coordinates());
        if data.len() != local.iter().product::<usize>() {
            let text = format!("{} local elements for a local shape of {:?}", data.len(), local.as_slice());
            return Err(Error::new(Kind::Shape, text)
                .detail("layout", layout.to_string())
                .detail("rank", rank.describe())
                .detail("help", "give this rank's part only; for the whole tensor use Tensor::from_global")
                .at(site));
        }
        check_host_dtype::<T>(layout).map_err(|e| e.at(site))?;
        Context::of(rank).set_given(layout, site);
        let piece = Piece::upload(rank, &local, data)?;
        Ok(Tensor::assemble(rank, layout.clone(), as_stated(piece, layout, rank)?))
    }

    /// The whole tensor on the host, row-major, on every rank: completes and gathers what is split, so every rank
    /// calls this together.
    ///
    /// # Errors
    /// `Kind::DType` if `T` is not the tensor's type; `Kind::Unsupported` on the null back end, which has no values;
    /// what the collectives report.
    #[track_caller]
    pub fn to_host<T: Element>(&self) -> Result<Vec<T>> {
        let site = Location::caller();
        self.check_readable(site)?;
        let fits = T::DTYPE == self.dtype() || (T::DTYPE == DType::U8 && self.dtype() == DType::Bool);
        if !fits {
            let text = format!("a tensor of {} read as {}", self.dtype(), T::DTYPE);
            return Err(Error::new(Kind::DType, text).at(site));
        }
        let flat = self.to_layout_at(&self.gathered_layout(), site)?.piece().flat(self.rank())?;
        // A view at the front of its buffer is flat, and shorter.
        flat.front(self.rank(), flat.numel())
    }

    /// The whole tensor on the host as f64, as [`Tensor::to_host`].
    ///
    /// # Errors
    /// What the collectives report.
    #[track_caller]
    pub fn to_f64(&self) -> Result<Vec<f64>> {
        let site = Location::caller();
        self.check_readable(site)?;
        self.to_layout_at(&self.gathered_layout(), site)?.piece().to_f64(self.rank())
    }

    /// The one element of a tensor of one element, completed over pending axes: every rank calls this together.
    ///
    /// # Errors
    /// `Kind::Shape` if there is more or less than one element.
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        let values = self.to_f64()?;
        match values[..] {
            [x] => Ok(x),
            _ => Err(Error::new(
                Kind::Shape,
                format!("item() of a tensor of {} elements", self.layout().numel()),
            )
            .at(Location::caller())),
        }
    }

    /// This rank's own elements, row-major, as f64. No communication.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn to_local_f64(&self) -> Result<Vec<f64>> {
        self.piece().to_f64(self.rank())
    }

    /// The same value in another layout. Every rank calls this together.
    ///
    /// # Errors
    /// `Kind::Layout` if no route leads there; what the collectives report.
    pub fn to_layout_at(&self, to: &Layout, site: &'static Location<'static>) -> Result<Tensor> {
        let route = Context::of(self.rank()).routes.route(self.layout(), to, self.dtype().is_float())?;
        crate::redistribute::run(self, &route.steps, to, site)
    }

    fn check_readable(&self, site: &'static Location<'static>) -> Result<()> {
        if self.has_values() {
            return Ok(());
        }
        if !self.rank().is_dry() {
            let text = "a value is read where only its layout is known";
            return Err(Error::new(Kind::Unsupported, text)
                .detail("help", "while a program is recorded, return the tensor and read it afterwards")
                .at(site));
        }
        Err(Error::new(Kind::Unsupported, "a value is read on the null back end, which has shapes only")
            .detail("help", "explaining and recording a program must not depend on values")
            .at(site))
    }

    fn gathered_layout(&self) -> Layout {
        Layout::invariant(self.layout().mesh(), self.dtype(), &self.shape())
    }
}

/// What was uploaded in the dtype of its layout: bytes that stand for truth values become 0 or 1, as every bool is.
fn as_stated(piece: Piece, layout: &Layout, rank: &Rank) -> Result<Piece> {
    if piece.dtype == layout.dtype() { Ok(piece) } else { piece.converted(rank, layout.dtype()) }
}

/// The elements of a view of host data, row-major.
fn gather_rows<T: Element>(data: &[T], view: &Strides) -> Result<Vec<T>> {
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
    use crate::elementwise::Elementwise;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn truth_values_from_bytes_are_0_or_1() {
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
    fn data_of_another_dtype_is_refused_with_help() {
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
    fn more_elements_than_memory_has_addresses_are_refused() {
        let made = World::run(Mesh::single(), |rank| {
            Tensor::from_host::<f32>(rank, &[1 << 32, 1 << 32], &[]).map(|_| ())
        });
        let error = made.unwrap_err();
        assert_eq!(error.kind(), Kind::Shape, "{error}");
        assert!(error.message().contains("more elements than memory has addresses"), "{error}");
        assert!(error.site().is_some_and(|s| s.file().ends_with("host.rs")), "{error}");
    }
}
