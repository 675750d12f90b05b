//! Default values of options; the first command of the README uses only these.

pub(super) const PRESET: &str = "tiny";
pub(super) const OUT: &str = "runs/latest";
pub(super) const MODEL: &str = "runs/latest/model";
pub(super) const STEPS: &str = "500";
pub(super) const BATCH: &str = "32";
/// Maximum default of `--seq`.
pub(super) const SEQ_MAX: usize = 128;
/// Maximum default of `--seq` in `explain`.
pub(super) const EXPLAINED_SEQ_MAX: usize = 1024;
pub(super) const LR: &str = "0.002";
/// Default of `--min-lr` as a fraction of `--lr`.
pub(super) const MIN_LR_PART: f64 = 0.1;
/// Maximum default of `--warmup`, which is a tenth of the steps.
pub(super) const WARMUP_MAX: usize = 100;
pub(super) const WEIGHT_DECAY: &str = "0.1";
pub(super) const BETA1: &str = "0.9";
pub(super) const BETA2: &str = "0.99";
pub(super) const EPS: &str = "1e-8";
pub(super) const GRAD_CLIP: &str = "1";
pub(super) const EVAL_EVERY: usize = 100;
pub(crate) const CHECK_EVERY: &str = "100";
pub(super) const EVAL_BATCH: &str = "16";
pub(super) const TIMEOUT_SECONDS: &str = "60";
pub(super) const SHARD_SIZE: &str = "5GB";
pub(super) const NEW_TOKENS: &str = "200";
pub(super) const TEMPERATURE: &str = "0.8";
/// Maximum tokens per step: twice the largest batches of published models.
pub(super) const TOKENS_MAX: usize = 1 << 25;
/// Maximum number of ranks in `explain`.
pub(super) const EXPLAINED_MAX: usize = 1 << 20;
/// Maximum number of ranks as threads of one process.
pub(super) const RANKS_MAX: usize = 256;
