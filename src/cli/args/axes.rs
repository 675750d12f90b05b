//! The axes of a mesh over which commands split something.

use shardgrad::dist::{Axis, Mesh};
use shardgrad::{Error, Kind, Result};

/// What training splits: layers, rows, tokens of a row, parameters.
pub(super) const TRAINING: [&str; 4] = ["pp", "dp", "cp", "tp"];
/// What is split where a loss is measured; stages are of training alone.
pub(super) const MEASURING: [&str; 3] = ["dp", "cp", "tp"];
/// What is split where a text is read token by token.
pub(super) const READING: [&str; 2] = ["dp", "tp"];

/// Refuses axes over which a command splits nothing: their ranks would all hold and do the same.
pub(super) fn check_axes(mesh: &Mesh, split: &[&str]) -> Result<()> {
    let idle = |axis: &Axis| mesh.size(*axis) > 1 && !split.contains(&mesh.name(*axis));
    let Some(axis) = mesh.axes().find(idle) else { return Ok(()) };
    let (name, size) = (mesh.name(axis), mesh.size(axis));
    let (last, first) = split.split_last().map_or(("", String::new()), |(l, f)| (*l, f.join(", ")));
    let instead = format!("use the axes {first} and {last}");
    let (why, help) = match name {
        "cp" => (
            format!("a text that grows token by token is not split over cp={size}"),
            format!(
                "{instead}; no weight is split over cp, so a model that was trained with it is read without"
            ),
        ),
        _ => (format!("nothing is split over {name}={size} but in training"), instead),
    };
    Err(Error::new(Kind::Unsupported, why).detail("help", help))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_over_which_nothing_is_split_is_refused_by_its_name() {
        let told = |mesh: &str, split: &[&str]| {
            check_axes(&Mesh::parse(mesh).unwrap(), split)
                .map_err(|e| e.to_string().replace("\n  help       ", "; "))
        };
        assert_eq!(told("pp=2,dp=3,cp=2,tp=2", &TRAINING), Ok(()));
        assert_eq!(told("pp=1,dp=3,cp=2", &MEASURING), Ok(()));
        assert_eq!(
            told("pp=2,cp=2", &MEASURING).unwrap_err(),
            "nothing is split over pp=2 but in training; use the axes dp, cp and tp"
        );
        let error = told("cp=2,tp=2", &READING).unwrap_err();
        assert!(
            error.starts_with(
                "a text that grows token by token is not split over cp=2; use the axes dp and tp; no weight"
            ),
            "{error}"
        );
    }
}
