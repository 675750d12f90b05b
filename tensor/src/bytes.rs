//! Tensors as the bytes of a file: row-major, little endian.

use crate::layout::Layout;
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::{DType, Strides, upload};

#[cfg(target_endian = "big")]
compile_error!("tensors are held as their files hold them, little endian");

impl Tensor {
    /// Takes this rank's part out of the bytes of a whole tensor of dtype `from`, rounded to the dtype of the layout. No
    /// communication.
    ///
    /// # Errors
    /// `Kind::Shape` if the bytes are not as many as the layout asks for; `Kind::Layout` for one that nothing can be
    /// stored in; `Kind::DType` between floats and others; `Kind::OutOfMemory`.
    pub fn from_bytes(rank: &Rank, layout: &Layout, from: DType, bytes: &[u8]) -> Result<Tensor> {
        layout.check_storable()?;
        if bytes.len() != layout.numel() * from.size() {
            let text = format!("{} bytes for {} elements of {from}", bytes.len(), layout.numel());
            return Err(Error::new(Kind::Shape, text).detail("layout", layout.to_string()));
        }
        if from != layout.dtype() && !(from.is_float() && layout.dtype().is_float()) {
            return Err(Error::new(
                Kind::DType,
                format!("bytes of {from} for a tensor of {}", layout.dtype()),
            ));
        }
        let mut view = Strides::contiguous(&layout.shape());
        for d in 0..layout.ndim() {
            let range = layout.range(d, rank.coordinates());
            view = view.narrow(d, range.start, range.end);
        }
        let whole = Piece { buffer: upload(&**rank.backend(), bytes)?, dtype: from, view };
        // A copy even where the part is whole: a view would keep all the bytes alive.
        let part = whole.converted(rank, layout.dtype())?;
        Ok(Tensor::assemble(rank, layout.clone(), part))
    }

    /// The bytes of the whole tensor, on every rank: completes and gathers what is split, so every rank calls this
    /// together.
    ///
    /// # Errors
    /// What the collectives report; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let site = std::panic::Location::caller();
        let whole = Layout::invariant(self.layout().mesh(), self.dtype(), &self.shape());
        let flat = self.to_layout_at(&whole, site)?.piece().flat(self.rank())?;
        let bytes = flat.buffer.as_slice::<u8>();
        let len = bytes.len().min(whole.numel() * self.dtype().size());
        Ok(bytes[..len].to_vec())
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
        for text in ["f32[5, 3]", "f32[5@tp, 3]", "f32[5, 3@tp]"] {
            World::run(Mesh::parse("tp=2").unwrap(), |rank| {
                let tensor =
                    Tensor::from_bytes(rank, &Layout::parse(text, rank.mesh())?, DType::F32, &bytes)?;
                assert_eq!(tensor.to_host::<f32>()?, values);
                assert_eq!(tensor.to_bytes()?, bytes);
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn dtypes_are_rounded_and_parts_own_their_memory() {
        let bytes: Vec<u8> = [1.0f64, 2.5, 1.0 + 1e-12, -8.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let layout = Layout::parse("f32[4@tp]", rank.mesh())?;
            let tensor = Tensor::from_bytes(rank, &layout, DType::F64, &bytes)?;
            assert_eq!(tensor.to_host::<f32>()?, [1.0, 2.5, 1.0, -8.0]);
            assert_eq!(tensor.piece().buffer.bytes(), 8);
            assert_eq!(
                Tensor::from_bytes(rank, &layout, DType::F32, &bytes).unwrap_err().kind(),
                Kind::Shape
            );
            assert_eq!(
                Tensor::from_bytes(rank, &layout, DType::I64, &bytes).unwrap_err().kind(),
                Kind::DType
            );
            assert!(
                Tensor::from_bytes(rank, &Layout::parse("f32[4] +tp", rank.mesh())?, DType::F64, &bytes)
                    .is_err()
            );
            Ok(())
        })
        .unwrap();
    }
}
