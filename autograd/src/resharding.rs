//! Changes of layout of variables: recorded, with their adjoints.

use crate::tape::Var;
use shardgrad_tensor::{Layout, Resharding};
use std::panic::Location;

impl Resharding for Var {
    #[track_caller]
    fn to_layout(&self, to: &Layout) -> Var {
        let site = Location::caller();
        self.check_usable(site);
        self.to_layout_at(to, site)
    }
}
