//! `generate`: continues a prompt token by token, on any mesh.

mod sampling;
mod text_streamer;

use sampling::sample_token;
use text_streamer::TextStreamer;

use super::args::{GenerateArgs, SamplingArgs, check_experts, config_of};
use super::consistency;
use super::memory::check_model;
use super::ranks::{Startup, has_launcher, is_rank_zero};
use crate::background::BackgroundWorker;
use crate::interrupt::end_at_signals;
use crate::tokenizer::Tokenizer;
use serde_json::json;
use shardgrad::kernels::op::random::uniform_at;
use shardgrad::nn::{DecodingSession, InferenceModel, LanguageModel, ModelConfig};
use shardgrad::prelude::*;

/// Runs the command.
pub(crate) fn run(args: &GenerateArgs, startup: &Startup) -> Result<()> {
    end_at_signals("generate", has_launcher())?;
    let config = config_of(&args.model)?;
    refuse_encoders(&config)?;
    let ranks = args.run.inference_world(&args.parallelism)?.started_by(startup);
    check_experts(&args.run.mesh, &config)?;
    args.parallelism.check(&args.run.mesh)?;
    let plan = args.parallelism.inference_plan(LanguageModel::plan(&config));
    check_model(&args.run, &args.model, &config, &plan)?;
    let tokenizer = Tokenizer::for_model(Some(&args.model), &config)?;
    let mut ends = config.eos_token_ids_in(&args.model)?;
    // With byte tokens, no token id marks the end of a text.
    ends.retain(|_| !args.ignore_end && !tokenizer.is_bytes());
    let prompt = Prompt::new(&args.prompt, &tokenizer, ends)?;
    let (known, all) = (tokenizer.vocab(), config.vocab_size());
    if known < all && is_rank_zero() {
        eprintln!(
            "the model has {all} token ids but the tokenizer only {known}; the others are never sampled"
        );
    }
    let ranks = consistency::with_input_hashes(&ranks, &config, Some(&args.model), None)?;
    // Printing runs in the background: a paused reader must not block the ranks.
    let printer = BackgroundWorker::start();
    let show = |text: String| {
        if !args.json && !text.is_empty() {
            printer.submit(move || {
                print!("{text}");
                Ok(())
            });
        }
    };
    let mut results = ranks.launch(|rank| {
        let model = super::inference_model(rank, &config, &plan, args.run.dtype)?;
        super::load(model.model(), &args.model, args.run.cast())?;
        if rank.world().index() != 0 {
            return generate_tokens(&model, &prompt, args.tokens, &args.sampling, |_| Ok(())).map(|()| None);
        }
        show(args.prompt.clone());
        let (mut text, mut tokens) = (TextStreamer::after_prompt(&prompt.tokens, &tokenizer)?, Vec::new());
        generate_tokens(&model, &prompt, args.tokens, &args.sampling, |token| {
            tokens.push(token);
            text.push(token).map(&show)
        })?;
        let (rest, all) = text.end();
        show(rest);
        Ok(Some((all, tokens)))
    })?;
    printer.wait()?;
    if !is_rank_zero() {
        return Ok(());
    }
    if args.json {
        let (text, tokens) = results.swap_remove(0).unwrap_or_default();
        let text = args.prompt.clone() + &text;
        println!("{}", json!({"prompt": args.prompt, "text": text, "tokens": tokens}));
    } else {
        println!();
    }
    Ok(())
}

/// The prompt as tokens.
struct Prompt<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// End-of-text tokens, which stop generation.
    ends: Vec<usize>,
}

impl<'a> Prompt<'a> {
    fn new(text: &str, tokenizer: &'a Tokenizer, ends: Vec<usize>) -> Result<Prompt<'a>> {
        let tokens = tokenizer.encode_prompt(text)?;
        if tokens.is_empty() {
            return Err(
                Error::new(Kind::Data, "the prompt has no tokens").detail("help", "use a longer --prompt")
            );
        }
        Ok(Prompt { tokenizer, tokens, ends })
    }
}

/// Generates up to `count` tokens after the prompt, or until an end-of-text token, and calls `on_token` with each. Every rank samples the same
/// tokens, from the same logits and random numbers.
fn generate_tokens(
    model: &InferenceModel<LanguageModel>,
    prompt: &Prompt<'_>,
    count: usize,
    sampling: &SamplingArgs,
    mut on_token: impl FnMut(u32) -> Result<()>,
) -> Result<()> {
    let mut session = DecodingSession::in_stages(model);
    let mut unread: Vec<i64> = prompt.tokens.iter().copied().map(i64::from).collect();
    for n in 0..count {
        let logits = session.feed(&unread)?;
        // Token ids beyond the tokenizer have no text.
        let logits = &logits[..prompt.tokenizer.vocab()];
        check_finite(logits, n)?;
        let next = sample_token(logits, sampling, uniform_at(sampling.seed, 0, n as u64));
        if prompt.ends.contains(&next) {
            break;
        }
        on_token(next as u32)?;
        unread = vec![next as i64];
    }
    Ok(())
}

/// Rejects encoders, which do not predict the next token.
fn refuse_encoders(config: &ModelConfig) -> Result<()> {
    if config.is_causal() {
        return Ok(());
    }
    let why = "generate: an encoder model cannot generate text";
    Err(Error::new(Kind::Unsupported, why)
        .detail("help", "use a causal language model; `eval` evaluates encoders"))
}

/// Rejects logits without a finite maximum, or with NaN.
fn check_finite(logits: &[f64], token: usize) -> Result<()> {
    let best = logits.iter().copied().fold(f64::NEG_INFINITY, |best, x| if x > best { x } else { best });
    if best.is_finite() && !logits.iter().any(|x| x.is_nan()) {
        return Ok(());
    }
    let why = format!("generate: the logits of new token {} are not finite", token + 1);
    Err(Error::new(Kind::NotFinite, why)
        .detail("help", "the weights are not finite, or overflow in --dtype; try --dtype f32"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(top_k: Option<usize>, top_p: Option<f64>, greedy: bool) -> SamplingArgs {
        SamplingArgs { temperature: 1.0, top_k, top_p, greedy, seed: 0 }
    }

    #[test]
    fn non_finite_logits_are_refused() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert!(check_finite(&[0.0, -inf, 2.0], 0).is_ok(), "a token with probability 0");
        for bad in [[0.0, nan], [0.0, -nan], [0.0, inf], [-inf, -inf]] {
            assert_eq!(check_finite(&bad, 0).unwrap_err().kind(), Kind::NotFinite, "{bad:?}");
        }
    }

    #[test]
    fn sampling_is_independent_of_the_mesh() {
        // The text grows beyond the 64 positions of these models.
        let prompt = "abc".repeat(20);
        for preset in ["nano", "llama-nano", "mixtral-nano"] {
            let config = ModelConfig::preset(preset).unwrap();
            let results = |mesh: &str, sampling: &SamplingArgs, ends: &[usize]| {
                let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                    let plan = LanguageModel::plan(&config);
                    let model = crate::cli::inference_model(rank, &config, &plan, DType::F64)?;
                    let mut results = Vec::new();
                    let prompt = Prompt::new(&prompt, &Tokenizer::Bytes, ends.to_vec())?;
                    generate_tokens(&model, &prompt, 12, sampling, |token| {
                        results.push(token as usize);
                        Ok(())
                    })?;
                    assert!(results.len() == 12 || !ends.is_empty());
                    Ok(results)
                });
                let ranks = ranks.unwrap();
                assert!(ranks.iter().all(|results| *results == ranks[0]), "{mesh}: ranks disagree");
                ranks[0].clone()
            };
            let (plain, sharp) = (sampling(None, None, false), sampling(Some(40), Some(0.9), false));
            let (one, other) = (results("", &plain, &[]), results("", &sharp, &[]));
            assert!(one != other && one != results("", &SamplingArgs { seed: 1, ..plain.clone() }, &[]));
            // Any end-of-text token ends the text and is not part of it.
            let ends = [one[6], one[4]];
            let at = one.iter().position(|token| ends.contains(token)).unwrap();
            assert_eq!(results("", &plain, &ends), one[..at]);
            for mesh in ["tp=2", "dp=2,tp=2", "pp=2", "pp=3,tp=2", "dp=2,pp=2", "cp=2", "cp=2,tp=2"] {
                assert!(
                    results(mesh, &plain, &[]) == one && results(mesh, &sharp, &[]) == other,
                    "{preset} on {mesh}"
                );
            }
        }
    }
}
