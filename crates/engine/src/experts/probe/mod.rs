//! Probes: bandwidth of disk and memory, and the model's share in the page cache.
//!
//! The results serve reports and predictions. No computation depends on them.

mod disk_probe;
mod memory_probe;
mod page_cache;
mod random_offsets;

pub use disk_probe::{DepthSpeed, DiskSpeed, correct_disk_speed, probe_disk};
pub(crate) use memory_probe::read_once;
pub use memory_probe::{MemorySpeed, probe_memory};
pub use page_cache::FilePages;
