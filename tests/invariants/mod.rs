//! The three invariants, on random models, meshes, plans and shapes:
//!
//! 1. the sharded gradient is the single-rank gradient (f64; exactly on small integers);
//! 2. no parameter's gradient is all zero on random input, except those in `ALWAYS_ZERO`;
//! 3. replicated parameters are bitwise equal on all replicas after each step.
//!
//! Each check is validated by planted bugs that it must find (`planted.rs`).

mod bug;
mod model;
mod planted;

use approx::abs_diff_ne;
use bug::Bug;
use model::{Sample, Trained, strategy};
use proptest::prelude::*;
use shardgrad::prelude::*;

/// Parameters whose gradient is zero mathematically, such as a key bias in attention.
const ALWAYS_ZERO: &[&str] = &[];

/// The result of a check.
type Verdict = std::result::Result<(), String>;

/// Invariant 1.
fn same_gradients(one: &Trained, many: &Trained, tolerance: f64) -> Verdict {
    for (name, single) in &one.gradients {
        let sharded = &many.gradients[name];
        let scale = single.iter().fold(1e-3, |m: f64, x| m.max(x.abs()));
        for (at, (a, b)) in single.iter().zip(sharded).enumerate() {
            if abs_diff_ne!(*a, *b, epsilon = tolerance * scale) {
                return Err(format!("gradient of {name}[{at}] is {b}, on one rank {a}"));
            }
        }
    }
    if abs_diff_ne!(one.loss, many.loss, epsilon = tolerance * one.loss.abs().max(1.0)) {
        return Err(format!("loss is {}, on one rank {}", many.loss, one.loss));
    }
    Ok(())
}

/// Invariant 2.
fn no_dead_parameter(run: &Trained) -> Verdict {
    for (name, gradient) in &run.gradients {
        let dead = gradient.iter().all(|x| *x == 0.0);
        if dead && !gradient.is_empty() && !ALWAYS_ZERO.iter().any(|n| name.ends_with(n)) {
            return Err(format!("the gradient of {name} is zero everywhere"));
        }
    }
    Ok(())
}

/// Invariant 3: `replicas` holds, per parameter, the bits of each rank with the shard it belongs to.
fn replicas_agree(run: &Trained) -> Verdict {
    for (name, pieces) in &run.replicas {
        for (shard, bits) in pieces {
            let (_, first) = pieces.iter().find(|(s, _)| s == shard).expect("it is in the list");
            if first != bits {
                return Err(format!("replicas of {name} differ for shard {shard:?}"));
            }
        }
    }
    Ok(())
}

/// 40 cases per property, or PROPTEST_CASES.
fn cases() -> ProptestConfig {
    let default = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_some() {
        default
    } else {
        ProptestConfig { cases: 40, ..default }
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn sharded_training_is_single_rank_training(sample in strategy()) {
        let one = sample.train(&Mesh::single(), Bug::None).unwrap();
        let many = sample.train(&sample.mesh(), Bug::None).unwrap();
        prop_assert_eq!(same_gradients(&one, &many, 1e-9), Ok(()));
        prop_assert_eq!(no_dead_parameter(&one), Ok(()));
        prop_assert_eq!(no_dead_parameter(&many), Ok(()));
        prop_assert_eq!(replicas_agree(&many), Ok(()));
    }

    #[test]
    fn on_small_integers_the_gradients_are_exactly_equal(sample in strategy()) {
        let sample = Sample { integers: true, ..sample };
        let one = sample.train(&Mesh::single(), Bug::None).unwrap();
        let many = sample.train(&sample.mesh(), Bug::None).unwrap();
        prop_assert_eq!(same_gradients(&one, &many, 0.0), Ok(()));
    }
}
