//! The tape on hand-computed examples: gradients, rounds, routes, activation checkpointing, recording, and errors.

use shardgrad_autograd::{BucketBytes, Program, ReplayNoise, Slot, Tape, Var};
use shardgrad_dist::{Kind, Mesh, Rank, Result, World};
use shardgrad_tensor::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp};
use shardgrad_tensor::ops::layer_norm::LayerNorm;
use shardgrad_tensor::ops::rms_norm::RmsNorm;
use shardgrad_tensor::{
    Contraction, DType, Indexing, Layout, LocalTensor, Resharding, Shaping, Tensor, Value,
};
use std::collections::HashMap;
use std::rc::Rc;

fn vector(rank: &Rank, values: &[f64]) -> Result<Tensor> {
    Tensor::from_host(rank, &[values.len()], values)
}

fn one_rank<T: Send>(f: impl Fn(&Rank) -> Result<T> + Sync) -> T {
    World::run(Mesh::single(), f).unwrap().remove(0)
}

#[test]
fn gradients_accumulate_over_uses_and_rounds() {
    one_rank(|rank| {
        let tape = Tape::new(rank);
        let w = vector(rank, &[2.0, -1.0])?;
        for round in 1..=2 {
            let (x, w) = (tape.constant(vector(rank, &[3.0, 5.0])?), tape.leaf(7, &w));
            // (w x) + w w: the gradient is x + 2 w.
            let loss = w.mul(&x).add(&w.mul(&w)).sum();
            assert_eq!(loss.item()?, 3.0 * 2.0 - 5.0 + 4.0 + 1.0);
            loss.backward()?;
            assert_eq!(tape.num_nodes(), 0, "round {round} used up its nodes");
        }
        let gradients = tape.gradients();
        assert_eq!(gradients[&7].to_host::<f64>()?, [2.0 * 7.0, 2.0 * 3.0]);
        assert!(tape.gradients().is_empty(), "gradients are taken once");
        Ok(())
    });
}

#[test]
fn new_tape_is_independent_of_earlier_tapes() {
    one_rank(|rank| {
        let w = vector(rank, &[2.0, -1.0])?;
        let loss = |tape: &Tape, key: u64| tape.leaf(key, &w).square().sum();
        let left = Tape::new(rank);
        loss(&left, 1).backward()?;
        let _ = loss(&left, 2);
        drop(left);
        let (one, other) = (Tape::new(rank), Tape::new(rank));
        assert_eq!((one.num_nodes(), one.gradients().len()), (0, 0));
        loss(&one, 2).backward()?;
        loss(&other, 1).backward()?;
        assert_eq!(one.gradients().into_keys().collect::<Vec<_>>(), [2]);
        assert_eq!(other.gradients()[&1].to_host::<f64>()?, [4.0, -2.0]);
        Ok(())
    });
}

#[test]
fn integer_results_are_constants() {
    one_rank(|rank| {
        let tape = Tape::new(rank);
        let w = tape.leaf(1, &vector(rank, &[3.0, 1.0, 2.0])?);
        let c = tape.constant(vector(rank, &[1.0, 10.0, 100.0])?);
        let (ordered, places) = w.sort(0, false);
        assert!(ordered.requires_grad() && !places.requires_grad());
        let (top, _) = w.flip(0).top_k(0, 1, true);
        let picked = w.gather(0, &places).index_add(0, &places, &w);
        let doubled =
            Var::contract("a, a, b -> b", &[&picked, &tape.constant(vector(rank, &[0.0; 3])?), &top]);
        ordered.mul(&c).sum().add(&top.sum()).add(&doubled.sum()).backward()?;
        assert_eq!(tape.gradients()[&1].to_host::<f64>()?, [101.0, 1.0, 10.0]);
        Ok(())
    });
}

#[test]
fn ops_without_gradient_are_not_recorded() {
    one_rank(|rank| {
        let tape = Tape::new(rank);
        let w = tape.leaf(1, &vector(rank, &[1.0])?);
        let x = tape.constant(vector(rank, &[2.0])?);
        assert!(!x.mul(&x).requires_grad());
        assert!(!tape.no_grad(|| w.mul(&x)).requires_grad());
        assert!(!w.detach().mul(&x).requires_grad());
        assert!(w.mul(&x).requires_grad());
        assert_eq!(tape.num_nodes(), 1);
        let inference = Tape::inference(rank);
        assert!(!inference.leaf(1, &vector(rank, &[1.0])?).square().requires_grad());
        Ok(())
    });
}

#[test]
fn misuse_errors_name_the_line() {
    let refused = |f: fn(&Rank) -> Result<()>| World::run(Mesh::single(), f).unwrap_err();
    let error = refused(|rank| {
        let tape = Tape::new(rank);
        tape.leaf(1, &vector(rank, &[1.0, 2.0])?).square().backward()
    });
    assert_eq!(error.kind(), Kind::Shape);
    assert!(error.site().unwrap().file().ends_with("tape.rs"), "{error}");
    let error = refused(|rank| Tape::new(rank).constant(vector(rank, &[1.0])?).sum().backward());
    assert!(error.to_string().contains("has no gradient"), "{error}");
    let error = refused(|rank| {
        let tape = Tape::new(rank);
        let y = tape.leaf(1, &vector(rank, &[1.0])?).square();
        y.sum().backward()?;
        y.sum().backward()
    });
    assert!(error.to_string().contains("before the last backward pass"), "{error}");
    let error = refused(|rank| {
        let (a, b) = (Tape::new(rank), Tape::new(rank));
        let t = vector(rank, &[1.0])?;
        let _ = a.leaf(1, &t).add(&b.leaf(1, &t));
        Ok(())
    });
    assert!(error.to_string().contains("different tapes"), "{error}");
}

/// With a sharded batch the weight is cast once per step, for any number of rounds, and its gradient is reduced once.
#[test]
fn backward_from_several_values_takes_a_cotangent_for_each() {
    one_rank(|rank| {
        let tape = Tape::new(rank);
        let w = tape.leaf(1, &vector(rank, &[2.0, -1.0])?);
        let (square, twice) = (w.square(), w.scale(2.0));
        let outer = [(square, vector(rank, &[1.0, 10.0])?), (twice.clone(), vector(rank, &[100.0, 0.5])?)];
        tape.backward(outer.into())?;
        // 2 w times the first cotangent, plus 2 times the second.
        assert_eq!(tape.gradients()[&1].to_host::<f64>()?, [4.0 + 200.0, -20.0 + 1.0]);
        let w = tape.leaf(1, &vector(rank, &[2.0, -1.0])?);
        let refused = |value: &Var, cotangent: &[f64]| {
            tape.backward(vec![(value.clone(), vector(rank, cotangent).unwrap())]).unwrap_err()
        };
        let error = refused(&w, &[1.0]);
        assert_eq!(error.kind(), Kind::Layout);
        assert_eq!(error.message(), "backward() of a value f64[2] with a cotangent f64[1]");
        assert_eq!(refused(&w.detach(), &[1.0, 1.0]).kind(), Kind::Unsupported);
        Ok(())
    });
}

#[test]
fn route_runs_backward_once_per_step() {
    let counts = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        rank.trace().enable();
        let layout = Layout::parse("f64[4@dp, 3]", rank.mesh())?;
        let w = Tensor::from_host(rank, &[3, 2], &[1.0f64, 2.0, 3.0, 4.0, 5.0, 6.0])?;
        let tape = Tape::new(rank);
        for round in 0..3 {
            let data: Vec<f64> = (0..12).map(|i| f64::from(i + round)).collect();
            let x = tape.constant(Tensor::from_global(rank, &layout, &data)?);
            x.matmul(&tape.leaf(1, &w)).sum().backward()?;
        }
        assert_eq!(rank.trace().take().len(), 0, "rounds communicate nothing");
        let gradient = tape.gradients()[&1].clone();
        assert_eq!(gradient.layout(), w.layout());
        let column = |k: f64| 3.0 * (0.0 + 3.0 + 6.0 + 9.0 + 4.0 * k) + 12.0;
        let expected: Vec<f64> = [0.0, 1.0, 2.0].iter().flat_map(|k| [column(*k); 2]).collect();
        assert_eq!(gradient.to_local_f64()?, expected);
        Ok(rank.trace().take().len())
    });
    assert_eq!(counts.unwrap(), [1, 1], "one all_reduce a step");
}

/// A derived leaf of which another leaf is derived gets that leaf's cotangent last.
#[test]
fn route_of_a_twice_derived_leaf_runs_backward_once() {
    World::run(Mesh::parse("dp=2,tp=2").unwrap(), |rank| {
        rank.trace().enable();
        let parse = |text: &str| Layout::parse(text, rank.mesh());
        let stored = Tensor::normal(rank, &parse("f64[4@dp]")?, 1, 1, 1.0)?;
        let x = Tensor::normal(rank, &parse("f64[4@tp]")?, 1, 2, 1.0)?;
        let step = |expects: bool| -> Result<_> {
            rank.trace().take();
            let tape = Tape::new(rank);
            let whole = tape.leaf(0, &stored).to_layout(&parse("f64[4] ~dp")?);
            let parts = whole.to_layout(&parse("f64[4@tp] ~dp")?);
            let loss = whole.square().sum().add(&parts.mul(&tape.constant(x.clone())).sum());
            if expects {
                tape.expect_gradients();
            }
            loss.backward()?;
            let gradient = tape.gradients()[&0].to_local_f64()?;
            Ok((gradient, rank.trace().take().iter().map(|e| e.op).collect::<Vec<_>>()))
        };
        assert_eq!(step(true)?, step(false)?);
        Ok(())
    })
    .unwrap();
}

/// With `expect_gradients` each route is backpropagated within the backward pass, as soon as its last cotangent has
/// been added.
#[test]
fn expect_gradients_reduces_within_the_last_backward_pass() {
    World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        rank.trace().enable();
        let layout = Layout::parse("f64[4@dp, 3]", rank.mesh())?;
        let weight = |key: u64| Tensor::normal(rank, &Layout::parse("f64[3, 3]", rank.mesh())?, 1, key, 0.5);
        let weights = [weight(1)?, weight(2)?, weight(3)?];
        let step = |expects: bool| -> Result<_> {
            let tape = Tape::new(rank).with_bucket_bytes(BucketBytes { first: 0, others: 0 });
            let mut counts = Vec::new();
            for round in 0..3 {
                let x = tape.constant(Tensor::normal(rank, &layout, 2, round, 1.0)?);
                let leaf = |i: usize| tape.leaf(i as u64, &weights[i]);
                // The first is used twice; the last is also used in its stored layout, so that two leaves contribute to
                // its gradient.
                let h = x.matmul(&leaf(0)).gelu().matmul(&leaf(1)).gelu().matmul(&leaf(0)).matmul(&leaf(2));
                let loss = h.square().sum().add(&leaf(2).square().sum());
                rank.trace().take();
                if expects && round == 2 {
                    tape.expect_gradients();
                }
                loss.backward()?;
                counts.push(rank.trace().take().iter().map(|e| e.counts[0]).collect::<Vec<usize>>());
            }
            let gradients = tape.gradients();
            let gradients = gradients.values().map(Tensor::to_local_f64).collect::<Result<Vec<_>>>()?;
            let left = rank.trace().take().len();
            Ok((gradients, counts, left))
        };
        let (plain, counts, left) = step(false)?;
        let (expected, expected_counts, expected_left) = step(true)?;
        assert_eq!(expected, plain, "the same bits");
        assert_eq!(left, 3);
        assert_eq!(expected_left, 1, "only what may still grow is left");
        assert_eq!(expected_counts[..2], counts[..2]);
        assert_eq!(expected_counts[2].len(), counts[2].len() + 2, "{expected_counts:?}");
        Ok(())
    })
    .unwrap();
}

fn block(x: &Var, w: &Var) -> Var {
    let h = x.matmul(w).gelu();
    h.mul(&h).add(x)
}

#[test]
fn checkpoint_saves_memory_and_is_bitwise_neutral() {
    let mesh = Mesh::parse("tp=2").unwrap();
    World::run(mesh, |rank| {
        let w = Tensor::normal(rank, &Layout::parse("f64[6, 6]", rank.mesh())?, 1, 1, 0.5)?;
        let x = Tensor::normal(rank, &Layout::parse("f64[5, 6]", rank.mesh())?, 2, 1, 1.0)?;
        let run = |checkpointed: bool| -> Result<(f64, usize, Vec<f64>, Vec<f64>)> {
            let tape = Tape::new(rank);
            let mut y = tape.leaf(2, &x);
            for _ in 0..3 {
                y = if checkpointed {
                    tape.checkpoint(&[y], |args| Ok(vec![block(&args[0], &tape.leaf(1, &w))]))?.remove(0)
                } else {
                    block(&y, &tape.leaf(1, &w))
                };
            }
            let loss = y.mul(&y).sum();
            let (value, saved) = (loss.item()?, tape.saved_bytes());
            loss.backward()?;
            let gradients = tape.gradients();
            Ok((value, saved, gradients[&1].to_f64()?, gradients[&2].to_f64()?))
        };
        let (plain, light) = (run(false)?, run(true)?);
        assert_eq!((plain.0, &plain.2, &plain.3), (light.0, &light.2, &light.3), "the same bits");
        assert!(light.1 < plain.1, "{} saved bytes instead of {}", light.1, plain.1);
        Ok(())
    })
    .unwrap();
}

/// An op whose vjp takes no gradient accumulator.
#[derive(Debug)]
struct WithoutAccumulator(Rc<dyn Op>);

impl Op for WithoutAccumulator {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn signature(&self) -> &str {
        self.0.signature()
    }

    fn num_saved(&self) -> usize {
        self.0.num_saved()
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        self.0.saved_for_backward()
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        self.0.dtypes(inputs, num_outputs)
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        self.0.forward(local, x)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        self.0.vjp(cx)
    }
}

/// x + gelu(norm(x)), twice, with the residual gradient added by the norm or separately.
fn two_norms(x: &Var, [w, b]: &[Var; 2], is_fused: bool) -> Var {
    let norm = |op: Rc<dyn Op>, args: &[&Var]| match is_fused {
        true => Var::apply_one(op, args),
        false => Var::apply_one(WithoutAccumulator(op), args),
    };
    let x = x.add(&norm(Rc::new(LayerNorm { eps: 1e-3 }), &[x, w, b]).gelu());
    x.add(&norm(Rc::new(RmsNorm { eps: 1e-3 }), &[&x, w]).gelu())
}

#[test]
fn norms_add_the_gradient_of_a_residual_in_their_backward_kernels() {
    for (x, w) in [
        ("f64[5, 6]", "f64[6]"),
        ("f64[5@a, 6]", "f64[6]"),
        ("f32[1@a, 6]", "f32[6]"),
        ("f32[5, 6]", "f32[6] ~a"),
    ] {
        // Values and gradients, and the bytes that kernels read and wrote.
        let run = |rank: &Rank, is_fused: bool, checkpointed: bool| -> Result<_> {
            let normal =
                |layout: &str, key| Tensor::normal(rank, &Layout::parse(layout, rank.mesh())?, key, 1, 1.0);
            let (x, wb, tape) = (normal(x, 1)?, [normal(w, 2)?, normal(w, 3)?], Tape::new(rank));
            let before = x.to_f64()?;
            let bytes = rank.backend().cost().bytes;
            let mut y = tape.leaf(1, &x);
            for _ in 0..2 {
                let block = |x: &Var| two_norms(x, &[tape.leaf(2, &wb[0]), tape.leaf(3, &wb[1])], is_fused);
                y = match checkpointed {
                    true => tape.checkpoint(&[y], |args| Ok(vec![block(&args[0])]))?.remove(0),
                    false => block(&y),
                };
            }
            y.square().sum().backward()?;
            let (gradients, bytes) = (tape.gradients(), rank.backend().cost().bytes - bytes);
            let mut found = y.tensor().to_f64()?;
            for key in [1, 2, 3] {
                found.extend(gradients[&key].to_f64()?);
            }
            assert_eq!(x.to_f64()?, before, "nothing writes over what went in");
            Ok((found, bytes))
        };
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            for checkpointed in [false, true] {
                let (fused, bytes) = run(rank, true, checkpointed)?;
                let (separate, separate_bytes) = run(rank, false, checkpointed)?;
                let what = format!("{x}, {w}, checkpointed: {checkpointed}");
                assert_eq!(fused, separate, "values and gradients of {what}");
                // Rank 0 may have no rows.
                let saves_bytes = bytes < separate_bytes || rank.index() == 0;
                assert!(saves_bytes, "{what}: {bytes} bytes fused, {separate_bytes} separately");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn recorded_program_replays_in_slices() {
    one_rank(|rank| {
        let tape = Tape::new(rank);
        let w = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
        let x = tape.constant(Tensor::from_host(rank, &[1, 2], &[1.0f64, -1.0])?);
        let text = |args: &[Var]| Ok(vec![block(&args[0], &args[0].tape().leaf(9, &w))]);
        let program = Program::record(rank, std::slice::from_ref(x.layout()), None, text)?;
        let names: Vec<&str> = program.records.iter().map(|r| r.op.name()).collect();
        assert_eq!(names, ["matmul", "gelu", "mul", "add"]);
        assert_eq!(program.external_inputs[1].key, Some(9));
        assert_eq!(program.inputs_of(2..4), [Slot::Output { record: 1, out: 0 }, Slot::External(0)]);
        let other = tape.constant(Tensor::from_host(rank, &[1, 2], &[0.5f64, 2.0])?);
        let mut values =
            HashMap::from([(Slot::External(0), other.clone()), (Slot::External(1), tape.leaf(9, &w))]);
        program.replay(0..2, &mut values, ReplayNoise::Recorded)?;
        program.replay(2..4, &mut values, ReplayNoise::Recorded)?;
        let replayed = values[&program.outputs[0]].tensor().to_host::<f64>()?;
        assert_eq!(replayed, block(&other, &tape.leaf(9, &w)).tensor().to_host::<f64>()?);
        let error = program.replay(0..1, &mut HashMap::new(), ReplayNoise::Recorded).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        let read = Program::record(rank, &[x.layout().clone()], None, |args| {
            args[0].sum().item()?;
            Ok(vec![])
        });
        assert!(read.unwrap_err().to_string().contains("while a program is being recorded"));
        Ok(())
    });
}

#[test]
fn checkpoint_keeps_detach_and_no_grad() {
    one_rank(|rank| {
        let w = Tensor::from_host(rank, &[2, 2], &[1.0f64, 2.0, 3.0, 4.0])?;
        let text = |x: &Var, w: &Var| {
            let no_grad = x.tape().no_grad(|| x.matmul(w));
            x.matmul(w).add(&x.detach().matmul(w)).add(&x.matmul(&w.detach())).add(&no_grad)
        };
        let run = |checkpointed: bool| -> Result<[Vec<f64>; 2]> {
            let tape = Tape::new(rank);
            let x = tape.leaf(2, &vector(rank, &[1.0, -2.0])?.reshape(&[1, 2]));
            let y = if checkpointed {
                tape.checkpoint(&[x], |args| Ok(vec![text(&args[0], &tape.leaf(1, &w))]))?.remove(0)
            } else {
                text(&x, &tape.leaf(1, &w))
            };
            y.sum().backward()?;
            let gradients = tape.gradients();
            Ok([gradients[&1].to_f64()?, gradients[&2].to_f64()?])
        };
        assert_eq!(run(false)?, run(true)?);
        Ok(())
    });
}

#[test]
fn detached_checkpoint_result_has_no_gradient() {
    one_rank(|rank| {
        let tape = Tape::new(rank);
        let x = tape.leaf(1, &vector(rank, &[1.0, -2.0])?);
        let y = tape.checkpoint(std::slice::from_ref(&x), |args| {
            Ok(vec![args[0].square().detach(), args[0].detach(), args[0].square(), args[0].clone()])
        })?;
        assert_eq!([0, 1, 2, 3].map(|i| y[i].requires_grad()), [false, false, true, true]);
        y[0].add(&y[1]).add(&y[2]).sum().backward()?;
        assert_eq!(tape.gradients()[&1].to_f64()?, [2.0, -4.0]);
        Ok(())
    });
}

#[test]
fn checkpoint_may_return_many_results() {
    one_rank(|rank| {
        let tape = Tape::new(rank);
        let x = tape.leaf(1, &vector(rank, &[1.0, -2.0])?);
        let y = tape.checkpoint(std::slice::from_ref(&x), |args| {
            Ok((0..300).map(|i| args[0].scale(f64::from(i))).collect())
        })?;
        y[257].add(&y[2]).sum().backward()?;
        assert_eq!(tape.gradients()[&1].to_f64()?, [259.0, 259.0]);
        Ok(())
    });
}

/// An op under no_grad, or in a checkpointed block, may reduce a partial sum first. A later op needs its own reduced
/// value, because no gradient flows through the other.
#[test]
fn layout_made_under_no_grad_does_not_stop_gradients() {
    World::run(Mesh::parse("tp=2").unwrap(), |rank| {
        let layout = Layout::parse("f64[2] +tp", rank.mesh())?;
        let x = Tensor::from_global(rank, &layout, &[1.0, -2.0])?;
        let gradient = |text: &dyn Fn(&Tape, &Var) -> Result<Var>| -> Result<Vec<f64>> {
            let tape = Tape::new(rank);
            let y = tape.leaf(1, &x).scale(3.0);
            assert_eq!(y.layout(), &layout, "still a partial sum");
            text(&tape, &y)?.sum().backward()?;
            tape.gradients()[&1].to_local_f64()
        };
        let plain = gradient(&|_, y| Ok(y.square()))?;
        let looked_at = gradient(&|tape, y| {
            tape.no_grad(|| y.exp());
            Ok(y.square())
        })?;
        let block = |tape: &Tape, y: &Var| -> Result<Var> {
            Ok(tape.checkpoint(&[], |_| Ok(vec![y.square()]))?.remove(0))
        };
        let computed_again = gradient(&|tape, y| Ok(block(tape, y)?.add(&y.square()).scale(0.5)))?;
        let twice = gradient(&|tape, y| Ok(block(tape, y)?.add(&block(tape, &y.clone())?).scale(0.5)))?;
        assert_eq!([&looked_at, &computed_again, &twice], [&plain; 3]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn checkpoint_takes_a_value_and_its_detached_form() {
    one_rank(|rank| {
        for order in [[0, 1], [1, 0]] {
            let tape = Tape::new(rank);
            let x = tape.leaf(1, &vector(rank, &[1.0, -2.0])?);
            let both = [x.detach(), x.clone()];
            let taken = order.map(|i| both[i].clone());
            let y = tape.checkpoint(&taken, |args| Ok(vec![args[0].mul(&args[1])]))?.remove(0);
            y.sum().backward()?;
            assert_eq!(tape.gradients()[&1].to_f64()?, [1.0, -2.0]);
        }
        Ok(())
    });
}

/// Each rank uses a replicated loss on its own and their gradients are summed, so the seed must count once.
#[test]
fn replicated_loss_counts_once() {
    World::run(Mesh::parse("tp=2").unwrap(), |rank| {
        for text in ["f64[2] ~tp", "f64[2] +tp", "f64[2@tp]", "f64[2]"] {
            let x = Tensor::from_global(rank, &Layout::parse(text, rank.mesh())?, &[3.0, 5.0])?;
            let tape = Tape::new(rank);
            tape.leaf(1, &x).sum().backward()?;
            assert_eq!(tape.gradients()[&1].to_f64()?, [1.0, 1.0], "{text}");
        }
        Ok(())
    })
    .unwrap();
}
