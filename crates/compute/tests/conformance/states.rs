//! States of sequences: fork, truncate, commit, save and load, on every device.

mod memory_limit;
mod partial_commit;
mod recorded_steps;

use std::{iter::once, ops::Range};

use moeflux_compute::{
    Buffer, Commit, Device, Error, Isa, KeySharing, KvFormat, LogDecay, Op, Span, State,
    StateShape, StepLimits, View,
};

use crate::harness::{
    Random, bits, close, device, device_with_kv, gpu_with_kv, is_full, read, reference, row_chunks,
    tests_cpu,
};

/// Rows of each of the two inputs of a mixer.
const ROWS: usize = 700;

/// Runs a test on every device, exact and fast, and with every KV format. On a GPU the combination
/// of the fast path with an f32 KV cache is left to the complete table.
fn for_each_device(mut test: impl FnMut(&mut dyn Device)) {
    test(&mut *reference(None));
    for isa in Isa::available().into_iter().filter(|_| tests_cpu()) {
        test(&mut *device(isa, true, 2));
        let kv_formats = if isa == Isa::detect() { &KvFormat::ALL[..] } else { &[KvFormat::F16] };
        for kv_format in kv_formats {
            test(&mut *device_with_kv(Some(*kv_format), isa, false, 2));
        }
    }
    let on_gpu = [(KvFormat::F32, true), (KvFormat::F16, false), (KvFormat::F32, false)];
    for &(kv_format, exact) in &on_gpu[..if is_full() { 3 } else { 2 }] {
        if let Some(mut gpu) = gpu_with_kv(Some(kv_format), exact) {
            test(&mut *gpu);
        }
    }
}

/// Ops with a state.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Query heads, KV heads, key width, value width, window.
    Attention(usize, usize, usize, usize, Option<usize>),
    /// Query heads, key width, value width.
    Latent(usize, usize, usize),
    /// Channels, width.
    Conv(usize, usize),
    /// Key heads, heads, key width, value width.
    Delta(usize, usize, usize, usize),
    /// The same with a decay for each element of a key.
    Kda(usize, usize, usize, usize),
    /// Groups, heads, head width, state width.
    Mamba2(usize, usize, usize, usize),
    /// Columns of an entry, positions of a block.
    Compress(usize, usize),
}

const KINDS: [Kind; 7] = [
    Kind::Attention(4, 2, 32, 32, None),
    // Entries that end in the middle of a 32-bit word.
    Kind::Attention(3, 1, 7, 6, None),
    Kind::Attention(2, 2, 24, 16, Some(100)),
    Kind::Latent(4, 40, 24),
    Kind::Latent(2, 9, 5),
    Kind::Conv(37, 4),
    Kind::Delta(2, 4, 16, 24),
];

impl Kind {
    fn shape(self) -> StateShape {
        let kv = |kv_heads, key_width, value_width, positions| StateShape::KeyValue {
            kv_heads,
            key_width,
            value_width,
            positions,
        };
        match self {
            Kind::Attention(_, kv_heads, key, value, None) => kv(kv_heads, key, value, ROWS),
            Kind::Attention(_, kv_heads, key, value, Some(_)) => kv(kv_heads, key, value, 512),
            Kind::Latent(_, key, _) => kv(1, key, 0, ROWS),
            Kind::Conv(channels, width) => StateShape::Recurrent { len: (width - 1) * channels },
            Kind::Delta(_, heads, key, value)
            | Kind::Kda(_, heads, key, value)
            | Kind::Mamba2(_, heads, key, value) => {
                StateShape::Recurrent { len: heads * key * value }
            }
            // Blocks overlap: two parts of a row and of its gate, for two blocks.
            Kind::Compress(width, ratio) => {
                StateShape::Recurrent { len: 2 * ratio * 2 * 2 * width }
            }
        }
    }

    fn is_recurrent(self) -> bool {
        matches!(self.shape(), StateShape::Recurrent { .. })
    }

    fn wraps(self) -> bool {
        matches!(self, Kind::Attention(.., Some(_)))
    }

    /// Widths of an input row and of an output row.
    fn widths(self) -> [usize; 2] {
        match self {
            Kind::Attention(heads, kv_heads, key, value, _) => {
                [heads * key + kv_heads * (key + value), heads * value]
            }
            Kind::Latent(heads, key, value) => [(heads + 1) * key, heads * value],
            Kind::Conv(channels, _) => [channels; 2],
            Kind::Delta(key_heads, heads, key, value) => {
                [2 * key_heads * key + heads * (value + 2), heads * value]
            }
            Kind::Kda(key_heads, heads, key, value) => {
                [2 * key_heads * key + heads * (value + key + 1), heads * value]
            }
            Kind::Mamba2(groups, heads, width, state) => {
                [2 * groups * state + heads * (width + 1), heads * width]
            }
            Kind::Compress(width, _) => [4 * width, width],
        }
    }
}

/// An op with a state, and two alternative inputs of a sequence.
struct Mixer {
    kind: Kind,
    inputs: [View; 2],
    out: View,
    weight: Buffer,
}

impl Mixer {
    /// The inputs are values that f16 represents exactly.
    fn new(device: &mut dyn Device, kind: Kind) -> Self {
        let mut random = Random::new(31);
        let mut view = |width: usize| {
            let values: Vec<f32> = random
                .values(ROWS * width)
                .iter()
                .map(|x| half::f16::from_f32(*x).to_f32())
                .collect();
            let buffer = device.buffer(values.len()).unwrap();
            device.write(buffer, &values).unwrap();
            View::rows(buffer, ROWS, width)
        };
        let [input_width, out_width] = kind.widths();
        let (inputs, out) = ([view(input_width), view(input_width)], view(out_width));
        Self { kind, inputs, out, weight: view(1).buffer }
    }

    /// Runs and commits rows of the given input. Returns the output's bit patterns.
    fn run(
        &self,
        device: &mut dyn Device,
        input: usize,
        state: State,
        rows: Range<usize>,
    ) -> Vec<u32> {
        bits(&self.try_run(device, input, state, rows).unwrap())
    }

    fn try_run(
        &self,
        device: &mut dyn Device,
        input: usize,
        state: State,
        rows: Range<usize>,
    ) -> Result<Vec<f32>, Error> {
        let span = self.compute(device, input, state, rows.clone())?;
        device.commit(&[Commit::all(span)])?;
        Ok(read(device, self.outputs(&span)))
    }

    /// Rows of the output that a span writes.
    fn outputs(&self, span: &Span) -> View {
        match self.kind {
            Kind::Compress(_, ratio) => {
                let (first, end) = (span.position / ratio, (span.position + span.rows) / ratio);
                self.out.slice(first, end - first)
            }
            _ => self.out.slice(span.position, span.rows),
        }
    }

    /// Runs rows of the given input and commits none. Returns their span.
    fn compute(
        &self,
        device: &mut dyn Device,
        input: usize,
        state: State,
        rows: Range<usize>,
    ) -> Result<Span, Error> {
        self.compute_span(device, input, Span::new(state, rows.start, rows.len()))
    }

    /// Runs a span of the given input and commits none of its rows.
    fn compute_span(
        &self,
        device: &mut dyn Device,
        input: usize,
        span: Span,
    ) -> Result<Span, Error> {
        let spans = &[span];
        let x = self.inputs[input].slice(span.position, span.rows);
        let out = self.outputs(&span);
        match self.kind {
            Kind::Attention(heads, kv_heads, key, value, window) => {
                let keys = heads * key;
                let values = keys + kv_heads * key;
                device.run(&Op::Attention {
                    q: x.columns(0, keys).split(heads),
                    k: x.columns(keys, kv_heads * key).split(kv_heads),
                    v: Some(x.columns(values, kv_heads * value).split(kv_heads)),
                    gate: None,
                    scale: 0.3,
                    window,
                    sinks: None,
                    positions: None,
                    spans,
                    out: out.split(heads),
                })?;
            }
            Kind::Latent(heads, key, _) => device.run(&Op::Attention {
                q: x.columns(0, heads * key).split(heads),
                k: x.columns(heads * key, key),
                v: None,
                gate: None,
                scale: 0.3,
                window: None,
                sinks: None,
                positions: None,
                spans,
                out: out.split(heads),
            })?,
            Kind::Conv(_, width) => device.run(&Op::Conv1d {
                x,
                weight: self.weight,
                bias: None,
                width,
                dilation: 1,
                silu: true,
                spans,
                out,
            })?,
            Kind::Delta(key_heads, heads, key, value) => {
                let keys = key_heads * key;
                device.run(&Op::DeltaNet {
                    q: x.columns(0, keys).split(key_heads),
                    k: x.columns(keys, keys).split(key_heads),
                    v: x.columns(2 * keys, heads * value).split(heads),
                    a: x.columns(2 * keys + heads * value, heads).split(heads),
                    b: x.columns(2 * keys + heads * (value + 1), heads),
                    a_log: self.weight,
                    dt_bias: self.weight,
                    decay: LogDecay::Softplus,
                    sharing: KeySharing::Adjacent,
                    spans,
                    out: out.split(heads),
                })?;
            }
            Kind::Kda(key_heads, heads, key, value) => {
                let (keys, values) = (key_heads * key, heads * value);
                device.run(&Op::DeltaNet {
                    q: x.columns(0, keys).split(key_heads),
                    k: x.columns(keys, keys).split(key_heads),
                    v: x.columns(2 * keys, values).split(heads),
                    a: x.columns(2 * keys + values, heads * key).split(heads),
                    b: x.columns(2 * keys + values + heads * key, heads),
                    a_log: self.weight,
                    dt_bias: self.weight,
                    decay: LogDecay::Bounded { bound: -5.0 },
                    sharing: KeySharing::Adjacent,
                    spans,
                    out: out.split(heads),
                })?;
            }
            Kind::Mamba2(groups, heads, width, state) => {
                let (states, values) = (groups * state, heads * width);
                device.run(&Op::Mamba2 {
                    x: x.columns(0, values).split(heads),
                    b: x.columns(values, states).split(groups),
                    c: x.columns(values + states, states).split(groups),
                    dt: x.columns(values + 2 * states, heads),
                    a_log: self.weight,
                    d: self.weight,
                    dt_bias: self.weight,
                    limits: StepLimits::default(),
                    spans,
                    out: out.split(heads),
                })?;
            }
            Kind::Compress(width, ratio) => device.run(&Op::Compress {
                x: x.columns(0, 2 * width),
                gate: Some(x.columns(2 * width, 2 * width)),
                ape: None,
                ratio,
                overlap: true,
                spans,
                out,
            })?,
        }
        Ok(span)
    }

    fn state(&self, device: &mut dyn Device) -> State {
        device.state(self.kind.shape()).unwrap()
    }

    /// A state with the rows of the first input before `end`.
    fn prefilled(&self, device: &mut dyn Device, end: usize) -> State {
        let state = self.state(device);
        self.advance(device, 0, state, 0..end);
        state
    }

    /// Runs rows in chunks of 200, 1, 1 and 20 rows, repeated as needed.
    fn advance(
        &self,
        device: &mut dyn Device,
        input: usize,
        state: State,
        rows: Range<usize>,
    ) -> Vec<u32> {
        let mut all = Vec::new();
        for chunk in row_chunks(rows.len(), &[200, 1, 1, 20]) {
            let positions = rows.start + chunk.start..rows.start + chunk.end;
            all.extend(self.run(device, input, state, positions));
        }
        all
    }

    /// Output of a sequence that was never forked: the first input up to `switch`, then another.
    fn unforked_output(
        &self,
        device: &mut dyn Device,
        input: usize,
        switch: usize,
        rows: Range<usize>,
    ) -> Vec<u32> {
        let state = self.prefilled(device, switch);
        self.advance(device, input, state, switch..rows.start);
        let output = self.advance(device, input, state, rows);
        device.drop_state(state);
        output
    }

    /// The entries that are written after `rows` rows.
    fn entries(&self, rows: usize) -> Range<usize> {
        match self.kind.shape() {
            StateShape::Recurrent { len } => 0..len,
            StateShape::KeyValue { positions, .. } => 0..rows.min(positions),
        }
    }

    fn save(&self, device: &mut dyn Device, state: State, entries: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0xa5; entries.len() * device.entry_bytes(self.kind.shape())];
        device.save_state(state, entries, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn forked_states_match_unforked_states() {
    for_each_device(|device| {
        let name = device.describe();
        for kind in KINDS {
            let mixer = Mixer::new(device, kind);
            // In the middle of a page, at the end of a page, and after a ring has wrapped.
            let lens = if kind.wraps() { [301, 620] } else { [256, 301] };
            for (i, len) in lens.into_iter().enumerate() {
                let (first, second) = (len..len + 21, len + 21..len + 43);
                let expected = |device: &mut dyn Device, input, rows| {
                    mixer.unforked_output(device, input, len, rows)
                };
                let one = [first.clone(), second.clone()].map(|rows| expected(device, 0, rows));
                let other = [first.clone(), second.clone()].map(|rows| expected(device, 1, rows));
                let held = device.states_held();
                for dropped in if i == 0 || is_full() { 0..3 } else { 2..3 } {
                    let parent = mixer.prefilled(device, len);
                    let child = device.fork_state(parent, len).unwrap();
                    let grandchild = device.fork_state(child, len).unwrap();
                    let what = format!("{name}: {kind:?} forked at {len}, {dropped} dropped");
                    if dropped == 1 {
                        device.drop_state(parent);
                    }
                    assert!(mixer.advance(device, 1, child, first.clone()) == other[0], "{what}");
                    if dropped != 1 {
                        assert!(
                            mixer.advance(device, 0, parent, first.clone()) == one[0],
                            "{what}"
                        );
                    }
                    if dropped == 2 {
                        device.drop_state(child);
                    }
                    assert!(
                        mixer.advance(device, 0, grandchild, first.clone()) == one[0],
                        "{what}"
                    );
                    // Forks of rows written since.
                    let last = device.fork_state(grandchild, first.end).unwrap();
                    assert!(mixer.advance(device, 0, last, second.clone()) == one[1], "{what}");
                    device.drop_state(last);
                    if dropped != 2 {
                        assert!(
                            mixer.advance(device, 1, child, second.clone()) == other[1],
                            "{what}"
                        );
                    }
                    assert!(
                        mixer.advance(device, 0, grandchild, second.clone()) == one[1],
                        "{what}"
                    );
                    let _ = [parent, child, grandchild].map(|state| device.drop_state(state));
                    assert_eq!(device.states_held(), held, "{what}");
                }
            }
        }
    });
}

#[test]
fn a_fork_has_the_committed_contents() {
    for_each_device(|device| {
        for kind in KINDS.into_iter().filter(|kind| kind.is_recurrent()) {
            let mixer = Mixer::new(device, kind);
            let expected = mixer.unforked_output(device, 1, 5, 5..9);
            let state = mixer.prefilled(device, 5);
            let spans = &[Span::new(state, 5, 3)];
            if let Kind::Conv(_, width) = kind {
                let (x, out) = (mixer.inputs[0].slice(5, 3), mixer.out.slice(5, 3));
                device
                    .run(&Op::Conv1d {
                        x,
                        weight: mixer.weight,
                        bias: None,
                        width,
                        dilation: 1,
                        silu: true,
                        spans,
                        out,
                    })
                    .unwrap();
            }
            let [one, other] = [0; 2].map(|_| device.fork_state(state, 5).unwrap());
            assert!(mixer.advance(device, 1, one, 5..9) == expected);
            device.commit(&[Commit::all(spans[0])]).unwrap();
            device.reset(state).unwrap();
            device.drop_state(one);
            assert!(mixer.advance(device, 1, other, 5..9) == expected);
            // A reset state equals a new one.
            assert!(
                mixer.advance(device, 1, state, 0..4) == mixer.unforked_output(device, 1, 0, 0..4)
            );
        }
    });
}

#[test]
fn commit_is_all_or_nothing() {
    for_each_device(|device| {
        let mixer = Mixer::new(device, Kind::Conv(37, 4));
        let (state, dropped) = (mixer.prefilled(device, 5), mixer.state(device));
        device.drop_state(dropped);
        let before = mixer.save(device, state, mixer.entries(5));
        let spans = &[Span::new(state, 5, 3)];
        let (x, out) = (mixer.inputs[0].slice(5, 3), mixer.out.slice(5, 3));
        device
            .run(&Op::Conv1d {
                x,
                weight: mixer.weight,
                bias: None,
                width: 4,
                dilation: 1,
                silu: true,
                spans,
                out,
            })
            .unwrap();
        let commits = [state, dropped].map(|state| Commit::all(Span { state, ..spans[0] }));
        assert!(device.commit(&commits).is_err());
        assert!(mixer.save(device, state, mixer.entries(5)) == before, "{}", device.describe());
        device.commit(&commits[..1]).unwrap();
        assert!(mixer.save(device, state, mixer.entries(8)) != before);
        assert!(
            mixer.advance(device, 0, state, 8..12) == mixer.unforked_output(device, 0, 8, 8..12)
        );
    });
}

#[test]
fn truncated_positions_can_be_rewritten() {
    for_each_device(|device| {
        for kind in KINDS.into_iter().filter(|kind| !kind.is_recurrent() && !kind.wraps()) {
            let mixer = Mixer::new(device, kind);
            for len in [0, 1, 130, 256] {
                let expected = mixer.unforked_output(device, 1, len, len..len + 50);
                let state = mixer.prefilled(device, 290);
                let fork = device.fork_state(state, len).unwrap();
                device.truncate_state(state, len).unwrap();
                for state in [state, fork] {
                    assert!(
                        mixer.advance(device, 1, state, len..len + 50) == expected,
                        "{kind:?} {len}"
                    );
                }
                device.reset(state).unwrap();
                assert!(
                    mixer.advance(device, 1, fork, len..len + 50) == expected,
                    "{kind:?} {len}"
                );
                let fresh = mixer.unforked_output(device, 1, 0, 0..9);
                assert!(mixer.advance(device, 1, state, 0..9) == fresh, "{kind:?} {len}");
            }
        }
    });
}

#[test]
fn loaded_states_match_saved_states() {
    for_each_device(|device| {
        let name = device.describe();
        for kind in KINDS {
            let mixer = Mixer::new(device, kind);
            for len in if kind.wraps() { [256, 600] } else { [5, 301] } {
                let what = format!("{name}: {kind:?} at {len}");
                let expected = mixer.unforked_output(device, 1, len, len..len + 22);
                let state = mixer.prefilled(device, len);
                let entries = mixer.entries(len);
                let all = mixer.save(device, state, entries.clone());
                // In two unaligned ranges, the later one first.
                let middle = (entries.end / 2) | 1;
                let entry_bytes = device.entry_bytes(kind.shape());
                let ranges = [0..middle, middle..entries.end];
                let loaded = mixer.state(device);
                for range in ranges.into_iter().rev() {
                    let bytes = mixer.save(device, state, range.clone());
                    let expected = &all[range.start * entry_bytes..range.end * entry_bytes];
                    assert!(bytes == expected, "{what}");
                    device.load_state(loaded, range, &bytes).unwrap();
                }
                assert!(mixer.save(device, loaded, entries.clone()) == all, "{what}");
                // Into memory that is shared with another state.
                let shared = mixer.state(device);
                mixer.advance(device, 1, shared, 0..len);
                let before = mixer.save(device, shared, entries.clone());
                let fork = device.fork_state(shared, len).unwrap();
                device.load_state(fork, entries.clone(), &all).unwrap();
                assert!(mixer.save(device, shared, entries.clone()) == before, "{what}");
                for state in [loaded, fork, state] {
                    assert!(mixer.advance(device, 1, state, len..len + 22) == expected, "{what}");
                }
                let _ = [loaded, fork, state, shared].map(|state| device.drop_state(state));
            }
        }
    });
}

#[test]
fn saved_bytes_match_across_devices_of_one_kv_format() {
    // Indexed by format, then by kind.
    let mut known: [Vec<Vec<u8>>; 3] = Default::default();
    for_each_device(|device| {
        let format = device.kv_format();
        let known = &mut known[KvFormat::ALL.iter().position(|other| *other == format).unwrap()];
        let kinds = KINDS.into_iter().filter(|kind| !kind.is_recurrent());
        let saved: Vec<Vec<u8>> = kinds
            .map(|kind| {
                let mixer = Mixer::new(device, kind);
                let state = mixer.prefilled(device, 530);
                mixer.save(device, state, mixer.entries(530))
            })
            .collect();
        if known.is_empty() {
            *known = saved;
        } else {
            assert!(*known == saved, "{}: {format:?}", device.describe());
        }
    });
}

#[test]
fn each_device_continues_states_saved_by_the_reference() {
    let mut expected = Vec::new();
    let mut saved = Vec::new();
    let mut reference = reference(None);
    for kind in KINDS {
        let mixer = Mixer::new(&mut *reference, kind);
        let state = mixer.prefilled(&mut *reference, 70);
        saved.push(mixer.save(&mut *reference, state, mixer.entries(70)));
        expected.push(mixer.try_run(&mut *reference, 1, state, 70..79).unwrap());
    }
    for_each_device(|device| {
        for ((kind, saved), expected) in KINDS.into_iter().zip(&saved).zip(&expected) {
            if device.kv_format() == KvFormat::F32 || kind.is_recurrent() {
                let mixer = Mixer::new(device, kind);
                let state = mixer.state(device);
                device.load_state(state, mixer.entries(70), saved).unwrap();
                let got = mixer.try_run(device, 1, state, 70..79).unwrap();
                close(&format!("{}: {kind:?}", device.describe()), &got, expected, 1e-5);
            }
        }
    });
}

#[test]
#[expect(clippy::reversed_empty_ranges, reason = "invalid ranges under test")]
fn invalid_state_accesses_are_rejected() {
    for_each_device(|device| {
        for kind in KINDS {
            let mixer = Mixer::new(device, kind);
            let state = mixer.prefilled(device, 20);
            let (all, bytes) = (kind.shape().entries(), device.entry_bytes(kind.shape()));
            let refused = |device: &mut dyn Device, state, entries: Range<usize>, len: usize| {
                let mut memory = vec![0; len];
                let what = format!("{}: {kind:?} {entries:?} {len}", device.describe());
                assert!(device.save_state(state, entries.clone(), &mut memory).is_err(), "{what}");
                assert!(device.load_state(state, entries, &memory).is_err(), "{what}");
            };
            for (entries, len) in [
                (0..2, bytes),
                (0..2, 2 * bytes + 1),
                (0..2, 0),
                (5..3, 0),
                (5..3, 2 * bytes),
                (all..all + 1, bytes),
                (all + 1..all + 1, 0),
                (0..usize::MAX, 0),
                (usize::MAX - 1..usize::MAX, bytes),
            ] {
                refused(device, state, entries, len);
            }
            for (position, rows) in
                [(usize::MAX, 1), (0, usize::MAX), (usize::MAX, usize::MAX), (usize::MAX, 0)]
            {
                device.state_need(&mut once(Span::new(state, position, rows))).unwrap();
            }
            device.truncate_state(state, usize::MAX).unwrap();
            let fork = device.fork_state(state, usize::MAX).unwrap();
            device.save_state(fork, all..all, &mut []).unwrap();
            device.load_state(fork, 3..3, &[]).unwrap();
            let expected = mixer.unforked_output(device, 0, 20, 20..23);
            assert!(mixer.advance(device, 0, fork, 20..23) == expected);
            let _ = [fork, fork].map(|state| device.drop_state(state));
            refused(device, fork, 0..1, bytes);
            let dropped = Span::new(fork, 0, 1);
            assert!(device.state_need(&mut once(dropped)).is_err());
            assert!(device.fork_state(fork, 0).is_err());
            assert!(device.truncate_state(fork, 0).is_err());
            assert!(device.reset(fork).is_err());
            assert!(device.commit(&[Commit::all(dropped)]).is_err());
            assert!(mixer.try_run(device, 0, fork, 0..1).is_err());
        }
    });
}

#[test]
fn empty_states() {
    for_each_device(|device| {
        let kv = |kv_heads, key_width, positions| StateShape::KeyValue {
            kv_heads,
            key_width,
            value_width: 0,
            positions,
        };
        for shape in [kv(1, 4, 0), kv(0, 4, 10), kv(1, 0, 10), StateShape::Recurrent { len: 0 }] {
            let state = device.state(shape).unwrap();
            let fork = device.fork_state(state, 5).unwrap();
            device.load_state(fork, 0..0, &[]).unwrap();
            device.save_state(state, 0..0, &mut []).unwrap();
            let mut bytes = vec![0; shape.entries() * device.entry_bytes(shape)];
            device.load_state(fork, 0..shape.entries(), &bytes).unwrap();
            device.save_state(fork, 0..shape.entries(), &mut bytes).unwrap();
            device.truncate_state(fork, 0).unwrap();
            device.reset(state).unwrap();
            device.commit(&[Commit::all(Span::new(fork, 0, 0))]).unwrap();
            device.state_need(&mut once(Span::new(state, 0, 3))).unwrap();
            device.drop_state(state);
            device.drop_state(fork);
        }
        assert!(device.state(kv(usize::MAX, 4, 4)).is_err());
        assert!(device.state(kv(1, 4, usize::MAX)).is_err());
    });
}

/// States larger than one copy of a device. Entries of an f16 KV cache end in the middle of a
/// 32-bit word.
#[test]
fn large_states_are_saved_and_loaded() {
    for_each_device(|device| {
        let (key_width, value_width, positions) = (4097, 4096, 1200);
        let kv = StateShape::KeyValue { kv_heads: 1, key_width, value_width, positions };
        for (shape, entries) in
            [(kv, 1..1100), (StateShape::Recurrent { len: 5 << 20 }, 1..(5 << 20) - 1)]
        {
            let state = device.state(shape).unwrap();
            let len = entries.len() * device.entry_bytes(shape);
            let all: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            device.load_state(state, entries.clone(), &all).unwrap();
            let mut out = vec![0; len];
            device.save_state(state, entries, &mut out).unwrap();
            assert!(out == all, "{}: {shape:?}", device.describe());
            device.drop_state(state);
        }
    });
}
