//! Which expert gives way.

mod lfu;
mod lru;
mod queues;
mod s3_fifo;

use std::{fmt, str::FromStr};

use serde::Serialize;

use self::{lfu::Lfu, lru::Lru, s3_fifo::S3Fifo};
use crate::base::error::Error;

/// A cache policy over a fixed number of slots. It sees numbers only, so that a simulator can run it without a model.
///
/// Slots that hold nothing are not its business: an expert comes into a slot (`insert`), is used again (`hit`), and goes
/// (`remove`). Nothing is allocated after construction, and every call takes constant time on average.
pub(crate) trait Policy: Send {
    /// An expert came into an empty slot: `key` is its number among all experts of the model. `ahead` if nobody has needed it
    /// yet: the next hit is then the use that it came for. Until then it stays as long as others can go.
    fn insert(&mut self, slot: usize, key: usize, ahead: bool);

    /// The expert in a slot was used again.
    fn hit(&mut self, slot: usize);

    /// The expert in a slot is there no more.
    fn remove(&mut self, slot: usize);

    /// What came ahead and has not been used was not needed, and is nothing special any more.
    fn expire(&mut self);

    /// The slot that gives way next, among those for which `free` holds; `None` when it holds for none. It stays until it is
    /// removed.
    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize>;
}

/// A cache policy by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Yang et al., *FIFO queues are all you need for cache eviction*, SOSP 2023.
    S3Fifo,
    /// Least frequently used, by counts of all experts in which the last tokens weigh more.
    #[default]
    Lfu,
}

/// The most bytes that a policy keeps of a slot, and of an expert of the model.
pub(crate) const POLICY_BYTES: usize = queues::BYTES + s3_fifo::BYTES + lfu::BYTES;

impl PolicyKind {
    /// All that there are.
    pub const ALL: [Self; 3] = [Self::Lru, Self::S3Fifo, Self::Lfu];

    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::S3Fifo => "s3-fifo",
            Self::Lfu => "lfu",
        }
    }

    /// The policy for `slots` slots of a model with `experts` experts.
    pub(crate) fn policy(self, slots: usize, experts: usize) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(Lru::new(slots)),
            Self::S3Fifo => Box::new(S3Fifo::new(slots, experts)),
            Self::Lfu => Box::new(Lfu::new(slots, experts)),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Input(format!("there is no cache policy {name:?}: choose one of {names}"))
        })
    }
}

#[cfg(test)]
mod tests;
