//! Tensors as the bytes of a file: row-major, little endian.

use crate::layout::Layout;
use crate::piece::Piece;
use crate::tensor::{Tensor, check_mesh};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::{DType, Strides, upload};
use std::panic::Location;

#[cfg(target_endian = "big")]
compile_error!("tensors are held as their files hold them, little endian");

impl Tensor {
    /// A tensor of which this rank's part has these bytes, of dtype `from`, rounded to the dtype of the layout; of truth values
    /// all but 0 is true. No communication.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::Shape` if the bytes are not as many as the part asks
    /// for; `Kind::Layout` for one that nothing can be stored in; `Kind::DType` between floats and others; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn from_own_bytes(rank: &Rank, layout: &Layout, from: DType, bytes: &[u8]) -> Result<Tensor> {
        check_mesh(rank, layout, Location::caller())?;
        layout.check_storable()?;
        let view = Strides::contiguous(&layout.local_shape(rank.coordinates()));
        if bytes.len() != view.numel() * from.size() {
            let text = format!("{} bytes for {} elements of {from}", bytes.len(), view.numel());
            return Err(Error::new(Kind::Shape, text).detail("layout", layout.to_string()));
        }
        if from != layout.dtype() && !(from.is_float() && layout.dtype().is_float()) {
            return Err(Error::new(
                Kind::DType,
                format!("bytes of {from} for a tensor of {}", layout.dtype()),
            ));
        }
        // Bytes of a file need not be 0 or 1, as those of every bool are.
        let dtype = if from == DType::Bool { DType::U8 } else { from };
        let held = Piece::received(upload(&**rank.backend(), bytes)?, dtype, &view.shape);
        let part = if dtype == layout.dtype() { held } else { held.converted(rank, layout.dtype())? };
        Ok(Tensor::assemble(rank, layout.clone(), part))
    }

    /// The bytes of this rank's part, row-major. No communication; none on the null back end.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn own_bytes(&self) -> Result<Vec<u8>> {
        let flat = self.piece().flat(self.rank())?;
        flat.front(self.rank(), flat.numel() * self.dtype().size())
    }

    /// The bytes of the whole tensor, on every rank: completes and gathers what is split, so every rank calls this
    /// together.
    ///
    /// # Errors
    /// What the collectives report; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let site = Location::caller();
        let whole = Layout::invariant(self.layout().mesh(), self.dtype(), &self.shape());
        let flat = self.to_layout_at(&whole, site)?.piece().flat(self.rank())?;
        flat.front(self.rank(), whole.numel() * self.dtype().size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn bytes_go_in_and_out_on_any_mesh() {
        let values: Vec<f32> = (0..15).map(|i| i as f32 - 7.25).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        for (text, own) in [("f32[5, 3]", [0..60, 0..60]), ("f32[5@tp, 3]", [0..24, 24..60])] {
            World::run(Mesh::parse("tp=2").unwrap(), |rank| {
                let (layout, own) = (Layout::parse(text, rank.mesh())?, own[rank.index()].clone());
                let tensor = Tensor::from_own_bytes(rank, &layout, DType::F32, &bytes[own])?;
                assert_eq!(tensor.to_host::<f32>()?, values);
                assert_eq!(tensor.to_bytes()?, bytes);
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn dtypes_are_rounded_and_what_does_not_fit_is_refused() {
        let bytes: Vec<u8> = [1.0f64, 1.0 + 1e-12].iter().flat_map(|x| x.to_le_bytes()).collect();
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let of = |layout: &str, from| {
                Tensor::from_own_bytes(rank, &Layout::parse(layout, rank.mesh())?, from, &bytes)
            };
            assert_eq!(of("f32[4@tp]", DType::F64)?.to_host::<f32>()?, [1.0; 4]);
            assert_eq!(of("u8[16]", DType::U8)?.to_host::<u8>()?, bytes);
            let truth: Vec<u8> = bytes.iter().map(|b| u8::from(*b != 0)).collect();
            assert_eq!(of("bool[16]", DType::Bool)?.to_host::<u8>()?, truth);
            assert_eq!(of("f32[4@tp]", DType::F32).unwrap_err().kind(), Kind::Shape);
            assert_eq!(of("f32[4@tp]", DType::I64).unwrap_err().kind(), Kind::DType);
            assert_eq!(of("f32[2] +tp", DType::F64).unwrap_err().kind(), Kind::Layout);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_layout_on_another_mesh_is_refused() {
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            for other in ["dp=2", "dp=2,tp=4", ""] {
                let layout = Layout::invariant(&Mesh::parse(other)?, DType::F32, &[1]);
                let error = Tensor::from_own_bytes(rank, &layout, DType::F32, &[0; 4]).unwrap_err();
                assert_eq!(error.kind(), Kind::Mesh, "{other}: {error}");
                assert!(error.site().is_some_and(|s| s.file() == file!()), "{error}");
            }
            Ok(())
        })
        .unwrap();
    }
}
