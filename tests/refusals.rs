//! Values that no machine can serve: the option says what is wrong, and nothing aborts, hangs or is passed over.

use crate::cli::{Folder, shardgrad, told};
use std::process::Command;

#[test]
fn values_beyond_all_limits_are_refused_and_the_limit_is_named() {
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
            &["a rank of a pipeline has at most 1024 stages"],
        ),
        (&["explain", "--batch", huge], &["--batch 2147483648", "at most 33554432 tokens", "use --batch "]),
        (&["explain", "--mesh", "dp=2147483648"], &["2147483648 ranks; at most 1048576"]),
        (&["train", "--data", &data, "--threads", huge], &["--threads <N>", "from 1 to 1024"]),
        (&["train", "--data", &data, "--mesh", "dp=2", "--threads", "600"], &["use --threads 512 or less"]),
        (
            &["train", "--data", &data, "--batch", "10000000", "--seq", "64"],
            &["--batch 10000000 of 64 tokens", "use --batch 524288 or less"],
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
        let (code, said) = told(&args);
        assert_eq!(code, 2, "{args:?}: {said}");
        assert!(parts.iter().all(|part| said.contains(part)), "{args:?}: {said}");
    }
}

#[test]
fn what_is_read_is_not_written_over_and_what_is_not_read_is_refused() {
    let folder = Folder::new("sources");
    let dir = folder.path("");
    let readme = folder.file("README.md", "# A text of some words\n".repeat(400));
    let trained = |args: &[&str]| {
        let program = env!("CARGO_BIN_EXE_shardgrad");
        let short = ["train", "--preset", "tiny", "--steps", "1", "--eval-every", "0", "--mesh", "dp=1"];
        let output = Command::new(program).args(short).args(args).current_dir(&dir).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    // Without --data the sources of the working directory are read.
    let (code, said) = trained(&["--out", "out", "--trace", "README.md"]);
    assert!(
        code == Some(2) && said.contains("--trace README.md would replace a file of README.md"),
        "{said}"
    );
    assert!(std::fs::read_to_string(&readme).unwrap().starts_with("# A text"));
    let (code, said) = trained(&["--out", "out"]);
    assert_eq!(code, Some(0), "{said}");
    let out = folder.path("out/model");
    let eval = |args: &[&str]| {
        let program = env!("CARGO_BIN_EXE_shardgrad");
        let output =
            Command::new(program).args(["eval", "--model", &out]).args(args).current_dir(&dir).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = eval(&["--logits", "README.md"]);
    assert!(code == Some(2) && said.contains("--logits README.md would replace"), "{said}");
    std::os::unix::fs::symlink(&readme, folder.path("out/link.txt")).unwrap();
    let (code, said) = eval(&["--data", "out"]);
    assert!(code == Some(2) && said.contains("link.txt: is a link, which is not followed"), "{said}");
    // The folder itself may be named by one.
    std::os::unix::fs::symlink(folder.path("texts"), folder.path("named")).unwrap();
    std::fs::create_dir(folder.path("texts")).unwrap();
    folder.file("texts/a.txt", "# A text of some words\n".repeat(400));
    let (code, said) = eval(&["--data", "named"]);
    assert_eq!(code, Some(0), "{said}");
    folder.file("out/model/vocab.json", "{}");
    let (code, said) = eval(&[]);
    assert!(
        code == Some(2) && said.contains("vocab.json: tokens are told here, but only tokenizer.json"),
        "{said}"
    );
    let (code, said) = told(&["bench", "card-kernels", "--device", "cpu"]);
    assert!(code == 2 && said.contains("--device cpu is none"), "{said}");
}

#[test]
fn files_that_never_end_are_refused() {
    let folder = Folder::new("endless");
    let fifo = folder.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for (option, file) in
        [("--schedule", &*fifo), ("--schedule", "/dev/zero"), ("--config", &fifo), ("--config", "/dev/zero")]
    {
        let (code, said) = told(&["plan", option, file]);
        assert!(code == 2 && said.contains("is a folder, a pipe or a device, not a file"), "{said}");
    }
    let long = folder.file("long.toml", "# comment\n".repeat(200_000));
    let (code, said) = told(&["plan", "--config", &long]);
    assert!(code == 2 && said.contains("has more than 1048576 bytes"), "{said}");
}

#[test]
fn a_value_that_begins_with_a_minus_is_a_value() {
    for (args, why) in [
        (&["train", "--lr", "-1"], "invalid value '-1' for '--lr <RATE>': must be a number above 0"),
        (&["train", "--seed", "-1"], "'--seed <N>': must be a whole number from 0 to 18446744073709551615"),
        (&["train", "--steps", "-5"], "'--steps <N>': must be a whole number of at least 1"),
        (&["eval", "--end-of-text", "-1"], "must be a whole number from 0 to 4294967295"),
        (&["plan", "--times", "-1,1,1"], "invalid value '-1,1,1' for '--times <F,I,W>'"),
        (&["train", "--shard-size", "-1"], "must be a number of bytes above 0"),
    ] {
        let (code, said) = told(args);
        assert!(code == 2 && said.contains(why), "{args:?}: {said}");
    }
    let (code, said) = told(&["generate", "--model", "/no/such/model", "--prompt", "- item"]);
    assert!(code == 2 && said.contains("/no/such/model") && !said.contains("unexpected argument"), "{said}");
    let (_, said) = told(&["generate", "--prompt", "x", "--temperature", "-1"]);
    assert!(said.contains("invalid value '-1' for '--temperature <X>'"), "{said}");
}

#[test]
fn an_option_without_effect_is_refused_with_a_repair() {
    let folder = Folder::new("idle");
    let data = folder.file("text", "The quick brown fox. ".repeat(100));
    let out = folder.path("out");
    for (more, parts) in [
        (&["--schedule", "gpipe", "--mesh", "dp=2"][..], &["--schedule is about a pipeline", "add pp=2"][..]),
        (&["--cut", "measured"], &["--cut is about a pipeline", "leave it out"]),
        (&["--width", "u16"], &["--width is about token numbers", ".bin"]),
    ] {
        let (code, said) = told(&[&["train", "--data", &data, "--out", &out], more].concat());
        assert!(code == 2 && parts.iter().all(|part| said.contains(part)), "{said}");
    }
    let (code, said) = told(&["explain", "--schedule", "gpipe"]);
    assert!(code == 2 && said.contains("--schedule is about a pipeline"), "{said}");
    assert!(
        shardgrad(&["explain", "--schedule", "gpipe", "--mesh", "pp=2", "--batch", "4"]).status.success()
    );
}
