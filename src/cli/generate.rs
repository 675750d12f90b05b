//! `generate`: continues a prompt, token by token, on any mesh.

use super::args::{GenerateArgs, SamplingArgs, config_of};
use crate::behind::Behind;
use crate::tokenizer::Tokenizer;
use serde_json::json;
use shardgrad::kernels::op::random::uniform_at;
use shardgrad::nn::{LanguageModel, ModelConfig, Reading};
use shardgrad::prelude::*;

/// Runs the command.
pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    let config = config_of(&args.model)?;
    refuse_encoders(&config)?;
    let tokenizer = Tokenizer::of(Some(&args.model), &config)?;
    let mut ends = config.ends_of_text_in(&args.model)?;
    // A number that is a byte of text to the tokenizer ends none.
    ends.retain(|_| !args.ignore_end && !tokenizer.is_bytes());
    let prompt = Prompt::new(&args.prompt, &tokenizer, ends)?;
    let (known, all) = (tokenizer.vocab(), config.vocab_size());
    if known < all {
        eprintln!(
            "the model scores {all} tokens, of which the tokenizer knows {known}: the others are never chosen"
        );
    }
    // Who reads may pause; the ranks do not wait for that.
    let printer = Behind::start();
    let made = args.run.world()?.launch(|rank| {
        let plan = LanguageModel::plan(&config);
        let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 0, args.run.dtype)?;
        super::load(&model, &args.model, args.run.cast())?;
        let on = (rank.world().index() == 0 && !args.json).then_some(&printer);
        let mut show = Show { on, pending: Vec::new() };
        show.bytes(args.prompt.as_bytes());
        continued(&model, &prompt, args.tokens, &args.sampling, |bytes| show.bytes(bytes))
    })?;
    printer.wait()?;
    let text = args.prompt.clone() + &String::from_utf8_lossy(&made[0]);
    if args.json {
        println!("{}", json!({"prompt": args.prompt, "text": text}));
    } else {
        println!();
    }
    Ok(())
}

/// What is continued, in tokens.
struct Prompt<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// How many bytes of text its tokens stand for.
    len: usize,
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
        let len = tokenizer.decode(&tokens)?.len();
        Ok(Prompt { tokenizer, tokens, len, ends })
    }
}

/// The text of so many tokens behind the prompt, or of those before one that ends it, shown as far as it is known. Every rank
/// chooses the same ones, from the same logits and the same random numbers.
fn continued(
    model: &Model<LanguageModel>,
    prompt: &Prompt<'_>,
    count: usize,
    how: &SamplingArgs,
    mut show: impl FnMut(&[u8]),
) -> Result<Vec<u8>> {
    let mut reading = Reading::new(model);
    let mut tokens = prompt.tokens.clone();
    let mut unread: Vec<i64> = tokens.iter().copied().map(i64::from).collect();
    let (mut text, mut shown) = (Vec::new(), 0);
    for n in 0..count {
        let logits = reading.read(&unread)?;
        // A token that the tokenizer lacks has no text.
        let logits = &logits[..prompt.tokenizer.vocab()];
        check_finite(logits, n)?;
        let next = choose(logits, how, uniform_at(how.seed, 0, n as u64));
        if prompt.ends.contains(&next) {
            break;
        }
        tokens.push(next as u32);
        unread = vec![next as i64];
        text = prompt.tokenizer.decode(&tokens)?.split_off(prompt.len);
        // The next token may add to a letter that is not whole yet.
        if !text.ends_with(UNFINISHED) && text.len() > shown {
            show(&text[shown..]);
            shown = text.len();
        }
    }
    show(&text[shown..]);
    Ok(text)
}

/// What stands for a letter of which some bytes are missing.
const UNFINISHED: &[u8] = "\u{fffd}".as_bytes();

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

/// Chooses among tokens by their logits; `u` is uniform in 0..1.
fn choose(logits: &[f64], how: &SamplingArgs, u: f64) -> usize {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if how.greedy {
        return order[0];
    }
    order.truncate(how.top_k.unwrap_or(order.len()));
    let best = logits[order[0]];
    let mut weights: Vec<f64> = order.iter().map(|t| ((logits[*t] - best) / how.temperature).exp()).collect();
    if let Some(p) = how.top_p {
        let total: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let enough = weights.iter().position(|w| {
            sum += w / total;
            sum >= p
        });
        weights.truncate(enough.map_or(weights.len(), |at| at + 1));
    }
    let mut left = u * weights.iter().sum::<f64>();
    for (token, weight) in order.iter().zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return *token;
        }
    }
    order[weights.len() - 1]
}

/// Has bytes printed as they come, whole characters at a time, on the rank that shows them.
struct Show<'a> {
    on: Option<&'a Behind>,
    pending: Vec<u8>,
}

impl Show<'_> {
    fn bytes(&mut self, bytes: &[u8]) {
        let Some(printer) = self.on else { return };
        self.pending.extend_from_slice(bytes);
        let whole = match std::str::from_utf8(&self.pending) {
            Ok(_) => self.pending.len(),
            // An unfinished character waits; one that can never be finished is shown as it is.
            Err(e) if e.error_len().is_none() => e.valid_up_to(),
            Err(_) => self.pending.len(),
        };
        let text = String::from_utf8_lossy(&self.pending[..whole]).into_owned();
        printer.hand(move || {
            print!("{text}");
            Ok(())
        });
        self.pending.drain(..whole);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn how(top_k: Option<usize>, top_p: Option<f64>, greedy: bool) -> SamplingArgs {
        SamplingArgs { temperature: 1.0, top_k, top_p, greedy, seed: 0 }
    }

    #[test]
    fn choices_by_hand() {
        // Probabilities 1/7, 4/7, 2/7.
        let logits = [0.0, 4f64.ln(), 2f64.ln()];
        assert_eq!(choose(&logits, &how(None, None, true), 0.999), 1);
        let pick = |u| choose(&logits, &how(None, None, false), u);
        assert_eq!(
            [pick(0.0), pick(0.57), pick(0.58), pick(0.85), pick(0.86), pick(0.9999)],
            [1, 1, 2, 2, 0, 0]
        );
        assert_eq!(choose(&logits, &how(Some(1), None, false), 0.99), 1);
        assert_eq!(choose(&logits, &how(None, Some(0.6), false), 0.99), 2);
        assert_eq!(choose(&logits, &how(None, Some(0.5), false), 0.99), 1);
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
                    let mut shown = Vec::new();
                    let prompt = Prompt::new(&prompt, &Tokenizer::Bytes, ends.to_vec())?;
                    let text = continued(&model, &prompt, 12, how, |bytes| shown.extend_from_slice(bytes))?;
                    assert_eq!((text.len() == 12 || !ends.is_empty(), &text), (true, &shown));
                    Ok(text)
                });
                let ranks = ranks.unwrap();
                assert!(ranks.iter().all(|text| *text == ranks[0]), "{mesh}: ranks disagree");
                ranks[0].clone()
            };
            let (plain, sharp) = (how(None, None, false), how(Some(40), Some(0.9), false));
            let (one, other) = (made("", &plain, &[]), made("", &sharp, &[]));
            assert!(one != other && one != made("", &SamplingArgs { seed: 1, ..plain.clone() }, &[]));
            // Any of the tokens that end a text does so, and is no part of it.
            let ends = [usize::from(one[6]), usize::from(one[4])];
            let at = one.iter().position(|byte| ends.contains(&usize::from(*byte))).unwrap();
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
