//! Losses and gradients of GPT-2 are the same on every mesh. To rounding: a tape without a trainer sums in the order of the mesh;
//! `exact_parity.rs` compares the bits of trainers.

use crate::support::{MESHES, Outcome, Setup};
use shardgrad_nn::Gpt2Config;

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
