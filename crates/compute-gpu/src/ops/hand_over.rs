//! Kernels around hand-overs: copies of inputs to the host, and of its results.

use moeflux_ops::{Error, SlotTable, View};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{HandOverParams, TakeResultsParams, ViewParams},
        recorder::HandOverSize,
    },
    context::OpContext,
    elementwise::{THREADS, groups},
};

pub(crate) static HAND_OVER: Kernel =
    kernel!("hand_over", "experts/hand_over", HandOverParams, [Write, Write]);
pub(crate) static TAKE_RESULTS: Kernel =
    kernel!("take_results", "experts/take_results", TakeResultsParams, [Write, Read, Read]);

/// Encodes the copy of ids and inputs to the host, and the end of the part that it waits for.
pub(crate) fn encode_hand_over(
    ctx: &mut OpContext<'_>,
    ids: View,
    input: View,
) -> Result<(), Error> {
    let size = HandOverSize {
        ids: ids.rows * ids.width,
        input: input.rows * input.width,
        results: 0,
        width: input.width,
    };
    let exchange = ctx.recorder.exchange(size)?;
    let params = HandOverParams {
        ids: ViewParams::new(ctx.store, &ids)?,
        input: ViewParams::new(ctx.store, &input)?,
        k: ids.width as u32,
        ids_count: size.ids as u32,
        width: input.width as u32,
        count: (size.ids + size.input) as u32,
        input_at: exchange.input_at as u32,
    };
    let constants = Constants::new(&[("WG", THREADS)]);
    let buffers = [ctx.store.activations(), &exchange.inputs];
    let groups = groups(size.ids + size.input);
    ctx.recorder.dispatch(&HAND_OVER, &constants, &buffers, &params, groups)?;
    ctx.recorder.end_part_for_host(size)
}

/// Encodes the wait for the host, and the copy of its results.
pub(crate) fn encode_take_results(
    ctx: &mut OpContext<'_>,
    ids: View,
    table: SlotTable,
    out: View,
) -> Result<(), Error> {
    let count = ids.rows * ids.width;
    if out.rows < count || ids.width == 0 {
        return Err(Error::Shape(format!("{count} results of the host in {} rows", out.rows)));
    }
    let results = count * out.width;
    let exchange = ctx.recorder.exchange(HandOverSize { results, ..HandOverSize::default() })?;
    ctx.recorder.start_part_after_host(count, out.width)?;
    let table = ctx.store.gpu_table(table)?.buffer.clone();
    let params = TakeResultsParams {
        ids: ViewParams::new(ctx.store, &ids)?,
        out: ViewParams::new(ctx.store, &out)?,
        k: ids.width as u32,
        width: out.width as u32,
        count: results as u32,
    };
    let constants = Constants::new(&[("WG", THREADS)]);
    let buffers = [ctx.store.activations(), &table, &exchange.results];
    ctx.recorder.dispatch(&TAKE_RESULTS, &constants, &buffers, &params, groups(results))
}
