//! `eval`: the mean loss of a model on a text or on token numbers, on any mesh.

use super::args::{EvalArgs, check_experts, check_tokens, config_of};
use super::consistency;
use super::memory::check_model;
use super::ranks::{Startup, has_launcher, leads};
use crate::data::{Order, Sampler};
use crate::interrupt::end_at_signals;
use crate::outputs::check_target;
use crate::train::{Measured, batch, mean_loss};
use serde_json::json;
use shardgrad::nn::LanguageModel;
use shardgrad::nn::hf::TensorWriter;
use shardgrad::prelude::*;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Runs the command.
pub(crate) fn run(args: &EvalArgs, startup: &Startup) -> Result<()> {
    end_at_signals("eval", has_launcher())?;
    let config = config_of(&args.model)?;
    let seq = args.seq(&config)?;
    let ranks = args.run.world()?.started_by(startup);
    check_experts(&args.run.mesh, &config)?;
    check_model(&args.run, &args.model, &config)?;
    let (windows, what) = match &args.source.tokens {
        Some(path) => {
            let file = super::token_rows(path, &config)?.checked()?;
            if args.seq.is_some() {
                file.require_seq(seq)?;
            }
            (Sampler::of_tokens(Arc::new(file), Order::InFileOrder), "tokens".to_string())
        }
        None => {
            super::refuse_texts(&config)?;
            let how = args.source.how(Some(&args.model), &config, None, &[])?;
            let corpus = Arc::new(super::documents(&args.source.data, &how)?);
            let what = format!("{} split of {corpus}", args.split);
            (Sampler::of_text(corpus, args.split, seq, Order::InFileOrder)?, what)
        }
    };
    check_tokens(args.batch.min(windows.num_windows() as usize), windows.seq())?;
    if let Some(path) = args.logits.as_ref().filter(|_| leads()) {
        check_target(
            "--logits",
            path,
            args.source.inputs().chain(args.source.source(path)).chain([args.model.as_path()]),
        )?;
    }
    let ranks = consistency::of_inputs(&ranks, &config, Some(&args.model), Some(&windows))?;
    let plan = LanguageModel::plan(&config);
    let losses = ranks.launch(|rank| {
        let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 0, args.run.dtype)?;
        super::load(&model, &args.model, args.run.cast())?;
        if let Some(path) = &args.logits {
            super::together(rank, || write_logits(&model, &plan, &windows, args.batch, path))?;
        }
        let part = |x: &[Tensor]| {
            let tape = model.inference();
            let x: Vec<Var> = x.iter().map(|x| tape.constant(x.clone())).collect();
            model.loss_of(&x).tensor().local_part_once()
        };
        match mean_loss(rank, &plan, &windows, args.batch, || false, part)? {
            Measured::Loss(loss) => Ok(loss),
            // A rank that could not read says so; the others have nothing to say.
            Measured::Abandoned(why) => why.map_or(Ok(f64::NAN), Err),
        }
    })?;
    if !losses[0].is_finite() {
        let why = format!("eval: the mean loss of {} is {}", args.model.display(), losses[0]);
        let help = "its weights are not finite, or too large for --dtype";
        return Err(Error::new(Kind::NotFinite, why).detail("help", help));
    }
    let num_windows = windows.num_windows();
    let tokens = windows.asked(0..num_windows)?.unwrap_or(num_windows * windows.seq() as u64);
    let loss = losses[0];
    if !leads() {
        return Ok(());
    }
    if args.json {
        println!("{}", json!({"loss": loss, "perplexity": loss.exp(), "tokens": tokens}));
    } else {
        println!("loss {loss:.6} nats a token, perplexity {:.3}, over {tokens} tokens ({what})", loss.exp());
    }
    Ok(())
}

/// Writes the logits of the first rows as `logits`, f32 `[B, T, V]`. Every rank calls this together.
fn write_logits(
    model: &Model<LanguageModel>,
    plan: &Plan,
    windows: &Sampler,
    rows: usize,
    path: &Path,
) -> Result<()> {
    let rows = rows.min(windows.num_windows() as usize);
    let read = |own: Range<usize>| windows.batch(own.start as u64..own.end as u64);
    let tape = model.inference();
    let read = batch(model.rank(), plan, [rows, windows.seq()], None, read)?;
    let x: Vec<Var> = read.into_iter().map(|x| tape.constant(x)).collect();
    let logits = model.forward_of(&x).cast(DType::F32);
    let bytes = logits.tensor().to_bytes()?;
    if model.rank().index() == 0 {
        let mut writer =
            TensorWriter::create(path, &[("logits".to_string(), DType::F32, logits.shape().to_vec())])?;
        writer.append("logits", &bytes)?;
        writer.finish()?;
    }
    Ok(())
}
