//! `POST /infill`: text between a prefix and a suffix, with other texts as context, as editors ask
//! for it.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};

use super::{
    completion::{self, NativePrompts},
    encoder::NativeEncoder,
};
use crate::{
    requests::{
        app::App,
        fim::{ExtraText, FimTokens, InfillLengths, InfillTexts},
        generation,
        images::ImageTable,
        models::{ModelLease, ServedModel},
        respond::{self, Asked},
    },
    transport::{error::ApiError, json::Fields},
};

/// Part of the context for prefix and suffix, of which the suffix has a quarter.
const AROUND_SHARE: usize = 2;

/// Most tokens of prefix and suffix.
const AROUND: usize = 2048;

/// Answers a request.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn infill(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let read = |model: &ModelLease, fields: &Fields<'_>| read(model, fields);
    respond::answer(&app, request, read).await
}

fn read(model: &ServedModel, fields: &Fields<'_>) -> Result<Asked<NativeEncoder>, ApiError> {
    let fim = FimTokens::of(model.text()?).ok_or_else(|| {
        let message = "this model has no tokens that fill in the middle of a text: load one that \
                       was trained for it";
        ApiError::invalid("input_suffix", message)
    })?;
    let around = (model.context() / AROUND_SHARE).min(AROUND);
    // Room for the answer, but not more than the text around it has.
    let limit = generation::max_tokens(fields, &["n_predict"])?;
    let answer = limit.unwrap_or(around).min(around / 2);
    let lengths = InfillLengths { around, all: model.context() - answer };
    let prompt = fim.infill(model.text()?, &texts(fields)?, lengths)?;
    let images = ImageTable::default();
    let prompts = NativePrompts { prompts: vec![prompt], images, ends: fim.ends };
    completion::asked(model, fields, prompts)
}

/// Texts of a request.
fn texts(fields: &Fields<'_>) -> Result<InfillTexts, ApiError> {
    let text = |name: &str| Ok::<_, ApiError>(fields.text(name)?.unwrap_or_default().into_owned());
    let mut extra = Vec::new();
    if let Some(list) = fields.list("input_extra")? {
        for (i, value) in list.iter().enumerate() {
            let entry = Fields::at(value, &format!("input_extra[{i}]"))?;
            let text =
                |name: &str| Ok::<_, ApiError>(entry.text(name)?.map(|text| text.into_owned()));
            let (name, text) = (text("filename")?, text("text")?.unwrap_or_default());
            extra.push(ExtraText { name, text });
        }
    }
    Ok(InfillTexts {
        prefix: text("input_prefix")?,
        suffix: text("input_suffix")?,
        middle: text("prompt")?,
        extra,
    })
}
