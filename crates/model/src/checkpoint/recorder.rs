//! Recorder: a source without files, which answers every request and writes it down.

use std::{cell::RefCell, path::Path};

use moeflux_base::Error;
use moeflux_ops::{FileLayout, Format, MatrixShape, Scalar};
use serde_json::Value;

use super::{
    location::{Integers, MatrixSource, MatrixStack, Segment, VectorChange, VectorSource},
    row_table::{RowFormat, RowScale, RowShard, ShardRequest},
    source::{SourceChanges, StackLayout, StackRequest, TensorSource},
};

/// A matrix, stack or vector that an architecture asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedTensor {
    /// Name, without `.weight` for a matrix or stack.
    pub name: String,
    /// Dimensions, outermost first, of the weights before quantisation.
    pub shape: Vec<usize>,
    /// Whether the name is that of the tensor, although it is a matrix.
    pub is_bare: bool,
}

/// A source made of a config alone.
///
/// Weights are bf16. Each segment of an answer is in a file whose index is that of the
/// [`RecordedTensor`], so a blueprint made from a recorder says which tensor has which role.
pub struct Recorder<'a> {
    config: &'a Value,
    changes: SourceChanges,
    /// Whether a tensor exists that a model may lack, or that has another name in other layouts.
    has: &'a dyn Fn(&str) -> bool,
    recorded: RefCell<Vec<RecordedTensor>>,
}

#[doc(hidden)]
impl<'a> Recorder<'a> {
    pub fn new(config: &'a Value, changes: SourceChanges, has: &'a dyn Fn(&str) -> bool) -> Self {
        Self { config, changes, has, recorded: RefCell::default() }
    }

    /// The requests so far, in their order.
    pub fn into_recorded(self) -> Vec<RecordedTensor> {
        self.recorded.into_inner()
    }

    /// Writes a request down, and locates its first `bytes` bytes.
    fn record(&self, name: &str, shape: Vec<usize>, bytes: usize) -> Segment {
        let mut recorded = self.recorded.borrow_mut();
        recorded.push(RecordedTensor { name: name.into(), shape, is_bare: false });
        Segment { file: (recorded.len() - 1) as u32, offset: 0, bytes }
    }

    /// Shape of a matrix, and its bytes.
    fn matrix_shape(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<(MatrixShape, usize), Error> {
        let shape = MatrixShape { rows, cols, format: Format::Plain(Scalar::BF16) };
        let planes = shape.plane_bytes().map_err(|e| self.tensor_error(name, &e.to_string()))?;
        Ok((shape, planes.total()))
    }
}

impl TensorSource for Recorder<'_> {
    fn config(&self) -> &Value {
        self.config
    }

    fn folder(&self) -> &Path {
        Path::new("")
    }

    fn changes(&self) -> SourceChanges {
        self.changes
    }

    fn has(&self, tensor: &str) -> bool {
        (self.has)(tensor)
    }

    fn tensor_bytes(&self) -> Box<dyn Iterator<Item = (&str, u64)> + '_> {
        Box::new(std::iter::empty())
    }

    fn tensor_error(&self, name: &str, problem: &str) -> Error {
        Error::Tensor {
            tensor: name.into(),
            path: self.folder().join("config.json"),
            problem: problem.into(),
        }
    }

    fn vector(&self, name: &str, shape: &[usize]) -> Result<VectorSource, Error> {
        let scalar = Scalar::BF16;
        let len = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let bytes = len.and_then(|len| len.checked_mul(scalar.bytes()));
        let (Some(len), Some(bytes)) = (len, bytes) else {
            return Err(self.tensor_error(name, "it is too large to be addressed"));
        };
        let segment = self.record(name, shape.into(), bytes);
        Ok(VectorSource { name: name.into(), len, scalar, segment, change: VectorChange::None })
    }

    /// Zeros.
    fn integers(&self, name: &str, shape: &[usize]) -> Result<Integers, Error> {
        let len = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let bytes = len.and_then(|len| len.checked_mul(8));
        let (Some(len), Some(bytes)) = (len, bytes) else {
            return Err(self.tensor_error(name, "it is too large to be addressed"));
        };
        let segment = self.record(name, shape.into(), bytes);
        Ok(Integers { segment, values: vec![0; len] })
    }

    fn known_integers(&self, name: &str, values: Vec<i64>) -> Result<Integers, Error> {
        let found = self.integers(name, &[values.len()])?;
        Ok(Integers { values, ..found })
    }

    fn row_shard(&self, request: &ShardRequest<'_>) -> Result<RowShard, Error> {
        let &ShardRequest { name, rows, width, .. } = request;
        let format = RowFormat::Plain(Scalar::BF16);
        let first = self.record(name, vec![rows as usize, width], format.bytes(width));
        Ok(RowShard { name: name.into(), rows, format, first, scale: RowScale::Shard(1.0) })
    }

    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<MatrixSource, Error> {
        let (shape, bytes) = self.matrix_shape(name, rows, cols)?;
        let segment = self.record(name, vec![rows, cols], bytes);
        Ok(MatrixSource {
            name: name.into(),
            shape,
            layout: FileLayout::Planes,
            segments: vec![segment],
            order: None,
        })
    }

    fn bare_matrix(&self, name: &str, rows: usize, cols: usize) -> Result<MatrixSource, Error> {
        let matrix = self.matrix(name, rows, cols)?;
        self.recorded.borrow_mut().last_mut().into_iter().for_each(|last| last.is_bare = true);
        Ok(matrix)
    }

    fn stack(&self, request: &StackRequest<'_>) -> Result<MatrixStack, Error> {
        let &StackRequest { name, layout, count, rows, cols } = request;
        let (shape, bytes) = self.matrix_shape(name, rows, cols)?;
        let recorded = match layout {
            StackLayout::Rows => vec![count.saturating_mul(rows), cols],
            _ => vec![count, rows, cols],
        };
        let segment = self.record(name, recorded, bytes);
        Ok(MatrixStack { shape, layout: FileLayout::Planes, segments: vec![segment], order: None })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn requests_are_written_down_and_answered() {
        let (config, changes) = (json!({"hidden_size": 8}), SourceChanges::default());
        let has = |name: &str| name == "a.bias";
        let recorder = Recorder::new(&config, changes, &has);
        assert!(recorder.has("a.bias") && !recorder.has("b.bias"));
        let matrix = recorder.matrix("a", 6, 8).unwrap();
        assert_eq!((matrix.segments[0].file, matrix.file_bytes()), (0, 96));
        let rows = recorder.gather_rows(&matrix, &[4..6, 0..1]).unwrap();
        assert_eq!((rows.shape.rows, rows.segments[1].file, rows.file_bytes()), (3, 0, 48));
        let stack =
            StackRequest { name: "e", layout: StackLayout::Weight, count: 3, rows: 2, cols: 8 };
        assert_eq!(recorder.stacked_rows(&stack).unwrap().file_bytes(), 96);
        assert_eq!(recorder.vector("c", &[4, 1, 3]).unwrap().len, 12);
        let huge = usize::MAX / 2;
        assert!(recorder.matrix("huge", huge, huge).is_err());
        assert!(recorder.vector("huge", &[huge, huge]).is_err());
        let recorded = recorder.into_recorded();
        let names: Vec<_> = recorded.iter().map(|t| (t.name.as_str(), t.shape.len())).collect();
        assert_eq!(names, [("a", 2), ("e", 3), ("c", 3)]);
    }
}
