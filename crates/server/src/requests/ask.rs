//! A request for answers, whatever its API, and the fields that all APIs share.

use std::collections::HashSet;

use moeflux::{ChatOptions, GenerateRequest, Message, text::ToolSet};

use super::{
    answered_turn::CallIds,
    content::Content,
    form::{AskedForm, RequiredCalls},
    images::ImageTable,
    line_limits::LineLimits,
    overflow::Overflow,
};
use crate::transport::{
    error::ApiError,
    json::{Fields, wrong_type},
};

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

impl Ask {
    /// Images of its prompts.
    pub(crate) fn images(&mut self) -> &mut ImageTable {
        match &mut self.prompt {
            AskPrompt::Conversation(conversation) => &mut conversation.images,
            AskPrompt::Raw { images, .. } => images,
        }
    }
}

/// Reports that a request asks for, as in llama.cpp's server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AskedReports {
    /// Progress of the prompt.
    pub(crate) progress: bool,
    /// Times with every token.
    pub(crate) timings: bool,
    /// Every token before its text.
    pub(crate) tokens: bool,
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
            tokens: false,
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
        images: ImageTable,
        /// Whether an answer starts with the text of its prompt.
        echo: bool,
        /// Form of the answers.
        form: Option<AskedForm>,
        /// Limits of the answers line by line.
        lines: LineLimits,
    },
}

/// A prompt without a template.
#[derive(Clone, Debug)]
pub(crate) enum RawPrompt {
    Text(String),
    Tokens(Vec<u32>),
    /// A text with images.
    Media(Content),
}

/// Messages and the template's variables.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Message>,
    pub(crate) images: ImageTable,
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
    /// Tokens of a conversation that the last message continues, in place of earlier messages.
    pub(crate) before: Vec<u32>,
}

/// Parts of a prompt.
#[derive(Debug)]
pub(crate) struct ConversationParts<'a> {
    pub(crate) messages: &'a [Message],
    pub(crate) options: ChatOptions,
    /// Text with which the answer starts, as the client has it already.
    pub(crate) start: &'a str,
    pub(crate) call_ids: CallIds,
    /// Tokens before the last message, in place of earlier ones.
    pub(crate) before: &'a [u32],
}

/// Messages as they are read. Calls without an id get one, so that their results have it.
#[derive(Debug, Default)]
pub(crate) struct MessageList {
    messages: Vec<Message>,
    pub(crate) images: ImageTable,
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

    /// Whether there are no messages.
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }
}

/// Variables of the template: `enable_thinking`, `thinking.type`, `reasoning_effort`, `verbosity`
/// and `chat_template_kwargs`, of which the last one wins.
///
/// # Errors
/// A field has a wrong type.
pub(crate) fn chat_options(fields: &Fields<'_>) -> Result<ChatOptions, ApiError> {
    let mut options = ChatOptions::default();
    set_verbosity(&mut options, fields)?;
    options.thinking = fields.flag("enable_thinking")?;
    if let Some(thinking) = fields.object("thinking")? {
        options.thinking = match thinking.text("type")?.as_deref() {
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
    match fields.text("reasoning_effort")?.as_deref() {
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
        options.variables.extend(variables);
    }
    Ok(options)
}

/// Sets the variable of the template with the name of the field `verbosity`.
///
/// # Errors
/// It is no string.
pub(crate) fn set_verbosity(
    options: &mut ChatOptions,
    fields: &Fields<'_>,
) -> Result<(), ApiError> {
    const NAME: &str = "verbosity";
    if let Some(verbosity) = fields.text(NAME)? {
        options.variables.insert(NAME.to_owned(), (&*verbosity).into());
    }
    Ok(())
}

/// Most tokens of thoughts: the fields `thinking.budget_tokens`, `thinking_budget`,
/// `thinking_token_budget` and `reasoning_budget`, of which the first one wins; -1 is no limit.
///
/// # Errors
/// A field is no whole number, or is below -1.
pub(crate) fn thinking_budget(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let thinking = fields.object("thinking")?;
    let places = [
        thinking.as_ref().map(|thinking| (thinking, "budget_tokens")),
        Some((fields, "thinking_budget")),
        Some((fields, "thinking_token_budget")),
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
    match fields.text("truncation")?.as_deref() {
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
    pub(crate) fn new(list: MessageList, options: ChatOptions) -> Self {
        let MessageList { messages, images, .. } = list;
        let is_answer = |message: &Message| {
            message.role == "assistant"
                && message.tool_calls.is_empty()
                && !message.content.trim().is_empty()
        };
        let continues = messages.last().is_some_and(is_answer);
        Self {
            messages,
            images,
            options,
            continues,
            calls: true,
            required: None,
            form: None,
            overflow: None,
            thinking_budget: None,
            call_ids: CallIds::Kept,
            before: Vec::new(),
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
        let (call_ids, before) = (self.call_ids, self.before.as_slice());
        match messages.split_last() {
            Some((last, earlier)) if self.continues => ConversationParts {
                messages: earlier,
                options: options.thinking(false),
                start: last.content.trim_end(),
                call_ids,
                before,
            },
            _ => ConversationParts { messages, options, start: "", call_ids, before },
        }
    }
}
