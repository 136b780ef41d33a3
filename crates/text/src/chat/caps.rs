//! Capabilities of a template: found by rendering small conversations of unique words, and looking
//! which of them come out.

use serde_json::{Value as Json, json};

use super::{
    content::Content,
    template_message::{
        ASSISTANT, ArgumentForm, SYSTEM, TOOL, TemplateCall, TemplateMessage, USER,
    },
};

/// Mark of calls of which templates render the id verbatim, and the model copies it.
const NUMBERED_CALL: &str = "<|tool_call_begin|>";
/// Mark of calls of templates that leave the list of tools to the system message.
const SEPARATED_CALL: &str = "<｜tool▁sep｜>";

/// Ids of calls in a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallIds {
    /// As the client sent them.
    Given,
    /// `functions.NAME:N`, where N counts through the conversation.
    Numbered,
    /// Nine letters and digits.
    Nine,
}

/// How a template takes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallForm {
    pub(super) arguments: ArgumentForm,
    pub(super) ids: CallIds,
    /// Whether one message may have several calls.
    pub(super) parallel: bool,
    /// Whether text and thoughts before calls are shown, in past turns the text at least.
    pub(super) text: bool,
    /// Whether thoughts before a call of the current turn are shown.
    pub(super) thoughts: bool,
    /// Whether the user may speak after a result.
    pub(super) then_user: bool,
    /// Whether a result may have images.
    pub(super) result_images: bool,
}

/// Form in which a model is told of its tools where the template does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ToolsText {
    /// JSON between tags.
    Tags,
    /// A heading for each tool, and DeepSeek's marks of calls.
    Headings,
}

/// Parts of a conversation that a template shows. `true` is the wider capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TemplateCaps {
    /// A system message at the start.
    pub(super) system: bool,
    /// A system message at the start beside tools.
    pub(super) system_with_tools: bool,
    /// System messages in any other place.
    pub(super) later_system: bool,
    /// Several messages of one role in a row.
    pub(super) repeated: bool,
    /// An answer as the first message.
    pub(super) answer_first: bool,
    /// A conversation without a question.
    pub(super) no_user: bool,
    /// The list of tools.
    pub(super) tools: bool,
    pub(super) tools_text: ToolsText,
    /// Images in a question.
    pub(super) images: bool,
    /// Calls and their results; `None` if they must be text.
    pub(super) calls: Option<CallForm>,
}

/// Renders messages and tools; `None` if the template rejects them.
type RenderFn<'a> = dyn Fn(&[TemplateMessage], &[Json]) -> Option<String> + 'a;

impl TemplateCaps {
    /// Capabilities of a template that takes everything.
    pub(super) const ALL: Self = Self {
        system: true,
        system_with_tools: true,
        later_system: true,
        repeated: true,
        answer_first: true,
        no_user: true,
        tools: true,
        tools_text: ToolsText::Tags,
        images: true,
        calls: Some(CallForm {
            arguments: ArgumentForm::Mapping,
            ids: CallIds::Given,
            parallel: true,
            text: true,
            thoughts: true,
            then_user: true,
            result_images: true,
        }),
    };

    /// Capabilities with which a conversation becomes text of user and assistant in turns, for
    /// templates that reject it otherwise.
    pub(super) fn plain(&self) -> Self {
        Self {
            later_system: false,
            repeated: false,
            answer_first: false,
            no_user: false,
            tools: false,
            calls: None,
            ..*self
        }
    }

    /// Probes a template. `render` gives the text of messages and tools, `None` if the template
    /// rejects them.
    pub(super) fn probe(render: &RenderFn<'_>) -> Self {
        let probe = Probe { render };
        if !probe.shows(&[user(ASK)], &[ASK]) {
            return Self::ALL;
        }
        let repeated = probe.shows(&[user(ASK), user(MORE)], &[ASK, MORE])
            && probe.shows(
                &[user(ASK), answer(REPLY), answer(THEN), user(MORE)],
                &[ASK, REPLY, THEN, MORE],
            );
        let later = [system(RULE), user(ASK), system(LATER)];
        let between = [system(RULE), user(ASK), answer(REPLY), system(LATER), user(MORE)];
        let calls = probe.calls();
        let is_separated = probe
            .text(&[user(ASK), calling(&[0], GIVEN, ArgumentForm::Text)])
            .is_some_and(|text| text.contains(SEPARATED_CALL));
        Self {
            system: probe.shows(&[system(RULE), user(ASK)], &[RULE, ASK])
                && calls.is_none_or(|form| {
                    let ids = if form.ids == CallIds::Nine { NINE } else { GIVEN };
                    let call = calling(&[0], ids, form.arguments);
                    let shown = probe.text(&[system(RULE), user(ASK), call, result(0, ids)]);
                    shown.is_some_and(|text| has_in_order(&text, &[RULE]))
                }),
            system_with_tools: probe.shows_tools(&[system(RULE), user(ASK)], &[RULE, ASK]),
            later_system: probe.shows(&later, &[RULE, ASK, LATER])
                && probe.shows(&between, &[RULE, ASK, REPLY, LATER, MORE]),
            repeated,
            answer_first: probe.shows(&[answer(REPLY), user(ASK)], &[REPLY, ASK]),
            no_user: probe.shows(&[system(RULE)], &[RULE])
                && probe.shows(&[system(RULE), answer(REPLY)], &[RULE, REPLY]),
            tools: probe.shows_tools(&[user(ASK)], &[ASK]),
            tools_text: if is_separated { ToolsText::Headings } else { ToolsText::Tags },
            images: probe.shows_images(&[], &user("")),
            calls,
        }
    }
}

const RULE: &str = "ruleword";
const LATER: &str = "laterword";
const ASK: &str = "askword";
const REPLY: &str = "replyword";
const THEN: &str = "thenword";
const MORE: &str = "moreword";
const THOUGHT: &str = "thoughtword";
/// Name, parameter, argument and result of two calls.
const CALLS: [[&str; 4]; 2] = [
    ["nameword", "keyword", "valueword", "resultword"],
    ["otherword", "secondword", "lastword", "endword"],
];
/// Ids that clients use, and those of nine letters.
const GIVEN: [&str; 2] = ["call_idwordOne", "call_idwordTwo"];
const NINE: [&str; 2] = ["idwordOne", "idwordTwo"];

fn system(text: &str) -> TemplateMessage {
    TemplateMessage::of(SYSTEM, text)
}

fn user(text: &str) -> TemplateMessage {
    TemplateMessage::of(USER, text)
}

fn answer(text: &str) -> TemplateMessage {
    TemplateMessage::of(ASSISTANT, text)
}

/// An answer that makes some of [`CALLS`].
fn calling(which: &[usize], ids: [&str; 2], form: ArgumentForm) -> TemplateMessage {
    let calls = which.iter().map(|i| {
        let [name, key, value, _] = CALLS[*i];
        let arguments = match form {
            ArgumentForm::Mapping => json!({key: value}),
            ArgumentForm::Text => Json::from(argument_text(*i)),
        };
        TemplateCall { id: ids[*i].to_owned(), name: name.to_owned(), arguments }
    });
    TemplateMessage { calls: calls.collect(), ..answer("") }
}

fn argument_text(i: usize) -> String {
    let [_, key, value, _] = CALLS[i];
    format!("{{\"{key}\": \"{value}\"}}")
}

/// Result of one of [`CALLS`].
fn result(i: usize, ids: [&str; 2]) -> TemplateMessage {
    let [name, _, _, text] = CALLS[i];
    TemplateMessage {
        call_id: Some(ids[i].to_owned()),
        name: Some(name.to_owned()),
        ..TemplateMessage::of(TOOL, text)
    }
}

/// Renderer of small conversations.
struct Probe<'a> {
    render: &'a RenderFn<'a>,
}

impl Probe<'_> {
    fn text(&self, messages: &[TemplateMessage]) -> Option<String> {
        (self.render)(messages, &[])
    }

    /// Whether the template shows `words` once each, in this order.
    fn shows(&self, messages: &[TemplateMessage], words: &[&str]) -> bool {
        self.text(messages).is_some_and(|text| has_in_order(&text, words))
    }

    /// Whether the template shows the images in the content of the last message.
    fn shows_images(&self, before: &[TemplateMessage], last: &TemplateMessage) -> bool {
        let shown = |images| {
            let mut content = Content::from(THEN);
            (0..images).for_each(|_| content.join(Content::any_image()));
            content.join(MORE);
            let last = TemplateMessage { content, ..last.clone() };
            let mut text = self.text(&[before, &[last]].concat())?;
            text.retain(|c| !c.is_whitespace());
            has_in_order(&text, &[THEN, MORE]).then_some(text)
        };
        // A list of parts that is printed as it is has their keys.
        let keys = |text: &str| text.matches("type").count();
        let (one, two) = (shown(1), shown(2));
        one.zip(two).is_some_and(|(one, two)| one != two && keys(&one) == keys(&two))
    }

    /// Whether the template shows a tool, and `words` once each, in this order.
    fn shows_tools(&self, messages: &[TemplateMessage], words: &[&str]) -> bool {
        let tool = json!({"type": "function", "function": {
            "name": "toolword",
            "description": "purposeword",
            "parameters": {"type": "object", "properties": {
                "paramword": {"type": "string", "description": "aboutword"},
            }},
        }});
        let parts = ["toolword", "purposeword", "paramword", "aboutword"];
        (self.render)(messages, &[tool]).is_some_and(|text| {
            parts.iter().all(|part| text.contains(part)) && has_in_order(&text, words)
        })
    }

    /// Form of calls that the template takes.
    fn calls(&self) -> Option<CallForm> {
        let [name, key, value, text] = CALLS[0];
        for (ids, kind) in [(GIVEN, CallIds::Given), (NINE, CallIds::Nine)] {
            for form in [ArgumentForm::Mapping, ArgumentForm::Text] {
                let call = |which: &[usize]| calling(which, ids, form);
                let Some(shown) = self.text(&[user(ASK), call(&[0]), result(0, ids)]) else {
                    continue;
                };
                let is_json = match form {
                    // Python's notation is no JSON.
                    ArgumentForm::Mapping => !shown.contains(&format!("'{key}'")),
                    ArgumentForm::Text => shown.contains(&argument_text(0)),
                };
                // The id has the name then.
                let is_numbered = shown.contains(&format!("{NUMBERED_CALL}{}", ids[0]));
                if !(is_json
                    && (is_numbered || shown.contains(name))
                    && has_in_order(&shown, &[ASK, key, value, text]))
                {
                    continue;
                }
                return Some(CallForm {
                    arguments: form,
                    ids: if is_numbered { CallIds::Numbered } else { kind },
                    ..self.call_form(&call, ids)
                });
            }
        }
        None
    }

    /// Form of calls, without arguments and ids.
    fn call_form(&self, call: &dyn Fn(&[usize]) -> TemplateMessage, ids: [&str; 2]) -> CallForm {
        let [[_, _, value, text], [_, _, other, end]] = CALLS;
        let with = |content: &str, reasoning: &str| TemplateMessage {
            content: content.into(),
            reasoning: (!reasoning.is_empty()).then(|| reasoning.to_owned()),
            ..call(&[0])
        };
        let result = |i| result(i, ids);
        let past = [user(ASK), with(REPLY, THOUGHT), result(0), answer(THEN), user(MORE)];
        let both = [user(ASK), call(&[0, 1]), result(0), result(1)];
        CallForm {
            parallel: self.text(&both).is_some_and(|shown| {
                has_in_order(&shown, &[ASK, value, other]) && has_in_order(&shown, &[text, end])
            }),
            text: self.shows(&past, &[ASK, REPLY, value, text, THEN, MORE])
                && self.shows(
                    &[user(ASK), with(REPLY, THOUGHT), result(0)],
                    &[ASK, REPLY, value, text],
                ),
            thoughts: self
                .shows(&[user(ASK), with("", THOUGHT), result(0)], &[ASK, THOUGHT, value, text]),
            then_user: self
                .shows(&[user(ASK), call(&[0]), result(0), user(MORE)], &[ASK, value, text, MORE]),
            result_images: self.shows_images(&[user(ASK), call(&[0])], &result(0)),
            arguments: ArgumentForm::Mapping,
            ids: CallIds::Given,
        }
    }
}

/// Whether `words` are in `text` once each, in this order.
fn has_in_order(text: &str, words: &[&str]) -> bool {
    let places = words.iter().map(|word| {
        let mut places = text.match_indices(word).map(|(at, _)| at);
        places.next().filter(|_| places.next().is_none())
    });
    let places: Option<Vec<usize>> = places.collect();
    places.is_some_and(|places| places.is_sorted())
}
