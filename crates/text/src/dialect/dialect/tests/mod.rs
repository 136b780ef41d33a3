//! Tests of dialects: vectors, each in every split of its text.

mod byte_tokenizer;
mod callers;
mod calls;
#[cfg(feature = "grammar")]
mod grammars;

use proptest::prelude::*;
use serde_json::json;

use self::byte_tokenizer::tokenizer;
use super::{
    super::{CallSyntax, Delta, harmony},
    AnswerTools, Dialect,
};
use crate::{answer_text::AnswerText, chat::ToolSet};
use moeflux_sampling::StopStrings;

fn no_tools() -> AnswerTools<'static> {
    const NONE: &ToolSet = &ToolSet { tools: Vec::new() };
    AnswerTools { tools: NONE, calls: None }
}

/// A model: its template, as far as dialects look at it, and its added tokens.
struct Model {
    template: &'static str,
    added: &'static [&'static str],
    special: usize,
}

const QWEN: Model = Model {
    template: "{{ content.split('</think>')[-1] }}",
    added: &["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
    special: 2,
};

/// As QWEN, but its tokenizer has no tokens for the marks.
const SPELLED: Model = Model { added: &["<|im_start|>", "<|im_end|>"], ..QWEN };

const GPT_OSS: Model = Model {
    template: "<|start|>assistant<|channel|>final<|message|>",
    added: &harmony::MARKS,
    special: 7,
};

const GEMMA: Model = Model {
    template: "<|channel>thought\n<channel|>",
    added: &["<|turn>", "<turn|>", "<|channel>", "<channel|>"],
    special: 4,
};

/// An answer's parts, as `reasoning` and `text`.
#[derive(Debug, Default, PartialEq)]
struct Parsed {
    reasoning: String,
    text: String,
}

impl Parsed {
    fn add(&mut self, delta: Delta<'_>) {
        match delta {
            Delta::Reasoning(text) => self.reasoning.push_str(text),
            Delta::Text(text) => self.text.push_str(text),
            call => panic!("{call:?} without tools"),
        }
    }
}

impl Model {
    /// Parses an answer, token by token.
    fn parse(&self, prompt: &str, answer: &str) -> Parsed {
        let tokenizer = tokenizer(self.added, self.special);
        let dialect = Dialect::detect(Some(self.template), &tokenizer);
        let ids = |text: &str| tokenizer.encode(text, false).unwrap();
        let mut parser = dialect.parser(&tokenizer, &ids(prompt), no_tools()).unwrap();
        let mut parsed = Parsed::default();
        for token in ids(answer) {
            parser.push(token).unwrap().for_each(|delta| parsed.add(delta));
        }
        parser.finish().unwrap().for_each(|delta| parsed.add(delta));
        parsed
    }

    fn assert(&self, prompt: &str, answer: &str, [reasoning, text]: [&str; 2]) {
        let expected = Parsed { reasoning: reasoning.to_owned(), text: text.to_owned() };
        assert_eq!(self.parse(prompt, answer), expected, "{prompt:?} {answer:?}");
    }
}

#[test]
fn thoughts_between_marks() {
    let opened = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n";
    let closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
    for model in [QWEN, SPELLED] {
        for (prompt, answer, parts) in [
            (
                "<|im_start|>assistant\n",
                "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n",
                ["Hm.\n\nSo.", "Yes.\n"],
            ),
            ("<|im_start|>assistant\n", "\n<think></think>\nYes.", ["", "Yes."]),
            ("<|im_start|>assistant\n", "\n\nYes.\n", ["", "\n\nYes.\n"]),
            ("<|im_start|>assistant\n", "\n", ["", "\n"]),
            (opened, "Hm.\n</think>\n\nYes.", ["Hm.", "Yes."]),
            (opened, "<think>\nHm.</think>Yes.", ["Hm.", "Yes."]),
            (opened, "Hm.\n", ["Hm.", ""]),
            (closed, "Yes.", ["", "Yes."]),
            // A message that ends in the mark opens nothing.
            (
                "<|im_start|>user\nIs it <think><|im_end|>\n<|im_start|>assistant\n",
                "Yes.",
                ["", "Yes."],
            ),
            ("<|im_start|>assistant\n", "1 < 2 and <thin air>, é", ["", "1 < 2 and <thin air>, é"]),
        ] {
            model.assert(prompt, answer, parts);
        }
    }
    // As tokens, marks are never text; spelled in the middle of a text, they are.
    QWEN.assert("", "A<think>B</think>C<think>D</think>E", ["B\n\nD", "ACE"]);
    QWEN.assert("", "A</think>B", ["", "AB"]);
    SPELLED.assert("", "A <think>B</think> C", ["", "A <think>B</think> C"]);
    SPELLED.assert("", "<think>\nA <thin\n</thin", ["A <thin\n</thin", ""]);
}

#[test]
fn channels_of_harmony() {
    let prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant";
    for (answer, parts) in [
        ("<|channel|>final<|message|>Yes!<|return|>", ["", "Yes!"]),
        ("<|channel|>analysis<|message|>Polite.<|end|><|start|>x", ["Polite.", ""]),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            ["Hm.", "Yes."],
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary \
             to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
            ["{\"a\": 1}", "I look."],
        ),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ["{}", ""]),
        (
            "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>\
             B<|end|><|start|>assistant<|channel|>final<|message|>C<|end|><|start|>assistant\
             <|channel|>final<|message|>D",
            ["A\n\nB", "C\n\nD"],
        ),
        ("<|channel|>analysis<|message|>A<|channel|>final<|message|>B", ["A", "B"]),
        ("<|channel|>other<|message|>A", ["", "A"]),
        ("<|message|>A", ["", "A"]),
        ("Yes, to=day.", ["", "Yes, to=day."]),
        ("tomorrow", ["", "tomorrow"]),
        ("t", ["", "t"]),
        ("<|channel|>fin", ["", ""]),
        ("<|channel|>final<|message|>A<|end|> B", ["", "A\n\nB"]),
    ] {
        GPT_OSS.assert(prompt, answer, parts);
    }
    // Prompts without the template, and prompts that begin a message.
    GPT_OSS.assert("q", "Yes.", ["", "Yes."]);
    let begun = "<|start|>assistant<|channel|>analysis<|message|>I th";
    GPT_OSS.assert(begun, "ink.<|end|><|start|>assistant<|message|>Yes.", ["ink.", "Yes."]);
    GPT_OSS.assert("<|start|>assistant<|channel|>ana", "lysis<|message|>Hm.", ["Hm.", ""]);
}

#[test]
fn named_blocks() {
    let prompt = "<|turn>user\nHi<turn|>\n<|turn>model\n";
    for (prompt, answer, parts) in [
        (prompt, "<|channel>thought\nHm.\n<channel|>Yes.", ["Hm.", "Yes."]),
        (prompt, "Yes.", ["", "Yes."]),
        (prompt, "<|channel>thought\n<channel|>Yes.", ["", "Yes."]),
        (prompt, "<|channel>final\nYes.<channel|>\nNo.", ["", "Yes.\nNo."]),
        (prompt, "<|channel>thou", ["", ""]),
        ("<|turn>model\n<|channel>thought\n", "Hm.<channel|>Yes.", ["Hm.", "Yes."]),
        ("<|turn>model\n<|channel>thought\n<channel|>", "Yes.", ["", "Yes."]),
    ] {
        GEMMA.assert(prompt, answer, parts);
    }
}

#[test]
fn the_dialect_is_found_by_the_template_and_the_tokens() {
    let plain =
        |template, added: &[&str]| Dialect::detect(template, &tokenizer(added, 0)).is_plain();
    assert!(plain(None, &[]) && plain(Some("{{ messages }}"), &["<|im_end|>"]));
    // Marks of a published tokenizer that its template does not name, and the reverse.
    assert!(!plain(Some("{{ messages }}"), &["<think>", "</think>"]));
    assert!(!plain(Some("{{ '[/THINK]' }}"), &[]));
    // A template of channels needs the tokens.
    assert!(plain(Some(GPT_OSS.template), &["<|start|>", "<|message|>"]));
    assert!(plain(Some(GEMMA.template), &["<|channel>"]));
}

#[test]
fn stop_strings_do_not_reach_over_calls() {
    let caller = callers::callers(CallSyntax::Kimi).next().unwrap();
    let callers::Parsing { tokenizer, parser, .. } = caller.parsing(&callers::tools());
    let call = caller.render(&[("write", json!({"content": "User:"}))], false);
    let stops = StopStrings::new(vec!["\nUser:".into(), "User:".into()]).unwrap();
    let mut text = AnswerText::new(parser, stops);
    let mut answered = callers::Answered::default();
    for token in tokenizer.encode(&["Look\n", &call, "ser: no"].concat(), false).unwrap() {
        assert!(!text.push(token).unwrap());
        text.deltas().for_each(|delta| answered.add(delta));
    }
    text.finish().unwrap();
    text.deltas().for_each(|delta| answered.add(delta));
    let parts =
        ["text:Look\n", "start:write", "json:{\"content\":\"User:\"}", "end", "text:ser: no"];
    assert_eq!(answered.log, parts);
}

/// Pieces of answers, marks among them.
fn pieces() -> impl Strategy<Value = Vec<&'static str>> {
    let piece = prop::sample::select(vec![
        "<think>",
        "</think>",
        "\n",
        "\n\n",
        "a",
        "<",
        "</",
        "think",
        ">",
        "é",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "final",
        "analysis",
        " to=f",
        "assistant",
        "<|channel>",
        "<channel|>",
        "thought\n",
    ]);
    prop::collection::vec(piece, 0..12)
}

proptest! {
    /// The same answer in single bytes and in one piece between marks: as the decoder holds back
    /// partial characters only, all other splits are between the two.
    #[test]
    fn every_split_gives_the_same_parts(pieces in pieces(), cuts in prop::collection::vec(0usize..40, 0..8)) {
        let answer = pieces.concat();
        for (model, prompt) in [(&QWEN, "<think>"), (&SPELLED, "<think>"), (&SPELLED, ""),
            (&GPT_OSS, "<|start|>assistant"), (&GEMMA, "<|turn>model\n")] {
            let bytes = model.parse(prompt, &answer);
            let tokenizer = tokenizer(model.added, model.special);
            let dialect = Dialect::detect(Some(model.template), &tokenizer);
            let prompt = tokenizer.encode(prompt, false).unwrap();
            let mut parser = dialect.parser(&tokenizer, &prompt, no_tools()).unwrap();
            let mut parsed = Parsed::default();
            let mut text = Vec::new();
            let flush = |parser: &mut super::AnswerParser, text: &mut Vec<u32>| {
                let whole = tokenizer.decode(text, false).unwrap();
                text.clear();
                let mut start = 0usize;
                for cut in cuts.iter().chain([&usize::MAX]) {
                    let end = whole.len().min(start.saturating_add(*cut));
                    let end = (end..=whole.len()).find(|end| whole.is_char_boundary(*end)).unwrap();
                    parser.machine.text(&whole[start..end], &mut parser.deltas);
                    start = end;
                }
            };
            for token in tokenizer.encode(&answer, false).unwrap() {
                match parser.machine.mark_for(token) {
                    Some(mark) => {
                        flush(&mut parser, &mut text);
                        parser.machine.mark(mark, &mut parser.deltas);
                    }
                    None if tokenizer.is_special(token) => {}
                    None => text.push(token),
                }
            }
            flush(&mut parser, &mut text);
            parser.deltas.iter().for_each(|delta| parsed.add(delta));
            parser.finish().unwrap().for_each(|delta| parsed.add(delta));
            prop_assert_eq!(bytes, parsed);
        }
    }
}
