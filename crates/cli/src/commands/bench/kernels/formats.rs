//! The weight formats and their short names.

use moeflux_compute::{BlockScale, Element, Format, Scalar};

const fn affine(bits: u8, group: u16) -> Format {
    Format::Affine { bits, group, scale: Scalar::BF16 }
}

/// What mlx-lm writes if it is not asked for anything else.
pub(super) const FOUR: Format = affine(4, 64);

/// As DeepSeek-V3 has it.
const FP8: Format = Format::Scaled {
    element: Element::E4M3,
    block_rows: 128,
    block_cols: 128,
    scale: BlockScale::Plain(Scalar::F32),
};

/// What most checkpoints have.
pub(super) const USUAL: [Format; 4] =
    [FOUR, affine(8, 64), Format::MXFP4, Format::Plain(Scalar::BF16)];

/// All that weights can have.
pub(super) const ALL: [Format; 25] = [
    affine(2, 32),
    affine(2, 64),
    affine(2, 128),
    affine(3, 32),
    affine(3, 64),
    affine(3, 128),
    affine(4, 32),
    FOUR,
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

/// `affine4/64`, `mxfp4`, `fp8`, `bf16`.
pub(super) fn name(format: Format) -> String {
    match format {
        Format::Affine { bits, group, .. } => format!("affine{bits}/{group}"),
        FP8 => "fp8".to_owned(),
        other => other.to_string(),
    }
}

/// Whether the format's name begins like this.
pub(super) fn is(format: Format, prefix: &str) -> bool {
    !prefix.is_empty() && name(format).starts_with(&prefix.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_named_by_their_beginning() {
        let named = |prefix| ALL.iter().filter(|f| is(**f, prefix)).count();
        assert_eq!(
            ["affine", "affine4", "AFFINE4/64", "fp8", "f", ""].map(named),
            [18, 3, 1, 1, 3, 0]
        );
        assert!(USUAL.iter().all(|f| ALL.contains(f)));
    }
}
