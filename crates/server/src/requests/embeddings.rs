//! Embeddings of texts: hidden states after the final norm, pooled and normalised.

use moeflux::{
    GenerateRequest,
    serve::{Pooling, RequestEvent},
};
use tokio::sync::mpsc;

use super::{
    answer::{ChannelSink, UNREAD},
    models::ServedModel,
    token_ids::token_ids,
    unsupported::{self, EMBEDDINGS},
};
use crate::transport::{
    error::ApiError,
    json::{Fields, Json, wrong_type},
};

/// Most texts of a request.
const MAX_INPUTS: usize = 2048;

/// Texts of a request, as tokens.
#[derive(Debug)]
pub(crate) struct EmbeddingAsk {
    inputs: Vec<Vec<u32>>,
    pooling: Pooling,
}

/// Embeddings of the texts of a request, in their order.
#[derive(Debug)]
pub(crate) struct Embeddings {
    pub(crate) vectors: Vec<Vec<f32>>,
    /// Tokens of the texts.
    pub(crate) tokens: usize,
}

impl EmbeddingAsk {
    /// Reads the texts in the field `name`, and how they are pooled. Texts that are too long are
    /// errors, or cut if `truncates` is set.
    ///
    /// # Errors
    /// A field is absent or has a wrong type, or a text is empty or too long.
    pub(crate) fn parse(
        model: &ServedModel,
        fields: &Fields<'_>,
        name: &str,
        truncates: bool,
    ) -> Result<Self, ApiError> {
        unsupported::refuse(fields, &[&EMBEDDINGS])?;
        let inputs = inputs(model, fields, name, truncates)?;
        if inputs.len() > MAX_INPUTS {
            let message = format!("{name} has more than {MAX_INPUTS} texts");
            return Err(ApiError::invalid(name, message));
        }
        if inputs.iter().any(Vec::is_empty) {
            return Err(ApiError::invalid(name, format!("{name} has a text without tokens")));
        }
        let context = model.context();
        if let Some(long) = inputs.iter().find(|tokens| tokens.len() > context) {
            return Err(ApiError::context(long.len(), context));
        }
        let hidden = model.core.engine().blueprint().hidden;
        if fields.count("dimensions")?.is_some_and(|dimensions| dimensions != hidden) {
            let message = format!("dimensions must be {hidden}: this model has no other size");
            return Err(ApiError::invalid("dimensions", message));
        }
        let pooling = match fields.text("pooling")?.as_deref() {
            None | Some("last") => Pooling::Last,
            Some("mean") => Pooling::Mean,
            Some(_) => return Err(wrong_type("pooling", "last or mean")),
        };
        Ok(Self { inputs, pooling })
    }

    /// Computes the embeddings, one text after another: a step prefills one prompt anyway.
    ///
    /// # Errors
    /// The waiting line is full, or the computation fails.
    pub(crate) async fn compute(self, model: &ServedModel) -> Result<Embeddings, ApiError> {
        let tokens = self.inputs.iter().map(Vec::len).sum();
        let mut vectors = Vec::with_capacity(self.inputs.len());
        for input in self.inputs {
            vectors.push(embedding(model, input, self.pooling).await?);
        }
        Ok(Embeddings { vectors, tokens })
    }
}

/// Texts as tokens: one text, one list of token ids, or a list of either.
fn inputs(
    model: &ServedModel,
    fields: &Fields<'_>,
    name: &str,
    truncates: bool,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let text = model.text()?;
    let encode = |content: &str| match truncates {
        true => {
            let mut tokens = text.tokenizer().encode(content, true)?;
            tokens.truncate(model.context());
            Ok(tokens)
        }
        false => Ok::<_, ApiError>(text.encode(content)?),
    };
    let wrong = |path: &str| wrong_type(path, "a string, token ids, or a list of either");
    let value = fields.get(name).ok_or_else(|| fields.missing(name))?;
    if let Some(content) = value.as_str() {
        return Ok(vec![encode(&content)?]);
    }
    let list = value.as_list().ok_or_else(|| wrong(name))?;
    if list.iter().next().is_some_and(Json::is_number) {
        return Ok(vec![token_ids(model, list, name)?]);
    }
    let input = |(i, value): (usize, Json<'_>)| {
        let path = format!("{name}[{i}]");
        match (value.as_str(), value.as_list()) {
            (Some(content), _) => encode(&content),
            (None, Some(ids)) => token_ids(model, ids, &path),
            (None, None) => Err(wrong(&path)),
        }
    };
    let inputs = list.iter().take(MAX_INPUTS + 1).enumerate().map(input);
    let inputs: Vec<Vec<u32>> = inputs.collect::<Result<_, _>>()?;
    match inputs.is_empty() {
        true => Err(ApiError::invalid(name, format!("{name} is empty"))),
        false => Ok(inputs),
    }
}

/// Embedding of a text. Dropping the future cancels the request.
async fn embedding(
    model: &ServedModel,
    tokens: Vec<u32>,
    pooling: Pooling,
) -> Result<Vec<f32>, ApiError> {
    let (sink, mut events) = mpsc::channel(UNREAD);
    let request = GenerateRequest::default().embedding(pooling);
    let _handle = model.core.submit(tokens, request, Box::new(ChannelSink(sink)))?;
    while let Some(event) = events.recv().await {
        match event {
            RequestEvent::Embedding(mut values) => {
                normalise(&mut values);
                return Ok(values);
            }
            RequestEvent::Failed(error) => return Err(ApiError::from(&*error)),
            _ => {}
        }
    }
    Err(ApiError::internal("the request was ended: the server stops"))
}

/// Scales a vector to the length 1.
fn normalise(values: &mut [f32]) {
    let square: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    if square > 0.0 {
        let scale = 1.0 / square.sqrt();
        values.iter_mut().for_each(|value| *value = (f64::from(*value) * scale) as f32);
    }
}
