//! Products with few rows of activations, at the speed at which memory gives the weights.

use super::{
    Constants, GpuDevice, Kernel, Memory, Params,
    elementwise::activation_of,
    experts::InBank,
    formats::{Chunk, scalar},
    kernel,
    matmul::Pieces,
    memory::Piece,
    norm,
    topk::Ranked,
};
use crate::{Activation, Buffer, Error, MatrixShape, Shared, View, Weight, matrix::MatrixPlace};

/// One kernel for each block codec, with f32 activations and with integer ones.
macro_rules! kernels {
    ($root:literal, $name:literal, $binds:tt, $bindings:tt) => {
        [
            kernels!(@ $root, $name, "q4", "f32", $binds, $bindings),
            kernels!(@ $root, $name, "q8", "f32", $binds, $bindings),
            kernels!(@ $root, $name, "quants", "f32", $binds, $bindings),
            kernels!(@ $root, $name, "plain", "f32", $binds, $bindings),
            kernels!(@ $root, $name, "e2m1", "f32", $binds, $bindings),
            kernels!(@ $root, $name, "e4m3", "f32", $binds, $bindings),
            kernels!(@ $root, $name, "q4", "int", $binds, $bindings),
            kernels!(@ $root, $name, "q8", "int", $binds, $bindings),
            kernels!(@ $root, $name, "quants", "int", $binds, $bindings),
            kernels!(@ $root, $name, "e2m1", "int", $binds, $bindings),
        ]
    };
    (
        @ $root:literal, $name:literal, $codec:literal, $activations:literal,
        { $($interface:ident: $file:literal),* }, $bindings:tt
    ) => {
        kernel!(
            concat!($name, " ", $codec, " ", $activations),
            $root,
            {
                codec: concat!("codec/", $codec),
                activations: concat!("gemv/activations_", $activations),
                $($interface: $file),*
            },
            $bindings
        )
    };
}

pub(in crate::gpu) static MATVEC: [Kernel; 10] =
    kernels!("gemv/gemv", "gemv", {}, [Write, Read, Read]);
pub(in crate::gpu) static EXPERTS: [Kernel; 10] = kernels!(
    "experts/experts_gemv",
    "experts_gemv",
    { assignments: "experts/assignments_given" },
    [Write, Read, Read, Read]
);
pub(in crate::gpu) static EXPERTS_RANKED: [Kernel; 10] = kernels!(
    "experts/experts_gemv",
    "experts_gemv routed",
    { assignments: "experts/assignments_routed", scratch: "router/scratch_workgroup" },
    [Write, Read, Read, Read, Write]
);
pub(in crate::gpu) static EXPERTS_SUM: [Kernel; 10] =
    kernels!("experts/experts_down_sum", "experts_down_sum", {}, [Write, Read, Read, Read]);

/// Threads of a workgroup.
const THREADS: u32 = 256;
/// Threads of one that sums experts, and how many such it takes to fill a GPU: the first of these that fits. It stages what all
/// experts of a row meet, so fewer are better. Of f32 activations threads keep more, and adapters may have too few registers
/// for more than the last.
const SUM_THREADS: [(u32, usize); 3] = [(1024, 128), (512, 0), (THREADS, 0)];
/// The most threads that share rows of weights.
const PART: u32 = 32;
/// Rows of a matrix from which on parts take several of them, whatever their length: there are enough parts to fill any GPU.
const MANY: usize = 1 << 15;
/// Rows of a matrix up to which parts of f32 activations take few of them, though each then fetches `x` for itself.
const FEW: usize = 1 << 10;
/// Workgroups of a product that are enough to fill any GPU: larger ones walk several blocks, so that `x` is staged less often.
const FILL: usize = 528;
/// The same of a matrix of [`MANY`] rows: how many fit at once differs from kernel to kernel, and of more the last ones are
/// a smaller part.
const FILL_MANY: usize = 3 * FILL;
/// Rows up to which products norm them on their way: each workgroup of a row norms it anew, which a dispatch less makes up for.
pub(super) const NORMED: usize = 4;
/// Matrices that share a dispatch.
pub(super) const TARGETS: usize = 4;

/// What activations are while they meet weights.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Staged {
    F32,
    /// Whole numbers of two bytes, or of one, with a scale for 32 of them.
    Two,
    One,
}

impl Staged {
    /// What most matrices meet.
    const fn usual(exact: bool) -> Self {
        if exact { Self::F32 } else { Self::Two }
    }

    /// What gate and up of experts meet: half of the bytes of a token, and where a second byte shows least in logits.
    const fn first_of_experts(exact: bool) -> Self {
        if exact { Self::F32 } else { Self::One }
    }

    /// Bytes of workgroup memory for so many, scales and sums included.
    const fn memory(self, cols: usize) -> usize {
        match self {
            Self::F32 => 4 * cols,
            Self::Two => 2 * cols + cols / 2,
            Self::One => cols + cols / 2,
        }
    }
}

/// A kernel for a shape, and constants for it.
#[derive(Clone, Copy)]
struct Choice {
    which: usize,
    chunk: Chunk,
    /// Threads of a part, and the rows that it takes at a time.
    part: u32,
    rows: usize,
    staged: Staged,
    constants: Constants,
}

impl GpuDevice {
    /// How many inputs of a row workgroup memory holds at once for these kernels, of such a shape: all, or whole blocks of
    /// weights. `None` where only the general kernel can multiply.
    pub(super) fn inputs(&self, shape: MatrixShape, staged: Staged) -> Option<usize> {
        let staged = self.staged(Chunk::of(shape)?, staged);
        let most = self.group_room() * 32 / staged.memory(32);
        let block = shape.format.block_cols().max(32);
        let most = most / block * block;
        let sections = shape.cols.div_ceil(most.max(1)).max(1);
        (most > 0).then(|| shape.cols.div_ceil(sections).next_multiple_of(block).min(shape.cols))
    }

    /// How these kernels stage what chunks meet: where they cannot multiply whole numbers, as f32.
    fn staged(&self, chunk: Chunk, staged: Staged) -> Staged {
        if self.target().dot8 && chunk.is_whole() { staged } else { Staged::F32 }
    }

    /// Bytes of workgroup memory for x. Teams and parts that are no subgroups exchange numbers through the rest.
    const fn group_room(&self) -> usize {
        self.limits.max_compute_workgroup_storage_size as usize - 4096
    }

    /// Which kernel multiplies few rows with a matrix of a shape; `None` where none can at once.
    fn choose(&self, shape: MatrixShape, staged: Staged) -> Option<Choice> {
        self.inputs(shape, staged).filter(|n| *n == shape.cols)?;
        self.choose_for(shape, staged, shape.cols)
    }

    /// Which kernel multiplies few rows with `cols` inputs of each row of a matrix, as [`GpuDevice::inputs`] has them.
    fn choose_for(&self, shape: MatrixShape, staged: Staged, cols: usize) -> Option<Choice> {
        let target = self.target();
        let chunk = Chunk::of(shape)?;
        let staged = self.staged(chunk, staged);
        let rounded = staged != Staged::F32;
        let of_x = MatrixShape { cols, ..shape };
        let (part, rows) = parts(of_x, target.team, rounded);
        let which = match (chunk, rounded) {
            (_, false) => chunk.kernel(),
            // Behind all others; of plain numbers and e4m3 there is none.
            (Chunk::E2m1, true) => 9,
            (_, true) => 6 + chunk.kernel(),
        };
        let bytes = if staged == Staged::Two { 2 } else { 1 };
        let constants =
            Constants::new(&[("ROW_COLS", shape.cols as u32), ("X_BYTES", bytes)]).chunks(of_x);
        Some(Choice { which, chunk, part, rows, staged, constants })
    }
}

/// Threads of a part and the rows that it takes at a time, so that its threads ask for all of them at once if they can.
pub(super) fn parts(shape: MatrixShape, team: u32, rounded: bool) -> (u32, usize) {
    let chunks = (shape.cols / 32).max(1);
    // A row of 24 chunks is three for each of eight threads.
    let whole = if chunks < 64 { 1 << chunks.trailing_zeros().max(3) } else { PART };
    let part = PART.min(team).min(whole);
    let across = chunks.div_ceil(part as usize).next_power_of_two().clamp(1, 4);
    let rows = match rounded {
        true if shape.rows >= MANY => (4 / across).max(2),
        false if shape.rows > FEW => 4,
        _ => 4 / across,
    };
    (part, rows)
}

/// Workgroups that walk `rows` rows, up to about `fill` of them, and the blocks that each takes.
fn walk(rows: usize, per_block: usize, fill: usize) -> (usize, usize) {
    let blocks = rows.div_ceil(per_block);
    let turns = blocks.div_ceil(fill).max(1);
    (blocks.div_ceil(turns), turns)
}

/// Multiplies, if the shape is one for these kernels.
pub(super) fn mat_mul(
    gpu: &mut GpuDevice,
    x: View,
    (weight, bias, exact): (Weight, Option<Buffer>, bool),
    out: View,
) -> Result<bool, Error> {
    let Pieces { shape, all } = gpu.pieces(weight)?;
    let staged = Staged::usual(exact);
    let Some(inputs) = gpu.inputs(shape, staged) else { return Ok(false) };
    for (arena, piece) in all {
        let bias = bias.map(|b| gpu.store.start(b)).transpose()?.map(|b| b + piece.first as u32);
        let out = out.columns(piece.first, piece.rows);
        for first in (0..shape.cols).step_by(inputs) {
            let cols = inputs.min(shape.cols - first);
            let Some(choice) = gpu.choose_for(shape, staged, cols) else { return Ok(false) };
            let [weights, scales, biases] = behind(shape, first).map(|n| n as u32);
            let piece = Piece {
                weights: piece.weights + weights,
                scales: piece.scales + scales,
                biases: piece.biases + biases,
                ..piece
            };
            let (x, arena) = (x.columns(first, cols), arena.clone());
            // The first section writes, the others add to it.
            let (bias, onto) = (bias.filter(|_| first == 0), first > 0);
            products(
                gpu,
                None,
                &[Product { choice, shape, x, arena, piece, bias, onto, out }],
                None,
            )?;
        }
    }
    Ok(true)
}

/// Bytes of `cols` inputs of a row: weights, scales and biases.
const fn behind(shape: MatrixShape, cols: usize) -> [usize; 3] {
    let scales = shape.format.row_scale_bytes(cols);
    [shape.format.row_bytes(cols), scales, scales]
}

/// [`Op::RmsNorm`](crate::Op::RmsNorm) of few vectors.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    pub(super) x: View,
    pub(super) weight: Buffer,
    pub(super) eps: f32,
    pub(super) out: View,
}

impl Norm {
    /// Runs it by itself.
    pub(super) fn run(&self, gpu: &mut GpuDevice) -> Result<(), Error> {
        let &Self { x, weight, eps, out } = self;
        norm::run(gpu, (x, out, None), Some(weight), (None, eps), [0, 0])
    }
}

/// Heads of few rows that are yet to be normed: `count` sums of squares at the begin of each head of `at`.
#[derive(Clone, Copy)]
pub(super) struct Squares {
    pub(super) of: View,
    pub(super) at: View,
    pub(super) count: usize,
    pub(super) eps: f32,
}

/// What products do with `x` on its way.
#[derive(Clone, Copy)]
pub(super) enum Prologue {
    Norm(Norm),
    Squares(Squares),
}

/// A product of `x` with some rows of a weight.
pub(super) struct Product {
    choice: Choice,
    shape: MatrixShape,
    x: View,
    arena: Memory,
    piece: Piece,
    /// Where the bias lies among the activations.
    bias: Option<u32>,
    /// Whether it is added to what `out` has.
    onto: bool,
    out: View,
}

impl Product {
    /// Of a weight that lies in one piece, if the shape is one for these kernels.
    pub(super) fn new(
        gpu: &GpuDevice,
        x: View,
        (weight, bias): (Weight, Option<Buffer>),
        exact: bool,
        out: View,
    ) -> Result<Option<Self>, Error> {
        let found = gpu.store.get(weight)?;
        let [piece] = found.pieces[..] else { return Ok(None) };
        let shape = found.shape;
        let Some(choice) = gpu.choose(shape, Staged::usual(exact)) else { return Ok(None) };
        let bias = bias.map(|b| gpu.store.start(b)).transpose()?;
        let arena = gpu.store.arenas[piece.arena].clone();
        Ok(Some(Self { choice, shape, x, arena, piece, bias, onto: false, out }))
    }

    /// Whether `x` may be normed on its way.
    pub(super) fn norms(&self, norm: &Norm) -> bool {
        self.x == norm.out && norm.x.is_dense() && norm.out.is_dense()
    }

    /// Whether it can norm heads by the sums of their squares on their way.
    pub(super) fn divides(&self, gpu: &GpuDevice, squares: &Squares) -> bool {
        let View { heads, width, .. } = squares.of;
        self.x.split(heads) == squares.of
            && width.is_multiple_of(16)
            && heads <= THREADS as usize
            && self.choice.staged.memory(self.shape.cols) + 4 * heads <= gpu.group_room()
    }

    /// Whether the residual stream may get what it yields.
    pub(super) fn adds(&self, before: Option<&Prologue>, x: View, y: View) -> bool {
        let read = before.map(|before| match before {
            Prologue::Norm(norm) => norm.x.buffer,
            Prologue::Squares(squares) => squares.at.buffer,
        });
        self.out == y
            && x.buffer != y.buffer
            && x.buffer != self.x.buffer
            && read.is_none_or(|read| read != x.buffer)
    }

    /// Whether it can share a dispatch with others.
    pub(super) fn joins(&self, others: &[Self]) -> bool {
        others.len() < TARGETS
            && others.iter().all(|other| {
                self.x == other.x
                    && self.choice.which == other.choice.which
                    && self.choice.constants == other.choice.constants
                    && self.arena.id == other.arena.id
                    && self.bias.is_some() == other.bias.is_some()
                    && self.out.buffer != other.out.buffer
                    && (self.x.rows == 1 || self.bias.is_none())
                    && other.piece.rows.is_multiple_of(4)
            })
    }
}

/// Runs products that share a dispatch.
pub(super) fn products(
    gpu: &mut GpuDevice,
    before: Option<&Prologue>,
    all: &[Product],
    added: Option<View>,
) -> Result<(), Error> {
    let Some(Product { choice, x, arena, out, bias, onto, .. }) = all.first() else {
        return Ok(());
    };
    let Choice { which, chunk, part, constants, .. } = *choice;
    let at_once = all.iter().map(|p| p.choice.rows).max().unwrap_or(4);
    let rows: usize = all.iter().map(|p| p.piece.rows).sum();
    let fill = if rows < MANY { FILL } else { FILL_MANY };
    let (walkers, turns) = walk(rows, at_once * (THREADS / part) as usize, fill);
    let (norm, squares) = match before {
        Some(Prologue::Norm(norm)) => (Some(norm), None),
        Some(Prologue::Squares(squares)) => (None, Some(squares)),
        None => (None, None),
    };
    // Where x is, and where the norm of it goes or how far its rows are apart.
    let (x_at, x_row) = match norm {
        Some(norm) => (gpu.store.place(&norm.x)?, gpu.store.place(x)?),
        None => (gpu.store.place(x)?, x.row_stride as u32),
    };
    let mut params = Params::new().u(x_at).u(x_row).n(out.row_stride).n(x.rows).n(walkers).n(turns);
    let mut end = 0;
    for Product { piece, bias, out, .. } in all {
        end += piece.rows;
        params = params
            .n(piece.weights as usize / chunk.unit())
            .u(piece.scales)
            .u(piece.biases)
            .u(gpu.store.place(out)?)
            .n(end)
            .u(bias.unwrap_or(out.row_stride as u32));
    }
    let sums = squares.map(|squares| squares.at);
    for i in all.len()..TARGETS {
        let other = [None, added, sums, None][i];
        let at = other.map(|view| gpu.store.place(&view)).transpose()?;
        let stride = other.map_or(0, |view| view.row_stride);
        params = params.u(0).u(0).u(0).u(at.unwrap_or(0)).u(0).n(stride);
    }
    params = match before {
        Some(Prologue::Norm(norm)) => params.u(gpu.store.start(norm.weight)?).f(norm.eps),
        Some(Prologue::Squares(squares)) => params.u(0).f(squares.eps),
        None => params,
    };
    let constants = constants
        .with("WG", THREADS)
        .with("ROW_THREADS", part)
        .with("ROWS", at_once as u32)
        .with("MATRICES", all.len() as u32)
        .with("BIAS_MODE", if *onto { 2 } else { bias.is_some().into() })
        .with("NORM", norm.is_some().into())
        .with("HEAD_WIDTH", squares.map_or(0, |squares| squares.of.width) as u32)
        .with("HEAD_SQUARES", squares.map_or(0, |squares| squares.count) as u32)
        .with("RESIDUAL", added.is_some().into());
    let buffers = [&gpu.activations(), arena, arena];
    gpu.dispatch(&MATVEC[which], constants, &buffers, &params, x.rows * walkers)
}

/// Whether products are those of a gated activation with its gate and up.
pub(super) fn is_gated(all: &[Product], [gate, up]: [View; 2]) -> bool {
    let [one, other] = all else { return false };
    one.x.rows == 1
        && one.out == gate
        && other.out == up
        && one.piece.rows == other.piece.rows
        && one.bias.is_none()
        && other.bias.is_none()
}

/// Runs gate and up and joins them.
pub(super) fn gated(
    gpu: &mut GpuDevice,
    all: &[Product],
    activation: Activation,
    out: View,
) -> Result<(), Error> {
    let [one, other] = all else { return Ok(()) };
    let place = |Product { shape, piece, .. }: &Product| MatrixPlace {
        shape: *shape,
        parts: [piece.weights, piece.scales, piece.biases].map(|at| at as usize),
        bias: None,
        first: 0,
        step: 1,
    };
    let uses = InBank::of_one(one.arena.clone(), gpu.upload.clone());
    let stage = Stage {
        uses: &uses,
        x: one.x,
        out,
        matrices: &[place(one), place(other)],
        activation: activation_of(activation),
        choice: None,
    };
    run_stage(gpu, one.choice, &stage, false)
}

/// One stage of the experts of few rows.
#[derive(Clone, Copy)]
pub(super) struct Stage<'a> {
    pub(super) uses: &'a InBank,
    pub(super) x: View,
    pub(super) out: View,
    /// Gate and up, or down.
    pub(super) matrices: &'a [MatrixPlace],
    /// Number and parameters of the activation.
    pub(super) activation: (u32, [f32; 2]),
    /// What chooses the experts of one row, if that is part of the stage.
    pub(super) choice: Option<&'a Ranked>,
}

impl Stage<'_> {
    /// The first and the last of its matrices, which may be one.
    fn ends(&self) -> Option<[&MatrixPlace; 2]> {
        Some([self.matrices.first()?, self.matrices.last()?])
    }
}

/// Runs a stage of experts, if the shapes are ones for these kernels.
pub(super) fn experts(gpu: &mut GpuDevice, stage: &Stage<'_>) -> Result<bool, Error> {
    let Some([one, other]) = stage.ends() else { return Ok(false) };
    if one.shape != other.shape {
        return Ok(false);
    }
    let (shape, is_first) = (one.shape, stage.matrices.len() > 1);
    let staged =
        if is_first { Staged::first_of_experts(gpu.exact) } else { Staged::usual(gpu.exact) };
    let Some(inputs) = gpu.inputs(shape, staged) else { return Ok(false) };
    // What joins gate and up is no sum.
    if !aligned(one) || !aligned(other) || (inputs < shape.cols && is_first) {
        return Ok(false);
    }
    let one = *one;
    for first in (0..shape.cols).step_by(inputs) {
        let cols = inputs.min(shape.cols - first);
        let Some(choice) = gpu.choose_for(shape, staged, cols) else { return Ok(false) };
        if cols == shape.cols {
            run_stage(gpu, choice, stage, false)?;
            continue;
        }
        let behind = behind(shape, first);
        let parts = std::array::from_fn(|i| one.parts[i] + behind[i]);
        let section = [MatrixPlace { parts, bias: one.bias.filter(|_| first == 0), ..one }];
        let stage = Stage { matrices: &section, x: stage.x.columns(first, cols), ..*stage };
        run_stage(gpu, choice, &stage, first > 0)?;
    }
    Ok(true)
}

/// Whether the first stage of experts may choose them too.
pub(super) fn ranks(gpu: &GpuDevice, [gate, up]: [&MatrixPlace; 2], ranked: &Ranked) -> bool {
    let Some(choice) = gpu.choose(gate.shape, Staged::first_of_experts(gpu.exact)) else {
        return false;
    };
    let staged = choice.staged.memory(gate.shape.cols);
    // Without subgroups, sums over a workgroup need a number of each thread too.
    let ranking = ranked.bytes() + 4 * THREADS as usize;
    gate.shape == up.shape && aligned(gate) && aligned(up) && staged + ranking <= gpu.group_room()
}

/// Whether a matrix lies as its kernel reads it.
fn aligned(m: &MatrixPlace) -> bool {
    Chunk::at(m.shape, m.parts).is_some() && m.bias.is_none_or(|(_, at)| at.is_multiple_of(4))
}

/// `onto`: whether it is added to what `out` has.
fn run_stage(
    gpu: &mut GpuDevice,
    choice: Choice,
    stage: &Stage<'_>,
    onto: bool,
) -> Result<(), Error> {
    let Some([one, other]) = stage.ends() else { return Ok(()) };
    let first = stage.matrices.len() > 1;
    let Choice { which, chunk, part, rows, constants, .. } = choice;
    let (rows, outputs) = if first { (rows.max(2), rows.max(2) / 2) } else { (rows, rows) };
    let (walkers, turns) =
        walk(one.shape.rows, outputs * (THREADS / part) as usize, (FILL / stage.uses.count).max(1));
    let (kind, [alpha, limit]) = stage.activation;
    let constants = constants
        .with("WG", THREADS)
        .with("ROW_THREADS", part)
        .with("ROWS", rows as u32)
        .with("ACTIVATION", kind)
        .with("ROW_STEP", one.step as u32)
        .with("WORKGROUPS", if stage.uses.one_row { walkers as u32 } else { 0 })
        .with("BIAS_SCALAR", one.bias.map_or(if onto { 8 } else { 9 }, |(of, _)| scalar(of)));
    let mut params = Params::new()
        .u(gpu.store.place(&stage.x)?)
        .n(stage.x.row_stride)
        .u(gpu.store.place(&stage.out)?)
        .n(stage.out.row_stride);
    params = stage.uses.params.iter().fold(params, |params, word| params.u(*word));
    params = params.n(stage.uses.count).n(walkers).n(turns).n(one.shape.rows);
    for m in [one, other] {
        let [w, s, b] = m.parts;
        params = params.n(w / chunk.unit()).n(s).n(b).n(m.bias.map_or(0, |(_, at)| at));
    }
    params = params.n(other.first).f(alpha).f(limit);
    let activations = gpu.activations();
    let groups = stage.uses.count * walkers;
    let Some(ranked) = stage.choice else {
        let entries = stage.uses.entries;
        // With f32 activations the barrier behind the slots costs more than the trip that it saves.
        let fits = choice.staged != Staged::F32
            && entries <= THREADS as usize
            && choice.staged.memory(stage.x.width) + entries * 4 <= gpu.group_room();
        let constants = constants
            .with("ASSIGNMENTS", stage.uses.kind)
            .with("STAGE", if first { 0 } else { 2 })
            .with("TABLE_ENTRIES", if fits { entries as u32 } else { 0 });
        let buffers = [&activations, &stage.uses.bank, &stage.uses.bank, &stage.uses.words];
        return gpu.dispatch(&EXPERTS[which], constants, &buffers, &params, groups);
    };
    let constants =
        ranked.constants().iter().fold(constants, |all, (name, value)| all.with(name, *value));
    let params = ranked.params(gpu, params)?;
    let report = gpu.report.clone();
    let buffers = [&activations, &stage.uses.bank, &stage.uses.bank, &stage.uses.words, &report];
    gpu.dispatch(&EXPERTS_RANKED[which], constants, &buffers, &params, groups)
}

/// The last stage of the experts that a router chose for one row, which may make their sum too.
pub(super) struct Down {
    uses: InBank,
    choice: Choice,
    /// What the first stage left, and what is made of it: an expert's row each.
    inner: View,
    parts: View,
    place: MatrixPlace,
    /// Threads of a workgroup, and the blocks of rows that it takes of every expert.
    threads: u32,
    blocks: usize,
}

impl Down {
    /// If the shapes are ones for this kernel.
    pub(super) fn new(
        gpu: &GpuDevice,
        uses: &InBank,
        place: MatrixPlace,
        [inner, parts]: [View; 2],
    ) -> Option<Self> {
        let choice = gpu.choose(place.shape, Staged::usual(gpu.exact))?;
        let (k, cols) = (uses.count, place.shape.cols);
        let most = match choice.staged {
            Staged::F32 => THREADS,
            Staged::Two | Staged::One => gpu.limits.max_compute_invocations_per_workgroup,
        };
        if inner.row_stride != cols || !aligned(&place) {
            return None;
        }
        SUM_THREADS.into_iter().filter(|(threads, _)| *threads <= most).find_map(
            |(threads, groups)| {
                let blocks = ((threads / choice.part) as usize / k).max(1);
                let outputs = blocks * choice.rows;
                let fits = choice.staged.memory(k * cols) + k * outputs * 4 <= gpu.group_room()
                    && k.max(outputs) <= threads as usize
                    && place.shape.rows.div_ceil(outputs) >= groups;
                fits.then(|| Self {
                    uses: uses.clone(),
                    choice,
                    inner,
                    parts,
                    place,
                    threads,
                    blocks,
                })
            },
        )
    }

    /// Whether it is these parts that are summed.
    pub(super) fn makes(&self, parts: View, out: View) -> bool {
        parts == self.parts
            && out.rows == 1
            && out.buffer != parts.buffer
            && out.buffer != self.inner.buffer
    }

    /// Runs it without the sum.
    pub(super) fn run(&self, gpu: &mut GpuDevice) -> Result<(), Error> {
        let stage = Stage {
            uses: &self.uses,
            x: self.inner,
            out: self.parts,
            matrices: &[self.place],
            activation: (0, [0.0; 2]),
            choice: None,
        };
        run_stage(gpu, self.choice, &stage, false)
    }

    /// Runs it and adds the sum to `out`.
    pub(super) fn run_summed(
        &self,
        gpu: &mut GpuDevice,
        (weights, shared): (View, Option<Shared>),
        out: View,
    ) -> Result<(), Error> {
        let Choice { which, chunk, part, rows, constants, .. } = self.choice;
        let MatrixPlace { shape, parts: [w, s, b], bias, .. } = self.place;
        let gate = shared.and_then(|s| s.gate);
        let place = |view: Option<View>| view.map_or(Ok(0), |view| gpu.store.place(&view));
        let params = Params::new().u(place(Some(self.inner))?);
        let params = self.uses.params.iter().fold(params, |params, word| params.u(*word));
        let params = params
            .n(shape.rows)
            .n(w / chunk.unit())
            .n(s)
            .n(b)
            .n(bias.map_or(0, |(_, at)| at))
            .u(place(Some(self.parts))?)
            .n(self.parts.row_stride)
            .u(place(Some(weights))?)
            .u(place(shared.map(|s| s.out))?)
            .u(place(gate)?)
            .u(place(Some(out))?);
        let constants = constants
            .with("WG", self.threads)
            .with("ROW_THREADS", part)
            .with("ROWS", rows as u32)
            .with("TOP_K", self.uses.count as u32)
            .with("ROW_GROUPS", self.blocks as u32)
            .with("BIAS_SCALAR", bias.map_or(9, |(of, _)| scalar(of)))
            .with("SHARED", shared.is_some().into())
            .with("GATED", gate.is_some().into());
        let buffers = [&gpu.activations(), &self.uses.bank, &self.uses.bank, &self.uses.words];
        let groups = shape.rows.div_ceil(self.blocks * rows);
        gpu.dispatch(&EXPERTS_SUM[which], constants, &buffers, &params, groups)
    }
}
