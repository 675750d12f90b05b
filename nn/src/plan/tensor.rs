//! Tensor parallelism: layers split by their outputs (columns), then by their inputs (rows).
//!
//! A pair of layers, the first split by columns and the second by rows, needs one all-reduce forward (of the pending sum
//! that the second leaves) and one backward (of the gradient of what the first reads). Shoeybi et al., "Megatron-LM",
//! arXiv 1909.08053.

use super::{Plan, Subject};

impl Plan {
    /// A plan whose [`Plan::column`] and [`Plan::row`] speak of this axis.
    #[must_use]
    pub fn tensor(axis: &str) -> Plan {
        Plan { split: Some(axis.to_string()), ..Plan::new() }
    }

    /// Linear layers split by their outputs: the weight `[in, out, ..]` on its dim 1, the bias `[out, ..]` on its dim 0.
    #[must_use]
    pub fn column(self, layer: &str) -> Plan {
        self.split_layer("column", layer, [("weight", 1), ("bias", 0)].as_slice())
    }

    /// Linear layers split by their inputs: the weight `[in, ..]` on its dim 0; the bias is added once, after the sum.
    #[must_use]
    pub fn row(self, layer: &str) -> Plan {
        self.split_layer("row", layer, [("weight", 0)].as_slice())
    }

    fn split_layer(mut self, word: &str, layer: &str, parts: &[(&str, usize)]) -> Plan {
        let Some(axis) = self.split.clone() else {
            self.faults.push(format!("{word} {layer}: begin the plan with Plan::tensor(axis)"));
            return self;
        };
        parts.iter().fold(self, |plan, (part, dim)| {
            plan.rule(Subject::Store, &format!("{layer}.{part}"), &format!("{axis}@{dim}"), *part == "bias")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_and_rows_are_rules() {
        let plan = Plan::tensor("tp").column("up").row("down");
        assert_eq!(plan.to_string(), "store up.weight tp@1\nstore up.bias tp@0\nstore down.weight tp@0\n");
        let error = Plan::new().column("up").check().unwrap_err();
        assert!(error.to_string().contains("column up: begin the plan with Plan::tensor(axis)"), "{error}");
    }
}
