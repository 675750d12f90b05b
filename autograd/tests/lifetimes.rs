//! Lifetimes of values on a tape, and errors of combining values of different tapes, rounds and versions of a
//! parameter.

use shardgrad_autograd::{Tape, Var};
use shardgrad_dist::{Error, Mesh, Rank, Result, World};
use shardgrad_tensor::{DType, Indexing, Layout, Resharding, Tensor, Value};

fn vector(rank: &Rank, values: &[f64]) -> Result<Tensor> {
    Tensor::from_host(rank, &[values.len()], values)
}

fn one_rank<T: Send>(f: impl Fn(&Rank) -> Result<T> + Sync) -> T {
    World::run(Mesh::single(), f).unwrap().remove(0)
}

/// The error of a program, which must name a line of this file and a help text.
fn refused(f: impl Fn(&Rank) -> Result<()> + Sync, part: &str) -> Error {
    let error = World::run(Mesh::single(), f).expect_err(part);
    let text = error.to_string();
    assert!(text.contains(part) && text.contains("help  "), "no `{part}` in: {text}");
    assert!(error.site().is_some_and(|site| site.file().ends_with("lifetimes.rs")), "{text}");
    error
}

#[test]
fn argument_order_does_not_choose_the_tape() {
    one_rank(|rank| {
        let (w, target) = (vector(rank, &[3.0, 5.0])?, vector(rank, &[1.0, 2.0])?);
        let inference = Tape::inference(rank);
        let teachers = [
            inference.constant(target.clone()),
            inference.leaf(1, &target),
            Tape::new(rank).constant(target),
        ];
        for teacher in &teachers {
            for teacher_first in [false, true] {
                let distance = |student: &Var| match teacher_first {
                    true => teacher.sub(student).square().sum(),
                    false => student.sub(teacher).square().sum(),
                };
                let tape = Tape::new(rank);
                distance(&tape.leaf(1, &w)).backward()?;
                assert_eq!(tape.gradients()[&1].to_f64()?, [4.0, 6.0], "{teacher_first}");
                let y = tape.checkpoint(&[], |_| Ok(vec![distance(&tape.leaf(1, &w).scale(1.0))]))?.remove(0);
                y.backward()?;
                assert_eq!(tape.gradients()[&1].to_f64()?, [4.0, 6.0], "{teacher_first}, checkpointed");
            }
        }
        Ok(())
    });
}

#[test]
fn detached_variable_of_another_tape_is_a_constant() {
    let meet = |cut: bool, swapped: bool| {
        move |rank: &Rank| {
            let (old, new) = (Tape::new(rank), Tape::new(rank));
            let t = vector(rank, &[3.0])?;
            let old = old.leaf(1, &t).square();
            let (a, b) = (if cut { old.detach() } else { old }, new.leaf(1, &t).scale(2.0));
            if swapped { b.mul(&a) } else { a.mul(&b) }.sum().backward()?;
            assert_eq!(new.gradients()[&1].to_f64()?, [18.0]);
            Ok(())
        }
    };
    for swapped in [false, true] {
        let error = refused(meet(false, swapped), "one op has variables of different tapes");
        assert!(error.to_string().contains("detach() the older variable"), "{error}");
        one_rank(meet(true, swapped));
    }
}

/// A checkpointed block that takes `x` as an argument or captures it.
fn in_block(tape: &Tape, x: &Var, captured: bool) -> Result<Var> {
    let made = match captured {
        true => tape.checkpoint(&[], |_| Ok(vec![x.square()])),
        false => tape.checkpoint(std::slice::from_ref(x), |a| Ok(vec![a[0].square()])),
    };
    Ok(made?.remove(0))
}

#[test]
fn checkpoint_refuses_stale_and_foreign_variables() {
    for captured in [false, true] {
        let earlier = move |cut: bool| {
            move |rank: &Rank| {
                let (tape, w, u) = (Tape::new(rank), vector(rank, &[3.0])?, vector(rank, &[1.0])?);
                let y = tape.leaf(0, &w).scale(2.0);
                y.sum().backward()?;
                let v = tape.leaf(1, &u).scale(10.0);
                let y = if cut { y.detach() } else { y };
                v.add(&in_block(&tape, &y, captured)?).sum().backward()?;
                let gradients = tape.gradients();
                assert_eq!([gradients[&0].to_f64()?, gradients[&1].to_f64()?], [[2.0], [10.0]]);
                Ok(())
            }
        };
        refused(earlier(false), "before the last backward pass");
        one_rank(earlier(true));
        let foreign = move |cut: bool| {
            move |rank: &Rank| {
                let (old, tape, w) = (Tape::new(rank), Tape::new(rank), vector(rank, &[3.0])?);
                let y = old.leaf(0, &w).scale(2.0);
                let y = if cut { y.detach() } else { y };
                let v = tape.leaf(1, &w).scale(10.0);
                v.add(&in_block(&tape, &y, captured)?).sum().backward()?;
                assert_eq!(tape.gradients()[&1].to_f64()?, [10.0]);
                Ok(())
            }
        };
        refused(foreign(false), "one op has variables of different tapes");
        one_rank(foreign(true));
    }
}

#[test]
fn value_leaked_from_a_checkpoint_is_a_constant() {
    one_rank(|rank| {
        let (tape, w) = (Tape::new(rank), vector(rank, &[3.0])?);
        let x = tape.leaf(1, &w);
        let mut kept = None;
        let y = tape.checkpoint(std::slice::from_ref(&x), |a| {
            kept = Some(a[0].scale(5.0));
            Ok(vec![kept.iter().next().expect("made").square()])
        })?;
        let z = tape.checkpoint(&y, |a| Ok(vec![a[0].scale(1.0).mul(kept.as_ref().expect("made"))]))?;
        assert_eq!(z[0].tensor().to_f64()?, [225.0 * 15.0]);
        z[0].sum().backward()?;
        assert_eq!(tape.gradients()[&1].to_f64()?, [50.0 * 3.0 * 15.0]);
        Ok(())
    });
}

/// A partial sum that blocks capture is reduced before the first of them, for all of them, and not again in the
/// backward pass.
#[test]
fn captured_partial_sum_is_reduced_once() {
    World::run(Mesh::parse("tp=2").unwrap(), |rank| {
        let layout = Layout::parse("f64[2] +tp", rank.mesh())?;
        let x = Tensor::from_global(rank, &layout, &[1.0, -2.0])?;
        let run = |in_blocks: bool, no_grad: bool| -> Result<(Vec<f64>, Vec<f64>, usize)> {
            rank.trace().enable();
            rank.trace().take();
            let tape = Tape::new(rank);
            let y = tape.leaf(1, &x).scale(3.0);
            let text = |k: f64| {
                let first = if no_grad { tape.no_grad(|| y.relu()) } else { y.relu() };
                y.square().scale(k).add(&first)
            };
            let block = |k: f64| -> Result<Var> {
                match in_blocks {
                    true => Ok(tape.checkpoint(&[], |_| Ok(vec![text(k)]))?.remove(0)),
                    false => Ok(text(k)),
                }
            };
            let z = block(1.0)?.add(&block(2.0)?).add(&y.square()).add(&block(4.0)?);
            let value = z.tensor().to_local_f64()?;
            z.sum().backward()?;
            let gradient = tape.gradients()[&1].to_local_f64()?;
            let moved = rank.trace().take();
            Ok((value, gradient, moved.iter().filter(|r| r.op == "all_reduce").count()))
        };
        for no_grad in [false, true] {
            let (plain, blocks) = (run(false, no_grad)?, run(true, no_grad)?);
            assert_eq!(blocks, plain, "values, gradients and reductions, {no_grad}");
            assert_eq!(plain.2, if no_grad { 2 } else { 1 });
        }
        Ok(())
    })
    .unwrap();
}

/// Where no gradient goes, a parameter stored in shards is gathered while it is used, and no longer.
#[test]
fn parameters_are_not_held_without_gradient() {
    World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        let layout = Layout::parse("f64[1024@dp]", rank.mesh())?;
        let whole = Layout::parse("f64[1024]", rank.mesh())?;
        let mut w = Tensor::from_global(rank, &layout, &[1.0; 1024])?;
        let in_use = || rank.backend().memory().in_use_bytes;
        let (before, address) = (in_use(), w.local().buffer.address());
        let read = |tape: &Tape, w: &Tensor| tape.leaf(0, w).to_layout(&whole).square().sum().item();
        let (eval, train) = (Tape::inference(rank), Tape::new(rank));
        for step in 0..3 {
            let expected = 1024.0 * f64::from(1 + step).powi(2);
            assert_eq!(read(&eval, &w)?, expected, "step {step}");
            assert_eq!(train.no_grad(|| read(&train, &w))?, expected, "step {step}");
            let text = |tape: &Tape| tape.checkpoint(&[], |_| Ok(vec![tape.leaf(0, &w).square()]));
            assert_eq!(train.no_grad(|| text(&train))?.len(), text(&eval)?.len());
            assert_eq!(in_use(), before, "step {step}");
            let one = Tensor::from_global(rank, &layout, &[1.0; 1024])?;
            w = w.accumulate(&one)?;
            assert_eq!(w.local().buffer.address(), address, "step {step}: updated in place");
        }
        assert!(!train.no_grad(|| train.leaf(0, &w)).requires_grad() && !eval.leaf(0, &w).requires_grad());
        Ok(())
    })
    .unwrap();
}

#[test]
fn tape_does_not_grow_over_steps() {
    World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        let layout = Layout::parse("f64[4@dp]", rank.mesh())?;
        let [whole, narrow] = ["f64[4]", "f32[4]"].map(|text| Layout::parse(text, rank.mesh()));
        let (whole, narrow, tape) = (whole?, narrow?, Tape::new(rank));
        let mut w = Tensor::from_global(rank, &layout, &[1.0, 2.0, 3.0, 4.0])?;
        for step in 1..=5 {
            let leaf = tape.leaf(0, &w);
            for to in [&whole, &narrow, &whole] {
                leaf.to_layout(to).square().sum().backward()?;
            }
            let gradient = tape.gradients().remove(&0).expect("a gradient").to_f64()?;
            assert_eq!(gradient, [1.0, 2.0, 3.0, 4.0].map(|x| 6.0 * x * f64::from(step)));
            w = w.accumulate(&Tensor::from_global(rank, &layout, &[1.0, 2.0, 3.0, 4.0])?)?;
            assert_eq!(format!("{tape:?}"), format!("Tape(3 leaves, 0 nodes, round {})", 3 * step));
        }
        Ok(())
    })
    .unwrap();
}

/// The gradient of a parameter through the sum of its squares, in another layout.
fn step(tape: &Tape, w: &Tensor, to: &Layout) -> Result<Vec<f64>> {
    tape.leaf(0, w).to_layout(to).square().sum().backward()?;
    tape.gradients().remove(&0).expect("a gradient").to_f64()
}

#[test]
fn updated_parameter_is_used_with_its_new_value() {
    World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        let [split, whole] = ["f64[2@dp]", "f64[2]"].map(|text| Layout::parse(text, rank.mesh()));
        let (split, whole, tape) = (split?, whole?, Tape::new(rank));
        let value = |x: f64, to: &Layout| Tensor::from_global(rank, to, &[x, 2.0 * x]);
        assert_eq!(step(&tape, &value(1.0, &split)?, &whole)?, [2.0, 4.0]);
        let look =
            |x: f64| -> Result<f64> { tape.leaf(0, &value(x, &split)?).to_layout(&whole).sum().item() };
        assert_eq!(tape.no_grad(|| look(3.0))?, 9.0);
        // Taken from the tape and not used.
        assert!(tape.leaf(0, &value(5.0, &split)?).requires_grad());
        assert_eq!(step(&tape, &value(11.0, &split)?, &whole)?, [22.0, 44.0]);
        // In other layouts, and in another dtype.
        assert_eq!(step(&tape, &value(13.0, &whole)?, &split)?, [26.0, 52.0]);
        let narrow = value(17.0, &split)?.cast(DType::F32);
        assert_eq!(step(&tape, &narrow, &whole.with_dtype(DType::F32))?, [34.0, 68.0]);
        assert_eq!(step(&tape, &value(19.0, &split)?, &whole)?, [38.0, 76.0]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn parameter_may_not_change_within_a_round() {
    let twice = |repair: &'static str| {
        move |rank: &Rank| {
            let (tape, a, b) = (Tape::new(rank), vector(rank, &[3.0])?, vector(rank, &[5.0])?);
            let x = tape.leaf(0, &a).square().sum();
            if repair == "backward" {
                x.backward()?;
                tape.leaf(0, &b).square().sum().backward()?;
                assert_eq!(tape.gradients()[&0].to_f64()?, [16.0]);
            } else {
                let y = tape.leaf(if repair == "key" { 1 } else { 0 }, &b).square().sum();
                x.add(&y).backward()?;
                let gradients = tape.gradients();
                assert_eq!([gradients[&0].to_f64()?, gradients[&1].to_f64()?], [[6.0], [10.0]]);
            }
            Ok(())
        }
    };
    refused(twice(""), "leaf: parameter 0 is not the tensor that this round has used");
    one_rank(twice("backward"));
    one_rank(twice("key"));
    let outlived = |rank: &Rank| {
        let (tape, narrow) = (Tape::new(rank), Layout::parse("f32[1]", rank.mesh())?);
        let form = tape.leaf(0, &vector(rank, &[3.0])?).to_layout(&narrow);
        form.square().sum().backward()?;
        drop(tape.gradients());
        let (x, b) = (form.square().sum(), vector(rank, &[5.0])?);
        x.add(&tape.leaf(0, &b).to_layout(&narrow).square().sum()).backward()
    };
    refused(outlived, "leaf: parameter 0 is not the tensor that this round has used");
    let block = |rank: &Rank| {
        let (tape, a, b) = (Tape::new(rank), vector(rank, &[3.0])?, vector(rank, &[5.0])?);
        tape.checkpoint(&[], |_| Ok(vec![tape.leaf(0, &a).mul(&tape.leaf(0, &b))])).map(drop)
    };
    refused(block, "a variable of a parameter that was replaced by another tensor");
    let wider = |taken: bool| {
        move |rank: &Rank| {
            let tape = Tape::new(rank);
            tape.leaf(0, &vector(rank, &[3.0])?).square().sum().backward()?;
            if taken {
                assert_eq!(tape.gradients()[&0].to_f64()?, [6.0]);
            }
            tape.leaf(0, &vector(rank, &[3.0, 5.0])?).square().sum().backward()?;
            assert_eq!(tape.gradients()[&0].to_f64()?, [6.0, 10.0]);
            Ok(())
        }
    };
    refused(wider(false), "leaf: parameter 0 differs in layout or dtype from its accumulated gradient");
    one_rank(wider(true));
}

#[test]
fn variable_of_a_replaced_parameter_is_refused() {
    let again = |form: bool, cut: bool| {
        move |rank: &Rank| {
            let tape = Tape::new(rank);
            let narrow = Layout::parse("f32[1]", rank.mesh())?;
            let [old, new] = [3.0, 5.0].map(|x| vector(rank, &[x]));
            let leaf = tape.leaf(0, &old?);
            let held = if form { leaf.to_layout(&narrow) } else { leaf };
            for _ in 0..2 {
                held.square().sum().backward()?;
                assert_eq!(tape.gradients()[&0].to_f64()?, [6.0], "as long as nothing takes its place");
            }
            let leaf = tape.leaf(0, &new?).to_layout(&narrow);
            let held = if cut { held.detach() } else { held };
            leaf.mul(&held.to_layout(&narrow)).sum().backward()?;
            assert_eq!(tape.gradients()[&0].to_f64()?, [3.0]);
            Ok(())
        }
    };
    for form in [false, true] {
        refused(again(form, false), "a variable of a parameter that was replaced by another tensor");
        one_rank(again(form, true));
    }
}

#[test]
fn checkpoint_result_without_gradient_is_a_constant() {
    let texts: [fn(&Var) -> Var; 4] = [
        |x| x.detach().square().sum(),
        |x| x.tape().no_grad(|| x.square().sum()),
        |x| x.sort(0, false).1.cast(DType::F64).sum(),
        |x| x.constant(x.tensor().clone()).square().sum(),
    ];
    for text in texts {
        let plain = |rank: &Rank| text(&Tape::new(rank).leaf(0, &vector(rank, &[2.0, 3.0])?)).backward();
        let again = |rank: &Rank| {
            let tape = Tape::new(rank);
            let x = tape.leaf(0, &vector(rank, &[2.0, 3.0])?);
            let y = tape.checkpoint(&[x], |a| Ok(vec![text(&a[0]), a[0].sum(), a[0].sort(0, false).1]))?;
            assert_eq!([0, 1, 2].map(|i| y[i].requires_grad()), [false, true, false]);
            y[0].backward()
        };
        let errors = [refused(plain, "has no gradient"), refused(again, "has no gradient")];
        assert_eq!(errors[0].message(), errors[1].message());
    }
}

#[test]
fn checkpoints_share_the_saved_layout_of_a_captured_value() {
    World::run(Mesh::parse("tp=2").unwrap(), |rank| {
        let layout = Layout::parse("f64[1024] +tp", rank.mesh())?;
        let tape = Tape::new(rank);
        let y = tape.leaf(1, &Tensor::from_global(rank, &layout, &[1.0; 1024])?).scale(3.0);
        assert_eq!(y.layout(), &layout, "still a partial sum");
        let in_use = || rank.backend().memory().in_use_bytes;
        let before = in_use();
        let mut results = Vec::new();
        for block in 1..=4 {
            results.extend(tape.checkpoint(&[], |_| Ok(vec![y.square().sum()]))?);
            let kept = in_use() - before;
            // The complete sum, made once, and the results.
            assert!(kept < 1024 * 8 + 8 * 64, "{kept} bytes after {block} blocks");
        }
        results.iter().skip(1).fold(results[0].clone(), |sum, x| sum.add(x)).backward()?;
        assert_eq!(tape.gradients()[&1].to_f64()?, [4.0 * 18.0; 1024]);
        Ok(())
    })
    .unwrap();
}

/// With every memory limit that is too small for a step, the error names a line of the program, not of the library.
#[test]
fn backward_error_names_the_line_of_the_op() {
    let mut vjps = Vec::new();
    for (limit, again) in (4..80).map(|n| n << 12).flat_map(|limit| [(limit, false), (limit, true)]) {
        let run = World::new(Mesh::single()).memory_limit(limit).launch(|rank| {
            let tape = Tape::new(rank);
            let w = tape.leaf(0, &Tensor::from_host(rank, &[1024], &[1.0f64; 1024])?);
            let text = |w: &Var| w.exp().square().mul(w).sum();
            let y = match again {
                true => tape.checkpoint(&[w], |a| Ok(vec![text(&a[0])]))?.remove(0),
                false => text(&w),
            };
            y.backward()?;
            Ok(tape.gradients().len())
        });
        let Err(error) = run else { continue };
        let text = error.to_string();
        assert!(
            error.site().is_some_and(|site| site.file().ends_with("lifetimes.rs")),
            "{limit} {again}: {text}"
        );
        vjps.extend(
            text.lines().find(|line| line.starts_with("  vjp ")).map(|line| (again, line.to_string())),
        );
    }
    assert!([false, true].iter().all(|again| vjps.iter().any(|(a, _)| a == again)), "{vjps:?}");
}

#[test]
fn older_tensor_of_a_parameter_is_refused_after_gradients() {
    let again = |form: bool| {
        move |rank: &Rank| {
            let tape = Tape::new(rank);
            let narrow = Layout::parse("f32[1]", rank.mesh())?;
            let stored = vector(rank, &[3.0])?;
            let leaf = tape.leaf(0, &stored);
            let held = if form { leaf.to_layout(&narrow) } else { leaf.clone() };
            held.square().sum().backward()?;
            assert_eq!(tape.gradients()[&0].to_f64()?, [6.0]);
            // No handle of the older tensor is left if `form` holds another layout: the newer one may get its address.
            drop((stored, leaf));
            let new = vector(rank, &[5.0])?;
            tape.leaf(0, &new).to_layout(&narrow).square().sum().backward()?;
            assert_eq!(tape.gradients()[&0].to_f64()?, [10.0]);
            held.square().sum().backward()
        }
    };
    for form in [false, true] {
        refused(again(form), "a variable of a parameter that was replaced by another tensor");
    }
}

#[test]
fn only_tensors_that_a_wanted_cotangent_reads_are_saved() {
    one_rank(|rank| {
        let [x, w, b] = [[4, 3].as_slice(), &[3, 2], &[2]]
            .map(|shape| Tensor::full(rank, &Layout::invariant(rank.mesh(), DType::F32, shape), 2.0));
        let (x, w, b) = (x?, w?, b?);
        let saved_bytes = |trained: [bool; 3], text: &dyn Fn(&Var, &Var, &Var) -> Var| -> Result<usize> {
            let tape = Tape::new(rank);
            let var = |key, t: &Tensor| {
                if trained[key as usize] { tape.leaf(key, t) } else { tape.constant(t.clone()) }
            };
            let y = text(&var(0, &x), &var(1, &w), &var(2, &b));
            let bytes = tape.saved_bytes();
            y.sum().backward()?;
            assert_eq!(tape.gradients().len(), trained.iter().filter(|t| **t).count());
            Ok(bytes)
        };
        let (of_x, of_w) = (4 * 12, 4 * 6);
        for text in
            [&(|x: &Var, w: &Var, _: &Var| x.matmul(w)) as &dyn Fn(&Var, &Var, &Var) -> Var, &|x, w, b| {
                x.linear(w, Some(b), None)
            }]
        {
            assert_eq!(saved_bytes([true, true, false], text)?, of_x + of_w);
            assert_eq!(saved_bytes([true, false, false], text)?, of_w);
            assert_eq!(saved_bytes([false, true, false], text)?, of_x);
        }
        assert_eq!(saved_bytes([true, false, true], &|x, w, b| x.linear(w, Some(b), None))?, of_x + of_w);
        // No cotangent reads a residual.
        let onto = |x: &Var, w: &Var, _: &Var| x.linear(w, None, Some(&x.slice(1, 0..2)));
        assert_eq!(saved_bytes([true, false, false], &onto)?, of_w);
        assert_eq!(saved_bytes([true, false, false], &|x, _, _| x.mul(&x.detach()))?, of_x);
        Ok(())
    });
}

/// Ranks with shards of different sizes must decide alike what a block saves, else their backward passes would call
/// different collectives.
#[test]
fn ranks_with_uneven_shards_save_the_same_layout() {
    World::run(Mesh::parse("a=2,b=2").unwrap(), |rank| {
        let layout = Layout::parse("f64[1@a, 4] +b", rank.mesh())?;
        let whole = Layout::parse("f64[1, 4]", rank.mesh())?;
        let tape = Tape::new(rank);
        let y = tape.leaf(1, &Tensor::from_global(rank, &layout, &[1.0; 4])?).scale(3.0);
        let block = |_: &[Var]| Ok(vec![y.to_layout(&whole).square().sum()]);
        tape.checkpoint(&[], block)?.remove(0).backward()?;
        assert_eq!(tape.gradients()[&1].to_f64()?, [18.0; 4]);
        Ok(())
    })
    .unwrap();
}

/// On one rank the layout of a value is whole already; the answer is that of a mesh where a change of layout is an op.
#[test]
fn changes_of_layout_refuse_stale_variables_on_every_mesh() {
    let changes: [fn(&Var) -> Var; 3] =
        [|y| y.gathered(), |y| y.whole_along(0), |y| y.to_layout(&y.layout().clone())];
    for (mesh, text) in [("", "f64[4]"), ("dp=2", "f64[4]"), ("dp=2", "f64[4@dp]")] {
        for change in changes {
            let stale = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let tape = Tape::new(rank);
                let x = Tensor::from_global(rank, &Layout::parse(text, rank.mesh())?, &[3.0; 4])?;
                let y = tape.leaf(1, &x).square();
                assert_eq!(change(&y).tensor().to_f64()?, [9.0; 4]);
                y.sum().backward()?;
                // Where nothing is recorded, and detached, its value is still there.
                assert_eq!(tape.no_grad(|| change(&y)).tensor().to_f64()?, [9.0; 4]);
                assert_eq!(change(&y.detach()).tensor().to_f64()?, [9.0; 4]);
                let _ = change(&y);
                Ok(())
            });
            let error = stale.expect_err(text);
            assert!(error.message().contains("before the last backward pass"), "{mesh} {text}: {error}");
            assert!(error.site().is_some_and(|site| site.file().ends_with("lifetimes.rs")), "{error}");
        }
    }
}

#[test]
fn to_layout_of_another_mesh_names_the_users_line() {
    let moved = World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        let other = Layout::parse("f64[2]", &Mesh::parse("tp=4")?)?;
        let _ = Tape::new(rank).leaf(0, &vector(rank, &[3.0, 5.0])?).to_layout(&other);
        Ok(())
    });
    let error = moved.unwrap_err();
    assert!(error.site().is_some_and(|site| site.file().ends_with("lifetimes.rs")), "{error}");
}

/// With several rounds the back end caches prepacked operands of the leaves.
#[test]
fn pack_cache_of_leaves_lives_until_gradients_are_taken() {
    let run = World::run(Mesh::single(), |rank| {
        let in_use = || rank.backend().memory().in_use_bytes;
        const N: usize = 96;
        let matrix = |shift: usize| {
            let numbers: Vec<f64> = (0..N * N).map(|i| ((i * 7 + shift) % 11) as f64).collect();
            Tensor::from_host(rank, &[N, N], &numbers)
        };
        let (x, w, other) = (matrix(1)?, matrix(2)?, matrix(3)?);
        let bytes = N * N * 8;
        let round = |tape: &Tape, w: &Tensor| -> Result<usize> {
            tape.constant(x.clone()).matmul(&tape.leaf(1, w)).sum().backward()?;
            Ok(in_use())
        };
        let before = in_use();
        for (rounds, kept) in [(1, 0), (2, bytes)] {
            let tape = Tape::new(rank).for_rounds(rounds);
            let first = round(&tape, &w)?;
            assert_eq!(first, before + bytes + kept, "a gradient, and the prepacked weight");
            assert_eq!(round(&tape, &w)?, first, "the same in each round");
            assert_eq!(round(&tape, &other)?, first, "another tensor replaces the cached one");
            assert_eq!(tape.gradients().len(), 1);
            assert_eq!(in_use(), before, "{rounds} rounds");
            assert_eq!(round(&tape, &w)?, first, "a step on the same tape");
            drop(tape);
            assert_eq!(in_use(), before, "{rounds} rounds");
            let next = Tape::new(rank);
            assert_eq!(
                round(&next, &w)?,
                before + bytes,
                "another tape caches nothing unless it has several rounds"
            );
        }
        Ok(())
    });
    run.unwrap();
}
