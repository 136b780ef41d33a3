//! Tables of rows that stay in the files: of which type they are, where each row is, and how its
//! bytes become f32.
//!
//! A table is divided into shards of rows, one tensor each. Rows of FP8 have a scale: one for a
//! shard, or one for each row.

use moeflux_compute::Scalar;

use super::{Checkpoint, Segment, TensorInfo, source::TensorSource};
use crate::base::error::Error;

/// Type of the elements of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFormat {
    /// Floating-point numbers without a scale.
    Plain(Scalar),
    /// FP8 of 4 exponent and 3 mantissa bits, with a scale.
    E4m3,
}

impl RowFormat {
    /// Bytes of a row of `width` elements, without its scale.
    pub fn bytes(self, width: usize) -> usize {
        match self {
            Self::Plain(scalar) => width.saturating_mul(scalar.bytes()),
            Self::E4m3 => width,
        }
    }
}

/// Scale of the rows of a shard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowScale {
    /// One factor for all rows.
    Shard(f32),
    /// A factor for each row, one after another from this segment on, which is that of the first.
    Each {
        /// Scale of the first row.
        first: Segment,
        /// Its type.
        scalar: Scalar,
    },
}

impl RowScale {
    /// Bytes of a row's scale in the file, if it has one.
    fn bytes(self) -> usize {
        match self {
            Self::Shard(_) => 0,
            Self::Each { first, .. } => first.bytes,
        }
    }
}

/// Consecutive rows of a table, in one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct RowShard {
    /// Name of the tensor.
    pub name: String,
    /// Number of rows.
    pub rows: u64,
    /// Type of the elements.
    pub format: RowFormat,
    /// The first row. The others follow without gaps.
    pub first: Segment,
    /// Scale of the rows.
    pub scale: RowScale,
}

impl RowShard {
    /// Segments of row `row` of the shard: its elements and its scale.
    pub(crate) fn segments(&self, row: u64) -> impl Iterator<Item = Segment> + use<> {
        let at =
            |first: Segment| Segment { offset: first.offset + row * first.bytes as u64, ..first };
        let scale = match self.scale {
            RowScale::Shard(_) => None,
            RowScale::Each { first, .. } => Some(at(first)),
        };
        std::iter::once(at(self.first)).chain(scale)
    }

    /// Bytes of a row and its scale.
    pub(crate) fn row_bytes(&self) -> usize {
        self.first.bytes + self.scale.bytes()
    }

    /// Decodes the bytes of a row, followed by its scale. Returns whether all elements are finite.
    pub(crate) fn decode(&self, bytes: &[u8], row: &mut [f32]) -> bool {
        let (elements, scale) = bytes.split_at(self.first.bytes);
        let scale = match self.scale {
            RowScale::Shard(scale) => scale,
            RowScale::Each { scalar, .. } => scalar.get(scale, 0),
        };
        match self.format {
            RowFormat::Plain(scalar) => {
                row.iter_mut().enumerate().for_each(|(i, x)| *x = scalar.get(elements, i));
            }
            RowFormat::E4m3 => {
                row.iter_mut().zip(elements).for_each(|(x, code)| *x = e4m3(*code));
            }
        }
        if scale != 1.0 {
            row.iter_mut().for_each(|x| *x *= scale);
        }
        row.iter().all(|x| x.is_finite())
    }
}

/// Value of an FP8 number of 4 exponent and 3 mantissa bits.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// A table of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct RowTable {
    /// Elements of a row.
    pub width: usize,
    /// Shards of equal numbers of rows, of which the last may have fewer, and of one row size.
    pub shards: Vec<RowShard>,
}

impl RowTable {
    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.shards.iter().map(|shard| shard.rows).fold(0, u64::saturating_add)
    }

    /// Bytes in the files, scales of rows included.
    pub fn file_bytes(&self) -> u64 {
        let bytes = |shard: &RowShard| shard.rows.saturating_mul(shard.row_bytes() as u64);
        self.shards.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of the largest row, with its scale.
    pub(crate) fn row_bytes(&self) -> usize {
        self.shards.iter().map(RowShard::row_bytes).max().unwrap_or(0)
    }

    /// Shard of a row, and its index there; `None` beyond the table.
    pub(crate) fn locate(&self, row: u64) -> Option<(&RowShard, u64)> {
        let each = self.shards.first().map_or(1, |shard| shard.rows.max(1));
        let shard = self.shards.get(usize::try_from(row / each).ok()?)?;
        (row % each < shard.rows).then_some((shard, row % each))
    }
}

/// A shard as an architecture asks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardRequest<'a> {
    /// Name of the tensor.
    pub(crate) name: &'a str,
    /// Name of the tensor with the scales of the whole table, which FP8 has.
    pub(crate) table_scale: &'a str,
    /// Index of its first row in the table.
    pub(crate) first: u64,
    /// Number of rows.
    pub(crate) rows: u64,
    /// Rows of the whole table.
    pub(crate) table_rows: u64,
    /// Elements of a row.
    pub(crate) width: usize,
}

impl Checkpoint {
    /// Locates a shard of a table.
    ///
    /// # Errors
    /// A tensor is missing, or of another shape or an unsupported type.
    pub(super) fn locate_shard(&self, request: &ShardRequest<'_>) -> Result<RowShard, Error> {
        let &ShardRequest { name, rows, width, .. } = request;
        let t = self.tensor(name).map_err(|e| self.explain(e))?;
        self.check_shape(name, t, &[rows as usize, width])?;
        let format = match t.dtype.as_str() {
            "F8_E4M3" => RowFormat::E4m3,
            _ => RowFormat::Plain(self.scalar(name, t)?),
        };
        let bytes = format.bytes(width);
        if (bytes as u64).checked_mul(rows) != Some(t.bytes) {
            let problem = format!("it has {} bytes, not {rows} rows of {bytes}", t.bytes);
            return Err(self.tensor_error(name, &problem));
        }
        let scale = match format {
            RowFormat::Plain(_) => RowScale::Shard(1.0),
            RowFormat::E4m3 => self.shard_scale(request)?,
        };
        let first = Segment { file: t.file, offset: t.offset, bytes };
        Ok(RowShard { name: name.into(), rows, format, first, scale })
    }

    /// The scale of a shard: of itself, `shard.weight_scale`, or of the whole table.
    fn shard_scale(&self, request: &ShardRequest<'_>) -> Result<RowScale, Error> {
        let &ShardRequest { name, table_scale, first, rows, table_rows, .. } = request;
        let own = format!("{name}_scale");
        let (scales, first, all) = match self.has(&own) {
            true => (own.as_str(), 0, rows),
            false => (table_scale, first, table_rows),
        };
        let t = self.tensor(scales).map_err(|e| self.explain(e))?;
        let scalar = self.scalar(scales, t)?;
        let bytes = scalar.bytes();
        let segment = |t: &TensorInfo, index: u64| Segment {
            file: t.file,
            offset: t.offset + index * bytes as u64,
            bytes,
        };
        match t.bytes / bytes as u64 {
            1 => {
                let mut value = [0; 8];
                self.read(scales, &segment(t, 0), &mut value[..bytes])?;
                Ok(RowScale::Shard(scalar.get(&value[..bytes], 0)))
            }
            count if count == all => Ok(RowScale::Each { first: segment(t, first), scalar }),
            count => {
                let problem = format!(
                    "it has {count} scales, but a table of {all} rows has one, or one for each row"
                );
                Err(self.tensor_error(scales, &problem))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_decoded_from_every_type() {
        let shard = |format: RowFormat, scale: RowScale| RowShard {
            name: "rows".into(),
            rows: 3,
            format,
            first: Segment { file: 0, offset: 100, bytes: format.bytes(2) },
            scale,
        };
        let mut row = [0.0; 2];
        let plain = RowScale::Shard(1.0);
        let f32s = shard(RowFormat::Plain(Scalar::F32), plain);
        let bytes = [1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat();
        assert!(f32s.decode(&bytes, &mut row) && row == [1.5, -2.0]);
        let bf16s = shard(RowFormat::Plain(Scalar::BF16), plain);
        assert!(bf16s.decode(&[0x80, 0x3f, 0x80, 0xbf], &mut row) && row == [1.0, -1.0]);
        let f16s = shard(RowFormat::Plain(Scalar::F16), plain);
        assert!(f16s.decode(&[0, 0x3c, 0, 0xc0], &mut row) && row == [1.0, -2.0]);
        assert!(!f16s.decode(&[0, 0x7c, 0, 0xc0], &mut row), "infinity");
        let fp8 = shard(RowFormat::E4m3, RowScale::Shard(0.5));
        assert!(fp8.decode(&[0x38, 0xfe], &mut row) && row == [0.5, -224.0]);
        assert!(fp8.decode(&[0x01, 0x08], &mut row) && row == [1.0 / 1024.0, 1.0 / 128.0]);
        assert!(!fp8.decode(&[0x7f, 0], &mut row), "NaN");
        let first = Segment { file: 1, offset: 10, bytes: 2 };
        let each = shard(RowFormat::E4m3, RowScale::Each { first, scalar: Scalar::BF16 });
        assert!(each.decode(&[0x38, 0x40, 0, 0x40], &mut row) && row == [2.0, 4.0]);
        assert_eq!(each.row_bytes(), 4);
        let segments: Vec<_> = each.segments(2).collect();
        assert_eq!(segments[0], Segment { file: 0, offset: 104, bytes: 2 });
        assert_eq!(segments[1], Segment { file: 1, offset: 14, bytes: 2 });
    }

    #[test]
    fn rows_are_located_in_shards() {
        let shard = |name: &str, rows| RowShard {
            name: name.into(),
            rows,
            format: RowFormat::E4m3,
            first: Segment { file: 0, offset: 0, bytes: 4 },
            scale: RowScale::Shard(1.0),
        };
        let table = RowTable { width: 4, shards: vec![shard("a", 3), shard("b", 2)] };
        let found = |row| table.locate(row).map(|(shard, row)| (shard.name.as_str(), row));
        assert_eq!([0, 2, 3].map(found), [Some(("a", 0)), Some(("a", 2)), Some(("b", 0))]);
        assert_eq!([4, 5, u64::MAX].map(found), [Some(("b", 1)), None, None]);
        assert_eq!((table.rows(), table.file_bytes()), (5, 20));
    }
}
