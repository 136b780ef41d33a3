//! Block-scaled FP4 and FP8 weights in their published layouts: MXFP4, NVFP4, MXFP8, FP8.

use moeflux_base::Error;
use moeflux_ops::{BlockScale, BlockScaled, Element, FileLayout, Format, MatrixFactor};

use super::{
    folder::Checkpoint,
    location::{MatrixStack, TensorInfo},
    matrix_request::MatrixRequest,
    quantization::{NumberKind, ScaledPart, WeightScheme},
    source::TensorSource,
};

/// Rows and columns of the blocks of FP8 that are published, for configs without
/// `weight_block_size`: DeepSeek-V3, DeepSeek-V4.1, MXFP8.
pub(super) const FP8_BLOCKS: [[u16; 2]; 3] = [[128, 128], [32, 32], [1, 32]];

/// Suffix of the scales of DeepSeek-V4.
const SCALE: &str = "scale";

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
            let problem = format!(
                "it has a scale for the whole tensor, {global}, which is not supported: take \
                 NVFP4 of ModelOpt or compressed-tensors, or MLX's without that scale"
            );
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

    /// FP8 with a tensor of scales beside the weights: `_scale_inv` or `_scale` behind the name of
    /// the weight tensor, or `.scale` behind that of the matrix. A scale belongs to a block, as in
    /// DeepSeek-V3, to a row or to the whole matrix. A weight is element *times* scale, whatever
    /// the name.
    pub(super) fn fp8_stack(
        &self,
        request: &MatrixRequest<'_>,
        t: &TensorInfo,
    ) -> Result<MatrixStack, Error> {
        let &MatrixRequest { name, weight, count, rows, cols, .. } = request;
        let names =
            [format!("{weight}_scale_inv"), format!("{weight}_scale"), format!("{name}.{SCALE}")];
        let Some(scales_name) = names.iter().find(|name| self.has(name)) else {
            let problem = format!(
                "it is F8_E4M3, but there is no {}: FP8 is supported only with a scale per block, \
                 row or matrix",
                names.join(" and no ")
            );
            return Err(self.tensor_error(weight, &problem));
        };
        self.check_shape(weight, t, &request.tensor_shape(&[rows, cols]))?;
        let scales = self.tensor(scales_name)?;
        let scale = match scales.dtype.as_str() {
            "F8_E8M0" | "U8" => BlockScale::E8M0,
            _ => BlockScale::Plain(self.scalar(scales_name, scales)?),
        };
        let blocks = |[block_rows, block_cols]: [u16; 2]| {
            [rows.div_ceil(block_rows.into()), cols.div_ceil(block_cols.into())]
        };
        let given = self.quantization.fp8_block();
        let candidates: Vec<_> = match given {
            Some(block) => vec![block],
            None => self.quantization.group_blocks().chain(FP8_BLOCKS).collect(),
        };
        let has = |shape: &[usize]| scales.shape == request.tensor_shape(shape);
        let fitting = candidates.into_iter().filter(|block| has(&blocks(*block)));
        let mut parts: Vec<_> = fitting.map(ScaledPart::Block).collect();
        if given.is_none() && (has(&[rows, 1]) || has(&[rows])) {
            parts.push(ScaledPart::Row);
        }
        if given.is_none() && scales.bytes == (count.unwrap_or(1) * scale.bytes()) as u64 {
            parts.push(ScaledPart::Matrix);
        }
        // Scales of narrow rows fit several parts: the config decides.
        let scheme = |part| WeightScheme { kind: NumberKind::Float, bits: 8, part };
        let agrees = |part: &&ScaledPart| self.quantization.check_scheme(scheme(**part)).is_ok();
        let Some(&part) = parts.iter().find(agrees).or(parts.first()) else {
            let block = given.unwrap_or(FP8_BLOCKS[0]);
            let [block_rows, block_cols] = block;
            let per_row = match given {
                Some(_) => String::new(),
                None => format!(" (a scale per row: {:?})", request.tensor_shape(&[rows, 1])),
            };
            let problem = format!(
                "its shape is {:?}: {rows} x {cols} weights in blocks of {block_rows} x \
                 {block_cols} (see \"weight_block_size\" in config.json) need {:?}{per_row}",
                scales.shape,
                request.tensor_shape(&blocks(block))
            );
            return Err(self.tensor_error(scales_name, &problem));
        };
        self.check_scheme(weight, scheme(part))?;
        let (layout, [block_rows, block_cols]) = match part {
            ScaledPart::Block(block) => (FileLayout::Planes, block),
            ScaledPart::Matrix => (FileLayout::OneScale, [1, self.row_block(weight, cols)?]),
            _ => (FileLayout::Planes, [1, self.row_block(weight, cols)?]),
        };
        let element = Element::E4M3;
        let format = Format::BlockScaled(BlockScaled { element, block_rows, block_cols, scale });
        let stack = self.build_stack(request, format, &[t, scales])?;
        Ok(MatrixStack { layout, ..stack })
    }

    /// Columns of a block that is a whole row.
    fn row_block(&self, weight: &str, cols: usize) -> Result<u16, Error> {
        u16::try_from(cols).map_err(|_| {
            let problem = format!("a scale for each row of {cols} columns is not supported");
            self.tensor_error(weight, &problem)
        })
    }

    /// FP4, two elements to a byte, with a tensor of scales beside it: `_scale` behind the name of
    /// the weight tensor without `_packed`, or `.scale` behind that of the matrix. Its type tells
    /// MXFP4 of compressed-tensors and of DeepSeek-V4 from NVFP4, which may have a factor for the
    /// whole matrix: ModelOpt's `_scale_2` multiplies, `_global_scale` of compressed-tensors
    /// divides.
    pub(super) fn fp4_stack(
        &self,
        request: &MatrixRequest<'_>,
        t: &TensorInfo,
    ) -> Result<MatrixStack, Error> {
        let &MatrixRequest { name, weight, count, rows, cols, .. } = request;
        let base = weight.strip_suffix("_packed").unwrap_or(weight);
        let names = [format!("{base}_scale"), format!("{name}.{SCALE}")];
        let Some(scales_name) = names.iter().find(|name| self.has(name)) else {
            let problem =
                format!("it is {}, but there is no {} of FP4", t.dtype, names.join(" and no "));
            return Err(self.tensor_error(weight, &problem));
        };
        let scales = self.tensor(scales_name)?;
        let (group, format) = match scales.dtype.as_str() {
            "F8_E8M0" | "U8" => (32, Format::MXFP4),
            "F8_E4M3" => (16, Format::NVFP4),
            other => {
                let problem = format!(
                    "its type is {other}, beside weights of {}: FP4 has scales of F8_E8M0, U8 or \
                     F8_E4M3",
                    t.dtype
                );
                return Err(self.tensor_error(scales_name, &problem));
            }
        };
        if !cols.is_multiple_of(group) {
            let problem =
                format!("{cols} columns, as config.json asks, are not a multiple of {group}");
            return Err(self.tensor_error(weight, &problem));
        }
        self.check_shape(weight, t, &request.tensor_shape(&[rows, cols / 2]))?;
        self.check_shape(scales_name, scales, &request.tensor_shape(&[rows, cols / group]))?;
        let part = ScaledPart::Group(group);
        self.check_scheme(weight, WeightScheme { kind: NumberKind::Float, bits: 4, part })?;
        let factors = [
            (format!("{base}_scale_2"), MatrixFactor::Multiplies),
            (format!("{base}_global_scale"), MatrixFactor::Divides),
        ];
        let Some((factor_name, factor)) = factors.iter().find(|(name, _)| self.has(name)) else {
            return self.build_stack(request, format, &[t, scales]);
        };
        let factors = self.tensor(factor_name)?;
        if group != 16 || factors.dtype != "F32" || factors.bytes != 4 * count.unwrap_or(1) as u64 {
            let problem = format!(
                "it is {} {:?}: supported is one F32 for each matrix of NVFP4",
                factors.dtype, factors.shape
            );
            return Err(self.tensor_error(factor_name, &problem));
        }
        let stack = self.build_stack(request, Format::NVFP4_WIDE, &[t, scales, factors])?;
        Ok(MatrixStack { layout: FileLayout::FactoredScales(*factor), ..stack })
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
                "U8" | "I8" | "F8_E4M3" | "F8_E8M0" => 1,
                "BF16" | "F16" => 2,
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
            BlockScale::Plain(moeflux_ops::Scalar::F32),
            BlockScale::Plain(moeflux_ops::Scalar::BF16),
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

    /// Format and layout of FP8 weights of 129 x 256 with these scales.
    fn fp8(
        quantization: &Value,
        suffix: &str,
        dtype: &str,
        shape: &[usize],
    ) -> Result<(Format, FileLayout), Error> {
        let scales = format!("a.{suffix}");
        let tensors: [(&str, &str, &[usize]); 3] = [
            ("a.weight", "F8_E4M3", &[129, 256]),
            (&scales, dtype, shape),
            ("a.input_scale", "F32", &[]),
        ];
        let m = checkpoint(quantization, &tensors).matrix("a", 129, 256)?;
        Ok((m.shape.format, m.layout))
    }

    #[test]
    fn scales_of_fp8_have_several_names_and_sizes() {
        let none = json!({"quant_method": "compressed-tensors"});
        let e8m0 = BlockScale::E8M0;
        let bf16 = BlockScale::Plain(moeflux_ops::Scalar::BF16);
        for (suffix, dtype, shape, [block_rows, block_cols], scale) in [
            ("scale", "F8_E8M0", &[2, 2][..], [128, 128], e8m0),
            ("scale", "F8_E8M0", &[5, 8], [32, 32], e8m0),
            ("weight_scale", "U8", &[129, 8], [1, 32], e8m0),
            ("weight_scale_inv", "F8_E8M0", &[129, 8], [1, 32], e8m0),
            ("weight_scale", "BF16", &[2, 2], [128, 128], bf16),
            ("weight_scale", "BF16", &[129, 1], [1, 256], bf16),
            ("weight_scale", "BF16", &[129], [1, 256], bf16),
            ("weight_scale", "BF16", &[], [1, 256], bf16),
            ("weight_scale", "BF16", &[1], [1, 256], bf16),
        ] {
            let element = Element::E4M3;
            let format =
                Format::BlockScaled(BlockScaled { element, block_rows, block_cols, scale });
            let layout = match shape.iter().product() {
                1 => FileLayout::OneScale,
                _ => FileLayout::Planes,
            };
            assert_eq!(fp8(&none, suffix, dtype, shape).unwrap(), (format, layout), "{shape:?}");
        }
        says(fp8(&none, "weight_scale", "BF16", &[3]), &["a.weight_scale", "[3]", "[129"]);
        says(fp8(&none, "weight_scale", "I32", &[1]), &["a.weight_scale", "I32"]);
        let stack: [(&str, &str, &[usize]); 2] =
            [("x.up", "F8_E4M3", &[3, 130, 128]), ("x.up_scale", "F32", &[3, 1, 1])];
        let layout = StackLayout::Bare;
        let request = StackRequest { name: "x.up", layout, count: 3, rows: 130, cols: 128 };
        let stack = checkpoint(&none, &stack).stack(&request).unwrap();
        assert_eq!(stack.layout, FileLayout::OneScale);
        assert_eq!(stack.segments.iter().map(|s| s.bytes).collect::<Vec<_>>(), [130 * 128, 4]);
    }

    #[test]
    fn groups_of_the_config_must_agree() {
        let groups = |weights: Value| json!({"config_groups": {"group_0": {"weights": weights}}});
        let right = [
            json!({"num_bits": 8, "type": "float", "strategy": "block"}),
            json!({"num_bits": 8, "type": "float", "block_structure": [128, 128]}),
        ];
        for weights in right {
            assert!(fp8(&groups(weights), "weight_scale", "F32", &[2, 2]).is_ok());
        }
        for weights in [
            json!({"num_bits": 8, "type": "float", "strategy": "channel"}),
            json!({"num_bits": 8, "type": "float", "block_structure": [64, 64]}),
            json!({"num_bits": 4, "type": "float", "group_size": 16}),
            json!({"num_bits": 8, "type": "int", "strategy": "block"}),
        ] {
            let found = fp8(&groups(weights), "weight_scale", "F32", &[2, 2]);
            says(found, &["a.weight", "floats of 8 bits in blocks of 128 x 128", "config.json"]);
        }
        let tensor = json!({"num_bits": 8, "type": "float", "strategy": "tensor"});
        assert!(fp8(&groups(tensor.clone()), "weight_scale", "F32", &[]).is_ok());
        // A row of 32 columns is a block, too.
        let narrow: [(&str, &str, &[usize]); 2] =
            [("b.weight", "F8_E4M3", &[9, 32]), ("b.weight_scale", "F32", &[9, 1])];
        let channel = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
        assert!(checkpoint(&groups(channel), &narrow).matrix("b", 9, 32).is_ok());
        says(fp8(&groups(tensor), "weight_scale", "F32", &[129, 1]), &["a scale per row"]);
    }

    /// FP4 weights of 10 x 64 with these scales and a factor.
    fn fp4(
        weights: [&str; 2],
        scales: (&str, &str, usize),
        factor: Option<(&str, &[usize])>,
    ) -> Result<(Format, FileLayout), Error> {
        let (weight, scales_name) = (format!("a.{}", weights[0]), format!("a.{}", scales.0));
        let shape = [10, 64 / scales.2];
        let mut tensors: Vec<(&str, &str, &[usize])> =
            vec![(&weight, weights[1], &[10, 32]), (&scales_name, scales.1, &shape)];
        let factor_name = format!("a.{}", factor.map_or("", |f| f.0));
        if let Some((_, shape)) = factor {
            tensors.push((&factor_name, "F32", shape));
        }
        let m = checkpoint(&json!({}), &tensors).matrix("a", 10, 64)?;
        Ok((m.shape.format, m.layout))
    }

    #[test]
    fn fp4_is_told_by_its_scales() {
        let plain = FileLayout::Planes;
        let packed = ["weight_packed", "U8"];
        for (weights, scales) in [
            (packed, ("weight_scale", "U8", 32)),
            (["weight", "I8"], ("scale", "F8_E8M0", 32)),
            (["weight", "U8"], ("weight_scale", "F8_E8M0", 32)),
        ] {
            assert_eq!(fp4(weights, scales, None).unwrap(), (Format::MXFP4, plain));
        }
        let e4m3 = ("weight_scale", "F8_E4M3", 16);
        assert_eq!(fp4(["weight", "U8"], e4m3, None).unwrap(), (Format::NVFP4, plain));
        for (weights, factor, effect) in [
            (["weight", "U8"], ("weight_scale_2", &[][..]), MatrixFactor::Multiplies),
            (packed, ("weight_global_scale", &[1]), MatrixFactor::Divides),
        ] {
            let expected = (Format::NVFP4_WIDE, FileLayout::FactoredScales(effect));
            assert_eq!(fp4(weights, e4m3, Some(factor)).unwrap(), expected);
        }
        says(fp4(packed, ("weight_scale", "U8", 16), None), &["a.weight_scale", "[10, 2]"]);
        says(fp4(packed, ("weight_scale", "BF16", 32), None), &["a.weight_scale", "BF16", "FP4"]);
        says(fp4(packed, ("scales", "U8", 32), None), &["a.weight_packed", "a.weight_scale"]);
        let two = Some(("weight_global_scale", &[2][..]));
        says(fp4(packed, e4m3, two), &["a.weight_global_scale", "[2]", "NVFP4"]);
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
