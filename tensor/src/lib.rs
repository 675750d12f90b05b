//! Layouts, signatures and redistribution plans: what a tensor is on a mesh, and what that costs.
#![forbid(unsafe_code)]

pub mod state;
pub mod dim;
pub mod layout;
mod text;
pub mod refusal;
pub mod signature;
mod join;
pub mod infer;
pub mod step;
pub mod route;
pub mod reshape_rule;
pub mod repair;

pub use dim::{AxisList, Dim};
pub use infer::{Implied, Inference, Rule, infer};
pub use layout::Layout;
pub use refusal::Refusal;
pub use repair::{Infer, Move, Repair, repairs};
pub use reshape_rule::reshape_layout;
pub use route::{Route, RouteCache, route};
pub use signature::{Labels, Mark, Signature, Term};
pub use state::State;
pub use step::{Step, adjoint, moved, moved_back};
