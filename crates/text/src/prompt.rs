//! Prompts of conversations: tokens, and the prefixes that later prompts share.

mod images;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use moeflux_base::Error;
use serde::{Deserialize, Serialize};

use crate::{
    chat::{ChatOptions, ChatTemplate, FoundToken, Literal, Message, RenderedChat},
    text::Text,
};
pub use images::{ExpandedTokens, PlacedImage};

/// Tokens of a conversation, and the lengths of prefixes that later prompts are likely to share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChatPrompt {
    /// Rendered text, with the private character in special tokens that messages spell.
    rendered: String,
    /// Tokens up to the start of the answer.
    pub tokens: Vec<u32>,
    /// Images among them, ascending by place.
    pub images: Vec<PlacedImage>,
    /// Lengths of prefixes, ascending: after tools and system message, after each of the last two
    /// messages, where the next turn diverges, and the whole prompt. None is inside an image.
    pub ends: Vec<usize>,
}

/// A prompt and its answer, as the model saw and generated them.
///
/// The text of an answer may have other tokens when it is tokenized again, and templates write
/// calls with other white space than models. With the tokens themselves the next prompt continues
/// the session: see [`Text::prompt_after`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// Rendered text of the prompt, as in [`ChatPrompt`].
    rendered: String,
    /// Tokens of the prompt and of the answer.
    tokens: Vec<u32>,
    /// Number of tokens of the prompt.
    start: usize,
    /// Images of the prompt, ascending by place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    images: Vec<PlacedImage>,
}

impl Turn {
    /// A prompt and the tokens of its answer, without an end token.
    pub fn new(prompt: ChatPrompt, answer: &[u32]) -> Self {
        let ChatPrompt { rendered, mut tokens, images, .. } = prompt;
        let start = tokens.len();
        tokens.reserve_exact(answer.len());
        tokens.extend_from_slice(answer);
        Self { rendered, tokens, start, images }
    }

    /// Tokens of the prompt and of the answer.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Bytes of text, tokens and places of images.
    pub fn bytes(&self) -> usize {
        self.rendered.len() + size_of_val(&*self.tokens) + size_of_val(&*self.images)
    }
}

/// Question and answer that no conversation has, to find where others diverge from it.
const OTHER: &str = "~";

/// Start of a conversation whose tokens are known.
#[derive(Default)]
struct PastTurn {
    prompt: ExpandedTokens,
    /// Bytes of its rendered text.
    text_bytes: usize,
}

/// A conversation to render.
struct Conversation<'a> {
    template: &'a ChatTemplate,
    options: &'a ChatOptions,
    literal: Literal<'a>,
}

impl Conversation<'_> {
    fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<RenderedChat, Error> {
        let Self { template, options, literal } = self;
        template.render_conversation(messages, add_generation_prompt, options, literal)
    }
}

impl Text {
    /// Text of a conversation, up to the start of the assistant's answer.
    ///
    /// Messages are brought into the form that the template takes, so that none of their text is
    /// lost: see `chat/normal_form.rs`. Each image has one placeholder.
    ///
    /// # Errors
    /// There is no chat template, or it fails; a message has a result of a tool without a call, or
    /// images that the template does not take.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String, Error> {
        let conversation = self.conversation(messages, options, self.limit)?;
        let mut text = conversation.render(messages, true)?.text;
        text.retain(|c| c != conversation.literal.mark());
        Ok(text)
    }

    /// Tokens of a conversation, up to the start of the assistant's answer. Special tokens that the
    /// messages spell are text. Each image has as many placeholders as tokens.
    ///
    /// # Errors
    /// As [`Text::render`]; the prompt is longer than the context, or has another number of images
    /// than the messages.
    pub fn chat(&self, messages: &[Message], options: &ChatOptions) -> Result<Vec<u32>, Error> {
        let conversation = self.conversation(messages, options, self.limit)?;
        let RenderedChat { text, images } = conversation.render(messages, true)?;
        let tokens = self.encode_rendered(&text, conversation.literal.mark())?;
        Ok(self.expand_images(&tokens, &images)?.tokens)
    }

    /// Tokens of a conversation as [`Text::chat`], and the prefixes that later prompts are likely
    /// to share.
    ///
    /// # Errors
    /// As [`Text::chat`].
    pub fn prompt(&self, messages: &[Message], options: &ChatOptions) -> Result<ChatPrompt, Error> {
        self.prompt_after(messages, options, [])
    }

    /// Like [`Text::prompt`], with the tokens of an earlier turn as the model saw and generated
    /// them: the first of `turns` whose prompt and answer the conversation starts with, with the
    /// same images, up to white space in the answer. A template that renders that answer otherwise,
    /// such as without its thoughts, has the last word.
    ///
    /// # Errors
    /// As [`Text::chat`].
    pub fn prompt_after<'a>(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        turns: impl IntoIterator<Item = &'a Turn>,
    ) -> Result<ChatPrompt, Error> {
        let conversation = self.conversation(messages, options, self.limit)?;
        let (chat, mark) = (conversation.render(messages, true)?, conversation.literal.mark());
        let past = turns.into_iter().find_map(|turn| self.past_turn(turn, &chat, mark));
        let PastTurn { mut prompt, text_bytes } = past.unwrap_or_default();
        let rest = self.encode_rendered(&chat.text[text_bytes..], mark)?;
        prompt.append(self.expand_images(&rest, &chat.images[prompt.images.len()..])?);
        let length = prompt.tokens.len();
        if length > self.limit {
            return Err(self.too_long(length));
        }
        let mut ends: Vec<usize> = likely(&conversation, messages)
            .filter_map(|other| self.shared(&chat.text, &prompt, &other, mark))
            .chain([length])
            .filter(|end| *end > 0)
            .collect();
        ends.sort_unstable();
        ends.dedup();
        let ExpandedTokens { tokens, images } = prompt;
        Ok(ChatPrompt { rendered: chat.text, tokens, images, ends })
    }

    /// Number of tokens of [`Text::prompt_after`], also beyond the context.
    ///
    /// # Errors
    /// As [`Text::render`]; the prompt has another number of images than the messages.
    pub fn count_after<'a>(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        turns: impl IntoIterator<Item = &'a Turn>,
    ) -> Result<usize, Error> {
        let conversation = self.conversation(messages, options, usize::MAX)?;
        let (chat, mark) = (conversation.render(messages, true)?, conversation.literal.mark());
        let past = turns.into_iter().find_map(|turn| self.past_turn(turn, &chat, mark));
        let PastTurn { prompt, text_bytes } = past.unwrap_or_default();
        let (mut count, mut placeholders) = (prompt.tokens.len(), 0);
        self.rendered_pieces(&chat.text[text_bytes..], mark, usize::MAX, &mut |ids| {
            count += ids.len();
            placeholders += self.placeholders(ids);
        })?;
        let added = self.added_by_images(placeholders, &chat.images[prompt.images.len()..])?;
        Ok(count.saturating_add(added))
    }

    /// A turn with which a rendered conversation starts; `None` if it does not.
    fn past_turn(&self, turn: &Turn, chat: &RenderedChat, mark: char) -> Option<PastTurn> {
        let rest = chat.text.strip_prefix(&*turn.rendered)?;
        let find = |text, is_wanted: &dyn Fn(u32) -> bool| {
            let id = |found: &FoundToken<'_>| self.tokenizer().token_to_id(&found.token.text);
            self.controls.find(text).find(|found| id(found).is_some_and(is_wanted))
        };
        let end = find(rest, &|id| self.end().contains(id))?.start;
        // An image in the answer was not generated.
        let shows_image = find(&rest[..end], &|id| self.image_token() == Some(id)).is_some();
        let (prompt, answer) = turn.tokens.split_at_checked(turn.start)?;
        let made = self.tokenizer().decode(answer, false).ok()?;
        let visible = |c: &char| !c.is_whitespace() && *c != mark;
        let is_same = rest[..end].chars().filter(visible).eq(made.chars().filter(visible));
        let text_bytes = turn.rendered.len() + end;
        let has_images = self.has_images(prompt, &turn.images, &chat.images);
        let is_turn = is_same && has_images && !shows_image;
        is_turn.then(|| PastTurn {
            prompt: ExpandedTokens { tokens: turn.tokens.clone(), images: turn.images.clone() },
            text_bytes,
        })
    }

    /// Tokens that continue after an answer without its end token: the end of the answer,
    /// `question`, and the prompt for the next answer. Continues conversations of which only the
    /// tokens are known, such as saved sessions.
    ///
    /// # Errors
    /// As [`Text::chat`]; also if the template does not include answers verbatim.
    pub fn chat_follow_up(&self, question: &str, options: &ChatOptions) -> Result<Vec<u32>, Error> {
        let messages = [Message::user(question)];
        let Conversation { template, literal, .. } =
            self.conversation(&messages, options, self.limit)?;
        self.encode_rendered(
            &template.render_follow_up(question, options, &literal)?,
            literal.mark(),
        )
    }

    /// # Errors
    /// There is no chat template; the messages certainly have more than `limit` tokens.
    fn conversation<'a>(
        &'a self,
        messages: &[Message],
        options: &'a ChatOptions,
        limit: usize,
    ) -> Result<Conversation<'a>, Error> {
        let template = self.template()?;
        // Before the template makes copies of it.
        let bytes = messages.iter().map(|message| message.content.len()).sum();
        if self.tokenizer().exceeds(bytes, limit) {
            return Err(self.too_long(limit.saturating_add(1)));
        }
        let given =
            [serde_json::to_string(&options.variables), serde_json::to_string(&options.tools)];
        let given = given.into_iter().flatten().map(Cow::Owned);
        // JSON may spell a character as an escape.
        let escaped = messages.iter().flat_map(|m| &m.tool_calls).filter_map(|call| {
            serde_json::from_str::<serde_json::Value>(&call.arguments).ok().map(|v| v.to_string())
        });
        let strings = messages.iter().flat_map(Message::strings).map(Cow::Borrowed);
        let source = [Cow::Borrowed(template.source())];
        let strings = strings.chain(given).chain(escaped.map(Cow::Owned)).chain(source);
        let literal = Literal::new(&self.controls, strings)
            .ok_or_else(|| template.problem("the messages have every private character".into()))?;
        Ok(Conversation { template, options, literal })
    }

    /// Tokens of a rendered text. In the parts with `mark`, special tokens are text.
    ///
    /// # Errors
    /// The tokenizer cannot represent the text, or it has more tokens than the context.
    fn encode_rendered(&self, text: &str, mark: char) -> Result<Vec<u32>, Error> {
        let mut tokens = Vec::new();
        self.rendered_pieces(text, mark, self.limit, &mut |ids| tokens.extend_from_slice(ids))?;
        Ok(tokens)
    }

    /// Gives the tokens of a rendered text to `take`, in order, up to `limit` of them.
    ///
    /// # Errors
    /// The tokenizer cannot represent the text, or it has more tokens.
    fn rendered_pieces(
        &self,
        text: &str,
        mark: char,
        limit: usize,
        take: &mut dyn FnMut(&[u32]),
    ) -> Result<(), Error> {
        let mut room = limit;
        let mut add = |part: &str, is_literal: bool| -> Result<(), Error> {
            let ids = match is_literal {
                true => self.encode_literal(part, mark, room)?,
                false => self.tokenizer().encode_within(part, false, room)?,
            };
            let ids = ids.ok_or_else(|| self.too_long(limit.saturating_add(1)))?;
            room -= ids.len();
            take(&ids);
            Ok(())
        };
        if !text.contains(mark) {
            return add(text, false);
        }
        // Everything before `done` is encoded. `start` is where the text between tokens begins.
        let (mut done, mut start) = (0, 0);
        let ends = self.controls.find(text).map(Some).chain([None]);
        for found in ends {
            let mut end = found.map_or(text.len(), |found| found.start);
            if text[start..end].contains(mark) {
                if found.is_some_and(|found| found.token.takes_before) {
                    end = start + text[start..end].trim_end().len();
                }
                add(&text[done..start], false)?;
                add(&text[start..end], true)?;
                done = end;
            }
            if let Some(found) = found {
                start = found.end();
                if found.token.takes_behind {
                    start = text.len() - text[start..].trim_start().len();
                }
            }
        }
        add(&text[done..], false)
    }

    /// Tokens of a text without special ones.
    fn encode_literal(
        &self,
        marked: &str,
        mark: char,
        limit: usize,
    ) -> Result<Option<Vec<u32>>, Error> {
        let has_special = |ids: &[u32]| ids.iter().any(|id| self.is_control(*id));
        let ids = self.tokenizer().encode_literal(&marked.replace(mark, ""), limit)?;
        if !ids.as_ref().is_some_and(|ids| has_special(ids)) {
            return Ok(ids);
        }
        // Some models join a special token from its characters: no part has all of them.
        let mut all = Vec::new();
        for part in marked.split(mark) {
            let limit = limit.saturating_sub(all.len());
            let Some(ids) = self.tokenizer().encode_literal(part, limit)? else { return Ok(None) };
            all.extend(ids);
        }
        Ok(Some(all))
    }

    /// Length of the prefix of `prompt`, whose text is `text`, that the tokens of another text
    /// share. Only the text between the last shared special token and the first difference is
    /// encoded.
    fn shared(
        &self,
        text: &str,
        prompt: &ExpandedTokens,
        other: &str,
        mark: char,
    ) -> Option<usize> {
        let same = text.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        let same = text.floor_char_boundary(same);
        let specials = self.controls.find(text).take_while(|found| found.end() <= same);
        let (count, from) = specials.fold((0, 0), |(count, _), found| (count + 1, found.end()));
        // Special tokens in the text are those in the tokens, in the same order: one per image.
        let at = match count {
            0 => 0,
            _ => self.special_ends(prompt).nth(count - 1)?,
        };
        let between = self.encode_rendered(&text[from..same], mark).ok()?;
        Some(at + prompt.tokens[at..].iter().zip(&between).take_while(|(a, b)| a == b).count())
    }
}

/// Texts that share with a prompt what later prompts are likely to share.
fn likely<'a>(
    conversation: &'a Conversation<'_>,
    messages: &'a [Message],
) -> impl Iterator<Item = String> + 'a {
    let is_system = |message: &&Message| ["system", "developer"].contains(&&*message.role);
    let systems = messages.iter().take_while(is_system).count();
    let before = messages.len().saturating_sub(1);
    let (other, past) = (Message::user(OTHER), Message::assistant(OTHER));
    let with = |start: &[Message], end: &[Message]| [start, end].concat();
    let variants = [
        // Another first question.
        (with(&messages[..systems], std::slice::from_ref(&other)), true),
        // Another last message.
        (with(&messages[..before], std::slice::from_ref(&other)), true),
        (messages[..before].to_vec(), false),
        (messages.to_vec(), false),
        // The next turn.
        (with(messages, &[past, other]), true),
    ];
    // A template that rejects these messages gives no position.
    variants
        .into_iter()
        .filter_map(move |(messages, generation)| conversation.render(&messages, generation).ok())
        .map(|chat| chat.text)
}
