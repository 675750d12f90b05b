//! Hooks on activation points, and gradients by parameter name: the same on every mesh, and no trace without hooks.

use crate::support::{MESHES, Setup, run};
use shardgrad_nn::{Gpt2, Model};
use shardgrad_tensor::{Kind, Rank, Result};
use std::cell::RefCell;
use std::rc::Rc;

/// What hooks saw: name, and the whole value.
type Seen = Vec<(String, Vec<f64>)>;

/// Watches the outputs of the second products of all MLPs through a step; returns the loss, values and gradients.
fn watched(rank: &Rank, setup: &Setup) -> Result<(f64, Seen, Seen)> {
    let model = setup.model(rank)?;
    let seen: [Rc<RefCell<Seen>>; 2] = Default::default();
    let [values, gradients] = seen.clone();
    let note = |seen: Rc<RefCell<Seen>>| {
        move |name: &str, tensor: &shardgrad_tensor::Tensor| {
            // Collective calls: every rank runs the hook.
            assert!(tensor.show()?.starts_with(&tensor.layout().to_string()));
            seen.borrow_mut().push((name.to_string(), tensor.to_f64()?));
            Ok(())
        }
    };
    assert_eq!(model.watch_values("h.*.mlp.c_proj.out", note(values))?, 2);
    assert_eq!(model.watch_gradients("h.*.mlp.c_proj.out", note(gradients))?, 2);
    let loss = setup.backward(&model, &model.tape())?.0;
    model.unwatch();
    let unwatched = setup.backward(&model, &model.tape())?.0;
    assert!((loss - unwatched).abs() < 1e-12);
    let [values, gradients] = seen.map(|seen| seen.take());
    Ok((loss, values, gradients))
}

fn assert_close(mesh: &str, got: &Seen, want: &Seen) {
    assert_eq!(got.len(), want.len(), "{mesh}");
    for ((name, got), (right, want)) in got.iter().zip(want) {
        assert_eq!(name, right, "{mesh}");
        let near = got.len() == want.len() && got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-11);
        assert!(near, "{mesh}: {name}");
    }
}

#[test]
fn hooks_see_the_values_and_gradients_of_one_rank_on_every_mesh() {
    let (loss, values, gradients) = run("", |rank| watched(rank, &Setup::new())).remove(0);
    let names = |seen: &Seen| seen.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&values), ["h.0.mlp.c_proj.out", "h.1.mlp.c_proj.out"]);
    assert_eq!(names(&gradients), ["h.1.mlp.c_proj.out", "h.0.mlp.c_proj.out"]);
    assert!(gradients.iter().flat_map(|(_, g)| g).any(|g| *g != 0.0));
    for mesh in MESHES {
        for (got, v, g) in run(mesh, |rank| watched(rank, &Setup::new())) {
            assert!((got - loss).abs() < 1e-11, "{mesh}: {got}");
            assert_close(mesh, &v, &values);
            assert_close(mesh, &g, &gradients);
        }
    }
}

#[test]
fn microbatches_and_recomputed_blocks_call_hooks_again() {
    let setup = Setup { microbatches: 2, ..Setup::new() };
    let (_, values, gradients) = run("", |rank| watched(rank, &setup)).remove(0);
    assert_eq!((values.len(), gradients.len()), (4, 4));
    let setup = Setup { recompute: true, ..Setup::new() };
    let (_, values, gradients) = run("", |rank| watched(rank, &setup)).remove(0);
    // The second forward pass of a block is part of its backward pass.
    assert_eq!((values.len(), gradients.len()), (4, 2));
}

#[test]
fn errors_of_hooks_end_the_pass() {
    let model = |rank: &Rank| -> Result<Model<Gpt2>> {
        let model = Setup::new().model(rank)?;
        let refuse = |name: &str, _: &shardgrad_tensor::Tensor| {
            Err(shardgrad_tensor::Error::new(Kind::Config, format!("seen {name}")))
        };
        model.watch_gradients("h.1.ln_1.out", refuse)?;
        Ok(model)
    };
    let step = |rank: &Rank| {
        let model = model(rank)?;
        Setup::new().backward(&model, &model.tape()).map(|_| ())
    };
    let error = shardgrad_tensor::World::run(shardgrad_tensor::Mesh::single(), step).unwrap_err();
    assert!(error.message().contains("seen h.1.ln_1.out"), "{error}");
}

#[test]
fn gradients_are_read_by_parameter_name() {
    for mesh in ["", "dp=2,tp=2"] {
        run(mesh, |rank| {
            let (setup, model) = (Setup::new(), Setup::new().model(rank)?);
            model.freeze("h.0.ln_1.weight")?;
            let tape = model.tape();
            setup.backward(&model, &tape)?;
            let gradients = tape.gradients();
            for name in ["wte.weight", "h.1.mlp.c_fc.weight"] {
                let (param, grad) = (model.param(name)?, model.grad(&gradients, name)?);
                assert_eq!(grad.shape().as_slice(), param.shape(), "{name}");
                assert!(grad.ptr_eq(&gradients[&param.key()]));
            }
            let error = model.grad(&gradients, "h.1.mlp.c_fc.wait").unwrap_err();
            assert!(error.kind() == Kind::Config && error.to_string().contains("h.1.mlp.c_fc.weight"));
            let error = model.grad(&gradients, "h.0.ln_1.weight").unwrap_err();
            assert_eq!(error.message(), "the parameter `h.0.ln_1.weight` has no gradient: it is frozen");
            let error = model.watch_values("h.*.mpl.c_fc.out", |_, _| Ok(())).unwrap_err();
            assert!(error.kind() == Kind::Config && error.to_string().contains("mlp.c_fc.out"), "{error}");
            Ok(())
        });
    }
}
