//! Tokens of a request, as OpenAI's API reports them.

use serde::Serialize;

use moeflux::session::DraftTotals;

use crate::requests::delta::AnswerUsage;

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
    /// Drafted tokens that were right.
    #[serde(skip_serializing_if = "Option::is_none")]
    accepted_prediction_tokens: Option<u64>,
    /// Drafted tokens that were wrong. They are not tokens of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    rejected_prediction_tokens: Option<u64>,
}

/// Tokens and times of an answer, as llama.cpp's server reports them. A rate is 0 without a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct AnswerTimings {
    cache_n: usize,
    prompt_n: usize,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    predicted_n: usize,
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
    /// Drafted tokens that were checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_n: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_n_accepted: Option<u64>,
}

impl From<AnswerUsage> for AnswerTimings {
    fn from(usage: AnswerUsage) -> Self {
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        let prompt_n = usage.prompt - usage.cached;
        let drafts = Some(usage.drafts).filter(|drafts| drafts.drafted > 0);
        // The first token costs no step.
        let (computed, steps) = (prompt_n as f64, usage.generated.saturating_sub(1) as f64);
        let [prefill, decode] = [usage.prefill, usage.decode].map(|time| time.as_secs_f64());
        Self {
            cache_n: usage.cached,
            prompt_n,
            prompt_ms: prefill * 1e3,
            prompt_per_token_ms: ratio(prefill * 1e3, computed),
            prompt_per_second: ratio(computed, prefill),
            predicted_n: usage.generated,
            predicted_ms: decode * 1e3,
            predicted_per_token_ms: ratio(decode * 1e3, steps),
            predicted_per_second: ratio(steps, decode),
            draft_n: drafts.map(|drafts| drafts.drafted),
            draft_n_accepted: drafts.map(|drafts| drafts.accepted),
        }
    }
}

/// Progress of a prompt, as llama.cpp's server reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PromptProgress {
    total: usize,
    cache: usize,
    /// Tokens that are in the session.
    processed: usize,
    time_ms: u128,
}

impl From<AnswerUsage> for PromptProgress {
    fn from(usage: AnswerUsage) -> Self {
        let (total, cache, processed) = (usage.prompt, usage.cached, usage.prefilled);
        Self { total, cache, processed, time_ms: usage.prefill.as_millis() }
    }
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
        let completion = &mut self.usage.completion_tokens_details;
        completion.reasoning_tokens += usage.reasoning;
        let DraftTotals { drafted, accepted, .. } = usage.drafts;
        if drafted > 0 {
            *completion.accepted_prediction_tokens.get_or_insert(0) += accepted;
            *completion.rejected_prediction_tokens.get_or_insert(0) += drafted - accepted;
        }
        self.usage.total_tokens = self.usage.prompt_tokens + self.usage.completion_tokens;
        self.choices_left -= 1;
        (self.choices_left == 0).then_some(self.usage)
    }
}
