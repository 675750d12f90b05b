//! Layers against hand-computed values, and errors of misuse.

use crate::support::{max_difference, run};
use approx::abs_diff_eq;
use shardgrad_autograd::{Noise, Tape, Var};
use shardgrad_nn::{
    AdamW, Attention, Dropout, Embedding, Gpt2Config, Init, LayerNorm, Linear, LrScheduler, Mlp, Model,
    Module, Param, Plan, RmsNorm, cross_entropy, module,
};
use shardgrad_tensor::{DType, Kind, Layout, Mesh, Placement, Rank, Result, Tensor, Value, World};

fn model_of<M: Module>(rank: &Rank, module: M) -> Result<Model<M>> {
    Model::with_dtype(rank, module, &Plan::new(), 1, DType::F64)
}

fn input(tape: &Tape, shape: &[usize], values: &[f64]) -> Result<Var> {
    Ok(tape.constant(Tensor::from_host(tape.rank(), shape, values)?))
}

#[test]
fn layer_norm_and_rms_norm_match_hand_computed_values() {
    run("", |rank| {
        let (layer, rms) =
            (model_of(rank, LayerNorm::new(2).eps(0.0))?, model_of(rank, RmsNorm::new(2).eps(0.0))?);
        let tape = layer.tape();
        let x = input(&tape, &[1, 2], &[1.0, 7.0])?;
        layer.bias.set_tensor(Tensor::from_host(rank, &[2], &[0.0, 10.0])?)?;
        assert_eq!(layer.forward(&x).tensor().to_f64()?, [-1.0, 11.0]);
        rms.weight.set_tensor(Tensor::from_host(rank, &[2], &[5.0, 1.0])?)?;
        let y = rms.forward(&x).tensor().to_f64()?;
        assert!(abs_diff_eq!(y[..], [1.0, 1.4][..], epsilon = 1e-15), "{y:?}");
        Ok(())
    });
}

#[test]
fn embedding_looks_up_rows_and_computes_logits() {
    run("", |rank| {
        let table = model_of(rank, Embedding::new(3, 2))?;
        table.weight.set_tensor(Tensor::from_host(rank, &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?)?;
        let tape = table.tape();
        let ids = tape.constant(Tensor::from_host(rank, &[2], &[2i64, 0])?);
        assert_eq!(table.forward(&ids).tensor().to_f64()?, [5.0, 6.0, 1.0, 2.0]);
        assert_eq!(table.first_rows(&ids, 2).tensor().to_f64()?, [1.0, 2.0, 3.0, 4.0]);
        let x = input(&tape, &[1, 2], &[1.0, -1.0])?;
        assert_eq!(table.logits(&x).tensor().to_f64()?, [-1.0, -1.0, -1.0]);
        Ok(())
    });
}

module! {
    /// An MLP, and its input as a parameter.
    struct WithInput { x: Param, mlp: Mlp }
}

#[test]
fn mlp_matches_one_rank_under_every_tensor_parallel_plan() {
    let tensor = || Plan::tensor_parallel("tp");
    let plans = [
        ("whole", Plan::copies("tp")),
        ("columns", tensor().column_parallel("mlp.c_fc").row_parallel("mlp.c_proj")),
        ("columns of the second", tensor().column_parallel("mlp.c_proj")),
        (
            "columns of the second, gathered",
            tensor().column_parallel("mlp.c_proj").point("mlp.c_proj.out", "tp="),
        ),
    ];
    for (what, plan) in plans {
        let outcome = |mesh: &str| {
            let mut all = run(mesh, |rank| {
                let module =
                    WithInput { x: Param::new(&[3, 4]).init(Init::Normal(1.0)), mlp: Mlp::new(4, 5) };
                let model = Model::with_dtype(rank, module, &plan, 1, DType::F64)?;
                for bias in [&model.mlp.c_fc.bias, &model.mlp.c_proj.bias].into_iter().flatten() {
                    let n = bias.shape()[0];
                    let numbers: Vec<f64> = (0..n).map(|i| i as f64 - 1.5).collect();
                    bias.set_tensor(Tensor::from_global(rank, &bias.layout(), &numbers)?)?;
                }
                let tape = model.tape();
                let y = model.mlp.forward(&model.x.on_tape(&tape));
                y.square().sum().backward()?;
                let mut found = y.tensor().to_f64()?;
                for gradient in tape.gradients().values() {
                    found.extend(gradient.to_f64()?);
                }
                Ok(found)
            });
            all.swap_remove(0)
        };
        let one = outcome("tp=1");
        for mesh in ["tp=2", "tp=3"] {
            let split = outcome(mesh);
            let far = max_difference(&split, &one);
            assert!(far < 1e-12, "{what} on {mesh}: {far}");
        }
    }
}

#[test]
fn cross_entropy_matches_hand_computed_values_with_and_without_vocab_parallelism() {
    for mesh in ["", "tp=2", "tp=3"] {
        run(mesh, |rank| {
            let layout = Layout::invariant(rank.mesh(), DType::F64, &[2, 3]);
            let split = rank
                .mesh()
                .axis("tp")
                .map_or(layout.clone(), |tp| layout.with_placement(tp, Placement::Shard(1)));
            let logits = [0.0, 2f64.ln(), 5f64.ln(), 700.0, 700.0, -700.0];
            let tape = Tape::new(rank);
            let logits = tape.leaf(0, &Tensor::from_global(rank, &split, &logits)?);
            let targets = tape.constant(Tensor::from_host(rank, &[2], &[1i64, 0])?);
            let losses = cross_entropy(&logits, &targets);
            let found = losses.tensor().to_f64()?;
            assert!(
                abs_diff_eq!(found[0], 4f64.ln(), epsilon = 1e-15)
                    && abs_diff_eq!(found[1], 2f64.ln(), epsilon = 1e-12),
                "{found:?}"
            );
            losses.sum().backward()?;
            let got = tape.gradients().remove(&0).unwrap().to_f64()?;
            let want = [0.125, -0.75, 0.625, -0.5, 0.5, 0.0];
            // exp(z - lse) is as accurate as lse is at 700.
            assert!(abs_diff_eq!(got[..], want[..], epsilon = 1e-13), "{got:?}");
            Ok(())
        });
    }
}

#[test]
fn dropout_drops_with_its_probability_and_scales_the_rest() {
    run("", |rank| {
        let model = model_of(rank, Dropout::new(0.25))?;
        let tape = model.tape();
        let x = input(&tape, &[100, 100], &[3.0; 10_000])?;
        tape.set_noise(None);
        assert_eq!(model.forward(&x).tensor().to_f64()?, [3.0; 10_000]);
        let drawn = |step| {
            tape.set_noise(Some(Noise { seed: 1, step, first_row: 0 }));
            model.forward(&x).tensor().to_f64()
        };
        let y = drawn(0)?;
        let dropped = y.iter().filter(|y| **y == 0.0).count();
        assert!((2300..2700).contains(&dropped) && y.iter().all(|y| *y == 0.0 || *y == 4.0), "{dropped}");
        assert_eq!(drawn(0)?, y);
        assert_ne!(drawn(1)?, y);
        Ok(())
    });
}

#[test]
fn misuse_of_layers_is_an_error() {
    fn kind<T: Send>(f: impl Fn(&Rank) -> Result<T> + Sync) -> Kind {
        World::run(Mesh::single(), f).map(|_| ()).unwrap_err().kind()
    }
    for heads in [0, 3] {
        assert_eq!(kind(|_| Ok(Attention::new(10, heads).c_attn.weight.numel())), Kind::Config);
    }
    for p in [-0.1, 1.0, f64::NAN] {
        assert_eq!(kind(|_| Ok(format!("{:?}", Dropout::new(p)))), Kind::Config);
    }
    let unnamed = |rank: &Rank| {
        let tape = Tape::new(rank);
        tape.set_noise(Some(Noise { seed: 1, step: 0, first_row: 0 }));
        Dropout::new(0.5).forward(&input(&tape, &[1], &[1.0])?).item()
    };
    assert_eq!(kind(unnamed), Kind::Config);
    let narrow = |rank: &Rank| {
        let model = model_of(rank, Linear::new(3, 2))?;
        model.forward(&input(&model.tape(), &[1, 4], &[0.0; 4])?).item()
    };
    assert_eq!(kind(narrow), Kind::Shape);
    let point = |rank: &Rank| {
        let model =
            Model::with_dtype(rank, Linear::new(1, 1), &Plan::new().point("out", "tp@5"), 1, DType::F64)?;
        model.forward(&input(&model.tape(), &[1, 1], &[0.0])?).item()
    };
    let error = World::run(Mesh::parse("tp=2").unwrap(), point).unwrap_err();
    assert_eq!(error.kind(), Kind::Layout);
    assert!(
        error.to_string().contains("shards dim 5 over tp") && error.to_string().contains("out"),
        "{error}"
    );
}

#[test]
fn plans_optimizers_and_configs_are_send_and_sync() {
    fn shared<T: Send + Sync + Clone + std::fmt::Debug>() {}
    shared::<Plan>();
    shared::<AdamW>();
    shared::<LrScheduler>();
    shared::<Gpt2Config>();
}
