//! The largest of many numbers.

use super::{Constants, GpuDevice, Kernel, Params, kernel};
use crate::{Error, Op};

static TOP_LOGITS: Kernel = kernel!("top_logits", ["common", "order", "top_logits"], [Write, Write, Write]);

const THREADS: usize = 512;
/// Numbers that a thread looks at.
const PER_THREAD: usize = 16;
/// Numbers that a workgroup looks at.
const SEGMENT: usize = THREADS * PER_THREAD;

/// Runs [`Op::TopLogits`].
pub(super) fn top_logits(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopLogits { logits, ids, values } = op else { return Ok(()) };
    let (rows, keep) = (logits.rows, ids.width);
    // How many numbers of a row are left at each level.
    let levels = || {
        std::iter::successors(Some(logits.width), |count| {
            let segments = count.div_ceil(SEGMENT);
            (segments > 1).then_some(segments * keep)
        })
    };
    let candidates: usize = levels().skip(1).map(|count| rows * count).sum();
    let scratch = gpu.scratch(2 * candidates)?;
    let store = &gpu.store;
    let views = Params::new()
        .view(store.place(&logits)?, &logits)
        .view(store.place(&ids)?, &ids)
        .view(store.place(&values)?, &values);
    let (activations, report) = (gpu.activations(), gpu.report.clone());
    let (mut take, mut put) = (0, 0);
    for (level, count) in levels().enumerate() {
        let segments = count.div_ceil(SEGMENT);
        let params = views.n(rows).n(logits.width).n(count).n(segments).n(take).n(put);
        let constants = Constants::new(&[
            ("WG", THREADS as u32),
            ("PER", PER_THREAD as u32),
            ("KEEP", keep as u32),
            ("FIRST", (level == 0).into()),
            ("LAST", (segments == 1).into()),
        ]);
        let buffers = [&activations, &report, &scratch];
        gpu.dispatch(&TOP_LOGITS, constants, &buffers, &params, rows * segments)?;
        (take, put) = (put, put + rows * segments * keep);
    }
    Ok(())
}
