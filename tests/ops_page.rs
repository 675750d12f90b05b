//! docs/ops.md matches the output of `ops --markdown`.

use crate::cli::shardgrad;

#[test]
fn docs_ops_page_is_up_to_date() {
    let output = shardgrad(&["ops", "--markdown"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    let kept = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/ops.md")).unwrap();
    let different = printed.lines().zip(kept.lines()).find(|(new, old)| new != old);
    assert!(
        printed == kept,
        "docs/ops.md is out of date, first at {different:?}; run: cargo run --release -- ops --markdown > docs/ops.md"
    );
}

#[test]
fn ops_prints_json() {
    let output = shardgrad(&["ops", "--json"]);
    let lines = String::from_utf8(output.stdout).unwrap();
    let forms: Vec<serde_json::Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let product = forms.iter().find(|f| f["op"] == "matmul").unwrap();
    assert_eq!(product["signature"], "..m k, k n -> ..m n");
    assert!(product["layouts"].as_array().unwrap().contains(&"~, @1 -> @1".into()));
}
