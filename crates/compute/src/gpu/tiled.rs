//! Products of many rows on the fast path (prefill): x as f16, weights unpacked tile by tile, sums in f32.
//!
//! A row's bits depend neither on the size of the tiles nor on which rows share the op: every sum is in the order of the
//! inputs. So the experts of a chunk may come in one op or in many, listed or routed.

use std::collections::BTreeMap;

use super::{
    AdapterKind, Constants, GpuDevice, Kernel, Memory, Params,
    elementwise::activation_of,
    formats::{Chunk, scalar},
    kernel,
    matmul::Pieces,
};
use crate::{
    Buffer, Error, ExpertUse, ExpertUses, Format, MatrixShape, Op, SlotTable, View, Weight,
    matrix::MatrixPlace,
};

pub(in crate::gpu) static HALVES: Kernel =
    kernel!("activations_f16", "gemm/activations_f16", [Write, Write]);
pub(in crate::gpu) static BUCKET: Kernel =
    kernel!("sort_assignments", "gemm/sort_assignments", [Write, Read, Write]);
/// GEMM kernels with one way to multiply: one for each block codec, in the order of [`Chunk`], with
/// the file that dequantizes its blocks, and one for any other format.
macro_rules! kernels {
    ($root:literal, $name:literal, [$($codec:literal, $dequantize:literal;)*]) => {
        [
            $(kernel!(
                concat!($name, " ", $codec),
                $root,
                {
                    weights: "gemm/weights_blocks",
                    codec: concat!("codec/", $codec),
                    dequantize: concat!("gemm/dequantize_", $dequantize),
                },
                [Write, Read, Read, Read, Read, Read]
            ),)*
            kernel!(
                concat!($name, " any"),
                $root,
                { weights: "gemm/weights_any" },
                [Write, Read, Read, Read, Read, Read]
            ),
        ]
    };
}

pub(in crate::gpu) static COOPERATIVE: [Kernel; 7] = kernels!("gemm/gemm_cooperative", "gemm_cooperative", [
    "q4", "q4"; "q8", "q8"; "quants", "quants"; "plain", "plain"; "e2m1", "minifloat"; "e4m3", "minifloat";
]);
pub(in crate::gpu) static REGISTERS: [Kernel; 7] = kernels!("gemm/gemm_registers", "gemm_registers", [
    "q4", "quants"; "q8", "quants"; "quants", "quants"; "plain", "plain"; "e2m1", "minifloat"; "e4m3", "minifloat";
]);
/// The last of them.
const ANY: usize = 6;

/// Rows from which tiles pay, or may: of a matrix, and of the input of experts, each of which meets few of them.
pub(super) const ROWS: usize = 16;
const EXPERT_ROWS: usize = 32;
/// Fewer rows no tile has.
const SMALLEST_TILE: usize = 16;
/// Rows of f16 are padded with zeros to a multiple of this.
const PADDED: usize = 64;
/// Threads of a workgroup, but for those that multiply cooperative matrices.
const THREADS: u32 = 256;
/// Tiles of cooperative matrices. A subgroup computes 64 outputs of 16 to 64 rows.
const SMALL: TileShape = TileShape { rows: 64, outputs: 64, step: 64, subgroups: 4 };
const MIDDLE: TileShape = TileShape { rows: 64, outputs: 128, step: 64, subgroups: 4 };
const WIDE: TileShape = TileShape { rows: 64, outputs: 256, step: 32, subgroups: 8 };
const LARGE: TileShape = TileShape { rows: 128, outputs: 256, step: 32, subgroups: 8 };
/// The same where a workgroup has little memory.
const LITTLE_WIDE: TileShape = TileShape { rows: 32, outputs: 256, step: 32, subgroups: 4 };
const LITTLE: TileShape = TileShape { rows: 64, outputs: 128, step: 32, subgroups: 4 };
/// How many tiles keep a card busy.
const MANY_GROUPS: usize = 90;
/// How many workgroups a card computes at once: fewer of them take as long.
const BUSY_GROUPS: usize = 264;
/// Rows of each expert up to which tiles are wide, not large.
const FEW_ROWS: usize = 40;
/// `BIAS` of `tile.wgsl`.
const BIAS_OF_ACTIVATIONS: u32 = 8;
const NO_BIAS: u32 = 9;

/// From how many rows times outputs of a matrix tiles pay on a card with cooperative matrices, and from how many uses of an
/// expert in the mean: with fewer, they take longer than all rows one by one, which take the longer the more it takes to
/// unpack a weight.
const fn pays(chunk: Option<Chunk>) -> (usize, usize) {
    match chunk {
        Some(Chunk::Q4 | Chunk::Q8) => (64 << 10, 5),
        Some(Chunk::E2m1) => (44 << 10, 3),
        _ => (36 << 10, 2),
    }
}

/// Whether tiles of cooperative matrices pay for so many rows of a matrix.
fn pay_for_rows(shape: MatrixShape, rows: usize) -> bool {
    rows * shape.rows >= pays(Chunk::of(shape)).0
}

/// Whether they pay for so many uses among experts with this gate.
fn pay_for_uses(gate: MatrixShape, uses: usize, experts: usize) -> bool {
    let groups_of_one = (2 * gate.rows).div_ceil(WIDE.outputs as usize).max(1);
    uses >= experts.max(BUSY_GROUPS / groups_of_one).saturating_mul(pays(Chunk::of(gate)).1)
}

/// What a workgroup computes: rows by outputs, so many inputs at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileShape {
    rows: u32,
    outputs: u32,
    step: u32,
    subgroups: u32,
}

/// Kernels and what their workgroups compute.
#[derive(Clone, Copy, Debug)]
struct Tile {
    kernels: &'static [Kernel; 7],
    rows: u32,
    outputs: u32,
    step: u32,
    threads: u32,
}

impl Tile {
    /// Tiles for one matrix: smaller ones where large ones leave a part of the card without work.
    fn of_matrix(gpu: &GpuDevice, rows: usize, outputs: usize) -> Self {
        let busy = |tile: TileShape| {
            rows.div_ceil(tile.rows as usize) * outputs.div_ceil(tile.outputs as usize)
                >= MANY_GROUPS
        };
        let shape = match () {
            () if !busy(MIDDLE) => SMALL,
            () if rows > MIDDLE.rows as usize && busy(LARGE) => LARGE,
            () => MIDDLE,
        };
        Self::of(gpu, rows, shape)
    }

    /// Tiles for experts: each one that more rows meet than a tile has unpacks its weights again.
    fn of_experts(gpu: &GpuDevice, uses: usize, experts: usize) -> Self {
        let rows = uses.div_ceil(experts);
        Self::of(gpu, rows, if rows > FEW_ROWS { LARGE } else { WIDE })
    }

    /// Tiles for matrices that meet about `rows` rows each, of this shape if the adapter has what it takes.
    fn of(gpu: &GpuDevice, rows: usize, shape: TileShape) -> Self {
        let target = gpu.target();
        let memory = gpu.limits.max_compute_workgroup_storage_size;
        if !target.cooperative || !target.team.is_multiple_of(32) || memory < 32 << 10 {
            let rows = match rows {
                ..=16 => 16,
                17..=32 => 32,
                _ if memory < 20 << 10 => 32,
                _ => 64,
            };
            return Self { kernels: &REGISTERS, rows, outputs: 64, step: 32, threads: THREADS };
        }
        let TileShape { rows, outputs, step, subgroups } = match rows {
            _ if memory >= 48 << 10 || shape == SMALL => shape,
            ..=32 => LITTLE_WIDE,
            _ => LITTLE,
        };
        Self { kernels: &COOPERATIVE, rows, outputs, step, threads: subgroups * target.team }
    }
}

/// Inputs in f16 as they lie in the scratch: first words of factors and numbers, and words of a row.
#[derive(Clone, Copy, Debug)]
struct Halves {
    factors: usize,
    halves: usize,
    words: usize,
}

const fn words_of(width: usize) -> usize {
    width.next_multiple_of(PADDED) / 2
}

/// Runs [`Op::MatMul`], unless it has too few rows for tiles: `false`.
pub(super) fn mat_mul(
    gpu: &mut GpuDevice,
    x: View,
    (weight, bias): (Weight, Option<Buffer>),
    out: View,
) -> Result<bool, Error> {
    let words = words_of(x.width);
    let factors = x.rows.next_multiple_of(4);
    let Pieces { shape, all } = gpu.pieces(weight)?;
    let few = gpu.weighs_rows() && !pay_for_rows(shape, x.rows);
    if x.rows < ROWS || few || !gpu.store.sees(factors + x.rows * words) {
        return Ok(false);
    }
    let scratch = gpu.scratch(factors + x.rows * words)?;
    let halves = Halves { factors: 0, halves: factors, words };
    gpu.halves(x, &scratch, halves)?;
    let bias = bias.map(|b| gpu.store.start(b)).transpose()?;
    for (arena, piece) in all {
        let product = Product {
            tile: Tile::of_matrix(gpu, x.rows, piece.rows),
            uses: Uses { kind: 0, tiles: 0, list: 0, bank: 0 },
            rows: x.rows,
            shape,
            parts: [piece.weights, piece.scales, piece.biases],
            up: None,
            bias: bias
                .map_or((NO_BIAS, [0; 2]), |b| (BIAS_OF_ACTIVATIONS, [b + piece.first as u32, 0])),
            activation: (0, [0.0; 2]),
            outputs: piece.rows,
        };
        let out = out.columns(piece.first, piece.rows);
        gpu.product(&product, [&arena, &scratch, &scratch], halves, out)?;
    }
    Ok(true)
}

/// Runs [`Op::Experts`], unless it has too few rows for tiles or gate and up are not alike: `false`.
pub(super) fn experts(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<bool, Error> {
    let &Op::Experts { x, shape, activation, experts, uses, inner, out } = op else {
        return Ok(false);
    };
    let [x_words, inner_words] = [x.width, inner.width].map(words_of);
    // Words of the table that a router's choice needs, of factors, and of numbers.
    let routed = match uses {
        ExpertUses::Routed { table, .. } => Some(gpu.store.table_of(table)?.slots.len()),
        ExpertUses::Listed(_) => None,
    };
    let size = |uses: usize| {
        let table = routed.map_or(0, |experts| 2 * uses + (uses / SMALLEST_TILE + experts) * 4);
        let factors = x.rows.max(uses).next_multiple_of(4);
        (table.next_multiple_of(4), factors, (x.rows * x_words).max(uses * inner_words))
    };
    // What decides is the same for all ops that the uses of a chunk come in.
    let most = size(out.rows);
    let few = match gpu.weighs_rows() {
        true => x.rows < ROWS || !pay_for_uses(shape.gate, out.rows, experts),
        false => x.rows < EXPERT_ROWS,
    };
    if few || shape.gate != shape.up || !gpu.store.sees(most.0 + most.1 + most.2) {
        return Ok(false);
    }
    let count = uses.len();
    if count == 0 {
        return Ok(true);
    }
    let (table, factors, halves) = size(count);
    let scratch = gpu.scratch(table + factors + halves)?;
    let at = |words| Halves { factors: table, halves: table + factors, words };
    let (tile, plan) = match uses {
        ExpertUses::Listed(uses) => {
            let tile = Tile::of_experts(gpu, count, uses.chunk_by(|a, b| a.slot == b.slot).count());
            (tile, listed_tiles(gpu, uses, tile.rows as usize)?)
        }
        ExpertUses::Routed { ids, table } => {
            let tile = Tile::of_experts(gpu, count, routed.unwrap_or(1));
            (tile, routed_tiles(gpu, ids, table, (tile.rows, &scratch))?)
        }
    };
    let [gate, up, down] = shape.layout()?.places();
    gpu.halves(x, &scratch, at(x_words))?;
    for bank in &plan.banks {
        let product = Product {
            tile,
            uses: bank.uses(1, plan.list),
            rows: bank.tiles,
            shape: gate.shape,
            parts: gate.parts.map(|at| at as u32),
            up: Some(&up),
            bias: bias_of([&gate, &up]),
            activation: activation_of(activation),
            outputs: 2 * inner.width,
        };
        gpu.product(&product, [&bank.memory, &scratch, &plan.words], at(x_words), inner)?;
    }
    gpu.halves(View { rows: count, ..inner }, &scratch, at(inner_words))?;
    for bank in &plan.banks {
        let product = Product {
            tile,
            uses: bank.uses(2, plan.list),
            rows: bank.tiles,
            shape: down.shape,
            parts: down.parts.map(|at| at as u32),
            up: None,
            bias: bias_of([&down, &down]),
            activation: (0, [0.0; 2]),
            outputs: out.width,
        };
        gpu.product(&product, [&bank.memory, &scratch, &plan.words], at(inner_words), out)?;
    }
    Ok(true)
}

/// `BIAS` and where the biases of two matrices lie.
fn bias_of(places: [&MatrixPlace; 2]) -> (u32, [u32; 2]) {
    match places.map(|place| place.bias) {
        [Some((of, first)), Some((_, second))] => (scalar(of), [first as u32, second as u32]),
        _ => (NO_BIAS, [0; 2]),
    }
}

/// `ALIGNED` of `tile_any.wgsl`.
fn aligned(shape: MatrixShape, weights: u32) -> bool {
    let whole = match shape.format {
        Format::Affine { bits, .. } => bits % 4 == 0,
        Format::Plain(_) | Format::Scaled { .. } => true,
    };
    whole && weights.is_multiple_of(4) && shape.format.row_bytes(shape.cols).is_multiple_of(4)
}

/// `USES` of `tile.wgsl` and what belongs to it.
#[derive(Clone, Copy, Debug)]
struct Uses {
    kind: u32,
    tiles: u32,
    list: u32,
    bank: u32,
}

/// The tiles of the experts of one bank.
struct BankTiles {
    memory: Memory,
    bank: u16,
    /// First word of the table, and entries.
    at: u32,
    tiles: usize,
}

impl BankTiles {
    const fn uses(&self, kind: u32, list: u32) -> Uses {
        Uses { kind, tiles: self.at, list, bank: self.bank as u32 }
    }
}

/// All tiles of an op.
struct Plan {
    /// Where tables and list lie.
    words: Memory,
    list: u32,
    banks: Vec<BankTiles>,
}

/// The tiles of a list.
fn listed_tiles(gpu: &mut GpuDevice, uses: &[ExpertUse], rows: usize) -> Result<Plan, Error> {
    let mut banks: BTreeMap<u16, Vec<u32>> = BTreeMap::new();
    let mut first = 0;
    for run in uses.chunk_by(|a, b| a.slot == b.slot) {
        let slot = run[0].slot;
        let entries = banks.entry(slot.bank).or_default();
        for part in run.chunks(rows) {
            let words = [first, part.len()].map(|n| n as u32);
            entries.extend([gpu.store.slot_offset(slot), slot.bank.into(), words[0], words[1]]);
            first += part.len();
        }
    }
    gpu.room(uses.len() * 2 + banks.values().map(Vec::len).sum::<usize>())?;
    let list = gpu.upload(uses.iter().flat_map(|u| [u.row as u32, u.part as u32]));
    let banks = banks.into_iter().map(|(bank, entries)| {
        let tiles = entries.len() / 4;
        Ok(BankTiles { memory: gpu.store.bank_memory(bank)?, bank, at: gpu.upload(entries), tiles })
    });
    let banks = banks.collect::<Result<_, Error>>()?;
    Ok(Plan { words: gpu.upload.clone(), list, banks })
}

/// Has the card sort what a router chose; list and table are written to the start of the scratch.
fn routed_tiles(
    gpu: &mut GpuDevice,
    ids: View,
    table: SlotTable,
    (rows, scratch): (u32, &Memory),
) -> Result<Plan, Error> {
    let table = gpu.store.table_of(table)?;
    let (slots, experts, banks) = (table.memory.clone(), table.slots.len(), table.banks.clone());
    let uses = ids.rows * ids.width;
    let params = Params::new()
        .u(gpu.store.place(&ids)?)
        .n(ids.row_stride)
        .n(ids.width)
        .n(uses)
        .u(0)
        .n(2 * uses)
        .n(experts);
    let constants = Constants::new(&[("WG", THREADS), ("TILE_M", rows)]);
    gpu.dispatch(&BUCKET, constants, &[&gpu.activations(), &slots, scratch], &params, experts)?;
    let of_bank = |bank: u16| {
        let tiles = uses / rows as usize + experts;
        Ok(BankTiles { memory: gpu.store.bank_memory(bank)?, bank, at: 2 * uses as u32, tiles })
    };
    let banks = banks.into_iter().map(of_bank).collect::<Result<_, Error>>()?;
    Ok(Plan { words: scratch.clone(), list: 0, banks })
}

/// One dispatch of `tile.wgsl`.
struct Product<'a> {
    tile: Tile,
    uses: Uses,
    /// Rows, or tiles of a table.
    rows: usize,
    /// The matrix, or gate, and where its parts begin.
    shape: MatrixShape,
    parts: [u32; 3],
    up: Option<&'a MatrixPlace>,
    /// `BIAS` and where.
    bias: (u32, [u32; 2]),
    activation: (u32, [f32; 2]),
    /// Outputs; those of gate and up together.
    outputs: usize,
}

impl GpuDevice {
    /// Whether more than [`ROWS`] and [`EXPERT_ROWS`] decides on tiles. It was measured for cooperative matrices; software
    /// computes one workgroup after another, so that only the work counts.
    fn weighs_rows(&self) -> bool {
        self.target().cooperative && self.opened.adapter.kind != AdapterKind::Software
    }

    fn halves(&mut self, x: View, scratch: &Memory, at: Halves) -> Result<(), Error> {
        let params = Params::new()
            .view(self.store.place(&x)?, &x)
            .n(x.rows)
            .n(x.width)
            .n(at.factors)
            .n(at.halves)
            .n(at.words);
        let constants = Constants::new(&[("WG", THREADS)]);
        self.dispatch(&HALVES, constants, &[&self.activations(), scratch], &params, x.rows)
    }

    /// `buffers`: weights, scratch, list and table.
    fn product(
        &mut self,
        product: &Product<'_>,
        [weights, scratch, words]: [&Memory; 3],
        x: Halves,
        out: View,
    ) -> Result<(), Error> {
        let &Product { tile, uses, rows, shape, parts, up, bias, activation, outputs } = product;
        let up_parts = up.map_or(parts, |up| up.parts.map(|at| at as u32));
        let (step, second) = up.map_or((1, 0), |up| (up.step, up.first));
        let chunks = [parts, up_parts].map(|parts| Chunk::at(shape, parts.map(|at| at as usize)));
        let which = if let [Some(chunk), Some(_)] = chunks { chunk.kernel() } else { ANY };
        let aligned = aligned(shape, parts[0]) && aligned(shape, up_parts[0]);
        let (kind, [alpha, limit]) = activation;
        let params = Params::new()
            .view(self.store.place(&out)?, &out)
            .matrix(parts, shape)
            .u(up_parts[0])
            .u(up_parts[1])
            .u(up_parts[2])
            .n(x.halves / 2)
            .n(x.words / 2)
            .n(x.factors)
            .n(rows)
            .n(outputs)
            .n(shape.cols)
            .u(uses.tiles)
            .u(uses.list)
            .u(uses.bank)
            .n(step)
            .n(second)
            .u(bias.1[0])
            .u(bias.1[1])
            .f(alpha)
            .f(limit);
        let constants = Constants::new(&[
            ("WG", tile.threads),
            ("TILE_M", tile.rows),
            ("TILE_N", tile.outputs),
            ("TILE_K", tile.step),
            ("ASSIGNMENTS", uses.kind),
            ("GATED", up.is_some().into()),
            ("ACTIVATION", kind),
            ("BIAS", bias.0),
            ("ALIGNED", aligned.into()),
        ])
        .format(shape.format);
        let tiles = if uses.kind == 0 { rows.div_ceil(tile.rows as usize) } else { rows };
        let groups = tiles * outputs.div_ceil(tile.outputs as usize);
        let buffers = [&self.activations(), weights, scratch, scratch, words, weights];
        self.dispatch(&tile.kernels[which], constants, &buffers, &params, groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Scalar,
        gpu::kernel::{Target, tests::valid},
    };

    /// By what was measured.
    #[test]
    fn few_uses_of_many_experts_come_one_by_one() {
        let gate = |rows, cols, format| MatrixShape { rows, cols, format };
        let qwen3 = gate(768, 2048, affine(4));
        let cases = [
            (qwen3, 48 * 8, 128, false),
            (qwen3, 128 * 8, 128, true),
            (gate(512, 2048, affine(4)), 96 * 8, 256, false),
            (gate(512, 2048, affine(4)), 256 * 8, 256, true),
            (gate(2880, 2880, Format::MXFP4), 16 * 4, 32, false),
            (gate(2880, 2880, Format::MXFP4), 32 * 4, 32, true),
            // Too few experts for a card.
            (qwen3, 16 * 8, 16, false),
            (qwen3, 128 * 8, 16, true),
        ];
        for (gate, uses, experts, tiles) in cases {
            assert_eq!(
                pay_for_uses(gate, uses, experts),
                tiles,
                "{gate:?}, {uses} uses of {experts}"
            );
        }
        assert!(
            !pay_for_rows(gate(2048, 4096, affine(4)), 24)
                && pay_for_rows(gate(2048, 4096, affine(4)), 32)
        );
    }

    #[test]
    fn cooperative_tiles_are_valid() {
        let target = Target { team: 32, subgroups: true, dot8: true, f16: true, cooperative: true };
        let plain = [Scalar::F32, Scalar::F16, Scalar::BF16].map(Format::Plain);
        let formats = [Format::MXFP4, Format::NVFP4, Format::MXFP8].into_iter().chain(plain);
        for format in formats.chain([2, 3, 4, 5, 6, 8].map(affine)) {
            let chunk = Chunk::of(MatrixShape { rows: 1, cols: 64, format }).expect("whole chunks");
            let little = [SMALL, LITTLE_WIDE, LITTLE].map(|shape| (shape, 32 << 10));
            let large = [MIDDLE, WIDE, LARGE].map(|shape| (shape, 48 << 10));
            for (TileShape { rows, outputs, step, subgroups }, memory) in
                little.into_iter().chain(large)
            {
                let constants = Constants::new(&[
                    ("WG", subgroups * target.team),
                    ("TILE_M", rows),
                    ("TILE_N", outputs),
                    ("TILE_K", step),
                    ("ASSIGNMENTS", 1),
                    ("GATED", 1),
                    ("ACTIVATION", 0),
                    ("BIAS", 9),
                    ("ALIGNED", 1),
                ]);
                for kernel in [&COOPERATIVE[chunk.kernel()], &COOPERATIVE[ANY]] {
                    valid(&target.text(kernel, &constants.format(format)), memory);
                }
            }
        }
    }

    fn affine(bits: u8) -> Format {
        Format::Affine { bits, group: 64, scale: Scalar::BF16 }
    }
}
