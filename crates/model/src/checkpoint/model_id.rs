//! Model identity: a digest that does not depend on the location of a checkpoint or on packing.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Identity of a model's weights: a SHA-256 digest, printed as 64 hexadecimal digits.
///
/// It covers `config.json`, the name, type and shape of every tensor, samples of every tensor, and
/// samples of each part of the experts of each layer. Models of one shape with different weights
/// differ, unless no sample is where they do; a packed copy is identical to its source.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelId(pub [u8; 32]);

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModelId({self})")
    }
}

impl Serialize for ModelId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ModelId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digit = |c: u8| char::from(c).to_digit(16).map(|d| d as u8);
        let pair = |p: &[u8]| Some(digit(p[0])? << 4 | digit(*p.get(1)?)?);
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(pair).collect();
        let id = bytes.and_then(|b| b.try_into().ok()).map(Self);
        id.ok_or_else(|| de::Error::custom("a model is identified by 64 hexadecimal digits"))
    }
}
