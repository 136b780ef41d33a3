//! Expert cache: slots in host memory, and a tier of slots on the card in front of them where the
//! device has its own memory.
//!
//! All reads fill host slots. Card slots are filled by copies in the order of the device's work, so
//! the host never waits for a free one. The tiers evict separately: an expert evicted from the card
//! is not copied back, as it is still in a host slot or else on disk.

mod exchange;
mod expert_cache;
mod load;
mod slot_tables;

pub(crate) use expert_cache::{
    BOOKKEEPING_BYTES, CacheTiers, ExpertCache, Lookup, Pin, SlotAccess, wait,
};
pub(crate) use load::LoadProgress;
