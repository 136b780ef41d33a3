//! Models that call tools, their answers in parts, and calls as their templates write them.

use serde_json::{Value, json};

use super::byte_tokenizer::tokenizer;
use crate::{
    chat::{Tool, ToolSet},
    dialect::{
        calls::CallSyntax,
        delta::Delta,
        dialect::{AnswerTools, Dialect},
        harmony,
        parser::AnswerParser,
    },
    tokenizer::Tokenizer,
};

/// A model: its template, as far as dialects look at it, and its added tokens.
pub(super) struct Caller {
    pub(super) syntax: CallSyntax,
    pub(super) template: &'static str,
    pub(super) added: &'static [&'static str],
    pub(super) special: usize,
    pub(super) prompt: &'static str,
}

pub(super) const CALLERS: [Caller; 10] = [
    Caller {
        syntax: CallSyntax::Json,
        template: "</think><tool_call>\n{\"name\": \"f\", \"arguments\": {}}",
        added: &["<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
        special: 1,
        prompt: "",
    },
    Caller {
        syntax: CallSyntax::Xml,
        template: "</think><tool_call>\n<function=f>\n<parameter=k>",
        added: &["<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
        special: 1,
        prompt: "",
    },
    // Without tokens for the marks.
    Caller {
        syntax: CallSyntax::Xml,
        template: "</think><tool_call>\n<function=f>\n<parameter=k>",
        added: &["<|im_end|>"],
        special: 1,
        prompt: "",
    },
    Caller {
        syntax: CallSyntax::Deepseek,
        template: "</think><｜tool▁calls▁begin｜>",
        added: &[
            "<｜end▁of▁sentence｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
            "<think>",
            "</think>",
        ],
        special: 1,
        prompt: "",
    },
    Caller {
        syntax: CallSyntax::Dsml,
        template: "</think><｜DSML｜function_calls>",
        added: &["<｜end▁of▁sentence｜>", "｜DSML｜", "<think>", "</think>"],
        special: 2,
        prompt: "",
    },
    Caller {
        syntax: CallSyntax::Kimi,
        template: "</think><|tool_calls_section_begin|>",
        added: &[
            "<|im_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<think>",
            "</think>",
        ],
        special: 6,
        prompt: "",
    },
    Caller {
        syntax: CallSyntax::Glm,
        template: "</think><tool_call>{{ name }}<arg_key>",
        added: &[
            "<|observation|>",
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ],
        special: 1,
        prompt: "",
    },
    Caller {
        syntax: CallSyntax::Harmony,
        template: "<|channel|>",
        added: &harmony::MARKS,
        special: 7,
        prompt: "<|start|>assistant",
    },
    Caller {
        syntax: CallSyntax::Minimax,
        template: "</think><minimax:tool_call>",
        added: &["[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
        special: 1,
        prompt: "",
    },
    Caller {
        syntax: CallSyntax::Gemma4,
        template: "<|channel>thought\n<channel|><|tool_call>call:",
        added: &[
            "<turn|>",
            "<|channel>",
            "<channel|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|\"|>",
            "<|tool_response>",
        ],
        special: 7,
        prompt: "",
    },
];

/// Stands for text that spells marks without their tokens.
pub(super) const SPELLED: char = '\u{1}';

/// An answer's parts.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Answered {
    pub(super) reasoning: String,
    pub(super) text: String,
    pub(super) calls: Vec<AnsweredCall>,
    /// All parts in order.
    pub(super) log: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct AnsweredCall {
    pub(super) name: String,
    pub(super) json: String,
    pub(super) is_complete: bool,
}

impl Answered {
    pub(super) fn add(&mut self, delta: Delta<'_>) {
        let mut log = |kind: &str, text: &str| match self.log.last_mut() {
            Some(last) if last.starts_with(kind) && kind != "end" => last.push_str(text),
            _ => self.log.push([kind, text].concat()),
        };
        match delta {
            Delta::Reasoning(text) => {
                log("reasoning:", text);
                self.reasoning.push_str(text);
            }
            Delta::Text(text) => {
                log("text:", text);
                self.text.push_str(text);
            }
            Delta::CallStart { index, name } => {
                log("start:", name);
                assert_eq!(index, self.calls.len());
                assert!(self.calls.iter().all(|call| call.is_complete), "one call at a time");
                self.calls.push(AnsweredCall { name: name.to_owned(), ..AnsweredCall::default() });
            }
            Delta::CallArguments { index, json } => {
                log("json:", json);
                assert_eq!(index + 1, self.calls.len());
                assert!(!self.calls[index].is_complete);
                self.calls[index].json.push_str(json);
            }
            Delta::CallEnd { index, .. } => {
                log("end", "");
                let call = &mut self.calls[index];
                assert!(serde_json::from_str::<Value>(&call.json).unwrap().is_object());
                call.is_complete = true;
            }
        }
    }

    /// Complete calls with their arguments.
    pub(super) fn complete(&self) -> Vec<(&str, Value)> {
        let complete = self.calls.iter().filter(|call| call.is_complete);
        complete.map(|call| (&*call.name, serde_json::from_str(&call.json).unwrap())).collect()
    }
}

pub(super) fn tools() -> ToolSet {
    let schema = |properties: Value| json!({"type": "object", "properties": properties});
    let tools = [
        ("write", schema(json!({"path": {"type": "string"}, "content": {"type": "string"}}))),
        (
            "f",
            schema(json!({
                "s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"},
                "o": {"type": "object"}, "l": {"type": "array"}, "x": {},
                "z": {"type": ["string", "null"]},
            })),
        ),
        ("now", schema(json!({}))),
    ];
    ToolSet { tools: tools.map(|(name, schema)| Tool::new(name, schema)).to_vec() }
}

/// Parser with its tokenizer.
pub(super) struct Parsing {
    pub(super) tokenizer: Tokenizer,
    pub(super) parser: AnswerParser,
    pub(super) answered: Answered,
}

impl Parsing {
    pub(super) fn take(&mut self, chunk: usize, text: &mut String) {
        let chars: Vec<char> = std::mem::take(text).chars().collect();
        for chunk in chars.chunks(chunk) {
            self.parser.deltas.clear();
            let text: String = chunk.iter().collect();
            self.parser.machine.text(&text, &mut self.parser.deltas);
            self.parser.deltas.iter().for_each(|delta| self.answered.add(delta));
        }
    }

    pub(super) fn text(&mut self, token: u32) {
        if token < 256 {
            let mut text = char::from_u32(token).map(String::from).unwrap_or_default();
            self.take(1, &mut text);
        }
    }

    pub(super) fn token(&mut self, token: u32) {
        self.parser.deltas.clear();
        if let Some(mark) = self.parser.machine.mark_for(token) {
            self.parser.machine.mark(mark, &mut self.parser.deltas);
        }
        self.parser.deltas.iter().for_each(|delta| self.answered.add(delta));
    }
}

impl Caller {
    pub(super) fn parsing(&self, tools: &ToolSet) -> Parsing {
        let tokenizer = tokenizer(self.added, self.special);
        let dialect = Dialect::detect(Some(self.template), &tokenizer);
        assert_eq!(dialect.call_syntax(), Some(self.syntax));
        let prompt = tokenizer.encode(self.prompt, false).unwrap();
        let tools = AnswerTools { tools, calls: dialect.call_syntax() };
        let parser = dialect.parser(&tokenizer, &prompt, tools).unwrap();
        Parsing { tokenizer, parser, answered: Answered::default() }
    }

    /// Parses an answer in chunks of characters. `spelled` replaces [`SPELLED`].
    pub(super) fn chunked(&self, answer: &str, spelled: &str, chunk: usize) -> Answered {
        self.in_chunks(self.parsing(&tools()), answer, spelled, chunk)
    }

    fn in_chunks(&self, parsing: Parsing, answer: &str, spelled: &str, chunk: usize) -> Answered {
        let mut parsing = parsing;
        let mut text = String::new();
        let mut rest = answer;
        while let Some(c) = rest.chars().next() {
            let added = self.added.iter().find(|mark| rest.starts_with(**mark));
            match added {
                Some(mark) => {
                    let token = parsing.tokenizer.token_to_id(mark).unwrap();
                    let is_mark = parsing.parser.machine.mark_for(token).is_some();
                    if is_mark || parsing.tokenizer.is_special(token) {
                        parsing.take(chunk, &mut text);
                        parsing.token(token);
                    } else {
                        text.push_str(mark);
                    }
                    rest = &rest[mark.len()..];
                }
                None if c == SPELLED => {
                    text.push_str(spelled);
                    rest = &rest[1..];
                }
                None => {
                    text.push(c);
                    rest = &rest[c.len_utf8()..];
                }
            }
        }
        parsing.take(chunk, &mut text);
        let Parsing { mut parser, mut answered, .. } = parsing;
        parser.finish().unwrap().for_each(|delta| answered.add(delta));
        answered
    }

    /// Parses an answer without tools.
    pub(super) fn without_tools(&self, answer: &str) -> Answered {
        self.in_chunks(self.parsing(&ToolSet::default()), answer, "", usize::MAX)
    }

    /// Parses an answer in chunks of every length, and token by token; the results are equal.
    pub(super) fn parse(&self, answer: &str) -> Answered {
        self.parse_spelled(answer, "")
    }

    pub(super) fn parse_spelled(&self, answer: &str, spelled: &str) -> Answered {
        let whole = self.chunked(answer, spelled, usize::MAX);
        let length = answer.chars().count() + spelled.chars().count();
        for chunk in 1..=length.min(40) {
            let parts = self.chunked(answer, spelled, chunk);
            assert_eq!(parts, whole, "{:?} in chunks of {chunk}: {answer:?}", self.syntax);
        }
        if spelled.is_empty() {
            let mut parsing = self.parsing(&tools());
            for token in parsing.tokenizer.encode(answer, false).unwrap() {
                let deltas = parsing.parser.push(token).unwrap();
                deltas.for_each(|delta| parsing.answered.add(delta));
            }
            let Parsing { mut parser, mut answered, .. } = parsing;
            parser.finish().unwrap().for_each(|delta| answered.add(delta));
            assert_eq!(answered, whole, "{:?} by tokens: {answer:?}", self.syntax);
        }
        whole
    }

    /// A block of calls as templates write it. Strings are [`SPELLED`] where `is_spelled`.
    pub(super) fn render(&self, calls: &[(&str, Value)], is_spelled: bool) -> String {
        let raw = |value: &Value| match value {
            Value::String(_) if is_spelled => SPELLED.to_string(),
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        let parameters = |arguments: &Value, write: &dyn Fn(&str, &Value) -> String| -> String {
            let arguments = arguments.as_object().unwrap();
            arguments.iter().map(|(key, value)| write(key, value)).collect()
        };
        let json = |arguments: &Value| match is_spelled {
            true => format!("{{\"content\": {SPELLED}}}"),
            false => arguments.to_string(),
        };
        let each = |write: &dyn Fn(&str, &Value) -> String| -> String {
            calls.iter().map(|(name, arguments)| write(name, arguments)).collect()
        };
        match self.syntax {
            CallSyntax::Json => each(&|name, arguments| {
                let json = json(arguments);
                format!(
                    "\n<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {json}}}\n</tool_call>"
                )
            }),
            CallSyntax::Xml => each(&|name, arguments| {
                let write =
                    |k: &str, v: &Value| format!("<parameter={k}>\n{}\n</parameter>\n", raw(v));
                let parameters = parameters(arguments, &write);
                format!("\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
            }),
            CallSyntax::Minimax => {
                let calls = each(&|name, arguments| {
                    let write = |k: &str, v: &Value| {
                        format!("<parameter name=\"{k}\">{}</parameter>\n", raw(v))
                    };
                    let parameters = parameters(arguments, &write);
                    format!("<invoke name=\"{name}\">\n{parameters}</invoke>\n")
                });
                format!("\n<minimax:tool_call>\n{calls}</minimax:tool_call>")
            }
            CallSyntax::Dsml => {
                let calls = each(&|name, arguments| {
                    let write = |k: &str, v: &Value| {
                        let is_string = v.is_string();
                        format!(
                            "<｜DSML｜parameter name=\"{k}\" string=\"{is_string}\">{}\
                             </｜DSML｜parameter>\n",
                            raw(v)
                        )
                    };
                    let parameters = parameters(arguments, &write);
                    format!("<｜DSML｜invoke name=\"{name}\">\n{parameters}</｜DSML｜invoke>\n")
                });
                format!("\n\n<｜DSML｜function_calls>\n{calls}</｜DSML｜function_calls>")
            }
            CallSyntax::Glm => each(&|name, arguments| {
                let write = |k: &str, v: &Value| {
                    format!("<arg_key>{k}</arg_key>\n<arg_value>{}</arg_value>\n", raw(v))
                };
                let parameters = parameters(arguments, &write);
                format!("\n<tool_call>{name}\n{parameters}</tool_call>")
            }),
            CallSyntax::Deepseek => {
                let calls = each(&|name, arguments| {
                    let json = json(arguments);
                    format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>")
                });
                format!("<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
            }
            CallSyntax::Kimi => {
                let calls = each(&|name, arguments| {
                    let json = json(arguments);
                    format!(
                        "<|tool_call_begin|>functions.{name}:3<|tool_call_argument_begin|>{json}\
                         <|tool_call_end|>"
                    )
                });
                format!("<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>")
            }
            CallSyntax::Harmony => each(&|name, arguments| {
                let json = json(arguments);
                format!(
                    "<|start|>assistant<|channel|>commentary to=functions.{name} \
                     <|constrain|>json<|message|>{json}<|call|>"
                )
            }),
            CallSyntax::Gemma4 => each(&|name, arguments| {
                let inner = gemma(arguments, is_spelled);
                format!("<|tool_call>call:{name}{inner}<tool_call|>")
            }),
        }
    }

    /// Text of the answer before calls.
    pub(super) fn before(&self, text: &str) -> String {
        match self.syntax {
            CallSyntax::Harmony => {
                format!("<|channel|>commentary<|message|>{text}<|end|>")
            }
            _ => text.to_owned(),
        }
    }
}

/// A value in Gemma's notation.
pub(super) fn gemma(value: &Value, is_spelled: bool) -> String {
    match value {
        Value::String(_) if is_spelled => format!("<|\"|>{SPELLED}<|\"|>"),
        Value::String(text) => format!("<|\"|>{text}<|\"|>"),
        Value::Array(values) => {
            let values: Vec<_> = values.iter().map(|value| gemma(value, is_spelled)).collect();
            format!("[{}]", values.join(","))
        }
        Value::Object(values) => {
            let pair = |(key, value)| format!("{key}:{}", gemma(value, is_spelled));
            let values: Vec<_> = values.iter().map(pair).collect();
            format!("{{{}}}", values.join(","))
        }
        value => value.to_string(),
    }
}

/// Callers of one syntax.
pub(super) fn callers(syntax: CallSyntax) -> impl Iterator<Item = &'static Caller> {
    CALLERS.iter().filter(move |caller| caller.syntax == syntax)
}
