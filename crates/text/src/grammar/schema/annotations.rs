//! Keywords that constrain nothing where they stand: they are left out, and named.

use serde_json::{Map, Value};

use super::{
    branch::{type_of, types},
    document::{SchemaDocument, SchemaDraft, parts},
    expand::is_constraint,
    formats,
};

/// Keyword of a part that is not enforced, and why.
pub(super) struct Annotation {
    pub(super) keyword: String,
    pub(super) reason: String,
}

/// Why nothing follows from a keyword.
const FREE: &str = "constrains nothing here";

/// Keywords of a part that constrain nothing. A format that is not known is first.
pub(super) fn of(map: &Map<String, Value>, draft: SchemaDraft) -> Vec<Annotation> {
    let mut all = Vec::new();
    if draft <= SchemaDraft::Seven && map.contains_key("$ref") {
        let others = map.keys().filter(|key| *key != "$ref" && is_constraint(key));
        let reason = "is ignored beside $ref up to draft 7";
        all.extend(others.map(|key| Annotation { keyword: key.clone(), reason: reason.into() }));
        return all;
    }
    let allowed = allowed_types(map);
    for (key, value) in map.iter().filter(|(key, _)| is_constraint(key)) {
        let own = types_of(key);
        let is_unknown = || value.as_str().is_none_or(|name| formats::known(name).is_none());
        if key == "format" && (allowed & own == 0 || is_unknown()) {
            let reason = format!("{value} is not enforced");
            all.insert(0, Annotation { keyword: key.clone(), reason });
        } else if allowed & own == 0 || is_free(key, value, map) {
            all.push(Annotation { keyword: key.clone(), reason: FREE.into() });
        }
    }
    all
}

/// Types that a part names.
fn allowed_types(map: &Map<String, Value>) -> u8 {
    let named = |name: &str| match name {
        "null" => types::NULL,
        "boolean" => types::TRUE | types::FALSE,
        "number" | "integer" => types::NUMBER,
        "string" => types::STRING,
        "array" => types::ARRAY,
        "object" => types::OBJECT,
        _ => types::ALL,
    };
    match (map.get("type"), map.get("const"), map.get("enum")) {
        (Some(Value::String(name)), ..) => named(name),
        (Some(Value::Array(names)), ..) => {
            names.iter().filter_map(Value::as_str).fold(0, |all, name| all | named(name))
        }
        (_, Some(value), _) => type_of(value),
        (_, _, Some(Value::Array(values))) => {
            values.iter().fold(0, |all, value| all | type_of(value))
        }
        _ => types::ALL,
    }
}

/// Types for which a keyword says something.
fn types_of(key: &str) -> u8 {
    match key {
        "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
            types::NUMBER
        }
        "minLength" | "maxLength" | "pattern" | "format" => types::STRING,
        "items" | "prefixItems" | "additionalItems" | "minItems" | "maxItems" | "contains"
        | "minContains" | "maxContains" | "uniqueItems" | "unevaluatedItems" => types::ARRAY,
        "properties"
        | "patternProperties"
        | "additionalProperties"
        | "propertyNames"
        | "required"
        | "minProperties"
        | "maxProperties"
        | "dependencies"
        | "dependentSchemas"
        | "dependentRequired"
        | "unevaluatedProperties" => types::OBJECT,
        _ => types::ALL,
    }
}

/// Whether a keyword allows every value of its types.
fn is_free(key: &str, value: &Value, map: &Map<String, Value>) -> bool {
    let has = |key: &str| map.contains_key(key);
    let is_optional = || {
        let least = map.get("minContains").and_then(Value::as_f64);
        least == Some(0.0) && !has("maxContains")
    };
    match key {
        "uniqueItems" => *value == Value::Bool(false),
        "minLength" | "minItems" | "minProperties" => value.as_f64() == Some(0.0),
        "propertyNames" => {
            let is_text = |map: &Map<String, Value>| {
                let mut keys = map.iter().filter(|(key, _)| is_constraint(key));
                keys.all(|(key, value)| key == "type" && value == "string")
            };
            is_any(value) || value.as_object().is_some_and(is_text)
        }
        "unevaluatedProperties" | "unevaluatedItems" => is_any(value),
        "not" => {
            let inner = value.as_object().filter(|map| map.len() == 1);
            *value == Value::Bool(false) || inner.and_then(|map| map.get("not")).is_some_and(is_any)
        }
        "dependentRequired" | "dependentSchemas" | "dependencies" => {
            value.as_object().is_some_and(|map| {
                map.values()
                    .all(|value| is_any(value) || value.as_array().is_some_and(Vec::is_empty))
            })
        }
        "if" => {
            let is_free = |key: &str| map.get(key).is_none_or(is_any);
            is_free("then") && is_free("else")
        }
        "then" | "else" => !has("if") || is_any(value),
        "contains" => is_optional(),
        "minContains" | "maxContains" => !has("contains") || is_optional(),
        "additionalItems" => !matches!(map.get("items"), Some(Value::Array(_))),
        _ => false,
    }
}

/// Whether a schema says nothing.
fn is_any(schema: &Value) -> bool {
    match schema {
        Value::Bool(any) => *any,
        Value::Object(map) => !map.keys().any(|key| is_constraint(key)),
        _ => false,
    }
}

/// A schema without the keywords that constrain nothing.
pub(super) fn without(schema: &Value) -> Value {
    let draft = match SchemaDocument::new(schema) {
        Ok(document) => document.draft(document.root()),
        Err(_) => SchemaDraft::V2020,
    };
    let mut clean = schema.clone();
    remove(&mut clean, draft);
    clean
}

fn remove(schema: &mut Value, draft: SchemaDraft) {
    let Value::Object(map) = schema else { return };
    for annotation in of(map, draft) {
        map.shift_remove(&annotation.keyword);
    }
    let children: Vec<_> = parts(map).into_iter().map(|part| part.entry).collect();
    for entry in children {
        if let Some(child) = super::document::value_at(schema, &entry) {
            remove(child, draft);
        }
    }
}
