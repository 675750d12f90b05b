//! `generate`: continues a prompt, token by token, on any mesh.

mod sample;
mod text;

use sample::choose;
use text::Text;

use super::args::{GenerateArgs, SamplingArgs, check_experts, config_of};
use super::consistency;
use super::memory::check_model;
use super::ranks::{Startup, has_launcher, leads};
use crate::behind::Behind;
use crate::interrupt::end_at_signals;
use crate::tokenizer::Tokenizer;
use serde_json::json;
use shardgrad::kernels::op::random::uniform_at;
use shardgrad::nn::{LanguageModel, ModelConfig, Reading};
use shardgrad::prelude::*;

/// Runs the command.
pub(crate) fn run(args: &GenerateArgs, startup: &Startup) -> Result<()> {
    end_at_signals("generate", has_launcher())?;
    let config = config_of(&args.model)?;
    refuse_encoders(&config)?;
    let ranks = args.run.reading_world()?.started_by(startup);
    check_experts(&args.run.mesh, &config)?;
    check_model(&args.run, &args.model, &config)?;
    let tokenizer = Tokenizer::of(Some(&args.model), &config)?;
    let mut ends = config.ends_of_text_in(&args.model)?;
    // A number that is a byte of text to the tokenizer ends none.
    ends.retain(|_| !args.ignore_end && !tokenizer.is_bytes());
    let prompt = Prompt::new(&args.prompt, &tokenizer, ends)?;
    let (known, all) = (tokenizer.vocab(), config.vocab_size());
    if known < all && leads() {
        eprintln!(
            "the model scores {all} tokens, of which the tokenizer knows {known}: the others are never chosen"
        );
    }
    let ranks = consistency::of_inputs(&ranks, &config, Some(&args.model), None)?;
    // Who reads may pause; the ranks do not wait for that.
    let printer = Behind::start();
    let show = |text: String| {
        if !args.json && !text.is_empty() {
            printer.hand(move || {
                print!("{text}");
                Ok(())
            });
        }
    };
    let mut made = ranks.launch(|rank| {
        let plan = LanguageModel::plan(&config);
        let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 0, args.run.dtype)?;
        super::load(&model, &args.model, args.run.cast())?;
        if rank.world().index() != 0 {
            return continued(&model, &prompt, args.tokens, &args.sampling, |_| Ok(())).map(|()| None);
        }
        show(args.prompt.clone());
        let (mut text, mut tokens) = (Text::behind(&prompt.tokens, &tokenizer)?, Vec::new());
        continued(&model, &prompt, args.tokens, &args.sampling, |token| {
            tokens.push(token);
            text.push(token).map(&show)
        })?;
        let (rest, all) = text.end();
        show(rest);
        Ok(Some((all, tokens)))
    })?;
    printer.wait()?;
    if !leads() {
        return Ok(());
    }
    if args.json {
        let (text, tokens) = made.swap_remove(0).unwrap_or_default();
        let text = args.prompt.clone() + &text;
        println!("{}", json!({"prompt": args.prompt, "text": text, "tokens": tokens}));
    } else {
        println!();
    }
    Ok(())
}

/// What is continued, in tokens.
struct Prompt<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// The tokens with which the text ends.
    ends: Vec<usize>,
}

impl<'a> Prompt<'a> {
    fn new(text: &str, tokenizer: &'a Tokenizer, ends: Vec<usize>) -> Result<Prompt<'a>> {
        let tokens = tokenizer.encode_start(text)?;
        if tokens.is_empty() {
            return Err(
                Error::new(Kind::Data, "the prompt has no tokens").detail("help", "give a longer one")
            );
        }
        Ok(Prompt { tokenizer, tokens, ends })
    }
}

/// Makes so many tokens behind the prompt, or those before one that ends the text, and tells each. Every rank chooses the same
/// ones, from the same logits and the same random numbers.
fn continued(
    model: &Model<LanguageModel>,
    prompt: &Prompt<'_>,
    count: usize,
    how: &SamplingArgs,
    mut tell: impl FnMut(u32) -> Result<()>,
) -> Result<()> {
    let mut reading = Reading::new(model);
    let mut unread: Vec<i64> = prompt.tokens.iter().copied().map(i64::from).collect();
    for n in 0..count {
        let logits = reading.read(&unread)?;
        // A token that the tokenizer lacks has no text.
        let logits = &logits[..prompt.tokenizer.vocab()];
        check_finite(logits, n)?;
        let next = choose(logits, how, uniform_at(how.seed, 0, n as u64));
        if prompt.ends.contains(&next) {
            break;
        }
        tell(next as u32)?;
        unread = vec![next as i64];
    }
    Ok(())
}

/// Refuses a model that predicts no next token.
fn refuse_encoders(config: &ModelConfig) -> Result<()> {
    if config.is_causal() {
        return Ok(());
    }
    let why = "generate: an encoder reads a text as a whole and does not continue it";
    Err(Error::new(Kind::Unsupported, why)
        .detail("help", "use a model of another type; `eval` measures this one"))
}

/// Refuses logits of which none can be said to be the largest.
fn check_finite(logits: &[f64], token: usize) -> Result<()> {
    let best = logits.iter().copied().fold(f64::NEG_INFINITY, |best, x| if x > best { x } else { best });
    if best.is_finite() && !logits.iter().any(|x| x.is_nan()) {
        return Ok(());
    }
    let why = format!("generate: the logits of new token {} are not finite", token + 1);
    Err(Error::new(Kind::NotFinite, why)
        .detail("help", "the weights of the model are not finite, or too large for --dtype"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn how(top_k: Option<usize>, top_p: Option<f64>, greedy: bool) -> SamplingArgs {
        SamplingArgs { temperature: 1.0, top_k, top_p, greedy, seed: 0 }
    }

    #[test]
    fn logits_that_are_not_finite_are_refused() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert!(check_finite(&[0.0, -inf, 2.0], 0).is_ok(), "a token that is never chosen");
        for bad in [[0.0, nan], [0.0, -nan], [0.0, inf], [-inf, -inf]] {
            assert_eq!(check_finite(&bad, 0).unwrap_err().kind(), Kind::NotFinite, "{bad:?}");
        }
    }

    #[test]
    fn a_seed_gives_the_same_text_on_every_mesh() {
        // The text grows beyond the 64 positions of these models.
        let prompt = "abc".repeat(20);
        for preset in ["tiny", "llama-tiny"] {
            let config = ModelConfig::preset(preset).unwrap();
            let made = |mesh: &str, how: &SamplingArgs, ends: &[usize]| {
                let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                    let plan = LanguageModel::plan(&config);
                    let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 3, DType::F64)?;
                    let mut made = Vec::new();
                    let prompt = Prompt::new(&prompt, &Tokenizer::Bytes, ends.to_vec())?;
                    continued(&model, &prompt, 12, how, |token| {
                        made.push(token as usize);
                        Ok(())
                    })?;
                    assert!(made.len() == 12 || !ends.is_empty());
                    Ok(made)
                });
                let ranks = ranks.unwrap();
                assert!(ranks.iter().all(|made| *made == ranks[0]), "{mesh}: ranks disagree");
                ranks[0].clone()
            };
            let (plain, sharp) = (how(None, None, false), how(Some(40), Some(0.9), false));
            let (one, other) = (made("", &plain, &[]), made("", &sharp, &[]));
            assert!(one != other && one != made("", &SamplingArgs { seed: 1, ..plain.clone() }, &[]));
            // Any of the tokens that end a text does so, and is no part of it.
            let ends = [one[6], one[4]];
            let at = one.iter().position(|token| ends.contains(token)).unwrap();
            assert_eq!(made("", &plain, &ends), one[..at]);
            for mesh in ["tp=2", "dp=2,tp=2"] {
                assert!(
                    made(mesh, &plain, &[]) == one && made(mesh, &sharp, &[]) == other,
                    "{preset} on {mesh}"
                );
            }
        }
    }
}
