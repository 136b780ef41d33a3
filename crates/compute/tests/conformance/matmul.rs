//! MatMul and Embed: formats, GEMV and GEMM, strides, special values.

use moeflux_compute::{
    Affine, BlockScale, BlockScaled, BlockType, Element, Format, Isa, MatrixShape, Op, Scalar,
    ScaledBlocks, View,
};

use crate::{
    harness::{
        AFFINE4, DevicePair, Random, affine_unit, bits, bytes, device, formats, read,
        sample_formats, tests_cpu,
    },
    ops::mat_mul,
};

/// Columns that a format allows; some are not a multiple of a SIMD vector.
fn widths(format: Format) -> Vec<usize> {
    match format {
        Format::Plain(_) => vec![1, 7, 64, 129],
        Format::Blocks(kind) | Format::ScaledBlocks(ScaledBlocks(kind)) => {
            [1, 3, 5].map(|n| n * kind.block_weights()).into()
        }
        Format::Affine(affine) => [1, 3, 5].map(|n| n * affine_unit(affine)).into(),
        Format::BlockScaled(BlockScaled { element, block_cols, .. }) => {
            let block = block_cols as usize;
            let odd =
                if element == Element::E4M3 { [1, 3 * block + 7] } else { [2, 3 * block + 10] };
            vec![block, 3 * block, 2 * block + block / 4 * 2, odd[0], odd[1]]
        }
    }
}

/// FP8 of DeepSeek-V3, with smaller blocks.
const FP8: Format = Format::BlockScaled(BlockScaled {
    element: Element::E4M3,
    block_rows: 32,
    block_cols: 64,
    scale: BlockScale::Plain(Scalar::F32),
});

#[test]
fn every_format_on_the_exact_path() {
    let mut random = Random::new(1);
    DevicePair::for_each(|pair, exact| {
        // A GPU compiles kernels per shape.
        for (i, format) in pair.formats().into_iter().enumerate() {
            for cols in widths(format) {
                let weight = pair.weight(&mut random, MatrixShape { rows: 21, cols, format });
                let rows = [1, 2, 7][i % 3];
                let x = pair.random(&mut random, rows, cols);
                let out = pair.nan_filled(rows, 21);
                let bias = (i % 2 == 0).then(|| pair.buffer(&random.values(21)));
                // The fast path also has exact products, for routers.
                let exact = !exact || i % 2 == 0;
                if exact
                    || matches!(format, Format::Plain(_))
                    || pair.device.describe().ends_with("exact")
                {
                    pair.run(&Op::MatMul { x, weight, bias, exact, answers: x.few(), out });
                    pair.agree(&format!("{rows} rows, {cols} inputs, {format}"), out, 1e-5);
                }
            }
        }
    });
}

#[test]
fn every_format_on_the_fast_path() {
    let mut random = Random::new(2);
    DevicePair::for_each_fast(|pair| {
        // A GPU compiles kernels per shape.
        for format in if pair.is_fast_gpu() { sample_formats() } else { formats() } {
            for cols in widths(format) {
                for rows in [1, 2, 6] {
                    let weight = pair.weight(&mut random, MatrixShape { rows: 19, cols, format });
                    let out = pair.nan_filled(rows, 19);
                    let what = format!("{rows} rows, {cols} inputs, {format}");
                    // Activations that quantization leaves exact isolate the error of the kernels.
                    let x = pair.dense(rows, &random.int8_values(rows * cols));
                    pair.run(&mat_mul(x, weight, false, out));
                    pair.agree(&what, out, 1e-5);
                    let x = pair.random(&mut random, rows, cols);
                    pair.run(&mat_mul(x, weight, false, out));
                    pair.agree_in_norm(&what, out, 1e-2);
                }
            }
        }
    });
}

#[test]
fn every_block_type() {
    let mut random = Random::new(15);
    DevicePair::for_each(|pair, exact| {
        for kind in BlockType::ALL {
            let (cols, format) = (2 * kind.block_weights(), Format::Blocks(kind));
            let weight = pair.weight(&mut random, MatrixShape { rows: 21, cols, format });
            let x = pair.dense(2, &random.int8_values(2 * cols));
            let out = pair.nan_filled(2, 21);
            pair.run(&mat_mul(x, weight, exact, out));
            pair.agree(&format!("{format}"), out, 1e-5);
        }
    });
}

#[test]
fn gemv_of_few_rows_with_many_outputs() {
    let mut random = Random::new(12);
    let affine = |bits, group, scale| Format::Affine(Affine { bits, group, scale });
    DevicePair::for_each_fast(|pair| {
        for format in [
            affine(2, 32, Scalar::BF16),
            affine(4, 32, Scalar::F16),
            affine(4, 64, Scalar::BF16),
            affine(8, 64, Scalar::F32),
            Format::MXFP4,
            Format::NVFP4,
            Format::Blocks(BlockType::Q8_0),
        ] {
            // Several times the outputs that a worker takes at once.
            let weight = pair.weight(&mut random, MatrixShape { rows: 1100, cols: 192, format });
            for rows in [1, 3] {
                let (x, out) = (pair.random(&mut random, rows, 192), pair.nan_filled(rows, 1100));
                pair.run(&mat_mul(x, weight, false, out));
                pair.agree_in_norm(&format!("{rows} rows, {format}"), out, 1e-2);
                let x = pair.dense(rows, &random.int8_values(rows * 192));
                pair.run(&mat_mul(x, weight, false, out));
                pair.agree(&format!("{rows} rows, {format}"), out, 1e-5);
            }
        }
    });
}

#[test]
fn gemm_of_many_rows_and_outputs() {
    let mut random = Random::new(3);
    DevicePair::for_each(|pair, exact| {
        let q5_1 = Format::Blocks(BlockType::Q5_1);
        for format in [AFFINE4, Format::MXFP4, FP8, Format::Plain(Scalar::BF16), q5_1] {
            let weight = pair.weight(&mut random, MatrixShape { rows: 70, cols: 320, format });
            let x = pair.random(&mut random, 131, 320);
            let out = pair.nan_filled(131, 70);
            pair.run(&mat_mul(x, weight, false, out));
            let rounds = !exact && pair.rounds_gemm_activations(format);
            pair.agree(&format!("{format}"), out, if rounds { 3e-2 } else { 1e-5 });
            pair.agree_in_norm(&format!("{format}"), out, if rounds { 6e-3 } else { 1e-6 });
        }
    });
}

#[test]
fn many_rows_of_every_format() {
    let mut random = Random::new(9);
    DevicePair::for_each(|pair, exact| {
        for (i, format) in sample_formats().into_iter().enumerate() {
            for (j, cols) in widths(format).into_iter().enumerate().skip(i % 2).step_by(2) {
                let (rows, outputs) = (17 + (i * 7 + j * 19) % 54, 1 + (i * 31 + j * 47) % 97);
                let weight = pair.weight(&mut random, MatrixShape { rows: outputs, cols, format });
                // Views at unaligned offsets.
                let (all, wide_out) = (
                    pair.random(&mut random, rows + 1, cols + 5),
                    pair.nan_filled(rows, outputs + 3),
                );
                let (x, out) =
                    (all.slice(1, rows).columns(i % 5, cols), wide_out.columns(j % 3, outputs));
                let bias = (i % 3 == 0).then(|| pair.buffer(&random.values(outputs)));
                pair.run(&Op::MatMul { x, weight, bias, exact: false, answers: x.few(), out });
                let what = format!("{rows} rows, {cols} inputs, {outputs} outputs, {format}");
                let rounds = !exact && pair.rounds_gemm_activations(format);
                pair.agree(&what, out, if rounds { 3e-2 } else { 1e-5 });
                pair.agree_in_norm(&what, out, if rounds { 1e-2 } else { 1e-6 });
                let written = pair.read(wide_out).iter().filter(|x| !x.is_nan()).count();
                assert_eq!(
                    written,
                    rows * outputs,
                    "{what}: elements outside the view are written"
                );
            }
        }
    });
}

#[test]
fn many_rows_of_every_block_type() {
    let mut random = Random::new(15);
    DevicePair::for_each(|pair, exact| {
        for (i, format) in pair.formats().into_iter().enumerate() {
            let Format::Blocks(kind) = format else { continue };
            let cols = [3, 1, 5][i % 3] * kind.block_weights();
            let (rows, outputs) = (5 + i * 5 % 27, 1 + i * 31 % 70);
            let weight = pair.weight(&mut random, MatrixShape { rows: outputs, cols, format });
            let x = pair.random(&mut random, rows, cols);
            let out = pair.nan_filled(rows, outputs);
            pair.run(&mat_mul(x, weight, false, out));
            let what = format!("{rows} rows, {cols} inputs, {outputs} outputs, {format}");
            let rounds = !exact && pair.rounds_gemm_activations(format);
            pair.agree_in_norm(&what, out, if rounds { 1e-2 } else { 1e-6 });
        }
    });
}

/// Rows that are longer than a section of the GEMV.
#[test]
fn few_rows_of_long_blocks() {
    let mut random = Random::new(16);
    DevicePair::for_each_fast(|pair| {
        for kind in [BlockType::Q4_0, BlockType::Q4K, BlockType::Q6K, BlockType::IQ4XS] {
            let format = Format::Blocks(kind);
            let cols = 8704;
            let weight = pair.weight(&mut random, MatrixShape { rows: 37, cols, format });
            for rows in [1, 3] {
                let x = pair.dense(rows, &random.int8_values(rows * cols));
                let out = pair.nan_filled(rows, 37);
                pair.run(&mat_mul(x, weight, false, out));
                pair.agree(&format!("{rows} rows, {format}"), out, 2e-5);
            }
        }
    });
}

/// Columns in whole blocks of 32, with scales in the normal range of f16 and below it.
#[test]
fn many_rows_of_whole_blocks() {
    let mut random = Random::new(13);
    DevicePair::for_each(|pair, exact| {
        for format in sample_formats().into_iter().chain([FP8]) {
            let cols = match format {
                Format::Plain(_) => 160,
                Format::Blocks(kind) | Format::ScaledBlocks(ScaledBlocks(kind)) => {
                    3 * kind.block_weights()
                }
                Format::Affine(affine) => 3 * affine_unit(affine),
                Format::BlockScaled(BlockScaled { block_cols, .. }) => {
                    3 * (block_cols as usize).max(32)
                }
            };
            let shape = MatrixShape { rows: 67, cols, format };
            let usual = random.matrix(shape);
            let mut small = usual.clone();
            let planes = shape.plane_bytes().unwrap();
            let [weights, ..] = planes.0;
            // Decreases the exponents of scales, and of the biases that follow them: the high
            // bytes.
            let shrink = |scales: &mut [u8], size: usize, amount: u8| {
                scales.iter_mut().skip(size - 1).step_by(size).for_each(|high| *high -= amount);
            };
            match format {
                Format::Affine(Affine { scale: Scalar::F16, .. }) => {
                    shrink(&mut small[weights..], 2, 4 << 2)
                }
                Format::Affine(Affine { scale, .. }) => {
                    shrink(&mut small[weights..], scale.bytes(), 7)
                }
                Format::BlockScaled(BlockScaled { scale: BlockScale::E8M0, .. }) => {
                    shrink(&mut small[weights..], 1, 13)
                }
                _ => {}
            }
            for (contents, what) in [(&usual, "usual scales"), (&small, "small scales")] {
                let weight = pair.weight_from_bytes(shape, contents);
                let (x, out) = (pair.random(&mut random, 41, cols), pair.nan_filled(41, 67));
                pair.run(&mat_mul(x, weight, false, out));
                let rounds = !exact && pair.rounds_gemm_activations(format);
                pair.agree_in_norm(
                    &format!("{format}, {what}"),
                    out,
                    if rounds { 6e-3 } else { 1e-6 },
                );
            }
        }
    });
}

#[test]
fn a_nan_weight_among_many_rows_affects_its_output_only() {
    let mut random = Random::new(14);
    DevicePair::for_each(|pair, _| {
        for format in [Format::MXFP8, FP8] {
            let shape = MatrixShape { rows: 9, cols: 128, format };
            let mut contents = random.matrix(shape);
            contents[4 * 128 + 77] = 0xff;
            let weight = pair.weight_from_bytes(shape, &contents);
            let (x, out) = (pair.random(&mut random, 40, 128), pair.nan_filled(40, 9));
            pair.run(&mat_mul(x, weight, false, out));
            for (i, y) in pair.read(out).iter().enumerate() {
                assert_eq!(y.is_nan(), i % 9 == 4, "{format}, output {}", i % 9);
            }
        }
    });
}

/// Small floats with an f32 scale per row and block of 32 columns.
fn with_f32_scales(element: Element) -> Format {
    let scale = BlockScale::Plain(Scalar::F32);
    Format::BlockScaled(BlockScaled { element, block_rows: 1, block_cols: 32, scale })
}

/// Whether two values have the same bits, or are NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// All codes, of NaN too.
#[test]
fn every_small_float_is_embedded_as_its_value() {
    let codes: Vec<u8> = (0..=u8::MAX).collect();
    for isa in Isa::available().into_iter().filter(|_| tests_cpu()) {
        let mut pair = DevicePair::new(device(isa, true, 1));
        for element in [Element::E4M3, Element::E2M1] {
            let cols = codes.len() * 8 / element.bits();
            let shape = MatrixShape { rows: 1, cols, format: with_f32_scales(element) };
            let contents = [&codes[..], &1f32.to_le_bytes().repeat(cols / 32)].concat();
            let table = pair.weight_from_bytes(shape, &contents);
            let out = pair.nan_filled(1, cols);
            pair.run(&Op::Embed { table, tokens: &[0], out });
            for (i, ours) in pair.read(out).into_iter().enumerate() {
                assert!(same(ours, element.get(&codes, i)), "{isa}, {i}");
            }
        }
    }
}

/// Includes NaN elements, and scales that overflow or underflow with the factor of raw loads.
#[test]
fn products_of_small_floats_equal_those_of_their_values() {
    const ROWS: usize = 4;
    let cols = 192;
    let x: Vec<f32> = (0..ROWS)
        .flat_map(|r| (0..cols).map(move |i| ((7 * i + 3 * r) % 23) as f32 / 8.0 - 1.3))
        .collect();
    let usual: Vec<u8> = (0..ROWS * cols).map(|i| (i * 37 % 251) as u8 & 0xf7).collect();
    let mut with_nan = usual.clone();
    with_nan[2 * cols + 50] = 0xff;
    // The smallest elements, which a scale of 2^126 leaves finite.
    let small: Vec<u8> = usual.iter().map(|code| code & 0x83).collect();
    for isa in Isa::available().into_iter().filter(|_| tests_cpu()) {
        let mut pair = DevicePair::new(device(isa, true, 1));
        for (elements, scale) in
            [(&usual, 0.37), (&usual, -1e-39), (&with_nan, 0.37), (&small, 2f32.powi(126))]
        {
            let scales: Vec<u8> =
                (1..=6u8).flat_map(|i| (scale / f32::from(i)).to_le_bytes()).collect();
            for (rows, count) in [(1, 1), (4, 1), (3, 2), (4, 3), (4, 4)] {
                let shape = |format| MatrixShape { rows, cols, format };
                let contents = [&elements[..rows * cols], &scales.repeat(rows)].concat();
                let packed = with_f32_scales(Element::E4M3);
                let weight = pair.weight_from_bytes(shape(packed), &contents);
                let wide = pair.nan_filled(rows, cols);
                let tokens: Vec<u32> = (0..rows as u32).collect();
                pair.run(&Op::Embed { table: weight, tokens: &tokens, out: wide });
                let values: Vec<u8> =
                    pair.read(wide).iter().flat_map(|w| w.to_le_bytes()).collect();
                let plain = pair.weight_from_bytes(shape(Format::Plain(Scalar::F32)), &values);
                let x = pair.dense(count, &x[..count * cols]);
                let [ours, expected] = [weight, plain].map(|weight| {
                    let out = pair.nan_filled(count, rows);
                    pair.run(&mat_mul(x, weight, true, out));
                    pair.read(out)
                });
                for (i, (ours, exact)) in ours.into_iter().zip(expected).enumerate() {
                    assert!(
                        same(ours, exact),
                        "{isa}, scale {scale:e}, {rows} rows, {count}, {i}: {ours} and {exact}"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_longer_than_workgroup_memory() {
    let mut random = Random::new(11);
    let six = Format::Affine(Affine { bits: 6, group: 128, scale: Scalar::F16 });
    DevicePair::for_each(|pair, exact| {
        let formats = [
            AFFINE4,
            six,
            Format::MXFP4,
            Format::NVFP4,
            FP8,
            Format::Plain(Scalar::BF16),
            Format::Blocks(BlockType::Q6K),
        ];
        for (i, format) in formats.into_iter().enumerate() {
            // The last section of staged activations is shorter than the others.
            let cols = 25_600 + 128 * i / format.block().cols * format.block().cols;
            let weight = pair.weight(&mut random, MatrixShape { rows: 6, cols, format });
            let x = pair.dense(2, &random.int8_values(2 * cols));
            let out = pair.nan_filled(2, 6);
            let bias = (i % 2 == 0).then(|| pair.buffer(&random.values(6)));
            pair.run(&Op::MatMul { x, weight, bias, exact, answers: x.few(), out });
            pair.agree(&format!("{cols} inputs, {format}"), out, 2e-5);
        }
    });
}

#[test]
fn rows_of_any_magnitude() {
    let mut random = Random::new(10);
    DevicePair::for_each(|pair, exact| {
        for format in [AFFINE4, Format::Plain(Scalar::BF16)] {
            let weight = pair.weight(&mut random, MatrixShape { rows: 33, cols: 128, format });
            let magnitudes = [1e-12, 1e-6, 1.0, 3e4, 1e6, 1e12];
            let mut values = random.values(36 * 128);
            values.iter_mut().enumerate().for_each(|(i, x)| *x *= magnitudes[i / 128 % 6]);
            values[5 * 128..6 * 128].fill(0.0);
            let (x, out) = (pair.dense(36, &values), pair.nan_filled(36, 33));
            pair.run(&mat_mul(x, weight, false, out));
            for row in (0..36).filter(|row| *row != 5) {
                let tolerance = if exact { 1e-5 } else { 2e-2 };
                pair.agree_in_norm(&format!("{format}, row {row}"), out.slice(row, 1), tolerance);
            }
            assert!(pair.read(out.slice(5, 1)).iter().all(|x| *x == 0.0));
        }
    });
}

#[test]
fn strided_views() {
    let mut random = Random::new(4);
    DevicePair::for_each(|pair, exact| {
        let weight = pair.weight(&mut random, MatrixShape { rows: 9, cols: 64, format: AFFINE4 });
        let all = pair.random(&mut random, 5, 200);
        let wide_out = pair.nan_filled(5, 30);
        let (x, out) = (all.slice(1, 3).columns(101, 64), wide_out.slice(2, 3).columns(7, 9));
        pair.run(&mat_mul(x, weight, false, out));
        pair.agree("strided views", out, if exact { 1e-5 } else { 3e-2 });
        let written = pair.read(wide_out).iter().filter(|x| !x.is_nan()).count();
        assert_eq!(written, 27, "elements outside the view are written");
    });
}

#[test]
fn results_do_not_depend_on_threads_or_other_rows() {
    let mut random = Random::new(5);
    let quants =
        [2, 3, 5, 6, 8].map(|bits| Format::Affine(Affine { bits, group: 32, scale: Scalar::F16 }));
    let others = [AFFINE4, Format::MXFP4, Format::NVFP4, FP8, Format::Plain(Scalar::F32)];
    let blocks = [BlockType::Q4_0, BlockType::Q8_0, BlockType::Q4K, BlockType::Q6K];
    let all = [&quants[..], &others, &blocks.map(Format::Blocks)].concat();
    for (isa, format) in
        Isa::available().into_iter().flat_map(|isa| all.iter().map(move |f| (isa, *f)))
    {
        // Quantized rows end in the middle of an unpacked tile.
        let cols = match format {
            Format::Blocks(kind) if kind.block_weights() == 256 => 1280,
            _ if quants.contains(&format) => 352,
            _ => 320,
        };
        let shape = MatrixShape { rows: 37, cols, format };
        let (weights, values) = (random.matrix(shape), random.values(11 * shape.cols));
        for exact in [true, false] {
            let together: Vec<Vec<u32>> = (1..4)
                .map(|threads| {
                    let mut device = device(isa, exact, threads);
                    let weight = device.weight(shape, bytes(&weights)).unwrap();
                    let x = View::rows(device.buffer(values.len()).unwrap(), 11, shape.cols);
                    let out = View::rows(device.buffer(11 * 37).unwrap(), 11, 37);
                    device.write(x.buffer, &values).unwrap();
                    device.run(&mat_mul(x, weight, false, out)).unwrap();
                    let together = read(&mut *device, out);
                    let mut alone = Vec::new();
                    for rows in [1, 2, 3, 4, 5, 8, 11] {
                        device.write(out.buffer, &[f32::NAN; 11 * 37]).unwrap();
                        for first in (0..11).step_by(rows) {
                            let rows = rows.min(11 - first);
                            let (x, out) = (x.slice(first, rows), out.slice(first, rows));
                            device.run(&mat_mul(x, weight, false, out)).unwrap();
                        }
                        let got = read(&mut *device, out);
                        if rows == 1 {
                            alone = bits(&got);
                        }
                        let what = format!("{isa}, {format}, {rows} rows per op");
                        // On the fast path, more than four rows sum quantized products in another
                        // order.
                        if exact || rows <= 4 {
                            assert!(bits(&got) == alone, "{what}");
                        }
                        let largest =
                            together.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
                        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * largest;
                        assert!(got.iter().zip(&together).all(close), "{what}");
                    }
                    bits(&together)
                })
                .collect();
            assert!(together.windows(2).all(|pair| pair[0] == pair[1]), "{isa}, {format}");
        }
    }
}

/// Drafts rely on it: a step that checks a few tokens has the bits of a step for each.
#[test]
fn up_to_four_rows_have_the_bits_of_each_alone() {
    let mut random = Random::new(15);
    let quants =
        [2, 3, 4, 8].map(|bits| Format::Affine(Affine { bits, group: 32, scale: Scalar::BF16 }));
    let others = [Format::MXFP4, Format::NVFP4, FP8, Format::Plain(Scalar::BF16)];
    let blocks = [BlockType::Q4_0, BlockType::Q4K, BlockType::Q6K, BlockType::IQ3S];
    let all = [&quants[..], &others, &blocks.map(Format::Blocks)].concat();
    DevicePair::for_each_fast(|pair| {
        for format in &all {
            let shape = MatrixShape { rows: 70, cols: 768, format: *format };
            let weight = pair.weight(&mut random, shape);
            let (x, out) = (pair.random(&mut random, 4, 768), pair.nan_filled(4, 70));
            let product = |pair: &mut DevicePair, first: usize, rows: usize| {
                let (x, out) = (x.slice(first, rows), out.slice(first, rows));
                pair.run(&mat_mul(x, weight, false, out));
                bits(&pair.read(out))
            };
            let alone: Vec<_> = (0..4).map(|row| product(pair, row, 1)).collect();
            for rows in 2..=4 {
                let what = pair.device.describe();
                assert!(
                    product(pair, 0, rows) == alone[..rows].concat(),
                    "{what}: {format}, {rows} rows"
                );
            }
        }
    });
}

#[test]
fn non_finite_activations_stay_in_their_rows() {
    let mut random = Random::new(6);
    DevicePair::for_each(|pair, _| {
        for bad in [f32::NAN, f32::INFINITY] {
            let weight =
                pair.weight(&mut random, MatrixShape { rows: 5, cols: 64, format: AFFINE4 });
            let mut values = random.values(128);
            values[70] = bad;
            let (x, out) = (pair.dense(2, &values), pair.nan_filled(2, 5));
            pair.run(&mat_mul(x, weight, false, out));
            let got = pair.read(out);
            assert!(
                got[..5].iter().all(|x| x.is_finite()) && got[5..].iter().all(|x| !x.is_finite()),
                "{got:?}"
            );
            // The same in a GEMM.
            let mut values = random.values(40 * 64);
            values[19 * 64 + 3] = bad;
            let (x, out) = (pair.dense(40, &values), pair.nan_filled(40, 5));
            pair.run(&mat_mul(x, weight, false, out));
            for (i, x) in pair.read(out).iter().enumerate() {
                assert_eq!(x.is_finite(), i / 5 != 19, "row {}", i / 5);
            }
        }
    });
}

#[test]
fn rows_of_zeros_give_zero() {
    let mut random = Random::new(7);
    DevicePair::for_each(|pair, _| {
        let weight = pair.weight(&mut random, MatrixShape { rows: 5, cols: 64, format: AFFINE4 });
        let (x, out) = (pair.dense(1, &[0.0; 64]), pair.nan_filled(1, 5));
        pair.run(&mat_mul(x, weight, false, out));
        assert_eq!(pair.read(out), [0.0; 5]);
    });
}

#[test]
fn embedding_is_exact_in_every_format() {
    let mut random = Random::new(8);
    DevicePair::for_each(|pair, _| {
        for format in formats() {
            let cols = widths(format)[2];
            let table = pair.weight(&mut random, MatrixShape { rows: 11, cols, format });
            let out = pair.nan_filled(3, cols);
            pair.run(&Op::Embed { table, tokens: &[10, 0, 10], out });
            pair.agree(&format!("{format}"), out, 0.0);
        }
    });
}
