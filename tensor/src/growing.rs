//! A tensor that grows along one dim, in memory that is taken ahead: what a cache is made of.

use crate::dim::Dim;
use crate::layout::Layout;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use smallvec::SmallVec;

/// Parts put one after another along a dim that no axis splits. Other dims may be split: each rank keeps its own pieces.
///
/// Room is taken for twice as much whenever it is used up, so that n appended elements cost about n copies in all.
#[derive(Debug)]
pub struct Growing {
    dim: usize,
    len: usize,
    /// Room for more than `len` elements of the dim; those behind are arbitrary.
    room: Option<Tensor>,
}

impl Growing {
    /// Nothing yet, to grow along dim `dim`.
    #[must_use]
    pub fn along(dim: usize) -> Growing {
        Growing { dim, len: 0, room: None }
    }

    /// How many elements of the dim there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was appended yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Everything so far with `part` behind it: a view of this memory. As long as somebody holds one, the next part costs a
    /// copy of all. Where memory runs out nothing is kept.
    ///
    /// # Errors
    /// `Kind::Layout` if the dim is split, a sum is pending, or the part lies otherwise than those before it;
    /// `Kind::OutOfMemory`.
    pub fn append(&mut self, part: &Tensor) -> Result<Tensor> {
        let layout = part.layout();
        let (before, after) = (self.len, self.len + layout.shape().get(self.dim).copied().unwrap_or(0));
        if self.dim >= layout.ndim() || layout.dims()[self.dim].axes.iter().next().is_some() {
            let text = format!(
                "a tensor grows along dim {}, which must be there and whole; the part is {layout}",
                self.dim
            );
            return Err(Error::new(Kind::Layout, text));
        }
        if !layout.partial().is_empty() {
            return Err(Error::new(Kind::Layout, format!("a pending sum cannot be kept: {layout}")));
        }
        if let Some(room) = &self.room
            && *room.layout() != self.resized(layout, room.layout().extent(self.dim))
        {
            let text = format!("a part that is {layout} for a tensor that grows as {}", room.layout());
            return Err(Error::new(Kind::Layout, text));
        }
        let (rank, dim) = (part.rank(), self.dim);
        self.len = 0;
        let room = match self.room.take() {
            Some(room) if room.layout().extent(dim) >= after => room,
            smaller => self.larger(rank, layout, [before, after], smaller)?,
        };
        let room = room.update(|piece| {
            piece.lineage = piece.lineage.join(part.piece().lineage);
            piece.write(rank, piece.view.narrow(dim, before, after), part.piece())
        })?;
        self.len = after;
        let filled = room.piece().viewed(room.piece().view.narrow(dim, 0, after));
        let whole = Tensor::assemble(rank, self.resized(layout, after), filled);
        self.room = Some(room);
        Ok(whole)
    }

    /// Takes the first `count` elements of the dim away. The others are copied to memory of their own, with room for as many
    /// again. Where memory runs out nothing is kept.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn forget(&mut self, count: usize) -> Result<()> {
        assert!(count <= self.len, "bug in shardgrad: {count} of {} elements to forget", self.len);
        let (kept, dim) = (self.len - count, self.dim);
        if count == 0 {
            return Ok(());
        }
        self.len = 0;
        let Some(room) = self.room.take() else { return Ok(()) };
        let extent = room.layout().extent(dim).min((2 * kept).next_power_of_two());
        let rank = room.rank();
        let fresh = Tensor::zeros(rank, &self.resized(room.layout(), extent))?;
        let old = room.piece().viewed(room.piece().view.narrow(dim, count, count + kept));
        self.room = Some(fresh.update(|piece| piece.write(rank, piece.view.narrow(dim, 0, kept), &old))?);
        self.len = kept;
        Ok(())
    }

    fn resized(&self, layout: &Layout, extent: usize) -> Layout {
        let mut dims: SmallVec<[Dim; 6]> = SmallVec::from_slice(layout.dims());
        dims[self.dim].extent = extent;
        layout.with_dims(dims)
    }

    /// Room for at least `len` elements, which begins with the `kept` ones of a smaller room.
    fn larger(
        &self,
        rank: &Rank,
        layout: &Layout,
        [kept, len]: [usize; 2],
        smaller: Option<Tensor>,
    ) -> Result<Tensor> {
        let larger = Tensor::zeros(rank, &self.resized(layout, len.next_power_of_two()))?;
        let Some(smaller) = smaller else { return Ok(larger) };
        let dim = self.dim;
        let old = smaller.piece().viewed(smaller.piece().view.narrow(dim, 0, kept));
        larger.update(|piece| piece.write(rank, piece.view.narrow(dim, 0, kept), &old))
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
    fn parts_lie_one_after_another_on_every_rank() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let mut growing = Growing::along(1);
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
                    "the second row's last part"
                );
            }
            assert_eq!(first.to_f64()?[9], 9.0, "a view that somebody holds stays as it was");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn what_is_forgotten_is_the_beginning() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let mut growing = Growing::along(1);
            growing.forget(0)?;
            let all = growing.append(&part(rank, "f64[2, 9, 3@a]", 0)?)?.to_f64()?;
            for (count, kept) in [(2, 7), (0, 7), (5, 2)] {
                growing.forget(count)?;
                assert_eq!(growing.len(), kept);
            }
            let whole = growing.append(&part(rank, "f64[2, 1, 3@a]", 100)?)?;
            assert_eq!(whole.layout().to_string(), "f64[2, 3, 3@a]");
            let values = whole.to_f64()?;
            assert_eq!(values[..6], all[21..27]);
            assert_eq!(values[6..9], [100.0, 101.0, 102.0]);
            assert_eq!(values[9..15], all[48..]);
            growing.forget(3)?;
            assert!(growing.is_empty());
            growing.append(&part(rank, "f64[2, 2, 3@a]", 7)?)?;
            assert_eq!(growing.len(), 2);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn memory_is_taken_ahead_and_written_in_place() {
        World::run(Mesh::single(), |rank| {
            let mut growing = Growing::along(0);
            let mut places = Vec::new();
            for n in 0..64 {
                let whole = growing.append(&part(rank, "f64[1, 2]", n)?)?;
                places.push(whole.piece().buffer.bytes());
            }
            places.dedup();
            assert_eq!(places.len(), 7, "64 parts, room for 1, 2, 4, .., 64: {places:?}");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let mut growing = Growing::along(1);
            let refused = |growing: &mut Growing, layout: &str| {
                let zeros = Tensor::zeros(rank, &Layout::parse(layout, rank.mesh())?)?;
                Ok::<_, Error>(growing.append(&zeros).unwrap_err().message().to_string())
            };
            assert!(refused(&mut growing, "f64[4, 4@a]")?.starts_with("a tensor grows along dim 1"));
            assert!(refused(&mut growing, "f64[4]")?.starts_with("a tensor grows along dim 1"));
            assert!(refused(&mut growing, "f64[4, 4] +a")?.starts_with("a pending sum"));
            growing.append(&part(rank, "f64[4@a, 1]", 0)?)?;
            let told = refused(&mut growing, "f64[4, 1]")?;
            assert_eq!(told, "a part that is f64[4, 1] for a tensor that grows as f64[4@a, 1]");
            assert_eq!(growing.append(&part(rank, "f64[4@a, 2]", 0)?)?.layout().to_string(), "f64[4@a, 3]");
            Ok(())
        })
        .unwrap();
    }
}
