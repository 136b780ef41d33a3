//! States of sessions: forked, cut, saved and loaded, on every device.

mod room;

use std::{iter::once, ops::Range};

use moeflux_compute::{
    Buffer, Device, DeviceOptions, Error, Format, Isa, KvFormat, MatrixShape, Op, Scalar, Span,
    State, StateShape, View, open,
};

use crate::harness::{Random, bits, bytes, close, device, device_that_keeps, gpu_that_keeps, read};

/// Rows that a mixer has of each of two continuations.
const ROWS: usize = 700;

/// Every device, exact and fast, and with every format of keys.
fn each(mut test: impl FnMut(&mut dyn Device)) {
    test(&mut *reference());
    let without_cpu = std::env::var("MOEFLUX_TEST_CPU").is_ok_and(|asked| asked == "none");
    for isa in Isa::available().into_iter().filter(|_| !without_cpu) {
        test(&mut *device(isa, true, 2));
        let fast = if isa == Isa::detect() { &KvFormat::ALL[..] } else { &[KvFormat::F16] };
        for keys in fast {
            test(&mut *device_that_keeps(Some(*keys), isa, false, 2));
        }
    }
    for (keys, exact) in [(KvFormat::F32, true), (KvFormat::F32, false), (KvFormat::F16, false)] {
        if let Some(mut gpu) = gpu_that_keeps(Some(keys), exact) {
            test(&mut *gpu);
        }
    }
}

fn reference() -> Box<dyn Device> {
    open(&DeviceOptions { name: Some("reference".into()), ..DeviceOptions::default() }).unwrap()
}

/// What remembers.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Heads, heads of keys, key width, value width, window.
    Attention(usize, usize, usize, usize, Option<usize>),
    /// Heads, key width, value width.
    Latent(usize, usize, usize),
    /// Channels, width.
    Conv(usize, usize),
    /// Key heads, heads, key width, value width.
    Delta(usize, usize, usize, usize),
}

const KINDS: [Kind; 7] = [
    Kind::Attention(4, 2, 32, 32, None),
    // Places that end in the middle of a word.
    Kind::Attention(3, 1, 7, 6, None),
    Kind::Attention(2, 2, 24, 16, Some(100)),
    Kind::Latent(4, 40, 24),
    Kind::Latent(2, 9, 5),
    Kind::Conv(37, 4),
    Kind::Delta(2, 4, 16, 24),
];

impl Kind {
    fn shape(self) -> StateShape {
        let of = |kv_heads, key_width, value_width, positions| StateShape::KeyValue {
            kv_heads,
            key_width,
            value_width,
            positions,
        };
        match self {
            Kind::Attention(_, kv_heads, key, value, None) => of(kv_heads, key, value, ROWS),
            Kind::Attention(_, kv_heads, key, value, Some(_)) => of(kv_heads, key, value, 512),
            Kind::Latent(_, key, _) => of(1, key, 0, ROWS),
            Kind::Conv(channels, width) => StateShape::Recurrent { len: (width - 1) * channels },
            Kind::Delta(_, heads, key, value) => StateShape::Recurrent { len: heads * key * value },
        }
    }

    fn is_recurrent(self) -> bool {
        matches!(self.shape(), StateShape::Recurrent { .. })
    }

    fn wraps(self) -> bool {
        matches!(self, Kind::Attention(.., Some(_)))
    }

    /// Numbers of a row of what goes in and what comes out.
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
        }
    }
}

/// An op with a state, and what two continuations of a session put into it.
struct Mixer {
    kind: Kind,
    inputs: [View; 2],
    out: View,
    weight: Buffer,
}

impl Mixer {
    /// Of numbers that f16 holds.
    fn new(device: &mut dyn Device, kind: Kind) -> Self {
        let mut random = Random::new(31);
        let mut view = |width: usize| {
            let numbers: Vec<f32> = random
                .numbers(ROWS * width)
                .iter()
                .map(|x| half::f16::from_f32(*x).to_f32())
                .collect();
            let buffer = device.buffer(numbers.len()).unwrap();
            device.write(buffer, &numbers).unwrap();
            View::rows(buffer, ROWS, width)
        };
        let [of_input, of_out] = kind.widths();
        let (inputs, out) = ([view(of_input), view(of_input)], view(of_out));
        Self { kind, inputs, out, weight: view(1).buffer }
    }

    /// Rows of a continuation, committed; the bits that come out.
    fn run(
        &self,
        device: &mut dyn Device,
        which: usize,
        state: State,
        rows: Range<usize>,
    ) -> Vec<u32> {
        bits(&self.try_run(device, which, state, rows).unwrap())
    }

    fn try_run(
        &self,
        device: &mut dyn Device,
        which: usize,
        state: State,
        rows: Range<usize>,
    ) -> Result<Vec<f32>, Error> {
        let spans = &[Span { state, position: rows.start, rows: rows.len() }];
        let x = self.inputs[which].slice(rows.start, rows.len());
        let out = self.out.slice(rows.start, rows.len());
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
            Kind::Conv(_, width) => {
                device.run(&Op::Conv1d { x, weight: self.weight, width, spans, out })?
            }
            Kind::Delta(key_heads, heads, key, value) => {
                let keys = key_heads * key;
                device.run(&Op::DeltaNet {
                    q: x.columns(0, keys).split(key_heads),
                    k: x.columns(keys, keys).split(key_heads),
                    v: x.columns(2 * keys, heads * value).split(heads),
                    a: x.columns(2 * keys + heads * value, heads),
                    b: x.columns(2 * keys + heads * (value + 1), heads),
                    a_log: self.weight,
                    dt_bias: self.weight,
                    spans,
                    out: out.split(heads),
                })?;
            }
        }
        device.commit(&[state])?;
        Ok(read(device, out))
    }

    fn state(&self, device: &mut dyn Device) -> State {
        device.state(self.kind.shape()).unwrap()
    }

    /// A state with the rows of the first continuation before `end`.
    fn prefilled(&self, device: &mut dyn Device, end: usize) -> State {
        let state = self.state(device);
        self.advance(device, 0, state, 0..end);
        state
    }

    /// Runs rows in chunks of one, twenty and any number of rows.
    fn advance(
        &self,
        device: &mut dyn Device,
        which: usize,
        state: State,
        rows: Range<usize>,
    ) -> Vec<u32> {
        let (mut at, mut all) = (rows.start, Vec::new());
        for chunk in [200, 1, 1, 20].into_iter().cycle() {
            let end = rows.end.min(at + chunk);
            if at == end {
                return all;
            }
            all.extend(self.run(device, which, state, at..end));
            at = end;
        }
        all
    }

    /// What comes out of a session that was never forked: the first continuation up to `turn`, then another.
    fn alone(
        &self,
        device: &mut dyn Device,
        which: usize,
        turn: usize,
        rows: Range<usize>,
    ) -> Vec<u32> {
        let state = self.prefilled(device, turn);
        self.advance(device, which, state, turn..rows.start);
        let found = self.advance(device, which, state, rows);
        device.drop_state(state);
        found
    }

    /// The places that hold something after so many rows.
    fn places(&self, rows: usize) -> Range<usize> {
        match self.kind.shape() {
            StateShape::Recurrent { len } => 0..len,
            StateShape::KeyValue { positions, .. } => 0..rows.min(positions),
        }
    }

    fn save(&self, device: &mut dyn Device, state: State, places: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0xa5; places.len() * device.entry_bytes(self.kind.shape())];
        device.save_state(state, places, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn forks_are_as_sessions_that_were_never_forked() {
    each(|device| {
        let name = device.describe();
        for kind in KINDS {
            let mixer = Mixer::new(device, kind);
            // In the middle of a page, at the end of one, and where a ring has wrapped around.
            for at in if kind.wraps() { [301, 620] } else { [256, 301] } {
                let (first, second) = (at..at + 21, at + 21..at + 43);
                let of =
                    |device: &mut dyn Device, which, rows| mixer.alone(device, which, at, rows);
                let one = [first.clone(), second.clone()].map(|rows| of(device, 0, rows));
                let other = [first.clone(), second.clone()].map(|rows| of(device, 1, rows));
                let held = device.states_held();
                for gone in 0..3 {
                    let parent = mixer.prefilled(device, at);
                    let child = device.fork_state(parent, at).unwrap();
                    let grandchild = device.fork_state(child, at).unwrap();
                    let what = format!("{name}: {kind:?} forked at {at}, {gone} gone");
                    if gone == 1 {
                        device.drop_state(parent);
                    }
                    assert!(mixer.advance(device, 1, child, first.clone()) == other[0], "{what}");
                    if gone != 1 {
                        assert!(
                            mixer.advance(device, 0, parent, first.clone()) == one[0],
                            "{what}"
                        );
                    }
                    if gone == 2 {
                        device.drop_state(child);
                    }
                    assert!(
                        mixer.advance(device, 0, grandchild, first.clone()) == one[0],
                        "{what}"
                    );
                    // Forks of what has been written since.
                    let last = device.fork_state(grandchild, first.end).unwrap();
                    assert!(mixer.advance(device, 0, last, second.clone()) == one[1], "{what}");
                    device.drop_state(last);
                    if gone != 2 {
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
fn a_fork_has_what_is_committed() {
    each(|device| {
        for kind in KINDS.into_iter().filter(|kind| kind.is_recurrent()) {
            let mixer = Mixer::new(device, kind);
            let expected = mixer.alone(device, 1, 5, 5..9);
            let state = mixer.prefilled(device, 5);
            let spans = &[Span { state, position: 5, rows: 3 }];
            if let Kind::Conv(_, width) = kind {
                let (x, out) = (mixer.inputs[0].slice(5, 3), mixer.out.slice(5, 3));
                device.run(&Op::Conv1d { x, weight: mixer.weight, width, spans, out }).unwrap();
            }
            let [one, other] = [0; 2].map(|_| device.fork_state(state, 5).unwrap());
            assert!(mixer.advance(device, 1, one, 5..9) == expected);
            device.commit(&[state]).unwrap();
            device.reset(state).unwrap();
            device.drop_state(one);
            assert!(mixer.advance(device, 1, other, 5..9) == expected);
            // And a state that was reset is as a fresh one.
            assert!(mixer.advance(device, 1, state, 0..4) == mixer.alone(device, 1, 0, 0..4));
        }
    });
}

#[test]
fn a_commit_is_of_all_states_or_of_none() {
    each(|device| {
        let mixer = Mixer::new(device, Kind::Conv(37, 4));
        let (state, gone) = (mixer.prefilled(device, 5), mixer.state(device));
        device.drop_state(gone);
        let before = mixer.save(device, state, mixer.places(5));
        let spans = &[Span { state, position: 5, rows: 3 }];
        let (x, out) = (mixer.inputs[0].slice(5, 3), mixer.out.slice(5, 3));
        device.run(&Op::Conv1d { x, weight: mixer.weight, width: 4, spans, out }).unwrap();
        assert!(device.commit(&[state, gone]).is_err());
        assert!(mixer.save(device, state, mixer.places(5)) == before, "{}", device.describe());
        device.commit(&[state]).unwrap();
        assert!(mixer.save(device, state, mixer.places(8)) != before);
        assert!(mixer.advance(device, 0, state, 8..12) == mixer.alone(device, 0, 8, 8..12));
    });
}

#[test]
fn what_is_cut_or_left_out_of_a_fork_can_be_written_again() {
    each(|device| {
        for kind in KINDS.into_iter().filter(|kind| !kind.is_recurrent() && !kind.wraps()) {
            let mixer = Mixer::new(device, kind);
            for cut in [0, 1, 130, 256] {
                let expected = mixer.alone(device, 1, cut, cut..cut + 50);
                let state = mixer.prefilled(device, 290);
                let fork = device.fork_state(state, cut).unwrap();
                device.truncate_state(state, cut).unwrap();
                for state in [state, fork] {
                    assert!(
                        mixer.advance(device, 1, state, cut..cut + 50) == expected,
                        "{kind:?} {cut}"
                    );
                }
                device.reset(state).unwrap();
                assert!(
                    mixer.advance(device, 1, fork, cut..cut + 50) == expected,
                    "{kind:?} {cut}"
                );
                let fresh = mixer.alone(device, 1, 0, 0..9);
                assert!(mixer.advance(device, 1, state, 0..9) == fresh, "{kind:?} {cut}");
            }
        }
    });
}

#[test]
fn a_state_that_is_loaded_is_the_one_that_was_saved() {
    each(|device| {
        let name = device.describe();
        for kind in KINDS {
            let mixer = Mixer::new(device, kind);
            for at in if kind.wraps() { [256, 600] } else { [5, 301] } {
                let what = format!("{name}: {kind:?} at {at}");
                let expected = mixer.alone(device, 1, at, at..at + 22);
                let state = mixer.prefilled(device, at);
                let places = mixer.places(at);
                let all = mixer.save(device, state, places.clone());
                // In parts that begin and end anywhere, the later one first.
                let turn = (places.end / 2) | 1;
                let of_place = device.entry_bytes(kind.shape());
                let parts = [0..turn, turn..places.end];
                let loaded = mixer.state(device);
                for part in parts.into_iter().rev() {
                    let bytes = mixer.save(device, state, part.clone());
                    assert!(bytes == all[part.start * of_place..part.end * of_place], "{what}");
                    device.load_state(loaded, part, &bytes).unwrap();
                }
                assert!(mixer.save(device, loaded, places.clone()) == all, "{what}");
                // Into what others share.
                let shared = mixer.state(device);
                mixer.advance(device, 1, shared, 0..at);
                let before = mixer.save(device, shared, places.clone());
                let fork = device.fork_state(shared, at).unwrap();
                device.load_state(fork, places.clone(), &all).unwrap();
                assert!(mixer.save(device, shared, places.clone()) == before, "{what}");
                for state in [loaded, fork, state] {
                    assert!(mixer.advance(device, 1, state, at..at + 22) == expected, "{what}");
                }
                let _ = [loaded, fork, state, shared].map(|state| device.drop_state(state));
            }
        }
    });
}

#[test]
fn saved_bytes_are_the_same_on_all_devices_of_a_format() {
    // By format, then by kind.
    let mut known: [Vec<Vec<u8>>; 3] = Default::default();
    each(|device| {
        let format = device.kv_format();
        let known = &mut known[KvFormat::ALL.iter().position(|known| *known == format).unwrap()];
        let kinds = KINDS.into_iter().filter(|kind| !kind.is_recurrent());
        let saved: Vec<Vec<u8>> = kinds
            .map(|kind| {
                let mixer = Mixer::new(device, kind);
                let state = mixer.prefilled(device, 530);
                mixer.save(device, state, mixer.places(530))
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
fn a_device_goes_on_with_what_another_has_saved() {
    let mut expected = Vec::new();
    let mut saved = Vec::new();
    let mut reference = reference();
    for kind in KINDS {
        let mixer = Mixer::new(&mut *reference, kind);
        let state = mixer.prefilled(&mut *reference, 70);
        saved.push(mixer.save(&mut *reference, state, mixer.places(70)));
        expected.push(mixer.try_run(&mut *reference, 1, state, 70..79).unwrap());
    }
    each(|device| {
        for ((kind, saved), expected) in KINDS.into_iter().zip(&saved).zip(&expected) {
            if device.kv_format() == KvFormat::F32 || kind.is_recurrent() {
                let mixer = Mixer::new(device, kind);
                let state = mixer.state(device);
                device.load_state(state, mixer.places(70), saved).unwrap();
                let got = mixer.try_run(device, 1, state, 70..79).unwrap();
                close(&format!("{}: {kind:?}", device.describe()), &got, expected, 1e-5);
            }
        }
    });
}

#[test]
#[expect(clippy::reversed_empty_ranges, reason = "what is to be refused")]
fn what_does_not_fit_is_refused() {
    each(|device| {
        for kind in KINDS {
            let mixer = Mixer::new(device, kind);
            let state = mixer.prefilled(device, 20);
            let (all, bytes) = (kind.shape().entries(), device.entry_bytes(kind.shape()));
            let refused = |device: &mut dyn Device, state, places: Range<usize>, len: usize| {
                let mut memory = vec![0; len];
                let what = format!("{}: {kind:?} {places:?} {len}", device.describe());
                assert!(device.save_state(state, places.clone(), &mut memory).is_err(), "{what}");
                assert!(device.load_state(state, places, &memory).is_err(), "{what}");
            };
            for (places, len) in [
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
                refused(device, state, places, len);
            }
            for (position, rows) in
                [(usize::MAX, 1), (0, usize::MAX), (usize::MAX, usize::MAX), (usize::MAX, 0)]
            {
                device.state_need(&mut once(Span { state, position, rows })).unwrap();
            }
            device.truncate_state(state, usize::MAX).unwrap();
            let fork = device.fork_state(state, usize::MAX).unwrap();
            device.save_state(fork, all..all, &mut []).unwrap();
            device.load_state(fork, 3..3, &[]).unwrap();
            let expected = mixer.alone(device, 0, 20, 20..23);
            assert!(mixer.advance(device, 0, fork, 20..23) == expected);
            let _ = [fork, fork].map(|state| device.drop_state(state));
            refused(device, fork, 0..1, bytes);
            let gone = Span { state: fork, position: 0, rows: 1 };
            assert!(device.state_need(&mut once(gone)).is_err());
            assert!(device.fork_state(fork, 0).is_err());
            assert!(device.truncate_state(fork, 0).is_err());
            assert!(device.reset(fork).is_err());
            assert!(device.commit(&[fork]).is_err());
            assert!(mixer.try_run(device, 0, fork, 0..1).is_err());
        }
    });
}

#[test]
fn states_of_nothing() {
    each(|device| {
        let of = |kv_heads, key_width, positions| StateShape::KeyValue {
            kv_heads,
            key_width,
            value_width: 0,
            positions,
        };
        for shape in [of(1, 4, 0), of(0, 4, 10), of(1, 0, 10), StateShape::Recurrent { len: 0 }] {
            let state = device.state(shape).unwrap();
            let fork = device.fork_state(state, 5).unwrap();
            device.load_state(fork, 0..0, &[]).unwrap();
            device.save_state(state, 0..0, &mut []).unwrap();
            let mut bytes = vec![0; shape.entries() * device.entry_bytes(shape)];
            device.load_state(fork, 0..shape.entries(), &bytes).unwrap();
            device.save_state(fork, 0..shape.entries(), &mut bytes).unwrap();
            device.truncate_state(fork, 0).unwrap();
            device.reset(state).unwrap();
            device.commit(&[fork]).unwrap();
            device.state_need(&mut once(Span { state, position: 0, rows: 3 })).unwrap();
            device.drop_state(state);
            device.drop_state(fork);
        }
        assert!(device.state(of(usize::MAX, 4, 4)).is_err());
        assert!(device.state(of(1, 4, usize::MAX)).is_err());
    });
}

/// Steps of one token with attention and a convolution.
struct Steps {
    table: moeflux_compute::Weight,
    taps: Buffer,
    x: View,
    out: View,
    convolved: View,
}

impl Steps {
    fn new(device: &mut dyn Device) -> Self {
        let mut random = Random::new(35);
        let shape = MatrixShape { rows: 50, cols: 48, format: Format::Plain(Scalar::F32) };
        let table = device.weight(shape, bytes(&random.matrix(shape))).unwrap();
        let taps = device.buffer(4 * 48).unwrap();
        device.write(taps, &random.numbers(4 * 48)).unwrap();
        let mut view = |width| View::rows(device.buffer(width).unwrap(), 1, width);
        Self { table, taps, x: view(48), out: view(16), convolved: view(48) }
    }

    fn states(&self, device: &mut dyn Device) -> [State; 2] {
        let (key_width, value_width) = (16, 16);
        let keys = StateShape::KeyValue { kv_heads: 1, key_width, value_width, positions: 4096 };
        [keys, StateShape::Recurrent { len: 3 * 48 }].map(|shape| device.state(shape).unwrap())
    }

    fn run(
        &self,
        device: &mut dyn Device,
        states: [State; 2],
        position: usize,
        token: u32,
    ) -> Result<(), Error> {
        let [attended, convolved] = states.map(|state| [Span { state, position, rows: 1 }]);
        let Self { table, taps, x, out, convolved: to } = *self;
        device.run(&Op::Embed { table, tokens: &[token], out: x })?;
        device.run(&Op::Conv1d { x, weight: taps, width: 4, spans: &convolved, out: to })?;
        device.run(&Op::Attention {
            q: to.columns(0, 16),
            k: to.columns(16, 16),
            v: Some(to.columns(32, 16)),
            gate: None,
            scale: 0.3,
            window: None,
            sinks: None,
            positions: None,
            spans: &attended,
            out,
        })
    }
}

#[test]
fn steps_that_are_recorded_ahead_see_what_happened_since() {
    each(|device| {
        let name = device.describe();
        let steps = Steps::new(device);
        let token = |position: usize| (position * 7 % 50) as u32;
        let other = |position: usize| (position * 11 % 50) as u32;
        let of = |device: &mut dyn Device, token: &dyn Fn(usize) -> u32| -> Vec<Vec<u32>> {
            let states = steps.states(device);
            let mut at = |position| {
                steps.run(device, states, position, token(position)).unwrap();
                device.commit(&states).unwrap();
                bits(&read(device, steps.out))
            };
            (1018..1034).map(&mut at).collect()
        };
        let expected = of(device, &token);
        let forked =
            of(device, &|position| if position < 1021 { token(position) } else { other(position) });
        // Nothing in between; forks, one of them written; saved and loaded; cut.
        for between in 0..4 {
            let states = steps.states(device);
            let mut begun = 0;
            for position in 1018..1034 {
                let what = format!("{name}: {between}, {position}");
                if position > 1018 && device.submit_recorded(&[token(position)]).unwrap() {
                    begun += 1;
                } else {
                    steps.run(device, states, position, token(position)).unwrap();
                }
                let recorded = device.record_ahead(&states, &mut |device| {
                    steps.run(device, states, position + 1, 0).is_ok()
                });
                recorded.unwrap();
                assert!(bits(&read(device, steps.out)) == expected[position - 1018], "{what}");
                device.commit(&states).unwrap();
                match between {
                    1 if position == 1020 => {
                        let fork = states.map(|state| device.fork_state(state, 1021).unwrap());
                        for position in 1021..1026 {
                            steps.run(device, fork, position, other(position)).unwrap();
                            device.commit(&fork).unwrap();
                            assert!(
                                bits(&read(device, steps.out)) == forked[position - 1018],
                                "{what}"
                            );
                        }
                        let _ = fork.map(|state| device.drop_state(state));
                    }
                    2 if position % 3 == 0 => {
                        let of_key_value = 2 * device.kv_format().bytes(16);
                        let parts = [(0..position + 1, of_key_value), (0..3 * 48, 4)];
                        for (state, (places, of_place)) in states.into_iter().zip(parts) {
                            let mut bytes = vec![0; places.len() * of_place];
                            device.save_state(state, places.clone(), &mut bytes).unwrap();
                            device.load_state(state, places, &bytes).unwrap();
                        }
                    }
                    3 => device.truncate_state(states[0], position + 1).unwrap(),
                    _ => {}
                }
            }
            // Only a step that finds no room has to wait.
            let least = if name.starts_with("gpu") && between == 0 { 13 } else { 0 };
            assert!(begun >= least, "{name}: {begun} steps");
            let _ = states.map(|state| device.drop_state(state));
        }
    });
}

/// More than a device copies at a time, of places that end in the middle of a word where numbers are halves.
#[test]
fn large_states_are_saved_and_loaded_whole() {
    each(|device| {
        let (key_width, value_width, positions) = (4097, 4096, 1200);
        let keys = StateShape::KeyValue { kv_heads: 1, key_width, value_width, positions };
        for (shape, places) in
            [(keys, 1..1100), (StateShape::Recurrent { len: 5 << 20 }, 1..(5 << 20) - 1)]
        {
            let state = device.state(shape).unwrap();
            let len = places.len() * device.entry_bytes(shape);
            let all: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            device.load_state(state, places.clone(), &all).unwrap();
            let mut out = vec![0; len];
            device.save_state(state, places, &mut out).unwrap();
            assert!(out == all, "{}: {shape:?}", device.describe());
            device.drop_state(state);
        }
    });
}
