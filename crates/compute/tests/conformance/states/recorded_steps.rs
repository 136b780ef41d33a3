//! Steps that are recorded ahead, of one row and of several.

use std::ops::Range;

use moeflux_compute::{
    Buffer, Commit, Device, Error, Format, MatrixShape, Op, RecordedStep, Scalar, Span, State,
    StateShape, View, Weight,
};

use super::for_each_device;
use crate::harness::{Random, bits, bytes, read};

/// First position of the tested steps: the KV cache grows after a few of them.
const START: usize = 1018;

fn token(position: usize) -> u32 {
    (position * 7 % 50) as u32
}

fn other_token(position: usize) -> u32 {
    (position * 11 % 50) as u32
}

fn tokens(position: usize, rows: usize, token: impl Fn(usize) -> u32) -> Vec<u32> {
    (position..position + rows).map(token).collect()
}

/// Steps of one sequence: embedding, a convolution, attention.
struct Steps {
    rows: usize,
    /// Number of the last rows that are drafted.
    drafts: usize,
    /// Whether there is a convolution, which has a recurrent state.
    convolves: bool,
    table: Weight,
    taps: Buffer,
    x: View,
    out: View,
    convolved: View,
}

impl Steps {
    fn new(device: &mut dyn Device, rows: usize, convolves: bool) -> Self {
        let mut random = Random::new(35);
        let shape = MatrixShape { rows: 50, cols: 48, format: Format::Plain(Scalar::F32) };
        let table = device.weight(shape, bytes(&random.matrix(shape))).unwrap();
        let taps = device.buffer(4 * 48).unwrap();
        device.write(taps, &random.values(4 * 48)).unwrap();
        let mut view = |width| View::rows(device.buffer(rows * width).unwrap(), rows, width);
        let (x, out, convolved) = (view(48), view(16), view(48));
        Self { rows, drafts: 0, convolves, table, taps, x, out, convolved }
    }

    /// The KV cache, and the state of the convolution.
    fn states(&self, device: &mut dyn Device) -> [State; 2] {
        let (key_width, value_width) = (16, 16);
        let kv = StateShape::KeyValue { kv_heads: 1, key_width, value_width, positions: 4096 };
        [kv, StateShape::Recurrent { len: 3 * 48 }].map(|shape| device.state(shape).unwrap())
    }

    fn spans(&self, states: [State; 2], position: usize) -> [Span; 2] {
        states.map(|state| Span { drafts: self.drafts, ..Span::new(state, position, self.rows) })
    }

    fn run(
        &self,
        device: &mut dyn Device,
        states: [State; 2],
        position: usize,
        tokens: &[u32],
    ) -> Result<(), Error> {
        let [kv_span, conv_span] = self.spans(states, position);
        let Self { table, taps, x, out, convolved, .. } = *self;
        device.run(&Op::Embed { table, tokens, out: x })?;
        let qkv = if self.convolves { convolved } else { x };
        if self.convolves {
            let spans = &[conv_span];
            device.run(&Op::Conv1d {
                x,
                weight: taps,
                bias: None,
                width: 4,
                dilation: 1,
                silu: true,
                spans,
                out: convolved,
            })?;
        }
        device.run(&Op::Attention {
            q: qkv.columns(0, 16),
            k: qkv.columns(16, 16),
            v: Some(qkv.columns(32, 16)),
            gate: None,
            scale: 0.3,
            window: None,
            sinks: None,
            positions: None,
            spans: &[kv_span],
            out,
        })
    }

    /// The commit of the step at `position`, for the states that it uses.
    fn outcome(&self, states: [State; 2], position: usize, accepted: usize) -> Vec<Commit> {
        let spans = self.spans(states, position);
        let used = if self.convolves { &spans[..] } else { &spans[..1] };
        used.iter().map(|span| Commit { span: *span, accepted }).collect()
    }

    /// Records the step that follows as many accepted rows of the step at `position`.
    fn record(
        &self,
        device: &mut dyn Device,
        states: [State; 2],
        position: usize,
        accepted: usize,
    ) -> Option<RecordedStep> {
        let places: Vec<u32> = (0..self.rows as u32).collect();
        let outcome = self.outcome(states, position, accepted);
        let recorded = device.record_ahead(&outcome, self.rows, &mut |device| {
            self.run(device, states, position + accepted, &places).is_ok()
        });
        recorded.unwrap()
    }

    fn commit(&self, device: &mut dyn Device, states: [State; 2], position: usize) {
        device.commit(&self.spans(states, position).map(Commit::all)).unwrap();
    }

    /// Outputs of the steps from `positions.start` on, none of them recorded.
    fn outputs(
        &self,
        device: &mut dyn Device,
        positions: Range<usize>,
        token: impl Fn(usize) -> u32,
    ) -> Vec<Vec<u32>> {
        let states = self.states(device);
        let step = |position| {
            self.run(device, states, position, &tokens(position, self.rows, &token)).unwrap();
            self.commit(device, states, position);
            bits(&read(device, self.out))
        };
        let outputs = positions.step_by(self.rows).map(step).collect();
        let _ = states.map(|state| device.drop_state(state));
        outputs
    }
}

/// Changes of states between steps.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Between {
    Nothing,
    /// A fork is written.
    Fork,
    SaveAndLoad,
    Truncation,
}

fn check_recorded_steps(device: &mut dyn Device, rows: usize, between: Between) {
    let name = device.describe();
    let steps = Steps::new(device, rows, true);
    let count = if rows == 1 { 16 } else { 6 };
    let end = START + count * rows;
    let fork_at = START + 3 * rows;
    let expected = steps.outputs(device, START..end, token);
    let forked = steps.outputs(device, START..end, |position| {
        if position < fork_at { token(position) } else { other_token(position) }
    });
    let states = steps.states(device);
    let (mut submitted, mut recorded) = (0, None);
    for (i, expected) in expected.iter().enumerate() {
        let position = START + i * rows;
        let what = format!("{name}: {rows} rows, {between:?}, {position}");
        let given = tokens(position, rows, token);
        if recorded.is_some_and(|step| device.submit_recorded(step, &given).unwrap()) {
            submitted += 1;
        } else {
            steps.run(device, states, position, &given).unwrap();
        }
        recorded = steps.record(device, states, position, rows);
        assert!(bits(&read(device, steps.out)) == *expected, "{what}");
        steps.commit(device, states, position);
        let next = position + rows;
        match between {
            Between::Fork if next == fork_at => {
                let fork = states.map(|state| device.fork_state(state, next).unwrap());
                for (i, expected) in forked.iter().enumerate().skip(i + 1).take(5) {
                    let position = START + i * rows;
                    let given = tokens(position, rows, other_token);
                    steps.run(device, fork, position, &given).unwrap();
                    steps.commit(device, fork, position);
                    assert!(bits(&read(device, steps.out)) == *expected, "{what}");
                }
                let _ = fork.map(|state| device.drop_state(state));
            }
            Between::SaveAndLoad if i % 3 == 2 => {
                let kv_bytes = 2 * device.kv_format().bytes(16);
                let ranges = [(0..next, kv_bytes), (0..3 * 48, 4)];
                for (state, (entries, entry_bytes)) in states.into_iter().zip(ranges) {
                    let mut bytes = vec![0; entries.len() * entry_bytes];
                    device.save_state(state, entries.clone(), &mut bytes).unwrap();
                    device.load_state(state, entries, &bytes).unwrap();
                }
            }
            Between::Truncation => device.truncate_state(states[0], next).unwrap(),
            _ => {}
        }
    }
    // Only a step that needs a new page cannot be recorded ahead.
    let is_recorded = name.starts_with("gpu") && between == Between::Nothing;
    let least = if is_recorded { count - 3 } else { 0 };
    assert!(submitted >= least, "{name}: {submitted} steps");
    let _ = states.map(|state| device.drop_state(state));
}

#[test]
fn steps_recorded_ahead_see_later_state_changes() {
    for_each_device(|device| {
        for rows in [1, 3] {
            for between in
                [Between::Nothing, Between::Fork, Between::SaveAndLoad, Between::Truncation]
            {
                check_recorded_steps(device, rows, between);
            }
        }
    });
}

#[test]
fn a_recorded_step_of_another_size_is_discarded() {
    for_each_device(|device| {
        for rows in [1, 2] {
            let steps = Steps::new(device, rows, true);
            let expected = steps.outputs(device, 0..2 * rows, token);
            let states = steps.states(device);
            steps.run(device, states, 0, &tokens(0, rows, token)).unwrap();
            let recorded = steps.record(device, states, 0, rows);
            steps.commit(device, states, 0);
            for wrong in [rows - 1, rows + 1] {
                let given = tokens(rows, wrong, token);
                assert!(recorded.is_none_or(|step| !device.submit_recorded(step, &given).unwrap()));
            }
            let given = tokens(rows, rows, token);
            assert!(recorded.is_none_or(|step| !device.submit_recorded(step, &given).unwrap()));
            steps.run(device, states, rows, &given).unwrap();
            assert!(bits(&read(device, steps.out)) == expected[1], "{}", device.describe());
            // Ops that look up other tokens than the step is said to have.
            let outcome = steps.outcome(states, rows, rows);
            let recorded = device.record_ahead(&outcome, 1, &mut |device| {
                steps.run(device, states, 2 * rows, &vec![1; rows]).is_ok()
            });
            assert_eq!(recorded.unwrap(), None);
            steps.commit(device, states, rows);
            let _ = states.map(|state| device.drop_state(state));
        }
    });
}

/// Drafts of which a step accepts 0 to all: the next step is recorded for each outcome, or for all
/// but the one that comes, and is then not submitted.
#[test]
fn steps_are_recorded_for_each_outcome_of_drafts() {
    const ROWS: usize = 4;
    for_each_device(|device| {
        let name = device.describe();
        for convolves in [false, true] {
            let mut steps = Steps::new(device, ROWS, convolves);
            let expected = steps.outputs(device, 0..2 * ROWS, token);
            steps.drafts = ROWS - 1;
            for accepted in 1..=ROWS {
                for is_recorded in [true, false] {
                    let what = format!("{name}: {accepted} rows, {convolves}, {is_recorded}");
                    let states = steps.states(device);
                    steps.run(device, states, 0, &tokens(0, ROWS, token)).unwrap();
                    let outcomes = (1..=ROWS).filter(|rows| is_recorded || *rows != accepted);
                    let recorded: Vec<_> = outcomes
                        .map(|rows| (rows, steps.record(device, states, 0, rows)))
                        .collect();
                    assert!(bits(&read(device, steps.out)) == expected[0], "{what}");
                    device.commit(&steps.outcome(states, 0, accepted)).unwrap();
                    let given = tokens(accepted, ROWS, token);
                    // Without a recurrent state the caller knows the positions.
                    let chosen = recorded.iter().find(|(rows, _)| match convolves {
                        true => is_recorded == (*rows == accepted),
                        false => *rows == accepted,
                    });
                    let step = chosen.and_then(|(_, step)| *step);
                    let was =
                        step.is_some_and(|step| device.submit_recorded(step, &given).unwrap());
                    assert_eq!(was, is_recorded && name.starts_with("gpu"), "{what}");
                    if !was {
                        steps.run(device, states, accepted, &given).unwrap();
                    }
                    let out = bits(&read(device, steps.out));
                    let values =
                        |all: &[Vec<u32>]| all.concat()[accepted * 16..][..ROWS * 16].to_vec();
                    assert!(out == values(&expected), "{what}");
                    // The states are the same, too.
                    device.commit(&steps.outcome(states, accepted, 1)).unwrap();
                    let position = accepted + 1;
                    if position + ROWS <= 2 * ROWS {
                        let given = tokens(position, ROWS, token);
                        steps.run(device, states, position, &given).unwrap();
                        let out = bits(&read(device, steps.out));
                        assert!(out == expected.concat()[position * 16..][..ROWS * 16], "{what}");
                    }
                    let _ = states.map(|state| device.drop_state(state));
                }
            }
        }
    });
}

#[test]
fn a_recorded_step_reads_the_values_that_buffers_have_at_its_submission() {
    for_each_device(|device| {
        let steps = Steps::new(device, 1, true);
        let mut random = Random::new(36);
        let taps = [0, 1].map(|_| random.values(4 * 48));
        // The outputs of the second step, and whether it was submitted as recorded.
        let run = |device: &mut dyn Device, is_recorded: bool| {
            device.write(steps.taps, &taps[0]).unwrap();
            let states = steps.states(device);
            steps.run(device, states, START, &tokens(START, 1, token)).unwrap();
            let recorded = is_recorded.then(|| steps.record(device, states, START, 1)).flatten();
            read(device, steps.out);
            steps.commit(device, states, START);
            device.write_view(View::rows(steps.taps, 1, 4 * 48), &taps[1]).unwrap();
            let given = tokens(START + 1, 1, token);
            let is_submitted =
                recorded.is_some_and(|step| device.submit_recorded(step, &given).unwrap());
            if !is_submitted {
                steps.run(device, states, START + 1, &given).unwrap();
            }
            let out = bits(&read(device, steps.out));
            let _ = states.map(|state| device.drop_state(state));
            (out, is_submitted)
        };
        let (expected, _) = run(device, false);
        let (out, is_submitted) = run(device, true);
        let name = device.describe();
        assert!(out == expected, "{name}");
        assert!(is_submitted || !name.starts_with("gpu"), "{name}: the step was not recorded");
    });
}
