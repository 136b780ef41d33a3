//! Tokens of a request, as OpenAI's API reports them.

use serde::Serialize;

use crate::answer::AnswerUsage;

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct TokenUsage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokens,
    completion_tokens_details: CompletionTokens,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct PromptTokens {
    /// Tokens that were not computed.
    cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct CompletionTokens {
    reasoning_tokens: usize,
}

/// Usage of all choices of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UsageSum {
    /// Choices of each prompt. They share its tokens.
    per_prompt: usize,
    choices_left: usize,
    usage: TokenUsage,
}

impl UsageSum {
    /// No tokens yet of `prompts` prompts with `per_prompt` choices each.
    pub(crate) fn new(prompts: usize, per_prompt: usize) -> Self {
        let choices_left = prompts * per_prompt;
        Self { per_prompt, choices_left, usage: TokenUsage::default() }
    }

    /// Adds a choice. Returns the sum if it was the last one.
    pub(crate) fn add(&mut self, choice: usize, usage: AnswerUsage) -> Option<TokenUsage> {
        if choice.is_multiple_of(self.per_prompt) {
            self.usage.prompt_tokens += usage.prompt;
            self.usage.prompt_tokens_details.cached_tokens += usage.cached;
        }
        self.usage.completion_tokens += usage.generated;
        self.usage.completion_tokens_details.reasoning_tokens += usage.reasoning;
        self.usage.total_tokens = self.usage.prompt_tokens + self.usage.completion_tokens;
        self.choices_left -= 1;
        (self.choices_left == 0).then_some(self.usage)
    }
}
