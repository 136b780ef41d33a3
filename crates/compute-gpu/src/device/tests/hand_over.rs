//! Tests of steps that hand work over to the host.

#![allow(clippy::unwrap_used)]

use moeflux_ops::{
    BankPlace, Bytes, Device, DeviceOptions, Error, Format, HandOver, HandOverPort, HandOverShape,
    MatrixShape, Op, RecordAhead, Scalar, Slot, SlotStore, SlotTable, View, Weight,
};

use crate::{device::GpuDevice, store::store::tests::gpu_with};

/// Inputs, and results of an expert.
const WIDTH: usize = 24;
/// Experts per row.
const K: usize = 3;
const ROWS: usize = 2;
const LAYERS: usize = 3;
const SHAPE: HandOverShape =
    HandOverShape { ids: ROWS * K, input: ROWS * WIDTH, results: ROWS * K * WIDTH };

/// Layers that add up the results of the host. Expert 1 is on the card, experts 0 and 2 are not.
struct Layers {
    gpu: GpuDevice,
    port: Box<dyn HandOverPort>,
    /// Inputs of both rows.
    inputs: Weight,
    x: View,
    ids: View,
    parts: View,
    table: SlotTable,
}

impl Layers {
    /// `None` without a GPU that hands work over.
    fn new() -> Option<Self> {
        let mut gpu = gpu_with(&DeviceOptions::default())?;
        let port = gpu.reserve_hand_overs(SHAPE).unwrap();
        assert!(port.is_some() || gpu.card.adapter.backend != "Vulkan", "no hand-overs");
        let port = port?;
        let shape = MatrixShape { rows: 4, cols: WIDTH, format: Format::Plain(Scalar::F32) };
        let values: Vec<f32> = (0..4 * WIDTH).map(|i| i as f32 / 8.0).collect();
        let mut bytes = Bytes::zeroed(values.len() * 4).unwrap();
        bytes.copy_from_slice(bytemuck::cast_slice(&values));
        let inputs = gpu.weight(shape, bytes).unwrap();
        let mut view = |rows, width| View::rows(gpu.buffer(rows * width).unwrap(), rows, width);
        let (x, ids, parts) = (view(ROWS, WIDTH), view(ROWS, K), view(ROWS * K, WIDTH));
        let bank = gpu.bank(1, 64, BankPlace::Card).unwrap();
        let table = gpu.slot_table(&[None, Some(Slot { bank, index: 0 }), None]).unwrap();
        gpu.write(ids.buffer, &[0.0, 1.0, 2.0, 2.0, 0.0, 1.0]).unwrap();
        Some(Self { gpu, port, inputs, x, ids, parts, table })
    }

    /// Submits a step for the rows of these tokens.
    fn submit(&mut self, tokens: &[u32]) -> Result<bool, Error> {
        let &mut Self { ref mut gpu, inputs, x, ids, parts, table, .. } = self;
        gpu.write(parts.buffer, &[7.0; ROWS * K * WIDTH])?;
        let step = gpu.record_ahead(&[], tokens.len(), &mut |gpu| {
            let mut record = || {
                gpu.run(&Op::Embed { table: inputs, tokens: &[0, 1], out: x })?;
                for layer in 0..LAYERS {
                    gpu.hand_over(ids, x)?;
                    // One layer has nothing to do meanwhile.
                    if layer != 1 {
                        gpu.run(&Op::Scale { x: parts, factor: 2.0 })?;
                    }
                    gpu.take_results(ids, table, parts)?;
                    gpu.run(&Op::Add { x, y: parts.slice(0, ROWS) })?;
                }
                Ok::<_, Error>(())
            };
            record().is_ok()
        })?;
        self.port.begin();
        gpu.submit_recorded(step.unwrap(), tokens)
    }

    /// Serves a hand-over: the results of choice `i` are the first input times `i + 1`. Returns the
    /// inputs.
    fn serve(&mut self) -> Result<Vec<f32>, Error> {
        let (mut ids, mut input) = ([0.0; ROWS * K], vec![0.0; ROWS * WIDTH]);
        self.port.next(&mut ids, &mut input)?;
        assert_eq!(ids, [0.0, 1.0, 2.0, 2.0, 0.0, 1.0]);
        // Choices of experts without a slot.
        let rows = [0, 2, 3, 4];
        let values: Vec<f32> =
            rows.iter().flat_map(|row| vec![input[0] * (row + 1) as f32; WIDTH]).collect();
        self.port.return_results(&rows, &values)?;
        Ok(input)
    }

    /// The residual, and all parts.
    fn read(&mut self) -> Result<[Vec<f32>; 2], Error> {
        let (mut x, mut parts) = (vec![0.0; ROWS * WIDTH], vec![0.0; ROWS * K * WIDTH]);
        self.gpu.read(self.x, &mut x)?;
        self.gpu.read(self.parts, &mut parts)?;
        Ok([x, parts])
    }
}

#[test]
fn each_layer_gets_the_results_of_the_host() {
    let Some(mut layers) = Layers::new() else { return };
    // More steps than command buffers are kept for.
    for step in 0..5u32 {
        let tokens = [step % 4, (step + 1) % 4];
        assert!(layers.submit(&tokens).unwrap());
        let first = |token: u32| (0..WIDTH).map(move |i| (token as usize * WIDTH + i) as f32 / 8.0);
        let mut x: Vec<f32> = tokens.iter().flat_map(|token| first(*token)).collect();
        let mut on_card = 7.0;
        for layer in 0..LAYERS {
            assert_eq!(layers.serve().unwrap(), x, "step {step}, layer {layer}");
            on_card *= if layer == 1 { 1.0 } else { 2.0 };
            let result = x[0];
            x[..WIDTH].iter_mut().for_each(|x| *x += result);
            x[WIDTH..].iter_mut().for_each(|x| *x += on_card);
            if layer == LAYERS - 1 {
                let [residual, parts] = layers.read().unwrap();
                assert_eq!(residual, x, "step {step}");
                let factors = [1.0, f32::NAN, 3.0, 4.0, 5.0, f32::NAN];
                for (part, factor) in parts.chunks_exact(WIDTH).zip(factors) {
                    let expected = if factor.is_nan() { on_card } else { result * factor };
                    assert_eq!(part, [expected; WIDTH], "step {step}, {factor}");
                }
            }
        }
    }
}

#[test]
fn a_step_ends_without_the_host() {
    let Some(mut layers) = Layers::new() else { return };
    for served in 0..LAYERS {
        assert!(layers.submit(&[0, 1]).unwrap());
        (0..served).for_each(|_| drop(layers.serve().unwrap()));
        match served {
            1 => layers.port.abandon(),
            _ => layers.gpu.abandon_hand_overs(),
        }
        layers.read().unwrap();
        assert!(layers.serve().unwrap_err().to_string().contains("abandoned"));
    }
    // The host fails before there is a step.
    layers.port.begin();
    layers.port.abandon();
    assert!(layers.serve().is_err());
    // Later steps are whole.
    assert!(layers.submit(&[2, 3]).unwrap());
    (0..LAYERS).for_each(|_| drop(layers.serve().unwrap()));
    layers.read().unwrap();
}

#[test]
fn a_device_is_dropped_while_it_waits() {
    for drops_port_first in [false, true] {
        let Some(mut layers) = Layers::new() else { return };
        assert!(layers.submit(&[0, 1]).unwrap());
        layers.serve().unwrap();
        let Layers { gpu, mut port, .. } = layers;
        if drops_port_first {
            drop((port, gpu));
            continue;
        }
        drop(gpu);
        assert!(port.next(&mut [0.0; ROWS * K], &mut [0.0; ROWS * WIDTH]).is_err());
    }
}

#[test]
fn wrong_hand_overs_are_errors() {
    let Some(mut layers) = Layers::new() else { return };
    let Layers { gpu, port, inputs, x, ids, parts, table } = &mut layers;
    let (inputs, x, ids, parts, table) = (*inputs, *x, *ids, *parts, *table);
    let error = |result: Result<(), Error>| result.unwrap_err().to_string();
    assert!(error(gpu.hand_over(ids, x)).contains("recorded steps only"));
    assert!(error(gpu.hand_over(ids, parts)).contains("more than the reserved"));
    assert!(error(gpu.take_results(ids, table, x)).contains("6 results"));
    assert!(error(port.return_results(&[0], &[0.0; WIDTH])).contains("without a hand-over"));
    // Results without a hand-over, and a hand-over without results, are not recorded.
    for is_first in [false, true] {
        let step = gpu.record_ahead(&[], 2, &mut |gpu| {
            gpu.run(&Op::Embed { table: inputs, tokens: &[0, 1], out: x }).unwrap();
            match is_first {
                true => gpu.hand_over(ids, x).is_ok(),
                false => gpu.take_results(ids, table, parts).is_ok(),
            }
        });
        assert!(step.unwrap().is_none(), "{is_first}");
    }
    assert!(layers.submit(&[0, 1]).unwrap());
    let mut input = vec![0.0; ROWS * WIDTH];
    assert!(error(layers.port.next(&mut [0.0], &mut input)).contains("expected 6 ids"));
    layers.gpu.abandon_hand_overs();
    layers.read().unwrap();
}
