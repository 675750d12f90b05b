//! The load of experts in a training step: tokens per expert of each layer, and how far they are from even.

use shardgrad_tensor::StepReport;

/// The name of the tokens per expert of a layer among the auxiliary vectors of a step, after the path of the layer.
pub(crate) const TOKENS_PER_EXPERT: &str = "tokens_per_expert";

/// The load of experts in a step: the tokens of the global batch that each expert of each layer got.
#[doc(alias = "load balance")]
#[doc(alias = "MoE metrics")]
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertLoad {
    /// The path of each layer with experts in the model, and the tokens of its experts, in the order of the loss.
    pub layers: Vec<(String, Vec<f64>)>,
}

impl ExpertLoad {
    /// Returns the load that the loss of a step reports ([`Routing::report_in`](crate::layer::Routing::report_in), and the losses of the models
    /// for a batch); `None` if it reports none.
    #[must_use]
    pub fn of(report: &StepReport) -> Option<ExpertLoad> {
        let layer = |(name, tokens): &(String, Vec<f64>)| {
            let path = name.strip_suffix(TOKENS_PER_EXPERT)?;
            (path.is_empty() || path.ends_with('.'))
                .then(|| (path.trim_end_matches('.').to_string(), tokens.clone()))
        };
        let layers: Vec<(String, Vec<f64>)> = report.auxiliary_vectors.iter().filter_map(layer).collect();
        (!layers.is_empty()).then_some(ExpertLoad { layers })
    }

    /// Returns the imbalance of each layer: the tokens of the expert with most tokens divided by the mean, from 1 to the number of experts.
    pub fn imbalances(&self) -> impl Iterator<Item = f64> + '_ {
        self.layers.iter().map(|(_, tokens)| {
            let mean = tokens.iter().sum::<f64>() / tokens.len() as f64;
            tokens.iter().copied().fold(0.0, f64::max) / mean
        })
    }

    /// Returns the mean imbalance over the layers.
    #[must_use]
    pub fn mean_imbalance(&self) -> f64 {
        self.imbalances().sum::<f64>() / self.layers.len() as f64
    }

    /// Returns the largest imbalance of a layer.
    #[must_use]
    pub fn max_imbalance(&self) -> f64 {
        self.imbalances().fold(0.0, f64::max)
    }

    /// Returns the fewest and the most tokens that an expert of any layer got.
    #[must_use]
    pub fn token_range(&self) -> [f64; 2] {
        let tokens = || self.layers.iter().flat_map(|(_, tokens)| tokens).copied();
        [tokens().fold(f64::INFINITY, f64::min), tokens().fold(0.0, f64::max)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imbalance_is_the_largest_load_over_the_mean_of_each_layer() {
        let load = ExpertLoad {
            layers: vec![
                ("a.mlp".into(), vec![3.0, 1.0, 2.0, 2.0]),
                ("b.mlp".into(), vec![0.0, 0.0, 4.0, 4.0]),
            ],
        };
        assert_eq!(load.imbalances().collect::<Vec<_>>(), [1.5, 2.0]);
        assert_eq!(
            (load.mean_imbalance(), load.max_imbalance(), load.token_range()),
            (1.75, 2.0, [0.0, 4.0])
        );
    }
}
