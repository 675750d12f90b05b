//! Strided views: how the elements of a local tensor are laid out in its buffer. Pure arithmetic.

use smallvec::SmallVec;
use std::ops::Deref;

/// A short list of extents or strides, inline up to six.
pub type Dims = SmallVec<[usize; 6]>;

/// Extents, strides and offset of a view, in elements. Strides are not negative; 0 broadcasts.
#[derive(Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Extent per dim.
    pub shape: Dims,
    /// Distance between neighbours along each dim.
    pub strides: Dims,
    /// Position of element 0 in the buffer.
    pub offset: usize,
}

/// An immutable view: a [`Geometry`] with the properties that every launch needs, computed once.
#[derive(Debug, PartialEq, Eq)]
pub struct Strides {
    geometry: Geometry,
    numel: usize,
    num_distinct: usize,
    is_contiguous: bool,
}

impl Geometry {
    /// Returns whether the last `count` dims are row-major without gaps.
    #[must_use]
    pub fn inner_contiguous(&self, count: usize) -> bool {
        let (mut expected, ndim) = (1usize, self.shape.len());
        if self.shape.contains(&0) {
            return true;
        }
        for d in (ndim - count..ndim).rev() {
            if self.shape[d] != 1 && self.strides[d] != expected {
                return false;
            }
            expected = expected.saturating_mul(self.shape[d]);
        }
        true
    }
}

impl Deref for Strides {
    type Target = Geometry;
    fn deref(&self) -> &Geometry {
        &self.geometry
    }
}

impl From<Geometry> for Strides {
    fn from(geometry: Geometry) -> Strides {
        Strides::new(geometry.shape, geometry.strides, geometry.offset)
    }
}

impl Clone for Strides {
    fn clone(&self) -> Strides {
        // Plain numbers: one copy each instead of one push per dim.
        let [shape, strides] = [&self.shape, &self.strides].map(|dims| Dims::from_slice(dims));
        Strides { geometry: Geometry { shape, strides, offset: self.offset }, ..*self }
    }
}

impl Strides {
    /// Creates a view of these extents and strides.
    #[must_use]
    pub fn new(shape: Dims, strides: Dims, offset: usize) -> Strides {
        debug_assert_eq!(shape.len(), strides.len(), "each dim has an extent and a stride");
        let geometry = Geometry { shape, strides, offset };
        let places = |(&extent, &step): (&usize, &usize)| if step == 0 { extent.min(1) } else { extent };
        let product = |n: usize, extent| n.saturating_mul(extent);
        Strides {
            numel: geometry.shape.iter().copied().fold(1, product),
            num_distinct: geometry.shape.iter().zip(&geometry.strides).map(places).fold(1, product),
            is_contiguous: geometry.inner_contiguous(geometry.shape.len()),
            geometry,
        }
    }

    /// Creates the row-major view of a shape: no gaps, offset 0.
    #[must_use]
    pub fn contiguous(shape: &[usize]) -> Strides {
        let mut strides = Dims::from_elem(1, shape.len());
        for d in (1..shape.len()).rev() {
            strides[d - 1] = strides[d] * shape[d].max(1);
        }
        Strides::new(Dims::from_slice(shape), strides, 0)
    }

    /// Returns the view with another offset.
    #[must_use]
    pub fn at(mut self, offset: usize) -> Strides {
        self.geometry.offset = offset;
        self
    }

    /// Returns the geometry, to derive another view.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.clone().geometry
    }

    /// Returns the number of dims.
    #[must_use]
    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Returns whether the elements are row-major without gaps (dims of extent 1 and the offset do not matter).
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.is_contiguous
    }

    /// Returns whether another view has the same shape.
    #[must_use]
    pub fn is_shaped_as(&self, other: &Strides) -> bool {
        // Element by element: dims are few, and a call to memcmp is expensive.
        self.numel == other.numel && self.shape.iter().eq(&other.shape)
    }

    /// Returns the view with dims reordered: dim i of the result is dim `order[i]` of this view.
    #[must_use]
    pub fn permute(&self, order: &[usize]) -> Strides {
        let permuted = |dims: &Dims| order.iter().map(|&d| dims[d]).collect();
        Strides::new(permuted(&self.shape), permuted(&self.strides), self.offset)
    }

    /// Returns the view of `start..end` along a dim.
    #[must_use]
    pub fn narrow(&self, dim: usize, start: usize, end: usize) -> Strides {
        debug_assert!(start <= end && end <= self.shape[dim], "a narrowed range must be within its dim");
        let mut geometry = self.geometry();
        geometry.shape[dim] = end - start;
        if start < end {
            geometry.offset += start * self.strides[dim];
        }
        geometry.into()
    }

    /// Returns the view of one index along a dim, without that dim.
    #[must_use]
    pub fn select(&self, dim: usize, index: usize) -> Strides {
        let mut geometry = self.narrow(dim, index, index + 1).geometry;
        geometry.shape.remove(dim);
        geometry.strides.remove(dim);
        geometry.into()
    }

    /// Returns the view with a new dim of extent 1 before `dim`.
    #[must_use]
    pub fn unsqueeze(&self, dim: usize) -> Strides {
        let mut geometry = self.geometry();
        geometry.shape.insert(dim, 1);
        geometry.strides.insert(dim, 0);
        geometry.into()
    }

    /// Returns the view broadcast to a shape, aligned at the last dim; `None` if an extent is neither equal nor 1.
    #[must_use]
    pub fn broadcast(&self, shape: &[usize]) -> Option<Strides> {
        let lead = shape.len().checked_sub(self.ndim())?;
        let mut strides = Dims::from_elem(0, shape.len());
        for d in 0..self.ndim() {
            if self.shape[d] == shape[lead + d] {
                strides[lead + d] = self.strides[d];
            } else if self.shape[d] != 1 {
                return None;
            }
        }
        Some(Strides::new(shape.into(), strides, self.offset))
    }

    /// Returns the view under another shape of equal numel; `None` if that needs a copy.
    #[must_use]
    pub fn reshape(&self, shape: &[usize]) -> Option<Strides> {
        debug_assert_eq!(
            self.numel(),
            shape.iter().product::<usize>(),
            "a reshape keeps the number of elements"
        );
        if self.is_contiguous() {
            return Some(Strides::contiguous(shape).at(self.offset));
        }
        let old: Vec<(usize, usize)> =
            self.shape.iter().copied().zip(self.strides.iter().copied()).filter(|&(n, _)| n != 1).collect();
        let mut strides = Dims::from_elem(0, shape.len());
        let (mut i, mut j) = (0, 0);
        while j < shape.len() {
            if shape[j] == 1 {
                j += 1;
                continue;
            }
            let (mut from, mut to, first) = (old.get(i)?.0, shape[j], j);
            let run = i;
            while from != to {
                if from < to {
                    i += 1;
                    from *= old.get(i)?.0;
                } else {
                    j += 1;
                    to *= *shape.get(j)?;
                }
            }
            if (run..i).any(|d| old[d].1 != old[d + 1].1 * old[d + 1].0) {
                return None;
            }
            let mut step = old[i].1;
            for d in (first..=j).rev() {
                strides[d] = step;
                step *= shape[d];
            }
            i += 1;
            j += 1;
        }
        Some(Strides::new(shape.into(), strides, self.offset))
    }

    /// Returns the number of elements in memory: elements repeated along a dim (stride 0) count once.
    #[must_use]
    pub fn num_distinct(&self) -> usize {
        self.num_distinct
    }

    /// Returns one past the furthest element of the buffer that the view reaches (0 if it is empty).
    #[must_use]
    pub fn reach(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let dims = self.shape.iter().zip(&self.strides);
        dims.fold(self.offset.saturating_add(1), |reach, (n, step)| {
            reach.saturating_add((n - 1).saturating_mul(*step))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_match_known_values() {
        let s = Strides::contiguous(&[2, 3, 4]);
        assert_eq!(s.strides[..], [12, 4, 1]);
        let p = s.permute(&[2, 0, 1]);
        assert_eq!((p.shape.to_vec(), p.strides.to_vec()), (vec![4, 2, 3], vec![1, 12, 4]));
        assert!(!p.is_contiguous());
        let n = s.narrow(1, 1, 3);
        assert_eq!((n.shape.to_vec(), n.offset, n.reach()), (vec![2, 2, 4], 4, 24));
        assert_eq!(s.select(1, 2).offset, 8);
        assert_eq!(s.broadcast(&[5, 2, 3, 4]).unwrap().strides[..], [0, 12, 4, 1]);
        assert!(s.broadcast(&[2, 3, 5]).is_none());
        let repeated = s.broadcast(&[5, 2, 3, 4]).unwrap();
        assert_eq!((repeated.numel(), repeated.num_distinct()), (120, 24));
        assert_eq!(Strides::contiguous(&[3]).broadcast(&[0, 3]).unwrap().num_distinct(), 0);
        let far = Strides::new([3, 1, 1][..].into(), [1 << 63, 1, 1][..].into(), 0);
        assert_eq!(far.reach(), usize::MAX, "an overflow saturates");
    }

    #[test]
    fn reshape_is_a_view_where_strides_allow_it() {
        let s = Strides::contiguous(&[2, 3, 4]);
        assert_eq!(s.narrow(2, 0, 2).reshape(&[6, 2]).unwrap().strides[..], [4, 1]);
        assert!(s.narrow(1, 0, 2).reshape(&[4, 4]).is_none());
        assert_eq!(s.permute(&[1, 0, 2]).reshape(&[3, 2, 2, 2]).unwrap().strides[..], [4, 12, 2, 1]);
        assert!(s.permute(&[1, 0, 2]).reshape(&[6, 4]).is_none());
    }

    #[test]
    fn empty_views_are_contiguous() {
        assert!(Strides::contiguous(&[0, 3]).permute(&[1, 0]).is_contiguous());
        assert_eq!(Strides::contiguous(&[3, 0]).reach(), 0);
    }
}
