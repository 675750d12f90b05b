//! Mesh axes of the commands.

use super::nearest::nearest;
use super::values::AXES;
use shardgrad::dist::Mesh;
use shardgrad::nn::ModelConfig;
use shardgrad::{Error, Kind, Result};

/// Rejects axes that the plans of the model families do not have.
pub(super) fn check_axes(mesh: &Mesh) -> Result<()> {
    let mut names = mesh.axes().map(|axis| mesh.name(axis));
    let Some(name) = names.find(|name| !AXES.contains(name)) else { return Ok(()) };
    let near = nearest(name, AXES).map_or(String::new(), |near| format!("did you mean `{near}`? "));
    let help = format!("{near}the axes are {}; a plan file (--plan) names its own", AXES.join(", "));
    Err(Error::new(Kind::Mesh, format!("unknown mesh axis `{name}`")).detail("help", help))
}

/// Rejects `ep` for a model without experts: `dp` shards the same rows.
pub(crate) fn check_experts(mesh: &Mesh, config: &ModelConfig) -> Result<()> {
    match mesh.axis("ep").map(|axis| mesh.size(axis)) {
        Some(size) if size > 1 && !config.has_experts() => {
            let error =
                Error::new(Kind::Unsupported, format!("the model has no experts to shard over ep={size}"));
            Err(error.detail("help", "use dp instead, which shards the same rows"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expert_axis_needs_a_model_with_experts() {
        let check = |mesh: &str, preset: &str| {
            check_experts(&Mesh::parse(mesh).unwrap(), &ModelConfig::preset(preset).unwrap())
        };
        assert!(check("ep=2", "mixtral-tiny").is_ok() && check("ep=1,dp=2", "tiny").is_ok());
        for preset in ["tiny", "llama-tiny", "bert-base"] {
            let error = check("dp=2,ep=3", preset).unwrap_err();
            assert_eq!(error.message(), "the model has no experts to shard over ep=3");
        }
    }

    #[test]
    fn unknown_axis_is_named() {
        let error_text = |mesh: &str| {
            check_axes(&Mesh::parse(mesh).unwrap())
                .map_err(|e| e.to_string().replace("\n  help       ", "; "))
        };
        assert_eq!(error_text("pp=2,dp=3,fsdp=2,cp=2,tp=2"), Ok(()));
        assert_eq!(
            error_text("dp=2,tq=2").unwrap_err(),
            "unknown mesh axis `tq`; did you mean `tp`? the axes are pp, dp, fsdp, ep, cp, tp; a plan file (--plan) names its own"
        );
        assert!(error_text("model=2").unwrap_err().starts_with("unknown mesh axis `model`; the axes are pp"));
    }
}
