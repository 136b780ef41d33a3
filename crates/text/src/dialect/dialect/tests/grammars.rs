//! Grammars of calls in every syntax.

use std::{collections::BTreeMap, path::Path};

use moeflux_base::Error;
use moeflux_sampling::TokenMask;
use serde_json::{Value, json};

use super::{
    byte_tokenizer::tokenizer,
    callers::{Answered, CALLERS, Caller},
};
use crate::{
    chat::{ChatTemplate, Tool, ToolSet},
    dialect::calls::CallSyntax,
    grammar::{CallConstraint, Constraint},
    text::Text,
};

/// Most tokens of a sampled answer.
const MAX_TOKENS: usize = 4000;

fn text(caller: &Caller) -> Text {
    let tokenizer = tokenizer(caller.added, caller.special);
    let template = ChatTemplate::new(caller.template, Path::new("t"), &BTreeMap::new()).unwrap();
    let end = caller.syntax.end_tokens().iter().filter_map(|end| tokenizer.token_to_id(end));
    let end: Vec<u32> = end.collect();
    assert!(!end.is_empty());
    let mut text = Text::for_template(template, tokenizer).with_end(&end);
    text.set_grammar_room(1);
    text
}

fn tools(is_strict: bool) -> ToolSet {
    let mut schema = json!({
        "type": "object",
        "properties": {
            "path": {"type": "string"}, "mode": {"enum": ["fast", "slow"]},
            "n": {"type": "integer"}, "on": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["path", "n"], "additionalProperties": false,
    });
    schema["properties"]["path"]["description"] = json!("a file");
    let tools = [
        Tool::new("write", schema).strict(is_strict),
        Tool::new(
            "now",
            json!({
                "type": "object", "properties": {}, "additionalProperties": false,
            }),
        ),
    ];
    ToolSet { tools: tools.to_vec() }
}

fn mask(caller: &Caller, text: &Text, form: CallConstraint) -> Result<Box<dyn TokenMask>, Error> {
    let grammar = text.grammar(&Constraint::default().calls(form))?.unwrap();
    let prompt = text.tokenizer().encode(caller.prompt, false).unwrap();
    grammar.mask(text, &prompt).unwrap().start()
}

/// Feeds an answer; returns the text before the first token that the mask forbids.
fn forbidden(text: &Text, mask: &mut dyn TokenMask, answer: &str) -> Option<String> {
    let tokens = text.tokenizer().encode(answer, false).unwrap();
    for (i, token) in tokens.iter().enumerate() {
        let mut logits = vec![0.0; text.tokenizer().vocab_size()];
        let masked = mask.mask(&mut logits);
        if masked.is_err() || logits[*token as usize] == f32::NEG_INFINITY {
            return Some(text.tokenizer().decode(&tokens[..i], false).unwrap());
        }
        mask.accept(*token).unwrap();
    }
    None
}

/// An answer of random tokens that the mask allows, up to an end token.
fn sample(text: &Text, mask: &mut dyn TokenMask, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut tokens = Vec::new();
    for _ in 0..MAX_TOKENS {
        let mut logits: Vec<f32> = (0..text.tokenizer().vocab_size() as u32)
            .map(|token| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // Closing characters and marks, so that values end.
                let bonus = match u8::try_from(token) {
                    Ok(b'"' | b'}' | b']' | b'<' | b'>') => 1.0,
                    Ok(_) => 0.0,
                    Err(_) => 1.5,
                };
                (state >> 40) as f32 / 16_777_216.0 + bonus
            })
            .collect();
        mask.mask(&mut logits).unwrap();
        let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        assert!(logits[best] > f32::NEG_INFINITY);
        let token = u32::try_from(best).unwrap();
        tokens.push(token);
        mask.accept(token).unwrap();
        if text.end().contains(token) {
            return tokens;
        }
    }
    tokens
}

fn parse(caller: &Caller, tokens: &[u32], end: bool) -> Answered {
    let mut parsing = caller.parsing(&tools(true));
    for token in tokens {
        parsing.parser.push(*token).unwrap().for_each(|delta| parsing.answered.add(delta));
    }
    if end {
        parsing.parser.end_token();
    }
    parsing.parser.finish().unwrap().for_each(|delta| parsing.answered.add(delta));
    parsing.answered
}

/// A block of calls without what stands before its first mark.
fn block(caller: &Caller, calls: &[(&str, Value)]) -> String {
    let block = caller.render(calls, false);
    let block = block.trim_start_matches('\n');
    match caller.syntax {
        // The end token is no part of the answer.
        CallSyntax::Harmony => block.trim_end_matches("<|call|>").to_owned(),
        _ => block.to_owned(),
    }
}

#[test]
fn required_calls_are_as_templates_write_them() {
    for caller in &CALLERS {
        let text = text(caller);
        let call = ("write", json!({"path": "a b", "mode": "fast", "n": 7, "tags": [1, 2]}));
        for is_strict in [false, true] {
            let form = CallConstraint::new(tools(is_strict)).required(true);
            let mut mask = mask(caller, &text, form).unwrap();
            let answer = block(caller, std::slice::from_ref(&call));
            let failed = forbidden(&text, &mut *mask, &answer);
            assert_eq!(failed, None, "{:?}: {answer:?}", caller.syntax);
            let mut logits = vec![0.0; text.tokenizer().vocab_size()];
            mask.mask(&mut logits).unwrap();
            let end = text.end().ids()[0];
            assert!(logits[end as usize] > f32::NEG_INFINITY, "{:?}", caller.syntax);
        }
    }
}

#[test]
fn required_calls_cannot_be_text_or_break_their_schema() {
    for caller in &CALLERS {
        let text = text(caller);
        let form = CallConstraint::new(tools(true)).required(true).single(true);
        let start = |answer: &str| {
            let mut mask = mask(caller, &text, form.clone()).unwrap();
            forbidden(&text, &mut *mask, answer)
        };
        assert_eq!(start("Hello").as_deref(), Some(""), "{:?}", caller.syntax);
        for call in [
            ("read", json!({})),
            ("write", json!({"path": "a", "mode": "other", "n": 1})),
            ("write", json!({"path": "a"})),
            ("write", json!({"path": "a", "n": "x"})),
            ("write", json!({"path": "a", "n": 1, "more": 2})),
        ] {
            let answer = block(caller, std::slice::from_ref(&call));
            assert!(start(&answer).is_some(), "{:?}: {answer:?}", caller.syntax);
        }
        let now = ("now", json!({}));
        let two = block(caller, &[now.clone(), now]);
        if caller.syntax != CallSyntax::Harmony {
            assert!(start(&two).is_some(), "{:?}: {two:?}", caller.syntax);
        }
    }
}

#[test]
fn sampled_calls_are_complete_and_valid() {
    for caller in &CALLERS {
        let text = text(caller);
        let form = CallConstraint::new(tools(true)).required(true);
        for seed in 1..12 {
            let mut mask = mask(caller, &text, form.clone()).unwrap();
            let mut tokens = sample(&text, &mut *mask, seed);
            let ended = tokens.pop().is_some_and(|token| text.end().contains(token));
            if !ended {
                continue;
            }
            let answered = parse(caller, &tokens, true);
            let spelled = text.tokenizer().decode(&tokens, false).unwrap();
            assert!(!answered.calls.is_empty(), "{:?}: {spelled:?}", caller.syntax);
            assert_eq!(answered.text.trim(), "", "{:?}: {spelled:?}", caller.syntax);
            for call in &answered.calls {
                assert!(call.is_complete, "{:?}: {spelled:?}", caller.syntax);
                let arguments: Value = serde_json::from_str(&call.json).unwrap();
                if call.name == "write" {
                    let Value::Object(map) = &arguments else { panic!("{arguments}") };
                    assert!(
                        map["path"].is_string() && map["n"].is_i64() || map["n"].is_number(),
                        "{:?}: {spelled:?}",
                        caller.syntax
                    );
                    assert!(map.get("on").is_none_or(Value::is_boolean), "{spelled:?}");
                    assert!(map.get("tags").is_none_or(Value::is_array), "{spelled:?}");
                } else {
                    assert_eq!((call.name.as_str(), &arguments), ("now", &json!({})));
                }
            }
        }
    }
}

#[test]
fn strict_calls_follow_their_schema_where_the_answer_makes_them() {
    for caller in &CALLERS {
        let text = text(caller);
        let form = CallConstraint::new(tools(true));
        let start = |answer: &str| {
            let mut mask = mask(caller, &text, form.clone()).unwrap();
            forbidden(&text, &mut *mask, answer)
        };
        let good = ("write", json!({"path": "a b", "n": 7}));
        let bad = ("write", json!({"path": "a b", "n": true}));
        let before = caller.before("Let me look.\n");
        let answer =
            |call: &(&str, Value)| before.clone() + &block(caller, std::slice::from_ref(call));
        assert_eq!(start(&answer(&good)), None, "{:?}", caller.syntax);
        assert!(start(&answer(&bad)).is_some(), "{:?}", caller.syntax);
        if caller.syntax != CallSyntax::Harmony {
            assert_eq!(start(&(answer(&good) + "\nMore text.")), None, "{:?}", caller.syntax);
        }
    }
}
