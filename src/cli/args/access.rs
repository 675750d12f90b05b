//! Options by which the processes of a run recognize each other.

use clap::{Args, ValueEnum};
use shardgrad::dist::{Process, Token};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

// The variants have no doc comments: clap would print them as help, over four lines.

/// When connections are encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Encrypt {
    Always,
    Never,
}

/// Access of processes to a run.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Processes")]
pub(crate) struct AccessArgs {
    /// File with the token of the run, the secret by which its processes recognize each other; overrides SHARDGRAD_TOKEN [default: a file
    /// that rank 0 leaves in --out until all ranks are connected; on one machine, in the user's run-time folder]
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    token_file: Option<PathBuf>,
    /// Connect processes without a token: anyone who reaches their ports can take a rank, read and change gradients and weights, and end
    /// the run
    #[arg(long)]
    insecure: bool,
    /// Encrypt the connections between processes: always (without a value) or never; they are authenticated in any case [default:
    /// between machines]
    #[arg(
        long, value_name = "WHEN", value_enum, num_args = 0..=1, require_equals = true,
        default_missing_value = "always", conflicts_with = "insecure"
    )]
    encrypt: Option<Encrypt>,
    /// Name or address of its machine at which rank 0 listens, or 0.0.0.0 for all; overrides SHARDGRAD_LISTEN [default: that by which
    /// the others reach it (MASTER_ADDR)]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
}

impl AccessArgs {
    /// Returns the options of a command line that cannot be parsed, as far as they can be found, with its `--out`: the error is
    /// reported to the other ranks.
    pub(crate) fn of_unparsed(argv: &[OsString]) -> (AccessArgs, Option<PathBuf>) {
        let value = |name: &str| {
            argv.iter().enumerate().find_map(|(at, given)| {
                let rest = given.to_str()?.strip_prefix(name)?;
                match rest.strip_prefix('=') {
                    Some(value) => Some(PathBuf::from(value)),
                    None => argv.get(at + 1).filter(|_| rest.is_empty()).map(PathBuf::from),
                }
            })
        };
        let is_given = |name: &str| argv.iter().any(|given| given == name);
        let encrypt = match value("--encrypt").is_some_and(|when| when == Path::new("never")) {
            true => Some(Encrypt::Never),
            false => is_given("--encrypt").then_some(Encrypt::Always),
        };
        let access = AccessArgs {
            token_file: value("--token-file"),
            insecure: is_given("--insecure"),
            encrypt,
            listen: value("--listen").and_then(|path| path.into_os_string().into_string().ok()),
        };
        let is_training = argv.get(1).is_some_and(|command| command == "train");
        let out = value("--out").unwrap_or_else(|| super::defaults::OUT.into());
        (access, is_training.then_some(out))
    }

    /// Adds token, encryption and listening address to a process. `out` is the folder of the run, if it has one.
    pub(crate) fn apply(&self, process: Process, out: Option<&Path>) -> Process {
        let process = match (&self.token_file, out) {
            _ if self.insecure => process.insecure(),
            (Some(path), _) => process.token(Token::File(path.clone())),
            (None, Some(out)) if !process.has_token() && !process.is_on_one_machine() => {
                process.token(Token::Folder(out.to_path_buf()))
            }
            _ => process,
        };
        let process = match &self.listen {
            Some(host) => process.listen(host),
            None => process,
        };
        match self.encrypt {
            Some(when) => process.encrypt(when == Encrypt::Always),
            None => process,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Command, config};
    use super::*;

    fn process(host: &str) -> Process {
        Process::new(0, 2, host, 4000).unwrap().with_local_rank(0, 1).unwrap()
    }

    #[test]
    fn options_apply_whether_or_not_the_command_line_can_be_parsed() {
        let far = "10.0.0.1";
        for (given, host, token, is_encrypted) in [
            (&[][..], far, Some(Token::Folder("o".into())), true),
            (&["--token-file", "t"], far, Some(Token::File("t".into())), true),
            (&["--encrypt=never"], far, Some(Token::Folder("o".into())), false),
            (&[], "127.0.0.1", None, false),
            (&["--encrypt"], "localhost", None, true),
            (&["--insecure"], far, None, false),
            (&["--listen", "0.0.0.0"], far, Some(Token::Folder("o".into())), true),
        ] {
            let expected = match token {
                Some(token) => process(host).token(token),
                None if given.contains(&"--insecure") => process(host).insecure(),
                None => process(host),
            };
            let expected = match given {
                ["--listen", address] => expected.listen(address),
                _ => expected,
            };
            let argv = || -> Vec<OsString> {
                ["shardgrad", "train", "--out", "o"].iter().chain(given).map(Into::into).collect()
            };
            let Command::Train(args) = config::parse(argv()).unwrap().command else { panic!() };
            let (unparsed, out) = AccessArgs::of_unparsed(&argv());
            for applied in [
                args.run.access.apply(process(host), Some(&args.out)),
                unparsed.apply(process(host), out.as_deref()),
            ] {
                assert_eq!(applied.is_encrypted(), is_encrypted, "{given:?}");
                assert_eq!(applied.encrypt(true), expected.clone().encrypt(true), "{given:?}");
            }
        }
        let named = process(far).token(Token::Text("0123456789abcdef".to_string()));
        assert_eq!(AccessArgs::default().apply(named.clone(), Some(Path::new("o"))), named);
        let (_, out) = AccessArgs::of_unparsed(&["shardgrad".into(), "eval".into()]);
        assert_eq!(out, None);
    }
}
