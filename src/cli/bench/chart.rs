//! Small log-log charts side by side in one SVG.

use crate::plot::{
    Area, INK, SCALE, SMOOTHED, draw_error, scaled, stroke_style, text_style, title, with_display_size,
};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};
use shardgrad::Result;
use std::ops::Range;

/// Charts per row.
const COLUMNS: usize = 3;
/// Size of a chart in pixels, and height of the title.
const CHART: (i32, i32) = (330, 250);
const TITLE: i32 = 56;

/// A chart: axis labels and points, all positive.
#[derive(Clone, Debug)]
pub(super) struct Panel {
    pub(super) x: &'static str,
    pub(super) y: &'static str,
    pub(super) points: Vec<(f64, f64)>,
}

/// Draws charts into one SVG.
///
/// # Errors
/// `Kind::Io` if the drawing library fails.
pub(super) fn draw(heading: &str, panels: &[Panel]) -> Result<String> {
    let rows = panels.len().div_ceil(COLUMNS);
    let size = (CHART.0 * COLUMNS as i32, CHART.1 * rows as i32 + TITLE);
    let mut svg = String::new();
    {
        let pixels = ((size.0 * SCALE) as u32, (size.1 * SCALE) as u32);
        let area = SVGBackend::with_string(&mut svg, pixels).into_drawing_area();
        area.fill(&WHITE).map_err(draw_error)?;
        title(&area, heading, scaled(24, 28))?;
        let (_, charts) = area.split_vertically(TITLE * SCALE);
        for (panel, area) in panels.iter().zip(charts.split_evenly((rows, COLUMNS))) {
            draw_panel(&area, panel)?;
        }
        area.present().map_err(draw_error)?;
    }
    Ok(with_display_size(&svg, size))
}

fn draw_panel(area: &Area<'_>, panel: &Panel) -> Result<()> {
    let px = |n: i32| n * SCALE;
    let x = padded_range(panel.points.iter().map(|p| p.0));
    let y = padded_range(panel.points.iter().map(|p| p.1));
    let mut chart = ChartBuilder::on(area)
        .margin_right(px(18))
        .margin_left(px(8))
        .x_label_area_size(px(42))
        .y_label_area_size(px(58))
        .build_cartesian_2d(x.log_scale(), y.log_scale())
        .map_err(draw_error)?;
    chart
        .configure_mesh()
        .bold_line_style(stroke_style(RGBColor(233, 236, 239), 1.0))
        .light_line_style(TRANSPARENT)
        .axis_style(stroke_style(RGBColor(173, 181, 189), 1.0))
        .label_style(text_style(11.0, RGBColor(108, 117, 125), HPos::Left, VPos::Top))
        .axis_desc_style(text_style(12.0, INK, HPos::Center, VPos::Top))
        .x_labels(6)
        .y_labels(6)
        .x_label_formatter(&|n| short(*n))
        .y_label_formatter(&|n| short(*n))
        .x_desc(panel.x)
        .y_desc(panel.y)
        .draw()
        .map_err(draw_error)?;
    chart
        .draw_series(LineSeries::new(panel.points.clone(), stroke_style(SMOOTHED, 2.0)))
        .map_err(draw_error)?;
    let dots = panel.points.iter().map(|p| Circle::new(*p, px(3), SMOOTHED.filled()));
    chart.draw_series(dots).map_err(draw_error)?;
    Ok(())
}

/// Returns the axis range of some values with a margin, never empty.
fn padded_range(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values.fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
    if low > high { 1.0..10.0 } else { low / 1.3..high * 1.3 }
}

/// Formats a number in a few characters.
fn short(n: f64) -> String {
    match n {
        n if n >= 1e6 => format!("{}M", round(n / 1e6)),
        n if n >= 1e4 => format!("{}k", round(n / 1e3)),
        n => round(n).to_string(),
    }
}

fn round(n: f64) -> f64 {
    if n >= 10.0 { n.round() } else { (10.0 * n).round() / 10.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charts_are_drawn_side_by_side() {
        let panel = |n: usize| Panel {
            x: "tokens",
            y: "rate",
            points: (0..n).map(|i| (f64::from(1 << i), 1e3 / (1.0 + i as f64))).collect(),
        };
        let svg = draw("growth", &[panel(4), panel(0), panel(1), panel(7)]).unwrap();
        assert!(svg.starts_with("<svg width=\"990\" height=\"556\""), "{}", &svg[..80]);
        assert_eq!(svg.matches("<circle").count(), 12);
        assert_eq!(svg.matches("\ntokens\n").count(), 4);
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn axis_labels_are_short() {
        assert_eq!(
            [1.04, 512.0, 8192.0, 65_536.0, 4_194_304.0].map(short),
            ["1", "512", "8192", "66k", "4.2M"]
        );
    }
}
