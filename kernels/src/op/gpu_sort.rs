//! Sorting of rows on GPUs: grids for the sources that include `gpu_sort.cu`. Such a source has an entry point `tiles` that makes items of
//! elements, and if results are not items, `tiles_last` and `merge_last` that write the results.

use crate::gpu::{Grid, GridArg, LaunchPlan};
use std::borrow::Cow;

/// Equals the constant in the CUDA source.
const THREADS: u32 = 256;
const TILE: usize = 2048;

/// The plan of a sort of rows, of which the first k items are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SortPlan {
    /// The number of rows.
    pub(crate) rows: usize,
    /// Elements of a row, fewer than 2^32.
    pub(crate) n: usize,
    /// The sorted items to store per row, the first k.
    pub(crate) k: usize,
    /// Whether keys have 64 bits: the macro `WIDE`.
    pub(crate) is_wide: bool,
}

impl SortPlan {
    /// Returns whether places of a row can be counted in 32 bits.
    pub(crate) fn fits(&self) -> bool {
        u32::try_from(self.n).is_ok()
    }

    /// Adds the grids. `keys` are the arguments from which items are made, `results` those to which the last grid writes results; without
    /// `results` the items are stored, row by row, in the returned argument.
    pub(crate) fn plan(
        &self,
        plan: &mut LaunchPlan,
        defines: &[(&'static str, Cow<'static, str>)],
        keys: &[GridArg],
        results: Option<&[GridArg]>,
    ) -> Option<GridArg> {
        if self.rows * self.n * self.k == 0 {
            return None;
        }
        let grid = |plan: &mut LaunchPlan, entry, blocks: usize, args: Vec<GridArg>| {
            let blocks = u32::try_from(blocks).expect("fewer than 2^43 elements fit a device");
            let (blocks, defines) = ([blocks, 1, 1], defines.to_vec());
            plan.grid(Grid { entry, defines, blocks, threads: THREADS, shared_bytes: 0, args });
        };
        // The length of the sorted runs that each grid leaves.
        let mut spans = vec![TILE];
        while spans[spans.len() - 1] < self.n {
            spans.push(2 * spans[spans.len() - 1]);
        }
        let last = results.map(|_| spans.len() - 1);
        let most =
            spans.iter().enumerate().filter(|(i, _)| Some(*i) != last).map(|(_, span)| self.bytes(*span));
        let most = most.max().unwrap_or(0);
        let mut scratch: [Option<GridArg>; 2] = [None, None];
        for (i, span) in spans.iter().enumerate() {
            let from = if i == 0 { keys.to_vec() } else { scratch[(i + 1) % 2].iter().cloned().collect() };
            let (to, entries) = match results {
                Some(results) if Some(i) == last => {
                    let behind = if i == 0 { &[][..] } else { keys };
                    ([behind, results].concat(), ["tiles_last", "merge_last"])
                }
                _ => (
                    vec![scratch[i % 2].get_or_insert_with(|| plan.scratch(most)).clone()],
                    ["tiles", "merge"],
                ),
            };
            let (entry, blocks, span) = if i == 0 {
                (entries[0], self.tile_blocks(), TILE)
            } else {
                let of_run = self.k.min(*span).div_ceil(TILE);
                (entries[1], self.rows * self.n.div_ceil(*span) * of_run, span / 2)
            };
            grid(plan, entry, blocks, [from, to, vec![self.numbers(span)]].concat());
        }
        scratch.into_iter().nth((spans.len() - 1) % 2).flatten()
    }

    /// Returns the smallest power of two that holds a row, or a tile of it.
    fn segment(&self) -> usize {
        self.n.next_power_of_two().min(TILE)
    }

    fn tile_blocks(&self) -> usize {
        (self.rows * self.n.div_ceil(TILE)).div_ceil(TILE / self.segment())
    }

    /// Returns the bytes of the stored items of all runs of length `span`.
    fn bytes(&self, span: usize) -> usize {
        self.rows * self.n.div_ceil(span) * self.k.min(span) * if self.is_wide { 16 } else { 8 }
    }

    /// Returns the source's `Runs`.
    fn numbers(&self, span: usize) -> GridArg {
        let numbers = [self.rows, self.n, self.k, span, self.segment()];
        GridArg::I64s(numbers.map(|n| n as i64).to_vec())
    }
}
