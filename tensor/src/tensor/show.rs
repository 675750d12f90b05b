//! A tensor as text: shape, layout, and the values at the edges of its dims.

use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::tensor::Tensor;
use crate::tensor::redistribute::all_reduce;
use shardgrad_dist::{ReduceOp, Result};
use shardgrad_kernels::DType;
use std::fmt::Write as _;
use std::ops::Range;
use std::panic::Location;

/// Indices shown at each end of a dim. A dim of at most twice as many is shown whole.
const EDGE: usize = 3;

impl Tensor {
    /// Returns the tensor as text: layout, mesh, and the values, of each dim the first three and the last three.
    ///
    /// A collective call: every rank calls it together and gets the same text. It communicates the shown values only, in f64; partial
    /// sums are reduced.
    ///
    /// ```text
    /// f32[100, 8@tp] on mesh(tp=2)
    /// [[ 0.0000,  0.1000,  0.2000, ...,  0.5000,  0.6000,  0.7000],
    ///  ...
    /// ```
    ///
    /// # Errors
    /// `Kind::Unsupported` for a tensor without values (on the null back end, or while a program is recorded); errors of the
    /// collective.
    #[doc(alias = "print")]
    #[doc(alias = "repr")]
    #[doc(alias = "visualize_array_sharding")]
    #[track_caller]
    pub fn show(&self) -> Result<String> {
        let site = Location::caller();
        self.check_readable(site)?;
        let layout = self.layout();
        let mut text = format!("{layout} on {}\n", layout.mesh());
        write_dims(&mut text, &mut Cells::new(self.dtype(), &self.edge_values(site)?), layout.extents(), 0);
        Ok(text)
    }

    /// The values at the edges of all dims, row-major, equal on every rank.
    fn edge_values(&self, site: &'static Location<'static>) -> Result<Vec<f64>> {
        let (layout, rank) = (self.layout(), self.rank());
        let mut values = vec![0.0; layout.extents().iter().map(|&n| n.min(2 * EDGE)).product()];
        let ranges: Vec<_> = (0..layout.ndim()).map(|d| edges_of(layout, d, rank.coordinates())).collect();
        self.read_edges(&ranges, self.local().clone(), 0, &mut values)?;
        let own = LocalTensor::upload(rank, &[values.len()], &values)?;
        let own = LocalTensor { lineage: self.local().lineage, ..own };
        let axes = layout.sharded_axes().union(layout.partial());
        let sums = all_reduce(rank, own, axes, ReduceOp::Sum, site)?;
        sums.to_f64(rank)
    }

    /// Copies the local elements in the ranges of the remaining dims to their places among the values.
    fn read_edges(
        &self,
        ranges: &[Vec<Edge>],
        local: LocalTensor,
        place: usize,
        values: &mut [f64],
    ) -> Result<()> {
        let d = self.layout().ndim() - ranges.len();
        let Some((edges, rest)) = ranges.split_first() else {
            if let [value] = local.to_f64(self.rank())?[..] {
                values[place] = value;
            }
            return Ok(());
        };
        let shown = self.layout().extent(d).min(2 * EDGE);
        for Edge { local: range, shown: first } in edges {
            for (i, at) in range.clone().enumerate() {
                let row = local.with_view(local.view.narrow(d, at, at + 1));
                self.read_edges(rest, row, place * shown + first + i, values)?;
            }
        }
        Ok(())
    }
}

/// Local indices at one end of a dim, and the place of the first among the shown ones.
#[derive(Clone, Debug, PartialEq)]
struct Edge {
    local: Range<usize>,
    shown: usize,
}

/// The indices of this rank among those shown of a dim.
fn edges_of(layout: &Layout, d: usize, coordinates: &[usize]) -> Vec<Edge> {
    let (extent, own) = (layout.extent(d), layout.range(d, coordinates));
    let hidden = EDGE.min(extent)..extent.saturating_sub(EDGE).max(EDGE.min(extent));
    let shown = [(0..hidden.start, 0), (hidden.end..extent, hidden.start)];
    let part = |(range, place): (Range<usize>, usize)| {
        let (start, end) = (range.start.max(own.start), range.end.min(own.end));
        (start < end)
            .then(|| Edge { local: start - own.start..end - own.start, shown: place + start - range.start })
    };
    shown.into_iter().filter_map(part).collect()
}

/// The shown values as texts of one width, in order.
struct Cells {
    texts: std::vec::IntoIter<String>,
}

impl Cells {
    fn new(dtype: DType, values: &[f64]) -> Cells {
        let is_plain = |x: &f64| *x == 0.0 || !x.is_finite() || (1e-3..1e5).contains(&x.abs());
        let all_plain = values.iter().all(is_plain);
        let text = |x: &f64| match dtype {
            DType::Bool => (*x != 0.0).to_string(),
            DType::I64 | DType::U8 => format!("{x}"),
            _ if !x.is_finite() || all_plain => format!("{x:.4}"),
            _ => format!("{x:.4e}"),
        };
        let texts: Vec<String> = values.iter().map(text).collect();
        let width = texts.iter().map(String::len).max().unwrap_or(0);
        let padded: Vec<String> = texts.iter().map(|text| format!("{text:>width$}")).collect();
        Cells { texts: padded.into_iter() }
    }
}

/// Writes the values of the dims `extents` in brackets; `depth` counts the brackets around them.
fn write_dims(text: &mut String, cells: &mut Cells, extents: &[usize], depth: usize) {
    let Some((&extent, rest)) = extents.split_first() else {
        return text.push_str(&cells.texts.next().unwrap_or_default());
    };
    let separator = match rest.len() {
        0 => ", ".to_string(),
        inner => format!(",{}{}", "\n".repeat(inner), " ".repeat(depth + 1)),
    };
    text.push('[');
    for i in 0..extent.min(2 * EDGE) {
        if i > 0 {
            text.push_str(&separator);
        }
        if i == EDGE && extent > 2 * EDGE {
            // Writing to a text does not fail.
            let _ = write!(text, "...{separator}");
        }
        write_dims(text, cells, rest, depth + 1);
    }
    text.push(']');
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::{Kind, Mesh, World};

    fn shown(mesh: &str, layout: &str, step: f64) -> String {
        let mesh = Mesh::parse(mesh).unwrap();
        let texts = World::run(mesh.clone(), |rank| {
            Tensor::arange(rank, &Layout::parse(layout, &mesh)?, 0.0, step)?.show()
        });
        let texts = texts.unwrap();
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        texts[0].clone()
    }

    #[test]
    fn texts_are_the_same_in_every_layout() {
        let values = "[[  0.0000,   0.5000,   1.0000,   1.5000],\n [  2.0000,   2.5000,   3.0000,   3.5000],\n \
                      [  4.0000,   4.5000,   5.0000,   5.5000],\n ...,\n [194.0000, 194.5000, 195.0000, 195.5000],\n \
                      [196.0000, 196.5000, 197.0000, 197.5000],\n [198.0000, 198.5000, 199.0000, 199.5000]]";
        for layout in [
            "f32[100, 4]",
            "f32[100@a, 4]",
            "f32[100@a@b, 4]",
            "f32[100@b, 4@a]",
            "f64[100, 4@a] ~b",
            "f64[100@b, 4] +a",
        ] {
            let text = shown("a=2,b=3", layout, 0.5);
            assert_eq!(text, format!("{layout} on mesh(a=2, b=3)\n{values}"));
        }
    }

    #[test]
    fn long_rows_scalars_and_empty_tensors_match_texts_written_by_hand() {
        assert_eq!(shown("a=3", "i64[9@a]", 1.0), "i64[9@a] on mesh(a=3)\n[0, 1, 2, ..., 6, 7, 8]");
        assert_eq!(shown("a=3", "i64[6@a]", 1.0), "i64[6@a] on mesh(a=3)\n[0, 1, 2, 3, 4, 5]");
        assert_eq!(shown("a=2", "f32[]", 1.0), "f32[] on mesh(a=2)\n0.0000");
        assert_eq!(shown("a=2", "f32[0@a]", 1.0), "f32[0@a] on mesh(a=2)\n[]");
        assert_eq!(shown("a=2", "f64[2@a]", 1e-9), "f64[2@a] on mesh(a=2)\n[ 0.0000e0, 1.0000e-9]");
        assert_eq!(shown("a=2", "u8[1, 1, 2@a]", 1.0), "u8[1, 1, 2@a] on mesh(a=2)\n[[[0, 1]]]");
    }

    #[test]
    fn tensors_without_values_are_refused() {
        let mesh = Mesh::parse("a=2").unwrap();
        let error =
            World::run(mesh.clone(), |rank| Tensor::meta(rank, &Layout::parse("f32[4@a]", &mesh)?).show());
        assert_eq!(error.unwrap_err().kind(), Kind::Unsupported);
    }
}
