//! Decoding with a KV cache: logits equal those of a forward pass over the whole text, on every mesh.

use crate::llama;
use crate::support::{VOCAB, config, max_difference, run};
use crate::traces::traced;
use shardgrad_autograd::Var;
use shardgrad_nn::{
    DecodingSession, InferenceModel, LanguageModel, LlamaConfig, LlamaKind, Model, ModelConfig, Param, Plan,
    ResultRanks,
};
use shardgrad_tensor::{DType, Error, Kind, Mesh, Phase, Rank, Record, Result, Tensor, Value, World};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

/// Heads that `tp=3` shards unevenly: 3 heads of GPT-2, 5 groups of 2, 2 groups of 2, and one group of 5.
fn configs() -> [ModelConfig; 4] {
    let five = LlamaConfig::new(LlamaKind::Qwen3, VOCAB, 8, [10, 7], 2, [10, 5]);
    [
        config().into(),
        LlamaConfig { head_dim: 4, initializer_range: 0.3, ..five }.into(),
        llama::config(LlamaKind::Qwen2).into(),
        llama::few_keys(LlamaKind::Llama, 1).into(),
    ]
}

/// On `tp=4` some ranks have no heads.
const MESHES: [&str; 6] = ["", "tp=2", "dp=2", "dp=2,tp=2", "tp=3", "tp=4"];

fn text(len: usize) -> Vec<i64> {
    (0..len).map(|t| ((t * t * 3 + t + 1) % VOCAB) as i64).collect()
}

fn model(rank: &Rank, config: &ModelConfig) -> Result<Model<LanguageModel>> {
    let plan = LanguageModel::plan(config);
    Model::with_dtype(rank, LanguageModel::new(config), &plan, 5, DType::F64)
}

#[test]
fn plans_of_sequence_parallelism_decode_as_one_rank() {
    for config in configs() {
        let text = text(8);
        let alone = run("", |rank| uncached_logits(&model(rank, &config)?, &text)).swap_remove(0);
        let plan = LanguageModel::plan(&config).and(Plan::sequence_parallel("tp"));
        for mesh in ["tp=2", "tp=3"] {
            let ranks = run(mesh, |rank| {
                let model = Model::with_dtype(rank, LanguageModel::new(&config), &plan, 5, DType::F64)?;
                let mut session = DecodingSession::new(&model);
                session.feed(&text[..5])?;
                // One token: other ranks have none.
                session.feed(&text[5..6])?;
                session.feed(&text[6..])
            });
            for logits in ranks {
                assert!(max_difference(&logits, &alone) < 1e-12, "{mesh}");
            }
        }
    }
}

/// Tokens sharded over `cp`, in the forms in which queries meet keys, with lists shorter than the ranks, and more ranks than heads.
#[test]
fn plans_of_context_parallelism_decode_as_one_rank() {
    for config in configs() {
        // Longer than the 8 positions, so that the context is truncated and the cache starts anew.
        let (text, parts) = (text(15), [5, 1, 2, 3, 1, 1, 2]);
        let alone = run("", |rank| fed(&mut DecodingSession::new(&model(rank, &config)?), &text, &parts));
        for form in [Plan::clone, |plan: &Plan| plan.clone().ring(), |plan: &Plan| plan.clone().exchange()] {
            let plan = form(&LanguageModel::plan(&config));
            for mesh in ["cp=2", "cp=3", "cp=2,tp=2", "dp=2,cp=2", "pp=2,cp=2"] {
                let ranks = run(mesh, |rank| {
                    let model = inference_model_of(rank, &config, &plan)?;
                    fed(&mut DecodingSession::in_stages(&model), &text, &parts)
                });
                for found in &ranks {
                    assert!(*found == ranks[0], "{mesh}: ranks disagree under\n{plan}");
                    for (n, (one, other)) in alone[0].iter().zip(found).enumerate() {
                        assert!(max_difference(one, other) < 1e-12, "{mesh}: part {n} differs under\n{plan}");
                    }
                }
            }
        }
    }
}

/// A list of tokens is sharded over the ranks of `cp`, and one new token is computed without communication.
#[test]
fn ranks_of_context_parallelism_share_a_prompt() {
    let config = ModelConfig::from(config());
    run("cp=2", |rank| {
        let model = model(rank, &config)?;
        let mut session = DecodingSession::new(&model);
        let records = traced(rank, || session.feed(&text(6)).map(drop))?;
        let gathered = |r: &&Record| r.op == "all_gather" && r.path.ends_with(".keys");
        assert_eq!(records.iter().filter(gathered).count(), model.new_kv_cache().layers().count());
        let records = traced(rank, || session.feed(&[1]).map(drop))?;
        assert!(records.iter().all(|r| r.bytes == 0), "{records:?}");
        Ok(())
    });
}

/// The logits after the last token of a text, by one forward pass without a cache.
fn uncached_logits(model: &Model<LanguageModel>, text: &[i64]) -> Result<Vec<f64>> {
    let ids = Tensor::from_host(model.rank(), &[1, text.len()], text)?;
    let logits = model.forward(&model.inference_tape().constant(ids));
    logits.slice(1, text.len() - 1..text.len()).tensor().to_f64()
}

#[test]
fn cached_decoding_matches_a_forward_pass() {
    for config in configs() {
        let text = text(8);
        let alone = run("", |rank| uncached_logits(&model(rank, &config)?, &text)).swap_remove(0);
        for mesh in MESHES {
            for parts in [vec![8], vec![3, 5], vec![1; 8], vec![5, 1, 1, 1]] {
                let found = run(mesh, |rank| {
                    let model = model(rank, &config)?;
                    let mut session = DecodingSession::new(&model);
                    let (mut from, mut logits) = (0, Vec::new());
                    for len in &parts {
                        logits = session.feed(&text[from..from + len])?;
                        from += len;
                        let exact = uncached_logits(&model, &text[..from])?;
                        assert!(
                            max_difference(&logits, &exact) < 1e-12,
                            "{mesh}, {parts:?}: after {from} tokens"
                        );
                    }
                    assert_eq!(session.context(), text);
                    Ok(logits)
                });
                assert!(found.iter().all(|logits| *logits == found[0]), "{mesh}: ranks disagree");
                assert!(
                    max_difference(&found[0], &alone) < 1e-12,
                    "{mesh}, {parts:?}: other logits than on one rank"
                );
            }
        }
    }
}

/// An error in the second layer leaves the cache of the first one longer. The next call does not read it.
#[test]
fn a_call_that_failed_can_be_repeated() {
    let config = &configs()[0];
    for (mesh, parts) in [("", [3, 2]), ("tp=2", [3, 2]), ("", [3, 8])] {
        run(mesh, |rank| {
            let model = model(rank, config)?;
            let fails = Rc::new(Cell::new(false));
            let refuse = {
                let fails = fails.clone();
                move |_: &str, _: &Tensor| match fails.take() {
                    true => Err(Error::new(Kind::Io, "refused")),
                    false => Ok(()),
                }
            };
            model.watch_values("*.1.*.c_proj.out", refuse)?;
            let (mut session, mut undisturbed) = (DecodingSession::new(&model), DecodingSession::new(&model));
            let text = text(parts.iter().sum());
            let (first, second) = text.split_at(parts[0]);
            session.feed(first)?;
            undisturbed.feed(first)?;
            for _ in 0..2 {
                fails.set(true);
                assert!(catch_unwind(AssertUnwindSafe(|| session.feed(second))).is_err());
                assert_eq!(session.context(), first, "{mesh}");
            }
            let (logits, right) = (session.feed(second)?, undisturbed.feed(second)?);
            assert!(max_difference(&logits, &right) < 1e-12, "{mesh}, {parts:?}");
            assert_eq!(session.context(), undisturbed.context());
            let (logits, right) = (session.feed(&text[..1])?, undisturbed.feed(&text[..1])?);
            assert!(max_difference(&logits, &right) < 1e-12, "{mesh}, {parts:?}: the token after");
            Ok(())
        });
    }
}

#[test]
fn a_batch_of_rows_can_be_decoded() {
    let config = &configs()[1];
    let rows = [text(6), text(7)[1..].to_vec()];
    let both = run("dp=2,tp=2", |rank| {
        let model = model(rank, config)?;
        let layout = LanguageModel::plan(config).batch_layout(rank.mesh(), DType::I64, &[2, 3])?;
        let mut cache = model.new_kv_cache();
        assert!(cache.is_empty());
        let mut logits = None;
        for from in [0, 3] {
            let ids: Vec<i64> = rows.iter().flat_map(|row| row[from..from + 3].to_vec()).collect();
            let ids = Tensor::from_global(rank, &layout, &ids)?;
            logits = Some(model.next_token_logits(&model.inference_tape().constant(ids), &mut cache));
        }
        assert_eq!(cache.len(), 6);
        logits.unwrap().tensor().to_f64()
    })
    .swap_remove(0);
    for (row, logits) in rows.iter().zip(both.chunks(VOCAB)) {
        let exact = run("", |rank| uncached_logits(&model(rank, config)?, row)).swap_remove(0);
        assert!(max_difference(logits, &exact) < 1e-12);
    }
}

/// A block with a sliding window caches little more than the window, and every logit is bit for bit that of one forward pass.
#[test]
fn positions_before_the_sliding_window_are_evicted() {
    const WINDOW: usize = 10;
    let long = LlamaConfig::new(LlamaKind::Mistral, VOCAB, 900, [10, 7], 2, [4, 2]);
    let long = LlamaConfig { head_dim: 4, initializer_range: 0.3, windows: vec![Some(WINDOW), None], ..long };
    let (config, text) = (ModelConfig::from(long), text(900));
    for mesh in ["", "tp=2"] {
        run(mesh, |rank| {
            let model = model(rank, &config)?;
            let ids = |text: &[i64]| {
                let ids = Tensor::from_host(rank, &[1, text.len()], text)?;
                Ok::<_, Error>(model.inference_tape().constant(ids))
            };
            let whole = model.forward(&ids(&text)?).tensor().to_f64()?;
            let (mut cache, mut from, mut most) = (model.new_kv_cache(), 0, [0, 0]);
            for len in [1; 300].into_iter().chain([1, 250, 3, 40]).chain([1; 306]) {
                let logits =
                    model.next_token_logits(&ids(&text[from..from + len])?, &mut cache).tensor().to_f64()?;
                from += len;
                assert!(logits == whole[(from - 1) * VOCAB..from * VOCAB], "{mesh}: after {from} tokens");
                assert_eq!(cache.len(), from);
                let kept: Vec<usize> = cache.layers().map(|layer| layer.cached_len()).collect();
                assert_eq!(kept[1], from);
                // The window of the first token of a part, the part, and positions that are not evicted yet.
                assert!(kept[0] < WINDOW + len + 256 && kept[0] >= from.min(WINDOW), "{kept:?}");
                most = [most[0].max(kept[0]), most[1].max(kept[1])];
            }
            assert_eq!((from, most[1]), (900, 900));
            assert!(most[0] < WINDOW + 250 + 256, "{most:?}");
            Ok(())
        });
    }
}

#[test]
fn context_beyond_the_positions_is_truncated_to_its_last_half() {
    for config in configs() {
        assert_eq!(config.max_positions(), 8);
        run("tp=2", |rank| {
            let model = model(rank, &config)?;
            let mut session = DecodingSession::new(&model);
            let text = text(30);
            let mut lens = Vec::new();
            for n in 1..=text.len() {
                let logits = session.feed(&text[n - 1..n])?;
                assert_eq!(session.context(), &text[n - session.context().len()..n], "the last tokens");
                assert!(
                    max_difference(&logits, &uncached_logits(&model, session.context())?) < 1e-12,
                    "after {n} tokens"
                );
                lens.push(session.context().len());
            }
            assert_eq!(lens[..13], [1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8]);
            // A prompt that is too long fills the positions; large parts fed later are not truncated.
            let mut session = DecodingSession::new(&model);
            session.feed(&text[..20])?;
            assert_eq!(session.context(), &text[12..20]);
            session.feed(&text[20..26])?;
            assert_eq!(session.context(), &text[20..26]);
            Ok(())
        });
    }
}

#[test]
fn decoding_a_token_costs_one_forward_step() {
    for config in configs() {
        run("", |rank| {
            let model = model(rank, &config)?;
            let cost = |tokens: &[i64], session: &mut DecodingSession<'_>| -> Result<u64> {
                let before = rank.backend().cost().flops;
                session.feed(tokens)?;
                Ok(rank.backend().cost().flops - before)
            };
            let mut session = DecodingSession::new(&model);
            let first = cost(&[1], &mut session)?;
            cost(&[2, 3, 4, 5, 6], &mut session)?;
            let seventh = cost(&[7], &mut session)?;
            let again = {
                let before = rank.backend().cost().flops;
                uncached_logits(&model, &[1, 2, 3, 4, 5, 6, 7])?;
                rank.backend().cost().flops - before
            };
            assert!(seventh < first + first / 2 && again > 5 * first, "{first}, {seventh}, at once {again}");
            Ok(())
        });
    }
}

#[test]
fn decoding_a_token_communicates_one_row() {
    let config = &configs()[1];
    let records = run("tp=2", |rank| {
        let model = model(rank, config)?;
        let mut session = DecodingSession::new(&model);
        session.feed(&text(5))?;
        crate::traces::traced(rank, || session.feed(&[3]).map(drop))
    })
    .swap_remove(0);
    // Two per block and one of the embedding, of one row each; then the logits are gathered.
    let sizes: Vec<(&str, usize)> = records.iter().map(|r| (r.op, r.numel())).collect();
    assert_eq!(sizes[..5], [("all_reduce", 10); 5]);
    assert_eq!((sizes.len(), sizes[5].0), (6, "all_gather"), "{sizes:?}");
    assert!(records.iter().all(|r| r.phase == Phase::Forward));
}

#[test]
fn invalid_tokens_and_too_many_positions_are_errors() {
    let feed_error = |tokens: &'static [i64]| -> Error {
        let config = &configs()[2];
        World::run(Mesh::single(), |rank| DecodingSession::new(&model(rank, config)?).feed(tokens).map(drop))
            .unwrap_err()
    };
    assert_eq!(feed_error(&[]).kind(), Kind::Shape);
    assert!(feed_error(&[3, 11]).to_string().contains("index 11 at position 1 is outside of 0..11"));
    let beyond = World::run(Mesh::single(), |rank| {
        let model = model(rank, &configs()[0])?;
        let ids = |n: usize| {
            Ok::<_, Error>(model.inference_tape().constant(Tensor::from_host(rank, &[1, n], &text(n))?))
        };
        let mut cache = model.new_kv_cache();
        let _ = model.next_token_logits(&ids(5)?, &mut cache);
        let _ = model.next_token_logits(&ids(4)?, &mut cache);
        Ok(())
    });
    let text = "ids of shape [1, 4] after 5 cached tokens do not fit a model of 8 positions";
    assert!(beyond.unwrap_err().to_string().contains(text));
}

/// Decodes in stages: each rank caches the keys and values of its own layers, and all ranks get the same logits.
#[test]
fn decoding_in_stages_matches_one_rank() {
    for config in configs() {
        // Longer than the 8 positions, so that the context is truncated and the cache starts anew.
        let text = text(15);
        let parts = [3, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1];
        let whole = run("", |rank| {
            let model = model(rank, &config)?;
            let mut session = DecodingSession::new(&model);
            fed(&mut session, &text, &parts)
        })
        .swap_remove(0);
        for mesh in ["pp=2", "pp=3", "pp=2,tp=2", "dp=2,pp=2"] {
            let found = run(mesh, |rank| {
                let model = inference_model(rank, &config)?;
                fed(&mut DecodingSession::in_stages(&model), &text, &parts)
            });
            assert!(found.iter().all(|logits| *logits == found[0]), "{mesh}: ranks disagree");
            for (n, (one, other)) in whole.iter().zip(&found[0]).enumerate() {
                assert!(
                    max_difference(one, other) < 1e-12,
                    "{mesh}: other logits than on one rank, part {n}"
                );
            }
        }
    }
}

#[test]
fn positions_before_the_sliding_window_are_evicted_in_stages() {
    let long = LlamaConfig::new(LlamaKind::Mistral, VOCAB, 900, [10, 7], 2, [4, 2]);
    let long = LlamaConfig { head_dim: 4, initializer_range: 0.3, windows: vec![Some(10), None], ..long };
    let (config, text) = (ModelConfig::from(long), text(900));
    let parts = [300, 250, 1, 1, 340, 1, 1, 1, 1, 1, 1, 1, 1];
    let whole =
        run("", |rank| fed(&mut DecodingSession::new(&model(rank, &config)?), &text, &parts)).swap_remove(0);
    let staged = run("pp=2", |rank| {
        let model = inference_model(rank, &config)?;
        fed(&mut DecodingSession::in_stages(&model), &text, &parts)
    });
    assert!(staged.iter().all(|logits| *logits == whole), "other bits than on one rank");
}

/// The logits after each part of a text.
fn fed(session: &mut DecodingSession<'_>, text: &[i64], parts: &[usize]) -> Result<Vec<Vec<f64>>> {
    let mut from = 0;
    let feed = |len: &usize| {
        from += len;
        session.feed(&text[from - len..from])
    };
    parts.iter().map(feed).collect()
}

fn inference_model(rank: &Rank, config: &ModelConfig) -> Result<InferenceModel<LanguageModel>> {
    inference_model_of(rank, config, &LanguageModel::plan(config))
}

fn inference_model_of(
    rank: &Rank,
    config: &ModelConfig,
    plan: &Plan,
) -> Result<InferenceModel<LanguageModel>> {
    let ids = |rank: &Rank| Ok(vec![plan.batch_layout(rank.mesh(), DType::I64, &[1, 8])?]);
    let logits = |model: &LanguageModel, x: &[Var]| Ok(vec![model.forward(&x[0])]);
    InferenceModel::new(rank, LanguageModel::new(config), plan, 5, DType::F64, ids, logits)
}

/// Results of an inference model have the bits of one rank, wherever they are requested, and a stage holds its own parameters only.
#[test]
fn inference_in_stages_has_the_bits_of_one_rank() {
    for config in configs() {
        let text = text(8);
        let forward = |rank: &Rank, on: ResultRanks| -> Result<(Vec<Option<Vec<f64>>>, usize)> {
            let model = inference_model(rank, &config)?;
            let batch = |row: &[i64]| Ok(vec![Tensor::from_host(model.rank(), &[1, row.len()], row)?]);
            // Microbatches of another length than the recorded one.
            let microbatches: Vec<Vec<Tensor>> = text.windows(5).map(batch).collect::<Result<_>>()?;
            let logits = |model: &LanguageModel, x: &[Var]| Ok(vec![model.forward(&x[0])]);
            let results = model.forward(&microbatches, on, logits)?;
            let values = |x: Option<Tensor>| x.map(|x| x.to_f64()).transpose();
            let values = results.into_iter().flatten().map(values).collect::<Result<_>>()?;
            Ok((values, model.model().params().iter().filter(|p| p.is_local()).map(Param::numel).sum()))
        };
        let (whole, numel) = run("", |rank| forward(rank, ResultRanks::Producer)).swap_remove(0);
        assert_eq!(whole.len(), 4);
        let nothing = vec![None; 4];
        for (on, expected) in [
            (ResultRanks::Producer, [&nothing, &whole]),
            (ResultRanks::FirstStage, [&whole, &nothing]),
            (ResultRanks::AllStages, [&whole, &whole]),
        ] {
            let stages = run("pp=2", |rank| forward(rank, on));
            assert!(stages.iter().all(|(_, held)| *held < numel), "{on:?}");
            assert!(stages.iter().zip(expected).all(|((values, _), expected)| values == expected), "{on:?}");
        }
    }
}
