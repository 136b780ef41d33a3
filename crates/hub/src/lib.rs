//! Checkpoints from the Hugging Face Hub, or from any server with its API.
//!
//! Files are kept in the cache folder of `huggingface_hub`, in its layout, so that each tool finds
//! the files that another has downloaded. A file arrives in ranges over several connections, is
//! resumed after any break, and has its size and digest checked before it gets its name.
//!
//! [`PublicFetcher`] fetches other files, for addresses that strangers send.

mod blocks;
mod cache;
mod client;
mod digest;
mod error;
mod file_path;
mod guest_file;
mod json;
mod listing;
mod model_name;
mod partial_file;
mod proxies;
mod public_address;
mod public_fetch;
mod pull;
mod schedule;
mod selection;
mod settings;
mod tls;
mod transfer;
mod waits;

pub use cache::{Cache, CachedFile, CachedModel};
pub use error::HubError;
pub use file_path::FilePath;
pub use listing::{Listing, RemoteFile};
pub use model_name::ModelName;
pub use proxies::Proxies;
pub use public_fetch::{FetchError, PublicFetcher, PublicHost, WrongHost};
pub use pull::{ArrivingFile, Download, Progress, Pull, PullPlan};
pub use selection::Selection;
pub use settings::Settings;
pub use waits::{Patience, Wait};
