//! LatentAttention: formats, plain and transposed matrices, chunks, sequences, threads.

use moeflux_compute::{
    BlockScaled, Format, HeadMatrix, HeadRows, Isa, KV_BLOCK, MatrixShape, Op, Scalar,
    ScaledBlocks, Span, State, StateShape, View,
};

use crate::harness::{
    AFFINE4, DevicePair, Random, affine_unit, bits, bytes, device, read, row_chunks,
};

/// Number of heads, and widths as DeepSeek-V3 names them: latent, key without and with RoPE, value.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    latent: usize,
    nope: usize,
    rope: usize,
    value: usize,
}

impl Shape {
    fn scale(&self) -> f32 {
        1.0 / ((self.nope + self.rope) as f32 * self.latent as f32).sqrt()
    }

    fn state(&self, positions: usize) -> StateShape {
        StateShape::KeyValue {
            kv_heads: 1,
            key_width: self.latent + self.rope,
            value_width: 0,
            positions,
        }
    }

    /// One matrix with the key and value rows of each head in turn, as `kv_b_proj`.
    fn whole(&self, format: Format) -> (MatrixShape, [HeadRows; 2]) {
        let stride = self.nope + self.value;
        let rows = |first, count| HeadRows { stride, first, count };
        let shape = MatrixShape { rows: self.heads * stride, cols: self.latent, format };
        (shape, [rows(0, self.nope), rows(self.nope, self.value)])
    }

    /// A matrix of the keys or of the values alone.
    fn split(&self, outputs: usize, transposed: bool, format: Format) -> (MatrixShape, HeadRows) {
        let (count, cols) =
            if transposed { (self.latent, outputs) } else { (outputs, self.latent) };
        (
            MatrixShape { rows: self.heads * count, cols, format },
            HeadRows { stride: count, first: 0, count },
        )
    }
}

struct Case {
    shape: Shape,
    q: View,
    k: View,
    keys: HeadMatrix,
    values: HeadMatrix,
    out: View,
}

impl Case {
    fn new(
        pair: &mut DevicePair,
        random: &mut Random,
        (shape, rows): (Shape, usize),
        [keys, values]: [HeadMatrix; 2],
    ) -> Self {
        let Shape { heads, latent, nope, rope, value } = shape;
        Self {
            shape,
            q: pair.random(random, rows, heads * (nope + rope)).split(heads),
            k: pair.f16_values(random, rows, latent + rope),
            keys,
            values,
            out: pair.nan_filled(rows, heads * value).split(heads),
        }
    }

    fn whole(
        pair: &mut DevicePair,
        random: &mut Random,
        shape: Shape,
        rows: usize,
        format: Format,
    ) -> Self {
        let (matrix, head_rows) = shape.whole(format);
        let weight = pair.weight(random, matrix);
        let matrices =
            head_rows.map(|head_rows| HeadMatrix { weight, head_rows, transposed: false });
        Self::new(pair, random, (shape, rows), matrices)
    }

    fn split(
        pair: &mut DevicePair,
        random: &mut Random,
        (shape, rows, format): (Shape, usize, Format),
        transposed: [bool; 2],
    ) -> Self {
        let outputs = [(shape.nope, transposed[0]), (shape.value, transposed[1])];
        let matrices = outputs.map(|(outputs, transposed)| {
            let (matrix, head_rows) = shape.split(outputs, transposed, format);
            HeadMatrix { weight: pair.weight(random, matrix), head_rows, transposed }
        });
        Self::new(pair, random, (shape, rows), matrices)
    }

    fn run(&self, pair: &mut DevicePair, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|s| s.rows).sum();
        pair.run(&Op::LatentAttention {
            q: self.q.slice(first, rows),
            k: self.k.slice(first, rows),
            keys: self.keys,
            values: self.values,
            scale: self.shape.scale(),
            spans,
            out: self.out.slice(first, rows),
        });
    }

    /// Runs all rows in chunks of the given sizes, repeated as needed. Returns the output's bit
    /// patterns.
    fn in_chunks(&self, pair: &mut DevicePair, state: State, chunks: &[usize]) -> Vec<u32> {
        for rows in row_chunks(self.q.rows, chunks) {
            let span = Span::new(state, rows.start, rows.len());
            self.run(pair, rows.start, &[span]);
        }
        pair.agree(&format!("{:?}, chunks of {chunks:?}", self.shape), self.out, 1e-5);
        bits(&pair.read(self.out))
    }
}

#[test]
fn every_format_in_both_directions() {
    let mut random = Random::new(91);
    DevicePair::for_each(|pair, _| {
        for (i, format) in pair.formats().into_iter().enumerate() {
            let unit = match format {
                Format::Affine(affine) => affine_unit(affine),
                Format::BlockScaled(BlockScaled { block_cols, .. }) => block_cols as usize,
                Format::Plain(_) => [1, 7, 64][i % 3],
                Format::Blocks(kind) | Format::ScaledBlocks(ScaledBlocks(kind)) => {
                    kind.block_weights()
                }
            };
            let (latent, rows) = (unit * (1 + i % 2), [1, 2, 5, 18][i % 4]);
            let (heads, rope) = ([1, 3][i % 2], [0, 2, 5][i % 3]);
            let odd = Shape { heads, latent, nope: 9, rope, value: 6 };
            let case = Case::whole(pair, &mut random, odd, rows, format);
            let state = pair.state(odd.state(rows));
            case.in_chunks(pair, state, &[rows]);
            let transposed = [[true, false], [false, true], [true, true]][i % 3];
            let width = |transposed| if transposed { unit } else { 7 };
            let even = Shape { nope: width(transposed[0]), value: width(transposed[1]), ..odd };
            let case = Case::split(pair, &mut random, (even, rows, format), transposed);
            let state = pair.state(even.state(rows + 3));
            case.in_chunks(pair, state, &[1, 3]);
        }
    });
}

#[test]
fn chunk_boundaries_do_not_change_results() {
    let mut random = Random::new(92);
    DevicePair::for_each(|pair, _| {
        let shape = Shape { heads: 2, latent: 64, nope: 64, rope: 3, value: 33 };
        let rows = 2 * KV_BLOCK + 18;
        let case = Case::split(pair, &mut random, (shape, rows, AFFINE4), [true, false]);
        let [one, other, third] = [rows, rows, 3 * KV_BLOCK].map(|n| pair.state(shape.state(n)));
        let at_once = case.in_chunks(pair, one, &[rows]);
        assert!(case.in_chunks(pair, other, &[KV_BLOCK + 1, 7, 250]) == at_once);
        assert!(case.in_chunks(pair, third, &[KV_BLOCK]) == at_once);
        // More rows than a tile.
        let plain = Shape { heads: 1, latent: 8, nope: 4, rope: 2, value: 3 };
        let case = Case::whole(pair, &mut random, plain, 1100, Format::Plain(Scalar::BF16));
        let state = pair.state(plain.state(1100));
        case.in_chunks(pair, state, &[1100]);
    });
}

#[test]
fn published_shape_with_several_sequences() {
    let mut random = Random::new(93);
    DevicePair::for_each(|pair, _| {
        let shape = Shape { heads: 3, latent: 512, nope: 128, rope: 64, value: 128 };
        let case = Case::whole(pair, &mut random, shape, 12, AFFINE4);
        let [one, other, third] = [(); 3].map(|()| pair.state(shape.state(12)));
        case.run(pair, 0, &[Span::new(one, 0, 4)]);
        let spans = [Span::new(other, 0, 3), Span::new(one, 4, 4), Span::new(third, 0, 1)];
        case.run(pair, 4, &spans);
        pair.agree("several sequences", case.out, 1e-5);
        let together = bits(&pair.read(case.out));
        for (span, first) in spans.into_iter().zip([4, 7, 11]) {
            case.run(pair, first, &[span]);
        }
        assert!(pair.is_gpu() || bits(&pair.read(case.out)) == together);
    });
}

#[test]
fn absorbed_form_agrees_with_the_expanded_form() {
    let mut random = Random::new(94);
    DevicePair::for_each(|pair, _| {
        let shape = Shape { heads: 3, latent: 64, nope: 20, rope: 6, value: 12 };
        let case = Case::whole(pair, &mut random, shape, 40, AFFINE4);
        let state = pair.state(shape.state(40));
        case.in_chunks(pair, state, &[40]);
        let expanded = pair.read(case.out);
        let Shape { heads, latent, nope, rope, .. } = shape;
        let q = pair.nan_filled(40, heads * (latent + rope)).split(heads);
        let latents = pair.nan_filled(40, heads * latent).split(heads);
        let spans = [Span::new(state, 0, 40)];
        let (x, matrix) = (case.q.slice_width(0, nope), case.keys.transpose());
        pair.run(&Op::HeadMatMul { x, matrix, out: q.slice_width(0, latent) });
        let (x, out) = (case.q.slice_width(nope, rope), q.slice_width(latent, rope));
        let (frequencies, pairs, scale) = (&[][..], moeflux_compute::RopePairs::Halves, 1.0);
        let positions = moeflux_compute::RopePositions::Spans(&spans);
        pair.run(&Op::Rope { x, frequencies, pairs, scale, positions, out });
        pair.run(&Op::Attention {
            q,
            k: case.k,
            v: None,
            gate: None,
            scale: shape.scale(),
            window: None,
            sinks: None,
            positions: None,
            spans: &spans,
            out: latents,
        });
        pair.run(&Op::HeadMatMul { x: latents, matrix: case.values, out: case.out });
        crate::harness::close("the absorbed form", &pair.read(case.out), &expanded, 1e-5);
    });
}

#[test]
fn results_do_not_depend_on_threads() {
    let mut random = Random::new(95);
    let shape = Shape { heads: 2, latent: 64, nope: 10, rope: 4, value: 12 };
    let rows = KV_BLOCK + 45;
    for (isa, format) in Isa::available()
        .into_iter()
        .flat_map(|isa| [AFFINE4, Format::Plain(Scalar::F16)].map(|f| (isa, f)))
    {
        let (matrix, [key_rows, value_rows]) = shape.whole(format);
        let weights = random.matrix(matrix);
        let (queries, mut latents) = (random.values(rows * 2 * 14), random.values(rows * 68));
        // Values that f16 represents exactly, as some of the devices have an f32 KV cache.
        latents.iter_mut().for_each(|x| *x = half::f16::from_f32(*x).to_f32());
        let all: Vec<_> = [(1, true), (2, false), (3, false), (5, true)]
            .into_iter()
            .map(|(threads, exact)| {
                let mut device = device(isa, exact, threads);
                let weight = device.weight(matrix, bytes(&weights)).unwrap();
                let matrix = |head_rows| HeadMatrix { weight, head_rows, transposed: false };
                let mut view =
                    |width: usize| View::rows(device.buffer(rows * width).unwrap(), rows, width);
                let (q, k, out) = (view(28).split(2), view(68), view(24).split(2));
                device.write(q.buffer, &queries).unwrap();
                device.write(k.buffer, &latents).unwrap();
                let state = device.state(shape.state(rows)).unwrap();
                let op = Op::LatentAttention {
                    q,
                    k,
                    keys: matrix(key_rows),
                    values: matrix(value_rows),
                    scale: shape.scale(),
                    spans: &[Span::new(state, 0, rows)],
                    out,
                };
                device.run(&op).unwrap();
                bits(&read(&mut *device, out))
            })
            .collect();
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{isa}, {format}");
    }
}
