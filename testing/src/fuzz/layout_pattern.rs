//! A layout without extents and dtype, which stays valid while a failing program is shrunk.

use shardgrad_dist::{Error, Kind, Mesh, Result};
use shardgrad_tensor::DType;
use shardgrad_tensor::Layout;
use std::fmt;

/// A layout without extents: per dim its grain and the axes that shard it, outer first; then the partial and the
/// replicated axes. As text, a layout without dtype and extents: `[@a@b, :2@c] +d ~e`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutPattern {
    dims: Vec<(usize, Vec<String>)>,
    partial: Vec<String>,
    replicate: Vec<String>,
}

impl LayoutPattern {
    /// The pattern of a value with `ndim` dims that every rank holds in full.
    #[must_use]
    pub fn unsharded(ndim: usize) -> LayoutPattern {
        LayoutPattern { dims: vec![(1, Vec::new()); ndim], partial: Vec::new(), replicate: Vec::new() }
    }

    /// The pattern of a layout.
    #[must_use]
    pub fn of(layout: &Layout) -> LayoutPattern {
        let name = |a| layout.mesh().name(a).to_string();
        LayoutPattern {
            dims: layout.dims().iter().map(|d| (d.grain, d.axes.iter().map(name).collect())).collect(),
            partial: layout.partial().iter().map(name).collect(),
            replicate: layout.replicate().iter().map(name).collect(),
        }
    }

    /// Parses the text form.
    ///
    /// # Errors
    /// `Kind::Layout` if the text is not a pattern.
    pub fn parse(text: &str) -> Result<LayoutPattern> {
        let refuse = || Error::new(Kind::Layout, format!("`{text}` is not a layout pattern"));
        let (dims, rest) = text.strip_prefix('[').and_then(|t| t.split_once(']')).ok_or_else(refuse)?;
        let dim = |part: &str| {
            let mut pieces = part.trim().split('@');
            let grain = pieces.next().unwrap_or_default().trim_start_matches(':');
            let grain = if grain.is_empty() { Ok(1) } else { grain.parse() };
            Ok((grain.map_err(|_| refuse())?, pieces.map(str::to_string).collect()))
        };
        let dims = if dims.is_empty() { Vec::new() } else { dims.split(',').collect() };
        let of =
            |mark: char| rest.split(' ').filter_map(|w| w.strip_prefix(mark)).map(str::to_string).collect();
        Ok(LayoutPattern {
            dims: dims.into_iter().map(dim).collect::<Result<_>>()?,
            partial: of('+'),
            replicate: of('~'),
        })
    }

    /// The layout of a shape on a mesh.
    ///
    /// # Errors
    /// `Kind::Config` if the pattern does not fit the shape or the mesh.
    pub fn layout(&self, mesh: &Mesh, dtype: DType, shape: &[usize]) -> Result<Layout> {
        if shape.len() != self.dims.len() {
            return Err(Error::new(Kind::Config, format!("{self} on a shape of {} dims", shape.len())));
        }
        let pattern = self.to_string();
        let (dims, rest) = pattern.trim_start_matches('[').split_once(']').expect("the text has a bracket");
        let dims: Vec<String> = shape.iter().zip(dims.split(", ")).map(|(n, d)| format!("{n}{d}")).collect();
        let text = format!("{dtype}[{}]{rest}", dims.join(", "));
        Layout::parse(&text, mesh).map_err(|e| Error::new(Kind::Config, e.message().to_string()))
    }

    /// The pattern without an axis.
    #[must_use]
    pub fn without(&self, axis: &str) -> LayoutPattern {
        let keep = |names: &Vec<String>| names.iter().filter(|n| *n != axis).cloned().collect::<Vec<_>>();
        LayoutPattern {
            dims: self.dims.iter().map(|(grain, axes)| (*grain, keep(axes))).collect(),
            partial: keep(&self.partial),
            replicate: keep(&self.replicate),
        }
    }
}

impl fmt::Display for LayoutPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dim = |(grain, axes): &(usize, Vec<String>)| {
            let grain = if *grain == 1 { String::new() } else { format!(":{grain}") };
            axes.iter().fold(grain, |text, axis| text + "@" + axis)
        };
        let dims = self.dims.iter().map(dim).collect::<Vec<_>>().join(", ");
        // The pattern of one dim without axes would read as that of no dim.
        let dims = if self.dims.len() == 1 && dims.is_empty() { ":1" } else { &dims };
        write!(f, "[{dims}]")?;
        self.partial.iter().try_for_each(|a| write!(f, " +{a}"))?;
        self.replicate.iter().try_for_each(|a| write!(f, " ~{a}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_round_trips() {
        let mesh = Mesh::parse("a=2,b=2,c=2").unwrap();
        for text in [
            "f64[4@b@a, 6:3@c]",
            "f64[]",
            "f64[7]",
            "f64[7] +a",
            "f64[] +a ~b",
            "f64[5, 3] +a +c",
            "f64[8:2, 1@a]",
        ] {
            let layout = Layout::parse(text, &mesh).unwrap();
            let pattern = LayoutPattern::parse(&LayoutPattern::of(&layout).to_string()).unwrap();
            assert_eq!(pattern.layout(&mesh, DType::F64, &layout.shape()).unwrap(), layout);
        }
        assert_eq!(LayoutPattern::parse("[@a@b, @c] +d").unwrap().without("b").to_string(), "[@a, @c] +d");
        assert!(LayoutPattern::parse("@a").is_err() && LayoutPattern::parse("[:x]").is_err());
        assert!(LayoutPattern::unsharded(2).layout(&mesh, DType::F64, &[3]).is_err());
    }
}
