//! Fallible allocation of host vectors, for lengths that grow with tensors: `vec!` would abort the process when memory runs out.

use crate::buffer::{has_margin, zeroed_vec};
use crate::dtype::Element;
use crate::error::KernelError;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Allocations of at least this size must leave the margin of memory for the rest of the program.
const LARGE: usize = 1 << 20;

/// Returns an empty vector with room for `len` elements.
///
/// # Errors
/// [`KernelError::HostMemory`], with the bytes and their purpose `what`, if the system refuses.
pub fn try_with_capacity<T>(len: usize, what: &'static str) -> Result<Vec<T>, KernelError> {
    let requested_bytes = len.saturating_mul(size_of::<T>());
    let refused = || KernelError::HostMemory { requested_bytes, what };
    let mut vec = Vec::new();
    vec.try_reserve_exact(len).map_err(|_| refused())?;
    if requested_bytes >= LARGE && !has_margin() { Err(refused()) } else { Ok(vec) }
}

/// Returns a vector of `len` zeros. Nothing is written where the system has zeroed memory, and in builds without
/// optimization elements are not visited one by one.
///
/// # Errors
/// As [`try_with_capacity`].
pub fn try_zeroed<T: Element>(len: usize, what: &'static str) -> Result<Vec<T>, KernelError> {
    let requested_bytes = len.saturating_mul(size_of::<T>());
    let refused = || KernelError::HostMemory { requested_bytes, what };
    let vec = zeroed_vec(len).ok_or_else(refused)?;
    if requested_bytes >= LARGE && !has_margin() { Err(refused()) } else { Ok(vec) }
}

/// Copies a slice to a new vector.
///
/// # Errors
/// As [`try_with_capacity`].
pub fn try_copied<T: Copy>(from: &[T], what: &'static str) -> Result<Vec<T>, KernelError> {
    let mut vec = try_with_capacity(from.len(), what)?;
    vec.extend_from_slice(from);
    Ok(vec)
}

/// Runs a kernel; a panic of a task with a [`KernelError`] ([`filled_or_unwind`]) becomes an error.
pub(crate) fn catch_kernel_error(work: impl FnOnce() -> Result<(), KernelError>) -> Result<(), KernelError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| match payload.downcast::<KernelError>() {
        Ok(error) => Err(*error),
        Err(payload) => resume_unwind(payload),
    })
}

/// Returns a vector of `len` copies of `value` for a kernel task; panics with a [`KernelError`] as the payload if there is no memory.
pub(crate) fn filled_or_unwind<T: Clone>(value: T, len: usize) -> Vec<T> {
    let mut vec = try_with_capacity(len, SCRATCH).unwrap_or_else(|error| resume_unwind(Box::new(error)));
    vec.resize(len, value);
    vec
}

/// The purpose of scratch memory in [`KernelError::HostMemory`].
pub(crate) const SCRATCH: &str = "the scratch memory of a kernel";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_large_allocation_is_an_error_with_its_bytes() {
        let error = try_zeroed::<f32>(usize::MAX / 8, "a test").unwrap_err();
        let bytes = usize::MAX / 8 * 4;
        assert_eq!(error, KernelError::HostMemory { requested_bytes: bytes, what: "a test" });
        assert_eq!(error.to_string(), format!("out of memory: the system refused {bytes} bytes for a test"));
        assert!(try_zeroed::<i64>(usize::MAX, "a test").is_err(), "more than the address space");
        assert!(try_with_capacity::<u64>(usize::MAX, "a test").is_err());
    }

    #[test]
    fn vectors_hold_their_elements() {
        for len in [0, 3, LARGE] {
            let zeros = try_zeroed::<f64>(len, "a test").unwrap();
            assert!(zeros.len() == len && zeros.iter().all(|x| x.to_bits() == 0));
        }
        assert_eq!(try_copied(&[1, 2], "a test").unwrap(), [1, 2]);
        assert_eq!(filled_or_unwind(1.5f32, 1 << 19), vec![1.5; 1 << 19]);
    }
}
