//! Microbatches, recomputation and dropout change nothing that they should not change.

use crate::support::Setup;
use shardgrad_nn::Gpt2Config;

#[test]
fn rounds_on_one_tape_equal_one_batch() {
    let whole = Setup::new().outcome("");
    for (mesh, rounds) in [("", 2), ("", 4), ("dp=2", 2), ("dp=2,tp=2", 2), ("tp=3", 4)] {
        Setup { rounds, ..Setup::new() }
            .outcome(mesh)
            .assert_near(&whole, &format!("{rounds} rounds on {mesh}"));
    }
}

#[test]
fn recomputed_blocks_give_the_same_bits_and_keep_less() {
    for (mesh, noise) in [("", false), ("dp=2,tp=2", true)] {
        let kept = Setup { config: Setup::new().config.with_dropout(0.2), noise, ..Setup::new() };
        let again = Setup { recompute: true, ..kept.clone() };
        let (kept, again) = (kept.outcome(mesh), again.outcome(mesh));
        assert_eq!(kept.loss, again.loss);
        assert_eq!(kept.gradients, again.gradients);
        assert!(
            again.kept_bytes * 3 < kept.kept_bytes * 2,
            "{} of {} bytes",
            again.kept_bytes,
            kept.kept_bytes
        );
    }
}

#[test]
fn dropout_depends_neither_on_mesh_nor_on_rounds() {
    let config = Gpt2Config { embd_pdrop: 0.1, attn_pdrop: 0.2, resid_pdrop: 0.3, ..Setup::new().config };
    let noisy = Setup { config, noise: true, ..Setup::new() };
    let alone = noisy.outcome("");
    for (mesh, rounds) in [("", 2), ("dp=2", 1), ("dp=2,tp=2", 2), ("tp=3", 1)] {
        Setup { rounds, ..noisy.clone() }
            .outcome(mesh)
            .assert_near(&alone, &format!("{rounds} rounds on {mesh}"));
    }
    let quiet = Setup { noise: false, ..noisy.clone() }.outcome("");
    quiet.assert_near(&Setup::new().outcome(""), "a tape without noise");
    assert!((quiet.loss - alone.loss).abs() > 1e-3, "dropout does something");
}

#[test]
fn attention_with_dropout_is_attention() {
    // So small that nothing is dropped and nothing scaled: only the way there is another.
    let config = Gpt2Config { attn_pdrop: 1e-300, ..Setup::new().config };
    let spelled_out = Setup { config, noise: true, ..Setup::new() };
    let fused = Setup::new().outcome("");
    for mesh in ["", "tp=2", "dp=2"] {
        let outcome = spelled_out.outcome(mesh);
        outcome.assert_near(&fused, mesh);
        assert_ne!(outcome.gradients, fused.gradients, "another way, so other rounding");
    }
}
