//! A free list of chunks that are cut into blocks, by address: for host memory and for GPU memory.

use std::collections::{BTreeMap, BTreeSet};

/// Chunks and their free blocks. Neighbouring free blocks of one chunk are merged.
#[derive(Debug, Default)]
pub(crate) struct FreeList {
    /// Bytes of each chunk, by address.
    chunks: BTreeMap<u64, usize>,
    /// Bytes of each free block, by address.
    free: BTreeMap<u64, usize>,
    by_size: BTreeSet<(usize, u64)>,
}

impl FreeList {
    /// Adds a chunk, all of it free.
    pub(crate) fn add_chunk(&mut self, address: u64, bytes: usize) {
        self.chunks.insert(address, bytes);
        self.add_free(address, bytes);
    }

    /// Returns the start and the bytes of the chunk that contains an address.
    pub(crate) fn chunk_of(&self, address: u64) -> (u64, usize) {
        let (start, bytes) =
            self.chunks.range(..=address).next_back().expect("bug: a block outside of all chunks");
        (*start, *bytes)
    }

    /// Iterates over the addresses of the chunks.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn chunks(&self) -> impl Iterator<Item = u64> + '_ {
        self.chunks.keys().copied()
    }

    /// Allocates a block from the smallest free block that is large enough (best fit); the lowest of several.
    pub(crate) fn cut(&mut self, bytes: usize) -> Option<u64> {
        let (_, address) = *self.by_size.range((bytes, 0)..).next()?;
        let whole = self.remove_free(address);
        if whole > bytes {
            self.add_free(address + bytes as u64, whole - bytes);
        }
        Some(address)
    }

    /// Frees a block, merging it with free neighbours.
    pub(crate) fn give_back(&mut self, address: u64, mut bytes: usize) {
        let (start, whole) = self.chunk_of(address);
        let mut from = address;
        let before = self.free.range(start..address).next_back().map(|(a, b)| (*a, *b));
        if let Some((a, b)) = before.filter(|(a, b)| a + *b as u64 == address) {
            self.remove_free(a);
            (from, bytes) = (a, bytes + b);
        }
        let behind = from + bytes as u64;
        if behind < start + whole as u64 && self.free.contains_key(&behind) {
            bytes += self.remove_free(behind);
        }
        self.add_free(from, bytes);
    }

    /// Removes the chunks in which nothing is in use, and returns their addresses and bytes.
    pub(crate) fn take_empty(&mut self) -> Vec<(u64, usize)> {
        let is_empty = |(address, bytes): &(&u64, &usize)| self.free.get(*address) == Some(*bytes);
        let empty: Vec<(u64, usize)> = self.chunks.iter().filter(is_empty).map(|(a, b)| (*a, *b)).collect();
        for (address, _) in &empty {
            self.remove_free(*address);
            self.chunks.remove(address);
        }
        empty
    }

    /// Returns whether nothing is in use, and all free blocks are merged.
    #[cfg(test)]
    pub(crate) fn is_all_free(&self) -> bool {
        self.free == self.chunks
    }

    fn add_free(&mut self, address: u64, bytes: usize) {
        self.free.insert(address, bytes);
        self.by_size.insert((bytes, address));
    }

    fn remove_free(&mut self, address: u64) -> usize {
        let bytes = self.free.remove(&address).expect("bug: a free block that is not listed");
        self.by_size.remove(&(bytes, address));
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_neighbours_of_one_chunk_are_merged() {
        let mut free_list = FreeList::default();
        // The chunks are adjacent: blocks of two chunks must not be merged.
        free_list.add_chunk(100, 60);
        free_list.add_chunk(160, 40);
        let blocks = [20, 20, 20, 40].map(|bytes| free_list.cut(bytes).unwrap());
        assert_eq!(blocks, [160, 180, 100, 120], "the smallest that fits, then the lowest");
        assert_eq!(free_list.cut(1), None);
        free_list.give_back(100, 20);
        free_list.give_back(180, 20);
        assert_eq!((free_list.cut(21), free_list.take_empty()), (None, vec![]));
        free_list.give_back(120, 40);
        assert_eq!(free_list.take_empty(), [(100, 60)]);
        free_list.give_back(160, 20);
        assert_eq!((free_list.chunk_of(199), free_list.cut(40)), ((160, 40), Some(160)));
        assert_eq!((free_list.chunks().collect::<Vec<_>>(), free_list.is_all_free()), (vec![160], false));
    }
}
