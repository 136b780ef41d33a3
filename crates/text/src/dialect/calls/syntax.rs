//! Syntaxes of calls.

use std::fmt;

use super::{
    deepseek, dsml,
    elements::ElementReader,
    finder::CallReader,
    gemma4::{self, GemmaReader},
    glm::{self, GlmReader},
    json::{self, JsonReader},
    kimi, minimax,
    sections::SectionReader,
    xml,
};

/// Syntax of calls in a model's answers, found by the text of its chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallSyntax {
    /// JSON objects between `<tool_call>` tags: Qwen3, Hermes.
    Json,
    /// `<function=` and `<parameter=` tags: Qwen3-Coder, Qwen3.5.
    Xml,
    /// Marks around a name and JSON: DeepSeek-V3, V3.1.
    Deepseek,
    /// Tags with a mark: DeepSeek-V3.2.
    Dsml,
    /// Marks around an id and JSON: Kimi-K2.
    Kimi,
    /// `<arg_key>` and `<arg_value>` tags: GLM-4.5 to GLM-5.
    Glm,
    /// Messages to a recipient: gpt-oss.
    Harmony,
    /// `<invoke>` and `<parameter>` tags: MiniMax-M2.
    Minimax,
    /// A notation without quotes: Gemma 4.
    Gemma4,
}

/// Marks of calls in templates, in the order in which they count.
const TEMPLATE_MARKS: [(&str, CallSyntax); 8] = [
    ("<|channel|>", CallSyntax::Harmony),
    (dsml::MARK, CallSyntax::Dsml),
    ("<｜tool▁calls▁begin｜>", CallSyntax::Deepseek),
    ("<|tool_calls_section_begin|>", CallSyntax::Kimi),
    ("<minimax:tool_call>", CallSyntax::Minimax),
    ("<|tool_call>call:", CallSyntax::Gemma4),
    ("<arg_key>", CallSyntax::Glm),
    ("<parameter=", CallSyntax::Xml),
];

impl CallSyntax {
    /// Syntax by the source of a template. That of channels needs their dialect.
    pub(crate) fn detect(template: &str, has_channels: bool) -> Option<CallSyntax> {
        let fits = |syntax| has_channels || syntax != CallSyntax::Harmony;
        let mut marks = TEMPLATE_MARKS.iter().filter(|(_, syntax)| fits(*syntax));
        let found = marks.find(|(mark, _)| template.contains(mark));
        // The key, in single or double quotes of the template.
        let has_arguments =
            || ["arguments\"", "arguments\\\""].iter().any(|key| template.contains(key));
        let is_json = || template.contains("<tool_call>") && has_arguments();
        found.map(|(_, syntax)| *syntax).or_else(|| is_json().then_some(CallSyntax::Json))
    }

    /// Tokens that end an answer in this syntax, besides those of a checkpoint.
    pub(crate) fn end_tokens(self) -> &'static [&'static str] {
        match self {
            CallSyntax::Json | CallSyntax::Xml | CallSyntax::Kimi => &["<|im_end|>"],
            CallSyntax::Deepseek | CallSyntax::Dsml => &["<｜end▁of▁sentence｜>"],
            CallSyntax::Glm => &["<|observation|>", "<|user|>", "<|endoftext|>"],
            CallSyntax::Harmony => &["<|call|>", "<|return|>"],
            CallSyntax::Minimax => &["[e~["],
            CallSyntax::Gemma4 => &["<turn|>", "<|tool_response>"],
        }
    }

    /// Marks that open calls.
    pub(super) fn openings(self) -> &'static [&'static str] {
        match self {
            CallSyntax::Json => json::OPENINGS,
            CallSyntax::Xml => xml::OPENINGS,
            CallSyntax::Deepseek => deepseek::OPENINGS,
            CallSyntax::Dsml => dsml::OPENINGS,
            CallSyntax::Kimi => kimi::OPENINGS,
            CallSyntax::Glm => glm::OPENINGS,
            CallSyntax::Harmony => &[],
            CallSyntax::Minimax => minimax::OPENINGS,
            CallSyntax::Gemma4 => gemma4::OPENINGS,
        }
    }

    /// Further marks inside calls, whose text a reader needs.
    pub(super) fn inner(self) -> &'static [&'static str] {
        match self {
            CallSyntax::Json => json::TOKENS,
            CallSyntax::Xml => xml::TOKENS,
            CallSyntax::Deepseek => deepseek::TOKENS,
            CallSyntax::Dsml => dsml::TOKENS,
            CallSyntax::Kimi => kimi::TOKENS,
            CallSyntax::Glm => glm::TOKENS,
            CallSyntax::Harmony => &[],
            CallSyntax::Minimax => minimax::TOKENS,
            CallSyntax::Gemma4 => gemma4::TOKENS,
        }
    }

    /// Line ends that templates put between an answer's text and its first call.
    pub(super) fn gap(self) -> usize {
        match self {
            CallSyntax::Xml | CallSyntax::Dsml => 2,
            CallSyntax::Json | CallSyntax::Glm | CallSyntax::Minimax => 1,
            _ => 0,
        }
    }

    /// Marks that close calls, and a call where its own mark opened it.
    pub(super) fn closings(self, opening: usize) -> &'static [&'static str] {
        match self {
            CallSyntax::Json | CallSyntax::Glm => &["</tool_call>"],
            CallSyntax::Xml if opening == xml::BARE => &["</function>"],
            CallSyntax::Xml => &["</tool_call>"],
            CallSyntax::Deepseek => &["<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"],
            CallSyntax::Dsml => &["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"],
            CallSyntax::Kimi => {
                &["<|tool_calls_section_end|>", "<|tool_call_section_end|>", "<|tool_call_end|>"]
            }
            CallSyntax::Harmony => &[],
            CallSyntax::Minimax => &["</minimax:tool_call>"],
            CallSyntax::Gemma4 => &["<tool_call|>"],
        }
    }

    /// Text with which a call begins behind the mark that opens it; `None` if the marks are tokens
    /// that no text has.
    pub(super) fn beginning(self) -> Option<&'static str> {
        match self {
            CallSyntax::Json => Some("{"),
            CallSyntax::Xml => Some("<function="),
            CallSyntax::Dsml => Some("<｜DSML｜invoke"),
            CallSyntax::Minimax => Some("<invoke"),
            // The name of the tool.
            CallSyntax::Glm => Some(""),
            CallSyntax::Deepseek | CallSyntax::Kimi | CallSyntax::Gemma4 | CallSyntax::Harmony => {
                None
            }
        }
    }

    pub(super) fn reader(self, opening: usize) -> CallReader {
        match self {
            CallSyntax::Json | CallSyntax::Harmony => CallReader::Json(JsonReader::default()),
            CallSyntax::Xml => {
                CallReader::Elements(ElementReader::new(&xml::TAGS, opening == xml::BARE))
            }
            CallSyntax::Minimax => CallReader::Elements(ElementReader::new(&minimax::TAGS, false)),
            CallSyntax::Dsml => CallReader::Elements(ElementReader::new(&dsml::TAGS, false)),
            CallSyntax::Deepseek => {
                CallReader::Section(SectionReader::new(&deepseek::MARKS, opening == deepseek::CALL))
            }
            CallSyntax::Kimi => {
                CallReader::Section(SectionReader::new(&kimi::MARKS, opening == kimi::CALL))
            }
            CallSyntax::Glm => CallReader::Glm(GlmReader::default()),
            CallSyntax::Gemma4 => CallReader::Gemma(GemmaReader::default()),
        }
    }
}

impl fmt::Display for CallSyntax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CallSyntax::Json => "json",
            CallSyntax::Xml => "xml",
            CallSyntax::Deepseek => "deepseek",
            CallSyntax::Dsml => "dsml",
            CallSyntax::Kimi => "kimi",
            CallSyntax::Glm => "glm",
            CallSyntax::Harmony => "harmony",
            CallSyntax::Minimax => "minimax",
            CallSyntax::Gemma4 => "gemma",
        })
    }
}
