//! Top-n logits of each row, by repeated selection within segments.

use moeflux_ops::{Error, Op};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{TopLogitsParams, ViewParams},
    },
    context::OpContext,
};

pub(crate) static TOP_LOGITS: Kernel =
    kernel!("top_logits", "sampling/top_logits", TopLogitsParams, [Write, Write, Write]);
pub(crate) static TOP_LOGIT: Kernel =
    kernel!("top_logit", "sampling/top_logit", TopLogitsParams, [Write, Write, Write]);

/// Encodes [`Op::TopLogits`].
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopLogits { logits, best } = op else { return Ok(()) };
    let (rows, keep) = (logits.rows, best.width / 2);
    let (kernel, threads, values_per_thread) = match keep {
        // Many small workgroups finish soonest.
        1 => (&TOP_LOGIT, 256, 4),
        _ => (&TOP_LOGITS, 512, 8),
    };
    let threads = threads.min(ctx.max_threads() as usize);
    let segment = threads * values_per_thread;
    // Values of a row at each level.
    let levels = || {
        std::iter::successors(Some(logits.width), |count| {
            let segments = count.div_ceil(segment);
            (segments > 1).then_some(segments * keep)
        })
    };
    let candidates: usize = levels().skip(1).map(|count| rows * count).sum();
    let scratch = ctx.scratch(2 * candidates)?;
    let store = &*ctx.store;
    let (logits_view, best) = (ViewParams::new(store, &logits)?, ViewParams::new(store, &best)?);
    let report = ctx.recorder.report().clone();
    let buffers = [store.activations(), &report, &scratch];
    let (mut src, mut dst) = (0, 0);
    for (level, count) in levels().enumerate() {
        let segments = count.div_ceil(segment);
        let params = TopLogitsParams {
            logits: logits_view,
            best,
            rows: rows as u32,
            width: logits.width as u32,
            count: count as u32,
            segments: segments as u32,
            src: src as u32,
            dst: dst as u32,
        };
        let constants = Constants::new(&[
            ("WG", threads as u32),
            ("THREAD_VALUES", values_per_thread as u32),
            ("KEEP", keep as u32),
            ("FIRST_LEVEL", (level == 0).into()),
            ("LAST_LEVEL", (segments == 1).into()),
        ]);
        ctx.recorder.dispatch(kernel, &constants, &buffers, &params, rows * segments)?;
        (src, dst) = (dst, dst + rows * segments * keep);
    }
    Ok(())
}
