//! A model of four layers, each of attention, a causal convolution and routed experts.

use moeflux_compute::{
    Activation, BankPlace, Buffer, Commit, Device, Error, ExpertShape, ExpertUse, ExpertUses,
    Format, MatrixShape, Op, Router, Scalar, Slot, SlotTable, Span, SplitMix64, State, StateShape,
    View, Weight,
};

use super::to_bytes;

pub(crate) const LAYERS: usize = 4;
const HIDDEN: usize = 64;
const INNER: usize = 32;
const VOCAB: usize = 50;
const EXPERTS: usize = 4;
const K: usize = 2;
const TAPS: usize = 4;
/// Maximum rows of a step.
const ROWS: usize = 8;
const KV: StateShape =
    StateShape::KeyValue { kv_heads: 2, key_width: 16, value_width: 16, positions: 64 };
const CONVOLUTION: StateShape = StateShape::Recurrent { len: (TAPS - 1) * HIDDEN };

struct ModelLayer {
    norm: Buffer,
    taps: Buffer,
    projections: Weight,
    output: Weight,
    router: Weight,
    /// Slots of all experts: on the card, and in host memory.
    table: SlotTable,
    slots: Vec<Slot>,
}

pub(crate) struct Model {
    embedding: Weight,
    head: Weight,
    layers: Vec<ModelLayer>,
    x: Buffer,
    normed: Buffer,
    projected: Buffer,
    mixed: Buffer,
    logits: Buffer,
    expert_logits: Buffer,
    ids: Buffer,
    shares: Buffer,
    inner: Buffer,
    parts: Buffer,
    vocab: Buffer,
}

/// States and length of a sequence.
#[derive(Clone)]
pub(crate) struct Sequence {
    pub(crate) states: Vec<[State; 2]>,
    pub(crate) position: usize,
}

impl Sequence {
    pub(crate) fn new(device: &mut dyn Device) -> Self {
        let mut state = |shape, layer| device.layer_state(shape, layer).unwrap();
        let states = (0..LAYERS).map(|i| [state(KV, i), state(CONVOLUTION, i)]).collect();
        Self { states, position: 0 }
    }

    pub(crate) fn fork(&self, device: &mut dyn Device) -> Self {
        let fork = |state| device.fork_state(state, self.position).unwrap();
        let states: Vec<State> = self.states.iter().flatten().copied().map(fork).collect();
        let states = states.chunks_exact(2).map(|states| [states[0], states[1]]).collect();
        Self { states, position: self.position }
    }

    pub(crate) fn drop(self, device: &mut dyn Device) {
        self.states.into_iter().flatten().for_each(|state| device.drop_state(state));
    }

    /// Contents of all states.
    pub(crate) fn save(&self, device: &mut dyn Device) -> Vec<Vec<u8>> {
        let shapes = [(KV, self.position), (CONVOLUTION, CONVOLUTION.entries())];
        let mut save = |state, (shape, entries)| {
            let mut bytes = vec![0; entries * device.entry_bytes(shape)];
            device.save_state(state, 0..entries, &mut bytes).unwrap();
            bytes
        };
        let states = self.states.iter().flat_map(|states| states.iter().zip(shapes));
        states.map(|(state, shape)| save(*state, shape)).collect()
    }

    /// Restores contents of another sequence with the same position.
    pub(crate) fn load(&self, device: &mut dyn Device, saved: &[Vec<u8>]) {
        for (state, bytes) in self.states.iter().flatten().zip(saved) {
            let of_kv = self.states.iter().any(|states| states[0] == *state);
            let entries = if of_kv { self.position } else { CONVOLUTION.entries() };
            device.load_state(*state, 0..entries, bytes).unwrap();
        }
    }
}

fn plain(rows: usize, cols: usize) -> MatrixShape {
    MatrixShape { rows, cols, format: Format::Plain(Scalar::F32) }
}

pub(crate) fn expert_shape() -> ExpertShape {
    let wide = plain(INNER, HIDDEN);
    ExpertShape::new(wide, wide, plain(HIDDEN, INNER))
}

/// Uniform values from -0.25 to 0.25.
fn uniform(random: &mut SplitMix64, len: usize) -> Vec<f32> {
    (0..len).map(|_| (random.next_u64() >> 40) as f32 / (1 << 25) as f32 - 0.25).collect()
}

impl Model {
    /// Loads the model, whose weights depend on nothing but the layer. With a split, the device is
    /// a group.
    pub(crate) fn load(device: &mut dyn Device, split: Option<[usize; LAYERS]>) -> Self {
        if let Some(split) = split {
            device.split_layers(&split).unwrap();
        }
        let mut random = SplitMix64::new(7);
        let mut weight = |device: &mut dyn Device, rows, cols| {
            let values = uniform(&mut random, rows * cols);
            device.weight(plain(rows, cols), to_bytes(&values)).unwrap()
        };
        device.enter_layer(0, None).unwrap();
        let embedding = weight(device, VOCAB, HIDDEN);
        let mut layers = Vec::new();
        for layer in 0..LAYERS {
            device.enter_layer(layer, None).unwrap();
            let mut random = SplitMix64::new(100 + layer as u64);
            let mut buffer = |device: &mut dyn Device, len| {
                let buffer = device.buffer(len).unwrap();
                device.write(buffer, &uniform(&mut random, len)).unwrap();
                buffer
            };
            let (norm, taps) = (buffer(device, HIDDEN), buffer(device, HIDDEN * TAPS));
            let projections = weight(device, 2 * HIDDEN, HIDDEN);
            let output = weight(device, HIDDEN, HIDDEN);
            let router = weight(device, EXPERTS, HIDDEN);
            let bytes = expert_shape().bytes().unwrap();
            let host = device.bank(EXPERTS, bytes, BankPlace::Host).unwrap();
            let bank = device.bank(EXPERTS, bytes, BankPlace::Card).unwrap();
            let slots: Vec<Slot> = (0..EXPERTS as u32).map(|index| Slot { bank, index }).collect();
            for slot in &slots {
                let src = Slot { bank: host, index: slot.index };
                let mut memory = device.take_slot(src).unwrap();
                memory.copy_from_slice(&to_bytes(&uniform(&mut random, bytes / 4)));
                device.put_slot(src, memory).unwrap();
                device.copy_slot(src, *slot).unwrap();
            }
            let of_all: Vec<_> = slots.iter().copied().map(Some).collect();
            let table = device.slot_table(&of_all).unwrap();
            layers.push(ModelLayer { norm, taps, projections, output, router, table, slots });
        }
        device.enter_layer(LAYERS, None).unwrap();
        let head = weight(device, VOCAB, HIDDEN);
        let mut buffer = |width| device.buffer(ROWS * width).unwrap();
        Self {
            embedding,
            head,
            layers,
            x: buffer(HIDDEN),
            normed: buffer(HIDDEN),
            projected: buffer(2 * HIDDEN),
            mixed: buffer(HIDDEN),
            logits: buffer(HIDDEN),
            expert_logits: buffer(EXPERTS),
            ids: buffer(K),
            shares: buffer(K),
            inner: buffer(K * INNER),
            parts: buffer(K * HIDDEN),
            vocab: buffer(VOCAB),
        }
    }

    /// Runs the rows of a sequence, and returns their logits. Commits nothing.
    pub(crate) fn run(
        &self,
        device: &mut dyn Device,
        sequence: &Sequence,
        tokens: &[u32],
    ) -> Result<Vec<f32>, Error> {
        let rows = tokens.len();
        let x = View::rows(self.x, rows, HIDDEN);
        let normed = View::rows(self.normed, rows, HIDDEN);
        device.enter_layer(0, None)?;
        device.run(&Op::Embed { table: self.embedding, tokens, out: x })?;
        for (i, layer) in self.layers.iter().enumerate() {
            device.enter_layer(i, Some(x))?;
            let [kv, convolution] =
                sequence.states[i].map(|state| Span::new(state, sequence.position, rows));
            let weight = Some(layer.norm);
            device.run(&Op::RmsNorm { x, weight, per_head: false, eps: 1e-6, out: normed })?;
            self.mix(device, layer, kv, convolution)?;
            device.run(&Op::RmsNorm { x, weight, per_head: false, eps: 1e-6, out: normed })?;
            self.experts(device, layer, rows, i % 2 == 0)?;
        }
        device.enter_layer(LAYERS, Some(x))?;
        let vocab = View::rows(self.vocab, rows, VOCAB);
        device.run(&Op::RmsNorm { x, weight: None, per_head: false, eps: 1e-6, out: normed })?;
        let (weight, bias, exact) = (self.head, None, false);
        device.run(&Op::MatMul {
            x: normed,
            weight,
            bias,
            exact,
            answers: normed.few(),
            out: vocab,
        })?;
        let mut logits = vec![0.0; rows * VOCAB];
        device.read(vocab, &mut logits)?;
        Ok(logits)
    }

    /// Runs and commits the rows of a sequence.
    pub(crate) fn step(
        &self,
        device: &mut dyn Device,
        sequence: &mut Sequence,
        tokens: &[u32],
    ) -> Result<Vec<f32>, Error> {
        let logits = self.run(device, sequence, tokens)?;
        device.commit(&sequence.commits(tokens.len()))?;
        sequence.position += tokens.len();
        Ok(logits)
    }

    /// Attention and convolution.
    fn mix(
        &self,
        device: &mut dyn Device,
        layer: &ModelLayer,
        kv: Span,
        convolution: Span,
    ) -> Result<(), Error> {
        let rows = kv.rows;
        let x = View::rows(self.x, rows, HIDDEN);
        let normed = View::rows(self.normed, rows, HIDDEN);
        let mixed = View::rows(self.mixed, rows, HIDDEN);
        let projected = View::rows(self.projected, rows, 2 * HIDDEN);
        let out = View::rows(self.logits, rows, HIDDEN);
        let (bias, exact) = (None, false);
        let weight = layer.projections;
        device.run(&Op::MatMul {
            x: normed,
            weight,
            bias,
            exact,
            answers: normed.few(),
            out: projected,
        })?;
        device.run(&Op::Attention {
            q: projected.columns(0, HIDDEN).split(4),
            k: projected.columns(HIDDEN, 32).split(2),
            v: Some(projected.columns(HIDDEN + 32, 32).split(2)),
            gate: None,
            scale: 0.25,
            window: None,
            sinks: None,
            positions: None,
            spans: &[kv],
            out: mixed.split(4),
        })?;
        let weight = layer.output;
        device.run(&Op::MatMul { x: mixed, weight, bias, exact, answers: mixed.few(), out })?;
        device.run(&Op::Add { x, y: out })?;
        let (weight, width) = (layer.taps, TAPS);
        let spans = &[convolution];
        device.run(&Op::Conv1d {
            x: normed,
            weight,
            bias: None,
            width,
            dilation: 1,
            silu: true,
            spans,
            out: mixed,
        })?;
        device.run(&Op::Add { x, y: mixed })
    }

    /// Routed experts, looked up on the device or by the host.
    fn experts(
        &self,
        device: &mut dyn Device,
        layer: &ModelLayer,
        rows: usize,
        on_device: bool,
    ) -> Result<(), Error> {
        let normed = View::rows(self.normed, rows, HIDDEN);
        let logits = View::rows(self.expert_logits, rows, EXPERTS);
        let (ids, weights) = (View::rows(self.ids, rows, K), View::rows(self.shares, rows, K));
        let (weight, bias) = (layer.router, None);
        device.run(&Op::MatMul {
            x: normed,
            weight,
            bias,
            exact: true,
            answers: normed.few(),
            out: logits,
        })?;
        device.run(&Op::TopK { logits, router: Router::softmax(true), ids, weights })?;
        let mut listed = Vec::new();
        if !on_device {
            let mut chosen = vec![0.0; rows * K];
            device.read(ids, &mut chosen)?;
            listed.extend(chosen.iter().enumerate().map(|(out_row, id)| ExpertUse {
                slot: layer.slots[*id as usize],
                row: out_row / K,
                out_row,
            }));
            listed.sort_unstable_by_key(|listed| (listed.slot, listed.out_row));
        }
        let parts = View::rows(self.parts, rows * K, HIDDEN);
        device.run(&Op::Experts {
            x: normed,
            shape: &expert_shape(),
            activation: Activation::SwiGlu,
            experts: EXPERTS,
            answers: normed.few(),
            uses: match on_device {
                true => ExpertUses::Routed { ids, table: layer.table },
                false => ExpertUses::Listed(&listed),
            },
            inner: View::rows(self.inner, rows * K, INNER),
            out: parts,
        })?;
        let out = View::rows(self.x, rows, HIDDEN);
        device.run(&Op::Combine { parts, weights, shared: None, add: true, out })
    }

    /// Weight and slots of a layer, for ops on the wrong card.
    pub(crate) fn objects(&self, layer: usize) -> (Weight, &[Slot]) {
        (self.layers[layer].projections, &self.layers[layer].slots)
    }
}

impl Sequence {
    /// Commits of all rows of a step.
    pub(crate) fn commits(&self, rows: usize) -> Vec<Commit> {
        let span = |state| Span::new(state, self.position, rows);
        self.states.iter().flatten().map(|state| Commit::all(span(*state))).collect()
    }
}
