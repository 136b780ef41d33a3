//! Two devices side by side, and numbers to feed them.

use std::cell::Cell;

use moeflux_compute::{
    BankPlace, BlockScale, Buffer, Bytes, Device, DeviceOptions, Element, Error, Format, Isa,
    KvFormat, MatrixShape, Op, Scalar, Slot, SlotTable, State, StateShape, View, Weight, open,
};

thread_local! {
    /// How many times a test has gone over all devices, and the number of the device that it is at.
    static TURN: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Small, fast, and the same everywhere: every device that a test goes over gets the same numbers, whichever others this machine has.
pub(crate) struct Random {
    state: u64,
    /// The state with which the first device began, and whose turn it was last.
    begun: u64,
    turn: (usize, usize),
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self { state, begun: state, turn: TURN.get() }
    }

    pub(crate) fn next(&mut self) -> u64 {
        let turn = TURN.get();
        if turn.0 != self.turn.0 {
            self.begun = self.state;
        } else if turn != self.turn {
            self.state = self.begun;
        }
        self.turn = turn;
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Uniform in -1 .. 1.
    pub(crate) fn number(&mut self) -> f32 {
        (self.next() & 0xff_ffff) as f32 / 8_388_608.0 - 1.0
    }

    pub(crate) fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.number()).collect()
    }

    /// Whole numbers that rounding to 8 bits does not change: every group of 16 has a 127.
    pub(crate) fn whole(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|i| if i % 16 == 7 { 127.0 } else { self.below(255) as f32 - 127.0 }).collect()
    }

    /// Bytes of a matrix with numbers of about unit size.
    pub(crate) fn matrix(&mut self, shape: MatrixShape) -> Vec<u8> {
        let parts = shape.plane_bytes().unwrap();
        match shape.format {
            Format::Plain(scalar) => {
                (0..shape.rows * shape.cols).flat_map(|_| encode(scalar, self.number())).collect()
            }
            Format::Affine { bits, scale, .. } => {
                let mut bytes: Vec<u8> = (0..parts.weights).map(|_| self.next() as u8).collect();
                let step = 2.0 / f32::from(bits).exp2();
                let scales: Vec<f32> = (0..parts.scales / scale.bytes())
                    .map(|_| step * (1.0 + 0.5 * self.number()))
                    .collect();
                bytes.extend(scales.iter().flat_map(|s| encode(scale, *s)));
                bytes.extend(
                    scales
                        .iter()
                        .flat_map(|s| encode(scale, -s / step * (1.0 + 0.1 * self.number()))),
                );
                bytes
            }
            Format::Scaled { element, scale, .. } => {
                let mut bytes: Vec<u8> = (0..parts.weights).map(|_| self.next() as u8).collect();
                if element == Element::E4M3 {
                    // Neither NaN nor so far apart that a few numbers are all of a sum.
                    bytes
                        .iter_mut()
                        .for_each(|byte| *byte = *byte & 0x80 | ((*byte & 0x7f) % 0x60));
                }
                bytes.extend((0..parts.scales / scale.bytes()).flat_map(|_| match scale {
                    BlockScale::E8M0 => vec![123 + self.below(3) as u8],
                    BlockScale::E4M3 => vec![36 + self.below(16) as u8],
                    BlockScale::Plain(scalar) => encode(scalar, 0.2 + 0.1 * self.number()),
                }));
                bytes
            }
        }
    }
}

pub(crate) fn encode(scalar: Scalar, x: f32) -> Vec<u8> {
    match scalar {
        Scalar::F32 => x.to_le_bytes().to_vec(),
        Scalar::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
        Scalar::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
    }
}

pub(crate) fn bytes(of: &[u8]) -> Bytes {
    let mut bytes = Bytes::zeroed(of.len()).unwrap();
    bytes.copy_from_slice(of);
    bytes
}

/// Whether the complete table is asked for: `MOEFLUX_TEST_FULL` is set.
pub(crate) fn is_full() -> bool {
    std::env::var_os("MOEFLUX_TEST_FULL").is_some()
}

/// Affine formats: all 54 triples of bits, group and scale type in the full table, otherwise a
/// pairwise covering array of 18. Each pair of two properties occurs: bits choose the unpacking,
/// the scale type the load, and no code depends on a triple.
pub(crate) fn affine_formats(full: bool) -> Vec<Format> {
    let mut formats = Vec::new();
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        for (j, group) in [32, 64, 128].into_iter().enumerate() {
            for (k, scale) in SCALARS.into_iter().enumerate() {
                if full || (i + j) % SCALARS.len() == k {
                    formats.push(Format::Affine { bits, group, scale });
                }
            }
        }
    }
    formats
}

/// Every format; affine formats pairwise unless the full table is asked for.
pub(crate) fn formats() -> Vec<Format> {
    let mut formats: Vec<Format> = SCALARS.into_iter().map(Format::Plain).collect();
    formats.extend(affine_formats(is_full()));
    formats.extend([Format::MXFP4, Format::MXFP8, Format::NVFP4]);
    let scaled = |element, block_rows, block_cols, scale| Format::Scaled {
        element,
        block_rows,
        block_cols,
        scale,
    };
    formats.extend([
        scaled(Element::E4M3, 128, 128, BlockScale::Plain(Scalar::F32)),
        scaled(Element::E4M3, 128, 128, BlockScale::Plain(Scalar::BF16)),
        scaled(Element::E4M3, 3, 11, BlockScale::Plain(Scalar::F16)),
        scaled(Element::E4M3, 32, 32, BlockScale::E8M0),
        scaled(Element::E4M3, 1, 24, BlockScale::E4M3),
        scaled(Element::E2M1, 5, 64, BlockScale::Plain(Scalar::BF16)),
        scaled(Element::E2M1, 2, 128, BlockScale::E4M3),
        scaled(Element::E2M1, 1, 6, BlockScale::E8M0),
    ]);
    formats
}

/// Formats of every kind of unpacking, without all their variants.
pub(crate) fn some_formats() -> Vec<Format> {
    let affine = |bits, group, scale| Format::Affine { bits, group, scale };
    let mut formats: Vec<Format> = SCALARS.into_iter().map(Format::Plain).collect();
    formats.extend([2, 3, 5, 6].map(|bits| affine(bits, 64, Scalar::BF16)));
    formats.extend([FOUR, affine(4, 32, Scalar::F32), affine(8, 128, Scalar::F16)]);
    formats.extend(
        self::formats().into_iter().filter(|format| matches!(format, Format::Scaled { .. })),
    );
    formats
}

const SCALARS: [Scalar; 3] = [Scalar::F32, Scalar::F16, Scalar::BF16];

/// The format of most published checkpoints.
pub(crate) const FOUR: Format = Format::Affine { bits: 4, group: 64, scale: Scalar::BF16 };

pub(crate) fn device(isa: Isa, exact: bool, threads: usize) -> Box<dyn Device> {
    device_that_keeps(None, isa, exact, threads)
}

/// A CPU device with keys and values kept in a format.
pub(crate) fn device_that_keeps(
    keys: Option<KvFormat>,
    isa: Isa,
    exact: bool,
    threads: usize,
) -> Box<dyn Device> {
    let options = DeviceOptions {
        name: Some("cpu".into()),
        threads: Some(threads),
        exact,
        kv_format: keys,
        isa: Some(isa.name().into()),
    };
    open(&options).unwrap()
}

/// The GPU that tests run on: `MOEFLUX_TEST_GPU` names it, `none` for none, `metal-on-cpu` for the stand-in for Metal,
/// `matrices-on-cpu` for one with matrices of 16 x 16; by default the best one there is. `MOEFLUX_TEST_GPU_ISA=plain` tests kernels without subgroups, `MOEFLUX_TEST_CPU=none`
/// the GPU alone.
pub(crate) fn gpu(exact: bool) -> Option<Box<dyn Device>> {
    gpu_that_keeps(None, exact)
}

/// That GPU, with keys and values kept in a format.
pub(crate) fn gpu_that_keeps(keys: Option<KvFormat>, exact: bool) -> Option<Box<dyn Device>> {
    let var = |name| std::env::var(name).ok();
    let asked = var("MOEFLUX_TEST_GPU");
    if asked.as_deref() == Some("none") {
        return None;
    }
    let name = asked.clone().unwrap_or_else(|| "gpu".into());
    let isa = var("MOEFLUX_TEST_GPU_ISA");
    let options = DeviceOptions { name: Some(name), threads: None, exact, kv_format: keys, isa };
    #[cfg(unix)]
    if let Some(name @ ("metal-on-cpu" | "matrices-on-cpu")) = options.name.as_deref() {
        let instance = crate::metal::instance(name == "matrices-on-cpu");
        return Some(moeflux_compute::open_gpu_of(&instance, &options).unwrap());
    }
    match open(&options) {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(asked.is_none(), "{error}");
            eprintln!("no GPU is tested: {error}");
            None
        }
    }
}

/// Writes a slot in memory of the host.
pub(crate) fn fill(device: &mut dyn Device, slot: Slot, contents: &[u8]) {
    let mut memory = device.take_slot(slot).unwrap();
    memory.copy_from_slice(contents);
    device.put_slot(slot, memory).unwrap();
}

/// The reference and a device, which make the same handles.
pub(crate) struct Both {
    pub(crate) reference: Box<dyn Device>,
    pub(crate) device: Box<dyn Device>,
}

impl Both {
    pub(crate) fn new(device: Box<dyn Device>) -> Self {
        let reference =
            open(&DeviceOptions { name: Some("reference".into()), ..Default::default() }).unwrap();
        Self { reference, device }
    }

    /// A bank with slots that hold `contents`, all as long: on the card, where there is one.
    pub(crate) fn bank(&mut self, contents: &[Vec<u8>]) -> u16 {
        let of = |device: &mut Box<dyn Device>| {
            let (count, bytes) = (contents.len(), contents[0].len());
            let host = device.bank(count, bytes, BankPlace::Host).unwrap();
            let card = device.bank(count, bytes, BankPlace::Card).unwrap();
            for (contents, index) in contents.iter().zip(0..) {
                fill(&mut **device, Slot { bank: host, index }, contents);
                device.copy_slot(Slot { bank: host, index }, Slot { bank: card, index }).unwrap();
            }
            card
        };
        let bank = of(&mut self.reference);
        assert_eq!(of(&mut self.device), bank);
        bank
    }

    /// Runs a test on every instruction set and on the GPU of this machine, on the exact and on the fast path.
    pub(crate) fn each(mut test: impl FnMut(&mut Both, bool)) {
        let without_cpu = std::env::var("MOEFLUX_TEST_CPU").is_ok_and(|asked| asked == "none");
        let of_path = |exact| devices(exact, !without_cpu).map(move |device| (device, exact));
        in_turn([true, false].into_iter().flat_map(of_path), |both, exact| test(both, exact));
    }

    /// Runs a test on every instruction set and on the GPU of this machine, on the fast path.
    pub(crate) fn each_fast(mut test: impl FnMut(&mut Both)) {
        in_turn(devices(false, true).map(|device| (device, ())), |both, ()| test(both));
    }

    /// Runs a test on every instruction set and on the GPU of this machine, on the exact path.
    pub(crate) fn each_exact(mut test: impl FnMut(&mut Both)) {
        in_turn(devices(true, true).map(|device| (device, ())), |both, ()| test(both));
    }

    /// Whether the device is a GPU on the fast path: keys and values are f16, and many rows share work.
    pub(crate) fn fast_gpu(&self) -> bool {
        let name = self.device.describe();
        name.starts_with("gpu") && name.ends_with("fast")
    }

    /// Whether keys and values are kept as f16.
    pub(crate) fn keeps_halves(&self) -> bool {
        self.device.kv_format() == KvFormat::F16
    }

    /// The tolerance of attention of so many rows at once.
    pub(crate) fn of_attention(&self, rows: usize) -> f32 {
        if rows >= 16 && self.fast_gpu() { 4e-3 } else { 1e-5 }
    }

    /// Whether the device rounds the activations that meet a matrix of this format on the fast path.
    pub(crate) fn rounds(&self, format: Format) -> bool {
        match format {
            Format::Plain(_) => false,
            Format::Affine { .. } => true,
            Format::Scaled { element, block_cols, .. } => {
                element == Element::E2M1 && matches!(block_cols, 16 | 32 | 64 | 128)
            }
        }
    }

    /// Whether the device rounds the activations of many rows that meet a matrix of this format on the fast path.
    pub(crate) fn rounds_many(&self, format: Format) -> bool {
        self.rounds(format) || self.device.describe().starts_with("gpu")
    }

    fn twice<T: PartialEq + std::fmt::Debug>(
        &mut self,
        mut f: impl FnMut(&mut dyn Device) -> T,
    ) -> T {
        let of_reference = f(&mut *self.reference);
        let of_device = f(&mut *self.device);
        assert_eq!(of_reference, of_device);
        of_device
    }

    pub(crate) fn numbers(&mut self, numbers: &[f32]) -> Buffer {
        self.twice(|device| {
            let buffer = device.buffer(numbers.len()).unwrap();
            device.write(buffer, numbers).unwrap();
            buffer
        })
    }

    /// A dense view of given numbers.
    pub(crate) fn dense(&mut self, rows: usize, numbers: &[f32]) -> View {
        View::rows(self.numbers(numbers), rows, numbers.len() / rows)
    }

    /// A dense view of random numbers.
    pub(crate) fn random(&mut self, random: &mut Random, rows: usize, width: usize) -> View {
        self.dense(rows, &random.numbers(rows * width))
    }

    /// A dense view of random numbers that f16 holds, as keys and values are kept on the fast path.
    pub(crate) fn halves(&mut self, random: &mut Random, rows: usize, width: usize) -> View {
        let numbers: Vec<f32> =
            random.numbers(rows * width).iter().map(|x| half::f16::from_f32(*x).to_f32()).collect();
        self.dense(rows, &numbers)
    }

    /// A view full of NaN, for an output: what the op does not write is found.
    pub(crate) fn poisoned(&mut self, rows: usize, width: usize) -> View {
        self.dense(rows, &vec![f32::NAN; rows * width])
    }

    pub(crate) fn weight(&mut self, random: &mut Random, shape: MatrixShape) -> Weight {
        self.weight_of(shape, &random.matrix(shape))
    }

    pub(crate) fn weight_of(&mut self, shape: MatrixShape, of: &[u8]) -> Weight {
        self.twice(|device| device.weight(shape, bytes(of)).unwrap())
    }

    pub(crate) fn state(&mut self, shape: StateShape) -> State {
        self.twice(|device| device.state(shape).unwrap())
    }

    pub(crate) fn slot_table(&mut self, slots: &[Slot]) -> SlotTable {
        self.twice(|device| device.slot_table(slots).unwrap())
    }

    pub(crate) fn commit(&mut self, state: State) {
        self.twice(|device| device.commit(&[state]).unwrap());
    }

    pub(crate) fn run(&mut self, op: &Op<'_>) {
        let name = self.device.describe();
        self.twice(|device| device.run(op).map_err(|e| format!("{name}: {e}")).unwrap());
    }

    /// Both fail, alike.
    pub(crate) fn fails(&mut self, op: &Op<'_>) -> Error {
        let (a, b) = (self.reference.run(op).unwrap_err(), self.device.run(op).unwrap_err());
        assert_eq!(a.to_string(), b.to_string());
        b
    }

    /// Both find numbers that cannot be, alike: at once or, on a device that computes later, when `out` is read.
    pub(crate) fn fails_by(&mut self, op: &Op<'_>, out: View) -> Error {
        let a = self.reference.run(op).unwrap_err();
        let b = match self.device.run(op) {
            Ok(()) => {
                self.device.read(out, &mut vec![0.0; out.rows * out.heads * out.width]).unwrap_err()
            }
            Err(b) => b,
        };
        assert_eq!(a.to_string(), b.to_string());
        b
    }

    pub(crate) fn read(&mut self, view: View) -> Vec<f32> {
        read(&mut *self.device, view)
    }

    /// The numbers agree: `max |a - b| <= tolerance * rms(b)`.
    pub(crate) fn agree(&mut self, what: &str, view: View, tolerance: f32) {
        let (expected, got) = (read(&mut *self.reference, view), read(&mut *self.device, view));
        let name = self.device.describe();
        close(&format!("{name}: {what}"), &got, &expected, tolerance);
    }

    /// The numbers agree as vectors: `|a - b| <= tolerance * |b|`.
    pub(crate) fn agree_in_sum(&mut self, what: &str, view: View, tolerance: f64) {
        let (expected, got) = (read(&mut *self.reference, view), read(&mut *self.device, view));
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let error = norm(&mut got.iter().zip(&expected).map(|(a, b)| f64::from(a - b)));
        let error = error / norm(&mut expected.iter().map(|b| f64::from(*b)));
        assert!(error <= tolerance, "{}: {what}: error {error:e}", self.device.describe());
    }
}

/// The devices of this machine.
fn devices(exact: bool, with_cpu: bool) -> impl Iterator<Item = Box<dyn Device>> {
    let cpus = Isa::available()
        .into_iter()
        .filter(move |_| with_cpu)
        .map(move |isa| device(isa, exact, 2));
    cpus.chain(std::iter::once_with(move || gpu(exact)).flatten())
}

/// Runs a test on one device after the other.
fn in_turn<T>(
    devices: impl Iterator<Item = (Box<dyn Device>, T)>,
    mut test: impl FnMut(&mut Both, T),
) {
    let (times, _) = TURN.get();
    for (i, (device, of)) in devices.enumerate() {
        TURN.set((times + 1, i));
        test(&mut Both::new(device), of);
    }
}

pub(crate) fn read(device: &mut dyn Device, view: View) -> Vec<f32> {
    let mut out = vec![0.0; view.rows * view.heads * view.width];
    device.read(view, &mut out).unwrap();
    out
}

pub(crate) fn close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    let squares: f64 = expected.iter().map(|b| f64::from(*b) * f64::from(*b)).sum();
    let allowed = f64::from(tolerance) * (squares / expected.len().max(1) as f64).sqrt();
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        let error = f64::from(a - b).abs();
        assert!(
            error <= allowed,
            "{what}: {a} at {i} where {b} belongs, {:.1} times too far",
            error / allowed
        );
    }
}

pub(crate) fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn affine_formats_cover_all_pairs() {
    let sample = affine_formats(false);
    let full = affine_formats(true);
    assert_eq!((sample.len(), full.len()), (18, 54));
    let properties = |format: &Format| match *format {
        Format::Affine { bits, group, scale } => {
            [format!("{bits} bits"), format!("groups of {group}"), format!("{scale:?}")]
        }
        _ => unreachable!("{format} is affine"),
    };
    for wanted in full.iter().map(properties) {
        for [i, j] in [[0, 1], [0, 2], [1, 2]] {
            assert!(
                sample.iter().map(properties).any(|p| p[i] == wanted[i] && p[j] == wanted[j]),
                "no format has {} and {}",
                wanted[i],
                wanted[j]
            );
        }
    }
}
