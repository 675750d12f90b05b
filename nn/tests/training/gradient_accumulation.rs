//! Gradient accumulation over microbatches and activation checkpointing do not change gradients.

use crate::support::Setup;

#[test]
fn microbatches_on_one_tape_equal_one_batch() {
    let one_batch = Setup::new().outcome("");
    for (mesh, microbatches) in [
        ("", 2),
        ("", 4),
        ("dp=2", 2),
        ("dp=2,tp=2", 2),
        ("tp=3", 4),
        ("cp=2", 2),
        ("cp=2", 4),
        ("dp=2,cp=4", 2),
        ("dp=2,cp=4", 4),
    ] {
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
