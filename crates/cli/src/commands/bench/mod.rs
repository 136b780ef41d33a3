//! `bench`: decode and prefill speed of a model.

mod speed;
mod sweep;

pub(crate) use speed::run;
