//! `/tokenize`, `/detokenize` and `/apply-template`.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};
use serde::Serialize;
use serde_json::json;

use crate::{
    apis::openai::chat,
    requests::{app::App, prompt, token_ids::token_ids, with_model::with_model},
    transport::{error::ApiError, json},
};

/// Tokens of a text.
#[derive(Serialize)]
struct TokenReply {
    tokens: TokenList,
}

#[derive(Serialize)]
#[serde(untagged)]
enum TokenList {
    Ids(Vec<u32>),
    Pieces(Vec<TokenPiece>),
}

/// A token with its text.
#[derive(Serialize)]
struct TokenPiece {
    id: u32,
    piece: String,
}

/// Answers `POST /tokenize`: `content` to `tokens`, with their text if `with_pieces` is set.
///
/// # Errors
/// The request is wrong.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let tokens = with_model(&app, request, |model, fields| {
        let content = fields.text("content")?.ok_or_else(|| fields.missing("content"))?;
        let add_special = fields.flag("add_special")?.unwrap_or(false);
        let with_pieces = fields.flag("with_pieces")?.unwrap_or(false);
        let tokenizer = model.text()?.tokenizer();
        let tokens = tokenizer.encode(&content, add_special)?;
        if !with_pieces {
            return Ok(TokenList::Ids(tokens));
        }
        let piece = |id: u32| Ok(TokenPiece { id, piece: tokenizer.decode(&[id], false)? });
        let pieces = tokens.into_iter().map(piece).collect::<Result<_, ApiError>>();
        Ok(TokenList::Pieces(pieces?))
    });
    Ok(json::response(&TokenReply { tokens: tokens.await?.value }))
}

/// Answers `POST /detokenize`: `tokens` to `content`.
///
/// # Errors
/// The request is wrong.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let content = with_model(&app, request, |model, fields| {
        let list = fields.list("tokens")?.ok_or_else(|| fields.missing("tokens"))?;
        let tokens = token_ids(model, list, "tokens")?;
        Ok(model.text()?.tokenizer().decode(&tokens, false)?)
    });
    Ok(json::response(&json!({"content": content.await?.value})))
}

/// Answers `POST /apply-template`: the fields of a chat completion to the text of its prompt.
///
/// # Errors
/// The request is wrong, or the template rejects it.
pub(crate) async fn apply_template(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let prompt = with_model(&app, request, |model, fields| {
        prompt::render(model, chat::conversation(fields)?)
    });
    Ok(json::response(&json!({"prompt": prompt.await?.value})))
}
