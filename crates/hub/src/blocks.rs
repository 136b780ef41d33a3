//! Which blocks of a file are there, and which are on their way.

use std::ops::Range;

/// Bytes of a block: small beside a matrix of an expert, which may be all that is asked for.
pub(crate) const BLOCK: u64 = 4 << 10;

/// Blocks of a file that arrives.
#[derive(Debug)]
pub(crate) struct Blocks {
    size: u64,
    present: BlockSet,
    /// Blocks that are present, or that a connection fetches.
    claimed: BlockSet,
    missing: u64,
}

impl Blocks {
    pub(crate) fn new(size: u64, present: BlockSet) -> Self {
        let count: u64 = present.0.iter().map(|byte| u64::from(byte.count_ones())).sum();
        let last = size.div_ceil(BLOCK).saturating_sub(1);
        // The last block may be short.
        let lacking = if present.has(last) { (last + 1) * BLOCK - size } else { 0 };
        let missing = size - (count * BLOCK - lacking);
        Self { size, claimed: present.clone(), present, missing }
    }

    /// Blocks that are present.
    pub(crate) fn present(&self) -> &BlockSet {
        &self.present
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that are missing.
    pub(crate) fn missing(&self) -> u64 {
        self.missing
    }

    /// Bytes of a block.
    pub(crate) fn bytes_of(&self, block: u64) -> Range<u64> {
        block * BLOCK..((block + 1) * BLOCK).min(self.size)
    }

    /// Blocks that a range of bytes touches.
    fn blocks_of(&self, range: &Range<u64>) -> Range<u64> {
        range.start / BLOCK..range.end.min(self.size).div_ceil(BLOCK)
    }

    /// Whether all bytes of a range are there.
    pub(crate) fn has(&self, range: &Range<u64>) -> bool {
        self.blocks_of(range).all(|block| self.present.has(block))
    }

    /// Claims the first missing bytes of a range that no connection fetches: whole blocks, of `max`
    /// bytes at most. `None` if there are none.
    pub(crate) fn claim(&mut self, range: &Range<u64>, max: u64) -> Option<Range<u64>> {
        let blocks = self.blocks_of(range);
        let first = self.claimed.first_absent(blocks.clone())?;
        let most = first.saturating_add(max / BLOCK).min(blocks.end);
        let end = (first..most).find(|&block| self.claimed.has(block)).unwrap_or(most);
        (first..end).for_each(|block| self.claimed.insert(block));
        Some(first * BLOCK..(end * BLOCK).min(self.size))
    }

    /// Gives up the claims of connections that have ended.
    pub(crate) fn unclaim(&mut self) {
        self.claimed = self.present.clone();
    }

    /// Bytes of the blocks that are claimed and not present.
    pub(crate) fn claims(&self) -> impl Iterator<Item = Range<u64>> {
        self.claimed.without(&self.present).map(|block| self.bytes_of(block))
    }

    /// Marks the blocks within a range of bytes as present. `on_new` is called with each new one.
    /// Returns the bytes of the new ones.
    pub(crate) fn add(&mut self, range: &Range<u64>, mut on_new: impl FnMut(u64)) -> u64 {
        let first = range.start.div_ceil(BLOCK);
        let end =
            if range.end == self.size { range.end.div_ceil(BLOCK) } else { range.end / BLOCK };
        let before = self.missing;
        for block in first..end {
            if !self.present.has(block) {
                self.insert(block);
                on_new(block);
            }
        }
        before - self.missing
    }

    /// Marks the blocks of a set as present. Returns the bytes that are new.
    pub(crate) fn add_all(&mut self, set: &BlockSet) -> u64 {
        let before = self.missing;
        let new: Vec<_> = set.without(&self.present).collect();
        new.into_iter().for_each(|block| self.insert(block));
        before - self.missing
    }

    fn insert(&mut self, block: u64) {
        self.present.insert(block);
        self.claimed.insert(block);
        let bytes = self.bytes_of(block);
        self.missing -= bytes.end - bytes.start;
    }
}

/// A bit for each block of a file.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct BlockSet(Vec<u8>);

impl BlockSet {
    /// No block of a file.
    pub(crate) fn empty(size: u64) -> Self {
        Self(vec![0; size.div_ceil(BLOCK).div_ceil(8) as usize])
    }

    /// The set with a bit for each block; `None` if a file of `size` bytes has another number of
    /// blocks.
    pub(crate) fn from_bits(bits: &[u8], size: u64) -> Option<Self> {
        let blocks = size.div_ceil(BLOCK);
        if bits.len() as u64 != blocks.div_ceil(8) {
            return None;
        }
        let mut set = Self(bits.to_vec());
        if let Some(last) = set.0.last_mut().filter(|_| !blocks.is_multiple_of(8)) {
            *last &= (1 << (blocks % 8)) - 1;
        }
        Some(set)
    }

    /// The bits of all blocks.
    pub(crate) fn bits(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn has(&self, block: u64) -> bool {
        let byte = self.0.get((block / 8) as usize);
        byte.is_some_and(|byte| byte & (1 << (block % 8)) != 0)
    }

    pub(crate) fn insert(&mut self, block: u64) {
        if let Some(byte) = self.0.get_mut((block / 8) as usize) {
            *byte |= 1 << (block % 8);
        }
    }

    /// The blocks.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> {
        blocks_of_bits(self.0.iter().copied())
    }

    /// The blocks that another set of the same file does not have.
    pub(crate) fn without(&self, other: &Self) -> impl Iterator<Item = u64> {
        blocks_of_bits(self.0.iter().zip(&other.0).map(|(ours, theirs)| ours & !theirs))
    }

    /// The first of some blocks that is not in the set.
    fn first_absent(&self, mut blocks: Range<u64>) -> Option<u64> {
        while blocks.start < blocks.end {
            if self.0.get((blocks.start / 8) as usize) == Some(&u8::MAX) {
                blocks.start = (blocks.start / 8 + 1) * 8;
            } else if self.has(blocks.start) {
                blocks.start += 1;
            } else {
                return Some(blocks.start);
            }
        }
        None
    }
}

fn blocks_of_bits(bytes: impl Iterator<Item = u8>) -> impl Iterator<Item = u64> {
    bytes.enumerate().filter(|&(_, byte)| byte != 0).flat_map(|(index, byte)| {
        let bits = (0..8).filter(move |bit| byte & (1 << bit) != 0);
        bits.map(move |bit| index as u64 * 8 + bit)
    })
}
