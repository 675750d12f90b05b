//! Source-code rules that the compiler does not check. Each rule is a function on source text that returns findings; it is run on the tree and on
//! a planted violation that it must find.
//!
//! ARCHITECTURE.md lists the invariants behind the rules, CONTRIBUTING.md the reasons.

mod tokens;
mod source;
mod crates;
mod dependencies;
mod file_docs;
mod collective_calls;
mod links;
mod model_code;
mod module_order;
mod size;
mod unsafety;
mod words;
