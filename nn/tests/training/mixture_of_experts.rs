//! Mixtures of experts: results against a token-by-token reference; expert parallelism with the losses and gradients of one rank; and
//! the collectives of a block.

use crate::context_parallel::{ROWS, TrainingCase, trace};
use crate::llama;
use crate::support::{max_difference, run};
use crate::traces::counts;
use approx::assert_abs_diff_eq;
use shardgrad_nn::ExpertsConfig;
use shardgrad_nn::{Init, LlamaConfig, LlamaKind, MixtureOfExperts, Model, Plan, load_balancing_loss};
use shardgrad_tensor::{DType, Layout, Mesh, Phase, Tensor, Value};

const KINDS: [LlamaKind; 2] = [LlamaKind::Mixtral, LlamaKind::Qwen3Moe];

/// Even, uneven and empty shards of 8 experts, with and without data, context and tensor parallelism.
const MESHES: [&str; 9] = [
    "ep=2",
    "ep=3",
    "ep=9",
    "dp=2,ep=2",
    "ep=2,dp=3",
    "ep=2,tp=2",
    "ep=3,cp=2",
    "dp=2,ep=2,tp=3",
    "ep=2,cp=2,tp=2",
];

fn of(kind: LlamaKind, experts: ExpertsConfig) -> LlamaConfig {
    LlamaConfig { experts: Some(experts), ..llama::config(kind) }
}

/// The rows of a matrix.
fn rows(x: &[f64], width: usize) -> Vec<&[f64]> {
    x.chunks_exact(width).collect()
}

/// x times a matrix with `columns` columns.
fn times(x: &[f64], w: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).map(|j| x.iter().enumerate().map(|(i, x)| x * w[i * columns + j]).sum()).collect()
}

/// Reference result of the layer for one row, expert by expert.
fn reference(
    x: &[f64],
    gate: &[f64],
    stacks: [&[f64]; 3],
    [hidden, count, top_k]: [usize; 3],
    renormalize: bool,
) -> Vec<f64> {
    let d = x.len();
    let logits = times(x, gate, count);
    let sum: f64 = logits.iter().map(|z| z.exp()).sum();
    let mut scored: Vec<(f64, usize)> = logits.iter().map(|z| z.exp() / sum).zip(0..).collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    scored.truncate(top_k);
    let all: f64 = if renormalize { scored.iter().map(|s| s.0).sum() } else { 1.0 };
    let mut y = vec![0.0; d];
    for (score, e) in scored {
        let of = |stack: &[f64]| stack[e * d * hidden..][..d * hidden].to_vec();
        let (gates, ups) = (times(x, &of(stacks[0]), hidden), times(x, &of(stacks[1]), hidden));
        let units: Vec<f64> = gates.iter().zip(&ups).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        let found = times(&units, &of(stacks[2]), d);
        y.iter_mut().zip(found).for_each(|(y, found)| *y += score / all * found);
    }
    y
}

#[test]
fn mixture_of_experts_matches_a_token_by_token_reference() {
    let [d, hidden, count, top_k] = [5, 7, 6, 3];
    for renormalize in [false, true] {
        let ranks = run("", |rank| {
            let layer = MixtureOfExperts::new(d, hidden, count, top_k, renormalize).init(Init::Normal(0.8));
            let model = Model::with_dtype(rank, layer, &Plan::new(), 3, DType::F64)?;
            let x = Tensor::normal(rank, &Layout::invariant(rank.mesh(), DType::F64, &[2, 4, d]), 1, 0, 1.0)?;
            let (y, routes) = model.forward(&model.inference_tape().constant(x.clone()));
            assert_eq!(routes.index.shape()[..], [2, 4, top_k]);
            let of = |name: &str| model.param(name)?.tensor().to_f64();
            let stacks =
                ["experts.gate_proj", "experts.up_proj", "experts.down_proj"].map(|name| of(name).unwrap());
            let stacks = stacks.each_ref().map(|stack| &stack[..]);
            let (x, gate) = (x.to_f64()?, of("gate.weight")?);
            let expected = rows(&x, d)
                .into_iter()
                .map(|x| reference(x, &gate, stacks, [hidden, count, top_k], renormalize));
            Ok(max_difference(&expected.flatten().collect::<Vec<f64>>(), &y.tensor().to_f64()?))
        });
        assert!(ranks[0] < 1e-14, "{:e}, renormalize {renormalize}", ranks[0]);
    }
}

#[test]
fn expert_parallelism_matches_one_rank() {
    for kind in KINDS {
        TrainingCase::new(llama::config(kind), 7).assert_matches_one_rank_on(&MESHES);
    }
    // One expert per token, and most experts without a token.
    let lonely = ExpertsConfig { norm_topk_prob: false, ..ExpertsConfig::new(40, 1, 6) };
    let lonely = of(LlamaKind::Mixtral, lonely);
    TrainingCase::new(lonely, 5).assert_matches_one_rank_on(&["ep=2", "ep=7", "dp=2,ep=4,tp=2"]);
    // All experts for all tokens.
    TrainingCase::new(of(LlamaKind::Mixtral, ExpertsConfig::new(3, 3, 6)), 5)
        .assert_matches_one_rank_on(&["ep=2", "ep=4"]);
    // Blocks with experts and without.
    let some = ExpertsConfig { decoder_sparse_step: 2, ..ExpertsConfig::new(4, 2, 9) };
    TrainingCase::new(of(LlamaKind::Qwen3Moe, some), 7).assert_matches_one_rank_on(&[
        "ep=2",
        "dp=2,ep=2",
        "ep=3,tp=2",
    ]);
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
    for kind in KINDS {
        let [without, with_balance] = [false, true].map(|output_router_logits| {
            let experts = ExpertsConfig { output_router_logits, ..balanced.clone() };
            TrainingCase::new(of(kind, experts), 7).assert_matches_one_rank_on(&MESHES).loss
        });
        // Two experts of five per token, used equally, give 2.
        let balance = (with_balance - without) / 0.7;
        assert!(balance > 1.5 && balance < 5.0, "{kind:?}: {balance}");
        let again = TrainingCase { recompute: true, ..TrainingCase::new(of(kind, balanced.clone()), 7) };
        assert_abs_diff_eq!(again.outcome("ep=2").loss, with_balance, epsilon = 1e-12);
    }
}

#[test]
fn load_balancing_loss_matches_a_hand_computed_value() {
    run("", |rank| {
        let tape = shardgrad_autograd::Tape::new(rank);
        let host =
            |x: [f64; 2]| Ok::<_, shardgrad_tensor::Error>(tape.constant(Tensor::from_host(rank, &[2], &x)?));
        // Two layers of four rows: experts selected 6 and 2 times, with mean scores of 3/4 and 1/4.
        let usage = [[host([4.0, 0.0])?, host([3.5, 0.5])?], [host([2.0, 2.0])?, host([2.5, 1.5])?]];
        assert_eq!(load_balancing_loss(&usage, 8).item()?, 2.0 * (0.75 * 0.75 + 0.25 * 0.25));
        Ok(())
    });
}

#[test]
fn activation_checkpointing_selects_the_same_experts() {
    let text =
        |recompute| TrainingCase { recompute, ..TrainingCase::new(llama::config(LlamaKind::Mixtral), 7) };
    let [kept, again] = [false, true].map(|recompute| text(recompute).outcome("ep=2"));
    assert_eq!((kept.loss, &kept.gradients), (again.loss, &again.gradients), "the same to the bit");
    assert!(again.saved_bytes < kept.saved_bytes);
}

#[test]
fn a_rank_stores_only_its_experts() {
    let config = llama::config(LlamaKind::Mixtral);
    let plan = shardgrad_nn::Llama::plan(&config);
    let held = |mesh: &str| {
        run(mesh, |rank| {
            let model = Model::new(rank, shardgrad_nn::Llama::new(&config), &plan, 1)?;
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
    let config = llama::config(LlamaKind::Mixtral).into();
    // Two microbatches of two blocks; 19 parameters that every rank has, once.
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
