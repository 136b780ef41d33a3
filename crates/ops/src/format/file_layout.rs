//! Layout of a matrix in a file, and the re-layout hook where bytes leave the I/O buffer.

use super::{
    block_scaled::{BlockScale, BlockScaled},
    codec::{PerPlane, PlaneBytes, PlaneLayout},
    format::Format,
    input_major::InputMajor,
    plain::Scalar,
    transposed::OutputOrder,
};
use crate::{error::Error, matrix::MatrixShape};

/// Layout of a matrix in a file: as in memory, or in planes that are computed or laid out anew
/// where they land. A file is never larger than memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FileLayout {
    /// The planes of the format, without gaps.
    #[default]
    Planes,
    /// Affine quants around a fixed zero point: `w = scale * (q - zero)`. The file has no biases;
    /// in memory each is `-zero * scale`.
    ZeroPoint(u8),
    /// Small floats with one scale for the whole matrix. In memory each row has it.
    OneScale,
    /// Small floats with E4M3 scales and one f32 for the whole matrix. In memory both are one f32
    /// scale per block.
    FactoredScales(MatrixFactor),
    /// Affine quants with zero points, stored by inputs.
    InputMajor(InputMajor),
    /// Plain weights, stored by inputs: `[inputs, outputs]`.
    Transposed(OutputOrder),
}

/// Effect of the f32 of a whole matrix on the scales of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixFactor {
    /// Scales are multiplied by it.
    Multiplies,
    /// Scales are divided by it.
    Divides,
}

impl FileLayout {
    /// Planes in the file of a matrix of `cols` columns, in file order. `None` if the file does not
    /// store it row by row.
    ///
    /// # Errors
    /// The layout is not one of the format.
    pub fn planes(
        self,
        format: Format,
        cols: usize,
    ) -> Result<Option<PerPlane<PlaneLayout>>, Error> {
        let [first, second, third] = format.planes(cols);
        let per_matrix = |row_bytes| PlaneLayout { row_bytes, block_rows: usize::MAX, align: 1 };
        let planes = match (self, format) {
            (Self::Planes, _) => [first, second, third],
            (Self::ZeroPoint(_), Format::Affine(_)) => [first, second, PlaneLayout::NONE],
            (Self::OneScale, Format::BlockScaled(BlockScaled { block_rows: 1, scale, .. })) => {
                [first, per_matrix(scale.bytes()), PlaneLayout::NONE]
            }
            (
                Self::FactoredScales(_),
                Format::BlockScaled(BlockScaled { scale: BlockScale::Plain(Scalar::F32), .. }),
            ) => {
                let row_bytes = second.row_bytes / Scalar::F32.bytes() * BlockScale::E4M3.bytes();
                [first, PlaneLayout { row_bytes, ..second }, per_matrix(Scalar::F32.bytes())]
            }
            (Self::InputMajor(_), Format::Affine(_)) | (Self::Transposed(_), Format::Plain(_)) => {
                return Ok(None);
            }
            (layout, format) => {
                return Err(Error::Shape(format!(
                    "weights of {format} are not stored as {layout:?}"
                )));
            }
        };
        Ok(Some(planes))
    }

    /// Sizes of the planes in the file.
    ///
    /// # Errors
    /// As [`Format::plane_bytes`]; the layout is not one of the format; or the matrix is too small
    /// for it.
    #[inline]
    pub fn plane_bytes(self, shape: MatrixShape) -> Result<PlaneBytes, Error> {
        let memory = shape.plane_bytes()?;
        let file = match (self.planes(shape.format, shape.cols)?, self, shape.format) {
            (Some(planes), ..) => PlaneBytes(planes.map(|plane| plane.bytes(shape.rows))),
            (None, Self::InputMajor(layout), Format::Affine(affine)) => {
                layout.plane_bytes(affine, shape)?
            }
            (None, Self::Transposed(order), _) if !order.fits(shape.rows) => {
                return Err(Error::Shape(format!("{} rows do not alternate", shape.rows)));
            }
            (None, ..) => memory,
        };
        if file.total() > memory.total() {
            let MatrixShape { rows, cols, .. } = shape;
            return Err(Error::Shape(format!(
                "a matrix of {rows} x {cols} is too small to be stored as {self:?}"
            )));
        }
        Ok(file)
    }

    /// Turns the file's bytes at the start of `matrix`, which has the matrix's size in memory, into
    /// its planes in memory. Uses no other memory, but for a part of a transposed matrix.
    ///
    /// # Errors
    /// As [`FileLayout::plane_bytes`]; or `matrix` is too small.
    pub fn land(self, shape: MatrixShape, matrix: &mut [u8]) -> Result<(), Error> {
        let file = self.plane_bytes(shape)?;
        let planes = shape.plane_bytes()?;
        let size = matrix.len();
        let Some(matrix) = matrix.get_mut(..planes.total()) else {
            return Err(Error::Shape(format!("{size} bytes for a matrix of {}", planes.total())));
        };
        match (self, shape.format) {
            (Self::ZeroPoint(zero), Format::Affine(affine)) => {
                let [_, scales, biases] = planes.split_mut(matrix);
                let size = affine.scale.bytes();
                for (scale, bias) in scales.chunks_exact(size).zip(biases.chunks_exact_mut(size)) {
                    affine.scale.put(-f32::from(zero) * affine.scale.get(scale, 0), bias);
                }
            }
            (Self::OneScale, Format::BlockScaled(scaled)) => {
                let [_, scales, _] = planes.split_mut(matrix);
                let (first, others) = scales.split_at_mut(scaled.scale.bytes());
                others.chunks_exact_mut(first.len()).for_each(|scale| scale.copy_from_slice(first));
            }
            (Self::FactoredScales(factor), Format::BlockScaled(_)) => {
                let [_, scales, _] = planes.split_mut(matrix);
                land_factored(factor, file.0[1], scales);
            }
            (Self::InputMajor(layout), Format::Affine(affine)) => {
                layout.land(affine, shape, matrix);
            }
            (Self::Transposed(order), Format::Plain(scalar)) => {
                order.land(scalar, shape, matrix);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Turns `count` E4M3 scales and the f32 behind them, at the start of `scales`, into f32 scales.
fn land_factored(factor: MatrixFactor, count: usize, scales: &mut [u8]) {
    let matrix = Scalar::F32.get(&scales[count..], 0);
    let values: [[u8; 4]; 256] = std::array::from_fn(|code| {
        let scale = BlockScale::E4M3.get(&[code as u8], 0);
        let scale = match factor {
            MatrixFactor::Multiplies => scale * matrix,
            MatrixFactor::Divides => scale / matrix,
        };
        scale.to_le_bytes()
    });
    // From the last one on, as each moves to the same or a later place.
    for i in (0..count).rev() {
        let value = values[usize::from(scales[i])];
        scales[4 * i..4 * i + 4].copy_from_slice(&value);
    }
}

#[cfg(test)]
mod tests {
    use super::super::block_scaled::Element;
    use super::*;

    fn small_floats(element: Element, block_cols: u16) -> Format {
        let scale = BlockScale::Plain(Scalar::F32);
        Format::BlockScaled(BlockScaled { element, block_rows: 1, block_cols, scale })
    }

    #[test]
    fn one_scale_lands_in_each_row() {
        let shape = MatrixShape { rows: 3, cols: 8, format: small_floats(Element::E4M3, 8) };
        assert_eq!(FileLayout::OneScale.plane_bytes(shape).unwrap(), PlaneBytes([24, 4, 0]));
        let mut matrix = [7; 24 + 12];
        matrix[24..28].copy_from_slice(&0.3f32.to_le_bytes());
        FileLayout::OneScale.land(shape, &mut matrix).unwrap();
        assert_eq!(matrix[..24], [7; 24]);
        assert_eq!(matrix[24..], [0.3f32.to_le_bytes(); 3].concat());
        let other = MatrixShape { format: Format::MXFP4, cols: 32, ..shape };
        assert!(FileLayout::FactoredScales(MatrixFactor::Divides).plane_bytes(other).is_err());
    }

    #[test]
    fn a_factor_lands_in_the_scales() {
        let shape = MatrixShape { rows: 2, cols: 48, format: small_floats(Element::E2M1, 16) };
        for (factor, value) in [(MatrixFactor::Multiplies, 0.3f32), (MatrixFactor::Divides, 700.0)]
        {
            let layout = FileLayout::FactoredScales(factor);
            assert_eq!(layout.plane_bytes(shape).unwrap(), PlaneBytes([48, 6, 4]));
            let codes = [1, 56, 200, 126, 9, 0];
            let mut matrix = vec![5; 48 + 24];
            matrix[48..54].copy_from_slice(&codes);
            matrix[54..58].copy_from_slice(&value.to_le_bytes());
            layout.land(shape, &mut matrix).unwrap();
            for (i, _) in codes.iter().enumerate() {
                let scale = BlockScale::E4M3.get(&codes, i);
                let scale = match factor {
                    MatrixFactor::Multiplies => scale * value,
                    MatrixFactor::Divides => scale / value,
                };
                assert_eq!(Scalar::F32.get(&matrix[48..], i).to_bits(), scale.to_bits());
            }
        }
        let tiny = MatrixShape { rows: 1, cols: 16, ..shape };
        assert!(FileLayout::FactoredScales(MatrixFactor::Divides).plane_bytes(tiny).is_err());
    }
}
