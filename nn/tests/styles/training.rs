//! Training of a task in a style: gradients, and losses over many steps, also from a checkpoint.

use crate::combination::{Style, Task};
use shardgrad_autograd::Var;
use shardgrad_nn::{
    AdamW, LanguageModel, LrScheduler, Optimizer, Plan, Sgd, Trainer, TrainerConfig, checkpoint,
};
use shardgrad_tensor::{DType, Mesh, Rank, Result, Tensor, World};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The largest gradient norm: smaller than the norms of the first steps.
const CLIP: f64 = 0.5;

/// A temporary folder, removed when dropped.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let dir = std::env::temp_dir().join(format!("shardgrad-styles-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        Folder(dir)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Loss and gradient norm of a step.
pub(crate) type Step = [f64; 2];

/// A task in a style.
pub(crate) struct Training<'t> {
    pub(crate) task: &'t Task,
    pub(crate) style: &'t Style,
    pub(crate) dtype: DType,
}

impl Training<'_> {
    /// Runs on every rank. An error is that of the rank that failed first.
    fn run<T: Send>(&self, f: impl Fn(&Rank) -> Result<T> + Sync) -> std::result::Result<Vec<T>, String> {
        let world = World::new(Mesh::parse(&self.style.mesh).unwrap()).threads(1);
        world.launch(f).map_err(|error| error.to_string())
    }

    /// Ids and targets of some rows of a step; the targets are the tokens one position later.
    fn batch(&self, rank: &Rank, plan: &Plan, step: u64, rows: Range<usize>) -> Result<Vec<Tensor>> {
        let Task { tokens, vocabulary, .. } = *self.task;
        let layout = plan.batch_layout(rank.mesh(), DType::I64, &[rows.len(), tokens])?;
        let step = step as usize % 4;
        let token =
            |row: usize, t: usize| ((row * 7 + t * 5 + row * t * 3 + t * t + step) % vocabulary) as i64;
        let column = |shift: usize| {
            let all: Vec<i64> =
                rows.clone().flat_map(|row| (0..tokens).map(move |t| token(row, t + shift))).collect();
            Tensor::from_global(rank, &layout, &all)
        };
        Ok(vec![column(0)?, column(1)?])
    }

    /// A trainer on a rank.
    pub(crate) fn trainer<'a>(
        &'a self,
        rank: &Rank,
        optim: impl Optimizer + 'a,
        clip: Option<f64>,
    ) -> Result<Trainer<'a, LanguageModel>> {
        let plan = &self.style.plan;
        let read = move |rank: &Rank, step: u64, rows: Range<usize>| self.batch(rank, plan, step, rows);
        let config = TrainerConfig {
            microbatches: self.task.microbatches,
            seed: 5,
            dtype: self.dtype,
            lr_scheduler: Some(LrScheduler::constant(3e-3)),
            clip,
            copies_checked_every: 10,
            ..TrainerConfig::new(self.task.rows)
        };
        let module = LanguageModel::new(&self.task.model).recompute(self.style.recompute);
        let loss = |model: &LanguageModel, x: &[Var]| model.loss_from_batch(x);
        Trainer::new(rank, module, plan, optim, config, read, loss)
    }

    /// The gradients of the first step by name, which all ranks that have them hold alike.
    pub(crate) fn gradients(&self) -> std::result::Result<BTreeMap<String, Vec<f64>>, String> {
        let ranks = self.run(|rank| {
            // The momentum of the first step is the gradient.
            let mut trainer = self.trainer(rank, Sgd::new(0.1).momentum(0.9), None)?;
            trainer.step()?;
            let own = trainer.model().params().iter().filter(|param| param.is_local());
            let gradient = |param| {
                let state = trainer.optim().param_state(param).expect("every parameter has a gradient");
                Ok((param.name(), state.tensors[0].to_f64()?))
            };
            own.map(gradient).collect::<Result<Vec<_>>>()
        })?;
        let mut gradients = BTreeMap::new();
        for (name, gradient) in ranks.into_iter().flatten() {
            let known = gradients.entry(name).or_insert_with_key(|_| gradient.clone());
            if *known != gradient {
                return Err("ranks disagree on a gradient".to_string());
            }
        }
        Ok(gradients)
    }

    /// Loss and gradient norm of some steps with clipping, from a checkpoint if given. Saves a checkpoint after the number of steps
    /// that comes with its folder.
    pub(crate) fn steps(
        &self,
        from: Option<&Path>,
        num_steps: usize,
        saved: Option<(usize, &Path)>,
    ) -> std::result::Result<Vec<Step>, String> {
        let mut ranks = self.run(|rank| {
            let mut trainer = self.trainer(rank, AdamW::new(0.0).weight_decay(0.1), Some(CLIP))?;
            if let Some(dir) = from {
                trainer.resume(dir)?;
            }
            let mut steps = Vec::new();
            for at in 1..=num_steps {
                let report = trainer.step()?;
                steps.push([report.loss, report.grad_norm]);
                if let Some((_, dir)) = saved.filter(|(after, _)| *after == at) {
                    checkpoint::save(dir, trainer.model(), trainer.optim(), &trainer.state(), &[])?;
                }
            }
            Ok(steps)
        })?;
        let first = ranks.swap_remove(0);
        match ranks.iter().all(|other| *other == first) {
            true => Ok(first),
            false => Err("ranks disagree on losses or norms".to_string()),
        }
    }
}

/// Whether gradients are clipped in a step.
pub(crate) fn is_clipped(step: &Step) -> bool {
    step[1] > CLIP
}
