//! Every op on every layout: forward and backward give what one rank gives, refusals help, gradients agree with finite
//! differences; in other dtypes, and without data. Then the same checks on broken ops, each of which they must report.

#[path = "ops/rows.rs"]
mod rows;
#[path = "ops/dtypes.rs"]
mod dtypes;
#[path = "ops/dry.rs"]
mod dry;
#[path = "ops/files.rs"]
mod files;
#[path = "ops/planted.rs"]
mod planted;
