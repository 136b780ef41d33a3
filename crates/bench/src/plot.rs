//! Line charts as SVG documents: no fonts or scripts from elsewhere, readable on light and dark
//! pages.

use std::ops::Range;

use anyhow::anyhow;
use plotters::{
    backend::SVGBackend,
    chart::ChartBuilder,
    coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter},
    drawing::{DrawingAreaErrorKind, IntoDrawingArea},
    element::{Circle, PathElement, Text},
    series::LineSeries,
    style::{
        Color, IntoFont, RGBColor, TRANSPARENT, TextStyle,
        text_anchor::{HPos, Pos, VPos},
    },
};

/// Lines over two axes.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Title above the plot.
    pub title: String,
    /// Name and unit of the horizontal axis.
    pub x_label: String,
    /// Name and unit of the vertical axis.
    pub y_label: String,
    /// Logarithmic horizontal axis; points with `x <= 0` are left out.
    pub log_x: bool,
    /// Lines, in the order of the legend.
    pub series: Vec<ChartSeries>,
}

/// One line of a chart.
#[derive(Clone, Debug)]
pub struct ChartSeries {
    /// Text in the legend.
    pub name: String,
    /// Points in the order in which they are connected; points that are not finite are left out.
    pub points: Vec<(f64, f64)>,
}

/// Size of the document in pixels.
const WIDTH: u32 = 800;
const HEIGHT: u32 = 480;
/// Margins between the document's border and the plot.
const TOP: i32 = 48;
const BOTTOM: i32 = 56;
const LEFT: i32 = 72;
const RIGHT: i32 = 24;
/// Approximate width of a letter in the legend.
const LETTER: f64 = 6.6;
/// Lines with more points have no markers.
const MAX_MARKERS: usize = 40;

const BACKGROUND: RGBColor = RGBColor(0xff, 0xff, 0xff);
const GRID: RGBColor = RGBColor(0xd8, 0xde, 0xe4);
const AXIS: RGBColor = RGBColor(0x57, 0x60, 0x6a);
const TEXT: RGBColor = RGBColor(0x24, 0x29, 0x2f);

/// Colours of lines, visible on white and on black.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0x3b, 0x82, 0xc4),
    RGBColor(0xe0, 0x7b, 0x39),
    RGBColor(0x3a, 0x9d, 0x5d),
    RGBColor(0xc9, 0x4f, 0x4f),
    RGBColor(0x8e, 0x6b, 0xbf),
    RGBColor(0xa0, 0x7c, 0x3f),
    RGBColor(0xd2, 0x6f, 0xa8),
    RGBColor(0x5f, 0x9e, 0xa0),
];

/// On dark pages, replaces the colours of background, grid, axes and text.
const STYLE: &str = "\
<style>
text { font-family: system-ui, sans-serif }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
rect[fill=\"#FFFFFF\"] { fill: #0d1117 }
[stroke=\"#D8DEE4\"] { stroke: #30363d }
[stroke=\"#57606A\"] { stroke: #8b949e }
}
</style>
";

/// Draws a chart as an SVG document.
///
/// # Errors
/// The plotting library fails.
pub fn svg(chart: &Chart) -> anyhow::Result<String> {
    let mut drawn = String::new();
    draw(chart, &mut drawn).map_err(|error| anyhow!("the chart cannot be drawn: {error}"))?;
    let (_, elements) =
        drawn.split_once(">\n").ok_or_else(|| anyhow!("the chart has no elements"))?;
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" role=\"img\">\n<title>{}</title>\n{STYLE}{elements}",
        escaped(&printable(&chart.title))
    ))
}

fn draw(chart: &Chart, out: &mut String) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
    let is_drawn =
        |(x, y): &(f64, f64)| x.is_finite() && y.is_finite() && (!chart.log_x || *x > 0.0);
    let points = || chart.series.iter().flat_map(|s| s.points.iter().copied().filter(is_drawn));
    let x = Axis::new(points().map(|p| p.0), chart.log_x, false);
    let y = Axis::new(points().map(|p| p.1), false, true);
    let has_legend = chart.series.len() > 1;
    let letters = chart.series.iter().map(|s| s.name.chars().count()).max().unwrap_or(0);
    let legend = match has_legend {
        true => (letters as f64 * LETTER + 40.0).min(f64::from(WIDTH) / 3.0) as i32,
        false => 0,
    };
    let right = WIDTH as i32 - RIGHT - legend;

    let root = SVGBackend::with_string(out, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&BACKGROUND)?;
    let title = text_style(18).pos(Pos::new(HPos::Center, VPos::Bottom));
    root.draw(&Text::new(printable(&chart.title), ((LEFT + right) / 2, 30), title))?;
    let mut plot = ChartBuilder::on(&root)
        .margin_top(TOP)
        .margin_right(RIGHT + legend)
        .x_label_area_size(BOTTOM)
        .y_label_area_size(LEFT)
        .build_cartesian_2d(x, y)?;
    plot.configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(AXIS)
        .label_style(text_style(15))
        .axis_desc_style(text_style(15))
        .x_desc(printable(&chart.x_label))
        .y_desc(printable(&chart.y_label))
        .draw()?;
    for (i, series) in chart.series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        // Colours repeat with thinner lines.
        let line = colour.stroke_width(if i < COLOURS.len() { 2 } else { 1 });
        let points: Vec<(f64, f64)> = series.points.iter().copied().filter(is_drawn).collect();
        if points.len() <= MAX_MARKERS {
            plot.draw_series(points.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
        }
        plot.draw_series(LineSeries::new(points, line))?;
        if has_legend {
            let (start, y) = (right + 12, TOP + 10 + i as i32 * 20);
            root.draw(&PathElement::new(vec![(start, y), (start + 20, y)], line))?;
            let name = text_style(15).pos(Pos::new(HPos::Left, VPos::Center));
            root.draw(&Text::new(printable(&series.name), (start + 26, y), name))?;
        }
    }
    root.present()
}

/// Escapes text for XML, as the plotting library does for its own elements.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn text_style(size: i32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&TEXT)
}

/// Replaces control characters, which XML cannot contain, by spaces.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Range of an axis, and its ticks at round values.
struct Axis {
    low: f64,
    high: f64,
    log: bool,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Axis over some values. A vertical one includes 0, so that heights can be compared.
    fn new(values: impl Iterator<Item = f64>, log: bool, vertical: bool) -> Self {
        let (mut low, mut high) = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        if low > high {
            (low, high) = (1.0, 1.0);
        }
        if vertical {
            (low, high) = (low.min(0.0), high.max(0.0));
        }
        if log {
            if low == high {
                (low, high) = (low / 2.0, high * 2.0);
            }
            return Self { low, high, log, ticks: log_ticks(low, high) };
        }
        if low == high {
            (low, high) = (low - 0.5, high + 0.5);
        }
        let step = round_step((high - low) / 6.0);
        if vertical {
            (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        }
        let first = (low / step).ceil();
        let ticks =
            (0..20).map(|i| (first + i as f64) * step).take_while(|v| *v <= high + step * 1e-6);
        Self { low, high, log, ticks: ticks.map(|v| (v, tick(v, step))).collect() }
    }

    /// Relative position of a value, from 0 to 1.
    fn share(&self, value: f64) -> f64 {
        match self.log {
            true => (value / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        }
    }
}

/// Smallest of 1, 2 and 5 times a power of ten that is at least `at_least`.
fn round_step(at_least: f64) -> f64 {
    let power = 10f64.powf(at_least.log10().floor());
    let round = [1.0, 2.0, 5.0].map(|n| n * power);
    round.into_iter().find(|step| *step >= at_least * (1.0 - 1e-9)).unwrap_or(10.0 * power)
}

/// Ticks at 1, 2 and 5 times powers of ten; at powers alone if there are more than ten.
fn log_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let within = |v: &f64| (low * (1.0 - 1e-9)..=high * (1.0 + 1e-9)).contains(v);
    let labelled = |v: f64| (v, tick(v, v));
    let all: Vec<f64> = powers
        .clone()
        .take(64)
        .flat_map(|p| [1.0, 2.0, 5.0].map(|n| n * 10f64.powi(p)))
        .filter(within)
        .collect();
    match all.len() {
        0 => vec![labelled(low), labelled(high)],
        1..=10 => all.into_iter().map(labelled).collect(),
        _ => powers.take(64).map(|p| 10f64.powi(p)).filter(within).map(labelled).collect(),
    }
}

/// Label of a tick, with the digits that a step of this size needs.
fn tick(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    let (value, unit, digits) = match step {
        s if s >= 1e6 => (value / 1e6, "M", 3),
        s if s >= 1e3 && value.abs() >= 1e4 => (value / 1e3, "k", 1),
        _ => (value, "", digits),
    };
    let number = format!("{value:.digits$}");
    let number = match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.'),
        false => &number,
    };
    format!("{}{unit}", if number == "-0" { "0" } else { number })
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (start, end): (i32, i32)) -> i32 {
        start + (self.share(*value) * f64::from(end - start)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|(value, _)| *value).collect()
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        let label = self.ticks.iter().find(|(tick, _)| tick == value);
        label.map_or_else(|| value.to_string(), |(_, label)| label.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(log_x: bool, series: Vec<Vec<(f64, f64)>>) -> Chart {
        let series = series
            .into_iter()
            .enumerate()
            .map(|(i, points)| ChartSeries { name: format!("<{i}> & co"), points });
        Chart {
            title: "speed \"now\" & <then>".into(),
            x_label: "budget (GiB)".into(),
            y_label: "tokens/s".into(),
            log_x,
            series: series.collect(),
        }
    }

    /// Asserts that tags are balanced, attributes quoted, and `<` and `&` escaped.
    fn assert_well_formed(svg: &str) {
        let mut open = Vec::new();
        let mut rest = svg;
        while let Some(at) = rest.find('<') {
            let between = &rest[..at];
            for (i, _) in between.match_indices('&') {
                assert!(
                    ["&amp;", "&lt;", "&gt;", "&quot;"].iter().any(|e| between[i..].starts_with(e)),
                    "{between}"
                );
            }
            let end = at + rest[at..].find('>').unwrap();
            let tag = &rest[at + 1..end];
            assert!(!tag.contains('<') && tag.matches('"').count().is_multiple_of(2), "{tag}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "{svg}");
            } else if !tag.ends_with('/') {
                open.push(tag.split_whitespace().next().unwrap());
            }
            rest = &rest[end + 1..];
        }
        assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
    }

    #[test]
    fn charts_are_well_formed_for_any_points() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let many = (0..100).map(|i| (i as f64, (i as f64).sqrt())).collect::<Vec<_>>();
        let drawn = [
            vec![],
            vec![vec![]],
            vec![vec![(4.0, 1.0)]],
            vec![vec![(0.0, 0.0), (0.0, 0.0)]],
            vec![vec![(nan, 1.0), (1.0, inf), (-1.0, -2.0)], vec![(1e-9, 1e12), (3e9, 2.0)]],
            vec![many; 10],
        ];
        for series in drawn {
            for log_x in [false, true] {
                let svg = svg(&chart(log_x, series.clone())).unwrap();
                assert_well_formed(&svg);
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
                assert!(
                    svg.contains("&amp; &lt;then&gt;")
                        && svg.contains("prefers-color-scheme: dark")
                );
                assert!(svg.len() < 1 << 20);
            }
        }
    }

    #[test]
    fn ticks_are_round() {
        let names = |low: f64, high: f64, log: bool, height: bool| -> Vec<String> {
            Axis::new([low, high].into_iter(), log, height).ticks.into_iter().map(|t| t.1).collect()
        };
        assert_eq!(names(1.3, 7.2, false, true), ["0", "2", "4", "6", "8"]);
        assert_eq!(names(0.0, 0.0031, false, true).first().unwrap(), "0");
        assert_eq!(names(2.0, 20.0, true, false), ["2", "5", "10", "20"]);
        assert_eq!(names(0.0, 32768.0, false, false), ["0", "10k", "20k", "30k"]);
        assert_eq!(names(1.0, 1e9, true, false).len(), 10);
        assert_eq!(names(3.0, 4.0, true, false), ["3", "4"]);
    }

    #[test]
    fn points_are_placed_by_the_axes() {
        let axis = Axis::new([0.0, 8.0].into_iter(), false, true);
        assert_eq!((axis.share(0.0), axis.share(4.0), axis.share(8.0)), (0.0, 0.5, 1.0));
        let axis = Axis::new([1.0, 16.0].into_iter(), true, false);
        assert!((axis.share(4.0) - 0.5).abs() < 1e-12);
        let svg = svg(&chart(false, vec![vec![(0.0, 0.0), (10.0, 5.0)]])).unwrap();
        assert!(svg.contains("points=\"72,423 775,48 \""), "{svg}");
    }
}
