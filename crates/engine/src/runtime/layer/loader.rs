//! Loads the weights of a layer to a device.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Bytes, Device, Format, MatrixShape, Scalar, Weight};
use moeflux_model::{
    blueprint::LinearSource,
    checkpoint::{Checkpoint, InputOrder, MatrixSource, VectorSource},
    seam::{ReadAhead, ReadMatrix, TensorSource},
};

use super::step::Linear;
use crate::experts::cache::LoadProgress;

/// Loads weights onto a device.
pub(crate) struct Loader<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) ahead: &'a ReadAhead<'a>,
    pub(crate) device: &'a mut dyn Device,
    /// Whether the device computes on the exact path.
    pub(crate) exact: bool,
    /// Positions of a session.
    pub(crate) context: usize,
    /// Most rows of a step.
    pub(crate) chunk: usize,
    /// Called with the bytes of each loaded weight. An error ends the loading.
    pub(crate) progress: &'a mut LoadProgress<'a>,
    /// The last order of inputs: projections of one input mostly share theirs.
    pub(crate) last_order: Option<LoadedOrder>,
}

/// Order of inputs, on a device.
#[derive(Clone)]
pub(crate) struct LoadedOrder {
    order: InputOrder,
    buffer: Buffer,
}

impl Loader<'_> {
    /// Creates the following weights on the card of a layer.
    pub(crate) fn enter_layer(&mut self, layer: usize) -> Result<(), Error> {
        // Orders are vectors, which all cards have.
        self.device.enter_layer(layer, None).map_err(Error::at(|| format!("layer {layer}")))
    }

    /// Loads a matrix whose inputs are in the file's order.
    pub(crate) fn matrix(&mut self, m: &MatrixSource) -> Result<Weight, Error> {
        if m.order.is_some() {
            let problem = "its inputs are grouped in another order (\"desc_act\"), which is read \
                           for projections only: take a quantisation without it";
            return Err(self.checkpoint.tensor_error(&m.name, problem));
        }
        self.weight(m)
    }

    pub(super) fn weight(&mut self, m: &MatrixSource) -> Result<Weight, Error> {
        let ReadMatrix { bytes, held } = self.ahead.take(m)?;
        (self.progress)(bytes.len() as u64)?;
        let weight = self.device.weight(m.shape, bytes).map_err(Error::at(|| &*m.name));
        self.ahead.release(held);
        weight
    }

    pub(crate) fn vector(&mut self, v: &VectorSource) -> Result<Buffer, Error> {
        let values = self.checkpoint.read_vector(v)?;
        self.values(v, &values)
    }

    /// Loads vectors, one after another in one buffer. `name` is for errors.
    pub(super) fn joined(&mut self, name: &str, parts: &[VectorSource]) -> Result<Buffer, Error> {
        let mut values = Vec::with_capacity(parts.iter().map(|v| v.len).sum());
        for part in parts {
            values.extend(self.checkpoint.read_vector(part)?);
        }
        self.buffer(name, &values)
    }

    /// Loads a vector, each value times `factor`.
    pub(super) fn scaled(&mut self, v: &VectorSource, factor: f32) -> Result<Buffer, Error> {
        let mut values = self.checkpoint.read_vector(v)?;
        values.iter_mut().for_each(|v| *v *= factor);
        self.values(v, &values)
    }

    /// Loads a vector, its values in an order of inputs.
    pub(super) fn vector_in_order(
        &mut self,
        v: &VectorSource,
        order: Option<&InputOrder>,
    ) -> Result<Buffer, Error> {
        let mut values = self.checkpoint.read_vector(v)?;
        if let Some(order) = order {
            let value = |i: &u16| values.get(usize::from(*i)).copied().unwrap_or_default();
            values = order.iter().map(value).collect();
        }
        self.values(v, &values)
    }

    fn values(&mut self, v: &VectorSource, values: &[f32]) -> Result<Buffer, Error> {
        self.buffer(&v.name, values)
    }

    pub(super) fn buffer(&mut self, name: &str, values: &[f32]) -> Result<Buffer, Error> {
        let buffer = self.device.buffer(values.len()).map_err(Error::at(|| name))?;
        self.device.write(buffer, values).map_err(Error::at(|| name))?;
        Ok(buffer)
    }

    /// Loads a vector if the model has it.
    pub(crate) fn optional_vector(
        &mut self,
        v: Option<&VectorSource>,
    ) -> Result<Option<Buffer>, Error> {
        v.map(|v| self.vector(v)).transpose()
    }

    /// The value of a vector of length 1.
    pub(super) fn scalar(&mut self, v: &VectorSource) -> Result<f32, Error> {
        Ok(self.checkpoint.read_vector(v)?.first().copied().unwrap_or(1.0))
    }

    pub(super) fn linear(&mut self, l: &LinearSource) -> Result<Linear, Error> {
        let bias = self.optional_vector(l.bias.as_ref())?;
        Ok(Linear { bias, ..self.projection(&l.weight)? })
    }

    /// Loads a matrix whose inputs may be in another order.
    pub(super) fn projection(&mut self, m: &MatrixSource) -> Result<Linear, Error> {
        let weight = self.weight(m)?;
        let order = m.order.as_ref().map(|order| self.order(&m.name, order)).transpose()?;
        Ok(Linear { weight, bias: None, order })
    }

    /// Loads an order of inputs, once for projections that follow each other.
    pub(super) fn order(&mut self, name: &str, order: &InputOrder) -> Result<Buffer, Error> {
        if let Some(last) = self.last_order.as_ref().filter(|last| last.order == *order) {
            return Ok(last.buffer);
        }
        let buffer = self.indexes(name, order)?;
        self.last_order = Some(LoadedOrder { order: order.clone(), buffer });
        Ok(buffer)
    }

    /// Loads a table of ids, `(rows, cols)`, as integers in f32.
    pub(super) fn id_table(
        &mut self,
        rows: usize,
        cols: usize,
        ids: &[u16],
    ) -> Result<Weight, Error> {
        let shape = MatrixShape { rows, cols, format: Format::Plain(Scalar::F32) };
        let name = "experts of the tokens";
        let mut bytes = Bytes::zeroed(4 * ids.len()).map_err(Error::at(|| name))?;
        for (bytes, id) in bytes.chunks_exact_mut(4).zip(ids) {
            bytes.copy_from_slice(&f32::from(*id).to_le_bytes());
        }
        self.device.weight(shape, bytes).map_err(Error::at(|| name))
    }

    /// Loads the numbers of all columns, in order.
    pub(super) fn columns(&mut self, count: usize) -> Result<Buffer, Error> {
        let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
        self.buffer("numbers of columns", &values)
    }

    /// Loads indexes, as integers in f32.
    pub(super) fn indexes(&mut self, name: &str, indexes: &[u16]) -> Result<Buffer, Error> {
        let values: Vec<f32> = indexes.iter().map(|i| f32::from(*i)).collect();
        self.buffer(name, &values)
    }
}
