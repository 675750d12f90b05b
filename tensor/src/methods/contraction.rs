//! Tensor contractions of every [`Value`]: einsum of any number of tensors, and mixture-of-experts layers.

use crate::methods::resharding::Resharding;
use crate::methods::value::Value;
use crate::op::{Point, unwind};
use crate::ops::einsum::Einsum;
use crate::ops::experts::{Experts, RowsToExperts, cheaper_gathered, exchange_axes, scattered};
use shardgrad_dist::{Error, Kind, Result};
use std::panic::Location;
use std::rc::Rc;

/// Products of tensors, summed over labels that the result lacks.
pub trait Contraction: Value {
    /// Einsum of any number of tensors: their product, summed over the labels that the output lacks:
    /// `a b, b c, c -> a`, `a b -> b a`, `..m d -> ..m`. Labels are words separated by spaces; `..m` is an ellipsis of
    /// leading dims, as many in each tensor that writes it, and no other label may be named `m_0`. One float dtype.
    ///
    /// A label of one tensor only, and not of the output, is summed first. Then tensors are multiplied from left to
    /// right, each time summing labels that nothing further right needs: put the cheapest product first. Each
    /// product follows the layout rule of its own signature.
    #[doc(alias = "opt_einsum")]
    #[doc(alias = "multi_dot")]
    #[doc(alias = "torch.einsum")]
    #[track_caller]
    #[must_use]
    fn contract(signature: &str, parts: &[&Self]) -> Self {
        let plan = unwind(ContractionPlan::read(signature, parts));
        let mut rest: Vec<(Self, Vec<String>)> = Vec::new();
        for (i, part) in parts.iter().enumerate() {
            let (lone_dims, other_labels) = plan.lone_dims_of(i);
            let summed = if lone_dims.is_empty() { (*part).clone() } else { part.sum_dims(&lone_dims) };
            rest.push((summed, other_labels));
        }
        let mut rest = rest.into_iter();
        let (mut product, mut labels) = rest.next().expect("read with at least one tensor");
        for (i, (part, with)) in (1..).zip(rest) {
            let result = plan.result(&labels, &with, i);
            let text = format!("{}, {} -> {}", labels.join(" "), with.join(" "), result.join(" "));
            product = Self::apply_one(Rc::new(unwind(Einsum::new(&text))), &[&product, &part]);
            labels = result;
        }
        if labels == plan.output {
            return product;
        }
        let order: Vec<usize> =
            plan.output.iter().filter_map(|x| labels.iter().position(|label| label == x)).collect();
        product.permute(&order)
    }

    /// Mixture-of-experts layer: sum over s of p_(m, s) E(x_m), where `index` (i64) selects the expert of each term,
    /// and E(x) = (silu(x gate_e) * (x up_e)) down_e: `[..m, d]`, indices and p `[..m, s]`, gate and up `[e, d, h]`,
    /// down `[e, h, o]` give `[..m, o]`. d, s and o must be unsharded; the result is a partial sum where experts or
    /// hidden units are sharded (expert parallelism). Where one mesh axis shards rows and experts, rows are gathered to
    /// the experts, or token-expert pairs exchanged, whichever moves fewer bytes.
    #[doc(alias = "moe")]
    #[doc(alias = "mixture_of_experts")]
    #[doc(alias = "grouped_mm")]
    #[track_caller]
    #[must_use]
    fn experts(&self, index: &Self, p: &Self, gate: &Self, up: &Self, down: &Self) -> Self
    where
        Self: Resharding,
    {
        let points: [&dyn Point<Self>; 4] = [&(), &(), &(), &()];
        self.experts_general([index, p], [gate, up, down], RowsToExperts::Cheapest, points)
    }

    /// [`Contraction::experts`] with the points [`Experts::ROWS`], [`Experts::INDEX`], [`Experts::SHARES`] and [`Experts::OUT`].
    /// `rows` says how rows reach the experts where one mesh axis shards both after these points.
    #[track_caller]
    #[must_use]
    fn experts_general(
        &self,
        [index, p]: [&Self; 2],
        [gate, up, down]: [&Self; 3],
        rows: RowsToExperts,
        points: [&dyn Point<Self>; 4],
    ) -> Self
    where
        Self: Resharding,
    {
        let site = Location::caller();
        let x = points[Experts::ROWS].pass(self, site);
        let index = points[Experts::INDEX].pass(index, site);
        let p = points[Experts::SHARES].pass(p, site);
        let gathered = match rows {
            RowsToExperts::AsStated => None,
            RowsToExperts::Cheapest => cheaper_gathered(&[&x, &index, &p, gate, up, down].map(Self::layout)),
        };
        let Some([to_rows, to_index, to_shares]) = gathered else {
            // An exchange belongs to the rows, a partial sum to the result.
            let exchanges = exchange_axes(&[&x, &index, &p, gate, up, down].map(Self::layout)).is_some();
            points[if exchanges { Experts::ROWS } else { Experts::OUT }].enter(&x);
            let y = Self::apply_one(Experts::default(), &[&x, &index, &p, gate, up, down]);
            return points[Experts::OUT].pass(&y, site);
        };
        points[Experts::ROWS].enter(&x);
        let rows = x.to_layout(&to_rows);
        points[Experts::INDEX].enter(&x);
        let index = index.to_layout(&to_index);
        points[Experts::SHARES].enter(&x);
        let p = p.to_layout(&to_shares);
        points[Experts::OUT].enter(&x);
        let y = Self::apply_one(Experts::default(), &[&rows, &index, &p, gate, up, down]);
        points[Experts::OUT].pass(&y.to_layout(&scattered(y.layout(), x.layout())), site)
    }
}

impl<V: Value> Contraction for V {}

/// The labels of all tensors, one for each dim.
struct ContractionPlan {
    inputs: Vec<Vec<String>>,
    output: Vec<String>,
}

impl ContractionPlan {
    fn read<V: Value>(signature: &str, parts: &[&V]) -> Result<ContractionPlan> {
        let refuse = |why: String| Err(Error::new(Kind::Shape, format!("contract: `{signature}` {why}")));
        let Some((left, right)) = signature.split_once("->") else {
            return refuse("has no `->`".into());
        };
        let inputs: Vec<Vec<&str>> = left.split(',').map(|t| t.split_whitespace().collect()).collect();
        let output: Vec<&str> = right.split_whitespace().collect();
        if inputs.len() != parts.len() {
            return refuse(format!(
                "has {} tensors on the left, but {} are given",
                inputs.len(),
                parts.len()
            ));
        }
        let mut widths: Vec<(&str, usize)> = Vec::new();
        for (i, (labels, part)) in inputs.iter().zip(parts).enumerate() {
            let ndim = part.layout().ndim();
            let spread = labels.first().filter(|l| l.starts_with(".."));
            let named = labels.len() - usize::from(spread.is_some());
            let width = ndim.checked_sub(named).filter(|&width| spread.is_some() || width == 0);
            let Some(width) = width else {
                return refuse(format!("names {named} dims of argument {i}, which is {}", part.layout()));
            };
            let Some(&name) = spread else { continue };
            match widths.iter().find(|w| w.0 == name) {
                Some((_, other)) if *other != width => {
                    return refuse(format!("uses `{name}` for {other} and for {width} dims"));
                }
                _ => widths.push((name, width)),
            }
        }
        let words = || inputs.iter().chain([&output]).flatten().copied();
        for (spread, _) in &widths {
            if let Some(same) = words().find(|word| is_expansion_of(spread, word)) {
                return refuse(format!("has `{same}`, but `{spread}` expands to labels like `{same}`"))
                    .map_err(|e| e.detail("help", format!("rename `{same}`")));
            }
        }
        let expand = |labels: &[&str]| -> Vec<String> {
            let one = |label: &&str| match widths.iter().find(|w| w.0 == *label) {
                Some((name, width)) => (0..*width).map(|i| format!("{}_{i}", &name[2..])).collect(),
                None => vec![(*label).to_string()],
            };
            labels.iter().flat_map(one).collect()
        };
        let plan =
            ContractionPlan { inputs: inputs.iter().map(|t| expand(t)).collect(), output: expand(&output) };
        let is_label = |l: &String| {
            l.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        let tensors = || plan.inputs.iter().chain([&plan.output]);
        if let Some(bad) = tensors().flatten().find(|l| !is_label(l)) {
            return refuse(format!(
                "has `{bad}`, which is not a label there; write x, or ..x as the first term"
            ));
        }
        let twice =
            |t: &Vec<String>| t.iter().enumerate().find(|(i, x)| t[..*i].contains(x)).map(|(_, x)| x.clone());
        if let Some(x) = tensors().find_map(twice) {
            return refuse(format!("has `{x}` twice in one tensor; take x.diagonal(0) first"));
        }
        if let Some(x) = plan.output.iter().find(|x| !plan.inputs.iter().any(|t| t.contains(x))) {
            return refuse(format!("has `{x}` on the right only"));
        }
        Ok(plan)
    }

    /// The dims of an argument that nothing else needs, and the labels of the others.
    fn lone_dims_of(&self, i: usize) -> (Vec<usize>, Vec<String>) {
        let elsewhere = |x: &String| {
            let others = self.inputs.iter().enumerate().filter(|(j, _)| *j != i);
            self.output.contains(x) || others.into_iter().any(|(_, t)| t.contains(x))
        };
        let labels = &self.inputs[i];
        let lone_dims = (0..labels.len()).filter(|&d| !elsewhere(&labels[d])).collect();
        (lone_dims, labels.iter().filter(|x| elsewhere(x)).cloned().collect())
    }

    /// The labels of the product of everything on the left with argument `i`: the output after the last argument,
    /// else the labels still needed.
    fn result(&self, left: &[String], right: &[String], i: usize) -> Vec<String> {
        if i + 1 == self.inputs.len() {
            return self.output.clone();
        }
        let needed =
            |x: &&String| self.output.contains(x) || self.inputs[i + 1..].iter().any(|t| t.contains(x));
        let new = right.iter().filter(|x| !left.contains(x));
        left.iter().chain(new).filter(needed).cloned().collect()
    }
}

/// Whether a label has a name that an ellipsis expands to: `m_0` for `..m`.
fn is_expansion_of(spread: &str, label: &str) -> bool {
    let index = label.strip_prefix(&spread[2..]).and_then(|rest| rest.strip_prefix('_'));
    index.is_some_and(|index| !index.is_empty() && index.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn contractions_match_hand_computed_values() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
            let y = Tensor::from_host(rank, &[2], &[10.0f64, 1.0])?;
            let sum =
                |signature: &str, parts: &[&Tensor]| Tensor::contract(signature, parts).to_host::<f64>();
            assert_eq!(sum("a b -> b a", &[&x])?, [1.0, 3.0, 2.0, 4.0]);
            assert_eq!(sum("a b -> b", &[&x])?, [4.0, 6.0]);
            assert_eq!(sum("..m -> ", &[&x])?, [10.0]);
            assert_eq!(sum("..m d, d -> ..m", &[&x, &y])?, [12.0, 34.0]);
            assert_eq!(sum("a b, c -> a", &[&x, &y])?, [33.0, 77.0]);
            assert_eq!(sum("a b, b c, c -> a", &[&x, &x, &y])?, [12.0 + 68.0, 36.0 + 136.0]);
            assert_eq!(sum("a, b, c -> c a", &[&y, &y, &y])?, [1100.0, 110.0, 110.0, 11.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn invalid_signatures_are_refused() {
        for bad in [
            "a b",
            "a a -> a",
            "a b -> a c",
            "a -> a",
            "a b, a b -> a",
            "a! b -> a",
            "a ..m -> a",
            "a b -> a a",
            "..m m_0 -> ..m",
            "..m -> ..m m_0",
            "m_17 ..m -> m_17",
            ".. _0 -> ..",
        ] {
            let error = World::run(Mesh::single(), |rank| {
                let x = Tensor::from_host(rank, &[2, 2], &[0.0f32; 4])?;
                let _ = Tensor::contract(bad, &[&x]);
                Ok(())
            })
            .unwrap_err();
            assert_eq!(error.kind(), Kind::Shape, "{bad}: {error}");
            assert!(error.site().is_some_and(|s| s.file().ends_with("contraction.rs")), "{error}");
        }
    }

    #[test]
    fn names_that_an_ellipsis_expands_to_are_refused() {
        let refused = World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
            Tensor::contract("..m k, k m_0 -> ..m", &[&x, &x]).to_host::<f64>()
        });
        let error = refused.unwrap_err();
        assert!(error.message().contains("`..m` expands to labels like `m_0`"), "{error}");
        let help = error.details().iter().find(|d| d.0 == "help").expect("the error has a help line");
        assert!(help.1.contains("rename `m_0`"), "{error}");
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
            let sum = Tensor::contract("..m k, k m_n -> ..m", &[&x, &x]);
            assert_eq!(sum.to_host::<f64>()?, [3.0 + 14.0, 9.0 + 28.0]);
            Ok(())
        })
        .unwrap();
    }
}
