//! Grammars of calls, in each syntax.

use std::cell::RefCell;

use moeflux_base::{Error, GrammarError};
use serde_json::{Value, json};

use super::{
    compile::Compiler,
    form::{CallConstraint, GrammarNote, invalid},
    lark::{LarkWriter, json_schema, quoted},
    parameters::{ElementSyntax, ParameterTag, notation},
    schema::{self, SchemaRules},
};
use crate::{
    chat::Tool,
    dialect::{CHANNEL_MARKS, CallSyntax},
};

/// Tools of a request, and what their calls depend on.
pub(super) struct ToolRules<'a> {
    pub(super) form: &'a CallConstraint,
    /// Source of the model's template, which tells variants of a syntax apart.
    pub(super) template: &'a str,
    pub(super) compiler: &'a Compiler,
    /// Rules of the schemas of strict tools.
    pub(super) schemas: SchemaRules,
    /// Keywords that are not enforced.
    pub(super) notes: RefCell<Vec<GrammarNote>>,
}

/// Arguments of a tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArgumentRule {
    /// Every keyword of the schema is enforced.
    Strict,
    /// Keywords that cannot be enforced are left out.
    Lenient,
    /// Any arguments.
    Free,
}

/// Grammar of the calls of an answer.
pub(super) struct CallGrammar {
    /// Marks that open calls: a grammar begins behind one of them.
    pub(super) openings: &'static [&'static str],
    /// Expression for one block of calls behind its mark.
    pub(super) rest: String,
    /// Text between blocks; `None` if there is one block only.
    between: Option<&'static str>,
    /// The mark before the first block.
    opening: &'static str,
}

impl CallGrammar {
    /// Expression for all calls of an answer.
    pub(super) fn all(&self, lark: &LarkWriter) -> String {
        let block = format!("{} ({})", lark.spell(self.opening), self.rest);
        match self.between {
            None => block,
            Some("") => format!("({block})+"),
            Some(text) => format!("{block} ({} {block})*", quoted(text)),
        }
    }

    /// Writes the calls of `rules` in a syntax.
    ///
    /// # Errors
    /// A schema that must be enforced cannot be.
    pub(super) fn write(
        syntax: CallSyntax,
        rules: &ToolRules<'_>,
        lark: &mut LarkWriter,
    ) -> Result<Self, Error> {
        if rules.form.tools.is_empty() {
            return Err(invalid("", "there are no tools to call").into());
        }
        let single = rules.form.single;
        let repeat = |text| (!single).then_some(text);
        let many = if single { "" } else { "+" };
        Ok(match syntax {
            CallSyntax::Json => {
                let calls = json_calls(rules, lark, |name| {
                    let name = Value::from(name);
                    [format!("{{\"name\": {name}, \"arguments\": "), "}".to_owned()]
                })?;
                let rest = format!("\"\\n\" ({calls}) \"\\n\" {}", lark.spell("</tool_call>"));
                Self::blocks(&["<tool_call>"], rest, repeat("\n"))
            }
            CallSyntax::Xml => {
                let calls = element_calls(rules, lark, &XML)?;
                let rest = format!("\"\\n\" ({calls}) {}", lark.spell("</tool_call>"));
                Self::blocks(&["<tool_call>"], rest, repeat("\n"))
            }
            CallSyntax::Minimax => {
                let calls = element_calls(rules, lark, &MINIMAX)?;
                let close = lark.spell("</minimax:tool_call>");
                let rest = format!("\"\\n\" ({calls}){many} {close}");
                Self::blocks(&["<minimax:tool_call>"], rest, None)
            }
            CallSyntax::Dsml => {
                let calls = element_calls(rules, lark, &DSML)?;
                let (openings, close): (&[&str], _) =
                    match rules.template.contains("function_calls") {
                        true => (&["<｜DSML｜function_calls>"], "</｜DSML｜function_calls>"),
                        false => (&["<｜DSML｜tool_calls>"], "</｜DSML｜tool_calls>"),
                    };
                let rest = format!("\"\\n\" ({calls}){many} {}", lark.spell(close));
                Self::blocks(openings, rest, None)
            }
            CallSyntax::Glm => {
                let calls = element_calls(rules, lark, &GLM)?;
                Self::blocks(&["<tool_call>"], format!("({calls})"), repeat("\n"))
            }
            CallSyntax::Deepseek => {
                // V3 has the type of the tool first, and a fence around the arguments.
                let is_fenced = rules.template.contains("```json");
                let calls = json_calls(rules, lark, |name| match is_fenced {
                    true => [
                        format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"),
                        "\n```<｜tool▁call▁end｜>".to_owned(),
                    ],
                    false => [
                        format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"),
                        "<｜tool▁call▁end｜>".to_owned(),
                    ],
                })?;
                let more = match (single, is_fenced) {
                    (true, _) => String::new(),
                    (false, true) => format!(" (\"\\n\" ({calls}))*"),
                    (false, false) => format!(" ({calls})*"),
                };
                let rest = format!("({calls}){more} {}", lark.spell("<｜tool▁calls▁end｜>"));
                Self::blocks(&["<｜tool▁calls▁begin｜>"], rest, None)
            }
            CallSyntax::Kimi => {
                let begin = lark.spell("<|tool_call_begin|>");
                let arguments = lark.spell("<|tool_call_argument_begin|>");
                let end = lark.spell("<|tool_call_end|>");
                let calls = each_tool(rules, |tool| {
                    let json = argument_json(rules, lark, tool)?;
                    let name = quoted(&format!("functions.{}:", tool.name));
                    Ok(format!("{begin} {name} /[0-9]+/ {arguments} {json} {end}"))
                })?;
                let close = lark.spell("<|tool_calls_section_end|>");
                Self::blocks(
                    &["<|tool_calls_section_begin|>"],
                    format!("({calls}){many} {close}"),
                    None,
                )
            }
            CallSyntax::Gemma4 => {
                let calls = each_tool(rules, |tool| {
                    let tool = &plain_tool(rules, tool);
                    let arguments = notation(lark, tool, rule(rules, tool))?;
                    Ok(format!("{} {arguments}", quoted(&format!("call:{}", tool.name))))
                })?;
                let rest = format!("({calls}) {}", lark.spell("<tool_call|>"));
                Self::blocks(&["<|tool_call>"], rest, repeat(""))
            }
            CallSyntax::Harmony => {
                let [constrain, message] = [2, 3].map(|mark| lark.spell(CHANNEL_MARKS[mark]));
                let calls = each_tool(rules, |tool| {
                    let json = argument_json(rules, lark, tool)?;
                    let header = quoted(&format!("commentary to=functions.{} ", tool.name));
                    Ok(format!("{header} {constrain} \"json\" {message} {json}"))
                })?;
                Self::blocks(&[], calls, None)
            }
        })
    }

    fn blocks(
        openings: &'static [&'static str],
        rest: String,
        between: Option<&'static str>,
    ) -> Self {
        Self { openings, rest, between, opening: openings.first().unwrap_or(&"") }
    }
}

const XML: ElementSyntax = ElementSyntax {
    open: ["<function=", ">\n"],
    tag: ParameterTag { open: "<parameter=", text: ">\n", json: ">\n", close: "\n</parameter>\n" },
    close: "</function>\n",
};

const MINIMAX: ElementSyntax = ElementSyntax {
    open: ["<invoke name=\"", "\">\n"],
    tag: ParameterTag {
        open: "<parameter name=\"",
        text: "\">",
        json: "\">",
        close: "</parameter>\n",
    },
    close: "</invoke>\n",
};

const DSML: ElementSyntax = ElementSyntax {
    open: ["<｜DSML｜invoke name=\"", "\">\n"],
    tag: ParameterTag {
        open: "<｜DSML｜parameter name=\"",
        text: "\" string=\"true\">",
        json: "\" string=\"false\">",
        close: "</｜DSML｜parameter>\n",
    },
    close: "</｜DSML｜invoke>\n",
};

const GLM: ElementSyntax = ElementSyntax {
    open: ["", "\n"],
    tag: ParameterTag {
        open: "<arg_key>",
        text: "</arg_key>\n<arg_value>",
        json: "</arg_key>\n<arg_value>",
        close: "</arg_value>\n",
    },
    close: "</tool_call>",
};

/// A tool whose parameters have no keywords that constrain nothing.
fn plain_tool(rules: &ToolRules<'_>, tool: &Tool) -> Tool {
    let mut plain = tool.clone();
    if rule(rules, tool) != ArgumentRule::Free {
        note(rules, tool, schema::notes(&tool.parameters));
        plain.parameters = schema::without_annotations(&tool.parameters).into();
    }
    plain
}

/// Rule of a tool's arguments.
pub(super) fn rule(rules: &ToolRules<'_>, tool: &Tool) -> ArgumentRule {
    match (tool.strict, rules.form.required) {
        (true, _) if rules.schemas.lenient => ArgumentRule::Lenient,
        (true, _) => ArgumentRule::Strict,
        (false, true) => ArgumentRule::Lenient,
        (false, false) => ArgumentRule::Free,
    }
}

/// Alternatives for all tools.
fn each_tool(
    rules: &ToolRules<'_>,
    mut call: impl FnMut(&Tool) -> Result<String, Error>,
) -> Result<String, Error> {
    let calls: Vec<String> = rules.form.tools.iter().map(&mut call).collect::<Result<_, _>>()?;
    Ok(calls.join(" | "))
}

/// Calls whose arguments are JSON between two texts.
fn json_calls(
    rules: &ToolRules<'_>,
    lark: &mut LarkWriter,
    around: impl Fn(&str) -> [String; 2],
) -> Result<String, Error> {
    each_tool(rules, |tool| {
        let json = argument_json(rules, lark, tool)?;
        let [before, after] = around(&tool.name).map(|text| lark.spell(&text));
        Ok(format!("{before} {json} {after}"))
    })
}

/// Calls whose parameters are elements.
fn element_calls(
    rules: &ToolRules<'_>,
    lark: &mut LarkWriter,
    syntax: &ElementSyntax,
) -> Result<String, Error> {
    each_tool(rules, |tool| {
        let tool = plain_tool(rules, tool);
        syntax.call(lark, &tool, rules)
    })
}

/// Expression for the arguments of a tool as JSON.
fn argument_json(
    rules: &ToolRules<'_>,
    lark: &mut LarkWriter,
    tool: &Tool,
) -> Result<String, Error> {
    let rule = rule(rules, tool);
    if rule == ArgumentRule::Free {
        return Ok(lark.json(json_schema(&json!({"type": "object"}))?));
    }
    let lenient = rule == ArgumentRule::Lenient;
    let schemas = SchemaRules { lenient, ..rules.schemas };
    let schema = match rules.compiler.schema(&object_schema(&tool.parameters), schemas, true) {
        Ok(normal) if lenient && lark.has_no_room(&normal.schema) => {
            let text = "is not enforced: the tools' schemas are too long together".to_owned();
            note(rules, tool, vec![GrammarNote { path: String::new(), text }]);
            json!({"type": "object"})
        }
        Ok(normal) => {
            note(rules, tool, normal.notes);
            normal.schema
        }
        Err(error) if lenient => {
            tracing::warn!(tool = tool.name, %error, "arguments are not constrained");
            json!({"type": "object"})
        }
        Err(error) => return Err(of_tool(&tool.name, error)),
    };
    Ok(lark.json(json_schema(&schema)?))
}

/// Schema of a tool's arguments, which are an object whatever the schema of its parameters says.
fn object_schema(parameters: &Value) -> Value {
    let mut map = parameters.as_object().cloned().unwrap_or_default();
    map.insert("type".to_owned(), "object".into());
    Value::Object(map)
}

/// Keeps notes of a tool's schema, with its name.
fn note(rules: &ToolRules<'_>, tool: &Tool, notes: Vec<GrammarNote>) {
    let named = notes.into_iter().map(|GrammarNote { path, text }| {
        let path =
            if path.is_empty() { tool.name.clone() } else { format!("{}.{path}", tool.name) };
        GrammarNote { path, text }
    });
    rules.notes.borrow_mut().extend(named);
}

/// An error of the schema of a tool, with its name in the path.
fn of_tool(name: &str, error: Error) -> Error {
    match error {
        Error::Grammar(GrammarError::Invalid { path, problem }) => {
            let path = if path.is_empty() { name.to_owned() } else { format!("{name}.{path}") };
            GrammarError::Invalid { path, problem }.into()
        }
        other => other,
    }
}
