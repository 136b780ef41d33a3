//! A JSON schema as rules of a grammar.

use moeflux_base::GrammarError;
use serde_json::Value;

use super::{
    super::form::GrammarNote,
    annotations,
    document::{self, SchemaDocument, value_at},
    formats, patterns,
    write::SchemaWriter,
};

/// Rules of the schemas of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::grammar) struct SchemaRules {
    /// Whether keywords that cannot be enforced are left out.
    pub(in crate::grammar) lenient: bool,
    /// Whether objects may have properties that they do not list, if they do not say.
    pub(in crate::grammar) open_objects: bool,
}

/// Keyword that names the dialect of a whole schema.
const DIALECT: &str = "$schema";

/// Options of the library in a schema.
pub(in crate::grammar) const OPTIONS: &str = "x-guidance";

/// A schema with the keywords that the compiler takes.
///
/// # Errors
/// A keyword is wrong or cannot be enforced, or nothing satisfies the schema.
pub(in crate::grammar) fn normal(
    schema: &Value,
    rules: SchemaRules,
) -> Result<Value, GrammarError> {
    let document = SchemaDocument::new(schema)?;
    let root = document.root();
    let mut map = SchemaWriter::new(document, rules).whole(root)?;
    if let Some(options) = schema.get(OPTIONS) {
        map.insert(OPTIONS.to_owned(), options.clone());
    }
    Ok(Value::Object(map))
}

/// The part of a schema at names and indices, as [`normal`]; `None` if it has no form.
pub(in crate::grammar) fn normal_part(
    schema: &Value,
    steps: &[String],
    rules: SchemaRules,
) -> Option<Value> {
    let document = SchemaDocument::new(schema).ok()?;
    let node = document.find(steps)?;
    SchemaWriter::new(document, rules).whole(node).ok().map(Value::Object)
}

/// Keywords of a schema that constrain nothing, unknown formats first.
pub(in crate::grammar) fn notes(schema: &Value) -> Vec<GrammarNote> {
    let Ok(document) = SchemaDocument::new(schema) else { return Vec::new() };
    let (mut formats, mut others) = (Vec::new(), Vec::new());
    for node in document.schemas() {
        let Some(map) = document.keywords(node) else { continue };
        for annotation in annotations::of(map, document.draft(node)) {
            let list = if annotation.keyword == "format" { &mut formats } else { &mut others };
            if list.len() < GrammarNote::MOST {
                let path = document.path(node, &annotation.keyword);
                list.push(GrammarNote { path, text: annotation.reason });
            }
        }
    }
    formats.append(&mut others);
    formats
}

/// A schema without the keywords that constrain nothing.
pub(in crate::grammar) fn without_annotations(schema: &Value) -> Value {
    annotations::without(schema)
}

/// Pattern of the strings of a format that is enforced.
pub(in crate::grammar) fn format_pattern(name: &str) -> Option<&'static str> {
    formats::known(name).map(|format| format.pattern)
}

/// Patterns that together allow the strings of one, without look-around.
///
/// # Errors
/// It has a part that cannot be enforced, as text.
pub(in crate::grammar) fn plain_pattern(pattern: &str) -> Result<Vec<String>, String> {
    patterns::plain(pattern)
}

/// The part of a schema at names and indices.
pub(in crate::grammar) fn value<'a>(schema: &'a Value, steps: &[String]) -> Option<&'a Value> {
    steps.iter().try_fold(schema, |value, step| document::entry(value, step))
}

/// A keyword of a part of a schema.
pub(in crate::grammar) struct SchemaPlace {
    /// Names and indices of the part.
    pub(in crate::grammar) steps: Vec<String>,
    pub(in crate::grammar) keyword: String,
}

impl SchemaPlace {
    /// The place of an error's path.
    pub(in crate::grammar) fn find(schema: &Value, path: &str) -> Option<Self> {
        if path == DIALECT {
            return Some(Self { steps: Vec::new(), keyword: path.to_owned() });
        }
        let document = SchemaDocument::new(schema).ok()?;
        let mut nodes = document.schemas().filter(|node| document.keywords(*node).is_some());
        nodes.find_map(|node| {
            let own = document.path(node, "");
            let keyword = match path.strip_prefix(&own)? {
                "" => "",
                rest if own.is_empty() => rest,
                rest => rest.strip_prefix('.')?,
            };
            let has_keyword = document.keywords(node)?.contains_key(keyword);
            (has_keyword || keyword.is_empty())
                .then(|| Self { steps: document.steps(node), keyword: keyword.to_owned() })
        })
    }

    /// Leaves the keyword out; `None` if the part is the whole schema.
    pub(in crate::grammar) fn remove(&self, schema: &mut Value) -> Option<()> {
        let part = value_at(schema, &self.steps)?;
        let map = part.as_object_mut()?;
        match self.keyword.as_str() {
            "" if self.steps.is_empty() => return None,
            "" => *part = Value::Bool(true),
            // Any of them is the nearest that has a form.
            "oneOf" if !map.contains_key("anyOf") => {
                let list = map.shift_remove("oneOf")?;
                map.insert("anyOf".to_owned(), list);
            }
            "if" => ["if", "then", "else"].iter().for_each(|key| drop(map.shift_remove(*key))),
            "contains" => {
                let keys = ["contains", "minContains", "maxContains"];
                keys.iter().for_each(|key| drop(map.shift_remove(*key)));
            }
            keyword => {
                map.shift_remove(keyword)?;
            }
        }
        Some(())
    }
}
#[cfg(test)]
mod tests;
