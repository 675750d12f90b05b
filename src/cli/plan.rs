//! `plan`: a pipeline schedule in time, proved, simulated and drawn.

use super::args::PlanArgs;
use crate::outputs::check_target;
use crate::timeline;
use serde_json::json;
use shardgrad::autograd::pipeline::{Action, Schedule, Timeline, Times, Verified};
use shardgrad::nn::plan::PassOrder;
use shardgrad::prelude::*;
use std::path::Path;

/// The lists that were asked for.
fn lists(args: &PlanArgs) -> Result<Schedule> {
    match &args.schedule.passes {
        PassOrder::Named(name) => {
            let of = (args.stages.unwrap_or(4), args.microbatches.unwrap_or(8));
            Schedule::named_for(name, of, args.times, args.transfer)
        }
        PassOrder::Lists(lists) => {
            let there = [lists.ranks.len(), lists.num_microbatches];
            let asked = [args.stages.unwrap_or(there[0]), args.microbatches.unwrap_or(there[1])];
            if asked == there {
                return Ok(lists.clone());
            }
            let text = format!("the file has lists for {} ranks and {} microbatches", there[0], there[1]);
            Err(Error::new(Kind::Config, text).detail("help", "leave out --stages and --microbatches"))
        }
    }
}

/// The lists with transfers, and what was proved of them.
fn proved(schedule: &Schedule, links: &[(usize, usize)], blocking: bool) -> Result<(Schedule, Verified)> {
    let whole = schedule.with_transfers(links);
    let verified = whole.verify(links)?;
    if !blocking {
        return Ok((whole, verified));
    }
    // Only lists that hold can be laid on one line.
    let spells = schedule.ranks.iter().flatten().any(|action| matches!(action, Action::Send(_)));
    let whole = if spells { whole } else { schedule.with_meetings(links) };
    let verified = whole.verify_blocking(links)?;
    Ok((whole, verified))
}

/// The bubble of steps as `train` runs them, each from its first pass to its last; and, where that is another one, of steps
/// that overlap.
fn bubble(timeline: &Timeline) -> String {
    let [alone, overlapping] =
        [timeline.step_bubble(), timeline.bubble()].map(|part| format!("{:.2}%", 100.0 * part));
    if alone == overlapping { alone } else { format!("{alone} ({overlapping} if steps overlapped)") }
}

fn save(path: &Path, schedule: &Schedule) -> Result<()> {
    std::fs::write(path, schedule.to_text())
        .map_err(|e| Error::new(Kind::Io, format!("cannot write {}: {e}", path.display())))
}

/// Runs the command.
pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let read = args.schedule.file.as_deref();
    if let Some(path) = &args.save {
        check_target("--save", path, read)?;
    }
    if let Some(path) = &args.svg {
        check_target("--svg", path, read.into_iter().chain(args.save.as_deref()))?;
    }
    let schedule = lists(args)?;
    let (num_stages, num_ranks) = (schedule.num_stages(), schedule.ranks.len());
    let links: Vec<(usize, usize)> = (1..num_stages).map(|s| (s - 1, s)).collect();
    let (whole, verified) = proved(&schedule, &links, args.blocking)?;
    if let Some(path) = &args.save {
        save(path, if args.blocking { &whole } else { &schedule })?;
    }
    // The times are those of a rank; its stages share them.
    let part = num_stages as f64 / num_ranks as f64;
    let Times { forward, input, weight } = args.times;
    let each = Times { forward: forward / part, input: input / part, weight: weight / part };
    let timeline = schedule.simulate(&links, &vec![each; num_stages], args.transfer);
    let most = verified.peak_live.iter().max().copied().unwrap_or(0) as f64 / part;
    let title = format!(
        "{}: {} ranks, {} microbatches, bubble {}, at most {most:.1} microbatches held by a rank{}",
        schedule.name,
        num_ranks,
        schedule.num_microbatches,
        bubble(&timeline),
        if args.blocking { ", sends may wait" } else { "" }
    );
    if let Some(path) = &args.svg {
        timeline::write_svg(path, &title, &timeline)?;
    }
    if !args.json {
        println!("{title}\n");
        print!("{}", timeline::text(&timeline));
        return Ok(());
    }
    for (rank, span) in
        timeline.ranks.iter().enumerate().flat_map(|(rank, spans)| spans.iter().map(move |s| (rank, s)))
    {
        let action = span.action.to_string();
        println!(
            "{}",
            json!({"kind": "pass", "rank": rank, "action": action, "start": span.time.start, "end": span.time.end})
        );
    }
    println!(
        "{}",
        json!({"kind": "total", "schedule": schedule.name, "makespan": timeline.makespan(),
        "bubble": timeline.bubble(), "step_bubble": timeline.step_bubble(), "peak_live": verified.peak_live, "stages": num_stages})
    );
    Ok(())
}
