//! The loss plot of a run: an SVG file that any browser opens.

use crate::metrics::StepMetrics;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use shardgrad_dist::{Error, Kind, Result};
use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

/// The size of the picture in pixels.
const SIZE: (i32, i32) = (900, 540);
/// The drawing library counts in whole numbers. So that lines are smooth all the same, it draws a picture ten times as
/// large, and the first tag of the file shrinks it.
const FINE: i32 = 10;
/// At most this many points make a line; more would not be seen.
const POINTS_MAX: usize = 1600;
/// A loss beyond this is drawn as a gap, like one that is not finite.
const LOSS_MAX: f64 = 1e6;

const FONT: &str = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif";
const INK: RGBColor = RGBColor(33, 37, 41);
const GREY: RGBColor = RGBColor(108, 117, 125);
const AXIS: RGBColor = RGBColor(173, 181, 189);
const GRID: RGBColor = RGBColor(233, 236, 239);
const EACH_STEP: RGBColor = RGBColor(165, 201, 240);
const SMOOTHED: RGBColor = RGBColor(25, 96, 184);
const HELD_OUT: RGBColor = RGBColor(224, 92, 14);

type Point = (f64, f64);
type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// Draws the training loss of each step, its running mean, and the held-out loss where it was measured.
///
/// # Errors
/// `Kind::Io` if the drawing library fails.
pub fn loss_plot(title: &str, steps: &[StepMetrics]) -> Result<String> {
    let series = Series::of(steps);
    let mut svg = String::new();
    let size = ((SIZE.0 * FINE) as u32, (SIZE.1 * FINE) as u32);
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        draw_title(&area, title, &series)?;
        draw_series(&area, &series)?;
        draw_legend(&area, &series)?;
        area.present().map_err(failed)?;
    }
    let drawn = format!("<svg width=\"{}\" height=\"{}\"", size.0, size.1);
    let shown = format!("<svg width=\"{}\" height=\"{}\" stroke-linejoin=\"round\"", SIZE.0, SIZE.1);
    Ok(svg.replacen(&drawn, &shown, 1))
}

/// Writes [`loss_plot`] to a file.
///
/// # Errors
/// `Kind::Io` naming the file.
pub fn write_loss_plot(path: &Path, title: &str, steps: &[StepMetrics]) -> Result<()> {
    std::fs::write(path, loss_plot(title, steps)?)
        .map_err(|e| Error::new(Kind::Io, format!("cannot write {}: {e}", path.display())))
}

fn failed(e: impl Display) -> Error {
    Error::new(Kind::Io, format!("cannot draw the loss plot: {e}"))
}

fn text(size: f64, color: RGBColor, h: HPos, v: VPos) -> TextStyle<'static> {
    // The library asks for a size in points of a font it does not have and shrinks it by 1.24 for the file.
    let font = (FONT, size * 1.24 * f64::from(FINE)).into_font();
    TextStyle { font, color: color.to_backend_color(), pos: Pos::new(h, v) }
}

fn line(color: RGBColor, width: f64) -> ShapeStyle {
    color.stroke_width((width * f64::from(FINE)) as u32)
}

fn at(x: i32, y: i32) -> (i32, i32) {
    (x * FINE, y * FINE)
}

/// What is drawn: points (step, loss) that are finite.
struct Series {
    /// Runs of steps without a gap between them.
    runs: Vec<Vec<Point>>,
    smooth: Vec<Point>,
    held_out: Vec<Point>,
    last_step: f64,
}

impl Series {
    fn of(steps: &[StepMetrics]) -> Series {
        let good = |loss: f64| loss.is_finite() && loss.abs() < LOSS_MAX;
        let point = |s: &StepMetrics| (s.step as f64, s.loss);
        let runs: Vec<Vec<Point>> = steps
            .split(|s| !good(s.loss))
            .filter(|run| !run.is_empty())
            .map(|run| run.iter().map(point).collect())
            .collect();
        let all = runs.concat();
        // Fewer points are no trend.
        let smooth = if all.len() < 20 { Vec::new() } else { running_mean(&all) };
        let held_out = steps
            .iter()
            .filter_map(|s| s.val_loss.map(|loss| (s.step as f64, loss)))
            .filter(|p| good(p.1))
            .collect();
        let last_step = steps.last().map_or(1.0, |s| s.step as f64).max(1.0);
        Series { runs, smooth, held_out, last_step }
    }

    /// The losses that the picture has to show, with a little air around them.
    fn losses(&self) -> Range<f64> {
        let losses = self.runs.iter().flatten().chain(&self.held_out).map(|p| p.1);
        let (low, high) = losses.fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
        if low > high {
            return 0.0..1.0;
        }
        let air = ((high - low) * 0.05).max(high.abs().max(1e-3) * 0.01);
        low - air..high + air
    }

    /// One line of what the picture comes to.
    fn summary(&self) -> String {
        let mut parts = Vec::new();
        if let Some(last) = self.smooth.last().or(self.runs.last().and_then(|run| run.last())) {
            parts.push(format!("train {:.4}", last.1));
        }
        if let Some(last) = self.held_out.last() {
            parts.push(format!("held out {:.4}", last.1));
        }
        parts.push(format!("after {} steps", self.last_step));
        parts.join("  ·  ")
    }
}

/// The mean over a window around each point, at most a fiftieth of all points to either side; it shrinks towards the ends
/// so that it stays centred and a steep beginning is not smeared.
fn running_mean(points: &[Point]) -> Vec<Point> {
    let n = points.len();
    let reach = (n / 50).max(3);
    let mut sums = vec![0.0; n + 1];
    for (i, p) in points.iter().enumerate() {
        sums[i + 1] = sums[i] + p.1;
    }
    let mean = |i: usize| {
        let reach = reach.min(i).min(n - 1 - i);
        (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1) as f64
    };
    points.iter().enumerate().map(|(i, p)| (p.0, mean(i))).collect()
}

/// No more than about `POINTS_MAX` points: of each group of neighbours the lowest and the highest, in their order.
fn thin(points: &[Point]) -> Vec<Point> {
    if points.len() <= POINTS_MAX {
        return points.to_vec();
    }
    let group = (2 * points.len()).div_ceil(POINTS_MAX);
    let ends = |group: &[Point]| {
        let by_loss = |a: &&Point, b: &&Point| a.1.total_cmp(&b.1);
        let mut two: Vec<Point> =
            group.iter().min_by(by_loss).into_iter().chain(group.iter().max_by(by_loss)).copied().collect();
        two.sort_by(|a, b| a.0.total_cmp(&b.0));
        two
    };
    points.chunks(group).flat_map(ends).collect()
}

fn draw_title(area: &Area<'_>, title: &str, series: &Series) -> Result<()> {
    // Control characters cannot stand in XML, not even escaped; a long title would leave the picture.
    let mut title: String = title.chars().filter(|c| !c.is_control()).collect();
    if let Some((cut, _)) = title.char_indices().nth(85) {
        title.truncate(cut);
        title.push('…');
    }
    area.draw(&Text::new(title, at(64, 20), text(17.0, INK, HPos::Left, VPos::Top))).map_err(failed)?;
    area.draw(&Text::new(series.summary(), at(64, 45), text(12.5, GREY, HPos::Left, VPos::Top))).map_err(failed)
}

fn draw_series(area: &Area<'_>, series: &Series) -> Result<()> {
    let px = |n: i32| n * FINE;
    let mut chart = ChartBuilder::on(area)
        .margin_top(px(76))
        .margin_right(px(28))
        .margin_bottom(px(12))
        .margin_left(px(10))
        .x_label_area_size(px(46))
        .y_label_area_size(px(54))
        .build_cartesian_2d(0.0..series.last_step, series.losses())
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(line(GRID, 1.0))
        .light_line_style(TRANSPARENT)
        .axis_style(line(AXIS, 1.0))
        .set_all_tick_mark_size(px(5))
        .label_style(text(12.0, GREY, HPos::Left, VPos::Top))
        .axis_desc_style(text(13.0, INK, HPos::Center, VPos::Top))
        .x_labels(9)
        .y_labels(9)
        .x_desc("step")
        .y_desc("nats per token")
        .draw()
        .map_err(failed)?;
    for run in &series.runs {
        match run.as_slice() {
            [one] => chart.draw_series([Circle::new(*one, px(2), EACH_STEP.filled())]).map(|_| ()),
            more => chart.draw_series(LineSeries::new(thin(more), line(EACH_STEP, 1.0))).map(|_| ()),
        }
        .map_err(failed)?;
    }
    chart.draw_series(LineSeries::new(thin(&series.smooth), line(SMOOTHED, 2.0))).map_err(failed)?;
    chart.draw_series(LineSeries::new(thin(&series.held_out), line(HELD_OUT, 1.2))).map_err(failed)?;
    for (radius, color) in [(px(5), WHITE), (px(4) - FINE / 2, HELD_OUT)] {
        let dots = series.held_out.iter().map(|p| Circle::new(*p, radius, color.filled()));
        chart.draw_series(dots).map_err(failed)?;
    }
    Ok(())
}

fn draw_legend(area: &Area<'_>, series: &Series) -> Result<()> {
    let mut right = 872;
    let mut entry = |word: &str, color: RGBColor, width: f64, dot: bool| {
        let left = right - 7 * word.len() as i32 - 30;
        let y = 60;
        let stroke = PathElement::new(vec![at(left, y), at(left + 22, y)], line(color, width));
        area.draw(&stroke).map_err(failed)?;
        if dot {
            area.draw(&Circle::new(at(left + 11, y), 35, color.filled())).map_err(failed)?;
        }
        let style = text(12.5, INK, HPos::Left, VPos::Center);
        area.draw(&Text::new(word.to_string(), at(left + 28, y), style)).map_err(failed)?;
        right = left - 14;
        Ok(())
    };
    if !series.held_out.is_empty() {
        entry("held out", HELD_OUT, 1.2, true)?;
    }
    if !series.smooth.is_empty() {
        entry("running mean", SMOOTHED, 2.0, false)?;
    }
    entry("train", EACH_STEP, 1.4, false)
}
