//! Answers of llama.cpp's server: parts of a stream, and the whole answers as their fold.

use std::sync::Arc;

use serde::{Serialize, Serializer, ser::SerializeSeq};
use serde_json::{Map, Value};

use crate::{
    apis::openai::{
        logprobs::ContentToken,
        usage::{AnswerTimings, PromptProgress},
    },
    requests::{
        ask::AskedReports,
        delta::{AnswerFinish, AnswerUsage, Delta},
        respond::{Encoder, Fold},
    },
};

/// Paths of the fields that an answer has, with slashes; all fields without a list.
type AnswerFields = Option<Arc<[String]>>;

/// Part of an answer, or the whole: they have the same form.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct NativeResult {
    completion: NativeCompletion,
    /// Fields of the end.
    fields: AnswerFields,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct NativeCompletion {
    index: usize,
    content: String,
    /// Tokens of the text, if they are asked for.
    tokens: Vec<u32>,
    /// Log-probabilities of the tokens of the text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    completion_probabilities: Vec<ContentToken>,
    /// Whether this is the end.
    stop: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
    /// In parts before the end, with every token.
    #[serde(rename = "timings", skip_serializing_if = "Option::is_none")]
    timings_so_far: Option<AnswerTimings>,
    #[serde(flatten)]
    end: Option<NativeEnd>,
}

/// End of an answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct NativeEnd {
    model: String,
    generation_settings: Map<String, Value>,
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

/// All answers to a request: one, or a list.
#[derive(Debug, Default)]
pub(super) struct NativeResults(Vec<NativeResult>);

/// Encoder of the answers to a request.
#[derive(Debug)]
pub(super) struct NativeEncoder {
    model: String,
    settings: Map<String, Value>,
    fields: AnswerFields,
    reports: AskedReports,
    /// Parts whose text follows, by choice.
    pending: Vec<NativeCompletion>,
}

impl Serialize for NativeResult {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(paths) = self.fields.as_ref().filter(|_| self.completion.stop) else {
            return self.completion.serialize(serializer);
        };
        let whole = serde_json::to_value(&self.completion).map_err(serde::ser::Error::custom)?;
        let field = |path: &String| {
            let mut keys = path.split('/');
            let value = keys.try_fold(&whole, |value, key| value.as_object()?.get(key))?;
            Some((path.clone(), value.clone()))
        };
        paths.iter().filter_map(field).collect::<Map<String, Value>>().serialize(serializer)
    }
}

impl Serialize for NativeResults {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let [one] = self.0.as_slice() {
            return one.serialize(serializer);
        }
        let mut list = serializer.serialize_seq(Some(self.0.len()))?;
        self.0.iter().try_for_each(|result| list.serialize_element(result))?;
        list.end()
    }
}

impl NativeEnd {
    fn new(encoder: &NativeEncoder, finish: AnswerFinish, usage: AnswerUsage) -> Self {
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
            model: encoder.model.clone(),
            generation_settings: encoder.settings.clone(),
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

impl NativeEncoder {
    /// Encoder of `count` answers of a model.
    pub(super) fn new(model: &str, count: usize, settings: Map<String, Value>) -> Self {
        let model = model.to_owned();
        let pending = vec![NativeCompletion::default(); count];
        Self { model, settings, fields: None, reports: AskedReports::default(), pending }
    }

    /// Encoder of answers whose ends have these fields only.
    pub(super) fn fields(self, paths: Option<Vec<String>>) -> Self {
        Self { fields: paths.map(Arc::from), ..self }
    }

    /// Encoder that reports as `reports`.
    pub(super) fn reports(self, reports: AskedReports) -> Self {
        Self { reports, ..self }
    }

    fn part(&mut self, index: usize, content: String, end: Option<NativeEnd>) -> Vec<NativeResult> {
        let pending = std::mem::take(&mut self.pending[index]);
        let stop = end.is_some();
        // The end has times in any case.
        let timings_so_far = pending.timings_so_far.filter(|_| !stop);
        let completion = NativeCompletion { index, content, stop, end, timings_so_far, ..pending };
        vec![NativeResult { completion, fields: self.fields.clone() }]
    }
}

impl Encoder for NativeEncoder {
    type Event = NativeResult;
    type Whole = NativeResults;

    fn on(&mut self, choice: usize, delta: Delta) -> Vec<NativeResult> {
        match delta {
            Delta::Text(content) => self.part(choice, content, None),
            Delta::End { finish, usage } => {
                let end = NativeEnd::new(self, finish, usage);
                self.part(choice, String::new(), Some(end))
            }
            Delta::Token(token) => {
                self.pending[choice].tokens.push(token);
                Vec::new()
            }
            Delta::Logprobs(entries) => {
                let entries = entries.into_iter().map(ContentToken::new);
                self.pending[choice].completion_probabilities.extend(entries);
                Vec::new()
            }
            Delta::Usage(usage) if usage.generated > 0 => {
                self.pending[choice].timings_so_far = self.reports.timings.then(|| usage.into());
                Vec::new()
            }
            Delta::Usage(usage) if self.reports.progress => {
                self.pending[choice].prompt_progress = Some(usage.into());
                self.part(choice, String::new(), None)
            }
            // Raw answers have text only.
            _ => Vec::new(),
        }
    }
}

impl Fold<NativeResult> for NativeResults {
    fn add(&mut self, part: NativeResult) {
        let NativeResult { completion: part, fields } = part;
        while self.0.len() <= part.index {
            let completion = NativeCompletion { index: self.0.len(), ..Default::default() };
            self.0.push(NativeResult { completion, fields: None });
        }
        let whole = &mut self.0[part.index];
        whole.fields = fields;
        let whole = &mut whole.completion;
        whole.content.push_str(&part.content);
        whole.tokens.extend(part.tokens);
        whole.completion_probabilities.extend(part.completion_probabilities);
        (whole.stop, whole.end) = (part.stop, part.end);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn deltas() -> [Delta; 6] {
        let usage = AnswerUsage { prompt: 7, cached: 3, generated: 2, ..AnswerUsage::default() };
        let stop = AnswerFinish::StopString("END".into());
        [
            Delta::Start(usage),
            Delta::Token(5),
            Delta::Text("a".into()),
            Delta::Token(6),
            Delta::Text("b".into()),
            Delta::End { finish: stop, usage },
        ]
    }

    fn encoder(count: usize) -> NativeEncoder {
        NativeEncoder::new("m", count, Map::from_iter([("n_ctx".to_owned(), json!(64))]))
    }

    fn fold(events: Vec<NativeResult>) -> Value {
        let mut whole = NativeResults::default();
        events.into_iter().for_each(|event| whole.add(event));
        json!(whole)
    }

    #[test]
    fn the_last_event_has_the_end() {
        let mut encoder = encoder(1);
        let events: Vec<NativeResult> =
            deltas().into_iter().flat_map(|delta| encoder.on(0, delta)).collect();
        let usage = AnswerUsage { prompt: 7, cached: 3, generated: 2, ..AnswerUsage::default() };
        let end = json!({
            "index": 0, "content": "", "tokens": [], "stop": true, "model": "m",
            "generation_settings": {"n_ctx": 64}, "stop_type": "word",
            "stopping_word": "END", "tokens_predicted": 2, "tokens_evaluated": 7,
            "tokens_cached": 3, "truncated": false, "timings": AnswerTimings::from(usage),
        });
        let part = |text: &str, token: u32| {
            let tokens = [token];
            json!({"index": 0, "content": text, "tokens": tokens, "stop": false})
        };
        let found: Vec<Value> = events.iter().map(|event| json!(event)).collect();
        assert_eq!(found, [part("a", 5), part("b", 6), end.clone()]);
        let mut expected = end;
        (expected["content"], expected["tokens"]) = (json!("ab"), json!([5, 6]));
        assert_eq!(fold(events), expected);
    }

    #[test]
    fn an_end_has_the_fields_that_are_asked_for() {
        let paths = ["content", "timings/prompt_n", "timings/x", "content/x", ""];
        let mut encoder = encoder(1).fields(Some(paths.map(str::to_owned).to_vec()));
        let events: Vec<NativeResult> =
            deltas().into_iter().flat_map(|delta| encoder.on(0, delta)).collect();
        assert_eq!(json!(events[0])["content"], "a");
        assert_eq!(fold(events), json!({"content": "ab", "timings/prompt_n": 4}));
    }

    #[test]
    fn several_answers_are_a_list() {
        let mut encoder = encoder(2);
        let deltas = [1, 0].into_iter().flat_map(|i| deltas().map(|delta| (i, delta)));
        let events = deltas.flat_map(|(choice, delta)| encoder.on(choice, delta)).collect();
        let whole = fold(events);
        let indices: Vec<&Value> =
            whole.as_array().unwrap().iter().map(|result| &result["index"]).collect();
        assert_eq!(indices, [&json!(0), &json!(1)]);
    }
}
