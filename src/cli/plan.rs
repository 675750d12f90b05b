//! `plan`: verifies, simulates and draws a pipeline schedule.

use super::args::PlanArgs;
use crate::outputs::check_target;
use crate::timeline;
use serde_json::json;
use shardgrad::autograd::pipeline::{Action, PassTimes, Schedule, Timeline, Verified};
use shardgrad::nn::plan::PipelineSchedule;
use shardgrad::prelude::*;
use std::path::Path;

/// Returns the requested schedule.
fn lists(args: &PlanArgs) -> Result<Schedule> {
    match &args.schedule.passes {
        PipelineSchedule::Named(name) => {
            let of = (args.stages.unwrap_or(4), args.microbatches.unwrap_or(8));
            Schedule::named_for(name, of, args.times, args.transfer)
        }
        PipelineSchedule::Actions(lists) => {
            let of_file = [lists.ranks.len(), lists.num_microbatches];
            let requested = [args.stages.unwrap_or(of_file[0]), args.microbatches.unwrap_or(of_file[1])];
            if requested == of_file {
                return Ok(lists.clone());
            }
            let text =
                format!("the schedule file is for {} ranks and {} microbatches", of_file[0], of_file[1]);
            Err(Error::new(Kind::Config, text).detail("help", "omit --stages and --microbatches"))
        }
    }
}

/// Adds transfers to a schedule and verifies it.
fn verified_with_transfers(
    schedule: &Schedule,
    links: &[(usize, usize)],
    blocking: bool,
) -> Result<(Schedule, Verified)> {
    let with_transfers = schedule.with_transfers(links);
    let verified = with_transfers.verify(links)?;
    if !blocking {
        return Ok((with_transfers, verified));
    }
    // Rendezvous transfers are placed along a linear order of all passes, which only a valid schedule has.
    let has_transfers = schedule.ranks.iter().flatten().any(|action| matches!(action, Action::Send(_)));
    let with_transfers = if has_transfers { with_transfers } else { schedule.with_blocking_transfers(links) };
    let verified = with_transfers.verify_blocking(links)?;
    Ok((with_transfers, verified))
}

/// Formats the bubble of steps that run one after the other, as in `train`, and of overlapping steps where it differs.
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
    let (with_transfers, verified) = verified_with_transfers(&schedule, &links, args.blocking)?;
    if let Some(path) = &args.save {
        save(path, if args.blocking { &with_transfers } else { &schedule })?;
    }
    // Times are per rank; its stages share them.
    let part = num_stages as f64 / num_ranks as f64;
    let PassTimes { forward, input, weight } = args.times;
    let each = PassTimes { forward: forward / part, input: input / part, weight: weight / part };
    let timeline = schedule.simulate(&links, &vec![each; num_stages], args.transfer);
    let most = verified.peak_live.iter().max().copied().unwrap_or(0) as f64 / part;
    let title = format!(
        "{}: {} ranks, {} microbatches, bubble {}, at most {most:.1} microbatches in memory per rank{}",
        schedule.name,
        num_ranks,
        schedule.num_microbatches,
        bubble(&timeline),
        if args.blocking { ", blocking sends" } else { "" }
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
