//! Writer of grammars in llguidance's variant of Lark.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use moeflux_base::GrammarError;
use serde_json::{Value, json};

use super::{
    compile::MAX_GRAMMAR_BYTES,
    form::{AnswerForm, invalid},
    gbnf,
    vocabulary::{GrammarVocabulary, SpelledPart},
};

/// White space between the parts of JSON: a space, or a line end with its indent. More would let
/// a model go on without an end.
const JSON_SPACE: &str = r"(?: |\r?\n[ \t]{0,64})";

/// Longest regular expression or grammar in bytes.
const MAX_TEXT: usize = 256 << 10;

/// Longest schema in bytes of JSON.
const MAX_SCHEMA: usize = 1 << 20;

/// Deepest nesting of brackets in a regular expression or grammar.
const MAX_NESTING: usize = 200;

/// A grammar in parts: rules, and grammars that they name.
pub(super) struct LarkWriter {
    vocabulary: GrammarVocabulary,
    rules: String,
    rule_count: usize,
    /// Length of all schemas as JSON.
    schema_bytes: usize,
    grammars: Vec<GrammarWithLexer>,
}

impl LarkWriter {
    pub(super) fn new(vocabulary: GrammarVocabulary) -> Self {
        Self {
            vocabulary,
            rules: String::new(),
            rule_count: 0,
            schema_bytes: 0,
            grammars: Vec::new(),
        }
    }

    /// Expression for the form of an answer.
    ///
    /// # Errors
    /// The form is too long or too deep, or the schema allows nothing.
    pub(super) fn form(&mut self, form: &AnswerForm) -> Result<String, GrammarError> {
        match form {
            AnswerForm::Json(schema) => Ok(self.json(json_schema(schema)?)),
            AnswerForm::Regex(regex) => {
                check_text(regex)?;
                Ok(self.grammar(GrammarWithLexer::from_regex(regex)))
            }
            AnswerForm::Lark(lark) => {
                check_text(lark)?;
                Ok(self.grammar(GrammarWithLexer::from_lark(lark.clone())))
            }
            AnswerForm::Gbnf(gbnf) => {
                check_text(gbnf)?;
                Ok(self.grammar(GrammarWithLexer::from_lark(gbnf::to_lark(gbnf)?)))
            }
        }
    }

    /// Expression for JSON of a schema that [`json_schema`] has prepared.
    pub(super) fn json(&mut self, schema: Value) -> String {
        self.schema_bytes += schema.to_string().len();
        self.grammar(GrammarWithLexer::from_json_schema(schema))
    }

    /// Length of all schemas as JSON.
    pub(super) fn schema_bytes(&self) -> usize {
        self.schema_bytes
    }

    /// Whether one more schema would be too much for a grammar, with some for the tools behind it.
    pub(super) fn has_no_room(&self, schema: &Value) -> bool {
        self.schema_bytes + schema.to_string().len() > MAX_GRAMMAR_BYTES / 4 * 3
    }

    fn grammar(&mut self, grammar: GrammarWithLexer) -> String {
        let name = format!("g{}", self.grammars.len());
        let expression = format!("@{name}");
        self.grammars.push(GrammarWithLexer { name: Some(name), ..grammar });
        expression
    }

    /// Adds a rule; returns its name.
    pub(super) fn rule(&mut self, body: &str) -> String {
        self.rule_with("", body)
    }

    fn rule_with(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("r{}", self.rule_count);
        self.rule_count += 1;
        self.rules += &format!("{name}{attributes}: {body}\n");
        name
    }

    /// Expression for a text, in which marks are tokens.
    pub(super) fn spell(&self, text: &str) -> String {
        let parts = self.vocabulary.spell(text).into_iter().map(|part| match part {
            SpelledPart::Text(text) => quoted(text),
            SpelledPart::Token(token) => format!("<[{token}]>"),
        });
        let parts: Vec<String> = parts.collect();
        if parts.is_empty() { quoted("") } else { parts.join(" ") }
    }

    /// Expression for text that `regex` matches, up to the first `end`, which follows.
    pub(super) fn text_until(&mut self, regex: &str, end: &str) -> String {
        let parts = self.vocabulary.spell(end);
        let rest: String = parts.iter().map(|part| self.part(*part)).skip(1).collect();
        match (parts.first(), parts.len()) {
            (Some(SpelledPart::Text(text)), 1) => {
                self.rule_with("[lazy]", &format!("/{regex}{}/", escaped(text)))
            }
            // The longest text that ends in the part before the token.
            (Some(SpelledPart::Text(text)), _) => {
                self.rule(&format!("/{regex}{}/{rest}", escaped(text)))
            }
            _ => self.rule(&format!("(/{regex}/)? {}", self.spell(end))),
        }
    }

    fn part(&self, part: SpelledPart<'_>) -> String {
        match part {
            SpelledPart::Text(text) => format!(" {}", quoted(text)),
            SpelledPart::Token(token) => format!(" <[{token}]>"),
        }
    }

    /// The text of the main grammar.
    pub(super) fn text(&self, start: &str) -> String {
        format!("start: {start}\n{}", self.rules)
    }

    /// All grammars, the main one first.
    pub(super) fn with_main(self, main: GrammarWithLexer) -> TopLevelGrammar {
        let grammars = std::iter::once(main).chain(self.grammars).collect();
        TopLevelGrammar { grammars, max_tokens: None }
    }
}

/// A schema in the form that compiles: an object, with a bound on white space.
///
/// # Errors
/// The schema is no object, allows nothing, or is too long.
pub(super) fn json_schema(schema: &Value) -> Result<Value, GrammarError> {
    let mut map = match schema {
        Value::Object(map) => map.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        Value::Bool(false) => return Err(invalid("", "the schema `false` allows no answer")),
        _ => return Err(invalid("", "a JSON schema is an object")),
    };
    let length = schema.to_string().len();
    if length > MAX_SCHEMA {
        return Err(invalid("", format!("the schema has {length} bytes: at most {MAX_SCHEMA}")));
    }
    let options = map.entry("x-guidance").or_insert_with(|| json!({}));
    if let Value::Object(options) = options {
        options.entry("whitespace_pattern").or_insert_with(|| JSON_SPACE.into());
    }
    Ok(Value::Object(map))
}

/// Refuses a text that the compiler could not take in little time and stack.
fn check_text(text: &str) -> Result<(), GrammarError> {
    if text.len() > MAX_TEXT {
        let length = text.len();
        return Err(invalid("", format!("the grammar has {length} bytes: at most {MAX_TEXT}")));
    }
    let (mut depth, mut deepest) = (0_usize, 0);
    for c in text.chars() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    match deepest > MAX_NESTING {
        true => Err(invalid("", format!("the grammar nests {deepest} brackets: at most 200"))),
        false => Ok(()),
    }
}

/// A text as a literal.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A text as part of a regular expression between slashes.
fn escaped(text: &str) -> String {
    let mut regex = String::new();
    for c in text.chars() {
        match c {
            '\n' => regex.push_str("\\n"),
            // An escape of these is the boundary of a word.
            '<' | '>' => regex.push(c),
            c if c.is_ascii_punctuation() => regex.extend(['\\', c]),
            c => regex.push(c),
        }
    }
    regex
}
