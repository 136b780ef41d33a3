//! HeadMatMul: every format, plain and transposed.

use moeflux_compute::{
    Affine, BlockScaled, Format, HeadMatrix, HeadRows, Isa, MatrixShape, Op, Scalar, ScaledBlocks,
    View,
};

use crate::harness::{AFFINE4, DevicePair, Random, affine_unit, bits, bytes, device, read};

#[test]
fn every_format_in_both_directions() {
    let mut random = Random::new(81);
    DevicePair::for_each(|pair, _| {
        for (i, format) in pair.formats().into_iter().enumerate() {
            let cols = match format {
                Format::Affine(affine) => affine_unit(affine) * (1 + i % 3),
                Format::BlockScaled(BlockScaled { block_cols, .. }) => {
                    block_cols as usize * (1 + i % 3)
                }
                Format::Plain(_) => [1, 7, 64, 129][i % 4],
                Format::Blocks(kind) | Format::ScaledBlocks(ScaledBlocks(kind)) => {
                    kind.block_weights() * (1 + i % 3)
                }
            };
            let (heads, rows) = ([1, 3, 5][i % 3], [1, 2, 7][i / 3 % 3]);
            let head_rows = [
                HeadRows { stride: 21, first: 0, count: 21 },
                HeadRows { stride: 40, first: 21, count: 18 },
            ][i % 2];
            let shape = MatrixShape { rows: heads * head_rows.stride, cols, format };
            let weight = pair.weight(&mut random, shape);
            for transposed in [false, true] {
                let (inputs, outputs) =
                    if transposed { (head_rows.count, cols) } else { (cols, head_rows.count) };
                // Heads with gaps between them, as in a projection with a rotary part.
                let all = pair.random(&mut random, rows, heads * (inputs + 3));
                let x = View { heads, width: inputs, head_stride: inputs + 3, ..all };
                let wide_out = pair.nan_filled(rows, heads * (outputs + 1));
                let out = View { heads, width: outputs, head_stride: outputs + 1, ..wide_out };
                pair.run(&Op::HeadMatMul {
                    x,
                    matrix: HeadMatrix { weight, head_rows, transposed },
                    out,
                });
                pair.agree(&format!("{format}, {shape:?}, {transposed}"), out, 1e-5);
                let written = pair.read(wide_out).iter().filter(|x| !x.is_nan()).count();
                assert_eq!(
                    written,
                    rows * heads * outputs,
                    "elements outside the view are written"
                );
            }
        }
    });
}

#[test]
fn many_rows_and_wide_rows() {
    let mut random = Random::new(82);
    DevicePair::for_each(|pair, _| {
        // Wide rows are dequantized one at a time.
        for (heads, rows, cols, count) in [(2, 131, 128, 70), (3, 2, 20_480, 3), (1, 1, 1024, 33)] {
            let head_rows = HeadRows { stride: count + 1, first: 1, count };
            let shape = MatrixShape { rows: heads * head_rows.stride, cols, format: AFFINE4 };
            let weight = pair.weight(&mut random, shape);
            for transposed in [false, true] {
                let (inputs, outputs) = if transposed { (count, cols) } else { (cols, count) };
                let x = pair.random(&mut random, rows, heads * inputs).split(heads);
                let out = pair.nan_filled(rows, heads * outputs).split(heads);
                pair.run(&Op::HeadMatMul {
                    x,
                    matrix: HeadMatrix { weight, head_rows, transposed },
                    out,
                });
                pair.agree(&format!("{shape:?}, {transposed}"), out, 1e-5);
            }
        }
    });
}

#[test]
fn results_do_not_depend_on_threads_or_batching() {
    let mut random = Random::new(83);
    let all = [
        AFFINE4,
        Format::Affine(Affine { bits: 6, group: 32, scale: Scalar::F16 }),
        Format::Plain(Scalar::BF16),
    ];
    for (isa, format) in
        Isa::available().into_iter().flat_map(|isa| all.map(|format| (isa, format)))
    {
        let (head_rows, heads, cols) = (HeadRows { stride: 50, first: 3, count: 45 }, 3, 192);
        let shape = MatrixShape { rows: heads * head_rows.stride, cols, format };
        let (weights, values) = (random.matrix(shape), random.values(11 * heads * cols));
        for transposed in [false, true] {
            let (inputs, outputs) = if transposed { (45, cols) } else { (cols, 45) };
            let together: Vec<Vec<u32>> = [(1, true), (2, false), (3, true)]
                .into_iter()
                .map(|(threads, exact)| {
                    let mut device = device(isa, exact, threads);
                    let weight = device.weight(shape, bytes(&weights)).unwrap();
                    let mut view = |width: usize| {
                        let buffer = device.buffer(11 * heads * width).unwrap();
                        View::rows(buffer, 11, heads * width).split(heads)
                    };
                    let (x, out) = (view(inputs), view(outputs));
                    device.write(x.buffer, &values[..11 * heads * inputs]).unwrap();
                    device
                        .run(&Op::HeadMatMul {
                            x,
                            matrix: HeadMatrix { weight, head_rows, transposed },
                            out,
                        })
                        .unwrap();
                    let together = bits(&read(&mut *device, out));
                    for rows in [1, 2, 3, 5] {
                        device.write(out.buffer, &vec![f32::NAN; together.len()]).unwrap();
                        for first in (0..11).step_by(rows) {
                            let rows = rows.min(11 - first);
                            let (x, out) = (x.slice(first, rows), out.slice(first, rows));
                            device
                                .run(&Op::HeadMatMul {
                                    x,
                                    matrix: HeadMatrix { weight, head_rows, transposed },
                                    out,
                                })
                                .unwrap();
                        }
                        assert!(
                            bits(&read(&mut *device, out)) == together,
                            "{isa}, {format}, {rows} rows per op"
                        );
                    }
                    together
                })
                .collect();
            assert!(together.windows(2).all(|pair| pair[0] == pair[1]), "{isa}, {format}");
        }
    }
}
