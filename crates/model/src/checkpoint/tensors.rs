//! Tensor lookup: a name and an expected shape to the location and format of a matrix or vector.
//!
//! The format follows from the tensors: `.scales` and `.biases` for MLX affine, `.scales` of bytes
//! for the microscaled modes, `weight_packed` for compressed-tensors, `qweight` for AWQ and GPTQ,
//! the names of scales for FP8 and FP4, otherwise the tensor's own type. `config.json` only has to
//! agree.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use moeflux_base::Error;
use moeflux_ops::{
    Affine, BlockType, FileLayout, Format, MatrixShape, OutputOrder, Scalar, ScaledBlocks,
};
use serde_json::Value;

use super::{
    compressed_tensors::PACKED,
    folder::Checkpoint,
    gguf::{GGUF, PAIRS_ADJACENT, VALUE_HEADS_DEALT},
    input_major::QWEIGHT,
    location::{Integers, MatrixSource, MatrixStack, TensorInfo, VectorChange, VectorSource},
    matrix_request::{MatrixRequest, QuantSize, WEIGHTS},
    quantization::WeightScheme,
    row_table::{RowShard, ShardRequest},
    source::{SourceChanges, StackLayout, StackRequest, TensorSource},
    tensor_names,
};

impl TensorSource for Checkpoint {
    fn config(&self) -> &Value {
        &self.config
    }

    fn folder(&self) -> &Path {
        &self.folder
    }

    fn config_path(&self) -> PathBuf {
        match self.gguf {
            Some(_) => self.folder.clone(),
            None => self.folder.join("config.json"),
        }
    }

    fn changes(&self) -> SourceChanges {
        self.changes
    }

    fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    fn rows(&self, tensor: &str) -> Option<usize> {
        match self.tensors.get(tensor)?.shape[..] {
            [rows, _] => Some(rows),
            _ => None,
        }
    }

    fn tensor_bytes(&self) -> Box<dyn Iterator<Item = (&str, u64)> + '_> {
        Box::new(self.tensors().map(|(name, t)| (name, t.bytes)))
    }

    fn tensor_error(&self, name: &str, problem: &str) -> Error {
        let path = match self.tensors.get(name) {
            Some(t) => self.files[t.file as usize].path().into(),
            None => self.folder.clone(),
        };
        Error::Tensor { tensor: name.into(), path, problem: problem.into() }
    }

    fn vector(&self, name: &str, shape: &[usize]) -> Result<VectorSource, Error> {
        let len = shape.iter().fold(1usize, |n, d| n.saturating_mul(*d));
        let t = self.tensor(name).map_err(|e| self.explain(e))?;
        // For unknown types the reader has not checked that the product fits.
        if t.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) != Some(len) {
            let problem = format!(
                "its shape {:?} does not hold the {len} values that {} asks for",
                t.shape,
                self.asker()
            );
            return Err(self.tensor_error(name, &problem));
        }
        let scalar = self.scalar(name, t)?;
        let (name, segment, change) = (name.into(), t.segment(), VectorChange::None);
        Ok(VectorSource { name, len, scalar, segment, change })
    }

    fn integers(&self, name: &str, shape: &[usize]) -> Result<Integers, Error> {
        let t = self.tensor(name).map_err(|e| self.explain(e))?;
        self.check_shape(name, t, shape)?;
        let size = match t.dtype.as_str() {
            "I64" => Some(8),
            "I32" if self.changes.ggml_types => Some(4),
            _ => None,
        };
        let len =
            size.and_then(|size| shape.iter().try_fold(size, |n: usize, d| n.checked_mul(*d)));
        if len.map(|len| len as u64) != Some(t.bytes) {
            let problem = format!("its type is {}, the model reads I64", t.dtype);
            return Err(self.tensor_error(name, &problem));
        }
        let segment = t.segment();
        let mut bytes = vec![0; segment.bytes];
        if !self.files[segment.file as usize].is_planned() {
            self.read(name, &segment, &mut bytes)?;
        }
        let values = match size {
            Some(4) => {
                let (values, _) = bytes.as_chunks::<4>();
                values.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect()
            }
            _ => {
                let (values, _) = bytes.as_chunks::<8>();
                values.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
            }
        };
        Ok(Integers { segment, values })
    }

    fn known_integers(&self, name: &str, values: Vec<i64>) -> Result<Integers, Error> {
        let found = self.integers(name, &[values.len()])?;
        if self.files[found.segment.file as usize].is_planned() {
            return Ok(Integers { values, ..found });
        }
        let differs = |(found, value): (&i64, &i64)| found != value;
        match found.values.iter().zip(&values).position(differs) {
            None => Ok(found),
            Some(i) => {
                let (is, value) = (found.values[i], values[i]);
                let problem = format!("number {i} is {is}, by config.json it is {value}");
                Err(self.tensor_error(name, &problem))
            }
        }
    }

    fn row_shard(&self, request: &ShardRequest<'_>) -> Result<RowShard, Error> {
        self.locate_shard(request)
    }

    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<MatrixSource, Error> {
        let suffix = WEIGHTS.into_iter().find(|suffix| self.has(&format!("{name}.{suffix}")));
        let weight = format!("{name}.{}", suffix.unwrap_or("weight"));
        self.single_matrix(name, &weight, rows, cols)
    }

    fn bare_matrix(&self, name: &str, rows: usize, cols: usize) -> Result<MatrixSource, Error> {
        self.single_matrix(name, name, rows, cols)
    }

    fn has_matrix(&self, name: &str) -> bool {
        WEIGHTS.iter().any(|suffix| self.has(&format!("{name}.{suffix}")))
    }

    fn stack(&self, request: &StackRequest<'_>) -> Result<MatrixStack, Error> {
        let &StackRequest { name, layout, count, rows, cols } = request;
        let weight = match layout {
            StackLayout::Weight | StackLayout::Rows => format!("{name}.weight"),
            StackLayout::Bare | StackLayout::ByInputs(_) => name.to_owned(),
            StackLayout::OpenAiBlocks => format!("{name}_blocks"),
        };
        let (count, by_rows) = (Some(count), layout == StackLayout::Rows);
        let request = MatrixRequest { name, weight: &weight, count, by_rows, rows, cols };
        let stack = match layout {
            StackLayout::Weight | StackLayout::Bare | StackLayout::Rows => self.detect(&request),
            StackLayout::ByInputs(order) => self.transposed_stack(&request, order),
            StackLayout::OpenAiBlocks => self.mxfp4_blocks(&request),
        };
        stack.map_err(|e| self.explain(e))
    }
}

impl Checkpoint {
    /// All tensors, in no particular order.
    #[doc(hidden)]
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, t)| (name.as_str(), t))
    }

    /// Location of a tensor.
    #[doc(hidden)]
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo, Error> {
        self.tensors.get(name).ok_or_else(|| {
            let problem = match self.findings.index.get(name) {
                None if self.gguf.is_some() => "no tensor of the file stands for it: the file is \
                                                incomplete, or made by an old converter"
                    .into(),
                Some(shard) => format!(
                    "the index places it in {shard}, which is whole but lacks it: take both from \
                     one download"
                ),
                None => format!(
                    "no shard has it, and none is short or missing: config.json asks for a tensor \
                     that this model does not have, or this layout is not supported{}",
                    tensor_names::like(name, self.tensors.keys().map(String::as_str))
                ),
            };
            Error::Tensor { tensor: name.into(), path: self.folder.clone(), problem }
        })
    }

    /// Adds to an error about a tensor that the model's quantisation is not read, if so.
    pub(super) fn explain(&self, error: Error) -> Error {
        match (error, &self.findings.foreign) {
            (Error::Tensor { tensor, path, .. }, Some(foreign)) => {
                Error::Tensor { tensor, path, problem: foreign.clone() }
            }
            (error, _) => error,
        }
    }

    /// Checks the quantisation of a matrix against config.json.
    pub(super) fn check_scheme(&self, weight: &str, scheme: WeightScheme) -> Result<(), Error> {
        let checked = self.quantization.check_scheme(scheme);
        checked.map_err(|problem| self.tensor_error(weight, &problem))
    }

    /// Floating-point type of a tensor.
    pub(super) fn scalar(&self, name: &str, t: &TensorInfo) -> Result<Scalar, Error> {
        match t.dtype.as_str() {
            "F32" => Ok(Scalar::F32),
            "F16" => Ok(Scalar::F16),
            "BF16" => Ok(Scalar::BF16),
            other => Err(self.tensor_error(
                name,
                &format!(
                    "its type {other} is not supported here: supported are F32, F16 and BF16, and \
                     as weights F8_E4M3, packed quants in U32 and I32, and FP4 in U8 and I8"
                ),
            )),
        }
    }

    /// The matrix whose weights are in the tensor `weight`.
    fn single_matrix(
        &self,
        name: &str,
        weight: &str,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixSource, Error> {
        let request = MatrixRequest { name, weight, count: None, by_rows: false, rows, cols };
        let stack = self.detect(&request).map_err(|e| self.explain(e))?;
        let MatrixStack { shape, layout, segments, order } = stack;
        Ok(MatrixSource { name: name.into(), shape, layout, segments, order })
    }

    /// Detects the format of the weight tensor and locates its planes.
    fn detect(&self, request: &MatrixRequest<'_>) -> Result<MatrixStack, Error> {
        let &MatrixRequest { name, weight, rows, cols, .. } = request;
        let t = self.tensor(weight)?;
        if weight.ends_with(QWEIGHT) {
            return self.input_major_matrix(request, t);
        }
        match t.dtype.as_str() {
            "I32" if weight.ends_with(PACKED) => self.pack_quantized_stack(request, t),
            "U32" if self.tensor(&format!("{name}.scales"))?.dtype == "U8" => {
                self.microscaled_stack(request, t)
            }
            "U32" => self.affine_stack(request, t),
            "F8_E4M3" => self.fp8_stack(request, t),
            "U8" | "I8" => self.fp4_stack(request, t),
            other if weight.ends_with(PACKED) => {
                let problem = format!(
                    "its type is {other}: packed quants in I32 and packed FP4 in U8 are read"
                );
                Err(self.tensor_error(weight, &problem))
            }
            kind => {
                let shape = request.tensor_shape(&[rows, cols]);
                let block = BlockType::from_type_name(kind).filter(|_| self.changes.ggml_types);
                if let Some(block) = block {
                    self.check_shape(weight, t, &shape)?;
                    return self.block_stack(request, block, t);
                }
                let format = Format::Plain(self.scalar(weight, t)?);
                self.check_shape(weight, t, &shape)?;
                let factor = format!("{name}.scale");
                if self.changes.ggml_types && self.has(&factor) {
                    let problem = format!("factors on {} are not read", t.dtype);
                    return Err(self.tensor_error(&factor, &problem));
                }
                self.build_stack(request, format, &[t])
            }
        }
    }

    /// Unquantized weights that are stored by inputs.
    fn transposed_stack(
        &self,
        request: &MatrixRequest<'_>,
        order: OutputOrder,
    ) -> Result<MatrixStack, Error> {
        let &MatrixRequest { weight, rows, cols, .. } = request;
        let t = self.tensor(weight)?;
        let format = Format::Plain(self.scalar(weight, t)?);
        self.check_shape(weight, t, &request.tensor_shape(&[cols, rows]))?;
        let stack = self.build_stack(request, format, &[t])?;
        let layout = FileLayout::Transposed(order);
        layout.plane_bytes(stack.shape).map_err(|e| self.tensor_error(weight, &e.to_string()))?;
        Ok(MatrixStack { layout, ..stack })
    }

    /// Blocks of ggml, with the factors that may be beside them: an f32 for each matrix.
    fn block_stack(
        &self,
        request: &MatrixRequest<'_>,
        block: BlockType,
        t: &TensorInfo,
    ) -> Result<MatrixStack, Error> {
        let name = format!("{}.scale", request.name);
        let Some(factors) = self.tensors.get(&name) else {
            return self.build_stack(request, Format::Blocks(block), &[t]);
        };
        let count = request.count.unwrap_or(1);
        if factors.dtype != Scalar::F32.name() || factors.bytes != 4 * count as u64 {
            let problem = format!(
                "it has {} bytes of {}, not an F32 for each of {count} matrices",
                factors.bytes, factors.dtype
            );
            return Err(self.tensor_error(&name, &problem));
        }
        self.build_stack(request, Format::ScaledBlocks(ScaledBlocks(block)), &[t, factors])
    }

    /// MLX affine quantisation: `.weight` of packed quants, `.scales` and `.biases`.
    fn affine_stack(
        &self,
        request: &MatrixRequest<'_>,
        t: &TensorInfo,
    ) -> Result<MatrixStack, Error> {
        let &MatrixRequest { name, weight, rows, cols, .. } = request;
        let (scales_name, biases_name) = (format!("{name}.scales"), format!("{name}.biases"));
        let scales = self.tensor(&scales_name)?;
        if !self.has(&biases_name) {
            let problem = "it has scales but no biases, so it is not affine, and its scales are \
                           not bytes, so it is none of mxfp4, nvfp4 and mxfp8: this quantisation \
                           is not supported";
            return Err(self.tensor_error(weight, problem));
        }
        let biases = self.tensor(&biases_name)?;
        let scale = self.scalar(&scales_name, scales)?;
        let packed = t.shape.last().copied().unwrap_or(0);
        let groups = scales.shape.last().copied().unwrap_or(0);
        let misfit = |problem: &str| {
            self.tensor_error(
                weight,
                &format!(
                    "{problem}: weight {:?}, scales {:?}, biases {:?} {}, for {rows} x {cols} as \
                     config.json asks",
                    t.shape, scales.shape, biases.shape, biases.dtype
                ),
            )
        };
        let Some(QuantSize { bits, group }) = QuantSize::from_shapes(cols, packed, groups) else {
            return Err(misfit("the quantised shapes do not fit"));
        };
        if t.shape != request.tensor_shape(&[rows, packed])
            || scales.shape != request.tensor_shape(&[rows, groups])
            || biases.shape != scales.shape
            || biases.dtype != scales.dtype
        {
            return Err(misfit("the quantised shapes do not fit together"));
        }
        let checked = self.quantization.check(name, "affine", bits.into(), group.into());
        checked.map_err(|p| misfit(&p))?;
        let format = Format::Affine(Affine { bits, group, scale });
        self.build_stack(request, format, &[t, scales, biases])
    }

    /// Checks a tensor against the shape that config.json asks for.
    pub(super) fn check_shape(
        &self,
        name: &str,
        t: &TensorInfo,
        expected: &[usize],
    ) -> Result<(), Error> {
        // GGUF leaves out outermost dimensions of one.
        let core = |shape: &[usize]| -> Vec<usize> {
            shape.iter().copied().skip_while(|n| self.changes.ggml_types && *n == 1).collect()
        };
        if core(&t.shape) == core(expected) {
            return Ok(());
        }
        let problem = format!("its shape is {:?}, {} asks for {expected:?}", t.shape, self.asker());
        Err(self.tensor_error(name, &problem))
    }

    /// Source of the settings that ask for tensors, in errors.
    fn asker(&self) -> &'static str {
        if self.gguf.is_some() { "the metadata" } else { "config.json" }
    }

    /// The requested matrices in a detected format, in tensors whose shapes were checked.
    pub(super) fn build_stack(
        &self,
        request: &MatrixRequest<'_>,
        format: Format,
        planes: &[&TensorInfo],
    ) -> Result<MatrixStack, Error> {
        let shape = MatrixShape { rows: request.rows, cols: request.cols, format };
        shape.plane_bytes().map_err(|e| self.tensor_error(request.weight, &e.to_string()))?;
        let count = request.count.unwrap_or(1);
        let segments = planes.iter().map(|t| t.first_of(count)).collect();
        Ok(MatrixStack { shape, layout: FileLayout::Planes, segments, order: None })
    }
}

/// Changes to the Hub's tensors, detected from names and shapes, and from the config that is made
/// of a GGUF file.
pub(super) fn detect_changes(
    config: &Value,
    tensors: &HashMap<String, TensorInfo>,
) -> SourceChanges {
    // Conversion to MLX transposes filters `[C, 1, width]`, renames `moe`, and adds 1 to the norms.
    let is_hub = |name: &str, shape: &[usize]| {
        let is_filter = name.ends_with(".linear_attn.conv1d.weight");
        (is_filter && shape.len() == 3 && shape[2] != 1) || name.ends_with(".moe.router_bias")
    };
    let is_gguf = config[GGUF].is_object();
    SourceChanges {
        one_added_to_norms: is_gguf || !tensors.iter().any(|(name, t)| is_hub(name, &t.shape)),
        kv_b_split: tensors.keys().any(|name| name.ends_with(".embed_q.weight")),
        ggml_types: is_gguf,
        decays_computed: is_gguf,
        value_heads_dealt: config[GGUF][VALUE_HEADS_DEALT] == true,
        pairs_adjacent: config[GGUF][PAIRS_ADJACENT] == true,
    }
}
