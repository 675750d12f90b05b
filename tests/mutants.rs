//! Checks that each patch of `tests/mutants` still applies, and that the page about them is up to date. `.ci/mutants` applies the
//! patches one at a time and runs the tests that must fail.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const PAGE: &str = "tests/mutants/README.md";
/// Minimum number of patches.
const COUNT_MIN: usize = 40;

/// Patch that plants a bug in one file.
#[derive(Debug)]
struct Mutant {
    name: String,
    /// Class of bugs.
    class: String,
    /// Arguments of `cargo test` for the tests that must fail.
    killed_by: String,
    file: String,
    /// Original text of each hunk: context and removed lines.
    originals: Vec<String>,
}

/// Parses a patch with its head, `Class: ` and `Killed by: `.
fn parse(name: &str, text: &str) -> Mutant {
    let field =
        |label: &str| text.lines().find_map(|l| l.strip_prefix(label)).unwrap_or_default().to_string();
    let mut originals: Vec<String> = Vec::new();
    for line in text.lines() {
        match line.chars().next() {
            Some('@') => originals.push(String::new()),
            Some(' ' | '-') if !line.starts_with("---") && !originals.is_empty() => {
                let last = originals.last_mut().expect("a hunk has begun");
                *last += &line[1..];
                *last += "\n";
            }
            _ => {}
        }
    }
    let (class, killed_by, file) = (field("Class: "), field("Killed by: "), field("+++ b/"));
    Mutant { name: name.to_string(), class, killed_by, file, originals }
}

/// Returns the mutants of `tests/mutants`, sorted by name.
fn mutants() -> Vec<Mutant> {
    let folder = Path::new(ROOT).join("tests/mutants");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .filter_map(|f| f.unwrap().file_name().to_str()?.strip_suffix(".patch").map(str::to_string))
        .collect();
    names.sort();
    names.iter().map(|n| parse(n, &fs::read_to_string(folder.join(format!("{n}.patch"))).unwrap())).collect()
}

/// Returns why a patch cannot be applied, if so.
fn fault(mutant: &Mutant, code: &str) -> Option<String> {
    let Mutant { name, class, killed_by, originals, .. } = mutant;
    if class.is_empty() || killed_by.is_empty() || originals.is_empty() {
        return Some(format!("tests/mutants/{name}.patch lacks `Class: `, `Killed by: ` or a hunk"));
    }
    let missing = originals.iter().find(|text| !code.contains(text.as_str()));
    missing.map(|text| {
        format!("tests/mutants/{name}.patch no longer applies: {} does not contain\n{text}", mutant.file)
    })
}

#[test]
fn every_mutant_patch_applies() {
    let all = mutants();
    assert!(all.len() >= COUNT_MIN, "{} mutants, fewer than {COUNT_MIN}", all.len());
    let faults: Vec<String> = all
        .iter()
        .filter_map(|m| fault(m, &fs::read_to_string(Path::new(ROOT).join(&m.file)).unwrap_or_default()))
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn mutant_patch_that_does_not_apply_is_found() {
    let text = "Class: c\nKilled by: t\n\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n";
    let mutant = parse("m", text);
    assert_eq!((mutant.file.as_str(), mutant.originals.as_slice()), ("x", &["a\nb\n".to_string()][..]));
    assert_eq!(fault(&mutant, "0\na\nb\n"), None);
    assert!(fault(&mutant, "a\n\nb\n").is_some());
    assert!(fault(&parse("m", "Class: c\n@@\n a\n"), "a\n").is_some());
}

const HEAD: &str = "\
# Mutation tests

A check that has never failed proves nothing. Each mutant plants a bug of a kind that frameworks have shipped; a test must
fail on it (kill the mutant).

Some mutants are values in the tests: ops with one part replaced (`tensor/tests/ops/broken_ops.rs`,
`autograd/tests/fuzz.rs`), wrong layers, plans and updates (`tests/invariants`), wrong op declarations and planners
(`tensor/tests/algebra.rs`, `tensor/tests/planner.rs`). They run with every `cargo test`.

The others are the patches of this folder; the code has no switch for them. `.ci/mutants` copies the tree, applies the
patches one at a time, and runs the tests that the patch names; it fails if a mutant survives. `cargo test` checks that
each patch still applies. Update this page with `SHARDGRAD_UPDATE=1 cargo test --test main mutants`.
";

/// A class of silent bugs that frameworks have shipped, with instances, and the mutants that stand for it.
type ShippedClass = (&'static str, &'static str, &'static [&'static str]);

const SHIPPED: [ShippedClass; 10] = [
    (
        "replicated parameter drifts between tensor-parallel ranks",
        "BLOOM-176B, TransformerEngine #441, Megatron-LM #1446 (last norm under sequence parallelism)",
        &[
            "norm_gradients_not_summed_over_tp",
            "gradient_of_derived_leaf_not_redistributed",
            "merged_all_reduce_over_one_axis",
            "copies_compared_in_the_first_update_only",
        ],
    ),
    (
        "missing or extra backward collective",
        "torchtitan #1805, pytorch #175867, #172932",
        &[
            "adjoint_step_placement_not_dual",
            "gradients_reduced_each_round_are_lost",
            "sums_of_shards_reduced_each_round",
            "gradient_reduced_before_its_last_use",
        ],
    ),
    (
        "gradient scaled by the size of an axis",
        "pytorch #160285 (experts), Megatron-LM #673, #3768 (auxiliary loss), #1464 (context parallelism)",
        &[
            "balancing_loss_counts_local_tokens",
            "ring_counts_its_own_chunk_twice",
            "partial_sum_filled_on_every_rank",
            "every_rank_contributes_to_partial_sum",
        ],
    ),
    (
        "gradient norm counts replicas or misses shards",
        "TransformerEngine for ROCm #715, Megatron-LM #5916, #7452",
        &[
            "tied_gradient_counted_by_both_stages",
            "grad_norm_counts_replicas",
            "grad_norm_of_one_rank",
            "grad_norm_skips_a_parameter",
        ],
    ),
    (
        "wrong process group",
        "Megatron-LM #7452",
        &[
            "collective_over_all_axes",
            "merged_all_reduce_over_one_axis",
            "whole_matrix_sent_by_every_copy",
            "ring_neighbors_by_outer_axis_first",
            "sums_of_copies_reduced_over_all_axes",
            "parameters_gathered_over_the_copies",
        ],
    ),
    (
        "collective in place on a temporary copy",
        "SkyRL #1886",
        &["all_reduce_ignores_strides", "grad_accumulator_dropped"],
    ),
    (
        "illegal placement accepted",
        "pytorch #179502 (view), #172350 (index_put), #175776 (max.dim), #166598 (order of shards), #191926 (convolution)",
        &[
            "axis_order_not_compared",
            "axis_shards_two_labels",
            "reshape_merges_sharded_inner_dim",
            "reshape_shards_inside_a_row",
            "shard_boundaries_not_compared",
            "unsharded_label_may_be_sharded",
        ],
    ),
    (
        "uneven or empty shards",
        "pytorch #144109",
        &[
            "all_gather_assumes_even_shards",
            "shard_start_rounded_up",
            "shard_index_in_reverse_axis_order",
            "expert_without_pairs_is_lost",
        ],
    ),
    (
        "cache of rules keyed too coarsely",
        "pytorch #134050",
        &[
            "inference_cache_ignores_differentiable_inputs",
            "inference_cache_ignores_layouts",
            "memoized_views_compared_by_count",
        ],
    ),
    (
        "mean over the local length, fill on a shard",
        "pytorch: huber_loss, full_like of DTensor",
        &[
            "mean_divides_by_local_count",
            "balancing_loss_counts_local_tokens",
            "partial_sum_filled_on_every_rank",
        ],
    ),
];

/// Returns the text of the page: one table for each class of bugs, and a table of those that frameworks have shipped.
fn page() -> String {
    let mut classes: BTreeMap<String, Vec<Mutant>> = BTreeMap::new();
    let all = mutants();
    let shipped = shipped_table(&all);
    for mutant in all {
        classes.entry(mutant.class.clone()).or_default().push(mutant);
    }
    let mut page = HEAD.to_string();
    for (class, mutants) in classes {
        let _ = write!(
            page,
            "\n## {}{}\n\n| bug | in | killed by |\n|---|---|---|\n",
            class[..1].to_uppercase(),
            &class[1..]
        );
        for Mutant { name, file, killed_by, .. } in mutants {
            let _ = writeln!(page, "| {} | `{file}` | `cargo test {killed_by}` |", name.replace('_', " "));
        }
    }
    page + &shipped
}

/// Returns the table of [`SHIPPED`].
fn shipped_table(mutants: &[Mutant]) -> String {
    let mut table = "\n## Silent bugs that frameworks have shipped\n\n| class | shipped | bug planted here | killed by |\n|---|---|---|---|\n".to_string();
    for (class, shipped, names) in SHIPPED {
        for name in names {
            let mutant = mutants.iter().find(|mutant| mutant.name == *name);
            let killed_by = &mutant.unwrap_or_else(|| panic!("there is no mutant {name}")).killed_by;
            let bug = name.replace('_', " ");
            let _ = writeln!(table, "| {class} | {shipped} | {bug} | `cargo test {killed_by}` |");
        }
    }
    table
}

#[test]
fn mutants_page_is_up_to_date() {
    let (path, page) = (Path::new(ROOT).join(PAGE), page());
    if std::env::var_os("SHARDGRAD_UPDATE").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let stored = fs::read_to_string(&path).unwrap_or_default();
    assert!(page == stored, "{PAGE} is out of date; run: SHARDGRAD_UPDATE=1 cargo test --test main mutants");
}
