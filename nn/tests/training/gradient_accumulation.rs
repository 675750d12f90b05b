//! Gradient accumulation over microbatches, activation checkpointing and dropout do not change what they must not
//! change.

use crate::support::Setup;
use approx::abs_diff_ne;
use shardgrad_nn::Gpt2Config;

#[test]
fn microbatches_on_one_tape_equal_one_batch() {
    let one_batch = Setup::new().outcome("");
    for (mesh, microbatches) in [("", 2), ("", 4), ("dp=2", 2), ("dp=2,tp=2", 2), ("tp=3", 4)] {
        Setup { microbatches, ..Setup::new() }
            .outcome(mesh)
            .assert_near(&one_batch, &format!("{microbatches} microbatches on {mesh}"));
    }
}

#[test]
fn activation_checkpointing_is_bit_exact_and_saves_memory() {
    for (mesh, noise) in [("", false), ("dp=2,tp=2", true)] {
        let plain = Setup { config: Setup::new().config.with_dropout(0.2), noise, ..Setup::new() };
        let recomputed = Setup { recompute: true, ..plain.clone() };
        let (plain, recomputed) = (plain.outcome(mesh), recomputed.outcome(mesh));
        assert_eq!(plain.loss, recomputed.loss);
        assert_eq!(plain.gradients, recomputed.gradients);
        assert!(
            recomputed.saved_bytes * 3 < plain.saved_bytes * 2,
            "{} of {} bytes",
            recomputed.saved_bytes,
            plain.saved_bytes
        );
    }
}

#[test]
fn dropout_is_independent_of_mesh_and_microbatches() {
    let config = Gpt2Config { embd_pdrop: 0.1, attn_pdrop: 0.2, resid_pdrop: 0.3, ..Setup::new().config };
    let noisy = Setup { config, noise: true, ..Setup::new() };
    let alone = noisy.outcome("");
    for (mesh, microbatches) in [("", 2), ("dp=2", 1), ("dp=2,tp=2", 2), ("tp=3", 1)] {
        Setup { microbatches, ..noisy.clone() }
            .outcome(mesh)
            .assert_near(&alone, &format!("{microbatches} microbatches on {mesh}"));
    }
    let without_noise = Setup { noise: false, ..noisy.clone() }.outcome("");
    without_noise.assert_near(&Setup::new().outcome(""), "a tape without noise");
    assert!(abs_diff_ne!(without_noise.loss, alone.loss, epsilon = 1e-3), "dropout does something");
}
