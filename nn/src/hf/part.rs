//! A part of a tensor, read from its file: what one rank holds of it.

use super::disk::{refuse, zeros};
use super::files::TensorFile;
use shardgrad_tensor::Result;
use std::ops::Range;

/// At most so many bytes are read at once to pick out of them what is wanted.
const SPAN_BYTES_MAX: usize = 1 << 20;

impl TensorFile {
    /// The bytes of the elements of a tensor whose index in each dim lies in a range, row major. `shape` are the dims that
    /// are counted: those of the file, or others with as many elements in all. Little more is read than is wanted: nothing
    /// before the first element or behind the last, and where elements lie apart, the gaps between them of at most 1 MiB. A part
    /// that is the whole tensor is compared with its checksum, as [`TensorFile::verify`] does.
    ///
    /// # Errors
    /// As [`TensorFile::read`]; `Kind::Checkpoint` for a shape of another number of elements.
    ///
    /// # Panics
    /// If a range leaves its dim, or there is not one a dim: those are layouts, made by us.
    pub fn read_part(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>> {
        let tensor = self.find(name)?;
        assert!(
            shape.len() == ranges.len() && shape.iter().zip(ranges).all(|(n, r)| r.end <= *n),
            "bug in shardgrad: no part of {shape:?}: {ranges:?}"
        );
        if shape.iter().product::<usize>() != tensor.shape.iter().product::<usize>() {
            let found = &tensor.shape;
            return Err(refuse(
                self.path(),
                format_args!("tensor `{name}` is {found:?}, which is no {shape:?}"),
            ));
        }
        let size = tensor.dtype.size();
        let numel: usize = ranges.iter().map(Range::len).product();
        let mut out = zeros(self.path(), (numel * size) as u64)?;
        if numel > 0 {
            self.fill(name, Part { shape, ranges, size }, 0, &mut out)?;
        }
        if out.len() as u64 == tensor.bytes.end - tensor.bytes.start {
            self.verify_bytes(name, &out)?;
        }
        Ok(out)
    }

    /// Fills `out` with a part of the tensor, or of a slice of it that begins at byte `start`.
    fn fill(&self, name: &str, part: Part<'_>, start: usize, out: &mut [u8]) -> Result<()> {
        let (first, span) = part.span();
        if span == out.len() {
            return self.read_at(name, (start + first) as u64, out);
        }
        if span <= SPAN_BYTES_MAX {
            let mut bytes = zeros(self.path(), span as u64)?;
            self.read_at(name, (start + first) as u64, &mut bytes)?;
            part.pick(&bytes, out);
            return Ok(());
        }
        let (below, step) = (part.below(), part.step());
        for (i, out) in part.ranges[0].clone().zip(out.chunks_exact_mut(below.bytes())) {
            self.fill(name, below, start + i * step, out)?;
        }
        Ok(())
    }
}

/// A box of elements.
#[derive(Clone, Copy)]
struct Part<'a> {
    shape: &'a [usize],
    ranges: &'a [Range<usize>],
    /// Bytes of an element.
    size: usize,
}

impl Part<'_> {
    /// The part of one index of the first dim.
    fn below(&self) -> Part<'_> {
        Part { shape: &self.shape[1..], ranges: &self.ranges[1..], size: self.size }
    }

    /// Bytes from one index of the first dim to the next.
    fn step(&self) -> usize {
        self.shape[1..].iter().product::<usize>() * self.size
    }

    fn bytes(&self) -> usize {
        self.ranges.iter().map(Range::len).product::<usize>() * self.size
    }

    /// Where the first byte lies, and how many there are up to the last.
    fn span(&self) -> (usize, usize) {
        let (mut first, mut last, mut step) = (0, 0, self.size);
        for (extent, range) in self.shape.iter().zip(self.ranges).rev() {
            first += range.start * step;
            last += (range.end - 1) * step;
            step *= extent;
        }
        (first, last + self.size - first)
    }

    /// Picks the elements out of the bytes of the span.
    fn pick(&self, span: &[u8], out: &mut [u8]) {
        if span.len() == out.len() {
            return out.copy_from_slice(span);
        }
        let (below, step) = (self.below(), self.step());
        let (_, length) = below.span();
        for (i, out) in out.chunks_exact_mut(below.bytes()).enumerate() {
            below.pick(&span[i * step..][..length], out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk::scratch::Scratch;
    use super::super::files::TensorWriter;
    use super::*;
    use shardgrad_tensor::{DType, Kind};

    /// A file with one tensor `x` whose i32-like elements count up; each has 8 bytes.
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
    fn parts_by_hand() {
        let dir = Scratch::new();
        let file = counting(&dir, &[4, 6]);
        assert_eq!(read(&file, &[4, 6], &[1..3, 0..6]), (6..18).collect::<Vec<_>>());
        assert_eq!(read(&file, &[4, 6], &[1..3, 2..4]), [8, 9, 14, 15]);
        assert_eq!(read(&file, &[4, 2, 3], &[0..4, 1..2, 0..2]), [3, 4, 9, 10, 15, 16, 21, 22]);
        assert_eq!(read(&file, &[1, 24], &[0..1, 20..24]), [20, 21, 22, 23]);
        assert_eq!(read(&file, &[4, 6], &[2..2, 0..6]), [0i64; 0]);
        let error = file.read_part("x", &[4, 5], &[0..4, 0..5]).unwrap_err();
        assert_eq!(error.kind(), Kind::Checkpoint);
        assert!(error.message().ends_with("tensor `x` is [4, 6], which is no [4, 5]"), "{error}");
    }

    #[test]
    fn parts_of_large_tensors_are_read_in_pieces() {
        let dir = Scratch::new();
        let (rows, columns) = (5, SPAN_BYTES_MAX / 8 / 2);
        let file = counting(&dir, &[rows, columns]);
        let found = read(&file, &[rows, columns], &[1..5, 7..9]);
        let exact: Vec<i64> =
            (1..5).flat_map(|r| [r * columns + 7, r * columns + 8]).map(|i| i as i64).collect();
        assert_eq!(found, exact);
    }

    #[test]
    fn what_lies_outside_of_a_part_is_not_touched() {
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
