//! Web page: its files, a live feed of counters and the memory plan.
//!
//! - `files/` has the page as browsers load it: plain modules without a build step, and uPlot
//!   1.6.32 (`uplot/`, with its licence). They need no key, and load nothing from elsewhere.
//! - `feed.rs` is the live feed, with the format of its frames.
//! - `plan.rs` is the memory plan as JSON.

pub(crate) mod feed;
mod page;
pub(crate) mod plan;

pub(crate) use page::{file, is_file, root};
