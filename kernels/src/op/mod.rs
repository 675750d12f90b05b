//! The kernels: one folder each, with the contract, the plain reference, the fast path and the tests.

#[cfg(test)]
mod check;

use crate::kernel::Kernel;

/// Every kernel, in the order of the folders.
pub static KERNELS: &[&Kernel] = &[];
