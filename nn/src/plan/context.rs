//! Context parallelism: the tokens of a row are split, each rank attends with its own queries to the keys of all.
//!
//! Keys and values are gathered where attention reads them, so a block needs two all-gathers forward and two
//! reduce-scatters backward, of keys and of values; each gradient of a parameter is reduced once a step. Grattafiori et
//! al., "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2.

use super::{Plan, Subject};

/// Points and the states in which activations pass them: keys and values, where attention reads those of all tokens, and the mask
/// of a model that has one for all its blocks.
const WHOLE: [(&str, &str); 3] = [("keys", "~"), ("values", "~"), ("mask", "=")];

impl Plan {
    /// Tokens, which are dim 1 of batches, are split over an axis; queries, and all that is computed for each token alone, stay
    /// so. Every rank of the axis holds all parameters and computes with copies of its own, as under [`Plan::data`].
    ///
    /// Attention of a text of its own needs a [`Point`](crate::Point) named `keys` and one named `values`, or is refused. What
    /// mixes tokens in another way is refused too, with the layouts that it could take.
    #[must_use]
    pub fn context(axis: &str) -> Plan {
        let plan = Plan { batch: vec![(axis.to_string(), 1)], ..Plan::new() };
        let plan = plan.rule(Subject::Compute, "*", &format!("{axis}~"), true);
        // A model may have no attention.
        WHOLE.iter().fold(plan, |plan, (point, state)| {
            plan.rule(Subject::Point, point, &format!("{axis}{state}"), true)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_tensor::{DType, Mesh};

    #[test]
    fn tokens_are_split_beside_rows() {
        let plan = Plan::data("dp").and(Plan::context("cp"));
        let layout = |mesh: &str, shape: &[usize]| {
            let mesh = Mesh::parse(mesh).unwrap();
            plan.batch_layout(&mesh, DType::I64, shape).unwrap().to_string()
        };
        assert_eq!(layout("dp=2,cp=3,tp=2", &[8, 65]), "i64[8@dp, 65@cp]");
        assert_eq!(layout("cp=4", &[8, 3]), "i64[8, 3@cp]", "more ranks than tokens");
        assert_eq!(layout("dp=2,cp=2", &[8]), "i64[8@dp]", "what has no tokens is split by its rows");
        assert_eq!(layout("tp=2", &[8, 65]), "i64[8, 65]");
        assert_eq!(
            plan.to_string(),
            "batch dp@0\nbatch cp@1\ncompute * dp~\ncompute * cp~\npoint keys cp~\npoint values cp~\npoint mask cp=\n"
        );
    }

    #[test]
    fn an_axis_splits_rows_or_tokens() {
        let plan = Plan::data("dp").and(Plan::context("cp")).and(Plan::context("dp"));
        let error = plan.check().unwrap_err().to_string();
        assert!(error.contains("batch dp@1: the axis splits dim 0 of batches already"), "{error}");
        assert!(Plan::context("cp").and(Plan::context("cp")).check().is_ok());
    }
}
