//! Normal form of a conversation: the messages that a template takes, without loss of text.

#[cfg(test)]
pub(crate) mod tests;

use serde_json::Value as Json;

use super::{
    caps::{CallForm, CallIds, TemplateCaps, ToolsText},
    content::Content,
    literal::Literal,
    message::{Message, MessageImage},
    template_message::{
        ASSISTANT, ArgumentForm, SYSTEM, TOOL, TemplateCall, TemplateMessage, USER, tool_values,
    },
    tools::ToolSet,
};

/// Result of a call that has none.
const NO_RESULT: &str = "(no result)";
/// Answer between a result and a question, where a template asks for one.
const NO_ANSWER: &str = "(no answer)";
/// Image of a result, where a template takes it only from the user.
const IMAGE_BELOW: &str = "(image below)";
/// Problem of images where a template takes none.
const NO_IMAGES: &str = "the model's chat template takes no images: expected messages of text \
                         alone, got one with an image";

/// Messages and tools as a template takes them.
#[derive(Debug, Default)]
pub(super) struct NormalForm {
    pub(super) messages: Vec<TemplateMessage>,
    /// Tools for the template; empty where they are in a message.
    pub(super) tools: Vec<Json>,
}

impl NormalForm {
    /// Messages as they are.
    ///
    /// # Errors
    /// The images of a message are not in its content.
    pub(super) fn as_is(messages: &[Message], tools: &ToolSet) -> Result<Self, String> {
        let literal = Literal::AS_IS;
        let messages = template_messages(messages, ArgumentForm::Mapping, &literal)?;
        Ok(Self { messages, tools: tool_values(tools, &literal) })
    }

    /// Brings a conversation into the form that a template with `caps` takes.
    ///
    /// # Errors
    /// A message has a result without a call; a message has images, and the template takes none, or
    /// they are not in its content.
    pub(super) fn new(
        messages: &[Message],
        tools: &ToolSet,
        caps: &TemplateCaps,
        literal: &Literal<'_>,
    ) -> Result<Self, String> {
        let form = caps.calls.map_or(ArgumentForm::Text, |form| form.arguments);
        let messages = template_messages(messages, form, literal)?;
        if !caps.images && messages.iter().any(|m| !m.content.images().is_empty()) {
            return Err(NO_IMAGES.to_owned());
        }
        let mut messages = with_results(messages)?;
        for message in messages.iter_mut().filter(|m| m.is("developer")) {
            message.role = SYSTEM.to_owned();
        }
        let mut tools = tool_values(tools, literal);
        let mut start = leading_system(&mut messages);
        if !caps.tools && !tools.is_empty() {
            let text = tools_text(&tools, caps.tools_text);
            start.get_or_insert_with(|| TemplateMessage::of(SYSTEM, "")).content.append(text);
            tools.clear();
        }
        let mut messages = match &caps.calls {
            Some(form) => with_calls(messages, form),
            None => with_calls_as_text(messages),
        };
        if !caps.later_system {
            messages = with_reminders(messages);
        }
        if let Some(system) = start {
            if caps.system && (tools.is_empty() || caps.system_with_tools) {
                messages.insert(0, system);
            } else {
                put_before(&mut messages, system.content);
            }
        }
        let mut normal = Self { messages, tools };
        normal.take_turns(caps);
        Ok(normal)
    }

    /// Images of the conversation, in the order in which the template has them.
    pub(super) fn images(&self) -> Vec<MessageImage> {
        self.messages.iter().flat_map(|message| message.content.images()).copied().collect()
    }

    /// Bytes of the conversation.
    pub(super) fn len(&self) -> usize {
        let tools = self.tools.iter().map(|tool| tool.to_string().len()).sum::<usize>();
        self.messages.iter().map(TemplateMessage::len).sum::<usize>() + tools
    }

    /// Keeps the order of speakers that a template asks for.
    fn take_turns(&mut self, caps: &TemplateCaps) {
        let messages = &mut self.messages;
        if !caps.repeated {
            messages.dedup_by(|next, message| {
                let is_same = next.role == message.role && [USER, ASSISTANT].contains(&&*next.role);
                let merge = is_same && message.calls.is_empty() && next.calls.is_empty();
                if merge {
                    message.content.append(std::mem::take(&mut next.content));
                    message.reasoning = next.reasoning.take().or(message.reasoning.take());
                }
                merge
            });
        }
        if caps.calls.is_some_and(|form| !form.then_user) {
            let gaps = messages.windows(2).enumerate();
            let gaps: Vec<usize> = gaps
                .filter(|(_, pair)| pair[0].is(TOOL) && pair[1].is(USER))
                .map(|(i, _)| i + 1)
                .collect();
            for at in gaps.into_iter().rev() {
                messages.insert(at, TemplateMessage::of(ASSISTANT, NO_ANSWER));
            }
        }
        let first = messages.iter().position(|message| !message.is(SYSTEM));
        let answers_first = first.is_some_and(|first| messages[first].is(ASSISTANT));
        let has_user = messages.iter().any(|message| message.is(USER));
        if (!has_user && !caps.no_user) || (answers_first && !caps.answer_first) {
            messages.insert(first.unwrap_or(messages.len()), TemplateMessage::of(USER, ""));
        }
    }
}

/// # Errors
/// The images of a message are not in its content; the error names the message.
fn template_messages(
    messages: &[Message],
    form: ArgumentForm,
    literal: &Literal<'_>,
) -> Result<Vec<TemplateMessage>, String> {
    let named = |(i, message)| {
        TemplateMessage::new(message, form, literal)
            .map_err(|problem| format!("messages[{i}].images: {problem}"))
    };
    messages.iter().enumerate().map(named).collect()
}

/// Puts the results of calls behind them, in the order of the calls, each with its tool's name.
///
/// # Errors
/// A result has no call; the error names its message.
fn with_results(messages: Vec<TemplateMessage>) -> Result<Vec<TemplateMessage>, String> {
    /// Calls of one message whose results are looked for.
    struct PendingResults {
        /// Place of the first result.
        at: usize,
        calls: Vec<(TemplateCall, Option<TemplateMessage>)>,
    }
    fn close(ordered: &mut Vec<TemplateMessage>, open: Option<PendingResults>) {
        let Some(PendingResults { at, calls }) = open else { return };
        let results = calls.into_iter().map(|(call, result)| TemplateMessage {
            call_id: Some(call.id),
            name: Some(call.name),
            ..result.unwrap_or_else(|| TemplateMessage::of(TOOL, NO_RESULT))
        });
        drop(ordered.splice(at..at, results.collect::<Vec<_>>()));
    }
    let mut ordered: Vec<TemplateMessage> = Vec::with_capacity(messages.len());
    let mut open: Option<PendingResults> = None;
    for (i, mut message) in messages.into_iter().enumerate() {
        if message.is("function") {
            message.role = TOOL.to_owned();
        }
        if !message.is(TOOL) {
            let has_calls = !message.calls.is_empty();
            if has_calls {
                close(&mut ordered, open.take());
            }
            let calls = message.calls.iter().map(|call| (call.clone(), None)).collect();
            ordered.push(message);
            if has_calls {
                open = Some(PendingResults { at: ordered.len(), calls });
            }
            continue;
        }
        let calls = open.iter_mut().flat_map(|open| &mut open.calls);
        let of = message.call_id.clone().filter(|id| !id.is_empty());
        let mut calls = calls.filter(|(call, result)| match (&of, &message.name) {
            (Some(id), _) => call.id == *id,
            (None, Some(name)) => call.name == *name && result.is_none(),
            (None, None) => result.is_none(),
        });
        match (calls.next(), of) {
            (Some((_, Some(result))), _) => result.content.append(message.content),
            (Some((_, result)), _) => *result = Some(message),
            (None, Some(id)) => {
                return Err(format!(
                    "messages[{i}] is the result of the call {id:?}, but no answer before it made \
                     that call"
                ));
            }
            (None, None) => {
                return Err(format!("messages[{i}] is the result of a call that no answer made"));
            }
        }
    }
    close(&mut ordered, open);
    Ok(ordered)
}

/// Takes the system messages at the start, as one.
fn leading_system(messages: &mut Vec<TemplateMessage>) -> Option<TemplateMessage> {
    let count = messages.iter().take_while(|message| message.is(SYSTEM)).count();
    let mut leading = messages.drain(..count);
    let mut first = leading.next()?;
    leading.for_each(|next| first.content.append(next.content));
    Some(first)
}

/// Puts a content at the start of the first question before any answer.
fn put_before(messages: &mut Vec<TemplateMessage>, content: Content) {
    match messages.first_mut() {
        Some(first) if first.is(USER) => {
            let question = std::mem::replace(&mut first.content, content);
            first.content.append(question);
        }
        _ => messages.insert(0, TemplateMessage::of(USER, content)),
    }
}

/// Later system messages as reminders in the message before them, so that the prompt of the next
/// turn begins with this one. After an answer they begin the next question.
fn with_reminders(messages: Vec<TemplateMessage>) -> Vec<TemplateMessage> {
    let mut kept: Vec<TemplateMessage> = Vec::with_capacity(messages.len());
    let mut is_alone = false;
    for mut message in messages {
        let is_reminder = message.is(SYSTEM);
        if is_reminder {
            let reminder = message.content.within("<system-reminder>\n", "\n</system-reminder>");
            message = TemplateMessage::of(USER, reminder);
        }
        match kept.last_mut() {
            Some(last) if is_reminder && (last.is(USER) || last.is(TOOL)) => {
                last.content.append(message.content);
            }
            Some(last) if is_alone && message.is(USER) => {
                last.content.append(message.content);
                is_alone = false;
            }
            _ => {
                kept.push(message);
                is_alone = is_reminder;
            }
        }
    }
    kept
}

/// Messages with calls as a template takes them.
fn with_calls(messages: Vec<TemplateMessage>, form: &CallForm) -> Vec<TemplateMessage> {
    let mut kept = Vec::with_capacity(messages.len());
    let last_answer = messages.iter().rposition(|m| m.is(ASSISTANT) && m.calls.is_empty());
    let mut counted = 0;
    let mut messages = messages.into_iter().enumerate().peekable();
    while let Some((i, mut message)) = messages.next() {
        if message.calls.is_empty() {
            kept.push(message);
            continue;
        }
        if !form.text && !message.content.is_empty() {
            let content = std::mem::take(&mut message.content);
            // Such templates drop the thoughts of turns with an answer.
            if last_answer > Some(i) || !form.thoughts || !content.images().is_empty() {
                kept.push(TemplateMessage::of(ASSISTANT, content));
            } else {
                let mut thoughts = Content::from(message.reasoning.unwrap_or_default());
                thoughts.append(content);
                message.reasoning = Some(thoughts.text);
            }
        }
        let mut results = Vec::new();
        for call in &mut message.calls {
            let mut result = messages.next_if(|(_, next)| next.is(TOOL)).map(|(_, next)| next);
            match form.ids {
                CallIds::Given => {}
                CallIds::Numbered => call.id = format!("functions.{}:{counted}", call.name),
                CallIds::Nine => call.id = format!("call{counted:05}"),
            }
            counted += 1;
            if let Some(result) = &mut result {
                result.call_id = Some(call.id.clone());
            }
            results.extend(result);
        }
        let images = if form.result_images { None } else { images_of_results(&mut results) };
        if form.parallel {
            kept.push(message);
            kept.append(&mut results);
        } else {
            let calls = std::mem::take(&mut message.calls);
            for (call, result) in calls.into_iter().zip(results) {
                let one = TemplateMessage { calls: vec![call], ..message };
                message = TemplateMessage::of(ASSISTANT, "");
                kept.extend([one, result]);
            }
        }
        kept.extend(images);
    }
    kept
}

/// Takes the images out of the results of calls, into a message of the user that follows them.
fn images_of_results(results: &mut [TemplateMessage]) -> Option<TemplateMessage> {
    let mut moved = Content::default();
    for result in results.iter_mut().filter(|result| !result.content.images().is_empty()) {
        let name = result.name.as_deref().unwrap_or_default();
        moved.append(format!("From the result of {name}:\n"));
        moved.join(result.content.take_images(IMAGE_BELOW));
    }
    (!moved.is_empty()).then(|| TemplateMessage::of(USER, moved))
}

/// Messages with calls and results as text of assistant and user.
fn with_calls_as_text(messages: Vec<TemplateMessage>) -> Vec<TemplateMessage> {
    let mut kept: Vec<TemplateMessage> = Vec::with_capacity(messages.len());
    let mut after_result = false;
    for mut message in messages {
        for call in std::mem::take(&mut message.calls) {
            message.content.append(format!("<tool_call>\n{}\n</tool_call>", call.json()));
        }
        let is_result = message.is(TOOL);
        if is_result {
            let response = message.content.within("<tool_response>\n", "\n</tool_response>");
            message = TemplateMessage::of(USER, response);
        }
        match kept.last_mut() {
            Some(last) if is_result && after_result => last.content.append(message.content),
            _ => kept.push(message),
        }
        after_result = is_result;
    }
    kept
}

/// The list of tools, for the system message.
fn tools_text(tools: &[Json], form: ToolsText) -> String {
    let functions = tools.iter().filter_map(|tool| tool.get("function"));
    match form {
        ToolsText::Tags => {
            let lines: Vec<String> = functions.map(Json::to_string).collect();
            format!(
                "# Tools\n\nYou can call these functions. Each line is one, with the JSON schema of \
                 its arguments:\n<tools>\n{}\n</tools>\n\nTo call a function, answer with its name \
                 and its arguments as JSON between tags, a block for each call:\n<tool_call>\n\
                 {{\"name\": NAME, \"arguments\": OBJECT}}\n</tool_call>",
                lines.join("\n")
            )
        }
        ToolsText::Headings => {
            let text = |value: &Json| value.as_str().unwrap_or_default().to_owned();
            let sections: Vec<String> = functions
                .map(|function| {
                    format!(
                        "### {}\nDescription: {}\n\nParameters: {}\n",
                        text(&function["name"]),
                        text(&function["description"]),
                        function["parameters"]
                    )
                })
                .collect();
            format!(
                "## Tools\nYou have access to the following tools:\n\n{}\nIMPORTANT: ALWAYS adhere \
                 to this exact format for tool use:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>\
                 tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>\
                 {{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n\n- `tool_call_name` must \
                 be an exact match to one of the available tools\n- `tool_call_arguments` must be \
                 valid JSON that strictly follows the tool's Parameters Schema\n- For multiple tool \
                 calls, chain them directly without separators or spaces\n",
                sections.join("\n")
            )
        }
    }
}
