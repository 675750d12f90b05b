//! `ops`: the op registry as a table.

use super::args::OpsArgs;
use serde_json::json;
use shardgrad::Result;
use shardgrad::tensor::op_table::{OpEntry, entries};
use std::fmt::Write as _;

/// Legend above the table, in the terminal and in docs/ops.md.
const LEGEND: &str = "\
`T` is any float dtype, `acc` its accumulator dtype (f32 for the 16-bit floats). FLOPs are per index tuple of the
signature. Layouts are states of arguments and results on one mesh axis that need no communication: `@d` shards dim d,
`+` is a partial (pending) sum, `~` a replicated copy (an invariant copy, `=`, may take its place); all arguments
replicated is always supported and not listed. Other layouts are redistributed, or refused with suggested fixes.";

/// Line width of the text of docs/ops.md.
const WIDTH: usize = 120;

/// Runs the command.
pub(crate) fn run(args: &OpsArgs) -> Result<()> {
    let forms = entries()?;
    if args.json {
        forms.iter().for_each(|form| println!("{}", line(form)));
    } else if args.markdown {
        print!("{}", markdown(&forms));
    } else {
        print!("{}", text(&forms));
    }
    Ok(())
}

fn line(form: &OpEntry) -> serde_json::Value {
    json!({"op": form.op, "file": form.file, "doc": form.doc, "signature": form.signature,
        "linear_in": form.linear_in, "num_saved": form.num_saved, "dtypes": form.dtypes,
        "flops_per_index": form.flops_per_index, "layouts": form.rows})
}

/// Formats the argument groups in which an op is linear: `0; 1` in each alone, `0 1` jointly.
fn groups(form: &OpEntry) -> String {
    let group = |g: &Vec<usize>| g.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
    form.linear_in.iter().map(group).collect::<Vec<_>>().join("; ")
}

/// Formats FLOPs with up to two decimals.
fn flops(form: &OpEntry) -> String {
    let text = format!("{:.2}", form.flops_per_index);
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn text(forms: &[OpEntry]) -> String {
    let mut text = format!("{}\n", LEGEND.replace('`', ""));
    let mut file = "";
    for form in forms {
        if form.file != file {
            file = form.file;
            let _ = write!(text, "\n{}\n", form.doc);
        }
        let (linear, flops) = (groups(form), flops(form));
        let linear = if linear.is_empty() { String::new() } else { format!("   linear in {linear}") };
        let _ = write!(
            text,
            "  {:<22} {}   {}{linear}   {flops} FLOPs\n{:25}{}\n",
            form.op,
            form.signature,
            form.dtypes,
            "",
            if form.rows.is_empty() { "replicated only".to_string() } else { form.rows.join(" | ") }
        );
    }
    text
}

/// Wraps a text at [`WIDTH`] characters.
fn wrapped(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_string()),
        }
    }
    lines.join("\n")
}

/// Formats docs/ops.md.
fn markdown(forms: &[OpEntry]) -> String {
    let mut text = format!(
        "# Ops\n\nGenerated from the op registry by `cargo run --release -- ops --markdown > docs/ops.md`; a test checks it.\n\n\
         {LEGEND}\n"
    );
    let mut file = "";
    for form in forms {
        if form.file != file {
            file = form.file;
            let _ = write!(
                text,
                "\n## {file}\n\n{}\n\n\
                 | op | signature | linear in | dtypes | FLOPs | layouts on one axis |\n|---|---|---|---|---|---|\n",
                wrapped(&form.doc)
            );
        }
        let rows: Vec<String> = form.rows.iter().map(|r| format!("`{r}`")).collect();
        let _ = writeln!(
            text,
            "| `{}` | `{}` | {} | `{}` | {} | {} |",
            form.op,
            form.signature,
            groups(form),
            form.dtypes,
            flops(form),
            rows.join("<br>")
        );
    }
    text
}
