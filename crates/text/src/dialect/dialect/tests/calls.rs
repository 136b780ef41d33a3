//! Calls in each syntax: published forms, every split of their text, every cut.

use serde_json::{Value, json};

use super::{
    byte_tokenizer::tokenizer,
    callers::{Answered, CALLERS, callers},
};
use crate::{
    chat::ToolSet,
    dialect::{calls::CallSyntax, dialect::Dialect},
};

#[test]
fn calls_arrive_as_templates_write_them() {
    let arguments = json!({
        "s": "007", "n": 12, "b": true, "o": {"a": [1, "x", null]}, "l": [1, 2.5, "y"], "x": 4,
        "z": "null and void",
    });
    let calls =
        [("f", arguments), ("now", json!({})), ("write", json!({"path": "", "content": "\n"}))];
    for caller in &CALLERS {
        for (before, text) in [("", ""), ("Let me look.", "Let me look.")] {
            let begun = if before.is_empty() { String::new() } else { caller.before(before) };
            let answered = caller.parse(&[begun, caller.render(&calls, false)].concat());
            assert_eq!(answered.text, text, "{:?}", caller.syntax);
            assert_eq!(answered.reasoning, "");
            assert_eq!(answered.complete(), calls.each_ref().map(|(n, a)| (*n, a.clone())));
        }
    }
}

#[test]
fn a_written_file_arrives_byte_for_byte() {
    let content = "a </parameter> b</arg_value>.\n</tool_call>\n<|im_end|> \"\n'\\ \\n é🦊\r\n\
                   <tool_call>\n<|\"|>x </think> <think>\n\u{b}<｜tool▁call▁end｜>\n<|call|>\tend\n";
    for caller in &CALLERS {
        let answer = caller.render(&[("write", json!({"content": content}))], true);
        let is_json = matches!(
            caller.syntax,
            CallSyntax::Json | CallSyntax::Deepseek | CallSyntax::Kimi | CallSyntax::Harmony
        );
        let spelled = if is_json { json!(content).to_string() } else { content.to_owned() };
        let answered = caller.parse_spelled(&answer, &spelled);
        let expected = ("write", json!({"content": content}));
        assert_eq!(answered.complete(), [expected], "{:?}", caller.syntax);
        assert_eq!(answered.text, "");
    }
}

#[test]
fn a_value_streams_from_its_first_characters() {
    for caller in &CALLERS {
        let whole = caller.render(&[("write", json!({"content": "once upon a time"}))], false);
        let end = whole.find(" a time").unwrap();
        let answered = caller.parse(&whole[..end]);
        assert!(answered.calls[0].json.ends_with("once upon"), "{:?}: {answered:?}", caller.syntax);
        assert!(!answered.calls[0].is_complete);
    }
}

#[test]
fn a_cut_leaves_complete_calls_and_one_without_an_end() {
    let calls = [("f", json!({"s": "a\"b", "n": -1, "o": {"k": "v"}})), ("now", json!({}))];
    for caller in &CALLERS {
        let whole = [caller.before("Hm."), caller.render(&calls, false)].concat();
        let ends = whole.char_indices().map(|(at, _)| at).filter(|at| *at > 0);
        let mut seen = 0;
        for end in ends {
            // Checks of deltas are those of `Answered::add`.
            let answered = caller.chunked(&whole[..end], "", 1);
            let complete = answered.complete();
            let expected = calls.each_ref().map(|(name, value)| (*name, value.clone()));
            assert_eq!(complete, expected[..complete.len()], "{:?}", caller.syntax);
            assert!(complete.len() >= seen);
            seen = complete.len();
        }
    }
}

#[test]
fn without_tools_calls_are_text() {
    for caller in &CALLERS {
        let mut parsing = caller.parsing(&ToolSet::default());
        let answer = caller.render(&[("f", json!({"n": 1}))], false);
        for token in parsing.tokenizer.encode(&answer, false).unwrap() {
            let deltas = parsing.parser.push(token).unwrap();
            deltas.for_each(|delta| parsing.answered.add(delta));
        }
        assert_eq!(parsing.answered.calls, []);
    }
}

#[test]
fn syntaxes_are_found_in_the_order_of_their_marks() {
    let detect = |template| CallSyntax::detect(template, false);
    assert_eq!(detect("{{ messages }}"), None);
    assert_eq!(detect("<tool_call>"), None);
    assert_eq!(detect("<tool_call>{\"name\": 1, \"arguments\": 2}"), Some(CallSyntax::Json));
    assert_eq!(detect("<tool_call><function=f><parameter=k>arguments\""), Some(CallSyntax::Xml));
    assert_eq!(detect("<tool_call>f<arg_key>arguments\""), Some(CallSyntax::Glm));
    assert_eq!(detect("<tool_call>{{ call.arguments }}"), None);
    assert_eq!(detect(r#"<tool_call>{\"name\": 1, \"arguments\": 2}"#), Some(CallSyntax::Json));
    assert_eq!(detect("<|channel|>"), None);
    assert_eq!(CallSyntax::detect("<|channel|>", true), Some(CallSyntax::Harmony));
}

#[test]
fn end_tokens_are_those_of_the_template_and_the_tokenizer() {
    let ends = |syntax, template: &str| -> Vec<u32> {
        let caller = callers(syntax).next().unwrap();
        let tokenizer = tokenizer(caller.added, caller.special);
        let template = [caller.template, template].concat();
        let dialect = Dialect::detect(Some(&template), &tokenizer);
        dialect.end_tokens(Some(&template), &tokenizer)
    };
    assert_eq!(ends(CallSyntax::Glm, "<|observation|><|user|>"), [256]);
    assert_eq!(ends(CallSyntax::Glm, ""), [] as [u32; 0]);
    assert_eq!(ends(CallSyntax::Gemma4, "<|tool_response>"), [262]);
    assert_eq!(ends(CallSyntax::Harmony, "<|call|><|return|>"), [261, 262]);
}

/// Asserts the text and the calls of an answer.
fn assert_answer(syntax: CallSyntax, answer: &str, text: &str, calls: &[(&str, Value)]) {
    for caller in callers(syntax) {
        let answered = caller.parse(answer);
        assert_eq!((&*answered.text, answered.complete()), (text, calls.to_vec()), "{answer:?}");
        assert_eq!(answered.calls.len(), calls.len(), "{answer:?}");
    }
}

#[test]
fn json_calls() {
    let check = |answer: &str, text: &str, calls: &[(&str, Value)]| {
        assert_answer(CallSyntax::Json, answer, text, calls)
    };
    let f = |value| [("f", value)];
    let n = || json!({"n": 1});
    check("<tool_call>{\"arguments\": {\"n\": 1}, \"name\": \"f\"}</tool_call>", "", &f(n()));
    check("<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"n\\\": 1}\"}</tool_call>", "", &f(n()));
    check("<tool_call>{\"name\": \"f\", \"arguments\": \"\"}</tool_call>", "", &f(json!({})));
    check("<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", "", &f(json!({})));
    check("<tool_call>{\"name\": \"f\"}</tool_call>", "", &f(json!({})));
    check(
        "<tool_call>{\"name\": \"f\", \"id\": 7, \"arguments\": {\"n\": 1}}}</tool_call>",
        "",
        &f(n()),
    );
    check("<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}</tool_call>", "", &f(n()));
    check("<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1,}}</tool_call>", "", &f(n()));
    check(
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"b\": True, \"z\": None, \"s\": \"a\nb\\d\\ud800\"}}\
         </tool_call>",
        "",
        &f(json!({"b": true, "z": null, "s": "a\nb\\d\u{fffd}"})),
    );
    // Broken JSON ends the arguments; the rest is no text.
    let broken = |answer: &str, thoughts: &str, text: &str, calls: &[(&str, Value)]| {
        check(answer, text, calls);
        for caller in callers(CallSyntax::Json) {
            assert_eq!(caller.parse(answer).reasoning, thoughts, "{answer:?}");
        }
    };
    broken(
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1 ; 2}}</tool_call>A",
        "; 2}}",
        "A",
        &f(n()),
    );
    // Nor is a call that cannot be read, or that is cut off.
    for call in [
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        "<tool_call>\n{name: f}\n</tool_call>",
        "<tool_call>f(1)</tool_call>",
        "<tool_call>nothing</tool_call>",
    ] {
        broken(&["A", call, "B"].concat(), call, "AB", &[]);
    }
    for cut in ["<tool_call>", "<tool_call>\n", "<tool_call>\n{\"na", "<tool_call>{\"name\": \"f\""]
    {
        broken(&["A", cut].concat(), cut, "A", &[]);
    }
    // In a model without tokens for the marks they may be cut off themselves.
    let spelled = CALLERS.iter().find(|caller| caller.added.len() == 1).unwrap();
    let answered = spelled.parse("A\n<tool_");
    assert_eq!((&*answered.text, &*answered.reasoning), ("A", "\n<tool_"));
    assert_eq!(spelled.parse("A <tool_").text, "A <tool_");
    // A text that mentions the mark is one.
    for text in ["Use <tool_call> for it.", "`<tool_call>` and\n`</tool_call>`", "<tool_call>word"]
    {
        broken(text, "", text, &[]);
    }
    // A mark that opens twice; calls without the mark that closes.
    let call = "{\"name\": \"f\", \"arguments\": {\"n\": 1}}";
    check(&format!("<tool_call>\n<tool_call>{call}</tool_call>"), "", &f(n()));
    check(&format!("<tool_call>{call}<tool_call>{call}"), "", &[("f", n()), ("f", n())]);
    check(&format!("A\n\n<tool_call>{call}</tool_call>\n\n B\n"), "A\n\n\n B\n", &f(n()));
    check(&format!("\n\n<tool_call>{call}</tool_call>\n"), "", &f(n()));
    check(&call.replace('f', "<tool_call>"), &call.replace('f', "<tool_call>"), &[]);
    let unknown = "<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>";
    check(unknown, "", &[("g", json!({}))]);
}

#[test]
fn xml_calls() {
    let check = |answer: &str, text: &str, calls: &[(&str, Value)]| {
        assert_answer(CallSyntax::Xml, answer, text, calls)
    };
    let f = |value| [("f", value)];
    // Without the mark that opens, for a known tool.
    check("<function=now>\n</function>\n</tool_call>", "", &[("now", json!({}))]);
    check("<function=g>\n</function>", "<function=g>\n</function>", &[]);
    check("Use <function=f> here.", "Use <function=f> here.", &[]);
    let call = |parameters: &str| {
        format!("<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>")
    };
    for (value, expected) in [
        ("<parameter=n>\n7\n</parameter>\n", json!({"n": 7})),
        ("<parameter=n>\nseven\n</parameter>\n", json!({"n": "seven"})),
        ("<parameter=b>\nTrue\n</parameter>\n", json!({"b": true})),
        ("<parameter=z>\nNone\n</parameter>\n", json!({"z": null})),
        ("<parameter=z>\nNonesuch\n</parameter>\n", json!({"z": "Nonesuch"})),
        ("<parameter=x>\n[draft]\n</parameter>\n", json!({"x": "[draft]"})),
        ("<parameter=x>\n{\"a\": 1}\n</parameter>\n", json!({"x": {"a": 1}})),
        ("<parameter=o>\n{\"a\": True}\n</parameter>\n", json!({"o": {"a": true}})),
        ("<parameter=s>\n\n a \n\n</parameter>\n", json!({"s": "\n a \n"})),
        ("<parameter=s>a</parameter>", json!({"s": "a"})),
        ("<parameter=s>\n</parameter>\n", json!({"s": ""})),
        ("<parameter=other>\ntext\n</parameter>\n", json!({"other": "text"})),
    ] {
        check(&call(value), "", &f(expected));
    }
    // Broken parameters, and one that comes twice.
    let s = "<parameter=s>\na\n</parameter>\n";
    check(&call(&format!("<parameter=n\n{s}")), "", &f(json!({"s": "a"})));
    check(&call(&format!("<parameter={s}")), "", &f(json!({"s": "a"})));
    check(&call(&[s, "<parameter=s>\nb\n</parameter>\n"].concat()), "", &f(json!({"s": "a"})));
    for broken in [
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nHm.</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n",
        "<function=f>\nHm.</function>",
    ] {
        check(broken, "", &[]);
    }
    check(
        "<tool_call>\n<function=now>\n</function>\n<function=f>\n</function>\n</tool_call>B",
        "B",
        &[("now", json!({})), ("f", json!({}))],
    );
}

#[test]
fn calls_in_open_thoughts_end_them() {
    for caller in callers(CallSyntax::Json).chain(callers(CallSyntax::Xml)) {
        let call = caller.render(&[("f", json!({"n": 1}))], false);
        let answered = caller.parse(&format!("<think>\nHm.{call}"));
        assert_eq!((&*answered.reasoning, &*answered.text), ("Hm.", ""));
        assert_eq!(answered.complete(), [("f", json!({"n": 1}))]);
        // An unknown tool, half a call, and thoughts that end in a call are thoughts.
        let unknown = caller.render(&[("g", json!({"n": 1}))], false);
        let half = &call[..call.len() - "</tool_call>".len() - 14];
        for thoughts in [&*unknown, half, "\n<tool_call> it is"] {
            let answered = caller.parse(&format!("<think>\nHm.{thoughts}</think>\nYes."));
            assert_eq!(answered.reasoning, ["Hm.", thoughts].concat());
            assert_eq!((&*answered.text, answered.calls.len()), ("Yes.", 0));
        }
    }
}

#[test]
fn deepseek_and_kimi_calls() {
    let v3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"n\": 1}\n\
              ```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n\
              ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let calls = [("f", json!({"n": 1})), ("now", json!({}))];
    assert_answer(CallSyntax::Deepseek, v3, "", &calls);
    let empty = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>";
    assert_answer(CallSyntax::Deepseek, empty, "", &calls[1..]);
    for (id, name) in [
        ("functions.f:0", "f"),
        ("functions.f:12", "f"),
        ("functionsf5", "f"),
        ("functions_f_0", "f"),
        ("f", "f"),
        ("f:1", "f"),
        ("call_00003", "f"),
        ("functions.other:1", "other"),
    ] {
        for [begin, end] in [
            ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
            ["<|tool_call_section_begin|>", "<|tool_call_section_end|>"],
            ["", ""],
        ] {
            let answer = format!(
                "A{begin}<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{\"n\": 1}}\
                 <|tool_call_end|>{end}"
            );
            assert_answer(CallSyntax::Kimi, &answer, "A", &[(name, json!({"n": 1}))]);
        }
    }
    let nameless = "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}<|tool_call_end|>";
    assert_eq!(callers(CallSyntax::Kimi).next().unwrap().parse(nameless).calls, []);
}

#[test]
fn glm_gemma_and_dsml_calls() {
    let glm = "<tool_call>f<arg_key>s</arg_key><arg_value>007</arg_value><arg_key>n</arg_key>\
               <arg_value>7</arg_value></tool_call><tool_call>now</tool_call>";
    let calls = [("f", json!({"s": "007", "n": 7})), ("now", json!({}))];
    assert_answer(CallSyntax::Glm, glm, "", &calls);
    assert_answer(CallSyntax::Glm, "A<tool_call></tool_call>B", "AB", &[]);
    assert_answer(CallSyntax::Glm, "A<tool_call>f", "A", &[]);
    let gemma = "<|tool_call>call:f{s:007,n:7}<tool_call|><|tool_call>call:now{}<tool_call|>";
    assert_answer(CallSyntax::Gemma4, gemma, "", &calls);
    let nested = "<|tool_call>call:f{o:{<|\"|>a:b<|\"|>:{c:[1,{},[]]}},l:[]}<tool_call|>";
    let arguments = json!({"o": {"a:b": {"c": [1, {}, []]}}, "l": []});
    assert_answer(CallSyntax::Gemma4, nested, "", &[("f", arguments)]);
    let broken = "<|tool_call>call:f{n:1,s}<tool_call|>A";
    assert_answer(CallSyntax::Gemma4, broken, "A", &[("f", json!({"n": 1}))]);
    let dsml = "A\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"s\" \
                string=\"true\">007</｜DSML｜parameter>\n<｜DSML｜parameter name=\"n\" \
                string=\"false\">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n\
                </｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    assert_answer(CallSyntax::Dsml, dsml, "A", &calls);
}

#[test]
fn harmony_calls() {
    let check = |answer: &str, text: &str, calls: &[(&str, Value)]| {
        assert_answer(CallSyntax::Harmony, answer, text, calls)
    };
    let f = || [("f", json!({"n": 1}))];
    for header in [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|channel|>analysis to=functions.f<|message|>",
        "<|channel|>commentary to=f code<|message|>",
        "<|channel|>commentary to=functions.f to=functions.f<|message|>",
        "<|channel|>commentary to=functions.fjson<|message|>",
    ] {
        check(&[header, "{\"n\": 1}<|call|>"].concat(), "", &f());
        check(&[header, "{\"n\": 1}"].concat(), "", &f());
        check(&[header, "{\"n\": 1} done<|end|>"].concat(), "", &f());
    }
    check("<|channel|>commentary to=functions.now<|message|><|call|>", "", &[("now", json!({}))]);
    check("<|channel|>commentary to=functions.f<|message|>print(1)<|call|>", "", &[]);
    check("<|channel|>commentary to=functions. <|message|>{}<|call|>", "", &[]);
    let answer = "<|channel|>commentary to=functions.a-b.c<|message|>{}<|call|>";
    check(answer, "", &[("a-b.c", json!({}))]);
}

#[test]
fn malformed_headers_lose_no_text() {
    let parts = [
        "<|channel|>",
        "<|start|>",
        "<|constrain|>",
        "assistant",
        "analysis",
        "commentary",
        " to=functions.f",
        " to=",
        "to=to=",
        "json",
        "<|end|>",
        " ",
        "final",
        "\n",
    ];
    let caller = callers(CallSyntax::Harmony).next().unwrap();
    let mut state = 1usize;
    for _ in 0..200 {
        let mut header = String::new();
        for _ in 0..5 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            header.push_str(parts[(state >> 33) % parts.len()]);
        }
        for body in ["WORD", "{\"s\": \"WORD\"}", "{\"s\": WORD; WORD}"] {
            let answer = format!("<|start|>{header}<|message|>{body}<|end|>");
            let answered = caller.chunked(&answer, "", usize::MAX);
            assert_eq!(answered, caller.chunked(&answer, "", 1), "{answer:?}");
            let all = answered.log.concat();
            assert_eq!(all.matches("WORD").count(), body.matches("WORD").count(), "{answer:?}");
        }
    }
}

#[test]
fn an_end_token_completes_a_message_to_a_tool() {
    let header = "<|channel|>commentary to=functions.now<|message|>";
    let caller = callers(CallSyntax::Harmony).next().unwrap();
    for (ends, calls) in [(true, 1), (false, 0)] {
        let mut parsing = caller.parsing(&super::callers::tools());
        for token in parsing.tokenizer.encode(header, false).unwrap() {
            parsing.token(token);
            parsing.text(token);
        }
        if ends {
            parsing.parser.end_token();
        }
        let deltas = parsing.parser.finish().unwrap();
        deltas.for_each(|delta| parsing.answered.add(delta));
        assert_eq!(parsing.answered.complete().len(), calls);
    }
}

/// Answers of random pieces of a syntax: the parts do not depend on the split, no letter is lost,
/// and arguments of complete calls are JSON, which [`super::callers::Answered::add`] checks.
#[test]
fn random_answers_have_the_same_parts_in_every_split() {
    let mut state = 7usize;
    let mut random = |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for caller in &CALLERS {
        let whole = caller.render(&[("f", json!({"s": "a", "n": 1})), ("now", json!({}))], false);
        // Tags and the text between them.
        let mut pieces: Vec<&str> = whole.split_inclusive(['>', '\n', ',', '}', ':']).collect();
        pieces.extend(["<think>", "</think>", "Q", "\n\n", "\"", "{", "}", "<", SPELLED_TAG]);
        for _ in 0..120 {
            // Some of the answer in order, with pieces left out, added or twice.
            let mut answer = String::new();
            for at in 0..pieces.len() {
                match random(8) {
                    0 => {}
                    1 => answer.push_str(pieces[random(pieces.len())]),
                    2 if at > 2 => answer.push_str(&pieces[at - 2..=at].concat()),
                    _ => answer.push_str(pieces[at]),
                }
            }
            let whole = caller.chunked(&answer, "", usize::MAX);
            for chunk in [1, 2, 3, 7] {
                let parts = caller.chunked(&answer, "", chunk);
                assert_eq!(parts, whole, "{:?} in chunks of {chunk}: {answer:?}", caller.syntax);
            }
            // Special tokens are no text without tools, but may begin calls.
            let is_shown = matches!(
                caller.syntax,
                CallSyntax::Json | CallSyntax::Xml | CallSyntax::Glm | CallSyntax::Minimax
            );
            if is_shown && whole.calls.is_empty() {
                // Text of calls that cannot be read counts as thoughts.
                let text = |answered: &Answered| {
                    let all = answered.log.concat();
                    all.replace("text:", "").replace("reasoning:", "")
                };
                let without = caller.without_tools(&answer);
                assert_eq!(text(&whole), text(&without), "{answer:?}");
            }
            // Headers of harmony are no text, and arguments that are cut off hold text back.
            let is_cut = whole.calls.iter().any(|call| !call.is_complete);
            if !is_cut && caller.syntax != CallSyntax::Harmony {
                let letters = |text: &str| text.matches('Q').count();
                assert_eq!(letters(&whole.log.concat()), letters(&answer), "{answer:?}");
            }
        }
    }
}

/// A tag of no syntax.
const SPELLED_TAG: &str = "<function>";
