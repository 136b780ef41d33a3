//! Quants of a block, and operations on eight of their bytes at a time.

use bytemuck::Pod;
use moeflux_ops::BlockType;

/// Quants of a block, with the scale and the bias of each of its groups.
pub(super) struct BlockQuants<'a> {
    pub(super) q: &'a mut [u8],
    pub(super) scales: &'a mut [f32],
    pub(super) biases: &'a mut [f32],
}

impl BlockQuants<'_> {
    /// Sets eight times `N` quants, from quant `8 * i` on.
    #[inline(always)]
    pub(super) fn set<const N: usize>(&mut self, i: usize, quants: [u64; N]) {
        self.q[8 * i..][..8 * N].as_chunks_mut().0.copy_from_slice(&quants.map(u64::to_le_bytes));
    }

    /// Sets all quants of a block of 256, eight at a time.
    #[inline(always)]
    pub(super) fn set_eights(&mut self, quants: impl Fn(usize) -> u64) {
        // Vectors of four words.
        for i in (0..32).step_by(4) {
            self.set(i, [quants(i), quants(i + 1), quants(i + 2), quants(i + 3)]);
        }
    }

    /// Sets the scale and the bias of each group.
    #[inline(always)]
    pub(super) fn scale<const N: usize>(&mut self, scales: [f32; N], biases: [f32; N]) {
        self.scales.copy_from_slice(&scales);
        self.biases.copy_from_slice(&biases);
    }

    /// Sets scales; the biases subtract `zero` from each quant.
    #[inline(always)]
    pub(super) fn scale_around<const N: usize>(&mut self, zero: u8, scales: [f32; N]) {
        self.scale(scales, scales.map(|scale| -f32::from(zero) * scale));
    }
}

/// Block of a type, byte for byte as in a file.
pub(super) trait Block: Pod {
    const KIND: BlockType;
    /// Values of the 4-bit codes that `transcode` writes, if it writes codes.
    const TABLE: Option<[u8; 16]> = None;
    /// The scale `d` and the offset `m` as f16; 0 if there are none.
    fn halves(&self) -> [[u8; 2]; 2];
    /// Writes the quants in the order of the row, and the scales and biases.
    fn transcode(&self, halves: [f32; 2], out: BlockQuants<'_>);
}

/// A [`Block`]: its name in [`BlockType`], the table of its codes, if it has one, and its fields in
/// the order of the file; after the names of itself and its quants, the halves it has.
macro_rules! block {
    (
        $(#[$doc:meta])*
        $kind:ident $(, codes $table:ident)? {
            $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)?
        }
        ($self:ident, $out:ident $(; $($half:ident = $bytes:expr),*)?) $transcode:block
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        pub(super) struct $kind {
            $($(#[$field_doc])* $field: $type),*
        }

        impl super::block::Block for $kind {
            const KIND: moeflux_ops::BlockType = moeflux_ops::BlockType::$kind;
            $(const TABLE: Option<[u8; 16]> = Some($table);)?
            #[inline(always)]
            fn halves(&$self) -> [[u8; 2]; 2] {
                super::block::padded([$($($bytes),*)?])
            }
            #[inline(always)]
            fn transcode(&$self, halves: [f32; 2], mut $out: super::block::BlockQuants<'_>) {
                let [$($($half,)*)? ..] = halves;
                $transcode
            }
        }
    };
}
pub(super) use block;

/// Halves of a block that may have fewer than two.
#[inline(always)]
pub(super) fn padded<const N: usize>(halves: [[u8; 2]; N]) -> [[u8; 2]; 2] {
    std::array::from_fn(|i| if i < N { halves[i] } else { [0; 2] })
}

/// A value in each of eight bytes.
#[inline(always)]
pub(super) const fn splat(x: u8) -> u64 {
    x as u64 * 0x0101_0101_0101_0101
}

/// Bytes, eight at a time. Loops over words, of any instruction set, become vectors of them.
#[inline(always)]
pub(super) fn words<const N: usize>(bytes: [[u8; 8]; N]) -> [u64; N] {
    bytes.map(u64::from_le_bytes)
}

/// The bits of `mask` of each byte shifted down.
#[inline(always)]
pub(super) fn fields<const N: usize>(words: [u64; N], shift: usize, mask: u8) -> [u64; N] {
    words.map(|word| word >> shift & splat(mask))
}

/// Combines the bits of words.
#[inline(always)]
pub(super) fn or<const N: usize>(a: [u64; N], b: [u64; N]) -> [u64; N] {
    std::array::from_fn(|i| a[i] | b[i])
}

/// Bytes of 255 where a bit is set.
pub(super) static MASKS: [u64; 256] = {
    let (mut masks, mut bits) = ([0; 256], 0);
    while bits < 256 {
        let mut i = 0;
        while i < 8 {
            masks[bits] |= (0xff * (bits >> i & 1) as u64) << (8 * i);
            i += 1;
        }
        bits += 1;
    }
    masks
};

/// Entry of a table. The read is volatile: compilers would gather several entries, which takes
/// longer.
#[inline(always)]
pub(super) fn entry<const N: usize>(table: &[u64; N], i: usize) -> u64 {
    // SAFETY: a reference can be read.
    unsafe { std::ptr::from_ref(&table[i]).read_volatile() }
}

/// Quants of the codes of IQ4_NL and IQ4_XS: their values plus 127.
pub(super) const IQ4_QUANTS: [u8; 16] =
    [0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240];
/// The quant of 0 among [`IQ4_QUANTS`].
pub(super) const IQ4_ZERO: u8 = 127;
