//! Training on combinations of styles against one rank: gradients, losses, and a resume in another combination. To rounding: the sums of
//! the default follow the mesh, and some styles have no canonical sums.

use crate::combination::{Combination, NUM_IN_GATE, Style, combinations};
use crate::pairs::is_allowed;
use crate::training::{Folder, Step, Training, is_clipped};
use shardgrad_tensor::DType;
use std::collections::BTreeMap;
use std::thread;

/// Steps of a training, whose last has the batch of the first (there are four), and those before its checkpoint.
const NUM_STEPS: usize = 17;
const NUM_STEPS_SAVED: usize = 8;

/// The largest difference of a gradient, relative to the largest gradient of the model.
const GRADIENT_BOUND: f64 = 1e-12;
/// The largest relative differences of losses and gradient norms in f64, and of losses in f32.
const F64_BOUND: f64 = 1e-9;
const F32_BOUND: f64 = 1e-4;

type Outcome<T> = Result<T, String>;

/// The first difference of gradients from those of one rank.
fn compare_gradients(one: &BTreeMap<String, Vec<f64>>, many: &BTreeMap<String, Vec<f64>>) -> Outcome<()> {
    if !one.keys().eq(many.keys()) {
        return Err("other parameters have gradients".to_string());
    }
    let largest = one.values().flatten().fold(0.0, |largest: f64, g| largest.max(g.abs()));
    for (name, gradient) in one {
        let pairs = gradient.iter().zip(&many[name]);
        let worst = pairs
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, |worst: f64, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) });
        if gradient.len() != many[name].len() || worst.is_nan() || worst > GRADIENT_BOUND * largest {
            return Err(format!("the gradient of {name} differs by {worst:e}, the largest is {largest:e}"));
        }
    }
    Ok(())
}

/// The first difference of the losses, and of the gradient norms if `norms`, from those of one rank.
fn compare_steps(one: &[Step], many: &[Step], bound: f64, norms: bool) -> Outcome<()> {
    if one.len() != many.len() {
        return Err(format!("{} steps in place of {}", many.len(), one.len()));
    }
    for (i, (a, b)) in one.iter().zip(many).enumerate() {
        for (what, at) in [("loss", 0), ("gradient norm", 1)].into_iter().take(1 + usize::from(norms)) {
            let far = (a[at] - b[at]).abs() / a[at].abs();
            if far.is_nan() || far > bound {
                return Err(format!("step {i}: {what} {}, on one rank {}, {far:e} apart", b[at], a[at]));
            }
        }
    }
    Ok(())
}

/// The next combination, in cyclic order, in whose styles the task of row `at` may be trained.
fn next_styles(all: &[Combination], at: usize) -> Combination {
    let next = all.iter().cycle().skip(at + 1).take(all.len() - 1);
    let mut mixed = next.map(|other| all[at].in_styles_of(other));
    mixed.find(|mixed| *mixed != all[at] && is_allowed(mixed)).expect("some styles fit")
}

/// Compares a combination with one rank: gradients, losses in f64 and f32, and losses of a training that goes on in other styles.
fn check(combination: &Combination, other: &Combination, folder: &Folder) -> Outcome<()> {
    let (task, styles) = (combination.task(), [Style::alone(), combination.how(), other.how()]);
    let training = |style: usize, dtype| Training { task: &task, style: &styles[style], dtype };
    let [one, many, resumed] = [0, 1, 2].map(|style| training(style, DType::F64));
    compare_gradients(&one.gradients()?, &many.gradients()?)?;
    let alone = one.steps(None, NUM_STEPS, None)?;
    if !alone.iter().any(is_clipped) || alone[NUM_STEPS - 1][0] > 0.9 * alone[0][0] {
        return Err(format!("nothing was clipped or nothing was learned: {alone:?}"));
    }
    let steps = many.steps(None, NUM_STEPS, Some((NUM_STEPS_SAVED, &folder.0)))?;
    compare_steps(&alone, &steps, F64_BOUND, true)?;
    let rest = resumed.steps(Some(&folder.0), NUM_STEPS - NUM_STEPS_SAVED, None);
    rest.and_then(|rest| compare_steps(&alone[NUM_STEPS_SAVED..], &rest, F64_BOUND, true))
        .map_err(|why| format!("resumed on {} {:?}: {why}", styles[2].mesh, other.levels()))?;
    let [one, many] = [0, 1].map(|style| training(style, DType::F32).steps(None, NUM_STEPS, None));
    compare_steps(&one?, &many?, F32_BOUND, false).map_err(|why| format!("in f32, {why}"))
}

/// The rows to run: `SHARDGRAD_STYLES=all`, or numbers of rows as in `3,17`, counted from 1.
fn rows(all: usize) -> Vec<usize> {
    match std::env::var("SHARDGRAD_STYLES").as_deref() {
        Err(_) => (0..NUM_IN_GATE).collect(),
        Ok("all") => (0..all).collect(),
        Ok(numbers) => numbers.split(',').map(|n| n.parse::<usize>().expect("a row number") - 1).collect(),
    }
}

#[test]
fn combined_styles_train_like_one_rank() {
    let all = combinations();
    let failure = |at: usize| {
        let folder = Folder::new(&format!("row-{at}"));
        let why = check(&all[at], &next_styles(&all, at), &folder).err()?;
        Some(format!("row {} on {}: {why}\n  {:?}", at + 1, all[at].how().mesh, all[at].levels()))
    };
    // As many rows at once as there are cores: the ranks of one wait for each other.
    let (rows, cores) = (rows(all.len()), thread::available_parallelism().map_or(1, usize::from));
    let of_core = |core: usize| -> Vec<String> {
        rows.iter().skip(core).step_by(cores).filter_map(|&at| failure(at)).collect()
    };
    let failures: Vec<String> = thread::scope(|scope| {
        let parts: Vec<_> = (0..cores).map(|core| scope.spawn(move || of_core(core))).collect();
        parts.into_iter().flat_map(|part| part.join().expect("rows return")).collect()
    });
    assert!(
        failures.is_empty(),
        "{} combinations differ from one rank:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn comparisons_find_small_differences() {
    let steps = [[2.0, 1.0], [1.5, 0.8]];
    assert!(compare_steps(&steps, &steps, F64_BOUND, true).is_ok());
    for changed in
        [[[2.0, 1.0], [1.5 + 1e-8, 0.8]], [[2.0, 1.0 + 1e-8], [1.5, 0.8]], [[f64::NAN, 1.0], [1.5, 0.8]]]
    {
        assert!(compare_steps(&steps, &changed, F64_BOUND, true).is_err(), "{changed:?}");
    }
    assert!(compare_steps(&steps, &steps[..1], F64_BOUND, true).is_err());
    let gradients =
        |last: f64| BTreeMap::from([("w".to_string(), vec![3.0, -4.0]), ("b".to_string(), vec![last])]);
    assert!(compare_gradients(&gradients(1e-3), &gradients(1e-3 + 1e-12)).is_ok());
    for other in [gradients(1e-3 + 1e-11), gradients(f64::NAN)] {
        assert!(compare_gradients(&gradients(1e-3), &other).is_err(), "{other:?}");
    }
    let mut fewer = gradients(1e-3);
    fewer.pop_last();
    assert!(compare_gradients(&gradients(1e-3), &fewer).is_err());
}
