//! Routed experts of a layer in the published tensor layouts: stacked, fused, or one tensor each.

use std::sync::Arc;

use moeflux_base::Error;
use moeflux_ops::{ExpertShape, FileLayout, MatrixShape, OutputOrder, PlaneLayout, Scalar};

use super::{
    config::config_error,
    expert_sizes::ExpertSizes,
    scope::{PROJECTIONS, Scope},
};
use crate::{
    blueprint::{InputOrders, LayerExperts},
    checkpoint::{
        InputOrder, MatrixStack, Segment,
        location::ShardLocation,
        source::{StackLayout, StackRequest},
    },
};

/// Projections of an expert under the names of Mixtral, which others took over.
pub(crate) const W_PROJECTIONS: [&str; 3] = ["w1", "w3", "w2"];

/// Names of a layer's expert tensors in the known layouts.
pub(crate) struct ExpertTensors<'a> {
    /// MLX: a stacked tensor of all experts per projection.
    pub(crate) stacked: Scope<'a>,
    /// Hub: a tensor per expert and projection.
    pub(crate) hub: Scope<'a>,
    /// Hub: gate and up fused in one tensor of all experts.
    pub(crate) fused: Scope<'a>,
    /// Names of the tensor of gate and up and of that of down, in `fused`.
    pub(crate) fused_names: [&'static str; 2],
    /// Gate, up and down in the layout of one tensor per expert.
    pub(crate) projections: [&'static str; 3],
}

impl<'a> ExpertTensors<'a> {
    pub(crate) fn new(stacked: Scope<'a>, hub: Scope<'a>) -> Self {
        let (fused, fused_names) = (hub.clone(), ["gate_up_proj", "down_proj"]);
        Self { stacked, hub, fused, fused_names, projections: PROJECTIONS }
    }

    /// Experts of a MoE block: `switch_mlp` in MLX, `experts` on the Hub.
    pub(crate) fn in_block(block: &Scope<'a>) -> Self {
        Self::new(block.child("switch_mlp"), block.child("experts"))
    }
}

/// Locations of one matrix of every expert.
pub(crate) struct ExpertMatrix {
    pub(crate) shape: MatrixShape,
    pub(crate) layout: FileLayout,
    pub(crate) shards: Vec<ShardLocation>,
    /// Orders of the inputs by expert; empty if all are the file's.
    pub(crate) orders: Vec<Option<InputOrder>>,
}

/// Matrices of a layer's experts, with their layouts in the file.
pub(crate) struct ExpertForm {
    pub(crate) shape: ExpertShape,
    /// Of gate, up and down.
    pub(crate) layouts: [FileLayout; 3],
    pub(crate) orders: Option<Arc<InputOrders>>,
}

impl ExpertForm {
    /// Separate matrices without a gate.
    fn without_gate(up: &ExpertMatrix, down: &ExpertMatrix) -> Self {
        Self {
            shape: ExpertShape::without_gate(up.shape, down.shape),
            layouts: [up.layout, up.layout, down.layout],
            orders: None,
        }
    }

    /// Separate matrices without output biases, inputs in the file's order.
    fn new(matrices: &[ExpertMatrix; 3]) -> Self {
        let [gate, up, down] = matrices;
        Self {
            shape: ExpertShape::new(gate.shape, up.shape, down.shape),
            layouts: [gate.layout, up.layout, down.layout],
            orders: None,
        }
    }
}

impl From<MatrixStack> for ExpertMatrix {
    fn from(stack: MatrixStack) -> Self {
        let shard =
            |first: &Segment| ShardLocation::Stacked { first: *first, stride: first.bytes as u64 };
        Self {
            shape: stack.shape,
            layout: stack.layout,
            shards: stack.segments.iter().map(shard).collect(),
            orders: Vec::new(),
        }
    }
}

/// Locates the routed experts in the layout that the checkpoint has.
pub(crate) fn experts(
    tensors: &ExpertTensors<'_>,
    sizes: ExpertSizes,
) -> Result<LayerExperts, Error> {
    let ExpertSizes { count, hidden, intermediate } = sizes;
    let ExpertTensors { stacked, hub, fused, fused_names, projections } = tensors;
    let dims = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)];
    let mut orders = None;
    let matrices = if fused.has(fused_names[0]) {
        match fused_stacks(fused, *fused_names, sizes, [StackLayout::Bare; 2]) {
            Ok([gate_up, down]) => {
                let [gate, up] = halves(fused, fused_names[0], gate_up)?;
                [gate, up, down.into()]
            }
            Err(error) => {
                let orders = [OutputOrder::EvenRowsFirst, OutputOrder::Rows];
                let layouts = orders.map(StackLayout::ByInputs);
                let Ok(stacks) = fused_stacks(fused, *fused_names, sizes, layouts) else {
                    return Err(error);
                };
                let [gate_up, down] = stacks.map(ExpertMatrix::from);
                let interleaved = InterleavedExperts { gate_up, down, biases: None };
                return interleaved.into_experts(fused.prefix(), count);
            }
        }
    } else if hub.has_matrix(&format!("0.{}", projections[0])) {
        let [gate, up, down] = [0, 1, 2].map(|i| {
            let (rows, cols) = dims[i];
            per_expert(hub, projections[i], sizes, rows, cols)
        });
        let matrices = [gate?, up?, down?];
        orders = input_orders(hub, *projections, &matrices)?;
        matrices
    } else {
        let [gate, up, down] = [0, 1, 2].map(|i| {
            let ((rows, cols), name) = (dims[i], PROJECTIONS[i]);
            stacked.stack(&StackRequest { name, layout: StackLayout::Weight, count, rows, cols })
        });
        let matrices = [gate?, up?, down?].map(ExpertMatrix::from);
        if stacked.has("gate_proj.bias") {
            return stacked_with_biases(stacked, count, matrices);
        }
        matrices
    };
    let form = ExpertForm { orders, ..ExpertForm::new(&matrices) };
    let shards = matrices.into_iter().flat_map(|matrix| matrix.shards).collect();
    layer_experts(stacked.prefix(), count, form, shards)
}

/// Locates routed experts without a gate: `up_proj` and `down_proj` of each on the Hub, stacks
/// `fc1` and `fc2` in MLX.
pub(crate) fn experts_without_gate(
    tensors: &ExpertTensors<'_>,
    sizes: ExpertSizes,
) -> Result<LayerExperts, Error> {
    let ExpertSizes { count, hidden, intermediate } = sizes;
    let ExpertTensors { stacked, hub, projections: [_, up, down], .. } = tensors;
    let matrices = if hub.has_matrix(&format!("0.{up}")) {
        let up = per_expert(hub, up, sizes, intermediate, hidden)?;
        let down = per_expert(hub, down, sizes, hidden, intermediate)?;
        if [&up, &down].iter().any(|matrix| matrix.orders.iter().any(Option::is_some)) {
            let problem = "its experts' inputs are grouped in another order (\"desc_act\"), which \
                           is not supported for experts without a gate";
            return Err(hub.source.tensor_error(&hub.path("0"), problem));
        }
        [up, down]
    } else {
        let stack = |name, rows, cols| {
            stacked.stack(&StackRequest { name, layout: StackLayout::Weight, count, rows, cols })
        };
        [stack("fc1", intermediate, hidden)?, stack("fc2", hidden, intermediate)?]
            .map(ExpertMatrix::from)
    };
    let [up, down] = &matrices;
    let form = ExpertForm::without_gate(up, down);
    let shards = matrices.into_iter().flat_map(|matrix| matrix.shards).collect();
    layer_experts(stacked.prefix(), count, form, shards)
}

/// Experts of a form, with their shards in slot order. `name` is for error messages.
pub(crate) fn layer_experts(
    name: &str,
    count: usize,
    form: ExpertForm,
    shards: Vec<ShardLocation>,
) -> Result<LayerExperts, Error> {
    let ExpertForm { shape, layouts, orders } = form;
    let slot_bytes = shape.bytes().map_err(Error::at(|| name))?;
    let file_bytes = shape.file_bytes(layouts).map_err(Error::at(|| name))?;
    Ok(LayerExperts { count, shape, layouts, orders, shards, file_bytes, slot_bytes })
}

/// Stacked matrices, each followed by a stack of biases.
fn stacked_with_biases(
    stacked: &Scope<'_>,
    count: usize,
    matrices: [ExpertMatrix; 3],
) -> Result<LayerExperts, Error> {
    let form = ExpertForm::new(&matrices);
    let (mut shards, mut bias_type) = (Vec::new(), None);
    for (matrix, projection) in matrices.into_iter().zip(PROJECTIONS) {
        let bias = format!("{projection}.bias");
        shards.extend(matrix.shards);
        shards.push(expert_bias(stacked, &bias, count, matrix.shape.rows, &mut bias_type)?);
    }
    let shape = ExpertShape { output_bias: bias_type, ..form.shape };
    layer_experts(stacked.prefix(), count, ExpertForm { shape, ..form }, shards)
}

/// A stack of biases of `len` elements per expert. Sets `scalar`, or checks the type against it.
pub(crate) fn expert_bias(
    experts: &Scope<'_>,
    name: &str,
    count: usize,
    len: usize,
    scalar: &mut Option<Scalar>,
) -> Result<ShardLocation, Error> {
    let bias = experts.array(name, &[count, len])?;
    if *scalar.get_or_insert(bias.scalar) != bias.scalar {
        return Err(experts.source.tensor_error(
            &bias.name,
            "its type differs from that of the layer's other expert biases",
        ));
    }
    let first = Segment { bytes: bias.segment.bytes / count, ..bias.segment };
    Ok(ShardLocation::Stacked { first, stride: first.bytes as u64 })
}

/// Experts whose gate and up are one matrix of interleaved rows, and down.
pub(crate) struct InterleavedExperts {
    pub(crate) gate_up: ExpertMatrix,
    pub(crate) down: ExpertMatrix,
    pub(crate) biases: Option<InterleavedBiases>,
}

/// Output biases of interleaved gate and up, and of down.
pub(crate) struct InterleavedBiases {
    pub(crate) scalar: Scalar,
    pub(crate) gate_up: ShardLocation,
    pub(crate) down: ShardLocation,
}

impl InterleavedExperts {
    /// The experts of a layer. `name` is for error messages.
    pub(crate) fn into_experts(self, name: &str, count: usize) -> Result<LayerExperts, Error> {
        let Self { gate_up, down, biases } = self;
        let half = MatrixShape { rows: gate_up.shape.rows / 2, ..gate_up.shape };
        let shape = ExpertShape {
            interleaved: true,
            output_bias: biases.as_ref().map(|biases| biases.scalar),
            ..ExpertShape::new(half, half, down.shape)
        };
        let layouts = [gate_up.layout, gate_up.layout, down.layout];
        let (mut shards, mut down_bias) = (gate_up.shards, None);
        if let Some(biases) = biases {
            shards.push(biases.gate_up);
            down_bias = Some(biases.down);
        }
        shards.extend(down.shards);
        shards.extend(down_bias);
        layer_experts(name, count, ExpertForm { shape, layouts, orders: None }, shards)
    }
}

/// Stacks of `gate_up` and `down` by their names: `[E, 2 I, H]` with gate rows before up rows, and
/// `[E, H, I]`; by inputs, the same transposed, without quantization.
fn fused_stacks(
    hub: &Scope<'_>,
    names: [&str; 2],
    sizes: ExpertSizes,
    layouts: [StackLayout; 2],
) -> Result<[MatrixStack; 2], Error> {
    let ExpertSizes { count, hidden, intermediate } = sizes;
    let stack = |i: usize, rows, cols| {
        hub.stack(&StackRequest { name: names[i], layout: layouts[i], count, rows, cols })
    };
    Ok([stack(0, 2 * intermediate, hidden)?, stack(1, hidden, intermediate)?])
}

/// Gate and up of a stack of their rows, gate rows first.
fn halves(hub: &Scope<'_>, name: &str, gate_up: MatrixStack) -> Result<[ExpertMatrix; 2], Error> {
    let MatrixShape { rows, cols, .. } = gate_up.shape;
    let intermediate = rows / 2;
    if !intermediate.is_multiple_of(gate_up.shape.format.block().rows) {
        return Err(hub.source.tensor_error(
            &hub.path(name),
            &format!("a block of its scales spans both halves of {intermediate} rows"),
        ));
    }
    let name = hub.path(name);
    let planes = gate_up.layout.planes(gate_up.shape.format, cols).map_err(Error::at(|| name))?;
    let half = |is_up: bool| {
        let shape = MatrixShape { rows: intermediate, ..gate_up.shape };
        let shard = |(plane, both): (&PlaneLayout, &Segment)| {
            // Both halves share what the whole matrix has once.
            let bytes = if plane.is_per_matrix() { both.bytes } else { both.bytes / 2 };
            let second = (both.bytes - bytes) as u64;
            let offset = both.offset + if is_up { second } else { 0 };
            ShardLocation::Stacked {
                first: Segment { offset, bytes, ..*both },
                stride: both.bytes as u64,
            }
        };
        let planes = planes.iter().flatten().zip(&gate_up.segments);
        let shards = planes.map(shard).collect();
        ExpertMatrix { shape, layout: gate_up.layout, shards, orders: Vec::new() }
    };
    Ok([false, true].map(half))
}

/// One projection with a separate tensor for each expert.
fn per_expert(
    hub: &Scope<'_>,
    projection: &str,
    sizes: ExpertSizes,
    rows: usize,
    cols: usize,
) -> Result<ExpertMatrix, Error> {
    let (mut form, mut orders) = (None, Vec::new());
    let mut shards: Vec<Vec<_>> = Vec::new();
    for expert in 0..sizes.count {
        let m = hub.matrix(&format!("{expert}.{projection}"), rows, cols)?;
        let (shape, layout, first) =
            form.get_or_insert_with(|| (m.shape, m.layout, m.name.clone()));
        if (*shape, *layout) != (m.shape, m.layout) {
            let weight = format!("{}.weight", m.name);
            let problem = format!("its format differs from that of {first}");
            return Err(hub.source.tensor_error(&weight, &problem));
        }
        shards.resize_with(m.segments.len(), Vec::new);
        shards.iter_mut().zip(m.segments).for_each(|(all, s)| all.push(s));
        orders.push(m.order);
    }
    let (shape, layout, _) =
        form.ok_or_else(|| config_error(hub.source, "there are no experts"))?;
    Ok(ExpertMatrix {
        shape,
        layout,
        shards: shards.into_iter().map(ShardLocation::Each).collect(),
        orders,
    })
}

/// Orders of the inputs of experts with a tensor each. Gate and up read the same input, so that
/// they have one order.
fn input_orders(
    hub: &Scope<'_>,
    projections: [&str; 3],
    [gate, up, down]: &[ExpertMatrix; 3],
) -> Result<Option<Arc<InputOrders>>, Error> {
    if let Some(expert) = gate.orders.iter().zip(&up.orders).position(|(gate, up)| gate != up) {
        let name = hub.path(&format!("{expert}.{}", projections[1]));
        let problem = format!(
            "its inputs are grouped in another order (\"desc_act\") than those of {}, which is not \
             supported",
            projections[0]
        );
        return Err(hub.source.tensor_error(&name, &problem));
    }
    let shape = ExpertShape::new(gate.shape, up.shape, down.shape);
    Ok(InputOrders::new(&gate.orders, &down.orders, &shape).map(Arc::new))
}
