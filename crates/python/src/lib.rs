//! The extension of the Python package: conversions, and waiting without the GIL.
//!
//! The package's own files in `python/moeflux` have the interface that users see. Options and
//! messages come as JSON; errors go to `moeflux._errors`.

#![allow(missing_docs, reason = "the interface is documented in Python")]

mod arrays;
mod calls;
mod errors;
mod gil_thread;
mod model;
mod native_module;
mod request;
mod server;
mod session;
mod tokenizer;
mod wakes;
