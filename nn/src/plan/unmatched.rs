//! Rules of a plan that match nothing in the model: errors, or a list.

use super::rule::{Presence, Rule};
use super::{Plan, RuleTarget};
use crate::module::name::{matches, nearest};
use shardgrad_tensor::{Error, Kind, Result};
use std::collections::{BTreeMap, BTreeSet};

/// What to do about layers that the plan of a model family does not find.
fn help(kind: &str) -> String {
    format!(
        "this plan shards the {kind} of a model family by name: keep the names of the family, or write a plan with rules for your names (Plan::store); a layer without a rule is a copy on every rank"
    )
}

impl Plan {
    /// Rejects rules that match nothing and must match, and kinds that no rule finds in the model or in one of its layers. `params` and
    /// `points` are the existing names. Returns the other rules that match nothing.
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
            self.check_layers_alike(params)?;
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
            Some(kind) => error.detail("help", help(kind)),
            None => error,
        })
    }

    /// Rejects a model in which a module such as `self_attn` lacks a kind of matrix in one layer that it has in another.
    fn check_layers_alike(&self, params: &[&str]) -> Result<()> {
        // By module, as the component after the last `*` of a pattern names it: the paths where each kind is found, and its rule.
        let mut modules: BTreeMap<&str, BTreeMap<&str, (BTreeSet<&str>, &Rule)>> = BTreeMap::new();
        for rule in &self.rules {
            let Presence::OneOf(kind) = &rule.presence else { continue };
            let Some((_, rest)) = rule.pattern.rsplit_once("*.") else { continue };
            let Some((module, _)) = rest.split_once('.') else { continue };
            let kinds = modules.entry(module).or_default();
            let (paths, _) = kinds.entry(kind).or_insert_with(|| (BTreeSet::new(), rule));
            let found = params.iter().filter(|name| matches(&rule.pattern, name));
            paths.extend(found.filter_map(|name| Some(name.split_once(&format!(".{module}."))?.0)));
        }
        for (module, kinds) in modules {
            let layers: BTreeSet<&str> = kinds.values().flat_map(|(paths, _)| paths).copied().collect();
            for (kind, (paths, rule)) in &kinds {
                let Some(layer) = layers.difference(paths).next() else { continue };
                let path = format!("{layer}.{module}.");
                let own = params.iter().copied().filter(|name| name.starts_with(&path));
                let text = format!("the plan finds {kind} in {} of {} layers", paths.len(), layers.len());
                return Err(Error::new(Kind::Config, text)
                    .detail(
                        "rule",
                        format!(
                            "{rule}: none in {layer}.{module}; nearest: {}",
                            nearest(&rule.pattern, own).join(", ")
                        ),
                    )
                    .detail("help", help(kind)));
            }
        }
        Ok(())
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

    #[test]
    fn every_layer_must_have_every_kind() {
        let plan = Plan::llama_moe();
        let kinds = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("self_attn.{name}.weight"));
        let of_layer = |layer: usize, mlp: &str| -> Vec<String> {
            let experts = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("{mlp}{name}"));
            let names = kinds.iter().cloned().chain(experts.map(|name| match mlp {
                "mlp." => format!("{name}.weight"),
                _ => name,
            }));
            names.map(|name| format!("model.layers.{layer}.{name}")).collect()
        };
        let check = |names: &[String]| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            plan.check_all_rules_matched(&vec![true; plan.rules.len()], &names, &[])
        };
        // Dense MLPs and experts are two forms of a kind; a layer without attention lacks no kind of its own.
        let mut names = [of_layer(0, "mlp."), of_layer(1, "mlp.experts.")].concat();
        names.push("model.layers.2.mlp.up_proj.weight".into());
        names.push("model.layers.2.mlp.gate_proj.base.weight".into());
        names.push("model.layers.2.mlp.down_proj.weight".into());
        check(&names).unwrap();
        for (from, to, kind) in [
            ("1.self_attn.k_proj", "1.self_attn.wk", "key projections in 1 of 2"),
            ("1.mlp.experts.up_proj", "1.mlp.experts.w3", "up projections in 2 of 3"),
        ] {
            let renamed: Vec<String> = names.iter().map(|name| name.replace(from, to)).collect();
            let error = check(&renamed).unwrap_err();
            assert_eq!(error.message(), format!("the plan finds {kind} layers"));
            let text = error.to_string();
            assert!(text.contains(to) && text.contains("keep the names of the family"), "{text}");
        }
    }
}
