//! How one training step differs under two plans (`explain --diff`), or in two orders of its sums (`explain --deterministic mesh`).

use super::{StepSummary, format_bytes, phase};
use serde_json::{Value as Json, json};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

/// A quantity of the step under the first and the second plan; `None` where a plan does not have it.
type Pair<T> = [Option<T>; 2];

/// The axes, the phase and the name of collectives.
type CallKind = [String; 3];

/// What differs between the steps of one rank under two plans.
pub(super) struct PlanDiff {
    rank: usize,
    /// Parameters by name: stored layout and local bytes.
    parameters: Vec<(String, Pair<(String, u64)>)>,
    /// Activations by module path, in order: layouts.
    activations: Vec<(String, Pair<String>)>,
    /// Collectives by axes, phase and name: calls and bytes.
    collectives: Vec<(CallKind, Pair<(u64, u64)>)>,
    /// The bytes of all collectives.
    moved_bytes: [u64; 2],
    flops: [u64; 2],
    peak_bytes: [u64; 2],
}

impl PlanDiff {
    /// Compares the steps of a rank.
    pub(super) fn between(mesh: &Mesh, steps: [&StepSummary; 2]) -> PlanDiff {
        let parameters = |step: &StepSummary| {
            let entry =
                |(name, layout, bytes): &(String, Layout, u64)| (name.clone(), (layout.to_string(), *bytes));
            step.parameters.iter().map(entry).collect::<Vec<_>>()
        };
        // A path may have several activations: they are numbered, so that equal numbers are compared.
        let activations = |step: &StepSummary| {
            let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
            let mut list = Vec::new();
            for (path, layout) in &step.activations {
                let times = seen.entry(path).or_default();
                *times += 1;
                let name = if *times == 1 { path.clone() } else { format!("{path} ({times})") };
                list.push((name, layout.to_string()));
            }
            list
        };
        let collectives = |step: &StepSummary| {
            let mut totals: BTreeMap<CallKind, (u64, u64)> = BTreeMap::new();
            for r in &step.records {
                let key = [mesh.names(r.axes), phase(r.phase).to_string(), r.op.to_string()];
                let total = totals.entry(key).or_default();
                *total = (total.0 + 1, total.1 + r.bytes);
            }
            totals.into_iter().collect::<Vec<_>>()
        };
        PlanDiff {
            rank: steps[0].rank,
            parameters: differing(steps.map(parameters)),
            activations: differing(steps.map(activations)),
            collectives: differing(steps.map(collectives)),
            moved_bytes: steps.map(|step| step.records.iter().map(|record| record.bytes).sum()),
            flops: steps.map(|step| step.cost.flops),
            peak_bytes: steps.map(|step| step.peak_bytes),
        }
    }

    /// Formats the differences as text: first the value under the first plan, then that under the second.
    pub(super) fn text(&self, mesh: &Mesh) -> String {
        let mut out = format!("rank {}\n", mesh.describe(self.rank));
        let stored = |(layout, bytes): &(String, u64)| format!("{layout} {}", format_bytes(*bytes));
        let change = |(name, pair): &(String, Pair<(String, u64)>)| (name.clone(), arrow(pair, stored));
        section(&mut out, "parameters", self.parameters.iter().map(change).collect());
        let change = |(path, pair): &(String, Pair<String>)| (path.clone(), arrow(pair, String::clone));
        section(&mut out, "activations per microbatch", self.activations.iter().map(change).collect());
        out.push_str(&self.totals());
        out
    }

    /// Formats the differences of collectives, FLOPs and memory as text.
    pub(super) fn totals(&self) -> String {
        let mut out = String::new();
        let total = |(calls, bytes): &(u64, u64)| format!("{calls} calls {}", format_bytes(*bytes));
        let change = |([axes, phase, op], pair): &(CallKind, Pair<(u64, u64)>)| {
            (format!("{axes:<6} {phase:<8} {op:<14}"), arrow(pair, total))
        };
        section(&mut out, "collectives", self.collectives.iter().map(change).collect());
        let [before, after] = self.moved_bytes.map(format_bytes);
        let _ = writeln!(out, "\ntotals\n  collectives {before} -> {after}");
        let [before, after] = self.flops.map(|flops| flops as f64 / 1e9);
        let _ = writeln!(out, "  compute {before:.2} -> {after:.2} GFLOP");
        let [before, after] = self.peak_bytes.map(format_bytes);
        let _ = writeln!(out, "  peak memory {before} -> {after}");
        out
    }

    /// Prints the differences as JSON, one object per line; `null` where a plan does not have something.
    pub(super) fn print_json(&self) {
        let rank = self.rank;
        for (name, pair) in &self.parameters {
            let layouts = pair.each_ref().map(|entry| entry.as_ref().map(|(layout, _)| layout));
            let bytes = pair.each_ref().map(|entry| entry.as_ref().map(|(_, bytes)| bytes));
            println!(
                "{}",
                json!({"kind": "parameter", "rank": rank, "name": name, "layouts": layouts, "bytes": bytes})
            );
        }
        for (path, layouts) in &self.activations {
            println!("{}", json!({"kind": "activation", "rank": rank, "path": path, "layouts": layouts}));
        }
        for ([axes, phase, op], pair) in &self.collectives {
            let [calls, bytes] =
                [0, 1].map(|which| pair.map(|total| total.map(|(calls, bytes)| [calls, bytes][which])));
            println!(
                "{}",
                json!({"kind": "collective", "rank": rank, "axes": axes, "phase": phase, "op": op,
                "calls": calls, "bytes": bytes})
            );
        }
        println!("{}", self.as_json("total"));
    }

    /// Returns the totals as JSON.
    pub(super) fn as_json(&self, kind: &str) -> Json {
        let PlanDiff { rank, moved_bytes, flops, peak_bytes, .. } = self;
        json!({"kind": kind, "rank": rank, "collective_bytes": moved_bytes, "flops": flops, "peak_bytes": peak_bytes})
    }
}

/// Appends a list of differences under a title.
fn section(out: &mut String, title: &str, lines: Vec<(String, String)>) {
    let _ = writeln!(out, "\n{title}{}", if lines.is_empty() { ": equal" } else { "" });
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines.iter().for_each(|(name, change)| {
        let _ = writeln!(out, "  {name:<width$}  {change}");
    });
}

/// Formats a change as `before -> after`.
fn arrow<T, D: Display>(pair: &Pair<T>, text: impl Fn(&T) -> D) -> String {
    let [before, after] = pair
        .each_ref()
        .map(|value| value.as_ref().map_or("none".to_string(), |value| text(value).to_string()));
    format!("{before} -> {after}")
}

/// The entries of two lists whose values differ, in the order of the first list, then of the second.
fn differing<K: PartialEq + Clone, T: PartialEq + Clone>(lists: [Vec<(K, T)>; 2]) -> Vec<(K, Pair<T>)> {
    let value = |which: usize, key: &K| lists[which].iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
    let mut keys: Vec<&K> = lists[0].iter().map(|(key, _)| key).collect();
    keys.extend(lists[1].iter().map(|(key, _)| key).filter(|key| value(0, key).is_none()));
    let pairs = keys.into_iter().map(|key| (key.clone(), [value(0, key), value(1, key)]));
    pairs.filter(|(_, [before, after])| before != after).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_differing_entries_are_listed_in_order() {
        let list = |text: &str| {
            let entry = |word: &str| word.split_once('=').map(|(k, v)| (k.to_string(), v.to_string()));
            text.split_whitespace().filter_map(entry).collect::<Vec<_>>()
        };
        let found = differing([list("a=1 b=2 c=3"), list("d=5 c=4 a=1")]);
        let text: Vec<String> =
            found.iter().map(|(k, pair)| format!("{k}: {}", arrow(pair, String::clone))).collect();
        assert_eq!(text, ["b: 2 -> none", "c: 3 -> 4", "d: none -> 5"]);
        assert!(differing([list("a=1"), list("a=1")]).is_empty());
    }
}
