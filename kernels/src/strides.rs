//! How the elements of a local tensor lie in its buffer: extents, strides and an offset. Pure arithmetic.

use smallvec::SmallVec;

/// A short list of extents or strides, inline up to six.
pub type Dims = SmallVec<[usize; 6]>;

/// Extents, strides and offset of a view, all counted in elements. Strides are not negative; 0 broadcasts.
#[derive(Debug, PartialEq, Eq)]
pub struct Strides {
    /// Extent per dim.
    pub shape: Dims,
    /// Distance between neighbours per dim.
    pub strides: Dims,
    /// Where element 0 lies.
    pub offset: usize,
}

impl Clone for Strides {
    fn clone(&self) -> Strides {
        // Plain numbers: one copy each instead of one push per dim.
        let [shape, strides] = [&self.shape, &self.strides].map(|dims| Dims::from_slice(dims));
        Strides { shape, strides, offset: self.offset }
    }
}

impl Strides {
    /// Row-major, no gaps, offset 0.
    #[must_use]
    pub fn contiguous(shape: &[usize]) -> Strides {
        let mut strides = Dims::from_elem(1, shape.len());
        for d in (1..shape.len()).rev() {
            strides[d - 1] = strides[d] * shape[d].max(1);
        }
        Strides { shape: Dims::from_slice(shape), strides, offset: 0 }
    }

    /// The number of dims.
    #[must_use]
    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// The number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the elements lie row-major without gaps (dims of extent 1 do not matter, nor does the offset).
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.inner_contiguous(self.ndim())
    }

    /// Whether the last `count` dims lie row-major without gaps among themselves.
    #[must_use]
    pub fn inner_contiguous(&self, count: usize) -> bool {
        let mut expected = 1;
        if self.shape.contains(&0) {
            return true;
        }
        for d in (self.ndim() - count..self.ndim()).rev() {
            if self.shape[d] != 1 && self.strides[d] != expected {
                return false;
            }
            expected *= self.shape[d];
        }
        true
    }

    /// The view with dims in another order: dim i of the result is dim `order[i]` of this one.
    #[must_use]
    pub fn permute(&self, order: &[usize]) -> Strides {
        Strides {
            shape: order.iter().map(|&d| self.shape[d]).collect(),
            strides: order.iter().map(|&d| self.strides[d]).collect(),
            offset: self.offset,
        }
    }

    /// The view of `start..end` along a dim.
    #[must_use]
    pub fn narrow(&self, dim: usize, start: usize, end: usize) -> Strides {
        debug_assert!(start <= end && end <= self.shape[dim], "a narrowed range lies inside its dim");
        let mut view = self.clone();
        view.shape[dim] = end - start;
        if start < end {
            view.offset += start * self.strides[dim];
        }
        view
    }

    /// The view of one index along a dim, which disappears.
    #[must_use]
    pub fn select(&self, dim: usize, index: usize) -> Strides {
        let mut view = self.narrow(dim, index, index + 1);
        view.shape.remove(dim);
        view.strides.remove(dim);
        view
    }

    /// The view with a dim of extent 1 put in before `dim`.
    #[must_use]
    pub fn unsqueeze(&self, dim: usize) -> Strides {
        let mut view = self.clone();
        view.shape.insert(dim, 1);
        view.strides.insert(dim, 0);
        view
    }

    /// The view repeated to a longer shape, aligned at the last dim; `None` if an extent is neither equal nor 1.
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
        Some(Strides { shape: shape.into(), strides, offset: self.offset })
    }

    /// The view under another shape of equal numel; `None` if that needs a copy.
    #[must_use]
    pub fn reshape(&self, shape: &[usize]) -> Option<Strides> {
        debug_assert_eq!(
            self.numel(),
            shape.iter().product::<usize>(),
            "a reshape keeps the number of elements"
        );
        if self.is_contiguous() {
            return Some(Strides { offset: self.offset, ..Strides::contiguous(shape) });
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
        Some(Strides { shape: shape.into(), strides, offset: self.offset })
    }

    /// The number of elements, of which those that are repeated along a dim count once.
    #[must_use]
    pub fn num_places(&self) -> usize {
        let dims = self.shape.iter().zip(&self.strides);
        dims.map(|(&extent, &step)| if step == 0 { extent.min(1) } else { extent }).product()
    }

    /// One past the furthest element that the view reaches (0 if it is empty).
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
    fn views_by_hand() {
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
        assert_eq!((repeated.numel(), repeated.num_places()), (120, 24));
        assert_eq!(Strides::contiguous(&[3]).broadcast(&[0, 3]).unwrap().num_places(), 0);
        let far = Strides { strides: [1 << 63, 1, 1][..].into(), ..Strides::contiguous(&[3, 1, 1]) };
        assert_eq!(far.reach(), usize::MAX, "what does not fit does not wrap");
    }

    #[test]
    fn a_reshape_of_a_view_copies_only_when_it_must() {
        let s = Strides::contiguous(&[2, 3, 4]);
        assert_eq!(s.narrow(2, 0, 2).reshape(&[6, 2]).unwrap().strides[..], [4, 1]);
        assert!(s.narrow(1, 0, 2).reshape(&[4, 4]).is_none());
        assert_eq!(s.permute(&[1, 0, 2]).reshape(&[3, 2, 2, 2]).unwrap().strides[..], [4, 12, 2, 1]);
        assert!(s.permute(&[1, 0, 2]).reshape(&[6, 4]).is_none());
    }

    #[test]
    fn emptiness_is_contiguous() {
        assert!(Strides::contiguous(&[0, 3]).permute(&[1, 0]).is_contiguous());
        assert_eq!(Strides::contiguous(&[3, 0]).reach(), 0);
    }
}
