//! One file per command.

mod answer;
mod bench;
mod chat;
mod devices;
mod dispatch;
mod doctor;
mod hub;
mod images;
mod inspect;
mod logits;
mod man;
mod pack;
mod perplexity;
mod persist;
mod plan;
mod replay;
mod run;
mod serve;
mod synth;
mod text;
mod tokenize;
mod vision;

pub(crate) use dispatch::run;
pub(crate) use persist::release_session;
