//! Tensors as raw bytes, as checkpoint files hold them: row-major, little endian.

use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::tensor::{Tensor, check_mesh};
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::{Buffer, DType, Device, Strides, upload};
use std::panic::Location;

#[cfg(target_endian = "big")]
compile_error!("tensors have the byte order of their files, little endian");

/// The row-major bytes of a local tensor, detached from its rank, so that they outlive the rank's world. On the host
/// they share the memory of the tensor; from another device they are a copy.
#[derive(Clone, Debug)]
pub struct DetachedBytes(Contents);

#[derive(Clone, Debug)]
enum Contents {
    Shared { buffer: Buffer, len: usize },
    Copied(Vec<u8>),
}

impl DetachedBytes {
    /// Returns the number of bytes.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        match &self.0 {
            Contents::Shared { len, .. } => *len,
            Contents::Copied(bytes) => bytes.len(),
        }
    }
}

impl Tensor {
    /// Detaches the bytes of this rank's local tensor, for use in another world. No communication; no allocation for
    /// a host tensor that is row-major from the start of its memory, as parameters are.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`; `Kind::Unsupported` on the null back end.
    pub fn detach_bytes(&self) -> Result<DetachedBytes> {
        if !self.has_values() {
            return Err(Error::new(Kind::Unsupported, "a tensor on the null back end has no bytes"));
        }
        let flat = self.local().flat(self.rank())?;
        let len = flat.numel() * self.dtype().size();
        Ok(DetachedBytes(match flat.buffer.device_address() {
            None => Contents::Shared { buffer: flat.buffer.clone(), len },
            Some(_) => Contents::Copied(flat.download(self.rank(), len)?),
        }))
    }

    /// Makes a tensor from detached bytes of the layout's dtype, which are this rank's local tensor. On the host the
    /// tensor shares their memory. No communication.
    ///
    /// # Errors
    /// As [`Tensor::from_local_bytes`]; `Kind::Unsupported` for host memory on another device.
    #[track_caller]
    pub fn from_detached_bytes(rank: &Rank, layout: &Layout, bytes: &DetachedBytes) -> Result<Tensor> {
        check_mesh(rank, layout, Location::caller())?;
        let (buffer, len) = match &bytes.0 {
            Contents::Shared { buffer, len } => (buffer, *len),
            Contents::Copied(bytes) => {
                return Tensor::from_local_bytes(rank, layout, layout.dtype(), bytes);
            }
        };
        layout.check_storable()?;
        if rank.backend().device() != Device::Cpu {
            let text = format!("host memory for a tensor on {}", rank.backend().device());
            return Err(Error::new(Kind::Unsupported, text));
        }
        let shape = layout.local_shape(rank.coordinates());
        if len != shape.iter().product::<usize>() * layout.dtype().size() {
            let text = format!("{len} bytes for a local tensor of {} {:?}", layout.dtype(), shape.as_slice());
            return Err(Error::new(Kind::Shape, text).detail("layout", layout.to_string()));
        }
        let part = LocalTensor::from_buffer(buffer.clone(), layout.dtype(), &shape);
        Ok(Tensor::assemble(rank, layout.clone(), part))
    }

    /// Makes a tensor from the bytes of this rank's local tensor, of dtype `from`, rounded to the dtype of the
    /// layout; of bools any value except 0 is true. No communication.
    ///
    /// # Errors
    /// `Kind::Mesh` for a layout on another mesh than the rank's; `Kind::Shape` for a wrong number of bytes;
    /// `Kind::Layout` for a layout that is not storable; `Kind::DType` for a conversion between floats and other
    /// dtypes; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn from_local_bytes(rank: &Rank, layout: &Layout, from: DType, bytes: &[u8]) -> Result<Tensor> {
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
        // Bytes of a file may have any value; those of a bool tensor are 0 or 1.
        let dtype = if from == DType::Bool { DType::U8 } else { from };
        let held = LocalTensor::from_buffer(upload(&**rank.backend(), bytes)?, dtype, &view.shape);
        let part = if dtype == layout.dtype() { held } else { held.to_dtype(rank, layout.dtype())? };
        Ok(Tensor::assemble(rank, layout.clone(), part))
    }

    /// Returns the bytes of this rank's local tensor, row-major. No communication; none on the null back end.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn local_bytes(&self) -> Result<Vec<u8>> {
        let flat = self.local().flat(self.rank())?;
        flat.download(self.rank(), flat.numel() * self.dtype().size())
    }

    /// Gathers the bytes of the whole tensor on every rank: partial sums are reduced, shards gathered. A collective
    /// call: every rank calls it together.
    ///
    /// # Errors
    /// Errors of the collectives; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let site = Location::caller();
        let whole = Layout::invariant(self.layout().mesh(), self.dtype(), &self.shape());
        let flat = self.to_layout_at(&whole, site)?.local().flat(self.rank())?;
        flat.download(self.rank(), whole.numel() * self.dtype().size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn bytes_round_trip_on_any_mesh() {
        let values: Vec<f32> = (0..15).map(|i| i as f32 - 7.25).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        for (text, own) in [("f32[5, 3]", [0..60, 0..60]), ("f32[5@tp, 3]", [0..24, 24..60])] {
            World::run(Mesh::parse("tp=2").unwrap(), |rank| {
                let (layout, own) = (Layout::parse(text, rank.mesh())?, own[rank.index()].clone());
                let tensor = Tensor::from_local_bytes(rank, &layout, DType::F32, &bytes[own])?;
                assert_eq!(tensor.to_host::<f32>()?, values);
                assert_eq!(tensor.to_bytes()?, bytes);
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn detached_bytes_move_to_another_world_without_a_copy() {
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
    fn bytes_are_rounded_and_mismatches_are_refused() {
        let bytes: Vec<u8> = [1.0f64, 1.0 + 1e-12].iter().flat_map(|x| x.to_le_bytes()).collect();
        World::run(Mesh::parse("tp=2").unwrap(), |rank| {
            let of = |layout: &str, from| {
                Tensor::from_local_bytes(rank, &Layout::parse(layout, rank.mesh())?, from, &bytes)
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
                let error = Tensor::from_local_bytes(rank, &layout, DType::F32, &[0; 4]).unwrap_err();
                assert_eq!(error.kind(), Kind::Mesh, "{other}: {error}");
                assert!(error.site().is_some_and(|s| s.file() == file!()), "{error}");
            }
            Ok(())
        })
        .unwrap();
    }
}
