//! Tests of forms, limits and refusals, with the vocabulary of tales-18m.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use moeflux_base::{Error, GrammarError};
use moeflux_model::checkpoint::Checkpoint;
use moeflux_sampling::{Sampler, Sampling, TokenMask};
use serde_json::{Value, json};

use crate::{
    chat::{Tool, ToolSet},
    grammar::form::{AnswerForm, CallConstraint, Constraint},
    text::Text,
};

/// Tokens of the model's vocabulary.
const VOCAB: usize = 4096;

fn text() -> Text {
    let checkpoint = Checkpoint::embedded(&moeflux_tales::FILES).unwrap();
    let mut text = Text::for_checkpoint(&checkpoint, VOCAB).unwrap().unwrap();
    text.set_grammar_room(1);
    text
}

fn mask(text: &Text, form: AnswerForm) -> Result<Box<dyn TokenMask>, Error> {
    let grammar = text.grammar(&Constraint::default().form(form))?.unwrap();
    grammar.mask(text, &[]).unwrap().start()
}

/// Text of random tokens that the mask allows, if it ends within `most` tokens.
fn sampled(text: &Text, mask: Box<dyn TokenMask>, seed: u64, most: usize) -> Option<String> {
    let mut sampler = Sampler::new(Sampling::default().seed(seed), VOCAB).unwrap();
    let (mut masks, mut tokens) = ([mask], Vec::new());
    let mut logits = vec![0.0; VOCAB];
    text.end().ids().iter().for_each(|end| logits[*end as usize] = 8.0);
    for token in 0..VOCAB as u32 {
        let spelled = text.tokenizer().decode(&[token], false).unwrap();
        if ["\"", "}", "]", "\"}", "\","].contains(&spelled.trim()) {
            logits[token as usize] = 5.0;
        }
    }
    for _ in 0..most {
        let token = sampler.sample_masked(&logits, &mut masks).unwrap();
        if text.end().contains(token) {
            return Some(text.tokenizer().decode(&tokens, false).unwrap());
        }
        tokens.push(token);
    }
    None
}

fn refusal(text: &Text, form: AnswerForm) -> GrammarError {
    match mask(text, form).map(|_| ()) {
        Err(Error::Grammar(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn json_follows_its_schema() {
    let text = text();
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "kind": {"enum": ["fox", "crow"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,5}$"}},
        },
        "required": ["name", "kind", "age", "tags"], "additionalProperties": false,
    });
    let mut complete = 0;
    for seed in 0..20 {
        let mask = mask(&text, AnswerForm::Json(schema.clone())).unwrap();
        let Some(answer) = sampled(&text, mask, seed, 600) else { continue };
        complete += 1;
        let value: Value =
            serde_json::from_str(&answer).unwrap_or_else(|e| panic!("{e}: {answer}"));
        let name = value["name"].as_str().unwrap().chars().count();
        assert!((1..=12).contains(&name), "{answer}");
        assert!(["fox", "crow"].contains(&value["kind"].as_str().unwrap()), "{answer}");
        assert!(value["age"].as_u64().unwrap() <= 99, "{answer}");
        for tag in value["tags"].as_array().unwrap() {
            let tag = tag.as_str().unwrap();
            assert!((2..=5).contains(&tag.len()) && tag.bytes().all(|b| b.is_ascii_lowercase()));
        }
        assert_eq!(value.as_object().unwrap().len(), 4);
    }
    assert!(complete > 10, "{complete}");
    let mask = mask(&text, AnswerForm::json_object()).unwrap();
    let object = sampled(&text, mask, 3, 2000).unwrap();
    assert!(serde_json::from_str::<Value>(&object).unwrap().is_object());
}

#[test]
fn text_follows_a_regular_expression_or_a_grammar() {
    let text = text();
    for seed in 0..5 {
        let mask = mask(&text, AnswerForm::Regex(r"\d{3}-(fox|crow)/x?".into())).unwrap();
        let answer = sampled(&text, mask, seed, 40).unwrap();
        let rest = answer.trim_start_matches(|c: char| c.is_ascii_digit() || c.is_numeric());
        assert!(["-fox/", "-crow/", "-fox/x", "-crow/x"].contains(&rest), "{answer}");
    }
    let lark = "start: animal (\" and \" animal)?\nanimal: \"fox\" | \"crow\"\n";
    for seed in 0..5 {
        let mask = mask(&text, AnswerForm::Lark(lark.into())).unwrap();
        let answer = sampled(&text, mask, seed, 40).unwrap();
        assert!(
            answer.split(" and ").all(|animal| animal == "fox" || animal == "crow"),
            "{answer}"
        );
    }
}

#[test]
fn text_follows_a_grammar_in_gbnf() {
    let text = text();
    let list = "root ::= \"a\"{5,5} (\"-\" [0-9]+)?";
    let nested = r#"
        root ::= value
        value ::= "[" ws (value ("," ws value)*)? "]" ws | word ws
        word ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\n])* "\""
        ws ::= [ \n]?
    "#;
    for seed in 0..5 {
        let flat = mask(&text, AnswerForm::Gbnf(list.into())).unwrap();
        let answer = sampled(&text, flat, seed, 400).unwrap();
        let digits = answer.strip_prefix("aaaaa").unwrap();
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        assert!(digits.is_empty() || digits.strip_prefix('-').is_some_and(is_number), "{answer}");
        let tree = mask(&text, AnswerForm::Gbnf(nested.into())).unwrap();
        if let Some(answer) = sampled(&text, tree, seed, 400) {
            serde_json::from_str::<Value>(&answer).unwrap_or_else(|e| panic!("{e}: {answer}"));
        }
    }
}

#[test]
fn the_only_continuation_is_forced_but_for_its_last_token() {
    let text = text();
    let whole = "\"the fox and the crow\"";
    let constant = json!({"const": "the fox and the crow"});
    let mut constant = mask(&text, AnswerForm::Json(constant)).unwrap();
    let run = constant.take_forced().unwrap();
    let start = text.tokenizer().decode(&run, false).unwrap();
    assert!(run.len() > 2 && whole.starts_with(&start) && start != whole, "{start}");
    run.iter().for_each(|token| constant.accept(*token).unwrap());
    assert_eq!(start + &sampled(&text, constant, 1, 20).unwrap(), whole);
    let mut free = mask(&text, AnswerForm::Json(json!({"type": "string"}))).unwrap();
    assert!(free.take_forced().unwrap().is_empty());
}

#[test]
fn what_cannot_be_enforced_is_refused_with_its_path() {
    let text = text();
    let list = json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true});
    let schema = |of: Value| {
        let inner = json!({"type": "object", "properties": {"b": of}});
        json!({"type": "object", "properties": {"a": inner}})
    };
    for (schema, expected) in [
        (schema(list), "properties.a.properties.b.uniqueItems"),
        (json!({"type": "string", "not": {"pattern": "a"}}), "not"),
        (json!({"if": {"pattern": "a"}, "then": false, "title": "t"}), "if"),
        (
            schema(json!({"contains": {"const": 1}, "minContains": 2})),
            "properties.a.properties.b.contains",
        ),
        (json!({"$schema": "https://example.com/s.json", "type": "string"}), "$schema"),
        (
            json!({"anyOf": [{"type": "null"}, {"type": "array", "contains": {"const": 1}}]}),
            "anyOf[1].contains",
        ),
        (
            schema(json!({"type": "string", "pattern": "(?=a)b"})),
            "properties.a.properties.b.pattern",
        ),
        (schema(json!({"$ref": "https://example.com/s.json"})), "properties.a.properties.b.$ref"),
    ] {
        match refusal(&text, AnswerForm::Json(schema)) {
            GrammarError::Invalid { path, problem } => {
                assert_eq!(path, expected, "{problem}");
                assert!(!problem.contains('\n'), "{problem}");
            }
            other => panic!("{other:?}"),
        }
    }
    for schema in [json!(false), json!(3), json!([])] {
        refusal(&text, AnswerForm::Json(schema));
    }
    refusal(&text, AnswerForm::Regex("(".into()));
    refusal(&text, AnswerForm::Regex("(?<=a)b".into()));
    refusal(&text, AnswerForm::Lark("start: missing".into()));
    refusal(&text, AnswerForm::Lark(String::new()));
    refusal(&text, AnswerForm::Gbnf("root ::= (".into()));
    // A model without calls: prompts describe them.
    let calls =
        CallConstraint::new(ToolSet { tools: vec![Tool::new("f", json!({}))] }).required(true);
    assert!(text.grammar(&Constraint::default().calls(calls)).unwrap().is_some());
}

#[test]
fn hostile_grammars_are_refused_in_little_time() {
    let text = text();
    // The trie is made at the first use.
    mask(&text, AnswerForm::json_object()).unwrap();
    let mut deep = json!({"type": "string"});
    for _ in 0..120 {
        deep = json!({"type": "object", "properties": {"a": deep}, "required": ["a"]});
    }
    let doubled = |i: u32| {
        let next = format!("#/$defs/d{}", i + 1);
        json!({"allOf": [{"$ref": next}, {"anyOf": [{"$ref": next}, {"$ref": next}]}]})
    };
    let mut definitions: serde_json::Map<_, _> =
        (0..40).map(|i| (format!("d{i}"), doubled(i))).collect();
    definitions.insert("d40".into(), json!({"type": "object", "properties": {"a": {}}}));
    let bomb = json!({"$defs": definitions, "$ref": "#/$defs/d0"});
    let many: serde_json::Map<_, _> =
        (0..30_000).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect();
    let forms = [
        AnswerForm::Json(deep),
        AnswerForm::Json(bomb),
        AnswerForm::Json(json!({"type": "object", "properties": many})),
        AnswerForm::Json(json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})),
        AnswerForm::Json(json!({"type": "string", "minLength": 1_000_000_000})),
        AnswerForm::Regex("((a{1,500}){1,500}){1,500}".into()),
        AnswerForm::Regex("(".repeat(10_000) + &")".repeat(10_000)),
        AnswerForm::Regex("(x+x+)+y".repeat(2000)),
        AnswerForm::Regex("a".repeat(1 << 20)),
        AnswerForm::Lark(
            "start: ".to_owned() + &"(".repeat(10_000) + "\"a\"" + &")".repeat(10_000),
        ),
        AnswerForm::Lark("start: start start | \"a\"".into()),
        AnswerForm::Lark("start: \"a\"{1,100000}{1,100000}".into()),
        AnswerForm::Gbnf("root ::= root root | \"a\"{1,100000}".into()),
        AnswerForm::Gbnf((0..9_999).fold("root ::= r0".to_owned(), |all, i| {
            all + &format!("\nr{i} ::= r{} r{}", i + 1, i + 1)
        })),
        AnswerForm::Gbnf((0..40).fold("r40 ::= [ab]+\nroot ::= r0".to_owned(), |all, i| {
            all + &format!("\nr{i} ::= r{} r{}", i + 1, i + 1)
        })),
        AnswerForm::Lark("start: %json ".to_owned() + &"{\"a\":".repeat(10_000)),
    ];
    for form in forms {
        let name: String = format!("{form:?}").chars().take(80).collect();
        let since = Instant::now();
        if let Ok(mut mask) = mask(&text, form) {
            // A grammar that compiles has masks, or fails; it does not hang.
            for _ in 0..3 {
                let mut logits = vec![0.0; VOCAB];
                if mask.mask(&mut logits).is_err() {
                    break;
                }
                let token = logits.iter().position(|logit| *logit == 0.0).unwrap();
                if text.end().contains(token as u32) || mask.accept(token as u32).is_err() {
                    break;
                }
            }
        }
        assert!(since.elapsed() < Duration::from_secs(3), "{name}: {:?}", since.elapsed());
    }
}

#[test]
fn equal_constraints_share_a_compiled_grammar() {
    let text = text();
    let grammar = |value: usize| {
        let form = AnswerForm::Json(json!({"const": value}));
        text.grammar(&Constraint::default().form(form)).unwrap().unwrap()
    };
    let first = grammar(0);
    assert!(Arc::ptr_eq(&first.0, &grammar(0).0));
    assert!(!Arc::ptr_eq(&first.0, &grammar(1).0));
    // The least recently used one is dropped.
    for value in 1..9 {
        grammar(value);
    }
    assert!(!Arc::ptr_eq(&first.0, &grammar(0).0));
}

#[test]
fn without_room_in_the_plan_there_are_no_grammars() {
    let mut text = text();
    text.set_grammar_room(0);
    assert_eq!(refusal(&text, AnswerForm::json_object()), GrammarError::NoRoom);
}

#[test]
fn lenient_rules_leave_out_what_cannot_be_enforced_and_note_it() {
    let text = text();
    let lenient = |schema: Value| {
        let constraint = Constraint::default().form(AnswerForm::Json(schema)).lenient(true);
        let grammar = text.grammar(&constraint).unwrap().unwrap();
        grammar.notes().iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let list = |item: Value| json!({"type": "array", "items": item, "uniqueItems": true});
    let notes = lenient(list(json!({"type": "string", "pattern": "^(?!a)b", "format": "path"})));
    assert_eq!(notes.len(), 3, "{notes:?}");
    let has = |start: &str| notes.iter().any(|note| note.starts_with(start));
    assert!(has("uniqueItems is not enforced: uniqueItems: true"), "{notes:?}");
    assert!(has("items.pattern is not enforced: the pattern has a look-ahead"), "{notes:?}");
    assert!(has("items.format \"path\" is not enforced"), "{notes:?}");
    let notes = lenient(json!({"oneOf": [{"type": "integer"}, {"minimum": 2}]}));
    assert!(notes[0].starts_with("oneOf is not enforced"), "{notes:?}");
    let notes = lenient(json!({"type": "string", "not": {"pattern": "a"}}));
    assert!(notes[0].starts_with("not is not enforced"), "{notes:?}");
    assert_eq!(lenient(json!({"$ref": "https://x.y/z", "type": "string"})).len(), 1);
}

#[test]
fn a_schema_that_cannot_fit_the_memory_plan_is_refused_with_its_size() {
    let text = text();
    let many = |count: usize| -> Value {
        let described = json!({"type": "string", "description": "d".repeat(200)});
        let all = (0..count).map(|index| (format!("property_{index}"), described.clone()));
        json!({"type": "object", "properties": serde_json::Map::from_iter(all)})
    };
    // Descriptions do not count.
    assert!(mask(&text, AnswerForm::Json(many(400))).is_ok());
    let since = Instant::now();
    let problem = refusal(&text, AnswerForm::Json(many(3000))).to_string();
    assert!(problem.contains("at most 49152 fit"), "{problem}");
    assert!(since.elapsed() < Duration::from_secs(2));
}

/// Schemas as pydantic and zod write them, which have grammars.
#[test]
fn schemas_of_libraries_have_grammars() {
    let text = text();
    let schemas = [
        json!({"anyOf": [{"type": "number"}, {"type": "string",
            "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]}),
        json!({"format": "date-time", "type": "string"}),
        json!({"format": "duration", "type": "string"}),
        json!({"format": "binary", "type": "string"}),
        json!({"format": "password", "type": "string", "writeOnly": true}),
        json!({"format": "email", "type": "string"}),
        json!({"format": "uri", "maxLength": 2083, "minLength": 1, "type": "string"}),
        json!({"format": "ipv4network", "type": "string"}),
        json!({"enum": ["a", 1, null, true]}),
        json!({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": null}),
        json!({"maxItems": 2, "minItems": 1, "prefixItems": [{"type": "integer"},
            {"default": "a", "type": "string"}], "type": "array"}),
        json!({"$defs": {"E": {"enum": ["a", "b"], "type": "string"}},
            "additionalProperties": {"type": "integer"},
            "propertyNames": {"$ref": "#/$defs/E"}, "type": "object"}),
        json!({"additionalProperties": {"type": "integer"},
            "propertyNames": {"format": "uuid"}, "type": "object"}),
        json!({"exclusiveMinimum": 0, "multipleOf": 0.5, "type": "number"}),
        json!({"$defs": {"Tree": {"properties": {"name": {"type": "string"}, "kids": {
            "default": [], "items": {"$ref": "#/$defs/Tree"}, "type": "array"}},
            "required": ["name"], "type": "object"}}, "$ref": "#/$defs/Tree"}),
        json!({"$defs": {
            "Cat": {"properties": {"kind": {"const": "cat", "type": "string"},
                "lives": {"type": "integer"}}, "required": ["kind", "lives"], "type": "object"},
            "Dog": {"properties": {"kind": {"const": "dog", "type": "string"},
                "bark": {"type": "number"}}, "required": ["kind", "bark"], "type": "object"}},
            "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}),
        json!({"contentMediaType": "application/json", "contentSchema": {}, "type": "string"}),
        json!({"anyOf": [{"pattern": "^\\s*(\\d*\\.?\\d+)\\s*(\\w+)?", "type": "string"},
            {"minimum": 0, "type": "integer"}]}),
        json!({"type": "string", "format": "email", "pattern": concat!(
            "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9]",
            "[A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$")}),
        json!({"type": "string", "format": "base64", "contentEncoding": "base64",
            "pattern": concat!("^$|^(?:[0-9a-zA-Z+/]{4})*(?:",
            "(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$")}),
        json!({"type": "string", "format": "duration", "pattern": concat!(
            "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?(T(?=\\d)(\\d+",
            "H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$")}),
        json!({"type": "string", "format": "starts_with", "pattern": "^ab.*"}),
        json!({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}),
        json!({"type": "integer", "minimum": -9007199254740991_i64,
            "maximum": 9007199254740991_i64}),
        json!({"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": false}),
        json!({"type": "object", "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "number"}}),
        json!({"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "number"}, "required": ["a", "b"]}),
        json!({"type": "object", "propertyNames": {"type": "string", "pattern": "^k"},
            "additionalProperties": {"type": "number"}}),
        json!({"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array",
            "items": {"$ref": "#"}}, {"type": "object", "propertyNames": {"type": "string"},
            "additionalProperties": {"$ref": "#"}}]}),
        json!({"type": "string", "pattern": "^a--?\\d+(?:\\.\\d+)?$"}),
        json!({"allOf": [{"type": "object", "properties": {"a": {"type": "string"}}},
            {"type": "object", "properties": {"b": {"type": "number"}}}]}),
    ];
    for schema in schemas {
        let form = AnswerForm::Json(schema.clone());
        let grammar = text.grammar(&Constraint::default().form(form));
        assert!(grammar.is_ok(), "{schema}: {:?}", grammar.map(|_| ()));
    }
}
