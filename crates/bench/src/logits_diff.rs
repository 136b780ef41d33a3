//! Comparison of two logits files: the first tensor and row that differ, and how far.

use std::fmt::{self, Write};

use anyhow::{bail, ensure};

use crate::{
    table::Table,
    tensor_file::{TensorEntry, TensorFile},
    units,
};

/// Result of a comparison of two files.
#[derive(Clone, Debug)]
pub struct LogitsDiff {
    /// Table of tensors, notes, and the first difference.
    pub text: String,
    /// Whether a tensor differs beyond the tolerance.
    pub differs: bool,
}

/// Compares the tensors that both files contain, in the order of computation. Floats differ if they
/// are further apart than `tolerance` times the root mean square of `b`'s tensor; experts differ if
/// the sets do.
///
/// # Errors
/// The files have no tensor in common, shapes or types differ, or a file cannot be read.
pub fn compare(a: &TensorFile, b: &TensorFile, tolerance: f32) -> anyhow::Result<LogitsDiff> {
    let mut names: Vec<&str> =
        a.tensors.keys().filter(|n| b.tensors.contains_key(*n)).map(|n| &**n).collect();
    names.sort_by_key(|name| order(name));
    if names.is_empty() {
        bail!(
            "{}: it has no tensor that the other file has: logits, hidden.L, experts.L",
            b.path().display()
        );
    }
    let mut table = Table::new(1);
    table.head(["tensor", "rows", "max |a-b|", "/ rms(b)", "rms(a-b) / rms(b)", "first row"]);
    let mut first = None;
    let mut identical = true;
    let mut notes = Vec::new();
    for name in &names {
        let (in_a, in_b) = (a.tensors[*name], b.tensors[*name]);
        ensure!(
            (in_a.rows, in_a.width) == (in_b.rows, in_b.width),
            "{name}: {} x {} in one file, {} x {} in the other: were they made from the same tokens?",
            in_a.rows,
            in_a.width,
            in_b.rows,
            in_b.width
        );
        ensure!(
            in_a.element.is_float() == in_b.element.is_float(),
            "{name}: floats in one file, ids in the other"
        );
        let found = match in_a.element.is_float() {
            true => floats(name, a, b, in_a, tolerance)?,
            false => experts(name, a, b, in_a)?,
        };
        identical &= found.identical;
        let rows = in_a.rows.to_string();
        let row = found.first.as_ref().map_or("-".to_owned(), |(row, _)| row.to_string());
        let [max, relative, rms] = found.cells;
        table.row([(*name).to_owned(), rows, max, relative, rms, row]);
        notes.extend(found.note.map(|note| format!("{name}: {note}")));
        if first.is_none() {
            first =
                found.first.map(|(row, how)| format!("{}, row {row}: {how}", description(name)));
        }
    }
    let mut text = table.to_string();
    for note in notes {
        writeln!(text, "{note}")?;
    }
    let compared = units::plural(names.len() as u64, "tensor");
    match &first {
        Some(first) => writeln!(text, "first difference: {first}")?,
        None if identical => writeln!(text, "no difference: {compared}, bit for bit")?,
        None => writeln!(text, "no difference beyond the tolerance of {tolerance}: {compared}")?,
    }
    Ok(LogitsDiff { text, differs: first.is_some() })
}

/// Sort key: layer by layer, experts before hidden states; then logits, then other tensors.
fn order(name: &str) -> (usize, usize, &str) {
    match name.split_once('.').map(|(what, layer)| (what, layer.parse())) {
        Some(("experts", Ok(layer))) => (layer, 0, ""),
        Some(("hidden", Ok(layer))) => (layer, 1, ""),
        _ if name == "logits" => (usize::MAX, 0, ""),
        _ => (usize::MAX, 1, name),
    }
}

fn description(name: &str) -> String {
    match name.split_once('.') {
        Some(("experts", layer)) => format!("layer {layer}, experts"),
        Some(("hidden", layer)) => format!("layer {layer}, hidden state"),
        _ => name.to_owned(),
    }
}

/// Differences of one tensor.
struct TensorDiff {
    identical: bool,
    /// Table cells: largest difference, the same relative to the RMS of `b`, RMS of the difference.
    cells: [String; 3],
    /// First row that differs, and a description.
    first: Option<(usize, String)>,
    note: Option<String>,
}

fn experts(
    name: &str,
    a: &TensorFile,
    b: &TensorFile,
    shape: TensorEntry,
) -> anyhow::Result<TensorDiff> {
    let (mut rows_a, mut rows_b) = (a.rows(name)?, b.rows(name)?);
    let (mut ids_a, mut ids_b) = (Vec::new(), Vec::new());
    let (mut differ, mut reordered, mut first) = (0, 0, None);
    for row in 0..shape.rows {
        rows_a.ids(&mut ids_a)?;
        rows_b.ids(&mut ids_b)?;
        if ids_a == ids_b {
            continue;
        }
        let (mut set_a, mut set_b) = (ids_a.clone(), ids_b.clone());
        set_a.sort_unstable();
        set_b.sort_unstable();
        if set_a == set_b {
            reordered += 1;
            continue;
        }
        differ += 1;
        first.get_or_insert_with(|| (row, format!("a chose {ids_a:?}, b {ids_b:?}")));
    }
    let cell = match differ {
        0 => "same sets".to_owned(),
        1 => "1 set differs".to_owned(),
        n => format!("{n} sets differ"),
    };
    Ok(TensorDiff {
        identical: differ + reordered == 0,
        cells: [cell, "-".to_owned(), "-".to_owned()],
        first,
        note: (reordered > 0).then(|| {
            format!("the same experts in another order in {}", units::plural(reordered, "row"))
        }),
    })
}

fn floats(
    name: &str,
    a: &TensorFile,
    b: &TensorFile,
    shape: TensorEntry,
    tolerance: f32,
) -> anyhow::Result<TensorDiff> {
    let (mut rows_a, mut rows_b) = (a.rows(name)?, b.rows(name)?);
    let (mut row_a, mut row_b) = (Vec::new(), Vec::new());
    let (mut squares_b, mut squares, mut identical) = (0.0, 0.0, true);
    // Largest difference of each row, its index, and both values.
    let mut worst = Vec::with_capacity(shape.rows.min(1 << 20));
    let mut agreement = (name == "logits").then(LogitAgreement::default);
    for _ in 0..shape.rows {
        rows_a.floats(&mut row_a)?;
        rows_b.floats(&mut row_b)?;
        let mut row_max = (0.0, 0, 0.0, 0.0);
        for (i, (x, y)) in row_a.iter().zip(&row_b).enumerate() {
            identical &= x.to_bits() == y.to_bits();
            let apart = distance(*x, *y);
            squares += apart * apart;
            squares_b += f64::from(*y) * f64::from(*y);
            if apart > row_max.0 {
                row_max = (apart, i, *x, *y);
            }
        }
        worst.push(row_max);
        if let Some(agreement) = &mut agreement {
            agreement.row(&row_a, &row_b);
        }
    }
    let n = (shape.rows * shape.width).max(1) as f64;
    let rms = (squares_b / n).sqrt();
    let limit = f64::from(tolerance) * rms;
    // A NaN in `b` makes the limit NaN; then every difference counts.
    let beyond = |apart: f64| apart > 0.0 && (apart > limit || limit.is_nan());
    let first = worst.iter().enumerate().find(|(_, w)| beyond(w.0));
    let max = worst.iter().map(|w| w.0).fold(0.0, f64::max);
    let relative = |x: f64| if rms > 0.0 { format!("{:.1e}", x / rms) } else { "-".to_owned() };
    let cells = match max {
        0.0 => ["0".to_owned(), "0".to_owned(), "0".to_owned()],
        _ => [format!("{max:.2e}"), relative(max), relative((squares / n).sqrt())],
    };
    Ok(TensorDiff {
        identical,
        cells,
        first: first.map(|(row, (apart, i, x, y))| {
            (row, format!("{x} and {y} at {i}, apart by {apart:.2e}"))
        }),
        note: agreement.map(|agreement| agreement.to_string()),
    })
}

/// `|x - y|`; infinite if only one of them is finite.
fn distance(x: f32, y: f32) -> f64 {
    if x == y || (x.is_nan() && y.is_nan()) {
        return 0.0;
    }
    let apart = (f64::from(x) - f64::from(y)).abs();
    if apart.is_nan() { f64::INFINITY } else { apart }
}

/// LogitAgreement of the distributions that two sets of logits define.
#[derive(Default)]
struct LogitAgreement {
    rows: u64,
    same_best: u64,
    divergence: f64,
    largest: f64,
}

impl LogitAgreement {
    fn row(&mut self, a: &[f32], b: &[f32]) {
        self.rows += 1;
        self.same_best += u64::from(argmax(a) == argmax(b));
        let (total_a, total_b) = (log_sum_exp(a), log_sum_exp(b));
        let divergence: f64 = a
            .iter()
            .zip(b)
            .filter(|(_, y)| **y > f32::NEG_INFINITY)
            .map(|(x, y)| {
                let (q, p) = (f64::from(*x) - total_a, f64::from(*y) - total_b);
                p.exp() * (p - q)
            })
            .sum();
        // Rounding may make a zero divergence slightly negative.
        let divergence = if divergence.is_nan() { f64::INFINITY } else { divergence.max(0.0) };
        self.divergence += divergence;
        self.largest = self.largest.max(divergence);
    }
}

impl fmt::Display for LogitAgreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, same_best, divergence, largest } = self;
        let rows_said = units::plural(*rows, "row");
        if *largest == 0.0 {
            f.write_str("no KL divergence")?;
        } else {
            write!(
                f,
                "mean KL(b, a) {:.1e}, largest {largest:.1e}",
                divergence / (*rows).max(1) as f64
            )?;
        }
        write!(f, "; the most probable token is the same in {same_best} of {rows_said}")
    }
}

/// Index of the maximum; the first one of equal values.
fn argmax(logits: &[f32]) -> usize {
    logits.iter().enumerate().fold(0, |max, (i, x)| if *x > logits[max] { i } else { max })
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_come_in_their_order_and_logits_last() {
        let mut names = ["logits", "other", "hidden.10", "hidden.2", "experts.10", "experts.2"];
        names.sort_by_key(|n| order(n));
        assert_eq!(names, ["experts.2", "hidden.2", "experts.10", "hidden.10", "logits", "other"]);
    }

    #[test]
    fn a_number_is_infinitely_far_from_none() {
        assert_eq!(distance(1.0, 1.5), 0.5);
        assert_eq!(distance(f32::NAN, f32::NAN), 0.0);
        assert_eq!(distance(f32::NEG_INFINITY, f32::NEG_INFINITY), 0.0);
        assert_eq!(distance(1.0, f32::NAN), f64::INFINITY);
        assert_eq!(distance(f32::INFINITY, f32::NEG_INFINITY), f64::INFINITY);
    }

    #[test]
    fn divergence_is_that_of_the_definition() {
        let mut agreement = LogitAgreement::default();
        agreement.row(&[0.0, 0.0], &[3f32.ln(), 0.0]);
        let expected = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((agreement.divergence - expected).abs() < 1e-7);
        assert_eq!(agreement.same_best, 1);
    }
}
