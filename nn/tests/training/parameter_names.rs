//! Parameters of a model: names, weight tying, initial values; and errors of plans that do not fit the model.

use crate::support::{MESHES, Setup, config, run};
use approx::abs_diff_eq;
use shardgrad_nn::{Embedding, Gpt2, Init, Linear, Model, Module, ModuleLeaf, Param, Plan, module};
use shardgrad_tensor::{DType, Error, Kind, Mesh, Value, World};
use std::collections::HashSet;

#[test]
fn parameter_names_and_file_shapes_match_hugging_face() {
    run("", |rank| {
        let model = Setup::new().model(rank)?;
        let names: Vec<String> = model.params().iter().map(|p| p.name()).collect();
        assert_eq!(names[..4], ["wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.ln_1.bias"]);
        assert!(
            names.contains(&"h.1.attn.c_attn.bias".to_string())
                && !names.iter().any(|n| n.starts_with("lm_head"))
        );
        assert_eq!(names.len(), 2 + 2 * 12 + 2);
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
        let shape = |name: &str| Ok::<_, Error>(model.param(name)?.file_shape());
        assert_eq!(shape("h.0.attn.c_attn.weight")?, [15, 45]);
        assert_eq!(shape("h.0.attn.c_attn.bias")?, [45]);
        assert_eq!(shape("h.0.attn.c_proj.weight")?, [15, 15]);
        assert_eq!(shape("h.0.mlp.c_fc.weight")?, [15, 60]);
        let block = 4 * 15 + 15 * 45 + 45 + 15 * 15 + 15 + 15 * 60 + 60 + 60 * 15 + 15;
        assert_eq!(model.num_params(), 11 * 15 + 8 * 15 + 2 * block + 30);
        let decayed: Vec<String> =
            model.params().iter().filter(|p| p.has_weight_decay()).map(|p| p.name()).collect();
        assert!(decayed.iter().all(|n| n.ends_with("weight") && !n.contains("ln_")), "{decayed:?}");
        assert_eq!(decayed.len(), 2 + 2 * 4);
        assert!(model.param("h.0.ln1.weight").unwrap_err().to_string().contains("h.0.ln_1.weight"));
        Ok(())
    });
}

module! {
    struct Pair { first: Linear, second: Linear }
}

#[test]
fn a_tied_parameter_has_one_name_and_one_gradient() {
    run("", |rank| {
        let shared = || {
            let first = Linear::new(3, 3);
            let mut second = Linear::new(3, 3).without_bias();
            second.weight = first.weight.clone();
            Pair { first, second }
        };
        let model = Model::with_dtype(rank, shared(), &Plan::new(), 1, DType::F64)?;
        let names: Vec<String> = model.params().iter().map(|p| p.name()).collect();
        assert_eq!(names, ["first.weight", "first.bias"]);
        assert!(model.second.weight.ptr_eq(&model.first.weight));
        // The gradient of x w w sums both uses of w.
        let tape = model.tape();
        let w = model.first.weight.tensor();
        let x = tape.constant(shardgrad_tensor::Tensor::from_host(rank, &[1, 3], &[1.0, 2.0, -1.0])?);
        model.second.forward(&model.first.forward(&x)).sum().backward()?;
        let got = tape.gradients().remove(&model.first.weight.key()).unwrap().to_f64()?;
        let tape = model.tape();
        let (a, b) = (tape.leaf(1000, &w), tape.leaf(1001, &w));
        let x = tape.constant(x.tensor().clone());
        x.matmul(&a).matmul(&b).sum().backward()?;
        let both = tape.gradients();
        let want: Vec<f64> =
            both[&1000].to_f64()?.iter().zip(both[&1001].to_f64()?).map(|(a, b)| a + b).collect();
        assert!(abs_diff_eq!(got[..], want[..], epsilon = 1e-14), "{got:?} {want:?}");
        Ok(())
    });
}

struct Twice(Linear, Linear);

impl Module for Twice {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        visit("layer", &self.0);
        visit("layer", &self.1);
    }

    fn leaf(&self) -> Option<ModuleLeaf<'_>> {
        None
    }
}

/// The error of Model::new on a mesh.
fn model_error<M: Module>(mesh: &str, plan: &Plan, module: impl Fn() -> M + Sync) -> Error {
    let made = World::run(Mesh::parse(mesh).unwrap(), |rank| Model::new(rank, module(), plan, 1).map(|_| ()));
    made.expect_err("Model::new must fail")
}

#[test]
fn duplicate_names_and_parameters_of_another_model_are_errors() {
    let error = model_error("", &Plan::new(), || Twice(Linear::new(1, 1), Linear::new(1, 1)));
    assert_eq!(error.kind(), Kind::Config);
    assert!(error.message().contains("`layer.weight`"), "{error}");
    run("", |rank| {
        let linear = Linear::new(1, 1);
        let mut other = Linear::new(1, 1);
        other.weight = linear.weight.clone();
        let first = Model::new(rank, linear, &Plan::new(), 1)?;
        let error = Model::new(rank, other, &Plan::new(), 1).unwrap_err();
        assert!(error.message().contains("already belongs to another model, as `weight`"), "{error}");
        let second = Model::new(rank, Linear::new(1, 1), &Plan::new(), 1)?;
        assert_ne!(first.weight.key(), second.weight.key());
        Ok(())
    });
    let without_model = World::run(Mesh::single(), |rank| {
        let tape = shardgrad_autograd::Tape::new(rank);
        let x = tape.constant(shardgrad_tensor::Tensor::from_host(rank, &[1, 1], &[1.0f32])?);
        let _ = Linear::new(1, 1).forward(&x);
        Ok(())
    });
    assert_eq!(without_model.unwrap_err().kind(), Kind::Config);
}

#[test]
fn plans_that_do_not_fit_the_model_are_errors() {
    let gpt = || Gpt2::new(&config());
    let unmatched =
        model_error("tp=2", &Plan::gpt2().store("c_atn.weight", "tp@2").point("wte.uot", "tp@1"), gpt);
    assert_eq!(
        (unmatched.kind(), unmatched.message()),
        (Kind::Config, "2 rule(s) of the plan match nothing in the model")
    );
    let text = unmatched.to_string();
    assert!(text.contains("nearest: h.0.attn.c_attn.weight") && text.contains("nearest: wte.out"), "{text}");
    // A rule must match even if the mesh does not have its axis.
    assert_eq!(model_error("", &Plan::new().store("x", "cp@0"), gpt).kind(), Kind::Config);
    let dim = model_error("tp=2", &Plan::new().store("bias", "tp@1"), || Linear::new(2, 2));
    assert_eq!(dim.kind(), Kind::Layout);
    assert_eq!(model_error("", &Plan::new().store("bias", "tp!"), || Linear::new(2, 2)).kind(), Kind::Config);
    // A vocabulary with fewer rows than ranks leaves some ranks with empty shards, which is allowed.
    run("tp=3", |rank| {
        let plan = Plan::new().store("weight", "tp@0");
        let model = Model::new(rank, Embedding::new(2, 3), &plan, 1)?;
        assert_eq!(model.weight.tensor().layout().to_string(), "f32[2@tp, 3]");
        Ok(())
    });
}

#[test]
fn initial_values_depend_on_seed_and_name_only() {
    let drawn = |mesh: &str, seed: u64| {
        run(mesh, |rank| {
            let model = Model::new(rank, Gpt2::new(&config()), &Plan::gpt2(), seed)?;
            model
                .params()
                .iter()
                .map(|p| Ok((p.name(), p.tensor().to_host::<f32>()?)))
                .collect::<Result<Vec<_>, Error>>()
        })
        .swap_remove(0)
    };
    let alone = drawn("", 1);
    for mesh in MESHES {
        assert!(drawn(mesh, 1) == alone, "{mesh}");
    }
    let other = drawn("", 2);
    for ((name, a), (_, b)) in alone.iter().zip(&other) {
        assert_eq!(a == b, name.ends_with("bias") || name.contains("ln_"), "{name}");
    }
    let of = |name: &str| &alone.iter().find(|(n, _)| n == name).unwrap().1;
    assert_ne!(of("h.0.mlp.c_fc.weight"), of("h.1.mlp.c_fc.weight"));
    let std = |name: &str| (of(name).iter().map(|x| x * x).sum::<f32>() / of(name).len() as f32).sqrt();
    assert!(abs_diff_eq!(std("h.0.mlp.c_fc.weight"), 0.3, epsilon = 0.03));
    assert!(
        abs_diff_eq!(std("h.0.mlp.c_proj.weight"), 0.15, epsilon = 0.015),
        "residual projections are scaled by 1 / sqrt(2 n_layer)"
    );
}

#[test]
fn integer_initialization_is_uniform() {
    for mesh in ["", "tp=2"] {
        run(mesh, |rank| {
            let table = Embedding::new(100, 70).init(Init::Integers(3));
            let model = Model::new(rank, table, &Plan::new().store("weight", "tp@1"), 1)?;
            let drawn = model.weight.tensor().to_f64()?;
            let mut counts = [0; 7];
            drawn.iter().for_each(|x| counts[(x + 3.0) as usize] += 1);
            assert!(
                drawn.iter().all(|x| x.fract() == 0.0) && counts.iter().all(|n| (900..1100).contains(n)),
                "{counts:?}"
            );
            Ok(())
        });
    }
}

#[test]
#[should_panic(expected = "a file shape has as many elements as the parameter")]
fn a_file_shape_of_another_size_is_refused() {
    let _ = Param::new(&[4, 3]).with_file_shape(&[6, 3]);
}

#[test]
#[should_panic(expected = "an order names every dim")]
fn a_file_order_of_another_length_is_refused() {
    let _ = Param::new(&[4, 3]).with_file_order(&[0]);
}
