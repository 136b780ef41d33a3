//! Model identity: a digest that does not depend on the location of a checkpoint or on packing.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Identity of a model's weights: a SHA-256 digest, printed as 64 hexadecimal digits.
///
/// It covers `config.json`, the name, type and shape of every tensor, samples of every tensor, and
/// samples of each part of the experts of each layer. Models of one shape with different weights
/// differ, unless no sample is where they do; a packed copy is identical to its source.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelId(#[serde(with = "hex_digest")] pub [u8; 32]);

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex_digest::Hex(&self.0).fmt(f)
    }
}

impl fmt::Debug for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModelId({self})")
    }
}

/// Digests of 32 bytes in JSON: 64 hexadecimal digits.
pub mod hex_digest {
    use std::fmt;

    use serde::{Deserialize, Deserializer, Serializer, de};

    /// A digest, displayed in hexadecimal digits.
    pub(super) struct Hex<'a>(pub(super) &'a [u8; 32]);

    impl fmt::Display for Hex<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
        }
    }

    /// Writes a digest.
    ///
    /// # Errors
    /// The serializer fails.
    pub fn serialize<S: Serializer>(digest: &[u8; 32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&Hex(digest))
    }

    /// Reads a digest.
    ///
    /// # Errors
    /// It is not a text of 64 hexadecimal digits.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[u8; 32], D::Error> {
        let text = String::deserialize(deserializer)?;
        let digit = |c: u8| char::from(c).to_digit(16).map(|d| d as u8);
        let pair = |p: &[u8]| Some(digit(p[0])? << 4 | digit(*p.get(1)?)?);
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(pair).collect();
        let digest = bytes.and_then(|bytes| bytes.try_into().ok());
        digest.ok_or_else(|| de::Error::custom("expected a digest of 64 hexadecimal digits"))
    }
}
