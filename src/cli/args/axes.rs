//! The axes of a mesh over which commands split something.

use shardgrad::dist::{Axis, Mesh};
use shardgrad::nn::ModelConfig;
use shardgrad::{Error, Kind, Result};

/// What training splits: layers, rows, experts, tokens of a row, parameters.
pub(super) const TRAINING: [&str; 5] = ["pp", "dp", "ep", "cp", "tp"];
/// What is split where a loss is measured; stages are of training alone.
pub(super) const MEASURING: [&str; 4] = ["dp", "ep", "cp", "tp"];
/// What is split where a text is read token by token.
pub(super) const READING: [&str; 3] = ["dp", "ep", "tp"];

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

/// Refuses an axis of experts for a model that has none: `dp` splits the same rows.
pub(crate) fn check_experts(mesh: &Mesh, config: &ModelConfig) -> Result<()> {
    match mesh.axis("ep").map(|axis| mesh.size(axis)) {
        Some(size) if size > 1 && !config.has_experts() => {
            let error =
                Error::new(Kind::Unsupported, format!("the model has no experts to split over ep={size}"));
            Err(error.detail("help", "split its rows over dp instead"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_split_where_there_are_some() {
        let check = |mesh: &str, preset: &str| {
            check_experts(&Mesh::parse(mesh).unwrap(), &ModelConfig::preset(preset).unwrap())
        };
        assert!(check("ep=2", "mixtral-tiny").is_ok() && check("ep=1,dp=2", "tiny").is_ok());
        for preset in ["tiny", "llama-tiny", "bert-base"] {
            let error = check("dp=2,ep=3", preset).unwrap_err();
            assert_eq!(error.message(), "the model has no experts to split over ep=3");
        }
    }

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
            "nothing is split over pp=2 but in training; use the axes dp, ep, cp and tp"
        );
        let error = told("cp=2,tp=2", &READING).unwrap_err();
        assert!(
            error.starts_with(
                "a text that grows token by token is not split over cp=2; use the axes dp, ep and tp; no weight"
            ),
            "{error}"
        );
    }
}
