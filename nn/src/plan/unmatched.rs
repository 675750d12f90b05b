//! Rules of a plan that match nothing in the model: errors, or a list.

use super::rule::{Presence, Rule};
use super::{Plan, RuleTarget};
use crate::module::name::nearest;
use shardgrad_tensor::{Error, Kind, Result};

impl Plan {
    /// Rejects rules that match nothing and must match, and kinds of which no rule matches. `params` and `points` are the existing
    /// names. Returns the other rules that match nothing.
    pub(crate) fn check_all_rules_matched(
        &self,
        used: &[bool],
        params: &[&str],
        points: &[&str],
    ) -> Result<Vec<String>> {
        let has_kind = |kind: &str| {
            let is_of_kind = |rule: &Rule| matches!(&rule.presence, Presence::OneOf(other) if other == kind);
            self.rules.iter().zip(used).any(|(rule, used)| *used && is_of_kind(rule))
        };
        let is_missing = |rule: &&Rule| match &rule.presence {
            Presence::Required => true,
            Presence::Optional => false,
            Presence::OneOf(kind) => !has_kind(kind),
        };
        let unmatched = self.rules.iter().zip(used).filter(|(_, used)| !**used).map(|(rule, _)| rule);
        let (missing, accepted): (Vec<&Rule>, Vec<&Rule>) = unmatched.partition(is_missing);
        if missing.is_empty() {
            return Ok(accepted.into_iter().map(Rule::to_string).collect());
        }
        let text = format!("{} rule(s) of the plan match nothing in the model", missing.len());
        let error = missing.iter().fold(Error::new(Kind::Config, text), |error, rule| {
            let (what, names) = match rule.target {
                RuleTarget::Point => ("points", points),
                RuleTarget::Store | RuleTarget::Compute => ("parameters", params),
            };
            let near = nearest(&rule.pattern, names.iter().copied());
            let near = if near.is_empty() {
                "the model has none".to_string()
            } else {
                format!("nearest: {}", near.join(", "))
            };
            error.detail("rule", format!("{rule}: no such {what}; {near}"))
        });
        let kind = missing.iter().find_map(|rule| match &rule.presence {
            Presence::OneOf(kind) => Some(kind),
            Presence::Required | Presence::Optional => None,
        });
        Err(match kind {
            Some(kind) => error.detail(
                "help",
                format!("this plan shards the {kind} of a model family by name: keep the names of the family, or write a plan with rules for your names (Plan::store); a layer without a rule is a copy on every rank"),
            ),
            None => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_tensor::Mesh;

    #[test]
    fn rules_without_a_match_suggest_the_nearest_names() {
        let plan = Plan::new().store("up.wieght", "tp@1").point("dwn.out", "tp=").compute("up.weight", "dp~");
        let mut used = vec![false; 3];
        let _ = plan.placements(RuleTarget::Compute, "up.weight", None, &Mesh::single(), &mut used);
        assert_eq!(used, [false, false, true]);
        let text = plan
            .check_all_rules_matched(&used, &["up.weight", "up.bias"], &["down.out"])
            .unwrap_err()
            .to_string();
        assert!(text.contains("2 rule(s)"), "{text}");
        assert!(text.contains("store up.wieght tp@1: no such parameters; nearest: up.weight"), "{text}");
        assert!(text.contains("point dwn.out tp=: no such points; nearest: down.out"), "{text}");
        assert!(plan.check_all_rules_matched(&[true; 3], &[], &[]).is_ok());
    }

    #[test]
    fn one_rule_of_a_kind_must_match() {
        let rule = |plan: Plan, pattern, presence| plan.rule(RuleTarget::Store, pattern, "tp@0", presence);
        let plan = rule(Plan::new(), "dense", Presence::one_of("mlp"));
        let plan = rule(plan, "experts", Presence::one_of("mlp"));
        let plan = rule(plan, "bias", Presence::Optional);
        let check = |used: [bool; 3]| plan.check_all_rules_matched(&used, &["dens"], &[]);
        assert_eq!(check([true, false, true]).unwrap(), ["store experts tp@0"]);
        assert_eq!(check([false, true, false]).unwrap(), ["store dense tp@0", "store bias tp@0"]);
        let text = check([false, false, true]).unwrap_err().to_string();
        assert!(text.contains("2 rule(s)") && text.contains("shards the mlp of a model family"), "{text}");
        assert!(text.contains("store dense tp@0: no such parameters; nearest: dens"), "{text}");
    }
}
