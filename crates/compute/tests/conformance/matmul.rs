//! MatMul and Embed: every format.

use moeflux_compute::{BlockScale, Element, Format, Isa, MatrixShape, Op, Scalar, View};

use crate::harness::{Both, FOUR, Random, bits, bytes, device, formats, read, some_formats};

/// Inputs that fit a format, some of them no whole number of vectors.
fn widths(format: Format) -> Vec<usize> {
    match format {
        Format::Plain(_) => vec![1, 7, 64, 129],
        Format::Affine { group, .. } => {
            vec![group as usize, 3 * group as usize, 5 * group as usize]
        }
        Format::Scaled { element, block_cols, .. } => {
            let block = block_cols as usize;
            let odd =
                if element == Element::E4M3 { [1, 3 * block + 7] } else { [2, 3 * block + 10] };
            vec![block, 3 * block, 2 * block + block / 4 * 2, odd[0], odd[1]]
        }
    }
}

/// As DeepSeek-V3 has it, with smaller blocks.
const FP8: Format = Format::Scaled {
    element: Element::E4M3,
    block_rows: 32,
    block_cols: 64,
    scale: BlockScale::Plain(Scalar::F32),
};

#[test]
fn every_format_on_the_exact_path() {
    let mut random = Random::new(1);
    Both::each(|both, exact| {
        for (i, format) in formats().into_iter().enumerate() {
            for cols in widths(format) {
                let weight = both.weight(&mut random, MatrixShape { rows: 21, cols, format });
                let rows = [1, 2, 7][i % 3];
                let x = both.random(&mut random, rows, cols);
                let out = both.poisoned(rows, 21);
                let bias = (i % 2 == 0).then(|| both.numbers(&random.numbers(21)));
                // On the fast path, routers ask for the exact one.
                let exact = !exact || i % 2 == 0;
                if exact
                    || matches!(format, Format::Plain(_))
                    || both.device.describe().ends_with("exact")
                {
                    both.run(&Op::MatMul { x, weight, bias, exact, out });
                    both.agree(&format!("{rows} rows, {cols} inputs, {format}"), out, 1e-5);
                }
            }
        }
    });
}

#[test]
fn every_format_on_the_fast_path() {
    let mut random = Random::new(2);
    Both::each_fast(|both| {
        // A GPU makes kernels for each shape.
        for format in if both.fast_gpu() { some_formats() } else { formats() } {
            for cols in widths(format) {
                for rows in [1, 2, 6] {
                    let weight = both.weight(&mut random, MatrixShape { rows: 19, cols, format });
                    let out = both.poisoned(rows, 19);
                    let what = format!("{rows} rows, {cols} inputs, {format}");
                    // Numbers that rounding leaves alone show the kernels to be exact.
                    let x = both.dense(rows, &random.whole(rows * cols));
                    both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
                    both.agree(&what, out, 1e-5);
                    let x = both.random(&mut random, rows, cols);
                    both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
                    both.agree_in_sum(&what, out, 1e-2);
                }
            }
        }
    });
}

#[test]
fn few_rows_and_many_short_outputs() {
    let mut random = Random::new(12);
    let affine = |bits, group, scale| Format::Affine { bits, group, scale };
    Both::each_fast(|both| {
        for format in [
            affine(2, 32, Scalar::BF16),
            affine(4, 32, Scalar::F16),
            affine(4, 64, Scalar::BF16),
            affine(8, 64, Scalar::F32),
            Format::MXFP4,
            Format::NVFP4,
        ] {
            // As many outputs as workers take at once, several times.
            let weight = both.weight(&mut random, MatrixShape { rows: 1100, cols: 192, format });
            for rows in [1, 3] {
                let (x, out) = (both.random(&mut random, rows, 192), both.poisoned(rows, 1100));
                both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
                both.agree_in_sum(&format!("{rows} rows, {format}"), out, 1e-2);
                let x = both.dense(rows, &random.whole(rows * 192));
                both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
                both.agree(&format!("{rows} rows, {format}"), out, 1e-5);
            }
        }
    });
}

#[test]
fn many_rows_and_outputs() {
    let mut random = Random::new(3);
    Both::each(|both, exact| {
        for format in [FOUR, Format::MXFP4, FP8, Format::Plain(Scalar::BF16)] {
            let weight = both.weight(&mut random, MatrixShape { rows: 70, cols: 320, format });
            let x = both.random(&mut random, 131, 320);
            let out = both.poisoned(131, 70);
            both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
            let rounds = !exact && both.rounds_many(format);
            both.agree(&format!("{format}"), out, if rounds { 3e-2 } else { 1e-5 });
            both.agree_in_sum(&format!("{format}"), out, if rounds { 6e-3 } else { 1e-6 });
        }
    });
}

#[test]
fn many_rows_of_every_format() {
    let mut random = Random::new(9);
    Both::each(|both, exact| {
        for (i, format) in some_formats().into_iter().enumerate() {
            for (j, cols) in widths(format).into_iter().enumerate().skip(i % 2).step_by(2) {
                let (rows, outputs) = (17 + (i * 7 + j * 19) % 54, 1 + (i * 31 + j * 47) % 97);
                let weight = both.weight(&mut random, MatrixShape { rows: outputs, cols, format });
                // Windows that begin anywhere.
                let (all, to) = (
                    both.random(&mut random, rows + 1, cols + 5),
                    both.poisoned(rows, outputs + 3),
                );
                let (x, out) =
                    (all.slice(1, rows).columns(i % 5, cols), to.columns(j % 3, outputs));
                let bias = (i % 3 == 0).then(|| both.numbers(&random.numbers(outputs)));
                both.run(&Op::MatMul { x, weight, bias, exact: false, out });
                let what = format!("{rows} rows, {cols} inputs, {outputs} outputs, {format}");
                let rounds = !exact && both.rounds_many(format);
                both.agree(&what, out, if rounds { 3e-2 } else { 1e-5 });
                both.agree_in_sum(&what, out, if rounds { 1e-2 } else { 1e-6 });
                let written = both.read(to).iter().filter(|x| !x.is_nan()).count();
                assert_eq!(
                    written,
                    rows * outputs,
                    "{what}: nothing is written outside the window"
                );
            }
        }
    });
}

/// Rows of whole chunks of 32, with scales that f16 holds and others.
#[test]
fn many_rows_in_whole_chunks() {
    let mut random = Random::new(13);
    Both::each(|both, exact| {
        for format in some_formats().into_iter().chain([FP8]) {
            let cols = match format {
                Format::Plain(_) => 160,
                Format::Affine { group, .. } => 3 * group as usize,
                Format::Scaled { block_cols, .. } => 3 * (block_cols as usize).max(32),
            };
            let shape = MatrixShape { rows: 67, cols, format };
            let of = random.matrix(shape);
            let mut small = of.clone();
            let parts = shape.plane_bytes().unwrap();
            // Of the scales, the byte with the highest bits of the exponent; biases follow them.
            let less = |scales: &mut [u8], size: usize, by: u8| {
                scales.iter_mut().skip(size - 1).step_by(size).for_each(|high| *high -= by);
            };
            match format {
                Format::Affine { scale: Scalar::F16, .. } => {
                    less(&mut small[parts.weights..], 2, 4 << 2)
                }
                Format::Affine { scale, .. } => less(&mut small[parts.weights..], scale.bytes(), 7),
                Format::Scaled { scale: BlockScale::E8M0, .. } => {
                    less(&mut small[parts.weights..], 1, 13)
                }
                _ => {}
            }
            for (of, what) in [(&of, "usual scales"), (&small, "small scales")] {
                let weight = both.weight_of(shape, of);
                let (x, out) = (both.random(&mut random, 41, cols), both.poisoned(41, 67));
                both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
                let rounds = !exact && both.rounds_many(format);
                both.agree_in_sum(
                    &format!("{format}, {what}"),
                    out,
                    if rounds { 6e-3 } else { 1e-6 },
                );
            }
        }
    });
}

#[test]
fn a_code_that_is_no_number_among_many_rows() {
    let mut random = Random::new(14);
    Both::each(|both, _| {
        for format in [Format::MXFP8, FP8] {
            let shape = MatrixShape { rows: 9, cols: 128, format };
            let mut of = random.matrix(shape);
            of[4 * 128 + 77] = 0xff;
            let weight = both.weight_of(shape, &of);
            let (x, out) = (both.random(&mut random, 40, 128), both.poisoned(40, 9));
            both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
            for (i, y) in both.read(out).iter().enumerate() {
                assert_eq!(y.is_nan(), i % 9 == 4, "{format}, output {}", i % 9);
            }
        }
    });
}

#[test]
fn rows_longer_than_what_workgroups_remember() {
    let mut random = Random::new(11);
    let six = Format::Affine { bits: 6, group: 128, scale: Scalar::F16 };
    Both::each(|both, exact| {
        for (i, format) in
            [FOUR, six, Format::MXFP4, Format::NVFP4, FP8, Format::Plain(Scalar::BF16)]
                .into_iter()
                .enumerate()
        {
            // The last section is shorter than the others.
            let cols = 25_600 + 128 * i;
            let weight = both.weight(&mut random, MatrixShape { rows: 6, cols, format });
            let x = both.dense(2, &random.whole(2 * cols));
            let out = both.poisoned(2, 6);
            let bias = (i % 2 == 0).then(|| both.numbers(&random.numbers(6)));
            both.run(&Op::MatMul { x, weight, bias, exact, out });
            both.agree(&format!("{cols} inputs, {format}"), out, 2e-5);
        }
    });
}

#[test]
fn rows_of_any_size() {
    let mut random = Random::new(10);
    Both::each(|both, exact| {
        for format in [FOUR, Format::Plain(Scalar::BF16)] {
            let weight = both.weight(&mut random, MatrixShape { rows: 33, cols: 128, format });
            let sizes = [1e-12, 1e-6, 1.0, 3e4, 1e6, 1e12];
            let mut numbers = random.numbers(36 * 128);
            numbers.iter_mut().enumerate().for_each(|(i, x)| *x *= sizes[i / 128 % 6]);
            numbers[5 * 128..6 * 128].fill(0.0);
            let (x, out) = (both.dense(36, &numbers), both.poisoned(36, 33));
            both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
            for row in (0..36).filter(|row| *row != 5) {
                let tolerance = if exact { 1e-5 } else { 2e-2 };
                both.agree_in_sum(&format!("{format}, row {row}"), out.slice(row, 1), tolerance);
            }
            assert!(both.read(out.slice(5, 1)).iter().all(|x| *x == 0.0));
        }
    });
}

#[test]
fn windows_with_strides() {
    let mut random = Random::new(4);
    Both::each(|both, exact| {
        let weight = both.weight(&mut random, MatrixShape { rows: 9, cols: 64, format: FOUR });
        let all = both.random(&mut random, 5, 200);
        let to = both.poisoned(5, 30);
        let (x, out) = (all.slice(1, 3).columns(101, 64), to.slice(2, 3).columns(7, 9));
        both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
        both.agree("windows", out, if exact { 1e-5 } else { 3e-2 });
        let written = both.read(to).iter().filter(|x| !x.is_nan()).count();
        assert_eq!(written, 27, "nothing is written outside the window");
    });
}

#[test]
fn neither_threads_nor_other_rows_change_a_bit() {
    let mut random = Random::new(5);
    let quants = [2, 3, 5, 6, 8].map(|bits| Format::Affine { bits, group: 32, scale: Scalar::F16 });
    let others = [FOUR, Format::MXFP4, Format::NVFP4, FP8, Format::Plain(Scalar::F32)];
    let all = [&quants[..], &others].concat();
    for (isa, format) in
        Isa::available().into_iter().flat_map(|isa| all.iter().map(move |f| (isa, *f)))
    {
        // Rows of quants end within what is unpacked at once.
        let cols = if quants.contains(&format) { 352 } else { 320 };
        let shape = MatrixShape { rows: 37, cols, format };
        let (weights, numbers) = (random.matrix(shape), random.numbers(11 * shape.cols));
        for exact in [true, false] {
            let together: Vec<Vec<u32>> = (1..4)
                .map(|threads| {
                    let mut device = device(isa, exact, threads);
                    let weight = device.weight(shape, bytes(&weights)).unwrap();
                    let x = View::rows(device.buffer(numbers.len()).unwrap(), 11, shape.cols);
                    let out = View::rows(device.buffer(11 * 37).unwrap(), 11, 37);
                    device.write(x.buffer, &numbers).unwrap();
                    device.run(&Op::MatMul { x, weight, bias: None, exact: false, out }).unwrap();
                    let together = read(&mut *device, out);
                    let mut alone = Vec::new();
                    for rows in [1, 2, 3, 4, 5, 8, 11] {
                        device.write(out.buffer, &[f32::NAN; 11 * 37]).unwrap();
                        for first in (0..11).step_by(rows) {
                            let rows = rows.min(11 - first);
                            let (x, out) = (x.slice(first, rows), out.slice(first, rows));
                            device
                                .run(&Op::MatMul { x, weight, bias: None, exact: false, out })
                                .unwrap();
                        }
                        let got = read(&mut *device, out);
                        if rows == 1 {
                            alone = bits(&got);
                        }
                        let what = format!("{isa}, {format}, {rows} rows at once");
                        // On the fast path, quants sum in another order where more than four rows meet them.
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

#[test]
fn what_is_not_finite_stays_so() {
    let mut random = Random::new(6);
    Both::each(|both, _| {
        for bad in [f32::NAN, f32::INFINITY] {
            let weight = both.weight(&mut random, MatrixShape { rows: 5, cols: 64, format: FOUR });
            let mut numbers = random.numbers(128);
            numbers[70] = bad;
            let (x, out) = (both.dense(2, &numbers), both.poisoned(2, 5));
            both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
            let got = both.read(out);
            assert!(
                got[..5].iter().all(|x| x.is_finite()) && got[5..].iter().all(|x| !x.is_finite()),
                "{got:?}"
            );
            // Among many rows.
            let mut numbers = random.numbers(40 * 64);
            numbers[19 * 64 + 3] = bad;
            let (x, out) = (both.dense(40, &numbers), both.poisoned(40, 5));
            both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
            for (i, x) in both.read(out).iter().enumerate() {
                assert_eq!(x.is_finite(), i / 5 != 19, "row {}", i / 5);
            }
        }
    });
}

#[test]
fn rows_of_zeros_give_zero() {
    let mut random = Random::new(7);
    Both::each(|both, _| {
        let weight = both.weight(&mut random, MatrixShape { rows: 5, cols: 64, format: FOUR });
        let (x, out) = (both.dense(1, &[0.0; 64]), both.poisoned(1, 5));
        both.run(&Op::MatMul { x, weight, bias: None, exact: false, out });
        assert_eq!(both.read(out), [0.0; 5]);
    });
}

#[test]
fn embedding_is_exact_in_every_format() {
    let mut random = Random::new(8);
    Both::each(|both, _| {
        for format in formats() {
            let cols = widths(format)[2];
            let table = both.weight(&mut random, MatrixShape { rows: 11, cols, format });
            let out = both.poisoned(3, cols);
            both.run(&Op::Embed { table, tokens: &[10, 0, 10], out });
            both.agree(&format!("{format}"), out, 0.0);
        }
    });
}
