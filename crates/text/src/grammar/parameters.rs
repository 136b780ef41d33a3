//! Parameters of calls that are no JSON object: elements between tags, and Gemma's notation.

use moeflux_base::{Error, GrammarError};
use serde_json::{Map, Value};

use super::{
    calls::{ArgumentRule, ToolRules, rule},
    form::{GrammarNote, invalid},
    lark::{LarkWriter, json_schema, quoted},
    schema::{self, SchemaRules},
};
use crate::chat::{ParameterType, Tool};

/// Any text.
const ANY_TEXT: &str = "(?s:.*)";

/// Name of a parameter that no schema names.
const ANY_NAME: &str = r#"/[^<>"\s{}:,]+/"#;

/// Most steps from a schema to another one that it refers to, and most nested values.
const MAX_DEPTH: usize = 16;

/// Begins and ends a text in Gemma's notation.
const QUOTE: &str = "<|\"|>";

/// Keywords that say nothing about a text.
const DESCRIPTIONS: [&str; 9] = [
    "type",
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "deprecated",
    "readOnly",
    "writeOnly",
];

/// Tags of a call whose parameters are elements.
pub(super) struct ElementSyntax {
    /// Text before and behind the tool's name.
    pub(super) open: [&'static str; 2],
    pub(super) tag: ParameterTag,
    pub(super) close: &'static str,
}

/// Tags of a parameter.
pub(super) struct ParameterTag {
    /// Text before the name.
    pub(super) open: &'static str,
    /// Text between the name and a value that is text.
    pub(super) text: &'static str,
    /// Text between the name and a value that is JSON.
    pub(super) json: &'static str,
    /// Text behind the value.
    pub(super) close: &'static str,
}

/// A parameter of a tool.
struct Parameter<'a> {
    tool: &'a Tool,
    name: &'a str,
    schema: &'a Value,
    is_required: bool,
    is_strict: bool,
}

impl ElementSyntax {
    /// Expression for a call of a tool.
    ///
    /// # Errors
    /// The schema of a strict tool cannot be enforced.
    pub(super) fn call(
        &self,
        lark: &mut LarkWriter,
        tool: &Tool,
        rules: &ToolRules<'_>,
    ) -> Result<String, Error> {
        let [before, behind] = self.open;
        let mut parts = vec![lark.spell(&format!("{before}{}{behind}", tool.name))];
        let tag = &self.tag;
        match parameters(tool, rule(rules, tool))? {
            None => {
                let value = lark.text_until(ANY_TEXT, tag.close);
                let (open, text) = (lark.spell(tag.open), lark.spell(tag.text));
                parts.push(format!("({open} {ANY_NAME} {text} {value})*"));
            }
            Some(list) => {
                for parameter in list {
                    let element = tag.element(lark, &parameter, rules)?;
                    let name = lark.rule(&element);
                    parts.push(if parameter.is_required { name } else { format!("{name}?") });
                }
            }
        }
        parts.push(lark.spell(self.close));
        Ok(parts.join(" "))
    }
}

impl ParameterTag {
    /// Expression for a parameter with its tags.
    fn element(
        &self,
        lark: &mut LarkWriter,
        parameter: &Parameter<'_>,
        rules: &ToolRules<'_>,
    ) -> Result<String, Error> {
        let open = |behind| format!("{}{}{behind}", self.open, parameter.name);
        let kind = parameter.tool.parameter_type(parameter.name);
        match kind.unwrap_or(ParameterType::Any) {
            ParameterType::String => {
                let value = self.text(lark, parameter)?;
                Ok(format!("{} {value}", lark.spell(&open(self.text))))
            }
            ParameterType::Any if parameter.is_strict && !is_free(parameter.schema) => {
                let problem = "a value of several types has no form in these calls";
                Err(parameter.problem("", problem).into())
            }
            ParameterType::Any => {
                let value = lark.text_until(ANY_TEXT, self.close);
                Ok(format!("{} {value}", lark.spell(&open(self.text))))
            }
            _ => {
                let schema = parameter.whole_schema(rules)?;
                let (open, close) = (lark.spell(&open(self.json)), lark.spell(self.close));
                Ok(format!("{open} {} {close}", lark.json(schema)))
            }
        }
    }

    /// Expression for a text and the tag behind it.
    fn text(
        &self,
        lark: &mut LarkWriter,
        parameter: &Parameter<'_>,
    ) -> Result<String, GrammarError> {
        match parameter.text_form()? {
            TextForm::Values(values) => {
                let values = values.iter().map(|value| lark.spell(value)).collect::<Vec<_>>();
                Ok(format!("({}) {}", values.join(" | "), lark.spell(self.close)))
            }
            TextForm::Regex(regex) => Ok(lark.text_until(&regex, self.close)),
        }
    }
}

/// Form of a text by its schema.
enum TextForm {
    /// One of these.
    Values(Vec<String>),
    /// Text of this regular expression.
    Regex(String),
}

impl Parameter<'_> {
    fn problem(&self, keyword: &str, problem: &str) -> GrammarError {
        let path = format!("{}.properties.{}", self.tool.name, self.name);
        let path = if keyword.is_empty() { path } else { format!("{path}.{keyword}") };
        invalid(path, format!("cannot be enforced: {problem}"))
    }

    /// The schema with the definitions to which it may refer.
    fn whole_schema(&self, rules: &ToolRules<'_>) -> Result<Value, Error> {
        let mut schema = self.schema.clone();
        if let Value::Object(map) = &mut schema {
            for keyword in ["$defs", "definitions"] {
                if let Some(definitions) = self.tool.parameters.get(keyword) {
                    map.entry(keyword).or_insert_with(|| definitions.clone());
                }
            }
        }
        let schemas = SchemaRules { lenient: !self.is_strict, ..rules.schemas };
        let normal = match rules.compiler.schema(&schema, schemas, true) {
            Err(Error::Grammar(GrammarError::Invalid { path, problem })) if self.is_strict => {
                let own = format!("{}.properties.{}", self.tool.name, self.name);
                let path = if path.is_empty() { own } else { format!("{own}.{path}") };
                return Err(invalid(path, problem).into());
            }
            Err(Error::Grammar(GrammarError::Invalid { .. })) => {
                return Ok(json_schema(&Value::Bool(true))?);
            }
            normal => normal?,
        };
        let named = normal.notes.into_iter().map(|note| {
            let path = format!("{}.properties.{}.{}", self.tool.name, self.name, note.path);
            GrammarNote { path, ..note }
        });
        rules.notes.borrow_mut().extend(named);
        Ok(json_schema(&normal.schema)?)
    }

    fn text_form(&self) -> Result<TextForm, GrammarError> {
        let allows_null = self.tool.allows_null(self.name);
        let schema = resolved(self.tool, self.schema);
        if let Some(list) = schema.get("enum").and_then(Value::as_array) {
            return Ok(TextForm::Values(list.iter().map(plain).collect()));
        }
        if let Some(value) = schema.get("const") {
            return Ok(TextForm::Values(vec![plain(value)]));
        }
        if !self.is_strict {
            return Ok(TextForm::Regex(ANY_TEXT.to_owned()));
        }
        let Some(map) = schema.as_object() else {
            return Ok(TextForm::Regex(ANY_TEXT.to_owned()));
        };
        let length = |keyword: &str| map.get(keyword).and_then(Value::as_u64);
        let (least, most) = (length("minLength"), length("maxLength"));
        let has_length = least.is_some() || most.is_some();
        for keyword in map.keys().map(String::as_str) {
            let is_enforced = match keyword {
                "minLength" | "maxLength" => true,
                "pattern" => !has_length && !allows_null,
                "format" => !has_length && !allows_null && !map.contains_key("pattern"),
                "$defs" | "definitions" => true,
                // Only null is the other alternative.
                "anyOf" => map.len() == 1 || !has_length,
                other => DESCRIPTIONS.contains(&other),
            };
            if !is_enforced {
                return Err(self.problem(keyword, "this text has no quotes in these calls"));
            }
        }
        let format = map.get("format").and_then(Value::as_str).and_then(schema::format_pattern);
        if let Some(pattern) = map.get("pattern").and_then(Value::as_str).or(format) {
            let parts = schema::plain_pattern(pattern);
            return match parts.map_err(|problem| self.problem("pattern", &problem))?.as_slice() {
                [pattern] => Ok(TextForm::Regex(unanchored(pattern))),
                _ => Err(self.problem("pattern", "a look-ahead has no form in these calls")),
            };
        }
        let most = most.map(|most| most.to_string()).unwrap_or_default();
        Ok(TextForm::Regex(match has_length {
            true => format!("(?s:.{{{},{most}}})", least.unwrap_or(0)),
            false => ANY_TEXT.to_owned(),
        }))
    }
}

/// A pattern that a text contains, as one that matches the text as a whole.
fn unanchored(pattern: &str) -> String {
    let start = if pattern.starts_with('^') { "" } else { ANY_TEXT };
    let is_end = pattern.ends_with('$') && !pattern.ends_with("\\$");
    let end = if is_end { "" } else { ANY_TEXT };
    let body = pattern.strip_prefix('^').unwrap_or(pattern);
    let body = if is_end { &body[..body.len() - 1] } else { body };
    format!("{start}(?:{}){end}", llguidance::regex_to_lark(body, "dw"))
}

/// A value as text without quotes.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Whether a schema allows every value.
fn is_free(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.keys().all(|key| DESCRIPTIONS[1..].contains(&key.as_str())),
        other => *other == Value::Bool(true),
    }
}

/// The schema to which a schema refers.
fn resolved<'a>(tool: &'a Tool, mut schema: &'a Value) -> &'a Value {
    for _ in 0..MAX_DEPTH {
        let target = schema.get("$ref").and_then(Value::as_str);
        let target = target.and_then(|path| path.strip_prefix('#'));
        match target.and_then(|path| tool.parameters.pointer(path)) {
            Some(target) => schema = target,
            None => break,
        }
    }
    schema
}

/// Parameters of a tool by its schema; `None` if they are free.
fn parameters(tool: &Tool, rule: ArgumentRule) -> Result<Option<Vec<Parameter<'_>>>, GrammarError> {
    let is_strict = rule == ArgumentRule::Strict;
    if rule == ArgumentRule::Free {
        return Ok(None);
    }
    let schema = resolved(tool, &tool.parameters);
    if is_strict && let Some(map) = schema.as_object() {
        let is_known = |key: &str| {
            matches!(
                key,
                "properties"
                    | "required"
                    | "additionalProperties"
                    | "$defs"
                    | "definitions"
                    | "$schema"
                    | "$id"
            ) || DESCRIPTIONS.contains(&key)
        };
        if let Some(key) = map.keys().find(|key| !is_known(key.as_str())) {
            let problem = "cannot be enforced: the calls of this model have no form for it";
            return Err(invalid(format!("{}.{key}", tool.name), problem));
        }
    }
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        return Ok(if has_others(schema) { None } else { Some(Vec::new()) });
    };
    let required: Vec<&str> = schema
        .get("required")
        .and_then(Value::as_array)
        .map(|list| list.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    let list = properties.iter().map(|(name, schema)| Parameter {
        tool,
        name,
        schema,
        is_required: required.contains(&name.as_str()),
        is_strict,
    });
    Ok(Some(list.collect()))
}

/// Whether an object without properties may have some: its schema names them elsewhere.
fn has_others(schema: &Value) -> bool {
    let has = |key: &str| schema.get(key).is_some_and(|value| *value != Value::Bool(false));
    let names = schema.get("required").and_then(Value::as_array);
    names.is_some_and(|names| !names.is_empty())
        || ["additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf"]
            .iter()
            .any(|key| has(key))
}

/// Expression for the arguments of a tool in Gemma's notation.
///
/// # Errors
/// The schema of a strict tool cannot be enforced.
pub(super) fn notation(
    lark: &mut LarkWriter,
    tool: &Tool,
    rule: ArgumentRule,
) -> Result<String, GrammarError> {
    let mut writer = NotationWriter { lark, tool, is_strict: rule == ArgumentRule::Strict };
    match rule {
        ArgumentRule::Free => {
            let any = writer.any();
            Ok(writer.object_of(&any))
        }
        _ => writer.object(&tool.parameters, &tool.name, 0),
    }
}

/// Writer of values in Gemma's notation.
struct NotationWriter<'a> {
    lark: &'a mut LarkWriter,
    tool: &'a Tool,
    is_strict: bool,
}

impl NotationWriter<'_> {
    /// Expression for an object with any names, and values of an expression.
    fn object_of(&self, value: &str) -> String {
        format!("\"{{\" ({ANY_NAME} \":\" {value} (\",\" {ANY_NAME} \":\" {value})*)? \"}}\"")
    }

    /// Expression for any value without objects in it, as a rule.
    fn any(&mut self) -> String {
        let text = self.text(ANY_TEXT);
        let flat = self.lark.rule(&format!("{text} | {NUMBER} | \"true\" | \"false\" | \"null\""));
        let list = format!("\"[\" ({flat} (\",\" {flat})*)? \"]\"");
        let object = self.object_of(&flat);
        self.lark.rule(&format!("{flat} | {list} | {object}"))
    }

    fn text(&mut self, regex: &str) -> String {
        let value = self.lark.text_until(regex, QUOTE);
        format!("({} {value})", self.lark.spell(QUOTE))
    }

    fn object(&mut self, schema: &Value, path: &str, depth: usize) -> Result<String, GrammarError> {
        let schema = resolved(self.tool, schema);
        let empty = Map::new();
        let properties = schema.get("properties").and_then(Value::as_object);
        if properties.is_none() && (depth > 0 || has_others(schema)) {
            let any = self.any();
            return Ok(self.object_of(&any));
        }
        let required = schema.get("required").and_then(Value::as_array);
        let is_required = |name: &str| {
            required.is_some_and(|list| list.iter().any(|entry| entry.as_str() == Some(name)))
        };
        let mut pairs = Vec::new();
        for (name, schema) in properties.unwrap_or(&empty) {
            let value = self.value(schema, &format!("{path}.properties.{name}"), depth + 1)?;
            let pair = self.lark.rule(&format!("{} {value}", quoted(&format!("{name}:"))));
            pairs.push((pair, is_required(name)));
        }
        // The rest of the object behind a pair, and behind none, from the last pair to the first.
        let (mut behind, mut first) = ("\"\"".to_owned(), "\"\"".to_owned());
        for (pair, is_required) in pairs.iter().rev() {
            (first, behind) = match is_required {
                true => (format!("{pair} {behind}"), format!("\",\" {pair} {behind}")),
                false => {
                    (format!("{pair} {behind} | {first}"), format!("(\",\" {pair})? {behind}"))
                }
            };
            (first, behind) = (self.lark.rule(&first), self.lark.rule(&behind));
        }
        Ok(self.lark.rule(&format!("\"{{\" {first} \"}}\"")))
    }

    fn value(&mut self, schema: &Value, path: &str, depth: usize) -> Result<String, GrammarError> {
        let schema = resolved(self.tool, schema);
        let known = [
            "type",
            "enum",
            "const",
            "properties",
            "required",
            "items",
            "anyOf",
            "additionalProperties",
            "$defs",
            "definitions",
        ];
        let unknown = schema.as_object().and_then(|map| {
            let is_known = |key: &str| known.contains(&key) || DESCRIPTIONS.contains(&key);
            map.keys().find(|key| !is_known(key.as_str()))
        });
        if self.is_strict
            && let Some(key) = unknown
        {
            let problem = "cannot be enforced: the calls of this model have no form for it";
            return Err(invalid(format!("{path}.{key}"), problem));
        }
        if depth > MAX_DEPTH {
            return match self.is_strict {
                true => Err(invalid(path, "nests too deeply to be enforced")),
                false => Ok(self.any()),
            };
        }
        let values = schema.get("enum").and_then(Value::as_array).cloned();
        let values = values.or_else(|| schema.get("const").map(|value| vec![value.clone()]));
        if let Some(values) = values {
            let quote = self.lark.spell(QUOTE);
            let literal = |value: &Value| match value {
                Value::String(text) => format!("{quote} {} {quote}", self.lark.spell(text)),
                other => quoted(&other.to_string()),
            };
            let literals: Vec<String> = values.iter().map(literal).collect();
            return Ok(format!("({})", literals.join(" | ")));
        }
        if let Some(list) = schema.get("anyOf").and_then(Value::as_array) {
            let forms = list
                .iter()
                .enumerate()
                .map(|(i, schema)| self.value(schema, &format!("{path}.anyOf[{i}]"), depth + 1));
            let forms = forms.collect::<Result<Vec<_>, _>>()?;
            return Ok(format!("({})", forms.join(" | ")));
        }
        let kinds: Vec<&str> = match schema.get("type") {
            Some(Value::String(kind)) => vec![kind],
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
            _ => return Ok(self.any()),
        };
        let forms = kinds.into_iter().map(|kind| match kind {
            "string" => Ok(self.text(ANY_TEXT)),
            "number" => Ok(NUMBER.to_owned()),
            "integer" => Ok("/-?(0|[1-9][0-9]*)/".to_owned()),
            "boolean" => Ok("(\"true\" | \"false\")".to_owned()),
            "null" => Ok("\"null\"".to_owned()),
            "array" => {
                let item = match schema.get("items") {
                    Some(items) => self.value(items, &format!("{path}.items"), depth + 1)?,
                    None => self.any(),
                };
                Ok(format!("(\"[\" ({item} (\",\" {item})*)? \"]\")"))
            }
            "object" => self.object(schema, path, depth),
            other => Err(invalid(format!("{path}.type"), format!("{other:?} is no type"))),
        });
        let forms = forms.collect::<Result<Vec<_>, GrammarError>>()?;
        Ok(format!("({})", forms.join(" | ")))
    }
}

/// A number of JSON.
const NUMBER: &str = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/";
