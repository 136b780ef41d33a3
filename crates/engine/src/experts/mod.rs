//! Experts floor: everything between the router's expert ids and filled slots.
//!
//! `cache` maps experts to slots, `policy` picks the slot to evict, `prefetch` predicts the next
//! layer's experts, `io` reads their bytes, `source` has their file locations, `row_store` reads
//! rows of tables that stay on disk, in `row_batches`; `tier` holds the slots of one kind of
//! memory, `slot_classes` says of which sizes, `placement` which experts are on a card and which
//! the host computes, `division` how many by measured times, `expert_plan` keeps that in a file,
//! `placement_options` has the options; `counters` counts uses and hits, `use_counts` keeps uses
//! over runs, `use_window` says which experts a card should exchange, `trace` records routing,
//! `probe` measures disk and memory. Must not know: sessions, the memory plan.

pub(crate) mod cache;
pub(crate) mod counters;
pub(crate) mod division;
pub(crate) mod expert_plan;
pub(crate) mod io;
pub(crate) mod placement;
pub(crate) mod placement_options;
pub(crate) mod policy;
pub(crate) mod prefetch;
pub(crate) mod probe;
pub(crate) mod row_batches;
pub(crate) mod row_store;
pub(crate) mod slot_classes;
pub(crate) mod source;
pub(crate) mod stats;
pub(crate) mod tier;
pub(crate) mod trace;
pub(crate) mod use_counts;
pub(crate) mod use_window;

pub use counters::{ExpertCount, ExpertCounters};
pub use division::{ExpertTime, ExpertTimes};
pub use expert_plan::ExpertPlan;
pub use io::{
    Access, Completion, PageCache, ReadOptions, ReadRequest, Reader, ReaderKind, Urgency,
};
pub use placement::ExpertsOnHost;
pub use placement_options::PlacementOptions;
pub use policy::PolicyKind;
pub use prefetch::PrefetchMode;
pub use probe::{
    DepthSpeed, DiskSpeed, FilePages, MemorySpeed, correct_disk_speed, probe_disk, probe_memory,
};
pub use trace::{Trace, TraceHeader, TraceLayer};
pub use use_counts::UseCountsFolder;
