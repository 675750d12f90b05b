//! Parity with one rank in f32, bit for bit, where bits must not depend on the mesh: losses, gradient norms, velocities and weights of a
//! few steps, by name. A tolerance passes differences of one unit in the last place.

use crate::canonical_sums::{Run, gpt2};
use crate::llama;
use crate::support::{config, run};
use shardgrad_nn::{
    Deterministic, ExpertsConfig, Gpt2Config, LanguageModel, LlamaConfig, LlamaKind, Plan, Sgd,
};
use shardgrad_testing::sample;
use std::collections::BTreeMap;

/// The relative tolerance of comparisons in f32 without canonical sums.
const TOLERANCE: f64 = 1e-5;

/// Named numbers after some steps: the loss and the gradient norm of each step, and all velocities and weights.
type Numbers = BTreeMap<String, Vec<f64>>;

/// Runs two steps on a mesh.
fn numbers(of: &Run, plan: &Plan, mesh: &str, microbatches: usize) -> Numbers {
    let ranks = run(mesh, |rank| {
        // The velocities of the first step are the gradients.
        let mut trainer = of.trainer_with(rank, plan, microbatches, Sgd::new(0.1).momentum(0.9))?;
        let mut numbers = Numbers::new();
        for step in 0..2 {
            let report = trainer.step()?;
            numbers.insert(format!("step {step}"), vec![report.loss, report.grad_norm]);
            for param in trainer.model().params().iter().filter(|param| param.is_local()) {
                let state = trainer.optim().param_state(param).expect("every parameter has a gradient");
                numbers.insert(
                    format!("velocity of {} in step {step}", param.name()),
                    state.tensors[0].to_f64()?,
                );
                numbers.insert(param.name(), param.tensor().to_f64()?);
            }
        }
        Ok(numbers)
    });
    let mut all = Numbers::new();
    for (name, values) in ranks.into_iter().flatten() {
        let known = all.entry(name).or_insert_with(|| values.clone());
        assert_eq!(*known, values, "{mesh}: ranks disagree");
    }
    all
}

/// The first name whose numbers have other bits, with the largest relative difference of all numbers.
fn difference(one: &Numbers, many: &Numbers) -> Option<(String, f64)> {
    assert!(one.keys().eq(many.keys()), "other parameters have gradients");
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let first = one.iter().find(|(name, values)| bits(values) != bits(&many[*name]))?.0.clone();
    let far = one.iter().map(|(name, values)| {
        let largest = values.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
        let pairs = values.iter().zip(&many[name]).map(|(a, b)| (a - b).abs());
        pairs.fold(0.0, |far: f64, d| if d.is_nan() { f64::INFINITY } else { far.max(d) }) / largest
    });
    Some((first, far.fold(0.0, f64::max)))
}

fn check(of: &Run, plan: &Plan, alone: &Numbers, (mesh, microbatches): (&str, usize), what: &str) {
    if let Some((name, far)) = difference(alone, &numbers(of, plan, mesh, microbatches)) {
        let passes = if far < TOLERANCE { "passes" } else { "finds" };
        panic!(
            "{what} on {mesh} in {microbatches} microbatches: other bits in {name}, up to {far:e}, which a tolerance of {TOLERANCE:e} {passes}"
        );
    }
}

/// Meshes with microbatches. Three ranks share twelve leaves, others eight.
const MESHES: [(&str, usize); 5] =
    [("tp=2", 1), ("dp=2", 3), ("dp=2,tp=2", 1), ("pp=2,dp=2", 1), ("pp=2,tp=2", 1)];

#[test]
fn gradients_and_weights_have_the_bits_of_one_rank() {
    let untied = Gpt2Config { tie_word_embeddings: false, initializer_range: 0.3, ..config() };
    let llama = llama::config(LlamaKind::Llama);
    let mixtral =
        LlamaConfig { experts: Some(ExpertsConfig::new(4, 2, 9)), ..llama::config(LlamaKind::Mixtral) };
    for (number, (of, what)) in [
        (Run::new(gpt2()), "gpt2"),
        (Run::new(untied.into()), "gpt2, untied"),
        (Run::new(llama.into()), "llama"),
        (Run::new(mixtral.into()), "mixtral"),
    ]
    .into_iter()
    .enumerate()
    {
        let plan = LanguageModel::plan(&of.config);
        let alone = numbers(&of, &plan, "", 1);
        sample(number, MESHES).for_each(|mesh| check(&of, &plan, &alone, mesh, what));
        let stored = [
            (Plan::fsdp("fsdp"), "dp=2,fsdp=2"),
            (Plan::zero(3, "dp"), "dp=4"),
            (Plan::zero(2, "dp"), "pp=2,dp=2"),
        ];
        for (more, mesh) in sample(number, stored) {
            check(&of, &plan.clone().and(more), &alone, (mesh, 1), what);
        }
        let of = Run { deterministic: Deterministic::Mesh { batch_leaves: 12, sum_leaves: 12 }, ..of };
        let alone = numbers(&of, &plan, "", 1);
        sample(number, ["tp=3", "dp=2,tp=3"]).for_each(|mesh| check(&of, &plan, &alone, (mesh, 1), what));
    }
}

#[test]
fn exact_comparison_finds_one_unit_in_the_last_place_where_a_tolerance_finds_nothing() {
    let of = Run::new(gpt2());
    let plan = LanguageModel::plan(&of.config);
    let alone = numbers(&of, &plan, "", 1);
    assert_eq!(difference(&alone, &numbers(&of, &plan, "tp=2", 1)), None);
    for planted in [
        "step 0",
        "step 1",
        "velocity of wte.weight in step 0",
        "velocity of ln_f.bias in step 1",
        "wte.weight",
    ] {
        let mut other = alone.clone();
        let last = other.get_mut(planted).and_then(|values| values.last_mut()).unwrap();
        *last = f64::from((*last as f32).next_up());
        let (found, far) = difference(&alone, &other).expect("one unit is found");
        assert!(found == planted && far < TOLERANCE, "{found}: {far:e}");
    }
    // The sums of another order differ as little.
    let plain = Run { deterministic: Deterministic::Run, ..of };
    let (_, far) = difference(&numbers(&plain, &plan, "", 1), &numbers(&plain, &plan, "tp=2", 1)).unwrap();
    assert!(far > 0.0 && far < 100.0 * TOLERANCE, "{far:e}");
}
