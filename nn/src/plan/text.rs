//! The text form of a plan: one item per line, printed by `Display` and read by `FromStr`.

use super::gradient_buckets::parse_gradient_buckets;
use super::rule::{OPTIONAL, Presence, Rule};
use super::sharded_data::ZeroAxis;
use super::{Plan, RuleTarget};
use crate::module::name::nearest;
use shardgrad_autograd::pipeline::{Cut, Schedule};
use shardgrad_tensor::{Error, Kind, Result};
use std::fmt;
use std::str::FromStr;

/// The words with which a line begins.
const ITEMS: [&str; 10] = [
    "store",
    "compute",
    "point",
    "batch",
    "zero",
    "gather_group",
    "gathered_bytes_max",
    "gradient_buckets",
    "regather",
    "pipeline",
];
/// The mark of a rule of a kind.
const ONE_OF: &str = "one-of";

/// One item per line: the pipeline, the batch axes, the stages of ZeRO, the gather groups and the bytes that stay gathered, the
/// buckets of gradients, the regathered points, the rules in order.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pipeline.iter().try_for_each(|pipeline| writeln!(f, "{pipeline}"))?;
        self.batch.iter().try_for_each(|(axis, dim)| writeln!(f, "batch {axis}@{dim}"))?;
        self.zero.iter().try_for_each(|zero| writeln!(f, "{zero}"))?;
        self.gather_groups.iter().try_for_each(|modules| writeln!(f, "gather_group {modules}"))?;
        self.gathered_bytes_max.iter().try_for_each(|bytes| writeln!(f, "gathered_bytes_max {bytes}"))?;
        self.write_gradient_buckets(f)?;
        self.regathered_points.iter().try_for_each(|points| writeln!(f, "{points}"))?;
        let write_rule = |rule: &Rule| match &rule.presence {
            Presence::Required => writeln!(f, "{rule}"),
            Presence::Optional => writeln!(f, "{rule} {OPTIONAL}"),
            Presence::OneOf(kind) => writeln!(f, "{rule} {ONE_OF} {kind}"),
        };
        self.rules.iter().try_for_each(write_rule)
    }
}

impl FromStr for Plan {
    type Err = Error;

    /// Parses the text that a plan prints; `#` begins a comment.
    ///
    /// # Errors
    /// `Kind::Config` with every line that is no item, and the reason.
    fn from_str(text: &str) -> Result<Plan> {
        let (mut plan, mut faults) = (Plan::new(), Vec::new());
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            match parse_item(line) {
                Ok(item) if item.pipeline.is_some() && plan.pipeline.is_some() => {
                    faults.push((number + 1, line, "a plan has one pipeline".to_string()));
                }
                Ok(item) => plan = plan.and(item),
                Err(why) => faults.push((number + 1, line, why)),
            }
            faults.extend(plan.errors.drain(..).map(|why| (number + 1, line, why)));
        }
        if faults.is_empty() {
            return Ok(plan);
        }
        let error = Error::new(Kind::Config, format!("{} line(s) of the plan cannot be read", faults.len()));
        let with_fault = |error: Error, (number, line, why): (usize, &str, String)| {
            error.detail("line", format!("{number}: {line}: {why}"))
        };
        let error = faults.into_iter().fold(error, with_fault);
        Err(error.detail("help", "write one item per line, as in `store h.*.mlp.c_fc.weight tp@1`, `batch dp@0`, `point keys cp~` or `pipeline pp 1f1b balanced`"))
    }
}

/// Parses a line without its comment as a plan of one item, or of none if the line is empty.
fn parse_item(line: &str) -> Result<Plan, String> {
    let mut words = line.split_whitespace();
    let Some(item) = words.next() else { return Ok(Plan::new()) };
    let words: Vec<&str> = words.collect();
    match item {
        "store" => parse_rule(RuleTarget::Store, &words),
        "compute" => parse_rule(RuleTarget::Compute, &words),
        "point" => parse_rule(RuleTarget::Point, &words),
        "batch" => parse_batch(&words),
        "zero" => parse_zero(&words),
        "gather_group" => match *words {
            [modules] => Ok(Plan::new().gather_group(modules)),
            _ => Err("write `gather_group PATTERN`, as in `gather_group h.*.attn`".to_string()),
        },
        "gathered_bytes_max" => match *words {
            [bytes] if bytes.parse::<usize>().is_ok() => {
                Ok(Plan { gathered_bytes_max: bytes.parse().ok(), ..Plan::new() })
            }
            _ => Err("write `gathered_bytes_max BYTES`, as in `gathered_bytes_max 2147483648`".to_string()),
        },
        "gradient_buckets" => parse_gradient_buckets(&words),
        "regather" => match *words {
            [points] => Ok(Plan::new().regather(points)),
            [points, OPTIONAL] => Ok(Plan::new().regather_if_present(points)),
            _ => Err("write `regather PATTERN`, as in `regather h.*.ln_1.out`".to_string()),
        },
        "pipeline" => parse_pipeline(&words),
        _ => {
            let near = nearest(item, ITEMS)
                .first()
                .map_or(String::new(), |near| format!("; did you mean `{near}`?"));
            Err(format!("an item begins with {}{near}", ITEMS.join(", ")))
        }
    }
}

/// Parses `PATTERN WORD.. [optional | one-of KIND]`.
fn parse_rule(target: RuleTarget, words: &[&str]) -> Result<Plan, String> {
    let Some((pattern, words)) = words.split_first() else {
        return Err("the rule has no pattern".to_string());
    };
    let end = words.iter().position(|word| [OPTIONAL, ONE_OF].contains(word)).unwrap_or(words.len());
    let (placements, mark) = words.split_at(end);
    let presence = match mark {
        [] => Presence::Required,
        [OPTIONAL] => Presence::Optional,
        [ONE_OF, kind @ ..] if !kind.is_empty() => Presence::OneOf(kind.join(" ").into()),
        [ONE_OF] => return Err(format!("`{ONE_OF}` names no kind")),
        [mark, ..] => return Err(format!("a rule ends with `{mark}`, but words follow")),
    };
    let mut plan = Plan::new().rule(target, pattern, &placements.join(" "), presence);
    match std::mem::take(&mut plan.errors) {
        faults if faults.is_empty() => Ok(plan),
        faults => Err(faults.join("; ")),
    }
}

/// Parses `AXIS@DIM..`.
fn parse_batch(words: &[&str]) -> Result<Plan, String> {
    let parse_axis = |word: &&str| {
        let axis = word.split_once('@').and_then(|(axis, dim)| Some((axis, dim.parse::<usize>().ok()?)));
        let axis = axis.filter(|(axis, _)| is_axis_name(axis));
        axis.map(|(axis, dim)| (axis.to_string(), dim)).ok_or_else(|| format!("`{word}` is not axis@dim"))
    };
    let batch = words.iter().map(parse_axis).collect::<Result<Vec<_>, _>>()?;
    match batch.is_empty() {
        true => Err("the batch has no axis; write axis@dim".to_string()),
        false => Ok(Plan { batch, ..Plan::new() }),
    }
}

/// Parses `STAGE AXIS`.
fn parse_zero(words: &[&str]) -> Result<Plan, String> {
    match *words {
        [stage @ ("1" | "2" | "3"), axis] if is_axis_name(axis) => {
            let zero = ZeroAxis { axis: axis.to_string(), stage: stage.parse().unwrap_or_default() };
            Ok(Plan { zero: vec![zero], ..Plan::new() })
        }
        _ => Err("write `zero STAGE AXIS` with stage 1, 2 or 3, as in `zero 3 fsdp`".to_string()),
    }
}

/// Parses `AXIS [SCHEDULE [CUT]]`.
fn parse_pipeline(words: &[&str]) -> Result<Plan, String> {
    let (axis, schedule, cut) = match *words {
        [axis] => (axis, "1f1b", "balanced"),
        [axis, schedule] => (axis, schedule, "balanced"),
        [axis, schedule, cut] => (axis, schedule, cut),
        _ => return Err("write `pipeline AXIS SCHEDULE CUT`, as in `pipeline pp 1f1b balanced`".to_string()),
    };
    if !is_axis_name(axis) {
        return Err(format!("`{axis}` is not the name of an axis"));
    }
    let text_of = |error: Error| error.message().to_string();
    // With one stage and one microbatch every name makes a schedule.
    Schedule::named(schedule, 1, 1).map_err(text_of)?;
    let cut: Cut = cut.parse().map_err(text_of)?;
    Ok(Plan::pipeline_parallel(axis).pipeline_schedule(schedule).pipeline_cut(cut))
}

/// Whether a word can name a mesh axis.
fn is_axis_name(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_of_all_families_and_styles_are_read_as_printed() {
        let own = Plan::pipeline_parallel("pp")
            .pipeline_schedule("interleaved-2")
            .pipeline_cut(Cut::Layers(vec![3, 5]))
            .and(Plan::copies("other"))
            .store("*.weight", "x@0|@1|= y@1")
            .compute("*.weight", "x~")
            .point("h.*.out", "x+ y@0");
        let cut_at =
            Plan::pipeline_parallel("stages").pipeline_cut(Cut::At(vec!["h.2".into(), "head".into()]));
        let sharded = Plan::gpt2()
            .and(Plan::sequence_parallel("tp"))
            .and(Plan::zero(2, "dp"))
            .and(Plan::fsdp("fsdp"))
            .gather_group("h.*.attn")
            .gathered_bytes_max(1 << 31)
            .gradient_buckets(1 << 10, 1 << 20);
        for plan in
            [Plan::new(), Plan::gpt2(), Plan::llama(), Plan::llama_moe(), Plan::bert(), own, cut_at, sharded]
        {
            // The axes that builder methods refer to are no part of the text.
            let plan = Plan { tensor_axis: None, expert_axis: None, context_axis: None, ..plan };
            assert_eq!(plan.to_string().parse::<Plan>().unwrap(), plan, "{plan}");
        }
    }

    #[test]
    fn presence_is_a_part_of_the_text() {
        let text = Plan::gpt2().to_string();
        assert!(text.contains("store wte.weight tp@0 one-of token embedding\n"), "{text}");
        assert!(text.contains("store lm_head.weight tp@0 optional\n"), "{text}");
        assert!(text.starts_with("pipeline pp 1f1b balanced\nbatch dp@0\n"), "{text}");
    }

    #[test]
    fn comments_empty_lines_and_defaults_are_accepted() {
        let text =
            "# rows over dp\n\nbatch dp@0 cp@1  # and tokens\n\t store  a.*  x@0   y@1\r\npipeline pp\n";
        let plan: Plan = text.parse().unwrap();
        assert_eq!(
            plan.to_string(),
            "pipeline pp 1f1b balanced\nbatch dp@0\nbatch cp@1\nstore a.* x@0\nstore a.* y@1\n"
        );
        assert_eq!("# nothing\n".parse::<Plan>().unwrap(), Plan::new());
    }

    #[test]
    fn every_fault_is_reported_with_its_line() {
        let fault = |line: &str| {
            let error = format!("batch dp@0\n{line}  # a comment\n").parse::<Plan>().unwrap_err();
            assert_eq!(
                (error.kind(), error.message()),
                (Kind::Config, "1 line(s) of the plan cannot be read")
            );
            let (label, text) = error.details().first().map(|(label, text)| (*label, text.clone())).unwrap();
            assert_eq!(label, "line");
            text.strip_prefix(&format!("2: {line}: ")).unwrap_or_else(|| panic!("{text}")).to_string()
        };
        assert!(fault("stroe w tp@0").ends_with("pipeline; did you mean `store`?"));
        assert_eq!(fault("store"), "the rule has no pattern");
        assert!(fault("store w").contains("the rule has no placement"));
        assert!(fault("store w tp@x").contains("`tp@x` is not a placement"));
        assert!(fault("store w tp~").contains("stored parameters are sharded"));
        assert!(fault("point w tp@0|@1").contains("a point takes one placement"));
        assert_eq!(fault("store w tp@0 one-of"), "`one-of` names no kind");
        assert_eq!(fault("store w tp@0 optional tp@1"), "a rule ends with `optional`, but words follow");
        assert_eq!(fault("batch"), "the batch has no axis; write axis@dim");
        assert_eq!(fault("batch dp"), "`dp` is not axis@dim");
        assert_eq!(fault("batch dp@1"), "batch dp@1: the axis already shards dim 0 of batches");
        assert!(fault("pipeline").contains("pipeline AXIS SCHEDULE CUT"));
        assert!(
            fault("zero 4 dp").contains("with stage 1, 2 or 3") && fault("zero 1").contains("STAGE AXIS")
        );
        assert!(fault("gather_group").contains("gather_group PATTERN"));
        assert!(fault("gathered_bytes_max 2GB").contains("gathered_bytes_max BYTES"));
        assert!(fault("regather a b").contains("regather PATTERN"));
        assert!(fault("regather a optional b").contains("regather PATTERN"));
        assert!(fault("pipeline p-p").contains("`p-p` is not the name of an axis"));
        assert!(fault("pipeline pp 2f2b").contains("2f2b"));
        assert!(fault("pipeline pp 1f1b 3,,5").contains("is not a list of cuts"));
        let twice = "pipeline pp\nstore w tp\npipeline pp\n".parse::<Plan>().unwrap_err();
        assert!(
            twice.message().starts_with("2 line(s)")
                && twice.to_string().contains("3: pipeline pp: a plan has one")
        );
    }
}
