//! Checkpoints: a resumed run has the bits of an uninterrupted run, on every mesh; incomplete checkpoints and those
//! of other models are refused.

use crate::custom_optimizers::Forwarding;
use crate::save_and_load::Folder;
use crate::support::{ROWS, config, run, tokens_and_targets};
use shardgrad_autograd::Var;
use shardgrad_nn::checkpoint::{
    self, CONFIG_FILE, Checkpoints, OPTIMIZER_FILE, RunState, STATE_FILE, SidecarFile, TensorFile,
    WEIGHTS_FILE,
};
use shardgrad_nn::optim::{LossScale, ParamGroup};
use shardgrad_nn::{
    AdamW, Deterministic, Gpt2Config, LanguageModel, Linear, Model, ModelConfig, Optimizer, Plan, Sgd,
    StepArgs, Trainer, TrainerConfig,
};
use shardgrad_tensor::{DType, Error, Kind, Mesh, Rank, Result, Tensor, Value, World};
use std::fs;
use std::ops::Range;
use std::path::Path;

/// Mesh, precision and plan of a run.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    mesh: &'static str,
    dtype: DType,
    param_dtype: DType,
    microbatches: usize,
    deterministic: Deterministic,
}

impl Case {
    pub(crate) fn new(mesh: &'static str) -> Case {
        let deterministic = Deterministic::Run;
        Case { mesh, dtype: DType::F32, param_dtype: DType::F32, microbatches: 2, deterministic }
    }
}

/// Results of a rank at the end of a run: losses, run state, and the bytes of parameters and optimizer state.
pub(crate) type RunResult = (Vec<f64>, RunState, Vec<Vec<u8>>);

fn shape() -> ModelConfig {
    ModelConfig::Gpt2(config()).with_dropout(0.2)
}

/// Runs some steps on a rank, from a checkpoint or from the start, and saves a checkpoint.
fn rank_end<O: Optimizer + Clone>(
    rank: &Rank,
    case: Case,
    optim: &O,
    (from, steps, to): (Option<&Path>, usize, Option<&Path>),
) -> Result<RunResult> {
    let shape = shape();
    let plan = LanguageModel::plan(&shape);
    let read =
        |rank: &Rank, step: u64, rows: Range<usize>| tokens_and_targets(rank, &plan, rows, step as usize);
    let settings = TrainerConfig {
        microbatches: case.microbatches,
        seed: 3,
        dtype: case.dtype,
        param_dtype: Some(case.param_dtype),
        clip: Some(1.0),
        deterministic: case.deterministic,
        ..TrainerConfig::new(ROWS)
    };
    let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
    let module = LanguageModel::new(&shape);
    let mut trainer = Trainer::new(rank, module, &plan, optim.clone(), settings, read, loss)?;
    match from {
        Some(dir) => drop(trainer.resume(dir)?),
        // Doubles after three steps, one of which follows the checkpoint.
        None if case.dtype == DType::F16 => {
            let loss_scale = Some(LossScale::new(1024.0, 1997));
            trainer.set_state(&RunState { loss_scale, ..trainer.state() });
        }
        None => {}
    }
    let losses = (0..steps).map(|_| Ok(trainer.step()?.loss)).collect::<Result<_>>()?;
    if let Some(dir) = to {
        checkpoint::save(dir, trainer.model(), trainer.optim(), &trainer.state(), &[])?;
    }
    let mut bytes = Vec::new();
    for param in trainer.model().params().iter().filter(|p| p.is_local()) {
        let state = trainer.optim().param_state(param).expect("it was stepped");
        bytes.push(state.num_steps.to_le_bytes().to_vec());
        bytes.extend([&param.tensor()].into_iter().chain(&state.tensors).map(|t| t.local_bytes().unwrap()));
    }
    Ok((losses, trainer.state(), bytes))
}

pub(crate) fn ends<O: Optimizer + Clone + Sync>(
    case: Case,
    optim: &O,
    how: (Option<&Path>, usize, Option<&Path>),
) -> Vec<RunResult> {
    run(case.mesh, |rank| rank_end(rank, case, optim, how))
}

pub(crate) fn adamw() -> AdamW {
    let group = ParamGroup { lr_scale: Some(0.5), weight_decay: None };
    AdamW::new(0.02).weight_decay(0.1).group("*.ln_1.*", group)
}

/// Runs four steps, and two steps twice; compares losses and all results bit for bit.
fn check<O: Optimizer + Clone + Sync>(name: &str, case: Case, optim: &O) {
    let folder = Folder::new(name);
    let (half, end) = (folder.0.join("checkpoint-2"), folder.0.join("checkpoint-4"));
    let uninterrupted = ends(case, optim, (None, 4, Some(&end)));
    let first = ends(case, optim, (None, 2, Some(&half)));
    let files = |dir: &Path| {
        [WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE, CONFIG_FILE].map(|f| fs::read(dir.join(f)).unwrap())
    };
    let unbroken = files(&end);
    let second = ends(case, optim, (Some(&half), 2, Some(&end)));
    assert!(files(&end) == unbroken, "{name}: files");
    for ((uninterrupted, first), second) in uninterrupted.into_iter().zip(first).zip(second) {
        assert_eq!(uninterrupted.0, [first.0, second.0].concat(), "{name}: losses");
        assert_eq!(uninterrupted.1, second.1, "{name}: state");
        assert!(uninterrupted.2 == second.2, "{name}: parameters and optimizer state");
    }
}

#[test]
fn resumed_run_matches_uninterrupted_run_bit_for_bit() {
    for mesh in ["", "dp=2", "tp=2", "pp=2", "dp=2,tp=2"] {
        check(&format!("bits-{mesh}"), Case::new(mesh), &adamw());
    }
    for mesh in ["tp=3", "pp=2"] {
        check(&format!("bits-sgd-{mesh}"), Case::new(mesh), &Sgd::new(0.05).momentum(0.9).nesterov());
    }
}

#[test]
fn resumed_run_in_16_bits_restores_loss_scale() {
    for (name, mesh, dtype, param_dtype) in [
        ("f16", "", DType::F16, DType::F32),
        ("f16-pp", "pp=2", DType::F16, DType::F32),
        ("bf16", "dp=2", DType::BF16, DType::F32),
        ("bf16-stored", "tp=2", DType::BF16, DType::BF16),
        ("f64", "dp=3", DType::F64, DType::F64),
    ] {
        let microbatches = if mesh == "dp=3" { 1 } else { 2 };
        check(name, Case { dtype, param_dtype, microbatches, ..Case::new(mesh) }, &adamw());
    }
    let folder = Folder::new("scale");
    let case = Case { dtype: DType::F16, ..Case::new("") };
    let end = ends(case, &adamw(), (None, 2, Some(&folder.0))).swap_remove(0);
    assert_eq!(end.1.loss_scale, Some(LossScale::new(1024.0, 1999)));
    let next = ends(case, &adamw(), (Some(&folder.0), 1, None)).swap_remove(0);
    assert_eq!(next.1.loss_scale, Some(LossScale::new(2048.0, 0)));
    // A run without loss scaling ignores the saved scale.
    let wide = ends(Case::new(""), &adamw(), (Some(&folder.0), 1, None)).swap_remove(0);
    assert_eq!((wide.1.loss_scale, wide.1.step), (None, 3));
}

#[test]
fn checkpoint_resumes_on_other_meshes_with_the_bits_of_one_rank() {
    let folder = Folder::new("meshes");
    let deterministic = Deterministic::Mesh { batch_leaves: ROWS, sum_leaves: 12 };
    let case = |mesh| Case { deterministic, ..Case::new(mesh) };
    let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    let (whole, first, second) =
        (folder.0.join("whole"), folder.0.join("checkpoint-2"), folder.0.join("checkpoint-4"));
    let expected = ends(case(""), &adamw(), (None, 4, Some(&whole))).swap_remove(0).0;
    let tensors = |dir: &Path| [WEIGHTS_FILE, OPTIMIZER_FILE].map(|name| fs::read(dir.join(name)).unwrap());
    for (from, to) in
        [("dp=2,tp=2", vec!["", "pp=2", "tp=3", "dp=4"]), ("", vec!["tp=2"]), ("pp=2", vec!["dp=2"])]
    {
        let begun = ends(case(from), &adamw(), (None, 2, Some(&first))).swap_remove(0).0;
        for mesh in to {
            let case = Case { microbatches: if mesh == "dp=4" { 1 } else { 2 }, ..case(mesh) };
            let rest = ends(case, &adamw(), (Some(&first), 2, Some(&second))).swap_remove(0).0;
            assert_eq!(bits(&[begun.clone(), rest].concat()), bits(&expected), "{from} then {mesh}");
            assert!(tensors(&second) == tensors(&whole), "{from} then {mesh}: other weights or moments");
        }
    }
}

/// Returns the error with which a checkpoint is refused.
pub(crate) fn refused(dir: &Path, mesh: &str, optim: impl Optimizer + Clone + Sync, case: Case) -> Error {
    World::run(Mesh::parse(mesh).unwrap(), |rank| rank_end(rank, case, &optim, (Some(dir), 1, None)))
        .unwrap_err()
}

#[test]
fn damaged_missing_or_foreign_files_are_refused_by_name() {
    let folder = Folder::new("damaged");
    let dir = folder.0.join("checkpoint-1");
    let save = || drop(ends(Case::new(""), &adamw(), (None, 1, Some(&dir))));
    for mesh in ["", "dp=2"] {
        for name in [STATE_FILE, OPTIMIZER_FILE, WEIGHTS_FILE] {
            for cut in [true, false] {
                save();
                let path = dir.join(name);
                match cut {
                    true => fs::write(&path, &fs::read(&path).unwrap()[..100]).unwrap(),
                    false => fs::remove_file(&path).unwrap(),
                }
                let error = refused(&dir, mesh, adamw(), Case::new(mesh));
                assert!(error.kind() == Kind::Checkpoint && error.message().contains(name), "{error}");
            }
        }
    }
    save();
    let error = refused(&dir, "", Sgd::new(0.1), Case::new(""));
    assert!(error.kind() == Kind::Checkpoint && error.message().contains("momentum_buffer"), "{error}");
    let stored = Case { dtype: DType::F64, param_dtype: DType::F64, ..Case::new("") };
    let error = refused(&dir, "", adamw(), stored);
    assert!(error.message().contains("moments"), "{error}");
    // The optimizer file of a model of another size.
    let other = Folder::new("damaged-other");
    run("", |rank| {
        let shape = ModelConfig::Gpt2(Gpt2Config { vocab_size: 13, ..config() });
        let model = Model::new(rank, LanguageModel::new(&shape), &LanguageModel::plan(&shape), 0)?;
        let mut optim = adamw();
        let tape = model.tape();
        model.params()[0].on_tape(&tape).square().mean().backward()?;
        optim.step(&model, tape.gradients(), StepArgs::new(0.1))?;
        checkpoint::save(&other.0, &model, &optim, &RunState::default(), &[])
    });
    fs::copy(other.0.join(OPTIMIZER_FILE), dir.join(OPTIMIZER_FILE)).unwrap();
    let error = refused(&dir, "", adamw(), Case::new(""));
    assert!(
        error.message().contains("`exp_avg.transformer.wte.weight` is [13, 15], the model has [11, 15]"),
        "{error}"
    );
}

/// Writes checkpoints of two steps, and checks that the second is refused with a file of the first. Returns the file of the second.
fn check_file_of_other_step(folder: &Folder, file: &str) -> Vec<u8> {
    let place = |step| Checkpoints::path_of(&folder.0, step);
    for (from, steps, to) in [(None, 1, 1), (Some(place(1)), 1, 2)] {
        ends(Case::new(""), &adamw(), (from.as_deref(), steps, Some(&place(to))));
    }
    let own = fs::read(place(2).join(file)).unwrap();
    fs::copy(place(1).join(file), place(2).join(file)).unwrap();
    for mesh in ["", "dp=2"] {
        let error = refused(&place(2), mesh, adamw(), Case::new(mesh));
        assert_eq!(error.kind(), Kind::Checkpoint, "{error}");
        let expected = format!("{file} is of step 1, but trainer_state.json in the same folder is of step 2");
        assert!(error.message().ends_with(&expected), "{error}");
    }
    own
}

#[test]
fn optimizer_file_of_another_save_is_refused() {
    let folder = Folder::new("mixed-up");
    let place = |step| Checkpoints::path_of(&folder.0, step);
    let own = check_file_of_other_step(&folder, OPTIMIZER_FILE);
    // The same step of another run, and a file that another program wrote.
    let other = folder.0.join("other");
    ends(Case::new(""), &adamw().betas(0.5, 0.9), (None, 2, Some(&other)));
    let digest =
        TensorFile::open(&other.join(OPTIMIZER_FILE)).unwrap().metadata()["shardgrad_digest"].clone();
    let at = |bytes: &[u8]| bytes.windows(16).position(|part| part == digest.as_bytes()).unwrap();
    let mut silent = fs::read(other.join(OPTIMIZER_FILE)).unwrap();
    let start = at(&silent);
    silent[start..start + 16].fill(b'0');
    for bytes in [fs::read(other.join(OPTIMIZER_FILE)).unwrap(), silent] {
        fs::write(place(2).join(OPTIMIZER_FILE), bytes).unwrap();
        let error = refused(&place(2), "", adamw(), Case::new(""));
        assert!(
            error.message().contains(
                "is of another save than trainer_state.json in the same folder, which is of step 2"
            ),
            "{error}"
        );
    }
    // A file from before digests is accepted.
    fs::write(place(2).join(OPTIMIZER_FILE), own).unwrap();
    let state = place(2).join(STATE_FILE);
    let text = fs::read_to_string(&state).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| !line.contains("\"digest\"")).collect();
    assert_eq!(lines.len() + 1, text.lines().count());
    fs::write(&state, lines.join("\n").replace("\"num_steps\": 2,", "\"num_steps\": 2")).unwrap();
    assert_eq!(ends(Case::new(""), &adamw(), (Some(&place(2)), 0, None))[0].1.step, 2);
}

#[test]
fn weights_of_another_save_are_refused() {
    let folder = Folder::new("mixed-weights");
    let place = |step| Checkpoints::path_of(&folder.0, step);
    let own = check_file_of_other_step(&folder, WEIGHTS_FILE);
    // The same step of another run, and a model saved without a checkpoint.
    let (other, model) = (folder.0.join("other"), folder.0.join("model"));
    ends(Case::new(""), &adamw().betas(0.5, 0.9), (None, 2, Some(&other)));
    run("", |rank| {
        let shape = shape();
        Model::new(rank, LanguageModel::new(&shape), &LanguageModel::plan(&shape), 0)?.save(&model)
    });
    for dir in [other, model] {
        fs::copy(dir.join(WEIGHTS_FILE), place(2).join(WEIGHTS_FILE)).unwrap();
        let error = refused(&place(2), "", adamw(), Case::new(""));
        assert!(
            error.message().contains(
                "model.safetensors is of another save than trainer_state.json in the same folder, which is of step 2"
            ),
            "{error}"
        );
    }
    // Also weights of a custom model.
    let plain = |step| folder.0.join(format!("plain-{step}"));
    for step in [1, 2] {
        let state = RunState { step, ..RunState::default() };
        let save = |model: &Model<Linear>, optim: &mut dyn Optimizer| {
            checkpoint::save_weights(&plain(step), model, optim, &state)
        };
        linear("", adamw_plain(), save).unwrap();
    }
    fs::copy(plain(1).join(WEIGHTS_FILE), plain(2).join(WEIGHTS_FILE)).unwrap();
    let load = |model: &Model<Linear>, optim: &mut dyn Optimizer| {
        let before = model.param("weight")?.tensor().local_bytes()?;
        let error = checkpoint::load_weights(&plain(2), model, optim).unwrap_err();
        assert!(model.param("weight")?.tensor().local_bytes()? == before && optim.num_steps() == 1);
        Ok(error)
    };
    let error = linear("", adamw_plain(), load).unwrap().swap_remove(0);
    assert!(error.message().contains("model.safetensors is of step 1"), "{error}");
    // A state from before digests of weights is accepted.
    fs::write(place(2).join(WEIGHTS_FILE), own).unwrap();
    let state = place(2).join(STATE_FILE);
    let text = fs::read_to_string(&state).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| !line.contains("\"weights_digest\"")).collect();
    assert_eq!(lines.len() + 1, text.lines().count());
    fs::write(&state, lines.join("\n")).unwrap();
    assert_eq!(ends(Case::new(""), &adamw(), (Some(&place(2)), 0, None))[0].1.step, 2);
}

/// A model of one layer, and an optimizer that has updated its weight only.
fn linear<T>(
    mesh: &str,
    optim: impl Optimizer + Clone + Sync,
    f: impl Fn(&Model<Linear>, &mut dyn Optimizer) -> Result<T> + Sync,
) -> Result<Vec<T>>
where
    T: Send,
{
    World::run(Mesh::parse(mesh).unwrap(), |rank| {
        let plan = Plan::new().store("weight", "tp@0");
        let model = Model::new(rank, Linear::new(3, 5), &plan, 1)?;
        let mut optim = optim.clone();
        model.param("bias")?.set_frozen(true);
        let tape = model.tape();
        let x = tape.constant(Tensor::full(
            rank,
            &shardgrad_tensor::Layout::invariant(rank.mesh(), DType::F32, &[2, 3]),
            0.5,
        )?);
        model.forward(&x).square().mean().backward()?;
        optim.step(&model, tape.gradients(), StepArgs::new(0.1))?;
        f(&model, &mut optim)
    })
}

#[test]
fn custom_loop_saves_optimizer_state_except_of_frozen_parameters() {
    let folder = Folder::new("own-loop");
    let notes = [("place".to_string(), "page 7".to_string())].into();
    let state = RunState { step: 9, notes, ..RunState::default() };
    linear("tp=2", adamw_plain(), |model, optim| checkpoint::save_weights(&folder.0, model, optim, &state))
        .unwrap();
    let file = TensorFile::open(&folder.0.join(OPTIMIZER_FILE)).unwrap();
    let names: Vec<&str> = file.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["step.weight", "exp_avg.weight", "exp_avg_sq.weight"]);
    assert_eq!(file.read("step.weight").unwrap(), 1i64.to_le_bytes());
    let found = linear("tp=2", adamw_plain(), |model, optim| {
        let (weight, bias) = (model.param("weight")?, model.param("bias")?);
        let own =
            |optim: &dyn Optimizer| [weight.tensor(), optim.param_state(weight).unwrap().tensors[1].clone()];
        let before = own(optim).map(|t| t.local_bytes().unwrap());
        let again = weight.tensor().scale(0.0).contiguous()?;
        weight.set_tensor(again)?;
        optim.load_state(0, Vec::new())?;
        let found = checkpoint::load_weights(&folder.0, model, optim)?;
        assert_eq!(own(optim).map(|t| t.local_bytes().unwrap()), before);
        assert!(optim.param_state(bias).is_none() && optim.num_steps() == 1);
        Ok(found)
    });
    assert!(found.unwrap().iter().all(|found| *found == state));
}

#[test]
fn save_killed_while_replacing_a_checkpoint_is_recovered_by_all_ranks() {
    let folder = Folder::new("between-names");
    let place = folder.0.join("last");
    let state = |step| RunState { step, ..RunState::default() };
    for attempt in 0..20 {
        for (step, mark) in [(1, ".old"), (2, "")] {
            let save = |model: &Model<Linear>, optim: &mut dyn Optimizer| {
                checkpoint::save_weights(&place, model, optim, &state(step))
            };
            linear("", adamw_plain(), save).unwrap();
            // No process has this id.
            fs::rename(&place, folder.0.join(format!("last{mark}.tmp-4294967294"))).unwrap();
        }
        let load =
            |model: &Model<Linear>, optim: &mut dyn Optimizer| checkpoint::load_weights(&place, model, optim);
        let found = linear("tp=4", adamw_plain(), load).unwrap();
        assert_eq!(found, vec![state(2); 4], "attempt {attempt}");
        let names: Vec<_> = fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["last"]);
        fs::remove_dir_all(&place).unwrap();
    }
}

fn adamw_plain() -> AdamW {
    AdamW::new(0.1)
}

#[test]
fn optimizer_without_state_names_is_refused() {
    let folder = Folder::new("silent");
    let dir = folder.0.join("checkpoint-1");
    let save = |model: &Model<Linear>, optim: &mut dyn Optimizer| {
        checkpoint::save_weights(&dir, model, optim, &RunState::default())
    };
    let optim = Forwarding { rule: Sgd::new(0.1), left_out: 0, forwards_hyperparameters: true };
    let error = linear("tp=2", optim, save).unwrap_err();
    assert!(
        error.kind() == Kind::Unsupported && error.message().contains("does not implement `state_names`"),
        "{error}"
    );
    assert!(!folder.0.exists());
}

#[test]
fn failed_save_keeps_old_checkpoint_and_all_ranks_get_the_error() {
    let folder = Folder::new("failed-save");
    let place = Checkpoints::path_of(&folder.0, 1);
    for mesh in ["", "dp=2", "pp=2"] {
        let case = Case::new(mesh);
        let _ = fs::remove_dir_all(&folder.0);
        let before = ends(case, &adamw(), (None, 1, Some(&place))).swap_remove(0);
        let other = Checkpoints::path_of(&folder.0, 2);
        fs::write(&other, "mine").unwrap();
        let errors =
            run(
                mesh,
                |rank| Ok(rank_end(rank, case, &adamw(), (Some(&place), 1, Some(&other))).unwrap_err()),
            );
        for error in errors {
            assert!(
                error.kind() == Kind::Io && error.message().contains("it is not a folder"),
                "{mesh}: {error}"
            );
        }
        assert_eq!(fs::read_to_string(&other).unwrap(), "mine");
        // A failure in the middle of a save: a sidecar file that cannot be read.
        fs::remove_file(&other).unwrap();
        let unreadable = fs::File::create(folder.0.join("unreadable")).unwrap();
        let errors = run(mesh, |rank| {
            let (shape, optim, state) = (shape(), adamw(), RunState::default());
            let plan = LanguageModel::plan(&shape);
            let model = Model::new(rank, LanguageModel::new(&shape), &plan, 0)?;
            let companions = [SidecarFile { name: "vocab.json", file: Some(&unreadable) }];
            Ok(checkpoint::save(&other, &model, &optim, &state, &companions).unwrap_err())
        });
        assert!(
            errors.iter().all(|e| e.kind() == Kind::Io && e.message().contains("cannot copy")),
            "{errors:?}"
        );
        let found = Checkpoints::find(&folder.0).unwrap();
        assert_eq!((found.complete, found.incomplete), (vec![(1, place.clone())], vec![]));
        let again = ends(case, &adamw(), (Some(&place), 0, None)).swap_remove(0);
        assert!(again.1 == before.1 && again.2 == before.2, "{mesh}");
    }
}
