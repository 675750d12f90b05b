//! Options from a TOML file (`--config FILE`), one key per long option. The command line overrides the file.

use super::Cli;
use super::compared_options::options_to_compare;
use super::nearest::nearest;
use super::truncate::with_short_arguments;
use super::values::{Bytes, read_small};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};
use shardgrad::{Error, Kind, Result};
use std::any::TypeId;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::Value;

/// Name of the option.
const OPTION: &str = "config";
/// Commands with `--config`.
const COMMANDS: [&str; 5] = ["train", "eval", "generate", "explain", "plan"];
/// Maximum size of the file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A parsed command line.
#[derive(Debug)]
pub(crate) struct CommandLine {
    pub(crate) command: super::Command,
    /// Names and values of the options that must be equal in all processes of a run.
    pub(crate) options: Vec<(String, String)>,
}

/// Parses the command line and the `--config` file. Prints help or the version and exits if requested.
///
/// # Errors
/// `Kind::Config` for invalid options, with the message of clap, or with all errors of the file; `Kind::Io` if the file cannot be read.
pub(crate) fn parse(mut argv: Vec<OsString>) -> Result<CommandLine> {
    // Required options may be in the file.
    let lenient = command().mut_subcommands(|c| c.mut_args(|a| a.required(false)));
    let given = lenient.clone().try_get_matches_from(&argv).map_err(misuse)?;
    if let Some((name, given)) = given.subcommand()
        && COMMANDS.contains(&name)
        && let Some(path) = given.get_one::<PathBuf>(OPTION)
    {
        let command = lenient.find_subcommand(name).expect("clap has just matched it");
        argv.extend(from_file(path, command, given)?.into_iter().map(OsString::from));
    }
    let mut whole = command();
    let matches = whole.try_get_matches_from_mut(argv).map_err(misuse)?;
    let options = matches.subcommand().and_then(|(name, given)| {
        let command = whole.find_subcommand(name)?;
        Some(options_to_compare(command, given))
    });
    let command = Cli::from_arg_matches(&matches).map_err(misuse)?.command;
    Ok(CommandLine { command, options: options.unwrap_or_default() })
}

/// Converts an error of clap. Prints help or the version and exits if that was requested.
fn misuse(e: clap::Error) -> Error {
    let shows = [
        ErrorKind::DisplayHelp,
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
        ErrorKind::DisplayVersion,
    ];
    if shows.contains(&e.kind()) {
        e.exit();
    }
    let message = e.to_string();
    Error::new(Kind::Config, message.strip_prefix("error: ").unwrap_or(&message).trim_end())
}

/// Returns whether an option takes a number.
fn is_number(option: &Arg) -> bool {
    let parser = option.get_value_parser().type_id();
    let numbers = [
        TypeId::of::<usize>(),
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<f64>(),
        TypeId::of::<Duration>(),
    ];
    numbers.iter().any(|t| parser == *t)
}

/// Lets numeric options accept negative numbers, so that their own check reports the error, and `--prompt` any text.
fn with_values(option: Arg) -> Arg {
    match option.get_id().as_str() {
        "prompt" | "times" => option.allow_hyphen_values(true),
        "shard_size" | "memory_limit" | "gathered_bytes_max" => option.allow_negative_numbers(true),
        _ if is_number(&option) => option.allow_negative_numbers(true),
        _ => option,
    }
}

/// Returns the clap definition, with `--config` added.
pub(super) fn command() -> Command {
    let help = "Read options from a TOML file with long option names as keys; the command line overrides it";
    let option = Arg::new(OPTION).long(OPTION).value_name("FILE").help(help);
    let option = option.value_parser(clap::value_parser!(PathBuf)).help_heading("Options");
    let all = Cli::command().mut_subcommands(|c| c.mut_args(with_values));
    COMMANDS.into_iter().fold(all, |c, name| c.mut_subcommand(name, |c| c.arg(option.clone())))
}

/// Returns the arguments that a file adds to the command line.
fn from_file(path: &Path, command: &Command, given: &ArgMatches) -> Result<Vec<String>> {
    let name = path.display();
    let text =
        read_small(path, FILE_BYTES_MAX).map_err(|e| e.detail("help", "--config expects a TOML file"))?;
    let table: toml::Table = toml::from_str(&text).map_err(|e| {
        let line = 1 + text[..e.span().map_or(0, |s| s.start)].matches('\n').count();
        let why = e.message().replace('\n', ", ");
        let help = match why.contains("too large") {
            true => {
                "write numbers above 9223372036854775807 as strings, as in seed = \"18446744073709551615\""
            }
            false => "write option = value, as in lr = 1e-3 or mesh = \"dp=2\"",
        };
        Error::new(Kind::Config, format!("{name} is not valid TOML: line {line}: {why}")).detail("help", help)
    })?;
    let (arguments, faults) = arguments(&table, command, given);
    if faults.is_empty() {
        return Ok(arguments);
    }
    let error = Error::new(Kind::Config, format!("{name} has invalid options"));
    Err(faults.into_iter().fold(error, |e, fault| e.detail("option", fault)))
}

/// Converts a table to arguments, without those that the command line overrides, and collects all errors.
fn arguments(table: &toml::Table, command: &Command, given: &ArgMatches) -> (Vec<String>, Vec<String>) {
    let options: BTreeMap<&str, &Arg> = command
        .get_arguments()
        .filter(|a| ![OPTION, "help", "version"].contains(&a.get_id().as_str()))
        .filter_map(|a| Some((a.get_long()?, a)))
        .collect();
    let mut seen: BTreeMap<String, &str> = BTreeMap::new();
    let (mut arguments, mut faults) = (Vec::new(), Vec::new());
    for (key, value) in table {
        let long = key.replace('_', "-");
        let Some(option) = options.get(long.as_str()) else {
            let near = nearest(&long, options.keys().copied());
            let near = near.map_or(String::new(), |n| format!("; did you mean `{n}`?"));
            faults.push(format!("`{key}`: unknown option of `{}`{near}", command.get_name()));
            continue;
        };
        if let Some(other) = seen.insert(long.clone(), key) {
            faults.push(format!("`{key}` is the same option as `{other}`"));
            continue;
        }
        match argument(option, &long, value, command) {
            Err(why) => faults.push(format!("`{key}`: {why}")),
            Ok(found) if !is_overridden(option, command, given) => arguments.extend(found),
            Ok(_) => {}
        }
    }
    (arguments, faults)
}

/// Converts a TOML value to `--option=value` and validates it like a typed argument: one argument per list element, none for `false`.
fn argument(option: &Arg, long: &str, value: &Value, command: &Command) -> Result<Vec<String>, String> {
    let found = value.type_str();
    if let (ArgAction::Append, Value::Array(list)) = (option.get_action(), value) {
        let each = list.iter().map(|value| argument(option, long, value, command));
        return Ok(each.collect::<Result<Vec<_>, _>>()?.concat());
    }
    if matches!(option.get_action(), ArgAction::SetTrue) {
        let on = value.as_bool().ok_or_else(|| format!("expected true or false, found {found}"))?;
        return Ok(on.then(|| format!("--{long}")).into_iter().collect());
    }
    // An option with an optional value, such as `resume`.
    if let (Some(0), Value::Boolean(on)) = (option.get_num_args().map(|n| n.min_values()), value) {
        return Ok(on.then(|| format!("--{long}")).into_iter().collect());
    }
    let number = is_number(option);
    let text = match value {
        Value::Integer(n) if number => n.to_string(),
        // Byte sizes may also be integers; with a unit they are strings, as in `shard-size = "5GB"`.
        Value::Integer(n) if option.get_value_parser().type_id() == TypeId::of::<Bytes>() => n.to_string(),
        Value::Float(x) if number => x.to_string(),
        // TOML integers are signed; a seed may need all 64 bits.
        Value::String(text) if number && text.parse::<u64>().is_ok_and(|n| i64::try_from(n).is_err()) => {
            text.clone()
        }
        Value::String(text) if !number => text.clone(),
        _ if number => return Err(format!("expected a number, found {found}")),
        _ => return Err(format!("expected a string, found {found}")),
    };
    let typed = format!("--{long}={text}");
    let checked = command.clone().try_get_matches_from([command.get_name(), &typed]);
    checked.map(|_| vec![typed.clone()]).map_err(|e| {
        // The message of clap is `error: invalid value 'x' for '--option <X>': why`, followed by possible values and suggestions.
        let message = e.to_string();
        let error_text = message.lines().map(str::trim).filter(|line| !line.is_empty());
        let error_text: Vec<&str> = error_text
            .take_while(|line| !line.starts_with("For more") && !line.starts_with("Usage"))
            .collect();
        let error_text = error_text.join("; ").trim_start_matches("error: ").to_string();
        with_short_arguments(&error_text, &[typed.into()])
    })
}

/// Returns whether the command line has the option, or one that conflicts with it.
fn is_overridden(option: &Arg, command: &Command, given: &ArgMatches) -> bool {
    let typed =
        |a: &Arg| given.value_source(a.get_id().as_str()) == Some(clap::parser::ValueSource::CommandLine);
    let excludes =
        |a: &Arg, b: &Arg| command.get_arg_conflicts_with(a).iter().any(|c| c.get_id() == b.get_id());
    let conflicting = command.get_arguments().filter(|a| excludes(a, option) || excludes(option, a));
    typed(option) || conflicting.into_iter().any(typed)
}

#[cfg(test)]
mod tests {
    use super::super::Command as Chosen;
    use super::*;
    use crate::data::scratch::Scratch;

    fn parsed(config: &str, args: &[&str]) -> Result<CommandLine> {
        let scratch = Scratch::new();
        let file = scratch.file("options.toml", config);
        let (name, rest) = args.split_first().expect("the command comes first");
        let config = ["shardgrad", name, "--config", file.to_str().unwrap()];
        parse(config.into_iter().chain(rest.iter().copied()).map(OsString::from).collect())
    }

    /// Returns the error of a file, without the folder of its path.
    fn error_text(config: &str, args: &[&str]) -> String {
        let error = parsed(config, args).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        let text = error.to_string();
        let (folder, rest) = text.split_at(text.find("options.toml").unwrap());
        assert!(folder.starts_with('/'), "{text}");
        rest.to_string()
    }

    #[test]
    fn command_line_overrides_config_file() {
        let file = "steps = 7\nlr-schedule = \"constant\"\nweight_decay = 0\nmesh = \"dp=2\"\nno-shuffle = true\n\
                    json = false\ndata = [\"text\", \"more\"]\ntimeout = 2.5\n";
        let Chosen::Train(args) = parsed(file, &["train", "--steps", "9"]).unwrap().command else { panic!() };
        assert_eq!(
            (args.steps.steps, args.optim.weight_decay, args.no_shuffle, args.json),
            (9, 0.0, true, false)
        );
        assert_eq!(
            (args.run.mesh.to_string(), args.source.data),
            ("mesh(dp=2)".into(), vec!["text".into(), "more".into()])
        );
        // A typed option overrides options of the file that conflict with it.
        let Chosen::Train(args) = parsed(file, &["train", "--tokens", "ids"]).unwrap().command else {
            panic!()
        };
        assert_eq!((args.source.data, args.source.tokens), (Vec::new(), Some("ids".into())));
        let Chosen::Generate(args) =
            parsed("prompt = \"fn \"\ngreedy = true", &["generate"]).unwrap().command
        else {
            panic!()
        };
        assert!(args.prompt == "fn " && args.sampling.greedy);
        let Chosen::Explain(args) = parsed("", &["explain", "--batch=3"]).unwrap().command else { panic!() };
        assert_eq!(args.batch, 3);
    }

    #[test]
    fn option_with_optional_value_is_boolean_or_string_in_toml() {
        let resume = |file: &str| {
            let Chosen::Train(args) = parsed(file, &["train"]).unwrap().command else { panic!() };
            args.checkpoints.resume().map(|dir| dir.map(PathBuf::from))
        };
        assert_eq!(resume("resume = true\nsave-every = 5"), Some(None));
        assert_eq!(resume("resume = false"), None);
        assert_eq!(resume("resume = \"a/checkpoint-5\""), Some(Some("a/checkpoint-5".into())));
    }

    #[test]
    fn byte_sizes_in_toml_may_have_a_unit() {
        for (file, bytes) in [("shard-size = \"5MB\"", 5_000_000), ("shard-size = 7000", 7000)] {
            let Chosen::Train(args) = parsed(file, &["train"]).unwrap().command else { panic!() };
            assert_eq!(args.shard_size, Bytes(bytes));
        }
        let text = error_text("shard-size = \"5 fish\"\nseed = \"x\"", &["train"]);
        assert!(text.contains("`shard-size`: invalid value '5 fish'"), "{text}");
        assert!(text.contains("`seed`: expected a number, found string"), "{text}");
    }

    #[test]
    fn a_seed_has_64_bits() {
        let seed = |file: &str| match parsed(file, &["train"]).unwrap().command {
            Chosen::Train(args) => args.steps.seed,
            other => panic!("{other:?}"),
        };
        assert_eq!(seed("seed = 9223372036854775807"), i64::MAX as u64);
        assert_eq!(seed("seed = \"18446744073709551615\""), u64::MAX);
        let text = error_text("steps = 3\nseed = 18446744073709551615", &["train"]);
        assert!(
            text.contains("line 2: ") && text.contains("as in seed = \"18446744073709551615\""),
            "{text}"
        );
        for file in ["seed = -1", "seed = \"-1\"", "seed = \"18446744073709551616\"", "seed = 1.5"] {
            let text = error_text(file, &["train"]);
            assert!((text.contains("must be a") || text.contains("expected a")), "{file}: {text}");
        }
    }

    #[test]
    fn all_errors_in_a_config_file_are_reported_at_once() {
        let file = "stepps = 3\nlr = \"fast\"\nsteps = 0\nmesh = 2\njson = \"yes\"\nmin_lr = 1e-5\nmin-lr = 1e-4\n\
                    batch = 1.5\nconfig = \"x\"\n[train]\nseq = 3\n";
        assert_eq!(
            error_text(file, &["train"]),
            "options.toml has invalid options\n  \
             option     `batch`: invalid value '1.5' for '--batch <N>': must be an integer of at least 1\n  \
             option     `config`: unknown option of `train`\n  \
             option     `json`: expected true or false, found string\n  \
             option     `lr`: expected a number, found string\n  \
             option     `mesh`: expected a string, found integer\n  \
             option     `min_lr` is the same option as `min-lr`\n  \
             option     `stepps`: unknown option of `train`; did you mean `steps`?\n  \
             option     `steps`: invalid value '0' for '--steps <N>': must be an integer of at least 1\n  \
             option     `train`: unknown option of `train`; did you mean `trace`?"
        );
    }

    #[test]
    fn invalid_toml_is_reported_with_its_line() {
        let text = error_text("steps = 3\nlr = = 2\n", &["train"]);
        assert!(text.starts_with("options.toml is not valid TOML: line 2: "), "{text}");
        assert!(text.contains("help       write option = value, as in lr = 1e-3"), "{text}");
        let argv = ["shardgrad", "eval", "--config", "/no/such/file"].map(OsString::from);
        let error = parse(argv.into()).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(error.to_string().starts_with("cannot read /no/such/file: "), "{error}");
    }
}
