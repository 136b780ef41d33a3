//! `POST /completion`: answers to texts in the form of llama.cpp's server.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};
use moeflux::GenerateRequest;
use serde::Serialize;

use crate::{
    answer::{AnswerFinish, AnswerUsage, Delta},
    app::App,
    ask::{self, Ask, AskPrompt, AskedReports},
    error::ApiError,
    form::AskedForm,
    ids,
    json::Fields,
    models::{ModelLease, ServedModel},
    openai::{
        chat::refuse_unsupported, completions::prompts, logprobs::ContentToken,
        usage::AnswerTimings,
    },
    respond::{self, Asked, Encoder, Fold},
};

/// Fields that would change the answer and are not supported, with the values that have no effect.
const UNSUPPORTED: [(&str, &[&str]); 1] = [("image_data", &["[]"])];

/// Seed that stands for a random one.
const RANDOM_SEED: i64 = -1;

/// Answers a request.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn completion(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = |model: &ModelLease, fields: &Fields<'_>| read(model, fields);
    respond::answer(&app, request, read).await
}

/// Reads a request.
fn read(model: &ServedModel, fields: &Fields<'_>) -> Result<Asked<NativeEncoder>, ApiError> {
    refuse_unsupported(fields, &UNSUPPORTED)?;
    let mut sampling = ask::sampling(fields, model.sampling()?)?;
    if fields.integer("seed")? == Some(RANDOM_SEED) {
        sampling.seed = ids::random_word();
    }
    // -1 is no limit but the context.
    let limit = fields.integer("n_predict")?.and_then(|limit| usize::try_from(limit).ok());
    let probabilities = ask::top_logprobs(fields, "n_probs")?.filter(|count| *count > 0);
    let request = GenerateRequest::default()
        .sampling(sampling)
        .logprobs(probabilities)
        .logit_bias(ask::logit_bias(fields, model.text()?.tokenizer().vocab_size())?)
        .max_tokens(limit)
        .stop(ask::stops(fields, "stop")?);
    let prompts = prompts(model, fields)?;
    if prompts.len() > 1 {
        let message = "prompt has several texts: /v1/completions answers them";
        return Err(ApiError::invalid("prompt", message));
    }
    let prompt = AskPrompt::Raw { prompts, echo: false, form: AskedForm::openai(fields)? };
    let ask =
        Ask { prompt, request, choices: 1, one_call: false, reports: AskedReports::default() };
    Ok(Asked::new(ask, NativeEncoder { model: model.name.clone(), probabilities: Vec::new() }))
}

/// Part of an answer, or the whole: they have the same form.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct NativeCompletion {
    index: usize,
    content: String,
    /// Log-probabilities of the tokens of the text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    completion_probabilities: Vec<ContentToken>,
    /// Whether this is the end.
    stop: bool,
    #[serde(flatten)]
    end: Option<NativeEnd>,
}

/// End of an answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct NativeEnd {
    model: String,
    stop_type: &'static str,
    stopping_word: String,
    tokens_predicted: usize,
    /// Tokens of the prompt.
    tokens_evaluated: usize,
    /// Tokens of the prompt that were not computed.
    tokens_cached: usize,
    truncated: bool,
    timings: AnswerTimings,
}

impl NativeEnd {
    fn new(model: &str, finish: AnswerFinish, usage: AnswerUsage) -> Self {
        let stop_type = match &finish {
            AnswerFinish::Stop | AnswerFinish::Calls | AnswerFinish::Cancelled => "eos",
            AnswerFinish::StopString(_) => "word",
            AnswerFinish::Length | AnswerFinish::Context => "limit",
        };
        let truncated = finish == AnswerFinish::Context;
        let stopping_word = match finish {
            AnswerFinish::StopString(stop) => stop,
            _ => String::new(),
        };
        Self {
            model: model.to_owned(),
            stop_type,
            stopping_word,
            tokens_predicted: usage.generated,
            tokens_evaluated: usage.prompt,
            tokens_cached: usage.cached,
            truncated,
            timings: usage.into(),
        }
    }
}

/// Encoder of one answer.
struct NativeEncoder {
    model: String,
    /// Log-probabilities for the next event.
    probabilities: Vec<ContentToken>,
}

impl NativeEncoder {
    fn part(&mut self, content: String, end: Option<NativeEnd>) -> Vec<NativeCompletion> {
        let completion_probabilities = std::mem::take(&mut self.probabilities);
        let stop = end.is_some();
        vec![NativeCompletion { index: 0, content, completion_probabilities, stop, end }]
    }
}

impl Encoder for NativeEncoder {
    type Event = NativeCompletion;
    type Whole = NativeCompletion;

    fn on(&mut self, _choice: usize, delta: Delta) -> Vec<NativeCompletion> {
        match delta {
            Delta::Text(content) => self.part(content, None),
            Delta::End { finish, usage } => {
                let end = NativeEnd::new(&self.model, finish, usage);
                self.part(String::new(), Some(end))
            }
            Delta::Logprobs(entries) => {
                self.probabilities.extend(entries.into_iter().map(ContentToken::new));
                Vec::new()
            }
            // Raw answers have text only.
            _ => Vec::new(),
        }
    }
}

impl Fold<NativeCompletion> for NativeCompletion {
    fn add(&mut self, part: NativeCompletion) {
        self.content.push_str(&part.content);
        self.completion_probabilities.extend(part.completion_probabilities);
        (self.stop, self.end) = (part.stop, part.end);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_last_event_has_the_end() {
        let usage = AnswerUsage { prompt: 7, cached: 3, generated: 2, ..AnswerUsage::default() };
        let stop = AnswerFinish::StopString("END".into());
        let deltas = [
            Delta::Start(usage),
            Delta::Text("a".into()),
            Delta::Text("b".into()),
            Delta::End { finish: stop, usage },
        ];
        let mut encoder = NativeEncoder { model: "m".into(), probabilities: Vec::new() };
        let events: Vec<NativeCompletion> =
            deltas.into_iter().flat_map(|delta| encoder.on(0, delta)).collect();
        let end = json!({
            "index": 0, "content": "", "stop": true, "model": "m", "stop_type": "word",
            "stopping_word": "END", "tokens_predicted": 2, "tokens_evaluated": 7,
            "tokens_cached": 3, "truncated": false, "timings": AnswerTimings::from(usage),
        });
        let part = |text: &str| json!({"index": 0, "content": text, "stop": false});
        let found: Vec<Value> = events.iter().map(|event| json!(event)).collect();
        assert_eq!(found, [part("a"), part("b"), end.clone()]);
        let mut whole = NativeCompletion::default();
        events.into_iter().for_each(|event| whole.add(event));
        let mut expected = end;
        expected["content"] = json!("ab");
        assert_eq!(json!(whole), expected);
    }
}
