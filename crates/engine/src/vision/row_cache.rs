//! Embedding cache: rows of images, by their digests.

use std::sync::Arc;

use crate::runtime::ImageRows;

/// SHA-256 of an image's scaled pixels and of its processor's constants.
pub(super) type ImageDigest = [u8; 32];

/// Rows of the images that were used last, within a number of bytes.
pub(super) struct RowCache {
    limit: u64,
    bytes: u64,
    /// The image that was used last is at the end.
    entries: Vec<CachedImage>,
}

struct CachedImage {
    digest: ImageDigest,
    rows: Arc<ImageRows>,
}

impl CachedImage {
    fn bytes(&self) -> u64 {
        (size_of::<Self>() + size_of::<ImageRows>() + self.rows.bytes()) as u64
    }
}

impl RowCache {
    pub(super) const fn new(limit: u64) -> Self {
        Self { limit, bytes: 0, entries: Vec::new() }
    }

    /// Rows of an image, which is now the one that was used last.
    pub(super) fn get(&mut self, digest: &ImageDigest) -> Option<Arc<ImageRows>> {
        let index = self.entries.iter().position(|entry| entry.digest == *digest)?;
        self.entries[index..].rotate_left(1);
        self.entries.last().map(|entry| Arc::clone(&entry.rows))
    }

    /// Keeps the rows of an image in place of the ones that were not used for the longest time.
    /// Rows that are larger than the cache are not kept.
    pub(super) fn insert(&mut self, digest: ImageDigest, rows: Arc<ImageRows>) {
        let entry = CachedImage { digest, rows };
        if entry.bytes() > self.limit || self.get(&digest).is_some() {
            return;
        }
        self.bytes += entry.bytes();
        self.entries.push(entry);
        let mut evicted = 0;
        while self.bytes > self.limit {
            self.bytes -= self.entries[evicted].bytes();
            evicted += 1;
        }
        self.entries.drain(..evicted);
    }
}
