//! A loaded model with the state of its answers.

use std::{path::PathBuf, sync::Arc};

use moeflux::{
    GenerateRequest, Sampling,
    serve::ServingCore,
    text::{AnswerText, MaskSource, Text},
};
use tokio::sync::mpsc;

use super::models::LoadedModel;
use crate::{
    answer::{AnswerDeltas, AnswerSource, ChannelSink, RawText, UNREAD},
    answers::{Accepted, Answers},
    app::now,
    ask::{Ask, AskPrompt},
    error::ApiError,
    form::FormRules,
    ids,
    latency::{AnswerTimer, Latencies},
    metrics::RequestCounters,
    openai::chat_encoder::AnswerHead,
    overflow::Overflow,
    prompt::Prompt,
    server::ServerError,
    turn_folder::TurnFolder,
    turns::{TurnMemory, TurnRecorder},
    work::is_cancelled,
};

/// State of the server that answers of all models share.
#[derive(Clone, Default)]
pub(crate) struct AnswerOptions {
    /// Masks of all answers.
    pub(crate) masks: Vec<Arc<dyn MaskSource>>,
    /// Rule for a prompt over the context, unless its request says it.
    pub(crate) overflow: Overflow,
    /// Rules of schemas.
    pub(crate) forms: FormRules,
    pub(crate) latencies: Arc<Latencies>,
    pub(crate) counters: Arc<RequestCounters>,
}

/// A model that answers.
pub(crate) struct ServedModel {
    pub(crate) core: ServingCore,
    /// Its name in answers.
    pub(crate) name: String,
    /// Sampling of requests that do not say theirs, in place of the checkpoint's.
    sampling: Option<Sampling>,
    /// Answers for the next turns.
    pub(crate) turns: Arc<TurnMemory>,
    /// Speed of the disk as it was measured, in bytes per second.
    pub(crate) disk_speed: Option<f64>,
    pub(crate) options: AnswerOptions,
}

impl ServedModel {
    /// The model with the state of its answers.
    ///
    /// # Errors
    /// It has no tokenizer, or its folder of answers cannot be opened.
    pub(super) fn new(
        name: &str,
        loaded: LoadedModel,
        options: AnswerOptions,
    ) -> Result<Self, ServerError> {
        let LoadedModel { core, sampling, turn_folder, turn_bytes, disk_speed, notices } = loaded;
        core.engine().text()?.tokenizer().cancel_when(is_cancelled);
        let open = |path: PathBuf| {
            let failed = |source| ServerError::TurnFolder { path: path.clone(), source };
            TurnFolder::open(path.clone(), turn_bytes, notices).map_err(failed)
        };
        let turn_folder = turn_folder.map(open).transpose()?;
        // Without a folder, all turns are of this model.
        let model = match &turn_folder {
            Some(_) => core.engine().model()?.to_string(),
            None => String::new(),
        };
        let turns = Arc::new(TurnMemory::new(model, turn_folder));
        Ok(Self { core, name: name.to_owned(), sampling, turns, disk_speed, options })
    }

    /// Tokenizer, template and dialect.
    ///
    /// # Errors
    /// A file of the checkpoint is wrong.
    pub(crate) fn text(&self) -> Result<&Text, ApiError> {
        Ok(self.core.engine().text()?)
    }

    /// Sampling of requests that do not say theirs.
    ///
    /// # Errors
    /// The checkpoint's settings of generation are wrong.
    pub(crate) fn sampling(&self) -> Result<&Sampling, ApiError> {
        match &self.sampling {
            Some(sampling) => Ok(sampling),
            None => Ok(&self.text()?.generation()?.sampling),
        }
    }

    /// Tokens of a prompt and its answer.
    pub(crate) fn context(&self) -> usize {
        self.core.engine().plan().context
    }

    /// Fields that all parts of an answer share. `prefix` starts its id.
    pub(crate) fn head(&self, prefix: &str) -> AnswerHead {
        let (id, created, model) = (ids::random_id(prefix), now(), self.name.clone());
        AnswerHead { id, created, model, ..AnswerHead::default() }
    }

    /// Submits the prompts of a request, each for all of its choices.
    ///
    /// # Errors
    /// The waiting line is full, or the server stops.
    pub(crate) fn submit(&self, ask: &Ask, prompts: Vec<Prompt>) -> Result<Answers, ApiError> {
        let dropped_messages = prompts.iter().map(|prompt| prompt.dropped_messages).sum();
        self.options.counters.add_dropped(dropped_messages);
        let mut choices = Vec::new();
        for prompt in prompts {
            for choice in 0..ask.choices {
                let mut request = ask.request.clone();
                request.sampling.seed = request.sampling.seed.wrapping_add(choice as u64);
                choices.push(Some(self.accept(ask, prompt.clone(), request)?));
            }
        }
        Ok(Answers::new(choices, dropped_messages))
    }

    fn accept(
        &self,
        ask: &Ask,
        prompt: Prompt,
        mut request: GenerateRequest,
    ) -> Result<Accepted, ApiError> {
        let text = self.text()?;
        let Prompt { tokens, ends, echo, turn, masks, .. } = prompt;
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
        let recorder = turn.map(|start| TurnRecorder::new(&self.turns, start));
        let timer = AnswerTimer::start(&self.options.latencies);
        let deltas = AnswerDeltas::new(source, text, tokens.len(), timer);
        let deltas = deltas.end_tokens(request.all_end_tokens(text.end()));
        let deltas = deltas.one_call(ask.one_call).calls_only(calls_only);
        let deltas = deltas.echo(echo).recorder(recorder);
        let deltas = deltas.reports(ask.reports);
        request.masks.extend(masks.into_iter().chain(self.options.masks.iter().cloned()));
        let (sink, events) = mpsc::channel(UNREAD);
        let handle = self.core.submit(tokens, request.ends(ends), Box::new(ChannelSink(sink)))?;
        Ok(Accepted::new(events, deltas, handle))
    }
}
