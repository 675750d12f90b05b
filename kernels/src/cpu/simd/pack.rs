//! Packing of matrix blocks into the panels that micro-kernels read: widened, with the elements of one step of k contiguous.

use crate::cpu::simd::microkernel::MicroKernels;
use crate::cpu::simd::transpose_tile::starts;
use crate::cpu::simd::{level, vectorized};
use crate::dtype::{Element, Float, Real};
use std::mem::MaybeUninit;

/// The most steps of k in a packed block (BLIS: KC).
pub(crate) const KC: usize = 256;

/// A pointer to a strided matrix to read, of any float type that widens to R. The caller vouches for the memory.
pub(crate) struct MatrixPtr<R: 'static> {
    pub(crate) start: *const u8,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
    /// Bytes per element.
    size: usize,
    /// Whether elements are of type R itself, so that micro-kernels can read them in place.
    pub(crate) direct: bool,
    /// Packs a block of the matrix.
    pack: PackFn<R>,
}

/// The shape of packed panels: `count` panels of `used` columns and `depth` rows, each row padded with zeros to `width` elements. A panel
/// begins `panel_depth` rows after the one before: more than `depth`, if other rows are packed behind these.
#[derive(Clone, Copy)]
pub(crate) struct PanelShape {
    pub(crate) depth: usize,
    pub(crate) panel_depth: usize,
    pub(crate) count: usize,
    pub(crate) used: usize,
    pub(crate) width: usize,
}

/// A packing function: to[(s * panel_depth + p) * width + j] = from(p, s * used + j) for j below `used`, else 0.
type PackFn<R> = unsafe fn(&MicroKernels<R>, MatrixPtr<R>, PanelShape, *mut R);

impl<R> Clone for MatrixPtr<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for MatrixPtr<R> {}

// SAFETY: the pointer is to floats, and tasks on several threads only read through it.
unsafe impl<R> Sync for MatrixPtr<R> {}

impl<R: Real> MatrixPtr<R> {
    pub(crate) fn new<T: Float<Acc = R>>(data: &[T], row_stride: usize, col_stride: usize) -> MatrixPtr<R> {
        let direct = T::DTYPE == R::DTYPE;
        MatrixPtr {
            start: data.as_ptr().cast(),
            row_stride,
            col_stride,
            size: size_of::<T>(),
            direct,
            pack: pack::<T>,
        }
    }

    pub(crate) fn transposed(self) -> Self {
        MatrixPtr { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Returns the matrix with the origin moved by `distance` elements.
    pub(crate) fn offset_by(self, distance: usize) -> Self {
        MatrixPtr { start: self.start.wrapping_add(distance * self.size), ..self }
    }

    /// Returns the submatrix from element (i, j) on.
    pub(crate) fn submatrix(self, i: usize, j: usize) -> Self {
        self.offset_by(i * self.row_stride + j * self.col_stride)
    }

    /// Packs `cols` columns of `depth` steps into panels two vectors wide (one vector, if the last panel holds no more).
    ///
    /// # Safety
    /// The columns are within the memory, and `to` has room for their panels.
    pub(crate) unsafe fn pack_columns(
        self,
        kernels: &MicroKernels<R>,
        [depth, cols]: [usize; 2],
        to: *mut R,
    ) {
        // SAFETY: as promised by the caller.
        unsafe { self.pack_steps_of_columns(kernels, [depth, cols], (0, depth), to) }
    }

    /// [`MatrixPtr::pack_columns`] for some steps of panels of `panel_depth` steps, from step `first` of the panels on.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn pack_steps_of_columns(
        self,
        kernels: &MicroKernels<R>,
        [depth, cols]: [usize; 2],
        (first, panel_depth): (usize, usize),
        to: *mut R,
    ) {
        let wide = 2 * kernels.lanes;
        let (count, rest) = (cols / wide, cols % wide);
        let width = rest.next_multiple_of(kernels.lanes);
        let whole = PanelShape { depth, panel_depth, count, used: wide, width: wide };
        let last = PanelShape { depth, panel_depth, count: rest.min(1), used: rest, width };
        let to_last = to.wrapping_add(count * wide * panel_depth + first * width);
        // SAFETY: as promised by the caller.
        unsafe {
            self.pack(kernels, whole, to.wrapping_add(first * wide));
            self.submatrix(0, count * wide).pack(kernels, last, to_last);
        }
    }

    /// See [`PackFn`].
    ///
    /// # Safety
    /// The panels are within the memory, and `to` has room for them.
    pub(crate) unsafe fn pack(self, kernels: &MicroKernels<R>, panels: PanelShape, to: *mut R) {
        if panels.count > 0 {
            // SAFETY: as promised by the caller; `pack` is that of the type of the elements.
            unsafe { (self.pack)(kernels, self, panels, to) }
        }
    }
}

/// Packs contiguous rows of `depth` elements, transposed, into panels of `width` rows: to[(s * depth + p) * width + j] = rows[(s * width +
/// j) * depth + p], for as many panels as `to` has room for.
///
/// # Panics
/// If `to` does not hold a whole number of panels, there are fewer rows, or rows of 16-bit elements are longer than [`KC`].
pub(crate) fn pack_row_panels<T: Float>(rows: &[T], depth: usize, width: usize, to: &mut [T::Acc]) {
    let count = to.len() / (depth * width);
    assert!(to.len() == count * depth * width && to.len() <= rows.len(), "rows for whole panels");
    let panels = PanelShape { depth, panel_depth: depth, count, used: width, width };
    // SAFETY: the assertion covers both memories, and the level is that of this CPU.
    unsafe { MatrixPtr::new(rows, 1, depth).pack(&MicroKernels::for_level(level()), panels, to.as_mut_ptr()) }
}

/// See [`PackFn`].
///
/// # Safety
/// `from` is of type T; the panels are within its memory, and `to` has room for them.
unsafe fn pack<T: Float>(
    kernels: &MicroKernels<T::Acc>,
    from: MatrixPtr<T::Acc>,
    panels: PanelShape,
    to: *mut T::Acc,
) {
    let PanelShape { depth, panel_depth, count, used, width } = panels;
    let start = from.start.cast::<T>();
    let block = kernels.transpose.0;
    // SAFETY: p is below `depth` and j below `used` or, where only `to` is touched, below `width`.
    unsafe {
        if from.row_stride == 1 && from.col_stride != 1 && depth >= block && used >= block {
            for s in 0..count {
                for j in starts(used, block) {
                    let from = (start.add((s * used + j) * from.col_stride), from.col_stride);
                    transpose_rows(kernels, from, depth, (to.add(s * panel_depth * width + j), width));
                }
            }
        } else if from.col_stride == 1 && used == width {
            copy_panels((start, from.row_stride), panels, to);
        } else {
            for (s, p) in (0..count).flat_map(|s| (0..depth).map(move |p| (s, p))) {
                for j in 0..used {
                    let x = *start.add(p * from.row_stride + (s * used + j) * from.col_stride);
                    *to.add((s * panel_depth + p) * width + j) = x.widen();
                }
            }
        }
        for (s, p) in (0..if used < width { count } else { 0 }).flat_map(|s| (0..depth).map(move |p| (s, p)))
        {
            for j in used..width {
                *to.add((s * panel_depth + p) * width + j) = T::Acc::ZERO;
            }
        }
    }
}

/// Transposes a tile's worth of rows of `depth` elements, widening 16-bit elements first.
///
/// # Safety
/// The rows, and as many columns of `to`, are within their memory.
unsafe fn transpose_rows<T: Float>(
    kernels: &MicroKernels<T::Acc>,
    (from, from_step): (*const T, usize),
    depth: usize,
    to: (*mut T::Acc, usize),
) {
    let (block, transpose) = kernels.transpose;
    let mut wide = [MaybeUninit::<T::Acc>::uninit(); 8 * KC];
    let from = if T::DTYPE == <T::Acc as Element>::DTYPE {
        (from.cast::<T::Acc>(), from_step)
    } else {
        assert!(depth <= KC && block <= 8, "a block of rows fits the scratch");
        vectorized(
            #[inline(always)]
            || {
                for (i, row) in wide.chunks_exact_mut(KC).take(block).enumerate() {
                    for (p, to) in row[..depth].iter_mut().enumerate() {
                        // SAFETY: as promised by the caller.
                        to.write(unsafe { *from.add(i * from_step + p) }.widen());
                    }
                }
            },
        );
        (wide.as_ptr().cast::<T::Acc>(), KC)
    };
    // SAFETY: as promised by the caller; of `wide`, what was just written is read.
    unsafe { transpose(depth, from, to) };
}

/// Copies panels whose rows are contiguous, row after row of the source, so that the source is read in long runs.
///
/// # Safety
/// As for [`pack`].
unsafe fn copy_panels<T: Float>(from: (*const T, usize), panels: PanelShape, to: *mut T::Acc) {
    macro_rules! by_width {
        ($($width:literal)*) => {
            match panels.width {
                // SAFETY: as promised by the caller.
                $($width => unsafe { copy_rows::<T, $width>(from, panels, to) },)*
                width => unreachable!("no tile is {width} wide"),
            }
        };
    }
    by_width!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 16 32);
}

/// [`copy_panels`] for rows of N elements.
///
/// # Safety
/// As for [`pack`].
unsafe fn copy_rows<T: Float, const N: usize>(
    (from, from_step): (*const T, usize),
    PanelShape { depth, panel_depth, count, .. }: PanelShape,
    to: *mut T::Acc,
) {
    vectorized(
        #[inline(always)]
        move || {
            for p in 0..depth {
                let (from, to) = (from.wrapping_add(p * from_step), to.wrapping_add(p * N));
                for s in 0..count {
                    // SAFETY: the caller guarantees N contiguous elements.
                    let row = unsafe { *from.wrapping_add(s * N).cast::<[T; N]>() };
                    let to = to.wrapping_add(s * panel_depth * N);
                    for (j, x) in row.into_iter().enumerate() {
                        // SAFETY: the caller guarantees the room.
                        unsafe { *to.wrapping_add(j) = x.widen() };
                    }
                }
            }
        },
    );
}
