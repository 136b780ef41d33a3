//! From the prompts of a request to its answers: each is submitted to the serving core.

use moeflux::{GenerateRequest, text::AnswerText};
use tokio::sync::mpsc;

use super::{
    answer::{AnswerDeltas, AnswerSource, ChannelSink, RawText, UNREAD},
    answers::{Accepted, Answers},
    ask::{Ask, AskPrompt},
    latency::AnswerTimer,
    models::ServedModel,
    prompt::Prompt,
    turns::TurnRecorder,
};
use crate::transport::error::ApiError;

/// Submits the prompts of a request to a model, each for all of its choices.
///
/// # Errors
/// The waiting line is full, or the server stops.
pub(crate) fn submit(
    model: &ServedModel,
    ask: &Ask,
    prompts: Vec<Prompt>,
) -> Result<Answers, ApiError> {
    let dropped_messages = prompts.iter().map(|prompt| prompt.dropped_messages).sum();
    model.options.counters.add_dropped(dropped_messages);
    let mut choices = Vec::new();
    for prompt in prompts {
        for choice in 0..ask.choices {
            let mut request = ask.request.clone();
            request.sampling.seed = request.sampling.seed.wrapping_add(choice as u64);
            choices.push(Some(accept(model, ask, prompt.clone(), request)?));
        }
    }
    Ok(Answers::new(choices, dropped_messages))
}

fn accept(
    model: &ServedModel,
    ask: &Ask,
    prompt: Prompt,
    mut request: GenerateRequest,
) -> Result<Accepted, ApiError> {
    let text = model.text()?;
    let Prompt { tokens, images, ends, echo, turn, masks, .. } = prompt;
    let mut calls_only = false;
    let source = match &ask.prompt {
        AskPrompt::Conversation(conversation) => {
            calls_only = conversation.required.is_some();
            let tools = conversation.callable();
            let parser = text.parser(&tokens, tools)?;
            // The core needs them to find the step with which a stop string ends the answer.
            if !request.stop.is_empty() {
                request.tools = tools.clone();
            }
            AnswerSource::Parsed(Box::new(AnswerText::new(parser, request.stop_strings()?)))
        }
        AskPrompt::Raw { lines, .. } => {
            let stops = request.stop_strings()?;
            AnswerSource::Raw(Box::new(RawText::new(text.decoder(), stops, *lines)))
        }
    };
    let recorder = turn.map(|start| TurnRecorder::new(&model.turns, start));
    let timer = AnswerTimer::start(&model.options.latencies);
    let deltas = AnswerDeltas::new(source, text, tokens.len(), timer);
    let deltas = deltas.end_tokens(request.all_end_tokens(text.end()));
    let deltas = deltas.one_call(ask.one_call).calls_only(calls_only);
    let deltas = deltas.echo(echo).recorder(recorder);
    let deltas = deltas.reports(ask.reports);
    request.masks.extend(masks.into_iter().chain(model.options.masks.iter().cloned()));
    let (sink, events) = mpsc::channel(UNREAD);
    let request = request.ends(ends).images(images);
    let handle = model.core.submit(tokens, request, Box::new(ChannelSink(sink)))?;
    Ok(Accepted::new(events, deltas, handle))
}
