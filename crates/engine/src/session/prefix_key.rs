//! Prefix key: the contents of a sequence, by which its states are found again.
//!
//! Token ids do not tell all of it. All images have the same placeholders, and an adapter changes
//! the states of every token. Such contents are in the key by their digests.

use crate::runtime::contents::{ContentDigest, PromptImages, image_around};

/// Tokens of a sequence, with the images among them.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Token ids, with a placeholder for each row of an image.
    pub tokens: &'a [u32],
    /// Images. Their places are indices into the whole sequence.
    pub images: &'a PromptImages,
}

impl<'a> Prompt<'a> {
    /// Tokens with images among them.
    pub fn new(tokens: &'a [u32], images: &'a PromptImages) -> Self {
        Self { tokens, images }
    }

    pub(crate) fn key(self) -> PrefixKey<'a> {
        PrefixKey { tokens: self.tokens, contents: self.images.contents() }
    }
}

impl<'a, T: AsRef<[u32]> + ?Sized> From<&'a T> for Prompt<'a> {
    /// Text alone.
    fn from(tokens: &'a T) -> Self {
        Self { tokens: tokens.as_ref(), images: PromptImages::NONE }
    }
}

/// Contents of a sequence. Sequences with equal keys have equal states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PrefixKey<'a> {
    pub(crate) tokens: &'a [u32],
    /// Ascending by place; each place is the index of a token.
    pub(crate) contents: &'a [ContentDigest],
}

/// A key that lives on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnedPrefixKey {
    tokens: Vec<u32>,
    contents: Vec<ContentDigest>,
}

impl OwnedPrefixKey {
    pub(crate) fn key(&self) -> PrefixKey<'_> {
        PrefixKey { tokens: &self.tokens, contents: &self.contents }
    }
}

impl<'a, T: AsRef<[u32]> + ?Sized> From<&'a T> for PrefixKey<'a> {
    /// Text alone.
    fn from(tokens: &'a T) -> Self {
        Self { tokens: tokens.as_ref(), contents: &[] }
    }
}

impl<'a> PrefixKey<'a> {
    /// Number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// A copy that lives on.
    pub(crate) fn to_owned(self) -> OwnedPrefixKey {
        OwnedPrefixKey { tokens: self.tokens.to_vec(), contents: self.contents.to_vec() }
    }

    /// Key of the first `len` tokens.
    pub(crate) fn first(&self, len: usize) -> Self {
        let count = self.contents.partition_point(|content| content.place < len);
        Self { tokens: &self.tokens[..len], contents: &self.contents[..count] }
    }

    /// Whether `prefix` is the key of its first tokens.
    pub(crate) fn starts_with(&self, prefix: PrefixKey<'_>) -> bool {
        prefix.len() <= self.len() && self.first(prefix.len()) == prefix
    }

    /// The largest length up to `len` that does not end inside an image.
    pub(crate) fn outside_images(&self, len: usize) -> usize {
        image_around(self.contents, len).map_or(len, |image| image.place)
    }

    /// Number of the first tokens that are the same in both keys.
    pub(crate) fn common_len(&self, other: PrefixKey<'_>) -> usize {
        self.common_len_after(0, other)
    }

    /// As [`PrefixKey::common_len`], where the first `len` token ids are known to be the same.
    pub(crate) fn common_len_after(&self, len: usize, other: PrefixKey<'_>) -> usize {
        let (own, others) = (&self.tokens[len..], &other.tokens[len..]);
        (len + common_prefix_len(own, others)).min(self.common_contents(other))
    }

    /// Number of the first tokens up to which the contents are the same.
    fn common_contents(&self, other: PrefixKey<'_>) -> usize {
        let same = self.contents.iter().zip(other.contents).take_while(|(a, b)| a == b).count();
        let next = |key: &PrefixKey<'_>| key.contents.get(same).map(|content| content.place);
        next(self).into_iter().chain(next(&other)).min().unwrap_or(usize::MAX)
    }

    /// Lengths and hashes of all prefixes, shortest first.
    pub(crate) fn hashes(self) -> impl Iterator<Item = (usize, u64)> {
        let mut contents = self.contents.iter().peekable();
        self.tokens.iter().enumerate().scan(1, move |hash, (i, token)| {
            while let Some(content) = contents.next_if(|content| content.place <= i) {
                for word in content.digest.as_chunks().0 {
                    *hash = extend_hash(*hash, u32::from_le_bytes(*word));
                }
            }
            *hash = extend_hash(*hash, *token);
            Some((i + 1, *hash))
        })
    }

    /// Bytes by which files are named: the ids, then places and digests.
    pub(crate) fn bytes(self) -> impl Iterator<Item = u8> {
        let contents = self.contents.iter().flat_map(|content| {
            (content.place as u64).to_le_bytes().into_iter().chain(content.digest)
        });
        self.tokens.iter().flat_map(|token| token.to_le_bytes()).chain(contents)
    }
}

/// Extends the hash of a prefix by a token or a part of a digest. Hashes only find candidates; keys
/// are compared.
pub(crate) const fn extend_hash(hash: u64, word: u32) -> u64 {
    (hash.rotate_left(5) ^ word as u64).wrapping_mul(0x517C_C1B7_2722_0A95)
}

/// Length of the common prefix.
fn common_prefix_len(a: &[u32], b: &[u32]) -> usize {
    // Compares blocks first: each comparison is one memcmp.
    const BLOCK: usize = 64;
    let blocks =
        a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)).take_while(|(a, b)| a == b).count();
    let same = a.iter().zip(b).skip(blocks * BLOCK).take_while(|(a, b)| a == b).count();
    blocks * BLOCK + same
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: [u8; 32] = [7; 32];
    const OTHER: [u8; 32] = [8; 32];

    fn content(place: usize, digest: [u8; 32]) -> ContentDigest {
        ContentDigest { place, digest, grid: None }
    }

    #[test]
    fn contents_end_what_keys_have_in_common() {
        let tokens: Vec<u32> = (0..200).collect();
        let images = [content(50, IMAGE), content(120, IMAGE)];
        let key = |contents| PrefixKey { tokens: &tokens, contents };
        let [one, both] = [key(&images[..1]), key(&images)];
        let other = [content(50, IMAGE), content(120, OTHER)];
        let earlier = [content(30, IMAGE)];
        for (a, b, common) in [
            (one, both, 120),
            (both, key(&other), 120),
            (both, key(&earlier), 30),
            (both, key(&[]), 50),
            (both, both, 200),
        ] {
            assert_eq!((a.common_len(b), b.common_len(a)), (common, common));
            assert_eq!(a.first(common), b.first(common));
            assert!(a.starts_with(b.first(common)));
            let same = a.hashes().zip(b.hashes()).take_while(|(a, b)| a == b).count();
            assert_eq!(same, common);
        }
        assert!(!both.starts_with(key(&other)) && !one.first(100).starts_with(one));
        assert_eq!(both.first(120).contents, &images[..1]);
        assert_ne!(one.bytes().collect::<Vec<_>>(), both.bytes().collect::<Vec<_>>());
    }
}
