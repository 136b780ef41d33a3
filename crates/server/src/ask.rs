//! A request for answers, whatever its API, and the fields that all APIs share.

use std::collections::HashSet;

use moeflux::{
    ChatOptions, GenerateRequest, Message, Sampling,
    text::{MAX_TOP_LOGPROBS, ToolSet},
};
use serde_json::Value;

use crate::{
    error::ApiError,
    form::{AskedForm, RequiredCalls},
    ids,
    json::{Fields, wrong_type},
    overflow::Overflow,
    turns::CallIds,
};

/// Most stop strings of a request.
const MAX_STOPS: usize = 16;

/// Most answers of a request. More than the waiting line has room for could never be served.
pub(crate) const MAX_CHOICES: usize = 64;

/// Separator of system messages that become one.
const BETWEEN_SYSTEM: &str = "\n\n";

/// Variable of a template, and field of a request: whether the prompt ends with the start of an
/// answer.
pub(crate) const ADD_PROMPT: &str = "add_generation_prompt";

/// Variables of a template that are not the client's to set.
const RESERVED: [&str; 3] = ["messages", "tools", ADD_PROMPT];

/// A request for answers.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) prompt: AskPrompt,
    /// Sampling and limits.
    pub(crate) request: GenerateRequest,
    /// Answers to each prompt.
    pub(crate) choices: usize,
    /// Whether an answer ends with its first complete call.
    pub(crate) one_call: bool,
    /// Reports in the stream.
    pub(crate) reports: AskedReports,
}

/// Reports that a request asks for, as in llama.cpp's server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AskedReports {
    /// Progress of the prompt.
    pub(crate) progress: bool,
    /// Times with every token.
    pub(crate) timings: bool,
}

impl AskedReports {
    /// The fields `return_progress` and `timings_per_token`.
    ///
    /// # Errors
    /// A field is no boolean.
    pub(crate) fn parse(fields: &Fields<'_>) -> Result<Self, ApiError> {
        Ok(Self {
            progress: fields.flag("return_progress")?.unwrap_or(false),
            timings: fields.flag("timings_per_token")?.unwrap_or(false),
        })
    }
}

/// Prompts of a request.
#[derive(Debug)]
pub(crate) enum AskPrompt {
    /// Messages, by the model's template.
    Conversation(Conversation),
    /// Texts or tokens, as they are.
    Raw {
        prompts: Vec<RawPrompt>,
        /// Whether an answer starts with the text of its prompt.
        echo: bool,
        /// Form of the answers.
        form: Option<AskedForm>,
    },
}

/// A prompt without a template.
#[derive(Clone, Debug)]
pub(crate) enum RawPrompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// Messages and the template's variables.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Message>,
    pub(crate) options: ChatOptions,
    /// Whether the answer continues the last message.
    pub(crate) continues: bool,
    /// Whether the answer may call the tools of `options`. If not, their syntax is text.
    pub(crate) calls: bool,
    /// Calls that the answer must make.
    pub(crate) required: Option<RequiredCalls>,
    /// Form of the answer's text.
    pub(crate) form: Option<AskedForm>,
    /// Rule for a prompt over the context, if the request says it.
    pub(crate) overflow: Option<Overflow>,
    /// Most tokens of thoughts.
    pub(crate) thinking_budget: Option<usize>,
    /// Whether its calls have the ids of remembered answers.
    pub(crate) call_ids: CallIds,
}

/// Parts of a prompt.
#[derive(Debug)]
pub(crate) struct ConversationParts<'a> {
    pub(crate) messages: &'a [Message],
    pub(crate) options: ChatOptions,
    /// Text with which the answer starts, as the client has it already.
    pub(crate) start: &'a str,
    pub(crate) call_ids: CallIds,
}

/// Messages as they are read. Calls without an id get one, so that their results have it.
#[derive(Debug, Default)]
pub(crate) struct MessageList {
    messages: Vec<Message>,
    /// Ids of the calls so far.
    calls: HashSet<String>,
    /// Calls of the last answer that are without a result.
    open: Vec<UnansweredCall>,
}

/// A call without a result.
#[derive(Debug)]
struct UnansweredCall {
    id: String,
    name: String,
    /// Whether the client sent the id.
    is_given: bool,
}

impl MessageList {
    /// Appends a message. System messages at the start become one, as many templates take one only.
    ///
    /// # Errors
    /// It is the result of a call that was not made. `path` has the id of the call.
    pub(crate) fn push(&mut self, mut message: Message, path: &str) -> Result<(), ApiError> {
        if message.role == "tool" {
            message.tool_call_id = Some(self.result(&message, path)?);
        }
        if !message.tool_calls.is_empty() {
            self.open.clear();
        }
        for call in &mut message.tool_calls {
            let is_given = !call.id.is_empty();
            if !is_given {
                let numbers = self.calls.len()..;
                let mut ids = numbers.map(|number| format!("call_{number}"));
                call.id = ids.find(|id| !self.calls.contains(id)).unwrap_or_default();
            }
            self.calls.insert(call.id.clone());
            let (id, name) = (call.id.clone(), call.name.clone());
            self.open.push(UnansweredCall { id, name, is_given });
        }
        match self.messages.as_mut_slice() {
            [first] if first.role == "system" && message.role == "system" => {
                first.content.push_str(BETWEEN_SYSTEM);
                first.content.push_str(&message.content);
            }
            _ => self.messages.push(message),
        }
        Ok(())
    }

    /// Id of the call to which a result belongs: the given one, or that of the first call without
    /// a result, of the tool that the result names, if there is one.
    fn result(&mut self, result: &Message, path: &str) -> Result<String, ApiError> {
        let id = result.tool_call_id.as_deref().filter(|id| !id.is_empty());
        let is_known = id.is_some_and(|id| self.calls.contains(id));
        let find = |is_it: &dyn Fn(&UnansweredCall) -> bool| self.open.iter().position(is_it);
        let open = match id {
            Some(id) if is_known => find(&|call| call.id == id),
            // The client has sent the id with the result only.
            Some(_) => find(&|call| !call.is_given),
            None => {
                let is_named = |call: &UnansweredCall| Some(&call.name) == result.name.as_ref();
                find(&is_named).or_else(|| find(&|_| true))
            }
        };
        match (open, id) {
            (Some(index), _) => Ok(self.open.remove(index).id),
            (None, Some(id)) if is_known => Ok(id.to_owned()),
            (None, Some(id)) => {
                let message = format!("{path} is {id:?}: no earlier message has this call");
                Err(ApiError::invalid(path, message))
            }
            (None, None) => {
                let message = format!("{path} is missing, and no earlier call is without a result");
                Err(ApiError::invalid(path, message))
            }
        }
    }

    /// The messages.
    pub(crate) fn into_messages(self) -> Vec<Message> {
        self.messages
    }
}

/// Sampling of a request. `recommended` is that of fields without a value.
///
/// # Errors
/// A field has a wrong type or range.
pub(crate) fn sampling(fields: &Fields<'_>, recommended: &Sampling) -> Result<Sampling, ApiError> {
    let mut sampling = recommended.clone();
    let numbers = [
        ("temperature", &mut sampling.temperature),
        ("top_p", &mut sampling.top_p),
        ("min_p", &mut sampling.min_p),
        ("repetition_penalty", &mut sampling.repetition_penalty),
        ("presence_penalty", &mut sampling.presence_penalty),
        ("frequency_penalty", &mut sampling.frequency_penalty),
    ];
    for (name, target) in numbers {
        if let Some(number) = fields.number(name)? {
            *target = number;
        }
    }
    if let Some(penalty) = fields.number("repeat_penalty")? {
        sampling.repetition_penalty = penalty;
    }
    if let Some(top_k) = fields.integer("top_k")? {
        // Clients turn the filter off by 0 or -1.
        sampling.top_k = match top_k {
            -1 => 0,
            k => usize::try_from(k)
                .map_err(|_| wrong_type("top_k", "at least 0; 0 and -1 are off"))?,
        };
    }
    sampling.seed = match fields.integer("seed")? {
        Some(seed) => seed.cast_unsigned(),
        None => ids::random_word(),
    };
    sampling.validate()?;
    Ok(sampling)
}

/// Stop strings in the field `name`: a string or a list.
///
/// # Errors
/// The field has a wrong type; the strings are too many, or one is empty.
pub(crate) fn stops(fields: &Fields<'_>, name: &str) -> Result<Vec<String>, ApiError> {
    let wrong = || wrong_type(name, "a string or a list of strings");
    let stops = match fields.get(name) {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(list)) => {
            let texts = list.iter().map(|stop| stop.as_str().map(str::to_owned));
            texts.collect::<Option<Vec<_>>>().ok_or_else(wrong)?
        }
        Some(_) => return Err(wrong()),
    };
    if stops.len() > MAX_STOPS {
        let count = stops.len();
        let message = format!("{name} has {count} strings: at most {MAX_STOPS} are allowed");
        return Err(ApiError::invalid(name, message));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::invalid(name, format!("{name} has an empty string")));
    }
    Ok(stops)
}

/// Answers to each prompt: the field `n`.
///
/// # Errors
/// It is not a number from 1 to the limit.
pub(crate) fn choices(fields: &Fields<'_>) -> Result<usize, ApiError> {
    let choices = fields.count("n")?.unwrap_or(1);
    match (1..=MAX_CHOICES).contains(&choices) {
        true => Ok(choices),
        false => {
            let message = format!("n is {choices}: it must be from 1 to {MAX_CHOICES}");
            Err(ApiError::invalid("n", message))
        }
    }
}

/// Biases of tokens: an object from ids to numbers, or a list of pairs.
///
/// # Errors
/// An id is not in the vocabulary, or a bias is not from -100 to 100.
pub(crate) fn logit_bias(fields: &Fields<'_>, vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let bias = |id: Option<u32>, bias: &Value| {
        let id = id.filter(|id| usize::try_from(*id).is_ok_and(|id| id < vocab))?;
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias))?;
        Some((id, bias as f32))
    };
    let biases: Option<Vec<(u32, f32)>> = match fields.get("logit_bias") {
        None => Some(Vec::new()),
        Some(Value::Object(map)) => {
            map.iter().map(|(id, value)| bias(id.parse().ok(), value)).collect()
        }
        Some(Value::Array(list)) => {
            let pair = |pair: &Value| {
                let id = pair.get(0)?.as_u64()?;
                bias(u32::try_from(id).ok(), pair.get(1)?)
            };
            list.iter().map(pair).collect()
        }
        Some(_) => None,
    };
    let expected = format!("token ids below {vocab} with biases from -100 to 100");
    biases.ok_or_else(|| wrong_type("logit_bias", &expected))
}

/// Number of the most probable tokens in the field `name`.
///
/// # Errors
/// It is not a number up to the limit.
pub(crate) fn top_logprobs(fields: &Fields<'_>, name: &str) -> Result<Option<usize>, ApiError> {
    let count = fields.count(name)?;
    match count.is_some_and(|count| count > MAX_TOP_LOGPROBS) {
        true => Err(wrong_type(name, &format!("from 0 to {MAX_TOP_LOGPROBS}"))),
        false => Ok(count),
    }
}

/// Variables of the template: `enable_thinking`, `thinking.type`, `reasoning_effort` and
/// `chat_template_kwargs`, of which the last one wins.
///
/// # Errors
/// A field has a wrong type.
pub(crate) fn chat_options(fields: &Fields<'_>) -> Result<ChatOptions, ApiError> {
    let mut options = ChatOptions::default();
    options.thinking = fields.flag("enable_thinking")?;
    if let Some(thinking) = fields.object("thinking")? {
        options.thinking = match thinking.text("type")? {
            Some("enabled") => Some(true),
            Some("disabled") => Some(false),
            // The template decides.
            Some("adaptive" | "auto") | None => None,
            Some(other) => {
                let path = thinking.path("type");
                let message =
                    format!("{path} is {other:?}: it must be enabled, disabled, adaptive");
                return Err(ApiError::invalid(path, message));
            }
        };
    }
    match fields.text("reasoning_effort")? {
        None => {}
        Some("none") => options.thinking = Some(false),
        Some(effort) => set_effort(&mut options, effort),
    }
    if let Some(variables) = fields.map("chat_template_kwargs")? {
        if let Some(name) = RESERVED.iter().find(|name| variables.contains_key(**name)) {
            let path = format!("chat_template_kwargs.{name}");
            let message = format!("{path} is set by the messages and tools of the request");
            return Err(ApiError::invalid(path, message));
        }
        let variables = variables.iter().map(|(name, value)| (name.clone(), value.clone()));
        options.variables.extend(variables);
    }
    Ok(options)
}

/// Most tokens of thoughts: the fields `thinking.budget_tokens`, `thinking_budget` and
/// `reasoning_budget`, of which the first one wins; -1 is no limit.
///
/// # Errors
/// A field is no whole number, or is below -1.
pub(crate) fn thinking_budget(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let thinking = fields.object("thinking")?;
    let places = [
        thinking.as_ref().map(|thinking| (thinking, "budget_tokens")),
        Some((fields, "thinking_budget")),
        Some((fields, "reasoning_budget")),
    ];
    for (fields, name) in places.into_iter().flatten() {
        match fields.integer(name)? {
            None => {}
            Some(-1) => return Ok(None),
            Some(budget) => {
                let wrong = |_| wrong_type(&fields.path(name), "at least 0; -1 is no limit");
                return usize::try_from(budget).map(Some).map_err(wrong);
            }
        }
    }
    Ok(None)
}

/// Rule for a prompt over the context: the field `truncation`.
///
/// # Errors
/// The field is neither `auto` nor `disabled`.
pub(crate) fn overflow(fields: &Fields<'_>) -> Result<Option<Overflow>, ApiError> {
    match fields.text("truncation")? {
        None => Ok(None),
        Some("auto") => Ok(Some(Overflow::DropOldestTurns)),
        Some("disabled") => Ok(Some(Overflow::Error)),
        Some(_) => Err(wrong_type("truncation", "auto or disabled")),
    }
}

/// Sets the effort of thoughts, in the words of templates that have one.
pub(crate) fn set_effort(options: &mut ChatOptions, effort: &str) {
    let effort = match effort {
        "minimal" => "low",
        "xhigh" | "max" => "high",
        effort => effort,
    };
    options.variables.insert("reasoning_effort".to_owned(), effort.into());
}

impl Conversation {
    /// Messages whose answer continues the last one if that is an answer.
    pub(crate) fn new(messages: Vec<Message>, options: ChatOptions) -> Self {
        let is_answer = |message: &Message| {
            message.role == "assistant"
                && message.tool_calls.is_empty()
                && !message.content.trim().is_empty()
        };
        let continues = messages.last().is_some_and(is_answer);
        Self {
            messages,
            options,
            continues,
            calls: true,
            required: None,
            form: None,
            overflow: None,
            thinking_budget: None,
            call_ids: CallIds::Kept,
        }
    }

    /// Tools that the answer may call.
    pub(crate) fn callable(&self) -> &ToolSet {
        const NONE: &ToolSet = &ToolSet { tools: Vec::new() };
        if self.calls { &self.options.tools } else { NONE }
    }

    /// The messages of the prompt, and the start of the answer. An answer that has a start has no
    /// thoughts before it.
    pub(crate) fn parts(&self) -> ConversationParts<'_> {
        let (messages, options) = (self.messages.as_slice(), self.options.clone());
        let call_ids = self.call_ids;
        match messages.split_last() {
            Some((last, before)) if self.continues => ConversationParts {
                messages: before,
                options: options.thinking(false),
                start: last.content.trim_end(),
                call_ids,
            },
            _ => ConversationParts { messages, options, start: "", call_ids },
        }
    }
}
