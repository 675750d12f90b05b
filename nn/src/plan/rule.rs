//! One rule of a plan: a target, a name pattern, an axis and a placement, or several placements to choose from by shape.

use shardgrad_tensor::Placement;
use std::borrow::Cow;
use std::fmt;

/// The mark, in the text of a plan, of a rule or of regathered points that may match nothing.
pub(super) const OPTIONAL: &str = "optional";

/// What a rule applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RuleTarget {
    /// The stored layout of a parameter.
    Store,
    /// The layout in which layers use a parameter.
    Compute,
    /// The layout of an activation at a point.
    Point,
}

/// Whether a rule must match a name of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// The rule must match.
    Required,
    /// The rule may match nothing, as for the bias of a layer that may have none.
    Optional,
    /// At least one rule of a kind must match: dense MLPs and experts are two forms of one kind.
    OneOf(Cow<'static, str>),
}

impl Presence {
    /// At least one rule of a kind must match.
    pub(super) const fn one_of(kind: &'static str) -> Presence {
        Presence::OneOf(Cow::Borrowed(kind))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) target: RuleTarget,
    pub(super) pattern: String,
    pub(super) axis: String,
    choice: Choice,
    pub(super) presence: Presence,
}

/// The placements that a rule allows.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    /// The listed ones, in order of preference; usually one.
    Listed(Vec<Placement>),
    /// A shard of any dim, or a copy.
    AnyDim,
}

impl Rule {
    /// Parses a word such as `tp@1`, `tp~` or `tp@1|@2`. The error says why the word is not a rule.
    pub(super) fn read(
        target: RuleTarget,
        pattern: &str,
        word: &str,
        presence: Presence,
    ) -> Result<Rule, String> {
        let (axis, choice) = parse(word)
            .ok_or_else(|| format!("`{word}` is not a placement; write axis@dim, axis~, axis= or axis+"))?;
        let is_stored =
            |placement: &Placement| !matches!(placement, Placement::Partial | Placement::Replicate);
        match &choice {
            Choice::Listed(listed) if target == RuleTarget::Store && !listed.iter().all(is_stored) => {
                return Err("stored parameters are sharded (axis@dim) or invariant (axis=)".to_string());
            }
            Choice::Listed(listed) if listed.len() == 1 => {}
            Choice::Listed(_) | Choice::AnyDim if target == RuleTarget::Point => {
                return Err("a point takes one placement, not a choice".to_string());
            }
            Choice::Listed(_) | Choice::AnyDim => {}
        }
        Ok(Rule { target, pattern: pattern.to_string(), axis: axis.to_string(), choice, presence })
    }

    /// Chooses the placement for a parameter of a shape over an axis of `size` ranks: the first that leaves no rank with an empty shard,
    /// or else the one with the fewest empty shards. A dim that the shape does not have counts as empty on every rank, so that
    /// another placement is chosen if there is one. Without a shape, the first. `None` if the rule allows any dim.
    pub(super) fn placement(&self, shape: Option<&[usize]>, size: usize) -> Option<Placement> {
        let Choice::Listed(placements) = &self.choice else { return None };
        let parts = |placement: &Placement| match (placement, shape) {
            (Placement::Shard(dim), Some(shape)) => shape.get(*dim).map_or(0, |extent| size.min(*extent)),
            _ => size,
        };
        let mut best = placements[0];
        for placement in &placements[1..] {
            if parts(placement) > parts(&best) {
                best = *placement;
            }
        }
        Some(best)
    }

    /// The axis and the placements as text: `tp@1|@2`.
    pub(super) fn word(&self) -> String {
        let choice = match &self.choice {
            Choice::Listed(listed) => listed.iter().map(Placement::to_string).collect::<Vec<_>>().join("|"),
            Choice::AnyDim => "@*".to_string(),
        };
        format!("{}{choice}", self.axis)
    }
}

/// Parses an axis and `@*`, or `@dim`, `~`, `=` or `+`, or several of these separated by `|`.
fn parse(word: &str) -> Option<(&str, Choice)> {
    let (axis, placements) = word.split_at(word.find(['@', '~', '=', '+'])?);
    let parse_placement = |text: &str| match (text, text.strip_prefix('@')) {
        (_, Some(dim)) => dim.parse().ok().map(Placement::Shard),
        ("~", _) => Some(Placement::Replicate),
        ("=", _) => Some(Placement::Invariant),
        ("+", _) => Some(Placement::Partial),
        _ => None,
    };
    let choice = match placements {
        "@*" => Some(Choice::AnyDim),
        listed => listed.split('|').map(parse_placement).collect::<Option<_>>().map(Choice::Listed),
    };
    let is_name = !axis.is_empty() && axis.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    Some((axis, choice?)).filter(|_| is_name)
}

impl fmt::Display for RuleTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RuleTarget::Store => "store",
            RuleTarget::Compute => "compute",
            RuleTarget::Point => "point",
        })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.target, self.pattern, self.word())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(word: &str, shape: &[usize], size: usize) -> String {
        let rule = Rule::read(RuleTarget::Compute, "x", word, Presence::Required).unwrap();
        rule.placement(Some(shape), size).unwrap().to_string()
    }

    #[test]
    fn the_first_state_without_empty_shards_is_chosen() {
        assert_eq!(chosen("tp@1|@2", &[9, 4, 2], 4), "@1");
        assert_eq!(chosen("tp@1|@2", &[9, 2, 4], 4), "@2");
        assert_eq!(chosen("tp@1|@2", &[9, 3, 2], 4), "@1", "neither fits; @1 leaves one rank empty");
        assert_eq!(chosen("tp@1|@2", &[9, 2, 3], 4), "@2");
        assert_eq!(chosen("tp@1|=", &[9, 2], 4), "=");
        assert_eq!(chosen("tp@1|~", &[9, 2], 2), "@1");
        assert_eq!(chosen("tp@1", &[9, 2], 4), "@1", "a single placement");
        assert_eq!(chosen("tp@5", &[9, 2], 4), "@5", "a missing dim without a choice is rejected later");
    }

    #[test]
    fn a_choice_passes_over_dims_that_the_parameter_does_not_have() {
        assert_eq!(chosen("tp@5|~", &[9, 2], 4), "~");
        assert_eq!(chosen("dp@1|=", &[9], 2), "=");
        assert_eq!(chosen("dp@0|=", &[], 2), "=", "a scalar");
        assert_eq!(chosen("dp@1|@0|=", &[9], 2), "@0");
        assert_eq!(chosen("dp@2|@1", &[9, 1], 2), "@1", "one empty shard instead of no dim");
    }

    #[test]
    fn choices_of_states_are_parsed_and_displayed() {
        let rule =
            |target, word| Rule::read(target, "a.b", word, Presence::Required).map(|rule| rule.to_string());
        assert_eq!(rule(RuleTarget::Store, "tp@1|@2|="), Ok("store a.b tp@1|@2|=".to_string()));
        assert_eq!(rule(RuleTarget::Store, "tp@*"), Ok("store a.b tp@*".to_string()));
        assert!(rule(RuleTarget::Point, "tp@*").unwrap_err().contains("a point takes one placement"));
        assert!(rule(RuleTarget::Store, "tp@1|~").unwrap_err().contains("sharded (axis@dim) or invariant"));
        assert!(rule(RuleTarget::Point, "tp@1|~").unwrap_err().contains("a point takes one placement"));
        for bad in ["tp@1|", "tp|@1", "tp@1|2", "tp@1||@2", "tp=~", "|", "tp@*|="] {
            assert!(rule(RuleTarget::Compute, bad).unwrap_err().contains("is not a placement"), "{bad}");
        }
    }
}
