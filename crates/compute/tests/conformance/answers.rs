//! Rows of answers and of prompts: the bits of each depend on no other row of a product.

use moeflux_compute::{
    Affine, BlockType, ExpertShape, ExpertUses, Format, MatrixShape, Op, Scalar,
};

use crate::{
    experts::{Experts, uses},
    harness::{DevicePair, Random, bits},
};

/// Rows of the largest product: more than one GEMM and one GEMV take at once.
const ROWS: usize = 13;

/// First row, rows and leading rows of answers of products of the same rows of activations.
const PRODUCTS: [[usize; 3]; 10] = [
    [0, 13, 0],
    [0, 13, 13],
    [0, 13, 5],
    [12, 1, 0],
    [3, 2, 0],
    [5, 4, 0],
    [2, 9, 1],
    [0, 6, 4],
    [4, 7, 6],
    [7, 1, 1],
];

fn formats() -> Vec<Format> {
    let affine = |bits| Format::Affine(Affine { bits, group: 64, scale: Scalar::BF16 });
    let blocks = [BlockType::Q4_0, BlockType::Q8_0, BlockType::Q4K, BlockType::IQ3S];
    let others = [Format::MXFP4, Format::NVFP4, Format::Plain(Scalar::BF16)];
    let plain = Format::Plain(Scalar::F32);
    [&[2, 3, 4, 8].map(affine)[..], &blocks.map(Format::Blocks), &others, &[plain]].concat()
}

/// Asserts that a row of [`PRODUCTS`] has the bits of its kind, given a function that computes rows
/// and returns the bits of each.
fn assert_independent(what: &str, mut run: impl FnMut([usize; 3]) -> Vec<Vec<u32>>) {
    let prompt = run([0, ROWS, 0]);
    let answers: Vec<_> = (0..ROWS).flat_map(|row| run([row, 1, 1])).collect();
    for product in PRODUCTS {
        let [first, _, count] = product;
        for (i, row) in run(product).into_iter().enumerate() {
            let expected = if i < count { &answers } else { &prompt };
            assert!(row == expected[first + i], "{what}: row {i} of {product:?}");
        }
    }
}

#[test]
fn rows_of_a_product_have_the_bits_of_their_kind() {
    let mut random = Random::new(71);
    DevicePair::for_each_fast(|pair| {
        if pair.is_fast_gpu() {
            return;
        }
        for format in formats() {
            let shape = MatrixShape { rows: 70, cols: 768, format };
            let weight = pair.weight(&mut random, shape);
            let (x, out) = (pair.random(&mut random, ROWS, 768), pair.nan_filled(ROWS, 70));
            assert_independent(&format.to_string(), |[first, rows, answers]| {
                let (x, out) = (x.slice(first, rows), out.slice(first, rows));
                let (bias, exact) = (None, false);
                pair.run(&Op::MatMul { x, weight, bias, exact, answers, out });
                pair.read(out).chunks(70).map(bits).collect()
            });
        }
    });
}

#[test]
fn rows_of_experts_have_the_bits_of_their_kind() {
    const K: usize = 3;
    let mut random = Random::new(72);
    DevicePair::for_each_fast(|pair| {
        if pair.is_fast_gpu() {
            return;
        }
        for format in formats() {
            let matrix = MatrixShape { rows: 256, cols: 256, format };
            let shape = ExpertShape::new(matrix, matrix, matrix);
            let experts = Experts::new(shape, 4);
            let bank = experts.fill(pair, &mut random, 4);
            let all = uses(&mut random, bank, ROWS, K, 4);
            let x = pair.random(&mut random, ROWS, 256);
            let [inner, out] = experts.outputs(pair, ROWS * K);
            assert_independent(&format.to_string(), |[first, rows, answers]| {
                let rows = first..first + rows;
                let mut uses = all.clone();
                uses.retain(|of_expert| rows.contains(&of_expert.row));
                for of_expert in &mut uses {
                    of_expert.row -= first;
                    of_expert.out_row -= first * K;
                }
                let out = out.slice(first * K, rows.len() * K);
                let (x, uses) = (x.slice(first, rows.len()), ExpertUses::Listed(&uses));
                pair.run(&experts.op(x, answers, uses, [inner, out]));
                pair.read(out).chunks(K * 256).map(bits).collect()
            });
        }
    });
}
