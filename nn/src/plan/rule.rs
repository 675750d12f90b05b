//! One rule of a plan: whose, over which axis, in which state; or in which of several states, by what there is to split.

use shardgrad_tensor::State;
use std::fmt;

/// What a rule speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// How a parameter is stored.
    Store,
    /// How a parameter is computed with.
    Compute,
    /// How an activation lies at a point.
    Point,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) subject: Subject,
    pub(super) pattern: String,
    pub(super) axis: String,
    /// What is to be chosen from, the best first; mostly one.
    states: Vec<State>,
    /// Whether it may match nothing (the bias of a layer that may have none).
    pub(super) optional: bool,
}

impl Rule {
    /// Reads a word such as `tp@1`, `tp~` or `tp@1|@2`; says why if it is no rule.
    pub(super) fn read(subject: Subject, pattern: &str, word: &str, optional: bool) -> Result<Rule, String> {
        let (axis, states) = parse(word)
            .ok_or_else(|| format!("`{word}` is no state; write axis@dim, axis~, axis= or axis+"))?;
        let is_stored = |state: &State| !matches!(state, State::Partial | State::Replicate);
        if subject == Subject::Store && !states.iter().all(is_stored) {
            return Err("parameters are stored as shards or as `=`".to_string());
        }
        if subject == Subject::Point && states.len() > 1 {
            return Err("an activation has one state at a point".to_string());
        }
        Ok(Rule { subject, pattern: pattern.to_string(), axis: axis.to_string(), states, optional })
    }

    /// The state for something of a shape, over an axis of `size` ranks: the first that leaves no rank without a part, or
    /// else the one that leaves the fewest. Without a shape, the first.
    pub(super) fn state(&self, shape: Option<&[usize]>, size: usize) -> State {
        let parts = |state: &State| match (state, shape) {
            (State::Shard(dim), Some(shape)) => shape.get(*dim).map_or(size, |extent| size.min(*extent)),
            _ => size,
        };
        let mut best = self.states[0];
        for state in &self.states[1..] {
            if parts(state) > parts(&best) {
                best = *state;
            }
        }
        best
    }
}

/// Reads an axis and `@dim`, `~`, `=` or `+`, or several of these with `|` between them.
fn parse(word: &str) -> Option<(&str, Vec<State>)> {
    let (axis, states) = word.split_at(word.find(['@', '~', '=', '+'])?);
    let one = |text: &str| match (text, text.strip_prefix('@')) {
        (_, Some(dim)) => dim.parse().ok().map(State::Shard),
        ("~", _) => Some(State::Replicate),
        ("=", _) => Some(State::Invariant),
        ("+", _) => Some(State::Partial),
        _ => None,
    };
    let states: Option<Vec<State>> = states.split('|').map(one).collect();
    let is_name = !axis.is_empty() && axis.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    Some((axis, states?)).filter(|_| is_name)
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Subject::Store => "store",
            Subject::Compute => "compute",
            Subject::Point => "point",
        })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let states: Vec<String> = self.states.iter().map(State::to_string).collect();
        write!(f, "{} {} {}{}", self.subject, self.pattern, self.axis, states.join("|"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(word: &str, shape: &[usize], size: usize) -> String {
        Rule::read(Subject::Compute, "x", word, false).unwrap().state(Some(shape), size).to_string()
    }

    #[test]
    fn the_first_state_that_serves_every_rank_is_chosen() {
        assert_eq!(chosen("tp@1|@2", &[9, 4, 2], 4), "@1");
        assert_eq!(chosen("tp@1|@2", &[9, 2, 4], 4), "@2");
        assert_eq!(chosen("tp@1|@2", &[9, 3, 2], 4), "@1", "neither does; three ranks have a part");
        assert_eq!(chosen("tp@1|@2", &[9, 2, 3], 4), "@2");
        assert_eq!(chosen("tp@1|=", &[9, 2], 4), "=");
        assert_eq!(chosen("tp@1|~", &[9, 2], 2), "@1");
        assert_eq!(chosen("tp@1", &[9, 2], 4), "@1", "there is no choice");
        assert_eq!(chosen("tp@5|~", &[9, 2], 4), "@5", "a dim that is not there is refused later");
    }

    #[test]
    fn choices_are_read_and_written() {
        let rule = |subject, word| Rule::read(subject, "a.b", word, false).map(|rule| rule.to_string());
        assert_eq!(rule(Subject::Store, "tp@1|@2|="), Ok("store a.b tp@1|@2|=".to_string()));
        assert!(rule(Subject::Store, "tp@1|~").unwrap_err().contains("stored as shards"));
        assert!(rule(Subject::Point, "tp@1|~").unwrap_err().contains("one state at a point"));
        for bad in ["tp@1|", "tp|@1", "tp@1|2", "tp@1||@2", "tp=~", "|"] {
            assert!(rule(Subject::Compute, bad).unwrap_err().contains("is no state"), "{bad}");
        }
    }
}
