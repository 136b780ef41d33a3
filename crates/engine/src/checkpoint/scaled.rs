//! Small floats with a scale per block, in the layouts that they are published in.

use moeflux_compute::{BlockScale, Element, Format};

use super::{Checkpoint, Stack, TensorInfo, Wanted};
use crate::base::error::Error;

/// The modes of mlx whose scales are bytes, and the bits and group size that each of them has.
const MODES: [(&str, Format, usize, usize); 3] = [
    ("mxfp4", Format::MXFP4, 4, 32),
    ("nvfp4", Format::NVFP4, 4, 16),
    ("mxfp8", Format::MXFP8, 8, 32),
];

impl Checkpoint {
    /// MLX: `.weight` of elements packed in words of 32 bits, `.scales` of bytes, no biases.
    pub(super) fn microscaled(&self, wanted: &Wanted<'_>, t: &TensorInfo) -> Result<Stack, Error> {
        let &Wanted { name, weight, rows, cols, .. } = wanted;
        let scales = self.tensor(&format!("{name}.scales"))?;
        let global = format!("{name}.global_scale");
        if self.has(&global) {
            let problem =
                format!("it has a scale for the whole tensor, {global}, which is not supported");
            return Err(self.tensor_error(weight, problem));
        }
        // The shapes say it all: each mode has its own bytes per row.
        let fits = |format: &Format, group: usize| {
            let (row, scale_row) = (format.row_bytes(cols), format.row_scale_bytes(cols));
            t.shape == wanted.tensor(&[rows, row / 4])
                && row.is_multiple_of(4)
                && cols.is_multiple_of(group)
                && scales.shape == wanted.tensor(&[rows, scale_row])
        };
        let misfit = |what: &str| {
            self.tensor_error(
                weight,
                format!(
                    "{what}: weight {:?}, scales {:?} {}, for {rows} x {cols} as config.json asks",
                    t.shape, scales.shape, scales.dtype
                ),
            )
        };
        let Some((mode, format, bits, group)) =
            MODES.into_iter().find(|(_, format, _, group)| fits(format, *group))
        else {
            return Err(misfit("the quantised shapes fit none of mxfp4, nvfp4 and mxfp8"));
        };
        self.quantization.agree(name, mode, bits, group).map_err(|p| misfit(&p))?;
        self.stack_of(wanted, format, &[t, scales])
    }

    /// FP8 with a scale per block, as DeepSeek-V3 introduced it: the weights' tensor, and one whose name is its with
    /// `_scale_inv` at the end. In spite of that name a weight is element *times* scale.
    pub(super) fn fp8(&self, wanted: &Wanted<'_>, t: &TensorInfo) -> Result<Stack, Error> {
        let &Wanted { weight, rows, cols, .. } = wanted;
        let scales_name = format!("{weight}_scale_inv");
        if !self.has(&scales_name) {
            let problem = format!(
                "it is F8_E4M3, but there is no {scales_name}: of FP8 only the kind with a scale per block is \
                 supported"
            );
            return Err(self.tensor_error(weight, problem));
        }
        let scales = self.tensor(&scales_name)?;
        let scale = match scales.dtype.as_str() {
            "F8_E8M0" => BlockScale::E8M0,
            _ => BlockScale::Plain(self.scalar(&scales_name, scales)?),
        };
        let [block_rows, block_cols] = self.quantization.fp8_block();
        self.shaped(weight, t, &wanted.tensor(&[rows, cols]))?;
        let blocks = [rows.div_ceil(block_rows.into()), cols.div_ceil(block_cols.into())];
        if scales.shape != wanted.tensor(&blocks) {
            let problem = format!(
                "its shape is {:?}: {rows} x {cols} weights in blocks of {block_rows} x {block_cols} (see \
                 \"weight_block_size\" in config.json) need {:?}",
                scales.shape,
                wanted.tensor(&blocks)
            );
            return Err(self.tensor_error(&scales_name, problem));
        }
        let format = Format::Scaled { element: Element::E4M3, block_rows, block_cols, scale };
        self.stack_of(wanted, format, &[t, scales])
    }

    /// A stack of MXFP4 matrices as OpenAI publishes them: `name_blocks` of bytes, `[count, rows, cols / 32, 16]`, and
    /// `name_scales` of bytes, `[count, rows, cols / 32]`. Otherwise as [`Checkpoint::stacked`].
    ///
    /// # Errors
    /// One of the tensors is missing or of another shape or type.
    pub(crate) fn stacked_blocks(
        &self,
        name: &str,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Stack, Error> {
        let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
        let wanted = Wanted { name, weight: &blocks, count: Some(count), rows, cols };
        if !cols.is_multiple_of(32) {
            let problem = format!(
                "{cols} inputs, as config.json asks, are not a whole number of blocks of 32"
            );
            return Err(self.tensor_error(&blocks, problem));
        }
        let bytes = |name: &str, shape: &[usize]| {
            let t = self.tensor(name)?;
            if t.dtype != "U8" {
                return Err(
                    self.tensor_error(name, format!("its type is {}, MXFP4 has U8", t.dtype))
                );
            }
            self.shaped(name, t, &wanted.tensor(shape)).map(|()| t)
        };
        let tensors =
            [bytes(&blocks, &[rows, cols / 32, 16])?, bytes(&scales, &[rows, cols / 32])?];
        self.stack_of(&wanted, Format::MXFP4, &tensors)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, path::Path};

    use serde_json::{Value, json};

    use super::{super::Source, *};

    /// A checkpoint with these tensors, all bytes of which are zero.
    fn checkpoint(quantization: &Value, tensors: &[(&str, &str, &[usize])]) -> Checkpoint {
        let (mut header, mut at) = (serde_json::Map::new(), 0);
        for (name, dtype, shape) in tensors {
            let size = match *dtype {
                "U8" | "F8_E4M3" | "F8_E8M0" => 1,
                "BF16" => 2,
                _ => 4,
            };
            let end = at + size * shape.iter().product::<usize>();
            header.insert(
                (*name).into(),
                json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}),
            );
            at = end;
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + at, 0);
        let config = json!({"quantization": quantization}).to_string().into_bytes();
        let files = vec![Source::binary("model.safetensors", file.leak())];
        Checkpoint::assemble(Path::new("folder"), files, HashMap::from([("config.json", config)]))
            .unwrap()
    }

    fn says<T>(result: Result<T, Error>, parts: &[&str]) {
        let message = result.err().unwrap().to_string();
        assert!(
            parts.iter().all(|part| message.contains(part)),
            "{message:?} does not contain {parts:?}"
        );
    }

    #[test]
    fn modes_of_mlx_follow_from_the_shapes() {
        let global = json!({"mode": "affine", "bits": 4, "group_size": 64});
        for (words, scales, format) in
            [(24, 6, Format::MXFP4), (24, 12, Format::NVFP4), (48, 6, Format::MXFP8)]
        {
            let c = checkpoint(
                &global,
                &[("a.weight", "U32", &[5, words]), ("a.scales", "U8", &[5, scales])],
            );
            let m = c.matrix("a", 5, 192).unwrap();
            assert_eq!((m.shape.format, m.segments.len()), (format, 2));
            assert_eq!(
                m.segments[0].bytes + m.segments[1].bytes,
                m.shape.plane_bytes().unwrap().total()
            );
            says(c.matrix("a", 5, 160), &["a.weight", "mxfp4", "160"]);
            says(c.matrix("a", 6, 192), &["a.weight", "mxfp4", "6 x 192"]);
        }
    }

    #[test]
    fn what_the_config_names_must_agree() {
        let tensors: [(&str, &str, &[usize]); 3] = [
            ("a.weight", "U32", &[5, 24]),
            ("a.scales", "U8", &[5, 6]),
            ("a.biases", "BF16", &[5, 6]),
        ];
        let named = |of: Value| {
            checkpoint(&json!({"mode": "affine", "bits": 4, "group_size": 64, "a": of}), &tensors)
        };
        let right = json!({"mode": "mxfp4", "bits": 4, "group_size": 32});
        assert_eq!(named(right).matrix("a", 5, 192).unwrap().shape.format, Format::MXFP4);
        let wrong = json!({"mode": "nvfp4", "bits": 4, "group_size": 16});
        says(named(wrong).matrix("a", 5, 192), &["a.weight", "nvfp4", "mxfp4"]);
        says(
            named(json!({"bits": 8, "group_size": 32})).matrix("a", 5, 192),
            &["a.weight", "8 bits"],
        );
        says(
            checkpoint(&json!({"mode": "nf4"}), &tensors).matrix("a", 5, 192),
            &["a.weight", "nf4", "mxfp4"],
        );
        let global: [(&str, &str, &[usize]); 3] = [
            ("a.weight", "U32", &[5, 24]),
            ("a.scales", "U8", &[5, 12]),
            ("a.global_scale", "F32", &[1]),
        ];
        says(
            checkpoint(&json!({"mode": "nvfp4"}), &global).matrix("a", 5, 192),
            &["a.global_scale"],
        );
    }

    #[test]
    fn fp8_has_a_scale_per_block() {
        let both = |quantization: &Value, dtype, shape: &[usize]| {
            let tensors: [(&str, &str, &[usize]); 2] =
                [("a.weight", "F8_E4M3", &[129, 256]), ("a.weight_scale_inv", dtype, shape)];
            checkpoint(quantization, &tensors).matrix("a", 129, 256)
        };
        let format = |block_rows, block_cols, scale| Format::Scaled {
            element: Element::E4M3,
            block_rows,
            block_cols,
            scale,
        };
        let (f32, bf16) = (
            BlockScale::Plain(moeflux_compute::Scalar::F32),
            BlockScale::Plain(moeflux_compute::Scalar::BF16),
        );
        for (quantization, dtype, shape, wanted) in [
            (json!({"quant_method": "fp8"}), "F32", [2, 2], format(128, 128, f32)),
            (
                json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
                "BF16",
                [2, 2],
                format(128, 128, bf16),
            ),
            (json!({"weight_block_size": [64, 100]}), "F32", [3, 3], format(64, 100, f32)),
            (
                json!({"weight_block_size": [32, 32]}),
                "F8_E8M0",
                [5, 8],
                format(32, 32, BlockScale::E8M0),
            ),
        ] {
            assert_eq!(both(&quantization, dtype, &shape).unwrap().shape.format, wanted);
        }
        let plain = json!({"quant_method": "fp8"});
        says(
            both(&plain, "F32", &[1, 2]),
            &["a.weight_scale_inv", "[1, 2]", "[2, 2]", "weight_block_size"],
        );
        says(both(&plain, "I32", &[2, 2]), &["a.weight_scale_inv", "I32"]);
        let alone = checkpoint(&plain, &[("a.weight", "F8_E4M3", &[129, 256])]);
        says(alone.matrix("a", 129, 256), &["a.weight", "a.weight_scale_inv"]);
        let stack: [(&str, &str, &[usize]); 2] =
            [("x.up", "F8_E4M3", &[3, 130, 128]), ("x.up_scale_inv", "BF16", &[3, 2, 1])];
        let stack = checkpoint(&plain, &stack).stacked_plain("x.up", 3, 130, 128).unwrap();
        assert_eq!(stack.parts.iter().map(|s| s.bytes).collect::<Vec<_>>(), [130 * 128, 4]);
    }

    #[test]
    fn blocks_of_openai_are_stacks() {
        let tensors: [(&str, &str, &[usize]); 3] = [
            ("e.up_blocks", "U8", &[3, 10, 2, 16]),
            ("e.up_scales", "U8", &[3, 10, 2]),
            ("e.down_blocks", "BF16", &[3, 10, 2, 16]),
        ];
        let c = checkpoint(&json!({"quant_method": "mxfp4"}), &tensors);
        let stack = c.stacked_blocks("e.up", 3, 10, 64).unwrap();
        assert_eq!(stack.shape.format, Format::MXFP4);
        assert_eq!(stack.parts.iter().map(|s| s.bytes).collect::<Vec<_>>(), [320, 20]);
        says(c.stacked_blocks("e.up", 3, 10, 96), &["e.up_blocks", "[3, 10, 3, 16]"]);
        says(c.stacked_blocks("e.up", 3, 10, 65), &["e.up_blocks", "65"]);
        says(c.stacked_blocks("e.down", 3, 10, 64), &["e.down_blocks", "BF16", "U8"]);
        says(c.stacked_blocks("e.gate", 3, 10, 64), &["e.gate_blocks"]);
    }
}
