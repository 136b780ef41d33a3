//! Weight matrices: shape, format and bytes; the layout of an expert in a slot.

use memmap2::MmapMut;

use crate::{
    error::Error,
    format::{FileLayout, Format, MatrixOrders, PerPlane, PlaneBytes, Scalar},
};

/// Rows (outputs), columns (inputs) and format of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixShape {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Weight format.
    pub format: Format,
}

impl MatrixShape {
    /// Sizes of the planes; see [`Format::plane_bytes`] for the errors.
    #[inline]
    pub fn plane_bytes(self) -> Result<PlaneBytes, Error> {
        self.format.plane_bytes(self.rows, self.cols)
    }

    /// Interprets `bytes` as a matrix of this shape: its planes without gaps.
    ///
    /// # Errors
    /// The shape is invalid, or the length of `bytes` does not match it.
    #[inline]
    pub fn view(self, bytes: &[u8]) -> Result<Matrix<'_>, Error> {
        let planes = self.plane_bytes()?;
        if bytes.len() != planes.total() {
            return Err(Error::Shape(format!(
                "{} bytes given for a matrix of {} x {} {} that has {}",
                bytes.len(),
                self.rows,
                self.cols,
                self.format,
                planes.total()
            )));
        }
        Ok(Matrix {
            shape: self,
            planes: planes.split(bytes),
            row_stride: RowStride::DENSE,
            output_bias: None,
        })
    }
}

/// Stored rows of which a matrix consists: `first`, `first + step`, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowStride {
    first: usize,
    step: usize,
}

impl RowStride {
    /// All stored rows.
    const DENSE: Self = Self { first: 0, step: 1 };

    /// Index among the stored rows of row `row`.
    #[inline]
    const fn stored_row(self, row: usize) -> usize {
        self.first + row * self.step
    }
}

/// A matrix in host memory. The bytes need no alignment.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Rows, columns, format.
    pub shape: MatrixShape,
    /// Planes in the order of the format's [`Codec`](crate::Codec), such as quants, scales and
    /// biases, each row by row; empty for planes that it lacks.
    pub planes: PerPlane<&'a [u8]>,
    /// Stored rows that belong to this matrix.
    pub(crate) row_stride: RowStride,
    /// One value per stored row, added to the products.
    pub(crate) output_bias: Option<(Scalar, &'a [u8])>,
}

impl<'a> Matrix<'a> {
    /// Bytes of row `row` in each plane. Rows of one block share their scales.
    #[inline]
    pub fn row(&self, row: usize) -> PerPlane<&'a [u8]> {
        let row = self.row_stride.stored_row(row);
        let MatrixShape { cols, format, .. } = self.shape;
        let layouts = format.planes(cols);
        std::array::from_fn(|i| {
            &self.planes[i][layouts[i].row_offset(row)..][..layouts[i].row_bytes]
        })
    }

    /// Index among the stored rows of row `row`, and the step to the next row.
    #[doc(hidden)]
    #[inline]
    pub const fn stored(&self, row: usize) -> (usize, usize) {
        (self.row_stride.stored_row(row), self.row_stride.step)
    }

    /// Rows `first .. first + count`, which must exist.
    #[doc(hidden)]
    #[inline]
    pub const fn rows(&self, first: usize, count: usize) -> Self {
        let row_stride =
            RowStride { first: self.row_stride.stored_row(first), step: self.row_stride.step };
        Self { shape: MatrixShape { rows: count, ..self.shape }, row_stride, ..*self }
    }

    /// Output bias of row `row`.
    #[inline]
    pub(crate) fn bias(&self, row: usize) -> f32 {
        self.output_bias
            .map_or(0.0, |(scalar, bytes)| scalar.get(bytes, self.row_stride.stored_row(row)))
    }

    /// The same matrix without its output biases.
    #[doc(hidden)]
    #[inline]
    pub fn without_biases(self) -> Self {
        Self { output_bias: None, ..self }
    }

    /// Adds the output biases to the products of rows `first` onwards.
    #[doc(hidden)]
    #[inline]
    pub fn add_biases(&self, first: usize, products: &mut [f32]) {
        if self.output_bias.is_some() {
            products.iter_mut().zip(first..).for_each(|(product, row)| *product += self.bias(row));
        }
    }
}

/// The matrices of one expert, and their layout in a slot.
///
/// A slot holds gate, up and down, in this order and without gaps; experts of plain MLPs have no
/// gate. Each matrix is its planes, then its output bias. Interleaved gate and up are one matrix of
/// twice the rows: the even rows are gate's, the odd ones up's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertShape {
    /// `(intermediate, hidden)`; `None` for experts without a gate.
    pub gate: Option<MatrixShape>,
    /// `(intermediate, hidden)`.
    pub up: MatrixShape,
    /// `(hidden, intermediate)`.
    pub down: MatrixShape,
    /// Whether gate and up are interleaved. Their formats are then equal.
    pub interleaved: bool,
    /// Type of the output biases, one value per row of each matrix; `None` without output biases.
    pub output_bias: Option<Scalar>,
}

impl ExpertShape {
    /// Three separate matrices without output biases.
    #[inline]
    pub const fn new(gate: MatrixShape, up: MatrixShape, down: MatrixShape) -> Self {
        Self { gate: Some(gate), up, down, interleaved: false, output_bias: None }
    }

    /// Two separate matrices without output biases: an expert without a gate.
    #[inline]
    pub const fn without_gate(up: MatrixShape, down: MatrixShape) -> Self {
        Self { gate: None, up, down, interleaved: false, output_bias: None }
    }

    /// The matrices in slot order.
    #[inline]
    pub fn matrices(&self) -> impl Iterator<Item = MatrixShape> + use<> {
        self.gate.into_iter().chain([self.up, self.down])
    }

    /// Bytes of one expert.
    ///
    /// # Errors
    /// A shape is invalid.
    #[inline]
    pub fn bytes(&self) -> Result<usize, Error> {
        Ok(self.layout()?.bytes())
    }

    /// Matrices of the expert at the start of `slot`.
    ///
    /// # Errors
    /// The slot is smaller than the expert.
    #[inline]
    pub fn view<'a>(&self, slot: &'a [u8]) -> Result<ExpertMatrices<Matrix<'a>>, Error> {
        let layout = self.layout()?;
        if slot.len() < layout.bytes() {
            return Err(slot_too_small(slot.len(), layout.bytes()));
        }
        Ok(layout.matrices(slot))
    }

    /// Bytes of one expert in a file whose gate, up and down have these layouts; those of
    /// interleaved gate and up are equal, and that of a missing gate is not used.
    ///
    /// # Errors
    /// A shape is invalid, or a layout is not one of its format.
    #[inline]
    pub fn file_bytes(&self, layouts: [FileLayout; 3]) -> Result<usize, Error> {
        self.layout()?.file_bytes(layouts)
    }

    /// Planes of one expert in a file whose gate, up and down have these layouts, in file order.
    /// Output biases are left out.
    ///
    /// # Errors
    /// As [`ExpertShape::file_bytes`].
    #[inline]
    pub fn file_planes(&self, layouts: [FileLayout; 3]) -> Result<Vec<FilePlane>, Error> {
        let (mut planes, mut offset) = (Vec::new(), 0);
        for (matrix, file) in self.layout()?.stored(layouts) {
            let format = matrix.shape.format;
            for (index, bytes) in file.plane_bytes(matrix.shape)?.0.into_iter().enumerate() {
                planes.push(FilePlane { format, layout: file, index, offset, bytes });
                offset += bytes;
            }
            offset += matrix.bias;
        }
        Ok(planes)
    }

    /// Turns an expert's file bytes at the start of `slot` into its matrices in memory: the
    /// re-layout hook of slots. Does nothing where the file has memory's layout.
    ///
    /// # Errors
    /// As [`ExpertShape::file_bytes`]; or the slot is too small.
    #[inline]
    pub fn land(&self, layouts: [FileLayout; 3], slot: &mut [u8]) -> Result<(), Error> {
        if layouts == [FileLayout::Planes; 3] {
            return Ok(());
        }
        let layout = self.layout()?;
        if slot.len() < layout.bytes() {
            return Err(slot_too_small(slot.len(), layout.bytes()));
        }
        let (mut file_end, mut end) = (layout.file_bytes(layouts)?, layout.bytes());
        // From the last matrix on, as each moves to the same or a later place.
        for (matrix, file) in layout.stored(layouts).rev() {
            let planes = file.plane_bytes(matrix.shape)?.total();
            let (file_start, start) = (file_end - planes - matrix.bias, end - matrix.bytes());
            let bias = file_start + planes..file_end;
            slot.copy_within(bias, end - matrix.bias);
            slot.copy_within(file_start..file_start + planes, start);
            file.land(matrix.shape, &mut slot[start..end])?;
            (file_end, end) = (file_start, start);
        }
        Ok(())
    }

    /// Gives the inputs and outputs of an expert in memory, at the start of `slot`, other orders.
    ///
    /// # Errors
    /// As [`MatrixOrders::apply`]; the slot is too small, or the rows have output biases or are
    /// interleaved.
    #[inline]
    pub fn reorder(&self, orders: ExpertOrders<'_>, slot: &mut [u8]) -> Result<(), Error> {
        let ExpertOrders { inputs, inner } = orders;
        if self.interleaved || self.output_bias.is_some() {
            return Err(Error::Shape("another order of rows with biases, or interleaved".into()));
        }
        let layout = self.layout()?;
        let inward = MatrixOrders { inputs, outputs: inner };
        let down = (self.down, MatrixOrders { inputs: inner, outputs: &[] });
        let matrices = self.gate.into_iter().chain([self.up]).map(|m| (m, inward)).chain([down]);
        let mut rest = match slot.len() < layout.bytes() {
            true => return Err(slot_too_small(slot.len(), layout.bytes())),
            false => slot,
        };
        for (shape, orders) in matrices {
            let (matrix, next) = rest.split_at_mut(shape.plane_bytes()?.total());
            orders.apply(shape, matrix)?;
            rest = next;
        }
        Ok(())
    }

    /// Locations of the three matrices in a slot.
    ///
    /// # Errors
    /// A shape is invalid.
    #[doc(hidden)]
    #[inline]
    pub fn layout(&self) -> Result<ExpertLayout, Error> {
        let stored = |m: MatrixShape| -> Result<StoredMatrix, Error> {
            let bias = self.output_bias.map_or(0, |scalar| m.rows * scalar.bytes());
            Ok(StoredMatrix { shape: m, planes: m.plane_bytes()?, bias })
        };
        let (gate, up) = if self.interleaved {
            if self.gate != Some(self.up) {
                return Err(Error::Shape("interleaved gate and up of two shapes".into()));
            }
            let rows =
                self.up.rows.checked_mul(2).ok_or_else(|| Error::Shape("too many rows".into()))?;
            (None, stored(MatrixShape { rows, ..self.up })?)
        } else {
            (self.gate.map(stored).transpose()?, stored(self.up)?)
        };
        Ok(ExpertLayout { gate, up, down: stored(self.down)?, shape: *self })
    }
}

/// Orders of an expert in memory: entry `j` is the index in the file of what is `j`-th in memory.
/// Empty where that is the file's order.
#[derive(Clone, Copy, Debug)]
pub struct ExpertOrders<'a> {
    /// Inputs of gate and up.
    pub inputs: &'a [u16],
    /// Inputs of down, which are outputs of gate and up.
    pub inner: &'a [u16],
}

/// A plane of a matrix among the bytes of an expert in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePlane {
    /// Format of the matrix.
    pub format: Format,
    /// Layout of the matrix in the file.
    pub layout: FileLayout,
    /// Index among the planes of the layout.
    pub index: usize,
    /// Offset of the first byte.
    pub offset: usize,
    /// Bytes of the plane; 0 if the file lacks it.
    pub bytes: usize,
}

fn slot_too_small(slot: usize, expert: usize) -> Error {
    Error::Shape(format!("a slot of {slot} bytes for an expert of {expert}"))
}

/// Sizes of a matrix stored in a slot.
#[derive(Clone, Copy, Debug)]
struct StoredMatrix {
    shape: MatrixShape,
    planes: PlaneBytes,
    /// Bytes of the output bias.
    bias: usize,
}

impl StoredMatrix {
    const fn bytes(&self) -> usize {
        self.planes.total() + self.bias
    }

    /// Splits `slot` into the matrix at its start and the rest.
    fn split<'a>(&self, slot: &'a [u8], bias: Option<Scalar>) -> (Matrix<'a>, &'a [u8]) {
        let (matrix, rest) = slot.split_at(self.planes.total());
        let (output, rest) = rest.split_at(self.bias);
        (
            Matrix {
                shape: self.shape,
                planes: self.planes.split(matrix),
                row_stride: RowStride::DENSE,
                output_bias: bias.map(|scalar| (scalar, output)),
            },
            rest,
        )
    }
}

/// Location of a matrix in a slot, as byte offsets: for devices that address slots as bytes.
#[derive(Clone, Copy, Debug)]
pub struct MatrixLocation {
    /// Shape of the matrix.
    pub shape: MatrixShape,
    /// Offsets of the planes.
    pub planes: PerPlane<usize>,
    /// Type and offset of the output bias, one value per stored row.
    pub bias: Option<(Scalar, usize)>,
    /// Stored rows that belong to the matrix: `first`, `first + step`, and so on.
    pub first: usize,
    /// Distance of these rows.
    pub step: usize,
}

/// One of something for each matrix of an expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertMatrices<T> {
    /// Of gate; `None` for experts without a gate.
    pub gate: Option<T>,
    /// Of up.
    pub up: T,
    /// Of down.
    pub down: T,
}

/// Validated shapes of an expert, with the sizes of their planes.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLayout {
    shape: ExpertShape,
    /// Gate, if the expert has one that is not interleaved.
    gate: Option<StoredMatrix>,
    /// Up, or interleaved gate and up.
    up: StoredMatrix,
    down: StoredMatrix,
}

impl ExpertLayout {
    fn bytes(&self) -> usize {
        self.gate.map_or(0, |m| m.bytes()) + self.up.bytes() + self.down.bytes()
    }

    /// Bytes in a file whose gate, up and down have these layouts.
    fn file_bytes(&self, layouts: [FileLayout; 3]) -> Result<usize, Error> {
        let bytes = |(matrix, file): (StoredMatrix, FileLayout)| {
            Ok(file.plane_bytes(matrix.shape)?.total() + matrix.bias)
        };
        self.stored(layouts).map(bytes).sum()
    }

    /// The stored matrices in slot order, with their layouts out of those of gate, up and down.
    fn stored(
        &self,
        layouts: [FileLayout; 3],
    ) -> impl DoubleEndedIterator<Item = (StoredMatrix, FileLayout)> {
        let [gate, up, down] = layouts;
        let first = self.gate.map(|matrix| (matrix, gate));
        [first, Some((self.up, up)), Some((self.down, down))].into_iter().flatten()
    }

    /// Locations of the matrices.
    #[inline]
    pub fn locations(&self) -> ExpertMatrices<MatrixLocation> {
        let mut start = 0;
        let mut locate = |stored: &StoredMatrix| {
            let bias = start + stored.planes.total();
            let location = MatrixLocation {
                shape: stored.shape,
                planes: stored.planes.offsets().map(|offset| start + offset),
                bias: self.shape.output_bias.map(|scalar| (scalar, bias)),
                first: 0,
                step: 1,
            };
            start += stored.bytes();
            location
        };
        let gate = self.gate.as_ref().map(&mut locate);
        let up = locate(&self.up);
        let half = |first| MatrixLocation { shape: self.shape.up, first, step: 2, ..up };
        let (gate, up) = match self.shape.interleaved {
            true => (Some(half(0)), half(1)),
            false => (gate, up),
        };
        ExpertMatrices { gate, up, down: locate(&self.down) }
    }

    /// Matrices of the expert at the start of `slot`, which must be large enough.
    #[inline]
    pub fn matrices<'a>(&self, slot: &'a [u8]) -> ExpertMatrices<Matrix<'a>> {
        let (bias, mut rest) = (self.shape.output_bias, slot);
        let mut split = |stored: &StoredMatrix| {
            let (matrix, after) = stored.split(rest, bias);
            rest = after;
            matrix
        };
        let gate = self.gate.as_ref().map(&mut split);
        let up = split(&self.up);
        let half =
            |first| Matrix { shape: self.shape.up, row_stride: RowStride { first, step: 2 }, ..up };
        let (gate, up) = match self.shape.interleaved {
            true => (Some(half(0)), half(1)),
            false => (gate, up),
        };
        ExpertMatrices { gate, up, down: split(&self.down) }
    }
}

/// Memory that a device owns, such as a mapped GPU buffer, lent to one user at a time.
pub trait Lent: std::fmt::Debug + Send + Sync {
    /// The bytes.
    fn bytes(&self) -> &[u8];
    /// The bytes, to change.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Memory for weights: zeroed and page-aligned anonymous memory, unmapped on drop, or memory of a
/// slot that a device lends.
///
/// The memory of a slot is moved out of its device while a reader fills it, so that no other
/// code can access it.
#[derive(Debug, Default)]
pub struct Bytes(BytesMemory);

#[derive(Debug, Default)]
enum BytesMemory {
    #[default]
    Empty,
    Mapped(MmapMut),
    Lent(Box<dyn Lent>),
}

impl Bytes {
    /// Allocates `len` zero bytes. The system commits pages when they are first written.
    ///
    /// # Errors
    /// The system refuses the mapping.
    #[inline]
    pub fn zeroed(len: usize) -> Result<Self, Error> {
        Ok(Self(if len == 0 { BytesMemory::Empty } else { BytesMemory::Mapped(anonymous(len)?) }))
    }

    /// Wraps memory that a device lends.
    #[doc(hidden)]
    #[inline]
    pub fn lent(memory: Box<dyn Lent>) -> Self {
        Self(BytesMemory::Lent(memory))
    }
}

/// Maps `len` zero bytes, page-aligned.
#[inline]
pub fn anonymous(len: usize) -> Result<MmapMut, Error> {
    let map =
        MmapMut::map_anon(len).map_err(|source| Error::Memory { bytes: len as u64, source })?;
    // Weights are read sequentially: huge pages save page faults and TLB misses. A system without
    // huge pages returns an error, which is harmless.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(map)
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            BytesMemory::Empty => &[],
            BytesMemory::Mapped(map) => map,
            BytesMemory::Lent(memory) => memory.bytes(),
        }
    }
}

impl std::ops::DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            BytesMemory::Empty => &mut [],
            BytesMemory::Mapped(map) => map,
            BytesMemory::Lent(memory) => memory.bytes_mut(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Affine;

    /// A slot has the same bytes whether the file has the biases or lacks them.
    #[test]
    fn experts_land_in_the_layout_of_slots() {
        let matrix = |rows, cols| MatrixShape {
            rows,
            cols,
            format: Format::Affine(Affine { bits: 4, group: 32, scale: Scalar::BF16 }),
        };
        let plain = ExpertShape::new(matrix(6, 64), matrix(6, 64), matrix(64, 32));
        let with_bias = ExpertShape { output_bias: Some(Scalar::F32), ..plain };
        let interleaved = ExpertShape { interleaved: true, ..with_bias };
        let without_gate = ExpertShape::without_gate(matrix(6, 64), matrix(64, 32));
        for shape in [plain, with_bias, interleaved, without_gate] {
            for zero in [[true; 3], [false, false, true], [true, true, false]] {
                let layouts = zero.map(|zero| match zero {
                    true => FileLayout::ZeroPoint(8),
                    false => FileLayout::Planes,
                });
                let layout = shape.layout().unwrap();
                let (mut file, mut expected) = (Vec::new(), Vec::new());
                for (i, (stored, layout)) in layout.stored(layouts).enumerate() {
                    let PlaneBytes([quants, scales, biases]) = stored.planes;
                    let byte = |k: usize| (k * 7 + i * 31) as u8;
                    // Scales of 1 to 128 in bf16, and their biases.
                    let scale = |k: usize| half::bf16::from_f32(((k + i) % 128 + 1) as f32);
                    let quants: Vec<u8> = (0..quants).map(byte).collect();
                    let scales: Vec<_> = (0..scales / 2).map(scale).collect();
                    let output: Vec<u8> = (0..stored.bias).map(byte).collect();
                    let bytes = |values: &[half::bf16]| {
                        values.iter().flat_map(|v| v.to_le_bytes()).collect()
                    };
                    let eight = half::bf16::from_f32(-8.0);
                    let biases_there: Vec<u8> =
                        bytes(&scales.iter().map(|s| eight * *s).collect::<Vec<_>>());
                    assert_eq!(biases_there.len(), biases);
                    let scales: Vec<u8> = bytes(&scales);
                    let in_file: &[u8] =
                        if layout == FileLayout::Planes { &biases_there } else { &[] };
                    file.extend([&quants[..], &scales, in_file, &output].concat());
                    expected.extend([&quants[..], &scales, &biases_there, &output].concat());
                }
                assert_eq!(file.len(), shape.file_bytes(layouts).unwrap());
                // A slot may be larger than the expert.
                let mut slot = file.clone();
                slot.resize(expected.len() + 5, 0xaa);
                shape.land(layouts, &mut slot).unwrap();
                assert!(slot[..expected.len()] == expected, "{shape:?}, {zero:?}");
                assert!(shape.land(layouts, &mut slot[..expected.len() - 1]).is_err());
            }
        }
    }
}
