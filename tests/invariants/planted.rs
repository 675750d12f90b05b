//! Each invariant check must find its planted bugs.

use super::bug::Bug;
use super::model::Sample;
use super::{no_dead_parameter, replicas_agree, same_gradients};
use shardgrad::prelude::*;

/// A case in which every bug has an effect.
fn sample() -> Sample {
    Sample {
        dp: 2,
        tp: 2,
        width: 4,
        hidden: 5,
        vocabulary: 7,
        rows: 3,
        columns: 3,
        num_blocks: 2,
        split_hidden: true,
        split_vocabulary: true,
        store_sharded: false,
        rounds: 1,
        seed: 3,
        integers: false,
    }
}

#[test]
fn sample_without_a_bug_passes() {
    let sample = sample();
    let one = sample.train(&Mesh::single(), Bug::None).unwrap();
    let many = sample.train(&sample.mesh(), Bug::None).unwrap();
    assert_eq!(same_gradients(&one, &many, 1e-10), Ok(()));
    assert_eq!(no_dead_parameter(&many), Ok(()));
    assert_eq!(replicas_agree(&many), Ok(()));
}

#[test]
fn wrong_gradients_are_found() {
    for bug in [Bug::PendingThroughRelu, Bug::LocalMean, Bug::WorldScaledVjp] {
        let one = sample().train(&Mesh::single(), bug).unwrap();
        let many = sample().train(&sample().mesh(), bug).unwrap();
        assert!(same_gradients(&one, &many, 1e-6).is_err(), "{bug:?} was not found");
    }
}

#[test]
fn nan_is_found() {
    let one = sample().train(&Mesh::single(), Bug::None).unwrap();
    let mut many = sample().train(&sample().mesh(), Bug::None).unwrap();
    let loss = std::mem::replace(&mut many.loss, f64::NAN);
    assert!(same_gradients(&one, &many, 1e-6).is_err(), "of the loss");
    assert!(same_gradients(&many, &many, 1e-6).is_err(), "of both losses");
    many.loss = loss;
    many.gradients.values_mut().next().expect("a parameter")[0] = f64::NAN;
    assert!(same_gradients(&one, &many, 1e-6).is_err(), "of a gradient");
    assert!(same_gradients(&many, &many, 1e-6).is_err(), "of both gradients");
}

#[test]
fn dead_parameters_are_found() {
    for bug in [Bug::ZeroVjp, Bug::Detached, Bug::Masked] {
        let many = sample().train(&sample().mesh(), bug).unwrap();
        assert!(no_dead_parameter(&many).is_err(), "{bug:?} was not found");
    }
}

#[test]
fn drifting_replicas_are_found() {
    for bug in [Bug::RankRate, Bug::RankInit, Bug::RankSkips] {
        let many = sample().train(&sample().mesh(), bug).unwrap();
        assert!(replicas_agree(&many).is_err(), "{bug:?} was not found");
    }
}

/// The op registry contains no broken op.
#[test]
fn broken_ops_stay_in_the_tests() {
    assert!(shardgrad::tensor::ops::OPS.iter().all(|entry| entry.name != "broken"));
}
