//! Completions: chunks of a stream, and the whole answer as their fold.

use serde::Serialize;

use super::{
    chat_encoder::finish_reason,
    logprobs::TextLogprobs,
    usage::{AnswerTimings, TokenUsage, UsageSum},
};
use crate::requests::{
    answer_head::AnswerHead,
    delta::{Delta, TokenEntry},
    respond::{Encoder, Fold},
};

/// Part of an answer, or the whole: they have the same form.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct TextCompletion {
    object: &'static str,
    #[serde(flatten)]
    head: AnswerHead,
    choices: Vec<TextChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<TokenUsage>>,
    /// In the last part of each answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<AnswerTimings>,
    /// Text of the first whole answer, under the name that clients of llama.cpp's server read.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize)]
struct TextChoice {
    index: usize,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
}

/// Encoder of the answers to a request.
#[derive(Clone, Debug)]
pub(crate) struct CompletionEncoder {
    head: AnswerHead,
    include_usage: bool,
    sum: UsageSum,
    pending: Vec<PendingTokens>,
}

/// Tokens of a choice whose text follows.
#[derive(Clone, Debug, Default)]
struct PendingTokens {
    entries: Vec<TokenEntry>,
    /// Characters of the tokens before them.
    offset: usize,
}

impl CompletionEncoder {
    /// Encoder of `choices` answers to each of `prompts` prompts.
    pub(crate) fn new(
        head: AnswerHead,
        prompts: usize,
        choices: usize,
        include_usage: bool,
    ) -> Self {
        let pending = vec![PendingTokens::default(); prompts * choices];
        Self { head, include_usage, sum: UsageSum::new(prompts, choices), pending }
    }

    fn part(
        &mut self,
        index: usize,
        text: String,
        finish_reason: Option<&'static str>,
    ) -> TextCompletion {
        let PendingTokens { entries, offset } = &mut self.pending[index];
        let logprobs = TextLogprobs::new(std::mem::take(entries), offset);
        TextCompletion {
            object: "text_completion",
            head: self.head.clone(),
            choices: vec![TextChoice { index, text, logprobs, finish_reason }],
            usage: self.include_usage.then_some(None),
            timings: None,
            content: None,
        }
    }
}

impl Encoder for CompletionEncoder {
    type Event = TextCompletion;
    type Whole = TextCompletion;

    const END: &'static str = "data: [DONE]\n\n";

    fn on(&mut self, choice: usize, delta: Delta) -> Vec<TextCompletion> {
        match delta {
            Delta::Text(text) => vec![self.part(choice, text, None)],
            Delta::Logprobs(entries) => {
                self.pending[choice].entries.extend(entries);
                Vec::new()
            }
            Delta::End { finish, usage } => {
                let end = self.part(choice, String::new(), Some(finish_reason(&finish)));
                let end = TextCompletion { timings: Some(usage.into()), ..end };
                let sum = self.sum.add(choice, usage).filter(|_| self.include_usage);
                let usage = sum.map(|sum| TextCompletion {
                    choices: Vec::new(),
                    usage: Some(Some(sum)),
                    ..end.clone()
                });
                [Some(end), usage].into_iter().flatten().collect()
            }
            // Raw answers have text only.
            _ => Vec::new(),
        }
    }
}

impl Fold<TextCompletion> for TextCompletion {
    fn add(&mut self, part: TextCompletion) {
        (self.object, self.head) = (part.object, part.head);
        for choice in part.choices {
            while self.choices.len() <= choice.index {
                let index = self.choices.len();
                self.choices.push(TextChoice { index, ..TextChoice::default() });
            }
            if choice.index == 0 {
                self.content.get_or_insert_default().push_str(&choice.text);
            }
            let whole = &mut self.choices[choice.index];
            whole.text.push_str(&choice.text);
            TextLogprobs::add(&mut whole.logprobs, choice.logprobs);
            whole.finish_reason = choice.finish_reason.or(whole.finish_reason);
        }
        self.usage = part.usage.or(self.usage);
        self.timings = part.timings.or(self.timings);
    }
}
