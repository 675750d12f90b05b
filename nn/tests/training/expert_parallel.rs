//! Expert parallelism, with rows gathered or exchanged: losses and gradients of one rank, the collectives of a block, and what is stored and
//! saved for backward.

use crate::context_parallel::{ROWS, TrainingCase, WithForm, trace, trace_of_plan};
use crate::llama;
use crate::support::run;
use crate::traces::{counts, traced};
use approx::assert_abs_diff_eq;
use shardgrad_autograd::Var;
use shardgrad_nn::{ExpertsConfig, LanguageModel, Llama, LlamaConfig, LlamaKind, Model, ModelConfig, Plan};
use shardgrad_tensor::{DType, Mesh, Phase, Record, World};
use shardgrad_testing::sample;

const KINDS: [LlamaKind; 2] = [LlamaKind::Mixtral, LlamaKind::Qwen3Moe];

/// Even, uneven and empty shards of experts and rows, with every other axis.
const MESHES: [&str; 10] = [
    "ep=2",
    "ep=3",
    "ep=4",
    "ep=9",
    "dp=2,ep=2",
    "ep=2,dp=3",
    "ep=2,tp=2",
    "ep=3,cp=2",
    "ep=2,cp=2,tp=2",
    "dp=2,ep=2,tp=3",
];

fn of(kind: LlamaKind, experts: ExpertsConfig) -> LlamaConfig {
    LlamaConfig { experts: Some(experts), ..llama::config(kind) }
}

#[test]
fn exchanged_and_gathered_rows_match_one_rank() {
    let mixtral = |experts| TrainingCase::new(of(LlamaKind::Mixtral, experts), 5);
    let cases = [
        TrainingCase::new(llama::config(LlamaKind::Mixtral), 7),
        TrainingCase::new(llama::config(LlamaKind::Qwen3Moe), 7),
        // One expert per token, and most experts without a token.
        mixtral(ExpertsConfig { norm_topk_prob: false, ..ExpertsConfig::new(40, 1, 6) }),
        // All experts for all tokens, and ranks without an expert.
        mixtral(ExpertsConfig::new(3, 3, 6)),
        // One block of two with experts.
        TrainingCase::new(
            of(LlamaKind::Qwen3Moe, ExpertsConfig { decoder_sparse_step: 2, ..ExpertsConfig::new(4, 2, 9) }),
            7,
        ),
        TrainingCase { recompute: true, ..TrainingCase::new(llama::config(LlamaKind::Mixtral), 7) },
    ];
    let exchanged_and_gathered: [(&str, WithForm); 2] =
        [("exchange", Plan::exchange_experts), ("gather", Plan::gather_experts)];
    for (number, case) in cases.into_iter().enumerate() {
        let meshes: Vec<&str> = sample(number, MESHES).collect();
        case.assert_matches_one_rank_by(&exchanged_and_gathered, &meshes);
    }
    let last = ExpertsConfig { mlp_only_layers: vec![1], ..ExpertsConfig::new(4, 2, 9) };
    TrainingCase::new(of(LlamaKind::Qwen3Moe, last), 7).assert_matches_one_rank_on(&["ep=2,cp=2"]);
}

#[test]
fn load_balancing_loss_is_that_of_the_whole_batch() {
    let balanced = ExpertsConfig {
        output_router_logits: true,
        router_aux_loss_coef: 0.7,
        ..ExpertsConfig::new(5, 2, 9)
    };
    for (number, kind) in KINDS.into_iter().enumerate() {
        let meshes: Vec<&str> = sample(number, MESHES).collect();
        let without = ExpertsConfig { output_router_logits: false, ..balanced.clone() };
        let without = TrainingCase::new(of(kind, without), 7).outcome("").loss;
        let with_balance =
            TrainingCase::new(of(kind, balanced.clone()), 7).assert_matches_one_rank_on(&meshes).loss;
        // Two experts of five per token, used equally, give 2.
        let balance = (with_balance - without) / 0.7;
        assert!(balance > 1.5 && balance < 5.0, "{kind:?}: {balance}");
        let again = TrainingCase { recompute: true, ..TrainingCase::new(of(kind, balanced.clone()), 7) };
        assert_abs_diff_eq!(again.outcome("ep=2").loss, with_balance, epsilon = 1e-12);
    }
}

#[test]
fn activation_checkpointing_selects_the_same_experts_and_exchanges_the_same_pairs() {
    let plan = LanguageModel::plan(&llama::config(LlamaKind::Mixtral).into());
    for plan in [plan.clone().gather_experts(), plan.exchange_experts()] {
        let [kept, again] = [false, true].map(|recompute| {
            TrainingCase { recompute, ..TrainingCase::new(llama::config(LlamaKind::Mixtral), 7) }
                .outcome_by(&plan, "ep=2")
        });
        assert_eq!((kept.loss, &kept.gradients), (again.loss, &again.gradients), "{plan}");
        assert!(again.saved_bytes < kept.saved_bytes, "{plan}");
    }
}

#[test]
fn a_rank_stores_only_its_experts() {
    let config = llama::config(LlamaKind::Mixtral);
    let plan = Llama::plan(&config);
    let held = |mesh: &str| {
        run(mesh, |rank| {
            let model = Model::new(rank, Llama::new(&config), &plan, 1)?;
            let up = model.param("model.layers.0.mlp.experts.up_proj")?;
            Ok(up.layout().local_shape(rank.coordinates()).to_vec())
        })
    };
    assert_eq!(held("ep=3"), [2, 3, 3].map(|count| vec![count, 10, 7]));
    assert_eq!(held("ep=2,tp=2")[0], [4, 10, 3]);
    assert_eq!(held("ep=9")[0], [0, 10, 7]);
}

#[test]
fn a_block_all_gathers_rows_and_reduce_scatters_sums() {
    let config = ModelConfig::from(llama::config(LlamaKind::Mixtral));
    // Two microbatches of two blocks; 17 parameters that every rank has, once.
    let records = trace(&config, "ep=2");
    assert_eq!(
        counts(&records),
        [
            "backward all_gather 4",
            "backward all_reduce 17",
            "backward reduce_scatter 8",
            "forward all_gather 12",
            "forward reduce_scatter 4"
        ]
    );
    let moved = |phase, op| -> Vec<(&str, usize)> {
        let of = records.iter().filter(move |r| r.phase == phase && r.op == op);
        of.map(|r| (r.path.as_str(), r.numel())).collect()
    };
    let [rows, pairs] = [ROWS * 8 * 10, ROWS * 8 * 2];
    let block = |block: usize| {
        [("rows", rows), ("index", pairs), ("shares", pairs)]
            .map(|(point, numel)| (format!("model.layers.{block}.mlp.experts.{point}"), numel))
    };
    let gathered: Vec<(String, usize)> =
        moved(Phase::Forward, "all_gather")[..6].iter().map(|(path, n)| (path.to_string(), *n)).collect();
    assert_eq!(gathered, [block(0), block(1)].concat());
    assert_eq!(moved(Phase::Forward, "reduce_scatter")[0], ("model.layers.0.mlp.experts.out", rows));
    // The gradients of experts are reduced over `dp` alone, all other gradients over both axes at once.
    let both = trace(&config, "dp=2,ep=2");
    let mesh = Mesh::parse("dp=2,ep=2").unwrap();
    let over = |name: &str| -> usize {
        let of = both.iter().filter(|r| r.op == "all_reduce" && mesh.names(r.axes) == name);
        of.map(|r| r.members().count()).sum()
    };
    assert_eq!([over("dp"), over("dp,ep"), over("ep")], [6, 17, 0]);
}

#[test]
fn a_block_exchanges_counts_rows_and_results() {
    let config = ModelConfig::from(llama::config(LlamaKind::Mixtral));
    let plan = LanguageModel::plan(&config);
    let trace = |plan: &Plan, mesh: &str| trace_of_plan(&config, plan, mesh);
    let records = trace(&plan.clone().exchange_experts(), "ep=2");
    // Two microbatches of two blocks; 17 parameters that every rank has, once.
    assert_eq!(
        counts(&records),
        ["backward all_reduce 17", "backward all_to_all 12", "forward all_to_all 12"]
    );
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
    assert_eq!(counts(&both), ["backward all_reduce 23", "backward all_to_all 12", "forward all_to_all 12"]);
}

/// The bytes that all ranks move in a pass with balanced routing.
fn balanced_bytes(k: usize, plan: &Plan, num_ranks: usize) -> u64 {
    let case = TrainingCase::new(of(LlamaKind::Mixtral, ExpertsConfig::new(12, k, 6)), 8);
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
        .map(|plan| case.outcome_by(&plan, "ep=2").saved_bytes);
    // In each of two blocks: two rows of 8 tokens of width 10, with two indices and two weights each, of 8 bytes.
    assert_eq!(gathered - exchanged, 2 * 2 * 8 * (10 + 2 + 2) * 8);
}
