//! Timelines of pipeline schedules as text and as SVG: one row per rank, and the microbatches in memory below.

use crate::plot::{FONT, INK};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use shardgrad::autograd::pipeline::{Action, Span, Timeline};
use shardgrad::{Error, Kind, Result};
use std::path::Path;

/// Maximum number of text columns.
const COLUMNS_MAX: f64 = 150.0;
/// Pixels of the SVG: width, left margin, heights of a row, of the title and of the memory curves.
const WIDTH: i32 = 1100;
const LEFT: i32 = 60;
const ROW: i32 = 26;
const TITLE: i32 = 44;
const MEMORY: i32 = 120;

const IDLE: RGBColor = RGBColor(241, 243, 245);
const FORWARD: RGBColor = RGBColor(116, 166, 232);
const BACKWARD: RGBColor = RGBColor(96, 180, 130);
const WEIGHT: RGBColor = RGBColor(240, 178, 98);

/// Formats one line per rank: each pass as its letter and microbatch, as wide as its duration.
pub(crate) fn text(timeline: &Timeline) -> String {
    let shortest = spans(timeline).map(|s| s.time.end - s.time.start).fold(f64::INFINITY, f64::min);
    let end = timeline.makespan();
    let scale = (3.0 / shortest.max(end * 1e-6)).min(COLUMNS_MAX / end);
    let column = |time: f64| (time * scale).round() as usize;
    let mut out = String::new();
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        let mut line = vec!['·'; column(end)];
        for span in spans {
            let cells = &mut line[column(span.time.start)..column(span.time.end)];
            let label = label(span.action);
            let fill = label.chars().next().unwrap_or(' ').to_ascii_lowercase();
            cells.iter_mut().for_each(|c| *c = fill);
            if label.len() <= cells.len() {
                cells.iter_mut().zip(label.chars()).for_each(|(cell, c)| *cell = c);
            }
        }
        let line: String = line.into_iter().collect();
        out += &format!("{rank:>3} {line}\n");
    }
    out + "\n    F forward, B backward, I input gradients, W weight gradients, · idle\n"
}

fn spans(timeline: &Timeline) -> impl Iterator<Item = &Span> {
    timeline.ranks.iter().flatten()
}

/// Returns the letter and microbatch of a pass.
fn label(action: Action) -> String {
    match action {
        Action::Forward { microbatch, .. } => format!("F{microbatch}"),
        Action::Backward { microbatch, .. } => format!("B{microbatch}"),
        Action::InputGradient { microbatch, .. } => format!("I{microbatch}"),
        Action::WeightGradient { microbatch, .. } => format!("W{microbatch}"),
        Action::Send(_) | Action::Receive(_) | Action::Reduce { .. } => String::new(),
    }
}

fn color(action: Action) -> RGBColor {
    match action {
        Action::Forward { .. } => FORWARD,
        Action::WeightGradient { .. } => WEIGHT,
        _ => BACKWARD,
    }
}

/// Draws a timeline into an SVG file.
///
/// # Errors
/// `Kind::Io` naming the file.
pub(crate) fn write_svg(path: &Path, title: &str, timeline: &Timeline) -> Result<()> {
    let svg = svg(title, timeline)?;
    std::fs::write(path, svg)
        .map_err(|e| Error::new(Kind::Io, format!("cannot write {}: {e}", path.display())))
}

fn svg(title: &str, timeline: &Timeline) -> Result<String> {
    let failed = |e: &dyn std::fmt::Display| Error::new(Kind::Io, format!("cannot draw the timeline: {e}"));
    let num_ranks = timeline.ranks.len() as i32;
    let height = TITLE + num_ranks * ROW + MEMORY + 30;
    let end = timeline.makespan().max(f64::MIN_POSITIVE);
    let x = |time: f64| LEFT + ((WIDTH - LEFT - 10) as f64 * time / end) as i32;
    let font = |size: i32| (FONT, size).into_font().color(&INK);
    let centred = |size: i32| font(size).pos(Pos::new(HPos::Center, VPos::Center));
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32)).into_drawing_area();
        area.fill(&WHITE).map_err(|e| failed(&e))?;
        area.draw(&Text::new(title, (LEFT, 14), font(15))).map_err(|e| failed(&e))?;
        for (rank, spans) in timeline.ranks.iter().enumerate() {
            let top = TITLE + rank as i32 * ROW;
            let row = |from: i32, to: i32| [(from, top), (to, top + ROW - 4)];
            let draw = |range: [(i32, i32); 2], color: RGBColor| {
                area.draw(&Rectangle::new(range, color.filled())).map_err(|e| failed(&e))
            };
            area.draw(&Text::new(format!("rank {rank}"), (8, top + 6), font(11))).map_err(|e| failed(&e))?;
            draw(row(LEFT, x(end)), IDLE)?;
            for span in spans {
                let (from, to) = (x(span.time.start), x(span.time.end));
                draw(row(from, (to - 1).max(from + 1)), color(span.action))?;
                let label = label(span.action);
                if to - from >= 7 * label.len() as i32 {
                    let middle = ((from + to) / 2, top + ROW / 2 - 2);
                    area.draw(&Text::new(label, middle, centred(11))).map_err(|e| failed(&e))?;
                }
            }
        }
        let top = TITLE + num_ranks * ROW + 12;
        area.draw(&Text::new("microbatches in memory", (8, top), font(11))).map_err(|e| failed(&e))?;
        let live: Vec<Vec<(f64, usize)>> =
            (0..timeline.ranks.len()).map(|rank| timeline.live(rank)).collect();
        let most = live.iter().flatten().map(|(_, n)| *n).max().unwrap_or(1).max(1) as f64;
        let y = |n: usize| top + 20 + ((MEMORY - 20) as f64 * (1.0 - n as f64 / most)) as i32;
        for (rank, curve) in live.iter().enumerate() {
            let shade = 60 + (140 * rank / live.len().max(1)) as u8;
            let mut points = vec![(x(0.0), y(0))];
            for &(time, n) in curve {
                let before = points[points.len() - 1].1;
                points.extend([(x(time), before), (x(time), y(n))]);
            }
            let stroke = RGBColor(shade, 96, 200 - shade / 2).stroke_width(1);
            area.draw(&PathElement::new(points, stroke)).map_err(|e| failed(&e))?;
        }
        area.draw(&Text::new(format!("{most}"), (LEFT - 20, y(most as usize) - 5), font(11)))
            .map_err(|e| failed(&e))?;
        area.present().map_err(|e| failed(&e))?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad::autograd::pipeline::{PassTimes, Schedule};

    fn timeline(schedule: &Schedule) -> Timeline {
        let n = schedule.num_stages();
        let links: Vec<(usize, usize)> = (1..n).map(|s| (s - 1, s)).collect();
        schedule.simulate(&links, &vec![PassTimes { forward: 1.0, input: 1.0, weight: 1.0 }; n], 0.0)
    }

    #[test]
    fn timeline_text_matches_hand_computed_example() {
        let text = text(&timeline(&Schedule::one_f_one_b(2, 2).unwrap()));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "  0 F0fF1f······B0bbbb···B1bbbb");
        assert_eq!(lines[1], "  1 ···F0fB0bbbbF1fB1bbbb······");
    }

    #[test]
    fn every_pass_is_drawn() {
        let timeline = timeline(&Schedule::zb_h1(4, 8).unwrap());
        let svg = svg("title", &timeline).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        // One rectangle per pass, one per row, and the background.
        assert_eq!(svg.matches("<rect").count(), 4 * 8 * 3 + 4 + 1);
    }
}
