//! Source-code rules that the compiler does not check. Each rule is a function on source text that returns findings. One test runs all rules on
//! the tree; a test in the file of each rule runs the rule on a planted violation that it must find.
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

use source::{Finding, Source, nothing_in, sources};

type FileRule = fn(&Source) -> Vec<Finding>;
type TreeRule = fn(&[Source]) -> Vec<Finding>;

/// The rules on a file.
const FILE_RULES: [FileRule; 11] = [
    crates::crate_order,
    file_docs::file_heads,
    collective_calls::collective_calls,
    model_code::one_model_source,
    model_code::reads_no_layout,
    unsafety::unsafe_place,
    unsafety::forbids_unsafe,
    words::unfinished,
    words::ignored_tests,
    words::hidden_state,
    words::room_names,
];

/// The rules on all files together.
const TREE_RULES: [TreeRule; 4] = [
    dependencies::unused_dependencies,
    collective_calls::listed_callers,
    module_order::module_order,
    unsafety::listed_places,
];

/// One test, because it takes longer to parse the tree than to run a rule on it. Long files and functions are printed as advice.
#[test]
#[expect(clippy::print_stdout, reason = "the list is the result")]
fn tree_follows_every_rule() {
    let tree = sources();
    for path in ["src/lib.rs", "kernels/src/buffer.rs", "tests/tidy/source.rs"] {
        assert!(tree.iter().any(|s| s.path == path), "{path} is among the files read");
    }
    assert!(tree.iter().all(|s| !s.path.starts_with("target/")), "build outputs are left out");
    let advice = tree.iter().flat_map(|s| [size::file_length(s), size::function_length(s)].concat());
    advice.for_each(|finding| println!("{finding}"));
    let in_files = FILE_RULES.iter().flat_map(|rule| tree.iter().flat_map(rule));
    nothing_in(in_files.chain(TREE_RULES.iter().flat_map(|rule| rule(&tree))).collect());
}
