//! The text form of a layout, printed and parsed: `dtype "[" [dim {", " dim}] "]" {" +" axis} {" ~" axis}` with
//! `dim = extent [":" grain] {"@" axis}`. The axes of `+` and `~` are sorted by name; grains of 1 and invariant axes are
//! omitted.

use crate::layout::Layout;
use crate::layout::dim::{AxisList, Dim};
use shardgrad_dist::{Axis, AxisSet, Error, Kind, Mesh, Result};
use shardgrad_kernels::DType;
use std::fmt;

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype())?;
        for (d, dim) in self.dims().iter().enumerate() {
            write!(f, "{}{}", if d > 0 { ", " } else { "" }, dim.extent)?;
            if dim.grain > 1 {
                write!(f, ":{}", dim.grain)?;
            }
            for axis in dim.axes.iter() {
                write!(f, "@{}", self.mesh().name(axis))?;
            }
        }
        f.write_str("]")?;
        for (mark, axes) in [('+', self.partial()), ('~', self.replicate())] {
            let mut names: Vec<&str> = axes.iter().map(|a| self.mesh().name(a)).collect();
            names.sort_unstable();
            for name in names {
                write!(f, " {mark}{name}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Layout {
    /// Parses the text that `Display` writes, on a mesh that has all the axes used.
    ///
    /// # Errors
    /// `Kind::Layout` for text that cannot be parsed, an axis that is not on the mesh, and whatever [`Layout::new`]
    /// refuses.
    pub fn parse(text: &str, mesh: &Mesh) -> Result<Layout> {
        let refuse = |why: String| {
            Error::new(Kind::Layout, format!("`{text}` is not a layout: {why}")).detail(
                "help",
                "write dtype[extent:grain@axis, ..] +axis ~axis, as in f32[32@dp, 4096:128@tp] +cp",
            )
        };
        let (dtype, rest) = text.split_once('[').ok_or_else(|| refuse("`[` is missing".into()))?;
        let (inner, tail) = rest.split_once(']').ok_or_else(|| refuse("`]` is missing".into()))?;
        let dtype = DType::parse(dtype).ok_or_else(|| refuse(format!("`{dtype}` is not a dtype")))?;
        let cells = inner.split(", ").filter(|_| !inner.is_empty());
        let dims: Vec<Dim> = cells.map(|c| dim(c, mesh).map_err(refuse)).collect::<Result<_>>()?;
        let (mut partial, mut replicate) = (AxisSet::EMPTY, AxisSet::EMPTY);
        let mut marks = tail.split(' ');
        if marks.next() != Some("") {
            return Err(refuse("a space is missing after `]`".into()));
        }
        for mark in marks {
            let (set, name) = match (mark.strip_prefix('+'), mark.strip_prefix('~')) {
                (Some(name), _) => (&mut partial, name),
                (_, Some(name)) => (&mut replicate, name),
                _ => return Err(refuse(format!("`{mark}` is neither `+axis` nor `~axis`"))),
            };
            let axis = axis(name, mesh).map_err(refuse)?;
            if set.contains(axis) {
                return Err(refuse(format!("axis `{name}` appears twice")));
            }
            *set = set.with(axis);
        }
        Layout::new(mesh, dtype, dims, partial, replicate)
    }
}

fn dim(cell: &str, mesh: &Mesh) -> Result<Dim, String> {
    let mut parts = cell.split('@');
    let size = parts.next().unwrap_or_default();
    let (extent, grain) = size.split_once(':').unwrap_or((size, "1"));
    let mut axes = AxisList::EMPTY;
    for name in parts {
        let axis = axis(name, mesh)?;
        if axes.contains(axis) {
            return Err(format!("axis `{name}` appears twice"));
        }
        axes = axes.with(axis);
    }
    Ok(Dim { extent: number(extent)?, grain: number(grain)?, axes })
}

fn number(text: &str) -> Result<usize, String> {
    // `usize::from_str` accepts `+4` as well, which is not an extent.
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| digits).ok_or_else(|| format!("`{text}` is not an extent or a grain"))
}

fn axis(name: &str, mesh: &Mesh) -> Result<Axis, String> {
    mesh.axis(name).ok_or_else(|| format!("there is no axis `{name}` on {mesh}"))
}
