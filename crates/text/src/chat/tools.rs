//! Tools that a model may call, and calls of earlier answers.

use std::sync::Arc;

use moeflux_base::setters;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Maximum steps from a parameter's schema to its types, over `$ref` and `anyOf`.
const MAX_STEPS: usize = 16;

/// A function that the model may call.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Tool {
    /// Name of the function.
    pub name: String,
    /// Purpose of the function, for the model.
    pub description: String,
    /// JSON schema of the arguments, an object. Clones of the tool share it.
    pub parameters: Arc<Value>,
    /// Whether arguments must follow the schema exactly.
    pub strict: bool,
}

setters!(Tool { description: impl Into<String>, strict: bool });

/// Type of a parameter by its schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterType {
    /// Text.
    String,
    /// A number.
    Number,
    /// A whole number.
    Integer,
    /// `true` or `false`.
    Boolean,
    /// A JSON object.
    Object,
    /// A JSON array.
    Array,
    /// `null` only.
    Null,
    /// One of several types, or not stated.
    Any,
}

impl Tool {
    /// A tool with the JSON schema of its arguments.
    pub fn new(name: impl Into<String>, parameters: impl Into<Arc<Value>>) -> Tool {
        Tool { name: name.into(), parameters: parameters.into(), ..Tool::default() }
    }

    /// Type of a parameter; `None` for one that the schema does not name. A type that may also be
    /// null is that type: see [`Tool::allows_null`].
    pub fn parameter_type(&self, name: &str) -> Option<ParameterType> {
        let mut types = self.types(name)?;
        if types.len() > 1 {
            types.retain(|kind| *kind != ParameterType::Null);
        }
        Some(match types.as_slice() {
            [kind] => *kind,
            [ParameterType::Integer, ParameterType::Number]
            | [ParameterType::Number, ParameterType::Integer] => ParameterType::Number,
            _ => ParameterType::Any,
        })
    }

    /// Whether a parameter may be null.
    pub fn allows_null(&self, name: &str) -> bool {
        self.types(name).is_some_and(|types| types.contains(&ParameterType::Null))
    }

    /// Properties of the arguments, behind references.
    fn properties(&self) -> Option<&Value> {
        let mut schema = &*self.parameters;
        for _ in 0..MAX_STEPS {
            if let Some(properties) = schema.get("properties") {
                return Some(properties);
            }
            let target = schema.get("$ref").and_then(Value::as_str)?.strip_prefix('#')?;
            schema = self.parameters.pointer(target)?;
        }
        None
    }

    /// All types of a parameter.
    fn types(&self, name: &str) -> Option<Vec<ParameterType>> {
        let schema = self.properties()?.get(name)?;
        let mut types = Vec::new();
        self.add_types(schema, MAX_STEPS, &mut types);
        Some(types)
    }

    fn add_types(&self, schema: &Value, steps: usize, types: &mut Vec<ParameterType>) {
        let mut add = |kind| {
            if !types.contains(&kind) {
                types.push(kind);
            }
        };
        let Some(steps) = steps.checked_sub(1) else { return add(ParameterType::Any) };
        match schema.get("type") {
            Some(Value::String(kind)) => return add(named(kind)),
            Some(Value::Array(kinds)) => {
                return kinds.iter().for_each(|kind| add(named(kind.as_str().unwrap_or(""))));
            }
            _ => {}
        }
        if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
            let target = target.strip_prefix('#').and_then(|path| self.parameters.pointer(path));
            return match target {
                Some(target) => self.add_types(target, steps, types),
                None => add(ParameterType::Any),
            };
        }
        if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            return values.iter().for_each(|value| add(kind_of(value)));
        }
        if let Some(value) = schema.get("const") {
            return add(kind_of(value));
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            if let Some(schemas) = schema.get(key).and_then(Value::as_array) {
                return schemas.iter().for_each(|schema| self.add_types(schema, steps, types));
            }
        }
        add(ParameterType::Any);
    }
}

fn named(kind: &str) -> ParameterType {
    match kind {
        "string" => ParameterType::String,
        "number" => ParameterType::Number,
        "integer" => ParameterType::Integer,
        "boolean" => ParameterType::Boolean,
        "object" => ParameterType::Object,
        "array" => ParameterType::Array,
        "null" => ParameterType::Null,
        _ => ParameterType::Any,
    }
}

fn kind_of(value: &Value) -> ParameterType {
    match value {
        Value::Null => ParameterType::Null,
        Value::Bool(_) => ParameterType::Boolean,
        Value::Number(_) => ParameterType::Number,
        Value::String(_) => ParameterType::String,
        Value::Array(_) => ParameterType::Array,
        Value::Object(_) => ParameterType::Object,
    }
}

/// Tools of a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ToolSet {
    /// Tools in the order of the request.
    pub tools: Vec<Tool>,
}

impl ToolSet {
    /// Whether there are no tools.
    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }

    /// The tool with this name.
    pub fn get(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }

    /// All tools in their order.
    pub fn iter(&self) -> impl Iterator<Item = &Tool> {
        self.tools.iter()
    }
}

/// A call of a tool in an earlier answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Name of the call, to which its result refers.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Arguments as JSON text.
    pub arguments: String,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_of_parameters_are_those_of_the_schema() {
        let tool = Tool::new(
            "f",
            json!({
                "type": "object",
                "$defs": {"mode": {"enum": ["a", "b"]}, "loop": {"$ref": "#/$defs/loop"}},
                "properties": {
                    "path": {"type": "string"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "count": {"type": ["integer", "null"]},
                    "mode": {"$ref": "#/$defs/mode"},
                    "one": {"const": true},
                    "both": {"type": ["string", "integer"]},
                    "free": {},
                    "loop": {"$ref": "#/$defs/loop"},
                },
            }),
        );
        let kinds = ["path", "note", "count", "mode", "one", "both", "free", "loop"]
            .map(|name| tool.parameter_type(name).unwrap());
        use ParameterType::{Any, Boolean, Integer, String};
        assert_eq!(kinds, [String, String, Integer, String, Boolean, Any, Any, Any]);
        assert_eq!(tool.parameter_type("other"), None);
        assert_eq!(["path", "note", "count"].map(|n| tool.allows_null(n)), [false, true, true]);
        assert_eq!(Tool::default().parameter_type("path"), None);
    }
}
