//! Every op on every layout: forward and backward agree with one rank, refusals suggest valid repairs, gradients agree with finite
//! differences; in other dtypes, and in a dry run. Then the same checks on broken ops, each of which the checks must report.

#[path = "ops/layouts.rs"]
mod layouts;
#[path = "ops/dtypes.rs"]
mod dtypes;
#[path = "ops/dry_run.rs"]
mod dry_run;
#[path = "ops/op_files.rs"]
mod op_files;
#[path = "ops/broken_ops.rs"]
mod broken_ops;
