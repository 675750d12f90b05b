//! A growable tensor: appends along one dim with amortized reallocation, the storage of a KV cache.

use crate::layout::Layout;
use crate::layout::dim::Dim;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use smallvec::SmallVec;

/// A tensor that grows along an unsharded dim; other dims may be sharded. Each rank appends its own part, as a KV cache
/// does.
///
/// The capacity doubles whenever it is exhausted, so that n appended elements cost about n copies in all.
#[doc(alias = "KVCache")]
#[doc(alias = "DynamicCache")]
#[doc(alias = "past_key_values")]
#[derive(Debug)]
pub struct GrowableTensor {
    dim: usize,
    len: usize,
    /// Storage with capacity for at least `len` elements of the dim; those beyond `len` are arbitrary.
    storage: Option<Tensor>,
}

impl GrowableTensor {
    /// Makes an empty tensor that grows along dim `dim`.
    #[must_use]
    pub fn along(dim: usize) -> GrowableTensor {
        GrowableTensor { dim, len: 0, storage: None }
    }

    /// Returns the number of elements along the dim.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the tensor is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends `part` and returns the whole tensor: a view of this memory. While a view is alive, the next append
    /// copies everything. If memory runs out, the tensor becomes empty.
    ///
    /// # Errors
    /// `Kind::Layout` if the dim is sharded, the part is a partial sum, or its layout does not match the earlier
    /// parts; `Kind::OutOfMemory`.
    pub fn append(&mut self, part: &Tensor) -> Result<Tensor> {
        let layout = part.layout();
        let (before, after) = (self.len, self.len + layout.shape().get(self.dim).copied().unwrap_or(0));
        if self.dim >= layout.ndim() || layout.dims()[self.dim].axes.iter().next().is_some() {
            let text = format!(
                "a tensor grows along dim {}, which must exist and be unsharded; the part is {layout}",
                self.dim
            );
            return Err(Error::new(Kind::Layout, text));
        }
        if !layout.partial().is_empty() {
            return Err(Error::new(
                Kind::Layout,
                format!("a partial sum cannot be appended; redistribute it first: {layout}"),
            ));
        }
        if let Some(storage) = &self.storage
            && *storage.layout() != self.resized(layout, storage.layout().extent(self.dim))
        {
            let text = format!("the part is {layout}, but the tensor grows as {}", storage.layout());
            return Err(Error::new(Kind::Layout, text));
        }
        let (rank, dim) = (part.rank(), self.dim);
        self.len = 0;
        let storage = match self.storage.take() {
            Some(storage) if storage.layout().extent(dim) >= after => storage,
            smaller => self.grow(rank, layout, [before, after], smaller)?,
        };
        let storage = storage.update(|local| {
            local.lineage = local.lineage.join(part.local().lineage);
            local.write(rank, local.view.narrow(dim, before, after), part.local())
        })?;
        self.len = after;
        let filled = storage.local().with_view(storage.local().view.narrow(dim, 0, after));
        let whole = Tensor::assemble(rank, self.resized(layout, after), filled);
        self.storage = Some(storage);
        Ok(whole)
    }

    /// Drops the first `count` elements of the dim. The others are copied to new memory, with capacity for as many
    /// again. If memory runs out, the tensor becomes empty.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    ///
    /// # Panics
    /// If there are fewer elements.
    pub fn drop_front(&mut self, count: usize) -> Result<()> {
        assert!(count <= self.len, "bug in shardgrad: {count} of {} elements to drop", self.len);
        let (remaining, dim) = (self.len - count, self.dim);
        if count == 0 {
            return Ok(());
        }
        self.len = 0;
        let Some(storage) = self.storage.take() else { return Ok(()) };
        let extent = storage.layout().extent(dim).min((2 * remaining).next_power_of_two());
        let rank = storage.rank();
        let fresh = Tensor::zeros(rank, &self.resized(storage.layout(), extent))?;
        let old = storage.local().with_view(storage.local().view.narrow(dim, count, count + remaining));
        self.storage =
            Some(fresh.update(|local| local.write(rank, local.view.narrow(dim, 0, remaining), &old))?);
        self.len = remaining;
        Ok(())
    }

    fn resized(&self, layout: &Layout, extent: usize) -> Layout {
        let mut dims: SmallVec<[Dim; 6]> = SmallVec::from_slice(layout.dims());
        dims[self.dim].extent = extent;
        layout.with_dims(dims)
    }

    /// Allocates storage for at least `len` elements and copies the `remaining` elements of the smaller storage.
    fn grow(
        &self,
        rank: &Rank,
        layout: &Layout,
        [remaining, len]: [usize; 2],
        smaller: Option<Tensor>,
    ) -> Result<Tensor> {
        let grown = Tensor::zeros(rank, &self.resized(layout, len.next_power_of_two()))?;
        let Some(smaller) = smaller else { return Ok(grown) };
        let dim = self.dim;
        let old = smaller.local().with_view(smaller.local().view.narrow(dim, 0, remaining));
        grown.update(|local| local.write(rank, local.view.narrow(dim, 0, remaining), &old))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Mesh, World};

    fn part(rank: &Rank, layout: &str, first: usize) -> Result<Tensor> {
        let layout = Layout::parse(layout, rank.mesh())?;
        let values: Vec<f64> = (0..layout.numel()).map(|i| (first + i) as f64).collect();
        Tensor::from_global(rank, &layout, &values)
    }

    #[test]
    fn append_concatenates_on_every_rank() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let mut growing = GrowableTensor::along(1);
            assert!(growing.is_empty());
            let first = growing.append(&part(rank, "f64[2, 3, 3@a]", 0)?)?;
            assert_eq!(first.layout().to_string(), "f64[2, 3, 3@a]");
            for n in 0..7 {
                let whole = growing.append(&part(rank, "f64[2, 1, 3@a]", 100 * n)?)?;
                assert_eq!(
                    (growing.len(), whole.layout().to_string()),
                    (4 + n, format!("f64[2, {}, 3@a]", 4 + n))
                );
                let values = whole.to_f64()?;
                assert_eq!(values[..9], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
                let last = values.len() - 3;
                assert_eq!(
                    values[last..],
                    [3, 4, 5].map(|i| (100 * n + i) as f64),
                    "the last part of the second row"
                );
            }
            assert_eq!(first.to_f64()?[9], 9.0, "a live view does not change");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn drop_front_removes_the_first_elements() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let mut growing = GrowableTensor::along(1);
            growing.drop_front(0)?;
            let all = growing.append(&part(rank, "f64[2, 9, 3@a]", 0)?)?.to_f64()?;
            for (count, remaining) in [(2, 7), (0, 7), (5, 2)] {
                growing.drop_front(count)?;
                assert_eq!(growing.len(), remaining);
            }
            let whole = growing.append(&part(rank, "f64[2, 1, 3@a]", 100)?)?;
            assert_eq!(whole.layout().to_string(), "f64[2, 3, 3@a]");
            let values = whole.to_f64()?;
            assert_eq!(values[..6], all[21..27]);
            assert_eq!(values[6..9], [100.0, 101.0, 102.0]);
            assert_eq!(values[9..15], all[48..]);
            growing.drop_front(3)?;
            assert!(growing.is_empty());
            growing.append(&part(rank, "f64[2, 2, 3@a]", 7)?)?;
            assert_eq!(growing.len(), 2);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn capacity_doubles_and_appends_are_in_place() {
        World::run(Mesh::single(), |rank| {
            let mut growing = GrowableTensor::along(0);
            let mut places = Vec::new();
            for n in 0..64 {
                let whole = growing.append(&part(rank, "f64[1, 2]", n)?)?;
                places.push(whole.local().buffer.bytes());
            }
            places.dedup();
            assert_eq!(places.len(), 7, "64 parts, room for 1, 2, 4, .., 64: {places:?}");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn mismatched_parts_are_refused() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let mut growing = GrowableTensor::along(1);
            let refused = |growing: &mut GrowableTensor, layout: &str| {
                let zeros = Tensor::zeros(rank, &Layout::parse(layout, rank.mesh())?)?;
                Ok::<_, Error>(growing.append(&zeros).unwrap_err().message().to_string())
            };
            assert!(refused(&mut growing, "f64[4, 4@a]")?.starts_with("a tensor grows along dim 1"));
            assert!(refused(&mut growing, "f64[4]")?.starts_with("a tensor grows along dim 1"));
            assert!(refused(&mut growing, "f64[4, 4] +a")?.starts_with("a partial sum"));
            growing.append(&part(rank, "f64[4@a, 1]", 0)?)?;
            let message = refused(&mut growing, "f64[4, 1]")?;
            assert_eq!(message, "the part is f64[4, 1], but the tensor grows as f64[4@a, 1]");
            assert_eq!(growing.append(&part(rank, "f64[4@a, 2]", 0)?)?.layout().to_string(), "f64[4@a, 3]");
            Ok(())
        })
        .unwrap();
    }
}
