//! Handles of another device: every device refuses them by name and keeps its objects.

use std::iter::once;

use moeflux_compute::{
    Activation, BankPlace, Buffer, Bytes, Commit, Device, Error, ExpertShape, ExpertUse,
    ExpertUses, Format, Isa, MatrixShape, Op, Scalar, Slot, SlotTable, Span, State, StateShape,
    View, Weight,
};

use crate::harness::{device, gpu, read, reference, tests_cpu};

/// Width of all vectors, and columns of all matrices.
const WIDTH: usize = 4;

const MATRIX: MatrixShape =
    MatrixShape { rows: WIDTH, cols: WIDTH, format: Format::Plain(Scalar::F32) };
const EXPERT: ExpertShape = ExpertShape::new(MATRIX, MATRIX, MATRIX);
const RECURRENT: StateShape = StateShape::Recurrent { len: WIDTH };
const KEYS: StateShape =
    StateShape::KeyValue { kv_heads: 1, key_width: WIDTH, value_width: 0, positions: 8 };

/// One object of each kind. The indices are the same on every device.
struct Objects {
    buffer: Buffer,
    out: View,
    weight: Weight,
    states: [State; 2],
    slots: [Slot; 2],
    table: SlotTable,
}

impl Objects {
    fn new(device: &mut dyn Device) -> Self {
        let buffer = device.buffer(2 * WIDTH).unwrap();
        let out = View::rows(device.buffer(WIDTH).unwrap(), 1, WIDTH);
        let weight = device.weight(MATRIX, Bytes::zeroed(4 * WIDTH * WIDTH).unwrap()).unwrap();
        let slots = [BankPlace::Host, BankPlace::Card].map(|place| {
            let bank = device.bank(1, EXPERT.bytes().unwrap(), place).unwrap();
            Slot { bank, index: 0 }
        });
        device.copy_slot(slots[0], slots[1]).unwrap();
        let states = [RECURRENT, KEYS].map(|shape| device.state(shape).unwrap());
        let table = device.slot_table(&[Some(slots[1])]).unwrap();
        Self { buffer, out, weight, states, slots, table }
    }
}

/// Checks that a call is refused because of a handle of `kind`.
fn refused<T>(kind: &str, result: Result<T, Error>) {
    match result {
        Err(error @ Error::ForeignHandle { kind: found }) => {
            assert_eq!(found, kind);
            assert!(error.to_string().contains(kind), "{error}");
        }
        Err(error) => panic!("{kind}: {error}"),
        Ok(_) => panic!("a {kind} of another device was accepted"),
    }
}

fn refused_buffers_and_weights(device: &mut dyn Device, own: &Objects, foreign: &Objects) {
    let view = |buffer| View::rows(buffer, 1, WIDTH);
    refused("buffer", device.write(foreign.buffer, &[7.0]));
    refused("buffer", device.read(view(foreign.buffer), &mut [0.0; WIDTH]));
    let add = |x, y| Op::Add { x: view(x), y: view(y) };
    refused("buffer", device.run(&add(own.buffer, foreign.buffer)));
    refused("buffer", device.run(&add(foreign.buffer, own.buffer)));
    let (x, out) = (view(own.buffer), own.out);
    let product = |weight, bias| Op::MatMul { x, weight, bias, exact: true, answers: x.few(), out };
    refused("weight", device.run(&product(foreign.weight, None)));
    refused("buffer", device.run(&product(own.weight, Some(foreign.buffer))));
    let embed = Op::Embed { table: foreign.weight, tokens: &[0], out };
    refused("weight", device.run(&embed));
}

fn refused_states(device: &mut dyn Device, own: &Objects, foreign: &Objects) {
    let x = View::rows(own.buffer, 1, WIDTH);
    let [recurrent, keys] = foreign.states.map(|state| [Span::new(state, 0, 1)]);
    let convolution = Op::Conv1d {
        x,
        weight: own.buffer,
        bias: None,
        width: 2,
        dilation: 1,
        silu: true,
        spans: &recurrent,
        out: own.out,
    };
    refused("state", device.run(&convolution));
    let attention = Op::Attention {
        q: x,
        k: x,
        v: None,
        gate: None,
        scale: 1.0,
        window: None,
        sinks: None,
        positions: None,
        spans: &keys,
        out: own.out,
    };
    refused("state", device.run(&attention));
    for (state, shape) in foreign.states.into_iter().zip([RECURRENT, KEYS]) {
        let span = Span::new(state, 0, 1);
        let mut bytes = vec![0; device.entry_bytes(shape)];
        refused("state", device.state_need(&mut once(span)));
        refused("state", device.fork_state(state, 0));
        refused("state", device.truncate_state(state, 0));
        refused("state", device.reset(state));
        refused("state", device.save_state(state, 0..1, &mut bytes));
        refused("state", device.load_state(state, 0..1, &bytes));
        refused("state", device.commit(&[Commit::all(span)]));
        device.drop_state(state);
    }
}

fn refused_slots(device: &mut dyn Device, own: &Objects, foreign: &Objects) {
    let memory = Bytes::zeroed(EXPERT.bytes().unwrap()).unwrap();
    refused("slot", device.take_slot(foreign.slots[0]));
    refused("slot", device.put_slot(foreign.slots[0], memory));
    refused("slot", device.slot_table(&[Some(foreign.slots[0])]));
    refused("slot", device.copy_slot(own.slots[0], foreign.slots[1]));
    refused("slot", device.copy_slot(foreign.slots[0], own.slots[1]));
    let (x, out) = (View::rows(own.buffer, 1, WIDTH), own.out);
    let inner = View::rows(device.buffer(WIDTH).unwrap(), 1, WIDTH);
    let ids = View::rows(device.buffer(1).unwrap(), 1, 1);
    let experts = |uses| Op::Experts {
        x,
        shape: &EXPERT,
        activation: Activation::SwiGlu,
        experts: 1,
        answers: x.few(),
        uses,
        inner,
        out,
    };
    let uses = [ExpertUse { slot: foreign.slots[1], row: 0, out_row: 0 }];
    refused("slot", device.run(&experts(ExpertUses::Listed(&uses))));
    let routed = ExpertUses::Routed { ids, table: foreign.table };
    refused("slot table", device.run(&experts(routed)));
}

#[test]
fn handles_of_another_device_are_refused() {
    let mut other = reference(None);
    let foreign = Objects::new(&mut *other);
    let cpu = tests_cpu().then(|| device(Isa::detect(), true, 2));
    for mut device in [Some(reference(None)), cpu, gpu(true)].into_iter().flatten() {
        let device = &mut *device;
        assert_ne!(device.id(), other.id());
        let own = Objects::new(device);
        device.write(own.buffer, &[1.0, 2.0, 3.0, 4.0]).unwrap();
        refused_buffers_and_weights(device, &own, &foreign);
        refused_states(device, &own, &foreign);
        refused_slots(device, &own, &foreign);
        assert_eq!(read(device, View::rows(own.buffer, 1, WIDTH)), [1.0, 2.0, 3.0, 4.0]);
        for state in own.states {
            device.reset(state).unwrap();
        }
    }
    // Objects on the other device are as they were.
    for state in foreign.states {
        other.reset(state).unwrap();
    }
}
