//! Strangers at the ports of a run of processes: another user of the machine, hostile connections and their memory, and the token of
//! several machines.

use crate::cli::Folder;
use crate::processes::{assert_success, exit_codes_and_stderr, free_port, spawn_rank, stderr, write_text};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A user other than root: nobody.
const OTHER_USER: u32 = 65534;

fn train<'a>(data: &'a str, out: &'a str) -> Vec<&'a str> {
    let steps = ["--steps", "2", "--eval-every", "0", "--threads", "1"];
    [&["train", "--data", data, "--out", out, "--seq", "16", "--batch", "4"][..], &steps].concat()
}

/// Connects to rank 0 as soon as it listens.
fn connect(port: u16) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(e) => assert!(start.elapsed() < Duration::from_secs(30), "{e}"),
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// The file in which rank 0 leaves the token of a run on one machine.
fn left_token(port: u16) -> Option<String> {
    let user = fs::metadata("/proc/self").ok()?.uid();
    let named =
        std::env::var_os("XDG_RUNTIME_DIR").map(|dir| std::path::PathBuf::from(dir).join("shardgrad"));
    let fallback = std::env::temp_dir().join(format!("shardgrad-{user}"));
    let paths = named.into_iter().chain([fallback]).map(|dir| dir.join(format!("127.0.0.1-{port}.token")));
    paths.into_iter().find(|path| path.exists()).map(|path| path.display().to_string())
}

#[test]
#[allow(clippy::print_stdout, reason = "a test that is skipped says so")]
fn another_user_of_the_machine_cannot_join() {
    let is_root = fs::metadata("/proc/self").is_ok_and(|found| found.uid() == 0);
    if !is_root {
        println!("skipped: another user needs the tests to run as root");
        return;
    }
    let folder = Folder::new("other-user");
    let (data, out, port) = (write_text(&folder), folder.path("out"), free_port());
    let zero = spawn_rank(0, 2, port, &train(&data, &out));
    drop(connect(port));
    let start = Instant::now();
    let token = loop {
        match left_token(port) {
            Some(path) => break path,
            None => assert!(start.elapsed() < Duration::from_secs(30), "rank 0 has left no token"),
        }
        thread::sleep(Duration::from_millis(2));
    };
    let mode = fs::metadata(&token).unwrap().mode() & 0o777;
    assert_eq!(mode, 0o600, "{token}");
    // The other user cannot read the token, and cannot join without it.
    let read = Command::new("cat").arg(&token).uid(OTHER_USER).gid(OTHER_USER).output().unwrap();
    assert!(!read.status.success() && read.stdout.is_empty(), "{read:?}");
    // A copy of the program where that user can start it; in its own folders.
    let own = folder.path("nobody");
    fs::create_dir(&own).unwrap();
    let program = format!("{own}/shardgrad");
    fs::copy(env!("CARGO_BIN_EXE_shardgrad"), &program).unwrap();
    let shown = Command::new("chown").args(["-R", "65534:65534", &own]).status().unwrap();
    assert!(shown.success());
    let mut other = Command::new(&program);
    other.args(train(&data, &format!("{own}/out"))).args(["--timeout", "2"]).uid(OTHER_USER).gid(OTHER_USER);
    other.env_remove("XDG_RUNTIME_DIR").env("TMPDIR", &own).env("HOME", &own).current_dir("/");
    let variables = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];
    other.envs(variables).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    match other.stdin(Stdio::null()).output() {
        Err(e) => println!("skipped in part: the other user cannot start a program here: {e}"),
        Ok(output) => {
            let text = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{text}");
            assert!(text.contains("rank 1 did not connect to rank 0"), "{text}");
        }
    }
    // The run is undisturbed, and its token is gone.
    let one = spawn_rank(1, 2, port, &train(&data, &out));
    assert_success(&[zero, one].map(|child| child.wait_with_output().unwrap()));
    assert_eq!(left_token(port), None);
}

/// Resident bytes of a process.
fn resident_bytes(child: &Child) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
#[allow(clippy::print_stdout, reason = "the figure is a result")]
fn memory_of_a_rank_under_hostile_connections_is_bounded() {
    const NUM_CONNECTIONS: usize = 200;
    const BYTES_MAX: usize = 8 << 20;
    if !fs::exists("/proc/self/status").unwrap_or(false) {
        println!("skipped: this system does not show the memory of a process");
        return;
    }
    let folder = Folder::new("hostile");
    let (data, out, port) = (write_text(&folder), folder.path("out"), free_port());
    let zero = spawn_rank(0, 2, port, &train(&data, &out));
    drop(connect(port));
    // Reading the inputs has ended when the memory stays the same.
    let mut before = 0;
    loop {
        thread::sleep(Duration::from_millis(300));
        let now = resident_bytes(&zero);
        if now == std::mem::replace(&mut before, now) {
            break;
        }
    }
    let mut peak = before;
    let hostile = |at: usize| {
        thread::spawn(move || {
            let mut stream = connect(port);
            let _ = stream.set_write_timeout(Some(Duration::from_millis(500)));
            // Announced lengths of 3 GiB, a megabyte of zeros, or nothing at all.
            let prefix = [&[1u8][..], &[255; 8], &(3u64 << 30).to_le_bytes()].concat();
            let sent = [prefix.repeat(1000), vec![0; 1 << 20], Vec::new()][at % 3].clone();
            let _ = stream.write_all(&sent);
            let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert!(answer.is_empty(), "a stranger gets an answer");
            stream
        })
    };
    let started: Vec<_> = (0..NUM_CONNECTIONS).map(hostile).collect();
    for _ in 0..20 {
        peak = peak.max(resident_bytes(&zero));
        thread::sleep(Duration::from_millis(25));
    }
    let open: Vec<TcpStream> = started.into_iter().map(|one| one.join().unwrap()).collect();
    peak = peak.max(resident_bytes(&zero));
    println!(
        "rank 0: {before} bytes resident, at most {} more with {NUM_CONNECTIONS} hostile connections",
        peak - before
    );
    assert!(peak - before < BYTES_MAX, "{before} bytes resident, then {peak}");
    let one = spawn_rank(1, 2, port, &train(&data, &out));
    assert_success(&[zero, one].map(|child| child.wait_with_output().unwrap()));
    drop(open);
}

/// Starts two ranks as on two machines: nothing states that both are here, and the address is not the loopback address.
fn run_apart(
    own: [&[&str]; 2],
    variables: &[(&str, &str)],
    args: &[&str],
) -> (Vec<Option<i32>>, Vec<String>) {
    let port = free_port().to_string();
    let started = [0, 1].map(|rank: usize| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shardgrad"));
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("LOCAL_RANK", "0");
        command.env("LOCAL_WORLD_SIZE", "1").env("MASTER_ADDR", "0.0.0.0").env("MASTER_PORT", &port);
        command.envs(variables.iter().copied()).args(args).args(own[rank]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    exit_codes_and_stderr(&started.map(|child| child.wait_with_output().unwrap()))
}

#[test]
#[allow(clippy::print_stdout, reason = "a test that is skipped says so")]
fn ranks_on_several_machines_need_a_token() {
    let folder = Folder::new("apart");
    let (data, out) = (write_text(&folder), folder.path("out"));
    let (codes, messages) = run_apart([&[]; 2], &[], &train(&data, &out));
    if messages.iter().any(|text| text.contains("cannot listen on port")) {
        println!("skipped: this machine has no address in a network");
        return;
    }
    // The shared folder of the run carries the token.
    assert_eq!(codes, [Some(0); 2], "{messages:?}");
    let left = || {
        fs::read_dir(&out)
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains("token"))
    };
    assert_eq!(left().count(), 0, "the token stays");
    // Commands without such a folder are refused.
    let model = format!("{out}/model");
    let generate = ["generate", "--model", &model, "--prompt", "The", "--tokens", "2", "--mesh", "tp=2"];
    let (codes, messages) = run_apart([&[]; 2], &[], &generate);
    assert_eq!(codes, [Some(2); 2], "{messages:?}");
    for text in &messages {
        assert!(text.contains("error: ranks on several machines need a token"), "{text}");
        assert!(text.contains("SHARDGRAD_TOKEN") && text.contains("--token-file FILE"), "{text}");
    }
    let token = ("SHARDGRAD_TOKEN", "0123456789abcdef0123456789abcdef");
    let (codes, messages) = run_apart([&[]; 2], &[token], &generate);
    assert_eq!(codes, [Some(0); 2], "{messages:?}");
    let file = folder.file("token", "fedcba98765432100123456789abcdef\n");
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let (codes, messages) = run_apart([&["--token-file", &file]; 2], &[token], &generate);
    assert_eq!(codes, [Some(0); 2], "{messages:?}");
    let (codes, messages) = run_apart([&["--insecure"]; 2], &[], &generate);
    assert_eq!(codes, [Some(0); 2], "{messages:?}");
    assert!(
        messages[0].contains("--insecure: connections are neither authenticated nor encrypted"),
        "{messages:?}"
    );
    assert!(!messages[1].contains("--insecure"), "{messages:?}");
    // A failure of the options of one rank reaches the other, which has the token too.
    let (codes, messages) = run_apart([&["--bad"], &[]], &[token], &generate);
    assert_eq!(codes, [Some(2); 2], "{messages:?}");
    assert!(
        messages[1].contains("error: rank 0 refused to start: unexpected argument '--bad'"),
        "{messages:?}"
    );
}
