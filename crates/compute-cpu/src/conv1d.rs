//! Causal depthwise 1-D convolution over time.

use moeflux_ops::{
    Error, Op, Span,
    seam::{Host, SpanPart},
};

use super::{
    cpu::{Cpu, row},
    pool::Grid,
};

/// Channels of a tile.
const TILE_CHANNELS: usize = 256;

/// Runs [`Op::Conv1d`].
pub(super) fn conv1d(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Conv1d { spans, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, values| {
        let mut first = 0;
        for SpanPart { span, index } in spans.iter().flat_map(|span| span.parts()) {
            let mut state = host.states.take_recurrent(span.state, index)?;
            let (history, next) = state.part(index);
            let input = ConvSpan { history, next, first, span };
            let result = convolve(host, cpu, op, input, values);
            host.states.put_recurrent(span.state, index, state)?;
            result?;
            first += span.rows;
        }
        Ok(())
    })
}

/// A span, its state, and the row of the op where it starts.
struct ConvSpan<'a> {
    /// Values of the state before the span, and those to write.
    history: &'a [f32],
    next: &'a mut [f32],
    first: usize,
    span: Span,
}

/// Computes one span.
fn convolve(
    host: &Host,
    cpu: &mut Cpu,
    op: &Op<'_>,
    ConvSpan { history, next, first, span }: ConvSpan<'_>,
    values: &mut [f32],
) -> Result<(), Error> {
    let &Op::Conv1d { x, weight, bias, width, dilation, silu, out, .. } = op else { return Ok(()) };
    let kernels = cpu.kernels;
    let (src, weight) = (host.get(&x)?, host.values(weight)?);
    let bias = bias.map(|bias| host.values(bias)).transpose()?;
    // Input `i` of the span: the rows of the state come first, then those of the span.
    let input = |i: usize| match i.checked_sub((width - 1) * dilation) {
        Some(i) => row(src, &x, first + i),
        None => &history[i * x.width..(i + 1) * x.width],
    };
    let rows = out.slice(first, span.rows);
    cpu.pool.tiles(values, Grid::new(&rows, span.rows, 1, TILE_CHANNELS), |mut tile, _| {
        let channels = tile.cols();
        let weight = &weight[channels.start * width..channels.end * width];
        for i in tile.rows() {
            let dst = tile.row(i);
            if width == 4 {
                let inputs = std::array::from_fn(|j| &input(i + j * dilation)[channels.clone()]);
                kernels.conv4(weight, inputs, dst);
            } else {
                dst.fill(0.0);
                for j in 0..width {
                    let taps = weight.iter().skip(j).step_by(width);
                    let inputs = taps.zip(&input(i + j * dilation)[channels.clone()]);
                    dst.iter_mut().zip(inputs).for_each(|(sum, (tap, input))| *sum += tap * input);
                }
            }
            if let Some(bias) = bias {
                dst.iter_mut().zip(&bias[channels.clone()]).for_each(|(sum, bias)| *sum += bias);
            }
            if silu {
                kernels.silu(dst);
            }
        }
    });
    for (i, dst) in next.chunks_exact_mut(x.width).enumerate() {
        dst.copy_from_slice(input(span.rows + i));
    }
    Ok(())
}
