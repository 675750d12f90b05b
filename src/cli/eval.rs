//! `eval`: mean loss and perplexity of a model on text or token ids.

use super::args::{EvalArgs, check_experts, check_tokens, config_of};
use super::consistency;
use super::memory::check_model;
use super::ranks::{Startup, has_launcher, is_rank_zero};
use crate::data::{RowOrder, Sampler, TokenOrder};
use crate::interrupt::end_at_signals;
use crate::outputs::check_target;
use crate::train::{Evaluation, batch, mean_loss_by_groups};
use serde_json::json;
use shardgrad::nn::checkpoint::TensorWriter;
use shardgrad::nn::{InferenceModel, LanguageModel, PartialLoss, ResultRanks};
use shardgrad::prelude::*;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Batches per pipeline stage that run as the microbatches of one pass: with p stages, a stage waits for (p - 1) / (5 p - 1) of the time.
const BATCHES_PER_STAGE: usize = 4;

/// Runs the command.
pub(crate) fn run(args: &EvalArgs, startup: &Startup) -> Result<()> {
    end_at_signals("eval", has_launcher())?;
    let config = config_of(&args.model)?;
    let seq = args.seq(&config)?;
    let ranks = args.run.inference_world(&args.parallelism)?.started_by(startup);
    check_experts(&args.run.mesh, &config)?;
    args.parallelism.check(&args.run.mesh)?;
    let plan = args.parallelism.inference_plan(LanguageModel::plan(&config));
    check_model(&args.run, &args.model, &config, &plan)?;
    let (windows, what) = match &args.source.tokens {
        Some(path) => {
            let file = super::token_rows(path, &config)?.checked()?;
            if args.seq.is_some() {
                file.check_seq(seq)?;
            }
            (Sampler::of_tokens(Arc::new(file), RowOrder::Sequential), "tokens".to_string())
        }
        None => {
            super::refuse_text_for_encoder(&config)?;
            let options = args.source.read_options(Some(&args.model), &config, None, &[])?;
            let corpus = Arc::new(super::open_corpus(&args.source.data, &options)?);
            let what = format!("{} split of {corpus}", args.split);
            (Sampler::of_text(corpus, args.split, seq, RowOrder::Sequential)?, what)
        }
    };
    // Nothing is dropped in inference.
    let order = TokenOrder::without_dropout(&config, &plan, &args.run.mesh).on_host(args.run.is_on_host());
    let windows = windows.with_token_order(order);
    check_tokens(args.batch.min(windows.num_windows() as usize), windows.seq())?;
    if let Some(path) = args.logits.as_ref().filter(|_| is_rank_zero()) {
        check_target(
            "--logits",
            path,
            args.source.inputs().chain(args.source.source(path)).chain([args.model.as_path()]),
        )?;
    }
    let ranks = consistency::with_input_hashes(&ranks, &config, Some(&args.model), Some(&windows))?;
    let losses = ranks.launch(|rank| {
        let model = super::inference_model(rank, &config, &plan, args.run.dtype)?;
        super::load(model.model(), &args.model, args.run.cast())?;
        if let Some(path) = &args.logits {
            super::collective_io(rank, || write_logits(&model, &plan, &windows, args.batch, path))?;
        }
        let parts = |batches: &[Vec<Tensor>]| {
            let loss = |model: &LanguageModel, x: &[Var]| Ok(model.loss_from_batch(x).into_scalars());
            let losses = model.forward(batches, ResultRanks::Producer, loss)?;
            losses.iter().map(|scalars| PartialLoss::from_scalars(scalars)).collect()
        };
        let num_stages = model.num_stages();
        let group_max = if num_stages > 1 { BATCHES_PER_STAGE * num_stages } else { 1 };
        match mean_loss_by_groups(model.rank(), &plan, &windows, [args.batch, group_max], || false, parts)? {
            Evaluation::Loss(loss) => Ok(loss),
            // The rank that failed to read returns its error; the others stop without one.
            Evaluation::Abandoned(why) => why.map_or(Ok(f64::NAN), Err),
        }
    })?;
    if !losses[0].is_finite() {
        let why = format!("eval: the mean loss of {} is {}", args.model.display(), losses[0]);
        let help = "the weights are not finite, or overflow in --dtype; try --dtype f32";
        return Err(Error::new(Kind::NotFinite, why).detail("help", help));
    }
    let num_windows = windows.num_windows();
    let tokens = windows.num_targets(0..num_windows)?.unwrap_or(num_windows * windows.seq() as u64);
    let loss = losses[0];
    if !is_rank_zero() {
        return Ok(());
    }
    if args.json {
        println!("{}", json!({"loss": loss, "perplexity": loss.exp(), "tokens": tokens}));
    } else {
        println!(
            "loss {loss:.6} nats per token, perplexity {:.3}, over {tokens} tokens ({what})",
            loss.exp()
        );
    }
    Ok(())
}

/// Writes the logits of the first rows as `logits`, f32 `[B, T, V]`, tokens in the order of the row. Collective.
fn write_logits(
    model: &InferenceModel<LanguageModel>,
    plan: &Plan,
    windows: &Sampler,
    rows: usize,
    path: &Path,
) -> Result<()> {
    let rows = rows.min(windows.num_windows() as usize);
    let windows = windows.clone().with_token_order(TokenOrder::Sequential);
    let read = |own: Range<usize>| windows.batch(own.start as u64..own.end as u64);
    let x = batch(model.rank(), plan, [rows, windows.seq()], read)?;
    let forward = |model: &LanguageModel, x: &[Var]| Ok(vec![model.forward_from_batch(x).cast(DType::F32)]);
    let results = model.forward(&[x], ResultRanks::FirstStage, forward)?;
    let Some(logits) = results.into_iter().flatten().next().flatten() else { return Ok(()) };
    let bytes = logits.to_bytes()?;
    if model.rank().world().index() == 0 {
        let mut writer =
            TensorWriter::create(path, &[("logits".to_string(), DType::F32, logits.shape().to_vec())])?;
        writer.append("logits", &bytes)?;
        writer.finish()?;
    }
    Ok(())
}
