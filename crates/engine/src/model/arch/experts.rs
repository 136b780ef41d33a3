//! Where a layer's routed experts lie, in whichever of the published layouts.

use moeflux_compute::{ExpertShape, MatrixShape, Scalar};

use super::{Require, config_error};
use crate::{
    base::error::Error,
    checkpoint::{Checkpoint, Segment, Stack, location::ShardLocation},
    model::blueprint::LayerExperts,
};

/// How many experts a layer has, and of which size.
#[derive(Clone, Copy)]
pub(super) struct ExpertSizes {
    pub(super) count: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
}

impl ExpertSizes {
    /// Checks the sizes and how many experts a token has; `names` are the config's names of count, `top_k` and
    /// intermediate size.
    pub(super) fn check(
        &self,
        checkpoint: &Checkpoint,
        top_k: usize,
        names: [&str; 3],
    ) -> Result<(), Error> {
        let require = Require(checkpoint);
        require.sizes(&[
            (names[0], self.count),
            (names[1], top_k),
            (names[2], self.intermediate),
        ])?;
        require.that(top_k <= self.count, || {
            format!("\"{}\" is {top_k}, of {} experts", names[1], self.count)
        })
    }
}

/// The names below which the layouts have a layer's experts.
pub(super) struct ExpertNames {
    /// One tensor for all experts of a projection: MLX.
    stacked: String,
    /// Gate and up in one tensor for all experts, or a tensor for each expert and projection: the Hub.
    hub: String,
    /// Gate, up and down in the tensors for each expert.
    projections: [&'static str; 3],
}

impl ExpertNames {
    pub(super) fn new(stacked: String, hub: String) -> Self {
        Self { stacked, hub, projections: ["gate_proj", "up_proj", "down_proj"] }
    }

    /// In the MoE block `name`: `switch_mlp` in MLX, `experts` on the Hub.
    pub(super) fn of(name: &str) -> Self {
        Self::new(format!("{name}.switch_mlp"), format!("{name}.experts"))
    }

    /// The same with other names for the tensors of each expert: gate, up, down.
    pub(super) fn with_projections(self, projections: [&'static str; 3]) -> Self {
        Self { projections, ..self }
    }
}

/// A matrix of every expert.
pub(super) struct ExpertMatrix {
    pub(super) shape: MatrixShape,
    pub(super) parts: Vec<ShardLocation>,
}

impl ExpertMatrix {
    pub(super) fn of(stack: Stack) -> Self {
        let part =
            |first: &Segment| ShardLocation::Stacked { first: *first, stride: first.bytes as u64 };
        Self { shape: stack.shape, parts: stack.parts.iter().map(part).collect() }
    }
}

/// The routed experts below `names`.
pub(super) fn experts(
    checkpoint: &Checkpoint,
    names: &ExpertNames,
    sizes: ExpertSizes,
) -> Result<LayerExperts, Error> {
    let ExpertSizes { count, hidden, intermediate } = sizes;
    let ExpertNames { stacked, hub, projections } = names;
    let each = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)];
    let [gate, up, down] = if checkpoint.has(&format!("{hub}.gate_up_proj")) {
        fused(checkpoint, hub, sizes)?
    } else if checkpoint.has(&format!("{hub}.0.{}.weight", projections[0])) {
        let [gate, up, down] =
            [0, 1, 2].map(|i| apart(checkpoint, (hub, projections[i]), count, each[i]));
        [gate?, up?, down?]
    } else {
        let [gate, up, down] = [0, 1, 2].map(|i| {
            let projection = ["gate_proj", "up_proj", "down_proj"][i];
            checkpoint.stacked(&format!("{stacked}.{projection}"), count, each[i].0, each[i].1)
        });
        let bias = format!("{stacked}.gate_proj.bias");
        if checkpoint.has(&bias) {
            let matrices = [gate?, up?, down?].map(ExpertMatrix::of);
            return stacked_with_biases(checkpoint, stacked, sizes, matrices);
        }
        [gate?, up?, down?].map(ExpertMatrix::of)
    };
    let shape = ExpertShape::new(gate.shape, up.shape, down.shape);
    layer_experts(stacked, count, shape, [gate.parts, up.parts, down.parts].concat())
}

/// Experts of a shape with their parts in a slot's order.
pub(super) fn layer_experts(
    name: &str,
    count: usize,
    shape: ExpertShape,
    parts: Vec<ShardLocation>,
) -> Result<LayerExperts, Error> {
    let bytes = shape.bytes().map_err(Error::at(|| name))?;
    Ok(LayerExperts { count, shape, parts, bytes })
}

/// Stacked matrices, each with a stack of biases.
fn stacked_with_biases(
    checkpoint: &Checkpoint,
    name: &str,
    sizes: ExpertSizes,
    matrices: [ExpertMatrix; 3],
) -> Result<LayerExperts, Error> {
    let shape = ExpertShape::new(matrices[0].shape, matrices[1].shape, matrices[2].shape);
    let (mut parts, mut bias_type) = (Vec::new(), None);
    for (matrix, projection) in matrices.into_iter().zip(["gate_proj", "up_proj", "down_proj"]) {
        let bias = format!("{name}.{projection}.bias");
        parts.extend(matrix.parts);
        parts.push(bias_part(checkpoint, &bias, sizes.count, matrix.shape.rows, &mut bias_type)?);
    }
    layer_experts(name, sizes.count, ExpertShape { output_bias: bias_type, ..shape }, parts)
}

/// A bias of `len` numbers for each expert, of the same type as those before it.
pub(super) fn bias_part(
    checkpoint: &Checkpoint,
    name: &str,
    count: usize,
    len: usize,
    scalar: &mut Option<Scalar>,
) -> Result<ShardLocation, Error> {
    let bias = checkpoint.vector(name, count * len, 0.0)?;
    if *scalar.get_or_insert(bias.scalar) != bias.scalar {
        return Err(checkpoint
            .tensor_error(name, "its type is not that of the layer's other expert biases"));
    }
    let first = Segment { bytes: bias.segment.bytes / count, ..bias.segment };
    Ok(ShardLocation::Stacked { first, stride: first.bytes as u64 })
}

/// `gate_up_proj` `[E, 2 I, H]`, gate above up, and `down_proj` `[E, H, I]`.
fn fused(
    checkpoint: &Checkpoint,
    hub: &str,
    sizes: ExpertSizes,
) -> Result<[ExpertMatrix; 3], Error> {
    let ExpertSizes { count, hidden, intermediate } = sizes;
    let both = checkpoint.stacked_plain(
        &format!("{hub}.gate_up_proj"),
        count,
        2 * intermediate,
        hidden,
    )?;
    let down =
        checkpoint.stacked_plain(&format!("{hub}.down_proj"), count, hidden, intermediate)?;
    if !intermediate.is_multiple_of(both.shape.format.block_rows()) {
        return Err(checkpoint.tensor_error(
            &format!("{hub}.gate_up_proj"),
            format!("a block of its scales would lie in both halves of {intermediate} rows"),
        ));
    }
    let half = |upper: bool| {
        let shape = MatrixShape { rows: intermediate, ..both.shape };
        let part = |both: &Segment| {
            let bytes = both.bytes / 2;
            let offset = both.offset + if upper { bytes as u64 } else { 0 };
            ShardLocation::Stacked {
                first: Segment { offset, bytes, ..*both },
                stride: both.bytes as u64,
            }
        };
        ExpertMatrix { shape, parts: both.parts.iter().map(part).collect() }
    };
    Ok([half(false), half(true), ExpertMatrix::of(down)])
}

/// A tensor for each expert.
fn apart(
    checkpoint: &Checkpoint,
    (hub, projection): (&str, &str),
    count: usize,
    (rows, cols): (usize, usize),
) -> Result<ExpertMatrix, Error> {
    let mut shape = None;
    let mut parts: Vec<Vec<_>> = Vec::new();
    for expert in 0..count {
        let m = checkpoint.matrix(&format!("{hub}.{expert}.{projection}"), rows, cols)?;
        if *shape.get_or_insert(m.shape) != m.shape {
            let weight = format!("{}.weight", m.name);
            return Err(
                checkpoint.tensor_error(&weight, "its format is not that of the layer's expert 0")
            );
        }
        parts.resize_with(m.segments.len(), Vec::new);
        parts.iter_mut().zip(m.segments).for_each(|(all, s)| all.push(s));
    }
    let shape = shape.ok_or_else(|| config_error(checkpoint, "there are no experts"))?;
    Ok(ExpertMatrix { shape, parts: parts.into_iter().map(ShardLocation::Each).collect() })
}
