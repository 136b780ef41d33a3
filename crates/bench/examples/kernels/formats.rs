//! Weight formats that are benchmarked.

use std::collections::HashSet;

use moeflux_compute::{Affine, BlockType, Format, Scalar};

const fn affine(bits: u8, group: u16) -> Format {
    Format::Affine(Affine { bits, group, scale: Scalar::BF16 })
}

/// Default of mlx-lm: 4 bits in groups of 64.
pub(super) const AFFINE4: Format = affine(4, 64);

/// Formats of most published checkpoints.
pub(super) const COMMON: [Format; 4] =
    [AFFINE4, affine(8, 64), Format::MXFP4, Format::Plain(Scalar::BF16)];

/// Block types of most published GGUF files.
pub(super) const GGUF: [Format; 4] = [
    Format::Blocks(BlockType::Q4_0),
    Format::Blocks(BlockType::Q8_0),
    Format::Blocks(BlockType::Q4K),
    Format::Blocks(BlockType::Q6K),
];

/// Every format of the table with another name: types of scales hardly differ in speed.
pub(super) fn all() -> Vec<Format> {
    let mut names = HashSet::new();
    Format::all().into_iter().filter(|format| names.insert(format.name())).collect()
}

/// Returns whether the short name starts with `prefix`, ignoring case.
pub(super) fn has_prefix(format: Format, prefix: &str) -> bool {
    !prefix.is_empty() && format.name().starts_with(&prefix.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_selected_by_name_prefix() {
        let named = |prefix| all().iter().filter(|f| has_prefix(**f, prefix)).count();
        assert_eq!(
            ["affine", "affine4", "AFFINE4/64", "fp8", "f", ""].map(named),
            [24, 4, 1, 1, 3, 0]
        );
        assert!(COMMON.iter().all(|f| all().contains(f)));
    }
}
