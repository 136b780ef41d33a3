//! Messages as templates see them.

use minijinja::{Value, value::Serde};
use serde::{Serialize, Serializer, ser::SerializeStruct};
use serde_json::Value as Json;

use super::{
    content::Content,
    literal::Literal,
    message::Message,
    tools::{Tool, ToolCall, ToolSet},
};

/// Role of a result of a tool.
pub(super) const TOOL: &str = "tool";
pub(super) const SYSTEM: &str = "system";
pub(super) const USER: &str = "user";
pub(super) const ASSISTANT: &str = "assistant";

/// Form in which a template takes the arguments of past calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArgumentForm {
    /// A JSON object.
    Mapping,
    /// JSON text.
    Text,
}

/// One message as a template sees it. Strings of the conversation are literal text.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TemplateMessage {
    pub(super) role: String,
    pub(super) content: Content,
    pub(super) reasoning: Option<String>,
    pub(super) calls: Vec<TemplateCall>,
    pub(super) call_id: Option<String>,
    pub(super) name: Option<String>,
}

/// Call of a tool in a past answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TemplateCall {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: Json,
}

impl TemplateMessage {
    /// # Errors
    /// As [`Content::new`].
    pub(super) fn new(
        message: &Message,
        form: ArgumentForm,
        literal: &Literal<'_>,
    ) -> Result<Self, String> {
        let is_answer = message.role == ASSISTANT;
        let piece = |text: &str| match is_answer {
            true => literal.answer(text),
            false => literal.text(text),
        };
        let text = |text: &String| piece(text);
        let calls = message.tool_calls.iter().map(|call| TemplateCall::new(call, form, literal));
        Ok(Self {
            role: literal.text(&message.role),
            content: Content::new(message, piece)?,
            reasoning: message.reasoning_content.as_ref().map(text),
            calls: calls.collect(),
            call_id: message.tool_call_id.as_ref().map(text),
            name: message.name.as_ref().map(text),
        })
    }

    /// A message of our own.
    pub(super) fn of(role: &str, content: impl Into<Content>) -> Self {
        Self { role: role.to_owned(), content: content.into(), ..Self::default() }
    }

    pub(super) fn is(&self, role: &str) -> bool {
        self.role == role
    }

    /// Bytes of the message.
    pub(super) fn len(&self) -> usize {
        let others = [&self.reasoning, &self.call_id, &self.name].into_iter().flatten();
        let calls = self.calls.iter();
        self.role.len()
            + self.content.len()
            + others.map(String::len).sum::<usize>()
            + calls.map(|c| c.id.len() + c.json().len()).sum::<usize>()
    }

    pub(super) fn value(&self) -> Value {
        Value::from(Serde(self))
    }
}

impl TemplateCall {
    fn new(call: &ToolCall, form: ArgumentForm, literal: &Literal<'_>) -> Self {
        let arguments = match form {
            ArgumentForm::Mapping => literal.json(mapping(&call.arguments)),
            ArgumentForm::Text if call.arguments.trim().is_empty() => Json::from("{}"),
            ArgumentForm::Text => Json::from(literal.text(&call.arguments)),
        };
        Self { id: literal.text(&call.id), name: literal.text(&call.name), arguments }
    }

    /// The call as JSON text with name and arguments.
    pub(super) fn json(&self) -> String {
        let arguments = match &self.arguments {
            Json::String(text) => text.clone(),
            mapping => mapping.to_string(),
        };
        format!("{{\"name\": {}, \"arguments\": {arguments}}}", Json::from(self.name.as_str()))
    }
}

/// Arguments as an object; empty if they are none. Some clients send JSON text in a JSON string.
fn mapping(arguments: &str) -> Json {
    let parse = |text: &str| serde_json::from_str::<Json>(text).unwrap_or_default();
    let mut value = parse(arguments);
    if let Json::String(text) = &value {
        value = parse(text);
    }
    if value.is_object() { value } else { Json::Object(serde_json::Map::new()) }
}

/// Tools as templates take them: OpenAI's list.
pub(super) fn tool_values(tools: &ToolSet, literal: &Literal<'_>) -> Vec<Json> {
    tools.iter().map(|tool| literal.json(tool_value(tool))).collect()
}

fn tool_value(tool: &Tool) -> Json {
    let mut parameters = match &*tool.parameters {
        Json::Object(parameters) => parameters.clone(),
        _ => serde_json::Map::new(),
    };
    // Templates go through the properties without asking for them.
    if parameters.is_empty() {
        parameters.insert("type".to_owned(), Json::from("object"));
    }
    parameters.entry("properties").or_insert_with(|| Json::Object(serde_json::Map::new()));
    let mut function = serde_json::Map::new();
    function.insert("name".to_owned(), Json::from(tool.name.as_str()));
    function.insert("description".to_owned(), Json::from(tool.description.as_str()));
    function.insert("parameters".to_owned(), Json::Object(parameters));
    if tool.strict {
        function.insert("strict".to_owned(), Json::from(true));
    }
    serde_json::json!({"type": "function", "function": function})
}

/// Fields in the order of `transformers`. Templates look for thoughts under three names, and ask
/// whether a field is there.
impl Serialize for TemplateMessage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Message", 8)?;
        fields.serialize_field("role", &self.role)?;
        fields.serialize_field("content", &self.content)?;
        if let Some(reasoning) = &self.reasoning {
            for name in ["reasoning_content", "reasoning", "thinking"] {
                fields.serialize_field(name, reasoning)?;
            }
        }
        if !self.calls.is_empty() {
            fields.serialize_field("tool_calls", &self.calls)?;
        }
        if let Some(id) = &self.call_id {
            fields.serialize_field("tool_call_id", id)?;
        }
        if let Some(name) = &self.name {
            fields.serialize_field("name", name)?;
        }
        fields.end()
    }
}

/// OpenAI's form.
impl Serialize for TemplateCall {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct CalledFunction<'a> {
            name: &'a str,
            arguments: &'a Json,
        }
        let mut fields = serializer.serialize_struct("Call", 3)?;
        fields.serialize_field("id", &self.id)?;
        fields.serialize_field("type", "function")?;
        let function = CalledFunction { name: &self.name, arguments: &self.arguments };
        fields.serialize_field("function", &function)?;
        fields.end()
    }
}
