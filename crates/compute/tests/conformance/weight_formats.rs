//! Byte layout of weight formats, against the output of `mx.quantize` of mlx 0.32.4.

use moeflux_compute::{Affine, BlockScale, BlockScaled, Element, Format, MatrixShape, Scalar};

/// One group of `mx.quantize(w, group_size=64, bits=bits)`: bits, scale, packed and unpacked
/// quants.
type AffineGroup = (u8, f32, &'static [u8], [u8; 64]);

/// The bias of all groups: the maximum weight, as the scales are negative.
const BIAS: f32 = 1.02875;

const GROUPS: [AffineGroup; 6] = [
    (
        2,
        -0.514375,
        &[123, 227, 221, 120, 39, 222, 184, 55, 222, 137, 119, 238, 141, 119, 226, 157],
        [
            3, 2, 3, 1, 3, 0, 2, 3, 1, 3, 1, 3, 0, 2, 3, 1, 3, 1, 2, 0, 2, 3, 1, 3, 0, 2, 3, 2, 3,
            1, 3, 0, 2, 3, 1, 3, 1, 2, 0, 2, 3, 1, 3, 1, 2, 3, 2, 3, 1, 3, 0, 2, 3, 1, 3, 1, 2, 0,
            2, 3, 1, 3, 1, 2,
        ],
    ),
    (
        3,
        -0.2571875,
        &[
            223, 213, 240, 179, 10, 126, 78, 177, 203, 225, 103, 53, 252, 156, 130, 151, 195, 207,
            106, 248, 89, 5, 47, 167,
        ],
        [
            7, 3, 7, 2, 5, 1, 4, 7, 3, 6, 2, 5, 0, 4, 7, 3, 6, 1, 5, 0, 3, 7, 2, 6, 1, 4, 7, 3, 6,
            2, 5, 1, 4, 7, 3, 6, 1, 5, 0, 4, 7, 2, 6, 1, 4, 7, 3, 6, 2, 5, 1, 4, 7, 3, 6, 2, 5, 0,
            4, 7, 2, 6, 1, 5,
        ],
    ),
    (
        4,
        -0.12859374,
        &[
            111, 77, 27, 248, 214, 163, 129, 94, 60, 9, 231, 180, 146, 111, 77, 26, 232, 197, 163,
            112, 93, 43, 249, 214, 180, 129, 110, 60, 26, 231, 181, 146,
        ],
        [
            15, 6, 13, 4, 11, 1, 8, 15, 6, 13, 3, 10, 1, 8, 14, 5, 12, 3, 9, 0, 7, 14, 4, 11, 2, 9,
            15, 6, 13, 4, 10, 1, 8, 14, 5, 12, 3, 10, 0, 7, 13, 5, 11, 2, 9, 15, 6, 13, 4, 11, 1,
            8, 14, 6, 12, 3, 10, 1, 7, 14, 5, 11, 2, 9,
        ],
    ),
    (
        5,
        -0.06429687,
        &[
            191, 109, 100, 71, 244, 43, 27, 26, 94, 87, 184, 76, 224, 118, 178, 36, 122, 166, 79,
            21, 144, 47, 108, 102, 112, 59, 93, 34, 125, 203, 168, 14, 216, 23, 54, 52, 188, 173,
            108, 145,
        ],
        [
            31, 13, 27, 8, 22, 3, 17, 30, 11, 25, 6, 20, 1, 15, 29, 10, 24, 5, 19, 0, 14, 27, 9,
            22, 4, 17, 30, 12, 26, 7, 21, 2, 16, 28, 11, 24, 6, 19, 1, 14, 27, 9, 23, 4, 18, 30,
            13, 25, 8, 21, 3, 16, 29, 11, 24, 6, 20, 1, 15, 27, 10, 22, 5, 18,
        ],
    ),
    (
        6,
        -0.032148436,
        &[
            191, 86, 67, 171, 17, 242, 151, 220, 160, 131, 151, 83, 175, 82, 2, 155, 29, 177, 135,
            184, 99, 179, 147, 18, 31, 94, 197, 139, 25, 112, 181, 228, 34, 100, 175, 205, 208, 90,
            132, 250, 5, 55, 232, 224, 221, 84, 171, 148,
        ],
        [
            63, 26, 53, 16, 43, 6, 33, 60, 23, 50, 13, 40, 3, 30, 57, 20, 47, 10, 37, 0, 27, 54,
            17, 44, 7, 34, 59, 24, 51, 14, 41, 4, 31, 56, 21, 49, 11, 38, 1, 28, 53, 18, 46, 8, 36,
            61, 26, 51, 16, 43, 5, 33, 58, 23, 48, 13, 40, 3, 30, 55, 20, 45, 10, 37,
        ],
    ),
    (
        8,
        -0.007974805,
        &[
            254, 104, 214, 64, 174, 24, 133, 243, 93, 202, 52, 162, 12, 121, 231, 81, 190, 40, 150,
            0, 110, 219, 69, 179, 29, 138, 239, 98, 207, 57, 167, 17, 126, 227, 86, 196, 46, 155,
            5, 115, 216, 74, 184, 34, 143, 244, 103, 204, 63, 172, 22, 132, 232, 91, 192, 51, 160,
            10, 120, 221, 79, 180, 39, 149,
        ],
        [
            254, 104, 214, 64, 174, 24, 133, 243, 93, 202, 52, 162, 12, 121, 231, 81, 190, 40, 150,
            0, 110, 219, 69, 179, 29, 138, 239, 98, 207, 57, 167, 17, 126, 227, 86, 196, 46, 155,
            5, 115, 216, 74, 184, 34, 143, 244, 103, 204, 63, 172, 22, 132, 232, 91, 192, 51, 160,
            10, 120, 221, 79, 180, 39, 149,
        ],
    ),
];

/// A row of 32 of `mx.quantize(w, mode=mode)`: format, packed elements, scales, and the result of
/// `mx.dequantize`.
type ScaledRow = (Format, &'static [u8], &'static [u8], [f32; 32]);

const SCALED: [ScaledRow; 3] = [
    (
        Format::MXFP4,
        &[28, 58, 201, 161, 3, 44, 58, 176, 180, 22, 77, 107, 209, 164, 38, 93],
        &[128],
        [
            -4.0, 1.0, -2.0, 3.0, -1.0, -4.0, 1.0, -2.0, 3.0, 0.0, -4.0, 2.0, -2.0, 3.0, 0.0, -3.0,
            4.0, -3.0, 8.0, 1.0, -6.0, 4.0, -3.0, 8.0, 1.0, -6.0, 4.0, -2.0, 8.0, 2.0, -6.0, 6.0,
        ],
    ),
    (
        Format::NVFP4,
        &[63, 110, 250, 212, 150, 79, 109, 224, 197, 23, 94, 124, 226, 182, 39, 110],
        &[51, 59],
        [
            -4.125, 1.03125, -2.75, 2.75, -0.6875, -4.125, 1.375, -2.0625, 2.75, -0.34375, -4.125,
            1.375, -2.0625, 2.75, 0.0, -2.75, 4.125, -2.75, 8.25, 0.6875, -5.5, 4.125, -2.75, 8.25,
            1.375, -5.5, 5.5, -2.0625, 8.25, 1.375, -5.5, 5.5,
        ],
    ),
    (
        Format::MXFP8,
        &[
            241, 96, 234, 107, 217, 240, 98, 233, 109, 209, 239, 101, 231, 110, 0, 238, 111, 237,
            119, 89, 245, 113, 234, 120, 97, 243, 114, 232, 121, 102, 242, 115,
        ],
        &[122],
        [
            -4.5, 1.0, -2.5, 2.75, -0.5625, -4.0, 1.25, -2.25, 3.25, -0.28125, -3.75, 1.625,
            -1.875, 3.5, 0.0, -3.5, 3.75, -3.25, 7.5, 0.5625, -6.5, 4.5, -2.5, 8.0, 1.125, -5.5,
            5.0, -2.0, 9.0, 1.75, -5.0, 5.5,
        ],
    ),
];

#[test]
fn affine_weights_unpack_as_in_mlx() {
    for (bits, scale, packed, quants) in GROUPS {
        let format = Format::Affine(Affine { bits, group: 64, scale: Scalar::F32 });
        let bytes = [packed, &scale.to_le_bytes(), &BIAS.to_le_bytes()].concat();
        let matrix = MatrixShape { rows: 1, cols: 64, format }.view(&bytes).unwrap();
        let planes = matrix.row(0);
        let mut row = [0.0; 64];
        format.dequantize(planes, &mut row);
        assert_eq!(row, quants.map(|q| scale * f32::from(q) + BIAS), "{bits} bits");
    }
}

#[test]
fn impossible_matrix_shapes_are_errors() {
    let affine = |bits, group| Format::Affine(Affine { bits, group, scale: Scalar::BF16 });
    let scaled = |element, block_rows, block_cols| {
        Format::BlockScaled(BlockScaled {
            element,
            block_rows,
            block_cols,
            scale: BlockScale::Plain(Scalar::F32),
        })
    };
    for (format, rows, cols) in [
        (affine(7, 64), 1, 64),
        (affine(0, 64), 1, 64),
        (affine(4, 8), 1, 64),
        (affine(4, 16), 1, 40),
        (affine(5, 16), 1, 48),
        (affine(4, 64), 1, 96),
        (affine(4, 64), usize::MAX / 64, 64),
        (affine(8, 64), 0, usize::MAX / 64 * 64),
        (Format::Plain(Scalar::F32), usize::MAX, 2),
        (Format::MXFP4, usize::MAX / 32, 64),
        (Format::MXFP4, 1, 33),
        (scaled(Element::E2M1, 1, 31), 1, 62),
        (scaled(Element::E4M3, 0, 32), 1, 32),
        (scaled(Element::E4M3, 1, 0), 1, 32),
        (scaled(Element::E4M3, 1, 1), usize::MAX / 4, 2),
    ] {
        assert!(format.plane_bytes(rows, cols).is_err(), "{format}");
    }
    let shape = MatrixShape { rows: 2, cols: 64, format: affine(4, 64) };
    assert!(shape.view(&[0; 71]).is_err() && shape.view(&[0; 72]).is_ok());
}

#[test]
fn scaled_formats_dequantize_as_in_mlx() {
    for (format, elements, scales, values) in SCALED {
        let bytes = [elements, scales].concat();
        let matrix = MatrixShape { rows: 1, cols: 32, format }.view(&bytes).unwrap();
        let planes = matrix.row(0);
        let mut row = [0.0; 32];
        format.dequantize(planes, &mut row);
        assert_eq!(row, values, "{format}");
    }
}

#[test]
fn minifloat_codes_match_the_specifications() {
    let codes: Vec<u8> = (0..=255).collect();
    for i in 0..256 {
        let (sign, exponent, mantissa) = (i >> 7, i >> 3 & 15, (i & 7) as f32);
        let magnitude = if exponent == 0 {
            mantissa / 512.0
        } else {
            (8.0 + mantissa) * 2f32.powi(exponent - 10)
        };
        let value = if sign == 1 { -magnitude } else { magnitude };
        let decoded =
            [Element::E4M3.get(&codes, i as usize), BlockScale::E4M3.get(&codes, i as usize)];
        assert!(
            decoded.iter().all(|x| *x == value || i & 127 == 127 && x.is_nan()),
            "{i}: {decoded:?}, not {value}"
        );
        let power = BlockScale::E8M0.get(&codes, i as usize);
        assert!(
            f64::from(power) == 2f64.powi(i - 127) || i == 255 && power.is_nan(),
            "{i}: {power}"
        );
    }
    let nibbles: Vec<f32> = (0..16)
        .map(|i| Element::E2M1.get(&[0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe], i))
        .collect();
    assert_eq!(nibbles[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    assert!(nibbles[..8].iter().zip(&nibbles[8..]).all(|(a, b)| a == &-b && b.is_sign_negative()));
}

#[test]
fn rows_of_a_block_share_its_scales() {
    let format = Format::BlockScaled(BlockScaled {
        element: Element::E4M3,
        block_rows: 2,
        block_cols: 3,
        scale: BlockScale::E8M0,
    });
    // 0x38 is 1.0. The blocks at the right and bottom edges are partial.
    let bytes = [&[0x38; 3 * 4][..], &[127, 128, 129, 130]].concat();
    let matrix = MatrixShape { rows: 3, cols: 4, format }.view(&bytes).unwrap();
    for (i, values) in
        [[1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 2.0], [4.0, 4.0, 4.0, 8.0]].into_iter().enumerate()
    {
        let planes = matrix.row(i);
        let mut row = [0.0; 4];
        format.dequantize(planes, &mut row);
        assert_eq!(row, values, "row {i}");
    }
}
