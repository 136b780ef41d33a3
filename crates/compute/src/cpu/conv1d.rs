//! Causal depthwise convolution over time.

use super::{Cpu, pool::Grid, row};
use crate::{Error, Op, Span, host::Host, host::Recurrent};

/// Channels of a tile.
const CHANNELS: usize = 256;

/// Runs [`Op::Conv1d`].
pub(super) fn conv1d(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Conv1d { spans, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, numbers| {
        let mut first = 0;
        for span in spans {
            let mut state = host.states.take_recurrent(span.state)?;
            let done = convolve(host, cpu, op, (&mut state, first, span), numbers);
            host.states.put_recurrent(span.state, state)?;
            done?;
            first += span.rows;
        }
        Ok(())
    })
}

/// Computes one span, whose rows begin at row `first` of the op.
fn convolve(
    host: &Host,
    cpu: &mut Cpu,
    op: &Op<'_>,
    (state, first, span): (&mut Recurrent, usize, &Span),
    numbers: &mut [f32],
) -> Result<(), Error> {
    let &Op::Conv1d { x, weight, width, out, .. } = op else { return Ok(()) };
    let kernels = cpu.kernels;
    let (from, weight) = (host.get(&x)?, host.all(weight)?);
    let before = &state.committed;
    // Input `i` of the span: its own rows come after those of the state.
    let input = |i: usize| match i.checked_sub(width - 1) {
        Some(i) => row(from, &x, first + i),
        None => &before[i * x.width..(i + 1) * x.width],
    };
    let rows = out.slice(first, span.rows);
    cpu.pool.tiles(numbers, Grid::new(&rows, span.rows, 1, CHANNELS), |mut tile, _| {
        let channels = tile.cols();
        let weight = &weight[channels.start * width..channels.end * width];
        for i in tile.rows() {
            let to = tile.row(i);
            if width == 4 {
                let inputs = std::array::from_fn(|j| &input(i + j)[channels.clone()]);
                kernels.conv4(weight, inputs, to);
            } else {
                to.fill(0.0);
                for j in 0..width {
                    let taps = weight.iter().skip(j).step_by(width);
                    let inputs = taps.zip(&input(i + j)[channels.clone()]);
                    to.iter_mut().zip(inputs).for_each(|(to, (tap, input))| *to += tap * input);
                }
            }
            kernels.silu(to);
        }
    });
    for (i, to) in state.next.chunks_exact_mut(x.width).enumerate() {
        to.copy_from_slice(input(span.rows + i));
    }
    Ok(())
}
