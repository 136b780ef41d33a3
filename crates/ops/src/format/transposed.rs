//! Plain weights that are stored by inputs, as some fused experts are published, and their landing.

use std::cell::RefCell;

use super::plain::Scalar;
use crate::matrix::MatrixShape;

/// Order of the outputs of a matrix that is stored by inputs: `[inputs, outputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutputOrder {
    /// That of the rows in memory.
    Rows,
    /// The even rows in memory before the odd ones: gate and up one after the other, which are
    /// interleaved in memory.
    EvenRowsFirst,
}

impl OutputOrder {
    /// Equal parts of the outputs whose rows alternate in memory.
    const fn parts(self) -> usize {
        match self {
            Self::Rows => 1,
            Self::EvenRowsFirst => 2,
        }
    }

    /// Whether a matrix of `rows` outputs has this order.
    #[inline]
    pub(super) const fn fits(self, rows: usize) -> bool {
        rows.is_multiple_of(self.parts())
    }

    /// Transposes a matrix of plain weights in place. The shape was checked.
    #[inline]
    pub(super) fn land(self, scalar: Scalar, shape: MatrixShape, matrix: &mut [u8]) {
        let MatrixShape { rows, cols, .. } = shape;
        let sizes = Transposition { inputs: cols, parts: self.parts(), part: rows / self.parts() };
        match scalar {
            Scalar::F32 => sizes.land::<4>(matrix),
            Scalar::F16 | Scalar::BF16 => sizes.land::<2>(matrix),
        }
    }
}

/// Most bytes that a thread keeps for transpositions, unless a matrix needs more.
const ROOM: usize = 1 << 18;

thread_local! {
    /// Memory for marks of moved lines and for a column of lines.
    static COLUMN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A matrix `[inputs, parts, part]` that becomes `[part, parts, inputs]`.
#[derive(Clone, Copy)]
struct Transposition {
    inputs: usize,
    parts: usize,
    /// Outputs of a part.
    part: usize,
}

impl Transposition {
    /// Moves lines of outputs first, then the weights of each column of lines.
    fn land<const SIZE: usize>(self, matrix: &mut [u8]) {
        let room = |line: &usize| self.room::<SIZE>(*line);
        // The longest lines whose room is small, otherwise those of the least room.
        let lines = || [64, 32, 16, 8, 4, 2].into_iter().filter(|line| self.fits::<SIZE>(*line));
        let line = lines().find(|line| room(line) <= ROOM).or_else(|| lines().min_by_key(room));
        COLUMN.with_borrow_mut(|column| {
            let line = line.unwrap_or(SIZE);
            let room = room(&line);
            column.resize(column.len().max(room), 0);
            let room = &mut column[..room];
            match line {
                64 => self.land_lines::<SIZE, 64>(matrix, room),
                32 => self.land_lines::<SIZE, 32>(matrix, room),
                16 => self.land_lines::<SIZE, 16>(matrix, room),
                8 => self.land_lines::<SIZE, 8>(matrix, room),
                4 => self.land_lines::<SIZE, 4>(matrix, room),
                _ => self.land_lines::<SIZE, SIZE>(matrix, room),
            }
        });
    }

    /// Whether lines of `line` bytes hold whole weights and fill a part.
    fn fits<const SIZE: usize>(self, line: usize) -> bool {
        line >= SIZE && (self.part * SIZE).is_multiple_of(line)
    }

    /// Bytes of the marks, or of a column of lines.
    fn room<const SIZE: usize>(self, line: usize) -> usize {
        let Self { inputs, parts, part } = self;
        marks_bytes(inputs * parts * part * SIZE / line).max(inputs * parts * line)
    }

    fn land_lines<const SIZE: usize, const LINE: usize>(self, matrix: &mut [u8], room: &mut [u8]) {
        let Self { inputs, parts, part } = self;
        let lines = part * SIZE / LINE;
        permute_units::<LINE>(matrix, room, |unit| {
            let (line, part, input) =
                (unit / (parts * inputs), unit / inputs % parts, unit % inputs);
            (input * parts + part) * lines + line
        });
        if LINE == SIZE {
            return;
        }
        let room = &mut room[..inputs * parts * LINE];
        for column in matrix.chunks_exact_mut(room.len()) {
            let (src, _) = column.as_chunks::<LINE>();
            // Rows of the column: weight `i` of the lines of each part.
            for (row, dst) in room.chunks_exact_mut(inputs * SIZE).enumerate() {
                let (i, part) = (row / parts * SIZE, row % parts);
                let lines = &src[part * inputs..][..inputs];
                for (weight, line) in dst.as_chunks_mut::<SIZE>().0.iter_mut().zip(lines) {
                    weight.copy_from_slice(&line[i..i + SIZE]);
                }
            }
            column.copy_from_slice(room);
        }
    }
}

/// Bytes of a bit for each of `count` units.
#[inline]
pub(super) const fn marks_bytes(count: usize) -> usize {
    count.div_ceil(8)
}

/// Moves units of `BYTES` bytes in place, by the cycles of a permutation: unit `i` becomes what
/// unit `source(i)` was. `room` has a bit for each unit.
pub(super) fn permute_units<const BYTES: usize>(
    units: &mut [u8],
    room: &mut [u8],
    source: impl Fn(usize) -> usize,
) {
    let (units, _) = units.as_chunks_mut::<BYTES>();
    let marks = &mut room[..marks_bytes(units.len())];
    marks.fill(0);
    for start in 0..units.len() {
        if marks[start / 8] >> (start % 8) & 1 == 1 {
            continue;
        }
        let (first, mut unit) = (units[start], start);
        loop {
            marks[unit / 8] |= 1 << (unit % 8);
            let from = source(unit);
            if from == start {
                break;
            }
            units[unit] = units[from];
            unit = from;
        }
        units[unit] = first;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{file_layout::FileLayout, format::Format};
    use super::*;

    #[test]
    fn rows_of_a_transposed_matrix_are_its_columns_in_the_file() {
        for scalar in [Scalar::BF16, Scalar::F16, Scalar::F32] {
            for (cols, rows) in [(1, 2), (3, 2), (5, 6), (8, 40), (96, 64), (33, 70), (64, 1408)] {
                for order in [OutputOrder::Rows, OutputOrder::EvenRowsFirst] {
                    let shape = MatrixShape { rows, cols, format: Format::Plain(scalar) };
                    let size = scalar.bytes();
                    let value = |input: usize, output: usize, byte: usize| {
                        ((input * 31 + output * 7) * 3 + byte) as u8
                    };
                    let mut matrix: Vec<u8> = (0..rows * cols * size)
                        .map(|i| value(i / size / rows, i / size % rows, i % size))
                        .collect();
                    let layout = FileLayout::Transposed(order);
                    assert_eq!(layout.plane_bytes(shape).unwrap().total(), matrix.len());
                    layout.land(shape, &mut matrix).unwrap();
                    let output = |row: usize| match order {
                        OutputOrder::Rows => row,
                        OutputOrder::EvenRowsFirst => row / 2 + row % 2 * (rows / 2),
                    };
                    let expected: Vec<u8> = (0..rows * cols * size)
                        .map(|i| value(i / size % cols, output(i / size / cols), i % size))
                        .collect();
                    assert!(matrix == expected, "{scalar:?} {cols} x {rows} {order:?}");
                }
            }
        }
    }

    #[test]
    fn lines_are_shorter_where_columns_are_long() {
        let tall = Transposition { inputs: 1 << 16, parts: 2, part: 256 };
        assert!(tall.room::<2>(64) > ROOM);
        let shape = MatrixShape { rows: 512, cols: 1 << 16, format: Format::Plain(Scalar::F16) };
        let mut matrix = vec![0; 512 << 17];
        matrix[2 * (512 * 77 + 256 + 9)] = 1;
        FileLayout::Transposed(OutputOrder::EvenRowsFirst).land(shape, &mut matrix).unwrap();
        let at = matrix.iter().position(|byte| *byte == 1);
        assert_eq!(at, Some(2 * ((9 * 2 + 1) << 16 | 77)));
        assert!(COLUMN.with_borrow(Vec::len) < 4 << 20);
    }

    #[test]
    fn only_even_counts_have_alternating_rows() {
        let shape = MatrixShape { rows: 3, cols: 4, format: Format::Plain(Scalar::F32) };
        assert!(FileLayout::Transposed(OutputOrder::Rows).plane_bytes(shape).is_ok());
        assert!(FileLayout::Transposed(OutputOrder::EvenRowsFirst).plane_bytes(shape).is_err());
        let packed = MatrixShape { format: Format::MXFP4, cols: 32, ..shape };
        assert!(FileLayout::Transposed(OutputOrder::Rows).plane_bytes(packed).is_err());
    }
}
