//! Messages and requests as JSON in the names of OpenAI's API.

use moeflux::{
    Message,
    text::{Tool, ToolCall},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::{
    fault::Fault,
    request_options::{Form, RequestOptions},
};

/// Roles that messages may have.
const ROLES: &str = "system, developer, user, assistant or tool";

#[derive(Deserialize)]
struct OpenAiMessage {
    role: String,
    content: Option<Content>,
    #[serde(alias = "reasoning")]
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<OpenAiCall>>,
    tool_call_id: Option<String>,
    name: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Deserialize)]
struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

#[derive(Deserialize)]
struct OpenAiCall {
    #[serde(default)]
    id: String,
    function: CalledFunction,
}

#[derive(Deserialize)]
struct CalledFunction {
    name: String,
    #[serde(default)]
    arguments: Value,
}

/// Request in the names of OpenAI's API, and of servers that extend it.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct OpenAiRequest {
    #[serde(alias = "max_completion_tokens")]
    max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    #[serde(alias = "repeat_penalty")]
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Option<OneOrMany>,
    stop_token_ids: Vec<u32>,
    logit_bias: Option<Map<String, Value>>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    response_format: Option<ResponseFormat>,
    tools: Option<Vec<OpenAiTool>>,
    tool_choice: Option<ToolChoice>,
    enable_thinking: Option<bool>,
    thinking_budget: Option<usize>,
    reasoning_effort: Option<String>,
    chat_template_kwargs: Option<Map<String, Value>>,
    raw: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
    Regex { regex: String },
    Lark { lark: String },
}

#[derive(Deserialize)]
struct NamedSchema {
    schema: Value,
}

#[derive(Deserialize)]
struct OpenAiTool {
    function: ToolFunction,
}

#[derive(Deserialize)]
struct ToolFunction {
    name: String,
    #[serde(default)]
    description: String,
    #[serde(default = "no_parameters")]
    parameters: Value,
    #[serde(default)]
    strict: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ToolChoice {
    Name(String),
    Function { function: ChosenFunction },
}

#[derive(Deserialize)]
struct ChosenFunction {
    name: String,
}

fn no_parameters() -> Value {
    json!({"type": "object", "properties": {}})
}

/// Messages of a JSON list in the form of OpenAI's API.
///
/// # Errors
/// A message has no role or an unknown one, or content that is no text.
pub fn messages(json: &str) -> Result<Vec<Message>, Fault> {
    let list: Vec<Value> = parsed("messages", json)?;
    let message = |(i, value)| {
        let place = format!("messages[{i}]");
        let message = serde_json::from_value(value);
        message.map_err(|error| wrong(&place, &error)).and_then(|m| to_message(m, &place))
    };
    list.into_iter().enumerate().map(message).collect()
}

fn to_message(message: OpenAiMessage, place: &str) -> Result<Message, Fault> {
    let OpenAiMessage { role, content, reasoning_content, tool_calls, tool_call_id, name } =
        message;
    let role = match &*role {
        "developer" => "system",
        "system" | "user" | "assistant" | "tool" => &role,
        _ => return Err(Fault::Invalid(format!("{place}.role is {role:?}: expected {ROLES}"))),
    };
    let mut made = Message::new(role, text_of(content, place)?);
    made = made.reasoning(reasoning_content.unwrap_or_default());
    made.tool_calls = tool_calls.unwrap_or_default().into_iter().map(to_call).collect();
    (made.tool_call_id, made.name) = (tool_call_id, name);
    Ok(made)
}

fn text_of(content: Option<Content>, place: &str) -> Result<String, Fault> {
    let parts = match content {
        None => return Ok(String::new()),
        Some(Content::Text(text)) => return Ok(text),
        Some(Content::Parts(parts)) => parts,
    };
    let text = |(i, ContentPart { kind, text }): (usize, _)| {
        text.filter(|_| kind == "text").ok_or_else(|| {
            let problem = format!("{place}.content[{i}] is of type {kind:?}: expected text");
            Fault::Invalid(problem)
        })
    };
    let texts: Vec<String> = parts.into_iter().enumerate().map(text).collect::<Result<_, _>>()?;
    Ok(texts.join("\n"))
}

fn to_call(call: OpenAiCall) -> ToolCall {
    let CalledFunction { name, arguments } = call.function;
    let arguments = match arguments {
        Value::String(text) => text,
        Value::Null => "{}".to_owned(),
        object => object.to_string(),
    };
    ToolCall { id: call.id, name, arguments }
}

impl RequestOptions {
    /// Options in the names of OpenAI's API, as JSON.
    ///
    /// # Errors
    /// An option is unknown, or has a value without a meaning.
    pub fn from_openai(json: &str) -> Result<Self, Fault> {
        let request: OpenAiRequest = parsed("request", json)?;
        let mut template = request.chat_template_kwargs.unwrap_or_default();
        let is_off = request.reasoning_effort.as_deref() == Some("none");
        if let Some(effort) = request.reasoning_effort.filter(|_| !is_off) {
            template.insert("reasoning_effort".to_owned(), effort.into());
        }
        let logprobs = request.top_logprobs.or(request.logprobs.unwrap_or(false).then_some(0));
        Ok(Self {
            max_tokens: request.max_tokens,
            temperature: request.temperature,
            top_k: request.top_k,
            top_p: request.top_p,
            min_p: request.min_p,
            repetition_penalty: request.repetition_penalty,
            presence_penalty: request.presence_penalty,
            frequency_penalty: request.frequency_penalty,
            seed: request.seed,
            stop: match request.stop {
                None => Vec::new(),
                Some(OneOrMany::One(stop)) => vec![stop],
                Some(OneOrMany::Many(stops)) => stops,
            },
            stop_tokens: request.stop_token_ids,
            logit_bias: biases(request.logit_bias.unwrap_or_default())?,
            logprobs: logprobs.filter(|_| request.logprobs != Some(false)),
            prompt_logprobs: false,
            form: request.response_format.and_then(ResponseFormat::form),
            tools: request.tools.unwrap_or_default().into_iter().map(OpenAiTool::tool).collect(),
            tool_choice: request.tool_choice.map(|choice| match choice {
                ToolChoice::Name(name)
                | ToolChoice::Function { function: ChosenFunction { name } } => name,
            }),
            thinking: request.enable_thinking.or(is_off.then_some(false)),
            thinking_budget: request.thinking_budget,
            template,
            raw: request.raw,
        })
    }
}

impl ResponseFormat {
    fn form(self) -> Option<Form> {
        match self {
            Self::Text => None,
            Self::JsonObject => Some(Form::Json(json!({"type": "object"}))),
            Self::JsonSchema { json_schema } => Some(Form::Json(json_schema.schema)),
            Self::Regex { regex } => Some(Form::Regex(regex)),
            Self::Lark { lark } => Some(Form::Lark(lark)),
        }
    }
}

impl OpenAiTool {
    fn tool(self) -> Tool {
        let ToolFunction { name, description, parameters, strict } = self.function;
        Tool::new(name, parameters).description(description).strict(strict.unwrap_or(false))
    }
}

fn biases(biases: Map<String, Value>) -> Result<Vec<(u32, f32)>, Fault> {
    let bias = |(token, bias): (String, Value)| {
        let pair = token.parse().ok().zip(bias.as_f64());
        pair.map(|(token, bias)| (token, bias as f32)).ok_or_else(|| {
            let problem = "expected the number of a token and a bias";
            Fault::Invalid(format!("logit_bias has {token:?}: {bias}: {problem}"))
        })
    };
    biases.into_iter().map(bias).collect()
}

fn parsed<T: DeserializeOwned>(what: &str, json: &str) -> Result<T, Fault> {
    serde_json::from_str(json).map_err(|error| wrong(what, &error))
}

fn wrong(what: &str, error: &serde_json::Error) -> Fault {
    Fault::Invalid(format!("{what}: {error}"))
}
