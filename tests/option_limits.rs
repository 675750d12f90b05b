//! Option values beyond all limits, invalid input files and options without effect: each is refused with a message that names the option.

use crate::cli::{Folder, exit_code_and_stderr, shardgrad};
use std::process::Command;

#[test]
fn values_beyond_limits_are_refused_with_the_limit() {
    let folder = Folder::new("limits");
    let data = folder.file("text", "The quick brown fox. ".repeat(100));
    let huge = "2147483648";
    let cases: &[(&[&str], &[&str])] = &[
        (&["plan", "--times", "1e-308,1e-308,1e-308"], &["--times <F,I,W>", "from 0.000001 to 1000000"]),
        (&["plan", "--times", "1e308,1e308,1e308"], &["from 0.000001 to 1000000"]),
        (&["plan", "--transfer", "1e308"], &["--transfer <T>", "from 0 to 1000000"]),
        (&["plan", "--stages", huge], &["2147483648 ranks and 8 microbatches", "at most 2097152"]),
        (&["plan", "--microbatches", huge], &["2147483648 microbatches", "at most 2097152"]),
        (
            &["plan", "--schedule", "interleaved-18446744073709551615"],
            &["a pipeline rank has at most 1024 stages"],
        ),
        (&["explain", "--batch", huge], &["--batch 2147483648", "at most 33554432 tokens", "use --batch "]),
        (&["explain", "--mesh", "dp=2147483648"], &["2147483648 ranks; `explain` supports at most 1048576"]),
        (&["train", "--data", &data, "--threads", huge], &["--threads <N>", "from 1 to 1024"]),
        (&["train", "--data", &data, "--mesh", "dp=2", "--threads", "600"], &["use --threads 512 or less"]),
        (
            &["train", "--data", &data, "--batch", "10000000", "--seq", "64"],
            &["--batch 10000000 with 64 tokens per sequence", "use --batch 524288 or less"],
        ),
        (
            &["train", "--data", &data, "--mesh", "pp=2", "--schedule", "interleaved-1025"],
            &["at most 1024 stages"],
        ),
    ];
    let out = folder.path("out");
    for (args, parts) in cases {
        let mut args = args.to_vec();
        if args[0] == "train" {
            args.extend(["--out", &out]);
        }
        let (code, message) = exit_code_and_stderr(&args);
        assert_eq!(code, 2, "{args:?}: {message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{args:?}: {message}");
    }
}

#[test]
fn inputs_are_not_overwritten_and_unread_inputs_are_refused() {
    let folder = Folder::new("sources");
    let dir = folder.path("");
    let readme = folder.file("README.md", "# A text of some words\n".repeat(400));
    let trained = |args: &[&str]| {
        let program = env!("CARGO_BIN_EXE_shardgrad");
        let short = ["train", "--preset", "tiny", "--steps", "1", "--eval-every", "0", "--mesh", "dp=1"];
        let output = Command::new(program).args(short).args(args).current_dir(&dir).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    // Without --data the source files of the working directory are read.
    let (code, message) = trained(&["--out", "out", "--trace", "README.md"]);
    assert!(
        code == Some(2) && message.contains("--trace README.md would replace a file of README.md"),
        "{message}"
    );
    assert!(std::fs::read_to_string(&readme).unwrap().starts_with("# A text"));
    let (code, message) = trained(&["--out", "out"]);
    assert_eq!(code, Some(0), "{message}");
    let out = folder.path("out/model");
    let eval = |args: &[&str]| {
        let program = env!("CARGO_BIN_EXE_shardgrad");
        let output =
            Command::new(program).args(["eval", "--model", &out]).args(args).current_dir(&dir).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, message) = eval(&["--logits", "README.md"]);
    assert!(code == Some(2) && message.contains("--logits README.md would replace"), "{message}");
    std::os::unix::fs::symlink(&readme, folder.path("out/link.txt")).unwrap();
    let (code, message) = eval(&["--data", "out"]);
    assert!(
        code == Some(2) && message.contains("link.txt: is a symbolic link, which is not followed"),
        "{message}"
    );
    // The folder itself may be given as a symbolic link.
    std::os::unix::fs::symlink(folder.path("texts"), folder.path("named")).unwrap();
    std::fs::create_dir(folder.path("texts")).unwrap();
    folder.file("texts/a.txt", "# A text of some words\n".repeat(400));
    let (code, message) = eval(&["--data", "named"]);
    assert_eq!(code, Some(0), "{message}");
    folder.file("out/model/vocab.json", "{}");
    let (code, message) = eval(&[]);
    assert!(
        code == Some(2)
            && message.contains("vocab.json: this tokenizer format is not supported, only tokenizer.json"),
        "{message}"
    );
    let (code, message) = exit_code_and_stderr(&["bench", "card-kernels", "--device", "cpu"]);
    assert!(code == 2 && message.contains("but --device is cpu"), "{message}");
}

#[test]
fn pipes_and_devices_are_refused_as_files() {
    let folder = Folder::new("endless");
    let fifo = folder.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for (option, file) in
        [("--schedule", &*fifo), ("--schedule", "/dev/zero"), ("--config", &fifo), ("--config", "/dev/zero")]
    {
        let (code, message) = exit_code_and_stderr(&["plan", option, file]);
        assert!(code == 2 && message.contains("is a folder, a pipe or a device, not a file"), "{message}");
    }
    let long = folder.file("long.toml", "# comment\n".repeat(200_000));
    let (code, message) = exit_code_and_stderr(&["plan", "--config", &long]);
    assert!(code == 2 && message.contains("has more than 1048576 bytes"), "{message}");
}

#[test]
fn values_may_begin_with_a_minus() {
    for (args, why) in [
        (&["train", "--lr", "-1"], "invalid value '-1' for '--lr <RATE>': must be a number above 0"),
        (&["train", "--seed", "-1"], "'--seed <N>': must be an integer from 0 to 18446744073709551615"),
        (&["train", "--steps", "-5"], "'--steps <N>': must be an integer of at least 1"),
        (&["eval", "--end-of-text", "-1"], "must be an integer from 0 to 4294967295"),
        (&["plan", "--times", "-1,1,1"], "invalid value '-1,1,1' for '--times <F,I,W>'"),
        (&["train", "--shard-size", "-1"], "must be a number of bytes above 0"),
    ] {
        let (code, message) = exit_code_and_stderr(args);
        assert!(code == 2 && message.contains(why), "{args:?}: {message}");
    }
    let (code, message) =
        exit_code_and_stderr(&["generate", "--model", "/no/such/model", "--prompt", "- item"]);
    assert!(
        code == 2 && message.contains("/no/such/model") && !message.contains("unexpected argument"),
        "{message}"
    );
    let (_, message) = exit_code_and_stderr(&["generate", "--prompt", "x", "--temperature", "-1"]);
    assert!(message.contains("invalid value '-1' for '--temperature <X>'"), "{message}");
}

#[test]
fn options_without_effect_are_refused_with_help() {
    let folder = Folder::new("idle");
    let data = folder.file("text", "The quick brown fox. ".repeat(100));
    let out = folder.path("out");
    for (more, parts) in [
        (&["--schedule", "gpipe", "--mesh", "dp=2"][..], &["--schedule needs a pipeline", "add pp=2"][..]),
        (&["--cut", "measured"], &["--cut needs a pipeline", "omit --cut"]),
        (&["--width", "u16"], &["--width applies to .bin files", ".bin"]),
    ] {
        let (code, message) =
            exit_code_and_stderr(&[&["train", "--data", &data, "--out", &out], more].concat());
        assert!(code == 2 && parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let (code, message) = exit_code_and_stderr(&["explain", "--schedule", "gpipe"]);
    assert!(code == 2 && message.contains("--schedule needs a pipeline"), "{message}");
    assert!(
        shardgrad(&["explain", "--schedule", "gpipe", "--mesh", "pp=2", "--batch", "4"]).status.success()
    );
}
