//! Experts in slots: formats, activations, routed and listed assignments.

use moeflux_compute::{
    Activation, Affine, Bank, BlockScaled, BlockType, DeviceOptions, Error, ExpertGroups,
    ExpertShape, ExpertUse, ExpertUses, Format, GroupScore, Isa, MatrixShape, Op, Router, Scalar,
    ScaledBlocks, Scoring, SharedChoice, Slot, View, open,
};

use crate::harness::{
    AFFINE4, DevicePair, ROW_COUNTS, Random, affine_unit, bits, device, encode, is_full,
    sample_formats, tests_cpu,
};

fn shape(hidden: usize, intermediate: usize, [gate, up, down]: [Format; 3]) -> ExpertShape {
    ExpertShape::new(
        MatrixShape { rows: intermediate, cols: hidden, format: gate },
        MatrixShape { rows: intermediate, cols: hidden, format: up },
        MatrixShape { rows: hidden, cols: intermediate, format: down },
    )
}

/// Experts of one shape.
#[derive(Clone, Copy)]
pub(crate) struct Experts {
    pub(crate) shape: ExpertShape,
    pub(crate) activation: Activation,
    pub(crate) count: usize,
}

impl Experts {
    /// Experts with SwiGLU.
    pub(crate) const fn new(shape: ExpertShape, count: usize) -> Self {
        Self { shape, activation: Activation::SwiGlu, count }
    }

    /// A bank with `count` random experts. Slots are larger than an expert, as in a bank that is
    /// shared by several layers.
    pub(crate) fn fill(&self, pair: &mut DevicePair, random: &mut Random, count: usize) -> Bank {
        let shape = &self.shape;
        let wide = MatrixShape { rows: 2 * shape.up.rows, ..shape.up };
        let stored: Vec<_> = match shape.interleaved {
            true => vec![wide, shape.down],
            false => shape.matrices().collect(),
        };
        let contents = (0..count).map(|_| {
            let mut all = Vec::new();
            for matrix in &stored {
                all.extend(random.matrix(*matrix));
                if let Some(scalar) = shape.output_bias {
                    let biases = random.values(matrix.rows).into_iter();
                    all.extend(biases.flat_map(|x| encode(scalar, x)));
                }
            }
            assert_eq!(all.len(), shape.bytes().unwrap());
            all.extend([0xff; 3]);
            all
        });
        pair.bank(&contents.collect::<Vec<_>>())
    }

    pub(crate) const fn op<'a>(
        &'a self,
        x: View,
        answers: usize,
        uses: ExpertUses<'a>,
        [inner, out]: [View; 2],
    ) -> Op<'a> {
        let Self { shape, activation, count } = self;
        let (activation, experts) = (*activation, *count);
        Op::Experts { x, shape, activation, experts, answers, uses, inner, out }
    }

    /// Inner rows and outputs for a number of assignments.
    pub(crate) fn outputs(&self, pair: &mut DevicePair, count: usize) -> [View; 2] {
        let ExpertShape { up, down, .. } = self.shape;
        [up, down].map(|matrix| pair.nan_filled(count, matrix.rows))
    }

    /// Runs assignments, of which few rows belong to answers. Returns the outputs.
    pub(crate) fn run(&self, pair: &mut DevicePair, x: View, uses: ExpertUses<'_>) -> View {
        let count = match uses {
            ExpertUses::Listed(uses) => uses.len(),
            ExpertUses::Routed { ids, .. } => ids.rows * ids.width,
        };
        let views = self.outputs(pair, count);
        pair.run(&self.op(x, x.few(), uses, views));
        views[1]
    }
}

/// Assignments of `k` experts to every row, sorted by slot, as in a prefill.
pub(crate) fn uses(
    random: &mut Random,
    bank: Bank,
    rows: usize,
    k: usize,
    count: usize,
) -> Vec<ExpertUse> {
    let mut uses = Vec::new();
    for row in 0..rows {
        let first = random.below(count);
        uses.extend((0..k).map(|rank| ExpertUse {
            slot: Slot { bank, index: ((first + rank) % count) as u32 },
            row,
            out_row: row * k + rank,
        }));
    }
    uses.sort_by_key(|u| u.slot);
    uses
}

/// The expert of each output row, as a device chooses it.
pub(crate) fn routed_ids(pair: &mut DevicePair, rows: usize, uses: &[ExpertUse]) -> View {
    let mut ids = vec![0.0; uses.len()];
    for expert_use in uses {
        ids[expert_use.out_row] = expert_use.slot.index as f32;
    }
    pair.dense(rows, &ids)
}

/// Assignments of the expert of each output row, sorted by slot.
fn listed(ids: &[usize], k: usize, slots: &[Slot]) -> Vec<ExpertUse> {
    let assigned =
        |(i, id): (usize, &usize)| ExpertUse { slot: slots[*id], row: i / k, out_row: i };
    let mut uses: Vec<ExpertUse> = ids.iter().enumerate().map(assigned).collect();
    uses.sort_by_key(|u| (u.slot, u.out_row));
    uses
}

#[test]
fn every_format() {
    let mut random = Random::new(51);
    DevicePair::for_each(|pair, exact| {
        for format in pair.formats() {
            let hidden = format.block().cols.max(128);
            let experts = Experts::new(shape(hidden, 256, [format; 3]), 3);
            let bank = experts.fill(pair, &mut random, 3);
            let uses = uses(&mut random, bank, 2, 2, 3);
            let x = pair.random(&mut random, 2, hidden);
            let (inner, out) = (pair.nan_filled(5, 256), pair.nan_filled(4, hidden));
            pair.run(&experts.op(x, x.few(), ExpertUses::Listed(&uses), [inner, out]));
            if exact || !pair.rounds_activations(format) {
                pair.agree(&format!("{format}"), out, 1e-5);
            } else {
                pair.agree_in_norm(&format!("{format}"), out, 2e-2);
            }
        }
    });
}

/// Beside a card, the processor quantizes the inputs of second matrices twice. Inputs of the first
/// ones lose nothing here.
#[test]
fn inputs_of_second_matrices_have_15_bits() {
    let mut random = Random::new(67);
    for isa in Isa::available().into_iter().filter(|_| tests_cpu()) {
        for is_fine in [true, false] {
            let options = DeviceOptions::default().name("cpu").isa(isa.name().to_owned());
            let options = options.threads(2).fine_expert_inputs(is_fine);
            let pair = &mut DevicePair::new(open(&options).unwrap());
            let eight = Format::Affine(Affine { bits: 8, group: 32, scale: Scalar::F16 });
            let [q4_0, q8_0] = [BlockType::Q4_0, BlockType::Q8_0].map(Format::Blocks);
            for (format, output_bias) in [
                (AFFINE4, None),
                (AFFINE4, Some(Scalar::F32)),
                (eight, Some(Scalar::BF16)),
                (Format::MXFP4, Some(Scalar::F32)),
                (q4_0, None),
                (q8_0, Some(Scalar::F32)),
            ] {
                let shape = ExpertShape { output_bias, ..shape(128, 256, [format; 3]) };
                let experts = Experts::new(shape, 4);
                let bank = experts.fill(pair, &mut random, 4);
                for (rows, answers) in [(1, 1), (3, 3), (3, 1), (70, 0)] {
                    let uses = uses(&mut random, bank, rows, 2, 4);
                    let values = random.int8_values(rows * 128);
                    let values: Vec<f32> = values.into_iter().map(|x| x / 4096.0).collect();
                    let x = pair.dense(rows, &values);
                    let views = experts.outputs(pair, rows * 2);
                    pair.run(&experts.op(x, answers, ExpertUses::Listed(&uses), views));
                    let what = format!("{format}, {rows} rows, {output_bias:?}, {is_fine}");
                    pair.agree_in_norm(&what, views[1], if is_fine { 1e-4 } else { 2e-2 });
                }
            }
        }
    }
}

/// In few rows and in many, as GEMV and GEMM compute them; routed ones too.
#[test]
fn experts_without_a_gate() {
    let mut random = Random::new(59);
    DevicePair::for_each(|pair, exact| {
        let plain = Format::Plain(Scalar::BF16);
        for (format, output_bias, activation) in [
            (AFFINE4, None, Activation::Relu2),
            (AFFINE4, Some(Scalar::F32), Activation::GeluTanh),
            (plain, None, Activation::Relu2),
            (plain, None, Activation::Gelu),
            (Format::MXFP4, None, Activation::QuickGelu),
        ] {
            let ExpertShape { up, down, .. } = shape(64, 128, [format; 3]);
            let shape = ExpertShape { output_bias, ..ExpertShape::without_gate(up, down) };
            let experts = Experts { activation, ..Experts::new(shape, 4) };
            let bank = experts.fill(pair, &mut random, 4);
            let slots: Vec<Slot> = (0..4).map(|index| Slot { bank, index }).collect();
            let table = pair.slot_table(&slots);
            for rows in [1, 3, 70] {
                let listed = uses(&mut random, bank, rows, 2, 4);
                let ids = routed_ids(pair, rows, &listed);
                for uses in [ExpertUses::Listed(&listed), ExpertUses::Routed { ids, table }] {
                    let x = pair.random(&mut random, rows, 64);
                    let out = experts.run(pair, x, uses);
                    let what = format!("{format}, {activation:?}, {rows} rows, {output_bias:?}");
                    pair.agree_in_norm(&what, out, if exact { 1e-5 } else { 2e-2 });
                }
            }
        }
    });
}

#[test]
fn gate_up_and_down_of_different_formats() {
    let mut random = Random::new(52);
    let eight = Format::Affine(Affine { bits: 8, group: 32, scale: Scalar::F16 });
    let plain = Format::Plain(Scalar::BF16);
    DevicePair::for_each(|pair, exact| {
        // Blocks of 17, 18 and 144 bytes.
        let [q4_0, q4_k, mxfp4] =
            [BlockType::Q4_0, BlockType::Q4K, BlockType::MXFP4].map(Format::Blocks);
        for formats in [
            [AFFINE4, eight, plain],
            [plain, AFFINE4, eight],
            [eight, plain, AFFINE4],
            [mxfp4, mxfp4, q4_0],
            [q4_0, mxfp4, q4_k],
            [q4_0, q4_0, q4_k],
        ] {
            let inner_width = if formats[2] == q4_k { 256 } else { 192 };
            let width = if formats[0] == mxfp4 { 96 } else { 64 };
            let experts = Experts::new(shape(width, inner_width, formats), 4);
            let bank = experts.fill(pair, &mut random, 4);
            let uses = uses(&mut random, bank, 3, 2, 4);
            let x = pair.random(&mut random, 3, width);
            let out = experts.run(pair, x, ExpertUses::Listed(&uses));
            pair.agree_in_norm(&format!("{formats:?}"), out, if exact { 1e-6 } else { 2e-2 });
        }
    });
}

#[test]
fn any_number_of_experts_per_row() {
    let mut random = Random::new(53);
    DevicePair::for_each(|pair, exact| {
        let experts = Experts::new(shape(64, 64, [AFFINE4; 3]), 32);
        let bank = experts.fill(pair, &mut random, 32);
        // The last case has more assignments than fit the scratch for activations.
        for (rows, k) in [(1, 1), (1, 8), (1, 32), (5, 10), (21, 4)] {
            let uses = uses(&mut random, bank, rows, k, 32);
            let x = pair.random(&mut random, rows, 64);
            let out = experts.run(pair, x, ExpertUses::Listed(&uses));
            let what = format!("{rows} rows, {k} experts");
            pair.agree_in_norm(&what, out, if exact { 1e-6 } else { 2e-2 });
        }
    });
}

#[test]
fn interleaved_gate_up_with_biases_and_each_activation() {
    let mut random = Random::new(56);
    let clamped = Activation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
    DevicePair::for_each(|pair, exact| {
        let affine3 = Format::Affine(Affine { bits: 3, group: 32, scale: Scalar::F32 });
        for (f, format) in [AFFINE4, Format::Plain(Scalar::BF16), affine3].into_iter().enumerate() {
            for (i, activation) in
                [Activation::SwiGlu, Activation::GeGlu, clamped].into_iter().enumerate()
            {
                let biases = [None, Some(Scalar::BF16), Some(Scalar::F32)];
                for (b, output_bias) in biases.into_iter().enumerate() {
                    // Pairs of format, activation and bias; all triples with the complete table.
                    if !is_full() && (f + i + b) % 3 != 0 {
                        continue;
                    }
                    let interleaved = i != 1 || output_bias.is_none();
                    let shape =
                        ExpertShape { interleaved, output_bias, ..shape(64, 128, [format; 3]) };
                    let experts = Experts { shape, activation, count: 3 };
                    let bank = experts.fill(pair, &mut random, 3);
                    let uses = uses(&mut random, bank, 5, 2, 3);
                    let x = pair.random(&mut random, 5, 64);
                    let out = experts.run(pair, x, ExpertUses::Listed(&uses));
                    let what = format!("{format}, {activation:?}, {interleaved}, {output_bias:?}");
                    if exact || !pair.rounds_activations(format) {
                        pair.agree(&what, out, 1e-5);
                    } else {
                        pair.agree_in_norm(&what, out, 2e-2);
                    }
                }
            }
        }
    });
}

#[test]
fn inner_rows_longer_than_workgroup_memory() {
    let mut random = Random::new(58);
    DevicePair::for_each(|pair, exact| {
        for format in [AFFINE4, Format::MXFP4, Format::Plain(Scalar::BF16)] {
            let (hidden, output_bias) =
                if format == AFFINE4 { (64, None) } else { (32, Some(Scalar::F32)) };
            let shape = ExpertShape { output_bias, ..shape(hidden, 24_576, [format; 3]) };
            let experts = Experts::new(shape, 1);
            let bank = experts.fill(pair, &mut random, 1);
            let uses = uses(&mut random, bank, 2, 1, 1);
            let x = pair.random(&mut random, 2, hidden);
            let out = experts.run(pair, x, ExpertUses::Listed(&uses));
            pair.agree_in_norm(&format!("{format}"), out, if exact { 1e-5 } else { 2e-2 });
        }
    });
}

#[test]
fn output_rows_without_an_assignment_are_unchanged() {
    let mut random = Random::new(54);
    DevicePair::for_each(|pair, _| {
        let experts = Experts::new(shape(64, 32, [Format::Plain(Scalar::F32); 3]), 1);
        let bank = experts.fill(pair, &mut random, 1);
        let uses = [ExpertUse { slot: Slot { bank, index: 0 }, row: 1, out_row: 2 }];
        let x = pair.random(&mut random, 2, 64);
        let (inner, out) = (pair.nan_filled(1, 32), pair.random(&mut random, 4, 64));
        for (what, uses) in [("one assignment", &uses[..]), ("no assignment", &[])] {
            pair.run(&experts.op(x, x.few(), ExpertUses::Listed(uses), [inner, out]));
            pair.agree(what, out, 1e-5);
        }
    });
}

#[test]
fn results_do_not_depend_on_threads_or_other_assignments() {
    for (exact, rows) in [(true, 8), (true, 30), (false, 4), (false, 30)] {
        let mut outs = Vec::new();
        for threads in 1..4 {
            let mut random = Random::new(55);
            let mut pair = DevicePair::new(device(Isa::detect(), exact, threads));
            let experts = Experts::new(shape(128, 192, [AFFINE4; 3]), 6);
            let bank = experts.fill(&mut pair, &mut random, 6);
            let uses = uses(&mut random, bank, rows, 4, 6);
            let x = pair.random(&mut random, rows, 128);
            let views @ [_, out] = experts.outputs(&mut pair, 4 * rows);
            let run = |pair: &mut DevicePair, x: View, answers, lists: &[&[ExpertUse]]| {
                pair.device.write(out.buffer, &vec![f32::NAN; 4 * rows * 128]).unwrap();
                for uses in lists {
                    let op = experts.op(x, answers, ExpertUses::Listed(uses), views);
                    pair.device.run(&op).unwrap();
                }
                bits(&pair.read(out))
            };
            let together = run(&mut pair, x, x.few(), &[&uses]);
            let by_slot: Vec<_> = uses.chunk_by(|a, b| a.slot == b.slot).collect();
            assert!(run(&mut pair, x, x.few(), &by_slot) == together, "one expert per op");
            let each: Vec<_> = uses.chunks(1).collect();
            let each = run(&mut pair, x, x.few(), &each);
            let threes: Vec<_> = uses.chunks(3).collect();
            assert!(each == together && run(&mut pair, x, x.few(), &threes) == together);
            // One row of the same kind.
            let row = pair.read(x.slice(3, 1));
            let alone = pair.dense(1, &row);
            let row_uses: Vec<ExpertUse> =
                uses.iter().filter(|u| u.row == 3).map(|u| ExpertUse { row: 0, ..*u }).collect();
            let got = run(&mut pair, alone, x.few().min(1), &[&row_uses]);
            assert!(got[12 * 128..16 * 128] == each[12 * 128..16 * 128]);
            outs.push(together);
        }
        assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

#[test]
fn routed_and_listed_experts_give_the_same_bits() {
    let mut random = Random::new(37);
    let experts = Experts::new(shape(64, 64, [AFFINE4; 3]), 7);
    DevicePair::for_each(|pair, exact| {
        for (rows, k) in [(1, 3), (5, 2), (40, 3)] {
            let banks = [4, 3].map(|count| experts.fill(pair, &mut random, count));
            // The slots of experts are in arbitrary order.
            let slots: Vec<Slot> =
                (0..7).map(|e| Slot { bank: banks[e % 2], index: (e / 2) as u32 }).rev().collect();
            let table = pair.slot_table(&slots);
            let ids: Vec<usize> = (0..rows)
                .flat_map(|row| (0..k).map(move |rank| (row * 5 + rank * 2) % 7))
                .collect();
            let x = pair.random(&mut random, rows, 64);
            let routed_ids = pair.dense(rows, &ids.iter().map(|id| *id as f32).collect::<Vec<_>>());
            let views @ [_, out] = experts.outputs(pair, rows * k);
            let uses = ExpertUses::Routed { ids: routed_ids, table };
            pair.run(&experts.op(x, x.few(), uses, views));
            pair.agree_in_norm("routed", out, if exact { 1e-5 } else { 2e-2 });
            // Listed assignments give the same bits as routed ones.
            let routed = bits(&pair.read(out));
            let uses = listed(&ids, k, &slots);
            pair.run(&experts.op(x, x.few(), ExpertUses::Listed(&uses), views));
            assert_eq!(bits(&pair.read(out)), routed, "{}", pair.device.describe());
        }
    });
}

/// TopK, Experts and Combine, with and without reads between them.
#[test]
fn router_top_k_experts_and_combine() {
    let mut random = Random::new(57);
    DevicePair::for_each(|pair, exact| {
        // Fewer experts than the threads of a workgroup, and more with all router options.
        let eight = Format::Affine(Affine { bits: 8, group: 32, scale: Scalar::F16 });
        let plain = Format::Plain(Scalar::BF16);
        let shapes =
            [(7, 3, 64, AFFINE4), (7, 3, 64, AFFINE4), (300, 8, 96, eight), (64, 5, 64, plain)];
        for (i, (count, k, hidden, format)) in shapes.into_iter().enumerate() {
            // A shared expert has the index `count`, with a gate or without.
            let shared = usize::from(i > 0);
            let (slots, k) = (count + shared, k + shared);
            let experts = Experts::new(shape(hidden, hidden, [format; 3]), count);
            let bank = experts.fill(pair, &mut random, slots);
            let slots: Vec<Slot> =
                (0..slots as u32).rev().map(|index| Slot { bank, index }).collect();
            let table = pair.slot_table(&slots);
            let mut router = Router::softmax(true);
            if count == 300 {
                let values = random.values(count);
                router = Router {
                    scoring: Scoring::Sigmoid,
                    correction: Some(pair.buffer(&values)),
                    groups: Some(ExpertGroups { count: 10, chosen: 4, score: GroupScore::BestTwo }),
                    scale: 2.5,
                    expert_scale: Some(pair.buffer(&values)),
                    ..router
                };
            }
            // A GPU compiles kernels per format and number of rows.
            for rows in if i == 1 { &ROW_COUNTS[..] } else { &[1, 2] } {
                let rows = *rows;
                let gate = (i == 2).then(|| pair.random(&mut random, rows, 1));
                let shared = (i > 0).then_some(SharedChoice { gate });
                let router = Router { shared, ..router };
                let logits = pair.random(&mut random, rows, count);
                let (x, before) =
                    (pair.random(&mut random, rows, hidden), random.values(rows * hidden));
                let mut results = Vec::new();
                for reads in [false, true] {
                    let (ids, weights) = (pair.nan_filled(rows, k), pair.nan_filled(rows, k));
                    let views @ [inner, parts] = experts.outputs(pair, rows * k);
                    let out = pair.dense(rows, &before);
                    pair.run(&Op::TopK { logits, router, ids, weights });
                    if reads {
                        pair.read(ids);
                    }
                    let uses = ExpertUses::Routed { ids, table };
                    pair.run(&experts.op(x, x.few(), uses, views));
                    if reads {
                        pair.read(parts);
                    }
                    pair.run(&Op::Combine { parts, weights, shared: None, add: true, out });
                    pair.agree("ids", ids, 0.0);
                    pair.agree("weights", weights, 1e-4);
                    pair.agree_in_norm("experts", parts, if exact { 1e-5 } else { 2e-2 });
                    pair.agree_in_norm("combined", out, if exact { 1e-4 } else { 2e-2 });
                    results
                        .push([ids, weights, inner, parts, out].map(|view| bits(&pair.read(view))));
                }
                assert!(!exact || results[0] == results[1], "{}", pair.device.describe());
                // NaN logits are an error of the sequence.
                let wrong = pair.dense(rows, &vec![f32::NAN; rows * count]);
                let (ids, weights) = (pair.nan_filled(rows, k), pair.nan_filled(rows, k));
                let views = experts.outputs(pair, rows * k);
                let uses = ExpertUses::Routed { ids, table };
                let device = &mut *pair.device;
                let ran =
                    device.run(&Op::TopK { logits: wrong, router, ids, weights }).and_then(|()| {
                        device.run(&experts.op(x, x.few(), uses, views))?;
                        device.read(ids, &mut vec![0.0; rows * k])
                    });
                assert!(
                    matches!(ran, Err(Error::RouterNan { row: 0 })),
                    "{}",
                    pair.device.describe()
                );
            }
        }
    });
}

#[test]
fn many_rows_of_every_format() {
    let mut random = Random::new(56);
    DevicePair::for_each(|pair, exact| {
        for (i, format) in sample_formats().into_iter().enumerate() {
            // Widths as odd as the format allows, so that the next matrix of the slot is unaligned.
            let (hidden, intermediate) = match format {
                Format::Affine(affine) => (2 * affine_unit(affine), 3 * affine_unit(affine)),
                Format::Plain(_) => (67, 45),
                Format::Blocks(kind) | Format::ScaledBlocks(ScaledBlocks(kind)) => {
                    (kind.block_weights(), kind.block_weights())
                }
                Format::BlockScaled(BlockScaled { element, .. }) if element.bits() == 8 => (67, 45),
                Format::BlockScaled(_) => (70, 46),
            };
            let fused = i % 4 == 1 && format.block().rows == 1;
            let shape = ExpertShape {
                interleaved: fused,
                output_bias: [None, Some(Scalar::BF16), Some(Scalar::F32)][i % 3],
                ..shape(hidden, intermediate, [format; 3])
            };
            let experts = Experts::new(shape, 5);
            let bank = experts.fill(pair, &mut random, 5);
            let uses = uses(&mut random, bank, 41, 2, 5);
            let x = pair.random(&mut random, 41, hidden);
            let out = experts.run(pair, x, ExpertUses::Listed(&uses));
            pair.agree_in_norm(&format!("{format}"), out, if exact { 1e-5 } else { 2e-2 });
        }
    });
}

#[test]
fn experts_with_many_rows_and_with_none() {
    let mut random = Random::new(57);
    let shape = shape(128, 64, [AFFINE4; 3]);
    let experts = Experts { shape, activation: Activation::GeGlu, count: 11 };
    DevicePair::for_each(|pair, exact| {
        let banks = [5, 6].map(|count| experts.fill(pair, &mut random, count));
        let slots: Vec<Slot> = (0..11)
            .map(|e| Slot { bank: banks[(e + 1) % 2], index: (e / 2) as u32 })
            .rev()
            .collect();
        let table = pair.slot_table(&slots);
        let (rows, k) = (150, 3);
        // Every row selects expert 6, no row selects 0, 2 or 10.
        let others = [1, 3, 4, 5, 7, 8, 9];
        let ids: Vec<usize> = (0..rows)
            .flat_map(|row| {
                let first = random.below(if row % 2 == 0 { 7 } else { 2 });
                let mut ids = [others[first], 6, others[(first + 1) % 7]];
                ids.rotate_left(row % 3);
                ids
            })
            .collect();
        let x = pair.random(&mut random, rows, 128);
        let routed_ids = pair.dense(rows, &ids.iter().map(|id| *id as f32).collect::<Vec<_>>());
        let views @ [_, out] = experts.outputs(pair, rows * k);
        let uses = ExpertUses::Routed { ids: routed_ids, table };
        pair.run(&experts.op(x, x.few(), uses, views));
        pair.agree_in_norm("routed", out, if exact { 1e-5 } else { 2e-2 });
        // The bits do not depend on the order and the grouping of assignments.
        let routed = bits(&pair.read(out));
        let uses = listed(&ids, k, &slots);
        let per_expert = uses.chunk_by(|a, b| a.slot == b.slot).collect();
        // On the fast path a single assignment sums in another order, so no expert is split there.
        let split = match exact {
            true => uses.chunks(47).collect(),
            false => uses.chunk_by(|a, b| a.slot.bank == b.slot.bank).collect(),
        };
        for ops in [vec![&uses[..]], split, per_expert] {
            pair.device.write(out.buffer, &vec![f32::NAN; rows * k * 128]).unwrap();
            for uses in &ops {
                let op = experts.op(x, x.few(), ExpertUses::Listed(uses), views);
                pair.device.run(&op).unwrap();
            }
            assert!(
                bits(&pair.read(out)) == routed,
                "{}, in {} ops",
                pair.device.describe(),
                ops.len()
            );
        }
    });
}
