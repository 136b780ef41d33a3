//! Tables of FP8 rows: with scales in every layout, logits are those of the same values in BF16.

use std::{fs, ops::ControlFlow, path::Path};

use moeflux::{Checkpoint, Engine, EngineOptions, experts::Access, tools::pack};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::common::{
    Golden, TensorData, copy_golden, exact, feed, few_slots, read_tensors, write_tensors,
};

const NAME: &str = "qwen4_exp_hub";
const TABLE: &str = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";
/// Shards of the table, rows of each, elements of a row.
const SHARDS: usize = 4;
const ROWS: usize = 576;
const WIDTH: usize = 4;

/// Scales of a table: powers of two.
struct Scales {
    what: &'static str,
    /// Suffix of the tensor's name.
    suffix: &'static str,
    dtype: Dtype,
    /// Whether each shard has a tensor.
    by_shard: bool,
    /// Shape of a tensor.
    shape: &'static [usize],
    /// Rows and elements that share a scale.
    block: [usize; 2],
    /// Whether the config has the blocks.
    in_config: bool,
}

const LAYOUTS: [Scales; 6] = [
    Scales {
        what: "one scale",
        suffix: "weight_scale",
        dtype: Dtype::F32,
        by_shard: false,
        shape: &[],
        block: [SHARDS * ROWS, WIDTH],
        in_config: false,
    },
    Scales {
        what: "a scale per shard",
        suffix: "weight_scale",
        dtype: Dtype::F32,
        by_shard: false,
        shape: &[SHARDS],
        block: [ROWS, WIDTH],
        in_config: false,
    },
    Scales {
        what: "a scale per row",
        suffix: "weight_scale",
        dtype: Dtype::BF16,
        by_shard: false,
        shape: &[SHARDS * ROWS, 1],
        block: [1, WIDTH],
        in_config: false,
    },
    Scales {
        what: "blocks of the table",
        suffix: "weight_scale_inv",
        dtype: Dtype::F32,
        by_shard: false,
        shape: &[24, 2],
        block: [100, 2],
        in_config: true,
    },
    Scales {
        what: "a tensor with a scale for each shard",
        suffix: "weight_scale",
        dtype: Dtype::F32,
        by_shard: true,
        shape: &[1],
        block: [ROWS, WIDTH],
        in_config: false,
    },
    Scales {
        what: "groups of a row in tensors of shards",
        suffix: "weight_scale_inv",
        dtype: Dtype::F8_E8M0,
        by_shard: true,
        shape: &[ROWS, 2],
        block: [1, 3],
        in_config: true,
    },
];

impl Scales {
    /// Index of the row of blocks, and of the block in it.
    fn block(&self, row: usize, column: usize) -> [usize; 2] {
        let [rows, columns] = self.block;
        let in_shard = row % ROWS;
        let row = if self.by_shard { row / ROWS * ROWS + in_shard / rows } else { row / rows };
        [row, column / columns]
    }

    fn exponent([row, column]: [usize; 2]) -> i32 {
        (row * 5 + column * 3) as i32 % 7 - 3
    }

    /// The scale of an element.
    fn value(&self, row: usize, column: usize) -> f32 {
        2f32.powi(Self::exponent(self.block(row, column)))
    }

    /// Tensor of the scales of rows `first..first + rows`.
    fn tensor(&self, first: usize, rows: usize) -> TensorData {
        let [block_rows, block_columns] = self.block;
        let mut bytes = Vec::new();
        for row in (first..first + rows).step_by(block_rows) {
            for column in (0..WIDTH).step_by(block_columns) {
                let value = self.value(row, column);
                match self.dtype {
                    Dtype::F32 => bytes.extend(value.to_le_bytes()),
                    Dtype::BF16 => bytes.extend(&value.to_le_bytes()[2..]),
                    Dtype::F8_E8M0 => bytes.push((value.to_bits() >> 23) as u8),
                    other => panic!("{other:?}"),
                }
            }
        }
        TensorData { dtype: self.dtype, shape: self.shape.to_vec(), bytes }
    }
}

/// Code of an element in FP8, and its value.
fn element(row: usize, column: usize) -> (u8, f32) {
    let i = row * WIDTH + column;
    let (negative, exponent, mantissa) = (i.is_multiple_of(3), i * 7 % 5 + 5, i * 11 % 8);
    let value = (8 + mantissa) as f32 * 2f32.powi(exponent as i32 - 10);
    let sign = if negative { -1.0 } else { 1.0 };
    (u8::from(negative) << 7 | (exponent << 3 | mantissa) as u8, sign * value)
}

/// Writes the golden with another table, in FP8 if `is_fp8`, else in BF16.
fn write(folder: &Path, scales: &Scales, is_fp8: bool) {
    fs::create_dir(folder).unwrap();
    copy_golden(NAME, folder);
    let path = folder.join("model.safetensors");
    let mut tensors = read_tensors(&path);
    for shard in 0..SHARDS {
        let (dtype, mut bytes) = (if is_fp8 { Dtype::F8_E4M3 } else { Dtype::BF16 }, Vec::new());
        for (row, column) in (0..ROWS * WIDTH).map(|i| (shard * ROWS + i / WIDTH, i % WIDTH)) {
            let (code, value) = element(row, column);
            let value = (value * scales.value(row, column)).to_le_bytes();
            assert_eq!(value[..2], [0, 0], "it is exact in BF16");
            if is_fp8 { bytes.push(code) } else { bytes.extend(&value[2..]) }
        }
        let name = format!("{TABLE}.shard_{shard}.weight");
        if is_fp8 && scales.by_shard {
            let of_shard = format!("{TABLE}.shard_{shard}.{}", scales.suffix);
            tensors.insert(of_shard, scales.tensor(shard * ROWS, ROWS));
        }
        tensors.insert(name, TensorData { dtype, shape: vec![ROWS, WIDTH], bytes });
    }
    if is_fp8 && !scales.by_shard {
        let name = format!("{TABLE}.{}", scales.suffix);
        tensors.insert(name, scales.tensor(0, SHARDS * ROWS));
    }
    write_tensors(&path, &tensors);
    if scales.in_config {
        let path = folder.join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let size = scales.block;
        config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": size});
        fs::write(path, config.to_string()).unwrap();
    }
}

/// Logits of a prompt, and of its last tokens one by one.
fn logits(folder: &Path, access: Access, prompt: &[u32]) -> Vec<f32> {
    let options = EngineOptions::default()
        .memory(few_slots(3))
        .device(exact("cpu"))
        .reads(moeflux::experts::ReadOptions::default().access(access));
    let engine = Engine::open(Checkpoint::open(folder).unwrap(), options, &mut |_, _| {}).unwrap();
    let mut session = engine.session().unwrap();
    let (first, rest) = prompt.split_at(prompt.len() - 3);
    let mut logits = feed(&mut session, first, None);
    rest.iter().for_each(|token| logits.extend(feed(&mut session, &[*token], None)));
    logits
}

#[test]
fn fp8_tables_have_the_logits_of_their_values() {
    let prompt = Golden::read(NAME).prompt();
    for scales in &LAYOUTS {
        let temp = tempfile::tempdir().unwrap();
        let [plain, fp8, packed] = ["plain", "fp8", "packed"].map(|name| temp.path().join(name));
        write(&plain, scales, false);
        write(&fp8, scales, true);
        let mut go = |_, _| ControlFlow::Continue(());
        pack(&Checkpoint::open(&fp8).unwrap(), &packed, &mut go).unwrap();
        let expected = logits(&plain, Access::Buffered, &prompt);
        for folder in [&fp8, &packed] {
            for access in [Access::Buffered, Access::Direct] {
                let got = logits(folder, access, &prompt);
                assert!(got == expected, "{}: other bits, {access:?}", scales.what);
            }
        }
    }
}
