//! Expert parallelism by exchange: losses and gradients of one rank, the collectives of a block, and what is saved for backward.

use crate::context_parallel::TrainingCase;
use crate::llama;
use crate::support::{Outcome, max_difference, run};
use crate::traces::{counts, traced};
use shardgrad_autograd::Var;
use shardgrad_nn::{ExpertsConfig, LanguageModel, LlamaConfig, LlamaKind, Model, Plan};
use shardgrad_tensor::{DType, Mesh, Record, World};

/// Even, uneven and empty shards of experts and rows, with every other axis.
const MESHES: [&str; 8] =
    ["ep=2", "ep=3", "ep=4", "ep=9", "dp=2,ep=2", "ep=2,tp=2", "ep=3,cp=2", "dp=2,ep=2,tp=3"];

fn mixtral(experts: ExpertsConfig) -> LlamaConfig {
    LlamaConfig { experts: Some(experts), ..llama::config(LlamaKind::Mixtral) }
}

fn outcome(case: &TrainingCase, mesh: &str, plan: &Plan) -> Outcome {
    let mut ranks = run(mesh, |rank| case.on(rank, plan));
    let first = ranks.swap_remove(0);
    assert!(ranks.iter().all(|o| o.loss == first.loss && o.gradients == first.gradients), "{mesh}");
    first
}

#[test]
fn exchanged_and_gathered_rows_match_one_rank() {
    let cases = [
        TrainingCase::new(llama::config(LlamaKind::Mixtral), 7),
        TrainingCase::new(llama::config(LlamaKind::Qwen3Moe), 7),
        // One expert per token, and most experts without a token.
        TrainingCase::new(
            mixtral(ExpertsConfig { norm_topk_prob: false, ..ExpertsConfig::new(40, 1, 6) }),
            5,
        ),
        // All experts for all tokens, and ranks without an expert.
        TrainingCase::new(mixtral(ExpertsConfig::new(3, 3, 6)), 5),
        TrainingCase { recompute: true, ..TrainingCase::new(llama::config(LlamaKind::Mixtral), 7) },
    ];
    for case in cases {
        let plan = LanguageModel::plan(&case.config);
        let alone = outcome(&case, "", &plan);
        for mesh in MESHES {
            for (way, plan) in
                [("exchanged", plan.clone().exchange_experts()), ("gathered", plan.clone().gather_experts())]
            {
                let many = outcome(&case, mesh, &plan);
                let what = format!("{:?} on {mesh}, {way}", case.config);
                let far = (alone.loss - many.loss).abs().max((alone.norm - many.norm).abs());
                assert!(far < 1e-12 * alone.norm.max(1.0), "{what}: loss or norm differ by {far:e}");
                for (name, gradient) in &alone.gradients {
                    let worst = max_difference(gradient, &many.gradients[name]);
                    assert!(worst < 1e-12, "{what}: {name} differs by {worst:e}");
                }
            }
        }
    }
}

#[test]
fn activation_checkpointing_exchanges_the_same_pairs() {
    let plan = LanguageModel::plan(&llama::config(LlamaKind::Mixtral).into()).exchange_experts();
    let text =
        |recompute| TrainingCase { recompute, ..TrainingCase::new(llama::config(LlamaKind::Mixtral), 7) };
    let [kept, again] = [false, true].map(|recompute| outcome(&text(recompute), "ep=2", &plan));
    assert_eq!((kept.loss, &kept.gradients), (again.loss, &again.gradients), "the same to the bit");
    assert!(again.saved_bytes < kept.saved_bytes);
}

/// The collectives of forward and backward on the first rank.
fn trace(plan: &Plan, mesh: &str) -> Vec<Record> {
    let case = TrainingCase::new(llama::config(LlamaKind::Mixtral), 8);
    let trace = |rank: &_| {
        let model = Model::with_dtype(rank, LanguageModel::new(&case.config), plan, 5, DType::F64)?;
        let tape = model.tape();
        traced(rank, || {
            let x: Vec<Var> = case.arguments(rank, plan)?.into_iter().map(|x| tape.constant(x)).collect();
            model.loss_from_batch(&x).value().backward()?;
            assert_eq!(tape.gradients().len(), model.params().len());
            Ok(())
        })
    };
    run(mesh, trace).swap_remove(0)
}

#[test]
fn a_block_exchanges_counts_rows_and_results() {
    let plan = LanguageModel::plan(&llama::config(LlamaKind::Mixtral).into());
    let records = trace(&plan.clone().exchange_experts(), "ep=2");
    // Two blocks; 17 parameters that every rank has.
    assert_eq!(counts(&records), ["backward all_reduce 17", "backward all_to_all 6", "forward all_to_all 6"]);
    let first: Vec<&Record> = records.iter().filter(|r| r.op == "all_to_all").take(3).collect();
    assert!(first.iter().all(|r| r.path == "model.layers.0.mlp.experts.rows"), "{first:?}");
    assert_eq!(first[0].counts, [4, 4], "the number of pairs of each of 8 experts");
    // One of two rows of 8 tokens with two experts each, of width 10.
    assert_eq!((first[1].numel(), first[1].dtype), (8 * 2 * 10, DType::F64));
    // A layer without a choice takes the cheaper way: few ranks gather, many exchange.
    assert_eq!(counts(&trace(&plan, "ep=2")), counts(&trace(&plan.clone().gather_experts(), "ep=2")));
    assert_eq!(counts(&trace(&plan, "ep=4")), counts(&trace(&plan.clone().exchange_experts(), "ep=4")));
    // The gradients of experts are reduced over `dp` alone.
    let both = trace(&plan.exchange_experts(), "dp=2,ep=2");
    assert_eq!(counts(&both), ["backward all_reduce 23", "backward all_to_all 6", "forward all_to_all 6"]);
}

/// The bytes that all ranks move in a pass with balanced routing.
fn balanced_bytes(k: usize, plan: &Plan, num_ranks: usize) -> u64 {
    let case = TrainingCase::new(mixtral(ExpertsConfig::new(12, k, 6)), 8);
    let mesh = Mesh::parse(&format!("ep={num_ranks}")).unwrap();
    let bytes_of = |rank: usize| {
        let bytes = World::new(mesh.clone()).dry_run(rank, |rank| {
            let model = Model::with_dtype(rank, LanguageModel::new(&case.config), plan, 5, DType::F64)?;
            let tape = model.tape();
            let records = traced(rank, || {
                let x: Vec<Var> = case.arguments(rank, plan)?.into_iter().map(|x| tape.constant(x)).collect();
                model.loss_from_batch(&x).value().backward()
            })?;
            Ok(records.iter().map(|r| r.bytes).sum::<u64>())
        });
        bytes.unwrap()
    };
    (0..num_ranks).map(bytes_of).sum()
}

#[test]
fn without_a_choice_the_form_of_fewer_bytes_is_taken() {
    let plan = LanguageModel::plan(&llama::config(LlamaKind::Mixtral).into());
    let forms = [plan.clone(), plan.clone().gather_experts(), plan.exchange_experts()];
    let gathers = |k: usize, num_ranks: usize| {
        let [chosen, gathered, exchanged] = forms.each_ref().map(|plan| balanced_bytes(k, plan, num_ranks));
        let what = format!(
            "{num_ranks} ranks, {k} experts for each row: {chosen}, gathered {gathered}, exchanged {exchanged}"
        );
        assert!(gathered != exchanged && chosen == gathered.min(exchanged), "{what}");
        chosen == gathered
    };
    // On two ranks; two rows on more ranks would leave some without rows.
    let border: Vec<bool> = (1..=4).map(|k| gathers(k, 2)).collect();
    assert_eq!(border, [false, true, true, true]);
}

#[test]
fn exchanged_rows_are_not_saved_for_backward() {
    let case = TrainingCase::new(llama::config(LlamaKind::Mixtral), 8);
    let plan = LanguageModel::plan(&case.config);
    let [exchanged, gathered] = [plan.clone().exchange_experts(), plan.gather_experts()]
        .map(|plan| outcome(&case, "ep=2", &plan).saved_bytes);
    // In each of two blocks: two rows of 8 tokens of width 10, with two indices and two weights each, of 8 bytes.
    assert_eq!(gathered - exchanged, 2 * 2 * 8 * (10 + 2 + 2) * 8);
}
