//! Losses and gradients are the same on every mesh and under every plan. To rounding: a tape without a trainer sums in the order of the
//! mesh; `exact_parity.rs` compares the bits of trainers.

use crate::support::{MESHES, Outcome, Setup};
use shardgrad_nn::{Gpt2Config, Plan};

fn same_everywhere(setup: &Setup, meshes: &[&str]) -> Outcome {
    let alone = setup.outcome("");
    for mesh in meshes {
        setup.outcome(mesh).assert_near(&alone, mesh);
    }
    alone
}

#[test]
fn losses_and_gradients_do_not_depend_on_the_mesh() {
    let tied = same_everywhere(&Setup::new(), &MESHES);
    assert_eq!(tied.gradients.len(), 28, "every parameter has a gradient");
    assert!(tied.loss > 1.0 && tied.norm > 0.1, "the numbers are not trivial");
    let untied = Gpt2Config { tie_word_embeddings: false, ..Setup::new().config };
    let untied = same_everywhere(&Setup { config: untied, ..Setup::new() }, &["tp=2", "dp=2,tp=3"]);
    assert!(untied.gradients.contains_key("lm_head.weight"));
    assert_ne!(untied.loss, tied.loss);
}

/// Sequence parallelism: inputs and outputs of norms sharded by tokens, gathered where heads or hidden units are sharded.
fn sequence_parallel() -> Plan {
    Plan::gpt2()
        .point("wte.out", "tp@1")
        .point("c_attn.input", "tp~")
        .point("c_fc.input", "tp~")
        .point("c_proj.out", "tp@1")
        .point("ln_f.out", "tp~")
}

/// FSDP: every parameter stored sharded over the batch axis, gathered for use.
fn fully_sharded() -> Plan {
    Plan::gpt2().store("*.weight", "dp@0").store("*.bias", "dp@0").compute("*", "dp~")
}

#[test]
fn sequence_parallelism_matches_one_rank() {
    let alone = Setup::new().outcome("");
    for mesh in ["tp=2", "tp=3", "dp=2,tp=2"] {
        Setup { plan: sequence_parallel(), ..Setup::new() }.outcome(mesh).assert_near(&alone, mesh);
    }
}

#[test]
fn fully_sharded_parameters_match_one_rank() {
    let alone = Setup::new().outcome("");
    for (mesh, microbatches) in [("dp=2", 1), ("dp=3", 1), ("dp=2,tp=2", 2)] {
        Setup { plan: fully_sharded(), microbatches, ..Setup::new() }.outcome(mesh).assert_near(&alone, mesh);
    }
}

#[test]
fn assert_near_detects_small_differences() {
    let alone = Setup::new().outcome("");
    let found = |change: &dyn Fn(&mut Outcome)| {
        let mut other = Setup::new().outcome("tp=2");
        change(&mut other);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| other.assert_near(&alone, "tp=2"))).is_err()
    };
    assert!(!found(&|_| {}));
    assert!(found(&|o| o.loss += 1e-8));
    assert!(found(&|o| o.norm *= 1.0 + 1e-8));
    assert!(found(&|o| o.gradients.values_mut().last().unwrap()[3] += 1e-9));
    assert!(found(&|o| drop(o.gradients.pop_last())));
}
