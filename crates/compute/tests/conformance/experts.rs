//! Experts in slots.

use moeflux_compute::{
    Activation, Error, ExpertGroups, ExpertShape, ExpertUse, ExpertUses, Format, Isa, MatrixShape,
    Op, Router, Scalar, Scoring, SharedChoice, Slot, View,
};

use crate::harness::{Both, FOUR, Random, bits, device, encode, formats, some_formats};

fn shape(hidden: usize, intermediate: usize, [gate, up, down]: [Format; 3]) -> ExpertShape {
    ExpertShape::new(
        MatrixShape { rows: intermediate, cols: hidden, format: gate },
        MatrixShape { rows: intermediate, cols: hidden, format: up },
        MatrixShape { rows: hidden, cols: intermediate, format: down },
    )
}

/// A bank with `count` experts. Slots are larger than an expert, as those of a bank that serves several layers.
fn fill(both: &mut Both, random: &mut Random, shape: &ExpertShape, count: usize) -> u16 {
    let len = shape.bytes().unwrap();
    let mut contents = Vec::new();
    for _ in 0..count {
        let mut all = Vec::new();
        let wide = MatrixShape { rows: 2 * shape.gate.rows, ..shape.gate };
        let stored = if shape.interleaved {
            &[wide, shape.down][..]
        } else {
            &[shape.gate, shape.up, shape.down]
        };
        for matrix in stored {
            all.extend(random.matrix(*matrix));
            if let Some(scalar) = shape.output_bias {
                all.extend(random.numbers(matrix.rows).into_iter().flat_map(|x| encode(scalar, x)));
            }
        }
        assert_eq!(all.len(), len);
        all.extend([0xff; 3]);
        contents.push(all);
    }
    both.bank(&contents)
}

/// Every row meets `k` of the experts; sorted by slot, as a prefill is.
fn uses(random: &mut Random, bank: u16, rows: usize, k: usize, count: usize) -> Vec<ExpertUse> {
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

#[test]
fn every_format() {
    let mut random = Random::new(51);
    Both::each(|both, exact| {
        for format in formats() {
            let shape = shape(128, 256, [format; 3]);
            let bank = fill(both, &mut random, &shape, 3);
            let uses = uses(&mut random, bank, 2, 2, 3);
            let x = both.random(&mut random, 2, 128);
            let (inner, out) = (both.poisoned(5, 256), both.poisoned(4, 128));
            both.run(&Op::Experts {
                x,
                shape: &shape,
                activation: Activation::SwiGlu,
                experts: 3,
                uses: ExpertUses::Listed(&uses),
                inner,
                out,
            });
            if exact || !both.rounds(format) {
                both.agree(&format!("{format}"), out, 1e-5);
            } else {
                both.agree_in_sum(&format!("{format}"), out, 2e-2);
            }
        }
    });
}

#[test]
fn matrices_of_different_formats() {
    let mut random = Random::new(52);
    let eight = Format::Affine { bits: 8, group: 32, scale: Scalar::F16 };
    let plain = Format::Plain(Scalar::BF16);
    Both::each(|both, exact| {
        for formats in [[FOUR, eight, plain], [plain, FOUR, eight], [eight, plain, FOUR]] {
            let shape = shape(64, 192, formats);
            let bank = fill(both, &mut random, &shape, 4);
            let uses = uses(&mut random, bank, 3, 2, 4);
            let x = both.random(&mut random, 3, 64);
            let (inner, out) = (both.poisoned(6, 192), both.poisoned(6, 64));
            both.run(&Op::Experts {
                x,
                shape: &shape,
                activation: Activation::SwiGlu,
                experts: 4,
                uses: ExpertUses::Listed(&uses),
                inner,
                out,
            });
            both.agree_in_sum(&format!("{formats:?}"), out, if exact { 1e-6 } else { 2e-2 });
        }
    });
}

#[test]
fn any_number_of_experts_per_row() {
    let mut random = Random::new(53);
    Both::each(|both, exact| {
        let shape = shape(64, 64, [FOUR; 3]);
        let bank = fill(both, &mut random, &shape, 32);
        // The last has more uses than activations have room for.
        for (rows, k) in [(1, 1), (1, 8), (1, 32), (5, 10), (21, 4)] {
            let uses = uses(&mut random, bank, rows, k, 32);
            let x = both.random(&mut random, rows, 64);
            let (inner, out) = (both.poisoned(uses.len(), 64), both.poisoned(uses.len(), 64));
            both.run(&Op::Experts {
                x,
                shape: &shape,
                activation: Activation::SwiGlu,
                experts: 32,
                uses: ExpertUses::Listed(&uses),
                inner,
                out,
            });
            both.agree_in_sum(
                &format!("{rows} rows, {k} experts"),
                out,
                if exact { 1e-6 } else { 2e-2 },
            );
        }
    });
}

#[test]
fn interleaved_with_biases_and_any_activation() {
    let mut random = Random::new(56);
    let clamped = Activation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
    Both::each(|both, exact| {
        for format in [
            FOUR,
            Format::Plain(Scalar::BF16),
            Format::Affine { bits: 3, group: 32, scale: Scalar::F32 },
        ] {
            for (i, activation) in
                [Activation::SwiGlu, Activation::GeGlu, clamped].into_iter().enumerate()
            {
                for output_bias in [None, Some(Scalar::BF16), Some(Scalar::F32)] {
                    let interleaved = i != 1 || output_bias.is_none();
                    let shape =
                        ExpertShape { interleaved, output_bias, ..shape(64, 128, [format; 3]) };
                    let bank = fill(both, &mut random, &shape, 3);
                    let uses = uses(&mut random, bank, 5, 2, 3);
                    let x = both.random(&mut random, 5, 64);
                    let (inner, out) = (both.poisoned(10, 128), both.poisoned(10, 64));
                    both.run(&Op::Experts {
                        x,
                        shape: &shape,
                        activation,
                        experts: 3,
                        uses: ExpertUses::Listed(&uses),
                        inner,
                        out,
                    });
                    let what = format!("{format}, {activation:?}, {interleaved}, {output_bias:?}");
                    if exact || !both.rounds(format) {
                        both.agree(&what, out, 1e-5);
                    } else {
                        both.agree_in_sum(&what, out, 2e-2);
                    }
                }
            }
        }
    });
}

#[test]
fn inner_rows_longer_than_what_workgroups_remember() {
    let mut random = Random::new(58);
    Both::each(|both, exact| {
        for format in [FOUR, Format::MXFP4, Format::Plain(Scalar::BF16)] {
            let shape =
                ExpertShape { output_bias: Some(Scalar::F32), ..shape(32, 24_576, [format; 3]) };
            let shape = match format {
                FOUR => ExpertShape { output_bias: None, ..self::shape(64, 24_576, [format; 3]) },
                _ => shape,
            };
            let bank = fill(both, &mut random, &shape, 1);
            let uses = uses(&mut random, bank, 2, 1, 1);
            let x = both.random(&mut random, 2, shape.gate.cols);
            let (inner, out) = (both.poisoned(2, 24_576), both.poisoned(2, shape.gate.cols));
            both.run(&Op::Experts {
                x,
                shape: &shape,
                activation: Activation::SwiGlu,
                experts: 1,
                uses: ExpertUses::Listed(&uses),
                inner,
                out,
            });
            both.agree_in_sum(&format!("{format}"), out, if exact { 1e-5 } else { 2e-2 });
        }
    });
}

#[test]
fn parts_without_a_use_are_kept() {
    let mut random = Random::new(54);
    Both::each(|both, _| {
        let shape = shape(64, 32, [Format::Plain(Scalar::F32); 3]);
        let bank = fill(both, &mut random, &shape, 1);
        let uses = [ExpertUse { slot: Slot { bank, index: 0 }, row: 1, out_row: 2 }];
        let x = both.random(&mut random, 2, 64);
        let (inner, out) = (both.poisoned(1, 32), both.random(&mut random, 4, 64));
        both.run(&Op::Experts {
            x,
            shape: &shape,
            activation: Activation::SwiGlu,
            experts: 1,
            uses: ExpertUses::Listed(&uses),
            inner,
            out,
        });
        both.agree("one part", out, 1e-5);
        both.run(&Op::Experts {
            x,
            shape: &shape,
            activation: Activation::SwiGlu,
            experts: 1,
            uses: ExpertUses::Listed(&[]),
            inner,
            out,
        });
        both.agree("none", out, 1e-5);
    });
}

#[test]
fn neither_threads_nor_other_uses_change_a_bit() {
    // On the fast path, quants sum in another order where an expert has more than four uses.
    for (exact, rows) in [(true, 8), (true, 30), (false, 4), (false, 30)] {
        let mut outs = Vec::new();
        for threads in 1..4 {
            let mut random = Random::new(55);
            let mut both = Both::new(device(Isa::detect(), exact, threads));
            let shape = shape(128, 192, [FOUR; 3]);
            let bank = fill(&mut both, &mut random, &shape, 6);
            let uses = uses(&mut random, bank, rows, 4, 6);
            let x = both.random(&mut random, rows, 128);
            let (inner, out) = (both.poisoned(4 * rows, 192), both.poisoned(4 * rows, 128));
            let run = |both: &mut Both, x: View, lists: &[&[ExpertUse]]| {
                both.device.write(out.buffer, &vec![f32::NAN; 4 * rows * 128]).unwrap();
                for uses in lists {
                    let (shape, uses) = (&shape, ExpertUses::Listed(uses));
                    let op = Op::Experts {
                        x,
                        shape,
                        activation: Activation::SwiGlu,
                        experts: 6,
                        uses,
                        inner,
                        out,
                    };
                    both.device.run(&op).unwrap();
                }
                let mut numbers = vec![0.0; 4 * rows * 128];
                both.device.read(out, &mut numbers).unwrap();
                bits(&numbers)
            };
            let together = run(&mut both, x, &[&uses]);
            let by_slot: Vec<_> = uses.chunk_by(|a, b| a.slot == b.slot).collect();
            assert!(run(&mut both, x, &by_slot) == together, "an expert at a time");
            let each: Vec<_> = uses.chunks(1).collect();
            let each = run(&mut both, x, &each);
            if exact || rows <= 4 {
                let threes: Vec<_> = uses.chunks(3).collect();
                assert!(each == together && run(&mut both, x, &threes) == together);
            }
            // A row alone, as when it is decoded.
            let row = both.read(x.slice(3, 1));
            let alone = both.dense(1, &row);
            let of_row: Vec<ExpertUse> =
                uses.iter().filter(|u| u.row == 3).map(|u| ExpertUse { row: 0, ..*u }).collect();
            let got = run(&mut both, alone, &[&of_row]);
            assert!(got[12 * 128..16 * 128] == each[12 * 128..16 * 128]);
            outs.push(together);
        }
        assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

#[test]
fn a_router_names_the_experts() {
    let mut random = Random::new(37);
    let matrix = |rows, cols| MatrixShape { rows, cols, format: FOUR };
    let shape = ExpertShape::new(matrix(64, 64), matrix(64, 64), matrix(64, 64));
    Both::each(|both, exact| {
        for (rows, k) in [(1, 3), (5, 2), (40, 3)] {
            let banks = [fill(both, &mut random, &shape, 4), fill(both, &mut random, &shape, 3)];
            // Experts lie in any order in their banks.
            let slots: Vec<Slot> =
                (0..7).map(|e| Slot { bank: banks[e % 2], index: (e / 2) as u32 }).rev().collect();
            let table = both.slot_table(&slots);
            let ids: Vec<usize> = (0..rows)
                .flat_map(|row| (0..k).map(move |rank| (row * 5 + rank * 2) % 7))
                .collect();
            let x = both.random(&mut random, rows, 64);
            let of_router = both.dense(rows, &ids.iter().map(|id| *id as f32).collect::<Vec<_>>());
            let (inner, out) = (both.poisoned(rows * k, 64), both.poisoned(rows * k, 64));
            let uses = ExpertUses::Routed { ids: of_router, table };
            both.run(&Op::Experts {
                x,
                shape: &shape,
                activation: Activation::SwiGlu,
                experts: 7,
                uses,
                inner,
                out,
            });
            let tolerance = if exact { 1e-5 } else { 2e-2 };
            both.agree_in_sum("routed", out, tolerance);
            // A list of the same uses gives the same bits.
            let routed = bits(&both.read(out));
            let mut uses: Vec<ExpertUse> = ids
                .iter()
                .enumerate()
                .map(|(part, id)| ExpertUse { slot: slots[*id], row: part / k, out_row: part })
                .collect();
            uses.sort_by_key(|u| (u.slot, u.out_row));
            let uses = ExpertUses::Listed(&uses);
            both.run(&Op::Experts {
                x,
                shape: &shape,
                activation: Activation::SwiGlu,
                experts: 7,
                uses,
                inner,
                out,
            });
            assert_eq!(bits(&both.read(out)), routed, "{}", both.device.describe());
        }
    });
}

/// The choice, the experts and their sum in one go, and with a look at each between them.
#[test]
fn a_router_chooses_and_its_experts_follow() {
    let mut random = Random::new(57);
    Both::each(|both, exact| {
        // Fewer experts than a workgroup has threads, and more with all that a router knows.
        let eight = Format::Affine { bits: 8, group: 32, scale: Scalar::F16 };
        let plain = Format::Plain(Scalar::BF16);
        let shapes = [(7, 3, 64, FOUR), (7, 3, 64, FOUR), (300, 8, 96, eight), (64, 5, 64, plain)];
        for (i, (count, k, hidden, format)) in shapes.into_iter().enumerate() {
            // A shared expert, number `count`, comes behind them, with a gate or without.
            let gate = (i == 2).then(|| both.random(&mut random, 1, 1));
            let shared = (i > 0).then_some(SharedChoice { gate });
            let (slots, k) =
                (count + usize::from(shared.is_some()), k + usize::from(shared.is_some()));
            let matrix = MatrixShape { rows: hidden, cols: hidden, format };
            let shape = ExpertShape::new(matrix, matrix, matrix);
            let bank = fill(both, &mut random, &shape, slots);
            let slots: Vec<Slot> =
                (0..slots as u32).rev().map(|index| Slot { bank, index }).collect();
            let table = both.slot_table(&slots);
            let mut router = Router { shared, ..Router::softmax(true) };
            if count == 300 {
                let numbers = random.numbers(count);
                router = Router {
                    scoring: Scoring::Sigmoid,
                    correction: Some(both.numbers(&numbers)),
                    groups: Some(ExpertGroups { count: 10, chosen: 4 }),
                    scale: 2.5,
                    expert_scale: Some(both.numbers(&numbers)),
                    ..router
                };
            }
            let logits = both.random(&mut random, 1, count);
            let (x, before) = (both.random(&mut random, 1, hidden), random.numbers(hidden));
            let mut seen = Vec::new();
            for looks in [false, true] {
                let (ids, weights) = (both.poisoned(1, k), both.poisoned(1, k));
                let (inner, parts) = (both.poisoned(k, hidden), both.poisoned(k, hidden));
                let out = both.dense(1, &before);
                both.run(&Op::TopK { logits, router, ids, weights });
                if looks {
                    both.read(ids);
                }
                let uses = ExpertUses::Routed { ids, table };
                let activation = Activation::SwiGlu;
                both.run(&Op::Experts {
                    x,
                    shape: &shape,
                    activation,
                    experts: count,
                    uses,
                    inner,
                    out: parts,
                });
                if looks {
                    both.read(parts);
                }
                both.run(&Op::Combine { parts, weights, shared: None, add: true, out });
                both.agree("ids", ids, 0.0);
                both.agree("weights", weights, 1e-4);
                both.agree_in_sum("experts", parts, if exact { 1e-5 } else { 2e-2 });
                both.agree_in_sum("their sum", out, if exact { 1e-4 } else { 2e-2 });
                seen.push([ids, weights, inner, parts, out].map(|view| bits(&both.read(view))));
            }
            assert!(!exact || seen[0] == seen[1], "{}", both.device.describe());
            // A router that has no choice says so.
            let wrong = both.dense(1, &vec![f32::NAN; count]);
            let (ids, weights) = (both.poisoned(1, k), both.poisoned(1, k));
            let (inner, out) = (both.poisoned(k, hidden), both.poisoned(k, hidden));
            let uses = ExpertUses::Routed { ids, table };
            let device = &mut *both.device;
            let ran =
                device.run(&Op::TopK { logits: wrong, router, ids, weights }).and_then(|()| {
                    device.run(&Op::Experts {
                        x,
                        shape: &shape,
                        activation: Activation::SwiGlu,
                        experts: count,
                        uses,
                        inner,
                        out,
                    })?;
                    device.read(ids, &mut vec![0.0; k])
                });
            assert!(matches!(ran, Err(Error::RouterNan { row: 0 })), "{}", both.device.describe());
        }
    });
}

#[test]
fn many_rows_of_every_format() {
    let mut random = Random::new(56);
    Both::each(|both, exact| {
        for (i, format) in some_formats().into_iter().enumerate() {
            // Widths as odd as the format allows: what lies behind such a matrix in its slot begins anywhere.
            let (hidden, intermediate) = match format {
                Format::Affine { group, .. } => (2 * usize::from(group), 3 * usize::from(group)),
                Format::Plain(_) => (67, 45),
                Format::Scaled { element, .. } if element.bits() == 8 => (67, 45),
                Format::Scaled { .. } => (70, 46),
            };
            let fused = i % 4 == 1 && format.block_rows() == 1;
            let shape = ExpertShape {
                interleaved: fused,
                output_bias: [None, Some(Scalar::BF16), Some(Scalar::F32)][i % 3],
                ..shape(hidden, intermediate, [format; 3])
            };
            let bank = fill(both, &mut random, &shape, 5);
            let uses = uses(&mut random, bank, 41, 2, 5);
            let x = both.random(&mut random, 41, hidden);
            let (inner, out) = (both.poisoned(82, intermediate), both.poisoned(82, hidden));
            both.run(&Op::Experts {
                x,
                shape: &shape,
                activation: Activation::SwiGlu,
                experts: 5,
                uses: ExpertUses::Listed(&uses),
                inner,
                out,
            });
            both.agree_in_sum(&format!("{format}"), out, if exact { 1e-5 } else { 2e-2 });
        }
    });
}

#[test]
fn experts_that_many_rows_and_none_choose() {
    let mut random = Random::new(57);
    let matrix = |rows, cols| MatrixShape { rows, cols, format: FOUR };
    let shape = ExpertShape::new(matrix(64, 128), matrix(64, 128), matrix(128, 64));
    let activation = Activation::GeGlu;
    Both::each(|both, exact| {
        let banks = [fill(both, &mut random, &shape, 5), fill(both, &mut random, &shape, 6)];
        let slots: Vec<Slot> = (0..11)
            .map(|e| Slot { bank: banks[(e + 1) % 2], index: (e / 2) as u32 })
            .rev()
            .collect();
        let table = both.slot_table(&slots);
        let (rows, k) = (150, 3);
        // Every row chooses expert 6, none chooses 0, 2 or 10.
        let others = [1, 3, 4, 5, 7, 8, 9];
        let ids: Vec<usize> = (0..rows)
            .flat_map(|row| {
                let first = random.below(if row % 2 == 0 { 7 } else { 2 });
                let mut ids = [others[first], 6, others[(first + 1) % 7]];
                ids.rotate_left(row % 3);
                ids
            })
            .collect();
        let x = both.random(&mut random, rows, 128);
        let of_router = both.dense(rows, &ids.iter().map(|id| *id as f32).collect::<Vec<_>>());
        let (inner, out) = (both.poisoned(rows * k, 64), both.poisoned(rows * k, 128));
        let uses = ExpertUses::Routed { ids: of_router, table };
        both.run(&Op::Experts { x, shape: &shape, activation, experts: 11, uses, inner, out });
        let tolerance = if exact { 1e-5 } else { 2e-2 };
        both.agree_in_sum("routed", out, tolerance);
        // However the uses come, the bits are the same.
        let routed = bits(&both.read(out));
        let mut uses: Vec<ExpertUse> = ids
            .iter()
            .enumerate()
            .map(|(part, id)| ExpertUse { slot: slots[*id], row: part / k, out_row: part })
            .collect();
        uses.sort_by_key(|u| (u.slot, u.out_row));
        let of_one_expert = uses.chunk_by(|a, b| a.slot == b.slot).collect();
        // A use that a cut leaves alone is summed in another order on the fast path: there no cut parts an expert's.
        let in_pieces = match exact {
            true => uses.chunks(47).collect(),
            false => uses.chunk_by(|a, b| a.slot.bank == b.slot.bank).collect(),
        };
        for ops in [vec![&uses[..]], in_pieces, of_one_expert] {
            both.device.write(out.buffer, &vec![f32::NAN; rows * k * 128]).unwrap();
            for uses in &ops {
                let uses = ExpertUses::Listed(uses);
                both.device
                    .run(&Op::Experts {
                        x,
                        shape: &shape,
                        activation,
                        experts: 11,
                        uses,
                        inner,
                        out,
                    })
                    .unwrap();
            }
            assert!(
                bits(&both.read(out)) == routed,
                "{}, in {} ops",
                both.device.describe(),
                ops.len()
            );
        }
    });
}
