//! Affine quants that are stored by inputs, as AWQ and GPTQ publish them, and their landing.

use super::{
    affine::{Affine, quant},
    codec::PlaneBytes,
    plain::Scalar,
    transposed::{marks_bytes, permute_units},
};
use crate::{error::Error, matrix::MatrixShape};

/// Affine quants with zero points, stored by inputs: `w = scale * (q - zero)`.
///
/// The planes in the file are quants in 32-bit words, scales `[inputs / group, outputs]`, and zero
/// points in words `[inputs / group, outputs / quants of a word]`. In memory scales and biases are
/// f32, as `-zero * scale` has more bits than a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InputMajor {
    /// Quants that share a word.
    pub words: WordAxis,
    /// Value that is added to the stored zero points.
    pub zero_offset: u8,
    /// Inputs that share a scale and a zero point: the group in memory, or a multiple of it.
    pub group: u32,
    /// Type of the scales, of 16 bits.
    pub scale: Scalar,
}

/// Quants that share a 32-bit word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WordAxis {
    /// Outputs of one input, the even ones first, as AWQ stores them: `[inputs, outputs / n]`. The
    /// zero points have the same order.
    Outputs,
    /// Inputs of one output, as GPTQ stores them: `[inputs / n, outputs]`. Zero points are those of
    /// neighbouring outputs.
    Inputs,
}

/// Bits of the lowest part of an f32 that a widened 16-bit value leaves zero, and that a zero point
/// takes.
const ZERO_POINT: u32 = 0x1ff;

/// Words of an output that are written at a time: a cache line.
const LINE_WORDS: usize = 16;

/// Words of an output that are computed at a time, in vectors.
const LANES: usize = 8;

impl InputMajor {
    /// Sizes of the planes in the file.
    ///
    /// # Errors
    /// The layout does not fit the format or the shape.
    pub(super) fn plane_bytes(
        self,
        affine: Affine,
        shape: MatrixShape,
    ) -> Result<PlaneBytes, Error> {
        let MatrixShape { rows, cols, .. } = shape;
        let [quants, scales, biases] = shape.plane_bytes()?.0;
        let (group, per_word) = (self.group as usize, 32 / usize::from(affine.bits));
        let fits = matches!(affine.bits, 4 | 8)
            && affine.scale == Scalar::F32
            && self.scale != Scalar::F32
            && group > 0
            && group.is_multiple_of(affine.group.into())
            && cols.is_multiple_of(group)
            && rows.is_multiple_of(per_word);
        let misfit = || {
            Error::Shape(format!(
                "{rows} x {cols} weights of {} bits in groups of {group} are not stored by inputs",
                affine.bits
            ))
        };
        if !fits {
            return Err(misfit());
        }
        let groups = cols / group;
        let file = [quants, groups * rows * self.scale.bytes(), groups * rows / per_word * 4];
        // Marks of single words need the rest of the matrix's memory.
        let rest = (quants + scales + biases).saturating_sub(file.iter().sum());
        if rest < marks_bytes(quants / 4) {
            return Err(misfit());
        }
        Ok(PlaneBytes(file))
    }

    /// Turns the file's planes at the start of `matrix` into those in memory, in place. The shape
    /// was checked by [`InputMajor::plane_bytes`].
    #[inline]
    pub(super) fn land(self, affine: Affine, shape: MatrixShape, matrix: &mut [u8]) {
        let MatrixShape { rows, cols, .. } = shape;
        let per_word = 32 / usize::from(affine.bits);
        let (quants, factors) = matrix.split_at_mut(rows * cols / per_word * 4);
        let groups = cols / self.group as usize;
        let file = groups * rows * self.scale.bytes() + groups * rows / per_word * 4;
        let (_, rest) = factors.split_at_mut(file);
        match (self.words, per_word) {
            (WordAxis::Inputs, _) => land_words::<1>(quants, cols / per_word, rows, rest),
            (WordAxis::Outputs, 4) => land_words::<4>(quants, cols, rows / 4, rest),
            (WordAxis::Outputs, _) => land_words::<8>(quants, cols, rows / 8, rest),
        }
        self.land_factors(affine, shape, file, factors);
    }

    /// Turns scales and zero points in the first `file` bytes of `factors` into scales and biases.
    fn land_factors(self, affine: Affine, shape: MatrixShape, file: usize, factors: &mut [u8]) {
        let MatrixShape { rows, cols, .. } = shape;
        let groups = cols / usize::from(affine.group);
        let end = factors.len() - file;
        factors.copy_within(..file, end);
        // At most half of the factors are in the file, so they are behind the scales in memory.
        let (scales, source) = factors.split_at_mut(end);
        let (file_scales, zeros) =
            source.split_at(cols / self.group as usize * rows * self.scale.bytes());
        let (scales, _) = scales[..groups * rows * 4].as_chunks_mut::<4>();
        for group in 0..groups {
            let first = group * usize::from(affine.group) / self.group as usize * rows;
            for row in 0..rows {
                let scale = self.scale.get(file_scales, first + row).to_bits();
                let zero = self.zero_point(affine.bits, zeros, first, row);
                scales[row * groups + group] = (scale | zero).to_le_bytes();
            }
        }
        let (scales, biases) = factors.split_at_mut(groups * rows * 4);
        let (scales, biases) = (scales.as_chunks_mut::<4>().0, biases.as_chunks_mut::<4>().0);
        for (scale, bias) in scales.iter_mut().zip(biases) {
            let bits = u32::from_le_bytes(*scale);
            *scale = (bits & !ZERO_POINT).to_le_bytes();
            let zero = (bits & ZERO_POINT) as f32;
            *bias = (-zero * f32::from_le_bytes(*scale)).to_le_bytes();
        }
    }

    /// Zero point of output `row`, in the row of zero points that begins at `first`.
    fn zero_point(self, bits: u8, zeros: &[u8], first: usize, row: usize) -> u32 {
        let per_word = 32 / usize::from(bits);
        let place = match self.words {
            WordAxis::Outputs => {
                row / per_word * per_word + place_of_output(per_word, row % per_word)
            }
            WordAxis::Inputs => row,
        };
        u32::from(quant(zeros, bits, first + place)) + u32::from(self.zero_offset)
    }
}

/// Place, among the `per_word` quants of a word, of output `output` of those in it.
const fn place_of_output(per_word: usize, output: usize) -> usize {
    output / 2 + output % 2 * (per_word / 2)
}

/// Transposes `N` words of `N` codes, in each lane: code `k` of word `n` and code `n` of word `k`
/// change places.
fn transpose_codes<const N: usize, const L: usize>(words: &mut [[u32; L]; N]) {
    let (mut half, mut bits) = (N / 2, 16);
    while half > 0 {
        // The lower of every two runs of `bits` bits.
        let low = u32::MAX / ((1 << bits) + 1);
        for k in (0..N).filter(|k| k & half == 0) {
            let (first, second) = words.split_at_mut(k + half);
            for (a, b) in first[k].iter_mut().zip(&mut second[0]) {
                (*a, *b) = (*a & low | (*b & low) << bits, *a >> bits & low | *b & !low);
            }
        }
        (half, bits) = (half / 2, bits / 2);
    }
}

/// Transposes `rows` x `cols` words in place, where a word holds codes of `N` outputs of one input,
/// or of several inputs if `N` is 1: lines of words first, then the words of each column of lines.
/// `room` has marks of single words at least; with more, lines are longer.
fn land_words<const N: usize>(words: &mut [u8], rows: usize, cols: usize, room: &mut [u8]) {
    let fits = |line: usize| {
        cols.is_multiple_of(line)
            && marks_bytes(rows * cols / line).max(rows * line * 4) <= room.len()
    };
    match [64, 32, 16, 8, 4, 2].into_iter().find(|line| fits(*line)) {
        Some(64) => land_lines::<N, 256>(words, rows, cols, room),
        Some(32) => land_lines::<N, 128>(words, rows, cols, room),
        Some(16) => land_lines::<N, 64>(words, rows, cols, room),
        Some(8) => land_lines::<N, 32>(words, rows, cols, room),
        Some(4) => land_lines::<N, 16>(words, rows, cols, room),
        Some(2) => land_lines::<N, 8>(words, rows, cols, room),
        _ => {
            transpose_units::<4>(words, rows, cols, room);
            if N > 1 {
                for column in words.chunks_exact_mut(rows * 4) {
                    let (words, _) = column.as_chunks_mut::<4>();
                    for words in words.as_chunks_mut::<N>().0 {
                        let mut lanes = words.map(|word| [u32::from_le_bytes(word)]);
                        transpose_codes(&mut lanes);
                        *words = std::array::from_fn(|output| {
                            lanes[place_of_output(N, output)][0].to_le_bytes()
                        });
                    }
                    transpose_units::<4>(column, rows / N, N, room);
                }
            }
        }
    }
}

/// Transposes `rows` x `cols` units in place. `room` has a bit for each unit.
fn transpose_units<const BYTES: usize>(
    units: &mut [u8],
    rows: usize,
    cols: usize,
    room: &mut [u8],
) {
    permute_units::<BYTES>(units, room, |unit| unit % rows * cols + unit / rows);
}

/// [`land_words`] by lines of `BYTES` bytes.
fn land_lines<const N: usize, const BYTES: usize>(
    words: &mut [u8],
    rows: usize,
    cols: usize,
    room: &mut [u8],
) {
    let (line, out_words) = (BYTES / 4, rows / N);
    transpose_units::<BYTES>(words, rows, cols / line, room);
    let room = &mut room[..rows * BYTES];
    for column in words.chunks_exact_mut(rows * BYTES) {
        let (src, dst) = (column.as_chunks::<4>().0, room.as_chunks_mut::<4>().0);
        for first in (0..out_words).step_by(LINE_WORDS) {
            let count = LINE_WORDS.min(out_words - first);
            for (i, outputs) in dst.chunks_exact_mut(out_words * N).enumerate() {
                let mut next = first;
                while next + LANES <= first + count {
                    land_run::<N, LANES>(
                        &src[next * N * line + i..],
                        line,
                        &mut outputs[next..],
                        out_words,
                    );
                    next += LANES;
                }
                for word in next..first + count {
                    land_run::<N, 1>(
                        &src[word * N * line + i..],
                        line,
                        &mut outputs[word..],
                        out_words,
                    );
                }
            }
        }
        column.copy_from_slice(room);
    }
}

/// `L` words of each of `N` outputs, `stride` apart, from `N * L` words of a column, `line` apart.
fn land_run<const N: usize, const L: usize>(
    src: &[[u8; 4]],
    line: usize,
    dst: &mut [[u8; 4]],
    stride: usize,
) {
    let mut lanes: [[u32; L]; N] = std::array::from_fn(|k| {
        std::array::from_fn(|word| u32::from_le_bytes(src[(word * N + k) * line]))
    });
    transpose_codes(&mut lanes);
    for output in 0..N {
        let words = lanes[place_of_output(N, output)].map(u32::to_le_bytes);
        dst[output * stride..][..L].copy_from_slice(&words);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{file_layout::FileLayout, format::Format};
    use super::*;
    use moeflux_base::SplitMix64;

    /// Planes in the file of quants `[cols][rows]` and zero points `[groups][rows]`.
    fn file(
        layout: InputMajor,
        affine: Affine,
        shape: MatrixShape,
        quants: &dyn Fn(usize, usize) -> u32,
        factors: &dyn Fn(usize, usize) -> (u16, u32),
    ) -> Vec<u8> {
        let MatrixShape { rows, cols, .. } = shape;
        let (bits, n) = (u32::from(affine.bits), 32 / usize::from(affine.bits));
        let order: &[usize] = match (layout.words, n) {
            (WordAxis::Outputs, 8) => &[0, 2, 4, 6, 1, 3, 5, 7],
            (WordAxis::Outputs, _) => &[0, 2, 1, 3],
            (WordAxis::Inputs, _) => &[0, 1, 2, 3, 4, 5, 6, 7],
        };
        let word = |code: &dyn Fn(usize) -> u32| {
            (0..n).fold(0, |word, i| word | code(order[i]) << (bits * i as u32))
        };
        let mut words = Vec::new();
        match layout.words {
            WordAxis::Outputs => {
                for col in 0..cols {
                    words.extend((0..rows / n).map(|j| word(&|k| quants(n * j + k, col))));
                }
            }
            WordAxis::Inputs => {
                for j in 0..cols / n {
                    words.extend((0..rows).map(|row| word(&|k| quants(row, n * j + k))));
                }
            }
        }
        let groups = cols / layout.group as usize;
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        for group in 0..groups {
            bytes.extend((0..rows).flat_map(|row| factors(row, group).0.to_le_bytes()));
        }
        for group in 0..groups {
            let zero = |row| factors(row, group).1 - u32::from(layout.zero_offset);
            bytes.extend((0..rows / n).flat_map(|j| word(&|k| zero(n * j + k)).to_le_bytes()));
        }
        bytes
    }

    #[test]
    fn quants_stored_by_inputs_land_by_outputs() {
        for (rows, cols, group, file_group) in [
            (64, 32, 32, 32),
            (32, 64, 64, 64),
            (48, 640, 128, 128),
            (40, 512, 64, 256),
            (40, 80, 16, 16),
            (1032, 1536, 32, 32),
        ] {
            for (words, zero_offset) in
                [(WordAxis::Outputs, 0), (WordAxis::Inputs, 1), (WordAxis::Inputs, 0)]
            {
                for bits in [4, 8] {
                    let affine = Affine { bits, group, scale: Scalar::F32 };
                    let shape = MatrixShape { rows, cols, format: Format::Affine(affine) };
                    let scale = if zero_offset == 0 { Scalar::F16 } else { Scalar::BF16 };
                    let layout = InputMajor { words, zero_offset, group: file_group, scale };
                    let hash =
                        |a: usize, b: usize| SplitMix64::new((a << 32 | b) as u64).next_u64();
                    let quants = |row, col| hash(row, col) as u32 & ((1 << bits) - 1);
                    let factors = |row, group| {
                        let random = hash(group, row);
                        let sign = (random >> 20 & 1) as u16;
                        // Neither NaN nor infinite in both types.
                        let scale = sign << 15 | 0x3000 | random as u16 & 0xfff;
                        (scale, u32::from(zero_offset) + (random >> 32) as u32 % (1 << bits))
                    };
                    let file = file(layout, affine, shape, &quants, &factors);
                    let in_file = FileLayout::InputMajor(layout);
                    assert_eq!(file.len(), in_file.plane_bytes(shape).unwrap().total());
                    let mut matrix = file;
                    matrix.resize(shape.plane_bytes().unwrap().total(), 0xaa);
                    in_file.land(shape, &mut matrix).unwrap();
                    let matrix = shape.view(&matrix).unwrap();
                    let mut out = vec![0.0; cols];
                    for row in 0..rows {
                        shape.format.dequantize(matrix.row(row), &mut out);
                        for (col, weight) in out.iter().enumerate() {
                            let (s, z) = factors(row, col / file_group as usize);
                            let s = scale.get(&s.to_le_bytes(), 0);
                            let q = quants(row, col) as f32 - z as f32;
                            assert_eq!(*weight, q * s, "{layout:?}, {bits} bits, {row}, {col}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn other_shapes_are_refused() {
        let affine = Affine { bits: 4, group: 32, scale: Scalar::F32 };
        let (words, scale) = (WordAxis::Inputs, Scalar::F16);
        let layout = InputMajor { words, zero_offset: 1, group: 32, scale };
        let bytes = |layout: InputMajor, affine: Affine, rows, cols| {
            let shape = MatrixShape { rows, cols, format: Format::Affine(affine) };
            FileLayout::InputMajor(layout).plane_bytes(shape)
        };
        assert!(bytes(layout, affine, 8, 32).is_ok());
        assert!(bytes(layout, affine, 12, 32).is_err());
        assert!(bytes(layout, Affine { bits: 3, ..affine }, 8, 32).is_err());
        assert!(bytes(layout, Affine { scale, ..affine }, 8, 32).is_err());
        assert!(bytes(InputMajor { group: 48, ..layout }, affine, 8, 96).is_err());
        assert!(bytes(InputMajor { group: 64, ..layout }, affine, 8, 96).is_err());
    }
}
