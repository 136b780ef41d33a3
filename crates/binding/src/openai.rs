//! Messages and requests as JSON in the names of OpenAI's API.

use moeflux::{
    Message,
    text::{Tool, ToolCall},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Number, Value, json};

use crate::{
    fault::Fault,
    request_options::{Form, RequestOptions, ToolChoice},
};

/// Roles that messages may have.
const ROLES: &str = "system, developer, user, assistant or tool";

#[derive(Deserialize)]
struct OpenAiMessage {
    role: String,
    content: Option<Content>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
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
    refusal: Option<String>,
}

#[derive(Deserialize)]
struct OpenAiCall {
    id: Option<String>,
    function: CalledFunction,
}

#[derive(Deserialize)]
struct CalledFunction {
    name: String,
    #[serde(default)]
    arguments: Value,
}

/// Request in the names of OpenAI's API, and of servers that extend it. -1 is no limit.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct OpenAiRequest {
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    seed: Option<Number>,
    stop: Option<OneOrMany>,
    stop_token_ids: Option<Vec<u32>>,
    logit_bias: Option<Map<String, Value>>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    response_format: Option<ResponseFormat>,
    tools: Option<Vec<OpenAiTool>>,
    tool_choice: Option<OpenAiChoice>,
    parallel_tool_calls: Option<bool>,
    enable_thinking: Option<bool>,
    thinking_budget: Option<i64>,
    reasoning_effort: Option<String>,
    chat_template_kwargs: Option<Map<String, Value>>,
    raw: Option<bool>,
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
    JsonObject { schema: Option<Value> },
    JsonSchema { json_schema: NamedSchema },
    Regex { regex: String },
    Lark { lark: String },
}

#[derive(Deserialize)]
struct NamedSchema {
    schema: Value,
    strict: Option<bool>,
}

#[derive(Deserialize)]
struct OpenAiTool {
    #[serde(rename = "type")]
    kind: Option<String>,
    function: Option<ToolFunction>,
}

#[derive(Deserialize)]
struct ToolFunction {
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
    strict: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OpenAiChoice {
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
    let OpenAiMessage {
        role,
        content,
        reasoning_content,
        reasoning,
        tool_calls,
        tool_call_id,
        name,
    } = message;
    let role = match &*role {
        "developer" => "system",
        "function" => "tool",
        "system" | "user" | "assistant" | "tool" => &role,
        _ => return Err(Fault::Invalid(format!("{place}.role is {role:?}: expected {ROLES}"))),
    };
    let mut made = Message::new(role, text_of(content, place)?);
    made = made.reasoning(reasoning_content.or(reasoning).unwrap_or_default());
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
    let text = |(i, ContentPart { kind, text, refusal }): (usize, _)| {
        let text = match &*kind {
            "text" | "input_text" | "output_text" => text,
            "refusal" => refusal,
            _ => None,
        };
        text.ok_or_else(|| {
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
    ToolCall { id: call.id.unwrap_or_default(), name, arguments }
}

impl RequestOptions {
    /// Options in the names of OpenAI's API, as JSON.
    ///
    /// # Errors
    /// An option is unknown, or has a value without a meaning.
    pub fn from_openai(json: &str) -> Result<Self, Fault> {
        let request: OpenAiRequest = parsed("request", json)?;
        let template = request.template()?;
        let logprobs = match (request.logprobs, request.top_logprobs) {
            (Some(true), top) => Some(top.unwrap_or(0)),
            (_, Some(_)) => {
                return Err(Fault::Invalid("top_logprobs needs logprobs: true".to_owned()));
            }
            _ => None,
        };
        let is_off = request.reasoning_effort.as_deref() == Some("none");
        let stop = match request.stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop],
            Some(OneOrMany::Many(stops)) => stops,
        };
        let is_function = |tool: &OpenAiTool| tool.kind.as_deref().is_none_or(|k| k == "function");
        let tools = request.tools.unwrap_or_default().into_iter().filter(is_function);
        let lenient = request.response_format.as_ref().is_some_and(ResponseFormat::is_lenient);
        Ok(Self {
            max_tokens: limit("max_tokens", request.max_tokens.or(request.max_completion_tokens))?,
            temperature: request.temperature,
            top_k: request.top_k.map(|k| usize::try_from(k).unwrap_or(0)),
            top_p: request.top_p,
            min_p: request.min_p,
            repetition_penalty: request.repetition_penalty,
            presence_penalty: request.presence_penalty,
            frequency_penalty: request.frequency_penalty,
            seed: request.seed.map(seed).transpose()?,
            stop: stop.into_iter().filter(|stop| !stop.is_empty()).collect(),
            stop_tokens: request.stop_token_ids.unwrap_or_default(),
            logit_bias: biases(request.logit_bias.unwrap_or_default())?,
            logprobs,
            prompt_logprobs: false,
            form: request.response_format.and_then(ResponseFormat::form),
            tools: tools.map(OpenAiTool::tool).collect::<Result<_, _>>()?,
            tool_choice: match request.tool_choice {
                None => ToolChoice::Auto,
                Some(OpenAiChoice::Name(name)) => ToolChoice::from(name),
                Some(OpenAiChoice::Function { function }) => ToolChoice::Tool(function.name),
            },
            single_call: request.parallel_tool_calls == Some(false),
            lenient,
            thinking: request.enable_thinking.or(is_off.then_some(false)),
            thinking_budget: limit("thinking_budget", request.thinking_budget)?,
            template,
            raw: request.raw.unwrap_or(false),
        })
    }
}

impl OpenAiRequest {
    /// Variables of the chat template, of which `chat_template_kwargs` win.
    fn template(&self) -> Result<Map<String, Value>, Fault> {
        let mut template = Map::new();
        let effort = match self.reasoning_effort.as_deref() {
            Some("minimal") => Some("low"),
            Some("xhigh" | "max") => Some("high"),
            Some("none") | None => None,
            other => other,
        };
        if let Some(effort) = effort {
            template.insert("reasoning_effort".to_owned(), effort.into());
        }
        let variables = self.chat_template_kwargs.iter().flatten();
        for (name, value) in variables {
            if ["messages", "tools"].contains(&&**name) {
                let problem = "is set by the messages and tools of the call";
                return Err(Fault::Invalid(format!("chat_template_kwargs.{name} {problem}")));
            }
            template.insert(name.clone(), value.clone());
        }
        Ok(template)
    }
}

/// A limit; -1 is none.
fn limit(name: &str, value: Option<i64>) -> Result<Option<usize>, Fault> {
    match value {
        None | Some(-1) => Ok(None),
        Some(value) => usize::try_from(value).map(Some).map_err(|_| {
            Fault::Invalid(format!("{name} is {value}: expected at least 0, or -1 for no limit"))
        }),
    }
}

/// A seed of 64 bits; a negative one is its two's complement.
fn seed(seed: Number) -> Result<u64, Fault> {
    let bits = seed.as_u64().or(seed.as_i64().map(i64::cast_unsigned));
    bits.ok_or_else(|| Fault::Invalid(format!("seed is {seed}: expected an integer of 64 bits")))
}

impl ResponseFormat {
    fn is_lenient(&self) -> bool {
        matches!(self, Self::JsonSchema { json_schema } if json_schema.strict == Some(false))
    }

    fn form(self) -> Option<Form> {
        match self {
            Self::Text => None,
            Self::JsonObject { schema } => {
                Some(Form::Json(schema.unwrap_or_else(|| json!({"type": "object"}))))
            }
            Self::JsonSchema { json_schema } => Some(Form::Json(json_schema.schema)),
            Self::Regex { regex } => Some(Form::Regex(regex)),
            Self::Lark { lark } => Some(Form::Lark(lark)),
        }
    }
}

impl OpenAiTool {
    fn tool(self) -> Result<Tool, Fault> {
        let missing = || Fault::Invalid("a tool has no \"function\"".to_owned());
        let ToolFunction { name, description, parameters, strict } =
            self.function.ok_or_else(missing)?;
        let parameters = parameters.filter(|schema| !schema.is_null());
        let tool = Tool::new(name, parameters.unwrap_or_else(no_parameters));
        let tool = tool.description(description.unwrap_or_default());
        Ok(tool.strict(strict.unwrap_or(false)))
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
