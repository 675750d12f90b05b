//! Values by stage and microbatch.

use std::ops::{Index, IndexMut};

/// A value for every stage and every microbatch.
#[derive(Clone, Debug)]
pub(super) struct Table<T> {
    num_microbatches: usize,
    cells: Vec<T>,
}

impl<T: Clone> Table<T> {
    /// The same value everywhere.
    pub(super) fn new(num_stages: usize, num_microbatches: usize, value: T) -> Table<T> {
        Table { num_microbatches, cells: vec![value; num_stages * num_microbatches] }
    }
}

impl<T> Index<(usize, usize)> for Table<T> {
    type Output = T;

    fn index(&self, (stage, microbatch): (usize, usize)) -> &T {
        &self.cells[stage * self.num_microbatches + microbatch]
    }
}

impl<T> IndexMut<(usize, usize)> for Table<T> {
    fn index_mut(&mut self, (stage, microbatch): (usize, usize)) -> &mut T {
        &mut self.cells[stage * self.num_microbatches + microbatch]
    }
}
