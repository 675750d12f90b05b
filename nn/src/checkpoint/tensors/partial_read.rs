//! Partial reads: the part of a tensor that one rank stores, read from its file.

use super::safetensors_file::TensorFile;
use crate::checkpoint::atomic::disk::{file_error, zeroed};
use shardgrad_tensor::Result;
use std::ops::Range;

/// Largest number of bytes read at once to gather strided elements from.
const SPAN_BYTES_MAX: usize = 1 << 20;

impl TensorFile {
    /// Reads a box of a tensor: the elements whose index in each dim is in a range, row major. `shape` is the shape
    /// that the ranges refer to: that of the file, or another with as many elements. Reads few other bytes: none
    /// before the first element or after the last, and between elements gaps of at most 1 MiB. If the box is the
    /// whole tensor, compares it with its checksum, as [`TensorFile::verify`] does.
    ///
    /// # Errors
    /// As [`TensorFile::read`]; `Kind::Checkpoint` for a shape with another number of elements.
    ///
    /// # Panics
    /// If a range exceeds its dim, or the number of ranges is not that of dims: ranges come from layouts of this
    /// program.
    pub fn read_part(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>> {
        let tensor = self.find(name)?;
        assert!(
            shape.len() == ranges.len() && shape.iter().zip(ranges).all(|(n, r)| r.end <= *n),
            "bug in shardgrad: ranges {ranges:?} exceed the shape {shape:?}"
        );
        if shape.iter().product::<usize>() != tensor.shape.iter().product::<usize>() {
            let found = &tensor.shape;
            return Err(file_error(
                self.path(),
                format_args!("tensor `{name}` has shape {found:?}, which cannot be viewed as {shape:?}"),
            ));
        }
        let size = tensor.dtype.size();
        let numel: usize = ranges.iter().map(Range::len).product();
        let mut out = zeroed(self.path(), (numel * size) as u64)?;
        if numel > 0 {
            self.fill(name, TensorSlice { shape, ranges, size }, 0, &mut out)?;
        }
        if out.len() as u64 == tensor.bytes.end - tensor.bytes.start {
            self.verify_bytes(name, &out)?;
        }
        Ok(out)
    }

    /// Fills `out` with a box of the tensor, or of the slice of it that begins at byte `start`.
    fn fill(&self, name: &str, part: TensorSlice<'_>, start: usize, out: &mut [u8]) -> Result<()> {
        let (first, span) = part.span();
        if span == out.len() {
            return self.read_at(name, (start + first) as u64, out);
        }
        if span <= SPAN_BYTES_MAX {
            let mut bytes = zeroed(self.path(), span as u64)?;
            self.read_at(name, (start + first) as u64, &mut bytes)?;
            part.gather(&bytes, out);
            return Ok(());
        }
        let (first_dim_slice, step) = (part.first_dim_slice(), part.step());
        for (i, out) in part.ranges[0].clone().zip(out.chunks_exact_mut(first_dim_slice.bytes())) {
            self.fill(name, first_dim_slice, start + i * step, out)?;
        }
        Ok(())
    }
}

/// A box of elements.
#[derive(Clone, Copy)]
struct TensorSlice<'a> {
    shape: &'a [usize],
    ranges: &'a [Range<usize>],
    /// Bytes of an element.
    size: usize,
}

impl TensorSlice<'_> {
    /// Returns the box at one index of the first dim.
    fn first_dim_slice(&self) -> TensorSlice<'_> {
        TensorSlice { shape: &self.shape[1..], ranges: &self.ranges[1..], size: self.size }
    }

    /// Bytes between consecutive indices of the first dim.
    fn step(&self) -> usize {
        self.shape[1..].iter().product::<usize>() * self.size
    }

    fn bytes(&self) -> usize {
        self.ranges.iter().map(Range::len).product::<usize>() * self.size
    }

    /// Offset of the first byte of the box, and number of bytes up to its last.
    fn span(&self) -> (usize, usize) {
        let (mut first, mut last, mut step) = (0, 0, self.size);
        for (extent, range) in self.shape.iter().zip(self.ranges).rev() {
            first += range.start * step;
            last += (range.end - 1) * step;
            step *= extent;
        }
        (first, last + self.size - first)
    }

    /// Gathers the elements of the box from the bytes of its span.
    fn gather(&self, span: &[u8], out: &mut [u8]) {
        if span.len() == out.len() {
            return out.copy_from_slice(span);
        }
        let (first_dim_slice, step) = (self.first_dim_slice(), self.step());
        let (_, length) = first_dim_slice.span();
        for (i, out) in out.chunks_exact_mut(first_dim_slice.bytes()).enumerate() {
            first_dim_slice.gather(&span[i * step..][..length], out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::safetensors_file::TensorWriter;
    use super::*;
    use crate::checkpoint::atomic::disk::scratch::Scratch;
    use shardgrad_tensor::{DType, Kind};

    /// Writes a file with one tensor `x` of i64 that counts up.
    fn counting(dir: &Scratch, shape: &[usize]) -> TensorFile {
        let path = dir.path("x.safetensors");
        let mut writer = TensorWriter::create(&path, &[("x".into(), DType::I64, shape.to_vec())]).unwrap();
        let numel: i64 = shape.iter().product::<usize>() as i64;
        let bytes: Vec<u8> = (0..numel).flat_map(i64::to_le_bytes).collect();
        writer.append("x", &bytes).unwrap();
        writer.finish().unwrap();
        TensorFile::open(&path).unwrap()
    }

    fn read(file: &TensorFile, shape: &[usize], ranges: &[Range<usize>]) -> Vec<i64> {
        let bytes = file.read_part("x", shape, ranges).unwrap();
        bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
    }

    #[test]
    fn partial_reads_match_expected_elements() {
        let dir = Scratch::new();
        let file = counting(&dir, &[4, 6]);
        assert_eq!(read(&file, &[4, 6], &[1..3, 0..6]), (6..18).collect::<Vec<_>>());
        assert_eq!(read(&file, &[4, 6], &[1..3, 2..4]), [8, 9, 14, 15]);
        assert_eq!(read(&file, &[4, 2, 3], &[0..4, 1..2, 0..2]), [3, 4, 9, 10, 15, 16, 21, 22]);
        assert_eq!(read(&file, &[1, 24], &[0..1, 20..24]), [20, 21, 22, 23]);
        assert_eq!(read(&file, &[4, 6], &[2..2, 0..6]), [0i64; 0]);
        let error = file.read_part("x", &[4, 5], &[0..4, 0..5]).unwrap_err();
        assert_eq!(error.kind(), Kind::Checkpoint);
        assert!(
            error.message().ends_with("tensor `x` has shape [4, 6], which cannot be viewed as [4, 5]"),
            "{error}"
        );
    }

    #[test]
    fn partial_read_of_large_span_reads_row_by_row() {
        let dir = Scratch::new();
        let (rows, columns) = (5, SPAN_BYTES_MAX / 8 / 2);
        let file = counting(&dir, &[rows, columns]);
        let found = read(&file, &[rows, columns], &[1..5, 7..9]);
        let exact: Vec<i64> =
            (1..5).flat_map(|r| [r * columns + 7, r * columns + 8]).map(|i| i as i64).collect();
        assert_eq!(found, exact);
    }

    #[test]
    fn partial_read_does_not_touch_other_bytes() {
        let dir = Scratch::new();
        let file = counting(&dir, &[4, 6]);
        let path = dir.path("x.safetensors");
        let length = std::fs::metadata(&path).unwrap().len();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 2 * 6 * 8).unwrap();
        assert_eq!(
            read(&file, &[4, 6], &[0..2, 3..6]),
            [3, 4, 5, 9, 10, 11],
            "the second half of the file is gone"
        );
        assert_eq!(file.read_part("x", &[4, 6], &[0..3, 0..6]).unwrap_err().kind(), Kind::Checkpoint);
    }
}
