//! Scratch memory of tasks, reused from task to task: steady-state steps allocate none from the system.

use crate::dtype::Float;
use crate::host_vec::filled_or_unwind;
use std::fmt;

/// One cache line, so that packed vectors are aligned.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Scratch memory with arbitrary contents. It grows to the largest request and keeps that size.
#[derive(Default)]
pub struct Scratch(Vec<Line>);

impl Scratch {
    /// Returns memory for `len` elements, aligned to a cache line. Panics with a [`KernelError`](crate::KernelError) if there is none.
    pub(crate) fn room<R: Float>(&mut self, len: usize) -> *mut R {
        let lines = (len * size_of::<R>()).div_ceil(size_of::<Line>());
        if self.0.len() < lines {
            self.0 = Vec::new();
            self.0 = filled_or_unwind(Line([0; 64]), lines);
        }
        self.0.as_mut_ptr().cast()
    }

    /// Returns slices of these lengths with arbitrary contents, each aligned to a cache line.
    pub(crate) fn slices<R: Float, const N: usize>(&mut self, lens: [usize; N]) -> [&mut [R]; N] {
        let line = size_of::<Line>() / size_of::<R>();
        let whole = lens.map(|len| len.next_multiple_of(line));
        let mut start = self.room::<R>(whole.iter().sum());
        std::array::from_fn(|i| {
            // SAFETY: the memory holds all slices, one behind the other; its bytes were zeros or floats before, and every pattern is a
            // float; `self` stays borrowed.
            let slice = unsafe { std::slice::from_raw_parts_mut(start, lens[i]) };
            start = start.wrapping_add(whole[i]);
            slice
        })
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scratch({} bytes)", size_of_val(&self.0[..]))
    }
}
