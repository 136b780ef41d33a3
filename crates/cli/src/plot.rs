//! Line charts as SVG: one file, no fonts or scripts from elsewhere, readable on light and dark.

use std::{fmt::Write, path::Path};

use crate::aside;

/// Lines over two axes.
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    /// Whether x grows by factors: what is not above 0 is then left out.
    pub(crate) log_x: bool,
    pub(crate) series: Vec<Series>,
}

/// One line of a chart.
pub(crate) struct Series {
    pub(crate) name: String,
    /// In the order in which they are joined; what is not finite is left out.
    pub(crate) points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 480.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 56.0;
const LEFT: f64 = 72.0;
/// About how wide a letter of the legend is.
const LETTER: f64 = 6.6;
/// Points of a line that are marked; of more, only the line is drawn.
const MARKED: usize = 40;

/// Colours that stand out from white and from black alike.
const COLOURS: [&str; 8] =
    ["#3b82c4", "#e07b39", "#3a9d5d", "#c94f4f", "#8e6bbf", "#a07c3f", "#d26fa8", "#5f9ea0"];

const STYLE: &str = "\
<style>
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 }
.back { fill: #ffffff }
.grid { stroke: #d8dee4; stroke-width: 1 }
.axis { stroke: #57606a; stroke-width: 1 }
.line { fill: none; stroke-width: 2; stroke-linejoin: round }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.back { fill: #0d1117 }
.grid { stroke: #30363d }
.axis { stroke: #8b949e }
}
</style>
";

/// Writes the chart to a file.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write(chart: &Chart, path: &Path) -> anyhow::Result<()> {
    aside::write(path, svg(chart).as_bytes())
}

/// The chart as an SVG document.
pub(crate) fn svg(chart: &Chart) -> String {
    let drawn = |(x, y): &(f64, f64)| x.is_finite() && y.is_finite() && (!chart.log_x || *x > 0.0);
    let points = || chart.series.iter().flat_map(|s| s.points.iter().copied().filter(drawn));
    let x = Axis::new(points().map(|p| p.0), chart.log_x, false);
    let y = Axis::new(points().map(|p| p.1), false, true);
    let letters = chart.series.iter().map(|s| s.name.chars().count()).max().unwrap_or(0);
    let legend = if chart.series.len() > 1 {
        (letters as f64 * LETTER + 40.0).min(WIDTH / 3.0)
    } else {
        0.0
    };
    let (right, bottom) = (WIDTH - 24.0 - legend, HEIGHT - BOTTOM);
    let at = |(px, py): (f64, f64)| {
        (LEFT + x.share(px) * (right - LEFT), bottom - y.share(py) * (bottom - TOP))
    };

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" role=\"img\">\n<title>{}</title>\n{STYLE}\
         <rect class=\"back\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n",
        escaped(&chart.title)
    );
    let middle = (LEFT + right) / 2.0;
    text(&mut out, (middle, 26.0), "class=\"title\" text-anchor=\"middle\"", &chart.title);
    text(&mut out, (middle, HEIGHT - 14.0), "text-anchor=\"middle\"", &chart.x_label);
    let turned =
        format!("text-anchor=\"middle\" transform=\"rotate(-90 18 {})\"", (TOP + bottom) / 2.0);
    text(&mut out, (18.0, (TOP + bottom) / 2.0), &turned, &chart.y_label);
    for (value, name) in &x.ticks {
        let (px, _) = at((*value, 0.0));
        line(&mut out, "grid", (px, TOP), (px, bottom));
        text(&mut out, (px, bottom + 18.0), "text-anchor=\"middle\"", name);
    }
    for (value, name) in &y.ticks {
        let py = bottom - y.share(*value) * (bottom - TOP);
        line(&mut out, "grid", (LEFT, py), (right, py));
        text(&mut out, (LEFT - 8.0, py + 4.0), "text-anchor=\"end\"", name);
    }
    line(&mut out, "axis", (LEFT, bottom), (right, bottom));
    line(&mut out, "axis", (LEFT, TOP), (LEFT, bottom));
    for (i, series) in chart.series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let dash = if i < COLOURS.len() { "" } else { " stroke-dasharray=\"6 4\"" };
        let points: Vec<(f64, f64)> = series.points.iter().copied().filter(drawn).map(at).collect();
        let joined: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            out,
            "<polyline class=\"line\" stroke=\"{colour}\"{dash} points=\"{}\"/>",
            joined.join(" ")
        );
        for (x, y) in points.iter().filter(|_| points.len() <= MARKED) {
            let _ =
                writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
        if chart.series.len() > 1 {
            let y = TOP + 10.0 + i as f64 * 20.0;
            let (from, to) = (right + 12.0, right + 32.0);
            let _ = writeln!(
                out,
                "<line class=\"line\" stroke=\"{colour}\"{dash} x1=\"{from}\" y1=\"{y}\" x2=\"{to}\" y2=\"{y}\"/>"
            );
            text(&mut out, (to + 6.0, y + 4.0), "", &series.name);
        }
    }
    out + "</svg>\n"
}

/// What an axis spans, and the round numbers on it.
struct Axis {
    low: f64,
    high: f64,
    log: bool,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// An axis of heights starts at 0, so that lengths can be compared.
    fn new(values: impl Iterator<Item = f64>, log: bool, height: bool) -> Self {
        let (mut low, mut high) = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        if low > high {
            (low, high) = (1.0, 1.0);
        }
        if height {
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
        if height {
            (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        }
        let first = (low / step).ceil();
        let ticks =
            (0..20).map(|i| (first + i as f64) * step).take_while(|v| *v <= high + step * 1e-6);
        Self { low, high, log, ticks: ticks.map(|v| (v, tick(v, step))).collect() }
    }

    /// Where a value is, from 0 to 1.
    fn share(&self, value: f64) -> f64 {
        match self.log {
            true => (value / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        }
    }
}

/// The next larger of 1, 2 and 5 times a power of ten.
fn round_step(at_least: f64) -> f64 {
    let power = 10f64.powf(at_least.log10().floor());
    let round = [1.0, 2.0, 5.0].map(|n| n * power);
    round.into_iter().find(|step| *step >= at_least * (1.0 - 1e-9)).unwrap_or(10.0 * power)
}

/// 1, 2 and 5 times powers of ten; the powers alone where these are many.
fn log_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let within = |v: &f64| (low * (1.0 - 1e-9)..=high * (1.0 + 1e-9)).contains(v);
    let named = |v: f64| (v, tick(v, v));
    let all: Vec<f64> = powers
        .clone()
        .take(64)
        .flat_map(|p| [1.0, 2.0, 5.0].map(|n| n * 10f64.powi(p)))
        .filter(within)
        .collect();
    match all.len() {
        0 => vec![named(low), named(high)],
        1..=10 => all.into_iter().map(named).collect(),
        _ => powers.take(64).map(|p| 10f64.powi(p)).filter(within).map(named).collect(),
    }
}

/// A number with the digits that a step of this size shows.
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

fn line(out: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        out,
        "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn text(out: &mut String, at: (f64, f64), attributes: &str, text: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" {attributes}>{}</text>",
        at.0,
        at.1,
        escaped(text)
    );
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            // XML has no way to write these.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(log_x: bool, series: Vec<Vec<(f64, f64)>>) -> Chart {
        let series = series
            .into_iter()
            .enumerate()
            .map(|(i, points)| Series { name: format!("<{i}> & co"), points });
        Chart {
            title: "speed \"now\" & <then>".into(),
            x_label: "budget (GiB)".into(),
            y_label: "tokens/s".into(),
            log_x,
            series: series.collect(),
        }
    }

    /// Tags that open close again in their order, attributes are quoted, `<` and `&` stand for themselves nowhere.
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
    fn charts_are_well_formed_whatever_is_drawn() {
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
                let svg = svg(&chart(log_x, series.clone()));
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
    fn points_lie_where_the_axes_say() {
        let axis = Axis::new([0.0, 8.0].into_iter(), false, true);
        assert_eq!((axis.share(0.0), axis.share(4.0), axis.share(8.0)), (0.0, 0.5, 1.0));
        let axis = Axis::new([1.0, 16.0].into_iter(), true, false);
        assert!((axis.share(4.0) - 0.5).abs() < 1e-12);
        let svg = svg(&chart(false, vec![vec![(0.0, 0.0), (10.0, 5.0)]]));
        assert!(svg.contains("points=\"72.0,424.0 776.0,48.0\""), "{svg}");
    }
}
