//! The loss plot of a run, as SVG.

use crate::metrics::StepMetrics;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use shardgrad::{Error, Kind, Result};
use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

/// Size of the plot in pixels.
const SIZE: (i32, i32) = (900, 540);
/// Drawing scale: plotters rounds to integers, so plots are drawn ten times larger and scaled down by the SVG tag.
pub(crate) const SCALE: i32 = 10;
/// Maximum number of points of a line; more are not visible.
const POINTS_MAX: usize = 1600;
/// Larger losses are drawn as gaps, like non-finite ones.
const LOSS_MAX: f64 = 1e6;

pub(crate) const FONT: &str = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif";
pub(crate) const INK: RGBColor = RGBColor(33, 37, 41);
const GREY: RGBColor = RGBColor(108, 117, 125);
const AXIS: RGBColor = RGBColor(173, 181, 189);
const GRID: RGBColor = RGBColor(233, 236, 239);
const EACH_STEP: RGBColor = RGBColor(165, 201, 240);
pub(crate) const SMOOTHED: RGBColor = RGBColor(25, 96, 184);
const HELD_OUT: RGBColor = RGBColor(224, 92, 14);

type Point = (f64, f64);
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// Draws the training loss of each step, its running mean, and the validation loss, in nats per `unit`.
///
/// # Errors
/// `Kind::Io` if the drawing library fails.
pub(crate) fn loss_plot(title: &str, unit: &str, steps: &[StepMetrics]) -> Result<String> {
    let series = Series::of(steps);
    let mut svg = String::new();
    let size = ((SIZE.0 * SCALE) as u32, (SIZE.1 * SCALE) as u32);
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE).map_err(draw_error)?;
        draw_title(&area, title, &series)?;
        draw_series(&area, unit, &series)?;
        draw_legend(&area, &series)?;
        area.present().map_err(draw_error)?;
    }
    Ok(with_display_size(&svg, SIZE))
}

/// Sets the displayed size of an SVG that was drawn [`SCALE`] times larger.
pub(crate) fn with_display_size(svg: &str, size: (i32, i32)) -> String {
    let drawn = format!("<svg width=\"{}\" height=\"{}\"", size.0 * SCALE, size.1 * SCALE);
    let shown = format!("<svg width=\"{}\" height=\"{}\" stroke-linejoin=\"round\"", size.0, size.1);
    svg.replacen(&drawn, &shown, 1)
}

/// Writes [`loss_plot`] to a file.
///
/// # Errors
/// `Kind::Io` naming the file.
pub(crate) fn write_loss_plot(path: &Path, title: &str, unit: &str, steps: &[StepMetrics]) -> Result<()> {
    std::fs::write(path, loss_plot(title, unit, steps)?)
        .map_err(|e| Error::new(Kind::Io, format!("cannot write {}: {e}", path.display())))
}

pub(crate) fn draw_error(e: impl Display) -> Error {
    Error::new(Kind::Io, format!("cannot draw the plot: {e}"))
}

/// Returns a text style of a size in pixels, with an anchor.
pub(crate) fn text_style(size: f64, color: RGBColor, h: HPos, v: VPos) -> TextStyle<'static> {
    // plotters converts font sizes by a factor of 1/1.24 in SVG.
    let font = (FONT, size * 1.24 * f64::from(SCALE)).into_font();
    TextStyle { font, color: color.to_backend_color(), pos: Pos::new(h, v) }
}

pub(crate) fn stroke_style(color: RGBColor, width: f64) -> ShapeStyle {
    color.stroke_width((width * f64::from(SCALE)) as u32)
}

pub(crate) fn scaled(x: i32, y: i32) -> (i32, i32) {
    (x * SCALE, y * SCALE)
}

/// The drawn series: finite points (step, loss), split at gaps.
struct Series {
    each_step: Vec<Vec<Point>>,
    smooth: Vec<Vec<Point>>,
    held_out: Vec<Point>,
    last_step: u64,
}

impl Series {
    fn of(steps: &[StepMetrics]) -> Series {
        let good = |loss: f64| loss.is_finite() && loss.abs() < LOSS_MAX;
        let point = |s: &StepMetrics| (s.step as f64, s.loss);
        let each_step: Vec<Vec<Point>> = steps
            .split(|s| !good(s.loss))
            .filter(|run| !run.is_empty())
            .map(|run| run.iter().map(point).collect())
            .collect();
        let radius = (steps.len() / 50).max(3);
        // Fewer points show no trend.
        let smooth =
            each_step.iter().filter(|run| run.len() >= 20).map(|run| running_mean(run, radius)).collect();
        let held_out = steps
            .iter()
            .filter_map(|s| s.val_loss.map(|loss| (s.step as f64, loss)))
            .filter(|p| good(p.1))
            .collect();
        Series { each_step, smooth, held_out, last_step: steps.last().map_or(0, |s| s.step) }
    }

    /// Returns the range of the loss axis, with a margin.
    fn losses(&self) -> Range<f64> {
        let losses = self.each_step.iter().flatten().chain(&self.held_out).map(|p| p.1);
        let (low, high) = losses.fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
        if low > high {
            return 0.0..1.0;
        }
        let air = ((high - low) * 0.05).max(high.abs().max(1e-3) * 0.01);
        low - air..high + air
    }

    /// Returns the subtitle: last losses and number of steps.
    fn summary(&self) -> String {
        let mut parts = Vec::new();
        if let Some(last) = self.smooth.last().or(self.each_step.last()).and_then(|run| run.last()) {
            parts.push(format!("train {:.4}", last.1));
        }
        if let Some(last) = self.held_out.last() {
            parts.push(format!("validation {:.4}", last.1));
        }
        parts.push(format!("after {} step{}", self.last_step, if self.last_step == 1 { "" } else { "s" }));
        parts.join("  ·  ")
    }
}

/// Returns the running mean over `radius` points to either side. The window shrinks at the start, so that it stays centred and a steep descent
/// is not smeared, and becomes one-sided at the end, so that the last value is a mean too.
fn running_mean(points: &[Point], radius: usize) -> Vec<Point> {
    let mut sums = vec![0.0; points.len() + 1];
    for (i, p) in points.iter().enumerate() {
        sums[i + 1] = sums[i] + p.1;
    }
    let mean = |i: usize| {
        let backward = radius.min(i);
        let forward = backward.min(points.len() - 1 - i);
        (sums[i + forward + 1] - sums[i - backward]) / (backward + forward + 1) as f64
    };
    points.iter().enumerate().map(|(i, p)| (p.0, mean(i))).collect()
}

/// Reduces a line to about `POINTS_MAX` points: minimum and maximum of each group of neighbours.
fn downsample(points: &[Point]) -> Vec<Point> {
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

/// Draws the title.
pub(crate) fn title(area: &Area<'_>, title: &str, at: (i32, i32)) -> Result<()> {
    // Control characters are not allowed in XML, even escaped; a long title would not fit.
    let mut title: String = title.chars().filter(|c| !c.is_control()).collect();
    if let Some((cut, _)) = title.char_indices().nth(85) {
        title.truncate(cut);
        title.push('…');
    }
    let mut bold = text_style(16.0, INK, HPos::Left, VPos::Center);
    bold.font = bold.font.style(FontStyle::Bold);
    area.draw(&Text::new(title, at, bold)).map_err(draw_error)
}

fn draw_title(area: &Area<'_>, heading: &str, series: &Series) -> Result<()> {
    title(area, heading, scaled(70, 28))?;
    let style = text_style(12.5, GREY, HPos::Left, VPos::Center);
    area.draw(&Text::new(series.summary(), scaled(70, 53), style)).map_err(draw_error)
}

fn draw_series(area: &Area<'_>, unit: &str, series: &Series) -> Result<()> {
    let px = |n: i32| n * SCALE;
    let losses = series.losses();
    // Enough decimals to distinguish grid lines.
    let decimals = (-((losses.end - losses.start) / 5.0).log10().floor()).clamp(0.0, 9.0) as usize;
    let mut chart = ChartBuilder::on(area)
        .margin_top(px(76))
        .margin_right(px(28))
        .margin_bottom(px(12))
        .margin_left(px(10))
        .x_label_area_size(px(46))
        .y_label_area_size(px(60))
        .build_cartesian_2d(0.0..series.last_step.max(10) as f64, losses)
        .map_err(draw_error)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(stroke_style(GRID, 1.0))
        .light_line_style(TRANSPARENT)
        .axis_style(stroke_style(AXIS, 1.0))
        .set_all_tick_mark_size(px(5))
        .label_style(text_style(12.0, GREY, HPos::Left, VPos::Top))
        .axis_desc_style(text_style(13.0, INK, HPos::Center, VPos::Top))
        .x_labels(9)
        .y_labels(9)
        .x_label_formatter(&|step| format!("{step}"))
        .y_label_formatter(&|loss| format!("{loss:.decimals$}"))
        .x_desc("step")
        .y_desc(format!("nats per {unit}"))
        .draw()
        .map_err(draw_error)?;
    for run in &series.each_step {
        match run.as_slice() {
            [one] => chart.draw_series([Circle::new(*one, px(2), EACH_STEP.filled())]).map(|_| ()),
            more => {
                chart.draw_series(LineSeries::new(downsample(more), stroke_style(EACH_STEP, 1.0))).map(|_| ())
            }
        }
        .map_err(draw_error)?;
    }
    for run in &series.smooth {
        chart
            .draw_series(LineSeries::new(downsample(run), stroke_style(SMOOTHED, 2.0)))
            .map_err(draw_error)?;
    }
    chart
        .draw_series(LineSeries::new(downsample(&series.held_out), stroke_style(HELD_OUT, 1.2)))
        .map_err(draw_error)?;
    for (radius, color) in [(px(5), WHITE), (px(4) - SCALE / 2, HELD_OUT)] {
        let dots = series.held_out.iter().map(|p| Circle::new(*p, radius, color.filled()));
        chart.draw_series(dots).map_err(draw_error)?;
    }
    Ok(())
}

fn draw_legend(area: &Area<'_>, series: &Series) -> Result<()> {
    let mut right = SIZE.0 - 28;
    let mut entry = |word: &str, color: RGBColor, width: f64, dot: bool| {
        let (left, y) = (right - 7 * word.len() as i32 - 30, 53);
        let stroke =
            PathElement::new(vec![scaled(left, y), scaled(left + 22, y)], stroke_style(color, width));
        area.draw(&stroke).map_err(draw_error)?;
        if dot {
            area.draw(&Circle::new(scaled(left + 11, y), 35, color.filled())).map_err(draw_error)?;
        }
        let style = text_style(12.5, INK, HPos::Left, VPos::Center);
        area.draw(&Text::new(word.to_string(), scaled(left + 28, y), style)).map_err(draw_error)?;
        right = left - 16;
        Ok(())
    };
    if !series.held_out.is_empty() {
        entry("validation", HELD_OUT, 1.2, true)?;
    }
    if !series.smooth.is_empty() {
        entry("running mean", SMOOTHED, 2.0, false)?;
    }
    entry("train", EACH_STEP, 1.4, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;

    fn steps(losses: impl IntoIterator<Item = f64>) -> Vec<StepMetrics> {
        let step = |(i, loss): (usize, f64)| StepMetrics {
            step: i as u64 + 1,
            loss,
            grad_norm: 1.0,
            lr: 1e-3,
            tokens_per_s: 1e3,
            seconds: i as f64,
            loss_scale: None,
            skipped: None,
            experts: None,
            state_hash: None,
            nccl: None,
            val_loss: (i % 10 == 9).then_some(loss + 0.1),
        };
        losses.into_iter().enumerate().map(step).collect()
    }

    fn count(svg: &str, what: &str) -> usize {
        svg.matches(what).count()
    }

    #[test]
    fn a_run_shows_three_series_axes_and_a_legend() {
        let svg = loss_plot("tiny <on> a & b\u{1}", "byte", &steps((0..100).map(|i| 5.0 / (1.0 + i as f64))))
            .unwrap();
        assert!(svg.starts_with(
            "<svg width=\"900\" height=\"540\" stroke-linejoin=\"round\" viewBox=\"0 0 9000 5400\""
        ));
        assert!(svg.trim_end().ends_with("</svg>"));
        for word in
            ["step", "nats per byte", "train", "running mean", "validation", "tiny &lt;on&gt; a &amp; b"]
        {
            assert_eq!(count(&svg, &format!("\n{word}\n")), 1, "{word}");
        }
        assert_eq!(count(&svg, "<circle"), 2 * 10 + 1, "ten dots with a rim, and one in the legend");
        assert!(svg.contains("validation 0.1500  ·  after 100 steps"), "{svg}");
        for color in [EACH_STEP, SMOOTHED, HELD_OUT] {
            let hex = format!("stroke=\"#{:02X}{:02X}{:02X}\"", color.0, color.1, color.2);
            assert_eq!(count(&svg, &hex), 2, "one line and one in the legend: {hex}");
        }
    }

    #[test]
    fn degenerate_losses_are_drawn() {
        let odd: [Vec<f64>; 8] = [
            vec![],
            vec![5.5],
            vec![f64::NAN],
            vec![3.0; 50],
            vec![0.0; 3],
            vec![1e300, -1e300, f64::INFINITY, 2.0],
            vec![1e5, -1e5, 1e-9],
            vec![1e-300; 40],
        ];
        for losses in odd {
            let svg = loss_plot("odd", "token", &steps(losses.clone())).unwrap();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{losses:?}");
            assert!(svg.len() < 20_000, "{losses:?}: {} bytes", svg.len());
        }
        let late = StepMetrics { step: u64::MAX, ..steps([1.0]).remove(0) };
        loss_plot("late", "token", &[late]).unwrap();
        assert!(
            loss_plot(&"x".repeat(1000), "token", &[]).unwrap().contains(&format!("\n{}…\n", "x".repeat(85)))
        );
    }

    #[test]
    fn non_finite_losses_leave_a_gap() {
        let losses = (0..100).map(|i| if (40..60).contains(&i) { f64::NAN } else { 3.0 });
        let series = Series::of(&steps(losses));
        assert_eq!(series.each_step.iter().map(Vec::len).collect::<Vec<_>>(), [40, 40]);
        assert_eq!(series.smooth.len(), 2);
        assert_eq!(series.held_out.len(), 8);
    }

    #[test]
    fn running_mean_is_centred_and_backward_looking_at_the_end() {
        let points: Vec<Point> = (0..40).map(|i| (f64::from(i), f64::from(i))).collect();
        let mean = running_mean(&points, 3);
        assert!(mean[..37].iter().all(|p| p.0 == p.1), "the mean of a straight line is the line");
        assert_eq!(mean[39].1, (36.0 + 37.0 + 38.0 + 39.0) / 4.0);
    }

    #[test]
    fn downsampling_keeps_extremes() {
        let mut losses = vec![2.0; 300_000];
        (losses[123_456], losses[200_000]) = (9.0, 1.0);
        let series = Series::of(&steps(losses));
        let few = downsample(&series.each_step[0]);
        assert!(few.len() <= POINTS_MAX + 2, "{}", few.len());
        assert!(few.contains(&(123_457.0, 9.0)) && few.contains(&(200_001.0, 1.0)));
        assert!(few.windows(2).all(|p| p[0].0 <= p[1].0));
    }

    #[test]
    fn unwritable_plot_file_is_named() {
        let dir = Scratch::new();
        write_loss_plot(&dir.path("loss.svg"), "t", "token", &steps([1.0])).unwrap();
        let error = write_loss_plot(&dir.path("no/loss.svg"), "t", "token", &[]).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(
            error.message().starts_with("cannot write ") && error.message().contains("loss.svg"),
            "{error}"
        );
    }
}
