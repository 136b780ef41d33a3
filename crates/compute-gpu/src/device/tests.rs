//! Tests of a device that is lost at any point of a decode step.

#![allow(clippy::unwrap_used)]

mod hand_over;

use moeflux_ops::{
    BankPlace, Buffer, Bytes, Commit, Device, DeviceOptions, Error, Format, MatrixShape, Op,
    RecordAhead, Scalar, SlotStore, Span, State, StateShape, StateStore, View, ViewRead, Weight,
};

use super::{super::store::store::tests::gpu_with, GpuDevice};

/// Point at which the device is lost.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Point {
    BeforeOps,
    Encoded,
    Submitted,
    /// The next step is recorded, the current one is not read back.
    Recorded,
    ReadBack,
    Committed,
    RecordedSubmitted,
}

const POINTS: [Point; 7] = [
    Point::BeforeOps,
    Point::Encoded,
    Point::Submitted,
    Point::Recorded,
    Point::ReadBack,
    Point::Committed,
    Point::RecordedSubmitted,
];

/// Embedding, convolution and attention of one token.
struct Step {
    table: Weight,
    taps: Buffer,
    x: View,
    convolved: View,
    out: View,
    states: [State; 2],
}

impl Step {
    fn new(gpu: &mut GpuDevice) -> Result<Self, Error> {
        let shape = MatrixShape { rows: 5, cols: 48, format: Format::Plain(Scalar::F32) };
        let table = gpu.weight(shape, Bytes::zeroed(5 * 48 * 4)?)?;
        let mut view = |width| gpu.buffer(width).map(|buffer| View::rows(buffer, 1, width));
        let (taps, x, convolved, out) = (view(4 * 48)?.buffer, view(48)?, view(48)?, view(16)?);
        let kv =
            StateShape::KeyValue { kv_heads: 1, key_width: 16, value_width: 16, positions: 64 };
        let states = [gpu.state(kv)?, gpu.state(StateShape::Recurrent { len: 3 * 48 })?];
        Ok(Self { table, taps, x, convolved, out, states })
    }

    fn spans(&self, position: usize) -> [Span; 2] {
        self.states.map(|state| Span::new(state, position, 1))
    }

    fn run(&self, gpu: &mut dyn Device, position: usize) -> Result<(), Error> {
        let Self { table, taps, x, convolved, out, .. } = *self;
        let [kv, convolution] = self.spans(position);
        gpu.run(&Op::Embed { table, tokens: &[0], out: x })?;
        let spans = &[convolution];
        gpu.run(&Op::Conv1d {
            x,
            weight: taps,
            bias: None,
            width: 4,
            dilation: 1,
            silu: true,
            spans,
            out: convolved,
        })?;
        gpu.run(&Op::Attention {
            q: convolved.columns(0, 16),
            k: convolved.columns(16, 16),
            v: Some(convolved.columns(32, 16)),
            gate: None,
            scale: 0.3,
            window: None,
            sinks: None,
            positions: None,
            spans: &[kv],
            out,
        })
    }

    /// Two steps, the second of them recorded ahead. `pass` is called at each point.
    fn run_two(&self, gpu: &mut GpuDevice, pass: &dyn Fn(Point)) -> Result<(), Error> {
        pass(Point::BeforeOps);
        self.run(gpu, 0)?;
        pass(Point::Encoded);
        gpu.submit()?;
        pass(Point::Submitted);
        let (outcome, mut recorded) = (self.spans(0).map(Commit::all), None);
        gpu.read_while(&mut [ViewRead { view: self.out, out: &mut [0.0; 16] }], &mut |gpu| {
            let step = gpu.record_ahead(&outcome, 1, &mut |gpu| self.run(gpu, 1).is_ok());
            assert!(!matches!(step, Ok(None)), "not recorded");
            recorded = step.unwrap_or(None);
            pass(Point::Recorded);
        })?;
        pass(Point::ReadBack);
        gpu.commit(&outcome)?;
        pass(Point::Committed);
        let is_submitted = match recorded {
            Some(step) => gpu.submit_recorded(step, &[2])?,
            None => false,
        };
        if !is_submitted {
            self.run(gpu, 1)?;
        }
        pass(Point::RecordedSubmitted);
        gpu.read(self.out, &mut [0.0; 16])?;
        gpu.commit(&self.spans(1).map(Commit::all))
    }
}

#[test]
fn a_lost_device_is_an_error_at_every_point_of_a_step() {
    for point in POINTS {
        let Some(mut gpu) = gpu_with(&DeviceOptions::default().exact(true)) else { return };
        let step = Step::new(&mut gpu).unwrap();
        step.run_two(&mut gpu, &|_| ()).unwrap();
        step.states.iter().for_each(|state| gpu.reset(*state).unwrap());
        let device = gpu.card.device.clone();
        let lose_at = |passed| {
            if passed == point {
                device.destroy();
            }
        };
        let is_lost = |result: Result<(), Error>| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("the GPU failed: the device was lost"), "{point:?}: {error}");
            assert!(error.contains("load the model again"), "{point:?}: {error}");
        };
        is_lost(step.run_two(&mut gpu, &lose_at));
        // Nothing computes any more. Calls that need no result of the card may succeed.
        is_lost(step.run_two(&mut gpu, &|_| ()));
        is_lost(gpu.save_state(step.states[0], 0..1, &mut [0; 128]));
        is_lost(Step::new(&mut gpu).map(drop));
        for state in step.states {
            let _ = gpu.reset(state);
            let fork = gpu.fork_state(state, 1);
            gpu.drop_state(state);
            fork.into_iter().for_each(|fork| gpu.drop_state(fork));
        }
        let _ = gpu.bank(2, 64, BankPlace::Host);
        let _ = gpu.bank(2, 64, BankPlace::Card);
    }
}
