//! Tensors as the bytes of a file: row-major, little endian.

use crate::layout::Layout;
use crate::piece::Piece;
use crate::tensor::{Tensor, check_mesh};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::{Buffer, DType, Device, Strides, upload};
use std::panic::Location;

#[cfg(target_endian = "big")]
compile_error!("tensors are held as their files hold them, little endian");

/// The bytes of a local tensor, row-major, detached from its rank: they outlive the rank's world. On the host they share the memory
/// of the tensor; from another device they are a copy.
#[derive(Clone, Debug)]
pub struct DetachedBytes(Contents);

#[derive(Clone, Debug)]
enum Contents {
    Shared { buffer: Buffer, len: usize },
    Copied(Vec<u8>),
}

impl DetachedBytes {
    /// How many bytes there are.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        match &self.0 {
            Contents::Shared { len, .. } => *len,
            Contents::Copied(bytes) => bytes.len(),
        }
    }
}

impl Tensor {
    /// The bytes of this rank's part, for another world. No communication; allocates nothing for a tensor on the host that is
    /// row-major from the start of its memory, as parameters are.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`; `Kind::Unsupported` on the null back end.
    pub fn detach_bytes(&self) -> Result<DetachedBytes> {
        if !self.has_values() {
            return Err(Error::new(Kind::Unsupported, "a tensor on the null back end has no bytes"));
        }
        let flat = self.piece().flat(self.rank())?;
        let len = flat.numel() * self.dtype().size();
        Ok(DetachedBytes(match flat.buffer.device_address() {
            None => Contents::Shared { buffer: flat.buffer.clone(), len },
            Some(_) => Contents::Copied(flat.front(self.rank(), len)?),
        }))
    }

    /// A tensor of a layout of which this rank's part has these bytes, of the layout's dtype. On the host it shares their memory.
    /// No communication.
    ///
    /// # Errors
    /// As [`Tensor::from_own_bytes`]; `Kind::Unsupported` for bytes of the host on another device.
    #[track_caller]
    pub fn from_detached_bytes(rank: &Rank, layout: &Layout, bytes: &DetachedBytes) -> Result<Tensor> {
        check_mesh(rank, layout, Location::caller())?;
        let (buffer, len) = match &bytes.0 {
            Contents::Shared { buffer, len } => (buffer, *len),
            Contents::Copied(bytes) => {
                return Tensor::from_own_bytes(rank, layout, layout.dtype(), bytes);
            }
        };
        layout.check_storable()?;
        if rank.backend().device() != Device::Cpu {
            let text = format!("memory of the host for a tensor on {}", rank.backend().device());
            return Err(Error::new(Kind::Unsupported, text));
        }
        let shape = layout.local_shape(rank.coordinates());
        if len != shape.iter().product::<usize>() * layout.dtype().size() {
            let text = format!("{len} bytes for a local tensor of {} {:?}", layout.dtype(), shape.as_slice());
            return Err(Error::new(Kind::Shape, text).detail("layout", layout.to_string()));
        }
        let part = Piece::received(buffer.clone(), layout.dtype(), &shape);
        Ok(Tensor::assemble(rank, layout.clone(), part))
    }

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
    fn detached_bytes_carry_a_tensor_into_another_world_without_a_copy() {
        let mesh = || Mesh::parse("tp=2").unwrap();
        let values: Vec<f32> = (0..15).map(|i| i as f32 - 7.25).collect();
        let detached = World::run(mesh(), |rank| {
            let layout = Layout::parse("f32[5@tp, 3]", rank.mesh())?;
            let tensor = Tensor::from_global(rank, &layout, &values)?;
            let in_use = rank.backend().memory().in_use_bytes;
            let detached = tensor.detach_bytes()?;
            assert_eq!(rank.backend().memory().in_use_bytes, in_use);
            Ok(detached)
        });
        let detached = detached.unwrap();
        World::run(mesh(), |rank| {
            let own = &detached[rank.index()];
            let layout = Layout::parse("f32[5@tp, 3]", rank.mesh())?;
            let tensor = Tensor::from_detached_bytes(rank, &layout, own)?;
            assert_eq!(rank.backend().memory().peak_bytes, 0);
            assert_eq!(tensor.to_host::<f32>()?, values);
            let unlike = Layout::parse("f32[7@tp, 3]", rank.mesh())?;
            let error = Tensor::from_detached_bytes(rank, &unlike, own).map(drop).unwrap_err();
            assert_eq!(error.kind(), Kind::Shape, "{error}");
            Ok(())
        })
        .unwrap();
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
