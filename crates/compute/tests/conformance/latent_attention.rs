//! LatentAttention: every format, matrices either way, chunks, sessions, threads.

use moeflux_compute::{
    Format, HeadMatrix, HeadRows, Isa, KV_BLOCK, MatrixShape, Op, Scalar, Span, State, StateShape,
    View,
};

use crate::harness::{Both, FOUR, Random, bits, bytes, device, formats, read};

/// Heads and widths.
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

    /// One stack of keys' and values' rows per head, as `kv_b_proj` is.
    fn whole(&self, format: Format) -> (MatrixShape, [HeadRows; 2]) {
        let stride = self.nope + self.value;
        let part = |first, count| HeadRows { stride, first, count };
        let shape = MatrixShape { rows: self.heads * stride, cols: self.latent, format };
        (shape, [part(0, self.nope), part(self.nope, self.value)])
    }

    /// A stack for keys or values alone.
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
        both: &mut Both,
        random: &mut Random,
        (shape, rows): (Shape, usize),
        [keys, values]: [HeadMatrix; 2],
    ) -> Self {
        let Shape { heads, latent, nope, rope, value } = shape;
        Self {
            shape,
            q: both.random(random, rows, heads * (nope + rope)).split(heads),
            k: both.halves(random, rows, latent + rope),
            keys,
            values,
            out: both.poisoned(rows, heads * value).split(heads),
        }
    }

    fn whole(
        both: &mut Both,
        random: &mut Random,
        shape: Shape,
        rows: usize,
        format: Format,
    ) -> Self {
        let (matrix, parts) = shape.whole(format);
        let weight = both.weight(random, matrix);
        let matrices = parts.map(|head_rows| HeadMatrix { weight, head_rows, transposed: false });
        Self::new(both, random, (shape, rows), matrices)
    }

    fn split(
        both: &mut Both,
        random: &mut Random,
        (shape, rows, format): (Shape, usize, Format),
        transposed: [bool; 2],
    ) -> Self {
        let of = [(shape.nope, transposed[0]), (shape.value, transposed[1])];
        let matrices = of.map(|(outputs, transposed)| {
            let (matrix, head_rows) = shape.split(outputs, transposed, format);
            HeadMatrix { weight: both.weight(random, matrix), head_rows, transposed }
        });
        Self::new(both, random, (shape, rows), matrices)
    }

    fn run(&self, both: &mut Both, first: usize, spans: &[Span]) {
        let rows = spans.iter().map(|s| s.rows).sum();
        both.run(&Op::LatentAttention {
            q: self.q.slice(first, rows),
            k: self.k.slice(first, rows),
            keys: self.keys,
            values: self.values,
            scale: self.shape.scale(),
            spans,
            out: self.out.slice(first, rows),
        });
    }

    /// Runs all rows in chunks of given sizes, which are repeated, and returns the output's bits.
    fn in_chunks(&self, both: &mut Both, state: State, chunks: &[usize]) -> Vec<u32> {
        let mut first = 0;
        for rows in chunks.iter().cycle() {
            let rows = *rows.min(&(self.q.rows - first));
            if rows == 0 {
                break;
            }
            self.run(both, first, &[Span { state, position: first, rows }]);
            first += rows;
        }
        both.agree(&format!("{:?}, chunks of {chunks:?}", self.shape), self.out, 1e-5);
        bits(&both.read(self.out))
    }
}

#[test]
fn every_format_either_way() {
    let mut random = Random::new(91);
    Both::each(|both, _| {
        for (i, format) in formats().into_iter().enumerate() {
            let unit = match format {
                Format::Affine { group, .. } => group as usize,
                Format::Scaled { block_cols, .. } => block_cols as usize,
                Format::Plain(_) => [1, 7, 64][i % 3],
            };
            let (latent, rows) = (unit * (1 + i % 2), [1, 2, 5, 18][i % 4]);
            let (heads, rope) = ([1, 3][i % 2], [0, 2, 5][i % 3]);
            let odd = Shape { heads, latent, nope: 9, rope, value: 6 };
            let case = Case::whole(both, &mut random, odd, rows, format);
            let state = both.state(odd.state(rows));
            case.in_chunks(both, state, &[rows]);
            let transposed = [[true, false], [false, true], [true, true]][i % 3];
            let width = |transposed| if transposed { unit } else { 7 };
            let even = Shape { nope: width(transposed[0]), value: width(transposed[1]), ..odd };
            let case = Case::split(both, &mut random, (even, rows, format), transposed);
            let state = both.state(even.state(rows + 3));
            case.in_chunks(both, state, &[1, 3]);
        }
    });
}

#[test]
fn chunks_that_end_anywhere() {
    let mut random = Random::new(92);
    Both::each(|both, _| {
        let shape = Shape { heads: 2, latent: 64, nope: 64, rope: 3, value: 33 };
        let rows = 2 * KV_BLOCK + 18;
        let case = Case::split(both, &mut random, (shape, rows, FOUR), [true, false]);
        let [one, other, third] = [rows, rows, 3 * KV_BLOCK].map(|n| both.state(shape.state(n)));
        let at_once = case.in_chunks(both, one, &[rows]);
        assert!(case.in_chunks(both, other, &[KV_BLOCK + 1, 7, 250]) == at_once);
        assert!(case.in_chunks(both, third, &[KV_BLOCK]) == at_once);
        // More rows than a tile has.
        let plain = Shape { heads: 1, latent: 8, nope: 4, rope: 2, value: 3 };
        let case = Case::whole(both, &mut random, plain, 1100, Format::Plain(Scalar::BF16));
        let state = both.state(plain.state(1100));
        case.in_chunks(both, state, &[1100]);
    });
}

#[test]
fn the_published_shape_and_several_sessions() {
    let mut random = Random::new(93);
    Both::each(|both, _| {
        let shape = Shape { heads: 3, latent: 512, nope: 128, rope: 64, value: 128 };
        let case = Case::whole(both, &mut random, shape, 12, FOUR);
        let [one, other, third] = [(); 3].map(|()| both.state(shape.state(12)));
        case.run(both, 0, &[Span { state: one, position: 0, rows: 4 }]);
        case.run(
            both,
            4,
            &[
                Span { state: other, position: 0, rows: 3 },
                Span { state: one, position: 4, rows: 4 },
                Span { state: third, position: 0, rows: 1 },
            ],
        );
        both.agree("several sessions", case.out, 1e-5);
    });
}

#[test]
fn the_absorbed_form_agrees() {
    let mut random = Random::new(94);
    Both::each(|both, _| {
        let shape = Shape { heads: 3, latent: 64, nope: 20, rope: 6, value: 12 };
        let case = Case::whole(both, &mut random, shape, 40, FOUR);
        let state = both.state(shape.state(40));
        case.in_chunks(both, state, &[40]);
        let expanded = both.read(case.out);
        let Shape { heads, latent, nope, rope, .. } = shape;
        let q = both.poisoned(40, heads * (latent + rope)).split(heads);
        let found = both.poisoned(40, heads * latent).split(heads);
        let spans = [Span { state, position: 0, rows: 40 }];
        let (x, matrix) = (case.q.slice_width(0, nope), case.keys.transpose());
        both.run(&Op::HeadMatMul { x, matrix, out: q.slice_width(0, latent) });
        let (x, out) = (case.q.slice_width(nope, rope), q.slice_width(latent, rope));
        let (frequencies, pairs, scale) = (&[][..], moeflux_compute::RopePairs::Halves, 1.0);
        both.run(&Op::Rope { x, frequencies, pairs, scale, spans: &spans, out });
        both.run(&Op::Attention {
            q,
            k: case.k,
            v: None,
            gate: None,
            scale: shape.scale(),
            window: None,
            sinks: None,
            positions: None,
            spans: &spans,
            out: found,
        });
        both.run(&Op::HeadMatMul { x: found, matrix: case.values, out: case.out });
        crate::harness::close("the absorbed form", &both.read(case.out), &expanded, 1e-5);
    });
}

#[test]
fn threads_change_no_bit() {
    let mut random = Random::new(95);
    let shape = Shape { heads: 2, latent: 64, nope: 10, rope: 4, value: 12 };
    let rows = KV_BLOCK + 45;
    for (isa, format) in Isa::available()
        .into_iter()
        .flat_map(|isa| [FOUR, Format::Plain(Scalar::F16)].map(|f| (isa, f)))
    {
        let (matrix, [of_keys, of_values]) = shape.whole(format);
        let weights = random.matrix(matrix);
        let (queries, mut latents) = (random.numbers(rows * 2 * 14), random.numbers(rows * 68));
        // Numbers that f16 holds, as one of the devices is exact.
        latents.iter_mut().for_each(|x| *x = half::f16::from_f32(*x).to_f32());
        let all: Vec<_> = [(1, true), (2, false), (3, false), (5, true)]
            .into_iter()
            .map(|(threads, exact)| {
                let mut device = device(isa, exact, threads);
                let weight = device.weight(matrix, bytes(&weights)).unwrap();
                let of = |head_rows| HeadMatrix { weight, head_rows, transposed: false };
                let mut view =
                    |width: usize| View::rows(device.buffer(rows * width).unwrap(), rows, width);
                let (q, k, out) = (view(28).split(2), view(68), view(24).split(2));
                device.write(q.buffer, &queries).unwrap();
                device.write(k.buffer, &latents).unwrap();
                let state = device.state(shape.state(rows)).unwrap();
                let op = Op::LatentAttention {
                    q,
                    k,
                    keys: of(of_keys),
                    values: of(of_values),
                    scale: shape.scale(),
                    spans: &[Span { state, position: 0, rows }],
                    out,
                };
                device.run(&op).unwrap();
                bits(&read(&mut *device, out))
            })
            .collect();
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{isa}, {format}");
    }
}
