//! A request for a chat completion, checked.

use std::hash::{BuildHasher, Hasher, RandomState};

use moeflux::{GenerateRequest, Message, Sampling};
use serde_json::Value;

use crate::{
    error::ApiError,
    json::{Fields, wrong_type},
    messages,
};

/// Most stop strings of a request.
const MAX_STOPS: usize = 16;

/// Fields that would change the answer and are not supported, with the values that have no effect.
const UNSUPPORTED: [(&str, &[&str]); 6] = [
    ("n", &["1"]),
    ("logprobs", &["false"]),
    ("top_logprobs", &["0"]),
    ("logit_bias", &["{}", "[]"]),
    ("response_format", &[r#"{"type":"text"}"#]),
    ("audio", &[]),
];

/// A request for a chat completion.
#[derive(Debug)]
pub(crate) struct ChatAsk {
    pub(crate) messages: Vec<Message>,
    /// Sampling and limits.
    pub(crate) request: GenerateRequest,
    /// Whether the answer is a stream of events.
    pub(crate) stream: bool,
    /// Whether the stream ends with the usage.
    pub(crate) include_usage: bool,
}

impl ChatAsk {
    /// Reads a request. `recommended` is the sampling where the request has no value.
    ///
    /// # Errors
    /// A field has a wrong type or range, or is not supported.
    pub(crate) fn parse(body: &Value, recommended: &Sampling) -> Result<Self, ApiError> {
        let fields = Fields::of_body(body)?;
        refuse_unsupported(&fields)?;
        let max_tokens = [fields.count("max_tokens")?, fields.count("max_completion_tokens")?];
        let request = GenerateRequest::default()
            .sampling(sampling(&fields, recommended)?)
            .max_tokens(max_tokens.into_iter().flatten().min())
            .stop(stop(&fields)?);
        let include_usage = match fields.object("stream_options")? {
            Some(options) => options.flag("include_usage")?.unwrap_or(false),
            None => false,
        };
        Ok(Self {
            messages: messages::parse(&fields)?,
            request,
            stream: fields.flag("stream")?.unwrap_or(false),
            include_usage,
        })
    }
}

/// Refuses fields that would be dropped silently.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    for (name, neutral) in UNSUPPORTED {
        if fields.get(name).is_some_and(|value| !neutral.contains(&value.to_string().as_str())) {
            return Err(ApiError::invalid(
                name,
                format!("{name}: this value is not supported yet"),
            ));
        }
    }
    for (tools, choice) in [("tools", "tool_choice"), ("functions", "function_call")] {
        let has_tools = fields.list(tools)?.is_some_and(|list| !list.is_empty());
        let is_off = fields.get(choice).is_some_and(|choice| choice == "none");
        if has_tools && !is_off {
            return Err(messages::no_tools(tools));
        }
    }
    Ok(())
}

fn sampling(fields: &Fields<'_>, recommended: &Sampling) -> Result<Sampling, ApiError> {
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
        None => RandomState::new().build_hasher().finish(),
    };
    sampling.validate()?;
    Ok(sampling)
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let wrong = || wrong_type("stop", "a string or a list of strings");
    let stops = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(list)) => {
            let texts = list.iter().map(|stop| stop.as_str().map(str::to_owned));
            texts.collect::<Option<Vec<_>>>().ok_or_else(wrong)?
        }
        Some(_) => return Err(wrong()),
    };
    if stops.len() > MAX_STOPS {
        let message = format!("stop has {} strings: at most {MAX_STOPS} are allowed", stops.len());
        return Err(ApiError::invalid("stop", message));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::invalid("stop", "stop has an empty string"));
    }
    Ok(stops)
}
