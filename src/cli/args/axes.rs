//! Mesh axes that each command supports.

use super::nearest::nearest;
use super::values::AXES;
use shardgrad::dist::{Axis, Mesh};
use shardgrad::nn::{ModelConfig, Plan};
use shardgrad::tensor::{DType, Placement};
use shardgrad::{Error, Kind, Result};

/// The mesh axes that a computation can shard over.
#[derive(Debug)]
pub(super) struct SupportedAxes {
    computation: &'static str,
    names: &'static [&'static str],
}

/// Training supports all axes: layers (pp), rows (dp, fsdp), experts (ep), tokens of a row (cp) and parameters (tp).
pub(super) const TRAINING: SupportedAxes =
    SupportedAxes { computation: "training", names: &["dp", "fsdp", "pp", "ep", "cp", "tp"] };
/// Evaluation shards as training does.
pub(super) const EVALUATION: SupportedAxes = SupportedAxes { computation: "evaluation", ..TRAINING };
/// Generation does not shard the growing sequence over its tokens.
pub(super) const GENERATION: SupportedAxes =
    SupportedAxes { computation: "generation", names: &["dp", "fsdp", "pp", "ep", "tp"] };

/// Rejects axes that are unknown, or that a computation does not support: all ranks of such an axis would do the same work.
pub(super) fn check_axes(mesh: &Mesh, supported: &SupportedAxes) -> Result<()> {
    if let Some(name) = mesh.axes().map(|axis| mesh.name(axis)).find(|name| !AXES.contains(name)) {
        let near = nearest(name, AXES).map_or(String::new(), |near| format!("did you mean `{near}`? "));
        let help = format!("{near}the axes are {}; a plan file (--plan) names its own", AXES.join(", "));
        return Err(Error::new(Kind::Mesh, format!("unknown mesh axis `{name}`")).detail("help", help));
    }
    let SupportedAxes { computation, names } = supported;
    let idle = |axis: &Axis| mesh.size(*axis) > 1 && !names.contains(&mesh.name(*axis));
    let Some(axis) = mesh.axes().find(idle) else { return Ok(()) };
    let name = mesh.name(axis);
    let (last, first) = names.split_last().map_or(("", String::new()), |(l, f)| (*l, f.join(", ")));
    let mut help = format!("use {first} or {last}");
    if name == "cp" {
        help += "; weights are not sharded over cp, so a model trained with cp loads on any other mesh";
    }
    let why = format!("{computation} does not support {name}");
    Err(Error::new(Kind::Unsupported, why).detail("help", help))
}

/// Rejects axes over which the plan of a file shards tokens, if a computation does not.
pub(super) fn check_token_axes(mesh: &Mesh, supported: &SupportedAxes, plan: &Plan) -> Result<()> {
    if supported.names.contains(&"cp") {
        return Ok(());
    }
    let batch = plan.batch_layout(mesh, DType::I64, &[1, 1])?;
    let sharded = |axis: &Axis| mesh.size(*axis) > 1 && batch.placement(*axis) == Placement::Shard(1);
    let Some(axis) = mesh.axes().find(sharded) else { return Ok(()) };
    let name = mesh.name(axis);
    let text = format!(
        "the plan shards tokens over {name}={}, which {} does not support",
        mesh.size(axis),
        supported.computation
    );
    let help = format!("omit {name} from --mesh; weights are not sharded over it");
    Err(Error::new(Kind::Unsupported, text).detail("help", help))
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
    fn unsupported_axis_is_named() {
        let error_text = |mesh: &str, supported: &SupportedAxes| {
            check_axes(&Mesh::parse(mesh).unwrap(), supported)
                .map_err(|e| e.to_string().replace("\n  help       ", "; "))
        };
        assert_eq!(error_text("pp=2,dp=3,fsdp=2,cp=2,tp=2", &TRAINING), Ok(()));
        assert_eq!(error_text("pp=2,dp=3,cp=2", &EVALUATION), Ok(()));
        assert_eq!(
            error_text("dp=2,tq=2", &EVALUATION).unwrap_err(),
            "unknown mesh axis `tq`; did you mean `tp`? the axes are pp, dp, fsdp, ep, cp, tp; a plan file (--plan) names its own"
        );
        let of = |mesh: &str| error_text(mesh, &GENERATION).unwrap_err();
        assert!(of("model=2").starts_with("unknown mesh axis `model`; the axes are pp"));
        assert!(
            of("cp=2,tp=2")
                .starts_with("generation does not support cp; use dp, fsdp, pp, ep or tp; weights")
        );
    }
}
