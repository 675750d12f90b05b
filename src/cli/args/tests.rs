//! Tests of the command-line definition.

use super::*;
use clap::CommandFactory;
use clap::error::ErrorKind;

fn parse(line: &str) -> Result<Command, clap::Error> {
    Cli::try_parse_from(std::iter::once("shardgrad").chain(line.split_whitespace())).map(|cli| cli.command)
}

fn train(line: &str) -> TrainArgs {
    match parse(&format!("train {line}")).unwrap() {
        Command::Train(args) => *args,
        other => panic!("{other:?}"),
    }
}

/// Returns the error of clap without its usage lines.
fn error_text(line: &str) -> String {
    let error = parse(line).unwrap_err();
    assert_eq!(error.exit_code(), 2, "{line}");
    let text = error.to_string();
    text.split("\n\nUsage").next().unwrap().split("\n\nFor more").next().unwrap().to_string()
}

#[test]
fn clap_definition_is_valid() {
    Cli::command().debug_assert();
}

#[test]
fn every_option_has_help() {
    for command in Cli::command().get_subcommands() {
        assert!(command.get_about().is_some());
        for arg in command.get_arguments().filter(|a| a.get_id() != "help") {
            assert!(arg.get_help().is_some(), "{} --{}", command.get_name(), arg.get_id());
        }
    }
}

#[test]
fn train_defaults_match_the_readme() {
    let args = train("");
    args.check().unwrap();
    assert_eq!(args.model.name(), "tiny");
    assert_eq!(args.run.mesh.num_ranks(), 1);
    assert_eq!((args.run.dtype, args.optim.clip()), (DType::F32, Some(1.0)));
    assert_eq!(args.out, PathBuf::from("runs/latest"));
    let config = args.model.config().unwrap();
    assert!(args.seq(&config).unwrap() <= config.max_positions());
    assert_eq!(config.vocab_size(), crate::data::Corpus::VOCAB);
    args.run.inference_world(&args.parallelism).unwrap();
}

#[test]
fn all_train_options_are_parsed() {
    let args = train(
        "--tokens t.safetensors --no-shuffle --model dir --mesh tp=2,dp=3 --threads 2 --steps 7 --batch 12 --seq 32 \
         --microbatches 3 --lr 3e-4 --min-lr 1e-5 --warmup 2 --weight-decay 0 --beta1 0.8 --beta2 0.99 --eps 1e-6 \
         --grad-clip 0 --dropout 0.1 --seed 18446744073709551615 --dtype bf16 --device cpu --out o --eval-every 0 \
         --json --timeout 5",
    );
    args.check().unwrap();
    assert_eq!(args.source.tokens, Some(PathBuf::from("t.safetensors")));
    assert_eq!(args.model.dir(), Some(std::path::Path::new("dir")));
    assert_eq!(args.run.mesh.to_string(), "mesh(dp=3, tp=2)");
    assert_eq!((args.run.dtype, args.steps.seed), (DType::BF16, u64::MAX));
    assert_eq!((args.optim.clip(), args.dropout, args.eval_every()), (None, Some(0.1), None));
    assert!(args.no_shuffle && args.json);
}

#[test]
fn resume_takes_the_newest_or_a_named_checkpoint() {
    let of = |line: &str| {
        let CheckpointArgs { save_every, .. } = train(line).checkpoints;
        (
            save_every,
            train(line).checkpoints.keep(None),
            train(line).checkpoints.keep(Some(7)),
            train(line).checkpoints.resume().map(|dir| dir.map(PathBuf::from)),
        )
    };
    assert_eq!(of(""), (None, 2, 7, None));
    assert_eq!(of("--save-every 5 --keep 1 --resume"), (Some(5), 1, 1, Some(None)));
    assert_eq!(
        of("--resume a/checkpoint-5 --save-every 5"),
        (Some(5), 2, 7, Some(Some("a/checkpoint-5".into())))
    );
    assert_eq!(of("--resume-exact").3, Some(None));
    assert_eq!(of("--resume a --resume-exact").3, Some(Some("a".into())));
    assert!(train("--resume-exact").checkpoints.is_exact() && !train("--resume").checkpoints.is_exact());
    let message = train("--keep 1").check().unwrap_err().to_string();
    assert!(message.contains("--keep has no effect without --save-every"), "{message}");
    assert!(error_text("train --save-every 0").contains("at least 1"));
}

#[test]
fn default_microbatches_give_each_rank_equal_rows() {
    let microbatches = |line: &str| train(line).microbatches();
    for (line, count) in [
        ("--mesh pp=2 --batch 8", 4),
        ("--mesh pp=2,dp=4 --batch 8", 2),
        ("--mesh pp=2,dp=4 --batch 16", 4),
        // Eight rows are not divisible by three ranks.
        ("--mesh pp=2,dp=3 --batch 8", 2),
        ("--mesh pp=2,dp=4 --batch 6", 1),
        ("--mesh pp=2,dp=4 --batch 3", 3),
        ("--mesh pp=2,dp=4 --batch 8 --microbatches 8", 8),
        ("--mesh dp=4 --batch 8", 1),
    ] {
        assert_eq!(microbatches(line), count, "{line}");
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for (line, ranks) in [
        ("--batch 1", 1),
        ("--batch 4 --microbatches 4", 1),
        ("--batch 4 --microbatches 2", 2),
        ("--batch 3", 2),
    ] {
        assert_eq!(train(line).mesh().num_ranks(), ranks.min(cores), "{line}");
    }
    assert_eq!(train("--batch 1 --mesh dp=2").mesh().num_ranks(), 2);
}

#[test]
fn lr_schedule_follows_the_options() {
    let rates = |line: &str, steps: [usize; 3]| steps.map(|s| train(line).schedule().lr(s));
    assert_eq!(rates("--lr 2 --lr-schedule constant", [0, 5, 1000]), [2.0, 2.0, 2.0]);
    assert_eq!(rates("--lr 2 --lr-schedule constant --warmup 2", [0, 1, 2]), [1.0, 2.0, 2.0]);
    assert_eq!(rates("--lr 2 --steps 20", [0, 1, 20]), [1.0, 2.0, 0.2]);
    assert_eq!(rates("--lr 2 --steps 20 --warmup 0 --min-lr 0", [0, 10, 20]), [2.0, 1.0, 0.0]);
    assert_eq!(rates("--lr 2 --steps 5000", [49, 99, 5000]), [1.0, 2.0, 0.2]);
}

#[test]
fn recorded_options_reproduce_the_lr_schedule() {
    for line in [
        "",
        "--steps 40",
        "--steps 5000 --lr 0.003",
        "--steps 40 --min-lr 0.0001 --warmup 7",
        "--steps 40 --lr-schedule constant",
        "--steps 40 --lr-schedule constant --warmup 3",
    ] {
        let args = train(line);
        let [_, free] = args.recorded_options(16);
        let named = ["steps", "lr", "lr-schedule", "min-lr", "warmup"];
        let recorded = free.iter().filter(|(name, value)| named.contains(name) && value != "none");
        let recorded: Vec<String> = recorded.map(|(name, value)| format!("--{name} {value}")).collect();
        let again = train(&recorded.join(" "));
        for step in 0..=args.steps.steps {
            let [rate, expected] = [&again, &args].map(|args| args.schedule().lr(step));
            assert_eq!(rate.to_bits(), expected.to_bits(), "{line}: step {step}, as recorded {recorded:?}");
        }
    }
}

#[test]
fn validation_loss_is_for_text_only() {
    assert_eq!(train("").eval_every(), Some(100));
    assert_eq!(train("--eval-every 7").eval_every(), Some(7));
    assert_eq!(train("--eval-every 0").eval_every(), None);
    assert_eq!(train("--tokens f").eval_every(), None);
}

#[test]
fn all_conflicting_options_are_reported_at_once() {
    let args =
        train("--tokens f --eval-every 5 --batch 10 --microbatches 4 --lr 1 --min-lr 2 --steps 3 --warmup 4");
    let error = args.check().unwrap_err();
    assert_eq!(error.kind(), Kind::Config);
    let faults: Vec<&str> = error.details().iter().map(|d| d.1.as_str()).collect();
    assert_eq!(
        faults,
        [
            "--batch 10 is not divisible by --microbatches 4",
            "--min-lr 2 exceeds --lr 1",
            "--warmup 4 exceeds --steps 3",
            "--eval-every needs text (--data); a file of --tokens has no validation split",
        ]
    );
    let error = train("--min-lr 0 --lr-schedule constant").check().unwrap_err();
    assert_eq!(error.details()[0].1, "--min-lr has no effect with --lr-schedule constant");
}

#[test]
fn misspelled_names_get_a_suggestion() {
    assert!(error_text("trian").contains("a similar subcommand exists: 'train'"));
    assert!(error_text("train --stesp 3").contains("a similar argument exists: '--steps'"));
    assert!(error_text("train --dtype f31").contains("[possible values: f32, f64, bf16, f16]"));
    assert!(error_text("train --dtype f31").contains("a similar value exists: 'f32'"));
    assert!(error_text("train --device gpu").contains("expected cpu, cuda or cuda:N"));
    assert!(error_text("train --preset tinny").contains("did you mean `tiny`?"));
    assert!(error_text("train --mesh tp=2,tp=2").contains("axis `tp` is named twice"));
    assert!(error_text("train extra").contains("unexpected argument 'extra'"));
    assert!(error_text("generate").contains("--prompt <TEXT>"));
    assert!(error_text("generate --prompt=").contains("a value is required for '--prompt <TEXT>'"));
}

#[test]
fn numbers_out_of_range_are_refused() {
    for (option, bad) in [
        ("steps", "0"),
        ("batch", "0"),
        ("seq", "-3"),
        ("microbatches", "0"),
        ("threads", "0"),
        ("lr", "0"),
        ("lr", "nan"),
        ("lr", "inf"),
        ("min-lr", "-1"),
        ("weight-decay", "-0.1"),
        ("beta1", "1"),
        ("beta2", "-0.1"),
        ("eps", "0"),
        ("grad-clip", "-1"),
        ("dropout", "1"),
        ("seed", "-1"),
        ("timeout", "0"),
        ("eval-every", "x"),
        ("warmup", "1.5"),
    ] {
        let text = error_text(&format!("train --{option}={bad}"));
        assert!(text.contains(&format!("invalid value '{bad}' for '--{option} <")), "{text}");
    }
    assert!(error_text("train --steps 0").ends_with("must be an integer of at least 1"));
    assert!(
        error_text("generate --prompt x --top-p 1.5").ends_with("must be a number above 0 and at most 1")
    );
}

#[test]
fn options_that_exclude_each_other_are_refused() {
    for line in [
        "train --data a --tokens b",
        "train --model a --preset tiny",
        "eval --tokens a --split train",
        "generate --prompt x --greedy --temperature 1",
        "generate --prompt x --greedy --top-k 3",
    ] {
        assert_eq!(parse(line).unwrap_err().kind(), ErrorKind::ArgumentConflict, "{line}");
    }
    // Default values do not count as given.
    for line in ["train --model a", "eval --tokens a", "generate --prompt x --greedy"] {
        parse(line).unwrap();
    }
}

#[test]
fn seq_is_bounded_by_model_positions() {
    let config = ModelConfig::from(shardgrad::nn::Gpt2Config::new(256, 64, 8, 1, 1));
    assert_eq!(train("").seq(&config).unwrap(), 64);
    assert_eq!(train("--seq 64").seq(&config).unwrap(), 64);
    let error = train("--seq 65").seq(&config).unwrap_err();
    assert_eq!(error.message(), "--seq 65 exceeds the 64 positions of the model");
    assert_eq!(train("").seq(&ModelConfig::preset("gpt2-124m").unwrap()).unwrap(), 128);
}

#[test]
fn number_of_rank_threads_is_limited() {
    let args = train("--mesh dp=1000,tp=1000");
    let error = args.run.inference_world(&args.parallelism).unwrap_err();
    assert_eq!(error.message(), "--mesh has 1000000 ranks; one process runs at most 256");
    assert!(
        matches!(parse("explain --mesh dp=1000,tp=1000").unwrap(), Command::Explain(a) if a.mesh.num_ranks() == 1_000_000)
    );
}

#[test]
fn splits_are_parsed() {
    for (word, split) in [("train", Split::Train), ("val", Split::Val), ("all", Split::All)] {
        assert!(
            matches!(parse(&format!("eval --split {word}")).unwrap(), Command::Eval(a) if a.split == split)
        );
    }
    assert!(error_text("eval --split test").contains("[possible values: train, val, all]"));
}

#[test]
fn help_and_version_exit_with_0() {
    for line in ["--help", "--version", "train --help", "eval -h"] {
        assert_eq!(parse(line).unwrap_err().exit_code(), 0);
    }
    assert_eq!(parse("").unwrap_err().exit_code(), 2);
}
