//! Checkpoints: a run that goes on from one has the bits of a run that never stopped, on every mesh; what is not whole, or of
//! something else, is refused.

use crate::folders::Folder;
use crate::support::{ROWS, batch, config, run};
use shardgrad_autograd::Var;
use shardgrad_nn::hf::{CONFIG_FILE, Companion, TensorFile, WEIGHTS_FILE};
use shardgrad_nn::optim::{GatedStep, Group, LossScale};
use shardgrad_nn::resume::{self, Checkpoints, OPTIMIZER_FILE, RunState, STATE_FILE};
use shardgrad_nn::{
    AdamW, Gpt2Config, LanguageModel, Linear, Model, ModelConfig, Optimizer, Param, Plan, Settings, Sgd,
    StepArgs, Trainer,
};
use shardgrad_tensor::{DType, Error, Kind, Mesh, Rank, Result, Tensor, Value, World};
use std::fs;
use std::ops::Range;
use std::path::Path;

/// What is run.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    mesh: &'static str,
    dtype: DType,
    param_dtype: DType,
    microbatches: usize,
}

impl Case {
    pub(crate) fn new(mesh: &'static str) -> Case {
        Case { mesh, dtype: DType::F32, param_dtype: DType::F32, microbatches: 2 }
    }
}

/// What a rank has at the end: losses, what is written down of each, where the run stands, and the bytes of its parameters and
/// of what is kept of them.
pub(crate) type End = (Vec<f64>, RunState, Vec<Vec<u8>>);

fn shape() -> ModelConfig {
    ModelConfig::Gpt2(config()).with_dropout(0.2)
}

/// So many steps of a rank, from a checkpoint or from the beginning; leaves a checkpoint.
fn rank_end<O: Optimizer + Clone>(
    rank: &Rank,
    case: Case,
    optim: &O,
    (from, steps, to): (Option<&Path>, usize, Option<&Path>),
) -> Result<End> {
    let shape = shape();
    let plan = LanguageModel::plan(&shape);
    let read = |rank: &Rank, step: u64, rows: Range<usize>| {
        let first = step as usize;
        Ok(vec![batch(rank, &plan, rows.clone(), first)?, batch(rank, &plan, rows, first + 1)?])
    };
    let settings = Settings {
        microbatches: case.microbatches,
        seed: 3,
        dtype: case.dtype,
        param_dtype: Some(case.param_dtype),
        clip: Some(1.0),
        ..Settings::new(ROWS)
    };
    let loss = |model: &LanguageModel, x: &[Var]| model.loss_of(x);
    let module = LanguageModel::new(&shape);
    let mut trainer = Trainer::new(rank, module, &plan, optim.clone(), settings, read, loss)?;
    match from {
        Some(dir) => drop(trainer.resume(dir)?),
        // Twice as large after three steps, one of which follows the checkpoint.
        None if case.dtype == DType::F16 => {
            let loss_scale = Some(LossScale::new(1024.0, 1997));
            trainer.set_state(&RunState { loss_scale, ..trainer.state() });
        }
        None => {}
    }
    let losses = (0..steps).map(|_| Ok(trainer.step(&[])?.loss)).collect::<Result<_>>()?;
    if let Some(dir) = to {
        resume::save(dir, trainer.model(), trainer.optim(), &trainer.state(), &[])?;
    }
    let mut bytes = Vec::new();
    for param in trainer.model().params().iter().filter(|p| p.is_here()) {
        let kept = trainer.optim().kept(param).expect("it was stepped");
        bytes.push(kept.num_steps.to_le_bytes().to_vec());
        bytes.extend([&param.tensor()].into_iter().chain(&kept.tensors).map(|t| t.own_bytes().unwrap()));
    }
    Ok((losses, trainer.state(), bytes))
}

pub(crate) fn ends<O: Optimizer + Clone + Sync>(
    case: Case,
    optim: &O,
    how: (Option<&Path>, usize, Option<&Path>),
) -> Vec<End> {
    run(case.mesh, |rank| rank_end(rank, case, optim, how))
}

pub(crate) fn adamw() -> AdamW {
    let group = Group { lr_scale: Some(0.5), weight_decay: None };
    AdamW::new(0.02).weight_decay(0.1).group("*.ln_1.*", group)
}

/// Runs four steps, and two twice; compares losses and all that is left, bit for bit.
fn check<O: Optimizer + Clone + Sync>(name: &str, case: Case, optim: &O) {
    let folder = Folder::new(name);
    let (half, end) = (folder.0.join("checkpoint-2"), folder.0.join("checkpoint-4"));
    let whole = ends(case, optim, (None, 4, Some(&end)));
    let first = ends(case, optim, (None, 2, Some(&half)));
    let files = |dir: &Path| {
        [WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE, CONFIG_FILE].map(|f| fs::read(dir.join(f)).unwrap())
    };
    let unbroken = files(&end);
    let second = ends(case, optim, (Some(&half), 2, Some(&end)));
    assert!(files(&end) == unbroken, "{name}: files");
    for ((whole, first), second) in whole.into_iter().zip(first).zip(second) {
        assert_eq!(whole.0, [first.0, second.0].concat(), "{name}: losses");
        assert_eq!(whole.1, second.1, "{name}: state");
        assert!(whole.2 == second.2, "{name}: parameters, and what is kept of them");
    }
}

#[test]
fn a_run_that_goes_on_has_the_bits_of_one_that_never_stopped() {
    for mesh in ["", "dp=2", "tp=2", "pp=2", "dp=2,tp=2"] {
        check(&format!("bits-{mesh}"), Case::new(mesh), &adamw());
    }
    for mesh in ["tp=3", "pp=2"] {
        check(&format!("bits-sgd-{mesh}"), Case::new(mesh), &Sgd::new(0.05).momentum(0.9).nesterov());
    }
}

#[test]
fn so_it_has_in_narrow_dtypes_with_their_loss_scale() {
    for (name, mesh, dtype, param_dtype) in [
        ("f16", "", DType::F16, DType::F32),
        ("f16-pp", "pp=2", DType::F16, DType::F32),
        ("bf16", "dp=2", DType::BF16, DType::F32),
        ("bf16-stored", "tp=2", DType::BF16, DType::BF16),
        ("f64", "dp=3", DType::F64, DType::F64),
    ] {
        let microbatches = if mesh == "dp=3" { 1 } else { 2 };
        check(name, Case { mesh, dtype, param_dtype, microbatches }, &adamw());
    }
    let folder = Folder::new("scale");
    let case = Case { dtype: DType::F16, ..Case::new("") };
    let end = ends(case, &adamw(), (None, 2, Some(&folder.0))).swap_remove(0);
    assert_eq!(end.1.loss_scale, Some(LossScale::new(1024.0, 1999)));
    let next = ends(case, &adamw(), (Some(&folder.0), 1, None)).swap_remove(0);
    assert_eq!(next.1.loss_scale, Some(LossScale::new(2048.0, 0)));
    // Who scales no losses goes on without.
    let wide = ends(Case::new(""), &adamw(), (Some(&folder.0), 1, None)).swap_remove(0);
    assert_eq!((wide.1.loss_scale, wide.1.step), (None, 3));
}

#[test]
fn other_meshes_go_on_with_the_same_numbers_to_rounding() {
    let folder = Folder::new("meshes");
    let case = |mesh| Case { dtype: DType::F64, param_dtype: DType::F64, ..Case::new(mesh) };
    let expected = ends(case(""), &adamw(), (None, 4, None)).swap_remove(0).0;
    for (from, to) in
        [("dp=2,tp=2", vec!["", "pp=2", "tp=3", "dp=4"]), ("", vec!["tp=2"]), ("pp=2", vec!["dp=2"])]
    {
        let dir = folder.0.join("checkpoint-2");
        let first = ends(case(from), &adamw(), (None, 2, Some(&dir))).swap_remove(0).0;
        for mesh in to {
            let case = Case { microbatches: if mesh == "dp=4" { 1 } else { 2 }, ..case(mesh) };
            let second = ends(case, &adamw(), (Some(&dir), 2, None)).swap_remove(0).0;
            let all = first.iter().chain(&second).zip(&expected);
            assert!(
                all.clone().all(|(a, b)| (a - b).abs() < 1e-12 * b.abs()),
                "{from} then {mesh}: {second:?}"
            );
            assert_eq!(all.count(), 4);
        }
    }
}

/// Why a checkpoint is refused.
pub(crate) fn refused(dir: &Path, mesh: &str, optim: impl Optimizer + Clone + Sync, case: Case) -> Error {
    World::run(Mesh::parse(mesh).unwrap(), |rank| rank_end(rank, case, &optim, (Some(dir), 1, None)))
        .unwrap_err()
}

#[test]
fn what_is_damaged_missing_or_of_another_run_is_refused_by_name() {
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
    // The optimizer's file of a model of another size.
    let other = Folder::new("damaged-other");
    run("", |rank| {
        let shape = ModelConfig::Gpt2(Gpt2Config { vocab_size: 13, ..config() });
        let model = Model::new(rank, LanguageModel::new(&shape), &LanguageModel::plan(&shape), 0)?;
        let mut optim = adamw();
        let tape = model.tape();
        model.params()[0].on_tape(&tape).square().mean().backward()?;
        optim.step(&model, tape.gradients(), StepArgs::new(0.1))?;
        resume::save(&other.0, &model, &optim, &RunState::default(), &[])
    });
    fs::copy(other.0.join(OPTIMIZER_FILE), dir.join(OPTIMIZER_FILE)).unwrap();
    let error = refused(&dir, "", adamw(), Case::new(""));
    assert!(
        error.message().contains("`exp_avg.transformer.wte.weight` is [13, 15], the model has [11, 15]"),
        "{error}"
    );
}

#[test]
fn an_optimizer_file_of_another_save_is_refused_by_the_steps_of_both() {
    let folder = Folder::new("mixed-up");
    let place = |step| Checkpoints::place(&folder.0, step);
    for (from, steps, to) in [(None, 1, 1), (Some(place(1)), 1, 2)] {
        ends(Case::new(""), &adamw(), (from.as_deref(), steps, Some(&place(to))));
    }
    let own = fs::read(place(2).join(OPTIMIZER_FILE)).unwrap();
    fs::copy(place(1).join(OPTIMIZER_FILE), place(2).join(OPTIMIZER_FILE)).unwrap();
    for mesh in ["", "dp=2"] {
        let error = refused(&place(2), mesh, adamw(), Case::new(mesh));
        assert_eq!(error.kind(), Kind::Checkpoint, "{error}");
        let told = "optimizer.safetensors is of step 1, trainer_state.json beside it of step 2";
        assert!(error.message().ends_with(told), "{error}");
    }
    // The same step of a run at another rate, and a file that another program has written.
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
        assert!(error.message().contains("is not of the save of step 2"), "{error}");
    }
    // What was written before files told of their save is taken as it is.
    fs::write(place(2).join(OPTIMIZER_FILE), own).unwrap();
    let state = place(2).join(STATE_FILE);
    let text = fs::read_to_string(&state).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| !line.contains("\"digest\"")).collect();
    assert_eq!(lines.len() + 1, text.lines().count());
    fs::write(&state, lines.join("\n").replace("\"num_steps\": 2,", "\"num_steps\": 2")).unwrap();
    assert_eq!(ends(Case::new(""), &adamw(), (Some(&place(2)), 0, None))[0].1.step, 2);
}

#[test]
fn weights_of_another_save_are_refused_by_the_steps_of_both() {
    let folder = Folder::new("mixed-weights");
    let place = |step| Checkpoints::place(&folder.0, step);
    for (from, steps, to) in [(None, 1, 1), (Some(place(1)), 1, 2)] {
        ends(Case::new(""), &adamw(), (from.as_deref(), steps, Some(&place(to))));
    }
    let own = fs::read(place(2).join(WEIGHTS_FILE)).unwrap();
    fs::copy(place(1).join(WEIGHTS_FILE), place(2).join(WEIGHTS_FILE)).unwrap();
    for mesh in ["", "dp=2"] {
        let error = refused(&place(2), mesh, adamw(), Case::new(mesh));
        assert_eq!(error.kind(), Kind::Checkpoint, "{error}");
        let told = "model.safetensors is of step 1, trainer_state.json beside it of step 2";
        assert!(error.message().ends_with(told), "{error}");
    }
    // The same step of a run at other rates, and a model that was saved by itself.
    let (other, model) = (folder.0.join("other"), folder.0.join("model"));
    ends(Case::new(""), &adamw().betas(0.5, 0.9), (None, 2, Some(&other)));
    run("", |rank| {
        let shape = shape();
        Model::new(rank, LanguageModel::new(&shape), &LanguageModel::plan(&shape), 0)?.save(&model)
    });
    for dir in [other, model] {
        fs::copy(dir.join(WEIGHTS_FILE), place(2).join(WEIGHTS_FILE)).unwrap();
        let error = refused(&place(2), "", adamw(), Case::new(""));
        assert!(error.message().contains("model.safetensors is not of the save of step 2"), "{error}");
    }
    // Weights under the names of a model of any kind, too.
    let plain = |step| folder.0.join(format!("plain-{step}"));
    for step in [1, 2] {
        let state = RunState { step, ..RunState::default() };
        let save = |model: &Model<Linear>, optim: &mut dyn Optimizer| {
            resume::save_weights(&plain(step), model, optim, &state)
        };
        linear("", adamw_plain(), save).unwrap();
    }
    fs::copy(plain(1).join(WEIGHTS_FILE), plain(2).join(WEIGHTS_FILE)).unwrap();
    let load = |model: &Model<Linear>, optim: &mut dyn Optimizer| {
        let before = model.param("weight")?.tensor().own_bytes()?;
        let error = resume::load_weights(&plain(2), model, optim).unwrap_err();
        assert!(model.param("weight")?.tensor().own_bytes()? == before && optim.num_steps() == 1);
        Ok(error)
    };
    let error = linear("", adamw_plain(), load).unwrap().swap_remove(0);
    assert!(error.message().contains("model.safetensors is of step 1"), "{error}");
    // What was written before states told of weights is taken as it is.
    fs::write(place(2).join(WEIGHTS_FILE), own).unwrap();
    let state = place(2).join(STATE_FILE);
    let text = fs::read_to_string(&state).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| !line.contains("\"weights_digest\"")).collect();
    assert_eq!(lines.len() + 1, text.lines().count());
    fs::write(&state, lines.join("\n")).unwrap();
    assert_eq!(ends(Case::new(""), &adamw(), (Some(&place(2)), 0, None))[0].1.step, 2);
}

/// A model of one layer, and an optimizer that has stepped its weight only.
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
fn loops_of_ones_own_save_what_they_keep_and_frozen_parameters_keep_nothing() {
    let folder = Folder::new("own-loop");
    let notes = [("place".to_string(), "page 7".to_string())].into();
    let state = RunState { step: 9, loss_scale: None, notes };
    linear("tp=2", adamw_plain(), |model, optim| resume::save_weights(&folder.0, model, optim, &state))
        .unwrap();
    let file = TensorFile::open(&folder.0.join(OPTIMIZER_FILE)).unwrap();
    let names: Vec<&str> = file.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["step.weight", "exp_avg.weight", "exp_avg_sq.weight"]);
    assert_eq!(file.read("step.weight").unwrap(), 1i64.to_le_bytes());
    let found = linear("tp=2", adamw_plain(), |model, optim| {
        let (weight, bias) = (model.param("weight")?, model.param("bias")?);
        let own = |optim: &dyn Optimizer| [weight.tensor(), optim.kept(weight).unwrap().tensors[1].clone()];
        let before = own(optim).map(|t| t.own_bytes().unwrap());
        let again = weight.tensor().scale(0.0).contiguous()?;
        weight.set_tensor(again)?;
        optim.go_on(0, Vec::new())?;
        let found = resume::load_weights(&folder.0, model, optim)?;
        assert_eq!(own(optim).map(|t| t.own_bytes().unwrap()), before);
        assert!(optim.kept(bias).is_none() && optim.num_steps() == 1);
        Ok(found)
    });
    assert!(found.unwrap().iter().all(|found| *found == state));
}

#[test]
fn a_save_that_was_killed_while_it_replaced_a_checkpoint_is_found_by_all_ranks() {
    let folder = Folder::new("between-names");
    let place = folder.0.join("last");
    let state = |step| RunState { step, ..RunState::default() };
    for round in 0..20 {
        for (step, mark) in [(1, ".old"), (2, "")] {
            let save = |model: &Model<Linear>, optim: &mut dyn Optimizer| {
                resume::save_weights(&place, model, optim, &state(step))
            };
            linear("", adamw_plain(), save).unwrap();
            // No process has this number.
            fs::rename(&place, folder.0.join(format!("last{mark}.tmp-4294967294"))).unwrap();
        }
        let load =
            |model: &Model<Linear>, optim: &mut dyn Optimizer| resume::load_weights(&place, model, optim);
        let found = linear("tp=4", adamw_plain(), load).unwrap();
        assert_eq!(found, vec![state(2); 4], "round {round}");
        let left: Vec<_> = fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["last"]);
        fs::remove_dir_all(&place).unwrap();
    }
}

fn adamw_plain() -> AdamW {
    AdamW::new(0.1)
}

/// A rule that hands steps on, but not what is kept.
#[derive(Clone, Debug)]
struct Silent(Sgd);

impl Optimizer for Silent {
    fn lr(&self) -> f64 {
        self.0.lr()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn num_steps(&self) -> u64 {
        self.0.num_steps()
    }

    fn rates(&mut self, params: &[&Param], lr: f64) -> Result<Vec<f64>> {
        self.0.rates(params, lr)
    }

    fn change(&mut self, params: &[(&Param, Tensor)], step: &GatedStep) -> Result<()> {
        self.0.change(params, step)
    }

    fn count(&mut self, params: &[&Param]) {
        self.0.count(params);
    }
}

#[test]
fn an_optimizer_that_does_not_tell_what_it_keeps_is_not_saved() {
    let folder = Folder::new("silent");
    let dir = folder.0.join("checkpoint-1");
    let save = |model: &Model<Linear>, optim: &mut dyn Optimizer| {
        resume::save_weights(&dir, model, optim, &RunState::default())
    };
    let error = linear("tp=2", Silent(Sgd::new(0.1)), save).unwrap_err();
    assert!(
        error.kind() == Kind::Unsupported && error.message().contains("does not say what it keeps"),
        "{error}"
    );
    assert!(!folder.0.exists());
}

#[test]
fn a_save_that_fails_leaves_the_checkpoints_of_before_and_all_ranks_are_told() {
    let folder = Folder::new("failed-save");
    let place = Checkpoints::place(&folder.0, 1);
    for mesh in ["", "dp=2", "pp=2"] {
        let case = Case::new(mesh);
        let _ = fs::remove_dir_all(&folder.0);
        let before = ends(case, &adamw(), (None, 1, Some(&place))).swap_remove(0);
        let other = Checkpoints::place(&folder.0, 2);
        fs::write(&other, "mine").unwrap();
        let errors =
            run(
                mesh,
                |rank| Ok(rank_end(rank, case, &adamw(), (Some(&place), 1, Some(&other))).unwrap_err()),
            );
        for error in errors {
            assert!(
                error.kind() == Kind::Io && error.message().contains("it is no folder"),
                "{mesh}: {error}"
            );
        }
        assert_eq!(fs::read_to_string(&other).unwrap(), "mine");
        // A disk that refuses in the middle: a file that cannot be read goes with the model.
        fs::remove_file(&other).unwrap();
        let unreadable = fs::File::create(folder.0.join("unreadable")).unwrap();
        let errors = run(mesh, |rank| {
            let (shape, optim, state) = (shape(), adamw(), RunState::default());
            let plan = LanguageModel::plan(&shape);
            let model = Model::new(rank, LanguageModel::new(&shape), &plan, 0)?;
            let companions = [Companion { name: "vocab.json", file: Some(&unreadable) }];
            Ok(resume::save(&other, &model, &optim, &state, &companions).unwrap_err())
        });
        assert!(
            errors.iter().all(|e| e.kind() == Kind::Io && e.message().contains("cannot copy")),
            "{errors:?}"
        );
        let found = Checkpoints::find(&folder.0).unwrap();
        assert_eq!((found.whole, found.unfinished), (vec![(1, place.clone())], vec![]));
        let again = ends(case, &adamw(), (Some(&place), 0, None)).swap_remove(0);
        assert!(again.1 == before.1 && again.2 == before.2, "{mesh}");
    }
}
