//! The order of the tokens of rows before they are sharded, which balances causal attention over the ranks of a ring.

use super::batch::Batch;
use shardgrad::dist::Mesh;
use shardgrad::nn::{ModelConfig, Plan, zigzag_order};

/// The order in which the tokens of a row are sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TokenOrder {
    /// As in the row.
    #[default]
    Sequential,
    /// Each shard is a chunk from the head of the row and its mirror image from the tail ([`zigzag_order`]), so that the ranks of a causal
    /// ring compute equally many scores. A batch then has segment ids and positions, by which attention masks and embeds.
    Zigzag {
        /// The number of shards of a row.
        num_shards: usize,
    },
}

impl TokenOrder {
    /// Returns the order for a model without dropout, on a device that skips the tiles of scores that no query sees, as the CPU does:
    /// zigzag where the plan runs causal attention as a ring.
    #[must_use]
    pub(crate) fn without_dropout(config: &ModelConfig, plan: &Plan, mesh: &Mesh) -> TokenOrder {
        match plan.num_ring_shards(mesh) {
            num_shards if num_shards > 1 && config.is_causal() => TokenOrder::Zigzag { num_shards },
            _ => TokenOrder::Sequential,
        }
    }

    /// Returns the order for training on such a device. Dropout masks are functions of the index in the batch: with dropout the tokens
    /// keep their order, so that the losses do not depend on the mesh.
    #[must_use]
    pub(crate) fn of_training(config: &ModelConfig, plan: &Plan, mesh: &Mesh) -> TokenOrder {
        match config.has_dropout() {
            true => TokenOrder::Sequential,
            false => TokenOrder::without_dropout(config, plan, mesh),
        }
    }

    /// Returns this order on the CPU, and that of the row on a GPU, which computes all tiles of scores of tokens with positions.
    #[must_use]
    pub(crate) fn on_host(self, is_on_host: bool) -> TokenOrder {
        if is_on_host { self } else { TokenOrder::Sequential }
    }

    /// Returns the positions of the tokens of a row of `seq` tokens, in this order.
    fn positions(self, seq: usize) -> Vec<usize> {
        match self {
            TokenOrder::Sequential => (0..seq).collect(),
            TokenOrder::Zigzag { num_shards } => zigzag_order(seq, num_shards),
        }
    }

    /// Brings the tokens of rows of `seq` tokens into this order, and appends the columns of segment ids and positions if it is not
    /// that of the row.
    pub(crate) fn apply(self, batch: &mut Batch, seq: usize) {
        if self == TokenOrder::Sequential {
            return;
        }
        let positions = self.positions(seq);
        let num_rows = batch.inputs.len() / seq.max(1);
        for column in [&mut batch.inputs, &mut batch.targets].into_iter().chain(&mut batch.extra) {
            *column =
                column.chunks(seq.max(1)).flat_map(|row| positions.iter().map(move |&at| row[at])).collect();
        }
        let positions: Vec<i64> = positions.iter().map(|&position| position as i64).collect();
        batch.extra.extend([vec![0; num_rows * seq], positions.repeat(num_rows)]);
    }

    /// Returns the number of causal scores that each of `num_shards` ranks computes for a row of `seq` tokens, windows aside.
    #[must_use]
    pub(crate) fn scores_per_shard(self, seq: usize, num_shards: usize) -> Vec<u64> {
        let positions = self.positions(seq);
        let start = |shard: usize| (shard as u128 * seq as u128 / num_shards as u128) as usize;
        // The token at position p sees p + 1 keys.
        let scores = |shard: usize| {
            positions[start(shard)..start(shard + 1)].iter().map(|&position| position as u64 + 1).sum()
        };
        (0..num_shards).map(scores).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;
    use shardgrad::nn::LanguageModel;

    fn order(preset: &str, mesh: &str, ring: bool, dropout: f64) -> TokenOrder {
        let config = ModelConfig::preset(preset).unwrap().with_dropout(dropout);
        let plan = LanguageModel::plan(&config);
        let plan = if ring { plan.ring() } else { plan };
        TokenOrder::of_training(&config, &plan, &Mesh::parse(mesh).unwrap())
    }

    #[test]
    fn causal_rings_without_dropout_pair_chunks() {
        let zigzag = |num_shards| TokenOrder::Zigzag { num_shards };
        for preset in ["tiny", "llama-tiny", "mixtral-tiny"] {
            assert_eq!(order(preset, "cp=2", true, 0.0), zigzag(2), "{preset}");
            assert_eq!(order(preset, "pp=2,dp=2,cp=3,tp=2", true, 0.0), zigzag(3), "{preset}");
            for (mesh, ring, dropout) in
                [("cp=2", false, 0.0), ("cp=1", true, 0.0), ("dp=2", true, 0.0), ("cp=2", true, 0.1)]
            {
                assert_eq!(order(preset, mesh, ring, dropout), TokenOrder::Sequential, "{preset} on {mesh}");
            }
        }
        assert_eq!(order("bert-base", "cp=2", true, 0.0), TokenOrder::Sequential, "not causal");
        assert_eq!(zigzag(2).on_host(true), zigzag(2));
        assert_eq!(zigzag(2).on_host(false), TokenOrder::Sequential);
    }

    #[test]
    fn a_token_keeps_its_target_and_its_position() {
        let seq = 6;
        let batch =
            || Batch { inputs: (0..12).collect(), targets: (100..112).collect(), extra: vec![vec![7; 12]] };
        let mut sorted = batch();
        TokenOrder::Zigzag { num_shards: 2 }.apply(&mut sorted, seq);
        // Chunks of 1, 2, 1 and 2 tokens: the first and the last are the first shard.
        assert_eq!(sorted.inputs, [0, 4, 5, 1, 2, 3, 6, 10, 11, 7, 8, 9]);
        assert_eq!(sorted.targets, sorted.inputs.iter().map(|id| id + 100).collect::<Vec<_>>());
        assert_eq!(sorted.extra[..2], [vec![7; 12], vec![0; 12]]);
        assert_eq!(sorted.extra[2], sorted.inputs.iter().map(|id| id % 6).collect::<Vec<_>>());
        let mut unchanged = batch();
        TokenOrder::Sequential.apply(&mut unchanged, seq);
        assert_eq!(unchanged, batch());
        // A rank without rows has the columns of the others.
        let mut empty = Batch::default();
        TokenOrder::Zigzag { num_shards: 2 }.apply(&mut empty, seq);
        assert_eq!(empty, Batch { extra: vec![Vec::new(); 2], ..Batch::default() });
    }

    #[test]
    fn ranks_of_a_ring_compute_equally_many_causal_scores() {
        for num_shards in [2, 3, 4, 8] {
            let zigzag = TokenOrder::Zigzag { num_shards };
            let seq = 96 * num_shards;
            let all = (seq * (seq + 1) / 2) as u64;
            assert_eq!(zigzag.scores_per_shard(seq, num_shards), vec![all / num_shards as u64; num_shards]);
            let in_order = TokenOrder::Sequential.scores_per_shard(seq, num_shards);
            assert_eq!(in_order.iter().sum::<u64>(), all);
            // The last of n ranks computes (2 n - 1) / n^2 of all scores, but for the diagonal.
            let last = in_order[num_shards - 1] as f64 / all as f64;
            let n = num_shards as f64;
            assert_abs_diff_eq!(last, (2.0 * n - 1.0) / (n * n), epsilon = 0.01);
            // Rows that the chunks do not divide: the largest and the smallest number differ by the scores of a token.
            let uneven = zigzag.scores_per_shard(seq + 5, num_shards);
            let [low, high] = [uneven.iter().min(), uneven.iter().max()].map(|x| *x.unwrap());
            assert!(high - low <= seq as u64 + 5, "{uneven:?}");
        }
        assert_eq!(TokenOrder::Sequential.scores_per_shard(1, 2), [0, 1]);
    }
}
