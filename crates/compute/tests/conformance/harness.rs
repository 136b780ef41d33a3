//! A device beside the reference device, and random inputs for both.

use std::{cell::Cell, collections::BTreeSet, ops::Range};

use moeflux_compute::{
    ActivationType, Affine, Bank, BankPlace, BlockScale, BlockScaled, BlockType, Buffer, Bytes,
    Commit, Device, DeviceId, DeviceOptions, Element, Error, Format, Isa, KvFormat, MatrixShape,
    Op, Scalar, Slot, SlotTable, Span, SplitMix64, State, StateShape, View, Weight, open,
};

thread_local! {
    /// Loops over the devices that the current test has started, and the index of the device that
    /// it runs on.
    static DEVICE_LOOP: Cell<DeviceLoop> = const { Cell::new(DeviceLoop { number: 0, device: 0 }) };
}

#[derive(Clone, Copy, PartialEq)]
struct DeviceLoop {
    number: usize,
    device: usize,
}

/// Random values of a test, the same on every platform.
///
/// Within one loop over the devices, each device gets the values of the first one. So the inputs do
/// not depend on the devices of this machine.
pub(crate) struct Random {
    generator: SplitMix64,
    /// The generator at the start of the current loop over the devices.
    at_start: SplitMix64,
    last: DeviceLoop,
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let generator = SplitMix64::new(seed);
        Self { at_start: generator.clone(), generator, last: DEVICE_LOOP.get() }
    }

    pub(crate) fn next(&mut self) -> u64 {
        let current = DEVICE_LOOP.get();
        if current.number != self.last.number {
            self.at_start = self.generator.clone();
        } else if current != self.last {
            self.generator = self.at_start.clone();
        }
        self.last = current;
        self.generator.next_u64() >> 16
    }

    /// Uniform in `0..n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Uniform in -1 .. 1.
    pub(crate) fn value(&mut self) -> f32 {
        (self.next() & 0xff_ffff) as f32 / 8_388_608.0 - 1.0
    }

    pub(crate) fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }

    /// Values that f16 represents exactly.
    pub(crate) fn f16_values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| half::f16::from_f32(self.value()).to_f32()).collect()
    }

    /// Integers that quantization of activations to int8 leaves exact: every group of 16 has a 127,
    /// so that its scale is 1.
    pub(crate) fn int8_values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|i| if i % 16 == 7 { 127.0 } else { self.below(255) as f32 - 127.0 }).collect()
    }

    /// Bytes of a matrix whose weights are of magnitude 1.
    pub(crate) fn matrix(&mut self, shape: MatrixShape) -> Vec<u8> {
        let planes = shape.plane_bytes().unwrap();
        let mut bytes = vec![0; planes.total()];
        shape.format.codec().random(planes.split_mut(&mut bytes), &mut || self.next());
        bytes
    }
}

/// Little-endian bytes of `x` rounded to a scalar type.
pub(crate) fn encode(scalar: Scalar, x: f32) -> Vec<u8> {
    match scalar {
        Scalar::F32 => x.to_le_bytes().to_vec(),
        Scalar::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
        Scalar::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
    }
}

/// A copy of `contents` in aligned memory.
pub(crate) fn bytes(contents: &[u8]) -> Bytes {
    let mut bytes = Bytes::zeroed(contents.len()).unwrap();
    bytes.copy_from_slice(contents);
    bytes
}

/// Whether the complete table is requested: `MOEFLUX_TEST_FULL` is set.
pub(crate) fn is_full() -> bool {
    std::env::var_os("MOEFLUX_TEST_FULL").is_some()
}

/// Whether CPU devices are tested: `MOEFLUX_TEST_CPU` is not `none`.
pub(crate) fn tests_cpu() -> bool {
    std::env::var("MOEFLUX_TEST_CPU").map_or(true, |value| value != "none")
}

/// Affine formats of the table: all 72 triples of bits, group and scale type in the full table,
/// otherwise a pairwise covering array of 24. Each pair of two properties occurs: bits choose the
/// unpacking, the scale type the load, and no code depends on a triple.
pub(crate) fn affine_formats(full: bool) -> Vec<Affine> {
    let affine = |format| match format {
        Format::Affine(affine) => Some(affine),
        _ => None,
    };
    let all: Vec<Affine> = Format::all().into_iter().filter_map(affine).collect();
    let values = |property: fn(&Affine) -> usize| {
        all.iter().map(property).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    let properties: [fn(&Affine) -> usize; 3] =
        [|a| a.bits.into(), |a| a.group.into(), |a| a.scale as usize];
    let values = properties.map(values);
    let is_covering = |format: &Affine| {
        let [i, j, k] = [0, 1, 2].map(|p| {
            let own = properties[p](format);
            values[p].iter().position(|value| *value == own).unwrap()
        });
        (i + j) % values[2].len() == k
    };
    all.iter().copied().filter(|format| full || is_covering(format)).collect()
}

/// Fewest inputs of a row of affine weights: whole groups in whole words.
pub(crate) fn affine_unit(affine: Affine) -> usize {
    let group = usize::from(affine.group);
    let fills_words = (group * usize::from(affine.bits)).is_multiple_of(32);
    if fills_words { group } else { 2 * group }
}

/// Every format of the table, affine ones pairwise unless the complete table is requested; and
/// block-scaled formats without names.
pub(crate) fn formats() -> Vec<Format> {
    let others = Format::all().into_iter().filter(|format| !matches!(format, Format::Affine(_)));
    let mut formats: Vec<Format> =
        affine_formats(is_full()).into_iter().map(Format::Affine).chain(others).collect();
    let scaled = |element, block_rows, block_cols, scale| {
        Format::BlockScaled(BlockScaled { element, block_rows, block_cols, scale })
    };
    formats.extend([
        scaled(Element::E4M3, 128, 128, BlockScale::Plain(Scalar::BF16)),
        scaled(Element::E4M3, 3, 11, BlockScale::Plain(Scalar::F16)),
        scaled(Element::E4M3, 32, 32, BlockScale::E8M0),
        scaled(Element::E4M3, 1, 24, BlockScale::E4M3),
        scaled(Element::E2M1, 5, 64, BlockScale::Plain(Scalar::BF16)),
        scaled(Element::E2M1, 2, 128, BlockScale::E4M3),
        scaled(Element::E2M1, 1, 6, BlockScale::E8M0),
        scaled(Element::E2M1, 1, 16, BlockScale::Plain(Scalar::F16)),
        scaled(Element::E4M3, 1, 96, BlockScale::Plain(Scalar::F32)),
        Format::NVFP4_WIDE,
    ]);
    formats
}

/// A sample of the formats that covers every way of unpacking.
pub(crate) fn sample_formats() -> Vec<Format> {
    let affine = |bits, group, scale| Format::Affine(Affine { bits, group, scale });
    let mut formats: Vec<Format> = SCALARS.into_iter().map(Format::Plain).collect();
    formats.extend([2, 3, 5, 6].map(|bits| affine(bits, 64, Scalar::BF16)));
    formats.extend([AFFINE4, affine(4, 32, Scalar::F32), affine(8, 128, Scalar::F16)]);
    formats.extend([affine(4, 16, Scalar::F16), affine(8, 16, Scalar::F32)]);
    formats.push(affine(5, 16, Scalar::BF16));
    formats.extend(
        self::formats().into_iter().filter(|format| matches!(format, Format::BlockScaled(_))),
    );
    formats.extend(BLOCKS.map(Format::Blocks));
    formats
}

/// A block type of each of the GPU's codecs.
const BLOCKS: [BlockType; 4] = [BlockType::Q5_1, BlockType::Q4K, BlockType::IQ2S, BlockType::TQ1_0];

const SCALARS: [Scalar; 3] = [Scalar::F32, Scalar::F16, Scalar::BF16];

/// Rows that ops are tested with: one, few as of drafts or of some sequences, a batch, a chunk.
/// Kernels differ by the number of rows.
pub(crate) const ROW_COUNTS: [usize; 6] = [1, 2, 3, 8, 17, 64];

/// Affine 4-bit weights in groups of 64: the format of most published checkpoints.
pub(crate) const AFFINE4: Format =
    Format::Affine(Affine { bits: 4, group: 64, scale: Scalar::BF16 });

/// A reference device with the id of another device, or with a new one.
pub(crate) fn reference(id: Option<DeviceId>) -> Box<dyn Device> {
    open(&DeviceOptions::default().name("reference").id(id)).unwrap()
}

/// A CPU device.
pub(crate) fn device(isa: Isa, exact: bool, threads: usize) -> Box<dyn Device> {
    device_with_kv(None, isa, exact, threads)
}

/// A CPU device with a KV cache of the given format; `None` for the default format.
pub(crate) fn device_with_kv(
    kv_format: Option<KvFormat>,
    isa: Isa,
    exact: bool,
    threads: usize,
) -> Box<dyn Device> {
    let options = DeviceOptions::default()
        .name("cpu")
        .threads(threads)
        .exact(exact)
        .kv_format(kv_format)
        .isa(isa.name().to_owned());
    open(&options).unwrap()
}

/// The GPU that tests run on, by default the best adapter; `None` if this machine has none.
///
/// `MOEFLUX_TEST_GPU` selects the device: an adapter's name, `none`, `metal-on-cpu` for the Metal
/// emulation, or `matrices-on-cpu` for the emulation with cooperative matrices of 16 x 16.
/// `MOEFLUX_TEST_GPU_ISA=plain` selects kernels without subgroups. `MOEFLUX_TEST_CPU=none` disables
/// the CPU devices.
pub(crate) fn gpu(exact: bool) -> Option<Box<dyn Device>> {
    gpu_with_kv(None, exact)
}

/// The GPU of [`gpu`], with a KV cache of the given format.
pub(crate) fn gpu_with_kv(kv_format: Option<KvFormat>, exact: bool) -> Option<Box<dyn Device>> {
    let var = |name| std::env::var(name).ok();
    let requested = var("MOEFLUX_TEST_GPU");
    if requested.as_deref() == Some("none") {
        return None;
    }
    let name = requested.clone().unwrap_or_else(|| "gpu".into());
    let isa = var("MOEFLUX_TEST_GPU_ISA");
    let options = DeviceOptions::default().name(name).exact(exact).kv_format(kv_format).isa(isa);
    #[cfg(unix)]
    if let Some(name @ ("metal-on-cpu" | "matrices-on-cpu")) = options.name.as_deref() {
        let instance = crate::metal::instance(name == "matrices-on-cpu");
        return Some(moeflux_compute::open_gpu_of(&instance, &options).unwrap());
    }
    match open(&options) {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(requested.is_none(), "{error}");
            eprintln!("no GPU is tested: {error}");
            None
        }
    }
}

/// Writes a slot of a host bank.
pub(crate) fn fill(device: &mut dyn Device, slot: Slot, contents: &[u8]) {
    let mut memory = device.take_slot(slot).unwrap();
    memory.copy_from_slice(contents);
    device.put_slot(slot, memory).unwrap();
}

/// The device under test and the reference device. They have one id and return the same handles.
pub(crate) struct DevicePair {
    pub(crate) reference: Box<dyn Device>,
    pub(crate) device: Box<dyn Device>,
}

impl DevicePair {
    pub(crate) fn new(device: Box<dyn Device>) -> Self {
        Self { reference: reference(Some(device.id())), device }
    }

    /// A bank whose slots hold `contents`, all of one length: on the card if there is one.
    pub(crate) fn bank(&mut self, contents: &[Vec<u8>]) -> Bank {
        let fill_bank = |device: &mut Box<dyn Device>| {
            let (count, bytes) = (contents.len(), contents[0].len());
            let host = device.bank(count, bytes, BankPlace::Host).unwrap();
            let card = device.bank(count, bytes, BankPlace::Card).unwrap();
            for (contents, index) in contents.iter().zip(0..) {
                fill(&mut **device, Slot { bank: host, index }, contents);
                device.copy_slot(Slot { bank: host, index }, Slot { bank: card, index }).unwrap();
            }
            card
        };
        let bank = fill_bank(&mut self.reference);
        assert_eq!(fill_bank(&mut self.device), bank);
        bank
    }

    /// Runs a test on every instruction set and on the GPU of this machine, on the exact and on the
    /// fast path.
    pub(crate) fn for_each(mut test: impl FnMut(&mut DevicePair, bool)) {
        let on_path = |exact| devices(exact, tests_cpu()).map(move |device| (device, exact));
        for_each_device([true, false].into_iter().flat_map(on_path), |pair, exact| {
            test(pair, exact)
        });
    }

    /// Runs a test on every instruction set and on the GPU of this machine, on the fast path.
    pub(crate) fn for_each_fast(mut test: impl FnMut(&mut DevicePair)) {
        for_each_device(devices(false, tests_cpu()).map(|device| (device, ())), |pair, ()| {
            test(pair)
        });
    }

    /// Runs a test on every instruction set and on the GPU of this machine, on the exact path.
    pub(crate) fn for_each_exact(mut test: impl FnMut(&mut DevicePair)) {
        for_each_device(devices(true, tests_cpu()).map(|device| (device, ())), |pair, ()| {
            test(pair)
        });
    }

    /// Every format for a CPU. For a GPU, whose driver compiles kernels for each, a sample that
    /// covers every way of unpacking, unless the complete table is requested.
    pub(crate) fn formats(&self) -> Vec<Format> {
        if self.is_gpu() && !is_full() { sample_formats() } else { formats() }
    }

    pub(crate) fn is_gpu(&self) -> bool {
        self.device.describe().starts_with("gpu")
    }

    /// Whether the device is a GPU on the fast path: the KV cache is f16, and many rows run as
    /// tiles of f16.
    pub(crate) fn is_fast_gpu(&self) -> bool {
        self.is_gpu() && self.device.describe().ends_with("fast")
    }

    /// Whether the KV cache is f16.
    pub(crate) fn keeps_f16_kv(&self) -> bool {
        self.device.kv_format() == KvFormat::F16
    }

    /// The tolerance of attention over `rows` rows in one op.
    pub(crate) fn attention_tolerance(&self, rows: usize) -> f32 {
        if rows >= 16 && self.is_fast_gpu() { 4e-3 } else { 1e-5 }
    }

    /// Tolerance of attention within segments, with heads of these widths: the fast path of a GPU
    /// rounds heads that fit its cooperative matrices to f16.
    pub(crate) fn segment_tolerance(&self, key: usize, value: usize) -> f32 {
        let fits = |width: usize| width.is_multiple_of(4) && width <= 128;
        if fits(key) && fits(value) { self.attention_tolerance(usize::MAX) } else { 1e-5 }
    }

    /// Whether the fast path rounds activations in a GEMV with weights of this format.
    pub(crate) fn rounds_activations(&self, format: Format) -> bool {
        format.codec().activations() == ActivationType::Int8
    }

    /// Whether the fast path rounds activations in a GEMM with weights of this format.
    pub(crate) fn rounds_gemm_activations(&self, format: Format) -> bool {
        self.rounds_activations(format) || self.device.describe().starts_with("gpu")
    }

    /// Calls `f` on the two devices and checks that the results are equal.
    fn on_both<T: PartialEq + std::fmt::Debug>(
        &mut self,
        mut f: impl FnMut(&mut dyn Device) -> T,
    ) -> T {
        let expected = f(&mut *self.reference);
        let result = f(&mut *self.device);
        assert_eq!(expected, result);
        result
    }

    pub(crate) fn buffer(&mut self, values: &[f32]) -> Buffer {
        self.on_both(|device| {
            let buffer = device.buffer(values.len()).unwrap();
            device.write(buffer, values).unwrap();
            buffer
        })
    }

    /// A dense view of `rows` rows with the given values.
    pub(crate) fn dense(&mut self, rows: usize, values: &[f32]) -> View {
        View::rows(self.buffer(values), rows, values.len() / rows)
    }

    /// A dense view of random values.
    pub(crate) fn random(&mut self, random: &mut Random, rows: usize, width: usize) -> View {
        self.dense(rows, &random.values(rows * width))
    }

    /// A dense view of random values that f16 represents exactly: the KV cache of the fast path
    /// does not round them.
    pub(crate) fn f16_values(&mut self, random: &mut Random, rows: usize, width: usize) -> View {
        self.dense(rows, &random.f16_values(rows * width))
    }

    /// A view full of NaN for an output, so that elements an op leaves unwritten fail the test.
    pub(crate) fn nan_filled(&mut self, rows: usize, width: usize) -> View {
        self.dense(rows, &vec![f32::NAN; rows * width])
    }

    pub(crate) fn weight(&mut self, random: &mut Random, shape: MatrixShape) -> Weight {
        self.weight_from_bytes(shape, &random.matrix(shape))
    }

    pub(crate) fn weight_from_bytes(&mut self, shape: MatrixShape, contents: &[u8]) -> Weight {
        self.on_both(|device| device.weight(shape, bytes(contents)).unwrap())
    }

    pub(crate) fn state(&mut self, shape: StateShape) -> State {
        self.on_both(|device| device.state(shape).unwrap())
    }

    pub(crate) fn slot_table(&mut self, slots: &[Slot]) -> SlotTable {
        let slots: Vec<_> = slots.iter().copied().map(Some).collect();
        self.on_both(|device| device.slot_table(&slots).unwrap())
    }

    /// Commits all rows of a span.
    pub(crate) fn commit(&mut self, span: Span) {
        self.on_both(|device| device.commit(&[Commit::all(span)]).unwrap());
    }

    pub(crate) fn run(&mut self, op: &Op<'_>) {
        let name = self.device.describe();
        self.on_both(|device| device.run(op).map_err(|e| format!("{name}: {e}")).unwrap());
    }

    /// The error of an op that fails on the two devices with the same message.
    pub(crate) fn fails(&mut self, op: &Op<'_>) -> Error {
        let (a, b) = (self.reference.run(op).unwrap_err(), self.device.run(op).unwrap_err());
        assert_eq!(a.to_string(), b.to_string());
        b
    }

    /// The error of an op with invalid values, the same on the two devices. An asynchronous device
    /// reports it when `out` is read.
    pub(crate) fn fails_on_read(&mut self, op: &Op<'_>, out: View) -> Error {
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

    /// Checks each element of a view: `max |a - b| <= tolerance * rms(b)`.
    pub(crate) fn agree(&mut self, what: &str, view: View, tolerance: f32) {
        let (expected, got) = (read(&mut *self.reference, view), read(&mut *self.device, view));
        let name = self.device.describe();
        close(&format!("{name}: {what}"), &got, &expected, tolerance);
    }

    /// Checks a view as one vector: `|a - b| <= tolerance * |b|`, Euclidean norms.
    pub(crate) fn agree_in_norm(&mut self, what: &str, view: View, tolerance: f64) {
        let (expected, got) = (read(&mut *self.reference, view), read(&mut *self.device, view));
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let error = norm(&mut got.iter().zip(&expected).map(|(a, b)| f64::from(a - b)));
        let error = error / norm(&mut expected.iter().map(|b| f64::from(*b)));
        assert!(error <= tolerance, "{}: {what}: error {error:e}", self.device.describe());
    }
}

/// The devices of this machine: one per instruction set, then the GPU.
fn devices(exact: bool, with_cpu: bool) -> impl Iterator<Item = Box<dyn Device>> {
    let cpus = Isa::available()
        .into_iter()
        .filter(move |_| with_cpu)
        .map(move |isa| device(isa, exact, 2));
    cpus.chain(std::iter::once_with(move || gpu(exact)).flatten())
}

/// Runs a test on one device after the other. Each starts with the same state of [`Random`].
fn for_each_device<T>(
    devices: impl Iterator<Item = (Box<dyn Device>, T)>,
    mut test: impl FnMut(&mut DevicePair, T),
) {
    let number = DEVICE_LOOP.get().number + 1;
    for (index, (device, options)) in devices.enumerate() {
        DEVICE_LOOP.set(DeviceLoop { number, device: index });
        test(&mut DevicePair::new(device), options);
    }
}

pub(crate) fn read(device: &mut dyn Device, view: View) -> Vec<f32> {
    let mut out = vec![0.0; view.rows * view.heads * view.width];
    device.read(view, &mut out).unwrap();
    out
}

/// Checks each element: `max |a - b| <= tolerance * rms(b)`, with `b` the expected values.
pub(crate) fn close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    let squares: f64 = expected.iter().map(|b| f64::from(*b) * f64::from(*b)).sum();
    let allowed = f64::from(tolerance) * (squares / expected.len().max(1) as f64).sqrt();
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        let error = f64::from(a - b).abs();
        assert!(
            error <= allowed,
            "{what}: {a} at {i}, expected {b}, {:.1} times the tolerance",
            error / allowed
        );
    }
}

/// Bit patterns of values, for exact comparisons that treat equal NaNs as equal.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Rows of each chunk of `rows` rows. Sizes are repeated as needed.
pub(crate) fn row_chunks(rows: usize, sizes: &[usize]) -> impl Iterator<Item = Range<usize>> {
    let chunk = move |first: &mut usize, size: &usize| {
        let start = *first;
        *first = rows.min(start + size);
        (start < rows).then_some(start..*first)
    };
    sizes.iter().cycle().scan(0, chunk)
}

#[test]
fn affine_formats_cover_all_pairs() {
    let sample = affine_formats(false);
    let full = affine_formats(true);
    assert_eq!((sample.len(), full.len()), (24, 72));
    let properties = |format: &Affine| {
        let Affine { bits, group, scale } = format;
        [format!("{bits} bits"), format!("groups of {group}"), format!("{scale:?}")]
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
