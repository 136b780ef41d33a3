//! Tensor lookup: a name and an expected shape to the location and format of a matrix or vector.
//!
//! The format follows from the tensors: `.scales` and `.biases` for MLX affine, `.scales` of bytes
//! for the microscaled modes, `_scale_inv` for FP8, otherwise the tensor's own type. `config.json`
//! only has to agree.

use moeflux_compute::{Format, MatrixShape, Scalar};

use super::{
    Checkpoint,
    location::{MatrixSource, MatrixStack, Segment, TensorInfo, VectorSource},
};
use crate::base::error::Error;

/// A matrix, or a stack of `count` of them, as an architecture asks for it.
#[derive(Clone, Copy)]
pub(super) struct MatrixRequest<'a> {
    /// Name without `.weight`.
    pub(super) name: &'a str,
    /// Name of the tensor that holds the weights.
    pub(super) weight: &'a str,
    /// Number of stacked matrices; `None` for a plain matrix.
    pub(super) count: Option<usize>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl MatrixRequest<'_> {
    /// Shape of a tensor that has dimensions `matrix` for each matrix of the stack.
    pub(super) fn tensor_shape(&self, matrix: &[usize]) -> Vec<usize> {
        self.count.iter().chain(matrix).copied().collect()
    }
}

impl Checkpoint {
    /// All tensors, in no particular order.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, t)| (name.as_str(), t))
    }

    /// Name and size in bytes of all tensors.
    pub(crate) fn tensor_bytes(&self) -> impl Iterator<Item = (&str, u64)> {
        self.tensors().map(|(name, t)| (name, t.bytes))
    }

    /// Whether a tensor of exactly this name exists.
    pub(crate) fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Whether the name and shape of any tensor satisfy `test`.
    pub(crate) fn has_shape(&self, test: impl Fn(&str, &[usize]) -> bool) -> bool {
        self.tensors.iter().any(|(name, t)| test(name, &t.shape))
    }

    /// Location of a tensor.
    pub(crate) fn tensor(&self, name: &str) -> Result<&TensorInfo, Error> {
        self.tensors.get(name).ok_or_else(|| Error::Tensor {
            tensor: name.into(),
            path: self.folder.clone(),
            problem: "no shard has it: the download is incomplete, or this layout is not supported"
                .into(),
        })
    }

    /// Error about a tensor, with the path of its file.
    pub(crate) fn tensor_error(&self, name: &str, problem: impl Into<String>) -> Error {
        let path = match self.tensors.get(name) {
            Some(t) => self.files[t.file as usize].path().into(),
            None => self.folder.clone(),
        };
        Error::Tensor { tensor: name.into(), path, problem: problem.into() }
    }

    /// A vector of `len` elements. Dimensions of one are ignored: `[C, 1, 4]` equals `[C, 4, 1]`.
    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<VectorSource, Error> {
        let t = self.tensor(name)?;
        // For unknown types the reader has not checked that the product fits.
        if t.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) != Some(len) {
            return Err(self.tensor_error(
                name,
                format!(
                    "its shape {:?} does not hold the {len} values that config.json asks for",
                    t.shape
                ),
            ));
        }
        let scalar = self.scalar(name, t)?;
        Ok(VectorSource { name: name.into(), len, scalar, segment: t.segment(), plus: 0.0 })
    }

    /// Floating-point type of a tensor.
    pub(super) fn scalar(&self, name: &str, t: &TensorInfo) -> Result<Scalar, Error> {
        match t.dtype.as_str() {
            "F32" => Ok(Scalar::F32),
            "F16" => Ok(Scalar::F16),
            "BF16" => Ok(Scalar::BF16),
            other => Err(self.tensor_error(
                name,
                format!(
                    "its type {other} is not supported here: supported are F32, F16 and BF16, and \
                     as weights F8_E4M3 and the quantised formats of MLX"
                ),
            )),
        }
    }

    /// The matrix `name` (without `.weight`) of `rows` x `cols`, quantised or not, as its tensors
    /// say.
    pub(crate) fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixSource, Error> {
        let weight = format!("{name}.weight");
        let request = MatrixRequest { name, weight: &weight, count: None, rows, cols };
        let stack = self.stack(&request)?;
        Ok(MatrixSource { name: name.into(), shape: stack.shape, segments: stack.segments })
    }

    /// A stack of `count` matrices of `rows` x `cols` in three-dimensional tensors.
    pub(crate) fn stacked(
        &self,
        name: &str,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixStack, Error> {
        let weight = format!("{name}.weight");
        self.stack(&MatrixRequest { name, weight: &weight, count: Some(count), rows, cols })
    }

    /// As [`Checkpoint::stacked`], for weight tensors whose name does not end in `.weight`.
    pub(crate) fn stacked_without_suffix(
        &self,
        name: &str,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixStack, Error> {
        self.stack(&MatrixRequest { name, weight: name, count: Some(count), rows, cols })
    }

    /// A stack of `count` matrices as one matrix of `count * rows` rows.
    pub(crate) fn stacked_rows(
        &self,
        name: &str,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixSource, Error> {
        let stack = self.stacked(name, count, rows, cols)?;
        let shape = MatrixShape { rows: count * rows, ..stack.shape };
        let whole = |s: Segment| Segment { bytes: s.bytes * count, ..s };
        let segments: Vec<_> = stack.segments.into_iter().map(whole).collect();
        let weight = format!("{name}.weight");
        let parts = shape.plane_bytes().map_err(|e| self.tensor_error(&weight, e.to_string()))?;
        if parts.total() != segments.iter().map(|s| s.bytes).sum::<usize>() {
            return Err(self.tensor_error(
                &weight,
                format!("its {count} matrices are not laid out as one matrix"),
            ));
        }
        Ok(MatrixSource { name: name.into(), shape, segments })
    }

    /// A matrix made of row ranges of another, in the order of `ranges`, which must be within it.
    pub(crate) fn gather_rows(
        &self,
        matrix: &MatrixSource,
        ranges: &[std::ops::Range<usize>],
    ) -> Result<MatrixSource, Error> {
        let MatrixShape { rows, format, .. } = matrix.shape;
        let block = format.block_rows();
        let whole = |n: usize| n.is_multiple_of(block);
        if !ranges
            .iter()
            .all(|range| whole(range.start) && (whole(range.len()) || range.end == rows))
        {
            let weight = format!("{}.weight", matrix.name);
            let problem = format!(
                "its rows are needed in another order, which its blocks of {block} rows prevent"
            );
            return Err(self.tensor_error(&weight, problem));
        }
        let mut segments = Vec::with_capacity(matrix.segments.len() * ranges.len());
        for (i, plane) in matrix.segments.iter().enumerate() {
            // Weights are stored by row, scales by block of rows.
            let unit = if i == 0 { 1 } else { block };
            let bytes = plane.bytes / rows.div_ceil(unit);
            segments.extend(ranges.iter().map(|range| Segment {
                offset: plane.offset + (range.start / unit * bytes) as u64,
                bytes: range.len().div_ceil(unit) * bytes,
                ..*plane
            }));
        }
        let shape =
            MatrixShape { rows: ranges.iter().map(ExactSizeIterator::len).sum(), ..matrix.shape };
        Ok(MatrixSource { name: matrix.name.clone(), shape, segments })
    }

    /// Detects the format of the weight tensor and locates its planes.
    fn stack(&self, request: &MatrixRequest<'_>) -> Result<MatrixStack, Error> {
        let &MatrixRequest { name, weight, rows, cols, .. } = request;
        let t = self.tensor(weight)?;
        match t.dtype.as_str() {
            "U32" if self.tensor(&format!("{name}.scales"))?.dtype == "U8" => {
                self.microscaled_stack(request, t)
            }
            "U32" => self.affine_stack(request, t),
            "F8_E4M3" => self.fp8_stack(request, t),
            _ => {
                let scalar = self.scalar(weight, t)?;
                self.check_shape(weight, t, &request.tensor_shape(&[rows, cols]))?;
                self.build_stack(request, Format::Plain(scalar), &[t])
            }
        }
    }

    /// MLX affine quantisation: `.weight` of packed quants, `.scales` and `.biases`.
    fn affine_stack(
        &self,
        request: &MatrixRequest<'_>,
        t: &TensorInfo,
    ) -> Result<MatrixStack, Error> {
        let &MatrixRequest { name, weight, rows, cols, .. } = request;
        let (scales_name, biases_name) = (format!("{name}.scales"), format!("{name}.biases"));
        let scales = self.tensor(&scales_name)?;
        if !self.has(&biases_name) {
            let problem = "it has scales but no biases, so it is not affine, and its scales are \
                           not bytes, so it is none of mxfp4, nvfp4 and mxfp8: this quantisation \
                           is not supported";
            return Err(self.tensor_error(weight, problem));
        }
        let biases = self.tensor(&biases_name)?;
        let scale = self.scalar(&scales_name, scales)?;
        let packed = t.shape.last().copied().unwrap_or(0);
        let groups = scales.shape.last().copied().unwrap_or(0);
        let misfit = |problem: &str| {
            self.tensor_error(
                weight,
                format!(
                    "{problem}: weight {:?}, scales {:?}, biases {:?} {}, for {rows} x {cols} as \
                     config.json asks",
                    t.shape, scales.shape, biases.shape, biases.dtype
                ),
            )
        };
        // Bits and group size follow from the shapes: a row of `cols` inputs takes
        // `cols * bits / 32` words and `cols / group` scales.
        let bits =
            packed.checked_mul(32).filter(|n| cols > 0 && n.is_multiple_of(cols)).map(|n| n / cols);
        let group = (groups > 0 && cols.is_multiple_of(groups)).then(|| cols / groups);
        let (Some(bits @ 1..=8), Some(group @ 1..=1024)) = (bits, group) else {
            return Err(misfit("the quantised shapes do not fit"));
        };
        if t.shape != request.tensor_shape(&[rows, packed])
            || scales.shape != request.tensor_shape(&[rows, groups])
            || biases.shape != scales.shape
            || biases.dtype != scales.dtype
        {
            return Err(misfit("the quantised shapes do not fit together"));
        }
        self.quantization.check(name, "affine", bits, group).map_err(|p| misfit(&p))?;
        let format = Format::Affine { bits: bits as u8, group: group as u16, scale };
        self.build_stack(request, format, &[t, scales, biases])
    }

    /// Checks a tensor against the shape that config.json asks for.
    pub(super) fn check_shape(
        &self,
        name: &str,
        t: &TensorInfo,
        expected: &[usize],
    ) -> Result<(), Error> {
        if t.shape == expected {
            return Ok(());
        }
        Err(self.tensor_error(
            name,
            format!("its shape is {:?}, config.json asks for {expected:?}", t.shape),
        ))
    }

    /// The requested matrices in a detected format, in tensors whose shapes were checked.
    pub(super) fn build_stack(
        &self,
        request: &MatrixRequest<'_>,
        format: Format,
        planes: &[&TensorInfo],
    ) -> Result<MatrixStack, Error> {
        let shape = MatrixShape { rows: request.rows, cols: request.cols, format };
        shape.plane_bytes().map_err(|e| self.tensor_error(request.weight, e.to_string()))?;
        let count = request.count.unwrap_or(1);
        let segments = planes.iter().map(|t| t.first_of(count)).collect();
        Ok(MatrixStack { shape, segments })
    }
}
