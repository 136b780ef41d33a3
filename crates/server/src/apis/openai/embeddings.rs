//! `POST /v1/embeddings`.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    response::Response,
};
use serde::Serialize;

use crate::{
    requests::{
        app::App,
        embeddings::{EmbeddingAsk, Embeddings},
        with_model::{ModelResult, with_model},
    },
    transport::{
        base64,
        error::ApiError,
        json::{self, wrong_type},
    },
};

/// Embeddings of the texts of a request.
#[derive(Serialize)]
struct EmbeddingList<'a> {
    object: &'static str,
    data: Vec<EmbeddingEntry>,
    model: &'a str,
    usage: EmbeddingUsage,
}

#[derive(Serialize)]
struct EmbeddingEntry {
    object: &'static str,
    index: usize,
    embedding: EncodedVector,
}

#[derive(Serialize)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// A vector in one of the two encodings.
#[derive(Serialize)]
#[serde(untagged)]
enum EncodedVector {
    Floats(Vec<f32>),
    /// Little-endian f32 in base64.
    Base64(String),
}

/// Answers `POST /v1/embeddings`.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let ModelResult { model, value } = with_model(&app, request, |model, fields| {
        let is_base64 = match fields.text("encoding_format")?.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(_) => return Err(wrong_type("encoding_format", "float or base64")),
        };
        Ok((EmbeddingAsk::parse(model, fields, "input", false)?, is_base64))
    })
    .await?;
    let (ask, is_base64) = value;
    let Embeddings { vectors, tokens } = ask.compute(&model).await?;
    let entry = |(index, vector): (usize, Vec<f32>)| {
        let embedding = match is_base64 {
            true => EncodedVector::Base64(base64(&vector)),
            false => EncodedVector::Floats(vector),
        };
        EmbeddingEntry { object: "embedding", index, embedding }
    };
    Ok(json::response(&EmbeddingList {
        object: "list",
        data: vectors.into_iter().enumerate().map(entry).collect(),
        model: &model.name,
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
    }))
}

/// Base64 of little-endian values.
fn base64(values: &[f32]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    base64::encode(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_little_endian_in_base64() {
        assert_eq!(base64(&[]), "");
        assert_eq!(base64(&[1.0]), "AACAPw==");
        assert_eq!(base64(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(base64(&[1.0, -2.5, 0.0]), "AACAPwAAIMAAAAAA");
    }
}
