//! A pipeline with any cut, under any schedule, gives the values and gradients of one rank.

use shardgrad_autograd::pipeline::{Action, Cut, PipelineInputs, Profile, Runner, Schedule, Stages};
use shardgrad_autograd::{Gradients, Noise, Program, ReplayNoise, Tape, Var};
use shardgrad_dist::{Mesh, Phase, Rank, Result, World};
use shardgrad_tensor::{DType, Layout, Resharding, Tensor, Value};
use std::collections::BTreeMap;

const WIDTH: usize = 6;
const ROWS: usize = 2;
const LAYERS: usize = 5;

/// A parameter of small integers, so that sums are exact in any order.
fn parameter(rank: &Rank, key: u64) -> Result<Tensor> {
    let shape = if key == 9 { vec![3, WIDTH] } else { vec![WIDTH, WIDTH] };
    let numel: usize = shape.iter().product();
    let data: Vec<f64> = (0..numel).map(|i| ((i * 7 + key as usize * 3) % 5) as f64 - 2.0).collect();
    Tensor::from_host(rank, &shape, &data)
}

/// Layers with a skip connection from the first to the last (over all stages between), a tied embedding at both ends, a
/// constant mask, and a second use of the input at the end. With relu, numbers stay small.
fn text(args: &[Var]) -> Result<Vec<Var>> {
    let (ids, x) = (&args[0], &args[1]);
    let tape = x.tape().clone();
    let on = |key: u64| parameter(x.rank(), key).map(|t| tape.leaf(key, &t));
    let table = on(9)?;
    let first = table.embedding(ids).add(x);
    let mask = Tensor::from_host(x.rank(), &[WIDTH], &[1.0f64, 0.0, 1.0, 1.0, 0.0, 1.0])?;
    let mut y = first.clone();
    for layer in 0..LAYERS as u64 {
        let w = on(layer)?;
        let noise = tape.noise().unwrap();
        let text = |y: &Var, w: &Var| {
            y.matmul(w).relu().scale(0.25).dropout_of_step(0.5, layer, noise.step, noise.first_row)
        };
        y = match layer {
            2 => tape.checkpoint(&[y, w], |a| Ok(vec![text(&a[0], &a[1])]))?.remove(0),
            _ => text(&y, &w),
        };
    }
    let y = y.add(&first).mul(&y.constant(mask));
    // Uses that stop gradients: of a value, of a parameter, and of a value made without one.
    let no_grad = tape.no_grad(|| first.scale(0.5).add(x));
    let y = y.add(&first.detach().matmul(&on(10)?.detach())).add(&no_grad);
    // A value that the loss does not read has no gradient, not even zeros.
    let unread = y.matmul(&on(11)?);
    let _ = unread.relu();
    Ok(vec![y.matmul_nt(&table).sum().add(&y.mul(x).sum())])
}

fn arguments(rank: &Rank, microbatch: usize) -> Result<Vec<Tensor>> {
    let ids: Vec<i64> = (0..ROWS).map(|r| ((r + microbatch) % 3) as i64).collect();
    let x: Vec<f64> = (0..ROWS * WIDTH).map(|i| ((i + microbatch * 5) % 3) as f64).collect();
    Ok(vec![Tensor::from_host(rank, &[ROWS], &ids)?, Tensor::from_host(rank, &[ROWS, WIDTH], &x)?])
}

fn noise(microbatch: usize) -> Option<Noise> {
    Some(Noise { seed: 3, step: 7, first_row: (microbatch * ROWS) as u64 })
}

/// Losses and gradients of one rank.
fn reference(num_microbatches: usize) -> (Vec<f64>, BTreeMap<u64, Vec<f64>>) {
    let ranks = World::run(Mesh::single(), |rank| {
        let tape = Tape::new(rank);
        let mut losses = Vec::new();
        for microbatch in 0..num_microbatches {
            tape.set_noise(noise(microbatch));
            let args: Vec<Var> = arguments(rank, microbatch)?.into_iter().map(|t| tape.constant(t)).collect();
            let loss = text(&args)?.remove(0).scale(0.5);
            losses.push(loss.item()? * 2.0);
            loss.backward()?;
        }
        Ok((losses, values(&tape.gradients())?))
    });
    ranks.unwrap().remove(0)
}

fn values(gradients: &Gradients) -> Result<BTreeMap<u64, Vec<f64>>> {
    gradients.iter().map(|(key, g)| Ok((*key, g.to_f64()?))).collect()
}

fn recorded(rank: &Rank) -> Result<Program> {
    let layouts = [
        Layout::invariant(rank.mesh(), DType::I64, &[ROWS]),
        Layout::invariant(rank.mesh(), DType::F64, &[ROWS, WIDTH]),
    ];
    let start = Noise { seed: 3, step: 0, first_row: 0 };
    Program::record(rank, &layouts, Some(start), text)
}

/// Runs a schedule on a pipeline with these cuts and compares exactly with one rank.
fn check(name: &str, mesh: &str, starts: &[usize], num_microbatches: usize) {
    let expected = reference(num_microbatches);
    let mesh = Mesh::parse(mesh).unwrap();
    let ranks = World::run(mesh.clone(), |rank| {
        let axis = rank.mesh().axis("pp").unwrap();
        let here = rank.slice(axis);
        let stages = Stages::new(recorded(&here)?, starts);
        let links = stages.links();
        let num_ranks = rank.mesh().size(axis);
        let schedule = Schedule::named(name, num_ranks, num_microbatches)?.with_transfers(&links);
        assert_eq!(schedule.verify(&links)?.peak_live.len(), num_ranks);
        let place = schedule.stage_ranks.clone();
        let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
        let outcome = runner.run(&PipelineInputs {
            arguments: &|m| arguments(&here, m),
            parameter: &|key| parameter(&here, key).unwrap(),
            is_trained: &|_| true,
            draw: &|m| ReplayNoise::Of(noise(m).unwrap()),
            weight: 0.5,
        })?;
        let losses: Result<Vec<Option<f64>>> =
            outcome.results.iter().map(|r| r[0].as_ref().map(Tensor::item).transpose()).collect();
        let here = |stage: &usize| place[*stage] == rank.coordinate(axis);
        let mut keys: Vec<u64> = (0..place.len()).filter(here).flat_map(|s| stages.keys(s)).collect();
        keys.sort_unstable();
        keys.dedup();
        Ok((losses?, keys, values(&outcome.gradients)?))
    });
    for (losses, keys, gradients) in ranks.unwrap_or_else(|e| panic!("{name} {mesh} {starts:?}: {e}")) {
        let losses: Vec<f64> = losses.into_iter().flatten().collect();
        assert!(losses.is_empty() || losses == expected.0, "{name} {mesh} {starts:?}: {losses:?}");
        let trained: Vec<u64> = keys.into_iter().filter(|key| expected.1.contains_key(key)).collect();
        assert_eq!(trained, gradients.keys().copied().collect::<Vec<u64>>(), "{name} {mesh} {starts:?}");
        for (key, gradient) in gradients {
            assert_eq!(gradient, expected.1[&key], "{name} {mesh} {starts:?}: gradient of {key}");
        }
    }
}

#[test]
fn every_cut_matches_one_rank() {
    let len = World::new(Mesh::single()).dry_run(0, |rank| Ok(recorded(rank)?.records.len())).unwrap();
    for start in 0..=len {
        check("1f1b", "pp=2", &[start], 3);
    }
    assert!(len > 20, "{len} records");
}

#[test]
fn every_schedule_matches_one_rank() {
    for name in shardgrad_autograd::pipeline::NAMES {
        for (mesh, starts) in
            [("pp=3", vec![7, 12]), ("pp=4", vec![3, 3, 15]), ("dp=2,pp=2", vec![9]), ("pp=1", vec![])]
        {
            let num_ranks = Mesh::parse(mesh).unwrap();
            let num_ranks = num_ranks.size(num_ranks.axis("pp").unwrap());
            for num_microbatches in [1, 2, 5] {
                let schedule = Schedule::named(name, num_ranks, num_microbatches);
                if schedule.is_ok_and(|s| s.num_stages() == num_ranks) {
                    check(name, mesh, &starts, num_microbatches);
                }
            }
        }
    }
}

#[test]
fn argument_of_another_shape_is_refused() {
    let error = World::run(Mesh::parse("pp=2").unwrap(), |rank| {
        let axis = rank.mesh().axis("pp").unwrap();
        let here = rank.slice(axis);
        let stages = Stages::new(recorded(&here)?, &[9]);
        let schedule = Schedule::gpipe(2, 1).unwrap().with_transfers(&stages.links());
        let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
        let wide = |_| {
            let x = Tensor::from_host(&here, &[1, WIDTH], &[0.0f64; WIDTH])?;
            Ok(vec![Tensor::from_host(&here, &[1], &[0i64])?, x])
        };
        let outcome = runner.run(&PipelineInputs {
            arguments: &wide,
            parameter: &|key| parameter(&here, key).unwrap(),
            is_trained: &|_| true,
            draw: &|_| ReplayNoise::Off,
            weight: 1.0,
        });
        outcome.map(drop)
    });
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("argument 0 of microbatch 0 is i64[1], the stages were recorded for i64[2]"),
        "{text}"
    );
}

#[test]
fn frozen_parameters_have_no_gradient_on_any_stage() {
    let frozen = [9, 2];
    let ranks = World::run(Mesh::parse("pp=3").unwrap(), |rank| {
        let axis = rank.mesh().axis("pp").unwrap();
        let here = rank.slice(axis);
        let stages = Stages::new(recorded(&here)?, &[7, 12]);
        let schedule = Schedule::zb_h1(3, 2).unwrap().with_transfers(&stages.links());
        let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
        let outcome = runner.run(&PipelineInputs {
            arguments: &|m| arguments(&here, m),
            parameter: &|key| parameter(&here, key).unwrap(),
            is_trained: &|key| !frozen.contains(&key),
            draw: &|m| ReplayNoise::Of(noise(m).unwrap()),
            weight: 0.5,
        })?;
        values(&outcome.gradients)
    });
    let expected = reference(2).1;
    let all: BTreeMap<u64, Vec<f64>> = ranks.unwrap().into_iter().flatten().collect();
    let trained: Vec<u64> = expected.keys().copied().filter(|key| !frozen.contains(key)).collect();
    assert_eq!(all.keys().copied().collect::<Vec<u64>>(), trained);
    assert!(all.iter().all(|(key, gradient)| *gradient == expected[key]));
}

/// The gradients by key, the transfers of gradients, and the number of operations of a rank.
type RankRun = (BTreeMap<u64, Vec<f64>>, Vec<&'static str>, u64);

/// Runs four stages, each a matmul with its own parameter; `frozen` ones are not trained. Returns for each rank the
/// gradients, the transfers of gradients, and the operations of the step.
fn chain(schedule: &Schedule, frozen: &[u64]) -> Vec<RankRun> {
    let ranks = World::run(Mesh::parse(&format!("pp={}", schedule.ranks.len())).unwrap(), |rank| {
        let axis = rank.mesh().axis("pp").unwrap();
        let here = rank.slice(axis);
        let text = |args: &[Var]| {
            let tape = args[0].tape();
            let step = |y: Var, key: u64| -> Result<Var> {
                Ok(y.matmul(&tape.leaf(key, &parameter(args[0].rank(), key)?)))
            };
            Ok(vec![(0..4).try_fold(args[0].clone(), step)?.sum()])
        };
        let layout = Layout::invariant(here.mesh(), DType::F64, &[ROWS, WIDTH]);
        let stages =
            Stages::new(Program::record(&here, std::slice::from_ref(&layout), None, text)?, &[1, 2, 3]);
        let schedule = schedule.with_transfers(&stages.links());
        schedule.verify(&stages.links())?;
        let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
        rank.trace().enable();
        let outcome = runner.run(&PipelineInputs {
            arguments: &|m| Ok(vec![arguments(&here, m)?.remove(1)]),
            parameter: &|key| parameter(&here, key).unwrap(),
            is_trained: &|key| !frozen.contains(&key),
            draw: &|_| ReplayNoise::Off,
            weight: 1.0,
        })?;
        let records = rank.trace().take();
        let back = records.iter().filter(|r| r.phase == Phase::Backward).map(|r| r.op).collect();
        Ok((values(&outcome.gradients)?, back, rank.backend().cost().flops))
    });
    ranks.unwrap()
}

/// Stages that are frozen together with all stages before them take no part in the backward pass; a frozen stage after
/// a trained one sends gradients on.
#[test]
fn frozen_first_stages_skip_the_backward_pass() {
    let one_each = [
        Schedule::gpipe(4, 3).unwrap(),
        Schedule::one_f_one_b(4, 3).unwrap(),
        Schedule::zb_h1(4, 3).unwrap(),
    ];
    for schedule in one_each.into_iter().chain([Schedule::zb_v(2, 3).unwrap()]) {
        let whole = chain(&schedule, &[]);
        let forward = Schedule::forward_only(&schedule.stage_ranks, schedule.ranks.len(), 1).unwrap();
        let forward = chain(&forward, &[]);
        for frozen in [&[0][..], &[0, 1], &[0, 1, 2], &[1], &[0, 2], &[3]] {
            let what = format!("{} without {frozen:?}", schedule.name);
            let ran = chain(&schedule, frozen);
            let first = (0..4).find(|key| !frozen.contains(key)).unwrap() as usize;
            // Three microbatches, over the boundaries after the first trained stage that are between two ranks.
            let apart = |stage: &usize| schedule.stage_ranks[*stage] != schedule.stage_ranks[stage + 1];
            let hops = 3 * (first..3).filter(apart).count();
            let moved: Vec<&str> = ran.iter().flat_map(|r| r.1.clone()).collect();
            assert_eq!(moved.iter().filter(|op| **op == "send").count(), hops, "{what}");
            assert_eq!(moved.len(), 2 * hops, "{what}");
            for (rank, (gradients, _, flops)) in ran.iter().enumerate() {
                let mut expected = whole[rank].0.clone();
                expected.retain(|key, _| !frozen.contains(key));
                assert_eq!(*gradients, expected, "{what}");
                if (0..4).filter(|stage| schedule.stage_ranks[*stage] == rank).all(|stage| stage < first) {
                    assert_eq!(*flops, 3 * forward[rank].2, "{what}: rank {rank} goes forward only");
                }
            }
        }
    }
}

#[test]
fn cuts_balanced_by_path_and_by_layers() {
    let program = |cut: &str, n: usize| {
        let cut: Cut = cut.parse().unwrap();
        World::new(Mesh::single()).dry_run(0, |rank| recorded(rank)?.cut(rank, &cut, n))
    };
    assert_eq!(program("balanced", 1).unwrap(), []);
    assert_eq!(program("balanced", 4).unwrap().len(), 3);
    assert!(program("balanced", 0).unwrap_err().message().contains("a schedule needs at least one stage"));
    let error = program("h.1", 2).unwrap_err();
    assert!(error.message().contains("no op of the model is at `h.1`"), "{error}");
    assert!(program("2,2", 2).unwrap_err().message().contains("the stages have 4 layers, the model has 0"));
    assert!(program("balanced", 1000).unwrap_err().message().contains("cannot be cut into 1000 stages"));
}

#[test]
fn several_stages_per_rank_match_one_rank() {
    for (name, mesh, starts, num_microbatches) in [
        ("interleaved", "pp=2", vec![4, 9, 15], 2),
        ("interleaved-3", "pp=2", vec![2, 4, 9, 15, 18], 4),
        ("interleaved", "pp=3,dp=2", vec![4, 6, 9, 12, 15], 6),
        ("interleaved-4", "pp=1", vec![4, 9, 15], 3),
        ("zb-v", "pp=2", vec![4, 9, 15], 4),
        ("v-half", "pp=3", vec![3, 5, 9, 13, 15], 5),
        ("zb-v", "pp=4", vec![2, 4, 6, 9, 12, 15, 18], 3),
        ("v-min", "pp=3", vec![3, 5, 9, 13, 15], 7),
        ("dualpipe-v", "pp=4", vec![2, 4, 6, 9, 12, 15, 18], 9),
        ("interleaved", "pp=4", vec![2, 4, 6, 6, 12, 15, 18], 4),
        ("1f1b", "pp=8", vec![2, 4, 6, 9, 12, 15, 18], 9),
        ("zb-h1", "pp=8", vec![2, 4, 4, 9, 12, 15, 18], 5),
        ("zb-h2", "pp=8", vec![1, 4, 6, 9, 12, 15, 19], 16),
    ] {
        check(name, mesh, &starts, num_microbatches);
    }
}

/// Runs two stages with a changed, unverified schedule on one of two ranks; returns the error text.
fn run_unverified(change: impl Fn(&mut Schedule) + Sync) -> String {
    let error = World::run(Mesh::parse("pp=2").unwrap(), |rank| {
        let axis = rank.mesh().axis("pp").unwrap();
        let here = rank.slice(axis);
        let stages = Stages::new(recorded(&here)?, &[9]);
        let mut schedule = Schedule::gpipe(2, 1).unwrap().with_transfers(&stages.links());
        change(&mut schedule);
        let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
        let outcome = runner.run(&PipelineInputs {
            arguments: &|m| arguments(&here, m),
            parameter: &|key| parameter(&here, key).unwrap(),
            is_trained: &|_| true,
            draw: &|m| ReplayNoise::Of(noise(m).unwrap()),
            weight: 1.0,
        });
        outcome.map(drop)
    });
    error.unwrap_err().to_string()
}

#[test]
fn unverified_schedule_ends_in_an_error() {
    let why = "a stage needs a value that was not made or received: call Schedule::verify before a run";
    // Without the receive, without the forward pass, without the send, and with a weight gradient of a backward pass
    // that did not run.
    for at in [0, 1] {
        let text = run_unverified(|schedule| {
            schedule.ranks[1].remove(at);
        });
        assert!(text.contains(why), "{at}: {text}");
    }
    let text = run_unverified(|schedule| {
        schedule.ranks[0].remove(1);
    });
    assert!(text.contains(why), "{text}");
    let half = Action::WeightGradient { stage: 1, microbatch: 0 };
    let text = run_unverified(|schedule| schedule.ranks[1].insert(2, half));
    assert!(text.contains(why), "{text}");
    let text = run_unverified(|schedule| schedule.stage_ranks.push(0));
    assert!(
        text.contains("schedule gpipe is for 3 stages on 2 ranks, but there are 2 stages on 2 ranks"),
        "{text}"
    );
}

#[test]
fn recut_follows_the_parameters_of_the_stages() {
    World::new(Mesh::single())
        .dry_run(0, |rank| {
            let program = recorded(rank)?;
            for starts in [vec![9], vec![0, 9], vec![3, 6, program.records.len()]] {
                let stages = Stages::new(program.clone(), &starts);
                let recut = stages.recut(recorded(rank)?)?;
                assert_eq!(recut.stages().len(), starts.len() + 1);
                for stage in 0..=starts.len() {
                    assert!(recut.keys(stage).is_subset(&stages.keys(stage)), "{starts:?}: stage {stage}");
                }
                assert_eq!(
                    recut.stages().iter().map(|s| s.range.len()).sum::<usize>(),
                    program.records.len()
                );
            }
            // A program of other ops that reads the same parameters in the same order.
            let layout = Layout::invariant(rank.mesh(), DType::F64, &[ROWS, WIDTH]);
            let products = |keys: &[u64]| {
                Program::record(rank, std::slice::from_ref(&layout), None, |x| {
                    let product = |x: Var, key: &u64| -> Result<Var> {
                        Ok(x.matmul(&x.tape().leaf(*key, &parameter(x.rank(), *key)?)))
                    };
                    Ok(vec![keys.iter().try_fold(x[0].square(), product)?.sum()])
                })
            };
            let stages = Stages::new(products(&[0, 1, 2])?, &[2]);
            let recut = stages.recut(products(&[0, 2])?)?;
            assert_eq!(recut.stages().iter().map(|s| s.range.clone()).collect::<Vec<_>>(), [0..2, 2..4]);
            let text = stages.recut(products(&[0, 2, 0])?).unwrap_err().to_string();
            assert!(text.contains("no stage from 1 on holds the parameters of"), "{text}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn profile_times_every_segment_alike_on_all_ranks() {
    let profiles = World::run(Mesh::parse("pp=2,dp=2").unwrap(), |rank| {
        let axis = rank.mesh().axis("pp").unwrap();
        let here = rank.slice(axis);
        let program = recorded(&here)?;
        let feed = PipelineInputs {
            arguments: &|m| arguments(&here, m),
            parameter: &|key| parameter(&here, key).unwrap(),
            is_trained: &|_| true,
            draw: &|m| ReplayNoise::Of(noise(m).unwrap()),
            weight: 1.0,
        };
        let profile = Profile::measure((&here, axis), &program, 4, &feed)?;
        Ok((profile, program.records.len()))
    });
    let profiles = profiles.unwrap();
    let (profile, num_records) = &profiles[0];
    assert!(profiles.iter().all(|p| p == &profiles[0]));
    assert!(profile.segments.len() >= 4 && profile.segments.len() == profile.times.len());
    let tiled = profile
        .segments
        .iter()
        .scan(0, |end, segment| Some(segment.start == std::mem::replace(end, segment.end)));
    assert!(tiled.into_iter().all(|fits| fits) && profile.segments.last().unwrap().end == *num_records);
    assert!(profile.times.iter().all(|t| t.forward > 0.0 && t.forward < 1.0) && profile.transfer > 0.0);
    assert!(profile.times.iter().any(|t| t.input > 0.0) && profile.times.iter().any(|t| t.weight > 0.0));
    for num_stages in 1..=4 {
        assert_eq!(profile.cut(num_stages).unwrap().len(), num_stages - 1);
    }
}

/// A parameter that one stage trains and another stage reads in another layout and without a gradient has one value:
/// both stages get its gradient, whichever comes first.
#[test]
fn tied_parameter_read_without_gradient_gets_the_gradient() {
    for detached_first in [false, true] {
        let ranks = World::run(Mesh::parse("pp=2,tp=2").unwrap(), |rank| {
            let axis = rank.mesh().axis("pp").unwrap();
            let here = rank.slice(axis);
            let split = Layout::parse("f64[6@tp, 6]", here.mesh())?;
            let text = |args: &[Var]| {
                let w = args[0].tape().leaf(0, &parameter(args[0].rank(), 0)?);
                let detached = |x: &Var| x.add(&w.to_layout(&split).detach().sum());
                let live = |x: &Var| x.matmul(&w);
                Ok(vec![
                    if detached_first { live(&detached(&args[0])) } else { detached(&live(&args[0])) }.sum(),
                ])
            };
            let layout = Layout::invariant(here.mesh(), DType::F64, &[ROWS, WIDTH]);
            let program = Program::record(&here, std::slice::from_ref(&layout), None, text)?;
            let names = program.records.iter().map(|r| r.op.name());
            let start = names.clone().position(|name| name == if detached_first { "matmul" } else { "sum" });
            let stages = Stages::new(program, &[start.expect("it is among them")]);
            let schedule = Schedule::gpipe(2, 1).unwrap().with_transfers(&stages.links());
            let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
            let outcome = runner.run(&PipelineInputs {
                arguments: &|m| Ok(vec![arguments(&here, m)?.remove(1)]),
                parameter: &|key| parameter(&here, key).unwrap(),
                is_trained: &|_| true,
                draw: &|_| ReplayNoise::Off,
                weight: 1.0,
            })?;
            Ok((stages.shared_parameters(&schedule.stage_ranks), values(&outcome.gradients)?))
        });
        let ranks = ranks.unwrap();
        assert_eq!(ranks[0].0, [(0, vec![0, 1])], "{detached_first}");
        assert!(ranks[0].1[&0].iter().any(|g| *g != 0.0));
        assert!(ranks.iter().all(|r| r.1 == ranks[0].1), "{detached_first}: {ranks:?}");
    }
}

#[test]
fn program_without_gradient_is_refused() {
    let error = World::run(Mesh::parse("pp=2").unwrap(), |rank| {
        let axis = rank.mesh().axis("pp").unwrap();
        let here = rank.slice(axis);
        let layout = Layout::invariant(here.mesh(), DType::F64, &[WIDTH, WIDTH]);
        // The parameter is detached.
        let text = |args: &[Var]| {
            let w = args[0].tape().leaf(0, &parameter(args[0].rank(), 0)?);
            Ok(vec![args[0].square().add(&w.detach()).sum()])
        };
        let program = Program::record(&here, std::slice::from_ref(&layout), None, text)?;
        let stages = Stages::new(program, &[1]);
        let schedule = Schedule::gpipe(2, 1).unwrap().with_transfers(&stages.links());
        let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
        let outcome = runner.run(&PipelineInputs {
            arguments: &|_| Ok(vec![Tensor::zeros(&here, &layout)?]),
            parameter: &|key| parameter(&here, key).unwrap(),
            is_trained: &|_| true,
            draw: &|_| ReplayNoise::Off,
            weight: 1.0,
        });
        outcome.map(drop)
    });
    let text = error.unwrap_err().to_string();
    assert!(text.contains("backward() of a value that has no gradient"), "{text}");
}

/// A received value takes its own memory, and no more while the receive waits.
#[test]
fn receive_takes_no_extra_memory() {
    const NUMEL: usize = 1 << 16;
    let peaks = World::run(Mesh::parse("pp=2").unwrap(), |rank| {
        let axis = rank.mesh().axis("pp").unwrap();
        let here = rank.slice(axis);
        let layout = Layout::invariant(here.mesh(), DType::F64, &[NUMEL]);
        let text = |args: &[Var]| Ok(vec![args[0].square().sum()]);
        let program = Program::record(&here, std::slice::from_ref(&layout), None, text)?;
        let stages = Stages::new(program, &[1]);
        let schedule = Schedule::forward_only(&[0, 1], 2, 1).unwrap().with_transfers(&stages.links());
        let runner = Runner { rank: &here, axis, stages: &stages, schedule: &schedule };
        runner.run(&PipelineInputs {
            arguments: &|_| Ok(vec![Tensor::zeros(&here, &layout)?]),
            parameter: &|_| unreachable!("there is none"),
            is_trained: &|_| true,
            draw: &|_| ReplayNoise::Off,
            weight: 1.0,
        })?;
        Ok(rank.backend().memory().peak_bytes)
    });
    let peak = peaks.unwrap()[1];
    assert!((NUMEL * 8..NUMEL * 8 * 3 / 2).contains(&peak), "{peak} bytes for a message of {}", NUMEL * 8);
}
