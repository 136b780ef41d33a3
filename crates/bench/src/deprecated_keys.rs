//! JSON keys that were renamed. Remove this module, and its calls, after the next release.

use serde_json::Value;

/// Renamed keys of reports.
const RENAMED: [RenamedKey; 3] = [
    RenamedKey { new: "experts_predicted", old: "experts_foreseen" },
    RenamedKey { new: "predicted_per_token", old: "foreseen_per_token" },
    RenamedKey { new: "prefetch", old: "look_ahead" },
];

struct RenamedKey {
    new: &'static str,
    old: &'static str,
}

/// Adds the old name of each renamed key beside the new one, for scripts that read the old one.
pub fn add(report: &mut Value) {
    for_each_object(report, &mut |object| {
        for RenamedKey { new, old } in RENAMED {
            if let Some(value) = object.get(new).cloned() {
                object.insert(old.to_owned(), value);
            }
        }
    });
}

/// Renames the keys of a report that an earlier version saved.
pub fn upgrade(report: &mut Value) {
    for_each_object(report, &mut |object| {
        for RenamedKey { new, old } in RENAMED {
            if let Some(value) = object.remove(old) {
                object.entry(new).or_insert(value);
            }
        }
    });
}

fn for_each_object(value: &mut Value, change: &mut dyn FnMut(&mut serde_json::Map<String, Value>)) {
    match value {
        Value::Object(object) => {
            change(object);
            object.values_mut().for_each(|value| for_each_object(value, change));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| for_each_object(value, change)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reports_carry_both_names_and_are_read_with_either() {
        let new = json!({
            "options": {"prefetch": "auto"},
            "repeats": [{"decode": {"stats": {"experts_predicted": 3}}}],
            "decode": {"predicted_per_token": 1.5},
        });
        let mut both = new.clone();
        add(&mut both);
        assert_eq!(both["options"], json!({"prefetch": "auto", "look_ahead": "auto"}));
        let stats = &both["repeats"][0]["decode"]["stats"];
        assert_eq!(*stats, json!({"experts_predicted": 3, "experts_foreseen": 3}));
        assert_eq!(both["decode"]["foreseen_per_token"], 1.5);
        upgrade(&mut both);
        assert_eq!(both, new);
        let mut old = json!({
            "options": {"look_ahead": "auto"},
            "repeats": [{"decode": {"stats": {"experts_foreseen": 3}}}],
            "decode": {"foreseen_per_token": 1.5},
        });
        upgrade(&mut old);
        assert_eq!(old, new);
    }
}
