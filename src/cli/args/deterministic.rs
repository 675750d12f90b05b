//! Options about which changes of a run leave its bits as they are.

use super::values;
use clap::{Args, ValueEnum};
use shardgrad::nn::Deterministic;

/// Default number of leaves of the batch.
const BATCH_LEAVES: usize = 8;

// The variants have no doc comments: clap would print them as help, over four lines.

/// What bits do not depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Promise {
    #[default]
    Run,
    Transport,
    Mesh,
}

/// Options of reproducibility.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Parallelism")]
pub(crate) struct DeterministicArgs {
    /// What bits do not depend on. run: repetition, resumption, threads or processes over TCP, on the same mesh; transport: also
    /// processes over NCCL, which then adds nothing; mesh: also the mesh of dp, fsdp, ep, pp, tp and cp (without a ring), the
    /// schedule and the number of microbatches, on the CPU
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = Promise::Run)]
    deterministic: Promise,
    /// With --deterministic mesh: number of leaves into which the batch is cut, a pass for each; a multiple of dp times fsdp times ep times --microbatches
    /// that divides --batch. Another number gives other bits [default: 8, or --batch if that is smaller]
    #[arg(long, value_name = "N", value_parser = values::count)]
    batch_leaves: Option<usize>,
    /// With --deterministic mesh: number of leaves into which each other summed dim is cut (tokens, width, heads, hidden units, vocabulary), a
    /// multiple of tp and of cp, with --sequence-parallel of tp times cp; tp and cp times 1, 2, 4, 8 .. send the fewest bytes. Another number gives other bits [default: 8]
    #[arg(long, value_name = "N", value_parser = values::count)]
    sum_leaves: Option<usize>,
}

impl DeterministicArgs {
    /// Returns the promise, for a batch of `batch` rows.
    pub(crate) fn promise(&self, batch: usize) -> Deterministic {
        match self.deterministic {
            Promise::Run | Promise::Transport => Deterministic::Run,
            Promise::Mesh => {
                let batch_leaves = self.batch_leaves.unwrap_or(BATCH_LEAVES.min(batch));
                let sum_leaves = self.sum_leaves.unwrap_or(Deterministic::SUM_LEAVES);
                Deterministic::Mesh { batch_leaves, sum_leaves }
            }
        }
    }

    /// Returns whether sums over NCCL have the bits of those over other transports.
    pub(super) fn has_tree_sums(&self) -> bool {
        self.deterministic == Promise::Transport
    }

    /// Returns an error text for options that contradict each other.
    pub(crate) fn fault(&self) -> Option<String> {
        let given = [("--batch-leaves", self.batch_leaves), ("--sum-leaves", self.sum_leaves)];
        let lost =
            given.into_iter().find(|(_, leaves)| leaves.is_some() && self.deterministic != Promise::Mesh);
        lost.map(|(option, _)| format!("{option} has no effect without --deterministic mesh"))
    }
}
