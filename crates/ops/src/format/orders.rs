//! Orders of inputs and outputs that differ between a file and memory: act-order of GPTQ.

use std::cell::RefCell;

use super::format::Format;
use crate::{error::Error, matrix::MatrixShape};

/// Most inputs or outputs of a matrix with another order.
pub const MAX_ORDERED: usize = 1 << 16;

thread_local! {
    /// Quants of a row, one per byte. Any `u16` is an index of it.
    static ROW: RefCell<Box<[u8; MAX_ORDERED]>> = RefCell::new(Box::new([0; MAX_ORDERED]));
}

/// Orders of a matrix in memory: entry `j` is the index in the file of what is `j`-th in memory.
/// Empty where that is the file's order.
///
/// GPTQ with act-order spreads the inputs of a group over a row. In memory they are neighbours, as
/// kernels expect, and activations are gathered in the same order
/// ([`Op::GatherColumns`](crate::Op::GatherColumns)).
#[derive(Clone, Copy, Debug)]
pub struct MatrixOrders<'a> {
    /// Inputs. Scales and biases stay in place: groups are those of memory.
    pub inputs: &'a [u16],
    /// Outputs.
    pub outputs: &'a [u16],
}

impl MatrixOrders<'_> {
    /// Moves the quants and rows of a matrix whose planes in memory are `matrix`. Entries that are
    /// no permutation give other weights, and no error.
    ///
    /// # Errors
    /// The sizes differ, or the format is not affine with 4 or 8 bits.
    pub fn apply(self, shape: MatrixShape, matrix: &mut [u8]) -> Result<(), Error> {
        let MatrixShape { rows, cols, format } = shape;
        let Self { inputs, outputs } = self;
        let planes = shape.plane_bytes()?;
        let bits = match format {
            Format::Affine(affine) if matches!(affine.bits, 4 | 8) => affine.bits,
            _ => return Err(Error::Shape(format!("another order of weights of {format}"))),
        };
        let fits = |order: &[u16], len| order.is_empty() || order.len() == len;
        if !fits(inputs, cols) || !fits(outputs, rows) || matrix.len() != planes.total() {
            return Err(Error::Shape(format!("another order of {rows} x {cols} weights")));
        }
        let planes = planes.split_mut(matrix);
        if !inputs.is_empty() {
            ROW.with_borrow_mut(|row| {
                for quants in planes[0].chunks_exact_mut(cols * usize::from(bits) / 8) {
                    match bits {
                        4 => gather_nibbles(quants, inputs, row),
                        _ => gather_bytes(quants, inputs, row),
                    }
                }
            });
        }
        if !outputs.is_empty() {
            for (plane, layout) in planes.into_iter().zip(format.planes(cols)) {
                permute_rows(plane, layout.row_bytes, outputs);
            }
        }
        Ok(())
    }
}

/// Gathers quants of 4 bits, the first of a byte in its low half.
fn gather_nibbles(quants: &mut [u8], order: &[u16], row: &mut [u8; MAX_ORDERED]) {
    for (pair, byte) in row.as_chunks_mut::<2>().0.iter_mut().zip(&*quants) {
        *pair = [byte & 15, byte >> 4];
    }
    for (byte, [low, high]) in quants.iter_mut().zip(order.as_chunks::<2>().0) {
        *byte = row[usize::from(*low)] | row[usize::from(*high)] << 4;
    }
}

/// Gathers quants of 8 bits.
fn gather_bytes(quants: &mut [u8], order: &[u16], row: &mut [u8; MAX_ORDERED]) {
    row.iter_mut().zip(&*quants).for_each(|(copy, quant)| *copy = *quant);
    quants.iter_mut().zip(order).for_each(|(quant, i)| *quant = row[usize::from(*i)]);
}

/// Moves rows in place, by swaps. A row that was swapped away is where its place in the order says.
fn permute_rows(plane: &mut [u8], row_bytes: usize, order: &[u16]) {
    let next = |i: &usize| order.get(*i).map(|i| usize::from(*i));
    for row in 0..order.len() {
        // Bounded, should the order be no permutation.
        let mut sources = std::iter::successors(next(&row), next).take(order.len());
        let Some(source) = sources.find(|source| *source >= row) else { continue };
        if source > row && source < order.len() {
            let (before, from) = plane.split_at_mut(source * row_bytes);
            before[row * row_bytes..][..row_bytes].swap_with_slice(&mut from[..row_bytes]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{affine::Affine, plain::Scalar};
    use super::*;
    use moeflux_base::SplitMix64;

    /// A permutation by random keys.
    fn permutation(len: usize, seed: u64) -> Vec<u16> {
        let mut random = SplitMix64::new(seed);
        let mut keys: Vec<_> = (0..len).map(|i| (random.next_u64(), i as u16)).collect();
        keys.sort_unstable();
        keys.into_iter().map(|(_, i)| i).collect()
    }

    fn quant(row: &[u8], bits: u8, i: usize) -> u8 {
        if bits == 8 { row[i] } else { row[i / 2] >> (i % 2 * 4) & 15 }
    }

    #[test]
    fn weights_move_to_the_order_of_inputs_and_outputs() {
        for (rows, cols, bits) in [(1, 32, 4), (7, 64, 8), (33, 96, 4), (64, 256, 8)] {
            let affine = Affine { bits, group: 32, scale: Scalar::F32 };
            let shape = MatrixShape { rows, cols, format: Format::Affine(affine) };
            let mut random = SplitMix64::new(rows as u64);
            let bytes = shape.plane_bytes().unwrap().total();
            let before: Vec<u8> = (0..bytes).map(|_| random.next_u64() as u8).collect();
            let (inputs, outputs) = (permutation(cols, 1), permutation(rows, 2));
            for (inputs, outputs) in
                [(&inputs[..], &outputs[..]), (&inputs, &[]), (&[], &outputs), (&[], &[])]
            {
                let mut after = before.clone();
                MatrixOrders { inputs, outputs }.apply(shape, &mut after).unwrap();
                let (before, after) = (shape.view(&before).unwrap(), shape.view(&after).unwrap());
                for row in 0..rows {
                    let there = outputs.get(row).map_or(row, |i| usize::from(*i));
                    let ([a, scales, biases], [b, s, z]) = (after.row(row), before.row(there));
                    assert_eq!((scales, biases), (s, z), "row {row} of {shape:?}");
                    for col in 0..cols {
                        let there = inputs.get(col).map_or(col, |i| usize::from(*i));
                        assert_eq!(quant(a, bits, col), quant(b, bits, there), "{shape:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn other_sizes_and_formats_are_refused_and_no_order_panics() {
        let affine = Affine { bits: 4, group: 32, scale: Scalar::F16 };
        let shape = MatrixShape { rows: 3, cols: 32, format: Format::Affine(affine) };
        let mut matrix = vec![0; shape.plane_bytes().unwrap().total()];
        let mut apply = |inputs: &[u16], outputs: &[u16], shape| {
            MatrixOrders { inputs, outputs }.apply(shape, &mut matrix).is_ok()
        };
        assert!(apply(&[u16::MAX; 32], &[], shape));
        for outputs in [[0, 0, 0], [1, 1, 2], [u16::MAX; 3], [1, 0, 1]] {
            assert!(apply(&[], &outputs, shape));
        }
        assert!(!apply(&[0; 31], &[], shape) && !apply(&[], &[0; 4], shape));
        let five = Format::Affine(Affine { bits: 5, ..affine });
        assert!(!apply(&[0; 32], &[], MatrixShape { format: five, ..shape }));
    }
}
