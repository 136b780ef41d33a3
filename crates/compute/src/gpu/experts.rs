//! The routed experts of a layer.

use super::{
    Constants, GpuDevice, Kernel, Memory, Params,
    elementwise::activation_of,
    formats::scalar,
    fuse::Pending,
    kernel,
    matvec::{self, Down, Stage},
    tiled,
    topk::Ranked,
};
use crate::{Error, ExpertUses, Op, View, matrix::MatrixPlace};

pub(in crate::gpu) static EXPERTS_ANY: Kernel =
    kernel!("experts_gemv_any", "experts/experts_gemv_any", [Write, Read, Read]);

const THREADS: u32 = 256;

/// The uses of an op that lie in one bank, as kernels see them.
#[derive(Clone)]
pub(super) struct InBank {
    pub(super) bank: Memory,
    /// How many there are, and the first row of `inner` that is theirs.
    pub(super) count: usize,
    first: usize,
    /// 0 for a row that meets the one matrix there is, 1 for a list, 2 for what a router chose.
    pub(super) kind: u32,
    /// Where the list or the table of slots lies.
    pub(super) words: Memory,
    /// `Uses` of `uses.wgsl`.
    pub(super) params: [u32; 4],
    /// Experts of the table, if all of them are in this bank; else 0.
    pub(super) entries: usize,
    /// Whether all of them are of one row.
    pub(super) one_row: bool,
}

impl InBank {
    /// The one row of matrices that lie in no slot but in an arena; nobody reads the words.
    pub(super) const fn of_one(arena: Memory, words: Memory) -> Self {
        Self {
            bank: arena,
            count: 1,
            first: 0,
            kind: 0,
            words,
            params: [0, 0, 1, 0],
            entries: 0,
            one_row: true,
        }
    }
}

/// Runs [`Op::Experts`]. `choice`: what is to choose the experts first.
pub(super) fn experts(
    gpu: &mut GpuDevice,
    op: &Op<'_>,
    choice: Option<&Ranked>,
) -> Result<(), Error> {
    let &Op::Experts { x, shape, activation, uses, inner, out, .. } = op else { return Ok(()) };
    let layout = shape.layout()?;
    let [gate, up, down] = layout.places();
    let joins = |ranked: &Ranked| match uses {
        ExpertUses::Routed { ids, table } if x.rows == 1 && ids == ranked.ids => {
            let banks = &gpu.store.table_of(table)?.banks;
            Ok(banks.len() == 1 && matvec::ranks(gpu, [&gate, &up], ranked))
        }
        _ => Ok::<_, Error>(false),
    };
    let joined = match choice {
        Some(ranked) if joins(ranked)? => Some(ranked),
        Some(ranked) => {
            ranked.run(gpu)?;
            None
        }
        None => None,
    };
    if !gpu.exact && tiled::experts(gpu, op)? {
        return Ok(());
    }
    let (kind, [alpha, limit]) = activation_of(activation);
    let banks = in_banks(gpu, uses)?;
    // The sum of all experts of a row may come next.
    let whole = x.rows == 1 && banks.len() == 1 && matches!(uses, ExpertUses::Routed { .. });
    for part in banks {
        let inner = inner.slice(part.first, part.count);
        let (uses, activation) = (&part, (kind, [alpha, limit]));
        let first =
            Stage { uses, x, out: inner, matrices: &[gate, up], activation, choice: joined };
        let second = Stage { uses, x: inner, out, matrices: &[down], activation, choice: None };
        if matvec::experts(gpu, &first)? {
            let down = if whole { Down::new(gpu, &part, down, [inner, out]) } else { None };
            if let Some(down) = down {
                gpu.pending = Pending::Down(Box::new(down));
                return Ok(());
            }
            if matvec::experts(gpu, &second)? {
                continue;
            }
        }
        for (stage, place, from, to) in
            [(0, gate, x, inner), (1, up, x, inner), (2, down, inner, out)]
        {
            let MatrixPlace { shape: matrix, parts, bias, first, step } = place;
            let [w, s, b] = parts.map(|at| at as u32);
            let params = Params::new()
                .view(gpu.store.place(&from)?, &from)
                .view(gpu.store.place(&to)?, &View { rows: out.rows, ..to })
                .matrix([w, s, b], matrix);
            let params = part
                .params
                .iter()
                .fold(params, |params, word| params.u(*word))
                .n(part.count)
                .n(first)
                .n(step)
                .n(matrix.rows)
                .n(matrix.cols)
                .n(bias.map_or(0, |(_, at)| at))
                .f(alpha)
                .f(limit);
            let constants = Constants::new(&[
                ("WG", THREADS),
                ("ASSIGNMENTS", part.kind),
                ("STAGE", stage),
                ("ACTIVATION", kind),
                ("BIAS_SCALAR", bias.map_or(9, |(of, _)| scalar(of))),
            ])
            .format(matrix.format);
            let blocks = matrix.rows.div_ceil((THREADS / gpu.target().team) as usize);
            let buffers = [&gpu.activations(), &part.bank, &part.words];
            gpu.dispatch(&EXPERTS_ANY, constants, &buffers, &params, part.count * blocks)?;
        }
    }
    Ok(())
}

/// The uses by bank.
fn in_banks(gpu: &mut GpuDevice, uses: ExpertUses<'_>) -> Result<Vec<InBank>, Error> {
    match uses {
        ExpertUses::Listed(uses) => {
            gpu.room(uses.len() * 3)?;
            let mut parts = Vec::new();
            let mut first = 0;
            for run in uses.chunk_by(|a, b| a.slot.bank == b.slot.bank) {
                let store = &gpu.store;
                let words: Vec<u32> = run
                    .iter()
                    .flat_map(|u| [store.slot_offset(u.slot), u.row as u32, u.part as u32])
                    .collect();
                let list = gpu.upload(words);
                parts.push(InBank {
                    bank: gpu.store.bank_memory(run[0].slot.bank)?,
                    count: run.len(),
                    first,
                    kind: 1,
                    words: gpu.upload.clone(),
                    params: [list, 0, 1, 0],
                    entries: 0,
                    one_row: false,
                });
                first += run.len();
            }
            Ok(parts)
        }
        ExpertUses::Routed { ids, table } => {
            let list = gpu.store.place(&ids)?;
            let table = gpu.store.table_of(table)?;
            let of_bank = |bank: &u16| {
                Ok(InBank {
                    bank: gpu.store.bank_memory(*bank)?,
                    count: ids.rows * ids.width,
                    first: 0,
                    kind: 2,
                    words: table.memory.clone(),
                    params: [list, ids.row_stride as u32, ids.width as u32, (*bank).into()],
                    entries: if table.banks.len() == 1 { table.slots.len() } else { 0 },
                    one_row: ids.rows == 1,
                })
            };
            table.banks.iter().map(of_bank).collect()
        }
    }
}
