//! `ops`: the registry of ops as a table.

use super::args::OpsArgs;
use serde_json::json;
use shardgrad::Result;
use shardgrad::tensor::catalog::{Form, forms};
use std::fmt::Write as _;

/// What stands above the table, in the terminal and in docs/ops.md.
const LEGEND: &str = "\
`T` is any float, `acc` its accumulator (f32 for the 16-bit floats). FLOPs are counted for each tuple of indices that
the signature runs over. Layouts are those of the arguments and results on one mesh axis that need no step: `@d` splits
dim d, `+` is a pending sum, `~` a copy (an invariant copy, `=`, may stand for it); all arguments copies goes without
saying. Other layouts are completed, cast, or refused with a list of repairs.";

/// How wide a line of docs/ops.md is that is no row of a table.
const WIDTH: usize = 120;

/// Runs the command.
pub(crate) fn run(args: &OpsArgs) -> Result<()> {
    let forms = forms()?;
    if args.json {
        forms.iter().for_each(|form| println!("{}", line(form)));
    } else if args.markdown {
        print!("{}", markdown(&forms));
    } else {
        print!("{}", text(&forms));
    }
    Ok(())
}

fn line(form: &Form) -> serde_json::Value {
    json!({"op": form.op, "file": form.file, "doc": form.doc, "signature": form.signature,
        "linear_in": form.linear_in, "num_saved": form.num_saved, "dtypes": form.dtypes,
        "flops_per_index": form.flops_per_index, "layouts": form.rows})
}

/// `0; 1` for an op that is linear in each argument alone, `0 1` for one that is in both together.
fn groups(form: &Form) -> String {
    let group = |g: &Vec<usize>| g.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
    form.linear_in.iter().map(group).collect::<Vec<_>>().join("; ")
}

/// Two digits behind the point, if there is anything behind it.
fn flops(form: &Form) -> String {
    let text = format!("{:.2}", form.flops_per_index);
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn text(forms: &[Form]) -> String {
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
            if form.rows.is_empty() { "copies only".to_string() } else { form.rows.join(" | ") }
        );
    }
    text
}

/// A text in lines of at most [`WIDTH`].
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

/// docs/ops.md.
fn markdown(forms: &[Form]) -> String {
    let mut text = format!(
        "# Ops\n\nPrinted from the registry by `cargo run --release -- ops --markdown > docs/ops.md`; a test compares.\n\n\
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
