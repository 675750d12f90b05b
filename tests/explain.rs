//! What `explain` tells of two blocks of each family, kept in `snapshots`: layouts, collectives with bytes and lines,
//! totals. `INSTA_UPDATE=always cargo test explain` writes them anew.

use crate::cli::{Folder, shardgrad};
use shardgrad::nn::{Gpt2Config, LlamaConfig, LlamaKind, ModelConfig};

/// The output without line numbers and folders.
fn explained(folder: &Folder, mesh: &str) -> String {
    let dir = folder.path("");
    let given =
        ["explain", "--model", &dir, "--mesh", mesh, "--batch", "8", "--seq", "16", "--microbatches", "2"];
    let output = shardgrad(&given);
    assert!(output.status.success(), "{output:?}");
    let steady = |line: &str| match line.split_once(".rs:") {
        Some((before, _)) => format!("{before}.rs:LINE"),
        None => line.replace(&dir, "FOLDER"),
    };
    String::from_utf8(output.stdout).unwrap().lines().map(steady).collect::<Vec<_>>().join("\n")
}

#[test]
fn blocks_under_every_split_and_their_product() {
    let (gpt2, llama) = (Folder::new("explain-gpt2"), Folder::new("explain-llama"));
    ModelConfig::from(Gpt2Config::new(50, 16, 24, 2, 4)).write(gpt2.path("").as_ref()).unwrap();
    let config = LlamaConfig::new(LlamaKind::Llama, 50, 16, [24, 64], 2, [4, 2]);
    ModelConfig::from(config).write(llama.path("").as_ref()).unwrap();
    for (family, folder) in [("gpt2", gpt2), ("llama", llama)] {
        for mesh in ["dp=2", "tp=2", "pp=2", "pp=2,dp=2,tp=2"] {
            let name = format!("{family}_{}", mesh.replace(['=', ','], "_"));
            insta::assert_snapshot!(name, explained(&folder, mesh));
        }
    }
}
