//! The host's processor as a device that computes a layer's experts.

use moeflux_compute::{
    Activation, Buffer, Device, Error, ExpertShape, ExpertUse, ExpertUses, Op, View,
};

/// Layer that the processor computes.
#[derive(Clone, Copy)]
pub(crate) struct HostLayer {
    pub(crate) input_rows: usize,
    pub(crate) answers: usize,
    pub(crate) shape: ExpertShape,
    pub(crate) activation: Activation,
    pub(crate) experts: usize,
}

/// The processor with its buffers.
pub(crate) struct HostProcessor {
    pub(crate) device: Box<dyn Device>,
    x: Buffer,
    inner: Buffer,
    out: Buffer,
    /// Inputs of the layer's experts.
    pub(crate) input: Vec<f32>,
    /// Uses of the processor's slots.
    pub(crate) uses: Vec<ExpertUse>,
    /// A row for each use.
    pub(crate) results: Vec<f32>,
}

/// Values of the processor's buffers, and uses of experts.
pub(super) struct ProcessorSizes {
    pub(super) uses: usize,
    pub(super) input: usize,
    pub(super) inner: usize,
    pub(super) out: usize,
}

impl HostProcessor {
    /// Allocates the buffers.
    pub(super) fn new(mut device: Box<dyn Device>, sizes: ProcessorSizes) -> Result<Self, Error> {
        let ProcessorSizes { uses, input, inner, out } = sizes;
        let (x, inner) = (device.buffer(input)?, device.buffer(inner)?);
        Ok(Self {
            x,
            inner,
            out: device.buffer(out)?,
            device,
            input: vec![0.0; input],
            uses: Vec::with_capacity(uses),
            results: vec![0.0; out],
        })
    }

    /// Computes a layer's experts.
    pub(crate) fn compute(&mut self, layer: &HostLayer) -> Result<(), Error> {
        let &HostLayer { input_rows, answers, ref shape, activation, experts } = layer;
        let (count, hidden) = (self.uses.len(), shape.up.cols);
        let x = View::rows(self.x, input_rows, hidden);
        self.device.write(self.x, &self.input[..input_rows * hidden])?;
        let out = View::rows(self.out, count, hidden);
        self.device.run(&Op::Experts {
            x,
            shape,
            activation,
            experts,
            answers,
            uses: ExpertUses::Listed(&self.uses),
            inner: View::rows(self.inner, count, shape.up.rows),
            out,
        })?;
        self.device.read(out, &mut self.results[..count * hidden])
    }
}
