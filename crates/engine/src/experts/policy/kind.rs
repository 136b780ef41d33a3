//! Eviction policies by their names.

use std::{fmt, str::FromStr};

use moeflux_base::{Error, OpenError};
use serde::Serialize;

use super::{
    lfu::{self, Lfu},
    lru::Lru,
    policy::Policy,
    queues,
    s3_fifo::{self, S3Fifo},
};

/// Name of an eviction policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Yang et al., *FIFO queues are all you need for cache eviction*, SOSP 2023.
    S3Fifo,
    /// Least frequently used, by counts of all experts with extra weight on the last tokens.
    #[default]
    Lfu,
}

/// Maximum bytes that a policy keeps per slot and per expert of the model.
pub(crate) const POLICY_BYTES: usize = queues::BYTES + s3_fifo::BYTES + lfu::BYTES;

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Lru, Self::S3Fifo, Self::Lfu];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::S3Fifo => "s3-fifo",
            Self::Lfu => "lfu",
        }
    }

    /// Creates the policy for `slots` slots of a model with `experts` experts.
    pub(crate) fn create(self, slots: usize, experts: usize) -> Box<dyn Policy> {
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
            let known = Self::ALL.map(Self::name).join(", ");
            OpenError::UnknownPolicy { name: name.to_owned(), known }.into()
        })
    }
}
