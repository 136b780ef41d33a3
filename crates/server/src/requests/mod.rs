//! Requests and answers, whatever their API.
//!
//! - A body becomes an `Ask` (`ask.rs`). Fields that APIs share are read in `generation.rs` and
//!   `form.rs`; `unsupported.rs` lists the refused fields of other servers.
//! - Images go into a table of their request, and their places into its messages: `content.rs`,
//!   `images.rs`. The ones with addresses are fetched: `image_fetches.rs`.
//! - An `Ask` becomes the tokens of its prompts (`prompt.rs`, `answer_grammar.rs`), which are
//!   submitted to the serving core of a model: `submit.rs`.
//! - One of the server's models is loaded at a time; requests have leases of it: `models/`.
//! - Events of the core become deltas (`answer.rs`, `answers.rs`, `delta.rs`). The encoder of an
//!   API makes events of them: a stream sends them, a whole answer is their fold (`respond.rs`).
//! - Prompts with a text behind the answer: `fim.rs`. Answers that end line by line:
//!   `line_limits.rs`.
//! - Embeddings take no part in this: `embeddings.rs`.
//! - Answers are remembered as they were generated, for the next turn: `turns.rs`,
//!   `answered_turn.rs`; on disk `turn_folder.rs`, `turn_index.rs`.
//! - A prompt over the context is an error, or loses its oldest turns: `overflow.rs`.
//! - `app.rs` is the state that requests share; `counters.rs` and `latency.rs` count.
//!
//! Must not know: paths, and the bodies of answers.

pub(crate) mod answer;
mod answer_grammar;
pub(crate) mod answer_head;
pub(crate) mod answered_turn;
mod answers;
pub(crate) mod app;
pub(crate) mod ask;
pub(crate) mod content;
pub(crate) mod counters;
pub(crate) mod delta;
pub(crate) mod embeddings;
pub(crate) mod fim;
pub(crate) mod form;
pub(crate) mod generation;
pub(crate) mod image_fetches;
pub(crate) mod images;
mod latency;
pub(crate) mod line_limits;
pub(crate) mod models;
pub(crate) mod overflow;
pub(crate) mod prompt;
pub(crate) mod respond;
#[cfg(test)]
pub(crate) mod seen_images;
mod submit;
pub(crate) mod token_ids;
mod turn_folder;
mod turn_index;
mod turns;
pub(crate) mod unsupported;
pub(crate) mod with_model;
