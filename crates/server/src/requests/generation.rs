//! Fields that choose the tokens of an answer and its end, whatever the API.

use moeflux::{Error, GenerateRequest, Sampling, base::SamplingError, text::MAX_TOP_LOGPROBS};

use super::{
    models::ServedModel,
    token_ids::token_ids,
    unsupported::{self, SAMPLERS},
};
use crate::transport::{
    error::ApiError,
    ids,
    json::{Fields, Json, wrong_type},
};

/// Most stop strings of a request.
const MAX_STOPS: usize = 16;

/// Most strings of a list that are read: more than any list may have.
const MAX_LISTED: usize = 64;

/// Most tokens that end an answer, besides the model's own.
const MAX_STOP_TOKENS: usize = 128;

/// Most words that an answer may not have, and their most bytes.
const MAX_BAD_WORDS: usize = 128;
const MAX_BAD_WORD: usize = 256;

/// Most answers of a request. More than the waiting line has room for could never be served.
pub(crate) const MAX_CHOICES: usize = 64;

/// Value of a limit or a count for none.
const NO_LIMIT: i64 = -1;

/// The same in Ollama's API and llama.cpp's server: until the context is full.
const FILL_CONTEXT: i64 = -2;

/// Names of limits that [`FILL_CONTEXT`] turns off.
const FILLING: [&str; 2] = ["n_predict", "num_predict"];

/// Values of `repeat_last_n` that ask for nothing else: the whole context, and the default.
const USUAL_WINDOWS: [i64; 2] = [-1, 64];

/// Both names of a penalty. The second one wins.
const REPETITION_PENALTY: &str = "repetition_penalty";
const REPEAT_PENALTY: &str = "repeat_penalty";

/// Bias of a token that is forbidden.
const FORBIDDEN: f32 = -100.0;

/// Seed by which clients of llama.cpp's server and Ollama ask for a random one, and the same in 32
/// bits.
const RANDOM_SEEDS: [i128; 2] = [-1, u32::MAX as i128];

/// Meaning of fields that differs between servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldStyle {
    /// The seed -1 is one like all others; biases are those of token ids.
    OpenAi,
    /// llama.cpp's server and Ollama: the seed -1 is a random one; a bias may be that of a text.
    LlamaCpp,
}

/// A request with the fields that choose its tokens: sampling, bias, the end of the answer. The
/// fields `limits` are its most tokens. The rest are its defaults.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
pub(crate) fn request(
    model: &ServedModel,
    fields: &Fields<'_>,
    style: FieldStyle,
    limits: &[&str],
) -> Result<GenerateRequest, ApiError> {
    let max_tokens = max_tokens(fields, limits)?;
    let min_tokens = fields.count("min_tokens")?.unwrap_or(0);
    if min_tokens > max_tokens.unwrap_or(usize::MAX).min(model.context()) {
        let most = max_tokens.map_or_else(|| "the context".to_owned(), |most| most.to_string());
        let path = fields.path("min_tokens");
        let message = format!("{path} is {min_tokens}: the answer has at most {most} tokens");
        return Err(ApiError::invalid(path, message));
    }
    let include_stop = fields.flag("include_stop_str_in_output")?;
    let request = GenerateRequest::default()
        .sampling(sampling(fields, model.sampling()?, style)?)
        .logit_bias(logit_bias(model, fields, style)?)
        .stop(stops(fields, "stop")?)
        .include_stop(include_stop.or(fields.flag("no_stop_trim")?).unwrap_or(false))
        .end_tokens(stop_token_ids(model, fields)?)
        .ignore_eos(fields.flag("ignore_eos")?.unwrap_or(false))
        .bad_words(bad_words(model, fields)?)
        .min_tokens(min_tokens)
        .max_tokens(max_tokens);
    Ok(request)
}

/// Tokens that end the answer besides the model's own: the field `stop_token_ids`.
///
/// # Errors
/// It is no list of tokens of the vocabulary, or has too many.
fn stop_token_ids(model: &ServedModel, fields: &Fields<'_>) -> Result<Vec<u32>, ApiError> {
    const NAME: &str = "stop_token_ids";
    let Some(list) = fields.list(NAME)? else { return Ok(Vec::new()) };
    let path = fields.path(NAME);
    if list.iter().nth(MAX_STOP_TOKENS).is_some() {
        return Err(wrong_type(&path, &format!("a list of at most {MAX_STOP_TOKENS} token ids")));
    }
    token_ids(model, list, &path)
}

/// Tokens of words that the answer may not have: the field `bad_words`.
///
/// # Errors
/// It is no list of strings, or has too many or too long ones.
fn bad_words(model: &ServedModel, fields: &Fields<'_>) -> Result<Vec<Vec<u32>>, ApiError> {
    const NAME: &str = "bad_words";
    let Some(list) = fields.list(NAME)? else { return Ok(Vec::new()) };
    let expected =
        format!("a list of at most {MAX_BAD_WORDS} strings of up to {MAX_BAD_WORD} bytes");
    let wrong = || wrong_type(&fields.path(NAME), &expected);
    let mut words = Vec::new();
    for (i, word) in list.iter().enumerate() {
        let word = word.as_str().filter(|word| i < MAX_BAD_WORDS && word.len() <= MAX_BAD_WORD);
        let word = word.ok_or_else(wrong)?;
        if !word.is_empty() {
            words.extend(model.text()?.word_tokens(&word)?);
        }
    }
    Ok(words)
}

/// Most tokens of an answer: the least of the fields `names`; -1 is no limit but the context.
///
/// # Errors
/// A field is no whole number, or is below 0.
pub(crate) fn max_tokens(fields: &Fields<'_>, names: &[&str]) -> Result<Option<usize>, ApiError> {
    let mut least = None;
    for name in names {
        let limit = match fields.integer(name)? {
            None | Some(NO_LIMIT) => continue,
            Some(FILL_CONTEXT) if FILLING.contains(name) => continue,
            Some(limit) => limit,
        };
        let expected = "at least 0, or -1 for no limit but the context";
        let limit = usize::try_from(limit);
        let limit = limit.map_err(|_| wrong_type(&fields.path(name), expected))?;
        least = Some(least.map_or(limit, |least: usize| least.min(limit)));
    }
    Ok(least)
}

/// Sampling of a request. `recommended` is that of fields without a value.
///
/// # Errors
/// A field has a wrong type or range, or is not supported.
fn sampling(
    fields: &Fields<'_>,
    recommended: &Sampling,
    style: FieldStyle,
) -> Result<Sampling, ApiError> {
    unsupported::refuse(fields, &[&SAMPLERS])?;
    let mut sampling = recommended.clone();
    let numbers = [
        ("temperature", &mut sampling.temperature),
        ("top_p", &mut sampling.top_p),
        ("min_p", &mut sampling.min_p),
        ("presence_penalty", &mut sampling.presence_penalty),
        ("frequency_penalty", &mut sampling.frequency_penalty),
        (REPETITION_PENALTY, &mut sampling.repetition_penalty),
    ];
    for (name, target) in numbers {
        if let Some(number) = fields.number(name)? {
            *target = number;
        }
    }
    if let Some(penalty) = fields.number(REPEAT_PENALTY)? {
        sampling.repetition_penalty = penalty;
    }
    if let Some(top_k) = fields.integer("top_k")? {
        // Clients turn the filter off by 0 or -1.
        let top_k = if top_k == NO_LIMIT { 0 } else { top_k };
        let expected = "at least 0; 0 and -1 are off";
        let top_k = usize::try_from(top_k);
        sampling.top_k = top_k.map_err(|_| wrong_type(&fields.path("top_k"), expected))?;
    }
    if let Some(samplers) = fields.get("samplers") {
        keep_samplers(&mut sampling, samplers)
            .ok_or_else(|| wrong_type(&fields.path("samplers"), "a list of names, or a string"))?;
    }
    check_penalties(fields, &mut sampling)?;
    sampling.seed = seed(fields, style)?;
    match sampling.validate() {
        Err(Error::Sampling(SamplingError::Parameter { name, value, rule })) => {
            let is_other = name == REPETITION_PENALTY && fields.get(REPEAT_PENALTY).is_some();
            let path = fields.path(if is_other { REPEAT_PENALTY } else { name });
            Err(ApiError::invalid(path.clone(), format!("{path} is {value}: it {rule}")))
        }
        validated => Ok(validated.map(|()| sampling)?),
    }
}

/// Turns off the filters that the field `samplers` of llama.cpp's server does not name. `None` if
/// it is neither a list of names nor a string of letters.
fn keep_samplers(sampling: &mut Sampling, samplers: Json<'_>) -> Option<()> {
    let names: Vec<String> = match samplers.as_list() {
        Some(list) => {
            let names = list.iter().take(MAX_LISTED).map(|name| Some(name.as_str()?.into_owned()));
            names.collect::<Option<_>>()?
        }
        None => samplers.as_str()?.chars().map(String::from).collect(),
    };
    let has = |name: &str, letter: &str| names.iter().any(|n| n == name || n == letter);
    let off = Sampling::default();
    if !has("top_k", "k") {
        sampling.top_k = off.top_k;
    }
    if !has("top_p", "p") {
        sampling.top_p = off.top_p;
    }
    if !has("min_p", "m") {
        sampling.min_p = off.min_p;
    }
    if !has("temperature", "t") {
        sampling.temperature = off.temperature;
    }
    if !has("penalties", "e") {
        turn_penalties_off(sampling);
    }
    Some(())
}

fn turn_penalties_off(sampling: &mut Sampling) {
    let off = Sampling::default();
    sampling.repetition_penalty = off.repetition_penalty;
    sampling.presence_penalty = off.presence_penalty;
    sampling.frequency_penalty = off.frequency_penalty;
}

/// Applies the fields that say which tokens penalties see.
///
/// # Errors
/// A field has a wrong type, or penalties are on and shall see other tokens than they do.
fn check_penalties(fields: &Fields<'_>, sampling: &mut Sampling) -> Result<(), ApiError> {
    let window = fields.integer("repeat_last_n")?;
    if window == Some(0) {
        turn_penalties_off(sampling);
    }
    let off = Sampling::default();
    let has_penalties = sampling.repetition_penalty != off.repetition_penalty
        || sampling.presence_penalty != off.presence_penalty
        || sampling.frequency_penalty != off.frequency_penalty;
    if has_penalties && window.is_some_and(|window| !USUAL_WINDOWS.contains(&window)) {
        let path = fields.path("repeat_last_n");
        let message =
            format!("{path}: penalties see all tokens: leave it out, or send -1; 0 turns them off");
        return Err(ApiError::invalid(path, message));
    }
    for name in ["penalize_nl", "penalize_newline"] {
        if fields.flag(name)? == Some(false) && has_penalties {
            let path = fields.path(name);
            let message =
                format!("{path}: penalties see line ends too: leave it out, or send true");
            return Err(ApiError::invalid(path, message));
        }
    }
    Ok(())
}

/// The field `seed`: a whole number from -2^63 to 2^64-1; a random one if it is absent.
///
/// # Errors
/// It is no such number.
fn seed(fields: &Fields<'_>, style: FieldStyle) -> Result<u64, ApiError> {
    let Some(value) = fields.get("seed") else { return Ok(ids::random_word()) };
    let wrong = || wrong_type(&fields.path("seed"), "an integer from -2^63 to 2^64-1");
    let seed = value.as_integer().ok_or_else(wrong)?;
    if style == FieldStyle::LlamaCpp && RANDOM_SEEDS.contains(&seed) {
        return Ok(ids::random_word());
    }
    let negative = || i64::try_from(seed).map(i64::cast_unsigned);
    u64::try_from(seed).or_else(|_| negative()).map_err(|_| wrong())
}

/// Stop strings in the field `name`: a string or a list. Empty ones are none.
///
/// # Errors
/// The field has a wrong type, or the strings are too many.
pub(crate) fn stops(fields: &Fields<'_>, name: &str) -> Result<Vec<String>, ApiError> {
    let path = fields.path(name);
    let Some(value) = fields.get(name) else { return Ok(Vec::new()) };
    let stops = match value.as_list() {
        Some(list) => {
            list.iter().take(MAX_LISTED).map(|stop| Some(stop.as_str()?.into_owned())).collect()
        }
        None => value.as_str().map(|stop| vec![stop.into_owned()]),
    };
    let stops: Option<Vec<String>> = stops;
    let mut stops = stops.ok_or_else(|| wrong_type(&path, "a string or a list of strings"))?;
    stops.retain(|stop| !stop.is_empty());
    if stops.len() > MAX_STOPS {
        let count = stops.len();
        let message = format!("{path} has {count} strings: at most {MAX_STOPS} are allowed");
        return Err(ApiError::invalid(path, message));
    }
    Ok(stops)
}

/// Answers to each prompt: the first of the fields `names` that has a value.
///
/// # Errors
/// It is not a number from 1 to the limit.
pub(crate) fn choices(fields: &Fields<'_>, names: &[&str]) -> Result<usize, ApiError> {
    for name in names {
        let Some(choices) = fields.count(name)? else { continue };
        if !(1..=MAX_CHOICES).contains(&choices) {
            let message = format!("{name} is {choices}: it must be from 1 to {MAX_CHOICES}");
            return Err(ApiError::invalid(*name, message));
        }
        return Ok(choices);
    }
    Ok(1)
}

/// Biases of tokens: an object from ids to numbers, or a list of pairs. In the style of llama.cpp's
/// server a text may stand in place of an id: all of its tokens get the bias. In place of a number
/// `false` forbids them.
///
/// # Errors
/// An id is not in the vocabulary, or a bias is not from -100 to 100.
fn logit_bias(
    model: &ServedModel,
    fields: &Fields<'_>,
    style: FieldStyle,
) -> Result<Vec<(u32, f32)>, ApiError> {
    let tokenizer = model.text()?.tokenizer();
    let vocab = tokenizer.vocab_size();
    let path = fields.path("logit_bias");
    let takes_texts = style == FieldStyle::LlamaCpp;
    let wrong = || {
        let texts = if takes_texts { ", or texts," } else { "" };
        let expected = format!("token ids below {vocab}{texts} with biases from -100 to 100");
        wrong_type(&path, &expected)
    };
    let Some(value) = fields.get("logit_bias") else { return Ok(Vec::new()) };
    let known = |id: i128| {
        let id = u32::try_from(id).ok()?;
        usize::try_from(id).is_ok_and(|id| id < vocab).then_some(vec![id])
    };
    let spelled = |text: &str| match takes_texts {
        true => Ok(tokenizer.encode(text, false)?),
        false => Err(wrong()),
    };
    let mut biases = Vec::new();
    let mut add = |tokens: Vec<u32>, value: Json<'_>| {
        let number = value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        let is_forbidden = takes_texts && value.as_bool() == Some(false);
        let forbidden = is_forbidden.then_some(FORBIDDEN);
        let bias = number.map(|bias| bias as f32).or(forbidden).ok_or_else(wrong)?;
        biases.extend(tokens.into_iter().map(|token| (token, bias)));
        // Each token once at most.
        if biases.len() > vocab { Err(wrong()) } else { Ok(()) }
    };
    if let Some(members) = value.members() {
        for member in members {
            let tokens = match member.name.parse() {
                Ok(id) => known(id).ok_or_else(wrong)?,
                Err(_) => spelled(&member.name)?,
            };
            add(tokens, member.value)?;
        }
        return Ok(biases);
    }
    for pair in value.as_list().ok_or_else(wrong)?.iter() {
        let pair: Vec<Json<'_>> = pair.as_list().ok_or_else(wrong)?.iter().take(3).collect();
        let &[key, bias] = pair.as_slice() else { return Err(wrong()) };
        let tokens = match key.as_str() {
            Some(text) => spelled(&text)?,
            None => key.as_integer().and_then(known).ok_or_else(wrong)?,
        };
        add(tokens, bias)?;
    }
    Ok(biases)
}

/// Number of the most probable tokens in the field `name`.
///
/// # Errors
/// It is not a number up to the limit.
pub(crate) fn top_logprobs(fields: &Fields<'_>, name: &str) -> Result<Option<usize>, ApiError> {
    let count = fields.count(name)?;
    match count.is_some_and(|count| count > MAX_TOP_LOGPROBS) {
        true => Err(wrong_type(&fields.path(name), &format!("from 0 to {MAX_TOP_LOGPROBS}"))),
        false => Ok(count),
    }
}

/// Number of the most probable tokens that come with each token, if log-probabilities are asked
/// for: by `logprobs` and `top_logprobs`, or by `n_probs` of llama.cpp's server.
///
/// # Errors
/// A field has a wrong type or range, or `logprobs` is missing.
pub(crate) fn logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let top = top_logprobs(fields, "top_logprobs")?.unwrap_or(0);
    let native = top_logprobs(fields, "n_probs")?.filter(|count| *count > 0);
    match fields.flag("logprobs")?.unwrap_or(false) {
        true => Ok(Some(top.max(native.unwrap_or(0)))),
        false if top > 0 => Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs")),
        false => Ok(native),
    }
}
