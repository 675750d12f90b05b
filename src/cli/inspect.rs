//! `inspect`: lists and verifies the files of a model, checkpoint or run folder.

mod folder;

use super::Failure;
use super::args::InspectArgs;
use super::explain::format_bytes;
use folder::{Checksum, FolderReport, TensorEntry, inspect};
use serde_json::{Value, json};
use shardgrad::{Error, Kind};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Maximum number of tensor groups listed per folder.
const GROUPS_MAX: usize = 100;
/// Fields of `config.json` that are shown, under the names of all model families.
const CONFIG_FIELDS: [&str; 16] = [
    "model_type",
    "n_layer",
    "num_hidden_layers",
    "n_embd",
    "hidden_size",
    "n_inner",
    "intermediate_size",
    "n_head",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "vocab_size",
    "n_positions",
    "max_position_embeddings",
    "torch_dtype",
];

/// Runs the command.
pub(super) fn run(args: &InspectArgs) -> Result<(), Failure> {
    let report = inspect(&args.dir)?;
    if args.json {
        println!("{}", to_json(&report));
    } else {
        print!("{}", to_text(&report));
    }
    let damage: Vec<&str> = report.all_damage().collect();
    if damage.is_empty() {
        return Ok(());
    }
    let text =
        format!("{} is damaged: {} error(s), the first: {}", args.dir.display(), damage.len(), damage[0]);
    let help = "restore the damaged files from a copy, or use another checkpoint; `train --resume` skips damaged checkpoints";
    Err(Failure::of_run(Error::new(Kind::Checkpoint, text).detail("help", help)))
}

/// Returns the shown fields of a config.
fn summary(config: &Value) -> Vec<(&'static str, String)> {
    let shown = |name: &'static str| {
        let value = config.get(name).filter(|value| !value.is_null())?;
        Some((name, value.as_str().map_or_else(|| value.to_string(), str::to_string)))
    };
    CONFIG_FIELDS.into_iter().filter_map(shown).collect()
}

/// Summarizes the checksums of some tensors.
fn verified(tensors: &[TensorEntry]) -> String {
    let count = |state: Checksum| tensors.iter().filter(|t| t.checksum == state).count();
    let (all, absent, damaged) = (tensors.len(), count(Checksum::Absent), count(Checksum::Damaged));
    match (absent, damaged) {
        (0, 0) => "verified".to_string(),
        (_, 0) if absent == all => "no checksum".to_string(),
        (_, 0) => format!("{absent} of {all} without checksum"),
        _ => format!("DAMAGED: {damaged} of {all}"),
    }
}

/// Replaces each number in the name of a tensor by `*`, so that equal layers are listed as one.
fn pattern(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let part = |part: &str| if is_number(part) { "*".to_string() } else { part.to_string() };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// Lists the tensors of a folder, one line per name pattern, dtype and shape.
fn tensor_lines(tensors: &[TensorEntry]) -> Vec<String> {
    let mut groups: Vec<Vec<TensorEntry>> = Vec::new();
    let mut places = BTreeMap::new();
    for tensor in tensors {
        let key = (pattern(&tensor.name), tensor.dtype, tensor.shape.clone());
        let place = *places.entry(key).or_insert(groups.len());
        match groups.get_mut(place) {
            Some(group) => group.push(tensor.clone()),
            None => groups.push(vec![tensor.clone()]),
        }
    }
    let line = |group: &Vec<TensorEntry>| {
        let (first, bytes) = (&group[0], group.iter().map(|t| t.bytes).sum());
        let name = if group.len() > 1 { pattern(&first.name) } else { first.name.clone() };
        let layout = format!("{}{:?}", first.dtype, first.shape);
        format!(
            "{name:<44} {layout:<20} {:>5} x {:>10}  {}",
            group.len(),
            format_bytes(bytes),
            verified(group)
        )
    };
    let mut lines: Vec<String> = groups.iter().take(GROUPS_MAX).map(line).collect();
    let more = groups.iter().skip(GROUPS_MAX).map(Vec::len).sum::<usize>();
    lines.extend((more > 0).then(|| format!("and {more} more; --json lists all")));
    lines
}

fn to_text(report: &FolderReport) -> String {
    let mut out = String::new();
    let state = if report.all_damage().next().is_some() { "DAMAGED" } else { "sound" };
    let _ = writeln!(out, "{}: {}, {state}", report.path.display(), report.kind.name());
    let mut row = |label: &str, text: &str| {
        let _ = writeln!(out, "  {label:<10} {text}");
    };
    report.damage.iter().for_each(|fault| row("damage", fault));
    if let Some(config) = &report.config {
        let fields: Vec<String> =
            summary(config).iter().map(|(name, value)| format!("{name}={value}")).collect();
        row("config", &fields.join(" "));
    }
    if let Some(run) = &report.run {
        row("step", &run.step.to_string());
        row("optimizer", &format!("{}, {} steps", run.optimizer, run.num_steps));
        let options: Vec<String> =
            run.options.iter().map(|(name, value)| format!("{name}={value}")).collect();
        row("options", &options.join(" "));
    }
    for (name, bytes) in &report.files {
        row("file", &format!("{name:<44} {:>10}", format_bytes(*bytes)));
    }
    if !report.tensors.is_empty() {
        let bytes = report.tensors.iter().map(|t| t.bytes).sum();
        row(
            "tensors",
            &format!("{} of {}: {}", report.tensors.len(), format_bytes(bytes), verified(&report.tensors)),
        );
        tensor_lines(&report.tensors).iter().for_each(|line| row("", line));
    }
    for part in &report.parts {
        out += "\n";
        out += &to_text(part);
    }
    out
}

fn to_json(report: &FolderReport) -> Value {
    let tensor = |t: &TensorEntry| {
        json!({
            "name": t.name, "file": t.file, "dtype": t.dtype.to_string(), "shape": t.shape, "bytes": t.bytes,
            "checksum": t.checksum.name(),
        })
    };
    let mut value = json!({
        "path": report.path.display().to_string(),
        "type": report.kind.name(),
        "sound": report.all_damage().next().is_none(),
        "damage": report.damage,
        "files": report.files.iter().map(|(name, bytes)| json!({"name": name, "bytes": bytes})).collect::<Vec<_>>(),
        "tensors": report.tensors.iter().map(tensor).collect::<Vec<_>>(),
    });
    if let Some(config) = &report.config {
        value["config"] = config.clone();
    }
    if let Some(run) = &report.run {
        value["step"] = run.step.into();
        value["optimizer"] = run.optimizer.clone().into();
        value["optimizer_steps"] = run.num_steps.into();
        value["options"] = json!(run.options);
    }
    if !report.parts.is_empty() {
        value["parts"] = report.parts.iter().map(to_json).collect();
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad::prelude::DType;

    #[test]
    fn tensors_of_equal_layers_are_listed_in_one_line() {
        let entry = |name: &str, shape: &[usize], checksum| TensorEntry {
            name: name.to_string(),
            file: "model.safetensors".to_string(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            bytes: 4 * shape.iter().product::<usize>() as u64,
            checksum,
        };
        let tensors = [
            entry("h.0.w", &[2, 3], Checksum::Verified),
            entry("wte.weight", &[5], Checksum::Absent),
            entry("h.1.w", &[2, 3], Checksum::Damaged),
            entry("h.10.w", &[3, 3], Checksum::Verified),
        ];
        let words = |line: &String| line.split_whitespace().map(String::from).collect::<Vec<_>>().join(" ");
        assert_eq!(
            tensor_lines(&tensors).iter().map(words).collect::<Vec<_>>(),
            [
                "h.*.w f32[2, 3] 2 x 48 B DAMAGED: 1 of 2",
                "wte.weight f32[5] 1 x 20 B no checksum",
                "h.10.w f32[3, 3] 1 x 36 B verified",
            ]
        );
        let many: Vec<TensorEntry> =
            (1..=GROUPS_MAX + 2).map(|n| entry("h.0.w", &[n], Checksum::Verified)).collect();
        assert_eq!(tensor_lines(&many).last().unwrap(), "and 2 more; --json lists all");
    }
}
