//! Layout of a matrix in a file, and the re-layout hook where bytes leave the I/O buffer.

use super::{Format, PlaneBytes};
use crate::{Error, MatrixShape};

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
}

impl FileLayout {
    /// Sizes of the planes in the file.
    ///
    /// # Errors
    /// As [`Format::plane_bytes`]; or the layout is not one of the format.
    pub fn plane_bytes(self, shape: MatrixShape) -> Result<PlaneBytes, Error> {
        let PlaneBytes([quants, scales, biases]) = shape.plane_bytes()?;
        match (self, shape.format) {
            (Self::Planes, _) => Ok(PlaneBytes([quants, scales, biases])),
            (Self::ZeroPoint(_), Format::Affine(_)) => Ok(PlaneBytes([quants, scales, 0])),
            (Self::ZeroPoint(_), format) => {
                Err(Error::Shape(format!("weights of {format} have no zero point")))
            }
        }
    }

    /// Turns the file's bytes at the start of `matrix`, which has the matrix's size in memory, into
    /// its planes in memory.
    ///
    /// # Errors
    /// As [`FileLayout::plane_bytes`]; or `matrix` is too small.
    pub fn land(self, shape: MatrixShape, matrix: &mut [u8]) -> Result<(), Error> {
        // Refuses layouts of other formats.
        self.plane_bytes(shape)?;
        let planes = shape.plane_bytes()?;
        if matrix.len() < planes.total() {
            return Err(Error::Shape(format!(
                "{} bytes for a matrix of {}",
                matrix.len(),
                planes.total()
            )));
        }
        if let (Self::ZeroPoint(zero), Format::Affine(affine)) = (self, shape.format) {
            let [_, scales, biases] = planes.split_mut(matrix);
            let size = affine.scale.bytes();
            for (scale, bias) in scales.chunks_exact(size).zip(biases.chunks_exact_mut(size)) {
                affine.scale.put(-f32::from(zero) * affine.scale.get(scale, 0), bias);
            }
        }
        Ok(())
    }
}
