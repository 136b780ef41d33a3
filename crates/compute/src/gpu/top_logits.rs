//! The largest of many numbers.

use super::{Constants, GpuDevice, Kernel, Params, kernel};
use crate::{Error, Op};

pub(in crate::gpu) static TOP_LOGITS: Kernel =
    kernel!("top_logits", "sampling/top_logits", [Write, Write, Write]);
pub(in crate::gpu) static TOP_LOGIT: Kernel =
    kernel!("top_logit", "sampling/top_logit", [Write, Write, Write]);

/// Runs [`Op::TopLogits`].
pub(super) fn top_logits(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopLogits { logits, best } = op else { return Ok(()) };
    let (rows, keep) = (logits.rows, best.width / 2);
    // Threads of a workgroup and numbers that each looks at.
    let (kernel, threads, per_thread) = match keep {
        // Many small workgroups are done soonest.
        1 => (&TOP_LOGIT, 256, 4),
        _ => (&TOP_LOGITS, 512, 8),
    };
    let threads = threads.min(gpu.limits.max_compute_invocations_per_workgroup as usize);
    let segment = threads * per_thread;
    // How many numbers of a row are left at each level.
    let levels = || {
        std::iter::successors(Some(logits.width), |count| {
            let segments = count.div_ceil(segment);
            (segments > 1).then_some(segments * keep)
        })
    };
    let candidates: usize = levels().skip(1).map(|count| rows * count).sum();
    let scratch = gpu.scratch(2 * candidates)?;
    let store = &gpu.store;
    let views = Params::new().view(store.place(&logits)?, &logits).view(store.place(&best)?, &best);
    let (activations, report) = (gpu.activations(), gpu.report.clone());
    let (mut take, mut put) = (0, 0);
    for (level, count) in levels().enumerate() {
        let segments = count.div_ceil(segment);
        let params = views.n(rows).n(logits.width).n(count).n(segments).n(take).n(put);
        let constants = Constants::new(&[
            ("WG", threads as u32),
            ("THREAD_VALUES", per_thread as u32),
            ("KEEP", keep as u32),
            ("FIRST_LEVEL", (level == 0).into()),
            ("LAST_LEVEL", (segments == 1).into()),
        ]);
        let buffers = [&activations, &report, &scratch];
        gpu.dispatch(kernel, constants, &buffers, &params, rows * segments)?;
        (take, put) = (put, put + rows * segments * keep);
    }
    Ok(())
}
