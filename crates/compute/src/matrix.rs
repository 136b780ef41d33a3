//! A matrix is a shape, a format and bytes.

use memmap2::MmapMut;

use crate::{Error, Format, Scalar, format::PlaneBytes};

/// Rows (outputs), columns (inputs) and format of a matrix of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixShape {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// How the numbers lie in bytes.
    pub format: Format,
}

impl MatrixShape {
    /// Sizes of the parts; see [`Format::parts`] for the errors.
    pub fn parts(self) -> Result<PlaneBytes, Error> {
        self.format.parts(self.rows, self.cols)
    }

    /// Looks at `bytes` as a matrix of this shape: weights, then scales, then biases, without gaps.
    ///
    /// # Errors
    /// The shape is impossible or the number of bytes is not the shape's.
    pub fn view(self, bytes: &[u8]) -> Result<Matrix<'_>, Error> {
        let parts = self.parts()?;
        if bytes.len() != parts.total() {
            return Err(Error::Shape(format!(
                "{} bytes given for a matrix of {} x {} {} that has {}",
                bytes.len(),
                self.rows,
                self.cols,
                self.format,
                parts.total()
            )));
        }
        let (weights, rest) = bytes.split_at(parts.weights);
        let (scales, biases) = rest.split_at(parts.scales);
        Ok(Matrix {
            shape: self,
            weights,
            scales,
            biases,
            every: RowStride::ROW,
            output_bias: None,
        })
    }
}

/// Which rows of the stored ones a matrix has: `first`, `first + step`, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowStride {
    first: usize,
    step: usize,
}

impl RowStride {
    /// All of them.
    const ROW: Self = Self { first: 0, step: 1 };

    /// Where row `row` is stored.
    #[inline]
    const fn at(self, row: usize) -> usize {
        self.first + row * self.step
    }
}

/// A matrix that lies somewhere in memory. The bytes need no alignment.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Rows, columns, format.
    pub shape: MatrixShape,
    /// Packed quants or plain numbers, row by row.
    pub weights: &'a [u8],
    /// Scales, row by row, or row of blocks by row of blocks; empty for plain formats.
    pub scales: &'a [u8],
    /// Biases, row by row; empty for all but affine formats.
    pub biases: &'a [u8],
    /// Which of the stored rows are this matrix's.
    pub(crate) every: RowStride,
    /// One number per stored row, added to the products.
    pub(crate) output_bias: Option<(Scalar, &'a [u8])>,
}

impl<'a> Matrix<'a> {
    /// Weights, scales and biases of row `row`; rows of one block have the same scales.
    #[inline]
    pub fn row(&self, row: usize) -> (&'a [u8], &'a [u8], &'a [u8]) {
        let row = self.every.at(row);
        let MatrixShape { cols, format, .. } = self.shape;
        let (w, s) = (format.row_bytes(cols), format.row_scale_bytes(cols));
        let b = if format.is_affine() { s } else { 0 };
        let block = row / format.block_rows();
        (
            &self.weights[row * w..(row + 1) * w],
            &self.scales[block * s..(block + 1) * s],
            &self.biases[row * b..(row + 1) * b],
        )
    }

    /// Where row `row` is among the stored rows, and by how many of them the next one is further.
    pub(crate) const fn stored(&self, row: usize) -> (usize, usize) {
        (self.every.at(row), self.every.step)
    }

    /// Rows `first .. first + count`; there are so many.
    pub(crate) const fn rows(&self, first: usize, count: usize) -> Self {
        let every = RowStride { first: self.every.at(first), step: self.every.step };
        Self { shape: MatrixShape { rows: count, ..self.shape }, every, ..*self }
    }

    /// What is added to the product of row `row`.
    pub(crate) fn bias(&self, row: usize) -> f32 {
        self.output_bias.map_or(0.0, |(scalar, bytes)| scalar.get(bytes, self.every.at(row)))
    }

    /// Adds to the products of row `first` and of those that follow what is added to each.
    pub(crate) fn add_biases(&self, first: usize, products: &mut [f32]) {
        if self.output_bias.is_some() {
            products.iter_mut().zip(first..).for_each(|(product, row)| *product += self.bias(row));
        }
    }
}

/// The three matrices of one expert, and how they lie in a slot.
///
/// A slot holds, in this order and without gaps, gate, up and down; of each its weights, scales and biases of the
/// format, then its output bias. Where gate and up are interleaved they are one matrix of twice the rows: gate's are
/// the even ones, up's the odd ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertShape {
    /// `(intermediate, hidden)`.
    pub gate: MatrixShape,
    /// `(intermediate, hidden)`.
    pub up: MatrixShape,
    /// `(hidden, intermediate)`.
    pub down: MatrixShape,
    /// Whether gate and up are interleaved; their formats are then the same.
    pub interleaved: bool,
    /// The type of the output biases, one number per row of each matrix; `None` where there are none.
    pub output_bias: Option<Scalar>,
}

impl ExpertShape {
    /// Three matrices that lie apart, without output biases.
    pub const fn of(gate: MatrixShape, up: MatrixShape, down: MatrixShape) -> Self {
        Self { gate, up, down, interleaved: false, output_bias: None }
    }

    /// Bytes of one expert.
    ///
    /// # Errors
    /// One of the shapes is impossible.
    pub fn bytes(&self) -> Result<usize, Error> {
        Ok(self.layout()?.bytes())
    }

    /// Gate, up and down of the expert whose bytes begin `slot`.
    ///
    /// # Errors
    /// The slot is smaller than the expert.
    pub fn view<'a>(&self, slot: &'a [u8]) -> Result<[Matrix<'a>; 3], Error> {
        let layout = self.layout()?;
        if slot.len() < layout.bytes() {
            return Err(Error::Shape(format!(
                "a slot of {} bytes for an expert of {}",
                slot.len(),
                layout.bytes()
            )));
        }
        Ok(layout.matrices(slot))
    }

    /// Where the parts of the three matrices lie in a slot.
    ///
    /// # Errors
    /// One of the shapes is impossible.
    pub(crate) fn layout(&self) -> Result<ExpertLayout, Error> {
        let stored = |m: MatrixShape| -> Result<Stored, Error> {
            let bias = self.output_bias.map_or(0, |scalar| m.rows * scalar.bytes());
            Ok(Stored { shape: m, parts: m.parts()?, bias })
        };
        let (first, second) = if self.interleaved {
            if self.gate != self.up {
                return Err(Error::Shape("interleaved gate and up of two shapes".into()));
            }
            let rows = self
                .gate
                .rows
                .checked_mul(2)
                .ok_or_else(|| Error::Shape("too many rows".into()))?;
            (stored(MatrixShape { rows, ..self.gate })?, None)
        } else {
            (stored(self.gate)?, Some(stored(self.up)?))
        };
        Ok(ExpertLayout { first, second, down: stored(self.down)?, shape: *self })
    }
}

/// A matrix as it lies in a slot.
#[derive(Clone, Copy, Debug)]
struct Stored {
    shape: MatrixShape,
    parts: PlaneBytes,
    /// Bytes of its output bias.
    bias: usize,
}

impl Stored {
    const fn bytes(&self) -> usize {
        self.parts.total() + self.bias
    }

    /// The matrix whose bytes begin `slot`, and what lies behind it.
    fn split<'a>(&self, slot: &'a [u8], bias: Option<Scalar>) -> (Matrix<'a>, &'a [u8]) {
        let mut rest = slot;
        let PlaneBytes { weights, scales, biases } = self.parts;
        let [weights, scales, biases, output] = [weights, scales, biases, self.bias].map(|len| {
            let (part, behind) = rest.split_at(len);
            rest = behind;
            part
        });
        let output_bias = bias.map(|scalar| (scalar, output));
        (
            Matrix {
                shape: self.shape,
                weights,
                scales,
                biases,
                every: RowStride::ROW,
                output_bias,
            },
            rest,
        )
    }
}

/// Where a matrix lies in a slot: byte offsets, for devices that see slots as bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixPlace {
    pub(crate) shape: MatrixShape,
    /// Weights, scales and biases of the format.
    pub(crate) parts: [usize; 3],
    /// The output bias, one number per stored row.
    pub(crate) bias: Option<(Scalar, usize)>,
    /// Which of the stored rows are the matrix's: `first`, `first + step`, and so on.
    pub(crate) first: usize,
    pub(crate) step: usize,
}

/// An expert's shapes and the sizes of their parts, known to be possible.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertLayout {
    shape: ExpertShape,
    /// Gate, or gate and up interleaved.
    first: Stored,
    /// Up.
    second: Option<Stored>,
    down: Stored,
}

impl ExpertLayout {
    fn bytes(&self) -> usize {
        self.first.bytes() + self.second.map_or(0, |m| m.bytes()) + self.down.bytes()
    }

    /// Where gate, up and down lie.
    pub(crate) fn places(&self) -> [MatrixPlace; 3] {
        let mut at = 0;
        let mut place = |stored: &Stored| {
            let PlaneBytes { weights, scales, .. } = stored.parts;
            let bias = at + stored.parts.total();
            let place = MatrixPlace {
                shape: stored.shape,
                parts: [at, at + weights, at + weights + scales],
                bias: self.shape.output_bias.map(|scalar| (scalar, bias)),
                first: 0,
                step: 1,
            };
            at += stored.bytes();
            place
        };
        let first = place(&self.first);
        let [gate, up] = match &self.second {
            Some(second) => [first, place(second)],
            None => [0, 1].map(|from| MatrixPlace {
                shape: self.shape.gate,
                first: from,
                step: 2,
                ..first
            }),
        };
        [gate, up, place(&self.down)]
    }

    /// Gate, up and down of the expert whose bytes begin `slot`, which is large enough.
    pub(crate) fn matrices<'a>(&self, slot: &'a [u8]) -> [Matrix<'a>; 3] {
        let bias = self.shape.output_bias;
        let (first, rest) = self.first.split(slot, bias);
        let (gate, up, rest) = match &self.second {
            Some(second) => {
                let (up, rest) = second.split(rest, bias);
                (first, up, rest)
            }
            None => {
                let half = |from| Matrix {
                    shape: self.shape.gate,
                    every: RowStride { first: from, step: 2 },
                    ..first
                };
                (half(0), half(1), rest)
            }
        };
        let (down, _) = self.down.split(rest, bias);
        [gate, up, down]
    }
}

/// Memory that lies elsewhere, such as in a buffer of a graphics card, and is in one hand at a time.
pub(crate) trait Lent: std::fmt::Debug + Send + Sync {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Memory for weights: anonymous, zeroed and page-aligned, returned to the system when dropped; or a slot's own, where
/// its device computes with what the host has written in place.
///
/// A slot that is being filled is such a piece, moved out of its device: nobody else can see it meanwhile.
#[derive(Debug, Default)]
pub struct Bytes(Held);

#[derive(Debug, Default)]
enum Held {
    #[default]
    Nothing,
    Own(MmapMut),
    Lent(Box<dyn Lent>),
}

impl Bytes {
    /// `len` zero bytes. Pages are taken from the system when they are first written.
    ///
    /// # Errors
    /// The system has no such amount of address space.
    pub fn zeroed(len: usize) -> Result<Self, Error> {
        Ok(Self(if len == 0 { Held::Nothing } else { Held::Own(anonymous(len)?) }))
    }

    /// A device's own memory.
    pub(crate) fn lent(memory: Box<dyn Lent>) -> Self {
        Self(Held::Lent(memory))
    }
}

/// `len` zero bytes from the system, page-aligned.
pub(crate) fn anonymous(len: usize) -> Result<MmapMut, Error> {
    let map =
        MmapMut::map_anon(len).map_err(|source| Error::Memory { bytes: len as u64, source })?;
    // Weights are read from end to end: large pages save faults and translations. A system without them refuses,
    // and nothing is lost.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(map)
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Held::Nothing => &[],
            Held::Own(map) => map,
            Held::Lent(memory) => memory.bytes(),
        }
    }
}

impl std::ops::DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Held::Nothing => &mut [],
            Held::Own(map) => map,
            Held::Lent(memory) => memory.bytes_mut(),
        }
    }
}
