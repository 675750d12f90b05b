//! Rules that match some of a model's repeated blocks and miss others, where parameters of other names would be copies on every rank
//! without notice.
//!
//! A block is the part of a path up to a number: `model.layers.3` of `model.layers.3.mlp.up_proj.weight`. A rule expects a block to
//! have what it matches in another one: the same path with the other number. That a block lacks the path is no fault in itself. The
//! block may have experts in place of an MLP, no bias or no attention, or share its parameters with another block. So a block counts as
//! covered if a rule of the same kind matches the name of a parameter that is used in it, under any path. A block that is not covered is
//! refused only if it has a parameter that no rule places on the axis, while the parameter of the same path in the other block has a rule
//! or does not exist: a parameter of the same shape, or any matrix where the plan shards a kind of layers.

use super::rule::{Presence, Rule};
use super::{Plan, RuleTarget};
use crate::module::name::matches;
use shardgrad_tensor::{Error, Kind, Result};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// A use of a parameter in a model. A shared parameter has several, all of the same name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParamUse<'a> {
    /// The path of the use.
    pub(crate) path: &'a str,
    /// The name of the parameter, the path of its first use: rules match names.
    pub(crate) name: &'a str,
    pub(crate) shape: &'a [usize],
    /// Whether the parameter has two or more dims in files.
    pub(crate) is_matrix: bool,
    /// Whether the parameter is sharded like another one where no rule names it.
    pub(crate) has_leader: bool,
}

/// A rule that matches a use of a parameter in one block and misses another block.
struct MissedBlock<'a> {
    rule: &'a Rule,
    matched: &'a str,
    block: String,
    /// Parameters of the block without a rule.
    without_rule: Vec<&'a ParamUse<'a>>,
}

impl Plan {
    /// Rejects a model in which rules that need not match cover some of the repeated blocks and miss one that has parameters in
    /// their place.
    pub(crate) fn check_repeated_blocks(&self, uses: &[ParamUse<'_>]) -> Result<()> {
        let missed = self.missed_blocks(uses);
        let Some(first) = missed.first() else { return Ok(()) };
        let num_others = missed.iter().map(|missed| &missed.block).collect::<BTreeSet<_>>().len() - 1;
        let others =
            if num_others == 0 { String::new() } else { format!(" and {num_others} other block(s)") };
        let text = format!(
            "the plan shards some blocks of the model, but not all of the parameters of {}{others}",
            first.block
        );
        let mut error = Error::new(Kind::Config, text);
        for MissedBlock { rule, matched, block, without_rule } in
            missed.iter().filter(|missed| missed.block == first.block)
        {
            let names: Vec<&str> = without_rule.iter().map(|param| param.name).collect();
            let text = format!(
                "{rule}: matches {matched}, but nothing in {block}, where no rule of axis {} matches {}",
                rule.axis,
                names.join(", ")
            );
            error = error.detail("rule", text);
        }
        let (rule, name) = (first.rule, first.without_rule[0].name);
        Err(error.detail(
            "help",
            format!(
                "give the layers of {} the names that the other blocks have, or state how each parameter is stored: Plan::store(\"{name}\", \"{}\") shards it, Plan::store(\"{name}\", \"{}=\") makes a copy on every rank",
                first.block, rule.word(), rule.axis
            ),
        ))
    }

    /// All pairs of a rule and a block that it misses, in the order of the rules.
    fn missed_blocks<'a>(&'a self, uses: &'a [ParamUse<'a>]) -> Vec<MissedBlock<'a>> {
        let mut numbers: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for at in uses.iter().flat_map(|used| positions(used.path)) {
            numbers.entry(at.before).or_default().insert(at.number);
        }
        let rules = || self.rules.iter().enumerate().filter(|(_, rule)| rule.may_miss_blocks());
        let mut covered = HashSet::new();
        for (i, rule) in rules() {
            let matched = uses.iter().filter(|used| matches(&rule.pattern, used.name));
            let blocks = matched.flat_map(|used| positions(used.path).map(|at| at.block(used.path)));
            covered.extend(blocks.map(|block| (self.kind_of(i), block)));
        }
        let mut missed = Vec::new();
        for (i, rule) in rules() {
            let mut seen = HashSet::new();
            let is_matched =
                |used: &&ParamUse<'_>| [used.path, used.name].iter().all(|path| matches(&rule.pattern, path));
            let matched = uses.iter().filter(is_matched);
            let places = matched.flat_map(|used| positions(used.path).map(move |at| (used, at)));
            // One block of each list is compared with all others.
            for (used, at) in places.filter(|(_, at)| seen.insert(at.before)) {
                for number in &numbers[at.before] {
                    let block = format!("{}{number}", at.before);
                    let is_expected = matches(&rule.pattern, &format!("{block}.{}", at.after));
                    if !is_expected || covered.contains(&(self.kind_of(i), block.as_str())) {
                        continue;
                    }
                    let without_rule = self.without_rule(rule, used, [at.block(used.path), &block], uses);
                    if !without_rule.is_empty() {
                        missed.push(MissedBlock { rule, matched: used.path, block, without_rule });
                    }
                }
            }
        }
        missed
    }

    /// The parameters of a block that a rule misses which may stand in place of the parameter that it matches in a covered block: no rule
    /// places them on the axis, and none places a parameter of the same path in the covered block.
    fn without_rule<'a>(
        &self,
        rule: &Rule,
        matched: &ParamUse<'_>,
        [covered, missed]: [&str; 2],
        uses: &'a [ParamUse<'a>],
    ) -> Vec<&'a ParamUse<'a>> {
        let within = |used: &ParamUse<'a>, block: &str| {
            used.path.strip_prefix(block).and_then(|path| path.strip_prefix('.'))
        };
        let others = uses.iter().filter(|used| !self.stores_on(&rule.axis, used));
        let known: HashSet<&str> = others.filter_map(|used| within(used, covered)).collect();
        let is_of_kind = matches!(rule.presence, Presence::OneOf(_));
        let may_replace = |used: &&'a ParamUse<'a>| {
            within(used, missed).is_some_and(|path| !known.contains(path))
                && (used.shape == matched.shape || is_of_kind && used.is_matrix)
                && !self.stores_on(&rule.axis, used)
        };
        uses.iter().filter(may_replace).collect()
    }

    /// The first rule of the kind of a rule on the same axis; the rule itself if it has no kind.
    fn kind_of(&self, rule: usize) -> usize {
        let is_alike = |other: &Rule| {
            let rule = &self.rules[rule];
            matches!(rule.presence, Presence::OneOf(_))
                && (&other.presence, &other.axis) == (&rule.presence, &rule.axis)
        };
        self.rules.iter().position(is_alike).unwrap_or(rule)
    }

    /// Whether a rule states how a parameter is stored on an axis, or the parameter follows one that has a rule.
    fn stores_on(&self, axis: &str, used: &ParamUse<'_>) -> bool {
        let states = |rule: &Rule| {
            rule.target == RuleTarget::Store && rule.axis == axis && matches(&rule.pattern, used.name)
        };
        used.has_leader || self.rules.iter().any(states)
    }
}

impl Rule {
    /// Whether the rule is one of stored parameters that need not match.
    fn may_miss_blocks(&self) -> bool {
        self.target == RuleTarget::Store && self.presence != Presence::Required
    }
}

/// A number in a path: the path before it, the number, and the path after it.
struct Position<'a> {
    before: &'a str,
    number: &'a str,
    after: &'a str,
}

impl Position<'_> {
    /// The path of the block in the path of a parameter in it.
    fn block<'p>(&self, path: &'p str) -> &'p str {
        &path[..self.before.len() + self.number.len()]
    }
}

/// The numbers in a path, each with a path after it.
fn positions(path: &str) -> impl Iterator<Item = Position<'_>> {
    path.match_indices('.').filter_map(|(end, _)| {
        let start = path[..end].rfind('.').map_or(0, |dot| dot + 1);
        let (before, number) = path[..end].split_at(start);
        let is_number = !number.is_empty() && number.bytes().all(|c| c.is_ascii_digit());
        is_number.then_some(Position { before, number, after: &path[end + 1..] })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan of a kind of matrices with two forms, and an optional bias.
    fn plan() -> Plan {
        Plan::new()
            .rule(RuleTarget::Store, "*.up.weight", "tp@1", Presence::one_of("up"))
            .rule(RuleTarget::Store, "*.experts.up", "tp@2", Presence::one_of("up"))
            .rule(RuleTarget::Store, "*.up.bias", "tp@0", Presence::Optional)
            .rule(RuleTarget::Store, "*", "dp@0|=", Presence::Required)
    }

    /// The path of a use, the name of the parameter, and its shape.
    type Use = (&'static str, &'static str, &'static [usize]);

    /// A use under the name of the parameter.
    fn own(name: &'static str, shape: &'static [usize]) -> Use {
        (name, name, shape)
    }

    /// The error for a model with these parameters.
    fn refused(plan: &Plan, uses: &[Use]) -> Option<String> {
        let used = |&(path, name, shape): &Use| {
            let (is_matrix, has_leader) = (shape.len() > 1, name.contains(".lora_"));
            ParamUse { path, name, shape, is_matrix, has_leader }
        };
        let uses: Vec<_> = uses.iter().map(used).collect();
        plan.check_repeated_blocks(&uses).err().map(|error| error.to_string())
    }

    #[test]
    fn a_layer_of_another_name_in_one_block_is_refused_unless_it_has_a_rule() {
        let params = [
            own("layers.0.norm", &[4]),
            own("layers.0.up.weight", &[4, 8]),
            own("layers.1.norm", &[4]),
            own("layers.1.wu.weight", &[4, 9]),
        ];
        let text = refused(&plan(), &params).unwrap();
        for part in [
            "but not all of the parameters of layers.1",
            "store *.up.weight tp@1: matches layers.0.up.weight, but nothing in layers.1",
            "no rule of axis tp matches layers.1.wu.weight",
            "Plan::store(\"layers.1.wu.weight\", \"tp@1\") shards it",
            "Plan::store(\"layers.1.wu.weight\", \"tp=\")",
        ] {
            assert!(text.contains(part), "no `{part}` in {text}");
        }
        for stated in ["tp=", "tp@1"] {
            assert_eq!(refused(&plan().store("layers.1.wu.weight", stated), &params), None);
        }
        assert!(refused(&plan().store("layers.1.wu.weight", "dp@0"), &params).is_some(), "another axis");
        // All blocks but one have other names.
        let mut params = params.to_vec();
        params.extend([own("layers.2.wu.weight", &[4, 8]), own("layers.3.wu.weight", &[4, 8])]);
        assert!(refused(&plan(), &params).unwrap().contains("layers.1 and 2 other block(s)"));
    }

    #[test]
    fn blocks_without_parameters_in_place_of_a_rule_are_accepted() {
        let first = [own("layers.0.norm", &[4]), own("layers.0.up.weight", &[4, 8])];
        let with = |others: &[Use]| refused(&plan(), &[&first[..], others].concat());
        assert_eq!(with(&[own("layers.1.norm", &[4])]), None, "no layer");
        assert_eq!(with(&[own("layers.1.norm", &[4]), own("layers.1.scale", &[8])]), None, "no matrix");
        assert_eq!(with(&[own("layers.1.experts.up", &[2, 4, 8])]), None, "the other form of the kind");
        assert_eq!(with(&[own("layers.1.up.base.weight", &[4, 8])]), None, "a wrapped layer");
        assert_eq!(with(&[own("head.0.weight", &[4, 8]), own("head.1.weight", &[8, 4])]), None, "no block");
        let adapted = [own("layers.1.norm", &[4]), own("layers.1.wu.lora_A.weight", &[4, 2])];
        assert_eq!(with(&adapted), None, "sharded like another parameter");
        let router = [own("layers.0.router", &[4, 2]), own("layers.1.router", &[4, 2])];
        assert_eq!(with(&router), None, "both have it");
    }

    #[test]
    fn shared_parameters_are_covered_where_their_first_name_is() {
        let first = [own("layers.0.up.weight", &[4, 8]), own("layers.0.down.weight", &[8, 4])];
        let with = |others: &[Use]| refused(&plan(), &[&first[..], others].concat());
        let down = own("layers.1.down.weight", &[8, 4]);
        assert_eq!(with(&[("layers.1.up.weight", "layers.0.up.weight", &[4, 8])]), None, "all is shared");
        assert_eq!(with(&[("layers.1.up.weight", "layers.0.up.weight", &[4, 8]), down]), None);
        // The name of the second use does not matter.
        assert_eq!(with(&[("layers.1.wu.weight", "layers.0.up.weight", &[4, 8]), down]), None);
        // The first use has another name, so that no rule shards the parameter, whatever the second is called.
        let unnamed = [
            own("layers.0.wu.weight", &[4, 8]),
            ("layers.1.up.weight", "layers.0.wu.weight", &[4, 8]),
            own("layers.2.up.weight", &[4, 8]),
        ];
        assert!(refused(&plan(), &unnamed).unwrap().contains("layers.0.wu.weight"));
        let outside: [Use; 3] = [
            own("wu.weight", &[4, 8]),
            ("layers.1.up.weight", "wu.weight", &[4, 8]),
            own("layers.2.up.weight", &[4, 8]),
        ];
        assert!(refused(&plan(), &outside).unwrap().contains("no rule of axis tp matches wu.weight"));
    }

    #[test]
    fn optional_parameters_are_compared_by_shape() {
        let first = [own("layers.0.up.weight", &[4, 8]), own("layers.0.up.bias", &[8])];
        let with = |other: Use| {
            refused(&plan(), &[&first[..], &[own("layers.1.up.weight", &[4, 8]), other]].concat())
        };
        assert_eq!(with(own("layers.1.router", &[4, 2])), None);
        assert_eq!(with(own("layers.1.norm", &[4])), None);
        assert!(with(own("layers.1.up.b", &[8])).unwrap().contains("store *.up.bias tp@0: matches"));
    }
}
