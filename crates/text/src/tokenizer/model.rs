//! Model of a tokenizer: BPE in flat memory, or one of the library's.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use tokenizers::{Model, ModelWrapper, Token, models::bpe::BpeTrainer};

use super::{byte_pairs::BytePairs, tokenizer_json::ReadModel};

/// Model of a tokenizer.
#[derive(Debug)]
pub(super) enum TokenModel {
    /// Byte pair encoding.
    Bpe(BytePairs),
    /// Another model of the library, and its largest id plus one.
    Other { model: ModelWrapper, rows: usize },
}

impl From<ReadModel> for TokenModel {
    fn from(model: ReadModel) -> Self {
        match model {
            ReadModel::Bpe(model) => Self::Bpe(model),
            ReadModel::Other(model) => {
                let rows = model.get_vocab().into_values().map(|id| id as usize + 1).max();
                Self::Other { model, rows: rows.unwrap_or(0) }
            }
        }
    }
}

impl TokenModel {
    /// Largest id plus one.
    pub(super) fn rows(&self) -> usize {
        match self {
            Self::Bpe(model) => model.rows(),
            Self::Other { rows, .. } => *rows,
        }
    }

    /// Whether the two characters may be in one token.
    pub(super) fn joins(&self, left: char, right: char) -> bool {
        match self {
            Self::Bpe(model) => model.joins(left, right),
            Self::Other { .. } => true,
        }
    }
}

impl Model for TokenModel {
    type Trainer = BpeTrainer;

    fn tokenize(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        match self {
            Self::Bpe(model) => model.tokenize(word),
            Self::Other { model, .. } => model.tokenize(word),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Bpe(model) => model.token_to_id(token),
            Self::Other { model, .. } => model.token_to_id(token),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Self::Bpe(model) => model.id_to_token(id),
            Self::Other { model, .. } => model.id_to_token(id),
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            Self::Bpe(model) => model.get_vocab(),
            Self::Other { model, .. } => model.get_vocab(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            Self::Bpe(model) => model.get_vocab_size(),
            Self::Other { model, .. } => model.get_vocab_size(),
        }
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        match self {
            Self::Bpe(model) => model.save(folder, prefix),
            Self::Other { model, .. } => model.save(folder, prefix),
        }
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}
