//! Weight arenas: resident matrices, split into shards that a kernel can bind.

use moeflux_ops::{Error, MatrixShape, PerPlane, Weight, seam::stale};

use super::{
    buffer::{DeviceBuffer, align_up, write_padded},
    store::Store,
};

/// Bytes of the first arena; later arenas double up to [`MAX_ARENA`].
const FIRST_ARENA: u64 = 8 << 20;
const MAX_ARENA: u64 = 256 << 20;

/// Rows of a weight matrix in one arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightShard {
    /// Index of the arena.
    arena: usize,
    /// First row of the matrix, a multiple of the format's rows per block.
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    /// Byte offsets of the planes in the arena, multiples of [`super::ALIGN`].
    pub(crate) planes: PerPlane<u32>,
}

impl WeightShard {
    /// The same rows from a later column on: planes start `bytes` later.
    pub(crate) fn advance(self, bytes: PerPlane<u32>) -> Self {
        Self { planes: std::array::from_fn(|i| self.planes[i] + bytes[i]), ..self }
    }
}

/// Weight matrix on the card.
pub(crate) struct GpuWeight {
    pub(crate) shape: MatrixShape,
    /// By row.
    pub(crate) shards: Vec<WeightShard>,
}

/// Arenas of all weights.
#[derive(Default)]
pub(super) struct WeightArenas {
    arenas: Vec<DeviceBuffer>,
    /// Bytes used of the last arena.
    used: u64,
    /// By [`Weight`].
    matrices: Vec<GpuWeight>,
}

impl Store {
    /// Uploads a weight matrix, as shards that are each within one arena.
    pub(crate) fn weight(&mut self, shape: MatrixShape, bytes: &[u8]) -> Result<Weight, Error> {
        let planes = shape.view(bytes)?.planes;
        let layouts = shape.format.planes(shape.cols);
        let block_rows = shape.format.block().rows;
        let mut shards = Vec::new();
        let mut first_row = 0;
        while first_row < shape.rows {
            let mut rows = shape.rows - first_row;
            let size = |rows: usize| -> Result<u64, Error> {
                let planes = MatrixShape { rows, ..shape }.plane_bytes()?;
                Ok(planes.0.iter().map(|bytes| align_up(*bytes as u64)).sum())
            };
            while size(rows)? > self.max_bytes {
                if rows <= block_rows {
                    return Err(Error::Shape(format!(
                        "a row of {} is too large for this GPU",
                        shape.cols
                    )));
                }
                rows = (rows / 2).next_multiple_of(block_rows);
            }
            self.reserve_arena(size(rows)?)?;
            let arena = self.weights.arenas.len() - 1;
            let mut upload = |plane: &[u8]| {
                let offset = self.weights.used;
                write_padded(&self.queue, &self.weights.arenas[arena].raw, offset, plane);
                self.weights.used = align_up(offset + plane.len() as u64);
                offset as u32
            };
            let planes = std::array::from_fn(|i| {
                upload(&planes[i][layouts[i].row_offset(first_row)..][..layouts[i].bytes(rows)])
            });
            shards.push(WeightShard { arena, first_row, rows, planes });
            first_row += rows;
        }
        self.weights.matrices.push(GpuWeight { shape, shards });
        Ok(Weight(self.id.handle(self.weights.matrices.len() - 1)))
    }

    /// Makes the last arena one with `bytes` left.
    fn reserve_arena(&mut self, bytes: u64) -> Result<(), Error> {
        let last = self.weights.arenas.last();
        if bytes > last.map_or(0, |arena| arena.raw.size() - self.weights.used) {
            let doubled = last.map_or(FIRST_ARENA, |arena| (arena.raw.size() * 2).min(MAX_ARENA));
            let arena = self.allocate("weights", doubled.max(bytes).min(self.max_bytes))?;
            self.weights.arenas.push(arena);
            self.weights.used = 0;
        }
        Ok(())
    }

    /// Shape and shards of a weight matrix.
    pub(crate) fn matrix(&self, weight: Weight) -> Result<&GpuWeight, Error> {
        let index = weight.0.index_on(self.id, "weight")?;
        self.weights.matrices.get(index).ok_or_else(|| stale("weight"))
    }

    /// Arena of a shard.
    pub(crate) fn arena(&self, shard: &WeightShard) -> DeviceBuffer {
        self.weights.arenas[shard.arena].clone()
    }
}
