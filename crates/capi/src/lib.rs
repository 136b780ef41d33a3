//! C library of moeflux. `include/moeflux.h` has the rules; cbindgen writes it from these files.
//!
//! Functions are reached by their symbols only, so no Rust code can break the rules of their
//! pointers. `caller` reads and writes all pointers of callers.
//!
//! Knows: handles of `moeflux-binding`. Must not know: Python, terminals.

// cbindgen reads public items; as modules are private, none is reachable from Rust.
#![allow(unreachable_pub)]

mod answers;
mod callbacks;
mod caller;
mod cancel;
mod log;
mod model;
mod open_options;
mod request;
mod session;
mod status;
mod structs;
mod text;
