//! `train --deterministic mesh` and `--state-hash`: the same metrics, bit for bit, for every number of data-parallel ranks, of pipeline stages and of
//! microbatches, also after a resumption on other ranks; hashes of equal weights on every mesh.

use crate::cli::Folder;
use crate::resume::{record, refused, text, train};
use serde_json::Value;

/// The hashes of a run's steps.
fn hashes(record: &[Value]) -> Vec<Option<&str>> {
    record
        .iter()
        .map(|entry| entry.get("state_hash").map(|hash| hash.as_str().expect("hashes are texts")))
        .collect()
}

#[test]
fn metrics_have_the_same_bits_for_every_number_of_ranks_and_microbatches() {
    let folder = Folder::new("canonical-metrics");
    let data = text(&folder);
    let run = |name: &str, steps: &str, more: &[&str]| {
        let out = folder.0.join(name);
        let canonical =
            ["--deterministic", "mesh", "--state-hash", "1", "--dropout", "0.1", "--check-every", "1"];
        let options =
            ["--data", &data, "--out", out.to_str().unwrap(), "--steps", steps, "--save-every", "2"];
        train(&[&options[..], &canonical, more].concat());
        record(&out)
    };
    let alone = run("alone", "4", &["--mesh", "dp=1"]);
    assert!(hashes(&alone).iter().all(|hash| hash.is_some_and(|hash| hash.len() == 32)), "{alone:?}");
    for (mesh, microbatches) in [("dp=1", "4"), ("dp=2", "1"), ("dp=2", "2"), ("dp=4", "1"), ("tp=2", "1")] {
        let name = format!("{mesh}-{microbatches}");
        assert_eq!(run(&name, "4", &["--mesh", mesh, "--microbatches", microbatches]), alone, "{name}");
    }
    // The loss of an evaluation by pipeline stages agrees to rounding.
    let trained = |mut record: Vec<Value>| {
        record.iter_mut().for_each(|entry| drop(entry.as_object_mut().unwrap().remove("val_loss")));
        record
    };
    for mesh in ["pp=2", "pp=2,fsdp=2", "pp=2,tp=2"] {
        assert_eq!(trained(run(mesh, "4", &["--mesh", mesh])), trained(alone.clone()), "{mesh}");
    }
    let odd = |mesh: &str| run(&format!("odd-{mesh}"), "3", &["--mesh", mesh, "--sum-leaves", "24"]);
    assert_eq!(odd("tp=3"), odd("tp=2"), "8 and 12 of 24 leaves for each rank");
    run("parts", "2", &["--mesh", "dp=4"]);
    assert_eq!(run("parts", "4", &["--mesh", "dp=2", "--resume"]), alone, "resumed on another mesh");
    let other = folder.0.join("parts");
    let other = refused(&["--data", &data, "--out", other.to_str().unwrap(), "--steps", "6", "--resume"]);
    assert!(
        other.contains("canonical over 4 leaves of the batch and 8 of other sums (version 1)"),
        "{other}"
    );
}

#[test]
fn meshes_without_canonical_sums_and_idle_options_are_refused() {
    let folder = Folder::new("canonical-refused");
    let data = text(&folder);
    let out = folder.path("out");
    let mesh = |more: &[&str]| refused(&[&["--data", &data, "--out", &out, "--steps", "4"], more].concat());
    let text = mesh(&["--deterministic", "mesh", "--mesh", "cp=2"]);
    assert!(text.contains("sums over the mesh axis cp=2 have no canonical form yet"), "{text}");
    let text = mesh(&["--deterministic", "mesh", "--mesh", "tp=3"]);
    assert!(text.contains("tp=3 cannot share 8 leaves of sums") && text.contains("use 12 leaves"), "{text}");
    let text = mesh(&["--deterministic", "mesh", "--mesh", "dp=2", "--batch-leaves", "1"]);
    assert!(text.contains("use 2 leaves"), "{text}");
    let text = mesh(&["--batch-leaves", "4"]);
    assert!(text.contains("--batch-leaves has no effect without --deterministic mesh"), "{text}");
    let text = mesh(&["--sum-leaves", "4"]);
    assert!(text.contains("--sum-leaves has no effect without --deterministic mesh"), "{text}");
}

#[test]
fn hashes_come_at_their_interval_and_after_the_last_step() {
    let folder = Folder::new("state-hash");
    let (data, out) = (text(&folder), folder.0.join("out"));
    let options = ["--data", &data, "--out", out.to_str().unwrap(), "--steps", "5", "--state-hash", "2"];
    train(&[&options[..], &["--mesh", "pp=2"]].concat());
    let record = record(&out);
    assert!(hashes(&record).iter().map(Option::is_some).eq([false, true, false, true, true]), "{record:?}");
}
