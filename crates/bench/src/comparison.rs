//! Comparison of a run with a saved one: which speeds dropped, and which settings differ.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::Context;
use serde_json::Value;

use crate::{deprecated_keys, table::Table, units, version::VERSION};

/// A report that an earlier run saved as JSON.
#[derive(Clone, Debug)]
pub struct SavedRun {
    pub(crate) path: PathBuf,
    pub(crate) report: Value,
}

impl SavedRun {
    /// Reads a saved report. Keys of earlier versions are renamed to the current ones.
    ///
    /// # Errors
    /// The file cannot be read, or is not JSON.
    pub fn load(path: &Path) -> anyhow::Result<Self> {
        let text =
            std::fs::read(path).with_context(|| format!("{}: cannot be read", path.display()))?;
        let mut report = serde_json::from_slice(&text)
            .with_context(|| format!("{}: this is not JSON", path.display()))?;
        deprecated_keys::upgrade(&mut report);
        Ok(Self { path: path.into(), report })
    }

    /// The report, with current keys.
    pub fn report(&self) -> &Value {
        &self.report
    }

    /// Applies `read` to the report. `command` with `--save` writes such reports.
    ///
    /// # Errors
    /// `read` fails: another version saved the report, or it is none of `command`.
    pub fn read<T>(
        &self,
        command: &str,
        read: impl FnOnce(&Value) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        read(&self.report).with_context(|| {
            let path = self.path.display();
            // A report of several budgets has its version in each of them.
            let run = self.report.pointer("/budgets/0").unwrap_or(&self.report);
            match run["version"].as_str() {
                Some(version) if version != VERSION => format!(
                    "{path}: it has version {version}, this program reads {VERSION}: save the run \
                     again with `{command} --save`"
                ),
                _ => format!("{path}: this is not a file that `{command} --save` writes"),
            }
        })
    }
}

/// Result of a comparison.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Settings and machine figures that differ, one per line.
    pub differences: Vec<String>,
    /// Table of speeds, and a verdict.
    pub text: String,
    /// Whether no speed dropped by more than the tolerance.
    pub passed: bool,
}

/// A speed as it takes part in a comparison.
#[derive(Clone, Debug)]
pub struct ComparedSpeed {
    /// Identity of the figure, equal in both runs.
    pub key: String,
    /// The identity as table cells.
    pub cells: Vec<String>,
    /// Higher is faster.
    pub rate: f64,
    /// The figure as it is printed: a rate or a time.
    pub shown: String,
}

/// Columns of the table of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// Columns that are aligned left, the first one included.
    pub left: usize,
    /// Names of the columns after the first one, without the ratio.
    pub columns: &'a [&'a str],
}

/// Compares the speeds that both lists contain; a speed below `1 - tolerance` of the earlier one
/// fails.
///
/// # Errors
/// The lists have no figure in common, or a speed is not a positive number.
pub fn speeds(
    head: Head<'_>,
    now: &[ComparedSpeed],
    before: &[ComparedSpeed],
    tolerance: f64,
) -> anyhow::Result<Comparison> {
    let earlier: BTreeMap<&str, &ComparedSpeed> =
        before.iter().map(|s| (s.key.as_str(), s)).collect();
    let both: Vec<_> =
        now.iter().filter_map(|s| Some((s, *earlier.get(s.key.as_str())?))).collect();
    anyhow::ensure!(!both.is_empty(), "nothing can be compared: the runs have no figure in common");
    let mut table = Table::new(head.left);
    table.head(["compared with before"].iter().chain(head.columns).chain(&["ratio", ""]).copied());
    let mut slower = 0;
    for (now, before) in &both {
        let ratio = now.rate / before.rate;
        anyhow::ensure!(
            ratio.is_finite() && ratio > 0.0,
            "{} cannot be compared: speeds of {} and {}",
            now.cells.join(" "),
            now.rate,
            before.rate
        );
        let is_slower = ratio < 1.0 - tolerance;
        slower += u64::from(is_slower);
        let figures = [
            now.shown.clone(),
            before.shown.clone(),
            units::figure(ratio),
            if is_slower { "slower" } else { "" }.to_owned(),
        ];
        table.row(now.cells.iter().cloned().chain(figures));
    }
    let figures = units::plural(both.len() as u64, "figure");
    let limit = units::percent(tolerance);
    let verdict = match slower {
        0 => format!("nothing of {figures} is slower by more than {limit}"),
        n => format!("{n} of {figures} slower by more than {limit}"),
    };
    let text = format!("{table}{verdict}\n");
    Ok(Comparison { differences: Vec::new(), text, passed: slower == 0 })
}

/// Differences between the fields `names` and between all options of two reports. Keys missing in
/// either report are skipped.
pub fn differences(names: &[&str], now: &Value, before: &Value) -> Vec<String> {
    let options = |report: &Value| report["options"].as_object().cloned().unwrap_or_default();
    let fields = names.iter().map(|name| (*name, &now[*name], &before[*name]));
    let (options, options_before) = (options(now), options(before));
    let options = options
        .iter()
        .filter_map(|(name, now)| Some((name.as_str(), now, options_before.get(name)?)));
    let shown = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => "by default".to_owned(),
        other => other.to_string(),
    };
    let mut differences = Vec::new();
    for (name, now, before) in fields.filter(|(_, now, before)| !now.is_null() && !before.is_null())
    {
        if now != before {
            differences.push(format!("{name}: {}, before {}", shown(now), shown(before)));
        }
    }
    for (name, now, before) in options {
        if now != before {
            differences.push(format!(
                "{}: {}, before {}",
                name.replace('_', " "),
                shown(now),
                shown(before)
            ));
        }
    }
    differences
}

/// Difference between two bandwidths beyond the tolerance; small ones are noise.
pub fn different_rate(name: &str, [now, before]: [&Value; 2], tolerance: f64) -> Option<String> {
    let (now, before) = (now.as_f64()?, before.as_f64()?);
    let differs = (now - before).abs() > tolerance * before;
    differs.then(|| format!("{name}: {}, before {}", units::speed(now), units::speed(before)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn speed(key: &str, rate: f64) -> ComparedSpeed {
        ComparedSpeed { key: key.into(), cells: vec![key.into()], rate, shown: rate.to_string() }
    }

    #[test]
    fn figures_in_both_runs_are_compared() {
        let now = [speed("a", 8.0), speed("b", 9.5), speed("c", 1.0)];
        let head = Head { left: 1, columns: &["now", "then"] };
        let Comparison { text: said, passed: right, .. } =
            speeds(head, &now, &[speed("b", 10.0), speed("a", 10.0)], 0.1).unwrap();
        assert!(!right && said.contains("0.80  slower") && said.contains("0.95\n"), "{said}");
        assert!(
            said.contains("1 of 2 figures slower by more than 10.0 %") && !said.contains("\nc"),
            "{said}"
        );
        let head = Head { left: 1, columns: &[] };
        assert!(speeds(head, &now, &now, 0.0).unwrap().passed);
        for before in
            [vec![], vec![speed("a", 0.0)], vec![speed("a", f64::NAN)], vec![speed("a", -1.0)]]
        {
            assert!(speeds(head, &now, &before, 0.1).is_err());
        }
    }

    #[test]
    fn differing_settings_are_listed() {
        let now =
            json!({"device": "x", "model": "m", "options": {"repeat": 3, "isa": null, "new": 1}});
        let before = json!({"device": "y", "options": {"repeat": 5, "isa": "avx2"}});
        assert_eq!(
            differences(&["device", "model"], &now, &before),
            ["device: x, before y", "repeat: 3, before 5", "isa: by default, before avx2"]
        );
        assert!(differences(&["device", "model"], &now, &now).is_empty());
        assert!(differences(&["device"], &now, &json!([1, 2])).is_empty());
        let rate = |before: Value| different_rate("memory", [&json!(2e9), &before], 0.1);
        assert_eq!(rate(json!(4e9)).unwrap(), "memory: 2.00 GB/s, before 4.00 GB/s");
        assert!(rate(json!(2.1e9)).is_none() && rate(Value::Null).is_none());
    }
}
