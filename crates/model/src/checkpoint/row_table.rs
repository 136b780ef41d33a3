//! Tables of rows that stay in the files: of which type they are, where each row is, and how its
//! bytes become f32.
//!
//! A table is divided into shards of rows, one tensor each. Rows of FP8 have scales: one for a
//! shard or the table, or one for each row or block, in a tensor of the shard or of the table.

use std::ops::Range;

use moeflux_base::Error;
use moeflux_ops::{BlockScale, BlockType, Element, Format, Scalar};

use super::{
    block_scaled::FP8_BLOCKS, folder::Checkpoint, location::Segment, source::TensorSource,
};

/// Type of the elements of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFormat {
    /// Floating-point numbers without a scale.
    Plain(Scalar),
    /// FP8 of 4 exponent and 3 mantissa bits, with a scale.
    E4m3,
    /// Blocks of ggml, which no two rows share.
    Blocks(BlockType),
}

impl RowFormat {
    /// Bytes of a row of `width` elements, without its scale.
    pub fn bytes(self, width: usize) -> usize {
        match self {
            Self::Plain(scalar) => width.saturating_mul(scalar.bytes()),
            Self::E4m3 => width,
            Self::Blocks(kind) => (width / kind.block_weights()).saturating_mul(kind.block_bytes()),
        }
    }
}

/// Scales of the rows of a shard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowScale {
    /// One factor for all rows.
    Shard(f32),
    /// A factor for each block.
    Blocks(ScaleBlocks),
}

/// Scales of blocks of rows and elements. Each row of blocks has a row of scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleBlocks {
    /// The first row of scales. The others follow without gaps.
    pub first: Segment,
    /// Type of a scale.
    pub scale: BlockScale,
    /// Rows of a block.
    pub rows: u64,
    /// Elements of a row in a block.
    pub width: usize,
    /// Rows of the table before the shard, if the scales are those of the table.
    pub rows_before: u64,
}

impl ScaleBlocks {
    /// Scales of row `row` of the shard.
    fn segment(&self, row: u64) -> Segment {
        let index = (self.rows_before + row) / self.rows.max(1);
        Segment { offset: self.first.offset + index * self.first.bytes as u64, ..self.first }
    }
}

impl RowScale {
    /// Bytes of a row's scales in the file.
    fn bytes(self) -> usize {
        match self {
            Self::Shard(_) => 0,
            Self::Blocks(blocks) => blocks.first.bytes,
        }
    }

    /// Scales of row `row` of the shard, if they are in the file.
    fn segment(self, row: u64) -> Option<Segment> {
        match self {
            Self::Shard(_) => None,
            Self::Blocks(blocks) => Some(blocks.segment(row)),
        }
    }
}

/// A range of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRange {
    pub file: usize,
    pub bytes: Range<u64>,
}

impl FileRange {
    fn len(&self) -> u64 {
        self.bytes.end.saturating_sub(self.bytes.start)
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
    /// Scales of the rows.
    pub scale: RowScale,
}

impl RowShard {
    fn elements(&self, row: u64) -> Segment {
        Segment { offset: self.first.offset + row * self.first.bytes as u64, ..self.first }
    }

    /// Segments of row `row` of the shard: its elements and its scales.
    #[doc(hidden)]
    pub fn segments(&self, row: u64) -> impl Iterator<Item = Segment> + use<> {
        std::iter::once(self.elements(row)).chain(self.scale.segment(row))
    }

    /// Ranges of the files from the first row to the last: elements and scales.
    #[doc(hidden)]
    pub fn ranges(&self) -> impl Iterator<Item = FileRange> + use<> {
        let (rows, last) = (self.rows, self.rows.saturating_sub(1));
        let ends = self.segments(0).zip(self.segments(last)).filter(move |_| rows > 0);
        ends.map(|(first, last)| FileRange {
            file: first.file as usize,
            bytes: first.offset..last.offset + last.bytes as u64,
        })
    }

    /// Bytes of a row and its scales.
    #[doc(hidden)]
    pub fn row_bytes(&self) -> usize {
        self.first.bytes + self.scale.bytes()
    }

    /// Decodes the bytes of a row, followed by its scales. Returns whether all elements are finite.
    #[doc(hidden)]
    pub fn decode(&self, bytes: &[u8], row: &mut [f32]) -> bool {
        let (elements, scales) = bytes.split_at(self.first.bytes);
        match self.format {
            RowFormat::Plain(scalar) => {
                row.iter_mut().enumerate().for_each(|(i, x)| *x = scalar.get(elements, i));
            }
            RowFormat::E4m3 => {
                row.iter_mut().enumerate().for_each(|(i, x)| *x = Element::E4M3.get(elements, i));
            }
            RowFormat::Blocks(kind) => {
                Format::Blocks(kind).dequantize([elements, &[], &[]], row);
            }
        }
        match self.scale {
            RowScale::Shard(1.0) => {}
            RowScale::Shard(scale) => row.iter_mut().for_each(|x| *x *= scale),
            RowScale::Blocks(ScaleBlocks { scale, width, .. }) => {
                for (i, block) in row.chunks_mut(width.max(1)).enumerate() {
                    let scale = scale.get(scales, i);
                    block.iter_mut().for_each(|x| *x *= scale);
                }
            }
        }
        row.iter().all(|x| x.is_finite())
    }
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

    /// Number of elements of all rows.
    pub fn parameters(&self) -> u64 {
        self.rows().saturating_mul(self.width as u64)
    }

    /// Bytes in the files, scales included.
    pub fn file_bytes(&self) -> u64 {
        let ranges = self.shards.iter().flat_map(RowShard::ranges);
        ranges.map(|range| range.len()).fold(0, u64::saturating_add)
    }

    /// Bytes of the largest row, with its scales.
    #[doc(hidden)]
    pub fn row_bytes(&self) -> usize {
        self.shards.iter().map(RowShard::row_bytes).max().unwrap_or(0)
    }

    /// Shard of a row, and its index there; `None` beyond the table.
    #[doc(hidden)]
    pub fn locate(&self, row: u64) -> Option<(&RowShard, u64)> {
        let each = self.shards.first().map_or(1, |shard| shard.rows.max(1));
        let shard = self.shards.get(usize::try_from(row / each).ok()?)?;
        (row % each < shard.rows).then_some((shard, row % each))
    }
}

/// Tensor with the scales of a shard, or of the whole table.
struct ScaleTensor {
    name: String,
    /// Rows that its scales are for.
    rows: u64,
    /// Those of them that precede the shard.
    rows_before: u64,
    /// Number of the shards that its scales are for.
    parts: u64,
    /// Index of the shard among them.
    part: u64,
}

/// A shard as an architecture asks for it.
#[derive(Clone, Copy, Debug)]
pub struct ShardRequest<'a> {
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
    /// Index of the shard.
    pub(crate) part: u64,
    /// Number of the shards.
    pub(crate) parts: u64,
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
        let block = BlockType::from_type_name(&t.dtype).filter(|_| self.changes.ggml_types);
        let format = match (t.dtype.as_str(), block) {
            ("F8_E4M3", _) => RowFormat::E4m3,
            // The header's reader has checked that rows are whole blocks.
            (_, Some(kind)) => RowFormat::Blocks(kind),
            _ => RowFormat::Plain(self.scalar(name, t)?),
        };
        let bytes = format.bytes(width);
        if (bytes as u64).checked_mul(rows) != Some(t.bytes) {
            let problem = format!("it has {} bytes, not {rows} rows of {bytes}", t.bytes);
            return Err(self.tensor_error(name, &problem));
        }
        let scale = match format {
            RowFormat::Plain(_) | RowFormat::Blocks(_) => RowScale::Shard(1.0),
            RowFormat::E4m3 => self.shard_scale(request)?,
        };
        let first = Segment { file: t.file, offset: t.offset, bytes };
        Ok(RowShard { name: name.into(), rows, format, first, scale })
    }

    /// The scales of a shard: a tensor for the shard or for the whole table, `weight_scale` or
    /// `weight_scale_inv`. An element is its code *times* the scale, whatever the name.
    fn shard_scale(&self, request: &ShardRequest<'_>) -> Result<RowScale, Error> {
        let &ShardRequest { name, table_scale, rows, table_rows, .. } = request;
        let of_shard = [format!("{name}_scale"), format!("{name}_scale_inv")];
        let of_table = [table_scale.to_owned(), format!("{table_scale}_inv")];
        let find = |names: &[String; 2]| names.iter().find(|name| self.has(name)).cloned();
        let scales = match (find(&of_shard), find(&of_table)) {
            (Some(name), _) => ScaleTensor { name, rows, rows_before: 0, parts: 1, part: 0 },
            (None, Some(name)) => {
                let &ShardRequest { first: rows_before, parts, part, .. } = request;
                ScaleTensor { name, rows: table_rows, rows_before, parts, part }
            }
            (None, None) => {
                let names = [of_shard, of_table].concat().join(" and no ");
                return Err(self.tensor_error(name, &format!("it is FP8, but there is no {names}")));
            }
        };
        self.row_scale(&scales, request.width)
    }

    /// Scales of a shard's rows of `width` elements. The shape of their tensor tells which elements
    /// share one.
    fn row_scale(&self, scales: &ScaleTensor, width: usize) -> Result<RowScale, Error> {
        let &ScaleTensor { ref name, rows, rows_before, parts, part } = scales;
        let t = self.tensor(name)?;
        let scale = match t.dtype.as_str() {
            "F8_E8M0" | "U8" => BlockScale::E8M0,
            _ => BlockScale::Plain(self.scalar(name, t)?),
        };
        let count = t.bytes / scale.bytes() as u64;
        let has = |shape: [u64; 2]| {
            let [rows, cols] = shape;
            let same = t.shape.iter().map(|n| *n as u64).eq(shape);
            let is_list = cols == 1 && t.shape.iter().map(|n| *n as u64).eq([rows]);
            (same || is_list) && rows.checked_mul(cols) == Some(count)
        };
        let shared = |index: u64| {
            let (mut value, bytes) = ([0; size_of::<f32>()], scale.bytes());
            let offset = t.offset + index * bytes as u64;
            self.read(name, &Segment { file: t.file, offset, bytes }, &mut value[..bytes])?;
            Ok(RowScale::Shard(scale.get(&value, 0)))
        };
        let in_blocks = |block: [usize; 2]| {
            let [block_rows, width_of_block] = block;
            let bytes = width.div_ceil(width_of_block) * scale.bytes();
            let first = Segment { file: t.file, offset: t.offset, bytes };
            let (rows, width) = (block_rows as u64, width_of_block);
            Ok(RowScale::Blocks(ScaleBlocks { first, scale, rows, width, rows_before }))
        };
        if count == 1 {
            return shared(0);
        }
        if has([rows, 1]) {
            return in_blocks([1, width]);
        }
        let blocks: Vec<[u16; 2]> = match self.quantization.fp8_block() {
            Some(block) => vec![block],
            None => self.quantization.group_blocks().chain(FP8_BLOCKS).collect(),
        };
        let grid = |[block_rows, block_cols]: [usize; 2]| {
            [rows.div_ceil(block_rows as u64), width.div_ceil(block_cols) as u64]
        };
        let mut blocks = blocks.into_iter().map(|block| block.map(usize::from));
        if let Some(block) = blocks.find(|block| has(grid(*block))) {
            return in_blocks(block);
        }
        if has([parts, 1]) {
            return shared(part);
        }
        let problem = format!(
            "its shape is {:?}: the {rows} rows of {width} elements have one scale, one for each \
             shard, row or block (see \"weight_block_size\" in config.json)",
            t.shape
        );
        Err(self.tensor_error(name, &problem))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{super::block_scaled::tests::checkpoint, *};

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
        let blocks = RowFormat::Blocks(BlockType::Q8_0);
        assert_eq!(blocks.bytes(64), 68);
        let blocks = RowShard { format: blocks, ..shard(RowFormat::E4m3, plain) };
        let blocks = RowShard { first: Segment { bytes: 34, ..blocks.first }, ..blocks };
        // A scale of 0.5.
        let bytes: Vec<u8> = [0, 0x38].into_iter().chain(0..32).collect();
        let mut of_block = [0.0; 32];
        assert!(blocks.decode(&bytes, &mut of_block) && of_block[..3] == [0.0, 0.5, 1.0]);
        let first = Segment { file: 1, offset: 10, bytes: 2 };
        let (scale, width) = (BlockScale::Plain(Scalar::BF16), 2);
        let scales = ScaleBlocks { first, scale, rows: 1, width, rows_before: 0 };
        let each = shard(RowFormat::E4m3, RowScale::Blocks(scales));
        assert!(each.decode(&[0x38, 0x40, 0, 0x40], &mut row) && row == [2.0, 4.0]);
        assert_eq!(each.row_bytes(), 4);
        let segments: Vec<_> = each.segments(2).collect();
        assert_eq!(segments[0], Segment { file: 0, offset: 104, bytes: 2 });
        assert_eq!(segments[1], Segment { file: 1, offset: 14, bytes: 2 });
        let range = |file, bytes| FileRange { file, bytes };
        assert!(each.ranges().eq([range(0, 100..106), range(1, 10..16)]));

        // Blocks of 4 rows and an element, of a table of which 5 rows precede the shard.
        let scale = BlockScale::E8M0;
        let scales = ScaleBlocks { first, scale, rows: 4, width: 1, rows_before: 5 };
        let blocks = shard(RowFormat::E4m3, RowScale::Blocks(scales));
        assert!(blocks.decode(&[0x38, 0x38, 126, 129], &mut row) && row == [0.5, 4.0]);
        let offsets = [0, 1, 2].map(|row| blocks.segments(row).nth(1).unwrap().offset);
        assert_eq!(offsets, [12, 12, 12]);
        let last = RowShard { rows: 4, ..blocks.clone() };
        assert_eq!(last.segments(3).nth(1).unwrap().offset, 14);
        assert!(last.ranges().eq([range(0, 100..108), range(1, 12..16)]));
        assert!(!blocks.decode(&[0x38, 0x38, 126, 255], &mut row), "NaN");
    }

    /// Scales of the second of three shards of 2 rows of 160 elements, with tensors of these shapes
    /// for the whole table or the shard.
    fn scales(
        tensor: &str,
        dtype: &str,
        shape: &[usize],
        config: &Value,
    ) -> Result<RowShard, Error> {
        let (rows, width) = (2, 160);
        let tensors: [(&str, &str, &[usize]); 2] =
            [("t.shard_1.weight", "F8_E4M3", &[rows, width]), (tensor, dtype, shape)];
        checkpoint(config, &tensors).locate_shard(&ShardRequest {
            name: "t.shard_1.weight",
            table_scale: "t.weight_scale",
            first: 2,
            rows: 2,
            table_rows: 6,
            part: 1,
            parts: 3,
            width,
        })
    }

    #[test]
    fn shapes_of_scales_tell_which_elements_share_one() {
        let none = json!({});
        let (table, own) = ("t.weight_scale", "t.shard_1.weight_scale");
        let blocks = |tensor: &str, dtype: &str, shape: &[usize], config: &Value| {
            let shard = scales(tensor, dtype, shape, config).unwrap();
            match shard.scale {
                RowScale::Shard(_) => [0; 4],
                RowScale::Blocks(b) => {
                    [b.rows as usize, b.width, b.rows_before as usize, b.first.bytes]
                }
            }
        };
        for shape in [&[][..], &[1], &[1, 1], &[3], &[3, 1]] {
            assert_eq!(blocks(table, "F32", shape, &none), [0; 4], "{shape:?}");
        }
        assert_eq!(blocks(own, "BF16", &[], &none), [0; 4]);
        for shape in [&[6][..], &[6, 1]] {
            assert_eq!(blocks(table, "BF16", shape, &none), [1, 160, 2, 2]);
        }
        assert_eq!(blocks(own, "F32", &[2, 1], &none), [1, 160, 0, 4]);
        assert_eq!(blocks(table, "F8_E8M0", &[6, 5], &none), [1, 32, 2, 5]);
        assert_eq!(blocks(table, "F32", &[1, 2], &none), [128, 128, 2, 8]);
        let inverse = "t.shard_1.weight_scale_inv";
        assert_eq!(blocks(inverse, "F32", &[1, 5], &none), [32, 32, 0, 20]);
        let config = json!({"quant_method": "fp8", "weight_block_size": [4, 80]});
        assert_eq!(blocks(table, "BF16", &[2, 2], &config), [4, 80, 2, 4]);

        for (shape, part) in [(&[5][..], "[5]"), (&[6, 3], "[6, 3]"), (&[2, 1], "[2, 1]")] {
            let error = scales(table, "F32", shape, &none).unwrap_err().to_string();
            assert!(error.contains("t.weight_scale") && error.contains(part), "{error}");
        }
        let error = scales(table, "F32", &[1, 2], &config).unwrap_err().to_string();
        assert!(error.contains("weight_block_size"), "{error}");
        let error = scales(table, "I32", &[], &none).unwrap_err().to_string();
        assert!(error.contains("t.weight_scale") && error.contains("I32"), "{error}");
        let error = scales("other", "F32", &[], &none).unwrap_err().to_string();
        assert!(error.contains("t.shard_1.weight") && error.contains("no t.weight_scale"));
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
