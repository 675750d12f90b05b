//! A plan: which mesh axes split which parameters and activations. Plain data, written by name.

mod rule;
mod data;
mod context;
mod experts;
mod bert;
mod gpt2;
mod llama;
mod pipeline;
mod tensor;

pub use pipeline::{PassOrder, Pipeline};
pub(crate) use rule::Subject;

use crate::name::{matches, nearest};
use rule::Rule;
use shardgrad_tensor::{Axis, DType, Error, Kind, Layout, Mesh, Result, State};
use std::fmt;

/// An ordered list of rules, of which a later one wins over an earlier one for the same name and axis.
///
/// A rule is a pattern over names (see [`matches()`]) and states, one word per axis: `tp@1` splits
/// dim 1 over axis `tp`, `dp~` makes copies with gradients of their own, `tp=` one copy for all, `tp+` a pending sum.
/// `tp@1|@2` chooses: the first that leaves no rank without a part, or else the one that leaves the fewest.
/// Several axes on one dim split it in the order of their rules, the first outermost. Axes that a mesh does not have
/// are passed over, so one plan serves many meshes. What no rule names is one copy for all (`=`), or, at a point,
/// as it comes.
///
/// ```
/// use shardgrad_nn::Plan;
/// let plan = Plan::data("dp").and(Plan::tensor("tp").column("up").row("down")).point("down.out", "tp@0");
/// # let _ = plan;
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    rules: Vec<Rule>,
    /// Axes that split batches, and the dims that they split: rows are dim 0, tokens dim 1. Outermost first.
    batch: Vec<(String, usize)>,
    /// The axis of which `column` and `row` speak.
    split: Option<String>,
    /// The axis over which layers are spread.
    pipeline: Option<Pipeline>,
    /// What was wrong with the texts; told when the plan is used.
    faults: Vec<String>,
}

impl Plan {
    /// A plan without rules: every rank holds everything and computes the same.
    #[must_use]
    pub fn new() -> Plan {
        Plan::default()
    }

    /// How parameters are stored: shards and single copies only (`tp@1`, `tp=`).
    #[must_use]
    pub fn store(self, pattern: &str, states: &str) -> Plan {
        self.rule(Subject::Store, pattern, states, false)
    }

    /// How parameters are computed with, where that is not how they are stored: the route there is taken once a step,
    /// and its adjoint brings the gradient back.
    #[must_use]
    pub fn compute(self, pattern: &str, states: &str) -> Plan {
        self.rule(Subject::Compute, pattern, states, false)
    }

    /// How activations lie at points.
    #[must_use]
    pub fn point(self, pattern: &str, states: &str) -> Plan {
        self.rule(Subject::Point, pattern, states, false)
    }

    /// The rules of this plan, then those of another.
    #[must_use]
    pub fn and(mut self, other: Plan) -> Plan {
        self.rules.extend(other.rules);
        for (axis, dim) in other.batch {
            match self.batch.iter().find(|(known, _)| *known == axis) {
                Some((_, known)) if *known != dim => {
                    self.faults
                        .push(format!("batch {axis}@{dim}: the axis splits dim {known} of batches already"));
                }
                Some(_) => {}
                None => self.batch.push((axis, dim)),
            }
        }
        self.split = other.split.or(self.split);
        self.pipeline = other.pipeline.or(self.pipeline);
        self.faults.extend(other.faults);
        self
    }

    fn rule(mut self, subject: Subject, pattern: &str, states: &str, optional: bool) -> Plan {
        if states.split_whitespace().next().is_none() {
            self.faults.push(format!("{subject} {pattern}: no state is given"));
        }
        for word in states.split_whitespace() {
            match Rule::read(subject, pattern, word, optional) {
                Ok(rule) => self.rules.push(rule),
                Err(why) => self.faults.push(format!("{subject} {pattern} {word}: {why}")),
            }
        }
        self
    }

    /// The layout of a batch whose rows are its first dim, and whose tokens, if it has a second one, are that: split over the
    /// batch axes that the mesh has.
    ///
    /// # Errors
    /// `Kind::Config` for a plan with a text that is no rule; `Kind::Shape` for a scalar.
    pub fn batch_layout(&self, mesh: &Mesh, dtype: DType, shape: &[usize]) -> Result<Layout> {
        self.check()?;
        if shape.is_empty() {
            return Err(Error::new(Kind::Shape, "a batch has rows, so at least one dim"));
        }
        let axes = self.batch.iter().filter(|(_, dim)| *dim < shape.len());
        let axes = axes.filter_map(|(name, dim)| Some((mesh.axis(name)?, State::Shard(*dim))));
        Ok(axes.fold(Layout::invariant(mesh, dtype, shape), |l, (axis, state)| l.with_state(axis, state)))
    }

    /// Refuses a plan with a text that is no rule.
    pub(crate) fn check(&self) -> Result<()> {
        if self.faults.is_empty() {
            return Ok(());
        }
        let error =
            Error::new(Kind::Config, format!("{} rule(s) of the plan cannot be read", self.faults.len()));
        Err(self.faults.iter().fold(error, |e, fault| e.detail("rule", fault)))
    }

    /// The states that the rules give to a name (of something of this shape, if it is known), in the order of the rules that win. Every rule that matches is marked
    /// in `used`, whether or not the mesh has its axis.
    pub(crate) fn states(
        &self,
        subject: Subject,
        (name, shape): (&str, Option<&[usize]>),
        mesh: &Mesh,
        used: &mut [bool],
    ) -> Vec<(Axis, State)> {
        let mut states: Vec<(Axis, State)> = Vec::new();
        for (rule, used) in self.rules.iter().zip(used) {
            if rule.subject != subject || !matches(&rule.pattern, name) {
                continue;
            }
            *used = true;
            if let Some(axis) = mesh.axis(&rule.axis).filter(|a| mesh.size(*a) > 1) {
                states.retain(|(a, _)| *a != axis);
                states.push((axis, rule.state(shape, mesh.size(axis))));
            }
        }
        states
    }

    /// The number of rules.
    pub(crate) fn num_rules(&self) -> usize {
        self.rules.len()
    }

    /// Refuses rules that matched nothing; `params` and `points` are the names that there are.
    pub(crate) fn check_used(&self, used: &[bool], params: &[&str], points: &[&str]) -> Result<()> {
        let lost: Vec<&Rule> =
            self.rules.iter().zip(used).filter(|(r, used)| !**used && !r.optional).map(|(r, _)| r).collect();
        if lost.is_empty() {
            return Ok(());
        }
        let error = Error::new(
            Kind::Config,
            format!("{} rule(s) of the plan match nothing in the model", lost.len()),
        );
        Err(lost.into_iter().fold(error, |error, rule| {
            let (what, names) = match rule.subject {
                Subject::Point => ("points", points),
                Subject::Store | Subject::Compute => ("parameters", params),
            };
            let near = nearest(&rule.pattern, names.iter().copied());
            let near = if near.is_empty() {
                "there are none".to_string()
            } else {
                format!("nearest: {}", near.join(", "))
            };
            error.detail("rule", format!("{rule}: no such {what}; {near}"))
        }))
    }
}

/// One rule a line, in order: the batch axes first.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pipeline.iter().try_for_each(|pipeline| writeln!(f, "{pipeline}"))?;
        self.batch.iter().try_for_each(|(axis, dim)| writeln!(f, "batch {axis}@{dim}"))?;
        self.rules.iter().try_for_each(|rule| writeln!(f, "{rule}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(plan: &Plan, mesh: &str, name: &str) -> String {
        let mesh = Mesh::parse(mesh).unwrap();
        let mut used = vec![false; plan.num_rules()];
        let states = plan.states(Subject::Store, (name, None), &mesh, &mut used);
        states.iter().map(|(a, s)| format!("{}{s}", mesh.name(*a))).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn later_rules_win_axis_by_axis() {
        let plan =
            Plan::new().store("*.weight", "tp@1 dp@0").store("b.weight", "tp@0").store("c.weight", "tp=");
        assert_eq!(stored(&plan, "dp=2,tp=2", "a.weight"), "tp@1 dp@0");
        assert_eq!(stored(&plan, "dp=2,tp=2", "b.weight"), "dp@0 tp@0");
        assert_eq!(stored(&plan, "tp=2,dp=2", "c.weight"), "dp@0 tp=");
        assert_eq!(stored(&plan, "dp=2,tp=1", "a.weight"), "dp@0");
        assert_eq!(stored(&plan, "", "a.weight"), "");
        assert_eq!(stored(&plan, "dp=2", "a.bias"), "");
    }

    #[test]
    fn texts_that_are_no_rules_are_told_all_at_once() {
        for good in ["tp@0", "a_1@12", "tp~", "tp=", "tp+", "a~ b@1"] {
            assert!(Plan::new().point("*", good).check().is_ok(), "{good}");
        }
        for bad in ["tp", "@1", "tp@", "tp@x", "~", "t-p@1", "tp@-1", "tp!", "", "tp@1@2", "a~ b"] {
            assert_eq!(Plan::new().point("*", bad).check().unwrap_err().kind(), Kind::Config, "{bad}");
        }
        let error = Plan::new().store("w", "tp~").and(Plan::new().point("p", "tp")).check().unwrap_err();
        assert_eq!(error.details().len(), 2);
        assert!(
            error.to_string().contains("store w tp~: parameters are stored as shards or as `=`"),
            "{error}"
        );
    }

    #[test]
    fn a_batch_is_split_over_the_batch_axes_that_there_are() {
        let plan = Plan::data("dp").and(Plan::data("fsdp")).and(Plan::data("dp"));
        let layout = |mesh| {
            let mesh = Mesh::parse(mesh).unwrap();
            plan.batch_layout(&mesh, DType::I64, &[8, 5]).unwrap().to_string()
        };
        assert_eq!(layout("tp=2"), "i64[8, 5]");
        assert_eq!(layout("tp=2,dp=2"), "i64[8@dp, 5]");
        assert_eq!(layout("fsdp=2,dp=2"), "i64[8@dp@fsdp, 5]");
        assert!(plan.batch_layout(&Mesh::single(), DType::I64, &[]).is_err());
    }

    #[test]
    fn rules_that_match_nothing_name_the_nearest() {
        let plan = Plan::new().store("up.wieght", "tp@1").point("dwn.out", "tp=").compute("up.weight", "dp~");
        let mut used = vec![false; 3];
        let _ = plan.states(Subject::Compute, ("up.weight", None), &Mesh::single(), &mut used);
        assert_eq!(used, [false, false, true]);
        let text = plan.check_used(&used, &["up.weight", "up.bias"], &["down.out"]).unwrap_err().to_string();
        assert!(text.contains("2 rule(s)"), "{text}");
        assert!(text.contains("store up.wieght tp@1: no such parameters; nearest: up.weight"), "{text}");
        assert!(text.contains("point dwn.out tp=: no such points; nearest: down.out"), "{text}");
        assert!(plan.check_used(&[true; 3], &[], &[]).is_ok());
    }
}
