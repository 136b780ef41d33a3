//! A run and one that was saved: what has become slower, and what else is not the same.

use std::{collections::BTreeMap, path::Path};

use anyhow::Context;
use serde_json::Value;

use crate::{out::Table, units};

/// A speed that was measured.
pub(super) struct Speed {
    /// What it is of: the same in both runs.
    pub(super) key: String,
    /// The same in columns.
    pub(super) cells: Vec<String>,
    /// The more the faster.
    pub(super) rate: f64,
    /// What people read: a rate or a time.
    pub(super) shown: String,
}

/// What `--save` wrote.
///
/// # Errors
/// The file cannot be read, or is no JSON.
pub(super) fn load(path: &Path) -> anyhow::Result<Value> {
    let text =
        std::fs::read(path).with_context(|| format!("{}: cannot be read", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{}: this is not JSON", path.display()))
}

/// What of two lists of speeds is in both, and whether none is slower than `1 - tolerance` of what it was.
///
/// The table has columns by the names in `head` behind the first one; `left` of all are text.
///
/// # Errors
/// Nothing is in both, or a speed is no number above zero.
pub(super) fn speeds(
    (left, head): (usize, &[&str]),
    now: &[Speed],
    before: &[Speed],
    tolerance: f64,
) -> anyhow::Result<(String, bool)> {
    let all: BTreeMap<&str, &Speed> = before.iter().map(|s| (s.key.as_str(), s)).collect();
    let both: Vec<_> = now.iter().filter_map(|s| Some((s, *all.get(s.key.as_str())?))).collect();
    anyhow::ensure!(
        !both.is_empty(),
        "nothing can be compared: nothing was measured both now and before"
    );
    let mut table = Table::new(left);
    table.row(["compared with before"].iter().chain(head).chain(&["ratio", ""]).copied());
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
            format!("{ratio:.3}"),
            mark(is_slower).to_owned(),
        ];
        table.row(now.cells.iter().cloned().chain(figures));
    }
    let of = units::plural(both.len() as u64, "figure");
    let by = units::percent(tolerance);
    let verdict = match slower {
        0 => format!("nothing of {of} is slower by more than {by}"),
        n => format!("{n} of {of} slower by more than {by}"),
    };
    Ok((format!("{table}{verdict}\n"), slower == 0))
}

const fn mark(slower: bool) -> &'static str {
    if slower { "slower" } else { "" }
}

/// What is not the same of the fields with these names, and of all options. What one of the reports lacks is not compared.
pub(super) fn differences(names: &[&str], now: &Value, before: &Value) -> Vec<String> {
    let options = |report: &Value| report["options"].as_object().cloned().unwrap_or_default();
    let of_both = names.iter().map(|name| (*name, &now[*name], &before[*name]));
    let (options, then) = (options(now), options(before));
    let of_options =
        options.iter().filter_map(|(name, now)| Some((name.as_str(), now, then.get(name)?)));
    let shown = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => "by default".to_owned(),
        other => other.to_string(),
    };
    let mut all = Vec::new();
    for (name, now, before) in
        of_both.filter(|(_, now, before)| !now.is_null() && !before.is_null())
    {
        if now != before {
            all.push(format!("{name}: {}, before {}", shown(now), shown(before)));
        }
    }
    for (name, now, before) in of_options {
        if now != before {
            all.push(format!(
                "{}: {}, before {}",
                name.replace('_', " "),
                shown(now),
                shown(before)
            ));
        }
    }
    all
}

/// The same of a rate that is never quite the same.
pub(super) fn different_rate(
    what: &str,
    [now, before]: [&Value; 2],
    tolerance: f64,
) -> Option<String> {
    let (now, before) = (now.as_f64()?, before.as_f64()?);
    let differs = (now - before).abs() > tolerance * before;
    differs.then(|| format!("{what}: {}, before {}", units::speed(now), units::speed(before)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn speed(key: &str, rate: f64) -> Speed {
        Speed { key: key.into(), cells: vec![key.into()], rate, shown: rate.to_string() }
    }

    #[test]
    fn what_is_in_both_runs_is_compared() {
        let now = [speed("a", 8.0), speed("b", 9.5), speed("c", 1.0)];
        let (said, right) =
            speeds((1, &["now", "then"]), &now, &[speed("b", 10.0), speed("a", 10.0)], 0.1)
                .unwrap();
        assert!(!right && said.contains("0.800  slower") && said.contains("0.950\n"), "{said}");
        assert!(
            said.contains("1 of 2 figures slower by more than 10.0 %") && !said.contains("\nc"),
            "{said}"
        );
        assert!(speeds((1, &[]), &now, &now, 0.0).unwrap().1);
        for before in
            [vec![], vec![speed("a", 0.0)], vec![speed("a", f64::NAN)], vec![speed("a", -1.0)]]
        {
            assert!(speeds((1, &[]), &now, &before, 0.1).is_err());
        }
    }

    #[test]
    fn what_differs_is_said() {
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
