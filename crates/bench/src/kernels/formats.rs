//! Weight formats that are benchmarked, and their short names.

use moeflux_compute::{BlockScale, Element, Format, Scalar};

const fn affine(bits: u8, group: u16) -> Format {
    Format::Affine { bits, group, scale: Scalar::BF16 }
}

/// Default of mlx-lm: 4 bits in groups of 64.
pub(super) const AFFINE4: Format = affine(4, 64);

/// FP8 of DeepSeek-V3: E4M3 with an f32 scale per 128 x 128 block.
const FP8: Format = Format::Scaled {
    element: Element::E4M3,
    block_rows: 128,
    block_cols: 128,
    scale: BlockScale::Plain(Scalar::F32),
};

/// Formats of most published checkpoints.
pub(super) const COMMON: [Format; 4] =
    [AFFINE4, affine(8, 64), Format::MXFP4, Format::Plain(Scalar::BF16)];

/// Every supported format.
pub(super) const ALL: [Format; 25] = [
    affine(2, 32),
    affine(2, 64),
    affine(2, 128),
    affine(3, 32),
    affine(3, 64),
    affine(3, 128),
    affine(4, 32),
    AFFINE4,
    affine(4, 128),
    affine(5, 32),
    affine(5, 64),
    affine(5, 128),
    affine(6, 32),
    affine(6, 64),
    affine(6, 128),
    affine(8, 32),
    affine(8, 64),
    affine(8, 128),
    Format::MXFP4,
    Format::NVFP4,
    Format::MXFP8,
    FP8,
    Format::Plain(Scalar::BF16),
    Format::Plain(Scalar::F16),
    Format::Plain(Scalar::F32),
];

/// Short name: `affine4/64`, `mxfp4`, `fp8`, `bf16`.
pub(super) fn name(format: Format) -> String {
    match format {
        Format::Affine { bits, group, .. } => format!("affine{bits}/{group}"),
        FP8 => "fp8".to_owned(),
        other => other.to_string(),
    }
}

/// Returns whether the short name starts with `prefix`, ignoring case.
pub(super) fn has_prefix(format: Format, prefix: &str) -> bool {
    !prefix.is_empty() && name(format).starts_with(&prefix.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_selected_by_name_prefix() {
        let named = |prefix| ALL.iter().filter(|f| has_prefix(**f, prefix)).count();
        assert_eq!(
            ["affine", "affine4", "AFFINE4/64", "fp8", "f", ""].map(named),
            [18, 3, 1, 1, 3, 0]
        );
        assert!(COMMON.iter().all(|f| ALL.contains(f)));
    }
}
