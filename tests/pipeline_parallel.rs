//! Pipeline parallelism: losses, gradient norms and weights have the bits of one rank, transfers are counted, models are saved and loaded.

use crate::cli::Folder;
use crate::training_run::{ROWS, Run, SEQ, gpt2, same, same_bits};
use approx::abs_diff_ne;
use shardgrad::autograd::pipeline::Cut;
use shardgrad::dist::{Phase, Record};
use shardgrad::nn::checkpoint::RunState;
use shardgrad::prelude::*;
use shardgrad_testing::sample;

/// In both modes: the sums of the default are over microbatches with rows of all ranks, and are reduced during the last backward pass.
#[test]
fn losses_match_one_rank_under_every_schedule() {
    let long = Run { microbatches: 3, ..Run::new(50) };
    let one = long.losses("");
    assert!(one[98] < 0.85 * one[0], "it learns: {} to {}", one[0], one[98]);
    same(&one, &long.losses("pp=4"), 1e-9, "50 steps");
    let run = Run { steps: 3, ..long };
    let canonical = run.clone().in_leaves(ROWS);
    let (one, bits) = (run.losses(""), canonical.bits(""));
    let schedules = [
        ("pp=2", "gpipe"),
        ("pp=4", "1f1b"),
        ("pp=2,dp=2", "1f1b"),
        ("pp=2", "zb-h1"),
        ("pp=4", "zb-h2"),
        ("pp=2", "zb-v"),
        ("pp=2,dp=2", "v-half"),
        ("pp=3", "v-min"),
        ("pp=2", "dualpipe-v"),
        ("pp=2", "searched"),
        ("pp=3", "interleaved"),
        ("pp=2,dp=2,tp=2", "gpipe"),
    ];
    let plan = |schedule| Plan::gpt2().pipeline_schedule(schedule);
    for (mesh, schedule) in schedules {
        let many = Run { plan: plan(schedule), ..canonical.clone() };
        same_bits(&bits, &many.bits(mesh), &format!("{mesh} {schedule}"));
    }
    for (mesh, schedule) in sample(0, schedules) {
        let many = Run { plan: plan(schedule), ..run.clone() };
        same(&one, &many.losses(mesh), 1e-9, &format!("{mesh} {schedule}"));
    }
}

#[test]
fn schedules_with_one_summation_order_are_bitwise_equal() {
    let run = Run { microbatches: 3, ..Run::new(5) };
    for mesh in ["pp=2", "pp=4", "pp=2,dp=2,tp=2"] {
        let losses =
            |name: &str| Run { plan: Plan::gpt2().pipeline_schedule(name), ..run.clone() }.losses(mesh);
        assert!(losses("gpipe") == losses("1f1b"), "{mesh}");
    }
}

#[test]
fn dropout_recomputation_stages_and_microbatches_do_not_change_losses() {
    let run = Run { config: gpt2(0.2).into(), ..Run::new(2) };
    let quiet = Run::new(2).losses("");
    let canonical = run.clone().in_leaves(ROWS);
    let (one, bits) = (run.losses(""), canonical.bits(""));
    assert!(abs_diff_ne!(one[2], quiet[2], epsilon = 1e-6), "dropout has an effect");
    let cuts = ["balanced", "1,3", "0,4", "4,0", "h.1.mlp", "h.0.attn.c_proj", "ln_f"];
    for (i, cut) in cuts.into_iter().enumerate() {
        let plan = Plan::gpt2().pipeline_cut(cut.parse::<Cut>().unwrap());
        let (microbatches, recompute) = ([1, 2, 3, 6][i % 4], i % 2 == 1);
        let mesh = ["pp=2", "tp=3,pp=2", "pp=2,tp=2"][i % 3];
        let what = format!("{mesh} {cut} in {microbatches}");
        if recompute && cut == "h.0.attn.c_proj" {
            // To rounding: canonical sums refuse a cut within a recomputed block.
            let many = Run { plan, microbatches, recompute, ..run.clone() };
            same(&one, &many.losses(mesh), 1e-10, &what);
        } else {
            let many = Run { plan, microbatches, recompute, ..canonical.clone() };
            same_bits(&bits, &many.bits(mesh), &what);
        }
    }
    let plan = Plan::gpt2().pipeline_cut(Cut::Layers(vec![1, 2, 0, 1]));
    let uneven = Run { plan, microbatches: 3, ..canonical };
    same_bits(&bits, &uneven.bits("dp=2,pp=4,tp=2"), "16 ranks");
}

/// Returns the collectives of a step of one rank.
fn records(run: &Run, mesh: &str, rank: usize) -> Vec<Record> {
    let world = World::new(Mesh::parse(mesh).unwrap());
    world
        .dry_run(rank, |rank| {
            let mut trainer = run.trainer(rank)?;
            rank.trace().take();
            trainer.step()?;
            Ok(rank.trace().take())
        })
        .unwrap()
}

#[test]
fn one_send_each_way_per_boundary_and_microbatch() {
    let run = Run { microbatches: 3, ..Run::new(1) };
    let count = |records: &[Record], op: &str, phase: Phase| -> (usize, u64) {
        let found: Vec<_> = records.iter().filter(|r| r.op == op && r.phase == phase).collect();
        (found.len(), found.iter().map(|r| r.bytes).sum())
    };
    // An activation is rows x tokens x width in f64; the gradient of the tied embedding crosses once per step in each direction.
    let activation = (ROWS / 3 * SEQ * 12 * 8) as u64;
    let table = 19 * 12 * 8;
    for stage in 0..4 {
        let records = records(&run, "pp=4", stage);
        let (later, earlier) = (usize::from(stage < 3), usize::from(stage > 0));
        let tied = usize::from(stage == 0 || stage == 3);
        let tied_bytes = tied as u64 * table;
        let all = |n: usize| (3 * n) as u64 * activation;
        assert_eq!(count(&records, "send", Phase::Forward), (3 * later, all(later)));
        assert_eq!(count(&records, "recv", Phase::Forward), (3 * earlier, all(earlier)));
        assert_eq!(count(&records, "send", Phase::Backward), (3 * earlier + tied, all(earlier) + tied_bytes));
        assert_eq!(count(&records, "recv", Phase::Backward), (3 * later + tied, all(later) + tied_bytes));
        assert_eq!(count(&records, "all_reduce", Phase::Control).0, 1);
        assert_eq!(records.len(), 6 * (later + earlier) + 2 * tied + 1, "{records:?}");
    }
}

#[test]
fn gradients_are_reduced_once_per_step_over_dp() {
    let run = Run { microbatches: 3, ..Run::new(1) };
    for rank in 0..4 {
        let records = records(&run, "pp=2,dp=2", rank);
        let reduced = records.iter().filter(|r| r.op == "all_reduce" && r.phase == Phase::Backward);
        let mut paths: Vec<&str> = reduced.flat_map(Record::members).collect();
        let len = paths.len();
        paths.sort_unstable();
        paths.dedup();
        assert!(len == paths.len() && len > 20, "rank {rank}: {paths:?}");
    }
}

#[test]
fn pipelined_model_is_saved_and_loaded_on_another_mesh() {
    let folder = Folder::new("pipelines");
    let dir = folder.0.join("model");
    let run = Run { microbatches: 3, ..Run::new(2) }.in_leaves(ROWS);
    let saved = World::run(Mesh::parse("pp=2,tp=2").unwrap(), |rank| {
        let mut trainer = run.trainer(rank)?;
        trainer.step()?;
        trainer.model().save(&dir)?;
        Ok(trainer.step()?.loss)
    });
    let saved = saved.unwrap();
    for mesh in ["", "pp=3,dp=2"] {
        let loaded = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let mut trainer = run.trainer(rank)?;
            trainer.model().load(&dir)?;
            // Data of the next step; its loss does not depend on the new optimizer.
            trainer.set_state(&RunState { step: 1, ..trainer.state() });
            Ok(trainer.step()?.loss)
        });
        assert_eq!(saved[0].to_bits(), loaded.unwrap()[0].to_bits(), "{mesh}");
    }
}

/// The tied embedding is on the first and the last stage.
#[test]
fn tied_parameters_on_two_stages_are_compared() {
    let folder = Folder::new("copies");
    let dir = folder.0.join("model");
    let run = Run::new(1);
    for (mesh, odd) in [("pp=2", 1), ("pp=2,tp=2", 3), ("pp=3,dp=2,tp=2", 10), ("pp=2,tp=2", 9)] {
        let num_ranks = Mesh::parse(mesh).unwrap().num_ranks();
        for saves in [true, false] {
            let compared = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let trainer = run.trainer(rank)?;
                let table = trainer.model().param("wte.weight")?;
                if rank.index() == odd {
                    let mut own = table.tensor().to_local_f64()?;
                    own[3] += 1e-9;
                    table.set_tensor(Tensor::from_local(trainer.rank(), &table.layout(), &own)?)?;
                }
                if saves { trainer.model().save(&dir) } else { trainer.check_consistent() }
            });
            assert_eq!(compared.is_err(), odd < num_ranks, "{mesh}: {compared:?}");
            if let Err(error) = compared {
                assert_eq!(error.kind(), Kind::Diverged, "{error}");
                assert!(
                    error.message().ends_with("tensors differ between ranks, `wte.weight` first"),
                    "{error}"
                );
            }
            assert!(!dir.exists() || saves && odd >= num_ranks, "nothing is saved");
            let _ = std::fs::remove_dir_all(&dir);
        }
    }
}

#[test]
fn stages_stream_weights_to_the_saving_rank() {
    let folder = Folder::new("streamed-weights");
    let dir = folder.0.join("model");
    let run = Run::new(1);
    let saved = World::run(Mesh::parse("pp=3,tp=2").unwrap(), |rank| {
        let trainer = run.trainer(rank)?;
        rank.trace().enable();
        trainer.model().save(&dir)?;
        let held = trainer.model().params().iter().filter(|p| p.is_primary_owner()).count();
        Ok((held, rank.trace().take()))
    });
    // The first rank of each later stage.
    for (held, records) in [2, 4].map(|rank| saved.as_ref().unwrap()[rank].clone()) {
        let moved = records.iter().filter(|r| ["send", "recv"].contains(&r.op));
        let moved: Vec<(&str, usize)> = moved.map(|r| (r.op, r.numel())).collect();
        assert!(held > 10 && moved.len() == 2 * held, "{held} parameters: {moved:?}");
        assert!(moved.chunks(2).all(|pair| pair[0] == ("recv", 1) && pair[1].0 == "send"), "{moved:?}");
    }
}

#[test]
fn invalid_pipelines_are_refused() {
    let refuse = |plan: Plan, mesh: &str, microbatches: usize| {
        let run = Run { plan, microbatches, ..Run::new(1) };
        World::run(Mesh::parse(mesh).unwrap(), |rank| run.trainer(rank).map(drop)).unwrap_err().to_string()
    };
    let text = refuse(Plan::gpt2(), "pp=2", 4);
    assert!(
        text.contains("4 microbatches do not divide a batch of 6 rows")
            && text.contains("use 3 microbatches")
    );
    let text = refuse(Plan::gpt2().pipeline_schedule("zigzag"), "pp=2", 1);
    assert!(text.contains("unknown schedule `zigzag`"), "{text}");
    let text = refuse(Plan::gpt2().pipeline_cut(Cut::Layers(vec![2, 1])), "pp=2", 1);
    assert!(text.contains("the stages have 3 layers, the model has 4"), "{text}");
    let text = refuse(Plan::gpt2().pipeline_cut(Cut::At(vec!["h.9".to_string()])), "pp=2", 1);
    assert!(text.contains("no op of the model is at `h.9`") && text.contains("h.0, h.1"), "{text}");
    let text = refuse(Plan::gpt2().pipeline_cut(Cut::Layers(vec![4])), "pp=2", 1);
    assert!(text.contains("the cut makes 1 stages, the schedule has 2"), "{text}");
}

#[test]
fn constant_loss_is_refused_as_on_one_rank() {
    let run = Run { microbatches: 3, ..Run::new(1) }.in_leaves(ROWS);
    // Frozen: a block of the first stage, one of the last, all.
    let step = |mesh: &str, frozen: &[&str]| {
        let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let mut trainer = run.trainer(rank)?;
            for pattern in frozen {
                trainer.model().freeze(pattern)?;
            }
            Ok(trainer.step()?.grad_norm)
        });
        ranks.map_err(|e| (e.kind(), e.message().to_string()))
    };
    let one = step("", &["*"]).unwrap_err();
    assert!(one.0 == Kind::Unsupported && one.1.contains("that has no gradient"), "{one:?}");
    for mesh in ["pp=2", "pp=2,dp=2", "pp=4"] {
        assert_eq!(step(mesh, &["*"]).unwrap_err(), one, "{mesh}");
        for frozen in [&["h.0.*", "w*"][..], &["h.2.*", "h.3.*", "ln_f.*"]] {
            let (one, many) = (step("", frozen).unwrap()[0], step(mesh, frozen).unwrap());
            assert!(
                one > 0.0 && many.iter().all(|norm| norm.to_bits() == one.to_bits()),
                "{mesh}: {many:?}, on one rank {one}"
            );
        }
    }
}

/// Stages before all trainable parameters receive no gradients and save no activations.
/// The transfers are those of the default, whose losses agree to rounding.
#[test]
fn frozen_first_stages_need_no_backward_transfers() {
    let run = Run { microbatches: 3, ..Run::new(1) };
    let step = |rank: &Rank, frozen: &[&str]| -> Result<(Vec<f64>, Vec<Record>, usize)> {
        let mut trainer = run.trainer(rank)?;
        for pattern in frozen {
            trainer.model().freeze(pattern)?;
        }
        rank.trace().take();
        let report = trainer.step()?;
        let peak = rank.backend().memory().peak_bytes;
        Ok((vec![report.loss, report.grad_norm], rank.trace().take(), peak))
    };
    let mesh = || World::new(Mesh::parse("pp=4").unwrap());
    let back = |records: &[Record]| {
        let moved = records.iter().filter(|r| r.op == "send" && r.phase == Phase::Backward);
        moved.map(|r| r.bytes).sum::<u64>()
    };
    let front = ["w*", "h.0.*", "h.1.*"];
    let ranks: Vec<_> = (0..4)
        .map(|at| {
            let [all, some] = [&[][..], &front].map(|f| mesh().dry_run(at, |rank| step(rank, f)).unwrap());
            (back(&all.1), back(&some.1), all.2, some.2)
        })
        .collect();
    let moved: Vec<(u64, u64)> = ranks.iter().map(|t| (t.0, t.1)).collect();
    let hop = moved[1].0;
    assert!(hop > 0 && moved[3].1 == hop, "{moved:?}");
    assert_eq!(moved.iter().map(|m| m.1).collect::<Vec<u64>>()[..3], [0, 0, 0], "{moved:?}");
    assert!(ranks[..2].iter().all(|(.., all, some)| some < all), "{ranks:?}");
    let [one, four] = ["", "pp=4"].map(|mesh| {
        World::run(Mesh::parse(mesh).unwrap(), |rank| Ok(step(rank, &front)?.0)).unwrap().remove(0)
    });
    same(&one, &four, 1e-12, "a frozen front");
}

#[test]
fn parameter_of_another_stage_is_refused_by_name() {
    let run = Run::new(1);
    let error = World::new(Mesh::parse("pp=2").unwrap()).dry_run(0, |rank| {
        let trainer = run.trainer(rank)?;
        let far = trainer.model().param("h.3.ln_1.weight")?.clone();
        assert!(!far.is_local() && !far.is_primary_owner() && far.layout().shape().as_slice() == [12]);
        let _ = far.tensor();
        Ok(())
    });
    let text = error.unwrap_err().to_string();
    assert!(text.contains("`h.3.ln_1.weight` is on pipeline ranks [1], not on rank 0"), "{text}");
}

/// Returns the code lines of an example.
fn code(example: &str) -> Vec<String> {
    let path = format!("{}/examples/{example}.rs", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().map(str::trim);
    lines.filter(|l| !l.is_empty() && !l.starts_with("//")).map(str::to_string).collect()
}

#[test]
fn sharded_example_differs_in_at_most_five_lines() {
    let (plain, sharded) = (code("transformer"), code("sharded_transformer"));
    let changed = sharded.iter().filter(|line| !plain.contains(line)).count();
    let gone = plain.iter().filter(|line| !sharded.contains(line)).count();
    assert!((1..=5).contains(&changed) && gone <= changed, "{changed} lines changed or added, {gone} gone");
}
