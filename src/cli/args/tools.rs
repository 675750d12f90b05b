//! Options of the commands that look around: the op table, the machine, speeds.

use clap::Args;

/// Options of `ops`.
#[derive(Args, Clone, Debug)]
pub(crate) struct OpsArgs {
    /// Print one JSON object a line
    #[arg(long, conflicts_with = "markdown")]
    pub(crate) json: bool,
    /// Print docs/ops.md
    #[arg(long)]
    pub(crate) markdown: bool,
}

/// Options of `doctor`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object and nothing else on stdout
    #[arg(long)]
    pub(crate) json: bool,
}
