//! Calls and buffers in few words.

use shardgrad_dist::{AxisSet, Call, Mesh, Origin, Phase, Rank};
use shardgrad_kernels::{Buffer, Cpu, DType, Element, download, upload};
use std::panic::Location;

/// A mesh from its text form.
pub(crate) fn mesh(text: &str) -> Mesh {
    Mesh::parse(text).unwrap()
}

/// The set of the axes named in a text like `dp,tp`.
pub(crate) fn axes(mesh: &Mesh, names: &str) -> AxisSet {
    names.split(',').filter(|n| !n.is_empty()).map(|n| mesh.axis(n).expect("a known axis")).collect()
}

/// A forward call over some axes, from the line of the caller.
#[track_caller]
pub(crate) fn over(axes: AxisSet, dtype: DType) -> Call<'static> {
    Call { axes, dtype, phase: Phase::Forward, path: "", origin: Origin::default(), site: Location::caller() }
}

/// An f32 call over the axes of a text.
#[track_caller]
pub(crate) fn on(rank: &Rank, names: &str) -> Call<'static> {
    over(axes(rank.mesh(), names), DType::F32)
}

/// Host values in memory of the rank.
pub(crate) fn up<T: Element>(rank: &Rank, data: &[T]) -> Buffer {
    upload(&**rank.backend(), data).unwrap()
}

/// The first `len` elements of a buffer of the host.
pub(crate) fn down<T: Element>(buffer: &Buffer, len: usize) -> Vec<T> {
    download(&*Cpu::backend(1), buffer, len).unwrap()
}

/// A pseudo-random number from a number.
pub(crate) fn hash(x: u64) -> u64 {
    let z = x.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D;
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
