//! Integers with zero points as AWQ and GPTQ publish them: stored by inputs, laid out anew where
//! they land.

use moeflux_base::Error;
use moeflux_ops::{Affine, FileLayout, Format, InputMajor, Scalar, WordAxis};

use super::{
    folder::Checkpoint,
    location::{MatrixStack, TensorInfo},
    matrix_request::MatrixRequest,
    source::TensorSource,
};

/// Suffix of the tensor that holds the quants.
pub(super) const QWEIGHT: &str = "qweight";

/// Most inputs that share a scale in memory.
const MAX_GROUP: usize = 128;

/// Shapes of `qweight` in a method, for quants of some bits.
#[derive(Clone, Copy)]
struct InputMajorForm {
    method: &'static str,
    words: WordAxis,
    bits: u8,
}

impl InputMajorForm {
    /// All forms that are read.
    fn all() -> impl Iterator<Item = Self> {
        [("awq", WordAxis::Outputs), ("gptq", WordAxis::Inputs)]
            .into_iter()
            .flat_map(|(method, words)| [4, 8].map(|bits| Self { method, words, bits }))
    }

    fn per_word(self) -> usize {
        32 / usize::from(self.bits)
    }

    /// Shape of `qweight`; `None` if the quants do not fill words.
    fn shape(self, rows: usize, cols: usize) -> Option<[usize; 2]> {
        let n = self.per_word();
        match self.words {
            WordAxis::Outputs => rows.is_multiple_of(n).then_some([cols, rows / n]),
            WordAxis::Inputs => cols.is_multiple_of(n).then_some([cols / n, rows]),
        }
    }
}

impl Checkpoint {
    /// AWQ and GPTQ: `qweight` of quants in 32-bit words, `scales` `[inputs / group, outputs]` and
    /// `qzeros` of zero points in words. `w = scale * (q - zero)`.
    pub(super) fn input_major_matrix(
        &self,
        request: &MatrixRequest<'_>,
        t: &TensorInfo,
    ) -> Result<MatrixStack, Error> {
        let &MatrixRequest { name, weight, rows, cols, .. } = request;
        let fits = |form: &InputMajorForm| {
            t.dtype == "I32" && form.shape(rows, cols).is_some_and(|shape| t.shape == shape)
        };
        let Some(form) = InputMajorForm::all().find(fits) else {
            let problem = format!(
                "it is {} {:?}: I32 of AWQ or GPTQ with 4 or 8 bits is read, of {rows} x {cols} \
                 weights as config.json asks",
                t.dtype, t.shape
            );
            return Err(self.tensor_error(weight, &problem));
        };
        let InputMajorForm { method, words, bits } = form;
        let (scales_name, zeros_name) = (format!("{name}.scales"), format!("{name}.qzeros"));
        let (scales, zeros) = (self.tensor(&scales_name)?, self.tensor(&zeros_name)?);
        let scale = self.scalar(&scales_name, scales)?;
        let groups = scales.shape.first().copied().unwrap_or(0);
        let group = cols.checked_div(groups).unwrap_or(0);
        let in_memory = group.min(MAX_GROUP);
        let is_read =
            matches!(in_memory, 16 | 32 | 64 | MAX_GROUP) && group.is_multiple_of(in_memory);
        if scale == Scalar::F32 || !is_read || group * groups != cols {
            let problem = format!(
                "it is {} {:?} for {cols} inputs, in groups of {group}: {method} is read with \
                 scales of 16 bits for groups of 16, 32, 64 or a multiple of 128; take a \
                 quantisation with such groups",
                scales.dtype, scales.shape
            );
            return Err(self.tensor_error(&scales_name, &problem));
        }
        self.check_shape(&scales_name, scales, &[groups, rows])?;
        self.check_shape(&zeros_name, zeros, &[groups, rows / form.per_word()])?;
        if zeros.dtype != "I32" {
            let problem = format!("its type is {}, {method} has I32", zeros.dtype);
            return Err(self.tensor_error(&zeros_name, &problem));
        }
        let checked = self.quantization.check_input_major(method, bits, group);
        checked.map_err(|problem| self.tensor_error(weight, &problem))?;
        // It is not read where config.json says that it is in order.
        let order = match self.quantization.may_order_inputs() {
            true => self.input_order(&format!("{name}.g_idx"), cols, group)?,
            false => None,
        };
        let zero_offset = match words {
            WordAxis::Outputs => 0,
            WordAxis::Inputs => self.quantization.gptq_zero_offset(),
        };
        let affine = Affine { bits, group: in_memory as u16, scale: Scalar::F32 };
        let stack = self.build_stack(request, Format::Affine(affine), &[t, scales, zeros])?;
        let layout =
            FileLayout::InputMajor(InputMajor { words, zero_offset, group: group as u32, scale });
        layout.plane_bytes(stack.shape).map_err(|e| self.tensor_error(weight, &e.to_string()))?;
        Ok(MatrixStack { layout, order, ..stack })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{
        super::{
            block_scaled::tests::{checkpoint, says},
            location::MatrixSource,
        },
        *,
    };

    /// The matrix `a`, 64 x 256, of tensors with these shapes.
    fn matrix(
        quantization: &Value,
        qweight: [usize; 2],
        groups: usize,
        more: &[(&str, &str, &[usize])],
    ) -> Result<MatrixSource, Error> {
        let zeros = [groups, if qweight[1] == 16 || qweight[0] == 64 { 16 } else { 8 }];
        let scales = [groups, 64];
        let mut tensors: Vec<(&str, &str, &[usize])> = vec![
            ("a.qweight", "I32", &qweight),
            ("a.scales", "F16", &scales),
            ("a.qzeros", "I32", &zeros),
        ];
        tensors.extend(more);
        checkpoint(quantization, &tensors).matrix("a", 64, 256)
    }

    #[test]
    fn method_bits_and_group_follow_from_the_shapes() {
        for (qweight, words, bits) in [
            ([256, 8], WordAxis::Outputs, 4),
            ([256, 16], WordAxis::Outputs, 8),
            ([32, 64], WordAxis::Inputs, 4),
            ([64, 64], WordAxis::Inputs, 8),
        ] {
            for (groups, group) in [(16, 16), (8, 32), (4, 64), (2, 128), (1, 128)] {
                let m = matrix(&json!({}), qweight, groups, &[]).unwrap();
                let affine = Affine { bits, group, scale: Scalar::F32 };
                let layout = InputMajor {
                    words,
                    zero_offset: u8::from(words == WordAxis::Inputs),
                    group: 256 / groups as u32,
                    scale: Scalar::F16,
                };
                assert_eq!(m.shape.format, Format::Affine(affine));
                assert_eq!(m.layout, FileLayout::InputMajor(layout));
                assert_eq!(m.segments.len(), 3);
            }
        }
        let second = json!({"quant_method": "gptq", "checkpoint_format": "gptq_v2"});
        let layout = matrix(&second, [32, 64], 2, &[]).unwrap().layout;
        assert!(matches!(layout, FileLayout::InputMajor(InputMajor { zero_offset: 0, .. })));
    }

    #[test]
    fn settings_must_agree() {
        let gptq = |key: &str, value: Value| {
            let mut settings = json!({"quant_method": "gptq", "bits": 4, "group_size": 64});
            settings[key] = value;
            settings
        };
        let read = |settings: &Value| matrix(settings, [32, 64], 4, &[]);
        assert!(read(&gptq("sym", json!(true))).is_ok());
        assert!(matrix(&gptq("group_size", json!(-1)), [32, 64], 1, &[]).is_ok());
        assert!(read(&json!({"bits": 8, "dynamic": {}})).is_ok());
        for (settings, part) in [
            (gptq("quant_method", json!("awq")), "awq"),
            (gptq("bits", json!(8)), "4 bits in groups of 64"),
            (gptq("group_size", json!(128)), "4 bits in groups of 64"),
            (gptq("checkpoint_format", json!("marlin")), "marlin"),
        ] {
            says(read(&settings), &["a.qweight", part]);
        }
        let awq = json!({"quant_method": "awq", "version": "gemv"});
        says(matrix(&awq, [256, 8], 4, &[]), &["a.qweight", "gemv", "gemm"]);
    }

    #[test]
    fn other_layouts_are_refused() {
        let none = json!({});
        says(matrix(&none, [24, 64], 4, &[]), &["a.qweight", "[24, 64]", "64 x 256", "4 or 8"]);
        let parts = ["a.scales", "[32, 64]", "groups of 8", "gptq", "groups of 16, 32, 64"];
        says(matrix(&none, [32, 64], 32, &[]), &parts);
        says(matrix(&none, [32, 64], 0, &[]), &["a.scales", "[0, 64]"]);
        // The indexes in the file are zeros.
        let order: [(&str, &str, &[usize]); 1] = [("a.g_idx", "I32", &[256])];
        says(matrix(&none, [32, 64], 4, &order), &["a.g_idx", "group 0", "64 inputs"]);
        assert!(matrix(&none, [32, 64], 1, &order).is_ok());
        assert!(matrix(&json!({"desc_act": false}), [32, 64], 4, &order).is_ok());
        let lone = checkpoint(&none, &[("a.qweight", "I32", &[32, 64])]);
        says(lone.matrix("a", 64, 256), &["a.scales"]);
    }
}
