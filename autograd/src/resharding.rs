//! Changes of layout of variables: recorded, with their adjoints.

use crate::var::Var;
use shardgrad_tensor::{Layout, Resharding};
use std::panic::Location;

impl Resharding for Var {
    #[track_caller]
    fn to_layout(&self, to: &Layout) -> Var {
        self.in_layout(to, Location::caller())
    }
}
