//! Latent attention. Heads' keys and values are never made: queries are taken to latents, attend to them, and what they find
//! is taken to values. That is the same sum in another order, and reads nothing but latents.

use crate::gpu::{GpuDevice, attention, elementwise, head_matmul::head_mat_mul};
use crate::{Buffer, Error, Op, RopePairs, Span, View};

/// Numbers of intermediate results that rows share: those that need more run one after another.
const ROOM: usize = 4 << 20;

/// Runs [`Op::LatentAttention`].
pub(in crate::gpu) fn latent_attention(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    let &Op::LatentAttention { q, k, keys, values, scale, spans, out } = op else { return Ok(()) };
    let nope = keys.inputs_outputs(gpu.store.get(keys.weight)?.shape.cols).1;
    let (rope, heads) = (q.width - nope, q.heads);
    let latent = k.width - rope;
    let of_row = heads * (k.width + latent);
    let most = (ROOM / of_row).max(1);
    let room = Room::new(gpu, most.min(q.rows) * of_row)?;
    let mut first = 0;
    for span in spans.iter().filter(|span| span.rows > 0) {
        let kv = gpu.key_values(span.state)?;
        gpu.append(&kv, (span, first), (&k, None))?;
        for from in (0..span.rows).step_by(most) {
            let rows = most.min(span.rows - from);
            let part = |view: View| view.slice(first + from, rows);
            let queries = room.view(0, rows, heads * k.width).split(heads);
            let found = room.view(rows * heads * k.width, rows, heads * latent).split(heads);
            head_mat_mul(gpu, part(q).part(0, nope), keys.transpose(), queries.part(0, latent))?;
            if rope > 0 {
                copy(gpu, part(q).part(nope, rope), queries.part(latent, rope))?;
            }
            let attend = Op::Attention {
                q: queries,
                k: part(k),
                v: None,
                gate: None,
                scale,
                window: None,
                sinks: None,
                positions: None,
                spans: &[],
                out: found,
            };
            let span = Span { position: span.position + from, rows, ..*span };
            match gpu.exact {
                true => attention::attend(gpu, &kv, (&span, 0), &attend, None)?,
                false => attention::attend_tiled(gpu, &kv, (&span, 0), &attend)?,
            }
            head_mat_mul(gpu, found, values, part(out))?;
        }
        first += span.rows;
    }
    Ok(())
}

/// A rotation of nothing.
fn copy(gpu: &mut GpuDevice, x: View, out: View) -> Result<(), Error> {
    let pairs = RopePairs::Halves;
    elementwise::run(gpu, &Op::Rope { x, frequencies: &[], pairs, scale: 1.0, spans: &[], out })
}

/// Activations that no buffer of the caller's holds.
struct Room(Buffer);

impl Room {
    fn new(gpu: &mut GpuDevice, numbers: usize) -> Result<Self, Error> {
        if gpu.store.room() < numbers {
            gpu.hand_over();
            let gone = gpu.store.make_room(numbers)?;
            gpu.forget(gone);
        }
        Ok(Self(crate::gpu::memory::ROOM))
    }

    /// A dense view of it.
    const fn view(&self, offset: usize, rows: usize, width: usize) -> View {
        View { offset, ..View::rows(self.0, rows, width) }
    }
}
