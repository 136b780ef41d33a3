//! Token ids in a request.

use super::models::ServedModel;
use crate::transport::{
    error::ApiError,
    json::{Json, List, wrong_type},
};

/// Token ids of a list at `path` in a request.
///
/// # Errors
/// An element is not a token of the vocabulary.
pub(crate) fn token_ids(
    model: &ServedModel,
    list: List<'_>,
    path: &str,
) -> Result<Vec<u32>, ApiError> {
    let vocab = model.text()?.tokenizer().vocab_size();
    let id = |value: Json<'_>| {
        let id = u32::try_from(value.as_integer()?).ok()?;
        (usize::try_from(id).ok()? < vocab).then_some(id)
    };
    let tokens: Option<Vec<u32>> = list.iter().map(id).collect();
    tokens.ok_or_else(|| wrong_type(path, &format!("a list of token ids below {vocab}")))
}
