//! Tests of the schemas that the compiler of grammars is given.

use moeflux_base::GrammarError;
use serde_json::{Value, json};

use super::{SchemaRules, normal, notes};

const OPEN: SchemaRules = SchemaRules { lenient: false, open_objects: true };
const CLOSED: SchemaRules = SchemaRules { lenient: false, open_objects: false };

fn check(rules: SchemaRules, cases: &[(Value, Value)]) {
    for (schema, expected) in cases {
        match normal(schema, rules) {
            Ok(written) => assert_eq!(written, *expected, "{schema}"),
            Err(error) => panic!("{schema}: {error}"),
        }
    }
}

/// Path and problem of a refusal.
fn refused(schema: &Value) -> (String, String) {
    match normal(schema, CLOSED) {
        Err(GrammarError::Invalid { path, problem }) => (path, problem),
        other => panic!("{schema}: {other:?}"),
    }
}

#[test]
fn keywords_without_effect_are_dropped() {
    let string = json!({"type": "string"});
    for schema in [
        json!({"type": "string", "uniqueItems": true, "format": "path", "minLength": 0}),
        json!({"type": "string", "not": false, "if": {"minLength": 3}, "minimum": 7}),
        json!({"type": "string", "title": "t", "contains": {"type": "null"}, "minContains": 0}),
        json!({"type": "string", "not": {"not": {}}, "then": false, "dependentRequired": {}}),
        json!({"type": "string", "allOf": [true], "anyOf": [{}, false], "x-unknown": 1}),
    ] {
        check(OPEN, &[(schema, string.clone())]);
    }
    let object = json!({"type": "object"});
    for schema in [
        json!({"type": "object", "propertyNames": {"type": "string"}}),
        json!({"type": "object", "propertyNames": true, "unevaluatedProperties": true}),
        json!({"type": "object", "propertyNames": {}, "dependentSchemas": {"a": true}}),
        json!({"type": "object", "patternProperties": {}, "minProperties": 0, "maxItems": 3}),
    ] {
        check(OPEN, &[(schema, object.clone())]);
    }
    check(
        OPEN,
        &[(
            json!({"type": "string", "format": "path", "pattern": "^a"}),
            json!({"type": "string", "pattern": "^a"}),
        )],
    );
}

#[test]
fn keywords_without_effect_are_noted() {
    let noted =
        |schema: Value| -> Vec<String> { notes(&schema).iter().map(ToString::to_string).collect() };
    let free = |path: &str| format!("{path} constrains nothing here");
    let schema = json!({"type": "object", "properties": {
        "a": {"type": "array", "uniqueItems": false, "minItems": 0},
        "b": {"type": "string", "format": "path"},
        "c": {"type": "integer", "format": "int32"},
        "d": {"type": "string", "format": "date", "title": "t", "description": "d"},
        "e": {"type": "object", "propertyNames": {"type": "string"}},
        "f": {"type": "number", "uniqueItems": true, "not": false},
    }});
    let expected = [
        "properties.b.format \"path\" is not enforced".to_owned(),
        "properties.c.format \"int32\" is not enforced".to_owned(),
        free("properties.a.uniqueItems"),
        free("properties.a.minItems"),
        free("properties.e.propertyNames"),
        free("properties.f.uniqueItems"),
        free("properties.f.not"),
    ];
    assert_eq!(noted(schema), expected);
    for schema in [
        json!({"type": "array", "uniqueItems": true, "items": {"format": "email"}}),
        json!({"contains": {}, "minContains": 1}),
        json!({"properties": {}, "required": [], "additionalProperties": true}),
        json!({"if": {"const": 1}, "then": {"type": "integer"}}),
    ] {
        assert!(noted(schema.clone()).is_empty(), "{schema}");
    }
}

#[test]
fn objects_that_list_properties_are_closed_after_all_is_merged() {
    let a = json!({"a": {"type": "integer"}});
    let closed = |names: Value, required: Value| {
        json!({"type": "object", "properties": names, "required": required,
            "additionalProperties": false})
    };
    let ab = json!({"a": {"type": "integer"}, "b": {"type": "null"}});
    check(
        CLOSED,
        &[
            (
                json!({"type": "object", "properties": a, "required": ["a"]}),
                closed(a.clone(), json!(["a"])),
            ),
            (
                json!({"type": "object", "allOf": [
                    {"$ref": "#/$defs/x"}, {"properties": {"b": {"type": "null"}}}],
                    "required": ["a"], "$defs": {"x": {"properties": a}}}),
                closed(ab.clone(), json!(["a"])),
            ),
            (
                json!({"type": "object", "properties": {"k": {"enum": ["x", "y"]}},
                    "required": ["k"],
                    "if": {"properties": {"k": {"const": "x"}}},
                    "then": {"properties": {"b": {"type": "null"}}, "required": ["b"]}}),
                json!({"anyOf": [
                    closed(json!({"k": {"enum": ["x"]}, "b": {"type": "null"}}), json!(["k", "b"])),
                    closed(json!({"k": {"enum": ["y"]}}), json!(["k"]))]}),
            ),
        ],
    );
    for schema in [
        json!({"type": "object", "properties": a, "patternProperties": {"^x": true}}),
        json!({"type": "object", "properties": a, "unevaluatedProperties": {"type": "null"}}),
        json!({"type": "object", "properties": a, "additionalProperties": true}),
        json!({"type": "object", "properties": a, "additionalProperties": {"type": "null"}}),
        json!({"type": "object", "properties": {}}),
        json!({"type": "object", "required": ["a"]}),
        json!({"type": "object"}),
        json!({"type": "object", "properties": a, "minProperties": 3}),
    ] {
        let open = normal(&schema, OPEN).unwrap();
        assert_eq!(normal(&schema, CLOSED).unwrap(), open, "{schema}");
        assert_ne!(open["additionalProperties"], json!(false), "{schema}");
    }
    check(
        OPEN,
        &[(json!({"type": "object", "properties": a}), json!({"type": "object", "properties": a}))],
    );
}

#[test]
fn names_of_properties_are_expressed() {
    let value = json!({"type": "integer"});
    let object = |names: Value| -> Value {
        json!({"type": "object", "propertyNames": names, "additionalProperties": value})
    };
    let listed = json!({"type": "object", "properties": {"x": value, "y": value},
        "additionalProperties": false});
    let matched = |pattern: &str| {
        json!({"type": "object", "patternProperties": {pattern: value},
            "additionalProperties": false})
    };
    check(
        CLOSED,
        &[
            (object(json!({"enum": ["x", "y"]})), listed.clone()),
            (object(json!({"type": "string", "enum": ["x", 3, "y"]})), listed.clone()),
            (object(json!({"anyOf": [{"const": "x"}, {"const": "y"}]})), listed),
            (object(json!({"pattern": "^a+$"})), matched("(?:^a+$)")),
            (object(json!({"minLength": 2})), matched("(?:^(?s:.{2,})$)")),
            (
                object(json!(false)),
                json!({"type": "object", "additionalProperties": value,
                "maxProperties": 0}),
            ),
            (
                json!({"type": "object", "properties": {"x": true, "z": true},
                    "required": ["x"], "propertyNames": {"enum": ["x", "y"]}}),
                json!({"type": "object", "properties": {"x": true}, "required": ["x"],
                    "additionalProperties": false}),
            ),
        ],
    );
    let (path, _) = refused(&object(json!({"pattern": "a", "minLength": 3})));
    assert_eq!(path, "propertyNames");
}

#[test]
fn choices_and_negations_become_alternatives() {
    let other = |pattern: Value| json!({"type": "string", "pattern": pattern});
    check(
        OPEN,
        &[
            (
                json!({"type": ["integer", "null"], "not": {"type": "null"}}),
                json!({"type": "integer"}),
            ),
            (
                json!({"type": "integer", "not": {"minimum": 3}}),
                json!({"type": "integer", "exclusiveMaximum": 3}),
            ),
            (
                json!({"type": "integer", "not": {"enum": [2, "a"]}}),
                json!({"anyOf": [{"type": "integer", "exclusiveMaximum": 2},
                    {"type": "integer", "exclusiveMinimum": 2}]}),
            ),
            (
                json!({"enum": ["fox", "crow", 3], "not": {"pattern": "^f"}, "type": "string"}),
                json!({"enum": ["crow"]}),
            ),
            (
                json!({"type": "string", "not": {"const": ""}}),
                other(json!("^(?:(?:(?s:.)(?s:.*)))$")),
            ),
            (
                json!({"type": "integer", "oneOf": [{"minimum": 0}, {"minimum": 5}]}),
                json!({"type": "integer", "minimum": 0, "exclusiveMaximum": 5}),
            ),
            (
                json!({"type": "object", "dependentRequired": {"a": ["b"]}}),
                json!({"anyOf": [
                    {"type": "object", "properties": {"a": true, "b": true},
                        "required": ["a", "b"]},
                    {"type": "object", "properties": {"a": false}}]}),
            ),
            (
                json!({"type": "object", "properties": {"a": true}, "minProperties": 1,
                    "additionalProperties": false}),
                json!({"type": "object", "properties": {"a": true}, "required": ["a"],
                    "additionalProperties": false}),
            ),
            (
                json!({"type": "object", "properties": {"a": {"type": "null"}},
                    "anyOf": [{"properties": {"b": true}, "required": ["b"]}],
                    "unevaluatedProperties": false}),
                json!({"type": "object", "properties": {"a": {"type": "null"}, "b": true},
                    "required": ["b"], "additionalProperties": false}),
            ),
            (
                json!({"type": "array", "not": {"contains": {"type": "null"}},
                    "items": {"type": ["null", "integer"]}}),
                json!({"type": "array", "items": {"type": "integer"}}),
            ),
        ],
    );
}

#[test]
fn references_are_resolved() {
    let tree = json!({"$ref": "#/$defs/g0", "$defs": {"g0": {"type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/g0"}}},
        "additionalProperties": false}}});
    for schema in [
        json!({"type": "object", "properties":
            {"kids": {"type": "array", "items": {"$ref": "#"}}}}),
        json!({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "object",
            "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/a~1b%25"}}}}}}),
        json!({"$id": "http://x.y/z", "$ref": "#tree", "$defs": {"t": {"$anchor": "tree",
            "type": "object", "properties": {"kids": {"type": "array",
            "items": {"$ref": "http://x.y/z#tree"}}}}}}),
    ] {
        check(CLOSED, &[(schema, tree.clone())]);
    }
    // Both sides of a merge may be recursive.
    let merged = json!({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
        "a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}},
        "b": {"properties": {"next": {"$ref": "#/$defs/b"}, "n": {"type": "null"}}}}});
    let level = json!({"type": "object", "properties": {
        "next": {"$ref": "#/$defs/g0"}, "n": {"type": "null"}}, "additionalProperties": false});
    let mut both = level.clone();
    both["$defs"] = json!({ "g0": level });
    check(CLOSED, &[(merged, both)]);
    // Up to draft 7, keywords beside a reference say nothing.
    let seven = json!({"$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"s": {"type": "string"}}, "$ref": "#/definitions/s", "maxLength": 3});
    check(CLOSED, &[(seven, json!({"type": "string"}))]);
}

#[test]
fn what_has_no_form_is_refused_in_our_words() {
    for (schema, expected, words) in [
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems", "uniqueItems: true"),
        (json!({"items": {"pattern": "^(?!a)b"}}), "items.pattern", "look-ahead"),
        (json!({"pattern": "(?<=a)b"}), "pattern", "look-behind"),
        (json!({"type": "string", "not": {"pattern": "a"}}), "not", "do not match"),
        (json!({"contains": {"const": 1}}), "contains", "counted"),
        (json!({"$ref": "https://x.y/z"}), "$ref", "another document"),
        (json!({"$ref": "#/$defs/a"}), "$ref", "no part of the schema"),
        (json!({"$ref": "#"}), "", "refers to itself"),
        (json!({"type": "file"}), "type", "no type of JSON"),
        (json!({"properties": []}), "properties", "must be an object"),
        (json!({"$schema": "https://x.y/z"}), "$schema", "drafts 4 to 2020-12"),
        (json!({"oneOf": [{"type": "integer"}, {"minimum": 2}]}), "oneOf", "no integer"),
        (json!({"allOf": [{"type": "string"}, {"type": "null"}]}), "", "allows no answer"),
    ] {
        let (path, problem) = refused(&schema);
        assert_eq!(path, expected, "{problem}");
        assert!(problem.contains(words), "{schema}: {problem}");
    }
}
