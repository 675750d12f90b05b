//! `plan`: a pipeline schedule in time, proved, simulated and drawn.

use super::args::PlanArgs;
use crate::timeline;
use serde_json::json;
use shardgrad::autograd::pipeline::{Schedule, Times};
use shardgrad::prelude::*;

/// Runs the command.
pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let schedule = Schedule::named(&args.schedule, args.stages, args.microbatches)?;
    let num_stages = schedule.num_stages();
    let links: Vec<(usize, usize)> = (1..num_stages).map(|s| (s - 1, s)).collect();
    let verified = schedule.with_transfers(&links).verify(&links)?;
    // The times are those of a rank; its stages share them.
    let part = num_stages as f64 / args.stages as f64;
    let Times { forward, input, weight } = args.times;
    let each = Times { forward: forward / part, input: input / part, weight: weight / part };
    let timeline = schedule.simulate(&links, &vec![each; num_stages], args.transfer);
    let most = verified.peak_live.iter().max().copied().unwrap_or(0) as f64 / part;
    let title = format!(
        "{}: {} ranks, {} microbatches, bubble {:.2}%, at most {most:.1} microbatches held by a rank",
        schedule.name,
        args.stages,
        args.microbatches,
        100.0 * timeline.bubble()
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
        "bubble": timeline.bubble(), "peak_live": verified.peak_live, "stages": num_stages})
    );
    Ok(())
}
