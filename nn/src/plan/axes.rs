//! Mesh axes and the plan: every axis must be used, or be stated to hold copies.

use super::rule::{Presence, Rule};
use super::{Plan, RuleTarget};
use shardgrad_tensor::{Error, Kind, Mesh, Result};

impl Plan {
    /// States that all ranks of an axis hold the same parameters and compute the same. Without this rule, a mesh axis that the plan
    /// does not use is an error.
    #[doc(alias = "replicate")]
    #[must_use]
    pub fn copies(axis: &str) -> Plan {
        Plan::new().rule(RuleTarget::Store, "*", &format!("{axis}="), Presence::Optional)
    }

    /// Rejects a mesh axis of several ranks that shards neither batches nor layers and that no matching rule names: its ranks would
    /// do the same work unnoticed. `used` marks the rules that match.
    pub(crate) fn check_all_axes_used(&self, mesh: &Mesh, used: &[bool]) -> Result<()> {
        let has_rule = |name: &str| {
            let names_axis = |(rule, used): (&Rule, &bool)| *used && rule.axis == name;
            self.rules.iter().zip(used).any(names_axis)
        };
        let is_used = |name: &str| {
            has_rule(name)
                || self.batch.iter().any(|(axis, _)| axis == name)
                || self.pipeline.as_ref().is_some_and(|pipeline| pipeline.axis == name)
        };
        let Some(axis) = mesh.axes().find(|axis| mesh.size(*axis) > 1 && !is_used(mesh.name(*axis))) else {
            return Ok(());
        };
        let name = mesh.name(axis);
        let text = format!("the plan does not use the mesh axis {name}={}", mesh.size(axis));
        let help = format!(
            "name an axis of the plan in the mesh, shard rows over {name} with Plan::data_parallel(\"{name}\"), or state with Plan::copies(\"{name}\") that all its ranks do the same work"
        );
        let known = self.axes();
        let known = if known.is_empty() { "none".to_string() } else { known.join(", ") };
        Err(Error::new(Kind::Config, text).detail("axes of the plan", known).detail("help", help))
    }

    /// The names of all axes of the plan, each once.
    fn axes(&self) -> Vec<&str> {
        let pipeline = self.pipeline.iter().map(|pipeline| pipeline.axis.as_str());
        let batch = self.batch.iter().map(|(axis, _)| axis.as_str());
        let mut names = Vec::new();
        for name in pipeline.chain(batch).chain(self.rules.iter().map(|rule| rule.axis.as_str())) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_axes_are_refused_unless_copies_are_meant() {
        let check = |plan: &Plan, mesh: &str, matched: bool| {
            plan.check_all_axes_used(&Mesh::parse(mesh).unwrap(), &vec![matched; plan.num_rules()])
        };
        let plan = Plan::data_parallel("dp").and(Plan::pipeline_parallel("pp")).store("w", "tp@0");
        for mesh in ["", "dp=2", "pp=2,dp=2,tp=2", "other=1"] {
            assert!(check(&plan, mesh, true).is_ok(), "{mesh}");
        }
        let error = check(&plan, "ddp=2", true).unwrap_err();
        assert_eq!(
            (error.kind(), error.message()),
            (Kind::Config, "the plan does not use the mesh axis ddp=2")
        );
        let text = error.to_string();
        assert!(text.contains("pp, dp, tp") && text.contains("Plan::copies(\"ddp\")"), "{text}");
        assert!(check(&plan, "tp=2", false).is_err(), "a rule that matches nothing uses no axis");
        assert!(check(&Plan::new(), "dp=2", true).unwrap_err().to_string().contains("none"));
        let stated = plan.and(Plan::copies("ddp"));
        assert!(check(&stated, "ddp=2,dp=2", true).is_ok());
        assert!(stated.to_string().ends_with("store * ddp= optional\n"));
    }
}
