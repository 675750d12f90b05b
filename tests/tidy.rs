//! House rules that the compiler does not know. Each rule is a function on source text that returns findings;
//! each is run on the tree and on a planted violation that it must find.
//!
//! ARCHITECTURE.md names the invariants that stand behind the rules, CONTRIBUTING.md the reasons.

mod tokens;
mod source;
mod crates;
mod dependencies;
mod documented;
mod door;
mod links;
mod neutral;
mod order;
mod size;
mod unsafety;
mod words;
