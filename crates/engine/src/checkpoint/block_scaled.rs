//! Block-scaled FP4 and FP8 weights in their published layouts: MXFP4, NVFP4, MXFP8, DeepSeek FP8.

use moeflux_compute::{BlockScale, BlockScaled, Element, Format};

use super::{
    Checkpoint,
    location::{MatrixStack, TensorInfo},
    source::TensorSource,
    tensors::MatrixRequest,
};
use crate::base::error::Error;

/// Quantisation mode of MLX whose scales are bytes.
#[derive(Clone, Copy)]
struct MicroscaledMode {
    name: &'static str,
    format: Format,
    bits: usize,
    group: usize,
}

const MODES: [MicroscaledMode; 3] = [
    MicroscaledMode { name: "mxfp4", format: Format::MXFP4, bits: 4, group: 32 },
    MicroscaledMode { name: "nvfp4", format: Format::NVFP4, bits: 4, group: 16 },
    MicroscaledMode { name: "mxfp8", format: Format::MXFP8, bits: 8, group: 32 },
];

impl Checkpoint {
    /// MLX layout: `.weight` of elements packed in 32-bit words, `.scales` of bytes, no biases.
    pub(super) fn microscaled_stack(
        &self,
        request: &MatrixRequest<'_>,
        t: &TensorInfo,
    ) -> Result<MatrixStack, Error> {
        let &MatrixRequest { name, weight, rows, cols, .. } = request;
        let scales = self.tensor(&format!("{name}.scales"))?;
        let global = format!("{name}.global_scale");
        if self.has(&global) {
            let problem =
                format!("it has a scale for the whole tensor, {global}, which is not supported");
            return Err(self.tensor_error(weight, &problem));
        }
        // The mode follows from the shapes, as each has different bytes per row.
        let fits = |mode: &MicroscaledMode| {
            let [row, scale_row, _] = mode.format.planes(cols).map(|plane| plane.row_bytes);
            t.shape == request.tensor_shape(&[rows, row / 4])
                && row.is_multiple_of(4)
                && cols.is_multiple_of(mode.group)
                && scales.shape == request.tensor_shape(&[rows, scale_row])
        };
        let misfit = |problem: &str| {
            self.tensor_error(
                weight,
                &format!(
                    "{problem}: weight {:?}, scales {:?} {}, for {rows} x {cols} as config.json asks",
                    t.shape, scales.shape, scales.dtype
                ),
            )
        };
        let Some(mode) = MODES.into_iter().find(fits) else {
            return Err(misfit("the quantised shapes fit none of mxfp4, nvfp4 and mxfp8"));
        };
        let MicroscaledMode { name: mode, format, bits, group } = mode;
        self.quantization.check(name, mode, bits, group).map_err(|p| misfit(&p))?;
        self.build_stack(request, format, &[t, scales])
    }

    /// FP8 with a scale per block, as in DeepSeek-V3: the weight tensor, and a tensor of scales
    /// with the suffix `_scale_inv`. Despite that name, a weight is element *times* scale.
    pub(super) fn fp8_stack(
        &self,
        request: &MatrixRequest<'_>,
        t: &TensorInfo,
    ) -> Result<MatrixStack, Error> {
        let &MatrixRequest { weight, rows, cols, .. } = request;
        let scales_name = format!("{weight}_scale_inv");
        if !self.has(&scales_name) {
            let problem = format!(
                "it is F8_E4M3, but there is no {scales_name}: FP8 is supported only with a scale \
                 per block"
            );
            return Err(self.tensor_error(weight, &problem));
        }
        let scales = self.tensor(&scales_name)?;
        let scale = match scales.dtype.as_str() {
            "F8_E8M0" => BlockScale::E8M0,
            _ => BlockScale::Plain(self.scalar(&scales_name, scales)?),
        };
        let [block_rows, block_cols] = self.quantization.fp8_block();
        self.check_shape(weight, t, &request.tensor_shape(&[rows, cols]))?;
        let blocks = [rows.div_ceil(block_rows.into()), cols.div_ceil(block_cols.into())];
        if scales.shape != request.tensor_shape(&blocks) {
            let problem = format!(
                "its shape is {:?}: {rows} x {cols} weights in blocks of {block_rows} x \
                 {block_cols} (see \"weight_block_size\" in config.json) need {:?}",
                scales.shape,
                request.tensor_shape(&blocks)
            );
            return Err(self.tensor_error(&scales_name, &problem));
        }
        let format = Format::BlockScaled(BlockScaled {
            element: Element::E4M3,
            block_rows,
            block_cols,
            scale,
        });
        self.build_stack(request, format, &[t, scales])
    }

    /// MXFP4 in OpenAI's layout: `name_blocks` of bytes, `[count, rows, cols / 32, 16]`, and
    /// `name_scales` of bytes, `[count, rows, cols / 32]`.
    pub(super) fn mxfp4_blocks(&self, request: &MatrixRequest<'_>) -> Result<MatrixStack, Error> {
        let &MatrixRequest { name, weight: blocks, rows, cols, .. } = request;
        let scales = format!("{name}_scales");
        if !cols.is_multiple_of(32) {
            let problem =
                format!("{cols} columns, as config.json asks, are not a multiple of blocks of 32");
            return Err(self.tensor_error(blocks, &problem));
        }
        let bytes = |name: &str, shape: &[usize]| {
            let t = self.tensor(name)?;
            if t.dtype != "U8" {
                return Err(
                    self.tensor_error(name, &format!("its type is {}, MXFP4 has U8", t.dtype))
                );
            }
            self.check_shape(name, t, &request.tensor_shape(shape)).map(|()| t)
        };
        let planes = [bytes(blocks, &[rows, cols / 32, 16])?, bytes(&scales, &[rows, cols / 32])?];
        self.build_stack(request, Format::MXFP4, &planes)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::{collections::HashMap, path::Path};

    use serde_json::{Value, json};

    use super::{
        super::{
            data_file::DataFile,
            source::{StackLayout, StackRequest},
        },
        *,
    };

    /// A checkpoint with these zero-filled tensors.
    pub(in crate::checkpoint) fn checkpoint(
        quantization: &Value,
        tensors: &[(&str, &str, &[usize])],
    ) -> Checkpoint {
        let (mut header, mut offset) = (serde_json::Map::new(), 0);
        for (name, dtype, shape) in tensors {
            let size = match *dtype {
                "U8" | "F8_E4M3" | "F8_E8M0" => 1,
                "BF16" => 2,
                "I64" => 8,
                _ => 4,
            };
            let end = offset + size * shape.iter().product::<usize>();
            header.insert(
                (*name).into(),
                json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}),
            );
            offset = end;
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + offset, 0);
        let config = json!({"quantization": quantization}).to_string().into_bytes();
        let files = vec![DataFile::embedded("model.safetensors", file.leak())];
        Checkpoint::assemble(Path::new("folder"), files, HashMap::from([("config.json", config)]))
            .unwrap()
    }

    pub(in crate::checkpoint) fn says<T>(result: Result<T, Error>, parts: &[&str]) {
        let message = result.err().unwrap().to_string();
        assert!(
            parts.iter().all(|part| message.contains(part)),
            "{message:?} does not contain {parts:?}"
        );
    }

    #[test]
    fn mlx_modes_follow_from_the_shapes() {
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
    fn settings_by_tensor_name_must_agree() {
        let tensors: [(&str, &str, &[usize]); 3] = [
            ("a.weight", "U32", &[5, 24]),
            ("a.scales", "U8", &[5, 6]),
            ("a.biases", "BF16", &[5, 6]),
        ];
        let named = |settings: Value| {
            let quantization =
                json!({"mode": "affine", "bits": 4, "group_size": 64, "a": settings});
            checkpoint(&quantization, &tensors)
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
        let with_scales = |quantization: &Value, dtype, shape: &[usize]| {
            let tensors: [(&str, &str, &[usize]); 2] =
                [("a.weight", "F8_E4M3", &[129, 256]), ("a.weight_scale_inv", dtype, shape)];
            checkpoint(quantization, &tensors).matrix("a", 129, 256)
        };
        let format = |block_rows, block_cols, scale| {
            Format::BlockScaled(BlockScaled {
                element: Element::E4M3,
                block_rows,
                block_cols,
                scale,
            })
        };
        let (f32, bf16) = (
            BlockScale::Plain(moeflux_compute::Scalar::F32),
            BlockScale::Plain(moeflux_compute::Scalar::BF16),
        );
        for (quantization, dtype, shape, expected) in [
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
            assert_eq!(with_scales(&quantization, dtype, &shape).unwrap().shape.format, expected);
        }
        let plain = json!({"quant_method": "fp8"});
        says(
            with_scales(&plain, "F32", &[1, 2]),
            &["a.weight_scale_inv", "[1, 2]", "[2, 2]", "weight_block_size"],
        );
        says(with_scales(&plain, "I32", &[2, 2]), &["a.weight_scale_inv", "I32"]);
        let alone = checkpoint(&plain, &[("a.weight", "F8_E4M3", &[129, 256])]);
        says(alone.matrix("a", 129, 256), &["a.weight", "a.weight_scale_inv"]);
        let stack: [(&str, &str, &[usize]); 2] =
            [("x.up", "F8_E4M3", &[3, 130, 128]), ("x.up_scale_inv", "BF16", &[3, 2, 1])];
        let request = StackRequest {
            name: "x.up",
            layout: StackLayout::Bare,
            count: 3,
            rows: 130,
            cols: 128,
        };
        let stack = checkpoint(&plain, &stack).stack(&request).unwrap();
        assert_eq!(stack.segments.iter().map(|s| s.bytes).collect::<Vec<_>>(), [130 * 128, 4]);
    }

    #[test]
    fn openai_blocks_are_mxfp4_stacks() {
        let tensors: [(&str, &str, &[usize]); 3] = [
            ("e.up_blocks", "U8", &[3, 10, 2, 16]),
            ("e.up_scales", "U8", &[3, 10, 2]),
            ("e.down_blocks", "BF16", &[3, 10, 2, 16]),
        ];
        let c = checkpoint(&json!({"quant_method": "mxfp4"}), &tensors);
        let stacked = |name, cols| {
            let layout = StackLayout::OpenAiBlocks;
            c.stack(&StackRequest { name, layout, count: 3, rows: 10, cols })
        };
        let stack = stacked("e.up", 64).unwrap();
        assert_eq!(stack.shape.format, Format::MXFP4);
        assert_eq!(stack.segments.iter().map(|s| s.bytes).collect::<Vec<_>>(), [320, 20]);
        says(stacked("e.up", 96), &["e.up_blocks", "[3, 10, 3, 16]"]);
        says(stacked("e.up", 65), &["e.up_blocks", "65"]);
        says(stacked("e.down", 64), &["e.down_blocks", "BF16", "U8"]);
        says(stacked("e.gate", 64), &["e.gate_blocks"]);
    }
}
